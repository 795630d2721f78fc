/* The store's own structures, shared by store*.c only.
 *
 *   tree ── handle ──▶ cell ──┬─ copies[3]: state and pins of the copy in each tier
 *                             ├─ slots[3] of shard 0, further shards in a chain of `more` records
 *                             └─ copy moves under way (between tiers), for coalescing
 *
 *   job ──▶ queue (no slot, no transfer, a budget) ──▶ move ──▶ one transfer a shard ──▶ done
 *       └─▶ waits on somebody's copy move ─┘
 *
 * A move is one movement of a copy (COPY: all shards between two tiers) or of one shard to or from
 * a client (FILL, READ, BOUNCE). It pins every copy that it touches, and pins are what keeps slots:
 * whoever lets a copy go while it is pinned makes it DOOMED, and the last unpin frees the slots.
 * A cell without copies, claim and pins is free; an orphan is a cell that the tree forgot.
 *
 * Invariant: while a cell is not an orphan, the tree's mask of its (block, component) is exactly
 *   READY(t) -> bit t    DRAINING(t) -> bit t + 3    claimed -> HOLD
 * and the tree's handle is the cell's index. kvt_store_check walks this. */
#pragma once

#include "daemon/engine/policy_evict.h"
#include "daemon/engine/policy_promote.h"
#include "daemon/engine/policy_slab.h"
#include "daemon/engine/policy_write.h"
#include "daemon/engine/store.h"

#define STORE_MAGIC 0x4b565453u
#define CELL_TOUCHES_MAX KVT_TOUCHES_MAX /* all bits of a cell's count */
#define CELL_PINS_MAX 8191u
#define CELL_HOLD_PINS_MAX                                                                         \
    (CELL_PINS_MAX / 2) /* what is held in place leaves the rest to moves                          \
                         */
#define STORE_PENDING_BATCH 32u
#define STORE_LOST_ENTRIES 4096u
#define STORE_THROUGH_MAX 8192u
#define STORE_RETRY_NS (1000u * 1000u)
#define STORE_RECLAIM_NS (1000ull * 1000ull * 1000ull)
#define STORE_CLASSES_MAX 512u
#define STORE_BOUNCE_MAX 64u
#define STORE_STAMP_MASK ((1ull << 48) - 1)
#define STORE_TAG_ZONES_SHIFT 48u /* a block's tag: its number, and the zones that have its row */
static_assert(KVT_ZONES_MAX <= 16, "a bit a zone above the number");

enum copy_state {
    COPY_NONE = 0,
    COPY_FILLING = 1,
    COPY_READY = 2,
    COPY_DRAINING = 3, /* being moved down, still readable */
    COPY_DOOMED = 4,   /* let go while pinned */
    COPY_STATES
};

struct cell {
    struct kvt_radix_block block;
    struct kvt_slot slots[KVT_TIERS_COUNT];
    uint32_t generation;
    uint32_t digest; /* of its root: index into the digests, 0 none */
    uint32_t more;   /* chain of further shards; free cells: the next free one */
    union {
        uint32_t moves;   /* COPY moves under way: index into the moves, 0 none */
        uint32_t filling; /* of a claimed cell, which has none: shards in flight, a bit a rank */
    };
    uint32_t content_low;
    uint16_t content_high; /* slot generation: 48 bits from one counter */
    /* Shards whose bytes were seen by this daemon, a bit a rank: filled here, or read from L3 and
     * found to be what they should. A claimed cell is whole with all. */
    uint16_t filled;
    struct {
        uint16_t state : 3, pins : 13;
    } copies[KVT_TIERS_COUNT];
    uint16_t ns : 6, component : 3, is_used : 1, is_claimed : 1, is_orphan : 1, touches : 3,
        is_indexed : 1; /* its L3 copy is durable: data and row */
};
static_assert(sizeof(struct cell) == 64, "one cache line a cell");
static_assert(KVT_NAMESPACES_MAX <= 64 && KVT_COMPONENTS_MAX <= 8, "bit fields of struct cell");

