/* What L3's index is told to forget: copies that go, blocks that go, epochs that are over.
 *
 *   copy or block goes ──put──▶ index of its zone   (full ring: over the zone's `drops`, in order)
 *
 * Each zone has a queue of its own, so that a device that hangs, or whose index is still being
 * read, holds up no other. A slot may be given anew as soon as its copy is gone here: what is put
 * in its place is told behind the drop, since copies wait for the drops of their zone, and so the
 * index never has two copies in one slot. Where a drop finds no place any more that order is lost;
 * then the zone is *behind*, and gives no slots until the next start. */
#include "daemon/base/log.h"
#include "daemon/engine/store_internal.h"

static int put_drop(struct kvt_store *store, const struct drop *drop)
{
    struct store_zone *zone = &store->zones[drop->zone];
    const struct kvt_index_put put = {
        .kind = (enum kvt_index_put_kind)drop->kind,
        .key = {drop->ns, drop->epoch, drop->block_idx, drop->block_id},
        .component = drop->component,
    };

    return kvt_store_zone_has_index(zone) ? kvt_index_put(zone->index, &put, &zone->seq_put) : 0;
}

static void fall_behind(struct kvt_store *store, uint32_t idx)
{
    struct store_zone *zone = &store->zones[idx];

    store->index_stale++;
    if (zone->is_behind)
        return;
    zone->is_behind = true;
    kvt_log_error("L3: the index of %s does not take what has to be removed from it: nothing new "
                  "is put there until the daemon is restarted",
                  kvt_store_zone_name(store, idx));
}

/* In order: behind one that waits, all of its zone wait. */
static void put_drop_or_queue(struct kvt_store *store, const struct drop *drop)
{
    struct store_zone *zone = &store->zones[drop->zone];

    if (zone->drops_count == 0 && !zone->is_record_first && put_drop(store, drop) == 0)
        return;
    if (zone->drops_count == store->drops_max)
        fall_behind(store, drop->zone);
    else
        zone->drops[(zone->drops_head + zone->drops_count++) % store->drops_max] = *drop;
}

void kvt_store_put_drops(struct kvt_store *store, uint32_t idx, uint32_t *inout_budget)
{
    struct store_zone *zone = &store->zones[idx];

    while (zone->drops_count > 0 && !zone->is_record_first && *inout_budget > 0 &&
           put_drop(store, &zone->drops[zone->drops_head]) == 0) {
        zone->drops_head = (zone->drops_head + 1) % store->drops_max;
        zone->drops_count--;
        (*inout_budget)--;
    }
}

/* A zone that is out of service is not waited for. */
static bool has_room(const struct kvt_store *store, const struct store_zone *zone)
{
    return zone->drops_count < (store->drops_max + 1) / 2 || zone->out_since_ns != 0;
}

bool kvt_store_index_has_room_in(const struct kvt_store *store, uint32_t zone)
{
    return has_room(store, &store->zones[zone]);
}

bool kvt_store_index_has_room(const struct kvt_store *store)
{
    for (uint32_t i = 0; store->is_kept && i < store->zones_count; i++)
        if (!has_room(store, &store->zones[i]))
            return false;
    return true;
}

void kvt_store_index_forget(struct kvt_store *store, struct cell *cell)
{
    uint64_t tag;
    struct drop drop = {
        .epoch = store->ns[cell->ns].epoch,
        .ns = (uint16_t)store->ns[cell->ns].number,
        .component = cell->component,
        .kind = KVT_INDEX_PUT_DROP_COPY,
    };

    if (!store->is_kept)
        return;
    cell->is_indexed = 0;
    drop.zone = (uint16_t)kvt_slab_zone(store->tiers[KVT_TIER_DISK].slab,
                                        *kvt_store_slot(store, cell, KVT_TIER_DISK, 0));
    tag = kvt_radix_tag(store->radix, cell->block);
    drop.block_id = tag & STORE_STAMP_MASK;
    if ((tag >> STORE_TAG_ZONES_SHIFT & 1ull << drop.zone) == 0)
        return; /* the zone never had its row, or the block is gone and its rows with it */
    if (drop.block_id < store->ns[cell->ns].first_id)
        return; /* of an older epoch: one DROP_OLD spoke for all of them */
    /* Detached ones too: their rows go when they are reaped, but the slot is free before, and
     * whatever is put there next must come after this. */
    drop.block_idx = (uint32_t)kvt_radix_depth_blocks_any(store->radix, cell->block);
    KVT_ASSERT(drop.block_idx > 0); /* it has a tag, so it is there */
    drop.block_idx--;
    put_drop_or_queue(store, &drop);
}

void kvt_store_index_drop(struct kvt_store *store, uint32_t zone, const struct kvt_index_put *copy)
{
    const struct drop drop = {
        .epoch = copy->key.epoch,
        .block_id = copy->key.block_id,
        .block_idx = copy->key.block_idx,
        .ns = copy->key.ns,
        .component = copy->component,
        .zone = (uint16_t)zone,
        .kind = KVT_INDEX_PUT_DROP_COPY,
    };

    put_drop_or_queue(store, &drop);
}

void kvt_store_block_gone(struct kvt_store *store, const struct kvt_radix_gone *gone)
{
    uint32_t zones = (uint32_t)(gone->tag >> STORE_TAG_ZONES_SHIFT);
    const struct store_ns *ns = &store->ns[gone->ns.idx];
    struct drop drop = {
        .epoch = ns->epoch,
        .block_id = gone->tag & STORE_STAMP_MASK,
        .block_idx = (uint32_t)gone->block_idx,
        .ns = (uint16_t)ns->number,
        .kind = KVT_INDEX_PUT_DROP_ROW,
    };

    if (drop.block_id < ns->first_id)
        return; /* of an older epoch: one DROP_OLD spoke for all of them */
    for (uint32_t i = 0; i < store->zones_count; i++) {
        drop.zone = (uint16_t)i;
        if ((zones & 1u << i) != 0)
            put_drop_or_queue(store, &drop);
    }
}

void kvt_store_index_reset(struct kvt_store *store, uint32_t ns)
{
    struct drop drop = {
        .epoch = store->ns[ns].epoch,
        .ns = (uint16_t)store->ns[ns].number,
        .kind = KVT_INDEX_PUT_DROP_OLD,
    };

    store->ns[ns].first_id = store->stamp_next;
    store->ns[ns].recorded = 0;
    for (uint32_t i = 0; store->is_kept && i < store->zones_count; i++) {
        drop.zone = (uint16_t)i;
        put_drop_or_queue(store, &drop);
    }
}
