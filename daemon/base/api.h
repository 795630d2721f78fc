/* The daemon's requests and answers as plain structs: what the gRPC server decodes and the engine
 * serves. It knows neither of them, nor protobuf, nor tiers: the server can be tested with a fake
 * service, the engine without gRPC.
 *
 * One struct kvt_op is one client request in progress. It has one owner at a time:
 *   1. the server takes a free one, decodes into `req` (everything variable lies in its arena);
 *   2. service->submit gives it to the service (the engine);
 *   3. the service fills `status` and `ans` (again in the arena) and calls op->done exactly once,
 *      which gives it back. Before that it may call op->progress any number of times.
 * Until done, the server only touches `is_cancelled`, and says so with service->cancel.
 *
 * Bounds of limits.h were checked by the server: counts and sizes here are within them. Whether a
 * handle, a namespace or a block id makes sense is checked by the service. Pointers into the arena
 * live until done returns. */
#pragma once

#include <stdatomic.h>

#include "daemon/base/arena.h"
#include "daemon/base/def.h"
#include "daemon/base/limits.h"

/* Same numbers as gRPC's, so that the server need not translate. docs/api.md says what the client
 * does about each. */
enum kvt_code {
    KVT_CODE_OK = 0,
    KVT_CODE_CANCELLED = 1,
    KVT_CODE_INVALID_ARGUMENT = 3,
    KVT_CODE_DEADLINE_EXCEEDED = 4,
    KVT_CODE_NOT_FOUND = 5,
    KVT_CODE_PERMISSION_DENIED = 7,
    KVT_CODE_RESOURCE_EXHAUSTED = 8,
    KVT_CODE_FAILED_PRECONDITION = 9,
    KVT_CODE_ABORTED = 10,
    KVT_CODE_UNIMPLEMENTED = 12,
    KVT_CODE_INTERNAL = 13,
    KVT_CODE_UNAVAILABLE = 14,
};

enum kvt_op_kind {
    KVT_OP_OPEN_NAMESPACE,
    KVT_OP_ATTACH, /* a session begins */
    KVT_OP_DETACH, /* its stream ended; made by the server, not by a client */
    KVT_OP_LOOKUP,
    KVT_OP_PROMOTE,
    KVT_OP_RESERVE,
    KVT_OP_DEMOTE,
    KVT_OP_QUIESCE,
    KVT_OP_RELEASE,
    KVT_OP_EVICT, /* admin */
    KVT_OP_RESET, /* admin */
    KVT_OP_STATS,
    KVT_OP_DUMP, /* admin */
    KVT_OP_HEALTH,
    KVT_OP_MAINTAIN, /* admin */
    KVT_OP_KINDS
};

/* Handles: opaque to clients; the boot id makes those of an earlier daemon FAILED_PRECONDITION. A
 * session's secret is random, so that nobody can guess another's. */
struct kvt_handle {
    uint64_t boot_id;
    uint64_t id;     /* index and generation, the service's */
    uint64_t secret; /* sessions, leases, tickets, namespaces: random or derived; checked */
};
#define KVT_HANDLE_NONE ((struct kvt_handle){0, 0, 0})

struct kvt_text {
    const char *at; /* not terminated */
    uint32_t bytes;
};

enum kvt_tier_bits { KVT_TIER_BIT_L1 = 1, KVT_TIER_BIT_L2 = 2, KVT_TIER_BIT_L3 = 4 };
#define KVT_TIER_BITS_ALL 7u
#define KVT_API_TIERS 3u

/* ---- namespaces and sessions ------------------------------------------------------------------
 */

/* How the daemon stores a component's payload: the values of struct kvt_quant_spec
 * (kernels/kvt_kernels.h). kind 0: as it is, and the other fields are 0. */
struct kvt_api_quant {
    uint32_t kind;  /* 1 FP8 E4M3, 2 INT8 */
    uint32_t elem;  /* 1 FP16, 2 BF16 */
    uint32_t order; /* of a plane: 1 [token][head][dim], 2 [head][token][dim] */
    uint32_t plane_tokens, heads, head_dim;
};

