/* The slab allocator of one tier: zones of units, slabs over runs of units, slots in slabs. What
 * its memory looks like is drawn in slab_internal.h. */
#include "tiers/slab.h"

#include <string.h>

#include "daemon/base/alloc.h"
#include "daemon/base/list.h"
#include "tiers/slab_internal.h"

/* Lays the zones out one behind the other. 0 or -EINVAL. */
static int zones_init(struct kvt_slab *slab)
{
    const struct kvt_slab_config *config = &slab->config;
    uint64_t base_bytes = 0, units_total = 0;

    if (config->zones_count > KVT_ZONES_MAX)
        return kvt_trace(-EINVAL);
    slab->zones_count = KVT_MAX(config->zones_count, 1u);
    for (uint32_t z = 0; z < slab->zones_count; z++) {
        struct slab_zone *zone = &slab->zones[z];
        bool is_only = config->zones_count == 0;
        uint64_t bytes = is_only ? config->capacity_bytes : config->zone_bytes[z];
        uint64_t units = bytes / config->unit_bytes;

        if (!is_only && bytes % config->align_bytes != 0)
            return kvt_trace(-EINVAL);
        if (bytes > UINT64_MAX - base_bytes ||
            units > UINT32_MAX / slab->slots_per_unit - units_total)
            return kvt_trace(-EINVAL);
        *zone = (struct slab_zone){.base_bytes = base_bytes,
                                   .first_unit = (uint32_t)units_total,
                                   .units_count = (uint32_t)units,
                                   .free_units = (uint32_t)units,
                                   .changes = 1};
        base_bytes += bytes;
        units_total += units;
    }
    slab->units_count = (uint32_t)units_total;
    return 0;
}

static int memory_init(struct kvt_slab *slab)
{
    size_t units_count = slab->units_count;

    slab->by_unit = kvt_alloc_zeroed(units_count, sizeof(*slab->by_unit));
    slab->is_free = kvt_alloc_zeroed(units_count / 64 + 1, sizeof(*slab->is_free));
    slab->floors = kvt_alloc_zeroed(units_count, sizeof(*slab->floors));
    slab->classes = kvt_alloc_zeroed(SLAB_CLASSES_MAX, sizeof(*slab->classes));
    if (slab->by_unit == NULL || slab->is_free == NULL || slab->floors == NULL ||
        slab->classes == NULL)
        return kvt_trace(-ENOMEM);
    slab->meta_bytes = sizeof(*slab) + SLAB_CLASSES_MAX * sizeof(*slab->classes) +
                       units_count * (sizeof(*slab->by_unit) + sizeof(*slab->floors)) +
                       (units_count / 64 + 1) * sizeof(*slab->is_free);
    for (uint32_t u = 0; u < slab->units_count; u++) {
        slab_bit_set(slab->is_free, u);
        slab->floors[u] = 1;
    }
    return 0;
}

int kvt_slab_new(struct kvt_slab **ret_slab, const struct kvt_slab_config *config)
{
    struct kvt_slab *slab;
    int r;

    if (config->unit_bytes == 0 || (config->unit_bytes & (config->unit_bytes - 1)) != 0 ||
        config->align_bytes == 0 || config->unit_bytes % config->align_bytes != 0 ||
        config->unit_bytes / config->align_bytes > SLAB_SLOTS_PER_UNIT_MAX)
        return kvt_trace(-EINVAL);
    slab = kvt_alloc_zeroed(1, sizeof(*slab));
    if (slab == NULL)
        return kvt_trace(-ENOMEM);
    slab->config = *config;
    slab->slots_per_unit = config->unit_bytes / config->align_bytes;
    r = zones_init(slab);
    if (r == 0)
        r = memory_init(slab);
    if (r != 0) {
        (void)kvt_slab_free(slab);
        return kvt_trace(r);
    }
    *ret_slab = slab;
    return 0;
}

