/* Evict, Reset, Dump, Health: what operators ask. Evict and Reset take effect in O(1): the tree
 * detaches, the store gives slots back in slices. */
#include <stdio.h>
#include <string.h>

#include "daemon/engine/internal.h"

static bool is_admin(struct kvt_op *op)
{
    if (op->is_admin)
        return true;
    kvt_op_fail(op, KVT_CODE_PERMISSION_DENIED, "%s is served on the admin socket only",
                kvt_op_kind_text(op->kind));
    return false;
}

/* ---- Evict ------------------------------------------------------------------------------------
 */

static void evict_prefix(struct kvt_engine *engine, struct kvt_op *op, const struct eng_ns *ns)
{
    struct kvt_radix_lookup lookup = {.limit_tokens = UINT64_MAX,
                                      .mask_allowed = kvt_store_mask_allowed(KVT_TIER_BITS_ALL)};
    struct kvt_radix_match match;
    struct eng_prefix where;

    if (!eng_prefix(engine, op, ns, &op->req.evict.prefix, &where))
        return;
    if (where.blocks == 0) {
        kvt_radix_detach_root(engine->radix, ns->radix_ns, where.radix.root_key,
                              where.radix.root_key_bytes);
        return;
    }
    lookup.prefix = where.radix;
    if (kvt_radix_lookup(engine->radix, &lookup, &match) != 0) {
        kvt_op_fail(op, KVT_CODE_NOT_FOUND, "cursor stale: send the whole prefix");
        return;
    }
    if (match.path_tokens == where.blocks * ns->block_tokens && match.cursor.generation != 0)
        (void)!kvt_radix_detach_block(engine->radix, match.cursor); /* just found: not stale */
}

void eng_op_evict(struct kvt_engine *engine, struct kvt_op *op)
{
    const struct kvt_req_evict *req = &op->req.evict;
    uint64_t before;
    struct eng_ns *ns;

    if (!is_admin(op))
        return;
    ns = eng_ns_by(engine, op, &req->ns, req->fingerprint);
    if (ns == NULL)
        return;
    before = kvt_radix_detached_blocks(engine->radix);
    if (req->is_whole_namespace)
        kvt_radix_detach_ns(engine->radix, ns->radix_ns);
    else
        evict_prefix(engine, op, ns);
    op->ans.evict.evicted_blocks = kvt_radix_detached_blocks(engine->radix) - before;
    eng_count(engine, KVT_COUNTER_EVICTS, 1);
}

/* ---- Reset ------------------------------------------------------------------------------------
 */

void eng_op_reset(struct kvt_engine *engine, struct kvt_op *op)
{
    const struct kvt_req_reset *req = &op->req.reset;
    struct eng_ns *ns;

    if (!is_admin(op))
        return;
    ns = eng_ns_by(engine, op, &req->ns, req->fingerprint);
    if (ns == NULL)
        return;
    eng_ns_forget(engine, ns);
    kvt_list_for_each (link, &engine->groups) {
        struct eng_group *group = KVT_CONTAINER_OF(link, struct eng_group, link);

        if (group->ns == ns)
            eng_group_drop_all(engine, group);
    }
    eng_holds_keep(engine, ns);
    eng_sessions_tell_epoch(engine, ns);
    eng_count(engine, KVT_COUNTER_RESETS, 1);
    op->ans.reset.epoch = ns->epoch;
    eng_reset_wait(engine, op, ns);
}

/* ---- Dump -------------------------------------------------------------------------------------
 */

#define DUMP_NODES_MAX 4096u
#define DUMP_CHUNK 64u
#define DUMP_NS_SHIFT 56u /* resume: namespace + 1 above, the tree's position below */

static bool keep_text(struct kvt_op *op, const struct kvt_text *from, struct kvt_text *ret_text)
{
    char *at = kvt_arena_alloc(op->arena, from->bytes + 1);

    if (at == NULL)
        return false;
    if (from->bytes > 0)
        memcpy(at, from->at, from->bytes);
    *ret_text = (struct kvt_text){at, from->bytes};
    return true;
}

static bool dump_node(const struct kvt_engine *engine, struct kvt_op *op, const struct eng_ns *ns,
                      const struct kvt_radix_dump_node *from, struct kvt_api_dump_node *to)
{
    struct kvt_text salt = {0}, lora = {0};

    *to = (struct kvt_api_dump_node){.ns_idx = eng_ns_position(engine, ns),
                                     .depth_nodes = from->depth_nodes,
                                     .first_block_idx = from->first_block_idx,
                                     .blocks_count = from->blocks_count,
                                     .children_count = from->children_count,
                                     .leases = from->leases,
                                     .components_count = ns->components_count};
    memcpy(to->first_tokens, from->first_tokens, sizeof(to->first_tokens));
    for (uint32_t i = 0; i < ns->components_count; i++)
        for (uint32_t tier = 0; tier < KVT_API_TIERS; tier++)
            to->blocks_at[i][tier] =
                from->cells_at[i][tier] + from->cells_at[i][tier + KVT_STORE_BITS_DRAINING];
    (void)eng_root_key_split(from->root_key, from->root_key_bytes, &salt, &lora);
    return keep_text(op, &salt, &to->salt) && keep_text(op, &lora, &to->lora);
}

