/* What all who make calls on a GPU beside its own thread share: the janitor for regions, the
 * control thread for recovery, the main thread at the start. */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "tiers/device/set.h"

bool kvt_device_is_served(const struct kvt_device_member *member)
{
    const struct kvt_tier_counters *counters = &member->tier->counters;

    return atomic_load_explicit(&counters->incarnation, memory_order_seq_cst) ==
               atomic_load_explicit(&member->served, memory_order_seq_cst) &&
           atomic_load_explicit(&counters->health, memory_order_seq_cst) == KVT_TIER_HEALTH_OK;
}

bool kvt_device_note_error(struct kvt_device_member *member, int error)
{
    uint64_t free_bytes, total_bytes;

    /* Some of those numbers are also the answer to a handle that is no good (a client's, of our
     * own process): a context that is lost answers every call so. */
    if (!kvt_cuda_is_sticky(error) ||
        !kvt_cuda_is_sticky(member->set->calls->memory_info(&free_bytes, &total_bytes)))
        return false;
    kvt_gpu_lose(member->gpu, error);
    kvt_doorbell_ring(&member->bell);
    return true;
}

void kvt_device_say(struct kvt_device_member *member, enum kvt_gpu_state state, const char *format,
                    ...)
{
    va_list args;

    va_start(args, format);
    KVT_ASSERT(pthread_mutex_lock(&member->set->words) == 0);
    member->about.state = state;
    (void)vsnprintf(member->about.why, sizeof(member->about.why), format, args);
    KVT_ASSERT(pthread_mutex_unlock(&member->set->words) == 0);
    va_end(args);
}

int kvt_device_pin(struct kvt_device_set *set)
{
    return set->calls->pin(set->config.host_memory, set->config.host_memory_bytes);
}

void kvt_device_pin_say(struct kvt_device_set *set, int error)
{
    KVT_ASSERT(pthread_mutex_lock(&set->words) == 0);
    if (error == KVT_CUDA_OK)
        set->pin_why[0] = '\0';
    else
        (void)snprintf(set->pin_why, sizeof(set->pin_why), "%.64s (%d)%s",
                       set->calls->error_name(error), error,
                       error == KVT_CUDA_NO_MEMORY ? ": is LimitMEMLOCK=infinity set?" : "");
    KVT_ASSERT(pthread_mutex_unlock(&set->words) == 0);
}

void kvt_device_tell_pinned(struct kvt_device_member *member, bool is_pinned)
{
    kvt_gpu_set_host_pinned(member->gpu, is_pinned);
    atomic_store_explicit(&member->is_host_pinned, is_pinned, memory_order_seq_cst);
}

bool kvt_device_host_pin(const struct kvt_tier *tier, struct kvt_device_host_pin *ret_pin)
{
    struct kvt_device_set *set = kvt_device_set_of(tier);
    int owner;

    if (set == NULL)
        return false;
    owner = atomic_load_explicit(&set->pin_owner, memory_order_seq_cst);
    *ret_pin = (struct kvt_device_host_pin){.is_pinned = owner >= 0};
    for (uint32_t i = 0; i < set->members_count; i++)
        if (kvt_device_is_served(&set->members[i]) &&
            !atomic_load_explicit(&set->members[i].is_host_pinned, memory_order_seq_cst))
            ret_pin->is_pinned = false;
    if (ret_pin->is_pinned)
        return true;
    KVT_ASSERT(pthread_mutex_lock(&set->words) == 0);
    memcpy(ret_pin->why, set->pin_why, sizeof(ret_pin->why));
    KVT_ASSERT(pthread_mutex_unlock(&set->words) == 0);
    if (ret_pin->why[0] == '\0')
        (void)snprintf(ret_pin->why, sizeof(ret_pin->why),
                       "the GPU in whose context it was pinned is lost, and is being taken back");
    return true;
}

void kvt_device_export_make(struct kvt_device_member *member)
{
    struct kvt_device_export made = {
        .bytes = member->about.arena_bytes,
        .incarnation = atomic_load_explicit(&member->served, memory_order_seq_cst)};
    uint64_t arena = kvt_gpu_arena(member->gpu);
    int error;

    if (!member->set->config.is_export_allowed || !member->about.info.has_ipc || arena == 0)
        return;
    memcpy(made.uuid, member->about.info.uuid, sizeof(made.uuid));
    error = member->set->calls->ipc_export(arena, made.handle);
    if (error != KVT_CUDA_OK) {
        (void)kvt_device_note_error(member, error);
        return;
    }
    KVT_ASSERT(pthread_mutex_lock(&member->set->words) == 0);
    member->exported = made;
    member->has_export = true;
    KVT_ASSERT(pthread_mutex_unlock(&member->set->words) == 0);
}

bool kvt_device_export(const struct kvt_tier *tier, uint32_t zone,
                       struct kvt_device_export *ret_export)
{
    struct kvt_device_set *set = kvt_device_set_of(tier);
    struct kvt_device_export exported = {0};
    struct kvt_device_member *member;
    bool is_there;

    if (set == NULL || zone >= set->members_count)
        return false;
    member = &set->members[zone];
    KVT_ASSERT(pthread_mutex_lock(&set->words) == 0);
    is_there = member->has_export;
    if (is_there)
        exported = member->exported;
    KVT_ASSERT(pthread_mutex_unlock(&set->words) == 0);
    if (!is_there || !kvt_device_is_served(member) ||
        exported.incarnation != atomic_load_explicit(&member->served, memory_order_seq_cst))
        return false;
    *ret_export = exported;
    return true;
}

bool kvt_device_gpu(const struct kvt_tier *tier, uint32_t idx, struct kvt_device_gpu *ret_gpu)
{
    struct kvt_device_set *set = kvt_device_set_of(tier);

    if (set == NULL || idx >= set->members_count + set->refused_count)
        return false;
    if (idx >= set->members_count) {
        *ret_gpu = set->refused[idx - set->members_count];
        return true;
    }
    KVT_ASSERT(pthread_mutex_lock(&set->words) == 0);
    *ret_gpu = set->members[idx].about;
    ret_gpu->is_exported = set->members[idx].has_export;
    ret_gpu->is_host_pinned =
        atomic_load_explicit(&set->members[idx].is_host_pinned, memory_order_seq_cst);
    KVT_ASSERT(pthread_mutex_unlock(&set->words) == 0);
    return true;
}
