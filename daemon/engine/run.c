/* Runs: requests that take more than a moment (Promote, Demote, Quiesce), and what is left of them.
 *
 *   started ──> issuing moves, a bounded number of jobs at a time ──> answered, freed
 *                  │ deadline, cancel, session ended, stop
 *                  v
 *               ending: jobs that did not start are cancelled; the answer goes out at once;
 *               jobs that touch client memory go on, and the run stays, without its request,
 *               until the last of them ended: then the op is quiesced
 *
 * An inline request is the exception: its client memory is the request's own arena, so it is
 * answered only when its last job ended.
 *
 * Everything that moves a run on happens in eng_runs_pump; the rest only puts it on the list. */
#include <string.h>

#include "daemon/engine/internal.h"

#define PUMP_JOBS_A_TURN 2048u

static void wake(struct kvt_engine *engine, struct eng_run *run)
{
    if (kvt_list_is_empty(&run->todo_link))
        kvt_list_push_back(&engine->pump, &run->todo_link);
}

static struct eng_run *find_op_id(const struct eng_session *session, uint64_t op_id)
{
    kvt_list_for_each (link, &session->runs) {
        struct eng_run *run = KVT_CONTAINER_OF(link, struct eng_run, session_link);

        if (run->op_id == op_id && run->kind != ENG_RUN_QUIESCE)
            return run;
    }
    return NULL;
}

struct eng_run *eng_run_new(struct kvt_engine *engine, struct kvt_op *op,
                            struct eng_session *session, enum eng_run_kind kind)
{
    struct eng_run *run;

    if (engine->ops_count >= engine->config.ops_max) {
        kvt_op_fail(op, KVT_CODE_RESOURCE_EXHAUSTED,
                    "%u requests are in progress, the most there can be", engine->ops_count);
        return NULL;
    }
    if (!kvt_list_is_empty(&engine->runs_free)) {
        run = KVT_CONTAINER_OF(engine->runs_free.next, struct eng_run, link);
        kvt_list_remove(&run->link);
    } else if (engine->runs_made < engine->runs_max) {
        run = &engine->runs_pool[engine->runs_made++];
    } else {
        kvt_op_fail(op, KVT_CODE_RESOURCE_EXHAUSTED,
                    "%u requests are in progress or not quiesced yet", engine->runs_count);
        return NULL;
    }
    *run = (struct eng_run){.magic = KVT_RUN_MAGIC,
                            .kind = kind,
                            .op = op,
                            .session = session,
                            .ns = session->ns,
                            .epoch = session->ns->epoch,
                            .groups_count = 1};
    run->timer.kind = ENG_TIMER_RUN;
    kvt_list_init(&run->link);
    kvt_list_init(&run->session_link);
    kvt_list_init(&run->todo_link);
    kvt_list_init(&run->jobs);
    kvt_list_init(&run->waiters);
    kvt_list_init(&run->wait_link);
    kvt_list_push_back(&engine->runs, &run->link);
    kvt_list_push_back(&session->runs, &run->session_link);
    eng_session_ref(session);
    session->group->runs_count++;
    engine->runs_count++;
    engine->ops_count++;
    op->service = run;
    return run;
}

/* ---- the end of a run -------------------------------------------------------------------------
 */

/* The op may be of an earlier session of the same rank: its stream broke, its copies go on. */
static struct eng_run *find_quiesce(struct kvt_engine *engine, const struct eng_session *session,
                                    uint64_t op_id)
{
    kvt_list_for_each (link, &engine->runs) {
        struct eng_run *run = KVT_CONTAINER_OF(link, struct eng_run, link);
        const struct eng_session *of = run->session;

        if (run->op_id != op_id || run->kind == ENG_RUN_QUIESCE)
            continue;
        if (of == session ||
            (!of->is_alive && of->rank == session->rank && of->peer_uid == session->peer_uid &&
             memcmp(of->group->engine_id, session->group->engine_id, KVT_ENGINE_ID_BYTES) == 0))
            return run;
    }
    return NULL;
}

