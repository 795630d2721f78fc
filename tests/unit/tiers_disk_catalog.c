/* The catalog of an L3 device: what is written is read, whatever happens to one of its copies, and
 * a write that fails at any call leaves the record before or the new one, never another. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "daemon/base/bytes.h"
#include "tests/common/cmocka.h"
#include "tests/common/disk_shim.h"
#include "tiers/disk/catalog.h"

struct world {
    struct disk_shim shim;
    struct kvt_disk_config config;
    struct kvt_disk_file file;
    struct kvt_disk_report report;
    struct kvt_disk_catalog catalog;
    struct kvt_disk_ns_record ns;
    char dir[64], path[96];
};

static void open_again(struct world *world)
{
    kvt_disk_file_close(&world->file);
    assert_int_equal(
        kvt_disk_file_open(&world->file, &world->shim.io, &world->config, &world->report), 0);
}

static int world_make(void **state)
{
    struct world *world = calloc(1, sizeof(*world));

    disk_shim_init(&world->shim);
    snprintf(world->dir, sizeof(world->dir), "kvt-catalog-XXXXXX");
    assert_non_null(mkdtemp(world->dir));
    snprintf(world->path, sizeof(world->path), "%s/l3", world->dir);
    world->file.fd = world->file.hold_fd = world->file.lock_fd = -1;
    world->config = (struct kvt_disk_config){.path = world->path,
                                             .bytes = KVT_DISK_DATA_OFFSET_BYTES + (64u << 10)};
    open_again(world);
    *state = world;
    return 0;
}

static int world_free(void **state)
{
    struct world *world = *state;
    char lock[128];

    kvt_disk_file_close(&world->file);
    snprintf(lock, sizeof(lock), "%s.lock", world->path);
    (void)unlink(lock);
    (void)unlink(world->path);
    assert_int_equal(rmdir(world->dir), 0);
    free(world);
    return 0;
}

/* A namespace that is a function of @seed. */
static void ns_make(struct kvt_disk_ns_record *ns, uint32_t seed)
{
    memset(ns, 0, sizeof(*ns));
    ns->is_used = seed % 7 != 0;
    ns->epoch = seed * 3ull;
    ns->spec_bytes = ns->is_used ? seed * 131 % (KVT_DISK_SPEC_BYTES_MAX + 1) : 0;
    for (uint32_t i = 0; i < KVT_FINGERPRINT_BYTES; i++)
        ns->fingerprint[i] = (uint8_t)(seed + i);
    for (uint32_t i = 0; i < ns->spec_bytes; i++)
        ns->spec[i] = (uint8_t)(seed * 5 + i * 3);
}

static struct kvt_disk_state state_make(uint32_t seed)
{
    return (struct kvt_disk_state){
        .stamps_end = seed * 1000ull, .starts = seed, .written_bytes = seed * 4096ull};
}

static int put(struct world *world, uint32_t number, uint32_t seed)
{
    static uint8_t data[KVT_DISK_NS_BYTES_MAX];
    struct kvt_disk_state state = state_make(seed);
    uint32_t bytes = KVT_DISK_STATE_BYTES;

    if (number == KVT_DISK_CATALOG_STATE) {
        kvt_disk_catalog_encode_state(data, &state);
    } else {
        ns_make(&world->ns, seed);
        bytes = kvt_disk_catalog_encode_ns(data, &world->ns);
    }
    return kvt_disk_catalog_write(&world->file, &world->shim.io, number, data, bytes);
}

static void get(struct world *world)
{
    memset(&world->catalog, 0x33, sizeof(world->catalog));
    assert_int_equal(kvt_disk_catalog_read(&world->file, &world->shim.io, &world->catalog), 0);
}

static bool holds(struct world *world, uint32_t number, uint32_t seed)
{
    struct kvt_disk_state state = state_make(seed);

    if (number == KVT_DISK_CATALOG_STATE)
        return world->catalog.has_state &&
               memcmp(&world->catalog.state, &state, sizeof(state)) == 0;
    ns_make(&world->ns, seed);
    return memcmp(&world->catalog.namespaces[number], &world->ns, sizeof(world->ns)) == 0;
}

