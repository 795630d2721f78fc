#include "tiers/disk/set.h"

#include <stdio.h>
#include <string.h>

#include "daemon/base/alloc.h"
#include "daemon/base/bytes.h"
#include "tiers/disk/loop.h"
#include "tiers/disk/super.h"
#include "tiers/worker.h"
#include "tiers/zones.h"

#define RUN_MAX 64u /* neighbours in a batch for one device go to it in one call */

struct member {
    struct kvt_tier *tier; /* NULL: could not be opened */
    uint32_t writes_open;  /* taken, not reaped */
    /* Writes that came back done, and how many of them came before a good flush was taken. Those
     * that it found on their way are flushed once more: that is cheap. */
    uint64_t writes_done, writes_durable;
};

/* A flush on its way to several devices. The parts' places are not used by a device: the offset of
 * a part's dst keeps how many writes were done when it was taken. */
struct set_flush {
    struct kvt_xfer *xfer; /* NULL: free */
    uint32_t parts_left;
    int status;
    struct kvt_xfer parts[KVT_ZONES_MAX];
};

struct disk_set {
    struct kvt_tier tier; /* first */
    uint32_t members_count, reap_first;
    struct member members[KVT_ZONES_MAX];
    struct kvt_tier_counters absent[KVT_ZONES_MAX];
    uint32_t outstanding;
    struct kvt_worker_queue finished; /* flushes that no device had to see */
    struct kvt_doorbell *bell;
    struct set_flush flushes[KVT_DISK_SET_FLUSHES];
};

static struct disk_set *set_of(struct kvt_tier *tier)
{
    return KVT_CONTAINER_OF(tier, struct disk_set, tier);
}

/* ---- transfers ------------------------------------------------------------------------------ */

static struct kvt_place *place_on_disk(struct kvt_xfer *xfer)
{
    return xfer->src.kind == KVT_PLACE_DISK ? &xfer->src : &xfer->dst;
}

static bool is_write(const struct kvt_xfer *xfer)
{
    return !(xfer->flags & KVT_XFER_FLUSH) && xfer->src.kind != KVT_PLACE_DISK;
}

/* Every device has room for all that the set takes. */
static void give(struct member *member, struct kvt_xfer *const xfers[], uint32_t count)
{
    uint32_t taken = 0;

    KVT_ASSERT(kvt_tier_submit(member->tier, xfers, count, &taken) == 0);
    KVT_ASSERT(taken == count);
}

static bool has_undurable(const struct member *member)
{
    return member->tier != NULL &&
           (member->writes_open > 0 || member->writes_done != member->writes_durable);
}

static void settle(struct member *member, const struct kvt_xfer *flush)
{
    if (flush->status == KVT_XFER_DONE)
        member->writes_durable = KVT_MAX(member->writes_durable, flush->dst.offset_bytes);
}

/* False: too many are under way. */
static bool flush_all(struct disk_set *set, struct kvt_xfer *xfer)
{
    struct set_flush *flush = NULL;

    for (uint32_t i = 0; i < KVT_DISK_SET_FLUSHES && flush == NULL; i++)
        if (set->flushes[i].xfer == NULL)
            flush = &set->flushes[i];
    if (flush == NULL)
        return false;
    xfer->verdict = KVT_SLOT_OK;
    xfer->started_ns = xfer->done_ns = 0;
    flush->parts_left = 0;
    flush->status = KVT_XFER_DONE;
    for (uint32_t i = 0; i < set->members_count; i++) {
        struct kvt_xfer *part = &flush->parts[i];

        if (!has_undurable(&set->members[i]))
            continue;
        *part = (struct kvt_xfer){.flags = xfer->flags,
                                  .deadline_ns = xfer->deadline_ns,
                                  .dst.offset_bytes = set->members[i].writes_done,
                                  .owner = flush};
        flush->parts_left++;
        give(&set->members[i], &part, 1);
    }
    if (flush->parts_left > 0) {
        flush->xfer = xfer;
        return true;
    }
    xfer->status = KVT_XFER_DONE;
    kvt_worker_queue_push(&set->finished, xfer);
    kvt_doorbell_ring(set->bell);
    return true;
}

