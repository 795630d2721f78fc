/* Which GPUs L1 uses and why not the others, over the answers of a CUDA that is a table of numbers:
 * every reason for which there is none, the words of the configuration, the bytes of an arena, and
 * the NUMA nodes of a made-up /sys. */
#include <ftw.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tests/common/cmocka.h"
#include "tiers/device/probe.h"

#define GPUS_MAX 20

/* What this CUDA answers. */
static struct {
    int driver_version, runtime_version, count_error, count;
    int info_error[GPUS_MAX], set_error[GPUS_MAX], memory_error;
    struct kvt_cuda_info info[GPUS_MAX];
    uint64_t free_bytes, total_bytes;
    int device, contexts; /* of set_device */
} cuda;

static int driver_version(int *ret_version)
{
    *ret_version = cuda.driver_version;
    return KVT_CUDA_OK;
}

static int runtime_version(int *ret_version)
{
    *ret_version = cuda.runtime_version;
    return KVT_CUDA_OK;
}

static int device_count(int *ret_count)
{
    if (cuda.count_error == KVT_CUDA_OK)
        *ret_count = cuda.count;
    return cuda.count_error;
}

static int device_info(int device, struct kvt_cuda_info *ret_info)
{
    if (cuda.info_error[device] == KVT_CUDA_OK)
        *ret_info = cuda.info[device];
    return cuda.info_error[device];
}

static int set_device(int device)
{
    cuda.device = device;
    cuda.contexts++;
    return cuda.set_error[device];
}

static int memory_info(uint64_t *ret_free_bytes, uint64_t *ret_total_bytes)
{
    *ret_free_bytes = cuda.free_bytes;
    *ret_total_bytes = cuda.total_bytes;
    return cuda.memory_error;
}

static const char *error_name(int error)
{
    return error == KVT_CUDA_ECC ? "cudaErrorECCUncorrectable" : "cudaErrorOfTest";
}

static const struct kvt_cuda_calls calls = {.driver_version = driver_version,
                                            .runtime_version = runtime_version,
                                            .device_count = device_count,
                                            .device_info = device_info,
                                            .set_device = set_device,
                                            .memory_info = memory_info,
                                            .error_name = error_name};

static struct kvt_device_config config;

/* UUIDs begin with the GPU's number in each byte but the last; GPU 1 and GPU 11 are apart there. */
static int begin(void **state)
{
    (void)state;
    memset(&cuda, 0, sizeof(cuda));
    cuda.driver_version = 13020;
    cuda.runtime_version = 13000;
    cuda.count = 3;
    cuda.free_bytes = 79 * KVT_GIB;
    cuda.total_bytes = 80 * KVT_GIB;
    for (int i = 0; i < GPUS_MAX; i++) {
        memset(cuda.info[i].uuid, 0xa0 + i % 10, sizeof(cuda.info[i].uuid));
        cuda.info[i].uuid[15] = (uint8_t)i;
        cuda.info[i].sm = 80;
        (void)snprintf(cuda.info[i].name, sizeof(cuda.info[i].name), "NVIDIA Test");
        (void)snprintf(cuda.info[i].pci, sizeof(cuda.info[i].pci), "0000:%02x:00.0", i);
    }
    config = (struct kvt_device_config){.backend = "cuda",
                                        .gpus = "all",
                                        .bytes = 60 * KVT_GIB,
                                        .headroom_bytes = KVT_GIB,
                                        .staging_bytes = 64 * KVT_MIB,
                                        .sysfs = "/nowhere",
                                        .mps_pipes = "/nowhere"};
    assert_int_equal(unsetenv("CUDA_MPS_PIPE_DIRECTORY"), 0);
    return 0;
}

static void expect_none(const char *visible, const char *why)
{
    struct kvt_probe probe;

    memset(&probe, 0xff, sizeof(probe));
    assert_int_equal(kvt_probe_find(&calls, &config, visible, &probe), KVT_DEVICE_E_NONE);
    assert_string_equal(probe.report.why, why);
    assert_true(probe.report.has_cuda);
    assert_int_equal(cuda.contexts, 0);
}

