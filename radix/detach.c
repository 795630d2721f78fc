/* Removal in O(1): a part is cut off and put on the reaper's list; reaping takes it apart.
 *
 *   a whole subtree (its top has no parent and NODE_DETACHED), or
 *   the tail of a node: blocks [cut, count) and the children that hung behind them (dead_child);
 *   the node itself lives on with `cut` blocks and may get new children at that place.
 *
 * Whoever sits deeper in a detached part is not told: that a node is detached shows when walking
 * up from it, which is done only while there is something on the list. Records of places below
 * stay on the recency lists until they are met there or reaped. The path above is told at once:
 * it loses the copies below and the leases that ended there. Engine thread only. */
#include "radix/internal.h"

static void reap_push(struct kvt_radix *radix, struct node *node)
{
    const uint32_t ref = ref_of(radix, node);

    if (node->flags & NODE_REAP)
        return;
    node->flags |= NODE_REAP;
    node->reap_next = 0;
    node->reap_prev = radix->reap_tail;
    if (radix->reap_tail != 0)
        node_at(radix, radix->reap_tail)->reap_next = ref;
    else
        radix->reap_head = ref;
    radix->reap_tail = ref;
}

static void reap_remove(struct kvt_radix *radix, struct node *node)
{
    if (!(node->flags & NODE_REAP))
        return;
    node->flags &= (uint8_t)~NODE_REAP;
    if (node->reap_prev != 0)
        node_at(radix, node->reap_prev)->reap_next = node->reap_next;
    else
        radix->reap_head = node->reap_next;
    if (node->reap_next != 0)
        node_at(radix, node->reap_next)->reap_prev = node->reap_prev;
    else
        radix->reap_tail = node->reap_prev;
    node->reap_next = node->reap_prev = 0;
}

static void leases_leave(struct kvt_radix *radix, struct node *node, uint32_t leases)
{
    for (; leases > 0 && !(node->flags & NODE_ROOT); node = node_at(radix, node->parent)) {
        KVT_ASSERT(node->leases >= leases);
        node->leases -= leases;
        node_unpark(radix, node);
    }
}

static void detach_node(struct kvt_radix *radix, struct node *node)
{
    struct node *parent = node_at(radix, node->parent);

    leases_leave(radix, parent, node->leases);
    for (uint32_t ref = node->places; ref != 0; ref = place_at(radix, ref)->sibling) {
        const struct place *place = place_at(radix, ref);

        place_below_sub(radix, node, place->component, place->bit, 0);
    }
    node_unlink(radix, node);
    hole_unlist(radix, node);
    node->flags |= NODE_DETACHED;
    reap_push(radix, node);
    node_trim(radix, parent);
}

/* The live children go behind the dead part. */
static void children_die(struct kvt_radix *radix, struct node *node)
{
    if (node->first_child != 0 && node->dead_child != 0) {
        struct node *last = node_at(radix, node->first_child);

        while (last->sib_next != 0)
            last = node_at(radix, last->sib_next);
        last->sib_next = node->dead_child;
        node_at(radix, node->dead_child)->sib_prev = ref_of(radix, last);
    }
    if (node->first_child != 0)
        node->dead_child = node->first_child;
    node->first_child = node->hint = 0;
    node->children_count = 0;
}

static void places_cut(struct kvt_radix *radix, struct node *node, uint32_t at)
{
    uint32_t ref = node->places;

    while (ref != 0) {
        struct place *place = place_at(radix, ref);
        const uint8_t *masks = node_masks(radix, node, place->component);
        const uint32_t c = place->component, bit = place->bit, next = place->sibling;
        const uint32_t keep =
            (uint32_t)__builtin_popcountll(masks_with(masks, at, (uint8_t)(1u << bit)));
        const uint32_t gone = place->count - keep;

        if (keep == 0) {
            place->count = 1; /* so that the last one leaves through the common door */
            place->below = 0;
            place_sub(radix, node, c, bit, 1);
        } else {
            place->below = 0;
            place->count = (uint8_t)(place->count - gone);
            place_relist(radix, place);
        }
        ref = next;
    }
}

static void detach_tail(struct kvt_radix *radix, struct node *node, uint32_t at)
{
    const uint32_t *ids = node_ids(radix, node);
    uint32_t own = 0, leave;

    for (uint32_t pos = 0; pos < at; pos++)
        own += block_at(radix, ids[pos])->leases;
    leave = node->leases - own;
    leases_leave(radix, node_at(radix, node->parent), leave);
    node->leases = node->own_leases = own;
    places_cut(radix, node, at);
    children_die(radix, node);
    node->cut = (uint8_t)at;
    node_summarise(radix, node);
    hole_refresh(radix, node);
    node_unpark(radix, node);
    reap_push(radix, node);
    node_trim(radix, node);
}

int kvt_radix_detach_block(struct kvt_radix *radix, struct kvt_radix_block block)
{
    uint32_t pos;
    struct node *node = block_node_live(radix, block, &pos);

    KVT_ASSERT(radix->magic == RADIX_MAGIC);
    if (node == NULL)
        return KVT_RADIX_E_STALE;
    if (pos == 0)
        detach_node(radix, node);
    else
        detach_tail(radix, node, pos);
    return 0;
}

static void detach_root_node(struct kvt_radix *radix, struct node *root)
{
    root_unlink(radix, root);
    ns_of(radix, root)->roots_detached++;
    root->flags |= NODE_DETACHED;
    reap_push(radix, root);
}