struct kvt_slab *kvt_slab_free(struct kvt_slab *slab)
{
    if (slab == NULL)
        return NULL;
    for (uint32_t u = 0; slab->by_unit != NULL && u < slab->units_count; u++) {
        struct slab_run *run = slab->by_unit[u];

        if (run != NULL && run->first_unit == u)
            u += run->units_count - 1;
        kvt_free(run);
    }
    for (uint32_t c = 0; c < slab->classes_count; c++) {
        kvt_free(slab->classes[c].spare);
        kvt_free(slab->classes[c].shares);
    }
    kvt_free(slab->by_unit);
    kvt_free(slab->is_free);
    kvt_free(slab->floors);
    kvt_free(slab->classes);
    kvt_free(slab);
    return NULL;
}

static bool has_meta_room(const struct kvt_slab *slab, size_t bytes)
{
    return slab->config.meta_bytes_max == 0 ||
           slab->meta_bytes + bytes <= slab->config.meta_bytes_max;
}

/* The shortest run whose waste is at most 1/SLAB_WASTE_SHARE, else the one that wastes least. */
static uint32_t class_units_best(const struct kvt_slab *slab, uint64_t slot_bytes, uint32_t least,
                                 uint32_t zone_units)
{
    uint64_t most = KVT_MIN((uint64_t)least * SLAB_RUN_FACTOR_MAX, zone_units);
    uint64_t unit_bytes = slab->config.unit_bytes;
    uint64_t best = least, best_waste = (least * unit_bytes) % slot_bytes;

    for (uint64_t units = least; units <= most; units++) {
        uint64_t waste = (units * unit_bytes) % slot_bytes;

        if (waste * best < best_waste * units) {
            best = units;
            best_waste = waste;
        }
        if (waste * SLAB_WASTE_SHARE <= units * unit_bytes)
            return (uint32_t)units;
    }
    return (uint32_t)best;
}

int kvt_slab_class(struct kvt_slab *slab, uint64_t slot_bytes, uint32_t *ret_class)
{
    size_t shares_bytes = slab->zones_count * sizeof(struct slab_share);
    struct slab_class *class;
    uint32_t zone_units = 0;

    KVT_ASSERT(slot_bytes > 0);
    for (uint32_t z = 0; z < slab->zones_count; z++)
        zone_units = KVT_MAX(zone_units, slab->zones[z].units_count);
    /* One without any room is always full, whatever the size. */
    if (zone_units > 0 && slot_bytes > (uint64_t)zone_units * slab->config.unit_bytes)
        return KVT_SLAB_E_TOO_BIG;
    slot_bytes = kvt_div_up(slot_bytes, slab->config.align_bytes) * slab->config.align_bytes;
    for (uint32_t c = 0; c < slab->classes_count; c++) {
        if (slab->classes[c].slot_bytes == slot_bytes) {
            *ret_class = c;
            return 0;
        }
    }
    class = &slab->classes[slab->classes_count];
    if (slab->classes_count == SLAB_CLASSES_MAX || !has_meta_room(slab, shares_bytes))
        return KVT_SLAB_E_CLASSES;
    class->shares = kvt_alloc_zeroed(1, shares_bytes);
    if (class->shares == NULL)
        return KVT_SLAB_E_CLASSES;
    slab->meta_bytes += shares_bytes;
    class->slot_bytes = slot_bytes;
    class->units_min = (uint32_t)kvt_div_up(slot_bytes, slab->config.unit_bytes);
    class->units_best = class_units_best(slab, slot_bytes, class->units_min, zone_units);
    for (uint32_t z = 0; z < slab->zones_count; z++) {
        kvt_list_init(&class->shares[z].partial);
        kvt_list_init(&class->shares[z].shorts);
    }
    *ret_class = slab->classes_count++;
    return 0;
}

/* Next maximal run of free units in [from, end): its length, 0 when there is none. */
static uint32_t free_run_next(const struct kvt_slab *slab, uint32_t from, uint32_t end,
                              uint32_t *ret_first)
{
    uint32_t first = from, last;

    while (first < end) {
        uint64_t word = slab->is_free[first / 64] >> (first % 64);

        if (word != 0) {
            first += (uint32_t)__builtin_ctzll(word);
            break;
        }
        first = first / 64 * 64 + 64;
    }
    if (first >= end)
        return 0;
    last = first;
    while (last < end) {
        uint64_t taken = ~slab->is_free[last / 64] >> (last % 64);

        if (taken != 0) {
            last += (uint32_t)__builtin_ctzll(taken);
            break;
        }
        last = last / 64 * 64 + 64;
    }
    *ret_first = first;
    return KVT_MIN(last, end) - first;
}

