/* Raw block devices as L3: may one be taken? Somebody's file system must never be overwritten
 * because a path was mistyped, so a device without a superblock of ours is taken only when it is
 * blank: no byte in its first and last MiB, where every file system, partition table, volume
 * manager and RAID leaves its mark. init-only. */
#pragma once

#include "tiers/disk/file.h"

#define KVT_DISK_RAW_MARKS_BYTES (1u << 20) /* at either end */

/* What is at the front of a device of @bytes that has no valid superblock. 0: nothing (or only a
 * beginning of ours), KVT_DISK_E_FOREIGN and what was recognised in @ret_why, or -errno. */
KVT_MUST_USE int kvt_disk_raw_check_blank(const struct kvt_disk_file *file,
                                          const struct kvt_disk_io *io, uint64_t bytes,
                                          char *ret_why, size_t why_bytes);
/* Zeroes what is before the data, and the last MiB as well: no old mark outlives a formatting. */
KVT_MUST_USE int kvt_disk_raw_wipe(const struct kvt_disk_file *file, const struct kvt_disk_io *io,
                                   uint64_t bytes);
/* Opens the device as the only one who may write it; KVT_DISK_E_MOUNTED, with the mount point in
 * @ret_why where it is known. */
KVT_MUST_USE int kvt_disk_raw_open(struct kvt_disk_file *file, const struct kvt_disk_io *io,
                                   const char *path, char *ret_why, size_t why_bytes);
