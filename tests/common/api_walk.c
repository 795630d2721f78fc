#include "tests/common/api_walk.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/hash.h"

uint64_t api_random(uint64_t *state)
{
    uint64_t z = (*state += 0x9e3779b97f4a7c15u);

    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

/* ---- fields -----------------------------------------------------------------------------------
 */

static void note(struct api_walk *walk, const char *name, const void *at, size_t bytes)
{
    if (walk->fields_count == walk->fields_room) { /* most have few: no large block for each */
        walk->fields_room = KVT_MAX(256u, 2 * walk->fields_room);
        walk->fields = realloc(walk->fields, walk->fields_room * sizeof(*walk->fields));
        KVT_ASSERT(walk->fields != NULL);
    }
    walk->fields[walk->fields_count++] =
        (struct api_field){.name = name, .hash = kvt_hash64(at, bytes, bytes)};
}

static uint64_t pick(struct api_walk *walk, uint64_t least, uint64_t most)
{
    uint64_t span = most - least;
    uint64_t value = api_random(&walk->random);

    if ((value & 7) == 0) /* limits come often */
        return (value & 8) != 0 ? least : most;
    return span == UINT64_MAX ? api_random(&walk->random)
                              : least + api_random(&walk->random) % (span + 1);
}

static void walk_u64(struct api_walk *walk, const char *name, uint64_t *at, uint64_t least,
                     uint64_t most)
{
    if (walk->is_filling)
        *at = pick(walk, least, most);
    else
        note(walk, name, at, sizeof(*at));
}

static void walk_u32(struct api_walk *walk, const char *name, uint32_t *at, uint64_t least,
                     uint64_t most)
{
    if (walk->is_filling)
        *at = (uint32_t)pick(walk, least, KVT_MIN(most, (uint64_t)UINT32_MAX));
    else
        note(walk, name, at, sizeof(*at));
}

static void walk_bool(struct api_walk *walk, const char *name, bool *at)
{
    if (walk->is_filling)
        *at = (api_random(&walk->random) & 1) != 0;
    else
        note(walk, name, at, sizeof(*at));
}

#define U64(name, at) walk_u64(walk, name, at, 0, UINT64_MAX)
#define U32(name, at) walk_u32(walk, name, at, 0, UINT32_MAX)

static void walk_enum(struct api_walk *walk, const char *name, void *at, uint32_t most)
{
    walk_u32(walk, name, at, 0, most);
}

/* @bytes of memory. */
static void walk_raw(struct api_walk *walk, const char *name, void *at, size_t bytes)
{
    uint8_t *to = at;

    if (!walk->is_filling) {
        note(walk, name, at, bytes);
        return;
    }
    for (size_t i = 0; i < bytes; i++)
        to[i] = (uint8_t)api_random(&walk->random);
}

static void *take(struct api_walk *walk, size_t count, size_t bytes)
{
    void *at = kvt_arena_array(walk->arena, count, bytes);

    KVT_ASSERT(at != NULL);
    return at;
}

static void walk_blob(struct api_walk *walk, const char *name, struct kvt_text *text,
                      uint32_t bytes_max)
{
    if (walk->is_filling) {
        text->bytes =
            (uint32_t)pick(walk, 0, walk->size == 0 ? KVT_MIN(bytes_max, 40u) : bytes_max);
        text->at = take(walk, text->bytes + 1u, 1);
    }
    walk_raw(walk, name, (char *)(uintptr_t)text->at, text->bytes);
}

/* UTF-8: some of two and three bytes. */
static void walk_text(struct api_walk *walk, const char *name, struct kvt_text *text,
                      uint32_t bytes_max)
{
    static const char *const characters[] = {"a", "Z", " ", "=", "é", "Ж", "漢", "0"};
    uint32_t bytes_wanted;
    char *at;

    if (!walk->is_filling) {
        note(walk, name, text->at, text->bytes);
        return;
    }
    bytes_wanted = (uint32_t)pick(walk, 0, walk->size == 0 ? KVT_MIN(bytes_max, 40u) : bytes_max);
    at = take(walk, bytes_wanted + 8u, 1);
    *text = (struct kvt_text){.at = at};
    for (;;) {
        const char *c = characters[api_random(&walk->random) % KVT_COUNT_OF(characters)];
        uint32_t bytes = (uint32_t)strlen(c);

        if (text->bytes + bytes > bytes_wanted)
            return;
        memcpy(at + text->bytes, c, bytes);
        text->bytes += bytes;
    }
}

static void walk_handle(struct api_walk *walk, const char *name, struct kvt_handle *handle)
{
    if (walk->is_filling && (api_random(&walk->random) & 3) == 0) {
        *handle = KVT_HANDLE_NONE;
        return;
    }
    U64(name, &handle->boot_id);
    U64(name, &handle->id);
    U64(name, &handle->secret);
}

/* ---- requests ---------------------------------------------------------------------------------
 */

static void walk_component(struct api_walk *walk, struct kvt_api_component *c)
{
    walk_u32(walk, "component.kind", &c->kind, 1, 3);
    if (walk->is_filling && c->kind != 2)
        c->window_tokens = 0;
    else
        walk_u32(walk, "component.window_tokens", &c->window_tokens, 1, UINT32_MAX);
    walk_u64(walk, "component.bytes_per_block", &c->bytes_per_block, 1, KVT_SHARD_BYTES_MAX);
    walk_bool(walk, "component.is_replicated", &c->is_replicated);
    walk_text(walk, "component.name", &c->name, KVT_MODEL_TEXT_BYTES_MAX);
}

static void walk_open_namespace(struct api_walk *walk, struct kvt_req_open_namespace *req)
{
    struct kvt_text *tags;

    walk_bool(walk, "is_by_fingerprint", &req->is_by_fingerprint);
    if (req->is_by_fingerprint) {
        walk_raw(walk, "fingerprint", req->fingerprint, KVT_FINGERPRINT_BYTES);
        return;
    }
    walk_u32(walk, "block_tokens", &req->block_tokens, 1, KVT_BLOCK_TOKENS_MAX);
    walk_u32(walk, "ranks", &req->ranks, 1, KVT_RANKS_MAX);
    walk_u32(walk, "components_count", &req->components_count, 1, KVT_COMPONENTS_MAX);
    for (uint32_t i = 0; i < req->components_count; i++)
        walk_component(walk, &req->components[i]);
    walk_text(walk, "model", &req->model, KVT_MODEL_TEXT_BYTES_MAX);
    walk_text(walk, "revision", &req->revision, KVT_MODEL_TEXT_BYTES_MAX);
    walk_text(walk, "dtype", &req->dtype, KVT_MODEL_TEXT_BYTES_MAX);
    walk_text(walk, "layout", &req->layout, KVT_MODEL_TEXT_BYTES_MAX);
    walk_u32(walk, "tags_count", &req->tags_count, 0, 64);
    if (walk->is_filling) {
        tags = take(walk, req->tags_count, sizeof(*tags));
        for (uint32_t i = 0; i < req->tags_count; i++) {
            char *at = take(walk, 32, 1);

            tags[i].bytes = (uint32_t)snprintf(at, 32, "key%03u=value%llu", i,
                                               (unsigned long long)(walk->random & 0xffff));
            tags[i].at = at;
        }
        req->tags = tags;
    }
    for (uint32_t i = 0; !walk->is_filling && i < req->tags_count; i++)
        note(walk, "tags", req->tags[i].at, req->tags[i].bytes);
}

static void walk_layouts(struct api_walk *walk, struct kvt_req_attach *req)
{
    struct kvt_api_layout *layouts = (struct kvt_api_layout *)(uintptr_t)req->layouts;

    walk_u32(walk, "layouts_count", &req->layouts_count, 0,
             req->regions_count == 0 ? 0 : KVT_COMPONENTS_MAX);
    if (walk->is_filling)
        req->layouts = layouts = take(walk, req->layouts_count, sizeof(*layouts));
    for (uint32_t i = 0; i < req->layouts_count; i++) {
        struct kvt_api_piece *pieces = (struct kvt_api_piece *)(uintptr_t)layouts[i].pieces;

        if (walk->is_filling)
            layouts[i].component = i;
        walk_u32(walk, "layout.component", &layouts[i].component, i, i);
        walk_u32(walk, "engine_blocks_per_block", &layouts[i].engine_blocks_per_block, 1,
                 KVT_ENGINE_BLOCKS_PER_BLOCK_MAX);
        walk_u32(walk, "pieces_count", &layouts[i].pieces_count, 1,
                 walk->size == 0 ? 4 : KVT_PIECES_PER_COMPONENT_MAX);
        if (walk->is_filling)
            layouts[i].pieces = pieces = take(walk, layouts[i].pieces_count, sizeof(*pieces));
        for (uint32_t p = 0; p < layouts[i].pieces_count; p++) {
            uint64_t bytes;

            walk_u32(walk, "region_idx", &pieces[p].region_idx, 0, req->regions_count - 1);
            bytes = req->regions[pieces[p].region_idx].bytes;
            walk_u32(walk, "bytes", &pieces[p].bytes, 1,
                     KVT_MIN(bytes, (uint64_t)KVT_SHARD_BYTES_MAX));
            walk_u64(walk, "offset_bytes", &pieces[p].offset_bytes, 0, bytes - pieces[p].bytes);
            walk_u64(walk, "stride_bytes", &pieces[p].stride_bytes, 0, 1ull << 46);
        }
    }
}

/* Regions are inline here: memfds have tests of their own. */
static void walk_attach(struct api_walk *walk, struct kvt_req_attach *req)
{
    walk_handle(walk, "ns", &req->ns);
    walk_raw(walk, "engine_id", req->engine_id, KVT_ENGINE_ID_BYTES);
    walk_bool(walk, "is_scheduler", &req->is_scheduler);
    walk_u32(walk, "rank", &req->rank, 0, KVT_RANKS_MAX - 1);
    if (walk->is_filling && req->rank == KVT_RANKS_MAX - 1)
        req->rank = KVT_RANK_NONE;
    U32("api_version", &req->api_version);
    walk_text(walk, "name", &req->name, KVT_MODEL_TEXT_BYTES_MAX);
    walk_u32(walk, "regions_count", &req->regions_count, 0, KVT_REGIONS_PER_SESSION_MAX);
    for (uint32_t i = 0; i < req->regions_count; i++) {
        walk_u64(walk, "region.bytes", &req->regions[i].bytes, 1, 1ull << 46);
        if (walk->is_filling)
            req->regions[i].is_inline = true;
        else
            note(walk, "region.is_inline", &req->regions[i].is_inline, 1);
    }
    walk_layouts(walk, req);
}

static void walk_prefix(struct api_walk *walk, struct kvt_api_prefix *prefix)
{
    struct kvt_api_extra_key *keys = (struct kvt_api_extra_key *)(uintptr_t)prefix->extra_keys;

    walk_blob(walk, "salt", &prefix->salt, KVT_ROOT_TAG_BYTES_MAX);
    walk_blob(walk, "lora", &prefix->lora, KVT_ROOT_TAG_BYTES_MAX);
    walk_handle(walk, "cursor", &prefix->cursor);
    walk_u64(walk, "tokens_count", &prefix->tokens_count, 0,
             walk->size == 0   ? 100
             : walk->size == 1 ? 100000
                               : KVT_REQUEST_TOKENS_MAX);
    if (walk->is_filling)
        prefix->tokens = take(walk, prefix->tokens_count, 4);
    walk_raw(walk, "tokens", (void *)(uintptr_t)prefix->tokens, prefix->tokens_count * 4);
    walk_u32(walk, "extra_keys_count", &prefix->extra_keys_count, 0,
             KVT_MIN(prefix->tokens_count, 1000u));
    if (walk->is_filling)
        prefix->extra_keys = keys = take(walk, prefix->extra_keys_count, sizeof(*keys));
    for (uint32_t i = 0; i < prefix->extra_keys_count; i++) {
        if (walk->is_filling)
            keys[i].block_idx = i;
        else
            note(walk, "extra_keys.block_idx", &keys[i].block_idx, 4);
        walk_raw(walk, "extra_keys.key", keys[i].key, KVT_EXTRA_KEY_BYTES);
    }
}

static void walk_lookup(struct api_walk *walk, struct kvt_req_lookup *req)
{
    walk_handle(walk, "session", &req->session);
    walk_prefix(walk, &req->prefix);
    walk_u64(walk, "limit_tokens", &req->limit_tokens, 1, UINT64_MAX);
    walk_u32(walk, "tiers", &req->tiers, 1, 7);
    walk_bool(walk, "wants_lease", &req->wants_lease);
    U64("lease_ns", &req->lease_ns);
    walk_bool(walk, "wants_why", &req->wants_why);
    walk_bool(walk, "wants_prefetch", &req->wants_prefetch);
}

static void fill_blocks(struct api_walk *walk, struct kvt_api_moves *moves, uint32_t i)
{
    uint64_t *blocks = take(walk, moves->count, 8);
    uint64_t at = api_random(&walk->random) % 1000;
    uint64_t step_max = (api_random(&walk->random) & 1) != 0 ? 1 : 5;

    moves->component = i;
    for (uint32_t b = 0; b < moves->count; b++) {
        blocks[b] = at;
        at += 1 + api_random(&walk->random) % step_max;
    }
    moves->block_idx = blocks;
    moves->engine_blocks_count = moves->count * (uint32_t)pick(walk, 0, 3);
    moves->engine_blocks = take(walk, moves->engine_blocks_count, 8);
}

static void walk_moves(struct api_walk *walk, uint32_t *count, struct kvt_api_moves *moves)
{
    walk_u32(walk, "moves_count", count, 0, KVT_COMPONENTS_MAX);
    for (uint32_t i = 0; i < *count; i++) {
        walk_u32(walk, "moves.count", &moves[i].count, 1,
                 walk->size == 0 ? 20 : KVT_MOVES_PER_REQUEST_MAX / KVT_COMPONENTS_MAX);
        if (walk->is_filling)
            fill_blocks(walk, &moves[i], i);
        else
            note(walk, "moves.component", &moves[i].component, 4);
        if (!walk->is_filling)
            note(walk, "moves.block_idx", moves[i].block_idx, 8ul * moves[i].count);
        if (!walk->is_filling)
            note(walk, "engine_blocks_count", &moves[i].engine_blocks_count, 4);
        walk_raw(walk, "engine_blocks", (void *)(uintptr_t)moves[i].engine_blocks,
                 8ul * moves[i].engine_blocks_count);
    }
}

static void walk_promote(struct api_walk *walk, struct kvt_req_promote *req)
{
    walk_handle(walk, "session", &req->session);
    walk_handle(walk, "lease", &req->lease);
    walk_prefix(walk, &req->prefix);
    walk_enum(walk, "target", &req->target, KVT_TARGET_L2);
    walk_enum(walk, "policy", &req->policy, KVT_PROMOTE_TIMEOUT);
    U64("timeout_ns", &req->timeout_ns);
    U64("op_id", &req->op_id);
    walk_moves(walk, &req->moves_count, req->moves);
    walk_u32(walk, "layer_groups", &req->layer_groups, 0, KVT_PIECES_PER_COMPONENT_MAX);
    walk_bool(walk, "wants_inline", &req->wants_inline);
}

static void walk_reserve(struct api_walk *walk, struct kvt_req_reserve *req)
{
    walk_handle(walk, "session", &req->session);
    walk_prefix(walk, &req->prefix);
    U64("ticket_ns", &req->ticket_ns);
    walk_u32(walk, "wants_count", &req->wants_count, 0, KVT_COUNT_OF(req->wants));
    for (uint32_t i = 0; i < req->wants_count; i++) {
        struct kvt_api_range *range = &req->wants[i];

        walk_u32(walk, "wants.component", &range->component, 0, KVT_COMPONENTS_MAX - 1);
        walk_u64(walk, "wants.first", &range->first_block_idx, 0, 100000);
        walk_u64(walk, "wants.end", &range->end_block_idx, range->first_block_idx + 1,
                 range->first_block_idx + 1000);
    }
}

static void walk_demote(struct api_walk *walk, struct kvt_req_demote *req)
{
    walk_handle(walk, "session", &req->session);
    walk_handle(walk, "ticket", &req->ticket);
    walk_handle(walk, "lease", &req->lease);
    walk_prefix(walk, &req->prefix);
    walk_bool(walk, "is_between_tiers", &req->is_between_tiers);
    walk_u32(walk, "from_tiers", &req->from_tiers, 1, 7);
    walk_u32(walk, "to_tier", &req->to_tier, 0, 2);
    if (walk->is_filling)
        req->to_tier = 1u << req->to_tier;
    U64("op_id", &req->op_id);
    walk_moves(walk, &req->moves_count, req->moves);
    walk_bool(walk, "wants_durable", &req->wants_durable);
    walk_u32(walk, "inline_bytes", &req->inline_bytes, 0,
             walk->size == 2 ? KVT_INLINE_BYTES_MAX / 2 : 1000);
    if (walk->is_filling)
        req->inline_data = take(walk, req->inline_bytes, 1);
    walk_raw(walk, "inline_data", (void *)(uintptr_t)req->inline_data, req->inline_bytes);
}

static void walk_release(struct api_walk *walk, struct kvt_req_release *req)
{
    bool is_lease = (api_random(&walk->random) & 1) != 0;

    walk_handle(walk, "session", &req->session);
    if (walk->is_filling) {
        struct kvt_handle handle = {1, api_random(&walk->random), api_random(&walk->random)};

        *(is_lease ? &req->lease : &req->ticket) = handle;
    } else {
        walk_handle(walk, "lease", &req->lease);
        walk_handle(walk, "ticket", &req->ticket);
    }
}

static void walk_ns(struct api_walk *walk, struct kvt_handle *ns, uint8_t *fingerprint)
{
    walk_handle(walk, "ns", ns);
    if (!walk->is_filling || ns->boot_id + ns->id + ns->secret == 0)
        walk_raw(walk, "fingerprint", fingerprint, KVT_FINGERPRINT_BYTES);
}

static void walk_request(struct api_walk *walk, struct kvt_op *op)
{
    switch (op->kind) {
    case KVT_OP_OPEN_NAMESPACE:
        walk_open_namespace(walk, &op->req.open_namespace);
        break;
    case KVT_OP_ATTACH:
        walk_attach(walk, &op->req.attach);
        break;
    case KVT_OP_LOOKUP:
        walk_lookup(walk, &op->req.lookup);
        break;
    case KVT_OP_PROMOTE:
        walk_promote(walk, &op->req.promote);
        break;
    case KVT_OP_RESERVE:
        walk_reserve(walk, &op->req.reserve);
        break;
    case KVT_OP_DEMOTE:
        walk_demote(walk, &op->req.demote);
        break;
    case KVT_OP_QUIESCE:
        walk_handle(walk, "session", &op->req.quiesce.session);
        U64("op_id", &op->req.quiesce.op_id);
        break;
    case KVT_OP_RELEASE:
        walk_release(walk, &op->req.release);
        break;
    case KVT_OP_EVICT:
        walk_ns(walk, &op->req.evict.ns, op->req.evict.fingerprint);
        walk_prefix(walk, &op->req.evict.prefix);
        walk_bool(walk, "is_whole_namespace", &op->req.evict.is_whole_namespace);
        break;
    case KVT_OP_RESET:
        walk_ns(walk, &op->req.reset.ns, op->req.reset.fingerprint);
        break;
    case KVT_OP_DUMP:
        walk_raw(walk, "fingerprint", op->req.dump.fingerprint, KVT_FINGERPRINT_BYTES);
        walk_u64(walk, "depth_max_blocks", &op->req.dump.depth_max_blocks, 1, UINT64_MAX);
        U64("resume", &op->req.dump.resume);
        walk_u32(walk, "nodes_max", &op->req.dump.nodes_max, 1, 4096);
        break;
    default: /* no fields */
        break;
    }
}

/* ---- answers ----------------------------------------------------------------------------------
 */

static void walk_ans_lookup(struct api_walk *walk, struct kvt_ans_lookup *ans)
{
    U64("boundary_tokens", &ans->boundary_tokens);
    U64("path_tokens", &ans->path_tokens);
    U64("branch_tokens", &ans->branch_tokens);
    U64("epoch", &ans->epoch);
    walk_u32(walk, "components_count", &ans->components_count, 0, KVT_COMPONENTS_MAX);
    for (uint32_t i = 0; i < ans->components_count; i++) {
        U64("alone_tokens", &ans->components[i].alone_tokens);
        U64("needed_blocks", &ans->components[i].needed_blocks);
        for (uint32_t t = 0; t < KVT_API_TIERS; t++) {
            U64("blocks_at", &ans->components[i].blocks_at[t]);
            U64("tokens_at", &ans->components[i].tokens_at[t]);
        }
        walk_enum(walk, "why", &ans->components[i].why, KVT_WHY_OTHER_EPOCH);
        U64("why_block_idx", &ans->components[i].why_block_idx);
    }
    walk_handle(walk, "cursor", &ans->cursor);
    U64("cursor_tokens", &ans->cursor_tokens);
    walk_handle(walk, "lease", &ans->lease);
    U64("lease_ns", &ans->lease_ns);
    U64("estimate_us", &ans->estimate_us);
}

static void walk_results(struct api_walk *walk, struct kvt_api_results *results, uint32_t count,
                         const struct kvt_api_moves *moves)
{
    for (uint32_t i = 0; i < count; i++) {
        if (walk->is_filling) {
            results->count[i] = moves[i].count;
            results->results[i] = take(walk, moves[i].count, 1);
        } else {
            note(walk, "results.count", &results->count[i], 4);
        }
        walk_raw(walk, "results", results->results[i], results->count[i]);
    }
}

static void walk_ans_promote(struct api_walk *walk, struct kvt_op *op)
{
    struct kvt_ans_promote *ans = &op->ans.promote;

    walk_results(walk, &ans->moves, op->req.promote.moves_count, op->req.promote.moves);
    U64("moved_bytes", &ans->moved_bytes);
    for (uint32_t t = 0; t < KVT_API_TIERS; t++)
        U64("moved_blocks_from", &ans->moved_blocks_from[t]);
    walk_bool(walk, "is_quiesced", &ans->is_quiesced);
    walk_u32(walk, "inline_bytes", &ans->inline_bytes, 0,
             walk->size == 2 ? KVT_INLINE_BYTES_MAX : 1000);
    if (walk->is_filling)
        ans->inline_data = take(walk, ans->inline_bytes, 1);
    walk_raw(walk, "inline_data", (void *)(uintptr_t)ans->inline_data, ans->inline_bytes);
}

static void walk_ans_reserve(struct api_walk *walk, struct kvt_op *op)
{
    struct kvt_ans_reserve *ans = &op->ans.reserve;

    walk_handle(walk, "ticket", &ans->ticket);
    U64("ticket_ns", &ans->ticket_ns);
    U64("epoch", &ans->epoch);
    if (walk->is_filling)
        ans->wants_count = op->req.reserve.wants_count;
    else
        note(walk, "wants_count", &ans->wants_count, 4);
    for (uint32_t i = 0; i < ans->wants_count; i++) {
        if (walk->is_filling) {
            ans->count[i] = (uint32_t)(op->req.reserve.wants[i].end_block_idx -
                                       op->req.reserve.wants[i].first_block_idx);
            ans->states[i] = take(walk, ans->count[i], 1);
        }
        walk_raw(walk, "states", ans->states[i], ans->count[i]);
    }
    walk_handle(walk, "cursor", &ans->cursor);
    U64("cursor_tokens", &ans->cursor_tokens);
}

static void walk_tier_stats(struct api_walk *walk, struct kvt_api_tier_stats *tier)
{
    U32("tier", &tier->tier);
    U32("health", &tier->health);
    U64("capacity_bytes", &tier->capacity_bytes);
    U64("used_bytes", &tier->used_bytes);
    U64("slab_bytes", &tier->slab_bytes);
    U64("copies", &tier->copies);
    U64("pinned_copies", &tier->pinned_copies);
    U64("filling_copies", &tier->filling_copies);
    U64("inflight", &tier->inflight);
    U64("hit_tokens", &tier->hit_tokens);
    U64("evictions", &tier->evictions);
    U64("read_bytes", &tier->read_bytes);
    U64("written_bytes", &tier->written_bytes);
    U64("errors", &tier->errors);
    walk_text(walk, "detail", &tier->detail, 200);
}

static void walk_ns_stats(struct api_walk *walk, struct kvt_api_ns_stats *ns)
{
    walk_raw(walk, "fingerprint", ns->fingerprint, KVT_FINGERPRINT_BYTES);
    walk_text(walk, "model", &ns->model, 200);
    walk_text(walk, "revision", &ns->revision, 200);
    walk_text(walk, "dtype", &ns->dtype, 200);
    U64("epoch", &ns->epoch);
    U32("block_tokens", &ns->block_tokens);
    U32("ranks", &ns->ranks);
    walk_u32(walk, "components_count", &ns->components_count, 0, KVT_COMPONENTS_MAX);
    for (uint32_t i = 0; i < ns->components_count; i++) {
        walk_component(walk, &ns->components[i]);
        for (uint32_t t = 0; t < KVT_API_TIERS; t++)
            U64("copies_at", &ns->copies_at[i][t]);
    }
    U64("roots", &ns->roots);
    U64("nodes", &ns->nodes);
    U64("blocks", &ns->blocks);
    U64("lookup_tokens", &ns->lookup_tokens);
    U64("hit_tokens", &ns->hit_tokens);
}

static void walk_engine_stats(struct api_walk *walk, struct kvt_api_engine_stats *engine)
{
    walk_raw(walk, "engine_id", engine->engine_id, KVT_ENGINE_ID_BYTES);
    walk_text(walk, "name", &engine->name, 200);
    U32("ns_idx", &engine->ns_idx);
    U32("sessions", &engine->sessions);
    U32("leases", &engine->leases);
    U32("tickets", &engine->tickets);
    U64("leased_bytes", &engine->leased_bytes);
    U64("reserved_bytes", &engine->reserved_bytes);
    U64("lookup_tokens", &engine->lookup_tokens);
    U64("hit_tokens", &engine->hit_tokens);
    U64("promoted_bytes", &engine->promoted_bytes);
    U64("demoted_bytes", &engine->demoted_bytes);
}

static void walk_stats_lists(struct api_walk *walk, struct kvt_ans_stats *ans)
{
    walk_u32(walk, "tiers_count", &ans->tiers_count, 0, KVT_API_TIERS);
    walk_u32(walk, "namespaces_count", &ans->namespaces_count, 0, 8);
    walk_u32(walk, "engines_count", &ans->engines_count, 0, 8);
    walk_u32(walk, "counters_count", &ans->counters_count, 0, 100);
    if (walk->is_filling) {
        ans->namespaces = take(walk, ans->namespaces_count, sizeof(*ans->namespaces));
        ans->engines = take(walk, ans->engines_count, sizeof(*ans->engines));
        ans->counters = take(walk, ans->counters_count, sizeof(*ans->counters));
    }
    for (uint32_t i = 0; i < ans->tiers_count; i++)
        walk_tier_stats(walk, &ans->tiers[i]);
    for (uint32_t i = 0; i < ans->namespaces_count; i++)
        walk_ns_stats(walk, &ans->namespaces[i]);
    for (uint32_t i = 0; i < ans->engines_count; i++)
        walk_engine_stats(walk, &ans->engines[i]);
    for (uint32_t i = 0; i < ans->counters_count; i++) {
        struct kvt_api_counter *counter = &ans->counters[i];

        if (walk->is_filling) {
            counter->name = i % 2 == 0 ? "lookups" : "evicted_blocks";
            counter->label = i % 3 == 0 ? "" : "tier=l2,reason=evicted";
        } else {
            note(walk, "counter.name", counter->name, strlen(counter->name));
            note(walk, "counter.label", counter->label, strlen(counter->label));
        }
        U64("counter.value", &counter->value);
    }
}

static void walk_ans_stats(struct api_walk *walk, struct kvt_ans_stats *ans)
{
    U64("boot_id", &ans->boot_id);
    U64("uptime_ns", &ans->uptime_ns);
    walk_text(walk, "version", &ans->version, 100);
    U64("index_memory_bytes", &ans->index_memory_bytes);
    U64("index_used_bytes", &ans->index_used_bytes);
    U64("blocks", &ans->blocks);
    U64("nodes", &ans->nodes);
    U64("leases", &ans->leases);
    U64("tickets", &ans->tickets);
    U64("reserved_copies", &ans->reserved_copies);
    U64("pins", &ans->pins);
    U64("sessions", &ans->sessions);
    U64("ops_running", &ans->ops_running);
    walk_stats_lists(walk, ans);
}

static void walk_ans_dump(struct api_walk *walk, struct kvt_ans_dump *ans)
{
    walk_u32(walk, "nodes_count", &ans->nodes_count, 0, walk->size == 0 ? 10 : 4096);
    if (walk->is_filling)
        ans->nodes = take(walk, ans->nodes_count, sizeof(*ans->nodes));
    for (uint32_t i = 0; i < ans->nodes_count; i++) {
        struct kvt_api_dump_node *node = &ans->nodes[i];

        U32("ns_idx", &node->ns_idx);
        walk_blob(walk, "salt", &node->salt, KVT_ROOT_TAG_BYTES_MAX);
        walk_blob(walk, "lora", &node->lora, KVT_ROOT_TAG_BYTES_MAX);
        U32("depth_nodes", &node->depth_nodes);
        U64("first_block_idx", &node->first_block_idx);
        U32("blocks_count", &node->blocks_count);
        U32("children_count", &node->children_count);
        U32("node.leases", &node->leases);
        walk_raw(walk, "first_tokens", node->first_tokens, sizeof(node->first_tokens));
        walk_u32(walk, "node.components", &node->components_count, 0, KVT_COMPONENTS_MAX);
        walk_raw(walk, "blocks_at", node->blocks_at,
                 node->components_count * sizeof(node->blocks_at[0]));
    }
    U64("resume", &ans->resume);
}

static void walk_ans_attach(struct api_walk *walk, struct kvt_ans_attach *ans)
{
    walk_handle(walk, "session", &ans->session);
    U32("api_version", &ans->api_version);
    U64("epoch", &ans->epoch);
    U64("lease_ns_max", &ans->lease_ns_max);
    U64("ticket_ns_max", &ans->ticket_ns_max);
}

static void walk_answer(struct api_walk *walk, struct kvt_op *op)
{
    switch (op->kind) {
    case KVT_OP_OPEN_NAMESPACE:
        walk_handle(walk, "ns", &op->ans.open_namespace.ns);
        walk_raw(walk, "fingerprint", op->ans.open_namespace.fingerprint, KVT_FINGERPRINT_BYTES);
        U64("epoch", &op->ans.open_namespace.epoch);
        walk_bool(walk, "was_known", &op->ans.open_namespace.was_known);
        break;
    case KVT_OP_ATTACH:
        walk_ans_attach(walk, &op->ans.attach);
        break;
    case KVT_OP_LOOKUP:
        walk_ans_lookup(walk, &op->ans.lookup);
        break;
    case KVT_OP_PROMOTE:
        walk_ans_promote(walk, op);
        break;
    case KVT_OP_RESERVE:
        walk_ans_reserve(walk, op);
        break;
    case KVT_OP_DEMOTE:
        walk_results(walk, &op->ans.demote.moves, op->req.demote.moves_count, op->req.demote.moves);
        U64("moved_bytes", &op->ans.demote.moved_bytes);
        walk_bool(walk, "is_quiesced", &op->ans.demote.is_quiesced);
        walk_bool(walk, "is_durable", &op->ans.demote.is_durable);
        break;
    case KVT_OP_EVICT:
        U64("evicted_blocks", &op->ans.evict.evicted_blocks);
        break;
    case KVT_OP_RESET:
        U64("epoch", &op->ans.reset.epoch);
        break;
    case KVT_OP_STATS:
        walk_ans_stats(walk, &op->ans.stats);
        break;
    case KVT_OP_DUMP:
        walk_ans_dump(walk, &op->ans.dump);
        break;
    case KVT_OP_HEALTH:
        walk_bool(walk, "is_serving", &op->ans.health.is_serving);
        break;
    default: /* no fields */
        break;
    }
}

/* ---- uses -------------------------------------------------------------------------------------
 */

void api_fill_request(struct kvt_op *op, uint64_t seed, uint32_t size)
{
    struct api_walk walk = {.is_filling = true, .random = seed, .size = size, .arena = op->arena};

    memset(&op->req, 0, sizeof(op->req));
    walk_request(&walk, op);
}

void api_fill_answer(struct kvt_op *op, uint64_t seed, uint32_t size)
{
    struct api_walk walk = {.is_filling = true, .random = seed, .size = size, .arena = op->arena};

    memset(&op->ans, 0, sizeof(op->ans));
    walk_answer(&walk, op);
}

static const char *compare(struct kvt_op *a, struct kvt_op *b,
                           void (*walk_op)(struct api_walk *, struct kvt_op *))
{
    struct api_walk walk_a = {0}, walk_b = {0};
    const char *name = NULL;

    walk_op(&walk_a, a);
    walk_op(&walk_b, b);
    for (uint32_t i = 0; name == NULL && i < walk_a.fields_count && i < walk_b.fields_count; i++) {
        if (walk_a.fields[i].hash != walk_b.fields[i].hash ||
            strcmp(walk_a.fields[i].name, walk_b.fields[i].name) != 0)
            name = walk_a.fields[i].name;
    }
    if (name == NULL && walk_a.fields_count != walk_b.fields_count)
        name = "(number of fields)";
    free(walk_a.fields);
    free(walk_b.fields);
    return name;
}

const char *api_compare_requests(struct kvt_op *a, struct kvt_op *b)
{
    return compare(a, b, walk_request);
}

const char *api_compare_answers(struct kvt_op *a, struct kvt_op *b)
{
    return compare(a, b, walk_answer);
}
