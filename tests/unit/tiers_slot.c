/* Slot headers: round trip, every verdict, and every single flipped bit. */
#include <stdlib.h>
#include <string.h>

#include "daemon/base/hash.h"
#include "tests/common/cmocka.h"
#include "tiers/slot.h"

#define TOKENS 100u
#define PAYLOAD_BYTES 5000u

static uint8_t slot_bytes[8192];
static uint32_t tokens[TOKENS];

static const struct kvt_slot_info info = {
    .fingerprint = {1, 2, 3},
    .root_digest = {4, 5, 6},
    .extra_key = {7},
    .epoch = 3,
    .block_id = 11,
    .parent_id = 10,
    .block_idx = 2,
    .generation = 77,
    .stored_real_ns = 123456789,
    .payload_bytes = PAYLOAD_BYTES,
    .block_tokens = TOKENS,
    .component = 1,
    .rank = 2,
    .store_id = {9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 1, 2, 3, 4, 5, 6},
};
static const struct kvt_slot_key key = {.block_id = 11,
                                        .generation = 77,
                                        .payload_bytes = PAYLOAD_BYTES,
                                        .component = 1,
                                        .rank = 2,
                                        .block_tokens = TOKENS};

static uint32_t slot_fill(void)
{
    uint32_t header_bytes = kvt_slot_header_bytes(TOKENS);

    memset(slot_bytes, 0xa5, sizeof(slot_bytes));
    for (uint32_t i = 0; i < TOKENS; i++)
        tokens[i] = i * 1000003u;
    kvt_slot_header_write(slot_bytes, &info, tokens);
    for (uint32_t i = 0; i < PAYLOAD_BYTES; i++)
        slot_bytes[header_bytes + i] = (uint8_t)(i * 7);
    return header_bytes;
}

static void slot_seal(uint32_t header_bytes)
{
    kvt_slot_header_seal(slot_bytes, kvt_hash64(slot_bytes + header_bytes, PAYLOAD_BYTES, 0));
}

static void test_sizes(void **state)
{
    (void)state;
    assert_int_equal(kvt_slot_header_bytes(0), 512);
    assert_int_equal(kvt_slot_header_bytes(64), 512);
    assert_int_equal(kvt_slot_header_bytes(65), 1024);
    assert_int_equal(kvt_slot_header_bytes(KVT_BLOCK_TOKENS_MAX), 33280);
    assert_int_equal(kvt_slot_bytes(64, 3584), 4096);
    assert_int_equal(kvt_slot_bytes(64, 3585), 8192);
}

static void test_round_trip(void **state)
{
    uint32_t header_bytes = slot_fill();
    struct kvt_slot_info got;
    const uint8_t *got_tokens;

    (void)state;
    assert_int_equal(kvt_slot_check(slot_bytes, &key), KVT_SLOT_BAD_HEADER); /* not sealed */
    slot_seal(header_bytes);
    assert_int_equal(kvt_slot_check(slot_bytes, &key), KVT_SLOT_OK);
    assert_int_equal(kvt_slot_header_read(slot_bytes, sizeof(slot_bytes), &got, &got_tokens),
                     KVT_SLOT_OK);
    assert_memory_equal(got.fingerprint, info.fingerprint, sizeof(got.fingerprint));
    assert_memory_equal(got.root_digest, info.root_digest, sizeof(got.root_digest));
    assert_memory_equal(got.extra_key, info.extra_key, sizeof(got.extra_key));
    assert_int_equal(got.epoch, info.epoch);
    assert_int_equal(got.block_id, info.block_id);
    assert_int_equal(got.parent_id, info.parent_id);
    assert_int_equal(got.block_idx, info.block_idx);
    assert_int_equal(got.generation, info.generation);
    assert_int_equal(got.stored_real_ns, info.stored_real_ns);
    assert_int_equal(got.payload_bytes, info.payload_bytes);
    assert_int_equal(got.block_tokens, info.block_tokens);
    assert_int_equal(got.component, info.component);
    assert_int_equal(got.rank, info.rank);
    assert_memory_equal(got.store_id, info.store_id, sizeof(got.store_id));
    assert_memory_equal(got_tokens, tokens, sizeof(tokens)); /* little-endian here */
    /* The slot must hold what the header promises. */
    assert_int_equal(
        kvt_slot_header_read(slot_bytes, header_bytes + PAYLOAD_BYTES - 1, &got, &got_tokens),
        KVT_SLOT_BAD_HEADER);
    assert_int_equal(kvt_slot_header_read(slot_bytes, 100, &got, &got_tokens), KVT_SLOT_BAD_HEADER);
}

