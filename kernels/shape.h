/* The shape of a launch, from the batch alone: how many blocks of how many threads, and how they
 * share the work. The kernels walk with strides, so any shape gives the right bytes; these are for
 * speed (docs/kernels.md has the reasoning). Any thread. */
#pragma once

#include "kernels/kvt_kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

#define KVT_LANE_VECS 4u       /* 16-byte accesses that a thread has in flight */
#define KVT_SHAPE_THREADS 256u /* of a block */
#define KVT_SHAPE_BLOCKS_MAX 4096u

struct kvt_steps { /* of a layout: bytes from one to the next */
    uint64_t layer, page, token, head;
};

struct kvt_shape {
    uint32_t blocks_x, blocks_y, threads; /* none is 0 */
    /* copies: threads that move a unit together, bytes of a unit, units of the longest part */
    uint32_t lanes, chunk_bytes, chunks;
    /* relayout: neighbouring bytes of a page of a layer that stay neighbours; how often there are
     * such: run_tokens x run_heads; and where the two orders have what */
    uint32_t runs, run_bytes, run_tokens, run_heads;
    struct kvt_steps from, to;
};

/* @blocks_max bounds blocks_x * blocks_y. The arguments were found in order (args.h), and there is
 * something to do. */
struct kvt_shape kvt_shape_copy(const struct kvt_copy_batch *batch, uint32_t blocks_max);
struct kvt_shape kvt_shape_check(const struct kvt_check_batch *batch, uint32_t blocks_max);
struct kvt_shape kvt_shape_quant(const struct kvt_quant_batch *batch, uint32_t blocks_max);
struct kvt_shape kvt_shape_relayout(const struct kvt_relayout *change, uint32_t blocks_max);

#ifdef __cplusplus
}
#endif
