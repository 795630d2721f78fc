/* The edges of what a kernel can be asked for, through every table: bytes beyond 4 GiB, pieces by
 * the million, more jobs than a grid is high, jobs of nothing, the largest launches there can be,
 * and numbers that quantisation has to say something of (NaN, infinities, zeros of both signs, the
 * least and the greatest, scales that no head has). What is merely far away costs no memory: it
 * lies in mappings of which only the pages in question are touched. */
#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "kernels/args.h"
#include "kernels/shape.h"
#include "tests/common/cmocka.h"
#include "tests/kernels/naive.h"
#include "tests/kernels/naive_quant.h"

#define NEAR_BYTES 4096u /* around a part, where nothing may be written */

static uint8_t *far_new(uint64_t bytes)
{
    void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

    assert_true(at != MAP_FAILED);
    return at;
}

static void far_clear(uint8_t *at, uint64_t bytes)
{
    assert_int_equal(madvise(at, bytes, MADV_DONTNEED), 0);
}

/* ---- copies: far ------------------------------------------------------------------------------
 */

#define FAR_POOL_BYTES (7 * KVT_GIB)
#define FAR_PAYLOAD_BYTES (40 * KVT_GIB)
#define FAR_PIECES 4u
#define FAR_BLOCKS 5u

static const uint64_t far_ids[FAR_BLOCKS] = {5, 0, KVT_KERNEL_BLOCK_NONE, 3, 4};

/* The first piece ends behind 4 GiB in the payload, and in the pool; the words of the second are
 * beyond 2^32. */
static void far_declare(struct kvt_copy_piece pieces[FAR_PIECES], const uint8_t *pool)
{
    static const struct kvt_copy_piece at[FAR_PIECES] = {
        {8192, KVT_GIB, 4 * KVT_GIB - 2504, 1000, 0},
        {64 * KVT_KIB, KVT_GIB + 16, 36 * KVT_GIB, 4096, 0},
        {KVT_MIB + 1, KVT_GIB - 4, 6 * KVT_GIB + 8, 24, 0},
        {2 * KVT_MIB, KVT_GIB + 1, 8, 4128, 0},
    };

    for (uint32_t p = 0; p < FAR_PIECES; p++) {
        pieces[p] = at[p];
        pieces[p].base += (uintptr_t)pool;
    }
}

static void assert_near_equal(const uint8_t *a, const uint8_t *b, uint64_t at, uint64_t bytes)
{
    uint64_t begin = at < NEAR_BYTES ? 0 : at - NEAR_BYTES;

    assert_memory_equal(a + begin, b + begin, at + bytes + NEAR_BYTES - begin);
}

/* @a and @b are pools, or payloads. */
static void far_compare(const struct naive_job *job, const uint8_t *a, const uint8_t *b,
                        bool are_pools)
{
    const struct kvt_copy_piece *pieces = (const void *)(uintptr_t)job->job.pieces;

    for (uint32_t p = 0; p < FAR_PIECES; p++) {
        for (uint32_t i = 0; i < FAR_BLOCKS; i++) {
            uint64_t in_pool = pieces[p].base - (uintptr_t)job->pool;

            if (far_ids[i] == KVT_KERNEL_BLOCK_NONE)
                continue;
            in_pool += far_ids[i] * pieces[p].stride_bytes;
            assert_near_equal(
                a, b, are_pools ? in_pool : pieces[p].payload_offset_bytes + i * pieces[p].bytes,
                pieces[p].bytes);
        }
    }
}

static void far_fill(const struct naive_job *job, uint64_t *state)
{
    const struct kvt_copy_piece *pieces = (const void *)(uintptr_t)job->job.pieces;

    for (uint32_t p = 0; p < FAR_PIECES; p++)
        for (uint32_t i = 0; i < FAR_BLOCKS; i++)
            if (far_ids[i] != KVT_KERNEL_BLOCK_NONE)
                naive_fill(state,
                           (uint8_t *)(uintptr_t)pieces[p].base +
                               far_ids[i] * pieces[p].stride_bytes,
                           pieces[p].bytes);
}

