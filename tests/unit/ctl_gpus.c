/* GPUs of L1 as an operator sees them: on the pages of devices and stats, as JSON, in health, by
 * the doctor; and what the doctor finds of the driver on a machine made up for it. */
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "tests/common/ctl_page.h"

#define ROOM 512

/* One that is well, one that is lost, one that is refused. */
static void fill(struct kvt_ans_stats *stats, struct kvt_api_gpu_stats gpus[3])
{
    static struct kvt_api_gpu_path paths[] = {
        {"from_engine_kernel", 3 << 20, 12}, {"from_engine_copy", 0, 0}, {"to_host", 1 << 20, 4}};
    static struct kvt_api_counter errors[] = {{"client_gone", "", 2}, {"slot_bad_payload", "", 1}};

    gpus[0] = (struct kvt_api_gpu_stats){
        .uuid = {0x1b, 0x2c},
        .name = TEXT("NVIDIA H200"),
        .pci = TEXT("0000:3b:00.0"),
        .numa_node = 1,
        .sm = 90,
        .memory_bytes = UINT64_C(140) << 30,
        .has_ipc = true,
        .is_exported = true,
        .is_host_pinned = true,
        .arena_bytes = UINT64_C(60) << 30,
        .staging_bytes = 64 << 20,
        .used_bytes = 1 << 30,
        .slab_bytes = UINT64_C(2) << 30,
        .slots = 128,
        .inflight_bytes = 3 << 20,
        .losses = 1,
        .revivals = 1,
        .last_error = 719,
        .paths_count = 3,
        .paths = paths,
        .launches = 10,
        .launched_jobs = 25,
        .checked_bytes = 1 << 20,
        .unchecked_transfers = 3,
        .bad_checks = 1,
        .quantised_bytes = 2 << 20,
        .dequantised_bytes = 4 << 20,
        .errors_count = 2,
        .errors = errors,
    };
    gpus[1] = (struct kvt_api_gpu_stats){.index = 1,
                                         .name = TEXT("NVIDIA\033 L4"),
                                         .numa_node = -1,
                                         .sm = 89,
                                         .state = KVT_API_GPU_LOST,
                                         .has_ipc = true,
                                         .why = TEXT("an uncorrectable ECC error"),
                                         .lost_ns = 70 * KVT_NS_PER_S,
                                         .losses = 1};
    gpus[2] = (struct kvt_api_gpu_stats){.index = 2,
                                         .name = TEXT("NVIDIA T4"),
                                         .numa_node = -1,
                                         .sm = 75,
                                         .state = KVT_API_GPU_REFUSED,
                                         .why = TEXT("sm_75 is too old")};
    *stats = (struct kvt_ans_stats){.l1 = {.backend = TEXT("cuda"),
                                           .has_cuda = true,
                                           .driver_version = 13000,
                                           .runtime_version = 12090,
                                           .is_host_pinned = true,
                                           .streams = 2,
                                           .inflight_bytes_max = UINT64_C(256) << 20,
                                           .crossover_bytes = UINT64_C(256) << 10},
                                    .gpus_count = 3,
                                    .gpus = gpus};
}

