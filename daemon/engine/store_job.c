/* Jobs: what each still needs, who it waits for, and how it ends. A job is in exactly one place: a
 * queue (tried again when something changed), the waiters of a copy move, or its own move. Every
 * job that has not given its client memory to a tier is in the heap of deadlines. */
#include "daemon/engine/store_internal.h"

/* ---- deadlines: a binary heap of jobs -------------------------------------------------------- */

#define HEAP_NONE UINT32_MAX

static void heap_set(struct kvt_store *store, uint32_t at, struct kvt_job *job)
{
    store->heap[at] = job;
    job->heap_idx = at;
}

static void heap_up(struct kvt_store *store, uint32_t at, struct kvt_job *job)
{
    while (at > 0 && store->heap[(at - 1) / 2]->deadline_ns > job->deadline_ns) {
        heap_set(store, at, store->heap[(at - 1) / 2]);
        at = (at - 1) / 2;
    }
    heap_set(store, at, job);
}

static void heap_down(struct kvt_store *store, uint32_t at, struct kvt_job *job)
{
    for (;;) {
        uint32_t child = at * 2 + 1;

        if (child >= store->heap_count)
            break;
        if (child + 1 < store->heap_count &&
            store->heap[child + 1]->deadline_ns < store->heap[child]->deadline_ns)
            child++;
        if (store->heap[child]->deadline_ns >= job->deadline_ns)
            break;
        heap_set(store, at, store->heap[child]);
        at = child;
    }
    heap_set(store, at, job);
}

void kvt_store_arm(struct kvt_store *store, struct kvt_job *job)
{
    KVT_ASSERT(store->heap_count < store->heap_max);
    heap_up(store, store->heap_count++, job);
}

void kvt_store_disarm(struct kvt_store *store, struct kvt_job *job)
{
    uint32_t at = job->heap_idx;
    struct kvt_job *last;

    if (at == HEAP_NONE)
        return;
    KVT_ASSERT(at < store->heap_count && store->heap[at] == job);
    job->heap_idx = HEAP_NONE;
    last = store->heap[--store->heap_count];
    if (last == job)
        return;
    if (at > 0 && store->heap[(at - 1) / 2]->deadline_ns > last->deadline_ns)
        heap_up(store, at, last);
    else
        heap_down(store, at, last);
}

/* ---- places --------------------------------------------------------------------------------- */

static void leave_place(struct kvt_store *store, struct kvt_job *job)
{
    switch ((enum job_state)job->state) {
    case JOB_QUEUED:
        store->queued[job->is_background]--;
        break;
    case JOB_WAITING:
        store->waiting--;
        break;
    case JOB_RUNNING:
        store->running--;
        break;
    case JOB_NEW:
    case JOB_ENDED:
        break;
    }
    kvt_list_remove(&job->link);
}

void kvt_store_end_job(struct kvt_store *store, struct kvt_job *job, enum kvt_move_result result)
{
    KVT_ASSERT(job->state != JOB_ENDED);
    leave_place(store, job);
    kvt_store_disarm(store, job);
    job->state = JOB_ENDED;
    job->xfer = NULL;
    job->result = result;
    if (result != KVT_MOVE_DONE)
        job->moved_bytes = 0;
    job->done(job); /* from here on the job is the caller's */
}

static void put_in_queue(struct kvt_store *store, struct kvt_job *job)
{
    job->state = JOB_QUEUED;
    store->queued[job->is_background]++;
    kvt_list_push_back(&store->queue[job->is_background], &job->link);
}

static void wait_for(struct kvt_store *store, struct kvt_job *job, struct move *move)
{
    job->state = JOB_WAITING;
    store->waiting++;
    kvt_list_push_back(&move->waiters, &job->link);
}

/* A start that did not work out now. */
static void settle_start(struct kvt_store *store, struct kvt_job *job, enum start start)
{
    if (start == START_WAIT || start == START_LATER)
        put_in_queue(store, job);
    else if (start == START_NONE)
        kvt_store_end_job(store, job, KVT_MOVE_NO_ROOM);
}

/* ---- copies that a job needs ----------------------------------------------------------------- */

