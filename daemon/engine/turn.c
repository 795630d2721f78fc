/* The turn, the thread's body, and stop. A turn does a bounded amount of each kind of work and says
 * whether there is more. */
#include "daemon/engine/internal.h"

typedef void (*handler_fn)(struct kvt_engine *engine, struct kvt_op *op);

static const handler_fn handlers[KVT_OP_KINDS] = {
    [KVT_OP_OPEN_NAMESPACE] = eng_op_open_namespace,
    [KVT_OP_ATTACH] = eng_op_attach,
    [KVT_OP_DETACH] = eng_op_detach,
    [KVT_OP_LOOKUP] = eng_op_lookup,
    [KVT_OP_PROMOTE] = eng_op_promote,
    [KVT_OP_RESERVE] = eng_op_reserve,
    [KVT_OP_DEMOTE] = eng_op_demote,
    [KVT_OP_QUIESCE] = eng_op_quiesce,
    [KVT_OP_RELEASE] = eng_op_release,
    [KVT_OP_EVICT] = eng_op_evict,
    [KVT_OP_RESET] = eng_op_reset,
    [KVT_OP_STATS] = eng_op_stats,
    [KVT_OP_DUMP] = eng_op_dump,
    [KVT_OP_HEALTH] = eng_op_health,
    [KVT_OP_MAINTAIN] = eng_op_maintain,
};

/* The ids of engine blocks are looked at once, and those of a Promote may have to be sorted. */
static uint64_t cost_of_moves(const struct kvt_api_moves *moves, uint32_t count, uint64_t each,
                              uint64_t each_id)
{
    uint64_t cost = 0;

    for (uint32_t i = 0; i < count; i++)
        cost += each * moves[i].count + each_id * moves[i].engine_blocks_count;
    return cost;
}

uint64_t eng_cost_of(const struct kvt_op *op)
{
    uint64_t moves = 0;

    switch (op->kind) {
    case KVT_OP_LOOKUP:
        return 64 + op->req.lookup.prefix.tokens_count;
    case KVT_OP_PROMOTE:
        return 128 + op->req.promote.prefix.tokens_count +
               cost_of_moves(op->req.promote.moves, op->req.promote.moves_count, 16, 8);
    case KVT_OP_DEMOTE:
        return 128 + op->req.demote.prefix.tokens_count +
               cost_of_moves(op->req.demote.moves, op->req.demote.moves_count, 32, 1);
    case KVT_OP_RESERVE:
        for (uint32_t i = 0; i < op->req.reserve.wants_count; i++)
            moves +=
                op->req.reserve.wants[i].end_block_idx - op->req.reserve.wants[i].first_block_idx;
        return 128 + op->req.reserve.prefix.tokens_count + 32 * KVT_MIN(moves, UINT32_MAX);
    case KVT_OP_STATS:
    case KVT_OP_DUMP:
        return 16384;
    default:
        return 1024;
    }
}

static bool is_served_while_stopping(enum kvt_op_kind kind)
{
    return kind == KVT_OP_DETACH || kind == KVT_OP_STATS || kind == KVT_OP_HEALTH ||
           kind == KVT_OP_QUIESCE || kind == KVT_OP_RELEASE;
}

/* An Attach owns the mappings of its request, also when it is not even looked at. */
static void refuse(struct kvt_engine *engine, struct kvt_op *op, enum kvt_code code,
                   const char *text)
{
    if (op->kind == KVT_OP_ATTACH)
        eng_regions_put(engine, op);
    kvt_op_fail(op, code, "%s", text);
    eng_answer(engine, op);
}

