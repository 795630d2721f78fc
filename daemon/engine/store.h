/* The store: where radix meets tiers. It knows which copies of a (block, component) exist, in which
 * slots, in which state, and moves them; it does not know requests, sessions, leases or tickets
 * (those are the rest of daemon/engine, which calls this header).
 *
 * A *cell* is one component of one block: the thing that has copies. The tree holds its number as
 * the opaque handle and, as mask bits, in which tiers its copies are READY (bit = enum kvt_tier_id)
 * and whether it is being filled (KVT_RADIX_BIT_HOLD). A *copy* is a cell in one tier: one slot a
 * shard (ranks, or one when replicated). Only this module changes a copy's state:
 *
 *   FREE -> RESERVED -> FILLING -> READY (pinned n >= 0) -> DRAINING -> FREE
 *
 *   claim    cell is promised to one filler, HOLD is set, no slot is taken yet     (RESERVED)
 *   fill     a shard's slot is taken and bytes flow from the client               (FILLING)
 *   READY    every shard is there; the tier's bit is set in the tree; HOLD clears
 *   read     pins the copy while a transfer uses its slots
 *   evict    L1 -> L2 -> L3 or dropped, as the write policy says                   (DRAINING)
 *
 * A *job* is one wish of the layer above (fill, read, raise, lower, flush). Jobs for the same
 * missing copy wait for one transfer. A job ends exactly once by its `done`; until then its client
 * memory may be in use. Cancelling a job that has not touched client memory ends it at once;
 * otherwise it ends when its transfer is reaped. In-flight transfers hold copies, never tree nodes:
 * a cell whose block is gone (evicted, reset) lives on as an orphan until its last transfer is
 * reaped, and its slots are then freed.
 *
 * Nothing here waits for another: a job that gets no slot waits in a bounded queue for its deadline
 * at most; a full queue is NO_ROOM at once. A raise that gets no L2 slot for a read streams through
 * a few bounce slots. Capacity is the slab allocators': hard.
 *
 * Engine thread only; the clock is passed in; deterministic given (calls, transfer completions,
 * time, seed). Memory is taken in kvt_store_new, but for slab metadata, which is bounded. */
#pragma once

#include "daemon/base/api.h"
#include "daemon/base/list.h"
#include "daemon/engine/policy_write.h"
#include "radix/radix.h"
#include "tiers/index/index.h"
#include "tiers/slab.h"
#include "tiers/tier.h"

struct kvt_store;

/* A copy that is on its way down is still readable, but the tree must already let its parent go
 * (leaf first), so its bit moves from `tier` to `tier + KVT_STORE_BITS_DRAINING`. A lookup that
 * wants to count such copies as resident allows both, and adds up both of blocks_at[]. */
#define KVT_STORE_BITS_DRAINING 3u
static inline uint8_t kvt_store_mask_allowed(uint8_t tier_bits)
{
    return (uint8_t)((tier_bits & 7u) | (tier_bits & 7u) << KVT_STORE_BITS_DRAINING);
}

