/* The KV memory of an engine in miniature: for each rank a sealed memfd, laid out as engines do
 * when groups of layers share one allocation.
 *
 *   layer 0:  [block 0: K V ..][block 1: K V ..] ...
 *   layer 1:  [block 0: K V ..][block 1: K V ..] ...
 *
 * Every component addresses the same blocks: piece (layer, K or V) of block b of component c lies
 * at offset(c, piece) + b * page_bytes, a page being as large as the largest component needs. So a
 * block holds what its component says; the rest of its pages belongs to nobody.
 *
 * A free block holds a guard pattern of its own (its rank and id), so a write to a block that no op
 * owned is seen: when it is taken, and in what it leaves beside the payload when it is given back.
 * One part is one engine block's share of a block of ours. Reading and writing a block is the
 * business of whoever holds it; any process that inherited the mapping may.
 *
 * Or the memory lies elsewhere, where this process cannot touch it (a GPU): then a store moves the
 * pages of a block here and back, and everything else is the same. */
#pragma once

#include "tools/lib/model.h"

struct kvt_kv_pages { /* of one engine block: the same part of each of its pages */
    uint32_t rank, count, bytes_each;
    uint64_t offset_bytes, stride_bytes; /* in the rank's memory */
    uint8_t *bytes;                      /* here, one after another */
};

struct kvt_kv_store {
    /* In the process whose memory it is, once; what is forked afterwards cannot use it. */
    int (*make)(struct kvt_kv_store *store, uint32_t ranks, uint64_t bytes_each);
    /* In a process that was forked before; waits until it is made. */
    int (*join)(struct kvt_kv_store *store);
    /* Any thread of a process that made or joined it. -errno, or 0. */
    int (*move)(struct kvt_kv_store *store, const struct kvt_kv_pages *pages, bool is_write);
    const char *(*why)(const struct kvt_kv_store *store); /* what failed; "" */
};

struct kvt_kv_memory {
    const struct kvt_model *model; /* NULL: nothing here */
    uint64_t blocks_count;         /* engine blocks */
    uint32_t page_bytes;           /* of one layer of an engine block: the stride of every piece */
    uint64_t bytes;                /* of one rank */
    int memfds[KVT_RANKS_MAX];
    uint8_t *bases[KVT_RANKS_MAX];
    struct kvt_kv_store *store; /* NULL: it is the memfds */
    bool has_guards;
};

/* -errno, or 0; every block of every rank holds its guard pattern when @has_guards. */
KVT_MUST_USE int kvt_kv_memory_init(struct kvt_kv_memory *memory, const struct kvt_model *model,
                                    uint64_t blocks_count, bool has_guards);
/* The same in a store: nothing is in it before kvt_kv_memory_make. @store NULL: as init. */
KVT_MUST_USE int kvt_kv_memory_init_store(struct kvt_kv_memory *memory,
                                          const struct kvt_model *model, uint64_t blocks_count,
                                          bool has_guards, struct kvt_kv_store *store);
/* The owner, when it forks no more; the others. Without a store: nothing. -errno, or 0. */
KVT_MUST_USE int kvt_kv_memory_make(struct kvt_kv_memory *memory);
KVT_MUST_USE int kvt_kv_memory_join(const struct kvt_kv_memory *memory);
void kvt_kv_memory_deinit(struct kvt_kv_memory *memory); /* idempotent */

/* Bytes of one rank and one engine block, its pages' rest included. */
uint64_t kvt_kv_memory_block_bytes(const struct kvt_model *model);
/* Of engine block 0; the stride is page_bytes. */
uint64_t kvt_kv_memory_piece_offset(const struct kvt_kv_memory *memory, uint32_t component,
                                    uint32_t piece);

struct kvt_kv_part {
    uint32_t rank, component;
    uint32_t part; /* which engine block of its block: 0 .. engine_blocks_per_block - 1 */
    uint64_t id;   /* where it is */
    uint64_t key;  /* of the oracle: of the whole block's payload on this rank */
    /* A quantised component: what the engine computed and has not stored and loaded since is right,
     * too. False: it was loaded. */
    bool may_be_computed;
};
void kvt_kv_memory_fill(const struct kvt_kv_memory *memory, const struct kvt_kv_part *part);
/* How many payload bytes are not the oracle's. */
KVT_MUST_USE uint64_t kvt_kv_memory_count_wrong(const struct kvt_kv_memory *memory,
                                                const struct kvt_kv_part *part);
/* How many bytes beside the payload are not the guard's. */
KVT_MUST_USE uint64_t kvt_kv_memory_count_spilled(const struct kvt_kv_memory *memory,
                                                  const struct kvt_kv_part *part);
/* How many bytes are neither the guard's nor, in the payload, the oracle's: of a block that was to
 * be loaded and was not, or not whole. */
KVT_MUST_USE uint64_t kvt_kv_memory_count_stray(const struct kvt_kv_memory *memory,
                                                const struct kvt_kv_part *part);

void kvt_kv_memory_guard(const struct kvt_kv_memory *memory, uint32_t rank, uint64_t id);
/* How many bytes of the block are not the guard's. */
KVT_MUST_USE uint64_t kvt_kv_memory_count_unguarded(const struct kvt_kv_memory *memory,
                                                    uint32_t rank, uint64_t id);
