/* Stats of L1's GPUs: what a device tier says of them, with what the store has put there, as
 * messages and as counters. The GPUs are zones of a fake tier; kvt_device_gpu is the test's
 * (--wrap), so that states and counters are what a row needs. */
#include <stdio.h>
#include <string.h>

#include "tests/common/check.h"
#include "tests/common/engine_rig.h"
#include "tiers/device/device.h"
#include "tiers/device/gpu.h"

#define GPUS 2u

static struct kvt_gpu_counters counters[GPUS];
static struct kvt_tier_counters tier_counters[GPUS];
static struct kvt_device_gpu gpus[GPUS + 1];
static uint32_t gpus_count;

bool __wrap_kvt_device_gpu(const struct kvt_tier *tier, uint32_t idx,
                           struct kvt_device_gpu *ret_gpu);

bool __wrap_kvt_device_gpu(const struct kvt_tier *tier, uint32_t idx,
                           struct kvt_device_gpu *ret_gpu)
{
    if (tier == NULL || idx >= gpus_count)
        return false;
    *ret_gpu = gpus[idx % KVT_COUNT_OF(gpus)];
    return true;
}

/* Two in use, the second lost since a time, and one that is refused. */
static void make_gpus(void)
{
    for (uint32_t i = 0; i < GPUS; i++) {
        gpus[i] = (struct kvt_device_gpu){.info = {.uuid = {1, 2, (uint8_t)i},
                                                   .name = "NVIDIA H200",
                                                   .pci = "0000:3b:00.0",
                                                   .sm = 90,
                                                   .total_bytes = 140 * KVT_GIB,
                                                   .has_ipc = true},
                                          .index = (int)(i * 3),
                                          .numa_node = (int)i - 1,
                                          .arena_bytes = 128 * KVT_KIB,
                                          .staging_bytes = KVT_MIB,
                                          .is_exported = i == 0,
                                          .is_host_pinned = i == 0,
                                          .counters = &counters[i],
                                          .tier_counters = &tier_counters[i]};
        for (uint32_t path = 0; path < KVT_GPU_PATHS; path++) {
            counters[i].path_bytes[path] = 1000 * i + 10 * path;
            counters[i].path_transfers[path] = 100 * i + path;
        }
        counters[i].launches = 7 + i;
        counters[i].launched_jobs = 17 + i;
        counters[i].checked_bytes = 27 + i;
        counters[i].unchecked_transfers = 37 + i;
        counters[i].bad_checks = 47 + i;
        counters[i].quantised_bytes = 57 + i;
        counters[i].dequantised_bytes = 67 + i;
        counters[i].losses = 2 * i;
        counters[i].revivals = i;
        counters[i].inflight_bytes = 5;
        tier_counters[i].errors_client_gone = 3 + i;
    }
    counters[1].last_error = KVT_CUDA_ECC;
    gpus[1].state = KVT_GPU_LOST;
    (void)snprintf(gpus[1].why, sizeof(gpus[1].why), "ECC");
    gpus[GPUS] = (struct kvt_device_gpu){
        .info = {.name = "NVIDIA T4"}, .index = 1, .numa_node = -1, .state = KVT_GPU_REFUSED};
    (void)snprintf(gpus[GPUS].why, sizeof(gpus[GPUS].why), "sm_75 is too old");
    gpus_count = GPUS + 1;
}

static bool is(struct kvt_text text, const char *what)
{
    return text.bytes == strlen(what) && memcmp(text.at, what, text.bytes) == 0;
}

static uint64_t counter(const struct kvt_ans_stats *stats, const char *name, const char *label)
{
    for (uint32_t i = 0; i < stats->counters_count; i++)
        if (strcmp(stats->counters[i].name, name) == 0 &&
            strcmp(stats->counters[i].label, label) == 0)
            return stats->counters[i].value;
    return UINT64_MAX;
}

static const struct kvt_ans_stats *ask(struct call *call)
{
    call_begin(call, KVT_OP_STATS);
    call_run(call);
    CHECK_CODE(&call->op, KVT_CODE_OK);
    return &call->op.ans.stats;
}

