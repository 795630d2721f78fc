/* Hands of a GPU of L1: the threads alone, then what they have in their hands while other things
 * happen. Until a hand gave a piece back no transfer of it ends: not by a loss, a reset that is
 * asked for, an error, a deadline. */
#include <sched.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/clock.h"
#include "tests/common/cmocka.h"
#include "tests/common/gpu_world.h"
#include "tiers/device/gpu_hands.h"

/* ---- the threads alone ----------------------------------------------------------------------- */

#define PIECES 64u

static void count_work(void *ctx, const struct kvt_gpu_piece *piece)
{
    uint32_t *worked = ctx;

    worked[piece->first]++; /* TSan sees whether give and take hand it over */
}

static void test_threads(void **state)
{
    struct kvt_gpu_hands hands = {0};
    struct kvt_gpu_piece pieces[PIECES] = {0}, *back;
    uint32_t worked[PIECES] = {0}, taken = 0;
    struct kvt_doorbell bell;

    (void)state;
    assert_int_equal(kvt_doorbell_init(&bell), 0);
    assert_int_equal(kvt_gpu_hands_init(&hands, 3, count_work, worked, &bell), 0);
    assert_int_equal(kvt_gpu_hands_start(&hands, 5), 0);
    for (uint32_t i = 0; i < PIECES; i++)
        pieces[i] = (struct kvt_gpu_piece){.first = i, .bytes = i};
    for (uint32_t i = 0; taken < PIECES;) {
        i += i < PIECES && kvt_gpu_hands_give(&hands, &pieces[i]);
        while ((back = kvt_gpu_hands_take(&hands)) != NULL) {
            worked[back->first] += 100;
            taken++;
        }
        kvt_doorbell_arm(&bell);
        if (hands.out_count > 0 && !kvt_gpu_hands_are_waiting(&hands))
            kvt_doorbell_wait(&bell, KVT_NS_PER_S);
        else
            kvt_doorbell_disarm(&bell);
    }
    for (uint32_t i = 0; i < PIECES; i++)
        assert_int_equal(worked[i], 101);
    assert_int_equal(hands.out_count, 0);
    kvt_gpu_hands_deinit(&hands);
    kvt_gpu_hands_deinit(&hands);
    kvt_doorbell_deinit(&bell);
}

/* By hand: the one with the least to do gets the next, and all have enough at some time. */
static void test_least_first(void **state)
{
    static const uint64_t bytes[] = {100, 30, 50, 60, 1, 1, 1, 1};
    static const uint32_t wanted[] = {0, 1, 1, 1, 0, 0, 0, 1};
    struct kvt_gpu_hands hands = {0};
    struct kvt_gpu_piece pieces[8] = {0}, more = {0};
    uint32_t worked[PIECES] = {0};
    struct kvt_doorbell bell;

    (void)state;
    assert_int_equal(kvt_doorbell_init(&bell), 0);
    assert_int_equal(kvt_gpu_hands_init(&hands, 2, count_work, worked, &bell), 0);
    assert_false(kvt_gpu_hand_step(&hands, 0));
    assert_null(kvt_gpu_hands_take(&hands));
    for (uint32_t i = 0; i < 8; i++) {
        pieces[i].bytes = bytes[i];
        assert_true(kvt_gpu_hands_give(&hands, &pieces[i]));
        assert_int_equal(pieces[i].hand, wanted[i]);
    }
    assert_false(kvt_gpu_hands_give(&hands, &more));
    assert_true(kvt_gpu_hand_step(&hands, 1));
    assert_false(kvt_gpu_hands_give(&hands, &more)); /* done is not taken */
    assert_true(kvt_gpu_hands_are_waiting(&hands));
    assert_ptr_equal(kvt_gpu_hands_take(&hands), &pieces[1]);
    assert_true(kvt_gpu_hands_give(&hands, &more));
    assert_int_equal(more.hand, 1);
    for (uint32_t i = 0; i < 2; i++)
        while (kvt_gpu_hand_step(&hands, i))
            ;
    for (uint32_t i = 0; i < 8; i++)
        assert_non_null(kvt_gpu_hands_take(&hands));
    assert_null(kvt_gpu_hands_take(&hands));
    kvt_gpu_hands_deinit(&hands);
    kvt_doorbell_deinit(&bell);
}

/* ---- what hands have ------------------------------------------------------------------------- */

static const uint64_t from[] = {3, 9, 8, 40}, to[] = {20, 21, 22, 23};

static struct gpu_world_config config_of(uint32_t hand_bytes)
{
    return (struct gpu_world_config){
        .seed = 1, .crossover_bytes = UINT32_MAX, .cpu_threads = 1, .hand_bytes = hand_bytes};
}

