/* Frames: what goes in comes out, in one piece or not at all; limits hold on both sides. */
#include <stdlib.h>
#include <string.h>

#include "daemon/base/bytes.h"
#include "tests/common/cmocka.h"
#include "tests/common/fake_tier.h"
#include "tests/common/wire_make.h"

#define ROUNDS 300u
#define BODY KVT_WIRE_HEADER_BYTES
#define FIXED (KVT_WIRE_HEADER_BYTES + 24u) /* what follows the key of a put */

static _Alignas(8) uint8_t frame[KVT_WIRE_BYTES_MAX], work[KVT_WIRE_BYTES_MAX];
static _Alignas(8) uint8_t again[KVT_WIRE_BYTES_MAX];
static struct kvt_wire_message message, parsed;

static bool is_put(uint16_t kind)
{
    return kind <= KVT_INDEX_PUT_CATALOG;
}

static void test_round_trip(void **state)
{
    (void)state;
    for (uint32_t i = 0; i < ROUNDS * WIRE_MAKE_KINDS; i++) {
        uint32_t bytes, checked = 0;

        wire_make(&message, i % WIRE_MAKE_KINDS, i);
        bytes = kvt_wire_encode(frame, &message);
        assert_int_equal(bytes % 8, 0);
        if (is_put(message.kind))
            assert_int_equal(bytes, kvt_index_put_bytes(&message.put));
        kvt_wire_seal(frame);
        assert_int_equal(kvt_wire_check(frame, sizeof(frame), &checked), 0);
        assert_int_equal(checked, bytes);
        memset(&parsed, 0xa5, sizeof(parsed));
        memcpy(work, frame, bytes);
        assert_int_equal(kvt_wire_parse(work, &parsed), 0);
        assert_int_equal(parsed.kind, message.kind);
        assert_int_equal(parsed.seq, message.seq);
        assert_int_equal(kvt_wire_encode(again, &parsed), bytes);
        kvt_wire_seal(again);
        assert_memory_equal(again, frame, bytes);
    }
}

/* The bytes mean what they are said to mean: a field that is written and read at the same wrong
 * place would pass a round trip. */
static void test_fields(void **state)
{
    struct kvt_index_put *put = &message.put;

    (void)state;
    wire_make(&message, 0, 3);
    put->root_key = (const uint8_t *)"root";
    put->root_key_bytes = 4;
    put->extra_key = NULL;
    (void)kvt_wire_encode(frame, &message);
    assert_int_equal(kvt_get_u16(frame, 4), KVT_INDEX_PUT_ROW);
    assert_int_equal(kvt_get_u64(frame, 8), message.seq);
    assert_int_equal(kvt_get_u16(frame, BODY), put->key.ns);
    assert_int_equal(kvt_get_u32(frame, BODY + 4), put->key.block_idx);
    assert_int_equal(kvt_get_u64(frame, BODY + 8), put->key.epoch);
    assert_int_equal(kvt_get_u64(frame, BODY + 16), put->key.block_id);
    assert_int_equal(kvt_get_u64(frame, FIXED), put->parent_id);
    assert_int_equal(kvt_get_u32(frame, FIXED + 8), put->tokens_count);
    assert_int_equal(kvt_get_u32(frame, FIXED + 24), put->tokens[0]);
    assert_memory_equal(frame + FIXED + 24 + 4 * put->tokens_count, "root", 4);
    wire_make(&message, 1, 3);
    (void)kvt_wire_encode(frame, &message);
    assert_int_equal(kvt_get_u16(frame, BODY + 2), put->component);
    assert_int_equal(kvt_get_u64(frame, FIXED), put->content);
    assert_int_equal(kvt_get_u64(frame, FIXED + 8), put->slot_bytes);
    assert_int_equal(kvt_get_u16(frame, FIXED + 16), put->shards_count);
    assert_int_equal(kvt_get_u64(frame, FIXED + 24), put->slot_offsets[0]);
    assert_int_equal(kvt_get_u64(frame, FIXED + 24 + 8ull * put->shards_count),
                     put->run_offsets[0]);
}

