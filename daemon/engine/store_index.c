/* What L3's index is told, so that copies there outlive the daemon.
 *
 *   copy READY on L3 ──▶ todo ──put──▶ index of its zone ──committed──▶ durable (is_indexed)
 *   copy or block goes ─────────put──▶ index            (a full ring: over `drops`, in order)
 *
 * A row of a block needs the rows of all blocks before it, so putting a copy puts, from the root
 * down, the rows that its device does not have yet: a block's tag in the tree says which devices
 * have its row, and a device that has a block's row has those of all before it. A row lives as long
 * as its block is in the tree.
 *
 * Numbers of blocks and contents ("stamps") come from one counter that is never set back, not even
 * by a restart: what a slot or a row calls a block can never mean another one.
 *
 * Rows are hints: a row that is stale (it could not be removed in time) points to a slot that holds
 * something else, and whoever reads a slot compares it with what the tree says. */
#include <string.h>

#include "daemon/base/alloc.h"
#include "daemon/base/clock.h"
#include "daemon/base/log.h"
#include "daemon/engine/store_internal.h"

#define STRIPE_BLOCKS_DEFAULT 16u
#define LOST_AFTER_NS_DEFAULT (30ull * KVT_NS_PER_S)
#define TAGS_BATCH 64u
#define EVENTS_A_TURN 2048u
#define QUEUES_SHARE 32u /* of the store's memory, one part in so many */
#define QUEUE_MIN 1024u
#define QUEUE_MAX 65536u
#define ZONE_CHECK_NS (100ull * KVT_NS_PER_MS)

/* ---- memory --------------------------------------------------------------------------------- */

/* As much as a commit's time brings, within a share of the memory. */
static uint32_t queue_max(const struct kvt_store_config *config)
{
    size_t share =
        config->memory_bytes / QUEUES_SHARE / (sizeof(struct todo) + sizeof(struct drop));

    return (uint32_t)KVT_MIN(KVT_MAX(share, (size_t)QUEUE_MIN), (size_t)QUEUE_MAX);
}

size_t kvt_store_index_bytes(const struct kvt_store_config *config)
{
    for (uint32_t i = 0; i < KVT_ZONES_MAX; i++)
        if (config->indexes[i] != NULL)
            return queue_max(config) * (sizeof(struct todo) + sizeof(struct drop));
    return 0;
}

static void zones_init(struct kvt_store *store)
{
    const struct kvt_tier *disk = store->config.tiers[KVT_TIER_DISK];

    if (disk == NULL)
        return;
    store->zones_count = KVT_MAX(disk->zones_count, 1u);
    for (uint32_t i = 0; i < store->zones_count; i++) {
        struct store_zone *zone = &store->zones[i];

        *zone = (struct store_zone){.index = store->config.indexes[i], .counters = &disk->counters};
        if (disk->zones_count > 0) {
            zone->counters = disk->zones[i].counters;
            zone->base_bytes = disk->zones[i].base_bytes;
        }
        if (zone->index == NULL)
            continue;
        store->is_kept = true;
        zone->is_loading = true;
    }
}

int kvt_store_index_init(struct kvt_store *store)
{
    kvt_list_init(&store->syncs);
    if (store->config.stripe_blocks == 0)
        store->config.stripe_blocks = STRIPE_BLOCKS_DEFAULT;
    if (store->config.lost_after_ns == 0)
        store->config.lost_after_ns = LOST_AFTER_NS_DEFAULT;
    store->stamp_next = KVT_MAX(store->config.stamp_first, (uint64_t)1);
    store->stamp_end = store->config.stamp_end != 0 ? store->config.stamp_end : STORE_STAMP_MASK;
    zones_init(store);
    if (!store->is_kept)
        return 0;
    store->queue_max = queue_max(&store->config);
    store->todo = kvt_alloc_zeroed(store->queue_max, sizeof(struct todo));
    store->drops = kvt_alloc_zeroed(store->queue_max, sizeof(struct drop));
    if (store->todo == NULL || store->drops == NULL)
        return -ENOMEM;
    return kvt_store_load_init(store);
}

