#include "tests/common/disk_shim.h"

#include <fcntl.h>
#include <string.h>
#include <time.h>

#include "daemon/base/clock.h"
#include "tiers/disk/super.h"

/* The result that the next of the blocking calls is to give instead, or 0. They are made by one
 * thread at a time, but for plain calls of the tier's thread, which tests do not count. */
static int shim_call(struct disk_shim *shim, int result)
{
    if (result < 0)
        return result;
    if (shim->fail_call == 0)
        return 0;
    shim->calls++;
    return shim->calls == shim->fail_call || (shim->is_failing_on && shim->calls > shim->fail_call)
               ? shim->call_result
               : 0;
}

static int shim_open(void *ctx, const char *path, int flags, mode_t mode)
{
    struct disk_shim *shim = ctx;
    int r = shim_call(shim, shim->open_result);

    if (r == 0 && (flags & O_DIRECT))
        r = shim->direct_result;
    return r < 0 ? r : kvt_disk_io_real.open(NULL, path, flags, mode);
}

static int shim_file_info(void *ctx, int fd, struct kvt_disk_file_info *ret_info)
{
    struct disk_shim *shim = ctx;
    int r = shim_call(shim, shim->file_info_result);

    return r < 0 ? r : kvt_disk_io_real.file_info(NULL, fd, ret_info);
}

static int shim_device_info(void *ctx, int fd, struct kvt_disk_device_info *ret_info)
{
    struct disk_shim *shim = ctx;
    int r = shim_call(shim, shim->device_info_result);

    return r < 0 ? r : kvt_disk_io_real.device_info(NULL, fd, ret_info);
}

static int shim_lock(void *ctx, int fd)
{
    struct disk_shim *shim = ctx;
    int r = shim_call(shim, shim->lock_result);

    return r < 0 ? r : kvt_disk_io_real.lock(NULL, fd);
}

static int shim_lock_requests(void *ctx, int fd)
{
    struct disk_shim *shim = ctx;
    int r = shim_call(shim, 0);

    return r < 0 ? r : kvt_disk_io_real.lock_requests(NULL, fd);
}

static int shim_sync_parent(void *ctx, const char *path)
{
    struct disk_shim *shim = ctx;
    int r = shim_call(shim, shim->sync_parent_result);

    return r < 0 ? r : kvt_disk_io_real.sync_parent(NULL, path);
}

static int shim_fallocate(void *ctx, int fd, uint64_t bytes)
{
    struct disk_shim *shim = ctx;
    int r = shim_call(shim, shim->fallocate_result);

    return r < 0 ? r : kvt_disk_io_real.fallocate(NULL, fd, bytes);
}

static int shim_truncate(void *ctx, int fd, uint64_t bytes)
{
    struct disk_shim *shim = ctx;
    int r = shim_call(shim, shim->truncate_result);

    return r < 0 ? r : kvt_disk_io_real.truncate(NULL, fd, bytes);
}

/* A plain call to a device that hangs. */
static void shim_hang(struct disk_shim *shim)
{
    struct timespec pause = {.tv_nsec = 1000000};

    atomic_fetch_add(&shim->stuck_calls, 1);
    while (atomic_load(&shim->is_stuck))
        nanosleep(&pause, NULL);
    atomic_fetch_sub(&shim->stuck_calls, 1);
}

static int shim_result(struct disk_shim *shim, const atomic_int *result)
{
    int gone = atomic_load(&shim->gone_result);

    return gone < 0 ? gone : atomic_load(result);
}

static int64_t shim_pread(void *ctx, int fd, void *buffer, uint32_t bytes, uint64_t offset_bytes)
{
    struct disk_shim *shim = ctx;
    int r = shim_call(shim, shim_result(shim, &shim->read_result));

    shim_hang(shim);
    return r < 0 ? r : kvt_disk_io_real.pread(NULL, fd, buffer, bytes, offset_bytes);
}

static int64_t shim_pwrite(void *ctx, int fd, const void *buffer, uint32_t bytes,
                           uint64_t offset_bytes)
{
    struct disk_shim *shim = ctx;
    int result = shim_result(shim, &shim->write_result);
    int r = shim_call(shim, shim->pwrite_result < 0 ? shim->pwrite_result : result);

    shim_hang(shim);
    if (r < 0 && shim->is_tearing && bytes > 512) /* the front arrives, the rest does not */
        (void)kvt_disk_io_real.pwrite(NULL, fd, buffer, 512, offset_bytes);
    return r < 0 ? r : kvt_disk_io_real.pwrite(NULL, fd, buffer, bytes, offset_bytes);
}