static bool is_part(const struct disk_set *set, const struct kvt_xfer *xfer)
{
    uintptr_t first = (uintptr_t)set->flushes, at = (uintptr_t)xfer;

    return at >= first && at < first + sizeof(set->flushes);
}

/* The flush that @part was the last of, or NULL. */
static struct kvt_xfer *part_ended(struct member *member, const struct kvt_xfer *part)
{
    struct set_flush *flush = part->owner;
    struct kvt_xfer *xfer = flush->xfer;

    KVT_ASSERT(xfer != NULL && flush->parts_left > 0);
    settle(member, part);
    if (flush->status == KVT_XFER_DONE)
        flush->status = part->status;
    xfer->started_ns =
        xfer->started_ns == 0 ? part->started_ns : KVT_MIN(xfer->started_ns, part->started_ns);
    xfer->done_ns = KVT_MAX(xfer->done_ns, part->done_ns);
    if (--flush->parts_left > 0)
        return NULL;
    xfer->status = flush->status;
    flush->xfer = NULL;
    return xfer;
}

/* The next of @xfers to one device: as many neighbours as go to the same, their places made that
 * device's own. Returns how many, 0: a flush is refused. */
static uint32_t submit_run(struct disk_set *set, struct kvt_xfer *const xfers[], uint32_t count)
{
    uint32_t zone, run = 0;

    if ((xfers[0]->flags & KVT_XFER_FLUSH) && xfers[0]->dst.kind != KVT_PLACE_DISK)
        return flush_all(set, xfers[0]) ? 1 : 0;
    zone = kvt_zone_of(&set->tier, place_on_disk(xfers[0])->offset_bytes);
    while (run < KVT_MIN(count, RUN_MAX)) {
        const struct kvt_tier_zone *at = &set->tier.zones[zone];
        struct kvt_place *place = place_on_disk(xfers[run]);

        if (place->kind != KVT_PLACE_DISK || place->offset_bytes - at->base_bytes >= at->bytes)
            break;
        if (xfers[run]->flags & KVT_XFER_FLUSH) {
            if (run == 0) { /* alone: it keeps how many were done before it */
                place->offset_bytes = set->members[zone].writes_done;
                run = 1;
            }
            break;
        }
        KVT_ASSERT(xfers[run]->slot_bytes <= at->base_bytes + at->bytes - place->offset_bytes);
        place->offset_bytes -= at->base_bytes;
        set->members[zone].writes_open += is_write(xfers[run]);
        run++;
    }
    give(&set->members[zone], xfers, run);
    return run;
}

static int set_submit(struct kvt_tier *tier, struct kvt_xfer *const xfers[], uint32_t count,
                      uint32_t *ret_taken)
{
    struct disk_set *set = set_of(tier);
    uint32_t room = KVT_MIN(count, tier->inflight_max - set->outstanding), taken = 0;

    KVT_ASSERT(count > 0);
    while (taken < room) {
        uint32_t run = submit_run(set, xfers + taken, room - taken);

        if (run == 0)
            break;
        taken += run;
    }
    if (taken == 0)
        return KVT_TIER_E_FULL;
    set->outstanding += taken;
    *ret_taken = taken;
    return 0;
}

/* ---- completions ---------------------------------------------------------------------------- */

/* What came back from a device becomes what the engine gave, or is a part of it. */
static struct kvt_xfer *take_back(struct disk_set *set, uint32_t zone, struct kvt_xfer *xfer)
{
    struct member *member = &set->members[zone];

