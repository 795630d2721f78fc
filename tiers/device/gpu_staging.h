/* Staging: a piece of memory that is given out in runs of chunks, first fit, and comes back.
 * Whoever needs more than is free waits and asks again; nothing that is given is ever taken away.
 * Tier-thread-only. */
#pragma once

#include "daemon/base/def.h"

#define KVT_GPU_CHUNK_BYTES (16u * 1024u)

struct kvt_gpu_staging {
    uint64_t base; /* address, of the device or of this process */
    uint32_t chunks_count;
    uint64_t *taken; /* a bit a chunk */
};

struct kvt_gpu_run { /* chunks_count 0: none */
    uint64_t address;
    uint32_t chunk, chunks_count;
};

/* Of @bytes, rounded down to chunks; the memory itself is set later, by `base`. -ENOMEM or 0. */
KVT_MUST_USE int kvt_gpu_staging_init(struct kvt_gpu_staging *staging, uint64_t bytes);
void kvt_gpu_staging_deinit(struct kvt_gpu_staging *staging); /* idempotent */
/* Everything is free again, at another address. */
void kvt_gpu_staging_reset(struct kvt_gpu_staging *staging, uint64_t base);
uint64_t kvt_gpu_staging_bytes(const struct kvt_gpu_staging *staging);
/* False: no run of so many bytes is free now. 0 bytes: the empty run. */
bool kvt_gpu_staging_take(struct kvt_gpu_staging *staging, uint64_t bytes,
                          struct kvt_gpu_run *ret_run);
/* Empties @run. */
void kvt_gpu_staging_give(struct kvt_gpu_staging *staging, struct kvt_gpu_run *run);
