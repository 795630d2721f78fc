#include "tests/integration/e2e.h"

#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "daemon/base/alloc.h"
#include "daemon/base/clock.h"
#include "tools/lib/oracle.h"

#define PIECES 2u
#define EBPB 2u /* engine blocks a block of the daemon */

struct own_op {
    struct kvt_op op;
    struct kvt_arena arena;
};

struct kvt_op *e2e_op(enum kvt_op_kind kind)
{
    struct own_op *own = kvt_alloc_zeroed(1, sizeof(*own));

    CHECK(own != NULL);
    CHECK(kvt_arena_init(&own->arena, KVT_OP_ARENA_BYTES_MAX, KVT_MIB) == 0);
    e2e_op_again(&own->op, kind);
    return &own->op;
}

void e2e_op_again(struct kvt_op *op, enum kvt_op_kind kind)
{
    struct own_op *own = KVT_CONTAINER_OF(op, struct own_op, op);

    memset(op, 0, sizeof(*op));
    kvt_arena_reset(&own->arena);
    op->arena = &own->arena;
    op->kind = kind;
    op->deadline_ns = kvt_clock_mono_ns() + 30 * KVT_NS_PER_S;
}

struct kvt_op *e2e_op_free(struct kvt_op *op)
{
    struct own_op *own = KVT_CONTAINER_OF(op, struct own_op, op);

    kvt_arena_deinit(&own->arena);
    kvt_free(own);
    return NULL;
}

static struct kvt_text text(const char *at)
{
    return (struct kvt_text){at, (uint32_t)strlen(at)};
}

/* ---- the pool ---------------------------------------------------------------------------------
 */

static uint64_t component_base(const struct e2e_model *model, uint32_t component)
{
    uint64_t base = 0;

    for (uint32_t c = 0; c < component; c++)
        base += model->components[c].bytes * E2E_BLOCKS_MAX;
    return base;
}

static uint64_t piece_bytes(const struct e2e_model *model, uint32_t component)
{
    return model->components[component].bytes / (uint64_t)(PIECES * EBPB);
}

static uint8_t *piece_at(const struct e2e_engine *engine, uint32_t component, uint64_t block_idx,
                         uint32_t piece, uint32_t block)
{
    uint64_t bytes = piece_bytes(engine->model, component);

    return engine->pool + component_base(engine->model, component) +
           (block_idx * EBPB + block) * PIECES * bytes + piece * bytes;
}

int e2e_memfd(uint64_t bytes, bool is_sealed)
{
    int fd = memfd_create("kvt-e2e", MFD_CLOEXEC | MFD_ALLOW_SEALING);

    CHECK(fd >= 0);
    CHECK(posix_fallocate(fd, 0, (off_t)bytes) == 0);
    if (is_sealed)
        CHECK(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) == 0);
    return fd;
}

static uint64_t oracle_key(const struct e2e_engine *engine, const uint64_t *chains,
                           uint32_t component, uint64_t block_idx)
{
    bool is_replicated = engine->model->components[component].is_replicated;

    return kvt_oracle_key(&(struct kvt_oracle_place){
        .chain = chains[block_idx],
        .block_idx = block_idx,
        .component = component,
        .rank = is_replicated || engine->rank == KVT_RANK_NONE ? 0 : engine->rank});
}

static void chains_of(const struct e2e_engine *engine, const uint32_t *tokens, uint64_t blocks,
                      uint64_t chains[E2E_BLOCKS_MAX])
{
    CHECK(blocks <= E2E_BLOCKS_MAX);
    kvt_oracle_chain(kvt_oracle_root(engine->fingerprint, "", ""), tokens,
                     engine->model->block_tokens, blocks, chains);
}

void e2e_fill(struct e2e_engine *engine, const uint32_t *tokens, uint64_t blocks)
{
    uint64_t chains[E2E_BLOCKS_MAX];

    chains_of(engine, tokens, blocks, chains);
    for (uint32_t c = 0; c < engine->model->components_count; c++) {
        uint64_t bytes = piece_bytes(engine->model, c);

        for (uint64_t i = 0; i < blocks; i++)
            for (uint32_t part = 0; part < PIECES * EBPB; part++)
                kvt_oracle_fill(oracle_key(engine, chains, c, i), part * bytes,
                                piece_at(engine, c, i, part / EBPB, part % EBPB), bytes);
    }
}

void e2e_poison(struct e2e_engine *engine)
{
    memset(engine->pool, 0xdb, engine->pool_bytes);
}

