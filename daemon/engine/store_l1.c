/* L1's zones: a GPU each. Where the shards of a copy go, and what happens when a GPU is lost.
 *
 *   open ──incarnation differs, or health is not OK──▶ lost: closed, nothing of it is read
 *    ▲                                                       │ in slices: copies are dropped
 *    └──health is OK: its incarnation is taken over── empty ◀┘ transfers are reaped
 *
 * The store has its own view of each zone's incarnation, and every place in L1 carries it. The GPU
 * refuses a place of another one, so it does not matter how late a loss is seen here: a transfer
 * that was under way comes back OUT_OF_SERVICE, and one that is begun in between does, too. The
 * view changes only when nothing is left that was made under the old one: no copy, and no slot that
 * a transfer holds.
 *
 * Whoever is about to use a copy of L1 asks kvt_store_l1_is_lost first, or has it dropped by
 * kvt_store_l1_settle; the walk over all cells drops the rest. A copy with one shard on a lost GPU
 * is lost as a whole. Copies below are as good as before: L2 and L3 serve on.
 *
 * Each rank of an engine has a home: the GPU that its memory is on. Shards that the engine stores
 * or asks for go there if there is room, and else to any other; and to the part of L2 that is near
 * to it. Engines of one model on different GPUs have different homes, so each job brings its own.
 */
#include <string.h>

#include "daemon/base/clock.h"
#include "daemon/base/log.h"
#include "daemon/engine/store_internal.h"

#define LOOK_NS (50 * KVT_NS_PER_MS) /* how late it is seen that a zone came back */

void kvt_store_l1_init(struct kvt_store *store)
{
    struct kvt_tier *tier = store->tiers[KVT_TIER_DEVICE].tier;
    struct store_l1 *l1 = &store->l1;

    if (tier == NULL)
        return;
    l1->zones_count = KVT_MAX(tier->zones_count, 1u);
    for (uint32_t i = 0; i < l1->zones_count; i++) {
        struct store_l1_zone *zone = &l1->zones[i];

        zone->counters = tier->zones_count > 0 ? tier->zones[i].counters : &tier->counters;
        zone->incarnation =
            atomic_load_explicit(&zone->counters->incarnation, memory_order_relaxed);
    }
}

uint32_t kvt_store_l1_incarnation(const struct kvt_store *store, uint32_t zone)
{
    return store->l1.zones[zone].incarnation;
}

static const char *zone_name(const struct kvt_store *store, uint32_t idx)
{
    const struct kvt_tier *tier = store->tiers[KVT_TIER_DEVICE].tier;

    return idx < tier->zones_count && tier->zones[idx].name[0] != 0 ? tier->zones[idx].name : "L1";
}

/* ---- where shards go ------------------------------------------------------------------------ */

void kvt_store_take_home(struct kvt_store *store, const struct cell *cell,
                         const struct kvt_job *job)
{
    struct store_ns *ns = &store->ns[cell->ns];

    if (job->home != NULL)
        memcpy(ns->home, job->home, sizeof(ns->home));
    if (job->kind == KVT_JOB_FILL && job->rank < KVT_RANKS_MAX && job->view.layout->is_gpu)
        ns->home[job->rank] = (uint8_t)job->view.layout->gpu_zone; /* where its bytes come from */
}

/* The part of L2 that is on the node of the shard's GPU. */
static uint32_t near_zone(const struct kvt_store *store, uint32_t home)
{
    const struct kvt_tier *device = store->tiers[KVT_TIER_DEVICE].tier;
    const struct kvt_tier *host = store->tiers[KVT_TIER_HOST].tier;

    if (device == NULL || home >= device->zones_count || device->zones[home].numa_node < 0)
        return home % host->zones_count;
    for (uint32_t i = 0; i < host->zones_count; i++)
        if (host->zones[i].numa_node == device->zones[home].numa_node)
            return i;
    return home % host->zones_count;
}

uint32_t kvt_store_first_zone(const struct kvt_store *store, const struct cell *cell, uint32_t tier,
                              uint32_t shard)
{
    uint32_t home = store->ns[cell->ns].home[shard];

    if (tier == KVT_TIER_HOST)
        return store->tiers[KVT_TIER_HOST].tier->zones_count > 1 ? near_zone(store, home) : 0;
    return home % store->l1.zones_count;
}

/* ---- loss ----------------------------------------------------------------------------------- */

