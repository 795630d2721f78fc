/* Looking: counters for people, and the recount that tests and a debug request call. */
#include <string.h>

#include "daemon/base/alloc.h"
#include "daemon/engine/store_internal.h"

const char *kvt_store_drop_reason_text(enum kvt_store_drop_reason reason)
{
    static const char *const texts[KVT_DROP_REASONS] = {
        [KVT_DROP_EVICTED] = "evicted", [KVT_DROP_POLICY] = "policy",
        [KVT_DROP_BUDGET] = "budget",   [KVT_DROP_NO_LOWER] = "no_lower",
        [KVT_DROP_BAD] = "bad",         [KVT_DROP_REQUESTED] = "requested",
        [KVT_DROP_ABORTED] = "aborted", [KVT_DROP_LOST] = "lost",
    };

    return reason < KVT_DROP_REASONS ? texts[reason] : "unknown";
}

/* Of all zones, also of those that take nothing now. */
static struct kvt_slab_stats slab_stats(const struct kvt_store *store, uint32_t tier)
{
    uint32_t zones = KVT_MAX(store->tiers[tier].tier->zones_count, 1u);
    struct kvt_slab_stats sum, one;

    kvt_slab_zone_stats(store->tiers[tier].slab, 0, &sum);
    for (uint32_t i = 1; i < zones; i++) {
        kvt_slab_zone_stats(store->tiers[tier].slab, i, &one);
        sum.capacity_bytes += one.capacity_bytes;
        sum.slabs_bytes += one.slabs_bytes;
        sum.taken_bytes += one.taken_bytes;
        sum.taken_slots += one.taken_slots;
    }
    return sum;
}

void kvt_store_stats(const struct kvt_store *store, struct kvt_store_stats *ret_stats)
{
    struct kvt_store_stats stats = {
        .cells = store->cells_used,
        .memory_bytes = store->config.memory_bytes,
        .memory_used_bytes = store->memory_fixed_bytes + store->records_used * sizeof(struct cell),
        .claimed_cells = store->claimed,
        .jobs_waiting = store->queued[0] + store->queued[1] + store->waiting,
        .jobs_running = store->running,
        .coalesced = store->coalesced,
        .bounced = store->bounced,
        .verified_bad = store->verified_bad,
        .index = {.is_loading = kvt_store_is_loading(store),
                  .loaded_blocks = store->load.blocks,
                  .loaded_copies = store->load.copies,
                  .load_dropped = store->load.dropped,
                  .waiting = store->todo_end - store->todo_done,
                  .skipped = store->index_skipped,
                  .stale = store->index_stale},
    };

    for (uint32_t i = 0; i < KVT_TIERS_COUNT; i++) {
        const struct store_tier *at = &store->tiers[i];

        if (at->tier == NULL)
            continue;
        stats.tiers[i].is_on = true;
        stats.tiers[i].slab = slab_stats(store, i);
        stats.memory_used_bytes += stats.tiers[i].slab.meta_bytes;
        stats.tiers[i].ready_copies = at->count[COPY_READY];
        stats.tiers[i].pinned_copies = at->pinned;
        stats.tiers[i].filling_copies = at->count[COPY_FILLING];
        stats.tiers[i].draining_copies = at->count[COPY_DRAINING];
        stats.tiers[i].inflight = at->inflight;
        stats.tiers[i].written_back = at->written_back;
        memcpy(stats.tiers[i].dropped, at->dropped, sizeof(at->dropped));
    }
    for (uint32_t i = 0; i < store->zones_count; i++) {
        const struct store_zone *zone = &store->zones[i];

        kvt_slab_zone_stats(store->tiers[KVT_TIER_DISK].slab, i, &stats.zones[i].slab);
        stats.zones[i].out_ns = zone->out_since_ns == 0 ? 0 : store->now_ns - zone->out_since_ns;
        stats.zones[i].is_lost = zone->is_dropped;
        stats.zones[i].is_kept = zone->index != NULL && !zone->is_index_lost;
    }
    kvt_store_l1_stats(store, &stats);
    *ret_stats = stats;
}

/* ---- the recount ---------------------------------------------------------------------------- */

struct recount {
    uint64_t count[KVT_TIERS_COUNT][COPY_STATES];
    uint64_t pinned[KVT_TIERS_COUNT], slots[KVT_TIERS_COUNT];
    uint64_t cells, claimed, records, unsaved, held;
    uint64_t bits[KVT_RADIX_BITS];
    uint32_t *pins; /* a cell and tier; counted from the moves, then taken off */
    const char *why;
};

