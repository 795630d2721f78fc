/* L1's part of the daemon's start, against a device tier that answers what the test wants (--wrap):
 * which configuration it is given, what the log says, and how the daemon goes on. */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "daemon/base/log.h"
#include "daemon/start.h"
#include "tests/common/cmocka.h"
#include "tiers/host/host.h"

static struct {
    int result;
    struct kvt_device_report report;
    struct kvt_device_config given;
    struct kvt_device_gpu gpus[3];
    uint32_t gpus_count, opens, closes, finds, frees;
    int find_result;
} fake;

static void fake_close(struct kvt_tier *tier)
{
    (void)tier;
    fake.closes++;
}

static const struct kvt_tier_ops fake_ops = {.name = "device", .close = fake_close};
static struct kvt_tier fake_tier = {
    .ops = &fake_ops, .capacity_bytes = 2 * KVT_GIB, .detail = "2 GPUs"};
uint8_t *__wrap_kvt_host_memory(const struct kvt_tier *tier);
int __wrap_kvt_device_open(struct kvt_tier **ret_tier, const struct kvt_device_config *config,
                           struct kvt_device_report *ret_report);
int __wrap_kvt_device_find(struct kvt_device_found **ret_found,
                           const struct kvt_device_config *config);
struct kvt_device_found *__wrap_kvt_device_found_free(struct kvt_device_found *found);
bool __wrap_kvt_device_gpu(const struct kvt_tier *tier, uint32_t idx,
                           struct kvt_device_gpu *ret_gpu);

static struct kvt_tier l2 = {.ops = &fake_ops, .capacity_bytes = KVT_GIB};
static uint8_t l2_memory;

uint8_t *__wrap_kvt_host_memory(const struct kvt_tier *tier)
{
    assert_ptr_equal(tier, &l2);
    return &l2_memory;
}

int __wrap_kvt_device_open(struct kvt_tier **ret_tier, const struct kvt_device_config *config,
                           struct kvt_device_report *ret_report)
{
    fake.opens++;
    fake.given = *config;
    *ret_report = fake.report;
    if (fake.result == 0)
        *ret_tier = &fake_tier;
    return fake.result;
}

static uint8_t found; /* stands for what was */

int __wrap_kvt_device_find(struct kvt_device_found **ret_found,
                           const struct kvt_device_config *config)
{
    fake.given = *config;
    fake.finds++;
    if (fake.find_result == 0)
        *ret_found = (struct kvt_device_found *)(void *)&found;
    return fake.find_result;
}

struct kvt_device_found *__wrap_kvt_device_found_free(struct kvt_device_found *gone)
{
    assert_true(gone == NULL || (void *)gone == &found);
    fake.frees += gone != NULL;
    return NULL;
}

bool __wrap_kvt_device_gpu(const struct kvt_tier *tier, uint32_t idx,
                           struct kvt_device_gpu *ret_gpu)
{
    if (tier != &fake_tier || idx >= fake.gpus_count)
        return false;
    *ret_gpu = fake.gpus[idx];
    return true;
}

static void ignore(void *ctx, const char *line)
{
    (void)ctx;
    fail_msg("%s", line);
}

/* Starts L1 with the settings, and gives what the log said meanwhile. */
static int start(struct kvt_daemon *daemon, const char *const sets[], char *ret_log, size_t bytes)
{
    static const struct kvt_config_report report = {.problem = ignore};
    static struct kvt_config config;
    int log[2], r;
    ssize_t got;

    kvt_config_init(&config);
    for (uint32_t i = 0; sets[i] != NULL; i++)
        assert_int_equal(kvt_config_set(&config, sets[i], &report), 0);
    *daemon = (struct kvt_daemon){
        .config = &config, .exit = KVT_EXIT_OK, .tiers = {[KVT_TIER_HOST] = &l2}};
    assert_int_equal(pipe(log), 0);
    kvt_log_init(log[1], true);
    r = kvt_start_l1(daemon);
    kvt_log_init(STDERR_FILENO, true);
    assert_int_equal(close(log[1]), 0);
    got = read(log[0], ret_log, bytes - 1);
    assert_true(got >= 0);
    ret_log[got] = '\0';
    assert_int_equal(close(log[0]), 0);
    return r;
}

static uint32_t lines_of(const char *text)
{
    uint32_t count = 0;

    for (; *text != '\0'; text++)
        count += *text == '\n';
    return count;
}

static int reset(void **state)
{
    (void)state;
    memset(&fake, 0, sizeof(fake));
    return 0;
}

