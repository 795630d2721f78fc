/* The model of model_world.h: what is where, and one GPU that is asked to make it so. */
#include "tests/device/model_world.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "daemon/base/clock.h"
#include "tests/device/model_machine.h"
#include "tests/device/model_world_internal.h"

#define ARENA_BYTES KVT_HUGE_PAGE_BYTES
#define STAGING_BYTES (256u * 1024u)
#define BUDGET_BYTES (256u * 1024u)
#define TURNS_MAX 2000000u
#define REAP_MAX 8u

void world_fail(const struct world *world, const char *format, ...)
{
    va_list args;

    fprintf(stderr, "FAILED: ");
    va_start(args, format);
    vfprintf(stderr, format, args);
    va_end(args);
    fprintf(stderr, " (seed %" PRIu64 ", %" PRIu64 " transfers)\n", world->options.seed,
            world->submitted);
    exit(1);
}

uint64_t world_random(struct world *world, uint64_t below)
{
    uint64_t x = world->random;

    x ^= x << 13;
    x ^= x >> 7;
    x ^= x << 17;
    world->random = x;
    return below <= 1 ? 0 : (x * 0x2545f4914f6cdd1dull >> 16) % below;
}

/* ---- the life of the world ------------------------------------------------------------------- */

static void set_current(struct world *world, uint32_t device)
{
    (void)world->calls->set_device(
        world->devices[device]); /* a loss is told again by what follows */
}

/* Memory of clients that is a GPU's is opened for the GPU's incarnation. */
static void clients_attach(struct world *world, uint32_t device)
{
    for (uint32_t c = 0; c < WORLD_CLIENTS; c++) {
        struct world_client *client = &world->clients[c];
        struct kvt_region region = {.bytes = client->bytes,
                                    .is_gpu = true,
                                    .gpu_zone = device,
                                    .incarnation = device == 0 ? world->zones[0].incarnation : 0};
        int error;

        if (client->device != device || (c == 0 && world->is_client_freed))
            continue;
        set_current(world, device);
        /* By the table it is memory of this process: CUDA does not open a handle of its own. */
        error = world->options.is_by_table
                    ? KVT_CUDA_OK
                    : world->calls->ipc_open(client->foreign.handle, &client->address);
        if (error != KVT_CUDA_OK)
            world_fail(world, "ipc_open: %d", error);
        region.base = (uint8_t *)(uintptr_t)client->address;
        if (kvt_layout_resolve(&client->layout, &region, 1, client->layout.payload_bytes) != 0)
            world_fail(world, "a layout of client %u", c);
    }
}

static void pin_host(struct world *world)
{
    int error;

    if (!world->options.is_host_pinned)
        return;
    set_current(world, 0);
    error = world->calls->pin(world->host_memory, world->config.host_memory_bytes);
    if (error != KVT_CUDA_OK)
        world_fail(world, "pin: %d", error);
}

void world_places_init(struct world *world)
{
    struct world_place *place = world->places;

    for (uint32_t i = 0; i < 2 * WORLD_SLOTS; i++, place++) {
        *place = (struct world_place){.kind = i < WORLD_SLOTS ? KVT_PLACE_DEVICE : KVT_PLACE_HOST,
                                      .idx = i % WORLD_SLOTS};
        place->shadow = calloc(1, WORLD_SLOT_BYTES);
        if (place->shadow == NULL)
            abort();
    }
    for (uint32_t c = 0; c < WORLD_CLIENTS; c++)
        for (uint32_t g = 0; g < WORLD_GROUPS; g++, place++) {
            *place = (struct world_place){.kind = KVT_PLACE_CLIENT,
                                          .client = c,
                                          .idx = g,
                                          .is_full = true,
                                          .spec = world->clients[c].spec};
            world_scribble(world, place);
        }
}

