/* L3 against a bare io_uring loop: the same sizes, as many bytes in flight (4 MiB a direction),
 * O_DIRECT, registered file and buffers. The bare loop moves bytes to and from anonymous memory on
 * transparent huge pages and looks at none of them; the tier verifies what it reads. Three rows a
 * size and direction: the tier over memory of the bare loop's kind (what the tier itself costs),
 * over L2 as this machine gives it (plain pages cost bandwidth: more segments a request), and over
 * L2 as tiers.l2.pages: anonymous gives it, where it does. Slots are taken in an order in which
 * none is the neighbour of the one before, so that all sides make requests of one size. fio runs in
 * the same rounds on a file of its own, where it is installed. What a device does beside bandwidth
 * is in bench_disk_paths.c.
 *
 *     bench-disk [--json] [--quick] [--only-kib N] [--inflight-kib N]
 *
 * for one size of slots, and for so many bytes in flight in the tier instead of what it finds out.
 * Files are made in the current directory, or in $KVT_BENCH_DIR. Interleaved rounds. */
#include <fcntl.h>
#include <liburing.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "daemon/base/clock.h"
#include "daemon/base/hash.h"
#include "tests/bench/bench.h"
#include "tests/bench/bench_disk.h"
#include "tiers/disk/disk.h"
#include "tiers/disk/super.h"
#include "tiers/host/host.h"
#include "tiers/pages.h"

#define FILE_BYTES (514u << 20)
#define SPAN_BYTES (512u << 20) /* of a file that is written and read */
#define CALL_BYTES (64u << 20)  /* a call; and the memory */
#define INFLIGHT_BYTES (4u << 20)
#define STRIDE 5u /* prime to every number of slots in a call */
#define DEPTH_MAX 62u
#define BLOCK_TOKENS 64u
#define XFERS_MAX (CALL_BYTES / (64u << 10))
#define ROUNDS_MAX 27u
#define FIO_EVERY 3u /* rounds: it takes a second where the others take a third of one */
#define SIDES_MAX 3u

struct side {
    const char *name, *note;
    char path[256];
    uint8_t *memory;
    struct kvt_tier *tier;
};

struct world {
    struct kvt_doorbell bell;
    struct kvt_tier *host, *anonymous; /* L2 of either kind; NULL: not to be had here */
    struct side sides[SIDES_MAX];
    uint32_t sides_count;
    uint8_t *bare_memory;
    char fio_path[256];
    int bare_fd;
    struct io_uring ring;
    struct kvt_xfer xfers[XFERS_MAX];
    uint64_t slot_bytes, inflight_bytes;
    uint32_t call_count, position; /* slots a call; the call's place in the span */
};

static void die(const char *what, int r)
{
    fprintf(stderr, "bench_disk: %s: %s\n", what, strerror(-r));
    exit(1);
}

static void side_open(struct world *world, const char *name, const char *note, uint8_t *memory)
{
    struct side *side = &world->sides[world->sides_count++];
    const char *dir = getenv("KVT_BENCH_DIR");
    struct kvt_disk_config config = {.path = side->path,
                                     .bytes = FILE_BYTES,
                                     .host_memory = memory,
                                     .host_memory_bytes = CALL_BYTES,
                                     .inflight_max = XFERS_MAX,
                                     .inflight_bytes_max = world->inflight_bytes,
                                     .doorbell = &world->bell};
    struct kvt_disk_report report;
    int r;

    side->name = name;
    side->note = note;
    side->memory = memory;
    snprintf(side->path, sizeof(side->path), "%s/bench-l3-%d-%u", dir != NULL ? dir : ".",
             (int)getpid(), world->sides_count);
    r = kvt_disk_open(&side->tier, &config, &report);
    if (r != 0)
        die(side->path, r < 0 ? r : -EBUSY);
}

static void side_close(struct side *side)
{
    char lock[300];

    side->tier = kvt_tier_close(side->tier);
    snprintf(lock, sizeof(lock), "%s.lock", side->path);
    (void)unlink(side->path);
    (void)unlink(lock);
}