static void test_page(void **state)
{
    struct kvt_api_gpu_stats gpus[3];
    struct kvt_ans_stats stats;
    struct page page;

    (void)state;
    fill(&stats, gpus);
    page_open(&page);
    kvt_ctl_view_l1(&page.view, &stats);
    page_expect(
        &page,
        "L1\n"
        "  driver for CUDA 13.0, built for CUDA 12.9; L2 is pinned: the copy engine reaches it; "
        "engines may read it in place\n"
        "  gpu  uuid          pci           name           state    sm  node     memory     arena  "
        " "
        "  used  slots   moving  losses  back\n"
        "    0  GPU-1b2c0000  0000:3b:00.0  NVIDIA H200    ok       90     1  140.0 GiB  60.0 GiB  "
        "1.0 GiB    128  3.0 MiB       1     1\n"
        "    1  GPU-00000000                NVIDIA\\x1b L4  lost     89     -        0 B       0 B "
        " "
        "    0 B      0      0 B       1     0\n"
        "    2  GPU-00000000                NVIDIA T4      refused  75     -        0 B       0 B  "
        "    0 B      0      0 B       0     0\n"
        "  GPU 1 NVIDIA\\x1b L4 lost for 1 min 10 s: an uncorrectable ECC error\n"
        "  GPU 2 NVIDIA T4 refused: sm_75 is too old\n"
        "  each: 2 streams a direction, at most 256.0 MiB in flight, staging of 64.0 MiB and as "
        "much "
        "host memory\n"
        "  engines' pools: by the copy engine in runs of 256.0 KiB and more, where they are few; "
        "else "
        "by one kernel\n"
        "  pools on another GPU: by the copy engine; engines' host memory: through staging\n"
        "  L2: by the copy engine of GPU 0\n"
        "  gpu  path                  moved  transfers\n"
        "    0  from_engine_kernel  3.0 MiB         12\n"
        "    0  to_host             1.0 MiB          4\n"
        "  gpu  launches  copies each  checked  unchecked  bad  quantised     back  errors\n"
        "    0        10          2.5  1.0 MiB          3    1    2.0 MiB  4.0 MiB       3\n"
        "    1         0          0.0      0 B          0    0        0 B      0 B       0\n"
        "\n");
}

static void test_heads(void **state)
{
    static const struct {
        struct kvt_api_l1_stats l1;
        const char *page;
    } rows[] = {
        {{.backend = {NULL, 0}}, "L1\n  off: not configured (tiers.l1.backend is none)\n\n"},
        {{.backend = TEXT("none")}, "L1\n  off: not configured (tiers.l1.backend is none)\n\n"},
        {{.backend = TEXT("host")},
         "L1\n  host memory, in the place of a GPU's; all copies by one thread of the CPU\n\n"},
        {{.backend = TEXT("cuda"), .why = TEXT("this build has no CUDA")},
         "L1\n  driver for CUDA none, built without CUDA\n  off: this build has no CUDA\n\n"},
        {{.backend = TEXT("cuda"),
          .has_cuda = true,
          .driver_version = 12020,
          .runtime_version = 13000,
          .pin_why = TEXT("too much"),
          .is_export_allowed = true,
          .held_bytes_per_engine_max = 3ull << 30,
          .why = TEXT("driver 12.2 is too old for CUDA 13.0")},
         "L1\n  driver for CUDA 12.2, built for CUDA 13.0; L2 is not pinned (too much): copies go "
         "through staging\n"
         "  off: driver 12.2 is too old for CUDA 13.0\n\n"},
    };

    (void)state;
    for (size_t i = 0; i < KVT_COUNT_OF(rows); i++) {
        struct kvt_ans_stats stats = {.l1 = rows[i].l1};
        struct page page;

        page_open(&page);
        kvt_ctl_view_l1(&page.view, &stats);
        page_expect(&page, rows[i].page);
        assert_int_equal(kvt_ctl_is_degraded(&stats), stats.l1.why.bytes > 0);
    }
}