static void test_each_byte_counts(void **state)
{
    (void)state;
    for (uint32_t which = 0; which < WIRE_MAKE_KINDS; which++) {
        uint32_t bytes, checked;

        wire_make(&message, which, 1000 + which);
        bytes = kvt_wire_encode(frame, &message);
        kvt_wire_seal(frame);
        for (uint32_t i = 0; i < bytes; i++) {
            frame[i] ^= 0x10;
            assert_int_not_equal(kvt_wire_check(frame, bytes, &checked), 0);
            frame[i] ^= 0x10;
        }
        for (uint32_t have = 0; have < bytes; have++)
            assert_int_equal(kvt_wire_check(frame, have, &checked), KVT_WIRE_E_SHORT);
        assert_int_equal(kvt_wire_check(frame, bytes, &checked), 0);
    }
}

/* A sealed frame of the @which-th kind in which @change was done. */
static int parse_changed(uint32_t which, void (*change)(uint8_t *at))
{
    wire_make(&message, which, 77);
    if (which == 0) {
        message.put.extra_key = NULL;
        message.put.root_key = (const uint8_t *)"root";
        message.put.root_key_bytes = 4;
    }
    (void)kvt_wire_encode(frame, &message);
    change(frame);
    return kvt_wire_parse(frame, &parsed);
}

static void ns_over(uint8_t *at)
{
    kvt_put_u16(at, BODY, KVT_NAMESPACES_MAX);
}
static void component_over(uint8_t *at)
{
    kvt_put_u16(at, BODY + 2, KVT_COMPONENTS_MAX);
}
static void reserved_set(uint8_t *at)
{
    at[6] = 1;
}
static void no_tokens(uint8_t *at)
{
    kvt_put_u32(at, FIXED + 8, 0);
}
static void tokens_over(uint8_t *at)
{
    kvt_put_u32(at, FIXED + 8, KVT_BLOCK_TOKENS_MAX + 1);
}
static void tokens_many(uint8_t *at)
{
    kvt_put_u32(at, FIXED + 8, UINT32_MAX);
}
static void tokens_fewer(uint8_t *at)
{
    kvt_put_u32(at, FIXED + 8, kvt_get_u32(at, FIXED + 8) - 2);
}
static void root_over(uint8_t *at)
{
    kvt_put_u32(at, FIXED + 12, KVT_INDEX_ROOT_KEY_BYTES_MAX + 1);
}
static void root_missing(uint8_t *at)
{
    at[FIXED + 17] = 0;
}
static void extra_maybe(uint8_t *at)
{
    at[FIXED + 16] = 2;
}
static void no_shards(uint8_t *at)
{
    kvt_put_u16(at, FIXED + 16, 0);
}
static void shards_over(uint8_t *at)
{
    kvt_put_u16(at, FIXED + 16, KVT_RANKS_MAX + 1);
}
static void longer(uint8_t *at)
{
    uint32_t bytes = kvt_wire_bytes(at);

    memset(at + bytes, 0, 8);
    kvt_put_u32(at, 0, bytes + 8);
}
static void shorter(uint8_t *at)
{
    kvt_put_u32(at, 0, kvt_wire_bytes(at) - 8);
}
static void nothing(uint8_t *at)
{
    kvt_put_u32(at, 0, KVT_WIRE_HEADER_BYTES);
}
static void unknown(uint8_t *at)
{
    kvt_put_u16(at, 4, 99);
}
static void other_version(uint8_t *at)
{
    kvt_put_u32(at, BODY, KVT_WIRE_VERSION + 1);
}
static void namespaces_over(uint8_t *at)
{
    kvt_put_u32(at, BODY + 68, KVT_NAMESPACES_MAX + 1);
}
static void ns_number_over(uint8_t *at)
{
    kvt_put_u16(at, BODY + 72, KVT_NAMESPACES_MAX);
}
static void ns_components_over(uint8_t *at)
{
    kvt_put_u16(at, BODY + 72 + 2, KVT_COMPONENTS_MAX + 1);
}
static void ns_shards_over(uint8_t *at)
{
    kvt_put_u16(at, BODY + 72 + 2, 1);
    memset(at + BODY + 72 + 48, 0, 16);
    kvt_put_u16(at, BODY + 72 + 48, KVT_RANKS_MAX + 1);
}
static void ns_shards_none(uint8_t *at)
{
    kvt_put_u16(at, BODY + 72 + 2, 1);
    memset(at + BODY + 72 + 48, 0, 16);
}
static void ns_shards_extra(uint8_t *at)
{
    kvt_put_u16(at, BODY + 72 + 2, 0);
    kvt_put_u16(at, BODY + 72 + 48 + 14, 1);
}
static void path_no_end(uint8_t *at)
{
    kvt_put_u16(at, BODY + 64, (uint16_t)(kvt_get_u16(at, BODY + 64) - 1));
}
static void flags_over(uint8_t *at)
{
    kvt_put_u32(at, BODY + 4, 4);
}
static void text_over(uint8_t *at)
{
    kvt_put_u32(at, BODY, KVT_WIRE_WHY_BYTES + 1);
}
static void text_with_zero(uint8_t *at)
{
    at[BODY + 9] = 0;
}
static void maybe_rebuilt(uint8_t *at)
{
    at[BODY] = 2;
}

