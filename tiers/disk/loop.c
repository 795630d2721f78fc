/* The thread of L3: what starts when, verification, health, sleep. See loop.h for the picture. */
#include "tiers/disk/loop.h"

#include <stdio.h>
#include <string.h>

#include "daemon/base/alloc.h"
#include "daemon/base/clock.h"

#define RING_ENTRIES 128u
#define STUCK_WAIT_NS KVT_NS_PER_MS /* the kernel did not take the batch: ask again soon */
#define VERIFY_SLICE_BYTES (256u * KVT_KIB)
#define MERGE_BYTES_MAX KVT_MIB       /* of a chain */
#define PACE_NS (20u * KVT_NS_PER_MS) /* so long after a foreground read the next is expected */
#define PACED_BYTES (256u * KVT_KIB)  /* of background in flight meanwhile, or one transfer */
#define LATE_SLICE_NS KVT_NS_PER_MS
#define REAPED_WAIT_NS (10u * KVT_NS_PER_MS)
#define STOP_WAIT_NS (100u * KVT_NS_PER_MS)
#define BAD_SLOTS_A_FAILURE 4u /* damaged slots in a row that weigh as much as a failed request */

static_assert(RING_ENTRIES > KVT_DISK_FLIGHTS + 1, "every flight and the poll have an entry");

static int loop_direction(const struct kvt_xfer *xfer)
{
    if (xfer->src.kind == KVT_PLACE_DISK) {
        KVT_ASSERT(xfer->dst.kind == KVT_PLACE_HOST);
        return DISK_READ;
    }
    KVT_ASSERT(xfer->src.kind == KVT_PLACE_HOST && xfer->dst.kind == KVT_PLACE_DISK);
    return DISK_WRITE;
}

static void xfer_assert(const struct kvt_disk *disk, const struct kvt_xfer *xfer, int direction)
{
    const struct kvt_place *host = direction == DISK_READ ? &xfer->dst : &xfer->src;
    const struct kvt_place *at = direction == DISK_READ ? &xfer->src : &xfer->dst;

    KVT_ASSERT(xfer->slot_bytes > 0 && xfer->slot_bytes % KVT_DIO_ALIGN_BYTES == 0);
    KVT_ASSERT(xfer->header_bytes + xfer->key.payload_bytes <= xfer->slot_bytes);
    KVT_ASSERT(host->offset_bytes % KVT_DIO_ALIGN_BYTES == 0);
    KVT_ASSERT(at->offset_bytes % KVT_DIO_ALIGN_BYTES == 0);
    KVT_ASSERT(host->offset_bytes <= disk->host_memory_bytes &&
               xfer->slot_bytes <= disk->host_memory_bytes - host->offset_bytes);
    KVT_ASSERT(at->offset_bytes <= disk->worker.tier.capacity_bytes &&
               xfer->slot_bytes <= disk->worker.tier.capacity_bytes - at->offset_bytes);
}

void kvt_disk_write_ended(struct kvt_disk *disk, uint64_t number)
{
    KVT_ASSERT(disk->open_writes > 0);
    disk->open_writes--;
    for (struct kvt_xfer *flush = disk->flushes.head; flush != NULL; flush = flush->next) {
        if (flush->done_ns < number)
            continue;
        KVT_ASSERT(flush->started_ns > 0);
        flush->started_ns--;
    }
}

void kvt_disk_again_alone(struct kvt_disk *disk, struct kvt_xfer *xfer, int direction)
{
    kvt_worker_queue_push(&disk->queues[direction][DISK_ALONE], xfer);
    disk->late_at_ns = KVT_MIN(disk->late_at_ns, xfer->deadline_ns);
}

static bool is_foreground_read(const struct kvt_xfer *xfer)
{
    return xfer->src.kind == KVT_PLACE_DISK && !(xfer->flags & KVT_XFER_BACKGROUND);
}

void kvt_disk_read_ended(struct kvt_disk *disk, const struct kvt_xfer *xfer)
{
    if (!is_foreground_read(xfer))
        return;
    KVT_ASSERT(disk->foreground_reads > 0);
    disk->foreground_reads--;
    disk->foreground_until_ns = kvt_time_add(disk->now_ns, PACE_NS);
}

