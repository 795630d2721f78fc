#include "tiers/disk/file.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/random.h>
#include <unistd.h>

#include "daemon/base/alloc.h"
#include "daemon/base/bytes.h"
#include "daemon/base/clock.h"
#include "daemon/base/hash.h"

#define SUPER_MAGIC 0x314b53494454564bull /* "KVTDISK1" read as little-endian */
#define SUPER_VERSION 1u
#define SUPER_ENDIAN_MARK 0x01020304u

enum super_field {
    AT_MAGIC = 0,
    AT_VERSION = 8,
    AT_ENDIAN_MARK = 12,
    AT_UUID = 16,
    AT_BYTES = 32,
    AT_DATA_OFFSET = 40,
    AT_CREATED_REAL_NS = 48,
    AT_HASH = KVT_DISK_SUPER_BYTES - 8,
};

static bool super_is_valid(const uint8_t *super)
{
    return kvt_get_u64(super, AT_MAGIC) == SUPER_MAGIC &&
           kvt_get_u32(super, AT_VERSION) == SUPER_VERSION &&
           kvt_get_u32(super, AT_ENDIAN_MARK) == SUPER_ENDIAN_MARK &&
           kvt_get_u64(super, AT_HASH) == kvt_hash64(super, AT_HASH, 0);
}

static int super_make(uint8_t *super)
{
    memset(super, 0, KVT_DISK_SUPER_BYTES);
    kvt_put_u64(super, AT_MAGIC, SUPER_MAGIC);
    kvt_put_u32(super, AT_VERSION, SUPER_VERSION);
    kvt_put_u32(super, AT_ENDIAN_MARK, SUPER_ENDIAN_MARK);
    if (getrandom(super + AT_UUID, 16, 0) != 16)
        return kvt_trace(-EIO);
    kvt_put_u64(super, AT_DATA_OFFSET, KVT_DISK_DATA_OFFSET_BYTES);
    kvt_put_u64(super, AT_CREATED_REAL_NS, kvt_clock_real_ns());
    return 0;
}

/* Both copies, for a file of @bytes. */
static int super_write(struct kvt_disk_file *file, const struct kvt_disk_io *io, uint64_t bytes)
{
    kvt_put_u64(file->super, AT_BYTES, bytes);
    kvt_put_u64(file->super, AT_HASH, kvt_hash64(file->super, AT_HASH, 0));
    for (uint32_t copy = 0; copy < 2; copy++) {
        int64_t n = io->pwrite(io->ctx, file->fd, file->super, KVT_DISK_SUPER_BYTES,
                               copy * KVT_DISK_SUPER_BYTES);

        if (n < 0)
            return kvt_trace((int)n);
        if (n != KVT_DISK_SUPER_BYTES)
            return kvt_trace(-EIO);
    }
    return 0;
}

/* Reads the first valid copy. 0, KVT_DISK_E_FOREIGN or -errno. */
static int super_read(struct kvt_disk_file *file, const struct kvt_disk_io *io)
{
    for (uint32_t copy = 0; copy < 2; copy++) {
        int64_t n = io->pread(io->ctx, file->fd, file->super, KVT_DISK_SUPER_BYTES,
                              copy * KVT_DISK_SUPER_BYTES);

        if (n < 0)
            return kvt_trace((int)n);
        if (n == KVT_DISK_SUPER_BYTES && super_is_valid(file->super))
            return 0;
    }
    return KVT_DISK_E_FOREIGN;
}

