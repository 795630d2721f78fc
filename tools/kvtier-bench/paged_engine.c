/* The scheduler: turns of one loop. A turn takes what ranks answered, admits requests, starts those
 * that wait (in the order of their admission, none past one that does not fit), and lets those that
 * run compute a step each. A request that needs blocks when there are none takes them from the
 * youngest that runs; if that is itself, it goes.
 *
 * Requests end out of order. What counts as done is a position in this engine's list and a mask of
 * those behind it, published with the counters in one flip (bench.h), so an engine that takes over
 * after a SIGKILL does each request exactly once. */
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>

#include "daemon/base/alloc.h"
#include "daemon/base/clock.h"
#include "tools/kvtier-bench/paged.h"

#define READY_WAIT_NS (60 * KVT_NS_PER_S)
#define AHEAD_MAX 64u /* bits of kvt_bench_stats.done_ahead */
#define LEAVE_NS_MAX (20 * KVT_NS_PER_MS)

/* ---- requests begin and end ------------------------------------------------------------------ */

static struct kvt_bench_worker_shared *shared_of(const struct paged_engine *paged)
{
    return &paged->engine->shared->workers[paged->engine->engine_idx];
}

static void publish(struct paged_engine *paged)
{
    struct kvt_bench_worker_shared *shared = shared_of(paged);
    uint32_t other = atomic_load(&shared->valid_idx) ^ 1;

    shared->versions[other] = paged->stats;
    atomic_store_explicit(&shared->valid_idx, other, memory_order_release);
}

static void end_request(struct paged_engine *paged, struct paged_request *request)
{
    struct kvt_bench_stats *stats = &paged->stats;

    paged_request_drop(paged, request);
    request->phase = PAGED_FREE;
    stats->requests++;
    stats->done_ahead |= 1ull << (request->own_idx - stats->next_idx);
    for (; (stats->done_ahead & 1) != 0; stats->done_ahead >>= 1)
        stats->next_idx++;
    paged->ended++;
    publish(paged);
}

static void preempt(struct paged_engine *paged, struct paged_request *request)
{
    /* What it generated is prompt when it comes back. */
    request->prompt_tokens = KVT_MAX(request->prompt_tokens, request->computed_tokens);
    if (paged_random(paged) % 2 == 0)
        paged_request_drop(paged, request);
    else
        paged_request_keep(paged, request, paged_random(paged) % (request->computed_tokens + 1));
    request->phase = PAGED_WAITING;
    request->free_seen = 0;
    paged->stats.preemptions++;
}

static void abort_request(struct paged_engine *paged, struct paged_request *request)
{
    paged_abort_moves(paged, request);
    paged->stats.aborted_requests++;
    end_request(paged, request);
}

static bool is_done(const struct paged_engine *paged, uint64_t own_idx)
{
    return (paged->stats.done_ahead >> (own_idx - paged->stats.next_idx) & 1) != 0;
}

static bool is_active(const struct paged_engine *paged, uint64_t own_idx)
{
    for (uint32_t i = 0; i < paged->requests_count; i++)
        if (paged->requests[i].phase != PAGED_FREE && paged->requests[i].own_idx == own_idx)
            return true;
    return false;
}

/* A turn of a conversation comes after the one before it. */
static bool is_in_turn(const struct paged_engine *paged, uint64_t own_idx)
{
    const struct kvt_request *requests = paged->engine->workload->requests;
    uint32_t session = requests[paged->own[own_idx]].session;

    for (uint64_t i = paged->stats.next_idx; i < own_idx && session != KVT_SESSION_NONE; i++)
        if (requests[paged->own[i]].session == session && !is_done(paged, i))
            return false;
    return true;
}

static bool has_arrived(const struct paged_engine *paged, uint64_t own_idx)
{
    const struct bench_engine *engine = paged->engine;
    double ms = (double)engine->workload->requests[paged->own[own_idx]].arrival_ms *
                engine->options->time_scale;

    return kvt_clock_mono_ns() >= atomic_load(&engine->shared->started_ns) + (uint64_t)(ms * 1e6);
}

static void plan_abort(struct paged_engine *paged, struct paged_request *request)
{
    uint64_t every = paged->engine->options->abort_every;

    if (every == 0 || paged->admitted % every != 0)
        return;
    request->abort_at_tokens =
        paged_random(paged) % 2 == 0 ? 0 : paged_random(paged) % (request->total_tokens + 1);
}