static void test_encodings(void **state)
{
    static uint8_t data[KVT_DISK_NS_BYTES_MAX + 8], again[KVT_DISK_NS_BYTES_MAX];
    static struct kvt_disk_ns_record ns, back;
    struct kvt_disk_state device = state_make(9), device_back;

    (void)state;
    for (uint32_t seed = 0; seed < 130; seed++) {
        uint32_t bytes;

        ns_make(&ns, seed);
        ns.spec_bytes = seed == 129 ? KVT_DISK_SPEC_BYTES_MAX : ns.spec_bytes;
        bytes = kvt_disk_catalog_encode_ns(data, &ns);
        assert_true(bytes <= KVT_DISK_NS_BYTES_MAX);
        assert_true(kvt_disk_catalog_decode_ns(data, bytes, &back));
        assert_memory_equal(&back, &ns, sizeof(ns));
        assert_false(kvt_disk_catalog_decode_ns(data, bytes - 1, &back));
        assert_false(kvt_disk_catalog_decode_ns(data, bytes + 1, &back));
        assert_false(kvt_disk_catalog_decode_ns(data, 55, &back));
        assert_int_equal(kvt_disk_catalog_encode_ns(again, &back), bytes); /* left alone */
        assert_memory_equal(again, data, bytes);
        data[0] |= 2; /* a flag that is not known */
        assert_false(kvt_disk_catalog_decode_ns(data, bytes, &back));
    }
    kvt_disk_catalog_encode_state(data, &device);
    assert_true(kvt_disk_catalog_decode_state(data, KVT_DISK_STATE_BYTES, &device_back));
    assert_memory_equal(&device, &device_back, sizeof(device));
    assert_false(kvt_disk_catalog_decode_state(data, KVT_DISK_STATE_BYTES - 1, &device_back));
    assert_false(kvt_disk_catalog_decode_state(data, KVT_DISK_STATE_BYTES + 1, &device_back));
    kvt_put_u64(data, 0, KVT_DISK_STAMPS_MAX + 1);
    assert_false(kvt_disk_catalog_decode_state(data, KVT_DISK_STATE_BYTES, &device_back));
}

static void test_written_and_read(void **state)
{
    struct world *world = *state;
    static uint8_t data[KVT_DISK_NS_BYTES_MAX + 1];

    get(world);
    assert_false(world->catalog.has_state);
    assert_int_equal(world->catalog.copies_bad + world->catalog.records_lost, 0);
    for (uint32_t round = 0; round < 3; round++) {
        for (uint32_t number = 0; number < KVT_DISK_CATALOG_RECORDS; number += round + 1)
            assert_int_equal(put(world, number, 100 * round + number), 0);
        if (round == 1)
            open_again(world);
        get(world);
        assert_int_equal(world->catalog.copies_bad + world->catalog.records_lost, 0);
        for (uint32_t number = 0; number < KVT_DISK_CATALOG_RECORDS; number += round + 1)
            assert_true(holds(world, number, 100 * round + number));
    }
    /* What is not an encoding is not written. */
    assert_int_equal(kvt_disk_catalog_write(&world->file, &world->shim.io, 65, data, 56), -EINVAL);
    assert_int_equal(kvt_disk_catalog_write(&world->file, &world->shim.io, 3, data, sizeof(data)),
                     -EINVAL);
    assert_int_equal(kvt_disk_catalog_write(&world->file, &world->shim.io, 3, data, 57), -EINVAL);
    assert_int_equal(kvt_disk_catalog_write(&world->file, &world->shim.io, 64, data, 25), -EINVAL);
    /* Nothing lies where data or the superblock is. */
    open_again(world);
    assert_false(world->report.is_made);
}

static void test_records_do_not_overlap(void **state)
{
    uint64_t end_bytes = 2 * KVT_DISK_SUPER_BYTES;
    uint32_t order[KVT_DISK_CATALOG_RECORDS], count = 0;

    (void)state;
    order[count++] = KVT_DISK_CATALOG_STATE;
    for (uint32_t number = 0; number < KVT_NAMESPACES_MAX; number++)
        order[count++] = number;
    for (uint32_t i = 0; i < count; i++) {
        for (uint32_t copy = 0; copy < 2; copy++) {
            assert_true(kvt_disk_record_offset(order[i], copy) >= end_bytes);
            end_bytes = kvt_disk_record_offset(order[i], copy) + kvt_disk_record_bytes(order[i]);
            assert_int_equal(end_bytes % KVT_DIO_ALIGN_BYTES, 0);
        }
    }
    assert_int_equal(end_bytes, KVT_DISK_DATA_OFFSET_BYTES);
}

