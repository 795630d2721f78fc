/* Every call of CUDA fails in turn, from the making of a GPU to its end, and once with a context
 * that is lost by it: whatever comes back, no byte is wrong, every transfer comes back once, what
 * is submitted afterwards is done, and nothing is left open.
 *
 * Then damage: what was written to a slot is not what went in, and a copy out of it says so. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/device/model_world_internal.h"

#define TRANSFERS 30u
#define AFTER 12u

struct sums {
    uint64_t runs, not_opened, failed, lost;
};

/* False: the run had fewer calls than that. */
static bool run_with_fault(uint64_t nth, int error, bool is_sticky, struct sums *sums)
{
    struct world_options options = {.seed = nth % 8,
                                    .is_host_pinned = nth % 2 == 0,
                                    .has_quant = nth % 3 == 0,
                                    .cpu_threads = (uint32_t)(nth % 3),
                                    .fail_call = KVT_FAKE_CUDA_ANY,
                                    .fail_nth = nth,
                                    .fail_error = error,
                                    .is_error_expected = true,
                                    .is_sticky_expected = is_sticky};
    struct world *world = calloc(1, sizeof(*world));
    bool has_failed, is_open;

    if (world == NULL)
        abort();
    is_open = world_open(world, &options);
    if (is_open) {
        world_run(world, TRANSFERS);
        has_failed = kvt_fake_cuda_has_failed();
        kvt_fake_cuda_pause_fail(has_failed);
        sums->failed += world->failed;
        sums->lost += world->lost;
        if (has_failed) {
            uint64_t before = world->failed + world->lost;

            world_run(world, (uint32_t)world->submitted + AFTER);
            if (world->failed + world->lost != before || world_is_lost(world))
                world_fail(world, "call %" PRIu64 " failed once, with %d: it did not get over it",
                           nth, error);
        }
        kvt_fake_cuda_pause_fail(false);
    }
    sums->not_opened += !is_open;
    sums->runs++;
    world_close(world);
    has_failed = world->has_failed;
    free(world);
    return has_failed;
}

static int run_faults(int error, bool is_sticky)
{
    struct sums sums = {0};
    uint64_t nth = 1;

    while (run_with_fault(nth, error, is_sticky, &sums))
        nth++;
    printf("error %d at each of %" PRIu64 " calls: %" PRIu64 " GPUs not opened, %" PRIu64
           " transfers failed, %" PRIu64 " lost\n",
           error, nth - 1, sums.not_opened, sums.failed, sums.lost);
    return sums.not_opened > 10 && sums.failed + sums.lost > 20 ? 0 : 1;
}

/* ---- damage ---------------------------------------------------------------------------------- */

static struct world *damage_open(uint64_t seed, bool is_host_pinned)
{
    struct world_options options = {
        .seed = seed, .is_host_pinned = is_host_pinned, .is_damage_expected = true};
    struct world *world = calloc(1, sizeof(*world));

    if (world == NULL || !world_open(world, &options))
        abort();
    return world;
}

static void expect(const struct world *world, int status, int wanted, const char *what)
{
    if (status != wanted)
        world_fail(world, "%s: status %d, not %d", what, status, wanted);
}

/* A bit of a slot turns while it lies there: seen on each way out. */
static void damage_at_rest(uint64_t seed, enum kvt_place_kind out)
{
    struct world *world = damage_open(seed, seed % 2 == 0);
    uint32_t client = seed % 3 == 0 ? 4 : 0; /* host memory, the GPU */
    struct world_place *slot = world_slot(world, KVT_PLACE_DEVICE, 2);
    struct world_place *to = out == KVT_PLACE_HOST ? world_slot(world, KVT_PLACE_HOST, 1)
                                                   : world_group(world, client, 1);
    uint64_t at;

    expect(world, world_move(world, world_group(world, client, 0), slot), KVT_XFER_DONE, "in");
    expect(world, world_move(world, slot, to), KVT_XFER_DONE, "out, undamaged");
    at = world_random(world, world_spec(slot->spec)->stored_bytes);
    world_bytes(world, slot)[at] ^= (uint8_t)(1u << world_random(world, 8));
    expect(world, world_move(world, slot, to), KVT_XFER_BAD_SLOT, "out, one bit turned");
    if (atomic_load(&kvt_gpu_counters(world->gpu)->bad_checks) != 1)
        world_fail(world, "the bad check is not counted");
    slot->is_full = false;
    world_forget(world, slot);
    world_close(world);
    free(world);
}

