/* The write policy as a table: what is asked, what it answers. */
#include "daemon/engine/policy_write.h"

#include "tests/common/cmocka.h"

struct row {
    enum kvt_write_policy policy;
    bool is_evicted, is_lower_on, is_lower_busy;
    uint32_t touches;
    enum kvt_write_verdict wanted;
};

static void test_decide(void **state)
{
    static const struct row rows[] = {
        {KVT_WRITE_BACK, false, true, false, 9, KVT_WRITE_NOT_WANTED},
        {KVT_WRITE_BACK, true, true, false, 0, KVT_WRITE_YES},
        {KVT_WRITE_BACK, true, true, true, 0, KVT_WRITE_NO_BUDGET},
        {KVT_WRITE_BACK, true, false, false, 0, KVT_WRITE_NO_LOWER},
        {KVT_WRITE_BACK, true, false, true, 0, KVT_WRITE_NO_LOWER},
        {KVT_WRITE_THROUGH, false, true, false, 0, KVT_WRITE_YES},
        {KVT_WRITE_THROUGH, true, true, false, 0, KVT_WRITE_YES},
        {KVT_WRITE_THROUGH, false, true, true, 0, KVT_WRITE_NO_BUDGET},
        {KVT_WRITE_THROUGH, false, false, false, 0, KVT_WRITE_NO_LOWER},
        {KVT_WRITE_SELECTIVE, false, true, false, 9, KVT_WRITE_NOT_WANTED},
        {KVT_WRITE_SELECTIVE, true, true, false, 2, KVT_WRITE_NOT_WANTED},
        {KVT_WRITE_SELECTIVE, true, true, false, 3, KVT_WRITE_YES},
        {KVT_WRITE_SELECTIVE, true, true, true, 3, KVT_WRITE_NO_BUDGET},
    };

    (void)state;
    for (size_t i = 0; i < KVT_COUNT_OF(rows); i++) {
        struct kvt_write_bucket bucket = {0};
        struct kvt_write_facts facts = {
            .policy = rows[i].policy,
            .is_evicted = rows[i].is_evicted,
            .is_lower_on = rows[i].is_lower_on,
            .is_lower_busy = rows[i].is_lower_busy,
            .touches = rows[i].touches,
            .selective_touches = 3,
            .bytes = 4096,
        };

        if (kvt_write_decide(&facts, &bucket) != rows[i].wanted)
            fail_msg("row %zu", i);
    }
}

static void test_budget(void **state)
{
    struct kvt_write_bucket bucket = {.rate_bytes_per_s = 1000};
    struct kvt_write_facts facts = {
        .policy = KVT_WRITE_THROUGH, .is_evicted = true, .is_lower_on = true, .bytes = 400};
    /* ns, bytes, verdict, level after */
    static const struct {
        uint64_t at_ns, bytes;
        enum kvt_write_verdict wanted;
        uint64_t level_bytes;
    } rows[] = {
        {1, 400, KVT_WRITE_YES, 600},               /* starts full */
        {1, 400, KVT_WRITE_YES, 200},               /* no time passed */
        {1, 400, KVT_WRITE_NO_BUDGET, 200},         /* refused writes take nothing */
        {100000001, 400, KVT_WRITE_NO_BUDGET, 300}, /* a tenth of a second gives 100 */
        {200000001, 400, KVT_WRITE_YES, 0},         /* exactly enough */
        {200000002, 1, KVT_WRITE_NO_BUDGET, 0},     /* a nanosecond gives nothing yet ... */
        {201000001, 1, KVT_WRITE_YES, 0},           /* ... but was not forgotten */
        {9000000000, 400, KVT_WRITE_YES, 600},      /* never more than a second's worth */
        {9100000000, 5000, KVT_WRITE_NO_BUDGET, 700},
        {99000000000, 5000, KVT_WRITE_YES, 0}, /* larger than the bucket: when it is full */
    };

    (void)state;
    for (size_t i = 0; i < KVT_COUNT_OF(rows); i++) {
        kvt_write_bucket_fill(&bucket, rows[i].at_ns);
        facts.bytes = rows[i].bytes;
        if (kvt_write_decide(&facts, &bucket) != rows[i].wanted)
            fail_msg("row %zu: verdict", i);
        if (bucket.level_bytes != rows[i].level_bytes)
            fail_msg("row %zu: level %llu", i, (unsigned long long)bucket.level_bytes);
    }
}

/* BACK: below a quarter of a second's worth only what was read often enough. */
static void test_short_budget(void **state)
{
    static const struct {
        uint64_t level_bytes;
        uint32_t touches;
        enum kvt_write_verdict wanted;
    } rows[] = {
        {1000, 0, KVT_WRITE_YES}, {250, 0, KVT_WRITE_YES},       {249, 0, KVT_WRITE_NO_BUDGET},
        {249, 2, KVT_WRITE_YES},  {249, 1, KVT_WRITE_NO_BUDGET}, {50, 7, KVT_WRITE_NO_BUDGET},
    };

    (void)state;
    for (size_t i = 0; i < KVT_COUNT_OF(rows); i++) {
        struct kvt_write_bucket bucket = {.rate_bytes_per_s = 1000,
                                          .level_bytes = rows[i].level_bytes};
        const struct kvt_write_facts facts = {.policy = KVT_WRITE_BACK,
                                              .is_evicted = true,
                                              .is_lower_on = true,
                                              .touches = rows[i].touches,
                                              .selective_touches = 2,
                                              .bytes = 100};

        if (kvt_write_decide(&facts, &bucket) != rows[i].wanted)
            fail_msg("row %zu", i);
    }
}

static void test_budget_of_a_fast_disk(void **state)
{
    struct kvt_write_bucket bucket = {.rate_bytes_per_s = 100 * KVT_GIB};

    (void)state;
    kvt_write_bucket_fill(&bucket, 1);
    bucket.level_bytes = 0;
    kvt_write_bucket_fill(&bucket, 1 + 500 * KVT_NS_PER_MS);
    assert_in_range(bucket.level_bytes, 49 * KVT_GIB, 50 * KVT_GIB); /* no overflow */
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_decide),
        cmocka_unit_test(test_budget),
        cmocka_unit_test(test_short_budget),
        cmocka_unit_test(test_budget_of_a_fast_disk),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
