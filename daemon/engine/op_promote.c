/* Promote: bytes towards the engine. To an engine's blocks it is one READ job a move (and layer
 * group); to L1 or L2 one RAISE job a block. By lease the path is the lease's; by prefix the run
 * leases the path it finds for itself. What is not there is MISS; a miss is not an error. */
#include <string.h>

#include "daemon/engine/internal.h"

static enum kvt_tier_id best_tier(uint8_t mask)
{
    if ((mask & 1u << KVT_TIER_DEVICE) != 0)
        return KVT_TIER_DEVICE;
    return (mask & 1u << KVT_TIER_HOST) != 0 ? KVT_TIER_HOST : KVT_TIER_DISK;
}

static enum eng_start start_raise(struct kvt_engine *engine, struct eng_run *run,
                                  struct eng_moves *moves, uint32_t move)
{
    uint8_t mask = kvt_store_ready_mask(engine->store, moves->cells[move]);
    struct eng_job *job;

    if (mask == 0) {
        moves->results[move] = KVT_MOVE_MISS;
        return ENG_SETTLED;
    }
    if ((mask & ((2u << run->tier) - 1u)) != 0) { /* there, or higher already */
        moves->results[move] = KVT_MOVE_DONE;
        run->moved_from[best_tier(mask)]++;
        return ENG_SETTLED;
    }
    job = eng_job_new(engine, run, KVT_JOB_RAISE, NULL, 0);
    if (job == NULL)
        return ENG_WAIT;
    job->job.cell = moves->cells[move];
    job->job.tier = run->tier;
    job->job.deadline_ns = run->deadline_ns;
    job->job.from = best_tier(mask);
    job->moves_at = (uint32_t)(moves - run->moves);
    job->move_at = move;
    eng_job_submit(engine, job);
    return ENG_STARTED;
}

enum eng_start eng_promote_start(struct kvt_engine *engine, struct eng_run *run,
                                 struct eng_moves *moves, uint32_t move)
{
    uint32_t per_block = moves->layout != NULL ? moves->layout->engine_blocks_per_block : 0;
    uint64_t inline_id = move;
    const uint64_t *ids =
        run->is_inline ? &inline_id : moves->engine_blocks + (size_t)move * per_block;
    uint8_t mask;
    struct eng_job *job;

    if (run->kind == ENG_RUN_RAISE)
        return start_raise(engine, run, moves, move);
    mask = kvt_store_ready_mask(engine->store, moves->cells[move]);
    if (mask == 0 || (run->is_upper_only && mask == 1u << KVT_TIER_DISK)) {
        if (mask != 0)
            eng_prefetch_add(engine, run->session, run->end, moves->component,
                             moves->block_idx[move], moves->block_idx[move] + 1);
        moves->results[move] = KVT_MOVE_MISS;
        return ENG_SETTLED;
    }
    job = eng_job_new(engine, run, KVT_JOB_READ, ids, per_block);
    if (job == NULL)
        return ENG_WAIT;
    job->job.cell = moves->cells[move];
    job->job.rank = moves->shard;
    job->job.is_upper_only = run->is_upper_only;
    job->job.deadline_ns = run->deadline_ns;
    job->job.view.layout = moves->layout;
    job->job.view.first_piece =
        (uint32_t)((uint64_t)moves->layout->pieces_count * run->at_group / run->groups_count);
    job->job.view.end_piece =
        (uint32_t)((uint64_t)moves->layout->pieces_count * (run->at_group + 1) / run->groups_count);
    job->moves_at = (uint32_t)(moves - run->moves);
    job->move_at = move;
    job->group = run->at_group;
    if (job->job.view.first_piece == job->job.view.end_piece) {
        /* A component with fewer pieces than groups: nothing of it is in this one. */
        job->job.result = KVT_MOVE_DONE;
        job->job.from = best_tier(mask);
        eng_job_skip(engine, job);
        return ENG_STARTED;
    }
    eng_job_submit(engine, job);
    return ENG_STARTED;
}

/* Payloads of DONE moves, one after the other without gaps. */
static void answer_inline(struct kvt_op *op, const struct eng_run *run)
{
    struct kvt_ans_promote *ans = &op->ans.promote;
    uint8_t *start = NULL, *to = NULL;

    for (uint32_t i = 0; i < run->moves_count; i++) {
        const struct eng_moves *moves = &run->moves[i];

        if (start == NULL)
            start = to = moves->inline_at;
        for (uint32_t move = 0; move < moves->count; move++) {
            const uint8_t *from = moves->inline_at + move * moves->shard_bytes;

            if (moves->results[move] != KVT_MOVE_DONE)
                continue;
            if (to != from)
                memmove(to, from, moves->shard_bytes);
            to += moves->shard_bytes;
        }
    }
    ans->inline_data = start;
    ans->inline_bytes = (uint32_t)(to - start);
}