struct kvt_api_component {
    uint32_t kind;            /* enum kvt_component_kind: 1 full, 2 sliding window, 3 state */
    uint32_t window_tokens;   /* sliding window: previous tokens that the next one attends to */
    uint64_t bytes_per_block; /* of one rank's shard of one block, as the engine has it */
    struct kvt_api_quant quant;
    bool is_replicated;   /* every rank holds the same bytes (MLA): one shard for all */
    struct kvt_text name; /* for people */
};

/* Two forms. By spec: makes the namespace or finds the one of the same spec. By fingerprint (for
 * tools, which know namespaces from Stats only): finds one that exists and ignores everything else
 * in the request; NOT_FOUND when there is none. On the wire it is a `bytes fingerprint` field of
 * exactly KVT_FINGERPRINT_BYTES; absent or empty means "by spec". */
struct kvt_req_open_namespace {
    bool is_by_fingerprint;
    uint8_t fingerprint[KVT_FINGERPRINT_BYTES];
    uint32_t block_tokens;
    uint32_t ranks;
    uint32_t components_count;
    struct kvt_api_component components[KVT_COMPONENTS_MAX];
    /* Everything else that could change bytes; any difference is another namespace. */
    struct kvt_text model, revision, dtype, layout;
    uint32_t tags_count; /* "key=value" texts, sorted and unique: checked by the server */
    const struct kvt_text *tags;
};

struct kvt_ans_open_namespace {
    struct kvt_handle ns;
    uint8_t fingerprint[KVT_FINGERPRINT_BYTES];
    uint64_t epoch;
    bool was_known;                            /* it was there already, of another engine */
    uint32_t components_count;                 /* 0: of a daemon that knows no quantisation */
    uint64_t stored_bytes[KVT_COMPONENTS_MAX]; /* of what bytes_per_block is of: in a tier */
};

#define KVT_RANK_NONE UINT32_MAX /* a scheduler without a rank of its own */

enum kvt_region_kind {
    KVT_REGION_MEMFD = 0,
    KVT_REGION_INLINE = 1,   /* bytes come in Promote/Demote messages */
    KVT_REGION_CUDA_IPC = 2, /* memory of a GPU, by the handle of its allocation */
};

struct kvt_api_region {
    enum kvt_region_kind kind;
    uint64_t bytes;
    uint8_t token[KVT_REGION_TOKEN_BYTES]; /* memfd: what the region socket answered */
    /* Memfd: what the service's region_open made of it; set by the server. CUDA: the service's own,
     * NULL when the request comes. */
    void *mapping;
    struct {
        uint8_t handle[KVT_CUDA_IPC_HANDLE_BYTES]; /* of the whole allocation */
        uint64_t offset_bytes;                     /* of the region in the allocation */
        uint8_t device_uuid[KVT_CUDA_UUID_BYTES];
    } cuda_ipc;
};

struct kvt_api_piece {
    uint32_t region_idx;
    uint32_t bytes;
    uint64_t offset_bytes, stride_bytes;
};

struct kvt_api_layout { /* of one component, in the session's regions */
    uint32_t component;
    uint32_t engine_blocks_per_block;
    uint32_t pieces_count;
    const struct kvt_api_piece *pieces;
};

struct kvt_session_sink; /* the server's end of an Attach stream; see kvt_service.notify */

struct kvt_req_attach {
    struct kvt_handle ns;
    uint8_t engine_id[KVT_ENGINE_ID_BYTES];
    bool is_scheduler;
    uint32_t rank; /* < ranks of the namespace, or KVT_RANK_NONE */
    uint32_t api_version;
    struct kvt_text name; /* for people: "vllm 0.32 pid 4711" */
    uint32_t regions_count;
    struct kvt_api_region regions[KVT_REGIONS_PER_SESSION_MAX];
    uint32_t layouts_count; /* 0: this session moves no payload (a scheduler) */
    const struct kvt_api_layout *layouts;
    uint64_t peer_uid, peer_pid;   /* from SO_PEERCRED */
    struct kvt_session_sink *sink; /* where notices for this session go */
};

struct kvt_ans_attach {
    struct kvt_handle session;
    uint32_t api_version;
    uint64_t epoch;
    uint64_t lease_ns_max, ticket_ns_max;
};

struct kvt_req_detach {
    struct kvt_handle session;
};

/* ---- prefixes ---------------------------------------------------------------------------------
 */

