/* One GPU of the device tier at work, as the engine drives it: blocks from a pool into slots, from
 * slots to L2, back into slots, and into other blocks of the pool. The thread, the staging of
 * lists, the checks and the seals are all in it; beside it stand the device's own copy and pinned
 * copies over the bus, of as many bytes, in the same rounds. */
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "daemon/base/clock.h"
#include "daemon/base/doorbell.h"
#include "tiers/device/gpu.h"
#include "tiers/pages.h"
#include "tools/kvtier-gpu-check/gpu_check.h"

#define PIECES 64u
#define BLOCKS 4u
#define TOKENS 64u
#define SLOTS_MAX 64u
#define ROUNDS 5u
#define ZONE 0u

enum step { /* in this order, each with the copy that it is compared with */
            STEP_COPY,
            STEP_TO_SLOT,
            STEP_PINNED_DOWN,
            STEP_TO_L2,
            STEP_PINNED_UP,
            STEP_FROM_L2,
            STEP_TO_POOL,
            STEPS
};

struct scene {
    struct gpu_check *check;
    struct kvt_doorbell bell;
    struct kvt_gpu *gpu;
    struct kvt_tier *tier;
    uint32_t slots, piece_bytes;
    uint64_t payload_bytes, slot_bytes, l2_bytes, pool_blocks;
    uint32_t header_bytes, tokens[TOKENS];
    uint8_t *l2;
    bool is_pinned;
    struct gpu_check_memory pool; /* with a host side: the whole of it is looked at */
    struct gpu_check_memory other;
    struct kvt_region region;
    struct kvt_layout layout;
    struct kvt_layout_piece pieces[PIECES];
    uint64_t from[SLOTS_MAX][BLOCKS], to[SLOTS_MAX][BLOCKS];
    struct kvt_xfer xfers[SLOTS_MAX];
    uint64_t ns[STEPS][ROUNDS];
    uint32_t rounds;
};

static bool failed(struct scene *scene, const char *what)
{
    return gpu_check_failed(scene->check, "tier", what, 0);
}

/* Source blocks are the even ones, targets the odd ones, both in a scattered order. */
static void number_blocks(struct scene *scene)
{
    uint64_t half = scene->pool_blocks / 2;

    for (uint64_t i = 0; i < half; i++) {
        uint64_t at = (i * 0x9e3779b1ull + 3) & (half - 1);

        scene->from[i / BLOCKS][i % BLOCKS] = 2 * at;
        scene->to[i / BLOCKS][i % BLOCKS] = 2 * at + 1;
    }
}

static bool open_pool(struct scene *scene)
{
    scene->pool_blocks = 2ull * scene->slots * BLOCKS;
    if (!gpu_check_memory_new(scene->check, &scene->pool,
                              scene->pool_blocks * PIECES * scene->piece_bytes, true) ||
        !gpu_check_memory_new(scene->check, &scene->other, scene->pool.bytes / 2, true))
        return false;
    scene->region = (struct kvt_region){.base = (uint8_t *)(uintptr_t)scene->pool.device,
                                        .bytes = scene->pool.bytes,
                                        .is_gpu = true,
                                        .gpu_zone = ZONE,
                                        .allocation = scene->pool.device};
    for (uint32_t p = 0; p < PIECES; p++)
        scene->pieces[p] =
            (struct kvt_layout_piece){.bytes = scene->piece_bytes,
                                      .stride_bytes = scene->piece_bytes,
                                      .offset_bytes = p * scene->pool_blocks * scene->piece_bytes};
    scene->layout = (struct kvt_layout){
        .pieces_count = PIECES, .engine_blocks_per_block = BLOCKS, .pieces = scene->pieces};
    number_blocks(scene);
    if (kvt_layout_resolve(&scene->layout, &scene->region, 1, scene->payload_bytes) != 0)
        return failed(scene, "the layout");
    return true;
}

