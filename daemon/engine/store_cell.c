/* Cells: the records of what has copies, their slots, states and pins. Every change of a copy's
 * state goes through this file, and with it the tree's mask, so that the two cannot differ. */
#include <string.h>

#include "daemon/base/alloc.h"
#include "daemon/engine/store_internal.h"

#define BIT(tier) ((uint8_t)(1u << (tier)))
#define BIT_DRAIN(tier) ((uint8_t)(1u << ((tier) + KVT_STORE_BITS_DRAINING)))
#define BIT_HOLD ((uint8_t)(1u << KVT_RADIX_BIT_HOLD))
#define RECORD_NONE 0u

static void try_free(struct kvt_store *store, struct cell *cell);

/* ---- records -------------------------------------------------------------------------------- */

static uint32_t record_take(struct kvt_store *store)
{
    uint32_t idx = store->records_free;

    if (idx != RECORD_NONE) {
        store->records_free = store->cells[idx].more;
    } else {
        if (store->records_fresh == store->records_max)
            return RECORD_NONE;
        idx = ++store->records_fresh;
    }
    store->records_used++;
    return idx;
}

static void record_give(struct kvt_store *store, uint32_t idx)
{
    uint32_t generation = store->cells[idx].generation + 1;

    memset(&store->cells[idx], 0, sizeof(store->cells[idx]));
    store->cells[idx].generation = generation == 0 ? 1 : generation;
    store->cells[idx].more = store->records_free;
    store->records_free = idx;
    store->records_used--;
}

static struct cell_more *more_at(struct kvt_store *store, uint32_t idx)
{
    return (struct cell_more *)(void *)&store->cells[idx];
}

struct kvt_slot *kvt_store_slot(struct kvt_store *store, struct cell *cell, uint32_t tier,
                                uint32_t shard)
{
    struct cell_more *more;
    uint32_t idx = cell->more, at;

    if (shard == 0)
        return &cell->slots[tier];
    for (uint32_t skip = (shard - 1) / 2; skip > 0; skip--)
        idx = more_at(store, idx)->next;
    KVT_ASSERT(idx != RECORD_NONE);
    more = more_at(store, idx);
    at = (shard - 1) % 2 * KVT_TIERS_COUNT + tier;
    return at < 4 ? &more->low[at] : &more->high[at - 4];
}

uint32_t kvt_store_cell_idx(const struct kvt_store *store, const struct cell *cell)
{
    return (uint32_t)(cell - store->cells);
}

struct cell *kvt_store_cell_at(const struct kvt_store *store, struct kvt_cell handle)
{
    struct cell *cell;

    if (handle.idx == 0 || handle.idx > store->records_max)
        return NULL;
    cell = &store->cells[handle.idx];
    if (!cell->is_used || cell->is_orphan || cell->generation != handle.generation)
        return NULL;
    return cell;
}

/* ---- digests of roots ----------------------------------------------------------------------- */

static uint32_t *digest_bucket(const struct kvt_store *store, const uint8_t *bytes)
{
    uint64_t hash;

    memcpy(&hash, bytes, sizeof(hash)); /* SHA-256: any part of it is a hash */
    return &store->digest_buckets[hash % store->digests_max];
}

static uint32_t digest_ref(struct kvt_store *store, const uint8_t *bytes)
{
    uint32_t *bucket = digest_bucket(store, bytes), idx;

    for (idx = *bucket; idx != 0; idx = store->digests[idx].next) {
        if (memcmp(store->digests[idx].bytes, bytes, KVT_FINGERPRINT_BYTES) == 0) {
            store->digests[idx].refs++;
            return idx;
        }
    }
    idx = store->digests_free;
    if (idx != 0)
        store->digests_free = store->digests[idx].next;
    else if (store->digests_fresh < store->digests_max)
        idx = ++store->digests_fresh;
    else
        return 0;
    memcpy(store->digests[idx].bytes, bytes, KVT_FINGERPRINT_BYTES);
    store->digests[idx].refs = 1;
    store->digests[idx].next = *bucket;
    *bucket = idx;
    return idx;
}

