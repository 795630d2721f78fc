/* How the engine moves bytes: transfers are given to a tier and come back done.
 *
 * One journey of one shard of one block between two places. The engine owns a transfer until
 * kvt_tier_submit takes it; the tier's thread owns it, and the bytes at both of its places, until
 * kvt_tier_reap hands the same pointer back. In between the engine may not even read it: there is
 * no lock because there is never a second reader. What a transfer touches cannot be reused before
 * it is reaped, whatever happened to the request that wanted it.
 *
 *   tier     does
 *   host     CLIENT -> HOST (gathers, hashes, seals the header), HOST -> CLIENT (verifies if asked)
 *   device   CLIENT -> DEVICE, DEVICE -> CLIENT, DEVICE -> HOST (hashes, seals), HOST -> DEVICE;
 *            with a client whose memory is a GPU's, what the host does with others, too
 *   disk     HOST -> DISK, DISK -> HOST (always verifies), FLUSH
 *
 * submit and reap: engine thread only, never block, never allocate. Each tier rings the engine's
 * doorbell when it has finished something. A tier that is out of service still takes transfers and
 * hands them back with KVT_XFER_OUT_OF_SERVICE, in order, so nobody waits for it. */
#pragma once

#include "daemon/base/def.h"
#include "daemon/base/doorbell.h"
#include "daemon/base/limits.h"
#include "tiers/client.h"
#include "tiers/slot.h"

enum kvt_tier_id {
    KVT_TIER_DEVICE = 0, /* L1 */
    KVT_TIER_HOST = 1,   /* L2 */
    KVT_TIER_DISK = 2,   /* L3 */
};
#define KVT_TIERS_COUNT 3u

enum kvt_place_kind {
    KVT_PLACE_NONE = 0,
    KVT_PLACE_DEVICE, /* offset into the L1 arena; payload alone */
    KVT_PLACE_HOST,   /* offset into the L2 memory; a whole slot */
    KVT_PLACE_DISK,   /* global offset in L3: zone's base + offset in its data; a whole slot */
    KVT_PLACE_CLIENT, /* pieces of an engine's memory; payload alone */
};

struct kvt_place {
    enum kvt_place_kind kind;
    /* DEVICE: the incarnation of its zone for which the place was made. A zone of another one has
     * lost what was there: the transfer comes back OUT_OF_SERVICE. */
    uint32_t incarnation;
    uint64_t offset_bytes;       /* DEVICE, HOST, DISK */
    struct kvt_client_view view; /* CLIENT */
};

/* Results of a transfer. Negative would be -errno of the I/O itself. */
enum kvt_xfer_status {
    KVT_XFER_DONE = 0,
    KVT_XFER_BAD_SLOT = 1,       /* verification failed: `verdict` says how; the bytes are lost */
    KVT_XFER_CLIENT_GONE = 2,    /* the client's memory vanished under the copy (SIGBUS) */
    KVT_XFER_LATE = 3,           /* its deadline passed before it was started */
    KVT_XFER_OUT_OF_SERVICE = 4, /* the device is out of service */
    KVT_XFER_SHORT = 5,          /* the device moved fewer bytes than asked */
};

#define KVT_XFER_VERIFY (1u << 0)     /* check the slot before its payload leaves L2 */
#define KVT_XFER_FLUSH (1u << 1)      /* disk only: done when all before it is durable; see below */
#define KVT_XFER_BACKGROUND (1u << 2) /* foreground transfers go first */

/* A flush has no source. Its dst is NONE: the whole tier, or a DISK place: the zone of that offset
 * alone. It is done when every write that was taken before it and came back done is durable. When
 * it comes back with -errno, what was written in that zone since its last good flush is not durable
 * and no later flush makes it so (the system reports a lost write once): write it again or drop it.
 * LATE and OUT_OF_SERVICE say nothing about those writes: a later flush may be done. */

struct kvt_xfer {
    struct kvt_place src, dst;
    struct kvt_slot_key key; /* what the slot must hold: expected on reads, asserted on writes */
    uint32_t header_bytes;   /* of the slot; payload begins there */
    uint32_t flags;          /* KVT_XFER_* */
    uint64_t slot_bytes;     /* header, payload and padding: what goes to disk */
    uint64_t deadline_ns;    /* CLOCK_MONOTONIC; every transfer has one, 0 is a caller bug */
    /* Set by the tier, meaningful after reap only. */
    int status; /* kvt_xfer_status, or -errno */
    enum kvt_slot_verdict verdict;
    uint64_t started_ns, done_ns;
    /* The engine's, untouched by the tier; `next` is the tier's between submit and reap. */
    void *owner;
    struct kvt_xfer *next;
};

