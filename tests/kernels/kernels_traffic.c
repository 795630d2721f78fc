/* How much the kernels load and store, how wide, and with how many threads: the columns "reads",
 * "writes" and "done by" of docs/kernels.md, the first two counted by the shim while the kernels'
 * source runs. Right bytes do not show a kernel that moves them twice or one at a time, nor one
 * whose lanes have nothing to do; a GPU would only be slow with it. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/args.h"
#include "kernels/shape.h"
#include "kernels/shim_tables.h"
#include "tests/common/cmocka.h"
#include "tests/kernels/naive.h"

#define MEMORY_BYTES (1u << 20)

/* The shape that a GPU would get, and one with more work than threads. */
static const enum kvt_shim_kind shims[] = {KVT_SHIM_PLAIN, KVT_SHIM_FEW};
static uint8_t *src, *dst; /* MEMORY_BYTES each, page by page */

/* What was done since the last call: @loads and @stores times 1, 2, 4, 8 and 16 bytes. */
static void assert_traffic(const char *what, const uint64_t loads[5], const uint64_t stores[5])
{
    struct kvt_shim_traffic traffic;

    kvt_shim_traffic_take(&traffic);
    for (uint32_t i = 0; i < 5; i++) {
        if (traffic.loads[i] != loads[i] || traffic.stores[i] != stores[i])
            fail_msg("%s, by %u bytes: %" PRIu64 " loads, %" PRIu64 " stores instead of %" PRIu64
                     ", %" PRIu64,
                     what, 1u << i, traffic.loads[i], traffic.stores[i], loads[i], stores[i]);
    }
}

/* ---- copies ------------------------------------------------------------------------------------
 */

#define BLOCKS 7u

struct row {
    const char *what;
    uint32_t bytes, shift; /* of a piece; of its pool from 16 */
    uint64_t accesses[5];  /* for one part, each way */
};

static void try_copy(const struct kvt_kernels *kernels, const struct row *row, bool is_gather)
{
    const struct kvt_copy_piece pieces[2] = {
        {.base = (uintptr_t)src + row->shift, .stride_bytes = 8192, .bytes = row->bytes},
        {.base = (uintptr_t)src + MEMORY_BYTES / 2 + row->shift,
         .stride_bytes = 8192,
         .bytes = row->bytes,
         .payload_offset_bytes = (uint64_t)BLOCKS * row->bytes}};
    const uint64_t ids[BLOCKS] = {9, 1, KVT_KERNEL_BLOCK_NONE, 4, 2, 7, 0};
    uint64_t check = 0, accesses[5];
    const struct kvt_copy_job job = {
        .payload = (uintptr_t)dst,
        .pieces = (uintptr_t)pieces,
        .blocks = (uintptr_t)ids,
        .check = row->bytes % 8 == 0 ? (uintptr_t)&check : 0,
        .pieces_count = 2,
        .blocks_count = BLOCKS,
    };
    struct kvt_copy_batch batch = {.jobs = (uintptr_t)&job, .jobs_count = 1};

    naive_batch_hold(&batch, &job);
    for (uint32_t i = 0; i < 5; i++)
        accesses[i] = row->accesses[i] * 2 * (BLOCKS - 1);
    assert_int_equal((is_gather ? kernels->gather : kernels->scatter)(NULL, &batch), 0);
    assert_traffic(row->what, accesses, accesses);
}

/* Every byte once each way, as wide as both addresses allow. */
static void test_copies(void **state)
{
    static const struct row rows[] = {
        {"4 KiB", 4096, 0, {[4] = 256}},       {"two units and a half", 5120, 0, {[4] = 320}},
        {"a lane's vector", 16, 0, {[4] = 1}}, {"256 B", 256, 0, {[4] = 16}},
        {"8 from 16", 4096, 8, {[3] = 512}},   {"4 from 8", 4096, 4, {[2] = 1024}},
        {"2 from 4", 512, 2, {[1] = 256}},     {"1 from 2", 512, 1, {[0] = 512}},
    };

    (void)state;
    for (uint32_t i = 0; i < 4 * KVT_COUNT_OF(rows); i++)
        try_copy(kvt_kernels_shim(shims[i % 2]), &rows[i / 4], i / 2 % 2 == 0);
}

