/* Demote: bytes away from the engine. From its blocks: one FILL job a move into a claimed cell, by
 * ticket, or by prefix with a ticket of the request's own. Between tiers: one LOWER job a block.
 * With wants_durable the request goes on after its moves: LOWER to L3 of everything that is
 * complete and not there, then FLUSH; is_durable is true only when all of it was done.
 *
 *   MOVE (fills, or between tiers) ──> LOWER (to L3) ──> FLUSH ──> answer
 *
 * A move that is filled already is DONE again (a repeat is harmless), one being filled is PENDING.
 * For replicated components any rank may fill; the others are told PRESENT. */
#include <string.h>

#include "daemon/engine/internal.h"

static uint8_t settled_result(struct kvt_engine *engine, struct kvt_cell cell)
{
    if (cell.generation == 0)
        return KVT_MOVE_MISS;
    return kvt_store_ready_mask(engine->store, cell) != 0 ? KVT_MOVE_PRESENT : KVT_MOVE_PENDING;
}

/* The entry to fill, or NULL and the move has its result. */
static struct eng_entry *entry_to_fill(struct kvt_engine *engine, const struct eng_run *run,
                                       struct eng_moves *moves, uint32_t move)
{
    struct eng_ticket *ticket = run->ticket;
    uint32_t bit = 1u << moves->shard;
    struct eng_entry *entry;

    if (!ticket->is_live) {
        moves->results[move] = KVT_MOVE_ABORTED;
        return NULL;
    }
    entry = eng_ticket_find(engine, ticket, moves->component, (uint32_t)moves->block_idx[move]);
    if (entry == NULL) { /* cells[] was looked up on the path */
        if (moves->results[move] == ENG_RESULT_NONE)
            moves->results[move] = settled_result(engine, moves->cells[move]);
        return NULL;
    }
    if ((entry->filled_mask & bit) != 0)
        moves->results[move] =
            run->ns->components[moves->component].is_replicated ? KVT_MOVE_PRESENT : KVT_MOVE_DONE;
    else if ((entry->filling_mask & bit) != 0)
        moves->results[move] = KVT_MOVE_PENDING;
    else
        return entry;
    moves->cells[move] = entry->cell;
    return NULL;
}

static enum eng_start start_fill(struct kvt_engine *engine, struct eng_run *run,
                                 struct eng_moves *moves, uint32_t move)
{
    uint32_t per_block = moves->layout->engine_blocks_per_block;
    uint64_t inline_id = move;
    const uint64_t *ids =
        run->is_inline ? &inline_id : moves->engine_blocks + (size_t)move * per_block;
    struct eng_entry *entry = entry_to_fill(engine, run, moves, move);
    struct eng_job *job;

    if (entry == NULL)
        return ENG_SETTLED;
    job = eng_job_new(engine, run, KVT_JOB_FILL, ids, per_block);
    if (job == NULL)
        return ENG_WAIT;
    entry->filling_mask |= 1u << moves->shard;
    moves->cells[move] = entry->cell;
    job->job.cell = entry->cell;
    job->job.rank = moves->shard;
    job->job.deadline_ns = run->deadline_ns;
    job->job.view.layout = moves->layout;
    job->job.view.end_piece = moves->layout->pieces_count;
    job->moves_at = (uint32_t)(moves - run->moves);
    job->move_at = move;
    job->ticket_idx = run->ticket->idx;
    job->ticket_generation = run->ticket->generation;
    job->entry = eng_entry_number(engine, entry);
    eng_job_submit(engine, job);
    return ENG_STARTED;
}

static enum eng_start start_job(struct kvt_engine *engine, struct eng_run *run,
                                struct eng_moves *moves, uint32_t move, enum kvt_job_kind kind,
                                enum kvt_tier_id tier, bool is_move)
{
    struct eng_job *job = eng_job_new(engine, run, kind, NULL, 0);

    if (job == NULL)
        return ENG_WAIT;
    job->job.cell = moves->cells[move];
    job->job.tier = tier;
    job->job.is_move = is_move;
    job->job.deadline_ns = run->deadline_ns;
    job->moves_at = (uint32_t)(moves - run->moves);
    job->move_at = move;
    eng_job_submit(engine, job);
    return ENG_STARTED;
}

static enum eng_start start_between(struct kvt_engine *engine, struct eng_run *run,
                                    struct eng_moves *moves, uint32_t move)
{
    uint8_t mask = kvt_store_ready_mask(engine->store, moves->cells[move]);

    if ((mask & run->from_mask) == 0) {
        moves->results[move] = (mask & 1u << run->tier) != 0 ? KVT_MOVE_PRESENT : KVT_MOVE_MISS;
        return ENG_SETTLED;
    }
    return start_job(engine, run, moves, move, KVT_JOB_LOWER, run->tier, true);
}

