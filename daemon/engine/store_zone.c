/* Devices of L3: which one a copy goes to, and what happens when one is gone.
 *
 *   in service ──▶ out: nothing new is put there, reads miss ──lost_after──▶ its copies are dropped
 *        ▲                        │                                              │
 *        └────────────────────────┴──────────── it answers again ◀───────────────┘
 *
 * Runs of neighbouring blocks of a path go to one device, and the next run to the next device: a
 * long prefix is read from all of them at once. The price is that it breaks off, when one is lost,
 * where that one's first run was; tests/bench/bench_stripe.c measures both. */
#include "daemon/base/clock.h"
#include "daemon/base/log.h"
#include "daemon/engine/store_internal.h"

#define CELLS_A_TURN 4096u /* looked at for a lost device */

const char *kvt_store_zone_name(const struct kvt_store *store, uint32_t idx)
{
    const struct kvt_tier *disk = store->tiers[KVT_TIER_DISK].tier;

    return idx < disk->zones_count && disk->zones[idx].name[0] != 0 ? disk->zones[idx].name : "L3";
}

void kvt_store_tell_bad_slot(const struct kvt_store *store, const struct kvt_xfer *xfer)
{
    uint64_t offset_bytes = xfer->src.offset_bytes;
    uint32_t idx = 0;

    while (idx + 1 < store->zones_count && store->zones[idx + 1].base_bytes <= offset_bytes)
        idx++;
    kvt_log_warn("L3: %s slot at %llu: %s; it is dropped", kvt_store_zone_name(store, idx),
                 (unsigned long long)(offset_bytes - store->zones[idx].base_bytes),
                 kvt_slot_verdict_text(xfer->verdict));
}

static bool is_same(struct kvt_radix_block a, struct kvt_radix_block b)
{
    return a.idx == b.idx && a.generation == b.generation && a.generation != 0;
}

/* A path is written from its root down (as it is stored) or from its leaf up (as it is evicted):
 * the neighbour that was written just before says where its run is, and whose turn it is where a
 * run ends. Another component of the same block comes before that. What has no such neighbour
 * begins on a device that its number picks. */
uint32_t kvt_store_pick_zone(struct kvt_store *store, const struct cell *cell)
{
    uint32_t run_blocks = store->config.stripe_blocks, zones = store->zones_count, picked;
    struct kvt_radix_block parent;
    uint64_t block_idx, hash;
    bool is_picked = false;

    if (zones <= 1)
        return 0;
    parent = kvt_radix_parent(store->radix, cell->block);
    block_idx = kvt_radix_depth_blocks(store->radix, cell->block) - 1;
    hash = kvt_store_block_id(store, cell->block) * 0x9e3779b97f4a7c15ull;
    picked = (uint32_t)((hash >> 32) * zones >> 32);
    for (uint32_t i = 1; i <= STORE_RECENT_MAX; i++) { /* the latest first */
        const struct store_recent *recent =
            &store->recent[(store->recent_at - i) % STORE_RECENT_MAX];

        if (is_same(recent->block, cell->block))
            return recent->zone;
        if (is_picked)
            continue;
        is_picked = is_same(recent->block, parent) || is_same(recent->parent, cell->block);
        if (is_same(recent->block, parent))
            picked = (recent->zone + (block_idx % run_blocks == 0)) % zones;
        else if (is_picked)
            picked = (recent->zone + ((block_idx + 1) % run_blocks == 0 ? zones - 1 : 0)) % zones;
    }
    return picked;
}

void kvt_store_zone_used(struct kvt_store *store, const struct cell *cell, uint32_t zone)
{
    if (store->zones_count <= 1)
        return;
    store->recent[store->recent_at++ % STORE_RECENT_MAX] = (struct store_recent){
        .block = cell->block,
        .parent = kvt_radix_parent(store->radix, cell->block),
        .zone = zone,
    };
}

static void zone_close(struct kvt_store *store, uint32_t idx, bool is_closed)
{
    struct store_zone *zone = &store->zones[idx];

    if (zone->is_closed == is_closed)
        return;
    zone->is_closed = is_closed;
    if (is_closed)
        kvt_slab_zone_close(store->tiers[KVT_TIER_DISK].slab, idx);
    else
        kvt_slab_zone_open(store->tiers[KVT_TIER_DISK].slab, idx);
    store->is_woken = true;
}

/* Copies on a device that is gone are gone: a slice of them. True: there is more. */
static bool drop_lost(struct kvt_store *store, uint32_t idx)
{
    struct store_zone *zone = &store->zones[idx];
    const struct kvt_slab *slab = store->tiers[KVT_TIER_DISK].slab;
    uint32_t end = KVT_MIN(zone->drop_at + CELLS_A_TURN, store->records_fresh + 1);
    bool is_patient = store->now_ns - zone->out_since_ns < 2 * store->config.lost_after_ns;

    for (; zone->drop_at < end; zone->drop_at++) {
        struct cell *cell = &store->cells[zone->drop_at];

        if (!cell->is_used || cell->is_orphan || cell->copies[KVT_TIER_DISK].state != COPY_READY ||
            kvt_slab_zone(slab, cell->slots[KVT_TIER_DISK]) != idx)
            continue;
        /* Its index may still work, and is to hear of it: for a while it is waited for. */
        if (is_patient && zone->drops_count >= store->drops_max / 2 && store->drops_max > 0)
            return false;
        kvt_store_let_go(store, cell, KVT_TIER_DISK, KVT_DROP_LOST);
    }
    zone->is_dropped = zone->drop_at > store->records_fresh;
    if (zone->is_dropped)
        kvt_log_warn("L3: %s stayed out of service: its blocks are forgotten",
                     kvt_store_zone_name(store, idx));
    return !zone->is_dropped;
}

bool kvt_store_zone_turn(struct kvt_store *store, uint32_t idx)
{
    struct store_zone *zone = &store->zones[idx];
    bool is_out =
        atomic_load_explicit(&zone->counters->health, memory_order_relaxed) != KVT_TIER_HEALTH_OK;

    if (!is_out && zone->out_since_ns != 0) {
        kvt_log_info("L3: %s is back in service", kvt_store_zone_name(store, idx));
        zone->out_since_ns = 0;
    } else if (is_out && zone->out_since_ns == 0) {
        kvt_log_warn("L3: %s is out of service; the other devices go on, its blocks are kept for "
                     "%llu s",
                     kvt_store_zone_name(store, idx),
                     (unsigned long long)(store->config.lost_after_ns / KVT_NS_PER_S));
        zone->out_since_ns = KVT_MAX(store->now_ns, (uint64_t)1);
    }
    /* What a load finds is taken even now: the device may be back soon. */
    zone_close(store, idx,
               (is_out && !zone->is_loading) || zone->is_index_lost || zone->is_behind ||
                   (zone->drop_at > 0 && !zone->is_dropped));
    if (!is_out && (zone->is_dropped || zone->drop_at == 0)) {
        zone->is_dropped = false;
        zone->drop_at = 0;
        return false;
    }
    if (zone->is_dropped || zone->is_loading ||
        (zone->drop_at == 0 && store->now_ns - zone->out_since_ns < store->config.lost_after_ns))
        return false;
    return drop_lost(store, idx); /* once begun it goes through, whatever the device does then */
}
