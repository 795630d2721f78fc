/* What an engine reads in place, seen from outside: Stats, and what hostile orders of requests do
 * to the books. Whether L2 is pinned (--wrap) is asked again each time, too. */
#include <stdio.h>
#include <string.h>

#include "tests/common/check.h"
#include "tests/common/engine_world.h"

#define TAG 0x101u
#define BLOCK_BYTES 4096u

static const struct world_config exporting = {.seed = 13,
                                              .l1_bytes = 512u << 10,
                                              .l2_bytes = 1u << 20,
                                              .delay_ns_max = KVT_NS_PER_MS,
                                              .ranks = 1,
                                              .gpus = 2,
                                              .held_bytes_max = 100u << 10,
                                              .is_export_allowed = true};

struct fixture {
    struct world world;
    struct client client, other; /* two engines, rank 0 of each on a GPU of its own */
    struct call call;
};

static void attach(struct fixture *fix, struct client *client, uint8_t engine, uint32_t gpu)
{
    client_begin_attach_gpu(client, &fix->world, &fix->call, engine, true, 0, gpu);
    call_run(&fix->call);
    CHECK_CODE(&fix->call.op, KVT_CODE_OK);
    client->session = fix->call.op.ans.attach.session;
}

static void setup(struct fixture *fix, const struct world_config *config)
{
    world_init(&fix->world, config);
    call_init(&fix->call, &fix->world);
    attach(fix, &fix->client, 1, 0);
    attach(fix, &fix->other, 2, 1);
}

static void detach(struct fixture *fix, struct client *client)
{
    client_detach(client, &fix->call);
    client_unmap(client);
}

static void teardown(struct fixture *fix)
{
    detach(fix, &fix->client);
    detach(fix, &fix->other);
    world_settle(&fix->world);
    world_check(&fix->world);
    call_deinit(&fix->call);
    world_deinit(&fix->world);
}

static void store_prompt(struct fixture *fix, uint32_t blocks)
{
    struct kvt_handle ticket = world_reserve(&fix->call, &fix->client, TAG, blocks);

    for (uint32_t i = 0; i < blocks; i++)
        client_fill(&fix->client, 0, TAG, i, i);
    world_demote(&fix->call, &fix->client, ticket, 0, blocks, 0);
    call_run(&fix->call);
    CHECK_CODE(&fix->call.op, KVT_CODE_OK);
}

static struct kvt_handle hold(struct fixture *fix, const struct client *client, uint32_t blocks)
{
    struct kvt_handle lease = world_lookup(&fix->call, client, TAG, blocks, true);

    world_promote(&fix->call, client, lease, 0, blocks, 0);
    fix->call.op.req.promote.target = KVT_TARGET_L1;
    fix->call.op.req.promote.is_in_place = true;
    call_run(&fix->call);
    CHECK_CODE(&fix->call.op, KVT_CODE_OK);
    for (uint32_t i = 0; i < blocks; i++)
        CHECK(fix->call.op.ans.promote.moves.results[0][i] == KVT_MOVE_DONE);
    return lease;
}

static void release(struct fixture *fix, const struct client *client, struct kvt_handle lease)
{
    call_begin(&fix->call, KVT_OP_RELEASE);
    fix->call.op.req.release.session = client->session;
    fix->call.op.req.release.lease = lease;
    call_run(&fix->call);
    CHECK_CODE(&fix->call.op, KVT_CODE_OK);
}

/* What Stats says that engine number @engine holds; the limit that it tells is checked by the way.
 */
static uint64_t held_bytes(struct fixture *fix, uint8_t engine)
{
    const struct kvt_ans_stats *stats = &fix->call.op.ans.stats;

    call_begin(&fix->call, KVT_OP_STATS);
    call_run(&fix->call);
    CHECK_CODE(&fix->call.op, KVT_CODE_OK);
    CHECK(stats->l1.held_bytes_per_engine_max ==
          (fix->world.config.is_export_allowed ? fix->world.config.held_bytes_max : 0));
    for (uint32_t i = 0; i < stats->engines_count; i++)
        if (stats->engines[i].engine_id[0] == engine)
            return stats->engines[i].held_bytes;
    CHECK(false && "no such engine");
    return 0;
}

