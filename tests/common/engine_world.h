/* A whole engine over fake tiers in virtual time, and engines in miniature that talk to it by ops.
 * For directed tests and the simulator. Nothing runs by itself: world_turn is one turn, after which
 * the clock stands at the next thing that is due, or a millisecond later.
 *
 * A client has one memfd, laid out as the namespace's components one after the other; each engine
 * block of a component is two pieces (two layers), two engine blocks make one block of the daemon.
 * Payload is a function of (tag, component, rank, block index): a block that was promoted can be
 * verified on its own. What comes back of a quantised component is what the kernels make of that
 * payload there and back. */
#pragma once

#include "daemon/engine/engine.h"
#include "tests/common/fake_index.h"
#include "tests/common/fake_tier.h"

#define WORLD_BLOCK_TOKENS 16u
#define WORLD_ENGINE_BLOCKS 2u /* of a block of the daemon */
#define WORLD_PIECES 2u
struct world;

#define WORLD_POOL_BLOCKS 64u /* blocks of the daemon that a client's memory holds, a component */

struct world_config {
    uint64_t seed, l1_bytes, l2_bytes, l3_bytes, index_bytes;
    uint64_t delay_ns_max;
    uint32_t fault_rate; /* in 1/1000, of each kind */
    uint32_t ranks;
    bool has_window;            /* a second component: a sliding window of 40 tokens */
    struct kvt_api_quant quant; /* of the first component */
    uint32_t ops_max;
    uint64_t leased_bytes_max, reserved_bytes_max;
    /* L3 outlives the engine: so many devices, each with an index. 0: it does not. */
    uint32_t devices;
    uint64_t commit_delay_ns_max, load_event_ns;
    uint32_t refuse_rate;
    bool is_index_lenient; /* see fake_index.h: rows may be left behind that were never loaded */
    enum kvt_write_policy write_policy;
    uint64_t lost_after_ns;
    bool is_disk_volatile;         /* see fake_tier.h */
    uint64_t ring_bytes;           /* of each index; 0: as fake_index.h says */
    const char *model;             /* of the namespace; NULL: a short one */
    uint64_t stamps;               /* numbers that a start reserves; 0: many */
    uint32_t namespaces_max;       /* 0: the engine's default */
    uint32_t gpus;                 /* zones of L1, of equal size; 0: it is one device */
    uint64_t payload_bytes_max;    /* that L1 can move; 0: any */
    bool is_export_allowed;        /* of L1's arenas */
    uint64_t held_bytes_max;       /* read in place, of an engine; 0: the engine's default */
    struct kvt_doorbell *doorbell; /* for kvt_engine_run; NULL: world_turn */
    /* Called before memory on a GPU is opened, by the thread that opens it. */
    void (*before_gpu_open)(struct world *world);
    /* Where that memory lies, which stays the test's; NULL: the handle is a memfd, to be mapped. */
    uint8_t *(*gpu_memory)(struct world *world, const struct kvt_device_memory *memory);
    struct kvt_engine_l1 l1; /* for Stats */
};

#define WORLD_DEVICES_MAX 4u

struct world {
    struct world_config config;
    struct kvt_engine *engine;
    struct fake_index *indexes[WORLD_DEVICES_MAX];
    struct kvt_index *open_indexes[WORLD_DEVICES_MAX];
    uint64_t stamps_first;
    struct world_device {
        struct world *world;
        uint32_t idx;
        int catalog_result; /* of writes to its catalog */
    } device[WORLD_DEVICES_MAX];
    /* Around the time between two engines; NULL: nothing. */
    void (*before_death)(struct world *world);
    void (*while_dead)(struct world *world);
    uint64_t epoch; /* of the namespace when it was opened */
    struct kvt_service service;
    struct fake_tier *tiers[KVT_TIERS_COUNT];
    uint8_t *host_memory;
    uint64_t now_ns;
    uint32_t ranks, components_count;
    uint32_t shard_bytes[2];
    struct kvt_handle ns;
    uint64_t notices[5]; /* by kind */
    /* Openings of memory on GPUs: those that are not closed, and what the next ones answer. */
    int64_t gpu_regions;
    int gpu_open_result;
    bool is_lost_while_opening; /* the GPU, behind the opening's back */
    uint64_t trace;             /* hash over everything that was answered */
};

