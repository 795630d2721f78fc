/* Upkeep of L3: drains that save what is above it, beside other work, and the scrubber that finds
 * rot. Over fake tiers, in virtual time. */
#include <string.h>

#include "tests/common/check.h"
#include "tests/common/engine_world.h"

#define L3_SLOT_BYTES 8192u /* a shard of 4 KiB and its header, as world's namespace has them */

static const struct world_config plain = {
    .seed = 3, .l2_bytes = 1u << 20, .l3_bytes = 4u << 20, .delay_ns_max = 100000, .ranks = 1};

struct fixture {
    struct world world;
    struct client client;
    struct call call, other;
};

static void setup(struct fixture *fix, const struct world_config *config)
{
    world_init(&fix->world, config);
    call_init(&fix->call, &fix->world);
    call_init(&fix->other, &fix->world);
    client_attach(&fix->client, &fix->world, &fix->call, 1, true, 0);
}

static void teardown(struct fixture *fix)
{
    client_detach(&fix->client, &fix->call);
    world_settle(&fix->world);
    world_check(&fix->world);
    client_unmap(&fix->client);
    call_deinit(&fix->call);
    call_deinit(&fix->other);
    world_deinit(&fix->world);
}

static void store_prompt(struct fixture *fix, uint64_t tag, uint32_t blocks)
{
    struct kvt_handle ticket = world_reserve(&fix->call, &fix->client, tag, blocks);

    for (uint32_t i = 0; i < blocks; i++)
        client_fill(&fix->client, 0, tag, i, i);
    world_demote(&fix->call, &fix->client, ticket, 0, blocks, 0);
    fix->call.op.deadline_ns = fix->world.now_ns + 60 * KVT_NS_PER_S;
    call_run(&fix->call);
    CHECK_CODE(&fix->call.op, KVT_CODE_OK);
}

/* Ready copies in a tier: 1, 2, 3. */
static uint64_t copies_in(struct fixture *fix, uint32_t tier)
{
    call_begin(&fix->call, KVT_OP_STATS);
    call_run(&fix->call);
    CHECK_CODE(&fix->call.op, KVT_CODE_OK);
    return fix->call.op.ans.stats.tiers[tier - 1].copies;
}

static void begin(struct call *call, enum kvt_maintain_action action, uint64_t wait_ns)
{
    call_begin(call, KVT_OP_MAINTAIN);
    call->op.deadline_ns = call->world->now_ns + wait_ns;
    call->op.req.maintain.action = action;
}

static const struct kvt_ans_maintain *maintain(struct fixture *fix, enum kvt_maintain_action action)
{
    begin(&fix->other, action, 10 * KVT_NS_PER_S);
    call_run(&fix->other);
    CHECK_CODE(&fix->other.op, KVT_CODE_OK);
    return &fix->other.op.ans.maintain;
}

/* ---- draining ------------------------------------------------------------------------------- */

static void test_drain(void)
{
    const struct kvt_ans_maintain *ans;
    struct fixture fix;

    setup(&fix, &plain);
    store_prompt(&fix, 0x101, 16);
    ans = maintain(&fix, KVT_MAINTAIN_STATUS);
    CHECK(ans->drain.copies_left == 16 && !ans->drain.is_running && !ans->scrub.is_running);
    CHECK(copies_in(&fix, 3) == 0);
    ans = maintain(&fix, KVT_MAINTAIN_DRAIN);
    CHECK(ans->drain.copies_left == 0 && !ans->drain.is_running);
    CHECK(ans->drain.copies_written == 16 && ans->drain.bytes_written == 16 * 4096);
    CHECK(copies_in(&fix, 3) == 16);
    world_check(&fix.world);
    /* The copies above stay, and there is nothing to do twice. */
    CHECK(copies_in(&fix, 2) == 16);
    ans = maintain(&fix, KVT_MAINTAIN_DRAIN);
    CHECK(ans->drain.copies_left == 0 && ans->drain.copies_written == 0);
    /* The daemon goes on serving; what comes later is what is left then. */
    store_prompt(&fix, 0x901, 3);
    ans = maintain(&fix, KVT_MAINTAIN_STATUS);
    CHECK(ans->drain.copies_left == 3 && ans->drain.copies_failed == 0);
    teardown(&fix);
}

