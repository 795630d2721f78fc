/* Making the blocks of a prefix exist.
 *
 * What is new is built apart, as a chain of nodes that nothing refers to; then the node in which
 * the prefix leaves the tree is split; then the chain is hung in. Each step that can lack memory
 * comes before the first that shows, so a full tree says so and is as it was. Engine thread only.
 */
#include "radix/internal.h"

#define FOLLOWED_BLOCKS_MIN 8u

static void chain_free(struct kvt_radix *radix, struct node *top)
{
    struct node *node = top;

    while (node != NULL && node->first_child != 0)
        node = node_at(radix, node->first_child);
    while (node != NULL) {
        struct node *parent = node == top ? NULL : node_at(radix, node->parent);

        node_truncate(radix, node, 0);
        if (parent != NULL)
            node_unlink(radix, node);
        node_free(radix, node);
        node = parent;
    }
}

/* A chain for @blocks blocks; false: no room, and nothing is left of it. */
static bool chain_new(struct kvt_radix *radix, const struct kvt_radix_prefix *prefix, uint64_t from,
                      uint64_t blocks, struct node **ret_top, struct node **ret_last)
{
    const struct ns *ns = &radix->namespaces[prefix->ns.idx];
    struct node *top = NULL, *last = NULL;

    while (blocks > 0) {
        uint32_t count = (uint32_t)KVT_MIN(blocks, (uint64_t)ns->run_blocks_max);
        struct node *node = node_new(radix, prefix->ns.idx, count);

        if (node == NULL ||
            !node_append(radix, node, count, prefix->tokens + from * ns->block_tokens,
                         prefix->extra_keys == NULL ? NULL : prefix->extra_keys + from)) {
            if (node != NULL)
                node_free(radix, node);
            chain_free(radix, top);
            return false;
        }
        if (last != NULL)
            node_attach(radix, last, node);
        else
            top = node;
        last = node;
        from += count;
        blocks -= count;
    }
    *ret_top = top;
    *ret_last = last;
    return true;
}

/* Nodes of a new chain know where they are only once it hangs in the tree. */
static void chain_place(struct kvt_radix *radix, struct node *top)
{
    struct node *node = top;

    for (;;) {
        if (ns_of(radix, node)->full_mask != 0)
            hole_refresh(radix, node);
        if (node->first_child == 0)
            return;
        node_at(radix, node->first_child)->first_idx = node->first_idx + node->cut;
        node = node_at(radix, node->first_child);
    }
}

/* A leaf takes as many of the new blocks as fit into its run. */
static bool leaf_extend(struct kvt_radix *radix, struct node *node,
                        const struct kvt_radix_prefix *prefix, uint64_t from, uint64_t *inout_left)
{
    const struct ns *ns = ns_of(radix, node);
    uint32_t room = ns->run_blocks_max - node->count;
    uint32_t blocks = (uint32_t)KVT_MIN(*inout_left, (uint64_t)room), count = node->count + blocks;
    uint32_t ahead = KVT_MIN(KVT_MAX(2 * count, FOLLOWED_BLOCKS_MIN), ns->run_blocks_max);

    if (count > node->cap && !(prefix->is_followed && node_resize(radix, node, ahead)) &&
        !node_resize(radix, node, count))
        return false;
    if (!node_append(radix, node, blocks, prefix->tokens + from * ns->block_tokens,
                     prefix->extra_keys == NULL ? NULL : prefix->extra_keys + from))
        return false;
    node_summarise(radix, node);
    hole_refresh(radix, node);
    *inout_left -= blocks;
    return true;
}

static bool leaf_can_extend(const struct kvt_radix *radix, const struct node *node)
{
    return !(node->flags & (NODE_ROOT | NODE_REAP)) && node->children_count == 0 &&
           node->cut == node->count && node->dead_child == 0 &&
           node->count < ns_of(radix, node)->run_blocks_max;
}