/* Two more shards of a cell, out of the same pool: generation and flags lie where a cell's do. */
struct cell_more {
    struct kvt_slot low[4];
    uint32_t generation;
    uint32_t next;
    struct kvt_slot high[2];
    uint8_t pad[6];
    uint16_t flags; /* 0: not a cell */
};
static_assert(sizeof(struct cell_more) == sizeof(struct cell), "one pool for both");
static_assert(offsetof(struct cell_more, generation) == offsetof(struct cell, generation),
              "a handle is checked before it is known what the record is");

struct digest {
    uint8_t bytes[KVT_FINGERPRINT_BYTES];
    uint32_t refs, next;
    struct kvt_radix_block block; /* one below that root, lately; it may be dead */
};

struct lost {
    uint64_t block_id;
    uint32_t component;
    uint32_t why;
};

enum move_kind {
    MOVE_COPY = 1, /* tier src -> tier dst, every shard */
    MOVE_FILL,     /* client -> tier dst, one shard */
    MOVE_READ,     /* tier src -> client, one shard */
    MOVE_BOUNCE,   /* disk -> bounce slot -> client, one shard, two transfers */
    MOVE_FLUSH,
};

struct move {
    uint8_t kind, src, dst; /* enum move_kind, enum kvt_tier_id */
    bool is_background;
    bool is_evict;      /* the source goes when it is over */
    bool is_bounce_out; /* BOUNCE: the second transfer */
    bool is_scrub;      /* BOUNCE: there is no second one, and no job */
    bool is_save;       /* COPY: of store_save.c */
    uint8_t reason;     /* enum kvt_store_drop_reason when is_evict */
    uint32_t cell;      /* index, 0: none */
    uint32_t next;      /* in its cell's list, or the next free move */
    uint32_t shards_left;
    uint32_t shard;        /* of FILL, READ, BOUNCE */
    int status;            /* the worst of its transfers */
    uint64_t bytes;        /* payload */
    uint64_t budget_bytes; /* of the promotion budget */
    uint64_t bounce_offset_bytes;
    uint64_t bounce_mask;
    struct kvt_job *job;     /* all but COPY */
    struct xfer *xfer;       /* all but COPY: the running one */
    struct kvt_list waiters; /* COPY: jobs */
    bool is_used;
};

struct xfer {
    struct kvt_xfer base;
    struct kvt_list link; /* pending or free */
    uint32_t move;
    uint8_t tier; /* whose thread does it */
    uint8_t path; /* for rates: src * PATH_ENDS + dst */
    bool is_submitted;
    uint64_t bytes;
};
#define PATH_CLIENT 3u /* in host memory */
#define PATH_GPU 4u    /* a client in a GPU's memory */
#define PATH_ENDS 5u
#define PATHS_COUNT (PATH_ENDS * PATH_ENDS)

enum job_state {
    JOB_NEW = 0,
    JOB_QUEUED = 1,  /* in a queue, tried again when something changed */
    JOB_WAITING = 2, /* on a copy move's list */
    JOB_RUNNING = 3, /* has a move; its client memory may be in use */
    JOB_ENDED = 4,
};

struct store_component {
    uint64_t payload_bytes;
    uint64_t slot_bytes;
    uint32_t shards;
    uint32_t header_bytes;
    uint32_t class_idx[KVT_TIERS_COUNT];
    bool is_in_l1; /* its payload can be moved by L1's devices; else class_idx of L1 is none */
    uint64_t cells_at[KVT_TIERS_COUNT]; /* copies in any state but NONE */
};

struct store_ns {
    bool is_open;
    uint32_t number; /* in the catalog */
    /* Its record there: a bit a zone. Put, and not refused so far; refused, and not put again. */
    uint32_t recorded, record_refused;
    uint64_t record_seq[KVT_ZONES_MAX], record_retry_ns;
    bool is_forgotten; /* by a restart: it cannot have a record */
    uint64_t first_id; /* blocks of the present epoch have numbers from here on */
    uint64_t epoch;
    uint32_t block_tokens, ranks, components_count;
    uint8_t fingerprint[KVT_FINGERPRINT_BYTES];
    uint8_t home[KVT_RANKS_MAX]; /* zones of L1 where the last job's engine has its ranks */
    struct store_component components[KVT_COMPONENTS_MAX];
};

