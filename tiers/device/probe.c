#include "tiers/device/probe.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "daemon/base/size.h"

/* CUDA's numbers that have a remedy of their own and matter nowhere else. */
#define ERROR_SYSTEM 304    /* the driver could not open its files */
#define ERROR_NOT_READY 802 /* the fabric of an HGX machine has no manager yet */
#define ERROR_DRIVER_MISMATCH 803
#define ERROR_COMPAT 804 /* the forward compatibility package is not for this GPU */

#define VERSION_TEXT_BYTES 16u
#define SM_MIN 80u                  /* the oldest for which the kernels are built */
#define MPS_PIPES "/tmp/nvidia-mps" /* where CUDA looks if the environment does not say */

/* ---- the words of the configuration ---------------------------------------------------------- */

static bool is_space(char c)
{
    return c == ' ' || c == '\t' || c == '\n';
}

static bool is_digit(char c)
{
    return c >= '0' && c <= '9';
}

/* The digit's value as a character in lower case, or '\0'. */
static char hex_digit(char c)
{
    if (is_digit(c) || (c >= 'a' && c <= 'f'))
        return c;
    return c >= 'A' && c <= 'F' ? (char)(c - 'A' + 'a') : '\0';
}

/* "GPU-1b2c3d4e-..." (or "MIG-..."): as many of its digits as there are. */
static bool parse_uuid(const char *word, size_t length, struct kvt_probe_choice *choice)
{
    uint32_t count = 0;

    if (length < 4 || (strncmp(word, "GPU-", 4) != 0 && strncmp(word, "MIG-", 4) != 0))
        return false;
    for (size_t i = 4; i < length; i++) {
        if (word[i] == '-')
            continue;
        if (hex_digit(word[i]) == '\0' || count + 1 == sizeof(choice->digits))
            return false;
        choice->digits[count++] = hex_digit(word[i]);
    }
    choice->digits[count] = '\0';
    choice->index = -1;
    return count >= KVT_PROBE_UUID_DIGITS_MIN;
}

static bool parse_index(const char *word, size_t length, struct kvt_probe_choice *choice)
{
    int index = 0;

    if (length == 0 || length > 4)
        return false;
    for (size_t i = 0; i < length; i++) {
        if (!is_digit(word[i]))
            return false;
        index = index * 10 + (word[i] - '0');
    }
    *choice = (struct kvt_probe_choice){.index = index};
    return true;
}

static int parse_word(struct kvt_probe_choices *choices, const char *word, size_t length,
                      char *ret_why)
{
    struct kvt_probe_choice *choice = &choices->choices[choices->count];

    if (choices->count == KVT_PROBE_CHOICES_MAX) {
        (void)snprintf(ret_why, KVT_DEVICE_LINE_BYTES, "tiers.l1.gpus names more than %u GPUs",
                       KVT_PROBE_CHOICES_MAX);
        return -EINVAL;
    }
    if (!parse_index(word, length, choice) && !parse_uuid(word, length, choice)) {
        (void)snprintf(ret_why, KVT_DEVICE_LINE_BYTES,
                       "tiers.l1.gpus: \"%.*s\" is not a GPU: \"all\", an index (0), or a UUID of "
                       "nvidia-smi -L (GPU- and at least %u digits)",
                       (int)KVT_MIN(length, 48u), word, KVT_PROBE_UUID_DIGITS_MIN);
        return -EINVAL;
    }
    choices->count++;
    return 0;
}

int kvt_probe_parse(const char *gpus, struct kvt_probe_choices *ret_choices,
                    char ret_why[KVT_DEVICE_LINE_BYTES])
{
    struct kvt_probe_choices choices = {0};
    const char *at = gpus == NULL ? "" : gpus;
    uint32_t words = 0;
    int r;

    for (;;) {
        const char *end, *next;

        while (is_space(*at))
            at++;
        next = end = at + strcspn(at, ",");
        while (end > at && is_space(end[-1]))
            end--;
        if (end == at && *next == '\0' && words == 0)
            break;
        words++;
        if (end - at == 3 && strncmp(at, "all", 3) == 0) {
            choices.is_all = true;
        } else {
            r = parse_word(&choices, at, (size_t)(end - at), ret_why);
            if (r < 0)
                return r;
        }
        if (*next == '\0')
            break;
        at = next + 1;
    }
    if (words == 0 || (choices.is_all && words > 1)) {
        (void)snprintf(ret_why, KVT_DEVICE_LINE_BYTES, "tiers.l1.gpus %s",
                       words == 0 ? "names no GPU: \"all\", or indices and UUIDs"
                                  : "is \"all\", or names GPUs: not both");
        return -EINVAL;
    }
    *ret_choices = choices;
    return 0;
}

