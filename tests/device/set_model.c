/* The model of gpu_model.c over the set of all GPUs, with their threads: two or three zones behind
 * one tier, engines' pools on each of them, transfers between a pool on one and a slot on another.
 * Any GPU is lost at any moment; the set's control threads take it back while the others go on, and
 * engines' memory is opened again in the new incarnation.
 *
 *   set_model run SEED COUNT
 *   set_model faults ERROR    one GPU, of which every call fails in turn with ERROR, from the first
 *                             look at what there is to the end */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "daemon/base/clock.h"
#include "tests/device/model_world_internal.h"

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

    kvt_fake_cuda_pause_fail(true);
    if (world->calls->device_info((int)client->device, &info) != KVT_CUDA_OK)
        world_fail(world, "device_info");
    kvt_fake_cuda_pause_fail(false);
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

    if (r == KVT_REGION_E_LOST || (r != 0 && set->world.options.is_error_expected))
        return false;
    if (r != 0)
        world_fail(&set->world, "region_open: %d: %s", r, why);
    if (kvt_layout_resolve(&client->layout, &set->regions[c], 1, client->layout.payload_bytes) != 0)
        world_fail(&set->world, "a layout of client %u", c);
    return true;
}

/* False: no GPU can be used, as it may if a call fails. */
static bool open_tier(struct set_case *set, uint32_t gpus)
{
    struct world *world = &set->world;
    struct kvt_device_config config = world_set_config(world, "all");
    struct kvt_device_report report;
    int r;

    config.cpu_threads = 2;
    config.retry_min_ns = 2 * KVT_NS_PER_MS;
    config.retry_max_ns = 8 * KVT_NS_PER_MS;
    r = kvt_device_set_open(&world->tier, &config, world->calls, &report);
    if (r == KVT_DEVICE_E_NONE && world->options.is_error_expected && report.why[0] != '\0')
        return false;
    if (r != 0)
        world_fail(world, "open: %d: %s", r, report.why);
    if (world->tier->zones_count != gpus)
        world_fail(world, "%u zones", world->tier->zones_count);
    world_set_zones(world);
    return true;
}

