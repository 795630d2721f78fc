/* L1 and its GPUs: on the pages of `kvtier-ctl devices` and `stats`, and as JSON. A GPU that is
 * lost or refused has a line that says why; an L1 without any says why it is off. */
#include "tools/kvtier-ctl/view.h"

#include <string.h>

#include "tools/lib/json.h"
#include "tools/lib/table.h"

#define VERSION_BYTES 16u
#define LIST_MORE ", ..."
#define LIST_BYTES (KVT_API_GPUS_MAX * 12u + sizeof(LIST_MORE)) /* "4294967295, " each */

static bool is_text(struct kvt_text text, const char *what)
{
    return text.bytes == strlen(what) && memcmp(text.at, what, text.bytes) == 0;
}

bool kvt_ctl_is_cuda(const struct kvt_ans_stats *stats)
{
    return is_text(stats->l1.backend, "cuda");
}

const char *kvt_ctl_gpu_state_text(uint32_t state)
{
    static const char *const texts[] = {
        [KVT_API_GPU_OK] = "ok", [KVT_API_GPU_LOST] = "lost", [KVT_API_GPU_REFUSED] = "refused"};

    return state < KVT_COUNT_OF(texts) ? texts[state] : "unknown";
}

const char *kvt_ctl_gpu_name(char buf[KVT_CTL_TEXT_BYTES], const struct kvt_api_gpu_stats *gpu)
{
    char name[KVT_CTL_TEXT_BYTES];

    if (gpu->index == KVT_API_GPU_INDEX_NONE)
        (void)snprintf(buf, KVT_CTL_TEXT_BYTES, "GPU ?");
    else
        (void)snprintf(buf, KVT_CTL_TEXT_BYTES, "GPU %u%s%.100s", gpu->index,
                       gpu->name.bytes > 0 ? " " : "", kvt_ctl_clean(name, gpu->name));
    return buf;
}

/* CUDA's way to write versions: 13000 is 13.0. */
static const char *version_text(char buf[VERSION_BYTES], uint32_t version)
{
    if (version == 0)
        (void)snprintf(buf, VERSION_BYTES, "none");
    else
        (void)snprintf(buf, VERSION_BYTES, "%u.%u", version / 1000, version % 1000 / 10);
    return buf;
}

static uint64_t errors_of(const struct kvt_api_gpu_stats *gpu)
{
    uint64_t sum = 0;

    for (uint32_t i = 0; i < gpu->errors_count; i++)
        sum += gpu->errors[i].value;
    return sum;
}

static void view_gpus(const struct kvt_ctl_view *view, const struct kvt_ans_stats *stats)
{
    static const char *const names[] = {"gpu",   "uuid",   "pci",    "name",  "state",
                                        "sm",    "node",   "memory", "arena", "used",
                                        "slots", "moving", "losses", "back"};
    struct kvt_table *table = kvt_table_new("rllllrrrrrrrrr");
    char text[KVT_CTL_TEXT_BYTES], a[KVT_TEXT_BYTES], hex[9];

    kvt_ctl_table_header(table, names, KVT_COUNT_OF(names));
    for (uint32_t i = 0; i < stats->gpus_count; i++) {
        const struct kvt_api_gpu_stats *gpu = &stats->gpus[i];

        if (gpu->index == KVT_API_GPU_INDEX_NONE)
            kvt_table_cell(table, "-");
        else
            kvt_table_cell(table, "%u", gpu->index);
        /* One that is not there has no name, either. */
        kvt_table_cell(table, "%s%s", gpu->name.bytes == 0 ? "" : "GPU-",
                       gpu->name.bytes == 0 ? "" : kvt_text_hex(hex, gpu->uuid, 4));
        kvt_table_cell(table, "%s", kvt_ctl_clean(text, gpu->pci));
        kvt_table_cell(table, "%s", kvt_ctl_clean(text, gpu->name));
        kvt_table_cell(table, "%s", kvt_ctl_gpu_state_text(gpu->state));
        kvt_table_cell(table, "%u", gpu->sm);
        if (gpu->numa_node < 0)
            kvt_table_cell(table, "-");
        else
            kvt_table_cell(table, "%d", gpu->numa_node);
        kvt_table_cell(table, "%s", kvt_text_bytes(a, gpu->memory_bytes));
        kvt_table_cell(table, "%s", kvt_text_bytes(a, gpu->arena_bytes));
        kvt_table_cell(table, "%s", kvt_text_bytes(a, gpu->used_bytes));
        kvt_table_cell(table, "%s", kvt_text_count(a, gpu->slots));
        kvt_table_cell(table, "%s", kvt_text_bytes(a, gpu->inflight_bytes));
        kvt_table_cell(table, "%s", kvt_text_count(a, gpu->losses));
        kvt_table_cell(table, "%s", kvt_text_count(a, gpu->revivals));
    }
    kvt_ctl_table_print(view, table);
}