static int shim_fdatasync(void *ctx, int fd)
{
    struct disk_shim *shim = ctx;
    int r = shim_call(shim, shim_result(shim, &shim->flush_result));

    shim_hang(shim);
    return r < 0 ? r : kvt_disk_io_real.fdatasync(NULL, fd);
}

static int shim_ring_open(void *ctx, struct kvt_disk_ring **ret_ring, int fd, uint32_t entries)
{
    struct disk_shim *shim = ctx;

    return shim->ring_result < 0 ? shim->ring_result
                                 : kvt_disk_io_real.ring_open(NULL, ret_ring, fd, entries);
}

static void shim_ring_close(void *ctx, struct kvt_disk_ring *ring)
{
    (void)ctx;
    kvt_disk_io_real.ring_close(NULL, ring);
}

static int shim_register_file(void *ctx, struct kvt_disk_ring *ring)
{
    struct disk_shim *shim = ctx;

    return shim->register_file_result < 0 ? shim->register_file_result
                                          : kvt_disk_io_real.ring_register_file(NULL, ring);
}

static int shim_register_buffers(void *ctx, struct kvt_disk_ring *ring,
                                 const struct kvt_disk_buffer *buffers, uint32_t count)
{
    struct disk_shim *shim = ctx;

    return shim->register_buffers_result < 0
               ? shim->register_buffers_result
               : kvt_disk_io_real.ring_register_buffers(NULL, ring, buffers, count);
}

/* Gives the kernel what it gets, but for the requests of a device that is stuck. */
static int shim_pass(struct disk_shim *shim, struct kvt_disk_ring *ring,
                     const struct kvt_disk_sqe *sqes, uint32_t count)
{
    if (!atomic_load(&shim->is_stuck))
        return kvt_disk_io_real.ring_submit(NULL, ring, sqes, count);
    for (uint32_t i = 0; i < count; i++) {
        if (sqes[i].op != KVT_DISK_OP_POLL && shim->stuck_count < SHIM_STUCK_MAX)
            shim->stuck[shim->stuck_count++] = sqes[i];
        else if (kvt_disk_io_real.ring_submit(NULL, ring, &sqes[i], 1) != 1)
            return (int)i;
    }
    return (int)count;
}

static bool is_bad(struct disk_shim *shim, const struct kvt_disk_sqe *sqe)
{
    uint64_t bad = atomic_load(&shim->bad_offset_bytes);

    return bad != 0 && sqe->op != KVT_DISK_OP_FLUSH && bad >= sqe->offset_bytes &&
           bad - sqe->offset_bytes < sqe->bytes;
}

static int shim_submit(void *ctx, struct kvt_disk_ring *ring, const struct kvt_disk_sqe *sqes,
                       uint32_t count)
{
    struct disk_shim *shim = ctx;
    int result = atomic_load(&shim->submit_result), taken;

    if (result < 0 && atomic_load(&shim->submit_failures) > 0) {
        atomic_fetch_sub(&shim->submit_failures, 1);
        return result;
    }
    taken = shim_pass(shim, ring, sqes, count);
    for (int i = 0; i < taken; i++) {
        uint64_t idx = sqes[i].user_data & UINT32_MAX;

        if (sqes[i].op == KVT_DISK_OP_POLL || idx >= 64)
            continue;
        atomic_fetch_add(&shim->requests[sqes[i].op], 1);
        shim->op_by_flight[idx] = (uint64_t)sqes[i].op;
        shim->is_bad[idx] = is_bad(shim, &sqes[i]);
        shim->is_probe[idx] =
            sqes[i].op != KVT_DISK_OP_FLUSH && sqes[i].offset_bytes < KVT_DISK_DATA_OFFSET_BYTES;
    }
    return taken;
}

