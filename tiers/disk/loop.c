/* The thread of L3: what starts when, verification, health, sleep. See loop.h for the picture. */
#include "tiers/disk/loop.h"

#include <stdio.h>
#include <string.h>

#include "daemon/base/alloc.h"
#include "daemon/base/clock.h"

#define RING_ENTRIES 128u
#define STUCK_WAIT_NS KVT_NS_PER_MS /* the kernel did not take the batch: ask again soon */
#define VERIFY_SLICE_BYTES (256u * KVT_KIB)
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

static uint32_t *open_writes(struct kvt_disk *disk, uint64_t epoch)
{
    return &disk->open_writes[epoch % disk->open_writes_count];
}

void kvt_disk_write_ended(struct kvt_disk *disk, uint64_t epoch)
{
    KVT_ASSERT(*open_writes(disk, epoch) > 0);
    (*open_writes(disk, epoch))--;
}

static void queue_fail(struct kvt_disk *disk, struct kvt_worker_queue *queue, bool are_writes)
{
    while (queue->head != NULL) {
        struct kvt_xfer *xfer = kvt_worker_queue_pop(queue);

        if (are_writes)
            kvt_disk_write_ended(disk, xfer->started_ns);
        kvt_disk_finish(disk, xfer, KVT_XFER_OUT_OF_SERVICE);
    }
}

/* With no flush waiting, the writes that are still in flight are one epoch. */
static void epochs_merge(struct kvt_disk *disk)
{
    KVT_ASSERT(disk->flushes.head == NULL);
    memset(disk->open_writes, 0, disk->open_writes_count * sizeof(disk->open_writes[0]));
    disk->epoch = disk->flush_epoch;
    for (uint32_t i = 0; i < KVT_DISK_FLIGHTS; i++) {
        struct kvt_disk_flight *flight = &disk->flights[i];

        if (flight->is_used && flight->xfer != NULL && flight->op == KVT_DISK_OP_WRITE) {
            flight->epoch = disk->epoch;
            (*open_writes(disk, disk->epoch))++;
        }
    }
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
    for (int background = 0; background < 2; background++) {
        queue_fail(disk, &disk->queues[DISK_READ][background], false);
        queue_fail(disk, &disk->queues[DISK_WRITE][background], true);
    }
    queue_fail(disk, &disk->flushes, false);
    epochs_merge(disk);
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
        uint64_t at_ns;

        if (!flight->is_used || flight->xfer == NULL)
            continue;
        at_ns = kvt_time_add(flight->xfer->deadline_ns, disk->hang_ns);
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
    disk->failures_row = disk->bad_slots_row = 0;
    atomic_store_explicit(&disk->worker.tier.counters.health, KVT_TIER_HEALTH_OK,
                          memory_order_relaxed);
}

/* A queued write keeps its epoch in started_ns, which means nothing before it starts. */
static void loop_collect(struct kvt_disk *disk)
{
    struct kvt_xfer *xfer;

    while ((xfer = kvt_ring_take(&disk->worker.submissions)) != NULL) {
        int is_background = !!(xfer->flags & KVT_XFER_BACKGROUND), direction;

        xfer->verdict = KVT_SLOT_OK;
        xfer->started_ns = disk->now_ns;
        if (disk->is_out) {
            kvt_disk_finish(disk, xfer, KVT_XFER_OUT_OF_SERVICE);
            continue;
        }
        if (xfer->flags & KVT_XFER_FLUSH) {
            kvt_worker_queue_push(&disk->flushes, xfer);
            disk->epoch++;
            continue;
        }
        direction = loop_direction(xfer);
        xfer_assert(disk, xfer, direction);
        if (direction == DISK_WRITE) {
            KVT_DEBUG_ASSERT(kvt_slot_header_check(disk->host_memory + xfer->src.offset_bytes,
                                                   &xfer->key) == KVT_SLOT_OK);
            xfer->started_ns = disk->epoch;
            (*open_writes(disk, disk->epoch))++;
        }
        kvt_worker_queue_push(&disk->queues[direction][is_background], xfer);
    }
}

/* Foreground first, but one in a row is background. NULL: none is waiting. */
static struct kvt_worker_queue *queue_next(struct kvt_disk *disk, int direction)
{
    struct kvt_worker_queue *foreground = &disk->queues[direction][0];
    struct kvt_worker_queue *background = &disk->queues[direction][1];

    if (background->head != NULL &&
        (foreground->head == NULL || disk->foreground_row[direction] >= KVT_WORKER_FOREGROUND_ROW))
        return background;
    return foreground->head != NULL ? foreground : NULL;
}

