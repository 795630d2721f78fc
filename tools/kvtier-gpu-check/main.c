/* kvtier-gpu-check: the parts, one after another, each with its share of the time. */
#include "tools/kvtier-gpu-check/gpu_check.h"

#include <getopt.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/clock.h"
#include "tools/kvtier-gpu-check/child.h"

#define SECONDS_DEFAULT 200u
#define SECONDS_MAX 3600u

static const struct part {
    const char *name;
    void (*run)(struct gpu_check *check);
    uint32_t share_pct;
} parts[] = {
    {"correct", gpu_check_correct, 25},
    {"speed", gpu_check_speed, 35},
    {"crossover", gpu_check_crossover, 5},
    {"tier", gpu_check_tier, 15},
    {"ipc", gpu_check_ipc, 15},
    {"loss", gpu_check_loss, 5},
};

static const char usage[] =
    "usage: kvtier-gpu-check [options]\n"
    "Checks the kernels and the device tier on a GPU, and measures them.\n"
    "  --device N       CUDA's index of the GPU (0)\n"
    "  --seconds N      for everything (200)\n"
    "  --parts A,B      only these: correct, speed, crossover, tier, ipc, loss\n"
    "  --json FILE      writes what was found there, too\n"
    "  --seed N         of the random cases (that of the clock)\n"
    "  --small          little memory and few cases, for a debugger or a sanitizer\n"
    "Exit status: 0 no wrong byte and nothing failed (a target may be missed), 1 wrong bytes or a\n"
    "failure, 2 the options make no sense, 77 there is no GPU that can be used.\n";

static bool parse_number(const char *text, uint64_t max, uint64_t *ret_value)
{
    char *end;
    uint64_t value;

    errno = 0;
    value = strtoull(text, &end, 10);
    if (errno != 0 || end == text || *end != '\0' || *text == '-' || value > max)
        return false;
    *ret_value = value;
    return true;
}

static bool is_named(const char *list, const char *name)
{
    size_t bytes = strlen(name);

    for (const char *at = list; at != NULL;) {
        if (strncmp(at, name, bytes) == 0 && (at[bytes] == ',' || at[bytes] == '\0'))
            return true;
        at = strchr(at, ',');
        at = at == NULL ? NULL : at + 1;
    }
    return false;
}

static bool are_parts(const char *list)
{
    for (const char *at = list; at != NULL;) {
        size_t bytes = strcspn(at, ",");
        bool is_part = false;

        for (uint32_t i = 0; i < KVT_COUNT_OF(parts); i++)
            is_part = is_part ||
                      (strlen(parts[i].name) == bytes && strncmp(at, parts[i].name, bytes) == 0);
        if (!is_part)
            return false;
        at = at[bytes] == '\0' ? NULL : at + bytes + 1;
    }
    return true;
}

/* 0; else the exit status. */
static int parse(int argc, char **argv, struct gpu_check_options *ret_options)
{
    static const struct option longs[] = {{"device", required_argument, NULL, 'd'},
                                          {"seconds", required_argument, NULL, 's'},
                                          {"parts", required_argument, NULL, 'p'},
                                          {"json", required_argument, NULL, 'j'},
                                          {"seed", required_argument, NULL, 'r'},
                                          {"small", no_argument, NULL, 'm'},
                                          {"child", required_argument, NULL, 'c'},
                                          {"help", no_argument, NULL, 'h'},
                                          {0}};
    struct gpu_check_options options = {.seconds = SECONDS_DEFAULT, .seed = kvt_clock_real_ns()};
    bool is_good = true;
    uint64_t value;
    int c;

    while (is_good && (c = getopt_long(argc, argv, "h", longs, NULL)) != -1) {
        if (c == 'h') {
            (void)fputs(usage, stdout);
            return -1;
        }
        if (c == 'd' && (is_good = parse_number(optarg, 1024, &value)))
            options.device = (int)value;
        else if (c == 's' && (is_good = parse_number(optarg, SECONDS_MAX, &value)))
            options.seconds = (uint32_t)value;
        else if (c == 'r' && (is_good = parse_number(optarg, UINT64_MAX, &value)))
            options.seed = value;
        else if (c == 'p' && (is_good = are_parts(optarg)))
            options.parts = optarg;
        else if (c == 'j')
            options.json = optarg;
        else if (c == 'm')
            options.is_small = true;
        else if (c == 'c') /* not for people: see child.h */
            options.child = optarg;
        else
            is_good = false;
    }
    if (!is_good || optind != argc) {
        (void)fputs(usage, stderr);
        return 2;
    }
    *ret_options = options;
    return 0;
}

