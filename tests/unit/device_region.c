/* Memory of engines on GPUs: what is refused, with which words, and that a handle is open as long
 * as somebody uses it and not longer, also while the GPU is lost and taken back. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "tests/common/cmocka.h"
#include "tests/common/set_world.h"

static char why[KVT_DEVICE_WHY_BYTES];

static int open_region(struct set_world *world, const struct kvt_device_memory *memory,
                       struct kvt_region *ret_region)
{
    memset(why, 'x', sizeof(why));
    return kvt_device_region_open(world->tier, memory, ret_region, why);
}

static uint64_t maps(void)
{
    struct kvt_fake_cuda_open open;

    kvt_fake_cuda_count(&open);
    return open.ipc_maps;
}

static void expect_refused(struct set_world *world, const struct kvt_device_memory *memory,
                           int result, const char *words)
{
    struct kvt_region region = {.bytes = 4711};
    uint64_t before = maps();

    assert_int_equal(open_region(world, memory, &region), result);
    assert_non_null(strstr(why, words));
    assert_true(strlen(why) < KVT_DEVICE_WHY_BYTES - 1); /* not cut off */
    assert_true(region.bytes == 4711);
    assert_true(maps() == before);
}

static void test_whose_memory(void **state)
{
    struct set_world *world = set_world_new(3);
    struct kvt_device_memory memory, foreign;
    struct kvt_region region;

    (void)state;
    kvt_fake_cuda_deinit();
    world->fake.devices[1].has_no_ipc = true;
    world->fake.devices[2].is_exclusive = world->fake.devices[2].is_busy = true;
    kvt_fake_cuda_init(&world->fake);
    assert_int_equal(set_world_open(world), 0);
    memory = set_world_memory(world, 0);
    assert_int_equal(open_region(world, &memory, &region), 0);
    assert_true(region.is_gpu && !region.is_mapped);
    assert_int_equal(region.gpu_zone, 0);
    assert_int_equal(region.incarnation, 0);
    assert_true(region.bytes == memory.bytes);
    assert_true((uintptr_t)region.base == region.allocation);
    kvt_device_region_close(world->tier, &region);
    assert_false(region.is_gpu);
    kvt_device_region_close(world->tier, &region); /* nothing */

    foreign = memory;
    memcpy(foreign.uuid, set_world_gpu(world, 1).info.uuid, sizeof(foreign.uuid));
    expect_refused(world, &foreign, KVT_REGION_E_NO_GPU,
                   "GPU 1 cannot share memory between processes here: register host memory");
    memcpy(foreign.uuid, set_world_gpu(world, 2).info.uuid, sizeof(foreign.uuid));
    expect_refused(world, &foreign, KVT_REGION_E_NO_GPU,
                   "is not used: GPU 2 is in exclusive mode: engines could not use it");
    memset(foreign.uuid, 0x7e, sizeof(foreign.uuid));
    expect_refused(world, &foreign, KVT_REGION_E_NO_GPU,
                   "GPU-7e7e7e7e-7e7e-7e7e-7e7e-7e7e7e7e7e7e is not one of tiers.l1.gpus: add");
    set_world_close(world);
    expect_refused(world, &memory, KVT_REGION_E_NO_GPU, "kvtierd uses no GPU");
    kvt_device_region_close(NULL, &region);
    set_world_free(world);
}