static void digest_unref(struct kvt_store *store, uint32_t idx)
{
    struct digest *digest = &store->digests[idx];
    uint32_t *link;

    KVT_ASSERT(idx != 0 && digest->refs > 0);
    if (--digest->refs > 0)
        return;
    for (link = digest_bucket(store, digest->bytes); *link != idx;)
        link = &store->digests[*link].next;
    *link = digest->next;
    digest->next = store->digests_free;
    store->digests_free = idx;
}

const void *kvt_store_root_key_of(const struct kvt_store *store, const uint8_t *bytes,
                                  uint32_t *ret_bytes)
{
    for (uint32_t idx = *digest_bucket(store, bytes); idx != 0; idx = store->digests[idx].next) {
        const struct digest *digest = &store->digests[idx];

        if (memcmp(digest->bytes, bytes, KVT_FINGERPRINT_BYTES) != 0)
            continue;
        /* A key is the same in every namespace. Dead: NULL. */
        return kvt_radix_root_key(store->radix, digest->block, ret_bytes);
    }
    return NULL;
}

/* ---- states and pins ------------------------------------------------------------------------ */

static uint32_t class_of(struct kvt_store *store, const struct cell *cell, uint32_t tier)
{
    return kvt_store_component(store, cell)->class_idx[tier];
}

void kvt_store_set_state(struct kvt_store *store, struct cell *cell, uint32_t tier,
                         enum copy_state state)
{
    struct store_tier *at = &store->tiers[tier];
    enum copy_state was = cell->copies[tier].state;
    struct store_component *component = kvt_store_component(store, cell);
    bool was_unsaved = kvt_store_is_unsaved(cell);

    at->count[was]--;
    at->count[state]++;
    if (was == COPY_NONE && state != COPY_NONE)
        component->cells_at[tier]++;
    if (was != COPY_NONE && state == COPY_NONE)
        component->cells_at[tier]--;
    if (was == COPY_DRAINING)
        at->class_of[class_of(store, cell, tier)].draining_slots -= component->shards;
    if (state == COPY_DRAINING)
        at->class_of[class_of(store, cell, tier)].draining_slots += component->shards;
    cell->copies[tier].state = (uint16_t)(state & 7u);
    store->unsaved += kvt_store_is_unsaved(cell);
    store->unsaved -= was_unsaved;
}

void kvt_store_pin(struct kvt_store *store, struct cell *cell, uint32_t tier)
{
    KVT_ASSERT(cell->copies[tier].state != COPY_NONE);
    KVT_ASSERT(cell->copies[tier].pins < CELL_PINS_MAX);
    if (cell->copies[tier].pins == 0)
        store->tiers[tier].pinned++;
    cell->copies[tier].pins = (uint16_t)((cell->copies[tier].pins + 1u) & CELL_PINS_MAX);
}

static void free_slots(struct kvt_store *store, struct cell *cell, uint32_t tier)
{
    struct store_tier *at = &store->tiers[tier];
    uint32_t shards = kvt_store_component(store, cell)->shards;

    KVT_ASSERT(cell->copies[tier].pins == 0);
    for (uint32_t i = 0; i < shards; i++) {
        struct kvt_slot *slot = kvt_store_slot(store, cell, tier, i);

        kvt_slab_give(at->slab, *slot);
        *slot = KVT_SLOT_NONE;
    }
    at->class_of[class_of(store, cell, tier)].taken_slots -= shards;
    kvt_store_set_state(store, cell, tier, COPY_NONE);
    store->is_woken = true;
}

void kvt_store_unpin(struct kvt_store *store, struct cell *cell, uint32_t tier)
{
    KVT_ASSERT(cell->copies[tier].pins > 0);
    cell->copies[tier].pins = (uint16_t)((cell->copies[tier].pins - 1u) & CELL_PINS_MAX);
    if (cell->copies[tier].pins > 0)
        return;
    store->tiers[tier].pinned--;
    if (cell->copies[tier].state == COPY_DOOMED)
        free_slots(store, cell, tier);
    try_free(store, cell);
}