static void test_limits(void **state)
{
    static const struct {
        uint32_t which;
        void (*change)(uint8_t *at);
    } bad[] = {
        {0, ns_over},
        {0, component_over},
        {0, reserved_set},
        {0, no_tokens},
        {0, tokens_over},
        {0, tokens_many},
        {0, tokens_fewer},
        {0, root_over},
        {0, root_missing},
        {0, extra_maybe},
        {1, no_shards},
        {1, shards_over},
        {1, component_over},
        {3, ns_over},
        {5, namespaces_over},
        {5, ns_number_over},
        {5, ns_components_over},
        {5, ns_shards_over},
        {5, ns_shards_none},
        {5, ns_shards_extra},
        {5, path_no_end},
        {5, flags_over},
        {9, maybe_rebuilt},
        {12, text_over},
        {12, text_with_zero},
        {6, unknown},
        {11, ns_over},
        {5, nothing},
        {8, nothing},
        {9, nothing},
        {10, nothing},
        {13, nothing},
    };

    (void)state;
    for (uint32_t i = 0; i < KVT_COUNT_OF(bad); i++)
        assert_int_equal(parse_changed(bad[i].which, bad[i].change), KVT_WIRE_E_BAD);
    for (uint32_t which = 0; which < WIRE_MAKE_KINDS; which++) {
        assert_int_equal(parse_changed(which, reserved_set), KVT_WIRE_E_BAD);
        assert_int_equal(parse_changed(which, longer), KVT_WIRE_E_BAD);
        if (message.kind != KVT_WIRE_COMMIT)
            assert_int_equal(parse_changed(which, shorter), KVT_WIRE_E_BAD);
    }
    assert_int_equal(parse_changed(5, other_version), KVT_WIRE_E_VERSION);
}

static void test_lengths(void **state)
{
    static const uint32_t bad[] = {0, 8, 16, 23, 25, 28, KVT_WIRE_BYTES_MAX + 8, UINT32_MAX - 7};
    uint32_t bytes = 5;

    (void)state;
    for (uint32_t i = 0; i < KVT_COUNT_OF(bad); i++) {
        memset(frame, 0, sizeof(frame));
        kvt_put_u32(frame, 0, bad[i]);
        assert_int_equal(kvt_wire_check(frame, sizeof(frame), &bytes), KVT_WIRE_E_BAD);
    }
    assert_int_equal(bytes, 5);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_round_trip),       cmocka_unit_test(test_fields),
        cmocka_unit_test(test_each_byte_counts), cmocka_unit_test(test_limits),
        cmocka_unit_test(test_lengths),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
