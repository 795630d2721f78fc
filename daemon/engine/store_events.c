/* What L3's indexes say: rows and copies at start, commits, and that one is lost. */
#include "daemon/base/clock.h"
#include "daemon/base/log.h"
#include "daemon/engine/store_internal.h"

#define EVENTS_A_TURN 2048u

static void tell_loaded(const struct kvt_store *store, uint32_t idx,
                        const struct kvt_index_event *event)
{
    const struct kvt_index_loaded *loaded = &event->loaded;

    kvt_log_info(
        "L3: %s: its index%s has %llu blocks with %llu copies, %llu rows did not hold, read "
        "in %llu ms%s%s",
        kvt_store_zone_name(store, idx), loaded->was_rebuilt ? ", made anew from its slots," : "",
        (unsigned long long)loaded->rows, (unsigned long long)loaded->copies,
        (unsigned long long)loaded->dropped, (unsigned long long)(loaded->took_ns / KVT_NS_PER_MS),
        event->why[0] != '\0' ? "; " : "", event->why);
    if (store->load.dropped > 0)
        kvt_log_warn(
            "L3: %llu blocks and copies of its indexes could not be taken: they do not fit "
            "the devices or the memory of the index any more",
            (unsigned long long)store->load.dropped);
}

static void take_event(struct kvt_store *store, uint32_t idx, const struct kvt_index_event *event)
{
    struct store_zone *zone = &store->zones[idx];

    switch (event->kind) {
    case KVT_INDEX_EVENT_ROW:
    case KVT_INDEX_EVENT_COPY:
        kvt_store_load_event(store, idx, event);
        break;
    case KVT_INDEX_EVENT_LOADED:
        kvt_store_load_event(store, idx, event);
        tell_loaded(store, idx, event);
        break;
    case KVT_INDEX_EVENT_COMMITTED:
        kvt_store_index_committed(store, idx, event);
        store->is_woken = true;
        break;
    case KVT_INDEX_EVENT_FAILED:
        kvt_store_load_event(store, idx, event);
        kvt_log_error("L3: the index of %s is lost: %s; nothing new is put there, what it holds is "
                      "served until the daemon stops; restart it to make the index anew",
                      kvt_store_zone_name(store, idx), event->why);
        zone->is_index_lost = true;
        store->is_woken = true;
        break;
    }
}

/* False: none now. A load stops in front of each stray: its parent may be on a device that has not
 * told all yet. */
static bool next_event(struct kvt_store *store, uint32_t idx, struct kvt_index_event *ret_event)
{
    struct store_zone *zone = &store->zones[idx];

    if (zone->is_at_stray || !kvt_index_next(zone->index, ret_event))
        return false;
    zone->has_begun = true;
    if (!zone->is_loading || !kvt_store_load_is_stray(store, ret_event))
        return true;
    zone->stray = *ret_event; /* it stays valid: nothing is asked of this index meanwhile */
    zone->is_at_stray = true;
    return false;
}

static bool take_some_events(struct kvt_store *store, uint32_t idx)
{
    struct kvt_index_event event;

    for (uint32_t i = 0; i < EVENTS_A_TURN; i++) {
        if (!next_event(store, idx, &event))
            return false;
        take_event(store, idx, &event);
    }
    return true;
}

static bool take_load_events(struct kvt_store *store, uint32_t idx)
{
    struct store_zone *zone = &store->zones[idx];
    bool is_more;

    if (zone->is_at_stray) {
        zone->is_at_stray = false;
        take_event(store, idx, &zone->stray);
    }
    is_more = take_some_events(store, idx);
    kvt_store_load_slice_end(store);
    /* Whose turn it is next gets no bell for it. */
    return is_more || zone->is_at_stray || !zone->is_loading;
}

/* One device after the other, each as soon as it has something to say: one whose slots are looked
 * through keeps the others waiting only for strays. When all stand in front of a stray, the least
 * deep one goes on, whose parent is there by now if it ever will be. */
static bool take_loads(struct kvt_store *store)
{
    uint32_t least = UINT32_MAX;
    bool is_silent = false;

    for (uint32_t i = 0; i < store->zones_count; i++)
        if (store->zones[i].is_loading && store->zones[i].has_begun && !store->zones[i].is_at_stray)
            return take_load_events(store, i);
    for (uint32_t i = 0; i < store->zones_count; i++) {
        struct store_zone *zone = &store->zones[i];
        bool is_more;

        if (!zone->is_loading || zone->has_begun)
            continue;
        is_more = take_load_events(store, i);
        if (zone->has_begun)
            return is_more;
        is_silent = true;
    }
    for (uint32_t i = 0; i < store->zones_count && !is_silent; i++)
        if (store->zones[i].is_loading &&
            (least == UINT32_MAX ||
             store->zones[i].stray.put.key.block_idx < store->zones[least].stray.put.key.block_idx))
            least = i;
    return least != UINT32_MAX && take_load_events(store, least);
}

bool kvt_store_take_events(struct kvt_store *store)
{
    bool is_more = false;

    for (uint32_t i = 0; i < store->zones_count; i++)
        if (store->zones[i].index != NULL && !store->zones[i].is_loading)
            is_more |= take_some_events(store, i);
    return take_loads(store) || is_more;
}
