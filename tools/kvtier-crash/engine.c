/* One thread's attachment, and storing. Payload goes inside the messages (inline): where engine
 * memory lies is not the subject here, what the disk keeps is. */
#include "tools/kvtier-crash/engine.h"

#include <stdio.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>

#include "daemon/base/alloc.h"
#include "daemon/base/clock.h"
#include "tools/lib/oracle.h"

#define CALL_NS (30 * KVT_NS_PER_S)
#define LEFT_TRIES 100u
#define LEFT_PAUSE_NS (50 * 1000 * 1000)

/* One rank and one component; two ranks with all kinds of components. Slots of 8, 12 and 16 KiB. */
const struct crash_space crash_spaces[CRASH_SPACES] = {
    {.name = "crash-full", .ranks = 1, .components_count = 1, .components = {{1, 0, 7680, false}}},
    {.name = "crash-hybrid",
     .ranks = 2,
     .components_count = 3,
     .components = {{1, 0, 7168, false}, {2, 40, 3584, false}, {3, 0, 12000, true}}},
};
static_assert(CRASH_BLOCKS_MAX * (7168 + 3584 + 12000) <= CRASH_PAYLOAD_BYTES_MAX,
              "a whole talk fits a message");

static struct kvt_text text_of(const char *text)
{
    return (struct kvt_text){text, (uint32_t)strlen(text)};
}

/* ---- calls ------------------------------------------------------------------------------------
 */

struct kvt_op *crash_op_begin(struct crash_engine *engine, enum kvt_op_kind kind)
{
    struct kvt_op *op = &engine->op;

    kvt_arena_reset(&engine->arena);
    memset(op, 0, sizeof(*op));
    op->kind = kind;
    op->arena = &engine->arena;
    op->deadline_ns = kvt_clock_mono_ns() + CALL_NS;
    return op;
}

static enum crash_result result_of(struct crash_engine *engine)
{
    const struct kvt_op *op = &engine->op;

    switch (op->code) {
    case KVT_CODE_OK:
        return CRASH_OK;
    case KVT_CODE_RESOURCE_EXHAUSTED:
    case KVT_CODE_ABORTED:
    case KVT_CODE_NOT_FOUND:
    case KVT_CODE_FAILED_PRECONDITION:
        return CRASH_REFUSED;
    case KVT_CODE_UNAVAILABLE:
    case KVT_CODE_CANCELLED:
        return CRASH_GONE;
    default: /* a deadline of half a minute too: something is stuck */
        (void)snprintf(engine->why, sizeof(engine->why), "%s answered code %d: %.200s",
                       kvt_op_kind_text(op->kind), (int)op->code, op->message);
        return CRASH_BROKEN;
    }
}

enum crash_result crash_op_call(struct crash_engine *engine, struct kvt_client *client)
{
    kvt_client_call(client, &engine->op);
    return result_of(engine);
}

static enum crash_result broken(struct crash_engine *engine, const char *what)
{
    (void)snprintf(engine->why, sizeof(engine->why), "%s", what);
    return CRASH_BROKEN;
}

/* ---- tokens and payload -----------------------------------------------------------------------
 */

static uint64_t mix(uint64_t x)
{
    x ^= x >> 30;
    x *= 0xBF58476D1CE4E5B9ull;
    x ^= x >> 27;
    x *= 0x94D049BB133111EBull;
    return x ^ x >> 31;
}

void crash_tokens(struct crash_engine *engine, const struct crash_place *place)
{
    uint64_t space = mix(engine->seed +
                         ((uint64_t)place->generation << 8 | place->space) * 0x9E3779B97F4A7C15ull);
    uint64_t group = mix(space + 1 + place->talk / CRASH_GROUP_TALKS);
    uint64_t talk = mix(space + 100 + place->talk);

    for (uint32_t i = 0; i < place->end * CRASH_BLOCK_TOKENS; i++) {
        bool is_shared = i < CRASH_SHARED_BLOCKS * CRASH_BLOCK_TOKENS;

        engine->tokens[i] = (uint32_t)(mix((is_shared ? group : talk) + i) >> 20);
    }
    kvt_oracle_chain(kvt_oracle_root(engine->attachments[place->space].fingerprint, "", ""),
                     engine->tokens, CRASH_BLOCK_TOKENS, place->end, engine->chains);
}

uint64_t crash_key(const struct crash_engine *engine, uint32_t space, uint32_t component,
                   uint32_t rank, uint64_t block_idx)
{
    bool is_replicated = crash_spaces[space].components[component].is_replicated;

    return kvt_oracle_key(&(struct kvt_oracle_place){.chain = engine->chains[block_idx],
                                                     .block_idx = block_idx,
                                                     .component = component,
                                                     .rank = is_replicated ? 0 : rank});
}