/* In one zone: first fit of the best length; when there is none, the longest run that holds a slot
 * at all, if it is longer than @longest. */
static uint32_t run_find(const struct kvt_slab *slab, const struct slab_class *class,
                         const struct slab_zone *zone, uint32_t longest, uint32_t *ret_first)
{
    uint32_t end = slab_zone_end(zone), first, units;

    for (uint32_t at = zone->first_unit; (units = free_run_next(slab, at, end, &first)) > 0;
         at = first + units) {
        if (units >= class->units_best) {
            *ret_first = first;
            return class->units_best;
        }
        if (units >= class->units_min && units > longest) {
            longest = units;
            *ret_first = first;
        }
    }
    return longest;
}

static uint64_t run_slots(const struct kvt_slab *slab, const struct slab_class *class,
                          uint64_t units)
{
    return units * slab->config.unit_bytes / class->slot_bytes;
}

/* The metadata of a run of up to @slots_max slots: the class's spare, or new. NULL: no memory. */
static struct slab_run *run_alloc(struct kvt_slab *slab, struct slab_class *class,
                                  uint32_t slots_max)
{
    size_t words_count = slots_max / 64 + 1;
    size_t slots_bytes = slots_max * sizeof(struct slab_slot);
    size_t meta_bytes = sizeof(struct slab_run) + slots_bytes + words_count * sizeof(uint64_t);
    struct slab_run *run = class->spare;

    KVT_ASSERT(words_count <= 64 + 1);
    if (run != NULL && run->meta_bytes == meta_bytes) {
        class->spare = NULL;
    } else {
        if (!has_meta_room(slab, meta_bytes))
            return NULL;
        run = kvt_alloc_zeroed(1, meta_bytes);
        if (run == NULL)
            return NULL;
        slab->meta_bytes += meta_bytes;
    }
    memset(run, 0, meta_bytes);
    kvt_list_init(&run->link);
    kvt_list_init(&run->short_link);
    run->slots_max = slots_max;
    run->meta_bytes = meta_bytes;
    run->words = (uint64_t *)(void *)((uint8_t *)run->slots + slots_bytes);
    return run;
}

static void run_retire(struct kvt_slab *slab, struct slab_class *class, struct slab_run *run)
{
    struct slab_run *old = class->spare;

    if (old != NULL) {
        slab->meta_bytes -= old->meta_bytes;
        kvt_free(old);
    }
    class->spare = run;
}

/* Makes the run @units long: its new units were free, their slots are. */
static void run_grow(struct kvt_slab *slab, struct slab_run *run, uint32_t units)
{
    struct slab_class *class = &slab->classes[run->class_idx];
    struct slab_share *share = &class->shares[run->zone_idx];
    struct slab_zone *zone = &slab->zones[run->zone_idx];
    uint32_t slots_count = (uint32_t)run_slots(slab, class, units);

    KVT_ASSERT(slots_count <= run->slots_max);
    KVT_ASSERT(units > run->units_count && slots_count >= run->slots_count);
    for (uint32_t u = run->first_unit + run->units_count; u < run->first_unit + units; u++) {
        KVT_ASSERT(slab_bit_get(slab->is_free, u));
        slab_bit_clear(slab->is_free, u);
        slab->by_unit[u] = run;
        run->generation_max = KVT_MAX(run->generation_max, slab->floors[u]);
    }
    for (uint32_t k = run->slots_count; k < slots_count; k++) {
        run->slots[k].generation = run->generation_max;
        slab_bit_set(run->words, k);
        run->summary |= 1ull << (k / 64);
    }
    if (run->summary != 0 && kvt_list_is_empty(&run->link))
        kvt_list_push_back(&share->partial, &run->link);
    share->free_slots += slots_count - run->slots_count;
    zone->free_units -= units - run->units_count;
    zone->slabs_units += units - run->units_count;
    zone->changes++;
    run->units_count = units;
    run->slots_count = slots_count;
}

