/* Log lines: prefixes, levels, whole lines, errno kept, and a bound a call site. */
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "daemon/base/log.h"
#include "tests/common/cmocka.h"

static int log_fds[2];

static int set_up(void **state)
{
    (void)state;
    assert_int_equal(pipe2(log_fds, O_NONBLOCK | O_CLOEXEC), 0);
    kvt_log_init(log_fds[1], false);
    kvt_log_set_level(KVT_LOG_INFO);
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    kvt_log_init(STDERR_FILENO, false);
    return close(log_fds[0]) | close(log_fds[1]);
}

/* What was logged since the last call. */
static const char *logged(void)
{
    static char text[8192];
    ssize_t bytes = read(log_fds[0], text, sizeof(text) - 1);

    text[bytes < 0 ? 0 : bytes] = '\0';
    return text;
}

static void test_journal_prefixes(void **state)
{
    (void)state;
    kvt_log_error("disk: slot %d: checksum mismatch", 417);
    assert_string_equal(logged(), "<3>disk: slot 417: checksum mismatch\n");
    kvt_log_warn("w");
    assert_string_equal(logged(), "<4>w\n");
    kvt_log_info("i");
    assert_string_equal(logged(), "<6>i\n");
    kvt_log_debug("d");
    assert_string_equal(logged(), "");
    kvt_log_set_level(KVT_LOG_DEBUG);
    kvt_log_debug("d");
    assert_string_equal(logged(), "<7>d\n");
    kvt_log_set_level(KVT_LOG_ERROR);
    kvt_log_warn("w");
    assert_string_equal(logged(), "");
}

static void test_terminal_has_time_and_level(void **state)
{
    int hour, minute, second, ms;
    char level[8], word[8];

    (void)state;
    kvt_log_init(log_fds[1], true);
    kvt_log_warn("word");
    assert_int_equal(
        sscanf(logged(), "%2d:%2d:%2d.%3d %7s %7s", &hour, &minute, &second, &ms, level, word), 6);
    assert_string_equal(level, "warn");
    assert_string_equal(word, "word");
}

static void test_errno_is_kept(void **state)
{
    (void)state;
    errno = ENOSPC;
    kvt_log_error("cannot: %m");
    assert_int_equal(errno, ENOSPC);
    assert_string_equal(logged(), "<3>cannot: No space left on device\n");
}

static void test_long_line_is_cut(void **state)
{
    char text[3000];
    const char *line;

    (void)state;
    memset(text, 'x', sizeof(text));
    text[sizeof(text) - 1] = '\0';
    kvt_log_error("%s", text);
    line = logged();
    assert_true(strlen(line) <= KVT_LOG_LINE_BYTES_MAX);
    assert_int_equal(line[strlen(line) - 1], '\n');
}

static void test_site_is_bounded(void **state)
{
    struct kvt_log_site site = {0};
    uint64_t now_ns = 1000 * KVT_NS_PER_S;
    uint32_t admitted = 0, left_out = 0;

    (void)state;
    for (uint32_t i = 0; i < 1000; i++)
        admitted += kvt_log_site_admit(&site, now_ns + i, &left_out);
    assert_int_equal(admitted, KVT_LOG_BURST);
    assert_int_equal(left_out, 0);
    assert_true(kvt_log_site_admit(&site, now_ns + KVT_LOG_WINDOW_NS, &left_out));
    assert_int_equal(left_out, 1000 - KVT_LOG_BURST);
    assert_true(kvt_log_site_admit(&site, now_ns + KVT_LOG_WINDOW_NS, &left_out));
    assert_int_equal(left_out, 0);
}

static void test_one_call_site_in_a_loop(void **state)
{
    uint32_t lines = 0;

    (void)state;
    for (uint32_t i = 0; i < 100; i++)
        kvt_log_error("line %u", i);
    for (const char *at = logged(); (at = strchr(at, '\n')) != NULL; at++)
        lines++;
    assert_int_equal(lines, KVT_LOG_BURST);
}

static void test_levels(void **state)
{
    enum kvt_log_level level = KVT_LOG_LEVELS;

    (void)state;
    for (uint32_t i = 0; i < KVT_LOG_LEVELS; i++) {
        assert_int_equal(kvt_log_level_parse(kvt_log_level_text((enum kvt_log_level)i), &level), 0);
        assert_int_equal(level, i);
    }
    assert_int_equal(kvt_log_level_parse("loud", &level), -EINVAL);
    assert_int_equal(level, KVT_LOG_DEBUG);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_journal_prefixes, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_terminal_has_time_and_level, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_errno_is_kept, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_long_line_is_cut, set_up, tear_down),
        cmocka_unit_test(test_site_is_bounded),
        cmocka_unit_test_setup_teardown(test_one_call_site_in_a_loop, set_up, tear_down),
        cmocka_unit_test(test_levels),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
