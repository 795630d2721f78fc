/* What goes to a device of L3 first and together: neighbours in one request, each with a result of
 * its own; foreground before background; little background while foreground reads come. */
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "daemon/base/clock.h"
#include "tests/common/cmocka.h"
#include "tests/common/disk_world.h"
#include "tests/common/fake_tier.h"
#include "tiers/disk/super.h"

#define SLOTS 64u
#define PAYLOAD_BYTES 30000u

static int world_make(void **state)
{
    struct disk_world *world = disk_world_new(1, SLOTS, PAYLOAD_BYTES);

    world->config.devices[0].inflight_bytes_max = KVT_GIB;
    *state = world;
    return 0;
}

static int world_free(void **state)
{
    disk_world_free(*state);
    return 0;
}

static uint32_t requests(const struct disk_world *world, enum kvt_disk_op op)
{
    return atomic_load(&world->shims[0].requests[op]);
}

/* Transfer @idx: memory slot @memory_slot (reads: of the second half) and disk slot @slot, which
 * holds generation 100 + @slot. */
static struct kvt_xfer *make(struct disk_world *world, uint32_t idx, bool is_read,
                             uint32_t memory_slot, uint32_t slot)
{
    if (!is_read)
        disk_world_fill(world, memory_slot, 100 + slot);
    return disk_world_xfer(world, idx, is_read, is_read ? SLOTS + memory_slot : memory_slot,
                           slot * world->slot_bytes, 100 + slot);
}

static void run(struct disk_world *world, uint32_t count)
{
    disk_world_submit(world, 0, count);
    disk_world_reap(world, count);
}

/* Slot i of memory and of the disk, in order; returns how many requests it took. */
static uint32_t run_in_order(struct disk_world *world, bool is_read)
{
    enum kvt_disk_op op = is_read ? KVT_DISK_OP_READ : KVT_DISK_OP_WRITE;
    uint32_t before = requests(world, op);

    for (uint32_t i = 0; i < SLOTS; i++)
        (void)make(world, i, is_read, i, i);
    disk_world_wait_asleep(world, 0); /* so that it sees all of them at once */
    run(world, SLOTS);
    return requests(world, op) - before;
}

static void test_neighbours_are_one_request(void **state)
{
    struct disk_world *world = *state;
    uint32_t least = (uint32_t)kvt_div_up(SLOTS * world->slot_bytes, KVT_MIB), took;

    disk_world_open(world);
    for (int is_read = 0; is_read < 2; is_read++) {
        took = run_in_order(world, is_read);
        assert_int_equal(disk_world_count(world, 0, SLOTS, KVT_XFER_DONE), SLOTS);
        assert_in_range(took, least, least + 2); /* those of a batch that was seen half */
    }
    for (uint32_t i = 0; i < SLOTS; i++)
        assert_true(disk_world_is_filled(world, SLOTS + i, 100 + i));
    assert_int_equal(world->tier->counters.reads, SLOTS);
    assert_int_equal(world->tier->counters.read_bytes, SLOTS * world->slot_bytes);
}

/* Neighbours at one end only, or in the other direction, are none. */
static void test_no_neighbours(void **state)
{
    struct disk_world *world = *state;
    uint32_t before;

    disk_world_open(world);
    (void)run_in_order(world, false);
    for (int kind = 0; kind < 3; kind++) {
        before = requests(world, KVT_DISK_OP_READ);
        for (uint32_t i = 0; i < SLOTS; i++) {
            uint32_t apart = i * 5 % SLOTS, back = SLOTS - 1 - i;

            (void)make(world, i, true,
                       kind == 0   ? i
                       : kind == 1 ? apart
                                   : back,
                       kind == 0   ? apart
                       : kind == 1 ? i
                                   : back);
        }
        run(world, SLOTS);
        assert_int_equal(disk_world_count(world, 0, SLOTS, KVT_XFER_DONE), SLOTS);
        assert_int_equal(requests(world, KVT_DISK_OP_READ) - before, SLOTS);
    }
}

/* Together they are in flight, so together they keep within the window. */
static void test_window_bounds_chains(void **state)
{
    struct disk_world *world = *state;

    world->config.devices[0].inflight_bytes_max = 4 * world->slot_bytes;
    disk_world_open(world);
    assert_in_range(run_in_order(world, false), SLOTS / 4, SLOTS);
    assert_in_range(run_in_order(world, true), SLOTS / 4, SLOTS);
    assert_int_equal(disk_world_count(world, 0, SLOTS, KVT_XFER_DONE), SLOTS);
}