uint64_t e2e_wrong(const struct e2e_engine *engine, const uint32_t *tokens, uint32_t component,
                   uint64_t block_idx)
{
    uint64_t chains[E2E_BLOCKS_MAX], bytes = piece_bytes(engine->model, component), wrong = 0;

    chains_of(engine, tokens, block_idx + 1, chains);
    for (uint32_t part = 0; part < PIECES * EBPB; part++)
        wrong += kvt_oracle_count_wrong(
            oracle_key(engine, chains, component, block_idx), part * bytes,
            piece_at(engine, component, block_idx, part / EBPB, part % EBPB), bytes);
    return wrong;
}

/* ---- sessions ---------------------------------------------------------------------------------
 */

void e2e_connect(struct e2e_engine *engine, const struct e2e_daemon *daemon,
                 const struct e2e_model *model)
{
    struct kvt_client_config config = {.socket_path = daemon->socket,
                                       .deadline_ns = 30 * KVT_NS_PER_S};
    struct kvt_op *op = e2e_op(KVT_OP_OPEN_NAMESPACE);
    struct kvt_req_open_namespace *req = &op->req.open_namespace;

    *engine = (struct e2e_engine){.model = model, .memfd = -1};
    CHECK(kvt_client_open(&engine->client, &config) == 0);
    req->block_tokens = model->block_tokens;
    req->ranks = model->ranks;
    req->components_count = model->components_count;
    for (uint32_t c = 0; c < model->components_count; c++)
        req->components[c] =
            (struct kvt_api_component){.kind = model->components[c].kind,
                                       .window_tokens = model->components[c].window_tokens,
                                       .bytes_per_block = model->components[c].bytes,
                                       .is_replicated = model->components[c].is_replicated};
    req->model = text(model->name);
    req->revision = text("r1");
    req->dtype = text("bf16");
    req->layout = text("e2e");
    kvt_client_call(engine->client, op);
    CHECK_CODE(op, KVT_CODE_OK);
    engine->ns = op->ans.open_namespace.ns;
    memcpy(engine->fingerprint, op->ans.open_namespace.fingerprint, KVT_FINGERPRINT_BYTES);
    (void)e2e_op_free(op);
}

static void put_layouts(struct e2e_engine *engine, struct kvt_op *op)
{
    const struct e2e_model *model = engine->model;
    struct kvt_api_layout *layouts =
        kvt_arena_array(op->arena, model->components_count, sizeof(*layouts));

    CHECK(layouts != NULL);
    for (uint32_t c = 0; c < model->components_count; c++) {
        struct kvt_api_piece *pieces = kvt_arena_array(op->arena, PIECES, sizeof(*pieces));
        uint64_t bytes = piece_bytes(model, c);

        CHECK(pieces != NULL);
        for (uint32_t p = 0; p < PIECES; p++)
            pieces[p] = (struct kvt_api_piece){.bytes = (uint32_t)bytes,
                                               .offset_bytes = component_base(model, c) + p * bytes,
                                               .stride_bytes = PIECES * bytes};
        layouts[c] = (struct kvt_api_layout){.component = c,
                                             .engine_blocks_per_block = EBPB,
                                             .pieces_count = PIECES,
                                             .pieces = pieces};
    }
    op->req.attach.layouts = layouts;
    op->req.attach.layouts_count = model->components_count;
}

void e2e_attach_request(struct e2e_engine *engine, struct kvt_op *op, uint32_t rank,
                        bool is_scheduler, uint8_t engine_id)
{
    struct kvt_req_attach *req = &op->req.attach;

    memset(engine->engine_id, engine_id, sizeof(engine->engine_id));
    engine->rank = rank;
    req->ns = engine->ns;
    memset(req->engine_id, engine_id, sizeof(req->engine_id));
    req->is_scheduler = is_scheduler;
    req->rank = rank;
    req->api_version = 1;
    req->name = text("e2e");
    if (rank == KVT_RANK_NONE)
        return;
    req->regions_count = 1;
    req->regions[0].bytes = engine->pool_bytes;
    put_layouts(engine, op);
}

