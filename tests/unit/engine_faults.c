/* What goes wrong between requests: shared transfers, cancels, deadlines, leases and tickets that
 * end at the wrong moment, engines that die, a Reset in the middle. */
#include <string.h>

#include "tests/common/check.h"
#include "tests/common/engine_world.h"

#define SLOW_NS (50 * KVT_NS_PER_MS)

struct fixture {
    struct world world;
    struct client a, b; /* two engines; in worlds of two ranks: two ranks of one engine */
    struct call call, other, third;
};

static void setup(struct fixture *fix, const struct world_config *config)
{
    world_init(&fix->world, config);
    call_init(&fix->call, &fix->world);
    call_init(&fix->other, &fix->world);
    call_init(&fix->third, &fix->world);
    client_attach(&fix->a, &fix->world, &fix->call, 1, true, 0);
    client_attach(&fix->b, &fix->world, &fix->call, config->ranks > 1 ? 1 : 2, config->ranks == 1,
                  config->ranks > 1 ? 1 : 0);
}

static void teardown(struct fixture *fix)
{
    client_detach(&fix->a, &fix->call);
    client_detach(&fix->b, &fix->call);
    world_settle(&fix->world);
    world_check(&fix->world);
    client_unmap(&fix->a);
    client_unmap(&fix->b);
    call_deinit(&fix->call);
    call_deinit(&fix->other);
    call_deinit(&fix->third);
    world_deinit(&fix->world);
}

static void store_prompt(struct fixture *fix, uint64_t tag, uint32_t blocks)
{
    struct kvt_handle ticket = world_reserve(&fix->call, &fix->a, tag, blocks);

    for (uint32_t i = 0; i < blocks; i++)
        client_fill(&fix->a, 0, tag, i, i);
    world_demote(&fix->call, &fix->a, ticket, 0, blocks, 0);
    fix->call.op.deadline_ns = fix->world.now_ns + 60 * KVT_NS_PER_S;
    call_run(&fix->call);
    CHECK_CODE(&fix->call.op, KVT_CODE_OK);
    for (uint32_t i = 0; i < blocks; i++)
        CHECK(fix->call.op.ans.demote.moves.results[0][i] == KVT_MOVE_DONE);
}

static uint32_t count_of(const struct kvt_api_results *results, enum kvt_move_result wanted)
{
    uint32_t count = 0;

    for (uint32_t i = 0; i < results->count[0]; i++)
        count += results->results[0][i] == wanted;
    return count;
}

static void to_disk(struct fixture *fix, uint64_t tag, uint32_t blocks)
{
    struct kvt_req_demote *req = &fix->call.op.req.demote;

    call_begin(&fix->call, KVT_OP_DEMOTE);
    req->session = fix->a.session;
    req->prefix = world_prefix(&fix->call, tag, blocks);
    req->is_between_tiers = true;
    req->from_tiers = KVT_TIER_BIT_L1 | KVT_TIER_BIT_L2;
    req->to_tier = KVT_TIER_BIT_L3;
    call_run(&fix->call);
    CHECK_CODE(&fix->call.op, KVT_CODE_OK);
    world_lookup(&fix->call, &fix->a, tag, blocks, false);
    CHECK(fix->call.op.ans.lookup.components[0].blocks_at[2] == blocks);
}

static uint64_t shared_transfers(struct fixture *fix)
{
    const struct kvt_ans_stats *ans = &fix->third.op.ans.stats;

    call_begin(&fix->third, KVT_OP_STATS);
    call_run(&fix->third);
    CHECK_CODE(&fix->third.op, KVT_CODE_OK);
    for (uint32_t i = 0; i < ans->counters_count; i++) {
        if (strcmp(ans->counters[i].name, "transfers_shared") == 0)
            return ans->counters[i].value;
    }
    CHECK(false);
    return 0;
}

static const struct world_config one_rank = {
    .seed = 5, .l2_bytes = 1u << 20, .l3_bytes = 4u << 20, .delay_ns_max = SLOW_NS, .ranks = 1};

/* Two engines raise the same blocks; one of them is cancelled. Each block is read once, and the
 * copy stays usable. */
