#include "tests/bench/bench_disk.h"

#include <fcntl.h>
#include <liburing.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

#include "daemon/base/clock.h"
#include "daemon/base/hash.h"
#include "tiers/disk/set.h"
#include "tiers/disk/super.h"
#include "tiers/pages.h"

#define MEMORY_BYTES (64u << 20)
#define SPAN_BYTES (512u << 20)
#define FILE_BYTES (SPAN_BYTES + KVT_DISK_DATA_OFFSET_BYTES)
#define XFERS_MAX 8192u
#define BLOCK_TOKENS 16u
#define ROUNDS_MAX 9u
#define BATCH_BYTES (4u << 20) /* what a flush makes durable */
#define BATCH_SLOT_BYTES (256u << 10)
#define BATCH_SLOTS (BATCH_BYTES / BATCH_SLOT_BYTES)

/* Background writes of 256 KiB come in bursts, as evictions do. */
#define WRITE_BUDGET 500e6 /* bytes a second */
#define WRITE_BURST 32u
#define READ_ROUND_NS (400u * KVT_NS_PER_MS)
#define LATENCIES_MAX 100000u

struct paths {
    struct kvt_doorbell bell;
    struct kvt_tier *tier;
    uint8_t *memory;
    uint64_t slot_bytes;
    uint32_t slots; /* in memory */
    char files[3][256];
    struct kvt_xfer xfers[XFERS_MAX];
    double latencies[LATENCIES_MAX];
};

static void die(const char *what, int r)
{
    fprintf(stderr, "bench_disk: %s: %s\n", what, strerror(-r));
    exit(1);
}

static struct kvt_disk_config device_config(struct paths *paths, uint32_t file)
{
    return (struct kvt_disk_config){.path = paths->files[file],
                                    .bytes = FILE_BYTES,
                                    .host_memory = paths->memory,
                                    .host_memory_bytes = MEMORY_BYTES,
                                    .inflight_max = XFERS_MAX,
                                    .doorbell = &paths->bell};
}

static void paths_open(struct paths *paths)
{
    const char *dir = getenv("KVT_BENCH_DIR");
    struct kvt_disk_config config;
    struct kvt_disk_report report;
    int r = kvt_doorbell_init(&paths->bell);

    if (r == 0)
        r = kvt_pages_map(-1, MEMORY_BYTES, true, &paths->memory);
    if (r == 0)
        r = kvt_pages_populate(paths->memory, MEMORY_BYTES);
    for (uint32_t i = 0; i < KVT_COUNT_OF(paths->files); i++)
        (void)snprintf(paths->files[i], sizeof(paths->files[i]), "%s/bench-l3-paths-%d-%u",
                       dir != NULL ? dir : ".", (int)getpid(), i);
    config = device_config(paths, 0);
    if (r == 0)
        r = kvt_disk_open(&paths->tier, &config, &report);
    if (r != 0)
        die("L3", r < 0 ? r : -EBUSY);
}

static void paths_close(struct paths *paths)
{
    char lock[300];

    paths->tier = kvt_tier_close(paths->tier);
    for (uint32_t i = 0; i < KVT_COUNT_OF(paths->files); i++) {
        (void)snprintf(lock, sizeof(lock), "%s.lock", paths->files[i]);
        (void)unlink(lock);
        (void)unlink(paths->files[i]);
    }
    kvt_doorbell_deinit(&paths->bell);
}

/* Memory is full of sealed slots; all of the span is written with them. */
static void shape(struct paths *paths, uint64_t slot_bytes)
{
    uint32_t header_bytes = kvt_slot_header_bytes(BLOCK_TOKENS), tokens[BLOCK_TOKENS] = {0};

    paths->slot_bytes = slot_bytes;
    paths->slots = (uint32_t)KVT_MIN(MEMORY_BYTES / slot_bytes, (uint64_t)XFERS_MAX);
    for (uint32_t i = 0; i < paths->slots; i++) {
        uint8_t *slot = paths->memory + i * slot_bytes;
        struct kvt_slot_info info = {.block_id = i + 1,
                                     .payload_bytes = slot_bytes - header_bytes,
                                     .block_tokens = BLOCK_TOKENS};

        kvt_slot_header_write(slot, &info, tokens);
        memset(slot + header_bytes, (int)i, slot_bytes - header_bytes);
        kvt_slot_header_seal(slot, kvt_hash64(slot + header_bytes, slot_bytes - header_bytes, 0));
    }
}

