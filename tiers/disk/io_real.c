#include <fcntl.h>
#include <liburing.h>
#include <linux/fs.h>
#include <poll.h>
#include <string.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include "daemon/base/alloc.h"
#include "daemon/base/clock.h"
#include "tiers/disk/io.h"

struct kvt_disk_ring {
    struct io_uring uring;
    int fd;
    bool is_file_registered;
};

static int real_open(void *ctx, const char *path, int flags, mode_t mode)
{
    int fd = open(path, flags, mode);

    (void)ctx;
    return fd < 0 ? -errno : fd;
}

static int real_file_info(void *ctx, int fd, struct kvt_disk_file_info *ret_info)
{
    struct stat st;

    (void)ctx;
    if (fstat(fd, &st) < 0)
        return -errno;
    ret_info->bytes = (uint64_t)st.st_size;
    ret_info->allocated_bytes = (uint64_t)st.st_blocks * 512u;
    ret_info->is_regular = S_ISREG(st.st_mode);
    ret_info->is_block = S_ISBLK(st.st_mode);
    return 0;
}

static int real_device_info(void *ctx, int fd, struct kvt_disk_device_info *ret_info)
{
    uint64_t bytes;
    int logical_block_bytes, is_read_only;

    (void)ctx;
    if (ioctl(fd, BLKGETSIZE64, &bytes) < 0 || ioctl(fd, BLKSSZGET, &logical_block_bytes) < 0 ||
        ioctl(fd, BLKROGET, &is_read_only) < 0)
        return -errno;
    *ret_info = (struct kvt_disk_device_info){.bytes = bytes,
                                              .logical_block_bytes = (uint32_t)logical_block_bytes,
                                              .is_read_only = is_read_only != 0};
    return 0;
}

static int real_lock_requests(void *ctx, int fd)
{
    struct flock whole = {.l_type = F_WRLCK, .l_whence = SEEK_SET};

    (void)ctx;
    if (fcntl(fd, F_OFD_SETLK, &whole) == 0)
        return 0;
    return errno == EACCES ? -EAGAIN : -errno;
}

static int real_lock(void *ctx, int fd)
{
    (void)ctx;
    return flock(fd, LOCK_EX | LOCK_NB) < 0 ? -errno : 0;
}

