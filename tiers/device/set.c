/* Making the set, its submit and reap, and its end. What is decided here is only which GPU has a
 * transfer: that of its DEVICE place, or with none that of the engine's memory. A member has room
 * for all that the set takes, so a prefix is never cut short by one GPU that is slow. */
#include "tiers/device/set.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "daemon/base/alloc.h"
#include "daemon/base/clock.h"
#include "daemon/base/size.h"
#include "tiers/device/backend.h"
#include "tiers/zones.h"

#define RUN_MAX 64u /* neighbours in a batch for one GPU go to it in one call */
#define HANG_NS_DEFAULT (10u * KVT_NS_PER_S)
#define STUCK_NS_DEFAULT (30u * KVT_NS_PER_S)
#define CLOSE_PAUSE_NS (200u * KVT_NS_PER_US)

/* ---- transfers --------------------------------------------------------------------------------
 */

static struct kvt_device_set *set_of(struct kvt_tier *tier)
{
    return KVT_CONTAINER_OF(tier, struct kvt_device_set, tier);
}

static uint32_t zone_of(const struct kvt_device_set *set, const struct kvt_xfer *xfer)
{
    const struct kvt_layout *layout;

    if (xfer->src.kind == KVT_PLACE_DEVICE)
        return kvt_zone_of(&set->tier, xfer->src.offset_bytes);
    if (xfer->dst.kind == KVT_PLACE_DEVICE)
        return kvt_zone_of(&set->tier, xfer->dst.offset_bytes);
    layout = xfer->src.kind == KVT_PLACE_CLIENT ? xfer->src.view.layout : xfer->dst.view.layout;
    KVT_ASSERT(layout->is_gpu && layout->gpu_zone < set->members_count);
    return layout->gpu_zone;
}

/* The member whose memory of an engine @xfer, which is zone @zone's, reads or writes as a guest. */
static struct kvt_device_member *host_of(struct kvt_device_set *set, const struct kvt_xfer *xfer,
                                         uint32_t zone)
{
    const struct kvt_place *client = xfer->src.kind == KVT_PLACE_CLIENT ? &xfer->src : &xfer->dst;
    const struct kvt_layout *layout;

    if (client->kind != KVT_PLACE_CLIENT)
        return NULL;
    layout = client->view.layout;
    if (!layout->is_gpu || layout->gpu_zone == zone)
        return NULL;
    KVT_ASSERT(layout->gpu_zone < set->members_count);
    return &set->members[layout->gpu_zone];
}

/* False: a guest of a GPU that is lost, and so is the memory; it is finished. Its own GPU cannot
 * see that. */
static bool admit(struct kvt_device_set *set, struct kvt_xfer *xfer, uint32_t zone)
{
    struct kvt_device_member *host = host_of(set, xfer, zone);
    const struct kvt_place *client = xfer->src.kind == KVT_PLACE_CLIENT ? &xfer->src : &xfer->dst;

    if (host == NULL)
        return true;
    (void)atomic_fetch_add_explicit(&host->guests, 1, memory_order_seq_cst);
    if (kvt_device_is_served(host) && atomic_load_explicit(&host->served, memory_order_seq_cst) ==
                                          client->view.layout->incarnation)
        return true;
    (void)atomic_fetch_sub_explicit(&host->guests, 1, memory_order_seq_cst);
    xfer->status = KVT_XFER_CLIENT_GONE;
    xfer->verdict = KVT_SLOT_OK;
    xfer->started_ns = xfer->done_ns = kvt_clock_mono_ns();
    kvt_worker_count(&set->members[zone].tier->counters.errors_client_gone, 1);
    kvt_worker_queue_push(&set->finished, xfer);
    kvt_doorbell_ring(set->config.doorbell);
    return false;
}

/* The next of @xfers: as many neighbours as go to the same GPU. Returns how many. */
static uint32_t submit_run(struct kvt_device_set *set, struct kvt_xfer *const xfers[],
                           uint32_t count)
{
    uint32_t zone = zone_of(set, xfers[0]), run = 1, given = 0;

    if (!admit(set, xfers[0], zone))
        return 1;
    while (run < KVT_MIN(count, RUN_MAX) && zone_of(set, xfers[run]) == zone &&
           host_of(set, xfers[run], zone) == NULL)
        run++;
    KVT_ASSERT(kvt_tier_submit(set->members[zone].tier, xfers, run, &given) == 0);
    KVT_ASSERT(given == run);
    return run;
}

