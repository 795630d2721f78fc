/* What a turn of a GPU's thread owes to transfers that others could keep from their right: flights
 * of very many copies (a pool on another GPU: one a run) do not keep a small one waiting, nor is
 * time lost between their batches; a transfer of the next life is not ended with the last one. */
#include <stdlib.h>
#include <string.h>

#include "tests/common/cmocka.h"
#include "tests/common/gpu_world.h"
#include "tiers/device/gpu_internal.h" /* KVT_GPU_COPIES_PER_TURN */

#define PIECES 1000u
#define RUNS (PIECES * 4u) /* of a payload: no two of its engine blocks lie side by side */
#define FLIGHTS 16u        /* that there can be: four lanes of two streams, two on each */
#define TURNS_MAX 1000u

static const uint64_t from[] = {3, 9, 1, 40};

static struct gpu_world *far_world(void)
{
    struct gpu_world_config config = {.seed = 1,
                                      .devices_count = 2,
                                      .pool_device = 1,
                                      .pieces_count = PIECES,
                                      .piece_bytes = 64,
                                      .staging_bytes = 8 * KVT_MIB,
                                      .inflight_bytes_max = 8 * KVT_MIB};

    return gpu_world_new(&config);
}

static void submit(struct gpu_world *world, struct kvt_xfer *xfer)
{
    uint32_t taken;

    assert_int_equal(kvt_tier_submit(world->tier, &xfer, 1, &taken), 0);
}

/* A transfer of RUNS copies: the engine's pool -> a slot of the arena, or of L2. */
static struct kvt_xfer large(struct gpu_world *world, bool is_to_host, uint32_t slot)
{
    struct kvt_xfer xfer = gpu_world_xfer(world, 100 + slot);

    xfer.src = gpu_world_pool_place(world, true, from);
    if (is_to_host)
        gpu_world_header(world, slot, &xfer);
    xfer.dst = is_to_host ? gpu_world_host(world, slot) : gpu_world_device(world, slot);
    return xfer;
}

/* A transfer of one copy: a slot of L2 -> a slot of the arena. */
static struct kvt_xfer small(struct gpu_world *world, uint32_t slot)
{
    struct kvt_xfer xfer = gpu_world_xfer(world, 7);

    gpu_world_header(world, 7, &xfer);
    xfer.src = gpu_world_host(world, 7);
    xfer.dst = gpu_world_device(world, slot);
    return xfer;
}

/* A turn, and all that it queued; how many copies it made. */
static uint64_t turn(struct gpu_world *world, bool *ret_has_moved)
{
    uint64_t copies = kvt_fake_cuda_calls_made(KVT_FAKE_CUDA_COPY);

    *ret_has_moved = kvt_gpu_turn(world->gpu);
    copies = kvt_fake_cuda_calls_made(KVT_FAKE_CUDA_COPY) - copies;
    while (kvt_fake_cuda_step())
        ;
    return copies;
}

/* Turns until @xfer is back, and nothing else. */
static uint32_t turns_until(struct gpu_world *world, const struct kvt_xfer *xfer)
{
    struct kvt_xfer *back;
    bool has_moved;

    for (uint32_t i = 1; i < TURNS_MAX; i++) {
        (void)turn(world, &has_moved);
        if (kvt_tier_reap(world->tier, &back, 1) == 1) {
            assert_ptr_equal(back, xfer);
            return i;
        }
    }
    fail_msg("it did not come back");
    return 0;
}

/* One that is large has the turn in which it comes; the small one has the next, and is seen to be
 * over in the one behind it. */
static void test_small_beside_large(void **state)
{
    struct gpu_world *world = far_world();
    struct kvt_xfer first = large(world, false, 0), second = small(world, 1);

    (void)state;
    submit(world, &first);
    submit(world, &second);
    assert_true(turns_until(world, &second) <= 3);
    assert_int_equal(second.status, KVT_XFER_DONE);
    gpu_world_reap(world, 1);
    assert_int_equal(first.status, KVT_XFER_DONE);
    gpu_world_free(world);
}

