/* Who has which slot of a tier. A tier's bytes are cut into units of 2 MiB; a slab is a run of
 * units given to one slot size (a class); when its last slot comes back, its units are free for any
 * class.
 *
 *   zone 0                                                              zone 1
 *   | slab of 264 KiB slots  | free | slab of 20 MiB slots | free | rest | slab | free | rest |
 *
 * A zone is what fails as one (a device of the tier): units are counted inside it, no slab crosses
 * from one to the next, and what remains of less than a unit at its end is not used. A closed zone
 * gives nothing, while its taken slots stay what they are until they are given back.
 *
 * A slot is named by (index, generation): giving it back raises the generation, so a stale holder
 * sees that its slot is somebody else's and gets a miss. Each taken slot carries its owner's 32-bit
 * number, so that a slab can be emptied by its owners when another size needs the room.
 *
 * Engine-only. Memory: one small array a slab, made when the slab is made, and one a class, both
 * bounded by meta_bytes_max; no slot metadata when there is no slab. */
#pragma once

#include "daemon/base/def.h"
#include "daemon/base/limits.h"

struct kvt_slab; /* the allocator of one tier */

struct kvt_slot {
    uint32_t idx, generation; /* generation 0 is never given: {0, 0} is "no slot" */
};
#define KVT_SLOT_NONE ((struct kvt_slot){0, 0})

/* The unit of L3, always: where a slab begins that a slot lies in is not on disk, a scan reckons
 * with this (docs/formats.md). */
#define KVT_SLAB_UNIT_L3_BYTES (2u << 20)

enum {
    KVT_SLAB_E_FULL = 1,    /* no free slot of this class and no free run of units: evict */
    KVT_SLAB_E_TOO_BIG = 2, /* a slot of this size can never fit the tier's capacity */
    KVT_SLAB_E_CLASSES = 3, /* too many different sizes, or no memory for one more */
    KVT_SLAB_E_TAKEN = 4,   /* adopt: that slot is not there to be had */
};

struct kvt_slab_config {
    uint64_t capacity_bytes; /* of the only zone, when zones_count is 0; else not looked at */
    uint32_t unit_bytes;     /* power of two; 2 MiB, less in tests */
    uint32_t align_bytes;    /* of slots and zones; slot sizes are rounded up to it */
    uint64_t meta_bytes_max;
    uint32_t zones_count;               /* 0: one, of capacity_bytes */
    uint64_t zone_bytes[KVT_ZONES_MAX]; /* multiples of align_bytes; one of 0 bytes is legal */
};
/* 0, -EINVAL (the configuration makes no sense) or -ENOMEM. */
KVT_MUST_USE int kvt_slab_new(struct kvt_slab **ret_slab, const struct kvt_slab_config *config);
struct kvt_slab *kvt_slab_free(struct kvt_slab *slab);

/* Finds or makes the class of @slot_bytes. */
KVT_MUST_USE int kvt_slab_class(struct kvt_slab *slab, uint64_t slot_bytes, uint32_t *ret_class);
/* 0 or KVT_SLAB_E_FULL. Neighbouring takes get neighbouring slots where there is room, in any open
 * zone. */
KVT_MUST_USE int kvt_slab_take(struct kvt_slab *slab, uint32_t class_idx, uint32_t owner,
                               struct kvt_slot *ret_slot);
/* The same in zone @zone_idx only; a closed one is full. */
KVT_MUST_USE int kvt_slab_take_in(struct kvt_slab *slab, uint32_t class_idx, uint32_t zone_idx,
                                  uint32_t owner, struct kvt_slot *ret_slot);
/* Takes exactly the slot of @class_idx at @offset_bytes of a slab that begins at @run_offset_bytes,
 * as it was before a restart. Makes that slab where its units are free. Offsets come from disk: any
 * value is safe. 0; KVT_SLAB_E_TAKEN when such a slot does not fit what is there (another slab
 * overlaps, another class, no slot begins there, it is taken, its zone is closed or ends before
 * it); KVT_SLAB_E_FULL when there is no memory for the slab. In any order, all slots of one
 * allocator fit into another of the same zones. */
KVT_MUST_USE int kvt_slab_adopt(struct kvt_slab *slab, uint32_t class_idx, uint64_t offset_bytes,
                                uint64_t run_offset_bytes, uint32_t owner,
                                struct kvt_slot *ret_slot);
void kvt_slab_give(struct kvt_slab *slab, struct kvt_slot slot); /* asserts that it is current */
bool kvt_slab_is_current(const struct kvt_slab *slab, struct kvt_slot slot);
/* Of a current slot: where it begins, where its slab begins (bytes of the tier), and its zone. */
uint64_t kvt_slab_offset(const struct kvt_slab *slab, struct kvt_slot slot);
uint64_t kvt_slab_run_offset(const struct kvt_slab *slab, struct kvt_slot slot);
uint32_t kvt_slab_zone(const struct kvt_slab *slab, struct kvt_slot slot);
uint64_t kvt_slab_slot_bytes(const struct kvt_slab *slab, uint32_t class_idx);
uint32_t kvt_slab_owner(const struct kvt_slab *slab, struct kvt_slot slot);

/* A closed zone gives no slot and counts neither as room, nor for reclaim, nor in the stats of the
 * whole. A reclaim that goes on there is cancelled. Zones begin open; both may be repeated. */
void kvt_slab_zone_close(struct kvt_slab *slab, uint32_t zone_idx);
void kvt_slab_zone_open(struct kvt_slab *slab, uint32_t zone_idx);

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
/* Of all open zones together. */
void kvt_slab_stats(const struct kvt_slab *slab, struct kvt_slab_stats *ret_stats);
/* Of one zone, open or closed; meta_bytes and classes are those of the allocator. */
void kvt_slab_zone_stats(const struct kvt_slab *slab, uint32_t zone_idx,
                         struct kvt_slab_stats *ret_stats);
/* Recounts everything; true, or false and *ret_why. Tests. */
bool kvt_slab_check(const struct kvt_slab *slab, const char **ret_why);
