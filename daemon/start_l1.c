#include "daemon/start_l1.h"

#include <stdio.h>
#include <string.h>

#include "daemon/base/log.h"
#include "daemon/base/size.h"
#include "daemon/start.h"
#include "tiers/host/host.h"

/* Transfers that L1 takes before it says "full": enough to keep it busy, little enough that a
 * deadline means something. */
#define INFLIGHT_MAX 1024u

static struct kvt_device_config device_config(struct kvt_daemon *daemon)
{
    const struct kvt_config *config = daemon->config;
    const struct kvt_tier *l2 = daemon->tiers[KVT_TIER_HOST];
    bool is_cuda = config->l1.backend == KVT_CONFIG_L1_CUDA;
    uint64_t bytes = is_cuda ? config->l1.size.bytes
                             : kvt_config_share_bytes(&config->l1.size, kvt_config_ram_bytes());

    return (struct kvt_device_config){
        .backend = is_cuda ? "cuda" : "host",
        .bytes = kvt_round_up(bytes, KVT_HUGE_PAGE_BYTES),
        .pct = is_cuda ? (uint32_t)(config->l1.size.milli_pct / 1000) : 0,
        .host_memory = l2 == NULL ? NULL : kvt_host_memory(l2),
        .host_memory_bytes = l2 == NULL ? 0 : l2->capacity_bytes,
        .inflight_max = INFLIGHT_MAX,
        .doorbell = &daemon->doorbell,
        .gpus = config->l1.gpus,
        .headroom_bytes = config->l1.headroom_bytes,
        .staging_bytes = kvt_round_up(config->l1.staging_bytes, KVT_HUGE_PAGE_BYTES),
        .inflight_bytes_max = config->l1.inflight_bytes,
        .streams = config->l1.streams,
        .crossover_bytes = (uint32_t)config->l1.crossover_bytes,
        .cpu_threads = config->l1.cpu_threads,
        .retry_min_ns = config->l1.retry_min_ns,
        .retry_max_ns = config->l1.retry_max_ns,
        .is_export_allowed = config->l1.is_export,
        .sysfs = "/sys",
        .found = daemon->l1.found,
    };
}

/* One line a GPU; of one that is not there there is no more than the reason. */
static void log_refused(const struct kvt_device_gpu *gpu, const char *what)
{
    char uuid[KVT_GPU_UUID_TEXT_BYTES];

    kvt_gpu_uuid_text(gpu->info.uuid, uuid);
    if (gpu->info.name[0] == '\0')
        kvt_log_warn("L1: %s: %s", what, gpu->why);
    else
        kvt_log_warn("L1: %s: %s (%s, %s)", what, gpu->why, gpu->info.name, uuid);
}

/* One line for all of them. */
static void log_left_out(const struct kvt_device_report *report)
{
    if (report->left_out_count > 0)
        kvt_log_warn("L1: %u of %u GPUs are left out: L1 takes %u at most: name in tiers.l1.gpus "
                     "which",
                     report->left_out_count, report->gpus_count, KVT_ZONES_MAX);
}

/* No GPU is used. Of one that was found: which, and why; of several the sum and a line each. */
static void log_none(const struct kvt_device_report *report)
{
    if (report->refused_count == 1) {
        log_refused(&report->refused[0], "off");
        return;
    }
    kvt_log_warn("L1: off: %s", report->why);
    for (uint32_t i = 0; i < report->refused_count; i++)
        if (!report->refused[i].is_left_out)
            log_refused(&report->refused[i], "not used");
    log_left_out(report);
}

static void log_used(const struct kvt_device_gpu *gpu, const struct kvt_device_report *report)
{
    char uuid[KVT_GPU_UUID_TEXT_BYTES], arena[KVT_SIZE_TEXT_BYTES], node[32] = "";
    bool has_why = !report->is_host_pinned && report->pin_why[0] != '\0';

    kvt_gpu_uuid_text(gpu->info.uuid, uuid);
    if (gpu->numa_node >= 0)
        (void)snprintf(node, sizeof(node), ", NUMA node %d", gpu->numa_node);
    kvt_size_format_short(gpu->arena_bytes, arena);
    kvt_log_info("L1: GPU %d %s (%s), arena of %s, sm_%u%s, copies to L2 %s%s%s%s%s", gpu->index,
                 gpu->info.name, uuid, arena, gpu->info.sm, node,
                 report->is_host_pinned ? "by the copy engine (it is pinned)" : "through staging",
                 has_why ? " (" : "", has_why ? report->pin_why : "", has_why ? ")" : "",
                 gpu->info.has_ipc ? "" : ", no IPC here: engines register memfds");
}

static void log_open(const struct kvt_daemon *daemon)
{
    const struct kvt_device_report *report = &daemon->l1.report;
    const struct kvt_tier *tier = daemon->tiers[KVT_TIER_DEVICE];
    struct kvt_device_gpu gpu;
    char size[KVT_SIZE_TEXT_BYTES];

    kvt_size_format_short(tier->capacity_bytes, size);
    kvt_log_info("L1: %s, %s", size, tier->detail);
    for (uint32_t i = 0; kvt_device_gpu(tier, i, &gpu); i++) {
        if (gpu.state != KVT_GPU_REFUSED)
            log_used(&gpu, &daemon->l1.report);
        else if (!gpu.is_left_out)
            log_refused(&gpu, "not used");
    }
    log_left_out(report);
}

