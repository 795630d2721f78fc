/* The bytes of rows: round trips at every length, the order of keys, every single flipped bit, and
 * what may not be put. */
#include <stdlib.h>
#include <string.h>

#include "daemon/base/bytes.h"
#include "daemon/base/hash.h"
#include "tests/common/cmocka.h"
#include "tests/common/index_world.h"
#include "tiers/index/row.h"

#define SEED 0x1234567890abcdefull

static struct index_world_bytes bytes;
static const struct kvt_index_key first = {.ns = 2, .epoch = 5, .block_idx = 0, .block_id = 33};
static const struct kvt_index_key later = {.ns = 2, .epoch = 5, .block_idx = 7, .block_id = 34};

static uint8_t key[KVT_INDEX_KEY_BYTES], value[KVT_INDEX_VALUE_BYTES_MAX];

/* Writes a row and its parts, reads them back. */
static void round_trip(const struct kvt_index_key *at, uint32_t tokens_count)
{
    static uint32_t tokens[KVT_BLOCK_TOKENS_MAX];
    struct kvt_index_put put, got = {.kind = KVT_INDEX_PUT_ROW, .key = *at};
    struct kvt_index_row_shape shape;
    uint32_t count, n;

    index_world_row(&put, at, at->block_idx == 0 ? 0 : 12, tokens_count, &bytes);
    assert_true(kvt_index_put_is_sound(&put));
    kvt_index_key_write(key, at, KVT_INDEX_TYPE_ROW);
    n = kvt_index_row_write(value, key, SEED, &put);
    assert_true(n <= KVT_INDEX_VALUE_BYTES_MAX);
    assert_true(kvt_index_value_is_sound(key, SEED, value, n));
    kvt_index_row_read(value, &got, tokens);
    kvt_index_row_shape_of(value, &shape);
    assert_int_equal(shape.value_bytes, n);
    assert_true(shape.parts_count <= KVT_INDEX_PARTS_MAX);
    count = shape.head_tokens;
    for (uint32_t i = 0; i < shape.parts_count; i++) {
        uint8_t part[KVT_INDEX_VALUE_BYTES_MAX];

        kvt_index_key_write(key, at, (uint8_t)(KVT_INDEX_TYPE_PART + i));
        n = kvt_index_part_write(part, key, SEED, &put, i);
        assert_true(kvt_index_value_is_sound(key, SEED, part, n));
        kvt_index_part_read(part, tokens + count);
        count += kvt_index_part_tokens_count(part);
    }
    assert_int_equal(count, tokens_count);
    assert_true(index_world_is_true(&got));
    assert_int_equal(got.parent_id, put.parent_id);
}

static void test_rows(void **state)
{
    (void)state;
    for (uint32_t tokens = 1; tokens <= KVT_BLOCK_TOKENS_MAX; tokens += tokens < 1400 ? 1 : 97) {
        round_trip(&first, tokens);
        round_trip(&later, tokens);
    }
    round_trip(&first, KVT_BLOCK_TOKENS_MAX);
    round_trip(&later, KVT_BLOCK_TOKENS_MAX);
}

static void test_copies(void **state)
{
    (void)state;
    for (uint64_t content = 1; content <= 2ul * KVT_RANKS_MAX; content++) {
        struct kvt_index_put put, got = {.kind = KVT_INDEX_PUT_COPY, .key = later, .component = 3};
        uint64_t slots[KVT_RANKS_MAX], runs[KVT_RANKS_MAX];
        uint32_t n;

        index_world_copy(&put, &later, 3, content, &bytes);
        kvt_index_key_write(key, &later, KVT_INDEX_TYPE_COPY + 3);
        n = kvt_index_copy_write(value, key, SEED, &put);
        assert_true(kvt_index_value_is_sound(key, SEED, value, n));
        kvt_index_copy_read(value, &got, slots, runs);
        assert_true(index_world_is_true(&got));
        assert_int_equal(kvt_index_copy_content(value), content);
    }
}

/* The order of keys as bytes is: id, namespace, epoch, depth, type. */
static void test_keys(void **state)
{
    static const struct kvt_index_key rising[] = {
        /* ns, epoch, depth, id */
        {0, 0, 0, 1},          {0, 0, 1, 1},
        {0, 0, 256, 1},        {0, 1, 0, 1},
        {0, 1ull << 40, 0, 1}, {1, 0, 0, 1},
        {256, 0, 0, 1},        {256, 0, UINT32_MAX, 1},
        {0, 0, 0, 2},          {0, 0, 0, 256},
        {0, 0, 0, 1ull << 40}, {256, UINT64_MAX, 0, (1ull << 48) - 1},
    };
    uint8_t before[KVT_INDEX_KEY_BYTES] = {0};

    (void)state;
    for (uint32_t i = 0; i < KVT_COUNT_OF(rising); i++) {
        for (uint32_t type = 0; type < 256; type += 85) {
            struct kvt_index_key got;
            uint8_t got_type;

            kvt_index_key_write(key, &rising[i], (uint8_t)type);
            assert_true(memcmp(before, key, sizeof(key)) < 0);
            memcpy(before, key, sizeof(key));
            kvt_index_key_read(key, &got, &got_type);
            assert_true(index_world_is_key(&got, &rising[i]));
            assert_int_equal(got_type, type);
        }
    }
}