/* One slot that cannot be read, or written, fails; its neighbours do not. */
static void test_failure_is_of_one(void **state)
{
    struct disk_world *world = *state;
    uint32_t bad = 13;

    disk_world_open(world);
    (void)run_in_order(world, false);
    atomic_store(&world->shims[0].bad_offset_bytes,
                 KVT_DISK_DATA_OFFSET_BYTES + bad * world->slot_bytes + 8192);
    for (int is_read = 0; is_read < 2; is_read++) {
        (void)run_in_order(world, is_read);
        assert_int_equal(disk_world_count(world, 0, SLOTS, KVT_XFER_DONE), SLOTS - 1);
        assert_int_equal(world->xfers[bad].status, -EIO);
    }
    for (uint32_t i = 0; i < SLOTS; i++)
        assert_true(i == bad || disk_world_is_filled(world, SLOTS + i, 100 + i));
    assert_int_equal(world->tier->counters.errors_io, 2);
    /* A flush behind such writes is done when all of them are. */
    for (uint32_t i = 0; i < SLOTS; i++)
        (void)make(world, i, false, i, i);
    (void)disk_world_flush(world, SLOTS);
    run(world, SLOTS + 1);
    assert_int_equal(world->xfers[SLOTS].status, KVT_XFER_DONE);
    for (uint32_t i = 0; i < SLOTS; i++)
        assert_true(world->xfers[SLOTS].started_ns >= world->xfers[i].done_ns);
}

static void test_failures_take_it_out(void **state)
{
    struct disk_world *world = *state;

    world->config.devices[0].failures_max = 8;
    disk_world_open(world);
    (void)run_in_order(world, false);
    atomic_store(&world->shims[0].read_result, -EIO);
    (void)run_in_order(world, true);
    assert_int_equal(disk_world_count(world, 0, SLOTS, -EIO) +
                         disk_world_count(world, 0, SLOTS, KVT_XFER_OUT_OF_SERVICE),
                     SLOTS);
    assert_true(disk_world_count(world, 0, SLOTS, -EIO) >= 8);
    assert_int_equal(world->tier->counters.outages, 1);
    atomic_store(&world->shims[0].read_result, 0);
    disk_world_wait_health(&world->tier->counters, KVT_TIER_HEALTH_OK);
    (void)run_in_order(world, true);
    assert_int_equal(disk_world_count(world, 0, SLOTS, KVT_XFER_DONE), SLOTS);
}

static void test_short_is_of_the_last(void **state)
{
    struct disk_world *world = *state;
    uint32_t bad;

    disk_world_open(world);
    (void)run_in_order(world, false);
    atomic_store(&world->shims[0].is_short_once, true);
    atomic_store(&world->shims[0].short_bytes, 3 * 4096);
    (void)run_in_order(world, true);
    assert_int_equal(disk_world_count(world, 0, SLOTS, KVT_XFER_DONE), SLOTS);
    /* Always short, by what cannot be asked for: what a chain lacks is the end of its last. */
    atomic_store(&world->shims[0].is_short_once, false);
    atomic_store(&world->shims[0].short_bytes, 100);
    (void)run_in_order(world, true);
    bad = disk_world_count(world, 0, SLOTS, KVT_XFER_SHORT);
    assert_in_range(bad, 1, 5);
    assert_int_equal(disk_world_count(world, 0, SLOTS, KVT_XFER_DONE), SLOTS - bad);
    assert_int_equal(world->xfers[SLOTS - 1].status, KVT_XFER_SHORT);
}

/* Each slot of a chain is verified by itself. */
static void test_damage_is_of_one(void **state)
{
    struct disk_world *world = *state;
    uint8_t garbage[512];
    int fd;

    disk_world_open(world);
    (void)run_in_order(world, false);
    memset(garbage, 0x5a, sizeof(garbage));
    fd = open(world->paths[0], O_RDWR | O_CLOEXEC);
    assert_int_equal(pwrite(fd, garbage, sizeof(garbage),
                            (off_t)(KVT_DISK_DATA_OFFSET_BYTES + 5 * world->slot_bytes + 8192)),
                     sizeof(garbage));
    close(fd);
    (void)run_in_order(world, true);
    assert_int_equal(world->xfers[5].status, KVT_XFER_BAD_SLOT);
    assert_int_equal(world->xfers[5].verdict, KVT_SLOT_BAD_PAYLOAD);
    assert_int_equal(disk_world_count(world, 0, SLOTS, KVT_XFER_DONE), SLOTS - 1);
}

/* Any mix of neighbours and others, with failures and short requests among them: each transfer
 * comes back once, and what is done has the right bytes. */