struct kvt_api_prefix {
    struct kvt_text salt, lora;
    struct kvt_handle cursor; /* {0,0,0}: tokens begin at the root */
    const uint32_t *tokens;   /* host order, in the arena, aligned */
    uint64_t tokens_count;
    /* extra keys of some blocks: index counts whole blocks of `tokens` from 0, rising */
    uint32_t extra_keys_count;
    const struct kvt_api_extra_key {
        uint32_t block_idx;
        uint8_t key[KVT_EXTRA_KEY_BYTES];
    } * extra_keys;
};

/* ---- lookup -----------------------------------------------------------------------------------
 */

struct kvt_req_lookup {
    struct kvt_handle session;
    struct kvt_api_prefix prefix;
    uint64_t limit_tokens; /* UINT64_MAX: none */
    uint32_t tiers;        /* KVT_TIER_BIT_*; what counts as resident */
    bool wants_lease;
    uint64_t lease_ns; /* 0: the default */
    bool wants_why;
    bool wants_prefetch; /* bring what is lower up to L2 in the background */
};

enum kvt_why { /* what kept a component from accepting more */
               KVT_WHY_NONE = 0,
               KVT_WHY_NEVER_STORED = 1, /* no such tokens in the tree (or forgotten since) */
               KVT_WHY_EVICTED = 2,      /* the block is known, its bytes were evicted or lost */
               KVT_WHY_OTHER_TIER = 3,   /* only in tiers that the request did not allow */
               KVT_WHY_PENDING = 4,      /* being filled right now */
               KVT_WHY_CHECK_FAILED = 5, /* its bytes failed verification and were dropped */
               KVT_WHY_INDEX_FULL = 6,   /* it was not stored because the index was full */
               KVT_WHY_OTHER_EPOCH = 7,  /* it was there before a Reset */
};

struct kvt_ans_lookup {
    uint64_t boundary_tokens;
    uint64_t path_tokens;
    uint64_t branch_tokens; /* where the full component could go on to */
    uint64_t epoch;
    uint32_t components_count;
    struct {
        uint64_t alone_tokens;
        uint64_t needed_blocks;
        uint64_t blocks_at[KVT_API_TIERS];
        uint64_t tokens_at[KVT_API_TIERS]; /* blocks_at in tokens */
        enum kvt_why why;                  /* when wants_why */
        uint64_t why_block_idx;
    } components[KVT_COMPONENTS_MAX];
    struct kvt_handle cursor; /* of the last matched block; NONE at 0 */
    uint64_t cursor_tokens;   /* tokens before and in it */
    struct kvt_handle lease;  /* NONE when not asked or nothing matched */
    uint64_t lease_ns;        /* how long from now while idle */
    uint64_t estimate_us;     /* promote time from measured rates, queueing included */
    bool is_lease_limited;    /* more is there, whose lease would pass the engine's limit */
};

/* ---- moving -----------------------------------------------------------------------------------
 */

/* One block of the daemon of one component and the engine blocks that hold it. For inline regions
 * engine_blocks are ignored and the bytes travel in move order.
 *
 * In a Promote the id KVT_ENGINE_BLOCK_NONE means that this engine block is not written: a window
 * that has passed it by, or a cache of the engine's own that has it and serves others from it. The
 * rest of the block moves as ever, and what is verified is the whole of it. A Demote gives a whole
 * payload: there it is INVALID_ARGUMENT. */
struct kvt_api_moves {
    uint32_t component;
    uint32_t count;
    const uint64_t *block_idx;     /* count, rising: blocks counted from the root */
    const uint64_t *engine_blocks; /* count * engine_blocks_per_block of the layout */
    /* What came: 0, or a multiple of count. The service compares it with the layout before it reads
     * engine_blocks: a client may lie. */
    uint32_t engine_blocks_count;
};

enum kvt_target { KVT_TARGET_ENGINE = 0, KVT_TARGET_L1 = 1, KVT_TARGET_L2 = 2 };
enum kvt_promote_policy {
    KVT_PROMOTE_WAIT_COMPLETE = 0, /* all that was asked, or what the deadline allows */
    KVT_PROMOTE_BEST_EFFORT = 1,   /* only what is in L1 and L2 now; what is lower is started */
    KVT_PROMOTE_TIMEOUT = 2,       /* as WAIT_COMPLETE, until timeout_ns */
};

