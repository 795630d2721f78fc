/* What comes back from the tiers: transfers are reaped here, and their moves finished. */
#include "daemon/base/clock.h"
#include "daemon/engine/store_internal.h"

#define RATE_SHARE 8u /* weight of a new sample: one part in so many */

static enum kvt_move_result result_of(int status, bool is_fill)
{
    switch (status) {
    case KVT_XFER_DONE:
        return KVT_MOVE_DONE;
    case KVT_XFER_CLIENT_GONE:
        return KVT_MOVE_CLIENT_GONE;
    case KVT_XFER_LATE:
        return KVT_MOVE_LATE;
    default: /* BAD_SLOT, SHORT, OUT_OF_SERVICE, -errno */
        return is_fill ? KVT_MOVE_NO_ROOM : KVT_MOVE_MISS;
    }
}

/* Whether a failed transfer says that the bytes at its source are lost. An error of a GPU (a launch
 * that failed, no staging, the other end's memory) says nothing of them: if they were gone, so
 * would be the GPU, or the check said BAD_SLOT. */
static bool is_source_bad(const struct move *move)
{
    if (move->status == KVT_XFER_BAD_SLOT)
        return true;
    if (move->status >= 0 && move->status != KVT_XFER_SHORT)
        return false; /* done, late, out of service, client gone */
    if (move->kind == MOVE_BOUNCE || move->src == KVT_TIER_DISK)
        return true;
    return move->kind == MOVE_READ && move->src == KVT_TIER_HOST && !move->job->view.layout->is_gpu;
}

static void copy_unlink(struct kvt_store *store, struct cell *cell, struct move *move)
{
    uint32_t *link = &cell->moves;

    while (*link != kvt_store_move_idx(store, move))
        link = &store->moves[*link].next;
    *link = move->next;
}

/* Both ends of a finished copy move are settled; the cell may be gone afterwards. */
static void copy_settle(struct kvt_store *store, struct move *move)
{
    struct cell *cell = &store->cells[move->cell];
    uint32_t src = move->src, dst = move->dst;
    enum kvt_store_drop_reason reason = KVT_DROP_EVICTED;

    copy_unlink(store, cell, move);
    if (move->status == 0) {
        if (src == KVT_TIER_DISK)
            cell->filled = kvt_store_all_shards(store, cell);
        if (kvt_store_make_ready(store, cell, dst)) {
            if (dst > src)
                store->tiers[src].written_back++;
            if (dst == KVT_TIER_HOST && src == KVT_TIER_DEVICE)
                kvt_store_want_write(store, cell);
            if (dst == KVT_TIER_DISK)
                kvt_store_index_want(store, cell);
        }
    } else {
        reason = move->status == KVT_XFER_LATE ? KVT_DROP_BUDGET : KVT_DROP_NO_LOWER;
        kvt_store_let_go(store, cell, dst, KVT_DROP_ABORTED);
    }
    kvt_store_unpin(store, cell, dst);
    if (is_source_bad(move))
        kvt_store_let_go(store, cell, src, KVT_DROP_BAD);
    else if (move->is_evict && cell->copies[src].state == COPY_DRAINING)
        kvt_store_let_go(store, cell, src, reason);
    kvt_store_unpin(store, cell, src);
}

static void copy_finish(struct kvt_store *store, struct move *move)
{
    uint32_t cell = move->cell, dst = move->dst;
    /* What L1 did not take is still below. */
    bool is_to_l1 = dst == KVT_TIER_DEVICE && move->status == KVT_XFER_OUT_OF_SERVICE;
    uint64_t bytes = move->bytes;
    bool is_save = move->is_save;
    struct kvt_list waiters;
    int status = move->status;

    copy_settle(store, move);
    store->promote_inflight_bytes -= move->budget_bytes;
    kvt_list_init(&waiters);
    while (!kvt_list_is_empty(&move->waiters)) {
        struct kvt_list *link = move->waiters.next;

        kvt_list_remove(link);
        kvt_list_push_back(&waiters, link);
    }
    kvt_store_move_free(store, move);
    if (is_save)
        kvt_store_saved(store, cell, dst, status == 0 ? bytes : 0);
    while (!kvt_list_is_empty(&waiters)) {
        struct kvt_job *job = KVT_CONTAINER_OF(waiters.next, struct kvt_job, link);

        if (status != 0) {
            kvt_store_end_job(store, job, result_of(status, is_to_l1));
            continue;
        }
        kvt_list_remove(&job->link);
        store->waiting--;
        job->state = JOB_NEW;
        kvt_store_dispatch(store, job);
    }
}

