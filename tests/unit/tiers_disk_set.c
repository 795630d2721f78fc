/* Several devices as one tier: places and zones, flushes, devices that cannot be opened, hold back
 * or vanish while the others go on. */
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "daemon/base/alloc.h"
#include "daemon/base/clock.h"
#include "tests/common/alloc_fault.h"
#include "tests/common/cmocka.h"
#include "tests/common/disk_world.h"
#include "tiers/disk/catalog.h"

#define DEVICES 3u
#define SLOTS 8u /* of a device */
#define PAYLOAD_BYTES 30000u
#define ALL (DEVICES * SLOTS)

static int world_make(void **state)
{
    *state = disk_world_new(DEVICES, SLOTS, PAYLOAD_BYTES);
    return 0;
}

static int world_free(void **state)
{
    disk_world_free(*state);
    return 0;
}

/* Transfer i is of slot i / DEVICES of device i % DEVICES. */
static void all_make(struct disk_world *world, bool is_read, uint64_t first)
{
    for (uint32_t i = 0; i < ALL; i++) {
        uint32_t memory_slot = is_read ? ALL + i : i;

        if (!is_read)
            disk_world_fill(world, memory_slot, first + i);
        (void)disk_world_xfer(world, i, is_read, memory_slot,
                              disk_world_offset(world, i % DEVICES, i / DEVICES), first + i);
    }
}

static void all_run(struct disk_world *world, bool is_read, uint64_t first)
{
    all_make(world, is_read, first);
    disk_world_submit(world, 0, ALL);
    disk_world_reap(world, ALL);
}

static void flush_run(struct disk_world *world, int status)
{
    (void)disk_world_flush(world, 0);
    disk_world_submit(world, 0, 1);
    disk_world_reap(world, 1);
    assert_int_equal(world->xfers[0].status, status);
}

static uint32_t flushes_of(const struct disk_world *world, uint32_t device)
{
    return atomic_load(&world->shims[device].requests[KVT_DISK_OP_FLUSH]);
}

static void test_zones(void **state)
{
    struct disk_world *world = *state;
    const struct kvt_tier *tier;
    uint64_t base = 0;

    world->config.devices[1].bytes -= 2 * world->slot_bytes;
    disk_world_open(world);
    tier = world->tier;
    print_message("L3: %s\n", tier->detail);
    assert_non_null(strstr(tier->detail, "3 of 3 devices"));
    assert_int_equal(world->report.opened_count, DEVICES);
    assert_int_equal(tier->zones_count, DEVICES);
    for (uint32_t i = 0; i < DEVICES; i++) {
        uint64_t slots = i == 1 ? SLOTS - 2 : SLOTS;

        assert_int_equal(world->report.devices[i].result, 0);
        assert_int_equal(tier->zones[i].base_bytes, base);
        assert_int_equal(tier->zones[i].bytes, slots * world->slot_bytes);
        assert_string_equal(tier->zones[i].name, world->paths[i]);
        assert_non_null(kvt_disk_set_device(world->tier, i));
        base += tier->zones[i].bytes;
    }
    assert_int_equal(tier->capacity_bytes, base);
    assert_int_equal(tier->inflight_max, DISK_WORLD_XFERS / DEVICES * DEVICES);
    assert_int_equal(tier->counters.health, KVT_TIER_HEALTH_OK);
}

static void test_round_trip(void **state)
{
    struct disk_world *world = *state;

    disk_world_open(world);
    for (uint64_t round = 1; round < 4; round++) {
        all_run(world, false, round * 100);
        assert_int_equal(disk_world_count(world, 0, ALL, KVT_XFER_DONE), ALL);
        all_run(world, true, round * 100);
        assert_int_equal(disk_world_count(world, 0, ALL, KVT_XFER_DONE), ALL);
        for (uint32_t i = 0; i < ALL; i++) {
            assert_true(disk_world_is_filled(world, ALL + i, round * 100 + i));
            /* What the engine gave is what it gets back. */
            assert_int_equal(world->xfers[i].src.offset_bytes,
                             disk_world_offset(world, i % DEVICES, i / DEVICES));
        }
    }
    for (uint32_t i = 0; i < DEVICES; i++)
        assert_int_equal(world->tier->zones[i].counters->writes, 3 * SLOTS);
    assert_int_equal(world->tier->counters.reads, 3 * ALL);
    assert_int_equal(world->tier->counters.written_bytes, 3 * ALL * world->slot_bytes);
}

