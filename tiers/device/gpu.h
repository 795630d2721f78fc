/* One GPU of L1: its arena, its streams, and the thread that moves blocks on it.
 *
 *            ┌──── arena (cudaMalloc of the configured bytes) ────┐  ┌──────────────────┐
 *            | slots: payloads ...                                |  | device staging   |
 *            └────────────────────────────────────────────────────┘  └──────────────────┘
 *   engines' pools (cuda_ipc) ⇄ gather / scatter kernel or copy engine ⇄ slots
 *   L2 (pinned) ⇄ copy engine ⇄ slots            mapped memfds ⇄ pinned staging ⇄ slots
 *
 * A transfer is a chain of stages. Each stage queues work on a stream and records an event; the
 * thread polls events and never waits for one. What a stage used (a slot, staging, a list of
 * descriptors, the place of a check) is given up, and the transfer finished, only when its event is
 * over: the only place that asks is kvt_gpu_is_over (wait.c), so that a test can drop any one of
 * those waits and see it caught.
 *
 * A sticky error means that the context is lost: every transfer that the thread has ends with
 * KVT_XFER_OUT_OF_SERVICE, the health is OUT, and nothing is started until kvt_gpu_revive. Nothing
 * in CUDA says that what was queued does not land any more, so a transfer that was queued is held
 * until the device was reset: before, neither an engine's blocks nor a slot in L2 are anybody
 * else's. The incarnation (counters.incarnation) rises at the loss: a place of an earlier one is
 * refused, so a slot that the engine believes in is never read from an arena that was made anew.
 *
 * open, close, lose, revive: one control thread (set.c), never two at a time. submit, reap: the
 * engine's, by way of the set. The rest is the GPU's own thread. */
#pragma once

#include "tiers/device/cuda_calls.h"
#include "tiers/device/ledger.h"
#include "tiers/tier.h"

struct kvt_gpu_config {
    const struct kvt_cuda_calls *calls;
    int device;                  /* CUDA's index */
    struct kvt_cuda_info info;   /* of it */
    uint32_t zone;               /* of the tier that the set makes of all GPUs */
    uint64_t base_bytes;         /* the tier's offset of the first byte of this arena */
    uint64_t arena_bytes;        /* slots; multiple of KVT_HUGE_PAGE_BYTES */
    uint64_t staging_bytes;      /* of device staging, and again of pinned host staging */
    uint32_t streams;            /* of each direction: 1 .. KVT_GPU_STREAMS_MAX */
    uint64_t inflight_bytes_max; /* queued on the GPU at one time, all directions; what is more
                                    waits on the tier's lists. A single transfer always may go */
    uint32_t inflight_max;       /* transfers taken before E_FULL */
    /* Contiguous runs of an engine's pool of at least so many bytes go by the copy engine, one
     * copy a run, when there are few of them; everything else by one kernel for many blocks. */
    uint32_t crossover_bytes;
    uint8_t *host_memory; /* L2 */
    uint64_t host_memory_bytes;
    bool is_host_pinned; /* false: copies to and from L2 go through pinned staging */
    struct kvt_doorbell *doorbell;
    /* What was queued and is not over after so long hangs: the context counts as lost
     * (KVT_CUDA_LAUNCH_TIMEOUT). 0: KVT_GPU_HANG_NS. */
    uint64_t hang_ns;
    /* Threads that work on bytes for the GPU's (gpu_hands.h); 0: it does all of it itself. */
    uint32_t cpu_threads; /* 0 .. KVT_GPU_HANDS_MAX */
    uint32_t hand_bytes;  /* less than this it does itself, all the same. 0: KVT_GPU_HAND_BYTES */
    bool
        is_by_hand; /* no thread: the test calls kvt_gpu_turn, and kvt_gpu_hand_turn of each hand */
};
#define KVT_GPU_HANG_NS (30u * KVT_NS_PER_S)
#define KVT_GPU_STREAMS_MAX 4u
#define KVT_GPU_HANDS_MAX 16u
/* Some 25 us of one core's hash and check: twice what it costs to give a piece away and to hear of
 * it, with two threads that have to be woken (docs/performance.md). */
#define KVT_GPU_HAND_BYTES (256u * 1024u)
#define KVT_GPU_SLOT_ALIGN_BYTES 4096u /* of the arena's slots */

enum kvt_gpu_path { /* how bytes moved; a transfer of two hops (L2 -> GPU -> pool) counts twice */
                    KVT_GPU_FROM_ENGINE_KERNEL, /* engine's pool -> slot or L2 */
                    KVT_GPU_FROM_ENGINE_COPY,   /* the same, by the copy engine */
                    KVT_GPU_TO_ENGINE_KERNEL,
                    KVT_GPU_TO_ENGINE_COPY,
                    KVT_GPU_TO_HOST, /* slot -> pinned L2 */
                    KVT_GPU_FROM_HOST,
                    KVT_GPU_STAGED_UP, /* memfd or unpinned L2 -> pinned staging -> GPU */
                    KVT_GPU_STAGED_DOWN,
                    KVT_GPU_PATHS
};

