/* The devices of L3 as they are configured: lists of paths, where indexes lie, how bytes are
 * shared, and what is refused when they do not fit the machine or each other. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "daemon/config.h"
#include "daemon/config_keys.h"
#include "tests/common/cmocka.h"

static char problems[8192];

static void note(void *ctx, const char *line)
{
    size_t at = strlen(problems);

    (void)ctx;
    (void)snprintf(problems + at, sizeof(problems) - at, "%s\n", line);
}

static const struct kvt_config_report report = {.problem = note};

static struct kvt_config config;

static int set(const char *assignment)
{
    return kvt_config_set(&config, assignment, &report);
}

static void begin(void)
{
    problems[0] = '\0';
    kvt_config_init(&config);
}

static void test_lists_of_paths(void **state)
{
    static const struct {
        const char *text;
        uint32_t count; /* 0: refused */
        const char *first, *last;
    } rows[] = {
        {"/a/l3", 1, "/a/l3", "/a/l3"},
        {"/a,/b,/c", 3, "/a", "/c"},
        {"  /a b , /c\t", 2, "/a b", "/c"},
        {"/a,", 0, NULL, NULL},
        {",/a", 0, NULL, NULL},
        {"/a, ,/b", 0, NULL, NULL},
        {"1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16", 16, "1", "16"},
        {"1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17", 0, NULL, NULL},
    };
    struct kvt_config_device devices[KVT_ZONES_MAX];
    char text[64];

    (void)state;
    for (uint32_t i = 0; i < KVT_COUNT_OF(rows); i++) {
        char assignment[128];
        uint32_t count;

        begin();
        assert_int_equal(set("tiers.l3.bytes=1GiB"), 0);
        (void)snprintf(assignment, sizeof(assignment), "tiers.l3.path=%s", rows[i].text);
        assert_int_equal(set(assignment), rows[i].count == 0 ? -EINVAL : 0);
        count = kvt_config_devices(&config, devices);
        if (count != rows[i].count)
            fail_msg("\"%s\": %u devices, %s", rows[i].text, count, problems);
        if (count == 0)
            continue;
        assert_string_equal(devices[0].path, rows[i].first);
        assert_string_equal(devices[count - 1].path, rows[i].last);
        (void)snprintf(text, sizeof(text), "%s.index", rows[i].last);
        assert_string_equal(devices[count - 1].index_path, text);
    }
}

/* 16 paths of the greatest length fit, one byte more in one does not. */
static void test_longest_paths(void **state)
{
    static char assignment[KVT_CONFIG_PATHS_BYTES + 64];
    struct kvt_config_device devices[KVT_ZONES_MAX];
    size_t at = strlen("tiers.l3.path=");

    (void)state;
    begin();
    memset(assignment, 'p', sizeof(assignment));
    memcpy(assignment, "tiers.l3.path=", at);
    for (uint32_t i = 1; i < KVT_ZONES_MAX; i++)
        assignment[at + i * KVT_CONFIG_TEXT_BYTES - 1] = ',';
    assignment[at + KVT_CONFIG_PATHS_BYTES - 1] = '\0';
    assert_int_equal(set(assignment), 0);
    assert_int_equal(set("tiers.l3.bytes=1GiB"), 0);
    assert_int_equal(kvt_config_devices(&config, devices), KVT_ZONES_MAX);
    assert_int_equal(strlen(devices[15].path), KVT_CONFIG_TEXT_BYTES - 1);
    assignment[at + KVT_CONFIG_PATHS_BYTES - 1] = 'p';
    assignment[at + KVT_CONFIG_PATHS_BYTES] = '\0';
    assert_int_equal(set(assignment), -EINVAL);
    assert_non_null(strstr(problems, "is longer than 255 bytes"));
}

static void test_indexes(void **state)
{
    struct kvt_config_device devices[KVT_ZONES_MAX];

    (void)state;
    begin();
    assert_int_equal(set("tiers.l3.path=/dev/nvme0n1, /b/l3, /dev/shm/l3"), 0);
    assert_int_equal(kvt_config_devices(&config, devices), 0); /* no bytes: off */
    assert_int_equal(set("tiers.l3.bytes=1GiB"), 0);
    assert_int_equal(kvt_config_devices(&config, devices), 3);
    assert_true(devices[0].is_raw && !devices[1].is_raw && !devices[2].is_raw);
    assert_string_equal(devices[0].index_path, "");
    assert_string_equal(devices[1].index_path, "/b/l3.index");
    assert_int_equal(set("tiers.l3.index_dir=/i"), 0);
    assert_int_equal(kvt_config_devices(&config, devices), 3);
    assert_string_equal(devices[0].index_path, "/i/dev-nvme0n1.index");
    assert_string_equal(devices[1].index_path, "/i/b-l3.index");

    assert_true(devices[0].index_bytes == 32 * KVT_MIB);
    assert_true(devices[2].data_bytes == KVT_GIB - 32 * KVT_MIB);
    assert_int_equal(set("tiers.l3.bytes=64MiB"), 0);
    assert_int_equal(kvt_config_devices(&config, devices), 3);
    assert_true(devices[0].index_bytes == 16 * KVT_MIB);
    assert_int_equal(set("tiers.l3.bytes=100000001B"), 0);
    assert_int_equal(set("tiers.l3.index_bytes=4MiB"), 0);
    assert_int_equal(kvt_config_devices(&config, devices), 3);
    assert_true(devices[0].index_bytes == 4 * KVT_MIB);
    assert_true(devices[0].data_bytes == (100000001 - 4 * KVT_MIB) / 4096 * 4096);
}