static void test_off(void **state)
{
    static const char *const none[] = {NULL};
    static const char *const cuda[] = {"tiers.l1.backend=cuda", "tiers.l1.bytes=60%", NULL};
    struct kvt_daemon daemon;
    char log[1024];

    (void)state;
    assert_int_equal(start(&daemon, none, log, sizeof(log)), 0);
    assert_non_null(strstr(log, "L1: off: not configured"));
    assert_int_equal(lines_of(log), 1);
    assert_int_equal(fake.opens, 0);
    fake.result = KVT_DEVICE_E_NONE;
    (void)snprintf(fake.report.why, sizeof(fake.report.why), "no NVIDIA driver");
    assert_int_equal(start(&daemon, cuda, log, sizeof(log)), 0);
    assert_non_null(strstr(log, "L1: off: no NVIDIA driver\n"));
    assert_int_equal(lines_of(log), 1);
    assert_null(daemon.tiers[KVT_TIER_DEVICE]);
    assert_string_equal(daemon.l1.report.why, "no NVIDIA driver");
    assert_int_equal(daemon.exit, KVT_EXIT_OK);
    kvt_undo_l1(&daemon);
    assert_int_equal(fake.closes, 0);
}

/* GPUs are there, and none is used: each with its reason, one line where there is one. */
static void test_none_of(void **state)
{
    static const char *const cuda[] = {"tiers.l1.backend=cuda", "tiers.l1.bytes=60%", NULL};
    struct kvt_device_gpu *gpus = fake.report.refused;
    struct kvt_daemon daemon;
    char log[2048];

    (void)state;
    fake.result = KVT_DEVICE_E_NONE;
    fake.report.refused_count = 1;
    gpus[0] = (struct kvt_device_gpu){
        .info = {.name = "NVIDIA L4"}, .state = KVT_GPU_REFUSED, .why = "GPU 0 is busy"};
    (void)snprintf(fake.report.why, sizeof(fake.report.why), "GPU 0 is busy");
    assert_int_equal(start(&daemon, cuda, log, sizeof(log)), 0);
    assert_int_equal(lines_of(log), 1);
    assert_non_null(strstr(log, "L1: off: GPU 0 is busy (NVIDIA L4, GPU-00000000-"));
    gpus[1] = (struct kvt_device_gpu){.state = KVT_GPU_REFUSED, .why = "no GPU 7"};
    fake.report.refused_count = 2;
    (void)snprintf(fake.report.why, sizeof(fake.report.why), "none of 2");
    assert_int_equal(start(&daemon, cuda, log, sizeof(log)), 0);
    assert_int_equal(lines_of(log), 3);
    assert_non_null(strstr(log, "L1: off: none of 2\n"));
    assert_non_null(strstr(log, "L1: not used: GPU 0 is busy (NVIDIA L4, "));
    assert_non_null(strstr(log, "L1: not used: no GPU 7\n"));
    /* Those that were tried fail: those that were left out are not a line each here, either. */
    gpus[1] = (struct kvt_device_gpu){
        .state = KVT_GPU_REFUSED, .why = "GPU 16 is left out", .is_left_out = true};
    fake.report.gpus_count = 17;
    fake.report.left_out_count = 1;
    assert_int_equal(start(&daemon, cuda, log, sizeof(log)), 0);
    assert_int_equal(lines_of(log), 3);
    assert_non_null(strstr(log, "L1: not used: GPU 0 is busy (NVIDIA L4, "));
    assert_null(strstr(log, "L1: not used: GPU 16"));
    assert_non_null(strstr(log, "L1: 1 of 17 GPUs are left out: L1 takes 16 at most: "));
}

/* More than can be used: one line for all those. */
static void test_left_out(void **state)
{
    static const char *const cuda[] = {"tiers.l1.backend=cuda", "tiers.l1.bytes=1GiB", NULL};
    struct kvt_daemon daemon;
    char log[2048];

    (void)state;
    fake.gpus_count = 3;
    fake.gpus[0] = (struct kvt_device_gpu){.info = {.name = "NVIDIA H200"}};
    for (int i = 1; i < 3; i++)
        fake.gpus[i] = (struct kvt_device_gpu){.index = 15 + i,
                                               .info = {.name = "NVIDIA H200"},
                                               .state = KVT_GPU_REFUSED,
                                               .is_left_out = true};
    fake.report.gpus_count = 18;
    fake.report.left_out_count = 2;
    assert_int_equal(start(&daemon, cuda, log, sizeof(log)), 0);
    assert_int_equal(lines_of(log), 3);
    assert_non_null(strstr(log, "L1: 2 of 18 GPUs are left out: L1 takes 16 at most: name in "
                                "tiers.l1.gpus which\n"));
}

