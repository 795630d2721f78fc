/* Opening and closing L3. The thread is in loop.c, its requests in flight.c. */
#include "tiers/disk/disk.h"

#include <string.h>
#include <time.h>

#include "daemon/base/alloc.h"
#include "daemon/base/clock.h"
#include "tiers/disk/catalog.h"
#include "tiers/disk/loop.h"

#define FAILURES_MAX_DEFAULT 8u
#define RETRY_NS_MIN_DEFAULT KVT_NS_PER_S
#define RETRY_NS_MAX_DEFAULT (60u * KVT_NS_PER_S)
#define HANG_NS_DEFAULT (2u * KVT_NS_PER_S)
#define OWN_SYNC_WAIT_NS (10u * KVT_NS_PER_S)
#define STOP_SLACK_NS (5u * KVT_NS_PER_S) /* a thread that does not hang ends well before */

static void disk_free(struct kvt_disk *disk)
{
    kvt_worker_deinit(&disk->worker);
    kvt_disk_file_close(&disk->file);
    (void)sem_destroy(&disk->started);
    kvt_free(disk);
}

/* The thread gives a device that hangs hang_ns to end what it has, then ends itself, unless it is a
 * plain call that hangs, its own or one of kvt_disk_sync. Then nothing of it can be freed: it
 * stays, and so do file and lock. */
static void disk_close(struct kvt_tier *tier)
{
    struct kvt_disk *disk = KVT_CONTAINER_OF(tier, struct kvt_disk, worker.tier);
    uint64_t until_ns = kvt_time_add(kvt_clock_mono_ns(), disk->hang_ns);

    KVT_ASSERT(disk->worker.outstanding == 0 ||
               atomic_load_explicit(&tier->counters.health, memory_order_relaxed) ==
                   KVT_TIER_HEALTH_OUT);
    kvt_worker_ask_stop(&disk->worker);
    if (kvt_worker_join(&disk->worker, kvt_time_add(until_ns, STOP_SLACK_NS)) &&
        atomic_load_explicit(&disk->other_syncs, memory_order_seq_cst) == 0)
        disk_free(disk);
}

static const struct kvt_tier_ops disk_ops = {
    .name = "disk", .submit = kvt_worker_submit, .reap = kvt_worker_reap, .close = disk_close};

static void disk_configure(struct kvt_disk *disk, const struct kvt_disk_config *config)
{
    disk->io = config->io != NULL ? config->io : &kvt_disk_io_real;
    disk->host_memory = config->host_memory;
    disk->host_memory_bytes = config->host_memory_bytes;
    disk->failures_max = config->failures_max != 0 ? config->failures_max : FAILURES_MAX_DEFAULT;
    disk->retry_ns_min = config->retry_ns_min != 0 ? config->retry_ns_min : RETRY_NS_MIN_DEFAULT;
    disk->retry_ns_max = config->retry_ns_max != 0 ? config->retry_ns_max : RETRY_NS_MAX_DEFAULT;
    disk->hang_ns = config->hang_ns != 0 ? config->hang_ns : HANG_NS_DEFAULT;
    disk->overdue_at_ns = KVT_TIME_NEVER_NS;
    for (int d = 0; d < DISK_DIRECTIONS; d++)
        kvt_disk_window_init(&disk->windows[d], config->inflight_bytes_max);
    for (uint32_t i = 0; i < KVT_DISK_FLIGHTS; i++)
        disk->free_flights[i] = KVT_DISK_FLIGHTS - 1 - i;
    disk->free_count = KVT_DISK_FLIGHTS;
    disk->late_at_ns = KVT_TIME_NEVER_NS;
}

int kvt_disk_read_catalog(struct kvt_disk *disk, struct kvt_disk_catalog *ret_catalog)
{
    kvt_disk_catalog_heal(&disk->file, disk->io);
    return kvt_disk_catalog_read(&disk->file, disk->io, ret_catalog);
}

