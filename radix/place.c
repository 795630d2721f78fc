/* Places: which nodes have blocks of a component under a bit, and in which order they should go.
 *
 * A full block may leave a place only when nothing below it is there, so of the full places only
 * those with no such child (the frontier) are on a recency list; they are moved when their path is
 * used. A window or state place is listed while its node has such blocks, and moves when a
 * boundary that needs it is used. Lists run from oldest to newest; `next` is towards the newest.
 *
 * A place that lost its last child there takes over the child's neighbourhood in the list: the
 * time of its last use cannot be older. Steps of such a search are bounded, so order may be
 * slightly off after removals out of order; that costs a little hit rate, never correctness.
 * Memory for places is reserved by node_new: nothing here can fail. Engine thread only. */
#include "radix/internal.h"

#define PLACE_SEARCH_STEPS 64u

static bool place_is_full(const struct kvt_radix *radix, const struct place *place)
{
    return ns_of(radix, node_at(radix, place->node))->full_mask >> place->component & 1;
}

static struct recency *place_list(const struct kvt_radix *radix, const struct place *place)
{
    struct ns *ns = ns_of(radix, node_at(radix, place->node));

    return &ns->recency[place->component][place->bit];
}

struct place *place_find(const struct kvt_radix *radix, const struct node *node, uint32_t component,
                         uint32_t bit)
{
    uint32_t ref = node->places;

    while (ref != 0) {
        struct place *place = place_at(radix, ref);

        if (place->component == component && place->bit == bit)
            return place;
        ref = place->sibling;
    }
    return NULL;
}

/* ---- lists ----------------------------------------------------------------------------------- */

/* Before (on the older side of) @newer; 0: as the newest. */
static void list_insert(struct kvt_radix *radix, struct place *place, uint32_t newer)
{
    struct recency *list = place_list(radix, place);
    const uint32_t ref = ref_of(radix, place);

    KVT_ASSERT(!(place->flags & PLACE_LISTED));
    place->next = newer;
    place->prev = newer == 0 ? list->newest : place_at(radix, newer)->prev;
    if (place->prev != 0)
        place_at(radix, place->prev)->next = ref;
    else
        list->oldest = ref;
    if (newer != 0)
        place_at(radix, newer)->prev = ref;
    else
        list->newest = ref;
    place->flags |= PLACE_LISTED;
}

void place_unlist(struct kvt_radix *radix, struct place *place)
{
    struct recency *list;

    if (!(place->flags & PLACE_LISTED))
        return;
    list = place_list(radix, place);
    if (place->prev != 0)
        place_at(radix, place->prev)->next = place->next;
    else
        list->oldest = place->next;
    if (place->next != 0)
        place_at(radix, place->next)->prev = place->prev;
    else
        list->newest = place->prev;
    place->next = place->prev = 0;
    place->flags &= (uint8_t)~PLACE_LISTED;
}

/* Where its stamp belongs: upwards from @newer, or downwards from the newest. */
static void list_by_stamp(struct kvt_radix *radix, struct place *place, uint32_t newer)
{
    struct recency *list = place_list(radix, place);

    if (newer != 0) {
        for (uint32_t i = 0; i < PLACE_SEARCH_STEPS && newer != 0; i++) {
            if (place_at(radix, newer)->stamp >= place->stamp)
                break;
            newer = place_at(radix, newer)->next;
        }
    } else {
        uint32_t older = list->newest;

        for (uint32_t i = 0; i < PLACE_SEARCH_STEPS && older != 0; i++) {
            if (place_at(radix, older)->stamp <= place->stamp)
                break;
            newer = older;
            older = place_at(radix, older)->prev;
        }
    }
    list_insert(radix, place, newer);
}

