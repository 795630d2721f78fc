/* The hashes: a stream in any pieces is the one-shot value; values are the published ones. */
#include <string.h>

#include "daemon/base/hash.h"
#include "tests/common/cmocka.h"

static uint64_t next_random(uint64_t *state)
{
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state;
}

static void test_stream_equals_one_shot(void **state)
{
    static uint8_t data[70000];
    static const size_t lengths[] = {0, 1, 16, 17, 128, 129, 240, 241, 256, 1024, 4096, 69999};
    uint64_t random = 0x9e3779b97f4a7c15ull;

    (void)state;
    for (size_t i = 0; i < sizeof(data); i++)
        data[i] = (uint8_t)next_random(&random);
    for (size_t i = 0; i < KVT_COUNT_OF(lengths); i++) {
        for (uint32_t round = 0; round < 20; round++) {
            struct kvt_hash_stream stream;
            uint64_t seed = round == 0 ? 0 : next_random(&random);
            size_t at = 0;

            kvt_hash_stream_init(&stream, seed);
            while (at < lengths[i]) {
                size_t part = next_random(&random) % 5000 + 1;

                part = KVT_MIN(part, lengths[i] - at);
                kvt_hash_stream_update(&stream, data + at, part);
                at += part;
            }
            assert_true(kvt_hash_stream_digest(&stream) == kvt_hash64(data, lengths[i], seed));
            assert_true(kvt_hash_stream_digest(&stream) == kvt_hash64(data, lengths[i], seed));
        }
    }
}

static void test_one_bit_matters(void **state)
{
    uint8_t data[4096] = {0};
    uint64_t clean = kvt_hash64(data, sizeof(data), 7);

    (void)state;
    assert_true(clean != kvt_hash64(data, sizeof(data), 8));
    for (size_t bit = 0; bit < sizeof(data) * 8; bit += 97) {
        data[bit / 8] ^= (uint8_t)(1u << bit % 8);
        assert_true(clean != kvt_hash64(data, sizeof(data), 7));
        data[bit / 8] ^= (uint8_t)(1u << bit % 8);
    }
    assert_true(clean == kvt_hash64(data, sizeof(data), 7));
}

/* XXH3-64 of nothing with seed 0, from the xxHash specification's test vectors; SHA-256 of "abc",
 * FIPS 180-2 appendix B.1. Both go to disk, so neither may change with a library. */
static void test_published_values(void **state)
{
    static const uint8_t abc[KVT_FINGERPRINT_BYTES] = {
        0xba, 0x78, 0x16, 0xbf, 0x8f, 0x01, 0xcf, 0xea, 0x41, 0x41, 0x40,
        0xde, 0x5d, 0xae, 0x22, 0x23, 0xb0, 0x03, 0x61, 0xa3, 0x96, 0x17,
        0x7a, 0x9c, 0xb4, 0x10, 0xff, 0x61, 0xf2, 0x00, 0x15, 0xad,
    };
    uint8_t digest[KVT_FINGERPRINT_BYTES];

    (void)state;
    assert_true(kvt_hash64("", 0, 0) == 0x2d06800538d394c2ull);
    assert_int_equal(kvt_sha256("abc", 3, digest), 0);
    assert_memory_equal(digest, abc, sizeof(abc));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_stream_equals_one_shot),
        cmocka_unit_test(test_one_bit_matters),
        cmocka_unit_test(test_published_values),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
