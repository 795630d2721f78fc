/* What L3's index says at start becomes blocks of the tree and copies of the store.
 *
 * Rows come depth first, a parent before its children, each with the copies of its block:
 *
 *   path   [0] [1] [2] ... [n-1]      the block that came last and all before it
 *   row of depth d: its parent is path[d-1]; what was deeper is complete and forgotten
 *
 * Devices are loaded one after the other; each has the rows of all blocks before its own, so the
 * second finds many of its blocks in the tree. But an index that was made anew from slots has only
 * the blocks of its own device: those whose parents lie elsewhere ("strays") come last, and are
 * taken when all other devices have told what they have; a parent is then found by its number.
 * Loading is done in slices between requests. Whatever does not fit is left out, with what is below
 * it: a block that somebody has stored anew meanwhile, slots that overlap or lie outside the
 * device, a full tree. Nothing here is trusted more than a hint: a slot is compared with the tree
 * when it is read. */
#include <string.h>

#include "daemon/base/alloc.h"
#include "daemon/base/hash.h"
#include "daemon/engine/store_internal.h"

#define LOAD_BLOCKS_MAX (1u << 18) /* deeper ones are left out */
#define NS_NONE UINT32_MAX
#define KNOWN_ROOM 4096u
#define DISPLACED_CELLS 65536u

int kvt_store_load_init(struct kvt_store *store)
{
    struct store_load *load = &store->load;

    load->path = kvt_alloc_zeroed(LOAD_BLOCKS_MAX, sizeof(load->path[0]));
    load->ids = kvt_alloc_zeroed(LOAD_BLOCKS_MAX, sizeof(load->ids[0]));
    return load->path == NULL || load->ids == NULL ? -ENOMEM : 0;
}

void kvt_store_load_deinit(struct kvt_store *store)
{
    kvt_free(store->load.known);
    store->load.known = NULL;
    kvt_free(store->load.path);
    kvt_free(store->load.ids);
    store->load.path = NULL;
    store->load.ids = NULL;
}

static uint32_t ns_by_number(const struct kvt_store *store, uint32_t number)
{
    for (uint32_t i = 0; i < store->ns_end; i++)
        if (store->ns[i].is_open && store->ns[i].number == number)
            return i;
    return NS_NONE;
}

static bool root_digest(struct kvt_store *store, const struct kvt_index_put *row)
{
    struct store_load *load = &store->load;

    if (row->root_key == NULL || row->root_key_bytes == 0)
        return false;
    if (row->root_key[0] != KVT_STORE_DIGEST_KEY_TAG)
        return kvt_sha256(row->root_key, row->root_key_bytes, load->digest) == 0;
    if (row->root_key_bytes != KVT_STORE_DIGEST_KEY_BYTES)
        return false;
    memcpy(load->digest, row->root_key + 1, KVT_FINGERPRINT_BYTES);
    store->has_digest_roots = true;
    return true;
}

/* ---- strays --------------------------------------------------------------------------------- */

bool kvt_store_load_is_stray(const struct kvt_store *store, const struct kvt_index_event *event)
{
    const struct store_load *load = &store->load;
    uint32_t depth = event->put.key.block_idx;

    return event->kind == KVT_INDEX_EVENT_ROW && depth > 0 &&
           (depth > load->path_blocks || load->ids[depth - 1] != event->put.parent_id) &&
           !(load->is_skipping && depth > load->path_blocks);
}

static struct load_known *known_at(const struct store_load *load, uint64_t id)
{
    uint64_t at = (id * 0x9e3779b97f4a7c15ull) % load->known_max;

    while (load->known[at].id != 0 && load->known[at].id != id)
        at = (at + 1) % load->known_max;
    return &load->known[at];
}

static void known_add(struct kvt_store *store, uint64_t id, struct kvt_radix_block block)
{
    struct store_load *load = &store->load;
    struct load_known *known;

    if (load->known == NULL || id == 0 || load->known_count >= load->known_max / 4 * 3)
        return;
    known = known_at(load, id);
    load->known_count += known->id == 0;
    *known = (struct load_known){id, block};
}

