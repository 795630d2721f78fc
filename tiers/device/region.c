/* Memory of engines on GPUs, opened by its CUDA IPC handle.
 *
 * A handle stands for a whole allocation, and an engine's regions may lie in one (caching
 * allocators make few large ones): it is opened once and its users are counted. Handles, offsets
 * and sizes are a client's, any bytes. Freeing the memory while it is open here is undefined in
 * CUDA: the next copy may lose the context (recover.c).
 *
 * Every refusal says what the client can do, since it is what a person reads in its log. */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "daemon/base/clock.h"
#include "tiers/device/set.h"

#define LOCK_PAUSE_NS KVT_NS_PER_MS
#define RESET_LONG_NS (2u * KVT_NS_PER_S)
#define HOST_INSTEAD "register host memory (a memfd) instead"

/* ---- refusals ---------------------------------------------------------------------------------
 */

static int refuse(int result, char ret_why[KVT_DEVICE_WHY_BYTES], const char *format, ...)
    KVT_PRINTF(3, 4);
static int refuse(int result, char ret_why[KVT_DEVICE_WHY_BYTES], const char *format, ...)
{
    va_list args;

    va_start(args, format);
    (void)vsnprintf(ret_why, KVT_DEVICE_WHY_BYTES, format, args);
    va_end(args);
    return result;
}

static bool is_uuid(const struct kvt_device_gpu *gpu, const uint8_t uuid[KVT_CUDA_UUID_BYTES])
{
    return memcmp(gpu->info.uuid, uuid, KVT_CUDA_UUID_BYTES) == 0;
}

static int refuse_unknown(const struct kvt_device_set *set, const uint8_t *uuid,
                          char ret_why[KVT_DEVICE_WHY_BYTES])
{
    char text[KVT_GPU_UUID_TEXT_BYTES];

    kvt_gpu_uuid_text(uuid, text);
    for (uint32_t i = 0; i < set->refused_count; i++)
        if (set->refused[i].index >= 0 && is_uuid(&set->refused[i], uuid))
            return refuse(KVT_REGION_E_NO_GPU, ret_why, "%s is not used: %.80s; " HOST_INSTEAD,
                          text, set->refused[i].why);
    return refuse(KVT_REGION_E_NO_GPU, ret_why,
                  "%s is not one of tiers.l1.gpus: add it there, or " HOST_INSTEAD, text);
}

static int refuse_lost(struct kvt_device_member *member, char ret_why[KVT_DEVICE_WHY_BYTES])
{
    kvt_doorbell_ring(&member->bell);
    return refuse(KVT_REGION_E_LOST, ret_why,
                  "GPU %d is out of service: attach again in some seconds, or " HOST_INSTEAD,
                  member->about.index);
}

static int refuse_many(const struct kvt_device_member *member, char ret_why[KVT_DEVICE_WHY_BYTES])
{
    return refuse(
        KVT_REGION_E_MANY, ret_why,
        "%u allocations of engines are open on GPU %d, the most there can be: detach what "
        "is not used and attach again, or register fewer, larger ones",
        KVT_DEVICE_HANDLES_MAX, member->about.index);
}

static int refuse_handle(struct kvt_device_member *member, int error,
                         char ret_why[KVT_DEVICE_WHY_BYTES])
{
    if (kvt_device_note_error(member, error))
        return refuse_lost(member, ret_why);
    return refuse(KVT_REGION_E_HANDLE, ret_why,
                  "CUDA does not open the handle: %.32s (%d): is it cudaIpcGetMemHandle's, not of "
                  "a pool or expandable segments, of a live process? That may have to run as "
                  "kvtierd's user",
                  member->set->calls->error_name(error), error);
}

/* ---- the table of handles: with `calls` held --------------------------------------------------
 */

static struct kvt_device_handle *find_handle(struct kvt_device_member *member,
                                             const uint8_t handle[KVT_CUDA_IPC_HANDLE_BYTES])
{
    for (uint32_t i = 0; i < member->handles_count; i++)
        if (memcmp(member->handles[i].handle, handle, KVT_CUDA_IPC_HANDLE_BYTES) == 0)
            return &member->handles[i];
    return NULL;
}

static void close_handle(struct kvt_device_member *member, struct kvt_device_handle *open)
{
    const struct kvt_cuda_calls *calls = member->set->calls;
    int error = calls->set_device(member->about.index);

    KVT_ASSERT(open->users > 0);
    if (--open->users > 0)
        return;
    /* Nobody comes back to it: what is not closed now is the engine's memory that stays taken. Some
     * answers may mean a loss or not; one that is lost says so again. */
    if (error != KVT_CUDA_OK)
        error = calls->set_device(member->about.index);
    if (error == KVT_CUDA_OK)
        error = calls->ipc_close(open->address);
    (void)kvt_device_note_error(member, error);
    *open = member->handles[--member->handles_count];
}

#define NO_ROOM (-1) /* no error of CUDA's */

/* 0, and *ret_open with one more user; NO_ROOM; or CUDA's error. What engines open before they are
 * refused as sessions, and what waits to be closed, counts, too: so the table may be full. */
static int take_handle(struct kvt_device_member *member,
                       const uint8_t handle[KVT_CUDA_IPC_HANDLE_BYTES],
                       struct kvt_device_handle **ret_open)
{
    struct kvt_device_handle *open = find_handle(member, handle);
    const struct kvt_cuda_calls *calls = member->set->calls;
    uint64_t address = 0, base = 0, bytes = 0;
    int error;

