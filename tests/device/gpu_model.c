/* Random transfers through one GPU, against the model:
 *
 *   gpu_model run SEED COUNT    so many seeds
 *   gpu_model threads SEED COUNT   with the GPU's own thread, and a thread that does its work
 *   gpu_model kernels SEED COUNT   with the source of the GPU's kernels, on host threads
 *   gpu_model mutants COUNT     in the build with wait_dropped.c: each wait in turn is dropped, and
 *                               within COUNT seeds the model must see it
 *   gpu_model table COUNT       the same, where the model sees device memory by the table only */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "kernels/shim_tables.h"
#include "tests/device/model_world.h"
#include "tests/device/wait_dropped.h"

#define TRANSFERS 300u

static struct world_options options_of(uint64_t seed)
{
    return (struct world_options){
        .seed = seed,
        .is_host_pinned = seed % 2 == 0,
        .has_quant = seed % 4 >= 2,
        .lose_every = seed % 3 == 0 ? 40 : 0,
        .is_landing_late = seed % 6 == 0,
        .cpu_threads = (uint32_t)(seed % 5) % 4,
    };
}

static void run_one(const struct world_options *options, uint32_t transfers, uint64_t *ret_sums)
{
    struct world *world = calloc(1, sizeof(*world));

    if (world == NULL || !world_open(world, options))
        abort();
    world_run(world, transfers);
    ret_sums[0] += world->submitted;
    ret_sums[1] += world->done;
    ret_sums[2] += world->lost;
    ret_sums[3] += world->late;
    world_close(world);
    free(world);
}

static int run(uint64_t seed, uint64_t count, bool is_threaded, bool has_shim)
{
    uint64_t sums[4] = {0};

    for (uint64_t i = 0; i < count; i++) {
        struct world_options options = options_of(seed + i);

        options.is_threaded = is_threaded;
        options.kernels = has_shim ? kvt_kernels_shim(KVT_SHIM_FEW) : NULL;
        run_one(&options, TRANSFERS, sums);
    }
    printf("%" PRIu64 " transfers: %" PRIu64 " done, %" PRIu64 " lost, %" PRIu64 " late\n", sums[0],
           sums[1], sums[2], sums[3]);
    /* A model that moves nothing proves nothing. */
    return sums[1] * 2 > sums[0] && (count < 3 || sums[2] > 0) && sums[3] > 0 ? 0 : 1;
}

/* 0: the model saw nothing. */
static int run_mutant(enum kvt_gpu_wait wait, uint64_t seed, bool is_by_table)
{
    int status = 0;
    pid_t child;

    (void)fflush(stdout);
    child = fork();
    if (child == 0) {
        struct world_options options = options_of(seed);
        uint64_t sums[4] = {0};

        if (freopen("/dev/null", "w", stderr) == NULL)
            _exit(0);
        /* A loss would hide nothing, but ends transfers early. */
        options.lose_every = wait == KVT_GPU_WAIT_HANDS_LOSS ? 40 : 0;
        options.is_landing_late = false;
        options.is_by_table = is_by_table;
        kvt_gpu_wait_dropped = wait;
        run_one(&options, TRANSFERS, sums);
        _exit(0);
    }
    if (child < 0 || waitpid(child, &status, 0) != child)
        abort();
    return status;
}

static int mutants(uint64_t count, bool is_by_table)
{
    static const char *const names[] = {"finish", "staging filled", "staging free", "lists",
                                        "check",  "hands: in",      "hands: out",   "hands: loss"};
    int result = 0;

    static_assert(KVT_COUNT_OF(names) == KVT_GPU_WAITS, "a name each");
    /* Without a mutation this build is as good as the other. */
    if (run_mutant(KVT_GPU_WAITS, 1, is_by_table) != 0) {
        printf("the build with nothing dropped fails\n");
        return 1;
    }
    for (uint32_t wait = 0; wait < KVT_GPU_WAITS; wait++) {
        uint64_t seed = 1;

        /* By the table nothing is lost. */
        if (is_by_table && wait == KVT_GPU_WAIT_HANDS_LOSS)
            continue;
        while (seed <= count && run_mutant((enum kvt_gpu_wait)wait, seed, is_by_table) == 0)
            seed++;
        if (seed <= count) {
            printf("dropped \"%s\": seen with seed %" PRIu64 "\n", names[wait], seed);
        } else {
            printf("dropped \"%s\": NOT SEEN in %" PRIu64 " seeds\n", names[wait], count);
            result = 1;
        }
    }
    return result;
}

int main(int argc, char **argv)
{
    if (argc == 3 && strcmp(argv[1], "mutants") == 0)
        return mutants(strtoull(argv[2], NULL, 10), false);
    if (argc == 3 && strcmp(argv[1], "table") == 0)
        return mutants(strtoull(argv[2], NULL, 10), true);
    if (argc == 4 && strcmp(argv[1], "run") == 0)
        return run(strtoull(argv[2], NULL, 10), strtoull(argv[3], NULL, 10), false, false);
    if (argc == 4 && strcmp(argv[1], "threads") == 0)
        return run(strtoull(argv[2], NULL, 10), strtoull(argv[3], NULL, 10), true, false);
    if (argc == 4 && strcmp(argv[1], "kernels") == 0)
        return run(strtoull(argv[2], NULL, 10), strtoull(argv[3], NULL, 10), false, true);
    fprintf(stderr, "usage: run SEED COUNT | kernels SEED COUNT | threads SEED COUNT | mutants "
                    "COUNT | table COUNT\n");
    return 2;
}