static void test_one_device_is_itself(void **state)
{
    struct disk_world *world = disk_world_new(1, SLOTS, PAYLOAD_BYTES);

    (void)state;
    disk_world_open(world);
    assert_int_equal(world->tier->zones_count, 1);
    assert_ptr_equal(world->tier->zones[0].counters, &world->tier->counters);
    assert_int_equal(world->tier->zones[0].bytes, world->tier->capacity_bytes);
    assert_ptr_equal(kvt_disk_set_device(world->tier, 0), world->tier);
    disk_world_fill(world, 0, 7);
    (void)disk_world_xfer(world, 0, false, 0, disk_world_offset(world, 0, 3), 7);
    disk_world_submit(world, 0, 1);
    disk_world_reap(world, 1);
    assert_int_equal(world->xfers[0].status, KVT_XFER_DONE);
    flush_run(world, KVT_XFER_DONE);
    disk_world_free(world);
}

static void test_cannot_open(void **state)
{
    struct disk_world *world = *state;
    struct disk_world *alone = disk_world_new(1, SLOTS, PAYLOAD_BYTES);
    struct kvt_disk_set_report report;
    struct kvt_tier *second;
    int fd = open(world->paths[0], O_RDWR | O_CREAT | O_CLOEXEC, 0600);

    assert_int_equal(write(fd, "precious", 8), 8);
    close(fd);
    world->shims[2].open_result = -EIO;
    disk_world_open(world);
    assert_int_equal(world->report.opened_count, 1);
    assert_int_equal(world->report.devices[0].result, KVT_DISK_E_FOREIGN);
    assert_int_equal(world->report.devices[1].result, 0);
    assert_int_equal(world->report.devices[2].result, -EIO);
    assert_string_equal(world->report.devices[2].text, strerrordesc_np(EIO));
    assert_int_equal(world->tier->zones[0].bytes, 0);
    assert_int_equal(world->tier->zones[0].counters->health, KVT_TIER_HEALTH_OUT);
    assert_int_equal(world->tier->zones[1].base_bytes, 0);
    assert_int_equal(world->tier->zones[2].counters->health, KVT_TIER_HEALTH_OUT);
    assert_null(kvt_disk_set_device(world->tier, 2));
    assert_int_equal(world->tier->counters.health, KVT_TIER_HEALTH_OK);
    for (uint32_t i = 0; i < SLOTS; i++) {
        disk_world_fill(world, i, i);
        (void)disk_world_xfer(world, i, false, i, disk_world_offset(world, 1, i), i);
    }
    disk_world_submit(world, 0, SLOTS);
    disk_world_reap(world, SLOTS);
    assert_int_equal(disk_world_count(world, 0, SLOTS, KVT_XFER_DONE), SLOTS);
    flush_run(world, KVT_XFER_DONE);
    /* Somebody else has the one that is open. */
    assert_int_equal(kvt_disk_set_open(&second, &world->config, &report), 0);
    assert_int_equal(report.opened_count, 0);
    assert_int_equal(report.devices[1].result, KVT_DISK_E_BUSY);
    assert_int_equal(report.devices[1].pid, getpid());
    assert_int_equal(second->capacity_bytes, 0);
    assert_int_equal(second->counters.health, KVT_TIER_HEALTH_OUT);
    assert_null(kvt_tier_close(second));
    /* The only one. */
    alone->config.devices[0].bytes = 4096;
    disk_world_open(alone);
    assert_int_equal(alone->report.devices[0].result, KVT_DISK_E_TOO_SMALL);
    assert_int_equal(alone->tier->zones_count, 1);
    assert_int_equal(alone->tier->capacity_bytes, 0);
    disk_world_free(alone);
    world->config.devices_count = 0;
    assert_int_equal(kvt_disk_set_open(&second, &world->config, &report), -EINVAL);
    world->config.devices_count = KVT_ZONES_MAX + 1;
    assert_int_equal(kvt_disk_set_open(&second, &world->config, &report), -EINVAL);
}

