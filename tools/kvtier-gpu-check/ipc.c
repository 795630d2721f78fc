/* Memory of another process: a child makes a pool and exports it, the device tier opens it, stores
 * its blocks and loads them back, and the child reads the slots in place. The child is killed in
 * the middle of a load. The next child gets the blocks that the first one had stored: L1 outlives
 * engines. Handles that are none and places outside the memory are refused, and nothing comes of
 * it.
 *
 * What a kill does to the context of the daemon is what CUDA makes of it; when it is lost, it has
 * to come back, and only the blocks may be gone. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "daemon/base/clock.h"
#include "daemon/base/doorbell.h"
#include "tiers/device/device.h"
#include "tools/kvtier-gpu-check/blocks.h"
#include "tools/kvtier-gpu-check/child.h"
#include "tools/lib/table.h"

#define HEX_BYTES (2u * KVT_CUDA_IPC_HANDLE_BYTES + 1)
#define SALT 1u /* of all children: what one stored, another can load */
#define LOADS_BEFORE_KILL 3u
#define BACK_NS_MAX (30u * KVT_NS_PER_S)

/* ---- in the child ---------------------------------------------------------------------------- */

static bool parse_handle(const char *hex, uint8_t *ret_handle)
{
    if (strspn(hex, "0123456789abcdef") < HEX_BYTES - 1)
        return false;
    for (uint32_t i = 0; i < KVT_CUDA_IPC_HANDLE_BYTES; i++) {
        const char digits[] = {hex[2 * i], hex[2 * i + 1], '\0'};

        ret_handle[i] = (uint8_t)strtoul(digits, NULL, 16);
    }
    return true;
}

/* An arena of the device tier, as an engine reads it in place: its slots. */
static bool read_arena(struct gpu_check *check, const struct gpu_check_blocks *blocks,
                       const char *hex, uint64_t *ret_wrong)
{
    struct gpu_check_memory arena = {.bytes = gpu_check_blocks_arena_bytes(blocks)}, own = {0};
    uint8_t handle[KVT_CUDA_IPC_HANDLE_BYTES];
    bool is_read = false;

    if (!parse_handle(hex, handle) ||
        !gpu_check_ok(check, check->calls->ipc_open(handle, &arena.device), "ipc_open") ||
        !gpu_check_memory_new(check, &own, arena.bytes, true))
        return false;
    arena.host = own.host;
    is_read = gpu_check_download(check, &arena, arena.bytes);
    if (is_read)
        *ret_wrong = gpu_check_blocks_count_wrong_slots(blocks, arena.host, SALT);
    gpu_check_memory_free(check, &own);
    return gpu_check_ok(check, check->calls->ipc_close(arena.device), "ipc_close") && is_read;
}

static bool read_pool(struct gpu_check *check, const struct gpu_check_blocks *blocks,
                      const struct gpu_check_memory *pool, uint64_t *ret_wrong)
{
    memset(pool->host, 0, pool->bytes);
    if (!gpu_check_download(check, pool, pool->bytes))
        return false;
    *ret_wrong = gpu_check_blocks_count_wrong(blocks, (void *)pool->host, SALT);
    return true;
}

static void say_pool(const struct gpu_check_memory *pool, const uint8_t *handle)
{
    char hex[HEX_BYTES];

    printf("pool %s %" PRIu64 "\n", kvt_text_hex(hex, handle, KVT_CUDA_IPC_HANDLE_BYTES),
           pool->bytes);
    (void)fflush(stdout);
}

