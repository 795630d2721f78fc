/* Reading back: lookup with a lease, promote of each rank into the message, every byte verified. */
#include "tools/kvtier-crash/engine.h"

#include <stdio.h>

#include "tools/lib/oracle.h"

/* What holds a component back, of the one that holds back most. */
static void note_why(const struct kvt_ans_lookup *ans, struct crash_read *read)
{
    uint32_t worst = 0;

    for (uint32_t c = 1; c < ans->components_count; c++)
        if (ans->components[c].alone_tokens < ans->components[worst].alone_tokens)
            worst = c;
    (void)snprintf(read->first_missed, sizeof(read->first_missed),
                   "path of %llu blocks, component %u ends before block %llu, why %d",
                   (unsigned long long)ans->path_tokens / CRASH_BLOCK_TOKENS, worst,
                   (unsigned long long)ans->components[worst].why_block_idx,
                   (int)ans->components[worst].why);
}

static enum crash_result lookup(struct crash_engine *engine, const struct crash_place *place,
                                struct kvt_handle *ret_lease, struct crash_read *read)
{
    struct kvt_req_lookup *req = &crash_op_begin(engine, KVT_OP_LOOKUP)->req.lookup;
    enum crash_result result;

    req->session = engine->attachments[place->space].handles[0];
    crash_prefix(engine, place, &req->prefix);
    req->limit_tokens = UINT64_MAX;
    req->tiers = KVT_TIER_BITS_ALL;
    req->wants_lease = req->wants_why = true;
    result = crash_op_call(engine, engine->client);
    if (result != CRASH_OK)
        return result;
    *ret_lease = engine->op.ans.lookup.lease;
    read->boundary_blocks = engine->op.ans.lookup.boundary_tokens / CRASH_BLOCK_TOKENS;
    note_why(&engine->op.ans.lookup, read);
    return CRASH_OK;
}

static enum crash_result release(struct crash_engine *engine, uint32_t space,
                                 struct kvt_handle lease)
{
    struct kvt_req_release *req = &crash_op_begin(engine, KVT_OP_RELEASE)->req.release;
    enum crash_result result;

    req->session = engine->attachments[space].handles[0];
    req->lease = lease;
    result = crash_op_call(engine, engine->client);
    return result == CRASH_REFUSED ? CRASH_OK : result; /* a Reset ended it */
}

/* Blocks of a component that a boundary of @blocks needs begin here: only those are promised to be
 * kept (a window block behind every window may go first). */
static uint64_t first_needed(uint32_t space, uint32_t component, uint64_t blocks)
{
    uint64_t tokens = blocks * CRASH_BLOCK_TOKENS;
    uint64_t window = crash_spaces[space].components[component].window_tokens;

    switch (crash_spaces[space].components[component].kind) {
    case 1:
        return 0;
    case 2:
        return window >= tokens ? 0 : (tokens - window) / CRASH_BLOCK_TOKENS;
    default:
        return blocks - 1;
    }
}

static void note_wrong(struct crash_engine *engine, const struct crash_place *place,
                       uint32_t component, uint64_t block_idx)
{
    if (engine->why[0] == '\0')
        (void)snprintf(engine->why, sizeof(engine->why),
                       "wrong bytes: namespace %s, generation %u, talk %u, component %u, block "
                       "%llu",
                       crash_spaces[place->space].name, place->generation, place->talk, component,
                       (unsigned long long)block_idx);
}

/* Where the lost bytes were promised: blocks [0, promised), as far as the boundary at @promised
 * needs them. */
static bool is_promised(const struct crash_place *place, uint32_t component, uint64_t block_idx,
                        uint64_t promised)
{
    return promised > 0 && block_idx < promised &&
           block_idx >= first_needed(place->space, component, promised);
}