static enum start raise_or_join(struct kvt_store *store, struct cell *cell, struct kvt_job *job,
                                uint32_t src, uint32_t dst)
{
    const struct store_component *component = kvt_store_component(store, cell);
    struct move *move = kvt_store_find_copy(store, cell, dst);
    struct kvt_promote_facts facts = {
        .inflight_bytes = store->promote_inflight_bytes,
        .inflight_bytes_max = store->config.promote_inflight_bytes_max,
        .bytes = component->payload_bytes * component->shards,
        .is_background = job->is_background,
    };
    struct copy_options options = {.src = src, .dst = dst, .is_background = job->is_background};
    enum start start;

    if (move != NULL) {
        store->coalesced++;
        wait_for(store, job, move);
        return START_DONE;
    }
    if (dst < src) {
        uint32_t class_idx = component->class_idx[dst];
        const struct store_tier *at = &store->tiers[dst];

        if (dst == KVT_TIER_DEVICE && !component->is_in_l1)
            return START_NONE;
        facts.room_slots = kvt_store_room(store, dst, class_idx);
        facts.headroom_slots =
            kvt_evict_marks(at->class_of[class_idx].taken_slots, component->shards).high_slots;
        switch (kvt_promote_decide(&facts)) {
        case KVT_PROMOTE_GO:
            break;
        case KVT_PROMOTE_WAIT:
            return START_LATER;
        case KVT_PROMOTE_NO:
            return START_NONE;
        }
        options.budget_bytes = facts.bytes;
    }
    start = kvt_store_start_copy(store, cell, &options, &move);
    if (start == START_DONE)
        wait_for(store, job, move);
    return start;
}

/* A copy that was leaving its tier is wanted there again. */
static bool rescue(struct kvt_store *store, struct cell *cell, uint32_t tier)
{
    struct move *move = kvt_store_find_copy(store, cell, tier + 1);

    if (move == NULL || !move->is_evict || move->src != tier)
        return true;
    move->is_evict = false;
    return kvt_store_end_drain(store, cell, tier);
}

/* ---- kinds ---------------------------------------------------------------------------------- */

static uint32_t pick_fill_tier(struct kvt_store *store, struct cell *cell, enum start *ret_start)
{
    enum room room = ROOM_NONE;

    if (cell->copies[KVT_TIER_DEVICE].state == COPY_FILLING)
        return KVT_TIER_DEVICE;
    if (cell->copies[KVT_TIER_HOST].state == COPY_FILLING)
        return KVT_TIER_HOST;
    if (store->tiers[KVT_TIER_DEVICE].tier != NULL)
        room = kvt_store_acquire(store, cell, KVT_TIER_DEVICE);
    if (room == ROOM_GOT)
        return KVT_TIER_DEVICE;
    /* No wait for L1: L2 is as good a place to begin. */
    room = kvt_store_acquire(store, cell, KVT_TIER_HOST);
    if (room == ROOM_GOT)
        return KVT_TIER_HOST;
    *ret_start = room == ROOM_WAIT ? START_WAIT : START_NONE;
    return KVT_TIERS_COUNT;
}

static void dispatch_fill(struct kvt_store *store, struct kvt_job *job)
{
    struct cell *cell = kvt_store_cell_at(store, job->cell);
    enum start start = START_WAIT;
    uint32_t tier, shards;

    if (cell == NULL) {
        kvt_store_end_job(store, job, KVT_MOVE_ABORTED);
        return;
    }
    shards = kvt_store_component(store, cell)->shards;
    if (!cell->is_claimed || job->rank >= shards ||
        ((uint32_t)cell->filled >> job->rank & 1u) != 0) {
        kvt_store_end_job(store, job, KVT_MOVE_PRESENT);
        return;
    }
    if ((cell->filling >> job->rank & 1u) != 0) {
        put_in_queue(store, job); /* the same shard is on its way; its end wakes the queue */
        return;
    }
    if (!kvt_store_has_xfers(store, 1, job->is_background)) {
        put_in_queue(store, job);
        return;
    }
    tier = pick_fill_tier(store, cell, &start);
    if (tier != KVT_TIERS_COUNT) {
        start = kvt_store_start_fill(store, cell, tier, job->rank, job);
        if (start == START_NONE) { /* its block is gone */
            kvt_store_end_job(store, job, KVT_MOVE_ABORTED);
            return;
        }
    }
    settle_start(store, job, start);
}

static void read_from_disk(struct kvt_store *store, struct cell *cell, struct kvt_job *job,
                           uint32_t shard)
{
    struct kvt_cell handle = job->cell;
    enum start start, bounce;

    job->is_raised = true;
    start = raise_or_join(store, cell, job, KVT_TIER_DISK, KVT_TIER_HOST);
    if (start == START_DONE)
        return;
    if (start == START_LATER) {
        put_in_queue(store, job);
        return;
    }
    cell = kvt_store_cell_at(store, handle); /* making room may have found it dead */
    if (cell == NULL || !kvt_store_is_readable(cell, KVT_TIER_DISK) ||
        !kvt_radix_is_live(store->radix, cell->block)) {
        kvt_store_end_job(store, job, KVT_MOVE_MISS);
        return;
    }
    /* No slot in L2: through a bounce slot, so that reads go on when L2 is full of pins. */
    bounce = kvt_store_start_bounce(store, cell, shard, job);
    if (bounce == START_DONE)
        return;
    settle_start(store, job, bounce == START_WAIT ? START_WAIT : start);
}

