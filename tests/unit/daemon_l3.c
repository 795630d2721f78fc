/* Numbers of blocks and contents over starts and stops of L3: what was given once is never given
 * again, whatever devices were there. With real files, indexes and helper processes. */
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "daemon/base/clock.h"
#include "daemon/start.h"
#include "tests/common/cmocka.h"
#include "tiers/host/host.h"

#define DEVICES 2u

static char dir[64];

struct life { /* of a daemon: as far as L3 needs one */
    struct kvt_config config;
    struct kvt_daemon daemon;
};

/* A directory stands where the device's file should be: it is out of service. */
static void hide(const char *name, bool is_hidden)
{
    char path[96], other[96];

    (void)snprintf(path, sizeof(path), "%s/%s", dir, name);
    (void)snprintf(other, sizeof(other), "%s/hidden", dir);
    if (is_hidden) {
        assert_int_equal(rename(path, other), 0);
        assert_int_equal(mkdir(path, 0700), 0);
    } else {
        assert_int_equal(rmdir(path), 0);
        assert_int_equal(rename(other, path), 0);
    }
}

static void begin(struct life *life, bool has_first, bool has_second)
{
    struct kvt_host_config host = {
        .bytes = 8u << 20, .pages = KVT_HOST_PAGES_PLAIN, .inflight_max = 16};

    memset(life, 0, sizeof(*life));
    kvt_config_init(&life->config);
    (void)snprintf(life->config.l3.paths, sizeof(life->config.l3.paths), "%s%s%s%s%s",
                   has_first ? dir : "", has_first ? "/a" : "", has_first && has_second ? "," : "",
                   has_second ? dir : "", has_second ? "/b" : "");
    life->config.l3.bytes = 40u << 20;
    life->config.l3.index_bytes = 16u << 20;
    life->daemon.config = &life->config;
    assert_int_equal(kvt_doorbell_init(&life->daemon.doorbell), 0);
    host.doorbell = &life->daemon.doorbell;
    assert_int_equal(kvt_host_open(&life->daemon.tiers[KVT_TIER_HOST], &host), 0);
    assert_int_equal(kvt_start_l3(&life->daemon), 0);
    assert_int_equal(kvt_start_index(&life->daemon), 0);
}

static void end(struct life *life)
{
    kvt_undo_index(&life->daemon);
    kvt_undo_l3(&life->daemon);
    life->daemon.tiers[KVT_TIER_HOST] = kvt_tier_close(life->daemon.tiers[KVT_TIER_HOST]);
    kvt_doorbell_deinit(&life->daemon.doorbell);
}

static void wait_committed(struct kvt_index *index, uint64_t seq)
{
    uint64_t end_ns = kvt_clock_mono_ns() + 30 * KVT_NS_PER_S;
    struct kvt_index_event event;

    while (kvt_clock_mono_ns() < end_ns) {
        while (kvt_index_next(index, &event)) {
            assert_int_not_equal(event.kind, KVT_INDEX_EVENT_FAILED);
            if (event.kind == KVT_INDEX_EVENT_COMMITTED && event.seq >= seq)
                return;
        }
        (void)usleep(1000);
    }
    fail_msg("nothing is committed");
}

/* As the engine does when many were used. */
static void reserve(struct life *life, uint64_t stamps_end)
{
    struct kvt_disk_state state = life->daemon.l3.states[0];
    uint8_t data[KVT_DISK_STATE_BYTES];
    struct kvt_index_put put = {.kind = KVT_INDEX_PUT_CATALOG,
                                .catalog_number = KVT_DISK_CATALOG_STATE,
                                .catalog_data = data,
                                .catalog_bytes = sizeof(data)};
    uint64_t seq;

    state.stamps_end = stamps_end;
    kvt_disk_catalog_encode_state(data, &state);
    assert_int_equal(kvt_index_put(life->daemon.l3.indexes[0], &put, &seq), 0);
    wait_committed(life->daemon.l3.indexes[0], seq);
}

static void test_a_stop_takes_no_numbers_back(void **state)
{
    static struct life life;
    uint64_t far_end;

    (void)state;
    begin(&life, true, false);
    far_end = life.daemon.l3.stamp_end + (1ull << 40); /* farther than the clock gets */
    reserve(&life, far_end);
    end(&life);
    begin(&life, true, false);
    assert_true(life.daemon.l3.stamp_first >= far_end);
    end(&life);
}

static void test_devices_that_were_apart(void **state)
{
    static struct life life;
    uint64_t first, end_of_first;

    (void)state;
    begin(&life, true, true);
    end(&life);
    hide("b", true);
    begin(&life, true, true);
    assert_null(life.daemon.l3.contexts[1].device);
    first = life.daemon.l3.stamp_first;
    end_of_first = life.daemon.l3.stamp_end;
    end(&life);
    hide("b", false);
    hide("a", true);
    begin(&life, true, true); /* knows nothing of the start before */
    assert_null(life.daemon.l3.contexts[0].device);
    assert_true(life.daemon.l3.stamp_first >= end_of_first || life.daemon.l3.stamp_end <= first);
    end(&life);
    hide("a", false);
}

static int make_dir(void **state)
{
    (void)state;
    (void)snprintf(dir, sizeof(dir), "/tmp/kvt-l3-XXXXXX");
    return mkdtemp(dir) == NULL ? -1 : 0;
}

static int remove_dir(void **state)
{
    DIR *at = opendir(dir);
    struct dirent *entry;

    (void)state;
    while (at != NULL && (entry = readdir(at)) != NULL)
        if (entry->d_name[0] != '.')
            (void)unlinkat(dirfd(at), entry->d_name, 0);
    if (at != NULL)
        (void)closedir(at);
    return rmdir(dir);
}

int main(void)
{
    static const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_a_stop_takes_no_numbers_back, make_dir, remove_dir),
        cmocka_unit_test_setup_teardown(test_devices_that_were_apart, make_dir, remove_dir),
    };

    kvt_log_set_level(KVT_LOG_ERROR);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
