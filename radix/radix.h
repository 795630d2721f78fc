/* The token-keyed radix tree: for every prefix, which blocks exist, for which component, where.
 *
 *   namespace ─ root(key) ─ node ── node ─┬─ node        a node is a run of blocks:
 * path-compressed, └─ node ...    so a new prompt costs one node, not many
 *
 * It models token runs in whole blocks and, for every (block, component), a tier mask and one
 * opaque 32-bit handle that the engine gave. It does not know what a tier or a handle is: bit t of
 * a mask is "somewhere called t". By convention of the engine, bits 0..2 are L1..L3 and
 * KVT_RADIX_BIT_HOLD marks a block that is being filled: invisible to lookups (they name the bits
 * that they accept), but alive. A block can have a tag besides, 64 bits that stay with it for its
 * life, and the tree says when a block with one leaves. Equality is by comparing tokens and extra
 * keys, never by hash alone.
 *
 * Invariants (kvt_radix_check walks them): counters equal recounts; a block whose mask is zero for
 * every component, with no lease and nothing alive below, is dead and is not kept past the call
 * that killed it (kvt_radix_insert excepted: see there); a non-full component's block exists only
 * where the tree has that block; nodes with a single child and no reason to stay apart are merged.
 *
 * Block handles are (index, generation): they survive splits and merges of nodes and go stale when
 * the block dies or its namespace is reset. A stale handle is an answer (NULL, false, E_STALE),
 * never undefined.
 *
 * Engine thread only. No allocation after kvt_radix_new, no clock, no I/O, no recursion. Memory is
 * one number of bytes, taken at start; a full tree answers KVT_RADIX_E_NO_ROOM. */
#pragma once

#include "daemon/base/def.h"
#include "daemon/base/limits.h"

struct kvt_radix;

#define KVT_RADIX_BITS 8u /* places in a mask */
#define KVT_RADIX_BIT_HOLD 7u
#define KVT_RADIX_HANDLE_NONE 0u

enum kvt_component_kind {
    KVT_COMPONENT_FULL = 1,
    KVT_COMPONENT_SLIDING_WINDOW = 2,
    KVT_COMPONENT_STATE = 3,
};

/* Expected results. */
enum {
    KVT_RADIX_E_NO_ROOM = 1, /* memory, namespaces or roots used up: evict, or answer "no room" */
    KVT_RADIX_E_STALE = 2,   /* a handle of a dead block, a dropped root or an older epoch */
    KVT_RADIX_E_EXISTS = 3,  /* that name is taken */
};

struct kvt_radix_gone;

struct kvt_radix_config {
    size_t memory_bytes; /* records and tokens together; all of it, never more */
    uint64_t seed;       /* of the hash that finds a child; random in production, fixed in tests */
    uint32_t namespaces_max;
    uint32_t roots_max; /* over all namespaces */
    /* Bits that kvt_radix_victims may be asked about; 0: every bit but HOLD. A node keeps memory
     * for the recency records of each (32 bytes a bit and component): name those that are used. */
    uint8_t mask_evictable;
    bool is_populated; /* touch all of the memory at start: no page is cleared while serving */
    bool has_tags;     /* every block has a tag: 8 bytes more of each block's data */
    /* Told of each block with a tag that leaves the tree (see kvt_radix_tag); may be NULL. */
    void (*gone)(void *ctx, const struct kvt_radix_gone *gone);
    void *gone_ctx;
};

struct kvt_radix_spec {
    uint32_t block_tokens;
    uint32_t components_count;
    struct {
        enum kvt_component_kind kind;
        uint32_t window_tokens; /* sliding_window: W, the previous tokens that a next token sees */
    } components[KVT_COMPONENTS_MAX];
};

struct kvt_radix_ns {
    uint32_t idx; /* index of the namespace; reused only after kvt_radix_ns_close */
};

/* A block with a non-zero tag that left the tree. */
struct kvt_radix_gone {
    struct kvt_radix_ns ns;
    uint64_t block_idx; /* blocks before it on its path */
    uint64_t tag;
};

struct kvt_radix_root {
    uint32_t idx, generation; /* a root: one (salt, LoRA) of a namespace */
};

struct kvt_radix_block {
    uint32_t idx, generation; /* generation 0 is never given out: {0, 0} is "no block" */
};
#define KVT_RADIX_BLOCK_NONE ((struct kvt_radix_block){0, 0})

