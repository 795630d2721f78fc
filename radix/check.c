/* The invariants, as a walk over everything: shape, links, summaries, counts, recency lists.
 * A detached part is only counted. Returns the first thing that is wrong. Engine thread only. */
#include "radix/internal.h"

struct recount {
    uint64_t nodes, blocks, leases, roots;
    uint64_t cells_at[KVT_COMPONENTS_MAX][KVT_RADIX_BITS]; /* of one namespace */
};

static const char *check_blocks(const struct kvt_radix *radix, const struct node *node,
                                struct recount *recount)
{
    const struct ns *ns = ns_of(radix, node);
    uint32_t own = 0;

    for (uint32_t pos = 0; pos < node->count; pos++) {
        const uint32_t id = node_ids(radix, node)[pos];
        const struct block *block = pool_block_in_use(&radix->pool, id);

        if (id == 0 && pos >= node->cut && (node->flags & NODE_REAP)) {
            if (radix->tag_bytes != 0 && node_tags(radix, node)[pos] != 0)
                return "a block that is gone has a tag";
            continue; /* it died while the tail waited for the reaper */
        }
        recount->blocks++;
        if (block == NULL || block->node != ref_of(radix, node) || block->pos != pos)
            return "a block record does not name its node and position";
        if (block->generation == 0)
            return "a block has generation 0";
        recount->leases += block->leases;
        own += pos < node->cut ? block->leases : 0;
        for (uint32_t c = 0; c < ns->components_count; c++) {
            const uint8_t mask = node_masks(radix, node, c)[pos];

            if (mask == 0 && node_handles(radix, node, c)[pos] != KVT_RADIX_HANDLE_NONE)
                return "a cell without a bit has a handle";
            for (uint32_t bit = 0; bit < KVT_RADIX_BITS; bit++)
                recount->cells_at[c][bit] += mask >> bit & 1;
        }
    }
    if (!node_is_detached(radix, node) && own != node->own_leases)
        return "leases of the node's blocks do not add up";
    return NULL;
}

static const char *check_summary(const struct kvt_radix *radix, const struct node *node)
{
    for (uint32_t c = 0; c < ns_of(radix, node)->components_count; c++) {
        uint8_t all = UINT8_MAX, any = 0;

        for (uint32_t pos = 0; pos < node->cut; pos++) {
            all &= node_masks(radix, node, c)[pos];
            any |= node_masks(radix, node, c)[pos];
        }
        if (all != node->all[c] || any != node->any[c])
            return "a node's summary of masks is wrong";
    }
    if (!!(node->flags & NODE_HOLE) != (node_holes(radix, node) != 0))
        return "the list of nodes with holes is wrong";
    return NULL;
}

static bool bucket_has(const struct kvt_radix *radix, const struct node *node)
{
    uint32_t ref = radix->buckets[bucket_of(radix, node->parent, node->hash)];

    while (ref != 0 && ref != ref_of(radix, node))
        ref = node_at(radix, ref)->hash_next;
    return ref != 0;
}

static const char *check_children(const struct kvt_radix *radix, const struct node *node)
{
    uint32_t count = 0, leases = node->own_leases;
    bool is_hint_there = node->hint == 0;

    for (uint32_t ref = node->first_child; ref != 0; ref = node_at(radix, ref)->sib_next) {
        const struct node *child = node_at(radix, ref);

        count++;
        leases += child->leases;
        is_hint_there |= node->hint == ref;
        if (child->parent != ref_of(radix, node))
            return "a child names another parent";
        if (child->first_idx != node->first_idx + node->cut)
            return "a child does not begin where its parent ends";
        if (node->children_count > 1 &&
            (!(child->flags & NODE_HASHED) || !bucket_has(radix, child)))
            return "one of several children is not in the buckets";
        if ((child->flags & NODE_HASHED) &&
            child->hash != first_block_hash(radix, node_tokens(radix, child),
                                            ns_of(radix, child)->block_tokens,
                                            node_extra(radix, child)))
            return "a child's hash is not that of its first block";
    }
    if (count != node->children_count)
        return "children_count is wrong";
    if (!is_hint_there || (count > 0) != (node->hint != 0))
        return "the hint is not a child";
    if (!(node->flags & NODE_ROOT) && leases != node->leases)
        return "leases below do not add up";
    return NULL;
}

