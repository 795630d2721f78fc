/* How the making of an index from the slots goes on, for the log: a line for each device in ten
 * seconds. It may take as long as reading the device does, and nothing else would be said in that
 * time. What kvtier-ctl shows comes from the same counters. */
#include "daemon/base/log.h"
#include "daemon/base/size.h"
#include "daemon/engine/store_internal.h"

#define SAY_NS (10ull * KVT_NS_PER_S)
#define LOOK_NS KVT_NS_PER_S /* how late it is noticed that a scan began */

static uint64_t counter(const _Atomic uint64_t *at)
{
    return atomic_load_explicit(at, memory_order_relaxed);
}

static bool is_scanning(const struct store_zone *zone)
{
    return zone->is_loading && atomic_load_explicit(&zone->index->counters.state,
                                                    memory_order_relaxed) == KVT_INDEX_SCANNING;
}

static void say(const struct kvt_store *store, uint32_t idx, uint64_t done_bytes,
                uint64_t total_bytes)
{
    const struct store_zone *zone = &store->zones[idx];
    double seconds = (double)(store->now_ns - zone->said_ns) / (double)KVT_NS_PER_S;
    double rate = (double)(done_bytes - KVT_MIN(zone->said_bytes, done_bytes)) / seconds;
    char size[KVT_SIZE_TEXT_BYTES];

    kvt_size_format_short(total_bytes, size);
    kvt_log_info("L3: %s: looking through its slots, %u %% of %s, %.3g %s/s",
                 kvt_store_zone_name(store, idx),
                 (unsigned)((double)done_bytes / (double)total_bytes * 100), size,
                 rate < 1e9 ? rate / 1e6 : rate / 1e9, rate < 1e9 ? "MB" : "GB");
}

void kvt_store_progress_turn(struct kvt_store *store, uint32_t idx)
{
    struct store_zone *zone = &store->zones[idx];
    uint64_t done_bytes, total_bytes;

    if (!is_scanning(zone)) {
        zone->said_ns = 0;
        return;
    }
    if (zone->said_ns != 0 && store->now_ns - zone->said_ns < SAY_NS)
        return;
    done_bytes = counter(&zone->index->counters.scan_bytes);
    total_bytes = counter(&zone->index->counters.scan_total_bytes);
    if (zone->said_ns != 0 && total_bytes > 0)
        say(store, idx, KVT_MIN(done_bytes, total_bytes), total_bytes);
    zone->said_ns = KVT_MAX(store->now_ns, (uint64_t)1);
    zone->said_bytes = done_bytes;
}

uint64_t kvt_store_progress_next_ns(const struct kvt_store *store)
{
    uint64_t next_ns = KVT_TIME_NEVER_NS;

    for (uint32_t i = 0; i < store->zones_count; i++) {
        const struct store_zone *zone = &store->zones[i];

        if (zone->is_loading)
            next_ns = KVT_MIN(next_ns, zone->said_ns != 0 ? kvt_time_add(zone->said_ns, SAY_NS)
                                                          : kvt_time_add(store->now_ns, LOOK_NS));
    }
    return next_ns;
}
