/* One request, as an engine serves it:
 *
 *   lookup      by the scheduler, with a lease; from the conversation's cursor where there is one
 *   promote     by each rank: what the boundary needs, into engine blocks; verified
 *   compute     the oracle's bytes go into the blocks that are not there
 *   reserve     by the scheduler: what is worth storing (below); says which of it is missing
 *   demote      by each rank: the missing ones
 *   release     lease and ticket, by each rank and by the scheduler
 *
 * What is worth storing: full attention everywhere; windows only where a later prompt may resume:
 * behind the end, behind prompt_len - 1 (another block when the prompt is whole blocks), and behind
 * the branch point; a state at the first two of these.
 *
 * A block that a promote did not deliver ends what is usable there; an engine block whose op has
 * not been quiesced is never used again. */
#include <stdio.h>
#include <string.h>

#include "daemon/base/clock.h"
#include "tools/kvtier-bench/engine.h"
#include "tools/lib/oracle.h"

static uint32_t block_tokens(const struct bench_worker *worker)
{
    return worker->engine->model->block_tokens;
}

static const struct kvt_model_component *component_of(const struct bench_worker *worker, uint32_t c)
{
    return &worker->engine->model->components[c];
}

static uint64_t *ids_of(const struct bench_worker *worker, uint32_t c, uint64_t block)
{
    return worker->ids[c] + block * component_of(worker, c)->engine_blocks_per_block;
}

static struct kvt_bench_shard shard_of(const struct bench_worker *worker, uint32_t c,
                                       uint64_t block, uint32_t rank)
{
    struct kvt_oracle_place place = {worker->chains[block], block, c,
                                     kvt_model_shard_rank(worker->engine->model, c, rank)};

    return (struct kvt_bench_shard){
        .component = c,
        .rank = rank,
        .ids = ids_of(worker, c, block),
        .key = kvt_oracle_key(&place),
    };
}

/* ---- lookup ---------------------------------------------------------------------------------- */

static void set_prefix(struct bench_worker *worker, struct kvt_api_prefix *prefix, uint64_t tokens)
{
    prefix->salt = (struct kvt_text){worker->salt, (uint32_t)strlen(worker->salt)};
    prefix->cursor = worker->cursor;
    prefix->tokens = worker->tokens + worker->cursor_tokens;
    prefix->tokens_count = tokens - worker->cursor_tokens;
    worker->stats.sent_tokens += prefix->tokens_count;
}

/* A cursor that went stale is no error: forget it and send everything. */
static bool forget_stale_cursor(struct bench_worker *worker, enum kvt_op_kind kind)
{
    enum kvt_code code = worker->call.op.code;

    if (worker->cursor_tokens == 0 ||
        (code != KVT_CODE_NOT_FOUND && code != KVT_CODE_FAILED_PRECONDITION))
        return false;
    worker->stats.errors[kind][code]--;
    worker->stats.cursors_stale++;
    worker->cursor = KVT_HANDLE_NONE;
    worker->cursor_tokens = 0;
    return true;
}

static void call_lookup(struct bench_worker *worker)
{
    struct kvt_req_lookup *req = &worker->call.op.req.lookup;

    bench_call_begin(&worker->call, KVT_OP_LOOKUP);
    req->session = worker->engine->scheduler.handle;
    set_prefix(worker, &req->prefix, worker->prompt_tokens);
    req->limit_tokens =
        worker->engine->options->is_matching_whole ? UINT64_MAX : worker->prompt_tokens - 1;
    req->tiers = KVT_TIER_BITS_ALL;
    req->wants_lease = true;
    (void)bench_call(&worker->call, KVT_BENCH_LOOKUP);
}

static void take_lookup(struct bench_worker *worker, const struct kvt_ans_lookup *ans)
{
    struct kvt_bench_stats *stats = &worker->stats;

    worker->boundary_tokens = KVT_MIN(ans->boundary_tokens, worker->stored_tokens);
    worker->branch_tokens = KVT_MIN(ans->branch_tokens, worker->stored_tokens);
    worker->lease = ans->lease;
    stats->hit_tokens += ans->boundary_tokens;
    for (uint32_t c = 0; c < worker->engine->model->components_count; c++)
        for (uint32_t t = 0; t < KVT_API_TIERS; t++)
            stats->component_tokens[c][t] += ans->components[c].tokens_at[t];
    for (uint32_t t = 0; t < KVT_API_TIERS; t++)
        stats->hit_tokens_by_tier[t] += ans->components[0].tokens_at[t];
    if (ans->cursor.boot_id != 0 && ans->cursor_tokens <= worker->stored_tokens) {
        worker->cursor = ans->cursor;
        worker->cursor_tokens = ans->cursor_tokens;
    }
}

