/* The ring holds exactly the blocks without references; it has room for all of them. */
#include "tools/lib/block_pool.h"

#include <string.h>

#include "daemon/base/alloc.h"

static uint64_t next_random(struct kvt_block_pool *pool)
{
    pool->random ^= pool->random << 13;
    pool->random ^= pool->random >> 7;
    pool->random ^= pool->random << 17;
    return pool->random;
}

static void shuffle(struct kvt_block_pool *pool)
{
    for (uint64_t i = pool->free_count; i > 1; i--) {
        uint64_t j = next_random(pool) % i, id = pool->ring[i - 1];

        pool->ring[i - 1] = pool->ring[j];
        pool->ring[j] = id;
    }
}

int kvt_block_pool_init(struct kvt_block_pool *pool, uint64_t blocks_count, uint64_t seed)
{
    KVT_ASSERT(blocks_count >= 2);
    *pool = (struct kvt_block_pool){
        .blocks_count = blocks_count,
        .random = seed * 0x9E3779B97F4A7C15ull | 1,
        .refs = kvt_alloc_zeroed(blocks_count, sizeof(*pool->refs)),
        .owners = kvt_alloc_zeroed(blocks_count, sizeof(*pool->owners)),
        .ring = kvt_alloc_zeroed(blocks_count, sizeof(*pool->ring)),
    };
    if (pool->refs == NULL || pool->owners == NULL || pool->ring == NULL) {
        kvt_block_pool_deinit(pool);
        return kvt_trace(-ENOMEM);
    }
    memset(pool->owners, KVT_BLOCK_POOL_FRESH, blocks_count);
    for (uint64_t id = 1; id < blocks_count; id++)
        pool->ring[pool->free_count++] = id;
    shuffle(pool);
    return 0;
}

void kvt_block_pool_deinit(struct kvt_block_pool *pool)
{
    kvt_free(pool->refs);
    kvt_free(pool->owners);
    kvt_free(pool->ring);
    *pool = KVT_BLOCK_POOL_NULL;
}

static uint64_t take_one(struct kvt_block_pool *pool)
{
    bool is_newest = (next_random(pool) >> 32) % 2 == 0;
    uint64_t at = is_newest ? pool->head + pool->free_count - 1 : pool->head;
    uint64_t id = pool->ring[at % pool->blocks_count];

    pool->free_count--;
    if (!is_newest)
        pool->head = (pool->head + 1) % pool->blocks_count;
    return id;
}

bool kvt_block_pool_take(struct kvt_block_pool *pool, uint32_t component, uint64_t count,
                         uint64_t *ret_ids)
{
    KVT_ASSERT(component < KVT_BLOCK_POOL_FRESH);
    if (pool->free_count < count)
        return false;
    for (uint64_t i = 0; i < count; i++) {
        uint64_t id = take_one(pool);

        KVT_ASSERT(id != 0 && pool->refs[id] == 0);
        pool->refs[id] = 1;
        pool->reused += pool->owners[id] != KVT_BLOCK_POOL_FRESH;
        pool->reused_by_other +=
            pool->owners[id] != KVT_BLOCK_POOL_FRESH && pool->owners[id] != component;
        pool->owners[id] = (uint8_t)component;
        ret_ids[i] = id;
    }
    return true;
}

void kvt_block_pool_ref(struct kvt_block_pool *pool, uint64_t id)
{
    KVT_ASSERT(id < pool->blocks_count && pool->refs[id] > 0);
    pool->refs[id]++;
}

bool kvt_block_pool_unref(struct kvt_block_pool *pool, uint64_t id)
{
    KVT_ASSERT(id < pool->blocks_count && pool->refs[id] > 0);
    if (--pool->refs[id] > 0)
        return false;
    pool->ring[(pool->head + pool->free_count++) % pool->blocks_count] = id;
    return true;
}
