/* Who should go first.
 *
 * Class 1 is what nothing can use: cells at or below a hole in a full component, found from the
 * namespace's list of nodes with holes (the newest hole first, so that a long dead path is worked
 * off from its top without walking what is already empty); and windows that lost a block, which
 * were moved to the old end of their list with stamp 0 when it went. The search for class 1 is
 * bounded; what it misses comes round by its age. Class 2 takes the old ends of the recency lists,
 * oldest first. A place with nothing to give (leased, or being filled) is parked: off the list
 * until a lease on it ends or a mask changes, so that it is not met again and again.
 * Engine thread only. */
#include "radix/internal.h"

#define ORPHAN_NODES_MAX 8u
#define SKIPS_MAX 4096u /* places that give nothing, in one call: each leaves its list for that */

struct pick {
    struct kvt_radix *radix;
    const struct kvt_radix_victims *which;
    struct kvt_radix_victim *ret;
    uint32_t max, count;
};

static bool pick_component(const struct pick *pick, uint32_t component)
{
    return pick->which->component == UINT32_MAX || pick->which->component == component;
}

static void pick_cell(struct pick *pick, const struct node *node, uint32_t pos, uint32_t component)
{
    struct kvt_radix_victim *victim = &pick->ret[pick->count++];

    victim->block = node_block(pick->radix, node, pos);
    victim->component = component;
    victim->handle = node_handles(pick->radix, node, component)[pos];
    victim->mask = node_masks(pick->radix, node, component)[pos];
}

/* ---- class 1: below holes -------------------------------------------------------------------- */

static bool node_has_wanted(const struct pick *pick, const struct node *node)
{
    for (uint32_t ref = node->places; ref != 0; ref = place_at(pick->radix, ref)->sibling) {
        const struct place *place = place_at(pick->radix, ref);

        if (place->bit == pick->which->bit && pick_component(pick, place->component))
            return true;
    }
    return false;
}

static void pick_unreachable(struct pick *pick, struct node *node, uint32_t from)
{
    const uint8_t bit = (uint8_t)(1u << pick->which->bit);
    const uint32_t leased = node_leased_blocks(pick->radix, node);

    if (node->mark == pick->radix->mark)
        return;
    for (uint32_t ref = node->places; ref != 0; ref = place_at(pick->radix, ref)->sibling) {
        const struct place *place = place_at(pick->radix, ref);
        const uint8_t *masks = node_masks(pick->radix, node, place->component);

        if (place->bit != pick->which->bit || place->count == 0 ||
            (place->flags & PLACE_DEFERRED) || !pick_component(pick, place->component))
            continue;
        for (uint32_t pos = KVT_MAX(from, leased); pos < node->cut; pos++) {
            if (pick->count == pick->max)
                return;
            if (!(masks[pos] & bit) || (masks[pos] >> KVT_RADIX_BIT_HOLD & 1))
                continue;
            pick_cell(pick, node, pos, place->component);
            node->mark = pick->radix->mark; /* not a second time in this answer */
        }
    }
}

static void pick_below(struct pick *pick, struct node *top, uint32_t *inout_budget)
{
    struct node *node = top;

    while (pick->count<pick->max && * inout_budget> 0) {
        bool is_wanted = node_has_wanted(pick, node);

        --*inout_budget;
        if (node != top && is_wanted)
            pick_unreachable(pick, node, 0);
        if (is_wanted && node->first_child != 0) {
            node = node_at(pick->radix, node->first_child);
            continue;
        }
        while (node != top && node->sib_next == 0)
            node = node_at(pick->radix, node->parent);
        if (node == top)
            return;
        node = node_at(pick->radix, node->sib_next);
    }
}

static void hole_to_tail(struct kvt_radix *radix, struct ns *ns, struct node *node)
{
    const uint32_t ref = ref_of(radix, node);

    if (ns->holes_tail == ref)
        return;
    hole_unlist(radix, node);
    node->hole_prev = ns->holes_tail;
    if (ns->holes_tail != 0)
        node_at(radix, ns->holes_tail)->hole_next = ref;
    else
        ns->holes_head = ref;
    ns->holes_tail = ref;
    node->flags |= NODE_HOLE;
}

