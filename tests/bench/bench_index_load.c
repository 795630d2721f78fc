/* The index as the engine has it, with its thread and its helper process: how long from open to
 * LOADED with every row taken, with the page cache and without; what goes through the rings and the
 * socket; what a put costs the engine. 10,000, 100,000 and 1,000,000 blocks of 64 tokens with one
 * copy each, on paths of 100 blocks. The same without ring, socket and process: bench-index.
 *
 * The file is made in the current directory, or in $KVT_BENCH_DIR. Without root only the index's
 * own pages are dropped from the cache. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "daemon/base/clock.h"
#include "daemon/base/program.h"
#include "tests/bench/bench.h"
#include "tiers/index/index.h"

#define BLOCK_TOKENS 64u
#define PATH_BLOCKS 100u
#define ROUNDS 5u
#define LOAD_MS_MAX 1000.0

struct world {
    struct bench bench;
    struct kvt_index_config config;
    struct kvt_doorbell bell;
    struct kvt_index *index;
    char path[4000], program[KVT_PROGRAM_PATH_BYTES];
    uint64_t rows, committed_seq, seq, use;
    uint64_t put_ns; /* inside kvt_index_put */
};

static void die(const char *what, const char *why)
{
    fprintf(stderr, "bench_index_load: %s: %s\n", what, why);
    exit(1);
}

static int data_sync(void *ctx)
{
    (void)ctx;
    return 0;
}

/* Takes events until there are none now; true: LOADED was among them. */
static bool take_events(struct world *world)
{
    struct kvt_index_event event;
    bool is_loaded = false;

    while (kvt_index_next(world->index, &event)) {
        if (event.kind == KVT_INDEX_EVENT_ROW) {
            world->rows++;
            world->use += event.put.tokens[0] ^ event.put.tokens[BLOCK_TOKENS - 1];
        } else if (event.kind == KVT_INDEX_EVENT_COPY) {
            world->use += event.put.slot_offsets[0];
        } else if (event.kind == KVT_INDEX_EVENT_COMMITTED) {
            world->committed_seq = event.seq;
        } else if (event.kind == KVT_INDEX_EVENT_FAILED) {
            die("failed", event.why);
        } else {
            is_loaded = true;
        }
    }
    return is_loaded;
}

static void sleep_for_events(struct world *world)
{
    kvt_doorbell_arm(&world->bell);
    kvt_doorbell_wait(&world->bell, KVT_NS_PER_MS);
}

/* CPU time of this process and of its helpers that have ended; ms. */
static double cpu_ms(void)
{
    static const int whose[] = {RUSAGE_SELF, RUSAGE_CHILDREN};
    double ms = 0;

    for (uint32_t i = 0; i < KVT_COUNT_OF(whose); i++) {
        struct rusage usage;

        (void)getrusage(whose[i], &usage);
        ms += (double)(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) * 1e3 +
              (double)(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) / 1e3;
    }
    return ms;
}

/* From open to LOADED, every row taken; ms. */
static double load_ms(struct world *world)
{
    uint64_t start_ns = bench_now_ns();

    world->rows = world->committed_seq = world->seq = 0;
    if (kvt_index_open(&world->index, &world->config) != 0)
        die("open", strerror(errno));
    while (!take_events(world))
        sleep_for_events(world);
    return (double)(bench_now_ns() - start_ns) / 1e6;
}

static void put(struct world *world, const struct kvt_index_put *what)
{
    uint64_t start_ns = bench_now_ns();

    while (kvt_index_put(world->index, what, &world->seq) != 0) {
        (void)take_events(world);
        sleep_for_events(world);
        start_ns = bench_now_ns();
    }
    world->put_ns += bench_now_ns() - start_ns;
}

static void put_block(struct world *world, uint64_t id)
{
    uint64_t slot = id * 65536, run = kvt_round_down(slot, 2 * KVT_MIB);
    uint32_t tokens[BLOCK_TOKENS];
    struct kvt_index_put what = {
        .kind = KVT_INDEX_PUT_ROW,
        .key = {.epoch = 1, .block_idx = (uint32_t)((id - 1) % PATH_BLOCKS), .block_id = id},
        .parent_id = (id - 1) % PATH_BLOCKS == 0 ? 0 : id - 1,
        .tokens_count = BLOCK_TOKENS,
        .tokens = tokens,
    };

    for (uint32_t i = 0; i < BLOCK_TOKENS; i++)
        tokens[i] = (uint32_t)(id * 31 + i);
    if (what.parent_id == 0) {
        what.root_key = (const uint8_t *)"\1\0\0\2\0\0";
        what.root_key_bytes = 6;
    }
    put(world, &what);
    what.kind = KVT_INDEX_PUT_COPY;
    what.shards_count = 1;
    what.content = id;
    what.slot_bytes = 65536;
    what.slot_offsets = &slot;
    what.run_offsets = &run;
    put(world, &what);
}

