/* The inside of L3: shared by disk.c (open, close) and the thread's files.
 *
 *   submissions --> queues[read|write][foreground|background], flushes
 *     --> a flight (window has room) --> batch --> ring --> completion
 *       --> read: verifying --> done      write, flush: done
 *
 * A flight is one request to the device, for one transfer or a chain of them that are neighbours on
 * disk and in memory. Its user data is its index and a generation that changes with every request,
 * so a completion that comes twice, or late from an earlier use, names nobody. When a chain's
 * request fails, those of its transfers that are not done are asked for again, each alone, so that
 * a failure is of the one it belongs to.
 *
 * Reads start before writes and each direction has its window. Every write and flush gets a number
 * when it is collected, and a flush starts when no write with a smaller one is open. Between
 * collection and its end a transfer keeps its number in done_ns, and a waiting flush the count of
 * writes that it waits for in started_ns: neither means anything to the engine before the end.
 *
 * A flush that fails loses writes that had seemed done, and the system says so only once, to
 * whoever flushed: the engine's flush, a probe, or a call outside the thread (the index's
 * kvt_disk_sync). So the device is out of service until a probe with a flush of its own was good
 * and the engine has taken the failure; until then every flush fails like that one. And each of
 * them looks at what the others were told: a flush that the engine waits for is not done, and
 * kvt_disk_sync not good, when another one failed for the same writes.
 *
 * What waits in a queue is late at its deadline, whether the device moves or not. Everything here
 * is the tier thread's. */
#pragma once

#include <semaphore.h>

#include "tiers/disk/file.h"
#include "tiers/disk/io.h"
#include "tiers/disk/window.h"
#include "tiers/worker.h"

#define KVT_DISK_FLIGHTS 64u
#define KVT_DISK_FLIGHTS_RESERVED 2u /* a flush and a probe always find one */

enum { DISK_READ = 0, DISK_WRITE = 1, DISK_DIRECTIONS = 2 };

enum kvt_disk_queue {
    DISK_ALONE = 0, /* of a chain that failed: first, and not in a chain again */
    DISK_FOREGROUND = 1,
    DISK_BACKGROUND = 2,
    DISK_QUEUES = 3,
};

struct kvt_disk_flight {
    struct kvt_worker_queue xfers; /* empty: the probe */
    uint32_t xfers_count;
    enum kvt_disk_op op;
    uint32_t generation;
    bool is_used, is_background;
    uint32_t refusals, shorts; /* requests again: refused for now; came back short */
    uint64_t host_offset_bytes, disk_offset_bytes, bytes;
    uint64_t done_bytes;  /* by requests that came back short */
    uint64_t deadline_ns; /* the earliest of its transfers' */
};

struct kvt_disk {
    struct kvt_worker worker; /* first */
    const struct kvt_disk_io *io;
    struct kvt_disk_file file;
    uint8_t *host_memory;
    uint64_t host_memory_bytes;
    uint32_t failures_max;
    uint64_t retry_ns_min, retry_ns_max, hang_ns, inflight_bytes_max;
    sem_t started; /* the thread has its ring, or knows that it has none; `detail` is written */

    struct kvt_disk_ring *ring; /* NULL: io_uring is forbidden, requests are plain calls */
    bool are_buffers_registered, is_poll_armed;
    struct kvt_disk_sqe batch[KVT_DISK_FLIGHTS + 1];
    uint32_t batch_count, submit_failures;

    struct kvt_disk_flight flights[KVT_DISK_FLIGHTS];
    uint32_t free_flights[KVT_DISK_FLIGHTS], free_count;
    struct kvt_disk_window windows[DISK_DIRECTIONS];
    struct kvt_worker_queue queues[DISK_DIRECTIONS][DISK_QUEUES];
    uint32_t foreground_row[DISK_DIRECTIONS];
    struct kvt_worker_queue flushes, verifying;
    bool is_flushing;
    uint64_t background_bytes;    /* in flight */
    uint32_t foreground_reads;    /* queued or in flight */
    uint64_t foreground_until_ns; /* without any, the next is expected until then */
    uint64_t number;              /* of the next write or flush */
    uint32_t open_writes;         /* queued or in flight */
    uint64_t late_at_ns;          /* nothing in a queue is late before */

    bool is_out, is_probing;
    /* Of calls outside the thread that flush (catalog, sync): under way now; -errno of the last one
     * that failed and that the thread has not heard of, 0: none. */
    _Atomic uint32_t other_syncs;
    atomic_int other_sync_error;
    /* The same the other way round. Of the thread's own flushes, a probe's too: how many requests
     * were begun, came back, and failed; -errno of the last that failed; of how many failures
     * kvt_disk_sync has told. */
    _Atomic uint64_t own_syncs_begun, own_syncs_ended, own_sync_failures, own_failures_told;
    atomic_int own_sync_error;
    int sync_error; /* -errno of a flush that failed and was not made good by a probe; 0: none */
    bool has_untold_writes; /* came back done, and no flush that failed came back after them */
    bool is_hung;           /* something in flight is overdue */
    uint32_t failures_row, bad_slots_row, successes_row;
    uint64_t retry_at_ns, pause_ns; /* pause_ns 0: the next outage begins with the shortest */
    uint64_t overdue_at_ns;         /* nothing in flight is overdue before */
    uint64_t stop_at_ns;            /* from then on it does not wait for the device */
    uint64_t busy_since_ns, now_ns;
};

/* Thread: opens the ring, posts `started`, serves until stop. */
void kvt_disk_loop(struct kvt_worker *worker);

/* flight.c */
bool kvt_disk_is_idle(const struct kvt_disk *disk); /* nothing is in flight */
/* Starts @xfers: neighbours in their order, or flushes. */
void kvt_disk_begin(struct kvt_disk *disk, struct kvt_worker_queue xfers, enum kvt_disk_op op);
void kvt_disk_begin_probe(struct kvt_disk *disk);
/* Hands the batch to the kernel; what it refuses for good has failed. */
void kvt_disk_submit(struct kvt_disk *disk);
/* Takes completions; returns how many. */
uint32_t kvt_disk_reap(struct kvt_disk *disk);
void kvt_disk_finish(struct kvt_disk *disk, struct kvt_xfer *xfer, int status);

/* loop.c: told by flight.c. */
void kvt_disk_write_ended(struct kvt_disk *disk, uint64_t number);
void kvt_disk_again_alone(struct kvt_disk *disk, struct kvt_xfer *xfer, int direction);
/* Of any transfer whose time on the device, or before it, is over. */
void kvt_disk_read_ended(struct kvt_disk *disk, const struct kvt_xfer *xfer);
/* Of a request; a read that came back counts when it is verified, with the next one. */
void kvt_disk_note_result(struct kvt_disk *disk, bool is_failure);
void kvt_disk_note_verdict(struct kvt_disk *disk, enum kvt_slot_verdict verdict);
void kvt_disk_note_sync_failure(struct kvt_disk *disk, int error);
void kvt_disk_probe_ended(struct kvt_disk *disk, bool is_good);
