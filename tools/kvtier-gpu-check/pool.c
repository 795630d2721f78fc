/*   pool:     piece 0: [block 0][block 1]..   piece 1: [block 0][block 1]..
 *   payload:  job j has the blocks perm(j * blocks_count ..) of each piece
 *
 * Word w of the pool, counted from its begin, holds gpu_check_word(w + 1). */
#include <string.h>

#include "tools/kvtier-gpu-check/measure.h"

#define LISTS_BYTES (2u << 20)
#define WINDOW_BYTES (8u << 20)
#define PIECES_MAX 64u /* K and V of 32 layers */
#define BLOCKS_MAX 4u  /* of 16 tokens: a block of ours is 64 */
#define POISON 0xdb

bool gpu_check_pool_open(struct gpu_check_pool *pool, struct gpu_check *check, uint64_t bytes)
{
    *pool = (struct gpu_check_pool){.check = check, .bytes = bytes};
    return gpu_check_memory_new(check, &pool->pool, bytes, false) &&
           gpu_check_memory_new(check, &pool->payload, bytes, false) &&
           gpu_check_memory_new(check, &pool->lists, LISTS_BYTES, true) &&
           gpu_check_memory_new(check, &pool->window, KVT_MIN(bytes, (uint64_t)WINDOW_BYTES), true);
}

void gpu_check_pool_close(struct gpu_check_pool *pool)
{
    gpu_check_memory_free(pool->check, &pool->pool);
    gpu_check_memory_free(pool->check, &pool->payload);
    gpu_check_memory_free(pool->check, &pool->lists);
    gpu_check_memory_free(pool->check, &pool->window);
}

/* Which engine block is the @nth of the pool's payloads: an odd step through a power of two. */
static uint64_t block_of(const struct gpu_check_pool *pool, uint64_t nth)
{
    return (nth * 0x9e3779b1ull + 7) & (pool->pool_blocks - 1);
}

struct lists { /* at the begin of the lists' memory; then ids of blocks */
    struct kvt_copy_piece pieces[PIECES_MAX];
};

struct tables { /* where in the lists' memory what is */
    uint64_t ids, checks, plain, checked, check_jobs, end;
};

static struct tables tables_of(uint64_t jobs, uint32_t blocks)
{
    struct tables at = {.ids = sizeof(struct lists)};

    at.checks = at.ids + jobs * blocks * sizeof(uint64_t);
    at.plain = at.checks + jobs * sizeof(uint64_t);
    at.checked = at.plain + jobs * sizeof(struct kvt_copy_job);
    at.check_jobs = at.checked + jobs * sizeof(struct kvt_copy_job);
    at.end = at.check_jobs + jobs * sizeof(struct kvt_check_job);
    return at;
}

static void write_job(struct gpu_check_pool *pool, const struct tables *at, uint64_t j)
{
    uint8_t *memory = pool->lists.host;
    uint64_t base = pool->lists.device;
    uint64_t payload_bytes = (uint64_t)pool->pieces_count * pool->blocks_count * pool->piece_bytes;
    struct kvt_copy_job job = {.payload = pool->payload.device + j * payload_bytes,
                               .pieces = base,
                               .blocks = base + at->ids + j * pool->blocks_count * 8,
                               .pieces_count = pool->pieces_count,
                               .blocks_count = pool->blocks_count};
    struct kvt_check_job check = {
        .payload = job.payload, .bytes = payload_bytes, .check = base + at->checks + j * 8};

    for (uint32_t b = 0; b < pool->blocks_count; b++) {
        uint64_t id = block_of(pool, j * pool->blocks_count + b);

        memcpy(memory + at->ids + (j * pool->blocks_count + b) * 8, &id, sizeof(id));
    }
    memcpy(memory + at->plain + j * sizeof(job), &job, sizeof(job));
    job.check = check.check;
    memcpy(memory + at->checked + j * sizeof(job), &job, sizeof(job));
    memcpy(memory + at->check_jobs + j * sizeof(check), &check, sizeof(check));
}

