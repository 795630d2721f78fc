/* Reserve: tokens in, ticket out. The prefix is made to exist in the tree, each wanted cell is
 * claimed, and what could not be kept alive is settled away again, all in one turn: between insert
 * and settle the tree allows nothing else. So the number of cells in one request is bounded. */
#include <string.h>

#include "daemon/engine/internal.h"

#define EVICT_ROUNDS 64u
#define EVICT_CELLS 64u

int eng_insert(struct kvt_engine *engine, const struct eng_prefix *prefix,
               struct kvt_radix_block *ret_end)
{
    uint64_t new_blocks;
    int r = kvt_radix_insert(engine->radix, &prefix->radix, ret_end, &new_blocks);

    for (uint32_t round = 0; r == KVT_RADIX_E_NO_ROOM && round < EVICT_ROUNDS; round++) {
        if (prefix->radix.after.generation != 0 &&
            !kvt_radix_is_live(engine->radix, prefix->radix.after))
            return KVT_RADIX_E_STALE;
        if (kvt_radix_has_detached(engine->radix))
            (void)kvt_store_turn(engine->store, engine->now_ns, KVT_ENGINE_TURN_BLOCKS);
        else if (kvt_store_evict_index(engine->store, EVICT_CELLS) == 0)
            break;
        else
            eng_count(engine, KVT_COUNTER_INDEX_EVICTIONS, 1);
        r = kvt_radix_insert(engine->radix, &prefix->radix, ret_end, &new_blocks);
    }
    if (r == KVT_RADIX_E_NO_ROOM)
        eng_count(engine, KVT_COUNTER_INDEX_FULL, 1);
    return r;
}

bool eng_ticket_room(struct kvt_engine *engine, struct kvt_op *op,
                     const struct eng_session *session)
{
    if (session->tickets_count < engine->config.tickets_per_session_max)
        return true;
    kvt_op_fail(op, KVT_CODE_RESOURCE_EXHAUSTED,
                "this session holds %u tickets, the most it may: fill or release some",
                session->tickets_count);
    return false;
}

enum kvt_reserve_state eng_reserve_cell(struct kvt_engine *engine, struct eng_ticket *ticket,
                                        struct kvt_radix_block block, uint32_t component,
                                        uint64_t block_idx,
                                        const uint8_t digest[KVT_FINGERPRINT_BYTES])
{
    const struct eng_group *group = ticket->group;
    bool is_over = !eng_entry_has_room(engine) ||
                   group->reserved_bytes + eng_cell_bytes(group->ns, component) >
                       engine->config.reserved_bytes_per_engine_max;
    struct kvt_cell cell;

    if (is_over) { /* still say what is there */
        cell = kvt_store_cell(engine->store, block, component);
        if (cell.generation != 0)
            return kvt_store_ready_mask(engine->store, cell) != 0 ? KVT_RESERVE_PRESENT
                                                                  : KVT_RESERVE_PENDING;
        eng_count(engine, KVT_COUNTER_RESERVE_NO_ROOM, 1);
        return KVT_RESERVE_NO_ROOM;
    }
    switch (kvt_store_claim(engine->store, block, component, digest, &cell)) {
    case KVT_CLAIM_MINE:
        eng_ticket_add(engine, ticket, component, (uint32_t)block_idx, cell);
        return KVT_RESERVE_MISSING;
    case KVT_CLAIM_PENDING:
        return KVT_RESERVE_PENDING;
    case KVT_CLAIM_PRESENT:
        return KVT_RESERVE_PRESENT;
    case KVT_CLAIM_NO_ROOM:
        break;
    }
    eng_count(engine, KVT_COUNTER_RESERVE_NO_ROOM, 1);
    return KVT_RESERVE_NO_ROOM;
}

static bool wants_are_valid(struct kvt_op *op, const struct eng_ns *ns, uint64_t blocks)
{
    const struct kvt_req_reserve *req = &op->req.reserve;
    uint64_t total = 0;

    for (uint32_t i = 0; i < req->wants_count; i++) {
        const struct kvt_api_range *want = &req->wants[i];

        if (want->component >= ns->components_count ||
            want->first_block_idx > want->end_block_idx || want->end_block_idx > blocks) {
            kvt_op_fail(op, KVT_CODE_INVALID_ARGUMENT,
                        "range %u: component %u, blocks [%llu, %llu) of a path of %llu", i,
                        want->component, (unsigned long long)want->first_block_idx,
                        (unsigned long long)want->end_block_idx, (unsigned long long)blocks);
            return false;
        }
        total += want->end_block_idx - want->first_block_idx;
    }
    if (total > KVT_MOVES_PER_REQUEST_MAX) {
        kvt_op_fail(op, KVT_CODE_RESOURCE_EXHAUSTED, "%llu copies; one Reserve has at most %u",
                    (unsigned long long)total, KVT_MOVES_PER_REQUEST_MAX);
        return false;
    }
    return true;
}