static void test_bounds(void **state)
{
    struct set_world *world = set_world_new(1);
    struct kvt_device_memory memory;
    const uint64_t all = (uint64_t)SET_WORLD_BLOCKS * SET_WORLD_PAYLOAD_BYTES;
    const struct {
        uint64_t offset_bytes, bytes;
        bool is_inside;
    } cases[] = {
        {0, all, true},
        {0, 1, true},
        {all - 1, 1, true},
        {4096, all - 4096, true},
        {0, 0, false},
        {all, 0, false},
        {all, 1, false},
        {1, all, false},
        {0, all + 1, false},
        {all + 1, 1, false},
        {all - 1, UINT64_MAX, false},
        {UINT64_MAX, 1, false},
        {UINT64_MAX, UINT64_MAX, false},
        {1, UINT64_MAX, false},
        {UINT64_MAX - all + 1, all, false},
    };

    (void)state;
    assert_int_equal(set_world_open(world), 0);
    memory = set_world_memory(world, 0);
    for (size_t i = 0; i < KVT_COUNT_OF(cases); i++) {
        struct kvt_region region;

        memory.offset_bytes = cases[i].offset_bytes;
        memory.bytes = cases[i].bytes;
        if (!cases[i].is_inside) {
            expect_refused(world, &memory, KVT_REGION_E_OUTSIDE, "not inside the allocation");
            continue;
        }
        assert_int_equal(open_region(world, &memory, &region), 0);
        assert_true((uintptr_t)region.base == region.allocation + cases[i].offset_bytes);
        assert_true(region.bytes == cases[i].bytes);
        kvt_device_region_close(world->tier, &region);
    }
    assert_int_equal(maps(), 0);
    set_world_free(world);
}

static void test_handles(void **state)
{
    static const int errors[] = {KVT_CUDA_INVALID_HANDLE, KVT_CUDA_INVALID_VALUE,
                                 KVT_CUDA_NO_MEMORY};
    struct set_world *world = set_world_new(1);
    struct kvt_device_memory memory, bad;
    struct kvt_region regions[3];

    (void)state;
    assert_int_equal(set_world_open(world), 0);
    memory = set_world_memory(world, 0);
    /* One allocation, three regions: opened once, closed with the last. */
    for (uint32_t i = 0; i < 3; i++) {
        memory.offset_bytes = i * 4096;
        memory.bytes = 4096;
        assert_int_equal(open_region(world, &memory, &regions[i]), 0);
        assert_int_equal(maps(), 1);
    }
    assert_int_equal(kvt_fake_cuda_calls_made(KVT_FAKE_CUDA_IPC_OPEN), 1);
    bad = memory;
    bad.bytes = UINT64_MAX; /* a refused region is no user */
    expect_refused(world, &bad, KVT_REGION_E_OUTSIDE, "");
    for (uint32_t i = 0; i < 3; i++) {
        assert_int_equal(maps(), 1);
        kvt_device_region_close(world->tier, &regions[i]);
    }
    assert_int_equal(maps(), 0);
    /* Bytes that are no handle. */
    bad = memory;
    memset(bad.handle, 0xee, sizeof(bad.handle));
    expect_refused(world, &bad, KVT_REGION_E_HANDLE, "CUDA does not open the handle: ");
    memset(bad.handle, 0, sizeof(bad.handle));
    expect_refused(world, &bad, KVT_REGION_E_HANDLE, "is it cudaIpcGetMemHandle's");
    expect_refused(world, &bad, KVT_REGION_E_HANDLE, "may have to run as kvtierd's user");
    for (size_t i = 0; i < KVT_COUNT_OF(errors); i++) {
        kvt_fake_cuda_fail(KVT_FAKE_CUDA_IPC_OPEN, 1, errors[i]);
        expect_refused(world, &memory, KVT_REGION_E_HANDLE, "CUDA does not open the handle: ");
        kvt_fake_cuda_fail(KVT_FAKE_CUDA_RANGE_OF, 1, errors[i]);
        expect_refused(world, &memory, KVT_REGION_E_HANDLE, "CUDA does not open the handle: ");
        assert_true(kvt_fake_cuda_has_failed());
    }
    assert_int_equal(atomic_load(&set_world_gpu(world, 0).counters->losses), 0);
    set_world_free(world);
}

/* An answer that is no loss: the memory is closed all the same, or the engine that frees it never
 * has it back. */
