/* The slab allocator against a naive oracle: a list of taken ranges. Every step is random with a
 * printed seed; the oracle knows nothing of units or classes, only that ranges that are taken must
 * not overlap, lie inside one zone, and keep their owner and generation. */
#include <stdlib.h>
#include <string.h>

#include "tests/common/cmocka.h"
#include "tiers/slab.h"

#define TAKEN_MAX 4096u
#define CLASSES 6u
#define ALIGN_BYTES 512u
#define UNIT_BYTES 65536u

struct taken {
    struct kvt_slot slot;
    uint64_t offset, bytes, run_offset;
    uint32_t owner, class_idx, zone;
};

struct oracle {
    struct kvt_slab *slab;
    uint64_t random;
    uint64_t zone_base[KVT_ZONES_MAX], zone_bytes[KVT_ZONES_MAX];
    bool is_closed[KVT_ZONES_MAX];
    uint32_t zones_count;
    uint32_t classes[CLASSES], classes_count;
    struct taken taken[TAKEN_MAX];
    uint32_t count, owner_next;
    struct taken stale[64]; /* given back some time ago */
    uint32_t stale_count;
    uint32_t adopted;
};

static uint64_t random_next(uint64_t *state)
{
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state;
}

static uint64_t pick(struct oracle *oracle, uint64_t count)
{
    return random_next(&oracle->random) % count;
}

static void oracle_add(struct oracle *oracle, uint32_t class_idx, struct kvt_slot slot,
                       uint32_t owner)
{
    const struct kvt_slab *slab = oracle->slab;
    struct taken t = {.slot = slot,
                      .offset = kvt_slab_offset(slab, slot),
                      .bytes = kvt_slab_slot_bytes(slab, class_idx),
                      .run_offset = kvt_slab_run_offset(slab, slot),
                      .owner = owner,
                      .class_idx = class_idx,
                      .zone = kvt_slab_zone(slab, slot)};

    assert_in_range(t.zone, 0, oracle->zones_count - 1);
    assert_false(oracle->is_closed[t.zone]);
    assert_true(t.run_offset >= oracle->zone_base[t.zone] && t.run_offset <= t.offset);
    assert_true(t.offset + t.bytes <= oracle->zone_base[t.zone] + oracle->zone_bytes[t.zone]);
    assert_int_equal((t.run_offset - oracle->zone_base[t.zone]) % UNIT_BYTES, 0);
    assert_int_equal(t.offset % ALIGN_BYTES, 0);
    assert_int_not_equal(slot.generation, 0);
    for (uint32_t i = 0; i < oracle->count; i++)
        assert_true(t.offset + t.bytes <= oracle->taken[i].offset ||
                    oracle->taken[i].offset + oracle->taken[i].bytes <= t.offset);
    for (uint32_t i = 0; i < oracle->stale_count; i++)
        assert_false(oracle->stale[i].slot.idx == slot.idx &&
                     oracle->stale[i].slot.generation == slot.generation);
    oracle->taken[oracle->count++] = t;
}

static void oracle_give(struct oracle *oracle, uint32_t i)
{
    struct kvt_slab *slab = oracle->slab;
    struct taken t = oracle->taken[i];

    assert_true(kvt_slab_is_current(slab, t.slot));
    assert_int_equal(kvt_slab_owner(slab, t.slot), t.owner);
    assert_int_equal(kvt_slab_offset(slab, t.slot), t.offset);
    assert_int_equal(kvt_slab_run_offset(slab, t.slot), t.run_offset);
    assert_int_equal(kvt_slab_zone(slab, t.slot), t.zone);
    kvt_slab_give(slab, t.slot);
    assert_false(kvt_slab_is_current(slab, t.slot));
    oracle->stale[oracle->stale_count < 64 ? oracle->stale_count++ : t.owner % 64] = t;
    oracle->taken[i] = oracle->taken[--oracle->count];
}

static void oracle_give_owner(struct oracle *oracle, uint32_t owner)
{
    for (uint32_t i = 0; i < oracle->count; i++) {
        if (oracle->taken[i].owner == owner) {
            assert_false(oracle->is_closed[oracle->taken[i].zone]);
            oracle_give(oracle, i);
            return;
        }
    }
    fail_msg("reclaim named owner %u, who has nothing", owner);
}

