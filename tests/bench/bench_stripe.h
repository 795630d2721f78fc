/* A store whose tiers take time and move nothing, for the benchmark of where copies go on L3.
 *
 * Tree, store, slab allocators, eviction, write policies and placement are the daemon's own. What
 * is made up: L2 answers at once, a device of L3 serves its requests one after the other, each for
 * `block_ns`, in virtual time and without bytes; an index counts its rows and is durable at once.
 * One thread. */
#pragma once

#include "daemon/engine/store.h"
#include "tests/bench/bench.h"
#include "tools/lib/workload.h"

#define STRIPE_BLOCK_TOKENS 64u
#define STRIPE_PATH_BLOCKS_MAX 4096u /* of a prompt; what is longer is cut */
#define STRIPE_GROUP 8u              /* prompts that are stored at a time */

struct stripe_config {
    uint32_t devices, run_blocks;
    enum kvt_write_policy policy; /* BACK: leaf first. THROUGH: root first */
    uint64_t l2_blocks, l3_blocks;
    uint64_t block_ns, latency_ns; /* of a device, for one block */
};

struct stripe_world;
struct stripe_world *stripe_new(const struct stripe_config *config);
struct stripe_world *stripe_free(struct stripe_world *world);
/* Looks up and stores requests [first, first + count) of the workload, STRIPE_GROUP interleaved. */
void stripe_replay(struct stripe_world *world, const struct kvt_workload *workload, uint64_t first,
                   uint64_t count);
/* All that is in L2 alone goes to L3 as well. */
void stripe_save(struct stripe_world *world);

/* The device of each block of the request's prompt, as far as L3 alone has it; how many. */
uint32_t stripe_path(struct stripe_world *world, const struct kvt_workload *workload,
                     uint64_t request, uint8_t ret_devices[STRIPE_PATH_BLOCKS_MAX]);
/* How long that prefix takes from L3 to L2, nothing of it in L2 and devices idle. */
uint64_t stripe_raise_ns(struct stripe_world *world, const struct kvt_workload *workload,
                         uint64_t request);

struct stripe_totals {
    uint64_t blocks, rows;       /* on L3; in all indexes */
    uint64_t writes, writes_max; /* of blocks: in all; to the device that got the most */
    uint64_t failed;             /* fills and raises that did not work out */
};
void stripe_totals(const struct stripe_world *world, struct stripe_totals *ret_totals);