static int set_submit(struct kvt_tier *tier, struct kvt_xfer *const xfers[], uint32_t count,
                      uint32_t *ret_taken)
{
    struct kvt_device_set *set = set_of(tier);
    uint32_t room = KVT_MIN(count, tier->inflight_max - set->outstanding), taken = 0;

    KVT_ASSERT(count > 0);
    if (room == 0)
        return KVT_TIER_E_FULL;
    while (taken < room)
        taken += submit_run(set, xfers + taken, room - taken);
    set->outstanding += taken;
    *ret_taken = taken;
    return 0;
}

/* The engine is the first to see that a GPU is lost, when its transfers come back. */
static void look_at_health(struct kvt_device_set *set)
{
    for (uint32_t i = 0; i < set->members_count; i++) {
        struct kvt_device_member *member = &set->members[i];
        bool is_in_service = atomic_load_explicit(&member->tier->counters.health,
                                                  memory_order_relaxed) == KVT_TIER_HEALTH_OK;

        if (member->was_in_service && !is_in_service)
            kvt_doorbell_ring(&member->bell);
        member->was_in_service = is_in_service;
    }
    atomic_store_explicit(&set->tier.counters.health, kvt_tier_health(&set->tier),
                          memory_order_relaxed);
}

static uint32_t reap_from(struct kvt_device_set *set, uint32_t zone, struct kvt_xfer *ret_xfers[],
                          uint32_t max)
{
    uint32_t count = kvt_tier_reap(set->members[zone].tier, ret_xfers, max);

    for (uint32_t i = 0; i < count; i++) {
        struct kvt_device_member *host = host_of(set, ret_xfers[i], zone);

        if (host != NULL)
            (void)atomic_fetch_sub_explicit(&host->guests, 1, memory_order_seq_cst);
    }
    return count;
}

/* A share for each GPU first, then what room is left, beginning with another one each time. */
static uint32_t set_reap(struct kvt_tier *tier, struct kvt_xfer *ret_xfers[], uint32_t max)
{
    struct kvt_device_set *set = set_of(tier);
    uint32_t share = KVT_MAX(max / set->members_count, 1u), count = 0;

    while (count < max && set->finished.head != NULL)
        ret_xfers[count++] = kvt_worker_queue_pop(&set->finished);
    for (uint32_t round = 0; round < 2; round++)
        for (uint32_t i = 0; i < set->members_count && count < max; i++) {
            uint32_t zone = (set->reap_first + i) % set->members_count;

            count += reap_from(set, zone, ret_xfers + count,
                               round == 0 ? KVT_MIN(share, max - count) : max - count);
        }
    set->reap_first = (set->reap_first + 1) % set->members_count;
    look_at_health(set);
    if (count > 0)
        kvt_zones_sum(tier);
    KVT_ASSERT(count <= set->outstanding);
    set->outstanding -= count;
    return count;
}

/* ---- the end ----------------------------------------------------------------------------------
 */

static void set_free(struct kvt_device_set *set)
{
    for (uint32_t i = 0; i < set->members_count; i++) {
        kvt_doorbell_deinit(&set->members[i].bell);
        kvt_free(set->members[i].handles);
        (void)pthread_mutex_destroy(&set->members[i].calls);
    }
    (void)pthread_mutex_destroy(&set->words);
    (void)pthread_mutex_destroy(&set->recovery);
    kvt_free(set);
}

/* Each member's GPU is closed by its control thread, since that may hang in the driver. A thread
 * that does is left alone with the set, which it may still use; the process ends soon. */
static void set_close(struct kvt_tier *tier)
{
    struct kvt_device_set *set = set_of(tier);
    uint64_t until_ns = kvt_time_add(kvt_clock_mono_ns(), set->config.hang_ns);
    const struct timespec pause = {.tv_nsec = CLOSE_PAUSE_NS};
    bool are_over = true;

    KVT_ASSERT(set->outstanding == 0);
    atomic_store_explicit(&set->is_stopping, true, memory_order_seq_cst);
    for (uint32_t i = 0; i < set->members_count; i++)
        kvt_doorbell_ring(&set->members[i].bell);
    for (uint32_t i = 0; i < set->members_count; i++) {
        struct kvt_device_member *member = &set->members[i];
        bool is_over;

        if (!member->is_started)
            continue;
        while (!(is_over = atomic_load_explicit(&member->is_over, memory_order_seq_cst)) &&
               kvt_clock_mono_ns() < until_ns)
            (void)nanosleep(&pause, NULL);
        KVT_ASSERT(
            (is_over ? pthread_join(member->control, NULL) : pthread_detach(member->control)) == 0);
        member->is_started = false;
        are_over &= is_over;
    }
    if (are_over)
        set_free(set);
}

