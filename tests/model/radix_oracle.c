#include "tests/model/radix_oracle.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define NONE UINT32_MAX

void oracle_init(struct oracle *oracle)
{
    oracle->live = oracle->detached = oracle->top = 0;
    oracle->free_head = NONE;
    oracle->leases = 0;
    oracle->forgotten_count = 0;
    memset(oracle->roots, 0xff, sizeof(oracle->roots));
}

static uint32_t *children_of(struct oracle *oracle, uint32_t ns, uint32_t root, uint32_t parent)
{
    return parent == NONE ? &oracle->roots[ns][root] : &oracle->blocks[parent].first_child;
}

uint32_t oracle_walk(const struct oracle *oracle, uint32_t ns, uint32_t root, uint32_t after,
                     const uint32_t *symbols, const uint32_t *extras, uint32_t count,
                     uint32_t *ret_path, uint32_t *ret_depth)
{
    uint32_t depth = 0, matched = 0, at = after;

    if (after != NONE)
        depth = oracle->blocks[after].depth + 1;
    for (uint32_t up = after; up != NONE; up = oracle->blocks[up].parent)
        ret_path[oracle->blocks[up].depth] = up;
    while (matched < count) {
        uint32_t child = at == NONE ? oracle->roots[ns][root] : oracle->blocks[at].first_child;

        while (child != NONE && (oracle->blocks[child].symbol != symbols[matched] ||
                                 oracle->blocks[child].extra != extras[matched]))
            child = oracle->blocks[child].next;
        if (child == NONE)
            break;
        ret_path[depth++] = child;
        matched++;
        at = child;
    }
    *ret_depth = depth;
    return matched;
}

uint32_t oracle_add(struct oracle *oracle, uint32_t ns, uint32_t root, uint32_t parent,
                    uint32_t symbol, uint32_t extra)
{
    uint32_t idx = oracle->free_head, *head = children_of(oracle, ns, root, parent);
    struct oracle_block *block;

    if (idx != NONE)
        oracle->free_head = oracle->blocks[idx].next;
    else
        idx = oracle->top++;
    if (idx >= ORACLE_BLOCKS_MAX)
        abort();
    block = &oracle->blocks[idx];
    *block = (struct oracle_block){.is_used = true,
                                   .parent = parent,
                                   .ns = ns,
                                   .root = root,
                                   .symbol = symbol,
                                   .extra = extra,
                                   .first_child = NONE,
                                   .next = *head,
                                   .prev = NONE};
    block->depth = parent == NONE ? 0 : oracle->blocks[parent].depth + 1;
    if (block->next != NONE)
        oracle->blocks[block->next].prev = idx;
    *head = idx;
    oracle->live++;
    return idx;
}

static void unlink_block(struct oracle *oracle, uint32_t idx)
{
    struct oracle_block *block = &oracle->blocks[idx];

    if (block->next != NONE)
        oracle->blocks[block->next].prev = block->prev;
    if (block->prev != NONE)
        oracle->blocks[block->prev].next = block->next;
    else
        *children_of(oracle, block->ns, block->root, block->parent) = block->next;
}

void oracle_forget(struct oracle *oracle, uint32_t idx)
{
    oracle->leases -= oracle->blocks[idx].leases;
    if (oracle->blocks[idx].tag != 0)
        oracle->forgotten[oracle->forgotten_count++] = oracle->blocks[idx].tag;
    oracle->blocks[idx].is_used = false;
    oracle->blocks[idx].next = oracle->free_head;
    oracle->free_head = idx;
}

void oracle_bury(struct oracle *oracle, uint32_t idx)
{
    while (idx != NONE) {
        struct oracle_block *block = &oracle->blocks[idx];
        uint32_t parent = block->parent;

        if (block->leases > 0 || block->first_child != NONE || block->is_detached)
            return;
        for (uint32_t c = 0; c < oracle->specs[block->ns].components_count; c++) {
            if (block->mask[c] != 0)
                return;
        }
        unlink_block(oracle, idx);
        oracle_forget(oracle, idx);
        oracle->live--;
        idx = parent;
    }
}

void oracle_detach(struct oracle *oracle, uint32_t idx)
{
    uint32_t parent = oracle->blocks[idx].parent;

    unlink_block(oracle, idx);
    oracle->blocks[idx].next = NONE;
    for (uint32_t at = idx;;) {
        uint32_t next = oracle->blocks[at].first_child;

        oracle->blocks[at].is_detached = true;
        oracle->live--;
        oracle->detached++;
        while (next == NONE && at != idx) {
            next = oracle->blocks[at].next;
            if (next == NONE)
                at = oracle->blocks[at].parent;
        }
        if (next == NONE)
            break;
        at = next;
    }
    oracle_bury(oracle, parent);
}

