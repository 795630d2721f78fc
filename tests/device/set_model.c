/* The model of gpu_model.c over the set of all GPUs, with their threads: two or three zones behind
 * one tier, engines' pools on each of them, transfers between a pool on one and a slot on another.
 * Any GPU is lost at any moment; the set's control threads take it back while the others go on, and
 * engines' memory is opened again in the new incarnation.
 *
 *   set_model SEED COUNT */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "daemon/base/clock.h"
#include "tests/device/model_world_internal.h"
#include "tiers/device/set.h"

#define TRANSFERS 1500u
#define BACK_NS (20 * KVT_NS_PER_S) /* a GPU that is not back by then never comes */

struct set_case {
    struct world world;
    struct kvt_region regions[WORLD_CLIENTS];
    uint64_t losses, reopened;
};

static struct kvt_device_memory memory_of(const struct world *world,
                                          const struct world_client *client)
{
    struct kvt_device_memory memory = {.bytes = client->bytes};
    struct kvt_cuda_info info;

    if (world->calls->device_info((int)client->device, &info) != KVT_CUDA_OK)
        world_fail(world, "device_info");
    memcpy(memory.handle, client->foreign.handle, sizeof(memory.handle));
    memcpy(memory.uuid, info.uuid, sizeof(memory.uuid));
    return memory;
}

/* False: the GPU is lost again. */
static bool attach(struct set_case *set, uint32_t c)
{
    struct world_client *client = &set->world.clients[c];
    struct kvt_device_memory memory = memory_of(&set->world, client);
    char why[KVT_DEVICE_WHY_BYTES];
    int r = kvt_device_region_open(set->world.tier, &memory, &set->regions[c], why);

    if (r == KVT_REGION_E_LOST)
        return false;
    if (r != 0)
        world_fail(&set->world, "region_open: %d: %s", r, why);
    if (kvt_layout_resolve(&client->layout, &set->regions[c], 1, client->layout.payload_bytes) != 0)
        world_fail(&set->world, "a layout of client %u", c);
    return true;
}

static void open_tier(struct set_case *set, uint32_t gpus)
{
    struct world *world = &set->world;
    struct kvt_device_config config = {.backend = "cuda",
                                       .bytes = KVT_HUGE_PAGE_BYTES,
                                       .host_memory = world->host_memory,
                                       .host_memory_bytes = KVT_HUGE_PAGE_BYTES,
                                       .inflight_max = WORLD_INFLIGHT,
                                       .doorbell = &world->bell,
                                       .gpus = "all",
                                       .headroom_bytes = KVT_MIB,
                                       .staging_bytes = KVT_HUGE_PAGE_BYTES,
                                       .inflight_bytes_max = 256 * KVT_KIB,
                                       .streams = 1 + (uint32_t)world_random(world, 2),
                                       .crossover_bytes = 2048,
                                       .retry_min_ns = 2 * KVT_NS_PER_MS,
                                       .retry_max_ns = 8 * KVT_NS_PER_MS,
                                       .sysfs = "/nowhere"};
    struct kvt_device_report report;

    world->config.inflight_bytes_max = config.inflight_bytes_max;
    if (kvt_device_set_open(&world->tier, &config, world->calls, &report) != 0)
        world_fail(world, "open: %s", report.why);
    if (world->tier->zones_count != gpus)
        world_fail(world, "%u zones", world->tier->zones_count);
    for (uint32_t z = 0; z < gpus; z++)
        world->zones[z] = (struct world_zone){.gpu = kvt_device_set_of(world->tier)->members[z].gpu,
                                              .counters = world->tier->zones[z].counters,
                                              .base_bytes = world->tier->zones[z].base_bytes};
}

static struct set_case *set_open(uint64_t seed)
{
    struct set_case *set = calloc(1, sizeof(*set));
    struct world *world;
    uint32_t gpus = 2 + seed % 2;
    struct kvt_fake_cuda_config fake = {.seed = seed,
                                        .devices_count = gpus,
                                        .kernels = kvt_kernels_host(),
                                        .is_landing_late = seed % 4 < 2,
                                        .has_executor = true};

