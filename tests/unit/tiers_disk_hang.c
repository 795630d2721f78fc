/* A device of L3 that hangs, loses what it was to keep, interrupts or shortens: who is told what,
 * and when; how often the thread wakes meanwhile; that closing ends. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/clock.h"
#include "tests/common/cmocka.h"
#include "tests/common/disk_world.h"
#include "tiers/disk/catalog.h"
#include "tiers/disk/loop.h"

#define SLOTS 32u
#define PAYLOAD_BYTES 30000u
#define FLIGHTS 62u /* what the thread has in flight at most, but for a flush and a probe */
#define READS (SLOTS * 2)

static int world_make(void **state)
{
    struct disk_world *world = disk_world_new(1, SLOTS, PAYLOAD_BYTES);

    world->config.devices[0].inflight_bytes_max = KVT_GIB; /* flights are the limit */
    *state = world;
    return 0;
}

static int world_free(void **state)
{
    disk_world_free(*state);
    return 0;
}

static uint64_t ms_from_now(uint64_t ms)
{
    return kvt_clock_mono_ns() + ms * KVT_NS_PER_MS;
}

static void write_all(struct disk_world *world, uint64_t first)
{
    for (uint32_t i = 0; i < SLOTS; i++) {
        disk_world_fill(world, i, first + i);
        (void)disk_world_xfer(world, i, false, i, i * world->slot_bytes, first + i);
    }
    disk_world_submit(world, 0, SLOTS);
    disk_world_reap(world, SLOTS);
    assert_int_equal(disk_world_count(world, 0, SLOTS, KVT_XFER_DONE), SLOTS);
}

/* Transfer @idx reads what write_all(100) wrote, but for the first 8 slots, which are for writes;
 * two in a row are never neighbours. */
static struct kvt_xfer *read_make(struct disk_world *world, uint32_t idx)
{
    uint32_t slot = 8 + idx * 7 % (SLOTS - 8);

    return disk_world_xfer(world, idx, true, SLOTS + slot, slot * world->slot_bytes, 100 + slot);
}

/* Opens, writes all slots, and has the device stuck with transfers [0, FLIGHTS). */
static void stuck_open(struct disk_world *world)
{
    disk_world_open(world);
    write_all(world, 100);
    atomic_store(&world->shims[0].is_stuck, true);
    for (uint32_t i = 0; i < FLIGHTS; i++)
        (void)read_make(world, i);
    disk_world_submit(world, 0, FLIGHTS);
    disk_world_wait_count(&world->shims[0].requests[KVT_DISK_OP_READ], FLIGHTS);
}

/* The shim has no way to wake the thread: a transfer does. */
static void stuck_release(struct disk_world *world)
{
    atomic_store(&world->shims[0].is_stuck, false);
    (void)read_make(world, DISK_WORLD_XFERS - 1);
    disk_world_submit(world, DISK_WORLD_XFERS - 1, 1);
}

/* With every flight taken by a device that hangs, all that waits is late in time: reads and writes,
 * foreground and background, in whatever order their deadlines are. */
