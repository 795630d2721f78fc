/* What the files of one GPU share. Behind gpu.h, the thread's state is this:
 *
 *   submissions -> lanes -> flights -> completions
 *
 *   lane     transfers of one direction that wait, foreground and background
 *   flight   up to KVT_GPU_MEMBERS_MAX transfers that travel together: one stream, one list of
 *            descriptors, one event behind everything that was queued for them
 *   member   a transfer in a flight: its addresses, its staging, and which steps it takes part in
 *
 *   file              does
 *   gpu.c             open, close, lose, revive, the thread and its turn
 *   gpu_memory.c      what is made on the device: arena, staging, lists, streams, events
 *   gpu_trial.c       launches each kernel once, before it is in service
 *   gpu_lane.c        takes what was submitted, ends what is late, fills flights and starts them
 *   gpu_plan.c        one transfer -> member: where its bytes go through, what it needs
 *   gpu_runs.c        a view as contiguous runs, for the copy engine
 *   gpu_lists.c       the descriptors of a flight
 *   gpu_queue.c       the steps of a flight, in order, on its stream
 *   gpu_cpu.c         what the CPU does before and after: verify, hash, seal, copies to and from
 *                     staging
 *   gpu_hands.c       threads that do it, a piece of a flight each
 *   gpu_flight.c      what is over: gives back lists and staging, ends members, counts
 *   gpu_staging.c     runs of staging
 *
 * A flight:
 *
 *   FREE -> CPU_IN -> QUEUE -> RUNNING -> FREE
 *           (up only)   |         event over: lists, staging given back; checks read; CPU work
 *                       after it; then every member ends
 *
 * An error on the way that does not cost the context makes every member of the flight end with
 * -EIO; what was queued before it is waited for all the same. */
#pragma once

#include "tiers/device/gpu.h"
#include "tiers/device/gpu_hands.h"
#include "tiers/device/gpu_staging.h"
#include "tiers/worker.h"

#define KVT_GPU_MEMBERS_MAX 64u
#define KVT_GPU_STREAM_FLIGHTS 2u /* one runs, the next is queued behind it */
#define KVT_GPU_AREA_BYTES (256u * 1024u)
#define KVT_GPU_FLIGHT_BYTES_MAX (32u << 20) /* then it leaves; one member always may */
#define KVT_GPU_CPU_BYTES_MAX (1u << 20)     /* of members with CPU work before, for each hand */
#define KVT_GPU_COPIES_PER_TURN 256u         /* calls to the copy engine */
#define KVT_GPU_RUNS_MAX 16u                 /* more go by the kernel */
#define KVT_GPU_DOUBTS_MAX 8u                /* failures to ask or to record: then it is lost */
#define KVT_GPU_ADDRESS_ALIGN_BYTES 256u

enum kvt_gpu_lane_id {
    KVT_GPU_LANE_IN,   /* engine's pool -> slot */
    KVT_GPU_LANE_OUT,  /* slot -> engine's pool */
    KVT_GPU_LANE_UP,   /* host memory -> slot, or -> engine's pool */
    KVT_GPU_LANE_DOWN, /* slot, or engine's pool -> host memory */
    KVT_GPU_LANES
};
#define KVT_GPU_STREAMS_TOTAL (KVT_GPU_LANES * KVT_GPU_STREAMS_MAX)
#define KVT_GPU_FLIGHTS_MAX (KVT_GPU_STREAMS_TOTAL * KVT_GPU_STREAM_FLIGHTS)

struct kvt_gpu_lane {
    struct kvt_worker_queue foreground, background;
    uint32_t foreground_row;
    uint32_t flights_count; /* that it has under way */
    uint32_t stream_next;
};

/* What the copies of a launch are shaped by: the greatest of all its jobs, each of which is walked
 * as if every piece had the chunks of the longest piece of all. */
struct kvt_gpu_extent {
    uint32_t pieces_max, blocks_max, piece_bytes_max;
    uint64_t parts;  /* pieces x engine blocks, of all jobs */
    uint64_t chunks; /* with bytes in them */
};

/* Where the bytes of a member are. `stored` is the content of a slot, `raw` what the client has:
 * the same, unless it is quantised. Both are addresses of the payload's first byte: of a view of
 * some pieces only [range_offset, + range_bytes) of raw is there. */
