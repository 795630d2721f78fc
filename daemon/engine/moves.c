/* The moves of a request: which block of which component from or to which engine blocks, with one
 * result byte each. Arrays live in the request's arena and are gone with its answer; jobs carry
 * copies of what they need. */
#include <string.h>

#include "daemon/engine/internal.h"

static bool no_room(struct kvt_op *op)
{
    kvt_op_fail(op, KVT_CODE_RESOURCE_EXHAUSTED, "the request needs more than %u bytes",
                KVT_OP_ARENA_BYTES_MAX);
    return false;
}

static bool arrays_init(struct kvt_op *op, struct eng_moves *moves)
{
    moves->results = kvt_arena_alloc(op->arena, moves->count);
    moves->cells = kvt_arena_array(op->arena, moves->count, sizeof(moves->cells[0]));
    if (moves->count > 0 && (moves->results == NULL || moves->cells == NULL))
        return no_room(op);
    if (moves->count > 0)
        memset(moves->results, (int)ENG_RESULT_NONE, moves->count);
    return true;
}

static void shard_of(struct eng_moves *moves, const struct eng_run *run)
{
    const struct kvt_api_component *c = &run->ns->components[moves->component];

    moves->shard_bytes = c->bytes_per_block;
    moves->shard = c->is_replicated || run->session->rank == KVT_RANK_NONE ? 0 : run->session->rank;
}

static bool blocks_are_valid(struct kvt_op *op, const struct kvt_api_moves *from, uint64_t blocks)
{
    for (uint32_t i = 0; i < from->count; i++) {
        if (from->block_idx[i] >= blocks ||
            (i > 0 && from->block_idx[i] <= from->block_idx[i - 1])) {
            kvt_op_fail(op, KVT_CODE_INVALID_ARGUMENT,
                        "component %u, move %u: block %llu; they must rise and the path has %llu",
                        from->component, i, (unsigned long long)from->block_idx[i],
                        (unsigned long long)blocks);
            return false;
        }
    }
    return true;
}

static bool ids_are_valid(struct kvt_op *op, const struct eng_moves *moves, uint64_t ids_count,
                          bool may_leave_out)
{
    uint64_t limit = moves->layout->engine_blocks_count;

    for (uint64_t i = 0; i < ids_count; i++) {
        uint64_t id = moves->engine_blocks[i];

        if (id < limit || (may_leave_out && id == KVT_ENGINE_BLOCK_NONE))
            continue;
        if (id == KVT_ENGINE_BLOCK_NONE)
            kvt_op_fail(op, KVT_CODE_INVALID_ARGUMENT,
                        "moves.engine_blocks: component %u leaves out number %llu; a Demote gives "
                        "whole payloads, only a Promote may leave engine blocks alone",
                        moves->component, (unsigned long long)i);
        else
            kvt_op_fail(op, KVT_CODE_INVALID_ARGUMENT,
                        "moves.engine_blocks: component %u: engine block %llu is outside the "
                        "registered memory, which holds %llu",
                        moves->component, (unsigned long long)id, (unsigned long long)limit);
        return false;
    }
    return true;
}

static bool bind_layout(struct kvt_op *op, const struct eng_run *run, struct eng_moves *moves,
                        uint32_t given)
{
    const struct eng_layout *from = &run->session->layouts[moves->component];
    uint64_t ids;

    if (!from->is_present || from->is_inline) {
        kvt_op_fail(op, KVT_CODE_FAILED_PRECONDITION,
                    "this session registered no memory for component %u", moves->component);
        return false;
    }
    moves->layout = &from->layout;
    ids = (uint64_t)moves->count * from->layout.engine_blocks_per_block;
    if (given != ids || (ids > 0 && moves->engine_blocks == NULL)) {
        kvt_op_fail(op, KVT_CODE_INVALID_ARGUMENT,
                    "component %u: %u engine blocks given, its moves need %llu", moves->component,
                    given, (unsigned long long)ids);
        return false;
    }
    return ids_are_valid(op, moves, ids, run->kind == ENG_RUN_PROMOTE);
}