static void pick_holes(struct pick *pick, struct ns *ns)
{
    struct kvt_radix *radix = pick->radix;
    uint32_t budget = 64 + 4 * KVT_MIN(pick->max, 1u << 20), ref = ns->holes_head;
    const uint32_t last = ns->holes_tail;

    while (ref != 0 && pick->count < pick->max && budget > 0) {
        struct node *node = node_at(radix, ref);
        const uint32_t before = pick->count, next = node->hole_next;
        const bool is_last = ref == last;

        budget--;
        if (node_is_detached(radix, node)) {
            hole_unlist(radix, node);
        } else {
            uint32_t from = (uint32_t)__builtin_ctzll(node_holes(radix, node));

            pick_unreachable(pick, node, from);
            pick_below(pick, node, &budget);
            if (pick->count == before)
                hole_to_tail(radix, ns, node);
        }
        if (is_last)
            break;
        ref = next;
    }
}

/* ---- windows that lost a block --------------------------------------------------------------- */

static uint64_t cells_of(const struct kvt_radix *radix, const struct node *node, uint32_t c)
{
    return masks_with(node_masks(radix, node, c), node->cut, UINT8_MAX);
}

/* The node's cells of the component are useless as a whole: they go first. */
static void orphan(struct kvt_radix *radix, struct node *node, uint32_t component)
{
    for (uint32_t ref = node->places; ref != 0; ref = place_at(radix, ref)->sibling) {
        struct place *place = place_at(radix, ref);

        if (place->component == component && place->count > 0)
            place_to_oldest(radix, place);
    }
}

/* Blocks in a row that make a boundary legal, if they do not begin the path. */
static uint64_t window_blocks(const struct ns *ns, uint32_t component)
{
    return kvt_div_up(ns->windows[component], ns->block_tokens);
}

/* Block @pos of the component went: what is left of its run above and below may be too short for
 * any boundary. Only nodes that hold nothing but such rests are moved. */
void window_orphans(struct kvt_radix *radix, struct node *node, uint32_t pos, uint32_t component)
{
    const struct ns *ns = ns_of(radix, node);
    const uint64_t need = window_blocks(ns, component);
    uint64_t cells = cells_of(radix, node, component), run;
    struct node *at = node, *run_nodes[ORPHAN_NODES_MAX];
    uint32_t count = 0;

    /* Upwards: does the run that ends before @pos reach far enough, or the beginning? */
    run = 0;
    for (uint32_t upto = pos; count < ORPHAN_NODES_MAX;) {
        uint64_t there = cells_of(radix, at, component) & bits_below(upto);
        uint64_t missing = ~there & bits_below(upto);
        uint32_t low = missing == 0 ? 0 : 64 - (uint32_t)__builtin_clzll(missing);

        run += upto - low;
        if ((there & bits_below(low)) == 0 && (at != node || (cells >> pos) == 0))
            run_nodes[count++] = at;
        if (missing != 0 || run >= need)
            break;
        at = node_at(radix, at->parent);
        if (at->flags & NODE_ROOT) {
            run = need;
            break;
        }
        upto = at->cut;
    }
    for (uint32_t i = 0; i < count && run < need; i++)
        orphan(radix, run_nodes[i], component);
    /* Downwards along an unbranched path. */
    at = node;
    run = count = 0;
    for (uint32_t from = pos + 1; count < ORPHAN_NODES_MAX;) {
        uint64_t missing = ~cells_of(radix, at, component) & bits_below(at->cut);

        missing &= ~bits_below(from);
        run += (missing == 0 ? at->cut : (uint32_t)__builtin_ctzll(missing)) - from;
        if (missing == 0 && (at != node || (cells & bits_below(pos)) == 0))
            run_nodes[count++] = at;
        if (missing != 0 || run >= need || at->children_count == 0)
            break;
        if (at->children_count > 1) {
            run = need; /* several continuations: leave it to its age */
            break;
        }
        at = node_at(radix, at->first_child);
        from = 0;
    }
    for (uint32_t i = 0; i < count && run < need; i++)
        orphan(radix, run_nodes[i], component);
}

/* ---- class 2: by age ------------------------------------------------------------------------- */

static void pick_place(struct pick *pick, struct place *place)
{
    struct kvt_radix *radix = pick->radix;
    struct node *node = node_at(radix, place->node);
    const uint32_t before = pick->count, leased = node_leased_blocks(radix, node);
    const uint8_t *masks = node_masks(radix, node, place->component);
    const uint8_t bit = (uint8_t)(1u << place->bit);
    const bool is_full = ns_of(radix, node)->full_mask >> place->component & 1;

    place->flags &= (uint8_t)~PLACE_DEFERRED;
    for (uint32_t i = leased; i < node->cut && pick->count < pick->max; i++) {
        uint32_t pos = is_full ? node->cut - 1u - (i - leased) : i;

        if (!(masks[pos] & bit))
            continue;
        if (masks[pos] >> KVT_RADIX_BIT_HOLD & 1) {
            if (is_full)
                break; /* what is above it has a copy below as long as this one stays */
            continue;
        }
        pick_cell(pick, node, pos, place->component);
    }
    if (pick->count == before)
        place_park(radix, place);
}

