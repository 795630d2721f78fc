/* The configuration: every problem names file, line, key and what would be right; defaults and
 * printed output go through the same parser. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "daemon/base/alloc.h"
#include "daemon/config.h"
#include "daemon/config_keys.h"
#include "daemon/config_yaml.h"
#include "tests/common/cmocka.h"

static char problems[8192];
static char path[] = "/tmp/kvtierd-config-XXXXXX";

static void note(void *ctx, const char *line)
{
    size_t at = strlen(problems);

    (void)ctx;
    (void)snprintf(problems + at, sizeof(problems) - at, "%s\n", line);
}

static const struct kvt_config_report report = {.problem = note};

static int load(struct kvt_config *config, const char *yaml)
{
    int fd = open(path, O_WRONLY | O_TRUNC | O_CLOEXEC);

    assert_true(fd >= 0);
    assert_int_equal(write(fd, yaml, strlen(yaml)), strlen(yaml));
    assert_int_equal(close(fd), 0);
    problems[0] = '\0';
    kvt_config_init(config);
    return kvt_config_load(config, path, &report);
}

static void test_defaults(void **state)
{
    struct kvt_config config;

    (void)state;
    kvt_config_init(&config);
    assert_string_equal(config.server.socket, "/run/kvtierd/kvtierd.sock");
    assert_int_equal(config.server.socket_mode, 0660);
    assert_true(config.l2.bytes == KVT_GIB);
    assert_true(config.l1.size.bytes == 0 && config.l1.size.milli_pct == 0 && config.l3.bytes == 0);
    assert_true(config.stop.is_drain);
    assert_int_equal(config.log.level, KVT_LOG_INFO);
}

static void test_good_files(void **state)
{
    struct kvt_config config;

    (void)state;
    assert_int_equal(load(&config, ""), 0);
    assert_int_equal(load(&config, "# nothing but a comment\n"), 0);
    assert_int_equal(load(&config, "tiers:\n  l2:\n    bytes: 1.5GiB # more\n    pages: thp\n"
                                   "  l3: {path: /x/y, bytes: 10GiB, write: selective}\n"
                                   "stop: {drain: false}\n"
                                   "server:\n  socket_mode: 0600\n  deadline_max: 250ms\n"),
                     0);
    assert_string_equal(problems, "");
    assert_true(config.l2.bytes == 3 * KVT_GIB / 2);
    assert_int_equal(config.l2.pages, KVT_CONFIG_PAGES_THP);
    assert_int_equal(config.l3.write, KVT_CONFIG_WRITE_SELECTIVE);
    assert_string_equal(config.l3.paths, "/x/y");
    assert_false(config.stop.is_drain);
    assert_int_equal(config.server.socket_mode, 0600);
    assert_true(config.server.deadline_max_ns == 250 * KVT_NS_PER_MS);
    assert_true(config.index.memory_bytes == 128 * KVT_MIB);
    assert_int_equal(load(&config, "tiers:\n  l2:\n    pages: anonymous\n"), 0);
    assert_int_equal(config.l2.pages, KVT_CONFIG_PAGES_ANONYMOUS);
}

/* yaml -> the line number and what the message must contain. */
static const struct {
    const char *yaml;
    uint32_t line;
    const char *message;
} bad_files[] = {
    {"tiers:\n  l2:\n    bytes: 4G\n", 3,
     "tiers.l2.bytes: \"4G\" has no unit or an unknown one (units: B, KiB, MiB, GiB, TiB)"},
    {"tiers:\n  l2:\n    bytes: 4096\n", 3, "has no unit"},
    {"tiers:\n  l2:\n    bytes: 1KiB\n", 3, "out of bounds: a size or N% of memory from 4MiB to"},
    {"tiers:\n  l2:\n    bytes:\n", 3, "is not a number with a unit"},
    {"tiers:\n  l2:\n    bytes: 101%\n", 3, "is too large"},
    {"# c\n\nserver:\n  threads: 0\n", 4,
     "server.threads: \"0\" is out of bounds: a number from 1"},
    {"server:\n  threads: two\n", 2, "\"two\" is not a number from 1 to 16"},
    {"server:\n  threads: -1\n", 2, "\"-1\" is not a number"},
    {"server:\n  threads: 99999999999999999999\n", 2, "is not a number"},
    {"server:\n  socket_mode: 0988\n", 2, "is not octal permissions"},
    {"server:\n  deadline_max: 10\n", 2, "(units: ns, us, ms, s, min, h)"},
    {"tiers:\n  l2:\n    pages: huge\n", 3,
     "\"huge\" is not one of auto, hugetlb, thp, anonymous or plain"},
    {"stop:\n  drain: maybe\n", 2, "\"maybe\" is not true or false"},
    {"server:\n  sockets: /x\n", 2,
     "server.sockets: no such key; known here: socket, admin_socket"},
    {"servers:\n  socket: /x\n", 1, "servers: no such key; known here: server, index, tiers, limi"},
    {"tiers:\n  l1:\n    bytes: 0\n  l4:\n    bytes: 0\n", 4, "tiers.l4: no such key"},
    {"index:\n  memory: [1GiB]\n", 2, "index.memory: one value is wanted here"},
    {"tiers:\n  l2: 4GiB\n", 2, "tiers.l2: a section is wanted here, with some of: bytes, pages"},
    {"just text\n", 1, "a section is wanted here"},
    {"log:\n  level: info\nlog:\n  level: warn\n", 3, "log: is given twice"},
    {"log:\n  level: \"info\n", 2, "log.level: libyaml: found unexpected end"},
    {"index: &a\n  memory: 64MiB\nlog: *a\n", 3, "aliases are not supported"},
};

