/* Requests to the device and their completions. See loop.h for the picture. */
#include <string.h>
#include <time.h>

#include "daemon/base/clock.h"
#include "tiers/disk/loop.h"

#define BUFFER_BYTES_MAX KVT_GIB /* of one registered buffer */
#define SUBMIT_FAILURES_MAX 100u /* in a row, one a millisecond, before requests fail */
#define USER_DATA_POLL (UINT64_MAX - 1)
#define REAP_MAX 32u
#define REFUSALS_MAX 8u /* EAGAIN, EINTR: of one flight */
#define SHORTS_MAX 4u   /* rests of one flight that are asked for */

bool kvt_disk_is_idle(const struct kvt_disk *disk)
{
    return disk->free_count == KVT_DISK_FLIGHTS;
}

void kvt_disk_finish(struct kvt_disk *disk, struct kvt_xfer *xfer, int status)
{
    xfer->status = status;
    kvt_worker_finish(&disk->worker, xfer, disk->now_ns);
}

static struct kvt_disk_flight *flight_take(struct kvt_disk *disk)
{
    struct kvt_disk_flight *flight;

    KVT_ASSERT(disk->free_count > 0);
    if (kvt_disk_is_idle(disk))
        disk->busy_since_ns = disk->now_ns;
    flight = &disk->flights[disk->free_flights[--disk->free_count]];
    KVT_ASSERT(!flight->is_used);
    /* The generation goes on. */
    *flight = (struct kvt_disk_flight){.generation = flight->generation, .is_used = true};
    return flight;
}

static void flight_give(struct kvt_disk *disk, struct kvt_disk_flight *flight)
{
    KVT_ASSERT(flight->is_used);
    flight->is_used = false;
    disk->free_flights[disk->free_count++] = (uint32_t)(flight - disk->flights);
    if (kvt_disk_is_idle(disk))
        kvt_worker_count(&disk->worker.tier.counters.busy_ns, disk->now_ns - disk->busy_since_ns);
}

/* The registered buffer that all of [offset, offset + bytes) of L2 lies in, or -1. */
static int buffer_idx(const struct kvt_disk *disk, uint64_t offset_bytes, uint64_t bytes)
{
    uint64_t first = offset_bytes / BUFFER_BYTES_MAX;

    if (!disk->are_buffers_registered || (offset_bytes + bytes - 1) / BUFFER_BYTES_MAX != first)
        return -1;
    return (int)first;
}

static void flight_complete(struct kvt_disk *disk, uint64_t user_data, int32_t result);

/* A flush by a plain call. While somebody else flushes too it means nothing: once more, then. */
static int64_t flush_run(struct kvt_disk *disk)
{
    const struct timespec pause = {.tv_nsec = KVT_NS_PER_MS};

    for (;;) {
        int result = disk->io->fdatasync(disk->io->ctx, disk->file.fd);

        if (result < 0 || kvt_worker_is_stopping(&disk->worker) ||
            atomic_load_explicit(&disk->other_syncs, memory_order_seq_cst) == 0)
            return result;
        (void)nanosleep(&pause, NULL);
    }
}

static void sqe_run(struct kvt_disk *disk, const struct kvt_disk_sqe *sqe)
{
    const struct kvt_disk_io *io = disk->io;
    int64_t result;

    switch (sqe->op) {
    case KVT_DISK_OP_READ:
        result = io->pread(io->ctx, disk->file.fd, sqe->buffer, sqe->bytes, sqe->offset_bytes);
        break;
    case KVT_DISK_OP_WRITE:
        result = io->pwrite(io->ctx, disk->file.fd, sqe->buffer, sqe->bytes, sqe->offset_bytes);
        break;
    default:
        KVT_ASSERT(sqe->op == KVT_DISK_OP_FLUSH);
        result = flush_run(disk);
    }
    /* Whoever asked for the stop may have stopped waiting for this call: the transfer, the memory
     * and all that is not this thread's own may be gone. */
    if (kvt_worker_is_stopping(&disk->worker))
        pthread_exit(NULL);
    disk->now_ns = kvt_clock_mono_ns();
    flight_complete(disk, sqe->user_data, (int32_t)result);
}

static bool is_probe(const struct kvt_disk_flight *flight)
{
    return flight->xfers.head == NULL;
}

