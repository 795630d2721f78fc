/* Store, look up and promote through each tier of a real daemon: every byte verified, and Stats
 * agreeing with what was done. */
#include <string.h>

#include "tests/integration/e2e.h"

#include "daemon/base/alloc.h"

static const struct e2e_model full = {.name = "full",
                                      .block_tokens = 16,
                                      .ranks = 1,
                                      .components_count = 1,
                                      .components = {{.kind = 1, .bytes = 65536}}};
static const struct e2e_model hybrid = {
    .name = "hybrid",
    .block_tokens = 16,
    .ranks = 2,
    .components_count = 3,
    .components = {{.kind = 1, .bytes = 65536},
                   {.kind = 2, .bytes = 32768, .window_tokens = 40},
                   {.kind = 3, .bytes = 4096, .is_replicated = true}}};

/* Engine blocks that are left alone: one of each four, all of some blocks, all of every block. What
 * was asked for comes, and no other byte of the pool changes. */
static void promote_partly(struct e2e_engine *engine, const uint32_t *tokens, uint64_t count)
{
    static const struct {
        uint8_t pattern;
        uint32_t asked_of_8;
    } cases[] = {{0x11, 6}, {0xc6, 4}, {0xff, 0}};
    uint64_t blocks = count / engine->model->block_tokens;
    struct e2e_promoted got;

    for (uint32_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        engine->left_alone = cases[i].pattern;
        e2e_promote(engine, tokens, count, &got);
        CHECK(got.done == blocks && got.missed == 0 && got.wrong_bytes == 0);
        CHECK(got.moved_bytes ==
              blocks * engine->model->components[0].bytes * cases[i].asked_of_8 / 8);
    }
    engine->left_alone = 0;
}

static void test_l2(const char *program)
{
    struct e2e_daemon daemon;
    struct e2e_engine engine, *self = &engine;
    struct e2e_promoted got;
    struct kvt_op *op = e2e_op(KVT_OP_STATS);
    const struct kvt_ans_stats *stats;
    uint32_t tokens[1024];

    e2e_daemon_start(&daemon, program, NULL);
    e2e_engine_open(&engine, &daemon, &full, 1, 0, true);
    e2e_tokens(tokens, 1024, 1, 0);
    CHECK(e2e_boundary(&engine, tokens, 1024) == 0);
    CHECK(e2e_store(&engine, &self, 1, tokens, 1024) == 64);
    CHECK(e2e_boundary(&engine, tokens, 1024) == 1024);
    CHECK(e2e_boundary(&engine, tokens, 1023) == 1008);
    CHECK(e2e_boundary(&engine, tokens, 15) == 0);
    e2e_promote(&engine, tokens, 1024, &got);
    CHECK(got.done == 64 && got.missed == 0 && got.wrong_bytes == 0);
    CHECK(got.from[0] == 0 && got.from[1] == 64 && got.from[2] == 0);
    CHECK(got.moved_bytes == 64 * 65536ull);
    /* Again: everything is there, nothing is copied. */
    CHECK(e2e_store(&engine, &self, 1, tokens, 1024) == 0);
    /* A branch shares what is before it. */
    e2e_tokens(tokens, 1024, 2, 512);
    CHECK(e2e_boundary(&engine, tokens, 1024) == 0); /* seed 1 forked at 0 */
    e2e_tokens(tokens, 1024, 1, 0);
    tokens[700] ^= 1;
    CHECK(e2e_boundary(&engine, tokens, 1024) == 688);
    CHECK(e2e_store(&engine, &self, 1, tokens, 1024) == 21);
    e2e_promote(&engine, tokens, 1024, &got);
    CHECK(got.boundary_tokens == 1024 && got.done == 64 && got.wrong_bytes == 0);
    stats = e2e_stats(&engine, op);
    CHECK(stats->blocks == 85 && stats->namespaces_count == 1);
    CHECK(stats->namespaces[0].blocks == 85 && stats->namespaces[0].copies_at[0][1] == 85);
    CHECK(stats->engines_count == 1 && stats->engines[0].promoted_bytes == 128 * 65536ull);
    CHECK(stats->engines[0].demoted_bytes == 85 * 65536ull);
    CHECK(stats->sessions == 1);
    CHECK(stats->engines[0].lookups == 8 && stats->engines[0].ops_running == 0);
    CHECK(stats->engines[0].promotes == 2 && stats->engines[0].missed_moves == 0);
    CHECK(stats->engines[0].demotes == 2);
    promote_partly(&engine, tokens, 1024);
    e2e_expect_idle(&engine);
    (void)e2e_op_free(op);
    e2e_engine_close(&engine);
    e2e_daemon_stop(&daemon);
}