static void lookup(struct bench_worker *worker)
{
    worker->cursor_tokens =
        bench_cursor_recall(&worker->cursors, worker->engine->workload, worker->request_idx,
                            worker->stored_tokens, &worker->cursor);
    worker->stats.cursor_lookups += worker->cursor_tokens > 0;
    worker->stats.lookup_tokens += worker->prompt_tokens;
    worker->boundary_tokens = worker->branch_tokens = 0;
    worker->lease = KVT_HANDLE_NONE;
    call_lookup(worker);
    if (worker->call.op.code != KVT_CODE_OK && forget_stale_cursor(worker, KVT_OP_LOOKUP))
        call_lookup(worker);
    if (worker->call.op.code == KVT_CODE_OK)
        take_lookup(worker, &worker->call.op.ans.lookup);
    else if (worker->call.op.code == KVT_CODE_NOT_FOUND ||
             worker->call.op.code == KVT_CODE_FAILED_PRECONDITION)
        bench_give_up(worker->engine, KVT_BENCH_EXIT_AGAIN, worker->call.op.message);
    worker->usable_tokens = worker->boundary_tokens;
}

/* ---- moving ---------------------------------------------------------------------------------- */

static bool hold(struct bench_worker *worker, uint32_t c, uint64_t block)
{
    if (worker->states[c][block] != BENCH_BLOCK_NONE)
        return true;
    if (!kvt_bench_pool_take(&worker->engine->pool, c, ids_of(worker, c, block))) {
        bench_give_up(worker->engine, 1, "the engine's block pool is too small: --pool-bytes");
        return false;
    }
    worker->states[c][block] = BENCH_BLOCK_HELD;
    return true;
}

static void add_move(struct bench_worker *worker, struct kvt_api_moves *moves, uint64_t block)
{
    uint32_t c = moves->component;
    uint32_t each = component_of(worker, c)->engine_blocks_per_block;

    worker->move_idx[c][moves->count] = block;
    memcpy(worker->move_ids[c] + (uint64_t)moves->count * each, ids_of(worker, c, block),
           each * sizeof(uint64_t));
    moves->count++;
    moves->engine_blocks_count += each;
}

/* Blocks in @wanted state (or in any, HELD and better) of @span as the next Moves of a request. */
static void add_moves(struct bench_worker *worker, struct kvt_api_moves *list, uint32_t *count,
                      uint32_t c, struct kvt_model_span span, enum bench_block wanted)
{
    struct kvt_api_moves *moves = &list[*count];

    *moves = (struct kvt_api_moves){
        .component = c,
        .block_idx = worker->move_idx[c],
        .engine_blocks = worker->move_ids[c],
    };
    for (uint64_t block = span.first; block < span.end; block++)
        if (worker->states[c][block] == wanted)
            add_move(worker, moves, block);
    *count += moves->count > 0;
}

static uint64_t next_op_id(struct bench_worker *worker)
{
    return (uint64_t)(worker->worker_idx + 1) << 40 | ++worker->op_seq;
}

/* Blocks of an op that cannot be quiesced are given up for good. */
static void lose_moves(struct bench_worker *worker, const struct kvt_api_moves *list,
                       uint32_t count)
{
    for (uint32_t m = 0; m < count; m++) {
        for (uint32_t i = 0; i < list[m].count; i++) {
            uint32_t c = list[m].component;
            uint64_t block = worker->move_idx[c][i];

            worker->states[c][block] = BENCH_BLOCK_NONE; /* neither held nor given back */
            worker->stats.blocks_lost++;
        }
    }
}

static void note_wrong(struct bench_worker *worker, uint32_t c, uint64_t block, uint32_t rank,
                       uint64_t wrong)
{
    char *text = worker->engine->shared->first_wrong;

    worker->stats.wrong_bytes += wrong;
    worker->stats.wrong_blocks++;
    if (text[0] == '\0')
        (void)snprintf(text, sizeof(worker->engine->shared->first_wrong),
                       "request %llu block %llu component %s rank %u: %llu of %llu bytes",
                       (unsigned long long)worker->request_idx, (unsigned long long)block,
                       component_of(worker, c)->name, rank, (unsigned long long)wrong,
                       (unsigned long long)component_of(worker, c)->block_bytes);
}

