/* The ring of bytes: all or nothing, in order, around the end, and between two threads. */
#include <pthread.h>
#include <string.h>

#include "daemon/base/alloc.h"
#include "tests/common/cmocka.h"
#include "tests/common/fake_tier.h"
#include "tiers/index/byte_ring.h"

#define CAPACITY 256u
#define ROUNDS 20000u

static void test_full_and_around(void **state)
{
    struct kvt_byte_ring ring;
    uint8_t in[CAPACITY], out[CAPACITY];

    (void)state;
    for (uint32_t i = 0; i < CAPACITY; i++)
        in[i] = (uint8_t)i;
    assert_int_equal(kvt_byte_ring_init(&ring, CAPACITY), 0);
    for (uint32_t bytes = 1; bytes <= CAPACITY; bytes++) {
        assert_int_equal(kvt_byte_ring_put(&ring, in, bytes), 0);
        assert_int_equal(kvt_byte_ring_put(&ring, in, CAPACITY - bytes + 1), KVT_BYTE_RING_E_FULL);
        assert_int_equal(kvt_byte_ring_put(&ring, in + bytes, CAPACITY - bytes), 0);
        assert_int_equal(kvt_byte_ring_used(&ring), CAPACITY);
        memset(out, 0xff, sizeof(out));
        kvt_byte_ring_peek(&ring, out, CAPACITY);
        assert_memory_equal(out, in, CAPACITY);
        kvt_byte_ring_drop(&ring, CAPACITY);
        assert_int_equal(kvt_byte_ring_put(&ring, in, 7), 0); /* the next round begins elsewhere */
        kvt_byte_ring_drop(&ring, 7);
        assert_int_equal(kvt_byte_ring_used(&ring), 0);
    }
    kvt_byte_ring_deinit(&ring);
    kvt_byte_ring_deinit(&ring);
}

static void *produce(void *arg)
{
    struct kvt_byte_ring *ring = arg;
    uint64_t random = 1;
    uint8_t record[64];

    for (uint32_t i = 0; i < ROUNDS;) {
        uint64_t was = random;
        uint8_t bytes = (uint8_t)(1 + fake_random(&random) % (sizeof(record) - 1));

        memset(record, (int)(i & 0xff), sizeof(record));
        record[0] = bytes;
        if (kvt_byte_ring_put(ring, record, bytes) == 0)
            i++;
        else
            random = was;
    }
    return NULL;
}

static void test_two_threads(void **state)
{
    struct kvt_byte_ring ring;
    pthread_t thread;
    uint8_t record[64];

    (void)state;
    assert_int_equal(kvt_byte_ring_init(&ring, CAPACITY), 0);
    assert_int_equal(pthread_create(&thread, NULL, produce, &ring), 0);
    for (uint32_t i = 0; i < ROUNDS;) {
        if (kvt_byte_ring_used(&ring) == 0)
            continue;
        kvt_byte_ring_peek(&ring, record, 1);
        kvt_byte_ring_peek(&ring, record, record[0]);
        for (uint8_t k = 1; k < record[0]; k++)
            assert_int_equal(record[k], i & 0xff);
        kvt_byte_ring_drop(&ring, record[0]);
        i++;
    }
    assert_int_equal(pthread_join(thread, NULL), 0);
    assert_int_equal(kvt_byte_ring_used(&ring), 0);
    kvt_byte_ring_deinit(&ring);
}

static bool always(size_t bytes, void *ctx)
{
    (void)bytes;
    (void)ctx;
    return true;
}

static void test_no_memory(void **state)
{
    struct kvt_byte_ring ring;

    (void)state;
    kvt_alloc_set_fault(always, NULL);
    assert_int_equal(kvt_byte_ring_init(&ring, CAPACITY), -ENOMEM);
    kvt_alloc_set_fault(NULL, NULL);
    kvt_byte_ring_deinit(&ring);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_full_and_around),
        cmocka_unit_test(test_two_threads),
        cmocka_unit_test(test_no_memory),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