/* What is in L1 alone goes through L2, more of it than L2 holds. */
static void test_drain_from_the_top(void)
{
    const struct kvt_ans_maintain *ans;
    struct world_config config = plain;
    struct fixture fix;
    uint64_t left;

    config.l1_bytes = 1u << 20;
    config.l2_bytes = 512u << 10;
    setup(&fix, &config);
    for (uint64_t tag = 0x100; tag < 0x500; tag += 0x100)
        store_prompt(&fix, tag, 40);
    left = maintain(&fix, KVT_MAINTAIN_STATUS)->drain.copies_left;
    CHECK(left >= 100); /* L1 holds them, and L2 not that many */
    ans = maintain(&fix, KVT_MAINTAIN_DRAIN);
    CHECK(!ans->drain.is_running && ans->drain.copies_left == 0);
    CHECK(ans->drain.copies_written + 8 >= left); /* some may be on their way down already */
    CHECK(copies_in(&fix, 3) >= left);
    world_check(&fix.world);
    teardown(&fix);
}

/* An L3 that is smaller than L2 takes what it can hold, and the drain ends. */
static void test_drain_into_too_little(void)
{
    const struct kvt_ans_maintain *ans;
    struct world_config config = plain;
    struct fixture fix;

    config.l3_bytes = 128u << 10;
    setup(&fix, &config);
    store_prompt(&fix, 0x101, 40);
    ans = maintain(&fix, KVT_MAINTAIN_DRAIN);
    CHECK(!ans->drain.is_running && ans->drain.copies_left > 0);
    CHECK(ans->drain.copies_left <= 40 && ans->drain.copies_written <= 2 * 40 + 1);
    CHECK(ans->drain.copies_failed == ans->drain.copies_left);
    CHECK(copies_in(&fix, 3) > 0);
    world_check(&fix.world);
    teardown(&fix);
}

/* A slow L3: the answer comes in time and says what is left; the drain goes on, also when the one
 * who asked has gone; somebody else can wait for it. Requests are served meanwhile. */
static void test_drain_and_time(void)
{
    const struct kvt_ans_maintain *ans;
    struct world_config config = plain;
    uint64_t until_ns;
    struct fixture fix;

    config.delay_ns_max = 300 * KVT_NS_PER_MS;
    setup(&fix, &config);
    store_prompt(&fix, 0x101, 32);
    begin(&fix.other, KVT_MAINTAIN_DRAIN, 50 * KVT_NS_PER_MS);
    until_ns = fix.other.op.deadline_ns;
    call_run(&fix.other);
    CHECK_CODE(&fix.other.op, KVT_CODE_OK);
    CHECK(fix.world.now_ns <= until_ns);
    ans = &fix.other.op.ans.maintain;
    CHECK(ans->drain.is_running && ans->drain.copies_left > 0);

    begin(&fix.other, KVT_MAINTAIN_DRAIN, 10 * KVT_NS_PER_S);
    call_submit(&fix.other);
    world_turn(&fix.world);
    CHECK(!fix.other.is_done);
    atomic_store(&fix.other.op.is_cancelled, true);
    fix.world.service.cancel(fix.world.service.ctx, &fix.other.op);
    call_wait(&fix.other);
    CHECK_CODE(&fix.other.op, KVT_CODE_CANCELLED);

    world_lookup(&fix.call, &fix.client, 0x101, 32, false);
    CHECK(fix.call.op.ans.lookup.boundary_tokens == 32 * WORLD_BLOCK_TOKENS);
    world_check(&fix.world);
    store_prompt(&fix, 0x901, 2); /* is not waited for */
    ans = maintain(&fix, KVT_MAINTAIN_DRAIN);
    CHECK(!ans->drain.is_running && ans->drain.copies_left == 2);
    CHECK(ans->drain.copies_written == 32 && ans->drain.copies_failed == 0); /* by one drain */
    teardown(&fix);
}

/* More requests than may wait, and a stop while they do. */
static void test_drain_and_stop(void)
{
    struct world_config config = plain;
    struct call calls[17];
    struct fixture fix;

    config.delay_ns_max = 300 * KVT_NS_PER_MS;
    setup(&fix, &config);
    store_prompt(&fix, 0x101, 32);
    for (uint32_t i = 0; i < 17; i++) {
        call_init(&calls[i], &fix.world);
        begin(&calls[i], KVT_MAINTAIN_DRAIN, 10 * KVT_NS_PER_S);
        call_submit(&calls[i]);
    }
    world_turn(&fix.world);
    CHECK(calls[16].is_done);
    CHECK_CODE(&calls[16].op, KVT_CODE_RESOURCE_EXHAUSTED);
    kvt_engine_stop(fix.world.engine, 0);
    world_turn(&fix.world);
    for (uint32_t i = 0; i < 17; i++) {
        CHECK(calls[i].is_done);
        if (i < 16)
            CHECK_CODE(&calls[i].op, KVT_CODE_UNAVAILABLE);
        call_deinit(&calls[i]);
    }
    teardown(&fix);
}