static uint32_t ids_of(const struct eng_moves *moves)
{
    return moves->count * moves->layout->engine_blocks_per_block; /* as many as were given */
}

/* Of each component for itself: they share no memory. One buffer serves them all, as large as the
 * longest list that has to be sorted needs. */
static bool ids_are_distinct(struct kvt_op *op, const struct eng_run *run, uint32_t moves_count)
{
    uint64_t *scratch, steps = 0;
    uint32_t longest = 0, sorted = 0;

    for (uint32_t i = 0; i < moves_count; i++) {
        const struct eng_moves *moves = &run->moves[i];

        if (eng_ids_are_rising(moves->engine_blocks, ids_of(moves)))
            continue;
        sorted |= 1u << i;
        longest = KVT_MAX(longest, ids_of(moves));
    }
    if (sorted == 0)
        return true;
    scratch = kvt_arena_alloc(op->arena, (size_t)longest * ENG_IDS_SCRATCH_BYTES);
    if (scratch == NULL)
        return no_room(op);
    for (uint32_t i = 0; i < moves_count; i++) {
        const struct eng_moves *moves = &run->moves[i];
        uint64_t id;

        if ((sorted & 1u << i) == 0)
            continue;
        id = eng_ids_find_twice(moves->engine_blocks, ids_of(moves),
                                moves->layout->engine_blocks_count, scratch, &steps);
        if (id == KVT_ENGINE_BLOCK_NONE)
            continue;
        kvt_op_fail(op, KVT_CODE_INVALID_ARGUMENT,
                    "moves.engine_blocks: component %u names engine block %llu twice: a Promote "
                    "writes each at most once",
                    moves->component, (unsigned long long)id);
        return false;
    }
    return true;
}

static bool components_are_valid(struct kvt_op *op, const struct eng_run *run,
                                 const struct eng_moves_spec *spec)
{
    uint64_t total = 0;
    uint32_t seen = 0;

    for (uint32_t i = 0; i < spec->moves_count; i++) {
        uint32_t component = spec->moves[i].component;

        if (component >= run->ns->components_count || (seen & 1u << component) != 0) {
            kvt_op_fail(op, KVT_CODE_INVALID_ARGUMENT,
                        "component %u is named twice, or the namespace has only %u", component,
                        run->ns->components_count);
            return false;
        }
        seen |= 1u << component;
        total += spec->moves[i].count;
    }
    if (total > KVT_MOVES_PER_REQUEST_MAX) {
        kvt_op_fail(op, KVT_CODE_RESOURCE_EXHAUSTED, "%llu moves; one request has at most %u",
                    (unsigned long long)total, KVT_MOVES_PER_REQUEST_MAX);
        return false;
    }
    return true;
}

bool eng_moves_init(struct kvt_op *op, struct eng_run *run, const struct eng_moves_spec *spec)
{
    KVT_ASSERT(spec->moves_count <= KVT_COMPONENTS_MAX);
    if (!components_are_valid(op, run, spec))
        return false;
    run->moves = kvt_arena_array(op->arena, KVT_COMPONENTS_MAX, sizeof(run->moves[0]));
    if (run->moves == NULL)
        return no_room(op);
    for (uint32_t i = 0; i < spec->moves_count; i++) {
        const struct kvt_api_moves *from = &spec->moves[i];
        struct eng_moves *moves = &run->moves[i];

        *moves = (struct eng_moves){.component = from->component,
                                    .count = from->count,
                                    .block_idx = from->block_idx,
                                    .engine_blocks = from->engine_blocks};
        shard_of(moves, run);
        if (!blocks_are_valid(op, from, spec->blocks) ||
            (spec->needs_layout && !bind_layout(op, run, moves, from->engine_blocks_count)) ||
            !arrays_init(op, moves))
            return false;
        run->moves_total += from->count;
    }
    if (spec->needs_layout && run->kind == ENG_RUN_PROMOTE &&
        !ids_are_distinct(op, run, spec->moves_count))
        return false;
    run->moves_count = spec->moves_count;
    return true;
}

