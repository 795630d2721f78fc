/* One GPU of L1 when things go wrong: calls that fail one by one, a context that is lost and taken
 * back, damaged bytes, deadlines, too little staging, places of another incarnation. Whatever
 * happens, a transfer comes back once, says so, and nothing is left open. */
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "daemon/base/alloc.h"
#include "daemon/base/clock.h"
#include "tests/common/alloc_fault.h"
#include "tests/common/cmocka.h"
#include "tests/common/gpu_world.h"
#include "tiers/device/gpu_internal.h"

static const uint64_t from[] = {3, 9, 8, 40}, to[] = {20, 21, 22, 23};
static const struct gpu_world_config plain = {.seed = 1, .crossover_bytes = UINT32_MAX};

static int store(struct gpu_world *world, struct kvt_xfer *xfer, uint32_t slot)
{
    *xfer = gpu_world_xfer(world, 7);
    xfer->src = gpu_world_pool_place(world, true, from);
    xfer->dst = gpu_world_device(world, slot);
    return gpu_world_run(world, xfer);
}

static int load(struct gpu_world *world, struct kvt_xfer *xfer)
{
    xfer->src = xfer->dst;
    xfer->dst = gpu_world_pool_place(world, true, to);
    return gpu_world_run(world, xfer);
}

static void check_loaded(struct gpu_world *world)
{
    uint8_t *a = malloc(world->payload_bytes), *b = malloc(world->payload_bytes);

    gpu_world_payload(world, world->pool.memory, from, a);
    gpu_world_payload(world, world->pool.memory, to, b);
    assert_memory_equal(a, b, world->payload_bytes);
    free(a);
    free(b);
}

static void test_each_call_fails(void **state)
{
    static const enum kvt_fake_cuda_call which[] = {KVT_FAKE_CUDA_COPY, KVT_FAKE_CUDA_LAUNCH,
                                                    KVT_FAKE_CUDA_EVENT_RECORD,
                                                    KVT_FAKE_CUDA_EVENT_QUERY};
    struct gpu_world *world = gpu_world_new(&plain);
    struct kvt_xfer xfer;

    (void)state;
    for (uint32_t i = 0; i < KVT_COUNT_OF(which); i++) {
        bool has_failed = true;
        uint64_t nth = 0;

        while (has_failed && nth < 40) {
            int status;

            kvt_fake_cuda_fail(which[i], ++nth, KVT_CUDA_INVALID_HANDLE);
            status = store(world, &xfer, 0);
            assert_true(status == 0 || status == -EIO);
            if (status == 0)
                status = load(world, &xfer);
            assert_true(status == 0 || status == -EIO);
            if (status == 0)
                check_loaded(world);
            has_failed = kvt_fake_cuda_has_failed();
            kvt_fake_cuda_fail(which[i], 0, 0);
            /* Nothing of it is left behind. */
            assert_int_equal(store(world, &xfer, 1), 0);
            assert_int_equal(load(world, &xfer), 0);
            assert_int_equal(atomic_load(&kvt_gpu_counters(world->gpu)->inflight_bytes), 0);
        }
        assert_true(nth > 1);
    }
    assert_int_equal(atomic_load(&world->tier->counters.incarnation), 0);
    gpu_world_free(world);
}

static void check_lost(struct gpu_world *world)
{
    assert_int_equal(atomic_load(&world->tier->counters.incarnation), 1);
    assert_int_equal(kvt_tier_health(world->tier), KVT_TIER_HEALTH_OUT);
    assert_int_equal(kvt_gpu_arena(world->gpu), 0);
    assert_int_equal(atomic_load(&kvt_gpu_counters(world->gpu)->last_error), KVT_CUDA_ECC);
    assert_int_equal(atomic_load(&kvt_gpu_counters(world->gpu)->losses), 1);
    assert_int_equal(atomic_load(&kvt_gpu_counters(world->gpu)->inflight_bytes), 0);
}

/* Each call in turn ends the context; what was in flight and what comes later is out of service,
 * what is of the old incarnation is refused, and a GPU that was taken back works. */
