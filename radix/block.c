/* Single blocks: what a handle tells, masks set and cleared, leases. Engine thread only. */
#include "radix/internal.h"

bool kvt_radix_is_live(const struct kvt_radix *radix, struct kvt_radix_block block)
{
    uint32_t pos;

    return block_node_live(radix, block, &pos) != NULL;
}

uint64_t kvt_radix_depth_blocks(const struct kvt_radix *radix, struct kvt_radix_block block)
{
    uint32_t pos;
    const struct node *node = block_node_live(radix, block, &pos);

    return node == NULL ? 0 : (uint64_t)node->first_idx + pos + 1;
}

uint64_t kvt_radix_depth_blocks_any(const struct kvt_radix *radix, struct kvt_radix_block block)
{
    uint32_t pos;
    const struct node *node = block_node_any(radix, block, &pos);

    return node == NULL ? 0 : (uint64_t)node->first_idx + pos + 1;
}

struct kvt_radix_block kvt_radix_parent(const struct kvt_radix *radix, struct kvt_radix_block block)
{
    uint32_t pos;
    const struct node *node = block_node_live(radix, block, &pos), *parent;

    if (node == NULL)
        return KVT_RADIX_BLOCK_NONE;
    if (pos > 0)
        return node_block(radix, node, pos - 1);
    parent = node_at(radix, node->parent);
    if (parent->flags & NODE_ROOT)
        return KVT_RADIX_BLOCK_NONE;
    return node_block(radix, parent, parent->cut - 1u);
}

const void *kvt_radix_root_key(const struct kvt_radix *radix, struct kvt_radix_block block,
                               uint32_t *ret_bytes)
{
    uint32_t pos;
    const struct node *node = block_node_live(radix, block, &pos);

    if (node == NULL)
        return NULL;
    while (!(node->flags & NODE_ROOT))
        node = node_at(radix, node->parent);
    *ret_bytes = node->key_bytes;
    return ref_ptr(radix, node->data);
}

struct kvt_radix_ns kvt_radix_ns_of(const struct kvt_radix *radix, struct kvt_radix_block block)
{
    uint32_t pos;
    const struct node *node = block_node_any(radix, block, &pos);

    KVT_ASSERT(node != NULL);
    return (struct kvt_radix_ns){.idx = node->ns_idx};
}

const uint32_t *kvt_radix_tokens(const struct kvt_radix *radix, struct kvt_radix_block block,
                                 const uint8_t **ret_extra_key)
{
    uint32_t pos;
    const struct node *node = block_node_live(radix, block, &pos);
    const uint8_t *extra;

    if (node == NULL)
        return NULL;
    if (ret_extra_key != NULL) {
        extra = node_extra(radix, node);
        if (extra != NULL)
            extra += (size_t)pos * KVT_EXTRA_KEY_BYTES;
        *ret_extra_key = extra_key_is_none(extra) ? NULL : extra;
    }
    return node_tokens(radix, node) + (size_t)pos * ns_of(radix, node)->block_tokens;
}

static void cell_fill(const struct kvt_radix *radix, const struct node *node, uint32_t pos,
                      uint32_t component, struct kvt_radix_cell *ret_cell)
{
    ret_cell->block = node_block(radix, node, pos);
    ret_cell->handle = node_handles(radix, node, component)[pos];
    ret_cell->mask = node_masks(radix, node, component)[pos];
}

int kvt_radix_get(const struct kvt_radix *radix, struct kvt_radix_block block, uint32_t component,
                  struct kvt_radix_cell *ret_cell)
{
    uint32_t pos;
    const struct node *node = block_node_any(radix, block, &pos);

    if (node == NULL)
        return KVT_RADIX_E_STALE;
    KVT_ASSERT(component < ns_of(radix, node)->components_count);
    cell_fill(radix, node, pos, component, ret_cell);
    return 0;
}

