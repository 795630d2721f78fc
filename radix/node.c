/* Nodes: their data, their blocks, their links.
 *
 *        parent                      parent
 *          |          split at 2       |        The lower half keeps the record, so its children
 *   [a b c d e f]    ---------->     [a b]      and the places that others hold stay right; the
 *       /    \                         |        new record takes the old one's seat below the
 *      x      y                    [c d e f]    parent. A merge is the same backwards.
 *                                    /    \
 *                                   x      y
 * A function here either finds all the memory it needs before it changes anything, or needs none.
 * Engine thread only. */
#include "daemon/base/hash.h"

#include "radix/internal.h"

static size_t data_bytes(const struct ns *ns, uint32_t blocks)
{
    return (size_t)ns->block_bytes * blocks;
}

static uint32_t places_of(const struct kvt_radix *radix, const struct ns *ns)
{
    return ns->components_count * (uint32_t)__builtin_popcount(radix->mask_evictable);
}

struct node *node_new(struct kvt_radix *radix, uint32_t ns_idx, uint32_t blocks)
{
    struct ns *ns = &radix->namespaces[ns_idx];
    struct pool *pool = &radix->pool;
    uint32_t cls = pool_class_of(pool, data_bytes(ns, blocks));
    struct node *node;
    void *data;

    KVT_ASSERT(blocks > 0 && blocks <= ns->run_blocks_max);
    if (cls == UINT32_MAX || !pool_reserve_places(pool, places_of(radix, ns)))
        return NULL;
    node = pool_take(pool, CLASS_NODE);
    data = node == NULL ? NULL : pool_take(pool, cls);
    if (data == NULL) {
        if (node != NULL) {
            *node = (struct node){0}; /* a node of no blocks is not in use: see dump_start */
            pool_give(pool, node);
        }
        pool_unreserve_places(pool, places_of(radix, ns));
        return NULL;
    }
    *node = (struct node){.data = ref_of(radix, data), .ns_idx = ns_idx, .stamp = radix->clock};
    node->cap = (uint8_t)KVT_MIN(pool->classes[cls].bytes / ns->block_bytes, ns->run_blocks_max);
    radix->nodes++;
    ns->nodes++;
    return node;
}

void node_free(struct kvt_radix *radix, struct node *node)
{
    struct ns *ns = ns_of(radix, node);

    KVT_ASSERT(node->count == 0 && node->first_child == 0 && node->dead_child == 0);
    KVT_ASSERT(!(node->flags & (NODE_ROOT | NODE_HASHED | NODE_REAP)));
    hole_unlist(radix, node);
    places_free(radix, node);
    if (node->extra != 0)
        pool_give(&radix->pool, node_extra(radix, node));
    pool_give(&radix->pool, ref_ptr(radix, node->data));
    pool_give(&radix->pool, node);
    pool_unreserve_places(&radix->pool, places_of(radix, ns));
    radix->nodes--;
    ns->nodes--;
}

/* Copies @count blocks between two places of nodes of one namespace, also within one node. */
static void blocks_move(const struct kvt_radix *radix, struct node *to, uint32_t to_pos,
                        const struct node *from, uint32_t from_pos, uint32_t count)
{
    const struct ns *ns = ns_of(radix, to);
    const size_t bt = ns->block_tokens;

    KVT_ASSERT(to_pos + count <= to->cap);
    if (radix->tag_bytes != 0)
        memmove(node_tags(radix, to) + to_pos, node_tags(radix, from) + from_pos,
                count * sizeof(uint64_t));
    memmove(node_tokens(radix, to) + to_pos * bt, node_tokens(radix, from) + from_pos * bt,
            count * bt * sizeof(uint32_t));
    memmove(node_ids(radix, to) + to_pos, node_ids(radix, from) + from_pos,
            count * sizeof(uint32_t));
    for (uint32_t c = 0; c < ns->components_count; c++) {
        memmove(node_handles(radix, to, c) + to_pos, node_handles(radix, from, c) + from_pos,
                count * sizeof(uint32_t));
        memmove(node_masks(radix, to, c) + to_pos, node_masks(radix, from, c) + from_pos, count);
    }
    if (to->extra == 0)
        return;
    if (from->extra != 0)
        memmove(node_extra(radix, to) + (size_t)to_pos * KVT_EXTRA_KEY_BYTES,
                node_extra(radix, from) + (size_t)from_pos * KVT_EXTRA_KEY_BYTES,
                (size_t)count * KVT_EXTRA_KEY_BYTES);
    else
        memset(node_extra(radix, to) + (size_t)to_pos * KVT_EXTRA_KEY_BYTES, 0,
               (size_t)count * KVT_EXTRA_KEY_BYTES);
}