/* One more request for the flight, for what of it is not done. */
static void flight_issue(struct kvt_disk *disk, struct kvt_disk_flight *flight)
{
    struct kvt_disk_sqe sqe = {.op = flight->op, .buffer_idx = -1};

    if (flight->op == KVT_DISK_OP_FLUSH)
        atomic_fetch_add_explicit(&disk->own_syncs_begun, 1, memory_order_seq_cst);
    flight->generation++;
    sqe.user_data = (uint64_t)flight->generation << 32 | (uint64_t)(flight - disk->flights);
    if (flight->op != KVT_DISK_OP_FLUSH && is_probe(flight)) {
        sqe.buffer = disk->file.probe;
        sqe.bytes = KVT_DISK_SUPER_BYTES;
        sqe.offset_bytes = KVT_DISK_SUPER_BYTES; /* the second copy */
    } else if (flight->op != KVT_DISK_OP_FLUSH) {
        uint64_t offset_bytes = flight->host_offset_bytes + flight->done_bytes;

        sqe.buffer = disk->host_memory + offset_bytes;
        sqe.bytes = (uint32_t)(flight->bytes - flight->done_bytes);
        sqe.offset_bytes =
            KVT_DISK_DATA_OFFSET_BYTES + flight->disk_offset_bytes + flight->done_bytes;
        sqe.buffer_idx = buffer_idx(disk, offset_bytes, sqe.bytes);
    }
    if (disk->ring == NULL) {
        sqe_run(disk, &sqe);
        return;
    }
    KVT_ASSERT(disk->batch_count < KVT_COUNT_OF(disk->batch));
    disk->batch[disk->batch_count++] = sqe;
}

/* A write to a slot and another transfer of it must not be in flight together. */
static bool is_disjoint(const struct kvt_disk *disk, const struct kvt_disk_flight *flight)
{
    for (uint32_t i = 0; i < KVT_DISK_FLIGHTS; i++) {
        const struct kvt_disk_flight *other = &disk->flights[i];

        if (other == flight || !other->is_used || is_probe(other) ||
            other->op == KVT_DISK_OP_FLUSH ||
            (flight->op == KVT_DISK_OP_READ && other->op == KVT_DISK_OP_READ))
            continue;
        if (flight->disk_offset_bytes < other->disk_offset_bytes + other->bytes &&
            other->disk_offset_bytes < flight->disk_offset_bytes + flight->bytes)
            return false;
    }
    return true;
}

static struct kvt_disk_window *window_of(struct kvt_disk *disk, enum kvt_disk_op op)
{
    return &disk->windows[op == KVT_DISK_OP_READ ? DISK_READ : DISK_WRITE];
}

void kvt_disk_begin(struct kvt_disk *disk, struct kvt_worker_queue xfers, enum kvt_disk_op op)
{
    struct kvt_disk_flight *flight = flight_take(disk);
    const struct kvt_xfer *first = xfers.head;

    flight->xfers = xfers;
    flight->op = op;
    flight->deadline_ns = KVT_TIME_NEVER_NS;
    for (struct kvt_xfer *xfer = xfers.head; xfer != NULL; xfer = xfer->next) {
        flight->xfers_count++;
        flight->deadline_ns = KVT_MIN(flight->deadline_ns, xfer->deadline_ns);
        flight->bytes += op == KVT_DISK_OP_FLUSH ? 0 : xfer->slot_bytes;
        xfer->started_ns = disk->now_ns;
    }
    disk->overdue_at_ns =
        KVT_MIN(disk->overdue_at_ns, kvt_time_add(flight->deadline_ns, disk->hang_ns));
    if (op != KVT_DISK_OP_FLUSH) {
        flight->host_offset_bytes =
            op == KVT_DISK_OP_READ ? first->dst.offset_bytes : first->src.offset_bytes;
        flight->disk_offset_bytes =
            op == KVT_DISK_OP_READ ? first->src.offset_bytes : first->dst.offset_bytes;
        KVT_DEBUG_ASSERT(is_disjoint(disk, flight));
        flight->is_background = (first->flags & KVT_XFER_BACKGROUND) != 0;
        disk->background_bytes += flight->is_background ? flight->bytes : 0;
        kvt_disk_window_start(window_of(disk, op), flight->bytes, disk->now_ns);
    }
    flight_issue(disk, flight);
}

void kvt_disk_begin_probe(struct kvt_disk *disk)
{
    struct kvt_disk_flight *flight = flight_take(disk);

    flight->op = KVT_DISK_OP_READ;
    flight->deadline_ns = KVT_TIME_NEVER_NS;
    memset(disk->file.probe, 0, KVT_DISK_SUPER_BYTES);
    flight_issue(disk, flight);
}

/* The probe reads the superblock's second copy, compares, writes the same bytes back and flushes.
 */