uint32_t crash_moves(struct crash_engine *engine, const struct crash_place *place,
                     struct kvt_api_moves *moves)
{
    const struct crash_space *space = &crash_spaces[place->space];

    for (uint32_t i = 0; i < place->end; i++)
        engine->block_idx[i] = i;
    for (uint32_t c = 0; c < space->components_count; c++)
        moves[c] = (struct kvt_api_moves){.component = c,
                                          .count = place->end - place->first,
                                          .block_idx = engine->block_idx + place->first};
    return space->components_count;
}

void crash_prefix(struct crash_engine *engine, const struct crash_place *place,
                  struct kvt_api_prefix *prefix)
{
    crash_tokens(engine, place);
    prefix->tokens = engine->tokens;
    prefix->tokens_count = (uint64_t)place->end * CRASH_BLOCK_TOKENS;
}

static uint32_t fill(struct crash_engine *engine, const struct crash_place *place, uint32_t rank)
{
    const struct crash_space *space = &crash_spaces[place->space];
    uint32_t at = 0;

    for (uint32_t c = 0; c < space->components_count; c++) {
        for (uint32_t i = place->first; i < place->end; i++) {
            kvt_oracle_fill(crash_key(engine, place->space, c, rank, i), 0, engine->payload + at,
                            space->components[c].bytes);
            at += space->components[c].bytes;
        }
    }
    return at;
}

/* ---- attaching --------------------------------------------------------------------------------
 */

static enum crash_result open_namespace(struct crash_engine *engine, uint32_t space_idx,
                                        struct kvt_handle *ret_ns)
{
    const struct crash_space *space = &crash_spaces[space_idx];
    struct kvt_req_open_namespace *req =
        &crash_op_begin(engine, KVT_OP_OPEN_NAMESPACE)->req.open_namespace;
    enum crash_result result;

    req->block_tokens = CRASH_BLOCK_TOKENS;
    req->ranks = space->ranks;
    req->components_count = space->components_count;
    for (uint32_t c = 0; c < space->components_count; c++)
        req->components[c] =
            (struct kvt_api_component){.kind = space->components[c].kind,
                                       .window_tokens = space->components[c].window_tokens,
                                       .bytes_per_block = space->components[c].bytes,
                                       .is_replicated = space->components[c].is_replicated};
    req->model = text_of(space->name);
    req->revision = text_of(engine->revision);
    req->dtype = text_of("oracle");
    req->layout = text_of("inline");
    result = crash_op_call(engine, engine->client);
    if (result != CRASH_OK)
        return result;
    *ret_ns = engine->op.ans.open_namespace.ns;
    memcpy(engine->attachments[space_idx].fingerprint, engine->op.ans.open_namespace.fingerprint,
           KVT_FINGERPRINT_BYTES);
    return CRASH_OK;
}

static enum crash_result attach(struct crash_engine *engine, uint32_t space_idx, uint32_t rank,
                                struct kvt_handle ns, const uint8_t *engine_id)
{
    struct crash_attachment *attachment = &engine->attachments[space_idx];
    struct kvt_op *op = crash_op_begin(engine, KVT_OP_ATTACH);
    struct kvt_req_attach *req = &op->req.attach;

    req->ns = ns;
    memcpy(req->engine_id, engine_id, KVT_ENGINE_ID_BYTES);
    req->is_scheduler = rank == 0;
    req->rank = rank;
    req->api_version = 1;
    req->name = text_of("kvtier-crash");
    attachment->sessions[rank] = kvt_client_attach(engine->client, op);
    if (attachment->sessions[rank] == NULL)
        return op->code == KVT_CODE_OK ? broken(engine, "no memory") : result_of(engine);
    attachment->handles[rank] = op->ans.attach.session;
    return CRASH_OK;
}

static enum crash_result connect_to(struct crash_engine *engine, const char *path,
                                    struct kvt_client **ret_client)
{
    struct kvt_client_config config = {.socket_path = path, .deadline_ns = CALL_NS};
    int r = kvt_client_open(ret_client, &config);

    if (r == -ENOENT || r == -ECONNREFUSED)
        return CRASH_GONE;
    if (r < 0) {
        (void)snprintf(engine->why, sizeof(engine->why), "%s: %s", path, strerror(-r));
        return CRASH_BROKEN;
    }
    return CRASH_OK;
}