static void fill_finish(struct kvt_store *store, struct move *move)
{
    struct cell *cell = &store->cells[move->cell];
    enum kvt_move_result result = result_of(move->status, true);
    struct kvt_job *job = move->job;

    cell->filling &= ~(1u << move->shard);
    if (move->status == KVT_XFER_OUT_OF_SERVICE && move->dst == KVT_TIER_DEVICE)
        kvt_store_l1_look(store);
    if (!cell->is_orphan)
        (void)kvt_store_l1_settle(store, cell); /* pinned by this move: the record stays */
    if (cell->is_orphan) {
        result = KVT_MOVE_ABORTED;
    } else if (move->status == 0) {
        cell->filled = (uint16_t)(cell->filled | 1u << move->shard);
        job->moved_bytes = move->bytes;
        job->from = (enum kvt_tier_id)move->dst;
        if (kvt_store_is_seen(store, cell)) {
            if (!kvt_store_fill_complete(store, cell))
                result = KVT_MOVE_ABORTED;
            else if (move->dst == KVT_TIER_HOST)
                kvt_store_want_write(store, cell);
        }
    }
    store->is_woken = true; /* another fill of this shard may wait for it */
    kvt_store_unpin(store, cell, move->dst);
    kvt_store_move_free(store, move);
    kvt_store_end_job(store, job, result);
}

static void read_finish(struct kvt_store *store, struct move *move)
{
    struct cell *cell = &store->cells[move->cell];
    struct kvt_job *job = move->job;
    int status = move->status;
    bool is_lost = status == KVT_XFER_OUT_OF_SERVICE && move->src == KVT_TIER_DEVICE;

    if (is_source_bad(move))
        kvt_store_let_go(store, cell, move->src, KVT_DROP_BAD);
    job->from = job->is_raised ? KVT_TIER_DISK : (enum kvt_tier_id)move->src;
    job->moved_bytes = status == 0 ? kvt_client_view_bytes(&job->view) : 0;
    kvt_store_unpin(store, cell, move->src);
    kvt_store_move_free(store, move);
    if (is_lost) /* before the next turn sees it: what is below may serve */
        kvt_store_l1_look(store);
    if (!is_lost || store->l1.lost == 0 || !kvt_store_try_again(store, job))
        kvt_store_end_job(store, job, result_of(status, false));
}

/* True: the second transfer was queued, the move goes on. */
static bool bounce_finish(struct kvt_store *store, struct move *move, struct xfer *xfer)
{
    struct kvt_job *job = move->job;
    int status = move->status;

    if (!move->is_bounce_out) {
        struct cell *cell = &store->cells[move->cell];

        if (move->is_scrub)
            kvt_store_scrubbed(store, move,
                               move->shard + 1 == kvt_store_component(store, cell)->shards);
        if (status == 0)
            cell->filled = (uint16_t)(cell->filled | 1u << move->shard);
        if (is_source_bad(move))
            kvt_store_let_go(store, cell, KVT_TIER_DISK, KVT_DROP_BAD);
        kvt_store_unpin(store, cell, KVT_TIER_DISK);
        move->cell = 0;
        if (status == 0 && job != NULL) {
            move->is_bounce_out = true;
            xfer->base.src = xfer->base.dst;
            xfer->base.dst = kvt_store_place_of_client(job);
            xfer->base.flags = 0;
            xfer->bytes = kvt_client_view_bytes(&job->view);
            xfer->is_submitted = false;
            kvt_store_enqueue(store, xfer, KVT_TIER_HOST, kvt_store_client_end(job),
                              job->is_background);
            return true;
        }
    }
    store->bounce_used &= ~move->bounce_mask;
    store->is_woken = true;
    if (job != NULL) {
        job->from = KVT_TIER_DISK;
        job->moved_bytes = status == 0 ? kvt_client_view_bytes(&job->view) : 0;
    }
    kvt_store_move_free(store, move);
    if (job != NULL)
        kvt_store_end_job(store, job, result_of(status, false));
    return false;
}