static void test_far(void **test_state)
{
    const struct kvt_kernels *tables[4];
    uint32_t count = naive_tables(tables);
    struct kvt_copy_piece pieces[FAR_PIECES];
    struct naive_job job = {.pool = far_new(FAR_POOL_BYTES), .payload = far_new(FAR_PAYLOAD_BYTES)};
    uint8_t *other_pool = far_new(FAR_POOL_BYTES), *other_payload = far_new(FAR_PAYLOAD_BYTES);
    struct kvt_copy_batch batch = {.jobs = (uintptr_t)&job.job, .jobs_count = 1};
    uint64_t state = naive_seed("far", 11), sum;

    (void)test_state;
    far_declare(pieces, job.pool);
    job.job = (struct kvt_copy_job){.payload = (uintptr_t)job.payload,
                                    .pieces = (uintptr_t)pieces,
                                    .blocks = (uintptr_t)far_ids,
                                    .check = (uintptr_t)&job.check,
                                    .pieces_count = FAR_PIECES,
                                    .blocks_count = FAR_BLOCKS};
    assert_int_equal(kvt_copy_validate(&job.job, FAR_PAYLOAD_BYTES), 0);
    naive_batch_hold(&batch, &job.job);
    for (uint32_t i = 0; i < count; i++) {
        far_clear(other_payload, FAR_PAYLOAD_BYTES);
        far_clear(job.payload, FAR_PAYLOAD_BYTES);
        far_fill(&job, &state);
        job.check = 0;
        sum = naive_copy(&job, job.pool, other_payload, true);
        assert_int_equal(tables[i]->gather(NULL, &batch), 0);
        far_compare(&job, job.payload, other_payload, false);
        assert_int_equal(job.check, sum);
        far_clear(other_pool, FAR_POOL_BYTES);
        far_clear(job.pool, FAR_POOL_BYTES);
        sum += naive_copy(&job, other_pool, job.payload, false);
        assert_int_equal(tables[i]->scatter(NULL, &batch), 0);
        far_compare(&job, job.pool, other_pool, true);
        assert_int_equal(job.check, sum);
    }
    assert_int_equal(munmap(job.pool, FAR_POOL_BYTES) | munmap(job.payload, FAR_PAYLOAD_BYTES), 0);
    assert_int_equal(munmap(other_pool, FAR_POOL_BYTES) | munmap(other_payload, FAR_PAYLOAD_BYTES),
                     0);
}

/* ---- copies: many -----------------------------------------------------------------------------
 */

#define MANY_BYTES 16u

struct many {
    uint32_t count;
    uint8_t *pool, *payload;
    struct kvt_copy_piece *pieces;
};

/* Pieces of 16 bytes; where they are in the pool is all mixed up. */
static void many_new(struct many *many, uint32_t count, uint64_t *state)
{
    *many = (struct many){.count = count,
                          .pool = aligned_alloc(16, (size_t)count * MANY_BYTES),
                          .payload = aligned_alloc(16, (size_t)count * MANY_BYTES),
                          .pieces = calloc(count, sizeof(*many->pieces))};
    assert_true(many->pool != NULL && many->payload != NULL && many->pieces != NULL);
    naive_fill(state, many->pool, (uint64_t)count * MANY_BYTES);
    memset(many->payload, 0, (size_t)count * MANY_BYTES);
    for (uint32_t i = 0; i < count; i++)
        many->pieces[i] = (struct kvt_copy_piece){.base = (uintptr_t)many->pool +
                                                          (uint64_t)i * 7919 % count * MANY_BYTES,
                                                  .stride_bytes = MANY_BYTES,
                                                  .payload_offset_bytes = (uint64_t)i * MANY_BYTES,
                                                  .bytes = MANY_BYTES};
}

static void many_free(struct many *many)
{
    free(many->pool);
    free(many->payload);
    free(many->pieces);
}