/* No GPU is used: those that are there are shown all the same, and nothing of copies. */
static void test_none_used(void **state)
{
    static const char head[] =
        "L1\n"
        "  driver for CUDA 13.0, built for CUDA 12.9\n"
        "  off: none of 2 GPUs can be used; the first: GPU 0 is busy\n"
        "  gpu  uuid          pci  name         state    sm  node     memory  arena  used  slots  "
        "moving  losses  back\n"
        "    0  GPU-1b2c0000       NVIDIA H200  refused  90     1  140.0 GiB    0 B   0 B      0  "
        "   0 B       0     0\n"
        "    2  GPU-00000000       NVIDIA T4    refused  75     -        0 B    0 B   0 B      0  "
        "   0 B       0     0\n"
        "  GPU 0 NVIDIA H200 refused: GPU 0 is busy\n"
        "  GPU 2 NVIDIA T4 refused: sm_75 is too old\n"
        "\n";
    struct kvt_api_gpu_stats gpus[3];
    struct kvt_ctl_report report = {0};
    struct kvt_ans_stats stats;
    struct page page;

    (void)state;
    fill(&stats, gpus);
    gpus[1] = gpus[2];
    gpus[0] = (struct kvt_api_gpu_stats){.uuid = {0x1b, 0x2c},
                                         .name = TEXT("NVIDIA H200"),
                                         .numa_node = 1,
                                         .sm = 90,
                                         .memory_bytes = UINT64_C(140) << 30,
                                         .state = KVT_API_GPU_REFUSED,
                                         .why = TEXT("GPU 0 is busy")};
    stats.gpus_count = 2;
    stats.l1.is_host_pinned = false;
    stats.l1.why = TEXT("none of 2 GPUs can be used; the first: GPU 0 is busy");
    page_open(&page);
    kvt_ctl_view_l1(&page.view, &stats);
    page_expect(&page, head);
    kvt_ctl_check_gpus(&report, &stats);
    assert_int_equal(report.count, 3);
    assert_non_null(
        strstr(report.findings[1].text, "GPU 0 NVIDIA H200 is not used: GPU 0 is busy"));
}

static void test_json(void **state)
{
    static const char *const parts[] = {
        "\"l1\": {\"backend\": \"cuda\", \"has_cuda\": true, \"driver_version\": 13000, ",
        "\"gpus\": [{\"index\": 0, \"uuid\": \"1b2c0000000000000000000000000000\", ",
        "\"pci\": \"0000:3b:00.0\", \"numa_node\": 1, \"sm\": 90, ",
        "\"state\": \"ok\", \"why\": \"\", \"has_ipc\": true, \"is_exported\": true, ",
        "\"is_host_pinned\": true, \"arena_bytes\": 64424509440, ",
        "\"streams\": 2, \"inflight_bytes_max\": 268435456, \"crossover_bytes\": 262144}",
        "\"paths\": {\"from_engine_kernel\": {\"bytes\": 3145728, \"transfers\": 12}, ",
        "\"errors\": {\"client_gone\": 2, \"slot_bad_payload\": 1}}, {\"index\": 1, ",
        "L4\", \"pci\": \"\", \"sm\": 89, ", /* its node is not known */
        "\"state\": \"lost\", \"why\": \"an uncorrectable ECC error\", ",
        "\"devices\": []",
    };
    struct kvt_api_gpu_stats gpus[3];
    struct kvt_ans_stats stats;
    char *text = NULL;
    size_t bytes;
    FILE *out = open_memstream(&text, &bytes);

    (void)state;
    fill(&stats, gpus);
    assert_non_null(out);
    kvt_ctl_json_stats(out, &stats, true);
    (void)fclose(out);
    for (size_t i = 0; i < KVT_COUNT_OF(parts); i++)
        if (strstr(text, parts[i]) == NULL)
            fail_msg("no '%s' in:\n%s", parts[i], text);
    free(text);
}

static void test_health(void **state)
{
    struct kvt_api_gpu_stats gpus[3];
    struct kvt_ans_stats stats;
    struct kvt_ctl_health health = {.is_serving = true, .stats = &stats};
    struct page page;

    (void)state;
    fill(&stats, gpus);
    assert_true(kvt_ctl_is_degraded(&stats));
    page_open(&page);
    kvt_ctl_view_health(&page.view, &health);
    page_expect(&page, "serving, degraded\n"
                       "  GPU 1 NVIDIA\\x1b L4 lost for 1 min 10 s: an uncorrectable ECC error\n"
                       "  GPU 2 NVIDIA T4 refused: sm_75 is too old\n");
    stats.gpus_count = 1;
    assert_false(kvt_ctl_is_degraded(&stats));
    stats.gpus_count = 0;
    stats.l1.why = TEXT("no NVIDIA driver");
    assert_true(kvt_ctl_is_degraded(&stats));
    page_open(&page);
    kvt_ctl_view_health(&page.view, &health);
    page_expect(&page, "serving, degraded\n  L1 is off: no NVIDIA driver\n");
}