enum kvt_tier_health {
    KVT_TIER_HEALTH_OK = 0,
    KVT_TIER_HEALTH_OUT = 1, /* out of service; it is tried again by itself */
    KVT_TIER_HEALTH_OFF = 2, /* configured away, or absent on this machine */
};

/* Written by the tier's thread with relaxed atomics; read by anyone. */
struct kvt_tier_counters {
    _Atomic uint64_t reads, writes, flushes;
    _Atomic uint64_t read_bytes, written_bytes; /* slot bytes on disk, payload bytes elsewhere */
    _Atomic uint64_t errors_io, errors_bad_slot[6] /* by kvt_slot_verdict */, errors_client_gone;
    _Atomic uint64_t errors_late, errors_short, errors_no_space;
    _Atomic uint64_t outages; /* times it went out of service */
    _Atomic uint64_t busy_ns;
    _Atomic uint32_t health; /* kvt_tier_health */
    /* Raised, before the health says OUT, when everything that was in the zone is lost. */
    _Atomic uint32_t incarnation;
};

struct kvt_tier;
#define KVT_TIER_E_FULL 1 /* its ring is full: answer with a miss, do not queue */

/* The table each folder fills; tests fill one with a fake. */
struct kvt_tier_ops {
    const char *name; /* "device", "host", "disk" */
    int (*submit)(struct kvt_tier *tier, struct kvt_xfer *const xfers[], uint32_t count,
                  uint32_t *ret_taken);
    uint32_t (*reap)(struct kvt_tier *tier, struct kvt_xfer *ret_xfers[], uint32_t max);
    void (*close)(struct kvt_tier *tier);
};

/* A failure domain: [base_bytes, base_bytes + bytes) of the tier's offsets. A device that could not
 * be opened is a zone of 0 bytes that is out of service. */
struct kvt_tier_zone {
    uint64_t base_bytes, bytes;
    struct kvt_tier_counters *counters; /* of the device: health and all */
    char name[64];                      /* path, its end if it is longer */
    int numa_node; /* HOST, DEVICE: of its memory, or that its GPU is near to; -1: not known */
};

struct kvt_tier { /* first member of each tier's own struct */
    const struct kvt_tier_ops *ops;
    uint64_t capacity_bytes;    /* what the slab allocator may hand out */
    uint32_t inflight_max;      /* transfers that it takes before E_FULL */
    uint32_t slot_align_bytes;  /* of its slots; 0: what the engine likes */
    uint64_t payload_bytes_max; /* a larger payload cannot be moved by it; 0: no bound */
    uint32_t zones_count;       /* 0: one zone, all of it, with the tier's counters */
    struct kvt_tier_zone zones[KVT_ZONES_MAX]; /* fixed after open */
    struct kvt_tier_counters counters;
    char detail[288]; /* for people: "memfd, 2 MiB hugetlb pages, locked"; fixed after open */
};

/* Hands over a prefix of @xfers: 0 and *ret_taken (1..count), or KVT_TIER_E_FULL (none taken). */
static inline KVT_MUST_USE int kvt_tier_submit(struct kvt_tier *tier,
                                               struct kvt_xfer *const xfers[], uint32_t count,
                                               uint32_t *ret_taken)
{
    return tier->ops->submit(tier, xfers, count, ret_taken);
}

/* Up to @max finished transfers, oldest first; returns how many. */
static inline uint32_t kvt_tier_reap(struct kvt_tier *tier, struct kvt_xfer *ret_xfers[],
                                     uint32_t max)
{
    return tier->ops->reap(tier, ret_xfers, max);
}

/* Of the tier as a whole, now: with zones, whether one of them is in service. Any thread. */
static inline enum kvt_tier_health kvt_tier_health(const struct kvt_tier *tier)
{
    if (tier->zones_count == 0)
        return (enum kvt_tier_health)atomic_load_explicit(&tier->counters.health,
                                                          memory_order_relaxed);
    for (uint32_t i = 0; i < tier->zones_count; i++)
        if (atomic_load_explicit(&tier->zones[i].counters->health, memory_order_relaxed) ==
            KVT_TIER_HEALTH_OK)
            return KVT_TIER_HEALTH_OK;
    return KVT_TIER_HEALTH_OUT;
}

/* Stops the thread after what it holds is finished or failed; everything taken must be reaped
 * before, but of a device of L3 that is out of service (tiers/disk/disk.h). NULL-proof; returns
 * NULL. */
static inline struct kvt_tier *kvt_tier_close(struct kvt_tier *tier)
{
    if (tier != NULL)
        tier->ops->close(tier);
    return NULL;
}
