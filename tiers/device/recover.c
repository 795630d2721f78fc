/* The control thread of a GPU: sees that it is lost, and takes it back.
 *
 * Every call here may hang in a driver that is ill. So it holds up nobody: the engine and the
 * janitor find the member out of service without asking this thread, and close leaves it behind
 * after a bounded time. */
#include <stdio.h>
#include <time.h>

#include "daemon/base/clock.h"
#include "tiers/device/set.h"
#include "tiers/worker.h"

#define STUCK_LOOKS 30u /* in stuck_ns: a process that was stopped for long has had but one */
#define PARK_NS (5u * KVT_NS_PER_MS)     /* between looks whether the GPU's thread has parked */
#define GUESTS_NS (2u * KVT_GPU_HOLD_NS) /* then a guest hangs: no reason to be out for ever */
#define PARK_LONG_NS (5u * KVT_NS_PER_S) /* then something hangs */
#define START_PAUSE_NS (50u * KVT_NS_PER_US)
#define BUSY_NS (20u * KVT_NS_PER_MS) /* somebody is in a call on the device */

static uint64_t look_ns(const struct kvt_device_member *member)
{
    return KVT_MAX(member->set->config.stuck_ns / STUCK_LOOKS, 1u);
}

/* Transfers that came to an end, one way or another. */
static uint64_t ended(const struct kvt_device_member *member)
{
    const struct kvt_gpu_counters *gpu = kvt_gpu_counters(member->gpu);
    const struct kvt_tier_counters *tier = &member->tier->counters;
    uint64_t count = atomic_load_explicit(&tier->errors_client_gone, memory_order_relaxed) +
                     atomic_load_explicit(&tier->errors_late, memory_order_relaxed) +
                     atomic_load_explicit(&tier->errors_io, memory_order_relaxed);

    for (uint32_t i = 0; i < KVT_COUNT_OF(tier->errors_bad_slot); i++)
        count += atomic_load_explicit(&tier->errors_bad_slot[i], memory_order_relaxed);
    for (uint32_t i = 0; i < KVT_GPU_PATHS; i++)
        count += atomic_load_explicit(&gpu->path_transfers[i], memory_order_relaxed);
    return count;
}

/* A GPU that hangs may say nothing: its events are just never over, or a call of its thread does
 * not come back. */
static void look_whether_stuck(struct kvt_device_member *member, uint64_t now_ns)
{
    uint64_t count = ended(member);
    bool is_busy = atomic_load_explicit(&kvt_gpu_counters(member->gpu)->inflight_bytes,
                                        memory_order_relaxed) > 0;

    if (now_ns - member->looked_ns < look_ns(member))
        return;
    member->looked_ns = now_ns;
    member->stuck_looks = is_busy && count == member->ended ? member->stuck_looks + 1 : 0;
    member->ended = count;
    member->is_stuck = member->stuck_looks > STUCK_LOOKS;
    if (member->is_stuck)
        kvt_gpu_lose(member->gpu, KVT_CUDA_LAUNCH_TIMEOUT);
}

/* Back at once after a long time in good order; a GPU that is lost again and again waits longer
 * each time. */
static void lost(struct kvt_device_member *member, uint64_t now_ns)
{
    const struct kvt_device_config *config = &member->set->config;
    int error =
        atomic_load_explicit(&kvt_gpu_counters(member->gpu)->last_error, memory_order_relaxed);
    bool is_again = member->back_ns != 0 && now_ns - member->back_ns < config->retry_max_ns;

    member->is_lost = true;
    member->attempts = 0;
    member->wait_ns =
        is_again ? KVT_MIN(2 * member->wait_ns, config->retry_max_ns) : config->retry_min_ns;
    member->next_ns = kvt_time_add(now_ns, member->wait_ns);
    KVT_ASSERT(pthread_mutex_lock(&member->set->words) == 0);
    member->about.lost_ns = now_ns;
    member->has_export = false;
    KVT_ASSERT(pthread_mutex_unlock(&member->set->words) == 0);
    if (member->is_stuck)
        kvt_device_say(member, KVT_GPU_LOST, "lost: no copy ended for %llu s",
                       (unsigned long long)(config->stuck_ns / KVT_NS_PER_S));
    else
        kvt_device_say(member, KVT_GPU_LOST, "lost: %.48s (%d)",
                       member->set->calls->error_name(error), error);
    member->is_stuck = false;
    member->stuck_looks = 0;
    kvt_doorbell_ring(member->set->config.doorbell);
}