struct kvt_gpu_member {
    struct kvt_xfer *xfer;
    bool is_ended; /* xfer->status is set; it takes part in nothing more */

    /* Steps, in this order. */
    bool is_verify, is_fill; /* CPU: check the slot in L2; fill pinned staging */
    bool is_up;              /* copy engine: host -> device, once the CPU has summed it */
    bool is_gather;          /* pool -> raw */
    bool is_quantise;        /* raw -> stored */
    bool is_check;           /* kernel: check of stored */
    bool is_dequantise;      /* stored -> raw */
    bool is_scatter;         /* raw -> pool */
    bool is_down;            /* copy engine: device -> host */
    bool is_out;             /* CPU: empty pinned staging, hash and seal, or scatter */
    bool is_by_runs;         /* gather, scatter: by the copy engine */
    bool is_job_checked;     /* gather, scatter: the kernel adds up the check */
    bool is_foreign;         /* the pool is another GPU's */
    bool is_partial;         /* the view is not the whole payload */
    bool has_none;           /* blocks of it are not wanted: no kernel reads them */
    bool is_expected, is_found, is_summed; /* which checks there are: gpu_plan.c */
    uint64_t expected, found, summed;

    const struct kvt_client_view *view; /* the transfer's; NULL */
    uint64_t slot_offset_bytes;         /* in the arena, of a place in it */
    uint64_t stored, raw, stored_bytes, raw_bytes;
    uint64_t range_offset, range_bytes; /* of raw */
    struct kvt_gpu_extent extent;       /* of a gather or scatter that is launched */
    uint8_t *slot;                      /* in L2; NULL */
    /* What the copy engine moves between host and device, [offset, + bytes) of stored. */
    uint8_t *host;
    uint64_t host_device, host_offset, host_bytes;
    uint64_t device_bytes, pinned_bytes; /* of staging that it needs */
    struct kvt_gpu_run device_run, pinned_run;
    uint64_t budget_bytes;
};

struct kvt_gpu_area { /* of descriptors: the same bytes pinned and on the device */
    uint8_t *pinned;
    uint64_t device;
};

enum kvt_gpu_flight_state {
    KVT_GPU_FLIGHT_FREE,
    KVT_GPU_FLIGHT_CPU_IN,
    KVT_GPU_FLIGHT_QUEUE,
    KVT_GPU_FLIGHT_RUNNING,
};

struct kvt_gpu_runs { /* a place in a walk over a view */
    const struct kvt_client_view *view;
    uint32_t piece, block;
    uint64_t payload_offset;
};
struct kvt_gpu_run_at {
    uint64_t address, payload_offset, bytes;
};

struct kvt_gpu_batches { /* what a flight launches; jobs_count 0: not */
    struct kvt_copy_batch copies;
    struct kvt_check_batch checks;
    struct kvt_quant_batch quantise, dequantise;
};

struct kvt_gpu_flight {
    enum kvt_gpu_flight_state state;
    enum kvt_gpu_lane_id lane;
    void *stream, *event;
    bool is_failed; /* every member ends with -EIO */
    uint32_t doubts;
    uint64_t run_ns; /* since when it is waited for */
    uint32_t members_count;
    uint32_t at_member; /* of the step, or of the CPU's work */
    uint32_t step;      /* of gpu_queue.c */
    bool is_walking;    /* `runs` is in the middle of at_member */
    struct kvt_gpu_runs runs;
    struct kvt_gpu_area *area; /* NULL: none, or given back */
    uint64_t area_used_bytes;
    struct kvt_gpu_batches batches;
    uint64_t bytes;
    bool has_checks, is_checks_read;
    bool has_staging;  /* on the device, or pinned that was filled before */
    uint32_t out_left; /* members with CPU work behind the event that nobody has begun */
    bool is_out_ready;
    uint32_t pieces_out;         /* that hands have */
    uint64_t *pinned_found;      /* KVT_GPU_MEMBERS_MAX: where the checks come back */
    struct kvt_quant_spec quant; /* of those members that are quantised */
    bool has_quant;
    uint64_t lists_bytes;                     /* that its members need at most */
    const struct kvt_client_view *lists_view; /* whose pieces were counted last */
    struct kvt_gpu_extent extent;             /* of what its members launch */
    struct kvt_gpu_member members[KVT_GPU_MEMBERS_MAX];
    struct kvt_gpu_piece pieces[KVT_GPU_MEMBERS_MAX]; /* of the first member's place */
};