/* The thread's flushes that are under way now have ended. False: one of them does not. */
static bool own_syncs_wait(struct kvt_disk *disk)
{
    uint64_t begun = atomic_load_explicit(&disk->own_syncs_begun, memory_order_seq_cst);
    uint64_t until_ns = kvt_time_add(kvt_clock_mono_ns(), OWN_SYNC_WAIT_NS);
    const struct timespec pause = {.tv_nsec = 100 * KVT_NS_PER_US};

    while (atomic_load_explicit(&disk->own_syncs_ended, memory_order_seq_cst) < begun) {
        if (kvt_clock_mono_ns() >= until_ns)
            return false;
        (void)nanosleep(&pause, NULL);
    }
    return true;
}

/* The system tells only one caller of a write that was lost. While somebody else than the thread
 * may be that one, a good flush of the thread means nothing; when it was, the thread must know. And
 * while the thread may be that one, a good flush of somebody else means nothing: @failures_before
 * is how many of the thread's had failed that are told already. */
static int sync_ended(struct kvt_disk *disk, int r, uint64_t failures_before)
{
    if (r < 0)
        atomic_store_explicit(&disk->other_sync_error, r, memory_order_seq_cst);
    atomic_fetch_sub_explicit(&disk->other_syncs, 1, memory_order_seq_cst);
    if (r < 0)
        kvt_doorbell_ring(&disk->worker.bell);
    else if (!own_syncs_wait(disk))
        r = -ETIMEDOUT;
    else if (atomic_load_explicit(&disk->own_sync_failures, memory_order_seq_cst) !=
             failures_before)
        r = atomic_load_explicit(&disk->own_sync_error, memory_order_seq_cst);
    return r < 0 ? kvt_trace(r) : r;
}

int kvt_disk_write_catalog(struct kvt_disk *disk, uint32_t number, const void *data, uint32_t bytes)
{
    uint64_t failures = atomic_load_explicit(&disk->own_sync_failures, memory_order_seq_cst);

    if (atomic_fetch_add_explicit(&disk->other_syncs, 1, memory_order_seq_cst) > 0) {
        atomic_fetch_sub_explicit(&disk->other_syncs, 1, memory_order_seq_cst);
        return kvt_trace(-EBUSY);
    }
    return sync_ended(disk, kvt_disk_catalog_write(&disk->file, disk->io, number, data, bytes),
                      failures);
}

/* A failure of the thread's may be long ago, and concern writes that nobody has asked for yet. */
int kvt_disk_sync(struct kvt_disk *disk)
{
    uint64_t told = atomic_load_explicit(&disk->own_failures_told, memory_order_seq_cst);
    int r;

    atomic_fetch_add_explicit(&disk->other_syncs, 1, memory_order_seq_cst);
    r = sync_ended(disk, disk->io->fdatasync(disk->io->ctx, disk->file.fd), told);
    if (r < 0)
        atomic_store_explicit(&disk->own_failures_told,
                              atomic_load_explicit(&disk->own_sync_failures, memory_order_seq_cst),
                              memory_order_seq_cst);
    return r;
}

int kvt_disk_open(struct kvt_tier **ret_tier, const struct kvt_disk_config *config,
                  struct kvt_disk_report *ret_report)
{
    struct kvt_disk *disk;
    int r;

    memset(ret_report, 0, sizeof(*ret_report));
    if (config->inflight_max == 0 || config->host_memory_bytes == 0)
        return kvt_trace(-EINVAL);
    disk = kvt_alloc_aligned(KVT_CACHE_LINE_BYTES, sizeof(*disk));
    if (disk == NULL)
        return kvt_trace(-ENOMEM);
    disk->file.fd = disk->file.hold_fd = disk->file.lock_fd = -1;
    (void)sem_init(&disk->started, 0, 0);
    disk_configure(disk, config);
    r = kvt_worker_init(&disk->worker, &disk_ops, config->inflight_max, config->doorbell);
    if (r == 0)
        r = kvt_disk_file_open(&disk->file, disk->io, config, ret_report);
    if (r == 0) {
        disk->worker.tier.capacity_bytes = disk->file.bytes - KVT_DISK_DATA_OFFSET_BYTES;
        r = kvt_worker_start(&disk->worker, "kvt-disk", kvt_disk_loop);
    }
    if (r != 0) {
        disk_free(disk);
        return r;
    }
    while (sem_wait(&disk->started) < 0)
        KVT_ASSERT(errno == EINTR);
    *ret_tier = &disk->worker.tier;
    return 0;
}