void kvt_radix_detach_root(struct kvt_radix *radix, struct kvt_radix_ns ns, const void *root_key,
                           uint32_t root_key_bytes)
{
    struct node *root;

    KVT_DEBUG_ASSERT(!radix->is_in_hook);
    KVT_ASSERT(ns.idx < radix->namespaces_max);
    root = root_find(radix, ns.idx, root_key, root_key_bytes);
    if (root != NULL)
        detach_root_node(radix, root);
}

void kvt_radix_detach_ns(struct kvt_radix *radix, struct kvt_radix_ns ns)
{
    KVT_DEBUG_ASSERT(!radix->is_in_hook);
    KVT_ASSERT(ns.idx < radix->namespaces_max);
    while (radix->namespaces[ns.idx].roots_head != 0)
        detach_root_node(radix, node_at(radix, radix->namespaces[ns.idx].roots_head));
}

static void ns_finish(struct ns *ns)
{
    if (ns->is_closing && ns->nodes == 0 && ns->roots_detached == 0)
        *ns = (struct ns){0};
}

void kvt_radix_ns_close(struct kvt_radix *radix, struct kvt_radix_ns ns)
{
    KVT_ASSERT(ns.idx < radix->namespaces_max && radix->namespaces[ns.idx].is_open);
    kvt_radix_detach_ns(radix, ns);
    radix->namespaces[ns.idx].is_open = false;
    radix->namespaces[ns.idx].is_closing = true;
    ns_finish(&radix->namespaces[ns.idx]);
}

/* ---- reaping --------------------------------------------------------------------------------- */

#define REAP_NODES_MIN 64u

/* Takes cells from the end of the node down to block @from, and the blocks with them. True: all
 * taken. */
static bool node_reap(struct kvt_radix *radix, struct node *node, uint32_t from, uint32_t max,
                      struct kvt_radix_victim *ret_cells, uint32_t *inout_count)
{
    struct ns *ns = ns_of(radix, node);

    while (node->count > from) {
        const uint32_t pos = node->count - 1u;

        for (uint32_t c = 0; c < ns->components_count; c++) {
            uint8_t *mask = &node_masks(radix, node, c)[pos];
            struct kvt_radix_victim *cell = &ret_cells[*inout_count];

            if (*mask == 0)
                continue;
            if (*inout_count == max)
                return false;
            cell->block = node_block(radix, node, pos);
            cell->component = c;
            cell->handle = node_handles(radix, node, c)[pos];
            cell->mask = *mask;
            ++*inout_count;
            for (uint8_t left = *mask; left != 0; left &= (uint8_t)(left - 1))
                ns->cells_at[c][__builtin_ctz(left)]--;
            *mask = 0;
            node_handles(radix, node, c)[pos] = KVT_RADIX_HANDLE_NONE;
        }
        if (node_ids(radix, node)[pos] != 0)
            radix->leases -= block_at(radix, node_ids(radix, node)[pos])->leases;
        node_truncate(radix, node, pos);
    }
    return true;
}

/* The reaper is done with @node: where it goes on. */
static uint32_t reap_finish(struct kvt_radix *radix, struct node *node, bool is_top)
{
    struct ns *ns = ns_of(radix, node);
    uint32_t parent = is_top ? 0 : node->parent;

    reap_remove(radix, node);
    if (is_top && !(node->flags & NODE_DETACHED)) { /* a tail: the rest of the node lives on */
        if (!node_is_detached(radix, node))
            node_trim(radix, node);
        return 0;
    }
    if (node->flags & NODE_ROOT) {
        root_free(radix, node);
        ns->roots_detached--;
    } else {
        if (!is_top)
            node_unlink(radix, node);
        node->children_count = 0;
        node_free(radix, node);
    }
    ns_finish(ns);
    return parent;
}

/* Down to a node with nothing below it, as far as the budget goes. */
static struct node *reap_descend(struct kvt_radix *radix, struct node *top, struct node *node,
                                 uint64_t *inout_nodes)
{
    while (*inout_nodes > 0) {
        uint32_t child = node->dead_child;

        if (child == 0 && (node != top || (node->flags & NODE_DETACHED)))
            child = node->first_child;
        if (child == 0)
            break;
        node = node_at(radix, child);
        --*inout_nodes;
    }
    return node;
}

uint32_t kvt_radix_reap(struct kvt_radix *radix, uint32_t max, struct kvt_radix_victim *ret_cells)
{
    uint64_t nodes = (uint64_t)max + REAP_NODES_MIN;
    uint32_t count = 0;

    KVT_DEBUG_ASSERT(!radix->is_in_hook);
    KVT_ASSERT(radix->magic == RADIX_MAGIC);
    while (radix->reap_head != 0 && max > 0) {
        struct node *top = node_at(radix, radix->reap_head), *node = top;
        bool is_all;

        if (radix->reap_node != 0)
            node = node_at(radix, radix->reap_node);
        node = reap_descend(radix, top, node, &nodes);
        radix->reap_node = ref_of(radix, node);
        if (nodes == 0)
            return count; /* nowhere but at its bottom may a node be taken apart */
        nodes--;
        is_all = node != top || (node->flags & NODE_DETACHED);
        if (!node_reap(radix, node, is_all ? 0 : node->cut, max, ret_cells, &count))
            return count;
        radix->reap_node = reap_finish(radix, node, node == top);
    }
    return count;
}