static void give_taken(struct kvt_store *store, struct cell *cell, uint32_t tier, uint32_t taken)
{
    while (taken-- > 0) {
        struct kvt_slot *slot = kvt_store_slot(store, cell, tier, taken);

        kvt_slab_give(store->tiers[tier].slab, *slot);
        *slot = KVT_SLOT_NONE;
    }
}

/* L3: every shard in one zone: a copy is lost with one device, not with any of several. */
static bool take_in(struct kvt_store *store, struct cell *cell, uint32_t tier, uint32_t zone)
{
    const struct store_component *component = kvt_store_component(store, cell);
    struct kvt_slab *slab = store->tiers[tier].slab;
    uint32_t idx = kvt_store_cell_idx(store, cell), taken;

    for (taken = 0; taken < component->shards; taken++)
        if (kvt_slab_take_in(slab, component->class_idx[tier], zone, idx,
                             kvt_store_slot(store, cell, tier, taken)) != 0)
            break;
    if (taken == component->shards)
        return true;
    give_taken(store, cell, tier, taken);
    return false;
}

/* L1 and L2: each shard where its rank is at home, or in any other zone. */
static bool take_near(struct kvt_store *store, struct cell *cell, uint32_t tier)
{
    const struct store_component *component = kvt_store_component(store, cell);
    uint32_t zones = KVT_MAX(store->tiers[tier].tier->zones_count, 1u), taken;
    uint32_t idx = kvt_store_cell_idx(store, cell);

    for (taken = 0; taken < component->shards; taken++) {
        uint32_t first = kvt_store_first_zone(store, cell, tier, taken), i;

        for (i = 0; i < zones; i++)
            if (kvt_slab_take_in(store->tiers[tier].slab, component->class_idx[tier],
                                 (first + i) % zones, idx,
                                 kvt_store_slot(store, cell, tier, taken)) == 0)
                break;
        if (i == zones)
            break;
    }
    if (taken == component->shards)
        return true;
    give_taken(store, cell, tier, taken);
    return false;
}

static void count_taken(struct kvt_store *store, struct cell *cell, uint32_t tier)
{
    const struct store_component *component = kvt_store_component(store, cell);

    store->tiers[tier].class_of[component->class_idx[tier]].taken_slots += component->shards;
    kvt_store_set_state(store, cell, tier, COPY_FILLING);
}

bool kvt_store_take_slots(struct kvt_store *store, struct cell *cell, uint32_t tier)
{
    uint32_t first;

    KVT_ASSERT(cell->copies[tier].state == COPY_NONE);
    if (tier != KVT_TIER_DISK) {
        if (!take_near(store, cell, tier))
            return false;
        count_taken(store, cell, tier);
        return true;
    }
    first = kvt_store_pick_zone(store, cell);
    for (uint32_t i = 0; i < store->zones_count; i++) {
        uint32_t zone = (first + i) % store->zones_count;

        /* What its index has not named yet only looks free. */
        if (!store->zones[zone].is_loading && take_in(store, cell, tier, zone)) {
            count_taken(store, cell, tier);
            kvt_store_zone_used(store, cell, zone);
            return true;
        }
    }
    return false;
}

/* ---- the tree's mask ------------------------------------------------------------------------ */

/* Puts @set first and drops @clear after, so that the cell stays alive in between. False when the
 * tree has lost it: then the cell is an orphan (and may be free). */
static bool change_mask(struct kvt_store *store, struct cell *cell, uint8_t set, uint8_t clear,
                        enum kvt_store_drop_reason reason)
{
    uint32_t handle = kvt_store_cell_idx(store, cell);
    uint8_t mask = set;

    KVT_ASSERT(!cell->is_orphan);
    if (set != 0 && kvt_radix_put(store->radix, cell->block, cell->component, set, handle) != 0) {
        /* Detached or dead. A detached block still counts its bits: give them all back. */
        (void)!kvt_radix_drop(store->radix, cell->block, cell->component, UINT8_MAX, NULL);
        kvt_store_orphan(store, cell, KVT_DROP_REQUESTED);
        return false;
    }
    if (clear != 0 && kvt_radix_drop(store->radix, cell->block, cell->component, clear, &mask) != 0)
        mask = 0;
    if (mask == 0) {
        kvt_store_orphan(store, cell, reason);
        return false;
    }
    return true;
}

