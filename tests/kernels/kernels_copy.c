/* Gather and scatter of every table against loops over bytes: random descriptor lists, alignments
 * of 1 to 64, pieces of 1 byte to 8 MiB, ids of no block, many jobs in a batch, and nothing written
 * beside what was asked for. Then kvt_copy_validate, and what a batch may not say. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/alloc.h"
#include "tests/common/alloc_fault.h"
#include "tests/common/cmocka.h"
#include "tests/kernels/naive.h"

#define JOBS_MAX 12u
#define ROUNDS 12u        /* the last has pieces of up to 128 KiB */
#define ROUNDS_REDUCED 9u /* under a sanitizer: 16 KiB */

/* Both directions of a batch; the naive copy works on duplicates of pool and payload. */
static void try_batch(const struct kvt_kernels *kernels, const struct naive_shape *shape,
                      uint32_t jobs_count, bool is_gather, uint64_t *state)
{
    struct naive_job jobs[JOBS_MAX];
    struct kvt_copy_job list[JOBS_MAX];
    struct kvt_copy_batch batch = {.jobs = (uintptr_t)list, .jobs_count = jobs_count};
    uint8_t *pools[JOBS_MAX], *payloads[JOBS_MAX];
    uint64_t checks[JOBS_MAX];

    for (uint32_t i = 0; i < jobs_count; i++) {
        struct naive_job *job = &jobs[i];

        naive_job_make(job, shape, state);
        job->check = 1000 + i; /* it is added to */
        assert_int_equal(kvt_copy_validate(&job->job, job->payload_bytes), 0);
        pools[i] = malloc(job->pool_bytes);
        payloads[i] = malloc(job->payload_bytes);
        assert_true(pools[i] != NULL && payloads[i] != NULL);
        memcpy(pools[i], job->pool, job->pool_bytes);
        memcpy(payloads[i], job->payload, job->payload_bytes);
        checks[i] = job->check + naive_copy(job, pools[i], payloads[i], is_gather);
        naive_batch_hold(&batch, &job->job);
        list[i] = job->job;
    }
    assert_int_equal((is_gather ? kernels->gather : kernels->scatter)(NULL, &batch), 0);
    for (uint32_t i = 0; i < jobs_count; i++) {
        assert_memory_equal(jobs[i].pool, pools[i], jobs[i].pool_bytes);
        assert_memory_equal(jobs[i].payload, payloads[i], jobs[i].payload_bytes);
        assert_int_equal(jobs[i].check, checks[i]);
        naive_job_free(&jobs[i]);
        free(pools[i]);
        free(payloads[i]);
    }
}

static void try_shapes(const struct kvt_kernels *kernels, uint32_t rounds, uint64_t *state)
{
    static const uint32_t aligns[] = {1, 2, 3, 4, 5, 7, 8, 12, 16, 17, 24, 32, 48, 64};

    for (uint32_t a = 0; a < KVT_COUNT_OF(aligns); a++) {
        for (uint32_t round = 0; round < rounds; round++) {
            struct naive_shape shape = {.pieces_max = 6,
                                        .blocks_max = 9,
                                        .bytes_max = 1u << (6 + round),
                                        .bytes_step = 1u << naive_below(state, 6),
                                        .align = aligns[a],
                                        .has_none = round % 3 == 0};

            shape.has_check = shape.bytes_step % 8 == 0;
            try_batch(kernels, &shape, 1 + (uint32_t)naive_below(state, 3), round % 2 == 0, state);
        }
    }
}

static void test_random(void **test_state)
{
    const struct kvt_kernels *tables[4];
    uint32_t count = naive_tables(tables);
    uint64_t seed = naive_seed("copy", 1);
    const bool is_reduced = *(const bool *)*test_state;

    for (uint32_t i = 0; i < count; i++) {
        uint64_t state = seed;

        printf("table %s\n", tables[i]->name);
        try_shapes(tables[i], is_reduced ? ROUNDS_REDUCED : ROUNDS, &state);
    }
}

/* Exactly this many bytes, aligned and one byte off; from 1 byte to 8 MiB. */
static void test_lengths(void **test_state)
{
    static const uint32_t lengths[] = {1,   7,    8,    15,   16,   17,    31,    32,      63,
                                       64,  65,   127,  128,  255,  256,   257,   511,     512,
                                       513, 2047, 2048, 2049, 4096, 65536, 65537, 8u << 20};
    const struct kvt_kernels *tables[4];
    uint32_t count = naive_tables(tables);
    uint32_t lengths_count = KVT_COUNT_OF(lengths);
    uint64_t state = 7;

    /* Threads that TSan watches byte by byte take 20 seconds for the last one. */
    if (*(const bool *)*test_state)
        lengths_count--;
    for (uint32_t i = 0; i < count * lengths_count; i++) {
        uint32_t bytes = lengths[i / count];
        struct naive_shape shape = {.pieces_max = 2,
                                    .blocks_max = 2,
                                    .bytes_max = bytes,
                                    .bytes_step = bytes,
                                    .align = 64,
                                    .has_check = bytes % 8 == 0};

        try_batch(tables[i % count], &shape, 1, true, &state);
        try_batch(tables[i % count], &shape, 1, false, &state);
        shape.align = 1;
        try_batch(tables[i % count], &shape, 1, true, &state);
    }
}