/* Transfer @idx of memory slot @slot; on disk it lies @offset_bytes further. */
static struct kvt_xfer *xfer_make(struct paths *paths, uint32_t idx, bool is_read, uint32_t slot,
                                  uint64_t offset_bytes)
{
    uint32_t header_bytes = kvt_slot_header_bytes(BLOCK_TOKENS);
    struct kvt_place host = {.kind = KVT_PLACE_HOST, .offset_bytes = slot * paths->slot_bytes};
    struct kvt_place disk = {.kind = KVT_PLACE_DISK,
                             .offset_bytes = offset_bytes + slot * paths->slot_bytes};

    paths->xfers[idx] = (struct kvt_xfer){.src = is_read ? disk : host,
                                          .dst = is_read ? host : disk,
                                          .key = {.block_id = slot + 1,
                                                  .payload_bytes = paths->slot_bytes - header_bytes,
                                                  .block_tokens = BLOCK_TOKENS},
                                          .header_bytes = header_bytes,
                                          .slot_bytes = paths->slot_bytes,
                                          .deadline_ns = KVT_TIME_NEVER_NS};
    return &paths->xfers[idx];
}

static void submit(struct kvt_tier *tier, struct kvt_xfer *const list[], uint32_t count)
{
    uint32_t taken = 0;

    if (kvt_tier_submit(tier, list, count, &taken) != 0 || taken != count)
        die("submit", -EBUSY);
}

/* Up to @timeout_ns for the first; dies of one that failed. */
static uint32_t reap(struct paths *paths, struct kvt_tier *tier, struct kvt_xfer *list[],
                     uint64_t timeout_ns)
{
    uint32_t got;

    kvt_doorbell_arm(&paths->bell);
    got = kvt_tier_reap(tier, list, XFERS_MAX);
    if (got > 0)
        kvt_doorbell_disarm(&paths->bell);
    else
        kvt_doorbell_wait(&paths->bell, timeout_ns);
    for (uint32_t i = 0; i < got; i++)
        if (list[i]->status != KVT_XFER_DONE)
            die("transfer", list[i]->status < 0 ? list[i]->status : -EIO);
    return got;
}

/* ns of @count transfers of neighbouring slots, in their order or scattered. */
static uint64_t call(struct paths *paths, struct kvt_tier *tier, bool is_read, bool is_scattered,
                     uint32_t count, uint64_t offset_bytes)
{
    static struct kvt_xfer *list[XFERS_MAX];
    uint32_t reaped = 0;
    uint64_t started_ns;

    for (uint32_t i = 0; i < count; i++)
        list[i] =
            xfer_make(paths, i, is_read, is_scattered ? (uint32_t)((uint64_t)i * 1031 % count) : i,
                      offset_bytes);
    started_ns = kvt_clock_mono_ns();
    submit(tier, list, count);
    while (reaped < count)
        reaped += reap(paths, tier, list, KVT_NS_PER_S);
    return kvt_clock_mono_ns() - started_ns;
}

static uint32_t rounds_of(const struct bench *bench)
{
    return bench->is_quick ? 1 : ROUNDS_MAX;
}

static void bench_neighbours(struct bench *bench, struct paths *paths, uint64_t slot_bytes)
{
    double rates[2][2][ROUNDS_MAX];
    char name[80];

    shape(paths, slot_bytes);
    for (uint64_t at = 0; at < SPAN_BYTES; at += MEMORY_BYTES)
        (void)call(paths, paths->tier, false, false, paths->slots, at);
    for (uint32_t r = 0; r < rounds_of(bench); r++)
        for (int is_read = 0; is_read < 2; is_read++)
            for (int is_scattered = 0; is_scattered < 2; is_scattered++)
                rates[is_read][is_scattered][r] =
                    (double)(paths->slots * slot_bytes) /
                    (double)call(paths, paths->tier, is_read, is_scattered, paths->slots,
                                 r * 3 % (SPAN_BYTES / MEMORY_BYTES) * MEMORY_BYTES);
    for (int is_read = 1; is_read >= 0; is_read--) {
        (void)snprintf(name, sizeof(name), "L3 %s, %llu KiB, neighbours",
                       is_read ? "read" : "write", (unsigned long long)(slot_bytes >> 10));
        bench_row(bench,
                  &(struct bench_row){.name = name,
                                      .value = bench_median(rates[is_read][0], rounds_of(bench)),
                                      .unit = "GB/s",
                                      .limit_name = "the same slots, scattered",
                                      .limit = bench_median(rates[is_read][1], rounds_of(bench))});
    }
}

