/* The engine's verbs one at a time, over fake tiers: what goes in comes out, and who may do what.
 */
#include <string.h>

#include "tests/common/check.h"
#include "tests/common/engine_world.h"

static const struct world_config plain = {.seed = 1,
                                          .l1_bytes = 0,
                                          .l2_bytes = 1u << 20,
                                          .l3_bytes = 4u << 20,
                                          .delay_ns_max = 100000,
                                          .ranks = 1};

static void fill_blocks(struct client *client, uint64_t tag, uint32_t count)
{
    for (uint32_t c = 0; c < client->world->components_count; c++) {
        for (uint32_t i = 0; i < count; i++)
            client_fill(client, c, tag, i, i);
    }
}

static bool all_are(const struct kvt_api_results *results, uint32_t component, uint8_t wanted)
{
    for (uint32_t i = 0; i < results->count[component]; i++) {
        if (results->results[component][i] != wanted)
            return false;
    }
    return true;
}

static void store_prompt(struct call *call, struct client *client, uint64_t tag, uint32_t blocks)
{
    struct kvt_handle ticket = world_reserve(call, client, tag, blocks);

    fill_blocks(client, tag, blocks);
    world_demote(call, client, ticket, 0, blocks, 0);
    call_run(call);
    CHECK_CODE(&call->op, KVT_CODE_OK);
    for (uint32_t c = 0; c < client->world->components_count; c++)
        CHECK(all_are(&call->op.ans.demote.moves, c, KVT_MOVE_DONE));
}

static void test_round_trip(void)
{
    struct world_config config = plain;
    struct kvt_handle lease;
    struct client client;
    struct world world;
    struct call call;

    config.has_window = true;
    config.l1_bytes = 256u << 10;
    world_init(&world, &config);
    call_init(&call, &world);
    client_attach(&client, &world, &call, 1, true, 0);
    store_prompt(&call, &client, 0x101, 8);
    CHECK(call.op.ans.demote.is_quiesced && call.op.ans.demote.moved_bytes == 8 * (4096 + 2048));
    world_check(&world);
    for (uint32_t i = 0; i < 16; i++) {
        client_scribble(&client, 0, 16 + i, 0xee);
        client_scribble(&client, 1, 16 + i, 0xee);
    }
    lease = world_lookup(&call, &client, 0x101, 8, true);
    CHECK(call.op.ans.lookup.boundary_tokens == 8 * WORLD_BLOCK_TOKENS && lease.id != 0);
    world_promote(&call, &client, lease, 0, 8, 16);
    call.op.req.promote.layer_groups = 2;
    call_run(&call);
    CHECK_CODE(&call.op, KVT_CODE_OK);
    CHECK(call.progress == 2 && call.op.ans.promote.is_quiesced);
    for (uint32_t i = 0; i < 8; i++) {
        CHECK(call.op.ans.promote.moves.results[0][i] == KVT_MOVE_DONE);
        CHECK(client_holds(&client, 0, 0x101, i, 16 + i, 0));
        CHECK(client_holds(&client, 1, 0x101, i, 16 + i, 0));
    }
    /* A prompt that shares the first four blocks. */
    world_lookup(&call, &client, 0x102, 8, false);
    CHECK(call.op.ans.lookup.boundary_tokens == 4 * WORLD_BLOCK_TOKENS);
    CHECK(call.op.ans.lookup.components[0].why == KVT_WHY_NEVER_STORED);
    world_check(&world);
    client_detach(&client, &call);
    world_settle(&world);
    client_unmap(&client);
    call_deinit(&call);
    world_deinit(&world);
}

static bool holds_or_was_left(const struct client *client, uint32_t first_pool_block,
                              const uint32_t left_alone[8])
{
    for (uint32_t c = 0; c < client->world->components_count; c++) {
        for (uint32_t i = 0; i < 8; i++) {
            if (!client_holds_but(client, c, 0x101, i, first_pool_block + i, left_alone[i], 0xee,
                                  true))
                return false;
        }
    }
    return true;
}

/* Engine blocks that a Promote leaves alone, from each tier, in one piece and by groups of layers:
 * the others come, the bytes of these stay, and only what was written is counted. */
