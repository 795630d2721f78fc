/* The CPU reference: the plainest code that gives the right bytes, and quick enough to be what runs
 * where there is no GPU. A copy with a check adds up each stretch of the payload right after it was
 * moved, while it is in the nearest cache. */
#include <string.h>

#include "kernels/args.h"
#include "kernels/check.h"
#include "kernels/kvt_kernels.h"
#include "kernels/quant.h"

#define STRETCH_BYTES (32u << 10) /* of source and destination: the nearest caches hold both */

/* The bytes of the payload that were moved and not yet added up: [begin, end), a stretch at most.
 */
struct tally {
    const unsigned char *payload;
    uint64_t begin, end;
    uint64_t sum;
};

static void tally_flush(struct tally *tally)
{
    tally->sum += kvt_check64_part(tally->payload + tally->begin, tally->end - tally->begin,
                                   tally->begin / 8);
    tally->begin = tally->end;
}

/* Short parts are neighbours in the payload: one sum for many of them. */
static void tally_add(struct tally *tally, uint64_t offset, uint32_t bytes)
{
    if (offset != tally->end || tally->end - tally->begin + bytes > STRETCH_BYTES) {
        tally_flush(tally);
        tally->begin = offset;
    }
    tally->end = offset + bytes;
}

static void move_part(struct tally *tally, unsigned char *dst, const unsigned char *src,
                      uint64_t offset, uint32_t bytes)
{
    for (uint32_t done = 0; done < bytes;) {
        uint32_t stretch = KVT_MIN(bytes - done, STRETCH_BYTES);

        memcpy(dst + done, src + done, stretch);
        tally_add(tally, offset + done, stretch);
        done += stretch;
    }
}

static void copy_job(const struct kvt_copy_job *job, bool is_gather)
{
    const struct kvt_copy_piece *pieces = (const void *)(uintptr_t)job->pieces;
    const uint64_t *ids = (const void *)(uintptr_t)job->blocks;
    uint64_t *check = (void *)(uintptr_t)job->check;
    struct tally tally = {.payload = (const void *)(uintptr_t)job->payload};

    for (uint32_t p = 0; p < job->pieces_count; p++) {
        const struct kvt_copy_piece *piece = &pieces[p];

        for (uint32_t b = 0; b < job->blocks_count; b++) {
            uint64_t offset = piece->payload_offset_bytes + (uint64_t)b * piece->bytes;
            unsigned char *payload = (unsigned char *)(uintptr_t)job->payload + offset;
            unsigned char *pool = (void *)(uintptr_t)(piece->base + ids[b] * piece->stride_bytes);
            unsigned char *dst = is_gather ? payload : pool, *src = is_gather ? pool : payload;

            if (ids[b] == KVT_KERNEL_BLOCK_NONE)
                continue;
            if (check == NULL)
                memcpy(dst, src, piece->bytes);
            else
                move_part(&tally, dst, src, offset, piece->bytes);
        }
    }
    if (check != NULL) {
        tally_flush(&tally);
        *check += tally.sum;
    }
}

static int copy(const struct kvt_copy_batch *batch, bool is_gather)
{
    const struct kvt_copy_job *jobs = (const void *)(uintptr_t)batch->jobs;
    int r = kvt_jobs_copy(batch);

    for (uint32_t i = 0; r == 0 && i < batch->jobs_count; i++)
        copy_job(&jobs[i], is_gather);
    return r;
}

static int host_gather(void *stream, const struct kvt_copy_batch *batch)
{
    (void)stream;
    return copy(batch, true);
}

static int host_scatter(void *stream, const struct kvt_copy_batch *batch)
{
    (void)stream;
    return copy(batch, false);
}

static int host_check(void *stream, const struct kvt_check_batch *batch)
{
    const struct kvt_check_job *jobs = (const void *)(uintptr_t)batch->jobs;
    int r = kvt_jobs_check(batch);

    (void)stream;
    for (uint32_t i = 0; r == 0 && i < batch->jobs_count; i++) {
        uint64_t *check = (void *)(uintptr_t)jobs[i].check;

        *check += kvt_check64((const void *)(uintptr_t)jobs[i].payload, jobs[i].bytes);
    }
    return r;
}

/* In bytes, of one order. */
struct strides {
    uint64_t layer, page, token, head;
};

/* Each is the bytes of all that is faster than it. */
static struct strides strides_of(const struct kvt_relayout *change, uint32_t order)
{
    const uint64_t one = change->head_bytes, layers = change->layers, pages = change->pages;
    const uint64_t tokens = one * change->tokens, heads = one * change->heads;
    const uint64_t plane = tokens * change->heads;

    switch (order) {
    case KVT_LAYOUT_LAYER_FIRST:
        return (struct strides){plane * pages, plane, heads, one};
    case KVT_LAYOUT_PAGE_FIRST:
        return (struct strides){plane, plane * layers, heads, one};
    case KVT_LAYOUT_HEAD_SPLIT:
        return (struct strides){tokens, plane * layers, one, tokens * layers};
    case KVT_LAYOUT_LAYER_FIRST_HEADS:
        return (struct strides){plane * pages, plane, one, tokens};
    case KVT_LAYOUT_PAGE_FIRST_HEADS:
        return (struct strides){plane, plane * layers, one, tokens};
    case KVT_LAYOUT_LAYER_SPLIT:
        return (struct strides){plane * pages, tokens, one, tokens * pages};
    case KVT_LAYOUT_TOKEN_FIRST:
        return (struct strides){heads, plane * layers, heads * layers, one};
    default: /* KVT_LAYOUT_PAGE_HEAD */
        return (struct strides){one, plane * layers, one * layers, tokens * layers};
    }
}

static bool is_whole(const struct kvt_relayout *change, const struct strides *strides)
{
    return strides->head == change->head_bytes &&
           strides->token == (uint64_t)change->head_bytes * change->heads;
}

static void move_page(const struct kvt_relayout *change, uint32_t layer, uint32_t page)
{
    const struct strides from = strides_of(change, change->from);
    const struct strides to = strides_of(change, change->to);
    unsigned char *dst =
        (unsigned char *)(uintptr_t)change->dst + layer * to.layer + page * to.page;
    const unsigned char *src =
        (const unsigned char *)(uintptr_t)change->src + layer * from.layer + page * from.page;

    if (is_whole(change, &from) && is_whole(change, &to)) {
        memcpy(dst, src, (uint64_t)change->tokens * change->heads * change->head_bytes);
        return;
    }
    for (uint32_t token = 0; token < change->tokens; token++) {
        for (uint32_t head = 0; head < change->heads; head++)
            memcpy(dst + token * to.token + head * to.head,
                   src + token * from.token + head * from.head, change->head_bytes);
    }
}

static int host_relayout(void *stream, const struct kvt_relayout *change)
{
    int r = kvt_args_relayout(change);

    (void)stream;
    if (r != 0)
        return r;
    for (uint32_t page = 0; page < change->pages; page++) {
        for (uint32_t layer = 0; layer < change->layers; layer++)
            move_page(change, layer, page);
    }
    return 0;
}

static const struct kvt_kernels host_kernels = {
    .name = "host",
    .gather = host_gather,
    .scatter = host_scatter,
    .check = host_check,
    .quantise = kvt_host_quantise,
    .dequantise = kvt_host_dequantise,
    .relayout = host_relayout,
};

const struct kvt_kernels *kvt_kernels_host(void)
{
    return &host_kernels;
}
