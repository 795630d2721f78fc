/* Upkeep of L3: drains that save what is above it, beside other work, and the scrubber that finds
 * rot. Over fake tiers, in virtual time. */
#include <string.h>

#include "tests/common/check.h"
#include "tests/common/engine_rig.h"

#define L3_SLOT_BYTES 8192u /* a shard of 4 KiB and its header, as world's namespace has them */

static const struct world_config plain = {
    .seed = 3, .l2_bytes = 1u << 20, .l3_bytes = 4u << 20, .delay_ns_max = 100000, .ranks = 1};

/* Ready copies in a tier: 1, 2, 3. */
static uint64_t copies_in(struct rig *rig, uint32_t tier)
{
    call_begin(&rig->call, KVT_OP_STATS);
    call_run(&rig->call);
    CHECK_CODE(&rig->call.op, KVT_CODE_OK);
    return rig->call.op.ans.stats.tiers[tier - 1].copies;
}

static void begin(struct call *call, enum kvt_maintain_action action, uint64_t wait_ns)
{
    call_begin(call, KVT_OP_MAINTAIN);
    call->op.deadline_ns = call->world->now_ns + wait_ns;
    call->op.req.maintain.action = action;
}

static const struct kvt_ans_maintain *maintain(struct rig *rig, enum kvt_maintain_action action)
{
    begin(&rig->other, action, 10 * KVT_NS_PER_S);
    call_run(&rig->other);
    CHECK_CODE(&rig->other.op, KVT_CODE_OK);
    return &rig->other.op.ans.maintain;
}

/* ---- draining ------------------------------------------------------------------------------- */

static void test_drain(void)
{
    const struct kvt_ans_maintain *ans;
    struct rig rig;

    rig_begin(&rig, &plain);
    rig_store(&rig, 0x101, 16);
    ans = maintain(&rig, KVT_MAINTAIN_STATUS);
    CHECK(ans->drain.copies_left == 16 && !ans->drain.is_running && !ans->scrub.is_running);
    CHECK(copies_in(&rig, 3) == 0);
    ans = maintain(&rig, KVT_MAINTAIN_DRAIN);
    CHECK(ans->drain.copies_left == 0 && !ans->drain.is_running);
    CHECK(ans->drain.copies_written == 16 && ans->drain.bytes_written == 16 * 4096);
    CHECK(copies_in(&rig, 3) == 16);
    world_check(&rig.world);
    /* The copies above stay, and there is nothing to do twice. */
    CHECK(copies_in(&rig, 2) == 16);
    ans = maintain(&rig, KVT_MAINTAIN_DRAIN);
    CHECK(ans->drain.copies_left == 0 && ans->drain.copies_written == 0);
    /* The daemon goes on serving; what comes later is what is left then. */
    rig_store(&rig, 0x901, 3);
    ans = maintain(&rig, KVT_MAINTAIN_STATUS);
    CHECK(ans->drain.copies_left == 3 && ans->drain.copies_failed == 0);
    rig_end(&rig);
}

/* What is in L1 alone goes through L2, more of it than L2 holds. */
static void test_drain_from_the_top(void)
{
    const struct kvt_ans_maintain *ans;
    struct world_config config = plain;
    struct rig rig;
    uint64_t left;

    config.l1_bytes = 1u << 20;
    config.l2_bytes = 512u << 10;
    rig_begin(&rig, &config);
    for (uint64_t tag = 0x100; tag < 0x500; tag += 0x100)
        rig_store(&rig, tag, 40);
    left = maintain(&rig, KVT_MAINTAIN_STATUS)->drain.copies_left;
    CHECK(left >= 100); /* L1 holds them, and L2 not that many */
    ans = maintain(&rig, KVT_MAINTAIN_DRAIN);
    CHECK(!ans->drain.is_running && ans->drain.copies_left == 0);
    CHECK(ans->drain.copies_written + 8 >= left); /* some may be on their way down already */
    CHECK(copies_in(&rig, 3) >= left);
    world_check(&rig.world);
    rig_end(&rig);
}