    if (set == NULL)
        abort();
    world = &set->world;
    world->options =
        (struct world_options){.seed = seed, .is_threaded = true, .has_quant = seed % 3 == 0};
    world->random = (seed + 1) * 0x9e3779b97f4a7c15ull;
    world->zones_count = gpus;
    world->is_set = true;
    kvt_fake_cuda_init(&fake);
    world->calls = kvt_cuda_calls();
    world->host_memory =
        mmap(NULL, KVT_HUGE_PAGE_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (world->host_memory == MAP_FAILED || kvt_doorbell_init(&world->bell) < 0)
        abort();
    for (uint32_t c = 0; c < WORLD_CLIENTS; c++)
        world_client_init(world, c);
    open_tier(set, gpus);
    for (uint32_t c = 0; c < WORLD_CLIENTS; c++)
        if (world->clients[c].device != KVT_GPU_NONE && !attach(set, c))
            world_fail(world, "a GPU that is lost at once");
    world_places_init(world);
    for (uint32_t i = 0; i < WORLD_SLOTS; i++)
        world_scribble(world, &world->places[i]);
    return set;
}

static void set_close(struct set_case *set)
{
    struct world *world = &set->world;

    for (uint32_t c = 0; c < WORLD_CLIENTS; c++)
        if (world->clients[c].device != KVT_GPU_NONE)
            kvt_device_region_close(world->tier, &set->regions[c]);
    world->tier = kvt_tier_close(world->tier);
    kvt_fake_cuda_deinit();
    for (uint32_t c = 0; c < WORLD_CLIENTS; c++) {
        free(world->clients[c].shadow);
        if (world->clients[c].device == KVT_GPU_NONE)
            free(world->clients[c].memory);
    }
    for (uint32_t i = 0; i < 2 * WORLD_SLOTS; i++)
        free(world->places[i].shadow);
    (void)munmap(world->host_memory, KVT_HUGE_PAGE_BYTES);
    kvt_doorbell_deinit(&world->bell);
    free(set);
}

static void lose(struct set_case *set, uint32_t zone)
{
    if (set->world.zones[zone].is_lost)
        return;
    set->world.zones[zone].is_lost = true;
    set->world.losses++;
    set->losses++;
    kvt_fake_cuda_lose(zone, zone == 0 ? KVT_CUDA_ECC : KVT_CUDA_LAUNCH_FAILURE);
}

static bool is_zone_used(const struct world *world, uint32_t zone)
{
    for (uint32_t i = 0; i < WORLD_INFLIGHT; i++) {
        const struct world_op *op = &world->ops[i];

        if (op->is_used &&
            (world_zone_of(world, op->src) == zone || world_zone_of(world, op->dst) == zone))
            return true;
    }
    return false;
}

/* As the engine takes over a new incarnation: when nothing of the old one is used any more. */
static void take_back(struct set_case *set, uint32_t zone)
{
    struct world *world = &set->world;
    struct world_zone *lost = &world->zones[zone];
    uint32_t incarnation = atomic_load(&lost->counters->incarnation);

    if (!lost->is_lost || incarnation == lost->incarnation || is_zone_used(world, zone) ||
        !kvt_device_is_served(&kvt_device_set_of(world->tier)->members[zone]))
        return;
    if (incarnation != lost->incarnation + 1)
        world_fail(world, "zone %u: incarnation %u after %u", zone, incarnation, lost->incarnation);
    for (uint32_t c = 0; c < WORLD_CLIENTS; c++)
        if (world->clients[c].device == zone) {
            kvt_device_region_close(world->tier, &set->regions[c]);
            if (!attach(set, c))
                world_fail(world, "zone %u is served, but lost", zone);
            set->reopened++;
        }
    lost->incarnation = incarnation;
    lost->is_lost = false;
    world->losses++;
    for (uint32_t i = 0; i < WORLD_SLOTS; i++)
        if (i % world->zones_count == zone)
            world_forget(world, &world->places[i]);
}

static bool is_whole(const struct world *world)
{
    for (uint32_t z = 0; z < world->zones_count; z++)
        if (world->zones[z].is_lost)
            return false;
    return true;
}

static void turn(struct set_case *set)
{
    world_turn(&set->world);
    for (uint32_t z = 0; z < set->world.zones_count; z++)
        take_back(set, z);
}

/* Everything comes back, and so do the GPUs. Nobody hears of a loss on a GPU that is idle, so there
 * is always something that wants to be done. */
static void settle(struct set_case *set)
{
    uint64_t until_ns = kvt_clock_mono_ns() + BACK_NS;

    while (!is_whole(&set->world)) {
        (void)world_submit(&set->world);
        turn(set);
        if (kvt_clock_mono_ns() > until_ns)
            world_fail(&set->world, "a GPU does not come back");
    }
    while (set->world.inflight > 0) {
        turn(set);
        if (kvt_clock_mono_ns() > until_ns)
            world_fail(&set->world, "%u transfers do not come back", set->world.inflight);
    }
    world_verify(&set->world);
}

static void run_one(uint64_t seed, uint64_t sums[4])
{
    struct set_case *set = set_open(seed);
    struct world *world = &set->world;

    while (world->submitted < TRANSFERS) {
        for (uint64_t i = world_random(world, 6); i > 0; i--)
            (void)world_submit(world);
        for (uint64_t i = world_random(world, 4); i > 0; i--)
            turn(set);
        if (world_random(world, 40) == 0)
            lose(set, (uint32_t)world_random(world, world->zones_count));
        if (world_random(world, 100) == 0)
            settle(set);
    }
    settle(set);
    sums[0] += world->submitted;
    sums[1] += world->done;
    sums[2] += set->losses;
    sums[3] += set->reopened;
    set_close(set);
}

int main(int argc, char **argv)
{
    uint64_t sums[4] = {0}, seed, count;

    if (argc != 3) {
        fprintf(stderr, "usage: set_model SEED COUNT\n");
        return 2;
    }
    seed = strtoull(argv[1], NULL, 10);
    count = strtoull(argv[2], NULL, 10);
    for (uint64_t i = 0; i < count; i++)
        run_one(seed + i, sums);
    printf("%" PRIu64 " transfers: %" PRIu64 " done; %" PRIu64 " GPUs lost, %" PRIu64
           " pools opened again\n",
           sums[0], sums[1], sums[2], sums[3]);
    return sums[1] * 3 > sums[0] && sums[2] > count && sums[3] > count ? 0 : 1;
}
