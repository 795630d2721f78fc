/* What goes up from L2 is compared with what the CPU read of it, whether or not L2 is verified: a
 * copy that moved half of its bytes, or a bit that turned on the way, is a bad slot, and nothing of
 * it stays in L1 as good. To a slot, and to a pool by kernel, by copy engine, quantised, in part
 * and with holes. And what nobody could compare is counted. */
#include <stdlib.h>
#include <string.h>

#include "tests/common/cmocka.h"
#include "tests/common/gpu_world.h"

#define SALT 77u

struct way {
    const char *name;
    bool is_to_slot, is_by_runs, is_quantised, is_partial, has_hole, is_unpinned;
    uint32_t cpu_threads;
};

enum { CONTENT, OTHER, CONTENTS }; /* in slots of L2 of these numbers */

static const uint64_t from[CONTENTS][4] = {{3, 9, 8, 40}, {41, 4, 10, 11}}, to[] = {20, 21, 22, 23};
static const struct kvt_quant_spec int8 = {.kind = KVT_QUANT_INT8,
                                           .elem = KVT_ELEM_FP16,
                                           .order = KVT_ORDER_TOKENS_FIRST,
                                           .plane_tokens = 4,
                                           .heads = 2,
                                           .head_dim = 64};

/* With both contents in L2. */
static struct gpu_world *way_open(const struct way *way)
{
    struct gpu_world_config config = {.seed = 1,
                                      .crossover_bytes = way->is_by_runs ? 16 : UINT32_MAX,
                                      .is_unpinned = way->is_unpinned,
                                      .cpu_threads = way->cpu_threads,
                                      .hand_bytes = 1024};
    struct gpu_world *world;
    struct kvt_xfer xfer;

    if (way->is_by_runs)
        config.pieces_count = 2; /* runs are few */
    if (way->is_quantised) {
        config.quant = int8;
        config.piece_bytes = (uint32_t)kvt_quant_plane_bytes(&int8);
    }
    world = gpu_world_new(&config);
    for (uint32_t c = 0; c < CONTENTS; c++) {
        xfer = gpu_world_xfer(world, 7 + c);
        gpu_world_header(world, c, &xfer);
        xfer.src = gpu_world_pool_place(world, true, from[c]);
        xfer.dst = gpu_world_host(world, c);
        assert_int_equal(gpu_world_run(world, &xfer), KVT_XFER_DONE);
    }
    return world;
}

/* Where it goes is full of something else before. */
static int way_run(const struct way *way, struct gpu_world *world, uint32_t content)
{
    static const uint64_t some[] = {20, KVT_ENGINE_BLOCK_NONE, 22, 23};
    struct kvt_xfer xfer = gpu_world_xfer(world, 7 + content);

    memset(kvt_fake_cuda_memory(kvt_gpu_arena(world->gpu), world->stored_bytes), 0xee,
           world->stored_bytes);
    for (uint32_t b = 0; b < 4; b++)
        gpu_world_pool_fill(world, world->pool.memory, to[b], SALT);
    xfer.src = gpu_world_host(world, content);
    xfer.dst = way->is_to_slot ? gpu_world_device(world, 0)
                               : gpu_world_pool_place(world, true, way->has_hole ? some : to);
    if (way->is_partial) {
        xfer.dst.view.first_piece = 1;
        xfer.dst.view.end_piece = world->config.pieces_count - 1;
    }
    return gpu_world_run(world, &xfer);
}

/* What is there now. */
static uint8_t *way_result(const struct way *way, struct gpu_world *world, uint64_t *ret_bytes)
{
    uint8_t *bytes = malloc(KVT_MAX(world->payload_bytes, world->stored_bytes));

    *ret_bytes = way->is_to_slot ? world->stored_bytes : world->payload_bytes;
    if (way->is_to_slot)
        memcpy(bytes, kvt_fake_cuda_memory(kvt_gpu_arena(world->gpu), *ret_bytes), *ret_bytes);
    else
        gpu_world_payload(world, world->pool.memory, to, bytes);
    return bytes;
}

/* Of what was refused no check is kept that would say that it is right. */
static void check_refused(const struct way *way, struct gpu_world *world)
{
    const struct kvt_gpu_counters *counters = kvt_gpu_counters(world->gpu);
    struct kvt_xfer xfer = gpu_world_xfer(world, 7);

    assert_int_equal(atomic_load(&counters->bad_checks), 1);
    if (!way->is_to_slot)
        return;
    xfer.src = gpu_world_device(world, 0);
    xfer.dst = gpu_world_pool_place(world, true, to);
    assert_int_equal(gpu_world_run(world, &xfer), KVT_XFER_DONE);
    assert_int_equal(atomic_load(&counters->unchecked_transfers), 1);
}

