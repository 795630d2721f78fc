/* What the files of radix/ share; nobody else includes it.
 *
 *   region  | page table | buckets | page | page | ...      one mapping of memory_bytes
 *             each page holds objects of one class: block records, place records, nodes, or data
 *             of one size; an empty page goes back and may become any class.
 *
 *   node    at most 64 blocks in a row (at most 4,096 tokens, or one block); its data lies in one
 *           object:   tags[cap] | tokens[cap][block_tokens] | ids[cap] | handles[C][cap] |
 *           masks[C][cap]; the tags only if the tree was made with them.
 *           A longer run is a chain of nodes with one child each. A root is a node of no blocks.
 *   block   16 bytes: (node, position, generation); the handle that others hold names it, so a
 *           split or merge only rewrites these.
 *   place   (node, component, bit): how many blocks of the node have that bit, and how many
 *           children have it in or below them. It exists while either is not zero, and is on the
 *           recency list of its (namespace, component, bit) while it can give a victim.
 *
 * References are byte offsets into the region divided by 16; 0 is none. Children of a node with
 * one child are found by the hint; of more, through the buckets, by (parent, seeded hash of the
 * child's first block); an exact compare always follows.
 *
 * `cut` is how many blocks of a node are live: the rest (and the children on dead_child) was
 * detached and waits for the reaper. A split leaves the old record to the lower half, and a merge
 * keeps the record of the child, so that children never have to be told about either. */
#pragma once

#include <string.h>

#include "radix/radix.h"

#define RADIX_RUN_BLOCKS_MAX 64u
#define RADIX_RUN_TOKENS_MAX 4096u
#define RADIX_CLASSES_MAX 192u
#define RADIX_ROOT_KEY_BYTES_MAX 1024u
#define RADIX_BITS_EVICTABLE ((uint8_t) ~(1u << KVT_RADIX_BIT_HOLD))
#define RADIX_MAGIC 0x6b767472u

enum { CLASS_BLOCK = 0, CLASS_PLACE = 1, CLASS_NODE = 2, CLASS_DATA = 3 };

struct page {
    uint32_t next, prev; /* pages of the class with room, or free pages */
    uint32_t free;       /* first free object, 0: none */
    uint32_t generation; /* block pages: above every generation given out here */
    uint32_t used, bump; /* objects in use; objects ever used since the page was taken */
    uint32_t cls;        /* UINT32_MAX: the page is free */
    uint32_t is_listed;
};
static_assert(sizeof(struct page) == 32, "two a cache line");

struct page_class {
    uint32_t bytes, per_page;
    uint32_t head, tail; /* pages with room; an empty reserve page is at the tail */
    uint64_t pages;
};

struct pool {
    uint8_t *region;
    struct page *pages;
    void *map;
    size_t map_bytes, region_bytes, fixed_bytes;
    uint32_t page_shift, pages_count, pages_first;
    uint32_t free_head, free_count;
    uint32_t classes_count;
    uint64_t places_reserved;
    uint64_t used_bytes;
    struct page_class classes[RADIX_CLASSES_MAX];
};

struct block {
    uint32_t node; /* first word: link of the free list */
    uint32_t generation;
    uint32_t pos; /* UINT32_MAX: not in use */
    uint32_t leases;
};
static_assert(sizeof(struct block) == 16, "one reference unit");

struct place {
    uint32_t node;
    uint32_t next, prev; /* recency list: next is more recent */
    uint32_t sibling;    /* next place of the node */
    uint32_t below;      /* children with this (component, bit) in or below them */
    uint8_t count;       /* live blocks of the node with it */
    uint8_t component;
    uint8_t bit;
    uint8_t flags;
    uint64_t stamp;
};
static_assert(sizeof(struct place) == 32, "two a cache line");
#define PLACE_LISTED 1u
#define PLACE_PARKED 2u   /* nothing to give until a lease ends or a mask changes */
#define PLACE_DEFERRED 4u /* class 1 passes it over until recency comes round to it */

