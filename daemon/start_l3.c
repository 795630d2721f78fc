#include "daemon/start_l3.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "daemon/base/alloc.h"
#include "daemon/base/hash.h"
#include "daemon/base/log.h"
#include "daemon/base/program.h"
#include "daemon/base/size.h"
#include "daemon/start.h"
#include "tiers/host/host.h"

/* Transfers that a device takes before it says "full". */
#define DISK_INFLIGHT_MAX 512u
#define APART_MAX 4096u /* reservations that a start without all devices may skip */

/* ---- devices -------------------------------------------------------------------------------- */

static int fail(struct kvt_daemon *daemon, enum kvt_exit how, int r)
{
    daemon->exit = how;
    return kvt_trace(r);
}

static void say_no_space(const struct kvt_daemon *daemon, uint32_t idx)
{
    const struct kvt_config_device *device = &daemon->l3.devices[idx];
    char size[KVT_SIZE_TEXT_BYTES], room[KVT_SIZE_TEXT_BYTES];
    struct kvt_config_facts facts;

    kvt_config_facts_read(daemon->config, &facts);
    kvt_size_format_short(device->data_bytes, size);
    kvt_size_format_short(facts.data[idx].free_bytes + facts.data[idx].own_bytes, room);
    kvt_log_error("L3: %s is out of service: it wants %s and its file system has room for %s: "
                  "lower tiers.l3.bytes or free space, then restart",
                  device->path, size, room);
}

/* One line with the remedy for a device that could not be opened. 0: the daemon goes on. */
static int judge(struct kvt_daemon *daemon, uint32_t idx)
{
    const struct kvt_disk_set_device *found = &daemon->l3.report.devices[idx];
    const char *path = daemon->l3.devices[idx].path, *remedy = "";
    char size[KVT_SIZE_TEXT_BYTES];

    switch (found->result) {
    case 0:
        return 0;
    case KVT_DISK_E_BUSY:
        if (found->pid > 0)
            kvt_log_error("%s: another daemon is running there, pid %d", path, found->pid);
        else
            kvt_log_error("%s: another daemon is running there", path);
        return fail(daemon, KVT_EXIT_RUNNING, -EBUSY);
    case KVT_DISK_E_TOO_SMALL:
        kvt_size_format_short(daemon->config->l3.bytes, size);
        kvt_log_error("L3: tiers.l3.bytes of %s leaves no room for data", size);
        return fail(daemon, KVT_EXIT_CONFIG, -EINVAL);
    case -ENOSPC:
        say_no_space(daemon, idx);
        return 0;
    case KVT_DISK_E_FOREIGN:
        remedy = "it was not touched: move it away, name another path, or start once with --format "
                 "to make it ours";
        break;
    case KVT_DISK_E_OTHER_STORE:
    case KVT_DISK_E_OTHER_VERSION:
        remedy = "it was not touched: start once with --format to drop its contents";
        break;
    case KVT_DISK_E_MOUNTED:
        remedy = "unmount it, or name another device";
        break;
    case -EACCES:
    case -EPERM:
        remedy = "it and its directory must be writable for the daemon's user";
        break;
    case -ENOENT:
        remedy = "its directory must exist and be writable for the daemon's user";
        break;
    default:
        remedy = "restart when it is repaired";
    }
    kvt_log_error("L3: %s is out of service: %s; %s", path, found->text, remedy);
    return 0;
}

/* What of the contents before could not be kept, and whether all of the space was to be had. */
static void tell(const struct kvt_daemon *daemon, uint32_t idx)
{
    const struct kvt_disk_report *report = &daemon->l3.report.devices[idx].report;
    const struct kvt_config_device *device = &daemon->l3.devices[idx];
    char size[KVT_SIZE_TEXT_BYTES], wanted[KVT_SIZE_TEXT_BYTES];

    kvt_size_format_short(report->bytes, size);
    kvt_size_format_short(device->data_bytes, wanted);
    if (report->is_upgraded)
        kvt_log_info("L3: %s had format version 1, whose contents cannot be found again: made anew",
                     device->path);
    if (report->is_truncated)
        kvt_log_warn("L3: %s was cut off: what lay behind its end is lost", device->path);
    if (report->is_no_space)
        kvt_log_warn("L3: %s stays at %s: there is no room for %s", device->path, size, wanted);
    kvt_log_info("L3: %s at %s", size, device->path);
}