/* Keys that only GPUs have, without GPUs. */
static void test_idle_keys(void **state)
{
    static const char *const off[] = {"tiers.l1.export=true", NULL};
    static const char *const host[] = {"tiers.l1.backend=host", "tiers.l1.bytes=4MiB",
                                       "tiers.l1.gpus=0", NULL};
    static const char *const both[] = {"tiers.l1.gpus=0", "tiers.l1.export=true", NULL};
    static const char *const cuda[] = {"tiers.l1.backend=cuda", "tiers.l1.bytes=4MiB",
                                       "tiers.l1.gpus=0", "tiers.l1.export=true", NULL};
    struct kvt_daemon daemon;
    char log[1024];

    (void)state;
    assert_int_equal(start(&daemon, off, log, sizeof(log)), 0);
    assert_non_null(strstr(log, "L1: tiers.l1.export is set, but tiers.l1.backend is none: only "
                                "cuda has GPUs, nothing comes of it\n"));
    assert_int_equal(lines_of(log), 2);
    assert_int_equal(start(&daemon, host, log, sizeof(log)), 0);
    assert_non_null(strstr(log, "L1: tiers.l1.gpus is set, but tiers.l1.backend is host: "));
    assert_int_equal(start(&daemon, both, log, sizeof(log)), 0);
    assert_non_null(strstr(log, "L1: tiers.l1.gpus and tiers.l1.export are set, but"));
    assert_int_equal(start(&daemon, cuda, log, sizeof(log)), 0);
    assert_null(strstr(log, "is set, but"));
    assert_null(strstr(log, "are set, but"));
}

static void test_failures(void **state)
{
    static const char *const host[] = {"tiers.l1.backend=host", "tiers.l1.bytes=3MiB", NULL};
    struct kvt_daemon daemon;
    char log[1024];

    (void)state;
    fake.result = -ENOMEM;
    assert_int_equal(start(&daemon, host, log, sizeof(log)), -ENOMEM);
    assert_int_equal(daemon.exit, KVT_EXIT_FAILURE);
    assert_non_null(strstr(log, "L1: 4.00 MiB from backend host cannot be had: Cannot allocate"));
    fake.result = -EINVAL;
    (void)snprintf(fake.report.why, sizeof(fake.report.why), "tiers.l1.gpus: 0 and GPU-1b are one");
    assert_int_equal(start(&daemon, host, log, sizeof(log)), -EINVAL);
    assert_int_equal(daemon.exit, KVT_EXIT_CONFIG);
    assert_non_null(strstr(log, "L1: tiers.l1.gpus: 0 and GPU-1b are one\n"));
}

static void test_configuration_is_handed_on(void **state)
{
    static const char *const sets[] = {"tiers.l1.backend=cuda",
                                       "tiers.l1.bytes=60%",
                                       "tiers.l1.gpus=1, GPU-1b2c3d4e",
                                       "tiers.l1.headroom=3GiB",
                                       "tiers.l1.staging=33MiB",
                                       "tiers.l1.streams=3",
                                       "tiers.l1.inflight=1GiB",
                                       "tiers.l1.crossover=1MiB",
                                       "tiers.l1.retry_min=2s",
                                       "tiers.l1.retry_max=3s",
                                       "tiers.l1.export=true",
                                       "tiers.l1.cpu_threads=7",
                                       NULL};
    static const char *const host[] = {"tiers.l1.backend=host", "tiers.l1.bytes=50%", NULL};
    struct kvt_daemon daemon;
    char log[2048];

    (void)state;
    assert_int_equal(start(&daemon, sets, log, sizeof(log)), 0);
    assert_string_equal(fake.given.backend, "cuda");
    assert_int_equal(fake.given.bytes, 0);
    assert_int_equal(fake.given.pct, 60);
    assert_string_equal(fake.given.gpus, "1, GPU-1b2c3d4e");
    assert_true(fake.given.headroom_bytes == 3 * KVT_GIB);
    assert_true(fake.given.staging_bytes == 34 * KVT_MIB); /* whole huge pages */
    assert_int_equal(fake.given.streams, 3);
    assert_true(fake.given.inflight_bytes_max == KVT_GIB);
    assert_int_equal(fake.given.crossover_bytes, KVT_MIB);
    assert_int_equal(fake.given.cpu_threads, 7);
    assert_true(fake.given.retry_min_ns == 2 * KVT_NS_PER_S);
    assert_true(fake.given.retry_max_ns == 3 * KVT_NS_PER_S);
    assert_true(fake.given.is_export_allowed);
    assert_ptr_equal(fake.given.host_memory, &l2_memory);
    assert_true(fake.given.host_memory_bytes == KVT_GIB);
    assert_ptr_equal(fake.given.doorbell, &daemon.doorbell);
    assert_string_equal(fake.given.sysfs, "/sys");
    kvt_undo_l1(&daemon);
    kvt_undo_l1(&daemon);
    assert_int_equal(fake.closes, 1);

    assert_int_equal(start(&daemon, host, log, sizeof(log)), 0);
    assert_string_equal(fake.given.backend, "host");
    assert_int_equal(fake.given.pct, 0);
    assert_true(fake.given.bytes == kvt_round_up(kvt_config_ram_bytes() / 2, KVT_HUGE_PAGE_BYTES));
    kvt_undo_l1(&daemon);
}

