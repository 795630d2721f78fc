/* One GPU of the device tier at work, as the engine drives it: blocks from a pool into slots, from
 * slots to L2, back into slots, and into other blocks of the pool. The thread, the staging of
 * lists, the checks and the seals are all in it; beside it stand the device's own copy and pinned
 * copies over the bus, of as many bytes, in the same rounds.
 *
 * The speed is that of one layout, as vLLM has it. The bytes of others are looked at, too: what is
 * contiguous goes another way than what is scattered, and what is quantised one of its own. */
#include <stdlib.h>
#include <string.h>

#include "daemon/base/clock.h"
#include "daemon/base/doorbell.h"
#include "tiers/device/gpu.h"
#include "tools/kvtier-gpu-check/blocks.h"

#define ROUNDS 5u
#define ROUNDS_OF_OTHERS 2u

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
    struct gpu_check_blocks blocks;
    struct kvt_doorbell bell;
    struct kvt_gpu *gpu;
    bool is_pinned;
    bool is_timed;                /* beside copies of as many bytes */
    struct gpu_check_memory pool; /* with a host side: the whole of it is looked at */
    struct gpu_check_memory other;
    uint64_t ns[STEPS][ROUNDS];
    uint32_t rounds;
};

/* Of contiguous bytes from which on the copy engine is used: large, and reached by small runs. */
#define CROSSOVER_BYTES(is_small) ((is_small) ? 16u << 10 : 256u << 10)

static_assert(GPU_CHECK_SLOT_ALIGN_BYTES == KVT_GPU_SLOT_ALIGN_BYTES, "slots lie as the GPU's");

static bool open_pool(struct scene *scene)
{
    struct kvt_region region;

    if (!gpu_check_memory_new(scene->check, &scene->pool, scene->blocks.pool_bytes, true))
        return false;
    if (scene->is_timed &&
        !gpu_check_memory_new(scene->check, &scene->other, scene->blocks.pool_bytes / 2, true))
        return false;
    region = (struct kvt_region){.base = (uint8_t *)(uintptr_t)scene->pool.device,
                                 .bytes = scene->pool.bytes,
                                 .is_gpu = true,
                                 .allocation = scene->pool.device};
    return gpu_check_blocks_bind(&scene->blocks, &region);
}

static bool open_gpu(struct scene *scene)
{
    const struct gpu_check_options *options = &scene->check->options;
    struct kvt_gpu_config config = {
        .calls = scene->check->calls,
        .device = options->device,
        .info = scene->check->info,
        .arena_bytes =
            kvt_round_up(gpu_check_blocks_arena_bytes(&scene->blocks), KVT_HUGE_PAGE_BYTES),
        .staging_bytes = options->is_small ? 4u << 20 : 64u << 20,
        .streams = 2,
        .inflight_bytes_max = 256u << 20,
        .inflight_max = 2 * GPU_CHECK_SLOTS_MAX,
        .crossover_bytes = CROSSOVER_BYTES(options->is_small),
        .cpu_threads = GPU_CHECK_CPU_THREADS,
        .host_memory = scene->blocks.l2,
        .host_memory_bytes = scene->blocks.l2_bytes,
        .is_host_pinned = true,
        .doorbell = &scene->bell};
    int error = 0;

    if (kvt_gpu_open(&scene->gpu, &config, &error) < 0)
        return gpu_check_failed(scene->check, "tier", "kvt_gpu_open", error);
    scene->blocks.tier = kvt_gpu_tier(scene->gpu);
    return gpu_check_ok(scene->check, scene->check->calls->set_device(options->device),
                        "set_device");
}

static bool scene_open(struct scene *scene, struct gpu_check *check,
                       const struct gpu_check_shape *shape, bool is_timed)
{
    scene->check = check;
    scene->is_timed = is_timed;
    gpu_check_blocks_init(&scene->blocks, check, "tier", shape);
    if (kvt_doorbell_init(&scene->bell) < 0)
        return gpu_check_failed(check, "tier", "a doorbell", 0);
    if (!open_pool(scene) || !gpu_check_blocks_open_l2(&scene->blocks))
        return false;
    scene->is_pinned = gpu_check_ok(
        check, check->calls->pin(scene->blocks.l2, scene->blocks.l2_bytes), "pinning L2");
    return scene->is_pinned && open_gpu(scene);
}