/* A transfer that was not started, or not to its end, is given back with @status. */
static void queued_end(struct kvt_disk *disk, struct kvt_xfer *xfer, bool is_write, int status)
{
    uint64_t number = xfer->done_ns;

    xfer->started_ns = disk->now_ns;
    kvt_disk_read_ended(disk, xfer);
    kvt_disk_finish(disk, xfer, status);
    if (is_write)
        kvt_disk_write_ended(disk, number);
}

static void queue_fail(struct kvt_disk *disk, struct kvt_worker_queue *queue, bool are_writes,
                       int status)
{
    while (queue->head != NULL)
        queued_end(disk, kvt_worker_queue_pop(queue), are_writes, status);
}

/* Gives back what is late, finds out what will be late next. */
static void queue_expire(struct kvt_disk *disk, struct kvt_worker_queue *queue, bool are_writes)
{
    struct kvt_worker_queue all = *queue;

    *queue = (struct kvt_worker_queue){0};
    while (all.head != NULL) {
        struct kvt_xfer *xfer = kvt_worker_queue_pop(&all);

        if (kvt_worker_is_late(xfer, disk->now_ns)) {
            queued_end(disk, xfer, are_writes, KVT_XFER_LATE);
            continue;
        }
        kvt_worker_queue_push(queue, xfer);
        disk->late_at_ns = KVT_MIN(disk->late_at_ns, xfer->deadline_ns);
    }
}

/* Whether the device moves or not, what waits is late in time. Deadlines that follow each other
 * closely are served together, LATE_SLICE_NS later at most. */
static void loop_expire(struct kvt_disk *disk)
{
    if (disk->now_ns < disk->late_at_ns)
        return;
    disk->late_at_ns = KVT_TIME_NEVER_NS;
    /* Flushes first: a write that is late would otherwise let one go that is late as well. */
    queue_expire(disk, &disk->flushes, false);
    for (int i = 0; i < DISK_QUEUES; i++) {
        queue_expire(disk, &disk->queues[DISK_READ][i], false);
        queue_expire(disk, &disk->queues[DISK_WRITE][i], true);
    }
    if (disk->late_at_ns != KVT_TIME_NEVER_NS)
        disk->late_at_ns = KVT_MAX(disk->late_at_ns, disk->now_ns + LATE_SLICE_NS);
}

/* What a flush gets that is not tried because the device is out of service. */
static int flush_refusal(const struct kvt_disk *disk)
{
    return disk->sync_error != 0 ? disk->sync_error : KVT_XFER_OUT_OF_SERVICE;
}

static void health_go_out(struct kvt_disk *disk)
{
    struct kvt_tier_counters *counters = &disk->worker.tier.counters;

    disk->is_out = true;
    /* One good probe is no recovery: without transfers that succeeded since, it goes on doubling.
     */
    disk->pause_ns = disk->pause_ns == 0 ? disk->retry_ns_min
                                         : KVT_MIN(kvt_time_add(disk->pause_ns, disk->pause_ns),
                                                   disk->retry_ns_max);
    disk->successes_row = 0;
    disk->retry_at_ns = kvt_time_add(disk->now_ns, disk->pause_ns);
    atomic_store_explicit(&counters->health, KVT_TIER_HEALTH_OUT, memory_order_relaxed);
    kvt_worker_count(&counters->outages, 1);
    if (disk->flushes.head != NULL && disk->sync_error != 0)
        disk->has_untold_writes = false;
    queue_fail(disk, &disk->flushes, false, flush_refusal(disk));
    for (int i = 0; i < DISK_QUEUES; i++) {
        queue_fail(disk, &disk->queues[DISK_READ][i], false, KVT_XFER_OUT_OF_SERVICE);
        queue_fail(disk, &disk->queues[DISK_WRITE][i], true, KVT_XFER_OUT_OF_SERVICE);
    }
}

static void note_success(struct kvt_disk *disk)
{
    disk->failures_row = 0;
    if (disk->is_out)
        return;
    disk->successes_row++;
    if (disk->successes_row >= disk->failures_max)
        disk->pause_ns = 0;
}

void kvt_disk_note_result(struct kvt_disk *disk, bool is_failure)
{
    if (!is_failure) {
        note_success(disk);
        return;
    }
    disk->successes_row = 0;
    disk->failures_row++;
    if (!disk->is_out && disk->failures_row >= disk->failures_max)
        health_go_out(disk);
}