static bool fail(struct recount *recount, const char *why)
{
    recount->why = why;
    return false;
}

static bool count_moves(struct kvt_store *store, struct recount *recount)
{
    uint32_t used = 0, xfers = 0, jobs = 0;

    for (uint32_t i = 1; i <= store->moves_max; i++) {
        const struct move *move = &store->moves[i];

        if (!move->is_used)
            continue;
        used++;
        xfers += move->shards_left;
        jobs += move->job != NULL;
        if (move->cell == 0)
            continue;
        recount->pins[move->cell * KVT_TIERS_COUNT + move->src]++;
        if (move->kind == MOVE_COPY)
            recount->pins[move->cell * KVT_TIERS_COUNT + move->dst]++;
    }
    if (used != store->moves_used)
        return fail(recount, "moves in use differ from their count");
    if (xfers != store->xfers_used)
        return fail(recount, "transfers of moves differ from transfers in use");
    if (jobs != store->running)
        return fail(recount, "jobs of moves differ from running jobs");
    return true;
}

static bool check_slots(struct kvt_store *store, struct recount *recount, struct cell *cell,
                        uint32_t tier)
{
    const struct store_component *component = kvt_store_component(store, cell);

    for (uint32_t i = 0; i < component->shards; i++) {
        struct kvt_slot slot = *kvt_store_slot(store, cell, tier, i);

        if (cell->copies[tier].state == COPY_NONE) {
            if (slot.idx != 0 || slot.generation != 0)
                return fail(recount, "a slot without a copy");
            continue;
        }
        if (!kvt_slab_is_current(store->tiers[tier].slab, slot))
            return fail(recount, "a copy's slot is somebody else's");
        if (kvt_slab_owner(store->tiers[tier].slab, slot) != kvt_store_cell_idx(store, cell))
            return fail(recount, "a slot's owner is not its cell");
        recount->slots[tier]++;
    }
    return true;
}

static bool check_mask(struct kvt_store *store, struct recount *recount, struct cell *cell)
{
    uint32_t expected = cell->is_claimed ? 1u << KVT_RADIX_BIT_HOLD : 0;
    struct kvt_radix_cell at;

    for (uint32_t tier = 0; tier < KVT_TIERS_COUNT; tier++) {
        if (cell->copies[tier].state == COPY_READY)
            expected |= 1u << tier;
        if (cell->copies[tier].state == COPY_DRAINING)
            expected |= 1u << (tier + KVT_STORE_BITS_DRAINING);
    }
    if (expected == 0)
        return fail(recount, "a cell that the tree has no bit of is not an orphan");
    if (kvt_radix_get(store->radix, cell->block, cell->component, &at) != 0)
        return fail(recount, "a cell's block is stale but it is not an orphan");
    if (at.mask != expected)
        return fail(recount, "the tree's mask differs from the copies' states");
    if (at.handle != kvt_store_cell_idx(store, cell))
        return fail(recount, "the tree's handle is another cell");
    for (uint32_t bit = 0; bit < KVT_RADIX_BITS; bit++)
        recount->bits[bit] += expected >> bit & 1u;
    return true;
}

static bool check_cell(struct kvt_store *store, struct recount *recount, struct cell *cell)
{
    uint32_t idx = kvt_store_cell_idx(store, cell);
    const char *why = kvt_store_l1_check_cell(store, cell, idx);

    if (why != NULL)
        return fail(recount, why);
    recount->cells++;
    recount->records += 1 + kvt_store_component(store, cell)->shards / 2;
    recount->claimed += cell->is_claimed;
    recount->unsaved += kvt_store_is_unsaved(cell);
    if (cell->is_orphan && cell->is_claimed)
        return fail(recount, "a claimed orphan");
    for (uint32_t tier = 0; tier < KVT_TIERS_COUNT; tier++) {
        uint32_t state = cell->copies[tier].state, pins = cell->copies[tier].pins;

        recount->count[tier][state]++;
        recount->pinned[tier] += pins > 0;
        if (tier == KVT_TIER_DEVICE && pins >= recount->pins[idx * KVT_TIERS_COUNT + tier])
            recount->held += pins - recount->pins[idx * KVT_TIERS_COUNT + tier];
        else if (pins != recount->pins[idx * KVT_TIERS_COUNT + tier])
            return fail(recount, "pins differ from the moves that use a copy");
        recount->pins[idx * KVT_TIERS_COUNT + tier] = 0;
        if (state == COPY_DOOMED && pins == 0)
            return fail(recount, "a doomed copy that nobody pins");
        if (cell->is_orphan && state != COPY_NONE && state != COPY_DOOMED)
            return fail(recount, "an orphan with a live copy");
        if (tier == KVT_TIER_DISK && cell->is_indexed && state != COPY_READY)
            return fail(recount, "a copy that is not on L3 is said to be durable there");
        if (state == COPY_FILLING && pins == 0 && !cell->is_claimed)
            return fail(recount, "a filling copy that nobody fills");
        if (state != COPY_NONE && store->tiers[tier].tier == NULL)
            return fail(recount, "a copy in a tier that is off");
        if (store->tiers[tier].tier != NULL && !check_slots(store, recount, cell, tier))
            return false;
    }
    return cell->is_orphan || check_mask(store, recount, cell);
}

