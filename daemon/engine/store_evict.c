/* Room: who goes, and where to. The tree says in which order copies should leave a tier; the
 * policies say how much is kept free, whether a copy is worth a write, and which size gives way.
 *
 * A copy that exists elsewhere too is dropped at once. The only copy of an L1 block moves to L2, of
 * an L2 block to L3 if the write policy wants it; until the lower copy is READY it stays readable
 * (DRAINING). What cannot be moved is dropped and counted by reason: L3 never makes L2 wait.
 * Making room in a tier may start moves down, which make room in the tier below: the depth is the
 * number of tiers. */
#include "daemon/base/clock.h"
#include "daemon/engine/store_internal.h"

#define VICTIMS_BATCH 8u
#define BATCHES_MAX 16u /* of victims that cannot go */
#define ROOM_ROUNDS 4u
#define PAIRS_MAX (KVT_NAMESPACES_MAX * KVT_COMPONENTS_MAX)

enum gone { GONE_NOW, GONE_SOON, GONE_NOT };

bool kvt_store_is_lower_on(const struct kvt_store *store)
{
    for (uint32_t i = 0; i < store->zones_count; i++) {
        const struct store_zone *zone = &store->zones[i];

        if (!zone->is_loading && !zone->is_index_lost &&
            atomic_load_explicit(&zone->counters->health, memory_order_relaxed) ==
                KVT_TIER_HEALTH_OK)
            return true;
    }
    return false;
}

bool kvt_store_is_any_inflight(const struct kvt_store *store)
{
    return store->xfers_used > 0;
}

uint64_t kvt_store_room(const struct kvt_store *store, uint32_t tier, uint32_t class_idx)
{
    return kvt_slab_room_slots(store->tiers[tier].slab, class_idx);
}

static bool is_lower_busy(const struct kvt_store *store)
{
    const struct store_tier *disk = &store->tiers[KVT_TIER_DISK];

    return disk->pending_count + disk->inflight >= disk->tier->inflight_max ||
           !kvt_store_has_xfers(store, 1, true);
}

static enum kvt_write_verdict ask_write(struct kvt_store *store, struct cell *cell, bool is_evicted)
{
    const struct store_component *component = kvt_store_component(store, cell);
    struct kvt_write_facts facts = {
        .policy = store->config.write_policy,
        .is_evicted = is_evicted,
        .is_lower_on = kvt_store_is_lower_on(store),
        .touches = cell->touches,
        .selective_touches = store->config.selective_touches,
        .bytes = component->slot_bytes * component->shards,
    };

    facts.is_lower_busy = facts.is_lower_on && is_lower_busy(store);
    return kvt_write_decide(&facts, &store->bucket);
}

/* ---- one victim ----------------------------------------------------------------------------- */

static bool has_other_copy(const struct kvt_store *store, const struct cell *cell, uint32_t tier)
{
    for (uint32_t i = 0; i < KVT_TIERS_COUNT; i++)
        if (i != tier && cell->copies[i].state == COPY_READY &&
            (i != KVT_TIER_DEVICE || !kvt_store_l1_is_lost(store, cell)))
            return true;
    return false;
}

static enum gone move_down(struct kvt_store *store, struct cell *cell, uint32_t tier)
{
    struct kvt_cell handle = {kvt_store_cell_idx(store, cell), cell->generation};
    enum kvt_store_drop_reason reason = KVT_DROP_BUDGET;
    struct move *move;
    struct copy_options options = {
        .src = tier,
        .dst = tier + 1,
        .is_background = true,
        .is_evict = true,
        .reason = KVT_DROP_EVICTED,
    };

    switch (tier == KVT_TIER_HOST ? ask_write(store, cell, true) : KVT_WRITE_YES) {
    case KVT_WRITE_YES:
        if (kvt_store_start_copy(store, cell, &options, &move) == START_DONE)
            return GONE_SOON;
        cell = kvt_store_cell_at(store, handle); /* a failed start may have found it dead */
        if (cell == NULL)
            return GONE_NOW;
        break;
    case KVT_WRITE_NOT_WANTED:
        reason = KVT_DROP_POLICY;
        break;
    case KVT_WRITE_NO_BUDGET:
        break;
    case KVT_WRITE_NO_LOWER:
        reason = KVT_DROP_NO_LOWER;
        break;
    }
    /* L1 waits for what is already leaving L2; nothing waits for L3. */
    if (tier == KVT_TIER_DEVICE && store->tiers[KVT_TIER_HOST].count[COPY_DRAINING] > 0)
        return GONE_NOT;
    kvt_store_let_go(store, cell, tier, reason);
    return GONE_NOW;
}