static void submit(struct gpu_world *world, struct kvt_xfer *xfer)
{
    uint32_t taken;

    assert_int_equal(kvt_tier_submit(world->tier, &xfer, 1, &taken), 0);
}

/* The GPU's thread has all the time it wants, the hand has none. */
static void without_hand(struct gpu_world *world)
{
    struct kvt_xfer *back;

    for (uint32_t i = 0; i < 200; i++) {
        (void)kvt_gpu_turn(world->gpu);
        kvt_fake_cuda_pump(4);
    }
    assert_int_equal(kvt_tier_reap(world->tier, &back, 1), 0);
}

/* A slot of L2 that is full: pool -> L2. */
static struct kvt_xfer stored(struct gpu_world *world, uint32_t slot)
{
    struct kvt_xfer xfer = gpu_world_xfer(world, 7);

    gpu_world_header(world, slot, &xfer);
    xfer.src = gpu_world_pool_place(world, true, from);
    xfer.dst = gpu_world_host(world, slot);
    assert_int_equal(gpu_world_run(world, &xfer), KVT_XFER_DONE);
    assert_int_equal(kvt_slot_check(gpu_world_slot(world, slot), &xfer.key), KVT_SLOT_OK);
    return xfer;
}

enum way { VERIFIED_UP, FILLED_UP, SEALED_DOWN, SCATTERED_DOWN, WAYS };

/* A transfer whose piece the hand has: before anything is queued, or behind its event. */
static struct kvt_xfer begin(struct gpu_world *world, enum way way)
{
    struct kvt_xfer xfer = stored(world, 2);

    if (way == VERIFIED_UP) {
        xfer.src = xfer.dst;
        xfer.flags = KVT_XFER_VERIFY;
        xfer.dst = gpu_world_device(world, 0);
    } else if (way == FILLED_UP) {
        xfer.src = gpu_world_pool_place(world, false, from);
        xfer.dst = gpu_world_device(world, 0);
    } else {
        xfer.src = gpu_world_pool_place(world, true, from);
        xfer.dst = gpu_world_device(world, 0);
        assert_int_equal(gpu_world_run(world, &xfer), KVT_XFER_DONE);
        xfer.src = xfer.dst;
        gpu_world_header(world, 3, &xfer);
        xfer.dst =
            way == SEALED_DOWN ? gpu_world_host(world, 3) : gpu_world_pool_place(world, false, to);
    }
    return xfer;
}

static void test_not_before_it_is_back(void **state)
{
    (void)state;
    for (uint32_t way = 0; way < WAYS; way++) {
        struct gpu_world_config config = config_of(1);
        struct gpu_world *world = gpu_world_new(&config);
        struct kvt_xfer xfer = begin(world, (enum way)way);
        uint64_t copies = kvt_fake_cuda_calls_made(KVT_FAKE_CUDA_COPY);

        xfer.deadline_ns = kvt_clock_mono_ns() + KVT_NS_PER_S;
        submit(world, &xfer);
        without_hand(world);
        if (way == VERIFIED_UP || way == FILLED_UP)
            assert_int_equal(kvt_fake_cuda_calls_made(KVT_FAKE_CUDA_COPY), copies);
        assert_true(kvt_gpu_hand_turn(world->gpu, 0));
        assert_false(kvt_gpu_hand_turn(world->gpu, 0));
        gpu_world_reap(world, 1);
        assert_int_equal(xfer.status, KVT_XFER_DONE);
        if (way == SEALED_DOWN)
            assert_int_equal(kvt_slot_check(gpu_world_slot(world, 3), &xfer.key), KVT_SLOT_OK);
        gpu_world_free(world);
    }
}

/* The device may be reset only when hands are done: pinned staging goes with it. */
static void test_loss(void **state)
{
    (void)state;
    for (uint32_t way = 0; way < WAYS; way++) {
        struct gpu_world_config config = config_of(1);
        struct gpu_world *world = gpu_world_new(&config);
        struct kvt_xfer xfer = begin(world, (enum way)way), later = gpu_world_xfer(world, 8);

        submit(world, &xfer);
        without_hand(world);
        kvt_gpu_lose(world->gpu, KVT_CUDA_ECC);
        later.src = gpu_world_pool_place(world, true, from);
        later.dst = gpu_world_device(world, 1);
        submit(world, &later);
        without_hand(world);
        assert_false(kvt_gpu_is_parked(world->gpu));
        assert_true(kvt_gpu_hand_turn(world->gpu, 0));
        (void)kvt_gpu_turn(world->gpu);
        assert_true(kvt_gpu_is_parked(world->gpu));
        gpu_world_reap(world, 2); /* resets it */
        assert_int_equal(xfer.status, KVT_XFER_OUT_OF_SERVICE);
        assert_int_equal(later.status, KVT_XFER_OUT_OF_SERVICE);
        assert_int_equal(atomic_load(&kvt_gpu_counters(world->gpu)->inflight_bytes), 0);
        gpu_world_take_back(world);
        (void)stored(world, 4);
        gpu_world_free(world);
    }
}

