/* What the files of the owner loop share. Nobody outside daemon/engine includes it.
 *
 *   group ──┬─ sessions ── runs ── jobs      a group is one engine process family: the sessions
 *           ├─ leases                        with one engine id in one namespace
 *           └─ tickets ── entries            a run is one request (or what is left of it) that
 *                                            could not be answered at once
 *
 * Ownership: the engine's thread owns everything here. Pools are sized in kvt_engine_new; heap
 * memory is taken later only for a session (its layouts) and a namespace (its texts).
 *
 * Order of destruction: a job ends by its done; a run is freed when its request is answered and its
 * last job ended; a session's memory goes when it is detached and its last run is freed; a group
 * goes with its last session's memory. So client memory stays mapped as long as a job may touch it.
 *
 * Callbacks do next to nothing: a job's done only books its result and puts its run on a list; the
 * turn goes on with it. So kvt_store_submit and kvt_store_cancel may be called anywhere here. */
#pragma once

#include <pthread.h>

#include "daemon/base/clock.h"
#include "daemon/base/counters.h"
#include "daemon/base/hash.h"
#include "daemon/base/list.h"
#include "daemon/base/ring.h"
#include "daemon/engine/engine.h"
#include "tiers/client.h"

#define KVT_ENGINE_API_VERSION 1u
#define KVT_ENGINE_LEASES_MAX 65536u
#define KVT_ENGINE_TICKETS_MAX 16384u
#define KVT_ENGINE_ENTRIES_MAX 262144u /* reserved cells of all tickets */
#define KVT_ENGINE_JOBS_MAX 8192u
#define KVT_ENGINE_WIDE_MAX 512u     /* lists of engine blocks that do not fit a job */
#define KVT_ENGINE_RUN_JOBS_MAX 256u /* of one request at a time, so that none starves others */
#define KVT_ENGINE_PUMP_JOBS 64u     /* of one request in one round */
#define KVT_ENGINE_JOB_BLOCKS 8u
#define KVT_ENGINE_PREFETCH_MAX 256u      /* wishes waiting */
#define KVT_ENGINE_PREFETCH_JOBS_MAX 512u /* of the background at a time */
#define KVT_ENGINE_LAYOUT_BYTES_MAX (16u << 20)
#define KVT_ENGINE_ROOT_KEY_BYTES (6u + 2u * KVT_ROOT_TAG_BYTES_MAX)
#define KVT_ENGINE_DIGESTS 64u        /* remembered digests of root keys */
#define KVT_ENGINE_TURN_BLOCKS 4096u  /* of the store's turn */
#define KVT_ENGINE_TURN_COST 1048576u /* tokens, and what weighs as much, in one turn */
#define KVT_ENGINE_SLICE 256u         /* leases, tickets' entries and timers worked off a turn */
#define KVT_ENGINE_PATH_CHUNK 512u

#define KVT_ENGINE_HOLDS_MAX 262144u /* blocks of L1 that engines read in place; a power of 2 */
#define KVT_ENGINE_OPENINGS_MAX 64u  /* Attaches whose memory on a GPU is being opened */
#define KVT_ENGINE_DRAINS_MAX 16u    /* requests that wait for a drain */

#define KVT_ENGINE_MAGIC 0x6b767465u
#define KVT_SESSION_MAGIC 0x6b767373u
#define KVT_RUN_MAGIC 0x6b767275u

/* ---- timers: a heap of deadlines --------------------------------------------------------------
 */

enum eng_timer_kind { ENG_TIMER_LEASE, ENG_TIMER_TICKET, ENG_TIMER_RUN };

struct eng_timer { /* embedded; set means that it is in the heap */
    uint64_t at_ns;
    uint32_t heap_pos; /* from 1; 0: not set */
    enum eng_timer_kind kind;
};

struct eng_heap {
    struct eng_timer **at; /* 1.. */
    uint32_t count, max;
};

/* ---- namespaces -------------------------------------------------------------------------------
 */

struct eng_ns {
    bool is_open;
    uint32_t idx;
    uint32_t generation; /* of its handle: another namespace may get the number */
    uint32_t groups_count;
    bool is_making_way;    /* forgotten, because another namespace wants its number */
    uint64_t last_used_ns; /* when its last engine went; 0: none since the start */
    struct kvt_radix_ns radix_ns;
    uint8_t fingerprint[KVT_FINGERPRINT_BYTES];
    uint64_t epoch;
    uint64_t secret;        /* of its handle */
    uint64_t cursor_secret; /* of this epoch's cursors */
    uint32_t block_tokens, ranks, components_count;
    struct kvt_api_component components[KVT_COMPONENTS_MAX]; /* names point into texts */
    uint64_t stored_bytes[KVT_COMPONENTS_MAX]; /* of one rank's shard of one block, in a tier */
    struct kvt_text model, revision, dtype;
    char *texts;
    uint8_t *spec; /* the canonical encoding that the fingerprint is of */
    uint32_t spec_bytes;
    uint32_t sessions_count;
    uint64_t lookup_tokens, hit_tokens;
};

/* ---- sessions ---------------------------------------------------------------------------------
 */

struct eng_region {
    struct kvt_region region;
};

