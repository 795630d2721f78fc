/* What an incarnation of a GPU consists of on the device and in pinned memory. It is made in one go
 * when the GPU is opened and each time it is taken back; a lost context takes all of it along. */
#include "tiers/device/gpu_internal.h"

static uint64_t lists_bytes(const struct kvt_gpu *gpu)
{
    return (uint64_t)gpu->flights_count * KVT_GPU_AREA_BYTES;
}

static uint64_t found_bytes(const struct kvt_gpu *gpu)
{
    return gpu->flights_count * KVT_GPU_MEMBERS_MAX * sizeof(uint64_t);
}

static int make_memory(struct kvt_gpu *gpu)
{
    const struct kvt_cuda_calls *calls = gpu->calls;
    struct kvt_gpu_memory *memory = &gpu->memory;
    int error;

    error = calls->alloc(gpu->config.arena_bytes, &memory->arena);
    if (error == KVT_CUDA_OK)
        error = calls->alloc(kvt_gpu_staging_bytes(&gpu->staging), &memory->staging);
    if (error == KVT_CUDA_OK)
        error = calls->alloc(lists_bytes(gpu), &memory->lists);
    if (error == KVT_CUDA_OK)
        error = calls->alloc_pinned(kvt_gpu_staging_bytes(&gpu->pinned), &memory->pinned_staging);
    if (error == KVT_CUDA_OK)
        error = calls->alloc_pinned(lists_bytes(gpu), &memory->pinned_lists);
    if (error == KVT_CUDA_OK)
        error = calls->alloc_pinned(found_bytes(gpu), &memory->pinned_found);
    return error;
}

static int make_streams(struct kvt_gpu *gpu)
{
    int error = KVT_CUDA_OK;

    for (uint32_t l = 0; l < KVT_GPU_LANES; l++)
        for (uint32_t s = 0; s < gpu->config.streams && error == KVT_CUDA_OK; s++)
            error = gpu->calls->stream_new(&gpu->memory.streams[l * KVT_GPU_STREAMS_MAX + s]);
    for (uint32_t e = 0; e < gpu->flights_count && error == KVT_CUDA_OK; e++)
        error = gpu->calls->event_new(&gpu->memory.events[e]);
    return error;
}

int kvt_gpu_memory_make(struct kvt_gpu *gpu, int *ret_error)
{
    int error = make_memory(gpu);

    if (error == KVT_CUDA_OK)
        error = make_streams(gpu);
    if (error == KVT_CUDA_OK)
        error = kvt_gpu_trial(gpu);
    if (error != KVT_CUDA_OK) {
        if (kvt_cuda_is_sticky(error))
            kvt_gpu_memory_forget(gpu);
        else
            kvt_gpu_memory_free(gpu);
        *ret_error = error;
        return kvt_trace(error == KVT_CUDA_NO_MEMORY ? -ENOMEM : -EIO);
    }
    kvt_gpu_staging_reset(&gpu->staging, gpu->memory.staging);
    kvt_gpu_staging_reset(&gpu->pinned, (uint64_t)(uintptr_t)gpu->memory.pinned_staging);
    gpu->areas_free_count = gpu->flights_count;
    for (uint32_t a = 0; a < gpu->flights_count; a++) {
        gpu->areas[a] = (struct kvt_gpu_area){
            .pinned = (uint8_t *)gpu->memory.pinned_lists + (uint64_t)a * KVT_GPU_AREA_BYTES,
            .device = gpu->memory.lists + (uint64_t)a * KVT_GPU_AREA_BYTES};
        gpu->areas_free[a] = &gpu->areas[a];
    }
    atomic_store_explicit(&gpu->arena, gpu->memory.arena, memory_order_release);
    return 0;
}

/* A call that does not free what it was given has nobody who could do more about it: the device's
 * memory is the process's until it ends. */
void kvt_gpu_memory_free(struct kvt_gpu *gpu)
{
    const struct kvt_cuda_calls *calls = gpu->calls;
    struct kvt_gpu_memory *memory = &gpu->memory;

    for (uint32_t e = 0; e < KVT_GPU_FLIGHTS_MAX; e++)
        if (memory->events[e] != NULL)
            (void)calls->event_free(memory->events[e]);
    for (uint32_t s = 0; s < KVT_GPU_STREAMS_TOTAL; s++)
        if (memory->streams[s] != NULL)
            (void)calls->stream_free(memory->streams[s]);
    if (memory->pinned_found != NULL)
        (void)calls->free_pinned(memory->pinned_found);
    if (memory->pinned_lists != NULL)
        (void)calls->free_pinned(memory->pinned_lists);
    if (memory->pinned_staging != NULL)
        (void)calls->free_pinned(memory->pinned_staging);
    if (memory->lists != 0)
        (void)calls->free(memory->lists);
    if (memory->staging != 0)
        (void)calls->free(memory->staging);
    if (memory->arena != 0)
        (void)calls->free(memory->arena);
    kvt_gpu_memory_forget(gpu);
}

void kvt_gpu_memory_forget(struct kvt_gpu *gpu)
{
    gpu->memory = (struct kvt_gpu_memory){0};
    atomic_store_explicit(&gpu->arena, 0, memory_order_release);
}