static void check_first(const struct kvt_api_gpu_stats *gpu)
{
    CHECK(gpu->index == 0 && gpu->numa_node == -1 && gpu->sm == 90 && gpu->has_ipc);
    CHECK(is(gpu->name, "NVIDIA H200") && is(gpu->pci, "0000:3b:00.0") && is(gpu->why, ""));
    CHECK(gpu->state == KVT_API_GPU_OK && gpu->lost_ns == 0);
    CHECK(gpu->uuid[0] == 1 && gpu->uuid[1] == 2 && gpu->uuid[2] == 0);
    CHECK(gpu->memory_bytes == 140 * KVT_GIB && gpu->arena_bytes == 128 * KVT_KIB);
    CHECK(gpu->staging_bytes == KVT_MIB && gpu->inflight_bytes == 5);
    CHECK(gpu->launches == 7 && gpu->launched_jobs == 17 && gpu->checked_bytes == 27);
    CHECK(gpu->unchecked_transfers == 37 && gpu->bad_checks == 47);
    CHECK(gpu->quantised_bytes == 57 && gpu->dequantised_bytes == 67);
    CHECK(gpu->paths_count == KVT_GPU_PATHS);
    for (uint32_t i = 0; i < gpu->paths_count; i++)
        CHECK(gpu->paths[i].bytes == 10 * i && gpu->paths[i].transfers == i);
    CHECK(strcmp(gpu->paths[KVT_GPU_STAGED_DOWN].name, "staged_down") == 0);
}

static void test_gpus(struct rig *rig)
{
    const struct kvt_ans_stats *stats;
    uint64_t used = 0, errors = 0;

    rig_attach(rig);
    rig_store(rig, 1, 3);
    rig_leave(rig);
    gpus[1].lost_ns = rig->world.now_ns - KVT_NS_PER_S;
    stats = ask(&rig->call);
    CHECK(is(stats->l1.backend, "cuda") && stats->l1.has_cuda && stats->l1.is_export_allowed);
    CHECK(stats->l1.driver_version == 13000 && stats->l1.runtime_version == 12090);
    CHECK(is(stats->l1.pin_why, "no room") && is(stats->l1.why, ""));
    CHECK(stats->gpus_count == GPUS + 1);
    CHECK(stats->l1.streams == 3 && stats->l1.inflight_bytes_max == 7 * KVT_MIB);
    CHECK(stats->l1.crossover_bytes == 5 * KVT_KIB);
    check_first(&stats->gpus[0]);
    CHECK(stats->gpus[0].is_exported && stats->gpus[0].is_host_pinned);
    CHECK(!stats->gpus[1].is_exported && !stats->gpus[1].is_host_pinned);
    CHECK(stats->gpus[1].index == 3 && stats->gpus[1].state == KVT_API_GPU_LOST);
    CHECK(stats->gpus[1].lost_ns >= KVT_NS_PER_S && stats->gpus[1].lost_ns < 2 * KVT_NS_PER_S);
    CHECK(stats->gpus[1].losses == 2 && stats->gpus[1].revivals == 1);
    CHECK(stats->gpus[1].last_error == KVT_CUDA_ECC && is(stats->gpus[1].why, "ECC"));
    CHECK(stats->gpus[2].state == KVT_API_GPU_REFUSED && stats->gpus[2].paths_count == 0);
    CHECK(is(stats->gpus[2].why, "sm_75 is too old") && stats->gpus[2].errors_count == 0);
    for (uint32_t i = 0; i < GPUS; i++)
        used += stats->gpus[i].used_bytes;
    CHECK(used > 0 && used == stats->tiers[KVT_TIER_DEVICE].used_bytes);
    CHECK(stats->gpus[0].slots + stats->gpus[1].slots == 3);
    for (uint32_t i = 0; i < stats->gpus[1].errors_count; i++)
        errors += stats->gpus[1].errors[i].value;
    CHECK(errors == 4);
    CHECK(counter(stats, "gpu_moved_bytes", "gpu=3,path=to_host") == 1000 + 10 * KVT_GPU_TO_HOST);
    CHECK(counter(stats, "gpu_transfers", "gpu=0,path=staged_up") == KVT_GPU_STAGED_UP);
    CHECK(counter(stats, "gpu_losses", "gpu=3") == 2);
    CHECK(counter(stats, "gpu_bad_checks", "gpu=0") == 47);
    CHECK(counter(stats, "gpu_losses", "gpu=1") == UINT64_MAX); /* refused */
}

static void test_health(struct call *call)
{
    call_begin(call, KVT_OP_HEALTH);
    call_run(call);
    CHECK(call->op.ans.health.is_serving);
    CHECK(is(call->op.ans.health.degraded,
             "GPU 3 NVIDIA H200 is lost: ECC, GPU 1 NVIDIA T4 is not used: sm_75 is too old"));
    gpus_count = 1;
    call_begin(call, KVT_OP_HEALTH);
    call_run(call);
    CHECK(is(call->op.ans.health.degraded, ""));
    gpus_count = GPUS + 1;
}

/* tiers.l1.gpus names GPUs that are not there: by UUID it has no index either, and neither has a
 * name. */
