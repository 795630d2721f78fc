#include "tests/bench/bench.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define FLUSH_BYTES (256u << 20)

const char *bench_arg(int argc, char **argv, const char *name)
{
    for (int i = 1; i + 1 < argc; i++) {
        if (strcmp(argv[i], name) == 0)
            return argv[i + 1];
    }
    return NULL;
}

uint64_t bench_arg_u64(int argc, char **argv, const char *name, uint64_t otherwise)
{
    const char *text = bench_arg(argc, argv, name);

    return text == NULL ? otherwise : strtoull(text, NULL, 0);
}

void bench_begin(struct bench *bench, const char *name, int argc, char **argv)
{
    *bench = (struct bench){.name = name};
    for (int i = 1; i < argc; i++) {
        bench->is_json |= strcmp(argv[i], "--json") == 0;
        bench->is_quick |= strcmp(argv[i], "--quick") == 0;
    }
    if (!bench->is_json)
        printf("%-58s %12s %-10s %12s %7s %8s  %s\n", name, "value", "unit", "limit", "ratio",
               "target", "met");
    (void)fflush(stdout);
}

void bench_row(struct bench *bench, const struct bench_row *row)
{
    const double ratio = row->limit > 0 ? row->value / row->limit : 0;
    const double judged = row->limit > 0 ? ratio : row->value;
    const bool is_met = row->is_least ? judged >= row->target : judged <= row->target;
    const char *met = row->target <= 0 ? "-" : is_met ? "yes" : "NO";
    char ratio_text[32] = "-", limit_text[32] = "-", target_text[32] = "-";

    bench->rows++;
    bench->missed += row->target > 0 && !is_met;
    if (bench->is_json) {
        printf("{\"figure\": \"%s\", \"value\": %.6g, \"unit\": \"%s\"", row->name, row->value,
               row->unit);
        if (row->limit > 0)
            printf(", \"limit\": \"%s\", \"limit_value\": %.6g, \"ratio\": %.4f",
                   row->limit_name == NULL ? "same run" : row->limit_name, row->limit, ratio);
        if (row->target > 0)
            printf(", \"target\": \"%s %.6g%s%s\", \"met\": %s",
                   row->is_least ? ">=" : "<=", row->target, row->limit > 0 ? " x" : " ",
                   row->limit > 0 ? "" : row->unit, is_met ? "true" : "false");
        if (row->note != NULL)
            printf(", \"note\": \"%s\"", row->note);
        printf("}\n");
    } else {
        if (row->limit > 0) {
            (void)snprintf(ratio_text, sizeof(ratio_text), "%.3f", ratio);
            (void)snprintf(limit_text, sizeof(limit_text), "%.4g", row->limit);
        }
        if (row->target > 0)
            (void)snprintf(target_text, sizeof(target_text), "%s%.4g",
                           row->is_least ? ">=" : "<=", row->target);
        printf("%-58s %12.5g %-10s %12s %7s %8s  %s%s%s\n", row->name, row->value, row->unit,
               limit_text, ratio_text, target_text, met, row->note == NULL ? "" : "  ",
               row->note == NULL ? "" : row->note);
    }
    (void)fflush(stdout);
}

int bench_end(struct bench *bench)
{
    if (!bench->is_json)
        printf("%s: %u figures, %u targets missed\n", bench->name, bench->rows, bench->missed);
    (void)fflush(stdout);
    return 0;
}

uint64_t bench_now_ns(void)
{
    struct timespec now;

    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * KVT_NS_PER_S + (uint64_t)now.tv_nsec;
}

static int compare(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

double bench_median(double *values, uint32_t count)
{
    qsort(values, count, sizeof(values[0]), compare);
    return count % 2 == 1 ? values[count / 2] : (values[count / 2 - 1] + values[count / 2]) / 2;
}

void bench_flush_caches(void)
{
    static volatile uint8_t *buffer;

    if (buffer == NULL)
        buffer = malloc(FLUSH_BYTES);
    for (size_t i = 0; buffer != NULL && i < FLUSH_BYTES; i += KVT_CACHE_LINE_BYTES)
        buffer[i]++;
}