void e2e_engine_open(struct e2e_engine *engine, const struct e2e_daemon *daemon,
                     const struct e2e_model *model, uint8_t engine_id, uint32_t rank,
                     bool is_scheduler)
{
    struct kvt_op *op = e2e_op(KVT_OP_ATTACH);
    char why[256] = "";

    e2e_connect(engine, daemon, model);
    if (rank != KVT_RANK_NONE) {
        engine->pool_bytes = component_base(model, model->components_count);
        engine->memfd = e2e_memfd(engine->pool_bytes, true);
        engine->pool =
            mmap(NULL, engine->pool_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, engine->memfd, 0);
        CHECK(engine->pool != MAP_FAILED);
    }
    e2e_attach_request(engine, op, rank, is_scheduler, engine_id);
    if (rank != KVT_RANK_NONE) {
        int r = kvt_client_send_region(engine->client, engine->memfd, engine->pool_bytes,
                                       op->req.attach.regions[0].token, why, sizeof(why));

        if (r != 0)
            (void)fprintf(stderr, "send_region: %d %s\n", r, why);
        CHECK(r == 0);
    }
    engine->session = kvt_client_attach(engine->client, op);
    CHECK_CODE(op, KVT_CODE_OK);
    CHECK(engine->session != NULL);
    engine->handle = op->ans.attach.session;
    (void)e2e_op_free(op);
}

void e2e_engine_close(struct e2e_engine *engine)
{
    engine->session = kvt_session_detach(engine->session);
    engine->client = kvt_client_close(engine->client);
    if (engine->pool != NULL)
        CHECK(munmap(engine->pool, engine->pool_bytes) == 0);
    engine->pool = NULL;
    if (engine->memfd >= 0)
        (void)close(engine->memfd);
    engine->memfd = -1;
}

/* ---- prompts ----------------------------------------------------------------------------------
 */

void e2e_tokens(uint32_t *tokens, uint64_t tokens_count, uint32_t seed, uint64_t fork_at)
{
    for (uint64_t i = 0; i < tokens_count; i++)
        tokens[i] = (uint32_t)(i * 2654435761u >> 7) ^ (i >= fork_at ? seed * 40503u + 1u : 0u);
}

void e2e_lookup_request(struct e2e_engine *engine, struct kvt_op *op, const uint32_t *tokens,
                        uint64_t count, bool wants_lease)
{
    op->req.lookup.session = engine->handle;
    op->req.lookup.prefix.tokens = tokens;
    op->req.lookup.prefix.tokens_count = count;
    op->req.lookup.limit_tokens = UINT64_MAX;
    op->req.lookup.tiers = KVT_TIER_BITS_ALL;
    op->req.lookup.wants_lease = wants_lease;
}

void e2e_reserve_request(struct e2e_engine *engine, struct kvt_op *op, const uint32_t *tokens,
                         uint64_t count)
{
    const struct e2e_model *model = engine->model;

    op->req.reserve.session = engine->handle;
    op->req.reserve.prefix.tokens = tokens;
    op->req.reserve.prefix.tokens_count = count;
    op->req.reserve.wants_count = model->components_count;
    for (uint32_t c = 0; c < model->components_count; c++)
        op->req.reserve.wants[c] =
            (struct kvt_api_range){.component = c, .end_block_idx = count / model->block_tokens};
}

uint32_t e2e_moves(struct kvt_op *op, const struct e2e_model *model, uint32_t components,
                   uint64_t first, uint64_t end, struct kvt_api_moves *moves)
{
    uint32_t count = 0;

    for (uint32_t c = 0; c < model->components_count; c++) {
        uint64_t *blocks, *engine_blocks;

        if ((components >> c & 1) == 0 || end <= first)
            continue;
        blocks = kvt_arena_array(op->arena, end - first, sizeof(*blocks));
        engine_blocks = kvt_arena_array(op->arena, (end - first) * EBPB, sizeof(*engine_blocks));
        CHECK(blocks != NULL && engine_blocks != NULL);
        for (uint64_t i = first; i < end; i++) {
            blocks[i - first] = i;
            for (uint32_t k = 0; k < EBPB; k++)
                engine_blocks[(i - first) * EBPB + k] = i * EBPB + k;
        }
        moves[count++] =
            (struct kvt_api_moves){.component = c,
                                   .count = (uint32_t)(end - first),
                                   .block_idx = blocks,
                                   .engine_blocks = engine_blocks,
                                   .engine_blocks_count = (uint32_t)((end - first) * EBPB)};
    }
    return count;
}

static void demote_rank(struct e2e_engine *engine, struct kvt_handle ticket, const uint32_t *tokens,
                        uint64_t blocks)
{
    struct kvt_op *op = e2e_op(KVT_OP_DEMOTE);
    uint32_t components = 0;

    e2e_fill(engine, tokens, blocks);
    for (uint32_t c = 0; c < engine->model->components_count; c++)
        if (!engine->model->components[c].is_replicated || engine->rank == 0)
            components |= 1u << c;
    op->req.demote.session = engine->handle;
    op->req.demote.ticket = ticket;
    op->req.demote.op_id = 77;
    op->req.demote.moves_count =
        e2e_moves(op, engine->model, components, 0, blocks, op->req.demote.moves);
    kvt_client_call(engine->client, op);
    CHECK_CODE(op, KVT_CODE_OK);
    CHECK(op->ans.demote.is_quiesced);
    (void)e2e_op_free(op);
    /* The source may be reused now: what was stored must not depend on it. */
    e2e_poison(engine);
}