/* Tells the block records where they are now. */
static void blocks_renumber(const struct kvt_radix *radix, struct node *node)
{
    const uint32_t *ids = node_ids(radix, node), ref = ref_of(radix, node);

    for (uint32_t pos = 0; pos < node->count; pos++) {
        struct block *block = block_at(radix, ids[pos]);

        if (ids[pos] == 0)
            continue;
        block->node = ref;
        block->pos = pos;
    }
}

static void *extra_take(struct kvt_radix *radix, uint32_t cap)
{
    return pool_take(&radix->pool, pool_class_of(&radix->pool, (size_t)cap * KVT_EXTRA_KEY_BYTES));
}

bool node_resize(struct kvt_radix *radix, struct node *node, uint32_t blocks)
{
    struct ns *ns = ns_of(radix, node);
    struct pool *pool = &radix->pool;
    uint32_t cls = pool_class_of(pool, data_bytes(ns, blocks));
    struct node old = *node;
    void *data, *extra = NULL;

    KVT_ASSERT(blocks >= node->count && blocks <= ns->run_blocks_max && blocks > 0);
    data = pool_take(pool, cls);
    if (data == NULL)
        return false;
    node->cap = (uint8_t)KVT_MIN(pool->classes[cls].bytes / ns->block_bytes, ns->run_blocks_max);
    if (old.extra != 0) {
        extra = extra_take(radix, node->cap);
        if (extra == NULL) {
            node->cap = old.cap;
            pool_give(pool, data);
            return false;
        }
        node->extra = ref_of(radix, extra);
    }
    node->data = ref_of(radix, data);
    blocks_move(radix, node, 0, &old, 0, node->count);
    pool_give(pool, ref_ptr(radix, old.data));
    if (old.extra != 0)
        pool_give(pool, ref_ptr(radix, old.extra));
    return true;
}

void node_shrink(struct kvt_radix *radix, struct node *node)
{
    const struct ns *ns = ns_of(radix, node);
    uint32_t blocks = node->count;

    if (blocks == 0 || blocks + blocks / 8 >= node->cap)
        return;
    if (pool_class_of(&radix->pool, data_bytes(ns, blocks)) ==
        pool_class_of(&radix->pool, data_bytes(ns, node->cap)))
        return;
    (void)node_resize(radix, node, blocks); /* no room for the copy: it stays as large as it is */
}

bool node_need_extra(struct kvt_radix *radix, struct node *node)
{
    void *extra;

    if (node->extra != 0)
        return true;
    extra = extra_take(radix, node->cap);
    if (extra == NULL)
        return false;
    memset(extra, 0, (size_t)node->cap * KVT_EXTRA_KEY_BYTES);
    node->extra = ref_of(radix, extra);
    return true;
}