struct kvt_store_config {
    struct kvt_radix *radix;                 /* the caller's; outlives the store; victims are asked
                                                for bits 0..2 only (its mask_evictable) */
    struct kvt_tier *tiers[KVT_TIERS_COUNT]; /* NULL: this tier is off; HOST is required */
    uint8_t *host_memory;                    /* of the HOST tier: headers are written here */
    uint32_t slab_unit_bytes[KVT_TIERS_COUNT]; /* 0: 2 MiB */
    size_t memory_bytes;                       /* for cells, shards, jobs' queues, slab metadata */
    uint32_t waiting_jobs_max;                 /* 0: 16,384 */
    uint32_t bounce_slots;                     /* 0: 4 */
    enum kvt_write_policy write_policy;        /* L2 -> L3 */
    uint32_t selective_touches;                /* n-th touch that makes it worth a write; 0: 2 */
    uint64_t write_budget_bytes_per_s;         /* to L3; 0: none set */
    uint64_t promote_inflight_bytes_max;       /* 0: an eighth of L2 */
    uint64_t transfer_deadline_ns;             /* of transfers between tiers; 0: 30 s */
    bool is_verify_l2_always;                  /* check slots each time they leave L2 */
    uint64_t scrub_bytes_per_s;                /* the scrubber's pace from the start; 0: off */
    uint64_t (*real_ns)(void); /* CLOCK_REALTIME, for slot headers; NULL: kvt_clock_real_ns */
    /* L3 that outlives the daemon; all of it empty: it does not. The tree has tags then, and tells
     * kvt_store_block_gone. */
    struct kvt_index *indexes[KVT_ZONES_MAX]; /* a zone of L3 each; outlive the store */
    uint8_t store_id[KVT_STORE_ID_BYTES];     /* of the set of devices: in every slot's header */
    uint64_t stamp_first, stamp_end; /* numbers for blocks and contents that were never used; end 0:
                                        no end */
    uint32_t stripe_blocks;          /* neighbouring blocks of a path on one device; 0: 16 */
    uint64_t lost_after_ns;          /* out of service for longer: its copies go; 0: 30 s */
};

/* -ENOMEM, -EINVAL, or 0. */
KVT_MUST_USE int kvt_store_new(struct kvt_store **ret_store, const struct kvt_store_config *config);
/* All jobs must have ended. NULL-proof; returns NULL. */
struct kvt_store *kvt_store_free(struct kvt_store *store);

struct kvt_store_ns_config {
    uint8_t fingerprint[KVT_FINGERPRINT_BYTES];
    uint64_t epoch;
    uint32_t block_tokens;
    uint32_t ranks;
    uint32_t components_count;
    struct {
        uint64_t bytes_per_block; /* of one rank's shard, as it is stored */
        bool is_replicated;
    } components[KVT_COMPONENTS_MAX];
};
enum { KVT_STORE_E_TOO_BIG = 1 /* a slot would not fit a configured tier */ };
/* Says how large the slots of namespace @ns are; an index that the tree reuses is opened again.
 * -EINVAL (also: ns.idx >= KVT_NAMESPACES_MAX), -EBUSY (transfers of the index's last namespace are
 * not over), -ENOSPC (too many different slot sizes), KVT_STORE_E_TOO_BIG, 0. */
KVT_MUST_USE int kvt_store_ns_open(struct kvt_store *store, struct kvt_radix_ns ns,
                                   const struct kvt_store_ns_config *config);
/* It has no cells; its index may be opened again. */
void kvt_store_ns_close(struct kvt_store *store, struct kvt_radix_ns ns);
/* Copies of it that are somewhere, maybe on their way out. */
bool kvt_store_ns_has_cells(const struct kvt_store *store, struct kvt_radix_ns ns);
void kvt_store_ns_set_epoch(struct kvt_store *store, struct kvt_radix_ns ns, uint64_t epoch);
/* Its number in the catalog: what rows of the index call it. */
void kvt_store_ns_set_number(struct kvt_store *store, struct kvt_radix_ns ns, uint32_t number);

/* ---- cells ---------------------------------------------------------------------------------- */

struct kvt_cell { /* a handle; stale is an answer: jobs on it end with MISS or ABORTED */
    uint32_t idx, generation;
};
#define KVT_CELL_NONE ((struct kvt_cell){0, 0})

enum kvt_claim {
    KVT_CLAIM_MINE = 0,    /* fill every shard of it, or unclaim */
    KVT_CLAIM_PENDING = 1, /* somebody else is filling it */
    KVT_CLAIM_PRESENT = 2, /* READY in some tier */
    KVT_CLAIM_NO_ROOM = 3, /* no memory for its record */
};
/* @block is live. @root_digest: SHA-256 of its root key, for slot headers (copied). */
enum kvt_claim kvt_store_claim(struct kvt_store *store, struct kvt_radix_block block,
                               uint32_t component, const uint8_t root_digest[KVT_FINGERPRINT_BYTES],
                               struct kvt_cell *ret_cell);