/* An L3 that is smaller than L2 takes what it can hold, and the drain ends. */
static void test_drain_into_too_little(void)
{
    const struct kvt_ans_maintain *ans;
    struct world_config config = plain;
    struct rig rig;

    config.l3_bytes = 128u << 10;
    rig_begin(&rig, &config);
    rig_store(&rig, 0x101, 40);
    ans = maintain(&rig, KVT_MAINTAIN_DRAIN);
    CHECK(!ans->drain.is_running && ans->drain.copies_left > 0);
    CHECK(ans->drain.copies_left <= 40 && ans->drain.copies_written <= 2 * 40 + 1);
    CHECK(ans->drain.copies_failed == ans->drain.copies_left);
    CHECK(copies_in(&rig, 3) > 0);
    world_check(&rig.world);
    rig_end(&rig);
}

/* A slow L3: the answer comes in time and says what is left; the drain goes on, also when the one
 * who asked has gone; somebody else can wait for it. Requests are served meanwhile. */
static void test_drain_and_time(void)
{
    const struct kvt_ans_maintain *ans;
    struct world_config config = plain;
    uint64_t until_ns;
    struct rig rig;

    config.delay_ns_max = 300 * KVT_NS_PER_MS;
    rig_begin(&rig, &config);
    rig_store(&rig, 0x101, 32);
    begin(&rig.other, KVT_MAINTAIN_DRAIN, 50 * KVT_NS_PER_MS);
    until_ns = rig.other.op.deadline_ns;
    call_run(&rig.other);
    CHECK_CODE(&rig.other.op, KVT_CODE_OK);
    CHECK(rig.world.now_ns <= until_ns);
    ans = &rig.other.op.ans.maintain;
    CHECK(ans->drain.is_running && ans->drain.copies_left > 0);

    begin(&rig.other, KVT_MAINTAIN_DRAIN, 10 * KVT_NS_PER_S);
    call_submit(&rig.other);
    world_turn(&rig.world);
    CHECK(!rig.other.is_done);
    atomic_store(&rig.other.op.is_cancelled, true);
    rig.world.service.cancel(rig.world.service.ctx, &rig.other.op);
    call_wait(&rig.other);
    CHECK_CODE(&rig.other.op, KVT_CODE_CANCELLED);

    world_lookup(&rig.call, &rig.client, 0x101, 32, false);
    CHECK(rig.call.op.ans.lookup.boundary_tokens == 32 * WORLD_BLOCK_TOKENS);
    world_check(&rig.world);
    rig_store(&rig, 0x901, 2); /* is not waited for */
    ans = maintain(&rig, KVT_MAINTAIN_DRAIN);
    CHECK(!ans->drain.is_running && ans->drain.copies_left == 2);
    CHECK(ans->drain.copies_written == 32 && ans->drain.copies_failed == 0); /* by one drain */
    rig_end(&rig);
}

/* More requests than may wait, and a stop while they do. */
static void test_drain_and_stop(void)
{
    struct world_config config = plain;
    struct call calls[17];
    struct rig rig;

    config.delay_ns_max = 300 * KVT_NS_PER_MS;
    rig_begin(&rig, &config);
    rig_store(&rig, 0x101, 32);
    for (uint32_t i = 0; i < 17; i++) {
        call_init(&calls[i], &rig.world);
        begin(&calls[i], KVT_MAINTAIN_DRAIN, 10 * KVT_NS_PER_S);
        call_submit(&calls[i]);
    }
    world_turn(&rig.world);
    CHECK(calls[16].is_done);
    CHECK_CODE(&calls[16].op, KVT_CODE_RESOURCE_EXHAUSTED);
    kvt_engine_stop(rig.world.engine, 0);
    world_turn(&rig.world);
    for (uint32_t i = 0; i < 17; i++) {
        CHECK(calls[i].is_done);
        if (i < 16)
            CHECK_CODE(&calls[i].op, KVT_CODE_UNAVAILABLE);
        call_deinit(&calls[i]);
    }
    rig_end(&rig);
}

/* What a drain wrote is durable when it has answered: a daemon that is killed then has lost nothing
 * of it. */