static void test_many_pieces(void **test_state)
{
    const struct kvt_kernels *tables[4];
    uint32_t count = naive_tables(tables);
    const uint64_t block = 0;
    uint64_t state = naive_seed("pieces", 12), sum = 0;
    struct kvt_copy_batch batch = {.jobs_count = 1};
    struct kvt_copy_job job;
    struct many many;

    many_new(&many, *(const bool *)*test_state ? 1u << 14 : 1u << 20, &state);
    job = (struct kvt_copy_job){.payload = (uintptr_t)many.payload,
                                .pieces = (uintptr_t)many.pieces,
                                .blocks = (uintptr_t)&block,
                                .check = (uintptr_t)&sum,
                                .pieces_count = many.count,
                                .blocks_count = 1};
    batch.jobs = (uintptr_t)&job;
    naive_batch_hold(&batch, &job);
    assert_int_equal(kvt_copy_validate(&job, (uint64_t)many.count * MANY_BYTES), 0);
    for (uint32_t i = 0; i < count; i++) {
        sum = 0;
        memset(many.payload, 0, (size_t)many.count * MANY_BYTES);
        assert_int_equal(tables[i]->gather(NULL, &batch), 0);
        for (uint32_t p = 0; p < many.count; p++)
            assert_int_equal(memcmp(many.payload + (size_t)p * MANY_BYTES,
                                    (const void *)(uintptr_t)many.pieces[p].base, MANY_BYTES),
                             0);
        assert_int_equal(sum, naive_check(many.payload, (uint64_t)many.count * MANY_BYTES));
    }
    many_free(&many);
}

/* More jobs than the 65,535 that a grid can be high; each third has nothing to do: no pieces, no
 * blocks, or a piece without bytes. */
static void test_many_jobs(void **test_state)
{
    const struct kvt_kernels *tables[4];
    const uint32_t jobs_count = *(const bool *)*test_state ? 9000 : 70000;
    uint32_t count = naive_tables(tables);
    uint64_t state = naive_seed("jobs", 13);
    struct kvt_copy_job *jobs = calloc(jobs_count, sizeof(*jobs));
    uint64_t *sums = calloc(jobs_count, sizeof(*sums)), block = 0;
    struct kvt_copy_batch batch = {.jobs = (uintptr_t)jobs, .jobs_count = jobs_count};
    struct many many;

    assert_true(jobs != NULL && sums != NULL);
    many_new(&many, jobs_count, &state);
    for (uint32_t i = 0; i < jobs_count; i++) {
        jobs[i] = (struct kvt_copy_job){.payload = (uintptr_t)many.payload,
                                        .pieces = (uintptr_t)&many.pieces[i],
                                        .blocks = (uintptr_t)&block,
                                        .check = (uintptr_t)&sums[i],
                                        .pieces_count = i % 9 != 0,
                                        .blocks_count = i % 9 != 3};
        many.pieces[i].bytes = i % 9 == 6 ? 0 : MANY_BYTES;
        naive_batch_hold(&batch, &jobs[i]);
    }
    for (uint32_t i = 0; i < count; i++) {
        memset(sums, 0, jobs_count * sizeof(*sums));
        memset(many.payload, 0xee, (size_t)jobs_count * MANY_BYTES);
        assert_int_equal(tables[i]->gather(NULL, &batch), 0);
        for (uint32_t j = 0; j < jobs_count; j++) {
            const uint8_t *at = many.payload + (size_t)j * MANY_BYTES;

            if (j % 3 == 0)
                assert_true(at[0] == 0xee && memcmp(at, at + 1, MANY_BYTES - 1) == 0);
            else
                assert_int_equal(
                    memcmp(at, (const void *)(uintptr_t)many.pieces[j].base, MANY_BYTES), 0);
            assert_true((sums[j] == 0) == (j % 3 == 0));
        }
    }
    many_free(&many);
    free(jobs);
    free(sums);
}

/* ---- launches ---------------------------------------------------------------------------------
 */

/* What CUDA allows, what the bodies of the kernels take for granted, and that no counter of theirs
 * goes round: one that walks @units in the strides of the whole launch. */
static void assert_shape(const struct kvt_shape *shape, uint64_t units, uint32_t units_a_block)
{
    assert_true(shape->blocks_x >= 1 && shape->blocks_y >= 1 && shape->blocks_y <= 65535);
    assert_true((uint64_t)shape->blocks_x * shape->blocks_y <= KVT_SHAPE_BLOCKS_MAX);
    assert_true(shape->threads >= 32 && shape->threads <= KVT_SHAPE_THREADS);
    assert_int_equal(shape->threads % 32, 0);
    assert_true(units + (uint64_t)shape->blocks_x * units_a_block <= UINT32_MAX);
}

