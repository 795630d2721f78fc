/* The restart of the whole daemon over an L3 that holds 10,000, 100,000 and 1,000,000 blocks of 64
 * tokens in slots of 4 KiB, in two shapes (bench_restart.h says how they got there), with the page
 * cache dropped: from exec until a client can connect (READY is sent then), until the first lookup
 * of a prompt that is known in full (of those the one that is loaded last) was answered, and until
 * all of the index was taken in (which is when a lookup of an unknown prompt is answered). The
 * limit of the last is a plain read of the used part of the index file, with the page cache dropped
 * as well.
 *
 * Then `--rebuild-l3` over 2 GiB of slots of 64 KiB, against a bare sequential O_DIRECT read of the
 * same bytes.
 *
 * L3 is made in the current directory, or in $KVT_BENCH_DIR. Without root only the pages of the
 * index are dropped from the cache, not the programs. --daemon PATH: the build directory's by
 * default. --least-blocks, --most-blocks N: multiples of 10,000. */
#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "tests/bench/bench.h"
#include "tests/bench/bench_restart.h"
#include "tiers/slot.h"

#define SLOT_BYTES 4096u
#define REBUILD_SLOT_BYTES 65536u
#define HEADER_BYTES 512u /* of a slot with 64 tokens */
#define L2_BYTES (32ull << 20)
#define BESIDE_BYTES (64ull << 20) /* that the daemon may take beside L2 and index.memory */
#define READ_BYTES (4u << 20)
#define ROUNDS_MAX 5u
#define READY_MS_MAX 1000.0
#define PROMPT_SEED 77u /* of a prompt that nobody stored */
#define SETTINGS_MAX 12u

static struct e2e_model model = {.name = "bench-restart",
                                 .block_tokens = RESTART_TOKENS,
                                 .ranks = 1,
                                 .components_count = 1,
                                 .components = {{.kind = 1}}};

struct world {
    struct bench bench;
    struct restart_place place;
    struct e2e_daemon daemon;
    char dir[E2E_PATH_BYTES];
    uint64_t index_memory_bytes;
    char texts[SETTINGS_MAX][E2E_PATH_BYTES + 64];
    const char *settings[SETTINGS_MAX + 1];
    uint32_t tokens[RESTART_PROMPT_MAX];
};

struct restart { /* one, measured */
    double ready_ms, hit_ms, loaded_ms;
    double engine_ms, pump_ms, helper_ms; /* of CPU time, at LOADED */
    double rss_mib, helper_rss_mib, helper_own_mib;
    double memory_bytes; /* of index.memory, in use */
};

static void set_up_settings(struct world *world, const char *option)
{
    const struct restart_place *place = &world->place;
    uint32_t count = 0;

    snprintf(world->texts[count++], sizeof(world->texts[0]), "tiers.l3.path=%s", place->path);
    snprintf(world->texts[count++], sizeof(world->texts[0]), "tiers.l3.bytes=%lluB",
             (unsigned long long)(restart_data_bytes(place) + place->index_bytes));
    snprintf(world->texts[count++], sizeof(world->texts[0]), "tiers.l3.index_bytes=%lluB",
             (unsigned long long)place->index_bytes);
    snprintf(world->texts[count++], sizeof(world->texts[0]), "index.memory=%lluB",
             (unsigned long long)world->index_memory_bytes);
    snprintf(world->texts[count++], sizeof(world->texts[0]), "tiers.l2.slab_unit=2MiB");
    snprintf(world->texts[count++], sizeof(world->texts[0]), "tiers.l3.load_wait=1min");
    snprintf(world->texts[count++], sizeof(world->texts[0]), "log.level=info");
    if (option != NULL)
        snprintf(world->texts[count++], sizeof(world->texts[0]), "%s", option);
    for (uint32_t i = 0; i < count; i++)
        world->settings[i] = world->texts[i];
    world->settings[count] = NULL;
}

/* ---- the machine ---------------------------------------------------------------------------- */

static double since_ms(uint64_t started_ns)
{
    return (double)(bench_now_ns() - started_ns) / 1e6;
}

static void cache_drop(const struct world *world)
{
    int fd = open(world->place.index_path, O_RDONLY | O_CLOEXEC);

    CHECK(fd >= 0 && fdatasync(fd) == 0);
    CHECK(posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED) == 0);
    (void)close(fd);
    fd = open("/proc/sys/vm/drop_caches", O_WRONLY | O_CLOEXEC);
    if (fd >= 0) {
        (void)!write(fd, "1", 1);
        (void)close(fd);
    }
}