/* One namespace from *inout_at on; true: it is through. */
static bool dump_ns(struct kvt_engine *engine, struct kvt_op *op, const struct eng_ns *ns,
                    uint64_t *inout_at, uint32_t nodes_max)
{
    struct kvt_ans_dump *ans = &op->ans.dump;
    struct kvt_radix_dump_node nodes[DUMP_CHUNK];
    uint64_t depth_max = op->req.dump.depth_max_blocks;

    if (depth_max == 0) /* not asked: all of it */
        depth_max = UINT64_MAX;
    while (ans->nodes_count < nodes_max) {
        uint32_t want = KVT_MIN(nodes_max - ans->nodes_count, DUMP_CHUNK);
        uint32_t got =
            kvt_radix_dump(engine->radix, ns->radix_ns, depth_max, inout_at, want, nodes);

        for (uint32_t i = 0; i < got; i++) {
            if (!dump_node(engine, op, ns, &nodes[i], &ans->nodes[ans->nodes_count])) {
                kvt_op_fail(op, KVT_CODE_RESOURCE_EXHAUSTED,
                            "the answer is too large: ask for "
                            "fewer nodes");
                return true;
            }
            ans->nodes_count++;
        }
        if (got < want)
            return true;
    }
    return false;
}

void eng_op_dump(struct kvt_engine *engine, struct kvt_op *op)
{
    static const uint8_t zero[KVT_FINGERPRINT_BYTES];
    const struct kvt_req_dump *req = &op->req.dump;
    struct kvt_ans_dump *ans = &op->ans.dump;
    uint32_t nodes_max =
        req->nodes_max == 0 ? DUMP_NODES_MAX : KVT_MIN(req->nodes_max, DUMP_NODES_MAX);
    uint64_t at = req->resume & ((1ull << DUMP_NS_SHIFT) - 1);
    uint32_t idx = req->resume != 0 ? (uint32_t)(req->resume >> DUMP_NS_SHIFT) - 1 : 0;
    bool is_all = memcmp(req->fingerprint, zero, sizeof(zero)) == 0;

    if (!is_admin(op))
        return;
    *ans = (struct kvt_ans_dump){.nodes =
                                     kvt_arena_array(op->arena, nodes_max, sizeof(ans->nodes[0]))};
    if (ans->nodes == NULL) {
        kvt_op_fail(op, KVT_CODE_RESOURCE_EXHAUSTED, "no room for %u nodes", nodes_max);
        return;
    }
    for (; idx < engine->ns_count; idx++, at = 0) {
        const struct eng_ns *ns = &engine->ns[idx];

        if (!ns->is_open)
            continue;
        if (!is_all && memcmp(ns->fingerprint, req->fingerprint, KVT_FINGERPRINT_BYTES) != 0)
            continue;
        if (!dump_ns(engine, op, ns, &at, nodes_max)) {
            ans->resume = (uint64_t)(idx + 1) << DUMP_NS_SHIFT | at;
            return;
        }
        if (op->code != KVT_CODE_OK)
            return;
    }
}

/* ---- Health -----------------------------------------------------------------------------------
 */

/* "L3 device /nvme1/kv is out of service": of a tier of several devices each speaks for itself. */
static size_t describe_zones(const struct kvt_engine *engine, char *text, size_t size)
{
    const struct kvt_tier *disk = engine->config.store.tiers[KVT_TIER_DISK];
    struct kvt_store_stats store;
    size_t bytes = 0;

    if (disk == NULL)
        return 0;
    kvt_store_stats(engine->store, &store);
    for (uint32_t i = 0; i < disk->zones_count && bytes < size; i++) {
        const char *what = NULL;

        if (atomic_load_explicit(&disk->zones[i].counters->health, memory_order_relaxed) ==
            KVT_TIER_HEALTH_OUT)
            what = "is out of service";
        else if (engine->config.store.indexes[i] != NULL && !store.zones[i].is_kept)
            what = "has lost its index";
        if (what != NULL)
            bytes += (size_t)snprintf(text + bytes, size - bytes, "%sL3 device %s %s",
                                      bytes > 0 ? ", " : "", disk->zones[i].name, what);
    }
    return KVT_MIN(bytes, size - 1);
}

void eng_op_health(struct kvt_engine *engine, struct kvt_op *op)
{
    struct kvt_ans_health *ans = &op->ans.health;
    size_t size = 2048, bytes;
    char *text = kvt_arena_alloc(op->arena, size);

    *ans = (struct kvt_ans_health){.is_serving = !engine->is_stopping};
    if (text == NULL)
        return;
    bytes = describe_zones(engine, text, size);
    bytes += eng_l1_describe(engine, bytes > 0 ? ", " : "", text + bytes, size - bytes);
    for (uint32_t tier = 0; tier < KVT_TIERS_COUNT && bytes < size - 1; tier++) {
        const struct kvt_tier *at = engine->config.store.tiers[tier];

        if (at == NULL || at->zones_count > 0 ||
            atomic_load_explicit(&at->counters.health, memory_order_relaxed) != KVT_TIER_HEALTH_OUT)
            continue;
        bytes += (size_t)snprintf(text + bytes, size - bytes, "%sL%u is out of service",
                                  bytes > 0 ? ", " : "", tier + 1);
    }
    ans->degraded = (struct kvt_text){text, (uint32_t)KVT_MIN(bytes, size - 1)};
}
