/* Every path of one GPU of L1, byte for byte: pools on the GPU, on another GPU and in host memory,
 * slots, L2 pinned or not, layouts dense and scattered, by kernel and by copy engine, quantised. */
#include <stdlib.h>
#include <string.h>

#include "daemon/base/clock.h"
#include "daemon/base/hash.h"
#include "kernels/shim_tables.h"
#include "tests/common/cmocka.h"
#include "tests/common/gpu_world.h"

static uint64_t path_of(const struct gpu_world *world, enum kvt_gpu_path path)
{
    return atomic_load(&kvt_gpu_counters(world->gpu)->path_transfers[path]);
}

/* What a slot holds of a raw payload, and what an engine gets back of it. */
static void stored_of(const struct gpu_world *world, uint8_t *payload, uint8_t *ret_stored)
{
    struct kvt_quant_job job = {.raw = (uintptr_t)payload, .quantised = (uintptr_t)ret_stored};
    struct kvt_quant_batch batch = {
        .spec = world->config.quant, .jobs = (uintptr_t)&job, .jobs_count = 1};

    if (world->config.quant.kind == KVT_QUANT_NONE) {
        memcpy(ret_stored, payload, world->payload_bytes);
        return;
    }
    job.planes_count = job.end_plane = batch.planes_max =
        (uint32_t)(world->payload_bytes / kvt_quant_plane_bytes(&batch.spec));
    assert_int_equal(kvt_kernels_host()->quantise(NULL, &batch), 0);
    assert_int_equal(kvt_kernels_host()->dequantise(NULL, &batch), 0);
}

struct bytes {
    uint8_t *raw, *stored, *now; /* payload of the source; in a slot; of the destination */
};

static struct bytes bytes_new(const struct gpu_world *world)
{
    return (struct bytes){.raw = malloc(world->payload_bytes),
                          .stored = calloc(1, world->stored_bytes),
                          .now = malloc(world->payload_bytes)};
}

static void bytes_free(struct bytes *bytes)
{
    free(bytes->raw);
    free(bytes->stored);
    free(bytes->now);
}

/* pool A -> slot -> L2 -> another slot -> pool B, where A and B are on the GPU or in the host. */
static void round_trip(struct gpu_world *world, bool is_from_gpu, bool is_to_gpu, uint32_t flags)
{
    const uint64_t from[] = {3, 9, 8, 40}, to[] = {20, 21, 22, 23};
    uint8_t *from_pool = is_from_gpu ? world->pool.memory : world->host_pool;
    uint8_t *to_pool = is_to_gpu ? world->pool.memory : world->host_pool;
    struct bytes bytes = bytes_new(world);
    struct kvt_xfer xfer = gpu_world_xfer(world, 7);

    xfer.flags = flags;
    gpu_world_payload(world, from_pool, from, bytes.raw);
    stored_of(world, bytes.raw, bytes.stored);
    gpu_world_header(world, 2, &xfer);
    xfer.src = gpu_world_pool_place(world, is_from_gpu, from);
    xfer.dst = gpu_world_device(world, 0);
    assert_int_equal(gpu_world_run(world, &xfer), KVT_XFER_DONE);
    xfer.src = xfer.dst;
    xfer.dst = gpu_world_host(world, 2);
    assert_int_equal(gpu_world_run(world, &xfer), KVT_XFER_DONE);
    assert_int_equal(kvt_slot_check(gpu_world_slot(world, 2), &xfer.key), KVT_SLOT_OK);
    assert_memory_equal(gpu_world_slot(world, 2) + world->header_bytes, bytes.stored,
                        world->stored_bytes);
    xfer.src = xfer.dst;
    xfer.dst = gpu_world_device(world, 5);
    assert_int_equal(gpu_world_run(world, &xfer), KVT_XFER_DONE);
    xfer.src = xfer.dst;
    xfer.dst = gpu_world_pool_place(world, is_to_gpu, to);
    assert_int_equal(gpu_world_run(world, &xfer), KVT_XFER_DONE);
    gpu_world_payload(world, to_pool, to, bytes.now);
    assert_memory_equal(bytes.now, bytes.raw, world->payload_bytes);
    bytes_free(&bytes);
}