static void failed(struct kvt_device_member *member, const char *what, int error, uint64_t now_ns)
{
    bool is_sticky = kvt_cuda_is_sticky(error);

    member->wait_ns = KVT_MIN(2 * member->wait_ns, member->set->config.retry_max_ns);
    member->next_ns = kvt_time_add(now_ns, member->wait_ns);
    kvt_device_say(member, KVT_GPU_LOST, "lost; attempt %u failed: %s: %.40s (%d)%s",
                   member->attempts, what, member->set->calls->error_name(error), error,
                   is_sticky ? "; restart the daemon to take it back" : "");
}

static int pin_owner(const struct kvt_device_set *set)
{
    return atomic_load_explicit(&set->pin_owner, memory_order_seq_cst);
}

/* Tells the others whether L2 is pinned. Returns whether none has a copy under way that relies on
 * it. */
static bool tell_others(struct kvt_device_member *member, bool is_pinned)
{
    struct kvt_device_set *set = member->set;
    bool have_left = true;

    KVT_ASSERT(pthread_mutex_lock(&set->words) == 0);
    for (uint32_t i = 0; i < set->members_count; i++) {
        struct kvt_gpu *gpu = set->members[i].gpu;

        if (i == member->zone || gpu == NULL)
            continue;
        kvt_device_tell_pinned(&set->members[i], is_pinned);
        have_left = have_left && kvt_gpu_has_left_host(gpu);
    }
    KVT_ASSERT(pthread_mutex_unlock(&set->words) == 0);
    return have_left;
}

/* With `recovery` held, so that nobody is told something else meanwhile. One that hangs is not
 * waited for for ever. */
static bool may_unpin(struct kvt_device_member *member, uint64_t now_ns)
{
    return pin_owner(member->set) != (int)member->zone || tell_others(member, false) ||
           now_ns - member->about.lost_ns >= GUESTS_NS;
}

static bool reset(struct kvt_device_member *member, int *ret_error)
{
    int owner = (int)member->zone;

    *ret_error = member->set->calls->device_reset();
    if (*ret_error == KVT_CUDA_OK)
        (void)atomic_compare_exchange_strong(&member->set->pin_owner, &owner, -1);
    return *ret_error == KVT_CUDA_OK;
}

/* L2 may have been pinned in the context that is gone. While it is in one that is lost, and will
 * be reset, nobody may rely on it. */
static void repin(struct kvt_device_member *member)
{
    struct kvt_device_set *set = member->set;
    int owner = pin_owner(set), error = set->is_pinned ? kvt_device_pin(set) : KVT_CUDA_UNKNOWN;
    bool is_ours = error == KVT_CUDA_OK || (error == KVT_CUDA_ALREADY_REGISTERED && owner < 0);
    bool is_others = !is_ours && error == KVT_CUDA_ALREADY_REGISTERED &&
                     owner != (int)member->zone && kvt_device_is_served(&set->members[owner]);

    is_ours = is_ours || (error == KVT_CUDA_ALREADY_REGISTERED && owner == (int)member->zone);
    kvt_device_tell_pinned(member, is_ours || is_others);
    if (set->is_pinned)
        kvt_device_pin_say(set, error == KVT_CUDA_ALREADY_REGISTERED ? KVT_CUDA_OK : error);
    if (!is_ours)
        return;
    atomic_store_explicit(&set->pin_owner, (int)member->zone, memory_order_seq_cst);
    (void)tell_others(member, true);
}

static void unlock_others(struct kvt_device_member *member, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++)
        if (i != member->zone)
            KVT_ASSERT(pthread_mutex_unlock(&member->set->members[i].calls) == 0);
}

static void unlock_own(struct kvt_device_member *member)
{
    KVT_ASSERT(pthread_mutex_unlock(&member->calls) == 0);
    KVT_ASSERT(pthread_mutex_unlock(&member->set->recovery) == 0);
}

/* `recovery` and all `calls`, or nothing: somebody is in a call. */
static bool lock_all(struct kvt_device_member *member)
{
    struct kvt_device_set *set = member->set;
    uint32_t i = 0;

    if (pthread_mutex_trylock(&set->recovery) != 0)
        return false;
    while (i < set->members_count && pthread_mutex_trylock(&set->members[i].calls) == 0)
        i++;
    if (i == set->members_count)
        return true;
    unlock_others(member, i);
    if (i > member->zone)
        KVT_ASSERT(pthread_mutex_unlock(&member->calls) == 0);
    KVT_ASSERT(pthread_mutex_unlock(&set->recovery) == 0);
    return false;
}

