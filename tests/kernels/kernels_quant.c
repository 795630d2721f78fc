/* Quantisation: every one of the 65,536 inputs of both element types to both kinds of codes, and
 * every code back, against tables (naive_quant.c), for one element, for rows in every width of
 * vectors and for payloads in every table; payloads of random shapes, whole and in parts; sizes;
 * what is refused. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/dialect_c.h"
#include "kernels/loops.h"
#include "kernels/number.h"
#include "tests/common/cmocka.h"
#include "tests/kernels/naive.h"
#include "tests/kernels/naive_quant.h"

static const enum kvt_quant_elem elems[] = {KVT_ELEM_FP16, KVT_ELEM_BF16};
static const enum kvt_quant_kind kinds[] = {KVT_QUANT_FP8_E4M3, KVT_QUANT_INT8};

/* Scales that a payload can have, and some more: none that is not a normal float. */
static float random_scale(uint64_t *state, uint32_t round)
{
    static const float fixed[] = {1.0f,          0x1p-126f,      0x1p127f, 65504.0f / 448.0f,
                                  1.0f / 127.0f, 0x1.fffffep-10f};
    uint16_t half = (uint16_t)(naive_random(state) & 0x7fffu);

    if (round < KVT_COUNT_OF(fixed))
        return fixed[round];
    return naive_scale(&half, 1, elems[round % 2], kinds[round / 2 % 2]);
}

#define INPUTS 65536u

/* Of all inputs; @shift: so many later, that each is in several lanes of a vector. */
static void every_half(uint16_t *halves, uint32_t shift)
{
    for (uint32_t i = 0; i < INPUTS; i++)
        halves[(i + shift) % INPUTS] = (uint16_t)i;
}

/* All 65,536 inputs, for each of many scales: one at a time, and as a row in every width. */
static void test_every_input(void **test_state)
{
    static uint16_t halves[INPUTS];
    static uint8_t wanted[INPUTS], codes[INPUTS];
    const struct kvt_loops *list[4];
    uint32_t count = kvt_loops_list(list);
    uint64_t state = naive_seed("quantisation", 1);

    (void)test_state;
    for (uint32_t round = 0; round < 24 * 4; round++) {
        int kind = (int)round % 4, is_bf16 = kind & KVT_LOOPS_BF16, is_int8 = kind & KVT_LOOPS_INT8;
        float scale = random_scale(&state, round / 4);

        every_half(halves, round * 5);
        for (uint32_t i = 0; i < INPUTS; i++) {
            uint32_t code = kvt_quant_code(halves[i], scale, is_bf16, is_int8);

            wanted[i] = naive_encode(halves[i], scale, elems[is_bf16 != 0], kinds[is_int8 != 0]);
            if (code != wanted[i])
                fail_msg("kind %d scale %a: %#x became %#x", kind, (double)scale, halves[i], code);
        }
        for (uint32_t i = 0; i < count; i++) {
            memset(codes, 0, sizeof(codes));
            list[i]->encode(codes, (const unsigned char *)halves, INPUTS, scale, kind);
            assert_memory_equal(codes, wanted, INPUTS);
        }
    }
    printf("%u widths\n", count);
}