static int open_set(struct kvt_daemon *daemon)
{
    const struct kvt_config *config = daemon->config;
    struct kvt_tier *l2 = daemon->tiers[KVT_TIER_HOST];
    struct kvt_disk_set_config set = {.devices_count = daemon->l3.devices_count};
    char locks[KVT_ZONES_MAX][sizeof(daemon->l3.devices[0].index_path) + 8];

    for (uint32_t i = 0; i < set.devices_count; i++) {
        /* A raw device has no name for a file beside it. */
        snprintf(locks[i], sizeof(locks[i]), "%s.lock", daemon->l3.devices[i].index_path);
        set.devices[i] = (struct kvt_disk_config){
            .path = daemon->l3.devices[i].path,
            .lock_path = daemon->l3.devices[i].is_raw ? locks[i] : NULL,
            .bytes = daemon->l3.devices[i].data_bytes,
            .is_format = config->l3.is_format_wanted,
            .host_memory = kvt_host_memory(l2),
            .host_memory_bytes = l2->capacity_bytes,
            .inflight_bytes_max = config->l3.inflight_bytes,
            .inflight_max = DISK_INFLIGHT_MAX,
            .retry_ns_min = config->l3.retry_min_ns,
            .retry_ns_max = config->l3.retry_max_ns,
            .doorbell = &daemon->doorbell,
        };
    }
    return kvt_disk_set_open(&daemon->tiers[KVT_TIER_DISK], &set, &daemon->l3.report);
}

/* ---- catalogs ------------------------------------------------------------------------------- */

static bool is_same_record(const struct kvt_disk_ns_record *a, const struct kvt_disk_ns_record *b)
{
    return a->is_used == b->is_used && a->epoch == b->epoch && a->spec_bytes == b->spec_bytes &&
           memcmp(a->fingerprint, b->fingerprint, KVT_FINGERPRINT_BYTES) == 0 &&
           memcmp(a->spec, b->spec, a->spec_bytes) == 0;
}

/* Of several records of one namespace the one with the greatest epoch counts. */
static void merge(struct kvt_daemon_l3 *l3, const struct kvt_disk_catalog *catalog)
{
    for (uint32_t n = 0; n < KVT_NAMESPACES_MAX; n++)
        if (catalog->namespaces[n].epoch > l3->namespaces[n].epoch)
            l3->namespaces[n] = catalog->namespaces[n];
    l3->stamp_first = KVT_MAX(l3->stamp_first, catalog->state.stamps_end);
}

static void read_catalogs(struct kvt_daemon *daemon, struct kvt_disk_catalog *catalog)
{
    struct kvt_daemon_l3 *l3 = &daemon->l3;

    for (uint32_t i = 0; i < l3->devices_count; i++) {
        struct l3_context *context = &l3->contexts[i];
        int r;

        if (context->device == NULL)
            continue;
        r = kvt_disk_read_catalog(context->device, catalog);
        if (r < 0) {
            kvt_log_error("L3: %s: its catalog cannot be read: %s; its contents are not used",
                          context->path, strerror(-r));
            l3->report.devices[i].report.is_made = true;
            continue;
        }
        if (catalog->records_lost > 0)
            kvt_log_warn("L3: %s: %u records of its catalog are damaged in both copies",
                         context->path, catalog->records_lost);
        if (!catalog->has_state && !l3->report.devices[i].report.is_made) {
            kvt_log_warn("L3: %s: the record of numbers that were given is damaged: its contents "
                         "are not used",
                         context->path);
            l3->report.devices[i].report.is_made = true;
        }
        l3->states[i] = catalog->state;
        merge(l3, catalog);
    }
}

/* Starts soon after each other find a counter that is ahead of the clock. When they have other
 * devices they find the same one: so such a start leaves out some numbers, more of them when it
 * lacks a device and knows it. What is left out is little against 2^48, however often. */
static uint64_t stamp_first(const struct kvt_daemon_l3 *l3)
{
    uint64_t now_ns = kvt_clock_real_ns(), clock = kvt_disk_stamps_at(now_ns);
    uint64_t random = kvt_hash64(&now_ns, sizeof(now_ns), 0), first = KVT_MAX(clock, 1u);

    if (l3->stamp_first > clock)
        first = KVT_MIN(l3->stamp_first + random % KVT_DISK_STAMPS_GAP, KVT_DISK_STAMPS_MAX - 1);
    for (uint32_t i = 0; i < l3->devices_count; i++)
        if (l3->contexts[i].device == NULL)
            return KVT_MIN(first + (1 + random % APART_MAX) * KVT_DISK_STAMPS_RESERVE,
                           KVT_DISK_STAMPS_MAX - 1);
    return first;
}