/* What moved, and how. */
static void view_paths(const struct kvt_ctl_view *view, const struct kvt_ans_stats *stats)
{
    struct kvt_table *table = kvt_table_new("rlrr");
    char a[KVT_TEXT_BYTES];
    uint32_t rows = 0;

    kvt_table_cell(table, "gpu");
    kvt_table_cell(table, "path");
    kvt_table_cell(table, "moved");
    kvt_table_cell(table, "transfers");
    for (uint32_t i = 0; i < stats->gpus_count; i++) {
        const struct kvt_api_gpu_stats *gpu = &stats->gpus[i];

        for (uint32_t k = 0; k < gpu->paths_count; k++) {
            if (gpu->paths[k].transfers == 0)
                continue;
            kvt_table_cell(table, "%u", gpu->index);
            kvt_table_cell(table, "%s", gpu->paths[k].name);
            kvt_table_cell(table, "%s", kvt_text_bytes(a, gpu->paths[k].bytes));
            kvt_table_cell(table, "%s", kvt_text_count(a, gpu->paths[k].transfers));
            rows++;
        }
    }
    if (rows > 0) {
        kvt_ctl_table_print(view, table);
        return;
    }
    (void)kvt_table_free(table);
    (void)fputs("  nothing was moved yet\n", view->out);
}

static void view_work(const struct kvt_ctl_view *view, const struct kvt_ans_stats *stats)
{
    static const char *const names[] = {"gpu", "launches",  "copies each", "checked", "unchecked",
                                        "bad", "quantised", "back",        "errors"};
    struct kvt_table *table = kvt_table_new("rrrrrrrrr");
    char a[KVT_TEXT_BYTES];

    kvt_ctl_table_header(table, names, KVT_COUNT_OF(names));
    for (uint32_t i = 0; i < stats->gpus_count; i++) {
        const struct kvt_api_gpu_stats *gpu = &stats->gpus[i];

        if (gpu->state == KVT_API_GPU_REFUSED)
            continue;
        kvt_table_cell(table, "%u", gpu->index);
        kvt_table_cell(table, "%s", kvt_text_count(a, gpu->launches));
        kvt_table_cell(table, "%.1f",
                       gpu->launches == 0 ? 0.0
                                          : (double)gpu->launched_jobs / (double)gpu->launches);
        kvt_table_cell(table, "%s", kvt_text_bytes(a, gpu->checked_bytes));
        kvt_table_cell(table, "%s", kvt_text_count(a, gpu->unchecked_transfers));
        kvt_table_cell(table, "%s", kvt_text_count(a, gpu->bad_checks));
        kvt_table_cell(table, "%s", kvt_text_bytes(a, gpu->quantised_bytes));
        kvt_table_cell(table, "%s", kvt_text_bytes(a, gpu->dequantised_bytes));
        kvt_table_cell(table, "%s", kvt_text_count(a, errors_of(gpu)));
    }
    kvt_ctl_table_print(view, table);
}

void kvt_ctl_view_gpu_trouble(const struct kvt_ctl_view *view, const struct kvt_api_gpu_stats *gpu)
{
    char text[KVT_CTL_TEXT_BYTES];

    if (gpu->state == KVT_API_GPU_OK)
        return;
    (void)fprintf(view->out, "  %s ", kvt_ctl_gpu_name(text, gpu));
    kvt_ctl_paint(view, KVT_CTL_PAINT_BAD, "%s", kvt_ctl_gpu_state_text(gpu->state));
    if (gpu->lost_ns > 0)
        (void)fprintf(view->out, " for %s", kvt_ctl_duration(text, gpu->lost_ns));
    if (gpu->why.bytes > 0)
        (void)fprintf(view->out, ": %s", kvt_ctl_clean(text, gpu->why));
    (void)fputc('\n', view->out);
}