/* Reclaim until a take works or nothing can be picked. */
static void reclaim_and_take(struct oracle *oracle, uint32_t class_idx)
{
    uint32_t owners[8], count, owner = oracle->owner_next++;
    struct kvt_slot slot;

    for (int round = 0; round < 10000; round++) {
        count = kvt_slab_reclaim(oracle->slab, class_idx, KVT_COUNT_OF(owners), owners);
        for (uint32_t i = 0; i < count; i++)
            oracle_give_owner(oracle, owners[i]);
        if (kvt_slab_take(oracle->slab, class_idx, owner, &slot) == 0) {
            oracle_add(oracle, class_idx, slot, owner);
            kvt_slab_reclaim_cancel(oracle->slab);
            return;
        }
        if (count == 0)
            return;
    }
    fail_msg("reclaim never ends");
}

/* What a take promises about room holds as long as no slab is shorter than the allocator itself
 * would have made it. */
static void step_take(struct oracle *oracle, uint32_t class_idx)
{
    uint64_t room = kvt_slab_room_slots(oracle->slab, class_idx);
    struct kvt_slot slot;
    int r = kvt_slab_take(oracle->slab, class_idx, oracle->owner_next, &slot);

    if (oracle->adopted == 0 || room > 0)
        assert_int_equal(r, room > 0 ? 0 : KVT_SLAB_E_FULL);
    if (r == 0) {
        oracle_add(oracle, class_idx, slot, oracle->owner_next++);
        if (oracle->adopted == 0)
            assert_true(kvt_slab_room_slots(oracle->slab, class_idx) >= room - 1 || room == 0);
    } else if (pick(oracle, 5) == 0) {
        reclaim_and_take(oracle, class_idx);
    }
}

static void step_take_in(struct oracle *oracle, uint32_t class_idx)
{
    uint32_t zone = (uint32_t)pick(oracle, oracle->zones_count);
    struct kvt_slot slot;
    int r = kvt_slab_take_in(oracle->slab, class_idx, zone, oracle->owner_next, &slot);

    if (r == 0) {
        oracle_add(oracle, class_idx, slot, oracle->owner_next++);
        assert_int_equal(kvt_slab_zone(oracle->slab, slot), zone);
    } else {
        assert_int_equal(r, KVT_SLAB_E_FULL);
    }
}

static void step_zone(struct oracle *oracle)
{
    uint32_t zone = (uint32_t)pick(oracle, oracle->zones_count);

    oracle->is_closed[zone] = !oracle->is_closed[zone];
    (oracle->is_closed[zone] ? kvt_slab_zone_close : kvt_slab_zone_open)(oracle->slab, zone);
}

/* Adopts what was there once, what is there now, near misses of both, and garbage. */
static void step_adopt(struct oracle *oracle)
{
    const struct taken *from = oracle->stale_count > 0
                                   ? &oracle->stale[pick(oracle, oracle->stale_count)]
                                   : &(struct taken){.bytes = 0};
    uint64_t offset, run_offset;
    uint32_t class_idx, kind = (uint32_t)pick(oracle, 8);
    struct kvt_slot slot = {77, 77};
    int r;

    if (oracle->count > 0 && kind == 1)
        from = &oracle->taken[pick(oracle, oracle->count)];
    offset = from->offset;
    run_offset = from->run_offset;
    class_idx = from->class_idx;
    if (kind == 2)
        class_idx = (uint32_t)pick(oracle, CLASSES + 1);
    if (kind == 3)
        run_offset += (pick(oracle, 9) - 4) * UNIT_BYTES;
    if (kind == 4)
        offset += (pick(oracle, 9) - 4) * ALIGN_BYTES;
    if (kind == 5)
        offset = random_next(&oracle->random) >> pick(oracle, 64);
    if (kind == 6)
        run_offset = random_next(&oracle->random) >> pick(oracle, 64);
    if (kind == 7) { /* right in form, anywhere: may be over the end of its zone */
        run_offset = oracle->zone_base[from->zone] + pick(oracle, 40) * UNIT_BYTES;
        offset =
            run_offset + pick(oracle, 20) * kvt_slab_slot_bytes(oracle->slab, oracle->classes[0]);
    }
    r = kvt_slab_adopt(oracle->slab, class_idx, offset, run_offset, oracle->owner_next, &slot);
    if (r == 0) {
        assert_int_equal(kvt_slab_offset(oracle->slab, slot), offset);
        assert_int_equal(kvt_slab_run_offset(oracle->slab, slot), run_offset);
        oracle_add(oracle, class_idx, slot, oracle->owner_next++);
        oracle->adopted++;
    } else {
        assert_int_equal(r, KVT_SLAB_E_TAKEN);
        assert_int_equal(slot.idx, 77);
    }
}