/* With all locked; the others are not when it returns. 0, or CUDA's error and *ret_what, which call
 * it was of. */
static int take_back(struct kvt_device_member *member, const char **ret_what)
{
    const struct kvt_cuda_calls *calls = member->set->calls;
    uint32_t incarnation =
        atomic_load_explicit(&member->tier->counters.incarnation, memory_order_seq_cst);
    int reset_error, error = KVT_CUDA_OK, r;
    bool is_reset;

    /* What engines had open here goes with the context. */
    member->handles_count = 0;
    *ret_what = "reset";
    is_reset = reset(member, &reset_error);
    unlock_others(member, member->set->members_count);
    if (is_reset) {
        kvt_gpu_was_reset(member->gpu); /* nothing of the lost context lands any more */
        reset_error = calls->set_device(member->about.index);
    }
    if (reset_error != KVT_CUDA_OK)
        return reset_error;
    repin(member);
    *ret_what = "making the arena anew";
    r = kvt_gpu_revive(member->gpu, &error);
    if (r < 0)
        return error != KVT_CUDA_OK ? error : KVT_CUDA_UNKNOWN;
    atomic_store_explicit(&member->served, incarnation, memory_order_seq_cst);
    kvt_device_export_make(member);
    return KVT_CUDA_OK;
}

static void attempt(struct kvt_device_member *member, uint64_t now_ns)
{
    const char *what = "";
    int error;

    if (!lock_all(member)) {
        member->next_ns = kvt_time_add(now_ns, BUSY_NS);
        return;
    }
    if (!may_unpin(member, now_ns)) {
        unlock_others(member, member->set->members_count);
        unlock_own(member);
        member->next_ns = kvt_time_add(now_ns, PARK_NS);
        return;
    }
    member->attempts++;
    error = take_back(member, &what);
    unlock_own(member);
    now_ns = kvt_clock_mono_ns();
    if (error != KVT_CUDA_OK) {
        failed(member, what, error, now_ns);
        return;
    }
    member->is_lost = false;
    member->back_ns = now_ns;
    KVT_ASSERT(pthread_mutex_lock(&member->set->words) == 0);
    member->about.lost_ns = 0;
    KVT_ASSERT(pthread_mutex_unlock(&member->set->words) == 0);
    kvt_device_say(member, KVT_GPU_OK, "%s", "");
    kvt_doorbell_ring(member->set->config.doorbell);
}

uint64_t kvt_device_care(struct kvt_device_member *member, uint64_t now_ns)
{
    bool is_out;

    if (!member->is_lost)
        look_whether_stuck(member, now_ns);
    is_out = atomic_load_explicit(&member->tier->counters.health, memory_order_seq_cst) !=
             KVT_TIER_HEALTH_OK;
    if (!member->is_lost && !is_out)
        return kvt_time_add(now_ns, look_ns(member));
    if (!member->is_lost)
        lost(member, now_ns);
    if (now_ns < member->next_ns)
        return member->next_ns;
    if (!kvt_gpu_is_parked(member->gpu)) {
        if (now_ns - member->about.lost_ns < PARK_LONG_NS)
            return kvt_time_add(now_ns, PARK_NS);
        kvt_device_say(member, KVT_GPU_LOST,
                       "lost; its thread hangs in a call of the driver: restart the daemon to take "
                       "it back");
        return kvt_time_add(now_ns, look_ns(member));
    }
    /* Transfers of other GPUs end soon, or, of one that is lost, too, when that is reset or has
     * held them for KVT_GPU_HOLD_NS. */
    if (atomic_load_explicit(&member->guests, memory_order_seq_cst) > 0 &&
        now_ns - member->about.lost_ns < GUESTS_NS)
        return kvt_time_add(now_ns, PARK_NS);
    attempt(member, now_ns);
    return member->is_lost ? member->next_ns : now_ns;
}

static bool is_stopping(const struct kvt_device_member *member)
{
    return atomic_load_explicit(&member->set->is_stopping, memory_order_seq_cst);
}