void kvt_store_index_deinit(struct kvt_store *store)
{
    kvt_store_load_deinit(store);
    kvt_free(store->todo);
    kvt_free(store->drops);
    store->todo = NULL;
    store->drops = NULL;
}

/* ---- numbers -------------------------------------------------------------------------------- */

uint64_t kvt_store_stamp(struct kvt_store *store)
{
    return store->stamp_next < store->stamp_end ? store->stamp_next++ : 0;
}

uint64_t kvt_store_stamp_next(const struct kvt_store *store)
{
    return store->stamp_next;
}

void kvt_store_set_stamp_end(struct kvt_store *store, uint64_t stamp_end)
{
    KVT_ASSERT(stamp_end >= store->stamp_end);
    store->stamp_end = KVT_MIN(stamp_end, STORE_STAMP_MASK);
}

uint64_t kvt_store_block_id(struct kvt_store *store, struct kvt_radix_block block)
{
    uint64_t tag, id;

    if (!store->is_kept)
        return kvt_radix_block_id(block);
    if (block.generation == 0)
        return 0;
    tag = kvt_radix_tag(store->radix, block);
    if ((tag & STORE_STAMP_MASK) != 0)
        return tag & STORE_STAMP_MASK;
    id = kvt_store_stamp(store);
    if (id != 0)
        kvt_radix_set_tag(store->radix, block, tag | id);
    return id;
}

bool kvt_store_slot_info(struct kvt_store *store, const struct cell *cell, uint32_t shard,
                         struct kvt_slot_info *ret_info, const uint32_t **ret_tokens)
{
    const struct store_ns *ns = &store->ns[cell->ns];
    const uint8_t *extra_key = NULL;
    const uint32_t *tokens = kvt_radix_tokens(store->radix, cell->block, &extra_key);
    struct kvt_slot_info info = {
        .epoch = ns->epoch,
        .generation = kvt_store_content(cell),
        .payload_bytes = ns->components[cell->component].payload_bytes,
        .block_tokens = ns->block_tokens,
        .component = cell->component,
        .rank = (uint16_t)shard,
    };

    if (tokens == NULL)
        return false;
    info.block_id = kvt_store_block_id(store, cell->block);
    info.parent_id = kvt_store_block_id(store, kvt_radix_parent(store->radix, cell->block));
    info.block_idx = kvt_radix_depth_blocks(store->radix, cell->block) - 1;
    if (info.block_id == 0 || (info.parent_id == 0) != (info.block_idx == 0))
        return false;
    memcpy(info.fingerprint, ns->fingerprint, sizeof(info.fingerprint));
    memcpy(info.root_digest, store->digests[cell->digest].bytes, sizeof(info.root_digest));
    memcpy(info.store_id, store->config.store_id, sizeof(info.store_id));
    if (extra_key != NULL)
        memcpy(info.extra_key, extra_key, sizeof(info.extra_key));
    *ret_info = info;
    *ret_tokens = tokens;
    return true;
}

/* ---- what goes ------------------------------------------------------------------------------ */

static bool is_zone_kept(const struct store_zone *zone)
{
    return zone->index != NULL && !zone->is_index_lost;
}

static int put_drop(struct kvt_store *store, const struct drop *drop)
{
    struct store_zone *zone = &store->zones[drop->zone];
    const struct kvt_index_put put = {
        .kind = (enum kvt_index_put_kind)drop->kind,
        .key = {drop->ns, drop->epoch, drop->block_idx, drop->block_id},
        .component = drop->component,
    };

    return is_zone_kept(zone) ? kvt_index_put(zone->index, &put, &zone->seq_put) : 0;
}

/* In order: behind one that waits, all wait. */
static void put_drop_or_queue(struct kvt_store *store, const struct drop *drop)
{
    if (store->drops_count == 0 && put_drop(store, drop) == 0)
        return;
    if (store->drops_count == store->queue_max) {
        store->index_stale++;
        return;
    }
    store->drops[(store->drops_head + store->drops_count++) % store->queue_max] = *drop;
}

static bool put_queued_drops(struct kvt_store *store, uint32_t *budget)
{
    while (store->drops_count > 0 && *budget > 0) {
        if (put_drop(store, &store->drops[store->drops_head]) != 0)
            return false;
        store->drops_head = (store->drops_head + 1) % store->queue_max;
        store->drops_count--;
        (*budget)--;
    }
    return store->drops_count == 0;
}

