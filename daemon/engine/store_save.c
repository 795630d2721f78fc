/* Saving: what L3 lacks now is written to it, beside all other work. An operator asks for it before
 * a stop, so that the stop itself is short. Nothing is refused meanwhile (kvt_store_drain, the
 * stop's own, refuses new claims).
 *
 * A round walks all cells. The copy of a cell that has none on L3 goes down from L2; one that is in
 * L1 alone goes to L2, and the next round takes it further. Neither the write policy nor the write
 * budget is asked: the operator has decided. What a stop would write then, it does not write again.
 *
 * What is stored after it began is not its business. It ends when a round found nothing to do, or
 * when it has moved twice as many copies as there were to save at first: an L3 that is too small
 * would else be filled round and round. Before it ends it waits until the index has what it wrote:
 * a restart of any kind finds it then. */
#include "daemon/base/clock.h"
#include "daemon/engine/store_internal.h"

#define INFLIGHT_MAX 64u /* copies: enough to keep a device busy, few enough to go between */
#define PATIENCE_NS (2 * KVT_NS_PER_S) /* for one copy that cannot be started */
#define AGAIN_NS (10 * KVT_NS_PER_MS)

bool kvt_store_is_unsaved(const struct cell *cell)
{
    return !kvt_store_is_readable(cell, KVT_TIER_DISK) &&
           (kvt_store_is_readable(cell, KVT_TIER_HOST) ||
            kvt_store_is_readable(cell, KVT_TIER_DEVICE));
}

void kvt_store_save_start(struct kvt_store *store)
{
    struct store_save *save = &store->save;

    if (save->is_running || store->is_draining || !kvt_store_is_lower_on(store))
        return;
    save->is_running = true;
    save->at = 1;
    save->rounds = 0;
    save->has_started = save->is_syncing = false;
    save->waits_since_ns = 0;
    save->moves_left = 2 * store->unsaved + 1; /* none left: it is not getting anywhere */
    save->content_end = store->stamp_next;
    save->round_left = 0;
    save->copies_written = save->bytes_written = save->copies_failed = 0;
    save->is_telling = store->has_skipped;
    store->has_skipped = false;
}

/* Of the cells that were there when it began: L3 lacks it. */
static bool is_wanted(const struct kvt_store *store, const struct cell *cell)
{
    return cell->is_used && !cell->is_orphan && !cell->is_claimed && kvt_store_is_unsaved(cell) &&
           kvt_store_content(cell) < store->save.content_end;
}

/* Where the cell's copy comes from and goes to next; false: nowhere now. */
static bool choose(const struct kvt_store *store, const struct cell *cell,
                   struct copy_options *options)
{
    options->src =
        cell->copies[KVT_TIER_HOST].state == COPY_READY ? KVT_TIER_HOST : KVT_TIER_DEVICE;
    options->dst = options->src + 1;
    if (options->src == KVT_TIER_DEVICE && store->save.rounds == 0)
        return false;
    return cell->copies[options->src].state == COPY_READY &&
           cell->copies[options->dst].state == COPY_NONE;
}

/* What is on L3 and was given up before the index had it is told once more. False: later. */
static bool tell_again(struct kvt_store *store, struct cell *cell)
{
    if (!store->save.is_telling || store->save.rounds > 0 || !cell->is_used || cell->is_orphan ||
        cell->is_indexed || !kvt_store_is_readable(cell, KVT_TIER_DISK))
        return true;
    if (!kvt_store_index_has_todo_room(store))
        return false;
    kvt_store_index_want_again(store, cell);
    return true;
}

/* One cell; false: come back to it later. */
static bool save_cell(struct kvt_store *store, struct cell *cell)
{
    struct copy_options options = {.is_background = true, .is_save = true};
    struct store_save *save = &store->save;
    struct move *move;

    if (!tell_again(store, cell))
        return false;
    if (!is_wanted(store, cell))
        return true;
    if (save->inflight == INFLIGHT_MAX)
        return false;
    switch (choose(store, cell, &options) ? kvt_store_start_copy(store, cell, &options, &move)
                                          : START_NONE) {
    case START_DONE:
        save->inflight++;
        save->moves_left--;
        save->has_started = true;
        save->waits_since_ns = 0;
        return true;
    case START_WAIT:
        if (save->waits_since_ns == 0)
            save->waits_since_ns = store->now_ns;
        if (store->now_ns - save->waits_since_ns < PATIENCE_NS)
            return false;
        break; /* the next round may have more luck */
    case START_NONE:
    case START_LATER:
        break;
    }
    save->waits_since_ns = 0;
    save->round_left++;
    return true;
}

void kvt_store_saved(struct kvt_store *store, uint32_t cell, uint32_t dst, uint64_t bytes)
{
    struct store_save *save = &store->save;

    KVT_ASSERT(save->inflight > 0);
    save->inflight--;
    if (bytes == 0)
        return;
    if (dst == KVT_TIER_DISK) {
        save->copies_written++;
        save->bytes_written += bytes;
    } else if (save->moves_left > 0 && !store->is_draining) {
        (void)save_cell(store, &store->cells[cell]); /* else the next round finds it */
    }
}

/* No round is left: the index commits what went before, then it is over. */
static void finish(struct kvt_store *store)
{
    struct store_save *save = &store->save;

    if (!save->is_syncing) {
        save->is_syncing = true;
        save->sync_pos = store->todo_end;
        save->copies_failed = save->moves_left > 0 ? save->round_left : store->unsaved;
    }
    if (store->todo_done >= save->sync_pos)
        save->is_running = false;
    else
        kvt_store_hasten(store);
}

bool kvt_store_save_turn(struct kvt_store *store, uint32_t budget)
{
    struct store_save *save = &store->save;

    if (!save->is_running)
        return false;
    if (save->is_syncing) {
        finish(store);
        return false;
    }
    if (store->is_draining || !kvt_store_is_lower_on(store))
        save->moves_left = 0; /* what is under way ends, nothing is begun */
    for (; save->moves_left > 0 && save->at <= store->records_fresh; save->at++) {
        if (budget-- == 0)
            return true;
        if (!save_cell(store, &store->cells[save->at]))
            return false;
    }
    if (save->inflight > 0)
        return false;
    if (save->moves_left == 0 || (!save->has_started && save->rounds > 0)) {
        finish(store);
        return false;
    }
    save->rounds++;
    save->round_left = 0;
    save->at = 1;
    save->has_started = false;
    return true;
}

uint64_t kvt_store_save_next_ns(const struct kvt_store *store)
{
    if (!store->save.is_running)
        return KVT_TIME_NEVER_NS;
    return kvt_time_add(store->now_ns, AGAIN_NS);
}