void kvt_gpu_uuid_text(const uint8_t uuid[KVT_CUDA_UUID_BYTES],
                       char ret_text[KVT_GPU_UUID_TEXT_BYTES])
{
    size_t at = (size_t)snprintf(ret_text, KVT_GPU_UUID_TEXT_BYTES, "GPU-");

    for (uint32_t i = 0; i < KVT_CUDA_UUID_BYTES; i++)
        at += (size_t)snprintf(ret_text + at, KVT_GPU_UUID_TEXT_BYTES - at, "%s%02x",
                               i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "", uuid[i]);
}

static bool is_of_uuid(const struct kvt_probe_choice *choice, const struct kvt_cuda_info *info)
{
    char digits[2 * KVT_CUDA_UUID_BYTES + 1];

    for (uint32_t i = 0; i < KVT_CUDA_UUID_BYTES; i++)
        (void)snprintf(digits + 2 * i, 3, "%02x", info->uuid[i]);
    return strncmp(digits, choice->digits, strlen(choice->digits)) == 0;
}

/* ---- where a GPU is near -----------------------------------------------------------------------
 */

static const char *sysfs_of(const struct kvt_device_config *config)
{
    return config->sysfs != NULL ? config->sysfs : "/sys";
}

/* The first line of a small file. */
static bool read_line(const char *path, char *ret_line, int size)
{
    FILE *file = fopen(path, "re");
    bool is_read;

    if (file == NULL)
        return false;
    is_read = fgets(ret_line, size, file) != NULL;
    (void)fclose(file);
    return is_read;
}

int kvt_probe_numa_node(const char *sysfs, const char *pci)
{
    char path[512], line[32], *end;
    long node;

    /* The name is CUDA's: nothing else than a folder may come of it. */
    if (pci[0] == '\0' || strspn(pci, "0123456789abcdef:.") != strlen(pci) || pci[0] == '.')
        return -1;
    (void)snprintf(path, sizeof(path), "%s/bus/pci/devices/%s/numa_node", sysfs, pci);
    if (!read_line(path, line, sizeof(line)))
        return -1;
    node = strtol(line, &end, 10);
    return end == line || node < 0 || node >= KVT_NUMA_NODES_MAX ? -1 : (int)node;
}

bool kvt_probe_has_numa(const char *sysfs)
{
    char path[512], line[256];

    (void)snprintf(path, sizeof(path), "%s/devices/system/node/online", sysfs);
    /* "0", or a list of ranges: "0-1", "0,2". */
    return read_line(path, line, sizeof(line)) && strpbrk(line, ",-") != NULL;
}

/* ---- what CUDA shows ---------------------------------------------------------------------------
 */

static void version_text(int version, char ret_text[VERSION_TEXT_BYTES])
{
    (void)snprintf(ret_text, VERSION_TEXT_BYTES, "%d.%d", version / 1000, version % 1000 / 10);
}

void kvt_probe_tell_error(const struct kvt_cuda_calls *calls, int error, int driver_version,
                          int runtime_version, const char *visible,
                          char ret_why[KVT_DEVICE_LINE_BYTES])
{
    char driver[VERSION_TEXT_BYTES], runtime[VERSION_TEXT_BYTES];
    const char *remedy = "";

    version_text(driver_version, driver);
    version_text(runtime_version, runtime);
    if (error == KVT_CUDA_OLD_DRIVER && driver_version == 0) {
        (void)snprintf(ret_why, KVT_DEVICE_LINE_BYTES, "no NVIDIA driver");
        return;
    }
    if (error == KVT_CUDA_OLD_DRIVER) {
        (void)snprintf(ret_why, KVT_DEVICE_LINE_BYTES,
                       "driver %s is too old for CUDA %s: install a newer one", driver, runtime);
        return;
    }
    if (error == KVT_CUDA_NO_DEVICE || error == KVT_CUDA_OK) {
        (void)snprintf(ret_why, KVT_DEVICE_LINE_BYTES, "no GPU%s%.64s%s",
                       visible != NULL ? ": CUDA_VISIBLE_DEVICES is \"" : "",
                       visible != NULL ? visible : "", visible != NULL ? "\"" : "");
        return;
    }
    if (error == ERROR_SYSTEM)
        remedy = ": may the daemon's user open /dev/nvidia*?";
    else if (error == ERROR_NOT_READY)
        remedy = ": is nvidia-fabricmanager running?";
    else if (error == ERROR_DRIVER_MISMATCH)
        remedy = ": the driver's library and kernel module differ: restart the machine";
    else if (error == ERROR_COMPAT)
        remedy = ": the CUDA compatibility package is not for this GPU: remove it";
    else if (error == KVT_CUDA_UNKNOWN)
        remedy = ": is the module nvidia_uvm loaded? (nvidia-modprobe -u)";
    (void)snprintf(ret_why, KVT_DEVICE_LINE_BYTES, "CUDA does not start: %.64s (%d)%s",
                   calls->error_name(error), error, remedy);
}

