/* The store as a whole: its memory, its namespaces, its turn. */
#include "daemon/engine/store.h"

#include <string.h>

#include "daemon/base/alloc.h"
#include "daemon/base/clock.h"
#include "daemon/engine/store_internal.h"

#define WAITING_JOBS_DEFAULT 16384u
#define BOUNCE_SLOTS_DEFAULT 4u
#define BOUNCE_SHARE 16u /* of L2, at most one part in so many */
#define SELECTIVE_TOUCHES_DEFAULT 2u
#define PROMOTE_SHARE 8u
#define TRANSFER_DEADLINE_NS (30ull * KVT_NS_PER_S)
#define XFERS_MIN (4u * KVT_RANKS_MAX)
#define TIER_XFERS_MAX 4096u
#define DEVICE_ALIGN_BYTES 512u /* where the tier does not say */
#define DRAIN_SLICE 256u
#define REAP_BATCH 64u

/* ---- memory --------------------------------------------------------------------------------- */

static void set_defaults(struct kvt_store *store)
{
    struct kvt_store_config *config = &store->config;
    uint64_t host_bytes = config->tiers[KVT_TIER_HOST]->capacity_bytes;

    if (config->waiting_jobs_max == 0)
        config->waiting_jobs_max = WAITING_JOBS_DEFAULT;
    if (config->bounce_slots == 0)
        config->bounce_slots = BOUNCE_SLOTS_DEFAULT;
    config->bounce_slots = KVT_MIN(config->bounce_slots, STORE_BOUNCE_MAX);
    if (config->selective_touches == 0)
        config->selective_touches = SELECTIVE_TOUCHES_DEFAULT;
    if (config->promote_inflight_bytes_max == 0)
        config->promote_inflight_bytes_max = KVT_MAX(host_bytes / PROMOTE_SHARE, 1ull);
    if (config->transfer_deadline_ns == 0)
        config->transfer_deadline_ns = TRANSFER_DEADLINE_NS;
    if (config->real_ns == NULL)
        config->real_ns = kvt_clock_real_ns;
    for (uint32_t i = 0; i < KVT_TIERS_COUNT; i++)
        if (config->slab_unit_bytes[i] == 0)
            config->slab_unit_bytes[i] = KVT_HUGE_PAGE_BYTES;
    store->bucket.rate_bytes_per_s = config->write_budget_bytes_per_s;
}

/* Bounce slots lie behind what the slab allocator hands out, in the last units of host memory. */
static uint64_t bounce_init(struct kvt_store *store)
{
    uint64_t capacity = store->config.tiers[KVT_TIER_HOST]->capacity_bytes;
    uint64_t unit = store->config.slab_unit_bytes[KVT_TIER_HOST], bytes, chunk;

    bytes = KVT_MIN((uint64_t)store->config.bounce_slots * 4 * unit, capacity / BOUNCE_SHARE);
    bytes = kvt_round_down(bytes, unit);
    chunk = kvt_round_down(bytes / store->config.bounce_slots, KVT_DIO_ALIGN_BYTES);
    if (bytes == 0 || chunk == 0)
        return kvt_round_down(capacity, unit); /* too small to set some aside: reads wait instead */
    store->bounce_base_bytes = kvt_round_down(capacity, unit) - bytes;
    store->bounce_chunk_bytes = chunk;
    store->bounce_chunks = store->config.bounce_slots;
    return store->bounce_base_bytes;
}

/* What a slab allocator is told of the tier's zones. L2's end where the bounce slots begin. False:
 * they do not lie one behind the other, as the allocator lays them out. */
static bool zones_of(const struct store_tier *at, struct kvt_slab_config *config)
{
    uint64_t base_bytes = 0;

    config->zones_count = at->tier->zones_count;
    for (uint32_t i = 0; i < at->tier->zones_count; i++) {
        const struct kvt_tier_zone *zone = &at->tier->zones[i];

        if (zone->base_bytes != base_bytes)
            return false;
        base_bytes += zone->bytes;
        config->zone_bytes[i] = KVT_MIN(
            zone->bytes, at->capacity_bytes - KVT_MIN(at->capacity_bytes, zone->base_bytes));
    }
    return true;
}

