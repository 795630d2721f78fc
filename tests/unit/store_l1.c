/* L1's zones in the store, over fake tiers: where shards go, what a loss takes away and what it
 * leaves, and whose thread moves bytes of engines on a GPU. */
#include <string.h>

#include "daemon/base/alloc.h"
#include "daemon/base/clock.h"
#include "daemon/base/guard.h"
#include "daemon/base/log.h"
#include "daemon/engine/store.h"
#include "tests/common/check.h"
#include "tests/common/cmocka.h"
#include "tests/common/fake_tier.h"

#define UNIT_BYTES 16384u
#define BLOCK_TOKENS 4u
#define RANKS 2u
#define PAYLOAD_BYTES 4096u
#define BIG_BYTES 12288u /* of the second component */
#define POOL_BLOCKS 8u
#define COMPONENTS 2u
#define ZONES 2u
#define ZONE_BYTES (8u * UNIT_BYTES)

struct rig {
    struct kvt_radix *radix;
    struct kvt_radix_ns ns;
    struct fake_tier *tiers[KVT_TIERS_COUNT];
    uint8_t *host_memory;
    struct kvt_store *store;
    uint64_t now_ns;
    struct kvt_region region[COMPONENTS];
    struct kvt_layout layout[COMPONENTS];
    struct kvt_layout_piece piece[COMPONENTS];
    uint8_t home[KVT_RANKS_MAX]; /* of the engine whose jobs these are */
};

static uint64_t no_real_time(void)
{
    return 1;
}

static void open_tiers(struct rig *rig, struct kvt_store_config *config, uint64_t payload_bytes_max)
{
    const uint64_t bytes[KVT_TIERS_COUNT] = {ZONES * ZONE_BYTES, 64 * UNIT_BYTES, 64 * UNIT_BYTES};

    rig->host_memory = kvt_alloc_aligned(4096, bytes[1]);
    CHECK(rig->host_memory != NULL);
    for (uint32_t i = 0; i < KVT_TIERS_COUNT; i++) {
        struct fake_tier_config tier = {.id = (enum kvt_tier_id)i,
                                        .capacity_bytes = bytes[i],
                                        .host_memory = rig->host_memory,
                                        .seed = i,
                                        .inflight_max = 24,
                                        .delay_ns_max = KVT_NS_PER_MS,
                                        .zones = i == KVT_TIER_DISK ? 0 : ZONES};

        tier.payload_bytes_max = i == KVT_TIER_DEVICE ? payload_bytes_max : 0;
        rig->tiers[i] = fake_tier_new(&tier);
        CHECK(rig->tiers[i] != NULL);
        config->tiers[i] = fake_tier_base(rig->tiers[i]);
        config->slab_unit_bytes[i] = UNIT_BYTES;
    }
    /* GPU 0 is near the second node, GPU 1 near the first. */
    for (uint32_t i = 0; i < ZONES; i++) {
        config->tiers[KVT_TIER_HOST]->zones[i].numa_node = (int)i;
        config->tiers[KVT_TIER_DEVICE]->zones[i].numa_node = (int)(1 - i);
    }
}

static void open_client(struct rig *rig, uint32_t component, uint32_t bytes)
{
    struct kvt_layout *layout = &rig->layout[component];

    rig->region[component] = (struct kvt_region){.base = kvt_alloc_zeroed(POOL_BLOCKS, bytes),
                                                 .bytes = (uint64_t)bytes * POOL_BLOCKS};
    CHECK(rig->region[component].base != NULL);
    rig->piece[component] = (struct kvt_layout_piece){.bytes = bytes, .stride_bytes = bytes};
    *layout = (struct kvt_layout){
        .pieces_count = 1, .engine_blocks_per_block = 1, .pieces = &rig->piece[component]};
    CHECK(kvt_layout_resolve(layout, &rig->region[component], 1, bytes) == 0);
}

/* Its memory is a GPU's from here on. */
static void move_client_to(struct rig *rig, uint32_t zone)
{
    for (uint32_t i = 0; i < COMPONENTS; i++) {
        rig->layout[i].is_gpu = true;
        rig->layout[i].gpu_zone = zone;
    }
}