/* The durable part: only a complete cell can go down. */
static enum eng_start start_durable(struct kvt_engine *engine, struct eng_run *run,
                                    struct eng_moves *moves, uint32_t move)
{
    uint8_t result = moves->results[move];
    uint8_t mask = kvt_store_ready_mask(engine->store, moves->cells[move]);

    if ((result != KVT_MOVE_DONE && result != KVT_MOVE_PRESENT) || mask == 0) {
        run->is_broken = true;
        return ENG_SETTLED;
    }
    if ((mask & 1u << KVT_TIER_DISK) == 0)
        return start_job(engine, run, moves, move, KVT_JOB_LOWER, KVT_TIER_DISK, false);
    kvt_store_want_durable(engine->store, moves->cells[move]);
    if (kvt_store_is_unseen(engine->store, moves->cells[move])) /* reading it shows it */
        return start_job(engine, run, moves, move, KVT_JOB_RAISE, KVT_TIER_HOST, false);
    return ENG_SETTLED;
}

enum eng_start eng_demote_start(struct kvt_engine *engine, struct eng_run *run,
                                struct eng_moves *moves, uint32_t move)
{
    if (run->phase == ENG_PHASE_LOWER)
        return start_durable(engine, run, moves, move);
    if (run->kind == ENG_RUN_LOWER)
        return start_between(engine, run, moves, move);
    return start_fill(engine, run, moves, move);
}

bool eng_demote_phase(struct kvt_engine *engine, struct eng_run *run)
{
    struct eng_job *job;

    if (!run->wants_durable || run->phase == ENG_PHASE_FLUSH ||
        engine->config.store.tiers[KVT_TIER_DISK] == NULL)
        return false;
    if (run->phase == ENG_PHASE_MOVE) {
        run->phase = ENG_PHASE_LOWER;
        run->at_group = run->at_moves = run->at_move = 0;
        return true;
    }
    job = eng_job_new(engine, run, KVT_JOB_FLUSH, NULL, 0);
    if (job == NULL)
        return true;
    job->job.deadline_ns = run->deadline_ns;
    run->phase = ENG_PHASE_FLUSH;
    eng_job_submit(engine, job);
    return true;
}

/* Every copy that the answer calls stored is on L3 for good: data, and its row in the index. */
static bool is_all_durable(struct kvt_engine *engine, const struct eng_run *run)
{
    for (uint32_t i = 0; i < run->moves_count; i++) {
        const struct eng_moves *moves = &run->moves[i];

        for (uint32_t move = 0; move < moves->count; move++)
            if ((moves->results[move] == KVT_MOVE_DONE ||
                 moves->results[move] == KVT_MOVE_PRESENT) &&
                !kvt_store_is_durable(engine->store, moves->cells[move]))
                return false;
    }
    return true;
}

void eng_demote_answer(struct kvt_engine *engine, struct eng_run *run)
{
    struct kvt_op *op = run->op;
    struct kvt_ans_demote *ans = &op->ans.demote;

    *ans = (struct kvt_ans_demote){.moved_bytes = run->moved_bytes,
                                   .is_quiesced = run->jobs_count == 0,
                                   .is_durable = run->phase == ENG_PHASE_FLUSH && !run->is_broken &&
                                                 !run->is_ending && is_all_durable(engine, run)};
    eng_moves_answer(engine, run, &ans->moves);
    if (op->req.demote.moves_count == 0)
        ans->moves = (struct kvt_api_results){0};
    if (run->kind == ENG_RUN_FILL) {
        run->session->group->demoted_bytes += run->moved_bytes;
        eng_count(engine, KVT_COUNTER_DEMOTED_BYTES, run->moved_bytes);
    }
    run->session->group->demotes++;
    eng_count(engine, KVT_COUNTER_DEMOTES, 1);
}

/* ---- the request ------------------------------------------------------------------------------
 */

static bool init_fill_moves(struct kvt_op *op, struct eng_run *run, const struct eng_path *path)
{
    const struct kvt_req_demote *req = &op->req.demote;
    bool is_inline = req->inline_bytes > 0;
    struct eng_moves_spec spec = {.moves = req->moves,
                                  .moves_count = req->moves_count,
                                  .blocks = path->blocks,
                                  .needs_layout = !is_inline};

    if (!eng_moves_init(op, run, &spec))
        return false;
    if (is_inline && eng_moves_bytes(run) != req->inline_bytes) {
        kvt_op_fail(op, KVT_CODE_INVALID_ARGUMENT, "%u bytes inline; the moves need %llu",
                    req->inline_bytes, (unsigned long long)eng_moves_bytes(run));
        return false;
    }
    /* Read only: gather never writes to it. */
    if (is_inline && !eng_moves_inline(op, run, (uint8_t *)(uintptr_t)req->inline_data))
        return false;
    run->group_ended = kvt_arena_array(op->arena, 1, sizeof(run->group_ended[0]));
    if (run->group_ended == NULL) {
        kvt_op_fail(op, KVT_CODE_RESOURCE_EXHAUSTED, "the request is too large");
        return false;
    }
    if (run->ticket != NULL)
        run->end = run->ticket->end;
    return true;
}

