/* Lanes: what waits, and how it gets into a flight.
 *
 * A flight takes what is first in its lane as long as the next fits in: room in the list, as much
 * work for the CPU as the others have, the same quantisation, a launch that suits both. A lane that
 * is idle sends a single transfer at once; one that is busy gathers meanwhile what becomes the next
 * flight.
 *
 * A transfer whose staging or whose part of the budget is not free stays first in its lane and
 * claims what is given back: no other lane takes of it before, so a large transfer is not passed
 * over for ever by small ones. */
#include <string.h>

#include "tiers/device/gpu_internal.h"

#define SWEEP_NS KVT_NS_PER_MS

static enum kvt_gpu_lane_id lane_of(const struct kvt_xfer *xfer)
{
    enum kvt_place_kind from = xfer->src.kind, to = xfer->dst.kind;

    if (from == KVT_PLACE_CLIENT && xfer->src.view.layout->is_gpu)
        return to == KVT_PLACE_DEVICE ? KVT_GPU_LANE_IN : KVT_GPU_LANE_DOWN;
    if (from != KVT_PLACE_DEVICE)
        return KVT_GPU_LANE_UP;
    return to == KVT_PLACE_CLIENT && xfer->dst.view.layout->is_gpu ? KVT_GPU_LANE_OUT
                                                                   : KVT_GPU_LANE_DOWN;
}

bool kvt_gpu_lanes_collect(struct kvt_gpu *gpu)
{
    struct kvt_xfer *xfer;
    bool has_moved = false;

    kvt_worker_collect(&gpu->worker);
    while ((xfer = kvt_worker_next(&gpu->worker)) != NULL) {
        struct kvt_gpu_lane *lane = &gpu->lanes[lane_of(xfer)];

        kvt_worker_queue_push(
            xfer->flags & KVT_XFER_BACKGROUND ? &lane->background : &lane->foreground, xfer);
        has_moved = true;
    }
    return has_moved;
}

static bool lane_is_empty(const struct kvt_gpu_lane *lane)
{
    return lane->foreground.head == NULL && lane->background.head == NULL;
}

bool kvt_gpu_lanes_are_empty(const struct kvt_gpu *gpu)
{
    for (uint32_t l = 0; l < KVT_GPU_LANES; l++)
        if (!lane_is_empty(&gpu->lanes[l]))
            return false;
    return true;
}

/* As in worker.c: one in KVT_WORKER_FOREGROUND_ROW is background. */
static struct kvt_worker_queue *lane_first(struct kvt_gpu_lane *lane)
{
    if (lane->background.head != NULL &&
        (lane->foreground.head == NULL || lane->foreground_row >= KVT_WORKER_FOREGROUND_ROW))
        return &lane->background;
    return &lane->foreground;
}

static void lane_pop(struct kvt_gpu_lane *lane, struct kvt_worker_queue *queue)
{
    lane->foreground_row = queue == &lane->background ? 0 : lane->foreground_row + 1;
    (void)kvt_worker_queue_pop(queue);
}

void kvt_gpu_refuse(struct kvt_gpu *gpu, struct kvt_xfer *xfer, int status, uint64_t now_ns)
{
    xfer->status = status;
    xfer->started_ns = now_ns;
    kvt_worker_finish(&gpu->worker, xfer, now_ns);
}

static void claims_drop(struct kvt_gpu *gpu, const struct kvt_gpu_lane *lane)
{
    if (gpu->staging_claim == lane)
        gpu->staging_claim = NULL;
    if (gpu->budget_claim == lane)
        gpu->budget_claim = NULL;
}

static bool budget_take(struct kvt_gpu *gpu, struct kvt_gpu_lane *lane,
                        const struct kvt_gpu_member *member)
{
    uint64_t inflight_bytes =
        atomic_load_explicit(&gpu->counters.inflight_bytes, memory_order_relaxed);

    /* Who has the claim on staging waits for nobody's claim: two that wait for each other's would
     * wait for ever. */
    if (gpu->budget_claim != NULL && gpu->budget_claim != lane && gpu->staging_claim != lane)
        return false;
    if (inflight_bytes > 0 &&
        (inflight_bytes >= gpu->config.inflight_bytes_max ||
         member->budget_bytes > gpu->config.inflight_bytes_max - inflight_bytes)) {
        gpu->budget_claim = lane;
        return false;
    }
    kvt_worker_count(&gpu->counters.inflight_bytes, member->budget_bytes);
    return true;
}

static bool staging_take(struct kvt_gpu *gpu, struct kvt_gpu_lane *lane,
                         struct kvt_gpu_member *member)
{
    if (member->device_bytes == 0 && member->pinned_bytes == 0)
        return true;
    if (gpu->staging_claim != NULL && gpu->staging_claim != lane)
        return false;
    if (!kvt_gpu_staging_take(&gpu->staging, member->device_bytes, &member->device_run)) {
        gpu->staging_claim = lane;
        return false;
    }
    if (!kvt_gpu_staging_take(&gpu->pinned, member->pinned_bytes, &member->pinned_run)) {
        kvt_gpu_staging_give(&gpu->staging, &member->device_run);
        gpu->staging_claim = lane;
        return false;
    }
    return true;
}

/* All that goes up the CPU reads before it is queued, and nothing else. */
static bool has_work_in(const struct kvt_gpu_flight *flight)
{
    return flight->lane == KVT_GPU_LANE_UP;
}

