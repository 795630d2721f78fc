/* Whether L1 works on this machine's GPU, and how fast: kvtier-gpu-check, which tools/gpu-check
 * runs.
 *
 *   correct    every kernel against the CPU reference, the whole memory compared byte by byte
 *   speed      GB/s of the kernels beside the device's own copy; copy engine or kernel by run
 * length tier       one GPU of the device tier: pool <-> slot <-> L2, beside pinned copies ipc a
 * pool in another process, which is killed in the middle loss       a context that is lost, in a
 * child, and taken back
 *
 * Everything goes through struct kvt_cuda_calls and its kernels, so the same program runs on the
 * fake of the tests. A part is given a share of the time and leaves off when it is over. What it
 * finds are rows: of bytes that were wrong (the program fails), of calls that failed (it fails),
 * of speed with or without a target (a target that is missed is said, and no failure).
 *
 * One thread: the main one. It owns everything here. */
#pragma once

#include <stdio.h>

#include "tiers/device/cuda_calls.h"

#define GPU_CHECK_ROWS_MAX 160u
#define GPU_CHECK_WAIT_NS_MAX (30u * KVT_NS_PER_S) /* for anything on the device */
#define GPU_CHECK_CPU_THREADS 4u /* of a GPU: enough for the bus, where there are the cores */
#define GPU_CHECK_SKIPPED 77     /* exit status: no GPU that can be used */

/* Targets: shares of what the device's or the bus's own copy does. */
#define GPU_CHECK_TARGET_PIECES 0.90 /* gather, scatter, pieces of >= 4 KiB */
#define GPU_CHECK_TARGET_SMALL 0.60  /* at 256 B */
#define GPU_CHECK_TARGET_HOST 0.95   /* host <-> device of pinned copies */

struct gpu_check_row {
    const char *part;
    char name[48];
    char text[160];         /* what else there is to say; "" */
    uint64_t cases;         /* compared; 0: not a row of correctness */
    uint64_t wrong_bytes;   /* of them */
    double gb_s, base_gb_s; /* decimal; 0: not a row of speed */
    double ratio, target;   /* target 0: none */
    bool is_failed;         /* a call failed, or something did not end */
};

struct gpu_check_options {
    int device;        /* CUDA's index */
    uint32_t seconds;  /* for everything */
    const char *parts; /* NULL: all; else names with commas */
    const char *json;  /* NULL: none */
    uint64_t seed;
    bool is_small;     /* little memory, few cases, one round: for the fake and for sanitizers */
    const char *child; /* NULL: this is the program; else what a child of it does */
};

struct gpu_check;
struct gpu_check_hooks { /* what is another thing on the fake; each may be NULL */
    /* Loses the device's context, answers CUDA's error; else a kernel writes where no memory is. */
    int (*lose)(struct gpu_check *check);
    void (*killed)(struct gpu_check *check); /* the other process of the part ipc is dead */
};

struct gpu_check {
    struct gpu_check_options options;
    const struct kvt_cuda_calls *calls;
    struct gpu_check_hooks hooks;
    int driver_version, runtime_version;
    struct kvt_cuda_info info;
    uint64_t begin_ns, part_end_ns;
    void *stream, *event;
    struct gpu_check_row rows[GPU_CHECK_ROWS_MAX];
    uint32_t rows_count;
    bool is_broken; /* the part that runs cannot go on: a row says why */
    uint64_t random;
    uint64_t crossover_bytes; /* recommended; 0: not measured */
};

/* The whole program; the exit status. */
int gpu_check_main(int argc, char **argv, struct gpu_check_hooks hooks);

/* ---- rows.c ---------------------------------------------------------------------------------- */

struct gpu_check_row *gpu_check_row(struct gpu_check *check, const char *part, const char *name);
/* Of speed: @bytes in @ns, beside @base_bytes in @base_ns. */
void gpu_check_row_speed(struct gpu_check *check, const char *part, const char *name,
                         const uint64_t bytes_ns[2], const uint64_t base_bytes_ns[2],
                         double target);
/* A call failed: a row, and the part is broken. False. */
bool gpu_check_failed(struct gpu_check *check, const char *part, const char *what, int error);
void gpu_check_print(const struct gpu_check *check, FILE *out);
/* -errno, or 0. */
KVT_MUST_USE int gpu_check_write_json(const struct gpu_check *check);
uint64_t gpu_check_wrong_bytes(const struct gpu_check *check);
uint32_t gpu_check_failures(const struct gpu_check *check);
uint32_t gpu_check_missed(const struct gpu_check *check);

/* ---- device.c: what the parts do on the device. All answer false after a failure. -------------
 */

struct gpu_check_memory {
    uint64_t device;
    uint8_t *host; /* pinned; NULL: none was asked for */
    uint64_t bytes;
};
KVT_MUST_USE bool gpu_check_memory_new(struct gpu_check *check, struct gpu_check_memory *ret_memory,
                                       uint64_t bytes, bool has_host);
void gpu_check_memory_free(struct gpu_check *check, struct gpu_check_memory *memory);
/* Between host and device at the same offset; over when it returns. */
KVT_MUST_USE bool gpu_check_upload(struct gpu_check *check, const struct gpu_check_memory *memory,
                                   uint64_t bytes);
KVT_MUST_USE bool gpu_check_download(struct gpu_check *check, const struct gpu_check_memory *memory,
                                     uint64_t bytes);
/* All that is queued on the stream is over. */
KVT_MUST_USE bool gpu_check_wait(struct gpu_check *check);
KVT_MUST_USE bool gpu_check_ok(struct gpu_check *check, int error, const char *what);
bool gpu_check_open(struct gpu_check *check); /* set_device, stream, event */
void gpu_check_close(struct gpu_check *check);

/* ---- time and randomness ---------------------------------------------------------------------
 */

/* Whether the part has used up its time. */
bool gpu_check_is_late(const struct gpu_check *check);
uint64_t gpu_check_random(uint64_t *state);
/* 0 .. below - 1 */
uint64_t gpu_check_below(uint64_t *state, uint64_t below);
uint64_t gpu_check_word(uint64_t index); /* the content of word @index where bytes are compared */

/* ---- the parts -------------------------------------------------------------------------------
 */

void gpu_check_correct(struct gpu_check *check);
void gpu_check_speed(struct gpu_check *check);
void gpu_check_crossover(struct gpu_check *check);
void gpu_check_tier(struct gpu_check *check);
void gpu_check_ipc(struct gpu_check *check);
void gpu_check_loss(struct gpu_check *check);
