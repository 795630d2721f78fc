/* Blocks that an engine reads in place, in L1 itself: a Promote to L1 with is_in_place answers with
 * arenas that another process can import and the offset of each shard, and the store pins what was
 * named. A reader that nobody sees cannot be waited for, so
 *
 *   - it needs a lease, which from then on ends by Release or with its engine, never by time, and
 *     not by a Reset either: what was reset is served to nobody, but it stays where it is;
 *   - neither eviction nor an operator's Evict, nor a Demote that moves, gives its slots to others;
 *   - when a GPU is lost its arena is gone with all readers' imports of it: every session of an
 *     engine that holds something of which a shard is there, its own or another rank's, is told so
 *     at once (REGIONS_LOST: one notice, which is never dropped), and the leases end in slices.
 *
 * What is held is bounded, a part of L1 an engine, in whole copies; the rest is NO_ROOM. Holds of a
 * lease that ended are given back in slices. */
#include <string.h>

#include "daemon/engine/internal.h"

/* ---- the pool ---------------------------------------------------------------------------------
 */

static struct eng_hold *hold_take(struct kvt_engine *engine)
{
    uint32_t number = engine->holds_free;

    if (number != 0) {
        engine->holds_free = engine->holds[number - 1].next;
    } else {
        if (engine->holds == NULL || engine->holds_made == KVT_ENGINE_HOLDS_MAX)
            return NULL;
        number = ++engine->holds_made;
    }
    engine->holds_count++;
    return &engine->holds[number - 1];
}

static void hold_give(struct kvt_engine *engine, struct eng_hold *hold)
{
    hold->next = engine->holds_free;
    engine->holds_free = (uint32_t)(hold - engine->holds) + 1;
    engine->holds_count--;
}

/* ---- the table: (lease, block) -> hold --------------------------------------------------------
 */

static uint32_t *bucket_of(struct kvt_engine *engine, const struct eng_lease *lease, uint32_t cell)
{
    uint64_t hash = ((uint64_t)lease->idx << 32 | cell) * 0x9e3779b97f4a7c15ull;

    return &engine->hold_buckets[hash >> 32 & (KVT_ENGINE_HOLDS_MAX - 1)];
}

static struct eng_hold *find(struct kvt_engine *engine, const struct eng_lease *lease,
                             uint32_t cell)
{
    uint32_t number = *bucket_of(engine, lease, cell);

    while (number != 0) {
        struct eng_hold *hold = &engine->holds[number - 1];

        if (hold->lease_idx == lease->idx && hold->held.cell == cell)
            return hold;
        number = hold->hash_next;
    }
    return NULL;
}

static void enter(struct kvt_engine *engine, struct eng_lease *lease, struct eng_hold *hold)
{
    uint32_t *bucket = bucket_of(engine, lease, hold->held.cell);

    hold->lease_idx = lease->idx;
    hold->hash_next = *bucket;
    *bucket = (uint32_t)(hold - engine->holds) + 1;
}

static void leave(struct kvt_engine *engine, const struct eng_lease *lease,
                  const struct eng_hold *hold)
{
    uint32_t *at = bucket_of(engine, lease, hold->held.cell);

    while (*at != (uint32_t)(hold - engine->holds) + 1) {
        KVT_ASSERT(*at != 0);
        at = &engine->holds[*at - 1].hash_next;
    }
    *at = hold->hash_next;
}

/* ---- leases that hold -------------------------------------------------------------------------
 */

/* With any shard of a block the whole of it is lost, and its slots on the other GPUs have to come
 * back, too: a GPU does not return to service before. */
static void note_zones(struct eng_lease *lease, uint32_t zones)
{
    for (uint32_t zone = 0; zone < KVT_ZONES_MAX; zone++)
        lease->group->holders_in[zone] += (zones & ~lease->held_zones) >> zone & 1u;
    lease->held_zones |= zones;
}

static void attach(struct kvt_engine *engine, struct eng_lease *lease, struct eng_hold *hold)
{
    if (lease->first_hold == 0) {
        kvt_list_push_back(&engine->holders, &lease->held_link);
        engine->holders_count++;
    }
    hold->next = lease->first_hold;
    lease->first_hold = (uint32_t)(hold - engine->holds) + 1;
    note_zones(lease, hold->held.zones);
    enter(engine, lease, hold);
    lease->held_bytes += hold->bytes;
    lease->group->held_bytes += hold->bytes;
}

void eng_holds_abandon(struct eng_lease *lease)
{
    lease->group->held_bytes -= lease->held_bytes;
    lease->held_bytes = 0;
    for (uint32_t zone = 0; zone < KVT_ZONES_MAX; zone++)
        lease->group->holders_in[zone] -= lease->held_zones >> zone & 1u;
}