static void test_left_alone(void)
{
    static const uint32_t left_alone[8] = {0, 1, 2, 3, 3, 0, 2, 1};
    struct world_config config = plain;
    struct client client;
    struct world world;
    struct call call;

    config.has_window = true;
    for (uint32_t round = 0; round < 6; round++) {
        bool has_l1 = round / 2 == 1, is_from_l3 = round / 2 == 2;
        struct kvt_ans_promote *ans = &call.op.ans.promote;
        struct kvt_handle lease;

        config.l1_bytes = has_l1 ? 256u << 10 : 0;
        world_init(&world, &config);
        call_init(&call, &world);
        client_attach(&client, &world, &call, 1, true, 0);
        store_prompt(&call, &client, 0x101, 8);
        lease = world_lookup(&call, &client, 0x101, 8, true);
        if (is_from_l3) {
            call_begin(&call, KVT_OP_DEMOTE);
            call.op.req.demote = (struct kvt_req_demote){.session = client.session,
                                                         .lease = lease,
                                                         .is_between_tiers = true,
                                                         .from_tiers = KVT_TIER_BIT_L2,
                                                         .to_tier = KVT_TIER_BIT_L3};
            call_run(&call);
            CHECK_CODE(&call.op, KVT_CODE_OK);
        }
        for (uint32_t i = 0; i < 2 * 8; i++)
            client_scribble(&client, i / 8, 16 + i % 8, 0xee);
        world_promote(&call, &client, lease, 0, 8, 16);
        call.op.req.promote.layer_groups = round % 2 == 0 ? 0 : 2;
        for (uint32_t i = 0; i < 2 * 8; i++)
            world_leave_alone(&call.op.req.promote.moves[i / 8], i % 8, left_alone[i % 8]);
        call_run(&call);
        CHECK_CODE(&call.op, KVT_CODE_OK);
        CHECK(all_are(&ans->moves, 0, KVT_MOVE_DONE) && all_are(&ans->moves, 1, KVT_MOVE_DONE));
        /* What was being written to L3 already when it was told to move there stays in L2, too. */
        CHECK(ans->moved_blocks_from[has_l1 ? 0 : is_from_l3 ? 2 : 1] >= (is_from_l3 ? 8 : 16));
        CHECK(ans->moved_bytes == 8 * (4096 + 2048) / 2); /* 8 of 16 engine blocks */
        CHECK(holds_or_was_left(&client, 16, left_alone));
        client_detach(&client, &call);
        world_settle(&world);
        client_unmap(&client);
        call_deinit(&call);
        world_deinit(&world);
    }
}

/* A payload that is stored must be whole. */
static void test_demote_leaves_nothing(struct call *call, struct client *client)
{
    struct kvt_handle ticket = world_reserve(call, client, 0x800, 2);

    world_demote(call, client, ticket, 0, 2, 0);
    world_leave_alone(&call->op.req.demote.moves[0], 1, 1);
    call_run(call);
    CHECK_CODE(&call->op, KVT_CODE_INVALID_ARGUMENT);
    CHECK(strstr(call->op.message, "moves.engine_blocks") != NULL);
    call_begin(call, KVT_OP_RELEASE);
    call->op.req.release.session = client->session;
    call->op.req.release.ticket = ticket;
    call_run(call);
    CHECK_CODE(&call->op, KVT_CODE_OK);
}

/* No daemon can use memory of a GPU yet: the answer says what can be done, and a memfd that came
 * beside it is let go. */
static void test_cuda_region(struct call *call, struct client *client)
{
    struct world *world = client->world;
    struct kvt_req_attach *req = &call->op.req.attach;
    const char *why = NULL;

    for (uint32_t memfds = 0; memfds < 2; memfds++) {
        call_begin(call, KVT_OP_ATTACH);
        req->ns = world->ns;
        req->engine_id[0] = 9;
        req->api_version = 1;
        req->regions_count = memfds + 1;
        if (memfds == 1)
            CHECK(world->service.region_open(world->service.ctx, client->memfd, 4096,
                                             &req->regions[0].mapping, &why) == 0);
        req->regions[memfds].kind = KVT_REGION_CUDA_IPC;
        req->regions[memfds].bytes = 4096;
        call_run(call);
        CHECK_CODE(&call->op, KVT_CODE_FAILED_PRECONDITION);
        CHECK(strstr(call->op.message, "this daemon has no CUDA device: register a memfd") != NULL);
    }
}

/* vllm-15: nothing to move is answered at once. */
static void test_zero_moves(struct call *call, struct client *client)
{
    struct kvt_handle lease = world_lookup(call, client, 0x101, 4, true);

    world_promote(call, client, lease, 0, 0, 0);
    call_submit(call);
    world_turn(client->world);
    CHECK(call->is_done);
    CHECK_CODE(&call->op, KVT_CODE_OK);
    world_promote(call, client, lease, 0, 0, 0);
    call->op.req.promote.moves_count = 0;
    call_run(call);
    CHECK_CODE(&call->op, KVT_CODE_OK);
}

