/* Opening an L3 device: whose file it is, what happens to its size, and every call on the way
 * failing in turn. Whatever fails, a good file's contents are found by the next opening. */
#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "daemon/base/bytes.h"
#include "daemon/base/clock.h"
#include "daemon/base/hash.h"
#include "tests/common/cmocka.h"
#include "tests/common/disk_shim.h"
#include "tiers/disk/file.h"

#define DATA_BYTES (64u << 10)
#define FILE_BYTES (KVT_DISK_DATA_OFFSET_BYTES + DATA_BYTES)

struct world {
    struct disk_shim shim;
    struct kvt_disk_config config;
    struct kvt_disk_file file;
    struct kvt_disk_report report;
    char dir[64], path[96], lock[128], link[96];
};

static int world_make(void **state)
{
    struct world *world = calloc(1, sizeof(*world));

    disk_shim_init(&world->shim);
    snprintf(world->dir, sizeof(world->dir), "kvt-file-XXXXXX");
    assert_non_null(mkdtemp(world->dir));
    snprintf(world->path, sizeof(world->path), "%s/l3", world->dir);
    snprintf(world->lock, sizeof(world->lock), "%s.lock", world->path);
    snprintf(world->link, sizeof(world->link), "%s/link", world->dir);
    world->file.fd = world->file.hold_fd = world->file.lock_fd = -1;
    world->config = (struct kvt_disk_config){.path = world->path, .bytes = FILE_BYTES};
    *state = world;
    return 0;
}

static int world_free(void **state)
{
    struct world *world = *state;
    char lock[128];

    kvt_disk_file_close(&world->file);
    snprintf(lock, sizeof(lock), "%s.lock", world->link);
    (void)unlink(lock);
    (void)unlink(world->link);
    (void)unlink(world->lock);
    (void)unlink(world->path);
    assert_int_equal(rmdir(world->dir), 0);
    free(world);
    return 0;
}

static int open_again(struct world *world)
{
    kvt_disk_file_close(&world->file);
    return kvt_disk_file_open(&world->file, &world->shim.io, &world->config, &world->report);
}

/* Bytes of the file as somebody else sees them. */
static void bytes_write(struct world *world, uint64_t offset_bytes, const void *bytes, size_t count)
{
    int fd = open(world->path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);

    assert_int_equal(pwrite(fd, bytes, count, (off_t)offset_bytes), count);
    assert_int_equal(close(fd), 0);
}

static void bytes_read(struct world *world, uint64_t offset_bytes, void *bytes, size_t count)
{
    int fd = open(world->path, O_RDONLY | O_CLOEXEC);

    assert_int_equal(pread(fd, bytes, count, (off_t)offset_bytes), count);
    assert_int_equal(close(fd), 0);
}

static uint64_t size_of(struct world *world)
{
    struct stat st;

    assert_int_equal(stat(world->path, &st), 0);
    return (uint64_t)st.st_size;
}

static uint64_t hash_of(struct world *world)
{
    static uint8_t bytes[4 * FILE_BYTES];
    uint64_t size = size_of(world);

    assert_true(size <= sizeof(bytes));
    bytes_read(world, 0, bytes, size);
    return kvt_hash64(bytes, size, 0);
}

/* The front of the data, which every later opening must find. */
static void contents_put(struct world *world)
{
    uint8_t bytes[8192];

    for (size_t i = 0; i < sizeof(bytes); i++)
        bytes[i] = (uint8_t)(i * 7 + i / 251);
    bytes_write(world, KVT_DISK_DATA_OFFSET_BYTES, bytes, sizeof(bytes));
}

static void contents_check(struct world *world)
{
    uint8_t bytes[8192];

    assert_false(world->report.is_made);
    bytes_read(world, KVT_DISK_DATA_OFFSET_BYTES, bytes, sizeof(bytes));
    for (size_t i = 0; i < sizeof(bytes); i++)
        assert_int_equal(bytes[i], (uint8_t)(i * 7 + i / 251));
}

