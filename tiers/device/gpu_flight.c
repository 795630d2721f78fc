/* Flights: made, looked at, ended.
 *
 * What a flight used is given back use by use, each behind a question of its own (wait.c), so the
 * rule "not before the event" stands once for each of them. */
#include <string.h>

#include "tiers/device/gpu_internal.h"

struct kvt_gpu_flight *kvt_gpu_flight_new(struct kvt_gpu *gpu, enum kvt_gpu_lane_id lane_id)
{
    struct kvt_gpu_lane *lane = &gpu->lanes[lane_id];
    struct kvt_gpu_flight *flight;
    uint32_t idx = 0;

    while (gpu->flights[idx].state != KVT_GPU_FLIGHT_FREE)
        KVT_ASSERT(++idx < gpu->flights_count);
    KVT_ASSERT(gpu->areas_free_count > 0);
    flight = &gpu->flights[idx];
    memset(flight, 0, offsetof(struct kvt_gpu_flight, members));
    flight->lane = lane_id;
    flight->event = gpu->memory.events[idx];
    flight->pinned_found = (uint64_t *)gpu->memory.pinned_found + idx * KVT_GPU_MEMBERS_MAX;
    flight->stream = gpu->memory.streams[lane_id * KVT_GPU_STREAMS_MAX + lane->stream_next];
    flight->area = gpu->areas_free[--gpu->areas_free_count];
    flight->state = KVT_GPU_FLIGHT_CPU_IN;
    lane->stream_next = (lane->stream_next + 1) % gpu->config.streams;
    lane->flights_count++;
    gpu->flights_busy++;
    return flight;
}

static void area_give(struct kvt_gpu *gpu, struct kvt_gpu_flight *flight)
{
    gpu->areas_free[gpu->areas_free_count++] = flight->area;
    flight->area = NULL;
}

void kvt_gpu_flight_back(struct kvt_gpu *gpu, struct kvt_gpu_flight *flight)
{
    if (flight->area != NULL)
        area_give(gpu, flight);
    flight->state = KVT_GPU_FLIGHT_FREE;
    gpu->lanes[flight->lane].flights_count--;
    gpu->flights_busy--;
}

void kvt_gpu_flight_run(struct kvt_gpu *gpu, struct kvt_gpu_flight *flight)
{
    flight->state = KVT_GPU_FLIGHT_RUNNING;
    flight->run_ns = gpu->turned_ns;
    for (uint32_t i = 0; i < flight->members_count; i++) {
        const struct kvt_gpu_member *member = &flight->members[i];

        flight->has_staging = flight->has_staging || member->device_run.chunks_count > 0 ||
                              member->pinned_run.chunks_count > 0;
        flight->out_left += member->is_out && !flight->is_failed;
    }
}

/* A question that cannot be answered is asked again; only that there will be no answer any more is
 * taken for one. */
static bool is_over(struct kvt_gpu *gpu, struct kvt_gpu_flight *flight, enum kvt_gpu_wait why)
{
    int r = kvt_gpu_is_over(gpu->calls, flight->event, why);

    if (r < 0 && (kvt_cuda_is_sticky(-r) || ++flight->doubts == KVT_GPU_DOUBTS_MAX))
        kvt_gpu_lose(gpu, -r);
    else if (r == 0 && gpu->turned_ns - flight->run_ns > gpu->config.hang_ns)
        kvt_gpu_lose(gpu, KVT_CUDA_LAUNCH_TIMEOUT);
    return r == 1;
}

/* Of members whose bytes are still to be read on the CPU, pinned staging is given back there. */
static void staging_give(struct kvt_gpu *gpu, struct kvt_gpu_flight *flight)
{
    for (uint32_t i = 0; i < flight->members_count; i++) {
        struct kvt_gpu_member *member = &flight->members[i];

        if (member->device_run.chunks_count > 0)
            kvt_gpu_staging_give(&gpu->staging, &member->device_run);
        if (member->pinned_run.chunks_count > 0 && (!member->is_out || flight->is_failed))
            kvt_gpu_staging_give(&gpu->pinned, &member->pinned_run);
    }
    flight->has_staging = false;
}

static void checks_read(struct kvt_gpu_flight *flight)
{
    for (uint32_t i = 0; i < flight->members_count; i++) {
        struct kvt_gpu_member *member = &flight->members[i];

        member->is_found = member->is_check || member->is_job_checked;
        member->found = flight->pinned_found[i];
    }
    flight->is_checks_read = true;
}

static void count_path(struct kvt_gpu_counters *counters, enum kvt_gpu_path path, uint64_t bytes)
{
    kvt_worker_count(&counters->path_transfers[path], 1);
    kvt_worker_count(&counters->path_bytes[path], bytes);
}