struct kvt_gpu_memory { /* of one incarnation; 0 and NULL: not made */
    uint64_t arena, staging, lists;
    void *pinned_staging, *pinned_lists, *pinned_found;
    void *streams[KVT_GPU_STREAMS_TOTAL];
    void *events[KVT_GPU_FLIGHTS_MAX];
};

enum kvt_gpu_service {
    KVT_GPU_SERVING = 0,
    KVT_GPU_BREAKING = 1, /* somebody is raising the incarnation: the thread keeps still */
    KVT_GPU_LOSING = 2,   /* the thread has to end what it holds */
    KVT_GPU_PARKED = 3,
};

struct kvt_gpu {
    struct kvt_worker worker; /* first */
    struct kvt_gpu_config config;
    const struct kvt_cuda_calls *calls;
    struct kvt_gpu_counters counters;
    _Atomic uint32_t service; /* enum above */
    _Atomic uint64_t arena;   /* address for other threads; 0: lost */
    struct kvt_gpu_memory memory;
    bool is_current;                  /* the thread made this device its own */
    atomic_bool is_reset, is_holding; /* parked: nothing lands any more; transfers were queued */
    /* Whether L2 is pinned, in the lowest bit: what was said last, and what has been done. The rest
     * counts, so that what is done is not taken for another word's. */
    _Atomic uint32_t pin_said, pin_done;

    /* The rest is the thread's. */
    struct kvt_ledger *ledger;
    struct kvt_gpu_lane lanes[KVT_GPU_LANES];
    struct kvt_gpu_lane *staging_claim, *budget_claim; /* whose first transfer waits for room */
    struct kvt_gpu_staging staging, pinned;
    uint32_t flights_count, flights_busy; /* that there are; not free */
    struct kvt_gpu_flight *flights;
    struct kvt_gpu_area areas[KVT_GPU_FLIGHTS_MAX];
    struct kvt_gpu_area *areas_free[KVT_GPU_FLIGHTS_MAX]; /* the last given is the first taken */
    uint32_t areas_free_count;
    struct kvt_gpu_hands hands;
    uint32_t cpu_next;    /* flight that the CPU works for next */
    uint32_t queue_next;  /* flight that the copies of the next turn are for first */
    uint32_t copies_left; /* of this turn */
    uint64_t swept_ns, turned_ns, parked_ns;
};

static inline uint32_t kvt_gpu_service(const struct kvt_gpu *gpu)
{
    return atomic_load_explicit(&gpu->service, memory_order_acquire);
}

/* gpu.c: looks at the result of a call. True: it worked. A context that is lost is seen here. */
bool kvt_gpu_worked(struct kvt_gpu *gpu, int error);

/* gpu_memory.c: 0; -ENOMEM, -EIO and *ret_error: nothing is left. The device is current. */
KVT_MUST_USE int kvt_gpu_memory_make(struct kvt_gpu *gpu, int *ret_error);
void kvt_gpu_memory_free(struct kvt_gpu *gpu);   /* idempotent */
void kvt_gpu_memory_forget(struct kvt_gpu *gpu); /* the context is gone, and all with it */

/* gpu_trial.c: CUDA's error. KVT_CUDA_INVALID_IMAGE: a kernel makes other bytes than the CPU does.
 * What it queued is over, unless the error is sticky. The device is current; it may wait. */
KVT_MUST_USE int kvt_gpu_trial(struct kvt_gpu *gpu);

/* gpu_lane.c. True: something moved. */
bool kvt_gpu_lanes_collect(struct kvt_gpu *gpu);
bool kvt_gpu_lanes_start(struct kvt_gpu *gpu, uint64_t now_ns);
bool kvt_gpu_lanes_sweep(struct kvt_gpu *gpu, uint64_t now_ns); /* ends those that are late */
bool kvt_gpu_lanes_end_all(struct kvt_gpu *gpu, int status, uint64_t now_ns);
bool kvt_gpu_lanes_are_empty(const struct kvt_gpu *gpu);
/* The transfer was not started. */
void kvt_gpu_refuse(struct kvt_gpu *gpu, struct kvt_xfer *xfer, int status, uint64_t now_ns);