static void test_lost_at_each_call(void **state)
{
    bool has_failed = true;

    (void)state;
    for (uint64_t nth = 1; has_failed; nth++) {
        struct gpu_world_config config = plain;
        struct gpu_world *world;
        struct kvt_xfer xfer, later;
        int status;

        config.is_landing_late = nth % 2 == 0;
        world = gpu_world_new(&config);
        kvt_fake_cuda_fail(KVT_FAKE_CUDA_ANY, nth, KVT_CUDA_ECC);
        status = store(world, &xfer, 0);
        has_failed = kvt_fake_cuda_has_failed();
        kvt_fake_cuda_fail(KVT_FAKE_CUDA_ANY, 0, 0);
        if (has_failed) {
            const struct kvt_layout old = world->layout;

            /* It may have been the last call, after which the transfer came back. */
            assert_true(status == KVT_XFER_OUT_OF_SERVICE || status == KVT_XFER_DONE);
            assert_int_equal(store(world, &later, 1), KVT_XFER_OUT_OF_SERVICE);
            check_lost(world);
            gpu_world_take_back(world);
            assert_int_equal(kvt_tier_health(world->tier), KVT_TIER_HEALTH_OK);
            assert_true(kvt_gpu_arena(world->gpu) != 0);
            xfer.dst.incarnation = 0;
            assert_int_equal(load(world, &xfer), KVT_XFER_OUT_OF_SERVICE);
            xfer.src = gpu_world_pool_place(world, true, from);
            xfer.src.view.layout = &old;
            xfer.dst = gpu_world_device(world, 0);
            assert_int_equal(gpu_world_run(world, &xfer),
                             old.incarnation == 0 ? KVT_XFER_CLIENT_GONE : 0);
        }
        assert_int_equal(store(world, &xfer, 2), 0);
        assert_int_equal(load(world, &xfer), 0);
        check_loaded(world);
        gpu_world_free(world);
    }
}

/* What was queued may land until the device is reset: so long nobody gets it back. */
static void test_held_until_reset(void **state)
{
    struct gpu_world_config config = plain;
    struct kvt_xfer xfer, *one = &xfer, *back;
    struct gpu_world *world;
    uint32_t taken;

    (void)state;
    config.is_landing_late = true;
    world = gpu_world_new(&config);
    assert_int_equal(store(world, &xfer, 0), 0);
    xfer.src = xfer.dst;
    xfer.dst = gpu_world_pool_place(world, true, to);
    kvt_fake_cuda_set_frozen(true);
    assert_int_equal(kvt_tier_submit(world->tier, &one, 1, &taken), 0);
    while (kvt_gpu_turn(world->gpu))
        ;
    kvt_gpu_lose(world->gpu, KVT_CUDA_ECC);
    kvt_gpu_lose(world->gpu, KVT_CUDA_NVLINK); /* once is enough */
    for (uint32_t i = 0; i < 100; i++)
        (void)kvt_gpu_turn(world->gpu);
    assert_true(kvt_gpu_is_parked(world->gpu));
    assert_int_equal(kvt_tier_reap(world->tier, &back, 1), 0);
    kvt_fake_cuda_set_frozen(false);
    gpu_world_reset(world);
    gpu_world_reap(world, 1);
    assert_int_equal(xfer.status, KVT_XFER_OUT_OF_SERVICE);
    check_lost(world);
    gpu_world_take_back(world);
    assert_int_equal(store(world, &xfer, 0), 0);
    gpu_world_free(world);
}

/* Bytes of a slot that changed since it was filled are not given to anybody. */
static void test_damaged_slot(void **state)
{
    struct kvt_xfer xfer, down;
    struct gpu_world *world = gpu_world_new(&plain);
    uint64_t at = 4321;

    (void)state;
    assert_int_equal(store(world, &xfer, 0), 0);
    kvt_fake_cuda_memory(kvt_gpu_arena(world->gpu), world->stored_bytes)[at] ^= 1;
    down = xfer;
    assert_int_equal(load(world, &xfer), KVT_XFER_BAD_SLOT);
    assert_int_equal(xfer.verdict, KVT_SLOT_BAD_PAYLOAD);
    down.src = down.dst;
    down.dst = gpu_world_host(world, 1);
    gpu_world_header(world, 1, &down);
    assert_int_equal(gpu_world_run(world, &down), KVT_XFER_BAD_SLOT);
    assert_int_equal(down.verdict, KVT_SLOT_BAD_PAYLOAD);
    assert_int_not_equal(kvt_slot_check(gpu_world_slot(world, 1), &down.key), KVT_SLOT_OK);
    down.dst = gpu_world_pool_place(world, false, to);
    assert_int_equal(gpu_world_run(world, &down), KVT_XFER_BAD_SLOT);
    assert_int_equal(atomic_load(&kvt_gpu_counters(world->gpu)->bad_checks), 3);
    gpu_world_free(world);
}

