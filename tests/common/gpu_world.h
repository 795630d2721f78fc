/* One GPU of L1, stepped by hand, on the fake CUDA runtime: an L2 of a few slots, an engine's pool
 * on the GPU and one in host memory, with the same layout. For tests of tiers/device/gpu*.c. */
#pragma once

#include "tests/common/fake_cuda.h"
#include "tiers/device/gpu.h"

#define GPU_WORLD_TOKENS 16u
#define GPU_WORLD_SLOTS 8u

struct gpu_world_config {
    uint64_t seed;
    uint32_t pieces_count, piece_bytes, blocks_per_block; /* 0: 6, 1,040 and 4 */
    uint64_t stride_bytes;                                /* 0: piece_bytes */
    uint32_t crossover_bytes;
    uint64_t staging_bytes, inflight_bytes_max; /* 0: 1 MiB */
    uint64_t arena_bytes;                       /* 0: 2 MiB */
    uint64_t pool_bytes;                        /* 0: as many as the layout needs */
    bool is_unpinned, is_threaded;
    struct kvt_quant_spec quant; /* of the layouts */
    uint32_t devices_count;      /* 0: 1 */
    uint32_t pool_device;        /* on which the engine's pool is */
    bool is_landing_late;
    uint64_t hang_ns;
    uint32_t cpu_threads, hand_bytes;  /* as kvt_gpu_config's; stepped in turn as well */
    const struct kvt_kernels *kernels; /* NULL: kvt_kernels_host() */
};

struct gpu_world {
    struct gpu_world_config config;
    struct kvt_doorbell bell;
    struct kvt_gpu_config gpu_config;
    struct kvt_gpu *gpu;
    struct kvt_tier *tier;
    uint8_t *l2;
    uint64_t l2_bytes, slot_bytes, payload_bytes, stored_bytes;
    uint32_t header_bytes, tokens[GPU_WORLD_TOKENS];
    struct kvt_fake_cuda_foreign pool; /* the engine's memory, as the engine sees it */
    uint64_t pool_address;
    bool is_reset;        /* since the last loss */
    uint64_t hand_pieces; /* that hands, stepped by hand, have worked on */
    uint8_t *host_pool;
    uint64_t pool_bytes, blocks_count;
    struct kvt_region region, host_region;
    struct kvt_layout layout, host_layout;
    struct kvt_layout_piece *pieces, *host_pieces;
};

struct gpu_world *gpu_world_new(const struct gpu_world_config *config);
void gpu_world_free(struct gpu_world *world); /* everything was reaped */

/* Bytes of an engine block that no other block, piece or salt has. */
void gpu_world_pool_fill(struct gpu_world *world, uint8_t *pool, uint64_t block, uint8_t salt);
/* What a payload of these engine blocks is, written naively. */
void gpu_world_payload(const struct gpu_world *world, const uint8_t *pool, const uint64_t *blocks,
                       uint8_t *ret_payload);

struct kvt_xfer gpu_world_xfer(const struct gpu_world *world, uint64_t block_id);
struct kvt_place gpu_world_pool_place(const struct gpu_world *world, bool is_gpu,
                                      const uint64_t *blocks);
struct kvt_place gpu_world_device(const struct gpu_world *world, uint32_t slot);
struct kvt_place gpu_world_host(const struct gpu_world *world, uint32_t slot);
uint8_t *gpu_world_slot(struct gpu_world *world, uint32_t slot); /* in L2 */
/* Header of a slot of L2, but for its seal. */
void gpu_world_header(struct gpu_world *world, uint32_t slot, const struct kvt_xfer *xfer);

/* The GPU is lost: resets it when it is parked, as the control thread does. */
void gpu_world_reset(struct gpu_world *world);
/* And takes it back; the client opens its session anew. */
void gpu_world_take_back(struct gpu_world *world);

/* Submits, runs until it is back; its status. Resets a GPU that is lost. */
int gpu_world_run(struct gpu_world *world, struct kvt_xfer *xfer);
/* Runs until @count transfers came back. Ends the process after a million turns. */
void gpu_world_reap(struct gpu_world *world, uint32_t count);
