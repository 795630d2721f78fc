/* The index of an L3 device: what a durable put costs, what a start costs (audit and walk, with the
 * page cache and without), what a block takes on disk. 10,000, 100,000 and 1,000,000 blocks of 64
 * tokens with one copy each, on paths of 100 blocks that grow a run of 8 at a time in random order,
 * as the engine puts them: the rows of a run, and 64 runs later its copies, the leaf's first. A
 * commit every 1,000 puts. The limit of a cold start is one read of the same bytes.
 *
 * Warm figures are of CPU time (there is one thread, and no I/O), so that a busy machine does not
 * change them. The file is made in the current directory, or in $KVT_BENCH_DIR. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "tests/bench/bench.h"
#include "tiers/index/audit.h"
#include "tiers/index/db.h"

#define BLOCK_TOKENS 64u
#define PATH_BLOCKS 100u
#define RUN_BLOCKS 8u
#define RUNS_WAITING 64u /* between the rows of a run and its copies */
#define COMMIT_PUTS 1000u
#define ROUNDS 3u
#define READ_BYTES (4u << 20)

struct world {
    struct bench bench;
    struct kvt_index_db_config config;
    char path[4096];
    uint64_t rng;
    uint64_t *tips;  /* id of each path's last block */
    uint8_t *depths; /* of each path */
    uint32_t tokens[BLOCK_TOKENS];
    uint64_t visited, bytes;
};

static void die(const char *what, int r)
{
    fprintf(stderr, "bench_index: %s: %s\n", what, r < 0 ? strerror(-r) : "refused");
    exit(1);
}

static struct kvt_index_db *db_open(struct world *world)
{
    char why[KVT_INDEX_DB_WHY_BYTES];
    struct kvt_index_db *db = NULL;
    int r = kvt_index_db_open(&db, &world->config, why);

    if (r != 0 && r != KVT_INDEX_DB_E_FRESH)
        die(why[0] != '\0' ? why : "open", r);
    return db;
}

static void row(struct world *world, const char *name, uint32_t blocks, const char *unit,
                double value, double target, bool is_least)
{
    char text[96];
    struct bench_row row = {
        .name = text, .unit = unit, .value = value, .target = target, .is_least = is_least};

    (void)snprintf(text, sizeof(text), "%s, %u blocks", name, blocks);
    bench_row(&world->bench, &row);
}

/* The next block of a path; its id is in the path's tip then. */
static void row_put(struct world *world, struct kvt_index_db *db, uint32_t path, uint64_t id)
{
    struct kvt_index_put put = {
        .kind = KVT_INDEX_PUT_ROW,
        .key = {.epoch = 1, .block_idx = world->depths[path], .block_id = id},
        .parent_id = world->tips[path],
        .tokens_count = BLOCK_TOKENS,
        .tokens = world->tokens,
    };
    int r;

    if (put.key.block_idx == 0) {
        put.root_key = (const uint8_t *)"\1\0\0\2\0\0";
        put.root_key_bytes = 6;
    }
    for (uint32_t i = 0; i < BLOCK_TOKENS; i++)
        world->tokens[i] = (uint32_t)(id * 31 + i);
    r = kvt_index_db_apply(db, &put);
    if (r != 0)
        die("put of a row", r);
    world->tips[path] = id;
    world->depths[path]++;
}

static void copy_put(struct kvt_index_db *db, uint64_t id, uint32_t depth)
{
    uint64_t slot = id * 65536, run = slot & ~((2ull << 20) - 1);
    struct kvt_index_put put = {
        .kind = KVT_INDEX_PUT_COPY,
        .key = {.epoch = 1, .block_idx = depth, .block_id = id},
        .shards_count = 1,
        .content = id,
        .slot_bytes = 65536,
        .slot_offsets = &slot,
        .run_offsets = &run,
    };
    int r = kvt_index_db_apply(db, &put);

    if (r != 0)
        die("put of a copy", r);
}