static KVT_PRINTF(2, 3) void refuse(struct kvt_device_gpu *gpu, const char *format, ...)
{
    va_list args;

    gpu->state = KVT_GPU_REFUSED;
    va_start(args, format);
    (void)vsnprintf(gpu->why, sizeof(gpu->why), format, args);
    va_end(args);
}

/* What CUDA says of all its GPUs. */
struct shown {
    int count;
    struct kvt_device_gpu gpus[KVT_DEVICE_GPUS_MAX];
    bool is_taken[KVT_DEVICE_GPUS_MAX];
};

/* Of the exclusive modes MPS alone lets a second process in: its server has the one context. */
static bool has_mps(const struct kvt_device_config *config)
{
    const char *pipes = getenv("CUDA_MPS_PIPE_DIRECTORY");

    if (pipes != NULL && pipes[0] != '\0')
        return true;
    return access(config->mps_pipes != NULL ? config->mps_pipes : MPS_PIPES, F_OK) == 0;
}

/* What no context is needed for. */
static void judge(const struct kvt_device_config *config, struct kvt_device_gpu *gpu)
{
    const struct kvt_cuda_info *info = &gpu->info;

    if (info->is_prohibited)
        refuse(gpu, "GPU %d is in compute mode \"prohibited\": nvidia-smi -c DEFAULT", gpu->index);
    else if (info->sm < SM_MIN)
        refuse(gpu, "GPU %d (compute capability %u.%u) is too old: %u.%u or newer is needed",
               gpu->index, info->sm / 10, info->sm % 10, SM_MIN / 10, SM_MIN % 10);
    else if (info->is_exclusive && !has_mps(config))
        refuse(gpu,
               "GPU %d is in exclusive mode: engines could not use it beside kvtierd: "
               "nvidia-smi -c DEFAULT, or MPS",
               gpu->index);
}

static void show(const struct kvt_cuda_calls *calls, const struct kvt_device_config *config,
                 int count, struct shown *shown)
{
    shown->count = KVT_MIN(count, (int)KVT_DEVICE_GPUS_MAX);
    for (int i = 0; i < shown->count; i++) {
        struct kvt_device_gpu *gpu = &shown->gpus[i];
        int error = calls->device_info(i, &gpu->info);

        gpu->index = i;
        gpu->numa_node = -1;
        if (error != KVT_CUDA_OK) {
            gpu->info = (struct kvt_cuda_info){0};
            refuse(gpu, "GPU %d does not answer: %.64s (%d)", i, calls->error_name(error), error);
            continue;
        }
        gpu->info.name[sizeof(gpu->info.name) - 1] = '\0';
        gpu->info.pci[sizeof(gpu->info.pci) - 1] = '\0';
        gpu->numa_node = kvt_probe_numa_node(sysfs_of(config), gpu->info.pci);
        judge(config, gpu);
    }
}

