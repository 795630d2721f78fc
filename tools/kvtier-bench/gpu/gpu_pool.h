/* An engine's KV memory on a GPU: one allocation a rank, which the daemon opens by handle. Of the
 * engine's processes one makes it; its ranks, which were forked before anybody used CUDA (a context
 * does not survive a fork), join it by the same handles. Blocks are filled and looked at by copies.
 *
 * new: before the forks, and free after all of it. A thread at a time moves; any thread may. */
#pragma once

#include "daemon/base/limits.h"
#include "tools/lib/kv_memory.h"

struct kvt_gpu_pool;

/* Why this build cannot: text, or NULL. */
const char *kvt_gpu_pool_why_not(void);
/* Touches no GPU. -errno, or 0. */
KVT_MUST_USE int kvt_gpu_pool_new(struct kvt_gpu_pool **ret_pool, uint32_t device);
/* What this process made or joined is given back. NULL-proof; returns NULL. */
struct kvt_gpu_pool *kvt_gpu_pool_free(struct kvt_gpu_pool *pool);
struct kvt_kv_store *kvt_gpu_pool_store(struct kvt_gpu_pool *pool);
/* Of a pool that was made. */
void kvt_gpu_pool_handle(const struct kvt_gpu_pool *pool, uint32_t rank,
                         uint8_t ret_handle[KVT_CUDA_IPC_HANDLE_BYTES],
                         uint8_t ret_uuid[KVT_CUDA_UUID_BYTES]);
