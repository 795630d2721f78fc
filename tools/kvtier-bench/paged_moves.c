/* What the scheduler asks of the daemon, and what it makes of the ranks' answers.
 *
 *   start    lookup with a lease; room in the tables; one load for all ranks
 *   store    one Reserve; what is missing goes to all ranks as one store
 *   answers  a load is good when every rank got all of it: else the request gives its blocks back,
 *            starts again and loads no more (as engines do that recompute after a failure)
 *
 * A job holds a reference to each of its engine blocks until the last rank has answered, whatever
 * became of the request meanwhile. */
#include <stdio.h>
#include <string.h>

#include "tools/kvtier-bench/paged.h"

#define STORE_SHARE 4u /* stores hold at most 1 / 4 of the pool's blocks */
#define GIVE_UP_US_MAX 2000u

uint64_t paged_random(struct paged_engine *paged)
{
    paged->random ^= paged->random << 13;
    paged->random ^= paged->random >> 7;
    paged->random ^= paged->random << 17;
    return paged->random >> 11;
}

/* ---- jobs ------------------------------------------------------------------------------------ */

static uint32_t free_job(const struct paged_engine *paged)
{
    uint32_t job = 0;

    while (job < PAGED_JOBS && paged->flights[job].is_used)
        job++;
    return job;
}

/* A block of the request is the job's next one of its component. */
static void add_block(struct paged_engine *paged, const struct paged_request *request,
                      uint32_t job_idx, uint32_t c, uint64_t block)
{
    struct paged_job *job = &paged->jobs.jobs[job_idx];
    struct paged_lists lists = paged_job_lists(&paged->jobs, job_idx, c);
    const struct kvt_model_component *component = &paged->engine->model->components[c];
    uint32_t each = component->engine_blocks_per_block, at = job->counts[c]++;
    uint64_t kept = 0;

    if (job->kind == PAGED_LOAD && component->kind == KVT_MODEL_FULL)
        kept = request->kept_tokens / paged->engine->model->engine_block_tokens;
    lists.block_idx[at] = block;
    lists.chains[at] = request->chains[block];
    for (uint32_t part = 0; part < each; part++) {
        uint64_t entry = block * each + part, id = KVT_BLOCK_NONE;
        struct paged_block what = {PAGED_MAYBE, c, part, request->chains[block], block};

        if (entry >= KVT_MAX(request->begins[c], kept))
            id = request->tables[c][entry];
        paged->stats.left_alone += job->kind == PAGED_LOAD && id == KVT_BLOCK_NONE;
        lists.ids[(uint64_t)at * each + part] = id;
        if (id == KVT_BLOCK_NONE)
            continue;
        kvt_block_pool_ref(&paged->blocks.pool, id);
        paged->flights[job_idx].engine_blocks++;
        if (job->kind == PAGED_LOAD)
            paged_blocks_set(&paged->blocks, id, &what);
    }
}

static void begin_job(struct paged_engine *paged, struct paged_request *request, uint32_t job_idx,
                      enum paged_job_kind kind, struct kvt_handle handle)
{
    struct paged_job *job = &paged->jobs.jobs[job_idx];

    job->kind = kind;
    atomic_store(&job->op_id, ++paged->op_seq);
    job->request_idx = request->request_idx;
    job->handle = handle;
    atomic_store(&job->given_up_by, 0);
    memset(job->counts, 0, sizeof(job->counts));
    paged->flights[job_idx] = (struct paged_flight){
        .is_used = true,
        .ranks_left = paged->engine->model->ranks,
        .number = request->number,
        .request = kind == PAGED_LOAD ? request : NULL,
    };
    paged->flying++;
}

static uint32_t give_up_us(struct paged_engine *paged)
{
    return paged_random(paged) % 4 == 0 ? 0 : (uint32_t)(paged_random(paged) % GIVE_UP_US_MAX);
}

