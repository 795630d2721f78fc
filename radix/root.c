/* Roots: one for each (namespace, root key) that has blocks; a node of no blocks whose data is the
 * key. They are in the buckets like children, with no parent, and on a list of their namespace.
 * A root goes with its last child. Engine thread only. */
#include "daemon/base/hash.h"

#include "radix/internal.h"

static uint32_t root_hash(const struct kvt_radix *radix, uint32_t ns_idx, const void *key,
                          uint32_t key_bytes)
{
    uint64_t hash = kvt_hash64(key, key_bytes, radix->seed + ns_idx);

    return (uint32_t)(hash ^ hash >> 32);
}

struct node *root_find(const struct kvt_radix *radix, uint32_t ns_idx, const void *key,
                       uint32_t key_bytes)
{
    uint32_t hash = root_hash(radix, ns_idx, key, key_bytes);
    uint32_t ref = radix->buckets[bucket_of(radix, 0, hash)];

    while (ref != 0) {
        struct node *node = node_at(radix, ref);

        if (node->parent == 0 && node->hash == hash && node->ns_idx == ns_idx &&
            (node->flags & NODE_ROOT) && node->key_bytes == key_bytes &&
            (key_bytes == 0 || memcmp(ref_ptr(radix, node->data), key, key_bytes) == 0))
            return node;
        ref = node->hash_next;
    }
    return NULL;
}

struct node *root_new(struct kvt_radix *radix, uint32_t ns_idx, const void *key, uint32_t key_bytes)
{
    struct ns *ns = &radix->namespaces[ns_idx];
    struct node *node;
    void *data;

    KVT_ASSERT(key_bytes <= RADIX_ROOT_KEY_BYTES_MAX);
    if (radix->roots >= radix->roots_max)
        return NULL;
    node = pool_take(&radix->pool, CLASS_NODE);
    data = node == NULL ? NULL : pool_take(&radix->pool, pool_class_of(&radix->pool, key_bytes));
    if (data == NULL) {
        if (node != NULL) {
            *node = (struct node){0}; /* not in use: see dump_start */
            pool_give(&radix->pool, node);
        }
        return NULL;
    }
    *node = (struct node){.data = ref_of(radix, data),
                          .ns_idx = ns_idx,
                          .flags = NODE_ROOT,
                          .key_bytes = key_bytes,
                          .hash = root_hash(radix, ns_idx, key, key_bytes)};
    if (key_bytes > 0)
        memcpy(data, key, key_bytes);
    bucket_insert(radix, node);
    node->sib_next = ns->roots_head;
    if (node->sib_next != 0)
        node_at(radix, node->sib_next)->sib_prev = ref_of(radix, node);
    ns->roots_head = ref_of(radix, node);
    ns->roots++;
    radix->roots++;
    return node;
}

void root_unlink(struct kvt_radix *radix, struct node *root)
{
    struct ns *ns = ns_of(radix, root);

    KVT_ASSERT((root->flags & NODE_ROOT) && !(root->flags & NODE_DETACHED));
    bucket_remove(radix, root);
    if (root->sib_next != 0)
        node_at(radix, root->sib_next)->sib_prev = root->sib_prev;
    if (root->sib_prev != 0)
        node_at(radix, root->sib_prev)->sib_next = root->sib_next;
    else
        ns->roots_head = root->sib_next;
    root->sib_next = root->sib_prev = 0;
    ns->roots--;
    radix->roots--;
}

void root_free(struct kvt_radix *radix, struct node *root)
{
    KVT_ASSERT((root->flags & NODE_ROOT) && root->first_child == 0 && root->dead_child == 0);
    if (!(root->flags & NODE_DETACHED))
        root_unlink(radix, root);
    pool_give(&radix->pool, ref_ptr(radix, root->data));
    root->flags = 0; /* not in use: see dump_start */
    pool_give(&radix->pool, root);
}

int kvt_radix_root_rename(struct kvt_radix *radix, struct kvt_radix_ns ns, const void *old_key,
                          uint32_t old_key_bytes, const void *new_key, uint32_t new_key_bytes)
{
    struct pool *pool = &radix->pool;
    struct node *root;
    uint32_t cls;
    void *data, *old_data;

    KVT_DEBUG_ASSERT(!radix->is_in_hook);
    KVT_ASSERT(ns.idx < radix->namespaces_max && new_key_bytes <= RADIX_ROOT_KEY_BYTES_MAX);
    root = root_find(radix, ns.idx, old_key, old_key_bytes);
    if (root == NULL)
        return KVT_RADIX_E_STALE;
    if (root_find(radix, ns.idx, new_key, new_key_bytes) != NULL)
        return KVT_RADIX_E_EXISTS;
    cls = pool_class_of(pool, new_key_bytes);
    data = old_data = ref_ptr(radix, root->data);
    if (cls != pool_class_of(pool, root->key_bytes))
        data = pool_take(pool, cls);
    if (data == NULL)
        return KVT_RADIX_E_NO_ROOM;
    if (new_key_bytes > 0)
        memmove(data, new_key,
                new_key_bytes); /* it may be a part of the old key, as it lies here */
    if (data != old_data)
        pool_give(pool, old_data);
    root->data = ref_of(radix, data);
    root->key_bytes = new_key_bytes;
    bucket_remove(radix, root); /* finds it by the old hash */
    root->hash = root_hash(radix, ns.idx, data, new_key_bytes);
    bucket_insert(radix, root);
    return 0;
}