static bool accepts(const struct oracle *oracle, uint32_t ns, const uint32_t *path, uint64_t b,
                    uint32_t c, uint8_t allowed, uint64_t *ret_needed, uint64_t at[KVT_RADIX_BITS])
{
    const struct kvt_radix_spec *spec = &oracle->specs[ns];
    const uint64_t bt = spec->block_tokens;
    uint64_t needed = 0, counts[KVT_RADIX_BITS] = {0};

    for (uint64_t i = 0; i < b; i++) {
        uint8_t mask = oracle->blocks[path[i]].mask[c] & allowed;
        bool is_needed = true;

        if (spec->components[c].kind == KVT_COMPONENT_STATE)
            is_needed = i + 1 == b;
        if (spec->components[c].kind == KVT_COMPONENT_SLIDING_WINDOW) {
            uint64_t window = spec->components[c].window_tokens;
            uint64_t from = b * bt > window ? b * bt - window : 0;

            is_needed = (i + 1) * bt > from; /* its last token is at (i + 1) * bt - 1 >= from */
        }
        if (!is_needed)
            continue;
        if (mask == 0)
            return false;
        needed++;
        for (uint32_t bit = 0; bit < KVT_RADIX_BITS; bit++) {
            if (mask >> bit & 1) {
                counts[bit]++;
                break;
            }
        }
    }
    if (ret_needed != NULL) {
        *ret_needed = needed;
        memcpy(at, counts, sizeof(counts));
    }
    return true;
}

static enum kvt_radix_why explain(uint8_t mask)
{
    if (mask == 0)
        return KVT_RADIX_WHY_ABSENT;
    return mask == 1u << KVT_RADIX_BIT_HOLD ? KVT_RADIX_WHY_HOLD : KVT_RADIX_WHY_ELSEWHERE;
}

void oracle_match(const struct oracle *oracle, uint32_t ns, const uint32_t *path, uint32_t depth,
                  uint32_t prompt_depth, uint64_t limit_tokens, uint8_t mask_allowed,
                  struct oracle_match *ret_match)
{
    const struct kvt_radix_spec *spec = &oracle->specs[ns];
    uint64_t limit = limit_tokens / spec->block_tokens, end = KVT_MIN(limit, (uint64_t)depth);
    uint64_t full = end;
    bool has_full = false;

    memset(ret_match, 0, sizeof(*ret_match));
    ret_match->path = depth;
    for (uint32_t c = 0; c < spec->components_count; c++) {
        uint64_t b = end;

        while (!accepts(oracle, ns, path, b, c, mask_allowed, NULL, NULL))
            b--;
        ret_match->components[c].alone = b;
        if (spec->components[c].kind == KVT_COMPONENT_FULL) {
            full = KVT_MIN(full, b);
            has_full = true;
        }
        if (b < end)
            ret_match->components[c].why = explain(oracle->blocks[path[b]].mask[c]);
        else if (end < KVT_MIN(limit, (uint64_t)prompt_depth))
            ret_match->components[c].why = KVT_RADIX_WHY_NO_PATH;
    }
    for (uint64_t b = end;; b--) {
        bool is_legal = true;

        for (uint32_t c = 0; c < spec->components_count && is_legal; c++)
            is_legal = accepts(oracle, ns, path, b, c, mask_allowed,
                               &ret_match->components[c].needed, ret_match->components[c].at);
        if (!is_legal)
            continue;
        ret_match->boundary = b;
        ret_match->full = has_full ? full : b;
        return;
    }
}

/* Next of the subtree of @top in pre-order. */
static uint32_t subtree_next(const struct oracle *oracle, uint32_t top, uint32_t at)
{
    uint32_t next = oracle->blocks[at].first_child;

    while (next == NONE && at != top) {
        next = oracle->blocks[at].next;
        if (next == NONE)
            at = oracle->blocks[at].parent;
    }
    return next;
}

bool oracle_is_leased(const struct oracle *oracle, uint32_t idx)
{
    if (oracle->leases == 0)
        return false;
    for (uint32_t at = idx; at != NONE; at = subtree_next(oracle, idx, at)) {
        if (oracle->blocks[at].leases > 0)
            return true;
    }
    return false;
}

bool oracle_has_below(const struct oracle *oracle, uint32_t idx, uint32_t component, uint8_t bit)
{
    for (uint32_t at = subtree_next(oracle, idx, idx); at != NONE;
         at = subtree_next(oracle, idx, at)) {
        if (oracle->blocks[at].mask[component] & bit)
            return true;
    }
    return false;
}

static bool is_hole(const struct oracle *oracle, uint32_t idx)
{
    const struct oracle_block *block = &oracle->blocks[idx];

    for (uint32_t c = 0; c < oracle->specs[block->ns].components_count; c++) {
        if (oracle->specs[block->ns].components[c].kind == KVT_COMPONENT_FULL &&
            block->mask[c] == 0)
            return true;
    }
    return false;
}

bool oracle_is_unreachable(const struct oracle *oracle, uint32_t idx)
{
    for (; idx != NONE; idx = oracle->blocks[idx].parent) {
        if (is_hole(oracle, idx))
            return true;
    }
    return false;
}

uint32_t oracle_hole_visits(const struct oracle *oracle, uint32_t ns)
{
    uint32_t visits = 0;

    for (uint32_t i = 0; i < oracle->top; i++) {
        if (!oracle->blocks[i].is_used || oracle->blocks[i].ns != ns)
            continue;
        for (uint32_t at = i; at != NONE; at = oracle->blocks[at].parent)
            visits += is_hole(oracle, at) ? 2 : 0;
    }
    return visits;
}

uint32_t oracle_find(const struct oracle *oracle, struct kvt_radix_block block)
{
    for (uint32_t i = 0; i < oracle->top; i++) {
        if (oracle->blocks[i].is_used && oracle->blocks[i].block.idx == block.idx &&
            oracle->blocks[i].block.generation == block.generation)
            return i;
    }
    return NONE;
}