static uint32_t lists_collect(const struct pick *pick, uint32_t *ret_heads)
{
    const struct kvt_radix *radix = pick->radix;
    uint32_t count = 0;

    for (uint32_t i = 0; i < radix->namespaces_max; i++) {
        const struct ns *ns = &radix->namespaces[i];

        if (!ns->is_open || (pick->which->ns.idx != UINT32_MAX && pick->which->ns.idx != i))
            continue;
        for (uint32_t c = 0; c < ns->components_count; c++) {
            uint32_t oldest = ns->recency[c][pick->which->bit].oldest;

            if (pick_component(pick, c) && oldest != 0)
                ret_heads[count++] = oldest;
        }
    }
    return count;
}

static void pick_old(struct pick *pick)
{
    struct kvt_radix *radix = pick->radix;
    uint32_t heads[KVT_NAMESPACES_MAX * KVT_COMPONENTS_MAX];
    uint32_t count = lists_collect(pick, heads), skips = 0;

    while (count > 0 && pick->count < pick->max && skips < SKIPS_MAX) {
        uint32_t best = 0, before = pick->count;
        struct place *place;
        struct node *node;

        for (uint32_t i = 1; i < count; i++) {
            if (place_at(radix, heads[i])->stamp < place_at(radix, heads[best])->stamp)
                best = i;
        }
        place = place_at(radix, heads[best]);
        node = node_at(radix, place->node);
        heads[best] = place->next;
        if (heads[best] != 0) {
            __builtin_prefetch(place_at(radix, heads[best]));
        } else {
            heads[best] = heads[--count];
        }
        if (node_is_detached(radix, node))
            place_unlist(radix, place);
        else if (node->mark != radix->mark)
            pick_place(pick, place);
        skips += pick->count == before;
    }
}

static uint32_t pick_all(struct pick *pick, uint32_t *ret_class1)
{
    struct kvt_radix *radix = pick->radix;

    KVT_ASSERT(pick->which->bit < KVT_RADIX_BITS);
    KVT_ASSERT(radix->mask_evictable >> pick->which->bit & 1);
    if (++radix->mark == 0)
        radix->mark = 1;
    for (uint32_t i = 0; i < radix->namespaces_max; i++) {
        if (radix->namespaces[i].is_open && radix->namespaces[i].holes_head != 0 &&
            (pick->which->ns.idx == UINT32_MAX || pick->which->ns.idx == i))
            pick_holes(pick, &radix->namespaces[i]);
    }
    *ret_class1 = pick->count;
    pick_old(pick);
    return pick->count;
}

uint32_t kvt_radix_victims(struct kvt_radix *radix, const struct kvt_radix_victims *which,
                           uint32_t max, struct kvt_radix_victim *ret_victims)
{
    struct pick pick = {.radix = radix, .which = which, .ret = ret_victims, .max = max};
    uint32_t class1;

    KVT_DEBUG_ASSERT(!radix->is_in_hook);
    KVT_ASSERT(radix->magic == RADIX_MAGIC);
    return pick_all(&pick, &class1);
}

uint64_t kvt_radix_oldest(struct kvt_radix *radix, const struct kvt_radix_victims *which)
{
    struct kvt_radix_victim victim;
    struct pick pick = {.radix = radix, .which = which, .ret = &victim, .max = 1};
    const struct place *place;
    struct node *node;
    uint32_t class1, pos;

    KVT_DEBUG_ASSERT(!radix->is_in_hook);
    KVT_ASSERT(radix->magic == RADIX_MAGIC);
    if (pick_all(&pick, &class1) == 0)
        return UINT64_MAX;
    if (class1 > 0)
        return 0;
    node = block_node_any(radix, victim.block, &pos);
    KVT_ASSERT(node != NULL);
    place = place_find(radix, node, victim.component, which->bit);
    KVT_ASSERT(place != NULL);
    return place->stamp;
}

void kvt_radix_defer(struct kvt_radix *radix, const struct kvt_radix_victim *victim, uint32_t bit)
{
    uint32_t pos;
    struct node *node = block_node_live(radix, victim->block, &pos);
    struct place *place;

    place = node == NULL ? NULL : place_find(radix, node, victim->component, bit);
    if (place == NULL)
        return;
    place_to_newest(radix, place);
    place->flags |= PLACE_DEFERRED;
}