/* The writes that it lost look done to whoever waits for a later flush: none may succeed. */
void kvt_disk_note_sync_failure(struct kvt_disk *disk, int error)
{
    disk->sync_error = error;
    if (!disk->is_out)
        health_go_out(disk);
}

/* Damage has a row of its own, which good writes in between do not end. A whole slot of another
 * block says nothing about the device. */
void kvt_disk_note_verdict(struct kvt_disk *disk, enum kvt_slot_verdict verdict)
{
    if (verdict == KVT_SLOT_OK || verdict == KVT_SLOT_OTHER) {
        disk->bad_slots_row = 0;
        note_success(disk);
        return;
    }
    disk->successes_row = 0;
    disk->bad_slots_row++;
    if (!disk->is_out && disk->bad_slots_row / BAD_SLOTS_A_FAILURE >= disk->failures_max)
        health_go_out(disk);
}

/* Looks for what is overdue when something may be, and while something was. */
static void health_check_hang(struct kvt_disk *disk)
{
    bool is_hung = false;

    if (!disk->is_hung && disk->now_ns < disk->overdue_at_ns)
        return;
    disk->overdue_at_ns = KVT_TIME_NEVER_NS;
    for (uint32_t i = 0; i < KVT_DISK_FLIGHTS; i++) {
        const struct kvt_disk_flight *flight = &disk->flights[i];
        uint64_t at_ns = kvt_time_add(flight->deadline_ns, disk->hang_ns);

        if (!flight->is_used || at_ns == KVT_TIME_NEVER_NS)
            continue;
        if (at_ns <= disk->now_ns)
            is_hung = true;
        else
            disk->overdue_at_ns = KVT_MIN(disk->overdue_at_ns, at_ns);
    }
    if (is_hung && !disk->is_out)
        health_go_out(disk);
    if (!is_hung && disk->is_hung)
        disk->retry_at_ns = disk->now_ns;
    disk->is_hung = is_hung;
}

void kvt_disk_probe_ended(struct kvt_disk *disk, bool is_good)
{
    disk->is_probing = false;
    if (!is_good) {
        disk->pause_ns = KVT_MIN(kvt_time_add(disk->pause_ns, disk->pause_ns), disk->retry_ns_max);
        disk->retry_at_ns = kvt_time_add(disk->now_ns, disk->pause_ns);
        return;
    }
    disk->is_out = false;
    /* Else the next flush fails: what a probe or somebody else was told concerns its writes. */
    if (!disk->has_untold_writes)
        disk->sync_error = 0;
    disk->failures_row = disk->bad_slots_row = 0;
    atomic_store_explicit(&disk->worker.tier.counters.health, KVT_TIER_HEALTH_OK,
                          memory_order_relaxed);
}

/* Somebody else's flush failed, for the writes of all. */
static void health_check_sync(struct kvt_disk *disk)
{
    int error;

    if (atomic_load_explicit(&disk->other_sync_error, memory_order_relaxed) == 0)
        return;
    error = atomic_exchange_explicit(&disk->other_sync_error, 0, memory_order_seq_cst);
    kvt_disk_note_sync_failure(disk, error);
}

static void loop_collect(struct kvt_disk *disk)
{
    struct kvt_xfer *xfer;

    while ((xfer = kvt_ring_take(&disk->worker.submissions)) != NULL) {
        bool is_flush = (xfer->flags & KVT_XFER_FLUSH) != 0;
        int direction;

        xfer->verdict = KVT_SLOT_OK;
        xfer->started_ns = disk->now_ns;
        if (disk->is_out) {
            if (is_flush && disk->sync_error != 0)
                disk->has_untold_writes = false;
            kvt_disk_finish(disk, xfer, is_flush ? flush_refusal(disk) : KVT_XFER_OUT_OF_SERVICE);
            continue;
        }
        disk->late_at_ns = KVT_MIN(disk->late_at_ns, xfer->deadline_ns);
        xfer->done_ns = disk->number++;
        if (is_flush) {
            xfer->started_ns = disk->open_writes;
            kvt_worker_queue_push(&disk->flushes, xfer);
            continue;
        }
        direction = loop_direction(xfer);
        disk->foreground_reads += is_foreground_read(xfer);
        xfer_assert(disk, xfer, direction);
        if (direction == DISK_WRITE) {
            KVT_DEBUG_ASSERT(kvt_slot_header_check(disk->host_memory + xfer->src.offset_bytes,
                                                   &xfer->key) == KVT_SLOT_OK);
            disk->open_writes++;
        }
        kvt_worker_queue_push(
            &disk->queues[direction]
                         [xfer->flags & KVT_XFER_BACKGROUND ? DISK_BACKGROUND : DISK_FOREGROUND],
            xfer);
    }
}

