/* Deadlines of leases, tickets and requests in a binary heap of embedded timers: the earliest is
 * heap->at[1]. A timer knows its place, so clearing is O(log n) and idempotent. Room for every
 * timer that can exist is taken at start. */
#include "daemon/base/alloc.h"
#include "daemon/engine/internal.h"

int eng_heap_init(struct eng_heap *heap, uint32_t max)
{
    *heap = (struct eng_heap){0};
    heap->at = kvt_alloc_zeroed((size_t)max + 1, sizeof(heap->at[0]));
    if (heap->at == NULL)
        return kvt_trace(-ENOMEM);
    heap->max = max;
    return 0;
}

void eng_heap_deinit(struct eng_heap *heap)
{
    kvt_free(heap->at);
    *heap = (struct eng_heap){0};
}

static void place(struct eng_heap *heap, uint32_t pos, struct eng_timer *timer)
{
    heap->at[pos] = timer;
    timer->heap_pos = pos;
}

static void sift_up(struct eng_heap *heap, uint32_t pos)
{
    struct eng_timer *timer = heap->at[pos];

    while (pos > 1 && heap->at[pos / 2]->at_ns > timer->at_ns) {
        place(heap, pos, heap->at[pos / 2]);
        pos /= 2;
    }
    place(heap, pos, timer);
}

static void sift_down(struct eng_heap *heap, uint32_t pos)
{
    struct eng_timer *timer = heap->at[pos];

    for (;;) {
        uint32_t child = pos * 2;

        if (child > heap->count)
            break;
        if (child < heap->count && heap->at[child + 1]->at_ns < heap->at[child]->at_ns)
            child++;
        if (heap->at[child]->at_ns >= timer->at_ns)
            break;
        place(heap, pos, heap->at[child]);
        pos = child;
    }
    place(heap, pos, timer);
}

void eng_timer_clear(struct eng_heap *heap, struct eng_timer *timer)
{
    uint32_t pos = timer->heap_pos;
    struct eng_timer *last;

    if (pos == 0)
        return;
    KVT_ASSERT(pos <= heap->count && heap->at[pos] == timer);
    timer->heap_pos = 0;
    last = heap->at[heap->count--];
    if (last == timer)
        return;
    place(heap, pos, last);
    sift_up(heap, pos);
    sift_down(heap, last->heap_pos);
}

void eng_timer_set(struct eng_heap *heap, struct eng_timer *timer, uint64_t at_ns)
{
    eng_timer_clear(heap, timer);
    timer->at_ns = at_ns;
    if (at_ns == KVT_TIME_NEVER_NS)
        return;
    KVT_ASSERT(heap->count < heap->max);
    place(heap, ++heap->count, timer);
    sift_up(heap, heap->count);
}

struct eng_timer *eng_heap_due(struct eng_heap *heap, uint64_t now_ns)
{
    return heap->count > 0 && heap->at[1]->at_ns <= now_ns ? heap->at[1] : NULL;
}

uint64_t eng_heap_next_ns(const struct eng_heap *heap)
{
    return heap->count > 0 ? heap->at[1]->at_ns : KVT_TIME_NEVER_NS;
}

bool eng_heap_check(const struct eng_heap *heap)
{
    for (uint32_t pos = 1; pos <= heap->count; pos++) {
        if (heap->at[pos]->heap_pos != pos)
            return false;
        if (pos > 1 && heap->at[pos / 2]->at_ns > heap->at[pos]->at_ns)
            return false;
    }
    return true;
}