/* Ends a claim that is not complete: shards filled so far are freed (those in flight when they are
 * reaped), HOLD clears, fills waiting on it end with ABORTED. Stale or complete: nothing. */
void kvt_store_unclaim(struct kvt_store *store, struct kvt_cell cell);
/* The cell of (block, component): NONE if it has no copy in any tier. */
struct kvt_cell kvt_store_cell(const struct kvt_store *store, struct kvt_radix_block block,
                               uint32_t component);
/* The same for a cell that came out of kvt_radix_path (its handle): no tree access. */
struct kvt_cell kvt_store_cell_of(const struct kvt_store *store, uint32_t radix_handle);
/* Tiers in which it is READY: bits of enum kvt_tier_id; 0: none, or stale. */
uint8_t kvt_store_ready_mask(const struct kvt_store *store, struct kvt_cell cell);
/* Shards of a claimed cell that are filled, a bit a rank. */
uint32_t kvt_store_filled_mask(const struct kvt_store *store, struct kvt_cell cell);
uint64_t kvt_store_cell_bytes(const struct kvt_store *store, struct kvt_cell cell); /* all shards */
/* A shard in L1 that somebody outside reads in place: its copy, all shards, is pinned until unhold,
 * whatever becomes of its block, so that its slots are nobody else's. */
struct kvt_store_held {
    uint32_t cell, zone, incarnation;
    uint64_t offset_bytes; /* in the zone */
    uint32_t zones;        /* of all shards, a bit each: it is lost with any of them */
};
/* Where the shard is; false: the cell has no good copy in L1. Nothing is pinned. */
bool kvt_store_hold_find(struct kvt_store *store, struct kvt_cell cell, uint32_t rank,
                         struct kvt_store_held *ret_held);
/* Pins what was just found; false: so many hold it that no more may, since transfers need pins,
 * too. */
KVT_MUST_USE bool kvt_store_hold(struct kvt_store *store, const struct kvt_store_held *held);
void kvt_store_unhold(struct kvt_store *store, const struct kvt_store_held *held);
uint64_t kvt_store_held_count(const struct kvt_store *store);
/* Drops every copy of the cell that no transfer holds now, the others when they are reaped. */
void kvt_store_drop(struct kvt_store *store, struct kvt_cell cell);
/* For a tree (or a cell table) that is full: drops up to @cells_max of the least recently used
 * cells, those in the lowest tier first, without writing anything down. Returns how many copies
 * went; 0: nothing can go. Call kvt_radix_insert again after it. */
uint32_t kvt_store_evict_index(struct kvt_store *store, uint32_t cells_max);
/* Why a (block, component) that was stored is not there: a bounded memory of recent losses.
 * KVT_WHY_EVICTED when nothing special is remembered. */
enum kvt_why kvt_store_why_lost(const struct kvt_store *store, struct kvt_radix_block block,
                                uint32_t component);

/* ---- jobs ----------------------------------------------------------------------------------- */

enum kvt_job_kind {
    KVT_JOB_FILL, /* client -> the claimed cell's shard `rank`, into L1 when there is room, else L2.
                     PRESENT: the shard is there already. When it fails (NO_ROOM: no slot, or an
                     I/O error; LATE; CLIENT_GONE) the claim stays: fill again, or unclaim */
    KVT_JOB_READ, /* a shard, from the best tier, -> client */
    KVT_JOB_RAISE, /* a copy into `tier` (HOST or DEVICE); the lower copy stays. DONE at once when
                      there is a copy in it or above */
    KVT_JOB_LOWER, /* a copy into `tier` (HOST or DISK); `is_move` drops the higher copies after.
                      PRESENT when it was there, or below, already */
    KVT_JOB_FLUSH, /* what L3 took before is durable, with its place in the index, or never will be
                      (kvt_store_is_durable says): DONE; ABORTED if the flush itself failed */
};

