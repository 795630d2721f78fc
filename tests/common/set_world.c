#include "tests/common/set_world.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "daemon/base/clock.h"
#include "tests/common/cmocka.h"

#define WAIT_NS (20u * KVT_NS_PER_S) /* then something hangs */

static void pause_ns(uint64_t ns)
{
    const struct timespec pause = {.tv_nsec = (long)ns};

    (void)nanosleep(&pause, NULL);
}

struct set_world *set_world_new(uint32_t gpus)
{
    struct set_world *world = calloc(1, sizeof(*world));

    world->fake = (struct kvt_fake_cuda_config){
        .seed = 11, .devices_count = gpus, .has_executor = true, .kernels = kvt_kernels_host()};
    kvt_fake_cuda_init(&world->fake);
    world->calls = *kvt_cuda_calls();
    world->bell = KVT_DOORBELL_NULL;
    assert_int_equal(kvt_doorbell_init(&world->bell), 0);
    world->header_bytes = kvt_slot_header_bytes(SET_WORLD_TOKENS);
    world->slot_bytes = kvt_slot_bytes(SET_WORLD_TOKENS, SET_WORLD_PAYLOAD_BYTES);
    world->l2 = aligned_alloc(4096, SET_WORLD_SLOTS * world->slot_bytes);
    memset(world->l2, 0x5a, SET_WORLD_SLOTS * world->slot_bytes);
    for (uint32_t b = 0; b < SET_WORLD_BLOCKS; b++)
        world->blocks[b] = b;
    world->config =
        (struct kvt_device_config){.backend = "cuda",
                                   .bytes = SET_WORLD_ARENA_BYTES,
                                   .host_memory = world->l2,
                                   .host_memory_bytes = SET_WORLD_SLOTS * world->slot_bytes,
                                   .inflight_max = 16,
                                   .doorbell = &world->bell,
                                   .gpus = "all",
                                   .headroom_bytes = KVT_MIB,
                                   .staging_bytes = 2 * KVT_MIB,
                                   .inflight_bytes_max = 2 * KVT_MIB,
                                   .streams = 2,
                                   .crossover_bytes = 4096,
                                   .cpu_threads = 2,
                                   .retry_min_ns = 2 * KVT_NS_PER_MS,
                                   .retry_max_ns = 8 * KVT_NS_PER_MS,
                                   .sysfs = "/nowhere",
                                   .mps_pipes = "/nowhere"};
    return world;
}

int set_world_open(struct set_world *world)
{
    return kvt_device_set_open(&world->tier, &world->config, &world->calls, &world->report);
}

void set_world_close(struct set_world *world)
{
    for (uint32_t i = 0; i < SET_WORLD_GPUS; i++)
        set_world_detach(world, i);
    world->tier = kvt_tier_close(world->tier);
}

void set_world_free(struct set_world *world)
{
    set_world_close(world);
    for (uint32_t i = 0; i < SET_WORLD_GPUS; i++)
        if (world->pools[i].memory != NULL)
            kvt_fake_cuda_foreign_free(&world->pools[i]);
    kvt_fake_cuda_deinit();
    kvt_doorbell_deinit(&world->bell);
    free(world->l2);
    free(world);
}

struct kvt_device_set *set_world_set(struct set_world *world)
{
    struct kvt_device_set *set = kvt_device_set_of(world->tier);

    assert_non_null(set);
    return set;
}

struct kvt_device_gpu set_world_gpu(struct set_world *world, uint32_t idx)
{
    struct kvt_device_gpu gpu;

    assert_true(kvt_device_gpu(world->tier, idx, &gpu));
    return gpu;
}

struct kvt_device_memory set_world_memory(struct set_world *world, uint32_t device)
{
    struct kvt_fake_cuda_foreign *pool = &world->pools[device];
    struct kvt_device_memory memory = {.bytes =
                                           (uint64_t)SET_WORLD_BLOCKS * SET_WORLD_PAYLOAD_BYTES};
    struct kvt_cuda_info info;

    if (pool->memory == NULL)
        kvt_fake_cuda_foreign_new(pool, device, memory.bytes);
    assert_int_equal(world->calls.device_info((int)device, &info), 0);
    memcpy(memory.handle, pool->handle, sizeof(memory.handle));
    memcpy(memory.uuid, info.uuid, sizeof(memory.uuid));
    return memory;
}

