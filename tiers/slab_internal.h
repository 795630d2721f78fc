/* What the files of the slab allocator share; nobody else includes it.
 *
 *   unit        0      1      2      3      4      5
 *   by_unit     A      A      A      NULL   B      NULL      pointer to the slab that covers it
 *   is_free                          1             1         bitmap; a held unit is in neither
 *   slot idx    0..511 ..1023 ..1535        2048..           first unit * slots_per_unit + k
 *   zones       | zone 0                    | zone 1     |   a range of units each
 *
 * Index ranges of slabs never overlap because a unit has at most slots_per_unit slots of the
 * smallest size. A slab's free slots are a two-level bitmap, lowest first, so neighbours go to
 * neighbouring takes. A slab with free slots is on the `partial` list of its class and zone, whose
 * head is used until it is full; that makes take and give O(1) but for the making of a slab.
 * Closing a zone changes none of this: whoever takes, counts or reclaims passes it over.
 *
 * Generations survive a slab: each unit keeps the greatest generation that any of its slots had
 * (`floors`), and a later slab over it starts there.
 *
 * An adopted slab is as short as the slots allow that were adopted in it: how long it was before
 * the restart is not known, and a unit too many would be in the way of its neighbour's slots. It
 * grows as more slots are adopted, and once more (the `short` list) when its class needs room.
 *
 * Reclaim closes a window of units in one zone: its slabs leave their partial lists, and units of
 * the window that are or fall free are held until the whole window is free, then released at
 * once. */
#pragma once

#include "daemon/base/list.h"
#include "tiers/slab.h"

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
    struct kvt_list link;       /* on the partial list of its class and zone, or self-linked */
    struct kvt_list short_link; /* on the short list there, or self-linked */
    uint32_t class_idx, zone_idx;
    uint32_t first_unit, units_count;
    uint32_t slots_count, taken_count;
    uint32_t slots_max; /* it has metadata for so many */
    uint32_t generation_max;
    bool is_closed; /* being emptied by reclaim */
    size_t meta_bytes;
    uint64_t summary; /* bit w: words[w] has a free slot */
    uint64_t *words;  /* bit k: slot k is free */
    struct slab_slot slots[];
};

/* What a class has in one zone. */
struct slab_share {
    struct kvt_list partial, shorts;
    uint64_t free_slots;     /* in slabs that reclaim has not closed */
    uint64_t full_at_change; /* the zone's `changes` when no run was found: not looked for again */
    uint64_t room_at_change; /* the zone's `changes` when room_unit_slots was counted */
    uint64_t room_unit_slots;
};

struct slab_class {
    uint64_t slot_bytes;
    uint32_t units_min;     /* the shortest run that holds one slot */
    uint32_t units_best;    /* the shortest run that wastes little */
    struct slab_run *spare; /* kept so that a slab of one slot does not go to the heap each time */
    struct slab_share *shares; /* one a zone */
};

struct slab_zone {
    uint64_t base_bytes;
    uint32_t first_unit, units_count;
    uint32_t free_units;
    bool is_closed;
    uint64_t changes; /* of the map of its units */
    uint64_t taken_slots, taken_bytes, slabs_units;
};

struct kvt_slab {
    struct kvt_slab_config config;
    uint32_t units_count, slots_per_unit;
    struct slab_run **by_unit;
    uint64_t *is_free;
    uint32_t *floors;
    struct slab_class *classes;
    uint32_t classes_count;
    uint64_t meta_bytes;
    uint32_t zones_count;
    struct slab_zone zones[KVT_ZONES_MAX];
    /* The window that reclaim closed, in one zone; window_units 0: none. */
    uint32_t window_first, window_units, window_zone;
};

static inline bool slab_bit_get(const uint64_t *words, uint32_t bit)
{
    return (words[bit / 64] >> (bit % 64)) & 1;
}

static inline void slab_bit_set(uint64_t *words, uint32_t bit)
{
    words[bit / 64] |= 1ull << (bit % 64);
}

static inline void slab_bit_clear(uint64_t *words, uint32_t bit)
{
    words[bit / 64] &= ~(1ull << (bit % 64));
}

static inline bool slab_window_covers(const struct kvt_slab *slab, uint32_t unit)
{
    return unit >= slab->window_first && unit - slab->window_first < slab->window_units;
}

static inline uint32_t slab_zone_end(const struct slab_zone *zone)
{
    return zone->first_unit + zone->units_count;
}

/* slab_reclaim.c: releases the closed window when all of it is empty, or at once. */
void slab_window_release(struct kvt_slab *slab, bool is_cancelled);