struct run { /* blocks before an id and a depth, whose copies are not put yet */
    uint64_t id;
    uint32_t depth, count;
};

static void copies_put(struct kvt_index_db *db, struct run *run)
{
    for (uint32_t i = 1; i <= run->count; i++)
        copy_put(db, run->id - i, run->depth - i);
    run->count = 0;
}

static void fill(struct world *world, uint32_t blocks)
{
    struct run runs[RUNS_WAITING] = {{0}};
    uint32_t at = 0;
    struct kvt_index_db *db = db_open(world);
    uint32_t paths = (blocks + PATH_BLOCKS - 1) / PATH_BLOCKS, puts = 0;
    uint64_t start_ns = bench_now_ns();

    memset(world->tips, 0, paths * sizeof(*world->tips));
    memset(world->depths, 0, paths);
    for (uint64_t id = 1; id <= blocks;) {
        uint32_t path, run;

        do {
            world->rng ^= world->rng << 13;
            world->rng ^= world->rng >> 7;
            world->rng ^= world->rng << 17;
            path = (uint32_t)((world->rng >> 11) % paths);
        } while (world->depths[path] == PATH_BLOCKS);
        copies_put(db, &runs[at % RUNS_WAITING]);
        run = 0;
        for (; run < RUN_BLOCKS && id <= blocks && world->depths[path] < PATH_BLOCKS; run++)
            row_put(world, db, path, id++);
        runs[at++ % RUNS_WAITING] = (struct run){id, world->depths[path], run};
        puts += 2 * run;
        if (puts / COMMIT_PUTS != (puts - 2 * run) / COMMIT_PUTS && kvt_index_db_commit(db) != 0)
            die("commit", -EIO);
    }
    for (uint32_t i = 0; i < RUNS_WAITING; i++)
        copies_put(db, &runs[i]);
    if (kvt_index_db_commit(db) != 0)
        die("commit", -EIO);
    row(world, "durable puts", blocks, "puts/s", puts * 1e9 / (double)(bench_now_ns() - start_ns),
        0, true);
    (void)kvt_index_db_close(db);
}

static int visit(void *ctx, const struct kvt_index_put *put)
{
    struct world *world = ctx;

    if (put->kind == KVT_INDEX_PUT_ROW) {
        world->visited++;
        world->bytes += put->tokens[0] ^ put->tokens[BLOCK_TOKENS - 1];
    } else {
        world->bytes += put->slot_offsets[0];
    }
    return 0;
}

static void cache_drop(const struct world *world)
{
    int fd = open(world->path, O_RDONLY | O_CLOEXEC);

    if (fd < 0 || fdatasync(fd) < 0 || posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED) != 0)
        die("drop of the page cache", -errno);
    (void)close(fd);
}

static uint64_t clock_ns(clockid_t clock)
{
    struct timespec now;

    (void)clock_gettime(clock, &now);
    return (uint64_t)now.tv_sec * KVT_NS_PER_S + (uint64_t)now.tv_nsec;
}

/* Opens and walks; ms of each by @clock. */
static void start(struct world *world, clockid_t clock, double *ret_open_ms, double *ret_walk_ms,
                  uint64_t *ret_used_bytes)
{
    uint64_t start_ns = clock_ns(clock), open_ns;
    struct kvt_index_db *db = db_open(world);
    struct kvt_index_loaded loaded;
    struct kvt_index_db_stats stats;

    open_ns = clock_ns(clock);
    world->visited = 0;
    if (kvt_index_db_walk(db, visit, world, &loaded) != 0)
        die("walk", -EIO);
    *ret_walk_ms = (double)(clock_ns(clock) - open_ns) / 1e6;
    *ret_open_ms = (double)(open_ns - start_ns) / 1e6;
    bench_use(world->bytes);
    kvt_index_db_stats(db, &stats);
    *ret_used_bytes = stats.used_bytes;
    (void)kvt_index_db_close(db);
}