static const struct kvt_tier_ops set_ops = {
    .name = "device", .submit = set_submit, .reap = set_reap, .close = set_close};

struct kvt_device_set *kvt_device_set_of(const struct kvt_tier *tier)
{
    if (tier == NULL || tier->ops != &set_ops)
        return NULL;
    return set_of((struct kvt_tier *)(uintptr_t)tier);
}

/* ---- the start --------------------------------------------------------------------------------
 */

static const char *config_problem(const struct kvt_device_config *config)
{
    if ((config->bytes == 0) == (config->pct == 0))
        return "tiers.l1.bytes is bytes or a share, one of them";
    if (config->pct > 95)
        return "tiers.l1.bytes is more than 95 % of a GPU's memory";
    if (config->pct == 0 && config->bytes < KVT_HUGE_PAGE_BYTES)
        return "tiers.l1.bytes is less than 2 MiB";
    if (config->staging_bytes < KVT_HUGE_PAGE_BYTES || config->staging_bytes % KVT_DIO_ALIGN_BYTES)
        return "tiers.l1.staging is less than 2 MiB, or not of whole pages";
    if (config->streams == 0 || config->streams > KVT_GPU_STREAMS_MAX)
        return "tiers.l1.streams is 1 to 4";
    if (config->cpu_threads > KVT_GPU_HANDS_MAX)
        return "tiers.l1.cpu_threads is 0 to 16";
    if (config->inflight_bytes_max == 0)
        return "tiers.l1.inflight is 0";
    if (config->retry_min_ns == 0 || config->retry_min_ns > config->retry_max_ns)
        return "tiers.l1.retry_min is 0, or more than tiers.l1.retry_max";
    return NULL;
}

/* On a device that is lost the call may do nothing: what it answered when it was not, counts. */
static int make_current(struct kvt_device_set *set, int device)
{
    int error = set->calls->set_device(device);

    if (error == KVT_CUDA_OK)
        set->current = device;
    return error;
}

/* L2 in the context of the first GPU that is opened, for all. */
static void pin(struct kvt_device_set *set, struct kvt_device_report *report)
{
    int error;

    if (set->config.host_memory == NULL) {
        (void)snprintf(set->pin_why, sizeof(set->pin_why), "there is no L2");
        memcpy(report->pin_why, set->pin_why, sizeof(report->pin_why));
        return;
    }
    error = kvt_device_pin(set);
    if (error == KVT_CUDA_ALREADY_REGISTERED)
        error = KVT_CUDA_OK;
    atomic_store_explicit(&set->pin_owner, error == KVT_CUDA_OK ? 0 : -1, memory_order_seq_cst);
    set->is_pinned = report->is_host_pinned = error == KVT_CUDA_OK;
    kvt_device_pin_say(set, error);
    memcpy(report->pin_why, set->pin_why, sizeof(report->pin_why));
}

static void refuse_open(struct kvt_device_set *set, struct kvt_device_gpu *gpu, int result,
                        int error)
{
    gpu->state = KVT_GPU_REFUSED;
    gpu->arena_bytes = 0;
    if (result == -ENOMEM)
        (void)snprintf(gpu->why, sizeof(gpu->why),
                       "GPU %d: its arena cannot be had: out of memory (lower tiers.l1.bytes)",
                       gpu->index);
    else if (error != KVT_CUDA_OK)
        (void)snprintf(gpu->why, sizeof(gpu->why), "GPU %d cannot be used: %.64s (%d)", gpu->index,
                       set->calls->error_name(error), error);
    else
        (void)snprintf(gpu->why, sizeof(gpu->why), "GPU %d: its threads cannot be had: %.48s",
                       gpu->index, strerrordesc_np(-result));
}

