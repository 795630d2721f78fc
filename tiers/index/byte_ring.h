/* A bounded ring of bytes between two threads: what was put together is taken in the same order,
 * without a lock and without an allocation.
 *
 *   head counts all bytes that were ever put, tail all that were ever dropped; both only rise
 *
 * put: the one producer. used, peek, drop: the one consumer. The producer may ask for used too: it
 * is then at most what is said. init, deinit: nobody else may be using it. */
#pragma once

#include <stdatomic.h>

#include "daemon/base/def.h"

#define KVT_BYTE_RING_E_FULL 1

struct kvt_byte_ring {
    uint8_t *bytes;
    uint64_t capacity; /* a power of two */
    _Alignas(KVT_CACHE_LINE_BYTES) _Atomic uint64_t head;
    _Alignas(KVT_CACHE_LINE_BYTES) _Atomic uint64_t tail;
};

/* @capacity is a power of two. -ENOMEM, or 0. */
KVT_MUST_USE int kvt_byte_ring_init(struct kvt_byte_ring *ring, uint64_t capacity);
void kvt_byte_ring_deinit(struct kvt_byte_ring *ring);

/* All of it or KVT_BYTE_RING_E_FULL. */
KVT_MUST_USE int kvt_byte_ring_put(struct kvt_byte_ring *ring, const void *data, uint64_t bytes);
uint64_t kvt_byte_ring_used(const struct kvt_byte_ring *ring);
/* Copies the oldest @bytes, which must be there. */
void kvt_byte_ring_peek(const struct kvt_byte_ring *ring, void *to, uint64_t bytes);
void kvt_byte_ring_drop(struct kvt_byte_ring *ring, uint64_t bytes);