static void test_many_small(void **test_state)
{
    const struct kvt_kernels *tables[4];
    uint32_t count = naive_tables(tables);
    uint64_t state = 9;
    struct naive_shape shape = {.pieces_max = 30,
                                .blocks_max = 20,
                                .bytes_max = 256,
                                .bytes_step = 16,
                                .align = 16,
                                .has_check = true,
                                .has_none = true};

    (void)test_state;
    for (uint32_t i = 0; i < count; i++) {
        try_batch(tables[i], &shape, JOBS_MAX, true, &state);
        try_batch(tables[i], &shape, JOBS_MAX, false, &state);
    }
}

/* ---- what validate refuses ---------------------------------------------------------------------
 */

struct declared {
    struct kvt_copy_piece pieces[2];
    uint64_t ids[3];
    struct kvt_copy_job job;
};

/* Two pieces of 64 bytes, three blocks, in a pool at 1 MiB; the payload, 384 bytes, at 2 MiB. */
static void declare(struct declared *declared)
{
    *declared = (struct declared){.ids = {4, 0, 2}};
    for (uint32_t p = 0; p < 2; p++)
        declared->pieces[p] = (struct kvt_copy_piece){.base = KVT_MIB + p * 4096,
                                                      .stride_bytes = 128,
                                                      .payload_offset_bytes = p * 192,
                                                      .bytes = 64};
    declared->job = (struct kvt_copy_job){.payload = 2 * KVT_MIB,
                                          .pieces = (uintptr_t)declared->pieces,
                                          .blocks = (uintptr_t)declared->ids,
                                          .check = 8,
                                          .pieces_count = 2,
                                          .blocks_count = 3};
}

static void test_validate(void **test_state)
{
    struct declared d;

    (void)test_state;
    declare(&d);
    assert_int_equal(kvt_copy_validate(&d.job, 384), 0);
    assert_int_equal(kvt_copy_validate(&d.job, 383), KVT_COPY_E_RANGE);
    d.job.blocks_count = 0;
    assert_int_equal(kvt_copy_validate(&d.job, 384), KVT_COPY_E_EMPTY);
    declare(&d);
    d.pieces[1].bytes = 0;
    assert_int_equal(kvt_copy_validate(&d.job, 384), KVT_COPY_E_EMPTY);
    declare(&d);
    d.pieces[1].stride_bytes = 63;
    assert_int_equal(kvt_copy_validate(&d.job, 384), KVT_COPY_E_STRIDE);
    declare(&d);
    d.pieces[1].pad = 1;
    assert_int_equal(kvt_copy_validate(&d.job, 384), -EINVAL);
    declare(&d);
    d.pieces[0].bytes = 60;
    assert_int_equal(kvt_copy_validate(&d.job, 384), KVT_COPY_E_UNCHECKED);
    d.job.check = 0;
    assert_int_equal(kvt_copy_validate(&d.job, 384), 0);
    declare(&d);
    d.pieces[0].bytes = KVT_COPY_PIECE_BYTES_MAX + 8;
    d.pieces[0].stride_bytes = 2ull * KVT_COPY_PIECE_BYTES_MAX;
    assert_int_equal(kvt_copy_validate(&d.job, UINT64_MAX / 2), KVT_COPY_E_RANGE);
}

static void test_validate_overflow(void **test_state)
{
    struct declared d;

    (void)test_state;
    declare(&d);
    d.ids[0] = UINT64_MAX - 1;
    assert_int_equal(kvt_copy_validate(&d.job, 384), KVT_COPY_E_RANGE);
    declare(&d);
    d.pieces[0].stride_bytes = UINT64_MAX / 2;
    assert_int_equal(kvt_copy_validate(&d.job, 384), KVT_COPY_E_RANGE);
    declare(&d);
    d.pieces[1].base = UINT64_MAX - 63; /* one byte would lie behind the end of addresses */
    d.ids[0] = 0;
    d.job.blocks_count = 1;
    assert_int_equal(kvt_copy_validate(&d.job, 384), KVT_COPY_E_RANGE);
    declare(&d);
    d.pieces[1].payload_offset_bytes = UINT64_MAX - 7;
    assert_int_equal(kvt_copy_validate(&d.job, 384), KVT_COPY_E_RANGE);
    declare(&d);
    d.job.payload = UINT64_MAX - 100;
    assert_int_equal(kvt_copy_validate(&d.job, 384), KVT_COPY_E_RANGE);
}