static void test_coalesce_and_cancel(void)
{
    struct fixture fix;
    uint64_t before;

    setup(&fix, &one_rank);
    store_prompt(&fix, 0x101, 4);
    to_disk(&fix, 0x101, 4);
    before = shared_transfers(&fix);
    world_promote(&fix.call, &fix.a, KVT_HANDLE_NONE, 0, 0, 0);
    fix.call.op.req.promote.prefix = world_prefix(&fix.call, 0x101, 4);
    fix.call.op.req.promote.target = KVT_TARGET_L2;
    fix.call.op.req.promote.moves_count = 0;
    call_submit(&fix.call);
    world_promote(&fix.other, &fix.b, KVT_HANDLE_NONE, 0, 4, 8);
    fix.other.op.req.promote.prefix = world_prefix(&fix.other, 0x101, 4);
    call_submit(&fix.other);
    for (uint32_t i = 0; i < 3; i++)
        world_turn(&fix.world);
    atomic_store(&fix.call.op.is_cancelled, true);
    fix.world.service.cancel(fix.world.service.ctx, &fix.call.op);
    call_wait(&fix.call);
    CHECK_CODE(&fix.call.op, KVT_CODE_CANCELLED);
    call_wait(&fix.other);
    CHECK_CODE(&fix.other.op, KVT_CODE_OK);
    CHECK(count_of(&fix.other.op.ans.promote.moves, KVT_MOVE_DONE) == 4);
    for (uint32_t i = 0; i < 4; i++)
        CHECK(client_holds(&fix.b, 0, 0x101, i, 8 + i, 0));
    CHECK(shared_transfers(&fix) - before == 4); /* one each */
    world_lookup(&fix.call, &fix.a, 0x101, 4, false);
    CHECK(fix.call.op.ans.lookup.components[0].blocks_at[1] == 4);
    teardown(&fix);
}

/* A promote's deadline passes while copies run. It is answered in time and not quiesced; a block
 * that is reused before is overwritten by the late copy; after Quiesce it is safe. */
static void test_quiesce(void)
{
    bool was_overwritten = false;

    for (uint64_t seed = 1; seed <= 8; seed++) {
        struct world_config config = one_rank;
        struct fixture fix;
        uint64_t deadline_ns;

        config.seed = seed;
        setup(&fix, &config);
        store_prompt(&fix, 0x101, 8);
        world_promote(&fix.call, &fix.a, KVT_HANDLE_NONE, 0, 8, 16);
        fix.call.op.req.promote.prefix = world_prefix(&fix.call, 0x101, 8);
        fix.call.op.req.promote.op_id = 9;
        deadline_ns = fix.world.now_ns + 3 * KVT_NS_PER_MS;
        fix.call.op.deadline_ns = deadline_ns;
        call_run(&fix.call);
        CHECK_CODE(&fix.call.op, KVT_CODE_OK);
        CHECK(!fix.call.op.ans.promote.is_quiesced && fix.world.now_ns <= deadline_ns + 2000000);
        CHECK(count_of(&fix.call.op.ans.promote.moves, KVT_MOVE_LATE) > 0);
        for (uint32_t i = 0; i < 8; i++)
            client_scribble(&fix.a, 0, 16 + i, 0x11); /* too early */
        world_promote(&fix.third, &fix.a, KVT_HANDLE_NONE, 0, 0, 0);
        fix.third.op.req.promote.op_id = 9;
        call_run(&fix.third);
        CHECK_CODE(&fix.third.op, KVT_CODE_FAILED_PRECONDITION); /* the id is in use */
        call_begin(&fix.other, KVT_OP_QUIESCE);
        fix.other.op.req.quiesce.session = fix.a.session;
        fix.other.op.req.quiesce.op_id = 9;
        call_run(&fix.other);
        CHECK_CODE(&fix.other.op, KVT_CODE_OK);
        CHECK(fix.world.notices[KVT_NOTICE_QUIESCED] == 1);
        for (uint32_t i = 0; i < 8; i++)
            was_overwritten |= client_holds(&fix.a, 0, 0x101, i, 16 + i, 0);
        for (uint32_t i = 0; i < 8; i++)
            client_fill(&fix.a, 0, 0x777, i, 16 + i); /* safe now */
        for (uint32_t i = 0; i < 2000; i++)
            world_turn(&fix.world);
        for (uint32_t i = 0; i < 8; i++)
            CHECK(client_holds(&fix.a, 0, 0x777, i, 16 + i, 0));
        teardown(&fix);
    }
    CHECK(was_overwritten);
}

/* The stream of a rank breaks under a promote, and its client numbers its ops from 1 again. Quiesce
 * waits for both requests of that number: neither may write afterwards. */