void crash_engine_init(struct crash_engine *engine, const struct crash_options *options)
{
    *engine = (struct crash_engine){.seed = options->seed,
                                    .socket_path = options->socket_path,
                                    .admin_path = options->admin_path,
                                    .revision = options->revision};
}

enum crash_result crash_engine_open(struct crash_engine *engine)
{
    uint8_t engine_id[KVT_ENGINE_ID_BYTES];
    struct kvt_handle ns;
    enum crash_result result;

    engine->payload = kvt_alloc_zeroed(1, CRASH_PAYLOAD_BYTES_MAX);
    if (engine->payload == NULL ||
        kvt_arena_init(&engine->arena, KVT_OP_ARENA_BYTES_MAX, KVT_MIB) < 0)
        return broken(engine, "no memory");
    result = connect_to(engine, engine->socket_path, &engine->client);
    if (result == CRASH_OK)
        result = connect_to(engine, engine->admin_path, &engine->admin);
    for (uint32_t s = 0; s < CRASH_SPACES && result == CRASH_OK; s++) {
        if (getrandom(engine_id, sizeof(engine_id), 0) != (ssize_t)sizeof(engine_id))
            return broken(engine, "no random bytes");
        result = open_namespace(engine, s, &ns);
        for (uint32_t rank = 0; rank < crash_spaces[s].ranks && result == CRASH_OK; rank++)
            result = attach(engine, s, rank, ns, engine_id);
    }
    return result;
}

void crash_engine_close(struct crash_engine *engine)
{
    for (uint32_t s = 0; s < CRASH_SPACES; s++)
        for (uint32_t rank = 0; rank < CRASH_RANKS_MAX; rank++)
            engine->attachments[s].sessions[rank] =
                kvt_session_detach(engine->attachments[s].sessions[rank]);
    engine->client = kvt_client_close(engine->client);
    engine->admin = kvt_client_close(engine->admin);
    kvt_arena_deinit(&engine->arena);
    kvt_free(engine->payload);
    engine->payload = NULL;
}

/* ---- storing ----------------------------------------------------------------------------------
 */

static bool is_there(const struct kvt_req_demote *req, const struct kvt_api_results *results)
{
    for (uint32_t m = 0; m < req->moves_count; m++) {
        if (results->count[m] != req->moves[m].count)
            return false;
        for (uint32_t i = 0; i < results->count[m]; i++)
            if (results->results[m][i] != KVT_MOVE_DONE &&
                results->results[m][i] != KVT_MOVE_PRESENT)
                return false;
    }
    return true;
}

static enum crash_result reserve(struct crash_engine *engine, const struct crash_place *place,
                                 struct kvt_handle *ret_ticket)
{
    struct kvt_req_reserve *req = &crash_op_begin(engine, KVT_OP_RESERVE)->req.reserve;
    enum crash_result result;

    req->session = engine->attachments[place->space].handles[0];
    crash_prefix(engine, place, &req->prefix);
    req->wants_count = crash_spaces[place->space].components_count;
    for (uint32_t c = 0; c < req->wants_count; c++)
        req->wants[c] = (struct kvt_api_range){
            .component = c, .first_block_idx = place->first, .end_block_idx = place->end};
    result = crash_op_call(engine, engine->client);
    if (result == CRASH_OK)
        *ret_ticket = engine->op.ans.reserve.ticket;
    return result;
}

static enum crash_result release_ticket(struct crash_engine *engine, uint32_t space,
                                        struct kvt_handle ticket)
{
    struct kvt_req_release *req = &crash_op_begin(engine, KVT_OP_RELEASE)->req.release;
    enum crash_result result;

    req->session = engine->attachments[space].handles[0];
    req->ticket = ticket;
    result = crash_op_call(engine, engine->client);
    return result == CRASH_REFUSED ? CRASH_OK : result; /* it ended with its last fill */
}

/* One rank's part; the last one asks for durability: only whole copies can go down. */
static enum crash_result demote(struct crash_engine *engine, const struct crash_place *place,
                                struct kvt_handle ticket, uint32_t rank, bool is_wanted_durable,
                                struct crash_stored *stored)
{
    struct kvt_req_demote *req = &crash_op_begin(engine, KVT_OP_DEMOTE)->req.demote;
    const struct kvt_ans_demote *ans = &engine->op.ans.demote;
    enum crash_result result;

