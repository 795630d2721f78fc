/* Looking at a device without a daemon: what is counted as what, that every kind of damage is found
 * with its place, and that nothing is written. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "daemon/base/bytes.h"
#include "daemon/base/hash.h"
#include "tests/common/cmocka.h"
#include "tiers/disk/inspect.h"
#include "tiers/index/offline.h"

#define BLOCK_TOKENS 16u
#define DATA_BYTES (16u << 20)
#define FILE_BYTES (KVT_DISK_DATA_OFFSET_BYTES + DATA_BYTES)
#define BAD_MAX 64u

struct world {
    struct kvt_disk_file file;
    struct kvt_disk_report report;
    struct kvt_disk_inspection found;
    struct kvt_disk_bad_slot bad[BAD_MAX];
    uint32_t bad_count;
    uint64_t fail_from, fail_to; /* reads of these bytes of the device fail */
    char dir[64], path[96];
};

static void catalog_put(struct world *world, uint32_t number, uint8_t fingerprint, uint64_t epoch)
{
    static struct kvt_disk_ns_record ns;
    static uint8_t data[KVT_DISK_NS_BYTES_MAX];
    uint32_t bytes;

    ns = (struct kvt_disk_ns_record){.is_used = true, .epoch = epoch, .spec_bytes = 3};
    memset(ns.fingerprint, fingerprint, sizeof(ns.fingerprint));
    bytes = kvt_disk_catalog_encode_ns(data, &ns);
    assert_int_equal(kvt_disk_catalog_write(&world->file, &kvt_disk_io_real, number, data, bytes),
                     0);
}

static int world_make(void **state)
{
    struct world *world = calloc(1, sizeof(*world));
    struct kvt_disk_state device = {.stamps_end = 1000, .starts = 3, .written_bytes = 1u << 20};
    struct kvt_disk_config config = {.path = world->path, .bytes = FILE_BYTES};
    uint8_t data[KVT_DISK_STATE_BYTES];

    snprintf(world->dir, sizeof(world->dir), "kvt-inspect-XXXXXX");
    assert_non_null(mkdtemp(world->dir));
    snprintf(world->path, sizeof(world->path), "%s/l3", world->dir);
    assert_int_equal(kvt_disk_file_open(&world->file, &kvt_disk_io_real, &config, &world->report),
                     0);
    kvt_disk_catalog_encode_state(data, &device);
    assert_int_equal(kvt_disk_catalog_write(&world->file, &kvt_disk_io_real, KVT_DISK_CATALOG_STATE,
                                            data, sizeof(data)),
                     0);
    catalog_put(world, 0, 0xa0, 1);
    catalog_put(world, 5, 0xa5, 7);
    kvt_disk_file_close(&world->file);
    *state = world;
    return 0;
}

static int world_free(void **state)
{
    struct world *world = *state;
    char lock[128];

    snprintf(lock, sizeof(lock), "%s.lock", world->path);
    (void)unlink(lock);
    (void)unlink(world->path);
    assert_int_equal(rmdir(world->dir), 0);
    free(world);
    return 0;
}

static void bytes_write(struct world *world, uint64_t at, const void *bytes, size_t count)
{
    int fd = open(world->path, O_RDWR | O_CLOEXEC);

    assert_int_equal(pwrite(fd, bytes, count, (off_t)at), count);
    close(fd);
}

static struct kvt_slot_info info_of(const struct world *world, uint8_t fingerprint, uint64_t epoch,
                                    uint64_t payload_bytes)
{
    struct kvt_slot_info info = {.block_id = 17,
                                 .generation = 18,
                                 .epoch = epoch,
                                 .payload_bytes = payload_bytes,
                                 .block_tokens = BLOCK_TOKENS};

    memset(info.fingerprint, fingerprint, sizeof(info.fingerprint));
    memcpy(info.store_id, world->report.store_id, sizeof(info.store_id));
    return info;
}

/* A whole slot at @at of the data; returns where it ends. */
static uint64_t slot_put(struct world *world, uint64_t at, const struct kvt_slot_info *info)
{
    uint64_t slot_bytes = kvt_slot_bytes(info->block_tokens, info->payload_bytes);
    uint32_t header_bytes = kvt_slot_header_bytes(info->block_tokens);
    uint32_t tokens[KVT_BLOCK_TOKENS_MAX] = {1, 2, 3};
    uint8_t *slot = calloc(1, slot_bytes);

    kvt_slot_header_write(slot, info, tokens);
    for (uint64_t i = 0; i < info->payload_bytes; i++)
        slot[header_bytes + i] = (uint8_t)(at + i * 3 + i / 255);
    kvt_slot_header_seal(slot, kvt_hash64(slot + header_bytes, info->payload_bytes, 0));
    bytes_write(world, KVT_DISK_DATA_OFFSET_BYTES + at, slot, slot_bytes);
    free(slot);
    return at + slot_bytes;
}