bool eng_moves_whole(struct kvt_op *op, struct eng_run *run, uint64_t blocks)
{
    const struct eng_ns *ns = run->ns;

    run->moves = kvt_arena_array(op->arena, KVT_COMPONENTS_MAX, sizeof(run->moves[0]));
    if (run->moves == NULL)
        return no_room(op);
    for (uint32_t component = 0; component < ns->components_count; component++) {
        struct eng_moves *moves = &run->moves[component];
        uint64_t first = eng_needed_first(ns, component, blocks);
        uint64_t *block_idx;

        if (run->moves_total + (blocks - first) > KVT_MOVES_PER_REQUEST_MAX) {
            kvt_op_fail(op, KVT_CODE_RESOURCE_EXHAUSTED,
                        "the whole path is more than %u moves: name some",
                        KVT_MOVES_PER_REQUEST_MAX);
            return false;
        }
        block_idx = kvt_arena_array(op->arena, blocks - first, sizeof(block_idx[0]));
        if (block_idx == NULL && blocks > first)
            return no_room(op);
        *moves = (struct eng_moves){
            .component = component, .count = (uint32_t)(blocks - first), .block_idx = block_idx};
        for (uint64_t i = first; i < blocks; i++)
            block_idx[i - first] = i;
        shard_of(moves, run);
        if (!arrays_init(op, moves))
            return false;
        run->moves_total += moves->count;
    }
    run->moves_count = ns->components_count;
    return true;
}

/* From the last move to the first, each chunk walks up from where the one before began: one walk of
 * the path in all, however few of its blocks the moves name. */
struct kvt_radix_cell *eng_moves_path(struct kvt_engine *engine, struct kvt_op *op,
                                      struct kvt_radix_block end, const struct eng_moves *moves,
                                      uint64_t path_blocks)
{
    struct kvt_radix_cell *ret_cells = kvt_arena_array(op->arena, moves->count, sizeof(*ret_cells));
    struct kvt_radix_cell cells[KVT_ENGINE_PATH_CHUNK];
    uint32_t at = moves->count;

    while (ret_cells != NULL && at > 0 && moves->block_idx[at - 1] >= path_blocks)
        at--;
    while (ret_cells != NULL && at > 0) {
        uint64_t last = moves->block_idx[at - 1], first = last;
        uint32_t low = at;

        while (low > 0 && last - moves->block_idx[low - 1] < KVT_ENGINE_PATH_CHUNK)
            first = moves->block_idx[--low];
        if (kvt_radix_path(engine->radix, end, moves->component, first, last - first + 1, cells) !=
            0)
            break;
        for (uint32_t i = low; i < at; i++)
            ret_cells[i] = cells[moves->block_idx[i] - first];
        end = cells[0].block;
        at = low;
    }
    return ret_cells;
}

void eng_moves_cells(struct kvt_engine *engine, struct eng_run *run, uint64_t path_blocks)
{
    for (uint32_t i = 0; i < run->moves_count; i++) {
        struct eng_moves *moves = &run->moves[i];
        const struct kvt_radix_cell *cells =
            eng_moves_path(engine, run->op, run->end, moves, path_blocks);

        for (uint32_t move = 0; move < moves->count; move++) {
            if (cells != NULL && cells[move].handle != KVT_RADIX_HANDLE_NONE)
                moves->cells[move] = kvt_store_cell_of(engine->store, cells[move].handle);
            if (moves->cells[move].generation == 0)
                moves->results[move] = KVT_MOVE_MISS;
        }
    }
}

uint64_t eng_moves_bytes(const struct eng_run *run)
{
    uint64_t bytes = 0;

    for (uint32_t i = 0; i < run->moves_count; i++)
        bytes += run->moves[i].count * run->moves[i].shard_bytes;
    return bytes;
}