/* us of a flush after a batch, and of one that finds nothing to do. */
static void bench_flush(struct bench *bench, struct paths *paths)
{
    double after[ROUNDS_MAX], idle[ROUNDS_MAX];
    struct kvt_xfer *list[1];

    shape(paths, BATCH_SLOT_BYTES);
    for (uint32_t r = 0; r < rounds_of(bench); r++) {
        for (int is_idle = 0; is_idle < 2; is_idle++) {
            uint64_t started_ns;

            if (!is_idle)
                (void)call(paths, paths->tier, false, true, BATCH_SLOTS,
                           r * MEMORY_BYTES % SPAN_BYTES);
            paths->xfers[0] =
                (struct kvt_xfer){.flags = KVT_XFER_FLUSH, .deadline_ns = KVT_TIME_NEVER_NS};
            list[0] = &paths->xfers[0];
            started_ns = kvt_clock_mono_ns();
            submit(paths->tier, list, 1);
            while (reap(paths, paths->tier, list, KVT_NS_PER_S) == 0)
                ;
            (is_idle ? idle : after)[r] = (double)(kvt_clock_mono_ns() - started_ns) / 1e3;
        }
    }
    bench_row(bench, &(struct bench_row){.name = "L3 fdatasync after a batch of 4 MiB",
                                         .value = bench_median(after, rounds_of(bench)),
                                         .unit = "us",
                                         .limit_name = "fdatasync with nothing written",
                                         .limit = bench_median(idle, rounds_of(bench))});
}

/* us until a batch of writes is durable, with @flags on each write or with fdatasync behind all. */
static double bare_batch(struct io_uring *ring, int fd, const uint8_t *memory, int flags,
                         uint64_t offset_bytes)
{
    uint64_t started_ns = kvt_clock_mono_ns();
    struct io_uring_cqe *cqe;

    for (uint32_t i = 0; i < BATCH_SLOTS; i++) {
        struct io_uring_sqe *sqe = io_uring_get_sqe(ring);

        io_uring_prep_write(sqe, fd, memory + i * BATCH_SLOT_BYTES, BATCH_SLOT_BYTES,
                            offset_bytes + i * 5 % BATCH_SLOTS * BATCH_SLOT_BYTES);
        sqe->rw_flags = flags;
    }
    if (io_uring_submit_and_wait(ring, BATCH_SLOTS) < 0)
        die("bare batch", -EIO);
    for (uint32_t i = 0; i < BATCH_SLOTS; i++) {
        if (io_uring_wait_cqe(ring, &cqe) < 0 || cqe->res != (int)BATCH_SLOT_BYTES)
            die("bare batch", -EIO);
        io_uring_cqe_seen(ring, cqe);
    }
    if (flags == 0 && fdatasync(fd) < 0)
        die("fdatasync", -errno);
    return (double)(kvt_clock_mono_ns() - started_ns) / 1e3;
}

