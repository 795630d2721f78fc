/* The slab allocator of one tier: units, slabs over runs of units, slots in slabs.
 *
 *   unit        0      1      2      3      4      5
 *   by_unit     A      A      A      NULL   B      NULL      pointer to the slab that covers it
 *   is_free                          1             1         bitmap; a held unit is in neither
 *   slot idx    0..511 ..1023 ..1535        2048..           first unit * slots_per_unit + k
 *
 * Index ranges of slabs never overlap because a unit has at most slots_per_unit slots of the
 * smallest size. A slab's free slots are a two-level bitmap, lowest first, so neighbours go to
 * neighbouring takes. A slab with free slots is on its class's `partial` list, whose head is used
 * until it is full; that makes take and give O(1) but for the making of a slab.
 *
 * Generations survive a slab: each unit keeps the greatest generation that any of its slots had
 * (`floors`), and a later slab over it starts there.
 *
 * Reclaim closes a window of units: its slabs leave their partial lists, and units of the window
 * that are or fall free are held until the whole window is free, then released at once. */
#include "tiers/slab.h"

#include <string.h>

#include "daemon/base/alloc.h"
#include "daemon/base/list.h"

#define SLAB_CLASSES_MAX 512u
#define SLAB_SLOTS_PER_UNIT_MAX 4096u /* one summary word over 64 bitmap words */
#define SLAB_RUN_FACTOR_MAX 8u        /* longest run tried, in multiples of the shortest */
#define SLAB_WASTE_SHARE 8u           /* waste of a slab is at most 1/8 where that is possible */
#define SLAB_NO_UNIT UINT32_MAX

struct slab_slot {
    uint32_t owner, generation;
};

/* A run of units of one class. Freed slots keep their next generation here. */
struct slab_run {
    struct kvt_list link; /* on the class's partial list, or self-linked */
    uint32_t class_idx, first_unit, units_count;
    uint32_t slots_count, taken_count;
    uint32_t generation_max;
    bool is_closed; /* being emptied by reclaim */
    size_t meta_bytes;
    uint64_t summary; /* bit w: words[w] has a free slot */
    uint64_t *words;  /* bit k: slot k is free */
    struct slab_slot slots[];
};

struct slab_class {
    uint64_t slot_bytes;
    uint32_t units_min;  /* the shortest run that holds one slot */
    uint32_t units_best; /* the shortest run that wastes little */
    uint64_t free_slots; /* in slabs that are not closed */
    struct kvt_list partial;
    struct slab_run *spare;  /* kept so that a slab of one slot does not go to the heap each time */
    uint64_t full_at_change; /* `changes` when no run was found: not looked for again till then */
    uint64_t room_at_change; /* `changes` when room_units was counted */
    uint64_t room_unit_slots;
};

struct kvt_slab {
    struct kvt_slab_config config;
    uint32_t units_count, slots_per_unit;
    uint32_t free_units;
    uint64_t changes; /* of the map of units */
    struct slab_run **by_unit;
    uint64_t *is_free;
    uint32_t *floors;
    struct slab_class *classes;
    uint32_t classes_count;
    uint64_t taken_slots, taken_bytes, slabs_units, meta_bytes;
    /* The window that reclaim closed; window_units 0: none. */
    uint32_t window_first, window_units;
};

static bool bit_get(const uint64_t *words, uint32_t bit)
{
    return (words[bit / 64] >> (bit % 64)) & 1;
}

static void bit_set(uint64_t *words, uint32_t bit)
{
    words[bit / 64] |= 1ull << (bit % 64);
}

static void bit_clear(uint64_t *words, uint32_t bit)
{
    words[bit / 64] &= ~(1ull << (bit % 64));
}

static bool window_covers(const struct kvt_slab *slab, uint32_t unit)
{
    return unit >= slab->window_first && unit - slab->window_first < slab->window_units;
}