/* Makes a slab over free units; it has metadata for @slots_max slots. NULL: no memory for it. */
static struct slab_run *run_make_at(struct kvt_slab *slab, uint32_t class_idx, uint32_t zone_idx,
                                    uint32_t first_unit, uint32_t units, uint32_t slots_max)
{
    struct slab_run *run = run_alloc(slab, &slab->classes[class_idx], slots_max);

    if (run == NULL)
        return NULL;
    run->class_idx = class_idx;
    run->zone_idx = zone_idx;
    run->first_unit = first_unit;
    run->generation_max = 1;
    run_grow(slab, run, units);
    return run;
}

/* How many units from @unit on, at most @max, are free in a zone. */
static uint32_t free_units_at(const struct kvt_slab *slab, uint32_t zone_idx, uint32_t unit,
                              uint32_t max)
{
    uint32_t left = slab_zone_end(&slab->zones[zone_idx]) - unit, count = 0;

    while (count < KVT_MIN(max, left) && slab_bit_get(slab->is_free, unit + count))
        count++;
    return count;
}

/* Lets adopted slabs of the class grow to the length that they would have been made with, until
 * one has a free slot. Each has one chance. */
static bool shorts_grow(struct kvt_slab *slab, struct slab_class *class, uint32_t zone_idx)
{
    struct slab_share *share = &class->shares[zone_idx];

    while (!kvt_list_is_empty(&share->shorts)) {
        struct slab_run *run = KVT_CONTAINER_OF(share->shorts.next, struct slab_run, short_link);
        uint32_t units = run->units_count;

        KVT_ASSERT(units < class->units_best);
        kvt_list_remove(&run->short_link);
        units += free_units_at(slab, zone_idx, run->first_unit + units, class->units_best - units);
        if (run_slots(slab, class, units) > run->slots_count && !run->is_closed)
            run_grow(slab, run, units);
        if (!kvt_list_is_empty(&share->partial))
            return true;
    }
    return false;
}

/* Makes room for one more slot of the class in zones [zone_idx, zone_end), none of which has a free
 * one. 0 and the zone, or KVT_SLAB_E_FULL. */
static int run_make(struct kvt_slab *slab, uint32_t class_idx, uint32_t zone_idx, uint32_t zone_end,
                    uint32_t *ret_zone)
{
    struct slab_class *class = &slab->classes[class_idx];
    uint32_t first = 0, units = 0, in_zone = 0;

    for (uint32_t z = zone_idx; z < zone_end && units < class->units_best; z++) {
        struct slab_zone *zone = &slab->zones[z];
        struct slab_share *share = &class->shares[z];
        uint32_t found;

        if (zone->is_closed)
            continue;
        if (shorts_grow(slab, class, z)) {
            *ret_zone = z;
            return 0;
        }
        if (zone->free_units < class->units_min || share->full_at_change == zone->changes)
            continue;
        found = run_find(slab, class, zone, units, &first);
        if (found > units) {
            units = found;
            in_zone = z;
        } else if (units == 0) {
            share->full_at_change = zone->changes;
        }
    }
    if (units == 0 || run_make_at(slab, class_idx, in_zone, first, units,
                                  (uint32_t)run_slots(slab, class, units)) == NULL)
        return KVT_SLAB_E_FULL;
    *ret_zone = in_zone;
    return 0;
}