static const char *check_place(const struct kvt_radix *radix, const struct node *node,
                               uint32_t component, uint32_t bit)
{
    const struct ns *ns = ns_of(radix, node);
    const struct place *place = place_find(radix, node, component, bit);
    const uint8_t *masks = node_masks(radix, node, component);
    const bool is_full = ns->full_mask >> component & 1;
    uint32_t below = 0, count;

    count = (uint32_t)__builtin_popcountll(masks_with(masks, node->cut, (uint8_t)(1u << bit)));
    for (uint32_t ref = node->first_child; ref != 0; ref = node_at(radix, ref)->sib_next)
        below += place_find(radix, node_at(radix, ref), component, bit) != NULL;
    if (!(radix->mask_evictable >> bit & 1) || (count == 0 && below == 0))
        return place == NULL ? NULL : "a place that should not exist";
    if (place == NULL || place->count != count || place->below != below ||
        place->node != ref_of(radix, node))
        return "counts of a place are wrong";
    if (!!(place->flags & PLACE_LISTED) !=
        (count > 0 && !(is_full && below > 0) && !(place->flags & PLACE_PARKED)))
        return "a place is on a recency list and should not be, or the reverse";
    if ((place->flags & PLACE_LISTED) && is_full && !(node->flags & NODE_FRONTIER))
        return "a listed full place would not be touched";
    if ((place->flags & PLACE_PARKED) && !(node->flags & NODE_PARKED))
        return "a parked place would not be unparked";
    return NULL;
}

static const char *check_alive(const struct kvt_radix *radix, const struct node *node)
{
    const struct node *parent = node_at(radix, node->parent);
    const uint64_t occupied = node_occupied(radix, node);
    const struct ns *ns = ns_of(radix, node);

    if (node->cut == 0 || node->cut > node->count || node->count > node->cap)
        return "a live node is empty or larger than its memory";
    if (node->children_count == 0 && !(occupied >> (node->cut - 1) & 1) &&
        node_leased_blocks(radix, node) < node->cut)
        return "a dead block was kept";
    if (!radix->is_merge_skipped && !(parent->flags & (NODE_ROOT | NODE_REAP)) &&
        parent->children_count == 1 && !(node->flags & NODE_REAP) &&
        (uint32_t)parent->count + node->count <= ns->run_blocks_max)
        return "two nodes should be one";
    return NULL;
}

static const char *check_node(const struct kvt_radix *radix, const struct node *node,
                              struct recount *recount)
{
    const struct ns *ns = ns_of(radix, node);
    const char *why = NULL;

    if (node->flags & NODE_ROOT) {
        recount->roots++;
        if (node->first_child == 0)
            return "a root without blocks";
        if (root_find(radix, node->ns_idx, ref_ptr(radix, node->data), node->key_bytes) != node)
            return "a root is not found by its key";
        return check_children(radix, node);
    }
    recount->nodes++;
    why = check_alive(radix, node);
    if (why == NULL)
        why = check_blocks(radix, node, recount);
    if (why == NULL)
        why = check_summary(radix, node);
    if (why == NULL)
        why = check_children(radix, node);
    for (uint32_t c = 0; c < ns->components_count && why == NULL; c++) {
        for (uint32_t bit = 0; bit < KVT_RADIX_BITS && why == NULL; bit++)
            why = check_place(radix, node, c, bit);
    }
    return why;
}

/* Next in pre-order below @top, dead children left out. */
static const struct node *walk_next(const struct kvt_radix *radix, const struct node *top,
                                    const struct node *node)
{
    uint32_t next = node->first_child;

    while (next == 0) {
        if (node == top)
            return NULL;
        next = node->sib_next;
        if (next == 0)
            node = node_at(radix, node->parent);
    }
    return node_at(radix, next);
}

