/* The paged engine: what an engine with continuous batching, tensor parallelism and a bounded block
 * pool does to a daemon (vLLM is the model).
 *
 *   scheduler process   the one that main.c forked; a scheduler session. Everything below is its
 *    |                  own: requests, the pool, what each block holds. It looks up, reserves,
 *    |                  releases, computes, preempts, aborts.
 *    +-- rank 0         a process with a worker session and PAGED_RANK_THREADS threads: promotes,
 *    +-- rank 1 ...     demotes, verifies what came. Knows nothing but jobs.
 *
 * A job is one load or store for all ranks. It lies in memory that the processes share; its number
 * goes to each rank over a socket, and comes back when nothing of the daemon touches that rank's
 * blocks any more. A load is good when every rank got all of it.
 *
 * An engine block is out of the pool while a request's table or a job holds it (block_pool.h), so a
 * preempted or aborted request gives its blocks back at once, but for those that the daemon still
 * reads or writes. */
#pragma once

#include <sys/types.h>

#include "tools/kvtier-bench/engine.h"

#define PAGED_JOBS 64u
#define PAGED_RANK_THREADS 4u
#define PAGED_READY UINT32_MAX /* from a rank: it is attached */

/* ---- jobs: shared by the processes of an engine ------------------------------------------------
 */

enum paged_job_kind { PAGED_LOAD, PAGED_STORE };

struct paged_result { /* of one rank; its own until it answers */
    enum kvt_code code;
    char message[128];
    bool is_whole;    /* every block is there: DONE, or PRESENT */
    bool is_quiesced; /* false: it could not be had, the blocks must never be used again */
    uint64_t call_ns, moved_bytes, moved_blocks_from[KVT_API_TIERS];
    uint64_t results[KVT_BENCH_RESULTS], quiesced_later;
    uint64_t verified_blocks, verified_bytes, wrong_blocks, wrong_bytes, stray_bytes;
    char first_wrong[160];
};

struct paged_job {
    enum paged_job_kind kind;
    _Atomic uint64_t op_id; /* another one for each job */
    uint64_t request_idx;
    struct kvt_handle handle;     /* a lease or a ticket */
    _Atomic uint32_t given_up_by; /* bits of ranks: theirs to set */
    uint32_t late_us[KVT_RANKS_MAX];
    uint32_t counts[KVT_COMPONENTS_MAX]; /* blocks of ours */
    struct paged_result results[KVT_RANKS_MAX];
};

struct paged_lists { /* of one component of a job: `room` blocks */
    uint64_t *block_idx, *chains;
    uint64_t *ids; /* engine_blocks_per_block a block */
};

struct paged_rank { /* the scheduler's end */
    pid_t pid;
    int work, control; /* sockets; -1: closed */
};

struct paged_jobs {
    const struct kvt_model *model;
    uint8_t *engine_id; /* KVT_ENGINE_ID_BYTES, then the jobs; shared */
    struct paged_job *jobs;
    uint8_t *lists;
    uint64_t room; /* blocks of a component in one job */
    size_t job_bytes, shared_bytes;
    struct paged_rank ranks[KVT_RANKS_MAX];
};

struct paged_order { /* over `control`: give up that job after so long */
    uint32_t job, after_us;
    uint64_t op_id;
};

/* paged_jobs.c. The ranks are forked here, before the first use of gRPC. */
KVT_MUST_USE int paged_jobs_init(struct paged_jobs *jobs, struct bench_engine *engine,
                                 const struct kvt_kv_memory *memory, uint64_t room);
void paged_jobs_deinit(struct paged_jobs *jobs); /* ranks end in order, and are waited for */
struct paged_lists paged_job_lists(const struct paged_jobs *jobs, uint32_t job, uint32_t component);
void paged_job_send(const struct paged_jobs *jobs, uint32_t rank, uint32_t job);
void paged_job_give_up(const struct paged_jobs *jobs, uint32_t job, uint32_t rank,
                       uint32_t after_us);
/* The next answer, waiting up to @timeout_ms: 1 and which, 0 none; -EPIPE: rank *ret_rank died. */
KVT_MUST_USE int paged_jobs_next(struct paged_jobs *jobs, int timeout_ms, uint32_t *ret_rank,
                                 uint32_t *ret_job);

