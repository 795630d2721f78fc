/* Speed: work that is queued on a stream, many times, until it takes long enough to be timed by the
 * host's clock from before the first call to the end of the last, which is polled. Works that are
 * compared take turns within a round, so that a clock that drifts or a neighbour on the bus meets
 * all of them; what counts is the median of the rounds. */
#pragma once

#include "tools/kvtier-gpu-check/gpu_check.h"

#define GPU_CHECK_WORKS_MAX 8u
#define GPU_CHECK_SIZE_TEXT_BYTES 24u

struct gpu_check_work {
    /* Queues it once, on check->stream. CUDA's error. */
    int (*queue)(struct gpu_check *check, void *arg);
    void *arg;
    uint64_t ns; /* set: of one time */
};

/* False: a call failed. Each is run at least three times, but when the part is late. */
KVT_MUST_USE bool gpu_check_measure(struct gpu_check *check, struct gpu_check_work *works,
                                    uint32_t count);

/* ---- an engine's pool of scattered pieces, and payloads of all of it --------------------------
 */

struct gpu_check_pool {
    struct gpu_check *check;
    struct gpu_check_memory pool, payload, lists; /* lists has a host side, the others do not */
    struct gpu_check_memory window;               /* through which the host sees the others */
    uint64_t bytes;                               /* of pool, and of all payloads together */
    struct kvt_copy_batch plain, checked;         /* of the shape that was set last */
    struct kvt_check_batch checks;
    uint32_t piece_bytes, pieces_count, blocks_count; /* of a payload */
    uint64_t pool_blocks;                             /* engine blocks */
};
KVT_MUST_USE bool gpu_check_pool_open(struct gpu_check_pool *pool, struct gpu_check *check,
                                      uint64_t bytes);
void gpu_check_pool_close(struct gpu_check_pool *pool);
/* Payloads of up to 64 pieces x 4 engine blocks of @piece_bytes: the whole pool once, its engine
 * blocks in a scattered order. */
KVT_MUST_USE bool gpu_check_pool_shape(struct gpu_check_pool *pool, uint32_t piece_bytes);
/* The pool gets words that say where they lie, goes into payloads, comes back; every byte of both
 * is looked at. Adds to *ret_wrong. */
KVT_MUST_USE bool gpu_check_pool_verify(struct gpu_check_pool *pool, uint64_t *ret_wrong);
