#include "tests/common/engine_copies.h"

#include <stdlib.h>
#include <string.h>

#include "daemon/engine/internal.h"
#include "daemon/engine/store_internal.h"
#include "tests/common/check.h"

static struct kvt_cell handle_of(const struct kvt_store *store, const struct cell *cell)
{
    return (struct kvt_cell){kvt_store_cell_idx(store, cell), cell->generation};
}

/* False: it is not a copy of a live block on L3. */
static bool describe(const struct kvt_store *store, const struct cell *cell,
                     struct world_copy *ret_copy)
{
    const uint8_t *extra_key;
    const uint32_t *tokens;

    if (!cell->is_used || cell->is_orphan || !kvt_store_is_readable(cell, KVT_TIER_DISK))
        return false;
    tokens = kvt_radix_tokens(store->radix, cell->block, &extra_key);
    if (tokens == NULL)
        return false;
    *ret_copy =
        (struct world_copy){.component = cell->component,
                            .first_token = tokens[0],
                            .block_idx = kvt_radix_depth_blocks(store->radix, cell->block) - 1};
    return true;
}

static int by_name(const void *left, const void *right)
{
    return memcmp(left, right, sizeof(struct world_copy));
}

void world_copies_free(struct world_copies *copies)
{
    free(copies->at);
    *copies = (struct world_copies){0};
}

void world_copies_take(struct world_copies *copies, struct world *world)
{
    struct kvt_store *store = world->engine->store;

    world_copies_free(copies);
    copies->at = calloc((size_t)store->records_fresh + 1, sizeof(struct world_copy));
    CHECK(copies->at != NULL);
    for (uint32_t i = 1; i <= store->records_fresh; i++)
        if (kvt_store_is_durable(store, handle_of(store, &store->cells[i])) &&
            describe(store, &store->cells[i], &copies->at[copies->count]))
            copies->count++;
}

/* Every shard of it says and holds what it should. */
static bool is_whole(struct kvt_store *store, struct world *world, struct cell *cell)
{
    const struct store_component *component = kvt_store_component(store, cell);
    const struct kvt_slab *slab = store->tiers[KVT_TIER_DISK].slab;

    for (uint32_t shard = 0; shard < component->shards; shard++) {
        const uint8_t *slot =
            fake_tier_memory(world->tiers[KVT_TIER_DISK]) +
            kvt_slab_offset(slab, *kvt_store_slot(store, cell, KVT_TIER_DISK, shard));
        struct kvt_slot_info info;
        const uint32_t *tokens;
        struct kvt_slot_key key;

        CHECK(kvt_store_slot_info(store, cell, shard, &info, &tokens));
        key = (struct kvt_slot_key){.block_id = info.block_id,
                                    .generation = info.generation,
                                    .payload_bytes = info.payload_bytes,
                                    .component = info.component,
                                    .rank = info.rank,
                                    .block_tokens = info.block_tokens,
                                    .identity = kvt_slot_identity(&info, tokens)};
        if (kvt_slot_check(slot, &key) != KVT_SLOT_OK)
            return false;
    }
    return true;
}

uint64_t world_copies_missing(const struct world_copies *copies, struct world *world)
{
    struct kvt_store *store = world->engine->store;
    struct world_copy *found = calloc((size_t)store->records_fresh + 1, sizeof(*found));
    uint64_t count = 0, missing = 0;

    CHECK(found != NULL && !kvt_store_is_loading(store));
    for (uint32_t i = 1; i <= store->records_fresh; i++)
        if (describe(store, &store->cells[i], &found[count]) &&
            is_whole(store, world, &store->cells[i]))
            count++;
    qsort(found, count, sizeof(*found), by_name);
    for (uint64_t i = 0; i < copies->count; i++)
        missing += bsearch(&copies->at[i], found, count, sizeof(*found), by_name) == NULL;
    free(found);
    return missing;
}

uint64_t world_stamp_next(const struct world *world)
{
    return kvt_store_stamp_next(world->engine->store);
}