static void test_every_bit_matters(void **state)
{
    uint32_t header_bytes = slot_fill();

    (void)state;
    slot_seal(header_bytes);
    for (uint32_t bit = 0; bit < (header_bytes + PAYLOAD_BYTES) * 8; bit++) {
        slot_bytes[bit / 8] ^= (uint8_t)(1u << (bit % 8));
        if (kvt_slot_check(slot_bytes, &key) == KVT_SLOT_OK)
            fail_msg("bit %u does not matter", bit);
        slot_bytes[bit / 8] ^= (uint8_t)(1u << (bit % 8));
    }
    assert_int_equal(kvt_slot_check(slot_bytes, &key), KVT_SLOT_OK);
}

/* One thing of the identity is another, and the rest of the key is what the slot says. */
static void expect_other(const struct kvt_slot_info *changed, const uint32_t *changed_tokens)
{
    struct kvt_slot_key other = key;

    other.identity = kvt_slot_identity(changed, changed_tokens);
    assert_int_not_equal(other.identity, 0);
    assert_int_equal(kvt_slot_check(slot_bytes, &other), KVT_SLOT_OTHER);
}

static void test_identity(void **state)
{
    uint32_t header_bytes = slot_fill();
    struct kvt_slot_key same = key;
    struct kvt_slot_info other;
    uint64_t *const numbers[] = {&other.epoch, &other.block_id, &other.parent_id, &other.block_idx,
                                 &other.generation};
    uint8_t *const texts[] = {other.fingerprint, other.root_digest, other.extra_key};

    (void)state;
    slot_seal(header_bytes);
    same.identity = kvt_slot_identity(&info, tokens);
    assert_int_equal(kvt_slot_check(slot_bytes, &same), KVT_SLOT_OK);
    for (uint32_t i = 0; i < KVT_COUNT_OF(numbers); i++) {
        for (uint32_t bit = 0; bit < 64; bit++) {
            other = info;
            *numbers[i] ^= 1ull << bit;
            expect_other(&other, tokens);
        }
    }
    for (uint32_t i = 0; i < KVT_COUNT_OF(texts); i++) {
        for (uint32_t byte = 0; byte < 32; byte++) {
            other = info;
            texts[i][byte] ^= 0x40;
            expect_other(&other, tokens);
        }
    }
    for (uint32_t i = 0; i < TOKENS; i++) {
        tokens[i] ^= 1;
        expect_other(&info, tokens);
        tokens[i] ^= 1;
    }
    /* When and for which store it was written is not what a block is. */
    other = info;
    other.stored_real_ns++;
    other.store_id[0]++;
    assert_int_equal(kvt_slot_identity(&other, tokens), same.identity);
    assert_int_equal(kvt_slot_check(slot_bytes, &same), KVT_SLOT_OK);
}

static void test_verdicts(void **state)
{
    uint32_t header_bytes = slot_fill();
    struct kvt_slot_key other;

    (void)state;
    slot_seal(header_bytes);
    other = key;
    other.generation++;
    assert_int_equal(kvt_slot_check(slot_bytes, &other), KVT_SLOT_OTHER);
    other = key;
    other.block_id++;
    assert_int_equal(kvt_slot_check(slot_bytes, &other), KVT_SLOT_OTHER);
    other = key;
    other.component++;
    assert_int_equal(kvt_slot_check(slot_bytes, &other), KVT_SLOT_OTHER);
    other = key;
    other.rank++;
    assert_int_equal(kvt_slot_check(slot_bytes, &other), KVT_SLOT_OTHER);
    other = key;
    other.payload_bytes--;
    assert_int_equal(kvt_slot_check(slot_bytes, &other), KVT_SLOT_OTHER);
    other = key;
    other.block_tokens = 1; /* shorter: its header must not be hashed past the slot */
    assert_int_equal(kvt_slot_check(slot_bytes, &other), KVT_SLOT_OTHER);
    slot_bytes[header_bytes + 17] ^= 1;
    assert_int_equal(kvt_slot_check(slot_bytes, &key), KVT_SLOT_BAD_PAYLOAD);
    slot_bytes[header_bytes + 17] ^= 1;
    slot_bytes[8] = 1; /* what came before: a miss, whatever it holds */
    assert_int_equal(kvt_slot_check(slot_bytes, &key), KVT_SLOT_BAD_VERSION);
    memset(slot_bytes, 0, sizeof(slot_bytes));
    assert_int_equal(kvt_slot_check(slot_bytes, &key), KVT_SLOT_BAD_MAGIC);
    for (int v = 0; v <= KVT_SLOT_BAD_PAYLOAD; v++)
        assert_string_not_equal(kvt_slot_verdict_text((enum kvt_slot_verdict)v), "unknown");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_sizes),
        cmocka_unit_test(test_round_trip),
        cmocka_unit_test(test_every_bit_matters),
        cmocka_unit_test(test_identity),
        cmocka_unit_test(test_verdicts),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