enum kvt_move_result { /* per move, one byte in answers */
                       KVT_MOVE_DONE = 0,
                       KVT_MOVE_MISS = 1,    /* not there (any more), or failed verification */
                       KVT_MOVE_LATE = 2,    /* not started within the deadline */
                       KVT_MOVE_PRESENT = 3, /* demote: it was there already, nothing was copied */
                       KVT_MOVE_PENDING = 4, /* demote: another engine fills it */
                       KVT_MOVE_NO_ROOM = 5, /* no slot, all pinned or over a limit */
                       KVT_MOVE_CLIENT_GONE =
                           6,                /* the client's own memory vanished under the copy */
                       KVT_MOVE_ABORTED = 7, /* ticket or lease ended, reset, cancelled */
};

struct kvt_req_promote {
    struct kvt_handle session;
    struct kvt_handle lease; /* or a prefix, when NONE */
    struct kvt_api_prefix prefix;
    enum kvt_target target;
    enum kvt_promote_policy policy;
    uint64_t timeout_ns;
    uint64_t op_id;       /* client-chosen, unique in its session while not quiesced; 0: none */
    uint32_t moves_count; /* at most one a component */
    struct kvt_api_moves moves[KVT_COMPONENTS_MAX];
    uint32_t layer_groups; /* 0 or 1: no progress; else progress after each of so many groups */
    bool wants_inline;     /* bytes come back in the answer */
    bool is_in_place;      /* target L1: where the blocks are, to be read there; holds them */
};

struct kvt_api_results { /* one byte a move (kvt_move_result), by component as in the request */
    uint32_t count[KVT_COMPONENTS_MAX];
    uint8_t *results[KVT_COMPONENTS_MAX];
};

struct kvt_ans_promote {
    struct kvt_api_results moves;
    uint64_t moved_bytes;
    uint64_t moved_blocks_from[KVT_API_TIERS];
    bool is_quiesced; /* no thread touches the op's client memory any more */
    uint32_t inline_bytes;
    const uint8_t *inline_data; /* of DONE moves, in move order, component by component */
    /* When is_in_place: of each move, as many as results; 0 where it is not DONE. */
    bool is_in_place;
    struct kvt_api_in_place {
        uint32_t *zones;
        uint64_t *offsets_bytes; /* in the arena of that zone */
    } in_place[KVT_COMPONENTS_MAX];
    uint32_t arenas_count;
    struct kvt_api_arena {
        uint32_t zone, incarnation;
        uint8_t handle[KVT_CUDA_IPC_HANDLE_BYTES];
        uint8_t device_uuid[KVT_CUDA_UUID_BYTES];
        uint64_t bytes;
    } arenas[KVT_ZONES_MAX];
};

struct kvt_req_reserve {
    struct kvt_handle session;
    struct kvt_api_prefix prefix;
    uint64_t ticket_ns; /* 0: the default */
    /* Which copies the engine can give, per component: block index ranges [first, end). */
    uint32_t wants_count;
    struct kvt_api_range {
        uint32_t component;
        uint64_t first_block_idx, end_block_idx;
    } wants[KVT_COMPONENTS_MAX * 4];
};

enum kvt_reserve_state {
    KVT_RESERVE_MISSING = 0,
    KVT_RESERVE_PENDING = 1,
    KVT_RESERVE_PRESENT = 2,
    KVT_RESERVE_NO_ROOM = 3
};

struct kvt_ans_reserve {
    struct kvt_handle ticket; /* NONE when nothing is missing */
    uint64_t ticket_ns;
    uint64_t epoch;
    uint32_t wants_count; /* as in the request: one state byte for each block of each range */
    uint32_t count[KVT_COMPONENTS_MAX * 4];
    uint8_t *states[KVT_COMPONENTS_MAX * 4];
    struct kvt_handle cursor; /* of the prefix's last block: the next Lookup or Reserve uses it */
    uint64_t cursor_tokens;
};

