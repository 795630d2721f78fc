/* Tiers for the simulator: they move real bytes (device and disk are ordinary memory), in virtual
 * time, and fail as a seed says. No threads: the test sets the time and everything that is due
 * happens inside reap, in an order that need not be the order of submission.
 *
 * Fault model. A transfer takes a random time; its bytes are copied when it completes, not when it
 * is submitted, so that memory which is given back too early is caught. A failed transfer leaves
 * garbage at its destination. Each kind of failure has a rate in 1/1000; `outage` makes every
 * transfer of a stretch of time fail with OUT_OF_SERVICE. Whatever else happens, a whole slot that
 * is read is checked against the key that the engine expects: a mismatch that was not injected is
 * the engine's fault and ends the process.
 *
 * Zones of L1 are GPUs that can be lost: what was in one is garbage then, its incarnation is
 * another, and a place or a client's layout of the old one is refused. Memory of a GPU is ordinary
 * memory here, which only this tier copies: a transfer that reaches the wrong tier ends the
 * process.
 */
#pragma once

#include "tiers/tier.h"

struct fake_tier;

struct fake_tier_config {
    enum kvt_tier_id id;
    uint64_t capacity_bytes;
    uint8_t *host_memory; /* L2's, shared by all three */
    uint64_t seed;
    uint32_t inflight_max;
    uint64_t delay_ns_max;
    /* In 1/1000. */
    uint32_t error_rate, bad_slot_rate, short_rate, client_gone_rate, full_rate, outage_rate;
    uint64_t outage_ns_max;
    /* After a crash a slot may hold something else than its row says: reading it is BAD_SLOT, not
     * the engine's fault. */
    bool is_crash_tolerant;
    uint32_t zones;             /* equal parts, each with its health; 0: none */
    uint64_t payload_bytes_max; /* 0: no bound */
    /* DISK: what was written since the last fake_tier_sync of its zone may be lost by
     * fake_tier_crash, or torn at 512 bytes, in any order. Else all is there at once. */
    bool is_volatile;
};

/* NULL: no memory. */
struct fake_tier *fake_tier_new(const struct fake_tier_config *config);
struct kvt_tier *fake_tier_base(struct fake_tier *tier);
/* From now on transfers that are due at or before @now_ns are reaped. */
void fake_tier_set_time(struct fake_tier *tier, uint64_t now_ns);
/* When the next one is due; KVT_TIME_NEVER_NS: none. */
uint64_t fake_tier_next_ns(const struct fake_tier *tier);
/* Turns all failures on or off. */
void fake_tier_set_faulty(struct fake_tier *tier, bool is_faulty);
/* Takes one zone out of service, or back. */
void fake_tier_set_zone_out(struct fake_tier *tier, uint32_t zone, bool is_out);
/* L1: what is in the zone is lost, and it goes out of service; and comes back, with garbage. */
void fake_tier_lose_zone(struct fake_tier *tier, uint32_t zone);
void fake_tier_revive_zone(struct fake_tier *tier, uint32_t zone);
bool fake_tier_is_zone_out(const struct fake_tier *tier, uint32_t zone);
uint32_t fake_tier_incarnation(const struct fake_tier *tier, uint32_t zone);
/* What was written to the zone before is durable. */
void fake_tier_sync(struct fake_tier *tier, uint32_t zone);
/* The power is gone; nothing is in flight. */
void fake_tier_crash(struct fake_tier *tier);
uint8_t *fake_tier_memory(struct fake_tier *tier);
uint64_t fake_tier_bad_slots(const struct fake_tier *tier); /* found by reading, not injected */
uint64_t fake_tier_injected(const struct fake_tier *tier);  /* failures so far */
/* The next @count transfers out of the disk find a slot that has rotted, whatever is_faulty says.
 */
void fake_tier_spoil(struct fake_tier *tier, uint32_t count);
/* The next @count transfers end with -EIO, whatever is_faulty says. */
void fake_tier_fail(struct fake_tier *tier, uint32_t count);

/* splitmix64: the tests' generator. */
static inline uint64_t fake_random(uint64_t *state)
{
    uint64_t z = (*state += 0x9e3779b97f4a7c15ull);

    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}