/* A delivered block is verified; one that is not makes what lies behind it unusable. */
static void take_promoted(struct bench_worker *worker, uint32_t rank, uint32_t c, uint64_t block,
                          uint8_t result)
{
    worker->stats.promote_results[result % KVT_BENCH_RESULTS]++;
    if (result == KVT_MOVE_DONE) {
        struct kvt_bench_shard shard = shard_of(worker, c, block, rank);
        uint64_t wrong = 0;

        if (worker->engine->options->is_verifying) {
            wrong = kvt_bench_pool_count_wrong(&worker->engine->pool, &shard);
            worker->stats.verified_blocks++;
            worker->stats.verified_bytes += component_of(worker, c)->block_bytes;
        }
        if (wrong > 0)
            note_wrong(worker, c, block, rank, wrong);
        if (wrong == 0 && rank + 1 == worker->engine->model->ranks)
            worker->states[c][block] = BENCH_BLOCK_RIGHT;
        if (wrong == 0)
            return;
    }
    worker->stats.recomputed_blocks++;
    worker->usable_tokens = component_of(worker, c)->kind == KVT_MODEL_FULL
                                ? KVT_MIN(worker->usable_tokens, block * block_tokens(worker))
                                : 0;
}

static void arm_cancel(struct bench_worker *worker, bool is_armed)
{
    (void)pthread_mutex_lock(&worker->cancel_lock);
    worker->is_cancel_armed = is_armed;
    worker->cancel_at_ns =
        kvt_clock_mono_ns() + worker->chains[0] % (2 * KVT_NS_PER_MS); /* anything up to 2 ms */
    (void)pthread_cond_signal(&worker->cancel_changed);
    (void)pthread_mutex_unlock(&worker->cancel_lock);
}

static void promote_rank(struct bench_worker *worker, uint32_t rank)
{
    struct kvt_req_promote *req = &worker->call.op.req.promote;
    struct kvt_api_moves list[KVT_COMPONENTS_MAX];
    uint64_t op_id = next_op_id(worker), every = worker->engine->options->cancel_every;
    bool is_cancelled = every != 0 && ++worker->promotes % every == 0;
    uint32_t count = 0;

    bench_call_begin(&worker->call, KVT_OP_PROMOTE);
    for (uint32_t c = 0; c < worker->engine->model->components_count; c++)
        add_moves(worker, list, &count, c,
                  kvt_model_needed(worker->engine->model, c, worker->boundary_tokens),
                  BENCH_BLOCK_HELD);
    req->session = worker->engine->ranks[rank].handle;
    req->lease = worker->lease;
    req->op_id = op_id;
    req->moves_count = count;
    memcpy(req->moves, list, sizeof(list[0]) * count);
    if (is_cancelled)
        arm_cancel(worker, true);
    (void)bench_call(&worker->call, KVT_BENCH_PROMOTE);
    if (is_cancelled)
        arm_cancel(worker, false);
    if (worker->call.op.code != KVT_CODE_OK) {
        worker->usable_tokens = 0;
        if (!bench_call_quiesce(worker, rank, op_id))
            lose_moves(worker, list, count);
        return;
    }
    worker->stats.promoted_bytes += worker->call.op.ans.promote.moved_bytes;
    for (uint32_t t = 0; t < KVT_API_TIERS; t++)
        worker->stats.promoted_blocks_from[t] += worker->call.op.ans.promote.moved_blocks_from[t];
    for (uint32_t m = 0; m < count; m++)
        for (uint32_t i = 0; i < KVT_MIN(list[m].count, worker->call.op.ans.promote.moves.count[m]);
             i++)
            take_promoted(worker, rank, list[m].component, worker->move_idx[list[m].component][i],
                          worker->call.op.ans.promote.moves.results[m][i]);
    if (!worker->call.op.ans.promote.is_quiesced && !bench_call_quiesce(worker, rank, op_id))
        lose_moves(worker, list, count);
}

static void promote(struct bench_worker *worker)
{
    const struct kvt_model *model = worker->engine->model;

    for (uint32_t c = 0; c < model->components_count; c++) {
        struct kvt_model_span span = kvt_model_needed(model, c, worker->boundary_tokens);

        for (uint64_t block = span.first; block < span.end; block++)
            if (!hold(worker, c, block))
                return;
    }
    for (uint32_t rank = 0; rank < model->ranks; rank++) {
        if (worker->lease.boot_id != 0)
            promote_rank(worker, rank);
        if (worker->lease.boot_id != 0)
            bench_call_release(&worker->call, worker->engine->ranks[rank].handle, worker->lease,
                               KVT_HANDLE_NONE);
    }
    if (worker->lease.boot_id == 0) /* the engine's lease limit: it computes everything */
        worker->usable_tokens = 0;
}