struct store_path { /* measured rate of one path, and what is before a new transfer */
    uint64_t bytes_per_s;
    uint64_t queued_bytes;
    uint64_t last_done_ns;
};

struct store_tier {
    struct kvt_tier *tier; /* NULL: off */
    struct kvt_slab *slab;
    struct kvt_list pending[2]; /* transfers to submit: foreground, background */
    bool is_refused;            /* E_FULL: wait for a reap, or a little */
    uint64_t retry_ns;
    uint32_t pending_count, inflight;
    uint64_t capacity_bytes;
    uint64_t count[COPY_STATES], pinned;
    uint64_t dropped[KVT_DROP_REASONS];
    uint64_t written_back;
    uint32_t classes; /* in use: greatest index + 1 */
    struct {
        uint64_t taken_slots, draining_slots;
        uint32_t shards;
    } class_of[STORE_CLASSES_MAX];
    bool is_reclaiming;
    uint32_t reclaim_class;
    uint64_t reclaim_end_ns;
};

/* One device of L3, and its index. */
struct store_zone {
    struct kvt_index *index;                  /* NULL: what is there does not outlive the daemon */
    const struct kvt_tier_counters *counters; /* health */
    uint64_t base_bytes;
    bool is_loading, is_index_lost;
    bool has_begun; /* its load has */
    bool
        is_record_first; /* a record for its catalog finds no room: nothing else is put before it */
    bool is_behind;      /* its index could not be told all that went: see store_drop.c */
    bool is_closed;      /* nothing new is put there */
    uint64_t out_since_ns; /* 0: in service */
    bool is_dropped;       /* out for too long, and its copies went */
    uint32_t drop_at;      /* cell that is looked at next for that */
    bool is_at_stray; /* the load stands before a row whose parent is on another device: `stray` */
    struct kvt_index_event stray;
    uint64_t seq_put, seq_synced, seq_committed;
    uint64_t refused, refused_catalogs; /* of the rows and copies, and of the records put so far */
    struct drop *drops;                 /* a ring of drops_max */
    uint32_t drops_head, drops_count;
    uint64_t said_ns, said_bytes; /* last line about a scan, and how far it was; 0: none runs */
};

/* Of L1's devices, see store_l1.c. */
struct store_l1_zone {
    const struct kvt_tier_counters *counters; /* health, incarnation */
    uint32_t incarnation;                     /* the store's view: places carry it */
    uint64_t out_since_ns;                    /* 0: in service */
};

struct store_l1 {
    struct store_l1_zone zones[KVT_ZONES_MAX];
    uint32_t zones_count; /* 0: no L1 */
    uint32_t lost;        /* zones that are out, a bit each: closed, and nothing there is read */
    bool is_dropping;     /* the walk over cells is not over */
    uint32_t drop_at;     /* cell that it looks at next */
    uint64_t losses, dropped;
    uint64_t held; /* pins of readers in place */
};

#define STORE_RECENT_MAX 64u

struct store_recent { /* a block that was put on L3 lately */
    struct kvt_radix_block block, parent;
    uint32_t zone;
};

struct todo { /* a copy that is on L3 and not durable in the index */
    struct kvt_cell cell;
    struct kvt_slot slot; /* of its first shard when it was put */
    uint64_t seq;         /* of its put; 0: not put */
    uint16_t zone;
    bool is_whole; /* put the rows of all its path, whatever the tags say */
};

struct drop { /* something for the index to forget, when its ring was full */
    uint64_t epoch, block_id;
    uint32_t block_idx;
    uint16_t ns, component, zone, kind; /* enum kvt_index_put_kind */
};

