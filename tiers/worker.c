#include "tiers/worker.h"

#include <signal.h>
#include <time.h>

#include "daemon/base/clock.h"

/* While it is busy the worker wakes the engine at most this often: results of one batch should
 * reach it before the batch ends, but not one system call each. */
#define ENGINE_RING_NS (50u * KVT_NS_PER_US)
#define JOIN_PAUSE_NS (200u * KVT_NS_PER_US)

int kvt_worker_init(struct kvt_worker *worker, const struct kvt_tier_ops *ops,
                    uint32_t inflight_max, struct kvt_doorbell *engine_bell)
{
    int r;

    KVT_ASSERT(inflight_max > 0 && engine_bell != NULL);
    worker->tier.ops = ops;
    worker->tier.inflight_max = inflight_max;
    worker->engine_bell = engine_bell;
    worker->bell = KVT_DOORBELL_NULL;
    atomic_init(&worker->is_stopping, false);
    atomic_init(&worker->is_over, false);
    r = kvt_doorbell_init(&worker->bell);
    if (r == 0)
        r = kvt_ring_init(&worker->submissions, inflight_max);
    if (r == 0)
        r = kvt_ring_init(&worker->completions, inflight_max);
    if (r < 0)
        kvt_worker_deinit(worker);
    return r;
}

void kvt_worker_deinit(struct kvt_worker *worker)
{
    KVT_ASSERT(!worker->is_started);
    kvt_doorbell_deinit(&worker->bell);
    kvt_ring_deinit(&worker->submissions);
    kvt_ring_deinit(&worker->completions);
}

static void worker_ended(void *arg)
{
    struct kvt_worker *worker = arg;

    atomic_store_explicit(&worker->is_over, true, memory_order_seq_cst);
}

/* A loop may end its thread from within a call that came back too late. */
static void *worker_main(void *arg)
{
    struct kvt_worker *worker = arg;

    pthread_cleanup_push(worker_ended, worker);
    worker->loop(worker);
    pthread_cleanup_pop(1);
    return NULL;
}

int kvt_worker_thread(pthread_t *ret_thread, const char *name, void *(*entry)(void *ctx), void *ctx)
{
    static const int faults[] = {SIGBUS, SIGSEGV, SIGFPE, SIGILL, SIGABRT, SIGTRAP, SIGSYS};
    sigset_t blocked, saved;
    int r;

    (void)sigfillset(&blocked);
    for (size_t i = 0; i < KVT_COUNT_OF(faults); i++)
        (void)sigdelset(&blocked, faults[i]);
    r = pthread_sigmask(SIG_SETMASK, &blocked, &saved);
    if (r != 0)
        return kvt_trace(-r);
    r = pthread_create(ret_thread, NULL, entry, ctx);
    KVT_ASSERT(pthread_sigmask(SIG_SETMASK, &saved, NULL) == 0);
    if (r != 0)
        return kvt_trace(-r);
    (void)pthread_setname_np(*ret_thread, name);
    return 0;
}

int kvt_worker_start(struct kvt_worker *worker, const char *name,
                     void (*loop)(struct kvt_worker *worker))
{
    int r;

    worker->loop = loop;
    r = kvt_worker_thread(&worker->thread, name, worker_main, worker);
    if (r < 0)
        return r;
    worker->is_started = true;
    return 0;
}

void kvt_worker_stop(struct kvt_worker *worker)
{
    if (!worker->is_started)
        return;
    KVT_ASSERT(worker->outstanding == 0);
    kvt_worker_ask_stop(worker);
    KVT_ASSERT(pthread_join(worker->thread, NULL) == 0);
    worker->is_started = false;
}

void kvt_worker_ask_stop(struct kvt_worker *worker)
{
    atomic_store_explicit(&worker->is_stopping, true, memory_order_seq_cst);
    kvt_doorbell_ring(&worker->bell);
}

bool kvt_worker_join(struct kvt_worker *worker, uint64_t until_ns)
{
    struct timespec pause = {.tv_nsec = JOIN_PAUSE_NS};
    bool is_over;

    if (!worker->is_started)
        return true;
    while (!(is_over = atomic_load_explicit(&worker->is_over, memory_order_seq_cst)) &&
           kvt_clock_mono_ns() < until_ns)
        nanosleep(&pause, NULL);
    KVT_ASSERT((is_over ? pthread_join(worker->thread, NULL) : pthread_detach(worker->thread)) ==
               0);
    worker->is_started = false;
    return is_over;
}

int kvt_worker_submit(struct kvt_tier *tier, struct kvt_xfer *const xfers[], uint32_t count,
                      uint32_t *ret_taken)
{
    struct kvt_worker *worker = KVT_CONTAINER_OF(tier, struct kvt_worker, tier);
    uint32_t taken = KVT_MIN(count, tier->inflight_max - worker->outstanding);

    KVT_ASSERT(count > 0);
    if (taken == 0)
        return KVT_TIER_E_FULL;
    for (uint32_t i = 0; i < taken; i++) {
        KVT_ASSERT(xfers[i]->deadline_ns != 0);
        KVT_ASSERT(kvt_ring_put(&worker->submissions, xfers[i]) == 0);
    }
    worker->outstanding += taken;
    kvt_doorbell_ring(&worker->bell);
    *ret_taken = taken;
    return 0;
}