int gpu_check_child_pool(struct gpu_check *check)
{
    struct gpu_check_blocks *blocks = calloc(1, sizeof(*blocks));
    uint8_t handle[KVT_CUDA_IPC_HANDLE_BYTES];
    struct gpu_check_memory pool = {0};
    struct gpu_check_shape shape;
    char line[GPU_CHECK_LINE_BYTES];
    uint64_t wrong = 0;

    if (blocks == NULL)
        return 1;
    shape = gpu_check_child_shape(check);
    gpu_check_blocks_init(blocks, check, "ipc", &shape);
    if (gpu_check_memory_new(check, &pool, blocks->pool_bytes, true)) {
        gpu_check_blocks_fill(blocks, (void *)pool.host, SALT);
        if (gpu_check_upload(check, &pool, pool.bytes) &&
            gpu_check_ok(check, check->calls->ipc_export(pool.device, handle), "ipc_export"))
            say_pool(&pool, handle);
    }
    while (!check->is_broken && fgets(line, sizeof(line), stdin) != NULL) {
        bool is_done = strncmp(line, "read ", 5) == 0 ? read_arena(check, blocks, line + 5, &wrong)
                                                      : read_pool(check, blocks, &pool, &wrong);

        if (!is_done)
            break;
        printf("wrong %" PRIu64 "\n", wrong);
        (void)fflush(stdout);
    }
    gpu_check_memory_free(check, &pool);
    free(blocks);
    if (check->is_broken)
        gpu_check_print(check, stderr);
    return check->is_broken;
}

/* ---- the device tier ------------------------------------------------------------------------- */

struct scene {
    struct gpu_check *check;
    struct gpu_check_blocks blocks;
    struct kvt_doorbell bell;
    struct kvt_tier *tier;
    struct gpu_check_child child;
    struct kvt_device_memory memory; /* of the child */
    struct kvt_region region;
    bool is_attached;
    uint32_t losses; /* of the context */
    uint64_t wrong, cases;
};

static bool failed(struct scene *scene, const char *what)
{
    return gpu_check_failed(scene->check, "ipc", what, 0);
}

static bool open_tier(struct scene *scene)
{
    bool is_small = scene->check->options.is_small;
    char gpus[16];
    struct kvt_device_config config = {
        .backend = "cuda",
        .gpus = gpus,
        .bytes = kvt_round_up(gpu_check_blocks_arena_bytes(&scene->blocks), KVT_HUGE_PAGE_BYTES),
        .is_export_allowed = true,
        .host_memory = scene->blocks.l2,
        .host_memory_bytes = scene->blocks.l2_bytes,
        .inflight_max = 2 * GPU_CHECK_SLOTS_MAX,
        .doorbell = &scene->bell,
        .headroom_bytes = is_small ? KVT_MIB : 256 * KVT_MIB,
        .staging_bytes = (is_small ? 4 : 64) * KVT_MIB,
        .inflight_bytes_max = 256 * KVT_MIB,
        .streams = 2,
        .crossover_bytes = 256u << 10,
        .cpu_threads = GPU_CHECK_CPU_THREADS,
        .retry_min_ns = 100 * KVT_NS_PER_MS,
        .retry_max_ns = KVT_NS_PER_S};
    struct kvt_device_report report;

    (void)snprintf(gpus, sizeof(gpus), "%d", scene->check->options.device);
    if (kvt_device_open(&scene->tier, &config, &report) != 0)
        return failed(scene, report.why[0] != '\0' ? report.why : "kvt_device_open");
    scene->blocks.tier = scene->tier;
    return gpu_check_ok(scene->check, scene->check->calls->set_device(scene->check->options.device),
                        "set_device");
}

static bool parse_pool(const char *line, struct kvt_device_memory *memory)
{
    char hex[HEX_BYTES];

    static_assert(HEX_BYTES == 129, "the width in the format");
    return sscanf(line, "pool %128[0-9a-f] %" SCNu64, hex, &memory->bytes) == 2 &&
           parse_handle(hex, memory->handle);
}

static bool start_child(struct scene *scene)
{
    scene->memory = (struct kvt_device_memory){0};
    memcpy(scene->memory.uuid, scene->check->info.uuid, KVT_CUDA_UUID_BYTES);
    if (!gpu_check_child_start(scene->check, "ipc", "pool", &scene->child))
        return false;
    if (!gpu_check_child_hear(&scene->child) || !parse_pool(scene->child.line, &scene->memory))
        return failed(scene, "the other process has no pool");
    return true;
}