static void oracle_init(struct oracle *oracle, uint64_t seed)
{
    static const uint64_t sizes[CLASSES] = {512, 3000, 9000, 66000, 40000, 200000};
    struct kvt_slab_config config = {.capacity_bytes = (2 + seed % 30) * UNIT_BYTES + seed % 5000,
                                     .unit_bytes = UNIT_BYTES,
                                     .align_bytes = ALIGN_BYTES};
    struct kvt_slab_stats stats;
    uint64_t base = 0, units_max = 0, units = 0;

    oracle->random = seed * 0x9e3779b97f4a7c15ull + 1;
    oracle->owner_next = 1;
    oracle->zones_count = 1;
    oracle->zone_bytes[0] = config.capacity_bytes;
    if (seed % 3 != 0) { /* some zones are empty, some of less than a unit, many with a rest */
        config.zones_count = oracle->zones_count = (uint32_t)(1 + pick(oracle, KVT_ZONES_MAX));
        for (uint32_t z = 0; z < config.zones_count; z++)
            config.zone_bytes[z] = oracle->zone_bytes[z] =
                pick(oracle, 8) * pick(oracle, 200) * ALIGN_BYTES;
        config.zone_bytes[pick(oracle, config.zones_count)] = 3 * UNIT_BYTES;
    }
    for (uint32_t z = 0; z < oracle->zones_count; z++) {
        if (config.zones_count > 0)
            oracle->zone_bytes[z] = config.zone_bytes[z];
        oracle->zone_base[z] = base;
        base += oracle->zone_bytes[z];
        units_max = KVT_MAX(units_max, oracle->zone_bytes[z] / UNIT_BYTES);
        units += oracle->zone_bytes[z] / UNIT_BYTES;
    }
    assert_int_equal(kvt_slab_new(&oracle->slab, &config), 0);
    kvt_slab_stats(oracle->slab, &stats);
    assert_int_equal(stats.capacity_bytes, units * UNIT_BYTES);
    for (uint32_t i = 0; i < CLASSES; i++) {
        int r = kvt_slab_class(oracle->slab, sizes[i], &oracle->classes[oracle->classes_count]);

        assert_int_equal(r, sizes[i] > units_max * UNIT_BYTES ? KVT_SLAB_E_TOO_BIG : 0);
        oracle->classes_count += r == 0;
    }
}

/* The recount of the allocator, and its sums against the oracle's list. */
static void oracle_check(const struct oracle *oracle, uint64_t seed, uint32_t step)
{
    struct kvt_slab_stats all, zone;
    uint64_t open_slots = 0, slots = 0;
    const char *why = "";

    if (!kvt_slab_check(oracle->slab, &why))
        fail_msg("seed %llu step %u: %s", (unsigned long long)seed, step, why);
    for (uint32_t z = 0; z < oracle->zones_count; z++) {
        kvt_slab_zone_stats(oracle->slab, z, &zone);
        assert_int_equal(zone.capacity_bytes, oracle->zone_bytes[z] / UNIT_BYTES * UNIT_BYTES);
        slots += zone.taken_slots;
        open_slots += oracle->is_closed[z] ? 0 : zone.taken_slots;
    }
    kvt_slab_stats(oracle->slab, &all);
    assert_int_equal(slots, oracle->count);
    assert_int_equal(all.taken_slots, open_slots);
}

static void oracle_deinit(struct oracle *oracle)
{
    struct kvt_slab_stats stats;

    while (oracle->count > 0)
        oracle_give(oracle, oracle->count - 1);
    kvt_slab_reclaim_cancel(oracle->slab);
    for (uint32_t z = 0; z < oracle->zones_count; z++)
        kvt_slab_zone_open(oracle->slab, z);
    kvt_slab_stats(oracle->slab, &stats);
    assert_int_equal(stats.slabs_bytes, 0);
    assert_int_equal(stats.taken_slots + stats.taken_bytes, 0);
    (void)kvt_slab_free(oracle->slab);
}