/* A value in KiB of /proc/PID/status, in MiB. */
static double status_mib(pid_t pid, const char *key)
{
    char path[64], line[256];
    double mib = 0;
    FILE *file;

    (void)snprintf(path, sizeof(path), "/proc/%d/status", (int)pid);
    file = fopen(path, "re");
    CHECK(file != NULL);
    while (fgets(line, sizeof(line), file) != NULL)
        if (strncmp(line, key, strlen(key)) == 0 && line[strlen(key)] == ':')
            mib = (double)strtoull(line + strlen(key) + 1, NULL, 10) / 1024;
    (void)fclose(file);
    return mib;
}

/* First number of a small file of /proc; 0 when there is none. */
static uint64_t number_of(const char *path)
{
    char text[64] = "";
    int fd = open(path, O_RDONLY | O_CLOEXEC);

    if (fd < 0)
        return 0;
    if (read(fd, text, sizeof(text) - 1) < 0)
        text[0] = '\0';
    (void)close(fd);
    return strtoull(text, NULL, 10);
}

static bool is_comm(pid_t pid, const char *task, const char *wanted)
{
    char path[320], text[32] = "";
    int fd;

    (void)snprintf(path, sizeof(path), "/proc/%d/task/%s/comm", (int)pid, task);
    fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return false;
    (void)!read(fd, text, sizeof(text) - 1);
    (void)close(fd);
    return strncmp(text, wanted, strlen(wanted)) == 0 && text[strlen(wanted)] == '\n';
}

/* CPU time of the threads of a process that are called @comm. */
static double cpu_ms(pid_t pid, const char *comm)
{
    char path[320];
    struct dirent *entry;
    double ms = 0;
    DIR *dir;

    (void)snprintf(path, sizeof(path), "/proc/%d/task", (int)pid);
    dir = opendir(path);
    CHECK(dir != NULL);
    while ((entry = readdir(dir)) != NULL) {
        if (entry->d_name[0] == '.' || !is_comm(pid, entry->d_name, comm))
            continue;
        (void)snprintf(path, sizeof(path), "/proc/%d/task/%s/schedstat", (int)pid, entry->d_name);
        ms += (double)number_of(path) / 1e6;
    }
    (void)closedir(dir);
    return ms;
}

/* The one child of any thread of a process. */
static pid_t child_of(pid_t pid)
{
    char path[320];
    struct dirent *entry;
    uint64_t child = 0;
    DIR *dir;

    (void)snprintf(path, sizeof(path), "/proc/%d/task", (int)pid);
    dir = opendir(path);
    CHECK(dir != NULL);
    while (child == 0 && (entry = readdir(dir)) != NULL) {
        (void)snprintf(path, sizeof(path), "/proc/%d/task/%s/children", (int)pid, entry->d_name);
        if (entry->d_name[0] != '.')
            child = number_of(path);
    }
    (void)closedir(dir);
    CHECK(child > 0);
    return (pid_t)child;
}

/* ---- making --------------------------------------------------------------------------------- */

/* A daemon makes L3 and stores one block there. */
static void begin_place(struct world *world, enum restart_shape shape, uint64_t blocks,
                        uint32_t slot_bytes, const char *program)
{
    struct restart_place *place = &world->place;
    struct e2e_engine engine, *self = &engine;
    uint32_t tokens[RESTART_TOKENS];

    *place = (struct restart_place){.shape = shape, .blocks = blocks, .slot_bytes = slot_bytes};
    place->index_bytes = 16 * KVT_MIB + kvt_round_up(800 * blocks, 4096);
    world->index_memory_bytes = 32 * KVT_MIB + 1024 * blocks;
    (void)snprintf(place->path, sizeof(place->path), "%.400s/l3", world->dir);
    (void)snprintf(place->index_path, sizeof(place->index_path), "%s.index", place->path);
    model.components[0].bytes = slot_bytes - HEADER_BYTES;
    CHECK(kvt_slot_bytes(RESTART_TOKENS, model.components[0].bytes) == slot_bytes);
    set_up_settings(world, NULL);
    e2e_daemon_start(&world->daemon, program, world->settings);
    e2e_engine_open(&engine, &world->daemon, &model, 1, 0, true);
    e2e_tokens(tokens, KVT_COUNT_OF(tokens), 1, 0);
    CHECK(e2e_store(&engine, &self, 1, tokens, KVT_COUNT_OF(tokens)) == 1);
    e2e_engine_close(&engine);
    e2e_daemon_leave(&world->daemon); /* writes it to L3 */
}