static void scene_close(struct scene *scene)
{
    const struct kvt_cuda_calls *calls = scene->check->calls;

    scene->gpu = kvt_gpu_close(scene->gpu);
    (void)calls->set_device(scene->check->options.device);
    if (scene->is_pinned)
        (void)calls->unpin(scene->blocks.l2);
    gpu_check_blocks_close_l2(&scene->blocks);
    gpu_check_memory_free(scene->check, &scene->pool);
    gpu_check_memory_free(scene->check, &scene->other);
    kvt_doorbell_deinit(&scene->bell);
}

static bool do_step(struct scene *scene, enum step step)
{
    struct gpu_check *check = scene->check;
    uint64_t half = scene->pool.bytes / 2;

    switch (step) {
    case STEP_COPY:
        return gpu_check_ok(check,
                            check->calls->copy(scene->other.device, scene->pool.device, half,
                                               KVT_CUDA_D2D, check->stream),
                            "copy") &&
               gpu_check_wait(check);
    case STEP_PINNED_DOWN:
        return gpu_check_download(check, &scene->other, half);
    case STEP_PINNED_UP:
        return gpu_check_upload(check, &scene->other, half);
    case STEP_TO_SLOT:
        return gpu_check_blocks_move(&scene->blocks, GPU_CHECK_STORE);
    case STEP_TO_L2:
        return gpu_check_blocks_move(&scene->blocks, GPU_CHECK_TO_L2);
    case STEP_FROM_L2:
        return gpu_check_blocks_move(&scene->blocks, GPU_CHECK_FROM_L2);
    default:
        return gpu_check_blocks_move(&scene->blocks, GPU_CHECK_LOAD);
    }
}

static bool run_step(struct scene *scene, enum step step)
{
    bool is_compared = step == STEP_COPY || step == STEP_PINNED_DOWN || step == STEP_PINNED_UP;
    uint64_t begin_ns = kvt_clock_mono_ns();
    bool is_done = (is_compared && !scene->is_timed) || do_step(scene, step);

    scene->ns[step][scene->rounds] = kvt_clock_mono_ns() - begin_ns;
    return is_done;
}

static bool run_round(struct scene *scene, uint64_t salt, uint64_t *ret_wrong)
{
    void *host = scene->pool.host;

    gpu_check_blocks_fill(&scene->blocks, host, salt);
    if (!gpu_check_upload(scene->check, &scene->pool, scene->pool.bytes))
        return false;
    for (uint32_t s = STEP_COPY; s < STEPS; s++)
        if (!run_step(scene, (enum step)s))
            return false;
    memset(host, 0, scene->pool.bytes);
    if (!gpu_check_download(scene->check, &scene->pool, scene->pool.bytes))
        return false;
    *ret_wrong += gpu_check_blocks_count_wrong(&scene->blocks, host, salt);
    return true;
}

static int compare_ns(const void *a, const void *b)
{
    const uint64_t *one = a, *two = b;

    return *one < *two ? -1 : *one > *two;
}

static void add_row_of_bytes(struct scene *scene, uint64_t rounds, uint64_t wrong)
{
    const struct kvt_gpu_counters *counters = kvt_gpu_counters(scene->gpu);
    struct gpu_check_row *row = gpu_check_row(scene->check, "tier", scene->blocks.shape.name);

    row->cases = rounds * scene->blocks.shape.slots;
    row->wrong_bytes = wrong;
    (void)snprintf(row->text, sizeof(row->text),
                   "pool, slot, L2, slot, pool; by kernels %llu, by the copy engine %llu",
                   (unsigned long long)(counters->path_transfers[KVT_GPU_FROM_ENGINE_KERNEL] +
                                        counters->path_transfers[KVT_GPU_TO_ENGINE_KERNEL]),
                   (unsigned long long)(counters->path_transfers[KVT_GPU_FROM_ENGINE_COPY] +
                                        counters->path_transfers[KVT_GPU_TO_ENGINE_COPY]));
}

static void add_rows_of_speed(struct scene *scene)
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
    uint64_t bytes = scene->blocks.payload_bytes * scene->blocks.shape.slots;

    for (uint32_t s = 0; s < STEPS; s++)
        qsort(scene->ns[s], scene->rounds, sizeof(scene->ns[s][0]), compare_ns);
    for (uint32_t i = 0; i < KVT_COUNT_OF(rows) && scene->rounds > 0; i++)
        gpu_check_row_speed(scene->check, "tier", rows[i].name,
                            (uint64_t[2]){bytes, scene->ns[rows[i].step][scene->rounds / 2]},
                            (uint64_t[2]){bytes, scene->ns[rows[i].base][scene->rounds / 2]},
                            rows[i].target);
}