/* From a device that gives no slots nothing goes for room: it would make none. */
static bool may_leave(const struct kvt_store *store, const struct cell *cell)
{
    uint32_t zone = kvt_slab_zone(store->tiers[KVT_TIER_DISK].slab, cell->slots[KVT_TIER_DISK]);

    return !store->zones[zone].is_closed && kvt_store_index_has_room_in(store, zone);
}

static enum gone evict_copy(struct kvt_store *store, struct cell *cell, uint32_t tier)
{
    if (cell->copies[tier].state != COPY_READY || cell->copies[tier].pins > 0)
        return GONE_NOT;
    if (tier == KVT_TIER_DISK && !may_leave(store, cell))
        return GONE_NOT;
    if (tier == KVT_TIER_DEVICE && kvt_store_l1_settle(store, cell))
        return GONE_NOW;
    if (has_other_copy(store, cell, tier)) {
        kvt_store_let_go(store, cell, tier, KVT_DROP_EVICTED);
        return GONE_NOW;
    }
    if (tier == KVT_TIER_DISK) {
        kvt_store_let_go(store, cell, tier, KVT_DROP_NO_LOWER);
        return GONE_NOW;
    }
    return move_down(store, cell, tier);
}

/* ---- victims of a class --------------------------------------------------------------------- */

/* The (namespace, component) whose next victim is the oldest, of class @class_idx (or of any other
 * class). Returns its age; UINT64_MAX: none. */
static uint64_t pick_pair(struct kvt_store *store, uint32_t tier, uint32_t class_idx, bool is_other,
                          struct kvt_radix_victims *ret_which)
{
    uint64_t ages[PAIRS_MAX];
    uint16_t pairs[PAIRS_MAX];
    uint32_t count = 0, best;

    for (uint32_t ns = 0; ns < store->ns_end; ns++) {
        if (!store->ns[ns].is_open)
            continue;
        for (uint32_t i = 0; i < store->ns[ns].components_count; i++) {
            const struct store_component *component = &store->ns[ns].components[i];
            struct kvt_radix_victims which = {tier, {ns}, i};

            if (component->cells_at[tier] == 0 ||
                (component->class_idx[tier] == class_idx) == is_other)
                continue;
            pairs[count] = (uint16_t)(ns * KVT_COMPONENTS_MAX + i);
            ages[count++] = kvt_radix_oldest(store->radix, &which);
        }
    }
    best = kvt_evict_pick(ages, count);
    if (best == KVT_EVICT_NONE)
        return UINT64_MAX;
    *ret_which = (struct kvt_radix_victims){
        tier, {pairs[best] / KVT_COMPONENTS_MAX}, pairs[best] % KVT_COMPONENTS_MAX};
    return ages[best];
}

struct evicted {
    uint32_t now, soon, not_now;
};

static enum gone evict_counted(struct kvt_store *store, struct cell *cell, uint32_t tier,
                               struct evicted *evicted)
{
    enum gone gone = evict_copy(store, cell, tier);

    evicted->now += gone == GONE_NOW;
    evicted->soon += gone == GONE_SOON;
    evicted->not_now += gone == GONE_NOT;
    return gone;
}

static struct evicted evict_batch(struct kvt_store *store, const struct kvt_radix_victims *which,
                                  uint32_t max)
{
    struct kvt_radix_victim victims[VICTIMS_BATCH];
    struct evicted evicted = {0, 0, 0};
    uint32_t count;

    count = kvt_radix_victims(store->radix, which, KVT_MIN(max, VICTIMS_BATCH), victims);
    for (uint32_t i = 0; i < count; i++) {
        struct cell *cell = &store->cells[victims[i].handle];
        struct kvt_radix_cell at;

        /* Evicting one may have taken others along (a move down evicts below). */
        if (kvt_radix_get(store->radix, victims[i].block, victims[i].component, &at) != 0 ||
            at.handle != victims[i].handle || (at.mask & 1u << which->bit) == 0)
            continue;
        if (evict_counted(store, cell, which->bit, &evicted) == GONE_NOT)
            kvt_radix_defer(store->radix, &victims[i], which->bit);
    }
    return evicted;
}

static bool is_any_zone_closed(const struct kvt_store *store)
{
    for (uint32_t i = 0; i < store->zones_count; i++)
        if (store->zones[i].is_closed)
            return true;
    return false;
}

/* Up to @max victims of the class begin to go, oldest first. Where a device of L3 is closed the
 * oldest may all be there: then some more are looked at. */
static struct evicted evict_some(struct kvt_store *store, const struct kvt_radix_victims *which,
                                 uint32_t max)
{
    bool is_patient = which->bit == KVT_TIER_DISK && is_any_zone_closed(store);
    struct evicted evicted = {0, 0, 0};

    for (uint32_t i = 0; i < (is_patient ? BATCHES_MAX : 1u); i++) {
        evicted = evict_batch(store, which, is_patient ? VICTIMS_BATCH : max);
        if (evicted.now + evicted.soon > 0 || evicted.not_now == 0)
            break;
    }
    return evicted;
}

