/* What an engine reads in place, seen from outside: Stats, and what hostile orders of requests do
 * to the books. Whether L2 is pinned (--wrap) is asked again each time, too. */
#include <stdio.h>
#include <string.h>

#include "tests/common/check.h"
#include "tests/common/engine_rig.h"

#define TAG 0x101u
#define BLOCK_BYTES 4096u
#define READERS 5u
#define READER_LEASES 1000u /* of each: more in all than may hold one block */

static const struct world_config exporting = {.seed = 13,
                                              .l1_bytes = 512u << 10,
                                              .l2_bytes = 1u << 20,
                                              .delay_ns_max = KVT_NS_PER_MS,
                                              .ranks = 1,
                                              .gpus = 2,
                                              .held_bytes_max = 100u << 10,
                                              .is_export_allowed = true};

struct fixture {
    struct rig rig;
    struct client other; /* two engines, rank 0 of each on a GPU of its own */
};

static void setup(struct fixture *fix, const struct world_config *config)
{
    rig_begin_gpu(&fix->rig, config, 0);
    rig_join_gpu(&fix->rig, &fix->other, 2, true, 0, 1);
}

static void teardown(struct fixture *fix)
{
    rig_part(&fix->rig, &fix->other);
    rig_end(&fix->rig);
}

static struct kvt_handle hold(struct fixture *fix, const struct client *client, uint32_t blocks)
{
    struct kvt_handle lease = world_lookup(&fix->rig.call, client, TAG, blocks, true);

    rig_begin_in_place(&fix->rig, client, lease, blocks);
    call_run(&fix->rig.call);
    CHECK_CODE(&fix->rig.call.op, KVT_CODE_OK);
    for (uint32_t i = 0; i < blocks; i++)
        CHECK(fix->rig.call.op.ans.promote.moves.results[0][i] == KVT_MOVE_DONE);
    return lease;
}

/* What Stats says that engine number @engine holds; the limit that it tells is checked by the way.
 */
static uint64_t held_bytes(struct fixture *fix, uint8_t engine)
{
    const struct kvt_ans_stats *stats = &fix->rig.call.op.ans.stats;

    call_begin(&fix->rig.call, KVT_OP_STATS);
    call_run(&fix->rig.call);
    CHECK_CODE(&fix->rig.call.op, KVT_CODE_OK);
    CHECK(stats->l1.held_bytes_per_engine_max ==
          (fix->rig.world.config.is_export_allowed ? fix->rig.world.config.held_bytes_max : 0));
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
    rig_store(&fix.rig, TAG, 6);
    CHECK(held_bytes(&fix, 1) == 0 && held_bytes(&fix, 2) == 0);
    first = hold(&fix, &fix.rig.client, 6);
    CHECK(held_bytes(&fix, 1) == 6 * BLOCK_BYTES);
    second = hold(&fix, &fix.rig.client, 2);
    CHECK(held_bytes(&fix, 1) == 8 * BLOCK_BYTES);
    (void)hold(&fix, &fix.other, 3);
    CHECK(held_bytes(&fix, 1) == 8 * BLOCK_BYTES && held_bytes(&fix, 2) == 3 * BLOCK_BYTES);
    rig_release(&fix.rig, &fix.rig.client, first);
    CHECK(held_bytes(&fix, 1) == 2 * BLOCK_BYTES);
    rig_release(&fix.rig, &fix.rig.client, second);
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
    const struct kvt_api_l1_stats *l1 = &fix->rig.call.op.ans.stats.l1;

    call_begin(&fix->rig.call, KVT_OP_STATS);
    call_run(&fix->rig.call);
    CHECK_CODE(&fix->rig.call.op, KVT_CODE_OK);
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

/* Four blocks of rank 0 on GPU 0 and rank 1 on GPU 1; rank 0 reads them in place. */
static void hold_of_two_ranks(struct fixture *fix)
{
    struct world_config config = exporting;
    struct kvt_handle ticket;

    config.ranks = 2;
    rig_begin_gpu(&fix->rig, &config, 0);
    rig_join_gpu(&fix->rig, &fix->other, 1, false, 1, 1);
    ticket = world_reserve(&fix->rig.call, &fix->rig.client, TAG, 4);
    for (uint32_t i = 0; i < 4; i++) {
        client_fill(&fix->rig.client, 0, TAG, i, i);
        client_fill(&fix->other, 0, TAG, i, i);
    }
    rig_demote(&fix->rig, &fix->rig.client, ticket, 0, 4);
    rig_demote(&fix->rig, &fix->other, ticket, 0, 4);
    (void)hold(fix, &fix->rig.client, 4);
    CHECK(fix->rig.call.op.ans.promote.in_place[0].zones[0] == 0);
    CHECK(rig_l1_slots(&fix->rig, 0) == 4 && rig_l1_slots(&fix->rig, 1) == 4);
}

static void turns(struct fixture *fix, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++)
        world_turn(&fix->rig.world);
    world_check(&fix->rig.world);
}

/* A copy with one shard on a lost GPU is lost whole, and its slots hold the GPU up: it is not back
 * before they are given back, which nobody does who does not hear of it. */
