/* The file of L3 on its file system: its lock, superblock and size. docs/formats.md has the bytes.
 *
 * The superblock is written before the space is allocated, so a file of ours is recognised however
 * far its making got; a file that is not empty and has none is somebody else's. The lock is a
 * file beside it, PATH.lock, which holds the pid of its owner. init-only, but for the buffer, which
 * the tier's thread uses for probes. */
#pragma once

#include "tiers/disk/disk.h"
#include "tiers/disk/io.h"

#define KVT_DISK_SUPER_BYTES 4096u
#define KVT_DISK_DATA_OFFSET_BYTES (2u * KVT_DISK_SUPER_BYTES)

struct kvt_disk_file {
    int fd, lock_fd; /* -1: none */
    bool is_direct, is_preallocated;
    uint64_t bytes;
    uint8_t *super; /* KVT_DISK_SUPER_BYTES, aligned: as it is on disk */
    uint8_t *probe; /* the same size: for the tier's thread */
};

/* Results as kvt_disk_open. On failure *file is as after close. */
KVT_MUST_USE int kvt_disk_file_open(struct kvt_disk_file *file, const struct kvt_disk_io *io,
                                    const char *path, uint64_t bytes, int *ret_pid);
void kvt_disk_file_close(struct kvt_disk_file *file); /* idempotent */