/* Of those in service, of which @is_it is or is not true: how many; and their indices, for people:
 * as many as there is room for. */
static uint32_t list_gpus(char buf[LIST_BYTES], const struct kvt_ans_stats *stats,
                          bool (*is_it)(const struct kvt_api_gpu_stats *gpu), bool wanted)
{
    const size_t room = LIST_BYTES - sizeof(LIST_MORE) + 1;
    uint32_t count = 0;
    bool is_full = false;
    size_t at = 0;

    buf[0] = '\0';
    for (uint32_t i = 0; i < stats->gpus_count; i++) {
        const struct kvt_api_gpu_stats *gpu = &stats->gpus[i];
        int length;

        if (gpu->state != KVT_API_GPU_OK || is_it(gpu) != wanted)
            continue;
        count++;
        if (is_full)
            continue;
        length = snprintf(buf + at, room - at, "%s%u", count == 1 ? "" : ", ", gpu->index);
        is_full = length < 0 || (size_t)length >= room - at;
        if (is_full)
            memcpy(buf + at, LIST_MORE, sizeof(LIST_MORE));
        else
            at += (size_t)length;
    }
    return count;
}

static bool is_exported(const struct kvt_api_gpu_stats *gpu)
{
    return gpu->is_exported;
}

static bool is_pinned(const struct kvt_api_gpu_stats *gpu)
{
    return gpu->is_host_pinned;
}

/* "driver for CUDA 13.0, built for CUDA 12.9; L2 is pinned". */
static void view_head(const struct kvt_ctl_view *view, const struct kvt_ans_stats *stats)
{
    const struct kvt_api_l1_stats *l1 = &stats->l1;
    char driver[VERSION_BYTES], runtime[VERSION_BYTES], text[KVT_CTL_TEXT_BYTES];
    char bytes[KVT_TEXT_BYTES], list[LIST_BYTES];

    (void)fprintf(view->out, "  driver for CUDA %s, built %s CUDA%s%s",
                  version_text(driver, l1->driver_version), l1->has_cuda ? "for" : "without",
                  l1->runtime_version == 0 ? "" : " ",
                  l1->runtime_version == 0 ? "" : version_text(runtime, l1->runtime_version));
    if (l1->is_host_pinned)
        (void)fputs("; L2 is pinned: the copy engine reaches it", view->out);
    else if (l1->pin_why.bytes > 0)
        (void)fprintf(view->out, "; L2 is not pinned (%s): copies go through staging",
                      kvt_ctl_clean(text, l1->pin_why));
    if (list_gpus(list, stats, is_exported, true) > 0)
        (void)fprintf(view->out, "; engines may read it in place%s%s",
                      l1->held_bytes_per_engine_max > 0 ? ", each at most " : "",
                      l1->held_bytes_per_engine_max > 0
                          ? kvt_text_bytes(bytes, l1->held_bytes_per_engine_max)
                          : "");
    (void)fputc('\n', view->out);
}

/* What a GPU that is in use cannot do. */
static void view_limits(const struct kvt_ctl_view *view, const struct kvt_api_l1_stats *l1,
                        const struct kvt_api_gpu_stats *gpu)
{
    char name[KVT_CTL_TEXT_BYTES];

    if (gpu->state == KVT_API_GPU_REFUSED)
        return;
    if (!gpu->has_ipc)
        (void)fprintf(view->out, "  %s: no IPC here: engines register memfds%s\n",
                      kvt_ctl_gpu_name(name, gpu),
                      l1->is_export_allowed ? ", and cannot read it in place" : "");
    else if (gpu->state == KVT_API_GPU_OK && l1->is_export_allowed && !gpu->is_exported)
        (void)fprintf(view->out, "  %s: engines cannot read it in place: CUDA gave no handle\n",
                      kvt_ctl_gpu_name(name, gpu));
}