/* L2 may be unpinned only when no copy of it is under way, nor will be from what a hand has. */
static void test_pin(void **state)
{
    struct gpu_world_config config = config_of(1);
    struct gpu_world *world = gpu_world_new(&config);
    struct kvt_xfer xfer = begin(world, VERIFIED_UP);

    (void)state;
    submit(world, &xfer);
    without_hand(world);
    kvt_gpu_set_host_pinned(world->gpu, false);
    without_hand(world);
    assert_false(kvt_gpu_has_left_host(world->gpu));
    assert_true(kvt_gpu_hand_turn(world->gpu, 0));
    gpu_world_reap(world, 1);
    assert_int_equal(xfer.status, KVT_XFER_DONE);
    (void)kvt_gpu_turn(world->gpu);
    assert_true(kvt_gpu_has_left_host(world->gpu));
    gpu_world_free(world);
}

/* What the hand finds bad ends alone; a copy that fails behind it ends with -EIO, not before. */
static void test_what_goes_wrong(void **state)
{
    struct gpu_world_config config = config_of(1);
    struct gpu_world *world = gpu_world_new(&config);
    struct kvt_xfer good = begin(world, VERIFIED_UP), bad = good, *both[] = {&good, &bad};
    uint32_t taken;

    (void)state;
    (void)stored(world, 5);
    gpu_world_slot(world, 5)[world->header_bytes + 17] ^= 1;
    bad.src = gpu_world_host(world, 5);
    bad.dst = gpu_world_device(world, 1);
    assert_int_equal(kvt_tier_submit(world->tier, both, 2, &taken), 0);
    gpu_world_reap(world, 2);
    assert_int_equal(good.status, KVT_XFER_DONE);
    assert_int_equal(bad.status, KVT_XFER_BAD_SLOT);
    assert_int_equal(bad.verdict, KVT_SLOT_BAD_PAYLOAD);
    submit(world, &good);
    without_hand(world);
    kvt_fake_cuda_fail(KVT_FAKE_CUDA_COPY, 1, KVT_CUDA_INVALID_VALUE);
    without_hand(world);
    assert_true(kvt_gpu_hand_turn(world->gpu, 0));
    gpu_world_reap(world, 1);
    assert_int_equal(good.status, -EIO);
    kvt_fake_cuda_fail(KVT_FAKE_CUDA_COPY, 0, 0);
    submit(world, &good);
    gpu_world_reap(world, 1);
    assert_int_equal(good.status, KVT_XFER_DONE);
    gpu_world_free(world);
}

/* Little is not worth a handover; several together may be. */
static void test_small_stays(void **state)
{
    struct gpu_world_config config = config_of(0);
    struct gpu_world *world = gpu_world_new(&config);
    struct kvt_xfer xfers[12], *all[12];
    uint32_t taken;

    (void)state;
    assert_true(world->stored_bytes * 2 < KVT_GPU_HAND_BYTES);
    xfers[0] = begin(world, VERIFIED_UP);
    submit(world, &xfers[0]);
    gpu_world_reap(world, 1); /* the test steps hands: so look that it had nothing */
    assert_int_equal(world->hand_pieces, 0);
    gpu_world_free(world);

    config = config_of(6 * 1040 * 4 * 3); /* of three payloads */
    world = gpu_world_new(&config);
    for (uint32_t i = 0; i < 12; i++) {
        xfers[i] = begin(world, VERIFIED_UP);
        xfers[i].dst = gpu_world_device(world, i);
        all[i] = &xfers[i];
    }
    world->hand_pieces = 0;
    assert_int_equal(kvt_tier_submit(world->tier, all, 12, &taken), 0);
    gpu_world_reap(world, 12);
    for (uint32_t i = 0; i < 12; i++)
        assert_int_equal(xfers[i].status, KVT_XFER_DONE);
    assert_int_equal(world->hand_pieces, 4);
    gpu_world_free(world);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_threads),
        cmocka_unit_test(test_least_first),
        cmocka_unit_test(test_not_before_it_is_back),
        cmocka_unit_test(test_loss),
        cmocka_unit_test(test_pin),
        cmocka_unit_test(test_what_goes_wrong),
        cmocka_unit_test(test_small_stays),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