static void tell_quiesced(struct kvt_engine *engine, struct eng_run *run)
{
    struct kvt_notice notice = {.kind = KVT_NOTICE_QUIESCED, .op_id = run->op_id};

    while (!kvt_list_is_empty(&run->waiters)) {
        struct eng_run *waiter = KVT_CONTAINER_OF(run->waiters.next, struct eng_run, wait_link);
        struct eng_run *next = find_quiesce(engine, waiter->session, waiter->op_id);

        kvt_list_remove(&waiter->wait_link);
        if (next != NULL && !waiter->is_ending) { /* another one with this id still copies */
            kvt_list_push_back(&next->waiters, &waiter->wait_link);
            continue;
        }
        waiter->is_ending = true;
        waiter->end_code = KVT_CODE_OK;
        wake(engine, waiter);
    }
    if (run->is_late && run->op_id != 0 && run->kind != ENG_RUN_QUIESCE && run->session->is_alive)
        eng_notify(engine, run->session, &notice);
}

static void run_free(struct kvt_engine *engine, struct eng_run *run)
{
    KVT_ASSERT(run->magic == KVT_RUN_MAGIC && run->op == NULL && run->jobs_count == 0);
    kvt_list_remove(&run->link); /* first: who waits for it must not find it again */
    tell_quiesced(engine, run);
    eng_timer_clear(&engine->heap, &run->timer);
    kvt_list_remove(&run->session_link);
    kvt_list_remove(&run->todo_link);
    kvt_list_remove(&run->wait_link);
    if (run->lease != NULL)
        eng_lease_unuse(engine, run->lease);
    if (run->ticket != NULL)
        eng_ticket_unuse(engine, run->ticket);
    if (run->holds_path)
        (void)!kvt_radix_release(engine->radix, run->end); /* stale after a Reset */
    run->session->group->runs_count--;
    eng_session_unref(engine, run->session);
    run->magic = 0;
    run->session = NULL;
    engine->runs_count--;
    kvt_list_push_front(&engine->runs_free, &run->link);
}

void eng_run_drop(struct kvt_engine *engine, struct eng_run *run)
{
    KVT_ASSERT(run->jobs_count == 0 && run->op != NULL);
    run->op->service = NULL;
    run->op = NULL;
    engine->ops_count--;
    run_free(engine, run);
}

static void answer(struct kvt_engine *engine, struct eng_run *run)
{
    struct kvt_op *op = run->op;

    if (run->kind == ENG_RUN_PROMOTE || run->kind == ENG_RUN_RAISE)
        eng_promote_answer(engine, run);
    else if (run->kind != ENG_RUN_QUIESCE)
        eng_demote_answer(engine, run);
    if (run->end_code != KVT_CODE_OK)
        kvt_op_fail(op, run->end_code, "%s", run->end_text);
    run->op = NULL;
    run->moves = NULL;
    run->group_ended = NULL;
    engine->ops_count--;
    eng_timer_clear(&engine->heap, &run->timer);
    op->service = NULL;
    eng_answer(engine, op);
}

/* Answers now although jobs are still touching client memory. What they do does not count. */
static void answer_late(struct kvt_engine *engine, struct eng_run *run)
{
    kvt_list_for_each (link, &run->jobs) {
        const struct eng_job *job = KVT_CONTAINER_OF(link, struct eng_job, link);

        run->moves[job->moves_at].results[job->move_at] = (uint8_t)run->end_result;
    }
    run->is_late = true;
    eng_count(engine, KVT_COUNTER_QUIESCED_LATE, 1);
    answer(engine, run);
}

void eng_run_stop(struct kvt_engine *engine, struct eng_run *run, enum kvt_move_result result,
                  enum kvt_code code, const char *text)
{
    struct kvt_list todo;

    if (run->is_ending)
        return;
    run->is_ending = true;
    run->end_result = result;
    run->end_code = code;
    run->end_text = text;
    wake(engine, run);
    /* A cancelled job leaves its list in its done; each is asked once. */
    kvt_list_init(&todo);
    while (!kvt_list_is_empty(&run->jobs)) {
        struct kvt_list *link = run->jobs.next;

        kvt_list_remove(link);
        kvt_list_push_back(&todo, link);
    }
    while (!kvt_list_is_empty(&todo)) {
        struct eng_job *job = KVT_CONTAINER_OF(todo.next, struct eng_job, link);

        kvt_list_remove(&job->link);
        kvt_list_push_back(&run->jobs, &job->link);
        kvt_store_cancel(engine->store, &job->job);
    }
}