static void setup(struct rig *rig, uint64_t payload_bytes_max)
{
    struct kvt_radix_config radix = {
        .memory_bytes = 1 * KVT_MIB, .seed = 1, .namespaces_max = 1, .roots_max = 16};
    struct kvt_store_config config = {.memory_bytes = 2 * KVT_MIB, .real_ns = no_real_time};
    struct kvt_radix_spec spec = {.block_tokens = BLOCK_TOKENS, .components_count = COMPONENTS};
    struct kvt_store_ns_config ns = {
        .epoch = 1, .block_tokens = BLOCK_TOKENS, .ranks = RANKS, .components_count = COMPONENTS};

    *rig = (struct rig){.now_ns = 1, .home = {0, 1}};
    kvt_log_set_level(KVT_LOG_ERROR);
    CHECK(kvt_guard_install() == 0);
    CHECK(kvt_radix_new(&rig->radix, &radix) == 0);
    open_tiers(rig, &config, payload_bytes_max);
    config.radix = rig->radix;
    config.host_memory = rig->host_memory;
    CHECK(kvt_store_new(&rig->store, &config) == 0);
    for (uint32_t i = 0; i < COMPONENTS; i++) {
        spec.components[i].kind = i == 0 ? KVT_COMPONENT_FULL : KVT_COMPONENT_STATE;
        ns.components[i].bytes_per_block = i == 0 ? PAYLOAD_BYTES : BIG_BYTES;
        open_client(rig, i, (uint32_t)ns.components[i].bytes_per_block);
    }
    CHECK(kvt_radix_ns_open(rig->radix, &spec, &rig->ns) == 0);
    CHECK(kvt_store_ns_open(rig->store, rig->ns, &ns) == 0);
}

static void turn(struct rig *rig)
{
    const char *why = "";

    rig->now_ns += KVT_NS_PER_MS;
    for (uint32_t i = 0; i < KVT_TIERS_COUNT; i++)
        fake_tier_set_time(rig->tiers[i], rig->now_ns);
    (void)kvt_store_turn(rig->store, rig->now_ns, 64);
    if (!kvt_store_check(rig->store, &why))
        fail_msg("store check: %s", why);
}

static void teardown(struct rig *rig)
{
    struct kvt_store_stats stats;

    kvt_radix_detach_ns(rig->radix, rig->ns);
    for (uint32_t i = 0; i < 20; i++)
        turn(rig);
    kvt_store_stats(rig->store, &stats);
    CHECK(stats.cells == 0);
    rig->store = kvt_store_free(rig->store);
    rig->radix = kvt_radix_free(rig->radix);
    for (uint32_t i = 0; i < KVT_TIERS_COUNT; i++)
        (void)kvt_tier_close(fake_tier_base(rig->tiers[i]));
    kvt_free(rig->host_memory);
    for (uint32_t i = 0; i < COMPONENTS; i++)
        kvt_free(rig->region[i].base);
}

/* ---- blocks and jobs ---- */

static struct kvt_radix_block insert(struct rig *rig, uint32_t token)
{
    uint32_t tokens[BLOCK_TOKENS] = {token, 1, 2, 3};
    struct kvt_radix_prefix prefix = {.ns = rig->ns,
                                      .root_key = "r",
                                      .root_key_bytes = 1,
                                      .tokens = tokens,
                                      .tokens_count = BLOCK_TOKENS};
    struct kvt_radix_block end;
    uint64_t new_blocks;

    CHECK(kvt_radix_insert(rig->radix, &prefix, &end, &new_blocks) == 0);
    return end;
}

static struct kvt_cell claim(struct rig *rig, uint32_t token, uint32_t component)
{
    uint8_t digest[KVT_FINGERPRINT_BYTES] = {1};
    struct kvt_radix_block end = insert(rig, token);
    struct kvt_cell cell;

    CHECK(kvt_store_claim(rig->store, end, component, digest, &cell) == KVT_CLAIM_MINE);
    kvt_radix_settle(rig->radix, end);
    return cell;
}