/* Of a journey, the n-th movement of bytes moves half of them, or turns a bit: whoever is told that
 * it is done has the right bytes. (Of lists the fake damages with this seed what no kernel reads.)
 */
static void damaged_on_the_way(bool is_torn, bool is_unpinned)
{
    uint64_t damaged = 1, found = 0;

    for (uint64_t nth = 1; damaged > 0; nth++) {
        struct gpu_world_config config = plain;
        struct gpu_world *world;
        struct kvt_xfer xfer;
        int status;

        config.is_unpinned = is_unpinned;
        world = gpu_world_new(&config);
        xfer = gpu_world_xfer(world, 7);
        gpu_world_header(world, 1, &xfer);
        xfer.src = gpu_world_pool_place(world, false, from);
        xfer.dst = gpu_world_device(world, 0);
        xfer.flags = KVT_XFER_VERIFY;
        damaged = kvt_fake_cuda_damaged();
        (is_torn ? kvt_fake_cuda_tear : kvt_fake_cuda_flip)(nth);
        status = gpu_world_run(world, &xfer);
        if (status == 0) {
            xfer.src = xfer.dst;
            xfer.dst = gpu_world_host(world, 1);
            status = gpu_world_run(world, &xfer);
        }
        if (status == 0) {
            xfer.src = xfer.dst;
            xfer.dst = gpu_world_device(world, 1);
            status = gpu_world_run(world, &xfer);
        }
        if (status == 0) {
            xfer.src = xfer.dst;
            xfer.dst = gpu_world_pool_place(world, false, to);
            status = gpu_world_run(world, &xfer);
        }
        damaged = kvt_fake_cuda_damaged() - damaged;
        assert_true(status == 0 || status == KVT_XFER_BAD_SLOT);
        if (status == 0) {
            uint8_t *a = malloc(world->payload_bytes), *b = malloc(world->payload_bytes);

            gpu_world_payload(world, world->host_pool, from, a);
            gpu_world_payload(world, world->host_pool, to, b);
            assert_memory_equal(a, b, world->payload_bytes);
            free(a);
            free(b);
        }
        found += status != 0;
        gpu_world_free(world);
    }
    assert_true(found >= 2); /* what is torn may have been there before */
}

static void test_damaged_on_the_way(void **state)
{
    (void)state;
    damaged_on_the_way(true, false);
    damaged_on_the_way(true, true);
    damaged_on_the_way(false, false);
    damaged_on_the_way(false, true);
}

static void test_slots(void **state)
{
    struct gpu_world *world = gpu_world_new(&plain);
    struct kvt_xfer xfer, other;

    (void)state;
    assert_int_equal(store(world, &xfer, 0), 0);
    other = xfer;
    other.key.generation++;
    assert_int_equal(load(world, &other), KVT_XFER_BAD_SLOT);
    assert_int_equal(other.verdict, KVT_SLOT_OTHER);
    /* A slot of L2 that is damaged is found before anything is copied. */
    gpu_world_header(world, 3, &xfer);
    xfer.src = xfer.dst;
    xfer.dst = gpu_world_host(world, 3);
    assert_int_equal(gpu_world_run(world, &xfer), 0);
    gpu_world_slot(world, 3)[world->header_bytes + 5] ^= 4;
    xfer.flags = KVT_XFER_VERIFY;
    assert_int_equal(load(world, &xfer), KVT_XFER_BAD_SLOT);
    assert_int_equal(xfer.verdict, KVT_SLOT_BAD_PAYLOAD);
    xfer.src = gpu_world_host(world, 3);
    xfer.dst = gpu_world_device(world, 4);
    assert_int_equal(gpu_world_run(world, &xfer), KVT_XFER_BAD_SLOT);
    assert_int_equal(atomic_load(&world->tier->counters.errors_bad_slot[KVT_SLOT_BAD_PAYLOAD]), 2);
    gpu_world_free(world);
}