/* The kernel or the copy that fills a slot does half of its work, or turns a bit: the second thing
 * that is done, behind the copy of the descriptors. Adds up what the GPU read of the source, or the
 * CPU, so it is seen now, or when the slot is read. False: neither does in this world: runs by the
 * copy engine and pieces of odd lengths are checked in the slot only. */
static bool damage_on_the_way(uint64_t seed, uint32_t client, bool is_torn)
{
    struct world *world = damage_open(seed, true);
    struct world_place *slot = world_slot(world, KVT_PLACE_DEVICE, 2);
    const struct kvt_gpu_counters *counters = kvt_gpu_counters(world->gpu);
    bool is_checked;
    int status;

    if (is_torn)
        kvt_fake_cuda_tear(2);
    else
        kvt_fake_cuda_flip(2);
    status = world_move(world, world_group(world, client, 0), slot);
    if (kvt_fake_cuda_damaged() != 1)
        world_fail(world, "nothing was damaged");
    is_checked =
        client == 4 || (atomic_load(&counters->path_transfers[KVT_GPU_FROM_ENGINE_COPY]) == 0 &&
                        world_spec(world->clients[client].spec)->align_bytes % 8 == 0);
    if (is_checked && status == KVT_XFER_DONE)
        status = world_move(world, slot, world_group(world, client, 1));
    if (is_checked)
        expect(world, status, KVT_XFER_BAD_SLOT, is_torn ? "torn" : "flipped");
    world_close(world);
    free(world);
    return is_checked;
}

static int run_damage(void)
{
    uint32_t seen = 0;

    for (uint64_t seed = 0; seed < 12; seed++) {
        damage_at_rest(seed, KVT_PLACE_HOST);
        damage_at_rest(seed, KVT_PLACE_CLIENT);
        for (uint32_t i = 0; i < 4; i++)
            seen += damage_on_the_way(seed, i / 2 == 0 ? 0 : 4, i % 2 == 0);
    }
    printf("damaged on the way and seen: %u\n", seen);
    return seen > 24 ? 0 : 1;
}

/* ---- what is no longer there ----------------------------------------------------------------- */

/* A client frees its memory under a copy: the context is lost, nothing else. A layout of another
 * incarnation is a client that is gone; a key of other content is a bad slot. */
static void gone(uint64_t seed)
{
    struct world *world = damage_open(seed, true);
    struct world_place *slot = world_slot(world, KVT_PLACE_DEVICE, 2);
    struct world_place *other = world_slot(world, KVT_PLACE_DEVICE, 3);
    struct world_client *client = &world->clients[0];

    expect(world, world_move(world, world_group(world, 1, 0), slot), KVT_XFER_DONE, "in");
    slot->id++;
    expect(world, world_move(world, slot, world_group(world, 1, 1)), KVT_XFER_BAD_SLOT,
           "other key");
    slot->id--;
    client->layout.incarnation++;
    expect(world, world_move(world, world_group(world, 0, 0), other), KVT_XFER_CLIENT_GONE,
           "a layout of another incarnation");
    client->layout.incarnation--;
    kvt_fake_cuda_foreign_free(&client->foreign);
    if (world_submit_pair(world, world_group(world, 0, 0), other))
        while (!world_is_lost(world))
            world_turn(world);
    world->is_client_freed = true;
    world_recover(world);
    expect(world, world_move(world, world_group(world, 1, 0), other), KVT_XFER_DONE, "afterwards");
    world_close(world);
    free(world);
}

/* ---- layers in allocations of their own ------------------------------------------------------ */

#define LAYERS 2u
#define LAYER_BLOCKS (KVT_HUGE_PAGE_BYTES / PART_BYTES)
#define PART_BYTES 16384u

struct layers {
    struct kvt_fake_cuda_foreign memory[LAYERS];
    uint64_t addresses[LAYERS];
    struct kvt_layout_piece pieces[LAYERS];
    struct kvt_layout layout;
};

