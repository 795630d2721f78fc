/* Printing of rows; the JSON names are what tools/bench reads. */
#include "tests/bench/bench.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tools/lib/json.h"
#include "tools/lib/table.h"

int bench_begin(struct bench *ret_bench, int argc, char **argv)
{
    *ret_bench = (struct bench){0};
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--json") == 0) {
            ret_bench->is_json = true;
        } else if (strcmp(argv[i], "--quick") == 0) {
            ret_bench->is_quick = true;
        } else {
            bool is_help = strcmp(argv[i], "--help") == 0;

            fprintf(is_help ? stdout : stderr, "Usage: %s [--json] [--quick]\n", argv[0]);
            return is_help ? 1 : 3;
        }
    }
    return 0;
}

void bench_add(struct bench *bench, const struct bench_row *row)
{
    KVT_ASSERT(bench->rows_count < BENCH_ROWS_MAX);
    bench->rows[bench->rows_count++] = *row;
}

static bool has_ratio(const struct bench_row *row)
{
    return row->limit != NULL && row->limit_value > 0;
}

static double ratio_of(const struct bench_row *row)
{
    return row->value / row->limit_value;
}

static bool is_met(const struct bench_row *row)
{
    switch (row->kind) {
    case BENCH_RATIO_AT_MOST:
        return has_ratio(row) && ratio_of(row) <= row->target;
    case BENCH_RATIO_AT_LEAST:
        return has_ratio(row) && ratio_of(row) >= row->target;
    case BENCH_AT_MOST:
        return row->value <= row->target;
    case BENCH_AT_LEAST:
        return row->value >= row->target;
    case BENCH_INFO:
        return true;
    }
    return false;
}

/* "<= 1.25 x", ">= 500 M tokens/s", or "" for a finding. */
static void target_text(const struct bench_row *row, char *text, size_t bytes)
{
    bool is_ratio = row->kind == BENCH_RATIO_AT_MOST || row->kind == BENCH_RATIO_AT_LEAST;
    bool is_at_most = row->kind == BENCH_RATIO_AT_MOST || row->kind == BENCH_AT_MOST;

    text[0] = '\0';
    if (row->kind != BENCH_INFO)
        (void)snprintf(text, bytes, "%s %.4g %s", is_at_most ? "≤" : "≥", row->target,
                       is_ratio ? "×" : row->unit);
}

static void print_json(const struct bench_row *row)
{
    struct kvt_json json;
    char target[64];

    target_text(row, target, sizeof(target));
    kvt_json_begin(&json, stdout, true);
    kvt_json_text(&json, "figure", row->figure);
    kvt_json_double(&json, "value", row->value);
    kvt_json_text(&json, "unit", row->unit);
    kvt_json_text(&json, "limit", row->limit);
    if (row->limit != NULL)
        kvt_json_double(&json, "limit_value", row->limit_value);
    if (has_ratio(row))
        kvt_json_double(&json, "ratio", ratio_of(row));
    kvt_json_text(&json, "target", row->kind == BENCH_INFO ? NULL : target);
    if (row->kind != BENCH_INFO)
        kvt_json_bool(&json, "met", is_met(row));
    kvt_json_text(&json, "note", row->note);
    kvt_json_finish(&json);
}

static void print_table(const struct bench *bench)
{
    static const char *const names[] = {"figure", "value", "limit", "", "ratio", "target", ""};
    struct kvt_table *table = kvt_table_new("lrlrrrl");

    for (size_t i = 0; i < KVT_COUNT_OF(names); i++)
        kvt_table_cell(table, "%s", names[i]);
    for (uint32_t i = 0; i < bench->rows_count; i++) {
        const struct bench_row *row = &bench->rows[i];
        char target[64];

        target_text(row, target, sizeof(target));
        kvt_table_cell(table, "%s", row->figure);
        kvt_table_cell(table, "%.4g %s", row->value, row->unit);
        kvt_table_cell(table, "%s", row->limit == NULL ? "" : row->limit);
        if (row->limit == NULL)
            kvt_table_cell(table, "%s", "");
        else
            kvt_table_cell(table, "%.4g %s", row->limit_value, row->unit);
        if (has_ratio(row))
            kvt_table_cell(table, "%.3g", ratio_of(row));
        else
            kvt_table_cell(table, "%s", "");
        kvt_table_cell(table, "%s", target);
        kvt_table_cell(table, "%s", row->kind == BENCH_INFO ? "" : is_met(row) ? "met" : "NOT MET");
    }
    if (kvt_table_print(table, stdout, KVT_TABLE_PLAIN, 0) < 0)
        fputs("out of memory: the table is not whole\n", stderr);
    (void)kvt_table_free(table);
    for (uint32_t i = 0; i < bench->rows_count; i++)
        if (bench->rows[i].note != NULL)
            printf("%s: %s\n", bench->rows[i].figure, bench->rows[i].note);
}

int bench_end(struct bench *bench)
{
    if (bench->is_json)
        for (uint32_t i = 0; i < bench->rows_count; i++)
            print_json(&bench->rows[i]);
    else
        print_table(bench);
    return bench->rows_count > 0 ? 0 : 1;
}

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

double bench_median(double *values, uint32_t count)
{
    KVT_ASSERT(count > 0);
    qsort(values, count, sizeof(*values), compare);
    return count % 2 != 0 ? values[count / 2] : (values[count / 2 - 1] + values[count / 2]) / 2;
}