bool world_open(struct world *world, const struct world_options *options)
{
    int r, error;

    memset(world, 0, sizeof(*world));
    world->options = *options;
    world->random = (options->seed + 1) * 0x9e3779b97f4a7c15ull;
    world_machine_open(world);
    world_table_open(world);
    world->zones_count = 1;
    world->host_memory =
        mmap(NULL, KVT_HUGE_PAGE_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (world->host_memory == MAP_FAILED || kvt_doorbell_init(&world->bell) < 0)
        abort();
    world->config = (struct kvt_gpu_config){
        .calls = world->calls,
        .device = world->devices[0],
        .arena_bytes = ARENA_BYTES,
        .base_bytes = 64 * KVT_MIB,
        .staging_bytes = STAGING_BYTES,
        .streams = 1 + (uint32_t)world_random(world, 2),
        .inflight_bytes_max = BUDGET_BYTES,
        .inflight_max = WORLD_INFLIGHT,
        .crossover_bytes = 2048,
        .cpu_threads = options->cpu_threads,
        .hand_bytes = 1 + (uint32_t)world_random(world, WORLD_SLOT_BYTES),
        .host_memory = world->host_memory,
        .host_memory_bytes = KVT_HUGE_PAGE_BYTES,
        .is_host_pinned = options->is_host_pinned,
        .doorbell = &world->bell,
        .is_by_hand = !options->is_threaded,
    };
    (void)world->calls->device_info(world->devices[0], &world->config.info);
    for (uint32_t c = 0; c < WORLD_CLIENTS; c++)
        world_client_init(world, c);
    pin_host(world);
    clients_attach(world, 0);
    clients_attach(world, 1);
    world_machine_plan(options->fail_call, options->fail_nth, options->fail_error);
    r = kvt_gpu_open(&world->gpu, &world->config, &error);
    if (r != 0) {
        if (!options->is_error_expected || world->gpu != NULL || (r == -EIO && error == 0))
            world_fail(world, "kvt_gpu_open: %d, CUDA's %d", r, error);
        world_places_init(world);
        return false;
    }
    world->tier = kvt_gpu_tier(world->gpu);
    world->zones[0] = (struct world_zone){.gpu = world->gpu,
                                          .counters = &world->tier->counters,
                                          .base_bytes = world->config.base_bytes};
    world_places_init(world);
    for (uint32_t i = 0; i < WORLD_SLOTS; i++)
        world_scribble(world, &world->places[i]);
    return true;
}

struct kvt_device_config world_set_config(struct world *world, const char *gpus)
{
    world->config.inflight_bytes_max = 256 * KVT_KIB;
    return (struct kvt_device_config){.backend = "cuda",
                                      .bytes = KVT_HUGE_PAGE_BYTES,
                                      .host_memory = world->host_memory,
                                      .host_memory_bytes = KVT_HUGE_PAGE_BYTES,
                                      .inflight_max = WORLD_INFLIGHT,
                                      .doorbell = &world->bell,
                                      .gpus = gpus,
                                      .headroom_bytes = KVT_MIB,
                                      .staging_bytes = KVT_HUGE_PAGE_BYTES,
                                      .inflight_bytes_max = world->config.inflight_bytes_max,
                                      .streams = 1 + (uint32_t)world_random(world, 2),
                                      .crossover_bytes = 2048,
                                      .sysfs = "/nowhere"};
}

void world_set_zones(struct world *world)
{
    for (uint32_t z = 0; z < world->zones_count; z++)
        world->zones[z] = (struct world_zone){.gpu = kvt_device_set_of(world->tier)->members[z].gpu,
                                              .counters = world->tier->zones[z].counters,
                                              .base_bytes = world->tier->zones[z].base_bytes};
}

/* A device that is lost does none of it: its reset will. */
static void detach(struct world *world)
{
    world_machine_plan(KVT_FAKE_CUDA_ANY, 0, 0);
    for (uint32_t c = 0; c < WORLD_CLIENTS; c++) {
        struct world_client *client = &world->clients[c];

        if (world->options.is_by_table) {
            if (client->device != KVT_GPU_NONE)
                world_table_pool_free(world, client);
        } else if (client->device == 1) {
            set_current(world, 1);
            if (world->calls->ipc_close(client->address) != KVT_CUDA_OK)
                world_fail(world, "ipc_close");
        }
    }
    set_current(world, 0);
    for (uint32_t c = 0; c < WORLD_CLIENTS; c++)
        if (!world->options.is_by_table && world->clients[c].device == 0 &&
            (c > 0 || !world->is_client_freed))
            (void)world->calls->ipc_close(world->clients[c].address);
    if (world->options.is_host_pinned)
        (void)world->calls->unpin(world->host_memory);
}

void world_close(struct world *world)
{
    bool is_lost = world->gpu != NULL && world_is_lost(world);

    world->gpu = kvt_gpu_close(world->gpu);
    world->has_failed = world_machine_has_failed();
    detach(world);
    world_table_close(world);
    /* What was lost nobody can free but a reset. */
    if (is_lost || world->options.is_sticky_expected) {
        set_current(world, 0);
        if (world->calls->device_reset() != KVT_CUDA_OK)
            world_fail(world, "a reset does not help");
    }
    world_machine_close();
    for (uint32_t c = 0; c < WORLD_CLIENTS; c++) {
        free(world->clients[c].shadow);
        if (world->clients[c].device == KVT_GPU_NONE)
            free(world->clients[c].memory);
    }
    for (uint32_t i = 0; i < 2 * WORLD_SLOTS; i++)
        free(world->places[i].shadow);
    (void)munmap(world->host_memory, KVT_HUGE_PAGE_BYTES);
    kvt_doorbell_deinit(&world->bell);
}

/* ---- time ------------------------------------------------------------------------------------ */

bool world_is_lost(const struct world *world)
{
    return atomic_load(&world->tier->counters.health) != KVT_TIER_HEALTH_OK;
}

static void check_budget(const struct world *world)
{
    for (uint32_t z = 0; !world->is_host && z < world->zones_count; z++) {
        uint64_t inflight = atomic_load(&kvt_gpu_counters(world->zones[z].gpu)->inflight_bytes);

        if (inflight > KVT_MAX(world->config.inflight_bytes_max, WORLD_SLOT_BYTES))
            world_fail(world, "%" PRIu64 " bytes in flight", inflight);
    }
}

void world_turn(struct world *world)
{
    struct kvt_xfer *xfers[REAP_MAX];
    uint32_t count;

    if (world->config.is_by_hand) {
        (void)kvt_gpu_turn(world->gpu);
        for (uint32_t i = 0; i < world->config.cpu_threads; i++)
            if (world_random(world, 3) == 0)
                (void)kvt_gpu_hand_turn(world->gpu, i);
    }
    check_budget(world);
    count = kvt_tier_reap(world->tier, xfers, 1 + (uint32_t)world_random(world, REAP_MAX));
    for (uint32_t i = 0; i < count; i++)
        world_finish(world, xfers[i]);
    if (!world->config.is_by_hand && count == 0) {
        kvt_doorbell_arm(&world->bell);
        kvt_doorbell_wait(&world->bell, 50 * KVT_NS_PER_US);
    }
}

/* A device that is lost holds its transfers until it is recovered. */
void world_drain(struct world *world)
{
    for (uint32_t i = 0; world->inflight > 0; i++) {
        world_turn(world);
        if (world_is_lost(world))
            world_recover(world);
        if (i == TURNS_MAX)
            world_fail(world, "%u transfers do not come back", world->inflight);
    }
}

static void revive(struct world *world)
{
    int error, r = -EIO;

    /* A failure that is planned may hit the way back; it happens once. */
    for (int i = 0; r != 0 && i < 3; i++) {
        set_current(world, 0);
        while (world->calls->device_reset() != KVT_CUDA_OK)
            if (i++ == 3)
                world_fail(world, "a reset does not help");
        r = kvt_gpu_revive(world->gpu, &error);
        if (r != 0 && (!world->options.is_error_expected || !kvt_gpu_is_parked(world->gpu)))
            world_fail(world, "kvt_gpu_revive: %d, CUDA's %d", r, error);
    }
    if (r != 0)
        world_fail(world, "kvt_gpu_revive does not work: %d, CUDA's %d", r, error);
}

static void park_and_revive(struct world *world)
{
    uint32_t incarnation;

    for (uint32_t i = 0; !kvt_gpu_is_parked(world->gpu); i++) {
        world_turn(world);
        if (i == TURNS_MAX)
            world_fail(world, "it does not park");
    }
    incarnation = atomic_load(&world->tier->counters.incarnation);
    if (incarnation != world->zones[0].incarnation + 1)
        world_fail(world, "incarnation %u after %u", incarnation, world->zones[0].incarnation);
    revive(world);
    world->zones[0].incarnation = incarnation;
    world->losses++;
}

void world_recover(struct world *world)
{
    uint32_t turns = 0;

    park_and_revive(world);
    /* Layouts change only when no transfer uses them any more. */
    while (world->inflight > 0) {
        world_turn(world);
        if (world_is_lost(world))
            park_and_revive(world);
        if (turns++ == TURNS_MAX)
            world_fail(world, "%u transfers do not come back after a loss", world->inflight);
    }
    world_machine_pause_plan(true);
    pin_host(world);
    clients_attach(world, 0);
    world_machine_pause_plan(false);
    for (uint32_t i = 0; i < WORLD_SLOTS; i++)
        world_forget(world, &world->places[i]);
}

void world_lose(struct world *world, int error)
{
    world_machine_lose(error);
    for (uint32_t i = 0; !world_is_lost(world); i++) {
        world_turn(world);
        /* An idle thread makes no call: whoever sees the loss tells it. */
        if (i == 100)
            kvt_gpu_lose(world->gpu, error);
    }
}

void world_run(struct world *world, uint32_t count)
{
    while (world->submitted < count) {
        bool is_quiet = world->options.lose_every == 0;

        for (uint64_t i = world_random(world, 6); i > 0; i--)
            (void)world_submit(world);
        for (uint64_t i = world_random(world, 8); i > 0; i--)
            world_turn(world);
        if (!is_quiet && world_random(world, world->options.lose_every) == 0)
            world_lose(world, KVT_CUDA_LAUNCH_FAILURE);
        if (world_is_lost(world)) {
            if (is_quiet && !world->options.is_error_expected)
                world_fail(world, "it was lost for no reason: %d",
                           atomic_load(&kvt_gpu_counters(world->gpu)->last_error));
            world_recover(world);
        }
        if (world_random(world, 64) == 0)
            world_verify(world);
        if (world_random(world, 32) == 0)
            world_drain(world);
    }
    world_drain(world);
    world_verify(world);
}