static void bad_note(void *ctx, const struct kvt_disk_bad_slot *bad)
{
    struct world *world = ctx;

    assert_true(world->bad_count < BAD_MAX);
    world->bad[world->bad_count++] = *bad;
}

static int64_t failing_pread(void *ctx, int fd, void *buffer, uint32_t bytes, uint64_t at)
{
    struct world *world = ctx;

    if (at < world->fail_to && world->fail_from < at + bytes)
        return -EIO;
    return pread(fd, buffer, bytes, (off_t)at);
}

static uint64_t hash_of(struct world *world, struct stat *ret_st)
{
    static uint8_t bytes[FILE_BYTES];
    int fd = open(world->path, O_RDONLY | O_CLOEXEC);
    int64_t n = pread(fd, bytes, sizeof(bytes), 0);

    assert_int_equal(fstat(fd, ret_st), 0);
    close(fd);
    return kvt_hash64(bytes, (size_t)n, 0);
}

/* Nothing may be written, whatever is found. */
static int inspect(struct world *world, bool is_verify)
{
    struct kvt_disk_inspect_config config = {.path = world->path,
                                             .is_verify = is_verify,
                                             .bad = bad_note,
                                             .ctx = world,
                                             .pread = failing_pread,
                                             .pread_ctx = world};
    struct stat before, after;
    uint64_t hash = hash_of(world, &before);
    int r;

    world->bad_count = 0;
    r = kvt_disk_inspect(&config, &world->found);
    assert_int_equal(hash_of(world, &after), hash);
    assert_int_equal(after.st_mtim.tv_nsec, before.st_mtim.tv_nsec);
    assert_int_equal(after.st_ctim.tv_nsec, before.st_ctim.tv_nsec);
    assert_int_equal(after.st_size, before.st_size);
    return r;
}

static uint64_t group_of(const struct world *world, uint32_t ns, uint64_t payload_bytes)
{
    uint64_t slot_bytes = kvt_slot_bytes(BLOCK_TOKENS, payload_bytes);

    for (uint32_t i = 0; i < world->found.groups_count; i++)
        if (world->found.groups[i].ns == ns && world->found.groups[i].slot_bytes == slot_bytes)
            return world->found.groups[i].slots;
    return 0;
}

/* Good slots of two sizes and two namespaces up to some MiB, so that they cross windows; returns
 * where they end. */
static uint64_t fill(struct world *world)
{
    uint64_t at = 0;

    for (int i = 0; i < 30; i++) {
        struct kvt_slot_info small = info_of(world, 0xa0, 1, 50000);
        struct kvt_slot_info large = info_of(world, 0xa5, 7, 300000);

        at = slot_put(world, at, &small);
        at = slot_put(world, at + 4096, &large);
    }
    return at;
}

static void good_check(struct world *world)
{
    assert_int_equal(group_of(world, 0, 50000), 30);
    assert_int_equal(group_of(world, 5, 300000), 30);
    assert_int_equal(world->found.groups_count, 2);
    assert_int_equal(world->found.slots, 60);
}

static void test_whole(void **state)
{
    struct world *world = *state;
    struct kvt_slot_info info;
    uint64_t at = fill(world);

    info = info_of(world, 0xa5, 6, 5000); /* before the last reset */
    at = slot_put(world, at, &info);
    info = info_of(world, 0xbb, 1, 5000); /* of nobody */
    at = slot_put(world, at, &info);
    info = info_of(world, 0xa0, 1, 5000);
    memset(info.store_id, 9, 16);
    (void)slot_put(world, at, &info);
    for (int is_verify = 0; is_verify < 2; is_verify++) {
        assert_int_equal(inspect(world, is_verify), 0);
        good_check(world);
        assert_int_equal(world->found.slots_stale, 2);
        assert_true(world->found.slots_other >= 1);
        assert_int_equal(world->found.slots_bad + world->found.slots_replaced, 0);
        assert_int_equal(world->found.unreadable_bytes, 0);
        assert_int_equal(world->bad_count, 0);
        assert_true(world->found.is_copy_good[0] && world->found.is_copy_good[1]);
        assert_int_equal(world->found.about.device_bytes, FILE_BYTES);
        assert_true(world->found.catalog.has_state);
        assert_int_equal(world->found.catalog.state.starts, 3);
        assert_int_equal(world->found.catalog.namespaces[5].epoch, 7);
    }
    assert_true(world->found.read_bytes >= DATA_BYTES);
}

