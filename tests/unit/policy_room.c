/* Eviction, promotion and slab policies as tables. */
#include "daemon/engine/policy_evict.h"
#include "daemon/engine/policy_promote.h"
#include "daemon/engine/policy_slab.h"

#include "tests/common/cmocka.h"

#define NEVER UINT64_MAX

static void test_marks(void **state)
{
    static const struct {
        uint64_t taken_slots;
        uint32_t shards;
        uint64_t low_slots, high_slots;
    } rows[] = {
        {0, 1, 0, 0},          {7, 1, 0, 0},     {8, 1, 1, 2},           {63, 1, 1, 2},
        {64, 1, 2, 4},         {23, 3, 0, 0},    {24, 3, 3, 6},          {3200, 1, 64, 128},
        {1000000, 1, 64, 128}, {640, 8, 20, 40}, {1000000, 16, 64, 128},
    };

    (void)state;
    for (size_t i = 0; i < KVT_COUNT_OF(rows); i++) {
        struct kvt_evict_marks marks = kvt_evict_marks(rows[i].taken_slots, rows[i].shards);

        if (marks.low_slots != rows[i].low_slots || marks.high_slots != rows[i].high_slots)
            fail_msg("row %zu: %llu, %llu", i, (unsigned long long)marks.low_slots,
                     (unsigned long long)marks.high_slots);
    }
}

static void test_pick(void **state)
{
    static const struct {
        uint64_t ages[4];
        uint32_t count, wanted;
    } rows[] = {
        {{0}, 0, KVT_EVICT_NONE}, {{NEVER, NEVER}, 2, KVT_EVICT_NONE},
        {{5, 3, 9}, 3, 1},        {{NEVER, 8, 8, 7}, 4, 3},
        {{4, 4}, 2, 0},           {{0, NEVER}, 2, 0},
    };

    (void)state;
    for (size_t i = 0; i < KVT_COUNT_OF(rows); i++)
        if (kvt_evict_pick(rows[i].ages, rows[i].count) != rows[i].wanted)
            fail_msg("row %zu", i);
}

static void test_promote(void **state)
{
    static const struct {
        struct kvt_promote_facts facts;
        enum kvt_promote_verdict wanted;
    } rows[] = {
        /* in flight, most, this, background, room, headroom */
        {{0, 100, 500, false, 0, 0}, KVT_PROMOTE_GO}, /* one always may, however large */
        {{1, 100, 500, false, 9, 0}, KVT_PROMOTE_WAIT},
        {{60, 100, 40, false, 0, 5}, KVT_PROMOTE_GO}, /* somebody waits: headroom is for them */
        {{60, 100, 41, false, 9, 0}, KVT_PROMOTE_WAIT},
        {{100, 100, 1, false, 9, 0}, KVT_PROMOTE_WAIT},
        {{200, 100, 1, false, 9, 0}, KVT_PROMOTE_WAIT},
        {{0, 100, 10, true, 5, 5}, KVT_PROMOTE_NO}, /* prefetch evicts nothing */
        {{0, 100, 10, true, 6, 5}, KVT_PROMOTE_GO},
        {{40, 100, 10, true, 6, 5}, KVT_PROMOTE_GO},
        {{41, 100, 10, true, 6, 5}, KVT_PROMOTE_WAIT}, /* half of the budget */
    };

    (void)state;
    for (size_t i = 0; i < KVT_COUNT_OF(rows); i++)
        if (kvt_promote_decide(&rows[i].facts) != rows[i].wanted)
            fail_msg("row %zu", i);
}

static void test_slab(void **state)
{
    static const struct {
        struct kvt_slab_facts facts;
        enum kvt_slab_verdict wanted;
    } rows[] = {
        /* own age, others' age, own bytes, capacity, classes */
        {{NEVER, NEVER, 0, 100, 1}, KVT_SLAB_NOTHING},
        {{NEVER, 5, 0, 100, 2}, KVT_SLAB_TAKE_OTHER}, /* nothing of its own */
        {{NEVER, 5, 90, 100, 2}, KVT_SLAB_TAKE_OTHER},
        {{5, NEVER, 0, 100, 2}, KVT_SLAB_EVICT_OWN},
        {{5, 4, 49, 100, 2}, KVT_SLAB_TAKE_OTHER}, /* below its share, others' are older */
        {{5, 4, 50, 100, 2}, KVT_SLAB_EVICT_OWN},
        {{5, 5, 10, 100, 2}, KVT_SLAB_EVICT_OWN}, /* not older: no trade */
        {{4, 5, 10, 100, 2}, KVT_SLAB_EVICT_OWN},
    };

    (void)state;
    for (size_t i = 0; i < KVT_COUNT_OF(rows); i++)
        if (kvt_slab_decide(&rows[i].facts) != rows[i].wanted)
            fail_msg("row %zu", i);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_marks),
        cmocka_unit_test(test_pick),
        cmocka_unit_test(test_promote),
        cmocka_unit_test(test_slab),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
