/* Run length of L3: how many neighbouring blocks of a path lie on one device before the next one
 * takes its turn (tiers.l3.stripe_blocks). Long runs lose less with a device, short ones read one
 * prefix from more devices at once.
 *
 *     bench-stripe [--json] [--quick] [--table] [--trace FILE] [--requests N] [--block-kib N]
 *
 * Prompts of a trace (made-up agents without one) are replayed into a store over 2, 4 and 8 devices
 * whose placement, eviction and index puts are the daemon's own; see bench_stripe.h for what is
 * made up. L3 holds half of what the replay stores and L2 a sixteenth of that, so that both evict.
 * Written leaf first is the policy `back`, root first is `through`. Then all of L2 is saved, and
 * for the requests that come next in the trace:
 *
 *   lost      of the tokens that L3 would have given them, those that it does not give when one
 *             device is gone (each in turn): a hit ends at the first block that is not there
 *   cut       how many of the prefixes are shorter then
 *   speed     L3 to L2 of one prefix, to the time of one device for the same bytes
 *   balance   blocks written to the device that got the most, to their mean
 *   rows      of ancestors too, in the indexes of all devices together, for each block on L3
 *
 * `lost` cannot be less than one in so many devices. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/clock.h"
#include "daemon/base/log.h"
#include "tests/bench/bench.h"
#include "tests/bench/bench_stripe.h"
#include "tools/lib/synth.h"
#include "tools/lib/trace.h"

#define DEVICE_BYTES_PER_S (3000ull * 1000 * 1000)
#define DEVICE_LATENCY_NS (100 * KVT_NS_PER_US)
#define BLOCK_KIB 1024u /* of the model whose blocks are read */
#define REQUESTS 4000u  /* three quarters are stored, a quarter is asked for */
#define REQUESTS_QUICK 400u
#define RAISES_MAX 200u
#define LONG_BLOCKS 256u /* 16,384 tokens */

struct figures {
    double lost_pct, cut_pct, balance, rows;
    double speed, speed_long; /* of all prefixes, of long ones; 0: there were none */
    double blocks_mean;
    uint64_t failed;
};

struct run {
    struct bench bench;
    struct kvt_workload workload;
    uint64_t stored, asked, block_ns, distinct_blocks;
    bool is_table;
};

/* One device after the other is gone. */
static void measure_loss(const struct run *run, struct stripe_world *world, uint32_t devices,
                         struct figures *figures)
{
    static uint8_t path[STRIPE_PATH_BLOCKS_MAX];
    uint64_t prefixes = 0, blocks = 0, cut = 0, lost = 0;

    for (uint64_t i = run->stored; i < run->stored + run->asked; i++) {
        uint32_t length = stripe_path(world, &run->workload, i, path);

        prefixes += length > 0;
        blocks += length;
        for (uint32_t device = 0; device < devices; device++) {
            const uint8_t *at = memchr(path, (int)device, length);

            cut += at != NULL;
            lost += at != NULL ? length - (uint64_t)(at - path) : 0;
        }
    }
    figures->blocks_mean = (double)blocks / (double)KVT_MAX(prefixes, 1ull);
    figures->lost_pct = 100.0 * (double)lost / (double)KVT_MAX(blocks * devices, 1ull);
    figures->cut_pct = 100.0 * (double)cut / (double)KVT_MAX(prefixes * devices, 1ull);
}

static void measure_speed(const struct run *run, struct stripe_world *world,
                          struct figures *figures)
{
    static uint8_t path[STRIPE_PATH_BLOCKS_MAX];
    uint64_t step = KVT_MAX(run->asked / RAISES_MAX, 1ull);
    double alone_ns[2] = {0, 0}, took_ns[2] = {0, 0};

    for (uint64_t i = run->stored; i < run->stored + run->asked; i += step) {
        uint32_t blocks = stripe_path(world, &run->workload, i, path);
        bool is_long = blocks >= LONG_BLOCKS;

        if (blocks == 0)
            continue;
        alone_ns[is_long] += (double)(blocks * run->block_ns + DEVICE_LATENCY_NS);
        took_ns[is_long] += (double)stripe_raise_ns(world, &run->workload, i);
    }
    figures->speed = (alone_ns[0] + alone_ns[1]) / KVT_MAX(took_ns[0] + took_ns[1], 1.0);
    figures->speed_long = took_ns[1] > 0 ? alone_ns[1] / took_ns[1] : 0;
}

static struct figures measure(const struct run *run, uint32_t devices, uint32_t run_blocks,
                              enum kvt_write_policy policy)
{
    const struct stripe_config config = {
        .devices = devices,
        .run_blocks = run_blocks,
        .policy = policy,
        .l2_blocks = KVT_MAX(run->distinct_blocks / 32, 8192ull),
        .l3_blocks = run->distinct_blocks / 2 + 512 * devices,
        .block_ns = run->block_ns,
        .latency_ns = DEVICE_LATENCY_NS,
    };
    struct stripe_world *world = stripe_new(&config);
    struct stripe_totals totals;
    struct figures figures = {0};

