/* What the kernels should do, written as loops over bytes that share nothing with kernels/: the
 * truth for both the CPU reference and the source of the GPU's kernels on host threads. Also seeded
 * random jobs to try them with. Single-threaded. */
#pragma once

#include "kernels/kvt_kernels.h"

/* ---- randomness: splitmix64, printed seeds ----------------------------------------------------
 */

uint64_t naive_random(uint64_t *state);
/* 0 .. below - 1 */
uint64_t naive_below(uint64_t *state, uint64_t below);
void naive_fill(uint64_t *state, void *memory, uint64_t bytes);

/* The seed of this run: KVT_TEST_SEED, else @otherwise; printed. */
uint64_t naive_seed(const char *test, uint64_t otherwise);

/* ---- every table that can run here ------------------------------------------------------------
 */

uint32_t naive_tables(const struct kvt_kernels *tables[static 4]);

/* ---- the truth --------------------------------------------------------------------------------
 */

uint64_t naive_check(const uint8_t *payload, uint64_t bytes);

/* A job with its own memory: @pool_bytes at @pool holds every piece, the payload is exactly as long
 * as the pieces need, both at any alignment inside heap blocks that end where they end. */
struct naive_job {
    struct kvt_copy_job job;
    uint8_t *pool, *payload, *pool_heap, *payload_heap;
    uint64_t pool_bytes, payload_bytes;
    uint64_t check;
};
struct naive_shape {
    uint32_t pieces_max, blocks_max; /* 1 .. */
    uint32_t bytes_max;              /* of a piece */
    uint32_t bytes_step;             /* piece bytes and gaps are multiples of it */
    uint32_t align;                  /* of pool and payload, exactly: not of twice as much */
    bool has_check, has_none;
};
/* Contents are random. Free with naive_job_free. */
void naive_job_make(struct naive_job *job, const struct naive_shape *shape, uint64_t *state);
void naive_job_free(struct naive_job *job);
/* Byte by byte between @pool and @payload, which stand in for the job's own; returns the check of
 * the parts of the payload that moved. */
uint64_t naive_copy(const struct naive_job *job, uint8_t *pool, uint8_t *payload, bool is_gather);
/* Grows the batch's maxima to hold the job. */
void naive_batch_hold(struct kvt_copy_batch *batch, const struct kvt_copy_job *job);
