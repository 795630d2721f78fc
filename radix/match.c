/* The boundary rule: which boundaries each component accepts, and the greatest that all accept.
 *
 *   blocks  0 1 2 3 4 5 6 7        full:   accepts b when everything before b is there
 *   full    x x x x x x x .        window: when the blocks that its last W tokens touch are there
 *   window  . . x x . x x x        state:  when there is a snapshot at b
 *                 ^     ^
 * Everything is done from the end of the matched path upwards, one step a node: a missing block
 * rules out every boundary whose need contains it, which always are the boundaries from just
 * behind it up to the candidate; so each rejection moves the candidate to the front of that block,
 * and no block is looked at twice by a component. Engine thread only. */
#include "radix/internal.h"

#define NO_BLOCK UINT64_MAX

/* A position on the path: @hi blocks of @node lie before it. */
struct up {
    const struct node *node;
    uint32_t hi;
};

struct scan {              /* one component on its way up */
    struct up up;          /* the boundary it stands at, or how far a window was verified */
    uint64_t verified_idx; /* window: blocks [verified_idx, boundary) are there */
};

struct match {
    const struct kvt_radix *radix;
    const struct ns *ns;
    uint8_t mask_allowed;
    uint64_t end_idx; /* the limit in blocks, at most the end of the path */
    struct up end;
    uint64_t alone[KVT_COMPONENTS_MAX];
    struct scan scans[KVT_COMPONENTS_MAX];
};

static bool up_is_root(const struct up *up)
{
    return up->node->flags & NODE_ROOT;
}

static uint64_t up_idx(const struct up *up)
{
    return (uint64_t)up->node->first_idx + up->hi;
}

static void up_node(const struct kvt_radix *radix, struct up *up)
{
    const struct node *parent = node_at(radix, up->node->parent);

    up->hi = up->node->first_idx - parent->first_idx;
    up->node = parent;
}

/* Moves to the boundary @idx, which is not below @up. */
static void up_to(const struct kvt_radix *radix, struct up *up, uint64_t idx)
{
    KVT_ASSERT(idx <= up_idx(up));
    while (!up_is_root(up) && up->node->first_idx >= idx)
        up_node(radix, up);
    up->hi = (uint32_t)(idx - up->node->first_idx);
}

static uint64_t resident_bits(const struct match *match, const struct up *up, uint32_t component)
{
    const struct node *node = up->node;

    if (node->all[component] & match->mask_allowed)
        return bits_below(up->hi);
    if (!(node->any[component] & match->mask_allowed))
        return 0;
    return masks_with(node_masks(match->radix, node, component), up->hi, match->mask_allowed);
}

static uint32_t highest_bit(uint64_t bits)
{
    return 63 - (uint32_t)__builtin_clzll(bits);
}

/* Counts the resident blocks of [first_idx, @up) by lowest allowed bit. */
static void count_blocks(const struct match *match, struct up up, uint64_t first_idx,
                         uint32_t component, uint64_t blocks_at[KVT_RADIX_BITS])
{
    while (!up_is_root(&up) && up_idx(&up) > first_idx) {
        const struct node *node = up.node;
        uint8_t any = node->any[component] & match->mask_allowed;
        uint32_t low = first_idx > node->first_idx ? (uint32_t)(first_idx - node->first_idx) : 0;
        uint32_t bit = any == 0 ? 0 : (uint32_t)__builtin_ctz(any);

        if (node->all[component] & any & (1u << bit)) {
            blocks_at[bit] += up.hi - low;
        } else {
            uint64_t left = ~bits_below(low);

            for (uint8_t bits = any; bits != 0; bits &= (uint8_t)(bits - 1)) {
                uint64_t with;

                bit = (uint32_t)__builtin_ctz(bits);
                with = left & masks_with(node_masks(match->radix, node, component), up.hi,
                                         (uint8_t)(1u << bit));
                blocks_at[bit] += (uint64_t)__builtin_popcountll(with);
                left &= ~with;
            }
        }
        up_node(match->radix, &up);
    }
}

