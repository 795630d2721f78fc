/* kvtier-bench: an engine in miniature. It replays requests against a daemon as serving engines do,
 * and verifies every byte that comes back.
 *
 *   parent            reads the workload, forks the engines, watches, kills, adds up, reports.
 *    |                It speaks gRPC only after its last child is gone (never fork after init).
 *    +-- engine 0     one process: a scheduler session and a session a rank, a block pool in a
 *    |    worker 0    sealed memfd a rank, `concurrency` worker threads
 *    |    worker 1
 *    +-- engine 1 ...
 *
 * A paged engine (paged.h) is a process of its own kind, with ranks in processes of their own.
 *
 * Every request belongs to one worker (by its conversation, or by its number), who takes them in
 * order. What a worker has done lies in memory that all processes share, in two versions of which
 * one is valid: a worker writes the other one and flips an index, so that a request is counted
 * whole or not at all, wherever SIGKILL hits, and the next engine process goes on after the last
 * one that counts. */
#pragma once

#include <stdatomic.h>
#include <stdio.h>

#include "daemon/base/api.h"
#include "tools/lib/histogram.h"
#include "tools/lib/model.h"
#include "tools/lib/workload.h"

#define KVT_BENCH_ENGINES_MAX 64u
#define KVT_BENCH_CONCURRENCY_MAX 32u
#define KVT_BENCH_CODES 17u
#define KVT_BENCH_RESULTS 8u
#define KVT_BENCH_EXIT_AGAIN 75     /* an engine's: the daemon went away; start me again */
#define KVT_BENCH_EXIT_RANK_LOST 76 /* a paged engine's: a rank was killed, as ordered */

struct kvt_bench_options {
    bool is_replay, is_info;
    const char *trace_path, *socket_path, *namespace_name;
    struct kvt_model_options model;
    uint64_t seed, requests_max, requests_skipped, kill_every, cancel_every, pool_bytes,
        deadline_ns;
    uint64_t abort_every, kill_rank_every; /* of paged engines: requests; 0: none */
    uint32_t engines, concurrency;
    uint32_t chunk_tokens, late_us; /* of paged engines: a step; how late a rank may be */
    double time_scale;              /* 0: no waiting */
    bool is_paged;                  /* another engine: paged.h */
    bool is_on_gpu;                 /* pools in the memory of GPU `gpu` */
    uint32_t gpu;
    bool is_json, is_reporting, is_quiet, is_verifying, is_storing_output, is_matching_whole,
        is_without_cursors;
    uint32_t synth_sessions, synth_turns, synth_tenants, synth_system_tokens, synth_turn_tokens;
};

/* Fills @ret_options. 0; or the status to exit with, +1 (1: help was printed, 3: bad options). */
KVT_MUST_USE int kvt_bench_options_parse(struct kvt_bench_options *ret_options, int argc,
                                         char **argv);

enum kvt_bench_call { /* whose times are kept */
                      KVT_BENCH_LOOKUP,
                      KVT_BENCH_PROMOTE,
                      KVT_BENCH_RESERVE,
                      KVT_BENCH_DEMOTE,
                      KVT_BENCH_CALLS
};

struct kvt_bench_stats {
    uint64_t next_idx; /* where its worker goes on: in the workload; paged: in the engine's list */
    uint64_t done_ahead; /* paged: bit i: request next_idx + i of the list is done, too */
    uint64_t requests;
    uint64_t lookup_tokens, hit_tokens, hit_tokens_by_tier[KVT_API_TIERS];
    uint64_t component_tokens[KVT_COMPONENTS_MAX][KVT_API_TIERS];
    uint64_t cursor_lookups, cursors_stale, sent_tokens;
    uint64_t promoted_bytes, promoted_blocks_from[KVT_API_TIERS], demoted_bytes;
    uint64_t verified_blocks, verified_bytes, wrong_blocks, wrong_bytes;
    uint64_t recomputed_blocks; /* promised by a lookup, not delivered by its promote */
    uint64_t computed_blocks;
    uint64_t reserve_states[4];
    uint64_t promote_results[KVT_BENCH_RESULTS], demote_results[KVT_BENCH_RESULTS];
    uint64_t quiesced_later; /* ops that needed Quiesce before their blocks were free again */
    uint64_t blocks_lost;    /* engine blocks given up: never quiesced */
    /* Of paged engines. */
    uint64_t loads, failed_loads, aborted_loads; /* jobs of all ranks */
    uint64_t stores, part_stores, aborted_stores, stalled_turns;
    uint64_t preemptions, aborted_requests, cancelled_ranks;
    uint64_t reused_blocks, reused_by_other; /* engine blocks; by another component's layers */
    uint64_t slid_blocks;                    /* that fell out of a window */
    uint64_t left_alone;  /* engine blocks of loads that were not to be written */
    uint64_t stray_bytes; /* written where nobody may write */
    uint64_t errors[KVT_OP_KINDS][KVT_BENCH_CODES];
    struct kvt_histogram calls[KVT_BENCH_CALLS];
};
void kvt_bench_stats_add(struct kvt_bench_stats *stats, const struct kvt_bench_stats *more);

struct kvt_bench_worker_shared {
    _Alignas(64) _Atomic uint32_t valid_idx; /* which version counts */
    struct kvt_bench_stats versions[2];
};

struct kvt_bench_shared { /* one anonymous shared mapping */
    _Atomic uint64_t started_ns;
    char failed[KVT_BENCH_ENGINES_MAX][256];  /* why an engine gave up */
    char first_wrong[256];                    /* the first wrong bytes seen */
    struct kvt_bench_worker_shared workers[]; /* engine * kvt_bench_workers_each + worker */
};
/* Threads of an engine that count for themselves. */
static inline uint32_t kvt_bench_workers_each(const struct kvt_bench_options *options)
{
    return options->is_paged ? 1 : options->concurrency;
}

/* One engine process from start to end; returns its exit status. */
int kvt_bench_engine_run(const struct kvt_bench_options *options, const struct kvt_model *model,
                         const struct kvt_workload *workload, struct kvt_bench_shared *shared,
                         uint32_t engine_idx);

struct kvt_bench_outcome {
    struct kvt_bench_stats sum;
    uint64_t wall_ns;
    uint64_t kills, rank_kills, restarts;
    bool has_daemon_stats;
    uint64_t leases_left, reservations_left, pins_left;
    struct kvt_api_tier_stats tiers[KVT_API_TIERS];
    uint32_t tiers_count;
    char first_wrong[256];
};
void kvt_bench_report_json(const struct kvt_bench_outcome *outcome, const struct kvt_model *model);
void kvt_bench_report_text(const struct kvt_bench_outcome *outcome, const struct kvt_model *model,
                           FILE *out);