static void set_init(struct set_case *set, const struct world_options *options, uint32_t gpus)
{
    struct world *world = &set->world;
    struct kvt_fake_cuda_config fake = {.seed = options->seed,
                                        .devices_count = gpus,
                                        .kernels = kvt_kernels_host(),
                                        .is_landing_late = options->seed % 4 < 2,
                                        .has_executor = true};

    world->options = *options;
    world->random = (options->seed + 1) * 0x9e3779b97f4a7c15ull;
    world->zones_count = world->devices_count = gpus;
    world->is_set = true;
    kvt_fake_cuda_init(&fake);
    world->calls = kvt_cuda_calls();
    world->host_memory =
        mmap(NULL, KVT_HUGE_PAGE_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (world->host_memory == MAP_FAILED || kvt_doorbell_init(&world->bell) < 0)
        abort();
    for (uint32_t c = 0; c < WORLD_CLIENTS; c++)
        world_client_init(world, c);
}

static struct set_case *set_open(uint64_t seed)
{
    struct world_options options = {.seed = seed, .is_threaded = true, .has_quant = seed % 3 == 0};
    struct set_case *set = calloc(1, sizeof(*set));
    uint32_t gpus = 2 + seed % 2;

    if (set == NULL)
        abort();
    set_init(set, &options, gpus);
    (void)open_tier(set, gpus);
    for (uint32_t c = 0; c < WORLD_CLIENTS; c++)
        if (set->world.clients[c].device != KVT_GPU_NONE && !attach(set, c))
            world_fail(&set->world, "a GPU that is lost at once");
    world_places_init(&set->world);
    for (uint32_t i = 0; i < WORLD_SLOTS; i++)
        world_scribble(&set->world, &set->world.places[i]);
    return set;
}

/* Whether the failure that was planned has happened. */
static bool set_close(struct set_case *set)
{
    struct world *world = &set->world;
    bool has_failed;

    for (uint32_t c = 0; world->tier != NULL && c < WORLD_CLIENTS; c++)
        if (world->clients[c].device != KVT_GPU_NONE)
            kvt_device_region_close(world->tier, &set->regions[c]);
    world->tier = kvt_tier_close(world->tier);
    has_failed = kvt_fake_cuda_has_failed();
    /* Lost while it was closed: the rest goes with the process, which a reset stands for. */
    if (has_failed && kvt_fake_cuda_is_lost(0)) {
        (void)world->calls->set_device(0);
        (void)world->calls->device_reset();
    }
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
    return has_failed;
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

    /* One that the test did not do itself. */
    if (!lost->is_lost && incarnation != lost->incarnation && world->options.is_blind) {
        lost->is_lost = true;
        world->losses++;
    }
    if (!lost->is_lost || incarnation == lost->incarnation || is_zone_used(world, zone) ||
        !kvt_device_is_served(&kvt_device_set_of(world->tier)->members[zone]))
        return;
    if (incarnation != lost->incarnation + 1)
        world_fail(world, "zone %u: incarnation %u after %u", zone, incarnation, lost->incarnation);
    for (uint32_t c = 0; c < WORLD_CLIENTS; c++)
        if (world->clients[c].device == zone) {
            kvt_device_region_close(world->tier, &set->regions[c]);
            if (!attach(set, c)) {
                if (!world->options.is_error_expected)
                    world_fail(world, "zone %u is served, but lost", zone);
                return; /* and tried again */
            }
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
        if (world_random(&set->world, 32) == 0)
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
    (void)set_close(set);
}

/* ---- every call fails in turn ---------------------------------------------------------------- */

/* Engines attach; what fails is tried again, as they do. */
static void attach_all(struct set_case *set)
{
    uint64_t until_ns = kvt_clock_mono_ns() + BACK_NS;
    struct world *world = &set->world;
    const struct kvt_device_member *member = &kvt_device_set_of(world->tier)->members[0];
    bool is_attached = false;

    while (!is_attached) {
        uint32_t incarnation = atomic_load(&world->zones[0].counters->incarnation);

        is_attached = kvt_device_is_served(member);
        for (uint32_t c = 0; is_attached && c < WORLD_CLIENTS; c++)
            if (world->clients[c].device == 0) {
                kvt_device_region_close(world->tier, &set->regions[c]);
                is_attached = attach(set, c);
            }
        is_attached =
            is_attached && incarnation == atomic_load(&world->zones[0].counters->incarnation);
        world->zones[0].incarnation = incarnation;
        if (kvt_clock_mono_ns() > until_ns)
            world_fail(world, "engines cannot attach");
    }
}

static void run_transfers(struct set_case *set, uint32_t count)
{
    uint64_t until = set->world.submitted + count;

    while (set->world.submitted < until) {
        (void)world_submit(&set->world);
        turn(set);
    }
    settle(set);
}

/* It may be that nobody has noticed yet. */
static void settle_fault(struct set_case *set)
{
    do {
        run_transfers(set, 5);
    } while (kvt_fake_cuda_is_lost(0) || !is_whole(&set->world));
}

/* False: the run had fewer calls than that. */
static bool run_with_fault(uint64_t nth, int error, uint64_t sums[4])
{
    struct world_options options = {
        .seed = nth, .is_threaded = true, .is_blind = true, .is_error_expected = true};
    struct set_case *set = calloc(1, sizeof(*set));
    struct world *world = &set->world;
    bool has_failed;

    set_init(set, &options, 1);
    kvt_fake_cuda_fail(KVT_FAKE_CUDA_ANY, nth, error);
    sums[0]++;
    if (open_tier(set, 1)) {
        attach_all(set);
        world_places_init(world);
        run_transfers(set, 25);
        /* Once it has happened, everything works again. */
        if (kvt_fake_cuda_has_failed()) {
            uint64_t before;

            settle_fault(set);
            before = world->lost + world->failed;
            run_transfers(set, 25);
            if (world->lost + world->failed != before)
                world_fail(world, "call %" PRIu64 " failed once: it did not get over it", nth);
        }
    } else {
        world_places_init(world);
        sums[1]++;
    }
    sums[2] += world->failed;
    sums[3] += world->lost;
    has_failed = set_close(set);
    return has_failed;
}

static int run_faults(int error)
{
    uint64_t sums[4] = {0}, nth = 1;

    while (run_with_fault(nth, error, sums))
        nth++;
    printf("error %d at each of %" PRIu64 " calls: %" PRIu64 " times no GPU, %" PRIu64
           " transfers failed, %" PRIu64 " lost\n",
           error, nth - 1, sums[1], sums[2], sums[3]);
    return sums[1] > 10 && sums[2] + sums[3] > 20 ? 0 : 1;
}

static int run(uint64_t seed, uint64_t count)
{
    uint64_t sums[4] = {0};

    for (uint64_t i = 0; i < count; i++)
        run_one(seed + i, sums);
    printf("%" PRIu64 " transfers: %" PRIu64 " done; %" PRIu64 " GPUs lost, %" PRIu64
           " pools opened again\n",
           sums[0], sums[1], sums[2], sums[3]);
    return sums[1] > 300 * count && sums[2] > count && sums[3] > count ? 0 : 1;
}

int main(int argc, char **argv)
{
    if (argc == 4 && strcmp(argv[1], "run") == 0)
        return run(strtoull(argv[2], NULL, 10), strtoull(argv[3], NULL, 10));
    if (argc == 3 && strcmp(argv[1], "faults") == 0)
        return run_faults((int)strtol(argv[2], NULL, 10));
    fprintf(stderr, "usage: run SEED COUNT | faults ERROR\n");
    return 2;
}