bool eng_moves_inline(struct kvt_op *op, struct eng_run *run, uint8_t *data)
{
    struct kvt_layout *layouts = kvt_arena_array(op->arena, KVT_COMPONENTS_MAX, sizeof(layouts[0]));
    struct kvt_layout_piece *pieces =
        kvt_arena_array(op->arena, KVT_COMPONENTS_MAX, sizeof(pieces[0]));

    if (layouts == NULL || pieces == NULL)
        return no_room(op);
    for (uint32_t i = 0; i < run->moves_count; i++) {
        struct eng_moves *moves = &run->moves[i];
        const struct kvt_api_component *c = &run->ns->components[moves->component];

        if (c->quant.kind != KVT_QUANT_NONE && (uintptr_t)data % 2 != 0) {
            kvt_op_fail(op, KVT_CODE_INVALID_ARGUMENT,
                        "component %u is quantised, and its 2-byte elements begin at an odd byte "
                        "of the inline data: move it before those with an odd number of bytes",
                        moves->component);
            return false;
        }
        pieces[i] = (struct kvt_layout_piece){.bytes = (uint32_t)moves->shard_bytes,
                                              .stride_bytes = moves->shard_bytes,
                                              .base = data};
        layouts[i] = (struct kvt_layout){.pieces_count = 1,
                                         .engine_blocks_per_block = 1,
                                         .payload_bytes = moves->shard_bytes,
                                         .stored_bytes = run->ns->stored_bytes[moves->component],
                                         .quant = eng_quant_of(&c->quant),
                                         .gpu_zone = KVT_GPU_NONE,
                                         .engine_blocks_count = moves->count,
                                         .pieces = &pieces[i]};
        moves->layout = &layouts[i];
        moves->inline_at = data;
        data += moves->count * moves->shard_bytes;
    }
    run->is_inline = true;
    return true;
}

void eng_moves_rest(struct eng_run *run, enum kvt_move_result result)
{
    for (uint32_t i = 0; i < run->moves_count; i++) {
        for (uint32_t move = 0; move < run->moves[i].count; move++) {
            if (run->moves[i].results[move] == ENG_RESULT_NONE)
                run->moves[i].results[move] = (uint8_t)result;
        }
    }
}

uint64_t eng_moves_count(const struct eng_run *run, enum kvt_move_result result)
{
    uint64_t count = 0;

    for (uint32_t i = 0; i < run->moves_count; i++)
        for (uint32_t move = 0; move < run->moves[i].count; move++)
            count += run->moves[i].results[move] == result;
    return count;
}

static void count_results(struct kvt_engine *engine, const uint8_t *results, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        KVT_ASSERT(results[i] <= KVT_MOVE_ABORTED);
        eng_count(engine, (enum kvt_counter)(KVT_COUNTER_MOVE_DONE + results[i]), 1);
    }
}

void eng_moves_answer(struct kvt_engine *engine, struct eng_run *run,
                      struct kvt_api_results *ret_results)
{
    eng_moves_rest(run, run->is_ending ? run->end_result : KVT_MOVE_MISS);
    *ret_results = (struct kvt_api_results){0};
    for (uint32_t i = 0; i < run->moves_count; i++) {
        ret_results->count[i] = run->moves[i].count;
        ret_results->results[i] = run->moves[i].results;
        count_results(engine, run->moves[i].results, run->moves[i].count);
    }
}

bool eng_moves_aborted(struct kvt_engine *engine, struct kvt_op *op,
                       const struct kvt_api_moves *moves, uint32_t moves_count,
                       struct kvt_api_results *ret_results)
{
    *ret_results = (struct kvt_api_results){0};
    for (uint32_t i = 0; i < moves_count; i++) {
        ret_results->count[i] = moves[i].count;
        ret_results->results[i] = kvt_arena_alloc(op->arena, moves[i].count);
        if (moves[i].count == 0)
            continue;
        if (ret_results->results[i] == NULL)
            return no_room(op);
        memset(ret_results->results[i], KVT_MOVE_ABORTED, moves[i].count);
        count_results(engine, ret_results->results[i], moves[i].count);
    }
    return true;
}
