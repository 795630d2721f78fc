/* Sizes of quantised payloads, and the CPU's conversion. A (plane, head) is a set of rows of
 * head_dim elements, one a token: `rows_of` says where they lie, and everything else walks them.
 *
 *   tokens first   row t of head h at ((t * heads) + h) * head_dim
 *   heads first    row t of head h at ((h * tokens) + t) * head_dim, so one row of them all */
#include "kernels/quant.h"

#include <string.h>

#include "kernels/args.h"
#include "kernels/dialect_c.h"
#include "kernels/loops.h"
#include "kernels/number.h"

#define DIMENSION_MAX 65536u
#define PLANE_BYTES_MAX (1ull << 30)
#define SECTION_ALIGN_BYTES 16u

bool kvt_quant_is_valid(const struct kvt_quant_spec *spec)
{
    const uint32_t sizes[] = {spec->plane_tokens, spec->heads, spec->head_dim};

    if (spec->kind > KVT_QUANT_INT8 || spec->pad != 0)
        return false;
    if (spec->elem != KVT_ELEM_FP16 && spec->elem != KVT_ELEM_BF16)
        return false;
    if (spec->order != KVT_ORDER_TOKENS_FIRST && spec->order != KVT_ORDER_HEADS_FIRST)
        return false;
    for (uint32_t i = 0; i < KVT_COUNT_OF(sizes); i++) {
        if (sizes[i] == 0 || sizes[i] > DIMENSION_MAX)
            return false;
    }
    /* At most 2^49: no overflow. */
    return kvt_quant_plane_bytes(spec) <= PLANE_BYTES_MAX;
}

static uint64_t plane_elems(const struct kvt_quant_spec *spec)
{
    return (uint64_t)spec->plane_tokens * spec->heads * spec->head_dim;
}

uint64_t kvt_quant_plane_bytes(const struct kvt_quant_spec *spec)
{
    return plane_elems(spec) * 2;
}

uint64_t kvt_quant_scales_offset(const struct kvt_quant_spec *spec, uint64_t raw_bytes)
{
    uint64_t plane_bytes = kvt_quant_plane_bytes(spec);

    if (raw_bytes == 0 || plane_bytes == 0 || raw_bytes % plane_bytes != 0)
        return 0;
    return kvt_round_up(raw_bytes / 2, SECTION_ALIGN_BYTES);
}

uint64_t kvt_quant_bytes(const struct kvt_quant_spec *spec, uint64_t raw_bytes)
{
    uint64_t offset = kvt_quant_scales_offset(spec, raw_bytes), scales_bytes;

    if (offset == 0)
        return 0;
    /* A plane has at least 2 raw bytes a head, so the scales are at most twice the raw bytes. */
    if (raw_bytes > UINT64_MAX / 4)
        return 0;
    scales_bytes = raw_bytes / kvt_quant_plane_bytes(spec) * spec->heads * sizeof(float);
    return offset + kvt_round_up(scales_bytes, SECTION_ALIGN_BYTES);
}

struct rows {
    uint64_t count, elems; /* rows, and elements of each */
    uint64_t first, step;  /* in elements, from the plane's beginning */
};

static struct rows rows_of(const struct kvt_quant_spec *spec, uint32_t head)
{
    if (spec->order == KVT_ORDER_HEADS_FIRST)
        return (struct rows){.count = 1,
                             .elems = (uint64_t)spec->plane_tokens * spec->head_dim,
                             .first = (uint64_t)head * spec->plane_tokens * spec->head_dim};
    return (struct rows){.count = spec->plane_tokens,
                         .elems = spec->head_dim,
                         .first = (uint64_t)head * spec->head_dim,
                         .step = (uint64_t)spec->heads * spec->head_dim};
}

static int kinds_of(const struct kvt_quant_spec *spec)
{
    return (spec->elem == KVT_ELEM_BF16 ? KVT_LOOPS_BF16 : 0) |
           (spec->kind == KVT_QUANT_INT8 ? KVT_LOOPS_INT8 : 0);
}