static void test_bad_files(void **state)
{
    char where[128];

    (void)state;
    for (uint32_t i = 0; i < KVT_COUNT_OF(bad_files); i++) {
        struct kvt_config config;

        assert_int_equal(load(&config, bad_files[i].yaml), -EINVAL);
        (void)snprintf(where, sizeof(where), "%s:%u: ", path, bad_files[i].line);
        if (strncmp(problems, where, strlen(where)) != 0 ||
            strstr(problems, bad_files[i].message) == NULL)
            fail_msg("row %u: %s", i, problems);
    }
}

static void test_all_problems_are_reported(void **state)
{
    struct kvt_config config;

    (void)state;
    assert_int_equal(load(&config, "server:\n  threads: 0\nlog:\n  level: loud\n"), -EINVAL);
    assert_non_null(strstr(problems, ":2: server.threads"));
    assert_non_null(strstr(problems, ":4: log.level"));
}

static void test_files_that_cannot_be_read(void **state)
{
    struct kvt_config config;
    static char large[KVT_CONFIG_FILE_BYTES_MAX + 2];

    (void)state;
    problems[0] = '\0';
    kvt_config_init(&config);
    assert_int_equal(kvt_config_load(&config, "/nonexistent/x.yaml", &report), -ENOENT);
    assert_string_equal(problems, "/nonexistent/x.yaml: cannot be read: No such file or "
                                  "directory\n");
    assert_int_equal(kvt_config_load(&config, "/", &report), -EISDIR);
    memset(large, '#', sizeof(large) - 1);
    assert_int_equal(load(&config, large), -EFBIG);
}

static void test_set(void **state)
{
    struct kvt_config config;

    (void)state;
    problems[0] = '\0';
    kvt_config_init(&config);
    assert_int_equal(kvt_config_set(&config, "tiers.l2.bytes=64MiB", &report), 0);
    assert_true(config.l2.bytes == 64 * KVT_MIB);
    assert_int_equal(kvt_config_set(&config, "tiers.l3.path=/a=b", &report), 0);
    assert_string_equal(config.l3.paths, "/a=b");
    assert_string_equal(problems, "");
    assert_int_equal(kvt_config_set(&config, "tiers.l2=64MiB", &report), -EINVAL);
    assert_int_equal(kvt_config_set(&config, "tiers.l2.bytes", &report), -EINVAL);
    assert_int_equal(kvt_config_set(&config, "tiers.l2.bytes=1", &report), -EINVAL);
    assert_non_null(
        strstr(problems, "--set tiers.l2: no such key (kvtierd --print-keys lists them)"));
    assert_non_null(strstr(problems, "--set tiers.l2.bytes: is not key=value"));
    assert_non_null(strstr(problems, "--set tiers.l2.bytes: \"1\" has no unit"));
}

