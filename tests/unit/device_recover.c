/* A GPU that is lost and taken back: by which steps, after which waits, what is said meanwhile, and
 * that neither the engine nor the end of the daemon waits for a driver that hangs. */
#include <semaphore.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "daemon/base/clock.h"
#include "tests/common/cmocka.h"
#include "tests/common/set_world.h"

static void fill(uint8_t *memory, uint32_t block, uint8_t salt)
{
    uint8_t *at = memory + (uint64_t)block * SET_WORLD_PAYLOAD_BYTES;

    for (uint32_t i = 0; i < SET_WORLD_PAYLOAD_BYTES; i++)
        at[i] = (uint8_t)(salt + block * 3 + i * 7 + i / 253);
}

static int store(struct set_world *world, uint32_t device, uint32_t zone)
{
    struct kvt_xfer xfer = set_world_xfer(world, 7);

    fill(world->pools[device].memory, 3, 77);
    xfer.src = set_world_pool(world, device, 3);
    xfer.dst = set_world_slot(world, zone, 2);
    return set_world_run(world, &xfer);
}

static int load(struct set_world *world, uint32_t device, struct kvt_place slot)
{
    struct kvt_xfer xfer = set_world_xfer(world, 7);

    xfer.src = slot;
    xfer.dst = set_world_pool(world, device, 4);
    return set_world_run(world, &xfer);
}

static void test_lost_and_taken_back(void **state)
{
    struct set_world *world = set_world_new(2);
    struct kvt_device_export before, after;
    struct kvt_device_gpu gpu;
    struct kvt_place slot;
    struct kvt_fake_cuda_open open;

    (void)state;
    world->config.is_export_allowed = true;
    assert_int_equal(set_world_open(world), 0);
    set_world_attach(world, 0);
    set_world_attach(world, 1);
    assert_int_equal(store(world, 0, 0), KVT_XFER_DONE);
    slot = set_world_slot(world, 0, 2);
    assert_true(kvt_device_export(world->tier, 0, &before));
    kvt_fake_cuda_set_reset_works(0, false); /* until this test has looked */
    kvt_fake_cuda_lose(0, KVT_CUDA_ILLEGAL_ADDRESS);
    assert_int_equal(load(world, 0, slot), KVT_XFER_OUT_OF_SERVICE);
    assert_int_equal(atomic_load(&world->tier->zones[0].counters->health), KVT_TIER_HEALTH_OUT);
    assert_int_equal(atomic_load(&world->tier->zones[0].counters->incarnation), 1);
    after.bytes = 4711;
    assert_false(kvt_device_export(world->tier, 0, &after));
    assert_true(after.bytes == 4711);
    /* The other one works on, with L2, too: that stays pinned, or is again. */
    assert_int_equal(store(world, 1, 1), KVT_XFER_DONE);
    kvt_fake_cuda_set_reset_works(0, true);
    set_world_await(world, 0, 1);
    gpu = set_world_gpu(world, 0);
    assert_int_equal(gpu.state, KVT_GPU_OK);
    assert_string_equal(gpu.why, "");
    assert_int_equal(gpu.lost_ns, 0);
    assert_int_equal(atomic_load(&gpu.counters->losses), 1);
    assert_int_equal(atomic_load(&gpu.counters->revivals), 1);
    assert_true(kvt_device_export(world->tier, 0, &after));
    assert_int_equal(after.incarnation, 1);
    assert_memory_not_equal(after.handle, before.handle, sizeof(after.handle));
    /* What it had is lost, and an engine that does not know that gets nothing. */
    assert_int_equal(load(world, 1, slot), KVT_XFER_OUT_OF_SERVICE);
    assert_int_equal(store(world, 0, 0), KVT_XFER_CLIENT_GONE);
    assert_int_equal(store(world, 0, 1), KVT_XFER_CLIENT_GONE);
    set_world_attach(world, 0);
    assert_int_equal(store(world, 0, 0), KVT_XFER_DONE);
    assert_int_equal(load(world, 0, set_world_slot(world, 0, 2)), KVT_XFER_DONE);
    assert_memory_equal(world->pools[0].memory + 4 * SET_WORLD_PAYLOAD_BYTES,
                        world->pools[0].memory + 3 * SET_WORLD_PAYLOAD_BYTES,
                        SET_WORLD_PAYLOAD_BYTES);
    kvt_fake_cuda_count(&open);
    assert_int_equal(open.registered, 1);
    set_world_free(world);
}