static void test_no_cuda_at_all(void **state)
{
    struct kvt_probe probe;

    (void)state;
    assert_int_equal(kvt_probe_find(NULL, &config, NULL, &probe), KVT_DEVICE_E_NONE);
    assert_false(probe.report.has_cuda);
    assert_string_equal(probe.report.why, "this build has no CUDA: build with -Dcuda=enabled");
    cuda.count_error = KVT_CUDA_OLD_DRIVER;
    cuda.driver_version = 0;
    expect_none(NULL, "no NVIDIA driver");
    cuda.driver_version = 12020;
    expect_none(NULL, "driver 12.2 is too old for CUDA 13.0: install a newer one");
    cuda.count_error = KVT_CUDA_NO_DEVICE;
    expect_none(NULL, "no GPU");
    expect_none("7", "no GPU: CUDA_VISIBLE_DEVICES is \"7\"");
    cuda.count_error = KVT_CUDA_OK;
    cuda.count = 0;
    expect_none(NULL, "no GPU");
    cuda.count_error = 802;
    expect_none(NULL, "CUDA does not start: cudaErrorOfTest (802): is nvidia-fabricmanager "
                      "running?");
    cuda.count_error = 803;
    expect_none(NULL, "CUDA does not start: cudaErrorOfTest (803): the driver's library and kernel "
                      "module differ: restart the machine");
    cuda.count_error = KVT_CUDA_ECC;
    expect_none(NULL, "CUDA does not start: cudaErrorECCUncorrectable (214)");
}

static void test_gpus_that_cannot_be_used(void **state)
{
    struct kvt_probe probe;

    (void)state;
    cuda.info[0].is_prohibited = true;
    cuda.info_error[2] = KVT_CUDA_ECC;
    assert_int_equal(kvt_probe_find(&calls, &config, NULL, &probe), 0);
    assert_int_equal(probe.report.gpus_count, 3);
    assert_int_equal(probe.report.driver_version, 13020);
    assert_string_equal(probe.report.why, "");
    assert_int_equal(probe.gpus[0].state, KVT_GPU_REFUSED);
    assert_string_equal(probe.gpus[0].why,
                        "GPU 0 is in compute mode \"prohibited\": nvidia-smi -c DEFAULT");
    assert_int_equal(probe.gpus[1].state, KVT_GPU_OK);
    assert_int_equal(probe.gpus[1].numa_node, -1);
    assert_string_equal(probe.gpus[1].why, "");
    assert_string_equal(probe.gpus[2].why,
                        "GPU 2 does not answer: cudaErrorECCUncorrectable (214)");
    assert_int_equal(probe.gpus[2].index, 2);
    config.gpus = "2";
    expect_none(NULL, "GPU 2 does not answer: cudaErrorECCUncorrectable (214)");
    config.gpus = "0, 2";
    expect_none(NULL, "none of 2 GPUs can be used; the first: GPU 0 is in compute mode "
                      "\"prohibited\": nvidia-smi -c DEFAULT");
}

static void test_too_old(void **state)
{
    struct kvt_probe probe;

    (void)state;
    cuda.info[0].sm = 75;
    cuda.info[1].sm = 79;
    assert_int_equal(kvt_probe_find(&calls, &config, NULL, &probe), 0);
    assert_string_equal(probe.gpus[0].why,
                        "GPU 0 (compute capability 7.5) is too old: 8.0 or newer is needed");
    assert_int_equal(probe.gpus[0].state, KVT_GPU_REFUSED);
    assert_int_equal(probe.gpus[1].state, KVT_GPU_REFUSED);
    assert_int_equal(probe.gpus[2].state, KVT_GPU_OK);
    config.gpus = "0";
    expect_none(NULL, "GPU 0 (compute capability 7.5) is too old: 8.0 or newer is needed");
}