static void run_drop(struct kvt_slab *slab, struct slab_run *run)
{
    struct slab_class *class = &slab->classes[run->class_idx];
    struct slab_zone *zone = &slab->zones[run->zone_idx];
    bool was_closed = run->is_closed;

    KVT_ASSERT(run->taken_count == 0);
    kvt_list_remove(&run->link);
    kvt_list_remove(&run->short_link);
    if (!was_closed)
        class->shares[run->zone_idx].free_slots -= run->slots_count;
    for (uint32_t u = run->first_unit; u < run->first_unit + run->units_count; u++) {
        slab->by_unit[u] = NULL;
        slab->floors[u] = run->generation_max;
        if (!slab_window_covers(slab, u)) {
            slab_bit_set(slab->is_free, u);
            zone->free_units++;
        }
    }
    zone->slabs_units -= run->units_count;
    zone->changes++;
    run_retire(slab, class, run);
    if (was_closed)
        slab_window_release(slab, false);
}

/* Takes a free slot of the run. */
static struct kvt_slot run_take(struct kvt_slab *slab, struct slab_run *run, uint32_t k,
                                uint32_t owner)
{
    struct slab_class *class = &slab->classes[run->class_idx];
    struct slab_zone *zone = &slab->zones[run->zone_idx];

    KVT_ASSERT(k < run->slots_count && !run->is_closed);
    KVT_ASSERT(slab_bit_get(run->words, k));
    slab_bit_clear(run->words, k);
    if (run->words[k / 64] == 0)
        run->summary &= ~(1ull << (k / 64));
    if (run->summary == 0)
        kvt_list_remove(&run->link);
    run->slots[k].owner = owner;
    run->taken_count++;
    class->shares[run->zone_idx].free_slots--;
    zone->taken_slots++;
    zone->taken_bytes += class->slot_bytes;
    return (struct kvt_slot){.idx = run->first_unit * slab->slots_per_unit + k,
                             .generation = run->slots[k].generation};
}

/* Takes a slot in one of the zones [zone_idx, zone_end). */
static int take_from(struct kvt_slab *slab, uint32_t class_idx, uint32_t zone_idx,
                     uint32_t zone_end, uint32_t owner, struct kvt_slot *ret_slot)
{
    struct slab_class *class = &slab->classes[class_idx];
    struct slab_run *run;
    uint32_t z = zone_idx, word;

    KVT_ASSERT(class_idx < slab->classes_count);
    while (z < zone_end &&
           (slab->zones[z].is_closed || kvt_list_is_empty(&class->shares[z].partial)))
        z++;
    if (z == zone_end) {
        int r = run_make(slab, class_idx, zone_idx, zone_end, &z);

        if (r != 0)
            return r;
    }
    run = KVT_CONTAINER_OF(class->shares[z].partial.next, struct slab_run, link);
    KVT_ASSERT(run->summary != 0);
    word = (uint32_t)__builtin_ctzll(run->summary);
    *ret_slot = run_take(slab, run, word * 64 + (uint32_t)__builtin_ctzll(run->words[word]), owner);
    return 0;
}

int kvt_slab_take(struct kvt_slab *slab, uint32_t class_idx, uint32_t owner,
                  struct kvt_slot *ret_slot)
{
    return take_from(slab, class_idx, 0, slab->zones_count, owner, ret_slot);
}

int kvt_slab_take_in(struct kvt_slab *slab, uint32_t class_idx, uint32_t zone_idx, uint32_t owner,
                     struct kvt_slot *ret_slot)
{
    KVT_ASSERT(zone_idx < slab->zones_count);
    return take_from(slab, class_idx, zone_idx, zone_idx + 1, owner, ret_slot);
}

/* The slab that a slot @k of the class is in when it begins at @first_unit: what is there, made
 * longer if need be, or a new one. 0, KVT_SLAB_E_TAKEN or KVT_SLAB_E_FULL. */
