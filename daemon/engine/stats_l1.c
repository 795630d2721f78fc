/* Stats of L1: what it is made of, and its GPUs, gathered when asked. */
#include <stdio.h>
#include <string.h>

#include "daemon/engine/internal.h"
#include "tiers/device/device.h"
#include "tiers/device/gpu.h"

static_assert(KVT_API_GPUS_MAX == KVT_DEVICE_GPUS_MAX, "every GPU has its row");
static_assert(KVT_API_GPU_OK == (int)KVT_GPU_OK && KVT_API_GPU_LOST == (int)KVT_GPU_LOST &&
                  KVT_API_GPU_REFUSED == (int)KVT_GPU_REFUSED,
              "api.h and device.h say the same");

static const char *const path_names[KVT_GPU_PATHS] = {
    [KVT_GPU_FROM_ENGINE_KERNEL] = "from_engine_kernel",
    [KVT_GPU_FROM_ENGINE_COPY] = "from_engine_copy",
    [KVT_GPU_TO_ENGINE_KERNEL] = "to_engine_kernel",
    [KVT_GPU_TO_ENGINE_COPY] = "to_engine_copy",
    [KVT_GPU_TO_HOST] = "to_host",
    [KVT_GPU_FROM_HOST] = "from_host",
    [KVT_GPU_STAGED_UP] = "staged_up",
    [KVT_GPU_STAGED_DOWN] = "staged_down",
};

static uint64_t get(const _Atomic uint64_t *counter)
{
    return atomic_load_explicit(counter, memory_order_relaxed);
}

static struct kvt_text text_of(const char *text, size_t bytes_max)
{
    return (struct kvt_text){text, (uint32_t)strnlen(text, bytes_max)};
}

static void report_stats(const struct kvt_engine_l1 *l1, struct kvt_api_l1_stats *to)
{
    const struct kvt_device_report *report = l1->report;

    *to = (struct kvt_api_l1_stats){.is_export_allowed = l1->is_export_allowed,
                                    .streams = l1->streams,
                                    .inflight_bytes_max = l1->inflight_bytes_max,
                                    .crossover_bytes = l1->crossover_bytes};
    if (l1->backend != NULL)
        to->backend = text_of(l1->backend, 16);
    if (report == NULL)
        return;
    to->has_cuda = report->has_cuda;
    to->driver_version = (uint32_t)KVT_MAX(report->driver_version, 0);
    to->runtime_version = (uint32_t)KVT_MAX(report->runtime_version, 0);
    to->is_host_pinned = report->is_host_pinned;
    to->pin_why = text_of(report->pin_why, sizeof(report->pin_why));
    to->why = text_of(report->why, sizeof(report->why));
}

/* What its thread counted. */
static bool counter_stats(struct kvt_op *op, const struct kvt_gpu_counters *from,
                          struct kvt_api_gpu_stats *to)
{
    to->paths = kvt_arena_array(op->arena, KVT_GPU_PATHS, sizeof(to->paths[0]));
    if (to->paths == NULL)
        return false;
    to->paths_count = KVT_GPU_PATHS;
    for (uint32_t i = 0; i < KVT_GPU_PATHS; i++)
        to->paths[i] = (struct kvt_api_gpu_path){
            .name = path_names[i],
            .bytes = get(&from->path_bytes[i]),
            .transfers = get(&from->path_transfers[i]),
        };
    to->inflight_bytes = get(&from->inflight_bytes);
    to->launches = get(&from->launches);
    to->launched_jobs = get(&from->launched_jobs);
    to->checked_bytes = get(&from->checked_bytes);
    to->unchecked_transfers = get(&from->unchecked_transfers);
    to->bad_checks = get(&from->bad_checks);
    to->quantised_bytes = get(&from->quantised_bytes);
    to->dequantised_bytes = get(&from->dequantised_bytes);
    to->losses = get(&from->losses);
    to->revivals = get(&from->revivals);
    to->last_error =
        (uint32_t)KVT_MAX(atomic_load_explicit(&from->last_error, memory_order_relaxed), 0);
    return true;
}