void eng_promote_answer(struct kvt_engine *engine, struct eng_run *run)
{
    struct kvt_op *op = run->op;
    struct kvt_ans_promote *ans = &op->ans.promote;
    uint64_t *counted = &engine->counters[KVT_COUNTER_PROMOTED_L1];
    struct eng_group *group = run->session->group;

    *ans = (struct kvt_ans_promote){.moved_bytes = run->moved_bytes,
                                    .is_quiesced = run->jobs_count == 0};
    if (op->req.promote.is_in_place)
        eng_in_place_answer(engine, run);
    eng_moves_answer(engine, run, &ans->moves);
    for (uint32_t tier = 0; tier < KVT_API_TIERS; tier++) {
        ans->moved_blocks_from[tier] = run->moved_from[tier];
        counted[tier] += run->moved_from[tier];
    }
    if (run->is_inline)
        answer_inline(op, run);
    if (op->req.promote.moves_count == 0)
        ans->moves = (struct kvt_api_results){0};
    if (run->kind == ENG_RUN_PROMOTE) {
        group->promoted_bytes += run->moved_bytes;
        group->missed_moves += run->moves_total - eng_moves_count(run, KVT_MOVE_DONE);
        eng_count(engine, KVT_COUNTER_PROMOTED_BYTES, run->moved_bytes);
    }
    group->promotes++;
    eng_count(engine, KVT_COUNTER_PROMOTES, 1);
    if (run->end.generation != 0)
        kvt_radix_touch(engine->radix, run->end);
}

/* ---- the request ------------------------------------------------------------------------------
 */

static bool is_valid(struct kvt_op *op, const struct eng_session *session)
{
    const struct kvt_req_promote *req = &op->req.promote;

    if (req->target > KVT_TARGET_L2 || req->policy > KVT_PROMOTE_TIMEOUT) {
        kvt_op_fail(op, KVT_CODE_INVALID_ARGUMENT, "target %u or policy %u is unknown",
                    (unsigned)req->target, (unsigned)req->policy);
        return false;
    }
    if (req->target == KVT_TARGET_ENGINE && session->rank == KVT_RANK_NONE &&
        req->moves_count > 0) {
        kvt_op_fail(op, KVT_CODE_FAILED_PRECONDITION,
                    "a scheduler without a rank has no blocks to promote into");
        return false;
    }
    if (req->layer_groups > KVT_PIECES_PER_COMPONENT_MAX) {
        kvt_op_fail(op, KVT_CODE_INVALID_ARGUMENT, "%u layer groups; at most %u", req->layer_groups,
                    KVT_PIECES_PER_COMPONENT_MAX);
        return false;
    }
    return eng_op_id_is_free(op, session, req->op_id);
}

bool eng_path_by_prefix(struct kvt_engine *engine, struct kvt_op *op, struct eng_run *run,
                        const struct kvt_api_prefix *prefix, struct eng_path *ret_path)
{
    struct kvt_radix_lookup lookup = {.limit_tokens = UINT64_MAX,
                                      .mask_allowed = kvt_store_mask_allowed(KVT_TIER_BITS_ALL),
                                      .is_touch = true};
    struct kvt_radix_match match;
    struct eng_prefix where;

    if (!eng_prefix(engine, op, run->ns, prefix, &where))
        return false;
    lookup.prefix = where.radix;
    if (kvt_radix_lookup(engine->radix, &lookup, &match) != 0) {
        kvt_op_fail(op, KVT_CODE_NOT_FOUND, "cursor stale: send the whole prefix");
        return false;
    }
    *ret_path = (struct eng_path){.blocks = where.blocks,
                                  .path_blocks = match.path_tokens / run->ns->block_tokens,
                                  .boundary_blocks = match.boundary_tokens / run->ns->block_tokens};
    run->end = match.cursor;
    if (match.cursor.generation == 0) {
        ret_path->path_blocks = 0;
        return true;
    }
    if (kvt_radix_lease(engine->radix, run->end) != 0) {
        run->end = KVT_RADIX_BLOCK_NONE;
        ret_path->path_blocks = 0;
        return true;
    }
    run->holds_path = true;
    return true;
}