bool node_append(struct kvt_radix *radix, struct node *node, uint32_t blocks,
                 const uint32_t *tokens, const uint8_t (*extra_keys)[KVT_EXTRA_KEY_BYTES])
{
    struct ns *ns = ns_of(radix, node);
    uint32_t *ids = node_ids(radix, node), first = node->count;
    bool has_extra = false;

    KVT_ASSERT(node->count == node->cut && first + blocks <= node->cap);
    for (uint32_t i = 0; extra_keys != NULL && i < blocks; i++)
        has_extra |= !extra_key_is_none(extra_keys[i]);
    if (has_extra && !node_need_extra(radix, node))
        return false;
    for (uint32_t i = 0; i < blocks; i++) {
        struct block *block = pool_take(&radix->pool, CLASS_BLOCK);

        if (block == NULL) {
            while (i-- > 0)
                pool_give(&radix->pool, block_at(radix, ids[first + i]));
            return false;
        }
        block->node = ref_of(radix, node);
        block->pos = first + i;
        block->leases = 0;
        ids[first + i] = ref_of(radix, block);
    }
    if (radix->tag_bytes != 0)
        memset(node_tags(radix, node) + first, 0, blocks * sizeof(uint64_t));
    memcpy(node_tokens(radix, node) + (size_t)first * ns->block_tokens, tokens,
           (size_t)blocks * ns->block_tokens * sizeof(uint32_t));
    for (uint32_t c = 0; c < ns->components_count; c++) {
        memset(node_handles(radix, node, c) + first, 0, blocks * sizeof(uint32_t));
        memset(node_masks(radix, node, c) + first, 0, blocks);
        node->all[c] = 0;
    }
    if (node->extra != 0 && extra_keys != NULL)
        memcpy(node_extra(radix, node) + (size_t)first * KVT_EXTRA_KEY_BYTES, extra_keys,
               (size_t)blocks * KVT_EXTRA_KEY_BYTES);
    else if (node->extra != 0)
        memset(node_extra(radix, node) + (size_t)first * KVT_EXTRA_KEY_BYTES, 0,
               (size_t)blocks * KVT_EXTRA_KEY_BYTES);
    node->count = node->cut = (uint8_t)(first + blocks);
    ns->blocks += blocks;
    radix->blocks += blocks;
    radix->tokens_bytes += (uint64_t)blocks * ns->block_tokens * sizeof(uint32_t);
    return true;
}

/* Block @pos leaves: whoever gave it a tag is told. */
static void tag_retire(struct kvt_radix *radix, struct node *node, uint32_t pos)
{
    uint64_t *tag = &node_tags(radix, node)[pos];
    const struct kvt_radix_gone gone = {
        .ns = {.idx = node->ns_idx}, .block_idx = (uint64_t)node->first_idx + pos, .tag = *tag};

    if (gone.tag == 0)
        return;
    *tag = 0;
    if (radix->gone == NULL)
        return;
    radix->is_in_hook = true;
    radix->gone(radix->gone_ctx, &gone);
    radix->is_in_hook = false;
}

/* Gives the record of block @pos back; its handle is stale from now on. */
static void block_retire(struct kvt_radix *radix, struct node *node, uint32_t pos)
{
    struct ns *ns = ns_of(radix, node);
    uint32_t *id = &node_ids(radix, node)[pos];

    if (*id == 0)
        return;
    for (uint32_t c = 0; c < ns->components_count; c++)
        KVT_ASSERT(node_masks(radix, node, c)[pos] == 0);
    if (radix->tag_bytes != 0)
        tag_retire(radix, node, pos);
    pool_give(&radix->pool, block_at(radix, *id));
    *id = 0;
    ns->blocks--;
    radix->blocks--;
    radix->tokens_bytes -= ns->block_tokens * sizeof(uint32_t);
}

void node_truncate(struct kvt_radix *radix, struct node *node, uint32_t from)
{
    KVT_ASSERT(from <= node->count);
    for (uint32_t pos = node->count; pos-- > from;)
        block_retire(radix, node, pos);
    node->count = (uint8_t)from;
    node->cut = KVT_MIN(node->cut, node->count);
}

/* Live blocks from @from on die in a node whose tail waits for the reaper: their room goes with
 * that tail. */
static void node_lower_cut(struct kvt_radix *radix, struct node *node, uint32_t from)
{
    for (uint32_t pos = node->cut; pos-- > from;)
        block_retire(radix, node, pos);
    node->cut = (uint8_t)from;
}

