/* Every byte of the memory is accounted for: when a block is taken and when it goes back, on every
 * rank, against what the engine knows to be in it. What differs was written by somebody else. */
#include <stdio.h>

#include "daemon/base/alloc.h"
#include "tools/kvtier-bench/paged.h"
#include "tools/lib/oracle.h"

int paged_blocks_init(struct paged_blocks *blocks, struct bench_engine *engine,
                      struct kvt_bench_stats *stats, uint64_t count, struct kvt_kv_store *store)
{
    int r;

    *blocks = (struct paged_blocks){.engine = engine, .stats = stats};
    r = kvt_kv_memory_init_store(&blocks->memory, engine->model, count,
                                 engine->options->is_verifying, store);
    if (r == 0)
        r = kvt_block_pool_init(&blocks->pool, count, engine->options->seed + engine->engine_idx);
    blocks->blocks = kvt_alloc_zeroed(count, sizeof(*blocks->blocks));
    return r == 0 && blocks->blocks == NULL ? kvt_trace(-ENOMEM) : r;
}

void paged_blocks_deinit(struct paged_blocks *blocks)
{
    kvt_free(blocks->blocks);
    blocks->blocks = NULL;
    kvt_block_pool_deinit(&blocks->pool);
    kvt_kv_memory_deinit(&blocks->memory);
}

static void note(struct paged_blocks *blocks, uint64_t id, uint32_t rank, uint64_t bytes)
{
    static const char *const contents[] = {"free or not yet computed", "payload", "a load's",
                                           "a load's, wrong before"};
    const struct paged_block *block = &blocks->blocks[id];
    char *text = blocks->engine->shared->first_wrong;

    blocks->stats->stray_bytes += bytes;
    if (bytes > 0 && text[0] == '\0')
        (void)snprintf(text, sizeof(blocks->engine->shared->first_wrong),
                       "engine block %llu rank %u (%s, component %u): %llu bytes were written that "
                       "nobody may write",
                       (unsigned long long)id, rank, contents[block->content], block->component,
                       (unsigned long long)bytes);
}

static struct kvt_kv_part part_of(const struct paged_blocks *blocks,
                                  const struct paged_block *block, uint64_t id, uint32_t rank)
{
    struct kvt_oracle_place place = {
        block->chain, block->block_idx, block->component,
        kvt_model_shard_rank(blocks->engine->model, block->component, rank)};

    return (struct kvt_kv_part){.rank = rank,
                                .component = block->component,
                                .part = block->part,
                                .id = id,
                                .key = kvt_oracle_key(&place),
                                .may_be_computed = true};
}

static uint64_t count_foreign(const struct paged_blocks *blocks, uint64_t id, uint32_t rank)
{
    const struct paged_block *block = &blocks->blocks[id];
    struct kvt_kv_part part = part_of(blocks, block, id, rank);

    if (block->content == PAGED_GUARD)
        return kvt_kv_memory_count_unguarded(&blocks->memory, rank, id);
    if (block->content == PAGED_WRONG)
        return kvt_kv_memory_count_spilled(&blocks->memory, &part);
    if (block->content == PAGED_MAYBE)
        return kvt_kv_memory_count_stray(&blocks->memory, &part);
    return kvt_kv_memory_count_wrong(&blocks->memory, &part) +
           kvt_kv_memory_count_spilled(&blocks->memory, &part);
}

static void check(struct paged_blocks *blocks, uint64_t id)
{
    for (uint32_t rank = 0; rank < blocks->engine->model->ranks; rank++)
        note(blocks, id, rank, count_foreign(blocks, id, rank));
}

bool paged_blocks_take(struct paged_blocks *blocks, uint32_t component, uint64_t count,
                       uint64_t *ret_ids)
{
    uint64_t reused = blocks->pool.reused, by_other = blocks->pool.reused_by_other;

    if (!kvt_block_pool_take(&blocks->pool, component, count, ret_ids))
        return false;
    for (uint64_t i = 0; i < count && blocks->engine->options->is_verifying; i++)
        check(blocks, ret_ids[i]);
    blocks->stats->reused_blocks += blocks->pool.reused - reused;
    blocks->stats->reused_by_other += blocks->pool.reused_by_other - by_other;
    return true;
}

void paged_blocks_check_fresh(struct paged_blocks *blocks)
{
    for (uint64_t id = 0; id < blocks->pool.blocks_count && blocks->engine->options->is_verifying;
         id++)
        if (blocks->pool.owners[id] == KVT_BLOCK_POOL_FRESH)
            check(blocks, id);
}

void paged_blocks_compute(struct paged_blocks *blocks, uint64_t id, const struct paged_block *what)
{
    blocks->blocks[id] = *what;
    blocks->blocks[id].content = PAGED_PAYLOAD;
    for (uint32_t rank = 0; rank < blocks->engine->model->ranks; rank++) {
        struct kvt_kv_part part = part_of(blocks, what, id, rank);

        kvt_kv_memory_fill(&blocks->memory, &part);
    }
}

void paged_blocks_hide(struct paged_blocks *blocks, uint64_t id)
{
    if (!blocks->engine->options->is_verifying || blocks->pool.refs[id] != 1 ||
        blocks->blocks[id].content != PAGED_PAYLOAD)
        return;
    check(blocks, id);
    for (uint32_t rank = 0; rank < blocks->engine->model->ranks; rank++)
        kvt_kv_memory_guard(&blocks->memory, rank, id);
    blocks->blocks[id].content = PAGED_GUARD;
}

void paged_blocks_show(struct paged_blocks *blocks, uint64_t id, const struct paged_block *what)
{
    if (blocks->blocks[id].content != PAGED_GUARD)
        return;
    check(blocks, id);
    paged_blocks_compute(blocks, id, what);
}

void paged_blocks_set(struct paged_blocks *blocks, uint64_t id, const struct paged_block *what)
{
    blocks->blocks[id] = *what;
}

void paged_blocks_unref(struct paged_blocks *blocks, uint64_t id)
{
    if (id == KVT_BLOCK_NONE || !kvt_block_pool_unref(&blocks->pool, id))
        return;
    if (blocks->engine->options->is_verifying) {
        check(blocks, id);
        if (blocks->blocks[id].content != PAGED_GUARD)
            for (uint32_t rank = 0; rank < blocks->engine->model->ranks; rank++)
                kvt_kv_memory_guard(&blocks->memory, rank, id);
    }
    blocks->blocks[id].content = PAGED_GUARD;
}