/* All blocks that have copies; without memory for it strays find no parents. */
static void known_make(struct kvt_store *store)
{
    struct store_load *load = &store->load;

    load->known_max = ((uint64_t)store->records_fresh + KNOWN_ROOM) * 2;
    load->known = kvt_alloc_zeroed(load->known_max, sizeof(*load->known));
    for (uint32_t i = 1; load->known != NULL && i <= store->records_fresh; i++) {
        const struct cell *cell = &store->cells[i];

        if (cell->is_used && !cell->is_orphan)
            known_add(store, kvt_radix_tag(store->radix, cell->block) & STORE_STAMP_MASK,
                      cell->block);
    }
}

static bool digest_of(struct kvt_store *store, struct kvt_radix_block block)
{
    struct kvt_index_put root = {0};

    root.root_key = kvt_radix_root_key(store->radix, block, &root.root_key_bytes);
    return root_digest(store, &root);
}

/* The path becomes that of the row's parent, which came from another device. */
static bool stray_find(struct kvt_store *store, const struct kvt_index_put *row)
{
    struct store_load *load = &store->load;
    uint32_t depth = row->key.block_idx;
    struct load_known *known;

    if (load->known == NULL)
        known_make(store);
    if (load->known == NULL || depth >= LOAD_BLOCKS_MAX)
        return false;
    known = known_at(load, row->parent_id);
    if (known->id == 0 || kvt_radix_depth_blocks(store->radix, known->block) != depth ||
        !digest_of(store, known->block))
        return false;
    load->ns = kvt_radix_ns_of(store->radix, known->block).idx;
    load->path[depth - 1] = known->block;
    load->ids[depth - 1] = row->parent_id;
    load->path_blocks = depth;
    return true;
}

/* ---- rows ----------------------------------------------------------------------------------- */

/* Between slices anything may be called on the tree: then what came last must not be dead. What was
 * held before is let go only when the next is held: a block whose copies are still to come is an
 * empty tail, and letting go of one removes it. */
static void hold(struct kvt_store *store, struct kvt_radix_block block)
{
    struct store_load *load = &store->load;
    struct kvt_radix_block before = load->leased;

    load->leased = KVT_RADIX_BLOCK_NONE;
    if (block.generation != 0 && kvt_radix_lease(store->radix, block) == 0)
        load->leased = block;
    if (before.generation != 0)
        (void)!kvt_radix_release(store->radix, before);
}

/* The path becomes @blocks long; returns where it ended if that was deeper. */
static struct kvt_radix_block cut_path(struct kvt_store *store, uint32_t blocks)
{
    struct store_load *load = &store->load;
    struct kvt_radix_block end = KVT_RADIX_BLOCK_NONE;

    if (load->path_blocks > blocks)
        end = load->path[load->path_blocks - 1];
    load->path_blocks = KVT_MIN(load->path_blocks, blocks);
    return end;
}

/* A tail that no copy came for is removed: only when what follows is in the tree, for they may
 * share blocks that have no copy themselves. */
static void settle(struct kvt_store *store, struct kvt_radix_block end)
{
    if (end.generation != 0)
        kvt_radix_settle(store->radix, end);
}

/* Whether the row can follow the path that is there. */
static bool row_fits(struct kvt_store *store, const struct kvt_index_put *row)
{
    struct store_load *load = &store->load;
    uint32_t depth = row->key.block_idx;

    if (depth == 0)
        load->ns = ns_by_number(store, row->key.ns);
    if (load->ns == NS_NONE || store->ns[load->ns].number != row->key.ns ||
        store->ns[load->ns].epoch != row->key.epoch ||
        store->ns[load->ns].block_tokens != row->tokens_count)
        return false;
    if (row->key.block_id == 0 || row->key.block_id > STORE_STAMP_MASK || depth >= LOAD_BLOCKS_MAX)
        return false;
    if (depth == 0)
        return root_digest(store, row);
    return load->path_blocks == depth && load->ids[depth - 1] == row->parent_id;
}

static bool has_row(const struct kvt_store *store, struct kvt_radix_block block)
{
    uint64_t tag = kvt_radix_tag(store->radix, block);

    return (tag >> STORE_TAG_ZONES_SHIFT & 1ull << store->load.zone) != 0;
}

/* One device may know the root's key and another, whose index was made anew, only its digest: both
 * have to find the same root. */