/* For moves that the ticket does not hold: what is on the path. */
static void find_others(struct kvt_engine *engine, struct eng_run *run, uint64_t path_blocks)
{
    if (kvt_radix_depth_blocks(engine->radix, run->end) < path_blocks)
        return; /* the path died: they are MISS */
    eng_moves_cells(engine, run, path_blocks);
    for (uint32_t i = 0; i < run->moves_count; i++) {
        struct eng_moves *moves = &run->moves[i];

        for (uint32_t move = 0; move < moves->count; move++) {
            if (eng_ticket_find(engine, run->ticket, moves->component,
                                (uint32_t)moves->block_idx[move]) != NULL)
                moves->results[move] = ENG_RESULT_NONE;
        }
    }
}

static bool by_ticket(struct kvt_engine *engine, struct kvt_op *op, struct eng_run *run,
                      struct eng_ticket *ticket)
{
    struct eng_path path = {.blocks = ticket->blocks, .path_blocks = ticket->blocks};

    eng_ticket_use(engine, ticket);
    run->ticket = ticket;
    if (!init_fill_moves(op, run, &path))
        return false;
    find_others(engine, run, path.path_blocks);
    return true;
}

static bool is_whole_here(struct kvt_op *op, const struct eng_ns *ns)
{
    const struct kvt_req_demote *req = &op->req.demote;

    for (uint32_t i = 0; i < req->moves_count; i++) {
        if (req->moves[i].component < ns->components_count && ns->ranks > 1 &&
            !ns->components[req->moves[i].component].is_replicated) {
            kvt_op_fail(op, KVT_CODE_FAILED_PRECONDITION,
                        "component %u has a shard a rank (%u): Reserve first, each rank demotes by "
                        "the ticket",
                        req->moves[i].component, ns->ranks);
            return false;
        }
    }
    return true;
}

static void claim_moves(struct kvt_engine *engine, struct eng_run *run, struct kvt_radix_block end,
                        const uint8_t digest[KVT_FINGERPRINT_BYTES])
{
    for (uint32_t i = 0; i < run->moves_count; i++) {
        struct eng_moves *moves = &run->moves[i];
        const struct kvt_radix_cell *cells =
            eng_moves_path(engine, run->op, end, moves, kvt_radix_depth_blocks(engine->radix, end));

        for (uint32_t move = 0; move < moves->count; move++) {
            struct kvt_radix_block block = cells != NULL ? cells[move].block : KVT_RADIX_BLOCK_NONE;
            enum kvt_reserve_state state = KVT_RESERVE_NO_ROOM;

            if (kvt_radix_is_live(engine->radix, block))
                state = eng_reserve_cell(engine, run->ticket, block, moves->component,
                                         moves->block_idx[move], digest);
            if (state == KVT_RESERVE_MISSING)
                continue;
            moves->cells[move] = kvt_store_cell(engine->store, block, moves->component);
            moves->results[move] = state == KVT_RESERVE_PRESENT   ? KVT_MOVE_PRESENT
                                   : state == KVT_RESERVE_PENDING ? KVT_MOVE_PENDING
                                                                  : KVT_MOVE_NO_ROOM;
        }
    }
}

static bool by_prefix(struct kvt_engine *engine, struct kvt_op *op, struct eng_run *run)
{
    uint8_t digest[KVT_FINGERPRINT_BYTES];
    struct kvt_radix_block end;
    struct eng_prefix where;
    struct eng_path path;
    int r;

    if (!is_whole_here(op, run->ns) ||
        !eng_prefix(engine, op, run->ns, &op->req.demote.prefix, &where) ||
        !eng_ticket_room(engine, op, run->session))
        return false;
    path = (struct eng_path){.blocks = where.blocks, .path_blocks = where.blocks};
    if (!init_fill_moves(op, run, &path))
        return false;
    if (run->moves_total == 0)
        return true;
    if (!eng_prefix_digest(engine, op, &where, digest))
        return false;
    run->ticket = eng_ticket_new(engine, run->session, true);
    if (run->ticket == NULL) {
        kvt_op_fail(op, KVT_CODE_RESOURCE_EXHAUSTED, "%u tickets are out, the most there can be",
                    engine->tickets_count);
        return false;
    }
    eng_ticket_use(engine, run->ticket);
    r = eng_insert(engine, &where, &end);
    if (r == KVT_RADIX_E_STALE) {
        kvt_op_fail(op, KVT_CODE_NOT_FOUND, "cursor stale: send the whole prefix");
        return false;
    }
    if (r != 0) {
        eng_moves_rest(run, KVT_MOVE_NO_ROOM);
        return true;
    }
    claim_moves(engine, run, end, digest);
    kvt_radix_settle(engine->radix, end);
    return true;
}