static int fail(struct kvt_daemon *daemon, enum kvt_exit how, int r)
{
    daemon->exit = how;
    return kvt_trace(r);
}

int kvt_start_gpus(void *ctx)
{
    struct kvt_daemon *daemon = ctx;
    struct kvt_device_config device;
    int r;

    if (daemon->config->l1.backend == KVT_CONFIG_L1_NONE)
        return 0;
    device = device_config(daemon);
    r = kvt_device_find(&daemon->l1.found, &device);
    if (r == 0)
        return 0;
    kvt_log_error("GPUs: %s", strerror(-r));
    return fail(daemon, KVT_EXIT_FAILURE, r);
}

void kvt_undo_gpus(void *ctx)
{
    struct kvt_daemon *daemon = ctx;

    daemon->l1.found = kvt_device_found_free(daemon->l1.found);
}

int kvt_start_l1(void *ctx)
{
    struct kvt_daemon *daemon = ctx;
    struct kvt_daemon_l1 *l1 = &daemon->l1;
    char size[KVT_SIZE_TEXT_BYTES], idle[KVT_CONFIG_LINE_BYTES];
    int r;

    if (kvt_config_idle_keys(daemon->config, idle))
        kvt_log_warn("L1: %s", idle);
    if (daemon->config->l1.backend == KVT_CONFIG_L1_NONE) {
        kvt_log_info("L1: off: not configured (tiers.l1.backend is none)");
        return 0;
    }
    l1->config = device_config(daemon);
    r = kvt_device_open(&daemon->tiers[KVT_TIER_DEVICE], &l1->config, &l1->report);
    if (r == 0) {
        log_open(daemon);
        return 0;
    }
    if (r == KVT_DEVICE_E_NONE) {
        log_none(&l1->report);
        return 0;
    }
    if (r == -EINVAL && l1->report.why[0] != '\0') {
        kvt_log_error("L1: %s", l1->report.why);
        return fail(daemon, KVT_EXIT_CONFIG, r);
    }
    kvt_size_format_short(l1->config.bytes, size);
    kvt_log_error("L1: %s from backend %s cannot be had: %s (lower tiers.l1.bytes)", size,
                  l1->config.backend, strerror(-r));
    return fail(daemon, KVT_EXIT_FAILURE, r);
}

void kvt_undo_l1(void *ctx)
{
    struct kvt_daemon *daemon = ctx;

    daemon->tiers[KVT_TIER_DEVICE] = kvt_tier_close(daemon->tiers[KVT_TIER_DEVICE]);
}

struct kvt_engine_l1 kvt_start_l1_stats(const struct kvt_daemon *daemon)
{
    static const char *const backends[] = {[KVT_CONFIG_L1_NONE] = "none",
                                           [KVT_CONFIG_L1_HOST] = "host",
                                           [KVT_CONFIG_L1_CUDA] = "cuda"};

    const struct kvt_config *config = daemon->config;
    bool is_cuda = config->l1.backend == KVT_CONFIG_L1_CUDA;

    return (struct kvt_engine_l1){
        .backend = backends[daemon->config->l1.backend],
        .report = daemon->config->l1.backend == KVT_CONFIG_L1_NONE ? NULL : &daemon->l1.report,
        .is_export_allowed = config->l1.is_export,
        .streams = is_cuda ? config->l1.streams : 0,
        .inflight_bytes_max = is_cuda ? config->l1.inflight_bytes : 0,
        .crossover_bytes = is_cuda ? config->l1.crossover_bytes : 0,
    };
}

static int open_region(void *ctx, const struct kvt_device_memory *memory,
                       struct kvt_region *ret_region, char ret_why[KVT_DEVICE_WHY_BYTES])
{
    return kvt_device_region_open(ctx, memory, ret_region, ret_why);
}

static void close_region(void *ctx, struct kvt_region *region)
{
    kvt_device_region_close(ctx, region);
}

static bool export_arena(void *ctx, uint32_t zone, struct kvt_device_export *ret_export)
{
    return kvt_device_export(ctx, zone, ret_export);
}

struct kvt_engine_gpu_memory kvt_start_l1_gpu_memory(const struct kvt_daemon *daemon)
{
    const struct kvt_tier *tier = daemon->tiers[KVT_TIER_DEVICE];
    bool is_exported = tier != NULL && daemon->config->l1.backend == KVT_CONFIG_L1_CUDA &&
                       daemon->config->l1.is_export;

    /* Without an L1 on GPUs open says so, which is what the client hears. */
    return (struct kvt_engine_gpu_memory){.ctx = daemon->tiers[KVT_TIER_DEVICE],
                                          .open = open_region,
                                          .close = close_region,
                                          .export_arena = is_exported ? export_arena : NULL};
}