/* An engine's own: once a lease, until that ends; what another holds of the same blocks is not
 * its. */
static void test_stats(void)
{
    struct kvt_handle first, second;
    struct fixture fix;

    setup(&fix, &exporting);
    store_prompt(&fix, 6);
    CHECK(held_bytes(&fix, 1) == 0 && held_bytes(&fix, 2) == 0);
    first = hold(&fix, &fix.client, 6);
    CHECK(held_bytes(&fix, 1) == 6 * BLOCK_BYTES);
    second = hold(&fix, &fix.client, 2);
    CHECK(held_bytes(&fix, 1) == 8 * BLOCK_BYTES);
    (void)hold(&fix, &fix.other, 3);
    CHECK(held_bytes(&fix, 1) == 8 * BLOCK_BYTES && held_bytes(&fix, 2) == 3 * BLOCK_BYTES);
    release(&fix, &fix.client, first);
    CHECK(held_bytes(&fix, 1) == 2 * BLOCK_BYTES);
    release(&fix, &fix.client, second);
    CHECK(held_bytes(&fix, 1) == 0 && held_bytes(&fix, 2) == 3 * BLOCK_BYTES);
    teardown(&fix);
}

static struct {
    bool is_gpu;
    struct kvt_device_host_pin pin;
} told;

bool __wrap_kvt_device_host_pin(const struct kvt_tier *tier, struct kvt_device_host_pin *ret_pin);
bool __wrap_kvt_device_host_pin(const struct kvt_tier *tier, struct kvt_device_host_pin *ret_pin)
{
    CHECK(tier != NULL);
    if (told.is_gpu)
        *ret_pin = told.pin;
    return told.is_gpu;
}

static bool is_pinned(struct fixture *fix, const char *why)
{
    const struct kvt_api_l1_stats *l1 = &fix->call.op.ans.stats.l1;

    call_begin(&fix->call, KVT_OP_STATS);
    call_run(&fix->call);
    CHECK_CODE(&fix->call.op, KVT_CODE_OK);
    CHECK(l1->pin_why.bytes == strlen(why) && memcmp(l1->pin_why.at, why, strlen(why)) == 0);
    return l1->is_host_pinned;
}

/* The report of the start is what there is where nobody knows better. */
static void test_pinned_now(void)
{
    static const struct kvt_device_report report = {.is_host_pinned = true};
    struct world_config config = exporting;
    struct fixture fix;

    config.l1 = (struct kvt_engine_l1){.backend = "cuda", .report = &report};
    setup(&fix, &config);
    CHECK(is_pinned(&fix, ""));
    told.is_gpu = true;
    (void)snprintf(told.pin.why, sizeof(told.pin.why), "no room");
    CHECK(!is_pinned(&fix, "no room"));
    told.pin = (struct kvt_device_host_pin){.is_pinned = true};
    CHECK(is_pinned(&fix, ""));
    told.is_gpu = false;
    teardown(&fix);
}

static void test_not_exported(void)
{
    struct world_config config = exporting;
    struct fixture fix;

    config.is_export_allowed = false;
    setup(&fix, &config);
    CHECK(held_bytes(&fix, 1) == 0);
    teardown(&fix);
}

/* ---- of two ranks on two GPUs one reads, and the other one's GPU is lost ---- */

static uint64_t taken_slots(struct fixture *fix, uint32_t zone)
{
    struct kvt_store_stats stats;

    kvt_engine_store_stats(fix->world.engine, &stats);
    return stats.l1_zones[zone].slab.taken_slots;
}

static void demote(struct fixture *fix, const struct client *client, struct kvt_handle ticket)
{
    world_demote(&fix->call, client, ticket, 0, 4, 0);
    call_run(&fix->call);
    CHECK_CODE(&fix->call.op, KVT_CODE_OK);
}