/* As one u64 it names the block in slot headers: never reused within a boot. */
static inline uint64_t kvt_radix_block_id(struct kvt_radix_block block)
{
    return (uint64_t)block.generation << 32 | block.idx;
}

/* -ENOMEM, -EINVAL (memory too small to hold anything), or 0. */
KVT_MUST_USE int kvt_radix_new(struct kvt_radix **ret_radix, const struct kvt_radix_config *config);
struct kvt_radix *kvt_radix_free(struct kvt_radix *radix); /* NULL-proof; returns NULL */

/* -EINVAL (spec), KVT_RADIX_E_NO_ROOM, or 0. */
KVT_MUST_USE int kvt_radix_ns_open(struct kvt_radix *radix, const struct kvt_radix_spec *spec,
                                   struct kvt_radix_ns *ret_ns);
/* Detaches every root (see kvt_radix_reap); the index may be reused once they are reaped. */
void kvt_radix_ns_close(struct kvt_radix *radix, struct kvt_radix_ns ns);

/* ---- prefixes ------------------------------------------------------------------------------- */

/* A run of tokens below a root or below a block. Only whole blocks are looked at; a rest of less
 * than a block is ignored. Nothing is kept of the pointers after the call. */
struct kvt_radix_prefix {
    struct kvt_radix_ns ns;
    const void *root_key; /* exact bytes that select the root (the engine tags salt and LoRA) */
    uint32_t root_key_bytes;
    struct kvt_radix_block after; /* cursor: tokens begin behind this block; NONE: at the root */
    const uint32_t *tokens;
    uint64_t tokens_count;
    /* One 32-byte key for each whole block of @tokens, all zero for "none"; NULL: none has one. */
    const uint8_t (*extra_keys)[KVT_EXTRA_KEY_BYTES];
    /* kvt_radix_insert: what was there before does not become recently used, only the nodes that
     * get new blocks do. A cursor's path is not walked then: building a long path run by run costs
     * what is new. Blocks loaded in this way go in the order in which they came. */
    bool is_untouched;
    /* kvt_radix_insert: more blocks will follow these, an insert each. A leaf takes room for them
     * ahead, so that n inserts do not copy it n times; what is left of that is given back when a
     * child is hung below it, and by kvt_radix_settle on its last block. */
    bool is_followed;
};

struct kvt_radix_lookup {
    struct kvt_radix_prefix prefix;
    uint64_t limit_tokens; /* no boundary above this; UINT64_MAX: none */
    uint8_t mask_allowed;  /* which bits count as resident */
    bool is_touch;         /* make the path recently used (leaf first, root last) */
};

enum kvt_radix_why {
    KVT_RADIX_WHY_NONE = 0,      /* matched up to the limit or the prompt's last whole block */
    KVT_RADIX_WHY_NO_PATH = 1,   /* the tree does not have these tokens (never stored or evicted) */
    KVT_RADIX_WHY_ABSENT = 2,    /* the block is in the tree but this component's copy is not */
    KVT_RADIX_WHY_ELSEWHERE = 3, /* the copy is only in places that the request did not allow */
    KVT_RADIX_WHY_HOLD = 4,      /* the copy is being filled right now */
};

struct kvt_radix_match {
    uint64_t boundary_tokens; /* greatest legal boundary; counts from the root, cursor or not */
    uint64_t path_tokens;     /* how far the tree has these tokens, resident or not */
    uint64_t full_tokens;     /* where the full components alone would stop: the branch point. Equal
                                 to the boundary when no other component held it back; without a
                                 full component, equal to the boundary */
    struct kvt_radix_block cursor; /* the last block of the path that matched; NONE at 0 */
    struct kvt_radix_block end;    /* the block that ends at the boundary; NONE at 0 */
    struct {
        uint64_t alone_tokens; /* greatest boundary <= limit that this component alone accepts */
        /* Blocks that resuming at the boundary needs from this component (full: all; window: those
         * the window touches; state: one), counted once in the lowest-numbered allowed bit. */
        uint64_t needed_blocks;
        uint64_t blocks_at[KVT_RADIX_BITS];
        enum kvt_radix_why why; /* what keeps it from accepting more than alone_tokens */
        uint64_t why_block_idx; /* of the block that it misses, from the root */
    } components[KVT_COMPONENTS_MAX];
};