static void test_drain_and_crash(void)
{
    struct world_config config = plain;
    struct rig rig;

    config.devices = 2;
    config.commit_delay_ns_max = 200 * KVT_NS_PER_MS;
    rig_begin(&rig, &config);
    rig_store(&rig, 0x101, 24);
    CHECK(maintain(&rig, KVT_MAINTAIN_DRAIN)->drain.copies_failed == 0);
    client_detach(&rig.client, &rig.call);
    client_unmap(&rig.client);
    world_settle(&rig.world);
    world_restart(&rig.world, false);
    client_attach(&rig.client, &rig.world, &rig.call, 1, true, 0);
    CHECK(copies_in(&rig, 2) == 0 && copies_in(&rig, 3) == 24);
    world_lookup(&rig.call, &rig.client, 0x101, 24, false);
    CHECK(rig.call.op.ans.lookup.boundary_tokens == 24 * WORLD_BLOCK_TOKENS);
    rig_end(&rig);
}

static void test_who_may(void)
{
    struct world_config config = plain;
    struct rig rig;

    config.l3_bytes = 0;
    rig_begin(&rig, &config);
    begin(&rig.other, KVT_MAINTAIN_STATUS, KVT_NS_PER_S);
    call_run(&rig.other);
    CHECK_CODE(&rig.other.op, KVT_CODE_INVALID_ARGUMENT);
    CHECK(strstr(rig.other.op.message, "tiers.l3.path") != NULL);
    begin(&rig.other, KVT_MAINTAIN_DRAIN, KVT_NS_PER_S);
    rig.other.op.is_admin = false;
    call_run(&rig.other);
    CHECK_CODE(&rig.other.op, KVT_CODE_PERMISSION_DENIED);
    rig_end(&rig);
}

/* ---- scrubbing ------------------------------------------------------------------------------ */

static const struct kvt_ans_maintain *scrub_rounds(struct rig *rig, uint64_t rounds)
{
    const struct kvt_ans_maintain *ans = maintain(rig, KVT_MAINTAIN_STATUS);

    for (uint32_t i = 0; i < 100000 && ans->scrub.rounds < rounds; i++) {
        world_turn(&rig->world);
        ans = maintain(rig, KVT_MAINTAIN_STATUS);
    }
    CHECK(ans->scrub.rounds == rounds);
    return ans;
}

static void test_scrub(void)
{
    const struct kvt_ans_maintain *ans;
    struct rig rig;
    uint64_t checked;

    rig_begin(&rig, &plain);
    rig_store(&rig, 0x101, 16);
    (void)maintain(&rig, KVT_MAINTAIN_DRAIN);
    ans = maintain(&rig, KVT_MAINTAIN_SCRUB_START);
    CHECK(ans->scrub.is_running && ans->scrub.rate_bytes_per_s == 64u << 20); /* no rate is set */
    ans = scrub_rounds(&rig, 2);
    CHECK(ans->scrub.checked_copies == 32 && ans->scrub.checked_bytes == 32 * 4096);
    CHECK(ans->scrub.bad_copies == 0 && ans->scrub.skipped_copies == 0);
    world_check(&rig.world);
    /* Two slots have rotted: found, dropped, and a miss for whoever asks. */
    fake_tier_spoil(rig.world.tiers[KVT_TIER_DISK], 2);
    ans = scrub_rounds(&rig, 3);
    CHECK(ans->scrub.bad_copies == 2);
    CHECK(copies_in(&rig, 3) == 14);
    CHECK(maintain(&rig, KVT_MAINTAIN_STATUS)->drain.copies_left == 2);
    world_lookup(&rig.call, &rig.client, 0x101, 16, false);
    CHECK(rig.call.op.ans.lookup.boundary_tokens == 16 * WORLD_BLOCK_TOKENS); /* L2 has them */
    ans = maintain(&rig, KVT_MAINTAIN_SCRUB_STOP);
    CHECK(!ans->scrub.is_running && ans->scrub.rate_bytes_per_s == 0);
    world_settle(&rig.world);
    checked = maintain(&rig, KVT_MAINTAIN_STATUS)->scrub.checked_copies;
    for (uint32_t i = 0; i < 3000; i++)
        world_turn(&rig.world);
    CHECK(maintain(&rig, KVT_MAINTAIN_STATUS)->scrub.checked_copies == checked);
    rig_end(&rig);
}