static void settle_root(struct kvt_store *store, struct kvt_radix_prefix *prefix)
{
    const struct store_load *load = &store->load;
    uint8_t digest_key[KVT_STORE_DIGEST_KEY_BYTES] = {KVT_STORE_DIGEST_KEY_TAG};
    const void *key = prefix->root_key;
    uint32_t bytes;

    if (*(const uint8_t *)key != KVT_STORE_DIGEST_KEY_TAG) {
        memcpy(digest_key + 1, load->digest, KVT_FINGERPRINT_BYTES);
        if (store->has_digest_roots) /* nothing of it came so far, or it has its key already */
            (void)!kvt_radix_root_rename(store->radix, prefix->ns, digest_key, sizeof(digest_key),
                                         key, prefix->root_key_bytes);
        return;
    }
    key = kvt_store_root_key_of(store, load->digest, &bytes);
    if (key == NULL)
        return;
    prefix->root_key = key;
    prefix->root_key_bytes = bytes;
}

/* Two devices, of which one was away or not as far as the other when the last daemon ended, may
 * have rows for the same tokens. The greater number is the later one: the other block had gone by
 * then, and so had all below it. What this daemon has stored itself is later still. */
static bool is_later(const struct kvt_store *store, uint64_t id, uint64_t than_id)
{
    return id > than_id && id < store->config.stamp_first;
}

/* The block and all below it make way, at once: their slots may be those of the later ones. */
static bool displace(struct kvt_store *store, struct kvt_radix_block block, uint32_t depth)
{
    struct store_load *load = &store->load;

    hold(store, depth > 0 ? load->path[depth - 1] : KVT_RADIX_BLOCK_NONE);
    if (kvt_radix_detach_block(store->radix, block) != 0)
        return false;
    (void)kvt_store_reap_detached(store, DISPLACED_CELLS);
    return true;
}

/* The row's block; it may have another number. */
static bool block_insert(struct kvt_store *store, const struct kvt_index_put *row,
                         struct kvt_radix_block *ret_block)
{
    struct store_load *load = &store->load;
    uint32_t depth = row->key.block_idx;
    struct kvt_radix_prefix prefix = {
        .ns = {load->ns},
        .root_key = row->root_key,
        .root_key_bytes = row->root_key_bytes,
        .after = depth == 0 ? KVT_RADIX_BLOCK_NONE : load->path[depth - 1],
        .tokens = row->tokens,
        .tokens_count = row->tokens_count,
        .extra_keys = (const uint8_t(*)[KVT_EXTRA_KEY_BYTES])row->extra_key,
        .is_untouched = true,
        .is_followed = true,
    };
    uint64_t new_blocks;

    if (depth == 0)
        settle_root(store, &prefix);
    return kvt_radix_insert(store->radix, &prefix, ret_block, &new_blocks) == 0;
}

static bool row_insert(struct kvt_store *store, const struct kvt_index_put *row)
{
    struct store_load *load = &store->load;
    uint32_t depth = row->key.block_idx;
    struct kvt_radix_block block;
    uint64_t tag, id;

    if (!block_insert(store, row, &block))
        return false;
    tag = kvt_radix_tag(store->radix, block);
    id = tag & STORE_STAMP_MASK;
    if (id != 0 && id != row->key.block_id) {
        /* Stored anew under another number: its slots call it by that. */
        if (!is_later(store, row->key.block_id, id) || !displace(store, block, depth) ||
            !block_insert(store, row, &block))
            return false;
        tag = 0;
    }
    load->path[depth] = block;
    load->ids[depth] = row->key.block_id;
    load->path_blocks = depth + 1;
    /* The device has its row, and those of all before it, unless it hangs below a stray. */
    if (depth == 0 || has_row(store, load->path[depth - 1]))
        tag |= 1ull << (STORE_TAG_ZONES_SHIFT + load->zone);
    kvt_radix_set_tag(store->radix, block, tag | row->key.block_id);
    known_add(store, row->key.block_id, block);
    load->blocks++;
    return true;
}

static void load_row(struct kvt_store *store, const struct kvt_index_put *row)
{
    struct store_load *load = &store->load;
    struct kvt_radix_block end;

    if (load->is_skipping && row->key.block_idx > load->path_blocks) {
        load->dropped++;
        return;
    }
    end = cut_path(store, row->key.block_idx);
    if (row->key.block_idx > 0 && (load->path_blocks < row->key.block_idx ||
                                   load->ids[row->key.block_idx - 1] != row->parent_id))
        (void)stray_find(store, row); /* else it does not fit */
    load->is_skipping = !row_fits(store, row) || !row_insert(store, row);
    settle(store, end);
    if (!load->is_skipping)
        return;
    load->dropped++;
    settle(store, cut_path(store, row->key.block_idx));
}