/* As many large ones as get under way, in two lanes: a small one waits for a turn of each. */
static void test_small_among_many(void **state)
{
    enum { LARGE = 12 };
    struct gpu_world *world = far_world();
    struct kvt_xfer all[LARGE], last;
    bool has_moved;

    (void)state;
    for (uint32_t i = 0; i < LARGE; i++) {
        all[i] = large(world, i % 2 == 1, i / 2);
        submit(world, &all[i]);
        (void)turn(world, &has_moved); /* each is a flight, as long as there are any */
    }
    last = small(world, 6);
    submit(world, &last);
    assert_true(turns_until(world, &last) <= FLIGHTS + 2);
    assert_int_equal(last.status, KVT_XFER_DONE);
    gpu_world_reap(world, LARGE);
    for (uint32_t i = 0; i < LARGE; i++)
        assert_int_equal(all[i].status, KVT_XFER_DONE);
    gpu_world_free(world);
}

/* A turn that made copies moved something, and makes as many as it may: the thread does not sleep
 * between two batches. Bounded all the same. */
static void test_batches_follow(void **state)
{
    struct gpu_world *world = far_world();
    struct kvt_xfer first = large(world, false, 0), second = large(world, true, 0);
    uint64_t copies, made = 0;
    uint32_t turns = 0;
    bool has_moved;

    (void)state;
    submit(world, &first);
    submit(world, &second);
    while (made < 2 * RUNS) {
        copies = turn(world, &has_moved);
        assert_true(copies > 0 && has_moved);
        /* Descriptors and checks of a flight are not counted. */
        assert_true(copies <= KVT_GPU_COPIES_PER_TURN + 2 * FLIGHTS);
        made += copies;
        turns++;
    }
    assert_true(turns <= 2 * RUNS / KVT_GPU_COPIES_PER_TURN + 1);
    gpu_world_reap(world, 2);
    assert_int_equal(first.status, KVT_XFER_DONE);
    assert_int_equal(second.status, KVT_XFER_DONE);
    gpu_world_free(world);
}

/* An event that cannot be recorded is no progress: it is tried again after a pause. */
static void test_record_again(void **state)
{
    struct gpu_world *world = far_world();
    struct kvt_xfer xfer = small(world, 0);
    bool has_moved;

    (void)state;
    submit(world, &xfer);
    kvt_fake_cuda_fail(KVT_FAKE_CUDA_EVENT_RECORD, 1, KVT_CUDA_INVALID_VALUE);
    /* It is collected and summed, then queued. */
    for (uint32_t i = 0; i < 2 && !kvt_fake_cuda_has_failed(); i++) {
        (void)turn(world, &has_moved);
        assert_true(has_moved);
    }
    assert_true(kvt_fake_cuda_has_failed());
    kvt_fake_cuda_fail(KVT_FAKE_CUDA_EVENT_RECORD, 1, KVT_CUDA_INVALID_VALUE);
    (void)turn(world, &has_moved);
    assert_true(kvt_fake_cuda_has_failed());
    assert_false(has_moved);
    gpu_world_reap(world, 1);
    assert_int_equal(xfer.status, KVT_XFER_DONE);
    gpu_world_free(world);
}

/* Taken back by half: the health is OK, so the engine submits, and the thread, which finds that it
 * is parked, has its turn before the control thread goes on. */
static void test_of_the_next_life(void **state)
{
    struct gpu_world_config config = {.seed = 2};
    struct gpu_world *world = gpu_world_new(&config);
    struct kvt_xfer before, after, *back;

    (void)state;
    kvt_gpu_lose(world->gpu, KVT_CUDA_ECC);
    while (!kvt_gpu_is_parked(world->gpu))
        (void)kvt_gpu_turn(world->gpu);
    before = small(world, 0);
    submit(world, &before);
    (void)kvt_gpu_turn(world->gpu);
    assert_int_equal(kvt_tier_reap(world->tier, &back, 1), 1);
    assert_int_equal(before.status, KVT_XFER_OUT_OF_SERVICE);

    atomic_store(&world->tier->counters.health, KVT_TIER_HEALTH_OK);
    after = small(world, 0);
    submit(world, &after);
    (void)kvt_gpu_turn(world->gpu);
    assert_int_equal(kvt_tier_reap(world->tier, &back, 1), 0);
    gpu_world_take_back(world);
    gpu_world_reap(world, 1);
    assert_int_equal(after.status, KVT_XFER_DONE);
    gpu_world_free(world);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_small_beside_large), cmocka_unit_test(test_small_among_many),
        cmocka_unit_test(test_batches_follow),     cmocka_unit_test(test_record_again),
        cmocka_unit_test(test_of_the_next_life),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