static void world_open(struct world *world)
{
    struct kvt_host_config host = {
        .bytes = CALL_BYTES, .inflight_max = 8, .doorbell = &world->bell};
    struct iovec iovec = {.iov_len = CALL_BYTES};
    uint8_t *memory = NULL;
    int r = kvt_doorbell_init(&world->bell);

    if (r == 0)
        r = kvt_host_open(&world->host, &host);
    host.pages = KVT_HOST_PAGES_ANONYMOUS;
    if (r == 0 && kvt_host_open(&world->anonymous, &host) < 0)
        world->anonymous = NULL;
    if (r == 0)
        r = kvt_pages_map(-1, CALL_BYTES, true, &memory);
    if (r == 0)
        r = kvt_pages_populate(memory, CALL_BYTES);
    if (r == 0)
        r = kvt_pages_map(-1, CALL_BYTES, true, &world->bare_memory);
    if (r == 0)
        r = kvt_pages_populate(world->bare_memory, CALL_BYTES);
    if (r != 0)
        die("memory", r);
    side_open(world, "memory as the bare loop's", NULL, memory);
    side_open(world, "L2 as it is here", world->host->detail, kvt_host_memory(world->host));
    if (world->anonymous != NULL)
        side_open(world, "L2 anonymous", world->anonymous->detail,
                  kvt_host_memory(world->anonymous));
    (void)snprintf(world->fio_path, sizeof(world->fio_path), "%.240s-fio", world->sides[0].path);
    world->bare_fd = open(world->sides[0].path, O_RDWR | O_DIRECT | O_CLOEXEC);
    if (world->bare_fd < 0)
        die("O_DIRECT", -errno);
    iovec.iov_base = world->bare_memory;
    r = io_uring_queue_init(128, &world->ring,
                            IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN);
    if (r == 0)
        r = io_uring_register_files(&world->ring, &world->bare_fd, 1);
    if (r == 0)
        r = io_uring_register_buffers(&world->ring, &iovec, 1);
    if (r != 0)
        die("io_uring", r);
}

static void world_shape(struct world *world, uint64_t slot_bytes)
{
    uint32_t header_bytes = kvt_slot_header_bytes(BLOCK_TOKENS), tokens[BLOCK_TOKENS] = {0};

    world->slot_bytes = slot_bytes;
    world->call_count = (uint32_t)(CALL_BYTES / slot_bytes);
    world->position = 0;
    for (uint32_t s = 0; s < world->sides_count; s++) {
        for (uint32_t i = 0; i < world->call_count; i++) {
            uint8_t *slot = world->sides[s].memory + i * slot_bytes;
            struct kvt_slot_info info = {.block_id = i + 1,
                                         .payload_bytes = slot_bytes - header_bytes,
                                         .block_tokens = BLOCK_TOKENS};

            kvt_slot_header_write(slot, &info, tokens);
            memset(slot + header_bytes, (int)i, slot_bytes - header_bytes);
            kvt_slot_header_seal(slot,
                                 kvt_hash64(slot + header_bytes, slot_bytes - header_bytes, 0));
        }
    }
}

/* GB/s of one call through a tier. */
static double call_tier(struct world *world, struct side *side, bool is_read)
{
    struct kvt_xfer *list[XFERS_MAX];
    uint32_t reaped = 0, taken = 0;
    uint64_t started_ns;

    for (uint32_t i = 0; i < world->call_count; i++) {
        uint32_t slot = i * STRIDE % world->call_count;
        struct kvt_place host = {.kind = KVT_PLACE_HOST, .offset_bytes = slot * world->slot_bytes};
        struct kvt_place disk = {.kind = KVT_PLACE_DISK,
                                 .offset_bytes = (uint64_t)world->position * CALL_BYTES +
                                                 slot * world->slot_bytes};
        uint32_t header_bytes = kvt_slot_header_bytes(BLOCK_TOKENS);

        world->xfers[i] =
            (struct kvt_xfer){.src = is_read ? disk : host,
                              .dst = is_read ? host : disk,
                              .key = {.block_id = slot + 1,
                                      .payload_bytes = world->slot_bytes - header_bytes,
                                      .block_tokens = BLOCK_TOKENS},
                              .header_bytes = header_bytes,
                              .slot_bytes = world->slot_bytes,
                              .deadline_ns = KVT_TIME_NEVER_NS};
        list[i] = &world->xfers[i];
    }
    started_ns = kvt_clock_mono_ns();
    if (kvt_tier_submit(side->tier, list, world->call_count, &taken) != 0 ||
        taken != world->call_count)
        die("submit", -EBUSY);
    while (reaped < world->call_count) {
        uint32_t got;

        kvt_doorbell_arm(&world->bell);
        got = kvt_tier_reap(side->tier, list, XFERS_MAX);
        if (got > 0)
            kvt_doorbell_disarm(&world->bell);
        else
            kvt_doorbell_wait(&world->bell, KVT_NS_PER_S);
        for (uint32_t i = 0; i < got; i++)
            if (list[i]->status != KVT_XFER_DONE)
                die("transfer", -EIO);
        reaped += got;
    }
    return (double)CALL_BYTES / (double)(kvt_clock_mono_ns() - started_ns);
}