/* Before anything is served: a number that was given once is never given again. */
static void reserve_stamps(struct kvt_daemon *daemon)
{
    struct kvt_daemon_l3 *l3 = &daemon->l3;

    l3->stamp_first = stamp_first(l3);
    l3->stamp_end = KVT_MIN(l3->stamp_first + KVT_DISK_STAMPS_RESERVE, KVT_DISK_STAMPS_MAX - 1);
    for (uint32_t i = 0; i < l3->devices_count; i++) {
        struct l3_context *context = &l3->contexts[i];
        uint8_t data[KVT_DISK_STATE_BYTES];
        int r;

        if (context->device == NULL)
            continue;
        l3->states[i].stamps_end = l3->stamp_end;
        l3->states[i].starts++;
        kvt_disk_catalog_encode_state(data, &l3->states[i]);
        r = kvt_disk_write_catalog(context->device, KVT_DISK_CATALOG_STATE, data, sizeof(data));
        if (r == 0)
            continue;
        kvt_log_error("L3: %s: its catalog cannot be written: %s; what is put there does not "
                      "outlive this daemon",
                      context->path, strerror(-r));
        context->device = NULL; /* no index for it */
    }
}

int kvt_start_l3(void *ctx)
{
    struct kvt_daemon *daemon = ctx;
    struct kvt_daemon_l3 *l3 = &daemon->l3;
    kvt_autofree struct kvt_disk_catalog *catalog = NULL;
    int r;

    l3->devices_count = kvt_config_devices(daemon->config, l3->devices);
    if (l3->devices_count == 0) {
        kvt_log_info("L3: off");
        return 0;
    }
    catalog = kvt_alloc_zeroed(1, sizeof(*catalog));
    l3->namespaces = kvt_alloc_zeroed(KVT_NAMESPACES_MAX, sizeof(l3->namespaces[0]));
    r = catalog == NULL || l3->namespaces == NULL ? -ENOMEM : open_set(daemon);
    if (r < 0) {
        kvt_log_error("L3: %s", strerror(-r));
        kvt_undo_l3(daemon);
        return fail(daemon, KVT_EXIT_FAILURE, r);
    }
    for (uint32_t i = 0; i < l3->devices_count && r == 0; i++) {
        r = judge(daemon, i);
        l3->contexts[i] = (struct l3_context){
            .device = kvt_disk_set_device(daemon->tiers[KVT_TIER_DISK], i),
            .counters = daemon->tiers[KVT_TIER_DISK]->zones[i].counters,
            .path = l3->devices[i].path,
        };
        if (r == 0 && l3->contexts[i].device != NULL) {
            tell(daemon, i);
            memcpy(l3->store_id, l3->report.devices[i].report.store_id, sizeof(l3->store_id));
        }
    }
    if (r < 0) {
        kvt_undo_l3(daemon);
        return r;
    }
    kvt_log_info("L3: %s", daemon->tiers[KVT_TIER_DISK]->detail);
    read_catalogs(daemon, catalog);
    reserve_stamps(daemon);
    return 0;
}

/* The bytes that were written in a device's life are carried on. The engine may have reserved more
 * numbers since the start: their end is read again, and what cannot be read is left as it is. */
static void write_life(struct kvt_daemon_l3 *l3, uint32_t idx, struct kvt_disk_catalog *now)
{
    struct kvt_disk *device = l3->contexts[idx].device;
    struct kvt_disk_state state = l3->states[idx];
    uint8_t data[KVT_DISK_STATE_BYTES];

    if (device == NULL || l3->stamp_end == 0 || now == NULL ||
        kvt_disk_read_catalog(device, now) < 0 || !now->has_state)
        return;
    state.stamps_end = KVT_MAX(state.stamps_end, now->state.stamps_end);
    state.written_bytes +=
        atomic_load_explicit(&l3->contexts[idx].counters->written_bytes, memory_order_relaxed);
    kvt_disk_catalog_encode_state(data, &state);
    if (kvt_disk_write_catalog(device, KVT_DISK_CATALOG_STATE, data, sizeof(data)) < 0)
        kvt_log_warn("L3: %s: the bytes written in its life cannot be noted",
                     l3->devices[idx].path);
}

void kvt_undo_l3(void *ctx)
{
    struct kvt_daemon *daemon = ctx;
    kvt_autofree struct kvt_disk_catalog *now = kvt_alloc_zeroed(1, sizeof(*now));

    for (uint32_t i = 0; i < daemon->l3.devices_count; i++)
        write_life(&daemon->l3, i, now);
    daemon->tiers[KVT_TIER_DISK] = kvt_tier_close(daemon->tiers[KVT_TIER_DISK]);
    kvt_free(daemon->l3.namespaces);
    daemon->l3 = (struct kvt_daemon_l3){.devices_count = 0};
}

/* ---- indexes -------------------------------------------------------------------------------- */