/* The greatest boundary legal for every component (DESIGN: the boundary rule). Never changes the
 * tree's shape. Cost: one compare of the tokens, plus work per node, plus vector counts of masks.
 * 0, or KVT_RADIX_E_STALE (prefix.after). An unknown root or namespace is a match of 0 tokens. */
KVT_MUST_USE int kvt_radix_lookup(struct kvt_radix *radix, const struct kvt_radix_lookup *lookup,
                                  struct kvt_radix_match *ret_match);

/* Makes every whole block of the prefix exist. New blocks have empty masks and are NOT dead until
 * kvt_radix_settle: the caller sets masks (kvt_radix_put), then settles; only kvt_radix_get, _put,
 * _path and what reads or sets tags may be called in between.
 * *ret_end is the prefix's last block, *ret_new_blocks how many were made. The path is recently
 * used afterwards (see is_untouched); that is what it costs, O(nodes above @prefix->after). All or
 * nothing: KVT_RADIX_E_NO_ROOM and KVT_RADIX_E_STALE leave the tree as it was. */
KVT_MUST_USE int kvt_radix_insert(struct kvt_radix *radix, const struct kvt_radix_prefix *prefix,
                                  struct kvt_radix_block *ret_end, uint64_t *ret_new_blocks);
/* Removes what is dead on the path that ends at @end (as a lease-free, copy-free tail is), and
 * merges. @end may be stale afterwards. */
void kvt_radix_settle(struct kvt_radix *radix, struct kvt_radix_block end);

/* Gives a live root another key; blocks, handles, leases and recency below it are what they were.
 * E_STALE: there is no live root with the old key. E_EXISTS: there is one with the new key, be it
 * this one. E_NO_ROOM. Whatever is not 0 changed nothing. */
KVT_MUST_USE int kvt_radix_root_rename(struct kvt_radix *radix, struct kvt_radix_ns ns,
                                       const void *old_key, uint32_t old_key_bytes,
                                       const void *new_key, uint32_t new_key_bytes);

/* ---- blocks --------------------------------------------------------------------------------- */

struct kvt_radix_cell { /* one component of one block */
    struct kvt_radix_block block;
    uint32_t handle; /* KVT_RADIX_HANDLE_NONE when the mask is zero */
    uint8_t mask;
};

bool kvt_radix_is_live(const struct kvt_radix *radix, struct kvt_radix_block block);
/* Blocks from the root to @block, itself counted; 0 if stale. */
uint64_t kvt_radix_depth_blocks(const struct kvt_radix *radix, struct kvt_radix_block block);
/* The same for a detached one too, until it is reaped: as deep as it was. */
uint64_t kvt_radix_depth_blocks_any(const struct kvt_radix *radix, struct kvt_radix_block block);
/* The block before it on the path; NONE for a first block or a stale handle. */
struct kvt_radix_block kvt_radix_parent(const struct kvt_radix *radix,
                                        struct kvt_radix_block block);
/* The key of the root that a live block is below; valid until the next call that may change the
 * tree. NULL if stale. O(nodes on the path). */
const void *kvt_radix_root_key(const struct kvt_radix *radix, struct kvt_radix_block block,
                               uint32_t *ret_bytes);
/* Namespace of a live block (asserted). */
struct kvt_radix_ns kvt_radix_ns_of(const struct kvt_radix *radix, struct kvt_radix_block block);
/* A live block's tokens (block_tokens of them) and extra key (NULL: none); valid until the next
 * call that may change the tree. NULL if stale. */
const uint32_t *kvt_radix_tokens(const struct kvt_radix *radix, struct kvt_radix_block block,
                                 const uint8_t **ret_extra_key);

/* E_STALE, or 0 and the cell. */
KVT_MUST_USE int kvt_radix_get(const struct kvt_radix *radix, struct kvt_radix_block block,
                               uint32_t component, struct kvt_radix_cell *ret_cell);
/* Fills @ret_cells with one component's cells of blocks [@first_idx, @first_idx + @count) of the
 * path that ends at @end; the range must lie within the path. E_STALE, or 0. O(nodes + count). */
KVT_MUST_USE int kvt_radix_path(const struct kvt_radix *radix, struct kvt_radix_block end,
                                uint32_t component, uint64_t first_idx, uint64_t count,
                                struct kvt_radix_cell *ret_cells);
