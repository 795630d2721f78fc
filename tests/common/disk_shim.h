/* A table of L3's system calls that stands before the real one and does what a test asks: fail
 * the n-th call of a kind, shorten, repeat, hold back and damage completions. Set it up before the
 * tier opens; the fields marked atomic may be changed while it runs. */
#pragma once

#include <stdatomic.h>

#include "tiers/disk/io.h"

#define SHIM_HELD_MAX 256u
#define SHIM_STUCK_MAX 128u

struct disk_shim {
    struct kvt_disk_io io; /* give this to the tier */
    /* Of open, file_info .. fdatasync, in the order they are made: the one with this number (from
     * 1) gets call_result, and with is_failing_on all that follow as well. 0: none. */
    uint32_t fail_call, calls;
    int call_result;
    bool is_failing_on, is_tearing; /* a write that fails leaves its first 512 bytes */
    /* Results of the calls at start; 0: the real one. */
    int open_result, direct_result, file_info_result, fallocate_result, truncate_result;
    int pwrite_result, device_info_result, lock_result, sync_parent_result, ring_result;
    int register_file_result, register_buffers_result;
    /* Completions of reads, writes and flushes: -errno to give instead; 0: as they came. */
    atomic_int read_result, write_result, flush_result;
    atomic_uint fail_every;               /* 0: all of them, n: each n-th */
    atomic_int short_bytes;               /* > 0: so many bytes less in the result */
    atomic_bool is_short_once;            /* only the first request of a flight */
    atomic_bool is_probe_spared;          /* the tier's probe comes back as it came */
    atomic_bool is_repeating;             /* every completion comes twice, and again much later */
    atomic_bool is_holding;               /* completions are kept back until this falls */
    atomic_int held_result;               /* < 0: what of these is a flush's then says, once */
    atomic_bool is_stuck;                 /* requests stay with the shim until this falls */
    atomic_int gone_result;               /* < 0: from now on everything answers this */
    _Atomic uint64_t bad_offset_bytes;    /* of the file: requests that touch this byte fail; 0 */
    atomic_uint interrupts;               /* so many completions become EINTR */
    atomic_int submit_result;             /* < 0: instead of submitting */
    atomic_uint submit_failures;          /* so many times */
    atomic_uint requests[3], completions; /* by kvt_disk_op */
    atomic_uint flushes_failed;           /* completions of flushes that were given an error */
    atomic_uint waits, stuck_calls; /* sleeps of the ring's thread; plain calls that hang now */
    /* The thread's own. */
    struct kvt_disk_sqe stuck[SHIM_STUCK_MAX];
    uint32_t stuck_count;
    bool is_bad[64]; /* last request of each index touches the bad byte */
    struct kvt_disk_cqe held[SHIM_HELD_MAX], old[64];
    uint32_t held_count, old_count, counted;
    bool is_probe[64];         /* last request of each index is the superblock's */
    uint64_t op_by_flight[64]; /* last request of each index: op, and whether it is a second one */
};

void disk_shim_init(struct disk_shim *shim);