static int sync_data(void *ctx)
{
    struct l3_context *context = ctx;

    return kvt_disk_sync(context->device);
}

static int write_catalog(void *ctx, uint32_t number, const void *data, uint32_t bytes)
{
    struct l3_context *context = ctx;

    return kvt_disk_write_catalog(context->device, number, data, bytes);
}

/* Of the device's contents only what belongs to namespaces that it knows itself is used: a number
 * may have been another namespace's where this device was not present. */
static void choose_namespaces(struct kvt_daemon_l3 *l3, uint32_t idx,
                              const struct kvt_disk_catalog *own, struct kvt_index_config *config)
{
    for (uint32_t n = 0; n < KVT_NAMESPACES_MAX; n++) {
        const struct kvt_disk_ns_record *record = &l3->namespaces[n];

        if (!record->is_used || l3->report.devices[idx].report.is_made ||
            !own->namespaces[n].is_used ||
            memcmp(own->namespaces[n].fingerprint, record->fingerprint, KVT_FINGERPRINT_BYTES) != 0)
            continue;
        (void)kvt_engine_describe_ns(record, &config->namespaces[n]);
    }
}

/* A device that was not there when a namespace was made or reset, that is new or lost its records,
 * has to hear of it before anything that is put there can be found again. */
static void note_missing(struct kvt_daemon_l3 *l3, uint32_t idx, const struct kvt_disk_catalog *own)
{
    for (uint32_t n = 0; n < KVT_NAMESPACES_MAX; n++)
        if (l3->namespaces[n].is_used && !is_same_record(&own->namespaces[n], &l3->namespaces[n]))
            l3->namespaces_missing[n] |= 1u << idx;
}

static int open_index(struct kvt_daemon *daemon, uint32_t idx, const char *helper_path,
                      struct kvt_disk_catalog *own)
{
    struct kvt_daemon_l3 *l3 = &daemon->l3;
    const struct kvt_config_device *device = &l3->devices[idx];
    const struct kvt_disk_report *report = &l3->report.devices[idx].report;
    struct kvt_index_config config = {
        .path = device->index_path,
        .bytes = device->index_bytes,
        .helper_path = helper_path,
        .is_rebuild_wanted = daemon->config->l3.is_rebuild_wanted,
        .has_siblings = l3->devices_count > 1,
        .data_path = device->path,
        .data_offset_bytes = KVT_DISK_DATA_OFFSET_BYTES,
        .data_bytes = report->bytes - KVT_DISK_DATA_OFFSET_BYTES,
        .data_sync = sync_data,
        .catalog_write = write_catalog,
        .ctx = &l3->contexts[idx],
        .doorbell = &daemon->doorbell,
    };

    memset(own, 0, sizeof(*own));
    memcpy(config.store_id, report->store_id, sizeof(config.store_id));
    memcpy(config.device_uuid, report->device_uuid, sizeof(config.device_uuid));
    if (kvt_disk_read_catalog(l3->contexts[idx].device, own) == 0)
        choose_namespaces(l3, idx, own, &config);
    note_missing(l3, idx, own);
    return kvt_index_open(&l3->indexes[idx], &config);
}

int kvt_start_index(void *ctx)
{
    struct kvt_daemon *daemon = ctx;
    struct kvt_daemon_l3 *l3 = &daemon->l3;
    char helper_path[KVT_PROGRAM_PATH_BYTES];
    kvt_autofree struct kvt_disk_catalog *own = NULL;
    int r;

    if (l3->devices_count == 0)
        return 0;
    r = kvt_program_find("kvtierd-index", helper_path);
    if (r < 0) {
        kvt_log_error("index: the program kvtierd-index cannot be run: %s: install it beside "
                      "kvtierd, or in its libexec directory",
                      strerror(-r));
        return fail(daemon, KVT_EXIT_FAILURE, r);
    }
    own = kvt_alloc_zeroed(1, sizeof(*own));
    if (own == NULL)
        return fail(daemon, KVT_EXIT_FAILURE, -ENOMEM);
    for (uint32_t i = 0; i < l3->devices_count; i++) {
        if (l3->contexts[i].device == NULL)
            continue;
        r = open_index(daemon, i, helper_path, own);
        if (r < 0)
            kvt_log_error("index: %s cannot be opened: %s; what L3 holds at %s does not outlive "
                          "this daemon",
                          l3->devices[i].index_path, strerror(-r), l3->devices[i].path);
    }
    return 0;
}

void kvt_undo_index(void *ctx)
{
    struct kvt_daemon *daemon = ctx;

    for (uint32_t i = 0; i < KVT_ZONES_MAX; i++)
        daemon->l3.indexes[i] = kvt_index_close(daemon->l3.indexes[i]);
}
