/* Stats: everything that can be counted, gathered when asked. */
#include <string.h>

#include "daemon/engine/internal.h"

static const struct {
    const char *name, *label;
} counter_names[KVT_COUNTERS_COUNT] = {
#define COUNTER_NAME(symbol, name, label, help) {name, label},
    KVT_COUNTERS_LIST(COUNTER_NAME)
#undef COUNTER_NAME
};

static uint64_t get(const _Atomic uint64_t *counter)
{
    return atomic_load_explicit(counter, memory_order_relaxed);
}

static void tier_stats(const struct kvt_engine *engine, const struct kvt_store_stats *store,
                       uint32_t tier, struct kvt_api_tier_stats *to)
{
    const struct kvt_tier *at = engine->config.store.tiers[tier];

    *to = (struct kvt_api_tier_stats){.tier = tier + 1, .health = KVT_TIER_HEALTH_OFF};
    if (at == NULL)
        return;
    to->health = kvt_tier_health(at);
    to->capacity_bytes = store->tiers[tier].slab.capacity_bytes;
    to->used_bytes = store->tiers[tier].slab.taken_bytes;
    to->slab_bytes = store->tiers[tier].slab.slabs_bytes;
    to->copies = store->tiers[tier].ready_copies;
    to->pinned_copies = store->tiers[tier].pinned_copies;
    to->filling_copies = store->tiers[tier].filling_copies;
    to->inflight = store->tiers[tier].inflight;
    for (uint32_t kind = 0; kind < 3; kind++)
        to->hit_tokens += engine->counters[KVT_COUNTER_HIT_FULL_L1 + kind * KVT_API_TIERS + tier];
    to->evictions =
        store->tiers[tier].dropped[KVT_DROP_EVICTED] + store->tiers[tier].dropped[KVT_DROP_POLICY] +
        store->tiers[tier].dropped[KVT_DROP_BUDGET] + store->tiers[tier].dropped[KVT_DROP_NO_LOWER];
    to->read_bytes = get(&at->counters.read_bytes);
    to->written_bytes = get(&at->counters.written_bytes);
    to->errors = get(&at->counters.errors_io) + get(&at->counters.errors_short) +
                 get(&at->counters.errors_no_space) + get(&at->counters.errors_client_gone);
    for (uint32_t i = 0; i < KVT_COUNT_OF(at->counters.errors_bad_slot); i++)
        to->errors += get(&at->counters.errors_bad_slot[i]);
    to->detail = (struct kvt_text){at->detail, (uint32_t)strnlen(at->detail, sizeof(at->detail))};
}

static void ns_stats(const struct kvt_engine *engine, const struct eng_ns *ns,
                     struct kvt_api_ns_stats *to)
{
    struct kvt_radix_ns_stats radix;

    kvt_radix_ns_stats(engine->radix, ns->radix_ns, &radix);
    *to = (struct kvt_api_ns_stats){.model = ns->model,
                                    .revision = ns->revision,
                                    .dtype = ns->dtype,
                                    .epoch = ns->epoch,
                                    .block_tokens = ns->block_tokens,
                                    .ranks = ns->ranks,
                                    .components_count = ns->components_count,
                                    .roots = radix.roots,
                                    .nodes = radix.nodes,
                                    .blocks = radix.blocks,
                                    .lookup_tokens = ns->lookup_tokens,
                                    .hit_tokens = ns->hit_tokens};
    memcpy(to->fingerprint, ns->fingerprint, sizeof(to->fingerprint));
    for (uint32_t i = 0; i < ns->components_count; i++) {
        to->components[i] = ns->components[i];
        to->stored_bytes[i] = ns->stored_bytes[i];
        for (uint32_t tier = 0; tier < KVT_API_TIERS; tier++)
            to->copies_at[i][tier] =
                radix.cells_at[i][tier] + radix.cells_at[i][tier + KVT_STORE_BITS_DRAINING];
    }
}

static void group_stats(const struct kvt_engine *engine, const struct eng_group *group,
                        struct kvt_api_engine_stats *to)
{
    *to = (struct kvt_api_engine_stats){
        .name = {group->name, (uint32_t)strnlen(group->name, sizeof(group->name))},
        .ns_idx = eng_ns_position(engine, group->ns),
        .sessions = group->sessions_count,
        .leases = group->leases_count,
        .tickets = group->tickets_count,
        .reserved_bytes = group->reserved_bytes,
        .held_bytes = group->held_bytes,
        .lookup_tokens = group->lookup_tokens,
        .hit_tokens = group->hit_tokens,
        .promoted_bytes = group->promoted_bytes,
        .demoted_bytes = group->demoted_bytes,
        .lookups = group->lookups,
        .promotes = group->promotes,
        .demotes = group->demotes,
        .missed_moves = group->missed_moves,
        .ops_running = group->runs_count};
    memcpy(to->engine_id, group->engine_id, sizeof(to->engine_id));
    for (uint32_t tier = 0; tier < KVT_TIERS_COUNT; tier++)
        to->leased_bytes += group->leased_bytes[tier];
}

struct counter_list {
    struct kvt_api_counter *at;
    uint32_t count, max;
};

static void put(struct counter_list *list, const char *name, const char *label, uint64_t value)
{
    KVT_ASSERT(list->count < list->max);
    list->at[list->count++] = (struct kvt_api_counter){name, label, value};
}