int kvt_radix_path(const struct kvt_radix *radix, struct kvt_radix_block end, uint32_t component,
                   uint64_t first_idx, uint64_t count, struct kvt_radix_cell *ret_cells)
{
    uint32_t pos;
    const struct node *node = block_node_live(radix, end, &pos);
    uint64_t stop_idx = first_idx + count, upto_idx;

    if (node == NULL)
        return KVT_RADIX_E_STALE;
    KVT_ASSERT(component < ns_of(radix, node)->components_count);
    KVT_ASSERT(stop_idx <= (uint64_t)node->first_idx + pos + 1);
    upto_idx = stop_idx;
    while (upto_idx > first_idx) {
        while (node->first_idx >= upto_idx)
            node = node_at(radix, node->parent);
        for (; upto_idx > first_idx && upto_idx > node->first_idx; upto_idx--)
            cell_fill(radix, node, (uint32_t)(upto_idx - 1 - node->first_idx), component,
                      &ret_cells[upto_idx - 1 - first_idx]);
    }
    return 0;
}

uint64_t kvt_radix_tag(const struct kvt_radix *radix, struct kvt_radix_block block)
{
    uint32_t pos;
    const struct node *node = block_node_any(radix, block, &pos);

    return node == NULL || radix->tag_bytes == 0 ? 0 : node_tags(radix, node)[pos];
}

void kvt_radix_set_tag(struct kvt_radix *radix, struct kvt_radix_block block, uint64_t tag)
{
    uint32_t pos;
    struct node *node = block_node_any(radix, block, &pos);

    if (node != NULL && radix->tag_bytes != 0)
        node_tags(radix, node)[pos] = tag;
}

int kvt_radix_tags(const struct kvt_radix *radix, struct kvt_radix_block end, uint64_t first_idx,
                   uint64_t count, uint64_t *ret_tags)
{
    uint32_t pos;
    const struct node *node = block_node_live(radix, end, &pos);
    uint64_t upto_idx = first_idx + count;

    if (node == NULL)
        return KVT_RADIX_E_STALE;
    KVT_ASSERT(upto_idx <= (uint64_t)node->first_idx + pos + 1);
    if (radix->tag_bytes == 0) {
        for (uint64_t i = 0; i < count; i++)
            ret_tags[i] = 0;
        return 0;
    }
    while (upto_idx > first_idx) {
        uint64_t from_idx;

        while (node->first_idx >= upto_idx)
            node = node_at(radix, node->parent);
        from_idx = KVT_MAX((uint64_t)node->first_idx, first_idx);
        memcpy(ret_tags + (from_idx - first_idx),
               node_tags(radix, node) + (from_idx - node->first_idx),
               (upto_idx - from_idx) * sizeof(*ret_tags));
        upto_idx = from_idx;
    }
    return 0;
}

static void summarise_component(const struct kvt_radix *radix, struct node *node, uint32_t c)
{
    const uint8_t *masks = node_masks(radix, node, c);
    uint8_t all = UINT8_MAX, any = 0;

    for (uint32_t pos = 0; pos < node->cut; pos++) {
        all &= masks[pos];
        any |= masks[pos];
    }
    node->all[c] = all;
    node->any[c] = any;
}

int kvt_radix_put(struct kvt_radix *radix, struct kvt_radix_block block, uint32_t component,
                  uint8_t bits, uint32_t handle)
{
    uint32_t pos;
    struct node *node = block_node_live(radix, block, &pos);
    struct ns *ns;
    uint8_t *mask, *masks, fresh;

    if (node == NULL)
        return KVT_RADIX_E_STALE;
    ns = ns_of(radix, node);
    KVT_ASSERT(component < ns->components_count && bits != 0);
    mask = &node_masks(radix, node, component)[pos];
    if (*mask == 0)
        node_handles(radix, node, component)[pos] = handle;
    else
        KVT_ASSERT(node_handles(radix, node, component)[pos] == handle);
    fresh = bits & (uint8_t) ~*mask;
    *mask |= bits;
    node_unpark(radix, node);
    for (uint8_t left = fresh; left != 0; left &= (uint8_t)(left - 1)) {
        uint32_t bit = (uint32_t)__builtin_ctz(left);

        ns->cells_at[component][bit]++;
        place_add(radix, node, component, bit, 1);
    }
    node->any[component] |= bits;
    /* Blocks of a run are put one after the other: while the last has nothing, nothing is full. */
    masks = mask - pos;
    if ((masks[node->cut - 1] & bits & (uint8_t)~node->all[component]) != 0)
        summarise_component(radix, node, component);
    if ((node->flags & NODE_HOLE) && (ns->full_mask >> component & 1) && masks[node->cut - 1] != 0)
        hole_refresh(radix, node);
    return 0;
}