static void test_late_behind_stuck(void **state)
{
    struct disk_world *world = *state;
    uint64_t submitted_ns;

    stuck_open(world);
    for (uint32_t i = 0; i < 80; i++) {
        struct kvt_xfer *xfer = read_make(world, 100 + i);

        if (i % 4 == 3)
            xfer = disk_world_xfer(world, 100 + i, false, i / 4 % 8, i / 4 % 8 * world->slot_bytes,
                                   100 + i / 4 % 8);
        xfer->flags = i % 3 == 0 ? KVT_XFER_BACKGROUND : 0;
        xfer->deadline_ns = ms_from_now(i % 2 == 0 ? 100 : 40);
        if (i % 10 == 9)
            xfer->deadline_ns = KVT_TIME_NEVER_NS;
    }
    submitted_ns = kvt_clock_mono_ns();
    disk_world_submit(world, 100, 80);
    disk_world_reap(world, 72);
    assert_true(kvt_clock_mono_ns() - submitted_ns < 5 * KVT_NS_PER_S);
    assert_int_equal(disk_world_count(world, 100, 80, KVT_XFER_LATE), 72);
    for (uint32_t i = 100; i < 180; i++)
        if (world->xfers[i].status == KVT_XFER_LATE)
            assert_true(world->xfers[i].done_ns >= world->xfers[i].deadline_ns);
    assert_int_equal(disk_world_reap_for(world, 50 * KVT_NS_PER_MS), 0);
    assert_int_equal(world->tier->counters.errors_late, 72);
    stuck_release(world);
    disk_world_reap(world, FLIGHTS + 8 + 1);
    assert_int_equal(disk_world_count(world, 0, FLIGHTS, KVT_XFER_DONE), FLIGHTS);
    assert_int_equal(disk_world_count(world, 100, 80, KVT_XFER_DONE), 8);
}

static void test_flush_late_behind_stuck(void **state)
{
    struct disk_world *world = *state;

    disk_world_open(world);
    write_all(world, 100);
    atomic_store(&world->shims[0].is_stuck, true);
    for (uint32_t i = 0; i < 2; i++) { /* write, flush (late), write, flush */
        (void)disk_world_xfer(world, 2 * i, false, i, i * world->slot_bytes, 100 + i);
        (void)disk_world_flush(world, 2 * i + 1);
    }
    world->xfers[1].deadline_ns = ms_from_now(40);
    disk_world_submit(world, 0, 4);
    disk_world_reap(world, 1);
    assert_int_equal(world->xfers[1].status, KVT_XFER_LATE);
    assert_true(world->xfers[1].done_ns >= world->xfers[1].deadline_ns);
    assert_int_equal(disk_world_reap_for(world, 50 * KVT_NS_PER_MS), 0);
    stuck_release(world);
    disk_world_reap(world, 4);
    assert_int_equal(world->xfers[3].status, KVT_XFER_DONE);
    assert_true(world->xfers[3].started_ns >= world->xfers[0].done_ns);
    assert_true(world->xfers[3].started_ns >= world->xfers[2].done_ns);
    assert_int_equal(atomic_load(&world->shims[0].requests[KVT_DISK_OP_FLUSH]), 1);
}

/* A flush waits for the writes before it and for no later one; those that may go, go together. */
static void test_flush_waits_for_its_own(void **state)
{
    struct disk_world *world = *state;

    disk_world_open(world);
    for (int round = 0; round < 20; round++) {
        for (uint32_t i = 0; i < SLOTS; i++) {
            disk_world_fill(world, i, 100 + i);
            disk_world_xfer(world, 2 * i, false, i, i * world->slot_bytes, 100 + i)->flags =
                i % 3 == 0 ? KVT_XFER_BACKGROUND : 0;
            (void)disk_world_flush(world, 2 * i + 1);
        }
        atomic_store(&world->shims[0].is_holding, round % 2 == 0);
        disk_world_submit(world, 0, 2 * SLOTS);
        if (round % 2 == 0)
            disk_world_sleep(2 * KVT_NS_PER_MS);
        atomic_store(&world->shims[0].is_holding, false);
        disk_world_reap(world, 2 * SLOTS);
        assert_int_equal(disk_world_count(world, 0, 2 * SLOTS, KVT_XFER_DONE), 2 * SLOTS);
        for (uint32_t i = 0; i < SLOTS; i++)
            for (uint32_t write = 0; write <= i; write++)
                assert_true(world->xfers[2 * write].done_ns <= world->xfers[2 * i + 1].started_ns);
    }
    assert_true(world->tier->counters.flushes < 20 * SLOTS);
}