/* What print writes, load reads back to the same struct, for values of every kind. */
static void test_print_round_trips(void **state)
{
    static const char *const sets[] = {
        "server.socket=/tmp/a \"b\" \\ c#d: e",
        "server.socket_mode=0755",
        "server.threads=7",
        "server.reply=inline",
        "tiers.l2.bytes=1.3GiB",
        "tiers.l3.write_budget=123456789B",
        "limits.lease_max=1500ms",
        "stop.drain=false",
        "tiers.l3.path=/a/l3 , \"/b\"/l3",
        "tiers.l3.index_dir=/c d",
        "tiers.l1.bytes=62.5%",
        "tiers.l1.gpus=0, GPU-1b2c3d4e",
    };
    struct kvt_config config, again;
    char text[8192];
    int fd = open(path, O_RDWR | O_TRUNC | O_CLOEXEC);
    ssize_t bytes;

    (void)state;
    assert_true(fd >= 0);
    problems[0] = '\0';
    kvt_config_init(&config);
    for (uint32_t i = 0; i < KVT_COUNT_OF(sets); i++)
        assert_int_equal(kvt_config_set(&config, sets[i], &report), 0);
    kvt_config_print(&config, fd);
    bytes = pread(fd, text, sizeof(text) - 1, 0);
    assert_true(bytes > 0);
    text[bytes] = '\0';
    kvt_config_init(&again);
    assert_int_equal(kvt_config_load(&again, path, &report), 0);
    assert_string_equal(problems, "");
    assert_memory_equal(&config, &again, sizeof(config));
    for (uint32_t i = 0; i < kvt_config_keys_count; i++)
        assert_true(kvt_config_yaml_line(text, kvt_config_keys[i].path) > 0);
    assert_int_equal(close(fd), 0);
}

static const struct {
    const char *set[3];
    const char *message; /* NULL: no problem */
} relations[] = {
    {{"log.level=info"}, NULL},
    {{"tiers.l2.bytes=3GiB"}, NULL},
    {{"tiers.l2.bytes=4GiB"},
     "L1 0 B + L2 4.00 GiB + index 128 MiB + 64 MiB for the daemon itself "
     "= 4.19 GiB, but the test's memory is 4.00 GiB"},
    {{"tiers.l1.backend=host", "tiers.l1.bytes=3GiB"}, "lower tiers.l2.bytes"},
    {{"tiers.l1.backend=host"}, "tiers.l1.bytes is 0"},
    {{"tiers.l1.bytes=1GiB"}, "tiers.l1.backend is none"},
    {{"tiers.l1.backend=host", "tiers.l1.bytes=25%"}, NULL},
    {{"tiers.l1.backend=host", "tiers.l1.bytes=37.5%"}, "L1 3.00 GiB + L2 1.00 GiB"},
    /* A GPU's memory is not this machine's, but pinned staging is: two GPUs are there. */
    {{"tiers.l1.backend=cuda", "tiers.l1.bytes=640GiB"}, NULL},
    {{"tiers.l1.backend=cuda", "tiers.l1.bytes=95%"}, NULL},
    {{"tiers.l1.backend=cuda", "tiers.l1.bytes=96%"}, "a whole percentage up to 95%"},
    {{"tiers.l1.backend=cuda", "tiers.l1.bytes=60.5%"}, "a whole percentage up to 95%"},
    {{"tiers.l1.backend=cuda", "tiers.l1.bytes=60%", "tiers.l1.gpus=0,GPU-1b2c3d4e, 7"}, NULL},
    {{"tiers.l1.bytes=60%"}, "tiers.l1.backend is none"},
    {{"tiers.l1.backend=cuda"}, "tiers.l1.bytes is 0"},
    {{"tiers.l1.backend=cuda", "tiers.l1.bytes=60%", "tiers.l1.staging=256MiB"}, NULL},
    {{"tiers.l1.backend=cuda", "tiers.l1.bytes=60%", "tiers.l1.staging=257MiB"},
     "tiers.l1.inflight is 256 MiB, less than tiers.l1.staging (257 MiB)"},
    {{"tiers.l1.backend=cuda", "tiers.l1.bytes=32MiB"},
     "tiers.l1.staging is 64.00 MiB, more than tiers.l1.bytes (32.00 MiB)"},
    {{"tiers.l1.backend=cuda", "tiers.l1.bytes=60%", "tiers.l1.retry_min=2min"},
     "tiers.l1.retry_min is above"},
    {{"tiers.l2.slab_unit=1.5MiB"}, "not a power of two"},
    {{"tiers.l3.bytes=1GiB"}, "tiers.l3.path is not"},
    {{"tiers.l3.path=/x"}, "tiers.l3.bytes is 0"},
    {{"tiers.l3.path=/x", "tiers.l3.bytes=8GiB"}, NULL},
    {{"tiers.l3.retry_min=2h"}, NULL}, /* out of bounds: set itself refuses */
    {{"tiers.l3.retry_min=2min"}, "retry_min is above"},
    {{"tiers.l3.lost_after=999ms"}, "lost_after is below tiers.l3.retry_min"},
    {{"tiers.l3.lost_after=1s"}, NULL},
    {{"limits.lease_default=11min"}, "limits.lease_default is above"},
    {{"limits.ticket_max=1s"}, "limits.ticket_default is above"},
    {{"server.admin_socket=/run/kvtierd/kvtierd.sock"}, "are the same path"},
    {{"server.admin_socket="}, NULL},
    {{"server.socket="}, "server.socket is empty"},
    {{"server.socket=/tmp/"
      "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"
      "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"},
     "server.socket is longer than"},
};