/* What the test wants done to one completion. */
static void shim_distort(struct disk_shim *shim, struct kvt_disk_cqe *cqe)
{
    uint64_t idx = cqe->user_data & UINT32_MAX;
    unsigned int every = atomic_load(&shim->fail_every);
    int result = 0, less = atomic_load(&shim->short_bytes);

    if (idx >= 64)
        return;
    atomic_fetch_add(&shim->completions, 1);
    if (shim->is_probe[idx] && atomic_load(&shim->gone_result) == 0 &&
        atomic_load(&shim->is_probe_spared))
        return;
    if (every > 1 && ++shim->counted % every != 0)
        return;
    if (shim->is_bad[idx]) {
        result = -EIO;
    } else if (atomic_load(&shim->interrupts) > 0) {
        atomic_fetch_sub(&shim->interrupts, 1);
        result = -EINTR;
    } else if (shim->op_by_flight[idx] == KVT_DISK_OP_READ)
        result = shim_result(shim, &shim->read_result);
    else if (shim->op_by_flight[idx] == KVT_DISK_OP_WRITE)
        result = shim_result(shim, &shim->write_result);
    else
        result = shim_result(shim, &shim->flush_result);
    if (result < 0 && shim->op_by_flight[idx] == KVT_DISK_OP_FLUSH)
        atomic_fetch_add(&shim->flushes_failed, 1);
    if (result < 0)
        cqe->result = result;
    else if (less > 0 && cqe->result >= less && shim->op_by_flight[idx] != KVT_DISK_OP_FLUSH) {
        cqe->result -= less;
        if (atomic_load(&shim->is_short_once))
            atomic_store(&shim->short_bytes, 0);
    }
}

static uint32_t shim_reap(void *ctx, struct kvt_disk_ring *ring, struct kvt_disk_cqe *ret_cqes,
                          uint32_t max)
{
    struct disk_shim *shim = ctx;
    uint32_t room = SHIM_HELD_MAX - shim->held_count, count = 0, got;
    struct kvt_disk_cqe cqes[32];

    if (shim->stuck_count > 0 && !atomic_load(&shim->is_stuck)) {
        int passed = kvt_disk_io_real.ring_submit(NULL, ring, shim->stuck, shim->stuck_count);

        KVT_ASSERT(passed == (int)shim->stuck_count);
        shim->stuck_count = 0;
    }
    got = kvt_disk_io_real.ring_reap(NULL, ring, cqes, KVT_MIN(room / 3, 32u));

    for (uint32_t i = 0; i < got; i++) {
        shim_distort(shim, &cqes[i]);
        shim->held[shim->held_count++] = cqes[i];
        if (!atomic_load(&shim->is_repeating) || (cqes[i].user_data & UINT32_MAX) >= 64)
            continue;
        shim->held[shim->held_count++] = cqes[i];
        /* And one of long ago: its index is in use again by now. */
        if (shim->old_count == KVT_COUNT_OF(shim->old))
            shim->held[shim->held_count++] = shim->old[0];
        else
            shim->old_count++;
        memmove(shim->old, shim->old + 1, sizeof(shim->old) - sizeof(shim->old[0]));
        shim->old[KVT_COUNT_OF(shim->old) - 1] = cqes[i];
    }
    if (atomic_load(&shim->is_holding))
        return 0;
    while (count < max && count < shim->held_count) {
        uint64_t idx = shim->held[count].user_data & UINT32_MAX;

        ret_cqes[count] = shim->held[count];
        if (atomic_load(&shim->held_result) < 0 && idx < 64 &&
            shim->op_by_flight[idx] == KVT_DISK_OP_FLUSH)
            ret_cqes[count].result = atomic_exchange(&shim->held_result, 0);
        count++;
    }
    memmove(shim->held, shim->held + count, (shim->held_count - count) * sizeof(shim->held[0]));
    shim->held_count -= count;
    return count;
}

static int shim_wait(void *ctx, struct kvt_disk_ring *ring, uint64_t timeout_ns)
{
    struct disk_shim *shim = ctx;

    atomic_fetch_add(&shim->waits, 1);
    /* What is held back does not wake: look again soon. */
    if (shim->held_count > 0)
        timeout_ns = KVT_MIN(timeout_ns, KVT_NS_PER_MS);
    return kvt_disk_io_real.ring_wait(NULL, ring, timeout_ns);
}

void disk_shim_init(struct disk_shim *shim)
{
    memset(shim, 0, sizeof(*shim));
    shim->io = (struct kvt_disk_io){
        .ctx = shim,
        .open = shim_open,
        .file_info = shim_file_info,
        .device_info = shim_device_info,
        .lock = shim_lock,
        .lock_requests = shim_lock_requests,
        .sync_parent = shim_sync_parent,
        .fallocate = shim_fallocate,
        .truncate = shim_truncate,
        .pread = shim_pread,
        .pwrite = shim_pwrite,
        .fdatasync = shim_fdatasync,
        .ring_open = shim_ring_open,
        .ring_close = shim_ring_close,
        .ring_register_file = shim_register_file,
        .ring_register_buffers = shim_register_buffers,
        .ring_submit = shim_submit,
        .ring_wait = shim_wait,
        .ring_reap = shim_reap,
    };
}