/* A flush goes to the devices with writes that no good flush covers, and waits for all of them. */
static void test_flush(void **state)
{
    struct disk_world *world = *state;

    disk_world_open(world);
    flush_run(world, KVT_XFER_DONE);
    assert_int_equal(flushes_of(world, 0) + flushes_of(world, 1) + flushes_of(world, 2), 0);
    for (uint32_t i = 0; i < 2; i++) {
        disk_world_fill(world, i, i);
        (void)disk_world_xfer(world, i, false, i, disk_world_offset(world, 2 * i, 0), i);
    }
    (void)disk_world_flush(world, 2);
    atomic_store(&world->shims[2].is_holding, true);
    disk_world_submit(world, 0, 3);
    disk_world_reap(world, 1);
    assert_int_equal(disk_world_reap_for(world, 50 * KVT_NS_PER_MS), 0);
    assert_int_equal(world->xfers[0].status, KVT_XFER_DONE);
    assert_int_equal(world->xfers[2].status, DISK_WORLD_STATUS_NONE);
    atomic_store(&world->shims[2].is_holding, false);
    disk_world_reap(world, 2);
    assert_int_equal(disk_world_count(world, 0, 3, KVT_XFER_DONE), 3);
    assert_true(world->xfers[2].done_ns >= world->xfers[1].done_ns);
    assert_int_equal(flushes_of(world, 0), 1);
    assert_int_equal(flushes_of(world, 1), 0);
    assert_int_equal(flushes_of(world, 2), 1);
    /* Writes that came back after the flush was taken are flushed once more, for certain. */
    flush_run(world, KVT_XFER_DONE);
    assert_int_equal(flushes_of(world, 0) + flushes_of(world, 2), 4);
    flush_run(world, KVT_XFER_DONE); /* all is covered */
    assert_int_equal(flushes_of(world, 0) + flushes_of(world, 2), 4);
}

/* What one device answers is the answer of the whole; a zone's flush does not ask the others. */
static void test_flush_failure(void **state)
{
    struct disk_world *world = *state;

    disk_world_open(world);
    all_run(world, false, 500);
    atomic_store(&world->shims[1].flush_result, -EIO);
    flush_run(world, -EIO);
    for (uint32_t i = 0; i < 2; i++) {
        world->xfers[0] = (struct kvt_xfer){
            .flags = KVT_XFER_FLUSH,
            .dst = {.kind = KVT_PLACE_DISK, .offset_bytes = disk_world_offset(world, 2 * i, 1)},
            .deadline_ns = KVT_TIME_NEVER_NS};
        disk_world_submit(world, 0, 1);
        disk_world_reap(world, 1);
        assert_int_equal(world->xfers[0].status, KVT_XFER_DONE);
        assert_int_equal(flushes_of(world, 2 * i), 2);
    }
    assert_int_equal(flushes_of(world, 1), 1);
    atomic_store(&world->shims[1].flush_result, 0);
    disk_world_wait_health(world->tier->zones[1].counters, KVT_TIER_HEALTH_OK);
    all_run(world, false, 600);
    flush_run(world, KVT_XFER_DONE);
}

/* More flushes than the set can have under way: the rest is refused, none is lost. */
static void test_flush_bound(void **state)
{
    struct disk_world *world = *state;
    struct kvt_xfer *list[2 * KVT_DISK_SET_FLUSHES];
    uint32_t taken = 0;

    disk_world_open(world);
    disk_world_fill(world, 0, 1);
    (void)disk_world_xfer(world, 100, false, 0, 0, 1);
    atomic_store(&world->shims[0].is_holding, true);
    disk_world_submit(world, 100, 1);
    for (uint32_t i = 0; i < KVT_COUNT_OF(list); i++)
        list[i] = disk_world_flush(world, i);
    assert_int_equal(kvt_tier_submit(world->tier, list, KVT_COUNT_OF(list), &taken), 0);
    assert_int_equal(taken, KVT_DISK_SET_FLUSHES);
    assert_int_equal(kvt_tier_submit(world->tier, list + taken, 1, &taken), KVT_TIER_E_FULL);
    assert_int_equal(taken, KVT_DISK_SET_FLUSHES);
    atomic_store(&world->shims[0].is_holding, false);
    disk_world_reap(world, KVT_DISK_SET_FLUSHES + 1);
    assert_int_equal(disk_world_count(world, 0, KVT_DISK_SET_FLUSHES, KVT_XFER_DONE),
                     KVT_DISK_SET_FLUSHES);
    flush_run(world, KVT_XFER_DONE);
}

/* One device keeps all that it can get; the others' transfers pass, also in the same batch. */
static void test_slow_device(void **state)
{
    struct disk_world *world = *state;
    uint32_t per_device = world->config.devices[0].inflight_max;

    disk_world_open(world);
    all_run(world, false, 500);
    atomic_store(&world->shims[0].is_holding, true);
    /* More than one device's share of the set, all to the first. */
    for (uint32_t i = 0; i < per_device + 50; i++)
        (void)disk_world_xfer(world, i, true, ALL + i % SLOTS, disk_world_offset(world, 0, 0), 500);
    for (uint32_t i = 0; i < 20; i++)
        (void)disk_world_xfer(world, per_device + 50 + i, true, ALL + SLOTS + i % SLOTS,
                              disk_world_offset(world, 1 + i % 2, 0), 501 + i % 2);
    disk_world_submit(world, 0, per_device + 70);
    disk_world_reap(world, 20);
    assert_int_equal(disk_world_count(world, per_device + 50, 20, KVT_XFER_DONE), 20);
    assert_int_equal(disk_world_count(world, 0, per_device + 50, DISK_WORLD_STATUS_NONE),
                     per_device + 50);
    atomic_store(&world->shims[0].is_holding, false);
    disk_world_reap(world, per_device + 50);
    assert_int_equal(disk_world_count(world, 0, per_device + 70, KVT_XFER_DONE), per_device + 70);
}

