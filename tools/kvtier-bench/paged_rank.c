/* A rank: threads that take jobs from one socket, and this process's first thread, which hears what
 * is to be given up. A thread's op may be cancelled only while its call runs: the lock keeps the
 * thread from ending it meanwhile. */
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>

#include "daemon/base/alloc.h"
#include "daemon/base/clock.h"
#include "tools/kvtier-bench/paged.h"
#include "tools/lib/oracle.h"

#define NO_JOB UINT32_MAX
static_assert(KVT_BLOCK_NONE == KVT_ENGINE_BLOCK_NONE, "tables hold what a Promote leaves alone");
#define QUIESCE_TRIES_NS (60 * KVT_NS_PER_S)

struct rank;

struct rank_thread {
    struct rank *rank;
    pthread_t thread;
    struct kvt_op op;
    struct kvt_arena arena;
    uint32_t job; /* whose call runs, under the lock */
};

struct rank {
    const struct paged_rank_seat *seat;
    struct bench_link link;
    struct bench_seat session;
    pthread_mutex_t lock;
    struct rank_thread threads[PAGED_RANK_THREADS];
};

static void sleep_us(uint32_t us)
{
    struct timespec pause = {.tv_sec = us / 1000000, .tv_nsec = (long)(us % 1000000) * 1000};

    if (us > 0)
        (void)nanosleep(&pause, NULL);
}

static void begin(struct rank_thread *thread, enum kvt_op_kind kind)
{
    kvt_arena_reset(&thread->arena);
    memset(&thread->op, 0, sizeof(thread->op));
    thread->op.kind = kind;
    thread->op.arena = &thread->arena;
    thread->op.deadline_ns = kvt_clock_mono_ns() + thread->rank->seat->engine->options->deadline_ns;
}

/* ---- verifying ------------------------------------------------------------------------------- */

static void verify_block(const struct rank *rank, const struct paged_job *job,
                         const struct paged_lists *lists, uint32_t c, uint32_t i,
                         struct paged_result *result)
{
    const struct kvt_model_component *component = &rank->seat->jobs->model->components[c];
    uint32_t each = component->engine_blocks_per_block;
    struct kvt_oracle_place place = {
        lists->chains[i], lists->block_idx[i], c,
        kvt_model_shard_rank(rank->seat->jobs->model, c, rank->seat->rank)};
    uint64_t wrong = 0, stray = 0;

    for (uint32_t part = 0; part < each; part++) {
        struct kvt_kv_part at = {.rank = rank->seat->rank,
                                 .component = c,
                                 .part = part,
                                 .id = lists->ids[(uint64_t)i * each + part],
                                 .key = kvt_oracle_key(&place)};

        if (at.id == KVT_BLOCK_NONE)
            continue;
        wrong += kvt_kv_memory_count_wrong(rank->seat->memory, &at);
        stray += kvt_kv_memory_count_spilled(rank->seat->memory, &at);
        result->verified_bytes += component->block_bytes / each;
    }
    result->verified_blocks++;
    result->wrong_blocks += wrong > 0;
    result->wrong_bytes += wrong;
    result->stray_bytes += stray;
    if (wrong + stray > 0 && result->first_wrong[0] == '\0')
        (void)snprintf(result->first_wrong, sizeof(result->first_wrong),
                       "request %llu block %llu component %s rank %u: %llu wrong bytes, %llu "
                       "beside it",
                       (unsigned long long)job->request_idx,
                       (unsigned long long)lists->block_idx[i], component->name, rank->seat->rank,
                       (unsigned long long)wrong, (unsigned long long)stray);
}

/* Counts what became of each block; blocks that came are verified. true: all of them. */
static bool take_results(struct rank_thread *thread, const struct paged_job *job, uint32_t job_idx,
                         const struct kvt_api_results *results, struct paged_result *result)
{
    const struct paged_jobs *jobs = thread->rank->seat->jobs;
    bool is_verifying = thread->rank->seat->engine->options->is_verifying, is_whole = true;
    uint32_t m = 0;

    for (uint32_t c = 0; c < jobs->model->components_count; c++) {
        struct paged_lists lists = paged_job_lists(jobs, job_idx, c);

        if (job->counts[c] == 0)
            continue;
        is_whole = is_whole && results->count[m] == job->counts[c];
        for (uint32_t i = 0; i < KVT_MIN(results->count[m], job->counts[c]); i++) {
            uint8_t what = results->results[m][i] % KVT_BENCH_RESULTS;

            result->results[what]++;
            is_whole = is_whole && (what == KVT_MOVE_DONE || what == KVT_MOVE_PRESENT);
            if (what == KVT_MOVE_DONE && job->kind == PAGED_LOAD && is_verifying)
                verify_block(thread->rank, job, &lists, c, i, result);
        }
        m++;
    }
    return is_whole;
}

