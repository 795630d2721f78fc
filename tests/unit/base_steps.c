/* Step tables: whichever step fails, exactly the ones before it are undone, last first. */
#include "daemon/base/steps.h"
#include "tests/common/cmocka.h"

struct trace {
    char text[64]; /* capital: started, small: undone */
    uint32_t letters;
    uint32_t steps, fail_at;
};

static int start(struct trace *trace, char letter)
{
    if (trace->steps++ == trace->fail_at)
        return -EIO;
    trace->text[trace->letters++] = letter;
    return 0;
}

static void undo(struct trace *trace, char letter)
{
    trace->text[trace->letters++] = letter;
}

static int start_a(void *ctx)
{
    return start(ctx, 'A');
}

static int start_b(void *ctx)
{
    return start(ctx, 'B');
}

static int start_c(void *ctx)
{
    return start(ctx, 'C');
}

static void undo_a(void *ctx)
{
    undo(ctx, 'a');
}

static void undo_c(void *ctx)
{
    undo(ctx, 'c');
}

static const struct kvt_step steps[] = {
    {"a", start_a, undo_a},
    {"b, which has no undo", start_b, NULL},
    {"c", start_c, undo_c},
};

static void test_each_failure(void **state)
{
    static const char *const traces[] = {"", "Aa", "ABa"};

    (void)state;
    for (uint32_t fail_at = 0; fail_at < KVT_COUNT_OF(steps); fail_at++) {
        struct trace trace = {.fail_at = fail_at};

        assert_int_equal(kvt_steps_start(steps, KVT_COUNT_OF(steps), &trace), -EIO);
        assert_string_equal(trace.text, traces[fail_at]);
    }
}

static void test_start_and_stop(void **state)
{
    struct trace trace = {.fail_at = UINT32_MAX};

    (void)state;
    assert_int_equal(kvt_steps_start(steps, KVT_COUNT_OF(steps), &trace), 0);
    assert_string_equal(trace.text, "ABC");
    kvt_steps_stop(steps, KVT_COUNT_OF(steps), &trace);
    assert_string_equal(trace.text, "ABCca");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_each_failure),
        cmocka_unit_test(test_start_and_stop),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
