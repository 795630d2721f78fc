/* The scan that makes a lost index anew, against a bare sequential read of the same file: O_DIRECT,
 * 4 MiB a read, one after the other. The scan verifies the payload of every slot on its way. The
 * file is full of slots of one size; interleaved rounds.
 *
 * The file is made in the current directory, or in $KVT_BENCH_DIR. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "daemon/base/hash.h"
#include "tests/bench/bench.h"
#include "tiers/index/scan.h"

#define DATA_BYTES (1ull << 30)
#define READ_BYTES (4u << 20)
#define BLOCK_TOKENS 64u
#define ROUNDS_MAX 7u

struct world {
    char path[256];
    uint8_t *memory; /* READ_BYTES */
    int fd;
    struct kvt_index_ns namespaces[KVT_NAMESPACES_MAX];
    uint64_t found;
};

static void die(const char *what)
{
    perror(what);
    exit(1);
}

/* Slots of one size, one behind the other in each piece of 4 MiB. */
static uint64_t fill(struct world *world, uint64_t slot_bytes)
{
    uint32_t header_bytes = kvt_slot_header_bytes(BLOCK_TOKENS), tokens[BLOCK_TOKENS] = {0};
    uint64_t payload_bytes = slot_bytes - header_bytes, slots = 0;

    for (uint64_t at = 0; at < DATA_BYTES; at += READ_BYTES) {
        memset(world->memory, 0, READ_BYTES);
        for (uint64_t in = 0; in + slot_bytes <= READ_BYTES; in += slot_bytes) {
            uint8_t *slot = world->memory + in;
            struct kvt_slot_info info = {.block_id = slots + 1,
                                         .generation = slots + 1,
                                         .payload_bytes = payload_bytes,
                                         .block_tokens = BLOCK_TOKENS,
                                         .store_id = {1}};

            slots++;
            kvt_slot_header_write(slot, &info, tokens);
            memset(slot + header_bytes, (int)slots, payload_bytes);
            kvt_slot_header_seal(slot, kvt_hash64(slot + header_bytes, payload_bytes, 0));
        }
        if (pwrite(world->fd, world->memory, READ_BYTES, (off_t)at) != READ_BYTES)
            die("write");
    }
    if (fdatasync(world->fd) != 0)
        die("sync");
    return slots;
}

/* GB/s. */
static double bare(const struct world *world)
{
    uint64_t started_ns = bench_now_ns();

    for (uint64_t at = 0; at < DATA_BYTES; at += READ_BYTES)
        if (pread(world->fd, world->memory, READ_BYTES, (off_t)at) != READ_BYTES)
            die("read");
    return (double)DATA_BYTES / (double)(bench_now_ns() - started_ns);
}

static int on_found(void *ctx, const struct kvt_scan_slot *slot)
{
    struct world *world = ctx;

    bench_use(slot->offset_bytes);
    world->found++;
    return 0;
}

static double scan(struct world *world, uint64_t slots)
{
    struct kvt_scan_config config = {.path = world->path,
                                     .data_bytes = DATA_BYTES,
                                     .store_id = {1},
                                     .namespaces = world->namespaces};
    const struct kvt_scan_calls calls = {.found = on_found, .ctx = world};
    struct kvt_scan_report report;
    uint64_t started_ns = bench_now_ns();

    world->found = 0;
    if (kvt_scan_run(&config, &calls, &report) != 0 || world->found != slots) {
        fprintf(stderr, "bench_scan: %llu slots of %llu\n", (unsigned long long)world->found,
                (unsigned long long)slots);
        exit(1);
    }
    return (double)DATA_BYTES / (double)(bench_now_ns() - started_ns);
}

static void bench_size(struct bench *bench, struct world *world, uint64_t slot_bytes)
{
    double bare_rates[ROUNDS_MAX], scan_rates[ROUNDS_MAX];
    uint32_t rounds = bench->is_quick ? 1 : ROUNDS_MAX;
    uint64_t slots = fill(world, slot_bytes);
    char name[80];

    for (uint32_t r = 0; r < rounds; r++) {
        bare_rates[r] = bare(world);
        scan_rates[r] = scan(world, slots);
    }
    (void)snprintf(name, sizeof(name), "scan of L3 for a lost index, slots of %llu KiB",
                   (unsigned long long)(slot_bytes >> 10));
    bench_row(bench, &(struct bench_row){.name = name,
                                         .value = bench_median(scan_rates, rounds),
                                         .unit = "GB/s",
                                         .limit_name = "bare sequential O_DIRECT read",
                                         .limit = bench_median(bare_rates, rounds),
                                         .is_least = true,
                                         .target = 0.9});
}

int main(int argc, char **argv)
{
    static struct world world;
    const char *dir = getenv("KVT_BENCH_DIR");
    struct bench bench;

    bench_begin(&bench, "scan", argc, argv);
    (void)snprintf(world.path, sizeof(world.path), "%s/bench-scan-%d", dir != NULL ? dir : ".",
                   (int)getpid());
    world.fd = open(world.path, O_RDWR | O_CREAT | O_EXCL | O_DIRECT | O_CLOEXEC, 0600);
    if (world.fd < 0)
        die(world.path);
    if (posix_memalign((void **)&world.memory, 4096, READ_BYTES) != 0)
        die("memory");
    world.namespaces[0] = (struct kvt_index_ns){
        .is_used = true, .block_tokens = BLOCK_TOKENS, .components_count = 1, .shards = {1}};
    for (uint64_t slot_bytes = 4 << 10; slot_bytes <= 1 << 20; slot_bytes *= 16)
        bench_size(&bench, &world, slot_bytes);
    (void)close(world.fd);
    (void)unlink(world.path);
    free(world.memory);
    return bench_end(&bench);
}