int kvt_slab_new(struct kvt_slab **ret_slab, const struct kvt_slab_config *config)
{
    uint64_t units_count =
        config->unit_bytes == 0 ? 0 : config->capacity_bytes / config->unit_bytes;
    uint32_t slots_per_unit;
    struct kvt_slab *slab;

    if (config->unit_bytes == 0 || (config->unit_bytes & (config->unit_bytes - 1)) != 0 ||
        config->align_bytes == 0 || config->unit_bytes % config->align_bytes != 0)
        return kvt_trace(-EINVAL);
    slots_per_unit = config->unit_bytes / config->align_bytes;
    if (slots_per_unit > SLAB_SLOTS_PER_UNIT_MAX || units_count > UINT32_MAX / slots_per_unit)
        return kvt_trace(-EINVAL);
    slab = kvt_alloc_zeroed(1, sizeof(*slab));
    if (slab == NULL)
        return kvt_trace(-ENOMEM);
    slab->config = *config;
    slab->units_count = (uint32_t)units_count;
    slab->slots_per_unit = slots_per_unit;
    slab->free_units = slab->units_count;
    slab->changes = 1;
    slab->by_unit = kvt_alloc_zeroed(units_count, sizeof(*slab->by_unit));
    slab->is_free = kvt_alloc_zeroed(units_count / 64 + 1, sizeof(*slab->is_free));
    slab->floors = kvt_alloc_zeroed(units_count, sizeof(*slab->floors));
    slab->classes = kvt_alloc_zeroed(SLAB_CLASSES_MAX, sizeof(*slab->classes));
    if (slab->by_unit == NULL || slab->is_free == NULL || slab->floors == NULL ||
        slab->classes == NULL) {
        (void)kvt_slab_free(slab);
        return kvt_trace(-ENOMEM);
    }
    slab->meta_bytes = sizeof(*slab) + SLAB_CLASSES_MAX * sizeof(*slab->classes) +
                       units_count * (sizeof(*slab->by_unit) + sizeof(*slab->floors)) +
                       (units_count / 64 + 1) * sizeof(*slab->is_free);
    for (uint32_t u = 0; u < slab->units_count; u++) {
        bit_set(slab->is_free, u);
        slab->floors[u] = 1;
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
    for (uint32_t c = 0; c < slab->classes_count; c++)
        kvt_free(slab->classes[c].spare);
    kvt_free(slab->by_unit);
    kvt_free(slab->is_free);
    kvt_free(slab->floors);
    kvt_free(slab->classes);
    kvt_free(slab);
    return NULL;
}

/* The shortest run whose waste is at most 1/SLAB_WASTE_SHARE, else the one that wastes least. */
static uint32_t class_units_best(const struct kvt_slab *slab, uint64_t slot_bytes, uint32_t least)
{
    uint64_t most = KVT_MIN((uint64_t)least * SLAB_RUN_FACTOR_MAX, slab->units_count);
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
    uint64_t capacity = (uint64_t)slab->units_count * slab->config.unit_bytes;
    struct slab_class *class;

    KVT_ASSERT(slot_bytes > 0);
    if (slot_bytes > capacity)
        return KVT_SLAB_E_TOO_BIG;
    slot_bytes = kvt_div_up(slot_bytes, slab->config.align_bytes) * slab->config.align_bytes;
    for (uint32_t c = 0; c < slab->classes_count; c++) {
        if (slab->classes[c].slot_bytes == slot_bytes) {
            *ret_class = c;
            return 0;
        }
    }
    if (slab->classes_count == SLAB_CLASSES_MAX)
        return KVT_SLAB_E_CLASSES;
    class = &slab->classes[slab->classes_count];
    class->slot_bytes = slot_bytes;
    class->units_min = (uint32_t)kvt_div_up(slot_bytes, slab->config.unit_bytes);
    class->units_best = class_units_best(slab, slot_bytes, class->units_min);
    kvt_list_init(&class->partial);
    *ret_class = slab->classes_count++;
    return 0;
}

/* Next maximal run of free units at or after @from: its length, 0 when there is none. */
static uint32_t free_run_next(const struct kvt_slab *slab, uint32_t from, uint32_t *ret_first)
{
    uint32_t first = from, end;

    while (first < slab->units_count) {
        uint64_t word = slab->is_free[first / 64] >> (first % 64);

        if (word != 0) {
            first += (uint32_t)__builtin_ctzll(word);
            break;
        }
        first = first / 64 * 64 + 64;
    }
    if (first >= slab->units_count)
        return 0;
    end = first;
    while (end < slab->units_count) {
        uint64_t taken = ~slab->is_free[end / 64] >> (end % 64);

        if (taken != 0) {
            end += (uint32_t)__builtin_ctzll(taken);
            break;
        }
        end = end / 64 * 64 + 64;
    }
    *ret_first = first;
    return KVT_MIN(end, slab->units_count) - first;
}

/* First fit of the best length; when there is none, the longest run that holds a slot at all. */
static uint32_t run_find(const struct kvt_slab *slab, const struct slab_class *class,
                         uint32_t *ret_first)
{
    uint32_t first, units, longest = 0;

    for (uint32_t at = 0; (units = free_run_next(slab, at, &first)) > 0; at = first + units) {
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

/* The metadata of a run of @slots_count slots: the class's spare, or new. NULL: no memory. */
static struct slab_run *run_alloc(struct kvt_slab *slab, struct slab_class *class,
                                  uint32_t slots_count)
{
    size_t words_count = slots_count / 64 + 1;
    size_t slots_bytes = slots_count * sizeof(struct slab_slot);
    size_t meta_bytes = sizeof(struct slab_run) + slots_bytes + words_count * sizeof(uint64_t);
    struct slab_run *run = class->spare;

    KVT_ASSERT(words_count <= 64 + 1);
    if (run != NULL && run->meta_bytes == meta_bytes) {
        class->spare = NULL;
    } else {
        if (slab->config.meta_bytes_max != 0 &&
            slab->meta_bytes + meta_bytes > slab->config.meta_bytes_max)
            return NULL;
        run = kvt_alloc_zeroed(1, meta_bytes);
        if (run == NULL)
            return NULL;
        slab->meta_bytes += meta_bytes;
    }
    memset(run, 0, meta_bytes);
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

/* Makes one more slab of the class. 0 or KVT_SLAB_E_FULL. */
static int run_make(struct kvt_slab *slab, uint32_t class_idx)
{
    struct slab_class *class = &slab->classes[class_idx];
    uint32_t first = 0, units, slots_count, generation = 1;
    struct slab_run *run;

    if (slab->free_units < class->units_min || class->full_at_change == slab->changes)
        return KVT_SLAB_E_FULL;
    units = run_find(slab, class, &first);
    if (units == 0) {
        class->full_at_change = slab->changes;
        return KVT_SLAB_E_FULL;
    }
    slots_count = (uint32_t)run_slots(slab, class, units);
    run = run_alloc(slab, class, slots_count);
    if (run == NULL)
        return KVT_SLAB_E_FULL;
    for (uint32_t u = first; u < first + units; u++) {
        bit_clear(slab->is_free, u);
        slab->by_unit[u] = run;
        generation = KVT_MAX(generation, slab->floors[u]);
    }
    kvt_list_init(&run->link);
    run->class_idx = class_idx;
    run->first_unit = first;
    run->units_count = units;
    run->slots_count = slots_count;
    run->generation_max = generation;
    for (uint32_t k = 0; k < slots_count; k++) {
        run->slots[k].generation = generation;
        bit_set(run->words, k);
        run->summary |= 1ull << (k / 64);
    }
    kvt_list_push_back(&class->partial, &run->link);
    class->free_slots += slots_count;
    slab->free_units -= units;
    slab->slabs_units += units;
    slab->changes++;
    return 0;
}

/* Releases the closed window when all of it is empty, or at once when @is_cancelled. */
static void window_release(struct kvt_slab *slab, bool is_cancelled)
{
    uint32_t end = slab->window_first + slab->window_units;

    for (uint32_t u = slab->window_first; !is_cancelled && u < end; u++)
        if (slab->by_unit[u] != NULL)
            return;
    for (uint32_t u = slab->window_first; u < end; u++) {
        struct slab_run *run = slab->by_unit[u];

        if (run == NULL) {
            bit_set(slab->is_free, u);
            slab->free_units++;
        } else if (run->is_closed) {
            struct slab_class *class = &slab->classes[run->class_idx];

            run->is_closed = false;
            class->free_slots += run->slots_count - run->taken_count;
            if (run->summary != 0)
                kvt_list_push_back(&class->partial, &run->link);
        }
    }
    slab->window_units = 0;
    slab->changes++;
}

static void run_drop(struct kvt_slab *slab, struct slab_run *run)
{
    struct slab_class *class = &slab->classes[run->class_idx];
    bool was_closed = run->is_closed;

    KVT_ASSERT(run->taken_count == 0);
    kvt_list_remove(&run->link);
    if (!was_closed)
        class->free_slots -= run->slots_count;
    for (uint32_t u = run->first_unit; u < run->first_unit + run->units_count; u++) {
        slab->by_unit[u] = NULL;
        slab->floors[u] = run->generation_max;
        if (!window_covers(slab, u)) {
            bit_set(slab->is_free, u);
            slab->free_units++;
        }
    }
    slab->slabs_units -= run->units_count;
    slab->changes++;
    run_retire(slab, class, run);
    if (was_closed)
        window_release(slab, false);
}

int kvt_slab_take(struct kvt_slab *slab, uint32_t class_idx, uint32_t owner,
                  struct kvt_slot *ret_slot)
{
    struct slab_class *class = &slab->classes[class_idx];
    struct slab_run *run;
    uint32_t word, k;

    KVT_ASSERT(class_idx < slab->classes_count);
    if (kvt_list_is_empty(&class->partial)) {
        int r = run_make(slab, class_idx);

        if (r != 0)
            return r;
    }
    run = KVT_CONTAINER_OF(class->partial.next, struct slab_run, link);
    KVT_ASSERT(run->summary != 0);
    word = (uint32_t)__builtin_ctzll(run->summary);
    k = word * 64 + (uint32_t)__builtin_ctzll(run->words[word]);
    KVT_ASSERT(k < run->slots_count);
    bit_clear(run->words, k);
    if (run->words[word] == 0)
        run->summary &= ~(1ull << word);
    if (run->summary == 0)
        kvt_list_remove(&run->link);
    run->slots[k].owner = owner;
    run->taken_count++;
    class->free_slots--;
    slab->taken_slots++;
    slab->taken_bytes += class->slot_bytes;
    *ret_slot = (struct kvt_slot){.idx = run->first_unit * slab->slots_per_unit + k,
                                  .generation = run->slots[k].generation};
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
        bit_get(run->words, k))
        return NULL;
    *ret_k = k;
    return run;
}

void kvt_slab_give(struct kvt_slab *slab, struct kvt_slot slot)
{
    uint32_t k = 0;
    struct slab_run *run = slot_find(slab, slot, &k);
    struct slab_class *class;

    KVT_ASSERT(run != NULL);
    class = &slab->classes[run->class_idx];
    run->slots[k].generation++;
    if (run->slots[k].generation == 0) /* {0, 0} stays "no slot" */
        run->slots[k].generation = 1;
    run->generation_max = KVT_MAX(run->generation_max, run->slots[k].generation);
    bit_set(run->words, k);
    if (run->summary == 0 && !run->is_closed)
        kvt_list_push_back(&class->partial, &run->link);
    run->summary |= 1ull << (k / 64);
    run->taken_count--;
    if (!run->is_closed)
        class->free_slots++;
    slab->taken_slots--;
    slab->taken_bytes -= class->slot_bytes;
    if (run->taken_count == 0)
        run_drop(slab, run);
}

bool kvt_slab_is_current(const struct kvt_slab *slab, struct kvt_slot slot)
{
    uint32_t k;

    return slot_find(slab, slot, &k) != NULL;
}

uint64_t kvt_slab_offset(const struct kvt_slab *slab, struct kvt_slot slot)
{
    uint32_t k = 0;
    const struct slab_run *run = slot_find(slab, slot, &k);

    KVT_ASSERT(run != NULL);
    return (uint64_t)run->first_unit * slab->config.unit_bytes +
           k * slab->classes[run->class_idx].slot_bytes;
}

uint64_t kvt_slab_slot_bytes(const struct kvt_slab *slab, uint32_t class_idx)
{
    KVT_ASSERT(class_idx < slab->classes_count);
    return slab->classes[class_idx].slot_bytes;
}

uint32_t kvt_slab_owner(const struct kvt_slab *slab, struct kvt_slot slot)
{
    uint32_t k = 0;
    const struct slab_run *run = slot_find(slab, slot, &k);

    KVT_ASSERT(run != NULL);
    return run->slots[k].owner;
}

uint64_t kvt_slab_room_slots(const struct kvt_slab *slab, uint32_t class_idx)
{
    struct slab_class *class = &slab->classes[class_idx];
    uint32_t first, units;

    KVT_ASSERT(class_idx < slab->classes_count);
    if (class->room_at_change != slab->changes) {
        uint64_t slots = 0;

        for (uint32_t at = 0; (units = free_run_next(slab, at, &first)) > 0; at = first + units) {
            slots += units / class->units_best * run_slots(slab, class, class->units_best);
            slots += run_slots(slab, class, units % class->units_best);
        }
        class->room_unit_slots = slots;
        class->room_at_change = slab->changes;
    }
    return class->free_slots + class->room_unit_slots;
}

/* Taken slots to empty before @units units from some place are free, cheapest place first: a
 * sliding window over the units. SLAB_NO_UNIT when every window has a slab of the class itself. */
static uint32_t window_find(const struct kvt_slab *slab, uint32_t class_idx, uint32_t units)
{
    uint64_t cost = 0, best_cost = UINT64_MAX;
    uint32_t own_units = 0, best = SLAB_NO_UNIT;

    for (uint32_t u = 0; u < slab->units_count; u++) {
        const struct slab_run *in = slab->by_unit[u];

        if (in != NULL && (u == 0 || slab->by_unit[u - 1] != in))
            cost += in->taken_count;
        if (in != NULL && in->class_idx == class_idx)
            own_units++;
        if (u >= units) {
            const struct slab_run *out = slab->by_unit[u - units];

            if (out != NULL && slab->by_unit[u - units + 1] != out)
                cost -= out->taken_count;
            if (out != NULL && out->class_idx == class_idx)
                own_units--;
        }
        if (u + 1 >= units && own_units == 0 && cost < best_cost) {
            best_cost = cost;
            best = u + 1 - units;
        }
    }
    return best;
}

static void window_close(struct kvt_slab *slab, uint32_t first, uint32_t units)
{
    slab->window_first = first;
    slab->window_units = units;
    slab->changes++;
    for (uint32_t u = first; u < first + units; u++) {
        struct slab_run *run = slab->by_unit[u];

        if (run == NULL) {
            bit_clear(slab->is_free, u);
            slab->free_units--;
        } else if (!run->is_closed) {
            run->is_closed = true;
            kvt_list_remove(&run->link);
            slab->classes[run->class_idx].free_slots -= run->slots_count - run->taken_count;
        }
    }
}

/* Owners of the taken slots of the window's slabs. */
static uint32_t window_owners(const struct kvt_slab *slab, uint32_t max, uint32_t *ret_owners)
{
    uint32_t end = slab->window_first + slab->window_units, count = 0;
    const struct slab_run *last = NULL;

    for (uint32_t u = slab->window_first; u < end; u++) {
        const struct slab_run *run = slab->by_unit[u];

        if (run == NULL || run == last)
            continue;
        last = run;
        for (uint32_t k = 0; k < run->slots_count && count < max; k++)
            if (!bit_get(run->words, k))
                ret_owners[count++] = run->slots[k].owner;
    }
    return count;
}

uint32_t kvt_slab_reclaim(struct kvt_slab *slab, uint32_t class_idx, uint32_t max,
                          uint32_t *ret_owners)
{
    const struct slab_class *class = &slab->classes[class_idx];
    uint32_t units = class->units_best, first;

    KVT_ASSERT(class_idx < slab->classes_count);
    if (slab->window_units == 0) {
        first = window_find(slab, class_idx, units);
        if (first == SLAB_NO_UNIT) {
            units = class->units_min;
            first = window_find(slab, class_idx, units);
        }
        if (first == SLAB_NO_UNIT)
            return 0;
        window_close(slab, first, units);
        window_release(slab, false); /* a window that is free already needs no eviction */
        if (slab->window_units == 0)
            return 0;
    }
    return window_owners(slab, max, ret_owners);
}

void kvt_slab_reclaim_cancel(struct kvt_slab *slab)
{
    if (slab->window_units > 0)
        window_release(slab, true);
}

void kvt_slab_stats(const struct kvt_slab *slab, struct kvt_slab_stats *ret_stats)
{
    *ret_stats = (struct kvt_slab_stats){
        .capacity_bytes = (uint64_t)slab->units_count * slab->config.unit_bytes,
        .slabs_bytes = slab->slabs_units * slab->config.unit_bytes,
        .taken_bytes = slab->taken_bytes,
        .taken_slots = slab->taken_slots,
        .meta_bytes = slab->meta_bytes,
        .classes = slab->classes_count,
    };
}

/* Recount of one slab. NULL, or what is wrong. */
static const char *run_check(const struct kvt_slab *slab, const struct slab_run *run)
{
    const struct slab_class *class = &slab->classes[run->class_idx];
    bool is_listed = !kvt_list_is_empty(&run->link);
    uint32_t free_count = 0, window_units = 0;

    if (run->slots_count * class->slot_bytes > run->units_count * (uint64_t)slab->config.unit_bytes)
        return "the slots do not fit their units";
    for (uint32_t k = 0; k < run->slots_count; k++) {
        free_count += bit_get(run->words, k);
        if (bit_get(run->words, k) && !((run->summary >> (k / 64)) & 1))
            return "the summary misses a free slot";
        if (run->slots[k].generation == 0 || run->slots[k].generation > run->generation_max)
            return "a generation is out of range";
    }
    if (free_count + run->taken_count != run->slots_count)
        return "taken_count is wrong";
    if (run->taken_count == 0)
        return "an empty slab is still there";
    if (is_listed != (!run->is_closed && free_count > 0))
        return "the partial list is wrong";
    for (uint32_t u = run->first_unit; u < run->first_unit + run->units_count; u++) {
        if (u >= slab->units_count || slab->by_unit[u] != run || bit_get(slab->is_free, u))
            return "a unit of a slab is not its own";
        window_units += window_covers(slab, u);
    }
    if (run->is_closed != (window_units > 0))
        return "closed and the window disagree";
    return NULL;
}

bool kvt_slab_check(const struct kvt_slab *slab, const char **ret_why)
{
    uint64_t taken_slots = 0, taken_bytes = 0, slabs_units = 0, free_units = 0;
    uint64_t free_slots[SLAB_CLASSES_MAX] = {0};
    const char *why = NULL;

    for (uint32_t u = 0; u < slab->units_count && why == NULL; u++) {
        const struct slab_run *run = slab->by_unit[u];

        free_units += bit_get(slab->is_free, u);
        if (run == NULL) {
            if (bit_get(slab->is_free, u) == window_covers(slab, u))
                why = "a unit without a slab is neither free nor held";
            continue;
        }
        if (u > run->first_unit)
            continue;
        why = run_check(slab, run);
        taken_slots += run->taken_count;
        taken_bytes += run->taken_count * slab->classes[run->class_idx].slot_bytes;
        slabs_units += run->units_count;
        if (!run->is_closed)
            free_slots[run->class_idx] += run->slots_count - run->taken_count;
    }
    for (uint32_t c = 0; c < slab->classes_count && why == NULL; c++)
        if (free_slots[c] != slab->classes[c].free_slots)
            why = "free_slots of a class is wrong";
    if (why == NULL && (taken_slots != slab->taken_slots || taken_bytes != slab->taken_bytes))
        why = "taken slots or bytes are wrong";
    if (why == NULL && (slabs_units != slab->slabs_units || free_units != slab->free_units))
        why = "counts of units are wrong";
    if (why != NULL)
        *ret_why = why;
    return why == NULL;
}
