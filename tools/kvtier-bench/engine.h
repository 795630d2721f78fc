/* Inside one engine process: the attachment to the daemon that its worker threads share, and what
 * each worker owns alone. Only for engine.c, call.c, request.c and the paged engine (paged.h). */
#pragma once

#include "tools/kvtier-bench/cursors.h"
#include "tools/kvtier-bench/link.h"
#include "tools/kvtier-bench/pool.h"

struct bench_engine {
    const struct kvt_bench_options *options;
    const struct kvt_model *model;
    const struct kvt_workload *workload;
    struct kvt_bench_shared *shared;
    uint32_t engine_idx;
    struct bench_link link;
    struct bench_seat scheduler, ranks[KVT_RANKS_MAX];
    struct kvt_bench_pool pool;
    struct kvt_gpu_pool *gpu; /* NULL: the memory of the pool is memfds */
    uint64_t blocks_max;      /* of one request */
    atomic_bool is_stopping;  /* a worker gave up */
    _Atomic int exit_status;
};

struct bench_caller { /* one thread's calls over the engine's connection */
    struct bench_engine *engine;
    struct kvt_bench_stats *stats;
    struct kvt_op op;
    struct kvt_arena arena;
};

enum bench_block { /* of the request in hand, by component and block */
                   BENCH_BLOCK_NONE = 0,
                   BENCH_BLOCK_HELD,    /* engine blocks taken, bytes not there (yet) */
                   BENCH_BLOCK_RIGHT,   /* the oracle's bytes are in it, on every rank */
                   BENCH_BLOCK_MISSING, /* RIGHT, and the ticket wants it */
};

struct bench_worker {
    struct bench_engine *engine;
    uint32_t worker_idx;
    struct kvt_bench_stats stats; /* all that was counted, and the request in hand */
    struct bench_caller call;
    uint64_t op_seq, promotes;
    struct bench_cursors cursors;

    /* The request in hand. */
    uint64_t request_idx;
    const struct kvt_request *request;
    uint64_t prompt_tokens, stored_tokens, blocks; /* stored_tokens: whole blocks */
    char salt[32];
    uint32_t *tokens;
    uint64_t *chains;
    uint8_t *states[KVT_COMPONENTS_MAX];
    uint64_t *ids[KVT_COMPONENTS_MAX]; /* engine_blocks_per_block a block */
    uint64_t *move_idx[KVT_COMPONENTS_MAX], *move_ids[KVT_COMPONENTS_MAX];
    struct kvt_handle cursor, lease, ticket;
    uint64_t cursor_tokens, boundary_tokens, usable_tokens, branch_tokens;

    /* Cancels a call of this worker from its own thread, some time after it began. */
    pthread_t canceller;
    pthread_mutex_t cancel_lock; /* covers the rest */
    pthread_cond_t cancel_changed;
    bool is_cancel_armed, is_cancel_over, has_canceller;
    uint64_t cancel_at_ns;
};

/* engine.c: where its pool lies, NULL: in memfds; and the pool itself, when nobody is forked any
 * more. -errno and given up, or 0. */
struct kvt_kv_store *bench_store_of(struct bench_engine *engine);
KVT_MUST_USE int bench_memory_make(struct bench_engine *engine, struct kvt_kv_memory *memory);
/* engine.c: which worker of all engines a request belongs to. */
uint32_t bench_owner_of(const struct bench_engine *engine, uint64_t request_idx);
/* request.c: everything from lookup to release. false: this engine cannot go on. */
bool bench_request_run(struct bench_worker *worker, uint64_t request_idx);

/* call.c: one call and its accounts. The op was begun with bench_call_begin. */
KVT_MUST_USE int bench_caller_init(struct bench_caller *caller, struct bench_engine *engine,
                                   struct kvt_bench_stats *stats);
void bench_caller_deinit(struct bench_caller *caller);
void bench_call_begin(struct bench_caller *caller, enum kvt_op_kind kind);
enum kvt_code bench_call(struct bench_caller *caller, enum kvt_bench_call which);
/* Either of the two may be NONE. */
void bench_call_release(struct bench_caller *caller, struct kvt_handle session,
                        struct kvt_handle lease, struct kvt_handle ticket);
/* An error of one call is counted, and may mean that the engine cannot go on. */
struct bench_error {
    enum kvt_op_kind kind;
    enum kvt_code code;
    const char *message;
};
void bench_note_error(struct bench_engine *engine, struct kvt_bench_stats *stats,
                      const struct bench_error *error);
/* Waits until the daemon does not touch the client memory of @op_id any more: true. false: it could
 * not be had, the blocks must never be used again. */
bool bench_call_quiesce(struct bench_worker *worker, uint32_t rank, uint64_t op_id);
/* The daemon is gone or another one is there: this process ends, the parent starts a new one. */
void bench_give_up(struct bench_engine *engine, int exit_status, const char *why);
int bench_canceller_start(struct bench_worker *worker);
void bench_canceller_stop(struct bench_worker *worker);
