/* Calls of a worker: time, errors and what an error means for the process. An error of one call is
 * an answer like a miss; only a daemon that is gone ends the engine. */
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "daemon/base/clock.h"
#include "tools/kvtier-bench/engine.h"

void bench_give_up(struct bench_engine *engine, int exit_status, const char *why)
{
    if (atomic_exchange(&engine->is_stopping, true))
        return;
    (void)snprintf(engine->shared->failed[engine->engine_idx],
                   sizeof(engine->shared->failed[engine->engine_idx]), "%s", why);
    atomic_store(&engine->exit_status, exit_status);
}

int bench_caller_init(struct bench_caller *caller, struct bench_engine *engine,
                      struct kvt_bench_stats *stats)
{
    caller->engine = engine;
    caller->stats = stats;
    return kvt_arena_init(&caller->arena, KVT_OP_ARENA_BYTES_MAX, KVT_OP_ARENA_BYTES_MAX);
}

void bench_caller_deinit(struct bench_caller *caller)
{
    kvt_arena_deinit(&caller->arena);
}

void bench_call_begin(struct bench_caller *caller, enum kvt_op_kind kind)
{
    kvt_arena_reset(&caller->arena);
    memset(&caller->op, 0, sizeof(caller->op));
    caller->op.kind = kind;
    caller->op.arena = &caller->arena;
}

void bench_note_error(struct bench_engine *engine, struct kvt_bench_stats *stats,
                      const struct bench_error *error)
{
    bool is_gone = error->code == KVT_CODE_UNAVAILABLE ||
                   (error->code == KVT_CODE_FAILED_PRECONDITION && error->kind != KVT_OP_LOOKUP &&
                    error->kind != KVT_OP_RESERVE);
    char why[256];

    stats->errors[error->kind][KVT_MIN((uint32_t)error->code, KVT_BENCH_CODES - 1)]++;
    (void)snprintf(why, sizeof(why), "%s: %.200s", kvt_op_kind_text(error->kind), error->message);
    if (is_gone)
        bench_give_up(engine, KVT_BENCH_EXIT_AGAIN, why);
    else if (error->code == KVT_CODE_INVALID_ARGUMENT || error->code == KVT_CODE_INTERNAL ||
             error->code == KVT_CODE_PERMISSION_DENIED || error->code == KVT_CODE_UNIMPLEMENTED)
        bench_give_up(engine, 1, why); /* never right, whatever the cache does */
}

enum kvt_code bench_call(struct bench_caller *caller, enum kvt_bench_call which)
{
    struct kvt_op *op = &caller->op;
    uint64_t began_ns = kvt_clock_mono_ns();

    op->deadline_ns = began_ns + caller->engine->options->deadline_ns;
    kvt_client_call(caller->engine->link.client, op);
    if (which < KVT_BENCH_CALLS)
        kvt_histogram_add(&caller->stats->calls[which], kvt_clock_mono_ns() - began_ns);
    if (op->code != KVT_CODE_OK)
        bench_note_error(caller->engine, caller->stats,
                         &(struct bench_error){op->kind, op->code, op->message});
    return op->code;
}

void bench_call_release(struct bench_caller *caller, struct kvt_handle session,
                        struct kvt_handle lease, struct kvt_handle ticket)
{
    bench_call_begin(caller, KVT_OP_RELEASE);
    caller->op.req.release.session = session;
    caller->op.req.release.lease = lease;
    caller->op.req.release.ticket = ticket;
    (void)bench_call(caller, KVT_BENCH_CALLS);
}

bool bench_call_quiesce(struct bench_worker *worker, uint32_t rank, uint64_t op_id)
{
    worker->stats.quiesced_later++;
    for (int i = 0; i < 10 && !atomic_load(&worker->engine->is_stopping); i++) {
        bench_call_begin(&worker->call, KVT_OP_QUIESCE);
        worker->call.op.req.quiesce.session = worker->engine->ranks[rank].handle;
        worker->call.op.req.quiesce.op_id = op_id;
        if (bench_call(&worker->call, KVT_BENCH_CALLS) == KVT_CODE_OK)
            return true;
    }
    return false;
}

static void *canceller_main(void *arg)
{
    struct bench_worker *worker = arg;

    (void)pthread_mutex_lock(&worker->cancel_lock);
    while (!worker->is_cancel_over) {
        struct timespec at = {.tv_sec = (time_t)(worker->cancel_at_ns / KVT_NS_PER_S),
                              .tv_nsec = (long)(worker->cancel_at_ns % KVT_NS_PER_S)};

        if (!worker->is_cancel_armed) {
            (void)pthread_cond_wait(&worker->cancel_changed, &worker->cancel_lock);
        } else if (kvt_clock_mono_ns() < worker->cancel_at_ns) {
            (void)pthread_cond_clockwait(&worker->cancel_changed, &worker->cancel_lock,
                                         CLOCK_MONOTONIC, &at);
        } else {
            /* The lock keeps the worker from ending the call's op under our hands. */
            kvt_client_cancel(worker->engine->link.client, &worker->call.op);
            worker->is_cancel_armed = false;
        }
    }
    (void)pthread_mutex_unlock(&worker->cancel_lock);
    return NULL;
}

int bench_canceller_start(struct bench_worker *worker)
{
    int r = pthread_mutex_init(&worker->cancel_lock, NULL);

    if (r == 0)
        r = pthread_cond_init(&worker->cancel_changed, NULL);
    if (r == 0)
        r = pthread_create(&worker->canceller, NULL, canceller_main, worker);
    worker->has_canceller = r == 0;
    return -r;
}

void bench_canceller_stop(struct bench_worker *worker)
{
    if (!worker->has_canceller)
        return;
    (void)pthread_mutex_lock(&worker->cancel_lock);
    worker->is_cancel_over = true;
    (void)pthread_cond_signal(&worker->cancel_changed);
    (void)pthread_mutex_unlock(&worker->cancel_lock);
    (void)pthread_join(worker->canceller, NULL);
    worker->has_canceller = false;
}
