/* The life of a GPU of L1, and the turn of its thread.
 *
 *   SERVING --lose--> BREAKING --> LOSING --the thread ends all it holds--> PARKED
 *      ^                                                                     |
 *      +---------------------------------- revive ---------------------------+
 *
 * lose may be called by anybody who sees the loss; the first raises the incarnation, and only when
 * that is done does the thread end its transfers: whoever hears OUT_OF_SERVICE finds the new one.
 * While it is parked the thread makes no call of CUDA and touches nothing of the device; what is
 * submitted comes back OUT_OF_SERVICE, what was queued when the reset is over. The store of
 * `service` hands everything over both ways. */
#include "tiers/device/gpu.h"

#include <stdio.h>
#include <sys/prctl.h>
#include <time.h>

#include "daemon/base/alloc.h"
#include "daemon/base/clock.h"
#include "daemon/base/guard.h"
#include "tiers/device/gpu_internal.h"

#define POLL_MIN_NS (20u * KVT_NS_PER_US)
#define POLL_MAX_NS (200u * KVT_NS_PER_US)
#define POLL_HANDS_NS KVT_NS_PER_MS /* what waits may be late meanwhile */
#define TIMER_SLACK_NS 1000ul
/* The ledger has an entry for each slot of at least so many bytes. */
#define LEDGER_SLOT_BYTES (64u * KVT_KIB)
#define LEDGER_SLOTS_MIN 1024u

static struct kvt_gpu *gpu_of(struct kvt_worker *worker)
{
    return KVT_CONTAINER_OF(worker, struct kvt_gpu, worker);
}

bool kvt_gpu_worked(struct kvt_gpu *gpu, int error)
{
    if (error != KVT_CUDA_OK && kvt_cuda_is_sticky(error))
        kvt_gpu_lose(gpu, error);
    return error == KVT_CUDA_OK;
}

void kvt_gpu_lose(struct kvt_gpu *gpu, int error)
{
    struct kvt_tier_counters *counters = &gpu->worker.tier.counters;
    uint32_t serving = KVT_GPU_SERVING;

    if (!atomic_compare_exchange_strong(&gpu->service, &serving, KVT_GPU_BREAKING))
        return;
    atomic_store_explicit(&gpu->counters.last_error, error, memory_order_relaxed);
    kvt_worker_count(&gpu->counters.losses, 1);
    kvt_worker_count(&counters->outages, 1);
    atomic_store_explicit(&gpu->arena, 0, memory_order_release);
    atomic_fetch_add_explicit(&counters->incarnation, 1, memory_order_release);
    atomic_store_explicit(&counters->health, KVT_TIER_HEALTH_OUT, memory_order_release);
    atomic_store_explicit(&gpu->service, KVT_GPU_LOSING, memory_order_release);
    kvt_doorbell_ring(&gpu->worker.bell);
    kvt_doorbell_ring(gpu->worker.engine_bell);
}

bool kvt_gpu_is_parked(const struct kvt_gpu *gpu)
{
    return kvt_gpu_service(gpu) == KVT_GPU_PARKED;
}

static void park(struct kvt_gpu *gpu, uint64_t now_ns)
{
    kvt_gpu_flights_end_all(gpu, false, now_ns);
    kvt_gpu_lanes_end_all(gpu, KVT_XFER_OUT_OF_SERVICE, now_ns);
    kvt_ledger_clear(gpu->ledger);
    gpu->is_current = false;
    gpu->parked_ns = now_ns;
    atomic_store_explicit(&gpu->is_reset, false, memory_order_relaxed);
    atomic_store_explicit(&gpu->is_holding, gpu->flights_busy > 0, memory_order_relaxed);
    atomic_store_explicit(&gpu->service, KVT_GPU_PARKED, memory_order_release);
}

/* Before hands have given back what they have, nothing of it can end, nor may the device be reset:
 * pinned staging goes with it. */
static bool turn_losing(struct kvt_gpu *gpu, uint64_t now_ns)
{
    if (!kvt_gpu_is_back(gpu->hands.out_count, KVT_GPU_WAIT_HANDS_LOSS))
        return false;
    park(gpu, now_ns);
    return true;
}