struct kvt_job;
typedef void (*kvt_job_done_fn)(struct kvt_job *job);

struct kvt_job { /* the caller's memory, from submit until done */
    enum kvt_job_kind kind;
    struct kvt_cell cell;
    uint32_t rank;         /* FILL, READ: which shard; 0 for replicated components */
    enum kvt_tier_id tier; /* RAISE, LOWER: where to */
    bool is_move;          /* LOWER */
    bool is_background;    /* prefetch, write-back: foreground goes first, budget applies */
    bool is_upper_only;    /* READ: only from L1 or L2; what is lower is MISS */
    uint64_t deadline_ns;
    struct kvt_client_view view; /* FILL, READ; engine_blocks stay valid until done */
    /* Zones of L1 by rank: the GPUs that its engine is on, KVT_RANKS_MAX of them, there until done.
     * Slots that the job needs are taken there when there is room, or in the part of L2 near to it;
     * NULL: where the namespace's last job had them, at first rank r's in zone r, around. */
    const uint8_t *home;
    kvt_job_done_fn done; /* from kvt_store_turn or, for what fails at once, from submit */
    void *owner;
    /* Results, for done. */
    enum kvt_move_result result;
    enum kvt_tier_id from; /* READ: the tier that had it when it was asked for */
    uint64_t moved_bytes;  /* FILL, READ: of the client's memory */
    /* The store's. */
    bool is_raised;    /* READ: its bytes came up from disk for it, and are read from L2 */
    bool is_cancelled; /* asked to end while a transfer touched its client memory */
    struct kvt_list link;
    uint32_t state;
    uint32_t heap_idx; /* place in the queue of deadlines */
    uint64_t sync_pos; /* FLUSH: copies that wanted the index before it */
    void *xfer;
};

/* Takes the job. It always ends by done: also when it cannot be queued (NO_ROOM). */
void kvt_store_submit(struct kvt_store *store, struct kvt_job *job, uint64_t now_ns);
/* If no transfer touches the job's client memory (or it is RAISE, LOWER, FLUSH): it ends now, with
 * ABORTED, by its done; a transfer between tiers that it caused goes on and its copy stays. Else
 * nothing: it ends when its transfer is reaped. */
void kvt_store_cancel(struct kvt_store *store, struct kvt_job *job);

/* ---- the turn ------------------------------------------------------------------------------- */

/* Reaps, ends jobs, starts waiting ones, evicts ahead of need, works off detached parts; bounded by
 * @budget_blocks. Returns true when there is more to do at once. */
bool kvt_store_turn(struct kvt_store *store, uint64_t now_ns, uint32_t budget_blocks);
/* When something has to happen by itself: the next deadline or retry; KVT_TIME_NEVER_NS: none. */
uint64_t kvt_store_next_ns(const struct kvt_store *store);

/* A planned stop: from now on nothing new is claimed or raised; dirty L2 copies go to L3 as fast as
 * it takes them. true when nothing dirty is left or nothing can be written any more. */
bool kvt_store_drain(struct kvt_store *store, uint64_t now_ns);
/* What L3 lacks now is written to it in the background, whatever the write policy says; what is in
 * L1 alone as well. Nothing is refused meanwhile. Running already, or no L3 in service: nothing. */
void kvt_store_save_start(struct kvt_store *store);
/* Reads what is on L3 at that rate to find rot, round after round; 0: no more. */
void kvt_store_scrub_start(struct kvt_store *store, uint64_t bytes_per_s);
struct kvt_store_upkeep {
    struct {
        bool is_running;
        uint64_t copies_left;                   /* that L3 lacks now */
        uint64_t copies_written, bytes_written; /* of the last one */
        uint64_t copies_failed; /* were there when it began, and L3 did not take them */
    } save;
    struct { /* since the start of the store */
        uint64_t bytes_per_s;
        uint64_t checked_copies, checked_bytes, bad_copies;
        uint64_t skipped_copies; /* too large for a bounce slot */
        uint64_t rounds;
    } scrub;
};
void kvt_store_upkeep(const struct kvt_store *store, struct kvt_store_upkeep *ret_upkeep);

