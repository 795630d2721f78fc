/* What was found, for people and as JSON. */
#include "tools/kvtier-gpu-check/gpu_check.h"

#include <inttypes.h>
#include <string.h>

#include "daemon/base/clock.h"
#include "tools/lib/json.h"
#include "tools/lib/table.h"

struct gpu_check_row *gpu_check_row(struct gpu_check *check, const char *part, const char *name)
{
    struct gpu_check_row *row = &check->rows[check->rows_count];

    KVT_ASSERT(check->rows_count < GPU_CHECK_ROWS_MAX);
    check->rows_count++;
    *row = (struct gpu_check_row){.part = part};
    (void)snprintf(row->name, sizeof(row->name), "%s", name);
    return row;
}

static double rate_of(const uint64_t bytes_ns[2])
{
    return bytes_ns[1] == 0 ? 0 : (double)bytes_ns[0] / (double)bytes_ns[1];
}

void gpu_check_row_speed(struct gpu_check *check, const char *part, const char *name,
                         const uint64_t bytes_ns[2], const uint64_t base_bytes_ns[2], double target)
{
    struct gpu_check_row *row = gpu_check_row(check, part, name);

    row->gb_s = rate_of(bytes_ns);
    row->base_gb_s = rate_of(base_bytes_ns);
    row->ratio = row->base_gb_s > 0 ? row->gb_s / row->base_gb_s : 0;
    row->target = target;
}

bool gpu_check_failed(struct gpu_check *check, const char *part, const char *what, int error)
{
    struct gpu_check_row *row;

    check->is_broken = true;
    row = gpu_check_row(check, part, what);
    row->is_failed = true;
    if (error != 0)
        (void)snprintf(row->text, sizeof(row->text), "CUDA error %d: %s", error,
                       check->calls->error_name(error));
    return false;
}

static bool is_missed(const struct gpu_check_row *row)
{
    return row->target > 0 && row->ratio < row->target;
}

uint64_t gpu_check_wrong_bytes(const struct gpu_check *check)
{
    uint64_t wrong = 0;

    for (uint32_t i = 0; i < check->rows_count; i++)
        wrong += check->rows[i].wrong_bytes;
    return wrong;
}

uint32_t gpu_check_failures(const struct gpu_check *check)
{
    uint32_t failures = 0;

    for (uint32_t i = 0; i < check->rows_count; i++)
        failures += check->rows[i].is_failed;
    return failures;
}

uint32_t gpu_check_missed(const struct gpu_check *check)
{
    uint32_t missed = 0;

    for (uint32_t i = 0; i < check->rows_count; i++)
        missed += is_missed(&check->rows[i]);
    return missed;
}

static const char *verdict_of(const struct gpu_check_row *row)
{
    if (row->is_failed)
        return "FAILED";
    if (row->wrong_bytes > 0)
        return "WRONG BYTES";
    if (is_missed(row))
        return "below target";
    return row->cases > 0 || row->target > 0 ? "ok" : "";
}

static void cell_share(struct kvt_table *table, double share)
{
    if (share > 0)
        kvt_table_cell(table, "%.1f %%", 100 * share);
    else
        kvt_table_cell(table, "%s", "");
}

static void print_row(struct kvt_table *table, const struct gpu_check_row *row)
{
    char count[KVT_TEXT_BYTES];

    kvt_table_cell(table, "%s", row->part);
    kvt_table_cell(table, "%s", row->name);
    kvt_table_cell(table, "%s", row->cases > 0 ? kvt_text_count(count, row->cases) : "");
    kvt_table_cell(table, "%s",
                   row->cases > 0 || row->wrong_bytes > 0 ? kvt_text_count(count, row->wrong_bytes)
                                                          : "");
    if (row->gb_s > 0)
        kvt_table_cell(table, "%.2f", row->gb_s);
    else
        kvt_table_cell(table, "%s", "");
    cell_share(table, row->ratio);
    cell_share(table, row->target);
    kvt_table_cell(table, "%s", verdict_of(row));
    kvt_table_cell(table, "%s", row->text);
}

