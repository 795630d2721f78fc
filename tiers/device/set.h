/* L1 on GPUs: one tier, a zone for each GPU that is used.
 *
 *   engine ── submit / reap ──> set ──> member: kvt_gpu (a thread, streams, an arena)
 *   janitor ── region_open / close ──>  member: `calls`, the handles that are open
 *   control thread, one a member ──>    member: loss, reset, revival
 *
 * Life of a member: in service, until its context is lost (by its own thread, or in a call of
 * somebody else). Its thread then ends what it holds and parks; the control thread resets the
 * device, has the arena made anew and puts it into service again, or waits longer and tries again.
 *
 *   IN SERVICE ── lost ──> LOST ── parked, waited ──> reset, revive ──> IN SERVICE
 *                            ^                             │ failed
 *                            └────── twice the wait ───────┘
 *
 * The control thread makes the member's device its current one while that works, so that a reset
 * can never hit another: on a lost device set_device may do nothing but answer the error.
 *
 * What is opened on a GPU (regions of engines, exports) belongs to the incarnation in which it was
 * opened: `served`. When the context is lost the counters' incarnation rises first, and so differs
 * from `served` until the GPU is back: in between nothing is opened, closed or exported.
 *
 *   lock     covers                                     held by
 *   calls    handles, served, and CUDA calls on the     janitor, control: over those calls, so
 *            GPU that are not its thread's              nobody waits for it: trylock and look again
 *   recovery reset to revive: one GPU at a time        control: trylock and look again; open
 *   words    state, why, lost_ns, export, pin_why; of   any thread, for a copy of some bytes
 *            another member: gpu
 *
 * No other thread may be in a call that concerns the contexts of all GPUs, or opens memory on
 * one, while a GPU is reset. So a reset holds `recovery` and everybody's `calls`. A GPU's own
 * thread makes calls on its own context alone.
 *
 * L2 is pinned once, for all, in the context of one GPU: `pin_owner`. With that context it is
 * unpinned under the hands of all. So before its owner is reset the others are told to reach L2
 * through staging, and what they had begun is waited for; they are told again when it is pinned. */
#pragma once

#include <pthread.h>

#include "tiers/device/gpu.h"
#include "tiers/device/probe.h"
#include "tiers/worker.h"

#define KVT_DEVICE_HANDLES_MAX (KVT_SESSIONS_MAX * KVT_REGIONS_PER_SESSION_MAX)

struct kvt_device_handle { /* memory of an engine that is open here */
    uint8_t handle[KVT_CUDA_IPC_HANDLE_BYTES];
    uint64_t address, bytes; /* to the end of the allocation */
    uint32_t users;          /* regions; never 0 */
};

struct kvt_device_set;

enum kvt_control_order {
    KVT_CONTROL_STARTING = 0, /* it makes the device its current one */
    KVT_CONTROL_READY,        /* that is done; the GPU is being opened */
    KVT_CONTROL_CARING,
    KVT_CONTROL_ENDING, /* there is nothing to care for */
};

struct kvt_device_member {
    struct kvt_device_set *set;
    uint32_t zone;
    struct kvt_gpu *gpu;
    struct kvt_tier *tier;       /* the GPU's */
    struct kvt_device_gpu about; /* state, why, lost_ns: below `words` */

    pthread_mutex_t calls;
    _Atomic uint32_t served; /* written with `calls` held */
    struct kvt_device_handle *handles;
    uint32_t handles_count;

    bool has_export;
    struct kvt_device_export exported;
    atomic_bool is_host_pinned; /* as its GPU was told last */

    pthread_t control;
    bool is_started;
    atomic_bool is_over;
    atomic_int control_order; /* enum kvt_control_order */
    struct kvt_doorbell bell; /* of the control thread */
    /* The control thread's own. */
    bool is_lost;
    int start_error; /* CUDA's, of its start */
    bool is_stuck;   /* that is why it is lost */
    uint32_t stuck_looks;
    uint64_t looked_ns, ended; /* transfers, at the last look */
    uint32_t attempts;
    uint64_t wait_ns, next_ns; /* between attempts; of the next one */
    uint64_t back_ns;          /* when it was put into service again; 0: not yet */

    bool was_in_service; /* the engine's view, in reap */
    /* Transfers of other GPUs with memory of engines on this one: it is not reset before they are
     * over. The engine counts, then looks whether the member is served; the control thread looks at
     * the count when it is not. */
    _Atomic uint32_t guests;
};

struct kvt_device_set {
    struct kvt_tier tier; /* first */
    const struct kvt_cuda_calls *calls;
    struct kvt_device_config config;
    uint32_t members_count, refused_count;
    struct kvt_device_member members[KVT_ZONES_MAX];
    struct kvt_device_gpu refused[KVT_DEVICE_GPUS_MAX];
    pthread_mutex_t words, recovery;
    uint32_t outstanding, reap_first; /* the engine's, and so is: */
    struct kvt_worker_queue finished; /* what no GPU had to see */
    atomic_bool is_stopping;
    atomic_uint members_left; /* whose control thread has not ended */
    bool is_pinned;           /* L2, by us, at the start */
    atomic_int pin_owner;     /* zone in whose context L2 is pinned now; -1: none. `recovery` */
    char pin_why[KVT_DEVICE_PIN_WHY_BYTES]; /* why it is not; "": pin_owner says it */
    int current;                            /* open's: CUDA's current device; -1: not known */
};

/* kvt_device_cuda_open over any table of calls. */
KVT_MUST_USE int kvt_device_set_open(struct kvt_tier **ret_tier,
                                     const struct kvt_device_config *config,
                                     const struct kvt_cuda_calls *calls,
                                     struct kvt_device_report *ret_report);
/* NULL: not a set (another backend, or no tier). */
struct kvt_device_set *kvt_device_set_of(const struct kvt_tier *tier);

/* ---- member.c ------------------------------------------------------------------------------- */

/* In service, in the incarnation that was served. Any thread; what it says may be over at once. */
bool kvt_device_is_served(const struct kvt_device_member *member);
/* A call on the member, the current device, answered @error: if that means that the context is
 * lost, says so to all. Returns whether it does. Any thread. */
bool kvt_device_note_error(struct kvt_device_member *member, int error);
void kvt_device_say(struct kvt_device_member *member, enum kvt_gpu_state state, const char *format,
                    ...) KVT_PRINTF(3, 4);
/* Pins L2 in the context of the current device, for all. CUDA's error, or 0. */
int kvt_device_pin(struct kvt_device_set *set);
/* Why L2 is not pinned: an @error of that, OK: it is. */
void kvt_device_pin_say(struct kvt_device_set *set, int error);
/* Tells the member's GPU whether it is. */
void kvt_device_tell_pinned(struct kvt_device_member *member, bool is_pinned);
/* Makes the handle of the arena, if exports are allowed. With `calls` held, or init-only. */
void kvt_device_export_make(struct kvt_device_member *member);

/* ---- recover.c ------------------------------------------------------------------------------ */

/* One look at the member at @now_ns. Returns when the next one is due at the latest. The control
 * thread, or a test in its place. */
uint64_t kvt_device_care(struct kvt_device_member *member, uint64_t now_ns);
/* The control thread, before the GPU is opened: it has the device when start returns. CUDA's error,
 * or 0; -errno, or 0. It cares once it is told to, until the set is stopped; then it closes the GPU
 * and ends. Before that, drop ends it. */
KVT_MUST_USE int kvt_device_control_start(struct kvt_device_member *member, int *ret_error);
void kvt_device_control_care(struct kvt_device_member *member);
void kvt_device_control_drop(struct kvt_device_member *member); /* idempotent */