/* What an index says of places is input, and a device may be smaller than it was: what lies behind
 * its end is not the next device's. */
static bool is_in_zone(const struct kvt_store *store, uint32_t zone,
                       const struct kvt_index_put *copy, uint32_t shard)
{
    const struct kvt_tier *disk = store->tiers[KVT_TIER_DISK].tier;
    uint64_t bytes = zone < disk->zones_count ? disk->zones[zone].bytes : disk->capacity_bytes;

    return copy->slot_bytes <= bytes && copy->slot_offsets[shard] <= bytes - copy->slot_bytes &&
           copy->run_offsets[shard] <= copy->slot_offsets[shard];
}

bool kvt_store_adopt(struct kvt_store *store, struct cell *cell, uint32_t zone,
                     const struct kvt_index_put *copy)
{
    uint64_t base_bytes = store->zones[zone].base_bytes;
    struct store_component *component = kvt_store_component(store, cell);
    uint32_t idx = kvt_store_cell_idx(store, cell), taken;
    struct kvt_slab *slab = store->tiers[KVT_TIER_DISK].slab;

    for (taken = 0; taken < component->shards; taken++)
        if (!is_in_zone(store, zone, copy, taken) ||
            kvt_slab_adopt(slab, component->class_idx[KVT_TIER_DISK],
                           base_bytes + copy->slot_offsets[taken],
                           base_bytes + copy->run_offsets[taken], idx,
                           kvt_store_slot(store, cell, KVT_TIER_DISK, taken)) != 0)
            break;
    if (taken < component->shards) {
        give_taken(store, cell, KVT_TIER_DISK, taken);
        kvt_store_orphan(store, cell, KVT_DROP_ABORTED);
        return false;
    }
    cell->content_low = (uint32_t)copy->content;
    cell->content_high = (uint16_t)(copy->content >> 32);
    count_taken(store, cell, KVT_TIER_DISK);
    kvt_store_set_state(store, cell, KVT_TIER_DISK, COPY_READY);
    cell->is_indexed = 1;
    return change_mask(store, cell, BIT(KVT_TIER_DISK), 0, KVT_DROP_REQUESTED);
}

bool kvt_store_make_ready(struct kvt_store *store, struct cell *cell, uint32_t tier)
{
    if (cell->copies[tier].state != COPY_FILLING || cell->is_orphan)
        return false;
    kvt_store_set_state(store, cell, tier, COPY_READY);
    store->is_woken = true;
    return change_mask(store, cell, BIT(tier), 0, KVT_DROP_REQUESTED);
}

bool kvt_store_begin_drain(struct kvt_store *store, struct cell *cell, uint32_t tier)
{
    KVT_ASSERT(cell->copies[tier].state == COPY_READY);
    kvt_store_set_state(store, cell, tier, COPY_DRAINING);
    return change_mask(store, cell, BIT_DRAIN(tier), BIT(tier), KVT_DROP_REQUESTED);
}

bool kvt_store_end_drain(struct kvt_store *store, struct cell *cell, uint32_t tier)
{
    KVT_ASSERT(cell->copies[tier].state == COPY_DRAINING);
    kvt_store_set_state(store, cell, tier, COPY_READY);
    return change_mask(store, cell, BIT(tier), BIT_DRAIN(tier), KVT_DROP_REQUESTED);
}

static void release_copy(struct kvt_store *store, struct cell *cell, uint32_t tier,
                         enum kvt_store_drop_reason reason)
{
    if (cell->copies[tier].state == COPY_NONE || cell->copies[tier].state == COPY_DOOMED)
        return;
    if (tier == KVT_TIER_DISK && cell->copies[tier].state != COPY_FILLING)
        kvt_store_index_forget(store, cell);
    store->tiers[tier].dropped[reason]++;
    if (cell->copies[tier].pins > 0)
        kvt_store_set_state(store, cell, tier, COPY_DOOMED);
    else
        free_slots(store, cell, tier);
}