/* All codes back, for the scale of every magnitude there is; as a row that begins with any. */
static void test_every_code(void **test_state)
{
    const struct kvt_loops *list[4];
    uint32_t count = kvt_loops_list(list);
    uint16_t wanted[256], halves[256];
    uint8_t codes[256];

    (void)test_state;
    for (int kind = 0; kind < 4; kind++) {
        int is_bf16 = kind & KVT_LOOPS_BF16, is_int8 = kind & KVT_LOOPS_INT8;

        for (uint32_t most = 0; most < 0x8000u; most += is_int8 ? 17 : 13) {
            uint16_t half = (uint16_t)most;
            float scale = naive_scale(&half, 1, elems[is_bf16 != 0], kinds[is_int8 != 0]);

            for (uint32_t i = 0; i < 256; i++) {
                uint8_t code = codes[i] = (uint8_t)(i + most);
                uint32_t back = kvt_quant_value(code, scale, is_bf16, is_int8);

                wanted[i] = naive_decode(code, scale, elems[is_bf16 != 0], kinds[is_int8 != 0]);
                if (back != wanted[i])
                    fail_msg("kind %d scale %a: code %#x became %#x", kind, (double)scale, code,
                             back);
            }
            for (uint32_t i = 0; i < count; i++) {
                memset(halves, 0xa5, sizeof(halves));
                list[i]->decode((unsigned char *)halves, codes, 256, scale, kind);
                assert_memory_equal(halves, wanted, sizeof(wanted));
            }
        }
    }
}

/* Each input alone among zeros, in any lane. */
static void test_every_magnitude(void **test_state)
{
    const struct kvt_loops *list[4];
    uint32_t count = kvt_loops_list(list);
    uint16_t row[67] = {0};

    (void)test_state;
    for (uint32_t half = 0; half < INPUTS; half++) {
        uint32_t rest = half & 0x7fffu, at = half % KVT_COUNT_OF(row);

        row[at] = (uint16_t)half;
        for (uint32_t i = 0; i < 2 * count; i++) {
            uint32_t infinity = i % 2 == 0 ? 0x7c00u : 0x7f80u;
            uint32_t most = list[i / 2]->magnitude((const unsigned char *)row, KVT_COUNT_OF(row),
                                                   i % 2 == 0 ? 0 : KVT_LOOPS_BF16);

            assert_int_equal(most, rest < infinity ? rest : 0);
        }
        row[at] = 0;
    }
}

static void test_every_scale(void **test_state)
{
    (void)test_state;
    for (uint32_t k = 0; k < 4; k++) {
        int is_bf16 = elems[k % 2] == KVT_ELEM_BF16, is_int8 = kinds[k / 2] == KVT_QUANT_INT8;

        for (uint32_t half = 0; half < 65536; half++) {
            uint16_t one = (uint16_t)half;
            float scale = kvt_quant_scale(kvt_elem_magnitude(half, is_bf16), is_bf16, is_int8);

            assert_true(scale == naive_scale(&one, 1, elems[k % 2], kinds[k / 2]));
        }
    }
}

/* Both ways between halves and floats; every half, and floats around every half-way point. */
static void test_halves(void **test_state)
{
    (void)test_state;
    for (uint32_t half = 0; half < 65536; half++) {
        double fp16 = naive_elem((uint16_t)half, KVT_ELEM_FP16);
        double bf16 = naive_elem((uint16_t)half, KVT_ELEM_BF16);

        if (isnan(fp16))
            assert_true(isnan(kvt_fp16_to_float(half)));
        else
            assert_true((double)kvt_fp16_to_float(half) == fp16);
        if (isnan(bf16))
            assert_true(isnan(kvt_bf16_to_float(half)));
        else
            assert_true((double)kvt_bf16_to_float(half) == bf16);
        if (!isnan(fp16))
            assert_int_equal(kvt_float_to_fp16((float)fp16), half);
        if (!isnan(bf16))
            assert_int_equal(kvt_float_to_bf16((float)bf16), half);
    }
    assert_int_equal(kvt_float_to_fp16(NAN), 0x7e00);
    assert_int_equal(kvt_float_to_fp16(-NAN), 0x7e00);
    assert_int_equal(kvt_float_to_bf16(-NAN), 0x7fc0);
    assert_int_equal(kvt_float_to_fp16(65519.996f), 0x7bff);
    assert_int_equal(kvt_float_to_fp16(65520.0f), 0x7c00);
    assert_int_equal(kvt_float_to_fp16(-INFINITY), 0xfc00);
    assert_int_equal(kvt_float_to_fp16(0x1p-25f), 0); /* half way to the least: to even */
    assert_int_equal(kvt_float_to_fp16(0x1.000002p-25f), 1);
    assert_int_equal(kvt_float_to_bf16(0x1.fffffep127f), 0x7f80);
}