/* ---- relations ------------------------------------------------------------------------------ */

/* Two file systems, 1 with 8 GiB and 2 with 4 GiB free; /raw is a block device of 2 GiB. */
static void place(const char *path, struct kvt_config_place *ret_place)
{
    static const struct {
        const char *begin;
        struct kvt_config_place place;
    } places[] = {
        {"/one/old", {true, false, 1, 77, 8 * KVT_GIB, KVT_GIB}},
        {"/link/old", {true, false, 1, 77, 8 * KVT_GIB, KVT_GIB}},
        {"/one/", {true, false, 1, 0, 8 * KVT_GIB, 0}},
        {"/two/", {true, false, 2, 0, 4 * KVT_GIB, 0}},
        {"/raw", {true, true, 3, 77, 2 * KVT_GIB, 0}},
        {"/dev/raw", {true, true, 3, 77, 2 * KVT_GIB, 0}},
    };

    memset(ret_place, 0, sizeof(*ret_place));
    for (uint32_t i = 0; i < KVT_COUNT_OF(places); i++) {
        size_t bytes = strlen(places[i].begin);

        /* One that ends in a slash is a directory, the others are files. */
        if (strncmp(path, places[i].begin, bytes) == 0 &&
            (path[bytes] == '\0' || places[i].begin[bytes - 1] == '/')) {
            *ret_place = places[i].place;
            return;
        }
    }
}

static void test_relations(void **state)
{
    static const struct {
        const char *path, *bytes;
        const char *more;    /* NULL: nothing */
        const char *message; /* NULL: no problem */
    } rows[] = {
        {"/one/a", "8GiB", NULL, NULL},
        {"/one/a", "8193MiB", NULL,
         "the file system of /one/a has room for 8.00 GiB, but 2 files of L3 there want 8.00 GiB"},
        {"/one/old", "9GiB", NULL, NULL}, /* the file that is there counts as free */
        {"/one/a,/one/b", "4GiB", NULL, NULL},
        {"/one/a,/one/b", "4097MiB", NULL, "4 files of L3 there want 8.00 GiB"},
        {"/one/a,/two/b", "4GiB", NULL, NULL},
        {"/one/a,/two/b", "5GiB", NULL, "the file system of /two/b has room for 4.00 GiB"},
        {"/two/b", "4100MiB", NULL, "the file system of /two/b"},
        {"/two/b", "4100MiB", "tiers.l3.index_dir=/one/x", NULL}, /* the index lies elsewhere */
        {"/nowhere/a", "1TiB", NULL, NULL}, /* the start says what is wrong with it */
        {"a", "1GiB", NULL, "tiers.l3.path: a is not an absolute path"},
        {"/one/a", "1GiB", "tiers.l3.index_dir=x", "tiers.l3.index_dir: x is not an absolute path"},
        {"/one/a,/two/b,/one/a", "1GiB", NULL, "two files of L3 would be /one/a"},
        {"/one/a,/one/a.index", "1GiB", NULL, "two files of L3 would be /one/a.index"},
        {"/one/a-b,/one/a/b", "1GiB", "tiers.l3.index_dir=/two/x",
         "two files of L3 would be /two/x/one-a-b.index"},
        {"/one/old,/link/old", "1GiB", NULL, "/one/old and /link/old are the same"},
        {"/one/old,/raw", "1GiB", "tiers.l3.index_dir=/two/x", NULL}, /* not: 77 of another kind */
        {"/dev/gone", "1GiB", NULL, "/dev/gone is a raw device and its index needs a file system"},
        {"/raw", "1GiB", NULL, "/raw is a raw device and its index needs a file system"},
        {"/raw", "2GiB", "tiers.l3.index_dir=/one/x", NULL},
        {"/raw", "3GiB", "tiers.l3.index_dir=/one/x", "wants 2.91 GiB of /raw, which has 2.00 GiB"},
        {"/raw,/dev/raw", "1GiB", "tiers.l3.index_dir=/one/x", "/raw and /dev/raw are the same"},
        {"/one/a", "20MiB", NULL, NULL},
        {"/one/a", "19MiB", NULL,
         "tiers.l3.bytes is 19.00 MiB and the index takes 16.00 MiB of it"},
        {"/one/a", "1GiB", "tiers.l3.index_bytes=2GiB", "the index takes 2.00 GiB of it"},
    };

    (void)state;
    for (uint32_t i = 0; i < KVT_COUNT_OF(rows); i++) {
        struct kvt_config_device devices[KVT_ZONES_MAX];
        struct kvt_config_facts facts = {.memory_bound = "the test's memory"};
        char assignment[128];
        uint32_t count;
        int r;

        begin();
        (void)snprintf(assignment, sizeof(assignment), "tiers.l3.path=%s", rows[i].path);
        assert_int_equal(set(assignment), 0);
        (void)snprintf(assignment, sizeof(assignment), "tiers.l3.bytes=%s", rows[i].bytes);
        assert_int_equal(set(assignment), 0);
        assert_int_equal(rows[i].more == NULL ? 0 : set(rows[i].more), 0);
        count = kvt_config_devices(&config, devices);
        for (uint32_t k = 0; k < count; k++) {
            place(devices[k].path, &facts.data[k]);
            place(devices[k].index_path, &facts.index[k]);
        }
        r = kvt_config_check(&config, &facts, &report);
        if (r != (rows[i].message == NULL ? 0 : -EINVAL) ||
            (rows[i].message != NULL && strstr(problems, rows[i].message) == NULL))
            fail_msg("row %u: %d, %s", i, r, problems);
    }
}