uint32_t kvt_worker_reap(struct kvt_tier *tier, struct kvt_xfer *ret_xfers[], uint32_t max)
{
    struct kvt_worker *worker = KVT_CONTAINER_OF(tier, struct kvt_worker, tier);
    uint32_t count = 0;

    while (count < max) {
        struct kvt_xfer *xfer = kvt_ring_take(&worker->completions);

        if (xfer == NULL)
            break;
        ret_xfers[count++] = xfer;
    }
    KVT_ASSERT(count <= worker->outstanding);
    worker->outstanding -= count;
    return count;
}

void kvt_worker_queue_push(struct kvt_worker_queue *queue, struct kvt_xfer *xfer)
{
    xfer->next = NULL;
    if (queue->head == NULL)
        queue->head = xfer;
    else
        queue->tail->next = xfer;
    queue->tail = xfer;
}

struct kvt_xfer *kvt_worker_queue_pop(struct kvt_worker_queue *queue)
{
    struct kvt_xfer *xfer = queue->head;

    queue->head = xfer->next;
    xfer->next = NULL;
    return xfer;
}

void kvt_worker_collect(struct kvt_worker *worker)
{
    struct kvt_xfer *xfer;

    while ((xfer = kvt_ring_take(&worker->submissions)) != NULL)
        kvt_worker_queue_push(
            xfer->flags & KVT_XFER_BACKGROUND ? &worker->background : &worker->foreground, xfer);
}

static bool is_background_next(const struct kvt_worker *worker)
{
    return worker->background.head != NULL &&
           (worker->foreground.head == NULL || worker->foreground_row >= KVT_WORKER_FOREGROUND_ROW);
}

struct kvt_xfer *kvt_worker_next(struct kvt_worker *worker)
{
    if (is_background_next(worker)) {
        worker->foreground_row = 0;
        return kvt_worker_queue_pop(&worker->background);
    }
    if (worker->foreground.head == NULL)
        return NULL;
    worker->foreground_row++;
    return kvt_worker_queue_pop(&worker->foreground);
}

bool kvt_worker_is_late(const struct kvt_xfer *xfer, uint64_t now_ns)
{
    return now_ns >= xfer->deadline_ns;
}

static void count_failure(struct kvt_tier_counters *counters, const struct kvt_xfer *xfer)
{
    switch (xfer->status) {
    case KVT_XFER_DONE:
    case KVT_XFER_OUT_OF_SERVICE: /* counted once, as an outage */
        return;
    case KVT_XFER_BAD_SLOT:
        KVT_ASSERT(xfer->verdict < KVT_COUNT_OF(counters->errors_bad_slot));
        kvt_worker_count(&counters->errors_bad_slot[xfer->verdict], 1);
        return;
    case KVT_XFER_CLIENT_GONE:
        kvt_worker_count(&counters->errors_client_gone, 1);
        return;
    case KVT_XFER_LATE:
        kvt_worker_count(&counters->errors_late, 1);
        return;
    case KVT_XFER_SHORT:
        kvt_worker_count(&counters->errors_short, 1);
        return;
    case -ENOSPC:
    case -EDQUOT:
        kvt_worker_count(&counters->errors_no_space, 1);
        return;
    default:
        KVT_ASSERT(xfer->status < 0);
        kvt_worker_count(&counters->errors_io, 1);
    }
}

void kvt_worker_finish(struct kvt_worker *worker, struct kvt_xfer *xfer, uint64_t now_ns)
{
    count_failure(&worker->tier.counters, xfer);
    xfer->done_ns = now_ns;
    xfer->next = NULL;
    KVT_ASSERT(kvt_ring_put(&worker->completions, xfer) == 0);
    worker->is_engine_due = true;
}

void kvt_worker_notify(struct kvt_worker *worker, uint64_t now_ns, bool is_idle)
{
    if (!worker->is_engine_due || (!is_idle && now_ns - worker->engine_rung_ns < ENGINE_RING_NS))
        return;
    worker->is_engine_due = false;
    worker->engine_rung_ns = now_ns;
    kvt_doorbell_ring(worker->engine_bell);
}

bool kvt_worker_is_stopping(const struct kvt_worker *worker)
{
    return atomic_load_explicit(&worker->is_stopping, memory_order_seq_cst);
}

void kvt_worker_sleep(struct kvt_worker *worker, uint64_t timeout_ns)
{
    kvt_doorbell_arm(&worker->bell);
    if (kvt_ring_is_empty(&worker->submissions) && !kvt_worker_is_stopping(worker))
        kvt_doorbell_wait(&worker->bell, timeout_ns);
    else
        kvt_doorbell_disarm(&worker->bell);
}

void kvt_worker_loop_each(struct kvt_worker *worker)
{
    uint64_t now_ns = kvt_clock_mono_ns();

    for (;;) {
        struct kvt_xfer *xfer;

        kvt_worker_collect(worker);
        xfer = kvt_worker_next(worker);
        if (xfer == NULL) {
            kvt_worker_notify(worker, now_ns, true);
            if (kvt_worker_is_stopping(worker) && kvt_ring_is_empty(&worker->submissions))
                return;
            kvt_worker_sleep(worker, KVT_TIME_NEVER_NS);
            now_ns = kvt_clock_mono_ns();
            continue;
        }
        xfer->verdict = KVT_SLOT_OK;
        xfer->started_ns = now_ns;
        if (kvt_worker_is_late(xfer, now_ns)) {
            xfer->status = KVT_XFER_LATE;
        } else {
            worker->execute(worker, xfer);
            now_ns = kvt_clock_mono_ns();
            kvt_worker_count(&worker->tier.counters.busy_ns, now_ns - xfer->started_ns);
        }
        kvt_worker_finish(worker, xfer, now_ns);
        kvt_worker_notify(worker, now_ns, false);
    }
}
