/* The check: every table and every width of vectors gives the formula's value for any length and
 * alignment, parts add up in any order, and what goes wrong with copies in practice is noticed. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/check.h"
#include "kernels/loops.h"
#include "tests/common/cmocka.h"
#include "tests/kernels/naive.h"

#define PAGE_BYTES 4096u
#define PAYLOAD_BYTES (64u * PAGE_BYTES)

static uint64_t check_by(const struct kvt_kernels *kernels, const void *payload, uint64_t bytes)
{
    uint64_t sum = 5;
    struct kvt_check_job job = {
        .payload = (uintptr_t)payload, .bytes = bytes, .check = (uintptr_t)&sum};
    struct kvt_check_batch batch = {.jobs = (uintptr_t)&job, .jobs_count = 1, .bytes_max = bytes};

    assert_int_equal(kernels->check(NULL, &batch), 0);
    return sum - 5;
}

static void test_value(void **test_state)
{
    static const uint32_t lengths[] = {0,   1,   7,   8,    9,    15,    16,    17,   63,   64,  65,
                                       127, 128, 129, 1000, 4096, 65536, 65541, 8191, 8192, 8193};
    const struct kvt_kernels *tables[4];
    uint32_t count = naive_tables(tables);
    uint64_t state = naive_seed("check", 1);

    (void)test_state;
    for (uint32_t i = 0; i < KVT_COUNT_OF(lengths); i++) {
        for (uint32_t offset = 0; offset < 24; offset++) {
            uint8_t *heap = malloc(lengths[i] + offset + 1), *payload = heap + offset;
            uint64_t wanted;

            assert_non_null(heap);
            naive_fill(&state, heap, lengths[i] + offset);
            wanted = naive_check(payload, lengths[i]);
            assert_true(kvt_check64(payload, lengths[i]) == wanted);
            for (uint32_t t = 0; t < count; t++)
                assert_true(check_by(tables[t], payload, lengths[i]) == wanted);
            free(heap);
        }
    }
}

/* Computed apart from this program (in Python) and written down: what is in a ledger today has to
 * hold tomorrow. */
static void test_golden(void **test_state)
{
    uint8_t payload[1027];

    (void)test_state;
    for (uint32_t i = 0; i < sizeof(payload); i++)
        payload[i] = (uint8_t)(i * 7 + (i >> 8));
    assert_true(kvt_check64(payload, 0) == 0);
    assert_true(kvt_check64(payload, 8) == 0x74ad65b2911d8c86ull);
    assert_true(kvt_check64(payload, sizeof(payload)) == 0xe4801ae5855e7f04ull);
}

static void test_widths(void **test_state)
{
    const struct kvt_loops *list[4];
    uint32_t count = kvt_loops_list(list);
    uint64_t state = 11;
    uint8_t payload[8 * 300 + 3];

    (void)test_state;
    printf("%u widths of vectors\n", count);
    naive_fill(&state, payload, sizeof(payload));
    for (uint32_t words = 0; words < 290; words++) {
        uint64_t first = naive_random(&state), sum = list[0]->sum(payload + 3, words, first);

        for (uint32_t i = 1; i < count; i++)
            assert_true(list[i]->sum(payload + 3, words, first) == sum);
    }
}

static void test_parts(void **test_state)
{
    uint64_t state = 12;
    uint8_t payload[8 * 200 + 5];

    (void)test_state;
    naive_fill(&state, payload, sizeof(payload));
    for (uint32_t round = 0; round < 200; round++) {
        uint64_t cut = 8 * naive_below(&state, 201);
        uint64_t sum = kvt_check64_part(payload + cut, sizeof(payload) - cut, cut / 8);

        sum += kvt_check64_part(payload, cut, 0);
        assert_true(sum == kvt_check64(payload, sizeof(payload)));
    }
}

static void swap_words(uint8_t *payload, uint64_t a, uint64_t b)
{
    uint64_t word;

    memcpy(&word, payload + 8 * a, 8);
    memcpy(payload + 8 * a, payload + 8 * b, 8);
    memcpy(payload + 8 * b, &word, 8);
}