static void test_full(void **state)
{
    struct disk_world *world = *state;
    struct kvt_xfer *list[DISK_WORLD_XFERS];
    uint32_t taken = 0, most;

    disk_world_open(world);
    most = world->tier->inflight_max;
    atomic_store(&world->shims[0].is_holding, true);
    for (uint32_t i = 0; i < DISK_WORLD_XFERS; i++)
        list[i] = disk_world_xfer(world, i, true, ALL, 0, 1);
    assert_true(most < DISK_WORLD_XFERS);
    assert_int_equal(kvt_tier_submit(world->tier, list, DISK_WORLD_XFERS, &taken), 0);
    assert_int_equal(taken, most);
    assert_int_equal(kvt_tier_submit(world->tier, list + taken, 1, &taken), KVT_TIER_E_FULL);
    atomic_store(&world->shims[0].is_holding, false);
    disk_world_reap(world, most);
}

/* Reaping one at a time, none of the devices waits for another's many. */
static void test_reap_is_fair(void **state)
{
    struct disk_world *world = *state;
    uint32_t seen[DEVICES] = {0};

    disk_world_open(world);
    all_run(world, false, 500);
    all_make(world, true, 500);
    disk_world_submit(world, 0, ALL);
    for (int i = 0; i < 5000; i++) {
        uint64_t reads = 0;

        for (uint32_t d = 0; d < DEVICES; d++)
            reads += atomic_load(&world->tier->zones[d].counters->reads);
        if (reads == ALL)
            break;
        disk_world_sleep(KVT_NS_PER_MS);
    }
    for (uint32_t d = 0; d < DEVICES; d++)
        disk_world_wait_asleep(world, d); /* verified, too */
    for (uint32_t i = 0; i < 2 * DEVICES; i++) {
        struct kvt_xfer *done;

        assert_int_equal(kvt_tier_reap(world->tier, &done, 1), 1);
        seen[(done - world->xfers) % DEVICES]++;
    }
    for (uint32_t i = 0; i < DEVICES; i++)
        assert_int_equal(seen[i], 2);
    disk_world_reap(world, ALL - 2 * DEVICES);
}

/* A device that vanishes under load: its zone goes out of service, the others go on with the right
 * bytes, every transfer and every flush ends. */
static void vanish(struct disk_world *world, int error)
{
    uint32_t good = 0, refused = 0;

    disk_world_open(world);
    all_run(world, false, 500);
    for (uint32_t round = 0; round < 40; round++) {
        uint32_t gone = 0;

        all_make(world, round % 2 == 0, 500);
        (void)disk_world_flush(world, ALL);
        (void)disk_world_flush(world, ALL + 1);
        world->xfers[ALL + 1].dst = (struct kvt_place){
            .kind = KVT_PLACE_DISK, .offset_bytes = disk_world_offset(world, 2, 0)};
        disk_world_submit(world, 0, ALL + 2);
        if (round == 10)
            atomic_store(&world->shims[1].gone_result, error);
        disk_world_reap(world, ALL + 2);
        for (uint32_t i = 0; i < ALL; i++) {
            int status = world->xfers[i].status;

            if (i % DEVICES != 1 || round < 10) {
                assert_int_equal(status, KVT_XFER_DONE);
                assert_true(round % 2 == 1 || disk_world_is_filled(world, ALL + i, 500 + i));
                good++;
                continue;
            }
            assert_true(status == error || status == KVT_XFER_OUT_OF_SERVICE ||
                        (status == KVT_XFER_DONE && round == 10));
            gone++;
            refused += status == KVT_XFER_OUT_OF_SERVICE;
        }
        assert_true(round < 10 || gone == SLOTS);
        assert_int_equal(world->xfers[ALL + 1].status, KVT_XFER_DONE);
        assert_true(round >= 10 || world->xfers[ALL].status == KVT_XFER_DONE);
    }
    assert_int_equal(good, 40 * ALL - 30 * SLOTS);
    assert_true(refused >= 20 * SLOTS);
    assert_int_equal(world->tier->zones[1].counters->health, KVT_TIER_HEALTH_OUT);
    assert_int_equal(world->tier->zones[1].counters->outages, 1);
    assert_int_equal(world->tier->zones[0].counters->health, KVT_TIER_HEALTH_OK);
    assert_int_equal(world->tier->counters.health, KVT_TIER_HEALTH_OK);
    assert_int_equal(world->tier->counters.outages, 1);
}

