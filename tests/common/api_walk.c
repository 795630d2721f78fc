#include "tests/common/api_walk.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/common/api_walk_fields.h"

/* ---- requests ---------------------------------------------------------------------------------
 */

static void walk_quant(struct api_walk *walk, struct kvt_api_quant *quant, uint32_t kind)
{
    if (walk->is_filling && (kind == 3 || walk_pick(walk, 0, 1) == 0)) {
        *quant = (struct kvt_api_quant){0};
        return;
    }
    walk_u32(walk, "quant.kind", &quant->kind, 1, 2);
    walk_u32(walk, "quant.elem", &quant->elem, 1, 2);
    walk_u32(walk, "quant.order", &quant->order, 1, 2);
    walk_u32(walk, "quant.plane_tokens", &quant->plane_tokens, 1, KVT_QUANT_SIZE_MAX);
    walk_u32(walk, "quant.heads", &quant->heads, 1, KVT_QUANT_SIZE_MAX);
    walk_u32(walk, "quant.head_dim", &quant->head_dim, 1, KVT_QUANT_SIZE_MAX);
}

void walk_component(struct api_walk *walk, struct kvt_api_component *c)
{
    walk_u32(walk, "component.kind", &c->kind, 1, 3);
    if (walk->is_filling && c->kind != 2)
        c->window_tokens = 0;
    else
        walk_u32(walk, "component.window_tokens", &c->window_tokens, 1, UINT32_MAX);
    walk_u64(walk, "component.bytes_per_block", &c->bytes_per_block, 1, KVT_SHARD_BYTES_MAX);
    walk_bool(walk, "component.is_replicated", &c->is_replicated);
    walk_quant(walk, &c->quant, c->kind);
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
        tags = walk_take(walk, req->tags_count, sizeof(*tags));
        for (uint32_t i = 0; i < req->tags_count; i++) {
            char *at = walk_take(walk, 32, 1);

            tags[i].bytes = (uint32_t)snprintf(at, 32, "key%03u=value%llu", i,
                                               (unsigned long long)(walk->random & 0xffff));
            tags[i].at = at;
        }
        req->tags = tags;
    }
    for (uint32_t i = 0; !walk->is_filling && i < req->tags_count; i++)
        walk_note(walk, "tags", req->tags[i].at, req->tags[i].bytes);
}

static void walk_layouts(struct api_walk *walk, struct kvt_req_attach *req)
{
    struct kvt_api_layout *layouts = (struct kvt_api_layout *)(uintptr_t)req->layouts;

    walk_u32(walk, "layouts_count", &req->layouts_count, 0,
             req->regions_count == 0 ? 0 : KVT_COMPONENTS_MAX);
    if (walk->is_filling)
        req->layouts = layouts = walk_take(walk, req->layouts_count, sizeof(*layouts));
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
            layouts[i].pieces = pieces = walk_take(walk, layouts[i].pieces_count, sizeof(*pieces));
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

/* Of any kind but memfd where it fills: their tokens come from a region socket. */
static void walk_region(struct api_walk *walk, struct kvt_api_region *region)
{
    walk_u64(walk, "region.bytes", &region->bytes, 1, 1ull << 46);
    if (walk->is_filling)
        region->kind = walk_pick(walk, 0, 1) == 0 ? KVT_REGION_INLINE : KVT_REGION_CUDA_IPC;
    else
        walk_note(walk, "region.kind", &region->kind, sizeof(region->kind));
    if (region->kind == KVT_REGION_MEMFD)
        walk_raw(walk, "region.token", region->token, KVT_REGION_TOKEN_BYTES);
    if (region->kind != KVT_REGION_CUDA_IPC)
        return;
    walk_raw(walk, "cuda_ipc.handle", region->cuda_ipc.handle, KVT_CUDA_IPC_HANDLE_BYTES);
    walk_u64(walk, "cuda_ipc.offset_bytes", &region->cuda_ipc.offset_bytes, 0,
             (1ull << 46) - region->bytes);
    walk_raw(walk, "cuda_ipc.device_uuid", region->cuda_ipc.device_uuid, KVT_CUDA_UUID_BYTES);
}

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
    for (uint32_t i = 0; i < req->regions_count; i++)
        walk_region(walk, &req->regions[i]);
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
        prefix->tokens = walk_take(walk, prefix->tokens_count, 4);
    walk_raw(walk, "tokens", (void *)(uintptr_t)prefix->tokens, prefix->tokens_count * 4);
    walk_u32(walk, "extra_keys_count", &prefix->extra_keys_count, 0,
             KVT_MIN(prefix->tokens_count, 1000u));
    if (walk->is_filling)
        prefix->extra_keys = keys = walk_take(walk, prefix->extra_keys_count, sizeof(*keys));
    for (uint32_t i = 0; i < prefix->extra_keys_count; i++) {
        if (walk->is_filling)
            keys[i].block_idx = i;
        else
            walk_note(walk, "extra_keys.block_idx", &keys[i].block_idx, 4);
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
    uint64_t *blocks = walk_take(walk, moves->count, 8);
    uint64_t at = api_random(&walk->random) % 1000;
    uint64_t step_max = (api_random(&walk->random) & 1) != 0 ? 1 : 5;

    moves->component = i;
    for (uint32_t b = 0; b < moves->count; b++) {
        blocks[b] = at;
        at += 1 + api_random(&walk->random) % step_max;
    }
    moves->block_idx = blocks;
    moves->engine_blocks_count = moves->count * (uint32_t)walk_pick(walk, 0, 3);
    moves->engine_blocks = walk_take(walk, moves->engine_blocks_count, 8);
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
            walk_note(walk, "moves.component", &moves[i].component, 4);
        if (!walk->is_filling)
            walk_note(walk, "moves.block_idx", moves[i].block_idx, 8ul * moves[i].count);
        if (!walk->is_filling)
            walk_note(walk, "engine_blocks_count", &moves[i].engine_blocks_count, 4);
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
    walk_bool(walk, "is_in_place", &req->is_in_place);
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
        req->inline_data = walk_take(walk, req->inline_bytes, 1);
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
    case KVT_OP_MAINTAIN:
        walk_enum(walk, "action", &op->req.maintain.action, KVT_MAINTAIN_SCRUB_STOP);
        U64("rate_bytes_per_s", &op->req.maintain.rate_bytes_per_s);
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
