/* Records in the catalogs of L3's devices: a namespace's, without which none of its rows counts
 * after a restart, and the device's state. They go through the device's index, so that a record is
 * durable before what is put behind it. */
#include "daemon/base/clock.h"
#include "daemon/engine/store_internal.h"

#define RECORD_RETRY_NS KVT_NS_PER_S /* after a record that could not be written */

int kvt_store_catalog_put(struct kvt_store *store, uint32_t zone, uint32_t number, const void *data,
                          uint32_t bytes, uint64_t *ret_seq)
{
    struct store_zone *at = &store->zones[zone];
    const struct kvt_index_put put = {.kind = KVT_INDEX_PUT_CATALOG,
                                      .catalog_number = number,
                                      .catalog_data = data,
                                      .catalog_bytes = bytes};
    int r;

    KVT_ASSERT(zone < store->zones_count);
    *ret_seq = 0;
    if (!kvt_store_zone_has_index(at))
        return 0;
    r = kvt_index_put(at->index, &put, &at->seq_put);
    at->is_record_first = r != 0; /* the caller tries again */
    if (r == 0)
        *ret_seq = at->seq_put;
    return r;
}

bool kvt_store_is_committed(const struct kvt_store *store, uint32_t zone, uint64_t seq)
{
    return seq <= store->zones[zone].seq_committed ||
           !kvt_store_zone_has_index(&store->zones[zone]);
}

/* ---- namespaces ------------------------------------------------------------------------------ */

void kvt_store_ns_set_recorded(struct kvt_store *store, struct kvt_radix_ns ns, uint32_t zones)
{
    store->ns[ns.idx].recorded = zones;
}

void kvt_store_ns_set_forgotten(struct kvt_store *store, struct kvt_radix_ns ns)
{
    store->ns[ns.idx].is_forgotten = true;
}

uint32_t kvt_store_ns_unrecorded(const struct kvt_store *store, struct kvt_radix_ns ns)
{
    const struct store_ns *at = &store->ns[ns.idx];
    uint32_t zones = 0;

    for (uint32_t i = 0; !at->is_forgotten && i < store->zones_count; i++)
        if (kvt_store_zone_has_index(&store->zones[i]))
            zones |= 1u << i;
    return zones & ~at->recorded;
}

int kvt_store_ns_record(struct kvt_store *store, struct kvt_radix_ns ns, uint32_t zone,
                        const void *data, uint32_t bytes)
{
    struct store_ns *at = &store->ns[ns.idx];
    uint64_t seq;
    int r;

    if ((at->record_refused & 1u << zone) != 0 && store->now_ns < at->record_retry_ns)
        return KVT_INDEX_E_FULL;
    r = kvt_store_catalog_put(store, zone, at->number, data, bytes, &seq);
    if (r != 0)
        return r;
    at->recorded |= 1u << zone;
    at->record_refused &= ~(1u << zone);
    at->record_seq[zone] = seq;
    return 0;
}

void kvt_store_records_refused(struct kvt_store *store, uint32_t zone, uint64_t seq)
{
    uint32_t bit = 1u << zone;

    for (uint32_t i = 0; i < store->ns_end; i++) {
        struct store_ns *ns = &store->ns[i];

        if (!ns->is_open || (ns->recorded & bit) == 0 ||
            ns->record_seq[zone] <= store->zones[zone].seq_committed || ns->record_seq[zone] > seq)
            continue;
        ns->recorded &= ~bit;
        ns->record_refused |= bit;
        ns->record_retry_ns = kvt_time_add(store->now_ns, RECORD_RETRY_NS);
    }
}

static bool is_recorded(const struct kvt_store *store, const struct store_ns *ns, uint32_t zone)
{
    return (ns->recorded & 1u << zone) != 0 &&
           ns->record_seq[zone] <= store->zones[zone].seq_committed;
}

bool kvt_store_ns_is_durable(const struct kvt_store *store, struct kvt_radix_ns ns)
{
    const struct store_ns *at = &store->ns[ns.idx];
    bool is_any = at->is_forgotten;

    for (uint32_t i = 0; !at->is_forgotten && i < store->zones_count; i++) {
        if (kvt_store_zone_is_kept(store, i) && !is_recorded(store, at, i))
            return false;
        is_any |= kvt_store_zone_is_kept(store, i);
    }
    return is_any;
}

/* ---- looking --------------------------------------------------------------------------------- */

bool kvt_store_zone_is_kept(const struct kvt_store *store, uint32_t zone)
{
    return zone < store->zones_count && kvt_store_zone_has_index(&store->zones[zone]) &&
           store->zones[zone].out_since_ns == 0;
}

bool kvt_store_has_index(const struct kvt_store *store)
{
    for (uint32_t i = 0; i < store->zones_count; i++)
        if (kvt_store_zone_has_index(&store->zones[i]))
            return true;
    return false;
}

uint32_t kvt_store_zones(const struct kvt_store *store)
{
    return store->zones_count;
}

bool kvt_store_is_unseen(const struct kvt_store *store, struct kvt_cell handle)
{
    const struct cell *cell = kvt_store_cell_at(store, handle);

    return cell != NULL && !cell->is_claimed && !kvt_store_is_seen(store, cell);
}

bool kvt_store_is_durable(const struct kvt_store *store, struct kvt_cell handle)
{
    const struct cell *cell = kvt_store_cell_at(store, handle);

    /* Without an index nothing outlives the daemon: "durable" is what a flush makes of it. */
    if (cell == NULL || !store->is_kept)
        return cell != NULL;
    return cell->is_indexed && kvt_store_is_seen(store, cell) &&
           is_recorded(store, &store->ns[cell->ns],
                       kvt_slab_zone(store->tiers[KVT_TIER_DISK].slab, cell->slots[KVT_TIER_DISK]));
}
