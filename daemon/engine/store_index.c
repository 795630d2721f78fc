/* What L3's index is told, so that copies there outlive the daemon. What it is told to forget is in
 * store_drop.c, what it says itself in store_events.c.
 *
 *   copy READY on L3 ──▶ todo ──put──▶ index of its zone ──committed──▶ durable (is_indexed)
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
#include "daemon/engine/store_internal.h"

#define STRIPE_BLOCKS_DEFAULT 16u
#define LOST_AFTER_NS_DEFAULT (30ull * KVT_NS_PER_S)
#define TAGS_BATCH 64u
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
    store->drops_max = store->queue_max / store->zones_count;
    store->todo = kvt_alloc_zeroed(store->queue_max, sizeof(struct todo));
    store->drops = kvt_alloc_zeroed(store->queue_max, sizeof(struct drop));
    if (store->todo == NULL || store->drops == NULL)
        return -ENOMEM;
    for (uint32_t i = 0; i < store->zones_count; i++)
        store->zones[i].drops = store->drops + (size_t)i * store->drops_max;
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

/* ---- what comes ----------------------------------------------------------------------------- */

/* The next durable Demote of it asks again, and so does a save. */
static void skip(struct kvt_store *store)
{
    store->index_skipped++;
    store->has_skipped = true;
}

static void want(struct kvt_store *store, struct cell *cell, bool is_whole)
{
    if (!store->is_kept || cell->is_indexed)
        return;
    if (!kvt_store_index_has_todo_room(store)) {
        skip(store);
        return;
    }
    store->todo[store->todo_end++ % store->queue_max] = (struct todo){
        .cell = {kvt_store_cell_idx(store, cell), cell->generation},
        .is_whole = is_whole,
    };
}

bool kvt_store_index_has_todo_room(const struct kvt_store *store)
{
    return store->todo_end - store->todo_done < store->queue_max;
}

void kvt_store_index_want(struct kvt_store *store, struct cell *cell)
{
    want(store, cell, false);
}

void kvt_store_index_want_again(struct kvt_store *store, struct cell *cell)
{
    uint32_t zone = kvt_slab_zone(store->tiers[KVT_TIER_DISK].slab, cell->slots[KVT_TIER_DISK]);

    /* Rows above it may be among those that were refused, though their blocks' tags say that they
     * were put. */
    want(store, cell, store->zones[zone].refused > 0);
}