/* Lists or unlists as the counts say. */
static void place_settle(struct kvt_radix *radix, struct place *place, uint32_t newer)
{
    const bool is_full = place_is_full(radix, place);
    const bool is_wanted =
        place->count > 0 && !(is_full && place->below > 0) && !(place->flags & PLACE_PARKED);
    struct node *node = node_at(radix, place->node);

    if (is_wanted && !(place->flags & PLACE_LISTED)) {
        if (is_full) {
            place->stamp = node->stamp;
            node->flags |= NODE_FRONTIER;
        }
        list_by_stamp(radix, place, newer);
    } else if (!is_wanted) {
        place_unlist(radix, place);
    }
}

void place_relist(struct kvt_radix *radix, struct place *place)
{
    place_settle(radix, place, 0);
}

void place_to_newest(struct kvt_radix *radix, struct place *place)
{
    place->stamp = radix->clock;
    if ((place->flags & PLACE_LISTED) && place->next != 0) {
        place_unlist(radix, place);
        list_insert(radix, place, 0);
    }
}

void place_to_oldest(struct kvt_radix *radix, struct place *place)
{
    place->stamp = 0;
    if ((place->flags & PLACE_LISTED) && place->prev != 0) {
        uint32_t oldest = place_list(radix, place)->oldest;

        place_unlist(radix, place);
        list_insert(radix, place, oldest);
    }
}

void place_park(struct kvt_radix *radix, struct place *place)
{
    place_unlist(radix, place);
    place->flags |= PLACE_PARKED;
    node_at(radix, place->node)->flags |= NODE_PARKED;
}

void node_unpark(struct kvt_radix *radix, struct node *node)
{
    if (!(node->flags & NODE_PARKED))
        return;
    node->flags &= (uint8_t)~NODE_PARKED;
    for (uint32_t ref = node->places; ref != 0; ref = place_at(radix, ref)->sibling) {
        struct place *place = place_at(radix, ref);

        if (place->flags & PLACE_PARKED) {
            place->flags &= (uint8_t)~PLACE_PARKED;
            place_settle(radix, place, 0);
        }
    }
}

/* ---- counts ---------------------------------------------------------------------------------- */

static struct place *place_new(struct kvt_radix *radix, struct node *node, uint32_t component,
                               uint32_t bit)
{
    struct place *place = pool_take(&radix->pool, CLASS_PLACE);

    KVT_ASSERT(place != NULL); /* reserved with the node */
    *place = (struct place){.node = ref_of(radix, node),
                            .component = (uint8_t)component,
                            .bit = (uint8_t)bit,
                            .stamp = radix->clock,
                            .sibling = node->places};
    node->places = ref_of(radix, place);
    return place;
}

static void place_free(struct kvt_radix *radix, struct place *place)
{
    struct node *node = node_at(radix, place->node);
    uint32_t *link = &node->places;
    const uint32_t ref = ref_of(radix, place);

    place_unlist(radix, place);
    while (*link != ref)
        link = &place_at(radix, *link)->sibling;
    *link = place->sibling;
    pool_give(&radix->pool, place);
}

void places_free(struct kvt_radix *radix, struct node *node)
{
    while (node->places != 0)
        place_free(radix, place_at(radix, node->places));
}

static void place_below_add(struct kvt_radix *radix, struct node *node, uint32_t component,
                            uint32_t bit)
{
    while (!(node->flags & NODE_ROOT)) {
        struct place *place = place_find(radix, node, component, bit);

        if (place != NULL) {
            if (place->below++ == 0)
                place_settle(radix, place, 0);
            return;
        }
        place = place_new(radix, node, component, bit);
        place->below = 1;
        node = node_at(radix, node->parent);
    }
}

void place_add(struct kvt_radix *radix, struct node *node, uint32_t component, uint32_t bit,
               uint32_t count)
{
    struct place *place;

    if (!(radix->mask_evictable >> bit & 1))
        return;
    place = place_find(radix, node, component, bit);
    if (place == NULL) {
        place = place_new(radix, node, component, bit);
        place_below_add(radix, node_at(radix, node->parent), component, bit);
    }
    place->count = (uint8_t)(place->count + count);
    if (place->flags & PLACE_LISTED) {
        if (!place_is_full(radix, place))
            place_to_newest(radix, place);
        return;
    }
    place->flags &= (uint8_t)~PLACE_PARKED;
    place->stamp = radix->clock;
    place_settle(radix, place, 0);
}