/* A pool on a GPU <-> L2, without a slot in between. */
static void past_the_arena(struct gpu_world *world, uint32_t flags)
{
    const uint64_t from[] = {11, 12, 13, 2}, to[] = {30, 5, 31, 33};
    struct bytes bytes = bytes_new(world);
    struct kvt_xfer xfer = gpu_world_xfer(world, 8);

    xfer.flags = flags;
    gpu_world_payload(world, world->pool.memory, from, bytes.raw);
    stored_of(world, bytes.raw, bytes.stored);
    gpu_world_header(world, 4, &xfer);
    xfer.src = gpu_world_pool_place(world, true, from);
    xfer.dst = gpu_world_host(world, 4);
    assert_int_equal(gpu_world_run(world, &xfer), KVT_XFER_DONE);
    assert_int_equal(kvt_slot_check(gpu_world_slot(world, 4), &xfer.key), KVT_SLOT_OK);
    assert_memory_equal(gpu_world_slot(world, 4) + world->header_bytes, bytes.stored,
                        world->stored_bytes);
    xfer.src = xfer.dst;
    xfer.dst = gpu_world_pool_place(world, true, to);
    assert_int_equal(gpu_world_run(world, &xfer), KVT_XFER_DONE);
    gpu_world_payload(world, world->pool.memory, to, bytes.now);
    assert_memory_equal(bytes.now, bytes.raw, world->payload_bytes);
    bytes_free(&bytes);
}

/* A view of some pieces and some blocks: nothing else of the pool changes. */
static void some_of_it(struct gpu_world *world, bool is_from_l2, bool is_to_gpu)
{
    const uint64_t from[] = {1, 2, 3, 4}, to[] = {50, KVT_ENGINE_BLOCK_NONE, 51, 52};
    const uint64_t shown[] = {50, 53, 51, 52}, whole[] = {50, 51, 52, 53};
    uint8_t *to_pool = is_to_gpu ? world->pool.memory : world->host_pool;
    uint64_t part_bytes = world->payload_bytes / world->config.pieces_count;
    struct bytes bytes = bytes_new(world);
    struct kvt_xfer xfer = gpu_world_xfer(world, 9);

    for (uint32_t b = 0; b < 4; b++)
        gpu_world_pool_fill(world, to_pool, whole[b], 77);
    gpu_world_payload(world, world->pool.memory, from, bytes.raw);
    stored_of(world, bytes.raw, bytes.stored);
    gpu_world_header(world, 4, &xfer);
    xfer.src = gpu_world_pool_place(world, true, from);
    xfer.dst = is_from_l2 ? gpu_world_host(world, 4) : gpu_world_device(world, 6);
    assert_int_equal(gpu_world_run(world, &xfer), KVT_XFER_DONE);
    xfer.src = xfer.dst;
    xfer.dst = gpu_world_pool_place(world, is_to_gpu, to);
    xfer.dst.view.first_piece = 2;
    xfer.dst.view.end_piece = 4;
    gpu_world_payload(world, to_pool, shown, bytes.now);
    for (uint32_t p = 2; p < 4; p++)
        for (uint32_t b = 0; b < 4; b++)
            if (to[b] == KVT_ENGINE_BLOCK_NONE)
                memcpy(bytes.raw + p * part_bytes + b * world->config.piece_bytes,
                       bytes.now + p * part_bytes + b * world->config.piece_bytes,
                       world->config.piece_bytes);
    memcpy(bytes.now + 2 * part_bytes, bytes.raw + 2 * part_bytes, 2 * part_bytes);
    assert_int_equal(gpu_world_run(world, &xfer), KVT_XFER_DONE);
    gpu_world_payload(world, to_pool, shown, bytes.raw);
    assert_memory_equal(bytes.now, bytes.raw, world->payload_bytes);
    bytes_free(&bytes);
}

static void all_paths(const struct gpu_world_config *config)
{
    struct gpu_world *world = gpu_world_new(config);

    for (uint32_t i = 0; i < 3; i++) {
        uint32_t flags = i == 1 ? KVT_XFER_VERIFY : i == 2 ? KVT_XFER_BACKGROUND : 0;

        round_trip(world, true, true, flags);
        round_trip(world, false, true, flags);
        round_trip(world, true, false, flags);
        round_trip(world, false, false, flags);
        past_the_arena(world, flags);
    }
    for (uint32_t i = 0; i < 3; i++)
        some_of_it(world, i == 1, i != 2);
    assert_int_equal(atomic_load(&kvt_gpu_counters(world->gpu)->bad_checks), 0);
    assert_int_equal(atomic_load(&kvt_gpu_counters(world->gpu)->inflight_bytes), 0);
    gpu_world_free(world);
}