/* Returns the scale. */
static float encode_head(const struct kvt_quant_spec *spec, uint32_t head, const unsigned char *raw,
                         unsigned char *codes)
{
    const struct kvt_loops *loops = kvt_loops();
    const struct rows rows = rows_of(spec, head);
    const int kinds = kinds_of(spec);
    uint32_t most = 0;
    float scale;

    for (uint64_t i = 0; i < rows.count; i++) {
        uint32_t magnitude =
            loops->magnitude(raw + (rows.first + i * rows.step) * 2, rows.elems, kinds);

        most = KVT_MAX(most, magnitude);
    }
    scale = kvt_quant_scale(most, kinds & KVT_LOOPS_BF16, kinds & KVT_LOOPS_INT8);
    for (uint64_t i = 0; i < rows.count; i++) {
        uint64_t at = rows.first + i * rows.step;

        loops->encode(codes + at, raw + at * 2, rows.elems, scale, kinds);
    }
    return scale;
}

static void decode_head(const struct kvt_quant_spec *spec, uint32_t head, float scale,
                        const unsigned char *codes, unsigned char *raw)
{
    const struct kvt_loops *loops = kvt_loops();
    const struct rows rows = rows_of(spec, head);
    const int kinds = kinds_of(spec);

    for (uint64_t i = 0; i < rows.count; i++) {
        uint64_t at = rows.first + i * rows.step;

        loops->decode(raw + at * 2, codes + at, rows.elems, scale, kinds);
    }
}

/* The zeros behind the codes and behind the scales. */
static void fill_gaps(const struct kvt_quant_spec *spec, const struct kvt_quant_job *job,
                      unsigned char *quantised)
{
    const uint64_t raw_bytes = kvt_quant_plane_bytes(spec) * job->planes_count;
    const uint64_t scales = kvt_quant_scales_offset(spec, raw_bytes);
    const uint64_t scales_end = scales + (uint64_t)job->planes_count * spec->heads * sizeof(float);

    memset(quantised + raw_bytes / 2, 0, scales - raw_bytes / 2);
    memset(quantised + scales_end, 0, kvt_quant_bytes(spec, raw_bytes) - scales_end);
}

static void convert_job(const struct kvt_quant_spec *spec, const struct kvt_quant_job *job,
                        bool is_encode)
{
    const uint64_t elems = plane_elems(spec);
    unsigned char *raw = (void *)(uintptr_t)job->raw;
    unsigned char *quantised = (void *)(uintptr_t)job->quantised;
    unsigned char *scales =
        quantised + kvt_quant_scales_offset(spec, elems * 2 * job->planes_count);

    for (uint32_t plane = job->first_plane; plane < job->end_plane; plane++) {
        unsigned char *codes = quantised + plane * elems;
        unsigned char *halves = raw + (plane - job->first_plane) * elems * 2;

        for (uint32_t head = 0; head < spec->heads; head++) {
            unsigned char *at = scales + ((uint64_t)plane * spec->heads + head) * sizeof(float);
            float scale;

            if (is_encode) {
                scale = encode_head(spec, head, halves, codes);
                memcpy(at, &scale, sizeof(scale));
            } else {
                memcpy(&scale, at, sizeof(scale));
                decode_head(spec, head, scale, codes, halves);
            }
        }
    }
    if (is_encode && job->end_plane == job->planes_count && job->first_plane < job->end_plane)
        fill_gaps(spec, job, quantised);
}

static int convert(const struct kvt_quant_batch *batch, bool is_encode)
{
    const struct kvt_quant_job *jobs = (const void *)(uintptr_t)batch->jobs;
    int r = kvt_jobs_quant(batch);

    for (uint32_t i = 0; r == 0 && i < batch->jobs_count; i++)
        convert_job(&batch->spec, &jobs[i], is_encode);
    return r;
}

int kvt_host_quantise(void *stream, const struct kvt_quant_batch *batch)
{
    (void)stream;
    return convert(batch, true);
}

int kvt_host_dequantise(void *stream, const struct kvt_quant_batch *batch)
{
    (void)stream;
    return convert(batch, false);
}