/* Which way bytes go, before any went: limits of each GPU, then engines' pools, host memory, L2. */
static void view_ways(const struct kvt_ctl_view *view, const struct kvt_ans_stats *stats)
{
    const struct kvt_api_l1_stats *l1 = &stats->l1;
    char a[KVT_TEXT_BYTES], b[KVT_TEXT_BYTES], list[LIST_BYTES];
    uint64_t staging_bytes = 0;

    if (l1->streams == 0)
        return; /* an older daemon */
    for (uint32_t i = 0; i < stats->gpus_count; i++)
        staging_bytes = KVT_MAX(staging_bytes, stats->gpus[i].staging_bytes);
    (void)fprintf(view->out,
                  "  each: %u streams a direction, at most %s in flight, staging of %s and as much "
                  "host memory\n",
                  l1->streams, kvt_text_bytes(a, l1->inflight_bytes_max),
                  kvt_text_bytes(b, staging_bytes));
    (void)fprintf(
        view->out,
        "  engines' pools: by the copy engine in runs of %s and more, where they are few; "
        "else by one kernel\n",
        kvt_text_bytes(a, l1->crossover_bytes));
    (void)fputs(
        "  pools on another GPU: by the copy engine; engines' host memory: through staging\n",
        view->out);
    if (list_gpus(list, stats, is_pinned, true) > 0)
        (void)fprintf(view->out, "  L2: by the copy engine of GPU %s\n", list);
    if (list_gpus(list, stats, is_pinned, false) > 0)
        (void)fprintf(view->out, "  L2: through staging from and to GPU %s\n", list);
}

/* The backend without GPUs: how much, and who copies. */
static void view_host(const struct kvt_ctl_view *view, const struct kvt_ans_stats *stats)
{
    char a[KVT_TEXT_BYTES], b[KVT_TEXT_BYTES];

    (void)fputs("  host memory, in the place of a GPU's", view->out);
    for (uint32_t i = 0; i < stats->tiers_count; i++)
        if (stats->tiers[i].tier == 1)
            (void)fprintf(view->out, ": %s, %s of it used",
                          kvt_text_bytes(a, stats->tiers[i].capacity_bytes),
                          kvt_text_bytes(b, stats->tiers[i].used_bytes));
    (void)fputs("; all copies by one thread of the CPU\n\n", view->out);
}

static bool has_used(const struct kvt_ans_stats *stats)
{
    for (uint32_t i = 0; i < stats->gpus_count; i++)
        if (stats->gpus[i].state != KVT_API_GPU_REFUSED)
            return true;
    return false;
}

void kvt_ctl_view_l1(const struct kvt_ctl_view *view, const struct kvt_ans_stats *stats)
{
    char text[KVT_CTL_TEXT_BYTES];

    kvt_ctl_paint(view, KVT_CTL_PAINT_HEAD, "L1\n");
    if (is_text(stats->l1.backend, "host")) {
        view_host(view, stats);
        return;
    }
    if (!kvt_ctl_is_cuda(stats)) {
        (void)fputs("  off: not configured (tiers.l1.backend is none)\n\n", view->out);
        return;
    }
    view_head(view, stats);
    if (stats->l1.why.bytes > 0) {
        (void)fputs("  ", view->out);
        kvt_ctl_paint(view, KVT_CTL_PAINT_BAD, "off");
        (void)fprintf(view->out, ": %s\n", kvt_ctl_clean(text, stats->l1.why));
    }
    if (stats->gpus_count > 0) {
        view_gpus(view, stats);
        for (uint32_t i = 0; i < stats->gpus_count; i++)
            kvt_ctl_view_gpu_trouble(view, &stats->gpus[i]);
        for (uint32_t i = 0; i < stats->gpus_count; i++)
            view_limits(view, &stats->l1, &stats->gpus[i]);
        if (has_used(stats)) {
            view_ways(view, stats);
            view_paths(view, stats);
            view_work(view, stats);
        }
    }
    (void)fputc('\n', view->out);
}

void kvt_ctl_view_all_devices(const struct kvt_ctl_view *view, const struct kvt_ans_stats *stats)
{
    kvt_ctl_view_l1(view, stats);
    if (stats->devices_count == 0)
        (void)fputs("L3\n  off: not configured (tiers.l3.path is empty)\n", view->out);
    kvt_ctl_view_devices(view, stats);
}

/* ---- JSON ------------------------------------------------------------------------------------ */

static void text(struct kvt_json *json, const char *name, struct kvt_text value)
{
    kvt_json_bytes(json, name, value.at, value.bytes);
}