/* ---- one job --------------------------------------------------------------------------------- */

static uint32_t make_moves(const struct paged_jobs *jobs, uint32_t job_idx,
                           struct kvt_api_moves *moves)
{
    const struct paged_job *job = &jobs->jobs[job_idx];
    uint32_t count = 0;

    for (uint32_t c = 0; c < jobs->model->components_count; c++) {
        struct paged_lists lists = paged_job_lists(jobs, job_idx, c);

        if (job->counts[c] == 0)
            continue;
        moves[count++] = (struct kvt_api_moves){
            .component = c,
            .count = job->counts[c],
            .block_idx = lists.block_idx,
            .engine_blocks = lists.ids,
            .engine_blocks_count =
                job->counts[c] * jobs->model->components[c].engine_blocks_per_block,
        };
    }
    return count;
}

static void fill_request(struct rank_thread *thread, uint32_t job_idx)
{
    const struct paged_jobs *jobs = thread->rank->seat->jobs;
    const struct paged_job *job = &jobs->jobs[job_idx];

    if (job->kind == PAGED_LOAD) {
        struct kvt_req_promote *req = &thread->op.req.promote;

        req->session = thread->rank->session.handle;
        req->lease = job->handle;
        req->op_id = job->op_id;
        req->moves_count = make_moves(jobs, job_idx, req->moves);
    } else {
        struct kvt_req_demote *req = &thread->op.req.demote;

        req->session = thread->rank->session.handle;
        req->ticket = job->handle;
        req->op_id = job->op_id;
        req->moves_count = make_moves(jobs, job_idx, req->moves);
    }
}

/* false: it was given up before it began. */
static bool call_unless_given_up(struct rank_thread *thread, uint32_t job_idx)
{
    struct rank *rank = thread->rank;
    const struct paged_job *job = &rank->seat->jobs->jobs[job_idx];
    bool is_given_up;

    (void)pthread_mutex_lock(&rank->lock);
    is_given_up = (atomic_load(&job->given_up_by) >> rank->seat->rank & 1) != 0;
    if (!is_given_up) {
        begin(thread, job->kind == PAGED_LOAD ? KVT_OP_PROMOTE : KVT_OP_DEMOTE);
        fill_request(thread, job_idx);
        thread->job = job_idx;
    }
    (void)pthread_mutex_unlock(&rank->lock);
    if (is_given_up)
        return false;
    kvt_client_call(rank->link.client, &thread->op);
    (void)pthread_mutex_lock(&rank->lock);
    thread->job = NO_JOB;
    (void)pthread_mutex_unlock(&rank->lock);
    return true;
}

static bool quiesce(struct rank_thread *thread, uint64_t op_id)
{
    uint64_t until_ns = kvt_clock_mono_ns() + QUIESCE_TRIES_NS;

    do {
        begin(thread, KVT_OP_QUIESCE);
        thread->op.req.quiesce.session = thread->rank->session.handle;
        thread->op.req.quiesce.op_id = op_id;
        kvt_client_call(thread->rank->link.client, &thread->op);
        if (thread->op.code == KVT_CODE_OK)
            return true;
    } while (thread->op.code == KVT_CODE_DEADLINE_EXCEEDED && kvt_clock_mono_ns() < until_ns);
    return false;
}

static void release_lease(struct rank_thread *thread, struct kvt_handle lease)
{
    begin(thread, KVT_OP_RELEASE);
    thread->op.req.release.session = thread->rank->session.handle;
    thread->op.req.release.lease = lease;
    kvt_client_call(thread->rank->link.client, &thread->op);
}

static void take_answer(struct rank_thread *thread, const struct paged_job *job, uint32_t job_idx,
                        struct paged_result *result)
{
    const struct kvt_ans_promote *up = &thread->op.ans.promote;
    const struct kvt_ans_demote *down = &thread->op.ans.demote;
    bool is_load = job->kind == PAGED_LOAD;

    result->moved_bytes = is_load ? up->moved_bytes : down->moved_bytes;
    for (uint32_t t = 0; t < KVT_API_TIERS && is_load; t++)
        result->moved_blocks_from[t] = up->moved_blocks_from[t];
    result->is_quiesced = is_load ? up->is_quiesced : down->is_quiesced;
    result->is_whole =
        take_results(thread, job, job_idx, is_load ? &up->moves : &down->moves, result);
}