void kvt_store_want_durable(struct kvt_store *store, struct kvt_cell handle)
{
    struct cell *cell = kvt_store_cell_at(store, handle);

    if (cell != NULL && kvt_store_is_readable(cell, KVT_TIER_DISK))
        kvt_store_index_want_again(store, cell);
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

/* The rows from block *inout_at of the path down to the cell's own. 0; KVT_INDEX_E_FULL or -EAGAIN
 * (the budget is used up): it goes on at *inout_at; or -ESTALE. */
static int put_rows(struct kvt_store *store, uint32_t zone, const struct cell *cell,
                    uint64_t *inout_at, uint32_t *inout_budget)
{
    uint64_t blocks = kvt_radix_depth_blocks(store->radix, cell->block), parent_id = 0;
    struct kvt_radix_cell path[TAGS_BATCH];

    if (blocks == 0)
        return -ESTALE;
    while (*inout_at < blocks) {
        uint64_t first = *inout_at > 0 ? *inout_at - 1 : 0;
        uint64_t count = KVT_MIN(blocks - first, (uint64_t)TAGS_BATCH);

        if (kvt_radix_path(store->radix, cell->block, 0, first, count, path) != 0)
            return -ESTALE;
        if (*inout_at > 0)
            parent_id = kvt_store_block_id(store, path[0].block);
        for (uint64_t i = *inout_at - first; i < count; i++, ++*inout_at) {
            int r = *inout_budget == 0
                        ? -EAGAIN
                        : put_row(store, zone, cell, path[i].block, *inout_at, parent_id);

            if (r != 0)
                return r;
            parent_id = kvt_store_block_id(store, path[i].block);
            --*inout_budget;
        }
    }
    return 0;
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

static bool is_same_slot(struct kvt_slot a, struct kvt_slot b)
{
    return a.idx == b.idx && a.generation == b.generation;
}

/* Behind what the zone has to forget, and behind the record of the namespace's present epoch: else
 * rows of an epoch could be there that the catalog has never heard of, and gives once more. */
static int put_block(struct kvt_store *store, struct todo *todo, struct cell *cell,
                     uint32_t *inout_budget)
{
    uint64_t blocks = kvt_radix_depth_blocks(store->radix, cell->block);
    uint64_t at =
        todo->is_whole ? store->todo_row : first_missing(store, cell->block, blocks, todo->zone);
    int r;

    if (store->zones[todo->zone].drops_count > 0 || store->zones[todo->zone].is_record_first ||
        (store->ns[cell->ns].recorded & 1u << todo->zone) == 0)
        return KVT_INDEX_E_FULL;
    r = put_rows(store, todo->zone, cell, &at, inout_budget);
    store->todo_row = at;
    return r == 0 ? put_copy(store, todo->zone, cell) : r;
}

/* Nobody waits for a device that does not answer, or cannot be written. */
static bool is_hopeless(const struct kvt_store *store, const struct store_zone *zone,
                        const struct store_ns *ns)
{
    return zone->out_since_ns != 0 || (zone->is_loading && store->is_draining) ||
           (ns->record_refused & 1u << (zone - store->zones)) != 0;
}

/* 0: it is over with it. KVT_INDEX_E_FULL, -EAGAIN: later. */
static int put_todo(struct kvt_store *store, struct todo *todo, uint32_t *inout_budget)
{
    struct cell *cell = kvt_store_cell_at(store, todo->cell);
    struct store_zone *zone;
    int r;

    if (cell == NULL || cell->is_indexed || !kvt_store_is_readable(cell, KVT_TIER_DISK))
        return 0;
    todo->zone =
        (uint16_t)kvt_slab_zone(store->tiers[KVT_TIER_DISK].slab, cell->slots[KVT_TIER_DISK]);
    zone = &store->zones[todo->zone];
    if (!kvt_store_zone_has_index(zone) || store->ns[cell->ns].is_forgotten)
        return 0;
    r = put_block(store, todo, cell, inout_budget);
    if (r == 0) {
        todo->seq = zone->seq_put;
        todo->slot = cell->slots[KVT_TIER_DISK];
    } else if (r == KVT_INDEX_E_FULL && is_hopeless(store, zone, &store->ns[cell->ns])) {
        skip(store);
        r = 0;
    }
    return r == -ESTALE ? 0 : r;
}

static int put_todos(struct kvt_store *store, uint32_t *inout_budget)
{
    while (store->todo_put < store->todo_end) {
        int r =
            *inout_budget == 0
                ? -EAGAIN
                : put_todo(store, &store->todo[store->todo_put % store->queue_max], inout_budget);

        if (r != 0)
            return r;
        store->todo_put++;
        store->todo_row = 0;
        *inout_budget -= *inout_budget > 0;
    }
    return 0;
}

/* What a commit settled: durable, if it is still the copy that was put. */
static void settle_todo(struct kvt_store *store)
{
    for (; store->todo_done < store->todo_put; store->todo_done++) {
        struct todo *todo = &store->todo[store->todo_done % store->queue_max];
        struct cell *cell = kvt_store_cell_at(store, todo->cell);
        const struct store_zone *zone = &store->zones[todo->zone];

        if (todo->seq == 0 || cell == NULL || zone->is_index_lost)
            continue;
        if (todo->seq <= zone->seq_committed) {
            if (kvt_store_is_readable(cell, KVT_TIER_DISK) &&
                is_same_slot(todo->slot, cell->slots[KVT_TIER_DISK]))
                cell->is_indexed = 1;
        } else if (zone->out_since_ns == 0) {
            return;
        } else {
            skip(store);
        }
    }
}

/* Something of the commit was refused: all of it is as if it had never been put, since it is not
 * known what. */
static void forget_refused(struct kvt_store *store, uint32_t zone, uint64_t seq)
{
    for (uint64_t at = store->todo_done; at < store->todo_put; at++) {
        struct todo *todo = &store->todo[at % store->queue_max];

        if (todo->zone == zone && todo->seq != 0 && todo->seq <= seq) {
            todo->seq = 0;
            skip(store);
        }
    }
}

void kvt_store_index_committed(struct kvt_store *store, uint32_t idx,
                               const struct kvt_index_event *event)
{
    struct store_zone *zone = &store->zones[idx];

    if (event->refused - event->refused_catalogs != zone->refused)
        forget_refused(store, idx, event->seq);
    if (event->refused_catalogs != zone->refused_catalogs)
        kvt_store_records_refused(store, idx, event->seq);
    zone->refused = event->refused - event->refused_catalogs;
    zone->refused_catalogs = event->refused_catalogs;
    zone->seq_committed = event->seq;
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

        if (kvt_store_zone_has_index(zone) && !zone->is_loading &&
            zone->seq_put > zone->seq_synced &&
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

/* ---- the turn ------------------------------------------------------------------------------- */

bool kvt_store_index_turn(struct kvt_store *store, uint32_t budget)
{
    bool is_more = kvt_store_take_events(store);

    for (uint32_t i = 0; i < store->zones_count; i++) {
        is_more |= kvt_store_zone_turn(store, i);
        kvt_store_progress_turn(store, i);
    }
    if (!store->is_kept)
        return is_more;
    settle_todo(store);
    for (uint32_t i = 0; i < store->zones_count; i++)
        kvt_store_put_drops(store, i, &budget);
    is_more |= put_todos(store, &budget) == -EAGAIN || budget == 0;
    settle_todo(store);
    if (!kvt_list_is_empty(&store->syncs) || store->is_draining || store->save.is_running)
        kvt_store_hasten(store);
    end_syncs(store);
    return is_more;
}

uint64_t kvt_store_index_next_ns(const struct kvt_store *store)
{
    bool is_waiting = store->todo_put < store->todo_end;

    for (uint32_t i = 0; i < store->zones_count; i++)
        is_waiting |= store->zones[i].drops_count > 0 ||
                      (store->zones[i].out_since_ns != 0 && !store->zones[i].is_dropped);
    /* A full ring rings no bell when it empties; nor does a device's health. */
    return is_waiting ? kvt_time_add(store->now_ns, ZONE_CHECK_NS / 10)
                      : kvt_store_progress_next_ns(store);
}

bool kvt_store_index_is_idle(const struct kvt_store *store)
{
    for (uint32_t i = 0; i < store->zones_count; i++) {
        const struct store_zone *zone = &store->zones[i];

        if (zone->drops_count > 0 && zone->out_since_ns == 0 && !zone->is_loading)
            return false;
    }
    return store->todo_done == store->todo_end;
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