struct node {
    uint32_t data;
    uint32_t parent;
    uint32_t hint; /* a child: the only one, or the one used last */
    uint32_t first_child;
    uint32_t children_count;
    uint8_t count, cut, cap, flags;
    uint64_t stamp; /* last use; a child's may be later, and comes up when its copies go */
    uint8_t all[KVT_COMPONENTS_MAX]; /* bits that every live block has */
    uint8_t any[KVT_COMPONENTS_MAX]; /* bits that some live block has */
    uint32_t first_idx;              /* blocks before it on the path */
    uint32_t leases;                 /* that end here or below */
    uint32_t own_leases;             /* that end here */
    uint32_t places;
    /* second cache line: shape only */
    uint32_t hash, hash_next;
    uint32_t sib_next, sib_prev;
    uint32_t dead_child;
    uint32_t extra; /* keys of all @cap blocks, 0: none has one */
    uint32_t hole_next, hole_prev;
    uint32_t reap_next, reap_prev;
    uint32_t mark;
    uint32_t ns_idx;
    uint32_t key_bytes; /* root: length of the key at @data */
    uint32_t spare[3];
};
static_assert(sizeof(struct node) == 128, "two cache lines");
#define NODE_ROOT 1u
#define NODE_HASHED 2u   /* is in the buckets */
#define NODE_FRONTIER 4u /* some full place of it may be listed: a touch has to move it */
#define NODE_HOLE 8u     /* on the namespace's list of nodes with a hole */
#define NODE_DETACHED 16u
#define NODE_REAP 32u /* on the reaper's list */
#define NODE_PARKED 64u
#define NODE_HASH_KNOWN 128u /* until it is attached: @hash is right already */

struct recency {
    uint32_t oldest, newest;
};

struct ns {
    bool is_open, is_closing;
    uint32_t block_tokens, components_count;
    uint32_t run_blocks_max;
    uint32_t block_bytes; /* data of one block: tag, tokens, id, handles and masks */
    uint8_t kinds[KVT_COMPONENTS_MAX];
    uint32_t windows[KVT_COMPONENTS_MAX];
    uint8_t full_mask; /* bit c: component c is full */
    uint32_t roots_head;
    uint32_t holes_head, holes_tail;
    uint64_t roots, nodes, blocks, roots_detached;
    uint64_t cells_at[KVT_COMPONENTS_MAX][KVT_RADIX_BITS];
    struct recency recency[KVT_COMPONENTS_MAX][KVT_RADIX_BITS];
};

struct kvt_radix {
    uint32_t magic;
    uint8_t mask_evictable;
    bool is_merge_skipped; /* once: memory was too short to merge, so the check cannot ask for it */
    bool is_in_hook;       /* the owner of a tag is being told: the tree is half changed */
    uint32_t tag_bytes;    /* of a block's data: 8 or 0 */
    void (*gone)(void *ctx, const struct kvt_radix_gone *gone);
    void *gone_ctx;
    struct pool pool;
    uint32_t *buckets;
    uint64_t buckets_mask;
    uint64_t seed;
    uint64_t clock; /* recency: one more at each touch */
    uint32_t mark;
    uint32_t namespaces_max;
    uint32_t roots_max;
    uint64_t roots, nodes, blocks, leases, splits, merges, tokens_bytes;
    uint32_t reap_head, reap_tail;
    uint32_t reap_node; /* where the reaper stands; 0: at the head of its list */
    struct ns *namespaces;
};

/* ---- references ----------------------------------------------------------------------------- */

static inline void *ref_ptr(const struct kvt_radix *radix, uint32_t ref)
{
    return radix->pool.region + ((size_t)ref << 4);
}

static inline struct node *node_at(const struct kvt_radix *radix, uint32_t ref)
{
    return ref_ptr(radix, ref);
}

static inline struct place *place_at(const struct kvt_radix *radix, uint32_t ref)
{
    return ref_ptr(radix, ref);
}

static inline struct block *block_at(const struct kvt_radix *radix, uint32_t ref)
{
    return ref_ptr(radix, ref);
}

static inline uint32_t ref_of(const struct kvt_radix *radix, const void *ptr)
{
    return (uint32_t)((size_t)((const uint8_t *)ptr - radix->pool.region) >> 4);
}

static inline struct ns *ns_of(const struct kvt_radix *radix, const struct node *node)
{
    return &radix->namespaces[node->ns_idx];
}

/* ---- data of a node -------------------------------------------------------------------------- */

/* Only if radix->tag_bytes is not 0. */
static inline uint64_t *node_tags(const struct kvt_radix *radix, const struct node *node)
{
    return ref_ptr(radix, node->data);
}

static inline uint32_t *node_tokens(const struct kvt_radix *radix, const struct node *node)
{
    uint8_t *data = ref_ptr(radix, node->data);

    return (uint32_t *)(void *)(data + (size_t)node->cap * radix->tag_bytes);
}

static inline uint32_t *node_ids(const struct kvt_radix *radix, const struct node *node)
{
    return node_tokens(radix, node) + (size_t)node->cap * ns_of(radix, node)->block_tokens;
}

static inline uint32_t *node_handles(const struct kvt_radix *radix, const struct node *node,
                                     uint32_t component)
{
    return node_ids(radix, node) + (size_t)node->cap * (1 + component);
}

static inline uint8_t *node_masks(const struct kvt_radix *radix, const struct node *node,
                                  uint32_t component)
{
    const struct ns *ns = ns_of(radix, node);

    return (uint8_t *)(node_ids(radix, node) + (size_t)node->cap * (1 + ns->components_count)) +
           (size_t)node->cap * component;
}