/* vllm-39: salt "X" and LoRA "X" are different roots. */
static void test_tags(struct call *call, struct client *client)
{
    struct kvt_req_demote *req = &call->op.req.demote;

    call_begin(call, KVT_OP_DEMOTE);
    req->session = client->session;
    req->prefix = world_prefix(call, 0x900, 2);
    req->prefix.salt = (struct kvt_text){"X", 1};
    req->moves_count = 1;
    req->moves[0] = world_moves(call, 0, 0, 2, 0);
    call_run(call);
    CHECK_CODE(&call->op, KVT_CODE_OK);
    CHECK(all_are(&call->op.ans.demote.moves, 0, KVT_MOVE_DONE));
    for (uint32_t i = 0; i < 3; i++) {
        call_begin(call, KVT_OP_LOOKUP);
        call->op.req.lookup.session = client->session;
        call->op.req.lookup.prefix = world_prefix(call, 0x900, 2);
        call->op.req.lookup.limit_tokens = UINT64_MAX;
        if (i == 0)
            call->op.req.lookup.prefix.salt = (struct kvt_text){"X", 1};
        if (i == 1)
            call->op.req.lookup.prefix.lora = (struct kvt_text){"X", 1};
        call_run(call);
        CHECK_CODE(&call->op, KVT_CODE_OK);
        CHECK(call->op.ans.lookup.boundary_tokens == (i == 0 ? 2 * WORLD_BLOCK_TOKENS : 0));
    }
}

static void test_handles(struct call *call, struct client *client, struct client *other)
{
    struct kvt_handle lease = world_lookup(call, client, 0x101, 4, true), bad = lease;

    world_promote(call, other, lease, 0, 4, 0);
    call_run(call);
    CHECK_CODE(&call->op, KVT_CODE_PERMISSION_DENIED);
    bad.secret ^= 2;
    world_promote(call, client, bad, 0, 4, 0);
    call_run(call);
    CHECK_CODE(&call->op, KVT_CODE_NOT_FOUND);
    bad = lease;
    bad.boot_id++;
    world_promote(call, client, bad, 0, 4, 0);
    call_run(call);
    CHECK_CODE(&call->op, KVT_CODE_FAILED_PRECONDITION);
    world_promote(call, client, lease, 0, 4, WORLD_POOL_BLOCKS);
    call_run(call);
    CHECK_CODE(&call->op, KVT_CODE_INVALID_ARGUMENT);
    world_promote(call, client, lease, 2, 4, 0);
    call_run(call);
    CHECK_CODE(&call->op, KVT_CODE_INVALID_ARGUMENT);
    for (uint32_t i = 0; i < 2; i++) { /* Release may be repeated */
        call_begin(call, KVT_OP_RELEASE);
        call->op.req.release.session = client->session;
        call->op.req.release.lease = lease;
        call_run(call);
        CHECK_CODE(&call->op, KVT_CODE_OK);
    }
    world_promote(call, client, lease, 0, 4, 0);
    call_run(call);
    CHECK_CODE(&call->op, KVT_CODE_OK);
    CHECK(all_are(&call->op.ans.promote.moves, 0, KVT_MOVE_ABORTED));
    call_begin(call, KVT_OP_RESET);
    call->op.is_admin = false;
    call->op.req.reset.ns = client->world->ns;
    call_run(call);
    CHECK_CODE(&call->op, KVT_CODE_PERMISSION_DENIED);
}

/* vllm-19: lookups with a lease that are never promoted. */
static void test_lease_limit(struct call *call, struct client *client)
{
    struct kvt_engine_counts counts;
    uint32_t given = 0;

    for (uint32_t i = 0; i < 2000; i++) {
        call_begin(call, KVT_OP_LOOKUP);
        call->op.req.lookup.session = client->session;
        call->op.req.lookup.prefix = world_prefix(call, 0x101, 4);
        call->op.req.lookup.limit_tokens = UINT64_MAX;
        call->op.req.lookup.wants_lease = true;
        call_run(call);
        if (call->op.code == KVT_CODE_OK)
            given++;
        else
            CHECK_CODE(&call->op, KVT_CODE_RESOURCE_EXHAUSTED);
    }
    CHECK(given > 0 && given <= 1024);
    client->world->now_ns += 60 * KVT_NS_PER_S;
    for (uint32_t i = 0; i < 100; i++)
        world_turn(client->world);
    kvt_engine_counts(client->world->engine, &counts);
    CHECK(counts.leases == 0 && client->world->notices[KVT_NOTICE_LEASE_ENDED] >= given);
    world_check(client->world);
}