bool kvt_store_l1_is_lost(const struct kvt_store *const_store, const struct cell *const_cell)
{
    struct kvt_store *store = (struct kvt_store *)(uintptr_t)const_store; /* only read */
    struct cell *cell = (struct cell *)(uintptr_t)const_cell;
    const struct kvt_slab *slab = store->tiers[KVT_TIER_DEVICE].slab;
    uint32_t state = cell->copies[KVT_TIER_DEVICE].state, shards;

    if (store->l1.lost == 0 || state == COPY_NONE || state == COPY_DOOMED)
        return false;
    shards = kvt_store_component(store, cell)->shards;
    for (uint32_t i = 0; i < shards; i++) {
        struct kvt_slot slot = *kvt_store_slot(store, cell, KVT_TIER_DEVICE, i);

        if ((store->l1.lost >> kvt_slab_zone(slab, slot) & 1u) != 0)
            return true;
    }
    return false;
}

bool kvt_store_l1_settle(struct kvt_store *store, struct cell *cell)
{
    if (!kvt_store_l1_is_lost(store, cell))
        return false;
    kvt_store_lose(store, cell);
    store->l1.dropped++;
    return true;
}

static void zone_lose(struct kvt_store *store, uint32_t idx, bool is_off)
{
    struct store_l1_zone *zone = &store->l1.zones[idx];

    zone->out_since_ns = KVT_MAX(store->now_ns, (uint64_t)1);
    store->l1.lost |= 1u << idx;
    store->l1.is_dropping = true;
    store->l1.drop_at = 1;
    store->l1.losses++;
    kvt_slab_zone_close(store->tiers[KVT_TIER_DEVICE].slab, idx);
    store->is_woken = true;
    if (!is_off)
        kvt_log_warn("L1: %s is out of service (kvtier-ctl devices says why): what only it had is "
                     "forgotten, L2 and L3 go on",
                     zone_name(store, idx));
}

static void zone_return(struct kvt_store *store, uint32_t idx, uint32_t incarnation)
{
    struct store_l1_zone *zone = &store->l1.zones[idx];

    zone->incarnation = incarnation;
    zone->out_since_ns = 0;
    store->l1.lost &= ~(1u << idx);
    kvt_slab_zone_open(store->tiers[KVT_TIER_DEVICE].slab, idx);
    store->is_woken = true;
    kvt_log_info("L1: %s is back in service", zone_name(store, idx));
}

/* The incarnation is read before the health: one that rises in between is seen the next time, and
 * until then the GPU refuses what is asked of it. */
static void look(struct kvt_store *store, uint32_t idx)
{
    struct store_l1_zone *zone = &store->l1.zones[idx];
    uint32_t incarnation = atomic_load_explicit(&zone->counters->incarnation, memory_order_acquire);
    uint32_t health = atomic_load_explicit(&zone->counters->health, memory_order_acquire);
    struct kvt_slab_stats stats;

    if (zone->out_since_ns == 0) {
        if (health != KVT_TIER_HEALTH_OK || incarnation != zone->incarnation)
            zone_lose(store, idx, health == KVT_TIER_HEALTH_OFF);
        return;
    }
    if (health != KVT_TIER_HEALTH_OK || store->l1.is_dropping)
        return;
    kvt_slab_zone_stats(store->tiers[KVT_TIER_DEVICE].slab, idx, &stats);
    if (stats.taken_slots == 0)
        zone_return(store, idx, incarnation);
}

/* Blocks may go with their copies, and L3's indexes must have room to hear of it. True: more. */
static bool drop_some(struct kvt_store *store, uint32_t budget)
{
    struct store_l1 *l1 = &store->l1;
    uint32_t end = KVT_MIN(l1->drop_at + budget, store->records_fresh + 1);

    for (; l1->drop_at < end; l1->drop_at++) {
        struct cell *cell = &store->cells[l1->drop_at];

        if (!kvt_store_index_has_room(store))
            return false; /* goes on when they have taken what went before */
        if (cell->is_used)
            (void)kvt_store_l1_settle(store, cell);
    }
    l1->is_dropping = l1->drop_at <= store->records_fresh;
    return l1->is_dropping;
}

void kvt_store_l1_look(struct kvt_store *store)
{
    for (uint32_t i = 0; i < store->l1.zones_count; i++)
        look(store, i);
}

bool kvt_store_l1_turn(struct kvt_store *store, uint32_t budget)
{
    bool is_more = store->l1.is_dropping && drop_some(store, budget);

    kvt_store_l1_look(store);
    return is_more || store->l1.is_dropping;
}

uint64_t kvt_store_l1_next_ns(const struct kvt_store *store)
{
    const struct store_l1 *l1 = &store->l1;

    if (l1->lost == 0)
        return KVT_TIME_NEVER_NS;
    if (l1->is_dropping && kvt_store_index_has_room(store))
        return store->now_ns;
    return kvt_time_add(store->now_ns, LOOK_NS);
}

