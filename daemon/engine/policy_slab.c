#include "daemon/engine/policy_slab.h"

enum kvt_slab_verdict kvt_slab_decide(const struct kvt_slab_facts *facts)
{
    uint64_t share_bytes;

    KVT_ASSERT(facts->classes > 0);
    if (facts->own_age == UINT64_MAX)
        return facts->others_age == UINT64_MAX ? KVT_SLAB_NOTHING : KVT_SLAB_TAKE_OTHER;
    if (facts->others_age == UINT64_MAX)
        return KVT_SLAB_EVICT_OWN;
    share_bytes = facts->capacity_bytes / facts->classes;
    if (facts->own_bytes < share_bytes && facts->others_age < facts->own_age)
        return KVT_SLAB_TAKE_OTHER;
    return KVT_SLAB_EVICT_OWN;
}