static void test_vanish(void **state)
{
    struct disk_world *world = *state;

    for (uint32_t i = 0; i < DEVICES; i++)
        world->config.devices[i].failures_max = 4;
    vanish(world, -EIO);
    /* It is plugged in again. */
    atomic_store(&world->shims[1].gone_result, 0);
    disk_world_wait_health(world->tier->zones[1].counters, KVT_TIER_HEALTH_OK);
    all_run(world, false, 600);
    flush_run(world, KVT_XFER_DONE);
    all_run(world, true, 600);
    assert_int_equal(disk_world_count(world, 0, ALL, KVT_XFER_DONE), ALL);
    world->tier = kvt_tier_close(world->tier);
    vanish(world, -ENODEV);
}

static void test_vanish_plain_calls(void **state)
{
    struct disk_world *world = *state;

    for (uint32_t i = 0; i < DEVICES; i++) {
        world->config.devices[i].failures_max = 4;
        world->shims[i].ring_result = -EPERM;
    }
    vanish(world, -ENODEV);
}

static struct alloc_fault fault;

static void test_open_without_memory(void **state)
{
    struct disk_world *world = *state;
    uint32_t failures = 0;

    kvt_alloc_set_fault(alloc_fault_nth, &fault);
    for (fault.fail_at = 1;; fault.fail_at++) {
        int r;

        fault.seen = 0;
        r = kvt_disk_set_open(&world->tier, &world->config, &world->report);
        assert_true(r == 0 || (r == -ENOMEM && fault.fail_at == 1));
        failures += r != 0 || world->report.opened_count < DEVICES;
        if (r == 0)
            world->tier = kvt_tier_close(world->tier);
        if (fault.seen < fault.fail_at)
            break;
    }
    kvt_alloc_set_fault(NULL, NULL);
    assert_true(failures >= 1 + 5 * DEVICES);
}

/* Each device has its own catalog. What a start reads is whole, and is so in both copies again. */
static void test_catalogs(void **state)
{
    struct disk_world *world = *state;
    struct kvt_disk_catalog *catalog = calloc(1, sizeof(*catalog));
    uint8_t data[KVT_DISK_STATE_BYTES];

    assert_non_null(catalog);
    disk_world_open(world);
    for (uint32_t i = 0; i < DEVICES; i++) {
        struct kvt_disk_state now = {.stamps_end = 100 + i, .starts = i};

        kvt_disk_catalog_encode_state(data, &now);
        assert_int_equal(kvt_disk_write_catalog(kvt_disk_set_device(world->tier, i),
                                                KVT_DISK_CATALOG_STATE, data, sizeof(data)),
                         0);
    }
    for (uint32_t copy = 0; copy < 2; copy++) {
        for (uint32_t i = 0; i < DEVICES; i++) {
            int fd = open(world->paths[i], O_WRONLY | O_CLOEXEC);
            off_t at = (off_t)kvt_disk_record_offset(KVT_DISK_CATALOG_STATE, copy) + 48;

            assert_int_equal(pwrite(fd, "rot", 3, at), 3);
            assert_int_equal(close(fd), 0);
            assert_int_equal(kvt_disk_read_catalog(kvt_disk_set_device(world->tier, i), catalog),
                             0);
            assert_true(catalog->has_state && catalog->copies_bad == 0);
            assert_int_equal(catalog->state.stamps_end, 100 + i);
        }
    }
    free(catalog);
}

#define WORLD_TEST(name) cmocka_unit_test_setup_teardown(name, world_make, world_free)

int main(void)
{
    const struct CMUnitTest tests[] = {
        WORLD_TEST(test_zones),
        WORLD_TEST(test_round_trip),
        cmocka_unit_test(test_one_device_is_itself),
        WORLD_TEST(test_cannot_open),
        WORLD_TEST(test_flush),
        WORLD_TEST(test_flush_failure),
        WORLD_TEST(test_flush_bound),
        WORLD_TEST(test_slow_device),
        WORLD_TEST(test_full),
        WORLD_TEST(test_reap_is_fair),
        WORLD_TEST(test_vanish),
        WORLD_TEST(test_vanish_plain_calls),
        WORLD_TEST(test_open_without_memory),
        WORLD_TEST(test_catalogs),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
