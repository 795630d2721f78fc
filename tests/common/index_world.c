#include "tests/common/index_world.h"

#include <string.h>

#include "tests/common/check.h"

static uint64_t mix(uint64_t a, uint64_t b)
{
    uint64_t x = a * 0x9e3779b97f4a7c15ull + b;

    x ^= x >> 29;
    x *= 0xbf58476d1ce4e5b9ull;
    return x ^ x >> 32;
}

void index_world_row(struct kvt_index_put *ret_put, const struct kvt_index_key *key,
                     uint64_t parent_id, uint32_t tokens_count, struct index_world_bytes *bytes)
{
    *ret_put = (struct kvt_index_put){.kind = KVT_INDEX_PUT_ROW,
                                      .key = *key,
                                      .parent_id = parent_id,
                                      .tokens_count = tokens_count,
                                      .tokens = bytes->tokens};
    for (uint32_t i = 0; i < tokens_count; i++)
        bytes->tokens[i] = (uint32_t)mix(key->block_id, i);
    if (key->block_id % 3 == 0) {
        for (uint32_t i = 0; i < KVT_EXTRA_KEY_BYTES; i++)
            bytes->extra_key[i] = (uint8_t)mix(key->block_id, 10000 + i);
        ret_put->extra_key = bytes->extra_key;
    }
    if (key->block_idx == 0) {
        ret_put->root_key_bytes = 6 + (uint32_t)(mix(key->block_id, 3) % 1019);
        for (uint32_t i = 0; i < ret_put->root_key_bytes; i++)
            bytes->root_key[i] = (uint8_t)mix(key->block_id, 20000 + i);
        ret_put->root_key = bytes->root_key;
    }
}

void index_world_copy(struct kvt_index_put *ret_put, const struct kvt_index_key *key,
                      uint16_t component, uint64_t content, struct index_world_bytes *bytes)
{
    *ret_put = (struct kvt_index_put){.kind = KVT_INDEX_PUT_COPY,
                                      .key = *key,
                                      .component = component,
                                      .shards_count = (uint16_t)(1 + content % KVT_RANKS_MAX),
                                      .content = content,
                                      .slot_bytes = mix(content, component),
                                      .slot_offsets = bytes->slots,
                                      .run_offsets = bytes->runs};
    for (uint32_t i = 0; i < ret_put->shards_count; i++) {
        bytes->slots[i] = mix(content, 100 + i) ^ key->block_id;
        bytes->runs[i] = mix(content, 200 + i);
    }
}

static bool is_same_bytes(const void *a, const void *b, size_t bytes)
{
    return (a == NULL) == (b == NULL) && (a == NULL || bytes == 0 || memcmp(a, b, bytes) == 0);
}

bool index_world_is_true(const struct kvt_index_put *put)
{
    static struct index_world_bytes bytes;
    struct kvt_index_put want;

    if (put->kind == KVT_INDEX_PUT_ROW) {
        if (put->tokens_count == 0 || put->tokens_count > KVT_BLOCK_TOKENS_MAX)
            return false;
        index_world_row(&want, &put->key, put->parent_id, put->tokens_count, &bytes);
        return put->root_key_bytes == want.root_key_bytes &&
               is_same_bytes(put->root_key, want.root_key, want.root_key_bytes) &&
               is_same_bytes(put->extra_key, want.extra_key, KVT_EXTRA_KEY_BYTES) &&
               is_same_bytes(put->tokens, want.tokens, 4ul * want.tokens_count);
    }
    if (put->kind != KVT_INDEX_PUT_COPY || put->component >= KVT_COMPONENTS_MAX)
        return false;
    index_world_copy(&want, &put->key, put->component, put->content, &bytes);
    return put->shards_count == want.shards_count && put->slot_bytes == want.slot_bytes &&
           is_same_bytes(put->slot_offsets, want.slot_offsets, 8ul * want.shards_count) &&
           is_same_bytes(put->run_offsets, want.run_offsets, 8ul * want.shards_count);
}

bool index_world_is_key(const struct kvt_index_key *a, const struct kvt_index_key *b)
{
    return a->block_id == b->block_id && a->block_idx == b->block_idx && a->epoch == b->epoch &&
           a->ns == b->ns;
}