/* How much more background may be in flight. While foreground reads come, each waits in the device
 * behind what it finds there: then there is little. One transfer always may. */
static uint64_t background_room(const struct kvt_disk *disk)
{
    if (disk->foreground_reads == 0 && disk->now_ns >= disk->foreground_until_ns)
        return UINT64_MAX;
    return PACED_BYTES - KVT_MIN(disk->background_bytes, PACED_BYTES);
}

/* Foreground first, but one in a row is background. NULL: none is waiting, or has to wait. */
static struct kvt_worker_queue *queue_next(struct kvt_disk *disk, int direction)
{
    struct kvt_worker_queue *foreground = &disk->queues[direction][DISK_FOREGROUND];
    struct kvt_worker_queue *background = &disk->queues[direction][DISK_BACKGROUND];

    if (disk->queues[direction][DISK_ALONE].head != NULL)
        return &disk->queues[direction][DISK_ALONE];
    if (background->head != NULL &&
        (disk->background_bytes == 0 || background->head->slot_bytes <= background_room(disk)) &&
        (foreground->head == NULL || disk->foreground_row[direction] >= KVT_WORKER_FOREGROUND_ROW))
        return background;
    return foreground->head != NULL ? foreground : NULL;
}

static uint64_t host_offset(const struct kvt_xfer *xfer, int direction)
{
    return direction == DISK_READ ? xfer->dst.offset_bytes : xfer->src.offset_bytes;
}

static uint64_t disk_offset(const struct kvt_xfer *xfer, int direction)
{
    return direction == DISK_READ ? xfer->src.offset_bytes : xfer->dst.offset_bytes;
}

/* The next of @queue to start and, behind it, what continues it on disk and in memory, while there
 * is room: one request for all of them. */
static struct kvt_worker_queue chain_take(struct kvt_disk *disk, struct kvt_worker_queue *queue,
                                          int direction)
{
    struct kvt_worker_queue chain = {0};
    bool is_background = queue == &disk->queues[direction][DISK_BACKGROUND];
    uint64_t room = KVT_MIN(kvt_disk_window_room(&disk->windows[direction]),
                            is_background ? background_room(disk) : UINT64_MAX);
    struct kvt_xfer *last = kvt_worker_queue_pop(queue), *next;
    uint64_t buffer = host_offset(last, direction) / KVT_GIB; /* what is registered at once */
    uint64_t bytes = last->slot_bytes;

    kvt_worker_queue_push(&chain, last);
    while (queue != &disk->queues[direction][DISK_ALONE] && (next = queue->head) != NULL) {
        uint64_t end = host_offset(last, direction) + last->slot_bytes;

        if (host_offset(next, direction) != end ||
            disk_offset(next, direction) != disk_offset(last, direction) + last->slot_bytes ||
            bytes + next->slot_bytes > KVT_MIN(room, MERGE_BYTES_MAX) ||
            (end + next->slot_bytes - 1) / KVT_GIB != buffer ||
            kvt_worker_is_late(next, disk->now_ns))
            break;
        bytes += next->slot_bytes;
        last = kvt_worker_queue_pop(queue);
        kvt_worker_queue_push(&chain, last);
    }
    return chain;
}

static void loop_start_moves(struct kvt_disk *disk, int direction)
{
    struct kvt_worker_queue *queue;

    while (disk->free_count > KVT_DISK_FLIGHTS_RESERVED &&
           (queue = queue_next(disk, direction)) != NULL) {
        struct kvt_worker_queue chain;

        if (kvt_worker_is_late(queue->head, disk->now_ns)) { /* of the current slice */
            queued_end(disk, kvt_worker_queue_pop(queue), direction == DISK_WRITE, KVT_XFER_LATE);
            continue;
        }
        if (!kvt_disk_window_has_room(&disk->windows[direction], queue->head->slot_bytes))
            return;
        if (queue != &disk->queues[direction][DISK_ALONE])
            disk->foreground_row[direction] = queue == &disk->queues[direction][DISK_FOREGROUND]
                                                  ? disk->foreground_row[direction] + 1
                                                  : 0;
        chain = chain_take(disk, queue, direction);
        kvt_disk_begin(disk, chain, direction == DISK_READ ? KVT_DISK_OP_READ : KVT_DISK_OP_WRITE);
        /* Requests that are plain calls take their time here: let newer ones pass. */
        if (disk->ring == NULL)
            return;
    }
}