static void admit(struct paged_engine *paged)
{
    uint64_t end = KVT_MIN(paged->stats.next_idx + AHEAD_MAX, paged->own_count);
    uint64_t own_idx = paged->stats.next_idx;

    for (uint32_t i = 0; i < paged->requests_count; i++) {
        struct paged_request *request = &paged->requests[i];

        if (request->phase != PAGED_FREE)
            continue;
        while (own_idx < end && (is_done(paged, own_idx) || is_active(paged, own_idx) ||
                                 !is_in_turn(paged, own_idx)))
            own_idx++;
        if (own_idx == end || !has_arrived(paged, own_idx))
            return;
        paged_request_begin(paged, request, own_idx);
        plan_abort(paged, request);
    }
}

/* ---- a step of one request ------------------------------------------------------------------- */

static uint64_t next_tokens(const struct paged_engine *paged, const struct paged_request *request)
{
    uint64_t at = request->computed_tokens;

    if (at < request->prompt_tokens)
        return KVT_MIN(at + paged->engine->options->chunk_tokens, request->prompt_tokens);
    return KVT_MIN(at + paged->engine->model->engine_block_tokens, request->total_tokens);
}

static struct paged_request *youngest_running(struct paged_engine *paged)
{
    struct paged_request *youngest = NULL;

    for (uint32_t i = 0; i < paged->requests_count; i++) {
        struct paged_request *request = &paged->requests[i];

        if (request->phase == PAGED_RUNNING &&
            (youngest == NULL || request->number > youngest->number))
            youngest = request;
    }
    return youngest;
}

/* true: the pool has what @request needs up to @tokens. false: it was preempted itself. */
static bool make_way(struct paged_engine *paged, struct paged_request *request, uint64_t tokens)
{
    while (paged_request_lacks(paged, request, tokens) > paged->blocks.pool.free_count) {
        struct paged_request *victim = youngest_running(paged);

        if (paged_reclaim_kept(paged, NULL))
            continue;
        preempt(paged, victim);
        if (victim == request)
            return false;
    }
    return true;
}

static void step(struct paged_engine *paged, struct paged_request *request)
{
    uint64_t tokens = next_tokens(paged, request);
    uint64_t first_block = request->computed_tokens / paged->engine->model->block_tokens;

    paged_request_slide(paged, request);
    if (!make_way(paged, request, tokens))
        return;
    paged_request_grow(paged, request, tokens);
    paged_request_compute(paged, request, tokens);
    paged_store(paged, request, first_block);
    if (tokens >= request->abort_at_tokens)
        abort_request(paged, request);
    else if (tokens == request->total_tokens)
        end_request(paged, request);
}

/* ---- turns ----------------------------------------------------------------------------------- */

/* Those in @phase, in the order of their admission. */
static uint32_t sorted(struct paged_engine *paged, enum paged_phase phase,
                       struct paged_request *ret_requests[KVT_BENCH_CONCURRENCY_MAX])
{
    uint32_t count = 0;

    for (uint32_t i = 0; i < paged->requests_count; i++) {
        struct paged_request *request = &paged->requests[i];
        uint32_t at = count;

        if (request->phase != phase)
            continue;
        for (; at > 0 && ret_requests[at - 1]->number > request->number; at--)
            ret_requests[at] = ret_requests[at - 1];
        ret_requests[at] = request;
        count++;
    }
    return count;
}

static bool start_waiting(struct paged_engine *paged)
{
    struct paged_request *waiting[KVT_BENCH_CONCURRENCY_MAX];
    uint32_t count = sorted(paged, PAGED_WAITING, waiting);
    bool has_started = false;

    for (uint32_t i = 0; i < count && !atomic_load(&paged->engine->is_stopping); i++) {
        enum paged_start start = PAGED_START_NO_ROOM;

        if (waiting[i]->free_seen == 0 || paged->blocks.pool.free_count > waiting[i]->free_seen)
            start = paged_start(paged, waiting[i]);
        if (start == PAGED_START_NO_ROOM)
            break;
        waiting[i]->phase = start == PAGED_START_LOADING ? PAGED_LOADING : PAGED_RUNNING;
        if (start == PAGED_START_LOADING && waiting[i]->abort_at_tokens == 0)
            abort_request(paged, waiting[i]);
        has_started = true;
    }
    return has_started;
}

static bool step_running(struct paged_engine *paged)
{
    struct paged_request *running[KVT_BENCH_CONCURRENCY_MAX];
    uint32_t count = sorted(paged, PAGED_RUNNING, running);
    bool has_stepped = false;

    for (uint32_t i = 0; i < count && !atomic_load(&paged->engine->is_stopping); i++) {
        if (!paged_may_store(paged)) {
            paged->stats.stalled_turns++;
            break;
        }
        if (running[i]->phase == PAGED_RUNNING) /* not preempted by one before it */
            step(paged, running[i]);
        has_stepped = true;
    }
    return has_stepped;
}