static bool open_l2(struct scene *scene)
{
    struct gpu_check *check = scene->check;

    scene->header_bytes = kvt_slot_header_bytes(TOKENS);
    scene->slot_bytes = kvt_slot_bytes(TOKENS, scene->payload_bytes);
    scene->l2_bytes = kvt_round_up(scene->slots * scene->slot_bytes, KVT_HUGE_PAGE_BYTES);
    if (kvt_pages_map(-1, scene->l2_bytes, true, &scene->l2) < 0)
        return failed(scene, "memory of L2");
    if (kvt_pages_populate(scene->l2, scene->l2_bytes) < 0)
        return failed(scene, "memory of L2");
    scene->is_pinned =
        gpu_check_ok(check, check->calls->pin(scene->l2, scene->l2_bytes), "pinning L2");
    return scene->is_pinned;
}

static bool open_gpu(struct scene *scene)
{
    const struct gpu_check_options *options = &scene->check->options;
    uint64_t slot_bytes = kvt_round_up(scene->payload_bytes, KVT_GPU_SLOT_ALIGN_BYTES);
    struct kvt_gpu_config config = {
        .calls = scene->check->calls,
        .device = options->device,
        .info = scene->check->info,
        .zone = ZONE,
        .arena_bytes = kvt_round_up(slot_bytes * scene->slots, KVT_HUGE_PAGE_BYTES),
        .staging_bytes = options->is_small ? 4u << 20 : 64u << 20,
        .streams = 2,
        .inflight_bytes_max = 256u << 20,
        .inflight_max = 2 * SLOTS_MAX,
        .crossover_bytes = 256u << 10,
        .host_memory = scene->l2,
        .host_memory_bytes = scene->l2_bytes,
        .is_host_pinned = true,
        .doorbell = &scene->bell};
    int error = 0;

    if (kvt_gpu_open(&scene->gpu, &config, &error) < 0)
        return gpu_check_failed(scene->check, "tier", "kvt_gpu_open", error);
    scene->tier = kvt_gpu_tier(scene->gpu);
    return gpu_check_ok(scene->check, scene->check->calls->set_device(options->device),
                        "set_device");
}

static bool scene_open(struct scene *scene, struct gpu_check *check)
{
    scene->check = check;
    scene->slots = check->options.is_small ? 8 : SLOTS_MAX;
    scene->piece_bytes = check->options.is_small ? 512 : 8192;
    scene->payload_bytes = (uint64_t)PIECES * BLOCKS * scene->piece_bytes;
    if (kvt_doorbell_init(&scene->bell) < 0)
        return failed(scene, "a doorbell");
    return open_pool(scene) && open_l2(scene) && open_gpu(scene);
}

static void scene_close(struct scene *scene)
{
    const struct kvt_cuda_calls *calls = scene->check->calls;

    scene->gpu = kvt_gpu_close(scene->gpu);
    (void)calls->set_device(scene->check->options.device);
    if (scene->is_pinned)
        (void)calls->unpin(scene->l2);
    if (scene->l2 != NULL)
        kvt_pages_unmap(scene->l2, scene->l2_bytes);
    gpu_check_memory_free(scene->check, &scene->pool);
    gpu_check_memory_free(scene->check, &scene->other);
    kvt_doorbell_deinit(&scene->bell);
}

/* ---- transfers ------------------------------------------------------------------------------- */

static struct kvt_place pool_place(struct scene *scene, const uint64_t *blocks)
{
    return (struct kvt_place){
        .kind = KVT_PLACE_CLIENT,
        .view = {.layout = &scene->layout, .engine_blocks = blocks, .end_piece = PIECES}};
}

static struct kvt_place slot_place(struct scene *scene, uint32_t slot)
{
    return (struct kvt_place){
        .kind = KVT_PLACE_DEVICE,
        .incarnation = atomic_load(&scene->tier->counters.incarnation),
        .offset_bytes = slot * kvt_round_up(scene->payload_bytes, KVT_GPU_SLOT_ALIGN_BYTES)};
}

static struct kvt_place l2_place(struct scene *scene, uint32_t slot)
{
    return (struct kvt_place){.kind = KVT_PLACE_HOST, .offset_bytes = slot * scene->slot_bytes};
}