static void row(struct world *world, const char *name, uint32_t blocks, const char *unit,
                double value, double target)
{
    char text[96];
    struct bench_row row = {.name = text, .unit = unit, .value = value, .target = target};

    (void)snprintf(text, sizeof(text), "%s, %u blocks", name, blocks);
    bench_row(&world->bench, &row);
}

static void fill(struct world *world, uint32_t blocks)
{
    struct kvt_index_put sync = {.kind = KVT_INDEX_PUT_SYNC};
    uint64_t start_ns;

    (void)load_ms(world);
    world->put_ns = 0;
    start_ns = bench_now_ns();
    for (uint64_t id = 1; id <= blocks; id++)
        put_block(world, id);
    put(world, &sync);
    while (world->committed_seq < world->seq) {
        (void)take_events(world);
        sleep_for_events(world);
    }
    row(world, "puts until all are durable", blocks, "puts/s",
        2e9 * blocks / (double)(bench_now_ns() - start_ns), 0);
    row(world, "of the engine's time, a put", blocks, "ns", (double)world->put_ns / (2.0 * blocks),
        0);
    world->index = kvt_index_close(world->index);
}

static void cache_drop(const struct world *world)
{
    int fd = open(world->path, O_RDONLY | O_CLOEXEC);

    if (fd < 0 || fdatasync(fd) < 0 || posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED) != 0)
        die("drop of the page cache", strerror(errno));
    (void)close(fd);
    fd = open("/proc/sys/vm/drop_caches", O_WRONLY | O_CLOEXEC);
    if (fd >= 0) {
        (void)!write(fd, "1", 1);
        (void)close(fd);
    }
}

static void measure(struct world *world, uint32_t blocks)
{
    double warm_ms[ROUNDS], cold_ms[ROUNDS], used_ms[ROUNDS];

    world->config.bytes = 16 * KVT_MIB + 1200ull * blocks;
    (void)unlink(world->path);
    fill(world, blocks);
    for (uint32_t i = 0; i < ROUNDS; i++) {
        cache_drop(world);
        cold_ms[i] = load_ms(world);
        if (world->rows != blocks)
            die("load", "blocks were lost");
        world->index = kvt_index_close(world->index);
        used_ms[i] = cpu_ms();
        warm_ms[i] = load_ms(world);
        world->index = kvt_index_close(world->index);
        used_ms[i] = cpu_ms() - used_ms[i];
    }
    bench_use(world->use);
    row(world, "open to LOADED, warm", blocks, "ms", bench_median(warm_ms, ROUNDS), 0);
    row(world, "CPU time of that, daemon and helper", blocks, "ms", bench_median(used_ms, ROUNDS),
        0);
    row(world, "blocks through socket and ring, warm", blocks, "blocks/s",
        blocks * 1e3 / bench_median(warm_ms, ROUNDS), 0);
    row(world, "open to LOADED, page cache dropped", blocks, "ms", bench_median(cold_ms, ROUNDS),
        LOAD_MS_MAX);
    (void)unlink(world->path);
}

int main(int argc, char **argv)
{
    static struct world world;
    const char *directory = getenv("KVT_BENCH_DIR");
    uint32_t blocks_max;

    bench_begin(&world.bench, "bench-index-load", argc, argv);
    blocks_max = world.bench.is_quick ? 10000 : 1000000;
    if (kvt_program_find("kvtierd-index", world.program) != 0 ||
        kvt_doorbell_init(&world.bell) != 0)
        die("kvtierd-index", "not found");
    (void)snprintf(world.path, sizeof(world.path), "%s/bench-index-load-%d",
                   directory != NULL ? directory : ".", (int)getpid());
    world.config = (struct kvt_index_config){
        .path = world.path,
        .helper_path = world.program,
        .namespaces = {{.is_used = true, .epoch = 1, .block_tokens = BLOCK_TOKENS}},
        .data_sync = data_sync,
        .doorbell = &world.bell,
    };
    for (uint32_t blocks = 10000; blocks <= blocks_max; blocks *= 10)
        measure(&world, blocks);
    kvt_doorbell_deinit(&world.bell);
    return bench_end(&world.bench);
}
