/* Random transfers through one GPU, or through the set of all that the machine has for the model
 * (one or two, with threads and pools on each), against the model, where nobody can look into
 * device memory: what the test writes and reads there goes by the table of calls. Linked with
 * model_machine_real.c for GPUs, and for the proof of this way itself with model_machine_fake.c.
 * Nothing is lost and no call fails here: that is gpu_model.c's, which needs the fake.
 *
 *   SEED COUNT SECONDS [DEVICE]   at most so many seeds, and none is begun after so many seconds;
 *                                 CUDA's index of the GPU (0)
 *
 * Exit status 77: no GPU, and the last line says why. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "daemon/base/clock.h"
#include "tests/device/model_machine.h"
#include "tests/device/model_world_internal.h"

#define TRANSFERS 300u
#define DRAIN_NS_MAX (60 * KVT_NS_PER_S)
#define SKIP 77

struct sums {
    uint64_t seeds, submitted, done, late;
    uint64_t path_transfers[KVT_GPU_PATHS];
};

static void add_sums(const struct world *world, struct sums *sums)
{
    sums->seeds++;
    sums->submitted += world->submitted;
    sums->done += world->done;
    sums->late += world->late;
    for (uint32_t z = 0; z < world->zones_count; z++)
        for (uint32_t p = 0; p < KVT_GPU_PATHS; p++)
            sums->path_transfers[p] +=
                atomic_load(&kvt_gpu_counters(world->zones[z].gpu)->path_transfers[p]);
}

/* ---- all GPUs -------------------------------------------------------------------------------- */

static void open_tier(struct world *world)
{
    char gpus[32];
    struct kvt_device_config config;
    struct kvt_device_report report;

    (void)snprintf(gpus, sizeof(gpus), world->zones_count == 1 ? "%d" : "%d, %d", world->devices[0],
                   world->devices[1]);
    config = world_set_config(world, gpus);
    config.cpu_threads = (uint32_t)world_random(world, 3);
    config.retry_min_ns = config.retry_max_ns = KVT_NS_PER_S;
    if (kvt_device_set_open(&world->tier, &config, world->calls, &report) != 0 ||
        world->tier->zones_count != world->zones_count)
        world_fail(world, "open of %s: %s", gpus, report.why);
    world_set_zones(world);
}

static struct world *set_open(uint64_t seed, int device)
{
    struct world *world = calloc(1, sizeof(*world));

    if (world == NULL)
        abort();
    *world = (struct world){.options = {.seed = seed,
                                        .is_by_table = true,
                                        .device = device,
                                        .is_threaded = true,
                                        .has_quant = seed % 8 >= 4},
                            .random = (seed + 1) * 0x9e3779b97f4a7c15ull,
                            .is_set = true};
    world_machine_open(world);
    world->zones_count = world->devices_count;
    world_table_open(world);
    world->host_memory =
        mmap(NULL, KVT_HUGE_PAGE_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (world->host_memory == MAP_FAILED || kvt_doorbell_init(&world->bell) < 0)
        abort();
    for (uint32_t c = 0; c < WORLD_CLIENTS; c++)
        world_client_init(world, c);
    open_tier(world);
    for (uint32_t c = 0; c < WORLD_CLIENTS; c++)
        world_table_attach(world, &world->clients[c]);
    world_places_init(world);
    for (uint32_t i = 0; i < WORLD_SLOTS; i++)
        world_scribble(world, &world->places[i]);
    return world;
}

static void set_close(struct world *world)
{
    world->tier = kvt_tier_close(world->tier);
    for (uint32_t c = 0; c < WORLD_CLIENTS; c++) {
        if (world->clients[c].device == KVT_GPU_NONE)
            free(world->clients[c].memory);
        else
            world_table_pool_free(world, &world->clients[c]);
        free(world->clients[c].shadow);
    }
    world_table_close(world);
    world_machine_close();
    for (uint32_t i = 0; i < 2 * WORLD_SLOTS; i++)
        free(world->places[i].shadow);
    (void)munmap(world->host_memory, KVT_HUGE_PAGE_BYTES);
    kvt_doorbell_deinit(&world->bell);
    free(world);
}

static void set_drain(struct world *world)
{
    uint64_t until_ns = kvt_clock_mono_ns() + DRAIN_NS_MAX;

    while (world->inflight > 0) {
        world_turn(world);
        if (kvt_clock_mono_ns() > until_ns)
            world_fail(world, "%u transfers do not come back", world->inflight);
    }
    world_verify(world);
}

static void run_set(uint64_t seed, int device, struct sums *sums)
{
    struct world *world = set_open(seed, device);

    while (world->submitted < TRANSFERS) {
        for (uint64_t i = world_random(world, 6); i > 0; i--)
            (void)world_submit(world);
        for (uint64_t i = world_random(world, 4); i > 0; i--)
            world_turn(world);
        if (world_random(world, 64) == 0)
            world_verify(world);
        if (world_random(world, 32) == 0)
            set_drain(world);
    }
    set_drain(world);
    add_sums(world, sums);
    set_close(world);
}

/* ---- one GPU --------------------------------------------------------------------------------- */

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
    add_sums(world, sums);
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
    while (sums.seeds < count && kvt_clock_mono_ns() < end_ns) {
        uint64_t next = seed + sums.seeds;

        if (next % 4 == 3)
            run_set(next, device, &sums);
        else
            run_one(next, device, &sums);
    }
    printf("seeds from %" PRIu64 ": %" PRIu64 ", transfers: %" PRIu64 ", done: %" PRIu64
           ", late: %" PRIu64 "\n",
           seed, sums.seeds, sums.submitted, sums.done, sums.late);
    return is_enough(&sums) ? 0 : 1;
}