/* A rank that ended without being asked to: what it said, or that it was killed. */
static void note_lost_rank(struct paged_engine *paged, uint32_t rank)
{
    struct bench_engine *engine = paged->engine;
    int status = 0;
    char why[256];

    (void)waitpid(paged->jobs.ranks[rank].pid, &status, 0);
    paged->jobs.ranks[rank].pid = 0;
    if (WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL && paged->leave_at_ns != 0)
        return; /* our own doing: the engine has not noticed yet */
    (void)snprintf(why, sizeof(why), "rank %u: %.200s", rank,
                   WIFSIGNALED(status) ? strsignal(WTERMSIG(status))
                                       : engine->shared->failed[engine->engine_idx]);
    bench_give_up(engine, WIFEXITED(status) && WEXITSTATUS(status) != 0 ? WEXITSTATUS(status) : 1,
                  why);
}

static void take_results(struct paged_engine *paged, int timeout_ms)
{
    uint32_t rank, job;
    int r = paged_jobs_next(&paged->jobs, timeout_ms, &rank, &job);

    for (; r != 0; r = paged_jobs_next(&paged->jobs, 0, &rank, &job)) {
        if (r < 0)
            note_lost_rank(paged, rank);
        else if (job < PAGED_JOBS)
            paged_take_result(paged, rank, job);
    }
}

static void kill_a_rank(struct paged_engine *paged)
{
    uint32_t victim = (uint32_t)(paged_random(paged) % paged->engine->model->ranks);
    uint64_t every = paged->engine->options->kill_rank_every;

    if (every == 0 || paged->leave_at_ns != 0 || paged->ended < paged->kill_rank_at)
        return;
    (void)kill(paged->jobs.ranks[victim].pid, SIGKILL);
    paged->leave_at_ns = kvt_clock_mono_ns() + 1 + paged_random(paged) % LEAVE_NS_MAX;
}

static bool is_over(const struct paged_engine *paged)
{
    if (atomic_load(&paged->engine->is_stopping))
        return true;
    if (paged->leave_at_ns != 0)
        return kvt_clock_mono_ns() >= paged->leave_at_ns;
    return paged->stats.next_idx == paged->own_count && paged->flying == 0;
}

static void run_turns(struct paged_engine *paged)
{
    bool is_busy = true;

    while (!is_over(paged)) {
        take_results(paged, is_busy ? 0 : 1);
        admit(paged);
        is_busy = start_waiting(paged);
        is_busy = step_running(paged) || is_busy;
        kill_a_rank(paged);
    }
    if (paged->leave_at_ns == 0 && !atomic_load(&paged->engine->is_stopping))
        paged_blocks_check_fresh(&paged->blocks);
    publish(paged); /* what came in after the last request's end */
}

/* ---- the process ----------------------------------------------------------------------------- */

static bool all_ready(struct paged_engine *paged)
{
    uint64_t until_ns = kvt_clock_mono_ns() + READY_WAIT_NS;
    uint32_t ready = 0, rank, job;

    while (ready < paged->engine->model->ranks && !atomic_load(&paged->engine->is_stopping)) {
        int r = paged_jobs_next(&paged->jobs, 100, &rank, &job);

        if (r < 0)
            note_lost_rank(paged, rank);
        ready += r > 0 && job == PAGED_READY;
        if (kvt_clock_mono_ns() > until_ns)
            bench_give_up(paged->engine, 1, "the ranks did not come up");
    }
    return ready == paged->engine->model->ranks;
}

static int join_daemon(struct paged_engine *paged)
{
    struct bench_engine *engine = paged->engine;
    int r = bench_link_open(&engine->link);

    if (r == 0)
        r = bench_link_attach(&engine->link, paged->jobs.engine_id, KVT_RANK_NONE,
                              &engine->scheduler);
    if (r < 0)
        bench_give_up(engine, engine->link.exit_status, engine->link.why);
    return r;
}

/* Engine blocks of one request of the greatest length, and of what it computes in a step. */
static uint64_t longest_request(const struct bench_engine *engine)
{
    const struct kvt_model *model = engine->model;
    uint64_t each = model->engine_block_tokens, blocks = 0;
    uint64_t tokens =
        (uint64_t)engine->workload->input_tokens_max + engine->workload->output_tokens_max;

    for (uint32_t c = 0; c < model->components_count; c++) {
        const struct kvt_model_component *component = &model->components[c];
        uint64_t held = tokens;

        if (component->kind == KVT_MODEL_WINDOW)
            held = KVT_MIN(tokens, component->window_tokens + engine->options->chunk_tokens);
        blocks += component->kind == KVT_MODEL_STATE ? 3 : held / each + 3;
    }
    return blocks;
}