static void dispatch_read(struct kvt_store *store, struct kvt_job *job)
{
    struct cell *cell = kvt_store_cell_at(store, job->cell);
    uint32_t shard;

    if (cell == NULL) {
        kvt_store_end_job(store, job, KVT_MOVE_MISS);
        return;
    }
    shard = kvt_store_component(store, cell)->shards == 1 ? 0 : job->rank;
    if (shard >= kvt_store_component(store, cell)->shards) {
        kvt_store_end_job(store, job, KVT_MOVE_MISS);
        return;
    }
    for (uint32_t tier = 0; tier < KVT_TIER_DISK; tier++) {
        if (!kvt_store_is_readable(cell, tier))
            continue;
        settle_start(store, job, kvt_store_start_read(store, cell, tier, shard, job));
        return;
    }
    if (job->is_upper_only || !kvt_store_is_readable(cell, KVT_TIER_DISK)) {
        kvt_store_end_job(store, job, KVT_MOVE_MISS);
        return;
    }
    read_from_disk(store, cell, job, shard);
}

static void dispatch_raise(struct kvt_store *store, struct kvt_job *job)
{
    struct cell *cell = kvt_store_cell_at(store, job->cell);
    uint32_t src;

    if (job->tier > KVT_TIER_HOST || store->tiers[job->tier].tier == NULL || store->is_draining) {
        kvt_store_end_job(store, job, KVT_MOVE_NO_ROOM);
        return;
    }
    for (uint32_t tier = 0; cell != NULL && tier <= (uint32_t)job->tier; tier++) {
        if (cell->copies[tier].state == COPY_DRAINING && !rescue(store, cell, tier)) {
            cell = NULL;
            break;
        }
        if (cell->copies[tier].state == COPY_READY) {
            kvt_store_end_job(store, job, KVT_MOVE_DONE);
            return;
        }
    }
    for (src = (uint32_t)job->tier + 1; cell != NULL && src < KVT_TIERS_COUNT; src++)
        if (kvt_store_is_readable(cell, src))
            break;
    if (cell == NULL || src == KVT_TIERS_COUNT) {
        kvt_store_end_job(store, job, KVT_MOVE_MISS);
        return;
    }
    job->from = (enum kvt_tier_id)src;
    job->moved_bytes = kvt_store_cell_bytes(store, job->cell);
    /* One tier at a time: from disk to L1 goes by L2. */
    settle_start(store, job, raise_or_join(store, cell, job, src, src - 1));
}

static void dispatch_lower(struct kvt_store *store, struct kvt_job *job)
{
    struct cell *cell = kvt_store_cell_at(store, job->cell);
    bool was_moved = job->moved_bytes > 0;
    uint32_t src;

    if (job->tier < KVT_TIER_HOST || store->tiers[job->tier].tier == NULL) {
        kvt_store_end_job(store, job, KVT_MOVE_NO_ROOM);
        return;
    }
    for (uint32_t tier = (uint32_t)job->tier; cell != NULL && tier < KVT_TIERS_COUNT; tier++) {
        if (!kvt_store_is_readable(cell, tier))
            continue;
        for (uint32_t above = 0; job->is_move && above < tier && !cell->is_orphan; above++)
            if (kvt_store_is_readable(cell, above))
                kvt_store_let_go(store, cell, above, KVT_DROP_REQUESTED);
        kvt_store_end_job(store, job, was_moved ? KVT_MOVE_DONE : KVT_MOVE_PRESENT);
        return;
    }
    for (src = (uint32_t)job->tier; cell != NULL && src > 0; src--)
        if (kvt_store_is_readable(cell, src - 1))
            break;
    if (cell == NULL || src == 0) {
        kvt_store_end_job(store, job, KVT_MOVE_MISS);
        return;
    }
    if (src == KVT_TIER_DISK && !kvt_store_is_lower_on(store)) {
        kvt_store_end_job(store, job, KVT_MOVE_NO_ROOM);
        return;
    }
    job->from = (enum kvt_tier_id)(src - 1);
    job->moved_bytes = kvt_store_cell_bytes(store, job->cell);
    settle_start(store, job, raise_or_join(store, cell, job, src - 1, src));
}