static void test_close_after_an_error(void **state)
{
    static const int errors[] = {KVT_CUDA_INVALID_VALUE, KVT_CUDA_LAUNCH_FAILURE};
    struct set_world *world = set_world_new(1);
    struct kvt_xfer xfer = set_world_xfer(world, 1);
    struct kvt_device_memory memory;
    struct kvt_region region;

    (void)state;
    assert_int_equal(set_world_open(world), 0);
    /* Behind a transfer the GPU's own thread has its device, and does not ask for it again. */
    set_world_header(world, 1, &xfer);
    xfer.src = set_world_host(world, 1);
    xfer.dst = set_world_slot(world, 0, 1);
    assert_int_equal(set_world_run(world, &xfer), KVT_XFER_DONE);
    memory = set_world_memory(world, 0);
    for (size_t i = 0; i < KVT_COUNT_OF(errors); i++) {
        assert_int_equal(open_region(world, &memory, &region), 0);
        assert_int_equal(maps(), 1);
        kvt_fake_cuda_fail(KVT_FAKE_CUDA_SET_DEVICE, 1, errors[i]);
        kvt_device_region_close(world->tier, &region);
        assert_true(kvt_fake_cuda_has_failed());
        assert_int_equal(maps(), 0);
    }
    assert_int_equal(atomic_load(&set_world_gpu(world, 0).counters->losses), 0);
    set_world_free(world);
}

static int answer_invalid_context(const uint8_t handle[KVT_CUDA_IPC_HANDLE_BYTES],
                                  uint64_t *ret_address)
{
    (void)handle;
    (void)ret_address;
    return KVT_CUDA_INVALID_CONTEXT;
}

/* CUDA answers a handle of our own process, which a client may have of an export, with the number
 * of a context that is lost. It is not. */
static void test_handle_of_ourselves(void **state)
{
    struct set_world *world = set_world_new(1);
    struct kvt_device_memory memory;

    (void)state;
    world->calls.ipc_open = answer_invalid_context;
    assert_int_equal(set_world_open(world), 0);
    memory = set_world_memory(world, 0);
    expect_refused(world, &memory, KVT_REGION_E_HANDLE, "CUDA does not open the handle: ");
    assert_int_equal(set_world_gpu(world, 0).state, KVT_GPU_OK);
    assert_int_equal(atomic_load(&set_world_gpu(world, 0).counters->losses), 0);
    set_world_free(world);
}

/* The table of handles is full: an answer. What is open already has another user all the same, and
 * what is closed makes room. */
static void test_too_many(void **state)
{
    struct set_world *world = set_world_new(1);
    struct kvt_device_member *member;
    struct kvt_device_memory memory;
    struct kvt_region first, second, third;

    (void)state;
    assert_int_equal(set_world_open(world), 0);
    member = &set_world_set(world)->members[0];
    memory = set_world_memory(world, 0);
    member->handles_count = KVT_DEVICE_HANDLES_MAX; /* of others */
    expect_refused(world, &memory, KVT_REGION_E_MANY,
                   "4096 allocations of engines are open on GPU 0");
    member->handles_count = KVT_DEVICE_HANDLES_MAX - 1;
    assert_int_equal(open_region(world, &memory, &first), 0);
    assert_int_equal(open_region(world, &memory, &second), 0);
    assert_int_equal(maps(), 1);
    kvt_device_region_close(world->tier, &first);
    kvt_device_region_close(world->tier, &second);
    assert_int_equal(maps(), 0);
    assert_int_equal(open_region(world, &memory, &third), 0);
    kvt_device_region_close(world->tier, &third);
    member->handles_count = 0;
    set_world_free(world);
}

