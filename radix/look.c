/* Counters and the dump for people. Engine thread only. */
#include "radix/internal.h"

static uint64_t blocks_from(const struct kvt_radix *radix, const struct node *node, uint32_t from)
{
    uint64_t count = 0;

    for (uint32_t pos = from; pos < node->count; pos++)
        count += node_ids(radix, node)[pos] != 0;
    return count;
}

/* Blocks of a detached part: all of a subtree, or what hangs at a cut. */
static uint64_t detached_count(const struct kvt_radix *radix, const struct node *top)
{
    const bool is_all = top->flags & NODE_DETACHED;
    const struct node *node = top;
    uint64_t count = 0;

    if (!(top->flags & NODE_ROOT))
        count = blocks_from(radix, top, is_all ? 0 : top->cut);
    for (;;) {
        uint32_t next = node->dead_child;

        if (next == 0 && (node != top || is_all))
            next = node->first_child;
        while (next == 0 && node != top) {
            const struct node *parent = node_at(radix, node->parent);
            bool was_dead = node->first_idx != parent->first_idx + parent->cut;

            next = node->sib_next;
            if (next == 0 && was_dead && (parent != top || is_all))
                next = parent->first_child;
            if (next == 0)
                node = parent;
        }
        if (next == 0)
            return count;
        node = node_at(radix, next);
        count += blocks_from(radix, node, 0);
    }
}

void kvt_radix_stats(const struct kvt_radix *radix, struct kvt_radix_stats *ret_stats)
{
    const struct pool *pool = &radix->pool;
    struct kvt_radix_stats stats = {
        .memory_bytes = pool->region_bytes,
        .memory_used_bytes = pool->fixed_bytes + pool->used_bytes,
        .memory_taken_bytes = (uint64_t)(pool->pages_count - pool->free_count) << pool->page_shift,
        .tokens_bytes = radix->tokens_bytes,
        .nodes = radix->nodes,
        .blocks = radix->blocks,
        .roots = radix->roots,
        .leases = radix->leases,
        .splits = radix->splits,
        .merges = radix->merges,
    };

    for (uint32_t i = 0; i < radix->namespaces_max; i++) {
        const struct ns *ns = &radix->namespaces[i];

        stats.namespaces += ns->is_open;
        for (uint32_t c = 0; c < ns->components_count; c++) {
            for (uint32_t bit = 0; bit < KVT_RADIX_BITS; bit++)
                stats.cells_at[bit] += ns->cells_at[c][bit];
        }
    }
    *ret_stats = stats;
}

bool kvt_radix_has_detached(const struct kvt_radix *radix)
{
    return radix->reap_head != 0;
}

uint64_t kvt_radix_detached_blocks(const struct kvt_radix *radix)
{
    uint64_t count = 0;

    for (uint32_t ref = radix->reap_head; ref != 0; ref = node_at(radix, ref)->reap_next) {
        const struct node *node = node_at(radix, ref);

        if ((node->flags & NODE_DETACHED) || !node_is_detached(radix, node))
            count += detached_count(radix, node);
    }
    return count;
}

void kvt_radix_ns_stats(const struct kvt_radix *radix, struct kvt_radix_ns ns_id,
                        struct kvt_radix_ns_stats *ret_stats)
{
    const struct ns *ns;

    KVT_ASSERT(ns_id.idx < radix->namespaces_max);
    ns = &radix->namespaces[ns_id.idx];
    *ret_stats =
        (struct kvt_radix_ns_stats){.roots = ns->roots, .nodes = ns->nodes, .blocks = ns->blocks};
    memcpy(ret_stats->cells_at, ns->cells_at, sizeof(ns->cells_at));
}

static void dump_node(const struct kvt_radix *radix, const struct node *node,
                      const struct node *root, uint32_t depth_nodes,
                      struct kvt_radix_dump_node *ret_node)
{
    const struct ns *ns = ns_of(radix, node);

    *ret_node = (struct kvt_radix_dump_node){
        .ns = {.idx = node->ns_idx},
        .root_key_bytes = root->key_bytes,
        .root_key = ref_ptr(radix, root->data),
        .depth_nodes = depth_nodes,
        .first_block_idx = node->first_idx,
        .blocks_count = node->cut,
        .children_count = node->children_count,
        .leases = node->leases,
    };
    memcpy(ret_node->first_tokens, node_tokens(radix, node),
           KVT_MIN((size_t)node->cut * ns->block_tokens, KVT_COUNT_OF(ret_node->first_tokens)) *
               sizeof(uint32_t));
    for (uint32_t c = 0; c < ns->components_count; c++) {
        for (uint32_t bit = 0; bit < KVT_RADIX_BITS; bit++)
            ret_node->cells_at[c][bit] = (uint32_t)__builtin_popcountll(
                masks_with(node_masks(radix, node, c), node->cut, (uint8_t)(1u << bit)));
    }
}

/* Next in pre-order; a node deeper than wanted is not entered. NULL: the end. */
static const struct node *dump_next(const struct kvt_radix *radix, const struct node *node,
                                    uint64_t depth_max_blocks, uint32_t *inout_depth)
{
    uint32_t next = node->first_child;

    if ((uint64_t)node->first_idx + node->cut >= depth_max_blocks)
        next = 0;
    *inout_depth += next != 0;
    while (next == 0) {
        next = node->sib_next;
        if (next != 0 || (node->flags & NODE_ROOT))
            break;
        node = node_at(radix, node->parent);
        --*inout_depth;
    }
    return next == 0 ? NULL : node_at(radix, next);
}

/* Where a dump begins. A position that was given out before, or by nobody, may name anything by
 * now: NULL unless a live node of the namespace is there. */
static const struct node *dump_start(const struct kvt_radix *radix, uint32_t ns_idx,
                                     uint64_t resume)
{
    const struct node *node;

    if (resume == 0) {
        uint32_t ref = radix->namespaces[ns_idx].roots_head;

        return ref == 0 ? NULL : node_at(radix, ref);
    }
    if (resume > UINT32_MAX)
        return NULL;
    node = pool_object(&radix->pool, CLASS_NODE, (uint32_t)resume);
    if (node == NULL || (node->count == 0 && !(node->flags & NODE_ROOT)) ||
        node->ns_idx != ns_idx || node_is_detached(radix, node))
        return NULL;
    return node;
}

uint32_t kvt_radix_dump(const struct kvt_radix *radix, struct kvt_radix_ns ns,
                        uint64_t depth_max_blocks, uint64_t *inout_resume, uint32_t max,
                        struct kvt_radix_dump_node *ret_nodes)
{
    const struct node *node, *root;
    uint32_t count = 0, depth = 0; /* depth: nodes above it, the root counted */

    KVT_ASSERT(ns.idx < radix->namespaces_max);
    node = dump_start(radix, ns.idx, *inout_resume);
    for (root = node; root != NULL && !(root->flags & NODE_ROOT);
         root = node_at(radix, root->parent))
        depth++;
    while (node != NULL && count < max) {
        if (node->flags & NODE_ROOT)
            root = node;
        else
            dump_node(radix, node, root, depth - 1, &ret_nodes[count++]);
        node = dump_next(radix, node, depth_max_blocks, &depth);
    }
    *inout_resume = node == NULL ? UINT64_MAX : ref_of(radix, node);
    return count;
}