struct kvt_gpu_counters { /* relaxed atomics; any thread reads */
    _Atomic uint64_t path_bytes[KVT_GPU_PATHS], path_transfers[KVT_GPU_PATHS];
    _Atomic uint64_t launches,
        launched_jobs; /* jobs / launches: how well small copies are batched */
    _Atomic uint64_t checked_bytes, unchecked_transfers, bad_checks;
    _Atomic uint64_t quantised_bytes, dequantised_bytes; /* raw */
    _Atomic uint64_t inflight_bytes;
    _Atomic uint64_t losses, revivals;
    _Atomic int last_error; /* CUDA's, of the last loss */
};

struct kvt_gpu;

/* Allocates the arena and staging, makes the streams, launches each kernel once, starts the thread.
 * -ENOMEM: the memory is not there (nothing is left allocated); -EIO: a call or a launch failed,
 * hung, or made wrong bytes (KVT_CUDA_INVALID_IMAGE): *ret_error is CUDA's number. */
KVT_MUST_USE int kvt_gpu_open(struct kvt_gpu **ret_gpu, const struct kvt_gpu_config *config,
                              int *ret_error);
/* Everything taken was reaped. NULL-proof; returns NULL. */
struct kvt_gpu *kvt_gpu_close(struct kvt_gpu *gpu);
/* For submit and reap: a kvt_tier of its own, whose offsets begin at base_bytes. capacity_bytes:
 * arena_bytes. */
struct kvt_tier *kvt_gpu_tier(struct kvt_gpu *gpu);
/* One round of the thread: takes what was submitted, polls events, moves stages on. True when
 * something moved. The thread, or with is_by_hand the test. */
bool kvt_gpu_turn(struct kvt_gpu *gpu);
/* With is_by_hand: what the thread of hand @hand would do next. False: it has nothing. */
bool kvt_gpu_hand_turn(struct kvt_gpu *gpu, uint32_t hand);
const struct kvt_gpu_counters *kvt_gpu_counters(const struct kvt_gpu *gpu);
/* The arena, for exports: 0 while it is lost. */
uint64_t kvt_gpu_arena(const struct kvt_gpu *gpu);

/* The context is lost (seen by the thread itself, or by the control thread in a call of its own).
 * Any thread; once is enough. */
void kvt_gpu_lose(struct kvt_gpu *gpu, int error);
/* After a loss: true when the thread makes no CUDA call until revive, so that the control thread
 * may reset the device. */
bool kvt_gpu_is_parked(const struct kvt_gpu *gpu);
/* It is parked, and device_reset has returned (or one has given up on it): the transfers that were
 * queued end. Without this call they do KVT_GPU_HOLD_NS after the loss. */
void kvt_gpu_was_reset(struct kvt_gpu *gpu);
#define KVT_GPU_HOLD_NS (5u * KVT_NS_PER_S)
/* Whether L2 is pinned, for copies that begin from now on. Those to and from L2 that is not go
 * through staging. Any thread, one at a time. */
void kvt_gpu_set_host_pinned(struct kvt_gpu *gpu, bool is_host_pinned);
/* It was said that L2 is not pinned, and no copy that began before is under way. Any thread. */
bool kvt_gpu_has_left_host(const struct kvt_gpu *gpu);
/* Makes arena, staging, streams and events anew on a device that works again, and goes into
 * service. The device was reset: what is still held ends first. Results as open's; on failure it
 * stays parked. */
KVT_MUST_USE int kvt_gpu_revive(struct kvt_gpu *gpu, int *ret_error);

/* ---- wait.c ---------------------------------------------------------------------------------- */

enum kvt_gpu_wait {                      /* what the thread wants to do when the event is over */
                    KVT_GPU_WAIT_FINISH, /* give the transfer, and with it both places, back */
                    KVT_GPU_WAIT_STAGING_FILLED, /* read on the CPU what was copied to the host */
                    KVT_GPU_WAIT_STAGING_FREE,   /* use staging again */
                    KVT_GPU_WAIT_LISTS,          /* write descriptors where earlier ones lay */
                    KVT_GPU_WAIT_CHECK,          /* read a check's result */
                    /* And when no hand has any of it any more. */
                    KVT_GPU_WAIT_HANDS_IN,   /* queue what a flight has verified and filled */
                    KVT_GPU_WAIT_HANDS_OUT,  /* give a flight's transfers back */
                    KVT_GPU_WAIT_HANDS_LOSS, /* end what a lost GPU had under way, and park */
                    KVT_GPU_WAITS
};
/* 1: over. 0: not yet. Negative: -(CUDA's error). */
int kvt_gpu_is_over(const struct kvt_cuda_calls *calls, void *event, enum kvt_gpu_wait why);
/* Of @pieces_out pieces that hands have. */
bool kvt_gpu_is_back(uint32_t pieces_out, enum kvt_gpu_wait why);