    if (is_part(set, xfer))
        return part_ended(member, xfer);
    if (xfer->flags & KVT_XFER_FLUSH) {
        settle(member, xfer);
        xfer->dst.offset_bytes = set->tier.zones[zone].base_bytes;
        return xfer;
    }
    if (is_write(xfer)) {
        KVT_ASSERT(member->writes_open > 0);
        member->writes_open--;
        member->writes_done += xfer->status == KVT_XFER_DONE;
    }
    place_on_disk(xfer)->offset_bytes += set->tier.zones[zone].base_bytes;
    return xfer;
}

static uint32_t reap_from(struct disk_set *set, uint32_t zone, struct kvt_xfer *ret_xfers[],
                          uint32_t max)
{
    uint32_t got, count = 0;

    if (set->members[zone].tier == NULL || max == 0)
        return 0;
    got = kvt_tier_reap(set->members[zone].tier, ret_xfers, max);
    for (uint32_t i = 0; i < got; i++) {
        struct kvt_xfer *xfer = take_back(set, zone, ret_xfers[i]);

        if (xfer != NULL)
            ret_xfers[count++] = xfer;
    }
    return count;
}

/* A share for each device first, then what room is left, beginning with another one each time. */
static uint32_t set_reap(struct kvt_tier *tier, struct kvt_xfer *ret_xfers[], uint32_t max)
{
    struct disk_set *set = set_of(tier);
    uint32_t share = KVT_MAX(max / set->members_count, 1u), count = 0;

    while (count < max && set->finished.head != NULL)
        ret_xfers[count++] = kvt_worker_queue_pop(&set->finished);
    for (uint32_t round = 0; round < 2; round++)
        for (uint32_t i = 0; i < set->members_count && count < max; i++)
            count += reap_from(set, (set->reap_first + i) % set->members_count, ret_xfers + count,
                               round == 0 ? KVT_MIN(share, max - count) : max - count);
    set->reap_first = (set->reap_first + 1) % set->members_count;
    atomic_store_explicit(&tier->counters.health, kvt_tier_health(tier), memory_order_relaxed);
    if (count > 0)
        kvt_zones_sum(tier);
    KVT_ASSERT(count <= set->outstanding);
    set->outstanding -= count;
    return count;
}

/* ---- open, close ---------------------------------------------------------------------------- */

static void set_close(struct kvt_tier *tier)
{
    struct disk_set *set = set_of(tier);

    /* Each looks whether it may be closed with what it has. */
    for (uint32_t i = 0; i < set->members_count; i++)
        set->members[i].tier = kvt_tier_close(set->members[i].tier);
    kvt_free(set);
}

static const struct kvt_tier_ops set_ops = {
    .name = "disk", .submit = set_submit, .reap = set_reap, .close = set_close};

static void report_fill(struct kvt_disk_set_device *device, int result,
                        const struct kvt_disk_report *report)
{
    const char *why = report->why;

    *device = (struct kvt_disk_set_device){.result = result, .pid = report->pid, .report = *report};
    if (result == 0)
        snprintf(device->text, sizeof(device->text), "open");
    else if (result == KVT_DISK_E_BUSY)
        snprintf(device->text, sizeof(device->text), "another daemon (pid %d) has it", device->pid);
    else
        snprintf(device->text, sizeof(device->text), "%s%s%s", kvt_disk_result_text(result),
                 why[0] != '\0' ? ": " : "", why);
}

/* Zones follow each other in the order of the configuration. */
static void zone_fill(struct kvt_tier *tier, uint32_t idx, const char *path, uint64_t bytes,
                      struct kvt_tier_counters *counters)
{
    struct kvt_tier_zone *zone = &tier->zones[idx];
    size_t length = strlen(path), skipped = length - KVT_MIN(length, sizeof(zone->name) - 1);

    KVT_ASSERT(idx == tier->zones_count && idx < KVT_ZONES_MAX);
    zone->base_bytes = idx == 0 ? 0 : tier->zones[idx - 1].base_bytes + tier->zones[idx - 1].bytes;
    zone->bytes = bytes;
    zone->counters = counters;
    zone->numa_node = -1;
    memcpy(zone->name, path + skipped, length - skipped);
    tier->zones_count++;
}