static const char *check_live(const struct kvt_radix *radix, const struct ns *ns,
                              struct recount *recount)
{
    for (uint32_t ref = ns->roots_head; ref != 0; ref = node_at(radix, ref)->sib_next) {
        const struct node *root = node_at(radix, ref), *node = root;

        while (node != NULL) {
            const char *why = check_node(radix, node, recount);

            if (why != NULL)
                return why;
            node = walk_next(radix, root, node);
        }
    }
    return NULL;
}

/* Counts what is detached in one namespace; each cut node's dead children are tops of their own. */
static const char *count_subtree(const struct kvt_radix *radix, const struct node *top,
                                 struct recount *recount)
{
    for (const struct node *node = top; node != NULL; node = walk_next(radix, top, node)) {
        const char *why;

        if (node->flags & NODE_ROOT)
            continue;
        recount->nodes++;
        why = check_blocks(radix, node, recount);
        if (why != NULL)
            return why;
    }
    return NULL;
}

static const char *count_detached(const struct kvt_radix *radix, uint32_t ns_idx,
                                  struct recount *recount)
{
    const char *why = NULL;

    for (uint32_t ref = radix->reap_head; ref != 0 && why == NULL;
         ref = node_at(radix, ref)->reap_next) {
        const struct node *node = node_at(radix, ref);

        if (node->ns_idx != ns_idx)
            continue;
        if (node->flags & NODE_DETACHED)
            why = count_subtree(radix, node, recount);
        for (uint32_t child = node->dead_child; child != 0 && why == NULL;
             child = node_at(radix, child)->sib_next)
            why = count_subtree(radix, node_at(radix, child), recount);
    }
    return why;
}

static const char *check_recency(const struct kvt_radix *radix, const struct ns *ns)
{
    for (uint32_t c = 0; c < ns->components_count; c++) {
        for (uint32_t bit = 0; bit < KVT_RADIX_BITS; bit++) {
            uint32_t prev = 0, ref = ns->recency[c][bit].oldest;

            for (; ref != 0; prev = ref, ref = place_at(radix, ref)->next) {
                const struct place *place = place_at(radix, ref);

                if (place->prev != prev || place->component != c || place->bit != bit ||
                    !(place->flags & PLACE_LISTED))
                    return "a recency list is broken";
            }
            if (ns->recency[c][bit].newest != prev)
                return "a recency list does not end at its newest";
        }
    }
    return NULL;
}

bool kvt_radix_check(const struct kvt_radix *radix, const char **ret_why)
{
    struct recount total = {0};
    const char *why = NULL;

    for (uint32_t i = 0; i < radix->namespaces_max && why == NULL; i++) {
        const struct ns *ns = &radix->namespaces[i];
        struct recount recount = {0};

        if (!ns->is_open && !ns->is_closing)
            continue;
        why = check_live(radix, ns, &recount);
        if (why == NULL)
            why = count_detached(radix, i, &recount);
        if (why == NULL && (recount.nodes != ns->nodes || recount.blocks != ns->blocks ||
                            recount.roots != ns->roots))
            why = "counts of a namespace are wrong";
        if (why == NULL && memcmp(recount.cells_at, ns->cells_at, sizeof(ns->cells_at)) != 0)
            why = "counts of cells are wrong";
        if (why == NULL)
            why = check_recency(radix, ns);
        total.nodes += recount.nodes;
        total.blocks += recount.blocks;
        total.leases += recount.leases;
        total.roots += recount.roots;
    }
    if (why == NULL && (total.nodes != radix->nodes || total.blocks != radix->blocks ||
                        total.leases != radix->leases || total.roots != radix->roots))
        why = "counts of the tree are wrong";
    if (why != NULL)
        *ret_why = why;
    return why == NULL;
}
