/* What a flight does on its stream, as a table of steps. Each goes through the members that take
 * part in it; a launch does all of them at once. The number of calls to the copy engine in a turn
 * is bounded: a flight with more goes on in the next turn, at the same member and run. */
#include "tiers/device/gpu_internal.h"

enum outcome { MORE, DONE, FAILED };
typedef enum outcome (*step_fn)(struct kvt_gpu *gpu, struct kvt_gpu_flight *flight);

static enum outcome outcome_of(struct kvt_gpu *gpu, int error)
{
    return kvt_gpu_worked(gpu, error) ? DONE : FAILED;
}

static enum outcome step_lists(struct kvt_gpu *gpu, struct kvt_gpu_flight *flight)
{
    kvt_gpu_lists_write(flight);
    if (flight->area_used_bytes == 0)
        return DONE;
    return outcome_of(gpu, gpu->calls->copy(flight->area->device,
                                            (uint64_t)(uintptr_t)flight->area->pinned,
                                            flight->area_used_bytes, KVT_CUDA_H2D, flight->stream));
}

typedef bool (*takes_part_fn)(const struct kvt_gpu_member *member);
typedef enum outcome (*member_fn)(struct kvt_gpu *gpu, struct kvt_gpu_flight *flight,
                                  struct kvt_gpu_member *member);

/* One member after the other, from at_member. */
static enum outcome each(struct kvt_gpu *gpu, struct kvt_gpu_flight *flight,
                         takes_part_fn takes_part, member_fn fn)
{
    for (; flight->at_member < flight->members_count; flight->at_member++) {
        struct kvt_gpu_member *member = &flight->members[flight->at_member];
        enum outcome outcome;

        if (member->is_ended || !takes_part(member))
            continue;
        if (gpu->copies_left == 0)
            return MORE;
        outcome = fn(gpu, flight, member);
        if (outcome != DONE)
            return outcome;
    }
    return DONE;
}

static enum outcome copy(struct kvt_gpu *gpu, struct kvt_gpu_flight *flight, uint64_t dst,
                         uint64_t src, uint64_t bytes, enum kvt_cuda_direction direction)
{
    gpu->copies_left--;
    return outcome_of(gpu, gpu->calls->copy(dst, src, bytes, direction, flight->stream));
}

static bool is_up(const struct kvt_gpu_member *member)
{
    return member->is_up;
}

static enum outcome copy_up(struct kvt_gpu *gpu, struct kvt_gpu_flight *flight,
                            struct kvt_gpu_member *member)
{
    return copy(gpu, flight, member->host_device, (uint64_t)(uintptr_t)member->host,
                member->host_bytes, KVT_CUDA_H2D);
}

static enum outcome step_up(struct kvt_gpu *gpu, struct kvt_gpu_flight *flight)
{
    return each(gpu, flight, is_up, copy_up);
}

static bool is_down(const struct kvt_gpu_member *member)
{
    return member->is_down;
}

static enum outcome copy_down(struct kvt_gpu *gpu, struct kvt_gpu_flight *flight,
                              struct kvt_gpu_member *member)
{
    return copy(gpu, flight, (uint64_t)(uintptr_t)member->host, member->host_device,
                member->host_bytes, KVT_CUDA_D2H);
}

static enum outcome step_down(struct kvt_gpu *gpu, struct kvt_gpu_flight *flight)
{
    return each(gpu, flight, is_down, copy_down);
}

static enum outcome copy_runs(struct kvt_gpu *gpu, struct kvt_gpu_flight *flight,
                              struct kvt_gpu_member *member)
{
    struct kvt_gpu_run_at run;

    if (!flight->is_walking)
        kvt_gpu_runs_init(&flight->runs, member->view, member->range_offset);
    flight->is_walking = true;
    while (gpu->copies_left > 0) {
        uint64_t payload;
        enum outcome outcome;

        if (!kvt_gpu_runs_next(&flight->runs, &run)) {
            flight->is_walking = false;
            return DONE;
        }
        payload = member->raw + run.payload_offset;
        outcome = member->is_gather
                      ? copy(gpu, flight, payload, run.address, run.bytes, KVT_CUDA_D2D)
                      : copy(gpu, flight, run.address, payload, run.bytes, KVT_CUDA_D2D);
        if (outcome != DONE)
            return outcome;
    }
    return MORE;
}

static bool is_gather_by_runs(const struct kvt_gpu_member *member)
{
    return member->is_gather && member->is_by_runs;
}

static enum outcome step_gather_runs(struct kvt_gpu *gpu, struct kvt_gpu_flight *flight)
{
    return each(gpu, flight, is_gather_by_runs, copy_runs);
}

static bool is_scatter_by_runs(const struct kvt_gpu_member *member)
{
    return member->is_scatter && member->is_by_runs;
}

static enum outcome step_scatter_runs(struct kvt_gpu *gpu, struct kvt_gpu_flight *flight)
{
    return each(gpu, flight, is_scatter_by_runs, copy_runs);
}