void eng_run_expire(struct kvt_engine *engine, struct eng_run *run)
{
    eng_timer_clear(&engine->heap, &run->timer);
    if (run->kind == ENG_RUN_QUIESCE)
        eng_run_stop(engine, run, KVT_MOVE_LATE, KVT_CODE_DEADLINE_EXCEEDED,
                     "not quiesced yet: ask again, or wait for the notice");
    else
        eng_run_stop(engine, run, KVT_MOVE_LATE, KVT_CODE_OK, NULL);
}

void eng_runs_cancelled(struct kvt_engine *engine)
{
    kvt_list_for_each (link, &engine->runs) {
        struct eng_run *run = KVT_CONTAINER_OF(link, struct eng_run, link);

        if (run->op != NULL && atomic_load(&run->op->is_cancelled))
            eng_run_stop(engine, run, KVT_MOVE_ABORTED, KVT_CODE_CANCELLED, "cancelled");
    }
}

/* ---- going on ---------------------------------------------------------------------------------
 */

void eng_run_start(struct kvt_engine *engine, struct eng_run *run, uint64_t timeout_ns)
{
    uint64_t at_ns = run->op->deadline_ns;

    if (timeout_ns != 0)
        at_ns = KVT_MIN(at_ns, kvt_time_add(engine->now_ns, timeout_ns));
    run->deadline_ns = eng_answer_ns(engine, at_ns);
    eng_timer_set(&engine->heap, &run->timer, run->deadline_ns);
    wake(engine, run);
}

static void tell_progress(struct eng_run *run)
{
    struct kvt_op *op = run->op;

    if (op == NULL || op->progress == NULL || run->groups_count < 2 || run->is_ending ||
        run->moves_total == 0)
        return;
    while (run->groups_told < run->groups_count &&
           run->group_ended[run->groups_told] == run->moves_total) {
        struct kvt_api_progress progress = {run->groups_told, run->groups_count};

        run->groups_told++;
        op->progress(op, &progress);
    }
}

static void book_lower(struct eng_run *run, const struct eng_job *job)
{
    if (job->job.result != KVT_MOVE_DONE && job->job.result != KVT_MOVE_PRESENT)
        run->is_broken = true;
}

void eng_run_job_done(struct kvt_engine *engine, struct eng_run *run, struct eng_job *job)
{
    enum kvt_move_result result = job->job.result;
    struct eng_moves *moves;
    uint8_t *at;

    KVT_ASSERT(run->magic == KVT_RUN_MAGIC && run->jobs_count > 0);
    run->jobs_count--;
    wake(engine, run);
    if (run->op == NULL)
        return; /* answered already: only its end counts */
    if (run->phase != ENG_PHASE_MOVE) {
        book_lower(run, job);
        return;
    }
    if (result != KVT_MOVE_DONE && run->is_ending)
        result = run->end_result;
    if (run->epoch != run->ns->epoch)
        result = KVT_MOVE_ABORTED; /* bytes of an older epoch are never served */
    moves = &run->moves[job->moves_at];
    at = &moves->results[job->move_at];
    run->group_ended[job->group]++;
    run->moved_bytes += job->job.moved_bytes;
    if (result != KVT_MOVE_DONE) {
        *at = (uint8_t)result;
    } else if (job->group + 1 == run->groups_count && *at == ENG_RESULT_NONE) {
        *at = KVT_MOVE_DONE;
        run->moved_from[job->job.from]++;
    }
}

static enum eng_start start_move(struct kvt_engine *engine, struct eng_run *run,
                                 struct eng_moves *moves, uint32_t move)
{
    uint8_t result = moves->results[move];

    if (run->phase == ENG_PHASE_MOVE && result != ENG_RESULT_NONE)
        return ENG_SETTLED;
    if (run->epoch != run->ns->epoch) {
        moves->results[move] = KVT_MOVE_ABORTED;
        run->is_broken = true; /* a durable Demote that a Reset overtook is not durable */
        return ENG_SETTLED;
    }
    if (run->kind == ENG_RUN_PROMOTE || run->kind == ENG_RUN_RAISE)
        return eng_promote_start(engine, run, moves, move);
    return eng_demote_start(engine, run, moves, move);
}