void place_below_sub(struct kvt_radix *radix, struct node *child, uint32_t component, uint32_t bit,
                     uint32_t newer)
{
    uint64_t stamp = child->stamp;
    struct node *node = node_at(radix, child->parent);

    while (!(node->flags & NODE_ROOT)) {
        struct place *place = place_find(radix, node, component, bit);

        node->stamp = stamp = KVT_MAX(node->stamp, stamp);
        KVT_ASSERT(place != NULL && place->below > 0);
        if (--place->below > 0)
            return;
        if (place->count > 0) {
            place->flags &= (uint8_t)~PLACE_PARKED; /* why it was may be long past */
            place_settle(radix, place, newer);
            return;
        }
        if (place->flags & PLACE_LISTED)
            newer = place->next;
        place_free(radix, place);
        node = node_at(radix, node->parent);
    }
}

void place_sub(struct kvt_radix *radix, struct node *node, uint32_t component, uint32_t bit,
               uint32_t count)
{
    struct place *place;
    uint32_t newer;

    if (count == 0 || !(radix->mask_evictable >> bit & 1))
        return;
    place = place_find(radix, node, component, bit);
    KVT_ASSERT(place != NULL && place->count >= count);
    place->count = (uint8_t)(place->count - count);
    if (place->count > 0)
        return;
    newer = place->next;
    if (place->below > 0) {
        place_unlist(radix, place);
        return;
    }
    place_free(radix, place);
    place_below_sub(radix, node, component, bit, newer);
}

/* ---- split and merge ------------------------------------------------------------------------- */

static uint32_t cells_in(const struct kvt_radix *radix, const struct node *node, uint32_t component,
                         uint32_t bit)
{
    return (uint32_t)__builtin_popcountll(
        masks_with(node_masks(radix, node, component), node->cut, (uint8_t)(1u << bit)));
}

void places_split(struct kvt_radix *radix, struct node *upper, struct node *lower)
{
    uint32_t ref = lower->places;

    lower->places = 0;
    upper->flags |= lower->flags & (NODE_FRONTIER | NODE_PARKED);
    while (ref != 0) {
        struct place *place = place_at(radix, ref), *above;
        uint32_t upper_count = cells_in(radix, upper, place->component, place->bit);
        uint32_t next = place->sibling;

        KVT_ASSERT(upper_count <= place->count);
        if (place->count == upper_count && place->below == 0) { /* all of it goes up */
            place->node = ref_of(radix, upper);
            place->sibling = upper->places;
            upper->places = ref;
        } else {
            place->sibling = lower->places;
            lower->places = ref;
            place->count = (uint8_t)(place->count - upper_count);
            above = place_new(radix, upper, place->component, place->bit);
            above->below = 1;
            above->count = (uint8_t)upper_count;
            above->stamp = place->stamp;
            above->flags = place->flags & (uint8_t)~PLACE_LISTED;
            place_settle(radix, above, place->flags & PLACE_LISTED ? ref : 0);
            place_settle(radix, place, 0);
        }
        ref = next;
    }
}

void places_merge(struct kvt_radix *radix, struct node *parent, struct node *child)
{
    uint32_t ref = parent->places;

    child->flags |= parent->flags & (NODE_FRONTIER | NODE_PARKED);
    node_unpark(radix, child);
    parent->places = 0;
    while (ref != 0) {
        struct place *above = place_at(radix, ref);
        struct place *place = place_find(radix, child, above->component, above->bit);
        uint32_t next = above->sibling;

        if (place == NULL) {
            KVT_ASSERT(above->below == 0);
            above->node = ref_of(radix, child);
            above->sibling = child->places;
            child->places = ref;
            above->flags &= (uint8_t)~PLACE_PARKED;
            place_settle(radix, above, 0);
        } else {
            uint32_t newer = above->flags & PLACE_LISTED ? above->next : 0;

            place->count = (uint8_t)(place->count + above->count);
            place_unlist(radix, above);
            if (newer == ref_of(radix, place))
                newer = 0;
            if (!(place->flags & PLACE_LISTED))
                place->stamp = above->stamp;
            place_settle(radix, place, newer);
            pool_give(&radix->pool, above);
        }
        ref = next;
    }
}