/* A slot of GPU 0 and an engine's memory on GPU 1: GPU 0 moves the bytes, and has to know when the
 * memory is gone. */
static void test_guests(void **state)
{
    struct set_world *world = set_world_new(2);
    const struct timespec long_after = {.tv_nsec = 50 * KVT_NS_PER_MS}; /* 25 times the wait */
    struct kvt_xfer xfers[8], *given[8], *back[8];
    struct kvt_place slot;
    uint32_t taken;

    (void)state;
    assert_int_equal(set_world_open(world), 0);
    set_world_attach(world, 0);
    set_world_attach(world, 1);
    assert_int_equal(store(world, 1, 0), KVT_XFER_DONE);
    slot = set_world_slot(world, 0, 2);
    /* Under way when GPU 1 is lost: it is not reset before they are over, or the fake ends this. */
    for (uint32_t i = 0; i < 8; i++) {
        xfers[i] = set_world_xfer(world, 7);
        xfers[i].src = slot;
        xfers[i].dst = set_world_pool(world, 1, 4 + i);
        given[i] = &xfers[i];
    }
    kvt_fake_cuda_set_frozen(true);
    assert_int_equal(kvt_tier_submit(world->tier, given, 8, &taken), 0);
    assert_int_equal(taken, 8);
    assert_int_equal(atomic_load(&set_world_set(world)->members[1].guests), 8);
    kvt_gpu_lose(set_world_set(world)->members[1].gpu, KVT_CUDA_ECC);
    assert_int_equal(kvt_tier_reap(world->tier, back, 8), 0);
    (void)nanosleep(&long_after, NULL);
    assert_int_equal(kvt_fake_cuda_calls_made(KVT_FAKE_CUDA_DEVICE_RESET), 0);
    kvt_fake_cuda_set_frozen(false);
    (void)set_world_reap(world, back, 8);
    assert_int_equal(atomic_load(&set_world_set(world)->members[1].guests), 0);
    for (uint32_t i = 0; i < 8; i++)
        assert_int_equal(xfers[i].status, KVT_XFER_DONE);
    set_world_await(world, 1, 1);
    /* Of the incarnation before. */
    assert_int_equal(load(world, 1, slot), KVT_XFER_CLIENT_GONE);
    assert_int_equal(store(world, 1, 0), KVT_XFER_CLIENT_GONE);
    assert_int_equal(atomic_load(&world->tier->zones[0].counters->errors_client_gone), 2);
    assert_int_equal(load(world, 0, slot), KVT_XFER_DONE);
    set_world_attach(world, 1);
    assert_int_equal(load(world, 1, slot), KVT_XFER_DONE);
    assert_int_equal(atomic_load(&set_world_gpu(world, 0).counters->losses), 0);
    set_world_free(world);
}

static bool is_failing(struct set_world *world)
{
    struct kvt_device_gpu gpu = set_world_gpu(world, 0);
    uint32_t attempt = 0;

    return sscanf(gpu.why, "lost; attempt %u failed: reset: ", &attempt) == 1 && attempt >= 3;
}

/* A reset that does not help: the words say what does. */
static void test_reset_does_not_help(void **state)
{
    struct set_world *world = set_world_new(1);
    struct kvt_device_gpu gpu;

    (void)state;
    assert_int_equal(set_world_open(world), 0);
    set_world_attach(world, 0);
    kvt_fake_cuda_set_reset_works(0, false);
    kvt_fake_cuda_lose(0, KVT_CUDA_ECC);
    assert_int_equal(store(world, 0, 0), KVT_XFER_OUT_OF_SERVICE);
    assert_true(set_world_until(world, is_failing));
    gpu = set_world_gpu(world, 0);
    assert_int_equal(gpu.state, KVT_GPU_LOST);
    assert_true(gpu.lost_ns > 0 && gpu.lost_ns <= kvt_clock_mono_ns());
    assert_non_null(strstr(gpu.why, "(214); restart the daemon to take it back"));
    assert_int_equal(store(world, 0, 0), KVT_XFER_OUT_OF_SERVICE);
    kvt_fake_cuda_set_reset_works(0, true);
    set_world_await(world, 0, 1);
    set_world_attach(world, 0);
    assert_int_equal(store(world, 0, 0), KVT_XFER_DONE);
    set_world_free(world);
}