/* ---- other sizes ---------------------------------------------------------------------------- */

static void reclaim_end(struct store_tier *at)
{
    kvt_slab_reclaim_cancel(at->slab);
    at->is_reclaiming = false;
}

static struct evicted reclaim_some(struct kvt_store *store, uint32_t tier, uint32_t class_idx)
{
    struct store_tier *at = &store->tiers[tier];
    uint32_t owners[VICTIMS_BATCH * 8], count;
    struct evicted evicted = {0, 0, 0};

    if (!at->is_reclaiming) {
        at->is_reclaiming = true;
        at->reclaim_class = class_idx;
        at->reclaim_end_ns = kvt_time_add(store->now_ns, STORE_RECLAIM_NS);
    }
    count = kvt_slab_reclaim(at->slab, at->reclaim_class, KVT_COUNT_OF(owners), owners);
    for (uint32_t i = 0; i < count; i++) {
        struct cell *cell = &store->cells[owners[i]];

        if (!cell->is_used || cell->is_orphan || cell->copies[tier].state != COPY_READY ||
            kvt_radix_is_leased(store->radix, cell->block)) {
            evicted.not_now++;
            continue;
        }
        (void)evict_counted(store, cell, tier, &evicted);
    }
    return evicted;
}

void kvt_store_reclaim_turn(struct kvt_store *store)
{
    for (uint32_t tier = 0; tier < KVT_TIERS_COUNT; tier++) {
        struct store_tier *at = &store->tiers[tier];

        if (at->is_reclaiming && store->now_ns >= at->reclaim_end_ns)
            reclaim_end(at);
    }
}

/* ---- room ----------------------------------------------------------------------------------- */

static bool make_room_once(struct kvt_store *store, struct cell *cell, uint32_t tier)
{
    const struct store_component *component = kvt_store_component(store, cell);
    struct store_tier *at = &store->tiers[tier];
    uint32_t class_idx = component->class_idx[tier];
    uint64_t slot_bytes = kvt_slab_slot_bytes(at->slab, class_idx);
    struct kvt_radix_victims own, others;
    struct kvt_slab_facts facts = {
        .own_bytes = at->class_of[class_idx].taken_slots * slot_bytes,
        .capacity_bytes = at->capacity_bytes,
    };
    struct evicted evicted = {0, 0, 0};

    facts.own_age = pick_pair(store, tier, class_idx, false, &own);
    facts.others_age = pick_pair(store, tier, class_idx, true, &others);
    for (uint32_t i = 0; i < at->classes; i++)
        facts.classes += at->class_of[i].taken_slots > 0 || i == class_idx;
    switch (kvt_slab_decide(&facts)) {
    case KVT_SLAB_EVICT_OWN:
        evicted = evict_some(store, &own, component->shards > 1 ? 1 : 2);
        break;
    case KVT_SLAB_TAKE_OTHER:
        evicted = reclaim_some(store, tier, class_idx);
        if (evicted.now + evicted.soon == 0 && evicted.not_now > 0 &&
            !kvt_store_is_any_inflight(store))
            reclaim_end(at);
        if (evicted.now + evicted.soon + evicted.not_now == 0)
            return true; /* the run that was picked was free already, or none could be */
        break;
    case KVT_SLAB_NOTHING:
        return false;
    }
    return evicted.now + evicted.soon > 0;
}

enum room kvt_store_acquire(struct kvt_store *store, struct cell *cell, uint32_t tier)
{
    const struct store_component *component = kvt_store_component(store, cell);
    struct store_tier *at = &store->tiers[tier];
    uint32_t class_idx = component->class_idx[tier];
    uint64_t draining_max;

    if (tier == KVT_TIER_DEVICE && !component->is_in_l1)
        return ROOM_NONE;
    draining_max =
        kvt_evict_marks(at->class_of[class_idx].taken_slots, component->shards).high_slots;
    draining_max = KVT_MAX(draining_max, 4ull * component->shards);
    for (uint32_t round = 0;; round++) {
        if (kvt_store_take_slots(store, cell, tier)) {
            if (at->is_reclaiming && at->reclaim_class == class_idx)
                reclaim_end(at);
            return ROOM_GOT;
        }
        if (round == ROOM_ROUNDS || at->class_of[class_idx].draining_slots >= draining_max ||
            !make_room_once(store, cell, tier))
            break;
    }
    return kvt_store_is_any_inflight(store) ? ROOM_WAIT : ROOM_NONE;
}

/* ---- ahead of need -------------------------------------------------------------------------- */

