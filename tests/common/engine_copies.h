/* Which copies on L3 an engine calls durable, to demand them from the next one. Looks into the
 * store, where requests would change what is where. */
#pragma once

#include "tests/common/engine_world.h"

struct world_copies {
    struct world_copy { /* by what names a block in these tests, over restarts */
        uint32_t component, first_token;
        uint64_t block_idx;
    } * at;
    uint64_t count;
};

/* Replaces *copies (all zero at first) by what is durable now. */
void world_copies_take(struct world_copies *copies, struct world *world);
void world_copies_free(struct world_copies *copies);
/* How many of them are not on L3, or not in slots that hold what the tree says of them. The engine
 * has loaded its indexes. */
uint64_t world_copies_missing(const struct world_copies *copies, struct world *world);
/* The least number that was not given so far. */
uint64_t world_stamp_next(const struct world *world);