static void test_damage_is_found(void **state)
{
    struct world *world = *state;
    struct kvt_slot_info info = info_of(world, 0xa0, 1, 100000);
    uint64_t begin = fill(world), end = slot_put(world, begin, &info);
    uint64_t header_bytes = kvt_slot_header_bytes(BLOCK_TOKENS);
    uint8_t byte = 0x99;

    /* Each of these makes it bad: the first and last byte of the payload, one between. */
    const uint64_t places[] = {header_bytes, header_bytes + 99999, 70000};

    for (size_t i = 0; i < KVT_COUNT_OF(places); i++) {
        (void)slot_put(world, begin, &info);
        bytes_write(world, KVT_DISK_DATA_OFFSET_BYTES + begin + places[i], &byte, 1);
        assert_int_equal(inspect(world, true), 0);
        assert_int_equal(world->found.slots_bad, 1);
        assert_int_equal(world->bad_count, 1);
        assert_int_equal(world->bad[0].offset_bytes, KVT_DISK_DATA_OFFSET_BYTES + begin);
        assert_int_equal(world->bad[0].verdict, KVT_SLOT_BAD_PAYLOAD);
        assert_true(world->bad[0].has_info && world->bad[0].info.block_id == 17);
        good_check(world);
    }
    /* The header. */
    bytes_write(world, KVT_DISK_DATA_OFFSET_BYTES + begin + 130, &byte, 1);
    for (int is_verify = 0; is_verify < 2; is_verify++) {
        assert_int_equal(inspect(world, is_verify), 0);
        assert_int_equal(world->bad_count, 1);
        assert_int_equal(world->bad[0].verdict, KVT_SLOT_BAD_HEADER);
        assert_int_equal(world->bad[0].offset_bytes, KVT_DISK_DATA_OFFSET_BYTES + begin);
        good_check(world);
    }
    /* Padding is nobody's. */
    (void)slot_put(world, begin, &info);
    bytes_write(world, KVT_DISK_DATA_OFFSET_BYTES + end - 1, &byte, 1);
    assert_int_equal(inspect(world, true), 0);
    assert_int_equal(world->found.slots_bad, 0);
    assert_int_equal(world->found.slots, 61);
}

static void test_replaced(void **state)
{
    struct world *world = *state;
    struct kvt_slot_info large = info_of(world, 0xa0, 1, 200000);
    struct kvt_slot_info small = info_of(world, 0xa0, 1, 10000);
    uint64_t begin = fill(world);

    (void)slot_put(world, begin, &large);
    (void)slot_put(world, begin + 40960, &small);
    (void)slot_put(world, begin + 81920, &small);
    assert_int_equal(inspect(world, true), 0);
    assert_int_equal(world->found.slots_replaced, 1);
    assert_int_equal(world->found.slots_bad, 0);
    assert_int_equal(group_of(world, 0, 10000), 2);
    assert_int_equal(group_of(world, 0, 200000), 0);
    assert_int_equal(inspect(world, false), 0); /* believes the header */
    assert_int_equal(group_of(world, 0, 200000), 1);
}

static void test_unreadable(void **state)
{
    struct world *world = *state;
    struct kvt_slot_info info = info_of(world, 0xa0, 1, 100000);
    uint64_t begin = fill(world);

    (void)slot_put(world, begin, &info);
    world->fail_from = KVT_DISK_DATA_OFFSET_BYTES + begin + 40000;
    world->fail_to = world->fail_from + 100;
    assert_int_equal(inspect(world, true), 0);
    assert_int_equal(world->found.unreadable_bytes, 4096);
    assert_int_equal(world->found.slots_bad, 1);
    good_check(world);
    /* A copy of the superblock, and of a record. */
    world->fail_from = 0;
    world->fail_to = 10;
    assert_int_equal(inspect(world, false), 0);
    assert_false(world->found.is_copy_good[0]);
    world->fail_from = kvt_disk_record_offset(5, 1);
    world->fail_to = world->fail_from + 1;
    assert_int_equal(inspect(world, false), 0);
    assert_int_equal(world->found.catalog.copies_bad, 1);
    assert_int_equal(world->found.slots, 61);
    world->fail_from = 0;
    world->fail_to = 8192;
    assert_int_equal(inspect(world, false), -EIO);
}