static uint32_t align_of(const struct store_tier *at, uint32_t tier)
{
    if (tier != KVT_TIER_DEVICE)
        return KVT_DIO_ALIGN_BYTES;
    return at->tier->slot_align_bytes != 0 ? at->tier->slot_align_bytes : DEVICE_ALIGN_BYTES;
}

static int tiers_init(struct kvt_store *store, uint64_t meta_bytes)
{
    uint64_t total_bytes = 0;

    for (uint32_t i = 0; i < KVT_TIERS_COUNT; i++) {
        struct store_tier *at = &store->tiers[i];

        at->tier = store->config.tiers[i];
        if (at->tier == NULL)
            continue;
        at->capacity_bytes = at->tier->capacity_bytes;
        if (i == KVT_TIER_HOST)
            at->capacity_bytes = bounce_init(store);
        total_bytes += at->capacity_bytes;
    }
    for (uint32_t i = 0; i < KVT_TIERS_COUNT; i++) {
        struct store_tier *at = &store->tiers[i];
        struct kvt_slab_config config = {
            .capacity_bytes = at->capacity_bytes,
            .unit_bytes = store->config.slab_unit_bytes[i],
        };
        int r;

        if (at->tier == NULL)
            continue;
        config.align_bytes = align_of(at, i);
        if (!zones_of(at, &config))
            return kvt_trace(-EINVAL);
        /* At least a sixteenth each: small tiers may have small slots. */
        config.meta_bytes_max =
            meta_bytes / 16 + (uint64_t)((double)meta_bytes * 13 / 16 *
                                         ((double)at->capacity_bytes / (double)total_bytes));
        r = kvt_slab_new(&at->slab, &config);
        if (r != 0)
            return r < 0 ? kvt_trace(r) : -EINVAL;
    }
    return 0;
}

static uint32_t count_xfers(const struct kvt_store *store)
{
    uint64_t count = 0, max;

    for (uint32_t i = 0; i < KVT_TIERS_COUNT; i++)
        if (store->config.tiers[i] != NULL)
            count += KVT_MIN(store->config.tiers[i]->inflight_max, TIER_XFERS_MAX);
    max = store->config.memory_bytes / 8 / (sizeof(struct xfer) + sizeof(struct move));
    count = KVT_MIN(count, max);
    return (uint32_t)KVT_MAX(count, (uint64_t)XFERS_MIN);
}

static int parts_init(struct kvt_store *store)
{
    uint64_t left = store->config.memory_bytes;
    uint32_t xfers = count_xfers(store);
    bool has_through = store->config.write_policy == KVT_WRITE_THROUGH;
    int r;

    store->memory_fixed_bytes = sizeof(*store) + STORE_LOST_ENTRIES * sizeof(struct lost) +
                                xfers * (sizeof(struct xfer) + sizeof(struct move)) +
                                store->config.waiting_jobs_max * sizeof(struct kvt_job *) +
                                kvt_store_index_bytes(&store->config) +
                                (has_through ? STORE_THROUGH_MAX * sizeof(struct kvt_cell) : 0);
    if (left < store->memory_fixed_bytes * 2)
        return -EINVAL;
    left -= store->memory_fixed_bytes;
    r = tiers_init(store, left / 4);
    if (r != 0)
        return kvt_trace(r);
    kvt_store_l1_init(store);
    r = kvt_store_index_init(store);
    if (r != 0)
        return kvt_trace(r);
    r = kvt_store_xfers_init(store, xfers);
    if (r != 0)
        return kvt_trace(r);
    r = kvt_store_cells_init(store, left - left / 4);
    if (r != 0)
        return kvt_trace(r);
    store->heap_max = store->config.waiting_jobs_max;
    store->heap = kvt_alloc_zeroed(store->heap_max, sizeof(struct kvt_job *));
    store->through =
        has_through ? kvt_alloc_zeroed(STORE_THROUGH_MAX, sizeof(struct kvt_cell)) : NULL;
    if (store->heap == NULL || (has_through && store->through == NULL))
        return -ENOMEM;
    for (uint32_t i = 0; i < KVT_TIERS_COUNT; i++)
        if (store->tiers[i].tier != NULL)
            store->tiers[i].count[COPY_NONE] = store->records_max;
    return 0;
}