/* Full: the whole way up, because the highest hole counts. The counts are right for the result. */
static uint64_t full_alone(const struct match *match, uint32_t component)
{
    struct up up = match->end;
    uint64_t ret = match->end_idx;

    while (!up_is_root(&up)) {
        if (!(up.node->all[component] & match->mask_allowed)) {
            uint64_t missing = ~resident_bits(match, &up, component) & bits_below(up.hi);

            if (missing != 0)
                ret = up.node->first_idx + (uint64_t)__builtin_ctzll(missing);
        }
        up_node(match->radix, &up);
    }
    return ret;
}

/* First block that resuming at boundary @idx needs of a window. */
static uint64_t window_first(const struct match *match, uint32_t component, uint64_t idx)
{
    uint64_t tokens = idx * match->ns->block_tokens, window = match->ns->windows[component];

    return window >= tokens ? 0 : (tokens - window) / match->ns->block_tokens;
}

/* The last block of [first_idx, scan) that is missing; the scan moves up as far as it looked. */
static uint64_t window_hole(const struct match *match, uint32_t component, struct scan *scan,
                            uint64_t first_idx)
{
    while (scan->verified_idx > first_idx) {
        uint64_t missing = ~resident_bits(match, &scan->up, component) & bits_below(scan->up.hi);
        uint64_t node_idx = scan->up.node->first_idx;

        if (missing != 0 && node_idx + highest_bit(missing) >= first_idx)
            return node_idx + highest_bit(missing);
        if (first_idx > node_idx) {
            scan->verified_idx = first_idx;
            scan->up.hi = (uint32_t)(first_idx - node_idx);
            break;
        }
        scan->verified_idx = node_idx;
        up_node(match->radix, &scan->up);
    }
    return NO_BLOCK;
}

/* The greatest boundary at most @idx that the component accepts. */
static uint64_t component_accepts(struct match *match, uint32_t component, uint64_t idx)
{
    struct scan *scan = &match->scans[component];

    if (match->ns->kinds[component] == KVT_COMPONENT_FULL)
        return KVT_MIN(idx, match->alone[component]);
    if (match->ns->kinds[component] == KVT_COMPONENT_STATE) {
        up_to(match->radix, &scan->up, idx);
        while (!up_is_root(&scan->up)) {
            uint64_t there = resident_bits(match, &scan->up, component);

            if (there != 0) {
                scan->up.hi = highest_bit(there) + 1;
                return up_idx(&scan->up);
            }
            up_node(match->radix, &scan->up);
        }
        return 0;
    }
    while (idx > 0) {
        uint64_t hole;

        if (idx < scan->verified_idx) {
            up_to(match->radix, &scan->up, idx);
            scan->verified_idx = idx;
        }
        hole = window_hole(match, component, scan, window_first(match, component, idx));
        if (hole == NO_BLOCK)
            return idx;
        idx = hole;
    }
    return 0;
}

static void explain(const struct match *match, const struct walk *walk, uint64_t limit_idx,
                    uint32_t component, struct kvt_radix_match *ret_match)
{
    const uint64_t alone = match->alone[component];
    struct up up = match->end;
    enum kvt_radix_why why;
    uint8_t mask;

    ret_match->components[component].why_block_idx = alone;
    if (alone == match->end_idx) {
        bool is_end = match->end_idx == KVT_MIN(limit_idx, walk->base_blocks + walk->prefix_blocks);

        ret_match->components[component].why = is_end ? KVT_RADIX_WHY_NONE : KVT_RADIX_WHY_NO_PATH;
        return;
    }
    up_to(match->radix, &up, alone + 1);
    mask = node_masks(match->radix, up.node, component)[up.hi - 1];
    if (mask == 0)
        why = KVT_RADIX_WHY_ABSENT;
    else if (mask == 1u << KVT_RADIX_BIT_HOLD)
        why = KVT_RADIX_WHY_HOLD;
    else
        why = KVT_RADIX_WHY_ELSEWHERE;
    ret_match->components[component].why = why;
}

