/* The host and device tiers with their threads: every path between an engine's memory, L1 and L2,
 * byte for byte; deadlines, full rings, vanished clients, damaged slots; and that whatever was
 * submitted comes back exactly once. */
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include "daemon/base/alloc.h"
#include "daemon/base/clock.h"
#include "daemon/base/guard.h"
#include "daemon/base/hash.h"
#include "tests/common/alloc_fault.h"
#include "tests/common/cmocka.h"
#include "tiers/device/device.h"
#include "tiers/host/host.h"

#define BLOCK_TOKENS 64u
#define PIECES 4u
#define PIECE_BYTES 20000u
#define PAYLOAD_BYTES (PIECES * PIECE_BYTES)
#define ENGINE_BLOCKS 16u
#define INFLIGHT 32u

struct world {
    struct kvt_doorbell bell;
    struct kvt_tier *host, *device;
    int client_fd;
    struct kvt_region region;
    struct kvt_layout_piece pieces[PIECES];
    struct kvt_layout layout;
    uint64_t blocks[ENGINE_BLOCKS];
    uint32_t tokens[BLOCK_TOKENS];
    uint32_t header_bytes;
    uint64_t slot_bytes;
};

static int world_open(void **state)
{
    struct world *world = calloc(1, sizeof(*world));
    struct kvt_host_config host = {
        .bytes = 4 * KVT_MIB, .inflight_max = INFLIGHT, .doorbell = &world->bell};
    struct kvt_device_config device = {.backend = "host",
                                       .bytes = 2 * KVT_MIB,
                                       .inflight_max = INFLIGHT,
                                       .doorbell = &world->bell};
    uint64_t region_bytes = (uint64_t)PIECES * PIECE_BYTES * ENGINE_BLOCKS;
    struct kvt_device_report report;

    assert_int_equal(kvt_doorbell_init(&world->bell), 0);
    assert_int_equal(kvt_host_open(&world->host, &host), 0);
    device.host_memory = kvt_host_memory(world->host);
    device.host_memory_bytes = world->host->capacity_bytes;
    assert_int_equal(kvt_device_open(&world->device, &device, &report), 0);
    print_message("L2: %s\nL1: %s\n", world->host->detail, world->device->detail);
    world->client_fd = memfd_create("client", MFD_CLOEXEC);
    assert_int_equal(ftruncate(world->client_fd, (off_t)region_bytes), 0);
    world->region.base =
        mmap(NULL, region_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, world->client_fd, 0);
    world->region.bytes = world->region.mapped_bytes = region_bytes;
    world->region.is_mapped = true;
    for (uint32_t p = 0; p < PIECES; p++)
        world->pieces[p] =
            (struct kvt_layout_piece){.bytes = PIECE_BYTES,
                                      .stride_bytes = PIECE_BYTES,
                                      .offset_bytes = (uint64_t)p * PIECE_BYTES * ENGINE_BLOCKS};
    world->layout = (struct kvt_layout){
        .pieces_count = PIECES, .engine_blocks_per_block = 1, .pieces = world->pieces};
    assert_int_equal(kvt_layout_resolve(&world->layout, &world->region, 1, PAYLOAD_BYTES), 0);
    for (uint32_t b = 0; b < ENGINE_BLOCKS; b++)
        world->blocks[b] = b;
    world->header_bytes = kvt_slot_header_bytes(BLOCK_TOKENS);
    world->slot_bytes = kvt_slot_bytes(BLOCK_TOKENS, PAYLOAD_BYTES);
    *state = world;
    return 0;
}

static int world_close(void **state)
{
    struct world *world = *state;

    world->device = kvt_tier_close(world->device);
    world->host = kvt_tier_close(world->host);
    kvt_region_close(&world->region);
    close(world->client_fd);
    kvt_doorbell_deinit(&world->bell);
    free(world);
    return 0;
}

static void client_fill(struct world *world, uint32_t block, uint8_t salt)
{
    for (uint32_t p = 0; p < PIECES; p++)
        for (uint32_t i = 0; i < PIECE_BYTES; i++)
            world->pieces[p].base[block * PIECE_BYTES + i] =
                (uint8_t)(salt + block * 3 + p * 5 + i * 7 + i / 253);
}

static bool client_equal(const struct world *world, uint32_t a, uint32_t b)
{
    for (uint32_t p = 0; p < PIECES; p++)
        if (memcmp(world->pieces[p].base + a * PIECE_BYTES, world->pieces[p].base + b * PIECE_BYTES,
                   PIECE_BYTES) != 0)
            return false;
    return true;
}