static bool states_init(struct kvt_op *op)
{
    const struct kvt_req_reserve *req = &op->req.reserve;
    struct kvt_ans_reserve *ans = &op->ans.reserve;

    ans->wants_count = req->wants_count;
    for (uint32_t i = 0; i < req->wants_count; i++) {
        uint64_t count = req->wants[i].end_block_idx - req->wants[i].first_block_idx;

        ans->count[i] = (uint32_t)count;
        ans->states[i] = kvt_arena_alloc(op->arena, count > 0 ? count : 1);
        if (ans->states[i] == NULL) {
            kvt_op_fail(op, KVT_CODE_RESOURCE_EXHAUSTED, "the request is too large");
            return false;
        }
        memset(ans->states[i], KVT_RESERVE_NO_ROOM, count);
    }
    return true;
}

static void claim_range(struct kvt_engine *engine, struct kvt_op *op, struct eng_ticket *ticket,
                        struct kvt_radix_block end, uint32_t want_at,
                        const uint8_t digest[KVT_FINGERPRINT_BYTES])
{
    const struct kvt_api_range *want = &op->req.reserve.wants[want_at];
    uint8_t *states = op->ans.reserve.states[want_at];
    struct kvt_radix_cell cells[KVT_ENGINE_PATH_CHUNK];
    uint64_t idx = want->first_block_idx;

    while (idx < want->end_block_idx) {
        uint64_t count = KVT_MIN(want->end_block_idx - idx, (uint64_t)KVT_ENGINE_PATH_CHUNK);

        if (kvt_radix_path(engine->radix, end, want->component, idx, count, cells) != 0)
            return;
        for (uint64_t i = 0; i < count; i++, idx++)
            states[idx - want->first_block_idx] = (uint8_t)eng_reserve_cell(
                engine, ticket, cells[i].block, want->component, idx, digest);
    }
}

static void finish(struct kvt_engine *engine, struct kvt_op *op, struct eng_session *session,
                   struct eng_ticket *ticket, struct kvt_radix_block end, uint64_t blocks)
{
    struct kvt_ans_reserve *ans = &op->ans.reserve;
    uint64_t ticket_ns = op->req.reserve.ticket_ns;

    if (kvt_radix_is_live(engine->radix, end)) {
        ans->cursor = eng_cursor(engine, session->ns, end);
        ans->cursor_tokens = blocks * session->ns->block_tokens;
    }
    if (ticket->entries_count == 0) {
        eng_ticket_end(engine, ticket);
        return;
    }
    if (ticket_ns == 0)
        ticket_ns = engine->config.ticket_ns_default;
    ticket_ns = KVT_MIN(ticket_ns, engine->config.ticket_ns_max);
    ticket->end = end;
    ticket->blocks = blocks;
    eng_timer_set(&engine->heap, &ticket->timer, kvt_time_add(engine->now_ns, ticket_ns));
    ans->ticket = eng_handle(engine, ENG_HANDLE_TICKET, ticket->idx, ticket->generation);
    ans->ticket_ns = ticket_ns;
    eng_count(engine, KVT_COUNTER_TICKETS, 1);
}

void eng_op_reserve(struct kvt_engine *engine, struct kvt_op *op)
{
    const struct kvt_req_reserve *req = &op->req.reserve;
    struct eng_session *session = eng_session_of(engine, op, &req->session);
    uint8_t digest[KVT_FINGERPRINT_BYTES];
    struct kvt_radix_block end;
    struct eng_ticket *ticket;
    struct eng_prefix where;
    int r;

    if (session == NULL || !eng_prefix(engine, op, session->ns, &req->prefix, &where) ||
        !wants_are_valid(op, session->ns, where.blocks) || !eng_ticket_room(engine, op, session))
        return;
    if (eng_park(engine, op)) /* what L3 has is not stored anew */
        return;
    op->ans.reserve = (struct kvt_ans_reserve){.epoch = session->ns->epoch};
    if (!states_init(op))
        return;
    eng_count(engine, KVT_COUNTER_RESERVES, 1);
    if (where.blocks == 0)
        return;
    if (!eng_prefix_digest(engine, op, &where, digest))
        return;
    ticket = eng_ticket_new(engine, session, false);
    if (ticket == NULL) {
        kvt_op_fail(op, KVT_CODE_RESOURCE_EXHAUSTED, "%u tickets are out, the most there can be",
                    engine->tickets_count);
        return;
    }
    r = eng_insert(engine, &where, &end);
    if (r != 0) {
        eng_ticket_end(engine, ticket);
        if (r == KVT_RADIX_E_STALE)
            kvt_op_fail(op, KVT_CODE_NOT_FOUND, "cursor stale: send the whole prefix");
        return; /* no room: every state says so */
    }
    for (uint32_t i = 0; i < req->wants_count; i++)
        claim_range(engine, op, ticket, end, i, digest);
    kvt_radix_settle(engine->radix, end);
    finish(engine, op, session, ticket, end, where.blocks);
}
