/* Blocks on their way between an engine's pool and a device tier, for the parts that drive one. A
 * pool has blocks that are stored (those with even numbers, whose words say where they lie) and
 * blocks that are loaded into (the odd ones); when all went through slots and back, block 2k + 1
 * holds what block 2k does, or, quantised, what the reference makes of that there and back. Nothing
 * else in the pool has changed.
 *
 *   layer first   piece 0: [block 0][block 1]..   piece 1: [block 0][block 1]..
 *   page first    block 0: [piece 0][piece 1]..   block 1: [piece 0][piece 1]..
 *   parts         each [..] above is so many times as wide, and its last part is ours: heads of
 *                 other ranks lie beside */
#pragma once

#include "tiers/tier.h"
#include "tools/kvtier-gpu-check/gpu_check.h"

#define GPU_CHECK_PIECES_MAX 64u
#define GPU_CHECK_BLOCKS 4u /* engine blocks of one of ours */
#define GPU_CHECK_TOKENS 64u
#define GPU_CHECK_SLOTS_MAX 64u
#define GPU_CHECK_SLOT_ALIGN_BYTES 4096u

struct gpu_check_shape {
    const char *name;
    uint32_t slots;       /* a power of two */
    uint32_t pieces;      /* of an engine block */
    uint32_t piece_bytes; /* a multiple of 8; quantised: whole planes, GPU_CHECK_QUANT_BYTES_MAX */
    uint32_t parts;       /* 1: nothing lies between */
    bool is_page_first;
    struct kvt_quant_spec quant; /* kind NONE: stored as it is */
};
#define GPU_CHECK_QUANT_BYTES_MAX 8192u

struct gpu_check_blocks {
    struct gpu_check *check;
    const char *part;
    struct gpu_check_shape shape;
    uint64_t payload_bytes, stored_bytes; /* of a slot: as the engine has it, as it is stored */
    uint64_t pool_blocks, pool_bytes;
    uint64_t unit_bytes, stride_bytes; /* [..] above: our part of it, all parts */
    struct kvt_region region;
    struct kvt_layout layout;
    struct kvt_layout_piece pieces[GPU_CHECK_PIECES_MAX];
    uint64_t from[GPU_CHECK_SLOTS_MAX][GPU_CHECK_BLOCKS];
    uint64_t to[GPU_CHECK_SLOTS_MAX][GPU_CHECK_BLOCKS];
    /* L2 of as many slots; NULL: none. */
    uint8_t *l2;
    uint64_t slot_bytes, l2_bytes;
    uint32_t header_bytes, tokens[GPU_CHECK_TOKENS];
    struct kvt_tier *tier;
    uint64_t generation; /* of what is in the slots: raised by each storing */
    struct kvt_xfer xfers[GPU_CHECK_SLOTS_MAX];
    uint32_t statuses[KVT_XFER_SHORT + 2]; /* of the last transfers; the last entry: of others */
};

enum gpu_check_way {
    GPU_CHECK_STORE,   /* pool -> slot */
    GPU_CHECK_TO_L2,   /* slot -> L2 */
    GPU_CHECK_FROM_L2, /* L2 -> slot */
    GPU_CHECK_LOAD,    /* slot -> pool */
};

/* Sizes and numbers. */
void gpu_check_blocks_init(struct gpu_check_blocks *blocks, struct gpu_check *check,
                           const char *part, const struct gpu_check_shape *shape);
/* Where the pool is. False: it made a row. */
KVT_MUST_USE bool gpu_check_blocks_bind(struct gpu_check_blocks *blocks,
                                        const struct kvt_region *region);
KVT_MUST_USE bool gpu_check_blocks_open_l2(struct gpu_check_blocks *blocks);
void gpu_check_blocks_close_l2(struct gpu_check_blocks *blocks);

/* All blocks that way. */
void gpu_check_blocks_make(struct gpu_check_blocks *blocks, enum gpu_check_way way);
KVT_MUST_USE bool gpu_check_blocks_submit(struct gpu_check_blocks *blocks);
/* Until @count came back. False: they do not come back (a row was made). */
KVT_MUST_USE bool gpu_check_blocks_reap(struct gpu_check_blocks *blocks, uint32_t count);
/* All of it; false also when one did not end well. */
KVT_MUST_USE bool gpu_check_blocks_move(struct gpu_check_blocks *blocks, enum gpu_check_way way);

/* The content of a pool in memory; @salt: another one for each time. */
void gpu_check_blocks_fill(const struct gpu_check_blocks *blocks, uint64_t *pool, uint64_t salt);
/* Of @slots, an arena that all were stored into from such a pool, not quantised. */
uint64_t gpu_check_blocks_count_wrong_slots(const struct gpu_check_blocks *blocks,
                                            const uint8_t *slots, uint64_t salt);
uint64_t gpu_check_blocks_arena_bytes(const struct gpu_check_blocks *blocks);
/* After all were loaded. */
uint64_t gpu_check_blocks_count_wrong(const struct gpu_check_blocks *blocks, const uint64_t *pool,
                                      uint64_t salt);