static struct kvt_xfer xfer_make(const struct world *world, uint64_t generation)
{
    return (struct kvt_xfer){.key = {.block_id = 5,
                                     .generation = generation,
                                     .payload_bytes = PAYLOAD_BYTES,
                                     .block_tokens = BLOCK_TOKENS},
                             .header_bytes = world->header_bytes,
                             .slot_bytes = world->slot_bytes,
                             .deadline_ns = KVT_TIME_NEVER_NS,
                             .status = 12345};
}

static struct kvt_place place_client(const struct world *world, uint32_t block)
{
    return (struct kvt_place){.kind = KVT_PLACE_CLIENT,
                              .view = {.layout = &world->layout,
                                       .engine_blocks = &world->blocks[block],
                                       .end_piece = PIECES}};
}

static struct kvt_place place_host(const struct world *world, uint32_t slot)
{
    return (struct kvt_place){.kind = KVT_PLACE_HOST, .offset_bytes = slot * world->slot_bytes};
}

static struct kvt_place place_device(uint32_t slot)
{
    return (struct kvt_place){.kind = KVT_PLACE_DEVICE, .offset_bytes = slot * PAYLOAD_BYTES};
}

static uint8_t *host_slot(const struct world *world, uint32_t slot)
{
    return kvt_host_memory(world->host) + slot * world->slot_bytes;
}

static void header_write(const struct world *world, uint32_t slot, uint64_t generation)
{
    struct kvt_slot_info info = {.block_id = 5,
                                 .generation = generation,
                                 .payload_bytes = PAYLOAD_BYTES,
                                 .block_tokens = BLOCK_TOKENS};

    kvt_slot_header_write(host_slot(world, slot), &info, world->tokens);
}

/* As the engine's loop does: arm, look again, sleep. */
static uint32_t reap_all(struct world *world, struct kvt_tier *tier, struct kvt_xfer **ret_done,
                         uint32_t want)
{
    uint64_t until_ns = kvt_clock_mono_ns() + 20 * KVT_NS_PER_S;
    uint32_t count = 0;

    while (count < want && kvt_clock_mono_ns() < until_ns) {
        uint32_t got = kvt_tier_reap(tier, ret_done + count, want - count);

        count += got;
        if (got > 0)
            continue;
        kvt_doorbell_arm(&world->bell);
        got = kvt_tier_reap(tier, ret_done + count, want - count);
        count += got;
        if (got > 0)
            kvt_doorbell_disarm(&world->bell);
        else
            kvt_doorbell_wait(&world->bell, KVT_NS_PER_S);
    }
    return count;
}

static int do_one(struct world *world, struct kvt_tier *tier, struct kvt_xfer *xfer)
{
    struct kvt_xfer *done = NULL;
    uint32_t taken = 0;

    assert_int_equal(kvt_tier_submit(tier, &xfer, 1, &taken), 0);
    assert_int_equal(taken, 1);
    assert_int_equal(reap_all(world, tier, &done, 1), 1);
    assert_ptr_equal(done, xfer);
    assert_true(xfer->done_ns >= xfer->started_ns);
    return xfer->status;
}

static void test_round_trip_host(void **state)
{
    struct world *world = *state;
    struct kvt_xfer xfer = xfer_make(world, 1);

    client_fill(world, 2, 9);
    client_fill(world, 3, 0);
    header_write(world, 4, 1);
    xfer.src = place_client(world, 2);
    xfer.dst = place_host(world, 4);
    assert_int_equal(do_one(world, world->host, &xfer), KVT_XFER_DONE);
    assert_int_equal(kvt_slot_check(host_slot(world, 4), &xfer.key), KVT_SLOT_OK);
    assert_false(client_equal(world, 2, 3));
    xfer.src = place_host(world, 4);
    xfer.dst = place_client(world, 3);
    xfer.flags = KVT_XFER_VERIFY;
    assert_int_equal(do_one(world, world->host, &xfer), KVT_XFER_DONE);
    assert_true(client_equal(world, 2, 3));
    assert_int_equal(world->host->counters.writes, 1);
    assert_int_equal(world->host->counters.reads, 1);
    assert_int_equal(world->host->counters.read_bytes, PAYLOAD_BYTES);
}

