/* L3: one preallocated file, O_DIRECT, io_uring, one thread. Slots go in and out whole, straight
 * from and to L2 memory (registered buffers and file where the limits allow). Bytes in flight are
 * bounded and tuned: more than the device can use only adds latency. Every read is verified.
 *
 *   file:  superblock (4 KiB, twice) | data: slots at 4 KiB multiples ............... |
 *
 * offset_bytes of a KVT_PLACE_DISK is into the data area. The file never grows past `bytes`. A
 * device that fails again and again, or gives back many damaged slots in a row, is out of service:
 * transfers come back at once with KVT_XFER_OUT_OF_SERVICE, and it is tried again after a pause
 * that doubles with every outage until transfers succeed again. So is one that keeps a transfer for
 * hang_ns past its deadline: it is tried again when it has given back what it held. (Where io_uring
 * is forbidden a hanging call hangs the thread, and nobody sees it.)
 *
 * open/close: init-only (main thread). */
#pragma once

#include "tiers/tier.h"

struct kvt_disk_io; /* table of system calls, the seam for fault shims: tiers/disk/io.h */

struct kvt_disk_config {
    const char *path;     /* of the file; its directory exists; created 0600 */
    uint64_t bytes;       /* superblock and data together */
    uint8_t *host_memory; /* L2: both ends of every transfer */
    uint64_t host_memory_bytes;
    uint64_t inflight_bytes_max; /* 0: tuned by the tier, starting at 4 MiB a direction */
    uint32_t inflight_max;
    uint32_t failures_max;               /* failures in a row before it is out of service; 0: 8 */
    uint64_t retry_ns_min, retry_ns_max; /* pause before it is tried again; 0: 1 s, 60 s */
    uint64_t hang_ns;                    /* past a deadline, before it is out of service; 0: 2 s */
    const struct kvt_disk_io *io;        /* NULL: the real one */
    struct kvt_doorbell *doorbell;
};

enum {
    KVT_DISK_E_BUSY = 1,      /* another daemon holds the file's lock; *ret_pid says which */
    KVT_DISK_E_FOREIGN = 2,   /* a file that is not ours is there: not touched */
    KVT_DISK_E_TOO_SMALL = 3, /* `bytes` leaves no room for data */
};

/* -errno (ENOSPC: the file system has not that much room), one of the above, or 0. */
KVT_MUST_USE int kvt_disk_open(struct kvt_tier **ret_tier, const struct kvt_disk_config *config,
                               int *ret_pid);
