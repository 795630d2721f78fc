/* L3 on raw block devices (loop devices): what may be taken, what is refused and left as it was,
 * sizes, and every call failing in turn. */
#include <fcntl.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "daemon/base/bytes.h"
#include "daemon/base/hash.h"
#include "tests/common/cmocka.h"
#include "tests/common/disk_shim.h"
#include "tests/common/loop_device.h"
#include "tiers/disk/catalog.h"

#define DEVICE_BYTES (8u << 20)

struct world {
    struct disk_shim shim;
    struct kvt_disk_config config;
    struct kvt_disk_file file;
    struct kvt_disk_report report;
    struct loop_device device;
    char dir[64], image[96], lock[96], mount[96];
};

static void device_make(struct world *world, uint64_t bytes, uint32_t block_bytes, int is_read_only)
{
    loop_device_close(&world->device);
    assert_int_equal(truncate(world->image, (off_t)bytes), 0);
    assert_int_equal(loop_device_open(&world->device, world->image, block_bytes, is_read_only), 0);
    world->config.path = world->device.path;
}

static int world_make(void **state)
{
    struct world *world = calloc(1, sizeof(*world));

    disk_shim_init(&world->shim);
    snprintf(world->dir, sizeof(world->dir), "kvt-raw-XXXXXX");
    assert_non_null(mkdtemp(world->dir));
    snprintf(world->image, sizeof(world->image), "%s/image", world->dir);
    snprintf(world->lock, sizeof(world->lock), "%s/lock", world->dir);
    snprintf(world->mount, sizeof(world->mount), "%s/mount", world->dir);
    world->file.fd = world->file.hold_fd = world->file.lock_fd = world->device.fd = -1;
    close(open(world->image, O_RDWR | O_CREAT | O_CLOEXEC, 0600));
    device_make(world, DEVICE_BYTES, 512, 0);
    *state = world;
    return 0;
}

static int world_free(void **state)
{
    struct world *world = *state;

    kvt_disk_file_close(&world->file);
    loop_device_close(&world->device);
    (void)rmdir(world->mount);
    (void)unlink(world->lock);
    (void)unlink(world->image);
    assert_int_equal(rmdir(world->dir), 0);
    free(world);
    return 0;
}

static int open_again(struct world *world)
{
    kvt_disk_file_close(&world->file);
    return kvt_disk_file_open(&world->file, &world->shim.io, &world->config, &world->report);
}

static void bytes_write(struct world *world, uint64_t offset_bytes, const char *bytes, size_t count)
{
    assert_int_equal(pwrite(world->device.fd, bytes, count, (off_t)offset_bytes), count);
    assert_int_equal(fsync(world->device.fd), 0);
}

static uint64_t hash_of(struct world *world)
{
    static uint8_t bytes[2 * DEVICE_BYTES];
    int64_t n = pread(world->device.fd, bytes, sizeof(bytes), 0);

    assert_true(n > 0);
    return kvt_hash64(bytes, (size_t)n, 0);
}

/* Some data and a record, which later openings must find. */
static void contents_put(struct world *world)
{
    struct kvt_disk_state state = {.stamps_end = 77};
    uint8_t data[KVT_DISK_STATE_BYTES];

    kvt_disk_catalog_encode_state(data, &state);
    assert_int_equal(kvt_disk_catalog_write(&world->file, &world->shim.io, KVT_DISK_CATALOG_STATE,
                                            data, sizeof(data)),
                     0);
    kvt_disk_file_close(&world->file);
    bytes_write(world, KVT_DISK_DATA_OFFSET_BYTES + 4096, "contents", 8);
}

static void contents_check(struct world *world)
{
    static struct kvt_disk_catalog catalog;
    char bytes[8];

    assert_false(world->report.is_made);
    assert_int_equal(kvt_disk_catalog_read(&world->file, &world->shim.io, &catalog), 0);
    assert_true(catalog.has_state && catalog.state.stamps_end == 77);
    assert_int_equal(catalog.records_lost + catalog.copies_bad, 0);
    assert_int_equal(pread(world->device.fd, bytes, 8, KVT_DISK_DATA_OFFSET_BYTES + 4096), 8);
    assert_memory_equal(bytes, "contents", 8);
}