/* A GPU that is named by a UUID that nobody has: it has no index, and no name. */
static void test_missing(void **state)
{
    static const char why[] = "no GPU-1b2c3d4e; there are: 0 (GPU-5f6a7b8c)";
    struct kvt_api_gpu_stats gpu = {.index = KVT_API_GPU_INDEX_NONE,
                                    .numa_node = -1,
                                    .state = KVT_API_GPU_REFUSED,
                                    .why = TEXT(why)};
    struct kvt_ans_stats stats = {
        .l1 = {.backend = TEXT("cuda"), .is_host_pinned = true}, .gpus_count = 1, .gpus = &gpu};
    struct kvt_ctl_health health = {.is_serving = true, .stats = &stats};
    char *text = NULL;
    struct page page;
    size_t bytes;
    FILE *out = open_memstream(&text, &bytes);

    (void)state;
    page_open(&page);
    kvt_ctl_view_health(&page.view, &health);
    page_expect(&page, "serving, degraded\n  GPU ? refused: no GPU-1b2c3d4e; there are: 0 "
                       "(GPU-5f6a7b8c)\n");
    assert_non_null(out);
    kvt_ctl_json_devices(out, &stats);
    (void)fclose(out);
    assert_non_null(strstr(text, "\"uuid\": \"00000000"));
    assert_null(strstr(text, "\"index\""));
    free(text);
}

/* Whether a finding of this level says @says, with something to do unless it is fine. */
static void expect(const struct kvt_ctl_report *report, enum kvt_ctl_level level, const char *says)
{
    for (uint32_t i = 0; i < report->count; i++) {
        const struct kvt_ctl_finding *finding = &report->findings[i];

        assert_int_equal(finding->level == KVT_CTL_LEVEL_OK, finding->remedy[0] == '\0');
        if (finding->level == level && strstr(finding->text, says) != NULL)
            return;
    }
    fail_msg("nobody said '%s'; %u findings, first: %s", says, report->count,
             report->count > 0 ? report->findings[0].text : "");
}

/* What holds of one GPU and not of the other, and what one without IPC cannot do. */
static void test_ways(void **state)
{
    static const char *const parts[] = {
        "; L2 is not pinned (no room): copies go through staging; engines may read it in place, "
        "each at most 3.0 GiB\n",
        "  GPU 1 NVIDIA L4: no IPC here: engines register memfds, and cannot read it in place\n",
        "  each: 2 streams a direction, at most 256.0 MiB in flight, staging of 64.0 MiB and as "
        "much "
        "host memory\n",
        "  engines' pools: by the copy engine in runs of 256.0 KiB and more, where they are few; "
        "else "
        "by one kernel\n",
        "  L2: by the copy engine of GPU 0\n  L2: through staging from and to GPU 1\n",
        "  nothing was moved yet\n",
    };
    struct kvt_api_gpu_stats gpus[3];
    struct kvt_ctl_report report = {0};
    struct kvt_ans_stats stats;
    struct page page;

    (void)state;
    fill(&stats, gpus);
    stats.gpus_count = 2;
    stats.l1.is_host_pinned = false;
    stats.l1.pin_why = TEXT("no room");
    stats.l1.is_export_allowed = true;
    stats.l1.held_bytes_per_engine_max = UINT64_C(3) << 30;
    gpus[0].paths_count = 0;
    gpus[1].name = TEXT("NVIDIA L4");
    gpus[1].state = KVT_API_GPU_OK;
    gpus[1].has_ipc = false;
    page_open(&page);
    kvt_ctl_view_l1(&page.view, &stats);
    (void)fclose(page.view.out);
    for (size_t i = 0; i < KVT_COUNT_OF(parts); i++)
        if (strstr(page.text, parts[i]) == NULL)
            fail_msg("no '%s' in:\n%s", parts[i], page.text);
    free(page.text);
    kvt_ctl_check_gpus(&report, &stats);
    expect(&report, KVT_CTL_LEVEL_WARN, "GPU 1 NVIDIA L4 has no CUDA IPC");
    /* Where none is exported nobody reads in place, whatever is allowed. */
    gpus[0].is_exported = false;
    page_open(&page);
    kvt_ctl_view_l1(&page.view, &stats);
    (void)fclose(page.view.out);
    assert_null(strstr(page.text, "may read it in place"));
    free(page.text);
}

