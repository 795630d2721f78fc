/* The system calls of L3 in one table: the real one, or a test's that fails, delays, shortens or
 * repeats. Calls answer a count, a descriptor or 0, and -errno; none of them sets errno for its
 * caller. `ctx` is the table's own and is passed to each.
 *
 * open .. fdatasync: init-only, and the tier's thread where io_uring is forbidden. ring_*: the
 * tier's thread only; a ring is used by the thread that opened it. */
#pragma once

#include <sys/types.h>

#include "daemon/base/def.h"

struct kvt_disk_ring;

enum kvt_disk_op {
    KVT_DISK_OP_READ,
    KVT_DISK_OP_WRITE,
    KVT_DISK_OP_FLUSH, /* fdatasync */
    KVT_DISK_OP_POLL,  /* @poll_fd becomes readable */
};

struct kvt_disk_sqe {
    enum kvt_disk_op op;
    int poll_fd;
    int buffer_idx; /* of the registered buffers, -1: none */
    uint32_t bytes;
    uint8_t *buffer;
    uint64_t offset_bytes;
    uint64_t user_data;
};

struct kvt_disk_cqe {
    uint64_t user_data;
    int32_t result; /* bytes, or -errno */
};
/* A completion that means nothing. */
#define KVT_DISK_USER_DATA_NONE UINT64_MAX

struct kvt_disk_file_info {
    uint64_t bytes, allocated_bytes;
    bool is_regular, is_block;
};

struct kvt_disk_device_info { /* of a raw block device */
    uint64_t bytes;
    uint32_t logical_block_bytes;
    bool is_read_only;
};

struct kvt_disk_buffer {
    uint8_t *base;
    uint64_t bytes;
};

struct kvt_disk_io {
    void *ctx;
    int (*open)(void *ctx, const char *path, int flags, mode_t mode);
    int (*file_info)(void *ctx, int fd, struct kvt_disk_file_info *ret_info);
    int (*device_info)(void *ctx, int fd, struct kvt_disk_device_info *ret_info);
    int (*lock)(void *ctx, int fd); /* -EWOULDBLOCK: somebody else has it */
    /* A lock of the open file itself: requests that are in flight keep it, beyond the end of their
     * process. -EAGAIN: somebody else's are. */
    int (*lock_requests)(void *ctx, int fd);
    /* The directory entry of @path is durable. */
    int (*sync_parent)(void *ctx, const char *path);
    int (*fallocate)(void *ctx, int fd, uint64_t bytes);
    int (*truncate)(void *ctx, int fd, uint64_t bytes);
    int64_t (*pread)(void *ctx, int fd, void *buffer, uint32_t bytes, uint64_t offset_bytes);
    int64_t (*pwrite)(void *ctx, int fd, const void *buffer, uint32_t bytes, uint64_t offset_bytes);
    int (*fdatasync)(void *ctx, int fd);
    int (*ring_open)(void *ctx, struct kvt_disk_ring **ret_ring, int fd, uint32_t entries);
    void (*ring_close)(void *ctx, struct kvt_disk_ring *ring);
    /* -errno where the limits forbid it: then the ring works without. */
    int (*ring_register_file)(void *ctx, struct kvt_disk_ring *ring);
    int (*ring_register_buffers)(void *ctx, struct kvt_disk_ring *ring,
                                 const struct kvt_disk_buffer *buffers, uint32_t count);
    /* How many of @sqes the kernel took, from the first; those that it did not are forgotten. */
    int (*ring_submit)(void *ctx, struct kvt_disk_ring *ring, const struct kvt_disk_sqe *sqes,
                       uint32_t count);
    /* Sleeps until there is a completion or @timeout_ns passed. */
    int (*ring_wait)(void *ctx, struct kvt_disk_ring *ring, uint64_t timeout_ns);
    uint32_t (*ring_reap)(void *ctx, struct kvt_disk_ring *ring, struct kvt_disk_cqe *ret_cqes,
                          uint32_t max);
};

extern const struct kvt_disk_io kvt_disk_io_real;
