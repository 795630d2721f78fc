/* Promote in place: where blocks lie in L1 is told, and they stay there, whatever else happens,
 * until the lease is released, its engine ends, or the GPU is lost. */
#include <string.h>

#include "tests/common/check.h"
#include "tests/common/engine_world.h"

#define GPUS 2u
#define TAG 0x101u

static const struct world_config exporting = {.seed = 12,
                                              .l1_bytes = GPUS * (256u << 10),
                                              .l2_bytes = 1u << 20,
                                              .l3_bytes = 2u << 20,
                                              .delay_ns_max = KVT_NS_PER_MS,
                                              .ranks = 1,
                                              .gpus = GPUS,
                                              .is_export_allowed = true};

struct fixture {
    struct world world;
    struct client client;
    struct call call;
    uint64_t crowds;
};

static void setup(struct fixture *fix, const struct world_config *config)
{
    fix->crowds = 0;
    world_init(&fix->world, config);
    call_init(&fix->call, &fix->world);
    client_begin_attach_gpu(&fix->client, &fix->world, &fix->call, 1, true, 0, 0);
    call_run(&fix->call);
    CHECK_CODE(&fix->call.op, KVT_CODE_OK);
    fix->client.session = fix->call.op.ans.attach.session;
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

static void store_prompt(struct fixture *fix, uint64_t tag, uint32_t blocks)
{
    struct kvt_handle ticket = world_reserve(&fix->call, &fix->client, tag, blocks);

    for (uint32_t i = 0; i < blocks; i++)
        client_fill(&fix->client, 0, tag, i, i);
    world_demote(&fix->call, &fix->client, ticket, 0, blocks, 0);
    call_run(&fix->call);
    CHECK_CODE(&fix->call.op, KVT_CODE_OK);
}

static void begin_in_place(struct fixture *fix, struct kvt_handle lease, uint32_t blocks)
{
    world_promote(&fix->call, &fix->client, lease, 0, blocks, 0);
    fix->call.op.req.promote.target = KVT_TARGET_L1;
    fix->call.op.req.promote.is_in_place = true;
}

static void in_place(struct fixture *fix, struct kvt_handle lease, uint32_t blocks)
{
    begin_in_place(fix, lease, blocks);
    call_run(&fix->call);
    CHECK_CODE(&fix->call.op, KVT_CODE_OK);
    CHECK(fix->call.op.ans.promote.is_in_place);
}

static uint32_t done_count(const struct fixture *fix)
{
    const struct kvt_api_results *results = &fix->call.op.ans.promote.moves;
    uint32_t count = 0;

    for (uint32_t i = 0; i < results->count[0]; i++)
        count += results->results[0][i] == KVT_MOVE_DONE;
    return count;
}

struct place {
    uint32_t zone;
    uint64_t offset_bytes;
};

static void note_places(const struct fixture *fix, struct place *places, uint32_t blocks)
{
    for (uint32_t i = 0; i < blocks; i++)
        places[i] = (struct place){fix->call.op.ans.promote.in_place[0].zones[i],
                                   fix->call.op.ans.promote.in_place[0].offsets_bytes[i]};
}

/* What a process would read that imported the arena. */
static bool is_there(struct fixture *fix, const struct place *places, uint32_t blocks)
{
    uint64_t zone_bytes = fix->world.config.l1_bytes / GPUS;

    for (uint32_t i = 0; i < blocks; i++)
        if (!world_is_payload(&fix->world,
                              fake_tier_memory(fix->world.tiers[KVT_TIER_DEVICE]) +
                                  places[i].zone * zone_bytes + places[i].offset_bytes,
                              0, TAG, i, 0))
            return false;
    return true;
}

static void release(struct fixture *fix, struct kvt_handle lease)
{
    call_begin(&fix->call, KVT_OP_RELEASE);
    fix->call.op.req.release.session = fix->client.session;
    fix->call.op.req.release.lease = lease;
    call_run(&fix->call);
    CHECK_CODE(&fix->call.op, KVT_CODE_OK);
}

static uint64_t leases(struct fixture *fix)
{
    struct kvt_engine_counts counts;

    kvt_engine_counts(fix->world.engine, &counts);
    return counts.leases;
}

static void pass_time(struct fixture *fix, uint64_t ns)
{
    uint64_t until_ns = fix->world.now_ns + ns;

    while (fix->world.now_ns < until_ns) {
        fix->world.now_ns += 100 * KVT_NS_PER_MS;
        world_turn(&fix->world);
    }
    world_check(&fix->world);
}

/* Everything is thrown out of L1 that may be. */
static void crowd(struct fixture *fix)
{
    for (uint64_t i = 0; i < 12; i++)
        store_prompt(fix, 0x5000 + fix->crowds++ * 0x100, 16);
    world_check(&fix->world);
}

static struct kvt_handle hold_prompt(struct fixture *fix, struct place *places, uint32_t blocks)
{
    struct kvt_handle lease;

    store_prompt(fix, TAG, blocks);
    lease = world_lookup(&fix->call, &fix->client, TAG, blocks, true);
    in_place(fix, lease, blocks);
    CHECK(done_count(fix) == blocks);
    note_places(fix, places, blocks);
    CHECK(is_there(fix, places, blocks));
    return lease;
}

static void test_answer(void)
{
    const struct kvt_ans_promote *ans;
    struct place places[8];
    struct fixture fix;

    setup(&fix, &exporting);
    (void)hold_prompt(&fix, places, 8);
    ans = &fix.call.op.ans.promote;
    CHECK(ans->arenas_count == 1 && ans->arenas[0].zone == 0);
    CHECK(ans->arenas[0].handle[0] == 0xa0 && ans->arenas[0].bytes == 256u << 10);
    CHECK(ans->moved_bytes == 0 && ans->moved_blocks_from[0] == 8);
    for (uint32_t i = 0; i < 8; i++)
        for (uint32_t k = 0; k < i; k++)
            CHECK(places[i].offset_bytes != places[k].offset_bytes);
    teardown(&fix);
}

/* From L2 and L3 they come up first. */
static void test_raised(void)
{
    struct kvt_handle lease;
    struct place places[4];
    struct fixture fix;

    setup(&fix, &exporting);
    store_prompt(&fix, TAG, 4);
    call_begin(&fix.call, KVT_OP_DEMOTE);
    fix.call.op.req.demote.session = fix.client.session;
    fix.call.op.req.demote.prefix = world_prefix(&fix.call, TAG, 4);
    fix.call.op.req.demote.is_between_tiers = true;
    fix.call.op.req.demote.from_tiers = KVT_TIER_BIT_L1 | KVT_TIER_BIT_L2;
    fix.call.op.req.demote.to_tier = KVT_TIER_BIT_L3;
    call_run(&fix.call);
    CHECK_CODE(&fix.call.op, KVT_CODE_OK);
    lease = world_lookup(&fix.call, &fix.client, TAG, 4, true);
    CHECK(fix.call.op.ans.lookup.components[0].blocks_at[2] == 4);
    in_place(&fix, lease, 4);
    CHECK(done_count(&fix) == 4);
    note_places(&fix, places, 4);
    CHECK(is_there(&fix, places, 4));
    teardown(&fix);
}

/* Time, other engines' blocks, a Demote that moves, Evict and Reset: nothing moves them. Release
 * ends it, and then they go like all others. */
static void test_stays(void)
{
    struct kvt_handle lease;
    struct place places[8];
    struct fixture fix;

    setup(&fix, &exporting);
    lease = hold_prompt(&fix, places, 8);
    pass_time(&fix, 700 * KVT_NS_PER_S); /* beyond the longest lease */
    CHECK(leases(&fix) == 1);
    crowd(&fix);
    CHECK(is_there(&fix, places, 8));
    call_begin(&fix.call, KVT_OP_DEMOTE);
    fix.call.op.req.demote.session = fix.client.session;
    fix.call.op.req.demote.prefix = world_prefix(&fix.call, TAG, 8);
    fix.call.op.req.demote.is_between_tiers = true;
    fix.call.op.req.demote.from_tiers = KVT_TIER_BIT_L1;
    fix.call.op.req.demote.to_tier = KVT_TIER_BIT_L2;
    call_run(&fix.call);
    CHECK_CODE(&fix.call.op, KVT_CODE_OK);
    crowd(&fix);
    CHECK(is_there(&fix, places, 8));
    call_begin(&fix.call, KVT_OP_RESET);
    fix.call.op.req.reset.ns = fix.world.ns;
    call_run(&fix.call);
    CHECK_CODE(&fix.call.op, KVT_CODE_OK);
    pass_time(&fix, KVT_NS_PER_S);
    crowd(&fix);
    CHECK(is_there(&fix, places, 8));
    CHECK(leases(&fix) == 1);
    /* Of an older epoch nothing new is given. */
    begin_in_place(&fix, lease, 4);
    call_run(&fix.call);
    CHECK_CODE(&fix.call.op, KVT_CODE_OK);
    CHECK(fix.call.op.ans.promote.moves.results[0][0] == KVT_MOVE_ABORTED);
    CHECK(!fix.call.op.ans.promote.is_in_place);
    release(&fix, lease);
    CHECK(leases(&fix) == 0);
    world_check(&fix.world);
    crowd(&fix);
    crowd(&fix);
    CHECK(!is_there(&fix, places, 8));
    teardown(&fix);
}

/* Its engine's end is a release, too. */
static void test_engine_ends(void)
{
    struct place places[8];
    struct client other;
    struct fixture fix;

    setup(&fix, &exporting);
    client_attach(&other, &fix.world, &fix.call, 2, true, 0);
    (void)hold_prompt(&fix, places, 8);
    client_detach(&fix.client, &fix.call);
    world_settle(&fix.world);
    world_check(&fix.world);
    CHECK(leases(&fix) == 0);
    client_unmap(&fix.client);
    fix.client = other;
    teardown(&fix);
}

/* The GPU is lost: the lease ends, all sessions of the engine hear it, and L1 is used again. */
static void test_loss(void)
{
    struct kvt_store_stats stats;
    struct kvt_handle lease;
    struct place places[8];
    struct client scheduler;
    struct fixture fix;

    setup(&fix, &exporting);
    client_attach(&scheduler, &fix.world, &fix.call, 1, true, KVT_RANK_NONE);
    lease = hold_prompt(&fix, places, 8);
    fake_tier_lose_zone(fix.world.tiers[KVT_TIER_DEVICE], 1); /* the other one */
    pass_time(&fix, KVT_NS_PER_S);
    CHECK(leases(&fix) == 1 && is_there(&fix, places, 8));
    CHECK(fix.world.notices[KVT_NOTICE_LEASE_ENDED] == 0);
    fake_tier_lose_zone(fix.world.tiers[KVT_TIER_DEVICE], 0);
    fake_tier_revive_zone(fix.world.tiers[KVT_TIER_DEVICE], 0);
    pass_time(&fix, KVT_NS_PER_S);
    CHECK(leases(&fix) == 0);
    CHECK(fix.world.notices[KVT_NOTICE_LEASE_ENDED] == 1);
    CHECK(fix.world.notices[KVT_NOTICE_REGIONS_LOST] == 2);
    kvt_engine_store_stats(fix.world.engine, &stats);
    CHECK(stats.l1_zones[0].out_ns == 0 && stats.l1_zones[0].incarnation == 1);
    release(&fix, lease); /* may be repeated */
    client_detach(&scheduler, &fix.call);
    teardown(&fix);
}

#define MANY 300u

/* More leases than notices a session may have waiting, and than one turn ends: readers without
 * memory on the GPU hear of it at once, once, and what they ask meanwhile holds nothing. */
static void test_loss_of_many(void)
{
    struct world_config config = exporting;
    struct client scheduler, reader;
    struct fixture fix;

    config.held_bytes_max = 1u << 30;
    config.l2_bytes = 4u << 20; /* half of it may be leased */
    setup(&fix, &config);
    store_prompt(&fix, TAG, 4);
    client_attach(&scheduler, &fix.world, &fix.call, 2, true, KVT_RANK_NONE);
    client_attach(&reader, &fix.world, &fix.call, 2, true, 0);
    for (uint32_t i = 0; i < MANY; i++) {
        begin_in_place(&fix, world_lookup(&fix.call, &reader, TAG, 1, true), 1);
        fix.call.op.req.promote.session = reader.session;
        call_run(&fix.call);
        CHECK_CODE(&fix.call.op, KVT_CODE_OK);
        CHECK(done_count(&fix) == 1);
    }
    world_check(&fix.world);
    fake_tier_lose_zone(fix.world.tiers[KVT_TIER_DEVICE], 1); /* nothing of theirs */
    world_turn(&fix.world);
    CHECK(fix.world.notices[KVT_NOTICE_REGIONS_LOST] == 0);
    fake_tier_lose_zone(fix.world.tiers[KVT_TIER_DEVICE], 0);
    world_turn(&fix.world);
    CHECK(fix.world.notices[KVT_NOTICE_REGIONS_LOST] ==
          3);                          /* two readers, and who has memory there */
    CHECK(leases(&fix) >= MANY - 256); /* bounded */
    world_check(&fix.world);
    pass_time(&fix, KVT_NS_PER_S);
    CHECK(leases(&fix) == 0);
    CHECK(fix.world.notices[KVT_NOTICE_LEASE_ENDED] == MANY);
    CHECK(fix.world.notices[KVT_NOTICE_REGIONS_LOST] == 3);
    client_detach(&reader, &fix.call);
    client_detach(&scheduler, &fix.call);
    client_unmap(&reader);
    teardown(&fix);
}

/* It was lost while the blocks came up: what is told is of one incarnation or not at all. */
static void test_lost_meanwhile(void)
{
    struct kvt_handle lease;
    struct fixture fix;

    setup(&fix, &exporting);
    store_prompt(&fix, TAG, 4);
    lease = world_lookup(&fix.call, &fix.client, TAG, 4, true);
    begin_in_place(&fix, lease, 4);
    call_submit(&fix.call);
    fake_tier_lose_zone(fix.world.tiers[KVT_TIER_DEVICE], 0);
    fake_tier_revive_zone(fix.world.tiers[KVT_TIER_DEVICE], 0);
    call_wait(&fix.call);
    CHECK_CODE(&fix.call.op, KVT_CODE_OK);
    CHECK(done_count(&fix) == 0);
    for (uint32_t i = 0; i < 4; i++)
        CHECK(fix.call.op.ans.promote.in_place[0].offsets_bytes[i] == 0);
    world_check(&fix.world);
    teardown(&fix);
}

static void test_limit(void)
{
    struct world_config config = exporting;
    struct kvt_handle lease;
    struct fixture fix;

    config.held_bytes_max = 3 * 4096;
    setup(&fix, &config);
    store_prompt(&fix, TAG, 8);
    lease = world_lookup(&fix.call, &fix.client, TAG, 8, true);
    in_place(&fix, lease, 8);
    CHECK(done_count(&fix) == 3);
    CHECK(fix.call.op.ans.promote.moves.results[0][3] == KVT_MOVE_NO_ROOM);
    release(&fix, lease);
    lease = world_lookup(&fix.call, &fix.client, TAG, 2, true);
    in_place(&fix, lease, 2);
    CHECK(done_count(&fix) == 2);
    teardown(&fix);
}

/* A lease that asks again holds no more than before, and is told the same. */
static void test_again(void)
{
    struct world_config config = exporting;
    struct place places[8], again[8];
    struct kvt_handle lease;
    struct fixture fix;

    config.held_bytes_max = 10 * 4096;
    setup(&fix, &config);
    lease = hold_prompt(&fix, places, 8);
    for (uint32_t i = 0; i < 20; i++) {
        in_place(&fix, lease, 8);
        CHECK(done_count(&fix) == 8);
        note_places(&fix, again, 8);
        for (uint32_t k = 0; k < 8; k++)
            CHECK(again[k].zone == places[k].zone &&
                  again[k].offset_bytes == places[k].offset_bytes);
    }
    world_check(&fix.world);
    in_place(&fix, world_lookup(&fix.call, &fix.client, TAG, 8, true), 8);
    CHECK(done_count(&fix) == 2); /* another lease's count again */
    release(&fix, lease);
    crowd(&fix);
    CHECK(is_there(&fix, places, 2)); /* and stay when the first is gone */
    teardown(&fix);
}

/* Of two ranks one holds: both shards are pinned, and counted; the other one's come with them. */
static void test_ranks(void)
{
    struct world_config config = exporting;
    struct client rank1;
    struct kvt_handle lease, ticket;
    struct fixture fix;

    config.ranks = 2;
    config.held_bytes_max = 5 * 4096;
    setup(&fix, &config);
    client_begin_attach_gpu(&rank1, &fix.world, &fix.call, 1, false, 1, 1);
    call_run(&fix.call);
    CHECK_CODE(&fix.call.op, KVT_CODE_OK);
    rank1.session = fix.call.op.ans.attach.session;
    ticket = world_reserve(&fix.call, &fix.client, TAG, 4);
    for (uint32_t i = 0; i < 4; i++) {
        client_fill(&fix.client, 0, TAG, i, i);
        client_fill(&rank1, 0, TAG, i, i);
    }
    world_demote(&fix.call, &fix.client, ticket, 0, 4, 0);
    call_run(&fix.call);
    CHECK_CODE(&fix.call.op, KVT_CODE_OK);
    world_demote(&fix.call, &rank1, ticket, 0, 4, 0);
    call_run(&fix.call);
    CHECK_CODE(&fix.call.op, KVT_CODE_OK);
    lease = world_lookup(&fix.call, &fix.client, TAG, 4, true);
    for (uint32_t rank = 0; rank < 2; rank++) {
        begin_in_place(&fix, lease, 4);
        fix.call.op.req.promote.session = rank == 0 ? fix.client.session : rank1.session;
        call_run(&fix.call);
        CHECK_CODE(&fix.call.op, KVT_CODE_OK);
        CHECK(done_count(&fix) == 2);
        CHECK(fix.call.op.ans.promote.in_place[0].zones[0] == rank);
        world_check(&fix.world);
    }
    client_detach(&rank1, &fix.call);
    client_unmap(&rank1);
    teardown(&fix);
}

/* More than one slice gives back: leases of an engine that ends. */
static void test_slices(void)
{
    struct world_config config = exporting;
    struct client other;
    struct fixture fix;

    config.held_bytes_max = 1u << 30;
    config.l2_bytes = 8u << 20; /* half of it may be leased */
    setup(&fix, &config);
    client_attach(&other, &fix.world, &fix.call, 2, true, 0);
    store_prompt(&fix, TAG, 32);
    for (uint32_t i = 0; i < 20; i++)
        in_place(&fix, world_lookup(&fix.call, &fix.client, TAG, 32, true), 32);
    CHECK(done_count(&fix) == 32);
    client_detach(&fix.client, &fix.call);
    world_check(&fix.world);
    CHECK(leases(&fix) >= 10); /* dead, not buried */
    world_settle(&fix.world);
    world_check(&fix.world);
    CHECK(leases(&fix) == 0);
    client_unmap(&fix.client);
    fix.client = other;
    teardown(&fix);
}

static void refuse(struct fixture *fix, enum kvt_code code, const char *text)
{
    call_run(&fix->call);
    CHECK_CODE(&fix->call.op, code);
    CHECK(strstr(fix->call.op.message, text) != NULL);
}

static void test_refusals(void)
{
    struct world_config config = exporting;
    struct kvt_handle lease;
    struct client scheduler;
    struct fixture fix;

    setup(&fix, &config);
    store_prompt(&fix, TAG, 4);
    lease = world_lookup(&fix.call, &fix.client, TAG, 4, true);
    begin_in_place(&fix, lease, 4);
    fix.call.op.req.promote.target = KVT_TARGET_L2;
    refuse(&fix, KVT_CODE_INVALID_ARGUMENT, "target L1");
    begin_in_place(&fix, KVT_HANDLE_NONE, 4);
    fix.call.op.req.promote.prefix = world_prefix(&fix.call, TAG, 4);
    refuse(&fix, KVT_CODE_INVALID_ARGUMENT, "a lease");
    begin_in_place(&fix, lease, 4);
    fix.call.op.req.promote.moves_count = 0;
    refuse(&fix, KVT_CODE_INVALID_ARGUMENT, "moves");
    client_attach(&scheduler, &fix.world, &fix.call, 1, true, KVT_RANK_NONE);
    begin_in_place(&fix, lease, 4);
    fix.call.op.req.promote.session = scheduler.session;
    refuse(&fix, KVT_CODE_FAILED_PRECONDITION, "without a rank");
    client_detach(&scheduler, &fix.call);
    teardown(&fix);
    config.is_export_allowed = false;
    setup(&fix, &config);
    store_prompt(&fix, TAG, 4);
    lease = world_lookup(&fix.call, &fix.client, TAG, 4, true);
    begin_in_place(&fix, lease, 4);
    refuse(&fix, KVT_CODE_FAILED_PRECONDITION, "tiers.l1.export");
    teardown(&fix);
}

int main(void)
{
    test_answer();
    test_raised();
    test_stays();
    test_engine_ends();
    test_loss();
    test_loss_of_many();
    test_lost_meanwhile();
    test_limit();
    test_again();
    test_ranks();
    test_slices();
    test_refusals();
    return 0;
}
