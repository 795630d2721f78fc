/* What daemon/base/api.c computes: the wear of a device. */
#include "daemon/base/api.h"
#include "tests/common/cmocka.h"

#define DAY_NS (86400 * KVT_NS_PER_S)
#define TB 1000000000000ull

static void test_wear(void **state)
{
    struct kvt_api_device_stats device = {
        .capacity_bytes = 2 * TB, .written_bytes = 3 * TB, .life_written_bytes = 100 * TB};

    (void)state;
    kvt_api_device_wear(&device, 0); /* the first moment: no rate */
    assert_true(device.dwpd_milli == 0 && device.life_left_days == KVT_DEVICE_LIFE_UNKNOWN);
    kvt_api_device_wear(&device, DAY_NS);
    assert_true(device.dwpd_milli == 1500);
    assert_true(device.life_left_days == KVT_DEVICE_LIFE_UNKNOWN); /* no endurance is known */
    device.endurance_bytes = 700 * TB;
    kvt_api_device_wear(&device, DAY_NS);
    assert_true(device.life_left_days == 200);
    kvt_api_device_wear(&device, 3 * DAY_NS);
    assert_true(device.dwpd_milli == 500 && device.life_left_days == 600);
    kvt_api_device_wear(&device, 59 * 60 * KVT_NS_PER_S); /* too short to tell */
    assert_true(device.life_left_days == KVT_DEVICE_LIFE_UNKNOWN && device.dwpd_milli > 30000);
    device.written_bytes = 0; /* nothing is written: it lasts, nobody knows how long */
    kvt_api_device_wear(&device, DAY_NS);
    assert_true(device.dwpd_milli == 0 && device.life_left_days == KVT_DEVICE_LIFE_UNKNOWN);
}

static void test_wear_at_its_ends(void **state)
{
    struct kvt_api_device_stats device = {.written_bytes = UINT64_MAX,
                                          .capacity_bytes = 1,
                                          .life_written_bytes = 5,
                                          .endurance_bytes = 5};

    (void)state;
    kvt_api_device_wear(&device, 1);
    assert_true(device.life_left_days == 0); /* used up: known from the first moment */
    assert_true(device.dwpd_milli == 1000000000000000ull);
    device.capacity_bytes = 0;
    device.written_bytes = 1;
    device.life_written_bytes = 0;
    device.endurance_bytes = UINT64_MAX;
    kvt_api_device_wear(&device, UINT64_MAX);
    assert_true(device.dwpd_milli == 0);
    assert_true(device.life_left_days == 1000000000000000ull);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_wear),
                                       cmocka_unit_test(test_wear_at_its_ends)};

    return cmocka_run_group_tests(tests, NULL, NULL);
}
