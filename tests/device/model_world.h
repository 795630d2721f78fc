/* One GPU of L1, and a naive model of what has to be where. Over the fake, or over a GPU
 * (model_machine.h).
 *
 *   places    slots of the arena, slots of L2, blocks of engines' pools (on the GPU, on another
 *             GPU, in host memory)
 *
 * A place is free to be read by several transfers or written by one, from submit until reap and no
 * longer: then the test does with it what an engine may do: write something else there at once. So
 * a transfer that still reads or writes a place after it was given back is seen, by the bytes. Each
 * place has a shadow, what the model says that it holds; a place that nobody writes must be equal
 * to it, byte for byte, whether its content is somebody's or garbage.
 *
 * A difference ends the process with status 1 and the seed. */
#pragma once

#include "tests/common/fake_cuda.h"
#include "tiers/device/gpu.h"

#define WORLD_CLIENTS 5u
#define WORLD_GROUPS 6u /* blocks of the daemon in a client's pool */
#define WORLD_SLOTS 8u  /* in the arena, in L2 */
#define WORLD_PLACES (2 * WORLD_SLOTS + WORLD_CLIENTS * WORLD_GROUPS)
#define WORLD_PIECES_MAX 8u
#define WORLD_BLOCKS_MAX 3u
#define WORLD_INFLIGHT 24u
#define WORLD_DEVICES_MAX 2u /* the GPU of L1, and one that has only pools of engines */

struct world_client {
    struct kvt_layout layout;
    struct kvt_layout_piece pieces[WORLD_PIECES_MAX];
    uint64_t groups[WORLD_GROUPS][WORLD_BLOCKS_MAX]; /* engine blocks of each */
    struct kvt_fake_cuda_foreign foreign;            /* not by the table */
    uint32_t device;                                 /* of the world's; KVT_GPU_NONE: host memory */
    uint8_t *memory, *shadow;                        /* memory: by the table a mirror of it */
    uint64_t bytes, address;
    uint32_t spec;
};

struct world_place {
    enum kvt_place_kind kind;
    uint32_t client, idx;
    uint32_t readers;
    bool is_writing;
    bool is_full;    /* somebody's content; else garbage */
    uint64_t id;     /* slots: of the content: its key */
    uint32_t spec;   /* of the content: its bytes */
    uint8_t *shadow; /* slots: payload; a client's is its pool's */
};

struct world_op {
    struct kvt_xfer xfer;
    struct world_place *src, *dst;
    uint64_t engine_blocks[WORLD_BLOCKS_MAX];
    uint8_t *payload;
    uint64_t id;
    uint32_t spec;
    uint32_t incarnation; /* of the slot's zone when it was submitted */
    uint64_t losses;      /* of the world, then */
    bool is_used, is_late, is_stale;
};

struct world_options {
    uint64_t seed;
    bool is_host_pinned, is_landing_late, is_threaded, has_quant;
    bool is_by_table; /* the test reaches device memory by copies only, and nothing is lost */
    int device;       /* CUDA's index of the GPU of L1; the fake's: 0 */
    const struct kvt_kernels *kernels; /* of the fake; NULL: the host's */
    uint32_t lose_every;               /* transfers, about; 0: never */
    uint32_t cpu_threads;              /* of the GPU; each may have any work, be it ever so small */
    /* A call that fails, from kvt_gpu_open on. */
    enum kvt_fake_cuda_call fail_call;
    uint64_t fail_nth; /* 0: none */
    int fail_error;
    bool is_damage_expected; /* slots may be bad, and hold what the model does not know */
    bool is_blind;           /* a GPU may be lost at any moment: arenas are not looked at */
    bool is_error_expected;  /* so transfers may end with -errno */
    bool is_sticky_expected; /* so there may be a context that only a reset frees */
};

struct world_zone { /* a GPU of L1 */
    struct kvt_gpu *gpu;
    const struct kvt_tier_counters *counters;
    uint64_t base_bytes;
    uint32_t incarnation;
    bool is_lost; /* a set's, and the test knows it: its arena is not looked at */
};
#define WORLD_ZONES_MAX 3u

struct world_table { /* of is_by_table: model_world_table.c */
    void *streams[WORLD_DEVICES_MAX], *events[WORLD_DEVICES_MAX];
    uint8_t *mirror; /* of one slot of the arena, pinned */
};

struct world {
    struct world_options options;
    const struct kvt_cuda_calls *calls;
    int devices[WORLD_DEVICES_MAX]; /* CUDA's indices */
    uint32_t devices_count;
    struct world_table table;
    struct kvt_doorbell bell;
    struct kvt_gpu *gpu;
    struct kvt_gpu_config config;
    struct kvt_tier *tier;
    uint64_t random, next_id;
    uint8_t *host_memory;
    struct world_client clients[WORLD_CLIENTS];
    struct world_place places[WORLD_PLACES];
    struct world_op ops[WORLD_INFLIGHT];
    uint32_t inflight, zones_count;
    struct world_zone zones[WORLD_ZONES_MAX];
    bool is_set;  /* several GPUs behind one tier, which recovers them by itself: set_model.c */
    bool is_host; /* no GPU: the host backend, whose arena nobody sees (host_model.c) */
    uint64_t losses;
    bool is_client_freed; /* the first client freed its memory: it is not opened again */
    bool has_failed;      /* after close: the planned failure has happened */
    uint64_t submitted, reaped, done, lost, late, failed, bad, clients_gone;
};

/* Sets up the machine and the GPU. False: kvt_gpu_open failed, as it may if a call is made to fail
 * (then nothing is left but the world's own; close it all the same). */
bool world_open(struct world *world, const struct world_options *options);
/* Everything is reaped; nothing may be left open. */
void world_close(struct world *world);
uint64_t world_random(struct world *world, uint64_t below);

/* Submits one random transfer. False: nothing fits now, or it is full. */
bool world_submit(struct world *world);
/* A round of the thread, and reaps. */
void world_turn(struct world *world);
/* Until nothing is in flight. */
void world_drain(struct world *world);
/* All that nobody writes is as the model says. */
void world_verify(struct world *world);
/* The device is lost; what a control thread does then. */
void world_lose(struct world *world, int error);
/* It was seen to be lost: parks, resets, revives. */
void world_recover(struct world *world);
bool world_is_lost(const struct world *world);
/* @count transfers, losses and all; ends drained and verified. */
void world_run(struct world *world, uint32_t count);

/* The zone that a place is in; KVT_GPU_NONE: of no GPU of L1. */
uint32_t world_zone_of(const struct world *world, const struct world_place *place);

/* Directed: a place that is full (idx of the slot or of the client's group), and one transfer from
 * place to place, waited for; its status. */
struct world_place *world_slot(struct world *world, enum kvt_place_kind kind, uint32_t idx);
struct world_place *world_group(struct world *world, uint32_t client, uint32_t idx);
bool world_submit_pair(struct world *world, struct world_place *src, struct world_place *dst);
int world_move(struct world *world, struct world_place *src, struct world_place *dst);
