/* L3's devices as an operator sees them: on the page of stats, as JSON, in health, by the doctor.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "tests/common/ctl_page.h"

/* One device that is well and one that is out, with its index being rebuilt. */
static void fill(struct kvt_ans_stats *stats, struct kvt_api_device_stats devices[2])
{
    static struct kvt_api_counter fine[] = {{"read", "", 0}, {"bad_checksum", "", 0}};
    static struct kvt_api_counter errors[] = {
        {"read", "", 1200}, {"write", "", 0}, {"bad_checksum", "", 3}};

    devices[0] = (struct kvt_api_device_stats){
        .path = TEXT("/a/l3"),
        .index_path = TEXT("/a/l3.index"),
        .capacity_bytes = 1 << 30,
        .used_bytes = 1 << 28,
        .copies = 256,
        .read_bytes = 5 << 20,
        .written_bytes = 7 << 20,
        .life_written_bytes = 1 << 30,
        .endurance_bytes = UINT64_C(1) << 40,
        .dwpd_milli = 1250,
        .life_left_days = 4000,
        .errors_count = 2,
        .errors = fine,
        .index = {.state = KVT_DEVICE_INDEX_READY,
                  .used_bytes = 1 << 20,
                  .capacity_bytes = 1 << 25,
                  .commits = 17,
                  .rows_put = 300,
                  .copies_put = 600,
                  .loaded_rows = 12,
                  .load_ns = 3 * KVT_NS_PER_MS},
    };
    devices[1] = (struct kvt_api_device_stats){
        .path = TEXT("/b\033/l3"),
        .health = KVT_DEVICE_OUT,
        .capacity_bytes = 1 << 30,
        .outages = 2,
        .out_ns = 70 * KVT_NS_PER_S,
        .life_left_days = KVT_DEVICE_LIFE_UNKNOWN,
        .errors_count = 3,
        .errors = errors,
        .index = {.state = KVT_DEVICE_INDEX_SCANNING, .scanned_bytes = 1, .scan_total_bytes = 4},
    };
    *stats = (struct kvt_ans_stats){.devices_count = 2, .devices = devices};
}

static void test_page(void **state)
{
    struct kvt_api_device_stats devices[2];
    struct kvt_ans_stats stats;
    struct page page;

    (void)state;
    fill(&stats, devices);
    page_open(&page);
    kvt_ctl_view_devices(&page.view, &stats);
    page_expect(
        &page,
        "Devices of L3\n"
        "  device     health               used  capacity  copies  moving     read  written  "
        "errors  outages  in life  DWPD  left\n"
        "  /a/l3      ok              256.0 MiB   1.0 GiB     256       0  5.0 MiB  7.0 MiB       "
        "0        0  1.0 GiB  1.25  11 y\n"
        "  /b\\x1b/l3  out of service        0 B   1.0 GiB       0       0      0 B      0 B   "
        "1,203        2      0 B  0.00     -\n"
        "  index of   state               used  capacity  commits  rows put  copies  drops  "
        "refused  loaded       in\n"
        "  /a/l3      ready            1.0 MiB  32.0 MiB       17       300     600      0        "
        "0      12  3.00 ms\n"
        "  /b\\x1b/l3  rebuilding 25 %      0 B       0 B        0         0       0      0        "
        "0       0     0 ns\n"
        "  /b\\x1b/l3: out of service for 1 min 10 s, 1,200 read, 3 bad_checksum\n"
        "\n");
    stats.devices_count = 0;
    page_open(&page);
    kvt_ctl_view_devices(&page.view, &stats);
    page_expect(&page, "");
}

static void test_json(void **state)
{
    static const char *const parts[] = {
        "\"devices\": [{\"path\": \"/a/l3\", \"index_path\": \"/a/l3.index\", \"health\": \"ok\",",
        "\"dwpd_milli\": 1250, \"life_left_days\": 4000, \"errors\": {\"read\": 0, ",
        "\"index\": {\"state\": \"ready\", \"used_bytes\": 1048576,",
        "\"dwpd_milli\": 0, \"errors\": {\"read\": 1200, \"write\": 0, \"bad_checksum\": 3},",
        "\"state\": \"rebuilding\"",
    };
    struct kvt_api_device_stats devices[2];
    struct kvt_ans_stats stats;
    char *text = NULL;
    size_t bytes;
    FILE *out = open_memstream(&text, &bytes);

    (void)state;
    fill(&stats, devices);
    assert_non_null(out);
    kvt_ctl_json_stats(out, &stats, true);
    (void)fclose(out);
    for (size_t i = 0; i < KVT_COUNT_OF(parts); i++)
        if (strstr(text, parts[i]) == NULL)
            fail_msg("no '%s' in:\n%s", parts[i], text);
    free(text);
}

