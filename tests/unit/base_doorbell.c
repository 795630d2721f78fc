/* The doorbell: a ring between the consumer's second look and its sleep is never lost. */
#include <pthread.h>
#include <unistd.h>

#include "daemon/base/clock.h"
#include "daemon/base/doorbell.h"
#include "daemon/base/ring.h"
#include "tests/common/cmocka.h"

static void test_times_out(void **state)
{
    struct kvt_doorbell bell = KVT_DOORBELL_NULL;
    uint64_t before;

    (void)state;
    assert_int_equal(kvt_doorbell_init(&bell), 0);
    before = kvt_clock_mono_ns();
    kvt_doorbell_arm(&bell);
    kvt_doorbell_wait(&bell, 20 * KVT_NS_PER_MS);
    assert_true(kvt_clock_mono_ns() - before >= 20 * KVT_NS_PER_MS);
    kvt_doorbell_deinit(&bell);
    kvt_doorbell_deinit(&bell);
}

static void test_unarmed_costs_no_call(void **state)
{
    struct kvt_doorbell bell = KVT_DOORBELL_NULL;
    uint64_t count;

    (void)state;
    assert_int_equal(kvt_doorbell_init(&bell), 0);
    kvt_doorbell_ring(&bell);
    assert_int_equal(read(bell.fd, &count, sizeof(count)), -1);
    kvt_doorbell_arm(&bell);
    kvt_doorbell_ring(&bell);
    kvt_doorbell_ring(&bell);
    kvt_doorbell_wait(&bell, KVT_TIME_NEVER_NS);
    assert_int_equal(read(bell.fd, &count, sizeof(count)), -1);
    kvt_doorbell_deinit(&bell);
}

#define ITEMS 200000u

struct pair {
    struct kvt_doorbell bell;
    struct kvt_ring ring;
};

static void *produce(void *ctx)
{
    struct pair *pair = ctx;

    for (uintptr_t i = 1; i <= ITEMS; i++) {
        while (kvt_ring_put(&pair->ring, (void *)i) != 0)
            kvt_doorbell_ring(&pair->bell);
        kvt_doorbell_ring(&pair->bell);
    }
    return NULL;
}

/* Sleeps without a limit: one lost ring and the test hangs until its timeout. */
static void test_no_ring_is_lost(void **state)
{
    struct pair pair = {.bell = KVT_DOORBELL_NULL};
    uintptr_t expected = 1;
    pthread_t thread;

    (void)state;
    assert_int_equal(kvt_doorbell_init(&pair.bell), 0);
    assert_int_equal(kvt_ring_init(&pair.ring, 4), 0);
    assert_int_equal(pthread_create(&thread, NULL, produce, &pair), 0);
    while (expected <= ITEMS) {
        void *item = kvt_ring_take(&pair.ring);

        if (item != NULL) {
            assert_int_equal((uintptr_t)item, expected);
            expected++;
            continue;
        }
        kvt_doorbell_arm(&pair.bell);
        if (kvt_ring_is_empty(&pair.ring))
            kvt_doorbell_wait(&pair.bell, KVT_TIME_NEVER_NS);
        else
            kvt_doorbell_disarm(&pair.bell);
    }
    assert_int_equal(pthread_join(thread, NULL), 0);
    kvt_ring_deinit(&pair.ring);
    kvt_doorbell_deinit(&pair.bell);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_times_out),
        cmocka_unit_test(test_unarmed_costs_no_call),
        cmocka_unit_test(test_no_ring_is_lost),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