struct eng_opening { /* see gpu_region.c */
    /* The engine's. */
    bool is_taken;
    struct kvt_op *op;  /* ATTACH; NULL: it was answered before this came back */
    uint64_t answer_ns; /* of it: not later, wherever the driver is */
    /* Both's: nobody wants it any more, so that what was not opened yet is not opened at all. */
    atomic_bool is_given_up;
    /* Of whoever has the opening. The request's own regions are the engine's all the time. */
    uint32_t regions_count;
    struct eng_opening_region {
        bool is_gpu;
        struct kvt_device_memory memory;
        struct eng_region *mapping;
    } regions[KVT_REGIONS_PER_SESSION_MAX];
    int result; /* 0, KVT_REGION_E_* or -errno: of region_idx */
    uint32_t region_idx;
    char why[KVT_DEVICE_WHY_BYTES];
};

struct eng_janitor; /* janitor.c */

struct eng_group {
    struct kvt_list link; /* engine->groups while it has live sessions */
    uint32_t refs;        /* of sessions' memory, leases and tickets */
    uint32_t sessions_count;
    struct eng_ns *ns;
    uint8_t engine_id[KVT_ENGINE_ID_BYTES];
    uint64_t peer_uid;
    char name[64];
    struct kvt_list leases, tickets;
    uint32_t leases_count, tickets_count;
    uint64_t leased_bytes[KVT_TIERS_COUNT];
    uint64_t reserved_bytes;
    uint64_t lookup_tokens, hit_tokens, promoted_bytes, demoted_bytes;
    uint64_t lookups, promotes, demotes, missed_moves;
    uint64_t held_bytes;                /* of L1, read in place by it */
    uint32_t holders_in[KVT_ZONES_MAX]; /* its live leases that hold something there */
    uint32_t runs_count;                /* of its sessions, detached ones too */
    bool is_gpu;                        /* some session's memory is a GPU's */
    uint8_t home[KVT_RANKS_MAX];        /* zones of L1: the GPUs that its ranks are on */
};

struct eng_layout { /* of one component */
    bool is_present, is_inline;
    struct kvt_layout layout; /* pieces are the session's memory */
};

struct eng_session {
    uint32_t magic;
    uint32_t idx, generation;
    bool is_alive; /* attached; afterwards it is only memory that jobs may need */
    uint32_t refs; /* 1 while alive, and one a run */
    struct eng_group *group;
    struct eng_ns *ns;
    bool is_scheduler;
    uint32_t rank;
    uint64_t peer_uid;
    struct kvt_session_sink *sink;
    uint32_t leases_count, tickets_count;
    struct kvt_list runs;
    uint32_t regions_count;
    struct kvt_region regions[KVT_REGIONS_PER_SESSION_MAX];
    struct eng_region *mappings[KVT_REGIONS_PER_SESSION_MAX];
    struct eng_layout layouts[KVT_COMPONENTS_MAX];
    struct kvt_layout_piece *pieces;
    size_t pieces_bytes;
    bool is_told_lost; /* that a GPU of its regions was lost */
};

/* ---- leases and tickets -----------------------------------------------------------------------
 */

struct eng_lease {
    struct kvt_list link; /* of its group, the dying, or the free */
    struct eng_timer timer;
    uint32_t idx, generation;
    bool is_live;  /* its handle is good */
    bool is_used;  /* not on the free list */
    uint32_t runs; /* that read by it: it neither expires nor is released under them */
    struct eng_group *group;
    uint32_t session_idx, session_generation; /* who asked: notices, limit a session */
    struct kvt_radix_block end;
    uint64_t blocks; /* of the path */
    uint64_t epoch;
    uint64_t idle_ns;
    uint32_t ranks_mask; /* ranks that did not release it */
    uint64_t bytes[KVT_TIERS_COUNT];
    /* Read in place, see hold.c. With a hold it has no deadline, and no end by a Reset. */
    struct kvt_list held_link; /* engine->holders */
    uint32_t first_hold;       /* index + 1 */
    uint32_t held_zones;       /* a bit each */
    uint64_t held_bytes;       /* while it is live */
};

struct eng_hold {
    uint32_t next;                 /* index + 1, of its lease or the free */
    uint32_t hash_next, lease_idx; /* a lease holds a block once */
    struct kvt_store_held held;
    uint64_t bytes; /* of the copy, all shards */
};

struct eng_entry {                   /* one reserved cell of a ticket */
    uint32_t hash_next, ticket_next; /* index + 1 */
    uint32_t ticket_idx;
    uint32_t block_idx;
    struct kvt_cell cell;
    uint32_t filled_mask, filling_mask; /* a bit a shard */
    uint8_t component;
    bool is_complete;
};

struct eng_ticket {
    struct kvt_list link;
    struct eng_timer timer;
    uint32_t idx, generation;
    bool is_live, is_used;
    bool is_internal; /* of a Demote by prefix: no handle was given */
    uint32_t runs;
    struct eng_group *group;
    uint32_t session_idx, session_generation;
    struct kvt_radix_block end;
    uint64_t blocks;
    uint64_t epoch;
    uint32_t first_entry; /* index + 1 */
    uint32_t entries_count, open_count;
    uint64_t bytes; /* of what is not complete */
};

/* ---- runs and jobs ----------------------------------------------------------------------------
 */

enum eng_run_kind { ENG_RUN_PROMOTE, ENG_RUN_RAISE, ENG_RUN_FILL, ENG_RUN_LOWER, ENG_RUN_QUIESCE };
/* A durable Demote goes on to LOWER and FLUSH; the others are over after MOVE. */
enum eng_phase { ENG_PHASE_MOVE, ENG_PHASE_LOWER, ENG_PHASE_FLUSH };