/* In random order, some of them late; now and then one rank gives up in the middle. */
static void send_job(struct paged_engine *paged, uint32_t job_idx)
{
    const struct kvt_bench_options *options = paged->engine->options;
    struct paged_job *job = &paged->jobs.jobs[job_idx];
    uint32_t ranks = paged->engine->model->ranks;
    uint32_t first = (uint32_t)(paged_random(paged) % ranks);
    bool is_down = paged_random(paged) % 2 == 0;

    for (uint32_t i = 0; i < ranks; i++)
        job->late_us[i] = options->late_us != 0 && paged_random(paged) % 2 == 0
                              ? (uint32_t)(paged_random(paged) % options->late_us)
                              : 0;
    for (uint32_t i = 0; i < ranks; i++)
        paged_job_send(&paged->jobs, (is_down ? first + ranks - i : first + i) % ranks, job_idx);
    if (options->cancel_every != 0 && ++paged->jobs_made % options->cancel_every == 0) {
        paged_job_give_up(&paged->jobs, job_idx, (uint32_t)(paged_random(paged) % ranks),
                          give_up_us(paged));
        paged->stats.cancelled_ranks++;
    }
}

/* ---- start ----------------------------------------------------------------------------------- */

static void set_prefix(struct paged_engine *paged, const struct paged_request *request,
                       struct kvt_api_prefix *prefix, uint64_t tokens)
{
    prefix->salt = bench_text(request->salt);
    prefix->cursor = request->cursor;
    prefix->tokens = request->tokens + request->cursor_tokens;
    prefix->tokens_count = tokens - request->cursor_tokens;
    paged->stats.sent_tokens += prefix->tokens_count;
}

/* A cursor that went stale is no error: forget it and send everything. */
static bool forget_stale_cursor(struct paged_engine *paged, struct paged_request *request)
{
    const struct kvt_op *op = &paged->call.op;

    if (request->cursor_tokens == 0 ||
        (op->code != KVT_CODE_NOT_FOUND && op->code != KVT_CODE_FAILED_PRECONDITION))
        return false;
    paged->stats.errors[op->kind][op->code]--;
    paged->stats.cursors_stale++;
    request->cursor = KVT_HANDLE_NONE;
    request->cursor_tokens = 0;
    return true;
}

static void call_lookup(struct paged_engine *paged, struct paged_request *request)
{
    struct kvt_req_lookup *req = &paged->call.op.req.lookup;

    bench_call_begin(&paged->call, KVT_OP_LOOKUP);
    req->session = paged->engine->scheduler.handle;
    set_prefix(paged, request, &req->prefix, request->prompt_tokens);
    req->limit_tokens =
        paged->engine->options->is_matching_whole ? UINT64_MAX : request->prompt_tokens - 1;
    req->tiers = KVT_TIER_BITS_ALL;
    req->wants_lease = true;
    (void)bench_call(&paged->call, KVT_BENCH_LOOKUP);
}

static void take_lookup(struct paged_engine *paged, struct paged_request *request)
{
    const struct kvt_ans_lookup *ans = &paged->call.op.ans.lookup;
    struct kvt_bench_stats *stats = &paged->stats;

    stats->hit_tokens += ans->boundary_tokens;
    for (uint32_t c = 0; c < paged->engine->model->components_count; c++)
        for (uint32_t t = 0; t < KVT_API_TIERS; t++)
            stats->component_tokens[c][t] += ans->components[c].tokens_at[t];
    for (uint32_t t = 0; t < KVT_API_TIERS; t++)
        stats->hit_tokens_by_tier[t] += ans->components[0].tokens_at[t];
    if (ans->cursor.boot_id != 0 && ans->cursor_tokens <= request->stored_tokens_max) {
        request->cursor = ans->cursor;
        request->cursor_tokens = ans->cursor_tokens;
    }
}

/* The boundary, and a lease where that is not 0. */
static uint64_t lookup(struct paged_engine *paged, struct paged_request *request,
                       struct kvt_handle *ret_lease)
{
    uint64_t boundary;