/* Force unit access against a flush: what a durable batch of 4 MiB costs in either way. */
static void bench_fua(struct bench *bench, struct paths *paths)
{
    double dsync[ROUNDS_MAX], flush[ROUNDS_MAX];
    int fd = open(paths->files[0], O_RDWR | O_DIRECT | O_CLOEXEC);
    struct io_uring ring;
    int r = fd < 0 ? -errno : io_uring_queue_init(64, &ring, 0);

    if (r < 0)
        die("bare batch", r);
    for (uint32_t i = 0; i < rounds_of(bench); i++) {
        uint64_t at = KVT_DISK_DATA_OFFSET_BYTES + i * MEMORY_BYTES % SPAN_BYTES;

        flush[i] = bare_batch(&ring, fd, paths->memory, 0, at);
        dsync[i] = bare_batch(&ring, fd, paths->memory, RWF_DSYNC, at);
    }
    io_uring_queue_exit(&ring);
    close(fd);
    bench_row(bench, &(struct bench_row){.name = "16 writes of 256 KiB with RWF_DSYNC",
                                         .value = bench_median(dsync, rounds_of(bench)),
                                         .unit = "us",
                                         .limit_name = "the same writes, then fdatasync",
                                         .limit = bench_median(flush, rounds_of(bench))});
}

/* ---- foreground reads beside background writes ---------------------------------------------- */

#define READ_IDX 0u                                    /* of xfers and of memory slots */
#define WRITE_IDX 64u                                  /* the first of the writes' */
#define WRITES_MAX 128u                                /* outstanding */
#define READ_SLOTS (SPAN_BYTES / 2 / BATCH_SLOT_BYTES) /* the front half is read */

struct mixed {
    uint64_t seed, started_ns, refilled_ns;
    double tokens;
    bool is_writing[WRITES_MAX];
    uint32_t outstanding, latencies, written;
};

static void mixed_read(struct paths *paths, struct mixed *mixed)
{
    struct kvt_xfer *xfer = xfer_make(paths, READ_IDX, true, 0, 0);

    mixed->seed = mixed->seed * 6364136223846793005ull + 1442695040888963407ull;
    xfer->src.offset_bytes = (mixed->seed >> 33) % READ_SLOTS * BATCH_SLOT_BYTES;
    xfer->key.block_id = xfer->src.offset_bytes / BATCH_SLOT_BYTES % paths->slots + 1;
    xfer->done_ns = 0;
    xfer->owner = NULL;
    mixed->started_ns = kvt_clock_mono_ns();
    submit(paths->tier, &xfer, 1);
    mixed->outstanding++;
}

static void mixed_write(struct paths *paths, struct mixed *mixed, double budget, uint64_t now_ns)
{
    double most = WRITE_BURST * (double)BATCH_SLOT_BYTES;

    mixed->tokens += (double)(now_ns - mixed->refilled_ns) * budget / 1e9;
    mixed->tokens = KVT_MIN(mixed->tokens, 2 * most);
    mixed->refilled_ns = now_ns;
    if (mixed->tokens < most)
        return;
    for (uint32_t i = 0; i < WRITES_MAX && mixed->tokens >= BATCH_SLOT_BYTES; i++) {
        struct kvt_xfer *xfer;

        if (mixed->is_writing[i])
            continue;
        xfer = xfer_make(paths, WRITE_IDX + i, false, WRITE_IDX + i, 0);
        xfer->dst.offset_bytes =
            SPAN_BYTES / 2 + (uint64_t)(mixed->written++ % READ_SLOTS) * BATCH_SLOT_BYTES;
        xfer->flags = KVT_XFER_BACKGROUND;
        submit(paths->tier, &xfer, 1);
        mixed->is_writing[i] = true;
        mixed->outstanding++;
        mixed->tokens -= BATCH_SLOT_BYTES;
    }
}

/* p99 in us of reads that follow each other, beside writes of @budget bytes a second. */
static double mixed_p99(struct paths *paths, double budget)
{
    static struct kvt_xfer *list[XFERS_MAX];
    struct mixed mixed = {.seed = 1, .refilled_ns = kvt_clock_mono_ns()};
    uint64_t until_ns = mixed.refilled_ns + READ_ROUND_NS;

    mixed_read(paths, &mixed);
    while (mixed.outstanding > 0) {
        uint32_t got = reap(paths, paths->tier, list, KVT_NS_PER_MS);
        uint64_t now_ns = kvt_clock_mono_ns();

        mixed.outstanding -= got;
        for (uint32_t i = 0; i < got; i++) {
            if (list[i] != &paths->xfers[READ_IDX]) {
                mixed.is_writing[list[i] - &paths->xfers[WRITE_IDX]] = false;
                continue;
            }
            if (mixed.latencies < LATENCIES_MAX)
                paths->latencies[mixed.latencies++] =
                    (double)(list[i]->done_ns - mixed.started_ns) / 1e3;
            if (now_ns < until_ns)
                mixed_read(paths, &mixed);
        }
        if (budget > 0 && now_ns < until_ns)
            mixed_write(paths, &mixed, budget, now_ns);
    }
    (void)bench_median(paths->latencies, mixed.latencies); /* sorts */
    return paths->latencies[mixed.latencies * 99ull / 100];
}