#define ENG_RESULT_NONE 0xffu /* a move without a result so far */

struct eng_moves { /* one component of a request; arrays in the op's arena */
    uint32_t component, count;
    uint32_t shard; /* rank, or 0 for replicated components */
    uint64_t shard_bytes;
    const uint64_t *block_idx;
    const uint64_t *engine_blocks;
    const struct kvt_layout *layout;
    struct kvt_cell *cells;
    uint8_t *results;
    uint8_t *inline_at; /* first move's bytes */
};

struct eng_run {
    uint32_t magic;
    struct kvt_list link;         /* engine->runs, or free */
    struct kvt_list session_link; /* session->runs while alive */
    struct kvt_list todo_link;    /* engine->pump */
    struct kvt_list jobs;
    struct kvt_list waiters;   /* Quiesce runs, by wait_link */
    struct kvt_list wait_link; /* a Quiesce: in the waited run's list */
    struct eng_timer timer;
    enum eng_run_kind kind;
    struct kvt_op *op; /* NULL: answered; its jobs still touch client memory */
    struct eng_session *session;
    struct eng_ns *ns;
    struct eng_lease *lease;
    struct eng_ticket *ticket;
    struct kvt_radix_block end; /* of the path */
    bool holds_path;            /* a lease of the tree of its own */
    bool is_client;             /* its jobs touch client memory */
    bool is_inline, is_upper_only, wants_durable;
    bool is_broken; /* something of a durable Demote did not get to L3 */
    bool is_late;   /* answered while jobs were touching client memory */
    uint8_t from_mask;
    bool is_ending; /* nothing more is started */
    enum kvt_move_result end_result;
    enum kvt_code end_code;
    const char *end_text;
    uint64_t epoch, op_id, deadline_ns;
    enum kvt_tier_id tier; /* RAISE, LOWER */
    enum eng_phase phase;
    uint32_t moves_count, moves_total;
    struct eng_moves *moves;
    uint32_t at_group, at_moves, at_move; /* what comes next */
    uint32_t groups_count, groups_told;
    uint32_t *group_ended; /* moves that are over, a group */
    uint32_t jobs_count;
    uint64_t moved_bytes, moved_from[KVT_TIERS_COUNT];
};

struct eng_job {
    struct kvt_job job; /* owner: this */
    struct kvt_list link;
    struct eng_run *run; /* NULL: background */
    struct kvt_engine *engine;
    uint32_t moves_at, move_at, group;
    uint32_t ticket_idx, ticket_generation, entry; /* entry: index + 1; 0 none */
    uint64_t blocks[KVT_ENGINE_JOB_BLOCKS];
    struct eng_wide *wide;
};

struct eng_wide {
    struct kvt_list link;
    uint64_t blocks[KVT_ENGINE_BLOCKS_PER_BLOCK_MAX];
};

struct eng_prefetch {
    struct kvt_radix_block end;
    uint32_t component;
    uint32_t session_idx, session_generation; /* whose wish it is */
    uint64_t first_idx, end_idx;
};

struct eng_digest {
    uint32_t key_bytes;
    uint8_t key[KVT_ENGINE_ROOT_KEY_BYTES];
    uint8_t digest[KVT_FINGERPRINT_BYTES];
};

#define KVT_ENGINE_RESETS_MAX 16u

struct eng_reset { /* a Reset whose epoch is not durable yet */
    struct kvt_op *op;
    struct eng_ns *ns;
    uint64_t epoch;
};

struct eng_drain { /* a Maintain that waits for a drain */
    struct kvt_op *op;
    uint64_t answer_ns;
};

/* ---- the engine -------------------------------------------------------------------------------
 */

struct eng_table_entry {
    struct eng_session *session;
    uint32_t generation;
};

struct kvt_engine {
    uint32_t magic;
    struct kvt_engine_config config; /* defaults filled in */
    struct kvt_radix *radix;
    struct kvt_store *store;
    uint64_t now_ns, start_ns;
    uint64_t secret_key[2];

    /* Any thread. */
    struct kvt_ring inbox;
    _Atomic(struct kvt_op *) detach_stack; /* linked by op->service */
    atomic_bool has_cancelled;
    atomic_bool is_stop_asked;
    _Atomic uint64_t drain_deadline_ns;

    /* The rest: the engine's thread. */
    bool is_stopping, is_drained;
    bool has_submitted; /* jobs since the last turn of the store */
    struct eng_reset resets[KVT_ENGINE_RESETS_MAX];
    uint32_t resets_count;
    bool is_unrecorded;   /* some namespace's record could not be put where it is missing */
    uint32_t stamps_todo; /* devices that have to hear of stamp_end_wanted */
    uint64_t stamp_end, stamp_end_wanted, stamps_seq[KVT_ZONES_MAX];
    struct kvt_op *parked; /* lookups that wait for L3's index, linked by op->service */
    uint32_t parked_count;
    uint64_t parked_tried_ns, parked_tried_copies; /* when, and what was loaded by then */
    bool is_unparking;
    uint64_t load_wait_end_ns;
    struct eng_heap heap;
    struct eng_ns ns[KVT_NAMESPACES_MAX];
    uint32_t ns_count;
    struct eng_table_entry sessions[KVT_SESSIONS_MAX];
    uint32_t sessions_count;
    size_t layout_bytes;
    struct kvt_list groups;
    uint32_t groups_count;

