/* L3 on a real file, or on a raw block device when it is run with "raw", with a shim before its
 * system calls: round trips, failing, short, repeated and held-back requests, outages (opening is
 * tiers_disk_file.c's). In every case each transfer comes back exactly once and no read that says
 * "done" has wrong bytes. */
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "daemon/base/alloc.h"
#include "daemon/base/clock.h"
#include "daemon/base/hash.h"
#include "tests/common/alloc_fault.h"
#include "tests/common/cmocka.h"
#include "tests/common/disk_shim.h"
#include "tests/common/loop_device.h"
#include "tiers/disk/disk.h"
#include "tiers/disk/file.h"

#define BLOCK_TOKENS 64u
#define PAYLOAD_BYTES 60000u
#define SLOTS 32u
#define INFLIGHT 128u

struct world {
    struct disk_shim shim;
    struct kvt_doorbell bell;
    struct kvt_disk_config config;
    struct kvt_tier *tier;
    uint8_t *memory;
    uint64_t slot_bytes;
    char dir[64], path[96];
    struct loop_device device; /* over the file, of tests with a raw device */
    struct kvt_xfer xfers[INFLIGHT];
};

static bool is_raw; /* set by main */

/* The file becomes a block device. */
static int device_make(struct world *world)
{
    int fd = open(world->path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    int r = fd < 0 || ftruncate(fd, (off_t)world->config.bytes) < 0 ? -errno : 0;

    if (fd >= 0)
        close(fd);
    world->config.path = world->device.path;
    return r == 0 ? loop_device_open(&world->device, world->path, 512, 0) : r;
}

static int world_make(void **state)
{
    struct world *world = calloc(1, sizeof(*world));

    disk_shim_init(&world->shim);
    assert_int_equal(kvt_doorbell_init(&world->bell), 0);
    world->slot_bytes = kvt_slot_bytes(BLOCK_TOKENS, PAYLOAD_BYTES);
    world->memory = mmap(NULL, 2 * SLOTS * world->slot_bytes, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_ptr_not_equal(world->memory, MAP_FAILED);
    snprintf(world->dir, sizeof(world->dir), "kvt-disk-XXXXXX");
    assert_non_null(mkdtemp(world->dir));
    snprintf(world->path, sizeof(world->path), "%s/l3", world->dir);
    world->config = (struct kvt_disk_config){
        .path = world->path,
        .bytes = KVT_DISK_DATA_OFFSET_BYTES + SLOTS * world->slot_bytes,
        .host_memory = world->memory,
        .host_memory_bytes = 2 * SLOTS * world->slot_bytes,
        .inflight_max = INFLIGHT,
        .failures_max = 1000000,
        .retry_ns_min = 20 * KVT_NS_PER_MS,
        .retry_ns_max = 80 * KVT_NS_PER_MS,
        .io = &world->shim.io,
        .doorbell = &world->bell,
    };
    world->device.fd = -1;
    if (is_raw)
        assert_int_equal(device_make(world), 0);
    *state = world;
    return 0;
}

static int world_open_result(struct world *world)
{
    struct kvt_disk_report report;

    return kvt_disk_open(&world->tier, &world->config, &report);
}

static int world_free(void **state)
{
    struct world *world = *state;
    char lock[128];

    world->tier = kvt_tier_close(world->tier);
    loop_device_close(&world->device);
    kvt_doorbell_deinit(&world->bell);
    snprintf(lock, sizeof(lock), "%s.lock", world->path);
    (void)unlink(lock);
    (void)unlink(world->path);
    assert_int_equal(rmdir(world->dir), 0);
    assert_int_equal(munmap(world->memory, 2 * SLOTS * world->slot_bytes), 0);
    free(world);
    return 0;
}

/* Slot @slot of memory holds a sealed block that is a function of @generation. */
static void slot_fill(struct world *world, uint32_t slot, uint64_t generation)
{
    uint32_t header_bytes = kvt_slot_header_bytes(BLOCK_TOKENS);
    uint32_t tokens[BLOCK_TOKENS] = {(uint32_t)generation};
    uint8_t *at = world->memory + slot * world->slot_bytes;
    struct kvt_slot_info info = {.block_id = generation * 3,
                                 .generation = generation,
                                 .payload_bytes = PAYLOAD_BYTES,
                                 .block_tokens = BLOCK_TOKENS};

    kvt_slot_header_write(at, &info, tokens);
    for (uint32_t i = 0; i < PAYLOAD_BYTES; i++)
        at[header_bytes + i] = (uint8_t)(generation * 17 + i * 5 + i / 250);
    kvt_slot_header_seal(at, kvt_hash64(at + header_bytes, PAYLOAD_BYTES, 0));
}

static struct kvt_slot_key key_of(uint64_t generation)
{
    return (struct kvt_slot_key){.block_id = generation * 3,
                                 .generation = generation,
                                 .payload_bytes = PAYLOAD_BYTES,
                                 .block_tokens = BLOCK_TOKENS};
}

/* Between memory slot @memory_slot and disk slot @disk_slot. Slots that follow each other do not
 * lie so on disk: here each has a request of its own. */
static struct kvt_xfer xfer_make(const struct world *world, bool is_read, uint32_t memory_slot,
                                 uint32_t disk_slot, uint64_t generation)
{
    struct kvt_place host = {.kind = KVT_PLACE_HOST,
                             .offset_bytes = memory_slot * world->slot_bytes};
    struct kvt_place disk = {.kind = KVT_PLACE_DISK,
                             .offset_bytes = disk_slot * 7 % SLOTS * world->slot_bytes};

    return (struct kvt_xfer){.src = is_read ? disk : host,
                             .dst = is_read ? host : disk,
                             .key = key_of(generation),
                             .header_bytes = kvt_slot_header_bytes(BLOCK_TOKENS),
                             .slot_bytes = world->slot_bytes,
                             .deadline_ns = KVT_TIME_NEVER_NS,
                             .status = 12345};
}

static void submit(struct world *world, uint32_t count)
{
    struct kvt_xfer *list[INFLIGHT];
    uint32_t taken = 0;

    for (uint32_t i = 0; i < count; i++)
        list[i] = &world->xfers[i];
    assert_int_equal(kvt_tier_submit(world->tier, list, count, &taken), 0);
    assert_int_equal(taken, count);
}

/* All @count come back, each once, and nothing else does. */
static void reap_once(struct world *world, uint32_t count)
{
    uint64_t until_ns = kvt_clock_mono_ns() + 20 * KVT_NS_PER_S;
    uint32_t seen[INFLIGHT] = {0}, total = 0;
    struct kvt_xfer *done[INFLIGHT];

    while (total < count) {
        uint32_t got = kvt_tier_reap(world->tier, done, INFLIGHT);

        if (got == 0) {
            if (kvt_clock_mono_ns() > until_ns)
                fail_msg("%u of %u transfers never came back", count - total, count);
            kvt_doorbell_arm(&world->bell);
            got = kvt_tier_reap(world->tier, done, INFLIGHT);
            if (got > 0)
                kvt_doorbell_disarm(&world->bell);
            else
                kvt_doorbell_wait(&world->bell, KVT_NS_PER_S);
        }
        for (uint32_t i = 0; i < got; i++) {
            assert_int_not_equal(done[i]->status, 12345);
            assert_int_equal(seen[done[i] - world->xfers]++, 0);
        }
        total += got;
    }
    assert_int_equal(total, count);
    assert_int_equal(kvt_tier_reap(world->tier, done, INFLIGHT), 0);
}

static void run(struct world *world, uint32_t count)
{
    submit(world, count);
    reap_once(world, count);
}

/* Writes generation first + i to disk slot i. */
static void write_all(struct world *world, uint64_t first)
{
    for (uint32_t i = 0; i < SLOTS; i++) {
        slot_fill(world, i, first + i);
        world->xfers[i] = xfer_make(world, false, i, i, first + i);
        world->xfers[i].flags = i % 4 == 0 ? KVT_XFER_BACKGROUND : 0;
    }
    run(world, SLOTS);
}

/* Reads disk slot i into the second half of memory, expecting first + i. Returns how many were
 * done; those are compared byte by byte with what was written. */
static uint32_t read_all(struct world *world, uint64_t first)
{
    uint32_t done = 0;

    memset(world->memory + SLOTS * world->slot_bytes, 0xdd, SLOTS * world->slot_bytes);
    for (uint32_t i = 0; i < SLOTS; i++)
        world->xfers[i] = xfer_make(world, true, SLOTS + i, i, first + i);
    run(world, SLOTS);
    for (uint32_t i = 0; i < SLOTS; i++) {
        if (world->xfers[i].status != KVT_XFER_DONE)
            continue;
        slot_fill(world, i, first + i);
        assert_memory_equal(world->memory + i * world->slot_bytes,
                            world->memory + (SLOTS + i) * world->slot_bytes,
                            world->xfers[i].header_bytes + PAYLOAD_BYTES);
        done++;
    }
    return done;
}

static uint32_t count_status(const struct world *world, int status)
{
    uint32_t count = 0;

    for (uint32_t i = 0; i < SLOTS; i++)
        count += world->xfers[i].status == status;
    return count;
}

static void flush_check(struct world *world, int status)
{
    world->xfers[0] = (struct kvt_xfer){.flags = KVT_XFER_FLUSH, .deadline_ns = KVT_TIME_NEVER_NS};
    run(world, 1);
    assert_int_equal(world->xfers[0].status, status);
}

static void round_trips(struct world *world, const char *detail)
{
    assert_int_equal(world_open_result(world), 0);
    print_message("L3: %s\n", world->tier->detail);
    if (strstr(world->tier->detail, detail) == NULL)
        fail_msg("detail lacks \"%s\"", detail);
    for (uint64_t round = 1; round < 5; round++) {
        write_all(world, round * 100);
        assert_int_equal(count_status(world, KVT_XFER_DONE), SLOTS);
        flush_check(world, KVT_XFER_DONE);
        assert_int_equal(read_all(world, round * 100), SLOTS);
    }
    assert_int_equal(read_all(world, 77), 0); /* whole slots, of others */
    assert_int_equal(count_status(world, KVT_XFER_BAD_SLOT), SLOTS);
    assert_int_equal(world->tier->counters.errors_bad_slot[KVT_SLOT_OTHER], SLOTS);
    assert_int_equal(world->tier->counters.writes, 4 * SLOTS);
    assert_int_equal(world->tier->counters.flushes, 4);
    world->tier = kvt_tier_close(world->tier);
}

static void test_round_trip(void **state)
{
    round_trips(*state, "io_uring, file registered");
}

static void test_fallbacks(void **state)
{
    struct world *world = *state;

    world->shim.register_buffers_result = -ENOMEM;
    round_trips(world, "memory not registered");
    world->shim.register_file_result = -EINVAL;
    round_trips(world, "file not registered");
    if (!is_raw)
        world->shim.direct_result = -EINVAL;
    round_trips(world, is_raw ? "O_DIRECT" : "no O_DIRECT");
    world->shim.ring_result = -EPERM;
    round_trips(world, "no io_uring");
    if (is_raw)
        return;
    world->shim.fallocate_result = -EOPNOTSUPP;
    assert_int_equal(unlink(world->path), 0);
    round_trips(world, "not preallocated");
}

static void health_wait(struct world *world, enum kvt_tier_health health)
{
    struct timespec pause = {.tv_nsec = 1000000};

    for (int i = 0; i < 10000 && atomic_load(&world->tier->counters.health) != health; i++)
        nanosleep(&pause, NULL);
    assert_int_equal(atomic_load(&world->tier->counters.health), health);
}

static void test_errors_by_kind(void **state)
{
    struct world *world = *state;
    static const int errors[] = {-EIO, -ENOSPC, -EINVAL, -EAGAIN, -EINTR, -EOPNOTSUPP};

    assert_int_equal(world_open_result(world), 0);
    for (size_t e = 0; e < KVT_COUNT_OF(errors); e++) {
        for (uint32_t every = 0; every < 4; every += 3) {
            atomic_store(&world->shim.fail_every, every);
            atomic_store(&world->shim.write_result, errors[e]);
            write_all(world, 1000 + e * 100);
            assert_int_equal(count_status(world, KVT_XFER_DONE) + count_status(world, errors[e]),
                             SLOTS);
            assert_true(every != 0 || count_status(world, errors[e]) == SLOTS);
            atomic_store(&world->shim.write_result, 0);
            write_all(world, 1000 + e * 100);
            assert_int_equal(count_status(world, KVT_XFER_DONE), SLOTS);
            atomic_store(&world->shim.read_result, errors[e]);
            (void)read_all(world, 1000 + e * 100);
            assert_int_equal(count_status(world, KVT_XFER_DONE) + count_status(world, errors[e]),
                             SLOTS);
            atomic_store(&world->shim.read_result, 0);
            assert_int_equal(read_all(world, 1000 + e * 100), SLOTS);
        }
        atomic_store(&world->shim.fail_every, 0);
        atomic_store(&world->shim.flush_result, errors[e]);
        flush_check(world, errors[e]);
        atomic_store(&world->shim.flush_result, 0);
        health_wait(world, KVT_TIER_HEALTH_OK); /* a flush that failed is an outage */
    }
    assert_true(world->tier->counters.errors_io > 0);
    assert_true(world->tier->counters.errors_no_space > 0);
    assert_int_equal(world->tier->counters.health, KVT_TIER_HEALTH_OK);
}

static void test_short(void **state)
{
    struct world *world = *state;

    assert_int_equal(world_open_result(world), 0);
    write_all(world, 500);
    /* Always short by a page: the rest is asked for once, comes short again, and that is it. */
    atomic_store(&world->shim.short_bytes, 8192);
    assert_int_equal(read_all(world, 500), 0);
    assert_int_equal(count_status(world, KVT_XFER_SHORT), SLOTS);
    write_all(world, 500);
    assert_int_equal(count_status(world, KVT_XFER_SHORT), SLOTS);
    /* A rest that cannot be asked for with O_DIRECT. */
    atomic_store(&world->shim.short_bytes, 100);
    assert_int_equal(read_all(world, 500), 0);
    assert_int_equal(count_status(world, KVT_XFER_SHORT), SLOTS);
    /* Once short: the rest comes. */
    atomic_store(&world->shim.is_short_once, true);
    atomic_store(&world->shim.short_bytes, 8192);
    assert_int_equal(read_all(world, 500), SLOTS);
    assert_int_equal(atomic_load(&world->shim.short_bytes), 0);
    assert_int_equal(world->tier->counters.errors_short, 3 * SLOTS);
}

static void test_repeated_completions(void **state)
{
    struct world *world = *state;

    assert_int_equal(world_open_result(world), 0);
    atomic_store(&world->shim.is_repeating, true);
    for (uint64_t round = 1; round < 40; round++) {
        write_all(world, round * 100);
        assert_int_equal(count_status(world, KVT_XFER_DONE), SLOTS);
        assert_int_equal(read_all(world, round * 100), SLOTS);
        /* With errors among them, an old success must not pass for a new one. */
        atomic_store(&world->shim.read_result, round % 3 == 0 ? -EIO : 0);
        atomic_store(&world->shim.short_bytes, round % 3 == 1 ? 4096 : 0);
        assert_int_equal(read_all(world, round * 100), round % 3 == 2 ? SLOTS : 0);
        atomic_store(&world->shim.read_result, 0);
        atomic_store(&world->shim.short_bytes, 0);
    }
}

static void test_held_back(void **state)
{
    struct world *world = *state;
    struct kvt_xfer *done[INFLIGHT];
    struct timespec pause = {.tv_nsec = 50000000};

    assert_int_equal(world_open_result(world), 0);
    write_all(world, 500);
    atomic_store(&world->shim.is_holding, true);
    for (uint32_t i = 0; i < SLOTS; i++)
        world->xfers[i] = xfer_make(world, true, SLOTS + i, i, 500 + i);
    submit(world, SLOTS);
    nanosleep(&pause, NULL);
    assert_int_equal(kvt_tier_reap(world->tier, done, INFLIGHT), 0);
    atomic_store(&world->shim.is_holding, false);
    reap_once(world, SLOTS);
    assert_int_equal(count_status(world, KVT_XFER_DONE), SLOTS);
}

/* A device that hangs keeps what it began; what it has not begun is late in time. */
static void test_hang_and_deadlines(void **state)
{
    struct world *world = *state;
    struct kvt_xfer *done[INFLIGHT];
    struct timespec pause = {.tv_nsec = 1000000};
    uint32_t late = 0;

    world->config.inflight_bytes_max = 4 * world->slot_bytes;
    assert_int_equal(world_open_result(world), 0);
    write_all(world, 500);
    atomic_store(&world->shim.is_holding, true);
    for (uint32_t i = 0; i < SLOTS; i++) {
        world->xfers[i] = xfer_make(world, true, SLOTS + i, i, 500 + i);
        world->xfers[i].deadline_ns = kvt_clock_mono_ns() + 200 * KVT_NS_PER_MS;
    }
    submit(world, SLOTS);
    for (int i = 0; i < 5000 && late < SLOTS - 4; i++) {
        late += kvt_tier_reap(world->tier, done + late, SLOTS);
        nanosleep(&pause, NULL);
    }
    assert_int_equal(late, SLOTS - 4);
    for (uint32_t i = 0; i < late; i++)
        assert_int_equal(done[i]->status, KVT_XFER_LATE);
    atomic_store(&world->shim.is_holding, false);
    for (int i = 0; i < 5000 && late < SLOTS; i++) {
        late += kvt_tier_reap(world->tier, done + late, SLOTS);
        nanosleep(&pause, NULL);
    }
    assert_int_equal(count_status(world, KVT_XFER_DONE), 4);
}

static void test_submit_refused(void **state)
{
    struct world *world = *state;

    assert_int_equal(world_open_result(world), 0);
    write_all(world, 500);
    /* For a while: asked again. */
    atomic_store(&world->shim.submit_result, -EBUSY);
    atomic_store(&world->shim.submit_failures, 5);
    assert_int_equal(read_all(world, 500), SLOTS);
    /* For good: those fail, the tier lives. */
    atomic_store(&world->shim.submit_result, -EBADF);
    atomic_store(&world->shim.submit_failures, 1000000);
    assert_int_equal(read_all(world, 500), 0);
    assert_int_equal(count_status(world, -EBADF), SLOTS);
    atomic_store(&world->shim.submit_failures, 0);
    assert_int_equal(read_all(world, 500), SLOTS);
}

static void outage(struct world *world)
{
    struct timespec pause = {.tv_nsec = 150000000};

    world->config.failures_max = 5;
    assert_int_equal(world_open_result(world), 0);
    write_all(world, 500);
    atomic_store(&world->shim.read_result, -EIO);
    assert_int_equal(read_all(world, 500), 0);
    assert_int_equal(atomic_load(&world->tier->counters.health), KVT_TIER_HEALTH_OUT);
    assert_true(count_status(world, -EIO) >= 5);
    assert_true(count_status(world, KVT_XFER_OUT_OF_SERVICE) > 0 || world->shim.ring_result == 0);
    assert_int_equal(count_status(world, -EIO) + count_status(world, KVT_XFER_OUT_OF_SERVICE),
                     SLOTS);
    /* Out: everything comes back at once, flushes too, and probes that fail change nothing. */
    nanosleep(&pause, NULL);
    write_all(world, 600);
    assert_int_equal(count_status(world, KVT_XFER_OUT_OF_SERVICE), SLOTS);
    flush_check(world, KVT_XFER_OUT_OF_SERVICE);
    /* The device is back: found by itself, and what was there is still there. */
    atomic_store(&world->shim.read_result, 0);
    health_wait(world, KVT_TIER_HEALTH_OK);
    assert_int_equal(read_all(world, 500), SLOTS);
    write_all(world, 700);
    flush_check(world, KVT_XFER_DONE);
    assert_int_equal(read_all(world, 700), SLOTS);
    assert_int_equal(world->tier->counters.outages, 1);
    /* Closing while it is out does not hang. */
    atomic_store(&world->shim.write_result, -EIO);
    write_all(world, 800);
    assert_int_equal(atomic_load(&world->tier->counters.outages), 2);
    world->tier = kvt_tier_close(world->tier);
    atomic_store(&world->shim.write_result, 0);
}

static void test_outage(void **state)
{
    outage(*state);
}

static void test_outage_plain_calls(void **state)
{
    struct world *world = *state;

    world->shim.ring_result = -EPERM;
    outage(world);
}

/* What a device holds past its deadline takes it out of service until it is given back. */
static void test_hang_is_outage(void **state)
{
    struct world *world = *state;
    struct kvt_xfer *list[SLOTS], *done[INFLIGHT];
    struct timespec pause = {.tv_nsec = 1000000};
    uint32_t taken = 0, back = 0;

    world->config.hang_ns = 20 * KVT_NS_PER_MS;
    assert_int_equal(world_open_result(world), 0);
    write_all(world, 500);
    atomic_store(&world->shim.is_holding, true);
    for (uint32_t i = 0; i < 4; i++) {
        world->xfers[SLOTS + i] = xfer_make(world, true, SLOTS + i, i, 500 + i);
        world->xfers[SLOTS + i].deadline_ns = kvt_clock_mono_ns() + 200 * KVT_NS_PER_MS;
        list[i] = &world->xfers[SLOTS + i];
    }
    assert_int_equal(kvt_tier_submit(world->tier, list, 4, &taken), 0);
    assert_int_equal(taken, 4);
    health_wait(world, KVT_TIER_HEALTH_OUT);
    /* New ones come back at once, although nothing completes. */
    for (uint32_t i = 0; i < 4; i++)
        world->xfers[i] = xfer_make(world, true, SLOTS + 8 + i, 8 + i, 508 + i);
    run(world, 4);
    for (uint32_t i = 0; i < 4; i++)
        assert_int_equal(world->xfers[i].status, KVT_XFER_OUT_OF_SERVICE);
    flush_check(world, KVT_XFER_OUT_OF_SERVICE);
    assert_int_equal(atomic_load(&world->tier->counters.health), KVT_TIER_HEALTH_OUT);
    atomic_store(&world->shim.is_holding, false);
    for (int i = 0; i < 5000 && back < 4; i++) {
        back += kvt_tier_reap(world->tier, done, INFLIGHT);
        nanosleep(&pause, NULL);
    }
    assert_int_equal(back, 4);
    for (uint32_t i = 0; i < 4; i++)
        assert_int_equal(world->xfers[SLOTS + i].status, KVT_XFER_DONE);
    health_wait(world, KVT_TIER_HEALTH_OK);
    assert_int_equal(read_all(world, 500), SLOTS);
    assert_int_equal(atomic_load(&world->tier->counters.outages), 1);
}

/* How long one outage lasts whose probe is good. */
static uint64_t outage_ns(struct world *world)
{
    uint64_t started_ns = kvt_clock_mono_ns();

    atomic_store(&world->shim.write_result, -EIO);
    write_all(world, 600);
    atomic_store(&world->shim.write_result, 0);
    health_wait(world, KVT_TIER_HEALTH_OK);
    return kvt_clock_mono_ns() - started_ns;
}

static void test_pause_grows_until_success(void **state)
{
    struct world *world = *state;

    world->config.failures_max = 5;
    world->config.retry_ns_max = 10 * KVT_NS_PER_S;
    atomic_store(&world->shim.is_probe_spared, true);
    assert_int_equal(world_open_result(world), 0);
    for (uint64_t pause_ms = 20; pause_ms <= 640; pause_ms *= 2)
        assert_true(outage_ns(world) >= pause_ms * KVT_NS_PER_MS);
    assert_int_equal(atomic_load(&world->tier->counters.outages), 6);
    write_all(world, 700);
    assert_int_equal(count_status(world, KVT_XFER_DONE), SLOTS);
    assert_true(outage_ns(world) < 1280 * KVT_NS_PER_MS); /* it began anew */
}

static void test_damage_is_outage(void **state)
{
    struct world *world = *state;
    uint8_t garbage[512];
    int fd;

    world->config.failures_max = 4;
    assert_int_equal(world_open_result(world), 0);
    write_all(world, 500);
    assert_int_equal(read_all(world, 77), 0); /* whole slots of others are no damage */
    assert_int_equal(count_status(world, KVT_XFER_BAD_SLOT), SLOTS);
    assert_int_equal(atomic_load(&world->tier->counters.outages), 0);
    memset(garbage, 0x5a, sizeof(garbage));
    fd = open(world->path, O_RDWR | O_CLOEXEC);
    assert_true(fd >= 0);
    for (uint32_t i = 0; i < SLOTS; i++)
        assert_int_equal(pwrite(fd, garbage, sizeof(garbage),
                                (off_t)(KVT_DISK_DATA_OFFSET_BYTES + i * world->slot_bytes + 8192)),
                         sizeof(garbage));
    close(fd);
    assert_int_equal(read_all(world, 500), 0);
    assert_true(count_status(world, KVT_XFER_BAD_SLOT) >= 16);
    assert_int_equal(atomic_load(&world->tier->counters.outages), 1);
    health_wait(world, KVT_TIER_HEALTH_OK);
    write_all(world, 500);
    assert_int_equal(read_all(world, 500), SLOTS);
    assert_int_equal(atomic_load(&world->tier->counters.outages), 1);
}

/* A flush behind many writes, foreground and background, ends after all of them. */
static void test_flush_is_last(void **state)
{
    struct world *world = *state;

    assert_int_equal(world_open_result(world), 0);
    for (int round = 0; round < 10; round++) {
        for (uint32_t i = 0; i < SLOTS; i++) {
            slot_fill(world, i, 900 + i);
            world->xfers[i] = xfer_make(world, false, i, i, 900 + i);
            world->xfers[i].flags = i % 2 == 0 ? KVT_XFER_BACKGROUND : 0;
        }
        world->xfers[SLOTS / 2] =
            (struct kvt_xfer){.flags = KVT_XFER_FLUSH, .deadline_ns = KVT_TIME_NEVER_NS};
        run(world, SLOTS);
        for (uint32_t i = 0; i < SLOTS / 2; i++)
            assert_true(world->xfers[i].done_ns <= world->xfers[SLOTS / 2].started_ns);
        assert_int_equal(count_status(world, KVT_XFER_DONE), SLOTS);
    }
}

static struct alloc_fault fault;

static void test_open_undoes_itself(void **state)
{
    struct world *world = *state;
    int failures = 0;

    kvt_alloc_set_fault(alloc_fault_nth, &fault);
    for (fault.fail_at = 1;; fault.fail_at++) {
        int r;

        fault.seen = 0;
        r = world_open_result(world);
        if (r == 0 && fault.seen < fault.fail_at)
            break;
        /* The ring and its registration have fallbacks. */
        assert_true(r == -ENOMEM || r == 0);
        failures += r < 0;
        world->tier = kvt_tier_close(world->tier);
    }
    kvt_alloc_set_fault(NULL, NULL);
    assert_true(failures >= 5);
}

#define WORLD_TEST(name) cmocka_unit_test_setup_teardown(name, world_make, world_free)

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        WORLD_TEST(test_round_trip),
        WORLD_TEST(test_fallbacks),
        WORLD_TEST(test_errors_by_kind),
        WORLD_TEST(test_short),
        WORLD_TEST(test_repeated_completions),
        WORLD_TEST(test_held_back),
        WORLD_TEST(test_hang_and_deadlines),
        WORLD_TEST(test_submit_refused),
        WORLD_TEST(test_outage),
        WORLD_TEST(test_outage_plain_calls),
        WORLD_TEST(test_hang_is_outage),
        WORLD_TEST(test_pause_grows_until_success),
        WORLD_TEST(test_damage_is_outage),
        WORLD_TEST(test_flush_is_last),
        WORLD_TEST(test_open_undoes_itself),
    };

    is_raw = argc > 1 && strcmp(argv[1], "raw") == 0;
    if (is_raw && loop_device_probe() < 0) {
        printf("SKIP: no loop device: %s\n", strerror(-loop_device_probe()));
        return 77;
    }
    return cmocka_run_group_tests(tests, NULL, NULL);
}