static bool turn_parked(struct kvt_gpu *gpu, uint64_t now_ns)
{
    bool has_moved;

    kvt_gpu_lanes_collect(gpu);
    /* Taken back since this turn began, or half so (revive stores the health before the service):
     * what was collected may be of the next life. From the loss until then the health is OUT; who
     * submits to the next life saw it OK, so behind what was collected that is seen here, too. It
     * may be OUT again, for the next life was lost as well: then the service, which is read after
     * it, is not PARKED any more, for only this thread parks. */
    if (atomic_load_explicit(&gpu->worker.tier.counters.health, memory_order_acquire) ==
            KVT_TIER_HEALTH_OK ||
        !kvt_gpu_is_parked(gpu))
        return true;
    has_moved = kvt_gpu_lanes_end_all(gpu, KVT_XFER_OUT_OF_SERVICE, now_ns);
    if (gpu->flights_busy == 0 || (!atomic_load_explicit(&gpu->is_reset, memory_order_acquire) &&
                                   now_ns - gpu->parked_ns < KVT_GPU_HOLD_NS))
        return has_moved;
    kvt_gpu_flights_end_all(gpu, true, now_ns);
    atomic_store_explicit(&gpu->is_holding, false, memory_order_release);
    return true;
}

void kvt_gpu_was_reset(struct kvt_gpu *gpu)
{
    KVT_ASSERT(kvt_gpu_is_parked(gpu));
    atomic_store_explicit(&gpu->is_reset, true, memory_order_release);
    kvt_doorbell_ring(&gpu->worker.bell);
}

/* The control thread waits for the GPU's, which makes no call that blocks now. */
static void held_wait(struct kvt_gpu *gpu)
{
    const struct timespec pause = {.tv_nsec = POLL_MIN_NS};

    kvt_gpu_was_reset(gpu);
    while (atomic_load_explicit(&gpu->is_holding, memory_order_acquire))
        if (gpu->config.is_by_hand)
            (void)kvt_gpu_turn(gpu);
        else
            (void)nanosleep(&pause, NULL);
}

/* The thread's device; a test that steps several GPUs by hand changes it behind our back. */
static bool make_current(struct kvt_gpu *gpu)
{
    int error;

    if (gpu->is_current && !gpu->config.is_by_hand)
        return true;
    error = gpu->calls->set_device(gpu->config.device);
    if (error != KVT_CUDA_OK)
        kvt_gpu_lose(gpu, error);
    gpu->is_current = error == KVT_CUDA_OK;
    return gpu->is_current;
}

/* Copies between L2 itself and the device. */
static bool is_at_host(const struct kvt_gpu *gpu)
{
    for (uint32_t f = 0; f < gpu->flights_count; f++) {
        const struct kvt_gpu_flight *flight = &gpu->flights[f];

        for (uint32_t m = 0; flight->state != KVT_GPU_FLIGHT_FREE && m < flight->members_count; m++)
            if (flight->members[m].slot != NULL && flight->members[m].pinned_bytes == 0)
                return true;
    }
    return false;
}

static void listen_to_pin(struct kvt_gpu *gpu)
{
    uint32_t said = atomic_load_explicit(&gpu->pin_said, memory_order_acquire);
    bool is_pinned = (said & 1) != 0;

    if (said == atomic_load_explicit(&gpu->pin_done, memory_order_relaxed))
        return;
    gpu->config.is_host_pinned = is_pinned;
    if (is_pinned || !is_at_host(gpu))
        atomic_store_explicit(&gpu->pin_done, said, memory_order_release);
}

/* All flights share a turn's copies, and one may have a million of them: the next turn begins
 * behind the flight that used them up, so nobody waits longer than for a turn of each other. */