/* A loss that is seen when a client attaches. What was open is gone with the context. */
static void test_lost(void **state)
{
    struct set_world *world = set_world_new(2);
    struct kvt_device_memory memory;
    struct kvt_region region;

    (void)state;
    assert_int_equal(set_world_open(world), 0);
    set_world_attach(world, 0);
    set_world_attach(world, 1);
    kvt_fake_cuda_set_reset_works(0, false); /* until this test has looked */
    kvt_fake_cuda_lose(0, KVT_CUDA_ECC);
    kvt_fake_cuda_foreign_free(&world->pools[0]);
    world->pools[0] = (struct kvt_fake_cuda_foreign){0};
    memory = set_world_memory(world, 0);
    expect_refused(world, &memory, KVT_REGION_E_LOST, "GPU 0 is out of service: attach again");
    assert_int_equal(atomic_load(&set_world_gpu(world, 0).counters->losses), 1);
    assert_true(kvt_tier_health(world->tier) == KVT_TIER_HEALTH_OK); /* GPU 1 */
    memory = set_world_memory(world, 1);
    assert_int_equal(open_region(world, &memory, &region), 0);
    kvt_device_region_close(world->tier, &region);
    kvt_fake_cuda_set_reset_works(0, true);
    set_world_await(world, 0, 1);
    /* Of the incarnation before: nothing is closed. */
    region = world->regions[0];
    set_world_attach(world, 0);
    assert_int_equal(world->regions[0].incarnation, 1);
    assert_int_equal(maps(), 2);
    kvt_device_region_close(world->tier, &region);
    assert_int_equal(maps(), 2);
    set_world_free(world);
}

struct attacher {
    struct set_world *world;
    struct kvt_device_memory memory;
    atomic_bool is_over;
    uint32_t opened, lost;
};

static void *attach_often(void *ctx)
{
    struct attacher *attacher = ctx;
    char text[KVT_DEVICE_WHY_BYTES];

    while (!atomic_load(&attacher->is_over)) {
        struct kvt_region region;
        int r = kvt_device_region_open(attacher->world->tier, &attacher->memory, &region, text);

        assert_true(r == 0 || r == KVT_REGION_E_LOST);
        attacher->opened += r == 0;
        attacher->lost += r == KVT_REGION_E_LOST;
        if (r == 0)
            kvt_device_region_close(attacher->world->tier, &region);
    }
    return NULL;
}

/* Two threads attach while the GPU is lost again and again; the fake ends the process when a call
 * is made during a reset, or with what is gone. */
static void test_attach_during_recovery(void **state)
{
    struct set_world *world = set_world_new(1);
    uint32_t opened = 0, lost = 0;
    struct attacher attachers[2];
    pthread_t threads[2];

    (void)state;
    assert_int_equal(set_world_open(world), 0);
    for (uint32_t i = 0; i < 2; i++) {
        attachers[i] = (struct attacher){.world = world, .memory = set_world_memory(world, 0)};
        assert_int_equal(pthread_create(&threads[i], NULL, attach_often, &attachers[i]), 0);
    }
    for (uint32_t i = 1; i <= 12; i++) {
        kvt_fake_cuda_lose(0, i % 2 == 0 ? KVT_CUDA_ECC : KVT_CUDA_LAUNCH_FAILURE);
        set_world_await(world, 0, i);
    }
    for (uint32_t i = 0; i < 2; i++) {
        atomic_store(&attachers[i].is_over, true);
        assert_int_equal(pthread_join(threads[i], NULL), 0);
        opened += attachers[i].opened;
        lost += attachers[i].lost;
    }
    assert_true(opened > 0 && lost > 0); /* one of them may not have had its turn in time */
    assert_int_equal(maps(), 0);
    set_world_free(world);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_whose_memory),
        cmocka_unit_test(test_bounds),
        cmocka_unit_test(test_handles),
        cmocka_unit_test(test_handle_of_ourselves),
        cmocka_unit_test(test_too_many),
        cmocka_unit_test(test_lost),
        cmocka_unit_test(test_attach_during_recovery),
        cmocka_unit_test(test_close_after_an_error),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
