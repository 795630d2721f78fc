#include "daemon/engine/policy_promote.h"

enum kvt_promote_verdict kvt_promote_decide(const struct kvt_promote_facts *facts)
{
    uint64_t max_bytes = facts->inflight_bytes_max;

    if (facts->is_background) {
        if (facts->room_slots <= facts->headroom_slots)
            return KVT_PROMOTE_NO;
        max_bytes /= 2;
    }
    if (facts->inflight_bytes == 0)
        return KVT_PROMOTE_GO;
    if (facts->inflight_bytes >= max_bytes || facts->bytes > max_bytes - facts->inflight_bytes)
        return KVT_PROMOTE_WAIT;
    return KVT_PROMOTE_GO;
}