/* The daemon's context would be the only one; under MPS it is the server's. */
static void test_exclusive(void **state)
{
    struct kvt_probe probe;

    (void)state;
    cuda.info[0].is_exclusive = true;
    config.gpus = "0";
    expect_none(NULL, "GPU 0 is in exclusive mode: engines could not use it beside kvtierd: "
                      "nvidia-smi -c DEFAULT, or MPS");
    assert_int_equal(setenv("CUDA_MPS_PIPE_DIRECTORY", "", 1), 0); /* set to nothing is not set */
    expect_none(NULL, "GPU 0 is in exclusive mode: engines could not use it beside kvtierd: "
                      "nvidia-smi -c DEFAULT, or MPS");
    assert_int_equal(setenv("CUDA_MPS_PIPE_DIRECTORY", "/run/mps", 1), 0);
    assert_int_equal(kvt_probe_find(&calls, &config, NULL, &probe), 0);
    assert_int_equal(unsetenv("CUDA_MPS_PIPE_DIRECTORY"), 0);
    config.mps_pipes = "/";
    assert_int_equal(kvt_probe_find(&calls, &config, NULL, &probe), 0);
    assert_int_equal(probe.gpus[0].state, KVT_GPU_OK);
}

static void test_choice(void **state)
{
    struct kvt_probe probe;

    (void)state;
    config.gpus = " 2 ,GPU-A1a1a1a1-a1a1,7,GPU-a1a1a1a1, GPU-ffffffff-ffff";
    assert_int_equal(kvt_probe_find(&calls, &config, NULL, &probe), 0);
    assert_int_equal(probe.report.gpus_count, 5);
    assert_int_equal(probe.gpus[0].index, 2);
    assert_int_equal(probe.gpus[0].state, KVT_GPU_OK);
    assert_int_equal(probe.gpus[1].index, 1);
    assert_int_equal(probe.gpus[1].state, KVT_GPU_OK);
    assert_int_equal(probe.gpus[2].index, 7);
    assert_string_equal(probe.gpus[2].why, "no GPU 7; there are: 0 (GPU-a0a0a0a0), 1 "
                                           "(GPU-a1a1a1a1), 2 (GPU-a2a2a2a2)");
    assert_string_equal(probe.gpus[3].why, "GPU 1 is named twice in tiers.l1.gpus");
    assert_int_equal(probe.gpus[4].index, -1);
    assert_string_equal(probe.gpus[4].why, "no GPU-ffffffffffff; there are: 0 (GPU-a0a0a0a0), 1 "
                                           "(GPU-a1a1a1a1), 2 (GPU-a2a2a2a2)");
    /* More than fits the line. */
    cuda.count = 12;
    config.gpus = "19,GPU-a1a1a1a1,GPU-a1a1a1a1-a1a1-a1a1-a1a1-a1a1a1a1a10b";
    assert_int_equal(kvt_probe_find(&calls, &config, NULL, &probe), 0);
    assert_non_null(strstr(probe.gpus[0].why, "(GPU-a5a5a5a5), 6 (GPU-a6a6a6a6) ..."));
    assert_true(strlen(probe.gpus[0].why) < sizeof(probe.gpus[0].why));
    assert_string_equal(probe.gpus[1].why, "GPU-a1a1a1a1 fits 2 GPUs: write more of its digits");
    assert_int_equal(probe.gpus[2].index, 11);
    assert_int_equal(probe.gpus[2].state, KVT_GPU_OK);
    config.gpus = "19";
    cuda.count = 1;
    expect_none(NULL, "no GPU 19; there are: 0 (GPU-a0a0a0a0)");
}

/* All, of more than there can be zones: the first that can be used are, the others are told. */
static void test_more_than_zones(void **state)
{
    struct kvt_probe probe;

    (void)state;
    cuda.count = GPUS_MAX;
    cuda.info[2].sm = 75;
    assert_int_equal(kvt_probe_find(&calls, &config, NULL, &probe), 0);
    assert_int_equal(probe.report.gpus_count, GPUS_MAX);
    assert_int_equal(probe.report.left_out_count, GPUS_MAX - KVT_ZONES_MAX - 1);
    assert_int_equal(probe.report.refused_count, 0); /* the set's, then */
    for (int i = 0; i < GPUS_MAX; i++) {
        assert_int_equal(probe.gpus[i].index, i);
        assert_int_equal(probe.gpus[i].is_left_out, i > (int)KVT_ZONES_MAX);
        assert_int_equal(probe.gpus[i].state,
                         i == 2 || i > (int)KVT_ZONES_MAX ? KVT_GPU_REFUSED : KVT_GPU_OK);
    }
    assert_string_equal(probe.gpus[17].why, "GPU 17 is left out: L1 takes 16 GPUs at most: name in "
                                            "tiers.l1.gpus which");
    config.gpus = "17, 18";
    assert_int_equal(kvt_probe_find(&calls, &config, NULL, &probe), 0);
    assert_int_equal(probe.report.left_out_count, 0);
    assert_int_equal(probe.gpus[1].state, KVT_GPU_OK);
}

