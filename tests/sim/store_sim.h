/* What the files of store_sim share: one store in virtual time, its clients and its model. */
#pragma once

#include "daemon/base/clock.h"
#include "daemon/engine/store.h"
#include "tests/common/fake_tier.h"

#define JOBS 96u
#define KNOWN 512u
#define CLAIMS 16u
#define LEASES 8u
#define NS_COUNT 3u
#define PATH_BLOCKS_MAX 10u
#define UNIT_BYTES 16384u
#define DELAY_NS_MAX (5 * KVT_NS_PER_MS)
#define SCRIBBLE 0x55
#define SIM_HOMES 4u

struct ns_model {
    uint32_t block_tokens, ranks, components_count;
    struct {
        enum kvt_component_kind kind;
        uint32_t window_tokens;
        uint64_t bytes;
        bool is_replicated;
    } components[3];
};

extern const struct ns_model sim_models[NS_COUNT];

struct client { /* memory of an engine for one component: an engine block a job */
    struct kvt_region region;
    struct kvt_layout layout;
    struct kvt_layout_piece pieces[2];
};

struct content { /* whose bytes */
    uint32_t ns, component, rank;
    uint64_t path_hash;
};

struct sim;
struct sim_job {
    struct kvt_job job;
    struct sim *sim;
    bool is_busy;
    struct content content;
    uint64_t engine_block;
};

struct known {
    struct kvt_radix_block block;
    uint32_t ns;
    uint64_t path_hash;
};

struct claim {
    bool is_used;
    struct kvt_cell cell;
    struct content content;
};

struct sim {
    uint64_t seed, random, now_ns, events_hash, event_count, verified, done_by_result[8];
    uint64_t wrong_expected; /* canary: payloads that differ, as they should */
    bool is_canary, is_faulty;
    struct kvt_radix *radix;
    struct kvt_radix_ns ns[NS_COUNT];
    struct fake_tier *tiers[KVT_TIERS_COUNT];
    uint8_t *host_memory;
    struct kvt_store *store;
    struct client clients[NS_COUNT][3];
    struct sim_job jobs[JOBS];
    struct known known[KNOWN];
    struct claim claims[CLAIMS];
    struct kvt_radix_block leases[LEASES];
    uint32_t gpus;                           /* zones of L1 */
    uint8_t homes[SIM_HOMES][KVT_RANKS_MAX]; /* of engines */
    uint64_t losses;
};

struct client *sim_client_of(struct sim *sim, const struct content *content);
bool sim_oracle(struct sim *sim, const struct sim_job *at, bool is_fill);
void sim_scribble(struct sim *sim, const struct sim_job *at, bool is_check);
void sim_on_done(struct kvt_job *job);
struct sim_job *sim_free_job(struct sim *sim);
struct sim_job *sim_submit(struct sim *sim, enum kvt_job_kind kind, struct kvt_cell cell,
                           const struct content *content);
void sim_open(struct sim *sim, uint64_t seed, bool is_faulty);
void sim_close(struct sim *sim);
void sim_turn(struct sim *sim, bool is_checked);
void sim_wind_up(struct sim *sim);

/* Directed cases, before the random ones. */
void sim_canary(bool is_early);
void sim_coalesce(void);