static void test_late(void **state)
{
    struct gpu_world *world = gpu_world_new(&plain);
    struct kvt_xfer xfers[80], *all[80], *back[80];
    uint32_t taken, reaped = 0;

    (void)state;
    kvt_fake_cuda_set_frozen(true);
    for (uint32_t i = 0; i < 80; i++) {
        xfers[i] = gpu_world_xfer(world, 7);
        xfers[i].src = gpu_world_pool_place(world, true, from);
        xfers[i].dst = gpu_world_host(world, i % GPU_WORLD_SLOTS);
        gpu_world_header(world, i % GPU_WORLD_SLOTS, &xfers[i]);
        if (i >= 40)
            xfers[i].deadline_ns = kvt_clock_mono_ns() + 5 * KVT_NS_PER_MS;
        all[i] = &xfers[i];
    }
    /* More than staging and budget hold: the rest waits, and ends when it is late. */
    assert_int_equal(kvt_tier_submit(world->tier, all, 80, &taken), 0);
    assert_int_equal(taken, 80);
    for (uint32_t i = 0; i < 100 && reaped == 0; i++) {
        (void)kvt_gpu_turn(world->gpu);
        usleep(1000);
        reaped = kvt_tier_reap(world->tier, back, 80);
    }
    assert_true(reaped > 0 && reaped <= 40);
    for (uint32_t i = 0; i < reaped; i++)
        assert_int_equal(back[i]->status, KVT_XFER_LATE);
    kvt_fake_cuda_set_frozen(false);
    gpu_world_reap(world, 80 - reaped);
    for (uint32_t i = 0; i < 40; i++)
        assert_int_equal(xfers[i].status, 0);
    gpu_world_free(world);
}

static void test_no_room(void **state)
{
    struct gpu_world_config config = plain;
    struct gpu_world *world;
    struct kvt_xfer xfer;

    (void)state;
    config.staging_bytes = 16 * KVT_KIB;
    config.inflight_bytes_max = 1; /* a single transfer may go all the same */
    world = gpu_world_new(&config);
    assert_int_equal(store(world, &xfer, 0), 0);
    xfer.src = gpu_world_pool_place(world, true, from);
    xfer.dst = gpu_world_host(world, 0);
    assert_int_equal(gpu_world_run(world, &xfer), -ENOBUFS);
    xfer.src = gpu_world_pool_place(world, false, from);
    xfer.dst = gpu_world_device(world, 1);
    assert_int_equal(gpu_world_run(world, &xfer), -ENOBUFS);
    assert_int_equal(atomic_load(&world->tier->counters.errors_io), 2);
    gpu_world_free(world);
}