static void damage_each(const struct way *way, void (*damage)(uint64_t nth))
{
    uint64_t damaged = 1, found = 0, bytes;

    for (uint64_t nth = 1; damaged > 0; nth++) {
        struct gpu_world *world = way_open(way);
        uint8_t *right, *now;
        int status;

        assert_int_equal(way_run(way, world, CONTENT), KVT_XFER_DONE);
        right = way_result(way, world, &bytes);
        /* So that what a copy leaves out is not there from before. */
        assert_int_equal(way_run(way, world, OTHER), KVT_XFER_DONE);
        damaged = kvt_fake_cuda_damaged();
        damage(nth);
        status = way_run(way, world, CONTENT);
        damage(0);
        damaged = kvt_fake_cuda_damaged() - damaged;
        now = way_result(way, world, &bytes);
        if (status == KVT_XFER_BAD_SLOT)
            check_refused(way, world);
        else
            assert_int_equal(status, KVT_XFER_DONE);
        /* What a kernel or the copy engine writes to a pool is not read again. */
        if (status == KVT_XFER_DONE && (way->is_to_slot || damaged == 0))
            assert_memory_equal(now, right, bytes);
        found += status == KVT_XFER_BAD_SLOT;
        free(right);
        free(now);
        gpu_world_free(world);
    }
    if (found == 0)
        fail_msg("%s: nothing was found", way->name);
}

static void test_torn(void **state)
{
    static const struct way ways[] = {
        {.name = "to a slot", .is_to_slot = true},
        {.name = "to a slot, by a hand", .is_to_slot = true, .cpu_threads = 2},
        {.name = "to a slot, staged", .is_to_slot = true, .is_unpinned = true},
        {.name = "quantised, to a slot", .is_to_slot = true, .is_quantised = true},
        {.name = "to a pool"},
        {.name = "to a pool, by a hand", .cpu_threads = 2},
        {.name = "to a pool, staged", .is_unpinned = true},
        {.name = "to a pool by runs", .is_by_runs = true},
        {.name = "quantised, to a pool", .is_quantised = true},
        {.name = "in part", .is_partial = true},
        {.name = "in part, staged", .is_partial = true, .is_unpinned = true},
        {.name = "in part, by a hand", .is_partial = true, .cpu_threads = 2},
        {.name = "in part, quantised", .is_partial = true, .is_quantised = true},
        {.name = "with a hole", .has_hole = true},
        {.name = "in part with a hole", .is_partial = true, .has_hole = true},
    };

    (void)state;
    for (uint32_t i = 0; i < KVT_COUNT_OF(ways); i++) {
        damage_each(&ways[i], kvt_fake_cuda_tear);
        damage_each(&ways[i], kvt_fake_cuda_flip);
    }
}

/* Of a slot that is read in part the GPU has no check to compare with; the operator sees how many
 * those are. */
static void test_unchecked_are_counted(void **state)
{
    static const struct way in_part = {.name = "", .is_partial = true},
                            plain = {.name = "", .is_to_slot = true};
    struct gpu_world *world = way_open(&plain);
    const struct kvt_gpu_counters *counters = kvt_gpu_counters(world->gpu);
    struct kvt_xfer xfer = gpu_world_xfer(world, 7);
    uint64_t checked;

    (void)state;
    assert_int_equal(way_run(&plain, world, CONTENT), KVT_XFER_DONE);
    assert_int_equal(way_run(&in_part, world, CONTENT), KVT_XFER_DONE);
    assert_int_equal(way_run(&plain, world, CONTENT), KVT_XFER_DONE);
    assert_int_equal(atomic_load(&counters->unchecked_transfers), 0);
    checked = atomic_load(&counters->checked_bytes);
    xfer.src = gpu_world_device(world, 0);
    xfer.dst = gpu_world_pool_place(world, true, to);
    xfer.dst.view.first_piece = 1;
    assert_int_equal(gpu_world_run(world, &xfer), KVT_XFER_DONE);
    assert_int_equal(atomic_load(&counters->unchecked_transfers), 1);
    assert_int_equal(atomic_load(&counters->checked_bytes), checked);
    gpu_world_free(world);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_torn),
                                       cmocka_unit_test(test_unchecked_are_counted)};

    return cmocka_run_group_tests(tests, NULL, NULL);
}