static void json_counts(struct kvt_json *json, const struct kvt_api_gpu_stats *gpu)
{
    kvt_json_u64(json, "arena_bytes", gpu->arena_bytes);
    kvt_json_u64(json, "staging_bytes", gpu->staging_bytes);
    kvt_json_u64(json, "used_bytes", gpu->used_bytes);
    kvt_json_u64(json, "slab_bytes", gpu->slab_bytes);
    kvt_json_u64(json, "slots", gpu->slots);
    kvt_json_u64(json, "inflight_bytes", gpu->inflight_bytes);
    kvt_json_u64(json, "lost_ns", gpu->lost_ns);
    kvt_json_u64(json, "losses", gpu->losses);
    kvt_json_u64(json, "revivals", gpu->revivals);
    kvt_json_u64(json, "last_error", gpu->last_error);
    kvt_json_u64(json, "launches", gpu->launches);
    kvt_json_u64(json, "launched_jobs", gpu->launched_jobs);
    kvt_json_u64(json, "checked_bytes", gpu->checked_bytes);
    kvt_json_u64(json, "unchecked_transfers", gpu->unchecked_transfers);
    kvt_json_u64(json, "bad_checks", gpu->bad_checks);
    kvt_json_u64(json, "quantised_bytes", gpu->quantised_bytes);
    kvt_json_u64(json, "dequantised_bytes", gpu->dequantised_bytes);
}

/* index and numa_node are left out where they are not known. */
static void json_gpu(struct kvt_json *json, const struct kvt_api_gpu_stats *gpu)
{
    kvt_json_object(json, NULL);
    if (gpu->index != KVT_API_GPU_INDEX_NONE)
        kvt_json_u64(json, "index", gpu->index);
    kvt_json_hex(json, "uuid", gpu->uuid, KVT_CUDA_UUID_BYTES);
    text(json, "name", gpu->name);
    text(json, "pci", gpu->pci);
    if (gpu->numa_node >= 0)
        kvt_json_u64(json, "numa_node", (uint64_t)gpu->numa_node);
    kvt_json_u64(json, "sm", gpu->sm);
    kvt_json_u64(json, "memory_bytes", gpu->memory_bytes);
    kvt_json_text(json, "state", kvt_ctl_gpu_state_text(gpu->state));
    text(json, "why", gpu->why);
    kvt_json_bool(json, "has_ipc", gpu->has_ipc);
    kvt_json_bool(json, "is_exported", gpu->is_exported);
    kvt_json_bool(json, "is_host_pinned", gpu->is_host_pinned);
    json_counts(json, gpu);
    kvt_json_object(json, "paths");
    for (uint32_t i = 0; i < gpu->paths_count; i++) {
        kvt_json_object(json, gpu->paths[i].name);
        kvt_json_u64(json, "bytes", gpu->paths[i].bytes);
        kvt_json_u64(json, "transfers", gpu->paths[i].transfers);
        kvt_json_end(json);
    }
    kvt_json_end(json);
    kvt_json_object(json, "errors");
    for (uint32_t i = 0; i < gpu->errors_count; i++)
        kvt_json_u64(json, gpu->errors[i].name, gpu->errors[i].value);
    kvt_json_end(json);
    kvt_json_end(json);
}

void kvt_ctl_json_l1(struct kvt_json *json, const struct kvt_ans_stats *stats)
{
    const struct kvt_api_l1_stats *l1 = &stats->l1;

    kvt_json_object(json, "l1");
    text(json, "backend", l1->backend);
    kvt_json_bool(json, "has_cuda", l1->has_cuda);
    kvt_json_u64(json, "driver_version", l1->driver_version);
    kvt_json_u64(json, "runtime_version", l1->runtime_version);
    kvt_json_bool(json, "is_host_pinned", l1->is_host_pinned);
    text(json, "pin_why", l1->pin_why);
    text(json, "why", l1->why);
    kvt_json_bool(json, "is_export_allowed", l1->is_export_allowed);
    kvt_json_u64(json, "held_bytes_per_engine_max", l1->held_bytes_per_engine_max);
    kvt_json_u64(json, "streams", l1->streams);
    kvt_json_u64(json, "inflight_bytes_max", l1->inflight_bytes_max);
    kvt_json_u64(json, "crossover_bytes", l1->crossover_bytes);
    kvt_json_end(json);
    kvt_json_array(json, "gpus");
    for (uint32_t i = 0; i < stats->gpus_count; i++)
        json_gpu(json, &stats->gpus[i]);
    kvt_json_end(json);
}
