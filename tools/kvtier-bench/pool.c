/* Before a block goes back to the free list nothing of the daemon may touch it any more: that is
 * the caller's duty (engine.c waits for Quiesce). */
#include "tools/kvtier-bench/pool.h"

#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "daemon/base/alloc.h"
#include "tools/lib/oracle.h"

static uint64_t component_bytes(const struct kvt_model_component *component, uint64_t blocks)
{
    return kvt_round_up(blocks * component->block_bytes, 4096);
}

uint64_t kvt_bench_pool_bytes(const struct kvt_model *model,
                              const uint64_t blocks[KVT_COMPONENTS_MAX])
{
    uint64_t bytes = 0;

    for (uint32_t c = 0; c < model->components_count; c++)
        bytes += component_bytes(&model->components[c], blocks[c]);
    return bytes;
}

static int map_rank(struct kvt_bench_pool *pool, uint32_t rank)
{
    int fd = memfd_create("kvtier-bench", MFD_CLOEXEC | MFD_ALLOW_SEALING), r;
    void *base;

    if (fd < 0)
        return kvt_trace(-errno);
    pool->memfds[rank] = fd;
    r = posix_fallocate(fd, 0, (off_t)pool->bytes);
    if (r != 0)
        return kvt_trace(-r);
    if (fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) < 0)
        return kvt_trace(-errno);
    base = mmap(NULL, pool->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (base == MAP_FAILED)
        return kvt_trace(-errno);
    pool->bases[rank] = base;
    return 0;
}

static int make_free_list(struct kvt_bench_pool *pool, uint32_t c, uint64_t seed)
{
    uint64_t count = pool->blocks_count[c], random = seed | 1;
    uint64_t *ids = kvt_alloc_zeroed(count, sizeof(*ids));

    if (ids == NULL)
        return kvt_trace(-ENOMEM);
    for (uint64_t i = 0; i < count; i++)
        ids[i] = i;
    for (uint64_t i = count; i > 1; i--) {
        uint64_t j, id = ids[i - 1];

        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        j = random % i;
        ids[i - 1] = ids[j];
        ids[j] = id;
    }
    pool->free_ids[c] = ids;
    pool->free_count[c] = count;
    return 0;
}

int kvt_bench_pool_init(struct kvt_bench_pool *pool, const struct kvt_model *model,
                        const uint64_t blocks[KVT_COMPONENTS_MAX], uint64_t seed)
{
    uint64_t offset = 0;
    int r = 0;

    *pool = (struct kvt_bench_pool){.model = model};
    for (uint32_t i = 0; i < KVT_RANKS_MAX; i++)
        pool->memfds[i] = -1;
    r = -pthread_mutex_init(&pool->lock, NULL);
    for (uint32_t c = 0; c < model->components_count && r == 0; c++) {
        pool->offset_bytes[c] = offset;
        pool->blocks_count[c] = blocks[c] * model->components[c].engine_blocks_per_block;
        offset += component_bytes(&model->components[c], blocks[c]);
        r = make_free_list(pool, c, seed + c);
    }
    pool->bytes = offset;
    for (uint32_t rank = 0; rank < model->ranks && r == 0; rank++)
        r = map_rank(pool, rank);
    if (r < 0)
        kvt_bench_pool_deinit(pool);
    return r;
}

void kvt_bench_pool_deinit(struct kvt_bench_pool *pool)
{
    if (pool->model == NULL)
        return;
    for (uint32_t rank = 0; rank < pool->model->ranks; rank++) {
        if (pool->bases[rank] != NULL)
            (void)munmap(pool->bases[rank], pool->bytes);
        if (pool->memfds[rank] >= 0)
            (void)close(pool->memfds[rank]);
    }
    for (uint32_t c = 0; c < KVT_COMPONENTS_MAX; c++)
        kvt_free(pool->free_ids[c]);
    (void)pthread_mutex_destroy(&pool->lock);
    *pool = (struct kvt_bench_pool){0};
}

bool kvt_bench_pool_take(struct kvt_bench_pool *pool, uint32_t component, uint64_t *ret_ids)
{
    uint32_t count = pool->model->components[component].engine_blocks_per_block;
    bool is_enough;

    (void)pthread_mutex_lock(&pool->lock);
    is_enough = pool->free_count[component] >= count;
    if (is_enough) {
        pool->free_count[component] -= count;
        memcpy(ret_ids, pool->free_ids[component] + pool->free_count[component],
               count * sizeof(*ret_ids));
    }
    (void)pthread_mutex_unlock(&pool->lock);
    return is_enough;
}

void kvt_bench_pool_give(struct kvt_bench_pool *pool, uint32_t component, const uint64_t *ids)
{
    uint32_t count = pool->model->components[component].engine_blocks_per_block;

    (void)pthread_mutex_lock(&pool->lock);
    KVT_ASSERT(pool->free_count[component] + count <= pool->blocks_count[component]);
    memcpy(pool->free_ids[component] + pool->free_count[component], ids, count * sizeof(*ids));
    pool->free_count[component] += count;
    (void)pthread_mutex_unlock(&pool->lock);
}

uint64_t kvt_bench_pool_piece_offset(const struct kvt_bench_pool *pool, uint32_t component,
                                     uint32_t piece)
{
    uint64_t pair = 2ull * pool->model->components[component].piece_bytes;

    return pool->offset_bytes[component] + piece / 2 * pair * pool->blocks_count[component] +
           piece % 2 * (pair / 2);
}

void kvt_bench_pool_fill(const struct kvt_bench_pool *pool, const struct kvt_bench_shard *shard)
{
    const struct kvt_model_component *component = &pool->model->components[shard->component];
    uint64_t payload_at = 0;

    for (uint32_t piece = 0; piece < component->pieces_count; piece++) {
        uint8_t *base =
            pool->bases[shard->rank] + kvt_bench_pool_piece_offset(pool, shard->component, piece);

        for (uint32_t e = 0; e < component->engine_blocks_per_block; e++) {
            kvt_oracle_fill(shard->key, payload_at,
                            base + shard->ids[e] * 2 * component->piece_bytes,
                            component->piece_bytes);
            payload_at += component->piece_bytes;
        }
    }
}

uint64_t kvt_bench_pool_count_wrong(const struct kvt_bench_pool *pool,
                                    const struct kvt_bench_shard *shard)
{
    const struct kvt_model_component *component = &pool->model->components[shard->component];
    uint64_t payload_at = 0, wrong = 0;

    for (uint32_t piece = 0; piece < component->pieces_count; piece++) {
        const uint8_t *base =
            pool->bases[shard->rank] + kvt_bench_pool_piece_offset(pool, shard->component, piece);

        for (uint32_t e = 0; e < component->engine_blocks_per_block; e++) {
            wrong += kvt_oracle_count_wrong(shard->key, payload_at,
                                            base + shard->ids[e] * 2 * component->piece_bytes,
                                            component->piece_bytes);
            payload_at += component->piece_bytes;
        }
    }
    return wrong;
}