static bool is_without_memory(struct set_world *world)
{
    return strstr(set_world_gpu(world, 0).why, "attempt 1 failed: making the arena anew: ") != NULL;
}

/* Memory that somebody else took meanwhile. */
static void test_no_memory_for_the_arena(void **state)
{
    struct set_world *world = set_world_new(1);

    (void)state;
    world->config.retry_min_ns = 20 * KVT_NS_PER_MS;
    world->config.retry_max_ns = 100 * KVT_NS_PER_MS;
    assert_int_equal(set_world_open(world), 0);
    set_world_attach(world, 0);
    kvt_fake_cuda_fail(KVT_FAKE_CUDA_ALLOC, 1, KVT_CUDA_NO_MEMORY);
    kvt_fake_cuda_lose(0, KVT_CUDA_ECC);
    assert_int_equal(store(world, 0, 0), KVT_XFER_OUT_OF_SERVICE);
    assert_true(set_world_until(world, is_without_memory));
    assert_null(strstr(set_world_gpu(world, 0).why, "restart the daemon"));
    set_world_await(world, 0, 1);
    set_world_free(world);
}

/* A GPU that hangs without a word. */
static void test_stuck(void **state)
{
    const struct timespec while_idle = {.tv_nsec = 700 * KVT_NS_PER_MS};
    struct set_world *world = set_world_new(2);
    struct kvt_xfer xfer, *given = &xfer, *back = NULL;
    struct kvt_device_gpu gpu;
    uint32_t taken;

    (void)state;
    world->config.stuck_ns = 400 * KVT_NS_PER_MS; /* a good copy has to end in it */
    world->config.retry_min_ns = world->config.retry_max_ns = 700 * KVT_NS_PER_MS;
    assert_int_equal(set_world_open(world), 0);
    set_world_attach(world, 0);
    assert_int_equal(store(world, 0, 0), KVT_XFER_DONE);
    (void)nanosleep(&while_idle, NULL); /* nothing to do is nothing that hangs */
    assert_int_equal(atomic_load(&set_world_gpu(world, 0).counters->losses), 0);
    xfer = set_world_xfer(world, 7);
    xfer.src = set_world_slot(world, 0, 2);
    xfer.dst = set_world_pool(world, 0, 9);
    kvt_fake_cuda_set_frozen(true);
    assert_int_equal(kvt_tier_submit(world->tier, &given, 1, &taken), 0);
    while (atomic_load(&set_world_gpu(world, 0).counters->losses) == 0)
        (void)nanosleep(&(struct timespec){.tv_nsec = KVT_NS_PER_MS}, NULL);
    while ((gpu = set_world_gpu(world, 0)).state == KVT_GPU_OK)
        (void)nanosleep(&(struct timespec){.tv_nsec = KVT_NS_PER_MS}, NULL);
    assert_string_equal(gpu.why, "lost: no copy ended for 0 s");
    kvt_fake_cuda_set_frozen(false);
    (void)set_world_reap(world, &back, 1);
    assert_int_equal(xfer.status, KVT_XFER_OUT_OF_SERVICE);
    assert_int_equal(atomic_load(&set_world_gpu(world, 1).counters->losses), 0);
    set_world_await(world, 0, 1);
    set_world_free(world);
}

static struct kvt_device_host_pin host_pin(struct set_world *world)
{
    struct kvt_device_host_pin pin;

    memset(&pin, 0xff, sizeof(pin));
    assert_true(kvt_device_host_pin(world->tier, &pin));
    assert_true(pin.is_pinned == (pin.why[0] == '\0'));
    return pin;
}