uint64_t e2e_store(struct e2e_engine *scheduler, struct e2e_engine *const ranks[],
                   uint32_t ranks_count, const uint32_t *tokens, uint64_t tokens_count)
{
    struct kvt_op *op = e2e_op(KVT_OP_RESERVE);
    uint64_t missing = 0;

    e2e_reserve_request(scheduler, op, tokens, tokens_count);
    kvt_client_call(scheduler->client, op);
    CHECK_CODE(op, KVT_CODE_OK);
    for (uint32_t w = 0; w < op->ans.reserve.wants_count; w++)
        for (uint32_t i = 0; i < op->ans.reserve.count[w]; i++)
            missing += op->ans.reserve.states[w][i] == KVT_RESERVE_MISSING;
    if (missing > 0) {
        CHECK(op->ans.reserve.ticket.id != 0);
        for (uint32_t r = 0; r < ranks_count; r++)
            demote_rank(ranks[r], op->ans.reserve.ticket, tokens,
                        tokens_count / scheduler->model->block_tokens);
    }
    (void)e2e_op_free(op);
    return missing;
}

uint64_t e2e_boundary(struct e2e_engine *engine, const uint32_t *tokens, uint64_t count)
{
    struct kvt_op *op = e2e_op(KVT_OP_LOOKUP);
    uint64_t boundary;

    e2e_lookup_request(engine, op, tokens, count, false);
    kvt_client_call(engine->client, op);
    CHECK_CODE(op, KVT_CODE_OK);
    boundary = op->ans.lookup.boundary_tokens;
    (void)e2e_op_free(op);
    return boundary;
}

/* First block of @component that a boundary of @blocks needs. */
static uint64_t first_needed(const struct e2e_model *model, uint32_t component, uint64_t blocks)
{
    uint64_t tokens = blocks * model->block_tokens;
    uint64_t window = model->components[component].window_tokens;

    switch (model->components[component].kind) {
    case 1:
        return 0;
    case 2:
        return window >= tokens ? 0 : (tokens - window) / model->block_tokens;
    default:
        return blocks - 1;
    }
}

static bool is_left_alone(const struct e2e_engine *engine, uint64_t engine_block)
{
    return (engine->left_alone >> engine_block % 8 & 1) != 0;
}

static void leave_alone(const struct e2e_engine *engine, struct kvt_api_moves *moves)
{
    uint64_t *ids = (uint64_t *)(uintptr_t)moves->engine_blocks;

    for (uint32_t i = 0; i < moves->engine_blocks_count; i++)
        if (is_left_alone(engine, ids[i]))
            ids[i] = KVT_ENGINE_BLOCK_NONE;
}

/* Wrong bytes of what was asked for of one block, which is poisoned again then. */
static uint64_t take_wrong(struct e2e_engine *engine, const uint32_t *tokens, uint32_t component,
                           uint64_t block_idx, bool is_done)
{
    uint64_t chains[E2E_BLOCKS_MAX], bytes = piece_bytes(engine->model, component), wrong = 0;

    chains_of(engine, tokens, block_idx + 1, chains);
    for (uint32_t part = 0; part < PIECES * EBPB; part++) {
        uint8_t *at = piece_at(engine, component, block_idx, part / EBPB, part % EBPB);

        if (is_left_alone(engine, block_idx * EBPB + part % EBPB))
            continue;
        if (is_done)
            wrong += kvt_oracle_count_wrong(oracle_key(engine, chains, component, block_idx),
                                            part * bytes, at, bytes);
        memset(at, 0xdb, bytes);
    }
    return wrong;
}

static uint64_t count_changed(const struct e2e_engine *engine)
{
    uint64_t changed = 0;

    for (uint64_t i = 0; i < engine->pool_bytes; i++)
        changed += engine->pool[i] != 0xdb;
    return changed;
}

static void verify(struct e2e_engine *engine, const uint32_t *tokens, const struct kvt_op *op,
                   struct e2e_promoted *ret)
{
    const struct kvt_req_promote *req = &op->req.promote;

