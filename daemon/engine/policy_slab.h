/* The slab policy: a class of slots found no room; does it evict its own, or take a slab from
 * another size?
 *
 * A class with nothing of its own to evict has to take. One that holds less than its even share
 * takes when the others' oldest is older than its own oldest: then the tier as a whole stays near
 * LRU across sizes. A class at or above its share evicts its own: sizes would else trade slabs back
 * and forth. Pure; any thread. */
#pragma once

#include "daemon/base/def.h"

struct kvt_slab_facts {
    uint64_t own_age, others_age; /* of the next victim; lower is older; UINT64_MAX: none */
    uint64_t own_bytes;           /* taken slots of this class */
    uint64_t capacity_bytes;
    uint32_t classes; /* in use in this tier, this one counted */
};

enum kvt_slab_verdict {
    KVT_SLAB_EVICT_OWN,
    KVT_SLAB_TAKE_OTHER,
    KVT_SLAB_NOTHING, /* nobody has anything to evict */
};

enum kvt_slab_verdict kvt_slab_decide(const struct kvt_slab_facts *facts);