static void test_layer_groups(void **state)
{
    struct world *world = *state;
    struct kvt_xfer xfer = xfer_make(world, 1);

    client_fill(world, 2, 9);
    client_fill(world, 3, 77);
    header_write(world, 4, 1);
    xfer.src = place_client(world, 2);
    xfer.dst = place_host(world, 4);
    assert_int_equal(do_one(world, world->host, &xfer), KVT_XFER_DONE);
    xfer.src = place_host(world, 4);
    for (uint32_t p = 0; p < PIECES; p += 2) {
        assert_false(client_equal(world, 2, 3));
        xfer.dst = place_client(world, 3);
        xfer.dst.view.first_piece = p;
        xfer.dst.view.end_piece = p + 2;
        assert_int_equal(do_one(world, world->host, &xfer), KVT_XFER_DONE);
    }
    assert_true(client_equal(world, 2, 3));
}

static void test_round_trip_device(void **state)
{
    struct world *world = *state;
    struct kvt_xfer xfer = xfer_make(world, 8);
    static const struct {
        int from, to;
    } hops[] = {{0, 1}, {1, 2}, {2, 3}, {3, 4}};

    client_fill(world, 0, 21);
    client_fill(world, 1, 0);
    header_write(world, 7, 8);
    for (size_t i = 0; i < KVT_COUNT_OF(hops); i++) {
        struct kvt_place places[] = {place_client(world, 0), place_device(3), place_host(world, 7),
                                     place_device(5), place_client(world, 1)};

        xfer.src = places[hops[i].from];
        xfer.dst = places[hops[i].to];
        xfer.flags = KVT_XFER_VERIFY;
        assert_int_equal(do_one(world, world->device, &xfer), KVT_XFER_DONE);
    }
    assert_true(client_equal(world, 0, 1));
    assert_int_equal(kvt_slot_check(host_slot(world, 7), &xfer.key), KVT_SLOT_OK);
    /* The device's copy hashes as the client's does. */
    assert_int_equal(kvt_slot_payload_hash(host_slot(world, 7)),
                     kvt_hash64(host_slot(world, 7) + world->header_bytes, PAYLOAD_BYTES, 0));
}

static void test_damage_is_seen(void **state)
{
    struct world *world = *state;
    struct kvt_xfer xfer = xfer_make(world, 1);

    client_fill(world, 2, 9);
    header_write(world, 4, 1);
    xfer.src = place_client(world, 2);
    xfer.dst = place_host(world, 4);
    assert_int_equal(do_one(world, world->host, &xfer), KVT_XFER_DONE);
    host_slot(world, 4)[world->header_bytes + 70001] ^= 4;
    xfer.src = place_host(world, 4);
    xfer.flags = KVT_XFER_VERIFY;
    for (int i = 0; i < 2; i++) {
        xfer.dst = i == 0 ? place_client(world, 3) : place_device(1);
        assert_int_equal(do_one(world, i == 0 ? world->host : world->device, &xfer),
                         KVT_XFER_BAD_SLOT);
        assert_int_equal(xfer.verdict, KVT_SLOT_BAD_PAYLOAD);
    }
    host_slot(world, 4)[world->header_bytes + 70001] ^= 4;
    xfer.key.generation = 2;
    xfer.dst = place_client(world, 3);
    assert_int_equal(do_one(world, world->host, &xfer), KVT_XFER_BAD_SLOT);
    assert_int_equal(xfer.verdict, KVT_SLOT_OTHER);
    assert_int_equal(world->host->counters.errors_bad_slot[KVT_SLOT_BAD_PAYLOAD], 1);
    assert_int_equal(world->host->counters.errors_bad_slot[KVT_SLOT_OTHER], 1);
}

static void test_client_vanishes(void **state)
{
    struct world *world = *state;
    struct kvt_xfer xfer = xfer_make(world, 1);
    uint64_t bytes = world->region.bytes;

    assert_int_equal(kvt_guard_install(), 0); /* cmocka has put its own handler in place */
    header_write(world, 4, 1);
    assert_int_equal(ftruncate(world->client_fd, 4096), 0);
    for (int i = 0; i < 4; i++) {
        struct kvt_place client = place_client(world, 2);
        struct kvt_place own = i < 2 ? place_host(world, 4) : place_device(1);

        xfer.src = i % 2 == 0 ? client : own;
        xfer.dst = i % 2 == 0 ? own : client;
        assert_int_equal(do_one(world, i < 2 ? world->host : world->device, &xfer),
                         KVT_XFER_CLIENT_GONE);
    }
    assert_int_equal(world->host->counters.errors_client_gone, 2);
    /* And only those: with its memory back the same client is served. */
    assert_int_equal(ftruncate(world->client_fd, (off_t)bytes), 0);
    xfer.src = place_client(world, 2);
    xfer.dst = place_host(world, 4);
    assert_int_equal(do_one(world, world->host, &xfer), KVT_XFER_DONE);
}

