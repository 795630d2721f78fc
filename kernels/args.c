/* Arguments that make no sense are refused before anything is queued: a kernel with a wrong shape
 * would leave bytes behind or spin, and nobody would be told. */
#include "kernels/args.h"

#define UNITS_MAX (1ull << 31) /* of work in one job: kernels count them in 32 bits */
#define UNIT_BYTES_MIN 64u
#define JOBS_MAX (1u << 31) /* fewer: kernels step through them by up to 4,096, in 32 bits */

int kvt_args_copy(const struct kvt_copy_batch *batch)
{
    uint64_t parts, chunks = kvt_div_up(batch->piece_bytes_max, UNIT_BYTES_MIN);

    if (batch->jobs_count == 0)
        return 0;
    if (batch->jobs == 0 || batch->jobs_count >= JOBS_MAX)
        return -EINVAL;
    if (batch->pieces_max == 0 || batch->blocks_max == 0)
        return -EINVAL;
    if (batch->piece_bytes_max == 0 || batch->piece_bytes_max > KVT_COPY_PIECE_BYTES_MAX)
        return -EINVAL;
    parts = (uint64_t)batch->pieces_max * batch->blocks_max;
    return parts < UNITS_MAX && parts * chunks < UNITS_MAX ? 0 : -EINVAL;
}

static bool copy_job_fits(const struct kvt_copy_batch *batch, const struct kvt_copy_job *job)
{
    const struct kvt_copy_piece *pieces = (const void *)(uintptr_t)job->pieces;

    if (job->payload == 0 || pieces == NULL || job->blocks == 0)
        return false;
    if (job->pieces_count > batch->pieces_max || job->blocks_count > batch->blocks_max)
        return false;
    for (uint32_t i = 0; i < job->pieces_count; i++) {
        if (pieces[i].bytes > batch->piece_bytes_max)
            return false;
        if (job->check != 0 && !kvt_copy_is_checkable(&pieces[i]))
            return false;
    }
    return true;
}

int kvt_jobs_copy(const struct kvt_copy_batch *batch)
{
    const struct kvt_copy_job *jobs = (const void *)(uintptr_t)batch->jobs;
    int r = kvt_args_copy(batch);

    for (uint32_t i = 0; r == 0 && i < batch->jobs_count; i++)
        r = copy_job_fits(batch, &jobs[i]) ? 0 : -EINVAL;
    return r;
}

int kvt_args_check(const struct kvt_check_batch *batch)
{
    if (batch->jobs_count == 0 || batch->bytes_max == 0)
        return 0;
    return batch->jobs == 0 || batch->jobs_count >= JOBS_MAX ? -EINVAL : 0;
}

int kvt_jobs_check(const struct kvt_check_batch *batch)
{
    const struct kvt_check_job *jobs = (const void *)(uintptr_t)batch->jobs;
    int r = kvt_args_check(batch);

    for (uint32_t i = 0; r == 0 && jobs != NULL && i < batch->jobs_count; i++) {
        bool is_there = jobs[i].bytes == 0 || jobs[i].payload != 0;

        if (!is_there || jobs[i].check == 0 || jobs[i].bytes > batch->bytes_max)
            r = -EINVAL;
    }
    return r;
}

int kvt_args_quant(const struct kvt_quant_batch *batch)
{
    const struct kvt_quant_spec *spec = &batch->spec;

    if (!kvt_quant_is_valid(spec) || spec->kind == KVT_QUANT_NONE)
        return -EINVAL;
    if (batch->jobs_count == 0)
        return 0;
    if (batch->jobs == 0 || batch->jobs_count >= JOBS_MAX || batch->planes_max == 0)
        return -EINVAL;
    return (uint64_t)batch->planes_max * spec->heads < UNITS_MAX ? 0 : -EINVAL;
}

int kvt_jobs_quant(const struct kvt_quant_batch *batch)
{
    const struct kvt_quant_job *jobs = (const void *)(uintptr_t)batch->jobs;
    int r = kvt_args_quant(batch);

    for (uint32_t i = 0; r == 0 && i < batch->jobs_count; i++) {
        const struct kvt_quant_job *job = &jobs[i];

        if (job->first_plane > job->end_plane || job->end_plane > job->planes_count ||
            job->end_plane - job->first_plane > batch->planes_max)
            r = -EINVAL;
        else if (job->raw == 0 || job->raw % 2 != 0 || job->quantised == 0 ||
                 job->quantised % 4 != 0)
            r = -EINVAL;
    }
    return r;
}

/* Of factors that are 32 bits wide; 0: one of them is 0, or it overflows. */
static uint64_t product(const uint32_t *factors, uint32_t count)
{
    uint64_t value = 1;

    for (uint32_t i = 0; i < count; i++) {
        if (__builtin_mul_overflow(value, (uint64_t)factors[i], &value))
            return 0;
    }
    return value;
}

uint64_t kvt_relayout_bytes(const struct kvt_relayout *change)
{
    const uint32_t factors[] = {change->layers, change->pages, change->tokens, change->heads,
                                change->head_bytes};

    return product(factors, KVT_COUNT_OF(factors));
}

static bool is_layout_order(uint32_t order)
{
    return order >= KVT_LAYOUT_LAYER_FIRST && order <= KVT_LAYOUT_PAGE_HEAD;
}

int kvt_args_relayout(const struct kvt_relayout *change)
{
    const uint32_t within_page[] = {change->tokens, change->heads, change->head_bytes};
    uint64_t bytes = kvt_relayout_bytes(change), src_end, dst_end;

    if (bytes == 0 || change->src == 0 || change->dst == 0)
        return -EINVAL;
    if (!is_layout_order(change->from) || !is_layout_order(change->to))
        return -EINVAL;
    if (product(within_page, KVT_COUNT_OF(within_page)) >= UNITS_MAX)
        return -EINVAL;
    if (__builtin_add_overflow(change->src, bytes, &src_end) ||
        __builtin_add_overflow(change->dst, bytes, &dst_end))
        return -EINVAL;
    return change->src < dst_end && change->dst < src_end ? -EINVAL : 0;
}