static void layers_open(struct world *world, struct layers *layers)
{
    struct kvt_region regions[LAYERS];

    layers->layout = (struct kvt_layout){
        .pieces_count = LAYERS, .engine_blocks_per_block = 2, .pieces = layers->pieces};
    for (uint32_t i = 0; i < LAYERS; i++) {
        kvt_fake_cuda_foreign_new(&layers->memory[i], 0, KVT_HUGE_PAGE_BYTES);
        if (world->calls->set_device(0) != 0 ||
            world->calls->ipc_open(layers->memory[i].handle, &layers->addresses[i]) != 0)
            world_fail(world, "ipc_open");
        regions[i] = (struct kvt_region){.base = (uint8_t *)(uintptr_t)layers->addresses[i],
                                         .bytes = KVT_HUGE_PAGE_BYTES,
                                         .is_gpu = true};
        layers->pieces[i] = (struct kvt_layout_piece){
            .region_idx = i, .bytes = PART_BYTES, .stride_bytes = PART_BYTES};
    }
    if (layers->addresses[1] != layers->addresses[0] + KVT_HUGE_PAGE_BYTES ||
        kvt_layout_resolve(&layers->layout, regions, LAYERS, 2 * LAYERS * PART_BYTES) != 0)
        world_fail(world, "they do not lie side by side");
}

static void layers_move(struct world *world, struct layers *layers, bool is_in)
{
    static const uint64_t blocks[2] = {0, LAYER_BLOCKS - 1};
    struct kvt_place client = {
        .kind = KVT_PLACE_CLIENT,
        .view = {.layout = &layers->layout, .engine_blocks = blocks, .end_piece = LAYERS}};
    struct kvt_place slot = {.kind = KVT_PLACE_DEVICE, .offset_bytes = world->config.base_bytes};
    struct kvt_xfer xfer = {.src = is_in ? client : slot,
                            .dst = is_in ? slot : client,
                            .key = {.block_id = 7,
                                    .generation = 7,
                                    .payload_bytes = layers->layout.payload_bytes,
                                    .block_tokens = KVT_BLOCK_TOKENS_DEFAULT},
                            .deadline_ns = UINT64_MAX};
    struct kvt_xfer *one = &xfer;
    uint32_t taken;

    if (kvt_tier_submit(world->tier, &one, 1, &taken) != 0)
        world_fail(world, "it is not taken");
    while (kvt_tier_reap(world->tier, &one, 1) == 0)
        (void)kvt_gpu_turn(world->gpu);
    expect(world, xfer.status, KVT_XFER_DONE, "layers side by side");
}

/* The last block of a layer touches the first of the next, and a copy through both is none. */
static void side_by_side(void)
{
    struct world *world = damage_open(1, true);
    struct layers layers;
    uint64_t last = KVT_HUGE_PAGE_BYTES - PART_BYTES;

    layers_open(world, &layers);
    for (uint32_t i = 0; i < LAYERS; i++)
        memset(layers.memory[i].memory, 1 + (int)i, KVT_HUGE_PAGE_BYTES);
    layers_move(world, &layers, true);
    for (uint32_t i = 0; i < LAYERS; i++)
        memset(layers.memory[i].memory, 0, KVT_HUGE_PAGE_BYTES);
    layers_move(world, &layers, false);
    for (uint32_t i = 0; i < LAYERS; i++) {
        const uint8_t *memory = layers.memory[i].memory;

        if (memory[0] != 1 + i || memory[last] != 1 + i || memory[PART_BYTES - 1] != 1 + i ||
            memory[KVT_HUGE_PAGE_BYTES - 1] != 1 + i || memory[PART_BYTES] != 0 ||
            memory[last - 1] != 0)
            world_fail(world, "layer %u is not what it was", i);
        if (world->calls->set_device(0) != 0 || world->calls->ipc_close(layers.addresses[i]) != 0)
            world_fail(world, "ipc_close");
    }
    world_close(world);
    free(world);
}

int main(int argc, char **argv)
{
    if (argc == 2 && strcmp(argv[1], "once") == 0)
        return run_faults(KVT_CUDA_INVALID_VALUE, false) | run_faults(KVT_CUDA_NO_MEMORY, false);
    if (argc == 2 && strcmp(argv[1], "sticky") == 0)
        return run_faults(KVT_CUDA_LAUNCH_FAILURE, true);
    if (argc == 2 && strcmp(argv[1], "damage") == 0) {
        for (uint64_t seed = 0; seed < 12; seed++)
            gone(seed);
        side_by_side();
        return run_damage();
    }
    fprintf(stderr, "usage: once | sticky | damage\n");
    return 2;
}