/* Each GPU that is not used is kept, with its name and its own reason. */
static void test_all_refused(void **state)
{
    struct kvt_probe probe;

    (void)state;
    cuda.count = 2;
    cuda.info[0].is_prohibited = true;
    cuda.info[1].sm = 75;
    config.gpus = "1, 0, 5";
    assert_int_equal(kvt_probe_find(&calls, &config, NULL, &probe), KVT_DEVICE_E_NONE);
    assert_int_equal(probe.report.refused_count, 3);
    assert_int_equal(probe.report.refused[0].index, 1);
    assert_string_equal(probe.report.refused[0].info.name, "NVIDIA Test");
    assert_non_null(strstr(probe.report.refused[0].why, "is too old"));
    assert_non_null(strstr(probe.report.refused[1].why, "is in compute mode"));
    assert_non_null(strstr(probe.report.refused[2].why, "no GPU 5; there are: 0"));
}

static void test_words_that_mean_nothing(void **state)
{
    static const struct {
        const char *gpus, *why;
    } cases[] = {
        {NULL, "tiers.l1.gpus names no GPU: \"all\", or indices and UUIDs"},
        {"", "tiers.l1.gpus names no GPU: \"all\", or indices and UUIDs"},
        {"  ", "tiers.l1.gpus names no GPU: \"all\", or indices and UUIDs"},
        {"all, 0", "tiers.l1.gpus is \"all\", or names GPUs: not both"},
        {"1,all", "tiers.l1.gpus is \"all\", or names GPUs: not both"},
        {"0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16", "tiers.l1.gpus names more than 16 GPUs"},
    };
    static const char *const words[] = {"0,",
                                        "x",
                                        "-1",
                                        "GPU-1b2c3d4",
                                        "GPU-1b2g3d4e",
                                        "12345",
                                        "GPU-",
                                        "gpu0",
                                        "1b2c3d4e",
                                        "0 1",
                                        "GPU-0123456789abcdef0123456789abcdef0",
                                        ",",
                                        "0,,1",
                                        "all all"};
    struct kvt_probe_choices choices;
    struct kvt_probe probe;
    char why[KVT_DEVICE_LINE_BYTES];

    (void)state;
    for (size_t i = 0; i < KVT_COUNT_OF(cases); i++) {
        why[0] = '\0';
        assert_int_equal(kvt_probe_parse(cases[i].gpus, &choices, why), -EINVAL);
        assert_string_equal(why, cases[i].why);
    }
    for (size_t i = 0; i < KVT_COUNT_OF(words); i++) {
        why[0] = '\0';
        assert_int_equal(kvt_probe_parse(words[i], &choices, why), -EINVAL);
        assert_non_null(
            strstr(why, "is not a GPU: \"all\", an index (0), or a UUID of nvidia-smi"));
    }
    assert_int_equal(kvt_probe_parse("all", &choices, why), 0);
    assert_true(choices.is_all);
    assert_int_equal(choices.count, 0);
    /* A word that is nonsense is that with no GPU and no CUDA, too. */
    config.gpus = "first";
    assert_int_equal(kvt_probe_find(NULL, &config, NULL, &probe), -EINVAL);
    assert_non_null(strstr(probe.report.why, "\"first\" is not a GPU"));
}

static struct kvt_device_gpu size_of_gpu(int index)
{
    struct kvt_device_gpu gpu = {.index = index, .info = cuda.info[index]};

    cuda.device = -1;
    kvt_probe_size(&calls, &config, &gpu);
    assert_int_equal(cuda.device, index);
    return gpu;
}