static void bits_flip(uint32_t n)
{
    for (uint32_t bit = 0; bit < 8 * (n + KVT_INDEX_KEY_BYTES); bit++) {
        uint8_t *at = bit < 8 * n ? &value[bit / 8] : &key[bit / 8 - n];

        *at ^= (uint8_t)(1u << (bit % 8));
        if (kvt_index_value_is_sound(key, SEED, value, n))
            fail_msg("bit %u does not matter", bit);
        *at ^= (uint8_t)(1u << (bit % 8));
    }
    for (uint32_t cut = 0; cut < n; cut++)
        assert_false(kvt_index_value_is_sound(key, SEED, value, cut));
    assert_true(kvt_index_value_is_sound(key, SEED, value, n));
    assert_false(kvt_index_value_is_sound(key, SEED + 1, value, n));
}

static void test_every_bit_matters(void **state)
{
    struct kvt_index_put put;

    (void)state;
    index_world_row(&put, &first, 0, 1000, &bytes);
    kvt_index_key_write(key, &first, KVT_INDEX_TYPE_ROW);
    bits_flip(kvt_index_row_write(value, key, SEED, &put));
    kvt_index_key_write(key, &first, KVT_INDEX_TYPE_PART + 1);
    bits_flip(kvt_index_part_write(value, key, SEED, &put, 1));
    index_world_copy(&put, &first, 0, 40, &bytes);
    kvt_index_key_write(key, &first, KVT_INDEX_TYPE_COPY);
    bits_flip(kvt_index_copy_write(value, key, SEED, &put));
}

static bool is_sound_but(void (*spoil)(struct kvt_index_put *put), bool is_row)
{
    struct kvt_index_put put;

    if (is_row)
        index_world_row(&put, &first, 0, 64, &bytes);
    else
        index_world_copy(&put, &first, 1, 5, &bytes);
    spoil(&put);
    return kvt_index_put_is_sound(&put);
}

static void nothing(struct kvt_index_put *put)
{
    (void)put;
}
static void no_id(struct kvt_index_put *put)
{
    put->key.block_id = 0;
}
static void large_id(struct kvt_index_put *put)
{
    put->key.block_id = 1ull << 48;
}
static void large_ns(struct kvt_index_put *put)
{
    put->key.ns = KVT_NAMESPACES_MAX;
}
static void no_tokens(struct kvt_index_put *put)
{
    put->tokens_count = 0;
}
static void many_tokens(struct kvt_index_put *put)
{
    put->tokens_count = KVT_BLOCK_TOKENS_MAX + 1;
}
static void no_root(struct kvt_index_put *put)
{
    put->root_key = NULL;
}
static void no_root_bytes(struct kvt_index_put *put)
{
    put->root_key_bytes = 0;
}
static void large_root(struct kvt_index_put *put)
{
    put->root_key_bytes = 1025;
}
static void has_parent(struct kvt_index_put *put)
{
    put->parent_id = 3;
}
static void not_first(struct kvt_index_put *put)
{
    put->key.block_idx = 1;
}
static void component(struct kvt_index_put *put)
{
    put->component = KVT_COMPONENTS_MAX;
}
static void no_shards(struct kvt_index_put *put)
{
    put->shards_count = 0;
}
static void many_shards(struct kvt_index_put *put)
{
    put->shards_count = KVT_RANKS_MAX + 1;
}
static void kind(struct kvt_index_put *put)
{
    put->kind = KVT_INDEX_PUT_CATALOG;
}

static void test_sound_puts(void **state)
{
    static void (*const rows[])(struct kvt_index_put *) = {
        no_id,   large_id,      large_ns,   no_tokens,  many_tokens,
        no_root, no_root_bytes, large_root, has_parent, not_first};
    static void (*const copies[])(struct kvt_index_put *) = {
        no_id, large_id, large_ns, component, no_shards, many_shards, kind};

    (void)state;
    assert_true(is_sound_but(nothing, true));
    assert_true(is_sound_but(nothing, false));
    for (uint32_t i = 0; i < KVT_COUNT_OF(rows); i++)
        assert_false(is_sound_but(rows[i], true));
    for (uint32_t i = 0; i < KVT_COUNT_OF(copies); i++)
        assert_false(is_sound_but(copies[i], false));
}

static void test_meta(void **state)
{
    static const uint8_t store[16] = {1}, device[16] = {2}, other[16] = {3};
    uint8_t record[KVT_INDEX_META_BYTES];

    (void)state;
    kvt_index_meta_write(record, store, device);
    assert_int_equal(kvt_index_meta_check(record, sizeof(record), store, device),
                     KVT_INDEX_META_OK);
    assert_int_equal(kvt_index_meta_check(record, sizeof(record), other, device),
                     KVT_INDEX_META_OTHER_STORE);
    assert_int_equal(kvt_index_meta_check(record, sizeof(record), store, other),
                     KVT_INDEX_META_OTHER_DEVICE);
    assert_int_equal(kvt_index_meta_check(record, sizeof(record) - 1, store, device),
                     KVT_INDEX_META_DAMAGED);
    kvt_put_u32(record, 8, KVT_INDEX_FORMAT_VERSION + 1);
    kvt_put_u64(record, 56, kvt_hash64(record, 56, 0));
    assert_int_equal(kvt_index_meta_check(record, sizeof(record), store, device),
                     KVT_INDEX_META_OTHER_VERSION);
    kvt_index_meta_write(record, store, device);
    for (uint32_t bit = 0; bit < 8 * sizeof(record); bit++) {
        record[bit / 8] ^= (uint8_t)(1u << (bit % 8));
        assert_int_equal(kvt_index_meta_check(record, sizeof(record), store, device),
                         KVT_INDEX_META_DAMAGED);
        record[bit / 8] ^= (uint8_t)(1u << (bit % 8));
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_rows),       cmocka_unit_test(test_copies),
        cmocka_unit_test(test_keys),       cmocka_unit_test(test_every_bit_matters),
        cmocka_unit_test(test_sound_puts), cmocka_unit_test(test_meta),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