struct kvt_req_demote {
    struct kvt_handle session;
    struct kvt_handle ticket; /* from the engine's blocks, by ticket; or by prefix, when NONE: then
                                 it reserves for itself (single-process engines) */
    struct kvt_handle lease;  /* between tiers: the leased path; no engine blocks are used */
    struct kvt_api_prefix prefix;
    bool is_between_tiers;
    uint32_t from_tiers; /* between tiers: KVT_TIER_BIT_* to take from */
    uint32_t to_tier;    /* between tiers: one KVT_TIER_BIT_* to put it into */
    uint64_t op_id;
    uint32_t moves_count;
    struct kvt_api_moves moves[KVT_COMPONENTS_MAX];
    bool wants_durable; /* answer only when what was stored is on L3 and flushed */
    uint32_t inline_bytes;
    const uint8_t *inline_data; /* the moves' payloads, one after the other */
};

struct kvt_ans_demote {
    struct kvt_api_results moves;
    uint64_t moved_bytes;
    bool is_quiesced;
    bool is_durable;
};

struct kvt_req_quiesce {
    struct kvt_handle session;
    uint64_t op_id;
};

struct kvt_req_release {
    struct kvt_handle session;
    struct kvt_handle lease; /* one of the two */
    struct kvt_handle ticket;
};

/* ---- admin ------------------------------------------------------------------------------------
 */

struct kvt_req_evict {
    struct kvt_handle ns; /* or by fingerprint when NONE */
    uint8_t fingerprint[KVT_FINGERPRINT_BYTES];
    struct kvt_api_prefix prefix; /* everything at and below its last whole block; no tokens: the
                                     root of (salt, lora) */
    bool is_whole_namespace;
};

struct kvt_ans_evict {
    uint64_t evicted_blocks; /* known at once; their slots are freed in slices */
};

struct kvt_req_reset {
    struct kvt_handle ns;
    uint8_t fingerprint[KVT_FINGERPRINT_BYTES];
};

struct kvt_ans_reset {
    uint64_t epoch; /* the new one */
};

struct kvt_req_dump {
    uint8_t fingerprint[KVT_FINGERPRINT_BYTES]; /* all zero: every namespace */
    uint64_t depth_max_blocks;
    uint64_t resume;    /* 0, or what the last answer said */
    uint32_t nodes_max; /* at most 4,096 */
};

struct kvt_api_dump_node {
    uint32_t ns_idx;
    struct kvt_text salt, lora;
    uint32_t depth_nodes;
    uint64_t first_block_idx;
    uint32_t blocks_count, children_count, leases;
    uint32_t first_tokens[4];
    uint32_t components_count;
    uint32_t blocks_at[KVT_COMPONENTS_MAX][KVT_API_TIERS];
};

struct kvt_ans_dump {
    uint32_t nodes_count;
    struct kvt_api_dump_node *nodes;
    uint64_t resume; /* 0: that was all */
};

enum kvt_maintain_action {
    KVT_MAINTAIN_STATUS = 0,
    /* Write what L3 lacks now; answered when that is over and durable, or when the deadline is
     * near: it goes on then, and asked again it is waited for. */
    KVT_MAINTAIN_DRAIN = 1,
    /* Read what is on L3, to find rot; running: at another rate. */
    KVT_MAINTAIN_SCRUB_START = 2,
    KVT_MAINTAIN_SCRUB_STOP = 3,
};

struct kvt_req_maintain {
    enum kvt_maintain_action action;
    uint64_t rate_bytes_per_s; /* SCRUB_START: 0: as configured */
};

struct kvt_ans_maintain { /* of every action: how things stand now */
    struct {
        bool is_running;
        uint64_t copies_left;                   /* that L3 lacks; new ones too */
        uint64_t copies_written, bytes_written; /* of this drain, or the last */
        uint64_t copies_failed; /* of the last: there when it began, and L3 did not take them */
    } drain;
    struct {
        bool is_running;
        uint64_t rate_bytes_per_s; /* 0: off */
        /* Since the daemon's start. Skipped: too large for the buffers of a scrub. */
        uint64_t checked_copies, checked_bytes, bad_copies, skipped_copies, rounds;
    } scrub;
};

/* ---- stats ------------------------------------------------------------------------------------
 */

struct kvt_api_counter {
    const char *name;  /* static: "lookups", as declared in daemon/base/counters.h */
    const char *label; /* static or in the arena: "tier=l2,reason=evicted"; "" for none */
    uint64_t value;
};