static void count_done(struct kvt_gpu *gpu, const struct kvt_gpu_member *member)
{
    struct kvt_tier_counters *tier = &gpu->worker.tier.counters;
    struct kvt_gpu_counters *counters = &gpu->counters;
    const struct kvt_xfer *xfer = member->xfer;
    bool is_write = xfer->src.kind == KVT_PLACE_CLIENT || xfer->dst.kind == KVT_PLACE_DEVICE;
    uint64_t bytes =
        member->view != NULL ? kvt_client_view_bytes(member->view) : member->stored_bytes;

    if (member->is_gather)
        count_path(counters,
                   member->is_by_runs ? KVT_GPU_FROM_ENGINE_COPY : KVT_GPU_FROM_ENGINE_KERNEL,
                   bytes);
    if (member->is_scatter)
        count_path(counters, member->is_by_runs ? KVT_GPU_TO_ENGINE_COPY : KVT_GPU_TO_ENGINE_KERNEL,
                   bytes);
    if (member->is_up)
        count_path(counters, member->pinned_bytes > 0 ? KVT_GPU_STAGED_UP : KVT_GPU_FROM_HOST,
                   member->host_bytes);
    if (member->is_down)
        count_path(counters, member->pinned_bytes > 0 ? KVT_GPU_STAGED_DOWN : KVT_GPU_TO_HOST,
                   member->host_bytes);
    if (member->is_quantise)
        kvt_worker_count(&counters->quantised_bytes, member->raw_bytes);
    if (member->is_dequantise)
        kvt_worker_count(&counters->dequantised_bytes, member->range_bytes);
    if (member->is_found || member->is_summed)
        kvt_worker_count(&counters->checked_bytes, member->stored_bytes);
    if (xfer->src.kind == KVT_PLACE_DEVICE && !member->is_expected)
        kvt_worker_count(&counters->unchecked_transfers, 1);
    kvt_worker_count(is_write ? &tier->writes : &tier->reads, 1);
    kvt_worker_count(is_write ? &tier->written_bytes : &tier->read_bytes, bytes);
}

bool kvt_gpu_member_is_bad(struct kvt_gpu *gpu, struct kvt_gpu_member *member)
{
    if ((!member->is_expected || !member->is_found || member->expected == member->found) &&
        (!member->is_expected || !member->is_summed || member->expected == member->summed) &&
        (!member->is_found || !member->is_summed || member->found == member->summed))
        return false;
    kvt_worker_count(&gpu->counters.bad_checks, 1);
    member->xfer->verdict = KVT_SLOT_BAD_PAYLOAD;
    kvt_gpu_member_end(member, KVT_XFER_BAD_SLOT);
    return true;
}

static void member_finish(struct kvt_gpu *gpu, struct kvt_gpu_member *member, uint64_t now_ns)
{
    if (!member->is_ended && !kvt_gpu_member_is_bad(gpu, member)) {
        kvt_gpu_member_end(member, KVT_XFER_DONE);
        if (member->xfer->dst.kind == KVT_PLACE_DEVICE)
            kvt_ledger_put(gpu->ledger, member->slot_offset_bytes, &member->xfer->key,
                           member->is_found, member->found);
        count_done(gpu, member);
    }
    atomic_fetch_sub_explicit(&gpu->counters.inflight_bytes, member->budget_bytes,
                              memory_order_relaxed);
    kvt_worker_finish(&gpu->worker, member->xfer, now_ns);
    member->xfer = NULL;
}

static void flight_finish(struct kvt_gpu *gpu, struct kvt_gpu_flight *flight, uint64_t now_ns)
{
    for (uint32_t i = 0; i < flight->members_count; i++) {
        struct kvt_gpu_member *member = &flight->members[i];

        if (flight->is_failed && !member->is_ended)
            kvt_gpu_member_end(member, -EIO);
        member_finish(gpu, member, now_ns);
    }
    KVT_ASSERT(!flight->has_staging);
    kvt_gpu_flight_back(gpu, flight);
}

bool kvt_gpu_flight_poll(struct kvt_gpu *gpu, struct kvt_gpu_flight *flight, uint64_t now_ns)
{
    bool has_moved = false;

    /* Copies alone have no descriptors. */
    if (flight->area != NULL &&
        (flight->area_used_bytes == 0 || is_over(gpu, flight, KVT_GPU_WAIT_LISTS))) {
        area_give(gpu, flight);
        has_moved = true;
    }
    if (flight->has_staging && is_over(gpu, flight, KVT_GPU_WAIT_STAGING_FREE)) {
        staging_give(gpu, flight);
        has_moved = true;
    }
    if (flight->has_checks && !flight->is_checks_read && !flight->is_failed &&
        is_over(gpu, flight, KVT_GPU_WAIT_CHECK)) {
        checks_read(flight);
        has_moved = true;
    }
    if (flight->out_left > 0 && !flight->is_out_ready &&
        is_over(gpu, flight, KVT_GPU_WAIT_STAGING_FILLED))
        flight->is_out_ready = has_moved = true;
    if (flight->out_left > 0 || flight->has_staging || flight->area != NULL ||
        (flight->has_checks && !flight->is_checks_read && !flight->is_failed) ||
        !kvt_gpu_is_back(flight->pieces_out, KVT_GPU_WAIT_HANDS_OUT) ||
        !is_over(gpu, flight, KVT_GPU_WAIT_FINISH))
        return has_moved;
    flight_finish(gpu, flight, now_ns);
    return true;
}

void kvt_gpu_flights_end_all(struct kvt_gpu *gpu, bool is_queued, uint64_t now_ns)
{
    for (uint32_t f = 0; f < gpu->flights_count; f++) {
        struct kvt_gpu_flight *flight = &gpu->flights[f];

        if (flight->state == KVT_GPU_FLIGHT_FREE ||
            (flight->state != KVT_GPU_FLIGHT_CPU_IN && !is_queued))
            continue;
        for (uint32_t i = 0; i < flight->members_count; i++) {
            kvt_gpu_member_end(&flight->members[i], KVT_XFER_OUT_OF_SERVICE);
            flight->members[i].xfer->verdict = KVT_SLOT_OK;
            member_finish(gpu, &flight->members[i], now_ns);
        }
        kvt_gpu_flight_back(gpu, flight);
    }
}