/* @from is in the arena: texts point into it. */
static bool gpu_stats(const struct kvt_engine *engine, struct kvt_op *op,
                      const struct kvt_store_stats *store, uint32_t idx,
                      const struct kvt_device_gpu *from, struct kvt_api_gpu_stats *to)
{
    *to = (struct kvt_api_gpu_stats){
        .index = from->index < 0 ? KVT_API_GPU_INDEX_NONE : (uint32_t)from->index,
        .name = text_of(from->info.name, sizeof(from->info.name)),
        .pci = text_of(from->info.pci, sizeof(from->info.pci)),
        .numa_node = from->numa_node,
        .sm = from->info.sm,
        .memory_bytes = from->info.total_bytes,
        .state = from->state,
        .why = text_of(from->why, sizeof(from->why)),
        .has_ipc = from->info.has_ipc,
        .is_exported = from->is_exported,
        .is_host_pinned = from->is_host_pinned,
        .arena_bytes = from->arena_bytes,
        .staging_bytes = from->staging_bytes,
    };
    memcpy(to->uuid, from->info.uuid, sizeof(to->uuid));
    if (from->state == KVT_GPU_LOST && from->lost_ns != 0 && engine->now_ns > from->lost_ns)
        to->lost_ns = engine->now_ns - from->lost_ns;
    if (from->state != KVT_GPU_REFUSED && idx < store->l1_zones_count) {
        to->used_bytes = store->l1_zones[idx].slab.taken_bytes;
        to->slab_bytes = store->l1_zones[idx].slab.slabs_bytes;
        to->slots = store->l1_zones[idx].slab.taken_slots;
    }
    if (from->counters != NULL && !counter_stats(op, from->counters, to))
        return false;
    return from->tier_counters == NULL ||
           eng_error_stats(op, from->tier_counters, &to->errors, &to->errors_count);
}

/* The report is what held at the start. False: the arena is full. */
static bool pin_stats(const struct kvt_tier *tier, struct kvt_op *op)
{
    struct kvt_api_l1_stats *to = &op->ans.stats.l1;
    struct kvt_device_host_pin *pin = kvt_arena_alloc(op->arena, sizeof(*pin));

    if (pin == NULL)
        return false;
    if (!kvt_device_host_pin(tier, pin))
        return true;
    to->is_host_pinned = pin->is_pinned;
    to->pin_why = text_of(pin->why, sizeof(pin->why));
    return true;
}

/* GPU @idx of L1: of the tier, used or refused; without one those that kept it from being there. */
static bool find_gpu(const struct kvt_engine *engine, uint32_t idx, struct kvt_device_gpu *ret_gpu)
{
    const struct kvt_tier *tier = engine->config.store.tiers[KVT_TIER_DEVICE];
    const struct kvt_device_report *report = engine->config.l1.report;

    if (tier != NULL || report == NULL)
        return kvt_device_gpu(tier, idx, ret_gpu);
    if (idx >= report->refused_count)
        return false;
    *ret_gpu = report->refused[idx];
    return true;
}

bool eng_l1_stats(const struct kvt_engine *engine, struct kvt_op *op,
                  const struct kvt_store_stats *store)
{
    struct kvt_ans_stats *ans = &op->ans.stats;
    struct kvt_device_gpu *gpus;
    uint32_t count = 0;

    report_stats(&engine->config.l1, &ans->l1);
    if (engine->config.gpu_memory.export_arena != NULL)
        ans->l1.held_bytes_per_engine_max = engine->config.held_bytes_per_engine_max;
    gpus = kvt_arena_array(op->arena, KVT_API_GPUS_MAX, sizeof(gpus[0]));
    ans->gpus = kvt_arena_array(op->arena, KVT_API_GPUS_MAX, sizeof(ans->gpus[0]));
    if (gpus == NULL || ans->gpus == NULL ||
        !pin_stats(engine->config.store.tiers[KVT_TIER_DEVICE], op))
        return false;
    while (count < KVT_API_GPUS_MAX && find_gpu(engine, count, &gpus[count]))
        count++;
    for (uint32_t i = 0; i < count; i++)
        if (!gpu_stats(engine, op, store, i, &gpus[i], &ans->gpus[i]))
            return false;
    ans->gpus_count = count;
    return true;
}

/* ---- in one line ------------------------------------------------------------------------------
 */

#define GPU_NAME_BYTES 96u

/* "GPU 3 NVIDIA H200". One that nobody has is known by its UUID alone, which the reason says. */
static void name_gpu(const struct kvt_device_gpu *gpu, char ret_name[GPU_NAME_BYTES])
{
    if (gpu->index < 0)
        (void)snprintf(ret_name, GPU_NAME_BYTES, "GPU");
    else
        (void)snprintf(ret_name, GPU_NAME_BYTES, "GPU %d%s%.64s", gpu->index,
                       gpu->info.name[0] != '\0' ? " " : "", gpu->info.name);
}