static void test_deadline(void **state)
{
    struct world *world = *state;
    struct kvt_xfer xfer = xfer_make(world, 1);

    xfer.src = place_client(world, 2);
    xfer.dst = place_host(world, 4);
    xfer.deadline_ns = 1;
    memset(host_slot(world, 4), 0x77, 64);
    assert_int_equal(do_one(world, world->host, &xfer), KVT_XFER_LATE);
    assert_int_equal(host_slot(world, 4)[0], 0x77);
    assert_int_equal(world->host->counters.errors_late, 1);
}

/* More than the tier takes, foreground and background mixed: a prefix is taken, the rest refused,
 * and each comes back once. */
static void test_bounded_and_once(void **state)
{
    struct world *world = *state;
    struct kvt_xfer xfers[INFLIGHT * 2], *list[INFLIGHT * 2], *done[INFLIGHT * 2];
    uint32_t taken = 0, seen[INFLIGHT * 2] = {0};
    int r;

    client_fill(world, 2, 9);
    for (uint32_t round = 0; round < 50; round++) {
        for (uint32_t i = 0; i < INFLIGHT * 2; i++) {
            xfers[i] = xfer_make(world, i + 1);
            xfers[i].src = place_client(world, 2);
            xfers[i].dst = place_host(world, i % 32);
            xfers[i].flags = i % 3 == 0 ? KVT_XFER_BACKGROUND : 0;
            if (i < INFLIGHT)
                header_write(world, i, i + 1);
            list[i] = &xfers[i];
        }
        assert_int_equal(kvt_tier_submit(world->host, list, INFLIGHT * 2, &taken), 0);
        assert_int_equal(taken, INFLIGHT);
        r = kvt_tier_submit(world->host, list + taken, INFLIGHT, &taken);
        assert_int_equal(r, KVT_TIER_E_FULL);
        assert_int_equal(reap_all(world, world->host, done, INFLIGHT), INFLIGHT);
        assert_int_equal(kvt_tier_reap(world->host, done + INFLIGHT, 1), 0);
        for (uint32_t i = 0; i < INFLIGHT; i++) {
            assert_int_equal(done[i]->status, KVT_XFER_DONE);
            seen[done[i] - xfers]++;
        }
    }
    for (uint32_t i = 0; i < INFLIGHT; i++)
        assert_int_equal(seen[i], 50);
}

static void test_foreground_first(void **state)
{
    struct world *world = *state;
    struct kvt_xfer xfers[INFLIGHT], *list[INFLIGHT], *done[INFLIGHT];
    uint32_t taken = 0, background_before = 0;

    for (uint32_t i = 0; i < INFLIGHT; i++) {
        xfers[i] = xfer_make(world, i + 1);
        xfers[i].src = place_client(world, 2);
        xfers[i].dst = place_host(world, i);
        xfers[i].flags = i < INFLIGHT - 8 ? KVT_XFER_BACKGROUND : 0;
        header_write(world, i, i + 1);
        list[i] = &xfers[i];
    }
    /* One batch, so the thread sees all of it when it wakes, or a few background ones early. */
    assert_int_equal(kvt_tier_submit(world->host, list, INFLIGHT, &taken), 0);
    assert_int_equal(reap_all(world, world->host, done, INFLIGHT), INFLIGHT);
    for (uint32_t i = 0, foreground = 0; foreground < 8; i++) {
        foreground += !(done[i]->flags & KVT_XFER_BACKGROUND);
        background_before += !!(done[i]->flags & KVT_XFER_BACKGROUND);
    }
    assert_true(background_before < INFLIGHT - 8);
}

static struct alloc_fault fault;

static void test_open_undoes_itself(void **state)
{
    struct kvt_doorbell bell = KVT_DOORBELL_NULL;
    struct kvt_host_config host = {.bytes = KVT_MIB, .inflight_max = 4, .doorbell = &bell};
    struct kvt_device_config device = {
        .backend = "host", .bytes = KVT_MIB, .inflight_max = 4, .doorbell = &bell};
    const struct kvt_device_config cuda = {.backend = "cuda",
                                           .gpus = "GPU-ffffffff-0000", /* nobody has it */
                                           .bytes = 2 * KVT_MIB,
                                           .staging_bytes = 2 * KVT_MIB,
                                           .inflight_bytes_max = KVT_MIB,
                                           .streams = 1,
                                           .retry_min_ns = 1,
                                           .retry_max_ns = 1,
                                           .inflight_max = 4,
                                           .doorbell = &bell};
    struct kvt_device_report report;
    struct kvt_tier *tier = NULL;
    int failures = 0;

    (void)state;
    assert_int_equal(kvt_doorbell_init(&bell), 0);
    kvt_alloc_set_fault(alloc_fault_nth, &fault);
    for (int which = 0; which < 2; which++) {
        for (fault.fail_at = 1;; fault.fail_at++) {
            int r;

            fault.seen = 0;
            r = which == 0 ? kvt_host_open(&tier, &host) : kvt_device_open(&tier, &device, &report);
            if (r == 0)
                break;
            assert_int_equal(r, -ENOMEM);
            assert_null(tier);
            failures++;
        }
        tier = kvt_tier_close(tier);
    }
    kvt_alloc_set_fault(NULL, NULL);
    assert_int_equal(failures, 6);
    host.bytes = 100;
    assert_int_equal(kvt_host_open(&tier, &host), -EINVAL);
    assert_int_equal(kvt_device_open(&tier, &cuda, &report), KVT_DEVICE_E_NONE);
    assert_true(strlen(report.why) > 0);
    device.backend = "tpu";
    assert_int_equal(kvt_device_open(&tier, &device, &report), -EINVAL);
    kvt_doorbell_deinit(&bell);
}

