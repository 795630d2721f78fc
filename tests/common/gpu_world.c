#include "tests/common/gpu_world.h"

#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "daemon/base/clock.h"
#include "tests/common/cmocka.h"

#define ARENA_BYTES (2u << 20)
#define BASE_BYTES (16u << 20) /* of the arena in the tier's offsets */
#define ZONE 3u
#define OTHER_ZONE 1u
#define ENGINE_BLOCKS 64u
#define TURNS_MAX 1000000u

static struct kvt_layout_piece *pieces_new(const struct gpu_world *world)
{
    const struct gpu_world_config *config = &world->config;
    struct kvt_layout_piece *pieces = calloc(config->pieces_count, sizeof(*pieces));

    for (uint32_t p = 0; p < config->pieces_count; p++)
        pieces[p] = (struct kvt_layout_piece){.bytes = config->piece_bytes,
                                              .stride_bytes = config->stride_bytes,
                                              .offset_bytes =
                                                  p * config->stride_bytes * world->blocks_count};
    return pieces;
}

static void layout_open(struct gpu_world *world, struct kvt_layout *layout,
                        const struct kvt_region *region, struct kvt_layout_piece *pieces)
{
    *layout = (struct kvt_layout){.pieces_count = world->config.pieces_count,
                                  .engine_blocks_per_block = world->config.blocks_per_block,
                                  .quant = world->config.quant,
                                  .pieces = pieces};
    assert_int_equal(kvt_layout_resolve(layout, region, 1, world->payload_bytes), 0);
    assert_int_equal(layout->stored_bytes, world->stored_bytes);
}

/* The client's session: memory on the GPU and in the host, with the same layout. */
static void attach(struct gpu_world *world)
{
    uint32_t incarnation = world->tier == NULL || world->config.pool_device != 0
                               ? 0
                               : atomic_load(&world->tier->counters.incarnation);

    assert_int_equal(kvt_cuda_calls()->set_device((int)world->config.pool_device), 0);
    assert_int_equal(kvt_cuda_calls()->ipc_open(world->pool.handle, &world->pool_address), 0);
    world->region =
        (struct kvt_region){.base = (uint8_t *)(uintptr_t)world->pool_address,
                            .bytes = world->pool_bytes,
                            .is_gpu = true,
                            .gpu_zone = world->config.pool_device == 0 ? ZONE : OTHER_ZONE,
                            .incarnation = incarnation,
                            .allocation = world->pool_address};
    layout_open(world, &world->layout, &world->region, world->pieces);
}