static void model_run(uint64_t seed, uint32_t steps)
{
    struct oracle *oracle = calloc(1, sizeof(*oracle));
    bool has_adopts = seed % 2 == 0;

    oracle_init(oracle, seed);
    for (uint32_t step = 0; step < steps; step++) {
        uint32_t c = oracle->classes[pick(oracle, oracle->classes_count)];
        uint64_t dice = pick(oracle, 100);
        uint32_t owners[4];

        if (dice < 45 && oracle->count < TAKEN_MAX - 1)
            step_take(oracle, c);
        else if (dice < 50 && oracle->count < TAKEN_MAX)
            step_take_in(oracle, c);
        else if (dice < 60 && has_adopts && oracle->count < TAKEN_MAX)
            step_adopt(oracle);
        else if (dice < 96 && oracle->count > 0)
            oracle_give(oracle, (uint32_t)pick(oracle, oracle->count));
        else if (dice == 97)
            (void)kvt_slab_reclaim(oracle->slab, c, 4, owners);
        else if (dice == 98)
            kvt_slab_reclaim_cancel(oracle->slab);
        else if (dice == 99)
            step_zone(oracle);
        oracle_check(oracle, seed, step);
    }
    oracle_deinit(oracle);
    free(oracle);
}

static uint64_t seed_first(void)
{
    const char *text = getenv("KVT_SEED");
    uint64_t first = text != NULL ? strtoull(text, NULL, 10) : 1;

    print_message("seeds from %llu (set KVT_SEED)\n", (unsigned long long)first);
    return first;
}

static void test_model(void **state)
{
    uint64_t first = seed_first();

    (void)state;
    for (uint64_t seed = first; seed < first + (getenv("KVT_SEED") != NULL ? 1 : 60); seed++)
        model_run(seed, 3000);
}

/* Fills and thins out one allocator without adopts, then adopts all of it into another of the same
 * zones, in random order: the maps are the same, and go on working. */
static void restart_run(uint64_t seed)
{
    struct oracle *old = calloc(1, sizeof(*old)), *new = calloc(1, sizeof(*new));

    oracle_init(old, seed);
    oracle_init(new, seed);
    for (uint32_t step = 0; step < 2000; step++) {
        uint32_t c = old->classes[pick(old, old->classes_count)];

        if (pick(old, 100) < 60 && old->count < TAKEN_MAX - 1)
            step_take(old, c);
        else if (old->count > 0)
            oracle_give(old, (uint32_t)pick(old, old->count));
    }
    kvt_slab_reclaim_cancel(old->slab);
    for (uint32_t i = old->count; i > 1; i--) {
        uint32_t j = (uint32_t)pick(old, i);
        struct taken t = old->taken[i - 1];

        old->taken[i - 1] = old->taken[j];
        old->taken[j] = t;
    }
    for (uint32_t i = 0; i < old->count; i++) {
        const struct taken *t = &old->taken[i];
        struct kvt_slot slot;
        int r = kvt_slab_adopt(new->slab, t->class_idx, t->offset, t->run_offset, t->owner, &slot);

        if (r != 0)
            fail_msg("seed %llu: slot %u of %u is not taken in: %d", (unsigned long long)seed, i,
                     old->count, r);
        oracle_add(new, t->class_idx, slot, t->owner);
        assert_int_equal(new->taken[i].offset, t->offset);
        assert_int_equal(new->taken[i].run_offset, t->run_offset);
        assert_int_equal(new->taken[i].zone, t->zone);
        assert_int_equal(slot.idx, t->slot.idx);
        new->adopted++;
        /* A second time it is there. */
        assert_int_equal(
            kvt_slab_adopt(new->slab, t->class_idx, t->offset, t->run_offset, 0, &slot),
            KVT_SLAB_E_TAKEN);
    }
    oracle_check(new, seed, 0);
    new->owner_next = old->owner_next;
    for (uint32_t step = 0; step < 300; step++) {
        uint32_t c = new->classes[pick(new, new->classes_count)];

        if (pick(new, 2) == 0 && new->count < TAKEN_MAX - 1)
            step_take(new, c);
        else if (new->count > 0)
            oracle_give(new, (uint32_t)pick(new, new->count));
        oracle_check(new, seed, step);
    }
    oracle_deinit(old);
    oracle_deinit(new);
    free(old);
    free(new);
}