/* paged_rank.c: a rank process from attach to end; its exit status. */
struct paged_rank_seat {
    const struct paged_jobs *jobs;
    const struct kvt_kv_memory *memory;
    struct bench_engine *engine;
    uint32_t rank;
    int work, control;
};
int paged_rank_run(const struct paged_rank_seat *seat);

/* ---- blocks: what each engine block holds ------------------------------------------------------
 */

enum paged_content {
    PAGED_GUARD = 0, /* nothing of ours: its guard pattern */
    PAGED_PAYLOAD,   /* the oracle's bytes, on every rank */
    PAGED_MAYBE,     /* a load writes it, or was to: guard or payload, byte by byte */
    PAGED_WRONG,     /* of a load that brought wrong bytes, which were counted then */
};

struct paged_block {
    enum paged_content content;
    uint32_t component, part;
    uint64_t chain, block_idx; /* of the payload */
};

struct paged_blocks {
    struct kvt_kv_memory memory;
    struct kvt_block_pool pool;
    struct paged_block *blocks;
    struct bench_engine *engine;
    struct kvt_bench_stats *stats;
};

/* paged_blocks.c */
KVT_MUST_USE int paged_blocks_init(struct paged_blocks *blocks, struct bench_engine *engine,
                                   struct kvt_bench_stats *stats, uint64_t count,
                                   struct kvt_kv_store *store);
void paged_blocks_deinit(struct paged_blocks *blocks);
/* As kvt_block_pool_take; what was written to free blocks is counted. */
KVT_MUST_USE bool paged_blocks_take(struct paged_blocks *blocks, uint32_t component, uint64_t count,
                                    uint64_t *ret_ids);
/* The engine computes: the block's bytes are there, on every rank. */
void paged_blocks_compute(struct paged_blocks *blocks, uint64_t id, const struct paged_block *what);
/* Its payload makes way for the guard; not where an op reads it. */
void paged_blocks_hide(struct paged_blocks *blocks, uint64_t id);
void paged_blocks_show(struct paged_blocks *blocks, uint64_t id, const struct paged_block *what);
void paged_blocks_set(struct paged_blocks *blocks, uint64_t id, const struct paged_block *what);
/* Blocks that nobody ever took, the null block too. */
void paged_blocks_check_fresh(struct paged_blocks *blocks);
/* Verified when it goes back to the pool. KVT_BLOCK_NONE: nothing. */
void paged_blocks_unref(struct paged_blocks *blocks, uint64_t id);

/* ---- requests ---------------------------------------------------------------------------------
 */

enum paged_phase { PAGED_FREE, PAGED_WAITING, PAGED_LOADING, PAGED_RUNNING };

struct paged_request {
    enum paged_phase phase;
    uint64_t number; /* of its admission: the higher one makes way */
    uint64_t own_idx, request_idx;
    uint64_t prompt_tokens, total_tokens, stored_tokens_max; /* the last: whole blocks */
    uint64_t computed_tokens;
    char salt[32];
    uint32_t *tokens;
    uint64_t *chains;
    uint64_t *tables[KVT_COMPONENTS_MAX]; /* engine block ids, KVT_BLOCK_NONE: none */
    uint64_t begins[KVT_COMPONENTS_MAX];  /* entries before it were given back */
    uint64_t ends[KVT_COMPONENTS_MAX];    /* entries from it on are none yet */
    struct kvt_handle cursor;
    uint64_t cursor_tokens;
    uint64_t free_seen; /* the pool's free blocks when it did not fit: there must be more */
    /* Of full attention, while it waits: blocks that its earlier life left, as an engine's own
     * cache has them. A load leaves them alone. A multiple of the engine's block size. */
    uint64_t kept_tokens;
    bool may_load;
    uint64_t abort_at_tokens; /* UINT64_MAX: never; 0: while it loads */
};