static void test_scattered(void **state)
{
    struct gpu_world_config config = {.seed = 1, .crossover_bytes = UINT32_MAX};

    (void)state;
    all_paths(&config);
    config.is_unpinned = true;
    all_paths(&config);
}

static void test_odd_bytes(void **state)
{
    struct gpu_world_config config = {
        .seed = 2, .crossover_bytes = UINT32_MAX, .piece_bytes = 333, .stride_bytes = 335};

    (void)state;
    all_paths(&config);
    config.is_unpinned = true;
    all_paths(&config);
}

static void test_copy_engine(void **state)
{
    struct gpu_world_config config = {.seed = 3, .crossover_bytes = 1, .pieces_count = 4};

    (void)state;
    all_paths(&config);
}

static void test_other_gpu(void **state)
{
    struct gpu_world_config config = {
        .seed = 4, .devices_count = 2, .pool_device = 1, .pieces_count = 200, .piece_bytes = 64};

    (void)state;
    all_paths(&config);
}

static const struct gpu_world_config quantised = {.seed = 5,
                                                  .crossover_bytes = UINT32_MAX,
                                                  .piece_bytes = 1024,
                                                  .quant = {.kind = KVT_QUANT_INT8,
                                                            .elem = KVT_ELEM_FP16,
                                                            .order = KVT_ORDER_TOKENS_FIRST,
                                                            .plane_tokens = 4,
                                                            .heads = 2,
                                                            .head_dim = 64}};

static void test_quantised(void **state)
{
    struct gpu_world_config config = quantised;

    (void)state;
    all_paths(&config);
    config.is_unpinned = true;
    config.quant.kind = KVT_QUANT_FP8_E4M3;
    all_paths(&config);
}

/* What runs on a GPU, on host threads: its kernels and our lists understand each other. */
static void test_source_of_the_kernels(void **state)
{
    struct gpu_world_config config = quantised;

    (void)state;
    for (uint32_t kind = 0; kind < KVT_SHIM_KINDS; kind++) {
        config.kernels = kvt_kernels_shim((enum kvt_shim_kind)kind);
        all_paths(&config);
        config.quant.kind = KVT_QUANT_NONE;
        all_paths(&config);
        config.piece_bytes = 333;
        all_paths(&config);
        config.piece_bytes = 1024;
        config.quant.kind = KVT_QUANT_FP8_E4M3;
    }
}

static void test_which_path(void **state)
{
    const uint64_t scattered[] = {3, 9, 8, 40}, dense[] = {4, 5, 6, 7};
    struct gpu_world_config config = {.crossover_bytes = 4 * 1040, .pieces_count = 3};
    struct gpu_world *world = gpu_world_new(&config);
    struct kvt_xfer xfer = gpu_world_xfer(world, 1);

    (void)state;
    xfer.src = gpu_world_pool_place(world, true, scattered);
    xfer.dst = gpu_world_device(world, 0);
    assert_int_equal(gpu_world_run(world, &xfer), 0);
    assert_int_equal(path_of(world, KVT_GPU_FROM_ENGINE_KERNEL), 1);
    xfer.src = gpu_world_pool_place(world, true, dense);
    assert_int_equal(gpu_world_run(world, &xfer), 0);
    assert_int_equal(path_of(world, KVT_GPU_FROM_ENGINE_COPY), 1);
    xfer.dst = xfer.src;
    xfer.src = gpu_world_device(world, 0);
    assert_int_equal(gpu_world_run(world, &xfer), 0);
    assert_int_equal(path_of(world, KVT_GPU_TO_ENGINE_COPY), 1);
    assert_int_equal(atomic_load(&kvt_gpu_counters(world->gpu)->unchecked_transfers), 0);
    assert_int_equal(atomic_load(&world->tier->counters.writes), 2);
    assert_int_equal(atomic_load(&world->tier->counters.reads), 1);
    gpu_world_free(world);
}

