/* The check of payloads and its absence, each linked with the slots of its own. is-on is told by
 * the build: KVT_TEST_VERIFY_IS_ON is 1 or 0. */
#include <string.h>

#include "daemon/base/hash.h"
#include "tests/common/cmocka.h"
#include "tiers/slot.h"
#include "tiers/verify.h"

#define PAYLOAD_BYTES 3000u

static void test_bytes(void **state)
{
    static const uint8_t payload[3] = {1, 2, 3};
    uint64_t hash = kvt_hash64(payload, sizeof(payload), 0);

    (void)state;
    assert_int_equal(kvt_verify_is_on(), KVT_TEST_VERIFY_IS_ON);
    assert_true(kvt_verify_payload(payload, sizeof(payload), hash));
    assert_int_equal(kvt_verify_payload(payload, sizeof(payload), hash ^ 1),
                     !KVT_TEST_VERIFY_IS_ON);
    assert_int_equal(kvt_verify_payload(payload, sizeof(payload) - 1, hash),
                     !KVT_TEST_VERIFY_IS_ON);
}

/* A slot with a wrong byte of its payload passes where nothing is verified; one whose header is
 * wrong, or another's, passes nowhere. */
static void test_slot(void **state)
{
    static uint8_t slot[4096];
    static const uint32_t tokens[16];
    const struct kvt_slot_info info = {
        .block_id = 5, .generation = 6, .payload_bytes = PAYLOAD_BYTES, .block_tokens = 16};
    struct kvt_slot_key key = {
        .block_id = 5, .generation = 6, .payload_bytes = PAYLOAD_BYTES, .block_tokens = 16};
    uint8_t *payload = slot + kvt_slot_header_bytes(16);

    (void)state;
    memset(payload, 0x5a, PAYLOAD_BYTES);
    kvt_slot_header_write(slot, &info, tokens);
    kvt_slot_header_seal(slot, kvt_hash64(payload, PAYLOAD_BYTES, 0));
    assert_int_equal(kvt_slot_check(slot, &key), KVT_SLOT_OK);
    payload[1234] ^= 4;
    assert_int_equal(kvt_slot_check(slot, &key),
                     KVT_TEST_VERIFY_IS_ON ? KVT_SLOT_BAD_PAYLOAD : KVT_SLOT_OK);
    payload[1234] ^= 4;
    key.generation = 7;
    assert_int_equal(kvt_slot_check(slot, &key), KVT_SLOT_OTHER);
    key.generation = 6;
    slot[100] ^= 1;
    assert_int_equal(kvt_slot_check(slot, &key), KVT_SLOT_BAD_HEADER);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_bytes), cmocka_unit_test(test_slot)};

    return cmocka_run_group_tests(tests, NULL, NULL);
}