int kvt_store_new(struct kvt_store **ret_store, const struct kvt_store_config *config)
{
    struct kvt_store *store;
    int r;

    if (config->radix == NULL || config->tiers[KVT_TIER_HOST] == NULL ||
        config->host_memory == NULL)
        return -EINVAL;
    store = kvt_alloc_zeroed(1, sizeof(*store));
    if (store == NULL)
        return -ENOMEM;
    store->magic = STORE_MAGIC;
    store->config = *config;
    store->radix = config->radix;
    kvt_list_init(&store->xfers_free);
    kvt_list_init(&store->syncs);
    for (uint32_t i = 0; i < 2; i++) {
        kvt_list_init(&store->queue[i]);
        for (uint32_t tier = 0; tier < KVT_TIERS_COUNT; tier++)
            kvt_list_init(&store->tiers[tier].pending[i]);
    }
    set_defaults(store);
    r = parts_init(store);
    if (r != 0) {
        kvt_store_free(store);
        return kvt_trace(r);
    }
    kvt_store_scrub_start(store, config->scrub_bytes_per_s);
    *ret_store = store;
    return 0;
}

struct kvt_store *kvt_store_free(struct kvt_store *store)
{
    if (store == NULL)
        return NULL;
    KVT_ASSERT(store->magic == STORE_MAGIC);
    KVT_ASSERT(store->xfers_used == 0 && store->queued[0] + store->queued[1] == 0);
    KVT_ASSERT(store->l1.held == 0);
    for (uint32_t i = 0; i < KVT_TIERS_COUNT; i++)
        store->tiers[i].slab = kvt_slab_free(store->tiers[i].slab);
    kvt_store_index_deinit(store);
    kvt_store_xfers_deinit(store);
    kvt_store_cells_deinit(store);
    kvt_free(store->heap);
    kvt_free(store->through);
    store->magic = 0;
    kvt_free(store);
    return NULL;
}

/* ---- namespaces ----------------------------------------------------------------------------- */

static int component_classes(struct kvt_store *store, struct store_component *component)
{
    for (uint32_t i = 0; i < KVT_TIERS_COUNT; i++) {
        struct store_tier *at = &store->tiers[i];
        uint64_t bytes = i == KVT_TIER_DEVICE ? component->payload_bytes : component->slot_bytes;
        int r;

        if (at->tier == NULL)
            continue;
        if (i == KVT_TIER_DEVICE) {
            component->is_in_l1 =
                at->tier->payload_bytes_max == 0 || bytes <= at->tier->payload_bytes_max;
            component->class_idx[i] = STORE_CLASSES_MAX;
            if (!component->is_in_l1)
                continue;
        }
        r = kvt_slab_class(at->slab, bytes, &component->class_idx[i]);
        if (r == KVT_SLAB_E_TOO_BIG)
            return KVT_STORE_E_TOO_BIG;
        if (r == KVT_SLAB_E_CLASSES || (r == 0 && component->class_idx[i] >= STORE_CLASSES_MAX))
            return -ENOSPC;
        if (r < 0)
            return kvt_trace(r);
        /* Every shard of a block at once must fit. A tier whose devices are all out of service has
         * no room at all: no model fits it, and that is no reason to refuse the others' help. */
        if (at->capacity_bytes > 0 && bytes > at->capacity_bytes / component->shards)
            return KVT_STORE_E_TOO_BIG;
        at->classes = KVT_MAX(at->classes, component->class_idx[i] + 1);
        at->class_of[component->class_idx[i]].shards =
            KVT_MAX(at->class_of[component->class_idx[i]].shards, component->shards);
    }
    return 0;
}