static void open_members(struct disk_set *set, const struct kvt_disk_set_config *config,
                         struct kvt_disk_set_report *report)
{
    uint8_t store_id[KVT_DISK_ID_BYTES] = {0};
    bool is_known = false;

    for (uint32_t i = 0; i < config->devices_count && !is_known; i++)
        is_known = kvt_disk_store_id_find(config->devices[i].path, store_id);
    for (uint32_t i = 0; i < config->devices_count; i++) {
        struct kvt_disk_config device = config->devices[i];
        struct member *member = &set->members[i];
        struct kvt_disk_report found;
        int r;

        device.inflight_max = set->tier.inflight_max;
        if (is_known && kvt_bytes_are_zero(device.store_id, sizeof(device.store_id)))
            memcpy(device.store_id, store_id, sizeof(store_id));
        r = kvt_disk_open(&member->tier, &device, &found);
        if (r == 0 && !is_known) {
            memcpy(store_id, found.store_id, sizeof(store_id));
            is_known = true;
        }
        report_fill(&report->devices[i], r, &found);
        if (r != 0) {
            atomic_init(&set->absent[i].health, KVT_TIER_HEALTH_OUT);
            zone_fill(&set->tier, i, device.path, 0, &set->absent[i]);
            continue;
        }
        report->opened_count++;
        zone_fill(&set->tier, i, device.path, member->tier->capacity_bytes,
                  &member->tier->counters);
        set->tier.capacity_bytes += member->tier->capacity_bytes;
    }
}

static void describe(struct disk_set *set, const struct kvt_disk_set_report *report)
{
    const char *first = "";

    for (uint32_t i = set->members_count; i > 0; i--)
        if (set->members[i - 1].tier != NULL)
            first = set->members[i - 1].tier->detail;
    snprintf(set->tier.detail, sizeof(set->tier.detail), "%u of %u devices%s%.120s",
             report->opened_count, set->members_count, first[0] != '\0' ? ", the first: " : "",
             first);
}

int kvt_disk_set_open(struct kvt_tier **ret_tier, const struct kvt_disk_set_config *config,
                      struct kvt_disk_set_report *ret_report)
{
    struct kvt_disk_set_report report = {0};
    struct disk_set *set;

    if (config->devices_count == 0 || config->devices_count > KVT_ZONES_MAX)
        return kvt_trace(-EINVAL);
    set = kvt_alloc_zeroed(1, sizeof(*set));
    if (set == NULL)
        return kvt_trace(-ENOMEM);
    set->tier.ops = &set_ops;
    set->members_count = config->devices_count;
    set->bell = config->devices[0].doorbell;
    for (uint32_t i = 0; i < config->devices_count; i++)
        set->tier.inflight_max += config->devices[i].inflight_max;
    open_members(set, config, &report);
    describe(set, &report);
    atomic_init(&set->tier.counters.health, kvt_tier_health(&set->tier));
    *ret_report = report;
    *ret_tier = &set->tier;
    if (config->devices_count == 1 && report.opened_count == 1) {
        /* Its offsets are the set's: nothing has to stand between. */
        *ret_tier = set->members[0].tier;
        zone_fill(*ret_tier, 0, config->devices[0].path, (*ret_tier)->capacity_bytes,
                  &(*ret_tier)->counters);
        kvt_free(set);
    }
    return 0;
}

struct kvt_disk *kvt_disk_set_device(struct kvt_tier *tier, uint32_t idx)
{
    struct kvt_tier *device = tier;

    KVT_ASSERT(idx < tier->zones_count);
    if (tier->ops == &set_ops)
        device = set_of(tier)->members[idx].tier;
    return device == NULL ? NULL : KVT_CONTAINER_OF(device, struct kvt_disk, worker.tier);
}