bool kvt_store_index_has_room(const struct kvt_store *store)
{
    return !store->is_kept || store->drops_count < store->queue_max / 2;
}

/* A put of this copy that is not committed yet must not make a later copy of the cell durable. */
static void forget_todo(struct kvt_store *store, const struct cell *cell)
{
    uint32_t idx = kvt_store_cell_idx(store, cell);

    for (uint64_t at = store->todo_done; at < store->todo_put; at++)
        if (store->todo[at % store->queue_max].cell.idx == idx)
            store->todo[at % store->queue_max].seq = 0;
}

void kvt_store_index_forget(struct kvt_store *store, struct cell *cell)
{
    uint64_t tag;
    struct drop drop = {
        .epoch = store->ns[cell->ns].epoch,
        .ns = (uint16_t)store->ns[cell->ns].number,
        .component = cell->component,
        .kind = KVT_INDEX_PUT_DROP_COPY,
    };

    if (!store->is_kept)
        return;
    if (!cell->is_indexed)
        forget_todo(store, cell);
    cell->is_indexed = 0;
    drop.zone = (uint16_t)kvt_slab_zone(store->tiers[KVT_TIER_DISK].slab,
                                        *kvt_store_slot(store, cell, KVT_TIER_DISK, 0));
    tag = kvt_radix_tag(store->radix, cell->block);
    drop.block_id = tag & STORE_STAMP_MASK;
    if ((tag >> STORE_TAG_ZONES_SHIFT & 1ull << drop.zone) == 0)
        return; /* the zone never had its row, or the block is gone and its rows with it */
    /* Detached ones too: their rows go when they are reaped, but the slot is free before, and
     * whatever is put there next must come after this. */
    drop.block_idx = (uint32_t)kvt_radix_depth_blocks_any(store->radix, cell->block);
    KVT_ASSERT(drop.block_idx > 0); /* it has a tag, so it is there */
    drop.block_idx--;
    put_drop_or_queue(store, &drop);
}

void kvt_store_index_drop(struct kvt_store *store, uint32_t zone, const struct kvt_index_put *copy)
{
    const struct drop drop = {
        .epoch = copy->key.epoch,
        .block_id = copy->key.block_id,
        .block_idx = copy->key.block_idx,
        .ns = copy->key.ns,
        .component = copy->component,
        .zone = (uint16_t)zone,
        .kind = KVT_INDEX_PUT_DROP_COPY,
    };

    put_drop_or_queue(store, &drop);
}

void kvt_store_block_gone(struct kvt_store *store, const struct kvt_radix_gone *gone)
{
    uint32_t zones = (uint32_t)(gone->tag >> STORE_TAG_ZONES_SHIFT);
    struct drop drop = {
        .epoch = store->ns[gone->ns.idx].epoch,
        .block_id = gone->tag & STORE_STAMP_MASK,
        .block_idx = (uint32_t)gone->block_idx,
        .ns = (uint16_t)store->ns[gone->ns.idx].number,
        .kind = KVT_INDEX_PUT_DROP_ROW,
    };

    for (uint32_t i = 0; i < store->zones_count; i++) {
        drop.zone = (uint16_t)i;
        if ((zones & 1u << i) != 0)
            put_drop_or_queue(store, &drop);
    }
}

void kvt_store_index_reset(struct kvt_store *store, uint32_t ns)
{
    struct drop drop = {
        .epoch = store->ns[ns].epoch,
        .ns = (uint16_t)store->ns[ns].number,
        .kind = KVT_INDEX_PUT_DROP_OLD,
    };

    for (uint32_t i = 0; store->is_kept && i < store->zones_count; i++) {
        drop.zone = (uint16_t)i;
        put_drop_or_queue(store, &drop);
    }
}

/* ---- what comes ----------------------------------------------------------------------------- */