/* After a split: what was made shorter may now fit together with its neighbours. */
static void merge_around(struct kvt_radix *radix, struct node *lower)
{
    struct node *upper, *above;

    lower = node_try_merge(radix, lower);
    upper = node_at(radix, lower->parent);
    above = node_at(radix, upper->parent);
    if (!(above->flags & NODE_ROOT))
        (void)node_try_merge(radix, above);
}

/* Hangs @blocks new ones behind the walk's end. *ret_end: node of the last. False: no room. */
static bool blocks_hang(struct kvt_radix *radix, const struct kvt_radix_prefix *prefix,
                        const struct walk *walk, struct node **ret_end)
{
    struct node *node = walk->node, *top = NULL, *last = NULL, *lower = NULL;
    uint64_t left = walk->prefix_blocks - walk->matched_blocks, from = walk->matched_blocks;
    const bool is_extend = leaf_can_extend(radix, node) && walk->pos == node->cut;
    uint64_t room = is_extend ? ns_of(radix, node)->run_blocks_max - node->count : 0;

    if (left > room && !chain_new(radix, prefix, from + room, left - room, &top, &last))
        return false;
    if (is_extend && !leaf_extend(radix, node, prefix, from, &left)) {
        chain_free(radix, top);
        return false;
    }
    if (!(node->flags & NODE_ROOT) && walk->pos < node->cut && !is_extend) {
        lower = node;
        node = node_split(radix, node, walk->pos);
        if (node == NULL) {
            chain_free(radix, top);
            return false;
        }
    }
    if (top != NULL) {
        if (walk->has_hash) {
            top->hash = walk->hash;
            top->flags |= NODE_HASH_KNOWN;
        }
        node_attach(radix, node, top);
        chain_place(radix, top);
        if (!(node->flags & NODE_ROOT))
            node_shrink(radix, node);
    }
    if (lower != NULL)
        merge_around(radix, lower);
    *ret_end = last != NULL ? last : node;
    return true;
}

int kvt_radix_insert(struct kvt_radix *radix, const struct kvt_radix_prefix *prefix,
                     struct kvt_radix_block *ret_end, uint64_t *ret_new_blocks)
{
    struct walk walk;
    struct node *end, *root = NULL;
    const struct ns *ns;
    uint64_t fresh;
    int r;

    KVT_ASSERT(radix->magic == RADIX_MAGIC);
    r = radix_walk(radix, prefix, &walk);
    if (r != 0)
        return r;
    if (prefix->ns.idx >= radix->namespaces_max || !radix->namespaces[prefix->ns.idx].is_open)
        return KVT_RADIX_E_STALE;
    ns = &radix->namespaces[prefix->ns.idx];
    fresh = walk.prefix_blocks - walk.matched_blocks;
    if ((walk.base_blocks + walk.prefix_blocks) * ns->block_tokens > KVT_PREFIX_TOKENS_MAX)
        return KVT_RADIX_E_NO_ROOM;
    radix->clock++;
    if (fresh > 0) {
        if (walk.node == NULL) {
            root = walk.node =
                root_new(radix, prefix->ns.idx, prefix->root_key, prefix->root_key_bytes);
            if (root == NULL)
                return KVT_RADIX_E_NO_ROOM;
        }
        if (!blocks_hang(radix, prefix, &walk, &end)) {
            if (root != NULL)
                root_free(radix, root);
            return KVT_RADIX_E_NO_ROOM;
        }
        walk.node = end;
        walk.pos = end->count;
    }
    *ret_new_blocks = fresh;
    *ret_end = walk.node == NULL || walk.pos == 0 ? KVT_RADIX_BLOCK_NONE
                                                  : node_block(radix, walk.node, walk.pos - 1);
    if (walk.node != NULL)
        path_touch(radix, walk.node,
                   prefix->is_untouched ? walk.base_blocks + walk.matched_blocks : 0);
    return 0;
}

void kvt_radix_settle(struct kvt_radix *radix, struct kvt_radix_block end)
{
    uint32_t pos;
    struct node *node = block_node_live(radix, end, &pos);

    if (node != NULL)
        node_trim(radix, node);
}
