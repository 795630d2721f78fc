/* A namespace's spec as bytes: the encodings of both formats are what they are for ever (their
 * fingerprints name blocks on disks), there and back is the same, and no other bytes are taken. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/hash.h"
#include "daemon/engine/internal.h"
#include "tests/common/cmocka.h"

#define TAGS_MAX 8u
#define SPEC_BYTES_MAX 1024u

static struct kvt_text text_of(const char *at)
{
    return (struct kvt_text){at, (uint32_t)strlen(at)};
}

static struct kvt_req_open_namespace spec_of(struct kvt_text tags[2])
{
    tags[0] = text_of("a=1");
    tags[1] = text_of("b=2");
    return (struct kvt_req_open_namespace){
        .block_tokens = 64,
        .ranks = 2,
        .components_count = 2,
        .components = {{.kind = 1, .bytes_per_block = 1u << 20, .name = text_of("full")},
                       {.kind = 2,
                        .window_tokens = 127,
                        .bytes_per_block = 65536,
                        .is_replicated = true,
                        .name = text_of("window")}},
        .model = text_of("tiny"),
        .revision = text_of("r1"),
        .dtype = text_of("bf16"),
        .layout = text_of("NHD"),
        .tags_count = 2,
        .tags = tags,
    };
}

static const struct kvt_api_quant fp8 = {
    .kind = 1, .elem = 2, .order = 1, .plane_tokens = 16, .heads = 8, .head_dim = 128};

static size_t encode(const struct kvt_req_open_namespace *req, uint8_t bytes[SPEC_BYTES_MAX])
{
    size_t count = eng_spec_encode(req, NULL);

    assert_true(count <= SPEC_BYTES_MAX);
    assert_int_equal(eng_spec_encode(req, bytes), count);
    return count;
}

static void fingerprint_check(const struct kvt_req_open_namespace *req, size_t bytes_wanted,
                              const char *wanted)
{
    uint8_t bytes[SPEC_BYTES_MAX], digest[KVT_FINGERPRINT_BYTES];
    size_t count = encode(req, bytes);
    char hex[2 * KVT_FINGERPRINT_BYTES + 1];

    assert_int_equal(count, bytes_wanted);
    assert_int_equal(kvt_sha256(bytes, count, digest), 0);
    for (uint32_t i = 0; i < KVT_FINGERPRINT_BYTES; i++)
        (void)snprintf(hex + 2 * i, 3, "%02x", digest[i]);
    assert_string_equal(hex, wanted);
}

/* The numbers were made by a program that is not ours, from docs/formats.md. */
static void test_fingerprints(void **state)
{
    struct kvt_text tags[2];
    struct kvt_req_open_namespace req = spec_of(tags);

    (void)state;
    fingerprint_check(&req, 215,
                      "4f562c4d88a66bd19f7e77e5b6c89458cb45f54b00f3ded33a8a5e5a6311f329");
    req.components[0].quant = fp8;
    fingerprint_check(&req, 311,
                      "a08ce895ab808b37a54ad01c880fecf16bd95793b931e264a65cb81268073daa");
}

/* Each number of the quantisation, and which component has it, makes another encoding. */
static void test_every_number_counts(void **state)
{
    uint8_t encodings[9][SPEC_BYTES_MAX] = {{0}};
    size_t counts[9];
    struct kvt_text tags[2];

    (void)state;
    for (uint32_t i = 0; i < 9; i++) {
        struct kvt_req_open_namespace req = spec_of(tags);
        struct kvt_api_quant *quant = &req.components[i == 7].quant;
        uint32_t *const numbers[] = {&quant->kind,         &quant->elem,  &quant->order,
                                     &quant->plane_tokens, &quant->heads, &quant->head_dim};

        if (i < 8)
            *quant = fp8;
        if (i < KVT_COUNT_OF(numbers))
            *numbers[i] += 1;
        counts[i] = encode(&req, encodings[i]);
        for (uint32_t other = 0; other < i; other++)
            assert_true(counts[i] != counts[other] ||
                        memcmp(encodings[i], encodings[other], counts[i]) != 0);
    }
}

static void test_there_and_back(void **state)
{
    struct kvt_text tags[2], tags_back[TAGS_MAX];
    uint8_t bytes[SPEC_BYTES_MAX], again[SPEC_BYTES_MAX];

    (void)state;
    for (uint32_t quantised = 0; quantised < 4; quantised++) {
        struct kvt_req_open_namespace req = spec_of(tags), back;
        size_t count;
        uint8_t *exact;

        for (uint32_t i = 0; i < 2; i++)
            if ((quantised >> i & 1) != 0)
                req.components[i].quant = fp8;
        count = encode(&req, bytes);
        exact = malloc(count); /* a sanitizer sees reads beyond */
        assert_non_null(exact);
        memcpy(exact, bytes, count);
        assert_true(eng_spec_decode(exact, count, &back, tags_back, TAGS_MAX));
        for (uint32_t i = 0; i < 2; i++)
            assert_memory_equal(&back.components[i].quant, &req.components[i].quant,
                                sizeof(struct kvt_api_quant));
        assert_int_equal(encode(&back, again), count);
        assert_memory_equal(bytes, again, count);
        for (size_t less = 0; less < count; less++)
            assert_false(eng_spec_decode(exact, less, &back, tags_back, TAGS_MAX));
        free(exact);
    }
}

/* Format 2 of a spec that quantises nothing would be a second name for it; a format that is not
 * known is of a later daemon. */
static void test_other_bytes(void **state)
{
    struct kvt_text tags[2], tags_back[TAGS_MAX];
    uint8_t bytes[SPEC_BYTES_MAX];
    struct kvt_req_open_namespace req = spec_of(tags), back;
    /* Format, 3 numbers, and of component 0 4 numbers and its name come before its quantisation. */
    const size_t quant_at = 8 + 18 + 3 * 8 + 4 * 8 + 8 + 4;
    size_t count;

    (void)state;
    req.components[0].quant = fp8;
    count = encode(&req, bytes);
    assert_int_equal(bytes[quant_at], fp8.kind);
    bytes[quant_at] = 0;
    assert_false(eng_spec_decode(bytes, count, &back, tags_back, TAGS_MAX));
    bytes[quant_at] = 7; /* a kind that is not known is refused when the namespace is made */
    assert_true(eng_spec_decode(bytes, count, &back, tags_back, TAGS_MAX));
    assert_int_equal(back.components[0].quant.kind, 7);
    bytes[8 + 17] = '3';
    assert_false(eng_spec_decode(bytes, count, &back, tags_back, TAGS_MAX));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_fingerprints),
        cmocka_unit_test(test_every_number_counts),
        cmocka_unit_test(test_there_and_back),
        cmocka_unit_test(test_other_bytes),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