#define TOO_MANY (2 * KVT_API_GPUS_MAX)

/* "  L2: by the copy engine of GPU 4294967295, 4294967295...": @listed times, and what follows. */
static void expect_list(const struct page *page, uint32_t listed, const char *then)
{
    static const char head[] = "  L2: by the copy engine of GPU ", one[] = "4294967295";
    const char *at = strstr(page->text, head);

    assert_non_null(at);
    at += strlen(head);
    for (uint32_t i = 0; i < listed; i++) {
        assert_memory_equal(at, i == 0 ? "" : ", ", i == 0 ? 0 : 2);
        at += i == 0 ? 0 : 2;
        assert_memory_equal(at, one, strlen(one));
        at += strlen(one);
    }
    assert_memory_equal(at, then, strlen(then));
}

/* As many as a daemon may have, each with the longest of numbers, are all named; of more, which no
 * daemon says, what there is room for. */
static void test_many(void **state)
{
    static struct kvt_api_gpu_stats gpus[TOO_MANY];
    struct kvt_api_gpu_stats three[3];
    struct kvt_ans_stats stats;

    (void)state;
    fill(&stats, three);
    for (uint32_t i = 0; i < TOO_MANY; i++) {
        gpus[i] = three[0];
        gpus[i].index = UINT32_MAX;
        gpus[i].paths_count = 0;
    }
    stats.gpus = gpus;
    for (uint32_t count = 1; count <= TOO_MANY; count++) {
        struct page page;

        stats.gpus_count = count;
        page_open(&page);
        kvt_ctl_view_l1(&page.view, &stats);
        (void)fclose(page.view.out);
        expect_list(&page, KVT_MIN(count, (uint32_t)KVT_API_GPUS_MAX),
                    count <= KVT_API_GPUS_MAX ? "\n" : ", ...\n");
        free(page.text);
    }
}

/* The backend without GPUs has a size, at least. */
static void test_host(void **state)
{
    struct kvt_ans_stats stats = {
        .l1 = {.backend = TEXT("host")},
        .tiers_count = 1,
        .tiers = {{.tier = 1, .capacity_bytes = 32 << 20, .used_bytes = 8 << 20}}};
    struct page page;

    (void)state;
    page_open(&page);
    kvt_ctl_view_l1(&page.view, &stats);
    page_expect(&page, "L1\n  host memory, in the place of a GPU's: 32.0 MiB, 8.0 MiB of it used; "
                       "all copies by one thread of the CPU\n\n");
}