static bool turn_queue(struct kvt_gpu *gpu)
{
    uint32_t first = gpu->queue_next;
    bool has_moved = false;

    gpu->copies_left = KVT_GPU_COPIES_PER_TURN;
    for (uint32_t i = 0; i < gpu->flights_count; i++) {
        uint32_t f = (first + i) % gpu->flights_count;
        bool had_copies = gpu->copies_left > 0;

        if (gpu->flights[f].state != KVT_GPU_FLIGHT_QUEUE)
            continue;
        has_moved |= kvt_gpu_queue(gpu, &gpu->flights[f]);
        if (had_copies && gpu->copies_left == 0)
            gpu->queue_next = (f + 1) % gpu->flights_count;
    }
    return has_moved;
}

static bool turn_serving(struct kvt_gpu *gpu, uint64_t now_ns)
{
    bool has_moved = false;

    listen_to_pin(gpu);
    if (!make_current(gpu))
        return true;
    for (uint32_t f = 0; f < gpu->flights_count; f++)
        if (gpu->flights[f].state == KVT_GPU_FLIGHT_RUNNING)
            has_moved |= kvt_gpu_flight_poll(gpu, &gpu->flights[f], now_ns);
    if (kvt_gpu_service(gpu) != KVT_GPU_SERVING)
        return true;
    has_moved |= kvt_gpu_lanes_start(gpu, now_ns);
    has_moved |= turn_queue(gpu);
    has_moved |= kvt_gpu_cpu_turn(gpu);
    has_moved |= kvt_gpu_lanes_sweep(gpu, now_ns);
    return has_moved;
}

bool kvt_gpu_turn(struct kvt_gpu *gpu)
{
    uint64_t now_ns = kvt_clock_mono_ns();
    bool has_moved;

    if (gpu->flights_busy > 0)
        kvt_worker_count(&gpu->worker.tier.counters.busy_ns, now_ns - gpu->turned_ns);
    gpu->turned_ns = now_ns;
    has_moved = kvt_gpu_cpu_collect(gpu);
    switch (kvt_gpu_service(gpu)) {
    case KVT_GPU_SERVING:
        has_moved |= kvt_gpu_lanes_collect(gpu);
        has_moved |= turn_serving(gpu, now_ns);
        break;
    case KVT_GPU_LOSING:
        has_moved |= kvt_gpu_lanes_collect(gpu);
        has_moved |= turn_losing(gpu, now_ns);
        break;
    case KVT_GPU_PARKED:
        has_moved |= turn_parked(gpu, now_ns);
        break;
    default: /* the incarnation is being raised */
        break;
    }
    kvt_worker_notify(&gpu->worker, now_ns, !has_moved);
    return has_moved;
}

bool kvt_gpu_hand_turn(struct kvt_gpu *gpu, uint32_t hand)
{
    KVT_ASSERT(gpu->config.is_by_hand);
    return kvt_gpu_hand_step(&gpu->hands, hand);
}

static bool is_idle(const struct kvt_gpu *gpu)
{
    uint32_t service = kvt_gpu_service(gpu);

    bool has_listened = atomic_load_explicit(&gpu->pin_said, memory_order_acquire) ==
                        atomic_load_explicit(&gpu->pin_done, memory_order_relaxed);

    return gpu->flights_busy == 0 && kvt_gpu_lanes_are_empty(gpu) &&
           ((service == KVT_GPU_SERVING && has_listened) || service == KVT_GPU_PARKED);
}

/* A doorbell may ring for something to do, for what a hand has done, for a loss, and for the end.
 */
static void gpu_sleep(struct kvt_gpu *gpu, uint64_t timeout_ns)
{
    struct kvt_worker *worker = &gpu->worker;

    kvt_doorbell_arm(&worker->bell);
    if (kvt_ring_is_empty(&worker->submissions) && !kvt_worker_is_stopping(worker) &&
        !kvt_gpu_hands_are_waiting(&gpu->hands) &&
        (timeout_ns != KVT_TIME_NEVER_NS || is_idle(gpu)))
        kvt_doorbell_wait(&worker->bell, timeout_ns);
    else
        kvt_doorbell_disarm(&worker->bell);
}

