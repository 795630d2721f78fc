/* The eviction policy: how many slots of a size are kept free ahead of need, and which size class
 * gives way. Who goes within a class is the tree's order (leaf first, least recently used).
 *
 * Watermarks are in slots of one class of one tier: below `low` the store begins to evict, up to
 * `high`. They grow with what the class holds, so that a busy class has room for a burst and a
 * small one does not lose a tenth of itself. Pure; any thread. */
#pragma once

#include "daemon/base/def.h"

struct kvt_evict_marks {
    uint64_t low_slots, high_slots;
};

/* @taken_slots of the class now; @shards: slots that one copy needs. */
struct kvt_evict_marks kvt_evict_marks(uint64_t taken_slots, uint32_t shards);

#define KVT_EVICT_NONE UINT32_MAX
/* Index of the oldest of @ages (lower is older, UINT64_MAX: nothing to evict), or NONE. */
uint32_t kvt_evict_pick(const uint64_t *ages, uint32_t count);