static void assert_units(const struct kvt_shape *shape, uint64_t parts, uint32_t longest_bytes)
{
    assert_true(shape->lanes >= 1 && shape->threads % shape->lanes == 0 && shape->lanes <= 32);
    assert_true((uint64_t)shape->chunks * shape->chunk_bytes >= longest_bytes);
    assert_true((uint64_t)shape->chunks * shape->chunk_bytes <= UINT32_MAX);
    assert_shape(shape, parts * shape->chunks, shape->threads / shape->lanes);
}

static void test_copy_shapes(void **test_state)
{
    static const struct {
        uint32_t pieces, blocks, bytes;
    } rows[] = {{1, 1, 1},
                {1, 1, KVT_COPY_PIECE_BYTES_MAX},
                {1u << 20, 1, 4096},
                {1u << 20, 31, 4096},
                {8192, 8192, 31 * 64},
                {(1u << 31) - 1, 1, 1},
                {1, (1u << 31) - 1, 64},
                {127, 1, KVT_COPY_PIECE_BYTES_MAX}};
    static const uint32_t jobs_counts[] = {1, 3, 4096, 4097, 70000, (1u << 31) - 1};

    (void)test_state;
    for (uint32_t i = 0; i < KVT_COUNT_OF(rows) * KVT_COUNT_OF(jobs_counts); i++) {
        struct kvt_copy_batch batch = {.jobs = 4096};
        struct kvt_shape shape;
        uint32_t row = i % KVT_COUNT_OF(rows);

        batch.jobs_count = jobs_counts[i / KVT_COUNT_OF(rows)];
        batch.pieces_max = rows[row].pieces;
        batch.blocks_max = rows[row].blocks;
        batch.piece_bytes_max = rows[row].bytes;
        assert_int_equal(kvt_args_copy(&batch), 0);
        shape = kvt_shape_copy(&batch, KVT_SHAPE_BLOCKS_MAX);
        assert_units(&shape, (uint64_t)batch.pieces_max * batch.blocks_max, batch.piece_bytes_max);
    }
}

static void test_relayout_shapes(void **test_state)
{
    static const struct kvt_relayout rows[] = {
        {16, 1ull << 62, 1, 2, 1, 1, 1, 1, 1},
        {16, 1ull << 62, 1, 3, 65536, 16384, 32767, 65536, 1},
        {16, 1ull << 62, 1, 2, 65536, 16384, 32767, 65536, 1},
        {16, 1ull << 62, 3, 2, 1, 1u << 30, 1, 1, (1u << 31) - 1},
        {16, 1ull << 62, 2, 3, 1, 1, (1u << 31) - 1, 1, 1},
        {16, 1ull << 62, 3, 3, 1, 1, 1, (1u << 31) - 1, 1},
    };

    (void)test_state;
    for (uint32_t i = 0; i < KVT_COUNT_OF(rows); i++) {
        struct kvt_shape shape;

        assert_int_equal(kvt_args_relayout(&rows[i]), 0);
        shape = kvt_shape_relayout(&rows[i], KVT_SHAPE_BLOCKS_MAX);
        assert_int_equal((uint64_t)shape.runs * shape.run_bytes,
                         (uint64_t)rows[i].tokens * rows[i].heads * rows[i].head_bytes);
        assert_units(&shape, shape.runs, shape.run_bytes);
    }
}

static void test_other_shapes(void **test_state)
{
    static const struct kvt_quant_spec specs[] = {{1, 1, 1, 0, 1, 1, 1},
                                                  {1, 1, 1, 0, 65536, 1, 8192},
                                                  {2, 2, 2, 0, 1, 65536, 8192},
                                                  {2, 2, 2, 0, 1, 65536, 1}};
    const struct kvt_check_batch check = {
        .jobs = 4096, .jobs_count = (1u << 31) - 1, .bytes_max = UINT64_MAX};
    struct kvt_shape shape = kvt_shape_check(&check, KVT_SHAPE_BLOCKS_MAX);

    (void)test_state;
    assert_int_equal(kvt_args_check(&check), 0);
    assert_shape(&shape, 0, 0); /* it counts in 64 bits */
    for (uint32_t i = 0; i < KVT_COUNT_OF(specs); i++) {
        struct kvt_quant_batch batch = {.spec = specs[i], .jobs = 4096, .jobs_count = 70000};

        batch.planes_max = ((1u << 31) - 1) / specs[i].heads;
        assert_int_equal(kvt_args_quant(&batch), 0);
        shape = kvt_shape_quant(&batch, KVT_SHAPE_BLOCKS_MAX);
        assert_shape(&shape, (uint64_t)batch.planes_max * specs[i].heads, 1);
        batch.planes_max++;
        if ((uint64_t)batch.planes_max * specs[i].heads >= 1ull << 31)
            assert_int_equal(kvt_args_quant(&batch), -EINVAL);
    }
}