/* The decoding of E4M3 by its definition, not by table: value = +-2^(e-7) * (1 + m/8). */
static void test_fp8_formula(void **test_state)
{
    (void)test_state;
    for (uint32_t code = 0; code < 256; code++) {
        uint32_t e = (code >> 3) & 15u, m = code & 7u;
        double value = e == 0 ? m / 512.0 : pow(2, (double)e - 7) * (1 + m / 8.0);

        if ((code & 0x7fu) == 0x7fu)
            continue;
        assert_true((double)kvt_fp8_to_float(code) == (code >= 0x80u ? -value : value));
        assert_int_equal(signbit(kvt_fp8_to_float(code)) != 0, code >= 0x80u);
        assert_int_equal(kvt_float_to_fp8(kvt_fp8_to_float(code)), code);
    }
}

/* Every width of vectors on rows of every length. */
static void test_widths(void **test_state)
{
    const struct kvt_loops *list[4];
    uint32_t count = kvt_loops_list(list);
    uint64_t state = 3;
    uint8_t halves[2 * 400 + 1], codes[2][400], back[2][800];

    (void)test_state;
    for (uint32_t round = 0; round < 1200; round++) {
        uint64_t elems_count = round % 400;
        int kind = (int)(round / 400 + round) % 4;
        float scale = random_scale(&state, 6 + round);

        naive_fill(&state, halves, sizeof(halves));
        list[0]->encode(codes[0], halves + 1, elems_count, scale, kind);
        list[0]->decode(back[0], codes[0], elems_count, scale, kind);
        for (uint32_t i = 1; i < count; i++) {
            assert_int_equal(list[i]->magnitude(halves + 1, elems_count, kind),
                             list[0]->magnitude(halves + 1, elems_count, kind));
            list[i]->encode(codes[1], halves + 1, elems_count, scale, kind);
            assert_memory_equal(codes[0], codes[1], elems_count);
            list[i]->decode(back[1], codes[0], elems_count, scale, kind);
            assert_memory_equal(back[0], back[1], elems_count * 2);
        }
    }
}

/* ---- payloads ----------------------------------------------------------------------------------
 */

static struct kvt_quant_spec random_spec(uint64_t *state, uint32_t round)
{
    static const uint32_t dims[] = {1, 3, 8, 16, 20, 64, 128};

    return (struct kvt_quant_spec){.kind = (uint8_t)kinds[round % 2],
                                   .elem = (uint8_t)elems[round / 2 % 2],
                                   .order = round / 4 % 2 == 0 ? KVT_ORDER_TOKENS_FIRST
                                                               : KVT_ORDER_HEADS_FIRST,
                                   .plane_tokens = 1 + (uint32_t)naive_below(state, 20),
                                   .heads = 1 + (uint32_t)naive_below(state, 5),
                                   .head_dim = dims[naive_below(state, KVT_COUNT_OF(dims))]};
}

/* Finite numbers of one size, with zeros, infinities and NaN here and there; whole heads of zeros.
 */
static void random_halves(uint64_t *state, uint16_t *halves, uint64_t count)
{
    uint16_t exponent = (uint16_t)(naive_random(state) & 0x7000u);

    for (uint64_t i = 0; i < count; i++) {
        uint64_t random = naive_random(state);

        halves[i] = (uint16_t)((random & 0x8fffu) | exponent);
        if (random >> 60 == 0)
            halves[i] = (uint16_t)random;
        if (random >> 52 == 0)
            halves[i] = (uint16_t)(random & 0x8000u) | 0x7f80u;
        if (count % 5 == 0)
            halves[i] = 0;
    }
}