static void bare_queue(struct world *world, uint32_t position, bool is_read)
{
    uint32_t i = position * STRIDE % world->call_count;
    struct io_uring_sqe *sqe = io_uring_get_sqe(&world->ring);
    uint8_t *buffer = world->bare_memory + i * world->slot_bytes;
    uint64_t offset =
        KVT_DISK_DATA_OFFSET_BYTES + (uint64_t)world->position * CALL_BYTES + i * world->slot_bytes;

    if (is_read)
        io_uring_prep_read_fixed(sqe, 0, buffer, (unsigned int)world->slot_bytes, offset, 0);
    else
        io_uring_prep_write_fixed(sqe, 0, buffer, (unsigned int)world->slot_bytes, offset, 0);
    sqe->flags |= IOSQE_FIXED_FILE;
}

static double call_bare(struct world *world, bool is_read)
{
    uint32_t depth = (uint32_t)KVT_MIN(INFLIGHT_BYTES / world->slot_bytes, DEPTH_MAX);
    uint32_t queued = 0, done = 0;
    uint64_t started_ns = kvt_clock_mono_ns();
    struct io_uring_cqe *cqe;

    /* What it writes is what the tier wrote there: the tier reads it later. */
    memcpy(world->bare_memory, world->sides[0].memory, is_read ? 0 : CALL_BYTES);
    started_ns = kvt_clock_mono_ns();
    while (done < world->call_count) {
        while (queued < world->call_count && queued - done < depth)
            bare_queue(world, queued++, is_read);
        if (io_uring_submit_and_wait(&world->ring, 1) < 0)
            die("bare loop", -EIO);
        while (io_uring_peek_cqe(&world->ring, &cqe) == 0) {
            if (cqe->res != (int)world->slot_bytes)
                die("bare loop", cqe->res < 0 ? cqe->res : -EIO);
            io_uring_cqe_seen(&world->ring, cqe);
            done++;
        }
    }
    return (double)CALL_BYTES / (double)(kvt_clock_mono_ns() - started_ns);
}

/* GB/s of fio with the same size and depth; 0: there is no fio. */
static double call_fio(const struct world *world, uint64_t slot_bytes, bool is_read)
{
    const uint64_t depth = KVT_MAX(INFLIGHT_BYTES / slot_bytes, (uint64_t)1);
    char command[640], line[4096];
    double kib_per_s = 0;
    FILE *pipe;

    (void)snprintf(command, sizeof(command),
                   "fio --name=l3 --filename=%s --size=%u --bs=%llu --iodepth=%llu "
                   "--rw=%s --ioengine=io_uring --direct=1 --fixedbufs=1 --registerfiles=1 "
                   "--overwrite=1 --time_based --runtime=500ms --minimal 2>/dev/null",
                   world->fio_path, SPAN_BYTES, (unsigned long long)slot_bytes,
                   (unsigned long long)depth, is_read ? "randread" : "randwrite");
    pipe = popen(command, "re");
    if (pipe == NULL)
        return 0;
    if (fgets(line, sizeof(line), pipe) != NULL) {
        const char *at = line;

        /* Terse output: bandwidth is field 7 of reads, 48 of writes. */
        for (int field = 1; at != NULL && field < (is_read ? 7 : 48); field++) {
            at = strchr(at, ';');
            at = at == NULL ? NULL : at + 1;
        }
        kib_per_s = at == NULL ? 0 : strtod(at, NULL);
    }
    (void)pclose(pipe);
    return kib_per_s * 1024 / 1e9;
}

