/* Where a helper program is looked for, and what is not taken for one. */
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "daemon/base/program.h"
#include "tests/common/cmocka.h"

static char scratch[] = "kvt-program-XXXXXX";

static char *at(const char *relative)
{
    static char path[8][256];
    static unsigned next;
    char *to = path[next++ % 8];

    (void)snprintf(to, sizeof(path[0]), "%s/%s", scratch, relative);
    return to;
}

static void file_make(const char *relative, mode_t mode)
{
    int fd = open(at(relative), O_CREAT | O_WRONLY | O_CLOEXEC, mode);

    assert_true(fd >= 0);
    (void)close(fd);
}

static int setup(void **state)
{
    static const char *const folders[] = {"root",
                                          "root/daemon",
                                          "root/daemon/deep",
                                          "root/libexec",
                                          "root/libexec/kvtierd",
                                          "root/tiers",
                                          "root/tiers/index",
                                          "root/elsewhere"};

    (void)state;
    if (mkdtemp(scratch) == NULL)
        return -1;
    for (size_t i = 0; i < KVT_COUNT_OF(folders); i++)
        if (mkdir(at(folders[i]), 0700) != 0)
            return -1;
    return 0;
}

static int teardown(void **state)
{
    char command[64];
    const char *const arguments[] = {"rm", "-r", scratch, NULL};
    pid_t child = fork();

    (void)state;
    (void)snprintf(command, sizeof(command), "%s", arguments[0]);
    if (child == 0) {
        (void)execvp(command, (char *const *)arguments);
        _exit(1);
    }
    return child < 0;
}

static void expect_found(const char *exe, const char *place)
{
    char path[KVT_PROGRAM_PATH_BYTES], wanted[PATH_MAX], found[PATH_MAX];

    assert_int_equal(kvt_program_find_near("helper", at(exe), at("root/elsewhere"), path), 0);
    assert_non_null(realpath(path, found));
    assert_non_null(realpath(at(place), wanted));
    assert_string_equal(found, wanted);
}

static void test_places_in_order(void **state)
{
    char path[KVT_PROGRAM_PATH_BYTES] = "as it was";

    (void)state;
    assert_int_equal(
        kvt_program_find_near("helper", at("root/daemon/exe"), at("root/elsewhere"), path),
        -ENOENT);
    assert_string_equal(path, "as it was");
    file_make("root/elsewhere/helper", 0700);
    expect_found("root/daemon/exe", "root/elsewhere/helper");
    file_make("root/tiers/index/helper", 0700);
    expect_found("root/daemon/deep/exe", "root/tiers/index/helper");
    expect_found("root/daemon/exe", "root/tiers/index/helper");
    file_make("root/libexec/kvtierd/helper", 0700);
    expect_found("root/daemon/exe", "root/libexec/kvtierd/helper");
    file_make("root/daemon/helper", 0600); /* may not be executed */
    expect_found("root/daemon/exe", "root/libexec/kvtierd/helper");
    assert_int_equal(mkdir(at("root/daemon/deep/helper"), 0700), 0); /* a folder */
    expect_found("root/daemon/deep/exe", "root/tiers/index/helper");
    assert_int_equal(chmod(at("root/daemon/helper"), 0700), 0);
    expect_found("root/daemon/exe", "root/daemon/helper");
}

static void test_long_paths(void **state)
{
    char path[KVT_PROGRAM_PATH_BYTES], longest[KVT_PROGRAM_PATH_BYTES + 64];

    (void)state;
    memset(longest, 'a', sizeof(longest) - 1);
    longest[0] = longest[sizeof(longest) - 20] = '/';
    longest[sizeof(longest) - 1] = '\0';
    assert_int_equal(kvt_program_find_near("helper", longest, longest, path), -ENOENT);
    assert_int_equal(kvt_program_find_near("helper", "", at("root/elsewhere"), path), 0);
    assert_string_equal(path, at("root/elsewhere/helper"));
}

static void test_environment(void **state)
{
    char path[KVT_PROGRAM_PATH_BYTES];

    (void)state;
    assert_int_equal(setenv("KVTIER_HELPER", at("root/elsewhere/helper"), 1), 0);
    assert_int_equal(kvt_program_find("another-name", path), 0);
    assert_string_equal(path, at("root/elsewhere/helper"));
    assert_int_equal(setenv("KVTIER_HELPER", at("none"), 1), 0);
    assert_int_equal(kvt_program_find("another-name", path), -ENOENT);
    assert_int_equal(setenv("KVTIER_HELPER", scratch, 1), 0);
    assert_int_equal(kvt_program_find("another-name", path), -EACCES);
    assert_int_equal(setenv("KVTIER_HELPER", "", 1), 0);
    assert_int_equal(kvt_program_find("no-such-program", path), -ENOENT);
    /* Beside itself a program finds itself. */
    assert_int_equal(unsetenv("KVTIER_HELPER"), 0);
    assert_int_equal(kvt_program_find("test-base_program", path), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_places_in_order),
        cmocka_unit_test(test_long_paths),
        cmocka_unit_test(test_environment),
    };

    return cmocka_run_group_tests(tests, setup, teardown);
}