    *ret_lease = KVT_HANDLE_NONE;
    paged->stats.cursor_lookups += request->cursor_tokens > 0;
    paged->stats.lookup_tokens += request->prompt_tokens;
    call_lookup(paged, request);
    if (paged->call.op.code != KVT_CODE_OK && forget_stale_cursor(paged, request))
        call_lookup(paged, request);
    if (paged->call.op.code == KVT_CODE_NOT_FOUND ||
        paged->call.op.code == KVT_CODE_FAILED_PRECONDITION)
        bench_give_up(paged->engine, KVT_BENCH_EXIT_AGAIN, paged->call.op.message);
    if (paged->call.op.code != KVT_CODE_OK)
        return 0;
    take_lookup(paged, request);
    boundary = paged->call.op.ans.lookup.boundary_tokens;
    *ret_lease = paged->call.op.ans.lookup.lease;
    return ret_lease->boot_id != 0 ? boundary : 0; /* no lease, no load: over its limit */
}

static void release(struct paged_engine *paged, enum paged_job_kind kind, struct kvt_handle handle)
{
    struct kvt_handle lease = kind == PAGED_LOAD ? handle : KVT_HANDLE_NONE;
    struct kvt_handle ticket = kind == PAGED_LOAD ? KVT_HANDLE_NONE : handle;

    if (handle.boot_id != 0)
        bench_call_release(&paged->call, paged->engine->scheduler.handle, lease, ticket);
}

static void load(struct paged_engine *paged, struct paged_request *request, uint32_t job,
                 struct kvt_handle lease, uint64_t boundary)
{
    const struct kvt_model *model = paged->engine->model;
    uint64_t kept_blocks = request->kept_tokens / model->block_tokens;

    begin_job(paged, request, job, PAGED_LOAD, lease);
    paged->flights[job].tokens = boundary;
    kept_blocks -= kept_blocks > 0; /* one that is all there is asked for, too */
    paged_request_hide_kept(paged, request, kept_blocks);
    for (uint32_t c = 0; c < model->components_count; c++) {
        struct kvt_model_span span = kvt_model_needed(model, c, boundary);

        if (model->components[c].kind == KVT_MODEL_FULL)
            span.first = kept_blocks;
        for (uint64_t block = span.first; block < span.end; block++)
            add_block(paged, request, job, c, block);
    }
    paged->stats.loads++;
    send_job(paged, job);
}

bool paged_reclaim_kept(struct paged_engine *paged, const struct paged_request *but)
{
    bool has_some = false;

    for (uint32_t i = 0; i < paged->requests_count; i++) {
        struct paged_request *request = &paged->requests[i];

        if (request == but || request->phase != PAGED_WAITING || request->kept_tokens == 0)
            continue;
        paged_request_drop(paged, request);
        has_some = true;
    }
    return has_some;
}

/* Tables for a load, from kept blocks of others if need be. */
static bool make_room(struct paged_engine *paged, struct paged_request *request, uint64_t boundary)
{
    if (request->kept_tokens > boundary)
        paged_request_keep(paged, request, boundary);
    return paged_request_make_room(paged, request, boundary) ||
           (paged_reclaim_kept(paged, request) &&
            paged_request_make_room(paged, request, boundary));
}

/* Whether it can begin to compute without a load; what it kept is of no use then. */
static bool can_begin(struct paged_engine *paged, struct paged_request *request)
{
    uint64_t chunk = KVT_MIN(request->total_tokens, paged->engine->options->chunk_tokens);

    paged_request_drop(paged, request);
    if (paged_request_lacks(paged, request, chunk) > paged->blocks.pool.free_count)
        (void)paged_reclaim_kept(paged, request);
    return paged_request_lacks(paged, request, chunk) <= paged->blocks.pool.free_count;
}