static uint32_t evict_class_ahead(struct kvt_store *store, uint32_t tier, uint32_t class_idx,
                                  uint32_t budget)
{
    struct store_tier *at = &store->tiers[tier];
    struct kvt_evict_marks marks =
        kvt_evict_marks(at->class_of[class_idx].taken_slots, at->class_of[class_idx].shards);
    uint32_t done = 0;

    if (kvt_store_room(store, tier, class_idx) + at->class_of[class_idx].draining_slots >=
        marks.low_slots)
        return 0;
    while (done < budget) {
        uint64_t room =
            kvt_store_room(store, tier, class_idx) + at->class_of[class_idx].draining_slots;
        struct kvt_radix_victims which;
        struct evicted evicted;

        if (room >= marks.high_slots ||
            pick_pair(store, tier, class_idx, false, &which) == UINT64_MAX)
            break;
        evicted = evict_some(store, &which, (uint32_t)(marks.high_slots - room));
        done += evicted.now + evicted.soon;
        if (evicted.now + evicted.soon == 0)
            break;
    }
    return done;
}

uint32_t kvt_store_evict_ahead(struct kvt_store *store, uint32_t budget)
{
    uint32_t done = 0, records_low = KVT_MIN(store->records_max / 64, 4096u);

    for (uint32_t i = KVT_TIERS_COUNT; i > 0; i--) { /* from below: room there helps above */
        const struct store_tier *at = &store->tiers[i - 1];

        /* Where nothing can be put, nothing has to go. */
        if (i - 1 == KVT_TIER_DISK && !kvt_store_is_lower_on(store))
            continue;
        for (uint32_t c = 0; at->tier != NULL && c < at->classes && done < budget; c++)
            if (at->class_of[c].taken_slots > 0)
                done += evict_class_ahead(store, i - 1, c, budget - done);
    }
    if (store->records_max - store->records_used < records_low && done < budget)
        done += kvt_store_evict_index(store, KVT_MIN(budget - done, VICTIMS_BATCH));
    return done;
}

uint32_t kvt_store_evict_index(struct kvt_store *store, uint32_t cells_max)
{
    struct kvt_radix_victim victims[VICTIMS_BATCH];
    uint32_t done = 0;

    for (uint32_t i = KVT_TIERS_COUNT; i > 0 && done < cells_max;) {
        struct kvt_radix_victims which = {i - 1, {UINT32_MAX}, UINT32_MAX};
        uint32_t count, before = done;

        if (store->tiers[i - 1].tier == NULL) {
            i--;
            continue;
        }
        count = kvt_radix_victims(store->radix, &which, KVT_MIN(cells_max - done, VICTIMS_BATCH),
                                  victims);
        for (uint32_t k = 0; k < count; k++) {
            struct cell *cell = &store->cells[victims[k].handle];

            if (cell->copies[i - 1].pins > 0) {
                kvt_radix_defer(store->radix, &victims[k], i - 1);
                continue;
            }
            kvt_store_let_go(store, cell, i - 1,
                             has_other_copy(store, cell, i - 1) ? KVT_DROP_EVICTED
                                                                : KVT_DROP_NO_LOWER);
            done++;
        }
        if (done == before)
            i--;
    }
    return done;
}

/* ---- write through -------------------------------------------------------------------------- */

void kvt_store_want_write(struct kvt_store *store, struct cell *cell)
{
    uint32_t at;

    if (store->config.write_policy != KVT_WRITE_THROUGH ||
        store->tiers[KVT_TIER_DISK].tier == NULL || store->through_count == STORE_THROUGH_MAX)
        return; /* a full ring: it is written when it is evicted */
    at = (store->through_head + store->through_count++) % STORE_THROUGH_MAX;
    store->through[at] = (struct kvt_cell){kvt_store_cell_idx(store, cell), cell->generation};
}

uint32_t kvt_store_write_through(struct kvt_store *store, uint32_t budget)
{
    struct copy_options options = {
        .src = KVT_TIER_HOST, .dst = KVT_TIER_DISK, .is_background = true};
    uint32_t done = 0;

    while (store->through_count > 0 && done < budget) {
        struct cell *cell = kvt_store_cell_at(store, store->through[store->through_head]);
        struct move *move;

        if (cell != NULL && cell->copies[KVT_TIER_HOST].state == COPY_READY &&
            cell->copies[KVT_TIER_DISK].state == COPY_NONE) {
            enum kvt_write_verdict verdict = ask_write(store, cell, false);

            if (verdict == KVT_WRITE_NO_BUDGET)
                break; /* later; if it is evicted before, it is decided then */
            if (verdict == KVT_WRITE_YES &&
                kvt_store_start_copy(store, cell, &options, &move) == START_WAIT)
                break;
        }
        store->through_head = (store->through_head + 1) % STORE_THROUGH_MAX;
        store->through_count--;
        done++;
    }
    return done;
}