static void test_quiesce_same_id(void)
{
    for (uint64_t seed = 1; seed <= 16; seed++) {
        struct world_config config = one_rank;
        struct fixture fix;
        struct kvt_engine_counts counts;
        struct client again;

        config.seed = seed;
        setup(&fix, &config);
        store_prompt(&fix, 0x101, 8);
        world_promote(&fix.call, &fix.a, KVT_HANDLE_NONE, 0, 8, 16);
        fix.call.op.req.promote.prefix = world_prefix(&fix.call, 0x101, 8);
        fix.call.op.req.promote.op_id = 1;
        call_submit(&fix.call);
        for (uint32_t i = 0; i < 2; i++)
            world_turn(&fix.world);
        client_detach(&fix.a, &fix.other);
        call_wait(&fix.call);
        client_attach(&again, &fix.world, &fix.third, 1, true, 0);
        world_promote(&fix.call, &again, KVT_HANDLE_NONE, 0, 8, 16);
        fix.call.op.req.promote.prefix = world_prefix(&fix.call, 0x101, 8);
        fix.call.op.req.promote.op_id = 1;
        fix.call.op.deadline_ns = fix.world.now_ns + 3 * KVT_NS_PER_MS;
        call_run(&fix.call);
        call_begin(&fix.other, KVT_OP_QUIESCE);
        fix.other.op.req.quiesce.session = again.session;
        fix.other.op.req.quiesce.op_id = 1;
        call_run(&fix.other);
        CHECK_CODE(&fix.other.op, KVT_CODE_OK);
        kvt_engine_counts(fix.world.engine, &counts);
        CHECK(counts.jobs == 0);           /* nobody else has any */
        for (uint32_t i = 0; i < 8; i++) { /* both memories are the client's again */
            client_scribble(&fix.a, 0, 16 + i, 0x11);
            client_fill(&again, 0, 0x777, i, 16 + i);
        }
        for (uint32_t i = 0; i < 2000; i++)
            world_turn(&fix.world);
        for (uint32_t i = 0; i < 8; i++) {
            CHECK(!client_holds(&fix.a, 0, 0x101, i, 16 + i, 0));
            CHECK(client_holds(&again, 0, 0x777, i, 16 + i, 0));
        }
        client_unmap(&fix.a);
        fix.a = again;
        teardown(&fix);
    }
}

/* The lease's time is over long before the promote is: it does not expire under it, but after. */
static void test_lease_under_promote(void)
{
    struct fixture fix;
    struct kvt_engine_counts counts;

    setup(&fix, &one_rank);
    store_prompt(&fix, 0x101, 8);
    to_disk(&fix, 0x101, 8);
    call_begin(&fix.call, KVT_OP_LOOKUP);
    fix.call.op.req.lookup.session = fix.a.session;
    fix.call.op.req.lookup.prefix = world_prefix(&fix.call, 0x101, 8);
    fix.call.op.req.lookup.limit_tokens = UINT64_MAX;
    fix.call.op.req.lookup.wants_lease = true;
    fix.call.op.req.lookup.lease_ns = 2 * KVT_NS_PER_MS;
    call_run(&fix.call);
    world_promote(&fix.other, &fix.a, fix.call.op.ans.lookup.lease, 0, 8, 16);
    call_run(&fix.other);
    CHECK_CODE(&fix.other.op, KVT_CODE_OK);
    CHECK(count_of(&fix.other.op.ans.promote.moves, KVT_MOVE_DONE) == 8);
    for (uint32_t i = 0; i < 20; i++)
        world_turn(&fix.world);
    kvt_engine_counts(fix.world.engine, &counts);
    CHECK(counts.leases == 0 && fix.world.notices[KVT_NOTICE_LEASE_ENDED] == 1);
    teardown(&fix);
}

/* Two engines store the same prefix: it is stored once. */
static void test_store_once(void)
{
    struct fixture fix;
    struct kvt_handle first;

    setup(&fix, &one_rank);
    first = world_reserve(&fix.call, &fix.a, 0x101, 4);
    CHECK(world_reserve(&fix.other, &fix.b, 0x101, 4).id == 0);
    CHECK(fix.other.op.ans.reserve.states[0][3] == KVT_RESERVE_PENDING);
    for (uint32_t i = 0; i < 4; i++)
        client_fill(&fix.a, 0, 0x101, i, i);
    world_demote(&fix.call, &fix.a, first, 0, 4, 0);
    call_run(&fix.call);
    CHECK(count_of(&fix.call.op.ans.demote.moves, KVT_MOVE_DONE) == 4);
    CHECK(world_reserve(&fix.other, &fix.b, 0x101, 4).id == 0);
    CHECK(fix.other.op.ans.reserve.states[0][3] == KVT_RESERVE_PRESENT);
    teardown(&fix);
}

static const struct world_config two_ranks = {
    .seed = 6, .l2_bytes = 1u << 20, .l3_bytes = 4u << 20, .delay_ns_max = 100000, .ranks = 2};

/* A repeat is harmless; READY needs both ranks; a rank that comes after the ticket ended is told
 * ABORTED, and what the first filled is gone. */
