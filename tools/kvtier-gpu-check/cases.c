/* Gather, scatter, check and change of layout, at every alignment. */
#include "tools/kvtier-gpu-check/cases.h"

#define JOBS_MAX 6u
#define PIECES_MAX 12u
#define BLOCKS_MAX 8u

uint64_t gpu_check_place(struct gpu_check_side *side, uint64_t bytes, uint32_t align)
{
    uint64_t begin = kvt_round_up(side->data_used, align);

    if (side->is_full || bytes > side->data_bytes || begin > side->data_bytes - bytes) {
        side->is_full = true;
        return 0;
    }
    side->data_used = begin + bytes;
    return side->data + begin;
}

void *gpu_check_take(struct gpu_check_side *side, uint64_t bytes, uint64_t *ret_address)
{
    uint64_t begin = kvt_round_up(side->lists_used, 8);

    if (side->is_full || bytes > side->lists_bytes || begin > side->lists_bytes - bytes) {
        side->is_full = true;
        return NULL;
    }
    side->lists_used = begin + bytes;
    *ret_address = side->lists + begin;
    return side->lists_memory + begin;
}

/* At exactly this alignment: 256 bytes and then so many more. */
static uint64_t place_at(struct gpu_check_side *side, uint64_t bytes, uint32_t offset)
{
    uint64_t at = gpu_check_place(side, bytes + offset, 256);

    return at == 0 ? 0 : at + offset;
}

static uint64_t below(struct gpu_check_side *side, uint64_t bound)
{
    return gpu_check_below(&side->random, bound);
}

struct shape { /* of one case: all its jobs */
    uint32_t offset, step, bytes_max;
    bool has_check;
};

static struct shape make_shape(struct gpu_check_side *side)
{
    static const uint32_t offsets[] = {0, 0, 16, 8, 1, 2, 3, 4, 5, 7, 12, 17, 24, 32, 48, 64};
    struct shape shape = {.offset = offsets[below(side, KVT_COUNT_OF(offsets))],
                          .step = 1u << below(side, 8)};

    shape.bytes_max = KVT_MAX(shape.step, 1u << below(side, 17));
    shape.has_check = shape.step % 8 == 0;
    return shape;
}

/* Pieces of a job and how long its pool and payload are. */
static struct kvt_copy_piece *make_pieces(struct gpu_check_side *side, const struct shape *shape,
                                          struct kvt_copy_job *job, uint64_t pool_blocks,
                                          uint64_t ret_bytes[2])
{
    struct kvt_copy_piece *pieces =
        gpu_check_take(side, job->pieces_count * sizeof(*pieces), &job->pieces);

    ret_bytes[0] = ret_bytes[1] = 0;
    for (uint32_t p = 0; pieces != NULL && p < job->pieces_count; p++) {
        uint64_t most = KVT_MAX(shape->bytes_max / shape->step, 1u);
        uint32_t bytes = (uint32_t)(1 + below(side, most)) * shape->step;

        pieces[p] = (struct kvt_copy_piece){.base = ret_bytes[0],
                                            .bytes = bytes,
                                            .payload_offset_bytes = ret_bytes[1],
                                            .stride_bytes = bytes + below(side, 3) * shape->step};
        ret_bytes[0] += pool_blocks * pieces[p].stride_bytes;
        ret_bytes[1] += (uint64_t)job->blocks_count * bytes;
    }
    return pieces;
}

static void make_ids(struct gpu_check_side *side, struct kvt_copy_job *job, uint64_t pool_blocks)
{
    uint64_t *ids = gpu_check_take(side, job->blocks_count * sizeof(*ids), &job->blocks);
    uint64_t first = below(side, pool_blocks);

    /* 13 shares no factor with pool_blocks, a power of two: no id comes twice. */
    for (uint32_t b = 0; ids != NULL && b < job->blocks_count; b++)
        ids[b] = (first + 13ull * b) % pool_blocks;
    if (ids != NULL && below(side, 4) == 0)
        ids[below(side, job->blocks_count)] = KVT_KERNEL_BLOCK_NONE;
}

static void make_job(struct gpu_check_side *side, const struct shape *shape,
                     struct kvt_copy_job *job, struct kvt_copy_batch *batch)
{
    uint64_t pool_blocks = 1ull << (3 + below(side, 2)), bytes[2], pool;
    struct kvt_copy_piece *pieces;

