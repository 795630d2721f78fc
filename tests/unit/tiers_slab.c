/* The slab allocator against a naive oracle: a list of taken ranges. Every step is random with a
 * printed seed; the oracle knows nothing of units or classes, only that ranges that are taken must
 * not overlap, lie inside the capacity, and keep their owner and generation. */
#include <stdlib.h>
#include <string.h>

#include "tests/common/cmocka.h"
#include "tiers/slab.h"

#define TAKEN_MAX 4096u
#define CLASSES 6u
#define ALIGN_BYTES 512u

struct taken {
    struct kvt_slot slot;
    uint64_t offset, bytes;
    uint32_t owner;
};

struct oracle {
    struct taken taken[TAKEN_MAX];
    uint32_t count;
    struct kvt_slot stale[64]; /* given back some time ago */
    uint32_t stale_count;
};

static uint64_t random_next(uint64_t *state)
{
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state;
}

static void oracle_add(struct oracle *oracle, const struct kvt_slab *slab, uint32_t class_idx,
                       uint64_t capacity, struct kvt_slot slot, uint32_t owner)
{
    struct taken t = {.slot = slot,
                      .offset = kvt_slab_offset(slab, slot),
                      .bytes = kvt_slab_slot_bytes(slab, class_idx),
                      .owner = owner};

    assert_true(t.offset + t.bytes <= capacity);
    assert_int_equal(t.offset % ALIGN_BYTES, 0);
    assert_int_not_equal(slot.generation, 0);
    for (uint32_t i = 0; i < oracle->count; i++)
        assert_true(t.offset + t.bytes <= oracle->taken[i].offset ||
                    oracle->taken[i].offset + oracle->taken[i].bytes <= t.offset);
    for (uint32_t i = 0; i < oracle->stale_count; i++)
        assert_false(oracle->stale[i].idx == slot.idx &&
                     oracle->stale[i].generation == slot.generation);
    oracle->taken[oracle->count++] = t;
}

static void oracle_give(struct oracle *oracle, struct kvt_slab *slab, uint32_t i)
{
    struct taken t = oracle->taken[i];

    assert_true(kvt_slab_is_current(slab, t.slot));
    assert_int_equal(kvt_slab_owner(slab, t.slot), t.owner);
    assert_int_equal(kvt_slab_offset(slab, t.slot), t.offset);
    kvt_slab_give(slab, t.slot);
    assert_false(kvt_slab_is_current(slab, t.slot));
    oracle->stale[oracle->stale_count < 64 ? oracle->stale_count++ : t.owner % 64] = t.slot;
    oracle->taken[i] = oracle->taken[--oracle->count];
}

static void oracle_give_owner(struct oracle *oracle, struct kvt_slab *slab, uint32_t owner)
{
    for (uint32_t i = 0; i < oracle->count; i++) {
        if (oracle->taken[i].owner == owner) {
            oracle_give(oracle, slab, i);
            return;
        }
    }
    fail_msg("reclaim named owner %u, who has nothing", owner);
}

/* Reclaim until a take works or nothing can be picked; returns whether the take worked. */
static bool reclaim_and_take(struct oracle *oracle, struct kvt_slab *slab, uint32_t class_idx,
                             uint32_t owner, uint64_t capacity)
{
    uint32_t owners[8], count;
    struct kvt_slot slot;

    for (int round = 0; round < 10000; round++) {
        count = kvt_slab_reclaim(slab, class_idx, KVT_COUNT_OF(owners), owners);
        for (uint32_t i = 0; i < count; i++)
            oracle_give_owner(oracle, slab, owners[i]);
        if (kvt_slab_take(slab, class_idx, owner, &slot) == 0) {
            oracle_add(oracle, slab, class_idx, capacity, slot, owner);
            kvt_slab_reclaim_cancel(slab);
            return true;
        }
        if (count == 0)
            return false;
    }
    fail_msg("reclaim never ends");
    return false;
}