static void test_client_gone(void **state)
{
    struct gpu_world *world = gpu_world_new(&plain);
    struct kvt_xfer xfer = gpu_world_xfer(world, 7);
    int fd = memfd_create("gone", MFD_CLOEXEC);
    uint8_t *gone;

    (void)state;
    assert_int_equal(ftruncate(fd, (off_t)world->pool_bytes), 0);
    gone = mmap(NULL, world->pool_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    assert_ptr_not_equal(gone, MAP_FAILED);
    assert_int_equal(ftruncate(fd, 0), 0);
    for (uint32_t p = 0; p < world->config.pieces_count; p++)
        world->host_pieces[p].base += gone - world->host_pool;
    xfer.src = gpu_world_pool_place(world, false, from);
    xfer.dst = gpu_world_device(world, 0);
    assert_int_equal(gpu_world_run(world, &xfer), KVT_XFER_CLIENT_GONE);
    assert_int_equal(store(world, &xfer, 1), 0);
    xfer.src = xfer.dst;
    xfer.dst = gpu_world_pool_place(world, false, to);
    assert_int_equal(gpu_world_run(world, &xfer), KVT_XFER_CLIENT_GONE);
    /* What it had of staging is free again: all of it can be had. */
    assert_int_equal(atomic_load(&kvt_gpu_counters(world->gpu)->inflight_bytes), 0);
    (void)munmap(gone, world->pool_bytes);
    (void)close(fd);
    gpu_world_free(world);
}

/* Opening fails at each call and at each allocation, and leaves nothing: the fake would say so. */
static void test_open_fails(void **state)
{
    struct kvt_doorbell bell;
    struct kvt_gpu_config config = {.calls = kvt_cuda_calls(),
                                    .arena_bytes = KVT_HUGE_PAGE_BYTES,
                                    .staging_bytes = KVT_MIB,
                                    .streams = 1,
                                    .cpu_threads = 2,
                                    .inflight_max = 8,
                                    .doorbell = &bell,
                                    .is_by_hand = true};
    struct kvt_fake_cuda_config fake = {.devices_count = 1, .kernels = kvt_kernels_host()};
    struct alloc_fault fault = {0};
    struct kvt_gpu *gpu;
    int error, r = -1;

    (void)state;
    assert_int_equal(kvt_doorbell_init(&bell), 0);
    kvt_fake_cuda_init(&fake);
    for (uint64_t nth = 1; r != 0; nth++) {
        kvt_fake_cuda_fail(KVT_FAKE_CUDA_ANY, nth, KVT_CUDA_NO_MEMORY);
        r = kvt_gpu_open(&gpu, &config, &error);
        assert_int_equal(kvt_fake_cuda_has_failed(), r != 0);
        assert_true(r == 0 || error == KVT_CUDA_NO_MEMORY);
    }
    kvt_fake_cuda_fail(KVT_FAKE_CUDA_ANY, 0, 0);
    assert_null(kvt_gpu_close(gpu));
    kvt_alloc_set_fault(alloc_fault_nth, &fault);
    for (r = -1; r != 0;) {
        fault.fail_at++;
        fault.seen = 0;
        r = kvt_gpu_open(&gpu, &config, &error);
        assert_true(r == 0 || r == -ENOMEM);
    }
    kvt_alloc_set_fault(NULL, NULL);
    assert_true(fault.fail_at > 5);
    assert_null(kvt_gpu_close(gpu));
    config.arena_bytes = KVT_GIB * 1024;
    assert_int_equal(kvt_gpu_open(&gpu, &config, &error), -ENOMEM);
    assert_int_equal(error, KVT_CUDA_NO_MEMORY);
    kvt_fake_cuda_deinit();
    kvt_doorbell_deinit(&bell);
}

static int wrong_quantise(void *stream, const struct kvt_quant_batch *batch)
{
    const struct kvt_quant_job *jobs = (const struct kvt_quant_job *)(uintptr_t)batch->jobs;
    int r = kvt_kernels_host()->quantise(stream, batch);

    *(uint8_t *)(uintptr_t)jobs[0].quantised ^= 1;
    return r;
}

/* What is frozen hangs for any time; what is not may take as long as a busy machine makes it. So
 * only while it is frozen little time is given. */
static void freeze(struct gpu_world *world, bool is_frozen)
{
    world->gpu->config.hang_ns = is_frozen ? 100 * KVT_NS_PER_MS : KVT_GPU_HANG_NS;
    kvt_fake_cuda_set_frozen(is_frozen);
}

/* Launches that fail, wrong bytes, and no answer: not opened, and nothing is left; or not taken
 * back, and then it is. */
static void test_trial(void **state)
{
    enum { LAUNCHES = 12 };
    static struct kvt_kernels wrong;
    struct gpu_world_config config = plain;
    struct gpu_world *world;
    struct kvt_gpu *gpu;
    struct kvt_xfer xfer;
    int error;

    (void)state;
    wrong = *kvt_kernels_host();
    config.kernels = &wrong;
    world = gpu_world_new(&config);
    for (uint64_t nth = 1; nth <= LAUNCHES; nth++) {
        kvt_fake_cuda_fail(KVT_FAKE_CUDA_LAUNCH, nth, 209);
        assert_int_equal(kvt_gpu_open(&gpu, &world->gpu_config, &error), -EIO);
        assert_int_equal(error, 209);
    }
    kvt_fake_cuda_fail(KVT_FAKE_CUDA_ANY, 0, 0);
    wrong.quantise = wrong_quantise;
    assert_int_equal(kvt_gpu_open(&gpu, &world->gpu_config, &error), -EIO);
    assert_int_equal(error, KVT_CUDA_INVALID_IMAGE);
    wrong.quantise = kvt_kernels_host()->quantise;
    assert_int_equal(store(world, &xfer, 0), 0);
    kvt_gpu_lose(world->gpu, KVT_CUDA_ECC);
    (void)kvt_gpu_turn(world->gpu);
    gpu_world_reset(world);
    freeze(world, true);
    assert_int_equal(kvt_gpu_revive(world->gpu, &error), -EIO);
    assert_int_equal(error, KVT_CUDA_LAUNCH_TIMEOUT);
    assert_true(kvt_gpu_is_parked(world->gpu));
    assert_int_equal(kvt_gpu_arena(world->gpu), 0);
    freeze(world, false);
    world->is_reset = false;
    gpu_world_take_back(world);
    assert_int_equal(store(world, &xfer, 0), 0);
    gpu_world_free(world);
}

/* A GPU that does not answer any more is out of service before long, and comes back. */
static void test_hang(void **state)
{
    struct gpu_world *world = gpu_world_new(&plain);
    struct kvt_xfer xfer, *one = &xfer;
    uint32_t taken;

    (void)state;
    assert_int_equal(store(world, &xfer, 0), 0);
    xfer.dst = xfer.src;
    xfer.src = gpu_world_device(world, 0);
    freeze(world, true);
    assert_int_equal(kvt_tier_submit(world->tier, &one, 1, &taken), 0);
    for (uint32_t i = 0; i < 5000 && !kvt_gpu_is_parked(world->gpu); i++) {
        (void)kvt_gpu_turn(world->gpu);
        usleep(1000);
    }
    assert_true(kvt_gpu_is_parked(world->gpu));
    assert_int_equal(atomic_load(&kvt_gpu_counters(world->gpu)->last_error),
                     KVT_CUDA_LAUNCH_TIMEOUT);
    freeze(world, false);
    gpu_world_take_back(world);
    gpu_world_reap(world, 1);
    assert_int_equal(xfer.status, KVT_XFER_OUT_OF_SERVICE);
    assert_int_equal(store(world, &xfer, 0), 0);
    gpu_world_free(world);
}

/* L2 could not be pinned again: it is reached through staging. */
static void test_not_pinned_again(void **state)
{
    struct gpu_world *world = gpu_world_new(&plain);
    struct kvt_xfer xfer;

    (void)state;
    kvt_gpu_lose(world->gpu, KVT_CUDA_ECC);
    (void)kvt_gpu_turn(world->gpu);
    world->config.is_unpinned = true; /* so the reset leaves it unpinned */
    gpu_world_reset(world);
    kvt_gpu_set_host_pinned(world->gpu, false);
    gpu_world_take_back(world);
    assert_int_equal(store(world, &xfer, 0), 0);
    gpu_world_header(world, 0, &xfer);
    xfer.src = xfer.dst;
    xfer.dst = gpu_world_host(world, 0);
    assert_int_equal(gpu_world_run(world, &xfer), 0);
    assert_int_equal(
        atomic_load(&kvt_gpu_counters(world->gpu)->path_transfers[KVT_GPU_STAGED_DOWN]), 1);
    assert_int_equal(kvt_slot_check(gpu_world_slot(world, 0), &xfer.key), KVT_SLOT_OK);
    gpu_world_free(world);
}

static void test_lost_with_a_thread(void **state)
{
    struct gpu_world_config config = plain;
    struct gpu_world *world;
    struct kvt_xfer xfer;

    (void)state;
    config.is_threaded = true;
    world = gpu_world_new(&config);
    for (uint32_t i = 1; i < 6; i++) {
        assert_int_equal(store(world, &xfer, 0), 0);
        kvt_fake_cuda_lose(0, KVT_CUDA_ECC);
        assert_int_equal(load(world, &xfer), KVT_XFER_OUT_OF_SERVICE);
        assert_int_equal(atomic_load(&world->tier->counters.incarnation), i);
        gpu_world_take_back(world);
    }
    gpu_world_free(world);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_each_call_fails),
        cmocka_unit_test(test_lost_at_each_call),
        cmocka_unit_test(test_held_until_reset),
        cmocka_unit_test(test_damaged_slot),
        cmocka_unit_test(test_damaged_on_the_way),
        cmocka_unit_test(test_slots),
        cmocka_unit_test(test_late),
        cmocka_unit_test(test_no_room),
        cmocka_unit_test(test_client_gone),
        cmocka_unit_test(test_open_fails),
        cmocka_unit_test(test_trial),
        cmocka_unit_test(test_hang),
        cmocka_unit_test(test_not_pinned_again),
        cmocka_unit_test(test_lost_with_a_thread),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