/* What Stats says of copies is what is configured; without GPUs there is nothing to say. */
static void test_stats(void **state)
{
    static const struct kvt_config_report report = {.problem = ignore};
    static struct kvt_config config;
    const struct kvt_daemon daemon = {.config = &config};
    struct kvt_engine_l1 l1;

    (void)state;
    kvt_config_init(&config);
    assert_int_equal(kvt_config_set(&config, "tiers.l1.streams=3", &report), 0);
    assert_int_equal(kvt_start_l1_stats(&daemon).streams, 0);
    assert_int_equal(kvt_config_set(&config, "tiers.l1.backend=cuda", &report), 0);
    assert_int_equal(kvt_config_set(&config, "tiers.l1.crossover=1MiB", &report), 0);
    assert_int_equal(kvt_config_set(&config, "tiers.l1.inflight=2GiB", &report), 0);
    l1 = kvt_start_l1_stats(&daemon);
    assert_string_equal(l1.backend, "cuda");
    assert_int_equal(l1.streams, 3);
    assert_true(l1.crossover_bytes == KVT_MIB && l1.inflight_bytes_max == 2 * KVT_GIB);
}

/* GPUs are looked for once, before there is an L2 or an L1; L1 takes over what was found. */
static void test_found(void **state)
{
    static const struct kvt_config_report report = {.problem = ignore};
    static struct kvt_config config;
    struct kvt_daemon daemon = {.config = &config, .exit = KVT_EXIT_OK};

    (void)state;
    kvt_config_init(&config);
    assert_int_equal(kvt_start_gpus(&daemon), 0);
    assert_int_equal(fake.finds, 0); /* not configured */
    kvt_undo_gpus(&daemon);
    assert_int_equal(kvt_config_set(&config, "tiers.l1.backend=cuda", &report), 0);
    assert_int_equal(kvt_config_set(&config, "tiers.l1.gpus=2", &report), 0);
    assert_int_equal(kvt_start_gpus(&daemon), 0);
    assert_int_equal(fake.finds, 1);
    assert_string_equal(fake.given.backend, "cuda");
    assert_string_equal(fake.given.gpus, "2");
    assert_null(fake.given.host_memory);
    assert_null(fake.given.found);
    daemon.tiers[KVT_TIER_HOST] = &l2;
    assert_int_equal(kvt_start_l1(&daemon), 0);
    assert_ptr_equal(fake.given.found, &found);
    assert_int_equal(fake.finds, 1);
    kvt_undo_l1(&daemon);
    kvt_undo_gpus(&daemon);
    kvt_undo_gpus(&daemon);
    assert_int_equal(fake.frees, 1);
    fake.find_result = -ENOMEM;
    assert_int_equal(kvt_start_gpus(&daemon), -ENOMEM);
    assert_int_equal(daemon.exit, KVT_EXIT_FAILURE);
    assert_null(daemon.l1.found);
}

/* Without an L1 on GPUs memory of engines on one is refused, in words; what was not opened is
 * nothing to close. */
static void test_gpu_memory(void **state)
{
    struct kvt_daemon daemon = {.config = NULL};
    const struct kvt_engine_gpu_memory memory = kvt_start_l1_gpu_memory(&daemon);
    const struct kvt_device_memory what = {.bytes = 4096};
    char why[KVT_DEVICE_WHY_BYTES] = "";
    struct kvt_region region = {0};

    (void)state;
    assert_int_equal(memory.open(memory.ctx, &what, &region, why), KVT_REGION_E_NO_GPU);
    assert_true(why[0] != '\0');
    memory.close(memory.ctx, &region);
}