static int open_gpu(struct kvt_device_set *set, struct kvt_device_member *member,
                    const struct kvt_device_gpu *gpu, struct kvt_device_report *report,
                    int *ret_error)
{
    const struct kvt_device_config *config = &set->config;
    struct kvt_gpu_config gpu_config = {
        .calls = set->calls,
        .device = gpu->index,
        .info = gpu->info,
        .zone = set->members_count,
        .base_bytes = set->tier.capacity_bytes,
        .arena_bytes = gpu->arena_bytes,
        .staging_bytes = gpu->staging_bytes,
        .streams = config->streams,
        .inflight_bytes_max = config->inflight_bytes_max,
        .inflight_max = set->tier.inflight_max,
        .crossover_bytes = config->crossover_bytes,
        .cpu_threads = config->cpu_threads,
        .host_memory = config->host_memory,
        .host_memory_bytes = config->host_memory_bytes,
        .doorbell = config->doorbell,
    };
    int r;

    *ret_error = make_current(set, gpu->index);
    if (*ret_error != KVT_CUDA_OK)
        return kvt_trace(-EIO);
    r = kvt_device_control_start(member, ret_error);
    if (r < 0 || *ret_error != KVT_CUDA_OK)
        return r < 0 ? r : kvt_trace(-EIO);
    if (set->members_count == 0)
        pin(set, report);
    gpu_config.is_host_pinned = set->is_pinned;
    atomic_store_explicit(&member->is_host_pinned, set->is_pinned, memory_order_seq_cst);
    return kvt_gpu_open(&member->gpu, &gpu_config, ret_error);
}

static void add_zone(struct kvt_device_set *set, struct kvt_device_member *member,
                     const struct kvt_device_gpu *gpu)
{
    struct kvt_tier_zone *zone = &set->tier.zones[set->members_count];

    member->tier = kvt_gpu_tier(member->gpu);
    member->about.counters = kvt_gpu_counters(member->gpu);
    member->about.tier_counters = &member->tier->counters;
    member->was_in_service = true;
    atomic_store_explicit(
        &member->served,
        atomic_load_explicit(&member->tier->counters.incarnation, memory_order_seq_cst),
        memory_order_seq_cst);
    *zone = (struct kvt_tier_zone){.base_bytes = set->tier.capacity_bytes,
                                   .bytes = gpu->arena_bytes,
                                   .counters = &member->tier->counters,
                                   .numa_node = gpu->numa_node};
    (void)snprintf(zone->name, sizeof(zone->name), "GPU %d %.50s", gpu->index, gpu->info.name);
    set->tier.capacity_bytes += gpu->arena_bytes;
    set->tier.zones_count = ++set->members_count;
    (void)atomic_fetch_add_explicit(&set->members_left, 1, memory_order_seq_cst);
}

/* A context that is of no use takes hundreds of MiB. */
static void drop_context(struct kvt_device_set *set, const struct kvt_device_gpu *gpu)
{
    (void)make_current(set, gpu->index);
    if (set->members_count == 0 && set->is_pinned) {
        (void)set->calls->unpin(set->config.host_memory);
        set->is_pinned = false;
        atomic_store_explicit(&set->pin_owner, -1, memory_order_seq_cst);
    }
    if (set->current == gpu->index)
        (void)set->calls->device_reset();
}

/* -ENOMEM, or 0: opened, or refused and in *gpu why. */
static int open_member(struct kvt_device_set *set, struct kvt_device_gpu *gpu,
                       struct kvt_device_report *report)
{
    struct kvt_device_member *member = &set->members[set->members_count];
    int error = KVT_CUDA_OK, r;

    *member = (struct kvt_device_member){
        .set = set, .zone = set->members_count, .about = *gpu, .bell = KVT_DOORBELL_NULL};
    r = kvt_doorbell_init(&member->bell);
    if (r < 0)
        return r;
    KVT_ASSERT(pthread_mutex_init(&member->calls, NULL) == 0);
    member->handles = kvt_alloc_zeroed(KVT_DEVICE_HANDLES_MAX, sizeof(*member->handles));
    r = member->handles == NULL ? -ENOMEM : open_gpu(set, member, gpu, report, &error);
    if (r == 0) {
        add_zone(set, member, gpu);
        kvt_device_export_make(member);
        kvt_device_control_care(member);
        return 0;
    }
    kvt_device_control_drop(member);
    if (member->handles != NULL) {
        refuse_open(set, gpu, r, error);
        drop_context(set, gpu);
        r = 0;
    }
    kvt_doorbell_deinit(&member->bell);
    kvt_free(member->handles);
    (void)pthread_mutex_destroy(&member->calls);
    return r;
}