/* Those that there are, for the line about one that there is not. */
static void refuse_missing(struct kvt_device_gpu *gpu, const struct kvt_probe_choice *choice,
                           const struct shown *shown)
{
    size_t at;

    *gpu = (struct kvt_device_gpu){.index = choice->index, .numa_node = -1};
    if (choice->index >= 0)
        refuse(gpu, "no GPU %d; there are:", choice->index);
    else
        refuse(gpu, "no GPU-%s; there are:", choice->digits);
    for (int i = 0; i < shown->count; i++) {
        char uuid[KVT_GPU_UUID_TEXT_BYTES];

        kvt_gpu_uuid_text(shown->gpus[i].info.uuid, uuid);
        at = strlen(gpu->why);
        if (at + 24 >= sizeof(gpu->why)) {
            (void)snprintf(gpu->why + at, sizeof(gpu->why) - at, " ...");
            return;
        }
        (void)snprintf(gpu->why + at, sizeof(gpu->why) - at, "%s %d (%.12s)", i == 0 ? "" : ",", i,
                       uuid);
    }
}

static void choose(struct kvt_device_gpu *gpu, const struct kvt_probe_choice *choice,
                   struct shown *shown)
{
    int found = -1, found_count = 0;

    for (int i = 0; i < shown->count; i++) {
        bool is_meant =
            choice->index >= 0 ? choice->index == i : is_of_uuid(choice, &shown->gpus[i].info);

        found = is_meant ? i : found;
        found_count += is_meant;
    }
    if (found_count == 0) {
        refuse_missing(gpu, choice, shown);
        return;
    }
    *gpu = shown->gpus[found];
    if (found_count > 1)
        refuse(gpu, "GPU-%s fits %d GPUs: write more of its digits", choice->digits, found_count);
    else if (shown->is_taken[found])
        refuse(gpu, "GPU %d is named twice in tiers.l1.gpus", found);
    shown->is_taken[found] |= found_count == 1;
}

static bool has_usable(const struct kvt_probe *probe)
{
    for (uint32_t i = 0; i < probe->report.gpus_count; i++)
        if (probe->gpus[i].state != KVT_GPU_REFUSED)
            return true;
    return false;
}

void kvt_probe_tell_none(struct kvt_probe *probe)
{
    struct kvt_device_report *report = &probe->report;

    if (report->gpus_count == 1)
        (void)snprintf(report->why, sizeof(report->why), "%s", probe->gpus[0].why);
    else
        (void)snprintf(report->why, sizeof(report->why),
                       "none of %u GPUs can be used; the first: %s", report->gpus_count,
                       probe->gpus[0].why);
    memcpy(report->refused, probe->gpus, report->gpus_count * sizeof(probe->gpus[0]));
    report->refused_count = report->gpus_count;
}

/* As many as there can be zones; whoever has more has to say which. */
static void leave_out(struct kvt_probe *probe)
{
    uint32_t usable = 0;

    for (uint32_t i = 0; i < probe->report.gpus_count; i++) {
        struct kvt_device_gpu *gpu = &probe->gpus[i];

        if (gpu->state == KVT_GPU_REFUSED || ++usable <= KVT_ZONES_MAX)
            continue;
        refuse(gpu, "GPU %d is left out: L1 takes %u GPUs at most: name in tiers.l1.gpus which",
               gpu->index, KVT_ZONES_MAX);
        gpu->is_left_out = true;
        probe->report.left_out_count++;
    }
}

int kvt_probe_find(const struct kvt_cuda_calls *calls, const struct kvt_device_config *config,
                   const char *visible, struct kvt_probe *ret_probe)
{
    struct kvt_device_report *report = &ret_probe->report;
    struct kvt_probe_choices choices;
    struct shown shown = {0};
    int error, count = 0;

    *ret_probe = (struct kvt_probe){.report.has_cuda = calls != NULL};
    if (kvt_probe_parse(config->gpus, &choices, report->why) < 0)
        return kvt_trace(-EINVAL);
    if (calls == NULL) {
        (void)snprintf(report->why, sizeof(report->why),
                       "this build has no CUDA: build with -Dcuda=enabled");
        return KVT_DEVICE_E_NONE;
    }
    if (calls->driver_version(&report->driver_version) != KVT_CUDA_OK)
        report->driver_version = 0;
    if (calls->runtime_version(&report->runtime_version) != KVT_CUDA_OK)
        report->runtime_version = 0;
    error = calls->device_count(&count);
    if (error != KVT_CUDA_OK || count <= 0) {
        kvt_probe_tell_error(calls, error, report->driver_version, report->runtime_version, visible,
                             report->why);
        return KVT_DEVICE_E_NONE;
    }
    show(calls, config, count, &shown);
    report->gpus_count = choices.is_all ? (uint32_t)shown.count : choices.count;
    for (uint32_t i = 0; i < report->gpus_count; i++) {
        if (choices.is_all)
            ret_probe->gpus[i] = shown.gpus[i];
        else
            choose(&ret_probe->gpus[i], &choices.choices[i], &shown);
    }
    leave_out(ret_probe);
    if (has_usable(ret_probe))
        return 0;
    kvt_probe_tell_none(ret_probe);
    return KVT_DEVICE_E_NONE;
}