static void test_any_mix(void **state)
{
    struct disk_world *world = *state;
    uint64_t seed = 7;

    disk_world_open(world);
    (void)run_in_order(world, false);
    for (uint32_t round = 0; round < 200; round++) {
        uint32_t at = 0, done = 0;

        while (at < SLOTS) {
            uint32_t length = 1 + (uint32_t)(fake_random(&seed) % 12);
            uint32_t skew = fake_random(&seed) % 3 == 0 ? 1 : 0;

            length = KVT_MIN(length, SLOTS - at);
            for (uint32_t i = 0; i < length; i++) {
                struct kvt_xfer *xfer =
                    make(world, at + i, true, at + i, skew ? at + length - 1 - i : at + i);

                xfer->flags = fake_random(&seed) % 8 == 0 ? KVT_XFER_BACKGROUND : 0;
            }
            at += length;
        }
        memset(world->memory + SLOTS * world->slot_bytes, 0xdd, SLOTS * world->slot_bytes);
        atomic_store(&world->shims[0].fail_every, 2 + round % 5);
        atomic_store(&world->shims[0].read_result, round % 4 == 1 ? -EIO : 0);
        atomic_store(&world->shims[0].short_bytes, round % 4 == 2 ? 4096 : 0);
        run(world, SLOTS);
        for (uint32_t i = 0; i < SLOTS; i++) {
            if (world->xfers[i].status != KVT_XFER_DONE)
                continue;
            done++;
            assert_true(disk_world_is_filled(world, SLOTS + i, world->xfers[i].key.generation));
        }
        assert_int_equal(done + disk_world_count(world, 0, SLOTS, -EIO) +
                             disk_world_count(world, 0, SLOTS, KVT_XFER_SHORT),
                         SLOTS);
        assert_true(round % 4 == 1 || round % 4 == 2 || done == SLOTS);
    }
}

/* Many background reads wait: of those that a foreground read meets, one in sixteen goes first. */
static void test_foreground_first(void **state)
{
    struct disk_world *world = *state;
    uint32_t background = 300, foreground = 100, between = 0;
    uint64_t submitted_ns, last_ns = 0;

    world->config.devices[0].inflight_bytes_max = 4 * world->slot_bytes;
    disk_world_open(world);
    (void)run_in_order(world, false);
    for (uint32_t i = 0; i < background + foreground; i++)
        (void)make(world, i, true, i * 5 % SLOTS, i * 5 % SLOTS);
    for (uint32_t i = 0; i < background; i++)
        world->xfers[i].flags = KVT_XFER_BACKGROUND;
    atomic_store(&world->shims[0].is_holding, true);
    disk_world_submit(world, 0, background);
    disk_world_wait_taken(world, 0);
    disk_world_submit(world, background, foreground);
    disk_world_wait_taken(world, 0);
    submitted_ns = kvt_clock_mono_ns();
    atomic_store(&world->shims[0].is_holding, false);
    disk_world_reap(world, background + foreground);
    for (uint32_t i = background; i < background + foreground; i++)
        last_ns = KVT_MAX(last_ns, world->xfers[i].started_ns);
    for (uint32_t i = 0; i < background; i++)
        between +=
            world->xfers[i].started_ns >= submitted_ns && world->xfers[i].started_ns < last_ns;
    print_message("%u of %u background reads began among %u of the foreground\n", between,
                  background, foreground);
    assert_in_range(between, 1, foreground / 16 + 2);
    assert_int_equal(disk_world_count(world, 0, background + foreground, KVT_XFER_DONE),
                     background + foreground);
}

/* How many background writes are in flight while the device gives back nothing. */
static uint32_t background_in_flight(struct disk_world *world, bool is_reading)
{
    uint32_t before = requests(world, KVT_DISK_OP_WRITE), begun;

    atomic_store(&world->shims[0].is_holding, true);
    (void)make(world, 40, true, 40, 40);
    if (is_reading)
        disk_world_submit(world, 40, 1);
    for (uint32_t i = 0; i < 40; i++)
        make(world, i, false, i * 7 % 40, i)->flags = KVT_XFER_BACKGROUND;
    disk_world_submit(world, 0, 40);
    disk_world_wait_count(&world->shims[0].requests[KVT_DISK_OP_WRITE],
                          before + (is_reading ? 1 : 40));
    disk_world_sleep(80 * KVT_NS_PER_MS);
    begun = requests(world, KVT_DISK_OP_WRITE) - before;
    atomic_store(&world->shims[0].is_holding, false);
    disk_world_reap(world, is_reading ? 41 : 40);
    assert_int_equal(disk_world_count(world, 0, 40, KVT_XFER_DONE), 40);
    return begun;
}

static void test_background_is_paced(void **state)
{
    struct disk_world *world = *state;

    disk_world_open(world);
    (void)run_in_order(world, false);
    disk_world_sleep(50 * KVT_NS_PER_MS);
    assert_int_equal(background_in_flight(world, false), 40);
    assert_in_range(background_in_flight(world, true), 1, 256 * KVT_KIB / world->slot_bytes);
    /* And with the reads over, all at once again. */
    disk_world_sleep(50 * KVT_NS_PER_MS);
    assert_int_equal(background_in_flight(world, false), 40);
}

#define WORLD_TEST(name) cmocka_unit_test_setup_teardown(name, world_make, world_free)

int main(void)
{
    const struct CMUnitTest tests[] = {
        WORLD_TEST(test_neighbours_are_one_request), WORLD_TEST(test_no_neighbours),
        WORLD_TEST(test_window_bounds_chains),       WORLD_TEST(test_failure_is_of_one),
        WORLD_TEST(test_failures_take_it_out),       WORLD_TEST(test_short_is_of_the_last),
        WORLD_TEST(test_damage_is_of_one),           WORLD_TEST(test_any_mix),
        WORLD_TEST(test_foreground_first),           WORLD_TEST(test_background_is_paced),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
