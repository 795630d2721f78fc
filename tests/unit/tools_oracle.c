/* The payload oracle and the models whose payloads it makes: what verifies everything must itself
 * be right, above all that it says no to bytes that are almost right. */
#include "tests/common/cmocka.h"

#include <string.h>

#include "tools/lib/model.h"
#include "tools/lib/oracle.h"

#define PAYLOAD_BYTES 3001u

static const struct kvt_oracle_place place_a = {
    .chain = 7, .block_idx = 3, .component = 1, .rank = 2};

static void test_parts_are_the_whole(void **state)
{
    uint64_t key = kvt_oracle_key(&place_a);
    uint8_t whole[PAYLOAD_BYTES], parts[PAYLOAD_BYTES];
    size_t step = 1;

    (void)state;
    kvt_oracle_fill(key, 0, whole, sizeof(whole));
    for (size_t at = 0; at < sizeof(parts);) {
        size_t bytes = KVT_MIN(step, sizeof(parts) - at);

        kvt_oracle_fill(key, at, parts + at, bytes);
        at += bytes;
        step = step * 3 % 61 + 1;
    }
    assert_memory_equal(whole, parts, sizeof(whole));
    assert_int_equal(kvt_oracle_count_wrong(key, 0, whole, sizeof(whole)), 0);
    for (size_t at = 0; at < sizeof(whole); at += 97)
        assert_int_equal(kvt_oracle_count_wrong(key, at, whole + at, sizeof(whole) - at), 0);
}

static void test_each_wrong_byte_is_counted(void **state)
{
    uint64_t key = kvt_oracle_key(&place_a);
    uint8_t bytes[PAYLOAD_BYTES];

    (void)state;
    kvt_oracle_fill(key, 5, bytes, sizeof(bytes));
    for (size_t at = 0; at < sizeof(bytes); at += 13) {
        bytes[at] ^= 0x10;
        assert_int_equal(kvt_oracle_count_wrong(key, 5, bytes, sizeof(bytes)), 1);
        bytes[at] ^= 0x10;
    }
    bytes[0] ^= 1;
    bytes[PAYLOAD_BYTES - 1] ^= 1;
    assert_int_equal(kvt_oracle_count_wrong(key, 5, bytes, sizeof(bytes)), 2);
}

/* Nearly every byte of another place's payload has to be wrong here. */
static void check_differs(const struct kvt_oracle_place *other)
{
    uint8_t bytes[PAYLOAD_BYTES];

    kvt_oracle_fill(kvt_oracle_key(other), 0, bytes, sizeof(bytes));
    assert_true(kvt_oracle_count_wrong(kvt_oracle_key(&place_a), 0, bytes, sizeof(bytes)) >
                PAYLOAD_BYTES * 9 / 10);
}

static void test_every_part_of_the_place_matters(void **state)
{
    struct kvt_oracle_place other;
    uint8_t shifted[PAYLOAD_BYTES];

    (void)state;
    other = place_a;
    other.chain ^= 1;
    check_differs(&other);
    other = place_a;
    other.block_idx++;
    check_differs(&other);
    other = place_a;
    other.component++;
    check_differs(&other);
    other = place_a;
    other.rank++;
    check_differs(&other);
    other = (struct kvt_oracle_place){7, 3, 2, 1}; /* component and rank swapped */
    check_differs(&other);
    kvt_oracle_fill(kvt_oracle_key(&place_a), 8, shifted, sizeof(shifted));
    assert_true(kvt_oracle_count_wrong(kvt_oracle_key(&place_a), 0, shifted, sizeof(shifted)) >
                PAYLOAD_BYTES * 9 / 10);
}