/* ---- use ------------------------------------------------------------------------------------- */

void node_touch_frontier(struct kvt_radix *radix, struct node *node)
{
    bool is_frontier = false;

    for (uint32_t ref = node->places; ref != 0; ref = place_at(radix, ref)->sibling) {
        struct place *place = place_at(radix, ref);

        if ((place->flags & PLACE_LISTED) && place_is_full(radix, place)) {
            place_to_newest(radix, place);
            is_frontier = true;
        }
    }
    if (!is_frontier)
        node->flags &= (uint8_t)~NODE_FRONTIER;
}

static void touch_component(struct kvt_radix *radix, struct node *node, uint32_t component)
{
    if (node->any[component] == 0)
        return;
    for (uint32_t ref = node->places; ref != 0; ref = place_at(radix, ref)->sibling) {
        struct place *place = place_at(radix, ref);

        if (place->component == component)
            place_to_newest(radix, place);
    }
}

void boundary_touch(struct kvt_radix *radix, struct node *node, uint32_t pos)
{
    const struct ns *ns = ns_of(radix, node);
    const uint64_t end_idx = node->first_idx + pos;

    if (pos == 0)
        return;
    for (uint32_t c = 0; c < ns->components_count; c++) {
        uint64_t first_idx = end_idx - 1, window = ns->windows[c];
        struct node *at = node;

        if (ns->kinds[c] == KVT_COMPONENT_FULL)
            continue;
        if (ns->kinds[c] == KVT_COMPONENT_SLIDING_WINDOW)
            first_idx = window >= end_idx * ns->block_tokens
                            ? 0
                            : (end_idx * ns->block_tokens - window) / ns->block_tokens;
        while (!(at->flags & NODE_ROOT) && at->first_idx + at->count > first_idx) {
            touch_component(radix, at, c);
            at = node_at(radix, at->parent);
        }
    }
}

void path_touch(struct kvt_radix *radix, struct node *node, uint64_t first_idx)
{
    const uint64_t stamp = radix->clock;

    while (!(node->flags & NODE_ROOT) && (uint64_t)node->first_idx + node->cut > first_idx) {
        node->stamp = stamp;
        if (node->flags & NODE_FRONTIER)
            node_touch_frontier(radix, node);
        node = node_at(radix, node->parent);
    }
}

/* ---- holes ----------------------------------------------------------------------------------- */

void hole_unlist(struct kvt_radix *radix, struct node *node)
{
    struct ns *ns = ns_of(radix, node);

    if (!(node->flags & NODE_HOLE))
        return;
    if (node->hole_prev != 0)
        node_at(radix, node->hole_prev)->hole_next = node->hole_next;
    else
        ns->holes_head = node->hole_next;
    if (node->hole_next != 0)
        node_at(radix, node->hole_next)->hole_prev = node->hole_prev;
    else
        ns->holes_tail = node->hole_prev;
    node->hole_next = node->hole_prev = 0;
    node->flags &= (uint8_t)~NODE_HOLE;
}

void hole_refresh(struct kvt_radix *radix, struct node *node)
{
    struct ns *ns = ns_of(radix, node);
    const uint32_t ref = ref_of(radix, node);

    if (ns->full_mask == 0 || node_holes(radix, node) == 0) {
        hole_unlist(radix, node);
        return;
    }
    if (node->flags & NODE_HOLE)
        return;
    node->hole_next = ns->holes_head;
    if (ns->holes_head != 0)
        node_at(radix, ns->holes_head)->hole_prev = ref;
    else
        ns->holes_tail = ref;
    ns->holes_head = ref;
    node->flags |= NODE_HOLE;
}
