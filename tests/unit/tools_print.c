/* Tables, JSON and histograms: what people and scripts read. */
#include "tests/common/cmocka.h"

#include <cjson/cJSON.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tools/lib/histogram.h"
#include "tools/lib/json.h"
#include "tools/lib/table.h"

static void test_table_aligns_columns(void **state)
{
    struct kvt_table *table = kvt_table_new("lr");
    char *text = NULL;
    size_t bytes = 0;
    FILE *out = open_memstream(&text, &bytes);

    (void)state;
    assert_non_null(table);
    kvt_table_cell(table, "name");
    kvt_table_cell(table, "µs");
    kvt_table_cell(table, "a");
    kvt_table_cell(table, "%d", 12345);
    kvt_table_cell(table, "longer name");
    kvt_table_end_row(table);
    assert_int_equal(kvt_table_print(table, out, KVT_TABLE_PLAIN, 1), 0);
    assert_int_equal(kvt_table_print(table, out, KVT_TABLE_MARKDOWN, 0), 0);
    kvt_table_clear(table);
    assert_int_equal(kvt_table_print(table, out, KVT_TABLE_PLAIN, 0), 0);
    (void)fclose(out);
    assert_string_equal(text, " name            µs\n"
                              " a            12345\n"
                              " longer name       \n"
                              "| name        |    µs |\n"
                              "|-------------|------:|\n"
                              "| a           | 12345 |\n"
                              "| longer name |       |\n"
                              "name  µs\n");
    free(text);
    assert_null(kvt_table_free(table));
}

static void test_numbers_for_people(void **state)
{
    char buf[KVT_TEXT_BYTES];

    (void)state;
    assert_string_equal(kvt_text_bytes(buf, 1023), "1023 B");
    assert_string_equal(kvt_text_bytes(buf, 12ull << 20), "12.0 MiB");
    assert_string_equal(kvt_text_bytes(buf, UINT64_MAX), "16.0 EiB");
    assert_string_equal(kvt_text_count(buf, 0), "0");
    assert_string_equal(kvt_text_count(buf, 999), "999");
    assert_string_equal(kvt_text_count(buf, 1234567), "1,234,567");
    assert_string_equal(kvt_text_count(buf, UINT64_MAX), "18,446,744,073,709,551,615");
    assert_string_equal(kvt_text_ns(buf, 999), "999 ns");
    assert_string_equal(kvt_text_ns(buf, 1250000), "1.25 ms");
    assert_string_equal(kvt_text_ns(buf, 90ull * KVT_NS_PER_S), "90.0 s");
    assert_string_equal(kvt_text_share(buf, 1, 3), "33.3 %");
    assert_string_equal(kvt_text_share(buf, 1, 0), "-");
    assert_string_equal(kvt_text_rate(buf, 5, 4), "1.25 GB/s");
}

static void test_json_is_json(void **state)
{
    static const char odd[] = "tab\t\"q\" \\ \x01 \xC3\xA9 \xFF\xC3 \xED\xA0\x80";
    struct kvt_json json;
    char *text = NULL;
    size_t bytes = 0;
    FILE *out = open_memstream(&text, &bytes);
    cJSON *parsed, *list;

    (void)state;
    kvt_json_begin(&json, out, false);
    kvt_json_u64(&json, "big", UINT64_MAX);
    kvt_json_array(&json, "list");
    kvt_json_u64(&json, NULL, 1);
    kvt_json_object(&json, NULL);
    kvt_json_end(&json);
    kvt_json_end(&json);
    kvt_json_bytes(&json, "odd", odd, sizeof(odd) - 1);
    kvt_json_double(&json, "nan", 0.0 / 0.0);
    kvt_json_bool(&json, "yes", true);
    kvt_json_text(&json, "none", NULL);
    kvt_json_hex(&json, "hex", (const uint8_t *)"\x01\xFE", 2);
    kvt_json_finish(&json);
    (void)fclose(out);
    parsed = cJSON_Parse(text);
    assert_non_null(parsed);
    assert_non_null(strstr(text, "18446744073709551615"));
    list = cJSON_GetObjectItem(parsed, "list");
    assert_int_equal(cJSON_GetArraySize(list), 2);
    assert_true(cJSON_IsNull(cJSON_GetObjectItem(parsed, "nan")));
    assert_string_equal(cJSON_GetStringValue(cJSON_GetObjectItem(parsed, "hex")), "01fe");
    assert_string_equal(cJSON_GetStringValue(cJSON_GetObjectItem(parsed, "odd")),
                        "tab\t\"q\" \\ \x01 \xC3\xA9 \xEF\xBF\xBD\xEF\xBF\xBD "
                        "\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD");
    cJSON_Delete(parsed);
    free(text);
}

static void test_histogram_quantiles(void **state)
{
    struct kvt_histogram low = {0}, high = {0};

    (void)state;
    assert_int_equal(kvt_histogram_quantile(&low, 500), 0);
    for (uint64_t i = 1; i <= 1000; i++)
        kvt_histogram_add(i <= 500 ? &low : &high, i * 1000);
    kvt_histogram_merge(&low, &high);
    assert_int_equal(low.count, 1000);
    assert_int_equal(low.sum_ns, 500500ull * 1000);
    assert_in_range(kvt_histogram_quantile(&low, 500), 500 * 1000, 532 * 1000);
    assert_in_range(kvt_histogram_quantile(&low, 990), 990 * 1000, 1000 * 1000);
    assert_int_equal(kvt_histogram_quantile(&low, 1000), 1000 * 1000);
    kvt_histogram_add(&low, UINT64_MAX);
    kvt_histogram_add(&low, 0);
    assert_int_equal(kvt_histogram_quantile(&low, 1000), UINT64_MAX);
}

static void test_histogram_buckets_are_ordered(void **state)
{
    uint64_t before = 0;

    (void)state;
    for (uint64_t ns = 0; ns < 1ull << 40; ns += 1 + ns / 5) {
        struct kvt_histogram one = {0};
        uint64_t at;

        kvt_histogram_add(&one, ns);
        kvt_histogram_add(&one, UINT64_MAX); /* so that the greatest sample does not cap it */
        at = kvt_histogram_quantile(&one, 500);
        assert_in_range(at, ns, ns + ns / 16);
        assert_true(at >= before);
        before = at;
    }
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_table_aligns_columns),
        cmocka_unit_test(test_numbers_for_people),
        cmocka_unit_test(test_json_is_json),
        cmocka_unit_test(test_histogram_quantiles),
        cmocka_unit_test(test_histogram_buckets_are_ordered),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