static void test_wakes_seldom(void **state)
{
    struct disk_world *world = *state;
    uint64_t first_ns;
    unsigned int waits;

    stuck_open(world);
    first_ns = ms_from_now(50);
    for (uint32_t i = 0; i < 300; i++)
        read_make(world, 100 + i)->deadline_ns = first_ns + i * (KVT_NS_PER_MS / 6);
    waits = atomic_load(&world->shims[0].waits);
    disk_world_submit(world, 100, 300);
    disk_world_reap(world, 300);
    waits = atomic_load(&world->shims[0].waits) - waits;
    print_message("300 deadlines in 50 ms: the thread slept %u times\n", waits);
    assert_true(waits <= 120);
    waits = atomic_load(&world->shims[0].waits);
    disk_world_sleep(200 * KVT_NS_PER_MS);
    assert_true(atomic_load(&world->shims[0].waits) - waits <= 2);
    stuck_release(world);
    disk_world_reap(world, FLIGHTS + 1);
}

/* Out of service because it hangs: it sleeps, too. */
static void test_wakes_seldom_when_out(void **state)
{
    struct disk_world *world = *state;
    unsigned int waits;

    world->config.devices[0].hang_ns = 20 * KVT_NS_PER_MS;
    disk_world_open(world);
    write_all(world, 100);
    atomic_store(&world->shims[0].is_stuck, true);
    for (uint32_t i = 0; i < 4; i++)
        read_make(world, i)->deadline_ns = ms_from_now(200);
    disk_world_submit(world, 0, 4);
    disk_world_wait_health(&world->tier->counters, KVT_TIER_HEALTH_OUT);
    waits = atomic_load(&world->shims[0].waits);
    disk_world_sleep(200 * KVT_NS_PER_MS);
    assert_true(atomic_load(&world->shims[0].waits) - waits <= 2);
    stuck_release(world);
    disk_world_reap(world, 5);
    assert_int_equal(disk_world_count(world, 0, 4, KVT_XFER_DONE), 4);
    disk_world_wait_health(&world->tier->counters, KVT_TIER_HEALTH_OK);
}

/* What a stuck device has does not come back before close, and close does not wait for it. */
static void close_while_stuck(struct disk_world *world)
{
    uint64_t started_ns, hang_ns = 50 * KVT_NS_PER_MS;

    world->config.devices[0].hang_ns = hang_ns;
    disk_world_open(world);
    write_all(world, 100);
    for (uint32_t i = 100; i < 104; i++)
        read_make(world, i)->deadline_ns = ms_from_now(200);
    atomic_store(&world->shims[0].is_stuck, true);
    disk_world_submit(world, 100, 4);
    disk_world_wait_health(&world->tier->counters, KVT_TIER_HEALTH_OUT);
    started_ns = kvt_clock_mono_ns();
    world->tier = kvt_tier_close(world->tier);
    assert_true(kvt_clock_mono_ns() - started_ns >= hang_ns);
    assert_true(kvt_clock_mono_ns() - started_ns < hang_ns + 3 * KVT_NS_PER_S);
    assert_int_equal(disk_world_count(world, 100, 4, DISK_WORLD_STATUS_NONE), 4);
    atomic_store(&world->shims[0].is_stuck, false);
}

static void test_close_while_stuck(void **state)
{
    close_while_stuck(*state);
}

/* So does a probe that hangs. */
static void test_close_while_probing(void **state)
{
    struct disk_world *world = *state;
    uint64_t started_ns;

    world->config.devices[0].hang_ns = 50 * KVT_NS_PER_MS;
    world->config.devices[0].failures_max = 1;
    disk_world_open(world);
    write_all(world, 100);
    atomic_store(&world->shims[0].read_result, -EIO);
    (void)read_make(world, 0);
    disk_world_submit(world, 0, 1);
    disk_world_reap(world, 1);
    assert_int_equal(world->xfers[0].status, -EIO);
    atomic_store(&world->shims[0].is_stuck, true);
    disk_world_sleep(60 * KVT_NS_PER_MS); /* the probe is on its way, and stuck */
    assert_int_equal(atomic_load(&world->tier->counters.health), KVT_TIER_HEALTH_OUT);
    started_ns = kvt_clock_mono_ns();
    world->tier = kvt_tier_close(world->tier);
    assert_true(kvt_clock_mono_ns() - started_ns < 3 * KVT_NS_PER_S);
    atomic_store(&world->shims[0].is_stuck, false);
}

