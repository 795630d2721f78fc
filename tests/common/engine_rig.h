/* A world with one client, and what most directed tests of the engine do with them: prompts are
 * stored from the first blocks of the client's pool and loaded into them. A test that needs more
 * brings clients and calls of its own.
 *
 * Whatever is done here is checked: a request that fails, a block that is not stored or that does
 * not hold what was stored ends the program. */
#pragma once

#include "tests/common/engine_world.h"

struct rig {
    struct world world;
    struct client client;
    struct call call, other; /* the verbs below use the first */
};

/* Nobody is attached. */
void rig_init(struct rig *rig, const struct world_config *config);
/* When everybody is gone: nothing may be left in the engine. */
void rig_deinit(struct rig *rig);
/* The same where there is no engine left that could be asked, or it was stopped. */
void rig_free(struct rig *rig);

/* The client: engine 1, rank 0, scheduler; with ordinary memory, or with memory on a GPU. */
void rig_attach(struct rig *rig);
void rig_attach_gpu(struct rig *rig, uint32_t gpu);
void rig_leave(struct rig *rig); /* it detaches, and its memory goes */

/* Both at once. */
void rig_begin(struct rig *rig, const struct world_config *config);
void rig_begin_gpu(struct rig *rig, const struct world_config *config, uint32_t gpu);
void rig_end(struct rig *rig);

/* One more, with memory on a GPU. */
void rig_join_gpu(struct rig *rig, struct client *client, uint8_t engine, bool is_scheduler,
                  uint32_t rank, uint32_t gpu);
/* Of anybody. */
void rig_part(struct rig *rig, struct client *client);

/* Blocks [0, blocks) of a prompt that nobody has stored so far; a minute is time enough. */
void rig_store(struct rig *rig, uint64_t tag, uint32_t blocks);
/* Some of the blocks of a ticket, which have to be new. */
void rig_demote(struct rig *rig, const struct client *client, struct kvt_handle ticket,
                uint64_t first, uint32_t count);
/* How many of the blocks came. */
uint32_t rig_load(struct rig *rig, uint64_t tag, uint32_t blocks);
/* Copies of the prompt go down, from some tiers to one: KVT_TIER_BIT_L1 and so on. */
void rig_lower(struct rig *rig, uint64_t tag, uint32_t blocks, uint32_t from_tiers,
               uint32_t to_tier);
/* Prepares a Promote of the blocks that a lease has, to be read where they lie in L1: call_run. */
void rig_begin_in_place(struct rig *rig, const struct client *client, struct kvt_handle lease,
                        uint32_t blocks);
void rig_release(struct rig *rig, const struct client *client, struct kvt_handle lease);
struct kvt_store_stats rig_stats(struct rig *rig);
uint64_t rig_leases(struct rig *rig);
uint64_t rig_l1_slots(struct rig *rig, uint32_t zone); /* taken */
