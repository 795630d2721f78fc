/* The promotion policy: may bytes begin to come up now?
 *
 * What is on its way up is bounded in bytes, so that many waiting requests can neither fill L2 with
 * blocks that nobody reads yet nor bury the disk. One transfer is always let through when nothing
 * is in flight, however large. Background promotions (prefetch) leave headroom: they may use half
 * of the budget, and only while the tier has free room without evicting. Pure; any thread. */
#pragma once

#include "daemon/base/def.h"

struct kvt_promote_facts {
    uint64_t inflight_bytes, inflight_bytes_max;
    uint64_t bytes; /* of this one */
    bool is_background;
    uint64_t room_slots;     /* free in the tier, without evicting */
    uint64_t headroom_slots; /* to be left free by background promotions */
};

enum kvt_promote_verdict {
    KVT_PROMOTE_GO,
    KVT_PROMOTE_WAIT, /* until something in flight has arrived */
    KVT_PROMOTE_NO,   /* background only: not worth an eviction */
};

enum kvt_promote_verdict kvt_promote_decide(const struct kvt_promote_facts *facts);
