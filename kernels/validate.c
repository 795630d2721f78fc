/* kvt_copy_validate: a job comes from what a client declared, so every sum may overflow and every
 * two ranges may meet. The ranges of the pool are sorted by where they begin; two that share a byte
 * are then neighbours. Heap sort: no recursion, no memory of its own, no bad case. */
#include "daemon/base/alloc.h"
#include "kernels/kvt_kernels.h"

struct range {
    uint64_t begin, end; /* end is the first byte behind it */
};

static void sift_down(struct range *heap, uint64_t root, uint64_t count)
{
    const struct range moved = heap[root];

    for (;;) {
        uint64_t child = 2 * root + 1;

        if (child >= count)
            break;
        if (child + 1 < count && heap[child].begin < heap[child + 1].begin)
            child++;
        if (heap[child].begin <= moved.begin)
            break;
        heap[root] = heap[child];
        root = child;
    }
    heap[root] = moved;
}

static void sort_ranges(struct range *ranges, uint64_t count)
{
    for (uint64_t i = count / 2; i-- > 0;)
        sift_down(ranges, i, count);
    for (uint64_t end = count; end-- > 1;) {
        const struct range greatest = ranges[0];

        ranges[0] = ranges[end];
        ranges[end] = greatest;
        sift_down(ranges, 0, end);
    }
}

static bool do_meet(struct range *ranges, uint64_t count)
{
    sort_ranges(ranges, count);
    for (uint64_t i = 1; i < count; i++) {
        if (ranges[i].begin < ranges[i - 1].end)
            return true;
    }
    return false;
}

/* @bytes is at least 1. */
static bool range_of(uint64_t begin, uint64_t bytes, struct range *ret_range)
{
    *ret_range = (struct range){.begin = begin};
    return !__builtin_add_overflow(begin, bytes, &ret_range->end);
}

static int check_piece(const struct kvt_copy_job *job, const struct kvt_copy_piece *piece,
                       uint64_t payload_bytes)
{
    uint64_t bytes = (uint64_t)piece->bytes * job->blocks_count, end;

    if (piece->pad != 0)
        return -EINVAL;
    if (piece->bytes == 0)
        return KVT_COPY_E_EMPTY;
    if (piece->stride_bytes < piece->bytes)
        return KVT_COPY_E_STRIDE;
    if (piece->bytes > KVT_COPY_PIECE_BYTES_MAX)
        return KVT_COPY_E_RANGE;
    if (__builtin_add_overflow(piece->payload_offset_bytes, bytes, &end) || end > payload_bytes)
        return KVT_COPY_E_RANGE;
    if (job->check != 0 && !kvt_copy_is_checkable(piece))
        return KVT_COPY_E_UNCHECKED;
    return 0;
}

/* Where block @id of the piece lies in the pool. */
static bool part_of(const struct kvt_copy_piece *piece, uint64_t id, struct range *ret_range)
{
    uint64_t offset, begin;

    if (__builtin_mul_overflow(id, piece->stride_bytes, &offset) ||
        __builtin_add_overflow(piece->base, offset, &begin))
        return false;
    return range_of(begin, piece->bytes, ret_range);
}

/* The payload's ranges, one a piece, first: the entries are there for those of the pool anyway. */
static bool do_payload_parts_meet(const struct kvt_copy_job *job,
                                  const struct kvt_copy_piece *pieces, struct range *ranges)
{
    for (uint32_t p = 0; p < job->pieces_count; p++) {
        ranges[p].begin = pieces[p].payload_offset_bytes;
        ranges[p].end = ranges[p].begin + (uint64_t)pieces[p].bytes * job->blocks_count;
    }
    return do_meet(ranges, job->pieces_count);
}

static int check_pool(const struct kvt_copy_job *job, const struct kvt_copy_piece *pieces,
                      struct range payload, struct range *ranges)
{
    const uint64_t *ids = (const void *)(uintptr_t)job->blocks;
    uint64_t count = 0;

    for (uint32_t p = 0; p < job->pieces_count; p++) {
        for (uint32_t b = 0; b < job->blocks_count; b++) {
            struct range *range = &ranges[count];

            if (ids[b] == KVT_KERNEL_BLOCK_NONE)
                continue;
            if (!part_of(&pieces[p], ids[b], range))
                return KVT_COPY_E_RANGE;
            if (range->begin < payload.end && payload.begin < range->end)
                return KVT_COPY_E_OVERLAP;
            count++;
        }
    }
    return do_meet(ranges, count) ? KVT_COPY_E_OVERLAP : 0;
}

int kvt_copy_validate(const struct kvt_copy_job *job, uint64_t payload_bytes)
{
    const struct kvt_copy_piece *pieces = (const void *)(uintptr_t)job->pieces;
    const uint64_t parts_count = (uint64_t)job->pieces_count * job->blocks_count;
    kvt_autofree struct range *ranges = NULL;
    struct range payload;

    if (parts_count == 0)
        return KVT_COPY_E_EMPTY;
    if (!range_of(job->payload, payload_bytes, &payload))
        return KVT_COPY_E_RANGE;
    for (uint32_t p = 0; p < job->pieces_count; p++) {
        int r = check_piece(job, &pieces[p], payload_bytes);

        if (r != 0)
            return r;
    }
    if (parts_count > UINT32_MAX)
        return -ENOMEM;
    ranges = kvt_alloc_zeroed(parts_count, sizeof(*ranges));
    if (ranges == NULL)
        return -ENOMEM;
    if (do_payload_parts_meet(job, pieces, ranges))
        return KVT_COPY_E_OVERLAP;
    return check_pool(job, pieces, payload, ranges);
}
