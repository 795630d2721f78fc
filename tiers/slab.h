/* Who has which slot of a tier. A tier's bytes are cut into units of 2 MiB; a slab is a run of
 * units given to one slot size (a class); when its last slot comes back, its units are free for any
 * class.
 *
 *   units   | slab of 264 KiB slots  | free | slab of 20 MiB slots (a run of units) | free |
 *
 * A slot is named by (index, generation): giving it back raises the generation, so a stale holder
 * sees that its slot is somebody else's and gets a miss. Each taken slot carries its owner's 32-bit
 * number, so that a slab can be emptied by its owners when another size needs the room.
 *
 * Engine-only. Memory: one small array a slab, made when the slab is made, bounded by
 * meta_bytes_max; no slot metadata when there is no slab. */
#pragma once

#include "daemon/base/def.h"

struct kvt_slab; /* the allocator of one tier */

struct kvt_slot {
    uint32_t idx, generation; /* generation 0 is never given: {0, 0} is "no slot" */
};
#define KVT_SLOT_NONE ((struct kvt_slot){0, 0})

enum {
    KVT_SLAB_E_FULL = 1,    /* no free slot of this class and no free run of units: evict */
    KVT_SLAB_E_TOO_BIG = 2, /* a slot of this size can never fit the tier's capacity */
    KVT_SLAB_E_CLASSES = 3, /* too many different sizes */
};

struct kvt_slab_config {
    uint64_t capacity_bytes; /* a hard bound; the rest of less than a unit is not used */
    uint32_t unit_bytes;     /* power of two; 2 MiB, less in tests */
    uint32_t align_bytes;    /* of slots; slot sizes are rounded up to it */
    uint64_t meta_bytes_max;
};
KVT_MUST_USE int kvt_slab_new(struct kvt_slab **ret_slab, const struct kvt_slab_config *config);
struct kvt_slab *kvt_slab_free(struct kvt_slab *slab);

/* Finds or makes the class of @slot_bytes. */
KVT_MUST_USE int kvt_slab_class(struct kvt_slab *slab, uint64_t slot_bytes, uint32_t *ret_class);
/* 0 or KVT_SLAB_E_FULL. Neighbouring takes get neighbouring slots where there is room. */
KVT_MUST_USE int kvt_slab_take(struct kvt_slab *slab, uint32_t class_idx, uint32_t owner,
                               struct kvt_slot *ret_slot);
void kvt_slab_give(struct kvt_slab *slab, struct kvt_slot slot); /* asserts that it is current */
bool kvt_slab_is_current(const struct kvt_slab *slab, struct kvt_slot slot);
uint64_t kvt_slab_offset(const struct kvt_slab *slab, struct kvt_slot slot); /* bytes, current */
uint64_t kvt_slab_slot_bytes(const struct kvt_slab *slab, uint32_t class_idx);
uint32_t kvt_slab_owner(const struct kvt_slab *slab, struct kvt_slot slot);

/* Room that @class_idx could have without evicting: free slots, and slots in free units. */
uint64_t kvt_slab_room_slots(const struct kvt_slab *slab, uint32_t class_idx);

/* Moving room between sizes. Picks the run of units that is cheapest to empty for one more slab of
 * @class_idx (fewest taken slots, never of that class itself) and closes it: no slot of it is taken
 * again, and its units fall free as its owners give their slots back. Writes up to @max owners to
 * evict and returns how many; 0: nothing can be picked. At most one run is closed at a time: a
 * second call while it is not empty returns what is left of it. */
uint32_t kvt_slab_reclaim(struct kvt_slab *slab, uint32_t class_idx, uint32_t max,
                          uint32_t *ret_owners);
void kvt_slab_reclaim_cancel(struct kvt_slab *slab);

struct kvt_slab_stats {
    uint64_t capacity_bytes; /* whole units */
    uint64_t slabs_bytes;    /* units that belong to a slab */
    uint64_t taken_bytes;    /* slots in use, with their padding */
    uint64_t taken_slots;
    uint64_t meta_bytes;
    uint32_t classes;
};
void kvt_slab_stats(const struct kvt_slab *slab, struct kvt_slab_stats *ret_stats);
/* Recounts everything; true, or false and *ret_why. Tests. */
bool kvt_slab_check(const struct kvt_slab *slab, const char **ret_why);