static void make_xfer(struct scene *scene, enum step step, uint32_t slot)
{
    struct kvt_xfer *xfer = &scene->xfers[slot];

    *xfer = (struct kvt_xfer){.key = {.block_id = slot + 1,
                                      .generation = scene->rounds * SLOTS_MAX + slot + 1,
                                      .payload_bytes = scene->payload_bytes,
                                      .block_tokens = TOKENS},
                              .header_bytes = scene->header_bytes,
                              .slot_bytes = scene->slot_bytes,
                              .deadline_ns = KVT_TIME_NEVER_NS,
                              .src = slot_place(scene, slot),
                              .dst = slot_place(scene, slot)};
    if (step == STEP_TO_SLOT)
        xfer->src = pool_place(scene, scene->from[slot]);
    else if (step == STEP_TO_L2)
        xfer->dst = l2_place(scene, slot);
    else if (step == STEP_FROM_L2)
        xfer->src = l2_place(scene, slot);
    else
        xfer->dst = pool_place(scene, scene->to[slot]);
    if (step == STEP_TO_L2) {
        struct kvt_slot_info info = {.block_id = xfer->key.block_id,
                                     .generation = xfer->key.generation,
                                     .payload_bytes = scene->payload_bytes,
                                     .block_tokens = TOKENS};

        kvt_slot_header_write(scene->l2 + slot * scene->slot_bytes, &info, scene->tokens);
    }
}

static bool submit_all(struct scene *scene)
{
    struct kvt_xfer *xfers[SLOTS_MAX];
    uint32_t sent = 0, taken;

    for (uint32_t i = 0; i < scene->slots; i++)
        xfers[i] = &scene->xfers[i];
    while (sent < scene->slots) {
        if (kvt_tier_submit(scene->tier, xfers + sent, scene->slots - sent, &taken) != 0)
            return failed(scene, "the tier takes no more transfers");
        sent += taken;
    }
    return true;
}

static bool reap_all(struct scene *scene)
{
    const struct timespec pause = {.tv_nsec = 2000};
    uint64_t end_ns = kvt_clock_mono_ns() + GPU_CHECK_WAIT_NS_MAX;
    struct kvt_xfer *back[SLOTS_MAX];
    uint32_t reaped = 0, bad = 0;

    while (reaped < scene->slots) {
        uint32_t count = kvt_tier_reap(scene->tier, back, SLOTS_MAX);

        for (uint32_t i = 0; i < count; i++)
            bad += back[i]->status != KVT_XFER_DONE;
        reaped += count;
        if (kvt_clock_mono_ns() > end_ns)
            return failed(scene, "transfers do not come back");
        if (count == 0)
            (void)nanosleep(&pause, NULL);
    }
    return bad == 0 || failed(scene, "transfers came back bad");
}

static bool run_step(struct scene *scene, enum step step)
{
    struct gpu_check *check = scene->check;
    uint64_t half = scene->pool.bytes / 2, begin_ns;
    bool is_done;

    if (step != STEP_COPY && step != STEP_PINNED_UP && step != STEP_PINNED_DOWN)
        for (uint32_t slot = 0; slot < scene->slots; slot++)
            make_xfer(scene, step, slot);
    begin_ns = kvt_clock_mono_ns();
    if (step == STEP_COPY)
        is_done = gpu_check_ok(check,
                               check->calls->copy(scene->other.device, scene->pool.device, half,
                                                  KVT_CUDA_D2D, check->stream),
                               "copy") &&
                  gpu_check_wait(check);
    else if (step == STEP_PINNED_DOWN)
        is_done = gpu_check_download(check, &scene->other, half);
    else if (step == STEP_PINNED_UP)
        is_done = gpu_check_upload(check, &scene->other, half);
    else
        is_done = submit_all(scene) && reap_all(scene);
    scene->ns[step][scene->rounds] = kvt_clock_mono_ns() - begin_ns;
    return is_done;
}

/* ---- what came out --------------------------------------------------------------------------- */