static void make(struct world *world)
{
    kvt_disk_file_close(&world->file);
    (void)unlink(world->path);
    world->config.bytes = FILE_BYTES;
    assert_int_equal(open_again(world), 0);
    assert_true(world->report.is_made);
    contents_put(world);
    kvt_disk_file_close(&world->file);
}

static void test_made_and_found(void **state)
{
    struct world *world = *state;
    uint8_t store_id[16], device_uuid[16];
    struct stat st;

    make(world);
    assert_false(world->report.is_upgraded || world->report.is_truncated ||
                 world->report.is_no_space || world->report.is_raw);
    assert_int_equal(world->report.bytes, FILE_BYTES);
    memcpy(store_id, world->report.store_id, 16);
    memcpy(device_uuid, world->report.device_uuid, 16);
    assert_false(kvt_bytes_are_zero(store_id, 16) || kvt_bytes_are_zero(device_uuid, 16));
    assert_int_equal(stat(world->path, &st), 0);
    assert_int_equal(st.st_mode & 07777, 0600);
    assert_int_equal(st.st_size, FILE_BYTES);
    assert_true((uint64_t)st.st_blocks * 512 >= FILE_BYTES);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(open_again(world), 0);
        contents_check(world);
        assert_memory_equal(world->report.store_id, store_id, 16);
        assert_memory_equal(world->report.device_uuid, device_uuid, 16);
        /* The store may be named, too. */
        memcpy(world->config.store_id, store_id, 16);
    }
}

static void test_other_store(void **state)
{
    struct world *world = *state;
    uint64_t hash;

    make(world);
    hash = hash_of(world);
    memset(world->config.store_id, 0x5a, 16);
    assert_int_equal(open_again(world), KVT_DISK_E_OTHER_STORE);
    assert_int_equal(hash_of(world), hash);
    world->config.is_format = true;
    assert_int_equal(open_again(world), 0);
    assert_true(world->report.is_made);
    assert_memory_equal(world->report.store_id, world->config.store_id, 16);
    /* What is ours and of this store is never formatted. */
    contents_put(world);
    assert_int_equal(open_again(world), 0);
    contents_check(world);
}

static void test_foreign(void **state)
{
    struct world *world = *state;
    char back[16];

    bytes_write(world, 0, "precious", 9);
    assert_int_equal(open_again(world), KVT_DISK_E_FOREIGN);
    assert_int_equal(size_of(world), 9);
    bytes_read(world, 0, back, 9);
    assert_string_equal(back, "precious");
    world->config.is_format = true;
    assert_int_equal(open_again(world), 0);
    assert_true(world->report.is_made);
    world->config.is_format = false;
    assert_int_equal(open_again(world), 0);
    assert_false(world->report.is_made);
    /* A file of zeros is somebody's as well, and so is what is no file. */
    kvt_disk_file_close(&world->file);
    assert_int_equal(truncate(world->path, 0), 0);
    assert_int_equal(truncate(world->path, FILE_BYTES), 0);
    assert_int_equal(open_again(world), KVT_DISK_E_FOREIGN);
    world->config.path = "/dev/null";
    world->config.lock_path = world->lock;
    assert_int_equal(open_again(world), KVT_DISK_E_FOREIGN);
    world->config.path = world->dir;
    assert_int_equal(open_again(world), -EISDIR);
    world->config.path = "/nonexistent/l3";
    assert_int_equal(open_again(world), -ENOENT);
}

/* A superblock of @version, whole, at copy @copy. */
static void super_put(struct world *world, uint32_t copy, uint32_t version)
{
    uint8_t block[KVT_DISK_SUPER_BYTES] = {0};

    kvt_put_u64(block, 0, KVT_DISK_SUPER_MAGIC);
    kvt_put_u32(block, 8, version);
    kvt_put_u32(block, 12, KVT_DISK_SUPER_ENDIAN_MARK);
    memset(block + 16, 0x77, 16);
    kvt_put_u64(block, 32, FILE_BYTES);
    kvt_put_u64(block, 40, version == 1 ? 8192 : KVT_DISK_DATA_OFFSET_BYTES);
    kvt_put_u64(block, 48, 1234567890);
    kvt_put_u64(block, 4088, kvt_hash64(block, 4088, 0));
    bytes_write(world, copy * KVT_DISK_SUPER_BYTES, block, sizeof(block));
}