void node_summarise(struct kvt_radix *radix, struct node *node)
{
    const struct ns *ns = ns_of(radix, node);

    for (uint32_t c = 0; c < ns->components_count; c++) {
        const uint8_t *masks = node_masks(radix, node, c);
        uint8_t all = UINT8_MAX, any = 0;

        for (uint32_t pos = 0; pos < node->cut; pos++) {
            all &= masks[pos];
            any |= masks[pos];
        }
        node->all[c] = node->cut == 0 ? 0 : all;
        node->any[c] = any;
    }
}

/* ---- links ----------------------------------------------------------------------------------- */

uint64_t bucket_of(const struct kvt_radix *radix, uint32_t parent, uint32_t hash)
{
    uint64_t mix = ((uint64_t)parent << 32 | hash) * 0x9e3779b97f4a7c15ull;

    return (mix ^ mix >> 32) & radix->buckets_mask;
}

void bucket_insert(struct kvt_radix *radix, struct node *node)
{
    uint32_t *bucket = &radix->buckets[bucket_of(radix, node->parent, node->hash)];

    KVT_ASSERT(!(node->flags & NODE_HASHED));
    node->hash_next = *bucket;
    *bucket = ref_of(radix, node);
    node->flags |= NODE_HASHED;
}

void bucket_remove(struct kvt_radix *radix, struct node *node)
{
    uint32_t *link = &radix->buckets[bucket_of(radix, node->parent, node->hash)];
    const uint32_t ref = ref_of(radix, node);

    if (!(node->flags & NODE_HASHED))
        return;
    while (*link != ref) {
        KVT_ASSERT(*link != 0);
        link = &node_at(radix, *link)->hash_next;
    }
    *link = node->hash_next;
    node->flags &= (uint8_t)~NODE_HASHED;
}

uint32_t first_block_hash(const struct kvt_radix *radix, const uint32_t *tokens,
                          uint32_t block_tokens, const uint8_t *extra_key)
{
    uint64_t hash = kvt_hash64(tokens, (size_t)block_tokens * sizeof(uint32_t), radix->seed);

    if (!extra_key_is_none(extra_key))
        hash = kvt_hash64(extra_key, KVT_EXTRA_KEY_BYTES, hash);
    return (uint32_t)(hash ^ hash >> 32);
}

static void child_hash(struct kvt_radix *radix, struct node *child)
{
    if (child->flags & NODE_HASHED)
        return;
    if (!(child->flags & NODE_HASH_KNOWN))
        child->hash = first_block_hash(radix, node_tokens(radix, child),
                                       ns_of(radix, child)->block_tokens, node_extra(radix, child));
    bucket_insert(radix, child);
}

void node_attach(struct kvt_radix *radix, struct node *parent, struct node *child)
{
    const uint32_t ref = ref_of(radix, child);

    KVT_ASSERT(child->parent == 0);
    child->parent = ref_of(radix, parent);
    child->first_idx = parent->first_idx + parent->cut;
    child->sib_prev = 0;
    child->sib_next = parent->first_child;
    if (child->sib_next != 0)
        node_at(radix, child->sib_next)->sib_prev = ref;
    if (parent->children_count == 1)
        child_hash(radix, node_at(radix, parent->first_child));
    parent->first_child = ref;
    parent->hint = ref;
    parent->children_count++;
    if (parent->children_count > 1)
        child_hash(radix, child);
    child->flags &= (uint8_t)~NODE_HASH_KNOWN;
}

void node_unlink(struct kvt_radix *radix, struct node *child)
{
    struct node *parent = node_at(radix, child->parent);
    const uint32_t ref = ref_of(radix, child);

    bucket_remove(radix, child);
    if (child->sib_next != 0)
        node_at(radix, child->sib_next)->sib_prev = child->sib_prev;
    if (child->sib_prev != 0)
        node_at(radix, child->sib_prev)->sib_next = child->sib_next;
    else if (parent->first_child == ref)
        parent->first_child = child->sib_next;
    else if (parent->dead_child == ref)
        parent->dead_child = child->sib_next;
    if (child->first_idx == parent->first_idx + parent->cut) {
        KVT_ASSERT(parent->children_count > 0);
        parent->children_count--;
    }
    if (parent->hint == ref)
        parent->hint = parent->first_child;
    child->parent = child->sib_next = child->sib_prev = 0;
}

