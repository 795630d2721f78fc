/* Promote in place: where blocks lie in L1 is told, and they stay there, whatever else happens,
 * until the lease is released, its engine ends, or the GPU is lost. */
#include <string.h>

#include "tests/common/check.h"
#include "tests/common/engine_rig.h"

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

static void in_place(struct rig *rig, struct kvt_handle lease, uint32_t blocks)
{
    rig_begin_in_place(rig, &rig->client, lease, blocks);
    call_run(&rig->call);
    CHECK_CODE(&rig->call.op, KVT_CODE_OK);
    CHECK(rig->call.op.ans.promote.is_in_place);
}

static uint32_t done_count(const struct rig *rig)
{
    const struct kvt_api_results *results = &rig->call.op.ans.promote.moves;
    uint32_t count = 0;

    for (uint32_t i = 0; i < results->count[0]; i++)
        count += results->results[0][i] == KVT_MOVE_DONE;
    return count;
}

struct place {
    uint32_t zone;
    uint64_t offset_bytes;
};

static void note_places(const struct rig *rig, struct place *places, uint32_t blocks)
{
    for (uint32_t i = 0; i < blocks; i++)
        places[i] = (struct place){rig->call.op.ans.promote.in_place[0].zones[i],
                                   rig->call.op.ans.promote.in_place[0].offsets_bytes[i]};
}

/* What a process would read that imported the arena. */
static bool is_there(struct rig *rig, const struct place *places, uint32_t blocks)
{
    uint64_t zone_bytes = rig->world.config.l1_bytes / GPUS;

    for (uint32_t i = 0; i < blocks; i++)
        if (!world_is_payload(&rig->world,
                              fake_tier_memory(rig->world.tiers[KVT_TIER_DEVICE]) +
                                  places[i].zone * zone_bytes + places[i].offset_bytes,
                              0, TAG, i, 0))
            return false;
    return true;
}

static void pass_time(struct rig *rig, uint64_t ns)
{
    uint64_t until_ns = rig->world.now_ns + ns;

    while (rig->world.now_ns < until_ns) {
        rig->world.now_ns += 100 * KVT_NS_PER_MS;
        world_turn(&rig->world);
    }
    world_check(&rig->world);
}

/* Everything is thrown out of L1 that may be. @time: 0, 1, .., for prompts that are new. */
static void crowd(struct rig *rig, uint64_t time)
{
    for (uint64_t i = 0; i < 12; i++)
        rig_store(rig, 0x5000 + (time * 12 + i) * 0x100, 16);
    world_check(&rig->world);
}

static struct kvt_handle hold_prompt(struct rig *rig, struct place *places, uint32_t blocks)
{
    struct kvt_handle lease;

    rig_store(rig, TAG, blocks);
    lease = world_lookup(&rig->call, &rig->client, TAG, blocks, true);
    in_place(rig, lease, blocks);
    CHECK(done_count(rig) == blocks);
    note_places(rig, places, blocks);
    CHECK(is_there(rig, places, blocks));
    return lease;
}

static void test_answer(void)
{
    const struct kvt_ans_promote *ans;
    struct place places[8];
    struct rig rig;

    rig_begin_gpu(&rig, &exporting, 0);
    (void)hold_prompt(&rig, places, 8);
    ans = &rig.call.op.ans.promote;
    CHECK(ans->arenas_count == 1 && ans->arenas[0].zone == 0);
    CHECK(ans->arenas[0].handle[0] == 0xa0 && ans->arenas[0].bytes == 256u << 10);
    CHECK(ans->moved_bytes == 0 && ans->moved_blocks_from[0] == 8);
    for (uint32_t i = 0; i < 8; i++)
        for (uint32_t k = 0; k < i; k++)
            CHECK(places[i].offset_bytes != places[k].offset_bytes);
    rig_end(&rig);
}

/* From L2 and L3 they come up first. */
static void test_raised(void)
{
    struct kvt_handle lease;
    struct place places[4];
    struct rig rig;

    rig_begin_gpu(&rig, &exporting, 0);
    rig_store(&rig, TAG, 4);
    rig_lower(&rig, TAG, 4, KVT_TIER_BIT_L1 | KVT_TIER_BIT_L2, KVT_TIER_BIT_L3);
    lease = world_lookup(&rig.call, &rig.client, TAG, 4, true);
    CHECK(rig.call.op.ans.lookup.components[0].blocks_at[2] == 4);
    in_place(&rig, lease, 4);
    CHECK(done_count(&rig) == 4);
    note_places(&rig, places, 4);
    CHECK(is_there(&rig, places, 4));
    rig_end(&rig);
}