/* Keeps the leak checker from calling them leaks. */
static struct kvt_tier *volatile left_behind[2];

/* A plain call that hangs takes the thread with it: close leaves both behind, and when the call
 * returns at last, nothing of the world that is gone by then is touched. */
static void test_close_while_plain_call_hangs(void **state)
{
    struct disk_world *world = *state;
    struct disk_shim *shim = &world->shims[0];
    uint64_t started_ns;

    world->config.devices[0].hang_ns = 50 * KVT_NS_PER_MS;
    shim->ring_result = -EPERM;
    disk_world_open(world);
    write_all(world, 100);
    atomic_store(&world->tier->counters.health, KVT_TIER_HEALTH_OUT); /* nobody can see it */
    atomic_store(&shim->is_stuck, true);
    (void)read_make(world, 0);
    disk_world_submit(world, 0, 1);
    for (int i = 0; i < 5000 && atomic_load(&shim->stuck_calls) == 0; i++)
        disk_world_sleep(KVT_NS_PER_MS);
    left_behind[0] = world->tier;
    started_ns = kvt_clock_mono_ns();
    world->tier = kvt_tier_close(world->tier);
    assert_true(kvt_clock_mono_ns() - started_ns < 10 * KVT_NS_PER_S);
    memset(&world->xfers[0], 0xa5, sizeof(world->xfers[0]));
    atomic_store(&shim->is_stuck, false);
    for (int i = 0; i < 5000 && atomic_load(&shim->stuck_calls) > 0; i++)
        disk_world_sleep(KVT_NS_PER_MS);
    disk_world_sleep(20 * KVT_NS_PER_MS);
    for (size_t i = 0; i < sizeof(world->xfers[0]); i++)
        assert_int_equal(((const uint8_t *)&world->xfers[0])[i], 0xa5);
}

static void *sync_outside(void *disk)
{
    return (void *)(intptr_t)kvt_disk_sync(disk);
}

/* So may a call outside the thread hang that flushes: close leaves what that call will touch, and
 * nobody writes a record of the catalog beside it. */
static void test_close_while_sync_hangs(void **state)
{
    struct disk_world *world = *state;
    struct disk_shim *shim = &world->shims[0];
    struct kvt_disk *disk;
    uint8_t data[KVT_DISK_STATE_BYTES];
    pthread_t thread;

    disk_world_open(world);
    disk = kvt_disk_set_device(world->tier, 0);
    left_behind[1] = world->tier;
    kvt_disk_catalog_encode_state(data, &(struct kvt_disk_state){.stamps_end = 1});
    assert_int_equal(kvt_disk_write_catalog(disk, KVT_DISK_CATALOG_STATE, data, sizeof(data)), 0);
    atomic_store(&shim->is_stuck, true);
    assert_int_equal(pthread_create(&thread, NULL, sync_outside, disk), 0);
    for (int i = 0; i < 5000 && atomic_load(&shim->stuck_calls) == 0; i++)
        disk_world_sleep(KVT_NS_PER_MS);
    assert_int_equal(kvt_disk_write_catalog(disk, KVT_DISK_CATALOG_STATE, data, sizeof(data)),
                     -EBUSY);
    world->tier = kvt_tier_close(world->tier);
    disk_world_sleep(20 * KVT_NS_PER_MS);
    atomic_store(&shim->is_stuck, false);
    assert_int_equal(pthread_join(thread, NULL), 0);
}

static int flush_result(struct disk_world *world)
{
    (void)disk_world_flush(world, 0);
    disk_world_submit(world, 0, 1);
    disk_world_reap(world, 1);
    return world->xfers[0].status;
}