static void test_flips_decode(void **state)
{
    static uint8_t record[KVT_DISK_RECORD_BYTES_MAX], data[KVT_DISK_NS_BYTES_MAX];
    static struct kvt_disk_ns_record ns;
    uint8_t uuid[16] = {7}, other[16] = {8};
    uint64_t serial;
    uint32_t bytes, back_bytes;

    (void)state;
    ns_make(&ns, 60);
    bytes = kvt_disk_catalog_encode_ns(data, &ns);
    kvt_disk_record_encode(record, 5, uuid, 12, data, bytes);
    assert_non_null(kvt_disk_record_decode(record, 5, uuid, &serial, &back_bytes));
    assert_int_equal(serial, 12);
    assert_int_equal(back_bytes, bytes);
    assert_null(kvt_disk_record_decode(record, 6, uuid, &serial, &back_bytes));
    assert_null(kvt_disk_record_decode(record, 5, other, &serial, &back_bytes));
    for (uint32_t at = 0; at < sizeof(record); at++) {
        record[at] ^= (uint8_t)(1u << at % 8);
        assert_null(kvt_disk_record_decode(record, 5, uuid, &serial, &back_bytes));
        record[at] ^= (uint8_t)(1u << at % 8);
    }
    assert_non_null(kvt_disk_record_decode(record, 5, uuid, &serial, &back_bytes));
}

static void damage(struct world *world, uint64_t offset_bytes)
{
    int fd = open(world->path, O_RDWR | O_CLOEXEC);
    uint8_t byte;

    assert_int_equal(pread(fd, &byte, 1, (off_t)offset_bytes), 1);
    byte ^= 0x40;
    assert_int_equal(pwrite(fd, &byte, 1, (off_t)offset_bytes), 1);
    close(fd);
}

/* The last written record is served by either copy, not the one before it. */
static void test_one_copy_is_enough(void **state)
{
    static const uint32_t numbers[] = {0, 1, 17, 63, KVT_DISK_CATALOG_STATE};
    struct world *world = *state;

    for (size_t i = 0; i < KVT_COUNT_OF(numbers); i++) {
        for (uint32_t seed = 1; seed < 20; seed++) {
            uint32_t copy = seed % 2;
            uint64_t at = kvt_disk_record_offset(numbers[i], copy);

            assert_int_equal(put(world, numbers[i], seed), 0);
            damage(world, at + seed * 211 % kvt_disk_record_bytes(numbers[i]));
            get(world);
            assert_true(holds(world, numbers[i], seed));
            assert_int_equal(world->catalog.copies_bad, 1);
            assert_int_equal(world->catalog.records_lost, 0);
        }
        assert_int_equal(put(world, numbers[i], 50), 0); /* whole again */
        get(world);
        assert_int_equal(world->catalog.copies_bad, 0);
    }
    damage(world, kvt_disk_record_offset(17, 0) + 20);
    damage(world, kvt_disk_record_offset(17, 1) + 70);
    get(world);
    assert_int_equal(world->catalog.records_lost, 1);
    assert_false(world->catalog.namespaces[17].is_used);
    assert_true(holds(world, 63, 50) && holds(world, KVT_DISK_CATALOG_STATE, 50));
    assert_int_equal(put(world, 17, 3), 0);
    get(world);
    assert_true(holds(world, 17, 3) && world->catalog.records_lost == 0);
}

static void copy_break(struct world *world, uint32_t number, uint32_t copy)
{
    int fd = open(world->path, O_WRONLY | O_CLOEXEC);
    off_t at = (off_t)kvt_disk_record_offset(number, copy) + 20;

    assert_int_equal(pwrite(fd, "rot", 3, at), 3);
    assert_int_equal(close(fd), 0);
}

/* A write that was cut short between its copies counts, and so it does when the copy that it
 * reached rots after the next start: the record before does not come back. */
static void test_healed(void **state)
{
    static const uint32_t numbers[] = {0, 63, KVT_DISK_CATALOG_STATE};
    struct world *world = *state;

    for (size_t i = 0; i < KVT_COUNT_OF(numbers); i++) {
        for (uint32_t seed = 2; seed < 6; seed++) { /* either copy is the older one */
            uint32_t copy = 0;

            assert_int_equal(put(world, numbers[i], seed - 1), 0);
            /* Of the calls two read and one writes; the flush of the first copy fails. */
            world->shim.calls = 0;
            world->shim.fail_call = 4;
            world->shim.call_result = -EIO;
            world->shim.is_failing_on = true;
            assert_int_equal(put(world, numbers[i], seed), -EIO);
            world->shim.fail_call = 0;
            kvt_disk_catalog_heal(&world->file, &world->shim.io);
            get(world);
            assert_true(holds(world, numbers[i], seed));
            assert_int_equal(world->catalog.copies_bad, 0);
            for (copy = 0; copy < 2; copy++) {
                copy_break(world, numbers[i], copy);
                open_again(world);
                get(world);
                assert_true(holds(world, numbers[i], seed));
                assert_int_equal(world->catalog.copies_bad, 1);
                kvt_disk_catalog_heal(&world->file, &world->shim.io);
                get(world);
                assert_true(holds(world, numbers[i], seed));
                assert_int_equal(world->catalog.copies_bad, 0);
            }
        }
    }
    /* What is nowhere valid is not made up, and a device that refuses changes nothing. */
    copy_break(world, 0, 0);
    copy_break(world, 0, 1);
    copy_break(world, 63, 1);
    open_again(world);
    world->shim.pwrite_result = -EIO;
    kvt_disk_catalog_heal(&world->file, &world->shim.io);
    world->shim.pwrite_result = 0;
    get(world);
    assert_int_equal(world->catalog.records_lost, 1);
    assert_int_equal(world->catalog.copies_bad, 1);
    assert_true(holds(world, 63, 5));
}

