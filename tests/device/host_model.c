/* The model of gpu_model.c over the host backend: an arena in ordinary memory behind a thread,
 * which only that thread touches. So slots are looked at when they come out, to L2 or to an engine;
 * at the end all of them do. Engines have host memory only.
 *
 *   host_model SEED COUNT */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "tests/device/model_world_internal.h"
#include "tiers/device/device.h"

#define TRANSFERS 600u

static void host_open(struct world *world, uint64_t seed)
{
    struct kvt_device_config config = {.backend = "host",
                                       .bytes = KVT_HUGE_PAGE_BYTES,
                                       .host_memory_bytes = KVT_HUGE_PAGE_BYTES,
                                       .inflight_max = WORLD_INFLIGHT,
                                       .doorbell = &world->bell};
    struct kvt_device_report report;

    *world = (struct world){.options = {.seed = seed, .has_quant = seed % 4 >= 2},
                            .random = (seed + 1) * 0x9e3779b97f4a7c15ull,
                            .zones_count = 1,
                            .is_host = true};
    world->host_memory =
        mmap(NULL, KVT_HUGE_PAGE_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (world->host_memory == MAP_FAILED || kvt_doorbell_init(&world->bell) < 0)
        abort();
    config.host_memory = world->host_memory;
    if (kvt_device_open(&world->tier, &config, &report) != 0)
        world_fail(world, "open: %s", report.why);
    world->zones[0].counters = &world->tier->counters;
    for (uint32_t c = 0; c < WORLD_CLIENTS; c++)
        world_client_init(world, c);
    world_places_init(world);
}

static void host_close(struct world *world)
{
    world->tier = kvt_tier_close(world->tier);
    for (uint32_t c = 0; c < WORLD_CLIENTS; c++) {
        free(world->clients[c].shadow);
        free(world->clients[c].memory);
    }
    for (uint32_t i = 0; i < 2 * WORLD_SLOTS; i++)
        free(world->places[i].shadow);
    (void)munmap(world->host_memory, KVT_HUGE_PAGE_BYTES);
    kvt_doorbell_deinit(&world->bell);
}

/* How many slots of the arena came out; each is compared on its way. */
static uint32_t look_at_all(struct world *world)
{
    struct world_place *out = world_slot(world, KVT_PLACE_HOST, 0);
    uint32_t count = 0;

    for (uint32_t i = 0; i < WORLD_SLOTS; i++) {
        struct world_place *slot = world_slot(world, KVT_PLACE_DEVICE, i);

        if (!slot->is_full)
            continue;
        if (world_move(world, slot, out) != KVT_XFER_DONE)
            world_fail(world, "slot %u does not come out", i);
        count++;
    }
    return count;
}

int main(int argc, char **argv)
{
    uint64_t seed, count, submitted = 0, done = 0, late = 0, seen = 0;
    struct world *world = calloc(1, sizeof(*world));

    if (argc != 3 || world == NULL) {
        fprintf(stderr, "usage: SEED COUNT\n");
        return 2;
    }
    seed = strtoull(argv[1], NULL, 10);
    count = strtoull(argv[2], NULL, 10);
    for (uint64_t i = 0; i < count; i++) {
        host_open(world, seed + i);
        world_run(world, TRANSFERS);
        seen += look_at_all(world);
        submitted += world->submitted;
        done += world->done;
        late += world->late;
        host_close(world);
    }
    free(world);
    printf("%" PRIu64 " transfers: %" PRIu64 " done, %" PRIu64 " late; %" PRIu64
           " slots looked at in the end\n",
           submitted, done, late, seen);
    return done * 2 > submitted && late > 0 && seen > count ? 0 : 1;
}