void kvt_store_index_want(struct kvt_store *store, struct cell *cell)
{
    if (!store->is_kept || cell->is_indexed)
        return;
    if (store->todo_end - store->todo_done == store->queue_max) {
        store->index_skipped++; /* the next durable Demote of it, or the drain, asks again */
        return;
    }
    store->todo[store->todo_end++ % store->queue_max] = (struct todo){
        .cell = {kvt_store_cell_idx(store, cell), cell->generation},
    };
}

void kvt_store_want_durable(struct kvt_store *store, struct kvt_cell handle)
{
    struct cell *cell = kvt_store_cell_at(store, handle);

    if (cell != NULL && kvt_store_is_readable(cell, KVT_TIER_DISK))
        kvt_store_index_want(store, cell);
}

/* The first block of the path to @end that @zone has no row of. */
static uint64_t first_missing(struct kvt_store *store, struct kvt_radix_block end, uint64_t blocks,
                              uint32_t zone)
{
    uint64_t tags[TAGS_BATCH], at = blocks;

    while (at > 0) {
        uint64_t count = KVT_MIN(at, (uint64_t)TAGS_BATCH);

        if (kvt_radix_tags(store->radix, end, at - count, count, tags) != 0)
            return blocks;
        for (uint64_t i = count; i > 0; i--)
            if ((tags[i - 1] >> STORE_TAG_ZONES_SHIFT & 1ull << zone) != 0)
                return at - count + i;
        at -= count;
    }
    return 0;
}

static int put_row(struct kvt_store *store, uint32_t zone, const struct cell *cell,
                   struct kvt_radix_block block, uint64_t block_idx, uint64_t parent_id)
{
    struct store_zone *at = &store->zones[zone];
    struct store_ns *ns = &store->ns[cell->ns];
    struct kvt_index_put put = {
        .kind = KVT_INDEX_PUT_ROW,
        .key = {(uint16_t)ns->number, ns->epoch, (uint32_t)block_idx, 0},
        .parent_id = parent_id,
        .tokens_count = ns->block_tokens,
    };
    int r;

    put.key.block_id = kvt_store_block_id(store, block);
    put.tokens = kvt_radix_tokens(store->radix, block, &put.extra_key);
    if (put.key.block_id == 0 || put.tokens == NULL)
        return -ESTALE;
    if (block_idx == 0)
        put.root_key = kvt_radix_root_key(store->radix, block, &put.root_key_bytes);
    r = kvt_index_put(at->index, &put, &at->seq_put);
    if (r == 0)
        kvt_radix_set_tag(store->radix, block,
                          kvt_radix_tag(store->radix, block) |
                              1ull << (STORE_TAG_ZONES_SHIFT + zone));
    return r;
}

/* The rows from the first that is missing down to the cell's own. 0, KVT_INDEX_E_FULL (some may be
 * put: it goes on there), or -ESTALE. */
static int put_rows(struct kvt_store *store, uint32_t zone, const struct cell *cell)
{
    uint64_t blocks = kvt_radix_depth_blocks(store->radix, cell->block), parent_id = 0;
    uint64_t at = first_missing(store, cell->block, blocks, zone);
    struct kvt_radix_cell path[TAGS_BATCH];
    int r = 0;

    if (blocks == 0)
        return -ESTALE;
    while (at < blocks && r == 0) {
        uint64_t first = at > 0 ? at - 1 : 0, count = KVT_MIN(blocks - first, (uint64_t)TAGS_BATCH);

        if (kvt_radix_path(store->radix, cell->block, 0, first, count, path) != 0)
            return -ESTALE;
        if (at > 0)
            parent_id = kvt_store_block_id(store, path[0].block);
        for (uint64_t i = at - first; i < count && r == 0; i++, at++) {
            r = put_row(store, zone, cell, path[i].block, at, parent_id);
            parent_id = kvt_store_block_id(store, path[i].block);
        }
        if (r != 0)
            return r;
    }
    return r;
}