/* L2 that cannot be pinned again is reached through staging, which is told. */
static void test_not_pinned_again(void **state)
{
    struct set_world *world = set_world_new(1);
    struct kvt_xfer xfer = set_world_xfer(world, 7);
    struct kvt_fake_cuda_open open;

    (void)state;
    assert_int_equal(set_world_open(world), 0);
    assert_true(host_pin(world).is_pinned);
    kvt_fake_cuda_fail(KVT_FAKE_CUDA_PIN, 1, KVT_CUDA_NO_MEMORY);
    kvt_gpu_lose(set_world_set(world)->members[0].gpu, KVT_CUDA_ECC);
    set_world_await(world, 0, 1);
    assert_true(kvt_fake_cuda_has_failed());
    assert_non_null(strstr(host_pin(world).why, "(2): is LimitMEMLOCK=infinity set?"));
    kvt_fake_cuda_count(&open);
    assert_int_equal(open.registered, 0);
    set_world_attach(world, 0);
    assert_int_equal(store(world, 0, 0), KVT_XFER_DONE);
    set_world_header(world, 1, &xfer);
    xfer.src = set_world_slot(world, 0, 2);
    xfer.dst = set_world_host(world, 1);
    assert_int_equal(set_world_run(world, &xfer), KVT_XFER_DONE);
    assert_int_equal(kvt_slot_check(world->l2 + world->slot_bytes, &xfer.key), KVT_SLOT_OK);
    /* Another loss, and there is room. */
    kvt_gpu_lose(set_world_set(world)->members[0].gpu, KVT_CUDA_ECC);
    set_world_await(world, 0, 2);
    assert_true(host_pin(world).is_pinned);
    set_world_free(world);
}

/* ---- the waits, stepped by hand -------------------------------------------------------------- */

static struct kvt_device_member *stop_control(struct set_world *world)
{
    struct kvt_device_member *member = &set_world_set(world)->members[0];

    kvt_device_control_drop(member); /* its thread; the test cares in its place */
    assert_int_equal(world->calls.set_device(0), 0);
    return member;
}

static void lose_and_park(struct kvt_device_member *member)
{
    kvt_gpu_lose(member->gpu, KVT_CUDA_ECC);
    while (!kvt_gpu_is_parked(member->gpu))
        continue;
}

static void start_control(struct kvt_device_member *member)
{
    int error;

    atomic_store(&member->control_order, KVT_CONTROL_STARTING);
    atomic_store(&member->is_over, false);
    assert_int_equal(kvt_device_control_start(member, &error), 0);
    kvt_device_control_care(member);
}

static void test_waits(void **state)
{
    struct set_world *world = set_world_new(1);
    struct kvt_device_member *member;
    uint64_t now_ns, next_ns, wait_ns = KVT_NS_PER_S;

    (void)state;
    world->config.retry_min_ns = KVT_NS_PER_S;
    world->config.retry_max_ns = 10 * KVT_NS_PER_S;
    assert_int_equal(set_world_open(world), 0);
    member = stop_control(world);
    now_ns = kvt_clock_mono_ns();
    assert_true(kvt_device_care(member, now_ns) > now_ns); /* nothing to do */
    kvt_fake_cuda_set_reset_works(0, false);
    kvt_fake_cuda_lose(0, KVT_CUDA_ECC);
    lose_and_park(member);
    next_ns = kvt_device_care(member, now_ns);
    assert_true(next_ns == now_ns + wait_ns);
    assert_true(kvt_device_care(member, next_ns - 1) == next_ns);
    assert_int_equal(kvt_fake_cuda_calls_made(KVT_FAKE_CUDA_DEVICE_RESET), 0);
    /* 2, 4, 8, 10, 10 s after the first. */
    for (uint32_t i = 1; i <= 6; i++) {
        uint64_t before_ns = kvt_clock_mono_ns();

        wait_ns = KVT_MIN(2 * wait_ns, 10 * KVT_NS_PER_S);
        next_ns = kvt_device_care(member, next_ns);
        assert_int_equal(kvt_fake_cuda_calls_made(KVT_FAKE_CUDA_DEVICE_RESET), i);
        assert_true(next_ns >= before_ns + wait_ns);
        assert_true(next_ns <= kvt_clock_mono_ns() + wait_ns);
    }
    kvt_fake_cuda_set_reset_works(0, true);
    (void)kvt_device_care(member, next_ns);
    assert_true(kvt_device_is_served(member));
    /* Lost again soon: the wait goes on from where it was. After long: from the start. */
    lose_and_park(member);
    now_ns = kvt_clock_mono_ns();
    next_ns = kvt_device_care(member, now_ns);
    assert_true(next_ns == now_ns + 10 * KVT_NS_PER_S);
    (void)kvt_device_care(member, next_ns);
    assert_true(kvt_device_is_served(member));
    lose_and_park(member);
    now_ns = kvt_clock_mono_ns() + 11 * KVT_NS_PER_S;
    assert_true(kvt_device_care(member, now_ns) == now_ns + KVT_NS_PER_S);
    start_control(member);
    set_world_free(world);
}

