/* The file or raw block device of L3: whose it is, its lock, its size. docs/formats.md has the
 * bytes, super.h the picture.
 *
 * A superblock never claims more than is there: it is written before the space of a new file is
 * allocated (so the file is known as ours however far its making got), after a file grew, and
 * before it shrinks. What is there and is not ours is not touched. The data itself is locked
 * (flock; a raw device is held exclusively as well), and so is a file beside it, PATH.lock, which
 * says who holds it. A path may lead through symbolic links to something that exists; a file is
 * made only under its own name.
 *
 * init-only, but for `probe`, which the tier's thread uses, and `records`, which belongs to whoever
 * writes the catalog. */
#pragma once

#include "tiers/disk/disk.h"
#include "tiers/disk/io.h"
#include "tiers/disk/super.h"

struct kvt_disk_file {
    int fd; /* -1: none, as are the others */
    /* The data opened once more, and the file that names the holder: both locked. Not `fd`, which a
     * ring keeps for a moment after a killed daemon is gone. */
    int hold_fd, lock_fd;
    bool is_direct, is_preallocated, is_raw;
    uint32_t super_copy; /* the copy that counts */
    uint64_t bytes;      /* in use, superblock and catalog counted */
    struct kvt_disk_super about;
    uint8_t *super;   /* KVT_DISK_SUPER_BYTES, aligned: as it is on disk */
    uint8_t *probe;   /* the same size: for the tier's thread */
    uint8_t *records; /* two copies of a record of the catalog */
};

/* Results as kvt_disk_open. On failure *file is as after close. */
KVT_MUST_USE int kvt_disk_file_open(struct kvt_disk_file *file, const struct kvt_disk_io *io,
                                    const struct kvt_disk_config *config,
                                    struct kvt_disk_report *report);
void kvt_disk_file_close(struct kvt_disk_file *file); /* idempotent */

/* lock.c: locks hold_fd, which is open, and lock_path. 0, KVT_DISK_E_BUSY (*ret_pid is the
 * holder's, or 0) or -errno. @lock_path NULL: only the data itself. */
KVT_MUST_USE int kvt_disk_lock_take(struct kvt_disk_file *file, const struct kvt_disk_io *io,
                                    const char *lock_path, int *ret_pid);
/* PATH.lock, or NULL (no memory). Free it with kvt_free. */
KVT_MUST_USE char *kvt_disk_lock_path(const char *path);