    struct eng_lease *leases;
    struct kvt_list leases_free, leases_dying;
    uint32_t leases_made, leases_count;
    struct eng_hold *holds; /* NULL: nothing is read in place */
    uint32_t *hold_buckets; /* by lease and block: index + 1 */
    uint32_t holds_made, holds_free, holds_count;
    struct kvt_list holders;              /* leases that have some */
    uint32_t holders_count, holders_left; /* left: not looked at since GPUs were lost */
    uint32_t holders_lost_zones;          /* those GPUs, a bit each */
    bool has_dying;                       /* leases ended since the last slice */
    struct eng_ticket *tickets;
    struct kvt_list tickets_free, tickets_dying;
    uint32_t tickets_made, tickets_count;
    struct eng_entry *entries;
    uint32_t *entry_buckets;
    uint32_t entries_free, entries_made, entries_count;

    struct eng_run *runs_pool;
    struct kvt_list runs_free, runs, pump;
    uint32_t runs_made, runs_max, runs_count, ops_count;
    struct eng_job *jobs_pool;
    struct kvt_list jobs_free, background;
    uint32_t jobs_made, jobs_count, background_count;
    struct eng_wide *wide_pool;
    struct kvt_list wide_free;
    uint32_t wide_made;
    struct eng_prefetch prefetch[KVT_ENGINE_PREFETCH_MAX];
    uint32_t prefetch_head, prefetch_count;
    struct eng_digest digests[KVT_ENGINE_DIGESTS];
    struct eng_drain drains[KVT_ENGINE_DRAINS_MAX];
    uint32_t drains_count;
    uint64_t counters[KVT_COUNTERS_COUNT];

    /* Unmapping regions, and opening memory on GPUs, costs milliseconds: a helper thread does it
     * while kvt_engine_run runs. NULL: at once, by the caller. */
    struct eng_janitor *janitor;
    uint32_t openings_waiting; /* for an answer */
    bool is_janitor_left; /* it hangs in the driver: nothing is opened or closed on a GPU now */
    uint32_t gpu_incarnations[KVT_ZONES_MAX]; /* of L1's zones, as sessions were told */
};

/* engine.c */
/* When a request has to be answered that ends at @deadline_ns. */
uint64_t eng_answer_ns(const struct kvt_engine *engine, uint64_t deadline_ns);
void eng_answer(struct kvt_engine *engine, struct kvt_op *op);
void eng_count(struct kvt_engine *engine, enum kvt_counter counter, uint64_t by);
void eng_notify(struct kvt_engine *engine, struct eng_session *session,
                const struct kvt_notice *notice);

/* handle.c */
enum eng_handle { ENG_HANDLE_NS = 1, ENG_HANDLE_SESSION, ENG_HANDLE_LEASE, ENG_HANDLE_TICKET };
uint64_t eng_secret(const struct kvt_engine *engine, enum eng_handle kind, uint64_t a, uint64_t b);
struct kvt_handle eng_handle(const struct kvt_engine *engine, enum eng_handle kind, uint32_t idx,
                             uint32_t generation);
bool eng_handle_is_none(const struct kvt_handle *handle);
struct kvt_handle eng_cursor(const struct kvt_engine *engine, const struct eng_ns *ns,
                             struct kvt_radix_block block);
/* These answer NULL (or false) after kvt_op_fail. */
struct eng_session *eng_session_of(struct kvt_engine *engine, struct kvt_op *op,
                                   const struct kvt_handle *handle);
struct eng_ns *eng_ns_of(struct kvt_engine *engine, struct kvt_op *op,
                         const struct kvt_handle *handle);
bool eng_handle_is_ours(const struct kvt_engine *engine, struct kvt_op *op, enum eng_handle kind,
                        const struct kvt_handle *handle, const char *what);
/* true, and the lease; NULL when it has ended. */
bool eng_lease_of(struct kvt_engine *engine, struct kvt_op *op, const struct eng_session *session,
                  const struct kvt_handle *handle, struct eng_lease **ret_lease);
/* The same for its end: one of an older epoch is good, too. */
bool eng_lease_to_end(struct kvt_engine *engine, struct kvt_op *op,
                      const struct eng_session *session, const struct kvt_handle *handle,
                      struct eng_lease **ret_lease);
bool eng_ticket_of(struct kvt_engine *engine, struct kvt_op *op, const struct eng_session *session,
                   const struct kvt_handle *handle, struct eng_ticket **ret_ticket);
bool eng_cursor_of(struct kvt_engine *engine, struct kvt_op *op, const struct eng_ns *ns,
                   const struct kvt_handle *handle, struct kvt_radix_block *ret_block);

/* heap.c */
KVT_MUST_USE int eng_heap_init(struct eng_heap *heap, uint32_t max);
void eng_heap_deinit(struct eng_heap *heap);
void eng_timer_set(struct eng_heap *heap, struct eng_timer *timer, uint64_t at_ns);
void eng_timer_clear(struct eng_heap *heap, struct eng_timer *timer);
struct eng_timer *eng_heap_due(struct eng_heap *heap, uint64_t now_ns); /* NULL: none; not taken */
uint64_t eng_heap_next_ns(const struct eng_heap *heap);
bool eng_heap_check(const struct eng_heap *heap);