static void test_health(void **state)
{
    struct kvt_api_device_stats devices[2];
    struct kvt_ans_stats stats;
    struct kvt_ctl_health health = {.is_serving = true, .stats = &stats};
    struct page page;

    (void)state;
    fill(&stats, devices);
    devices[1].index.state = KVT_DEVICE_INDEX_LOST;
    assert_true(kvt_ctl_is_degraded(&stats));
    page_open(&page);
    kvt_ctl_view_health(&page.view, &health);
    page_expect(&page, "serving, degraded\n  /b\\x1b/l3 out of service\n"
                       "  the index of /b\\x1b/l3 is lost\n");
    devices[1].health = KVT_DEVICE_OK;
    assert_true(kvt_ctl_is_degraded(&stats));
    devices[1].index.state = KVT_DEVICE_INDEX_LOADING;
    assert_false(kvt_ctl_is_degraded(&stats));
}

static void test_maintain_pages(void **state)
{
    struct kvt_ans_maintain answer = {
        .drain = {.copies_written = 1200, .bytes_written = 3 << 20, .copies_left = 7},
        .scrub = {.checked_copies = 5000, .checked_bytes = 1 << 20, .rounds = 2},
    };
    struct page page;

    (void)state;
    page_open(&page);
    kvt_ctl_view_drain(&page.view, &answer);
    page_expect(&page, "written   1,200 copies, 3.0 MiB\n"
                       "lacking   7 copies now: some were stored since it began\n");
    answer.drain.copies_failed = 7;
    page_open(&page);
    kvt_ctl_view_drain(&page.view, &answer);
    page_expect(&page, "written   1,200 copies, 3.0 MiB\n"
                       "failed    7 copies: L3 had no room for them, or is out of service "
                       "(kvtier-ctl stats)\n"
                       "lacking   7 copies now\n");
    page_open(&page);
    kvt_ctl_view_scrub(&page.view, &answer);
    page_expect(&page, "scrubber  off\n"
                       "checked   5,000 copies, 1.0 MiB, in 2 whole rounds\n"
                       "bad       0\n");
    answer.scrub.is_running = true;
    answer.scrub.rate_bytes_per_s = 64 << 20;
    answer.scrub.bad_copies = 2;
    answer.scrub.skipped_copies = 1;
    page_open(&page);
    kvt_ctl_view_scrub(&page.view, &answer);
    page_expect(&page, "scrubber  reads 64.0 MiB a second\n"
                       "checked   5,000 copies, 1.0 MiB, in 2 whole rounds\n"
                       "bad       2, dropped: each is a miss from now on\n"
                       "skipped   1 copies that are too large for its buffers: give L2 more\n");
    page_open(&page);
    kvt_ctl_json_maintain(page.view.out, &answer);
    page_expect(&page, "{\n  \"drain\": {\n    \"is_running\": false,\n    \"copies_left\": 7,\n"
                       "    \"copies_written\": 1200,\n    \"bytes_written\": 3145728,\n"
                       "    \"copies_failed\": 7\n  },\n  \"scrub\": {\n"
                       "    \"is_running\": true,\n    \"rate_bytes_per_s\": 67108864,\n"
                       "    \"checked_copies\": 5000,\n    \"checked_bytes\": 1048576,\n"
                       "    \"bad_copies\": 2,\n    \"skipped_copies\": 1,\n    \"rounds\": 2\n"
                       "  }\n}\n");
}

/* The worst of what is found, and whether somebody says so. */
static enum kvt_ctl_level judge(const struct kvt_ans_stats *stats, const char *says)
{
    struct kvt_ctl_report report = {0};
    bool is_said = false;

    kvt_ctl_check_devices(&report, stats);
    for (uint32_t i = 0; i < report.count; i++) {
        const struct kvt_ctl_finding *finding = &report.findings[i];

        is_said = is_said || strstr(finding->text, says) != NULL;
        assert_true(finding->level == KVT_CTL_LEVEL_OK || finding->remedy[0] != '\0');
    }
    if (!is_said)
        fail_msg("nobody said '%s'", says);
    return kvt_ctl_report_worst(&report);
}