static bool attach(struct scene *scene)
{
    char why[KVT_DEVICE_WHY_BYTES] = "";

    if (kvt_device_region_open(scene->tier, &scene->memory, &scene->region, why) != 0)
        return failed(scene, why);
    scene->is_attached = true;
    return gpu_check_blocks_bind(&scene->blocks, &scene->region);
}

static void detach(struct scene *scene)
{
    if (scene->is_attached)
        kvt_device_region_close(scene->tier, &scene->region);
    scene->is_attached = false;
}

static bool child_counts(struct scene *scene)
{
    uint64_t wrong;

    if (!gpu_check_child_say(&scene->child, "check\n") || !gpu_check_child_hear(&scene->child) ||
        sscanf(scene->child.line, "wrong %" SCNu64, &wrong) != 1)
        return failed(scene, "the other process does not answer");
    scene->wrong += wrong;
    scene->cases += scene->blocks.shape.slots;
    return true;
}

/* ---- what is tried --------------------------------------------------------------------------- */

static void try_bad_regions(struct scene *scene)
{
    struct kvt_device_memory outside = scene->memory, none = scene->memory;
    struct kvt_region region = {0};
    char why[KVT_DEVICE_WHY_BYTES] = "";
    struct gpu_check_row *row;
    int at, handle;

    outside.offset_bytes = KVT_HUGE_PAGE_BYTES + scene->memory.bytes;
    memset(none.handle, 0xa5, sizeof(none.handle));
    at = kvt_device_region_open(scene->tier, &outside, &region, why);
    if (at == 0)
        kvt_device_region_close(scene->tier, &region);
    handle = kvt_device_region_open(scene->tier, &none, &region, why);
    if (handle == 0)
        kvt_device_region_close(scene->tier, &region);
    row = gpu_check_row(scene->check, "ipc", "bad handle and bad place are refused");
    row->cases = 2;
    row->is_failed = at != KVT_REGION_E_OUTSIDE || handle != KVT_REGION_E_HANDLE;
    (void)snprintf(row->text, sizeof(row->text), "%.150s", why);
}

/* What was stored, read by the child where it lies. */
static bool try_in_place(struct scene *scene)
{
    char hex[HEX_BYTES], line[GPU_CHECK_LINE_BYTES];
    struct kvt_device_export export;
    struct gpu_check_row *row;
    uint64_t wrong;

    if (!kvt_device_export(scene->tier, 0, &export))
        return failed(scene, "the arena is not exported");
    (void)snprintf(line, sizeof(line), "read %s\n",
                   kvt_text_hex(hex, export.handle, KVT_CUDA_IPC_HANDLE_BYTES));
    if (!gpu_check_child_say(&scene->child, line) || !gpu_check_child_hear(&scene->child) ||
        sscanf(scene->child.line, "wrong %" SCNu64, &wrong) != 1)
        return failed(scene, "the other process cannot read in place");
    row = gpu_check_row(scene->check, "ipc", "another process reads L1 in place");
    row->cases = scene->blocks.shape.slots;
    row->wrong_bytes = wrong;
    return true;
}

/* Loads, one batch after another, until some came back; then the child is gone, and the rest has to
 * come back all the same: done, or not. */
static bool kill_midway(struct scene *scene)
{
    struct gpu_check_blocks *blocks = &scene->blocks;
    uint32_t seen = 1;

    for (uint32_t i = 0; i < LOADS_BEFORE_KILL; i++)
        if (!gpu_check_blocks_move(blocks, GPU_CHECK_LOAD))
            return false;
    gpu_check_blocks_make(blocks, GPU_CHECK_LOAD);
    if (!gpu_check_blocks_submit(blocks) || !gpu_check_blocks_reap(blocks, seen))
        return false;
    gpu_check_child_kill(&scene->child);
    if (scene->check->hooks.killed != NULL)
        scene->check->hooks.killed(scene->check);
    if (!gpu_check_blocks_reap(blocks, blocks->shape.slots - seen))
        return false;
    /* And some that begin when it is gone. */
    gpu_check_blocks_make(blocks, GPU_CHECK_LOAD);
    if (!gpu_check_blocks_submit(blocks) || !gpu_check_blocks_reap(blocks, blocks->shape.slots))
        return false;
    detach(scene);
    return true;
}