/* gpu_plan.c: 0: @ret_member is filled, but for its staging and what depends on it. Else the
 * status with which the transfer ends; then xfer->verdict is set as well. */
KVT_MUST_USE int kvt_gpu_plan(struct kvt_gpu *gpu, struct kvt_xfer *xfer,
                              struct kvt_gpu_member *ret_member);
/* Its staging was taken: addresses. */
void kvt_gpu_plan_place(struct kvt_gpu *gpu, struct kvt_gpu_member *member);

/* gpu_runs.c */
void kvt_gpu_runs_init(struct kvt_gpu_runs *runs, const struct kvt_client_view *view,
                       uint64_t payload_offset);
/* The next run; false: no more. */
bool kvt_gpu_runs_next(struct kvt_gpu_runs *runs, struct kvt_gpu_run_at *ret_run);
/* At most @max runs, none shorter than @bytes_min. */
bool kvt_gpu_runs_are_few(const struct kvt_client_view *view, uint32_t max, uint64_t bytes_min);

/* gpu_lists.c */
struct kvt_gpu_extent kvt_gpu_lists_extent(const struct kvt_client_view *view);
/* Two launches as one. */
struct kvt_gpu_extent kvt_gpu_lists_joint(const struct kvt_gpu_extent *a,
                                          const struct kvt_gpu_extent *b);
/* The kernels take it. */
bool kvt_gpu_lists_can_launch(const struct kvt_gpu_extent *extent);
/* Most of what its threads look at has bytes, or it is little. */
bool kvt_gpu_lists_is_dense(const struct kvt_gpu_extent *extent);
/* Counts what @member adds; false: the area has no room for it, or the launch that they would have
 * together is far from what each is made for. */
bool kvt_gpu_lists_fit(struct kvt_gpu_flight *flight, const struct kvt_gpu_member *member);
/* Writes the descriptors of the members that still take part; sets batches, area_used_bytes,
 * has_checks. */
void kvt_gpu_lists_write(struct kvt_gpu_flight *flight);
uint64_t kvt_gpu_lists_checks_bytes(void);

/* gpu_queue.c: goes on with the steps of a flight. True: something was queued. */
bool kvt_gpu_queue(struct kvt_gpu *gpu, struct kvt_gpu_flight *flight);
void kvt_gpu_queue_begin(struct kvt_gpu_flight *flight);

/* gpu_cpu.c: gives hands what they can take and does a bounded piece itself. True: it did
 * something. */
bool kvt_gpu_cpu_turn(struct kvt_gpu *gpu);
/* Takes what hands have done. Likewise. */
bool kvt_gpu_cpu_collect(struct kvt_gpu *gpu);
/* All that is under way waits for hands, who ring: no event is to be asked for. */
bool kvt_gpu_cpu_is_all(const struct kvt_gpu *gpu);
/* A hand's work; @gpu is a struct kvt_gpu. */
void kvt_gpu_cpu_work(void *gpu, const struct kvt_gpu_piece *piece);

/* gpu_flight.c */
struct kvt_gpu_flight *kvt_gpu_flight_new(struct kvt_gpu *gpu, enum kvt_gpu_lane_id lane);
/* Everything is queued, or has failed: it is waited for. */
void kvt_gpu_flight_run(struct kvt_gpu *gpu, struct kvt_gpu_flight *flight);
/* Its checks are not the same; then it ended. */
bool kvt_gpu_member_is_bad(struct kvt_gpu *gpu, struct kvt_gpu_member *member);
/* Looks at what is over. True: something moved. */
bool kvt_gpu_flight_poll(struct kvt_gpu *gpu, struct kvt_gpu_flight *flight, uint64_t now_ns);
/* The context is lost: they end OUT_OF_SERVICE. With @is_queued those of which something may be
 * queued as well. */
void kvt_gpu_flights_end_all(struct kvt_gpu *gpu, bool is_queued, uint64_t now_ns);
void kvt_gpu_flight_back(struct kvt_gpu *gpu, struct kvt_gpu_flight *flight); /* no members */
/* @member ends with @status, though its flight goes on. */
static inline void kvt_gpu_member_end(struct kvt_gpu_member *member, int status)
{
    member->is_ended = true;
    member->xfer->status = status;
}