static int run_adopt(struct kvt_slab *slab, uint32_t class_idx, uint32_t zone_idx,
                     uint32_t first_unit, uint64_t k, struct slab_run **ret_run)
{
    struct slab_class *class = &slab->classes[class_idx];
    struct slab_run *run = slab->by_unit[first_unit];
    uint64_t slots_max = run_slots(slab, class, class->units_best);
    uint32_t units, units_now = run != NULL ? run->units_count : 0;

    if (run != NULL &&
        (run->first_unit != first_unit || run->class_idx != class_idx || run->is_closed))
        return KVT_SLAB_E_TAKEN;
    if (k >= (run != NULL ? run->slots_max : slots_max))
        return KVT_SLAB_E_TAKEN;
    if (run != NULL && k < run->slots_count) {
        *ret_run = run;
        return slab_bit_get(run->words, (uint32_t)k) ? 0 : KVT_SLAB_E_TAKEN;
    }
    units = (uint32_t)kvt_div_up((k + 1) * class->slot_bytes, slab->config.unit_bytes);
    if (free_units_at(slab, zone_idx, first_unit + units_now, units - units_now) <
        units - units_now)
        return KVT_SLAB_E_TAKEN;
    if (run != NULL) {
        run_grow(slab, run, units);
    } else {
        run = run_make_at(slab, class_idx, zone_idx, first_unit, units, (uint32_t)slots_max);
        if (run == NULL)
            return KVT_SLAB_E_FULL;
        kvt_list_push_back(&class->shares[zone_idx].shorts, &run->short_link);
    }
    if (run->units_count >= class->units_best)
        kvt_list_remove(&run->short_link);
    *ret_run = run;
    return 0;
}

int kvt_slab_adopt(struct kvt_slab *slab, uint32_t class_idx, uint64_t offset_bytes,
                   uint64_t run_offset_bytes, uint32_t owner, struct kvt_slot *ret_slot)
{
    const struct slab_zone *zone = slab->zones;
    uint64_t in_zone_bytes, unit_bytes = slab->config.unit_bytes, k;
    struct slab_run *run = NULL;
    uint32_t zone_idx = 0;
    int r;

    if (class_idx >= slab->classes_count || offset_bytes < run_offset_bytes)
        return KVT_SLAB_E_TAKEN;
    /* The last zone that does not begin behind it; empty ones begin where the next one does. */
    while (zone_idx + 1 < slab->zones_count &&
           slab->zones[zone_idx + 1].base_bytes <= run_offset_bytes)
        zone = &slab->zones[++zone_idx];
    in_zone_bytes = run_offset_bytes - zone->base_bytes;
    if (zone->is_closed || in_zone_bytes % unit_bytes != 0 ||
        in_zone_bytes / unit_bytes >= zone->units_count)
        return KVT_SLAB_E_TAKEN;
    k = (offset_bytes - run_offset_bytes) / slab->classes[class_idx].slot_bytes;
    if ((offset_bytes - run_offset_bytes) % slab->classes[class_idx].slot_bytes != 0)
        return KVT_SLAB_E_TAKEN;
    r = run_adopt(slab, class_idx, zone_idx,
                  zone->first_unit + (uint32_t)(in_zone_bytes / unit_bytes), k, &run);
    if (r != 0)
        return r;
    *ret_slot = run_take(slab, run, (uint32_t)k, owner);
    return 0;
}

/* The slab of a current slot and the slot's number in it, or NULL. */
static struct slab_run *slot_find(const struct kvt_slab *slab, struct kvt_slot slot,
                                  uint32_t *ret_k)
{
    uint32_t unit = slot.idx / slab->slots_per_unit, k;
    struct slab_run *run;

    if (slot.generation == 0 || unit >= slab->units_count || slab->by_unit[unit] == NULL)
        return NULL;
    run = slab->by_unit[unit];
    k = slot.idx - run->first_unit * slab->slots_per_unit;
    if (k >= run->slots_count || run->slots[k].generation != slot.generation ||
        slab_bit_get(run->words, k))
        return NULL;
    *ret_k = k;
    return run;
}

static struct slab_run *slot_get(const struct kvt_slab *slab, struct kvt_slot slot, uint32_t *ret_k)
{
    struct slab_run *run = slot_find(slab, slot, ret_k);

    KVT_ASSERT(run != NULL);
    return run;
}