/* What waits while flights are under way becomes one launch. */
static void test_batched(void **state)
{
    uint64_t blocks[64][4];
    struct gpu_world_config config = {
        .crossover_bytes = UINT32_MAX, .pieces_count = 2, .piece_bytes = 256};
    struct gpu_world *world = gpu_world_new(&config);
    struct kvt_xfer xfers[64], *all[64];
    uint32_t taken;

    (void)state;
    for (uint32_t i = 0; i < 64; i++) {
        for (uint32_t b = 0; b < 4; b++)
            blocks[i][b] = (i * 4 + b * 7) % 64;
        xfers[i] = gpu_world_xfer(world, i + 1);
        xfers[i].src = gpu_world_pool_place(world, true, blocks[i]);
        xfers[i].dst = gpu_world_device(world, i);
        all[i] = &xfers[i];
    }
    assert_int_equal(kvt_tier_submit(world->tier, all, 64, &taken), 0);
    assert_int_equal(taken, 64);
    gpu_world_reap(world, 64);
    for (uint32_t i = 0; i < 64; i++)
        assert_int_equal(xfers[i].status, 0);
    assert_int_equal(atomic_load(&kvt_gpu_counters(world->gpu)->launches), 1);
    assert_int_equal(atomic_load(&kvt_gpu_counters(world->gpu)->launched_jobs), 64);
    gpu_world_free(world);
}

/* Blocks of one engine block, as a layout of its own in the world's pool. */
static struct kvt_xfer long_xfer(const struct gpu_world *world, const struct kvt_layout *layout,
                                 const uint64_t *blocks)
{
    struct kvt_xfer xfer = gpu_world_xfer(world, 2);

    xfer.key.payload_bytes = layout->stored_bytes;
    xfer.src = gpu_world_pool_place(world, true, blocks);
    xfer.src.view.layout = layout;
    xfer.src.view.end_piece = layout->pieces_count;
    xfer.dst = gpu_world_device(world, 1);
    return xfer;
}

static void long_check(struct gpu_world *world, const struct kvt_xfer *xfer, const uint64_t *blocks)
{
    const struct kvt_layout *layout = xfer->src.view.layout;
    uint64_t slot = kvt_gpu_arena(world->gpu) + xfer->dst.offset_bytes -
                    gpu_world_device(world, 0).offset_bytes;
    const uint8_t *at = kvt_fake_cuda_memory(slot, layout->stored_bytes);

    for (uint32_t p = 0; p < layout->pieces_count; p++)
        for (uint32_t b = 0; b < layout->engine_blocks_per_block; b++) {
            const struct kvt_layout_piece *piece = &layout->pieces[p];

            assert_memory_equal(
                at, world->pool.memory + piece->offset_bytes + blocks[b] * piece->stride_bytes,
                piece->bytes);
            at += piece->bytes;
        }
}

/* Layouts of two clients: very many short parts, and a few that are very long. One launch for both
 * would be for many long ones, which the kernels refuse. Each has its own. */
static void test_unlike_layouts(void **state)
{
    enum { PIECES = 17, BYTES = 512 * 1024, OFFSET = 8192 };
    struct gpu_world_config config = {.crossover_bytes = UINT32_MAX,
                                      .pieces_count = 2048,
                                      .piece_bytes = 16,
                                      .blocks_per_block = 128,
                                      .inflight_bytes_max = 64 * KVT_MIB,
                                      .arena_bytes = 16 * KVT_MIB};
    struct gpu_world *world = gpu_world_new(&config);
    struct kvt_layout_piece pieces[PIECES];
    struct kvt_layout layout = {
        .pieces_count = PIECES, .engine_blocks_per_block = 1, .pieces = pieces};
    struct kvt_xfer xfers[2], *all[] = {&xfers[0], &xfers[1]};
    uint64_t blocks[128], first = 0;
    uint32_t taken;

    (void)state;
    for (uint32_t b = 0; b < KVT_COUNT_OF(blocks); b++)
        blocks[b] = b * 7 % world->blocks_count;
    for (uint32_t p = 0; p < PIECES; p++)
        pieces[p] = (struct kvt_layout_piece){
            .offset_bytes = p * OFFSET, .stride_bytes = BYTES, .bytes = BYTES};
    assert_int_equal(kvt_layout_resolve(&layout, &world->region, 1, PIECES * BYTES), 0);
    for (uint32_t turn = 0; turn < 2; turn++) {
        xfers[turn] = gpu_world_xfer(world, 1);
        xfers[turn].src = gpu_world_pool_place(world, true, blocks);
        xfers[turn].dst = gpu_world_device(world, 0);
        xfers[1 - turn] = long_xfer(world, &layout, &first);
        assert_int_equal(kvt_tier_submit(world->tier, all, 2, &taken), 0);
        gpu_world_reap(world, 2);
        assert_int_equal(xfers[0].status, KVT_XFER_DONE);
        assert_int_equal(xfers[1].status, KVT_XFER_DONE);
        long_check(world, &xfers[turn], blocks);
        long_check(world, &xfers[1 - turn], &first);
        assert_int_equal(path_of(world, KVT_GPU_FROM_ENGINE_KERNEL), 2 * (turn + 1));
    }
    gpu_world_free(world);
}