/* ---- L3's index ------------------------------------------------------------------------------ */

/* While the index of some device is still being read: what is on L3 may be missing in the tree. */
bool kvt_store_is_loading(const struct kvt_store *store);
uint64_t kvt_store_loaded_copies(const struct kvt_store *store); /* so far */
/* A scan of slots does not find the keys of roots, only their SHA-256. Such a root comes back under
 * a key of this tag and the digest, until somebody who knows the key renames it. */
#define KVT_STORE_DIGEST_KEY_TAG 0xd1u
#define KVT_STORE_DIGEST_KEY_BYTES (1u + KVT_FINGERPRINT_BYTES)
bool kvt_store_has_digest_roots(const struct kvt_store *store);
/* A load has a lease of the tree of its own. */
bool kvt_store_is_holding(const struct kvt_store *store);
/* Of kvt_radix_config: the block's rows go. */
void kvt_store_block_gone(struct kvt_store *store, const struct kvt_radix_gone *gone);
/* The cell's copy on L3 would be there after a restart of any kind: data and row are durable, and
 * the data is known to be good. */
bool kvt_store_is_durable(const struct kvt_store *store, struct kvt_cell cell);
/* Its copy on L3 came with the index and was not read so far: it is not known whether it is good.
 */
bool kvt_store_is_unseen(const struct kvt_store *store, struct kvt_cell cell);
/* A copy that is on L3 already wants its row, if it has none. */
void kvt_store_want_durable(struct kvt_store *store, struct kvt_cell cell);
/* The least of the numbers never given out; near stamp_end the caller reserves more. */
uint64_t kvt_store_stamp_next(const struct kvt_store *store);
void kvt_store_set_stamp_end(struct kvt_store *store, uint64_t stamp_end);
/* A record for the catalog of zone @zone. 0 and its number for kvt_store_is_committed, or
 * KVT_INDEX_E_FULL; no index there: 0 and number 0, which counts as committed. */
KVT_MUST_USE int kvt_store_catalog_put(struct kvt_store *store, uint32_t zone, uint32_t number,
                                       const void *data, uint32_t bytes, uint64_t *ret_seq);
bool kvt_store_is_committed(const struct kvt_store *store, uint32_t zone, uint64_t seq);
/* The record of a namespace, which has to be in the catalog of each zone with an index before its
 * rows count there. Zones that were not told since it was opened, or since its epoch rose. */
uint32_t kvt_store_ns_unrecorded(const struct kvt_store *store, struct kvt_radix_ns ns);
/* 0, or KVT_INDEX_E_FULL: later. */
KVT_MUST_USE int kvt_store_ns_record(struct kvt_store *store, struct kvt_radix_ns ns, uint32_t zone,
                                     const void *data, uint32_t bytes);
/* At start: @zones have it already. */
void kvt_store_ns_set_recorded(struct kvt_store *store, struct kvt_radix_ns ns, uint32_t zones);
/* It cannot have a record: no restart brings it back, and nothing of it is durable. */
void kvt_store_ns_set_forgotten(struct kvt_store *store, struct kvt_radix_ns ns);
/* Every zone that is in service has it, durably, and there is one; or it cannot have any. */
bool kvt_store_ns_is_durable(const struct kvt_store *store, struct kvt_radix_ns ns);
/* Whether the zone is in service and has an index that still works. */
bool kvt_store_zone_is_kept(const struct kvt_store *store, uint32_t zone);
/* Whether some zone has one that still works. */
bool kvt_store_has_index(const struct kvt_store *store);
uint32_t kvt_store_zones(const struct kvt_store *store);
/* Indexes commit what they have at once. */
void kvt_store_hasten(struct kvt_store *store);