/* ---- two at once ------------------------------------------------------------------------------
 */

static struct kvt_cuda_calls plain;
static atomic_int resetting, calling;
static atomic_bool has_met;

static int slow_reset(void)
{
    int r;

    if (atomic_fetch_add(&resetting, 1) > 0 || atomic_load(&calling) > 0)
        atomic_store(&has_met, true);
    (void)usleep(3000);
    r = plain.device_reset();
    (void)atomic_fetch_sub(&resetting, 1);
    return r;
}

/* Calls that concern the contexts of all GPUs. */
static void call_begin(void)
{
    (void)atomic_fetch_add(&calling, 1);
    if (atomic_load(&resetting) > 0)
        atomic_store(&has_met, true);
    (void)usleep(1000);
}

static int slow_pin(void *memory, uint64_t bytes)
{
    int r;

    call_begin();
    r = plain.pin(memory, bytes);
    (void)atomic_fetch_sub(&calling, 1);
    return r;
}

static int slow_alloc_pinned(uint64_t bytes, void **ret_memory)
{
    int r;

    call_begin();
    r = plain.alloc_pinned(bytes, ret_memory);
    (void)atomic_fetch_sub(&calling, 1);
    return r;
}

static int slow_open(const uint8_t handle[KVT_CUDA_IPC_HANDLE_BYTES], uint64_t *ret_address)
{
    int r;

    call_begin();
    r = plain.ipc_open(handle, ret_address);
    (void)atomic_fetch_sub(&calling, 1);
    return r;
}

/* Two GPUs are lost together, engines attach to a third: while one is reset nobody else is in a
 * call that its context has a part in. */
static void test_two_lost_at_once(void **state)
{
    struct set_world *world = set_world_new(3);
    struct kvt_device_set *set;

    (void)state;
    plain = world->calls;
    world->calls.device_reset = slow_reset;
    world->calls.pin = slow_pin;
    world->calls.alloc_pinned = slow_alloc_pinned;
    world->calls.ipc_open = slow_open;
    assert_int_equal(set_world_open(world), 0);
    set = set_world_set(world);
    for (uint32_t round = 1; round <= 10; round++) {
        kvt_gpu_lose(set->members[0].gpu, KVT_CUDA_ECC);
        kvt_gpu_lose(set->members[1].gpu, KVT_CUDA_ECC);
        kvt_doorbell_ring(&set->members[0].bell);
        kvt_doorbell_ring(&set->members[1].bell);
        for (uint32_t i = 0; i < 10; i++) {
            set_world_attach(world, 2);
            set_world_detach(world, 2);
        }
        set_world_await(world, 0, round);
        set_world_await(world, 1, round);
    }
    assert_false(atomic_load(&has_met));
    set_world_free(world);
}

/* ---- a driver that hangs --------------------------------------------------------------------- */

static sem_t hang, end;
static struct kvt_cuda_calls fake;

static int hanging_reset(void)
{
    (void)sem_post(&hang);
    while (sem_wait(&end) != 0)
        continue;
    return fake.device_reset();
}