/* One request for all that wait for no write any more. */
static void loop_start_flush(struct kvt_disk *disk)
{
    struct kvt_worker_queue chain = {0};

    if (disk->is_flushing)
        return;
    while (disk->flushes.head != NULL && disk->flushes.head->started_ns == 0)
        kvt_worker_queue_push(&chain, kvt_worker_queue_pop(&disk->flushes));
    if (chain.head == NULL)
        return;
    disk->is_flushing = true;
    kvt_disk_begin(disk, chain, KVT_DISK_OP_FLUSH);
}

/* A good probe ends what a failed flush began, so all that it spoils has failed and the engine
 * knows before. */
static void loop_start_probe(struct kvt_disk *disk)
{
    if (!disk->is_out || disk->is_probing || disk->is_hung || disk->now_ns < disk->retry_at_ns ||
        kvt_worker_is_stopping(&disk->worker))
        return;
    if (disk->sync_error != 0 &&
        (disk->is_flushing || !kvt_ring_is_drained(&disk->worker.completions))) {
        disk->retry_at_ns = disk->now_ns + REAPED_WAIT_NS;
        return;
    }
    disk->is_probing = true;
    kvt_disk_begin_probe(disk);
}

/* Starts what may start. True when there is more to do at once (plain calls only). */
static bool loop_start(struct kvt_disk *disk)
{
    loop_expire(disk);
    loop_start_probe(disk);
    loop_start_moves(disk, DISK_READ);
    loop_start_moves(disk, DISK_WRITE);
    loop_start_flush(disk);
    return disk->ring == NULL &&
           (queue_next(disk, DISK_READ) != NULL || queue_next(disk, DISK_WRITE) != NULL);
}

/* Verifies what was read, a slice at a time, so that the device's queue is filled in between but
 * small slots do not cost a system call each. True when there was something. */
static bool loop_verify(struct kvt_disk *disk)
{
    uint64_t verified_bytes = 0;

    while (disk->verifying.head != NULL && verified_bytes < VERIFY_SLICE_BYTES) {
        struct kvt_xfer *xfer = kvt_worker_queue_pop(&disk->verifying);

        verified_bytes += xfer->slot_bytes;
        xfer->verdict = kvt_slot_check(disk->host_memory + xfer->dst.offset_bytes, &xfer->key);
        disk->now_ns = kvt_clock_mono_ns();
        kvt_disk_note_verdict(disk, xfer->verdict);
        kvt_disk_finish(disk, xfer,
                        xfer->verdict == KVT_SLOT_OK ? KVT_XFER_DONE : KVT_XFER_BAD_SLOT);
        kvt_worker_notify(&disk->worker, disk->now_ns, false);
    }
    return verified_bytes > 0;
}

static uint64_t until(const struct kvt_disk *disk, uint64_t at_ns)
{
    return at_ns == KVT_TIME_NEVER_NS ? at_ns : at_ns - KVT_MIN(at_ns, disk->now_ns);
}

static void loop_sleep(struct kvt_disk *disk)
{
    struct kvt_worker *worker = &disk->worker;
    uint64_t timeout_ns = KVT_TIME_NEVER_NS;
    int r;

    if (disk->is_out && !disk->is_probing && !disk->is_hung)
        timeout_ns = until(disk, disk->retry_at_ns);
    if (disk->batch_count > 0)
        timeout_ns = KVT_MIN(timeout_ns, STUCK_WAIT_NS);
    timeout_ns = KVT_MIN(timeout_ns, until(disk, disk->late_at_ns));
    if (kvt_disk_is_idle(disk)) {
        kvt_worker_sleep(worker, timeout_ns);
        return;
    }
    timeout_ns = KVT_MIN(timeout_ns, until(disk, disk->overdue_at_ns));
    if (kvt_worker_is_stopping(worker))
        timeout_ns = KVT_MIN(timeout_ns, STOP_WAIT_NS);
    kvt_doorbell_arm(&worker->bell);
    if (!kvt_ring_is_empty(&worker->submissions)) {
        kvt_doorbell_disarm(&worker->bell);
        return;
    }
    r = disk->io->ring_wait(disk->io->ctx, disk->ring, timeout_ns);
    kvt_doorbell_disarm(&worker->bell);
    /* A ring that cannot be waited on must not become a busy loop. */
    if (r < 0 && r != -ETIME && r != -EINTR && r != -EAGAIN)
        kvt_worker_sleep(worker, STUCK_WAIT_NS);
}

