#include "tiers/zones.h"

uint32_t kvt_zone_of(const struct kvt_tier *tier, uint64_t offset_bytes)
{
    uint32_t zone = 0;

    KVT_ASSERT(offset_bytes < tier->capacity_bytes);
    while (offset_bytes - tier->zones[zone].base_bytes >= tier->zones[zone].bytes)
        zone++;
    return zone;
}

void kvt_zones_sum(struct kvt_tier *tier)
{
    static const size_t fields[] = {
        offsetof(struct kvt_tier_counters, reads),
        offsetof(struct kvt_tier_counters, writes),
        offsetof(struct kvt_tier_counters, flushes),
        offsetof(struct kvt_tier_counters, read_bytes),
        offsetof(struct kvt_tier_counters, written_bytes),
        offsetof(struct kvt_tier_counters, errors_io),
        offsetof(struct kvt_tier_counters, errors_bad_slot[0]),
        offsetof(struct kvt_tier_counters, errors_bad_slot[1]),
        offsetof(struct kvt_tier_counters, errors_bad_slot[2]),
        offsetof(struct kvt_tier_counters, errors_bad_slot[3]),
        offsetof(struct kvt_tier_counters, errors_bad_slot[4]),
        offsetof(struct kvt_tier_counters, errors_bad_slot[5]),
        offsetof(struct kvt_tier_counters, errors_client_gone),
        offsetof(struct kvt_tier_counters, errors_late),
        offsetof(struct kvt_tier_counters, errors_short),
        offsetof(struct kvt_tier_counters, errors_no_space),
        offsetof(struct kvt_tier_counters, outages),
        offsetof(struct kvt_tier_counters, busy_ns),
    };

    static_assert(KVT_COUNT_OF(fields) * sizeof(uint64_t) ==
                      offsetof(struct kvt_tier_counters, health),
                  "every counter is summed");
    for (size_t f = 0; f < KVT_COUNT_OF(fields); f++) {
        uint64_t sum = 0;

        for (uint32_t i = 0; i < tier->zones_count; i++)
            sum += atomic_load_explicit(
                (_Atomic uint64_t *)((uint8_t *)tier->zones[i].counters + fields[f]),
                memory_order_relaxed);
        atomic_store_explicit((_Atomic uint64_t *)((uint8_t *)&tier->counters + fields[f]), sum,
                              memory_order_relaxed);
    }
}