static bool block_has_copy(const struct kvt_radix *radix, const struct node *node, uint32_t pos)
{
    for (uint32_t c = 0; c < ns_of(radix, node)->components_count; c++) {
        if (node_masks(radix, node, c)[pos] != 0)
            return true;
    }
    return false;
}

/* A cell of a live node lost its last bit. */
static void cell_gone(struct kvt_radix *radix, struct node *node, uint32_t pos, uint32_t component)
{
    const struct ns *ns = ns_of(radix, node);

    if (ns->kinds[component] == KVT_COMPONENT_SLIDING_WINDOW)
        window_orphans(radix, node, pos, component);
    if (node->children_count == 0 && pos + 1 == node->cut && !block_has_copy(radix, node, pos))
        node_trim(radix, node);
    else if (ns->full_mask >> component & 1)
        hole_refresh(radix, node);
}

int kvt_radix_drop(struct kvt_radix *radix, struct kvt_radix_block block, uint32_t component,
                   uint8_t bits, uint8_t *ret_mask)
{
    uint32_t pos;
    struct node *node = block_node_any(radix, block, &pos);
    struct ns *ns;
    uint8_t *mask, gone, remains;
    bool is_live;

    if (node == NULL)
        return KVT_RADIX_E_STALE;
    ns = ns_of(radix, node);
    KVT_ASSERT(component < ns->components_count);
    is_live = pos < node->cut && !node_is_detached(radix, node);
    mask = &node_masks(radix, node, component)[pos];
    gone = *mask & bits;
    *mask &= (uint8_t)~bits;
    remains = *mask;
    if (remains == 0)
        node_handles(radix, node, component)[pos] = KVT_RADIX_HANDLE_NONE;
    for (uint8_t left = gone; left != 0; left &= (uint8_t)(left - 1)) {
        uint32_t bit = (uint32_t)__builtin_ctz(left);

        ns->cells_at[component][bit]--;
        if (is_live)
            place_sub(radix, node, component, bit, 1);
    }
    if (ret_mask != NULL)
        *ret_mask = remains;
    if (!is_live || gone == 0)
        return 0;
    summarise_component(radix, node, component);
    node_unpark(radix, node);
    if (remains == 0)
        cell_gone(radix, node, pos, component);
    return 0;
}

void kvt_radix_touch(struct kvt_radix *radix, struct kvt_radix_block block)
{
    uint32_t pos;
    struct node *node = block_node_live(radix, block, &pos);

    if (node == NULL)
        return;
    radix->clock++;
    path_touch(radix, node, 0);
    boundary_touch(radix, node, pos + 1);
}

int kvt_radix_lease(struct kvt_radix *radix, struct kvt_radix_block block)
{
    uint32_t pos;
    struct node *node = block_node_live(radix, block, &pos);

    if (node == NULL)
        return KVT_RADIX_E_STALE;
    block_at(radix, block.idx)->leases++;
    radix->leases++;
    node->own_leases++;
    for (; !(node->flags & NODE_ROOT); node = node_at(radix, node->parent))
        node->leases++;
    return 0;
}

int kvt_radix_release(struct kvt_radix *radix, struct kvt_radix_block block)
{
    uint32_t pos;
    struct node *node = block_node_any(radix, block, &pos);

    if (node == NULL || block_at(radix, block.idx)->leases == 0)
        return KVT_RADIX_E_STALE;
    block_at(radix, block.idx)->leases--;
    KVT_ASSERT(radix->leases > 0);
    radix->leases--;
    if (pos >= node->cut || node_is_detached(radix, node))
        return 0; /* the path above was told when this part was detached */
    KVT_ASSERT(node->own_leases > 0);
    node->own_leases--;
    for (struct node *at = node; !(at->flags & NODE_ROOT); at = node_at(radix, at->parent)) {
        KVT_ASSERT(at->leases > 0);
        at->leases--;
        node_unpark(radix, at);
    }
    if (node->children_count == 0)
        node_trim(radix, node);
    return 0;
}

bool kvt_radix_is_leased(const struct kvt_radix *radix, struct kvt_radix_block block)
{
    uint32_t pos;
    struct node *node = block_node_any(radix, block, &pos);

    return node != NULL && pos < node_leased_blocks(radix, node);
}
