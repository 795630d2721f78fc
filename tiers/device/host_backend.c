/* L1 in ordinary memory: anonymous, on transparent huge pages where they are given, payload alone.
 *
 * It behaves as a device does: an arena that only this tier's thread touches, reached by copies. */
#include <stdio.h>
#include <string.h>

#include "daemon/base/alloc.h"
#include "daemon/base/guard.h"
#include "tiers/copy.h"
#include "tiers/device/backend.h"
#include "tiers/pages.h"
#include "tiers/worker.h"

struct device {
    struct kvt_worker worker; /* first */
    uint8_t *arena;
    uint64_t bytes;
    uint8_t *host_memory;
    uint64_t host_memory_bytes;
};

static struct device *device_of(const struct kvt_tier *tier)
{
    return KVT_CONTAINER_OF(tier, struct device, worker.tier);
}

/* The payload's place in the arena. */
static uint8_t *device_payload(const struct device *device, const struct kvt_xfer *xfer,
                               const struct kvt_place *place)
{
    KVT_ASSERT(place->offset_bytes <= device->bytes);
    KVT_ASSERT(xfer->key.payload_bytes <= device->bytes - place->offset_bytes);
    return device->arena + place->offset_bytes;
}

static uint8_t *host_slot(const struct device *device, const struct kvt_xfer *xfer,
                          const struct kvt_place *place)
{
    KVT_ASSERT(place->offset_bytes <= device->host_memory_bytes);
    KVT_ASSERT(xfer->header_bytes + xfer->key.payload_bytes <=
               device->host_memory_bytes - place->offset_bytes);
    return device->host_memory + place->offset_bytes;
}

static int copy_client_to_device(struct device *device, struct kvt_xfer *xfer)
{
    uint8_t *payload = device_payload(device, xfer, &xfer->dst);

    KVT_ASSERT(xfer->src.view.layout->stored_bytes == xfer->key.payload_bytes);
    return kvt_client_gather(&xfer->src.view, payload, NULL) < 0 ? KVT_XFER_CLIENT_GONE
                                                                 : KVT_XFER_DONE;
}

static int copy_device_to_client(struct device *device, struct kvt_xfer *xfer)
{
    const uint8_t *payload = device_payload(device, xfer, &xfer->src);

    KVT_ASSERT(xfer->dst.view.layout->stored_bytes == xfer->key.payload_bytes);
    return kvt_client_scatter(&xfer->dst.view, payload) < 0 ? KVT_XFER_CLIENT_GONE : KVT_XFER_DONE;
}

static int copy_device_to_host(struct device *device, struct kvt_xfer *xfer)
{
    const uint8_t *payload = device_payload(device, xfer, &xfer->src);
    uint8_t *slot = host_slot(device, xfer, &xfer->dst);

    kvt_slot_header_seal(
        slot, kvt_copy_hashed(slot + xfer->header_bytes, payload, xfer->key.payload_bytes));
    KVT_DEBUG_ASSERT(kvt_slot_header_check(slot, &xfer->key) == KVT_SLOT_OK);
    return KVT_XFER_DONE;
}

static int copy_host_to_device(struct device *device, struct kvt_xfer *xfer)
{
    const uint8_t *slot = host_slot(device, xfer, &xfer->src);

    if (xfer->flags & KVT_XFER_VERIFY) {
        xfer->verdict = kvt_slot_check(slot, &xfer->key);
        if (xfer->verdict != KVT_SLOT_OK)
            return KVT_XFER_BAD_SLOT;
    }
    memcpy(device_payload(device, xfer, &xfer->dst), slot + xfer->header_bytes,
           xfer->key.payload_bytes);
    return KVT_XFER_DONE;
}

static void device_execute(struct kvt_worker *worker, struct kvt_xfer *xfer)
{
    struct device *device = device_of(&worker->tier);
    struct kvt_tier_counters *counters = &worker->tier.counters;
    enum kvt_place_kind from = xfer->src.kind, to = xfer->dst.kind;
    uint64_t moved_bytes = xfer->key.payload_bytes;

    if (from == KVT_PLACE_CLIENT && to == KVT_PLACE_DEVICE) {
        xfer->status = copy_client_to_device(device, xfer);
    } else if (from == KVT_PLACE_DEVICE && to == KVT_PLACE_CLIENT) {
        xfer->status = copy_device_to_client(device, xfer);
        moved_bytes = kvt_client_view_bytes(&xfer->dst.view);
    } else if (from == KVT_PLACE_DEVICE && to == KVT_PLACE_HOST) {
        xfer->status = copy_device_to_host(device, xfer);
    } else {
        KVT_ASSERT(from == KVT_PLACE_HOST && to == KVT_PLACE_DEVICE);
        xfer->status = copy_host_to_device(device, xfer);
    }
    if (xfer->status != KVT_XFER_DONE)
        return;
    kvt_worker_count(to == KVT_PLACE_DEVICE ? &counters->writes : &counters->reads, 1);
    kvt_worker_count(to == KVT_PLACE_DEVICE ? &counters->written_bytes : &counters->read_bytes,
                     moved_bytes);
}

static void device_close(struct kvt_tier *tier)
{
    struct device *device = device_of(tier);

    kvt_worker_stop(&device->worker);
    kvt_worker_deinit(&device->worker);
    kvt_pages_unmap(device->arena, device->bytes);
    kvt_free(device);
}

static const struct kvt_tier_ops device_ops = {
    .name = "device", .submit = kvt_worker_submit, .reap = kvt_worker_reap, .close = device_close};

int kvt_device_host_open(struct kvt_tier **ret_tier, const struct kvt_device_config *config)
{
    struct device *device;
    uint32_t thp_pct;
    int r;

    r = kvt_guard_install();
    if (r < 0)
        return kvt_trace(r);
    device = kvt_alloc_aligned(KVT_CACHE_LINE_BYTES, sizeof(*device));
    if (device == NULL)
        return kvt_trace(-ENOMEM);
    device->bytes = kvt_round_down(config->bytes, KVT_DIO_ALIGN_BYTES);
    device->host_memory = config->host_memory;
    device->host_memory_bytes = config->host_memory_bytes;
    device->worker.execute = device_execute;
    r = kvt_worker_init(&device->worker, &device_ops, config->inflight_max, config->doorbell);
    if (r < 0)
        goto undo_alloc;
    r = kvt_pages_map(-1, device->bytes, true, &device->arena);
    if (r < 0)
        goto undo_worker;
    r = kvt_pages_populate(device->arena, device->bytes);
    if (r < 0)
        goto undo_arena;
    thp_pct = kvt_pages_thp_pct(device->arena, device->bytes);
    device->worker.tier.capacity_bytes = device->bytes;
    snprintf(device->worker.tier.detail, sizeof(device->worker.tier.detail),
             "host memory, transparent huge pages %u %%", thp_pct);
    r = kvt_worker_start(&device->worker, "kvt-device", kvt_worker_loop_each);
    if (r < 0)
        goto undo_arena;
    *ret_tier = &device->worker.tier;
    return 0;
undo_arena:
    kvt_pages_unmap(device->arena, device->bytes);
undo_worker:
    kvt_worker_deinit(&device->worker);
undo_alloc:
    kvt_free(device);
    return kvt_trace(r);
}