bool gpu_check_pool_shape(struct gpu_check_pool *pool, uint32_t piece_bytes)
{
    uint64_t pieces = pool->bytes / piece_bytes, jobs, payload_bytes;
    struct lists *lists = (struct lists *)(void *)pool->lists.host;
    struct tables at;

    KVT_ASSERT(pieces > 0 && (pool->bytes & (pool->bytes - 1)) == 0);
    pool->piece_bytes = piece_bytes;
    pool->blocks_count = (uint32_t)KVT_MIN(pieces, (uint64_t)BLOCKS_MAX);
    pool->pieces_count = (uint32_t)KVT_MIN(pieces / pool->blocks_count, (uint64_t)PIECES_MAX);
    pool->pool_blocks = pieces / pool->pieces_count;
    payload_bytes = (uint64_t)pool->pieces_count * pool->blocks_count * piece_bytes;
    jobs = pool->bytes / payload_bytes;
    at = tables_of(jobs, pool->blocks_count);
    KVT_ASSERT(at.end <= LISTS_BYTES);
    memset(pool->lists.host, 0, at.end);
    for (uint32_t p = 0; p < pool->pieces_count; p++)
        lists->pieces[p] = (struct kvt_copy_piece){
            .base = pool->pool.device + p * pool->pool_blocks * piece_bytes,
            .stride_bytes = piece_bytes,
            .payload_offset_bytes = (uint64_t)p * pool->blocks_count * piece_bytes,
            .bytes = piece_bytes};
    for (uint64_t j = 0; j < jobs; j++)
        write_job(pool, &at, j);
    pool->plain = (struct kvt_copy_batch){.jobs = pool->lists.device + at.plain,
                                          .jobs_count = (uint32_t)jobs,
                                          .pieces_max = pool->pieces_count,
                                          .blocks_max = pool->blocks_count,
                                          .piece_bytes_max = piece_bytes};
    pool->checked = pool->plain;
    pool->checked.jobs = pool->lists.device + at.checked;
    pool->checks = (struct kvt_check_batch){.jobs = pool->lists.device + at.check_jobs,
                                            .jobs_count = (uint32_t)jobs,
                                            .bytes_max = payload_bytes};
    return gpu_check_upload(pool->check, &pool->lists, at.end);
}

/* ---- every byte ------------------------------------------------------------------------------ */

/* Which word of the pool is word @at of the payloads. */
static uint64_t pool_word_of(const struct gpu_check_pool *pool, uint64_t at)
{
    uint64_t words = pool->piece_bytes / 8, in_piece = at % words, piece = at / words;
    uint64_t b = piece % pool->blocks_count, rest = piece / pool->blocks_count;
    uint64_t p = rest % pool->pieces_count, job = rest / pool->pieces_count;

    return (p * pool->pool_blocks + block_of(pool, job * pool->blocks_count + b)) * words +
           in_piece;
}

static bool copy_window(struct gpu_check_pool *pool, uint64_t device, bool is_upload)
{
    struct gpu_check_memory part = pool->window;

    part.device = device;
    return is_upload ? gpu_check_upload(pool->check, &part, part.bytes)
                     : gpu_check_download(pool->check, &part, part.bytes);
}

static bool fill_pool(struct gpu_check_pool *pool)
{
    uint64_t words = pool->window.bytes / 8;

    for (uint64_t done = 0; done < pool->bytes; done += pool->window.bytes) {
        uint64_t *to = (void *)pool->window.host;

        for (uint64_t i = 0; i < words; i++)
            to[i] = gpu_check_word(done / 8 + i + 1);
        if (!copy_window(pool, pool->pool.device + done, true))
            return false;
    }
    return true;
}

static bool compare(struct gpu_check_pool *pool, const struct gpu_check_memory *memory,
                    bool is_payload, uint64_t *ret_wrong)
{
    uint64_t words = pool->window.bytes / 8;

    for (uint64_t done = 0; done < pool->bytes; done += pool->window.bytes) {
        const uint64_t *from = (const void *)pool->window.host;

        if (!copy_window(pool, memory->device + done, false))
            return false;
        for (uint64_t i = 0; i < words; i++) {
            uint64_t at = done / 8 + i;

            if (from[i] != gpu_check_word((is_payload ? pool_word_of(pool, at) : at) + 1))
                *ret_wrong += 8;
        }
    }
    return true;
}

static bool poison(struct gpu_check_pool *pool, const struct gpu_check_memory *memory)
{
    struct gpu_check *check = pool->check;

    return gpu_check_ok(check,
                        check->calls->fill(memory->device, POISON, pool->bytes, check->stream),
                        "fill") &&
           gpu_check_wait(check);
}

bool gpu_check_pool_verify(struct gpu_check_pool *pool, uint64_t *ret_wrong)
{
    struct gpu_check *check = pool->check;
    const struct kvt_kernels *kernels = check->calls->kernels;

    return fill_pool(pool) && poison(pool, &pool->payload) &&
           gpu_check_ok(check, kernels->gather(check->stream, &pool->checked), "gather") &&
           gpu_check_wait(check) && compare(pool, &pool->payload, true, ret_wrong) &&
           poison(pool, &pool->pool) &&
           gpu_check_ok(check, kernels->scatter(check->stream, &pool->checked), "scatter") &&
           gpu_check_wait(check) && compare(pool, &pool->pool, false, ret_wrong);
}