static int lock_take(struct kvt_disk_file *file, const char *path, int *ret_pid)
{
    kvt_autofree char *lock_path = kvt_alloc_zeroed(strlen(path) + sizeof(".lock"), 1);
    char text[24] = {0};
    int bytes;

    if (lock_path == NULL)
        return kvt_trace(-ENOMEM);
    snprintf(lock_path, strlen(path) + sizeof(".lock"), "%s.lock", path);
    file->lock_fd = open(lock_path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (file->lock_fd < 0)
        return kvt_trace(-errno);
    if (flock(file->lock_fd, LOCK_EX | LOCK_NB) < 0) {
        if (errno != EWOULDBLOCK)
            return kvt_trace(-errno);
        *ret_pid = 0;
        if (pread(file->lock_fd, text, sizeof(text) - 1, 0) > 0)
            *ret_pid = (int)strtol(text, NULL, 10);
        return KVT_DISK_E_BUSY;
    }
    bytes = snprintf(text, sizeof(text), "%d\n", (int)getpid());
    if (ftruncate(file->lock_fd, 0) < 0 || pwrite(file->lock_fd, text, (size_t)bytes, 0) != bytes)
        return kvt_trace(errno != 0 ? -errno : -EIO);
    return 0;
}

/* O_DIRECT where the file system knows it (EINVAL says that it does not). */
static int data_open(struct kvt_disk_file *file, const struct kvt_disk_io *io, const char *path)
{
    int flags = O_RDWR | O_CREAT | O_CLOEXEC;

    file->is_direct = true;
    file->fd = io->open(io->ctx, path, flags | O_DIRECT, 0600);
    if (file->fd == -EINVAL) {
        file->is_direct = false;
        file->fd = io->open(io->ctx, path, flags, 0600);
    }
    if (file->fd < 0) {
        int r = file->fd;

        file->fd = -1;
        return kvt_trace(r);
    }
    return 0;
}

/* Gives the file its size and all of its space. */
static int data_allocate(struct kvt_disk_file *file, const struct kvt_disk_io *io)
{
    int r = io->truncate(io->ctx, file->fd, file->bytes);

    if (r < 0)
        return kvt_trace(r);
    r = io->fallocate(io->ctx, file->fd, file->bytes);
    file->is_preallocated = r == 0;
    if (r == 0 || r == -EOPNOTSUPP || r == -ENOSYS)
        return 0;
    /* Do not sit on the part that was got; the superblock stays, so the next start goes on. */
    (void)io->truncate(io->ctx, file->fd, KVT_DISK_DATA_OFFSET_BYTES);
    return kvt_trace(r);
}

static int data_prepare(struct kvt_disk_file *file, const struct kvt_disk_io *io)
{
    struct kvt_disk_file_info info;
    int r = io->file_info(io->ctx, file->fd, &info);

    if (r < 0)
        return kvt_trace(r);
    if (!info.is_regular)
        return KVT_DISK_E_FOREIGN;
    r = info.bytes == 0 ? super_make(file->super) : super_read(file, io);
    if (r != 0)
        return r;
    if (kvt_get_u64(file->super, AT_BYTES) != file->bytes) {
        r = super_write(file, io, file->bytes);
        if (r < 0)
            return kvt_trace(r);
    }
    file->is_preallocated = true;
    if (info.bytes != file->bytes || info.allocated_bytes < file->bytes)
        r = data_allocate(file, io);
    if (r == 0)
        r = io->fdatasync(io->ctx, file->fd);
    return r < 0 ? kvt_trace(r) : 0;
}

int kvt_disk_file_open(struct kvt_disk_file *file, const struct kvt_disk_io *io, const char *path,
                       uint64_t bytes, int *ret_pid)
{
    int r;

    *file = (struct kvt_disk_file){.fd = -1, .lock_fd = -1};
    file->bytes = kvt_round_down(bytes, KVT_DIO_ALIGN_BYTES);
    if (file->bytes <= KVT_DISK_DATA_OFFSET_BYTES)
        return KVT_DISK_E_TOO_SMALL;
    file->super = kvt_alloc_aligned(KVT_DIO_ALIGN_BYTES, KVT_DISK_SUPER_BYTES);
    file->probe = kvt_alloc_aligned(KVT_DIO_ALIGN_BYTES, KVT_DISK_SUPER_BYTES);
    r = file->super == NULL || file->probe == NULL ? -ENOMEM : 0;
    if (r == 0)
        r = lock_take(file, path, ret_pid);
    if (r == 0)
        r = data_open(file, io, path);
    if (r == 0)
        r = data_prepare(file, io);
    if (r != 0)
        kvt_disk_file_close(file);
    return r;
}

void kvt_disk_file_close(struct kvt_disk_file *file)
{
    if (file->fd >= 0)
        (void)close(file->fd);
    if (file->lock_fd >= 0)
        (void)close(file->lock_fd);
    kvt_free(file->super);
    kvt_free(file->probe);
    *file = (struct kvt_disk_file){.fd = -1, .lock_fd = -1};
}