static void test_not_there(struct call *call)
{
    struct kvt_device_gpu *gpu = &gpus[GPUS];
    const struct kvt_ans_stats *stats;

    gpus[1].state = KVT_GPU_OK;
    *gpu = (struct kvt_device_gpu){.index = -1, .numa_node = -1, .state = KVT_GPU_REFUSED};
    (void)snprintf(gpu->why, sizeof(gpu->why), "no GPU-deadbeef; there are: 0");
    call_begin(call, KVT_OP_HEALTH);
    call_run(call);
    CHECK(is(call->op.ans.health.degraded, "GPU is not used: no GPU-deadbeef; there are: 0"));
    stats = ask(call);
    CHECK(stats->gpus[GPUS].index == KVT_API_GPU_INDEX_NONE && is(stats->gpus[GPUS].name, ""));
    gpu->index = 7;
    (void)snprintf(gpu->why, sizeof(gpu->why), "no GPU 7; there are: 0");
    call_begin(call, KVT_OP_HEALTH);
    call_run(call);
    CHECK(is(call->op.ans.health.degraded, "GPU 7 is not used: no GPU 7; there are: 0"));
    make_gpus();
}

/* L1 is to be on GPUs, and there is none. */
static void test_off(void)
{
    static const struct kvt_device_report report = {
        .why = "no NVIDIA driver",
        .refused_count = 2,
        .refused = {{.info = {.name = "NVIDIA L4", .total_bytes = KVT_GIB, .uuid = {7}},
                     .state = KVT_GPU_REFUSED,
                     .numa_node = -1,
                     .why = "busy"},
                    {.index = 1, .state = KVT_GPU_REFUSED, .why = "too old"}}};
    const struct world_config config = {.seed = 1,
                                        .l2_bytes = 1u << 20,
                                        .index_bytes = 8u << 20,
                                        .delay_ns_max = 1000,
                                        .ranks = 1,
                                        .l1 = {.backend = "cuda", .report = &report}};
    const struct kvt_ans_stats *stats;
    struct call *call;
    struct rig rig;

    gpus_count = 0;
    rig_init(&rig, &config);
    call = &rig.call;
    stats = ask(call);
    CHECK(is(stats->l1.why, "no NVIDIA driver") && stats->gpus_count == 2);
    /* Each that is not used, as what and why. */
    CHECK(is(stats->gpus[0].name, "NVIDIA L4") && is(stats->gpus[0].why, "busy"));
    CHECK(stats->gpus[0].memory_bytes == KVT_GIB && stats->gpus[0].uuid[0] == 7);
    CHECK(stats->gpus[0].state == KVT_API_GPU_REFUSED && stats->gpus[0].paths_count == 0);
    CHECK(stats->gpus[1].index == 1 && is(stats->gpus[1].why, "too old"));
    CHECK(counter(stats, "gpu_losses", "gpu=0") == UINT64_MAX);
    CHECK(stats->tiers[KVT_TIER_DEVICE].health == KVT_TIER_HEALTH_OFF);
    call_begin(call, KVT_OP_HEALTH);
    call_run(call);
    CHECK(is(call->op.ans.health.degraded, "L1 is off: no NVIDIA driver"));
    rig_deinit(&rig);
}

/* As many as can be, and more than that: no list overflows, and nothing else is lost. Then none. */
static void test_many(struct call *call)
{
    const struct kvt_ans_stats *stats;

    gpus_count = KVT_API_GPUS_MAX + 1;
    stats = ask(call);
    CHECK(stats->gpus_count == KVT_API_GPUS_MAX);
    CHECK(counter(stats, "gpu_losses", "gpu=0") == 0);
    CHECK(counter(stats, "tier_outages", "tier=l2") != UINT64_MAX);
    gpus_count = 0;
    stats = ask(call);
    CHECK(stats->gpus_count == 0);
    CHECK(counter(stats, "gpu_losses", "gpu=0") == UINT64_MAX);
    CHECK(counter(stats, "lookups", "") != UINT64_MAX);
}

int main(void)
{
    static const struct kvt_device_report report = {
        .has_cuda = true, .driver_version = 13000, .runtime_version = 12090, .pin_why = "no room"};
    const struct world_config config = {
        .seed = 1,
        .l1_bytes = 256u << 10,
        .l2_bytes = 1u << 20,
        .index_bytes = 8u << 20,
        .delay_ns_max = 1000,
        .ranks = 1,
        .gpus = GPUS,
        .l1 = {.backend = "cuda",
               .report = &report,
               .is_export_allowed = true,
               .streams = 3,
               .inflight_bytes_max = 7 * KVT_MIB,
               .crossover_bytes = 5 * KVT_KIB},
    };
    struct rig rig;

    make_gpus();
    rig_init(&rig, &config);
    test_gpus(&rig);
    test_health(&rig.call);
    test_not_there(&rig.call);
    test_many(&rig.call);
    rig_deinit(&rig);
    test_off();
    return 0;
}