static int real_sync_parent(void *ctx, const char *path)
{
    const char *slash = strrchr(path, '/');
    kvt_autofree char *parent = kvt_alloc_text(slash == NULL ? "." : slash == path ? "/" : path);
    kvt_autoclose int fd = -1;

    (void)ctx;
    if (parent == NULL)
        return -ENOMEM;
    if (slash != NULL && slash != path)
        parent[slash - path] = '\0';
    fd = open(parent, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    return fd < 0 || fsync(fd) < 0 ? -errno : 0;
}

static int real_fallocate(void *ctx, int fd, uint64_t bytes)
{
    (void)ctx;
    return fallocate(fd, 0, 0, (off_t)bytes) < 0 ? -errno : 0;
}

static int real_truncate(void *ctx, int fd, uint64_t bytes)
{
    (void)ctx;
    return ftruncate(fd, (off_t)bytes) < 0 ? -errno : 0;
}

static int64_t real_pread(void *ctx, int fd, void *buffer, uint32_t bytes, uint64_t offset_bytes)
{
    ssize_t n = pread(fd, buffer, bytes, (off_t)offset_bytes);

    (void)ctx;
    return n < 0 ? -errno : n;
}

static int64_t real_pwrite(void *ctx, int fd, const void *buffer, uint32_t bytes,
                           uint64_t offset_bytes)
{
    ssize_t n = pwrite(fd, buffer, bytes, (off_t)offset_bytes);

    (void)ctx;
    return n < 0 ? -errno : n;
}

static int real_fdatasync(void *ctx, int fd)
{
    (void)ctx;
    return fdatasync(fd) < 0 ? -errno : 0;
}

static int real_ring_open(void *ctx, struct kvt_disk_ring **ret_ring, int fd, uint32_t entries)
{
    /* The best that the kernel knows, then what older ones know. */
    static const unsigned int flags[] = {
        IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN | IORING_SETUP_TASKRUN_FLAG,
        IORING_SETUP_COOP_TASKRUN | IORING_SETUP_TASKRUN_FLAG,
        0,
    };
    struct kvt_disk_ring *ring = kvt_alloc_zeroed(1, sizeof(*ring));
    int r = -EINVAL;

    (void)ctx;
    if (ring == NULL)
        return -ENOMEM;
    for (size_t i = 0; i < KVT_COUNT_OF(flags) && r == -EINVAL; i++)
        r = io_uring_queue_init(entries, &ring->uring, flags[i]);
    if (r < 0) {
        kvt_free(ring);
        return r;
    }
    ring->fd = fd;
    *ret_ring = ring;
    return 0;
}

static void real_ring_close(void *ctx, struct kvt_disk_ring *ring)
{
    (void)ctx;
    io_uring_queue_exit(&ring->uring);
    kvt_free(ring);
}

static int real_ring_register_file(void *ctx, struct kvt_disk_ring *ring)
{
    int r = io_uring_register_files(&ring->uring, &ring->fd, 1);

    (void)ctx;
    ring->is_file_registered = r == 0;
    return r;
}

static int real_ring_register_buffers(void *ctx, struct kvt_disk_ring *ring,
                                      const struct kvt_disk_buffer *buffers, uint32_t count)
{
    struct iovec *iovecs = kvt_alloc_zeroed(count, sizeof(*iovecs));
    int r;

    (void)ctx;
    if (iovecs == NULL)
        return -ENOMEM;
    for (uint32_t i = 0; i < count; i++)
        iovecs[i] = (struct iovec){.iov_base = buffers[i].base, .iov_len = buffers[i].bytes};
    r = io_uring_register_buffers(&ring->uring, iovecs, count);
    kvt_free(iovecs);
    return r;
}

static void sqe_fill(const struct kvt_disk_ring *ring, struct io_uring_sqe *to,
                     const struct kvt_disk_sqe *from)
{
    int fd = ring->is_file_registered ? 0 : ring->fd;

    switch (from->op) {
    case KVT_DISK_OP_READ:
        if (from->buffer_idx >= 0)
            io_uring_prep_read_fixed(to, fd, from->buffer, from->bytes, from->offset_bytes,
                                     from->buffer_idx);
        else
            io_uring_prep_read(to, fd, from->buffer, from->bytes, from->offset_bytes);
        break;
    case KVT_DISK_OP_WRITE:
        if (from->buffer_idx >= 0)
            io_uring_prep_write_fixed(to, fd, from->buffer, from->bytes, from->offset_bytes,
                                      from->buffer_idx);
        else
            io_uring_prep_write(to, fd, from->buffer, from->bytes, from->offset_bytes);
        break;
    case KVT_DISK_OP_FLUSH:
        io_uring_prep_fsync(to, fd, IORING_FSYNC_DATASYNC);
        break;
    case KVT_DISK_OP_POLL:
        io_uring_prep_poll_add(to, from->poll_fd, POLLIN);
        break;
    }
    if (from->op != KVT_DISK_OP_POLL && ring->is_file_registered)
        to->flags |= IOSQE_FIXED_FILE;
    io_uring_sqe_set_data64(to, from->user_data);
}

/* What the kernel did not take must not go out with a later submission: it becomes a no-op. */
static void sq_forget(struct io_uring *uring)
{
    unsigned int ready = io_uring_sq_ready(uring), mask = *uring->sq.kring_mask;
    unsigned int tail = uring->sq.sqe_tail;

    for (unsigned int i = 0; i < ready; i++) {
        struct io_uring_sqe *sqe = &uring->sq.sqes[(tail - 1 - i) & mask];

        io_uring_prep_nop(sqe);
        io_uring_sqe_set_data64(sqe, KVT_DISK_USER_DATA_NONE);
    }
}

static int real_ring_submit(void *ctx, struct kvt_disk_ring *ring, const struct kvt_disk_sqe *sqes,
                            uint32_t count)
{
    unsigned int stale = io_uring_sq_ready(&ring->uring);
    uint32_t queued = 0;
    int r;

    (void)ctx;
    while (queued < count) {
        struct io_uring_sqe *sqe = io_uring_get_sqe(&ring->uring);

        if (sqe == NULL)
            break;
        sqe_fill(ring, sqe, &sqes[queued++]);
    }
    if (queued + stale == 0)
        return 0;
    r = io_uring_submit(&ring->uring);
    if (r < 0 || (unsigned int)r < queued + stale)
        sq_forget(&ring->uring);
    if (r < 0)
        return r;
    return (unsigned int)r <= stale ? 0 : r - (int)stale;
}

static int real_ring_wait(void *ctx, struct kvt_disk_ring *ring, uint64_t timeout_ns)
{
    struct __kernel_timespec ts = {.tv_sec = (int64_t)(timeout_ns / KVT_NS_PER_S),
                                   .tv_nsec = (long long)(timeout_ns % KVT_NS_PER_S)};
    struct io_uring_cqe *cqe;

    (void)ctx;
    if (timeout_ns == KVT_TIME_NEVER_NS)
        return io_uring_wait_cqe(&ring->uring, &cqe);
    return io_uring_wait_cqe_timeout(&ring->uring, &cqe, &ts);
}

static uint32_t real_ring_reap(void *ctx, struct kvt_disk_ring *ring, struct kvt_disk_cqe *ret_cqes,
                               uint32_t max)
{
    uint32_t count = 0;
    struct io_uring_cqe *cqe;

    (void)ctx;
    while (count < max && io_uring_peek_cqe(&ring->uring, &cqe) == 0 && cqe != NULL) {
        ret_cqes[count].user_data = io_uring_cqe_get_data64(cqe);
        ret_cqes[count].result = cqe->res;
        count++;
        io_uring_cqe_seen(&ring->uring, cqe);
    }
    return count;
}

const struct kvt_disk_io kvt_disk_io_real = {
    .open = real_open,
    .file_info = real_file_info,
    .device_info = real_device_info,
    .lock = real_lock,
    .lock_requests = real_lock_requests,
    .sync_parent = real_sync_parent,
    .fallocate = real_fallocate,
    .truncate = real_truncate,
    .pread = real_pread,
    .pwrite = real_pwrite,
    .fdatasync = real_fdatasync,
    .ring_open = real_ring_open,
    .ring_close = real_ring_close,
    .ring_register_file = real_ring_register_file,
    .ring_register_buffers = real_ring_register_buffers,
    .ring_submit = real_ring_submit,
    .ring_wait = real_ring_wait,
    .ring_reap = real_ring_reap,
};