static void test_relations(void **state)
{
    static const struct kvt_config_facts facts = {
        .memory_bytes = 8 * KVT_GIB,
        .memory_available_bytes = 4 * KVT_GIB,
        .memory_bound = "the test's memory",
        .gpus_count = 2,
    };

    (void)state;
    for (uint32_t i = 0; i < KVT_COUNT_OF(relations); i++) {
        struct kvt_config config;
        int r;

        kvt_config_init(&config);
        for (uint32_t k = 0; k < 3 && relations[i].set[k] != NULL; k++)
            (void)!kvt_config_set(&config, relations[i].set[k], &report);
        problems[0] = '\0';
        r = kvt_config_check(&config, &facts, &report);
        if (r != (relations[i].message == NULL ? 0 : -EINVAL) ||
            (relations[i].message != NULL && strstr(problems, relations[i].message) == NULL))
            fail_msg("row %u: %d, %s", i, r, problems);
    }
}

/* Pinned staging of each GPU that is used is memory of the machine. */
static void test_staging_is_memory(void **state)
{
    static const struct {
        uint32_t gpus_count;
        const char *gpus;
        const char *message;
    } rows[] = {
        {0, "all", NULL},
        {2, "all", NULL},
        {3, "all",
         "memory: pinned staging of L1 3.00 GiB + L2 1.00 GiB + index 128 MiB + 64 MiB for the "
         "daemon itself = 4.19 GiB, but the test's memory is 4.00 GiB: lower tiers.l2.bytes, "
         "tiers.l1.staging or"},
        {3, "0,2", NULL},
        {3, "0,1,2,3", "pinned staging of L1 3.00 GiB"},
        {0, "0,1,2,3", NULL},
    };

    (void)state;
    for (uint32_t i = 0; i < KVT_COUNT_OF(rows); i++) {
        const struct kvt_config_facts facts = {
            .memory_bytes = 8 * KVT_GIB,
            .memory_available_bytes = 4 * KVT_GIB,
            .memory_bound = "the test's memory",
            .gpus_count = rows[i].gpus_count,
        };
        struct kvt_config config;

        kvt_config_init(&config);
        config.l1.backend = KVT_CONFIG_L1_CUDA;
        config.l1.size.milli_pct = 60000;
        config.l1.staging_bytes = config.l1.inflight_bytes = KVT_GIB;
        (void)snprintf(config.l1.gpus, sizeof(config.l1.gpus), "%s", rows[i].gpus);
        problems[0] = '\0';
        (void)!kvt_config_check(&config, &facts, &report);
        if (rows[i].message == NULL ? problems[0] != '\0'
                                    : strstr(problems, rows[i].message) == NULL)
            fail_msg("row %u: %s", i, problems);
    }
}

static void test_gpus(void **state)
{
    static const char seventeen[] = "0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16";
    static const struct {
        const char *text;
        uint32_t count;
        const char *problem;
    } rows[] = {
        {"all", 0, NULL},
        {"0", 1, NULL},
        {" 3 , 0", 2, NULL},
        {"GPU-1b2c3d4e", 1, NULL},
        {"GPU-1B2C3D4E-0000-1111-2222-333344445555, MIG-1b2c3d4e-00,12", 3, NULL},
        {"", 0, "names no GPU"},
        {"  ", 0, "names no GPU"},
        {"0,", 0, "is not all"},
        {"all,0", 0, "is not all"},
        {"-1", 0, "is not all"},
        {"0x1", 0, "is not all"},
        {"1000", 0, "is not all"},
        {"GPU-1b2c3d4", 0, "is not all"},
        {"GPU-1b2c3d4g", 0, "is not all"},
        {"GPU-1b2c3d4e1b2c3d4e1b2c3d4e1b2c3d4e1", 0, "is not all"},
        {"1b2c3d4e", 0, "is not all"},
        {"0,1,0", 0, "names a GPU twice"},
        {seventeen, 0, "names more than 16 GPUs"},
    };

    (void)state;
    for (uint32_t i = 0; i < KVT_COUNT_OF(rows); i++) {
        const char *problem = kvt_config_gpus_problem(rows[i].text);
        struct kvt_config config;

        if ((problem == NULL) != (rows[i].problem == NULL) ||
            (problem != NULL && strstr(problem, rows[i].problem) == NULL))
            fail_msg("'%s': %s", rows[i].text, problem == NULL ? "fine" : problem);
        if (problem != NULL)
            continue;
        kvt_config_init(&config);
        (void)snprintf(config.l1.gpus, sizeof(config.l1.gpus), "%s", rows[i].text);
        assert_int_equal(kvt_config_gpus_count(&config), rows[i].count);
    }
}

