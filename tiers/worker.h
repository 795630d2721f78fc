/* The thread of a tier, and what is between it and the engine.
 *
 *   engine -- submit --> [submissions] --> foreground, background lists --> the loop works
 *   engine <-- reap ---- [completions] <---------------------------------- finish
 *
 * A ring each way, sized so that putting never fails: submit takes at most inflight_max transfers
 * that are not reaped yet. The thread is woken once a submitted batch and wakes the engine once
 * for what it finished in a row. Foreground goes before background, but one in
 * KVT_WORKER_FOREGROUND_ROW is background so that nothing starves.
 *
 * `outstanding` is the engine's; the lists are the thread's. init, start, stop, join: init-only.
 * submit, reap: engine-only. The rest: tier-thread-only. */
#pragma once

#include <pthread.h>

#include "daemon/base/ring.h"
#include "tiers/tier.h"

#define KVT_WORKER_FOREGROUND_ROW 16u

struct kvt_worker_queue {
    struct kvt_xfer *head, *tail;
};

struct kvt_worker {
    struct kvt_tier tier; /* first: a tier is its worker */
    struct kvt_ring submissions, completions;
    struct kvt_doorbell bell, *engine_bell;
    uint32_t outstanding;
    atomic_bool is_stopping, is_over; /* asked to end; has ended */
    bool is_started;
    pthread_t thread;
    void (*loop)(struct kvt_worker *worker);
    /* Of kvt_worker_loop_each: does one transfer and sets its status (and verdict). */
    void (*execute)(struct kvt_worker *worker, struct kvt_xfer *xfer);
    struct kvt_worker_queue foreground, background;
    uint32_t foreground_row;
    bool is_engine_due;
    uint64_t engine_rung_ns;
};

/* Fills the worker; the ops' submit and reap may be the two below. -errno, or 0. */
KVT_MUST_USE int kvt_worker_init(struct kvt_worker *worker, const struct kvt_tier_ops *ops,
                                 uint32_t inflight_max, struct kvt_doorbell *engine_bell);
void kvt_worker_deinit(struct kvt_worker *worker); /* idempotent; not started or stopped */
/* Runs @entry(@ctx) in a thread called @name (15 characters) that takes no signals but those of its
 * own faults. For other threads than a tier's, too. */
KVT_MUST_USE int kvt_worker_thread(pthread_t *ret_thread, const char *name,
                                   void *(*entry)(void *ctx), void *ctx);
/* The same with @loop(@worker). */
KVT_MUST_USE int kvt_worker_start(struct kvt_worker *worker, const char *name,
                                  void (*loop)(struct kvt_worker *worker));
/* Everything taken was reaped. Waits for the thread. */
void kvt_worker_stop(struct kvt_worker *worker);
/* Stop in two steps, for a thread that may hang with transfers. False: it did not end until
 * @until_ns (monotonic) and is left alone; nothing that it may use can be freed. */
void kvt_worker_ask_stop(struct kvt_worker *worker);
bool kvt_worker_join(struct kvt_worker *worker, uint64_t until_ns);

int kvt_worker_submit(struct kvt_tier *tier, struct kvt_xfer *const xfers[], uint32_t count,
                      uint32_t *ret_taken);
uint32_t kvt_worker_reap(struct kvt_tier *tier, struct kvt_xfer *ret_xfers[], uint32_t max);

void kvt_worker_queue_push(struct kvt_worker_queue *queue, struct kvt_xfer *xfer);
struct kvt_xfer *kvt_worker_queue_pop(struct kvt_worker_queue *queue); /* not empty */

/* Moves what was submitted to the lists. */
void kvt_worker_collect(struct kvt_worker *worker);
/* The next transfer to start, NULL when there is none. */
struct kvt_xfer *kvt_worker_next(struct kvt_worker *worker);
/* True when the transfer's deadline passed: then it is to be finished as KVT_XFER_LATE. */
bool kvt_worker_is_late(const struct kvt_xfer *xfer, uint64_t now_ns);
/* Counts the transfer, gives it back. The engine is woken by kvt_worker_notify. */
void kvt_worker_finish(struct kvt_worker *worker, struct kvt_xfer *xfer, uint64_t now_ns);
/* Wakes the engine if something was finished since: at once when @is_idle, else now and then. */
void kvt_worker_notify(struct kvt_worker *worker, uint64_t now_ns, bool is_idle);
/* Sleeps until something is submitted, stop is asked or @timeout_ns passed. */
void kvt_worker_sleep(struct kvt_worker *worker, uint64_t timeout_ns);
bool kvt_worker_is_stopping(const struct kvt_worker *worker);

/* The loop of tiers that do one transfer after the other with `execute`. */
void kvt_worker_loop_each(struct kvt_worker *worker);

static inline void kvt_worker_count(_Atomic uint64_t *counter, uint64_t by)
{
    atomic_fetch_add_explicit(counter, by, memory_order_relaxed);
}