int kvt_store_ns_open(struct kvt_store *store, struct kvt_radix_ns ns,
                      const struct kvt_store_ns_config *config)
{
    struct store_ns opened = {
        .is_open = true,
        .epoch = config->epoch,
        .block_tokens = config->block_tokens,
        .ranks = config->ranks,
        .components_count = config->components_count,
    };

    if (ns.idx >= KVT_NAMESPACES_MAX || config->components_count == 0 ||
        config->components_count > KVT_COMPONENTS_MAX || config->ranks == 0 ||
        config->ranks > KVT_RANKS_MAX || config->block_tokens == 0 ||
        config->block_tokens > KVT_BLOCK_TOKENS_MAX)
        return -EINVAL;
    memcpy(opened.fingerprint, config->fingerprint, sizeof(opened.fingerprint));
    for (uint32_t rank = 0; rank < config->ranks; rank++)
        opened.home[rank] = (uint8_t)(rank % KVT_MAX(store->l1.zones_count, 1u));
    for (uint32_t i = 0; i < config->components_count; i++) {
        struct store_component *component = &opened.components[i];
        int r;

        component->payload_bytes = config->components[i].bytes_per_block;
        if (component->payload_bytes == 0 || component->payload_bytes > KVT_SHARD_BYTES_MAX)
            return -EINVAL;
        component->slot_bytes = kvt_slot_bytes(config->block_tokens, component->payload_bytes);
        component->header_bytes = kvt_slot_header_bytes(config->block_tokens);
        component->shards = config->components[i].is_replicated ? 1 : config->ranks;
        r = component_classes(store, component);
        if (r != 0)
            return r;
    }
    /* The index was another namespace's: what is left of it must be off its books. */
    if (kvt_store_ns_has_cells(store, ns))
        return -EBUSY;
    store->ns[ns.idx] = opened;
    store->ns_end = KVT_MAX(store->ns_end, ns.idx + 1);
    return 0;
}

bool kvt_store_ns_has_cells(const struct kvt_store *store, struct kvt_radix_ns ns)
{
    for (uint32_t i = 0; store->ns[ns.idx].is_open && i < KVT_COMPONENTS_MAX; i++)
        for (uint32_t tier = 0; tier < KVT_TIERS_COUNT; tier++)
            if (store->ns[ns.idx].components[i].cells_at[tier] > 0)
                return true;
    return false;
}

void kvt_store_ns_close(struct kvt_store *store, struct kvt_radix_ns ns)
{
    KVT_ASSERT(!kvt_store_ns_has_cells(store, ns));
    store->ns[ns.idx] = (struct store_ns){.is_open = false};
}

void kvt_store_ns_set_epoch(struct kvt_store *store, struct kvt_radix_ns ns, uint64_t epoch)
{
    KVT_ASSERT(ns.idx < store->ns_end && store->ns[ns.idx].is_open);
    store->ns[ns.idx].epoch = epoch;
    kvt_store_index_reset(store, ns.idx);
}

void kvt_store_ns_set_number(struct kvt_store *store, struct kvt_radix_ns ns, uint32_t number)
{
    KVT_ASSERT(ns.idx < store->ns_end && store->ns[ns.idx].is_open);
    store->ns[ns.idx].number = number;
}

/* ---- the turn ------------------------------------------------------------------------------- */

bool kvt_store_reap_detached(struct kvt_store *store, uint32_t budget)
{
    struct kvt_radix_victim cells[REAP_BATCH];

    while (budget > 0) {
        uint32_t max = REAP_BATCH, count; /* all that a block has goes at once */

        if (!kvt_store_index_has_room(store))
            return false; /* goes on when the index has taken what went before */
        count = kvt_radix_reap(store->radix, max, cells);

        for (uint32_t i = 0; i < count; i++) {
            struct cell *cell = &store->cells[cells[i].handle];

            KVT_ASSERT(cell->is_used && !cell->is_orphan);
            kvt_store_orphan(store, cell, KVT_DROP_REQUESTED);
        }
        if (!kvt_radix_has_detached(store->radix))
            break;
        budget -= KVT_MIN(KVT_MAX(count, REAP_BATCH), budget); /* empty nodes cost as well */
    }
    return kvt_radix_has_detached(store->radix);
}

bool kvt_store_turn(struct kvt_store *store, uint64_t now_ns, uint32_t budget_blocks)
{
    bool is_more;

    KVT_ASSERT(store->magic == STORE_MAGIC);
    store->now_ns = KVT_MAX(store->now_ns, now_ns);
    kvt_write_bucket_fill(&store->bucket, store->now_ns);
    is_more = kvt_store_l1_turn(store, budget_blocks);
    (void)kvt_store_reap(store, budget_blocks);
    kvt_store_expire(store);
    is_more |= kvt_store_index_turn(store, budget_blocks);
    is_more |= kvt_store_reap_detached(store, budget_blocks);
    is_more |= kvt_store_retry_queue(store, budget_blocks);
    kvt_store_reclaim_turn(store);
    is_more |= kvt_store_evict_ahead(store, budget_blocks) == budget_blocks;
    is_more |= kvt_store_write_through(store, budget_blocks) == budget_blocks;
    is_more |= kvt_store_save_turn(store, budget_blocks);
    is_more |= kvt_store_scrub_turn(store, budget_blocks);
    for (uint32_t tier = 0; tier < KVT_TIERS_COUNT; tier++)
        kvt_store_submit_pending(store, tier);
    is_more |= store->is_reap_left;
    is_more |= store->is_woken && store->queued[0] + store->queued[1] > 0;
    return is_more;
}