static void probe_complete(struct kvt_disk *disk, struct kvt_disk_flight *flight, int32_t result)
{
    enum kvt_disk_op op = flight->op;
    bool is_good = op == KVT_DISK_OP_FLUSH ? result >= 0 : result == (int32_t)KVT_DISK_SUPER_BYTES;

    if (op == KVT_DISK_OP_READ && is_good)
        is_good = memcmp(disk->file.probe, disk->file.super, KVT_DISK_SUPER_BYTES) == 0;
    if (is_good && op != KVT_DISK_OP_FLUSH) {
        flight->op = op == KVT_DISK_OP_READ ? KVT_DISK_OP_WRITE : KVT_DISK_OP_FLUSH;
        flight_issue(disk, flight);
        return;
    }
    flight_give(disk, flight);
    if (op == KVT_DISK_OP_FLUSH && !is_good)
        kvt_disk_note_sync_failure(disk, result);
    kvt_disk_probe_ended(disk, is_good);
}

/* For who flushes outside the thread: failure and error are there before the end is. */
static void own_sync_ended(struct kvt_disk *disk, int32_t result)
{
    if (result < 0) {
        atomic_store_explicit(&disk->own_sync_error, result, memory_order_seq_cst);
        atomic_fetch_add_explicit(&disk->own_sync_failures, 1, memory_order_seq_cst);
    }
    atomic_fetch_add_explicit(&disk->own_syncs_ended, 1, memory_order_seq_cst);
}

static void flush_complete(struct kvt_disk *disk, struct kvt_disk_flight *flight, int32_t result)
{
    struct kvt_worker_queue xfers = flight->xfers;
    bool is_unsure = atomic_load_explicit(&disk->other_syncs, memory_order_seq_cst) > 0;
    int error = atomic_load_explicit(&disk->other_sync_error, memory_order_seq_cst);

    if (result >= 0)
        result = error != 0 ? error : disk->sync_error;
    if (result >= 0 && is_unsure && disk->ring != NULL) { /* that other call ends some time */
        flight_issue(disk, flight);
        return;
    }
    flight_give(disk, flight);
    disk->is_flushing = false;
    if (result >= 0)
        kvt_worker_count(&disk->worker.tier.counters.flushes, 1);
    while (xfers.head != NULL)
        kvt_disk_finish(disk, kvt_worker_queue_pop(&xfers), result < 0 ? result : KVT_XFER_DONE);
    disk->has_untold_writes &= result >= 0;
    kvt_disk_note_result(disk, result < 0);
    if (result < 0)
        kvt_disk_note_sync_failure(disk, result);
}

/* Whether a read or write that came back with @result is to be asked for again. If not, its
 * first done_bytes are done, and what is behind them has *ret_status. */
static bool move_is_again(struct kvt_disk_flight *flight, int32_t result, int *ret_status)
{
    uint64_t want = flight->bytes - flight->done_bytes;

    if ((result == -EAGAIN || result == -EINTR) && flight->refusals < REFUSALS_MAX) {
        flight->refusals++;
        return true;
    }
    *ret_status = result < 0 ? result : KVT_XFER_SHORT;
    if (result < 0)
        return false;
    if ((uint64_t)result > want) { /* nobody knows where the rest of it went */
        *ret_status = -EIO;
        return false;
    }
    flight->done_bytes += (uint64_t)result;
    if (flight->done_bytes == flight->bytes || result == 0 ||
        result % (int32_t)KVT_DIO_ALIGN_BYTES != 0 || flight->shorts == SHORTS_MAX)
        return false;
    flight->shorts++;
    return true;
}

static void move_end(struct kvt_disk *disk, struct kvt_xfer *xfer, bool is_read, int status)
{
    struct kvt_tier_counters *counters = &disk->worker.tier.counters;
    uint64_t number = xfer->done_ns;

    kvt_disk_read_ended(disk, xfer);
    if (status == KVT_XFER_DONE) {
        kvt_worker_count(is_read ? &counters->reads : &counters->writes, 1);
        kvt_worker_count(is_read ? &counters->read_bytes : &counters->written_bytes,
                         xfer->slot_bytes);
        disk->has_untold_writes |= !is_read;
    }
    if (status == KVT_XFER_DONE && is_read)
        kvt_worker_queue_push(&disk->verifying, xfer);
    else
        kvt_disk_finish(disk, xfer, status);
    if (!is_read)
        kvt_disk_write_ended(disk, number);
}

