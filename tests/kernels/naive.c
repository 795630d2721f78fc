#include "tests/kernels/naive.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/shim_tables.h"
#include "tests/common/check.h"

uint64_t naive_random(uint64_t *state)
{
    uint64_t x = *state += 0x9e3779b97f4a7c15ull;

    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

uint64_t naive_below(uint64_t *state, uint64_t below)
{
    return naive_random(state) % below;
}

void naive_fill(uint64_t *state, void *memory, uint64_t bytes)
{
    uint8_t *at = memory;

    for (uint64_t i = 0; i < bytes; i += 8) {
        uint64_t word = naive_random(state);

        memcpy(at + i, &word, KVT_MIN(bytes - i, sizeof(word)));
    }
}

uint64_t naive_seed(const char *test, uint64_t otherwise)
{
    const char *text = getenv("KVT_TEST_SEED");
    uint64_t seed = text == NULL ? otherwise : strtoull(text, NULL, 0);

    printf("%s: KVT_TEST_SEED=%" PRIu64 "\n", test, seed);
    return seed;
}

uint32_t naive_tables(const struct kvt_kernels *tables[static 4])
{
    tables[0] = kvt_kernels_host();
    for (uint32_t kind = 0; kind < KVT_SHIM_KINDS; kind++)
        tables[1 + kind] = kvt_kernels_shim((enum kvt_shim_kind)kind);
    return 1 + KVT_SHIM_KINDS;
}

/* The formula of kvt_kernels.h once more, for one word. */
static uint64_t naive_mix(uint64_t word, uint64_t index)
{
    uint64_t x = word ^ ((index + 1) * 0x9e3779b97f4a7c15ull);

    x = (x ^ (x >> 32)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 29)) * 0x94d049bb133111ebull;
    return x ^ (x >> 32);
}

static uint64_t naive_check_part(const uint8_t *payload, uint64_t begin, uint64_t end)
{
    uint64_t sum = 0;

    for (uint64_t at = begin; at < end; at += 8) {
        uint64_t word = 0;

        for (uint32_t i = 0; i < 8 && at + i < end; i++)
            word |= (uint64_t)payload[at + i] << (8 * i);
        sum += naive_mix(word, at / 8);
    }
    return sum;
}

uint64_t naive_check(const uint8_t *payload, uint64_t bytes)
{
    return naive_check_part(payload, 0, bytes);
}

/* Such that its address is a multiple of @align and not of 2 * @align; the block ends where it
 * ends. */
static uint8_t *make_aligned(uint64_t bytes, uint32_t align, uint8_t **ret_heap)
{
    uint64_t begin = align % 128;

    CHECK(posix_memalign((void **)ret_heap, 128, begin + bytes) == 0);
    return *ret_heap + begin;
}

static uint32_t random_bytes(const struct naive_shape *shape, uint64_t *state)
{
    uint64_t most = shape->bytes_max / shape->bytes_step;
    uint64_t bound = naive_below(state, 2) == 0 ? most : KVT_MIN(most, 40);

    return (uint32_t)((1 + naive_below(state, bound)) * shape->bytes_step);
}

/* Ids without repetition out of @out_of: the first of a shuffled list. */
static void random_ids(uint64_t *ids, uint32_t count, uint32_t out_of, uint64_t *state)
{
    uint64_t *all = calloc(out_of, sizeof(*all));

    CHECK(all != NULL && count <= out_of);
    for (uint32_t i = 0; i < out_of; i++)
        all[i] = i;
    for (uint32_t i = 0; i < count; i++) {
        uint64_t other = i + naive_below(state, out_of - i), id = all[other];

        all[other] = all[i];
        ids[i] = id;
    }
    free(all);
}