/* The first round's times do not count: it pays for what is done once. Its bytes do. */
static void run_shape(struct gpu_check *check, const struct gpu_check_shape *shape, bool is_timed)
{
    uint32_t rounds_max = is_timed ? ROUNDS : ROUNDS_OF_OTHERS;
    struct scene *scene = calloc(1, sizeof(*scene));
    uint64_t wrong = 0, salt = 0;
    bool is_going;

    if (scene == NULL) {
        (void)gpu_check_failed(check, "tier", "memory of this process", 0);
        return;
    }
    is_going = scene_open(scene, check, shape, is_timed) && run_round(scene, salt, &wrong);
    salt += is_going;
    while (is_going && scene->rounds < rounds_max &&
           (scene->rounds == 0 || !gpu_check_is_late(check))) {
        is_going = run_round(scene, salt, &wrong);
        salt += is_going;
        scene->rounds += is_going;
    }
    if (is_timed)
        add_rows_of_speed(scene);
    if (scene->gpu != NULL)
        add_row_of_bytes(scene, salt, wrong);
    scene_close(scene);
    free(scene);
}

/* FP8 and INT8 planes of 16 tokens, 4 heads of 32 elements: 4 KiB raw. */
#define QUANT(kind_, order_)                                                                       \
    {                                                                                              \
        .kind = (kind_), .elem = KVT_ELEM_BF16, .order = (order_), .plane_tokens = 16, .heads = 4, \
        .head_dim = 32                                                                             \
    }

static void run_others(struct gpu_check *check)
{
    uint32_t slots = check->options.is_small ? 4 : 32;
    uint32_t large_bytes = 2 * CROSSOVER_BYTES(check->options.is_small);
    const struct gpu_check_shape shapes[] = {
        {.name = "layer first, small pieces", .pieces = 64, .piece_bytes = 256},
        {.name = "layer first, pieces not of 16 B", .pieces = 32, .piece_bytes = 328},
        {.name = "layer first, large pieces", .pieces = 2, .piece_bytes = large_bytes},
        {.name = "page first",
         .pieces = 32,
         .piece_bytes = large_bytes / 32,
         .is_page_first = true},
        {.name = "heads of other ranks between pieces",
         .pieces = 32,
         .piece_bytes = 2048,
         .parts = 4},
        {.name = "heads of other ranks between pages",
         .pieces = 32,
         .piece_bytes = 1024,
         .parts = 2,
         .is_page_first = true},
        {.name = "quantised to FP8, layer first",
         .pieces = 16,
         .piece_bytes = 4096,
         .quant = QUANT(KVT_QUANT_FP8_E4M3, KVT_ORDER_TOKENS_FIRST)},
        {.name = "quantised to INT8, page first",
         .pieces = 8,
         .piece_bytes = 8192,
         .is_page_first = true,
         .quant = QUANT(KVT_QUANT_INT8, KVT_ORDER_HEADS_FIRST)},
    };

    for (uint32_t i = 0; i < KVT_COUNT_OF(shapes) && !check->is_broken; i++) {
        struct gpu_check_shape shape = shapes[i];

        shape.slots = slots;
        shape.parts = KVT_MAX(shape.parts, 1u);
        if (gpu_check_is_late(check)) {
            struct gpu_check_row *row = gpu_check_row(check, "tier", shape.name);

            (void)snprintf(row->text, sizeof(row->text), "no time left for it");
        } else
            run_shape(check, &shape, false);
    }
}

void gpu_check_tier(struct gpu_check *check)
{
    struct gpu_check_shape shape = {.name = "layer first",
                                    .slots = check->options.is_small ? 8 : GPU_CHECK_SLOTS_MAX,
                                    .pieces = GPU_CHECK_PIECES_MAX,
                                    .piece_bytes = check->options.is_small ? 512 : 8192,
                                    .parts = 1};
    uint64_t now_ns = kvt_clock_mono_ns(), end_ns = check->part_end_ns;

    /* Half of the time is for the speed. */
    check->part_end_ns = end_ns > now_ns ? now_ns + (end_ns - now_ns) / 2 : now_ns;
    run_shape(check, &shape, true);
    check->part_end_ns = end_ns;
    if (!check->is_broken)
        run_others(check);
}