bool eng_holds_drop(struct kvt_engine *engine, struct eng_lease *lease, uint32_t *inout_budget)
{
    for (; *inout_budget > 0 && lease->first_hold != 0; (*inout_budget)--) {
        struct eng_hold *hold = &engine->holds[lease->first_hold - 1];

        lease->first_hold = hold->next;
        leave(engine, lease, hold);
        kvt_store_unhold(engine->store, &hold->held);
        hold_give(engine, hold);
        if (lease->first_hold == 0) {
            kvt_list_remove(&lease->held_link);
            engine->holders_count--;
        }
    }
    return lease->first_hold == 0;
}

void eng_holds_keep(struct kvt_engine *engine, const struct eng_ns *ns)
{
    kvt_list_for_each (link, &engine->holders) {
        struct eng_lease *lease = KVT_CONTAINER_OF(link, struct eng_lease, held_link);

        if (!lease->is_live || lease->group->ns != ns || lease->group->sessions_count == 0)
            continue;
        kvt_list_remove(&lease->link);
        kvt_list_push_back(&lease->group->leases, &lease->link);
    }
}

void eng_holds_lost(struct kvt_engine *engine, uint32_t zones)
{
    engine->holders_lost_zones |= zones;
    engine->holders_left = engine->holders_count; /* all of them, once more */
}

bool eng_holds_is_told(const struct eng_group *group, uint32_t zones)
{
    for (uint32_t zone = 0; zone < KVT_ZONES_MAX; zone++)
        if ((zones >> zone & 1u) != 0 && group->holders_in[zone] > 0)
            return true;
    return false;
}

/* Looked at from the front, and put to the back: new ones come behind those not seen so far, and
 * nothing new is held in a zone before all that was held there is given back. */
bool eng_holds_slice(struct kvt_engine *engine)
{
    uint32_t budget = KVT_ENGINE_SLICE;

    for (; budget > 0 && engine->holders_left > 0; budget--, engine->holders_left--) {
        struct kvt_list *link = engine->holders.next;
        struct eng_lease *lease = KVT_CONTAINER_OF(link, struct eng_lease, held_link);

        if (kvt_list_is_empty(&engine->holders)) {
            engine->holders_left = 0;
            break;
        }
        kvt_list_remove(link);
        kvt_list_push_back(&engine->holders, link);
        if (lease->is_live && (lease->held_zones & engine->holders_lost_zones) != 0)
            eng_lease_end(engine, lease, true);
    }
    if (engine->holders_left == 0)
        engine->holders_lost_zones = 0;
    return engine->holders_left > 0;
}

/* ---- the request ------------------------------------------------------------------------------
 */

bool eng_in_place_is_valid(const struct kvt_engine *engine, struct kvt_op *op,
                           const struct eng_session *session)
{
    const struct kvt_req_promote *req = &op->req.promote;

    if (!req->is_in_place)
        return true;
    if (req->target != KVT_TARGET_L1 || req->moves_count == 0 || eng_handle_is_none(&req->lease)) {
        kvt_op_fail(op, KVT_CODE_INVALID_ARGUMENT,
                    "in_place: it needs target L1, a lease, and moves that name the blocks");
        return false;
    }
    if (session->rank == KVT_RANK_NONE) {
        kvt_op_fail(op, KVT_CODE_FAILED_PRECONDITION,
                    "in_place: a scheduler without a rank has no shards to read");
        return false;
    }
    if (engine->config.gpu_memory.export_arena == NULL) {
        kvt_op_fail(op, KVT_CODE_FAILED_PRECONDITION,
                    "in_place: this daemon does not export L1 (tiers.l1.export is off, or it has "
                    "none on a GPU): promote to the engine's own blocks");
        return false;
    }
    return true;
}

/* The arena of a zone in the answer, as it was when the shard was pinned. */
static bool name_arena(const struct kvt_engine *engine, const struct kvt_store_held *held,
                       struct kvt_ans_promote *ans)
{
    const struct kvt_engine_gpu_memory *gpu_memory = &engine->config.gpu_memory;
    struct kvt_device_export exported;
    struct kvt_api_arena *arena;

    for (uint32_t i = 0; i < ans->arenas_count; i++)
        if (ans->arenas[i].zone == held->zone)
            return ans->arenas[i].incarnation == held->incarnation;
    if (!gpu_memory->export_arena(gpu_memory->ctx, held->zone, &exported) ||
        exported.incarnation != held->incarnation)
        return false;
    arena = &ans->arenas[ans->arenas_count++];
    *arena = (struct kvt_api_arena){
        .zone = held->zone, .incarnation = exported.incarnation, .bytes = exported.bytes};
    memcpy(arena->handle, exported.handle, sizeof(arena->handle));
    memcpy(arena->device_uuid, exported.uuid, sizeof(arena->device_uuid));
    return true;
}