/* A launch of @jobs_count jobs that answered @result: kernels have results of their own. */
static enum outcome launched(struct kvt_gpu *gpu, uint32_t jobs_count, int result)
{
    KVT_ASSERT(result >= 0 || result == -EINVAL);
    kvt_worker_count(&gpu->counters.launches, 1);
    kvt_worker_count(&gpu->counters.launched_jobs, jobs_count);
    return outcome_of(gpu, result < 0 ? KVT_CUDA_INVALID_VALUE : result);
}

/* IN and DOWN gather, OUT and UP scatter: a flight never does both. */
static bool is_gathering(const struct kvt_gpu_flight *flight)
{
    return flight->lane == KVT_GPU_LANE_IN || flight->lane == KVT_GPU_LANE_DOWN;
}

static enum outcome step_gather(struct kvt_gpu *gpu, struct kvt_gpu_flight *flight)
{
    const struct kvt_copy_batch *batch = &flight->batches.copies;

    if (batch->jobs_count == 0 || !is_gathering(flight))
        return DONE;
    return launched(gpu, batch->jobs_count, gpu->calls->kernels->gather(flight->stream, batch));
}

static enum outcome step_quantise(struct kvt_gpu *gpu, struct kvt_gpu_flight *flight)
{
    const struct kvt_quant_batch *batch = &flight->batches.quantise;

    if (batch->jobs_count == 0)
        return DONE;
    return launched(gpu, batch->jobs_count, gpu->calls->kernels->quantise(flight->stream, batch));
}

static enum outcome step_check(struct kvt_gpu *gpu, struct kvt_gpu_flight *flight)
{
    const struct kvt_check_batch *batch = &flight->batches.checks;

    if (batch->jobs_count == 0)
        return DONE;
    return launched(gpu, batch->jobs_count, gpu->calls->kernels->check(flight->stream, batch));
}

static enum outcome step_dequantise(struct kvt_gpu *gpu, struct kvt_gpu_flight *flight)
{
    const struct kvt_quant_batch *batch = &flight->batches.dequantise;

    if (batch->jobs_count == 0)
        return DONE;
    return launched(gpu, batch->jobs_count, gpu->calls->kernels->dequantise(flight->stream, batch));
}

static enum outcome step_scatter(struct kvt_gpu *gpu, struct kvt_gpu_flight *flight)
{
    const struct kvt_copy_batch *batch = &flight->batches.copies;

    if (batch->jobs_count == 0 || is_gathering(flight))
        return DONE;
    return launched(gpu, batch->jobs_count, gpu->calls->kernels->scatter(flight->stream, batch));
}

static enum outcome step_checks_back(struct kvt_gpu *gpu, struct kvt_gpu_flight *flight)
{
    if (!flight->has_checks)
        return DONE;
    return outcome_of(gpu, gpu->calls->copy((uint64_t)(uintptr_t)flight->pinned_found,
                                            flight->area->device, kvt_gpu_lists_checks_bytes(),
                                            KVT_CUDA_D2H, flight->stream));
}

/* Without this nobody would know when the flight is over, so it is tried again. */
static enum outcome step_record(struct kvt_gpu *gpu, struct kvt_gpu_flight *flight)
{
    int error = gpu->calls->event_record(flight->event, flight->stream);

    if (kvt_gpu_worked(gpu, error))
        return DONE;
    if (++flight->doubts == KVT_GPU_DOUBTS_MAX)
        kvt_gpu_lose(gpu, error);
    return MORE;
}

static const step_fn steps[] = {
    step_lists,    step_up,    step_gather_runs, step_gather,
    step_quantise, step_check, step_dequantise,  step_scatter_runs,
    step_scatter,  step_down,  step_checks_back, step_record,
};
#define STEP_RECORD (KVT_COUNT_OF(steps) - 1u)

void kvt_gpu_queue_begin(struct kvt_gpu_flight *flight)
{
    flight->state = KVT_GPU_FLIGHT_QUEUE;
    flight->step = 0;
    flight->at_member = 0;
    flight->is_walking = false;
}

bool kvt_gpu_queue(struct kvt_gpu *gpu, struct kvt_gpu_flight *flight)
{
    uint32_t copies_left = gpu->copies_left;
    bool has_moved = false;

    while (kvt_gpu_service(gpu) == KVT_GPU_SERVING) {
        enum outcome outcome = steps[flight->step](gpu, flight);

        /* Copies within a step move it on; an event that is to be recorded again does not. */
        if (outcome == MORE)
            return has_moved || gpu->copies_left != copies_left;
        has_moved = true;
        flight->at_member = 0;
        if (outcome == FAILED) {
            flight->is_failed = true;
            flight->step = STEP_RECORD;
            continue;
        }
        if (flight->step++ == STEP_RECORD) {
            kvt_gpu_flight_run(gpu, flight);
            return true;
        }
    }
    return has_moved;
}