void kvt_store_dispatch(struct kvt_store *store, struct kvt_job *job)
{
    struct cell *cell = kvt_store_cell_at(store, job->cell);

    KVT_ASSERT(job->state == JOB_NEW);
    if (cell != NULL)
        kvt_store_take_home(store, cell, job);
    if (cell != NULL)
        (void)kvt_store_l1_settle(store, cell); /* it may be gone then: each kind looks again */
    switch (job->kind) {
    case KVT_JOB_FILL:
        dispatch_fill(store, job);
        break;
    case KVT_JOB_READ:
        dispatch_read(store, job);
        break;
    case KVT_JOB_RAISE:
        dispatch_raise(store, job);
        break;
    case KVT_JOB_LOWER:
        dispatch_lower(store, job);
        break;
    case KVT_JOB_FLUSH:
        if (store->tiers[KVT_TIER_DISK].tier == NULL)
            kvt_store_end_job(store, job, KVT_MOVE_NO_ROOM);
        else if (store->is_kept)
            kvt_store_index_sync(store, job);
        else
            settle_start(store, job, kvt_store_start_flush(store, job));
        break;
    }
}

bool kvt_store_try_again(struct kvt_store *store, struct kvt_job *job)
{
    KVT_ASSERT(job->state == JOB_RUNNING && job->heap_idx == HEAP_NONE);
    if (job->is_cancelled || job->deadline_ns <= store->now_ns ||
        store->heap_count == store->heap_max)
        return false;
    leave_place(store, job);
    job->state = JOB_NEW;
    job->xfer = NULL;
    kvt_store_arm(store, job);
    kvt_store_dispatch(store, job);
    return true;
}

/* ---- from outside --------------------------------------------------------------------------- */

void kvt_store_submit(struct kvt_store *store, struct kvt_job *job, uint64_t now_ns)
{
    store->now_ns = KVT_MAX(store->now_ns, now_ns);
    job->state = JOB_NEW;
    job->heap_idx = HEAP_NONE;
    job->xfer = NULL;
    job->moved_bytes = 0;
    job->is_raised = job->is_cancelled = false;
    kvt_list_init(&job->link);
    if (store->heap_count == store->heap_max) {
        kvt_store_end_job(store, job, KVT_MOVE_NO_ROOM);
        return;
    }
    if (job->deadline_ns <= store->now_ns) {
        kvt_store_end_job(store, job, KVT_MOVE_LATE);
        return;
    }
    kvt_store_arm(store, job);
    kvt_store_dispatch(store, job);
    /* A tier that has nothing to do gets it at once; else batches are made in the turn. */
    for (uint32_t tier = 0; tier < KVT_TIERS_COUNT; tier++) {
        const struct store_tier *at = &store->tiers[tier];

        if (at->pending_count > 0 && !at->is_refused &&
            (at->inflight == 0 || at->pending_count >= STORE_PENDING_BATCH))
            kvt_store_submit_pending(store, tier);
    }
}

static bool end_early(struct kvt_store *store, struct kvt_job *job, enum kvt_move_result result)
{
    if (job->state == JOB_ENDED)
        return false;
    if (job->state == JOB_RUNNING && !kvt_store_stop_move(store, job->xfer))
        return false;
    kvt_store_end_job(store, job, result);
    return true;
}

void kvt_store_cancel(struct kvt_store *store, struct kvt_job *job)
{
    job->is_cancelled = true;
    (void)end_early(store, job, KVT_MOVE_ABORTED);
}

void kvt_store_expire(struct kvt_store *store)
{
    while (store->heap_count > 0 && store->heap[0]->deadline_ns <= store->now_ns) {
        bool is_ended = end_early(store, store->heap[0], KVT_MOVE_LATE);

        KVT_ASSERT(is_ended); /* a job whose memory is with a tier is not in the heap */
    }
}

bool kvt_store_retry_queue(struct kvt_store *store, uint32_t budget)
{
    if (store->is_woken) {
        store->is_woken = false;
        for (uint32_t i = 0; i < 2; i++)
            store->scan_left[i] = store->queued[i];
    }
    for (uint32_t i = 0; i < 2; i++) {
        while (store->scan_left[i] > 0 && budget > 0) {
            struct kvt_job *job;

            store->scan_left[i]--;
            if (kvt_list_is_empty(&store->queue[i])) {
                store->scan_left[i] = 0;
                break;
            }
            job = KVT_CONTAINER_OF(store->queue[i].next, struct kvt_job, link);
            leave_place(store, job);
            job->state = JOB_NEW;
            kvt_store_dispatch(store, job);
            budget--;
        }
    }
    return store->scan_left[0] + store->scan_left[1] > 0;
}