/* Transfers that are with a tier's thread, or on their way to it. */
uint32_t kvt_store_inflight(const struct kvt_store *store);

/* Nanoseconds that reading @bytes whose best copy is in @tier takes now, into host memory or a
 * GPU's: measured rates and what is queued before it. */
uint64_t kvt_store_estimate_ns(const struct kvt_store *store, enum kvt_tier_id tier, bool is_to_gpu,
                               uint64_t bytes);

/* ---- looking -------------------------------------------------------------------------------- */

enum kvt_store_drop_reason {                   /* why a copy left a tier */
                             KVT_DROP_EVICTED, /* for room, a lower copy exists or was written */
                             KVT_DROP_POLICY,  /* for room; the write policy did not want it */
                             KVT_DROP_BUDGET,  /* for room; the write budget or the disk's queue was
                                                  full */
                             KVT_DROP_NO_LOWER, /* for room; there is no lower tier, or it is out of
                                                   service */
                             KVT_DROP_BAD,      /* failed verification or I/O */
                             KVT_DROP_REQUESTED, /* Evict, Reset, a lower with is_move */
                             KVT_DROP_ABORTED,   /* a fill that never became complete */
                             KVT_DROP_LOST,      /* its device was out of service for too long, or
                                                    (L1) lost what it had */
                             KVT_DROP_REASONS
};
const char *kvt_store_drop_reason_text(enum kvt_store_drop_reason reason);

struct kvt_store_stats {
    uint64_t cells, memory_bytes, memory_used_bytes;
    uint64_t claimed_cells;
    uint64_t jobs_waiting, jobs_running;
    uint64_t coalesced;    /* jobs that found their transfer under way */
    uint64_t bounced;      /* reads that went through a bounce slot */
    uint64_t verified_bad; /* slots that failed verification */
    struct {
        bool is_loading;
        uint64_t loaded_blocks, loaded_copies; /* that came back from the index at start */
        uint64_t load_dropped; /* copies of the index that could not be taken: they do not fit any
                                  more, or somebody stored the block anew meanwhile */
        uint64_t waiting;      /* copies on L3 that are not in the index yet */
        uint64_t skipped;      /* ... that never will be: the index was full or too slow */
        uint64_t stale;        /* rows that could not be removed; verification catches them */
    } index;
    struct {
        bool is_on;
        struct kvt_slab_stats slab;
        uint64_t ready_copies, pinned_copies, filling_copies, draining_copies;
        uint64_t inflight;
        uint64_t dropped[KVT_DROP_REASONS];
        uint64_t written_back; /* copies that went one tier down */
    } tiers[KVT_TIERS_COUNT];
    struct {
        struct kvt_slab_stats slab;
        uint64_t out_ns; /* out of service for so long; 0: in service */
        bool is_lost;    /* out for too long: its copies were dropped */
        bool is_kept;    /* has an index that works */
    } zones[KVT_ZONES_MAX];
    uint32_t l1_zones_count; /* 1 where L1 is one device; 0: no L1 */
    struct {
        struct kvt_slab_stats slab;
        uint64_t out_ns;      /* out of service for so long; 0: in service */
        uint32_t incarnation; /* that the store knows */
    } l1_zones[KVT_ZONES_MAX];
    uint64_t l1_losses, l1_lost_copies; /* zones that were lost, copies that went with them */
};
void kvt_store_stats(const struct kvt_store *store, struct kvt_store_stats *ret_stats);

/* Recounts everything against the tree and the allocators: capacity, states, pins, no slot both
 * free and used, every HOLD has a claim. true, or false and *ret_why. O(all). */
bool kvt_store_check(const struct kvt_store *store, const char **ret_why);