static void pools_open(struct gpu_world *world)
{
    world->pool_bytes =
        KVT_MAX(world->config.pool_bytes,
                world->config.pieces_count * world->config.stride_bytes * world->blocks_count);
    world->pieces = pieces_new(world);
    world->host_pieces = pieces_new(world);
    kvt_fake_cuda_foreign_new(&world->pool, world->config.pool_device, world->pool_bytes);
    attach(world);
    world->host_pool =
        mmap(NULL, world->pool_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_ptr_not_equal(world->host_pool, MAP_FAILED);
    world->host_region = (struct kvt_region){.base = world->host_pool, .bytes = world->pool_bytes};
    layout_open(world, &world->host_layout, &world->host_region, world->host_pieces);
    for (uint64_t b = 0; b < world->blocks_count; b++) {
        gpu_world_pool_fill(world, world->pool.memory, b, 1);
        gpu_world_pool_fill(world, world->host_pool, b, 101);
    }
}

static void gpu_open(struct gpu_world *world)
{
    struct kvt_gpu_config config = {.calls = kvt_cuda_calls(),
                                    .zone = ZONE,
                                    .base_bytes = BASE_BYTES,
                                    .arena_bytes = world->config.arena_bytes,
                                    .staging_bytes = world->config.staging_bytes,
                                    .streams = 2,
                                    .inflight_bytes_max = world->config.inflight_bytes_max,
                                    .inflight_max = 512,
                                    .crossover_bytes = world->config.crossover_bytes,
                                    .host_memory = world->l2,
                                    .host_memory_bytes = world->l2_bytes,
                                    .is_host_pinned = !world->config.is_unpinned,
                                    .doorbell = &world->bell,
                                    .hang_ns = world->config.hang_ns,
                                    .cpu_threads = world->config.cpu_threads,
                                    .hand_bytes = world->config.hand_bytes,
                                    .is_by_hand = !world->config.is_threaded};
    int error;

    assert_int_equal(kvt_cuda_calls()->set_device(0), 0);
    world->l2 = aligned_alloc(4096, world->l2_bytes);
    memset(world->l2, 0x5a, world->l2_bytes);
    config.host_memory = world->l2;
    if (!world->config.is_unpinned)
        assert_int_equal(kvt_cuda_calls()->pin(world->l2, world->l2_bytes), 0);
    world->gpu_config = config;
    assert_int_equal(kvt_gpu_open(&world->gpu, &config, &error), 0);
    world->tier = kvt_gpu_tier(world->gpu);
}

struct gpu_world *gpu_world_new(const struct gpu_world_config *config)
{
    struct gpu_world *world = calloc(1, sizeof(*world));
    struct kvt_fake_cuda_config fake = {.seed = config->seed,
                                        .devices_count = KVT_MAX(config->devices_count, 1u),
                                        .has_executor = config->is_threaded,
                                        .is_landing_late = config->is_landing_late,
                                        .kernels = config->kernels != NULL ? config->kernels
                                                                           : kvt_kernels_host()};

    world->config = *config;
    config = &world->config;
    if (world->config.pieces_count == 0)
        world->config.pieces_count = 6;
    if (world->config.piece_bytes == 0)
        world->config.piece_bytes = 1040;
    if (world->config.blocks_per_block == 0)
        world->config.blocks_per_block = 4;
    if (world->config.stride_bytes == 0)
        world->config.stride_bytes = config->piece_bytes;
    if (world->config.staging_bytes == 0)
        world->config.staging_bytes = KVT_MIB;
    if (world->config.inflight_bytes_max == 0)
        world->config.inflight_bytes_max = KVT_MIB;
    if (world->config.arena_bytes == 0)
        world->config.arena_bytes = ARENA_BYTES;
    world->blocks_count = ENGINE_BLOCKS;
    world->payload_bytes =
        (uint64_t)config->pieces_count * config->piece_bytes * config->blocks_per_block;
    world->stored_bytes = config->quant.kind == KVT_QUANT_NONE
                              ? world->payload_bytes
                              : kvt_quant_bytes(&config->quant, world->payload_bytes);
    assert_true(world->stored_bytes > 0);
    world->header_bytes = kvt_slot_header_bytes(GPU_WORLD_TOKENS);
    world->slot_bytes = kvt_slot_bytes(GPU_WORLD_TOKENS, world->stored_bytes);
    world->l2_bytes = GPU_WORLD_SLOTS * world->slot_bytes;
    assert_int_equal(kvt_doorbell_init(&world->bell), 0);
    kvt_fake_cuda_init(&fake);
    pools_open(world);
    gpu_open(world);
    return world;
}

void gpu_world_free(struct gpu_world *world)
{
    const struct kvt_cuda_calls *calls = kvt_cuda_calls();

    world->gpu = kvt_gpu_close(world->gpu);
    if (!world->config.is_unpinned && calls->set_device(0) == 0)
        (void)calls->unpin(world->l2);
    if (calls->set_device((int)world->config.pool_device) == 0)
        (void)calls->ipc_close(world->pool_address);
    kvt_fake_cuda_foreign_free(&world->pool);
    kvt_fake_cuda_deinit();
    kvt_doorbell_deinit(&world->bell);
    munmap(world->host_pool, world->pool_bytes);
    free(world->l2);
    free(world->pieces);
    free(world->host_pieces);
    free(world);
}

static uint64_t pool_at(const struct gpu_world *world, uint32_t piece, uint64_t block)
{
    return (piece * world->blocks_count + block) * world->config.stride_bytes;
}

/* With quantisation they are 2-byte elements: small numbers, exact in both formats. */
void gpu_world_pool_fill(struct gpu_world *world, uint8_t *pool, uint64_t block, uint8_t salt)
{
    for (uint32_t p = 0; p < world->config.pieces_count; p++) {
        uint8_t *at = pool + pool_at(world, p, block);

        for (uint32_t i = 0; i < world->config.piece_bytes; i++) {
            at[i] = (uint8_t)(salt + block * 3 + p * 5 + i * 7 + i / 253);
            if (world->config.quant.kind != KVT_QUANT_NONE && i % 2 == 1)
                at[i] = 0x3c; /* of an FP16 about 1 */
        }
    }
}

void gpu_world_payload(const struct gpu_world *world, const uint8_t *pool, const uint64_t *blocks,
                       uint8_t *ret_payload)
{
    uint8_t *to = ret_payload;

    for (uint32_t p = 0; p < world->config.pieces_count; p++)
        for (uint32_t b = 0; b < world->config.blocks_per_block; b++) {
            memcpy(to, pool + pool_at(world, p, blocks[b]), world->config.piece_bytes);
            to += world->config.piece_bytes;
        }
}

struct kvt_xfer gpu_world_xfer(const struct gpu_world *world, uint64_t block_id)
{
    return (struct kvt_xfer){.key = {.block_id = block_id,
                                     .generation = block_id * 10,
                                     .payload_bytes = world->stored_bytes,
                                     .block_tokens = GPU_WORLD_TOKENS},
                             .header_bytes = world->header_bytes,
                             .slot_bytes = world->slot_bytes,
                             .deadline_ns = KVT_TIME_NEVER_NS,
                             .status = 12345};
}

struct kvt_place gpu_world_pool_place(const struct gpu_world *world, bool is_gpu,
                                      const uint64_t *blocks)
{
    return (struct kvt_place){.kind = KVT_PLACE_CLIENT,
                              .view = {.layout = is_gpu ? &world->layout : &world->host_layout,
                                       .engine_blocks = blocks,
                                       .end_piece = world->config.pieces_count}};
}

struct kvt_place gpu_world_device(const struct gpu_world *world, uint32_t slot)
{
    return (struct kvt_place){
        .kind = KVT_PLACE_DEVICE,
        .incarnation = atomic_load(&world->tier->counters.incarnation),
        .offset_bytes =
            BASE_BYTES + slot * kvt_round_up(world->stored_bytes, KVT_GPU_SLOT_ALIGN_BYTES)};
}

struct kvt_place gpu_world_host(const struct gpu_world *world, uint32_t slot)
{
    return (struct kvt_place){.kind = KVT_PLACE_HOST, .offset_bytes = slot * world->slot_bytes};
}

uint8_t *gpu_world_slot(struct gpu_world *world, uint32_t slot)
{
    return world->l2 + slot * world->slot_bytes;
}

void gpu_world_header(struct gpu_world *world, uint32_t slot, const struct kvt_xfer *xfer)
{
    struct kvt_slot_info info = {.block_id = xfer->key.block_id,
                                 .generation = xfer->key.generation,
                                 .payload_bytes = world->stored_bytes,
                                 .block_tokens = GPU_WORLD_TOKENS};

    kvt_slot_header_write(gpu_world_slot(world, slot), &info, world->tokens);
}

void gpu_world_reset(struct gpu_world *world)
{
    if (world->is_reset || !kvt_gpu_is_parked(world->gpu))
        return;
    (void)kvt_cuda_calls()->set_device(0); /* may say that it is lost */
    assert_int_equal(kvt_cuda_calls()->device_reset(), 0);
    kvt_gpu_was_reset(world->gpu);
    world->is_reset = true;
}

static bool turn(struct gpu_world *world)
{
    bool has_moved = kvt_gpu_turn(world->gpu);

    for (uint32_t i = 0; i < world->config.cpu_threads; i++)
        if (kvt_gpu_hand_turn(world->gpu, i)) {
            world->hand_pieces++;
            has_moved = true;
        }
    return has_moved;
}

void gpu_world_take_back(struct gpu_world *world)
{
    int error;

    for (uint32_t i = 0; !kvt_gpu_is_parked(world->gpu); i++) {
        assert_true(i < TURNS_MAX);
        if (world->config.is_threaded)
            (void)sched_yield();
        else
            (void)turn(world);
    }
    gpu_world_reset(world);
    if (!world->config.is_unpinned) {
        assert_int_equal(kvt_cuda_calls()->set_device(0), 0);
        assert_int_equal(kvt_cuda_calls()->pin(world->l2, world->l2_bytes), 0);
    }
    assert_int_equal(kvt_gpu_revive(world->gpu, &error), 0);
    world->is_reset = false;
    attach(world);
}

void gpu_world_reap(struct gpu_world *world, uint32_t count)
{
    const struct timespec pause = {.tv_nsec = 10000};
    struct kvt_xfer *back[16];

    for (uint32_t i = 0; count > 0; i++) {
        uint32_t reaped;

        if (i > TURNS_MAX) {
            fprintf(stderr, "%u transfers did not come back\n", count);
            abort();
        }
        if (world->config.is_threaded)
            (void)nanosleep(&pause, NULL);
        else if (!turn(world))
            kvt_fake_cuda_pump(4);
        gpu_world_reset(world);
        reaped = kvt_tier_reap(world->tier, back, KVT_COUNT_OF(back));
        assert_true(reaped <= count);
        count -= reaped;
    }
}

int gpu_world_run(struct gpu_world *world, struct kvt_xfer *xfer)
{
    uint32_t taken;

    assert_int_equal(kvt_tier_submit(world->tier, &xfer, 1, &taken), 0);
    gpu_world_reap(world, 1);
    return xfer->status;
}