struct load_known { /* a block of the tree by its number */
    uint64_t id;    /* 0: free */
    struct kvt_radix_block block;
};

struct store_load {           /* see store_load.c */
    struct load_known *known; /* NULL: not needed so far; else open addressing */
    uint64_t known_max, known_count;
    struct kvt_radix_block *path; /* path[d]: the block with d blocks before it; NULL: no load */
    uint64_t *ids;
    uint32_t path_blocks;
    struct kvt_radix_block leased;
    uint32_t zone, ns;
    bool is_skipping; /* what is deeper than path_blocks cannot be taken */
    uint8_t digest[KVT_FINGERPRINT_BYTES];
    uint64_t blocks, copies, dropped;
};

struct store_save { /* see store_save.c */
    bool is_running, has_started;
    bool is_telling; /* the first round asks for rows that were given up, too */
    uint32_t at, inflight, rounds;
    uint64_t waits_since_ns; /* 0: it does not wait for a copy */
    uint64_t moves_left;
    uint64_t content_end; /* above what was there when it began */
    uint64_t round_left;  /* of that, what this round did not begin to save */
    bool is_syncing;      /* no round is left: what went down becomes durable in the index */
    uint64_t sync_pos;    /* ... which is when todo_done gets there */
    uint64_t copies_written, bytes_written, copies_failed;
};

struct store_scrub {      /* see store_scrub.c */
    uint64_t bytes_per_s; /* 0: off */
    uint32_t at, shard, inflight;
    uint64_t next_ns, round_start_ns;
    uint64_t checked_copies, checked_bytes, bad_copies, skipped_copies, rounds;
};

struct kvt_store {
    uint32_t magic;
    struct kvt_store_config config;
    struct kvt_radix *radix;
    struct store_tier tiers[KVT_TIERS_COUNT];
    struct store_ns ns[KVT_NAMESPACES_MAX];
    uint32_t ns_end;

    struct cell *cells; /* [1, records_max] */
    void *cells_memory;
    uint32_t records_max, records_used, records_free, records_fresh; /* cells and more */
    uint32_t cells_used;
    struct digest *digests;
    uint32_t *digest_buckets;
    uint32_t digests_max, digests_free, digests_fresh;
    uint64_t stamp_next, stamp_end;
    uint64_t claimed;

    struct store_l1 l1;
    struct store_zone zones[KVT_ZONES_MAX];
    uint32_t zones_count;
    struct store_recent recent[STORE_RECENT_MAX];
    uint32_t recent_at;
    bool is_kept; /* some zone has an index */
    bool has_digest_roots;
    /* Positions only rise: [todo_done, todo_put) are with the index, [todo_put, todo_end) wait. */
    struct todo *todo;
    uint32_t queue_max, drops_max; /* of todo, and of each zone's drops */
    uint64_t todo_done, todo_put, todo_end;
    uint64_t todo_row;     /* of the one that is put next: row where it goes on */
    bool has_skipped;      /* of the todo some were given up */
    struct drop *drops;    /* all zones' */
    struct kvt_list syncs; /* FLUSH jobs, oldest first */
    struct store_load load;
    uint64_t index_skipped, index_stale;

    struct move *moves; /* [1, moves_max] */
    uint32_t moves_max, moves_used, moves_free;
    struct xfer *xfers;
    uint32_t xfers_max, xfers_used;
    struct kvt_list xfers_free;

    struct kvt_list queue[2]; /* jobs: foreground, background */
    uint32_t queued[2], waiting, running;
    uint32_t scan_left[2];
    bool is_woken;
    struct kvt_job **heap;
    uint32_t heap_count, heap_max;

    uint64_t bounce_base_bytes, bounce_chunk_bytes, bounce_used;
    uint32_t bounce_chunks;
    uint64_t promote_inflight_bytes;
    struct kvt_write_bucket bucket;
    struct store_path paths[PATHS_COUNT];

