/* Moving room between slot sizes: one window of units at a time is closed, named to its slots'
 * owners, and released when they have all given back. */
#include "tiers/slab_internal.h"

void slab_window_release(struct kvt_slab *slab, bool is_cancelled)
{
    struct slab_zone *zone = &slab->zones[slab->window_zone];
    uint32_t end = slab->window_first + slab->window_units;

    for (uint32_t u = slab->window_first; !is_cancelled && u < end; u++)
        if (slab->by_unit[u] != NULL)
            return;
    for (uint32_t u = slab->window_first; u < end; u++) {
        struct slab_run *run = slab->by_unit[u];

        if (run == NULL) {
            slab_bit_set(slab->is_free, u);
            zone->free_units++;
        } else if (run->is_closed) {
            struct slab_share *share = &slab->classes[run->class_idx].shares[run->zone_idx];

            run->is_closed = false;
            share->free_slots += run->slots_count - run->taken_count;
            if (run->summary != 0)
                kvt_list_push_back(&share->partial, &run->link);
        }
    }
    slab->window_units = 0;
    zone->changes++;
}

/* Taken slots to empty before @units units from some place are free, cheapest place first: a
 * sliding window over the units of a zone. The place, when it is cheaper than *best_cost (which
 * becomes its cost); else SLAB_NO_UNIT: no window is, or each has a slab of the class itself. */
static uint32_t window_find_in(const struct kvt_slab *slab, const struct slab_zone *zone,
                               uint32_t class_idx, uint32_t units, uint64_t *best_cost)
{
    uint32_t own_units = 0, best = SLAB_NO_UNIT;
    uint64_t cost = 0;

    for (uint32_t at = 0; at < zone->units_count; at++) {
        uint32_t u = zone->first_unit + at;
        const struct slab_run *in = slab->by_unit[u];

        if (in != NULL && (at == 0 || slab->by_unit[u - 1] != in))
            cost += in->taken_count;
        if (in != NULL && in->class_idx == class_idx)
            own_units++;
        if (at >= units) {
            const struct slab_run *out = slab->by_unit[u - units];

            if (out != NULL && slab->by_unit[u - units + 1] != out)
                cost -= out->taken_count;
            if (out != NULL && out->class_idx == class_idx)
                own_units--;
        }
        if (at + 1 >= units && own_units == 0 && cost < *best_cost) {
            *best_cost = cost;
            best = u + 1 - units;
        }
    }
    return best;
}

/* The cheapest window of all open zones. */
static uint32_t window_find(const struct kvt_slab *slab, uint32_t class_idx, uint32_t units,
                            uint32_t *ret_zone)
{
    uint64_t cost = UINT64_MAX;
    uint32_t best = SLAB_NO_UNIT;

    for (uint32_t z = 0; z < slab->zones_count; z++) {
        uint32_t first = SLAB_NO_UNIT;

        if (!slab->zones[z].is_closed)
            first = window_find_in(slab, &slab->zones[z], class_idx, units, &cost);
        if (first != SLAB_NO_UNIT) {
            best = first;
            *ret_zone = z;
        }
    }
    return best;
}

static void window_close(struct kvt_slab *slab, uint32_t zone_idx, uint32_t first, uint32_t units)
{
    struct slab_zone *zone = &slab->zones[zone_idx];

    slab->window_zone = zone_idx;
    slab->window_first = first;
    slab->window_units = units;
    zone->changes++;
    for (uint32_t u = first; u < first + units; u++) {
        struct slab_run *run = slab->by_unit[u];

        if (run == NULL) {
            slab_bit_clear(slab->is_free, u);
            zone->free_units--;
        } else if (!run->is_closed) {
            run->is_closed = true;
            kvt_list_remove(&run->link);
            slab->classes[run->class_idx].shares[zone_idx].free_slots -=
                run->slots_count - run->taken_count;
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
            if (!slab_bit_get(run->words, k))
                ret_owners[count++] = run->slots[k].owner;
    }
    return count;
}

uint32_t kvt_slab_reclaim(struct kvt_slab *slab, uint32_t class_idx, uint32_t max,
                          uint32_t *ret_owners)
{
    const struct slab_class *class = &slab->classes[class_idx];
    uint32_t units = class->units_best, first, zone_idx = 0;

    KVT_ASSERT(class_idx < slab->classes_count);
    if (slab->window_units == 0) {
        first = window_find(slab, class_idx, units, &zone_idx);
        if (first == SLAB_NO_UNIT) {
            units = class->units_min;
            first = window_find(slab, class_idx, units, &zone_idx);
        }
        if (first == SLAB_NO_UNIT)
            return 0;
        window_close(slab, zone_idx, first, units);
        slab_window_release(slab, false); /* a window that is free already needs no eviction */
        if (slab->window_units == 0)
            return 0;
    }
    return window_owners(slab, max, ret_owners);
}

void kvt_slab_reclaim_cancel(struct kvt_slab *slab)
{
    if (slab->window_units > 0)
        slab_window_release(slab, true);
}