/* @young takes the seat of @old below @old's parent. */
static void seat_take(struct kvt_radix *radix, struct node *old, struct node *young)
{
    struct node *parent = node_at(radix, old->parent);
    const uint32_t old_ref = ref_of(radix, old), ref = ref_of(radix, young);
    const bool was_hashed = old->flags & NODE_HASHED;

    bucket_remove(radix, old);
    young->parent = old->parent;
    young->sib_next = old->sib_next;
    young->sib_prev = old->sib_prev;
    young->hash = old->hash;
    if (young->sib_next != 0)
        node_at(radix, young->sib_next)->sib_prev = ref;
    if (young->sib_prev != 0)
        node_at(radix, young->sib_prev)->sib_next = ref;
    else
        parent->first_child = ref;
    if (parent->hint == old_ref)
        parent->hint = ref;
    if (was_hashed)
        bucket_insert(radix, young);
    old->parent = old->sib_next = old->sib_prev = 0;
}

static uint32_t leases_in(const struct kvt_radix *radix, const struct node *node)
{
    const uint32_t *ids = node_ids(radix, node);
    uint32_t sum = 0;

    for (uint32_t pos = 0; pos < node->cut; pos++)
        sum += block_at(radix, ids[pos])->leases;
    return sum;
}

struct node *node_split(struct kvt_radix *radix, struct node *node, uint32_t at)
{
    struct node *upper = node_new(radix, node->ns_idx, at);

    KVT_ASSERT(at > 0 && at < node->cut);
    if (upper == NULL)
        return NULL;
    if (node->extra != 0 && !node_need_extra(radix, upper)) {
        node_free(radix, upper);
        return NULL;
    }
    blocks_move(radix, upper, 0, node, 0, at);
    blocks_move(radix, node, 0, node, at, node->count - at);
    upper->count = upper->cut = (uint8_t)at;
    node->count = (uint8_t)(node->count - at);
    node->cut = (uint8_t)(node->cut - at);
    upper->first_idx = node->first_idx;
    node->first_idx += at;
    upper->stamp = node->stamp;
    blocks_renumber(radix, upper);
    blocks_renumber(radix, node);
    seat_take(radix, node, upper);
    upper->leases = node->leases;
    if (node->own_leases > 0) {
        upper->own_leases = leases_in(radix, upper);
        node->own_leases -= upper->own_leases;
        node->leases -= upper->own_leases;
    }
    node->parent = ref_of(radix, upper);
    upper->first_child = upper->hint = ref_of(radix, node);
    upper->children_count = 1;
    node_summarise(radix, upper);
    node_summarise(radix, node);
    places_split(radix, upper, node);
    hole_refresh(radix, upper);
    hole_refresh(radix, node);
    node_shrink(radix, node);
    radix->splits++;
    return upper;
}

struct node *node_try_merge(struct kvt_radix *radix, struct node *node)
{
    struct node *child;
    uint32_t total, above = node->count;