/* ns.c */
void eng_op_open_namespace(struct kvt_engine *engine, struct kvt_op *op);
/* Its place among the namespaces of a Stats answer: those that are open, by number. */
uint32_t eng_ns_position(const struct kvt_engine *engine, const struct eng_ns *ns);
void eng_ns_deinit(struct eng_ns *ns);
/* By handle, or by fingerprint when it is NONE; NULL after kvt_op_fail. */
struct eng_ns *eng_ns_by(struct kvt_engine *engine, struct kvt_op *op,
                         const struct kvt_handle *handle,
                         const uint8_t fingerprint[KVT_FINGERPRINT_BYTES]);
void eng_ns_new_epoch(struct kvt_engine *engine, struct eng_ns *ns);
/* A new epoch: everything that the namespace has is gone, and given back in slices. */
void eng_ns_forget(struct kvt_engine *engine, struct eng_ns *ns);
uint64_t eng_cell_bytes(const struct eng_ns *ns, uint32_t component); /* all shards */
uint32_t eng_shards_mask(const struct eng_ns *ns, uint32_t component);
/* A request's prefix for the tree; false after kvt_op_fail. Lives in the op's arena. */
struct eng_prefix {
    struct kvt_radix_prefix radix;
    uint64_t first_blocks; /* before `tokens`: the cursor's */
    uint64_t blocks;       /* of the whole path, first_blocks included */
};
bool eng_prefix(struct kvt_engine *engine, struct kvt_op *op, const struct eng_ns *ns,
                const struct kvt_api_prefix *prefix, struct eng_prefix *ret_prefix);
/* Makes namespace number @idx of a spec that was checked; 0, KVT_STORE_E_TOO_BIG or -errno. */
KVT_MUST_USE int eng_ns_make(struct kvt_engine *engine, uint32_t idx, uint64_t epoch,
                             const struct kvt_req_open_namespace *req,
                             const uint8_t fingerprint[KVT_FINGERPRINT_BYTES]);
uint32_t eng_root_key(const struct kvt_text *salt, const struct kvt_text *lora,
                      uint8_t ret_key[KVT_ENGINE_ROOT_KEY_BYTES]);
bool eng_root_key_split(const uint8_t *key, uint32_t key_bytes, struct kvt_text *ret_salt,
                        struct kvt_text *ret_lora);
/* SHA-256 of the key of the root that the prefix is below: the cursor's, when it has one. False:
 * the op has failed. */
KVT_MUST_USE bool eng_prefix_digest(struct kvt_engine *engine, struct kvt_op *op,
                                    const struct eng_prefix *prefix,
                                    uint8_t ret_digest[KVT_FINGERPRINT_BYTES]);

/* quant.c: what a component's quantisation means */
struct kvt_quant_spec eng_quant_of(const struct kvt_api_quant *quant);
/* What a tier stores of one rank's shard of one block; 0: the quantisation makes no sense. */
uint64_t eng_stored_bytes(const struct kvt_api_component *c);
/* False: the op has failed. Of component @i, whose other fields are valid. */
KVT_MUST_USE bool eng_quant_is_valid(struct kvt_op *op, const struct kvt_api_component *c,
                                     uint32_t i, uint32_t block_tokens);
KVT_MUST_USE bool eng_quant_pieces_are_valid(struct kvt_op *op, const struct kvt_api_layout *layout,
                                             const struct kvt_api_quant *quant);

/* spec.c: a namespace's spec in its canonical encoding */
size_t eng_spec_encode(const struct kvt_req_open_namespace *req, uint8_t *ret_bytes);
/* Texts point into @bytes; @ret_tags has room for @tags_max. */
KVT_MUST_USE bool eng_spec_decode(const uint8_t *bytes, size_t bytes_count,
                                  struct kvt_req_open_namespace *ret_req, struct kvt_text *ret_tags,
                                  uint32_t tags_max);

/* catalog.c: what L3's devices keep beside blocks */
KVT_MUST_USE int eng_catalog_restore(struct kvt_engine *engine);
/* Whether a record of the catalog can hold such a spec: docs/formats.md. */
bool eng_catalog_fits(const struct kvt_req_open_namespace *req, size_t spec_bytes);
void eng_catalog_slice(struct kvt_engine *engine);
/* Answers when the namespace's present epoch is durable. */
void eng_reset_wait(struct kvt_engine *engine, struct kvt_op *op, struct eng_ns *ns);
void eng_resets_end(struct kvt_engine *engine, enum kvt_code code, const char *text);
uint64_t eng_resets_next_ns(const struct kvt_engine *engine);

/* turn.c */
void eng_serve(struct kvt_engine *engine, struct kvt_op *op);
/* What a request costs this turn, in tokens compared or as much. */
uint64_t eng_cost_of(const struct kvt_op *op);

/* park.c: lookups while L3's index is being read */
bool eng_park(struct kvt_engine *engine, struct kvt_op *op);
bool eng_parked_slice(struct kvt_engine *engine);
uint64_t eng_parked_next_ns(const struct kvt_engine *engine);