/* The system reports a lost write once. Neither a flush that waited behind the one that failed, nor
 * one before the device was probed, nor one before the failure was reaped may be done. */
static void flush_failure(struct disk_world *world)
{
    struct disk_shim *shim = &world->shims[0];

    disk_world_open(world);
    write_all(world, 100);
    assert_int_equal(flush_result(world), KVT_XFER_DONE);
    (void)disk_world_xfer(world, 0, false, 0, 0, 100);
    (void)disk_world_flush(world, 1);
    (void)disk_world_xfer(world, 2, false, 1, world->slot_bytes, 101);
    (void)disk_world_flush(world, 3);
    atomic_store(&shim->flush_result, -EIO);
    atomic_store(&shim->is_holding, true);
    disk_world_submit(world, 0, 4);
    disk_world_sleep(20 * KVT_NS_PER_MS);
    atomic_store(&shim->is_holding, false);
    disk_world_reap(world, 4);
    assert_int_equal(world->xfers[1].status, -EIO);
    assert_int_equal(world->xfers[3].status, -EIO);
    assert_int_equal(atomic_load(&world->tier->counters.health), KVT_TIER_HEALTH_OUT);
    assert_int_equal(flush_result(world), -EIO);
    disk_world_sleep(100 * KVT_NS_PER_MS); /* probes whose flush fails change nothing */
    assert_int_equal(flush_result(world), -EIO);
    assert_int_equal(atomic_load(&world->tier->counters.health), KVT_TIER_HEALTH_OUT);
    (void)disk_world_flush(world, 0);
    disk_world_submit(world, 0, 1);
    disk_world_wait_taken(world, 0);
    disk_world_wait_asleep(world, 0); /* it failed, and nobody has seen it */
    atomic_store(&shim->flush_result, 0);
    disk_world_sleep(200 * KVT_NS_PER_MS);
    assert_int_equal(atomic_load(&world->tier->counters.health), KVT_TIER_HEALTH_OUT);
    disk_world_reap(world, 1);
    assert_int_equal(world->xfers[0].status, -EIO);
    disk_world_wait_health(&world->tier->counters, KVT_TIER_HEALTH_OK);
    write_all(world, 100);
    assert_int_equal(flush_result(world), KVT_XFER_DONE);
    assert_int_equal(world->tier->counters.outages, 1);
}

static void test_flush_failure(void **state)
{
    flush_failure(*state);
}

static void test_flush_failure_plain_calls(void **state)
{
    struct disk_world *world = *state;

    world->shims[0].ring_result = -EPERM;
    flush_failure(world);
}

/* The error may go to a flush outside the thread: the thread's are failures from then on, too. */
static void test_sync_failure_elsewhere(void **state)
{
    struct disk_world *world = *state;
    struct kvt_disk *disk;
    unsigned int requests;

    disk_world_open(world);
    disk = kvt_disk_set_device(world->tier, 0);
    write_all(world, 100);
    assert_int_equal(kvt_disk_sync(disk), 0);
    assert_int_equal(flush_result(world), KVT_XFER_DONE);
    atomic_store(&world->shims[0].flush_result, -EIO);
    assert_int_equal(kvt_disk_sync(disk), -EIO);
    disk_world_wait_health(&world->tier->counters, KVT_TIER_HEALTH_OUT);
    assert_int_equal(flush_result(world), -EIO);
    atomic_store(&world->shims[0].flush_result, 0);
    disk_world_wait_health(&world->tier->counters, KVT_TIER_HEALTH_OK);
    assert_int_equal(flush_result(world), KVT_XFER_DONE);
    /* A flush of the thread that is good while the other call goes on is not good enough. */
    (void)disk_world_flush(world, 0);
    atomic_store(&world->shims[0].is_holding, true);
    requests = atomic_load(&world->shims[0].requests[KVT_DISK_OP_FLUSH]);
    disk_world_submit(world, 0, 1);
    disk_world_wait_count(&world->shims[0].requests[KVT_DISK_OP_FLUSH], requests + 1);
    disk_world_sleep(20 * KVT_NS_PER_MS); /* it came back, and is held */
    atomic_store(&world->shims[0].flush_result, -EIO);
    assert_int_equal(kvt_disk_sync(disk), -EIO);
    atomic_store(&world->shims[0].flush_result, 0);
    atomic_store(&world->shims[0].is_holding, false);
    disk_world_reap(world, 1);
    assert_int_equal(world->xfers[0].status, -EIO);
}

