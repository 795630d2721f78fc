/* Hands: threads that work on bytes for the thread of a GPU, so that it stays with its events.
 *
 *   the GPU's thread --give--> [given] of one hand --> work --> [back] of all --take--> the same
 *
 * Giving a piece gives all its members away: until take hands the piece back, the GPU's thread
 * neither reads nor writes what `work` does, ends none of its transfers, and frees no memory that
 * they name. No hand makes a call of CUDA or waits for anybody, so what was given comes back, lost
 * context or not.
 *
 * Each hand has a few pieces at most: what waits longer waits with the GPU's thread, which takes
 * from its flights in turn. So a hand is soon free after a loss, and no small transfer is behind
 * more than those few.
 *
 * init, start, deinit: init-only. give, take: the GPU's thread. step: the hand's, or where no
 * threads were started, the test's. */
#pragma once

#include <pthread.h>

#include "daemon/base/doorbell.h"
#include "daemon/base/ring.h"
#include "tiers/device/gpu.h"

#define KVT_GPU_HAND_PIECES 4u /* of a hand at one time: one it works on, and some behind it */

struct kvt_gpu_flight;
struct kvt_gpu_hands;

struct kvt_gpu_piece { /* members [first, end) of a flight */
    struct kvt_gpu_flight *flight;
    uint32_t first, end;
    uint64_t bytes; /* that are read, about */
    bool is_out;    /* behind its event; else before it is queued */
    uint32_t hand;  /* that has it */
};

struct kvt_gpu_hand {
    struct kvt_gpu_hands *hands;
    struct kvt_ring given;
    struct kvt_doorbell bell;
    atomic_bool is_stopping;
    bool is_started;
    pthread_t thread;
    /* The GPU's thread's: what it gave and has not taken. */
    uint32_t pieces_count;
    uint64_t bytes;
};

typedef void (*kvt_gpu_work_fn)(void *ctx, const struct kvt_gpu_piece *piece);

struct kvt_gpu_hands {
    uint32_t count;     /* 0: the GPU's thread has to work itself */
    uint32_t out_count; /* pieces with all hands; the GPU's thread's */
    kvt_gpu_work_fn work;
    void *ctx;
    struct kvt_doorbell *bell; /* of the GPU's thread: rung behind each piece */
    struct kvt_ring back;
    struct kvt_gpu_hand hands[KVT_GPU_HANDS_MAX];
};

/* @hands is all zero. -errno, or 0. */
KVT_MUST_USE int kvt_gpu_hands_init(struct kvt_gpu_hands *hands, uint32_t count,
                                    kvt_gpu_work_fn work, void *ctx, struct kvt_doorbell *bell);
/* Their threads, named after @device. -errno, or 0; some may have started all the same. */
KVT_MUST_USE int kvt_gpu_hands_start(struct kvt_gpu_hands *hands, int device);
/* Nothing is out. Idempotent. */
void kvt_gpu_hands_deinit(struct kvt_gpu_hands *hands);
/* To the hand with the least to do. False: all have enough, and the piece is still the caller's. */
KVT_MUST_USE bool kvt_gpu_hands_give(struct kvt_gpu_hands *hands, struct kvt_gpu_piece *piece);
/* One that is done; NULL: none is. */
struct kvt_gpu_piece *kvt_gpu_hands_take(struct kvt_gpu_hands *hands);
/* A piece waits to be taken. The GPU's thread. */
bool kvt_gpu_hands_are_waiting(const struct kvt_gpu_hands *hands);
/* Works on one piece. False: @idx has none. */
bool kvt_gpu_hand_step(struct kvt_gpu_hands *hands, uint32_t idx);
