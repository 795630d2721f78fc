/* A rig over L3 that outlives its engine: for tests of what comes back. Two components, a rank;
 * whatever is fetched is verified. */
#pragma once

#include "tests/common/engine_rig.h"

extern const struct world_config persist_plain; /* one device, no faults, much room */

/* The client comes again after it. */
void persist_restart(struct rig *f, bool is_clean);
/* Stores a prompt; answers whether it is durable. */
bool persist_store(struct rig *f, uint64_t tag, uint32_t blocks, bool wants_durable);
/* How many blocks of the prompt can be had, each verified. */
uint32_t persist_fetch(struct rig *f, uint64_t tag, uint32_t blocks);
/* Turns until every index is read. */
void persist_load(struct rig *f);
/* Prepares a Reset of the namespace: then call_run. */
void persist_reset(struct rig *f);