/* Writes, has the device go out of service by reads that fail, and its probes' flushes fail for a
 * while, then all of it is well again. */
static struct kvt_disk *outage_with_failed_probe(struct disk_world *world)
{
    struct disk_shim *shim = &world->shims[0];

    world->config.devices[0].failures_max = 1;
    disk_world_open(world);
    write_all(world, 100);
    atomic_store(&shim->is_probe_spared, true);
    atomic_store(&shim->read_result, -EIO);
    atomic_store(&shim->flush_result, -EIO);
    (void)read_make(world, 0);
    disk_world_submit(world, 0, 1);
    disk_world_reap(world, 1);
    for (int i = 0; atomic_load(&shim->flushes_failed) == 0 && i < 10000; i++)
        disk_world_sleep(KVT_NS_PER_MS);
    assert_true(atomic_load(&shim->flushes_failed) > 0);
    atomic_store(&shim->read_result, 0);
    atomic_store(&shim->flush_result, 0);
    disk_world_wait_health(&world->tier->counters, KVT_TIER_HEALTH_OK);
    return kvt_disk_set_device(world->tier, 0);
}

/* The lost write may be reported to a probe's flush. Then the next flush is not done, nor is the
 * next call outside the thread good. */
static void test_flush_failure_of_probe(void **state)
{
    struct disk_world *world = *state;

    (void)outage_with_failed_probe(world);
    assert_int_equal(flush_result(world), -EIO);
    disk_world_wait_health(&world->tier->counters, KVT_TIER_HEALTH_OK);
    write_all(world, 100);
    assert_int_equal(flush_result(world), KVT_XFER_DONE);
}

static void test_sync_after_failure_of_probe(void **state)
{
    struct kvt_disk *disk = outage_with_failed_probe(*state);

    assert_int_equal(kvt_disk_sync(disk), -EIO);
    assert_int_equal(kvt_disk_sync(disk), 0);
}

/* Or to a flush of the engine: then a call outside is not good, whether it comes later or is under
 * way when the flush fails. */
static void test_sync_after_failure_of_flush(void **state)
{
    struct disk_world *world = *state;
    struct disk_shim *shim = &world->shims[0];
    struct kvt_disk *disk;

    disk_world_open(world);
    disk = kvt_disk_set_device(world->tier, 0);
    write_all(world, 100);
    assert_int_equal(kvt_disk_sync(disk), 0);
    atomic_store(&shim->flush_result, -EIO);
    assert_int_equal(flush_result(world), -EIO);
    atomic_store(&shim->flush_result, 0);
    assert_int_equal(kvt_disk_sync(disk), -EIO);
    disk_world_wait_health(&world->tier->counters, KVT_TIER_HEALTH_OK);
    assert_int_equal(kvt_disk_sync(disk), 0);
}

static void *release_soon(void *ctx)
{
    struct disk_shim *shim = ctx;

    disk_world_sleep(50 * KVT_NS_PER_MS);
    atomic_store(&shim->held_result, -EIO);
    atomic_store(&shim->is_holding, false);
    return NULL;
}