struct payload {
    struct kvt_quant_spec spec;
    uint32_t planes_count;
    uint64_t raw_bytes, quantised_bytes;
    uint16_t *raw, *back;
    uint8_t *quantised, *wanted; /* 16-aligned */
};

static void payload_make(struct payload *payload, uint64_t *state, uint32_t round)
{
    *payload = (struct payload){.spec = random_spec(state, round),
                                .planes_count = 1 + (uint32_t)naive_below(state, 5)};
    assert_true(kvt_quant_is_valid(&payload->spec));
    payload->raw_bytes = kvt_quant_plane_bytes(&payload->spec) * payload->planes_count;
    payload->quantised_bytes = kvt_quant_bytes(&payload->spec, payload->raw_bytes);
    /* Sometimes only even: the path of single elements. */
    payload->raw = aligned_alloc(16, kvt_round_up(payload->raw_bytes + 2, 16));
    payload->back = malloc(payload->raw_bytes);
    payload->quantised = aligned_alloc(16, payload->quantised_bytes);
    payload->wanted = malloc(payload->quantised_bytes);
    assert_true(payload->raw != NULL && payload->back != NULL);
    assert_true(payload->quantised != NULL && payload->wanted != NULL);
    random_halves(state, payload->raw, payload->raw_bytes / 2);
    naive_fill(state, payload->quantised, payload->quantised_bytes);
    naive_quantise(&payload->spec, payload->planes_count, payload->raw, payload->wanted);
    naive_dequantise(&payload->spec, payload->planes_count, payload->wanted, payload->back);
}

static void payload_free(struct payload *payload)
{
    free(payload->raw);
    free(payload->back);
    free(payload->quantised);
    free(payload->wanted);
}

/* The planes in one or two jobs, cut at @cut; @shift: elements by which the raw bytes are moved. */
static void convert(const struct kvt_kernels *kernels, const struct payload *payload, uint16_t *raw,
                    uint32_t cut, bool is_quantise)
{
    struct kvt_quant_job jobs[2] = {
        {.raw = (uintptr_t)raw, .quantised = (uintptr_t)payload->quantised, .end_plane = cut},
        {.raw = (uintptr_t)raw + cut * kvt_quant_plane_bytes(&payload->spec),
         .quantised = (uintptr_t)payload->quantised,
         .first_plane = cut,
         .end_plane = payload->planes_count}};
    struct kvt_quant_batch batch = {.spec = payload->spec,
                                    .jobs = (uintptr_t)jobs,
                                    .jobs_count = 2,
                                    .planes_max = payload->planes_count};

    jobs[0].planes_count = jobs[1].planes_count = payload->planes_count;
    assert_int_equal((is_quantise ? kernels->quantise : kernels->dequantise)(NULL, &batch), 0);
}

static void try_payload(const struct kvt_kernels *kernels, struct payload *payload, uint32_t cut,
                        uint32_t shift)
{
    memmove(payload->raw + shift, payload->raw, payload->raw_bytes);
    convert(kernels, payload, payload->raw + shift, cut, true);
    assert_memory_equal(payload->quantised, payload->wanted, payload->quantised_bytes);
    memset(payload->raw, 0xa5, payload->raw_bytes + 2);
    convert(kernels, payload, payload->raw + shift, cut, false);
    assert_memory_equal(payload->raw + shift, payload->back, payload->raw_bytes);
    assert_memory_equal(payload->quantised, payload->wanted, payload->quantised_bytes);
    assert_int_equal(payload->raw[shift == 0 ? payload->raw_bytes / 2 : 0], 0xa5a5);
}

static void test_payloads(void **test_state)
{
    const struct kvt_kernels *tables[4];
    uint32_t count = naive_tables(tables);
    uint64_t seed = naive_seed("payloads", 5);

    (void)test_state;
    for (uint32_t i = 0; i < count * 120; i++) {
        uint64_t state = seed + i / count;
        struct payload payload;

        payload_make(&payload, &state, i / count);
        try_payload(tables[i % count], &payload,
                    (uint32_t)naive_below(&state, payload.planes_count + 1), i / count / 8 % 2);
        payload_free(&payload);
    }
}

