/* Quantisation and back. The first cases have all 65,536 inputs, once under one scale and once with
 * a scale for every 256 neighbours (whose exponents are alike, so that all codes come up), for both
 * element types, both kinds and both orders; then shapes at random. */
#include <string.h>

#include "tools/kvtier-gpu-check/cases.h"

#define EXHAUSTIVE_CASES 16u

static uint64_t below(struct gpu_check_side *side, uint64_t bound)
{
    return gpu_check_below(&side->random, bound);
}

static struct kvt_quant_spec make_spec(struct gpu_check_side *side)
{
    uint32_t n = side->number;
    struct kvt_quant_spec spec = {.kind = n % 2 == 0 ? KVT_QUANT_FP8_E4M3 : KVT_QUANT_INT8,
                                  .elem = n / 2 % 2 == 0 ? KVT_ELEM_FP16 : KVT_ELEM_BF16,
                                  .order = n / 4 % 2 == 0 ? KVT_ORDER_HEADS_FIRST
                                                          : KVT_ORDER_TOKENS_FIRST};

    if (n < EXHAUSTIVE_CASES) {
        bool is_one_scale = n / 8 == 0;

        spec.plane_tokens = is_one_scale ? 256 : 16;
        spec.heads = is_one_scale ? 1 : 256;
        spec.head_dim = is_one_scale ? 256 : 16;
        return spec;
    }
    spec.plane_tokens = 1 + (uint32_t)below(side, 32);
    spec.heads = 1 + (uint32_t)below(side, 9);
    spec.head_dim = below(side, 2) == 0 ? 8u << below(side, 5) : 1 + (uint32_t)below(side, 130);
    return spec;
}

static void make_quant(struct gpu_check_side *side, union gpu_check_batch *ret_batch)
{
    struct kvt_quant_batch *batch = &ret_batch->quant;
    uint32_t jobs_count, planes;
    struct kvt_quant_job *jobs;
    uint64_t plane_bytes;

    batch->spec = make_spec(side);
    plane_bytes = kvt_quant_plane_bytes(&batch->spec);
    jobs_count = side->number < EXHAUSTIVE_CASES ? 1 : 1 + (uint32_t)below(side, 4);
    jobs = gpu_check_take(side, jobs_count * sizeof(*jobs), &batch->jobs);
    for (uint32_t i = 0; jobs != NULL && i < jobs_count; i++) {
        struct kvt_quant_job job = {0};
        uint64_t raw, odd = side->number < EXHAUSTIVE_CASES ? 0 : 2 * below(side, 8);

        planes = side->number < EXHAUSTIVE_CASES ? 1 : 1 + (uint32_t)below(side, 6);
        raw = gpu_check_place(side, plane_bytes * planes + odd, 256);
        job.planes_count = planes;
        job.first_plane = below(side, 3) == 0 ? (uint32_t)below(side, planes) : 0;
        job.end_plane = planes;
        job.raw = raw + odd;
        job.quantised =
            gpu_check_place(side, kvt_quant_bytes(&batch->spec, plane_bytes * planes), 16);
        if (side->is_full)
            break;
        jobs[batch->jobs_count++] = job;
        batch->planes_max = KVT_MAX(batch->planes_max, job.end_plane - job.first_plane);
    }
    side->is_full = batch->jobs_count == 0;
}

/* Elements of a plane get exponents of a narrow range: otherwise the greatest of random bits hides
 * all the others in a few codes. The sign and the fraction stay random. */
static void narrow(struct gpu_check_side *twin, uint16_t *elements, uint64_t count, bool is_fp16)
{
    uint32_t exponent_bits = is_fp16 ? 5 : 8, shift = is_fp16 ? 10 : 7;
    uint32_t lowest = (uint32_t)below(twin, (1u << exponent_bits) - 8);

    for (uint64_t i = 0; i < count; i++) {
        uint32_t exponent = lowest + (uint32_t)below(twin, 8);
        uint32_t rest = elements[i] & ~(((1u << exponent_bits) - 1) << shift);

        elements[i] = (uint16_t)(rest | exponent << shift);
    }
}

static void prepare_raw(struct gpu_check_side *twin, const union gpu_check_batch *batch)
{
    const struct kvt_quant_spec *spec = &batch->quant.spec;
    const struct kvt_quant_job *jobs = (const void *)(uintptr_t)batch->quant.jobs;
    uint64_t count = kvt_quant_plane_bytes(spec) / sizeof(uint16_t);

    for (uint32_t j = 0; j < batch->quant.jobs_count; j++) {
        uint16_t *raw = (void *)(uintptr_t)jobs[j].raw;
        uint32_t planes = jobs[j].end_plane - jobs[j].first_plane;

        if (twin->number < EXHAUSTIVE_CASES) {
            for (uint32_t i = 0; i < count; i++)
                raw[i] = (uint16_t)i;
            continue;
        }
        for (uint32_t p = 0; p < planes; p++)
            if (below(twin, 4) > 0)
                narrow(twin, raw + p * count, count, spec->elem == KVT_ELEM_FP16);
    }
}

/* Codes are random bytes as they are; scales have to be numbers that a quantisation gives. */
static void prepare_codes(struct gpu_check_side *twin, const union gpu_check_batch *batch)
{
    const struct kvt_quant_spec *spec = &batch->quant.spec;
    const struct kvt_quant_job *jobs = (const void *)(uintptr_t)batch->quant.jobs;
    uint64_t plane_bytes = kvt_quant_plane_bytes(spec);

    for (uint32_t j = 0; j < batch->quant.jobs_count; j++) {
        uint64_t raw_bytes = plane_bytes * jobs[j].planes_count;
        uint8_t *scales =
            (uint8_t *)(uintptr_t)(jobs[j].quantised + kvt_quant_scales_offset(spec, raw_bytes));

        for (uint32_t i = 0; i < jobs[j].planes_count * spec->heads; i++) {
            uint32_t bits = (uint32_t)(1 + below(twin, 254)) << 23 | (uint32_t)below(twin, 1 << 23);

            memcpy(scales + (size_t)i * sizeof(bits), &bits, sizeof(bits));
        }
    }
}

static int launch_quantise(const struct kvt_kernels *kernels, void *stream,
                           const union gpu_check_batch *batch)
{
    return kernels->quantise(stream, &batch->quant);
}

static int launch_dequantise(const struct kvt_kernels *kernels, void *stream,
                             const union gpu_check_batch *batch)
{
    return kernels->dequantise(stream, &batch->quant);
}

const struct gpu_check_kind gpu_check_quant_kinds[] = {
    {.name = "quantise",
     .make = make_quant,
     .prepare = prepare_raw,
     .launch = launch_quantise,
     .cases_min = EXHAUSTIVE_CASES + 8},
    {.name = "dequantise",
     .make = make_quant,
     .prepare = prepare_codes,
     .launch = launch_dequantise,
     .cases_min = EXHAUSTIVE_CASES + 8},
    {.name = NULL},
};