static uint32_t block_find(const struct index_world *world, const struct kvt_index_key *key)
{
    for (uint32_t i = 0; i < world->count; i++) {
        if (index_world_is_key(&world->blocks[i].key, key))
            return i;
    }
    return INDEX_WORLD_NONE;
}

static void row_see(struct index_world_walk *walk, const struct kvt_index_put *put)
{
    const struct index_world *world = walk->world;
    uint32_t at = block_find(world, &put->key);
    const struct index_world_block *block = &world->blocks[at];

    CHECK(at != INDEX_WORLD_NONE && block->has_row && !walk->was_seen[at]);
    CHECK(put->parent_id == block->parent_id);
    CHECK(put->tokens_count == world->namespaces[put->key.ns].block_tokens);
    CHECK(put->key.block_idx <= walk->depth); /* depth first: at most one deeper */
    CHECK(put->key.block_idx == 0 || walk->path[put->key.block_idx - 1] == block->parent);
    walk->path[put->key.block_idx] = at;
    walk->depth = put->key.block_idx + 1;
    walk->was_seen[at] = true;
    walk->rows++;
    memset(walk->contents_seen, 0, sizeof(walk->contents_seen));
}

int index_world_visit(void *ctx, const struct kvt_index_put *put)
{
    struct index_world_walk *walk = ctx;
    const struct index_world_block *block;

    CHECK(index_world_is_true(put));
    if (put->kind == KVT_INDEX_PUT_ROW) {
        row_see(walk, put);
        return 0;
    }
    CHECK(walk->depth > 0);
    block = &walk->world->blocks[walk->path[walk->depth - 1]];
    CHECK(index_world_is_key(&put->key, &block->key));
    CHECK(put->content != 0 && put->content == block->contents[put->component]);
    CHECK(walk->contents_seen[put->component] == 0);
    walk->contents_seen[put->component] = put->content;
    walk->copies++;
    return 0;
}

static bool row_holds(const struct index_world *world, const struct index_world_block *block)
{
    const struct kvt_index_ns *ns = &world->namespaces[block->key.ns];

    return block->has_row && ns->is_used && ns->epoch == block->key.epoch;
}

void index_world_expect(struct index_world *world, struct kvt_index_db *db,
                        struct kvt_index_loaded *ret_loaded)
{
    static struct index_world_walk walk;
    static bool holds[INDEX_WORLD_BLOCKS_MAX], is_alive[INDEX_WORLD_BLOCKS_MAX];
    uint32_t rows = 0, copies = 0;

    memset(&walk, 0, sizeof(walk));
    memset(is_alive, 0, sizeof(is_alive));
    walk.world = world;
    /* Parents are made before their children, so they have smaller numbers. */
    for (uint32_t i = 0; i < world->count; i++) {
        const struct index_world_block *block = &world->blocks[i];

        holds[i] =
            row_holds(world, block) &&
            (block->parent == INDEX_WORLD_NONE ? block->key.block_idx == 0 : holds[block->parent]);
    }
    for (uint32_t i = world->count; i-- > 0;) {
        struct index_world_block *block = &world->blocks[i];

        for (uint32_t c = 0; c < KVT_COMPONENTS_MAX; c++)
            is_alive[i] = is_alive[i] || (holds[i] && block->contents[c] != 0);
        if (is_alive[i] && block->parent != INDEX_WORLD_NONE)
            is_alive[block->parent] = true;
        if (!is_alive[i]) {
            block->has_row = false;
            memset(block->contents, 0, sizeof(block->contents));
        }
    }
    CHECK(kvt_index_db_walk(db, index_world_visit, &walk, ret_loaded) == 0);
    for (uint32_t i = 0; i < world->count; i++) {
        CHECK(walk.was_seen[i] == is_alive[i]);
        rows += is_alive[i];
        for (uint32_t c = 0; is_alive[i] && c < KVT_COMPONENTS_MAX; c++)
            copies += world->blocks[i].contents[c] != 0;
    }
    CHECK(walk.rows == rows && walk.copies == copies);
    CHECK(ret_loaded->rows == rows && ret_loaded->copies == copies);
}