/* A block walks the jobs in strides of the grid's height: of 2^32 - 1 it would never see the end.
 */
static void test_too_many_jobs(void **test_state)
{
    const struct kvt_kernels *tables[4];
    uint32_t count = naive_tables(tables);
    struct kvt_copy_batch copy = {.jobs = 4096,
                                  .jobs_count = 1u << 31,
                                  .pieces_max = 1,
                                  .blocks_max = 1,
                                  .piece_bytes_max = 1};
    struct kvt_check_batch check = {.jobs = 4096, .jobs_count = UINT32_MAX, .bytes_max = 1};
    struct kvt_quant_batch quant = {
        .spec = {1, 1, 1, 0, 1, 1, 1}, .jobs = 4096, .jobs_count = UINT32_MAX - 1, .planes_max = 1};

    (void)test_state;
    for (uint32_t i = 0; i < count; i++) {
        assert_int_equal(tables[i]->gather(NULL, &copy), -EINVAL);
        assert_int_equal(tables[i]->scatter(NULL, &copy), -EINVAL);
        assert_int_equal(tables[i]->check(NULL, &check), -EINVAL);
        assert_int_equal(tables[i]->quantise(NULL, &quant), -EINVAL);
        assert_int_equal(tables[i]->dequantise(NULL, &quant), -EINVAL);
    }
}

/* Parts are counted in 64 bits before there is memory for them. */
static void test_validate_many(void **test_state)
{
    const struct kvt_copy_piece pieces[2] = {{KVT_GIB, 1u << 30, 0, 1u << 30, 0},
                                             {KVT_GIB, 1u << 30, 1ull << 62, 1u << 30, 0}};
    struct kvt_copy_job job = {.payload = 4096,
                               .pieces = (uintptr_t)pieces,
                               .blocks = 4096,
                               .pieces_count = 2,
                               .blocks_count = UINT32_MAX};

    (void)test_state;
    assert_int_equal(kvt_copy_validate(&job, UINT64_MAX - 4096), -ENOMEM);
    assert_int_equal(kvt_copy_validate(&job, 1ull << 62), KVT_COPY_E_RANGE);
}

/* ---- quantisation: far ------------------------------------------------------------------------
 */

/* The last two planes of a payload whose codes end behind 4 GiB, and its scales far behind that. */
static void far_quant(const struct kvt_kernels *kernels, const struct kvt_quant_spec *spec,
                      uint32_t planes_count, uint64_t *state)
{
    const uint64_t plane_bytes = kvt_quant_plane_bytes(spec), raw_bytes = plane_bytes * 2;
    const uint64_t bytes = kvt_quant_bytes(spec, plane_bytes * planes_count);
    const uint64_t codes = plane_bytes / 2 * (planes_count - 2), codes_end = codes + plane_bytes;
    const uint64_t offset = kvt_quant_scales_offset(spec, plane_bytes * planes_count);
    const uint64_t scales = offset + 4ull * spec->heads * (planes_count - 2);
    const uint64_t small_scales = kvt_quant_scales_offset(spec, raw_bytes);
    uint8_t *far = far_new(bytes), *small = malloc(kvt_quant_bytes(spec, raw_bytes));
    uint16_t *raw = aligned_alloc(16, kvt_round_up(raw_bytes, 16)), *back = malloc(raw_bytes);
    struct kvt_quant_job job = {.raw = (uintptr_t)raw,
                                .quantised = (uintptr_t)far,
                                .planes_count = planes_count,
                                .first_plane = planes_count - 2,
                                .end_plane = planes_count};
    const struct kvt_quant_batch batch = {
        .spec = *spec, .jobs = (uintptr_t)&job, .jobs_count = 1, .planes_max = 2};

    assert_true(small != NULL && raw != NULL && back != NULL && codes_end > 4 * KVT_GIB);
    naive_fill(state, raw, raw_bytes);
    naive_quantise(spec, 2, raw, small);
    naive_dequantise(spec, 2, small, back);
    memset(far + codes_end, 0xff, offset - codes_end);
    memset(far + scales, 0xff, bytes - scales);
    assert_int_equal(kernels->quantise(NULL, &batch), 0);
    assert_memory_equal(far + codes, small, plane_bytes);
    for (uint64_t i = codes_end; i < offset; i++)
        assert_int_equal(far[i], 0);
    assert_memory_equal(far + scales, small + small_scales, 8ull * spec->heads);
    for (uint64_t i = scales + 8ull * spec->heads; i < bytes; i++)
        assert_int_equal(far[i], 0);
    memset(raw, 0xa5, raw_bytes);
    assert_int_equal(kernels->dequantise(NULL, &batch), 0);
    assert_memory_equal(raw, back, raw_bytes);
    assert_int_equal(munmap(far, bytes), 0);
    free(small);
    free(raw);
    free(back);
}