void kvt_store_let_go(struct kvt_store *store, struct cell *cell, uint32_t tier,
                      enum kvt_store_drop_reason reason)
{
    enum copy_state was = cell->copies[tier].state;
    uint8_t clear = 0;

    if (was == COPY_READY)
        clear = BIT(tier);
    else if (was == COPY_DRAINING)
        clear = BIT_DRAIN(tier);
    release_copy(store, cell, tier, reason);
    if (clear == 0 || cell->is_orphan) {
        try_free(store, cell);
        return;
    }
    if (reason == KVT_DROP_BAD)
        kvt_store_remember_lost(store, cell, KVT_WHY_CHECK_FAILED);
    (void)change_mask(store, cell, 0, clear, reason);
}

void kvt_store_lose(struct kvt_store *store, struct cell *cell)
{
    if (cell->copies[KVT_TIER_DEVICE].state == COPY_FILLING && cell->is_claimed)
        (void)change_mask(store, cell, 0, BIT_HOLD, KVT_DROP_LOST);
    else
        kvt_store_let_go(store, cell, KVT_TIER_DEVICE, KVT_DROP_LOST);
}

void kvt_store_orphan(struct kvt_store *store, struct cell *cell, enum kvt_store_drop_reason reason)
{
    KVT_ASSERT(!cell->is_orphan);
    cell->is_orphan = 1;
    if (cell->is_claimed) {
        cell->is_claimed = 0;
        store->claimed--;
    }
    for (uint32_t tier = 0; tier < KVT_TIERS_COUNT; tier++)
        release_copy(store, cell, tier, reason);
    store->is_woken = true; /* jobs that wait for it find it stale */
    try_free(store, cell);
}

/* An orphan with nothing left goes back to the pool. */
static void try_free(struct kvt_store *store, struct cell *cell)
{
    uint32_t more = cell->more;

    if (!cell->is_orphan)
        return;
    for (uint32_t tier = 0; tier < KVT_TIERS_COUNT; tier++)
        if (cell->copies[tier].state != COPY_NONE)
            return;
    KVT_ASSERT(cell->moves == 0);
    digest_unref(store, cell->digest);
    while (more != RECORD_NONE) {
        uint32_t next = more_at(store, more)->next;

        record_give(store, more);
        more = next;
    }
    store->cells_used--;
    record_give(store, kvt_store_cell_idx(store, cell));
}

/* ---- claims --------------------------------------------------------------------------------- */

static struct cell *cell_new(struct kvt_store *store, struct kvt_radix_block block,
                             uint32_t component, const uint8_t *root_digest)
{
    uint32_t ns = kvt_radix_ns_of(store->radix, block).idx, digest, idx;
    uint32_t records = 1 + store->ns[ns].components[component].shards / 2;
    struct cell *cell;
    uint64_t stamp;

    if (store->records_max - store->records_used < records)
        return NULL;
    stamp = kvt_store_stamp(store);
    digest = stamp == 0 ? 0 : digest_ref(store, root_digest);
    if (digest == 0)
        return NULL;
    store->digests[digest].block = block;
    idx = record_take(store);
    cell = &store->cells[idx];
    if (cell->generation == 0)
        cell->generation = 1;
    cell->block = block;
    cell->ns = (uint16_t)(ns & 63u);
    cell->component = (uint16_t)(component & 7u);
    cell->digest = digest;
    cell->more = RECORD_NONE;
    for (uint32_t i = 1; i < records; i++) {
        uint32_t more = record_take(store);

        memset(more_at(store, more)->low, 0, sizeof(more_at(store, more)->low));
        memset(more_at(store, more)->high, 0, sizeof(more_at(store, more)->high));
        more_at(store, more)->next = cell->more;
        cell->more = more;
    }
    cell->content_low = (uint32_t)stamp;
    cell->content_high = (uint16_t)(stamp >> 32);
    cell->is_used = 1;
    store->cells_used++;
    return cell;
}