    stripe_replay(world, &run->workload, 0, run->stored);
    stripe_save(world);
    stripe_totals(world, &totals);
    figures.balance = (double)(totals.writes_max * devices) / (double)KVT_MAX(totals.writes, 1ull);
    figures.rows = (double)totals.rows / (double)KVT_MAX(totals.blocks, 1ull);
    measure_loss(run, world, devices, &figures);
    measure_speed(run, world, &figures);
    stripe_totals(world, &totals);
    figures.failed = totals.failed;
    (void)stripe_free(world);
    return figures;
}

static void report(struct run *run, uint32_t devices, uint32_t run_blocks, bool is_through,
                   const struct figures *figures)
{
    const char *order = is_through ? "root first" : "leaf first";
    char name[96], note[160];

    if (run->is_table) {
        printf("| %u | %s | %u | %.1f %% | %.1f %% | %.2f | %.2f | %.3f | %.2f |\n", devices, order,
               run_blocks, figures->lost_pct, figures->cut_pct, figures->speed, figures->speed_long,
               figures->balance, figures->rows);
        (void)fflush(stdout);
        return;
    }
    (void)snprintf(name, sizeof(name), "one prefix from %u devices, runs of %u, %s", devices,
                   run_blocks, order);
    (void)snprintf(note, sizeof(note),
                   "one device gone: %.1f %% of hit tokens lost, %.1f %% of prefixes cut; "
                   "balance %.3f, %.2f rows a block",
                   figures->lost_pct, figures->cut_pct, figures->balance, figures->rows);
    bench_row(&run->bench, &(struct bench_row){.name = name,
                                               .unit = "devices",
                                               .value = figures->speed,
                                               .limit_name = "all of them at once",
                                               .limit = devices,
                                               .note = note});
}

static int open_workload(struct run *run, int argc, char **argv)
{
    struct kvt_trace_options trace = {.path = bench_arg(argc, argv, "--trace"), .seed = 1};
    struct kvt_synth_options synth = kvt_synth_defaults();
    struct kvt_workload_facts facts;
    char why[160] = "";
    int r;

    trace.requests_max =
        bench_arg_u64(argc, argv, "--requests", run->bench.is_quick ? REQUESTS_QUICK : REQUESTS);
    synth.requests = trace.requests_max;
    synth.sessions = 64;
    synth.system_tokens = 4096;
    synth.turn_tokens = 2048;
    synth.output_tokens = 512;
    synth.prompt_tokens_max = 131072;
    synth.turns = 24;
    r = trace.path != NULL ? kvt_trace_read(&run->workload, &trace, why, sizeof(why))
                           : kvt_synth_make(&run->workload, &synth);
    if (r == 0)
        r = kvt_workload_facts(&run->workload, STRIPE_BLOCK_TOKENS, &facts);
    if (r != 0) {
        (void)fprintf(stderr, "bench-stripe: %s\n", why[0] != '\0' ? why : strerror(-r));
        return 1;
    }
    run->stored = run->workload.requests_count / 4 * 3;
    run->asked = run->workload.requests_count - run->stored;
    run->distinct_blocks = facts.distinct_blocks / 4 * 3;
    return 0;
}

static bool has_flag(int argc, char **argv, const char *name)
{
    for (int i = 1; i < argc; i++)
        if (strcmp(argv[i], name) == 0)
            return true;
    return false;
}

int main(int argc, char **argv)
{
    static const uint32_t lengths[] = {1, 4, 16, 64, 256};
    static struct run run;
    uint64_t failed = 0;

    kvt_log_set_level(KVT_LOG_WARN);
    bench_begin(&run.bench, "stripe", argc, argv);
    run.is_table = has_flag(argc, argv, "--table");
    run.block_ns = bench_arg_u64(argc, argv, "--block-kib", BLOCK_KIB) * 1024 * KVT_NS_PER_S /
                   DEVICE_BYTES_PER_S;
    if (open_workload(&run, argc, argv) != 0)
        return 1;
    if (run.is_table)
        printf("| devices | written | run | lost | cut | speed | speed, long prefixes | balance | "
               "rows "
               "|\n|---|---|---|---|---|---|---|---|---|\n");
    for (uint32_t devices = 2; devices <= 8; devices *= 2)
        for (uint32_t is_through = 0; is_through < 2; is_through++)
            for (uint32_t i = 0; i < KVT_COUNT_OF(lengths); i += run.bench.is_quick ? 4 : 1) {
                struct figures figures = measure(&run, devices, lengths[i],
                                                 is_through ? KVT_WRITE_THROUGH : KVT_WRITE_BACK);

                report(&run, devices, lengths[i], is_through, &figures);
                failed += figures.failed;
            }
    kvt_workload_deinit(&run.workload);
    if (failed > 0)
        (void)fprintf(stderr, "bench-stripe: %llu fills and raises failed\n",
                      (unsigned long long)failed);
    return bench_end(&run.bench) != 0 || failed > 0;
}