static const char *const drop_labels[KVT_TIERS_COUNT][KVT_DROP_REASONS] = {
#define DROP_LABELS(tier)                                                                          \
    {                                                                                              \
        [KVT_DROP_EVICTED] = "tier=" tier ",reason=evicted",                                       \
        [KVT_DROP_POLICY] = "tier=" tier ",reason=policy",                                         \
        [KVT_DROP_BUDGET] = "tier=" tier ",reason=budget",                                         \
        [KVT_DROP_NO_LOWER] = "tier=" tier ",reason=no_lower",                                     \
        [KVT_DROP_BAD] = "tier=" tier ",reason=bad",                                               \
        [KVT_DROP_REQUESTED] = "tier=" tier ",reason=requested",                                   \
        [KVT_DROP_ABORTED] = "tier=" tier ",reason=aborted",                                       \
        [KVT_DROP_LOST] = "tier=" tier ",reason=lost",                                             \
    }
    DROP_LABELS("l1"), DROP_LABELS("l2"), DROP_LABELS("l3")
#undef DROP_LABELS
};
static const char *const tier_labels[KVT_TIERS_COUNT] = {"tier=l1", "tier=l2", "tier=l3"};

static bool counters(const struct kvt_engine *engine, struct kvt_op *op,
                     const struct kvt_store_stats *store)
{
    struct counter_list list = {.max = KVT_COUNTERS_COUNT +
                                       KVT_TIERS_COUNT * (KVT_DROP_REASONS + 4) + 3 +
                                       eng_gpu_counters_max(&op->ans.stats)};

    list.at = kvt_arena_array(op->arena, list.max, sizeof(list.at[0]));
    if (list.at == NULL)
        return false;
    for (uint32_t i = 0; i < KVT_COUNTERS_COUNT; i++)
        put(&list, counter_names[i].name, counter_names[i].label, engine->counters[i]);
    put(&list, "transfers_shared", "", store->coalesced);
    put(&list, "reads_bounced", "", store->bounced);
    put(&list, "slots_bad", "", store->verified_bad);
    for (uint32_t tier = 0; tier < KVT_TIERS_COUNT; tier++) {
        const struct kvt_tier *at = engine->config.store.tiers[tier];

        if (at == NULL)
            continue;
        for (uint32_t reason = 0; reason < KVT_DROP_REASONS; reason++)
            put(&list, "copies_dropped", drop_labels[tier][reason],
                store->tiers[tier].dropped[reason]);
        put(&list, "copies_written_back", tier_labels[tier], store->tiers[tier].written_back);
        put(&list, "tier_reads", tier_labels[tier], get(&at->counters.reads));
        put(&list, "tier_writes", tier_labels[tier], get(&at->counters.writes));
        put(&list, "tier_outages", tier_labels[tier], get(&at->counters.outages));
    }
    if (!eng_gpu_counters(op, list.at, &list.count))
        return false;
    KVT_ASSERT(list.count <= list.max);
    op->ans.stats.counters = list.at;
    op->ans.stats.counters_count = list.count;
    return true;
}

void eng_op_stats(struct kvt_engine *engine, struct kvt_op *op)
{
    struct kvt_ans_stats *ans = &op->ans.stats;
    struct kvt_radix_stats radix;
    struct kvt_store_stats store;
    uint32_t at = 0;

    kvt_radix_stats(engine->radix, &radix);
    kvt_store_stats(engine->store, &store);
    *ans = (struct kvt_ans_stats){
        .boot_id = engine->config.boot_id,
        .uptime_ns = engine->now_ns - engine->start_ns,
        .version = {engine->config.version, (uint32_t)strlen(engine->config.version)},
        .index_memory_bytes = engine->config.index_memory_bytes,
        .index_used_bytes = radix.memory_used_bytes + store.memory_used_bytes,
        .blocks = radix.blocks,
        .nodes = radix.nodes,
        .leases = engine->leases_count,
        .tickets = engine->tickets_count,
        .reserved_copies = store.claimed_cells,
        .sessions = engine->sessions_count,
        .ops_running = engine->ops_count,
        .tiers_count = KVT_TIERS_COUNT,
        .engines_count = engine->groups_count,
        .namespaces = kvt_arena_array(op->arena, engine->ns_count + 1u, sizeof(ans->namespaces[0])),
        .engines = kvt_arena_array(op->arena, engine->groups_count + 1u, sizeof(ans->engines[0]))};
    if (ans->namespaces == NULL || ans->engines == NULL || !eng_l1_stats(engine, op, &store) ||
        !counters(engine, op, &store) || !eng_device_stats(engine, op, &store)) {
        kvt_op_fail(op, KVT_CODE_RESOURCE_EXHAUSTED, "the answer is too large");
        return;
    }
    for (uint32_t tier = 0; tier < KVT_TIERS_COUNT; tier++) {
        tier_stats(engine, &store, tier, &ans->tiers[tier]);
        ans->pins += ans->tiers[tier].pinned_copies;
    }
    for (uint32_t i = 0; i < engine->ns_count; i++)
        if (engine->ns[i].is_open)
            ns_stats(engine, &engine->ns[i], &ans->namespaces[ans->namespaces_count++]);
    kvt_list_for_each (link, &engine->groups)
        group_stats(engine, KVT_CONTAINER_OF(link, struct eng_group, link), &ans->engines[at++]);
}