void eng_serve(struct kvt_engine *engine, struct kvt_op *op)
{
    op->code = KVT_CODE_OK;
    op->service = NULL;
    if ((unsigned)op->kind >= KVT_OP_KINDS) {
        refuse(engine, op, KVT_CODE_UNIMPLEMENTED, "no such request");
    } else if (engine->is_stopping && !is_served_while_stopping(op->kind)) {
        refuse(engine, op, KVT_CODE_UNAVAILABLE, "the daemon is stopping");
    } else if (op->kind != KVT_OP_DETACH && atomic_load(&op->is_cancelled)) {
        refuse(engine, op, KVT_CODE_CANCELLED, "cancelled");
    } else {
        handlers[op->kind](engine, op);
        if (op->service == NULL) /* no run took it: it is over */
            eng_answer(engine, op);
    }
}

/* A session's DETACH comes after everything it sent, so the inbox is emptied of what was there
 * before the stack was looked at: an Attach that is still in the ring has no handle to detach. */
static void take_detaches(struct kvt_engine *engine)
{
    struct kvt_op *op = atomic_exchange(&engine->detach_stack, NULL);

    while (op != NULL) {
        struct kvt_op *next = op->service;

        eng_serve(engine, op);
        op = next;
    }
}

static bool take_inbox(struct kvt_engine *engine)
{
    uint64_t spent = 0;

    while (spent < KVT_ENGINE_TURN_COST) {
        struct kvt_op *op = kvt_ring_take(&engine->inbox);

        if (op == NULL)
            return false;
        spent += eng_cost_of(op);
        eng_serve(engine, op);
    }
    return true;
}

static bool fire_timers(struct kvt_engine *engine)
{
    for (uint32_t i = 0; i < KVT_ENGINE_SLICE; i++) {
        struct eng_timer *timer = eng_heap_due(&engine->heap, engine->now_ns);

        if (timer == NULL)
            return false;
        switch (timer->kind) {
        case ENG_TIMER_LEASE:
            eng_lease_expire(engine, KVT_CONTAINER_OF(timer, struct eng_lease, timer));
            break;
        case ENG_TIMER_TICKET:
            eng_ticket_expire(engine, KVT_CONTAINER_OF(timer, struct eng_ticket, timer));
            break;
        case ENG_TIMER_RUN:
            eng_run_expire(engine, KVT_CONTAINER_OF(timer, struct eng_run, timer));
            break;
        }
    }
    return true;
}

static void begin_stop(struct kvt_engine *engine)
{
    engine->is_stopping = true;
    eng_openings_stop(engine);
    eng_prefetch_cancel(engine);
    (void)eng_parked_slice(engine);
    eng_resets_end(engine, KVT_CODE_UNAVAILABLE, "the daemon is stopping");
    kvt_list_for_each (link, &engine->runs) {
        struct eng_run *run = KVT_CONTAINER_OF(link, struct eng_run, link);

        if (run->op != NULL)
            eng_run_stop(engine, run, KVT_MOVE_ABORTED, KVT_CODE_UNAVAILABLE,
                         "the daemon is stopping");
    }
}

bool kvt_engine_turn(struct kvt_engine *engine, uint64_t now_ns)
{
    bool has_more;

    KVT_ASSERT(engine->magic == KVT_ENGINE_MAGIC);
    engine->now_ns = KVT_MAX(engine->now_ns, now_ns);
    if (engine->start_ns == 0) {
        engine->start_ns = engine->now_ns;
        engine->load_wait_end_ns = kvt_time_add(engine->now_ns, engine->config.load_wait_ns);
    }
    has_more = kvt_store_turn(engine->store, engine->now_ns, KVT_ENGINE_TURN_BLOCKS);
    if (atomic_load(&engine->is_stop_asked) && !engine->is_stopping)
        begin_stop(engine);
    eng_gpu_watch(engine);
    eng_openings_slice(engine);
    take_detaches(engine);
    has_more |= take_inbox(engine);
    if (atomic_exchange(&engine->has_cancelled, false)) {
        eng_runs_cancelled(engine);
        eng_openings_cancelled(engine);
    }
    has_more |= eng_parked_slice(engine);
    eng_catalog_slice(engine);
    has_more |= fire_timers(engine);
    has_more |= eng_holds_slice(engine);
    has_more |= eng_leases_slice(engine);
    has_more |= eng_tickets_slice(engine);
    has_more |= eng_prefetch_slice(engine);
    eng_maintain_slice(engine);
    has_more |= eng_runs_pump(engine);
    has_more |= engine->has_dying;
    if (engine->has_submitted) { /* hand what was submitted to the tiers before sleeping */
        engine->has_submitted = false;
        has_more |= kvt_store_turn(engine->store, engine->now_ns, KVT_ENGINE_TURN_BLOCKS);
        has_more |= !kvt_list_is_empty(&engine->pump);
    }
    return has_more;
}