static void test_admin(struct call *call, struct client *client)
{
    call_begin(call, KVT_OP_STATS);
    call_run(call);
    CHECK_CODE(&call->op, KVT_CODE_OK);
    CHECK(call->op.ans.stats.engines_count == 2 && call->op.ans.stats.counters_count > 20);
    CHECK(call->op.ans.stats.blocks > 0 && call->op.ans.stats.leases == 0);
    call_begin(call, KVT_OP_DUMP);
    call_run(call);
    CHECK_CODE(&call->op, KVT_CODE_OK);
    CHECK(call->op.ans.dump.nodes_count >= 2 && call->op.ans.dump.resume == 0);
    call_begin(call, KVT_OP_HEALTH);
    call_run(call);
    CHECK(call->op.ans.health.is_serving && call->op.ans.health.degraded.bytes == 0);
    call_begin(call, KVT_OP_EVICT);
    call->op.req.evict.ns = client->world->ns;
    call->op.req.evict.prefix = world_prefix(call, 0x101, 3);
    call_run(call);
    CHECK_CODE(&call->op, KVT_CODE_OK);
    CHECK(call->op.ans.evict.evicted_blocks == 6);
    world_lookup(call, client, 0x101, 8, false);
    CHECK(call->op.ans.lookup.boundary_tokens == 2 * WORLD_BLOCK_TOKENS);
    call_begin(call, KVT_OP_RESET);
    call->op.req.reset.ns = client->world->ns;
    call_run(call);
    CHECK_CODE(&call->op, KVT_CODE_OK);
    CHECK(client->world->notices[KVT_NOTICE_EPOCH] == 2);
    world_lookup(call, client, 0x101, 8, false);
    CHECK(call->op.ans.lookup.boundary_tokens == 0 && call->op.ans.lookup.epoch == 2);
}

static enum kvt_code open_model(struct call *call, uint32_t number, uint64_t bytes_per_block)
{
    struct kvt_req_open_namespace *req = &call->op.req.open_namespace;
    char *model;

    call_begin(call, KVT_OP_OPEN_NAMESPACE);
    model = kvt_arena_alloc(&call->arena, 16);
    CHECK(model != NULL);
    req->block_tokens = WORLD_BLOCK_TOKENS;
    req->ranks = 1;
    req->components_count = 1;
    req->components[0] = (struct kvt_api_component){.kind = 1, .bytes_per_block = bytes_per_block};
    req->model =
        (struct kvt_text){model, (uint32_t)snprintf(model, 16, "model-%u", (unsigned)number)};
    call_run(call);
    return call->op.code;
}

/* Numbers of namespaces have holes, positions in an answer have none: the engine of the last
 * namespace is told under that one. */
static void test_namespace_positions(void)
{
    struct kvt_req_attach *req;
    struct world world;
    struct call call;

    world_init(&world, &plain);
    call_init(&call, &world);
    for (uint32_t i = 1; i < KVT_NAMESPACES_MAX; i++)
        CHECK(open_model(&call, i, 4096) == KVT_CODE_OK);
    world.ns = call.op.ans.open_namespace.ns;
    call_begin(&call, KVT_OP_ATTACH);
    req = &call.op.req.attach;
    req->ns = world.ns;
    req->engine_id[0] = 1;
    req->is_scheduler = true;
    req->rank = KVT_RANK_NONE;
    req->api_version = 1;
    req->sink = (struct kvt_session_sink *)&world;
    call_run(&call);
    CHECK_CODE(&call.op, KVT_CODE_OK);
    /* The first, which is idle, makes way for one that cannot be served after all. */
    CHECK(open_model(&call, 1000, 512u << 20) == KVT_CODE_INVALID_ARGUMENT);
    call_begin(&call, KVT_OP_STATS);
    call_run(&call);
    CHECK_CODE(&call.op, KVT_CODE_OK);
    CHECK(call.op.ans.stats.namespaces_count == KVT_NAMESPACES_MAX - 1);
    CHECK(call.op.ans.stats.engines_count == 1);
    CHECK(call.op.ans.stats.engines[0].ns_idx == KVT_NAMESPACES_MAX - 2);
    CHECK(memcmp(call.op.ans.stats.namespaces[KVT_NAMESPACES_MAX - 2].model.at, "model-63", 8) ==
          0);
    world_settle(&world);
    call_deinit(&call);
    world_deinit(&world);
}

int main(void)
{
    struct client client, other;
    struct world world;
    struct call call;

    test_round_trip();
    test_left_alone();
    test_namespace_positions();
    world_init(&world, &plain);
    call_init(&call, &world);
    client_attach(&client, &world, &call, 1, true, 0);
    client_attach(&other, &world, &call, 2, true, 0);
    store_prompt(&call, &client, 0x101, 8);
    test_zero_moves(&call, &client);
    test_tags(&call, &client);
    test_demote_leaves_nothing(&call, &client);
    test_cuda_region(&call, &client);
    test_handles(&call, &client, &other);
    test_lease_limit(&call, &client);
    test_admin(&call, &client);
    client_detach(&client, &call);
    client_detach(&other, &call);
    world_settle(&world);
    world_check(&world);
    client_unmap(&client);
    client_unmap(&other);
    call_deinit(&call);
    world_deinit(&world);
    return 0;
}