void naive_job_make(struct naive_job *job, const struct naive_shape *shape, uint64_t *state)
{
    const uint32_t pieces_count = 1 + (uint32_t)naive_below(state, shape->pieces_max);
    const uint32_t blocks_count = 1 + (uint32_t)naive_below(state, shape->blocks_max);
    const uint32_t pool_blocks = blocks_count + (uint32_t)naive_below(state, 5);
    struct kvt_copy_piece *pieces = calloc(pieces_count, sizeof(*pieces));
    uint64_t *ids = calloc(blocks_count, sizeof(*ids));

    CHECK(pieces != NULL && ids != NULL);
    *job = (struct naive_job){0};
    for (uint32_t p = 0; p < pieces_count; p++) {
        uint32_t bytes = random_bytes(shape, state);

        pieces[p] = (struct kvt_copy_piece){.base = job->pool_bytes,
                                            .bytes = bytes,
                                            .payload_offset_bytes = job->payload_bytes,
                                            .stride_bytes =
                                                bytes + naive_below(state, 4) * shape->bytes_step};
        job->pool_bytes += (pool_blocks - 1) * pieces[p].stride_bytes + bytes;
        job->payload_bytes += (uint64_t)blocks_count * bytes;
    }
    job->pool = make_aligned(job->pool_bytes, shape->align, &job->pool_heap);
    job->payload = make_aligned(job->payload_bytes, shape->align, &job->payload_heap);
    naive_fill(state, job->pool, job->pool_bytes);
    naive_fill(state, job->payload, job->payload_bytes);
    for (uint32_t p = 0; p < pieces_count; p++)
        pieces[p].base += (uintptr_t)job->pool;
    random_ids(ids, blocks_count, pool_blocks, state);
    if (shape->has_none)
        ids[naive_below(state, blocks_count)] = KVT_KERNEL_BLOCK_NONE;
    job->job = (struct kvt_copy_job){.payload = (uintptr_t)job->payload,
                                     .pieces = (uintptr_t)pieces,
                                     .blocks = (uintptr_t)ids,
                                     .pieces_count = pieces_count,
                                     .blocks_count = blocks_count,
                                     .check = shape->has_check ? (uintptr_t)&job->check : 0};
}

void naive_job_free(struct naive_job *job)
{
    free((void *)(uintptr_t)job->job.pieces);
    free((void *)(uintptr_t)job->job.blocks);
    free(job->pool_heap);
    free(job->payload_heap);
    *job = (struct naive_job){0};
}

uint64_t naive_copy(const struct naive_job *job, uint8_t *pool, uint8_t *payload, bool is_gather)
{
    const struct kvt_copy_piece *pieces = (const void *)(uintptr_t)job->job.pieces;
    const uint64_t *ids = (const void *)(uintptr_t)job->job.blocks;
    uint64_t sum = 0;

    for (uint32_t p = 0; p < job->job.pieces_count; p++) {
        for (uint32_t b = 0; b < job->job.blocks_count; b++) {
            uint64_t at = pieces[p].payload_offset_bytes + (uint64_t)b * pieces[p].bytes;
            uint64_t from = pieces[p].base - (uintptr_t)job->pool + ids[b] * pieces[p].stride_bytes;

            if (ids[b] == KVT_KERNEL_BLOCK_NONE)
                continue;
            for (uint64_t i = 0; i < pieces[p].bytes; i++) {
                if (is_gather)
                    payload[at + i] = pool[from + i];
                else
                    pool[from + i] = payload[at + i];
            }
            if (job->job.check != 0)
                sum += naive_check_part(payload, at, at + pieces[p].bytes);
        }
    }
    return sum;
}

void naive_batch_hold(struct kvt_copy_batch *batch, const struct kvt_copy_job *job)
{
    const struct kvt_copy_piece *pieces = (const void *)(uintptr_t)job->pieces;

    batch->pieces_max = KVT_MAX(batch->pieces_max, job->pieces_count);
    batch->blocks_max = KVT_MAX(batch->blocks_max, job->blocks_count);
    for (uint32_t p = 0; p < job->pieces_count; p++)
        batch->piece_bytes_max = KVT_MAX(batch->piece_bytes_max, pieces[p].bytes);
}