    static_assert(BLOCKS_MAX <= 8, "no more blocks than a pool has");
    job->pieces_count = 1 + (uint32_t)below(side, PIECES_MAX);
    job->blocks_count = 1 + (uint32_t)below(side, BLOCKS_MAX);
    pieces = make_pieces(side, shape, job, pool_blocks, bytes);
    make_ids(side, job, pool_blocks);
    pool = place_at(side, bytes[0], shape->offset);
    job->payload = place_at(side, bytes[1], shape->offset);
    if (shape->has_check && below(side, 3) > 0)
        job->check = gpu_check_place(side, sizeof(uint64_t), 8);
    if (side->is_full)
        return;
    batch->pieces_max = KVT_MAX(batch->pieces_max, job->pieces_count);
    batch->blocks_max = KVT_MAX(batch->blocks_max, job->blocks_count);
    for (uint32_t p = 0; p < job->pieces_count; p++) {
        pieces[p].base += pool;
        batch->piece_bytes_max = KVT_MAX(batch->piece_bytes_max, pieces[p].bytes);
    }
}

static void make_copy(struct gpu_check_side *side, union gpu_check_batch *ret_batch)
{
    struct kvt_copy_batch *batch = &ret_batch->copy;
    struct kvt_copy_job *jobs = gpu_check_take(side, JOBS_MAX * sizeof(*jobs), &batch->jobs);
    struct shape shape = make_shape(side);
    uint32_t count = 1 + (uint32_t)below(side, JOBS_MAX);

    if (jobs == NULL)
        return;
    while (batch->jobs_count < count && !side->is_full) {
        struct kvt_copy_job job = {0};

        make_job(side, &shape, &job, batch);
        if (!side->is_full)
            jobs[batch->jobs_count++] = job;
    }
    side->is_full = batch->jobs_count == 0; /* those that had room are a case, too */
}

static int launch_gather(const struct kvt_kernels *kernels, void *stream,
                         const union gpu_check_batch *batch)
{
    return kernels->gather(stream, &batch->copy);
}

static int launch_scatter(const struct kvt_kernels *kernels, void *stream,
                          const union gpu_check_batch *batch)
{
    return kernels->scatter(stream, &batch->copy);
}

static void make_check(struct gpu_check_side *side, union gpu_check_batch *ret_batch)
{
    struct kvt_check_batch *batch = &ret_batch->check;
    struct kvt_check_job *jobs = gpu_check_take(side, JOBS_MAX * sizeof(*jobs), &batch->jobs);
    uint32_t count = 1 + (uint32_t)below(side, JOBS_MAX);

    for (uint32_t i = 0; jobs != NULL && i < count; i++) {
        uint64_t bytes = 1 + below(side, 1ull << (1 + below(side, 17)));
        uint32_t offset = below(side, 2) == 0 ? 0 : (uint32_t)below(side, 64);

        jobs[i] = (struct kvt_check_job){.bytes = bytes};
        jobs[i].payload = place_at(side, bytes, offset);
        jobs[i].check = gpu_check_place(side, sizeof(uint64_t), 8);
        batch->bytes_max = KVT_MAX(batch->bytes_max, bytes);
        batch->jobs_count++;
    }
}

static int launch_check(const struct kvt_kernels *kernels, void *stream,
                        const union gpu_check_batch *batch)
{
    return kernels->check(stream, &batch->check);
}

/* All pairs of orders in turn. */
static void make_relayout(struct gpu_check_side *side, union gpu_check_batch *ret_batch)
{
    enum { ORDERS = KVT_LAYOUT_PAGE_HEAD }; /* the last of them */
    static const uint32_t head_bytes[] = {256, 128, 64, 16, 80, 8, 2, 6, 1, 33};
    struct kvt_relayout *change = &ret_batch->relayout;
    uint64_t bytes;

    *change =
        (struct kvt_relayout){.from = 1 + side->number % ORDERS,
                              .to = 1 + side->number / ORDERS % ORDERS,
                              .layers = 1 + (uint32_t)below(side, 6),
                              .pages = 1 + (uint32_t)below(side, 5),
                              .tokens = 1 + (uint32_t)below(side, 20),
                              .heads = 1 + (uint32_t)below(side, 8),
                              .head_bytes = head_bytes[below(side, KVT_COUNT_OF(head_bytes))]};
    bytes = (uint64_t)change->layers * change->pages * change->tokens * change->heads *
            change->head_bytes;
    change->src = place_at(side, bytes, below(side, 2) == 0 ? 0 : (uint32_t)below(side, 64));
    change->dst = place_at(side, bytes, below(side, 2) == 0 ? 0 : (uint32_t)below(side, 64));
}

static int launch_relayout(const struct kvt_kernels *kernels, void *stream,
                           const union gpu_check_batch *batch)
{
    return kernels->relayout(stream, &batch->relayout);
}

const struct gpu_check_kind gpu_check_copy_kinds[] = {
    {.name = "gather", .make = make_copy, .launch = launch_gather, .cases_min = 12},
    {.name = "scatter", .make = make_copy, .launch = launch_scatter, .cases_min = 12},
    {.name = "check", .make = make_check, .launch = launch_check, .cases_min = 12},
    {.name = "change of layout", .make = make_relayout, .launch = launch_relayout, .cases_min = 64},
    {.name = NULL},
};