static int put_copy(struct kvt_store *store, uint32_t zone, struct cell *cell)
{
    struct store_zone *at = &store->zones[zone];
    const struct store_component *component = kvt_store_component(store, cell);
    const struct kvt_slab *slab = store->tiers[KVT_TIER_DISK].slab;
    uint64_t slots[KVT_RANKS_MAX], runs[KVT_RANKS_MAX];
    const struct kvt_index_put put = {
        .kind = KVT_INDEX_PUT_COPY,
        .key = {(uint16_t)store->ns[cell->ns].number, store->ns[cell->ns].epoch,
                (uint32_t)(kvt_radix_depth_blocks(store->radix, cell->block) - 1),
                kvt_store_block_id(store, cell->block)},
        .component = cell->component,
        .shards_count = (uint16_t)component->shards,
        .content = kvt_store_content(cell),
        .slot_bytes = component->slot_bytes,
        .slot_offsets = slots,
        .run_offsets = runs,
    };

    for (uint32_t i = 0; i < component->shards; i++) {
        struct kvt_slot slot = *kvt_store_slot(store, cell, KVT_TIER_DISK, i);

        KVT_ASSERT(kvt_slab_zone(slab, slot) == zone);
        slots[i] = kvt_slab_offset(slab, slot) - at->base_bytes;
        runs[i] = kvt_slab_run_offset(slab, slot) - at->base_bytes;
    }
    return kvt_index_put(at->index, &put, &at->seq_put);
}

/* False: the index takes no more now. */
static bool put_todo(struct kvt_store *store, struct todo *todo)
{
    struct cell *cell = kvt_store_cell_at(store, todo->cell);
    struct store_zone *zone;
    int r;

    if (cell == NULL || cell->is_indexed || !kvt_store_is_readable(cell, KVT_TIER_DISK))
        return true;
    todo->zone = kvt_slab_zone(store->tiers[KVT_TIER_DISK].slab, cell->slots[KVT_TIER_DISK]);
    zone = &store->zones[todo->zone];
    if (!is_zone_kept(zone))
        return true;
    r = put_rows(store, todo->zone, cell);
    if (r == 0)
        r = put_copy(store, todo->zone, cell);
    if (r == 0)
        todo->seq = zone->seq_put;
    return r != KVT_INDEX_E_FULL;
}

/* What a commit settled: durable, unless something of it was refused; then all of it is as if it
 * had never been put, since it is not known what. */
static void settle_todo(struct kvt_store *store)
{
    for (; store->todo_done < store->todo_put; store->todo_done++) {
        struct todo *todo = &store->todo[store->todo_done % store->queue_max];
        struct cell *cell = kvt_store_cell_at(store, todo->cell);
        const struct store_zone *zone = &store->zones[todo->zone];

        if (todo->seq == 0 || cell == NULL || zone->is_index_lost)
            continue;
        if (todo->seq > zone->seq_committed)
            return;
        if (kvt_store_is_readable(cell, KVT_TIER_DISK))
            cell->is_indexed = 1;
    }
}

static void forget_refused(struct kvt_store *store, uint32_t zone, uint64_t seq)
{
    for (uint64_t at = store->todo_done; at < store->todo_put; at++) {
        struct todo *todo = &store->todo[at % store->queue_max];

        if (todo->zone == zone && todo->seq != 0 && todo->seq <= seq) {
            todo->seq = 0;
            store->index_skipped++;
        }
    }
}

/* ---- waiting for a commit ------------------------------------------------------------------- */

void kvt_store_index_sync(struct kvt_store *store, struct kvt_job *job)
{
    job->sync_pos = store->todo_end;
    job->state = JOB_WAITING;
    store->waiting++;
    kvt_list_push_back(&store->syncs, &job->link);
    store->is_woken = true;
}

void kvt_store_hasten(struct kvt_store *store)
{
    const struct kvt_index_put put = {.kind = KVT_INDEX_PUT_SYNC};

    for (uint32_t i = 0; i < store->zones_count; i++) {
        struct store_zone *zone = &store->zones[i];

        if (is_zone_kept(zone) && !zone->is_loading && zone->seq_put > zone->seq_synced &&
            kvt_index_put(zone->index, &put, &zone->seq_put) == 0)
            zone->seq_synced = zone->seq_put;
    }
}

static void end_syncs(struct kvt_store *store)
{
    while (!kvt_list_is_empty(&store->syncs)) {
        struct kvt_job *job = KVT_CONTAINER_OF(store->syncs.next, struct kvt_job, link);

        if (job->sync_pos > store->todo_done)
            return;
        kvt_store_end_job(store, job, KVT_MOVE_DONE);
    }
}

