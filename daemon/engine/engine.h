/* The engine: the owner of all state. Its loop takes requests (daemon/base/api.h) from a bounded
 * inbox, serves them over the tree and the store (daemon/engine/store.h), and answers each exactly
 * once. One thread runs it in the daemon; the simulator runs it by hand with fake tiers and a clock
 * of its own.
 *
 * A turn is fixed and bounded in bytes compared and blocks touched: completions of tiers, inbox, a
 * slice of policy work, submissions; then sleep until the doorbell or the next deadline.
 *
 * new, free: init-only. submit, cancel: any thread. The rest: the engine's thread. */
#pragma once

#include "daemon/base/api.h"
#include "daemon/base/doorbell.h"
#include "daemon/engine/store.h"
#include "tiers/device/device.h"
#include "tiers/disk/catalog.h"

struct kvt_engine;
struct kvt_device_report;

struct kvt_engine_config {
    struct kvt_store_config store; /* radix is made by the engine: leave it NULL */
    size_t index_memory_bytes;     /* tree and store records together: `index.memory` */
    uint64_t seed;                 /* of the tree's hash and of handles' secrets */
    uint64_t boot_id;
    const char *version;                       /* for Stats */
    uint32_t inbox_max;                        /* 0: 4,096 */
    uint32_t ops_max;                          /* running at once; 0: 1,024 */
    uint64_t lease_ns_default, lease_ns_max;   /* 0: 30 s, 10 min */
    uint64_t ticket_ns_default, ticket_ns_max; /* 0: 30 s, 10 min */
    uint32_t leases_per_session_max;           /* 0: 1,024 */
    uint32_t tickets_per_session_max;          /* 0: 1,024 */
    uint64_t leased_bytes_per_engine_max;      /* 0: half of L2 + half of L1 */
    uint64_t reserved_bytes_per_engine_max;    /* 0: a quarter of L2 + L1 */
    uint64_t held_bytes_per_engine_max;        /* read in place; 0: half of L1 */
    uint32_t namespaces_max, roots_max;        /* 0: 64, 65,536 */
    /* What L3's devices kept of earlier daemons. NULL: nothing; else KVT_NAMESPACES_MAX records,
     * only used in kvt_engine_new. */
    const struct kvt_disk_ns_record *namespaces;
    const uint32_t *namespaces_missing; /* of each: bit i: it is not so on device i. NULL: it is */
    struct kvt_engine_device {
        const char *path, *index_path; /* for people; outlive the engine; NULL: no such device */
        struct kvt_disk_state state;   /* as it was written last */
        uint64_t endurance_bytes;      /* that it may be written in its life; 0: not known */
    } devices[KVT_ZONES_MAX];
    struct kvt_engine_l1 {                      /* for Stats; outlives the engine */
        const char *backend;                    /* "none", "host", "cuda"; NULL: not known */
        const struct kvt_device_report *report; /* NULL: nothing was looked for */
        bool is_export_allowed;
        uint32_t streams; /* of each GPU, as all here; 0: none are meant */
        uint64_t inflight_bytes_max, crossover_bytes;
    } l1;
    /* Memory of engines on GPUs: the device tier's, called by a helper thread of the engine (by
     * hand: at once). open NULL: none can be used. Results of kvt_device_region_open. */
    struct kvt_engine_gpu_memory {
        void *ctx;
        int (*open)(void *ctx, const struct kvt_device_memory *memory,
                    struct kvt_region *ret_region, char ret_why[KVT_DEVICE_WHY_BYTES]);
        void (*close)(void *ctx, struct kvt_region *region);
        /* kvt_device_export, called by the engine's thread; NULL: Promote in place is refused. */
        bool (*export_arena)(void *ctx, uint32_t zone, struct kvt_device_export *ret_export);
    } gpu_memory;
    uint64_t load_wait_ns;         /* a lookup waits so long for L3's index at start; 0: 10 s */
    kvt_notify_fn notify;          /* of the server; NULL in tests that need none */
    struct kvt_doorbell *doorbell; /* the one that the tiers ring too */
};

KVT_MUST_USE int kvt_engine_new(struct kvt_engine **ret_engine,
                                const struct kvt_engine_config *config);
/* What a scan of slots has to know of a namespace; false: its spec does not hold. */
bool kvt_engine_describe_ns(const struct kvt_disk_ns_record *record, struct kvt_index_ns *ret_ns);
/* Nothing may be in flight (see stop). NULL-proof; returns NULL. */
struct kvt_engine *kvt_engine_free(struct kvt_engine *engine);

/* Fills submit, cancel, region_open, region_close of @ret_service. */
void kvt_engine_service(struct kvt_engine *engine, struct kvt_service *ret_service);

/* One turn at @now_ns. Returns true when there is more to do at once. */
bool kvt_engine_turn(struct kvt_engine *engine, uint64_t now_ns);
/* When the next turn is due by itself. */
uint64_t kvt_engine_next_ns(const struct kvt_engine *engine);
/* The thread's body: turns and sleep until kvt_engine_stop. */
void kvt_engine_run(struct kvt_engine *engine);
/* Any thread. With @drain_deadline_ns > now: dirty copies go to L3 until then. Requests in progress
 * end with UNAVAILABLE, transfers are waited for, then run returns. */
void kvt_engine_stop(struct kvt_engine *engine, uint64_t drain_deadline_ns);

/* The engine's thread, after a stop: drains, and says when nothing is left to wait for. */
bool kvt_engine_is_stopped(struct kvt_engine *engine);

/* Invariants over tree, store, sessions, leases, tickets; true, or false and *ret_why. */
bool kvt_engine_check(struct kvt_engine *engine, const char **ret_why);
/* Tests: outstanding things that must be zero when nobody is attached. */
struct kvt_engine_counts {
    uint64_t sessions, engines, leases, tickets, reserved_cells, ops, jobs, inflight;
};
void kvt_engine_counts(const struct kvt_engine *engine, struct kvt_engine_counts *ret_counts);
void kvt_engine_store_stats(const struct kvt_engine *engine, struct kvt_store_stats *ret_stats);