static int open_members(struct kvt_device_set *set, struct kvt_probe *probe)
{
    for (uint32_t i = 0; i < probe->report.gpus_count; i++) {
        struct kvt_device_gpu *gpu = &probe->gpus[i];
        int r = 0;

        if (gpu->state != KVT_GPU_REFUSED) {
            (void)make_current(set, gpu->index);
            kvt_probe_size(set->calls, &set->config, gpu);
            if (gpu->state == KVT_GPU_REFUSED)
                drop_context(set, gpu);
            else
                r = open_member(set, gpu, &probe->report);
        }
        if (r < 0)
            return kvt_trace(r);
        if (gpu->state == KVT_GPU_REFUSED)
            set->refused[set->refused_count++] = *gpu;
    }
    probe->report.is_host_pinned = set->is_pinned;
    return 0;
}

static void describe(struct kvt_device_set *set, const struct kvt_device_report *report)
{
    char size[KVT_SIZE_TEXT_BYTES];

    kvt_size_format_short(set->members[0].about.arena_bytes, size);
    (void)snprintf(set->tier.detail, sizeof(set->tier.detail),
                   "%u of %u GPUs, the first: %s, arena of %s; L2 is %s%s%.100s%s",
                   set->members_count, report->gpus_count, set->tier.zones[0].name, size,
                   report->is_host_pinned ? "pinned" : "not pinned",
                   report->is_host_pinned ? "" : " (", report->pin_why,
                   report->is_host_pinned ? "" : ")");
}

static int set_new(struct kvt_device_set **ret_set, const struct kvt_device_config *config,
                   const struct kvt_cuda_calls *calls, uint32_t gpus_count)
{
    struct kvt_device_set *set = kvt_alloc_zeroed(1, sizeof(*set));

    if (set == NULL)
        return kvt_trace(-ENOMEM);
    KVT_ASSERT(pthread_mutex_init(&set->words, NULL) == 0);
    KVT_ASSERT(pthread_mutex_init(&set->recovery, NULL) == 0);
    set->calls = calls;
    set->config = *config;
    set->config.found = NULL; /* the caller's */
    set->current = -1;
    atomic_init(&set->pin_owner, -1);
    if (config->hang_ns == 0)
        set->config.hang_ns = HANG_NS_DEFAULT;
    if (config->stuck_ns == 0)
        set->config.stuck_ns = STUCK_NS_DEFAULT;
    set->tier.ops = &set_ops;
    set->tier.inflight_max = config->inflight_max * gpus_count;
    set->tier.slot_align_bytes = KVT_GPU_SLOT_ALIGN_BYTES;
    set->tier.payload_bytes_max = config->staging_bytes / 2;
    *ret_set = set;
    return 0;
}

int kvt_device_set_open(struct kvt_tier **ret_tier, const struct kvt_device_config *config,
                        const struct kvt_cuda_calls *calls, struct kvt_device_report *ret_report)
{
    const char *problem = config_problem(config);
    struct kvt_device_found found;
    struct kvt_device_set *set;
    struct kvt_probe probe;
    int r;

    if (config->found == NULL)
        kvt_probe_look(calls, config, &found);
    r = config->found == NULL ? found.result : config->found->result;
    probe = config->found == NULL ? found.probe : config->found->probe;
    *ret_report = probe.report;
    if (problem != NULL && r != -EINVAL) {
        (void)snprintf(ret_report->why, sizeof(ret_report->why), "%s", problem);
        return kvt_trace(-EINVAL);
    }
    if (r != 0)
        return r;
    r = set_new(&set, config, calls, KVT_MIN(probe.report.gpus_count, KVT_ZONES_MAX));
    if (r < 0)
        return r;
    /* One that is open already may be lost while the next is opened. */
    KVT_ASSERT(pthread_mutex_lock(&set->recovery) == 0);
    r = open_members(set, &probe);
    KVT_ASSERT(pthread_mutex_unlock(&set->recovery) == 0);
    if (r == 0 && set->members_count == 0) {
        kvt_probe_tell_none(&probe);
        r = KVT_DEVICE_E_NONE;
    }
    *ret_report = probe.report;
    if (r != 0) {
        set_close(&set->tier);
        return r;
    }
    describe(set, ret_report);
    *ret_tier = &set->tier;
    return 0;
}

int kvt_device_cuda_open(struct kvt_tier **ret_tier, const struct kvt_device_config *config,
                         struct kvt_device_report *ret_report)
{
    return kvt_device_set_open(ret_tier, config, kvt_cuda_calls(), ret_report);
}