/* Time, other engines' blocks, a Demote that moves, Evict and Reset: nothing moves them. Release
 * ends it, and then they go like all others. */
static void test_stays(void)
{
    struct kvt_handle lease;
    struct place places[8];
    struct rig rig;

    rig_begin_gpu(&rig, &exporting, 0);
    lease = hold_prompt(&rig, places, 8);
    pass_time(&rig, 700 * KVT_NS_PER_S); /* beyond the longest lease */
    CHECK(rig_leases(&rig) == 1);
    crowd(&rig, 0);
    CHECK(is_there(&rig, places, 8));
    rig_lower(&rig, TAG, 8, KVT_TIER_BIT_L1, KVT_TIER_BIT_L2);
    crowd(&rig, 1);
    CHECK(is_there(&rig, places, 8));
    call_begin(&rig.call, KVT_OP_RESET);
    rig.call.op.req.reset.ns = rig.world.ns;
    call_run(&rig.call);
    CHECK_CODE(&rig.call.op, KVT_CODE_OK);
    pass_time(&rig, KVT_NS_PER_S);
    crowd(&rig, 2);
    CHECK(is_there(&rig, places, 8));
    CHECK(rig_leases(&rig) == 1);
    /* Of an older epoch nothing new is given. */
    rig_begin_in_place(&rig, &rig.client, lease, 4);
    call_run(&rig.call);
    CHECK_CODE(&rig.call.op, KVT_CODE_OK);
    CHECK(rig.call.op.ans.promote.moves.results[0][0] == KVT_MOVE_ABORTED);
    CHECK(!rig.call.op.ans.promote.is_in_place);
    rig_release(&rig, &rig.client, lease);
    CHECK(rig_leases(&rig) == 0);
    world_check(&rig.world);
    crowd(&rig, 3);
    crowd(&rig, 4);
    CHECK(!is_there(&rig, places, 8));
    rig_end(&rig);
}

/* Its engine's end is a release, too. */
static void test_engine_ends(void)
{
    struct place places[8];
    struct client other;
    struct rig rig;

    rig_begin_gpu(&rig, &exporting, 0);
    client_attach(&other, &rig.world, &rig.call, 2, true, 0);
    (void)hold_prompt(&rig, places, 8);
    client_detach(&rig.client, &rig.call);
    world_settle(&rig.world);
    world_check(&rig.world);
    CHECK(rig_leases(&rig) == 0);
    client_unmap(&rig.client);
    rig.client = other;
    rig_end(&rig);
}

/* The GPU is lost: the lease ends, all sessions of the engine hear it, and L1 is used again. */
static void test_loss(void)
{
    struct kvt_store_stats stats;
    struct kvt_handle lease;
    struct place places[8];
    struct client scheduler;
    struct rig rig;

    rig_begin_gpu(&rig, &exporting, 0);
    client_attach(&scheduler, &rig.world, &rig.call, 1, true, KVT_RANK_NONE);
    lease = hold_prompt(&rig, places, 8);
    fake_tier_lose_zone(rig.world.tiers[KVT_TIER_DEVICE], 1); /* the other one */
    pass_time(&rig, KVT_NS_PER_S);
    CHECK(rig_leases(&rig) == 1 && is_there(&rig, places, 8));
    CHECK(rig.world.notices[KVT_NOTICE_LEASE_ENDED] == 0);
    fake_tier_lose_zone(rig.world.tiers[KVT_TIER_DEVICE], 0);
    fake_tier_revive_zone(rig.world.tiers[KVT_TIER_DEVICE], 0);
    pass_time(&rig, KVT_NS_PER_S);
    CHECK(rig_leases(&rig) == 0);
    CHECK(rig.world.notices[KVT_NOTICE_LEASE_ENDED] == 1);
    CHECK(rig.world.notices[KVT_NOTICE_REGIONS_LOST] == 2);
    kvt_engine_store_stats(rig.world.engine, &stats);
    CHECK(stats.l1_zones[0].out_ns == 0 && stats.l1_zones[0].incarnation == 1);
    rig_release(&rig, &rig.client, lease); /* may be repeated */
    client_detach(&scheduler, &rig.call);
    rig_end(&rig);
}

#define MANY 300u

/* More leases than notices a session may have waiting, and than one turn ends: readers without
 * memory on the GPU hear of it at once, once, and what they ask meanwhile holds nothing. */