static uint32_t incarnation_of(const struct scene *scene)
{
    return atomic_load_explicit(&scene->tier->zones[0].counters->incarnation, memory_order_acquire);
}

/* In service again, if it was lost. */
static bool wait_until_back(struct scene *scene)
{
    const struct timespec pause = {.tv_nsec = 10 * 1000 * 1000};
    uint64_t end_ns = kvt_clock_mono_ns() + BACK_NS_MAX;
    struct kvt_device_gpu gpu;

    scene->losses = incarnation_of(scene);
    while (kvt_tier_health(scene->tier) != KVT_TIER_HEALTH_OK) {
        if (kvt_clock_mono_ns() > end_ns)
            return failed(scene, kvt_device_gpu(scene->tier, 0, &gpu) ? gpu.why : "it stays lost");
        (void)nanosleep(&pause, NULL);
    }
    return true;
}

static bool go_on(struct scene *scene)
{
    struct gpu_check_row *row;
    bool is_right;

    if (!wait_until_back(scene) || !start_child(scene) || !attach(scene))
        return false;
    if (scene->losses > 0 && !gpu_check_blocks_move(&scene->blocks, GPU_CHECK_STORE))
        return false;
    is_right = gpu_check_blocks_move(&scene->blocks, GPU_CHECK_LOAD) && child_counts(scene);
    row = gpu_check_row(scene->check, "ipc", "an engine is killed, the next goes on");
    row->cases = scene->cases;
    row->wrong_bytes = scene->wrong;
    row->is_failed = !is_right;
    (void)snprintf(row->text, sizeof(row->text), "%s",
                   scene->losses > 0 ? "the kill cost the context; it was taken back"
                                     : "what the first had stored was still there");
    return is_right;
}

static void scene_close(struct scene *scene)
{
    gpu_check_child_kill(&scene->child);
    if (scene->tier != NULL) {
        detach(scene);
        scene->losses = incarnation_of(scene);
    }
    scene->tier = kvt_tier_close(scene->tier);
    gpu_check_blocks_close_l2(&scene->blocks);
    kvt_doorbell_deinit(&scene->bell);
    if (scene->losses > 0) { /* a reset took this thread's stream along */
        scene->check->stream = scene->check->event = NULL;
        (void)gpu_check_open(scene->check);
    }
}

void gpu_check_ipc(struct gpu_check *check)
{
    struct scene *scene = calloc(1, sizeof(*scene));
    struct gpu_check_shape shape;
    struct gpu_check_row *row;

    if (!check->info.has_ipc) {
        row = gpu_check_row(check, "ipc", "another process's memory");
        (void)snprintf(row->text, sizeof(row->text), "this GPU has no IPC handles here");
        free(scene);
        return;
    }
    if (scene == NULL) {
        (void)gpu_check_failed(check, "ipc", "memory of this process", 0);
        return;
    }
    scene->check = check;
    shape = gpu_check_child_shape(check);
    gpu_check_blocks_init(&scene->blocks, check, "ipc", &shape);
    if (kvt_doorbell_init(&scene->bell) < 0)
        (void)failed(scene, "a doorbell");
    else if (gpu_check_blocks_open_l2(&scene->blocks) && open_tier(scene) && start_child(scene) &&
             attach(scene) && gpu_check_blocks_move(&scene->blocks, GPU_CHECK_STORE) &&
             gpu_check_blocks_move(&scene->blocks, GPU_CHECK_LOAD) && child_counts(scene) &&
             try_in_place(scene)) {
        try_bad_regions(scene);
        if (kill_midway(scene))
            (void)go_on(scene);
    }
    scene_close(scene);
    free(scene);
}