struct job {
    struct kvt_job job;
    uint64_t engine_block;
    bool is_done;
};

static void on_done(struct kvt_job *job)
{
    ((struct job *)job->owner)->is_done = true;
}

static void submit(struct rig *rig, struct job *at, enum kvt_job_kind kind, struct kvt_cell cell,
                   uint32_t component, uint32_t rank)
{
    *at = (struct job){.engine_block = rank};
    at->job = (struct kvt_job){.kind = kind,
                               .cell = cell,
                               .rank = rank,
                               .tier = kind == KVT_JOB_RAISE ? KVT_TIER_DEVICE : KVT_TIER_HOST,
                               .deadline_ns = rig->now_ns + KVT_NS_PER_S,
                               .view = {&rig->layout[component], &at->engine_block, 0, 1},
                               .home = rig->home,
                               .done = on_done,
                               .owner = at};
    kvt_store_submit(rig->store, &at->job, rig->now_ns);
}

static enum kvt_move_result wait_done(struct rig *rig, struct job *at)
{
    for (uint32_t i = 0; i < 100 && !at->is_done; i++)
        turn(rig);
    CHECK(at->is_done);
    return at->job.result;
}

static enum kvt_move_result run(struct rig *rig, enum kvt_job_kind kind, struct kvt_cell cell,
                                uint32_t component, uint32_t rank)
{
    struct job at;

    submit(rig, &at, kind, cell, component, rank);
    return wait_done(rig, &at);
}

static uint8_t *client_at(struct rig *rig, uint32_t component, uint32_t rank)
{
    return rig->region[component].base + rank * rig->piece[component].bytes;
}

static struct kvt_cell store_block(struct rig *rig, uint32_t token, uint32_t component)
{
    struct kvt_cell cell = claim(rig, token, component);

    for (uint32_t rank = 0; rank < RANKS; rank++) {
        memset(client_at(rig, component, rank), (int)(token * 16 + rank),
               rig->piece[component].bytes);
        assert_int_equal(run(rig, KVT_JOB_FILL, cell, component, rank), KVT_MOVE_DONE);
    }
    return cell;
}

/* In L1 and in L2. */
static struct kvt_cell store_both(struct rig *rig, uint32_t token)
{
    struct kvt_cell cell = store_block(rig, token, 0);

    assert_int_equal(run(rig, KVT_JOB_LOWER, cell, 0, 0), KVT_MOVE_DONE);
    assert_int_equal(kvt_store_ready_mask(rig->store, cell),
                     1u << KVT_TIER_DEVICE | 1u << KVT_TIER_HOST);
    return cell;
}

static enum kvt_move_result read_block(struct rig *rig, struct kvt_cell cell, uint32_t token,
                                       uint32_t component)
{
    for (uint32_t rank = 0; rank < RANKS; rank++) {
        uint8_t *at = client_at(rig, component, rank);
        enum kvt_move_result result;

        memset(at, 0, rig->piece[component].bytes);
        result = run(rig, KVT_JOB_READ, cell, component, rank);
        if (result != KVT_MOVE_DONE)
            return result;
        for (uint32_t i = 0; i < rig->piece[component].bytes; i++)
            assert_int_equal(at[i], token * 16 + rank);
    }
    return KVT_MOVE_DONE;
}

static uint64_t slots_in(struct rig *rig, uint32_t zone)
{
    struct kvt_store_stats stats;

    kvt_store_stats(rig->store, &stats);
    return stats.l1_zones[zone].slab.taken_slots;
}

/* ---- tests ---- */

static void test_home(void **state)
{
    struct rig rig;

    (void)state;
    setup(&rig, 0);
    (void)store_block(&rig, 1, 0); /* rank r on GPU r */
    assert_int_equal(slots_in(&rig, 0), 1);
    assert_int_equal(slots_in(&rig, 1), 1);
    rig.home[0] = 1;
    (void)store_block(&rig, 2, 0);
    assert_int_equal(slots_in(&rig, 0), 1);
    assert_int_equal(slots_in(&rig, 1), 3);
    fake_tier_lose_zone(rig.tiers[KVT_TIER_DEVICE], 1);
    turn(&rig);
    turn(&rig);
    (void)store_block(&rig, 3, 0); /* what is at home there goes to the other one */
    assert_int_equal(slots_in(&rig, 0), 2);
    teardown(&rig);
}

