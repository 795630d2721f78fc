/* Leases of more than an engine may lease: the answer is the greatest boundary whose lease fits. */
#include <string.h>

#include "tests/common/check.h"
#include "tests/common/engine_world.h"

#define TAG 0x101u
#define BLOCKS 12u
#define L3_BYTES (128u << 10)

struct fixture {
    struct world world;
    struct client client;
    struct call call;
};

static void setup(struct fixture *fix, uint64_t leased_bytes_max, bool has_window)
{
    const struct world_config config = {.seed = 14,
                                        .l2_bytes = 1u << 20,
                                        .l3_bytes = L3_BYTES,
                                        .delay_ns_max = KVT_NS_PER_MS,
                                        .ranks = 1,
                                        .has_window = has_window,
                                        .leased_bytes_max = leased_bytes_max};

    world_init(&fix->world, &config);
    call_init(&fix->call, &fix->world);
    client_attach(&fix->client, &fix->world, &fix->call, 1, true, 0);
}

static void teardown(struct fixture *fix)
{
    client_detach(&fix->client, &fix->call);
    world_settle(&fix->world);
    world_check(&fix->world);
    client_unmap(&fix->client);
    call_deinit(&fix->call);
    world_deinit(&fix->world);
}

static void store_prompt(struct fixture *fix)
{
    struct kvt_handle ticket = world_reserve(&fix->call, &fix->client, TAG, BLOCKS);
    uint32_t components = fix->world.components_count;

    for (uint32_t c = 0; c < components; c++)
        for (uint32_t i = 0; i < BLOCKS; i++)
            client_fill(&fix->client, c, TAG, i, i);
    world_demote(&fix->call, &fix->client, ticket, 0, BLOCKS, 0);
    call_run(&fix->call);
    CHECK_CODE(&fix->call.op, KVT_CODE_OK);
    for (uint32_t c = 0; c < components; c++)
        for (uint32_t i = 0; i < BLOCKS; i++)
            CHECK(fix->call.op.ans.demote.moves.results[c][i] == KVT_MOVE_DONE);
}

static void ask(struct fixture *fix, uint64_t limit_blocks, bool wants_lease)
{
    struct kvt_req_lookup *req = &fix->call.op.req.lookup;

    call_begin(&fix->call, KVT_OP_LOOKUP);
    req->session = fix->client.session;
    req->prefix = world_prefix(&fix->call, TAG, BLOCKS);
    req->limit_tokens = limit_blocks * WORLD_BLOCK_TOKENS;
    req->wants_lease = wants_lease;
    req->wants_why = true;
    call_run(&fix->call);
}

static uint64_t boundary(const struct fixture *fix)
{
    return fix->call.op.ans.lookup.boundary_tokens / WORLD_BLOCK_TOKENS;
}

/* What a lease of the answer pins in L2. */
static uint64_t bytes(const struct fixture *fix)
{
    const struct kvt_ans_lookup *ans = &fix->call.op.ans.lookup;
    uint64_t sum = 0;

    for (uint32_t c = 0; c < ans->components_count; c++)
        sum += ans->components[c].blocks_at[KVT_TIER_HOST] * fix->world.shard_bytes[c];
    return sum;
}

static bool is_leased(const struct fixture *fix)
{
    const struct kvt_handle none = KVT_HANDLE_NONE;

    return memcmp(&fix->call.op.ans.lookup.lease, &none, sizeof(none)) != 0;
}

static void release(struct fixture *fix, struct kvt_handle lease)
{
    call_begin(&fix->call, KVT_OP_RELEASE);
    fix->call.op.req.release.session = fix->client.session;
    fix->call.op.req.release.lease = lease;
    call_run(&fix->call);
    CHECK_CODE(&fix->call.op, KVT_CODE_OK);
}

static uint64_t counter(struct fixture *fix, const char *name)
{
    call_begin(&fix->call, KVT_OP_STATS);
    call_run(&fix->call);
    CHECK_CODE(&fix->call.op, KVT_CODE_OK);
    for (uint32_t i = 0; i < fix->call.op.ans.stats.counters_count; i++)
        if (strcmp(fix->call.op.ans.stats.counters[i].name, name) == 0)
            return fix->call.op.ans.stats.counters[i].value;
    return UINT64_MAX;
}

