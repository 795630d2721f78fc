/* The command line of kvtier-ctl and the token lists that people paste into it. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "daemon/base/alloc.h"
#include "tools/kvtier-ctl/ctl.h"

#define ARGV_MAX 16u

/* Splits @line at blanks; what is said on the error stream goes to @said. */
static int parse_env(struct kvt_ctl_args *args, const char *line, const char *env, char said[512])
{
    static char words[512]; /* args point into it */
    char *argv[ARGV_MAX] = {(char *)(uintptr_t) "kvtier-ctl"}, *save = NULL;
    FILE *err = fmemopen(said, 512, "w");
    int argc = 1, r;

    assert_non_null(err);
    (void)snprintf(words, sizeof(words), "%s", line);
    for (char *word = strtok_r(words, " ", &save); word != NULL; word = strtok_r(NULL, " ", &save))
        argv[argc++] = word;
    r = kvt_ctl_args_parse(args, argc, argv, env, err);
    (void)fclose(err);
    return r;
}

static int parse(struct kvt_ctl_args *args, const char *line, char said[512])
{
    return parse_env(args, line, NULL, said);
}

static void test_defaults_and_places(void **state)
{
    struct kvt_ctl_args args;
    char said[512];

    (void)state;
    assert_int_equal(parse(&args, "stats", said), KVT_CTL_OK);
    assert_int_equal(args.command, KVT_CTL_STATS);
    assert_string_equal(args.socket_path, KVT_CTL_SOCKET_DEFAULT);
    assert_string_equal(args.admin_socket_path, "/run/kvtierd/admin.sock");
    assert_int_equal(args.timeout_ns, 10 * KVT_NS_PER_S);
    assert_false(args.is_json || args.is_watch);
    assert_int_equal(parse_env(&args, "stats", "/tmp/x/k.sock", said), KVT_CTL_OK);
    assert_string_equal(args.socket_path, "/tmp/x/k.sock");
    assert_string_equal(args.admin_socket_path, "/tmp/x/admin.sock");
    assert_int_equal(parse_env(&args, "--socket k.sock stats", "/tmp/x/k.sock", said), KVT_CTL_OK);
    assert_string_equal(args.socket_path, "k.sock");
    assert_string_equal(args.admin_socket_path, "admin.sock");
}

static void test_options_before_and_after(void **state)
{
    struct kvt_ctl_args args;
    char said[512];

    (void)state;
    assert_int_equal(parse(&args, "--json --timeout=0.25 stats --watch 1.5 --rounds 3", said),
                     KVT_CTL_OK);
    assert_true(args.is_json && args.is_watch);
    assert_int_equal(args.timeout_ns, 250 * KVT_NS_PER_MS);
    assert_int_equal(args.watch_ns, 1500 * KVT_NS_PER_MS);
    assert_int_equal(args.watch_rounds, 3);
    /* The value of --watch is optional: a command may follow it. */
    assert_int_equal(parse(&args, "--watch stats", said), KVT_CTL_OK);
    assert_true(args.is_watch);
    assert_int_equal(args.watch_ns, 2 * KVT_NS_PER_S);
    assert_int_equal(
        parse(&args, "lookup --tokens 1,2 --tiers L1,l3 --limit 64 --namespace aB", said),
        KVT_CTL_OK);
    assert_int_equal(args.tiers, KVT_TIER_BIT_L1 | KVT_TIER_BIT_L3);
    assert_int_equal(args.limit_tokens, 64);
    assert_string_equal(args.ns_prefix, "aB");
    assert_int_equal(parse(&args, "drain", said), KVT_CTL_OK);
    assert_true(args.wait_ns == UINT64_MAX && args.operands_count == 0);
    assert_int_equal(parse(&args, "drain --wait 90", said), KVT_CTL_OK);
    assert_int_equal(args.wait_ns, 90 * KVT_NS_PER_S);
    assert_int_equal(parse(&args, "scrub --rate 1.5MiB start --json", said), KVT_CTL_OK);
    assert_int_equal(args.command, KVT_CTL_SCRUB);
    assert_int_equal(args.rate_bytes_per_s, 1536 * KVT_KIB);
    assert_true(args.operands_count == 1 && args.is_json);
    assert_string_equal(args.operands[0], "start");
    assert_int_equal(parse(&args, "l3 verify /a/b --json", said), KVT_CTL_OK);
    assert_true(args.command == KVT_CTL_L3 && args.operands_count == 2 && args.is_json);
    assert_string_equal(args.operands[1], "/a/b");
}

