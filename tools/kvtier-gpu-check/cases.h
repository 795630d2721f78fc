/* Random work for the kernels. A case is made twice out of the same randomness: once with the
 * addresses of the device, once with those of the twin in this process, on which the CPU reference
 * works. Afterwards the two memories have to be equal, byte for byte, also beside what was asked
 * for.
 *
 *   data   | pools, payloads, sums of checks .. |      lists   | jobs, pieces, ids of blocks .. |
 */
#pragma once

#include "tools/kvtier-gpu-check/gpu_check.h"

struct gpu_check_side {
    uint64_t data; /* address of the data */
    uint64_t data_bytes, data_used;
    uint8_t *lists_memory; /* where this process writes lists */
    uint64_t lists;        /* their address for the kernel */
    uint64_t lists_bytes, lists_used;
    uint64_t random; /* the same on both sides */
    uint32_t number; /* of the case of its kind: 0 .. */
    bool is_full;    /* something had no room: the case is left out (on both sides) */
};

union gpu_check_batch {
    struct kvt_copy_batch copy;
    struct kvt_check_batch check;
    struct kvt_quant_batch quant;
    struct kvt_relayout relayout;
};

struct gpu_check_kind {
    const char *name;
    void (*make)(struct gpu_check_side *side, union gpu_check_batch *ret_batch);
    /* Changes the twin, which is random bytes, before the device gets the same; NULL. */
    void (*prepare)(struct gpu_check_side *twin, const union gpu_check_batch *batch);
    int (*launch)(const struct kvt_kernels *kernels, void *stream,
                  const union gpu_check_batch *batch);
    uint32_t cases_min; /* also when time is short */
};

/* Of the data; 0 when it is full. @align: a power of two up to 256. */
uint64_t gpu_check_place(struct gpu_check_side *side, uint64_t bytes, uint32_t align);
/* Of the lists, 8-byte aligned; NULL when they are full. */
void *gpu_check_take(struct gpu_check_side *side, uint64_t bytes, uint64_t *ret_address);

extern const struct gpu_check_kind gpu_check_copy_kinds[];  /* ends with a name of NULL */
extern const struct gpu_check_kind gpu_check_quant_kinds[]; /* the same */