/* For every limit the answer is that of the greatest limit_tokens whose lease would fit. */
static void test_greatest(bool has_window)
{
    for (uint64_t max = 2048; max <= BLOCKS * 6144; max += 2048) {
        uint64_t greatest = 0;
        struct fixture fix;
        bool is_all;

        setup(&fix, max, has_window);
        store_prompt(&fix);
        for (uint64_t b = BLOCKS; b > 0 && greatest == 0; b--) {
            ask(&fix, b, false);
            CHECK_CODE(&fix.call.op, KVT_CODE_OK);
            CHECK(boundary(&fix) == b && !is_leased(&fix));
            CHECK(!fix.call.op.ans.lookup.is_lease_limited);
            if (bytes(&fix) <= max)
                greatest = b;
        }
        is_all = greatest == BLOCKS;
        ask(&fix, UINT64_MAX / WORLD_BLOCK_TOKENS, true);
        CHECK_CODE(&fix.call.op, KVT_CODE_OK);
        CHECK(boundary(&fix) == greatest && bytes(&fix) <= max);
        CHECK(is_leased(&fix) == (greatest > 0));
        CHECK(fix.call.op.ans.lookup.is_lease_limited == !is_all);
        /* The rest of the answer tells of what is there. */
        CHECK(fix.call.op.ans.lookup.path_tokens == BLOCKS * WORLD_BLOCK_TOKENS);
        CHECK(fix.call.op.ans.lookup.cursor_tokens == BLOCKS * WORLD_BLOCK_TOKENS);
        CHECK(fix.call.op.ans.lookup.branch_tokens == BLOCKS * WORLD_BLOCK_TOKENS);
        CHECK(fix.call.op.ans.lookup.components[0].alone_tokens == BLOCKS * WORLD_BLOCK_TOKENS);
        CHECK(fix.call.op.ans.lookup.components[0].why == KVT_WHY_NONE);
        CHECK(counter(&fix, "leases_limited") == !is_all);
        CHECK(counter(&fix, "leases_given") == (greatest > 0));
        teardown(&fix);
    }
}

/* What is leased already is no room: a shorter one still, then none, and that is an error since a
 * release helps. The blocks of a shortened lease are served by it as any. */
static void test_beside_others(void)
{
    struct kvt_handle first, second;
    struct fixture fix;

    setup(&fix, 7 * 4096, false);
    store_prompt(&fix);
    ask(&fix, 5, true);
    CHECK_CODE(&fix.call.op, KVT_CODE_OK);
    CHECK(boundary(&fix) == 5 && !fix.call.op.ans.lookup.is_lease_limited);
    first = fix.call.op.ans.lookup.lease;
    ask(&fix, BLOCKS, true);
    CHECK_CODE(&fix.call.op, KVT_CODE_OK);
    CHECK(boundary(&fix) == 2 && fix.call.op.ans.lookup.is_lease_limited);
    second = fix.call.op.ans.lookup.lease;
    ask(&fix, BLOCKS, true);
    CHECK_CODE(&fix.call.op, KVT_CODE_RESOURCE_EXHAUSTED);
    CHECK(strstr(fix.call.op.message, "28672 bytes of L1 and L2 (at most 28672)") != NULL);
    ask(&fix, BLOCKS, false);
    CHECK_CODE(&fix.call.op, KVT_CODE_OK);
    CHECK(boundary(&fix) == BLOCKS && !fix.call.op.ans.lookup.is_lease_limited);
    world_promote(&fix.call, &fix.client, second, 0, 2, 20);
    call_run(&fix.call);
    CHECK_CODE(&fix.call.op, KVT_CODE_OK);
    for (uint32_t i = 0; i < 2; i++) {
        CHECK(fix.call.op.ans.promote.moves.results[0][i] == KVT_MOVE_DONE);
        CHECK(client_holds(&fix.client, 0, TAG, i, 20 + i, 0));
    }
    world_promote(&fix.call, &fix.client, second, 2, 1, 22); /* not of it */
    call_run(&fix.call);
    CHECK_CODE(&fix.call.op, KVT_CODE_INVALID_ARGUMENT);
    release(&fix, first);
    ask(&fix, BLOCKS, true);
    CHECK_CODE(&fix.call.op, KVT_CODE_OK);
    CHECK(boundary(&fix) == 5);
    teardown(&fix);
}

/* Bytes of L3 have a limit of their own, half of it. */
static void test_disk(void)
{
    struct fixture fix;

    setup(&fix, 0, false);
    store_prompt(&fix);
    call_begin(&fix.call, KVT_OP_DEMOTE);
    fix.call.op.req.demote.session = fix.client.session;
    fix.call.op.req.demote.prefix = world_prefix(&fix.call, TAG, BLOCKS);
    fix.call.op.req.demote.is_between_tiers = true;
    fix.call.op.req.demote.from_tiers = KVT_TIER_BIT_L2;
    fix.call.op.req.demote.to_tier = KVT_TIER_BIT_L3;
    call_run(&fix.call);
    CHECK_CODE(&fix.call.op, KVT_CODE_OK);
    ask(&fix, BLOCKS, true);
    CHECK_CODE(&fix.call.op, KVT_CODE_OK);
    CHECK(boundary(&fix) == BLOCKS && !fix.call.op.ans.lookup.is_lease_limited);
    CHECK(fix.call.op.ans.lookup.components[0].blocks_at[KVT_TIER_DISK] == BLOCKS);
    ask(&fix, BLOCKS, true);
    CHECK_CODE(&fix.call.op, KVT_CODE_OK);
    CHECK(boundary(&fix) == L3_BYTES / 2 / 4096 - BLOCKS);
    CHECK(fix.call.op.ans.lookup.is_lease_limited && is_leased(&fix));
    ask(&fix, BLOCKS, true);
    CHECK_CODE(&fix.call.op, KVT_CODE_RESOURCE_EXHAUSTED);
    teardown(&fix);
}

int main(void)
{
    test_greatest(false);
    test_greatest(true);
    test_beside_others();
    test_disk();
    return 0;
}
