/* The scrubber: reads what is on L3 at a bounded rate, so that rot is found before users ask for
 * it. A slot is read through a bounce slot as for a reader, checked as for a reader, and thrown
 * away; a bad one is dropped as a reader's would be.
 *
 * It walks all cells, round after round, shard by shard. Its pace is a time: each slot that is
 * begun moves the time of the next one on by what its bytes cost at the rate. It waits for
 * everybody: it is of the background, and it takes a bounce slot only when one is free. */
#include "daemon/base/clock.h"
#include "daemon/engine/store_internal.h"

#define INFLIGHT_MAX 2u
#define ROUND_NS_MIN KVT_NS_PER_S /* an L3 with little on it is not read all the time */
#define AGAIN_NS (10 * KVT_NS_PER_MS)
#define LAG_NS_MAX (10 * KVT_NS_PER_MS) /* of the pace, that may be caught up */

void kvt_store_scrub_start(struct kvt_store *store, uint64_t bytes_per_s)
{
    struct store_scrub *scrub = &store->scrub;

    if (bytes_per_s != 0 && scrub->bytes_per_s == 0) {
        scrub->next_ns = store->now_ns;
        scrub->round_start_ns = store->now_ns;
    }
    scrub->bytes_per_s = store->tiers[KVT_TIER_DISK].tier == NULL ? 0 : bytes_per_s;
}

void kvt_store_scrubbed(struct kvt_store *store, const struct move *move, bool is_last_shard)
{
    struct store_scrub *scrub = &store->scrub;

    KVT_ASSERT(scrub->inflight > 0);
    scrub->inflight--;
    if (move->status == 0) {
        scrub->checked_bytes += move->bytes;
        scrub->checked_copies += is_last_shard;
    } else if (move->status == KVT_XFER_BAD_SLOT || move->status == KVT_XFER_SHORT ||
               move->status < 0) {
        scrub->bad_copies++;
    } /* late, out of service: the next round asks again */
}

/* The cell at the cursor or behind it that has a copy on L3. NULL: *inout_budget is used up, or the
 * round is over. */
static struct cell *next_cell(struct kvt_store *store, uint32_t *inout_budget)
{
    struct store_scrub *scrub = &store->scrub;

    for (; scrub->at <= store->records_fresh; scrub->at++, scrub->shard = 0) {
        struct cell *cell = &store->cells[scrub->at];

        if (*inout_budget == 0)
            return NULL;
        (*inout_budget)--;
        if (scrub->at != 0 && cell->is_used && !cell->is_orphan &&
            kvt_store_is_readable(cell, KVT_TIER_DISK) &&
            kvt_radix_is_live(store->radix, cell->block) &&
            scrub->shard < kvt_store_component(store, cell)->shards)
            return cell;
    }
    return NULL;
}

static void end_round(struct kvt_store *store)
{
    struct store_scrub *scrub = &store->scrub;

    scrub->rounds++;
    scrub->at = scrub->shard = 0;
    scrub->next_ns = KVT_MAX(scrub->next_ns, kvt_time_add(scrub->round_start_ns, ROUND_NS_MIN));
    scrub->round_start_ns = KVT_MAX(scrub->next_ns, store->now_ns);
}

static void pay(struct kvt_store *store, uint64_t bytes)
{
    struct store_scrub *scrub = &store->scrub;
    uint64_t cost_ns =
        (uint64_t)((double)bytes * (double)KVT_NS_PER_S / (double)scrub->bytes_per_s);

    if (store->now_ns > LAG_NS_MAX)
        scrub->next_ns = KVT_MAX(scrub->next_ns, store->now_ns - LAG_NS_MAX);
    scrub->next_ns = kvt_time_add(scrub->next_ns, cost_ns);
}

bool kvt_store_scrub_turn(struct kvt_store *store, uint32_t budget)
{
    struct store_scrub *scrub = &store->scrub;

    while (scrub->bytes_per_s != 0 && !store->is_draining && store->now_ns >= scrub->next_ns &&
           scrub->inflight < INFLIGHT_MAX) {
        struct cell *cell = next_cell(store, &budget);
        uint64_t slot_bytes;

        if (cell == NULL && budget == 0)
            return true;
        if (cell == NULL) {
            end_round(store);
            return false;
        }
        slot_bytes = kvt_store_component(store, cell)->slot_bytes;
        switch (kvt_store_is_lower_on(store)
                    ? kvt_store_start_bounce(store, cell, scrub->shard, NULL)
                    : START_WAIT) {
        case START_DONE:
            scrub->inflight++;
            pay(store, slot_bytes);
            break;
        case START_NONE: /* larger than all bounce slots together */
            scrub->skipped_copies += scrub->shard == 0;
            break;
        case START_WAIT:
        case START_LATER:
            scrub->next_ns = kvt_time_add(store->now_ns, AGAIN_NS);
            return false;
        }
        scrub->shard++; /* behind the last one: next_cell goes on */
    }
    return false;
}

uint64_t kvt_store_scrub_next_ns(const struct kvt_store *store)
{
    const struct store_scrub *scrub = &store->scrub;

    if (scrub->bytes_per_s == 0 || store->is_draining || scrub->inflight == INFLIGHT_MAX)
        return KVT_TIME_NEVER_NS;
    return KVT_MAX(scrub->next_ns, store->now_ns);
}

void kvt_store_upkeep(const struct kvt_store *store, struct kvt_store_upkeep *ret_upkeep)
{
    const struct store_save *save = &store->save;
    const struct store_scrub *scrub = &store->scrub;

    *ret_upkeep = (struct kvt_store_upkeep){
        .save = {.is_running = save->is_running,
                 .copies_left = store->unsaved,
                 .copies_written = save->copies_written,
                 .bytes_written = save->bytes_written,
                 .copies_failed = save->copies_failed},
        .scrub = {.bytes_per_s = scrub->bytes_per_s,
                  .checked_copies = scrub->checked_copies,
                  .checked_bytes = scrub->checked_bytes,
                  .bad_copies = scrub->bad_copies,
                  .skipped_copies = scrub->skipped_copies,
                  .rounds = scrub->rounds},
    };
}