static void test_l1(const char *program)
{
    static const char *const settings[] = {"tiers.l1.backend=host", "tiers.l1.bytes=16MiB", NULL};
    struct e2e_daemon daemon;
    struct e2e_engine engine, *self = &engine;
    struct e2e_promoted got;
    uint32_t tokens[1024];

    e2e_daemon_start(&daemon, program, settings);
    e2e_engine_open(&engine, &daemon, &full, 1, 0, true);
    e2e_tokens(tokens, 1024, 1, 0);
    CHECK(e2e_store(&engine, &self, 1, tokens, 1024) == 64);
    e2e_promote(&engine, tokens, 1024, &got);
    CHECK(got.done == 64 && got.missed == 0 && got.wrong_bytes == 0);
    CHECK(got.from[0] == 64);
    promote_partly(&engine, tokens, 1024);
    /* Four prompts of 4 MiB each and more: the first goes down, and comes back right. */
    for (uint32_t seed = 2; seed < 7; seed++) {
        e2e_tokens(tokens, 1024, seed, 0);
        CHECK(e2e_store(&engine, &self, 1, tokens, 1024) == 64);
    }
    for (uint32_t seed = 1; seed < 7; seed++) {
        e2e_tokens(tokens, 1024, seed, 0);
        e2e_promote(&engine, tokens, 1024, &got);
        CHECK(got.wrong_bytes == 0 && got.missed == 0);
    }
    e2e_expect_idle(&engine);
    e2e_engine_close(&engine);
    e2e_daemon_stop(&daemon);
}

static void test_l3(const char *program)
{
    static const char *const settings[] = {"tiers.l2.bytes=8MiB",
                                           "tiers.l3.path=@/l3",
                                           "tiers.l3.bytes=64MiB",
                                           "limits.reserved_bytes_per_engine=6MiB",
                                           "limits.leased_bytes_per_engine=8MiB",
                                           NULL};
    struct e2e_daemon daemon;
    struct e2e_engine engine, *self = &engine;
    struct e2e_promoted got;
    uint64_t done = 0, from_l3 = 0;
    uint32_t tokens[1024];

    e2e_daemon_start(&daemon, program, settings);
    e2e_engine_open(&engine, &daemon, &full, 1, 0, true);
    for (uint32_t seed = 1; seed <= 8; seed++) { /* 32 MiB through 8 MiB */
        e2e_tokens(tokens, 1024, seed, 0);
        CHECK(e2e_store(&engine, &self, 1, tokens, 1024) == 64);
        e2e_sleep_ms(50);
    }
    for (uint32_t round = 0; round < 2; round++)
        for (uint32_t seed = 1; seed <= 8; seed++) {
            e2e_tokens(tokens, 1024, seed, 0);
            e2e_promote(&engine, tokens, 1024, &got);
            CHECK(got.wrong_bytes == 0 && got.missed == 0);
            done += got.done;
            from_l3 += got.from[2];
        }
    (void)printf("l3: %llu blocks came back, %llu of them from L3\n", (unsigned long long)done,
                 (unsigned long long)from_l3);
    CHECK(from_l3 >= 128);
    for (uint32_t seed = 1; seed <= 3; seed++) {
        e2e_tokens(tokens, 1024, seed, 0);
        promote_partly(&engine, tokens, 1024);
    }
    e2e_expect_idle(&engine);
    e2e_engine_close(&engine);
    e2e_daemon_stop(&daemon);
}

static void test_hybrid_two_ranks(const char *program)
{
    struct e2e_daemon daemon;
    struct e2e_engine scheduler, rank0, rank1, *ranks[2] = {&rank0, &rank1};
    struct e2e_promoted got;
    struct kvt_op *op = e2e_op(KVT_OP_STATS);
    uint64_t missing;
    uint32_t tokens[512];

    e2e_daemon_start(&daemon, program, NULL);
    e2e_engine_open(&scheduler, &daemon, &hybrid, 1, KVT_RANK_NONE, true);
    e2e_engine_open(&rank0, &daemon, &hybrid, 1, 0, false);
    e2e_engine_open(&rank1, &daemon, &hybrid, 1, 1, false);
    e2e_tokens(tokens, 512, 1, 0);
    /* One rank alone does not make a copy ready. */
    CHECK(e2e_store(&scheduler, ranks, 1, tokens, 256) == 48);
    CHECK(e2e_boundary(&scheduler, tokens, 256) == 0);
    e2e_engine_close(&rank0);
    e2e_engine_close(&rank1);
    e2e_engine_close(&scheduler);
    e2e_engine_open(&scheduler, &daemon, &hybrid, 2, KVT_RANK_NONE, true);
    e2e_engine_open(&rank0, &daemon, &hybrid, 2, 0, false);
    e2e_engine_open(&rank1, &daemon, &hybrid, 2, 1, false);
    e2e_expect_idle(&scheduler);
    missing = e2e_store(&scheduler, ranks, 2, tokens, 512);
    (void)printf("hybrid: %llu copies were missing\n", (unsigned long long)missing);
    /* 3 x 32, but for the state of 16 blocks: it is replicated, rank 0 alone completed it. */
    CHECK(missing == 80);
    CHECK(e2e_boundary(&scheduler, tokens, 512) == 512);
    for (uint32_t r = 0; r < 2; r++) {
        ranks[r]->scheduler = &scheduler;
        e2e_promote(ranks[r], tokens, 512, &got);
        CHECK(got.boundary_tokens == 512 && got.missed == 0 && got.wrong_bytes == 0);
        CHECK(got.done == 32 + 3 + 1); /* full, a window of 40 tokens, the state */
    }
    CHECK(e2e_stats(&scheduler, op)->engines_count == 1);
    CHECK(op->ans.stats.engines[0].sessions == 3);
    e2e_expect_idle(&scheduler);
    (void)e2e_op_free(op);
    e2e_engine_close(&rank0);
    e2e_engine_close(&rank1);
    e2e_engine_close(&scheduler);
    e2e_daemon_stop(&daemon);
}