/* What is asked for by name is got or refused; what cannot be locked is said. */
static void test_pages(void **state)
{
    struct kvt_doorbell bell = KVT_DOORBELL_NULL;
    struct kvt_host_config config = {
        .bytes = 4 * KVT_MIB + 12345, .inflight_max = 4, .doorbell = &bell};
    struct kvt_tier *tier = NULL;
    struct rlimit saved, none = {0};

    (void)state;
    assert_int_equal(kvt_doorbell_init(&bell), 0);
    for (int pages = KVT_HOST_PAGES_AUTO; pages <= KVT_HOST_PAGES_PLAIN; pages++) {
        int r;

        config.pages = (enum kvt_host_pages)pages;
        r = kvt_host_open(&tier, &config);
        print_message("pages %d: %s\n", pages, r == 0 ? tier->detail : strerror(-r));
        if (pages == KVT_HOST_PAGES_AUTO || pages == KVT_HOST_PAGES_PLAIN)
            assert_int_equal(r, 0);
        if (r < 0)
            continue;
        assert_int_equal(tier->capacity_bytes, 4 * KVT_MIB);
        assert_int_equal((uintptr_t)kvt_host_memory(tier) % KVT_HUGE_PAGE_BYTES, 0);
        if (pages == KVT_HOST_PAGES_PLAIN)
            assert_non_null(strstr(tier->detail, "memfd, plain pages, "));
        if (pages == KVT_HOST_PAGES_AUTO && strstr(tier->detail, "plain") != NULL)
            assert_non_null(strstr(tier->detail, "pages: anonymous"));
        assert_int_equal(kvt_host_memfd(tier) < 0, pages == KVT_HOST_PAGES_ANONYMOUS);
        assert_int_equal(strncmp(tier->detail, "anonymous, transparent huge", 27) == 0,
                         pages == KVT_HOST_PAGES_ANONYMOUS);
        tier = kvt_tier_close(tier);
    }
    /* CAP_IPC_LOCK passes the limit, so both answers are possible, but they must agree. */
    config.pages = KVT_HOST_PAGES_PLAIN;
    assert_int_equal(getrlimit(RLIMIT_MEMLOCK, &saved), 0);
    none.rlim_max = saved.rlim_max;
    assert_int_equal(setrlimit(RLIMIT_MEMLOCK, &none), 0);
    assert_int_equal(kvt_host_open(&tier, &config), 0);
    config.is_locked_required = true;
    if (strstr(tier->detail, "not locked") != NULL) {
        tier = kvt_tier_close(tier);
        assert_true(kvt_host_open(&tier, &config) < 0);
    } else {
        tier = kvt_tier_close(tier);
        assert_int_equal(kvt_host_open(&tier, &config), 0);
        tier = kvt_tier_close(tier);
    }
    assert_int_equal(setrlimit(RLIMIT_MEMLOCK, &saved), 0);
    kvt_doorbell_deinit(&bell);
}

#define WORLD_TEST(name) cmocka_unit_test_setup_teardown(name, world_open, world_close)

int main(void)
{
    const struct CMUnitTest tests[] = {
        WORLD_TEST(test_round_trip_host),          WORLD_TEST(test_layer_groups),
        WORLD_TEST(test_round_trip_device),        WORLD_TEST(test_damage_is_seen),
        WORLD_TEST(test_client_vanishes),          WORLD_TEST(test_deadline),
        WORLD_TEST(test_bounded_and_once),         WORLD_TEST(test_foreground_first),
        cmocka_unit_test(test_open_undoes_itself), cmocka_unit_test(test_pages),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