static void test_versions(void **state)
{
    struct world *world = *state;
    uint64_t hash;

    make(world);
    super_put(world, 1, 3);
    hash = hash_of(world);
    assert_int_equal(open_again(world), KVT_DISK_E_OTHER_VERSION); /* one copy says enough */
    super_put(world, 0, 3);
    assert_int_equal(open_again(world), KVT_DISK_E_OTHER_VERSION);
    super_put(world, 0, 2); /* without a store: not ours */
    super_put(world, 1, 2);
    assert_int_equal(open_again(world), KVT_DISK_E_FOREIGN);
    assert_int_not_equal(hash_of(world), hash);
    /* Version 1 becomes ours, in either copy, and then stays. */
    for (uint32_t copy = 0; copy < 2; copy++) {
        (void)unlink(world->path);
        super_put(world, copy, 1);
        assert_int_equal(open_again(world), 0);
        assert_true(world->report.is_upgraded && world->report.is_made);
        assert_int_equal(world->file.about.version, 2);
        assert_int_equal(open_again(world), 0);
        assert_false(world->report.is_upgraded || world->report.is_made);
        kvt_disk_file_close(&world->file);
    }
}

static void test_flips_decode(void **state)
{
    const struct kvt_disk_super super = {.version = 2,
                                         .serial = 3,
                                         .device_bytes = FILE_BYTES,
                                         .data_offset_bytes = KVT_DISK_DATA_OFFSET_BYTES,
                                         .device_uuid = {1},
                                         .store_id = {2}};
    uint8_t block[KVT_DISK_SUPER_BYTES], again[KVT_DISK_SUPER_BYTES];
    struct kvt_disk_super back;

    (void)state;
    kvt_disk_super_encode(block, &super);
    assert_int_equal(kvt_disk_super_decode(block, &back), 0);
    kvt_disk_super_encode(again, &back); /* the struct itself has bytes that mean nothing */
    assert_memory_equal(again, block, sizeof(block));
    assert_int_equal(back.device_bytes, FILE_BYTES);
    assert_int_equal(back.serial, 3);
    for (uint32_t bit = 0; bit < 8 * KVT_DISK_SUPER_BYTES; bit++) {
        block[bit / 8] ^= (uint8_t)(1u << bit % 8);
        assert_int_equal(kvt_disk_super_decode(block, &back), KVT_DISK_SUPER_E_FOREIGN);
        block[bit / 8] ^= (uint8_t)(1u << bit % 8);
    }
}

static void flip(struct world *world, uint64_t offset_bytes)
{
    uint8_t byte;

    bytes_read(world, offset_bytes, &byte, 1);
    byte ^= 0x10;
    bytes_write(world, offset_bytes, &byte, 1);
}

static void test_flips_open(void **state)
{
    struct world *world = *state;
    uint8_t copies[2][KVT_DISK_SUPER_BYTES];

    make(world);
    for (uint32_t at = 0; at < 2 * KVT_DISK_SUPER_BYTES; at += at % 4096 < 96 ? 5 : 509) {
        flip(world, at);
        assert_int_equal(open_again(world), 0);
        contents_check(world);
        bytes_read(world, 0, copies, sizeof(copies));
        assert_memory_equal(copies[0], copies[1], sizeof(copies[0])); /* healed */
        assert_memory_equal(copies[0], world->file.super, sizeof(copies[0]));
    }
    kvt_disk_file_close(&world->file);
    flip(world, 17);
    flip(world, KVT_DISK_SUPER_BYTES + 300);
    assert_int_equal(open_again(world), KVT_DISK_E_FOREIGN);
}