static void test_sync_beside_failing_flush(void **state)
{
    struct disk_world *world = *state;
    struct disk_shim *shim = &world->shims[0];
    pthread_t thread;

    disk_world_open(world);
    write_all(world, 100);
    atomic_store(&shim->is_holding, true);
    (void)disk_world_flush(world, 0);
    disk_world_submit(world, 0, 1);
    disk_world_wait_count(&shim->requests[KVT_DISK_OP_FLUSH], 1);
    assert_int_equal(pthread_create(&thread, NULL, release_soon, shim), 0);
    assert_int_equal(kvt_disk_sync(kvt_disk_set_device(world->tier, 0)), -EIO);
    assert_int_equal(pthread_join(thread, NULL), 0);
    disk_world_reap(world, 1);
    assert_int_equal(world->xfers[0].status, -EIO);
}

/* Plain calls: a flush waits as long as it takes for a call outside that flushes too. */
static void test_flush_beside_long_sync(void **state)
{
    struct disk_world *world = *state;
    struct kvt_disk *disk;

    world->shims[0].ring_result = -EPERM;
    disk_world_open(world);
    disk = kvt_disk_set_device(world->tier, 0);
    atomic_fetch_add(&disk->other_syncs, 1);
    (void)disk_world_flush(world, 0);
    disk_world_submit(world, 0, 1);
    assert_int_equal(disk_world_reap_for(world, KVT_NS_PER_S), 0);
    atomic_fetch_sub(&disk->other_syncs, 1);
    disk_world_reap(world, 1);
    assert_int_equal(world->xfers[0].status, KVT_XFER_DONE);
}

/* Interrupted and short are two things: having been the one leaves the other its tries. */
static void test_interrupted_and_short(void **state)
{
    struct disk_world *world = *state;
    struct disk_shim *shim = &world->shims[0];
    unsigned int requests;

    disk_world_open(world);
    write_all(world, 100);
    atomic_store(&shim->interrupts, 5);
    atomic_store(&shim->is_short_once, true);
    atomic_store(&shim->short_bytes, 4096);
    (void)read_make(world, 0);
    disk_world_submit(world, 0, 1);
    disk_world_reap(world, 1);
    assert_int_equal(world->xfers[0].status, KVT_XFER_DONE);
    assert_int_equal(atomic_load(&shim->interrupts), 0);
    assert_int_equal(atomic_load(&shim->short_bytes), 0);
    /* And there is an end to it. */
    requests = atomic_load(&shim->requests[KVT_DISK_OP_READ]);
    atomic_store(&shim->interrupts, 1000);
    (void)read_make(world, 0);
    disk_world_submit(world, 0, 1);
    disk_world_reap(world, 1);
    assert_int_equal(world->xfers[0].status, -EINTR);
    requests = atomic_load(&shim->requests[KVT_DISK_OP_READ]) - requests;
    assert_in_range(requests, 2, 20);
    atomic_store(&shim->interrupts, 0);
}

#define WORLD_TEST(name) cmocka_unit_test_setup_teardown(name, world_make, world_free)

int main(void)
{
    const struct CMUnitTest tests[] = {
        WORLD_TEST(test_late_behind_stuck),
        WORLD_TEST(test_flush_late_behind_stuck),
        WORLD_TEST(test_flush_waits_for_its_own),
        WORLD_TEST(test_wakes_seldom),
        WORLD_TEST(test_wakes_seldom_when_out),
        WORLD_TEST(test_close_while_stuck),
        WORLD_TEST(test_close_while_probing),
        WORLD_TEST(test_close_while_plain_call_hangs),
        WORLD_TEST(test_flush_failure),
        WORLD_TEST(test_flush_failure_plain_calls),
        WORLD_TEST(test_sync_failure_elsewhere),
        WORLD_TEST(test_interrupted_and_short),
        WORLD_TEST(test_flush_failure_of_probe),
        WORLD_TEST(test_sync_after_failure_of_probe),
        WORLD_TEST(test_sync_after_failure_of_flush),
        WORLD_TEST(test_sync_beside_failing_flush),
        WORLD_TEST(test_flush_beside_long_sync),
        WORLD_TEST(test_close_while_sync_hangs),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