static void test_ticket_ranks(void)
{
    struct fixture fix;
    struct kvt_handle ticket;

    setup(&fix, &two_ranks);
    ticket = world_reserve(&fix.call, &fix.a, 0x101, 4);
    for (uint32_t repeat = 0; repeat < 2; repeat++) {
        for (uint32_t i = 0; i < 4; i++)
            client_fill(&fix.a, 0, 0x101, i, i);
        world_demote(&fix.call, &fix.a, ticket, 0, 4, 0);
        call_run(&fix.call);
        CHECK(count_of(&fix.call.op.ans.demote.moves, KVT_MOVE_DONE) == 4);
        CHECK(fix.call.op.ans.demote.moved_bytes == (repeat == 0 ? 4 * 4096 : 0));
    }
    world_lookup(&fix.call, &fix.a, 0x101, 4, false);
    CHECK(fix.call.op.ans.lookup.boundary_tokens == 0);
    CHECK(fix.call.op.ans.lookup.components[0].why == KVT_WHY_PENDING);
    call_begin(&fix.call, KVT_OP_RELEASE);
    fix.call.op.req.release.session = fix.a.session;
    fix.call.op.req.release.ticket = ticket;
    call_run(&fix.call);
    CHECK_CODE(&fix.call.op, KVT_CODE_OK);
    world_demote(&fix.other, &fix.b, ticket, 0, 4, 0);
    call_run(&fix.other);
    CHECK_CODE(&fix.other.op, KVT_CODE_OK);
    CHECK(count_of(&fix.other.op.ans.demote.moves, KVT_MOVE_ABORTED) == 4);
    world_settle(&fix.world);
    ticket = world_reserve(&fix.call, &fix.a, 0x101, 4);
    CHECK(ticket.id != 0 && fix.call.op.ans.reserve.states[0][0] == KVT_RESERVE_MISSING);
    teardown(&fix);
}

/* peers-57: nothing of the old epoch appears after a Reset, and its tickets and leases are over. */
static void test_reset_midway(void)
{
    struct fixture fix;
    struct kvt_handle ticket;

    setup(&fix, &one_rank);
    store_prompt(&fix, 0x101, 8);
    ticket = world_reserve(&fix.call, &fix.b, 0x201, 4);
    world_promote(&fix.other, &fix.a, KVT_HANDLE_NONE, 0, 8, 16);
    fix.other.op.req.promote.prefix = world_prefix(&fix.other, 0x101, 8);
    call_submit(&fix.other);
    world_turn(&fix.world);
    call_begin(&fix.call, KVT_OP_RESET);
    fix.call.op.req.reset.ns = fix.world.ns;
    call_run(&fix.call);
    CHECK_CODE(&fix.call.op, KVT_CODE_OK);
    call_wait(&fix.other);
    CHECK(count_of(&fix.other.op.ans.promote.moves, KVT_MOVE_DONE) == 0);
    world_demote(&fix.third, &fix.b, ticket, 0, 4, 0);
    call_run(&fix.third);
    CHECK(count_of(&fix.third.op.ans.demote.moves, KVT_MOVE_ABORTED) == 4);
    world_lookup(&fix.call, &fix.a, 0x101, 8, false);
    CHECK(fix.call.op.ans.lookup.boundary_tokens == 0);
    CHECK(fix.world.notices[KVT_NOTICE_EPOCH] == 2);
    teardown(&fix);
}

/* mooncake-45: a component goes between lookup and promote: the moves say which, nothing mixes. */
static void test_evict_between(void)
{
    struct fixture fix;
    struct kvt_handle lease;

    setup(&fix, &one_rank);
    store_prompt(&fix, 0x101, 8);
    lease = world_lookup(&fix.call, &fix.a, 0x101, 8, true);
    call_begin(&fix.other, KVT_OP_EVICT);
    fix.other.op.req.evict.ns = fix.world.ns;
    fix.other.op.req.evict.prefix = world_prefix(&fix.other, 0x101, 6);
    call_run(&fix.other);
    CHECK(fix.other.op.ans.evict.evicted_blocks == 3);
    for (uint32_t i = 0; i < 200; i++)
        world_turn(&fix.world);
    world_promote(&fix.call, &fix.a, lease, 0, 8, 16);
    call_run(&fix.call);
    CHECK_CODE(&fix.call.op, KVT_CODE_OK);
    for (uint32_t i = 0; i < 8; i++) {
        uint8_t result = fix.call.op.ans.promote.moves.results[0][i];

        CHECK(result == KVT_MOVE_DONE || result == KVT_MOVE_MISS);
        CHECK(result != KVT_MOVE_DONE || client_holds(&fix.a, 0, 0x101, i, 16 + i, 0));
        CHECK(i < 5 || result == KVT_MOVE_MISS);
    }
    teardown(&fix);
}

int main(void)
{
    test_coalesce_and_cancel();
    test_quiesce();
    test_quiesce_same_id();
    test_lease_under_promote();
    test_store_once();
    test_ticket_ranks();
    test_reset_midway();
    test_evict_between();
    return 0;
}