/* Each way to spoil a payload, by number. False: it changed nothing (equal words). */
static bool spoil(uint8_t *payload, const uint8_t *good, uint32_t how, uint64_t *state)
{
    uint64_t words = PAYLOAD_BYTES / 8, a = naive_below(state, words),
             b = naive_below(state, words);
    uint64_t page = PAGE_BYTES * naive_below(state, 64),
             other = PAGE_BYTES * naive_below(state, 64);

    switch (how) {
    case 0: /* one bit */
        payload[a] = (uint8_t)(payload[a] ^ (1u << (b % 8)));
        break;
    case 1: /* two words change places */
        swap_words(payload, a, b);
        break;
    case 2: /* a page was never written */
        memset(payload + page, 0, PAGE_BYTES);
        break;
    case 3: /* the copy stopped: what was there before is at the end */
        naive_fill(state, payload + 8 * a, PAYLOAD_BYTES - 8 * a);
        break;
    case 4: /* a piece of another place of the same payload */
        memmove(payload + page, good + other, PAGE_BYTES);
        break;
    case 5: /* everything is one word further */
        memmove(payload + 8, good, PAYLOAD_BYTES - 8);
        break;
    default: /* two pages change places */
        memcpy(payload + page, good + other, PAGE_BYTES);
        memcpy(payload + other, good + page, PAGE_BYTES);
        break;
    }
    return memcmp(payload, good, PAYLOAD_BYTES) != 0;
}

/* @kind: what the payload is of. Few different words are the hard case for a sum. */
static void make_payload(uint8_t *payload, uint32_t kind, uint64_t *state)
{
    for (uint32_t i = 0; i < PAYLOAD_BYTES / 2; i++) {
        uint16_t half = (uint16_t)naive_random(state);

        if (kind == 1) /* small numbers in BF16 */
            half = (uint16_t)(0x3f00u | (half & 0x803fu));
        if (kind == 2) /* sparse */
            half = half % 16 == 0 ? 1 : 0;
        memcpy(payload + 2 * i, &half, 2);
    }
}

static void test_notices(void **test_state)
{
    static uint8_t good[PAYLOAD_BYTES], bad[PAYLOAD_BYTES];
    uint64_t state = naive_seed("notices", 2);
    uint32_t tried = 0;

    (void)test_state;
    for (uint32_t kind = 0; kind < 3; kind++) {
        uint64_t sum;

        make_payload(good, kind, &state);
        sum = kvt_check64(good, PAYLOAD_BYTES);
        for (uint32_t round = 0; round < 700; round++) {
            memcpy(bad, good, PAYLOAD_BYTES);
            if (!spoil(bad, good, round % 7, &state))
                continue;
            assert_true(kvt_check64(bad, PAYLOAD_BYTES) != sum);
            tried++;
        }
    }
    printf("%u spoilt payloads noticed\n", tried);
    assert_true(tried > 1500);
}

static void test_refused(void **test_state)
{
    const struct kvt_kernels *tables[4];
    uint32_t count = naive_tables(tables);
    uint64_t sum = 0, payload[2] = {1, 2};

    (void)test_state;
    for (uint32_t i = 0; i < count; i++) {
        struct kvt_check_job job = {
            .payload = (uintptr_t)payload, .bytes = 16, .check = (uintptr_t)&sum};
        struct kvt_check_batch batch = {.jobs_count = 1, .bytes_max = 16};

        assert_int_equal(tables[i]->check(NULL, &batch), -EINVAL);
        batch.jobs = (uintptr_t)&job;
        assert_int_equal(tables[i]->check(NULL, &batch), 0);
        batch.bytes_max = 8;
        assert_int_equal(tables[i]->check(NULL, &batch), -EINVAL);
        batch.bytes_max = 16;
        job.check = 0;
        assert_int_equal(tables[i]->check(NULL, &batch), -EINVAL);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_value),   cmocka_unit_test(test_golden),
        cmocka_unit_test(test_widths),  cmocka_unit_test(test_parts),
        cmocka_unit_test(test_notices), cmocka_unit_test(test_refused),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