static void test_loss_of_many(void)
{
    struct world_config config = exporting;
    struct client scheduler, reader;
    struct rig rig;

    config.held_bytes_max = 1u << 30;
    config.l2_bytes = 4u << 20; /* half of it may be leased */
    rig_begin_gpu(&rig, &config, 0);
    rig_store(&rig, TAG, 4);
    client_attach(&scheduler, &rig.world, &rig.call, 2, true, KVT_RANK_NONE);
    client_attach(&reader, &rig.world, &rig.call, 2, true, 0);
    for (uint32_t i = 0; i < MANY; i++) {
        rig_begin_in_place(&rig, &reader, world_lookup(&rig.call, &reader, TAG, 1, true), 1);
        call_run(&rig.call);
        CHECK_CODE(&rig.call.op, KVT_CODE_OK);
        CHECK(done_count(&rig) == 1);
    }
    world_check(&rig.world);
    fake_tier_lose_zone(rig.world.tiers[KVT_TIER_DEVICE], 1); /* nothing of theirs */
    world_turn(&rig.world);
    CHECK(rig.world.notices[KVT_NOTICE_REGIONS_LOST] == 0);
    fake_tier_lose_zone(rig.world.tiers[KVT_TIER_DEVICE], 0);
    world_turn(&rig.world);
    CHECK(rig.world.notices[KVT_NOTICE_REGIONS_LOST] ==
          3);                              /* two readers, and who has memory there */
    CHECK(rig_leases(&rig) >= MANY - 256); /* bounded */
    world_check(&rig.world);
    pass_time(&rig, KVT_NS_PER_S);
    CHECK(rig_leases(&rig) == 0);
    CHECK(rig.world.notices[KVT_NOTICE_LEASE_ENDED] == MANY);
    CHECK(rig.world.notices[KVT_NOTICE_REGIONS_LOST] == 3);
    client_detach(&reader, &rig.call);
    client_detach(&scheduler, &rig.call);
    client_unmap(&reader);
    rig_end(&rig);
}

/* It was lost while the blocks came up: what is told is of one incarnation or not at all. */
static void test_lost_meanwhile(void)
{
    struct kvt_handle lease;
    struct rig rig;

    rig_begin_gpu(&rig, &exporting, 0);
    rig_store(&rig, TAG, 4);
    lease = world_lookup(&rig.call, &rig.client, TAG, 4, true);
    rig_begin_in_place(&rig, &rig.client, lease, 4);
    call_submit(&rig.call);
    fake_tier_lose_zone(rig.world.tiers[KVT_TIER_DEVICE], 0);
    fake_tier_revive_zone(rig.world.tiers[KVT_TIER_DEVICE], 0);
    call_wait(&rig.call);
    CHECK_CODE(&rig.call.op, KVT_CODE_OK);
    CHECK(done_count(&rig) == 0);
    for (uint32_t i = 0; i < 4; i++)
        CHECK(rig.call.op.ans.promote.in_place[0].offsets_bytes[i] == 0);
    world_check(&rig.world);
    rig_end(&rig);
}

static void test_limit(void)
{
    struct world_config config = exporting;
    struct kvt_handle lease;
    struct rig rig;

    config.held_bytes_max = 3 * 4096;
    rig_begin_gpu(&rig, &config, 0);
    rig_store(&rig, TAG, 8);
    lease = world_lookup(&rig.call, &rig.client, TAG, 8, true);
    in_place(&rig, lease, 8);
    CHECK(done_count(&rig) == 3);
    CHECK(rig.call.op.ans.promote.moves.results[0][3] == KVT_MOVE_NO_ROOM);
    rig_release(&rig, &rig.client, lease);
    lease = world_lookup(&rig.call, &rig.client, TAG, 2, true);
    in_place(&rig, lease, 2);
    CHECK(done_count(&rig) == 2);
    rig_end(&rig);
}

/* A lease that asks again holds no more than before, and is told the same. */
static void test_again(void)
{
    struct world_config config = exporting;
    struct place places[8], again[8];
    struct kvt_handle lease;
    struct rig rig;

    config.held_bytes_max = 10 * 4096;
    rig_begin_gpu(&rig, &config, 0);
    lease = hold_prompt(&rig, places, 8);
    for (uint32_t i = 0; i < 20; i++) {
        in_place(&rig, lease, 8);
        CHECK(done_count(&rig) == 8);
        note_places(&rig, again, 8);
        for (uint32_t k = 0; k < 8; k++)
            CHECK(again[k].zone == places[k].zone &&
                  again[k].offset_bytes == places[k].offset_bytes);
    }
    world_check(&rig.world);
    in_place(&rig, world_lookup(&rig.call, &rig.client, TAG, 8, true), 8);
    CHECK(done_count(&rig) == 2); /* another lease's count again */
    rig_release(&rig, &rig.client, lease);
    crowd(&rig, 0);
    CHECK(is_there(&rig, places, 2)); /* and stay when the first is gone */
    rig_end(&rig);
}