static void end_place(struct world *world)
{
    char lock[E2E_PATH_BYTES + 16];

    e2e_daemon_stop(&world->daemon);
    (void)unlink(world->place.path);
    (void)unlink(world->place.index_path);
    (void)snprintf(lock, sizeof(lock), "%s.lock", world->place.path);
    (void)unlink(lock);
}

/* ---- one restart ---------------------------------------------------------------------------- */

static void wait_for_socket(const struct e2e_daemon *daemon)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    const struct timespec pause = {.tv_nsec = 500000};

    CHECK(strlen(daemon->socket) < sizeof(address.sun_path));
    memcpy(address.sun_path, daemon->socket, strlen(daemon->socket) + 1);
    for (uint32_t i = 0;; i++) {
        int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
        bool is_up = connect(fd, (const struct sockaddr *)&address, sizeof(address)) == 0;

        (void)close(fd);
        if (is_up)
            return;
        CHECK(i < 120000);
        (void)nanosleep(&pause, NULL);
    }
}

static void measure_once(struct world *world, struct restart *ret)
{
    uint64_t count = restart_prompt(&world->place, world->tokens), started_ns;
    uint32_t unknown[RESTART_TOKENS];
    struct kvt_op *op = e2e_op(KVT_OP_STATS);
    const struct kvt_ans_stats *stats;
    struct e2e_engine engine;
    pid_t helper;

    e2e_tokens(unknown, KVT_COUNT_OF(unknown), PROMPT_SEED, 0);
    cache_drop(world);
    started_ns = bench_now_ns();
    e2e_daemon_begin(&world->daemon, world->settings);
    wait_for_socket(&world->daemon);
    ret->ready_ms = since_ms(started_ns);
    e2e_engine_open(&engine, &world->daemon, &model, 1, KVT_RANK_NONE, true);
    CHECK(e2e_boundary(&engine, world->tokens, count) == count);
    ret->hit_ms = since_ms(started_ns);
    CHECK(e2e_boundary(&engine, unknown, KVT_COUNT_OF(unknown)) == 0);
    ret->loaded_ms = since_ms(started_ns);
    helper = child_of(world->daemon.pid);
    ret->engine_ms = cpu_ms(world->daemon.pid, "engine");
    ret->pump_ms = cpu_ms(world->daemon.pid, "index/l3.index");
    ret->helper_ms = cpu_ms(helper, "kvtierd-index");
    stats = e2e_stats(&engine, op);
    CHECK(stats->devices_count == 1 && stats->devices[0].index.state == KVT_DEVICE_INDEX_READY);
    CHECK(stats->devices[0].index.loaded_rows == world->place.blocks + 1);
    CHECK(stats->devices[0].copies == world->place.blocks + 1);
    ret->memory_bytes = (double)stats->index_used_bytes;
    ret->rss_mib = status_mib(world->daemon.pid, "VmHWM");
    ret->helper_rss_mib = status_mib(helper, "VmHWM");
    ret->helper_own_mib = status_mib(helper, "RssAnon");
    (void)e2e_op_free(op);
    e2e_engine_close(&engine);
    e2e_daemon_leave(&world->daemon);
}

/* A plain read of as much of the index as is in use, with the page cache dropped; ms. */
static double read_index_ms(const struct world *world)
{
    int fd = open(world->place.index_path, O_RDONLY | O_CLOEXEC);
    uint8_t *memory = malloc(READ_BYTES);
    uint64_t started_ns;
    double took_ms;

    CHECK(fd >= 0 && memory != NULL);
    cache_drop(world);
    started_ns = bench_now_ns();
    for (uint64_t at = 0; at < world->place.index_used_bytes; at += READ_BYTES)
        CHECK(pread(fd, memory, READ_BYTES, (off_t)at) > 0);
    took_ms = since_ms(started_ns);
    free(memory);
    (void)close(fd);
    return took_ms;
}

/* ---- rows ----------------------------------------------------------------------------------- */

static void row(struct world *world, const char *name, struct bench_row row)
{
    char text[128];

    (void)snprintf(text, sizeof(text), "restart, %s, %llu blocks: %s",
                   world->place.shape == RESTART_LONG ? "long conversations" : "short prompts",
                   (unsigned long long)world->place.blocks, name);
    row.name = text;
    bench_row(&world->bench, &row);
}

static double median_of(const struct restart *restarts, uint32_t rounds, size_t offset)
{
    double values[ROUNDS_MAX];

    for (uint32_t i = 0; i < rounds; i++)
        memcpy(&values[i], (const uint8_t *)&restarts[i] + offset, sizeof(values[i]));
    return bench_median(values, rounds);
}
#define MEDIAN(field) median_of(restarts, rounds, offsetof(struct restart, field))