/* What the superblock says is more, or less, than there is. */
static void test_cut_off(void **state)
{
    struct world *world = *state;
    struct kvt_slot_info info = info_of(world, 0xa0, 1, 100000);
    uint64_t begin = fill(world);

    (void)slot_put(world, begin, &info);
    assert_int_equal(truncate(world->path, (off_t)(KVT_DISK_DATA_OFFSET_BYTES + begin + 50000)), 0);
    assert_int_equal(inspect(world, true), 0);
    good_check(world);
    assert_int_equal(world->found.slots_bad, 0);
    assert_int_equal(world->found.slots_other, 1);
    assert_true(world->found.there_bytes < world->found.about.device_bytes);
    assert_int_equal(truncate(world->path, KVT_DISK_DATA_OFFSET_BYTES), 0);
    assert_int_equal(inspect(world, true), 0);
    assert_int_equal(world->found.slots, 0);
    assert_int_equal(truncate(world->path, 100), 0);
    assert_int_equal(inspect(world, true), KVT_DISK_E_FOREIGN);
}

static void test_not_ours(void **state)
{
    struct world *world = *state;
    struct kvt_disk_inspect_config config = {.path = "/nonexistent"};
    uint8_t block[KVT_DISK_SUPER_BYTES];
    int fd = open(world->path, O_RDONLY | O_CLOEXEC);

    assert_int_equal(kvt_disk_inspect(&config, &world->found), -ENOENT);
    config.path = "/dev/null";
    assert_int_equal(kvt_disk_inspect(&config, &world->found), KVT_DISK_E_FOREIGN);
    assert_int_equal(pread(fd, block, sizeof(block), 0), sizeof(block));
    close(fd);
    kvt_put_u32(block, KVT_DISK_SUPER_AT_VERSION, 5);
    kvt_put_u64(block, 4088, kvt_hash64(block, 4088, 0));
    bytes_write(world, 0, block, sizeof(block));
    assert_int_equal(inspect(world, true), KVT_DISK_E_OTHER_VERSION);
    kvt_put_u32(block, KVT_DISK_SUPER_AT_VERSION, 1);
    kvt_put_u64(block, KVT_DISK_SUPER_AT_DATA_OFFSET, 8192);
    kvt_put_u64(block, 4088, kvt_hash64(block, 4088, 0));
    bytes_write(world, 0, block, sizeof(block));
    bytes_write(world, 4096, block, sizeof(block));
    assert_int_equal(inspect(world, true), 0);
    assert_int_equal(world->found.about.version, 1);
    assert_int_equal(world->found.read_bytes, 0);
}

static int offline(struct world *world, const char *command, const char *option)
{
    char name[16], json[16];
    char *args[] = {name, world->path, json, NULL};

    snprintf(name, sizeof(name), "%s", command);
    snprintf(json, sizeof(json), "%s", option != NULL ? option : "");
    return kvt_index_offline(option != NULL ? 3 : 2, args);
}

static void test_exit_status(void **state)
{
    struct world *world = *state;
    uint8_t byte = 0x98;

    (void)fill(world);
    assert_int_equal(offline(world, "inspect", NULL), 0);
    assert_int_equal(offline(world, "verify", "--json"), 0);
    assert_int_equal(offline(world, "verify", "--wrong"), 2);
    bytes_write(world, KVT_DISK_DATA_OFFSET_BYTES + 9000, &byte, 1);
    assert_int_equal(offline(world, "inspect", "--json"), 0);
    assert_int_equal(offline(world, "verify", NULL), 1);
    assert_int_equal(truncate(world->path, 0), 0);
    assert_int_equal(offline(world, "verify", NULL), 4);
}

#define WORLD_TEST(name) cmocka_unit_test_setup_teardown(name, world_make, world_free)

int main(void)
{
    const struct CMUnitTest tests[] = {
        WORLD_TEST(test_whole),       WORLD_TEST(test_damage_is_found), WORLD_TEST(test_replaced),
        WORLD_TEST(test_unreadable),  WORLD_TEST(test_cut_off),         WORLD_TEST(test_not_ours),
        WORLD_TEST(test_exit_status),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