static void test_truncated(void **state)
{
    static const uint64_t cuts[] = {FILE_BYTES - 1, FILE_BYTES - 4096,
                                    KVT_DISK_DATA_OFFSET_BYTES + 8192};
    static const uint64_t deep_cuts[] = {KVT_DISK_DATA_OFFSET_BYTES - 1, 1u << 20, 8192, 4096};
    struct world *world = *state;
    uint8_t device_uuid[16];

    make(world);
    for (size_t i = 0; i < KVT_COUNT_OF(cuts); i++) {
        assert_int_equal(truncate(world->path, (off_t)cuts[i]), 0);
        assert_int_equal(open_again(world), 0);
        assert_true(world->report.is_truncated);
        contents_check(world);
        assert_int_equal(size_of(world), FILE_BYTES);
        assert_int_equal(open_again(world), 0);
        assert_false(world->report.is_truncated);
        kvt_disk_file_close(&world->file);
    }
    for (size_t i = 0; i < KVT_COUNT_OF(deep_cuts); i++) {
        memcpy(device_uuid, world->report.device_uuid, 16);
        assert_int_equal(truncate(world->path, (off_t)deep_cuts[i]), 0);
        assert_int_equal(open_again(world), 0);
        assert_true(world->report.is_truncated && world->report.is_made);
        assert_memory_not_equal(world->report.device_uuid, device_uuid, 16);
        kvt_disk_file_close(&world->file);
    }
    for (int bytes = 100; bytes >= 0; bytes -= 100) { /* not even a superblock is left */
        assert_int_equal(truncate(world->path, bytes), 0);
        assert_int_equal(open_again(world), 0);
        assert_true(world->report.is_made);
        assert_false(world->report.is_truncated);
        kvt_disk_file_close(&world->file);
    }
}

static void size_check(struct world *world, uint64_t bytes)
{
    assert_int_equal(world->report.bytes, bytes);
    assert_int_equal(world->file.bytes, bytes);
    assert_int_equal(size_of(world), bytes);
    assert_int_equal(world->file.about.device_bytes, bytes);
}

static void test_resize(void **state)
{
    struct world *world = *state;

    make(world);
    world->config.bytes = 2 * FILE_BYTES + 77; /* whole pages of it */
    assert_int_equal(open_again(world), 0);
    contents_check(world);
    size_check(world, 2 * FILE_BYTES);
    world->config.bytes = KVT_DISK_DATA_OFFSET_BYTES + 8192;
    assert_int_equal(open_again(world), 0);
    contents_check(world);
    size_check(world, world->config.bytes);
    assert_false(world->report.is_no_space || world->report.is_truncated);
    /* No room for more: what was there stays, and the size of before. */
    world->config.bytes = FILE_BYTES;
    for (int i = 0; i < 2; i++) {
        world->shim.fallocate_result = i == 0 ? -ENOSPC : -EDQUOT;
        assert_int_equal(open_again(world), 0);
        contents_check(world);
        assert_true(world->report.is_no_space);
        size_check(world, KVT_DISK_DATA_OFFSET_BYTES + 8192);
    }
    /* And with room it grows after all. */
    world->shim.fallocate_result = 0;
    assert_int_equal(open_again(world), 0);
    assert_false(world->report.is_no_space);
    contents_check(world);
    size_check(world, FILE_BYTES);
    /* Cut off, and the space is somebody else's now: it becomes smaller. */
    kvt_disk_file_close(&world->file);
    assert_int_equal(truncate(world->path, KVT_DISK_DATA_OFFSET_BYTES + 10000), 0);
    world->shim.fallocate_result = -ENOSPC;
    assert_int_equal(open_again(world), 0);
    assert_true(world->report.is_no_space && world->report.is_truncated);
    contents_check(world);
    size_check(world, KVT_DISK_DATA_OFFSET_BYTES + 8192);
    /* Longer than its superblock says (grown by a start that did not end): never more than asked.
     */
    kvt_disk_file_close(&world->file);
    assert_int_equal(truncate(world->path, 3 * FILE_BYTES), 0);
    world->shim.fallocate_result = 0;
    assert_int_equal(open_again(world), 0);
    contents_check(world);
    size_check(world, FILE_BYTES);
}