enum paged_start paged_start(struct paged_engine *paged, struct paged_request *request)
{
    struct kvt_handle lease = KVT_HANDLE_NONE;
    uint32_t job = free_job(paged);
    uint64_t boundary = 0;

    if (request->may_load && job == PAGED_JOBS)
        return PAGED_START_NO_ROOM;
    if (request->may_load && request->prompt_tokens > 0)
        boundary = lookup(paged, request, &lease);
    if (boundary > 0 && make_room(paged, request, boundary)) {
        load(paged, request, job, lease, boundary);
        return PAGED_START_LOADING;
    }
    release(paged, PAGED_LOAD, lease);
    if (boundary == 0 && can_begin(paged, request))
        return PAGED_START_RUNNING;
    request->free_seen = paged->blocks.pool.free_count;
    return PAGED_START_NO_ROOM;
}

/* ---- stores ---------------------------------------------------------------------------------- */

static void add_wants(const struct paged_engine *paged, const struct paged_request *request,
                      uint64_t first_block, struct kvt_req_reserve *req)
{
    uint64_t end = KVT_MIN(request->computed_tokens, request->stored_tokens_max) /
                   paged->engine->model->block_tokens;

    for (uint32_t c = 0; c < paged->engine->model->components_count; c++) {
        struct kvt_model_span span = {first_block, end};

        if (paged->engine->model->components[c].kind != KVT_MODEL_FULL)
            span = paged_request_whole(paged, request, c, end);
        if (span.first < span.end)
            req->wants[req->wants_count++] = (struct kvt_api_range){c, span.first, span.end};
    }
}

static bool reserve(struct paged_engine *paged, struct paged_request *request, uint64_t tokens,
                    const struct kvt_req_reserve *wants)
{
    do {
        struct kvt_req_reserve *req = &paged->call.op.req.reserve;

        bench_call_begin(&paged->call, KVT_OP_RESERVE);
        *req = *wants;
        req->session = paged->engine->scheduler.handle;
        set_prefix(paged, request, &req->prefix, tokens);
        (void)bench_call(&paged->call, KVT_BENCH_RESERVE);
    } while (paged->call.op.code != KVT_CODE_OK && forget_stale_cursor(paged, request));
    return paged->call.op.code == KVT_CODE_OK;
}

static void take_reserve(struct paged_engine *paged, struct paged_request *request, uint32_t job,
                         const struct kvt_req_reserve *wants)
{
    const struct kvt_ans_reserve *ans = &paged->call.op.ans.reserve;

    begin_job(paged, request, job, PAGED_STORE, ans->ticket);
    for (uint32_t w = 0; w < KVT_MIN(wants->wants_count, ans->wants_count); w++) {
        for (uint32_t i = 0; i < ans->count[w]; i++) {
            uint8_t state = ans->states[w][i] & 3;

            paged->stats.reserve_states[state]++;
            if (state == KVT_RESERVE_MISSING)
                add_block(paged, request, job, wants->wants[w].component,
                          wants->wants[w].first_block_idx + i);
        }
    }
    if (ans->cursor.boot_id != 0) {
        request->cursor = ans->cursor;
        request->cursor_tokens = ans->cursor_tokens;
        bench_cursor_keep(&paged->cursors, paged->engine->workload, request->request_idx,
                          ans->cursor_tokens, ans->cursor);
    }
}

static void end_job(struct paged_engine *paged, uint32_t job_idx, bool is_quiesced);

bool paged_may_store(const struct paged_engine *paged)
{
    return free_job(paged) < PAGED_JOBS &&
           paged->held_by_stores <= paged->blocks.pool.blocks_count / STORE_SHARE;
}