static void test_a_reset_that_hangs(void **state)
{
    struct set_world *world = set_world_new(2);
    struct kvt_device_memory memory;
    char why[KVT_DEVICE_WHY_BYTES];
    struct kvt_device_set *set;
    struct kvt_region region;
    uint64_t started_ns;

    (void)state;
    assert_int_equal(sem_init(&hang, 0, 0), 0);
    assert_int_equal(sem_init(&end, 0, 0), 0);
    fake = world->calls;
    world->calls.device_reset = hanging_reset;
    world->config.hang_ns = 100 * KVT_NS_PER_MS;
    assert_int_equal(set_world_open(world), 0);
    set = set_world_set(world);
    set_world_attach(world, 0);
    set_world_attach(world, 1);
    kvt_fake_cuda_lose(0, KVT_CUDA_ECC);
    assert_int_equal(store(world, 0, 0), KVT_XFER_OUT_OF_SERVICE);
    while (sem_wait(&hang) != 0)
        continue;
    /* Nobody waits for it: not the engine, not a client that comes or goes, not another GPU. */
    started_ns = kvt_clock_mono_ns();
    assert_int_equal(store(world, 0, 0), KVT_XFER_OUT_OF_SERVICE);
    memory = set_world_memory(world, 0);
    assert_int_equal(kvt_device_region_open(world->tier, &memory, &region, why), KVT_REGION_E_LOST);
    set_world_detach(world, 0);
    assert_int_equal(store(world, 1, 1), KVT_XFER_DONE);
    set_world_detach(world, 1);
    assert_true(kvt_clock_mono_ns() - started_ns < 5 * KVT_NS_PER_S);
    started_ns = kvt_clock_mono_ns();
    world->tier = kvt_tier_close(world->tier);
    assert_true(kvt_clock_mono_ns() - started_ns >= 100 * KVT_NS_PER_MS);
    assert_true(kvt_clock_mono_ns() - started_ns < 5 * KVT_NS_PER_S);
    /* The set was left to the thread. Here the call comes back after all. */
    (void)sem_post(&end);
    while (!atomic_load(&set->members[0].is_over) || !atomic_load(&set->members[1].is_over)) {
        (void)sem_post(&end); /* of what it resets at its end */
    }
    for (uint32_t i = 0; i < 2; i++) {
        kvt_doorbell_deinit(&set->members[i].bell);
        free(set->members[i].handles);
    }
    free(set);
    set_world_free(world);
}

static int to_host(struct set_world *world, uint32_t zone, uint32_t slot)
{
    struct kvt_xfer xfer = set_world_xfer(world, 7);

    set_world_header(world, slot, &xfer);
    xfer.src = set_world_slot(world, zone, 2);
    xfer.dst = set_world_host(world, slot);
    return set_world_run(world, &xfer);
}

/* L2 is pinned in the context of GPU 0. While that is reset GPU 1 goes through staging, and when it
 * is back no longer. */
static void test_who_pinned_is_reset(void **state)
{
    struct set_world *world = set_world_new(2);
    const struct kvt_gpu_counters *counters;
    struct kvt_device_set *set;

    (void)state;
    assert_int_equal(sem_init(&hang, 0, 0), 0);
    assert_int_equal(sem_init(&end, 0, 0), 0);
    fake = world->calls;
    world->calls.device_reset = hanging_reset;
    assert_int_equal(set_world_open(world), 0);
    set = set_world_set(world);
    counters = set_world_gpu(world, 1).counters;
    set_world_attach(world, 0);
    set_world_attach(world, 1);
    assert_int_equal(store(world, 1, 1), KVT_XFER_DONE);
    assert_int_equal(to_host(world, 1, 1), KVT_XFER_DONE);
    assert_int_equal(atomic_load(&counters->path_transfers[KVT_GPU_TO_HOST]), 1);
    for (uint32_t round = 1; round <= 2; round++) {
        kvt_gpu_lose(set->members[0].gpu, KVT_CUDA_ECC);
        kvt_doorbell_ring(&set->members[0].bell);
        while (sem_wait(&hang) != 0)
            continue;
        assert_int_equal(to_host(world, 1, 2), KVT_XFER_DONE);
        assert_non_null(strstr(host_pin(world).why, "is lost, and is being taken back"));
        assert_int_equal(atomic_load(&counters->path_transfers[KVT_GPU_STAGED_DOWN]), round);
        assert_int_equal(atomic_load(&counters->path_transfers[KVT_GPU_TO_HOST]), round);
        (void)sem_post(&end);
        set_world_await(world, 0, round);
        assert_true(host_pin(world).is_pinned);
        assert_int_equal(to_host(world, 1, 3), KVT_XFER_DONE);
        assert_int_equal(atomic_load(&counters->path_transfers[KVT_GPU_TO_HOST]), round + 1);
    }
    /* GPU 1 pinned nothing: its reset is none of GPU 0's business. */
    set_world_attach(world, 0);
    assert_int_equal(store(world, 0, 0), KVT_XFER_DONE);
    kvt_gpu_lose(set->members[1].gpu, KVT_CUDA_ECC);
    kvt_doorbell_ring(&set->members[1].bell);
    while (sem_wait(&hang) != 0)
        continue;
    assert_true(host_pin(world).is_pinned);
    assert_int_equal(to_host(world, 0, 4), KVT_XFER_DONE);
    counters = set_world_gpu(world, 0).counters;
    assert_int_equal(atomic_load(&counters->path_transfers[KVT_GPU_TO_HOST]), 1);
    (void)sem_post(&end);
    set_world_await(world, 1, 1);
    set_world_free(world);
}