struct kvt_api_tier_stats {
    uint32_t tier;   /* 1..3 */
    uint32_t health; /* 0 ok, 1 out of service, 2 off */
    uint64_t capacity_bytes, used_bytes, slab_bytes;
    uint64_t copies;        /* READY */
    uint64_t pinned_copies; /* being read, or leased */
    uint64_t filling_copies;
    uint64_t inflight;
    uint64_t hit_tokens;
    uint64_t evictions;
    uint64_t read_bytes, written_bytes, errors;
    struct kvt_text detail;
};

enum kvt_api_device_health {
    KVT_DEVICE_OK = 0,
    KVT_DEVICE_OUT = 1,  /* of service; it is tried again, its blocks are kept */
    KVT_DEVICE_LOST = 2, /* out for longer than tiers.l3.lost_after: its blocks were forgotten */
};
enum kvt_api_index_state { /* the first four as enum kvt_index_state */
                           KVT_DEVICE_INDEX_LOADING = 0,
                           KVT_DEVICE_INDEX_SCANNING = 1, /* rebuilt from the data, loads after */
                           KVT_DEVICE_INDEX_READY = 2,
                           KVT_DEVICE_INDEX_LOST = 3, /* nothing of the device survives a restart */
                           KVT_DEVICE_INDEX_OFF = 4,
};

struct kvt_api_index_stats { /* of one device */
    uint32_t state;          /* enum kvt_api_index_state */
    uint64_t used_bytes, capacity_bytes;
    uint64_t commits, rows_put, copies_put, drops;
    uint64_t refused;                               /* what was put and did not fit */
    uint64_t loaded_rows, load_total_rows, load_ns; /* of the start; total 0: not known yet */
    uint64_t scanned_bytes, scan_total_bytes;       /* of a rebuild; total 0: there was none */
};

#define KVT_DEVICE_LIFE_UNKNOWN UINT64_MAX

struct kvt_api_device_stats { /* one device of L3 */
    struct kvt_text path, index_path;
    uint32_t health; /* enum kvt_api_device_health */
    uint64_t capacity_bytes, used_bytes, slab_bytes;
    uint64_t copies; /* READY */
    uint64_t inflight;
    uint64_t read_bytes, written_bytes; /* since the start */
    uint64_t outages, out_ns;           /* times out of service; how long it is out now */
    uint64_t life_written_bytes;        /* since its file was made */
    uint64_t endurance_bytes;           /* as configured; 0: not known */
    uint64_t dwpd_milli;                /* whole capacities written a day, in thousandths */
    uint64_t life_left_days;            /* KVT_DEVICE_LIFE_UNKNOWN */
    uint32_t errors_count;              /* kinds of errors, of which some may be 0 */
    struct kvt_api_counter *errors;     /* name: "read", "bad_checksum"; no label */
    struct kvt_api_index_stats index;
};
/* Sets dwpd_milli and life_left_days from the other fields: the rate of writing since the start is
 * taken to go on. Below an hour of it no life is told: a start is no sample. */
void kvt_api_device_wear(struct kvt_api_device_stats *device, uint64_t uptime_ns);

enum kvt_api_gpu_state { /* as enum kvt_gpu_state */
                         KVT_API_GPU_OK = 0,
                         KVT_API_GPU_LOST = 1,
                         KVT_API_GPU_REFUSED = 2,
};
#define KVT_API_GPUS_MAX 64u /* in use, at most KVT_ZONES_MAX, and not */

struct kvt_api_l1_stats {
    struct kvt_text backend;                  /* "none", "host", "cuda" */
    bool has_cuda;                            /* of the daemon's build */
    uint32_t driver_version, runtime_version; /* 13000 is 13.0; 0: none */
    bool is_host_pinned;                      /* now */
    struct kvt_text pin_why;                  /* why L2 is not pinned */
    struct kvt_text why;                      /* why no GPU is used */
    bool is_export_allowed;
    uint64_t held_bytes_per_engine_max; /* 0: nothing is exported */
    uint32_t streams;                   /* of each direction and GPU; 0: no GPUs are meant */
    uint64_t inflight_bytes_max, crossover_bytes; /* of each GPU */
};