/* A layout that the kernels refuse even alone goes by the copy engine: 2,047 short pieces and a
 * long one. */
static void test_one_long_piece(void **state)
{
    enum { PIECES = 2048, BLOCKS = 512, BYTES = 128 * 1024 };
    struct gpu_world_config config = {.crossover_bytes = UINT32_MAX,
                                      .inflight_bytes_max = 128 * KVT_MIB,
                                      .arena_bytes = 96 * KVT_MIB,
                                      .pool_bytes = 96 * KVT_MIB};
    struct gpu_world *world = gpu_world_new(&config);
    struct kvt_layout_piece *pieces = calloc(PIECES, sizeof(*pieces));
    struct kvt_layout layout = {
        .pieces_count = PIECES, .engine_blocks_per_block = BLOCKS, .pieces = pieces};
    struct kvt_xfer xfer;
    uint64_t blocks[BLOCKS];

    (void)state;
    for (uint32_t b = 0; b < BLOCKS; b++)
        blocks[b] = b;
    for (uint32_t p = 0; p < PIECES; p++)
        pieces[p] =
            (struct kvt_layout_piece){.offset_bytes = p * 9728, .stride_bytes = 16, .bytes = 16};
    pieces[5].stride_bytes = pieces[5].bytes = BYTES;
    for (uint64_t i = 0; i < world->pool_bytes; i += 8)
        memcpy(world->pool.memory + i, &i, 8);
    assert_int_equal(
        kvt_layout_resolve(&layout, &world->region, 1, BLOCKS * (BYTES + (PIECES - 1) * 16ull)), 0);
    xfer = long_xfer(world, &layout, blocks);
    assert_int_equal(gpu_world_run(world, &xfer), KVT_XFER_DONE);
    long_check(world, &xfer, blocks);
    assert_int_equal(path_of(world, KVT_GPU_FROM_ENGINE_COPY), 1);
    gpu_world_free(world);
    free(pieces);
}

static void test_threaded(void **state)
{
    struct gpu_world_config config = {
        .seed = 6, .crossover_bytes = UINT32_MAX, .is_threaded = true};

    (void)state;
    all_paths(&config);
}

/* The same paths, with the CPU's work in other hands: stepped, and threads. */
static void test_hands(void **state)
{
    struct gpu_world_config config = {
        .crossover_bytes = UINT32_MAX, .cpu_threads = 3, .hand_bytes = 1};

    (void)state;
    for (config.seed = 0; config.seed < 4; config.seed++) {
        config.is_threaded = config.seed % 2 == 1;
        config.is_unpinned = config.seed >= 2;
        all_paths(&config);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_scattered),      cmocka_unit_test(test_odd_bytes),
        cmocka_unit_test(test_copy_engine),    cmocka_unit_test(test_other_gpu),
        cmocka_unit_test(test_quantised),      cmocka_unit_test(test_source_of_the_kernels),
        cmocka_unit_test(test_which_path),     cmocka_unit_test(test_batched),
        cmocka_unit_test(test_unlike_layouts), cmocka_unit_test(test_one_long_piece),
        cmocka_unit_test(test_threaded),       cmocka_unit_test(test_hands),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
