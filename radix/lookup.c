/* Walking down by comparing tokens, and from a handle to its node.
 *
 * The child used last is compared first, without hashing: on a hot path the walk is one long
 * memory compare in pieces of a node. Only when that fails, and there are other children, the
 * first block is hashed. Engine thread only. */
#include "radix/internal.h"

struct node *block_node_any(const struct kvt_radix *radix, struct kvt_radix_block block,
                            uint32_t *ret_pos)
{
    const struct block *record;

    KVT_DEBUG_ASSERT(!radix->is_in_hook);
    if (block.generation == 0)
        return NULL;
    record = pool_block_in_use(&radix->pool, block.idx);
    if (record == NULL || record->generation != block.generation)
        return NULL;
    *ret_pos = record->pos;
    return node_at(radix, record->node);
}

struct node *block_node_live(const struct kvt_radix *radix, struct kvt_radix_block block,
                             uint32_t *ret_pos)
{
    uint32_t pos;
    struct node *node = block_node_any(radix, block, &pos);

    if (node == NULL || pos >= node->cut || node_is_detached(radix, node))
        return NULL;
    *ret_pos = pos;
    return node;
}

static bool extra_equal(const uint8_t *a, const uint8_t *b)
{
    const bool a_none = extra_key_is_none(a), b_none = extra_key_is_none(b);

    if (a_none || b_none)
        return a_none == b_none;
    return memcmp(a, b, KVT_EXTRA_KEY_BYTES) == 0;
}

/* How many blocks of @node from @pos on equal the next @blocks of the prefix. */
static uint32_t run_match(const struct kvt_radix *radix, const struct node *node, uint32_t pos,
                          const uint32_t *tokens, uint64_t blocks,
                          const uint8_t (*extra_keys)[KVT_EXTRA_KEY_BYTES])
{
    const size_t block_tokens = ns_of(radix, node)->block_tokens;
    const uint32_t *run = node_tokens(radix, node) + pos * block_tokens;
    uint32_t count = (uint32_t)KVT_MIN((uint64_t)(node->cut - pos), blocks), same = 0;

    if (extra_keys == NULL && node->extra == 0) {
        if (memcmp(run, tokens, count * block_tokens * sizeof(uint32_t)) == 0)
            return count;
        while (memcmp(run, tokens, block_tokens * sizeof(uint32_t)) == 0) {
            run += block_tokens;
            tokens += block_tokens;
            same++;
        }
        KVT_ASSERT(same < count);
        return same;
    }
    while (same < count) {
        const uint8_t *own = node_extra(radix, node);

        if (own != NULL)
            own += (size_t)(pos + same) * KVT_EXTRA_KEY_BYTES;
        if (memcmp(run + same * block_tokens, tokens + same * block_tokens,
                   block_tokens * sizeof(uint32_t)) != 0 ||
            !extra_equal(own, extra_keys == NULL ? NULL : extra_keys[same]))
            break;
        same++;
    }
    return same;
}

/* The child that begins with the next block, and how many blocks of it match. */
static struct node *child_match(const struct kvt_radix *radix, struct walk *walk,
                                const uint32_t *tokens, uint64_t blocks,
                                const uint8_t (*extra_keys)[KVT_EXTRA_KEY_BYTES],
                                uint32_t *ret_same)
{
    struct node *node = walk->node;
    const uint32_t parent = ref_of(radix, node), first_idx = node->first_idx + node->cut;
    uint32_t hash, ref;

    if (node->children_count == 0)
        return NULL;
    *ret_same = run_match(radix, node_at(radix, node->hint), 0, tokens, blocks, extra_keys);
    if (*ret_same > 0)
        return node_at(radix, node->hint);
    if (node->children_count == 1)
        return NULL;
    hash = first_block_hash(radix, tokens, ns_of(radix, node)->block_tokens,
                            extra_keys == NULL ? NULL : extra_keys[0]);
    ref = radix->buckets[bucket_of(radix, parent, hash)];
    while (ref != 0) {
        struct node *child = node_at(radix, ref);

        if (child->hash == hash && child->parent == parent && child->first_idx == first_idx) {
            *ret_same = run_match(radix, child, 0, tokens, blocks, extra_keys);
            if (*ret_same > 0) {
                node->hint = ref;
                return child;
            }
        }
        ref = child->hash_next;
    }
    walk->hash = hash;
    walk->has_hash = true;
    return NULL;
}

/* Where the walk begins: behind the cursor or at the root. */
static int walk_start(const struct kvt_radix *radix, const struct kvt_radix_prefix *prefix,
                      struct walk *walk)
{
    uint32_t pos;

    if (prefix->after.generation == 0) {
        walk->node = root_find(radix, prefix->ns.idx, prefix->root_key, prefix->root_key_bytes);
        return 0;
    }
    walk->node = block_node_live(radix, prefix->after, &pos);
    if (walk->node == NULL || walk->node->ns_idx != prefix->ns.idx)
        return KVT_RADIX_E_STALE;
    walk->pos = pos + 1;
    walk->base_blocks = walk->node->first_idx + walk->pos;
    return 0;
}

int radix_walk(const struct kvt_radix *radix, const struct kvt_radix_prefix *prefix,
               struct walk *ret_walk)
{
    struct walk walk = {0};
    const struct ns *ns;
    const uint8_t(*extra_keys)[KVT_EXTRA_KEY_BYTES] = prefix->extra_keys;
    const uint32_t *tokens = prefix->tokens;
    uint64_t left;
    int r;

    KVT_DEBUG_ASSERT(!radix->is_in_hook);
    if (prefix->ns.idx >= radix->namespaces_max || !radix->namespaces[prefix->ns.idx].is_open) {
        *ret_walk = walk;
        return prefix->after.generation == 0 ? 0 : KVT_RADIX_E_STALE;
    }
    ns = &radix->namespaces[prefix->ns.idx];
    r = walk_start(radix, prefix, &walk);
    if (r != 0)
        return r;
    left = walk.prefix_blocks = prefix->tokens_count / ns->block_tokens;
    while (walk.node != NULL && left > 0) {
        struct node *node = walk.node;
        uint32_t same = 0, at = walk.pos;

        if (node->hint != 0)
            __builtin_prefetch(node_at(radix, node->hint));
        if (walk.pos < node->cut) {
            same = run_match(radix, node, walk.pos, tokens, left, extra_keys);
        } else {
            node = child_match(radix, &walk, tokens, left, extra_keys, &same);
            at = 0;
        }
        if (same == 0)
            break;
        walk.node = node;
        walk.pos = at + same;
        walk.matched_blocks += same;
        left -= same;
        tokens += (size_t)same * ns->block_tokens;
        if (extra_keys != NULL)
            extra_keys += same;
        if (walk.pos < node->cut)
            break;
    }
    *ret_walk = walk;
    return 0;
}