/* ---- storing --------------------------------------------------------------------------------- */

static void add_range(struct kvt_req_reserve *req, uint32_t c, struct kvt_model_span span)
{
    if (span.first < span.end && req->wants_count < KVT_COUNT_OF(req->wants))
        req->wants[req->wants_count++] = (struct kvt_api_range){c, span.first, span.end};
}

/* What is worth storing of component @c, rising and without overlaps. */
static void add_wants(const struct bench_worker *worker, struct kvt_req_reserve *req, uint32_t c)
{
    const struct kvt_model *model = worker->engine->model;
    uint64_t end = worker->stored_tokens;
    uint64_t before = worker->prompt_tokens - 1;
    uint64_t points[3] = {worker->branch_tokens > worker->boundary_tokens ? worker->branch_tokens
                                                                          : 0,
                          KVT_MIN(before - before % block_tokens(worker), end), end};
    uint64_t covered = 0;

    if (component_of(worker, c)->kind == KVT_MODEL_FULL) {
        add_range(req, c, (struct kvt_model_span){0, worker->blocks});
        return;
    }
    for (uint32_t i = 0; i < KVT_COUNT_OF(points); i++) {
        struct kvt_model_span span = kvt_model_needed(model, c, points[i]);

        if (i == 0 && component_of(worker, c)->kind == KVT_MODEL_STATE)
            continue;
        span.first = KVT_MAX(span.first, covered);
        add_range(req, c, span);
        covered = KVT_MAX(covered, span.end);
    }
}

/* The oracle's bytes for every wanted block that is not there yet; no forward pass, but the same
 * traffic in memory. */
static bool compute(struct bench_worker *worker, const struct kvt_req_reserve *req)
{
    for (uint32_t w = 0; w < req->wants_count; w++) {
        const struct kvt_api_range *range = &req->wants[w];

        for (uint64_t block = range->first_block_idx; block < range->end_block_idx; block++) {
            uint32_t c = range->component;
            bool is_usable = worker->states[c][block] == BENCH_BLOCK_RIGHT &&
                             block < worker->usable_tokens / block_tokens(worker);

            if (is_usable)
                continue;
            if (!hold(worker, c, block))
                return false;
            for (uint32_t rank = 0; rank < worker->engine->model->ranks; rank++) {
                struct kvt_bench_shard shard = shard_of(worker, c, block, rank);

                kvt_bench_pool_fill(&worker->engine->pool, &shard);
            }
            worker->states[c][block] = BENCH_BLOCK_RIGHT;
            worker->stats.computed_blocks++;
        }
    }
    return true;
}

static void take_reserve(struct bench_worker *worker, const struct kvt_req_reserve *req,
                         const struct kvt_ans_reserve *ans)
{
    worker->ticket = ans->ticket;
    for (uint32_t w = 0; w < KVT_MIN(req->wants_count, ans->wants_count); w++) {
        const struct kvt_api_range *range = &req->wants[w];

        for (uint32_t i = 0; i < ans->count[w]; i++) {
            uint8_t state = ans->states[w][i] & 3;

            worker->stats.reserve_states[state]++;
            if (state == KVT_RESERVE_MISSING)
                worker->states[range->component][range->first_block_idx + i] = BENCH_BLOCK_MISSING;
        }
    }
    if (ans->cursor.boot_id != 0)
        bench_cursor_keep(&worker->cursors, worker->engine->workload, worker->request_idx,
                          ans->cursor_tokens, ans->cursor);
}

static bool reserve(struct bench_worker *worker)
{
    struct kvt_req_reserve wants = {0};

    for (uint32_t c = 0; c < worker->engine->model->components_count; c++)
        add_wants(worker, &wants, c);
    if (!compute(worker, &wants))
        return false;
    do {
        struct kvt_req_reserve *req = &worker->call.op.req.reserve;

        bench_call_begin(&worker->call, KVT_OP_RESERVE);
        *req = wants;
        req->session = worker->engine->scheduler.handle;
        set_prefix(worker, &req->prefix, worker->stored_tokens);
        (void)bench_call(&worker->call, KVT_BENCH_RESERVE);
    } while (worker->call.op.code != KVT_CODE_OK && forget_stale_cursor(worker, KVT_OP_RESERVE));
    if (worker->call.op.code == KVT_CODE_OK)
        take_reserve(worker, &wants, &worker->call.op.ans.reserve);
    return worker->call.op.code == KVT_CODE_OK;
}