void world_init(struct world *world, const struct world_config *config);
/* Opens the namespace of that model, with the world's components: clients attach to it now. */
void world_open(struct world *world, const char *model);
void world_deinit(struct world *world); /* everything must have ended */
bool world_turn(struct world *world);   /* true: more to do at once */
/* The engine ends and another one begins on what L3 has; L1 and L2 are empty then. Clean: it drains
 * before, and its indexes commit; else what was not committed is forgotten. Sessions must be gone,
 * handles are stale. */
void world_restart(struct world *world, bool is_clean);
void world_check(struct world *world); /* kvt_engine_check, or ends the program */
/* Turns until nothing is in flight, no request runs and nothing is held; ends the program else. */
void world_settle(struct world *world);

/* One request. */
struct call {
    struct kvt_op op;
    struct kvt_arena arena;
    struct world *world;
    bool is_busy, is_done;
    uint32_t progress;
};
void call_init(struct call *call, struct world *world);
void call_deinit(struct call *call);
void call_begin(struct call *call, enum kvt_op_kind kind); /* a fresh request, 10 s */
void call_submit(struct call *call);
void call_wait(struct call *call); /* turns until it is done */
static inline void call_run(struct call *call)
{
    call_submit(call);
    call_wait(call);
}

struct client {
    struct world *world;
    struct kvt_handle session;
    uint32_t rank;
    uint8_t *memory;
    uint64_t component_offset[2];
    int memfd;
};
/* rank KVT_RANK_NONE: a scheduler without memory. */
void client_attach(struct client *client, struct world *world, struct call *call, uint8_t engine,
                   bool is_scheduler, uint32_t rank);
/* With its memory on GPU @gpu: ordinary memory that only the device tier touches. Only prepares:
 * call_run, and client->session when it is OK. */
void client_begin_attach_gpu(struct client *client, struct world *world, struct call *call,
                             uint8_t engine, bool is_scheduler, uint32_t rank, uint32_t gpu);
void client_detach(struct client *client, struct call *call);
void client_unmap(struct client *client);
/* Blocks [first, end) of the prefix of @tag in pool blocks from @at on. */
void client_fill(struct client *client, uint32_t component, uint64_t tag, uint64_t block_idx,
                 uint32_t pool_block);
bool client_holds(const struct client *client, uint32_t component, uint64_t tag, uint64_t block_idx,
                  uint32_t pool_block, uint32_t rank);
/* The same of a payload that lies somewhere else. */
bool world_is_payload(const struct world *world, const uint8_t *payload, uint32_t component,
                      uint64_t tag, uint64_t block_idx, uint32_t rank);
/* The same where the engine blocks in @left_alone (a bit each, from 0) must hold @byte instead:
 * is_done says whether the others hold the payload; those left alone are looked at in any case. */
bool client_holds_but(const struct client *client, uint32_t component, uint64_t tag,
                      uint64_t block_idx, uint32_t pool_block, uint32_t left_alone, uint8_t byte,
                      bool is_done);
/* Makes engine blocks of move @move of @moves ones that a Promote leaves alone. */
void world_leave_alone(struct kvt_api_moves *moves, uint32_t move, uint32_t left_alone);
void client_scribble(struct client *client, uint32_t component, uint32_t pool_block, uint8_t byte);

/* Tokens of the prompt named @tag: block i depends on (tag >> 8) for i < 4 (shared), then on tag.
 */
struct kvt_api_prefix world_prefix(struct call *call, uint64_t tag, uint64_t blocks);
uint64_t world_block_tag(uint64_t tag, uint64_t block_idx);
/* Moves of one component: blocks [first, first + count), pool blocks from @pool_block on. */
struct kvt_api_moves world_moves(struct call *call, uint32_t component, uint64_t first,
                                 uint32_t count, uint32_t pool_block);

/* Verbs, for directed tests: the first two end the program when the code is not OK. */
struct kvt_handle world_lookup(struct call *call, const struct client *client, uint64_t tag,
                               uint64_t blocks, bool wants_lease);
struct kvt_handle world_reserve(struct call *call, const struct client *client, uint64_t tag,
                                uint64_t blocks);
/* These two only prepare: change what is to be changed, then call_run. */
void world_demote(struct call *call, const struct client *client, struct kvt_handle ticket,
                  uint64_t first, uint32_t count, uint32_t pool_block);
void world_promote(struct call *call, const struct client *client, struct kvt_handle lease,
                   uint64_t first, uint32_t count, uint32_t pool_block);
