/* Rows of the table of figures. A benchmark is a program that measures figures and, in the same run
 * and in interleaved rounds, the limit that each is held against; it adds one row a figure:
 *
 *   int main(int argc, char **argv)
 *   {
 *       struct bench bench;
 *       int status = bench_begin(&bench, argc, argv);
 *
 *       if (status != 0)
 *           return status - 1;
 *       ... measure ...
 *       bench_add(&bench, &(struct bench_row){.figure = "lookup, 81,920 tokens, warm",
 *           .value = us, .unit = "µs", .limit = "memcmp of the same bytes", .limit_value =
 * memcmp_us, .kind = BENCH_RATIO_AT_MOST, .target = 1.25}); return bench_end(&bench);
 *   }
 *
 * Options of every benchmark: --json (a JSON object a row, one a line: what tools/bench reads),
 * --quick (few rounds: does it run at all?). The exit status is 0 also when a target is not met: a
 * figure is a finding, not a failure. One thread. */
#pragma once

#include "daemon/base/clock.h"
#include "daemon/base/def.h"

#define BENCH_ROWS_MAX 64u

enum bench_kind {
    BENCH_RATIO_AT_MOST,  /* value / limit <= target */
    BENCH_RATIO_AT_LEAST, /* value / limit >= target */
    BENCH_AT_MOST,        /* value <= target */
    BENCH_AT_LEAST,       /* value >= target */
    BENCH_INFO,           /* no target: the number is the finding */
};

struct bench_row {
    const char *figure; /* static texts, or alive until bench_end */
    double value;
    const char *unit;
    const char *limit;  /* what was measured beside it; NULL: nothing */
    double limit_value; /* in the same unit */
    enum bench_kind kind;
    double target;
    const char *note; /* why a target is missed, what the machine lacks; NULL: nothing */
};

struct bench {
    bool is_json, is_quick;
    uint32_t rows_count;
    struct bench_row rows[BENCH_ROWS_MAX];
};

/* 0; or the exit status + 1 (help was printed, or a bad option). */
KVT_MUST_USE int bench_begin(struct bench *ret_bench, int argc, char **argv);
void bench_add(struct bench *bench, const struct bench_row *row);
/* Prints the rows; returns the exit status: 1 when there are none. */
int bench_end(struct bench *bench);

/* Sorts @values; the middle one. */
double bench_median(double *values, uint32_t count);
/* Keeps the compiler from dropping what made @value. */
static inline void bench_use(uint64_t value)
{
    __asm__ volatile("" : : "r"(value) : "memory");
}