static void gpu_loop(struct kvt_worker *worker)
{
    struct kvt_gpu *gpu = gpu_of(worker);
    uint64_t poll_ns = POLL_MIN_NS;

    (void)prctl(PR_SET_TIMERSLACK, TIMER_SLACK_NS);
    for (;;) {
        if (kvt_gpu_turn(gpu)) {
            poll_ns = POLL_MIN_NS;
            continue;
        }
        if (is_idle(gpu)) {
            if (kvt_worker_is_stopping(worker) && kvt_ring_is_empty(&worker->submissions))
                return;
            gpu_sleep(gpu, KVT_TIME_NEVER_NS);
            continue;
        }
        gpu_sleep(gpu, kvt_gpu_cpu_is_all(gpu) ? POLL_HANDS_NS : poll_ns);
        poll_ns = KVT_MIN(poll_ns * 2, POLL_MAX_NS);
    }
}

struct kvt_gpu *kvt_gpu_close(struct kvt_gpu *gpu)
{
    if (gpu == NULL)
        return NULL;
    kvt_worker_stop(&gpu->worker);
    kvt_gpu_hands_deinit(&gpu->hands); /* everything was reaped, so they have nothing */
    kvt_worker_deinit(&gpu->worker);
    /* Of a context that is lost nothing can be freed. What is freed is known by its address, even
     * if the device does not become current. */
    if (kvt_gpu_service(gpu) == KVT_GPU_SERVING && gpu->memory.arena != 0) {
        (void)gpu->calls->set_device(gpu->config.device);
        kvt_gpu_memory_free(gpu);
    }
    (void)kvt_ledger_free(gpu->ledger);
    kvt_gpu_staging_deinit(&gpu->staging);
    kvt_gpu_staging_deinit(&gpu->pinned);
    kvt_free(gpu->flights);
    kvt_free(gpu);
    return NULL;
}

static void tier_close(struct kvt_tier *tier)
{
    (void)kvt_gpu_close(gpu_of(KVT_CONTAINER_OF(tier, struct kvt_worker, tier)));
}

static const struct kvt_tier_ops gpu_ops = {
    .name = "device", .submit = kvt_worker_submit, .reap = kvt_worker_reap, .close = tier_close};

/* What does not depend on the device. */
static int init(struct kvt_gpu *gpu, const struct kvt_gpu_config *config)
{
    uint64_t slots_count = config->arena_bytes / LEDGER_SLOT_BYTES;
    int r;

    gpu->config = *config;
    gpu->calls = config->calls;
    atomic_init(&gpu->pin_said, config->is_host_pinned);
    atomic_init(&gpu->pin_done, config->is_host_pinned);
    if (config->hang_ns == 0)
        gpu->config.hang_ns = KVT_GPU_HANG_NS;
    if (config->hand_bytes == 0)
        gpu->config.hand_bytes = KVT_GPU_HAND_BYTES;
    gpu->flights_count = KVT_GPU_LANES * config->streams * KVT_GPU_STREAM_FLIGHTS;
    gpu->worker.tier.capacity_bytes = config->arena_bytes;
    gpu->worker.tier.slot_align_bytes = KVT_GPU_SLOT_ALIGN_BYTES;
    gpu->worker.tier.payload_bytes_max = config->staging_bytes / 2;
    (void)snprintf(gpu->worker.tier.detail, sizeof(gpu->worker.tier.detail), "GPU %d %s",
                   config->device, config->info.name);
    r = kvt_guard_install();
    if (r == 0)
        r = kvt_worker_init(&gpu->worker, &gpu_ops, config->inflight_max, config->doorbell);
    if (r < 0)
        return r;
    r = kvt_gpu_hands_init(&gpu->hands, config->cpu_threads, kvt_gpu_cpu_work, gpu,
                           &gpu->worker.bell);
    if (r == 0)
        r = kvt_gpu_staging_init(&gpu->staging, config->staging_bytes);
    if (r == 0)
        r = kvt_gpu_staging_init(&gpu->pinned, config->staging_bytes);
    if (r == 0)
        r = kvt_ledger_new(&gpu->ledger, KVT_MAX(slots_count, LEDGER_SLOTS_MIN));
    if (r == 0 &&
        (gpu->flights = kvt_alloc_zeroed(gpu->flights_count, sizeof(*gpu->flights))) == NULL)
        r = kvt_trace(-ENOMEM);
    return r;
}