/* False: another GPU is in a call that hangs. The process ends soon, and is not held up. */
static bool lock_recovery(struct kvt_device_set *set)
{
    uint64_t until_ns = kvt_time_add(kvt_clock_mono_ns(), set->config.hang_ns / 2);
    const struct timespec pause = {.tv_nsec = START_PAUSE_NS};
    int r;

    while ((r = pthread_mutex_trylock(&set->recovery)) != 0 && kvt_clock_mono_ns() < until_ns)
        (void)nanosleep(&pause, NULL);
    return r == 0;
}

/* Others, who have not ended, no longer see it. */
static struct kvt_gpu *take_gpu(struct kvt_device_member *member)
{
    struct kvt_gpu *gpu;

    KVT_ASSERT(pthread_mutex_lock(&member->set->words) == 0);
    gpu = member->gpu;
    member->gpu = NULL;
    KVT_ASSERT(pthread_mutex_unlock(&member->set->words) == 0);
    return gpu;
}

/* With `calls` held: whoever hangs in the driver with it has the set, which is left behind, then.
 * What is open on the GPU, the GPU, and with the last of them the pages of L2. Of a context that is
 * lost nothing can be given back but all at once. */
static void shut(struct kvt_device_member *member)
{
    struct kvt_device_set *set = member->set;
    bool is_served = kvt_device_is_served(member);
    bool is_alone = lock_recovery(set);
    int error;

    for (uint32_t i = 0; i < member->handles_count && is_served; i++)
        (void)set->calls->ipc_close(member->handles[i].address);
    (void)kvt_gpu_close(take_gpu(member));
    if (!is_served)
        (void)reset(member, &error);
    if (atomic_fetch_sub_explicit(&set->members_left, 1, memory_order_seq_cst) == 1 &&
        pin_owner(set) >= 0)
        (void)set->calls->unpin(set->config.host_memory);
    if (is_alone)
        KVT_ASSERT(pthread_mutex_unlock(&set->recovery) == 0);
}

static int order_of(const struct kvt_device_member *member)
{
    return atomic_load_explicit(&member->control_order, memory_order_seq_cst);
}

static void order(struct kvt_device_member *member, enum kvt_control_order order)
{
    atomic_store_explicit(&member->control_order, (int)order, memory_order_seq_cst);
    kvt_doorbell_ring(&member->bell);
}

static void *control_main(void *ctx)
{
    struct kvt_device_member *member = ctx;

    member->start_error = member->set->calls->set_device(member->about.index);
    order(member, KVT_CONTROL_READY);
    for (;;) {
        uint64_t now_ns = kvt_clock_mono_ns(), next_ns = KVT_TIME_NEVER_NS;
        int now_order = order_of(member);

        if (now_order == KVT_CONTROL_ENDING ||
            (now_order == KVT_CONTROL_CARING && is_stopping(member)))
            break;
        if (now_order == KVT_CONTROL_CARING)
            next_ns = kvt_device_care(member, now_ns);
        kvt_doorbell_arm(&member->bell);
        if (is_stopping(member) || next_ns <= now_ns || order_of(member) != now_order)
            kvt_doorbell_disarm(&member->bell);
        else
            kvt_doorbell_wait(&member->bell,
                              next_ns == KVT_TIME_NEVER_NS ? next_ns : next_ns - now_ns);
    }
    if (order_of(member) == KVT_CONTROL_CARING) {
        KVT_ASSERT(pthread_mutex_lock(&member->calls) == 0);
        shut(member);
        KVT_ASSERT(pthread_mutex_unlock(&member->calls) == 0);
    }
    atomic_store_explicit(&member->is_over, true, memory_order_seq_cst);
    return NULL;
}

int kvt_device_control_start(struct kvt_device_member *member, int *ret_error)
{
    const struct timespec pause = {.tv_nsec = START_PAUSE_NS};
    char name[16];
    int r;

    (void)snprintf(name, sizeof(name), "kvt-gpu-ctl%u", member->zone);
    r = kvt_worker_thread(&member->control, name, control_main, member);
    if (r < 0)
        return r;
    member->is_started = true;
    while (order_of(member) == KVT_CONTROL_STARTING)
        (void)nanosleep(&pause, NULL);
    *ret_error = member->start_error;
    return 0;
}

void kvt_device_control_care(struct kvt_device_member *member)
{
    order(member, KVT_CONTROL_CARING);
}

void kvt_device_control_drop(struct kvt_device_member *member)
{
    if (!member->is_started)
        return;
    order(member, KVT_CONTROL_ENDING);
    KVT_ASSERT(pthread_join(member->control, NULL) == 0);
    member->is_started = false;
}