int kvt_store_catalog_put(struct kvt_store *store, uint32_t zone, uint32_t number, const void *data,
                          uint32_t bytes, uint64_t *ret_seq)
{
    struct store_zone *at = &store->zones[zone];
    const struct kvt_index_put put = {.kind = KVT_INDEX_PUT_CATALOG,
                                      .catalog_number = number,
                                      .catalog_data = data,
                                      .catalog_bytes = bytes};
    int r;

    KVT_ASSERT(zone < store->zones_count);
    *ret_seq = 0;
    if (!is_zone_kept(at))
        return 0;
    r = kvt_index_put(at->index, &put, &at->seq_put);
    if (r == 0)
        *ret_seq = at->seq_put;
    return r;
}

bool kvt_store_is_committed(const struct kvt_store *store, uint32_t zone, uint64_t seq)
{
    return seq <= store->zones[zone].seq_committed || !is_zone_kept(&store->zones[zone]);
}

bool kvt_store_zone_is_kept(const struct kvt_store *store, uint32_t zone)
{
    return zone < store->zones_count && is_zone_kept(&store->zones[zone]);
}

uint64_t kvt_store_zone_refused(const struct kvt_store *store, uint32_t zone)
{
    return store->zones[zone].refused;
}

uint32_t kvt_store_zones(const struct kvt_store *store)
{
    return store->zones_count;
}

bool kvt_store_is_durable(const struct kvt_store *store, struct kvt_cell handle)
{
    const struct cell *cell = kvt_store_cell_at(store, handle);

    /* Without an index nothing outlives the daemon: "durable" is what a flush makes of it. */
    return cell != NULL && (cell->is_indexed || !store->is_kept);
}

/* ---- the turn ------------------------------------------------------------------------------- */

static void tell_loaded(const struct kvt_store *store, uint32_t idx,
                        const struct kvt_index_event *event)
{
    const struct kvt_index_loaded *loaded = &event->loaded;

    kvt_log_info(
        "L3: %s: its index%s has %llu blocks with %llu copies, %llu rows did not hold, read "
        "in %llu ms%s%s",
        kvt_store_zone_name(store, idx), loaded->was_rebuilt ? ", made anew from its slots," : "",
        (unsigned long long)loaded->rows, (unsigned long long)loaded->copies,
        (unsigned long long)loaded->dropped, (unsigned long long)(loaded->took_ns / KVT_NS_PER_MS),
        event->why[0] != '\0' ? "; " : "", event->why);
    if (store->load.dropped > 0)
        kvt_log_warn(
            "L3: %llu blocks and copies of its indexes could not be taken: they do not fit "
            "the devices or the memory of the index any more",
            (unsigned long long)store->load.dropped);
}

static void take_event(struct kvt_store *store, uint32_t idx, const struct kvt_index_event *event)
{
    struct store_zone *zone = &store->zones[idx];

    switch (event->kind) {
    case KVT_INDEX_EVENT_ROW:
    case KVT_INDEX_EVENT_COPY:
        kvt_store_load_event(store, idx, event);
        break;
    case KVT_INDEX_EVENT_LOADED:
        kvt_store_load_event(store, idx, event);
        tell_loaded(store, idx, event);
        break;
    case KVT_INDEX_EVENT_COMMITTED:
        if (event->refused != zone->refused)
            forget_refused(store, idx, event->seq);
        zone->refused = event->refused;
        zone->seq_committed = event->seq;
        store->is_woken = true;
        break;
    case KVT_INDEX_EVENT_FAILED:
        kvt_store_load_event(store, idx, event);
        kvt_log_error("L3: the index of %s is lost: %s; nothing new is put there, what it holds is "
                      "served until the daemon stops; restart it to make the index anew",
                      kvt_store_zone_name(store, idx), event->why);
        zone->is_index_lost = true;
        store->is_woken = true;
        break;
    }
}

/* False: none now. A load stops in front of each stray: its parent may be on a device that has not
 * told all yet. */