static void test_doctor_of_daemon(void **state)
{
    struct kvt_api_gpu_stats gpus[3];
    struct kvt_ctl_report report = {0};
    struct kvt_ans_stats stats;

    (void)state;
    fill(&stats, gpus);
    kvt_ctl_check_gpus(&report, &stats);
    expect(&report, KVT_CTL_LEVEL_WARN, "GPU 0 NVIDIA H200: lost 1 times, 1 copies had wrong");
    expect(&report, KVT_CTL_LEVEL_BAD, "L4 is lost for 1 min 10 s");
    expect(&report, KVT_CTL_LEVEL_BAD, "GPU 2 NVIDIA T4 is not used: sm_75 is too old");
    assert_int_equal(report.count, 3);
    gpus[0].losses = gpus[0].bad_checks = 0;
    stats.gpus_count = 1;
    stats.l1.is_host_pinned = false;
    stats.l1.pin_why = TEXT("out of memory");
    report.count = 0;
    kvt_ctl_check_gpus(&report, &stats);
    expect(&report, KVT_CTL_LEVEL_OK, "GPU 0 NVIDIA H200 is in service, arena of 60.0 GiB");
    expect(&report, KVT_CTL_LEVEL_WARN, "L2 is not pinned for the GPUs: out of memory");
    assert_non_null(strstr(report.findings[0].remedy, "LimitMEMLOCK=infinity"));
    /* With the GPU in whose context it was there is nothing to set. */
    stats.gpus_count = 2;
    report.count = 0;
    kvt_ctl_check_gpus(&report, &stats);
    assert_non_null(strstr(report.findings[0].remedy, "when the GPU that is lost is back"));
    assert_null(strstr(report.findings[0].remedy, "LimitMEMLOCK"));
    stats.gpus_count = 0;
    stats.l1.why = TEXT("no GPU");
    report.count = 0;
    kvt_ctl_check_gpus(&report, &stats);
    expect(&report, KVT_CTL_LEVEL_BAD, "off: no GPU");
    stats.l1.backend = TEXT("host");
    report.count = 0;
    kvt_ctl_check_gpus(&report, &stats);
    assert_int_equal(report.count, 0);
}

/* ---- a machine ------------------------------------------------------------------------------- */

