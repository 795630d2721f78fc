/* Sizes, shares and durations: tables of good and bad texts; format and parse are inverse. */
#include "daemon/base/size.h"
#include "tests/common/cmocka.h"

struct row {
    const char *text;
    int result;
    uint64_t value;
};

static void test_sizes(void **state)
{
    static const struct row rows[] = {
        {"0", 0, 0},
        {"0GiB", 0, 0},
        {"1B", 0, 1},
        {"4KiB", 0, 4096},
        {"512 MiB", 0, 512 * KVT_MIB},
        {"4GiB", 0, 4 * KVT_GIB},
        {"1.5GiB", 0, 3 * KVT_GIB / 2},
        {"0.000001B", 0, 0},
        {"2TiB", 0, 2048 * KVT_GIB},
        {"16777215TiB", 0, 16777215ull << 40},
        {"18446744073709551615B", 0, UINT64_MAX},
        {"16777216TiB", KVT_SIZE_E_RANGE, 0},
        {"16777215.9999999TiB", KVT_SIZE_E_SYNTAX, 0},
        {"18446744073709551616B", KVT_SIZE_E_RANGE, 0},
        {"99999999999999999999999GiB", KVT_SIZE_E_RANGE, 0},
        {"4", KVT_SIZE_E_UNIT, 0},
        {"4G", KVT_SIZE_E_UNIT, 0},
        {"4GB", KVT_SIZE_E_UNIT, 0},
        {"4gib", KVT_SIZE_E_UNIT, 0},
        {"4GiB ", KVT_SIZE_E_UNIT, 0},
        {"4GiB4", KVT_SIZE_E_UNIT, 0},
        {"10%", KVT_SIZE_E_UNIT, 0},
        {"0x10B", KVT_SIZE_E_UNIT, 0},
        {"1e3B", KVT_SIZE_E_UNIT, 0},
        {"", KVT_SIZE_E_SYNTAX, 0},
        {" 4GiB", KVT_SIZE_E_SYNTAX, 0},
        {"-4GiB", KVT_SIZE_E_SYNTAX, 0},
        {"+4GiB", KVT_SIZE_E_SYNTAX, 0},
        {"GiB", KVT_SIZE_E_SYNTAX, 0},
        {".5GiB", KVT_SIZE_E_SYNTAX, 0},
        {"1.GiB", KVT_SIZE_E_SYNTAX, 0},
        {"1.2.3GiB", KVT_SIZE_E_UNIT, 0},
    };

    (void)state;
    for (uint32_t i = 0; i < KVT_COUNT_OF(rows); i++) {
        uint64_t bytes = 77;
        int r = kvt_size_parse(rows[i].text, &bytes);

        if (r != rows[i].result || bytes != (r == 0 ? rows[i].value : 77))
            fail_msg("\"%s\": %d, %llu", rows[i].text, r, (unsigned long long)bytes);
    }
}

static void test_shares(void **state)
{
    static const struct row rows[] = {
        {"10%", 0, 100},
        {"0%", 0, 0},
        {"100%", 0, 1000},
        {"0.1%", 0, 1},
        {"12.5 %", 0, 125},
        {"7B", 0, 7},
        {"0", 0, 0},
        {"100.1%", KVT_SIZE_E_RANGE, 0},
        {"7", KVT_SIZE_E_UNIT, 0},
        {"%", KVT_SIZE_E_SYNTAX, 0},
    };
    uint64_t bytes;

    (void)state;
    for (uint32_t i = 0; i < KVT_COUNT_OF(rows); i++) {
        bytes = 77;
        assert_int_equal(kvt_size_parse_share(rows[i].text, 1000, &bytes), rows[i].result);
        assert_int_equal(bytes, rows[i].result == 0 ? rows[i].value : 77);
    }
    assert_int_equal(kvt_size_parse_share("100%", UINT64_MAX, &bytes), 0);
    assert_true(bytes == UINT64_MAX);
}

static void test_durations(void **state)
{
    static const struct row rows[] = {
        {"0", 0, 0},
        {"250ms", 0, 250 * KVT_NS_PER_MS},
        {"1.5s", 0, 1500 * KVT_NS_PER_MS},
        {"2min", 0, 120 * KVT_NS_PER_S},
        {"10 us", 0, 10000},
        {"3ns", 0, 3},
        {"24h", 0, 86400 * KVT_NS_PER_S},
        {"30", KVT_SIZE_E_UNIT, 0},
        {"30sec", KVT_SIZE_E_UNIT, 0},
        {"1m", KVT_SIZE_E_UNIT, 0},
        {"10000000h", KVT_SIZE_E_RANGE, 0},
        {"s", KVT_SIZE_E_SYNTAX, 0},
    };

    (void)state;
    for (uint32_t i = 0; i < KVT_COUNT_OF(rows); i++) {
        uint64_t ns = 77;
        int r = kvt_duration_parse(rows[i].text, &ns);

        if (r != rows[i].result || ns != (r == 0 ? rows[i].value : 77))
            fail_msg("\"%s\": %d, %llu", rows[i].text, r, (unsigned long long)ns);
    }
}

static void test_format_is_the_inverse(void **state)
{
    uint64_t random = 88172645463325252ull;
    char text[KVT_SIZE_TEXT_BYTES];
    uint64_t value;

    (void)state;
    for (uint32_t i = 0; i < 100000; i++) {
        uint64_t expected;

        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        expected = random >> random % 64 << (random >> 8) % 41;
        kvt_size_format(expected, text);
        assert_int_equal(kvt_size_parse(text, &value), 0);
        assert_true(value == expected);
        kvt_duration_format(expected, text);
        assert_int_equal(kvt_duration_parse(text, &value), 0);
        assert_true(value == expected);
    }
    kvt_size_format(3 * KVT_GIB, text);
    assert_string_equal(text, "3GiB");
    kvt_size_format(0, text);
    assert_string_equal(text, "0B");
    kvt_size_format_short(3 * KVT_GIB / 2 + 12345, text);
    assert_string_equal(text, "1.50 GiB");
    kvt_size_format_short(UINT64_MAX, text);
    assert_string_equal(text, "16777216 TiB");
    kvt_size_format_short(1023, text);
    assert_string_equal(text, "1023 B");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_sizes),
        cmocka_unit_test(test_shares),
        cmocka_unit_test(test_durations),
        cmocka_unit_test(test_format_is_the_inverse),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