static struct eng_hold *hold_new(struct kvt_engine *engine, struct eng_lease *lease,
                                 const struct kvt_store_held *held, uint64_t bytes)
{
    struct eng_hold *hold;

    if (lease->group->held_bytes + bytes > engine->config.held_bytes_per_engine_max)
        return NULL;
    hold = hold_take(engine);
    if (hold == NULL)
        return NULL;
    if (!kvt_store_hold(engine->store, held)) {
        hold_give(engine, hold);
        return NULL;
    }
    hold->held = *held;
    hold->bytes = bytes;
    attach(engine, lease, hold);
    return hold;
}

/* A block is held once a lease, whatever ranks ask and how often: all of its shards are pinned.
 * What it holds already costs nothing more, and no limit refuses it. */
static enum kvt_move_result hold_one(struct kvt_engine *engine, struct eng_run *run,
                                     const struct eng_moves *moves, uint32_t move,
                                     struct kvt_api_in_place *to)
{
    struct kvt_store_held held;

    if (!kvt_store_hold_find(engine->store, moves->cells[move], moves->shard, &held) ||
        !name_arena(engine, &held, &run->op->ans.promote))
        return KVT_MOVE_MISS;
    if (find(engine, run->lease, held.cell) == NULL &&
        hold_new(engine, run->lease, &held, eng_cell_bytes(run->ns, moves->component)) == NULL)
        return KVT_MOVE_NO_ROOM;
    to->zones[move] = held.zone;
    to->offsets_bytes[move] = held.offset_bytes;
    return KVT_MOVE_DONE;
}

void eng_in_place_answer(struct kvt_engine *engine, struct eng_run *run)
{
    struct kvt_ans_promote *ans = &run->op->ans.promote;
    bool is_good = run->end_code == KVT_CODE_OK && run->lease->is_live &&
                   run->epoch == run->ns->epoch &&
                   (run->lease->held_zones & engine->holders_lost_zones) == 0; /* about to end */

    ans->is_in_place = true;
    for (uint32_t i = 0; i < run->moves_count; i++) {
        struct eng_moves *moves = &run->moves[i];
        struct kvt_api_in_place *to = &ans->in_place[i];

        to->zones = kvt_arena_array(run->op->arena, moves->count, sizeof(to->zones[0]));
        to->offsets_bytes =
            kvt_arena_array(run->op->arena, moves->count, sizeof(to->offsets_bytes[0]));
        if (moves->count > 0 && (to->zones == NULL || to->offsets_bytes == NULL)) {
            run->end_code = KVT_CODE_RESOURCE_EXHAUSTED;
            run->end_text = "the answer is too large";
            ans->is_in_place = false;
            return;
        }
        for (uint32_t move = 0; move < moves->count; move++) {
            if (moves->results[move] != KVT_MOVE_DONE)
                continue;
            moves->results[move] =
                (uint8_t)(is_good ? hold_one(engine, run, moves, move, to) : KVT_MOVE_ABORTED);
            eng_count(engine, KVT_COUNTER_HELD_IN_PLACE, moves->results[move] == KVT_MOVE_DONE);
        }
    }
}

/* ---- looking ----------------------------------------------------------------------------------
 */

const char *eng_holds_check(const struct kvt_engine *engine)
{
    uint64_t count = 0, listed = 0, holders = 0;

    kvt_list_for_each (link, &engine->holders)
        listed++;
    if (listed != engine->holders_count)
        return "leases that hold something in place: the count is not the recount";
    for (uint32_t i = 0; i < engine->leases_made; i++) {
        const struct eng_lease *lease = &engine->leases[i];
        uint64_t bytes = 0;

        for (uint32_t number = lease->first_hold; number != 0;
             number = engine->holds[number - 1].next) {
            count++;
            bytes += engine->holds[number - 1].bytes;
        }
        holders += lease->first_hold != 0;
        if (lease->first_hold != 0 && !lease->is_used)
            return "a free lease holds something in place";
        if (lease->is_live && bytes != lease->held_bytes)
            return "bytes held in place: not the recount";
    }
    if (count != engine->holds_count || count != kvt_store_held_count(engine->store))
        return "shards held in place: the count is not the recount";
    return holders == listed ? NULL : "leases that hold something in place are not those listed";
}