static void test_usage_errors(void **state)
{
    static const struct {
        const char *line, *says;
    } cases[] = {
        {"", "no command"},
        {"frob", "unknown command 'frob'"},
        {"stats --frob", "unknown option '--frob'"},
        {"stats extra", "takes no argument 'extra'"},
        {"stats --json=1", "takes no value"},
        {"stats --timeout", "needs a value"},
        {"stats --timeout 0", "does not take '0'"},
        {"stats --timeout 1e9", "does not take"},
        {"stats --timeout 99999999999999999999", "does not take"},
        {"health --yes", "health does not know --yes"},
        {"lookup", "needs the prompt"},
        {"lookup --tokens 1 --tokens-file f", "not both"},
        {"lookup --tokens 1 --tiers L4", "does not take 'L4'"},
        {"lookup --tokens 1 --tiers L1,", "does not take"},
        {"lookup --tokens 1 --limit 18446744073709551616", "does not take"},
        {"lookup --tokens 1 --limit -1", "does not take"},
        {"lookup --tokens 1 --namespace xyz", "does not take 'xyz'"},
        {"evict", "needs to know what"},
        {"evict --all --tokens 1", "no tokens"},
        {"tree --nodes 0", "does not take"},
        {"stats --color blue", "does not take"},
        {"scrub", "scrub needs start|stop|status"},
        {"scrub sta", "'sta' is not one of start|stop|status"},
        {"scrub start|stop", "is not one of"},
        {"scrub start now", "takes no argument 'now'"},
        {"scrub start --rate 64M", "does not take '64M'"},
        {"scrub start --rate 0", "does not take '0'"},
        {"scrub stop --rate 1MiB", "--rate is for 'scrub start'"},
        {"l3", "l3 needs inspect|verify"},
        {"l3 verify", "l3 needs PATH"},
        {"l3 format /x", "'format' is not one of"},
        {"l3 verify /x /y", "takes no argument '/y'"},
        {"l3 verify /x --yes", "l3 does not know --yes"},
        {"drain now", "takes no argument 'now'"},
        {"drain --wait 0", "does not take '0'"},
    };

    (void)state;
    for (size_t i = 0; i < KVT_COUNT_OF(cases); i++) {
        struct kvt_ctl_args args;
        char said[512] = "";

        if (parse(&args, cases[i].line, said) != KVT_CTL_USAGE ||
            strstr(said, cases[i].says) == NULL)
            fail_msg("'%s' said: %s", cases[i].line, said);
    }
}

static void test_help_names_everything(void **state)
{
    (void)state;
    for (uint32_t c = 0; c <= KVT_CTL_COMMANDS; c++) {
        char text[8192] = "";
        FILE *out = fmemopen(text, sizeof(text), "w");

        assert_non_null(out);
        kvt_ctl_help(out, (enum kvt_ctl_command_id)c);
        (void)fclose(out);
        assert_non_null(strstr(text, "usage: kvtier-ctl"));
        assert_non_null(strstr(text, "--socket PATH"));
        for (const char *line = text; *line != '\0'; line += strcspn(line, "\n") + 1)
            if (line[0] != ' ' && strcspn(line, "\n") > 100)
                fail_msg("longer than a terminal is wide: %.*s", (int)strcspn(line, "\n"), line);
        assert_null(strstr(text, "?."));
        if (c < KVT_CTL_COMMANDS)
            assert_non_null(strstr(text, kvt_ctl_command_name((enum kvt_ctl_command_id)c)));
    }
}

static void expect_tokens(const char *text, const uint32_t *want, uint64_t count)
{
    struct kvt_ctl_tokens tokens;
    char why[160] = "";

    if (kvt_ctl_tokens_parse(&tokens, text, strlen(text), why, sizeof(why)) != 0)
        fail_msg("'%s': %s", text, why);
    assert_int_equal(tokens.count, count);
    if (count > 0)
        assert_memory_equal(tokens.at, want, count * sizeof(*want));
    kvt_free(tokens.at);
}

static void test_token_texts(void **state)
{
    static const uint32_t want[] = {1, 20, 4294967295u};
    static const char *const wrong[] = {"1,x", "[1,2", "1]",    "1 2 [3]", "4294967296",
                                        "-1",  "1.5",  "[[1]]", "[1] 2",   "0x10"};

    (void)state;
    expect_tokens("1,20,4294967295", want, 3);
    expect_tokens("[1, 20, 4294967295]\n", want, 3);
    expect_tokens(" 1\n20\n4294967295\n", want, 3);
    expect_tokens("", want, 0);
    expect_tokens("[]", want, 0);
    for (size_t i = 0; i < KVT_COUNT_OF(wrong); i++) {
        struct kvt_ctl_tokens tokens;
        char why[160] = "";

        if (kvt_ctl_tokens_parse(&tokens, wrong[i], strlen(wrong[i]), why, sizeof(why)) !=
                -EINVAL ||
            why[0] == '\0')
            fail_msg("'%s' was taken", wrong[i]);
    }
}

static int load_bytes(struct kvt_ctl_tokens *tokens, const void *data, size_t bytes)
{
    char path[] = "/tmp/kvt-ctl-tokens-XXXXXX", why[160];
    int fd = mkstemp(path), r;

    assert_true(fd >= 0);
    assert_int_equal(write(fd, data, bytes), bytes);
    (void)close(fd);
    r = kvt_ctl_tokens_load(tokens, path, why, sizeof(why));
    (void)unlink(path);
    return r;
}

static void test_token_files(void **state)
{
    static const uint8_t binary[] = {1, 0, 0, 0, 0xff, 0xff, 0xff, 0xff};
    static const uint32_t want[] = {1, 4294967295u};
    struct kvt_ctl_tokens tokens;
    char why[160];

    (void)state;
    assert_int_equal(load_bytes(&tokens, binary, sizeof(binary)), 0);
    assert_int_equal(tokens.count, 2);
    assert_memory_equal(tokens.at, want, sizeof(want));
    kvt_free(tokens.at);
    assert_int_equal(load_bytes(&tokens, "1\n4294967295\n", 13), 0);
    assert_int_equal(tokens.count, 2);
    assert_memory_equal(tokens.at, want, sizeof(want));
    kvt_free(tokens.at);
    assert_int_equal(load_bytes(&tokens, binary, 7), -EINVAL);
    assert_int_equal(kvt_ctl_tokens_load(&tokens, "/nonexistent", why, sizeof(why)), -ENOENT);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_defaults_and_places), cmocka_unit_test(test_options_before_and_after),
        cmocka_unit_test(test_usage_errors),        cmocka_unit_test(test_help_names_everything),
        cmocka_unit_test(test_token_texts),         cmocka_unit_test(test_token_files),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