static void test_blank(void **state)
{
    struct world *world = *state;

    world->config.bytes = 0; /* all of it */
    bytes_write(world, 3u << 20, "rest of somebody's data, whose marks are gone", 45);
    assert_int_equal(open_again(world), 0);
    assert_true(world->report.is_made && world->report.is_raw && world->file.is_preallocated);
    assert_int_equal(world->report.bytes, DEVICE_BYTES);
    contents_put(world);
    assert_int_equal(open_again(world), 0);
    contents_check(world);
    assert_int_equal(world->file.lock_fd, -1);
    /* A superblock that was torn before there was anything else. */
    kvt_disk_file_close(&world->file);
    device_make(world, 0, 512, 0);
    device_make(world, DEVICE_BYTES, 512, 0);
    bytes_write(world, 0, "KVTDISK1 torn", 13);
    assert_int_equal(open_again(world), 0);
    assert_true(world->report.is_made);
}

static void test_marks(void **state)
{
    static const struct {
        uint64_t at;
        const char *bytes, *why;
        size_t count;
    } marks[] = {
        {1080, "\x53\xef", "ext4", 2},
        {0, "XFSB", "XFS", 4},
        {65600, "_BHRfS_M", "btrfs", 8},
        {512, "LABELONE", "LVM", 8},
        {512, "EFI PART", "GPT", 8},
        {510, "\x55\xaa", "partition table", 2},
        {4086, "SWAPSPACE2", "swap", 10},
        {0, "KVTDISK1", "kvtierd", 8},
        {(1u << 20) - 1, "x", "byte 1048575", 1},
        {DEVICE_BYTES - 512, "EFI PART", "GPT", 8},
        {DEVICE_BYTES - 65536, "\xfc\x4e\x2b\xa9", "at its end", 4},
    };
    struct world *world = *state;
    uint64_t hash;

    for (size_t i = 0; i < KVT_COUNT_OF(marks); i++) {
        device_make(world, 0, 512, 0);
        device_make(world, DEVICE_BYTES, 512, 0);
        bytes_write(world, marks[i].at, marks[i].bytes, marks[i].count);
        if (marks[i].at == 0) /* more than a beginning */
            bytes_write(world, 1u << 20, "more", 4);
        hash = hash_of(world);
        assert_int_equal(open_again(world), KVT_DISK_E_FOREIGN);
        if (strstr(world->report.why, marks[i].why) == NULL)
            fail_msg("\"%s\" lacks \"%s\"", world->report.why, marks[i].why);
        assert_int_equal(hash_of(world), hash);
        world->config.is_format = true;
        assert_int_equal(open_again(world), 0);
        assert_true(world->report.is_made);
        /* The mark is gone, and it is not formatted again. */
        contents_put(world);
        assert_int_equal(open_again(world), 0);
        contents_check(world);
        kvt_disk_file_close(&world->file);
        world->config.is_format = false;
    }
    device_make(world, 0, 512, 0);
    device_make(world, 66u << 20, 512, 0);
    bytes_write(world, (64u << 20) + 64, "_BHRfS_M", 8); /* where btrfs has its second superblock */
    assert_int_equal(open_again(world), KVT_DISK_E_FOREIGN);
    assert_non_null(strstr(world->report.why, "btrfs"));
}

static void test_sizes(void **state)
{
    struct world *world = *state;

    world->config.bytes = 4u << 20;
    assert_int_equal(open_again(world), 0);
    assert_int_equal(world->report.bytes, 4u << 20);
    contents_put(world);
    world->config.bytes = 6u << 20;
    assert_int_equal(open_again(world), 0);
    contents_check(world);
    assert_int_equal(world->file.about.device_bytes, 6u << 20);
    world->config.bytes = 3u << 20;
    assert_int_equal(open_again(world), 0);
    contents_check(world);
    assert_false(world->report.is_no_space || world->report.is_truncated);
    world->config.bytes = 2 * DEVICE_BYTES; /* more than there is */
    assert_int_equal(open_again(world), 0);
    contents_check(world);
    assert_true(world->report.is_no_space);
    assert_int_equal(world->report.bytes, DEVICE_BYTES);
    kvt_disk_file_close(&world->file);
    device_make(world, 5u << 20, 512, 0); /* a smaller device */
    assert_int_equal(open_again(world), 0);
    contents_check(world);
    assert_true(world->report.is_truncated);
    kvt_disk_file_close(&world->file);
    device_make(world, 2u << 20, 512, 0);
    assert_int_equal(open_again(world), KVT_DISK_E_TOO_SMALL);
}