static void test_check(void **state)
{
    static const struct {
        const char *what;
        uint32_t bytes, shift;
        uint64_t loads[5];
    } rows[] = {
        {"whole vectors", 65536, 0, {[4] = 4096}},
        {"a word and a tail", 1000 * 16 + 8 + 3, 0, {[4] = 1000, [3] = 1, [0] = 3}},
        {"words", 8000, 8, {[3] = 1000}},
        {"halves of words", 8000, 4, {[2] = 2000}},
    };
    static const uint64_t none[5];

    (void)state;
    for (uint32_t i = 0; i < 2 * KVT_COUNT_OF(rows); i++) {
        uint64_t check = 0;
        const struct kvt_check_job job = {.payload = (uintptr_t)src + rows[i / 2].shift,
                                          .bytes = rows[i / 2].bytes,
                                          .check = (uintptr_t)&check};
        const struct kvt_check_batch batch = {
            .jobs = (uintptr_t)&job, .jobs_count = 1, .bytes_max = job.bytes};

        assert_int_equal(kvt_kernels_shim(shims[i % 2])->check(NULL, &batch), 0);
        assert_traffic(rows[i / 2].what, rows[i / 2].loads, none);
    }
}

/* Between all orders. */
static void test_relayout(void **state)
{
    (void)state;
    for (uint32_t i = 0; i < 2 * 64; i++) {
        const struct kvt_relayout change = {.src = (uintptr_t)src,
                                            .dst = (uintptr_t)dst,
                                            .from = 1 + i / 2 % 8,
                                            .to = 1 + i / 16,
                                            .layers = 3,
                                            .pages = 5,
                                            .tokens = 16,
                                            .heads = 4,
                                            .head_bytes = 192};
        const uint64_t accesses[5] = {[4] = kvt_relayout_bytes(&change) / 16};

        assert_int_equal(kvt_kernels_shim(shims[i % 2])->relayout(NULL, &change), 0);
        assert_traffic("relayout", accesses, accesses);
    }
}

/* ---- quantisation ------------------------------------------------------------------------------
 */

#define PLANES 3u

/* Heads times planes have one scale each; a block of threads reads it with each of them. */
static void try_quant(const struct kvt_kernels *kernels, const struct kvt_quant_spec *spec,
                      bool is_wide)
{
    const struct kvt_quant_job job = {.raw = (uintptr_t)src + (is_wide ? 0 : 2),
                                      .quantised = (uintptr_t)dst,
                                      .planes_count = PLANES,
                                      .end_plane = PLANES};
    const struct kvt_quant_batch batch = {
        .spec = *spec, .jobs = (uintptr_t)&job, .jobs_count = 1, .planes_max = PLANES};
    const uint64_t elems = (uint64_t)PLANES * spec->plane_tokens * spec->heads * spec->head_dim;
    const uint64_t scales = (uint64_t)PLANES * spec->heads;
    const uint64_t gaps = kvt_quant_bytes(spec, elems * 2) - elems - scales * 4;
    const uint64_t readers = scales * kvt_shape_quant(&batch, KVT_SHAPE_BLOCKS_MAX).threads;
    uint64_t loads[5] = {0}, stores[5] = {[0] = gaps, [2] = scales};

    loads[is_wide ? 4 : 1] = 2 * elems / (is_wide ? 8 : 1);
    stores[is_wide ? 3 : 0] += elems / (is_wide ? 8 : 1);
    assert_int_equal(kernels->quantise(NULL, &batch), 0);
    assert_traffic("quantise", loads, stores);
    memset(loads, 0, sizeof(loads));
    memset(stores, 0, sizeof(stores));
    loads[2] = readers;
    loads[is_wide ? 3 : 0] = stores[is_wide ? 4 : 1] = elems / (is_wide ? 8 : 1);
    assert_int_equal(kernels->dequantise(NULL, &batch), 0);
    assert_traffic("dequantise", loads, stores);
}