static void test_far_quant(void **test_state)
{
    static const struct kvt_quant_spec whole = {
        KVT_QUANT_FP8_E4M3, KVT_ELEM_BF16, KVT_ORDER_TOKENS_FIRST, 0, 16, 8, 128};
    static const struct kvt_quant_spec odd = {
        KVT_QUANT_INT8, KVT_ELEM_FP16, KVT_ORDER_HEADS_FIRST, 0, 1, 3, 5};
    const struct kvt_kernels *tables[4];
    uint32_t count = naive_tables(tables);
    uint64_t state = naive_seed("far planes", 14);

    (void)test_state;
    for (uint32_t i = 0; i < count; i++) {
        far_quant(tables[i], &whole, (1u << 18) + 3, &state);
        far_quant(tables[i], &odd, (1u << 29) + 1, &state);
    }
}

/* A job of no planes, where another one's would end the payload: it writes nothing, not even the
 * zeros behind it. */
static void test_no_planes(void **test_state)
{
    static const struct kvt_quant_spec spec = {
        KVT_QUANT_INT8, KVT_ELEM_FP16, KVT_ORDER_HEADS_FIRST, 0, 1, 3, 5};
    const struct kvt_kernels *tables[4];
    uint32_t count = naive_tables(tables);
    uint8_t quantised[48] __attribute__((aligned(16))), before[48];
    uint16_t raw[16] = {0};

    (void)test_state;
    memset(quantised, 0xee, sizeof(quantised));
    memcpy(before, quantised, sizeof(before));
    for (uint32_t i = 0; i < count; i++) {
        struct kvt_quant_job job = {.raw = (uintptr_t)raw,
                                    .quantised = (uintptr_t)quantised,
                                    .planes_count = 1,
                                    .first_plane = 1,
                                    .end_plane = 1};
        struct kvt_quant_batch batch = {
            .spec = spec, .jobs = (uintptr_t)&job, .jobs_count = 1, .planes_max = 1};

        assert_int_equal(tables[i]->quantise(NULL, &batch), 0);
        assert_int_equal(tables[i]->dequantise(NULL, &batch), 0);
        job.planes_count = job.first_plane = job.end_plane = 0;
        assert_int_equal(tables[i]->quantise(NULL, &batch), 0);
        assert_memory_equal(quantised, before, sizeof(before));
        assert_int_equal(raw[0], 0);
    }
}

/* ---- quantisation: numbers --------------------------------------------------------------------
 */

#define HEAD_ELEMS 8u

/* Names for halves of both kinds. */
enum number {
    ZERO,
    NEG_ZERO,
    ONE,
    NEG_ONE,
    LEAST,
    NEG_LEAST,
    MOST,
    NEG_MOST,
    INF,
    NEG_INF,
    NAN_,
    NEG_NAN,
    NUMBERS
};

static const uint16_t halves_of[2][NUMBERS] = {
    {0, 0x8000, 0x3c00, 0xbc00, 1, 0x8001, 0x7bff, 0xfbff, 0x7c00, 0xfc00, 0x7c01, 0xffff},
    {0, 0x8000, 0x3f80, 0xbf80, 1, 0x8001, 0x7f7f, 0xff7f, 0x7f80, 0xff80, 0x7f81, 0xffff},
};