/* What a drain wrote is durable when it has answered: a daemon that is killed then has lost nothing
 * of it. */
static void test_drain_and_crash(void)
{
    struct world_config config = plain;
    struct fixture fix;

    config.devices = 2;
    config.commit_delay_ns_max = 200 * KVT_NS_PER_MS;
    setup(&fix, &config);
    store_prompt(&fix, 0x101, 24);
    CHECK(maintain(&fix, KVT_MAINTAIN_DRAIN)->drain.copies_failed == 0);
    client_detach(&fix.client, &fix.call);
    client_unmap(&fix.client);
    world_settle(&fix.world);
    world_restart(&fix.world, false);
    client_attach(&fix.client, &fix.world, &fix.call, 1, true, 0);
    CHECK(copies_in(&fix, 2) == 0 && copies_in(&fix, 3) == 24);
    world_lookup(&fix.call, &fix.client, 0x101, 24, false);
    CHECK(fix.call.op.ans.lookup.boundary_tokens == 24 * WORLD_BLOCK_TOKENS);
    teardown(&fix);
}

static void test_who_may(void)
{
    struct world_config config = plain;
    struct fixture fix;

    config.l3_bytes = 0;
    setup(&fix, &config);
    begin(&fix.other, KVT_MAINTAIN_STATUS, KVT_NS_PER_S);
    call_run(&fix.other);
    CHECK_CODE(&fix.other.op, KVT_CODE_INVALID_ARGUMENT);
    CHECK(strstr(fix.other.op.message, "tiers.l3.path") != NULL);
    begin(&fix.other, KVT_MAINTAIN_DRAIN, KVT_NS_PER_S);
    fix.other.op.is_admin = false;
    call_run(&fix.other);
    CHECK_CODE(&fix.other.op, KVT_CODE_PERMISSION_DENIED);
    teardown(&fix);
}

/* ---- scrubbing ------------------------------------------------------------------------------ */

static const struct kvt_ans_maintain *scrub_rounds(struct fixture *fix, uint64_t rounds)
{
    const struct kvt_ans_maintain *ans = maintain(fix, KVT_MAINTAIN_STATUS);

    for (uint32_t i = 0; i < 100000 && ans->scrub.rounds < rounds; i++) {
        world_turn(&fix->world);
        ans = maintain(fix, KVT_MAINTAIN_STATUS);
    }
    CHECK(ans->scrub.rounds == rounds);
    return ans;
}

static void test_scrub(void)
{
    const struct kvt_ans_maintain *ans;
    struct fixture fix;
    uint64_t checked;

    setup(&fix, &plain);
    store_prompt(&fix, 0x101, 16);
    (void)maintain(&fix, KVT_MAINTAIN_DRAIN);
    ans = maintain(&fix, KVT_MAINTAIN_SCRUB_START);
    CHECK(ans->scrub.is_running && ans->scrub.rate_bytes_per_s == 64u << 20); /* no rate is set */
    ans = scrub_rounds(&fix, 2);
    CHECK(ans->scrub.checked_copies == 32 && ans->scrub.checked_bytes == 32 * 4096);
    CHECK(ans->scrub.bad_copies == 0 && ans->scrub.skipped_copies == 0);
    world_check(&fix.world);
    /* Two slots have rotted: found, dropped, and a miss for whoever asks. */
    fake_tier_spoil(fix.world.tiers[KVT_TIER_DISK], 2);
    ans = scrub_rounds(&fix, 3);
    CHECK(ans->scrub.bad_copies == 2);
    CHECK(copies_in(&fix, 3) == 14);
    CHECK(maintain(&fix, KVT_MAINTAIN_STATUS)->drain.copies_left == 2);
    world_lookup(&fix.call, &fix.client, 0x101, 16, false);
    CHECK(fix.call.op.ans.lookup.boundary_tokens == 16 * WORLD_BLOCK_TOKENS); /* L2 has them */
    ans = maintain(&fix, KVT_MAINTAIN_SCRUB_STOP);
    CHECK(!ans->scrub.is_running && ans->scrub.rate_bytes_per_s == 0);
    world_settle(&fix.world);
    checked = maintain(&fix, KVT_MAINTAIN_STATUS)->scrub.checked_copies;
    for (uint32_t i = 0; i < 3000; i++)
        world_turn(&fix.world);
    CHECK(maintain(&fix, KVT_MAINTAIN_STATUS)->scrub.checked_copies == checked);
    teardown(&fix);
}

