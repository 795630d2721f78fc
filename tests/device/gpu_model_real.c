/* Random transfers through one GPU, against the model, where nobody can look into device memory:
 * what the test writes and reads there goes by the table of calls. Linked with model_machine_real.c
 * for GPUs, and for the proof of this way itself with model_machine_fake.c. Nothing is lost and no
 * call fails here: that is gpu_model.c's, which needs the fake.
 *
 *   SEED COUNT SECONDS [DEVICE]   at most so many seeds, and none is begun after so many seconds;
 *                                 CUDA's index of the GPU (0)
 *
 * Exit status 77: no GPU, and the last line says why. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "daemon/base/clock.h"
#include "tests/device/model_machine.h"
#include "tests/device/model_world.h"

#define TRANSFERS 300u
#define SKIP 77

struct sums {
    uint64_t seeds, submitted, done, late;
    uint64_t path_transfers[KVT_GPU_PATHS];
};

static void run_one(uint64_t seed, int device, struct sums *sums)
{
    struct world_options options = {.seed = seed,
                                    .is_by_table = true,
                                    .device = device,
                                    .is_host_pinned = seed % 2 == 0,
                                    .has_quant = seed % 4 >= 2,
                                    .is_threaded = seed % 3 == 0,
                                    .cpu_threads = (uint32_t)(seed % 5) % 4};
    struct world *world = calloc(1, sizeof(*world));

    if (world == NULL || !world_open(world, &options))
        abort();
    world_run(world, TRANSFERS);
    sums->seeds++;
    sums->submitted += world->submitted;
    sums->done += world->done;
    sums->late += world->late;
    for (uint32_t p = 0; p < KVT_GPU_PATHS; p++)
        sums->path_transfers[p] += atomic_load(&kvt_gpu_counters(world->gpu)->path_transfers[p]);
    world_close(world);
    free(world);
}

/* A model that moves nothing proves nothing, and neither does one that leaves out a way. */
static bool is_enough(const struct sums *sums)
{
    if (sums->seeds == 0 || sums->done * 2 < sums->submitted)
        return false;
    for (uint32_t p = 0; sums->seeds >= 8 && p < KVT_GPU_PATHS; p++)
        if (sums->path_transfers[p] == 0) {
            printf("path %u was never taken\n", p);
            return false;
        }
    return true;
}

int main(int argc, char **argv)
{
    uint64_t seed, count, end_ns;
    struct sums sums = {0};
    const char *why;
    int device = 0;

    if (argc < 4 || argc > 5) {
        fprintf(stderr, "usage: SEED COUNT SECONDS [DEVICE]\n");
        return 2;
    }
    seed = strtoull(argv[1], NULL, 10);
    count = strtoull(argv[2], NULL, 10);
    end_ns = kvt_clock_mono_ns() + strtoull(argv[3], NULL, 10) * KVT_NS_PER_S;
    if (argc == 5)
        device = (int)strtol(argv[4], NULL, 10);
    why = world_machine_missing(device);
    if (why != NULL) {
        printf("SKIP: no GPU %d (%s)\n", device, why);
        return SKIP;
    }
    while (sums.seeds < count && kvt_clock_mono_ns() < end_ns)
        run_one(seed + sums.seeds, device, &sums);
    printf("seeds from %" PRIu64 ": %" PRIu64 ", transfers: %" PRIu64 ", done: %" PRIu64
           ", late: %" PRIu64 "\n",
           seed, sums.seeds, sums.submitted, sums.done, sums.late);
    return is_enough(&sums) ? 0 : 1;
}