static void test_doctor(void **state)
{
    struct kvt_api_device_stats devices[2];
    struct kvt_ans_stats stats;

    (void)state;
    fill(&stats, devices);
    assert_int_equal(judge(&stats, "/b\\x1b/l3 is out of service for 1 min"), KVT_CTL_LEVEL_BAD);
    devices[1].health = KVT_DEVICE_LOST;
    assert_int_equal(judge(&stats, "/b\\x1b/l3 is lost"), KVT_CTL_LEVEL_BAD);
    devices[1].health = KVT_DEVICE_OK;
    assert_int_equal(judge(&stats, "had 1,203 errors"), KVT_CTL_LEVEL_WARN);
    devices[1] = devices[0];
    assert_int_equal(judge(&stats, "/a/l3 is well"), KVT_CTL_LEVEL_OK);
    devices[1].life_left_days = 364;
    assert_int_equal(judge(&stats, "lasts 364 days more"), KVT_CTL_LEVEL_WARN);
    devices[1].life_left_days = 365;
    devices[1].index.used_bytes = (1 << 25) - 1;
    assert_int_equal(judge(&stats, "is full: 32.0 MiB of 32.0 MiB"), KVT_CTL_LEVEL_WARN);
    devices[1].index.used_bytes = 0;
    devices[1].index.refused = 9;
    assert_int_equal(judge(&stats, "9 rows did not fit"), KVT_CTL_LEVEL_WARN);
    devices[1].index.state = KVT_DEVICE_INDEX_LOST;
    assert_int_equal(judge(&stats, "of /a/l3 is lost"), KVT_CTL_LEVEL_BAD);
    devices[1].index = (struct kvt_api_index_stats){.load_total_rows = 8, .loaded_rows = 2};
    assert_int_equal(judge(&stats, "of /a/l3: loading 25 %"), KVT_CTL_LEVEL_WARN);
}

/* Of a configuration: files of one file system together, raw devices on their own. */
static void test_places(void **state)
{
    static const struct {
        const char *paths, *index_dir;
        enum kvt_ctl_level level;
        const char *says;
    } rows[] = {
        {"%s/a", "", KVT_CTL_LEVEL_OK, "L3 is 1.0 MiB"},
        {"%s/a, %s/b,%s/c", "", KVT_CTL_LEVEL_OK, "L3 is 3.0 MiB"},
        {"%s/a,b", "", KVT_CTL_LEVEL_BAD, "b is not an absolute path"},
        {"/dev/no-such-device", "/x", KVT_CTL_LEVEL_WARN, "No such file"},
        {"/dev/null", "/x", KVT_CTL_LEVEL_BAD, "/dev/null is no block device"},
        {"/dev/null", "", KVT_CTL_LEVEL_BAD, "/dev/null is raw, its index needs a file system"},
    };
    char root[] = "/tmp/kvt-devices-XXXXXX";

    (void)state;
    assert_non_null(mkdtemp(root));
    for (size_t i = 0; i < KVT_COUNT_OF(rows); i++) {
        struct kvt_ctl_pools pools = {.source = "configuration", .l3_bytes = KVT_MIB};
        struct kvt_ctl_report report = {0};
        bool is_said = false;
        size_t at = 0;

        for (const char *from = rows[i].paths; *from != '\0'; from++) {
            bool is_root = from[0] == '%';

            at += (size_t)snprintf(pools.l3_paths + at, sizeof(pools.l3_paths) - at, "%.*s",
                                   is_root ? (int)strlen(root) : 1, is_root ? root : from);
            from += is_root;
        }
        (void)snprintf(pools.l3_index_dir, sizeof(pools.l3_index_dir), "%s", rows[i].index_dir);
        kvt_ctl_check_l3(&report, &pools);
        for (uint32_t k = 0; k < report.count; k++)
            is_said = is_said || strstr(report.findings[k].text, rows[i].says) != NULL;
        /* The scratch folder may be on memory or an overlay: that is a warning. */
        if (!is_said || (kvt_ctl_report_worst(&report) != rows[i].level &&
                         !(rows[i].level == KVT_CTL_LEVEL_OK &&
                           kvt_ctl_report_worst(&report) == KVT_CTL_LEVEL_WARN)))
            fail_msg("row %zu: worst %d, first: %s", i, (int)kvt_ctl_report_worst(&report),
                     report.count > 0 ? report.findings[0].text : "nothing");
    }
    assert_int_equal(rmdir(root), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_page),   cmocka_unit_test(test_json),
        cmocka_unit_test(test_health), cmocka_unit_test(test_doctor),
        cmocka_unit_test(test_places), cmocka_unit_test(test_maintain_pages),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