uint64_t kvt_store_next_ns(const struct kvt_store *store)
{
    uint64_t next_ns = KVT_TIME_NEVER_NS;

    if (store->heap_count > 0)
        next_ns = store->heap[0]->deadline_ns;
    for (uint32_t i = 0; i < KVT_TIERS_COUNT; i++) {
        const struct store_tier *at = &store->tiers[i];

        if (at->pending_count > 0)
            next_ns = KVT_MIN(next_ns, at->is_refused ? at->retry_ns : store->now_ns);
        if (at->is_reclaiming)
            next_ns = KVT_MIN(next_ns, at->reclaim_end_ns);
    }
    if (store->through_count > 0)
        next_ns = KVT_MIN(next_ns, kvt_time_add(store->now_ns, 10 * KVT_NS_PER_MS));
    next_ns = KVT_MIN(next_ns, kvt_store_save_next_ns(store));
    next_ns = KVT_MIN(next_ns, kvt_store_scrub_next_ns(store));
    next_ns = KVT_MIN(next_ns, kvt_store_l1_next_ns(store));
    if (store->is_reap_left || (store->is_woken && store->queued[0] + store->queued[1] > 0))
        return store->now_ns;
    next_ns = KVT_MIN(next_ns, kvt_store_index_next_ns(store));
    return kvt_radix_has_detached(store->radix) && kvt_store_index_has_room(store) ? store->now_ns
                                                                                   : next_ns;
}

bool kvt_store_drain(struct kvt_store *store, uint64_t now_ns)
{
    struct copy_options options = {
        .src = KVT_TIER_HOST, .dst = KVT_TIER_DISK, .is_background = true};
    const struct store_tier *disk = &store->tiers[KVT_TIER_DISK];
    uint32_t slice = 0;

    store->now_ns = KVT_MAX(store->now_ns, now_ns);
    if (!store->is_saved_first) {
        store->is_saved_first = true;
        kvt_store_save_start(store); /* takes along what is in L1 alone */
    }
    if (store->save.is_running)
        return false;
    store->is_draining = true;
    if (!kvt_store_is_lower_on(store))
        return true;
    for (; store->drain_at <= store->records_fresh; store->drain_at++) {
        struct cell *cell = &store->cells[store->drain_at];
        struct move *move;

        if (store->drain_at == 0 || !cell->is_used || cell->is_orphan || cell->is_claimed ||
            cell->copies[KVT_TIER_HOST].state != COPY_READY ||
            cell->copies[KVT_TIER_DISK].state != COPY_NONE)
            continue;
        if (slice++ == DRAIN_SLICE ||
            kvt_store_start_copy(store, cell, &options, &move) == START_WAIT)
            break; /* goes on at the next call */
    }
    kvt_store_submit_pending(store, KVT_TIER_DISK);
    return store->drain_at > store->records_fresh && disk->inflight + disk->pending_count == 0 &&
           kvt_store_index_is_idle(store);
}

uint32_t kvt_store_inflight(const struct kvt_store *store)
{
    return store->xfers_used;
}

static uint64_t path_ns(const struct kvt_store *store, uint32_t src, uint32_t dst, uint64_t bytes)
{
    const struct store_path *path = &store->paths[src * PATH_ENDS + dst];

    return (uint64_t)((double)(path->queued_bytes + bytes) * (double)KVT_NS_PER_S /
                      (double)path->bytes_per_s);
}

uint64_t kvt_store_estimate_ns(const struct kvt_store *store, enum kvt_tier_id tier, bool is_to_gpu,
                               uint64_t bytes)
{
    uint64_t ns = 0;

    if (tier == KVT_TIER_DISK) {
        ns = path_ns(store, KVT_TIER_DISK, KVT_TIER_HOST, bytes);
        tier = KVT_TIER_HOST;
    }
    return ns + path_ns(store, (uint32_t)tier, is_to_gpu ? PATH_GPU : PATH_CLIENT, bytes);
}
