/* The truth for the tree, as naive as can be: one record a block, with a parent and a list of
 * children, walked block by block; boundaries are tried one by one from the top. A block's content
 * is a symbol: two blocks are equal when symbol and extra key are. Shares nothing with radix/. */
#pragma once

#include "radix/radix.h"

#define ORACLE_BLOCKS_MAX 4096u
#define ORACLE_PATH_MAX 512u
#define ORACLE_ROOTS_MAX 3u
#define ORACLE_NS_MAX 2u

struct oracle_block {
    bool is_used, is_detached;
    uint32_t parent; /* index, or UINT32_MAX */
    uint32_t ns, root;
    uint32_t symbol, extra;
    uint32_t depth; /* blocks before it */
    uint8_t mask[KVT_COMPONENTS_MAX];
    uint32_t handle[KVT_COMPONENTS_MAX];
    uint64_t tag;
    uint32_t leases;
    uint32_t children;
    uint32_t first_child, next, prev;
    struct kvt_radix_block block;
};

struct oracle {
    struct kvt_radix_spec specs[ORACLE_NS_MAX];
    uint32_t ns_count;
    uint32_t roots[ORACLE_NS_MAX][ORACLE_ROOTS_MAX]; /* first child of each root */
    uint32_t live, detached, top;                    /* counts; records used so far */
    uint32_t free_head;
    uint64_t leases;
    /* Tags of blocks that went, for whoever empties the list after each operation. */
    uint32_t forgotten_count;
    uint64_t forgotten[ORACLE_BLOCKS_MAX];
    struct oracle_block blocks[ORACLE_BLOCKS_MAX];
};

struct oracle_match {
    uint64_t boundary, path, full; /* in blocks */
    struct {
        uint64_t alone, needed, at[KVT_RADIX_BITS];
        enum kvt_radix_why why;
    } components[KVT_COMPONENTS_MAX];
};

void oracle_init(struct oracle *oracle);
/* Follows symbols from @after (UINT32_MAX: the root); fills the path with record indices, those
 * above @after too. Returns how many of @count matched. *ret_depth: length of the whole path. */
uint32_t oracle_walk(const struct oracle *oracle, uint32_t ns, uint32_t root, uint32_t after,
                     const uint32_t *symbols, const uint32_t *extras, uint32_t count,
                     uint32_t *ret_path, uint32_t *ret_depth);
/* Adds one block below @parent (UINT32_MAX: the root); its index. */
uint32_t oracle_add(struct oracle *oracle, uint32_t ns, uint32_t root, uint32_t parent,
                    uint32_t symbol, uint32_t extra);
/* Removes it and what is dead above it, if it is dead. */
void oracle_bury(struct oracle *oracle, uint32_t idx);
void oracle_detach(struct oracle *oracle, uint32_t idx);
void oracle_forget(struct oracle *oracle, uint32_t idx);
void oracle_match(const struct oracle *oracle, uint32_t ns, const uint32_t *path, uint32_t depth,
                  uint32_t prompt_depth, uint64_t limit_tokens, uint8_t mask_allowed,
                  struct oracle_match *ret_match);
/* Is a lease at the block or below it? */
bool oracle_is_leased(const struct oracle *oracle, uint32_t idx);
/* Has a block strictly below a copy of the component at the bit? */
bool oracle_has_below(const struct oracle *oracle, uint32_t idx, uint32_t component, uint8_t bit);
/* Is some full component missing at the block or above it? */
bool oracle_is_unreachable(const struct oracle *oracle, uint32_t idx);
/* No search for blocks below holes of a namespace takes more steps, whatever the shape. */
uint32_t oracle_hole_visits(const struct oracle *oracle, uint32_t ns);
uint32_t oracle_find(const struct oracle *oracle, struct kvt_radix_block block);