static void bench_mixed(struct bench *bench, struct paths *paths)
{
    double quiet[ROUNDS_MAX], beside[ROUNDS_MAX];

    shape(paths, BATCH_SLOT_BYTES);
    for (uint64_t at = 0; at < SPAN_BYTES; at += MEMORY_BYTES)
        (void)call(paths, paths->tier, false, true, paths->slots, at);
    for (uint32_t r = 0; r < rounds_of(bench); r++) {
        quiet[r] = mixed_p99(paths, 0);
        beside[r] = mixed_p99(paths, WRITE_BUDGET);
    }
    bench_row(bench, &(struct bench_row){.name = "L3 read p99, 256 KiB, beside 500 MB/s written",
                                         .value = bench_median(beside, rounds_of(bench)),
                                         .unit = "us",
                                         .limit_name = "the same without writes",
                                         .limit = bench_median(quiet, rounds_of(bench)),
                                         .target = 1.5,
                                         .note = "median of rounds; writes in bursts of 8 MiB"});
}

/* ---- sets ----------------------------------------------------------------------------------- */

static struct kvt_tier *set_open(struct paths *paths, uint32_t first, uint32_t count)
{
    struct kvt_disk_set_config config = {.devices_count = count};
    struct kvt_disk_set_report report;
    struct kvt_tier *set = NULL;
    int r;

    for (uint32_t i = 0; i < count; i++)
        config.devices[i] = device_config(paths, first + i);
    r = kvt_disk_set_open(&set, &config, &report);
    if (r != 0 || report.opened_count != count)
        die("set", r != 0 ? r : -EBUSY);
    return set;
}

/* Reads of 64 KiB through a set of one and of two devices (files on one disk: what the set itself
 * costs), against the device alone. */
static void bench_set(struct bench *bench, struct paths *paths)
{
    static const char *const names[] = {"L3 read, 64 KiB, a set of one device",
                                        "L3 read, 64 KiB, a set of two files on the same disk"};
    double alone[ROUNDS_MAX], rates[ROUNDS_MAX];

    shape(paths, 64 << 10);
    for (uint32_t count = 1; count <= 2; count++) {
        struct kvt_tier *set = set_open(paths, 1, count);
        double bytes = (double)(paths->slots * paths->slot_bytes);
        /* Half of a call on either side of the border. */
        uint64_t at = count == 1 ? 0 : set->zones[1].base_bytes - MEMORY_BYTES / 2;

        (void)call(paths, paths->tier, false, true, paths->slots, 0);
        (void)call(paths, set, false, true, paths->slots, at);
        for (uint32_t r = 0; r < rounds_of(bench); r++) {
            alone[r] = bytes / (double)call(paths, paths->tier, true, true, paths->slots, 0);
            rates[r] = bytes / (double)call(paths, set, true, true, paths->slots, at);
        }
        bench_row(bench, &(struct bench_row){.name = names[count - 1],
                                             .value = bench_median(rates, rounds_of(bench)),
                                             .unit = "GB/s",
                                             .limit_name = "the device alone",
                                             .limit = bench_median(alone, rounds_of(bench)),
                                             .is_least = true,
                                             .target = 0.95});
        set = kvt_tier_close(set);
    }
}

void bench_disk_paths(struct bench *bench)
{
    static struct paths paths;

    paths_open(&paths);
    for (uint64_t slot_bytes = 4 << 10; slot_bytes <= 64 << 10; slot_bytes *= 4)
        bench_neighbours(bench, &paths, slot_bytes);
    bench_flush(bench, &paths);
    bench_fua(bench, &paths);
    bench_mixed(bench, &paths);
    bench_set(bench, &paths);
    paths_close(&paths);
}