static void test_each_call_fails(void **state)
{
    static const uint32_t numbers[] = {4, KVT_DISK_CATALOG_STATE};
    struct world *world = *state;
    uint32_t failures = 0;

    for (uint32_t i = 0; i < 2 * KVT_COUNT_OF(numbers); i++) {
        uint32_t number = numbers[i / 2], before = 10, call = 0;
        int r;

        assert_int_equal(put(world, 5, 11), 0);
        assert_int_equal(put(world, number, before), 0);
        world->shim.call_result = -EIO;
        world->shim.is_tearing = true;
        world->shim.is_failing_on = i % 2;
        do {
            uint32_t seed = 1000 + ++call;

            world->shim.fail_call = call;
            world->shim.calls = 0;
            r = put(world, number, seed);
            world->shim.fail_call = 0;
            failures += r < 0;
            get(world);
            assert_true(holds(world, number, seed) || (r < 0 && holds(world, number, before)));
            assert_true(holds(world, 5, 11));
            assert_int_equal(world->catalog.records_lost, 0);
            before = holds(world, number, seed) ? seed : before;
        } while (world->shim.calls >= call);
        assert_int_equal(r, 0);
        assert_true(call > 6);
    }
    assert_true(failures >= 4 * 4);
    atomic_store(&world->shim.read_result, -EIO);
    assert_int_equal(kvt_disk_catalog_read(&world->file, &world->shim.io, &world->catalog), -EIO);
    atomic_store(&world->shim.read_result, 0);
}

/* What an earlier life of the file left is not taken for a record. */
static void test_other_uuid(void **state)
{
    struct world *world = *state;
    static uint8_t old[KVT_DISK_RECORD_BYTES_MAX];
    int fd;

    assert_int_equal(put(world, 2, 8), 0);
    fd = open(world->path, O_RDWR | O_CLOEXEC);
    assert_int_equal(pread(fd, old, sizeof(old), (off_t)kvt_disk_record_offset(2, 0)), sizeof(old));
    memset(world->config.store_id, 1, 16);
    world->config.is_format = true;
    open_again(world);
    assert_true(world->report.is_made);
    get(world);
    assert_int_equal(world->catalog.records_lost, 0);
    assert_false(world->catalog.namespaces[2].is_used);
    assert_int_equal(pwrite(fd, old, sizeof(old), (off_t)kvt_disk_record_offset(2, 0)),
                     sizeof(old));
    close(fd);
    get(world);
    assert_false(world->catalog.namespaces[2].is_used);
    assert_int_equal(world->catalog.records_lost, 1);
}

/* They rise with the clock, have room for what a start reserves, and end well before the numbers.
 */
static void test_stamps_at(void **state)
{
    const uint64_t begin_s = 1704067200, day_s = 86400, s = KVT_NS_PER_S;

    (void)state;
    assert_int_equal(kvt_disk_stamps_at(0), 0);
    assert_int_equal(kvt_disk_stamps_at(begin_s * s), 0);
    assert_int_equal(kvt_disk_stamps_at((begin_s + 1) * s), KVT_DISK_STAMPS_SECOND);
    assert_int_equal(kvt_disk_stamps_at((begin_s + 1) * s + s / 4), KVT_DISK_STAMPS_SECOND / 4 * 5);
    assert_true(kvt_disk_stamps_at((begin_s + day_s) * s) >
                KVT_DISK_STAMPS_GAP + KVT_DISK_STAMPS_RESERVE);
    assert_int_equal(kvt_disk_stamps_at(UINT64_MAX), KVT_DISK_STAMPS_MAX / 2);
}

#define WORLD_TEST(name) cmocka_unit_test_setup_teardown(name, world_make, world_free)

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_encodings),    cmocka_unit_test(test_records_do_not_overlap),
        cmocka_unit_test(test_flips_decode), WORLD_TEST(test_written_and_read),
        WORLD_TEST(test_one_copy_is_enough), WORLD_TEST(test_healed),
        WORLD_TEST(test_each_call_fails),    WORLD_TEST(test_other_uuid),
        cmocka_unit_test(test_stamps_at),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