static bool next_event(struct kvt_store *store, uint32_t idx, struct kvt_index_event *ret_event)
{
    struct store_zone *zone = &store->zones[idx];

    if (zone->is_at_stray || !kvt_index_next(zone->index, ret_event))
        return false;
    if (!zone->is_loading || !kvt_store_load_is_stray(store, ret_event))
        return true;
    zone->stray = *ret_event; /* it stays valid: nothing is asked of this index meanwhile */
    zone->is_at_stray = true;
    return false;
}

static bool take_some_events(struct kvt_store *store, uint32_t idx)
{
    struct kvt_index_event event;

    for (uint32_t i = 0; i < EVENTS_A_TURN; i++) {
        if (!next_event(store, idx, &event))
            return false;
        take_event(store, idx, &event);
    }
    return true;
}

/* The zone whose load goes on now: one after the other until all stand in front of a stray, then
 * the one with the least deep stray, whose parent is there by now if it ever will be. */
static uint32_t zone_to_load(const struct kvt_store *store)
{
    uint32_t least = UINT32_MAX;

    for (uint32_t i = 0; i < store->zones_count; i++) {
        const struct store_zone *zone = &store->zones[i];

        if (zone->is_loading && !zone->is_at_stray)
            return i;
        if (zone->is_loading &&
            (least == UINT32_MAX ||
             zone->stray.put.key.block_idx < store->zones[least].stray.put.key.block_idx))
            least = i;
    }
    return least;
}

static bool take_load_events(struct kvt_store *store, uint32_t idx)
{
    struct store_zone *zone = &store->zones[idx];
    bool is_more;

    if (zone->is_at_stray) {
        zone->is_at_stray = false;
        take_event(store, idx, &zone->stray);
    }
    is_more = take_some_events(store, idx);
    kvt_store_load_slice_end(store);
    /* Whose turn it is next gets no bell for it. */
    return is_more || zone->is_at_stray || !zone->is_loading;
}

static bool take_events(struct kvt_store *store)
{
    uint32_t loading = zone_to_load(store);
    bool is_more = false;

    for (uint32_t i = 0; i < store->zones_count; i++)
        if (store->zones[i].index != NULL && !store->zones[i].is_loading)
            is_more |= take_some_events(store, i);
    if (loading != UINT32_MAX)
        is_more |= take_load_events(store, loading);
    return is_more;
}

bool kvt_store_index_turn(struct kvt_store *store, uint32_t budget)
{
    bool is_more = take_events(store);

    for (uint32_t i = 0; i < store->zones_count; i++) {
        is_more |= kvt_store_zone_turn(store, i);
        kvt_store_progress_turn(store, i);
    }
    if (!store->is_kept)
        return is_more;
    settle_todo(store);
    if (put_queued_drops(store, &budget)) {
        for (; store->todo_put < store->todo_end && budget > 0; store->todo_put++, budget--)
            if (!put_todo(store, &store->todo[store->todo_put % store->queue_max]))
                break;
        is_more |= budget == 0;
    }
    settle_todo(store);
    if (!kvt_list_is_empty(&store->syncs) || store->is_draining || store->save.is_running)
        kvt_store_hasten(store);
    end_syncs(store);
    return is_more;
}

uint64_t kvt_store_index_next_ns(const struct kvt_store *store)
{
    bool is_waiting = store->drops_count > 0 || store->todo_put < store->todo_end;

    for (uint32_t i = 0; i < store->zones_count; i++)
        is_waiting |= store->zones[i].out_since_ns != 0 && !store->zones[i].is_dropped;
    /* A full ring rings no bell when it empties; nor does a device's health. */
    return is_waiting ? kvt_time_add(store->now_ns, ZONE_CHECK_NS / 10)
                      : kvt_store_progress_next_ns(store);
}

bool kvt_store_index_is_idle(const struct kvt_store *store)
{
    return store->drops_count == 0 && store->todo_done == store->todo_end;
}

bool kvt_store_is_loading(const struct kvt_store *store)
{
    for (uint32_t i = 0; i < store->zones_count; i++)
        if (store->zones[i].is_loading)
            return true;
    return false;
}

bool kvt_store_has_digest_roots(const struct kvt_store *store)
{
    return store->has_digest_roots;
}