/* Two engines of one model: each one's blocks are on its own GPUs, whoever came last. What is
 * filled from a GPU goes to that one, whatever is said of its engine. */
static void test_homes(void **state)
{
    struct rig rig;

    (void)state;
    setup(&rig, 0);
    memset(rig.home, 1, sizeof(rig.home));
    (void)store_block(&rig, 1, 0);
    assert_int_equal(slots_in(&rig, 1), 2);
    memset(rig.home, 0, sizeof(rig.home));
    (void)store_block(&rig, 2, 0);
    assert_int_equal(slots_in(&rig, 0), 2);
    rig.layout[0].is_gpu = true;
    rig.layout[0].gpu_zone = 1;
    (void)store_block(&rig, 3, 0); /* rank 0 comes from GPU 1, and claims for both */
    assert_int_equal(slots_in(&rig, 0), 3);
    assert_int_equal(slots_in(&rig, 1), 3);
    rig.layout[0].is_gpu = false;
    teardown(&rig);
}

/* Slots of L2 are on the node of the shard's GPU. */
static void test_near(void **state)
{
    const uint8_t *memory;
    struct rig rig;
    bool is_near = true;

    (void)state;
    setup(&rig, PAYLOAD_BYTES - 1); /* nothing fits L1 */
    (void)store_block(&rig, 1, 0);
    memory = rig.host_memory;
    for (uint32_t i = 0; i < 64 * UNIT_BYTES; i++) {
        /* Payload of rank r lies in the part of node 1 - r. */
        if (memory[i] == 16 && memory[i + 1] == 16 && memory[i + 2] == 16)
            is_near = is_near && i >= 32 * UNIT_BYTES;
        if (memory[i] == 17 && memory[i + 1] == 17 && memory[i + 2] == 17)
            is_near = is_near && i < 32 * UNIT_BYTES;
    }
    assert_true(is_near);
    teardown(&rig);
}

/* What L1's devices cannot move is never put there, and does not lack it. */
static void test_too_large(void **state)
{
    struct kvt_cell cell;
    struct rig rig;

    (void)state;
    setup(&rig, PAYLOAD_BYTES);
    cell = store_block(&rig, 1, 1);
    assert_int_equal(kvt_store_ready_mask(rig.store, cell), 1u << KVT_TIER_HOST);
    assert_int_equal(run(&rig, KVT_JOB_RAISE, cell, 1, 0), KVT_MOVE_NO_ROOM);
    assert_int_equal(read_block(&rig, cell, 1, 1), KVT_MOVE_DONE);
    cell = store_block(&rig, 1, 0);
    assert_int_equal(kvt_store_ready_mask(rig.store, cell), 1u << KVT_TIER_DEVICE);
    teardown(&rig);
}

/* A copy with one shard on the lost GPU is gone, others are not; the zone comes back empty under
 * its new incarnation, whatever order that is seen in. */
static void test_loss(void **state)
{
    struct kvt_cell both, only0;
    struct kvt_store_stats stats;
    struct rig rig;

    (void)state;
    setup(&rig, 0);
    both = store_block(&rig, 1, 0);
    rig.home[1] = 0;
    only0 = store_block(&rig, 2, 0);
    fake_tier_lose_zone(rig.tiers[KVT_TIER_DEVICE], 1);
    fake_tier_revive_zone(rig.tiers[KVT_TIER_DEVICE], 1);
    /* Not seen so far: the place is refused, and then it is. */
    assert_int_equal(run(&rig, KVT_JOB_READ, both, 0, 1), KVT_MOVE_MISS);
    assert_int_equal(read_block(&rig, only0, 2, 0), KVT_MOVE_DONE);
    turn(&rig);
    turn(&rig);
    kvt_store_stats(rig.store, &stats);
    assert_int_equal(stats.cells, 1);
    assert_int_equal(stats.l1_losses, 1);
    assert_int_equal(stats.l1_lost_copies, 1);
    assert_int_equal(stats.tiers[KVT_TIER_DEVICE].dropped[KVT_DROP_LOST], 1);
    assert_int_equal(stats.l1_zones[1].incarnation, 1);
    assert_int_equal(stats.l1_zones[1].out_ns, 0);
    rig.home[1] = 1;
    assert_int_equal(read_block(&rig, store_block(&rig, 1, 0), 1, 0), KVT_MOVE_DONE);
    teardown(&rig);
}