static int hanging_open(const uint8_t handle[KVT_CUDA_IPC_HANDLE_BYTES], uint64_t *ret_address)
{
    (void)sem_post(&hang);
    while (sem_wait(&end) != 0)
        continue;
    return fake.ipc_open(handle, ret_address);
}

struct opener {
    struct set_world *world;
    struct kvt_tier *tier;
    struct kvt_device_memory memory;
    int result;
};

static void *open_main(void *ctx)
{
    struct opener *opener = ctx;
    char why[KVT_DEVICE_WHY_BYTES];
    struct kvt_region region;

    opener->result = kvt_device_region_open(opener->tier, &opener->memory, &region, why);
    return NULL;
}

/* The set is closed while a thread is still in there: all that it may use outlives its call. */
static void test_an_open_that_hangs(void **state)
{
    struct set_world *world = set_world_new(1);
    struct opener opener = {.world = world};
    struct kvt_device_set *set;
    uint64_t started_ns;
    pthread_t thread;

    (void)state;
    assert_int_equal(sem_init(&hang, 0, 0), 0);
    assert_int_equal(sem_init(&end, 0, 0), 0);
    fake = world->calls;
    world->calls.ipc_open = hanging_open;
    world->config.hang_ns = 100 * KVT_NS_PER_MS;
    assert_int_equal(set_world_open(world), 0);
    set = set_world_set(world);
    opener.tier = world->tier;
    opener.memory = set_world_memory(world, 0);
    assert_int_equal(pthread_create(&thread, NULL, open_main, &opener), 0);
    while (sem_wait(&hang) != 0)
        continue;
    started_ns = kvt_clock_mono_ns();
    world->tier = kvt_tier_close(world->tier);
    assert_true(kvt_clock_mono_ns() - started_ns < 5 * KVT_NS_PER_S);
    assert_false(atomic_load(&set->members[0].is_over));
    (void)sem_post(&end);
    assert_int_equal(pthread_join(thread, NULL), 0);
    assert_int_equal(opener.result, 0);
    while (!atomic_load(&set->members[0].is_over)) {
        const struct timespec pause = {.tv_nsec = 1000000};

        (void)nanosleep(&pause, NULL);
    }
    kvt_doorbell_deinit(&set->members[0].bell);
    free(set->members[0].handles);
    free(set);
    set_world_free(world);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_lost_and_taken_back),
        cmocka_unit_test(test_guests),
        cmocka_unit_test(test_reset_does_not_help),
        cmocka_unit_test(test_no_memory_for_the_arena),
        cmocka_unit_test(test_not_pinned_again),
        cmocka_unit_test(test_stuck),
        cmocka_unit_test(test_waits),
        cmocka_unit_test(test_two_lost_at_once),
        cmocka_unit_test(test_a_reset_that_hangs),
        cmocka_unit_test(test_an_open_that_hangs),
        cmocka_unit_test(test_who_pinned_is_reset),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