static void model_run(uint64_t seed, uint32_t steps)
{
    static const uint64_t sizes[CLASSES] = {512, 3000, 9000, 66000, 40000, 200000};
    struct kvt_slab_config config = {.capacity_bytes = (2 + seed % 30) * 65536 + seed % 5000,
                                     .unit_bytes = 65536,
                                     .align_bytes = ALIGN_BYTES};
    uint64_t state = seed * 0x9e3779b97f4a7c15ull + 1, capacity;
    struct oracle *oracle = calloc(1, sizeof(*oracle));
    struct kvt_slab_stats stats;
    struct kvt_slab *slab;
    const char *why = "";
    uint32_t classes[CLASSES], classes_count = 0, owner = 1;

    assert_int_equal(kvt_slab_new(&slab, &config), 0);
    kvt_slab_stats(slab, &stats);
    capacity = stats.capacity_bytes;
    for (uint32_t i = 0; i < CLASSES; i++) {
        int r = kvt_slab_class(slab, sizes[i], &classes[classes_count]);

        assert_int_equal(r, sizes[i] > capacity ? KVT_SLAB_E_TOO_BIG : 0);
        classes_count += r == 0;
    }
    for (uint32_t step = 0; step < steps; step++) {
        uint32_t c = classes[random_next(&state) % classes_count];
        uint64_t dice = random_next(&state) % 100;
        uint64_t room = kvt_slab_room_slots(slab, c);
        struct kvt_slot slot;

        if (dice < 55 && oracle->count < TAKEN_MAX) {
            int r = kvt_slab_take(slab, c, owner, &slot);

            assert_int_equal(r, room > 0 ? 0 : KVT_SLAB_E_FULL);
            if (r == 0) {
                oracle_add(oracle, slab, c, capacity, slot, owner++);
                assert_true(kvt_slab_room_slots(slab, c) >= room - 1 || room == 0);
            } else if (dice < 10) {
                (void)reclaim_and_take(oracle, slab, c, owner++, capacity);
            }
        } else if (oracle->count > 0 && dice < 97) {
            oracle_give(oracle, slab, (uint32_t)(random_next(&state) % oracle->count));
        } else if (dice == 97) {
            uint32_t owners[4];

            (void)kvt_slab_reclaim(slab, c, 4, owners);
        } else if (dice == 98) {
            kvt_slab_reclaim_cancel(slab);
        }
        if (!kvt_slab_check(slab, &why))
            fail_msg("seed %llu step %u: %s", (unsigned long long)seed, step, why);
    }
    while (oracle->count > 0)
        oracle_give(oracle, slab, oracle->count - 1);
    kvt_slab_reclaim_cancel(slab);
    kvt_slab_stats(slab, &stats);
    assert_int_equal(stats.slabs_bytes, 0);
    assert_int_equal(stats.taken_slots + stats.taken_bytes, 0);
    (void)kvt_slab_free(slab);
    free(oracle);
}

static void test_model(void **state)
{
    const char *text = getenv("KVT_SEED");
    uint64_t first = text != NULL ? strtoull(text, NULL, 10) : 1;

    (void)state;
    print_message("seeds from %llu (set KVT_SEED)\n", (unsigned long long)first);
    for (uint64_t seed = first; seed < first + (text != NULL ? 1 : 60); seed++)
        model_run(seed, 3000);
}

static void test_waste(void **state)
{
    struct kvt_slab_config config = {
        .capacity_bytes = 128 * 2 * KVT_MIB, .unit_bytes = 2 * KVT_MIB, .align_bytes = 4096};
    static const uint64_t sizes[] = {64 << 10,   264 << 10,  900 << 10,  1100 << 10,
                                     1300 << 10, 2100 << 10, 5000 << 10, 20 << 20};

    (void)state;
    for (size_t i = 0; i < KVT_COUNT_OF(sizes); i++) {
        struct kvt_slab *slab;
        struct kvt_slab_stats stats;
        struct kvt_slot slot;
        uint32_t class_idx;
        uint64_t last = 0;

        assert_int_equal(kvt_slab_new(&slab, &config), 0);
        assert_int_equal(kvt_slab_class(slab, sizes[i], &class_idx), 0);
        assert_int_equal(kvt_slab_take(slab, class_idx, 1, &slot), 0);
        last = kvt_slab_offset(slab, slot);
        /* Neighbouring takes get neighbouring slots while a slab has room. */
        kvt_slab_stats(slab, &stats);
        for (uint64_t k = 1; (k + 1) * sizes[i] <= stats.slabs_bytes; k++) {
            assert_int_equal(kvt_slab_take(slab, class_idx, 1, &slot), 0);
            assert_int_equal(kvt_slab_offset(slab, slot), last + sizes[i]);
            last += sizes[i];
        }
        while (kvt_slab_take(slab, class_idx, 1, &slot) == 0)
            ;
        kvt_slab_stats(slab, &stats);
        if (stats.taken_bytes * 100 < stats.capacity_bytes * 85)
            fail_msg("size %llu uses only %llu of %llu", (unsigned long long)sizes[i],
                     (unsigned long long)stats.taken_bytes,
                     (unsigned long long)stats.capacity_bytes);
        assert_int_equal(kvt_slab_room_slots(slab, class_idx), 0);
        (void)kvt_slab_free(slab);
    }
}