    struct kvt_cell *through; /* ring of cells to write as soon as they are READY */
    uint32_t through_head, through_count;
    uint32_t drain_at;
    bool is_draining, is_saved_first, is_reap_left;
    uint64_t unsaved; /* cells that L3 lacks: kvt_store_is_unsaved */
    struct store_save save;
    struct store_scrub scrub;

    struct lost *lost;
    uint64_t now_ns;
    size_t memory_fixed_bytes;
    uint64_t coalesced, bounced, verified_bad;
};

/* ---- store.c ---- */
/* Parts of the tree that were cut off: their copies go. True when there is more. */
bool kvt_store_reap_detached(struct kvt_store *store, uint32_t budget);

static inline struct store_component *kvt_store_component(struct kvt_store *store,
                                                          const struct cell *cell)
{
    return &store->ns[cell->ns].components[cell->component];
}

static inline uint16_t kvt_store_all_shards(const struct kvt_store *store, const struct cell *cell)
{
    return (uint16_t)((1u << store->ns[cell->ns].components[cell->component].shards) - 1);
}

/* What an index said at start is a hint: a row that should be gone names a slot that holds
 * something else by now. */
static inline bool kvt_store_is_seen(const struct kvt_store *store, const struct cell *cell)
{
    return cell->filled == kvt_store_all_shards(store, cell);
}

static inline uint64_t kvt_store_content(const struct cell *cell)
{
    return (uint64_t)cell->content_high << 32 | cell->content_low;
}

static inline bool kvt_store_zone_has_index(const struct store_zone *zone)
{
    return zone->index != NULL && !zone->is_index_lost;
}

/* By its state; a copy in L1 may be lost all the same: kvt_store_l1_is_lost. */
static inline bool kvt_store_is_readable(const struct cell *cell, uint32_t tier)
{
    return cell->copies[tier].state == COPY_READY || cell->copies[tier].state == COPY_DRAINING;
}

/* ---- store_cell.c: cells and their copies ---- */
struct cell *kvt_store_cell_at(const struct kvt_store *store, struct kvt_cell cell);
uint32_t kvt_store_cell_idx(const struct kvt_store *store, const struct cell *cell);
struct kvt_slot *kvt_store_slot(struct kvt_store *store, struct cell *cell, uint32_t tier,
                                uint32_t shard);
void kvt_store_set_state(struct kvt_store *store, struct cell *cell, uint32_t tier,
                         enum copy_state state);
void kvt_store_pin(struct kvt_store *store, struct cell *cell, uint32_t tier);
/* May free the slots, and the cell. */
void kvt_store_unpin(struct kvt_store *store, struct cell *cell, uint32_t tier);
/* Takes the slots of every shard for a copy in @tier: all or none. The copy is FILLING then. */
bool kvt_store_take_slots(struct kvt_store *store, struct cell *cell, uint32_t tier);
/* The copy becomes READY: false when the block is gone, and then the copy was let go. */
bool kvt_store_make_ready(struct kvt_store *store, struct cell *cell, uint32_t tier);
/* READY -> DRAINING and back; false when the block is gone and the cell was orphaned. */
bool kvt_store_begin_drain(struct kvt_store *store, struct cell *cell, uint32_t tier);
bool kvt_store_end_drain(struct kvt_store *store, struct cell *cell, uint32_t tier);
/* Lets a copy go in any state; slots are free now or at the last unpin. May free the cell. */
void kvt_store_let_go(struct kvt_store *store, struct cell *cell, uint32_t tier,
                      enum kvt_store_drop_reason reason);
/* The tree has forgotten the cell: every copy goes. May free the cell. */
void kvt_store_orphan(struct kvt_store *store, struct cell *cell,
                      enum kvt_store_drop_reason reason);
/* What the copy in L1 has is gone: the copy goes, or the claim that it was filled for. */
void kvt_store_lose(struct kvt_store *store, struct cell *cell);
void kvt_store_remember_lost(struct kvt_store *store, const struct cell *cell, enum kvt_why why);
/* Every shard of a claimed cell is there. */
bool kvt_store_fill_complete(struct kvt_store *store, struct cell *cell);
KVT_MUST_USE int kvt_store_cells_init(struct kvt_store *store, size_t bytes);
void kvt_store_cells_deinit(struct kvt_store *store);

