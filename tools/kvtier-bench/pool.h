/* The block pool that the workers of an engine share: ids (tools/lib/block_pool.h) and the memory
 * behind them (tools/lib/kv_memory.h), in whole blocks of ours. Take and give: any thread. */
#pragma once

#include <pthread.h>

#include "tools/lib/block_pool.h"
#include "tools/lib/kv_memory.h"

struct kvt_bench_pool {
    const struct kvt_model *model; /* NULL: nothing here */
    struct kvt_kv_memory memory;
    pthread_mutex_t lock; /* covers ids */
    struct kvt_block_pool ids;
};

/* Engine blocks that hold so many blocks of ours of each component, the null block included. */
uint64_t kvt_bench_pool_blocks(const struct kvt_model *model,
                               const uint64_t blocks[KVT_COMPONENTS_MAX]);
/* @engine_blocks of the engine, in memfds or in @store. -errno, or 0. */
KVT_MUST_USE int kvt_bench_pool_init(struct kvt_bench_pool *pool, const struct kvt_model *model,
                                     uint64_t engine_blocks, uint64_t seed,
                                     struct kvt_kv_store *store);
void kvt_bench_pool_deinit(struct kvt_bench_pool *pool);

/* Engine blocks for one block of ours: engine_blocks_per_block ids. false: the pool is empty. */
KVT_MUST_USE bool kvt_bench_pool_take(struct kvt_bench_pool *pool, uint32_t component,
                                      uint64_t *ret_ids);
void kvt_bench_pool_give(struct kvt_bench_pool *pool, uint32_t component, const uint64_t *ids);

struct kvt_bench_shard { /* one rank's shard of one block in the pool */
    uint32_t component, rank;
    const uint64_t *ids;
    uint64_t key; /* of the oracle */
};
void kvt_bench_pool_fill(const struct kvt_bench_pool *pool, const struct kvt_bench_shard *shard);
/* How many bytes are wrong. */
KVT_MUST_USE uint64_t kvt_bench_pool_count_wrong(const struct kvt_bench_pool *pool,
                                                 const struct kvt_bench_shard *shard);