static void test_restart(void **state)
{
    uint64_t first = seed_first();

    (void)state;
    for (uint64_t seed = first; seed < first + (getenv("KVT_SEED") != NULL ? 1 : 200); seed++)
        restart_run(seed);
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

static void test_zones(void **state)
{
    struct kvt_slab_config config = {
        .unit_bytes = 65536,
        .align_bytes = 4096,
        .zones_count = 4,
        .zone_bytes = {65536 + 4096, 0, 3 * 65536 + 8192, 4096},
    };
    struct kvt_slab_config wrong = config;
    struct kvt_slab_stats stats;
    struct kvt_slab *slab;
    struct kvt_slot slot, first;
    uint32_t class_idx, big, owners[4];

    (void)state;
    wrong.zone_bytes[1] = 4095;
    assert_int_equal(kvt_slab_new(&slab, &wrong), -EINVAL);
    wrong = config;
    wrong.zones_count = KVT_ZONES_MAX + 1;
    assert_int_equal(kvt_slab_new(&slab, &wrong), -EINVAL);
    wrong = config;
    wrong.zone_bytes[3] = UINT64_MAX - 4095;
    assert_int_equal(kvt_slab_new(&slab, &wrong), -EINVAL);

    wrong = config; /* all devices are out of service: any size is known, none is ever taken */
    memset(wrong.zone_bytes, 0, sizeof(wrong.zone_bytes));
    assert_int_equal(kvt_slab_new(&slab, &wrong), 0);
    assert_int_equal(kvt_slab_class(slab, 3 * 65536, &class_idx), 0);
    assert_int_equal(kvt_slab_room_slots(slab, class_idx), 0);
    assert_int_equal(kvt_slab_take(slab, class_idx, 7, &first), KVT_SLAB_E_FULL);
    slab = kvt_slab_free(slab);

    assert_int_equal(kvt_slab_new(&slab, &config), 0);
    /* A slot is never larger than the largest zone. */
    assert_int_equal(kvt_slab_class(slab, 4 * 65536, &big), KVT_SLAB_E_TOO_BIG);
    assert_int_equal(kvt_slab_class(slab, 3 * 65536, &big), 0);
    assert_int_equal(kvt_slab_class(slab, 32768, &class_idx), 0);
    assert_int_equal(kvt_slab_room_slots(slab, class_idx), 2 + 6);
    assert_int_equal(kvt_slab_room_slots(slab, big), 1);
    assert_int_equal(kvt_slab_take_in(slab, class_idx, 2, 7, &first), 0);
    assert_int_equal(kvt_slab_offset(slab, first), 65536 + 4096);
    assert_int_equal(kvt_slab_zone(slab, first), 2);
    assert_int_equal(kvt_slab_take_in(slab, class_idx, 1, 7, &slot), KVT_SLAB_E_FULL);
    assert_int_equal(kvt_slab_take_in(slab, class_idx, 3, 7, &slot), KVT_SLAB_E_FULL);

    assert_int_equal(kvt_slab_reclaim(slab, big, 4, owners), 1);
    assert_int_equal(kvt_slab_room_slots(slab, class_idx), 2);
    kvt_slab_zone_close(slab, 2); /* and the reclaim is over */
    assert_int_equal(kvt_slab_reclaim(slab, big, 4, owners), 0);
    kvt_slab_stats(slab, &stats);
    assert_int_equal(stats.capacity_bytes, 65536);
    assert_int_equal(stats.taken_slots, 0);
    kvt_slab_zone_stats(slab, 2, &stats);
    assert_int_equal(stats.capacity_bytes, 3 * 65536);
    assert_int_equal(stats.taken_slots, 1);
    assert_int_equal(kvt_slab_take_in(slab, class_idx, 2, 7, &slot), KVT_SLAB_E_FULL);
    assert_int_equal(kvt_slab_adopt(slab, class_idx, 65536 + 4096 + 32768, 65536 + 4096, 7, &slot),
                     KVT_SLAB_E_TAKEN);
    assert_int_equal(kvt_slab_take(slab, class_idx, 8, &slot), 0);
    assert_int_equal(kvt_slab_zone(slab, slot), 0);
    assert_true(kvt_slab_is_current(slab, first));
    kvt_slab_give(slab, first);
    kvt_slab_zone_open(slab, 2);
    assert_int_equal(kvt_slab_room_slots(slab, class_idx), 1 + 6);
    assert_int_equal(kvt_slab_take(slab, big, 9, &slot), 0);
    assert_int_equal(kvt_slab_offset(slab, slot), 65536 + 4096);
    (void)kvt_slab_free(slab);
}

/* The rest of a zone that is no whole unit is nobody's, though the next number of a unit is the
 * first one of the zone behind it. */
static void test_adopt_in_rest(void **state)
{
    struct kvt_slab_config config = {.unit_bytes = 65536,
                                     .align_bytes = 4096,
                                     .zones_count = 3,
                                     .zone_bytes = {2 * 65536 + 32768, 65536, 65536}};
    uint64_t second = config.zone_bytes[0], rest = (uint64_t)2 * 65536;
    struct kvt_slab *slab;
    struct kvt_slot slot;
    uint32_t class_idx;

    (void)state;
    assert_int_equal(kvt_slab_new(&slab, &config), 0);
    assert_int_equal(kvt_slab_class(slab, 32768, &class_idx), 0);
    assert_int_equal(kvt_slab_adopt(slab, class_idx, rest, rest, 1, &slot), KVT_SLAB_E_TAKEN);
    assert_int_equal(kvt_slab_adopt(slab, class_idx, second, second, 1, &slot), 0);
    assert_int_equal(kvt_slab_zone(slab, slot), 1);
    assert_int_equal(kvt_slab_adopt(slab, class_idx, rest, rest, 2, &slot), KVT_SLAB_E_TAKEN);
    assert_int_equal(kvt_slab_adopt(slab, class_idx, rest + 32768, rest, 2, &slot),
                     KVT_SLAB_E_TAKEN);
    (void)kvt_slab_free(slab);
}

/* An adopted slab is short until its class needs room, and then as long as any. */
static void test_adopted_slab_grows(void **state)
{
    struct kvt_slab_config config = {
        .capacity_bytes = 6 * 65536, .unit_bytes = 65536, .align_bytes = 4096};
    struct kvt_slab *slab;
    struct kvt_slot slot;
    struct kvt_slab_stats stats;
    uint32_t class_idx, other;

    (void)state;
    assert_int_equal(kvt_slab_new(&slab, &config), 0);
    assert_int_equal(kvt_slab_class(slab, 98304, &class_idx), 0); /* two in three units */
    assert_int_equal(kvt_slab_class(slab, 65536, &other), 0);
    assert_int_equal(kvt_slab_adopt(slab, class_idx, 65536, 65536, 1, &slot), 0);
    kvt_slab_stats(slab, &stats);
    assert_int_equal(stats.slabs_bytes, 2 * 65536);
    assert_int_equal(kvt_slab_take(slab, class_idx, 2, &slot), 0);
    assert_int_equal(kvt_slab_offset(slab, slot), 65536 + 98304);
    assert_int_equal(kvt_slab_run_offset(slab, slot), 65536);
    kvt_slab_stats(slab, &stats);
    assert_int_equal(stats.slabs_bytes, 3 * 65536);
    /* A third slot of that slab never was; the next one begins behind it. */
    assert_int_equal(kvt_slab_adopt(slab, class_idx, 65536 + 2 * 98304, 65536, 3, &slot),
                     KVT_SLAB_E_TAKEN);
    assert_int_equal(kvt_slab_adopt(slab, other, 3 * 65536, 3 * 65536, 3, &slot), KVT_SLAB_E_TAKEN);
    assert_int_equal(kvt_slab_adopt(slab, other, 4 * 65536, 4 * 65536, 3, &slot), 0);
    /* A slab of it needs two units, and only the last one is free. */
    assert_int_equal(kvt_slab_adopt(slab, class_idx, 5 * 65536, 5 * 65536, 4, &slot),
                     KVT_SLAB_E_TAKEN);
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
    (void)kvt_slab_free(slab);
    assert_int_equal(kvt_slab_new(&slab, &config), 0);
    kvt_slab_stats(slab, &stats);
    (void)kvt_slab_free(slab);
    config.meta_bytes_max = stats.meta_bytes + 10;
    assert_int_equal(kvt_slab_new(&slab, &config), 0);
    assert_int_equal(kvt_slab_class(slab, 512, &class_idx), KVT_SLAB_E_CLASSES);
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
        cmocka_unit_test(test_restart),
        cmocka_unit_test(test_waste),
        cmocka_unit_test(test_generations_outlive_slabs),
        cmocka_unit_test(test_reclaim_moves_room),
        cmocka_unit_test(test_zones),
        cmocka_unit_test(test_adopted_slab_grows),
        cmocka_unit_test(test_adopt_in_rest),
        cmocka_unit_test(test_limits),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