/* The key of the root of this digest, if it is known; NULL: not. Valid until the tree changes. */
const void *kvt_store_root_key_of(const struct kvt_store *store, const uint8_t *digest,
                                  uint32_t *ret_bytes);
/* A record that is not claimed, for a copy that is on L3 already; NULL: no room. */
struct cell *kvt_store_cell_make(struct kvt_store *store, struct kvt_radix_block block,
                                 uint32_t component, const uint8_t *root_digest);
/* The (new) cell's copy on L3 is in the slots of @copy on that device: READY. False: they cannot be
 * had, and the cell is gone. */
bool kvt_store_adopt(struct kvt_store *store, struct cell *cell, uint32_t zone,
                     const struct kvt_index_put *copy);

/* ---- store_index.c: what L3's index is told ---- */
KVT_MUST_USE int kvt_store_index_init(struct kvt_store *store);
void kvt_store_index_deinit(struct kvt_store *store);
size_t kvt_store_index_bytes(const struct kvt_store_config *config);
/* 0: none are left. */
uint64_t kvt_store_stamp(struct kvt_store *store);
/* The number that a block is called by on disk; 0: it is gone, or no numbers are left. */
uint64_t kvt_store_block_id(struct kvt_store *store, struct kvt_radix_block block);
/* What the slots of the cell say about themselves, as of now; false when the block is gone.
 * *ret_tokens lies in the tree. */
bool kvt_store_slot_info(struct kvt_store *store, const struct cell *cell, uint32_t shard,
                         struct kvt_slot_info *ret_info, const uint32_t **ret_tokens);
/* The copy on L3 is READY. Again: its row may have been given up before. */
void kvt_store_index_want(struct kvt_store *store, struct cell *cell);
void kvt_store_index_want_again(struct kvt_store *store, struct cell *cell);
bool kvt_store_index_has_todo_room(const struct kvt_store *store);
void kvt_store_index_committed(struct kvt_store *store, uint32_t idx,
                               const struct kvt_index_event *event);
void kvt_store_index_sync(struct kvt_store *store, struct kvt_job *job);
bool kvt_store_index_turn(struct kvt_store *store, uint32_t budget);
uint64_t kvt_store_index_next_ns(const struct kvt_store *store);
/* Nothing waits for the index any more, but for devices that do not answer. */
bool kvt_store_index_is_idle(const struct kvt_store *store);

/* ---- store_events.c: what L3's indexes say ---- */
/* True: there is more. */
bool kvt_store_take_events(struct kvt_store *store);

/* ---- store_catalog.c ---- */
/* Some records of zone @zone that were put up to @seq, and are not committed, were refused. */
void kvt_store_records_refused(struct kvt_store *store, uint32_t zone, uint64_t seq);

/* ---- store_drop.c: what L3's index is told to forget ---- */
/* Those that wait. */
void kvt_store_put_drops(struct kvt_store *store, uint32_t idx, uint32_t *inout_budget);
/* The copy on L3 goes; its block is still there, or the rows went with it. */
void kvt_store_index_forget(struct kvt_store *store, struct cell *cell);
/* A copy that the index had and the store does not take. */
void kvt_store_index_drop(struct kvt_store *store, uint32_t zone, const struct kvt_index_put *copy);
void kvt_store_index_reset(struct kvt_store *store, uint32_t ns);
/* Before copies go from L3, of one zone or of any: their indexes take what there is to say. */
bool kvt_store_index_has_room_in(const struct kvt_store *store, uint32_t zone);
bool kvt_store_index_has_room(const struct kvt_store *store);