static void demote_rank(struct bench_worker *worker, uint32_t rank)
{
    struct kvt_req_demote *req = &worker->call.op.req.demote;
    struct kvt_api_moves list[KVT_COMPONENTS_MAX];
    uint64_t op_id = next_op_id(worker);
    uint32_t count = 0;

    bench_call_begin(&worker->call, KVT_OP_DEMOTE);
    for (uint32_t c = 0; c < worker->engine->model->components_count; c++)
        add_moves(worker, list, &count, c, (struct kvt_model_span){0, worker->blocks},
                  BENCH_BLOCK_MISSING);
    if (count == 0)
        return;
    req->session = worker->engine->ranks[rank].handle;
    req->ticket = worker->ticket;
    req->op_id = op_id;
    req->moves_count = count;
    memcpy(req->moves, list, sizeof(list[0]) * count);
    if (bench_call(&worker->call, KVT_BENCH_DEMOTE) != KVT_CODE_OK) {
        if (!bench_call_quiesce(worker, rank, op_id))
            lose_moves(worker, list, count);
        return;
    }
    worker->stats.demoted_bytes += worker->call.op.ans.demote.moved_bytes;
    for (uint32_t m = 0; m < count; m++)
        for (uint32_t i = 0; i < KVT_MIN(list[m].count, worker->call.op.ans.demote.moves.count[m]);
             i++)
            worker->stats.demote_results[worker->call.op.ans.demote.moves.results[m][i] %
                                         KVT_BENCH_RESULTS]++;
    if (!worker->call.op.ans.demote.is_quiesced && !bench_call_quiesce(worker, rank, op_id))
        lose_moves(worker, list, count);
}

static void store(struct bench_worker *worker)
{
    worker->ticket = KVT_HANDLE_NONE;
    if (worker->blocks == 0 || !reserve(worker) || worker->ticket.boot_id == 0)
        return;
    for (uint32_t rank = 0; rank < worker->engine->model->ranks; rank++)
        demote_rank(worker, rank);
    bench_call_release(&worker->call, worker->engine->scheduler.handle, KVT_HANDLE_NONE,
                       worker->ticket);
}

/* ---- one request ----------------------------------------------------------------------------- */

static void prepare(struct bench_worker *worker, uint64_t request_idx)
{
    const struct kvt_workload *workload = worker->engine->workload;
    const struct kvt_request *request = &workload->requests[request_idx];
    uint64_t tokens = request->input_tokens, root;

    worker->request_idx = request_idx;
    worker->request = request;
    worker->prompt_tokens = tokens;
    if (worker->engine->options->is_storing_output)
        tokens += request->output_tokens;
    worker->blocks = tokens / block_tokens(worker);
    worker->stored_tokens = worker->blocks * block_tokens(worker);
    worker->salt[0] = '\0';
    if (request->tenant != 0)
        (void)snprintf(worker->salt, sizeof(worker->salt), "tenant-%u", request->tenant);
    kvt_workload_tokens(workload, request_idx, 0, tokens, worker->tokens);
    root = kvt_oracle_root(worker->engine->link.fingerprint, worker->salt, "");
    kvt_oracle_chain(root, worker->tokens, block_tokens(worker), worker->blocks, worker->chains);
    for (uint32_t c = 0; c < worker->engine->model->components_count; c++)
        memset(worker->states[c], BENCH_BLOCK_NONE, worker->blocks);
}

static void give_back(struct bench_worker *worker)
{
    for (uint32_t c = 0; c < worker->engine->model->components_count; c++)
        for (uint64_t block = 0; block < worker->blocks; block++)
            if (worker->states[c][block] != BENCH_BLOCK_NONE)
                kvt_bench_pool_give(&worker->engine->pool, c, ids_of(worker, c, block));
}

bool bench_request_run(struct bench_worker *worker, uint64_t request_idx)
{
    prepare(worker, request_idx);
    if (worker->prompt_tokens > 0) {
        lookup(worker);
        if (worker->boundary_tokens > 0)
            promote(worker);
        if (!atomic_load(&worker->engine->is_stopping))
            store(worker);
        if (worker->lease.boot_id != 0)
            bench_call_release(&worker->call, worker->engine->scheduler.handle, worker->lease,
                               KVT_HANDLE_NONE);
        give_back(worker);
    }
    worker->stats.requests++;
    return !atomic_load(&worker->engine->is_stopping);
}