/* Copies below serve on, also a read that was under way from the lost GPU. */
static void test_below_serves(void **state)
{
    struct kvt_cell cell;
    struct job at;
    struct rig rig;

    (void)state;
    setup(&rig, 0);
    cell = store_both(&rig, 3);
    memset(client_at(&rig, 0, 1), 0, PAYLOAD_BYTES);
    submit(&rig, &at, KVT_JOB_READ, cell, 0, 1);
    fake_tier_lose_zone(rig.tiers[KVT_TIER_DEVICE], 1);
    assert_int_equal(wait_done(&rig, &at), KVT_MOVE_DONE);
    assert_int_equal(at.job.from, KVT_TIER_HOST);
    assert_int_equal(client_at(&rig, 0, 1)[7], 3 * 16 + 1);
    assert_int_equal(kvt_store_ready_mask(rig.store, cell), 1u << KVT_TIER_HOST);
    assert_int_equal(read_block(&rig, cell, 3, 0), KVT_MOVE_DONE);
    teardown(&rig);
}

/* ... but not for one that was cancelled: it ends with what its transfer had. */
static void test_cancelled_read(void **state)
{
    struct kvt_cell cell;
    struct job at;
    struct rig rig;

    (void)state;
    setup(&rig, 0);
    cell = store_both(&rig, 3);
    submit(&rig, &at, KVT_JOB_READ, cell, 0, 1);
    kvt_store_cancel(rig.store, &at.job);
    fake_tier_lose_zone(rig.tiers[KVT_TIER_DEVICE], 1);
    assert_int_equal(wait_done(&rig, &at), KVT_MOVE_MISS);
    teardown(&rig);
}

/* A claim that is half filled on the lost GPU ends; the block can be stored again. */
static void test_half_filled(void **state)
{
    struct kvt_cell cell;
    struct job at;
    struct rig rig;

    (void)state;
    setup(&rig, 0);
    cell = claim(&rig, 4, 0);
    assert_int_equal(run(&rig, KVT_JOB_FILL, cell, 0, 1), KVT_MOVE_DONE);
    submit(&rig, &at, KVT_JOB_FILL, cell, 0, 0);
    fake_tier_lose_zone(rig.tiers[KVT_TIER_DEVICE], 1);
    turn(&rig);
    turn(&rig);
    assert_int_equal(kvt_store_cell_bytes(rig.store, cell), 0); /* stale */
    assert_int_equal(wait_done(&rig, &at), KVT_MOVE_ABORTED);
    assert_int_equal(run(&rig, KVT_JOB_FILL, cell, 0, 0), KVT_MOVE_ABORTED);
    cell = store_block(&rig, 4, 0);
    assert_int_equal(read_block(&rig, cell, 4, 0), KVT_MOVE_DONE);
    teardown(&rig);
}