/* ---- copies --------------------------------------------------------------------------------- */

static void refuse_copy(struct kvt_store *store, const struct kvt_index_put *copy)
{
    store->load.dropped++;
    kvt_store_index_drop(store, store->load.zone, copy);
}

static bool copy_fits(const struct kvt_store *store, const struct kvt_index_put *copy)
{
    const struct store_ns *ns = &store->ns[store->load.ns];

    return copy->component < ns->components_count && copy->content != 0 &&
           copy->content <= STORE_STAMP_MASK &&
           copy->shards_count == ns->components[copy->component].shards &&
           copy->slot_bytes == ns->components[copy->component].slot_bytes;
}

/* The same of copies: the greater content is the later one. The block is not dead meanwhile. */
static bool give_way(struct kvt_store *store, struct kvt_radix_block block, struct cell *cell,
                     const struct kvt_index_put *copy)
{
    if (cell->is_claimed || cell->filled != 0 || cell->copies[KVT_TIER_DISK].state != COPY_READY ||
        cell->copies[KVT_TIER_DISK].pins > 0 ||
        !is_later(store, copy->content, kvt_store_content(cell)))
        return false;
    hold(store, block);
    kvt_store_let_go(store, cell, KVT_TIER_DISK, KVT_DROP_REQUESTED);
    return true;
}

static void load_copy(struct kvt_store *store, const struct kvt_index_put *copy)
{
    struct store_load *load = &store->load;
    struct kvt_radix_block block;
    struct kvt_radix_cell at;
    struct cell *cell;

    if (load->is_skipping) { /* its row goes at the next start: it has no copies then */
        refuse_copy(store, copy);
        return;
    }
    if (load->path_blocks == 0 || copy->key.block_id != load->ids[load->path_blocks - 1])
        return;
    block = load->path[load->path_blocks - 1];
    if (!copy_fits(store, copy) || kvt_radix_get(store->radix, block, copy->component, &at) != 0 ||
        (at.mask != 0 && !give_way(store, block, &store->cells[at.handle], copy))) {
        refuse_copy(store, copy);
        return;
    }
    cell = kvt_store_cell_make(store, block, copy->component, load->digest);
    if (cell == NULL || !kvt_store_adopt(store, cell, load->zone, copy)) {
        refuse_copy(store, copy);
        return;
    }
    load->copies++;
    if (has_row(store, block))
        return;
    cell->is_indexed = 0; /* it is, but not on its path: that is put now */
    kvt_store_index_want(store, cell);
}

/* ---- the load ------------------------------------------------------------------------------- */

static void load_end(struct kvt_store *store, uint32_t zone, const struct kvt_index_event *event)
{
    struct store_load *load = &store->load;

    hold(store, KVT_RADIX_BLOCK_NONE);
    settle(store, cut_path(store, 0));
    load->is_skipping = false;
    store->zones[zone].is_loading = false;
    store->is_woken = true;
    if (event->kind == KVT_INDEX_EVENT_LOADED) {
        uint64_t seen = KVT_MAX(event->loaded.block_id_max, event->loaded.content_max);

        if (seen <= STORE_STAMP_MASK) /* what is above came from damage: no number is that great */
            store->stamp_next = KVT_MAX(store->stamp_next, seen + 1);
    }
    if (!kvt_store_is_loading(store))
        kvt_store_load_deinit(store);
}

void kvt_store_load_event(struct kvt_store *store, uint32_t zone,
                          const struct kvt_index_event *event)
{
    if (!store->zones[zone].is_loading)
        return;
    store->load.zone = zone;
    switch (event->kind) {
    case KVT_INDEX_EVENT_ROW:
        load_row(store, &event->put);
        break;
    case KVT_INDEX_EVENT_COPY:
        load_copy(store, &event->put);
        break;
    default:
        load_end(store, zone, event);
    }
}

void kvt_store_load_slice_end(struct kvt_store *store)
{
    const struct store_load *load = &store->load;

    hold(store, load->path_blocks > 0 ? load->path[load->path_blocks - 1] : KVT_RADIX_BLOCK_NONE);
}

uint64_t kvt_store_loaded_copies(const struct kvt_store *store)
{
    return store->load.copies;
}

bool kvt_store_is_holding(const struct kvt_store *store)
{
    return store->load.leased.generation != 0;
}
