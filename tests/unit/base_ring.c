/* The ring: order, full is an answer, and with many producers nothing is lost, doubled or seen
 * before it was written. */
#include <pthread.h>
#include <sched.h>

#include "daemon/base/alloc.h"
#include "daemon/base/ring.h"
#include "tests/common/cmocka.h"

static void test_order_and_full(void **state)
{
    struct kvt_ring ring;

    (void)state;
    assert_int_equal(kvt_ring_init(&ring, 5), 0); /* becomes 8 */
    assert_true(kvt_ring_is_empty(&ring));
    assert_null(kvt_ring_take(&ring));
    for (uintptr_t lap = 0; lap < 100; lap++) {
        for (uintptr_t i = 1; i <= 8; i++)
            assert_int_equal(kvt_ring_put(&ring, (void *)(lap * 8 + i)), 0);
        assert_int_equal(kvt_ring_put(&ring, (void *)1), KVT_RING_E_FULL);
        assert_false(kvt_ring_is_empty(&ring));
        for (uintptr_t i = 1; i <= 8; i++) {
            assert_false(kvt_ring_is_drained(&ring));
            assert_int_equal((uintptr_t)kvt_ring_take(&ring), lap * 8 + i);
        }
        assert_true(kvt_ring_is_drained(&ring));
        assert_null(kvt_ring_take(&ring));
    }
    kvt_ring_deinit(&ring);
    kvt_ring_deinit(&ring);
}

static bool fail_always(size_t bytes, void *ctx)
{
    (void)bytes;
    (void)ctx;
    return true;
}

static void test_no_memory(void **state)
{
    struct kvt_ring ring;

    (void)state;
    kvt_alloc_set_fault(fail_always, NULL);
    assert_int_equal(kvt_ring_init(&ring, 16), -ENOMEM);
    kvt_alloc_set_fault(NULL, NULL);
}

#define PRODUCERS 3u
#define ITEMS_EACH 60000u

struct item {
    uint32_t producer, number;
};

struct producer {
    struct kvt_ring *ring;
    struct item *items;
    uint32_t idx;
};

static void *produce(void *ctx)
{
    struct producer *producer = ctx;

    for (uint32_t i = 0; i < ITEMS_EACH; i++) {
        producer->items[i] = (struct item){.producer = producer->idx, .number = i};
        while (kvt_ring_put(producer->ring, &producer->items[i]) == KVT_RING_E_FULL)
            sched_yield();
    }
    return NULL;
}

static void test_many_producers(void **state)
{
    struct kvt_ring ring;
    struct producer producers[PRODUCERS];
    pthread_t threads[PRODUCERS];
    uint32_t next[PRODUCERS] = {0};

    (void)state;
    assert_int_equal(kvt_ring_init(&ring, 64), 0);
    for (uint32_t i = 0; i < PRODUCERS; i++) {
        producers[i] = (struct producer){
            .ring = &ring, .items = kvt_alloc_zeroed(ITEMS_EACH, sizeof(struct item)), .idx = i};
        assert_non_null(producers[i].items);
        assert_int_equal(pthread_create(&threads[i], NULL, produce, &producers[i]), 0);
    }
    for (uint32_t taken = 0; taken < PRODUCERS * ITEMS_EACH;) {
        const struct item *item = kvt_ring_take(&ring);

        if (item == NULL) {
            sched_yield();
            continue;
        }
        assert_int_equal(item->number, next[item->producer]);
        next[item->producer]++;
        taken++;
    }
    assert_null(kvt_ring_take(&ring));
    for (uint32_t i = 0; i < PRODUCERS; i++) {
        assert_int_equal(pthread_join(threads[i], NULL), 0);
        kvt_free(producers[i].items);
    }
    kvt_ring_deinit(&ring);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_order_and_full),
        cmocka_unit_test(test_no_memory),
        cmocka_unit_test(test_many_producers),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
