/* The set of GPUs of L1 with its threads, on the fake CUDA runtime: an L2 of a few slots, and an
 * engine's pool on each GPU. For tests of tiers/device/{set,member,region,recover}.c. */
#pragma once

#include "tests/common/fake_cuda.h"
#include "tiers/device/set.h"

#define SET_WORLD_TOKENS 16u
#define SET_WORLD_PAYLOAD_BYTES 65536u
#define SET_WORLD_SLOTS 16u /* of L2 */
#define SET_WORLD_BLOCKS 16u
#define SET_WORLD_ARENA_BYTES (4u << 20)
#define SET_WORLD_GPUS 3u

struct set_world {
    struct kvt_fake_cuda_config fake;
    struct kvt_device_config config; /* of open */
    struct kvt_cuda_calls calls;     /* the fake's; a test may put something between */
    struct kvt_doorbell bell;
    struct kvt_tier *tier;
    struct kvt_device_report report;
    uint8_t *l2;
    uint32_t header_bytes;
    uint64_t slot_bytes;
    struct kvt_fake_cuda_foreign pools[SET_WORLD_GPUS];
    struct kvt_region regions[SET_WORLD_GPUS];
    struct kvt_layout layouts[SET_WORLD_GPUS];
    struct kvt_layout_piece pieces[SET_WORLD_GPUS];
    uint64_t blocks[SET_WORLD_BLOCKS];
    uint32_t tokens[SET_WORLD_TOKENS];
};

/* The fake with @gpus devices, a configuration of all of them, nothing opened. */
struct set_world *set_world_new(uint32_t gpus);
int set_world_open(struct set_world *world);
void set_world_close(struct set_world *world);
void set_world_free(struct set_world *world); /* closes, too; dies if anything is left open */

struct kvt_device_set *set_world_set(struct set_world *world);
struct kvt_device_gpu set_world_gpu(struct set_world *world, uint32_t idx);
/* An engine's pool on the GPU, made if it is not there. */
struct kvt_device_memory set_world_memory(struct set_world *world, uint32_t device);
/* Opens it as a region of the tier, with a layout of one piece. */
void set_world_attach(struct set_world *world, uint32_t device);
void set_world_detach(struct set_world *world, uint32_t device);

struct kvt_xfer set_world_xfer(const struct set_world *world, uint64_t block_id);
struct kvt_place set_world_pool(const struct set_world *world, uint32_t device, uint32_t block);
struct kvt_place set_world_slot(const struct set_world *world, uint32_t zone, uint32_t slot);
struct kvt_place set_world_host(const struct set_world *world, uint32_t slot);
void set_world_header(struct set_world *world, uint32_t slot, const struct kvt_xfer *xfer);
/* Submits and reaps; ends the process when it takes too long. */
int set_world_run(struct set_world *world, struct kvt_xfer *xfer);
uint32_t set_world_reap(struct set_world *world, struct kvt_xfer *ret_xfers[], uint32_t count);
/* Until zone @zone is (not) in service, or @incarnation is served. */
void set_world_await(struct set_world *world, uint32_t zone, uint32_t incarnation);
bool set_world_until(struct set_world *world, bool (*is_so)(struct set_world *world));
