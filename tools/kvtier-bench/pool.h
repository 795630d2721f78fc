/* An engine's own block pool: for each rank a sealed memfd with room for `blocks` engine blocks of
 * each component; block ids are the same for all ranks.
 *
 *   component: layer 0 [block 0: K V][block 1: K V]...  layer 1 [block 0: K V]...
 *
 * so piece (layer, K or V) of block b lies at offset + b * stride, as in real engines. Free ids are
 * handed out in a shuffled order: neighbours in a prompt are not neighbours in memory. Take and
 * give: any thread. */
#pragma once

#include <pthread.h>

#include "tools/lib/model.h"

struct kvt_bench_pool {
    const struct kvt_model *model;
    uint64_t bytes; /* of one rank */
    uint64_t offset_bytes[KVT_COMPONENTS_MAX];
    uint64_t blocks_count[KVT_COMPONENTS_MAX]; /* engine blocks */
    int memfds[KVT_RANKS_MAX];
    uint8_t *bases[KVT_RANKS_MAX];
    pthread_mutex_t lock; /* covers the free lists */
    uint64_t *free_ids[KVT_COMPONENTS_MAX];
    uint64_t free_count[KVT_COMPONENTS_MAX];
};

/* Blocks of ours (not of the engine) that are wanted, by component. -errno, or 0. */
KVT_MUST_USE int kvt_bench_pool_init(struct kvt_bench_pool *pool, const struct kvt_model *model,
                                     const uint64_t blocks[KVT_COMPONENTS_MAX], uint64_t seed);
void kvt_bench_pool_deinit(struct kvt_bench_pool *pool);

/* Bytes of one rank's region for so many blocks. */
uint64_t kvt_bench_pool_bytes(const struct kvt_model *model,
                              const uint64_t blocks[KVT_COMPONENTS_MAX]);

/* Engine blocks for one block of ours: engine_blocks_per_block ids. false: the pool is empty. */
KVT_MUST_USE bool kvt_bench_pool_take(struct kvt_bench_pool *pool, uint32_t component,
                                      uint64_t *ret_ids);
void kvt_bench_pool_give(struct kvt_bench_pool *pool, uint32_t component, const uint64_t *ids);

/* Where piece @piece lies: offset of engine block 0; the stride is 2 * piece_bytes. */
uint64_t kvt_bench_pool_piece_offset(const struct kvt_bench_pool *pool, uint32_t component,
                                     uint32_t piece);

struct kvt_bench_shard { /* one rank's shard of one block in the pool */
    uint32_t component, rank;
    const uint64_t *ids;
    uint64_t key; /* of the oracle */
};
void kvt_bench_pool_fill(const struct kvt_bench_pool *pool, const struct kvt_bench_shard *shard);
/* How many bytes are wrong. */
KVT_MUST_USE uint64_t kvt_bench_pool_count_wrong(const struct kvt_bench_pool *pool,
                                                 const struct kvt_bench_shard *shard);
