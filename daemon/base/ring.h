/* A bounded ring of pointers between threads: many producers, one consumer, no lock.
 *
 * Each cell carries a sequence number (D. Vyukov's bounded queue): a producer claims a position by
 * compare-and-swap, writes, then publishes by raising the cell's sequence. Putting a pointer on a
 * ring gives the object away; what was written to it before is visible to the taker. Full is an
 * answer, never a wait: the caller still owns its object and says "miss" or RESOURCE_EXHAUSTED.
 *
 * put: any thread. take: the one consumer. init/deinit: no other thread may be using it. */
#pragma once

#include <stdatomic.h>

#include "daemon/base/def.h"

struct kvt_ring_cell {
    _Atomic uint64_t sequence;
    void *item;
};

struct kvt_ring {
    struct kvt_ring_cell *cells;
    uint64_t mask;
    _Alignas(KVT_CACHE_LINE_BYTES) _Atomic uint64_t head; /* next position to put */
    _Alignas(KVT_CACHE_LINE_BYTES) _Atomic uint64_t tail; /* next position to take */
};

#define KVT_RING_E_FULL 1

/* @capacity is rounded up to a power of two, at least 2. -ENOMEM, or 0. */
KVT_MUST_USE int kvt_ring_init(struct kvt_ring *ring, uint32_t capacity);
void kvt_ring_deinit(struct kvt_ring *ring);
/* 0 and @item is given away, or KVT_RING_E_FULL and it is still the caller's. */
KVT_MUST_USE int kvt_ring_put(struct kvt_ring *ring, void *item);
/* NULL when empty. */
void *kvt_ring_take(struct kvt_ring *ring);
/* May be stale by the time it is read, except for the consumer asking "is there something". */
bool kvt_ring_is_empty(const struct kvt_ring *ring);
/* For the only producer: all that it put was taken. May say so late, never early. */
bool kvt_ring_is_drained(const struct kvt_ring *ring);