/* Whether @member may travel with those that are in @flight already. */
static bool does_fit(const struct kvt_gpu *gpu, struct kvt_gpu_flight *flight,
                     const struct kvt_gpu_member *member)
{
    bool has_quant = member->is_quantise || member->is_dequantise;
    uint64_t cpu_bytes_max = (uint64_t)KVT_GPU_CPU_BYTES_MAX * KVT_MAX(gpu->hands.count, 1u);
    uint64_t bytes_max = has_work_in(flight) ? cpu_bytes_max : KVT_GPU_FLIGHT_BYTES_MAX;

    if (flight->members_count > 0 && flight->bytes + member->budget_bytes > bytes_max)
        return false;
    if (has_quant && flight->has_quant &&
        memcmp(&flight->quant, &member->view->layout->quant, sizeof(flight->quant)) != 0)
        return false;
    return kvt_gpu_lists_fit(flight, member);
}

static void flight_add(struct kvt_gpu *gpu, struct kvt_gpu_flight *flight, uint64_t now_ns)
{
    struct kvt_gpu_member *member = &flight->members[flight->members_count++];

    flight->bytes += member->budget_bytes;
    if (member->is_quantise || member->is_dequantise) {
        flight->quant = member->view->layout->quant;
        flight->has_quant = true;
    }
    kvt_gpu_plan_place(gpu, member);
    member->xfer->started_ns = now_ns;
    /* From now on nobody knows what is there. */
    if (member->xfer->dst.kind == KVT_PLACE_DEVICE)
        kvt_ledger_forget(gpu->ledger, member->slot_offset_bytes);
}

static bool flight_fill(struct kvt_gpu *gpu, struct kvt_gpu_flight *flight, uint64_t now_ns)
{
    struct kvt_gpu_lane *lane = &gpu->lanes[flight->lane];
    bool has_moved = false;

    while (flight->members_count < KVT_GPU_MEMBERS_MAX && !lane_is_empty(lane)) {
        struct kvt_gpu_member *member = &flight->members[flight->members_count];
        struct kvt_worker_queue *queue = lane_first(lane);
        struct kvt_xfer *xfer = queue->head;
        int status =
            kvt_worker_is_late(xfer, now_ns) ? KVT_XFER_LATE : kvt_gpu_plan(gpu, xfer, member);

        if (status == 0) {
            if (!does_fit(gpu, flight, member) || !staging_take(gpu, lane, member))
                break;
            if (!budget_take(gpu, lane, member)) {
                kvt_gpu_staging_give(&gpu->staging, &member->device_run);
                kvt_gpu_staging_give(&gpu->pinned, &member->pinned_run);
                break;
            }
        }
        lane_pop(lane, queue);
        claims_drop(gpu, lane);
        has_moved = true;
        if (status == 0)
            flight_add(gpu, flight, now_ns);
        else
            kvt_gpu_refuse(gpu, xfer, status, now_ns);
    }
    return has_moved;
}

bool kvt_gpu_lanes_start(struct kvt_gpu *gpu, uint64_t now_ns)
{
    bool has_moved = false;

    for (uint32_t l = 0; l < KVT_GPU_LANES; l++) {
        struct kvt_gpu_lane *lane = &gpu->lanes[l];

        if (lane_is_empty(lane))
            claims_drop(gpu, lane);
        while (!lane_is_empty(lane) &&
               lane->flights_count < gpu->config.streams * KVT_GPU_STREAM_FLIGHTS) {
            struct kvt_gpu_flight *flight = kvt_gpu_flight_new(gpu, (enum kvt_gpu_lane_id)l);

            has_moved |= flight_fill(gpu, flight, now_ns);
            if (flight->members_count == 0) {
                kvt_gpu_flight_back(gpu, flight);
                break;
            }
            if (!has_work_in(flight))
                kvt_gpu_queue_begin(flight);
        }
    }
    return has_moved;
}

/* Ends what @is_ended says of a list, keeps the order of the rest. */
static bool queue_filter(struct kvt_gpu *gpu, struct kvt_worker_queue *queue, bool is_all,
                         int status, uint64_t now_ns)
{
    struct kvt_worker_queue kept = {0};
    bool has_moved = false;

    while (queue->head != NULL) {
        struct kvt_xfer *xfer = kvt_worker_queue_pop(queue);

        if (is_all || kvt_worker_is_late(xfer, now_ns)) {
            xfer->verdict = KVT_SLOT_OK;
            kvt_gpu_refuse(gpu, xfer, status, now_ns);
            has_moved = true;
        } else {
            kvt_worker_queue_push(&kept, xfer);
        }
    }
    *queue = kept;
    return has_moved;
}

static bool lanes_filter(struct kvt_gpu *gpu, bool is_all, int status, uint64_t now_ns)
{
    bool has_moved = false;

    for (uint32_t l = 0; l < KVT_GPU_LANES; l++) {
        has_moved |= queue_filter(gpu, &gpu->lanes[l].foreground, is_all, status, now_ns);
        has_moved |= queue_filter(gpu, &gpu->lanes[l].background, is_all, status, now_ns);
    }
    return has_moved;
}

bool kvt_gpu_lanes_sweep(struct kvt_gpu *gpu, uint64_t now_ns)
{
    if (now_ns - gpu->swept_ns < SWEEP_NS)
        return false;
    gpu->swept_ns = now_ns;
    return lanes_filter(gpu, false, KVT_XFER_LATE, now_ns);
}

bool kvt_gpu_lanes_end_all(struct kvt_gpu *gpu, int status, uint64_t now_ns)
{
    gpu->staging_claim = gpu->budget_claim = NULL;
    return lanes_filter(gpu, true, status, now_ns);
}