static void test_quant(void **state)
{
    struct kvt_quant_spec spec = {.plane_tokens = 16, .heads = 5, .head_dim = 64};

    (void)state;
    for (uint32_t i = 0; i < 32; i++) {
        spec.kind = i % 2 == 0 ? KVT_QUANT_FP8_E4M3 : KVT_QUANT_INT8;
        spec.elem = i / 2 % 2 == 0 ? KVT_ELEM_FP16 : KVT_ELEM_BF16;
        spec.order = i / 4 % 2 == 0 ? KVT_ORDER_TOKENS_FIRST : KVT_ORDER_HEADS_FIRST;
        try_quant(kvt_kernels_shim(shims[i / 8 % 2]), &spec, i / 16 == 0);
    }
}

/* ---- threads -----------------------------------------------------------------------------------
 */

static void test_lanes(void **state)
{
    static const struct {
        uint32_t bytes, lanes;
    } rows[] = {{1, 1},
                {32, 1},
                {33, 2},
                {64, 2},
                {128, 4},
                {256, 8},
                {512, 16},
                {513, 32},
                {1024, 32},
                {4096, 32},
                {(1u << 20) + 1, 32}};

    (void)state;
    for (uint32_t i = 0; i < KVT_COUNT_OF(rows); i++) {
        const struct kvt_copy_batch batch = {.jobs_count = 3000,
                                             .pieces_max = 64,
                                             .blocks_max = 64,
                                             .piece_bytes_max = rows[i].bytes};
        const struct kvt_shape shape = kvt_shape_copy(&batch, KVT_SHAPE_BLOCKS_MAX);

        assert_int_equal(shape.lanes, rows[i].lanes);
        assert_int_equal(shape.chunk_bytes, rows[i].lanes * 64);
        assert_int_equal(shape.chunks, kvt_div_up(rows[i].bytes, shape.chunk_bytes));
        assert_int_equal(shape.blocks_y, 3000);
        assert_int_equal(shape.blocks_x, 1); /* 4,096 blocks in all */
    }
}

/* As many warps as have eight elements for a thread. */
static void test_warps(void **state)
{
    static const struct {
        uint32_t tokens, dim, threads;
    } rows[] = {{1, 1, 32},    {16, 16, 32},   {17, 16, 64},
                {16, 64, 128}, {16, 128, 256}, {64, 128, 256}};

    (void)state;
    for (uint32_t i = 0; i < KVT_COUNT_OF(rows); i++) {
        const struct kvt_quant_batch batch = {
            .spec = {.plane_tokens = rows[i].tokens, .heads = 8, .head_dim = rows[i].dim},
            .jobs_count = 3,
            .planes_max = 6};
        const struct kvt_shape shape = kvt_shape_quant(&batch, KVT_SHAPE_BLOCKS_MAX);

        assert_int_equal(shape.threads, rows[i].threads);
        assert_int_equal(shape.blocks_x, 6 * 8); /* a block for each head of each plane */
        assert_int_equal(shape.blocks_y, 3);
    }
}

static int setup(void **state)
{
    uint64_t random = 1;

    (void)state;
    src = aligned_alloc(4096, MEMORY_BYTES);
    dst = aligned_alloc(4096, MEMORY_BYTES);
    if (src == NULL || dst == NULL)
        return -1;
    naive_fill(&random, src, MEMORY_BYTES);
    naive_fill(&random, dst, MEMORY_BYTES);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    free(src);
    free(dst);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_copies),   cmocka_unit_test(test_check),
        cmocka_unit_test(test_relayout), cmocka_unit_test(test_quant),
        cmocka_unit_test(test_lanes),    cmocka_unit_test(test_warps),
    };

    return cmocka_run_group_tests(tests, setup, teardown);
}
