/* The engine's counters, declared once: the enum, the names in Stats and metrics, and the help
 * texts come from this list. They only grow, are plain u64 of the engine's thread, and start at
 * zero with the daemon.
 *
 * X(SYMBOL, name, label, help). Counters of one name differ by their label. */
#pragma once

#define KVT_COUNTERS_LIST(X)                                                                       \
    X(LOOKUPS, "lookups", "", "Lookup requests that were served")                                  \
    X(LOOKUP_TOKENS, "lookup_tokens", "", "tokens of prefixes asked for (whole blocks)")           \
    X(HIT_TOKENS, "hit_tokens", "", "tokens before the boundaries that lookups answered")          \
    X(HIT_FULL_L1, "component_hit_tokens", "kind=full,tier=l1", "tokens that hits need, by place") \
    X(HIT_FULL_L2, "component_hit_tokens", "kind=full,tier=l2", "tokens that hits need, by place") \
    X(HIT_FULL_L3, "component_hit_tokens", "kind=full,tier=l3", "tokens that hits need, by place") \
    X(HIT_WINDOW_L1, "component_hit_tokens", "kind=window,tier=l1", "tokens that hits need")       \
    X(HIT_WINDOW_L2, "component_hit_tokens", "kind=window,tier=l2", "tokens that hits need")       \
    X(HIT_WINDOW_L3, "component_hit_tokens", "kind=window,tier=l3", "tokens that hits need")       \
    X(HIT_STATE_L1, "component_hit_tokens", "kind=state,tier=l1", "tokens that hits need")         \
    X(HIT_STATE_L2, "component_hit_tokens", "kind=state,tier=l2", "tokens that hits need")         \
    X(HIT_STATE_L3, "component_hit_tokens", "kind=state,tier=l3", "tokens that hits need")         \
    X(PROMOTES, "promotes", "", "Promote requests that were served")                               \
    X(PROMOTED_BYTES, "promoted_bytes", "", "payload bytes moved towards engines")                 \
    X(PROMOTED_L1, "promoted_blocks", "tier=l1", "blocks promoted, by where they came from")       \
    X(PROMOTED_L2, "promoted_blocks", "tier=l2", "blocks promoted, by where they came from")       \
    X(PROMOTED_L3, "promoted_blocks", "tier=l3", "blocks promoted, by where they came from")       \
    X(DEMOTES, "demotes", "", "Demote requests that were served")                                  \
    X(DEMOTED_BYTES, "demoted_bytes", "", "payload bytes taken from engines")                      \
    X(MOVE_DONE, "moves", "result=done", "moves of Promote and Demote by result")                  \
    X(MOVE_MISS, "moves", "result=miss", "moves of Promote and Demote by result")                  \
    X(MOVE_LATE, "moves", "result=late", "moves of Promote and Demote by result")                  \
    X(MOVE_PRESENT, "moves", "result=present", "moves of Promote and Demote by result")            \
    X(MOVE_PENDING, "moves", "result=pending", "moves of Promote and Demote by result")            \
    X(MOVE_NO_ROOM, "moves", "result=no_room", "moves of Promote and Demote by result")            \
    X(MOVE_CLIENT_GONE, "moves", "result=client_gone", "moves of Promote and Demote by result")    \
    X(MOVE_ABORTED, "moves", "result=aborted", "moves of Promote and Demote by result")            \
    X(RESERVES, "reserves", "", "Reserve requests that were served")                               \
    X(RESERVED_CELLS, "reserved_cells", "", "copies promised to a filler")                         \
    X(RESERVE_NO_ROOM, "reserve_no_room", "", "copies that could not be reserved: limit or index") \
    X(LEASES, "leases_given", "", "leases given by lookups")                                       \
    X(LEASES_LIMITED, "leases_limited", "", "lookups that got less than is there: lease limit")    \
    X(LEASES_EXPIRED, "leases_expired", "", "leases that ended with their deadline")               \
    X(TICKETS, "tickets_given", "", "tickets given by Reserve")                                    \
    X(TICKETS_EXPIRED, "tickets_expired", "", "tickets that ended with their deadline")            \
    X(INDEX_EVICTIONS, "index_evictions", "", "rounds of eviction because the index was full")     \
    X(INDEX_FULL, "index_full", "", "Reserves that found no room in the index after eviction")     \
    X(PREFETCHED, "prefetched_blocks", "", "blocks raised in the background")                      \
    X(PREFETCH_DROPPED, "prefetch_dropped", "", "prefetch wishes dropped: the queue was full")     \
    X(ATTACHES, "attaches", "", "sessions begun")                                                  \
    X(DETACHES, "detaches", "", "sessions ended")                                                  \
    X(HELD_IN_PLACE, "held_in_place", "", "shards of L1 that engines were told to read in place")  \
    X(REGIONS_LOST, "regions_lost", "", "sessions told that a GPU was lost")                       \
    X(RESETS, "resets", "", "namespaces reset")                                                    \
    X(EVICTS, "evicts", "", "Evict requests that were served")                                     \
    X(QUIESCED_LATE, "quiesced_late", "", "requests answered before their copies had ended")       \
    X(OPS_OK, "ops", "code=ok", "requests answered, by code")                                      \
    X(OPS_CANCELLED, "ops", "code=cancelled", "requests answered, by code")                        \
    X(OPS_INVALID, "ops", "code=invalid_argument", "requests answered, by code")                   \
    X(OPS_DEADLINE, "ops", "code=deadline_exceeded", "requests answered, by code")                 \
    X(OPS_NOT_FOUND, "ops", "code=not_found", "requests answered, by code")                        \
    X(OPS_DENIED, "ops", "code=permission_denied", "requests answered, by code")                   \
    X(OPS_EXHAUSTED, "ops", "code=resource_exhausted", "requests answered, by code")               \
    X(OPS_PRECONDITION, "ops", "code=failed_precondition", "requests answered, by code")           \
    X(OPS_ABORTED, "ops", "code=aborted", "requests answered, by code")                            \
    X(OPS_UNAVAILABLE, "ops", "code=unavailable", "requests answered, by code")                    \
    X(OPS_OTHER, "ops", "code=other", "requests answered, by code")

enum kvt_counter {
#define KVT_COUNTER_ENUM(symbol, name, label, help) KVT_COUNTER_##symbol,
    KVT_COUNTERS_LIST(KVT_COUNTER_ENUM)
#undef KVT_COUNTER_ENUM
        KVT_COUNTERS_COUNT
};