/* L1 is read in place only where an operator says so, and there are GPUs. */
static void test_export(void **state)
{
    static const struct kvt_config_report report = {.problem = ignore};
    static struct kvt_config config;
    struct kvt_daemon daemon = {.config = &config};
    struct kvt_engine_gpu_memory memory;
    struct kvt_device_export exported;

    (void)state;
    kvt_config_init(&config);
    assert_int_equal(kvt_config_set(&config, "tiers.l1.backend=cuda", &report), 0);
    assert_null(kvt_start_l1_gpu_memory(&daemon).export_arena);
    daemon.tiers[KVT_TIER_DEVICE] = &fake_tier;
    assert_null(kvt_start_l1_gpu_memory(&daemon).export_arena);
    assert_int_equal(kvt_config_set(&config, "tiers.l1.export=true", &report), 0);
    memory = kvt_start_l1_gpu_memory(&daemon);
    assert_non_null(memory.export_arena);
    assert_false(memory.export_arena(memory.ctx, 0, &exported)); /* of a tier without arenas */
    assert_int_equal(kvt_config_set(&config, "tiers.l1.backend=host", &report), 0);
    assert_null(kvt_start_l1_gpu_memory(&daemon).export_arena);
}

/* One line of each GPU, used or refused. */
static void test_lines(void **state)
{
    static const char *const cuda[] = {"tiers.l1.backend=cuda", "tiers.l1.bytes=1GiB", NULL};
    struct kvt_daemon daemon;
    char log[2048];

    (void)state;
    fake.gpus_count = 3;
    fake.gpus[0] = (struct kvt_device_gpu){
        .info = {.uuid = {0x1b, 0x2c, 0x3d, 0x4e, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 0xff},
                 .name = "NVIDIA H200",
                 .sm = 90,
                 .has_ipc = true},
        .numa_node = 1,
        .arena_bytes = KVT_GIB};
    fake.gpus[1] = (struct kvt_device_gpu){.info = {.name = "NVIDIA L4"},
                                           .index = 3,
                                           .numa_node = -1,
                                           .state = KVT_GPU_REFUSED,
                                           .why = "GPU 3 is in exclusive mode and busy"};
    fake.gpus[2] = (struct kvt_device_gpu){
        .index = 7, .state = KVT_GPU_REFUSED, .why = "no GPU 7; there are: 0"};
    fake.report.is_host_pinned = true;
    assert_int_equal(start(&daemon, cuda, log, sizeof(log)), 0);
    assert_non_null(strstr(log, "L1: 2.00 GiB, 2 GPUs\n"));
    assert_non_null(
        strstr(log, "L1: GPU 0 NVIDIA H200 (GPU-1b2c3d4e-0506-0708-090a-0b0c0d0e0fff), arena of "
                    "1.00 GiB, sm_90, NUMA node 1, copies to L2 by the copy engine (it is "
                    "pinned)\n"));
    assert_non_null(strstr(log, "L1: not used: GPU 3 is in exclusive mode and busy (NVIDIA L4, "
                                "GPU-00000000-0000-0000-0000-000000000000)\n"));
    assert_non_null(strstr(log, "L1: not used: no GPU 7; there are: 0\n"));
    assert_int_equal(lines_of(log), 4);
    fake.report.is_host_pinned = false;
    (void)snprintf(fake.report.pin_why, sizeof(fake.report.pin_why), "out of memory");
    assert_int_equal(start(&daemon, cuda, log, sizeof(log)), 0);
    assert_non_null(strstr(log, "NUMA node 1, copies to L2 through staging (out of memory)\n"));
    fake.gpus[0].info.has_ipc = false;
    assert_int_equal(start(&daemon, cuda, log, sizeof(log)), 0);
    assert_non_null(strstr(log, "(out of memory), no IPC here: engines register memfds\n"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(test_off, reset),
        cmocka_unit_test_setup(test_failures, reset),
        cmocka_unit_test_setup(test_idle_keys, reset),
        cmocka_unit_test_setup(test_none_of, reset),
        cmocka_unit_test_setup(test_left_out, reset),
        cmocka_unit_test_setup(test_configuration_is_handed_on, reset),
        cmocka_unit_test_setup(test_found, reset),
        cmocka_unit_test_setup(test_stats, reset),
        cmocka_unit_test_setup(test_gpu_memory, reset),
        cmocka_unit_test_setup(test_export, reset),
        cmocka_unit_test_setup(test_lines, reset),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