/* The rate is kept: 16 slots at a slot a 100 ms take 1.6 s, and an empty L3 is not walked without
 * rest. */
static void test_scrub_rate(void)
{
    struct rig rig;
    uint64_t begin_ns;

    rig_begin(&rig, &plain);
    rig_store(&rig, 0x101, 16);
    (void)maintain(&rig, KVT_MAINTAIN_DRAIN);
    begin(&rig.other, KVT_MAINTAIN_SCRUB_START, KVT_NS_PER_S);
    rig.other.op.req.maintain.rate_bytes_per_s = 10 * L3_SLOT_BYTES;
    begin_ns = rig.world.now_ns;
    call_run(&rig.other);
    CHECK_CODE(&rig.other.op, KVT_CODE_OK);
    CHECK(rig.other.op.ans.maintain.scrub.rate_bytes_per_s == 10 * L3_SLOT_BYTES);
    (void)scrub_rounds(&rig, 1);
    CHECK(rig.world.now_ns - begin_ns >= 1500 * KVT_NS_PER_MS);
    CHECK(rig.world.now_ns - begin_ns <= 1800 * KVT_NS_PER_MS);
    (void)maintain(&rig, KVT_MAINTAIN_SCRUB_STOP);
    rig_end(&rig);

    rig_begin(&rig, &plain);
    begin_ns = rig.world.now_ns;
    (void)maintain(&rig, KVT_MAINTAIN_SCRUB_START);
    (void)scrub_rounds(&rig, 4);
    CHECK(rig.world.now_ns - begin_ns >= 3 * KVT_NS_PER_S);
    (void)maintain(&rig, KVT_MAINTAIN_SCRUB_STOP);
    rig_end(&rig);
}

/* Several ranks: every shard is read, one bad shard costs its copy. And while an engine works. */
static void test_scrub_shards_beside_work(void)
{
    const struct kvt_ans_maintain *ans;
    struct world_config config = plain;
    struct client second;
    struct rig rig;

    config.ranks = 2;
    rig_begin(&rig, &config);
    client_attach(&second, &rig.world, &rig.call, 1, false, 1);
    for (uint64_t tag = 0x100; tag < 0x300; tag += 0x100) {
        struct kvt_handle ticket = world_reserve(&rig.call, &rig.client, tag, 8);

        for (uint32_t rank = 0; rank < 2; rank++) {
            const struct client *client = rank == 0 ? &rig.client : &second;

            for (uint32_t i = 0; i < 8; i++)
                client_fill((struct client *)(uintptr_t)client, 0, tag, i, i);
            world_demote(&rig.call, client, ticket, 0, 8, 0);
            call_run(&rig.call);
            CHECK_CODE(&rig.call.op, KVT_CODE_OK);
        }
        CHECK(maintain(&rig, KVT_MAINTAIN_DRAIN)->drain.copies_left == 0);
        ans = maintain(&rig, KVT_MAINTAIN_SCRUB_START);
    }
    ans = scrub_rounds(&rig, ans->scrub.rounds + 2);
    CHECK(ans->scrub.checked_copies >= 16 && ans->scrub.bad_copies == 0);
    CHECK(ans->scrub.checked_bytes == 2 * 4096 * ans->scrub.checked_copies);
    fake_tier_spoil(rig.world.tiers[KVT_TIER_DISK], 1);
    ans = scrub_rounds(&rig, ans->scrub.rounds + 2);
    CHECK(ans->scrub.bad_copies == 1);
    CHECK(copies_in(&rig, 3) == 15);
    world_check(&rig.world);
    (void)maintain(&rig, KVT_MAINTAIN_SCRUB_STOP);
    client_detach(&second, &rig.call);
    client_unmap(&second);
    rig_end(&rig);
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