static void test_validate_overlap(void **test_state)
{
    struct declared d;

    (void)test_state;
    declare(&d);
    d.ids[2] = 4; /* one block twice */
    assert_int_equal(kvt_copy_validate(&d.job, 384), KVT_COPY_E_OVERLAP);
    declare(&d);
    d.pieces[1].base = KVT_MIB + 63; /* the last byte of one is the first of the other */
    assert_int_equal(kvt_copy_validate(&d.job, 384), KVT_COPY_E_OVERLAP);
    d.pieces[1].base = KVT_MIB + 64;
    assert_int_equal(kvt_copy_validate(&d.job, 384), 0);
    declare(&d);
    d.pieces[1].payload_offset_bytes = 184;
    assert_int_equal(kvt_copy_validate(&d.job, 384), KVT_COPY_E_OVERLAP);
    declare(&d);
    d.job.payload = KVT_MIB + 4 * 128 + 63; /* in the last byte of block 4 */
    assert_int_equal(kvt_copy_validate(&d.job, 384), KVT_COPY_E_OVERLAP);
    d.job.payload = KVT_MIB + 4 * 128 + 64;
    assert_int_equal(kvt_copy_validate(&d.job, 384), 0);
    /* What is not moved meets nothing. */
    declare(&d);
    d.ids[0] = d.ids[1] = d.ids[2] = KVT_KERNEL_BLOCK_NONE;
    d.job.payload = KVT_MIB;
    assert_int_equal(kvt_copy_validate(&d.job, 384), 0);
}

static void test_validate_memory(void **test_state)
{
    struct alloc_fault fault = {.fail_at = 1};
    struct declared d;

    (void)test_state;
    declare(&d);
    kvt_alloc_set_fault(alloc_fault_nth, &fault);
    assert_int_equal(kvt_copy_validate(&d.job, 384), -ENOMEM);
    kvt_alloc_set_fault(NULL, NULL);
    assert_int_equal(kvt_copy_validate(&d.job, 384), 0);
}

static void test_batch_refused(void **test_state)
{
    const struct kvt_kernels *tables[4];
    uint32_t count = naive_tables(tables);
    uint64_t state = 3;
    struct naive_shape shape = {
        .pieces_max = 1, .blocks_max = 1, .bytes_max = 64, .bytes_step = 64, .align = 16};
    struct naive_job job;

    (void)test_state;
    naive_job_make(&job, &shape, &state);
    for (uint32_t i = 0; i < count; i++) {
        struct kvt_copy_batch good = {.jobs = (uintptr_t)&job.job, .jobs_count = 1}, batch;

        naive_batch_hold(&good, &job.job);
        assert_int_equal(tables[i]->gather(NULL, &good), 0);
        assert_int_equal(tables[i]->gather(NULL, &(struct kvt_copy_batch){0}), 0);
        batch = good;
        batch.jobs = 0;
        assert_int_equal(tables[i]->gather(NULL, &batch), -EINVAL);
        batch = good;
        batch.pieces_max = 0;
        assert_int_equal(tables[i]->scatter(NULL, &batch), -EINVAL);
        batch = good;
        batch.piece_bytes_max = 63;
        assert_int_equal(tables[i]->gather(NULL, &batch), -EINVAL);
        batch = good;
        batch.piece_bytes_max = KVT_COPY_PIECE_BYTES_MAX + 1;
        assert_int_equal(tables[i]->gather(NULL, &batch), -EINVAL);
        batch = good;
        batch.blocks_max = batch.pieces_max = UINT32_MAX;
        assert_int_equal(tables[i]->gather(NULL, &batch), -EINVAL);
        batch.pieces_max = 1u << 16;
        batch.blocks_max = 1u << 15;
        assert_int_equal(tables[i]->gather(NULL, &batch), -EINVAL);
    }
    naive_job_free(&job);
}

int main(int argc, char **argv)
{
    bool is_reduced = argc > 1 && strcmp(argv[1], "reduced") == 0;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_prestate(test_random, &is_reduced),
        cmocka_unit_test_prestate(test_lengths, &is_reduced),
        cmocka_unit_test(test_many_small),
        cmocka_unit_test(test_validate),
        cmocka_unit_test(test_validate_overflow),
        cmocka_unit_test(test_validate_overlap),
        cmocka_unit_test(test_validate_memory),
        cmocka_unit_test(test_batch_refused),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