/* One problem a file system, however many files lie there. */
static void test_room_is_said_once(void **state)
{
    struct kvt_config_facts facts = {.memory_bound = "the test's memory"};

    (void)state;
    begin();
    assert_int_equal(set("tiers.l3.path=/one/a,/one/b,/one/c"), 0);
    assert_int_equal(set("tiers.l3.bytes=1TiB"), 0);
    for (uint32_t i = 0; i < 3; i++) {
        place("/one/x", &facts.data[i]);
        place("/one/x", &facts.index[i]);
    }
    assert_int_equal(kvt_config_check(&config, &facts, &report), -EINVAL);
    assert_non_null(strstr(problems, "6 files of L3 there want 3.00 TiB"));
    assert_ptr_equal(strchr(problems, '\n') + 1, problems + strlen(problems));
}

/* What the machine says, of files that are there and of some that are not. */
static void test_facts(void **state)
{
    char directory[] = "/tmp/kvtierd-devices-XXXXXX";
    char file[64], link_to_it[64], assignment[256];
    struct kvt_config_facts facts;
    int fd;

    (void)state;
    begin();
    assert_non_null(mkdtemp(directory));
    (void)snprintf(file, sizeof(file), "%s/l3", directory);
    (void)snprintf(link_to_it, sizeof(link_to_it), "%s/link", directory);
    fd = open(file, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    assert_true(fd >= 0);
    assert_int_equal(posix_fallocate(fd, 0, 1 << 20), 0);
    assert_int_equal(close(fd), 0);
    assert_int_equal(symlink(file, link_to_it), 0);

    (void)snprintf(assignment, sizeof(assignment), "tiers.l3.path=%s,%s,/nonexistent/x/l3", file,
                   link_to_it);
    assert_int_equal(set(assignment), 0);
    assert_int_equal(set("tiers.l3.bytes=10%"), 0); /* of the smallest of which one is known */
    assert_true(config.l3.bytes > 0);
    assert_int_equal(set("tiers.l3.bytes=1GiB"), 0);
    kvt_config_facts_read(&config, &facts);
    assert_true(facts.data[0].is_known && facts.data[0].file != 0 && !facts.data[0].is_raw);
    assert_true(facts.data[0].own_bytes >= 1 << 20);
    assert_true(facts.data[0].file == facts.data[1].file);
    assert_true(facts.index[0].is_known && facts.index[0].file == 0);
    assert_true(facts.index[0].own_bytes == 0);
    assert_true(facts.index[0].file_system == facts.data[0].file_system);
    assert_true(facts.data[0].free_bytes > 0);
    assert_false(facts.data[2].is_known);
    assert_false(facts.data[3].is_known);

    assert_int_equal(unlink(link_to_it), 0);
    assert_int_equal(unlink(file), 0);
    assert_int_equal(rmdir(directory), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_lists_of_paths),    cmocka_unit_test(test_longest_paths),
        cmocka_unit_test(test_indexes),           cmocka_unit_test(test_relations),
        cmocka_unit_test(test_room_is_said_once), cmocka_unit_test(test_facts),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