/* ---- what a power cut may leave ------------------------------------------------------------- */

/* Sizes that are durable are those at the last flush; what is written may be at any time. */
static uint64_t durable_bytes;
static uint32_t supers_written, cuts_made;
static bool is_name_durable, is_super_dirty; /* one copy at most may be torn */

static int guard_sync_parent(void *ctx, const char *path)
{
    (void)ctx;
    is_name_durable = true;
    return kvt_disk_io_real.sync_parent(NULL, path);
}

static int guard_fdatasync(void *ctx, int fd)
{
    struct kvt_disk_file_info info;
    int r = kvt_disk_io_real.fdatasync(NULL, fd);

    (void)ctx;
    assert_int_equal(r, 0);
    assert_int_equal(kvt_disk_io_real.file_info(NULL, fd, &info), 0);
    durable_bytes = info.bytes;
    is_super_dirty = false;
    return r;
}

static int64_t guard_pwrite(void *ctx, int fd, const void *buffer, uint32_t bytes,
                            uint64_t offset_bytes)
{
    struct kvt_disk_super super;

    (void)ctx;
    if (offset_bytes < 2ull * KVT_DISK_SUPER_BYTES) {
        assert_int_equal(kvt_disk_super_decode(buffer, &super), 0);
        assert_true(is_name_durable); /* else all of the file may be gone after its first writes */
        assert_true(super.device_bytes <= KVT_MAX(durable_bytes, KVT_DISK_DATA_OFFSET_BYTES));
        assert_false(is_super_dirty);
        is_super_dirty = true;
        supers_written++;
    }
    return kvt_disk_io_real.pwrite(NULL, fd, buffer, bytes, offset_bytes);
}

static int guard_truncate(void *ctx, int fd, uint64_t bytes)
{
    static _Alignas(4096) uint8_t block[KVT_DISK_SUPER_BYTES];
    struct kvt_disk_super super;

    (void)ctx;
    assert_false(is_super_dirty);
    for (uint32_t copy = 0; copy < 2 && bytes > 0 && bytes < durable_bytes; copy++) {
        assert_int_equal(kvt_disk_io_real.pread(NULL, fd, block, sizeof(block),
                                                copy * (uint64_t)KVT_DISK_SUPER_BYTES),
                         sizeof(block));
        assert_int_equal(kvt_disk_super_decode(block, &super), 0);
        assert_true(super.device_bytes <= bytes);
        cuts_made++;
    }
    return kvt_disk_io_real.truncate(NULL, fd, bytes);
}

/* A superblock never claims what a power cut could take away. */
static void test_superblock_after_size(void **state)
{
    static const uint64_t sizes[] = {FILE_BYTES, 2 * FILE_BYTES, FILE_BYTES + 4096, 3 * FILE_BYTES};
    struct world *world = *state;

    durable_bytes = 0;
    supers_written = cuts_made = 0;
    is_name_durable = is_super_dirty = false;
    world->shim.io.sync_parent = guard_sync_parent;
    world->shim.io.fdatasync = guard_fdatasync;
    world->shim.io.pwrite = guard_pwrite;
    world->shim.io.truncate = guard_truncate;
    for (size_t i = 0; i < KVT_COUNT_OF(sizes); i++) {
        world->config.bytes = sizes[i];
        assert_int_equal(open_again(world), 0);
        size_check(world, sizes[i]);
    }
    assert_int_equal(supers_written, 2 + 2 * KVT_COUNT_OF(sizes));
    assert_int_equal(cuts_made, 2);
}