struct paged_flight { /* a job under way */
    bool is_used;
    uint32_t ranks_left;
    uint64_t number;               /* of the request that it is for */
    uint64_t tokens;               /* a load: of its boundary */
    uint64_t engine_blocks;        /* that it holds */
    struct paged_request *request; /* a load's, while it waits; NULL: it was given up */
    bool is_released;              /* its lease or ticket was given back early */
};

struct paged_engine {
    struct bench_engine *engine;
    struct kvt_bench_stats stats; /* published when a request ends */
    struct bench_caller call;
    struct bench_cursors cursors;
    struct paged_blocks blocks;
    struct paged_jobs jobs;
    struct paged_flight flights[PAGED_JOBS];
    uint64_t flying, held_by_stores; /* jobs; engine blocks */
    struct paged_request *requests;
    uint32_t requests_count;
    uint64_t *own; /* the workload's requests that are this engine's */
    uint64_t own_count, admitted, ended, op_seq, jobs_made, random;
    uint64_t kill_rank_at; /* requests ended; UINT64_MAX: no more */
    uint64_t leave_at_ns;  /* a rank was killed: the engine goes on so long; 0: no */
};

/* paged_request.c: a request's tables. */
KVT_MUST_USE int paged_request_init(struct paged_engine *paged, struct paged_request *request);
void paged_request_deinit(struct paged_engine *paged, struct paged_request *request);
void paged_request_begin(struct paged_engine *paged, struct paged_request *request,
                         uint64_t own_idx);
/* Engine blocks that growing to @tokens takes. */
uint64_t paged_request_lacks(const struct paged_engine *paged, const struct paged_request *request,
                             uint64_t tokens);
/* The pool has them. */
void paged_request_grow(struct paged_engine *paged, struct paged_request *request, uint64_t tokens);
/* Gives back what no later token attends to. */
void paged_request_slide(struct paged_engine *paged, struct paged_request *request);
void paged_request_drop(struct paged_engine *paged, struct paged_request *request); /* all */
/* All but the full attention of the first @tokens (fewer, where those are not computed). */
void paged_request_keep(struct paged_engine *paged, struct paged_request *request, uint64_t tokens);
/* Kept blocks hold their guard while a load is to leave them alone, from @first_block of ours on:
 * their own bytes written again would be seen by nobody. */
void paged_request_hide_kept(struct paged_engine *paged, struct paged_request *request,
                             uint64_t first_block);
void paged_request_show_kept(struct paged_engine *paged, struct paged_request *request);
/* Computes up to @tokens: whole blocks get their bytes. */
void paged_request_compute(struct paged_engine *paged, struct paged_request *request,
                           uint64_t tokens);
/* Tables for a load of @boundary_tokens, from what is kept on; false: the pool has not enough,
 * nothing was taken. */
KVT_MUST_USE bool paged_request_make_room(struct paged_engine *paged, struct paged_request *request,
                                          uint64_t boundary_tokens);
/* Blocks of component @c before @end_block, as many as are whole in the table, from the first one
 * that resuming at @end_block needs. */
struct kvt_model_span paged_request_whole(const struct paged_engine *paged,
                                          const struct paged_request *request, uint32_t c,
                                          uint64_t end_block);

/* paged_moves.c: lookups, loads and stores. */
enum paged_start { PAGED_START_NO_ROOM, PAGED_START_LOADING, PAGED_START_RUNNING };
/* Takes kept blocks from requests that wait, but for @but. true: there were some. */
bool paged_reclaim_kept(struct paged_engine *paged, const struct paged_request *but);
enum paged_start paged_start(struct paged_engine *paged, struct paged_request *request);
/* false: stores hold too much already. The engine computes in no time at all: it waits, or it would
 * store nearly nothing. */
bool paged_may_store(const struct paged_engine *paged);
void paged_store(struct paged_engine *paged, struct paged_request *request, uint64_t first_block);
void paged_take_result(struct paged_engine *paged, uint32_t rank, uint32_t job);
/* Cancels what runs for @request. */
void paged_abort_moves(struct paged_engine *paged, struct paged_request *request);
uint64_t paged_random(struct paged_engine *paged);

/* paged_engine.c: an engine process; 0, or -errno, with the engine's exit status set. */
int paged_engine_run(struct bench_engine *engine);