void set_world_attach(struct set_world *world, uint32_t device)
{
    struct kvt_device_memory memory = set_world_memory(world, device);
    char why[KVT_DEVICE_WHY_BYTES];

    assert_int_equal(kvt_device_region_open(world->tier, &memory, &world->regions[device], why), 0);
    world->pieces[device] = (struct kvt_layout_piece){.bytes = SET_WORLD_PAYLOAD_BYTES,
                                                      .stride_bytes = SET_WORLD_PAYLOAD_BYTES};
    world->layouts[device] = (struct kvt_layout){
        .pieces_count = 1, .engine_blocks_per_block = 1, .pieces = &world->pieces[device]};
    assert_int_equal(kvt_layout_resolve(&world->layouts[device], &world->regions[device], 1,
                                        SET_WORLD_PAYLOAD_BYTES),
                     0);
}

void set_world_detach(struct set_world *world, uint32_t device)
{
    kvt_device_region_close(world->tier, &world->regions[device]);
    assert_false(world->regions[device].is_gpu);
}

struct kvt_xfer set_world_xfer(const struct set_world *world, uint64_t block_id)
{
    return (struct kvt_xfer){.key = {.block_id = block_id,
                                     .generation = 1,
                                     .payload_bytes = SET_WORLD_PAYLOAD_BYTES,
                                     .block_tokens = SET_WORLD_TOKENS},
                             .header_bytes = world->header_bytes,
                             .slot_bytes = world->slot_bytes,
                             .deadline_ns = KVT_TIME_NEVER_NS,
                             .status = 12345};
}

struct kvt_place set_world_pool(const struct set_world *world, uint32_t device, uint32_t block)
{
    return (struct kvt_place){.kind = KVT_PLACE_CLIENT,
                              .view = {.layout = &world->layouts[device],
                                       .engine_blocks = &world->blocks[block],
                                       .end_piece = 1}};
}

struct kvt_place set_world_slot(const struct set_world *world, uint32_t zone, uint32_t slot)
{
    const struct kvt_tier_zone *at = &world->tier->zones[zone];

    return (struct kvt_place){.kind = KVT_PLACE_DEVICE,
                              .incarnation = atomic_load(&at->counters->incarnation),
                              .offset_bytes =
                                  at->base_bytes + (uint64_t)slot * SET_WORLD_PAYLOAD_BYTES};
}

struct kvt_place set_world_host(const struct set_world *world, uint32_t slot)
{
    return (struct kvt_place){.kind = KVT_PLACE_HOST, .offset_bytes = slot * world->slot_bytes};
}

void set_world_header(struct set_world *world, uint32_t slot, const struct kvt_xfer *xfer)
{
    const struct kvt_slot_info info = {.block_id = xfer->key.block_id,
                                       .generation = xfer->key.generation,
                                       .payload_bytes = xfer->key.payload_bytes,
                                       .block_tokens = xfer->key.block_tokens};

    kvt_slot_header_write(world->l2 + slot * world->slot_bytes, &info, world->tokens);
}

uint32_t set_world_reap(struct set_world *world, struct kvt_xfer *ret_xfers[], uint32_t count)
{
    uint64_t until_ns = kvt_clock_mono_ns() + WAIT_NS;
    uint32_t got = 0;

    while (got < count) {
        uint32_t now = kvt_tier_reap(world->tier, ret_xfers + got, count - got);

        got += now;
        if (now == 0)
            pause_ns(50 * KVT_NS_PER_US);
        assert_true(kvt_clock_mono_ns() < until_ns);
    }
    return got;
}

int set_world_run(struct set_world *world, struct kvt_xfer *xfer)
{
    struct kvt_xfer *back = NULL;
    uint32_t taken = 0;

    assert_int_equal(kvt_tier_submit(world->tier, &xfer, 1, &taken), 0);
    assert_int_equal(taken, 1);
    (void)set_world_reap(world, &back, 1);
    assert_ptr_equal(back, xfer);
    return xfer->status;
}

void set_world_await(struct set_world *world, uint32_t zone, uint32_t incarnation)
{
    const struct kvt_device_member *member = &set_world_set(world)->members[zone];
    uint64_t until_ns = kvt_clock_mono_ns() + WAIT_NS;
    struct kvt_xfer *none;

    while (!kvt_device_is_served(member) || atomic_load(&member->served) != incarnation ||
           set_world_gpu(world, zone).state != KVT_GPU_OK) {
        assert_int_equal(kvt_tier_reap(world->tier, &none, 1), 0); /* as the engine does */
        pause_ns(200 * KVT_NS_PER_US);
        assert_true(kvt_clock_mono_ns() < until_ns);
    }
}

bool set_world_until(struct set_world *world, bool (*is_so)(struct set_world *world))
{
    uint64_t until_ns = kvt_clock_mono_ns() + WAIT_NS;

    while (!is_so(world)) {
        if (kvt_clock_mono_ns() >= until_ns)
            return false;
        pause_ns(200 * KVT_NS_PER_US);
    }
    return true;
}