/* Starts jobs, in group order; true when all of this phase were started. */
static bool issue(struct kvt_engine *engine, struct eng_run *run, uint32_t *inout_budget)
{
    uint32_t started = 0;

    while (run->at_group < run->groups_count) {
        struct eng_moves *moves = &run->moves[run->at_moves];
        enum eng_start start;

        if (run->at_moves == run->moves_count) {
            run->at_group++;
            run->at_moves = run->at_move = 0;
            continue;
        }
        if (run->at_move == moves->count) {
            run->at_moves++;
            run->at_move = 0;
            continue;
        }
        if (*inout_budget == 0 || started == KVT_ENGINE_PUMP_JOBS ||
            run->jobs_count >= KVT_ENGINE_RUN_JOBS_MAX)
            return false;
        start = start_move(engine, run, moves, run->at_move);
        if (start == ENG_WAIT)
            return false;
        (*inout_budget)--;
        if (start == ENG_STARTED)
            started++;
        else if (run->phase == ENG_PHASE_MOVE)
            run->group_ended[run->at_group]++;
        run->at_move++;
    }
    return true;
}

/* Moves one run on; true when it wants another round although none of its jobs ended. */
static bool step(struct kvt_engine *engine, struct eng_run *run, uint32_t *inout_budget)
{
    bool is_issued = true;

    if (run->op == NULL) {
        if (run->jobs_count == 0)
            run_free(engine, run);
        return false;
    }
    if (run->kind == ENG_RUN_QUIESCE) {
        if (!run->is_ending)
            return false;
    } else if (!run->is_ending) {
        is_issued = issue(engine, run, inout_budget);
        tell_progress(run);
    }
    if (run->jobs_count > 0 || !is_issued) {
        if (run->is_ending && run->jobs_count > 0 && !run->is_inline &&
            run->phase == ENG_PHASE_MOVE)
            answer_late(engine, run);
        return !is_issued && run->jobs_count < KVT_ENGINE_RUN_JOBS_MAX;
    }
    if (!run->is_ending && eng_demote_phase(engine, run))
        return true;
    answer(engine, run);
    run_free(engine, run);
    return false;
}

bool eng_runs_pump(struct kvt_engine *engine)
{
    uint32_t budget = PUMP_JOBS_A_TURN, waiting = 0;

    while (!kvt_list_is_empty(&engine->pump) && budget > 0) {
        struct eng_run *run = KVT_CONTAINER_OF(engine->pump.next, struct eng_run, todo_link);
        uint32_t before = budget;

        kvt_list_remove(&run->todo_link);
        if (!step(engine, run, &budget)) {
            waiting = 0;
            continue;
        }
        wake(engine, run);
        /* All that is left waits for jobs of others to end: no use in going round again. */
        waiting = before == budget ? waiting + 1 : 0;
        if (waiting > engine->runs_count)
            return false;
    }
    return !kvt_list_is_empty(&engine->pump);
}

/* ---- Quiesce ----------------------------------------------------------------------------------
 */

void eng_op_quiesce(struct kvt_engine *engine, struct kvt_op *op)
{
    const struct kvt_req_quiesce *req = &op->req.quiesce;
    struct eng_session *session = eng_session_of(engine, op, &req->session);
    struct eng_run *target, *run;

    if (session == NULL)
        return;
    if (req->op_id == 0) {
        kvt_op_fail(op, KVT_CODE_INVALID_ARGUMENT, "op_id 0 names no request");
        return;
    }
    target = find_quiesce(engine, session, req->op_id);
    if (target == NULL)
        return; /* over, or never seen: nothing touches its memory */
    run = eng_run_new(engine, op, session, ENG_RUN_QUIESCE);
    if (run == NULL)
        return;
    run->op_id = req->op_id;
    kvt_list_push_back(&target->waiters, &run->wait_link);
    eng_run_start(engine, run, 0);
}

bool eng_op_id_is_free(struct kvt_op *op, const struct eng_session *session, uint64_t op_id)
{
    if (op_id == 0 || find_op_id(session, op_id) == NULL)
        return true;
    kvt_op_fail(op, KVT_CODE_FAILED_PRECONDITION,
                "op_id %llu is in use: a request with it is in progress or not quiesced",
                (unsigned long long)op_id);
    return false;
}
