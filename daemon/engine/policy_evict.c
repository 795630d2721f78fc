#include "daemon/engine/policy_evict.h"

#define HEADROOM_SHARE 32u /* one slot in so many is kept free */
#define HEADROOM_SLOTS_MAX 64u

struct kvt_evict_marks kvt_evict_marks(uint64_t taken_slots, uint32_t shards)
{
    struct kvt_evict_marks marks;
    uint64_t low = taken_slots / HEADROOM_SHARE;

    low = KVT_MIN(low, (uint64_t)HEADROOM_SLOTS_MAX);
    /* A class of a few slots keeps nothing free: it would lose more hits than it saves waits. */
    if (taken_slots >= 8ull * shards)
        low = KVT_MAX(low, (uint64_t)shards);
    else
        low = 0;
    marks.low_slots = low;
    marks.high_slots = low * 2;
    return marks;
}

uint32_t kvt_evict_pick(const uint64_t *ages, uint32_t count)
{
    uint32_t best = KVT_EVICT_NONE;

    for (uint32_t i = 0; i < count; i++) {
        if (ages[i] == UINT64_MAX)
            continue;
        if (best == KVT_EVICT_NONE || ages[i] < ages[best])
            best = i;
    }
    return best;
}