int kvt_gpu_open(struct kvt_gpu **ret_gpu, const struct kvt_gpu_config *config, int *ret_error)
{
    struct kvt_gpu *gpu;
    char name[16];
    int r, error;

    KVT_ASSERT(config->streams >= 1 && config->streams <= KVT_GPU_STREAMS_MAX);
    KVT_ASSERT(config->arena_bytes > 0);
    KVT_ASSERT(config->cpu_threads <= KVT_GPU_HANDS_MAX);
    *ret_error = KVT_CUDA_OK;
    gpu = kvt_alloc_aligned(KVT_CACHE_LINE_BYTES, sizeof(*gpu));
    if (gpu == NULL)
        return kvt_trace(-ENOMEM);
    gpu->worker.bell = KVT_DOORBELL_NULL;
    r = init(gpu, config);
    if (r < 0)
        goto failed;
    error = gpu->calls->set_device(config->device);
    if (error != KVT_CUDA_OK) {
        *ret_error = error;
        r = kvt_trace(-EIO);
        goto failed;
    }
    r = kvt_gpu_memory_make(gpu, ret_error);
    if (r == 0 && !config->is_by_hand)
        r = kvt_gpu_hands_start(&gpu->hands, config->device);
    if (r == 0 && !config->is_by_hand) {
        (void)snprintf(name, sizeof(name), "kvt-gpu%d", config->device);
        r = kvt_worker_start(&gpu->worker, name, gpu_loop);
    }
    if (r < 0)
        goto failed;
    *ret_gpu = gpu;
    return 0;
failed:
    (void)kvt_gpu_close(gpu);
    return r;
}

void kvt_gpu_set_host_pinned(struct kvt_gpu *gpu, bool is_host_pinned)
{
    uint32_t said = atomic_load_explicit(&gpu->pin_said, memory_order_relaxed);

    if ((said & 1) == is_host_pinned)
        return;
    atomic_store_explicit(&gpu->pin_said, (said | 1) + 1 + is_host_pinned, memory_order_release);
    kvt_doorbell_ring(&gpu->worker.bell);
}

bool kvt_gpu_has_left_host(const struct kvt_gpu *gpu)
{
    uint32_t said = atomic_load_explicit(&gpu->pin_said, memory_order_acquire);

    if ((said & 1) != 0)
        return false;
    return atomic_load_explicit(&gpu->pin_done, memory_order_acquire) == said ||
           (kvt_gpu_is_parked(gpu) &&
            !atomic_load_explicit(&gpu->is_holding, memory_order_acquire));
}

int kvt_gpu_revive(struct kvt_gpu *gpu, int *ret_error)
{
    int r, error;

    held_wait(gpu);
    kvt_gpu_memory_forget(gpu); /* of the incarnation that was lost */
    *ret_error = KVT_CUDA_OK;
    error = gpu->calls->set_device(gpu->config.device);
    if (error != KVT_CUDA_OK) {
        *ret_error = error;
        return kvt_trace(-EIO);
    }
    r = kvt_gpu_memory_make(gpu, ret_error);
    if (r < 0)
        return r;
    kvt_worker_count(&gpu->counters.revivals, 1);
    atomic_store_explicit(&gpu->worker.tier.counters.health, KVT_TIER_HEALTH_OK,
                          memory_order_release);
    atomic_store_explicit(&gpu->service, KVT_GPU_SERVING, memory_order_release);
    kvt_doorbell_ring(&gpu->worker.bell);
    kvt_doorbell_ring(gpu->worker.engine_bell);
    return 0;
}

struct kvt_tier *kvt_gpu_tier(struct kvt_gpu *gpu)
{
    return &gpu->worker.tier;
}

const struct kvt_gpu_counters *kvt_gpu_counters(const struct kvt_gpu *gpu)
{
    return &gpu->counters;
}

uint64_t kvt_gpu_arena(const struct kvt_gpu *gpu)
{
    return atomic_load_explicit(&gpu->arena, memory_order_acquire);
}
