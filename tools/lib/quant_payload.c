#include "tools/lib/quant_payload.h"

#include <string.h>

#include "daemon/base/alloc.h"

#define EXPONENT_SHIFT 10u
#define EXPONENT_LEAST 8u /* biased by 15 */
#define OTHER_BITS 0x83ffu

void kvt_quant_payload_shape(void *payload, size_t bytes)
{
    uint8_t *at = payload;

    KVT_ASSERT(bytes % 2 == 0);
    for (size_t i = 0; i < bytes; i += 2) {
        uint16_t element;
        uint32_t exponent;

        memcpy(&element, at + i, 2);
        exponent = (element >> EXPONENT_SHIFT & 15u) + EXPONENT_LEAST;
        element = (uint16_t)((element & OTHER_BITS) | exponent << EXPONENT_SHIFT);
        memcpy(at + i, &element, 2);
    }
}

int kvt_quant_payload_convert(const struct kvt_quant_spec *spec, void *planes, size_t bytes)
{
    const struct kvt_kernels *kernels = kvt_kernels_host();
    uint32_t count = (uint32_t)(bytes / kvt_quant_plane_bytes(spec));
    uint8_t *stored = kvt_alloc_aligned(16, kvt_quant_bytes(spec, bytes));
    struct kvt_quant_job job = {.raw = (uintptr_t)planes,
                                .quantised = (uintptr_t)stored,
                                .planes_count = count,
                                .end_plane = count};
    struct kvt_quant_batch batch = {
        .spec = *spec, .jobs = (uintptr_t)&job, .jobs_count = 1, .planes_max = count};

    int r = -ENOMEM;

    if (stored != NULL)
        r = kernels->quantise(NULL, &batch);
    if (r == 0)
        r = kernels->dequantise(NULL, &batch);
    kvt_free(stored);
    return r;
}