struct cell *kvt_store_cell_make(struct kvt_store *store, struct kvt_radix_block block,
                                 uint32_t component, const uint8_t *root_digest)
{
    return cell_new(store, block, component, root_digest);
}

enum kvt_claim kvt_store_claim(struct kvt_store *store, struct kvt_radix_block block,
                               uint32_t component, const uint8_t root_digest[KVT_FINGERPRINT_BYTES],
                               struct kvt_cell *ret_cell)
{
    struct kvt_radix_cell at;
    struct cell *cell;
    uint32_t idx;

    if (store->is_draining || kvt_radix_get(store->radix, block, component, &at) != 0)
        return KVT_CLAIM_NO_ROOM;
    if (at.mask != 0) {
        /* Lost with a GPU and not dropped so far: that would take its block from under the caller.
         * It is missed a moment later, and may be stored again then. */
        cell = &store->cells[at.handle];
        *ret_cell = (struct kvt_cell){at.handle, cell->generation};
        return cell->is_claimed ? KVT_CLAIM_PENDING : KVT_CLAIM_PRESENT;
    }
    cell = cell_new(store, block, component, root_digest);
    if (cell == NULL)
        return KVT_CLAIM_NO_ROOM;
    idx = kvt_store_cell_idx(store, cell);
    if (kvt_radix_put(store->radix, block, component, BIT_HOLD, idx) != 0) {
        kvt_store_orphan(store, cell, KVT_DROP_ABORTED);
        return KVT_CLAIM_NO_ROOM;
    }
    cell->is_claimed = 1;
    store->claimed++;
    *ret_cell = (struct kvt_cell){idx, cell->generation};
    return KVT_CLAIM_MINE;
}

void kvt_store_unclaim(struct kvt_store *store, struct kvt_cell handle)
{
    struct cell *cell = kvt_store_cell_at(store, handle);

    if (cell == NULL || !cell->is_claimed)
        return;
    (void)change_mask(store, cell, 0, BIT_HOLD, KVT_DROP_ABORTED);
}

bool kvt_store_fill_complete(struct kvt_store *store, struct cell *cell)
{
    uint32_t tier =
        cell->copies[KVT_TIER_DEVICE].state == COPY_FILLING ? KVT_TIER_DEVICE : KVT_TIER_HOST;

    KVT_ASSERT(cell->is_claimed && cell->copies[tier].state == COPY_FILLING);
    cell->is_claimed = 0;
    store->claimed--;
    kvt_store_set_state(store, cell, tier, COPY_READY);
    store->is_woken = true;
    return change_mask(store, cell, BIT(tier), BIT_HOLD, KVT_DROP_REQUESTED);
}

/* ---- looking and dropping ------------------------------------------------------------------- */

struct kvt_cell kvt_store_cell(const struct kvt_store *store, struct kvt_radix_block block,
                               uint32_t component)
{
    struct kvt_radix_cell at;

    if (kvt_radix_get(store->radix, block, component, &at) != 0 || at.mask == 0)
        return KVT_CELL_NONE;
    return kvt_store_cell_of(store, at.handle);
}

struct kvt_cell kvt_store_cell_of(const struct kvt_store *store, uint32_t radix_handle)
{
    if (radix_handle == KVT_RADIX_HANDLE_NONE || radix_handle > store->records_max)
        return KVT_CELL_NONE;
    return (struct kvt_cell){radix_handle, store->cells[radix_handle].generation};
}

uint8_t kvt_store_ready_mask(const struct kvt_store *store, struct kvt_cell handle)
{
    const struct cell *cell = kvt_store_cell_at(store, handle);
    uint8_t mask = 0;

    if (cell == NULL)
        return 0;
    for (uint32_t tier = 0; tier < KVT_TIERS_COUNT; tier++)
        if (kvt_store_is_readable(cell, tier))
            mask = (uint8_t)(mask | BIT(tier));
    if (kvt_store_l1_is_lost(store, cell))
        mask = (uint8_t)(mask & ~BIT(KVT_TIER_DEVICE));
    return mask;
}