static void test_room(void **state)
{
    struct kvt_device_gpu gpu;

    (void)state;
    gpu = size_of_gpu(1);
    assert_int_equal(gpu.state, KVT_GPU_OK);
    assert_true(gpu.arena_bytes == 60 * KVT_GIB && gpu.staging_bytes == 64 * KVT_MIB);
    config.bytes += 4096; /* whole huge pages of it */
    assert_true(size_of_gpu(1).arena_bytes == 60 * KVT_GIB);
    cuda.free_bytes = 60 * KVT_GIB + KVT_GIB + 64 * KVT_MIB;
    assert_int_equal(size_of_gpu(1).state, KVT_GPU_OK);
    cuda.free_bytes--;
    gpu = size_of_gpu(1);
    assert_int_equal(gpu.state, KVT_GPU_REFUSED);
    assert_string_equal(gpu.why, "GPU 1: 60.00 GiB wanted + 64.00 MiB staging + 1.00 GiB headroom, "
                                 "61.06 GiB free of 80.00 GiB");
    assert_int_equal(gpu.arena_bytes, 0);
    config.bytes = 0;
    config.pct = 60;
    cuda.free_bytes = 79 * KVT_GIB;
    assert_true(size_of_gpu(2).arena_bytes ==
                kvt_round_down(80 * KVT_GIB / 100 * 60, KVT_HUGE_PAGE_BYTES));
    /* Numbers that no machine has. */
    config.pct = 0;
    config.bytes = config.headroom_bytes = UINT64_MAX - KVT_GIB;
    assert_int_equal(size_of_gpu(0).state, KVT_GPU_REFUSED);
    config.headroom_bytes = 0;
    config.bytes = UINT64_MAX;
    assert_int_equal(size_of_gpu(0).state, KVT_GPU_REFUSED);
    config.bytes = KVT_HUGE_PAGE_BYTES - 1;
    assert_int_equal(size_of_gpu(0).state, KVT_GPU_REFUSED);
}

static void test_context_refused(void **state)
{
    (void)state;
    cuda.info[0].is_exclusive = true;
    cuda.set_error[0] = cuda.set_error[1] = KVT_CUDA_DEVICES_UNAVAILABLE;
    cuda.set_error[2] = KVT_CUDA_ECC;
    assert_string_equal(size_of_gpu(0).why, "GPU 0 is in exclusive mode and busy: nvidia-smi -c "
                                            "DEFAULT, or MPS");
    assert_string_equal(size_of_gpu(1).why, "GPU 1 is busy or not available to this process");
    assert_string_equal(size_of_gpu(2).why,
                        "GPU 2 cannot be used: cudaErrorECCUncorrectable (214)");
    cuda.memory_error = KVT_CUDA_NO_MEMORY;
    cuda.set_error[0] = KVT_CUDA_OK;
    assert_string_equal(size_of_gpu(0).why, "GPU 0 has no memory left for a context");
}

/* ---- NUMA ------------------------------------------------------------------------------------ */

static char sysfs[64];

static int remove_one(const char *path, const struct stat *status, int type, struct FTW *walk)
{
    (void)status;
    (void)type;
    (void)walk;
    return remove(path);
}

static void put_file(const char *name, const char *text)
{
    char path[256];
    FILE *file;

    (void)snprintf(path, sizeof(path), "%s/%s", sysfs, name);
    for (char *at = path + 1; (at = strchr(at, '/')) != NULL; at++) {
        *at = '\0';
        (void)mkdir(path, 0700);
        *at = '/';
    }
    file = fopen(path, "we");
    assert_non_null(file);
    assert_true(fputs(text, file) >= 0);
    assert_int_equal(fclose(file), 0);
}

static int begin_sysfs(void **state)
{
    (void)snprintf(sysfs, sizeof(sysfs), "/tmp/kvt-sysfs-XXXXXX");
    assert_non_null(mkdtemp(sysfs));
    (void)begin(state);
    config.sysfs = sysfs;
    return 0;
}

static int end_sysfs(void **state)
{
    (void)state;
    return nftw(sysfs, remove_one, 8, FTW_DEPTH | FTW_PHYS);
}

static uint32_t numa_nodes(const struct kvt_cuda_calls *of, int nodes[KVT_ZONES_MAX])
{
    struct kvt_device_found found;

    kvt_probe_look(of, &config, &found);
    return kvt_device_numa_nodes(&found, nodes);
}

