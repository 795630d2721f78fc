/* Rows of the table of figures, the same for every benchmark: name, value, unit, the limit measured
 * in the same run, ratio, target, met or not. As a table for people, or with --json one object a
 * line. Also what every benchmark needs: a clock, medians, arguments. One thread. */
#pragma once

#include "daemon/base/def.h"

struct bench {
    const char *name;
    bool is_json, is_quick;
    uint32_t rows, missed;
};

struct bench_row {
    const char *name, *unit;
    const char *limit_name; /* what the limit is; NULL where there is none */
    double value;
    double limit;  /* same unit; 0: there is none */
    double target; /* of the ratio where there is a limit, of the value where not; 0: none */
    bool is_least; /* the target is the least that is right, not the most */
    const char *note;
};

/* Reads --json and --quick (few rounds: does it run at all?); prints the head of the table. */
void bench_begin(struct bench *bench, const char *name, int argc, char **argv);
void bench_row(struct bench *bench, const struct bench_row *row);
/* Prints how many targets were missed; 0, so that a missed target does not stop what follows. */
int bench_end(struct bench *bench);

/* Value of "--name VALUE", or NULL. */
const char *bench_arg(int argc, char **argv, const char *name);
uint64_t bench_arg_u64(int argc, char **argv, const char *name, uint64_t otherwise);

uint64_t bench_now_ns(void);
/* Sorts @values. */
double bench_median(double *values, uint32_t count);
/* Writes through a buffer larger than the caches, so that what is read next comes from memory. */
void bench_flush_caches(void);
/* Keeps the compiler from dropping a computed value. */
static inline void bench_use(uint64_t value)
{
    __asm__ volatile("" : : "r"(value) : "memory");
}
