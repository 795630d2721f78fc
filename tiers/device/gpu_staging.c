#include "tiers/device/gpu_staging.h"

#include <string.h>

#include "daemon/base/alloc.h"

#define WORD_BITS 64u

int kvt_gpu_staging_init(struct kvt_gpu_staging *staging, uint64_t bytes)
{
    uint64_t chunks_count = bytes / KVT_GPU_CHUNK_BYTES;

    *staging = (struct kvt_gpu_staging){0};
    if (chunks_count == 0 || chunks_count > UINT32_MAX - WORD_BITS)
        return kvt_trace(-EINVAL);
    staging->taken = kvt_alloc_zeroed(kvt_div_up(chunks_count, WORD_BITS), sizeof(uint64_t));
    if (staging->taken == NULL)
        return kvt_trace(-ENOMEM);
    staging->chunks_count = (uint32_t)chunks_count;
    return 0;
}

void kvt_gpu_staging_deinit(struct kvt_gpu_staging *staging)
{
    kvt_free(staging->taken);
    *staging = (struct kvt_gpu_staging){0};
}

void kvt_gpu_staging_reset(struct kvt_gpu_staging *staging, uint64_t base)
{
    memset(staging->taken, 0, kvt_div_up(staging->chunks_count, WORD_BITS) * sizeof(uint64_t));
    staging->base = base;
}

uint64_t kvt_gpu_staging_bytes(const struct kvt_gpu_staging *staging)
{
    return (uint64_t)staging->chunks_count * KVT_GPU_CHUNK_BYTES;
}

static bool is_taken(const struct kvt_gpu_staging *staging, uint32_t chunk)
{
    return (staging->taken[chunk / WORD_BITS] >> (chunk % WORD_BITS) & 1u) != 0;
}

static void mark(struct kvt_gpu_staging *staging, const struct kvt_gpu_run *run, bool to)
{
    for (uint32_t c = run->chunk; c < run->chunk + run->chunks_count; c++) {
        KVT_ASSERT(is_taken(staging, c) != to);
        staging->taken[c / WORD_BITS] ^= (uint64_t)1 << (c % WORD_BITS);
    }
}

bool kvt_gpu_staging_take(struct kvt_gpu_staging *staging, uint64_t bytes,
                          struct kvt_gpu_run *ret_run)
{
    struct kvt_gpu_run run = {0};
    uint64_t wanted = kvt_div_up(bytes, KVT_GPU_CHUNK_BYTES);
    uint32_t free_count = 0;

    if (wanted > staging->chunks_count)
        return false;
    for (uint32_t c = 0; free_count < wanted; c++) {
        if (c == staging->chunks_count)
            return false;
        if (c % WORD_BITS == 0 && staging->taken[c / WORD_BITS] == UINT64_MAX) {
            free_count = 0;
            c += WORD_BITS - 1;
            continue;
        }
        free_count = is_taken(staging, c) ? 0 : free_count + 1;
        run.chunk = c + 1 - free_count;
    }
    run.chunks_count = (uint32_t)wanted;
    run.address = wanted == 0 ? 0 : staging->base + (uint64_t)run.chunk * KVT_GPU_CHUNK_BYTES;
    mark(staging, &run, true);
    *ret_run = run;
    return true;
}

void kvt_gpu_staging_give(struct kvt_gpu_staging *staging, struct kvt_gpu_run *run)
{
    mark(staging, run, false);
    *run = (struct kvt_gpu_run){0};
}