static void test_no_space_at_all(void **state)
{
    struct world *world = *state;

    world->shim.fallocate_result = -ENOSPC;
    assert_int_equal(open_again(world), -ENOSPC);
    assert_true(size_of(world) <= KVT_DISK_DATA_OFFSET_BYTES); /* the space is not kept */
    world->shim.fallocate_result = 0;
    assert_int_equal(open_again(world), 0); /* and with room it goes on */
    size_check(world, FILE_BYTES);
    kvt_disk_file_close(&world->file);
    (void)unlink(world->path);
    world->shim.fallocate_result = -EOPNOTSUPP;
    assert_int_equal(open_again(world), 0);
    assert_false(world->file.is_preallocated);
    size_check(world, FILE_BYTES);
    world->config.bytes = KVT_DISK_DATA_OFFSET_BYTES + 4095;
    assert_int_equal(open_again(world), KVT_DISK_E_TOO_SMALL);
    (void)unlink(world->path);
    assert_int_equal(open_again(world), KVT_DISK_E_TOO_SMALL);
    world->config.bytes = 0; /* "all of it" has no meaning for a file that is not there */
    assert_int_equal(open_again(world), -ENOENT);
    assert_int_equal(access(world->path, F_OK), -1);
}

static void test_busy(void **state)
{
    struct world *world = *state;
    struct kvt_disk_config by_link = world->config;
    struct kvt_disk_report report;
    struct kvt_disk_file second;
    int fd;

    assert_int_equal(open_again(world), 0);
    assert_int_equal(kvt_disk_file_open(&second, &kvt_disk_io_real, &world->config, &report),
                     KVT_DISK_E_BUSY);
    assert_int_equal(report.pid, getpid());
    /* By another name of the same file it is busy as well, though nobody knows whose it is. */
    assert_int_equal(symlink("l3", world->link), 0);
    by_link.path = world->link;
    assert_int_equal(kvt_disk_file_open(&second, &kvt_disk_io_real, &by_link, &report),
                     KVT_DISK_E_BUSY);
    kvt_disk_file_close(&world->file);
    assert_int_equal(kvt_disk_file_open(&second, &kvt_disk_io_real, &by_link, &report), 0);
    kvt_disk_file_close(&second);
    /* An older daemon locks the file beside it alone. */
    fd = open(world->lock, O_RDWR | O_CLOEXEC);
    assert_int_equal(kvt_disk_io_real.lock(NULL, fd), 0);
    assert_int_equal(open_again(world), KVT_DISK_E_BUSY);
    close(fd);
    assert_int_equal(open_again(world), 0);
}

static void test_symbolic_links(void **state)
{
    struct world *world = *state;

    assert_int_equal(symlink("l3", world->link), 0);
    world->config.path = world->link;
    assert_int_equal(open_again(world), -ELOOP);
    assert_int_equal(access(world->path, F_OK), -1); /* nothing was made at its end */
    world->config.path = world->path;
    make(world);
    assert_int_equal(symlink("other", world->lock) < 0 ? errno : 0, EEXIST);
    assert_int_equal(unlink(world->lock), 0);
    assert_int_equal(symlink("other", world->lock), 0); /* a lock that leads elsewhere */
    assert_int_equal(open_again(world), -ELOOP);
}

static void test_read_only(void **state)
{
    struct world *world = *state;

    make(world);
    world->shim.open_result = -EROFS;
    assert_int_equal(open_again(world), KVT_DISK_E_READ_ONLY);
    world->shim.open_result = -EACCES;
    assert_int_equal(open_again(world), -EACCES);
}

/* ---- every call fails in turn --------------------------------------------------------------- */

static uint32_t fds_count(void)
{
    DIR *dir = opendir("/proc/self/fd");
    uint32_t count = 0;

    while (readdir(dir) != NULL)
        count++;
    closedir(dir);
    return count;
}

enum fault_case { NEW_FILE, GOOD_FILE, GROWING, SHRINKING, HEALING, CUT_OFF, VERSION_1, CASES };

static void case_prepare(struct world *world, enum fault_case which)
{
    make(world);
    if (which == NEW_FILE)
        assert_int_equal(unlink(world->path), 0);
    else if (which == GROWING)
        world->config.bytes = 2 * FILE_BYTES;
    else if (which == SHRINKING)
        world->config.bytes = KVT_DISK_DATA_OFFSET_BYTES + 8192;
    else if (which == HEALING)
        flip(world, 100);
    else if (which == CUT_OFF)
        assert_int_equal(truncate(world->path, KVT_DISK_DATA_OFFSET_BYTES + 12288), 0);
    else if (which == VERSION_1)
        for (uint32_t copy = 0; copy < 2; copy++)
            super_put(world, copy, 1);
}