struct kvt_api_gpu_path {
    const char *name; /* "from_engine_kernel" */
    uint64_t bytes, transfers;
};

#define KVT_API_GPU_INDEX_NONE UINT32_MAX

struct kvt_api_gpu_stats { /* one GPU of L1, used or refused */
    uint32_t index;        /* CUDA's; NONE: no such GPU, it was named by UUID */
    uint8_t uuid[KVT_CUDA_UUID_BYTES];
    struct kvt_text name, pci;
    int32_t numa_node; /* -1: not known */
    uint32_t sm;
    uint64_t memory_bytes;
    uint32_t state; /* enum kvt_api_gpu_state */
    struct kvt_text why;
    bool has_ipc;
    bool is_exported, is_host_pinned; /* now */
    uint64_t arena_bytes, staging_bytes;
    uint64_t used_bytes, slab_bytes, slots; /* of the arena: what is taken; slots are shards */
    uint64_t inflight_bytes;
    uint64_t lost_ns; /* how long it is lost now */
    uint64_t losses, revivals;
    uint32_t last_error; /* CUDA's number */
    uint32_t paths_count;
    struct kvt_api_gpu_path *paths;
    uint64_t launches, launched_jobs;
    uint64_t checked_bytes, unchecked_transfers, bad_checks;
    uint64_t quantised_bytes, dequantised_bytes;
    uint32_t errors_count;
    struct kvt_api_counter *errors; /* as of a device of L3 */
};

struct kvt_api_ns_stats {
    uint8_t fingerprint[KVT_FINGERPRINT_BYTES];
    struct kvt_text model, revision, dtype;
    uint64_t epoch;
    uint32_t block_tokens, ranks, components_count;
    struct kvt_api_component components[KVT_COMPONENTS_MAX];
    uint64_t roots, nodes, blocks;
    uint64_t copies_at[KVT_COMPONENTS_MAX][KVT_API_TIERS];
    uint64_t stored_bytes[KVT_COMPONENTS_MAX]; /* of what bytes_per_block is of: in a tier */
    uint64_t lookup_tokens, hit_tokens;
};

struct kvt_api_engine_stats {
    uint8_t engine_id[KVT_ENGINE_ID_BYTES];
    struct kvt_text name;
    uint32_t ns_idx;
    uint32_t sessions, leases, tickets;
    uint64_t leased_bytes, reserved_bytes;
    uint64_t held_bytes; /* of L1, read in place */
    uint64_t lookup_tokens, hit_tokens, promoted_bytes, demoted_bytes;
    uint64_t lookups, promotes, demotes; /* that were served */
    uint64_t missed_moves;               /* of its Promotes: what was asked for and did not come */
    uint64_t ops_running;                /* those answered whose copies go on included */
};

struct kvt_ans_stats {
    uint64_t boot_id;
    uint64_t uptime_ns;
    struct kvt_text version;
    uint64_t index_memory_bytes, index_used_bytes;
    uint64_t blocks, nodes;
    uint64_t leases, tickets, reserved_copies, pins, sessions, ops_running;
    uint32_t tiers_count;
    struct kvt_api_tier_stats tiers[KVT_API_TIERS];
    uint32_t devices_count; /* at most KVT_ZONES_MAX, in the order of tiers.l3.path */
    struct kvt_api_device_stats *devices;
    struct kvt_api_l1_stats l1;
    uint32_t gpus_count; /* at most KVT_API_GPUS_MAX: those in use, then those that are not */
    struct kvt_api_gpu_stats *gpus;
    uint32_t namespaces_count;
    struct kvt_api_ns_stats *namespaces;
    uint32_t engines_count;
    struct kvt_api_engine_stats *engines;
    uint32_t counters_count;
    struct kvt_api_counter *counters;
};

struct kvt_ans_health {
    bool is_serving;
    struct kvt_text degraded; /* "" or "L3 out of service since ...": for readiness */
};

/* ---- the op -----------------------------------------------------------------------------------
 */

struct kvt_api_progress { /* Promote: layer group `group` of all its moves is in place */
    uint32_t group, groups_count;
};

struct kvt_op;
typedef void (*kvt_op_done_fn)(struct kvt_op *op);
typedef void (*kvt_op_progress_fn)(struct kvt_op *op, const struct kvt_api_progress *progress);