void paged_store(struct paged_engine *paged, struct paged_request *request, uint64_t first_block)
{
    uint32_t job, block_tokens = paged->engine->model->block_tokens;
    uint64_t tokens = KVT_MIN(request->computed_tokens, request->stored_tokens_max);
    struct kvt_req_reserve wants = {0};

    tokens -= tokens % block_tokens;
    if (first_block * block_tokens >= tokens)
        return;
    job = free_job(paged);
    KVT_ASSERT(job < PAGED_JOBS); /* paged_may_store */
    add_wants(paged, request, first_block, &wants);
    if (request->cursor_tokens > tokens) { /* of an earlier, longer life of the request */
        request->cursor = KVT_HANDLE_NONE;
        request->cursor_tokens = 0;
    }
    if (!reserve(paged, request, tokens, &wants))
        return;
    take_reserve(paged, request, job, &wants);
    if (paged->flights[job].engine_blocks == 0 || paged->jobs.jobs[job].handle.boot_id == 0) {
        release(paged, PAGED_STORE, paged->jobs.jobs[job].handle);
        end_job(paged, job, true);
        return;
    }
    paged->held_by_stores += paged->flights[job].engine_blocks;
    paged->stats.stores++;
    send_job(paged, job);
}

/* ---- answers --------------------------------------------------------------------------------- */

/* The job's blocks are the tables' alone again, or the pool's. */
static void end_job(struct paged_engine *paged, uint32_t job_idx, bool is_quiesced)
{
    const struct paged_job *job = &paged->jobs.jobs[job_idx];

    for (uint32_t c = 0; c < paged->engine->model->components_count; c++) {
        struct paged_lists lists = paged_job_lists(&paged->jobs, job_idx, c);
        uint64_t count =
            (uint64_t)job->counts[c] * paged->engine->model->components[c].engine_blocks_per_block;

        for (uint64_t i = 0; i < count; i++) {
            if (is_quiesced)
                paged_blocks_unref(&paged->blocks, lists.ids[i]);
            else
                paged->stats.blocks_lost += lists.ids[i] != KVT_BLOCK_NONE;
        }
    }
    paged->flights[job_idx].is_used = false;
    paged->flying--;
}

static void add_result(struct paged_engine *paged, const struct paged_job *job,
                       const struct paged_result *result)
{
    struct kvt_bench_stats *stats = &paged->stats;
    bool is_load = job->kind == PAGED_LOAD;
    char *wrong = paged->engine->shared->first_wrong;

    for (uint32_t i = 0; i < KVT_BENCH_RESULTS; i++)
        *(is_load ? &stats->promote_results[i] : &stats->demote_results[i]) += result->results[i];
    for (uint32_t t = 0; t < KVT_API_TIERS; t++)
        stats->promoted_blocks_from[t] += result->moved_blocks_from[t];
    if (is_load)
        for (uint32_t i = KVT_MOVE_DONE + 1; i < KVT_BENCH_RESULTS; i++)
            stats->recomputed_blocks += i != KVT_MOVE_ABORTED ? result->results[i] : 0;
    *(is_load ? &stats->promoted_bytes : &stats->demoted_bytes) += result->moved_bytes;
    stats->quiesced_later += result->quiesced_later;
    stats->verified_blocks += result->verified_blocks;
    stats->verified_bytes += result->verified_bytes;
    stats->wrong_blocks += result->wrong_blocks;
    stats->wrong_bytes += result->wrong_bytes;
    stats->stray_bytes += result->stray_bytes;
    if (result->first_wrong[0] != '\0' && wrong[0] == '\0')
        (void)snprintf(wrong, sizeof(paged->engine->shared->first_wrong), "%s",
                       result->first_wrong);
    kvt_histogram_add(&stats->calls[is_load ? KVT_BENCH_PROMOTE : KVT_BENCH_DEMOTE],
                      result->call_ns);
    if (result->code != KVT_CODE_OK)
        bench_note_error(paged->engine, stats,
                         &(struct bench_error){is_load ? KVT_OP_PROMOTE : KVT_OP_DEMOTE,
                                               result->code, result->message});
}