/* ---- store_zone.c: L3's devices ---- */
/* The zone that a copy on L3 should go to. */
uint32_t kvt_store_pick_zone(struct kvt_store *store, const struct cell *cell);
void kvt_store_zone_used(struct kvt_store *store, const struct cell *cell, uint32_t zone);
/* Looks whether it is in service; true: there is more to do. */
bool kvt_store_zone_turn(struct kvt_store *store, uint32_t idx);
const char *kvt_store_zone_name(const struct kvt_store *store, uint32_t idx); /* for people */
/* A slot of L3 that failed verification: once, since its copy is dropped. */
void kvt_store_tell_bad_slot(const struct kvt_store *store, const struct kvt_xfer *xfer);

/* ---- store_l1.c: L1's zones ---- */
void kvt_store_l1_init(struct kvt_store *store);
/* The store's view of it. */
uint32_t kvt_store_l1_incarnation(const struct kvt_store *store, uint32_t zone);
/* Where a shard should go, of L1 or L2; what is not free there goes to any other zone. */
/* Slots taken from here on are those of the job's engine. */
void kvt_store_take_home(struct kvt_store *store, const struct cell *cell,
                         const struct kvt_job *job);
uint32_t kvt_store_first_zone(const struct kvt_store *store, const struct cell *cell, uint32_t tier,
                              uint32_t shard);
/* Its copy in L1 has a shard in a zone that was lost. */
bool kvt_store_l1_is_lost(const struct kvt_store *store, const struct cell *cell);
/* Drops such a copy: true when there was one. May free the cell. */
bool kvt_store_l1_settle(struct kvt_store *store, struct cell *cell);
/* Looks whether zones are in service. */
void kvt_store_l1_look(struct kvt_store *store);
/* The same, and looks at up to @budget cells for what was lost; true: there is more to do. */
bool kvt_store_l1_turn(struct kvt_store *store, uint32_t budget);
uint64_t kvt_store_l1_next_ns(const struct kvt_store *store);
/* NULL, or what is wrong with the cell's copy in L1. */
const char *kvt_store_l1_check_cell(const struct kvt_store *store, const struct cell *cell,
                                    uint32_t idx);
void kvt_store_l1_stats(const struct kvt_store *store, struct kvt_store_stats *stats);

/* ---- store_load.c: what the index says at start ---- */
KVT_MUST_USE int kvt_store_load_init(struct kvt_store *store);
void kvt_store_load_deinit(struct kvt_store *store);
void kvt_store_load_event(struct kvt_store *store, uint32_t zone,
                          const struct kvt_index_event *event);
/* A row that does not hang below what came before it, nor begins a path. */
bool kvt_store_load_is_stray(const struct kvt_store *store, const struct kvt_index_event *event);
/* After the events of a turn. */
void kvt_store_load_slice_end(struct kvt_store *store);

/* ---- store_progress.c: lines about a scan ---- */
void kvt_store_progress_turn(struct kvt_store *store, uint32_t idx);
uint64_t kvt_store_progress_next_ns(const struct kvt_store *store);

/* ---- store_evict.c: room ---- */
enum room {
    ROOM_GOT,  /* slots taken */
    ROOM_WAIT, /* something in flight may free one */
    ROOM_NONE, /* nothing can free one now */
};
/* Takes slots for a copy in @tier, evicting if it must. */
enum room kvt_store_acquire(struct kvt_store *store, struct cell *cell, uint32_t tier);
/* Up to @budget copies; returns how many went or began to go. */
uint32_t kvt_store_evict_ahead(struct kvt_store *store, uint32_t budget);
uint32_t kvt_store_write_through(struct kvt_store *store, uint32_t budget);
void kvt_store_want_write(struct kvt_store *store, struct cell *cell);
/* Slots of a class that could be had without evicting. */
uint64_t kvt_store_room(const struct kvt_store *store, uint32_t tier, uint32_t class_idx);
bool kvt_store_is_lower_on(const struct kvt_store *store);
bool kvt_store_is_any_inflight(const struct kvt_store *store);
void kvt_store_reclaim_turn(struct kvt_store *store);