/* A copy that was being made in L1, or from it, when it was lost. */
static void test_copies_under_way(void **state)
{
    struct kvt_cell up, down;
    struct job raise, lower;
    struct rig rig;

    (void)state;
    setup(&rig, 0);
    up = store_both(&rig, 5);
    down = store_block(&rig, 6, 0);
    fake_tier_lose_zone(rig.tiers[KVT_TIER_DEVICE], 1);
    fake_tier_revive_zone(rig.tiers[KVT_TIER_DEVICE], 1);
    submit(&rig, &lower, KVT_JOB_LOWER, down, 0, 0); /* not seen so far */
    assert_int_equal(wait_done(&rig, &lower), KVT_MOVE_MISS);
    turn(&rig);
    turn(&rig);
    submit(&rig, &raise, KVT_JOB_RAISE, up, 0, 0);
    fake_tier_lose_zone(rig.tiers[KVT_TIER_DEVICE], 1);
    assert_int_equal(wait_done(&rig, &raise), KVT_MOVE_NO_ROOM); /* it is still below */
    assert_int_equal(read_block(&rig, up, 5, 0), KVT_MOVE_DONE);
    teardown(&rig);
}

/* Engines on a GPU: all their copies are the device's, from and to L1, L2 and (bounced or raised)
 * L3; a layout of another incarnation is a client that is gone. The fake tiers check who moves. */
static void test_gpu_client(void **state)
{
    struct kvt_cell high, low;
    struct rig rig;

    (void)state;
    setup(&rig, PAYLOAD_BYTES);
    move_client_to(&rig, 1);
    high = store_block(&rig, 7, 0);
    low = store_block(&rig, 7, 1); /* too large for L1 */
    assert_int_equal(read_block(&rig, high, 7, 0), KVT_MOVE_DONE);
    assert_int_equal(read_block(&rig, low, 7, 1), KVT_MOVE_DONE);
    {
        struct job at;

        submit(&rig, &at, KVT_JOB_LOWER, low, 1, 0);
        assert_int_equal(wait_done(&rig, &at), KVT_MOVE_PRESENT);
        at = (struct job){0};
        at.job = (struct kvt_job){.kind = KVT_JOB_LOWER,
                                  .cell = low,
                                  .tier = KVT_TIER_DISK,
                                  .is_move = true,
                                  .deadline_ns = rig.now_ns + KVT_NS_PER_S,
                                  .done = on_done,
                                  .owner = &at};
        kvt_store_submit(rig.store, &at.job, rig.now_ns);
        assert_int_equal(wait_done(&rig, &at), KVT_MOVE_DONE);
    }
    assert_int_equal(kvt_store_ready_mask(rig.store, low), 1u << KVT_TIER_DISK);
    assert_int_equal(read_block(&rig, low, 7, 1), KVT_MOVE_DONE);
    rig.layout[0].incarnation = 9;
    assert_int_equal(run(&rig, KVT_JOB_READ, high, 0, 0), KVT_MOVE_CLIENT_GONE);
    teardown(&rig);
}

/* A GPU that fails a transfer says nothing of the bytes: copies in L1 and L2 stay, and serve later.
 */
static void test_errors(void **state)
{
    struct kvt_store_stats stats;
    struct kvt_cell low, high;
    struct rig rig;

    (void)state;
    setup(&rig, PAYLOAD_BYTES);
    move_client_to(&rig, 1);
    high = store_block(&rig, 9, 0);
    low = store_block(&rig, 9, 1); /* in L2 alone */
    fake_tier_fail(rig.tiers[KVT_TIER_DEVICE], 3);
    assert_int_equal(run(&rig, KVT_JOB_READ, low, 1, 0), KVT_MOVE_MISS);
    assert_int_equal(run(&rig, KVT_JOB_READ, high, 0, 1), KVT_MOVE_MISS);
    assert_int_equal(run(&rig, KVT_JOB_LOWER, high, 0, 0), KVT_MOVE_MISS);
    assert_int_equal(kvt_store_ready_mask(rig.store, low), 1u << KVT_TIER_HOST);
    assert_int_equal(kvt_store_ready_mask(rig.store, high), 1u << KVT_TIER_DEVICE);
    assert_int_equal(read_block(&rig, low, 9, 1), KVT_MOVE_DONE);
    assert_int_equal(read_block(&rig, high, 9, 0), KVT_MOVE_DONE);
    /* The CPU that cannot read L2 for a client in host memory has found bad memory. */
    rig.layout[1].is_gpu = false;
    fake_tier_fail(rig.tiers[KVT_TIER_HOST], 1);
    assert_int_equal(run(&rig, KVT_JOB_READ, low, 1, 0), KVT_MOVE_MISS);
    assert_int_equal(kvt_store_ready_mask(rig.store, low), 0);
    kvt_store_stats(rig.store, &stats);
    assert_int_equal(stats.tiers[KVT_TIER_DEVICE].dropped[KVT_DROP_BAD], 0);
    assert_int_equal(stats.tiers[KVT_TIER_HOST].dropped[KVT_DROP_BAD], 1);
    teardown(&rig);
}