void kvt_slab_give(struct kvt_slab *slab, struct kvt_slot slot)
{
    uint32_t k = 0;
    struct slab_run *run = slot_get(slab, slot, &k);
    struct slab_class *class = &slab->classes[run->class_idx];
    struct slab_share *share = &class->shares[run->zone_idx];
    struct slab_zone *zone = &slab->zones[run->zone_idx];

    run->slots[k].generation++;
    if (run->slots[k].generation == 0) /* {0, 0} stays "no slot" */
        run->slots[k].generation = 1;
    run->generation_max = KVT_MAX(run->generation_max, run->slots[k].generation);
    slab_bit_set(run->words, k);
    if (run->summary == 0 && !run->is_closed)
        kvt_list_push_back(&share->partial, &run->link);
    run->summary |= 1ull << (k / 64);
    run->taken_count--;
    if (!run->is_closed)
        share->free_slots++;
    zone->taken_slots--;
    zone->taken_bytes -= class->slot_bytes;
    if (run->taken_count == 0)
        run_drop(slab, run);
}

bool kvt_slab_is_current(const struct kvt_slab *slab, struct kvt_slot slot)
{
    uint32_t k;

    return slot_find(slab, slot, &k) != NULL;
}

uint64_t kvt_slab_run_offset(const struct kvt_slab *slab, struct kvt_slot slot)
{
    uint32_t k = 0;
    const struct slab_run *run = slot_get(slab, slot, &k);
    const struct slab_zone *zone = &slab->zones[run->zone_idx];

    return zone->base_bytes +
           (uint64_t)(run->first_unit - zone->first_unit) * slab->config.unit_bytes;
}

uint64_t kvt_slab_offset(const struct kvt_slab *slab, struct kvt_slot slot)
{
    uint32_t k = 0;
    const struct slab_run *run = slot_get(slab, slot, &k);

    return kvt_slab_run_offset(slab, slot) + k * slab->classes[run->class_idx].slot_bytes;
}

uint32_t kvt_slab_zone(const struct kvt_slab *slab, struct kvt_slot slot)
{
    uint32_t k = 0;

    return slot_get(slab, slot, &k)->zone_idx;
}

uint64_t kvt_slab_slot_bytes(const struct kvt_slab *slab, uint32_t class_idx)
{
    KVT_ASSERT(class_idx < slab->classes_count);
    return slab->classes[class_idx].slot_bytes;
}

uint32_t kvt_slab_owner(const struct kvt_slab *slab, struct kvt_slot slot)
{
    uint32_t k = 0;
    const struct slab_run *run = slot_get(slab, slot, &k);

    return run->slots[k].owner;
}

static uint64_t zone_room_slots(const struct kvt_slab *slab, const struct slab_class *class,
                                const struct slab_zone *zone, struct slab_share *share)
{
    uint32_t end = slab_zone_end(zone), first, units;

    if (share->room_at_change != zone->changes) {
        uint64_t slots = 0;

        for (uint32_t at = zone->first_unit; (units = free_run_next(slab, at, end, &first)) > 0;
             at = first + units) {
            slots += units / class->units_best * run_slots(slab, class, class->units_best);
            slots += run_slots(slab, class, units % class->units_best);
        }
        share->room_unit_slots = slots;
        share->room_at_change = zone->changes;
    }
    return share->free_slots + share->room_unit_slots;
}

uint64_t kvt_slab_room_slots(const struct kvt_slab *slab, uint32_t class_idx)
{
    const struct slab_class *class = &slab->classes[class_idx];
    uint64_t slots = 0;

    KVT_ASSERT(class_idx < slab->classes_count);
    for (uint32_t z = 0; z < slab->zones_count; z++)
        if (!slab->zones[z].is_closed)
            slots += zone_room_slots(slab, class, &slab->zones[z], &class->shares[z]);
    return slots;
}

void kvt_slab_zone_close(struct kvt_slab *slab, uint32_t zone_idx)
{
    KVT_ASSERT(zone_idx < slab->zones_count);
    if (slab->window_units > 0 && slab->window_zone == zone_idx)
        slab_window_release(slab, true);
    slab->zones[zone_idx].is_closed = true;
}

void kvt_slab_zone_open(struct kvt_slab *slab, uint32_t zone_idx)
{
    KVT_ASSERT(zone_idx < slab->zones_count);
    slab->zones[zone_idx].is_closed = false;
}