uint64_t kvt_engine_next_ns(const struct kvt_engine *engine)
{
    uint64_t next_ns = KVT_MIN(eng_heap_next_ns(&engine->heap), kvt_store_next_ns(engine->store));

    next_ns = KVT_MIN(next_ns, eng_parked_next_ns(engine));
    next_ns = KVT_MIN(next_ns, eng_openings_next_ns(engine));
    next_ns = KVT_MIN(next_ns, eng_resets_next_ns(engine));
    return KVT_MIN(next_ns, eng_maintain_next_ns(engine));
}

/* ---- the thread -------------------------------------------------------------------------------
 */

bool kvt_engine_is_stopped(struct kvt_engine *engine)
{
    if (!engine->is_stopping)
        return false;
    if (!engine->is_drained) {
        engine->is_drained = kvt_store_drain(engine->store, engine->now_ns) ||
                             engine->now_ns >= atomic_load(&engine->drain_deadline_ns);
        if (!engine->is_drained)
            return false;
    }
    return engine->runs_count == 0 && engine->jobs_count == 0 &&
           kvt_store_inflight(engine->store) == 0 && kvt_ring_is_empty(&engine->inbox) &&
           atomic_load(&engine->detach_stack) == NULL;
}

static void sleep_until_due(struct kvt_engine *engine)
{
    uint64_t next_ns, now_ns;

    kvt_doorbell_arm(engine->config.doorbell);
    if (!kvt_ring_is_empty(&engine->inbox) || atomic_load(&engine->detach_stack) != NULL ||
        atomic_load(&engine->has_cancelled) ||
        (engine->janitor != NULL && eng_janitor_has_opened(engine->janitor)) ||
        (atomic_load(&engine->is_stop_asked) && !engine->is_stopping) ||
        kvt_store_turn(engine->store, engine->now_ns, KVT_ENGINE_TURN_BLOCKS) ||
        !kvt_list_is_empty(&engine->pump)) {
        kvt_doorbell_disarm(engine->config.doorbell);
        return;
    }
    next_ns = kvt_engine_next_ns(engine);
    if (engine->is_stopping)
        next_ns = KVT_MIN(next_ns, kvt_time_add(engine->now_ns, 10 * KVT_NS_PER_MS));
    now_ns = kvt_clock_mono_ns();
    if (next_ns <= now_ns)
        kvt_doorbell_disarm(engine->config.doorbell);
    else
        kvt_doorbell_wait(engine->config.doorbell,
                          next_ns == KVT_TIME_NEVER_NS ? next_ns : next_ns - now_ns);
}

void kvt_engine_run(struct kvt_engine *engine)
{
    KVT_ASSERT(engine->config.doorbell != NULL);
    if (eng_janitor_start(engine) < 0)
        engine->janitor = NULL; /* unmapping is done here, then */
    for (;;) {
        bool has_more = kvt_engine_turn(engine, kvt_clock_mono_ns());

        if (kvt_engine_is_stopped(engine))
            break;
        if (!has_more)
            sleep_until_due(engine);
    }
    eng_janitor_stop(engine);
}

void kvt_engine_stop(struct kvt_engine *engine, uint64_t drain_deadline_ns)
{
    atomic_store(&engine->drain_deadline_ns, drain_deadline_ns);
    atomic_store(&engine->is_stop_asked, true);
    if (engine->config.doorbell != NULL)
        kvt_doorbell_ring(engine->config.doorbell);
}