static void test_numa(void **state)
{
    int nodes[KVT_ZONES_MAX];
    struct kvt_probe probe;

    (void)state;
    cuda.count = 6;
    put_file("bus/pci/devices/0000:00:00.0/numa_node", "1\n");
    put_file("bus/pci/devices/0000:01:00.0/numa_node", "0\n");
    put_file("bus/pci/devices/0000:02:00.0/numa_node", "1\n");
    put_file("bus/pci/devices/0000:03:00.0/numa_node", "-1\n");
    put_file("bus/pci/devices/0000:04:00.0/numa_node", "what\n");
    put_file("bus/pci/devices/0000:05:00.0/numa_node", "5\n");
    cuda.info[5].is_prohibited = true;
    /* A machine of one node, or that does not say. */
    assert_int_equal(numa_nodes(&calls, nodes), 0);
    put_file("devices/system/node/online", "0\n");
    assert_int_equal(numa_nodes(&calls, nodes), 0);
    put_file("devices/system/node/online", "0-1\n");
    assert_int_equal(numa_nodes(&calls, nodes), 2);
    assert_int_equal(nodes[0], 1);
    assert_int_equal(nodes[1], 0);
    assert_int_equal(kvt_probe_find(&calls, &config, NULL, &probe), 0);
    assert_int_equal(probe.gpus[0].numa_node, 1);
    assert_int_equal(probe.gpus[3].numa_node, -1);
    assert_int_equal(probe.gpus[4].numa_node, -1);
    assert_int_equal(probe.gpus[5].numa_node, 5);
    config.gpus = "2";
    assert_int_equal(numa_nodes(&calls, nodes), 1);
    assert_int_equal(nodes[0], 1);
    config.gpus = "3";
    assert_int_equal(numa_nodes(&calls, nodes), 0);
    cuda.count_error = KVT_CUDA_NO_DEVICE;
    config.gpus = "all";
    assert_int_equal(numa_nodes(&calls, nodes), 0);
    assert_int_equal(numa_nodes(NULL, nodes), 0);
    assert_int_equal(kvt_device_numa_nodes(NULL, nodes), 0);
    assert_int_equal(cuda.contexts, 0);
    /* Nothing that a name could lead elsewhere. */
    put_file("numa_node", "1\n");
    assert_int_equal(kvt_probe_numa_node(sysfs, "../../../../"), -1);
    assert_int_equal(kvt_probe_numa_node(sysfs, "../.."), -1);
    assert_int_equal(kvt_probe_numa_node(sysfs, ""), -1);
    put_file("bus/pci/devices/0000:06:00.0/numa_node", "99999999999\n");
    assert_int_equal(kvt_probe_numa_node(sysfs, "0000:06:00.0"), -1);
}

static void test_uuid_text(void **state)
{
    uint8_t uuid[KVT_CUDA_UUID_BYTES];
    char text[KVT_GPU_UUID_TEXT_BYTES];

    (void)state;
    for (uint32_t i = 0; i < sizeof(uuid); i++)
        uuid[i] = (uint8_t)(i * 16 + 15 - i);
    kvt_gpu_uuid_text(uuid, text);
    assert_string_equal(text, "GPU-0f1e2d3c-4b5a-6978-8796-a5b4c3d2e1f0");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(test_no_cuda_at_all, begin),
        cmocka_unit_test_setup(test_gpus_that_cannot_be_used, begin),
        cmocka_unit_test_setup(test_too_old, begin),
        cmocka_unit_test_setup(test_exclusive, begin),
        cmocka_unit_test_setup(test_choice, begin),
        cmocka_unit_test_setup(test_more_than_zones, begin),
        cmocka_unit_test_setup(test_all_refused, begin),
        cmocka_unit_test_setup(test_words_that_mean_nothing, begin),
        cmocka_unit_test_setup(test_room, begin),
        cmocka_unit_test_setup(test_context_refused, begin),
        cmocka_unit_test_setup_teardown(test_numa, begin_sysfs, end_sysfs),
        cmocka_unit_test(test_uuid_text),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