/* Sets @bits in the mask. @handle must equal the one there if the mask was not zero. E_STALE, 0. */
KVT_MUST_USE int kvt_radix_put(struct kvt_radix *radix, struct kvt_radix_block block,
                               uint32_t component, uint8_t bits, uint32_t handle);
/* Clears @bits; the handle goes when the mask becomes zero; what is dead by this is removed, with
 * dead ancestors, and nodes merge. @ret_mask (may be NULL) is what remains. Bits of a detached
 * block can be cleared too. E_STALE, or 0. */
KVT_MUST_USE int kvt_radix_drop(struct kvt_radix *radix, struct kvt_radix_block block,
                                uint32_t component, uint8_t bits, uint8_t *ret_mask);
/* The tag of a block: 64 bits that mean nothing to the tree, 0 at birth. With config.has_tags it
 * stays with its block through splits and merges, and through detaching until the block is reaped;
 * without, every tag is 0 and setting one does nothing.
 *
 * config.gone is called exactly once for each block with a non-zero tag that leaves, however it
 * does: dead by kvt_radix_drop, _release, _settle or _detach_*, or reaped. What goes in one call
 * goes children before parents. kvt_radix_free is not a death. A tag that is set anew or to 0 is
 * forgotten without a word. The hook runs in the middle of a change: it may not call the tree. */
uint64_t kvt_radix_tag(const struct kvt_radix *radix, struct kvt_radix_block block); /* 0: stale */
/* Of a live or detached block; stale: nothing happens. */
void kvt_radix_set_tag(struct kvt_radix *radix, struct kvt_radix_block block, uint64_t tag);
/* Tags of blocks [@first_idx, @first_idx + @count) of the path that ends at @end; the range must
 * lie within the path. E_STALE, or 0. O(nodes + count). */
KVT_MUST_USE int kvt_radix_tags(const struct kvt_radix *radix, struct kvt_radix_block end,
                                uint64_t first_idx, uint64_t count, uint64_t *ret_tags);
/* Makes the path to @block recently used: what an engine does when bytes were really read. */
void kvt_radix_touch(struct kvt_radix *radix, struct kvt_radix_block block);

/* ---- leases: the path to a block may not be evicted ------------------------------------------ */

/* Counts on the path from the root to @block. O(nodes on the path). Leased blocks are not dead and
 * are never victims; drop still works on them (bytes may turn out bad). E_STALE, or 0. */
KVT_MUST_USE int kvt_radix_lease(struct kvt_radix *radix, struct kvt_radix_block block);
/* Undoes one lease of exactly @block. E_STALE when the block is gone (its root was detached and
 * reaped), or when it has no lease of its own: nothing changes then. */
KVT_MUST_USE int kvt_radix_release(struct kvt_radix *radix, struct kvt_radix_block block);
/* Whether a lease of this block or of one below it keeps it from being a victim. O(its node). */
bool kvt_radix_is_leased(const struct kvt_radix *radix, struct kvt_radix_block block);

/* ---- eviction ------------------------------------------------------------------------------- */

struct kvt_radix_victim {
    struct kvt_radix_block block;
    uint32_t component;
    uint32_t handle;
    uint8_t mask;
};

struct kvt_radix_victims {
    uint32_t bit; /* from which place something has to go */
    /* Namespace and component, or any: set idx to UINT32_MAX. */
    struct kvt_radix_ns ns;
    uint32_t component;
};

/* Up to @max (block, component) cells that should leave place @which->bit first, in order:
 *   1. window and state blocks that no live boundary needs, and blocks below a hole in the full
 *      component;
 *   2. the least recently used, leaf first: a full block only when no block below it still has a
 *      copy there; the blocks of one window as a unit.
 * Leased blocks, blocks with the HOLD bit on that component and blocks of detached roots are
 * skipped. Nothing is removed: the caller drops the bit of each one that it takes (in the order
 * given), or calls kvt_radix_defer on those it cannot take now; calling again without either may
 * give the same ones. Cost O(@max) amortised, whatever the tree's size; a call passes
 * over a few thousand leased or detached ones at most and may return fewer then, even 0: the next
 * call goes on behind them. Returns how many. */
uint32_t kvt_radix_victims(struct kvt_radix *radix, const struct kvt_radix_victims *which,
                           uint32_t max, struct kvt_radix_victim *ret_victims);
/* Puts a victim that cannot go now (its bytes are being read) behind the others for a while. */
void kvt_radix_defer(struct kvt_radix *radix, const struct kvt_radix_victim *victim, uint32_t bit);
/* Recency of the next victim of @which: lower is older. UINT64_MAX: there is none. Lets the engine
 * compare size classes. */
