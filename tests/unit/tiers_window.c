/* The tuning of bytes in flight against a model of a device: it has a bandwidth that is reached at
 * some number of bytes in flight, and a latency below that. The window must find its way near that
 * number, from both sides, and leave a fixed window alone. */
#include <stdlib.h>

#include "tests/common/cmocka.h"
#include "tiers/disk/window.h"

#define XFER_BYTES (256u * KVT_KIB)

/* Serves @total_bytes of work that never runs dry; @knee_bytes in flight saturate the device at
 * @rate bytes/s. Returns the bytes/s that were got in the last quarter. */
static double device_run(struct kvt_disk_window *window, uint64_t knee_bytes, double rate,
                         uint64_t total_bytes)
{
    double now_ns = 1, late_started_ns = 0;
    uint64_t done_bytes = 0, late_bytes = 0;

    while (done_bytes < total_bytes) {
        double share;

        while (kvt_disk_window_has_room(window, XFER_BYTES))
            kvt_disk_window_start(window, XFER_BYTES, (uint64_t)now_ns);
        share = (double)KVT_MIN(window->inflight_bytes, knee_bytes) / (double)knee_bytes;
        now_ns += XFER_BYTES / (rate * share) * 1e9;
        kvt_disk_window_done(window, XFER_BYTES, (uint64_t)now_ns);
        done_bytes += XFER_BYTES;
        if (done_bytes < total_bytes / 4 * 3)
            late_started_ns = now_ns;
        else
            late_bytes += XFER_BYTES;
    }
    return (double)late_bytes / (now_ns - late_started_ns) * 1e9;
}

static void test_finds_the_knee(void **state)
{
    static const uint64_t knees[] = {1 * KVT_MIB, 3 * KVT_MIB, 8 * KVT_MIB, 24 * KVT_MIB};

    (void)state;
    for (size_t i = 0; i < KVT_COUNT_OF(knees); i++) {
        struct kvt_disk_window window;
        double got;

        kvt_disk_window_init(&window, 0);
        got = device_run(&window, knees[i], 5e9, 400 * KVT_GIB);
        print_message("knee %llu KiB: window %llu KiB, %.2f GB/s of 5\n",
                      (unsigned long long)(knees[i] >> 10),
                      (unsigned long long)(window.bytes >> 10), got / 1e9);
        assert_true(got >= 5e9 * 0.9);
        assert_true(window.bytes <= 2 * knees[i] + 4 * KVT_MIB);
    }
}

static void test_fixed_stays(void **state)
{
    struct kvt_disk_window window;

    (void)state;
    kvt_disk_window_init(&window, 3 * KVT_MIB);
    (void)device_run(&window, 30 * KVT_MIB, 5e9, 20 * KVT_GIB);
    assert_int_equal(window.bytes, 3 * KVT_MIB);
}

/* Work that comes and goes never fills the window, so it says nothing about the device. */
static void test_idle_teaches_nothing(void **state)
{
    struct kvt_disk_window window;
    uint64_t now_ns = 1;

    (void)state;
    kvt_disk_window_init(&window, 0);
    for (int i = 0; i < 100000; i++) {
        assert_true(kvt_disk_window_has_room(&window, XFER_BYTES));
        kvt_disk_window_start(&window, XFER_BYTES, now_ns);
        now_ns += KVT_NS_PER_MS;
        kvt_disk_window_done(&window, XFER_BYTES, now_ns);
    }
    assert_int_equal(window.bytes, 4 * KVT_MIB);
    assert_int_equal(window.inflight_bytes, 0);
    /* One transfer always goes, however large. */
    assert_true(kvt_disk_window_has_room(&window, 100 * KVT_MIB));
    kvt_disk_window_start(&window, 100 * KVT_MIB, now_ns);
    assert_false(kvt_disk_window_has_room(&window, 1));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_finds_the_knee),
        cmocka_unit_test(test_fixed_stays),
        cmocka_unit_test(test_idle_teaches_nothing),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