static void test_two_engines_store_once(const char *program)
{
    struct e2e_daemon daemon;
    struct e2e_engine a, b, *self_a = &a, *self_b = &b;
    struct e2e_promoted got;
    struct kvt_op *op = e2e_op(KVT_OP_RESERVE), *stats = e2e_op(KVT_OP_STATS);
    uint32_t tokens[512];

    e2e_daemon_start(&daemon, program, NULL);
    e2e_engine_open(&a, &daemon, &full, 1, 0, true);
    e2e_engine_open(&b, &daemon, &full, 2, 0, true);
    e2e_tokens(tokens, 512, 1, 0);
    /* While A holds the ticket, B is told to wait; B's own copies are not taken. */
    e2e_reserve_request(&a, op, tokens, 512);
    kvt_client_call(a.client, op);
    CHECK_CODE(op, KVT_CODE_OK);
    CHECK(op->ans.reserve.states[0][0] == KVT_RESERVE_MISSING);
    CHECK(e2e_store(&b, &self_b, 1, tokens, 512) == 0);
    CHECK(e2e_boundary(&b, tokens, 512) == 0);
    e2e_op_again(stats, KVT_OP_RELEASE);
    stats->req.release.session = a.handle;
    stats->req.release.ticket = op->ans.reserve.ticket;
    kvt_client_call(a.client, stats);
    CHECK_CODE(stats, KVT_CODE_OK);
    CHECK(e2e_store(&b, &self_b, 1, tokens, 512) == 32);
    CHECK(e2e_store(&a, &self_a, 1, tokens, 512) == 0);
    e2e_promote(&a, tokens, 512, &got);
    CHECK(got.done == 32 && got.wrong_bytes == 0);
    CHECK(e2e_stats(&a, stats)->blocks == 32);
    CHECK(stats->ans.stats.namespaces_count == 1 && stats->ans.stats.engines_count == 2);
    e2e_expect_idle(&a);
    (void)e2e_op_free(op);
    (void)e2e_op_free(stats);
    e2e_engine_close(&a);
    e2e_engine_close(&b);
    e2e_daemon_stop(&daemon);
}

static void test_million_tokens(const char *program)
{
    static const char *const settings[] = {"index.memory=64MiB", NULL};
    struct e2e_daemon daemon;
    struct e2e_engine engine, *self = &engine;
    struct kvt_op *op = e2e_op(KVT_OP_LOOKUP);
    uint32_t *tokens = kvt_alloc_zeroed(KVT_REQUEST_TOKENS_MAX + 1, sizeof(*tokens));

    CHECK(tokens != NULL);
    e2e_daemon_start(&daemon, program, settings);
    e2e_engine_open(&engine, &daemon, &full, 1, 0, true);
    e2e_tokens(tokens, KVT_REQUEST_TOKENS_MAX + 1, 1, 0);
    CHECK(e2e_boundary(&engine, tokens, KVT_REQUEST_TOKENS_MAX) == 0);
    CHECK(e2e_store(&engine, &self, 1, tokens, 1024) == 64);
    CHECK(e2e_boundary(&engine, tokens, KVT_REQUEST_TOKENS_MAX) == 1024);
    /* One more is refused with words, and the daemon goes on. */
    e2e_lookup_request(&engine, op, tokens, KVT_REQUEST_TOKENS_MAX + 1, false);
    kvt_client_call(engine.client, op);
    CHECK(op->code == KVT_CODE_INVALID_ARGUMENT || op->code == KVT_CODE_RESOURCE_EXHAUSTED);
    CHECK(op->message[0] != '\0');
    CHECK(e2e_boundary(&engine, tokens, 1024) == 1024);
    (void)e2e_op_free(op);
    kvt_free(tokens);
    e2e_engine_close(&engine);
    e2e_daemon_stop(&daemon);
}

int main(int argc, char *argv[])
{
    CHECK(argc == 2);
    kvt_client_library_init();
    test_l2(argv[1]);
    test_l1(argv[1]);
    test_l3(argv[1]);
    test_hybrid_two_ranks(argv[1]);
    test_two_engines_store_once(argv[1]);
    test_million_tokens(argv[1]);
    kvt_client_library_deinit();
    (void)printf("ok\n");
    return 0;
}