static bool check_totals(const struct kvt_store *store, struct recount *recount)
{
    struct kvt_radix_stats radix;
    struct kvt_slab_stats slab;

    if (recount->cells != store->cells_used || recount->records != store->records_used)
        return fail(recount, "cells in use differ from their count");
    if (recount->claimed != store->claimed)
        return fail(recount, "claimed cells differ from their count");
    if (recount->held != store->l1.held)
        return fail(recount, "pins differ from moves and readers in place");
    if (recount->unsaved != store->unsaved)
        return fail(recount, "cells that L3 lacks differ from their count");
    for (uint32_t tier = 0; tier < KVT_TIERS_COUNT; tier++) {
        const struct store_tier *at = &store->tiers[tier];

        if (at->tier == NULL)
            continue;
        for (uint32_t state = COPY_FILLING; state < COPY_STATES; state++)
            if (recount->count[tier][state] != at->count[state])
                return fail(recount, "copies of a state differ from their count");
        if (recount->pinned[tier] != at->pinned)
            return fail(recount, "pinned copies differ from their count");
        slab = slab_stats(store, tier);
        if (recount->slots[tier] != slab.taken_slots)
            return fail(recount, "slots of copies differ from slots taken");
        if (slab.taken_bytes > at->capacity_bytes)
            return fail(recount, "more taken than the tier's capacity");
        if (!kvt_slab_check(at->slab, &recount->why))
            return false;
    }
    kvt_radix_stats(store->radix, &radix);
    for (uint32_t bit = 0; bit < KVT_RADIX_BITS; bit++)
        if (!kvt_radix_has_detached(store->radix) && radix.cells_at[bit] != recount->bits[bit])
            return fail(recount, "the tree's count of a bit differs from the copies");
    return true;
}

static bool check_jobs(const struct kvt_store *store, struct recount *recount)
{
    uint32_t armed = 0;

    for (uint32_t i = 0; i < 2; i++) {
        uint32_t count = 0;

        kvt_list_for_each (link, &store->queue[i])
            count++;
        if (count != store->queued[i])
            return fail(recount, "queued jobs differ from their count");
        armed += count;
    }
    armed += store->waiting;
    if (store->heap_count < armed || store->heap_count > armed + store->running)
        return fail(recount, "a waiting job has no deadline");
    for (uint32_t i = 0; i < store->heap_count; i++)
        if (store->heap[i]->heap_idx != i ||
            (i > 0 && store->heap[(i - 1) / 2]->deadline_ns > store->heap[i]->deadline_ns))
            return fail(recount, "the heap of deadlines is out of order");
    return true;
}

bool kvt_store_check(const struct kvt_store *const_store, const char **ret_why)
{
    struct kvt_store *store = (struct kvt_store *)(uintptr_t)const_store; /* only read */
    struct recount recount = {.why = "no memory for the recount"};
    bool is_good = true;

    recount.pins =
        kvt_alloc_zeroed(((size_t)store->records_fresh + 1) * KVT_TIERS_COUNT, sizeof(uint32_t));
    if (recount.pins == NULL)
        is_good = false;
    is_good = is_good && count_moves(store, &recount);
    for (uint32_t i = 1; is_good && i <= store->records_fresh; i++)
        if (store->cells[i].is_used)
            is_good = check_cell(store, &recount, &store->cells[i]);
    for (size_t i = 0; is_good && i < ((size_t)store->records_fresh + 1) * KVT_TIERS_COUNT; i++)
        if (recount.pins[i] != 0)
            is_good = fail(&recount, "a move of a cell that is free");
    is_good = is_good && check_totals(store, &recount) && check_jobs(store, &recount);
    kvt_free(recount.pins);
    if (!is_good)
        *ret_why = recount.why;
    return is_good;
}
