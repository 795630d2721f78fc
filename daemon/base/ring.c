#include "daemon/base/ring.h"

#include "daemon/base/alloc.h"

int kvt_ring_init(struct kvt_ring *ring, uint32_t capacity)
{
    uint64_t count = 2;

    while (count < capacity)
        count *= 2;
    ring->cells = kvt_alloc_zeroed(count, sizeof(*ring->cells));
    if (ring->cells == NULL)
        return kvt_trace(-ENOMEM);
    for (uint64_t i = 0; i < count; i++)
        atomic_init(&ring->cells[i].sequence, i);
    ring->mask = count - 1;
    atomic_init(&ring->head, 0);
    atomic_init(&ring->tail, 0);
    return 0;
}

void kvt_ring_deinit(struct kvt_ring *ring)
{
    kvt_free(ring->cells);
    ring->cells = NULL;
}

int kvt_ring_put(struct kvt_ring *ring, void *item)
{
    uint64_t head = atomic_load_explicit(&ring->head, memory_order_relaxed);

    KVT_ASSERT(item != NULL);
    for (;;) {
        struct kvt_ring_cell *cell = &ring->cells[head & ring->mask];
        uint64_t sequence = atomic_load_explicit(&cell->sequence, memory_order_acquire);

        if (sequence == head) {
            if (atomic_compare_exchange_weak_explicit(&ring->head, &head, head + 1,
                                                      memory_order_relaxed, memory_order_relaxed)) {
                cell->item = item;
                atomic_store_explicit(&cell->sequence, head + 1, memory_order_release);
                return 0;
            }
        } else if (sequence < head) {
            return KVT_RING_E_FULL;
        } else {
            head = atomic_load_explicit(&ring->head, memory_order_relaxed);
        }
    }
}

void *kvt_ring_take(struct kvt_ring *ring)
{
    uint64_t tail = atomic_load_explicit(&ring->tail, memory_order_relaxed);
    struct kvt_ring_cell *cell = &ring->cells[tail & ring->mask];
    void *item;

    if (atomic_load_explicit(&cell->sequence, memory_order_acquire) != tail + 1)
        return NULL;
    item = cell->item;
    atomic_store_explicit(&cell->sequence, tail + ring->mask + 1, memory_order_release);
    atomic_store_explicit(&ring->tail, tail + 1, memory_order_relaxed);
    return item;
}

bool kvt_ring_is_empty(const struct kvt_ring *ring)
{
    uint64_t tail = atomic_load_explicit(&ring->tail, memory_order_relaxed);
    const struct kvt_ring_cell *cell = &ring->cells[tail & ring->mask];

    return atomic_load_explicit(&cell->sequence, memory_order_seq_cst) != tail + 1;
}

bool kvt_ring_is_drained(const struct kvt_ring *ring)
{
    return atomic_load_explicit(&ring->tail, memory_order_relaxed) ==
           atomic_load_explicit(&ring->head, memory_order_relaxed);
}
