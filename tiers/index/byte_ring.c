#include "tiers/index/byte_ring.h"

#include <string.h>

#include "daemon/base/alloc.h"

int kvt_byte_ring_init(struct kvt_byte_ring *ring, uint64_t capacity)
{
    KVT_ASSERT(capacity > 0 && (capacity & (capacity - 1)) == 0);
    atomic_init(&ring->head, 0);
    atomic_init(&ring->tail, 0);
    ring->capacity = capacity;
    ring->bytes = kvt_alloc_zeroed(1, capacity);
    return ring->bytes == NULL ? kvt_trace(-ENOMEM) : 0;
}

void kvt_byte_ring_deinit(struct kvt_byte_ring *ring)
{
    kvt_free(ring->bytes);
    ring->bytes = NULL;
}

uint64_t kvt_byte_ring_used(const struct kvt_byte_ring *ring)
{
    uint64_t tail = atomic_load_explicit(&ring->tail, memory_order_acquire);

    return atomic_load_explicit(&ring->head, memory_order_acquire) - tail;
}

int kvt_byte_ring_put(struct kvt_byte_ring *ring, const void *data, uint64_t bytes)
{
    uint64_t head = atomic_load_explicit(&ring->head, memory_order_relaxed);
    uint64_t tail = atomic_load_explicit(&ring->tail, memory_order_acquire);
    uint64_t at = head & (ring->capacity - 1), first = KVT_MIN(bytes, ring->capacity - at);

    if (bytes > ring->capacity - (head - tail))
        return KVT_BYTE_RING_E_FULL;
    memcpy(ring->bytes + at, data, first);
    memcpy(ring->bytes, (const uint8_t *)data + first, bytes - first);
    atomic_store_explicit(&ring->head, head + bytes, memory_order_release);
    return 0;
}

void kvt_byte_ring_peek(const struct kvt_byte_ring *ring, void *to, uint64_t bytes)
{
    uint64_t tail = atomic_load_explicit(&ring->tail, memory_order_relaxed);
    uint64_t at = tail & (ring->capacity - 1), first = KVT_MIN(bytes, ring->capacity - at);

    KVT_ASSERT(bytes <= atomic_load_explicit(&ring->head, memory_order_acquire) - tail);
    memcpy(to, ring->bytes + at, first);
    memcpy((uint8_t *)to + first, ring->bytes, bytes - first);
}

void kvt_byte_ring_drop(struct kvt_byte_ring *ring, uint64_t bytes)
{
    uint64_t tail = atomic_load_explicit(&ring->tail, memory_order_relaxed);

    KVT_ASSERT(bytes <= atomic_load_explicit(&ring->head, memory_order_acquire) - tail);
    atomic_store_explicit(&ring->tail, tail + bytes, memory_order_release);
}