static void flush_finish(struct kvt_store *store, struct move *move)
{
    struct kvt_job *job = move->job;
    int status = move->status;

    kvt_store_move_free(store, move);
    if (job != NULL)
        kvt_store_end_job(store, job,
                          status == 0               ? KVT_MOVE_DONE
                          : status == KVT_XFER_LATE ? KVT_MOVE_LATE
                                                    : KVT_MOVE_ABORTED);
}

/* The time since the path's last completion, or since this one's start, was spent on its bytes. */
static void measure(struct kvt_store *store, const struct xfer *xfer)
{
    struct store_path *path = &store->paths[xfer->path];
    uint64_t from_ns = KVT_MAX(xfer->base.started_ns, path->last_done_ns), took_ns, rate;

    if (xfer->base.status != 0 || xfer->bytes == 0 || xfer->base.done_ns <= from_ns)
        return;
    took_ns = xfer->base.done_ns - from_ns;
    path->last_done_ns = xfer->base.done_ns;
    rate = (uint64_t)((double)xfer->bytes * (double)KVT_NS_PER_S / (double)took_ns);
    path->bytes_per_s = (path->bytes_per_s * (RATE_SHARE - 1) + rate) / RATE_SHARE;
    path->bytes_per_s = KVT_MAX(path->bytes_per_s, (uint64_t)1);
}

static void finish(struct kvt_store *store, struct xfer *xfer)
{
    struct move *move = &store->moves[xfer->move];

    KVT_ASSERT(move->is_used && move->shards_left > 0);
    store->tiers[xfer->tier].inflight--;
    store->paths[xfer->path].queued_bytes -= xfer->bytes;
    measure(store, xfer);
    if (xfer->base.status == KVT_XFER_BAD_SLOT) {
        store->verified_bad++;
        if (xfer->base.src.kind == KVT_PLACE_DISK)
            kvt_store_tell_bad_slot(store, &xfer->base);
    }
    /* A bad slot says most, then an error, then the rest. */
    if (move->status == 0 || xfer->base.status == KVT_XFER_BAD_SLOT ||
        (xfer->base.status < 0 && move->status != KVT_XFER_BAD_SLOT))
        move->status = xfer->base.status;
    if (move->kind == MOVE_BOUNCE && bounce_finish(store, move, xfer))
        return;
    if (move->kind == MOVE_BOUNCE) {
        kvt_store_xfer_free(store, xfer);
        return;
    }
    kvt_store_xfer_free(store, xfer);
    if (--move->shards_left > 0)
        return;
    switch ((enum move_kind)move->kind) {
    case MOVE_COPY:
        copy_finish(store, move);
        break;
    case MOVE_FILL:
        fill_finish(store, move);
        break;
    case MOVE_READ:
        read_finish(store, move);
        break;
    case MOVE_FLUSH:
        flush_finish(store, move);
        break;
    case MOVE_BOUNCE:
        KVT_ASSERT(false);
        break;
    }
}

uint32_t kvt_store_reap(struct kvt_store *store, uint32_t budget)
{
    struct kvt_xfer *done[STORE_PENDING_BATCH];
    uint32_t total = 0;

    store->is_reap_left = false;
    for (uint32_t tier = 0; tier < KVT_TIERS_COUNT; tier++) {
        struct store_tier *at = &store->tiers[tier];

        while (at->tier != NULL && at->inflight > 0) {
            uint32_t count;

            if (total >= budget) {
                store->is_reap_left = true;
                break;
            }
            count = kvt_tier_reap(at->tier, done, STORE_PENDING_BATCH);
            if (count == 0)
                break;
            for (uint32_t i = 0; i < count; i++)
                finish(store, done[i]->owner);
            total += count;
        }
    }
    return total;
}