/* One read of the used bytes from the device; ms. */
static double read_ms(const struct world *world, uint64_t bytes)
{
    uint8_t *at = malloc(READ_BYTES);
    int fd = open(world->path, O_RDONLY | O_CLOEXEC);
    uint64_t start_ns;

    if (at == NULL || fd < 0)
        die("read", -errno);
    memset(at, 0, READ_BYTES);
    cache_drop(world);
    start_ns = bench_now_ns();
    (void)posix_fadvise(fd, 0, (off_t)bytes, POSIX_FADV_WILLNEED);
    for (uint64_t done = 0; done < bytes; done += READ_BYTES)
        if (pread(fd, at, READ_BYTES, (off_t)done) < 0)
            die("read", -errno);
    start_ns = bench_now_ns() - start_ns;
    (void)close(fd);
    free(at);
    return (double)start_ns / 1e6;
}

static void measure(struct world *world, uint32_t blocks)
{
    double open_ms[ROUNDS], walk_ms[ROUNDS], cold_ms[ROUNDS], bare_ms[ROUNDS];
    uint64_t used_bytes = 0;
    struct bench_row cold = {.unit = "ms", .limit_name = "one read of the used bytes"};
    char text[96];

    world->config.bytes = 16 * KVT_MIB + 1200ull * blocks;
    (void)unlink(world->path);
    fill(world, blocks);
    for (uint32_t i = 0; i < ROUNDS; i++) {
        double open, walk;

        bare_ms[i] = read_ms(world, used_bytes != 0 ? used_bytes : world->config.bytes / 2);
        cache_drop(world);
        start(world, CLOCK_MONOTONIC, &open, &walk, &used_bytes);
        cold_ms[i] = open + walk;
        start(world, CLOCK_PROCESS_CPUTIME_ID, &open_ms[i], &walk_ms[i], &used_bytes);
        if (world->visited != blocks)
            die("walk lost blocks", 1);
    }
    row(world, "index bytes a block", blocks, "bytes", (double)used_bytes / blocks, 0, false);
    row(world, "open with its audit of every page, warm", blocks, "ms",
        bench_median(open_ms, ROUNDS), 0, false);
    row(world, "walk, warm", blocks, "blocks/s", blocks * 1e3 / bench_median(walk_ms, ROUNDS),
        1.5e6, true);
    (void)snprintf(text, sizeof(text), "open and walk, page cache dropped, %u blocks", blocks);
    cold.name = text;
    cold.value = bench_median(cold_ms, ROUNDS);
    cold.limit = bench_median(bare_ms, ROUNDS);
    bench_row(&world->bench, &cold);
    (void)unlink(world->path);
}

int main(int argc, char **argv)
{
    static struct world world = {.rng = 88172645463325252ull};
    const char *directory = getenv("KVT_BENCH_DIR");
    uint32_t blocks_max;

    bench_begin(&world.bench, "bench-index", argc, argv);
    blocks_max = world.bench.is_quick ? 10000 : 1000000;
    (void)snprintf(world.path, sizeof(world.path), "%s/bench-index-%d",
                   directory != NULL ? directory : ".", (int)getpid());
    world.config.path = world.path;
    world.config.namespaces[0] =
        (struct kvt_index_ns){.is_used = true, .epoch = 1, .block_tokens = BLOCK_TOKENS};
    world.tips = calloc(blocks_max / PATH_BLOCKS, sizeof(*world.tips));
    world.depths = calloc(blocks_max / PATH_BLOCKS, 1);
    if (world.tips == NULL || world.depths == NULL)
        die("memory", -ENOMEM);
    for (uint32_t blocks = 10000; blocks <= blocks_max; blocks *= 10)
        measure(&world, blocks);
    free(world.tips);
    free(world.depths);
    return bench_end(&world.bench);
}