static void put(const char *root, const char *path, const char *text, unsigned mode)
{
    char full[ROOM];
    int fd;

    (void)snprintf(full, sizeof(full), "%s%s", root, path);
    for (char *at = full + strlen(root) + 1; (at = strchr(at, '/')) != NULL; at++) {
        *at = '\0';
        (void)mkdir(full, 0700);
        *at = '/';
    }
    fd = open(full, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    assert_true(fd >= 0);
    assert_int_equal(write(fd, text, strlen(text)), strlen(text));
    assert_int_equal(fchmod(fd, mode), 0);
    assert_int_equal(close(fd), 0);
}

static void make_machine(const char *root)
{
    put(root, "/proc/driver/nvidia/version",
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul 27 07:00:00 UTC\n"
        "GCC version: gcc 12.2.0\n",
        0600);
    put(root, "/proc/driver/nvidia/gpus/0000:3b:00.0/information",
        "Model: \t\t NVIDIA H200\nDevice Minor: \t 0\n", 0600);
    put(root, "/proc/driver/nvidia/gpus/0000:5e:00.0/information",
        "Model: \t\t NVIDIA H200\nDevice Minor: \t 3\n", 0600);
    /* The daemon's user owns nothing here and is in a group that does not, either. */
    put(root, "/proc/4711/status",
        "Name:\tkvtierd\nUid:\t65000\t65001\t65001\t65001\nGid:\t65002\t65002\t65002\t65002\n"
        "Groups:\t65003 65004 \n",
        0600);
    put(root, "/dev/nvidiactl", "", 0666);
    put(root, "/dev/nvidia-uvm", "", 0666);
    put(root, "/dev/nvidia0", "", 0666);
}

static void forget(const char *root)
{
    char command[ROOM];
    FILE *pipe;

    (void)snprintf(command, sizeof(command), "rm -rf %s", root);
    pipe = popen(command, "r");
    assert_non_null(pipe);
    assert_int_equal(pclose(pipe), 0);
}

static void test_machine(void **state)
{
    char root[] = "/tmp/kvt-gpus-XXXXXX";
    struct kvt_ctl_pools pools = {.source = "configuration", .is_cuda = true};
    struct kvt_ctl_report report = {0};
    struct kvt_ctl_facts facts;

    (void)state;
    assert_non_null(mkdtemp(root));
    kvt_ctl_facts_gather(&facts, root, 4711);
    assert_false(facts.gpu.has_driver);
    kvt_ctl_check_gpu_machine(&report, &facts, &pools);
    expect(&report, KVT_CTL_LEVEL_BAD, "no NVIDIA driver is loaded");
    make_machine(root);
    kvt_ctl_facts_gather(&facts, root, 4711);
    assert_string_equal(facts.gpu.driver_version, "580.65.06");
    assert_int_equal(facts.gpu.gpus_count, 2);
    assert_int_equal(facts.gpu.nodes_count, 4);
    report.count = 0;
    kvt_ctl_check_gpu_machine(&report, &facts, &pools);
    expect(&report, KVT_CTL_LEVEL_OK, "580.65.06, 2 GPUs");
    expect(&report, KVT_CTL_LEVEL_BAD, "/dev/nvidia3: No such file");
    put(root, "/dev/nvidia3", "", 0660);
    put(root, "/etc/systemd/system/kvtierd.service", "[Service]\nPrivateDevices=yes\n", 0600);
    kvt_ctl_facts_gather(&facts, root, 4711);
    report.count = 0;
    kvt_ctl_check_gpu_machine(&report, &facts, &pools);
    expect(&report, KVT_CTL_LEVEL_BAD, "/dev/nvidia3 (mode 0660) may not be opened");
    expect(&report, KVT_CTL_LEVEL_BAD, "PrivateDevices=yes in /etc/systemd/system/kvtierd");
    put(root, "/dev/nvidia3", "", 0666);
    put(root, "/etc/systemd/system/kvtierd.service.d/gpu.conf", "[Service]\nPrivateDevices=no\n",
        0600);
    kvt_ctl_facts_gather(&facts, root, 4711);
    report.count = 0;
    kvt_ctl_check_gpu_machine(&report, &facts, &pools);
    expect(&report, KVT_CTL_LEVEL_OK, "the 4 that it needs may be opened");
    assert_int_equal(kvt_ctl_report_worst(&report), KVT_CTL_LEVEL_OK);
    forget(root);
}

/* A node of the daemon's own group. */
static void test_groups(void **state)
{
    char root[] = "/tmp/kvt-gpus-XXXXXX", status[128];
    struct kvt_ctl_gpu_facts facts;

    (void)state;
    assert_non_null(mkdtemp(root));
    make_machine(root);
    put(root, "/dev/nvidia0", "", 0660);
    put(root, "/dev/nvidia3", "", 0600);
    (void)snprintf(status, sizeof(status),
                   "Uid:\t65000\t65001\nGid:\t65002\t65002\nGroups:\t7 %u\n", (unsigned)getegid());
    put(root, "/proc/4711/status", status, 0600);
    kvt_ctl_gpu_facts_gather(&facts, root, 4711);
    for (uint32_t i = 0; i < facts.nodes_count; i++)
        assert_int_equal(facts.nodes[i].error,
                         strcmp(facts.nodes[i].path, "/dev/nvidia3") == 0 ? EACCES : 0);
    (void)snprintf(status, sizeof(status), "Uid:\t65000\t%u\nGid:\t1\t1\n", (unsigned)geteuid());
    put(root, "/proc/4711/status", status, 0600);
    kvt_ctl_gpu_facts_gather(&facts, root, 4711);
    for (uint32_t i = 0; i < facts.nodes_count; i++)
        assert_int_equal(facts.nodes[i].error, 0);
    forget(root);
}

/* Keys that only GPUs have, in a configuration without them. */
static void test_idle_keys(void **state)
{
    static const struct {
        const char *yaml, *says; /* says NULL: nothing */
    } rows[] = {
        {"tiers:\n  l1:\n    backend: host\n    bytes: 1GiB\n    export: true\n",
         "tiers.l1.export is set, but"},
        {"tiers:\n  l1:\n    gpus: \"0, 1\"\n", "tiers.l1.gpus is set, but"},
        {"tiers:\n  l1:\n    gpus: 0\n    export: true\n",
         "tiers.l1.gpus and tiers.l1.export are set, but"},
        {"tiers:\n  l1:\n    gpus: all\n    export: false\n", NULL},
        {"tiers:\n  l1:\n    backend: cuda\n    bytes: 1GiB\n    gpus: 0\n    export: true\n",
         NULL},
    };
    char root[] = "/tmp/kvt-gpus-XXXXXX", path[ROOM];
    struct kvt_ctl_facts facts = {.gpu = {.has_driver = true}};

    (void)state;
    assert_non_null(mkdtemp(root));
    (void)snprintf(path, sizeof(path), "%s/c.yaml", root);
    for (size_t i = 0; i < KVT_COUNT_OF(rows); i++) {
        struct kvt_ctl_report report = {0};
        struct kvt_ctl_pools pools;

        put(root, "/c.yaml", rows[i].yaml, 0600);
        assert_int_equal(kvt_ctl_pools_load(&pools, path, stderr), KVT_CTL_OK);
        kvt_ctl_check_gpu_machine(&report, &facts, &pools);
        if (rows[i].says != NULL)
            expect(&report, KVT_CTL_LEVEL_WARN, rows[i].says);
        else
            assert_int_equal(kvt_ctl_report_worst(&report), KVT_CTL_LEVEL_OK);
    }
    forget(root);
}

/* What a configuration wants of the machine's memory: pinned staging of each GPU, or a share. */
static void test_memory(void **state)
{
    static const struct {
        const char *yaml;
        uint64_t l1_bytes, milli_pct, staging_bytes;
        bool is_cuda;
    } rows[] = {
        {"tiers:\n  l1:\n    backend: cuda\n    bytes: 60%\n    staging: 128MiB\n", 0, 0,
         128 * KVT_MIB, true},
        {"tiers:\n  l1:\n    backend: cuda\n    bytes: 60GiB\n", 0, 0, 64 * KVT_MIB, true},
        {"tiers:\n  l1:\n    backend: host\n    bytes: 12.5%\n", 0, 12500, 0, false},
        {"tiers:\n  l1:\n    backend: host\n    bytes: 1GiB\n", KVT_GIB, 0, 0, false},
        {"tiers:\n  l2:\n    bytes: 1GiB\n", 0, 0, 0, false},
    };
    char root[] = "/tmp/kvt-gpus-XXXXXX", path[ROOM];
    struct kvt_api_gpu_stats gpus[3];
    struct kvt_ans_stats stats;
    struct kvt_ctl_pools pools;

    (void)state;
    assert_non_null(mkdtemp(root));
    (void)snprintf(path, sizeof(path), "%s/c.yaml", root);
    for (size_t i = 0; i < KVT_COUNT_OF(rows); i++) {
        put(root, "/c.yaml", rows[i].yaml, 0600);
        assert_int_equal(kvt_ctl_pools_load(&pools, path, stderr), KVT_CTL_OK);
        assert_true(pools.l1_bytes == rows[i].l1_bytes);
        assert_true(pools.l1_milli_pct == rows[i].milli_pct);
        assert_true(pools.gpu_staging_bytes == rows[i].staging_bytes);
        assert_int_equal(pools.is_cuda, rows[i].is_cuda);
    }
    forget(root);
    fill(&stats, gpus);
    gpus[2].staging_bytes = 1; /* refused: it has none */
    kvt_ctl_pools_from_stats(&pools, &stats);
    assert_true(pools.is_cuda && pools.l1_bytes == 64 * KVT_MIB);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_page),      cmocka_unit_test(test_heads),
        cmocka_unit_test(test_json),      cmocka_unit_test(test_health),
        cmocka_unit_test(test_missing),   cmocka_unit_test(test_doctor_of_daemon),
        cmocka_unit_test(test_machine),   cmocka_unit_test(test_groups),
        cmocka_unit_test(test_memory),    cmocka_unit_test(test_none_used),
        cmocka_unit_test(test_ways),      cmocka_unit_test(test_host),
        cmocka_unit_test(test_idle_keys), cmocka_unit_test(test_many),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