/* session.c, region.c */
void eng_op_attach(struct kvt_engine *engine, struct kvt_op *op);
/* Of a request whose regions are all open. */
void eng_attach(struct kvt_engine *engine, struct kvt_op *op);
void eng_op_detach(struct kvt_engine *engine, struct kvt_op *op);
void eng_session_end(struct kvt_engine *engine, struct eng_session *session);
void eng_group_unref(struct eng_group *group);
void eng_session_ref(struct eng_session *session);
void eng_session_unref(struct kvt_engine *engine, struct eng_session *session);
struct eng_session *eng_session_at(struct kvt_engine *engine, uint32_t idx, uint32_t generation);
void eng_sessions_tell_epoch(struct kvt_engine *engine, const struct eng_ns *ns);
int eng_region_open(void *ctx, int memfd, uint64_t bytes, void **ret_mapping, const char **ret_why);
void eng_region_close(void *ctx, void *mapping);
/* The mapping that an Attach brought for @region; NULL: none. */
struct eng_region *eng_region_of(const struct kvt_api_region *region);
void eng_region_put(struct kvt_engine *engine, struct eng_region *region);
/* All that an Attach brought. */
void eng_regions_put(struct kvt_engine *engine, struct kvt_op *op);
struct eng_region *eng_region_new(void); /* NULL: no memory */
/* eng_region_close with calls of the device tier. Any thread. */
void eng_region_close_with(const struct kvt_engine_gpu_memory *gpu_memory,
                           struct eng_region *region);

/* janitor.c */
KVT_MUST_USE int eng_janitor_start(struct kvt_engine *engine);
void eng_janitor_stop(
    struct kvt_engine *engine); /* waits for it, but not for a driver that hangs */
/* False: its ring is full. */
KVT_MUST_USE bool eng_janitor_close(struct eng_janitor *janitor, struct eng_region *region);
struct eng_opening *eng_janitor_openings(struct eng_janitor *janitor); /* all there are */
void eng_janitor_open(struct eng_janitor *janitor, struct eng_opening *opening);
struct eng_opening *eng_janitor_opened(struct eng_janitor *janitor); /* the next; NULL: none */
bool eng_janitor_has_opened(const struct eng_janitor *janitor);

/* gpu_region.c: memory on GPUs */
bool eng_has_gpu_regions(const struct kvt_op *op);
/* An Attach with such regions: served now, or when they are open. */
void eng_attach_gpu(struct kvt_engine *engine, struct kvt_op *op);
/* Opens region @idx of it and says in ->result how that went. Whoever has the opening. */
void eng_opening_step(const struct kvt_engine_gpu_memory *gpu_memory, struct eng_opening *opening,
                      uint32_t idx);
/* Takes back what was opened, and answers what is due although its memory is not open. */
void eng_openings_slice(struct kvt_engine *engine);
uint64_t eng_openings_next_ns(const struct kvt_engine *engine);
/* Answers those that were cancelled, or all; what they opened is put back when it comes. */
void eng_openings_cancelled(struct kvt_engine *engine);
void eng_openings_stop(struct kvt_engine *engine);
/* False after kvt_op_fail. */
bool eng_gpu_layout_fits(const struct kvt_engine *engine, struct kvt_op *op, uint32_t component,
                         const struct kvt_layout *layout);
void eng_gpu_take_home(struct eng_session *session);
/* Tells sessions whose GPU was lost. */
void eng_gpu_watch(struct kvt_engine *engine);

/* lease.c */
/* NULL: the pool is empty. The tree's lease was taken by the caller. */
struct eng_lease *eng_lease_new(struct kvt_engine *engine, struct eng_session *session,
                                struct kvt_radix_block end, uint64_t blocks, uint64_t idle_ns,
                                const uint64_t bytes[KVT_TIERS_COUNT]);
bool eng_lease_room(struct kvt_engine *engine, struct kvt_op *op, const struct eng_session *session,
                    const uint64_t bytes[KVT_TIERS_COUNT]);
/* Whether the engine may lease that beside what it leases. */
bool eng_lease_fits(const struct kvt_engine *engine, const struct eng_group *group,
                    const uint64_t bytes[KVT_TIERS_COUNT]);
void eng_lease_use(struct kvt_engine *engine, struct eng_lease *lease);
void eng_lease_unuse(struct kvt_engine *engine, struct eng_lease *lease);
void eng_lease_end(struct kvt_engine *engine, struct eng_lease *lease, bool is_told);
void eng_lease_expire(struct kvt_engine *engine, struct eng_lease *lease);
bool eng_leases_slice(struct kvt_engine *engine);
void eng_op_release(struct kvt_engine *engine, struct kvt_op *op);

/* hold.c: blocks that engines read in L1 */
bool eng_in_place_is_valid(const struct kvt_engine *engine, struct kvt_op *op,
                           const struct eng_session *session);
/* Pins what was raised and says where it is; a move that cannot be is not DONE any more. */
void eng_in_place_answer(struct kvt_engine *engine, struct eng_run *run);
void eng_holds_abandon(struct eng_lease *lease); /* its group's books; the lease is being killed */
/* Up to @inout_budget of a dead lease's; true: it has none (left). */
bool eng_holds_drop(struct kvt_engine *engine, struct eng_lease *lease, uint32_t *inout_budget);
/* After a Reset let all leases of the namespace go: not those. */
void eng_holds_keep(struct kvt_engine *engine, const struct eng_ns *ns);
/* Leases that hold something in the lost zones, a bit each, are ended by the slices that follow. */
void eng_holds_lost(struct kvt_engine *engine, uint32_t zones);
bool eng_holds_slice(struct kvt_engine *engine); /* true: there is more */
/* Whether sessions of the engine must hear of the loss. */
bool eng_holds_is_told(const struct eng_group *group, uint32_t zones);
const char *eng_holds_check(const struct kvt_engine *engine); /* NULL, or what is wrong */