void eng_path_by_lease(struct kvt_engine *engine, struct eng_run *run, struct eng_lease *lease,
                       struct eng_path *ret_path)
{
    eng_lease_use(engine, lease);
    run->lease = lease;
    run->end = lease->end;
    *ret_path = (struct eng_path){lease->blocks, lease->blocks, lease->blocks};
}

static bool init_inline(struct kvt_op *op, struct eng_run *run)
{
    uint64_t bytes = eng_moves_bytes(run);
    uint8_t *data;

    if (bytes > KVT_INLINE_BYTES_MAX) {
        kvt_op_fail(op, KVT_CODE_RESOURCE_EXHAUSTED,
                    "%llu bytes inline; one answer carries at most %u", (unsigned long long)bytes,
                    KVT_INLINE_BYTES_MAX);
        return false;
    }
    data = kvt_arena_alloc(op->arena, bytes > 0 ? bytes : 1);
    if (data == NULL) {
        kvt_op_fail(op, KVT_CODE_RESOURCE_EXHAUSTED, "no room for %llu bytes inline",
                    (unsigned long long)bytes);
        return false;
    }
    return eng_moves_inline(op, run, data);
}

static bool init_moves(struct kvt_engine *engine, struct kvt_op *op, struct eng_run *run,
                       const struct eng_path *path)
{
    const struct kvt_req_promote *req = &op->req.promote;
    struct eng_moves_spec spec = {.moves = req->moves,
                                  .moves_count = req->moves_count,
                                  .blocks = path->blocks,
                                  .needs_layout =
                                      req->target == KVT_TARGET_ENGINE && !req->wants_inline};

    if (req->target != KVT_TARGET_ENGINE && req->moves_count == 0) {
        if (!eng_moves_whole(op, run, path->boundary_blocks))
            return false;
    } else if (!eng_moves_init(op, run, &spec)) {
        return false;
    }
    if (req->target == KVT_TARGET_ENGINE && req->wants_inline && !init_inline(op, run))
        return false;
    if (req->target == KVT_TARGET_ENGINE && req->layer_groups > 1 && !run->is_inline)
        run->groups_count = req->layer_groups;
    run->group_ended = kvt_arena_array(op->arena, run->groups_count, sizeof(run->group_ended[0]));
    if (run->group_ended == NULL) {
        kvt_op_fail(op, KVT_CODE_RESOURCE_EXHAUSTED, "the request is too large");
        return false;
    }
    eng_moves_cells(engine, run, path->path_blocks);
    return true;
}

void eng_op_promote(struct kvt_engine *engine, struct kvt_op *op)
{
    const struct kvt_req_promote *req = &op->req.promote;
    struct eng_session *session = eng_session_of(engine, op, &req->session);
    bool is_by_lease = !eng_handle_is_none(&req->lease);
    struct eng_lease *lease = NULL;
    struct eng_path path;
    struct eng_run *run;

    if (session == NULL || !is_valid(op, session) || !eng_in_place_is_valid(engine, op, session))
        return;
    if (is_by_lease && !eng_lease_of(engine, op, session, &req->lease, &lease))
        return;
    if (is_by_lease && lease == NULL) { /* ended: nothing of it is promised any more */
        op->ans.promote = (struct kvt_ans_promote){.is_quiesced = true};
        (void)eng_moves_aborted(engine, op, req->moves, req->moves_count, &op->ans.promote.moves);
        return; /* in place: nowhere, and nothing is held */
    }
    run = eng_run_new(engine, op, session,
                      req->target == KVT_TARGET_ENGINE ? ENG_RUN_PROMOTE : ENG_RUN_RAISE);
    if (run == NULL)
        return;
    run->op_id = req->op_id;
    run->is_upper_only = req->policy == KVT_PROMOTE_BEST_EFFORT;
    run->tier = req->target == KVT_TARGET_L1 ? KVT_TIER_DEVICE : KVT_TIER_HOST;
    if (is_by_lease)
        eng_path_by_lease(engine, run, lease, &path);
    else if (!eng_path_by_prefix(engine, op, run, &req->prefix, &path))
        goto drop;
    if (run->kind == ENG_RUN_RAISE && engine->config.store.tiers[run->tier] == NULL) {
        kvt_op_fail(op, KVT_CODE_FAILED_PRECONDITION, "this daemon has no L%u",
                    (unsigned)run->tier + 1);
        goto drop;
    }
    if (!init_moves(engine, op, run, &path))
        goto drop;
    eng_run_start(engine, run, req->policy == KVT_PROMOTE_TIMEOUT ? req->timeout_ns : 0);
    return;
drop:
    eng_run_drop(engine, run);
}