    req->session = engine->attachments[place->space].handles[rank];
    req->ticket = ticket;
    if (ticket.id == 0)
        crash_prefix(engine, place, &req->prefix);
    req->op_id = ++engine->op_id;
    req->moves_count = crash_moves(engine, place, req->moves);
    req->wants_durable = is_wanted_durable;
    req->inline_bytes = fill(engine, place, rank);
    req->inline_data = engine->payload;
    result = crash_op_call(engine, engine->client);
    if (result != CRASH_OK)
        return result;
    stored->moved_bytes += ans->moved_bytes;
    stored->is_whole = stored->is_whole && is_there(req, &ans->moves);
    stored->is_durable = ans->is_durable;
    return CRASH_OK;
}

enum crash_result crash_engine_store(struct crash_engine *engine, const struct crash_place *place,
                                     bool is_wanted_durable, struct crash_stored *ret)
{
    uint32_t ranks = crash_spaces[place->space].ranks;
    bool is_by_ticket = ranks > 1 || place->end % 2 == 0;
    struct crash_stored stored = {.is_whole = true};
    struct kvt_handle ticket = KVT_HANDLE_NONE;
    enum crash_result result = CRASH_OK;

    *ret = (struct crash_stored){0};
    if (is_by_ticket) {
        result = reserve(engine, place, &ticket);
        if (result != CRASH_OK || ticket.id == 0) /* all is there, or another engine fills it */
            return result;
    }
    for (uint32_t rank = 0; rank < ranks && result == CRASH_OK; rank++)
        result =
            demote(engine, place, ticket, rank, is_wanted_durable && rank + 1 == ranks, &stored);
    if (result == CRASH_OK && is_by_ticket)
        result = release_ticket(engine, place->space, ticket);
    stored.is_durable = stored.is_durable && stored.is_whole;
    if (result == CRASH_OK)
        *ret = stored;
    return result;
}

enum crash_result crash_engine_lower(struct crash_engine *engine, const struct crash_place *place,
                                     struct crash_stored *ret)
{
    struct kvt_req_demote *req = &crash_op_begin(engine, KVT_OP_DEMOTE)->req.demote;
    const struct kvt_ans_demote *ans = &engine->op.ans.demote;
    enum crash_result result;

    *ret = (struct crash_stored){0};
    req->session = engine->attachments[place->space].handles[0];
    crash_prefix(engine, place, &req->prefix);
    req->is_between_tiers = true;
    req->from_tiers = KVT_TIER_BIT_L1 | KVT_TIER_BIT_L2;
    req->to_tier = KVT_TIER_BIT_L3;
    req->wants_durable = true;
    req->moves_count = crash_moves(engine, place, req->moves);
    result = crash_op_call(engine, engine->client);
    if (result != CRASH_OK)
        return result;
    ret->is_whole = is_there(req, &ans->moves);
    ret->is_durable = ret->is_whole && ans->is_durable;
    return CRASH_OK;
}

/* ---- admin ------------------------------------------------------------------------------------
 */

enum crash_result crash_engine_evict(struct crash_engine *engine, const struct crash_place *place)
{
    struct kvt_req_evict *req = &crash_op_begin(engine, KVT_OP_EVICT)->req.evict;

    memcpy(req->fingerprint, engine->attachments[place->space].fingerprint,
           sizeof(req->fingerprint));
    crash_prefix(engine, place, &req->prefix);
    return crash_op_call(engine, engine->admin);
}

enum crash_result crash_engine_reset(struct crash_engine *engine, uint32_t space)
{
    struct kvt_req_reset *req = &crash_op_begin(engine, KVT_OP_RESET)->req.reset;

    memcpy(req->fingerprint, engine->attachments[space].fingerprint, sizeof(req->fingerprint));
    return crash_op_call(engine, engine->admin);
}

enum crash_result crash_engine_left(struct crash_engine *engine, bool is_out_allowed,
                                    uint64_t *ret_left)
{
    static const struct timespec pause = {.tv_nsec = LEFT_PAUSE_NS};
    enum crash_result result = CRASH_OK;

    for (uint32_t tries = 0; tries < LEFT_TRIES; tries++) {
        const struct kvt_ans_stats *stats = &crash_op_begin(engine, KVT_OP_STATS)->ans.stats;

        result = crash_op_call(engine, engine->client);
        if (result != CRASH_OK)
            return result;
        *ret_left = stats->leases + stats->tickets + stats->reserved_copies + stats->pins;
        for (uint32_t t = 0; t < stats->tiers_count; t++)
            *ret_left += stats->tiers[t].pinned_copies + stats->tiers[t].filling_copies +
                         (stats->tiers[t].health == 1 && !is_out_allowed);
        if (*ret_left == 0)
            break;
        (void)nanosleep(&pause, NULL);
    }
    return result;
}