static void rows(struct world *world, const struct restart *restarts, uint32_t rounds,
                 double read_ms)
{
    double blocks = (double)world->place.blocks;
    double allowed_mib =
        (double)(L2_BYTES + world->index_memory_bytes + BESIDE_BYTES) / (double)KVT_MIB;

    row(world, "exec to READY",
        (struct bench_row){.unit = "ms", .value = MEDIAN(ready_ms), .target = READY_MS_MAX});
    row(world, "exec to the first full hit",
        (struct bench_row){.unit = "ms", .value = MEDIAN(hit_ms)});
    row(world, "exec to LOADED",
        (struct bench_row){.unit = "ms",
                           .value = MEDIAN(loaded_ms),
                           .limit_name = "plain cold read of the index",
                           .limit = read_ms});
    row(world, "engine's CPU time until then",
        (struct bench_row){.unit = "ns/block", .value = MEDIAN(engine_ms) * 1e6 / blocks});
    row(world, "index thread's CPU time",
        (struct bench_row){.unit = "ns/block", .value = MEDIAN(pump_ms) * 1e6 / blocks});
    row(world, "helper's CPU time",
        (struct bench_row){.unit = "ns/block", .value = MEDIAN(helper_ms) * 1e6 / blocks});
    row(world, "index on disk",
        (struct bench_row){.unit = "B/block",
                           .value = (double)world->place.index_used_bytes / blocks});
    row(world, "of index.memory in use",
        (struct bench_row){.unit = "B/block", .value = MEDIAN(memory_bytes) / blocks});
    row(world, "daemon's peak resident memory",
        (struct bench_row){.unit = "MiB", .value = MEDIAN(rss_mib), .target = allowed_mib});
    row(world, "helper's peak resident memory",
        (struct bench_row){.unit = "MiB",
                           .value = MEDIAN(helper_rss_mib),
                           .note = "the index file's pages counted"});
    row(world, "of it, kept after the load",
        (struct bench_row){.unit = "MiB", .value = MEDIAN(helper_own_mib)});
}

static void bench_restart(struct world *world, enum restart_shape shape, uint64_t blocks,
                          const char *program)
{
    struct restart restarts[ROUNDS_MAX];
    double read_ms[ROUNDS_MAX];
    uint32_t rounds = world->bench.is_quick ? 1 : blocks >= 1000000 ? 3 : ROUNDS_MAX;

    begin_place(world, shape, blocks, SLOT_BYTES, program);
    restart_fill_index(&world->place);
    for (uint32_t i = 0; i < rounds; i++) {
        read_ms[i] = read_index_ms(world);
        measure_once(world, &restarts[i]);
    }
    rows(world, restarts, rounds, bench_median(read_ms, rounds));
    end_place(world);
}

/* ---- the rebuild ---------------------------------------------------------------------------- */

/* GB/s of a bare sequential O_DIRECT read of all that a scan reads. */
static double bare_rate(const struct world *world)
{
    uint64_t bytes = kvt_round_down(restart_data_bytes(&world->place), READ_BYTES), started_ns;
    int fd = open(world->place.path, O_RDONLY | O_DIRECT | O_CLOEXEC);
    void *memory = NULL;
    double rate;

    CHECK(fd >= 0 && posix_memalign(&memory, 4096, READ_BYTES) == 0);
    started_ns = bench_now_ns();
    for (uint64_t at = 0; at < bytes; at += READ_BYTES)
        CHECK(pread(fd, memory, READ_BYTES, (off_t)at) == READ_BYTES);
    rate = (double)bytes / (double)(bench_now_ns() - started_ns);
    free(memory);
    (void)close(fd);
    return rate;
}

/* GB/s of the scan, as the statistics show it: from the first look on, until it is over. */
static double scan_rate(struct e2e_engine *engine)
{
    struct kvt_op *op = e2e_op(KVT_OP_STATS);
    const struct kvt_api_index_stats *index = &e2e_stats(engine, op)->devices[0].index;
    uint64_t began = index->scanned_bytes, began_ns = bench_now_ns(), bytes = 0;
    double rate;

    CHECK(index->state == KVT_DEVICE_INDEX_SCANNING || index->scanned_bytes > 0);
    while (index->scan_total_bytes == 0 || index->scanned_bytes < index->scan_total_bytes) {
        e2e_sleep_ms(5);
        index = &e2e_stats(engine, op)->devices[0].index;
    }
    bytes = index->scan_total_bytes - began;
    rate = (double)bytes / (double)(bench_now_ns() - began_ns);
    (void)e2e_op_free(op);
    return rate;
}