static void test_chains_follow_tokens(void **state)
{
    uint32_t tokens[12] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12};
    uint8_t fingerprint[KVT_FINGERPRINT_BYTES] = {1}, extra_key[KVT_EXTRA_KEY_BYTES] = {9};
    uint64_t root = kvt_oracle_root(fingerprint, "", ""), chains[3], changed[3], tail[2];

    (void)state;
    kvt_oracle_chain(root, tokens, 4, 3, chains);
    kvt_oracle_chain(chains[0], tokens + 4, 4, 2, tail);
    assert_int_equal(tail[0], chains[1]);
    assert_int_equal(tail[1], chains[2]);
    tokens[5] = 60;
    kvt_oracle_chain(root, tokens, 4, 3, changed);
    assert_int_equal(changed[0], chains[0]);
    assert_int_not_equal(changed[1], chains[1]);
    assert_int_not_equal(changed[2], chains[2]);
    assert_int_not_equal(kvt_oracle_chain_next(root, tokens, 4, extra_key),
                         kvt_oracle_chain_next(root, tokens, 4, NULL));
    assert_int_not_equal(kvt_oracle_root(fingerprint, "a", ""), root);
    assert_int_not_equal(kvt_oracle_root(fingerprint, "a", ""),
                         kvt_oracle_root(fingerprint, "", "a"));
    fingerprint[31] = 1;
    assert_int_not_equal(kvt_oracle_root(fingerprint, "", ""), root);
}

static void test_models(void **state)
{
    struct kvt_model_options options = kvt_model_defaults();
    struct kvt_model model;
    char why[128];

    (void)state;
    options.preset = "hybrid";
    assert_int_equal(kvt_model_make(&model, &options, why, sizeof(why)), 0);
    assert_int_equal(model.components_count, 3);
    for (uint32_t c = 0; c < model.components_count; c++)
        assert_int_equal((uint64_t)model.components[c].piece_bytes *
                             model.components[c].pieces_count *
                             model.components[c].engine_blocks_per_block,
                         model.components[c].block_bytes);
    assert_int_equal(kvt_model_block_bytes(&model), 3 * 64 * 512);
    options.engine_block_tokens = 24;
    assert_int_equal(kvt_model_make(&model, &options, why, sizeof(why)), KVT_MODEL_E_BAD);
    options.engine_block_tokens = 1;
    options.bytes_per_token = 12;
    assert_int_equal(kvt_model_make(&model, &options, why, sizeof(why)), KVT_MODEL_E_BAD);
    options = kvt_model_defaults();
    options.ranks = 4;
    assert_int_equal(kvt_model_make(&model, &options, why, sizeof(why)), 0);
    assert_int_equal(kvt_model_block_bytes(&model), 4 * 64 * 512);
    assert_int_equal(kvt_model_shard_rank(&model, 0, 3), 3);
    options.preset = "mla"; /* the same bytes on every rank */
    assert_int_equal(kvt_model_make(&model, &options, why, sizeof(why)), 0);
    assert_int_equal(kvt_model_block_bytes(&model), 64 * 512);
    assert_int_equal(kvt_model_shard_rank(&model, 0, 3), 0);
    options.preset = "none";
    assert_int_equal(kvt_model_make(&model, &options, why, sizeof(why)), KVT_MODEL_E_BAD);
}

static void test_needed_blocks(void **state)
{
    static const struct {
        uint32_t window_tokens;
        uint64_t boundary_tokens, first, end;
    } rows[] = {
        {1, 0, 0, 0},    {1, 64, 0, 1},    {1, 128, 1, 2},    {64, 128, 1, 2},   {65, 128, 0, 2},
        {63, 192, 2, 3}, {500, 192, 0, 3}, {100, 640, 8, 10}, {128, 640, 8, 10}, {129, 640, 7, 10},
    };
    struct kvt_model_options options = kvt_model_defaults();
    struct kvt_model model;
    struct kvt_model_span span;
    char why[128];

    (void)state;
    options.preset = "hybrid";
    for (size_t i = 0; i < KVT_COUNT_OF(rows); i++) {
        options.window_tokens = rows[i].window_tokens;
        assert_int_equal(kvt_model_make(&model, &options, why, sizeof(why)), 0);
        span = kvt_model_needed(&model, 1, rows[i].boundary_tokens);
        assert_int_equal(span.first, rows[i].first);
        assert_int_equal(span.end, rows[i].end);
        span = kvt_model_needed(&model, 0, rows[i].boundary_tokens);
        assert_int_equal(span.first, 0);
        assert_int_equal(span.end, rows[i].end);
        span = kvt_model_needed(&model, 2, rows[i].boundary_tokens);
        assert_int_equal(span.end - span.first, rows[i].end > 0);
    }
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_parts_are_the_whole),
        cmocka_unit_test(test_each_wrong_byte_is_counted),
        cmocka_unit_test(test_every_part_of_the_place_matters),
        cmocka_unit_test(test_chains_follow_tokens),
        cmocka_unit_test(test_models),
        cmocka_unit_test(test_needed_blocks),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