/* A device that hangs is not waited for: what it has is the kernel's, in pages that the kernel
 * holds, and nobody looks at what comes of it. */
static bool loop_is_over(struct kvt_disk *disk)
{
    if (!kvt_worker_is_stopping(&disk->worker))
        return false;
    if (disk->stop_at_ns == 0)
        disk->stop_at_ns = kvt_time_add(disk->now_ns, disk->hang_ns);
    return disk->now_ns >= disk->stop_at_ns ||
           (kvt_disk_is_idle(disk) && kvt_ring_is_empty(&disk->worker.submissions));
}

static void loop_serve(struct kvt_disk *disk)
{
    struct kvt_worker *worker = &disk->worker;

    for (;;) {
        bool is_more;
        uint32_t reaped;

        disk->now_ns = kvt_clock_mono_ns();
        health_check_hang(disk);
        health_check_sync(disk);
        loop_collect(disk);
        is_more = loop_start(disk);
        kvt_disk_submit(disk);
        reaped = kvt_disk_reap(disk);
        if (reaped > 0) { /* fill the gap in the device's queue before looking at what came */
            (void)loop_start(disk);
            kvt_disk_submit(disk);
        }
        if (loop_verify(disk) || reaped > 0 || is_more) {
            kvt_worker_notify(worker, disk->now_ns, false);
            continue;
        }
        kvt_worker_notify(worker, disk->now_ns, true);
        if (loop_is_over(disk))
            return;
        loop_sleep(disk);
    }
}

/* Registers L2 in pieces of at most 1 GiB. */
static int ring_register_memory(struct kvt_disk *disk)
{
    uint32_t count = (uint32_t)kvt_div_up(disk->host_memory_bytes, KVT_GIB);
    struct kvt_disk_buffer *buffers = kvt_alloc_zeroed(count, sizeof(*buffers));
    int r;

    if (buffers == NULL)
        return -ENOMEM;
    for (uint32_t i = 0; i < count; i++) {
        buffers[i].base = disk->host_memory + i * KVT_GIB;
        buffers[i].bytes = KVT_MIN(disk->host_memory_bytes - i * KVT_GIB, KVT_GIB);
    }
    r = disk->io->ring_register_buffers(disk->io->ctx, disk->ring, buffers, count);
    kvt_free(buffers);
    return r;
}

static void ring_start(struct kvt_disk *disk)
{
    char *detail = disk->worker.tier.detail;
    const char *direct = disk->file.is_direct ? "O_DIRECT" : "page cache (no O_DIRECT here)";
    const char *space = disk->file.is_preallocated ? "preallocated" : "not preallocated";
    size_t size = sizeof(disk->worker.tier.detail);
    int r, memory, file;

    r = disk->io->ring_open(disk->io->ctx, &disk->ring, disk->file.fd, RING_ENTRIES);
    if (r < 0) {
        disk->ring = NULL;
        snprintf(detail, size, "%s, %s, no io_uring (%s): plain calls", direct, space,
                 strerrordesc_np(-r));
        return;
    }
    file = disk->io->ring_register_file(disk->io->ctx, disk->ring);
    memory = ring_register_memory(disk);
    disk->are_buffers_registered = memory == 0;
    snprintf(detail, size, "%s, %s, io_uring, file %s, memory %s%s", direct, space,
             file == 0 ? "registered" : "not registered",
             memory == 0 ? "registered" : "not registered: ",
             memory == 0 ? "" : strerrordesc_np(-memory));
}

void kvt_disk_loop(struct kvt_worker *worker)
{
    struct kvt_disk *disk = KVT_CONTAINER_OF(worker, struct kvt_disk, worker);

    ring_start(disk);
    (void)sem_post(&disk->started);
    loop_serve(disk);
    if (disk->ring != NULL)
        disk->io->ring_close(disk->io->ctx, disk->ring);
    disk->ring = NULL;
}