static void breakdown(const struct match *match, uint64_t idx, struct up at,
                      struct kvt_radix_match *ret_match)
{
    for (uint32_t c = 0; c < match->ns->components_count; c++) {
        uint64_t first_idx = 0;

        if (idx == 0)
            continue;
        if (match->ns->kinds[c] == KVT_COMPONENT_STATE)
            first_idx = idx - 1;
        else if (match->ns->kinds[c] == KVT_COMPONENT_SLIDING_WINDOW)
            first_idx = window_first(match, c, idx);
        ret_match->components[c].needed_blocks = idx - first_idx;
        count_blocks(match, at, first_idx, c, ret_match->components[c].blocks_at);
    }
}

/* Alone first, then down to the first boundary that nobody rejects. */
static uint64_t boundary_find(struct match *match, uint64_t *ret_full_idx)
{
    uint64_t idx = match->end_idx, full_idx = match->end_idx, before;

    for (uint32_t c = 0; c < match->ns->components_count; c++) {
        match->scans[c] = (struct scan){.up = match->end, .verified_idx = match->end_idx};
        match->alone[c] = match->ns->kinds[c] == KVT_COMPONENT_FULL
                              ? full_alone(match, c)
                              : component_accepts(match, c, match->end_idx);
        idx = KVT_MIN(idx, match->alone[c]);
        if (match->ns->kinds[c] == KVT_COMPONENT_FULL)
            full_idx = KVT_MIN(full_idx, match->alone[c]);
    }
    do {
        before = idx;
        for (uint32_t c = 0; c < match->ns->components_count; c++)
            idx = component_accepts(match, c, idx);
    } while (idx != before);
    *ret_full_idx = match->ns->full_mask != 0 ? full_idx : idx;
    return idx;
}

int kvt_radix_lookup(struct kvt_radix *radix, const struct kvt_radix_lookup *lookup,
                     struct kvt_radix_match *ret_match)
{
    struct match match = {.radix = radix, .mask_allowed = lookup->mask_allowed};
    struct walk walk;
    struct up at;
    uint64_t limit_idx, path_idx, full_idx, idx;
    int r;

    KVT_ASSERT(radix->magic == RADIX_MAGIC);
    r = radix_walk(radix, &lookup->prefix, &walk);
    if (r != 0)
        return r;
    *ret_match = (struct kvt_radix_match){0};
    if (walk.node == NULL || walk.node->flags & NODE_ROOT) {
        for (uint32_t c = 0; c < KVT_COMPONENTS_MAX && walk.prefix_blocks > 0; c++)
            ret_match->components[c].why =
                lookup->limit_tokens >= radix->namespaces[lookup->prefix.ns.idx].block_tokens
                    ? KVT_RADIX_WHY_NO_PATH
                    : KVT_RADIX_WHY_NONE;
        return 0;
    }
    match.ns = ns_of(radix, walk.node);
    limit_idx = lookup->limit_tokens / match.ns->block_tokens;
    path_idx = walk.base_blocks + walk.matched_blocks;
    match.end_idx = KVT_MIN(limit_idx, path_idx);
    match.end = (struct up){.node = walk.node, .hi = walk.pos};
    up_to(radix, &match.end, match.end_idx);
    idx = boundary_find(&match, &full_idx);
    at = match.end;
    up_to(radix, &at, idx);
    breakdown(&match, idx, at, ret_match);
    for (uint32_t c = 0; c < match.ns->components_count; c++) {
        ret_match->components[c].alone_tokens = match.alone[c] * match.ns->block_tokens;
        explain(&match, &walk, limit_idx, c, ret_match);
    }
    ret_match->boundary_tokens = idx * match.ns->block_tokens;
    ret_match->path_tokens = path_idx * match.ns->block_tokens;
    ret_match->full_tokens = full_idx * match.ns->block_tokens;
    ret_match->cursor = node_block(radix, walk.node, walk.pos - 1);
    if (idx > 0)
        ret_match->end = node_block(radix, at.node, at.hi - 1);
    if (lookup->is_touch) {
        radix->clock++;
        path_touch(radix, walk.node, 0);
        boundary_touch(radix, node_at(radix, ref_of(radix, at.node)), at.hi);
    }
    return 0;
}