/* Four blocks of rank 0 on GPU 0 and rank 1 on GPU 1; rank 0 reads them in place. */
static void hold_of_two_ranks(struct fixture *fix)
{
    struct world_config config = exporting;
    struct kvt_handle ticket;

    config.ranks = 2;
    world_init(&fix->world, &config);
    call_init(&fix->call, &fix->world);
    attach(fix, &fix->client, 1, 0);
    client_begin_attach_gpu(&fix->other, &fix->world, &fix->call, 1, false, 1, 1);
    call_run(&fix->call);
    CHECK_CODE(&fix->call.op, KVT_CODE_OK);
    fix->other.session = fix->call.op.ans.attach.session;
    ticket = world_reserve(&fix->call, &fix->client, TAG, 4);
    for (uint32_t i = 0; i < 4; i++) {
        client_fill(&fix->client, 0, TAG, i, i);
        client_fill(&fix->other, 0, TAG, i, i);
    }
    demote(fix, &fix->client, ticket);
    demote(fix, &fix->other, ticket);
    (void)hold(fix, &fix->client, 4);
    CHECK(fix->call.op.ans.promote.in_place[0].zones[0] == 0);
    CHECK(taken_slots(fix, 0) == 4 && taken_slots(fix, 1) == 4);
}

static uint64_t leases(struct fixture *fix)
{
    struct kvt_engine_counts counts;

    kvt_engine_counts(fix->world.engine, &counts);
    return counts.leases;
}

static void turns(struct fixture *fix, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++)
        world_turn(&fix->world);
    world_check(&fix->world);
}

/* A copy with one shard on a lost GPU is lost whole, and its slots hold the GPU up: it is not back
 * before they are given back, which nobody does who does not hear of it. */
static void test_loss_of_the_others_gpu(void)
{
    struct kvt_store_stats stats;
    struct fixture fix;

    hold_of_two_ranks(&fix);
    fake_tier_lose_zone(fix.world.tiers[KVT_TIER_DEVICE], 1);
    fake_tier_revive_zone(fix.world.tiers[KVT_TIER_DEVICE], 1);
    turns(&fix, 200);
    CHECK(fix.world.notices[KVT_NOTICE_REGIONS_LOST] == 2); /* both ranks' sessions */
    CHECK(fix.world.notices[KVT_NOTICE_LEASE_ENDED] == 1 && leases(&fix) == 0);
    kvt_engine_store_stats(fix.world.engine, &stats);
    CHECK(stats.l1_zones[1].out_ns == 0 && stats.l1_zones[1].incarnation == 1);
    CHECK(taken_slots(&fix, 0) == 0 && taken_slots(&fix, 1) == 0);
    teardown(&fix);
}

/* Between the loss and the engine's hearing of it nothing is held, whatever GPU the shard that is
 * asked for is on. */
static void test_lost_when_asked(void)
{
    struct kvt_handle lease;
    struct fixture fix;

    hold_of_two_ranks(&fix);
    lease = world_lookup(&fix.call, &fix.client, TAG, 4, true);
    world_promote(&fix.call, &fix.client, lease, 0, 4, 0);
    fix.call.op.req.promote.target = KVT_TARGET_L1;
    fix.call.op.req.promote.is_in_place = true;
    call_submit(&fix.call);
    fake_tier_lose_zone(fix.world.tiers[KVT_TIER_DEVICE], 1);
    fake_tier_revive_zone(fix.world.tiers[KVT_TIER_DEVICE], 1);
    call_wait(&fix.call);
    CHECK_CODE(&fix.call.op, KVT_CODE_OK);
    for (uint32_t i = 0; i < 4; i++)
        CHECK(fix.call.op.ans.promote.moves.results[0][i] != KVT_MOVE_DONE);
    turns(&fix, 200);
    CHECK(held_bytes(&fix, 1) == 0);
    CHECK(taken_slots(&fix, 0) == 0 && taken_slots(&fix, 1) == 0);
    teardown(&fix);
}

int main(void)
{
    test_stats();
    test_loss_of_the_others_gpu();
    test_lost_when_asked();
    test_not_exported();
    test_pinned_now();
    return 0;
}