static void loop_start_moves(struct kvt_disk *disk, int direction)
{
    struct kvt_worker_queue *queue;

    while (disk->free_count > KVT_DISK_FLIGHTS_RESERVED &&
           (queue = queue_next(disk, direction)) != NULL) {
        struct kvt_xfer *xfer = queue->head;
        uint64_t epoch = xfer->started_ns;
        bool is_late = kvt_worker_is_late(xfer, disk->now_ns);

        if (!is_late && !kvt_disk_window_has_room(&disk->windows[direction], xfer->slot_bytes))
            return;
        (void)kvt_worker_queue_pop(queue);
        disk->foreground_row[direction] =
            queue == &disk->queues[direction][0] ? disk->foreground_row[direction] + 1 : 0;
        if (is_late) {
            xfer->started_ns = disk->now_ns;
            if (direction == DISK_WRITE)
                kvt_disk_write_ended(disk, epoch);
            kvt_disk_finish(disk, xfer, KVT_XFER_LATE);
        } else {
            kvt_disk_begin(disk, xfer,
                           direction == DISK_READ ? KVT_DISK_OP_READ : KVT_DISK_OP_WRITE,
                           direction == DISK_READ ? 0 : epoch);
        }
        /* Requests that are plain calls take their time here: let newer ones pass. */
        if (disk->ring == NULL)
            return;
    }
}

static void loop_start_flush(struct kvt_disk *disk)
{
    struct kvt_xfer *xfer;

    while (!disk->is_flushing && disk->flushes.head != NULL &&
           *open_writes(disk, disk->flush_epoch) == 0) {
        xfer = kvt_worker_queue_pop(&disk->flushes);
        disk->flush_epoch++;
        if (kvt_worker_is_late(xfer, disk->now_ns)) {
            kvt_disk_finish(disk, xfer, KVT_XFER_LATE);
        } else {
            disk->is_flushing = true;
            kvt_disk_begin(disk, xfer, KVT_DISK_OP_FLUSH, 0);
        }
    }
}

/* Starts what may start. True when there is more to do at once (plain calls only). */
static bool loop_start(struct kvt_disk *disk)
{
    if (disk->is_out && !disk->is_probing && !disk->is_hung && disk->now_ns >= disk->retry_at_ns &&
        !kvt_worker_is_stopping(&disk->worker)) {
        disk->is_probing = true;
        kvt_disk_begin_probe(disk);
    }
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

/* How long until the first of the next to start is late: a device that hangs must not keep those
 * that it has not begun. */
static uint64_t deadline_next_ns(const struct kvt_disk *disk)
{
    uint64_t deadline_ns = KVT_TIME_NEVER_NS;

    for (int direction = 0; direction < DISK_DIRECTIONS; direction++)
        for (int background = 0; background < 2; background++)
            if (disk->queues[direction][background].head != NULL)
                deadline_ns =
                    KVT_MIN(deadline_ns, disk->queues[direction][background].head->deadline_ns);
    if (deadline_ns == KVT_TIME_NEVER_NS)
        return deadline_ns;
    return deadline_ns - KVT_MIN(deadline_ns, disk->now_ns);
}

static void loop_sleep(struct kvt_disk *disk)
{
    struct kvt_worker *worker = &disk->worker;
    uint64_t timeout_ns = KVT_TIME_NEVER_NS;
    int r;

    if (disk->is_out && !disk->is_probing && !disk->is_hung)
        timeout_ns = disk->retry_at_ns - KVT_MIN(disk->now_ns, disk->retry_at_ns);
    if (disk->batch_count > 0)
        timeout_ns = KVT_MIN(timeout_ns, STUCK_WAIT_NS);
    timeout_ns = KVT_MIN(timeout_ns, deadline_next_ns(disk));
    if (kvt_disk_is_idle(disk)) {
        kvt_worker_sleep(worker, timeout_ns);
        return;
    }
    if (disk->overdue_at_ns != KVT_TIME_NEVER_NS)
        timeout_ns =
            KVT_MIN(timeout_ns, disk->overdue_at_ns - KVT_MIN(disk->overdue_at_ns, disk->now_ns));
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

static void loop_serve(struct kvt_disk *disk)
{
    struct kvt_worker *worker = &disk->worker;

    for (;;) {
        bool is_more;
        uint32_t reaped;

        disk->now_ns = kvt_clock_mono_ns();
        health_check_hang(disk);
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
        if (kvt_worker_is_stopping(worker) && kvt_disk_is_idle(disk) &&
            kvt_ring_is_empty(&worker->submissions))
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