/* Payloads that have all 65,536 inputs: of neighbouring ones in each head, whose sizes are alike
 * then, or all of them in one. And their codes back. */
static void try_every_input(struct kvt_quant_spec spec, uint32_t shift)
{
    const struct kvt_kernels *tables[4];
    const uint32_t planes_count = INPUTS * 2 / (uint32_t)kvt_quant_plane_bytes(&spec);
    const uint32_t head_elems = spec.plane_tokens * spec.head_dim;
    struct payload payload = {.spec = spec, .planes_count = planes_count, .raw_bytes = INPUTS * 2};

    payload.quantised_bytes = kvt_quant_bytes(&spec, payload.raw_bytes);
    payload.raw = aligned_alloc(16, payload.raw_bytes + 16);
    payload.back = malloc(payload.raw_bytes);
    payload.quantised = aligned_alloc(16, payload.quantised_bytes);
    payload.wanted = malloc(payload.quantised_bytes);
    assert_true(payload.raw != NULL && payload.back != NULL && payload.quantised != NULL);
    assert_true(payload.wanted != NULL);
    for (uint32_t i = naive_tables(tables); i-- > 0;) {
        for (uint32_t n = 0; n < INPUTS; n++) { /* heads first, tokens first */
            uint32_t plane = n / (head_elems * spec.heads), head = n / head_elems % spec.heads;
            uint32_t token = n / spec.head_dim % spec.plane_tokens, dim = n % spec.head_dim;
            uint32_t tokens_first = (token * spec.heads + head) * spec.head_dim + dim;

            payload.raw[spec.order == KVT_ORDER_HEADS_FIRST
                            ? n
                            : plane * head_elems * spec.heads + tokens_first] = (uint16_t)n;
        }
        memset(payload.quantised, 0x5a, payload.quantised_bytes);
        naive_quantise(&spec, planes_count, payload.raw, payload.wanted);
        naive_dequantise(&spec, planes_count, payload.wanted, payload.back);
        try_payload(tables[i], &payload, planes_count / 2, shift);
    }
    payload_free(&payload);
}

static void test_every_input_of_payloads(void **test_state)
{
    (void)test_state;
    for (uint32_t i = 0; i < 4 * 2 * 2; i++) {
        struct kvt_quant_spec spec = {.kind = (uint8_t)kinds[i % 2],
                                      .elem = (uint8_t)elems[i / 2 % 2],
                                      .order = i / 4 % 2 == 0 ? KVT_ORDER_TOKENS_FIRST
                                                              : KVT_ORDER_HEADS_FIRST,
                                      .plane_tokens = 16,
                                      .heads = 64,
                                      .head_dim = 16};

        try_every_input(spec, i / 8);
        spec.heads = 1;
        spec.plane_tokens = spec.head_dim = 256;
        try_every_input(spec, i / 8);
    }
}

/* ---- sizes and refusals ------------------------------------------------------------------------
 */

static const struct kvt_quant_spec usual = {.kind = KVT_QUANT_FP8_E4M3,
                                            .elem = KVT_ELEM_BF16,
                                            .order = KVT_ORDER_TOKENS_FIRST,
                                            .plane_tokens = 16,
                                            .heads = 8,
                                            .head_dim = 128};