static int skip(const char *text)
{
    fprintf(stderr, "gpu-check: %s\n", text);
    return GPU_CHECK_SKIPPED;
}

/* 0; else the exit status, and it was said why. */
static int find_gpu(struct gpu_check *check)
{
    char text[160];
    int count = 0, error;

    check->calls = kvt_cuda_calls();
    if (check->calls == NULL)
        return skip("this build has no CUDA: meson setup -Dcuda=enabled says what is missing");
    (void)check->calls->driver_version(&check->driver_version);
    (void)check->calls->runtime_version(&check->runtime_version);
    error = check->calls->device_count(&count);
    if (check->driver_version == 0)
        return skip("no NVIDIA driver: it has to be installed and loaded");
    if (error == KVT_CUDA_OLD_DRIVER) {
        (void)snprintf(text, sizeof(text), "the driver is for CUDA %d.%d, too old for %d.%d",
                       check->driver_version / 1000, check->driver_version % 1000 / 10,
                       check->runtime_version / 1000, check->runtime_version % 1000 / 10);
        return skip(text);
    }
    if (error == KVT_CUDA_NO_DEVICE || (error == KVT_CUDA_OK && count == 0))
        return skip("no GPU: the driver is there and sees none");
    if (error == KVT_CUDA_OK && check->options.device >= count) {
        (void)snprintf(text, sizeof(text), "no GPU %d: there are %d", check->options.device, count);
        return skip(text);
    }
    if (error == KVT_CUDA_OK)
        error = check->calls->device_info(check->options.device, &check->info);
    if (error == KVT_CUDA_OK && check->calls->kernels == NULL)
        return skip("this build has no GPU kernels");
    if (error != KVT_CUDA_OK) {
        (void)snprintf(text, sizeof(text), "GPU %d: CUDA error %d: %s", check->options.device,
                       error, check->calls->error_name(error));
        return skip(text);
    }
    return 0;
}

/* Of parts that are not run, the time goes to the others. */
static void run_parts(struct gpu_check *check)
{
    uint64_t end_ns = kvt_time_add(check->begin_ns, check->options.seconds * KVT_NS_PER_S);
    uint32_t shares = 0;

    for (uint32_t i = 0; i < KVT_COUNT_OF(parts); i++)
        if (check->options.parts == NULL || is_named(check->options.parts, parts[i].name))
            shares += parts[i].share_pct;
    for (uint32_t i = 0; i < KVT_COUNT_OF(parts); i++) {
        uint64_t now_ns = kvt_clock_mono_ns();

        if (check->options.parts != NULL && !is_named(check->options.parts, parts[i].name))
            continue;
        check->part_end_ns =
            end_ns > now_ns ? now_ns + (end_ns - now_ns) * parts[i].share_pct / shares : now_ns;
        check->is_broken = false;
        shares -= parts[i].share_pct;
        parts[i].run(check);
    }
}

static int run_child(struct gpu_check *check)
{
    int status = 2;

    if (!gpu_check_open(check))
        status = 1;
    else if (strcmp(check->options.child, "pool") == 0)
        status = gpu_check_child_pool(check);
    else if (strcmp(check->options.child, "loss") == 0)
        status = gpu_check_child_loss(check);
    gpu_check_close(check);
    return status;
}

static int run(struct gpu_check *check)
{
    int status = 0;

    printf("GPU %d: %s, %.1f GiB, sm_%u; kernels: %s; seed %" PRIu64 "\n", check->options.device,
           check->info.name, (double)check->info.total_bytes / (double)KVT_GIB, check->info.sm,
           check->calls->kernels->name, check->options.seed);
    (void)fflush(stdout);
    if (gpu_check_open(check))
        run_parts(check);
    gpu_check_close(check);
    gpu_check_print(check, stdout);
    if (check->options.json != NULL && gpu_check_write_json(check) < 0) {
        fprintf(stderr, "gpu-check: %s cannot be written\n", check->options.json);
        status = 1;
    }
    if (gpu_check_wrong_bytes(check) > 0 || gpu_check_failures(check) > 0)
        status = 1;
    return status;
}

int gpu_check_main(int argc, char **argv, struct gpu_check_hooks hooks)
{
    struct gpu_check *check = calloc(1, sizeof(*check));
    int status;

    if (check == NULL)
        return 1;
    check->begin_ns = kvt_clock_mono_ns();
    check->hooks = hooks;
    status = parse(argc, argv, &check->options);
    check->random = check->options.seed;
    if (status == 0)
        status = find_gpu(check);
    if (status == 0)
        status = check->options.child != NULL ? run_child(check) : run(check);
    free(check);
    return status < 0 ? 0 : status;
}