static void test_generations_outlive_slabs(void **state)
{
    struct kvt_slab_config config = {
        .capacity_bytes = 4096, .unit_bytes = 4096, .align_bytes = 512};
    struct kvt_slot first, slot;
    struct kvt_slab *slab;
    uint32_t small, big;

    (void)state;
    assert_int_equal(kvt_slab_new(&slab, &config), 0);
    assert_int_equal(kvt_slab_class(slab, 512, &small), 0);
    assert_int_equal(kvt_slab_class(slab, 4096, &big), 0);
    assert_int_equal(kvt_slab_take(slab, small, 7, &first), 0);
    kvt_slab_give(slab, first);
    for (int i = 0; i < 100; i++) {
        assert_int_equal(kvt_slab_take(slab, i % 2 ? small : big, 7, &slot), 0);
        assert_int_equal(slot.idx, first.idx);
        assert_true(slot.generation > first.generation);
        kvt_slab_give(slab, slot);
    }
    assert_false(kvt_slab_is_current(slab, first));
    assert_false(kvt_slab_is_current(slab, KVT_SLOT_NONE));
    assert_false(kvt_slab_is_current(slab, (struct kvt_slot){UINT32_MAX, 1}));
    (void)kvt_slab_free(slab);
}

static void test_reclaim_moves_room(void **state)
{
    struct kvt_slab_config config = {
        .capacity_bytes = 16 * 65536, .unit_bytes = 65536, .align_bytes = 4096};
    struct kvt_slab *slab;
    struct kvt_slot slots[256];
    uint32_t small, big, count = 0, owners[256], named;
    struct kvt_slot slot;

    (void)state;
    assert_int_equal(kvt_slab_new(&slab, &config), 0);
    assert_int_equal(kvt_slab_class(slab, 4096, &small), 0);
    assert_int_equal(kvt_slab_class(slab, 3 * 65536, &big), 0);
    while (kvt_slab_take(slab, small, count, &slot) == 0)
        slots[count++] = slot;
    assert_int_equal(count, 256);
    assert_int_equal(kvt_slab_take(slab, big, 0, &slot), KVT_SLAB_E_FULL);
    /* Empty most of the units 5, 6 and 7: they are the cheapest. */
    for (uint32_t i = 5 * 16; i < 8 * 16; i++)
        if (i % 16 != 3)
            kvt_slab_give(slab, slots[i]);
    named = kvt_slab_reclaim(slab, big, 256, owners);
    assert_int_equal(named, 3);
    for (uint32_t i = 0; i < named; i++)
        assert_int_equal(owners[i], (5 + i) * 16 + 3);
    /* Closed: its free slots are nobody's. */
    assert_int_equal(kvt_slab_take(slab, small, 0, &slot), KVT_SLAB_E_FULL);
    kvt_slab_give(slab, slots[owners[0]]);
    assert_int_equal(kvt_slab_take(slab, small, 0, &slot), KVT_SLAB_E_FULL);
    assert_int_equal(kvt_slab_reclaim(slab, big, 256, owners), 2);
    kvt_slab_give(slab, slots[owners[0]]);
    kvt_slab_give(slab, slots[owners[1]]);
    assert_int_equal(kvt_slab_room_slots(slab, big), 1);
    assert_int_equal(kvt_slab_take(slab, big, 9, &slot), 0);
    assert_int_equal(kvt_slab_offset(slab, slot), 5 * 65536);
    (void)kvt_slab_free(slab);
}

static void test_limits(void **state)
{
    struct kvt_slab_config config = {
        .capacity_bytes = 1 << 20, .unit_bytes = 65536, .align_bytes = 512};
    struct kvt_slab_config wrong = config;
    struct kvt_slab_stats stats;
    struct kvt_slab *slab = NULL;
    struct kvt_slot slot;
    uint32_t class_idx = 0;
    int r = 0;

    (void)state;
    wrong.unit_bytes = 65537;
    assert_int_equal(kvt_slab_new(&slab, &wrong), -EINVAL);
    wrong = config;
    wrong.align_bytes = 0;
    assert_int_equal(kvt_slab_new(&slab, &wrong), -EINVAL);
    wrong = config;
    wrong.capacity_bytes = UINT64_MAX;
    assert_int_equal(kvt_slab_new(&slab, &wrong), -EINVAL);
    assert_int_equal(kvt_slab_new(&slab, &config), 0);
    assert_int_equal(kvt_slab_class(slab, (1 << 20) + 1, &class_idx), KVT_SLAB_E_TOO_BIG);
    for (uint64_t bytes = 512; r == 0; bytes += 512)
        r = kvt_slab_class(slab, bytes, &class_idx);
    assert_int_equal(r, KVT_SLAB_E_CLASSES);
    kvt_slab_stats(slab, &stats);
    (void)kvt_slab_free(slab);
    /* Metadata has a bound too: past it the tier is full, whatever is free. */
    config.meta_bytes_max = stats.meta_bytes + 100;
    assert_int_equal(kvt_slab_new(&slab, &config), 0);
    assert_int_equal(kvt_slab_class(slab, 512, &class_idx), 0);
    assert_int_equal(kvt_slab_take(slab, class_idx, 1, &slot), KVT_SLAB_E_FULL);
    (void)kvt_slab_free(slab);
    (void)kvt_slab_free(NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_model),
        cmocka_unit_test(test_waste),
        cmocka_unit_test(test_generations_outlive_slabs),
        cmocka_unit_test(test_reclaim_moves_room),
        cmocka_unit_test(test_limits),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