static inline uint8_t *node_extra(const struct kvt_radix *radix, const struct node *node)
{
    return node->extra == 0 ? NULL : ref_ptr(radix, node->extra);
}

/* Bit i is set when @masks[i] has one of @bits; @count <= 64. */
static inline uint64_t masks_with(const uint8_t *masks, uint32_t count, uint8_t bits)
{
    const uint64_t ones = 0x0101010101010101ull, low7 = 0x7f7f7f7f7f7f7f7full;
    uint64_t ret = 0, word;

    for (uint32_t at = 0; at < count; at += 8) {
        uint32_t left = count - at;

        word = 0;
        if (left >= 8) {
            memcpy(&word, masks + at, 8);
        } else {
            for (uint32_t i = 0; i < left; i++)
                word |= (uint64_t)masks[at + i] << (8 * i);
        }
        word &= ones * bits;
        word = (((word & low7) + low7) | word) & ~low7;
        ret |= ((word >> 7) * 0x0102040810204080ull >> 56) << at;
    }
    return ret;
}

static inline uint64_t bits_below(uint32_t count)
{
    return count >= 64 ? ~0ull : (1ull << count) - 1;
}

/* ---- pool.c ---------------------------------------------------------------------------------- */

KVT_MUST_USE int pool_init(struct pool *pool, const struct kvt_radix_config *config,
                           uint64_t buckets_count, uint32_t **ret_buckets);
void pool_deinit(struct pool *pool);
/* NULL: no room. The object is not zeroed. */
KVT_MUST_USE void *pool_take(struct pool *pool, uint32_t cls);
void pool_give(struct pool *pool, void *object);
/* Smallest class of data that holds @bytes; UINT32_MAX: larger than a page. */
uint32_t pool_class_of(const struct pool *pool, size_t bytes);
/* Keeps memory for @count more places: taking that many cannot fail then. */
bool pool_reserve_places(struct pool *pool, uint32_t count);
void pool_unreserve_places(struct pool *pool, uint32_t count);
/* The object of the class at @ref, in use or given back; NULL if there never was one in its page.
 * @ref may be any number. */
void *pool_object(const struct pool *pool, uint32_t cls, uint32_t ref);
/* The block record at @idx if that is one and it is in use, whatever number @idx is. */
struct block *pool_block_in_use(const struct pool *pool, uint32_t idx);

/* ---- node.c: shape --------------------------------------------------------------------------- */

/* A node with room for @blocks blocks and none in it, linked to nothing; NULL: no room. */
KVT_MUST_USE struct node *node_new(struct kvt_radix *radix, uint32_t ns_idx, uint32_t blocks);
/* Gives the record, data and places back; its blocks must be gone. */
void node_free(struct kvt_radix *radix, struct node *node);
/* Moves the data to an object with room for @blocks; false: no room, nothing changed. */
bool node_resize(struct kvt_radix *radix, struct node *node, uint32_t blocks);
/* Gives the data a smaller object if that saves a class worth having. */
void node_shrink(struct kvt_radix *radix, struct node *node);
bool node_need_extra(struct kvt_radix *radix, struct node *node);
/* Puts new blocks with these tokens at the end. The room must be there; false: no block records,
 * and nothing was added. */
bool node_append(struct kvt_radix *radix, struct node *node, uint32_t blocks,
                 const uint32_t *tokens, const uint8_t (*extra_keys)[KVT_EXTRA_KEY_BYTES]);
/* Removes blocks from @from to the end (their masks are zero). */
void node_truncate(struct kvt_radix *radix, struct node *node, uint32_t from);
void node_attach(struct kvt_radix *radix, struct node *parent, struct node *child);
void node_unlink(struct kvt_radix *radix, struct node *child);
void node_summarise(struct kvt_radix *radix, struct node *node);
/* @node keeps what begins at @at; the new node before it is returned. NULL: no room. */
KVT_MUST_USE struct node *node_split(struct kvt_radix *radix, struct node *node, uint32_t at);
/* Merges @node with its only child if nothing speaks against it; the survivor. */
struct node *node_try_merge(struct kvt_radix *radix, struct node *node);
/* Removes what is dead from @node upwards and merges. */
void node_trim(struct kvt_radix *radix, struct node *node);
/* Blocks of the node that a lease protects: the first this many. */
uint32_t node_leased_blocks(const struct kvt_radix *radix, const struct node *node);
/* Bit i: block i of the live ones has a copy of some component. */
uint64_t node_occupied(const struct kvt_radix *radix, const struct node *node);
/* Bit i: some full component has no copy of block i at all. */
uint64_t node_holes(const struct kvt_radix *radix, const struct node *node);
bool node_is_detached(const struct kvt_radix *radix, const struct node *node);