    if ((node->flags & NODE_ROOT) || node->children_count != 1 || node->cut != node->count ||
        node->dead_child != 0 || (node->flags & NODE_REAP))
        return node;
    child = node_at(radix, node->first_child);
    total = above + child->count;
    if (total > ns_of(radix, node)->run_blocks_max || (child->flags & NODE_REAP))
        return node;
    if ((total > child->cap && !node_resize(radix, child, total)) ||
        (node->extra != 0 && !node_need_extra(radix, child))) {
        radix->is_merge_skipped = true;
        return node;
    }
    blocks_move(radix, child, above, child, 0, child->count);
    blocks_move(radix, child, 0, node, 0, above);
    child->count = (uint8_t)total;
    child->cut = (uint8_t)(child->cut + above);
    child->first_idx = node->first_idx;
    child->leases = node->leases;
    child->own_leases += node->own_leases;
    child->stamp = KVT_MAX(child->stamp, node->stamp);
    blocks_renumber(radix, child);
    node_unlink(radix, child);
    seat_take(radix, node, child);
    node_summarise(radix, child);
    places_merge(radix, node, child);
    node->count = node->cut = 0;
    node_free(radix, node);
    hole_refresh(radix, child);
    radix->merges++;
    return child;
}

/* ---- life and death -------------------------------------------------------------------------- */

uint64_t node_occupied(const struct kvt_radix *radix, const struct node *node)
{
    const struct ns *ns = ns_of(radix, node);
    uint64_t ret = 0;

    for (uint32_t c = 0; c < ns->components_count; c++) {
        if (node->all[c] != 0)
            return bits_below(node->cut);
        if (node->any[c] != 0)
            ret |= masks_with(node_masks(radix, node, c), node->cut, UINT8_MAX);
    }
    return ret;
}

uint64_t node_holes(const struct kvt_radix *radix, const struct node *node)
{
    const struct ns *ns = ns_of(radix, node);
    uint64_t ret = 0;

    for (uint32_t c = 0; c < ns->components_count; c++) {
        if (!(ns->full_mask >> c & 1) || node->all[c] != 0)
            continue;
        ret |= ~masks_with(node_masks(radix, node, c), node->cut, UINT8_MAX);
    }
    return ret & bits_below(node->cut);
}

uint32_t node_leased_blocks(const struct kvt_radix *radix, const struct node *node)
{
    const uint32_t *ids;
    uint32_t pos = node->cut;

    if (node->leases > node->own_leases)
        return node->cut;
    if (node->own_leases == 0)
        return 0;
    ids = node_ids(radix, node);
    while (pos > 0 && block_at(radix, ids[pos - 1])->leases == 0)
        pos--;
    return pos;
}

bool node_is_detached(const struct kvt_radix *radix, const struct node *node)
{
    if (radix->reap_head == 0)
        return false;
    for (;;) {
        const struct node *parent;

        if (node->flags & NODE_DETACHED)
            return true;
        if (node->flags & NODE_ROOT)
            return false;
        parent = node_at(radix, node->parent);
        if (node->first_idx != parent->first_idx + parent->cut)
            return true;
        node = parent;
    }
}

void node_trim(struct kvt_radix *radix, struct node *node)
{
    while (node->children_count == 0) {
        struct node *parent;
        uint64_t occupied;
        uint32_t keep;

        if (node->flags & NODE_ROOT) {
            root_free(radix, node);
            return;
        }
        occupied = node_occupied(radix, node);
        keep = occupied == 0 ? 0 : 64 - (uint32_t)__builtin_clzll(occupied);
        keep = KVT_MAX(keep, node_leased_blocks(radix, node));
        if (keep < node->cut) {
            if (node->cut == node->count)
                node_truncate(radix, node, keep);
            else
                node_lower_cut(radix, node, keep);
            if (keep > 0)
                node_summarise(radix, node);
        }
        if (keep > 0) {
            hole_refresh(radix, node);
            if (node->cut == node->count)
                node_shrink(radix, node);
            break;
        }
        KVT_ASSERT(node->places == 0);
        parent = node_at(radix, node->parent);
        node_unlink(radix, node);
        if (node->flags & NODE_REAP) {
            hole_unlist(radix, node);
            node->flags |= NODE_DETACHED;
        } else {
            node_free(radix, node);
        }
        node = parent;
    }
    if (node->flags & NODE_ROOT)
        return;
    node = node_try_merge(radix, node);
    if (!(node_at(radix, node->parent)->flags & NODE_ROOT))
        (void)node_try_merge(radix, node_at(radix, node->parent));
}
