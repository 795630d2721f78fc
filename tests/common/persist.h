/* One engine with one client over L3 that outlives it: for tests of what comes back. Two
 * components, a rank; whatever is fetched is verified. */
#pragma once

#include "tests/common/engine_world.h"

extern const struct world_config persist_plain; /* one device, no faults, much room */

struct persist {
    struct world world;
    struct client client;
    struct call call;
};

void persist_begin(struct persist *f, const struct world_config *config);
void persist_end(struct persist *f);
void persist_leave(struct persist *f); /* the client goes; only a restart brings another */
void persist_restart(struct persist *f, bool is_clean);
/* Stores a prompt; answers whether it is durable. */
bool persist_store(struct persist *f, uint64_t tag, uint32_t blocks, bool wants_durable);
/* How many blocks of the prompt can be had, each verified. */
uint32_t persist_fetch(struct persist *f, uint64_t tag, uint32_t blocks);
struct kvt_store_stats persist_stats(struct persist *f);
/* Turns until every index is read. */
void persist_load(struct persist *f);
/* Prepares a Reset of the namespace: then call_run. */
void persist_reset(struct persist *f);