uint32_t kvt_store_filled_mask(const struct kvt_store *store, struct kvt_cell handle)
{
    const struct cell *cell = kvt_store_cell_at(store, handle);

    return cell == NULL ? 0 : cell->filled;
}

uint64_t kvt_store_cell_bytes(const struct kvt_store *store, struct kvt_cell handle)
{
    const struct cell *cell = kvt_store_cell_at(store, handle);
    const struct store_component *component;

    if (cell == NULL)
        return 0;
    component = &store->ns[cell->ns].components[cell->component];
    return component->payload_bytes * component->shards;
}

void kvt_store_drop(struct kvt_store *store, struct kvt_cell handle)
{
    struct cell *cell = kvt_store_cell_at(store, handle);

    if (cell == NULL)
        return;
    /* Stale is fine: then the tree has forgotten it already. */
    (void)!kvt_radix_drop(store->radix, cell->block, cell->component, UINT8_MAX, NULL);
    kvt_store_orphan(store, cell, KVT_DROP_REQUESTED);
}

/* ---- recent losses -------------------------------------------------------------------------- */

static struct lost *lost_at(const struct kvt_store *store, uint64_t block_id, uint32_t component)
{
    uint64_t hash = (block_id * 8 + component) * 0x9e3779b97f4a7c15ull;

    return &store->lost[(hash >> 32) % STORE_LOST_ENTRIES];
}

void kvt_store_remember_lost(struct kvt_store *store, const struct cell *cell, enum kvt_why why)
{
    uint64_t block_id = kvt_radix_block_id(cell->block);

    *lost_at(store, block_id, cell->component) =
        (struct lost){.block_id = block_id, .component = cell->component, .why = (uint32_t)why};
}

enum kvt_why kvt_store_why_lost(const struct kvt_store *store, struct kvt_radix_block block,
                                uint32_t component)
{
    uint64_t block_id = kvt_radix_block_id(block);
    const struct lost *lost = lost_at(store, block_id, component);

    if (lost->why != KVT_WHY_NONE && lost->block_id == block_id && lost->component == component)
        return (enum kvt_why)lost->why;
    return KVT_WHY_EVICTED;
}

/* ---- memory --------------------------------------------------------------------------------- */

int kvt_store_cells_init(struct kvt_store *store, size_t bytes)
{
    size_t digest_bytes = sizeof(struct digest) + sizeof(uint32_t), digests, records;

    digests = KVT_MIN(bytes / 16 / digest_bytes, (size_t)65536);
    if (digests == 0)
        return -EINVAL;
    records = (bytes - digests * digest_bytes) / sizeof(struct cell);
    records = KVT_MIN(records, (size_t)UINT32_MAX / 2);
    if (records < 2)
        return -EINVAL;
    store->records_max = (uint32_t)(records - 1);
    store->digests_max = (uint32_t)digests;
    /* Pages that are never used are never touched: so not from kvt_alloc_aligned. */
    store->cells_memory = kvt_alloc_zeroed(records + 1, sizeof(struct cell));
    store->cells = (void *)kvt_round_up((uintptr_t)store->cells_memory, KVT_CACHE_LINE_BYTES);
    store->digests = kvt_alloc_zeroed(digests + 1, sizeof(struct digest));
    store->digest_buckets = kvt_alloc_zeroed(digests, sizeof(uint32_t));
    store->lost = kvt_alloc_zeroed(STORE_LOST_ENTRIES, sizeof(struct lost));
    if (store->cells_memory == NULL || store->digests == NULL || store->digest_buckets == NULL ||
        store->lost == NULL)
        return -ENOMEM;
    return 0;
}

void kvt_store_cells_deinit(struct kvt_store *store)
{
    kvt_free(store->cells_memory);
    kvt_free(store->digests);
    kvt_free(store->digest_buckets);
    kvt_free(store->lost);
    store->cells_memory = NULL;
    store->cells = NULL;
    store->digests = NULL;
    store->digest_buckets = NULL;
    store->lost = NULL;
}
