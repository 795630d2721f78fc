/* The ids of an engine's block pool, as serving engines hand them out: one pool for all kinds of
 * layers, so an id is unique over all components and a block that one component gave back may be
 * the next one's.
 *
 *   take      a free block, with one reference: of a request's table
 *   ref       one more: of an op of the daemon that reads the block or writes it
 *   unref     the last one puts it back: a block whose op is not quiesced stays out
 *
 * Block 0 is the null block of such engines: it stands for "none here" and is never handed out.
 * Free blocks are a deque; each take draws (seeded) whether it takes what was given back last, so
 * that a late write hits somebody, or first. One thread at a time. */
#pragma once

#include "daemon/base/def.h"

#define KVT_BLOCK_NONE UINT64_MAX /* of tables: no block held here */

struct kvt_block_pool {
    uint64_t blocks_count; /* block 0 included */
    uint64_t random;
    uint32_t *refs;  /* by id */
    uint8_t *owners; /* by id: the component that took it last; KVT_BLOCK_POOL_FRESH: none yet */
    uint64_t *ring;  /* of free ids: free_count of them from ring[head] */
    uint64_t head, free_count;
    uint64_t reused, reused_by_other; /* taken that had had an owner; of them: another component */
};
#define KVT_BLOCK_POOL_NULL ((struct kvt_block_pool){0})
#define KVT_BLOCK_POOL_FRESH 255u

/* At least 2 blocks. -ENOMEM, or 0. */
KVT_MUST_USE int kvt_block_pool_init(struct kvt_block_pool *pool, uint64_t blocks_count,
                                     uint64_t seed);
void kvt_block_pool_deinit(struct kvt_block_pool *pool);

/* @count blocks for @component, or none at all: false. */
KVT_MUST_USE bool kvt_block_pool_take(struct kvt_block_pool *pool, uint32_t component,
                                      uint64_t count, uint64_t *ret_ids);
void kvt_block_pool_ref(struct kvt_block_pool *pool, uint64_t id);
/* true: that was the last one, the block is free. */
bool kvt_block_pool_unref(struct kvt_block_pool *pool, uint64_t id);