static enum crash_result verify(struct crash_engine *engine, const struct crash_place *place,
                                uint32_t rank, uint64_t promised, struct crash_read *ret)
{
    const struct crash_space *space = &crash_spaces[place->space];
    const struct kvt_req_promote *req = &engine->op.req.promote;
    const struct kvt_ans_promote *ans = &engine->op.ans.promote;
    uint32_t at = 0;

    for (uint32_t m = 0; m < req->moves_count; m++) {
        uint32_t component = req->moves[m].component, bytes = space->components[component].bytes;

        for (uint32_t i = 0; i < ans->moves.count[m]; i++) {
            uint64_t block = req->moves[m].block_idx[i], wrong;

            if (ans->moves.results[m][i] != KVT_MOVE_DONE) {
                ret->missed_blocks++;
                if (is_promised(place, component, block, promised) && ret->missed_below++ == 0)
                    (void)snprintf(ret->first_missed, sizeof(ret->first_missed),
                                   "component %u of block %llu gave result %u", component,
                                   (unsigned long long)block, ans->moves.results[m][i]);
                continue;
            }
            if (ans->inline_bytes - at < bytes) {
                (void)snprintf(engine->why, sizeof(engine->why), "a Promote's payload is short");
                return CRASH_BROKEN;
            }
            wrong = kvt_oracle_count_wrong(crash_key(engine, place->space, component, rank, block),
                                           0, ans->inline_data + at, bytes);
            at += bytes;
            ret->served_blocks++;
            ret->wrong_bytes += wrong;
            if (wrong > 0)
                note_wrong(engine, place, component, block);
        }
    }
    return CRASH_OK;
}

static enum crash_result promote(struct crash_engine *engine, const struct crash_place *place,
                                 struct kvt_handle lease, uint32_t rank, uint64_t promised,
                                 struct crash_read *ret)
{
    struct kvt_req_promote *req = &crash_op_begin(engine, KVT_OP_PROMOTE)->req.promote;
    struct crash_place found = *place;
    enum crash_result result;

    found.first = 0;
    found.end = (uint32_t)ret->boundary_blocks;
    req->session = engine->attachments[place->space].handles[rank];
    req->lease = lease;
    req->target = KVT_TARGET_ENGINE;
    req->op_id = ++engine->op_id;
    req->moves_count = crash_moves(engine, &found, req->moves);
    for (uint32_t c = 0; c < req->moves_count; c++) {
        uint64_t first = first_needed(place->space, c, found.end);

        if (promised > 0) /* as a lookup of only that much would need them */
            first = KVT_MIN(first, first_needed(place->space, c, promised));
        req->moves[c].block_idx += first;
        req->moves[c].count -= (uint32_t)first;
    }
    req->wants_inline = true;
    result = crash_op_call(engine, engine->client);
    if (result != CRASH_OK)
        return result;
    for (uint32_t t = 0; t < KVT_API_TIERS; t++)
        ret->served_from[t] += engine->op.ans.promote.moved_blocks_from[t];
    return verify(engine, &found, rank, promised, ret);
}

enum crash_result crash_engine_read(struct crash_engine *engine, const struct crash_place *place,
                                    uint64_t promised, struct crash_read *ret)
{
    struct kvt_handle lease = KVT_HANDLE_NONE;
    enum crash_result result, released;

    *ret = (struct crash_read){0};
    result = lookup(engine, place, &lease, ret);
    if (result != CRASH_OK || ret->boundary_blocks == 0)
        return result;
    if (ret->boundary_blocks > place->end) {
        (void)snprintf(engine->why, sizeof(engine->why), "a boundary behind the prompt");
        return CRASH_BROKEN;
    }
    promised = KVT_MIN(promised, ret->boundary_blocks);
    for (uint32_t rank = 0; rank < crash_spaces[place->space].ranks && result == CRASH_OK; rank++)
        result = promote(engine, place, lease, rank, promised, ret);
    if (result == CRASH_GONE || result == CRASH_BROKEN)
        return result;
    released = release(engine, place->space, lease);
    return released != CRASH_OK ? released : result;
}