/* What the blocks of a load hold now. */
static void note_loaded(struct paged_engine *paged, uint32_t job_idx, enum paged_content content)
{
    const struct paged_job *job = &paged->jobs.jobs[job_idx];

    for (uint32_t c = 0; c < paged->engine->model->components_count; c++) {
        struct paged_lists lists = paged_job_lists(&paged->jobs, job_idx, c);
        uint64_t count =
            (uint64_t)job->counts[c] * paged->engine->model->components[c].engine_blocks_per_block;

        for (uint64_t i = 0; i < count; i++)
            if (lists.ids[i] != KVT_BLOCK_NONE)
                paged->blocks.blocks[lists.ids[i]].content = content;
    }
}

static void end_load(struct paged_engine *paged, struct paged_request *request, bool is_good,
                     uint64_t tokens)
{
    if (request == NULL)
        return; /* given up meanwhile */
    if (is_good) {
        paged_request_show_kept(paged, request);
        request->phase = PAGED_RUNNING;
        request->computed_tokens = tokens;
        return;
    }
    paged->stats.failed_loads++;
    paged_request_drop(paged, request);
    request->phase = PAGED_WAITING;
    request->may_load = false;
    request->free_seen = 0;
}

void paged_take_result(struct paged_engine *paged, uint32_t rank, uint32_t job_idx)
{
    struct paged_flight *flight = &paged->flights[job_idx];
    const struct paged_job *job = &paged->jobs.jobs[job_idx];
    bool is_good = true, is_quiesced = true, is_wrong = false;

    KVT_ASSERT(flight->is_used && flight->ranks_left > 0);
    add_result(paged, job, &job->results[rank]);
    if (--flight->ranks_left > 0)
        return;
    for (uint32_t i = 0; i < paged->engine->model->ranks; i++) {
        is_good = is_good && job->results[i].code == KVT_CODE_OK && job->results[i].is_whole;
        is_quiesced = is_quiesced && job->results[i].is_quiesced;
        is_wrong = is_wrong || job->results[i].wrong_blocks > 0;
    }
    if (!flight->is_released)
        release(paged, job->kind, job->handle);
    if (job->kind == PAGED_LOAD) {
        if (is_good || is_wrong)
            note_loaded(paged, job_idx, is_wrong ? PAGED_WRONG : PAGED_PAYLOAD);
        end_load(paged, flight->request, is_good && !is_wrong, flight->tokens);
    } else {
        paged->held_by_stores -= flight->engine_blocks;
        paged->stats.part_stores += !is_good;
    }
    end_job(paged, job_idx, is_quiesced);
}

/* ---- giving up ------------------------------------------------------------------------------- */

static void abort_job(struct paged_engine *paged, uint32_t job_idx)
{
    struct paged_flight *flight = &paged->flights[job_idx];
    bool is_load = paged->jobs.jobs[job_idx].kind == PAGED_LOAD;

    flight->request = NULL;
    *(is_load ? &paged->stats.aborted_loads : &paged->stats.aborted_stores) += 1;
    for (uint32_t rank = 0; rank < paged->engine->model->ranks; rank++)
        paged_job_give_up(&paged->jobs, job_idx, rank, give_up_us(paged));
    if (!flight->is_released && paged_random(paged) % 2 == 0) {
        flight->is_released = true; /* under the ranks' hands */
        release(paged, paged->jobs.jobs[job_idx].kind, paged->jobs.jobs[job_idx].handle);
    }
}

void paged_abort_moves(struct paged_engine *paged, struct paged_request *request)
{
    for (uint32_t job = 0; job < PAGED_JOBS; job++) {
        const struct paged_flight *flight = &paged->flights[job];
        bool is_load = paged->jobs.jobs[job].kind == PAGED_LOAD;

        /* A store may as well run on: its blocks are its own. */
        if (flight->is_used && flight->number == request->number &&
            (is_load || paged_random(paged) % 2 == 0))
            abort_job(paged, job);
    }
}