static void move_complete(struct kvt_disk *disk, struct kvt_disk_flight *flight, int32_t result)
{
    struct kvt_worker_queue xfers = flight->xfers;
    bool is_read = flight->op == KVT_DISK_OP_READ, is_chain = flight->xfers_count > 1;
    uint64_t done_bytes, bytes = flight->bytes, at_bytes = 0;
    int status = KVT_XFER_DONE;

    if (move_is_again(flight, result, &status)) {
        flight_issue(disk, flight);
        return;
    }
    done_bytes = flight->done_bytes;
    kvt_disk_window_done(window_of(disk, flight->op), bytes, disk->now_ns);
    disk->background_bytes -= flight->is_background ? bytes : 0;
    flight_give(disk, flight);
    while (xfers.head != NULL) {
        struct kvt_xfer *xfer = kvt_worker_queue_pop(&xfers);

        at_bytes += xfer->slot_bytes;
        if (at_bytes <= done_bytes)
            move_end(disk, xfer, is_read, KVT_XFER_DONE);
        else if (is_chain && !disk->is_out)
            kvt_disk_again_alone(disk, xfer, is_read ? DISK_READ : DISK_WRITE);
        else
            move_end(disk, xfer, is_read, status);
    }
    if (done_bytes < bytes ? !is_chain : !is_read)
        kvt_disk_note_result(disk, done_bytes < bytes);
}

static void flight_complete(struct kvt_disk *disk, uint64_t user_data, int32_t result)
{
    uint64_t idx = user_data & UINT32_MAX;
    struct kvt_disk_flight *flight;

    if (user_data == USER_DATA_POLL) {
        disk->is_poll_armed = false;
        return;
    }
    /* Stale, repeated or never ours. */
    if (idx >= KVT_DISK_FLIGHTS || !disk->flights[idx].is_used ||
        disk->flights[idx].generation != user_data >> 32)
        return;
    flight = &disk->flights[idx];
    if (flight->op == KVT_DISK_OP_FLUSH)
        own_sync_ended(disk, result);
    if (is_probe(flight))
        probe_complete(disk, flight, result);
    else if (flight->op == KVT_DISK_OP_FLUSH)
        flush_complete(disk, flight, result);
    else
        move_complete(disk, flight, result);
}

/* So that a submission of the engine ends the sleep in the ring. */
static void poll_arm(struct kvt_disk *disk)
{
    if (disk->is_poll_armed || disk->batch_count == KVT_COUNT_OF(disk->batch))
        return;
    disk->batch[disk->batch_count++] = (struct kvt_disk_sqe){.op = KVT_DISK_OP_POLL,
                                                             .buffer_idx = -1,
                                                             .poll_fd = disk->worker.bell.fd,
                                                             .user_data = USER_DATA_POLL};
    disk->is_poll_armed = true;
}

void kvt_disk_submit(struct kvt_disk *disk)
{
    struct kvt_disk_sqe rest[KVT_COUNT_OF(disk->batch)];
    uint32_t taken, rest_count;
    int r;

    if (disk->ring == NULL || (disk->batch_count == 0 && kvt_disk_is_idle(disk)))
        return;
    poll_arm(disk);
    if (disk->batch_count == 0)
        return;
    r = disk->io->ring_submit(disk->io->ctx, disk->ring, disk->batch, disk->batch_count);
    taken = r < 0 ? 0 : (uint32_t)r;
    KVT_ASSERT(taken <= disk->batch_count);
    rest_count = disk->batch_count - taken;
    memcpy(rest, disk->batch + taken, rest_count * sizeof(rest[0]));
    disk->submit_failures = taken > 0 || rest_count == 0 ? 0 : disk->submit_failures + 1;
    if (r < 0 && r != -EAGAIN && r != -EBUSY && r != -EINTR)
        disk->submit_failures = SUBMIT_FAILURES_MAX;
    disk->batch_count = 0;
    if (disk->submit_failures < SUBMIT_FAILURES_MAX) {
        memcpy(disk->batch, rest, rest_count * sizeof(rest[0]));
        disk->batch_count = rest_count;
        return;
    }
    disk->submit_failures = 0;
    for (uint32_t i = 0; i < rest_count; i++)
        flight_complete(disk, rest[i].user_data, r < 0 ? r : -EBUSY);
}

uint32_t kvt_disk_reap(struct kvt_disk *disk)
{
    struct kvt_disk_cqe cqes[REAP_MAX];
    uint32_t count;

    if (disk->ring == NULL)
        return 0;
    count = disk->io->ring_reap(disk->io->ctx, disk->ring, cqes, REAP_MAX);
    if (count > 0)
        disk->now_ns = kvt_clock_mono_ns();
    for (uint32_t i = 0; i < count; i++)
        flight_complete(disk, cqes[i].user_data, cqes[i].result);
    return count;
}