void kvt_probe_look(const struct kvt_cuda_calls *calls, const struct kvt_device_config *config,
                    struct kvt_device_found *ret_found)
{
    ret_found->result =
        kvt_probe_find(calls, config, getenv("CUDA_VISIBLE_DEVICES"), &ret_found->probe);
    ret_found->has_numa = kvt_probe_has_numa(sysfs_of(config));
}

uint32_t kvt_device_numa_nodes(const struct kvt_device_found *found, int ret_nodes[KVT_ZONES_MAX])
{
    uint32_t nodes_count = 0;

    if (found == NULL || !found->has_numa || found->result != 0)
        return 0;
    for (uint32_t i = 0; i < found->probe.report.gpus_count; i++) {
        const struct kvt_device_gpu *gpu = &found->probe.gpus[i];
        bool is_new = gpu->state != KVT_GPU_REFUSED && gpu->numa_node >= 0;

        for (uint32_t k = 0; k < nodes_count; k++)
            is_new &= ret_nodes[k] != gpu->numa_node;
        if (is_new)
            ret_nodes[nodes_count++] = gpu->numa_node;
    }
    return nodes_count;
}

/* ---- room ---------------------------------------------------------------------------------------
 */

static void refuse_context(const struct kvt_cuda_calls *calls, struct kvt_device_gpu *gpu,
                           int error)
{
    if (error == KVT_CUDA_DEVICES_UNAVAILABLE)
        refuse(gpu, "GPU %d is %s", gpu->index,
               gpu->info.is_exclusive ? "in exclusive mode and busy: nvidia-smi -c DEFAULT, or MPS"
                                      : "busy or not available to this process");
    else if (error == KVT_CUDA_NO_MEMORY)
        refuse(gpu, "GPU %d has no memory left for a context", gpu->index);
    else
        refuse(gpu, "GPU %d cannot be used: %.64s (%d)", gpu->index, calls->error_name(error),
               error);
}

void kvt_probe_size(const struct kvt_cuda_calls *calls, const struct kvt_device_config *config,
                    struct kvt_device_gpu *gpu)
{
    char wanted[KVT_SIZE_TEXT_BYTES], staging[KVT_SIZE_TEXT_BYTES], headroom[KVT_SIZE_TEXT_BYTES],
        free_text[KVT_SIZE_TEXT_BYTES], total[KVT_SIZE_TEXT_BYTES];
    uint64_t free_bytes = 0, total_bytes = 0, arena_bytes, needed_bytes;
    int error = calls->set_device(gpu->index);

    if (error == KVT_CUDA_OK)
        error = calls->memory_info(&free_bytes, &total_bytes);
    if (error != KVT_CUDA_OK) {
        refuse_context(calls, gpu, error);
        return;
    }
    arena_bytes = config->pct > 0 ? total_bytes / 100 * config->pct : config->bytes;
    arena_bytes = kvt_round_down(arena_bytes, KVT_HUGE_PAGE_BYTES);
    /* All three are of the configuration: any numbers. */
    if (__builtin_add_overflow(arena_bytes, config->staging_bytes, &needed_bytes) ||
        __builtin_add_overflow(needed_bytes, config->headroom_bytes, &needed_bytes))
        needed_bytes = UINT64_MAX;
    if (arena_bytes == 0 || needed_bytes > free_bytes) {
        kvt_size_format_short(arena_bytes, wanted);
        kvt_size_format_short(config->staging_bytes, staging);
        kvt_size_format_short(config->headroom_bytes, headroom);
        kvt_size_format_short(free_bytes, free_text);
        kvt_size_format_short(total_bytes, total);
        refuse(gpu, "GPU %d: %s wanted + %s staging + %s headroom, %s free of %s", gpu->index,
               wanted, staging, headroom, free_text, total);
        return;
    }
    gpu->arena_bytes = arena_bytes;
    gpu->staging_bytes = config->staging_bytes;
}