/* However many hold a block in place, it can be read, copied down, and let go. */
static void test_pins(void **state)
{
    static struct kvt_store_held held[8200];
    struct kvt_cell cell;
    struct rig rig;
    uint32_t count = 0;

    (void)state;
    setup(&rig, 0);
    cell = store_block(&rig, 10, 0);
    while (count < 8200) {
        assert_true(kvt_store_hold_find(rig.store, cell, 0, &held[count]));
        if (!kvt_store_hold(rig.store, &held[count]))
            break;
        count++;
    }
    assert_true(count > 4000 && count < 5000);
    assert_int_equal(kvt_store_held_count(rig.store), count);
    assert_int_equal(read_block(&rig, cell, 10, 0), KVT_MOVE_DONE);
    assert_int_equal(run(&rig, KVT_JOB_LOWER, cell, 0, 0), KVT_MOVE_DONE);
    while (count > 0)
        kvt_store_unhold(rig.store, &held[--count]);
    assert_int_equal(kvt_store_held_count(rig.store), 0);
    assert_true(kvt_store_hold_find(rig.store, cell, 0, &held[0]));
    assert_true(kvt_store_hold(rig.store, &held[0]));
    kvt_store_unhold(rig.store, &held[0]);
    teardown(&rig);
}

/* Out of service without a loss of its own is as good as lost; a second loss while the first is
 * worked off, too. */
static void test_again(void **state)
{
    struct kvt_store_stats stats;
    struct kvt_cell cell;
    struct rig rig;

    (void)state;
    setup(&rig, 0);
    cell = store_block(&rig, 8, 0);
    fake_tier_set_zone_out(rig.tiers[KVT_TIER_DEVICE], 0, true);
    turn(&rig);
    turn(&rig);
    assert_int_equal(kvt_store_cell_bytes(rig.store, cell), 0);
    assert_true(kvt_store_next_ns(rig.store) != KVT_TIME_NEVER_NS); /* it looks again by itself */
    fake_tier_lose_zone(rig.tiers[KVT_TIER_DEVICE], 0);
    fake_tier_lose_zone(rig.tiers[KVT_TIER_DEVICE], 0);
    turn(&rig);
    kvt_store_stats(rig.store, &stats);
    assert_true(stats.l1_zones[0].out_ns > 0);
    assert_int_equal(stats.l1_zones[0].incarnation, 0);
    fake_tier_revive_zone(rig.tiers[KVT_TIER_DEVICE], 0);
    turn(&rig);
    kvt_store_stats(rig.store, &stats);
    assert_int_equal(stats.l1_zones[0].out_ns, 0);
    assert_int_equal(stats.l1_zones[0].incarnation, 2);
    assert_int_equal(stats.l1_losses, 1);
    assert_int_equal(read_block(&rig, store_block(&rig, 8, 0), 8, 0), KVT_MOVE_DONE);
    teardown(&rig);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_home),
        cmocka_unit_test(test_homes),
        cmocka_unit_test(test_near),
        cmocka_unit_test(test_too_large),
        cmocka_unit_test(test_loss),
        cmocka_unit_test(test_below_serves),
        cmocka_unit_test(test_cancelled_read),
        cmocka_unit_test(test_half_filled),
        cmocka_unit_test(test_copies_under_way),
        cmocka_unit_test(test_gpu_client),
        cmocka_unit_test(test_again),
        cmocka_unit_test(test_errors),
        cmocka_unit_test(test_pins),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