/* ticket.c */
struct eng_ticket *eng_ticket_new(struct kvt_engine *engine, struct eng_session *session,
                                  bool is_internal);
/* Takes over a claimed cell. There is room: eng_entry_has_room. */
void eng_ticket_add(struct kvt_engine *engine, struct eng_ticket *ticket, uint32_t component,
                    uint32_t block_idx, struct kvt_cell cell);
uint32_t eng_entry_number(const struct kvt_engine *engine, const struct eng_entry *entry);
struct eng_entry *eng_ticket_find(struct kvt_engine *engine, const struct eng_ticket *ticket,
                                  uint32_t component, uint32_t block_idx);
struct eng_entry *eng_entry_at(struct kvt_engine *engine, uint32_t ticket_idx, uint32_t generation,
                               uint32_t entry);
void eng_entry_done(struct kvt_engine *engine, struct eng_entry *entry, uint32_t shard,
                    bool is_filled);
void eng_ticket_use(struct kvt_engine *engine, struct eng_ticket *ticket);
void eng_ticket_unuse(struct kvt_engine *engine, struct eng_ticket *ticket);
void eng_ticket_end(struct kvt_engine *engine, struct eng_ticket *ticket);
void eng_ticket_expire(struct kvt_engine *engine, struct eng_ticket *ticket);
bool eng_tickets_slice(struct kvt_engine *engine);
bool eng_entry_has_room(const struct kvt_engine *engine);
void eng_group_drop_all(struct kvt_engine *engine, struct eng_group *group);

/* op_lookup.c, prefetch.c */
void eng_op_lookup(struct kvt_engine *engine, struct kvt_op *op);
/* Blocks that resuming at the end of @blocks needs from a component: [*ret_first, @blocks). */
uint64_t eng_needed_first(const struct eng_ns *ns, uint32_t component, uint64_t blocks);
void eng_prefetch_add(struct kvt_engine *engine, const struct eng_session *session,
                      struct kvt_radix_block end, uint32_t component, uint64_t first_idx,
                      uint64_t end_idx);
bool eng_prefetch_slice(struct kvt_engine *engine);
void eng_prefetch_cancel(struct kvt_engine *engine);

/* run.c */
struct eng_run *eng_run_new(struct kvt_engine *engine, struct kvt_op *op,
                            struct eng_session *session, enum eng_run_kind kind);
void eng_run_start(struct kvt_engine *engine, struct eng_run *run, uint64_t timeout_ns);
/* A run that was never started: its request was refused, or needs no work. */
void eng_run_drop(struct kvt_engine *engine, struct eng_run *run);
void eng_run_stop(struct kvt_engine *engine, struct eng_run *run, enum kvt_move_result result,
                  enum kvt_code code, const char *text);
void eng_run_expire(struct kvt_engine *engine, struct eng_run *run);
bool eng_runs_pump(struct kvt_engine *engine);
void eng_runs_cancelled(struct kvt_engine *engine);
void eng_run_job_done(struct kvt_engine *engine, struct eng_run *run, struct eng_job *job);
void eng_op_quiesce(struct kvt_engine *engine, struct kvt_op *op);

bool eng_op_id_is_free(struct kvt_op *op, const struct eng_session *session, uint64_t op_id);

/* job.c */
/* NULL: none is free now. @ids: engine blocks (copied), or NULL. */
struct eng_job *eng_job_new(struct kvt_engine *engine, struct eng_run *run, enum kvt_job_kind kind,
                            const uint64_t *ids, uint32_t ids_count);
void eng_job_submit(struct kvt_engine *engine, struct eng_job *job); /* gone afterwards */
/* Ends it with the result that it has, without the store. */
void eng_job_skip(struct kvt_engine *engine, struct eng_job *job);

/* ids.c: engine blocks that a Promote names */
#define ENG_IDS_SCRATCH_BYTES (2 * sizeof(uint64_t)) /* an id */
bool eng_ids_are_rising(const uint64_t *ids, uint32_t count);
/* One that is named twice, or KVT_ENGINE_BLOCK_NONE, which may be named any number of times; all
 * others are below @limit. @scratch: room for all of them, see above. Adds to @inout_steps how many
 * words were looked at: O(count * digits of limit), whatever the ids are. */
uint64_t eng_ids_find_twice(const uint64_t *ids, uint32_t count, uint64_t limit, uint64_t *scratch,
                            uint64_t *inout_steps);

/* moves.c */
struct eng_moves_spec {
    const struct kvt_api_moves *moves;
    uint32_t moves_count;
    uint64_t blocks;   /* that a block index may name */
    bool needs_layout; /* engine blocks are read or written */
};
/* Checks the request's moves and gives each an empty result and no cell; false after
 * kvt_op_fail. */
bool eng_moves_init(struct kvt_op *op, struct eng_run *run, const struct eng_moves_spec *spec);
/* The same for a request without moves: all that resuming at the end of the path needs. */
bool eng_moves_whole(struct kvt_op *op, struct eng_run *run, uint64_t blocks);
/* The cell of each move on the path to @end, in @op's arena; all zero for what lies behind the
 * path. NULL: the arena is full. O(nodes of the path + blocks between the moves of a chunk). */
