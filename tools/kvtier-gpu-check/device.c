/* Memory, copies and waits of the parts. Waits poll, as the device tier does, and give up after a
 * bounded time: a device that hangs is a row, not a program that hangs. */
#include "tools/kvtier-gpu-check/gpu_check.h"

#include <sched.h>

#include "daemon/base/clock.h"

bool gpu_check_ok(struct gpu_check *check, int error, const char *what)
{
    if (error == KVT_CUDA_OK && !check->is_broken)
        return true;
    if (check->is_broken) /* a row was made of what broke it */
        return false;
    return gpu_check_failed(check, "device", what, error);
}

bool gpu_check_open(struct gpu_check *check)
{
    return gpu_check_ok(check, check->calls->set_device(check->options.device), "set_device") &&
           gpu_check_ok(check, check->calls->stream_new(&check->stream), "stream_new") &&
           gpu_check_ok(check, check->calls->event_new(&check->event), "event_new");
}

void gpu_check_close(struct gpu_check *check)
{
    if (check->event != NULL)
        (void)check->calls->event_free(check->event);
    if (check->stream != NULL)
        (void)check->calls->stream_free(check->stream);
    check->event = check->stream = NULL;
}

bool gpu_check_memory_new(struct gpu_check *check, struct gpu_check_memory *ret_memory,
                          uint64_t bytes, bool has_host)
{
    void *host = NULL;

    *ret_memory = (struct gpu_check_memory){.bytes = bytes};
    if (!gpu_check_ok(check, check->calls->alloc(bytes, &ret_memory->device), "alloc"))
        return false;
    if (has_host && !gpu_check_ok(check, check->calls->alloc_pinned(bytes, &host), "alloc_pinned"))
        return false;
    ret_memory->host = host;
    return true;
}

void gpu_check_memory_free(struct gpu_check *check, struct gpu_check_memory *memory)
{
    if (memory->device != 0)
        (void)check->calls->free(memory->device);
    if (memory->host != NULL)
        (void)check->calls->free_pinned(memory->host);
    *memory = (struct gpu_check_memory){0};
}

bool gpu_check_wait(struct gpu_check *check)
{
    uint64_t end_ns = kvt_clock_mono_ns() + GPU_CHECK_WAIT_NS_MAX;
    int error =
        check->is_broken ? KVT_CUDA_OK : check->calls->event_record(check->event, check->stream);

    if (!gpu_check_ok(check, error, "event_record"))
        return false;
    for (;;) {
        error = check->calls->event_query(check->event);
        if (error != KVT_CUDA_NOT_READY)
            return gpu_check_ok(check, error, "what was queued");
        if (kvt_clock_mono_ns() > end_ns)
            return gpu_check_failed(check, "device", "what was queued does not end", 0);
        (void)sched_yield();
    }
}

bool gpu_check_upload(struct gpu_check *check, const struct gpu_check_memory *memory,
                      uint64_t bytes)
{
    return !check->is_broken &&
           gpu_check_ok(check,
                        check->calls->copy(memory->device, (uintptr_t)memory->host, bytes,
                                           KVT_CUDA_H2D, check->stream),
                        "copy to the device") &&
           gpu_check_wait(check);
}

bool gpu_check_download(struct gpu_check *check, const struct gpu_check_memory *memory,
                        uint64_t bytes)
{
    return !check->is_broken &&
           gpu_check_ok(check,
                        check->calls->copy((uintptr_t)memory->host, memory->device, bytes,
                                           KVT_CUDA_D2H, check->stream),
                        "copy to the host") &&
           gpu_check_wait(check);
}

bool gpu_check_is_late(const struct gpu_check *check)
{
    return kvt_clock_mono_ns() >= check->part_end_ns;
}

/* splitmix64 */
uint64_t gpu_check_random(uint64_t *state)
{
    return gpu_check_word(*state += 0x9e3779b97f4a7c15ull);
}

uint64_t gpu_check_below(uint64_t *state, uint64_t below)
{
    return gpu_check_random(state) % below;
}

uint64_t gpu_check_word(uint64_t index)
{
    uint64_t x = index;

    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}