/* A head's numbers, the codes that they get (FP8, INT8) and what those become; of the two kinds of
 * elements the least number alone is not treated alike. */
static const struct {
    enum number in, out[2];
    uint8_t codes[2];
    enum number beside; /* the rest of the head */
} specials[] = {
    {NAN_, {NAN_, NAN_}, {0x7f, 0x80}, NAN_},
    {NEG_NAN, {NEG_NAN, NAN_}, {0xff, 0x80}, ONE},
    {ZERO, {ZERO, ZERO}, {0x00, 0x00}, ZERO},
    {NEG_ZERO, {NEG_ZERO, ZERO}, {0x80, 0x00}, NEG_ZERO},
    {NEG_ZERO, {NEG_ZERO, ZERO}, {0x80, 0x00}, MOST},
    {ONE, {ONE, ONE}, {0x7e, 0x7f}, ZERO},
    {NEG_ONE, {NEG_ONE, NEG_ONE}, {0xfe, 0x81}, INF}, /* an infinity makes no scale */
    {INF, {ONE, ONE}, {0x7e, 0x7f}, NEG_ONE},         /* it is the greatest code */
    {NEG_INF, {NEG_ONE, NEG_ONE}, {0xfe, 0x81}, ONE},
    {MOST, {MOST, MOST}, {0x7e, 0x7f}, NAN_},
    {NEG_MOST, {NEG_MOST, NEG_MOST}, {0xfe, 0x81}, LEAST},
    {LEAST, {ZERO, ZERO}, {0x00, 0x00}, MOST},
    {NEG_LEAST, {NEG_ZERO, ZERO}, {0x80, 0x00}, NEG_MOST},
};

/* NaN comes back as the quiet one, its sign if the code has one. */
static uint16_t half_back(enum number number, bool is_bf16)
{
    uint16_t quiet = is_bf16 ? 0x7fc0 : 0x7e00;

    if (number == NAN_)
        return quiet;
    return number == NEG_NAN ? 0x8000u | quiet : halves_of[is_bf16][number];
}

static void convert(const struct kvt_kernels *kernels, const struct kvt_quant_spec *spec,
                    uint16_t *raw, uint8_t *quantised, bool is_quantise)
{
    const struct kvt_quant_job job = {.raw = (uintptr_t)raw,
                                      .quantised = (uintptr_t)quantised,
                                      .planes_count = 1,
                                      .end_plane = 1};
    const struct kvt_quant_batch batch = {
        .spec = *spec, .jobs = (uintptr_t)&job, .jobs_count = 1, .planes_max = 1};

    assert_int_equal((is_quantise ? kernels->quantise : kernels->dequantise)(NULL, &batch), 0);
}

static void test_specials(void **test_state)
{
    const struct kvt_kernels *tables[4];
    uint32_t count = naive_tables(tables);

    (void)test_state;
    for (uint32_t i = 0; i < count * 4 * KVT_COUNT_OF(specials); i++) {
        const uint32_t row = i / 4 % KVT_COUNT_OF(specials), is_int8 = i % 2, is_bf16 = i / 2 % 2;
        const struct kvt_kernels *kernels = tables[i / 4 / KVT_COUNT_OF(specials)];
        const struct kvt_quant_spec spec = {.kind = (uint8_t)(1 + is_int8),
                                            .elem = (uint8_t)(1 + is_bf16),
                                            .order = KVT_ORDER_TOKENS_FIRST,
                                            .plane_tokens = 1,
                                            .heads = 1,
                                            .head_dim = HEAD_ELEMS};
        uint8_t quantised[32] __attribute__((aligned(16))), wanted[32];
        uint16_t raw[HEAD_ELEMS] __attribute__((aligned(16)));

        raw[0] = halves_of[is_bf16][specials[row].in];
        for (uint32_t e = 1; e < HEAD_ELEMS; e++)
            raw[e] = halves_of[is_bf16][specials[row].beside];
        naive_quantise(&spec, 1, raw, wanted);
        convert(kernels, &spec, raw, quantised, true);
        assert_memory_equal(quantised, wanted, sizeof(wanted));
        assert_int_equal(quantised[0], specials[row].codes[is_int8]);
        convert(kernels, &spec, raw, quantised, false);
        assert_int_equal(raw[0], half_back(specials[row].out[is_int8], is_bf16));
    }
}