void gpu_check_print(const struct gpu_check *check, FILE *out)
{
    static const char *const heads[] = {
        "Part", "What", "Cases", "Wrong bytes", "GB/s", "Of the copy", "Target", "Verdict", ""};
    struct kvt_table *table = kvt_table_new("llrrrrrll");

    for (uint32_t i = 0; i < KVT_COUNT_OF(heads); i++)
        kvt_table_cell(table, "%s", heads[i]);
    for (uint32_t i = 0; i < check->rows_count; i++)
        print_row(table, &check->rows[i]);
    if (table == NULL || kvt_table_print(table, out, KVT_TABLE_PLAIN, 0) < 0)
        fprintf(out, "no memory for the table\n");
    table = kvt_table_free(table);
    fprintf(out, "wrong bytes %" PRIu64 ", failures %u, targets missed %u, %.1f s\n",
            gpu_check_wrong_bytes(check), gpu_check_failures(check), gpu_check_missed(check),
            (double)(kvt_clock_mono_ns() - check->begin_ns) / (double)KVT_NS_PER_S);
}

static void json_row(struct kvt_json *json, const struct gpu_check_row *row)
{
    kvt_json_object(json, NULL);
    kvt_json_text(json, "part", row->part);
    kvt_json_text(json, "name", row->name);
    kvt_json_text(json, "verdict", verdict_of(row));
    if (row->cases > 0 || row->wrong_bytes > 0) {
        kvt_json_u64(json, "cases", row->cases);
        kvt_json_u64(json, "wrong_bytes", row->wrong_bytes);
    }
    if (row->gb_s > 0) {
        kvt_json_double(json, "gb_s", row->gb_s);
        kvt_json_double(json, "copy_gb_s", row->base_gb_s);
        kvt_json_double(json, "ratio", row->ratio);
    }
    if (row->target > 0)
        kvt_json_double(json, "target", row->target);
    if (row->text[0] != '\0')
        kvt_json_text(json, "text", row->text);
    kvt_json_end(json);
}

static void json_gpu(struct kvt_json *json, const struct gpu_check *check)
{
    kvt_json_object(json, "gpu");
    kvt_json_u64(json, "index", (uint64_t)check->options.device);
    kvt_json_text(json, "name", check->info.name);
    kvt_json_hex(json, "uuid", check->info.uuid, KVT_CUDA_UUID_BYTES);
    kvt_json_text(json, "pci", check->info.pci);
    kvt_json_u64(json, "sm", check->info.sm);
    kvt_json_u64(json, "total_bytes", check->info.total_bytes);
    kvt_json_bool(json, "has_ipc", check->info.has_ipc);
    kvt_json_u64(json, "driver_version", (uint64_t)check->driver_version);
    kvt_json_u64(json, "runtime_version", (uint64_t)check->runtime_version);
    kvt_json_text(json, "kernels", check->calls->kernels->name);
    kvt_json_end(json);
}

int gpu_check_write_json(const struct gpu_check *check)
{
    FILE *out = fopen(check->options.json, "we");
    struct kvt_json json;
    int is_bad;

    if (out == NULL)
        return kvt_trace(-errno);
    kvt_json_begin(&json, out, false);
    kvt_json_u64(&json, "version", 1);
    json_gpu(&json, check);
    kvt_json_u64(&json, "seed", check->options.seed);
    kvt_json_u64(&json, "wrong_bytes", gpu_check_wrong_bytes(check));
    kvt_json_u64(&json, "failures", gpu_check_failures(check));
    kvt_json_u64(&json, "targets_missed", gpu_check_missed(check));
    if (check->crossover_bytes > 0)
        kvt_json_u64(&json, "recommended_crossover_bytes", check->crossover_bytes);
    kvt_json_double(&json, "seconds",
                    (double)(kvt_clock_mono_ns() - check->begin_ns) / (double)KVT_NS_PER_S);
    kvt_json_array(&json, "rows");
    for (uint32_t i = 0; i < check->rows_count; i++)
        json_row(&json, &check->rows[i]);
    kvt_json_end(&json);
    kvt_json_finish(&json);
    is_bad = ferror(out);
    if (fclose(out) != 0 || is_bad)
        return kvt_trace(-EIO);
    return 0;
}