    for (uint32_t m = 0; m < req->moves_count; m++) {
        const struct kvt_api_moves *moves = &req->moves[m];

        CHECK(op->ans.promote.moves.count[m] == moves->count);
        for (uint32_t i = 0; i < moves->count; i++) {
            bool is_done = op->ans.promote.moves.results[m][i] == KVT_MOVE_DONE;

            ret->done += is_done;
            ret->missed += !is_done;
            if (engine->left_alone != 0)
                ret->wrong_bytes +=
                    take_wrong(engine, tokens, moves->component, moves->block_idx[i], is_done);
            else if (is_done)
                ret->wrong_bytes +=
                    e2e_wrong(engine, tokens, moves->component, moves->block_idx[i]);
        }
    }
    if (engine->left_alone != 0)
        ret->wrong_bytes += count_changed(engine);
    ret->moved_bytes = op->ans.promote.moved_bytes;
    for (uint32_t t = 0; t < KVT_API_TIERS; t++)
        ret->from[t] += op->ans.promote.moved_blocks_from[t];
}

void e2e_promote(struct e2e_engine *engine, const uint32_t *tokens, uint64_t count,
                 struct e2e_promoted *ret)
{
    struct e2e_engine *scheduler = engine->scheduler != NULL ? engine->scheduler : engine;
    const struct e2e_model *model = engine->model;
    struct kvt_op *op = e2e_op(KVT_OP_LOOKUP), *promote = e2e_op(KVT_OP_PROMOTE);
    struct kvt_req_promote *req = &promote->req.promote;
    uint64_t blocks;

    *ret = (struct e2e_promoted){0};
    e2e_poison(engine);
    e2e_lookup_request(scheduler, op, tokens, count, true);
    kvt_client_call(scheduler->client, op);
    CHECK_CODE(op, KVT_CODE_OK);
    ret->boundary_tokens = op->ans.lookup.boundary_tokens;
    blocks = ret->boundary_tokens / model->block_tokens;
    if (blocks > 0) {
        req->session = engine->handle;
        req->lease = op->ans.lookup.lease;
        req->target = KVT_TARGET_ENGINE;
        req->op_id = 78;
        for (uint32_t c = 0; c < model->components_count; c++)
            req->moves_count += e2e_moves(promote, model, 1u << c, first_needed(model, c, blocks),
                                          blocks, &req->moves[req->moves_count]);
        for (uint32_t m = 0; m < req->moves_count; m++)
            leave_alone(engine, &req->moves[m]);
        kvt_client_call(engine->client, promote);
        CHECK_CODE(promote, KVT_CODE_OK);
        verify(engine, tokens, promote, ret);
        e2e_op_again(promote, KVT_OP_RELEASE);
        promote->req.release.session = scheduler->handle;
        promote->req.release.lease = op->ans.lookup.lease;
        kvt_client_call(scheduler->client, promote);
        CHECK_CODE(promote, KVT_CODE_OK);
    }
    (void)e2e_op_free(promote);
    (void)e2e_op_free(op);
}

const struct kvt_ans_stats *e2e_stats(struct e2e_engine *engine, struct kvt_op *op)
{
    e2e_op_again(op, KVT_OP_STATS);
    kvt_client_call(engine->client, op);
    CHECK_CODE(op, KVT_CODE_OK);
    return &op->ans.stats;
}

/* So long that what is still held then is held for good, also on a machine that is busy. */
#define IDLE_TRIES_MAX 300u

void e2e_expect_idle(struct e2e_engine *engine)
{
    struct kvt_op *op = e2e_op(KVT_OP_STATS);
    uint64_t held = 1;

    for (uint32_t tries = 0; held != 0; tries++) {
        const struct kvt_ans_stats *stats = e2e_stats(engine, op);

        held = stats->leases + stats->tickets + stats->reserved_copies + stats->pins;
        for (uint32_t t = 0; t < stats->tiers_count; t++)
            held += stats->tiers[t].pinned_copies + stats->tiers[t].filling_copies +
                    stats->tiers[t].inflight;
        if (held != 0 && tries == IDLE_TRIES_MAX)
            (void)fprintf(stderr, "leases %llu tickets %llu reserved %llu pins %llu\n",
                          (unsigned long long)stats->leases, (unsigned long long)stats->tickets,
                          (unsigned long long)stats->reserved_copies,
                          (unsigned long long)stats->pins);
        CHECK(held == 0 || tries < IDLE_TRIES_MAX);
        if (held != 0)
            e2e_sleep_ms(100);
    }
    (void)e2e_op_free(op);
}