/* One opening whose call number @call fails. False: it does not make so many. */
static bool fault_run(struct world *world, enum fault_case which, uint32_t call)
{
    bool is_good = which != NEW_FILE && which != VERSION_1;
    uint32_t fds;
    int r;

    case_prepare(world, which);
    fds = fds_count();
    world->shim.fail_call = call;
    world->shim.calls = 0;
    r = open_again(world);
    if (r == 0)
        assert_true(world->file.bytes <= world->config.bytes);
    else
        assert_int_equal(r, world->shim.call_result);
    if (r == 0 && is_good)
        contents_check(world);
    kvt_disk_file_close(&world->file);
    assert_int_equal(fds_count(), fds);
    world->shim.fail_call = 0;
    assert_int_equal(open_again(world), 0);
    assert_true(!is_good || !world->report.is_made);
    if (is_good)
        contents_check(world);
    size_check(world, world->config.bytes);
    kvt_disk_file_close(&world->file);
    return world->shim.calls >= call;
}

static void test_each_call_fails(void **state)
{
    static const int results[] = {-EIO, -ENOSPC, -ENOMEM};
    struct world *world = *state;
    uint32_t call, runs = 0;

    for (int which = 0; which < CASES; which++) {
        for (size_t i = 0; i < KVT_COUNT_OF(results); i++) {
            world->shim.call_result = results[i];
            world->shim.is_failing_on = i == 0;
            world->shim.is_tearing = i < 2;
            for (call = 1; fault_run(world, (enum fault_case)which, call); call++)
                runs++;
            assert_true(call > 6);
        }
    }
    print_message("%u openings with a failing call\n", runs);
}

/* Requests of a daemon that is gone keep the file that they were made on open. */
static void *requests_end(void *ctx)
{
    (void)usleep(300000);
    (void)close(*(int *)ctx);
    return NULL;
}

static void test_requests_of_a_dead_daemon(void **state)
{
    struct flock whole = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
    struct world *world = *state;
    uint64_t start_ns;
    pthread_t thread;
    int fd;

    assert_int_equal(open_again(world), 0);
    kvt_disk_file_close(&world->file);
    fd = open(world->path, O_RDWR | O_CLOEXEC);
    assert_true(fd >= 0);
    assert_int_equal(fcntl(fd, F_OFD_SETLK, &whole), 0);
    start_ns = kvt_clock_mono_ns();
    assert_int_equal(pthread_create(&thread, NULL, requests_end, &fd), 0);
    assert_int_equal(open_again(world), 0);
    assert_true(kvt_clock_mono_ns() - start_ns >= 250 * KVT_NS_PER_MS);
    (void)pthread_join(thread, NULL);
    /* While this one is open its requests are protected in the same way. */
    fd = open(world->path, O_RDWR | O_CLOEXEC);
    assert_int_equal(fcntl(fd, F_OFD_SETLK, &whole), -1);
    (void)close(fd);
    kvt_disk_file_close(&world->file);
}

#define WORLD_TEST(name) cmocka_unit_test_setup_teardown(name, world_make, world_free)

int main(void)
{
    const struct CMUnitTest tests[] = {
        WORLD_TEST(test_made_and_found),
        WORLD_TEST(test_other_store),
        WORLD_TEST(test_foreign),
        WORLD_TEST(test_versions),
        WORLD_TEST(test_requests_of_a_dead_daemon),
        cmocka_unit_test(test_flips_decode),
        WORLD_TEST(test_flips_open),
        WORLD_TEST(test_truncated),
        WORLD_TEST(test_resize),
        WORLD_TEST(test_superblock_after_size),
        WORLD_TEST(test_no_space_at_all),
        WORLD_TEST(test_busy),
        WORLD_TEST(test_symbolic_links),
        WORLD_TEST(test_read_only),
        WORLD_TEST(test_each_call_fails),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