/* Of two ranks one holds: both shards are pinned, and counted; the other one's come with them. */
static void test_ranks(void)
{
    struct world_config config = exporting;
    struct client rank1;
    struct kvt_handle lease, ticket;
    struct rig rig;

    config.ranks = 2;
    config.held_bytes_max = 5 * 4096;
    rig_begin_gpu(&rig, &config, 0);
    rig_join_gpu(&rig, &rank1, 1, false, 1, 1);
    ticket = world_reserve(&rig.call, &rig.client, TAG, 4);
    for (uint32_t i = 0; i < 4; i++) {
        client_fill(&rig.client, 0, TAG, i, i);
        client_fill(&rank1, 0, TAG, i, i);
    }
    rig_demote(&rig, &rig.client, ticket, 0, 4);
    rig_demote(&rig, &rank1, ticket, 0, 4);
    lease = world_lookup(&rig.call, &rig.client, TAG, 4, true);
    for (uint32_t rank = 0; rank < 2; rank++) {
        rig_begin_in_place(&rig, rank == 0 ? &rig.client : &rank1, lease, 4);
        call_run(&rig.call);
        CHECK_CODE(&rig.call.op, KVT_CODE_OK);
        CHECK(done_count(&rig) == 2);
        CHECK(rig.call.op.ans.promote.in_place[0].zones[0] == rank);
        world_check(&rig.world);
    }
    rig_part(&rig, &rank1);
    rig_end(&rig);
}

/* More than one slice gives back: leases of an engine that ends. */
static void test_slices(void)
{
    struct world_config config = exporting;
    struct client other;
    struct rig rig;

    config.held_bytes_max = 1u << 30;
    config.l2_bytes = 8u << 20; /* half of it may be leased */
    rig_begin_gpu(&rig, &config, 0);
    client_attach(&other, &rig.world, &rig.call, 2, true, 0);
    rig_store(&rig, TAG, 32);
    for (uint32_t i = 0; i < 20; i++)
        in_place(&rig, world_lookup(&rig.call, &rig.client, TAG, 32, true), 32);
    CHECK(done_count(&rig) == 32);
    client_detach(&rig.client, &rig.call);
    world_check(&rig.world);
    CHECK(rig_leases(&rig) >= 10); /* dead, not buried */
    world_settle(&rig.world);
    world_check(&rig.world);
    CHECK(rig_leases(&rig) == 0);
    client_unmap(&rig.client);
    rig.client = other;
    rig_end(&rig);
}

static void refuse(struct rig *rig, enum kvt_code code, const char *text)
{
    call_run(&rig->call);
    CHECK_CODE(&rig->call.op, code);
    CHECK(strstr(rig->call.op.message, text) != NULL);
}

static void test_refusals(void)
{
    struct world_config config = exporting;
    struct kvt_handle lease;
    struct client scheduler;
    struct rig rig;

    rig_begin_gpu(&rig, &config, 0);
    rig_store(&rig, TAG, 4);
    lease = world_lookup(&rig.call, &rig.client, TAG, 4, true);
    rig_begin_in_place(&rig, &rig.client, lease, 4);
    rig.call.op.req.promote.target = KVT_TARGET_L2;
    refuse(&rig, KVT_CODE_INVALID_ARGUMENT, "target L1");
    rig_begin_in_place(&rig, &rig.client, KVT_HANDLE_NONE, 4);
    rig.call.op.req.promote.prefix = world_prefix(&rig.call, TAG, 4);
    refuse(&rig, KVT_CODE_INVALID_ARGUMENT, "a lease");
    rig_begin_in_place(&rig, &rig.client, lease, 4);
    rig.call.op.req.promote.moves_count = 0;
    refuse(&rig, KVT_CODE_INVALID_ARGUMENT, "moves");
    client_attach(&scheduler, &rig.world, &rig.call, 1, true, KVT_RANK_NONE);
    rig_begin_in_place(&rig, &rig.client, lease, 4);
    rig.call.op.req.promote.session = scheduler.session;
    refuse(&rig, KVT_CODE_FAILED_PRECONDITION, "without a rank");
    client_detach(&scheduler, &rig.call);
    rig_end(&rig);
    config.is_export_allowed = false;
    rig_begin_gpu(&rig, &config, 0);
    rig_store(&rig, TAG, 4);
    lease = world_lookup(&rig.call, &rig.client, TAG, 4, true);
    rig_begin_in_place(&rig, &rig.client, lease, 4);
    refuse(&rig, KVT_CODE_FAILED_PRECONDITION, "tiers.l1.export");
    rig_end(&rig);
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