size_t eng_l1_describe(const struct kvt_engine *engine, const char *before, char *ret_text,
                       size_t size)
{
    static const char *const states[] = {
        [KVT_GPU_LOST] = "is lost", [KVT_GPU_REFUSED] = "is not used"};
    const struct kvt_tier *tier = engine->config.store.tiers[KVT_TIER_DEVICE];
    const struct kvt_device_report *report = engine->config.l1.report;
    char name[GPU_NAME_BYTES];
    struct kvt_device_gpu gpu;
    size_t bytes = 0;

    ret_text[0] = '\0';
    if (report != NULL && report->why[0] != '\0')
        bytes += (size_t)snprintf(ret_text, size, "%sL1 is off: %s", before, report->why);
    for (uint32_t i = 0; i < KVT_API_GPUS_MAX && kvt_device_gpu(tier, i, &gpu); i++) {
        if (gpu.state == KVT_GPU_OK || bytes >= size)
            continue;
        name_gpu(&gpu, name);
        bytes += (size_t)snprintf(ret_text + bytes, size - bytes, "%s%s %s: %s",
                                  bytes > 0 ? ", " : before, name, states[gpu.state], gpu.why);
    }
    return KVT_MIN(bytes, size - 1);
}

/* ---- the same as counters, with a label -------------------------------------------------------
 */

#define LABEL_BYTES 48u

static const struct {
    const char *name;
    size_t offset; /* of the u64 in struct kvt_api_gpu_stats */
} gpu_counters[] = {
#define GPU_COUNTER(name)                                                                          \
    {                                                                                              \
        "gpu_" #name, offsetof(struct kvt_api_gpu_stats, name)                                     \
    }
    GPU_COUNTER(losses),        GPU_COUNTER(revivals),        GPU_COUNTER(launches),
    GPU_COUNTER(launched_jobs), GPU_COUNTER(checked_bytes),   GPU_COUNTER(unchecked_transfers),
    GPU_COUNTER(bad_checks),    GPU_COUNTER(quantised_bytes), GPU_COUNTER(dequantised_bytes),
#undef GPU_COUNTER
};

uint32_t eng_gpu_counters_max(const struct kvt_ans_stats *ans)
{
    return ans->gpus_count * (KVT_COUNT_OF(gpu_counters) + 2 * KVT_GPU_PATHS);
}

static const char *label_of(struct kvt_op *op, uint32_t gpu, const char *path)
{
    char *label = kvt_arena_alloc(op->arena, LABEL_BYTES);

    if (label != NULL)
        (void)snprintf(label, LABEL_BYTES, "gpu=%u%s%s", gpu,
                       path == NULL ? "" : ",path=", path == NULL ? "" : path);
    return label;
}

static bool put(struct kvt_op *op, const struct kvt_api_gpu_stats *gpu, const char *path,
                const char *name, uint64_t value, struct kvt_api_counter *ret_counter)
{
    *ret_counter = (struct kvt_api_counter){name, label_of(op, gpu->index, path), value};
    return ret_counter->label != NULL;
}

/* Of all GPUs: @is_bytes: what moved, else in how many transfers. */
static bool put_paths(struct kvt_op *op, bool is_bytes, struct kvt_api_counter *at, uint32_t *count)
{
    const struct kvt_ans_stats *ans = &op->ans.stats;

    for (uint32_t i = 0; i < ans->gpus_count; i++)
        for (uint32_t k = 0; k < ans->gpus[i].paths_count; k++) {
            const struct kvt_api_gpu_path *path = &ans->gpus[i].paths[k];

            if (!put(op, &ans->gpus[i], path->name, is_bytes ? "gpu_moved_bytes" : "gpu_transfers",
                     is_bytes ? path->bytes : path->transfers, &at[(*count)++]))
                return false;
        }
    return true;
}

/* Those of one name are neighbours, as everywhere. */
bool eng_gpu_counters(struct kvt_op *op, struct kvt_api_counter *at, uint32_t *count)
{
    const struct kvt_ans_stats *ans = &op->ans.stats;

    for (size_t c = 0; c < KVT_COUNT_OF(gpu_counters); c++)
        for (uint32_t i = 0; i < ans->gpus_count; i++) {
            const struct kvt_api_gpu_stats *gpu = &ans->gpus[i];
            uint64_t value;

            if (gpu->state == KVT_API_GPU_REFUSED)
                continue;
            memcpy(&value, (const char *)gpu + gpu_counters[c].offset, sizeof(value));
            if (!put(op, gpu, NULL, gpu_counters[c].name, value, &at[(*count)++]))
                return false;
        }
    return put_paths(op, true, at, count) && put_paths(op, false, at, count);
}