/* Source blocks hold words that say where they lie; targets hold what must not be left. */
static bool fill_pool(struct scene *scene)
{
    uint64_t words = scene->piece_bytes / 8;
    uint64_t *host = (void *)scene->pool.host;

    for (uint64_t i = 0; i < scene->pool.bytes / 8; i++)
        host[i] = i / words % 2 == 0 ? gpu_check_word(i + 1 + scene->rounds) : UINT64_MAX;
    return gpu_check_upload(scene->check, &scene->pool, scene->pool.bytes);
}

static bool count_wrong(struct scene *scene, uint64_t *ret_wrong)
{
    uint64_t words = scene->piece_bytes / 8;
    const uint64_t *host = (const void *)scene->pool.host;

    memset(scene->pool.host, 0, scene->pool.bytes);
    if (!gpu_check_download(scene->check, &scene->pool, scene->pool.bytes))
        return false;
    for (uint64_t i = 0; i < scene->pool.bytes / 8; i++) {
        uint64_t at = i / words % 2 == 0 ? i : i - words; /* target 2k + 1 of source 2k */

        *ret_wrong += host[i] == gpu_check_word(at + 1 + scene->rounds) ? 0 : 8;
    }
    return true;
}

static int compare_ns(const void *a, const void *b)
{
    const uint64_t *one = a, *two = b;

    return *one < *two ? -1 : *one > *two;
}

static void add_rows(struct scene *scene, uint64_t wrong)
{
    static const struct {
        enum step step, base;
        const char *name;
        double target;
    } rows[] = {
        {STEP_TO_SLOT, STEP_COPY, "pool -> slot (of a copy on the device)", 0},
        {STEP_TO_POOL, STEP_COPY, "slot -> pool (of a copy on the device)", 0},
        {STEP_TO_L2, STEP_PINNED_DOWN, "slot -> L2 (of a pinned copy)", GPU_CHECK_TARGET_HOST},
        {STEP_FROM_L2, STEP_PINNED_UP, "L2 -> slot (of a pinned copy)", GPU_CHECK_TARGET_HOST},
    };
    uint64_t bytes = scene->payload_bytes * scene->slots;
    struct gpu_check_row *row;

    for (uint32_t s = 0; s < STEPS; s++)
        qsort(scene->ns[s], scene->rounds, sizeof(scene->ns[s][0]), compare_ns);
    for (uint32_t i = 0; i < KVT_COUNT_OF(rows) && scene->rounds > 0; i++)
        gpu_check_row_speed(scene->check, "tier", rows[i].name,
                            (uint64_t[2]){bytes, scene->ns[rows[i].step][scene->rounds / 2]},
                            (uint64_t[2]){bytes, scene->ns[rows[i].base][scene->rounds / 2]},
                            rows[i].target);
    row = gpu_check_row(scene->check, "tier", "pool -> slot -> L2 -> slot -> pool");
    row->cases = (uint64_t)scene->rounds * scene->slots;
    row->wrong_bytes = wrong;
}

/* A round before the first is not counted: it pays for what is done once. */
void gpu_check_tier(struct gpu_check *check)
{
    struct scene *scene = calloc(1, sizeof(*scene));
    uint64_t wrong = 0;
    bool is_going;

    if (scene == NULL) {
        (void)gpu_check_failed(check, "tier", "memory of this process", 0);
        return;
    }
    is_going = scene_open(scene, check);
    for (uint32_t s = STEP_COPY; is_going && s < STEPS; s++)
        is_going = fill_pool(scene) && run_step(scene, (enum step)s);
    while (is_going && scene->rounds < ROUNDS &&
           (scene->rounds == 0 || !gpu_check_is_late(check))) {
        is_going = fill_pool(scene);
        for (uint32_t s = STEP_COPY; is_going && s < STEPS; s++)
            is_going = run_step(scene, (enum step)s);
        is_going = is_going && count_wrong(scene, &wrong);
        scene->rounds += is_going;
    }
    add_rows(scene, wrong);
    scene_close(scene);
    free(scene);
}