static void test_busy_and_held(void **state)
{
    struct world *world = *state;
    struct kvt_disk_report report;
    struct kvt_disk_file second;
    int fd;

    world->config.lock_path = world->lock;
    assert_int_equal(open_again(world), 0);
    assert_int_equal(kvt_disk_file_open(&second, &kvt_disk_io_real, &world->config, &report),
                     KVT_DISK_E_BUSY);
    assert_int_equal(report.pid, getpid());
    world->config.lock_path = NULL;
    assert_int_equal(kvt_disk_file_open(&second, &kvt_disk_io_real, &world->config, &report),
                     KVT_DISK_E_BUSY);
    assert_int_equal(report.pid, getpid()); /* no file beside it says so, but the kernel does */
    kvt_disk_file_close(&world->file);
    /* Held by something else: a volume manager, a file system that is not seen here. */
    fd = open(world->device.path, O_RDONLY | O_EXCL | O_CLOEXEC);
    assert_true(fd >= 0);
    world->config.is_format = true; /* does not help */
    assert_int_equal(open_again(world), KVT_DISK_E_MOUNTED);
    close(fd);
    assert_int_equal(open_again(world), 0);
}

static bool is_made_ext4(struct world *world)
{
    char name[] = "mkfs.ext4", quiet[] = "-q", force[] = "-F";
    char *args[] = {name, quiet, force, world->device.path, NULL};
    int status = -1;
    pid_t pid;

    return posix_spawnp(&pid, args[0], NULL, NULL, args, environ) == 0 &&
           waitpid(pid, &status, 0) == pid && status == 0;
}

static void test_mounted(void **state)
{
    struct world *world = *state;
    uint64_t hash;

    if (geteuid() != 0 || !is_made_ext4(world))
        skip();
    hash = hash_of(world);
    assert_int_equal(open_again(world), KVT_DISK_E_FOREIGN);
    assert_non_null(strstr(world->report.why, "ext4"));
    assert_int_equal(hash_of(world), hash);
    assert_int_equal(mkdir(world->mount, 0700), 0);
    if (mount(world->device.path, world->mount, "ext4", 0, "") < 0)
        skip();
    world->config.is_format = true;
    assert_int_equal(open_again(world), KVT_DISK_E_MOUNTED);
    assert_non_null(strstr(world->report.why, "/mount"));
    assert_int_equal(umount(world->mount), 0);
    assert_int_equal(open_again(world), 0);
    assert_true(world->report.is_made);
}

static void test_read_only(void **state)
{
    struct world *world = *state;

    device_make(world, DEVICE_BYTES, 512, 1);
    assert_int_equal(open_again(world), KVT_DISK_E_READ_ONLY);
    device_make(world, DEVICE_BYTES, 4096, 0);
    assert_int_equal(open_again(world), 0);
}

static void test_each_call_fails(void **state)
{
    struct world *world = *state;
    uint32_t call, runs = 0;
    int r;

    world->shim.call_result = -EIO;
    world->shim.is_tearing = true;
    for (int is_good = 0; is_good < 2; is_good++) {
        for (call = 1; call == 1 || world->shim.calls >= call - 1; call++) {
            device_make(world, is_good ? DEVICE_BYTES : 0, 512, 0);
            device_make(world, DEVICE_BYTES, 512, 0);
            world->config.bytes = is_good && call % 2 ? 4u << 20 : 6u << 20;
            world->shim.fail_call = call;
            world->shim.calls = 0;
            r = open_again(world);
            assert_true(r == 0 || r == -EIO);
            kvt_disk_file_close(&world->file);
            world->shim.fail_call = 0;
            assert_int_equal(open_again(world), 0);
            if (is_good)
                contents_check(world);
            runs++;
        }
        contents_put(world);
        assert_true(call > 8);
    }
    print_message("%u openings with a failing call\n", runs);
}

#define WORLD_TEST(name) cmocka_unit_test_setup_teardown(name, world_make, world_free)

int main(void)
{
    const struct CMUnitTest tests[] = {
        WORLD_TEST(test_blank),           WORLD_TEST(test_marks),   WORLD_TEST(test_sizes),
        WORLD_TEST(test_busy_and_held),   WORLD_TEST(test_mounted), WORLD_TEST(test_read_only),
        WORLD_TEST(test_each_call_fails),
    };
    int r = loop_device_probe();

    if (r < 0) {
        printf("SKIP: no loop device: %s\n", strerror(-r));
        return 77;
    }
    return cmocka_run_group_tests(tests, NULL, NULL);
}