struct kvt_radix_cell *eng_moves_path(struct kvt_engine *engine, struct kvt_op *op,
                                      struct kvt_radix_block end, const struct eng_moves *moves,
                                      uint64_t path_blocks);
/* Looks up each move's cell on the path to run->end; what is not on it is MISS. */
void eng_moves_cells(struct kvt_engine *engine, struct eng_run *run, uint64_t path_blocks);
/* Binds the moves to @data, one payload after the other. */
bool eng_moves_inline(struct kvt_op *op, struct eng_run *run, uint8_t *data);
uint64_t eng_moves_bytes(const struct eng_run *run); /* of one shard each */
void eng_moves_answer(struct kvt_engine *engine, struct eng_run *run,
                      struct kvt_api_results *ret_results);
bool eng_moves_aborted(struct kvt_engine *engine, struct kvt_op *op,
                       const struct kvt_api_moves *moves, uint32_t moves_count,
                       struct kvt_api_results *ret_results);
uint64_t eng_moves_count(const struct eng_run *run, enum kvt_move_result result);
void eng_moves_rest(struct eng_run *run, enum kvt_move_result result);

enum eng_start { ENG_STARTED, ENG_SETTLED /* it has its result */, ENG_WAIT /* no job is free */ };

/* The path that a request names. */
struct eng_path {
    uint64_t blocks;          /* that were named */
    uint64_t path_blocks;     /* that the tree has */
    uint64_t boundary_blocks; /* before the greatest legal boundary */
};
/* By prefix the run leases what it finds for itself; false after kvt_op_fail. */
bool eng_path_by_prefix(struct kvt_engine *engine, struct kvt_op *op, struct eng_run *run,
                        const struct kvt_api_prefix *prefix, struct eng_path *ret_path);
void eng_path_by_lease(struct kvt_engine *engine, struct eng_run *run, struct eng_lease *lease,
                       struct eng_path *ret_path);

/* op_promote.c, op_demote.c, op_reserve.c */
void eng_op_promote(struct kvt_engine *engine, struct kvt_op *op);
enum eng_start eng_promote_start(struct kvt_engine *engine, struct eng_run *run,
                                 struct eng_moves *moves, uint32_t move);
void eng_promote_answer(struct kvt_engine *engine, struct eng_run *run);
void eng_op_demote(struct kvt_engine *engine, struct kvt_op *op);
enum eng_start eng_demote_start(struct kvt_engine *engine, struct eng_run *run,
                                struct eng_moves *moves, uint32_t move);
/* The phase is over: true when another one begins. */
bool eng_demote_phase(struct kvt_engine *engine, struct eng_run *run);
void eng_demote_answer(struct kvt_engine *engine, struct eng_run *run);
void eng_op_reserve(struct kvt_engine *engine, struct kvt_op *op);
/* Makes the prefix exist; evicts for it. 0, KVT_RADIX_E_NO_ROOM, or KVT_RADIX_E_STALE. After 0 the
 * caller claims and then settles. */
KVT_MUST_USE int eng_insert(struct kvt_engine *engine, const struct eng_prefix *prefix,
                            struct kvt_radix_block *ret_end);
/* Claims one cell into @ticket within the limits. */
enum kvt_reserve_state eng_reserve_cell(struct kvt_engine *engine, struct eng_ticket *ticket,
                                        struct kvt_radix_block block, uint32_t component,
                                        uint64_t block_idx,
                                        const uint8_t digest[KVT_FINGERPRINT_BYTES]);
bool eng_ticket_room(struct kvt_engine *engine, struct kvt_op *op,
                     const struct eng_session *session);

/* op_admin.c, stats.c, check.c */
void eng_op_evict(struct kvt_engine *engine, struct kvt_op *op);
void eng_op_reset(struct kvt_engine *engine, struct kvt_op *op);
void eng_op_dump(struct kvt_engine *engine, struct kvt_op *op);
void eng_op_stats(struct kvt_engine *engine, struct kvt_op *op);
/* stats_devices.c; false: the op's arena is full. */
bool eng_error_stats(struct kvt_op *op, const struct kvt_tier_counters *from,
                     struct kvt_api_counter **ret_errors, uint32_t *ret_count);
/* L1, and its GPUs; then the same as counters, behind the others: at most so many. */
bool eng_l1_stats(const struct kvt_engine *engine, struct kvt_op *op,
                  const struct kvt_store_stats *store);
/* What is wrong with it, behind @before; "" nothing. Bytes that were written. */
size_t eng_l1_describe(const struct kvt_engine *engine, const char *before, char *ret_text,
                       size_t size);
uint32_t eng_gpu_counters_max(const struct kvt_ans_stats *ans);
bool eng_gpu_counters(struct kvt_op *op, struct kvt_api_counter *at, uint32_t *count);
bool eng_device_stats(const struct kvt_engine *engine, struct kvt_op *op,
                      const struct kvt_store_stats *store);
void eng_op_health(struct kvt_engine *engine, struct kvt_op *op);

/* op_maintain.c */
void eng_op_maintain(struct kvt_engine *engine, struct kvt_op *op);
void eng_maintain_slice(
    struct kvt_engine *engine); /* answers drains that are over, or have to be */
uint64_t eng_maintain_next_ns(const struct kvt_engine *engine);
