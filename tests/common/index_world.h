/* A naive index: blocks in an array, and what a walk of it must visit. What a block's row and
 * copies say is a function of its id and of their contents, so that any row that comes out of a
 * database can be judged on its own, bit for bit. One thread; a failure ends the program. */
#pragma once

#include "tiers/index/db.h"

#define INDEX_WORLD_BLOCKS_MAX 8192u
#define INDEX_WORLD_NONE UINT32_MAX

struct index_world_block {
    bool has_row;
    struct kvt_index_key key;
    uint64_t parent_id;
    uint32_t parent;                       /* or INDEX_WORLD_NONE */
    uint64_t contents[KVT_COMPONENTS_MAX]; /* 0: no copy */
};

struct index_world {
    struct kvt_index_ns namespaces[KVT_NAMESPACES_MAX];
    uint64_t stamp; /* the last one given */
    uint32_t count;
    struct index_world_block blocks[INDEX_WORLD_BLOCKS_MAX];
};

/* What a put points to; lives as long as the put is used. */
struct index_world_bytes {
    uint8_t extra_key[KVT_EXTRA_KEY_BYTES], root_key[KVT_INDEX_ROOT_KEY_BYTES_MAX];
    uint32_t tokens[KVT_BLOCK_TOKENS_MAX];
    uint64_t slots[KVT_RANKS_MAX], runs[KVT_RANKS_MAX];
};

bool index_world_is_key(const struct kvt_index_key *a, const struct kvt_index_key *b);
/* The row, the copy that a block of that key has. */
void index_world_row(struct kvt_index_put *ret_put, const struct kvt_index_key *key,
                     uint64_t parent_id, uint32_t tokens_count, struct index_world_bytes *bytes);
void index_world_copy(struct kvt_index_put *ret_put, const struct kvt_index_key *key,
                      uint16_t component, uint64_t content, struct index_world_bytes *bytes);
/* True: exactly what the two above make. */
bool index_world_is_true(const struct kvt_index_put *put);

/* A visit for kvt_index_db_walk: checks each put against the naive index, the order, and that none
 * comes twice. */
struct index_world_walk {
    const struct index_world *world;
    bool was_seen[INDEX_WORLD_BLOCKS_MAX];
    uint32_t rows, copies;
    uint32_t depth;                             /* of the last row, + 1; 0: none yet */
    uint32_t path[INDEX_WORLD_BLOCKS_MAX];      /* blocks from the root to the last row */
    uint64_t contents_seen[KVT_COMPONENTS_MAX]; /* of the last row */
};
int index_world_visit(void *walk, const struct kvt_index_put *put);

/* Walks the database and compares. What does not hold is gone from both then. */
void index_world_expect(struct index_world *world, struct kvt_index_db *db,
                        struct kvt_index_loaded *ret_loaded);