/* GB/s, from exec until all is there: start, scan, index and load. */
static double rebuild_rate(struct world *world, double *ret_scan_rate, double *ret_index_bytes)
{
    uint64_t count = restart_prompt(&world->place, world->tokens), started_ns;
    struct kvt_op *op = e2e_op(KVT_OP_STATS);
    const struct kvt_ans_stats *stats;
    struct e2e_engine engine;
    double rate;

    cache_drop(world);
    started_ns = bench_now_ns();
    e2e_daemon_begin(&world->daemon, world->settings);
    wait_for_socket(&world->daemon);
    e2e_engine_open(&engine, &world->daemon, &model, 1, KVT_RANK_NONE, true);
    *ret_scan_rate = scan_rate(&engine);
    CHECK(e2e_boundary(&engine, world->tokens, count) == count);
    stats = e2e_stats(&engine, op);
    CHECK(stats->devices[0].copies == world->place.blocks + 1);
    CHECK(stats->devices[0].index.scanned_bytes == stats->devices[0].index.scan_total_bytes);
    rate = (double)stats->devices[0].index.scan_total_bytes / (double)(bench_now_ns() - started_ns);
    *ret_index_bytes = (double)stats->devices[0].index.used_bytes / (double)world->place.blocks;
    (void)e2e_op_free(op);
    e2e_engine_close(&engine);
    e2e_daemon_leave(&world->daemon);
    return rate;
}

static void bench_rebuild(struct world *world, const char *program)
{
    uint32_t rounds = world->bench.is_quick ? 1 : ROUNDS_MAX;
    uint64_t blocks = world->bench.is_quick ? 2000 : 30000;
    double rates[ROUNDS_MAX], scan_rates[ROUNDS_MAX], bare[ROUNDS_MAX], limit;
    double index_bytes[ROUNDS_MAX];

    begin_place(world, RESTART_LONG, blocks, REBUILD_SLOT_BYTES, program);
    restart_fill_data(&world->place);
    set_up_settings(world, "--rebuild-l3");
    for (uint32_t i = 0; i < rounds; i++) {
        bare[i] = bare_rate(world);
        rates[i] = rebuild_rate(world, &scan_rates[i], &index_bytes[i]);
    }
    limit = bench_median(bare, rounds);
    bench_row(&world->bench, &(struct bench_row){.name = "--rebuild-l3, 2 GiB in slots of 64 KiB",
                                                 .unit = "GB/s",
                                                 .value = bench_median(scan_rates, rounds),
                                                 .limit_name = "bare sequential O_DIRECT read",
                                                 .limit = limit,
                                                 .target = 0.9,
                                                 .is_least = true});
    bench_row(&world->bench, &(struct bench_row){.name = "the same from exec to the last block",
                                                 .unit = "GB/s",
                                                 .value = bench_median(rates, rounds),
                                                 .limit_name = "bare sequential O_DIRECT read",
                                                 .limit = limit});
    bench_row(&world->bench, &(struct bench_row){.name = "index on disk after it",
                                                 .unit = "B/block",
                                                 .value = bench_median(index_bytes, rounds)});
    end_place(world);
}

int main(int argc, char **argv)
{
    static struct world world;
    const char *program = bench_arg(argc, argv, "--daemon"), *dir = getenv("KVT_BENCH_DIR");
    uint64_t blocks_least = bench_arg_u64(argc, argv, "--least-blocks", 10000);
    uint64_t blocks_max = bench_arg_u64(argc, argv, "--most-blocks", 1000000);
    char *real;

    if (program == NULL)
        program = "daemon/kvtierd";
    if (access(program, X_OK) != 0) {
        fprintf(stderr, "bench-restart: no program %s: give it with --daemon PATH\n", program);
        return 1;
    }
    bench_begin(&world.bench, "restart", argc, argv);
    if (world.bench.is_quick)
        blocks_max = 10000;
    real = realpath(dir != NULL ? dir : ".", NULL);
    CHECK(real != NULL);
    (void)snprintf(world.dir, sizeof(world.dir), "%.300s/bench-restart-%d", real, (int)getpid());
    free(real);
    CHECK(mkdir(world.dir, 0700) == 0);
    kvt_client_library_init();
    for (uint64_t blocks = blocks_least; blocks <= blocks_max; blocks *= 10) {
        bench_restart(&world, RESTART_LONG, blocks, program);
        bench_restart(&world, RESTART_SHORT, blocks, program);
    }
    bench_rebuild(&world, program);
    kvt_client_library_deinit();
    (void)rmdir(world.dir);
    return bench_end(&world.bench);
}