/* The least numbers there are, alone: those of FP16 have a scale and come back as they were; those
 * of BF16 would need one that is no normal number, and are nothing beside a scale of 1. */
static void test_least(void **test_state)
{
    const struct kvt_kernels *tables[4];
    uint32_t count = naive_tables(tables);

    (void)test_state;
    for (uint32_t i = 0; i < count * 4; i++) {
        const bool is_int8 = i % 2, is_bf16 = i / 2 % 2;
        const struct kvt_quant_spec spec = {
            (uint8_t)(1 + is_int8), (uint8_t)(1 + is_bf16), KVT_ORDER_HEADS_FIRST, 0, 1, 1, 8};
        uint8_t quantised[32] __attribute__((aligned(16)));
        uint16_t raw[8] __attribute__((aligned(16))) = {1, 0x8001, 1, 0x8001, 0, 0x8000, 1, 1};
        float scale;

        convert(tables[i / 4], &spec, raw, quantised, true);
        memcpy(&scale, quantised + 16, sizeof(scale));
        assert_true(is_bf16 ? scale == 1.0f : scale > 0 && scale < 0x1p-24f);
        convert(tables[i / 4], &spec, raw, quantised, false);
        assert_int_equal(raw[0], is_bf16 ? 0 : 1);
        assert_int_equal(raw[1], is_bf16 ? (is_int8 ? 0 : 0x8000) : 0x8001);
        assert_int_equal(raw[4], 0);
        assert_int_equal(raw[5], is_int8 ? 0 : 0x8000);
    }
}

/* Scales that no quantisation makes, but a slot of a disk could say: every code with each of them
 * is what arithmetic says, in every table the same. */
static void test_any_scale(void **test_state)
{
    static const float scales[] = {0.0f,    -0.0f,     INFINITY, -INFINITY, NAN,      FLT_MAX,
                                   FLT_MIN, 0x1p-149f, -1.0f,    0x1p-133f, 0x1p120f, 0x1.8p-140f};
    const struct kvt_kernels *tables[4];
    uint32_t count = naive_tables(tables);

    (void)test_state;
    for (uint32_t i = 0; i < count * 4 * KVT_COUNT_OF(scales); i++) {
        const float scale = scales[i / 4 % KVT_COUNT_OF(scales)];
        const struct kvt_quant_spec spec = {
            (uint8_t)(1 + i % 2), (uint8_t)(1 + i / 2 % 2), KVT_ORDER_HEADS_FIRST, 0, 1, 1, 256};
        uint8_t quantised[256 + 16] __attribute__((aligned(16))) = {0};
        uint16_t raw[256] __attribute__((aligned(16)));

        for (uint32_t code = 0; code < 256; code++)
            quantised[code] = (uint8_t)code;
        memcpy(quantised + 256, &scale, sizeof(scale));
        convert(tables[i / 4 / KVT_COUNT_OF(scales)], &spec, raw, quantised, false);
        for (uint32_t code = 0; code < 256; code++)
            if (raw[code] != naive_decode((uint8_t)code, scale, spec.elem, spec.kind))
                fail_msg("elem %u kind %u scale %a: code %#x became %#x", spec.elem, spec.kind,
                         (double)scale, code, raw[code]);
    }
}

static int setup(void **state)
{
    (void)state;
    naive_quant_init();
    return 0;
}

int main(int argc, char **argv)
{
    bool is_reduced = argc > 1 && strcmp(argv[1], "reduced") == 0;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_far),
        cmocka_unit_test_prestate(test_many_pieces, &is_reduced),
        cmocka_unit_test_prestate(test_many_jobs, &is_reduced),
        cmocka_unit_test(test_copy_shapes),
        cmocka_unit_test(test_relayout_shapes),
        cmocka_unit_test(test_other_shapes),
        cmocka_unit_test(test_too_many_jobs),
        cmocka_unit_test(test_validate_many),
        cmocka_unit_test(test_far_quant),
        cmocka_unit_test(test_no_planes),
        cmocka_unit_test(test_specials),
        cmocka_unit_test(test_least),
        cmocka_unit_test(test_any_scale),
    };

    return cmocka_run_group_tests(tests, setup, NULL);
}