static void test_sizes(void **test_state)
{
    struct kvt_quant_spec spec = usual;

    (void)test_state;
    assert_int_equal(kvt_quant_plane_bytes(&spec), 32768);
    assert_int_equal(kvt_quant_bytes(&spec, 0), 0);
    assert_int_equal(kvt_quant_bytes(&spec, 32767), 0);
    assert_int_equal(kvt_quant_bytes(&spec, 2 * 32768), 32768 + 64);
    assert_int_equal(kvt_quant_scales_offset(&spec, 2 * 32768), 32768);
    spec.plane_tokens = spec.heads = spec.head_dim = 1;
    assert_int_equal(kvt_quant_scales_offset(&spec, 2 * 17), 32); /* 17 codes, zeros */
    assert_int_equal(kvt_quant_bytes(&spec, 2 * 17), 32 + 80);    /* 17 scales, zeros */
    assert_int_equal(kvt_quant_bytes(&spec, UINT64_MAX - 1), 0);
    spec.heads = 65536;
    spec.head_dim = 8192; /* 2^29 elements, 1 GiB raw: the most */
    assert_true(kvt_quant_is_valid(&spec));
    spec.plane_tokens = 2;
    assert_false(kvt_quant_is_valid(&spec));
}

static void refuse_spec(struct kvt_quant_spec spec)
{
    const struct kvt_kernels *tables[4];
    struct kvt_quant_batch batch = {.spec = spec};
    uint32_t count = naive_tables(tables);

    assert_false(kvt_quant_is_valid(&spec));
    for (uint32_t i = 0; i < count; i++) {
        assert_int_equal(tables[i]->quantise(NULL, &batch), -EINVAL);
        assert_int_equal(tables[i]->dequantise(NULL, &batch), -EINVAL);
    }
}

static void test_refused_specs(void **test_state)
{
    struct kvt_quant_spec spec = usual;

    (void)test_state;
    spec.kind = 3;
    refuse_spec(spec);
    spec = usual;
    spec.elem = 0;
    refuse_spec(spec);
    spec = usual;
    spec.order = 3;
    refuse_spec(spec);
    spec = usual;
    spec.pad = 1;
    refuse_spec(spec);
    spec = usual;
    spec.heads = 0;
    refuse_spec(spec);
    spec = usual;
    spec.head_dim = 65537;
    refuse_spec(spec);
    spec.plane_tokens = spec.heads = spec.head_dim = UINT32_MAX;
    refuse_spec(spec);
}

static void refuse_job(struct kvt_quant_job job, uint32_t planes_max)
{
    const struct kvt_kernels *tables[4];
    struct kvt_quant_batch batch = {
        .spec = usual, .jobs = (uintptr_t)&job, .jobs_count = 1, .planes_max = planes_max};
    uint32_t count = naive_tables(tables);

    for (uint32_t i = 0; i < count; i++)
        assert_int_equal(tables[i]->quantise(NULL, &batch), -EINVAL);
}

static void test_refused_jobs(void **test_state)
{
    struct kvt_quant_job good = {
        .raw = 4096, .quantised = 8192, .planes_count = 2, .first_plane = 1, .end_plane = 2};
    struct kvt_quant_job job = good;

    (void)test_state;
    refuse_job(good, 0);
    job.raw = 4097;
    refuse_job(job, 1);
    job = good;
    job.quantised = 8194;
    refuse_job(job, 1);
    job = good;
    job.end_plane = 3;
    refuse_job(job, 2);
    job = good;
    job.first_plane = 3;
    refuse_job(job, 2);
    job = good;
    job.first_plane = 0; /* two planes, the batch says one */
    refuse_job(job, 1);
}

static int setup(void **state)
{
    (void)state;
    naive_quant_init();
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_input),
        cmocka_unit_test(test_every_code),
        cmocka_unit_test(test_every_scale),
        cmocka_unit_test(test_halves),
        cmocka_unit_test(test_fp8_formula),
        cmocka_unit_test(test_widths),
        cmocka_unit_test(test_payloads),
        cmocka_unit_test(test_every_magnitude),
        cmocka_unit_test(test_every_input_of_payloads),
        cmocka_unit_test(test_sizes),
        cmocka_unit_test(test_refused_specs),
        cmocka_unit_test(test_refused_jobs),
    };

    return cmocka_run_group_tests(tests, setup, NULL);
}