/* ---- store_xfer.c: moves and transfers ---- */
enum start {
    START_DONE,  /* under way */
    START_WAIT,  /* no transfer or slot now */
    START_NONE,  /* and none can be expected */
    START_LATER, /* the promotion budget is used up; it comes back by itself */
};
struct move *kvt_store_find_copy(struct kvt_store *store, const struct cell *cell, uint32_t dst);
struct copy_options {
    uint32_t src, dst;
    bool is_background, is_evict, is_save;
    enum kvt_store_drop_reason reason;
    uint64_t budget_bytes;
};
enum start kvt_store_start_copy(struct kvt_store *store, struct cell *cell,
                                const struct copy_options *options, struct move **ret_move);
enum start kvt_store_start_fill(struct kvt_store *store, struct cell *cell, uint32_t tier,
                                uint32_t shard, struct kvt_job *job);
enum start kvt_store_start_read(struct kvt_store *store, struct cell *cell, uint32_t tier,
                                uint32_t shard, struct kvt_job *job);
/* @job NULL: the scrubber's. */
enum start kvt_store_start_bounce(struct kvt_store *store, struct cell *cell, uint32_t shard,
                                  struct kvt_job *job);
enum start kvt_store_start_flush(struct kvt_store *store, struct kvt_job *job);
/* Takes the job off its move, if no tier has its client memory: true and the job can end. */
bool kvt_store_stop_move(struct kvt_store *store, struct move *move);
void kvt_store_submit_pending(struct kvt_store *store, uint32_t tier);
uint32_t kvt_store_move_idx(const struct kvt_store *store, const struct move *move);
void kvt_store_move_free(struct kvt_store *store, struct move *move);
void kvt_store_xfer_free(struct kvt_store *store, struct xfer *xfer);
struct kvt_place kvt_store_place_of_client(const struct kvt_job *job);
/* Puts a transfer on the list of the tier whose thread does it. */
void kvt_store_enqueue(struct kvt_store *store, struct xfer *xfer, uint32_t src, uint32_t dst,
                       bool is_background);
/* The end of a path that a client's memory is. */
uint32_t kvt_store_client_end(const struct kvt_job *job);
bool kvt_store_has_xfers(const struct kvt_store *store, uint32_t count, bool is_background);
KVT_MUST_USE int kvt_store_xfers_init(struct kvt_store *store, uint32_t count);
void kvt_store_xfers_deinit(struct kvt_store *store);

/* ---- store_finish.c ---- */
uint32_t kvt_store_reap(struct kvt_store *store, uint32_t budget);

/* ---- store_save.c, store_scrub.c ---- */
/* It has a copy above L3 and none there. */
bool kvt_store_is_unsaved(const struct cell *cell);
bool kvt_store_save_turn(struct kvt_store *store, uint32_t budget);
uint64_t kvt_store_save_next_ns(const struct kvt_store *store);
/* A move of it ended; bytes 0: it failed. The cell may be another one by now. */
void kvt_store_saved(struct kvt_store *store, uint32_t cell, uint32_t dst, uint64_t bytes);
bool kvt_store_scrub_turn(struct kvt_store *store, uint32_t budget);
uint64_t kvt_store_scrub_next_ns(const struct kvt_store *store);
void kvt_store_scrubbed(struct kvt_store *store, const struct move *move, bool is_last_shard);

/* ---- store_job.c ---- */
/* Tries to get on with a job that is in no list. */
void kvt_store_dispatch(struct kvt_store *store, struct kvt_job *job);
void kvt_store_end_job(struct kvt_store *store, struct kvt_job *job, enum kvt_move_result result);
/* A job whose transfer came back without having moved anything: false, or it is somewhere else. */
bool kvt_store_try_again(struct kvt_store *store, struct kvt_job *job);
void kvt_store_arm(struct kvt_store *store, struct kvt_job *job);
void kvt_store_disarm(struct kvt_store *store, struct kvt_job *job);
/* Jobs whose deadline passed. */
void kvt_store_expire(struct kvt_store *store);
/* Up to @budget queued jobs are tried again; true when some were not. */
bool kvt_store_retry_queue(struct kvt_store *store, uint32_t budget);