static void run_job(struct rank_thread *thread, uint32_t job_idx)
{
    const struct paged_rank_seat *seat = thread->rank->seat;
    const struct paged_job *job = &seat->jobs->jobs[job_idx];
    struct paged_result *result = &seat->jobs->jobs[job_idx].results[seat->rank];
    uint64_t began_ns;

    memset(result, 0, sizeof(*result));
    sleep_us(job->late_us[seat->rank]);
    began_ns = kvt_clock_mono_ns();
    if (!call_unless_given_up(thread, job_idx)) {
        result->code = KVT_CODE_CANCELLED;
        result->is_quiesced = true;
        return;
    }
    result->call_ns = kvt_clock_mono_ns() - began_ns;
    result->code = thread->op.code;
    (void)snprintf(result->message, sizeof(result->message), "%.120s", thread->op.message);
    if (result->code == KVT_CODE_OK)
        take_answer(thread, job, job_idx, result);
    if (!result->is_quiesced) {
        result->quiesced_later = 1;
        result->is_quiesced = quiesce(thread, job->op_id);
    }
    if (job->kind == PAGED_LOAD)
        release_lease(thread, job->handle);
}

static void *thread_main(void *arg)
{
    struct rank_thread *thread = arg;
    const struct paged_rank_seat *seat = thread->rank->seat;
    uint32_t job_idx;

    while (recv(seat->work, &job_idx, sizeof(job_idx), 0) == sizeof(job_idx)) {
        run_job(thread, job_idx);
        (void)send(seat->work, &job_idx, sizeof(job_idx), MSG_NOSIGNAL);
    }
    return NULL;
}

/* ---- the process ----------------------------------------------------------------------------- */

static void give_up(struct rank *rank, const struct paged_order *order)
{
    struct paged_job *job = &rank->seat->jobs->jobs[order->job];

    sleep_us(order->after_us);
    if (atomic_load(&job->op_id) != order->op_id)
        return; /* it has ended; that is another one */
    (void)pthread_mutex_lock(&rank->lock);
    (void)atomic_fetch_or(&job->given_up_by, 1u << rank->seat->rank);
    for (uint32_t i = 0; i < PAGED_RANK_THREADS; i++)
        if (rank->threads[i].job == order->job)
            kvt_client_cancel(rank->link.client, &rank->threads[i].op);
    (void)pthread_mutex_unlock(&rank->lock);
}

static void serve(struct rank *rank)
{
    uint32_t ready = PAGED_READY, started = 0;
    struct paged_order order;
    int r = 0;

    for (uint32_t i = 0; i < PAGED_RANK_THREADS && r == 0; i++) {
        struct rank_thread *thread = &rank->threads[i];

        *thread = (struct rank_thread){.rank = rank, .job = NO_JOB};
        r = kvt_arena_init(&thread->arena, KVT_OP_ARENA_BYTES_MAX, KVT_OP_ARENA_BYTES_MAX);
        if (r == 0)
            r = -pthread_create(&thread->thread, NULL, thread_main, thread);
        started += r == 0;
    }
    if (started > 0)
        (void)send(rank->seat->work, &ready, sizeof(ready), MSG_NOSIGNAL);
    while (started > 0 && recv(rank->seat->control, &order, sizeof(order), 0) == sizeof(order))
        give_up(rank, &order);
    for (uint32_t i = 0; i < started; i++) {
        (void)pthread_join(rank->threads[i].thread, NULL);
        kvt_arena_deinit(&rank->threads[i].arena);
    }
}

int paged_rank_run(const struct paged_rank_seat *seat)
{
    struct bench_engine *engine = seat->engine;
    struct rank *rank = kvt_alloc_zeroed(1, sizeof(*rank));
    int r;

    if (rank == NULL || pthread_mutex_init(&rank->lock, NULL) != 0)
        return 1;
    rank->seat = seat;
    rank->link = (struct bench_link){.options = engine->options,
                                     .model = engine->model,
                                     .memory = seat->memory,
                                     .gpu = engine->gpu};
    kvt_client_library_init();
    r = kvt_kv_memory_join(seat->memory);
    if (r < 0)
        (void)snprintf(rank->link.why, sizeof(rank->link.why), "the engine's memory: %s",
                       strerror(-r));
    if (r < 0)
        rank->link.exit_status = 1;
    if (r == 0)
        r = bench_link_open(&rank->link);
    if (r == 0)
        r = bench_link_attach(&rank->link, seat->jobs->engine_id, seat->rank, &rank->session);
    if (r == 0)
        serve(rank);
    else
        bench_give_up(engine, rank->link.exit_status, rank->link.why);
    rank->session.session = kvt_session_detach(rank->session.session);
    bench_link_close(&rank->link);
    kvt_client_library_deinit();
    engine->gpu = kvt_gpu_pool_free(engine->gpu);
    r = rank->link.exit_status;
    kvt_free(rank);
    return r;
}
