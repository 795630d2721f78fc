/* What a slab allocator says of itself: counters, and the recount that holds them to the truth. */
#include "tiers/slab_internal.h"

static void stats_add(const struct kvt_slab *slab, const struct slab_zone *zone,
                      struct kvt_slab_stats *stats)
{
    stats->capacity_bytes += (uint64_t)zone->units_count * slab->config.unit_bytes;
    stats->slabs_bytes += zone->slabs_units * slab->config.unit_bytes;
    stats->taken_bytes += zone->taken_bytes;
    stats->taken_slots += zone->taken_slots;
}

void kvt_slab_stats(const struct kvt_slab *slab, struct kvt_slab_stats *ret_stats)
{
    *ret_stats =
        (struct kvt_slab_stats){.meta_bytes = slab->meta_bytes, .classes = slab->classes_count};
    for (uint32_t z = 0; z < slab->zones_count; z++)
        if (!slab->zones[z].is_closed)
            stats_add(slab, &slab->zones[z], ret_stats);
}

void kvt_slab_zone_stats(const struct kvt_slab *slab, uint32_t zone_idx,
                         struct kvt_slab_stats *ret_stats)
{
    KVT_ASSERT(zone_idx < slab->zones_count);
    *ret_stats =
        (struct kvt_slab_stats){.meta_bytes = slab->meta_bytes, .classes = slab->classes_count};
    stats_add(slab, &slab->zones[zone_idx], ret_stats);
}

/* Recount of one slab. NULL, or what is wrong. */
static const char *run_check(const struct kvt_slab *slab, const struct slab_run *run)
{
    const struct slab_class *class = &slab->classes[run->class_idx];
    const struct slab_zone *zone = &slab->zones[run->zone_idx];
    bool is_listed = !kvt_list_is_empty(&run->link);
    bool is_short = !kvt_list_is_empty(&run->short_link);
    uint32_t free_count = 0, window_units = 0;

    if (run->slots_count * class->slot_bytes > run->units_count * (uint64_t)slab->config.unit_bytes)
        return "the slots do not fit their units";
    for (uint32_t k = 0; k < run->slots_count; k++) {
        free_count += slab_bit_get(run->words, k);
        if (slab_bit_get(run->words, k) && !((run->summary >> (k / 64)) & 1))
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
    if (run->slots_count > run->slots_max || (is_short && run->units_count >= class->units_best))
        return "a slab is longer than it may be";
    if (run->first_unit < zone->first_unit ||
        run->first_unit + run->units_count > slab_zone_end(zone))
        return "a slab is not inside its zone";
    for (uint32_t u = run->first_unit; u < run->first_unit + run->units_count; u++) {
        if (u >= slab->units_count || slab->by_unit[u] != run || slab_bit_get(slab->is_free, u))
            return "a unit of a slab is not its own";
        window_units += slab_window_covers(slab, u);
    }
    if (run->is_closed != (window_units > 0))
        return "closed and the window disagree";
    return NULL;
}

/* Recount of one zone. NULL, or what is wrong. */
static const char *zone_check(const struct kvt_slab *slab, uint32_t zone_idx)
{
    const struct slab_zone *zone = &slab->zones[zone_idx];
    uint64_t taken_slots = 0, taken_bytes = 0, slabs_units = 0, free_units = 0;
    uint64_t free_slots[SLAB_CLASSES_MAX] = {0};
    const char *why = NULL;

    for (uint32_t u = zone->first_unit; u < slab_zone_end(zone) && why == NULL; u++) {
        const struct slab_run *run = slab->by_unit[u];

        free_units += slab_bit_get(slab->is_free, u);
        if (run == NULL) {
            if (slab_bit_get(slab->is_free, u) == slab_window_covers(slab, u))
                why = "a unit without a slab is neither free nor held";
            continue;
        }
        if (run->zone_idx != zone_idx)
            why = "a slab of another zone";
        if (u > run->first_unit || why != NULL)
            continue;
        why = run_check(slab, run);
        taken_slots += run->taken_count;
        taken_bytes += run->taken_count * slab->classes[run->class_idx].slot_bytes;
        slabs_units += run->units_count;
        if (!run->is_closed)
            free_slots[run->class_idx] += run->slots_count - run->taken_count;
    }
    for (uint32_t c = 0; c < slab->classes_count && why == NULL; c++)
        if (free_slots[c] != slab->classes[c].shares[zone_idx].free_slots)
            why = "free_slots of a class is wrong";
    if (why == NULL && (taken_slots != zone->taken_slots || taken_bytes != zone->taken_bytes))
        why = "taken slots or bytes are wrong";
    if (why == NULL && (slabs_units != zone->slabs_units || free_units != zone->free_units))
        why = "counts of units are wrong";
    return why;
}

bool kvt_slab_check(const struct kvt_slab *slab, const char **ret_why)
{
    const char *why = NULL;

    for (uint32_t z = 0; z < slab->zones_count && why == NULL; z++)
        why = zone_check(slab, z);
    if (why == NULL && slab->window_units > 0 && slab->zones[slab->window_zone].is_closed)
        why = "reclaim goes on in a closed zone";
    if (why != NULL)
        *ret_why = why;
    return why == NULL;
}