/* The rate is kept: 16 slots at a slot a 100 ms take 1.6 s, and an empty L3 is not walked without
 * rest. */
static void test_scrub_rate(void)
{
    struct fixture fix;
    uint64_t begin_ns;

    setup(&fix, &plain);
    store_prompt(&fix, 0x101, 16);
    (void)maintain(&fix, KVT_MAINTAIN_DRAIN);
    begin(&fix.other, KVT_MAINTAIN_SCRUB_START, KVT_NS_PER_S);
    fix.other.op.req.maintain.rate_bytes_per_s = 10 * L3_SLOT_BYTES;
    begin_ns = fix.world.now_ns;
    call_run(&fix.other);
    CHECK_CODE(&fix.other.op, KVT_CODE_OK);
    CHECK(fix.other.op.ans.maintain.scrub.rate_bytes_per_s == 10 * L3_SLOT_BYTES);
    (void)scrub_rounds(&fix, 1);
    CHECK(fix.world.now_ns - begin_ns >= 1500 * KVT_NS_PER_MS);
    CHECK(fix.world.now_ns - begin_ns <= 1800 * KVT_NS_PER_MS);
    (void)maintain(&fix, KVT_MAINTAIN_SCRUB_STOP);
    teardown(&fix);

    setup(&fix, &plain);
    begin_ns = fix.world.now_ns;
    (void)maintain(&fix, KVT_MAINTAIN_SCRUB_START);
    (void)scrub_rounds(&fix, 4);
    CHECK(fix.world.now_ns - begin_ns >= 3 * KVT_NS_PER_S);
    (void)maintain(&fix, KVT_MAINTAIN_SCRUB_STOP);
    teardown(&fix);
}

/* Several ranks: every shard is read, one bad shard costs its copy. And while an engine works. */
static void test_scrub_shards_beside_work(void)
{
    const struct kvt_ans_maintain *ans;
    struct world_config config = plain;
    struct client second;
    struct fixture fix;

    config.ranks = 2;
    setup(&fix, &config);
    client_attach(&second, &fix.world, &fix.call, 1, false, 1);
    for (uint64_t tag = 0x100; tag < 0x300; tag += 0x100) {
        struct kvt_handle ticket = world_reserve(&fix.call, &fix.client, tag, 8);

        for (uint32_t rank = 0; rank < 2; rank++) {
            const struct client *client = rank == 0 ? &fix.client : &second;

            for (uint32_t i = 0; i < 8; i++)
                client_fill((struct client *)(uintptr_t)client, 0, tag, i, i);
            world_demote(&fix.call, client, ticket, 0, 8, 0);
            call_run(&fix.call);
            CHECK_CODE(&fix.call.op, KVT_CODE_OK);
        }
        CHECK(maintain(&fix, KVT_MAINTAIN_DRAIN)->drain.copies_left == 0);
        ans = maintain(&fix, KVT_MAINTAIN_SCRUB_START);
    }
    ans = scrub_rounds(&fix, ans->scrub.rounds + 2);
    CHECK(ans->scrub.checked_copies >= 16 && ans->scrub.bad_copies == 0);
    CHECK(ans->scrub.checked_bytes == 2 * 4096 * ans->scrub.checked_copies);
    fake_tier_spoil(fix.world.tiers[KVT_TIER_DISK], 1);
    ans = scrub_rounds(&fix, ans->scrub.rounds + 2);
    CHECK(ans->scrub.bad_copies == 1);
    CHECK(copies_in(&fix, 3) == 15);
    world_check(&fix.world);
    (void)maintain(&fix, KVT_MAINTAIN_SCRUB_STOP);
    client_detach(&second, &fix.call);
    client_unmap(&second);
    teardown(&fix);
}

int main(void)
{
    test_drain();
    test_drain_from_the_top();
    test_drain_into_too_little();
    test_drain_and_time();
    test_drain_and_stop();
    test_drain_and_crash();
    test_who_may();
    test_scrub();
    test_scrub_rate();
    test_scrub_shards_beside_work();
    return 0;
}