/* ---- readers in place ------------------------------------------------------------------------ */

/* False: one of them is lost, be it seen here already or not. Whoever heard of it before ends what
 * is held there now, and nothing may come behind that. */
static bool zones_of(struct kvt_store *store, struct cell *cell, uint32_t shards,
                     uint32_t *ret_zones)
{
    uint32_t zones = 0;

    for (uint32_t i = 0; i < shards; i++) {
        struct kvt_slot slot = *kvt_store_slot(store, cell, KVT_TIER_DEVICE, i);
        uint32_t idx = kvt_slab_zone(store->tiers[KVT_TIER_DEVICE].slab, slot);
        const struct store_l1_zone *zone = &store->l1.zones[idx];

        if (zone->out_since_ns != 0 ||
            atomic_load_explicit(&zone->counters->incarnation, memory_order_acquire) !=
                zone->incarnation)
            return false;
        zones |= 1u << idx;
    }
    *ret_zones = zones;
    return true;
}

bool kvt_store_hold_find(struct kvt_store *store, struct kvt_cell handle, uint32_t rank,
                         struct kvt_store_held *ret_held)
{
    struct cell *cell = kvt_store_cell_at(store, handle);
    const struct kvt_tier *tier = store->tiers[KVT_TIER_DEVICE].tier;
    const struct kvt_slab *slab = store->tiers[KVT_TIER_DEVICE].slab;
    struct kvt_slot slot;
    uint32_t shards, zone, zones;

    if (cell == NULL || !kvt_store_is_readable(cell, KVT_TIER_DEVICE))
        return false;
    shards = kvt_store_component(store, cell)->shards;
    if ((shards > 1 && rank >= shards) || !zones_of(store, cell, shards, &zones))
        return false;
    slot = *kvt_store_slot(store, cell, KVT_TIER_DEVICE, shards == 1 ? 0 : rank);
    zone = kvt_slab_zone(slab, slot);
    *ret_held = (struct kvt_store_held){
        .cell = kvt_store_cell_idx(store, cell),
        .zone = zone,
        .incarnation = store->l1.zones[zone].incarnation,
        .offset_bytes = kvt_slab_offset(slab, slot) -
                        (zone < tier->zones_count ? tier->zones[zone].base_bytes : 0),
        .zones = zones,
    };
    return true;
}

bool kvt_store_hold(struct kvt_store *store, const struct kvt_store_held *held)
{
    struct cell *cell = &store->cells[held->cell];

    KVT_ASSERT(kvt_store_is_readable(cell, KVT_TIER_DEVICE));
    if (cell->copies[KVT_TIER_DEVICE].pins >= CELL_HOLD_PINS_MAX)
        return false;
    kvt_store_pin(store, cell, KVT_TIER_DEVICE);
    store->l1.held++;
    return true;
}

void kvt_store_unhold(struct kvt_store *store, const struct kvt_store_held *held)
{
    KVT_ASSERT(store->l1.held > 0); /* a pinned record is not anybody else's */
    store->l1.held--;
    kvt_store_unpin(store, &store->cells[held->cell], KVT_TIER_DEVICE);
}

uint64_t kvt_store_held_count(const struct kvt_store *store)
{
    return store->l1.held;
}

/* ---- looking -------------------------------------------------------------------------------- */

const char *kvt_store_l1_check_cell(const struct kvt_store *store, const struct cell *cell,
                                    uint32_t idx)
{
    const struct store_component *component = &store->ns[cell->ns].components[cell->component];

    if (cell->copies[KVT_TIER_DEVICE].state == COPY_NONE)
        return NULL;
    if (!component->is_in_l1)
        return "a copy in L1 of what cannot be there";
    if (kvt_store_l1_is_lost(store, cell) && (!store->l1.is_dropping || idx < store->l1.drop_at))
        return "a copy in a lost zone of L1 that the walk has passed";
    return NULL;
}

void kvt_store_l1_stats(const struct kvt_store *store, struct kvt_store_stats *stats)
{
    stats->l1_losses = store->l1.losses;
    stats->l1_lost_copies = store->l1.dropped;
    stats->l1_zones_count = store->l1.zones_count;
    for (uint32_t i = 0; i < store->l1.zones_count; i++) {
        const struct store_l1_zone *zone = &store->l1.zones[i];

        kvt_slab_zone_stats(store->tiers[KVT_TIER_DEVICE].slab, i, &stats->l1_zones[i].slab);
        stats->l1_zones[i].incarnation = zone->incarnation;
        stats->l1_zones[i].out_ns =
            zone->out_since_ns == 0 ? 0 : KVT_MAX(store->now_ns - zone->out_since_ns, 1ull);
    }
}