    if (open != NULL) {
        open->users++;
        *ret_open = open;
        return KVT_CUDA_OK;
    }
    if (member->handles_count >= KVT_DEVICE_HANDLES_MAX)
        return NO_ROOM;
    error = calls->set_device(member->about.index);
    if (error == KVT_CUDA_OK)
        error = calls->ipc_open(handle, &address);
    if (error != KVT_CUDA_OK)
        return error;
    error = calls->range_of(address, &base, &bytes);
    if (error != KVT_CUDA_OK || address - base > bytes) {
        (void)calls->ipc_close(address);
        return error != KVT_CUDA_OK ? error : KVT_CUDA_INVALID_VALUE;
    }
    open = &member->handles[member->handles_count++];
    *open = (struct kvt_device_handle){
        .address = address, .bytes = bytes - (address - base), .users = 1};
    memcpy(open->handle, handle, KVT_CUDA_IPC_HANDLE_BYTES);
    *ret_open = open;
    return KVT_CUDA_OK;
}

/* ---- regions ----------------------------------------------------------------------------------
 */

/* False: the member went out of service, and what was opened in @incarnation is gone. Its recovery
 * holds `calls` for long, and then it is; whoever else does is quick, but for another GPU's reset
 * that hangs: then what is open stays so until this one is reset, too, or closed. */
static bool lock_served(struct kvt_device_member *member, uint32_t incarnation)
{
    uint64_t until_ns = kvt_time_add(kvt_clock_mono_ns(), RESET_LONG_NS);
    const struct timespec pause = {.tv_nsec = LOCK_PAUSE_NS};

    for (;;) {
        if (!kvt_device_is_served(member) ||
            atomic_load_explicit(&member->served, memory_order_seq_cst) != incarnation)
            return false;
        if (pthread_mutex_trylock(&member->calls) == 0)
            break;
        if (kvt_clock_mono_ns() >= until_ns)
            return false;
        (void)nanosleep(&pause, NULL);
    }
    if (kvt_device_is_served(member) &&
        atomic_load_explicit(&member->served, memory_order_seq_cst) == incarnation)
        return true;
    KVT_ASSERT(pthread_mutex_unlock(&member->calls) == 0);
    return false;
}

static int open_on(struct kvt_device_member *member, const struct kvt_device_memory *memory,
                   struct kvt_region *ret_region, char ret_why[KVT_DEVICE_WHY_BYTES])
{
    uint32_t incarnation = atomic_load_explicit(&member->served, memory_order_seq_cst);
    struct kvt_device_handle *open;
    int error, r = 0;

    if (!lock_served(member, incarnation))
        return refuse_lost(member, ret_why);
    error = take_handle(member, memory->handle, &open);
    if (error == NO_ROOM) {
        r = refuse_many(member, ret_why);
    } else if (error != KVT_CUDA_OK) {
        r = refuse_handle(member, error, ret_why);
    } else if (memory->bytes == 0 || memory->offset_bytes > open->bytes ||
               memory->bytes > open->bytes - memory->offset_bytes) {
        r = refuse(KVT_REGION_E_OUTSIDE, ret_why,
                   "%llu bytes at offset %llu are not inside the allocation of %llu bytes: the "
                   "offset counts from the base of cudaMalloc's allocation",
                   (unsigned long long)memory->bytes, (unsigned long long)memory->offset_bytes,
                   (unsigned long long)open->bytes);
        close_handle(member, open);
    } else {
        *ret_region = (struct kvt_region){
            .base = (uint8_t *)(uintptr_t)(open->address + memory->offset_bytes),
            .bytes = memory->bytes,
            .is_gpu = true,
            .gpu_zone = member->zone,
            .incarnation = incarnation,
            .allocation = open->address};
    }
    KVT_ASSERT(pthread_mutex_unlock(&member->calls) == 0);
    return r;
}

int kvt_device_region_open(struct kvt_tier *tier, const struct kvt_device_memory *memory,
                           struct kvt_region *ret_region, char ret_why[KVT_DEVICE_WHY_BYTES])
{
    struct kvt_device_set *set = kvt_device_set_of(tier);

    if (set == NULL)
        return refuse(
            KVT_REGION_E_NO_GPU, ret_why,
            "kvtierd uses no GPU (tiers.l1.backend is not cuda, or no GPU works): " HOST_INSTEAD);
    for (uint32_t i = 0; i < set->members_count; i++) {
        struct kvt_device_member *member = &set->members[i];

        if (!is_uuid(&member->about, memory->uuid))
            continue;
        if (!member->about.info.has_ipc)
            return refuse(KVT_REGION_E_NO_GPU, ret_why,
                          "GPU %d cannot share memory between processes here: " HOST_INSTEAD,
                          member->about.index);
        return open_on(member, memory, ret_region, ret_why);
    }
    return refuse_unknown(set, memory->uuid, ret_why);
}

void kvt_device_region_close(struct kvt_tier *tier, struct kvt_region *region)
{
    struct kvt_device_set *set = kvt_device_set_of(tier);
    struct kvt_region closed = *region;
    struct kvt_device_member *member;
    uint32_t i = 0;

    *region = (struct kvt_region){0};
    if (set == NULL || !closed.is_gpu)
        return;
    KVT_ASSERT(closed.gpu_zone < set->members_count);
    member = &set->members[closed.gpu_zone];
    if (!lock_served(member, closed.incarnation))
        return;
    while (i < member->handles_count && member->handles[i].address != closed.allocation)
        i++;
    KVT_ASSERT(i < member->handles_count);
    close_handle(member, &member->handles[i]);
    KVT_ASSERT(pthread_mutex_unlock(&member->calls) == 0);
}