static int make_blocks(struct paged_engine *paged)
{
    struct bench_engine *engine = paged->engine;
    uint64_t longest = longest_request(engine) + 1; /* and the null block */
    uint64_t count = longest + longest * engine->options->concurrency / 4;
    char why[160];

    if (engine->options->pool_bytes != 0)
        count = engine->options->pool_bytes / kvt_kv_memory_block_bytes(engine->model);
    if (count < longest) {
        (void)snprintf(why, sizeof(why),
                       "--pool-bytes %llu is too small: the longest request needs %llu",
                       (unsigned long long)engine->options->pool_bytes,
                       (unsigned long long)(longest * kvt_kv_memory_block_bytes(engine->model)));
        bench_give_up(engine, 2, why);
        return -EINVAL;
    }
    return paged_blocks_init(&paged->blocks, engine, &paged->stats, count, bench_store_of(engine));
}

static int find_own(struct paged_engine *paged)
{
    const struct bench_engine *engine = paged->engine;
    uint64_t count = engine->workload->requests_count;

    paged->own = kvt_alloc_zeroed(count + 1, sizeof(*paged->own));
    if (paged->own == NULL)
        return kvt_trace(-ENOMEM);
    for (uint64_t i = engine->options->requests_skipped; i < count; i++)
        if (bench_owner_of(engine, i) == engine->engine_idx)
            paged->own[paged->own_count++] = i;
    return 0;
}

static int make_requests(struct paged_engine *paged)
{
    uint32_t count = paged->engine->options->concurrency;
    int r = bench_caller_init(&paged->call, paged->engine, &paged->stats);

    paged->requests = kvt_alloc_zeroed(count, sizeof(*paged->requests));
    if (r == 0 && paged->requests == NULL)
        r = -ENOMEM;
    if (r == 0)
        r = bench_cursors_init(&paged->cursors, paged->engine->options->is_without_cursors);
    for (; r == 0 && paged->requests_count < count; paged->requests_count++)
        r = paged_request_init(paged, &paged->requests[paged->requests_count]);
    return r;
}

static int run(struct paged_engine *paged)
{
    struct bench_engine *engine = paged->engine;
    struct kvt_bench_worker_shared *shared = shared_of(paged);
    uint64_t every = engine->options->kill_rank_every;
    int r = make_blocks(paged);

    paged->stats = shared->versions[atomic_load(&shared->valid_idx)];
    paged->random = (engine->options->seed + 1) * 0x9E3779B97F4A7C15ull ^
                    (engine->engine_idx + 1) << 20 ^ paged->stats.requests;
    paged->random |= 1;
    paged->kill_rank_at = every / 2 + paged_random(paged) % (every + 1);
    if (r == 0)
        r = find_own(paged);
    if (r == 0)
        r = paged_jobs_init(&paged->jobs, engine, &paged->blocks.memory, engine->blocks_max + 1);
    if (r == 0)
        r = bench_memory_make(engine, &paged->blocks.memory);
    if (r < 0)
        return r;
    kvt_client_library_init(); /* the ranks were forked before */
    r = join_daemon(paged);
    if (r == 0)
        r = make_requests(paged);
    if (r == 0 && all_ready(paged))
        run_turns(paged);
    return r;
}

static void kill_ranks(struct paged_engine *paged)
{
    for (uint32_t rank = 0; rank < paged->engine->model->ranks; rank++)
        if (paged->jobs.ranks[rank].pid > 0)
            (void)kill(paged->jobs.ranks[rank].pid, SIGKILL);
}

int paged_engine_run(struct bench_engine *engine)
{
    struct paged_engine *paged = kvt_alloc_zeroed(1, sizeof(*paged));
    bool is_joined;
    int r;

    if (paged == NULL)
        return kvt_trace(-ENOMEM);
    paged->engine = engine;
    r = run(paged);
    if (paged->leave_at_ns != 0) {
        kill_ranks(paged);
        bench_give_up(engine, KVT_BENCH_EXIT_RANK_LOST, "a rank was killed");
    }
    is_joined = engine->link.client != NULL;
    paged_jobs_deinit(&paged->jobs);
    engine->scheduler.session = kvt_session_detach(engine->scheduler.session);
    bench_link_close(&engine->link);
    if (is_joined)
        kvt_client_library_deinit();
    for (uint32_t i = 0; i < paged->requests_count; i++)
        paged_request_deinit(paged, &paged->requests[i]);
    kvt_free(paged->requests);
    kvt_free(paged->own);
    bench_cursors_deinit(&paged->cursors);
    bench_caller_deinit(&paged->call);
    paged_blocks_deinit(&paged->blocks);
    kvt_free(paged);
    return r;
}
