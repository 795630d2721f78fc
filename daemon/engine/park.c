/* Requests at start: while the index of L3 is still being read, the tree may lack what L3 has. A
 * lookup that the tree cannot answer in full waits for the index, for load_wait_ns after start at
 * most and never beyond its own deadline: then it is answered with what is known. While rows come
 * it is looked up again now and then: what it asks for may have been among them. Reserve and Demote
 * by prefix wait, too: a block that is stored anew before its row came would have another number,
 * and its row, with all that is below it, would not fit any more. */
#include "daemon/engine/internal.h"

#define PARKED_MAX 4096u
#define ANSWER_NS (20 * KVT_NS_PER_MS) /* before its deadline, for the answer */
#define TRY_NS (50 * KVT_NS_PER_MS)

static uint64_t park_end_ns(const struct kvt_engine *engine, const struct kvt_op *op)
{
    return KVT_MIN(engine->load_wait_end_ns, op->deadline_ns - KVT_MIN(op->deadline_ns, ANSWER_NS));
}

static void keep(struct kvt_engine *engine, struct kvt_op *op)
{
    /* The last one's link is the engine: an op that somebody has taken has a link. */
    op->service = engine->parked != NULL ? (void *)engine->parked : (void *)engine;
    engine->parked = op;
    engine->parked_count++;
}

bool eng_park(struct kvt_engine *engine, struct kvt_op *op)
{
    if (engine->is_unparking || engine->is_stopping || !kvt_store_is_loading(engine->store) ||
        engine->parked_count == PARKED_MAX || engine->now_ns >= park_end_ns(engine, op))
        return false;
    keep(engine, op);
    return true;
}

/* Whether something was loaded since the last try, and that was a while ago. */
static bool is_try_due(struct kvt_engine *engine)
{
    uint64_t copies;

    if (engine->parked == NULL || engine->now_ns - engine->parked_tried_ns < TRY_NS)
        return false;
    copies = kvt_store_loaded_copies(engine->store);
    if (copies == engine->parked_tried_copies)
        return false;
    engine->parked_tried_ns = engine->now_ns;
    engine->parked_tried_copies = copies;
    return true;
}

/* Those that cannot wait any more; all when there is nothing to wait for: in a turn as many as it
 * may take. Lookups that are tried again park themselves again. True: some are left that need not
 * wait. */
bool eng_parked_slice(struct kvt_engine *engine)
{
    bool is_try = is_try_due(engine);
    struct kvt_op *op = engine->parked;
    uint64_t spent = 0;
    bool is_left = false;

    engine->parked = NULL;
    engine->parked_count = 0;
    while (op != NULL) {
        struct kvt_op *next = op->service;
        bool is_cancelled = atomic_load(&op->is_cancelled);
        bool is_tried = is_try && op->kind == KVT_OP_LOOKUP && !is_cancelled;

        if (!is_tried && !is_cancelled && eng_park(engine, op)) {
            /* it waits on */
        } else if (spent >= KVT_ENGINE_TURN_COST && !engine->is_stopping) {
            keep(engine, op);
            is_left |= !is_tried;
        } else {
            spent += eng_cost_of(op);
            engine->is_unparking = !is_tried;
            eng_serve(engine, op);
            engine->is_unparking = false;
        }
        op = (void *)next == (void *)engine ? NULL : next;
    }
    return is_left;
}

uint64_t eng_parked_next_ns(const struct kvt_engine *engine)
{
    const struct kvt_op *op = engine->parked;
    uint64_t next_ns = KVT_TIME_NEVER_NS;

    while (op != NULL) {
        next_ns = KVT_MIN(next_ns, park_end_ns(engine, op));
        op = (void *)op->service == (const void *)engine ? NULL : op->service;
    }
    return next_ns;
}