/* A size takes the place of a percentage, and the other way round. */
static void test_shares(void **state)
{
    static const struct {
        const char *text;
        uint64_t bytes, milli_pct;
    } rows[] = {{"60%", 0, 60000},   {"2GiB", 2 * KVT_GIB, 0}, {"0.001%", 0, 1},
                {"100%", 0, 100000}, {"12.5 %", 0, 12500},     {"0", 0, 0}};
    struct kvt_config config;
    char text[64];

    (void)state;
    kvt_config_init(&config);
    for (uint32_t i = 0; i < KVT_COUNT_OF(rows); i++) {
        (void)snprintf(text, sizeof(text), "tiers.l1.bytes=%s", rows[i].text);
        assert_int_equal(kvt_config_set(&config, text, &report), 0);
        assert_true(config.l1.size.bytes == rows[i].bytes);
        assert_true(config.l1.size.milli_pct == rows[i].milli_pct);
    }
    config.l1.size = (struct kvt_config_share){.milli_pct = 60000};
    assert_true(kvt_config_share_bytes(&config.l1.size, UINT64_C(10) << 60) == UINT64_C(6) << 60);
    problems[0] = '\0';
    assert_int_equal(kvt_config_set(&config, "tiers.l1.bytes=0%", &report), -EINVAL);
    assert_int_equal(kvt_config_set(&config, "tiers.l1.bytes=101%", &report), -EINVAL);
    assert_int_equal(kvt_config_set(&config, "tiers.l1.bytes=1KiB", &report), -EINVAL);
    assert_non_null(strstr(problems, "\"0%\" is nothing"));
    assert_non_null(strstr(problems, "\"101%\" is too large"));
    assert_non_null(strstr(problems, "\"1KiB\" is out of bounds"));
    assert_true(config.l1.size.bytes == 0 && config.l1.size.milli_pct == 60000);
}

static void test_facts(void **state)
{
    struct kvt_config config;
    struct kvt_config_facts facts;

    (void)state;
    kvt_config_init(&config);
    assert_int_equal(kvt_config_set(&config, "tiers.l3.path=/tmp/no-such-file", &report), 0);
    assert_int_equal(kvt_config_set(&config, "tiers.l3.bytes=50%", &report), 0);
    kvt_config_facts_read(&config, &facts);
    assert_true(facts.memory_available_bytes > 0);
    assert_true(facts.memory_available_bytes <= facts.memory_bytes);
    assert_true(config.l3.bytes > 0);
}

static bool fail_always(size_t bytes, void *ctx)
{
    (void)bytes;
    (void)ctx;
    return true;
}

static void test_no_memory(void **state)
{
    struct kvt_config config;

    (void)state;
    kvt_config_init(&config);
    kvt_alloc_set_fault(fail_always, NULL);
    assert_int_equal(kvt_config_load(&config, path, &report), -ENOMEM);
    kvt_alloc_set_fault(NULL, NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_defaults),
        cmocka_unit_test(test_good_files),
        cmocka_unit_test(test_bad_files),
        cmocka_unit_test(test_all_problems_are_reported),
        cmocka_unit_test(test_files_that_cannot_be_read),
        cmocka_unit_test(test_set),
        cmocka_unit_test(test_print_round_trips),
        cmocka_unit_test(test_relations),
        cmocka_unit_test(test_staging_is_memory),
        cmocka_unit_test(test_gpus),
        cmocka_unit_test(test_shares),
        cmocka_unit_test(test_facts),
        cmocka_unit_test(test_no_memory),
    };
    int fd = mkstemp(path), r;

    if (fd < 0)
        return 1;
    (void)close(fd);
    r = cmocka_run_group_tests(tests, NULL, NULL);
    (void)unlink(path);
    return r;
}