uint64_t kvt_radix_oldest(struct kvt_radix *radix, const struct kvt_radix_victims *which);

/* ---- removal in O(1), worked off in slices --------------------------------------------------- */

/* From now on nothing below is found by lookups, cursors or victims; handles of its blocks are
 * live for _get, _drop, _release, _tag, _set_tag only, until reaped. */
void kvt_radix_detach_ns(struct kvt_radix *radix, struct kvt_radix_ns ns); /* Reset: all roots */
/* The block and everything below it; blocks above stay. 0, or E_STALE. */
KVT_MUST_USE int kvt_radix_detach_block(struct kvt_radix *radix, struct kvt_radix_block block);
/* One root (salt, LoRA); a root that does not exist is 0 too. */
void kvt_radix_detach_root(struct kvt_radix *radix, struct kvt_radix_ns ns, const void *root_key,
                           uint32_t root_key_bytes);
/* Takes up to @max cells (with a non-zero mask) out of detached parts, children before parents.
 * Each returned cell's mask is cleared by this call and its handle is the caller's to give back;
 * the block's handles go stale when its last cell was returned. Returns how many. It passes
 * @max + 64 nodes at most, empty ones too, so fewer than @max, even 0, does not say that nothing is
 * left: kvt_radix_has_detached does. Each call goes on where the last one stopped. */
uint32_t kvt_radix_reap(struct kvt_radix *radix, uint32_t max, struct kvt_radix_victim *ret_cells);

/* ---- looking -------------------------------------------------------------------------------- */

struct kvt_radix_stats {
    uint64_t memory_bytes, memory_used_bytes; /* used: records and tokens in use */
    uint64_t memory_taken_bytes; /* pages that are not free: used, and room in started pages */
    uint64_t tokens_bytes;       /* of the used: token storage holding tokens */
    uint64_t nodes, blocks, roots, namespaces; /* blocks: detached ones too */
    uint64_t leases;                           /* outstanding */
    uint64_t splits, merges;
    uint64_t cells_at[KVT_RADIX_BITS]; /* (block, component) pairs with that bit */
};
/* O(namespaces): cheap enough for every turn. */
void kvt_radix_stats(const struct kvt_radix *radix, struct kvt_radix_stats *ret_stats);
/* Does the reaper have work? O(1). */
bool kvt_radix_has_detached(const struct kvt_radix *radix);
/* How many blocks wait for the reaper. Walks them: for an administrator's request and tests. */
uint64_t kvt_radix_detached_blocks(const struct kvt_radix *radix);

struct kvt_radix_ns_stats {
    uint64_t roots, nodes, blocks;
    uint64_t cells_at[KVT_COMPONENTS_MAX][KVT_RADIX_BITS];
};
void kvt_radix_ns_stats(const struct kvt_radix *radix, struct kvt_radix_ns ns,
                        struct kvt_radix_ns_stats *ret_stats);

/* Pre-order dump for people: one entry a node, at most @max entries, nodes deeper than
 * @depth_max_blocks left out. *inout_resume starts as 0 and is passed back to go on, until it is
 * UINT64_MAX. Any number may be passed: if the tree changed, nodes may be missed or come twice, and
 * a position where no live node of @ns is ends the dump. Returns how many. O(@max + depth). */
struct kvt_radix_dump_node {
    struct kvt_radix_ns ns;
    uint32_t root_key_bytes;
    const void *root_key; /* valid until the tree changes */
    uint32_t depth_nodes; /* 0: hangs from the root */
    uint64_t first_block_idx;
    uint32_t blocks_count;
    uint32_t children_count;
    uint32_t leases; /* of paths that end in or below this node */
    uint32_t first_tokens[4];
    uint32_t cells_at[KVT_COMPONENTS_MAX][KVT_RADIX_BITS];
};
uint32_t kvt_radix_dump(const struct kvt_radix *radix, struct kvt_radix_ns ns,
                        uint64_t depth_max_blocks, uint64_t *inout_resume, uint32_t max,
                        struct kvt_radix_dump_node *ret_nodes);

/* Walks everything and compares with the counters. true, or false and *ret_why (static text). For
 * tests and a debug request; O(tree). */
bool kvt_radix_check(const struct kvt_radix *radix, const char **ret_why);