static bool between(struct kvt_engine *engine, struct kvt_op *op, struct eng_run *run,
                    struct eng_lease *lease)
{
    const struct kvt_req_demote *req = &op->req.demote;
    struct eng_moves_spec spec = {.moves = req->moves, .moves_count = req->moves_count};
    struct eng_path path;

    if (req->to_tier != KVT_TIER_BIT_L2 && req->to_tier != KVT_TIER_BIT_L3) {
        kvt_op_fail(op, KVT_CODE_INVALID_ARGUMENT, "to_tier is L2 or L3");
        return false;
    }
    run->tier = req->to_tier == KVT_TIER_BIT_L2 ? KVT_TIER_HOST : KVT_TIER_DISK;
    run->from_mask = (uint8_t)(req->from_tiers & (req->to_tier - 1u));
    if (run->from_mask == 0 || run->from_mask != req->from_tiers) {
        kvt_op_fail(op, KVT_CODE_INVALID_ARGUMENT, "from_tiers must be above to_tier");
        return false;
    }
    if (engine->config.store.tiers[run->tier] == NULL) {
        kvt_op_fail(op, KVT_CODE_FAILED_PRECONDITION, "this daemon has no L%u",
                    (unsigned)run->tier + 1);
        return false;
    }
    if (lease != NULL)
        eng_path_by_lease(engine, run, lease, &path);
    else if (!eng_path_by_prefix(engine, op, run, &req->prefix, &path))
        return false;
    spec.blocks = path.blocks;
    if (req->moves_count == 0 ? !eng_moves_whole(op, run, path.boundary_blocks)
                              : !eng_moves_init(op, run, &spec))
        return false;
    run->group_ended = kvt_arena_array(op->arena, 1, sizeof(run->group_ended[0]));
    if (run->group_ended == NULL) {
        kvt_op_fail(op, KVT_CODE_RESOURCE_EXHAUSTED, "the request is too large");
        return false;
    }
    eng_moves_cells(engine, run, path.path_blocks);
    return true;
}

static void answer_aborted(struct kvt_engine *engine, struct kvt_op *op)
{
    const struct kvt_req_demote *req = &op->req.demote;

    op->ans.demote = (struct kvt_ans_demote){.is_quiesced = true};
    (void)eng_moves_aborted(engine, op, req->moves, req->moves_count, &op->ans.demote.moves);
}

static bool may_fill(struct kvt_op *op, const struct eng_session *session)
{
    if (op->req.demote.is_between_tiers || session->rank != KVT_RANK_NONE)
        return true;
    kvt_op_fail(op, KVT_CODE_FAILED_PRECONDITION,
                "a scheduler without a rank has no blocks to demote");
    return false;
}

void eng_op_demote(struct kvt_engine *engine, struct kvt_op *op)
{
    const struct kvt_req_demote *req = &op->req.demote;
    struct eng_session *session = eng_session_of(engine, op, &req->session);
    bool is_by_ticket = !req->is_between_tiers && !eng_handle_is_none(&req->ticket);
    bool is_by_lease = req->is_between_tiers && !eng_handle_is_none(&req->lease);
    struct eng_ticket *ticket = NULL;
    struct eng_lease *lease = NULL;
    struct eng_run *run;
    bool is_ok;

    if (session == NULL || !may_fill(op, session) || !eng_op_id_is_free(op, session, req->op_id) ||
        (is_by_ticket && !eng_ticket_of(engine, op, session, &req->ticket, &ticket)) ||
        (is_by_lease && !eng_lease_of(engine, op, session, &req->lease, &lease)))
        return;
    if ((is_by_ticket && ticket == NULL) || (is_by_lease && lease == NULL)) {
        answer_aborted(engine, op);
        return;
    }
    if (!is_by_ticket && !is_by_lease && eng_park(engine, op))
        return; /* by prefix: what L3 has is not stored anew */
    run = eng_run_new(engine, op, session, req->is_between_tiers ? ENG_RUN_LOWER : ENG_RUN_FILL);
    if (run == NULL)
        return;
    run->op_id = req->op_id;
    run->wants_durable = req->wants_durable;
    if (req->is_between_tiers)
        is_ok = between(engine, op, run, lease);
    else if (is_by_ticket)
        is_ok = by_ticket(engine, op, run, ticket);
    else
        is_ok = by_prefix(engine, op, run);
    if (is_ok)
        eng_run_start(engine, run, 0);
    else
        eng_run_drop(engine, run);
}