struct kvt_op {
    enum kvt_op_kind kind;
    bool is_admin; /* came in by the admin socket */
    uint64_t peer_uid;
    uint64_t deadline_ns; /* CLOCK_MONOTONIC; never 0; the server caps it */
    struct kvt_arena *arena;
    atomic_bool is_cancelled; /* set by the server before service->cancel */
    union {
        struct kvt_req_open_namespace open_namespace;
        struct kvt_req_attach attach;
        struct kvt_req_detach detach;
        struct kvt_req_lookup lookup;
        struct kvt_req_promote promote;
        struct kvt_req_reserve reserve;
        struct kvt_req_demote demote;
        struct kvt_req_quiesce quiesce;
        struct kvt_req_release release;
        struct kvt_req_evict evict;
        struct kvt_req_reset reset;
        struct kvt_req_dump dump;
        struct kvt_req_maintain maintain;
    } req;
    enum kvt_code code;
    char message[256]; /* when code is not OK: what is wrong and what to do */
    union {
        struct kvt_ans_open_namespace open_namespace;
        struct kvt_ans_attach attach;
        struct kvt_ans_lookup lookup;
        struct kvt_ans_promote promote;
        struct kvt_ans_reserve reserve;
        struct kvt_ans_demote demote;
        struct kvt_ans_evict evict;
        struct kvt_ans_reset reset;
        struct kvt_ans_dump dump;
        struct kvt_ans_maintain maintain;
        struct kvt_ans_stats stats;
        struct kvt_ans_health health;
    } ans;
    kvt_op_done_fn done;         /* called by the service's thread, exactly once */
    kvt_op_progress_fn progress; /* the same thread, before done; may be NULL */
    void *server;                /* the server's own */
    void *service;               /* the service's own while it owns the op */
};

/* Notices pushed on an Attach stream. */
enum kvt_notice_kind {
    KVT_NOTICE_QUIESCED = 1,
    KVT_NOTICE_EPOCH = 2,
    KVT_NOTICE_LEASE_ENDED = 3,
    KVT_NOTICE_REGIONS_LOST = 4, /* the GPU of the session's memory, or of what its engine reads in
                                    place, was lost: attach again */
};
struct kvt_notice {
    enum kvt_notice_kind kind;
    uint64_t op_id;           /* QUIESCED */
    uint64_t epoch;           /* EPOCH: the new one */
    struct kvt_handle handle; /* LEASE_ENDED */
};

#define KVT_SERVICE_E_FULL 1 /* its inbox is full: answer RESOURCE_EXHAUSTED */

/* The table that daemon/main hands to the server. Any thread may call these. */
struct kvt_service {
    void *ctx;
    /* Gives @op away: 0, or KVT_SERVICE_E_FULL and it is still the caller's. DETACH is never
     * refused. */
    int (*submit)(void *ctx, struct kvt_op *op);
    /* Asks for an early end of @op, whose is_cancelled was set; harmless if it ended already, but
     * @op must not have been given back (the server holds it until done). */
    void (*cancel)(void *ctx, struct kvt_op *op);
    /* Makes a mapping of a memfd that came over the side socket: -errno or a positive result with
     * text in @ret_why (for the client), or 0. The descriptor stays the caller's. */
    int (*region_open)(void *ctx, int memfd, uint64_t bytes, void **ret_mapping,
                       const char **ret_why);
    /* For a mapping that no ATTACH op took over (an ATTACH op takes those in its request, whatever
     * its outcome). */
    void (*region_close)(void *ctx, void *mapping);
};

/* What the service calls to push a notice; given to the service by daemon/main with the server.
 * Any thread; never blocks; notices beyond a small bound a session are dropped but for QUIESCED,
 * of which there is at most one an op, and REGIONS_LOST, of which there is one a loss. After
 * DETACH was submitted the sink is not called again. */
typedef void (*kvt_notify_fn)(struct kvt_session_sink *sink, const struct kvt_notice *notice);

/* Sets code and message (printf-like), for `return kvt_op_fail(...)` styles. */
void kvt_op_fail(struct kvt_op *op, enum kvt_code code, const char *format, ...) KVT_PRINTF(3, 4);
const char *kvt_op_kind_text(enum kvt_op_kind kind);
