/* A device of L3: a preallocated file or a raw block device, O_DIRECT, io_uring, one thread. Slots
 * go in and out whole, straight from and to L2 memory (registered buffers and file where the limits
 * allow). Bytes in flight are bounded and tuned: more than the device can use only adds latency.
 * Every read is verified.
 *
 *   superblock, state, catalog (2 MiB) | data: slots at 4 KiB multiples ............... |
 *
 * offset_bytes of a KVT_PLACE_DISK is into the data area. The file never grows past `bytes`. A
 * device that fails again and again, or gives back many damaged slots in a row, is out of service:
 * transfers come back at once with KVT_XFER_OUT_OF_SERVICE, and it is tried again after a pause
 * that doubles with every outage until transfers succeed again. So is one that keeps a transfer for
 * hang_ns past its deadline: it is tried again when it has given back what it held. (Where io_uring
 * is forbidden a hanging call hangs the thread, and nobody sees it.)
 *
 * Transfers that follow each other in the queue, on disk and in memory are one request of up to
 * 1 MiB; each is verified, and fails, by itself. Foreground goes before background, and while
 * foreground reads come, hardly any background is in flight (256 KiB or one transfer): what a read
 * finds in the device's queue is what it waits for. Background may so get less than its budget.
 *
 * What waits for a device is late at its deadline, whether the device moves or not. A flush that
 * fails takes the device out of service at once (tier.h says what is lost): flushes fail like that
 * one until its failure was reaped and a probe, which ends with a flush, was good.
 *
 * Closing takes hang_ns more at most for what a device that hangs has in flight. A device that is
 * out of service may be closed with transfers that were not reaped: they do not come back, the
 * kernel may still write to the memory of reads (it holds the pages: unmapping is safe, using them
 * for something else is not), and a write may still arrive, late, in its slot. A plain call that
 * hangs cannot be ended: close gives up a little later, and thread, file and lock stay until the
 * process ends.
 *
 * open/close: init-only (main thread). */
#pragma once

#include "tiers/tier.h"

struct kvt_disk_io; /* table of system calls, the seam for fault shims: tiers/disk/io.h */

struct kvt_disk_config {
    const char *path;      /* a file (its directory exists; made 0600) or a raw block device */
    const char *lock_path; /* names the holder; NULL: PATH.lock, and of a raw device none */
    uint64_t bytes;        /* all of it counted, never exceeded; 0: the whole raw device */
    uint8_t store_id[16];  /* of the set; all zero: the device's own, or a new one */
    bool is_format;        /* what is not ours, not of this set or of a newer format is made ours */
    uint8_t *host_memory;  /* L2: both ends of every transfer */
    uint64_t host_memory_bytes;
    uint64_t inflight_bytes_max; /* 0: tuned by the tier, starting at 4 MiB a direction */
    uint32_t inflight_max;
    uint32_t failures_max;               /* failures in a row before it is out of service; 0: 8 */
    uint64_t retry_ns_min, retry_ns_max; /* pause before it is tried again; 0: 1 s, 60 s */
    uint64_t hang_ns;                    /* past a deadline, before it is out of service; 0: 2 s */
    const struct kvt_disk_io *io;        /* NULL: the real one */
    struct kvt_doorbell *doorbell;
};

enum kvt_disk_result {
    KVT_DISK_E_BUSY = 1,          /* another daemon has it: report->pid */
    KVT_DISK_E_FOREIGN = 2,       /* what is there is not ours (or its superblock is lost) */
    KVT_DISK_E_TOO_SMALL = 3,     /* `bytes` leaves no room for data */
    KVT_DISK_E_OTHER_STORE = 4,   /* ours, of another set of devices */
    KVT_DISK_E_OTHER_VERSION = 5, /* ours, of a newer format */
    KVT_DISK_E_MOUNTED = 6,       /* a raw device that is mounted, or that something else holds */
    KVT_DISK_E_READ_ONLY = 7,     /* the file system or the device */
};
/* "is mounted, or held by another program"; of -errno the system's text. */
const char *kvt_disk_result_text(int result);

/* What was found, and what was done about it. */
struct kvt_disk_report {
    int pid; /* E_BUSY: who has it; 0: not known */
    uint8_t store_id[16], device_uuid[16];
    uint64_t bytes; /* in use, superblock and catalog counted */
    bool is_raw;
    bool is_made;      /* it has no contents: new, formatted, upgraded, or cut off at the front */
    bool is_upgraded;  /* it was of format version 1, whose contents cannot be found again */
    bool is_truncated; /* shorter than its superblock says: what lay behind is gone, reads miss */
    bool is_no_space;  /* less than configured: there is no room for more. Contents are kept */
    char why[160];     /* for people, of a result that is not 0; "" where its text says it all */
};

/* 0, a kvt_disk_result, or -errno (ENOSPC: no room even for the smallest; ELOOP: a symbolic link to
 * nothing; ENOTSUP: blocks larger than 4 KiB). The report is always set. What is not opened is not
 * changed, but that a file may be left without data when its space cannot be had. */
KVT_MUST_USE int kvt_disk_open(struct kvt_tier **ret_tier, const struct kvt_disk_config *config,
                               struct kvt_disk_report *ret_report);

/* Of a device that is open (kvt_disk_set_device gives it); see catalog.h. All block, any thread,
 * but one at a time for the catalog. Reading it makes the two copies of each record alike first.
 * Writing it is -EBUSY while another write or sync has not come back: with a device that hangs it
 * never does, and close leaves the device behind for it. */
struct kvt_disk;
struct kvt_disk_catalog;
KVT_MUST_USE int kvt_disk_read_catalog(struct kvt_disk *disk, struct kvt_disk_catalog *ret_catalog);
KVT_MUST_USE int kvt_disk_write_catalog(struct kvt_disk *disk, uint32_t number, const void *data,
                                        uint32_t bytes);
/* 0: all transfers to it that were reaped are durable. -errno: perhaps not, and those that were
 * reaped before will not become so by another call. */
KVT_MUST_USE int kvt_disk_sync(struct kvt_disk *disk);
