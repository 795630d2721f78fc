/* Before a block goes back to the free list nothing of the daemon may touch it any more: that is
 * the caller's duty (request.c waits for Quiesce). */
#include "tools/kvtier-bench/pool.h"

static uint32_t each_of(const struct kvt_bench_pool *pool, uint32_t component)
{
    return pool->model->components[component].engine_blocks_per_block;
}

uint64_t kvt_bench_pool_blocks(const struct kvt_model *model,
                               const uint64_t blocks[KVT_COMPONENTS_MAX])
{
    uint64_t engine_blocks = 1;

    for (uint32_t c = 0; c < model->components_count; c++)
        engine_blocks += blocks[c] * model->components[c].engine_blocks_per_block;
    return engine_blocks;
}

int kvt_bench_pool_init(struct kvt_bench_pool *pool, const struct kvt_model *model,
                        uint64_t engine_blocks, uint64_t seed, struct kvt_kv_store *store)
{
    int r;

    *pool = (struct kvt_bench_pool){.model = model};
    r = -pthread_mutex_init(&pool->lock, NULL);
    if (r == 0)
        r = kvt_block_pool_init(&pool->ids, engine_blocks, seed);
    if (r == 0)
        r = kvt_kv_memory_init_store(&pool->memory, model, engine_blocks, false, store);
    if (r < 0)
        kvt_bench_pool_deinit(pool);
    return r;
}

void kvt_bench_pool_deinit(struct kvt_bench_pool *pool)
{
    if (pool->model == NULL)
        return;
    kvt_kv_memory_deinit(&pool->memory);
    kvt_block_pool_deinit(&pool->ids);
    (void)pthread_mutex_destroy(&pool->lock);
    *pool = (struct kvt_bench_pool){0};
}

bool kvt_bench_pool_take(struct kvt_bench_pool *pool, uint32_t component, uint64_t *ret_ids)
{
    bool is_enough;

    (void)pthread_mutex_lock(&pool->lock);
    is_enough = kvt_block_pool_take(&pool->ids, component, each_of(pool, component), ret_ids);
    (void)pthread_mutex_unlock(&pool->lock);
    return is_enough;
}

void kvt_bench_pool_give(struct kvt_bench_pool *pool, uint32_t component, const uint64_t *ids)
{
    (void)pthread_mutex_lock(&pool->lock);
    for (uint32_t i = 0; i < each_of(pool, component); i++)
        (void)kvt_block_pool_unref(&pool->ids, ids[i]);
    (void)pthread_mutex_unlock(&pool->lock);
}

static struct kvt_kv_part part_of(const struct kvt_bench_shard *shard, uint32_t part)
{
    return (struct kvt_kv_part){.rank = shard->rank,
                                .component = shard->component,
                                .part = part,
                                .id = shard->ids[part],
                                .key = shard->key};
}

void kvt_bench_pool_fill(const struct kvt_bench_pool *pool, const struct kvt_bench_shard *shard)
{
    for (uint32_t i = 0; i < each_of(pool, shard->component); i++) {
        struct kvt_kv_part part = part_of(shard, i);

        kvt_kv_memory_fill(&pool->memory, &part);
    }
}

uint64_t kvt_bench_pool_count_wrong(const struct kvt_bench_pool *pool,
                                    const struct kvt_bench_shard *shard)
{
    uint64_t wrong = 0;

    for (uint32_t i = 0; i < each_of(pool, shard->component); i++) {
        struct kvt_kv_part part = part_of(shard, i);

        wrong += kvt_kv_memory_count_wrong(&pool->memory, &part);
    }
    return wrong;
}