static void row_of_fio(struct bench *bench, uint64_t slot_bytes, bool is_read, double value,
                       double fio)
{
    char name[80];

    (void)snprintf(name, sizeof(name), "L3 %s, %llu KiB, huge pages, to fio",
                   is_read ? "read" : "write", (unsigned long long)(slot_bytes >> 10));
    if (fio > 0)
        bench_row(bench, &(struct bench_row){.name = name,
                                             .value = value,
                                             .unit = "GB/s",
                                             .limit_name = "fio, same size and depth, plain pages",
                                             .limit = fio,
                                             .is_least = true,
                                             .target = 0.95});
}

static void bench_size(struct bench *bench, struct world *world, uint64_t slot_bytes)
{
    static char figures[32][80];
    static uint32_t texts;
    double bare[2][ROUNDS_MAX], fio[2][ROUNDS_MAX], tier[2][SIDES_MAX][ROUNDS_MAX];
    uint32_t rounds = bench->is_quick ? 1 : ROUNDS_MAX;

    world_shape(world, slot_bytes);
    for (uint32_t s = 0; s < world->sides_count; s++)
        for (world->position = 0; world->position < SPAN_BYTES / CALL_BYTES; world->position++)
            (void)call_tier(world, &world->sides[s], false);
    for (uint32_t r = 0; r < rounds; r++) {
        world->position = r * 3 % (SPAN_BYTES / CALL_BYTES);
        for (int is_read = 0; is_read < 2; is_read++) {
            bare[is_read][r] = call_bare(world, is_read);
            if (r % FIO_EVERY == 0)
                fio[is_read][r / FIO_EVERY] = call_fio(world, slot_bytes, is_read);
            for (uint32_t s = 0; s < world->sides_count; s++)
                tier[is_read][s][r] = call_tier(world, &world->sides[s], is_read);
        }
    }
    for (int is_read = 1; is_read >= 0; is_read--) {
        row_of_fio(bench, slot_bytes, is_read != 0, bench_median(tier[is_read][0], rounds),
                   bench_median(fio[is_read], (uint32_t)kvt_div_up(rounds, FIO_EVERY)));
        for (uint32_t s = 0; s < world->sides_count; s++) {
            snprintf(figures[texts], sizeof(figures[0]), "L3 %s, %llu KiB, %s",
                     is_read ? "read" : "write", (unsigned long long)(slot_bytes >> 10),
                     world->sides[s].name);
            bench_row(bench, &(struct bench_row){.name = figures[texts++],
                                                 .value = bench_median(tier[is_read][s], rounds),
                                                 .unit = "GB/s",
                                                 .limit_name = "bare io_uring loop, huge pages",
                                                 .limit = bench_median(bare[is_read], rounds),
                                                 .is_least = true,
                                                 .target = 0.95,
                                                 .note = world->sides[s].note});
        }
    }
}

int main(int argc, char **argv)
{
    static struct world world;
    struct bench bench;
    uint64_t only_bytes;
    int status;

    bench_begin(&bench, "L3", argc, argv);
    only_bytes = bench_arg_u64(argc, argv, "--only-kib", 0) << 10;
    world.inflight_bytes = bench_arg_u64(argc, argv, "--inflight-kib", 0) << 10;
    world_open(&world);
    for (uint64_t slot_bytes = 64 << 10; slot_bytes <= 4 << 20; slot_bytes *= 4)
        if (only_bytes == 0 || only_bytes == slot_bytes)
            bench_size(&bench, &world, slot_bytes);
    (void)unlink(world.fio_path);
    if (only_bytes == 0)
        bench_disk_paths(&bench);
    status = bench_end(&bench);
    io_uring_queue_exit(&world.ring);
    close(world.bare_fd);
    for (uint32_t s = 0; s < world.sides_count; s++)
        side_close(&world.sides[s]);
    world.host = kvt_tier_close(world.host);
    world.anonymous = kvt_tier_close(world.anonymous);
    return status;
}