uint64_t bucket_of(const struct kvt_radix *radix, uint32_t parent, uint32_t hash);
void bucket_insert(struct kvt_radix *radix, struct node *node);
void bucket_remove(struct kvt_radix *radix, struct node *node);
uint32_t first_block_hash(const struct kvt_radix *radix, const uint32_t *tokens,
                          uint32_t block_tokens, const uint8_t *extra_key);
static inline bool extra_key_is_none(const uint8_t *key)
{
    uint64_t words[KVT_EXTRA_KEY_BYTES / 8];

    if (key == NULL)
        return true;
    memcpy(words, key, sizeof(words));
    return (words[0] | words[1] | words[2] | words[3]) == 0;
}

/* ---- root.c ---------------------------------------------------------------------------------- */

struct node *root_find(const struct kvt_radix *radix, uint32_t ns_idx, const void *key,
                       uint32_t key_bytes);
/* NULL: no room. */
struct node *root_new(struct kvt_radix *radix, uint32_t ns_idx, const void *key,
                      uint32_t key_bytes);
void root_unlink(struct kvt_radix *radix, struct node *root);
/* Frees a root without children; the namespace's index too when that was its last. */
void root_free(struct kvt_radix *radix, struct node *root);

/* ---- place.c: who has what, and recency ------------------------------------------------------ */

struct place *place_find(const struct kvt_radix *radix, const struct node *node, uint32_t component,
                         uint32_t bit);
void place_add(struct kvt_radix *radix, struct node *node, uint32_t component, uint32_t bit,
               uint32_t count);
void place_sub(struct kvt_radix *radix, struct node *node, uint32_t component, uint32_t bit,
               uint32_t count);
/* @child has it no more; @newer: where in recency its successor is, or 0. */
void place_below_sub(struct kvt_radix *radix, struct node *child, uint32_t component, uint32_t bit,
                     uint32_t newer);
void place_unlist(struct kvt_radix *radix, struct place *place);
/* Lists or unlists it as its counts say. */
void place_relist(struct kvt_radix *radix, struct place *place);
void place_to_newest(struct kvt_radix *radix, struct place *place);
void place_to_oldest(struct kvt_radix *radix, struct place *place);
void place_park(struct kvt_radix *radix, struct place *place);
void node_unpark(struct kvt_radix *radix, struct node *node);
void places_free(struct kvt_radix *radix, struct node *node);
void places_split(struct kvt_radix *radix, struct node *upper, struct node *lower);
void places_merge(struct kvt_radix *radix, struct node *parent, struct node *child);
/* Full places: the frontier that lies in @node becomes most recent. */
void node_touch_frontier(struct kvt_radix *radix, struct node *node);
/* The path to @node, or what of it has blocks at @first_idx or behind, was used at radix->clock:
 * leaf first, root last. */
void path_touch(struct kvt_radix *radix, struct node *node, uint64_t first_idx);
/* So was the boundary behind @pos blocks of @node: its windows and its state. */
void boundary_touch(struct kvt_radix *radix, struct node *node, uint32_t pos);
void hole_refresh(struct kvt_radix *radix, struct node *node);
void hole_unlist(struct kvt_radix *radix, struct node *node);

/* ---- evict.c --------------------------------------------------------------------------------- */

/* Block @pos of a window component went: see there. */
void window_orphans(struct kvt_radix *radix, struct node *node, uint32_t pos, uint32_t component);

/* ---- lookup.c -------------------------------------------------------------------------------- */

/* Where a walk stopped: @matched_blocks of the prefix are in the tree, the last of them is block
 * @pos - 1 of @node (or the root, or the cursor). @node NULL: there is no such root. */
struct walk {
    struct node *node;
    uint32_t pos;
    uint64_t matched_blocks, prefix_blocks;
    uint64_t base_blocks; /* before the prefix: of the cursor */
    uint32_t hash;        /* of the next block, if no child of @node begins with it */
    bool has_hash;
};
KVT_MUST_USE int radix_walk(const struct kvt_radix *radix, const struct kvt_radix_prefix *prefix,
                            struct walk *ret_walk);
/* Live block of a live node, or NULL. */
struct node *block_node_live(const struct kvt_radix *radix, struct kvt_radix_block block,
                             uint32_t *ret_pos);
/* Detached ones too. */
struct node *block_node_any(const struct kvt_radix *radix, struct kvt_radix_block block,
                            uint32_t *ret_pos);

static inline struct kvt_radix_block node_block(const struct kvt_radix *radix,
                                                const struct node *node, uint32_t pos)
{
    uint32_t idx = node_ids(radix, node)[pos];

    return (struct kvt_radix_block){.idx = idx, .generation = block_at(radix, idx)->generation};
}
