/* An index with its real helper process, in a directory of its own, and what it said. For tests
 * with cmocka: what must not be ends the test. All of a block follows from its id, so whatever is
 * loaded can be verified; blocks 1, 51, 101, ... are first blocks of their roots. When a world is
 * freed, no descriptor and no child may be left over. One thread, but for the callbacks. */
#pragma once

#include "daemon/base/program.h"
#include "tests/common/cmocka.h"
#include "tiers/index/client.h"

#define BLOCKS_MAX 40000u
#define BLOCK_TOKENS 16u
#define NS 2u
#define EPOCH 4u
#define WAIT_NS (30 * KVT_NS_PER_S)

struct helper_world {
    struct kvt_index_config config;
    struct kvt_index *index;
    struct kvt_doorbell bell;
    char dir[64], path[96], helper[KVT_PROGRAM_PATH_BYTES];
    /* What the index said, by block id. */
    uint64_t contents[BLOCKS_MAX + 1]; /* of the copy; 0: none */
    bool rows[BLOCKS_MAX + 1];
    uint64_t rows_count, committed_seq, seq;
    struct kvt_index_event last;
    /* Of the callbacks, which run on the index's thread. */
    _Atomic uint64_t syncs, catalogs;
    _Atomic int sync_result, catalog_result;
    atomic_bool is_sync_held, is_catalog_held; /* the call does not come back */
    atomic_bool is_in_call;
    _Atomic uint64_t commits_at_catalog;
};

int helper_world_make(void **state);
int helper_world_free(void **state);
void helper_world_pause(uint64_t ms);

/* Opens the index of the configuration; the second waits until it is loaded. */
void helper_world_open(struct helper_world *world);
void helper_world_load(struct helper_world *world);
void helper_world_close(struct helper_world *world);
pid_t helper_world_pid(const struct helper_world *world);

struct kvt_index_put helper_world_row(uint64_t id);
struct kvt_index_put helper_world_copy(uint64_t id, uint64_t content);
/* Puts; where there is no room it takes events until there is. */
void helper_world_put(struct helper_world *world, struct kvt_index_put what);
void helper_world_put_blocks(struct helper_world *world, uint64_t first, uint64_t end);
void helper_world_sync(struct helper_world *world); /* until all is committed */

/* The next event, into `last`; false: none until then. */
bool helper_world_next(struct helper_world *world, uint64_t until_ns);
/* Takes events until one of this kind. */
void helper_world_expect(struct helper_world *world, enum kvt_index_event_kind kind);
/* Blocks [1, end) were loaded, no others, as helper_world_put_blocks had put them. */
void helper_world_holds(struct helper_world *world, uint64_t end);