static void test_loss_of_the_others_gpu(void)
{
    struct kvt_store_stats stats;
    struct fixture fix;

    hold_of_two_ranks(&fix);
    fake_tier_lose_zone(fix.rig.world.tiers[KVT_TIER_DEVICE], 1);
    fake_tier_revive_zone(fix.rig.world.tiers[KVT_TIER_DEVICE], 1);
    turns(&fix, 200);
    CHECK(fix.rig.world.notices[KVT_NOTICE_REGIONS_LOST] == 2); /* both ranks' sessions */
    CHECK(fix.rig.world.notices[KVT_NOTICE_LEASE_ENDED] == 1 && rig_leases(&fix.rig) == 0);
    stats = rig_stats(&fix.rig);
    CHECK(stats.l1_zones[1].out_ns == 0 && stats.l1_zones[1].incarnation == 1);
    CHECK(rig_l1_slots(&fix.rig, 0) == 0 && rig_l1_slots(&fix.rig, 1) == 0);
    teardown(&fix);
}

/* Between the loss and the engine's hearing of it nothing is held, whatever GPU the shard that is
 * asked for is on. */
static void test_lost_when_asked(void)
{
    struct kvt_handle lease;
    struct fixture fix;

    hold_of_two_ranks(&fix);
    lease = world_lookup(&fix.rig.call, &fix.rig.client, TAG, 4, true);
    rig_begin_in_place(&fix.rig, &fix.rig.client, lease, 4);
    call_submit(&fix.rig.call);
    fake_tier_lose_zone(fix.rig.world.tiers[KVT_TIER_DEVICE], 1);
    fake_tier_revive_zone(fix.rig.world.tiers[KVT_TIER_DEVICE], 1);
    call_wait(&fix.rig.call);
    CHECK_CODE(&fix.rig.call.op, KVT_CODE_OK);
    for (uint32_t i = 0; i < 4; i++)
        CHECK(fix.rig.call.op.ans.promote.moves.results[0][i] != KVT_MOVE_DONE);
    turns(&fix, 200);
    CHECK(held_bytes(&fix, 1) == 0);
    CHECK(rig_l1_slots(&fix.rig, 0) == 0 && rig_l1_slots(&fix.rig, 1) == 0);
    teardown(&fix);
}

/* ---- so many leases hold a block that no more may ---- */

struct reading {
    struct client readers[READERS]; /* each an engine */
    struct kvt_handle leases[READERS * READER_LEASES];
    uint64_t offset_bytes;
};

/* Of the block, by lease number @i. */
static enum kvt_move_result read_again(struct fixture *fix, struct reading *reading, uint32_t i)
{
    struct call *call = &fix->rig.call;
    enum kvt_move_result result;

    rig_begin_in_place(&fix->rig, &reading->readers[i / READER_LEASES], reading->leases[i], 1);
    call_run(call);
    CHECK_CODE(&call->op, KVT_CODE_OK);
    result = call->op.ans.promote.moves.results[0][0];
    if (result == KVT_MOVE_DONE && i == 0)
        reading->offset_bytes = call->op.ans.promote.in_place[0].offsets_bytes[0];
    if (result == KVT_MOVE_DONE)
        CHECK(call->op.ans.promote.in_place[0].offsets_bytes[0] == reading->offset_bytes);
    return result;
}

static enum kvt_move_result read_anew(struct fixture *fix, struct reading *reading, uint32_t i)
{
    CHECK(i < READERS * READER_LEASES);
    reading->leases[i] =
        world_lookup(&fix->rig.call, &reading->readers[i / READER_LEASES], TAG, 1, true);
    return read_again(fix, reading, i);
}

/* One that holds it already is told again where it lies, and it counts once. */
static void test_pins_max(void)
{
    static struct reading reading;
    struct world_config config = exporting;
    struct fixture fix;
    uint32_t count = 0;

    config.held_bytes_max = config.leased_bytes_max = 64u << 20;
    setup(&fix, &config);
    rig_store(&fix.rig, TAG, 1);
    for (uint32_t i = 0; i < READERS; i++)
        rig_join_gpu(&fix.rig, &reading.readers[i], (uint8_t)(3 + i), true, 0, 0);
    while (read_anew(&fix, &reading, count) == KVT_MOVE_DONE)
        count++;
    CHECK(count > 4000);
    CHECK(read_again(&fix, &reading, count) == KVT_MOVE_NO_ROOM);
    for (uint32_t i = 0; i < count; i += (count - 1) / 2)
        CHECK(read_again(&fix, &reading, i) == KVT_MOVE_DONE);
    CHECK(held_bytes(&fix, 3) == (uint64_t)READER_LEASES * BLOCK_BYTES);
    rig_release(&fix.rig, &reading.readers[0], reading.leases[1]);
    CHECK(held_bytes(&fix, 3) == (uint64_t)(READER_LEASES - 1) * BLOCK_BYTES);
    turns(&fix, 10);
    CHECK(read_again(&fix, &reading, count) == KVT_MOVE_DONE);
    for (uint32_t i = 0; i < READERS; i++)
        rig_part(&fix.rig, &reading.readers[i]);
    teardown(&fix);
}

int main(void)
{
    test_pins_max();
    test_stats();
    test_loss_of_the_others_gpu();
    test_lost_when_asked();
    test_not_exported();
    test_pinned_now();
    return 0;
}
