#include "tests/common/fake_tier.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/alloc.h"
#include "daemon/base/clock.h"
#include "daemon/base/hash.h"

struct fake_xfer {
    struct kvt_xfer *xfer;
    uint64_t start_ns, due_ns;
};

struct written { /* not synchronised; newest first */
    struct written *older;
    uint64_t offset_bytes, bytes;
    uint8_t before[]; /* what was there */
};

struct fake_tier {
    struct kvt_tier base;
    struct fake_tier_config config;
    uint8_t *memory; /* of device and disk */
    struct fake_xfer *xfers;
    uint32_t count, spoiled, failing;
    uint64_t random, now_ns, outage_end_ns, injected, bad_slots;
    bool is_faulty;
    struct kvt_tier_counters zones[KVT_ZONES_MAX];
    struct written *written[KVT_ZONES_MAX];
};

#define SECTOR_BYTES 512u

static bool chance(struct fake_tier *tier, uint32_t rate)
{
    if (!tier->is_faulty || fake_random(&tier->random) % 1000 >= rate)
        return false;
    tier->injected++;
    return true;
}

static uint8_t *at_place(struct fake_tier *tier, const struct kvt_place *place)
{
    switch (place->kind) {
    case KVT_PLACE_HOST:
        return tier->config.host_memory + place->offset_bytes;
    case KVT_PLACE_DEVICE:
    case KVT_PLACE_DISK:
        return tier->memory + place->offset_bytes;
    default:
        return NULL;
    }
}

/* Slots in host memory have a header before the payload. */
static uint8_t *payload_at(struct fake_tier *tier, const struct kvt_xfer *xfer,
                           const struct kvt_place *place)
{
    uint8_t *at = at_place(tier, place);

    return place->kind == KVT_PLACE_HOST ? at + xfer->header_bytes : at;
}

static void demand(enum kvt_slot_verdict verdict, const char *what)
{
    if (verdict == KVT_SLOT_OK)
        return;
    fprintf(stderr, "fake tier: %s: %s, and no fault was injected\n", what,
            kvt_slot_verdict_text(verdict));
    abort();
}

static void seal(struct fake_tier *tier, const struct kvt_xfer *xfer, uint64_t hash)
{
    uint8_t *slot = at_place(tier, &xfer->dst);

    kvt_slot_header_seal(slot, hash);
    demand(kvt_slot_header_check(slot, &xfer->key), "header of a slot just filled");
}

static uint64_t zone_of(const struct fake_tier *tier, uint64_t offset_bytes)
{
    return tier->config.zones == 0
               ? 0
               : offset_bytes / (tier->config.capacity_bytes / tier->config.zones);
}

/* The disk's bytes there are about to change. */
static void note_write(struct fake_tier *tier, uint64_t offset_bytes, uint64_t bytes)
{
    struct written **newest = &tier->written[zone_of(tier, offset_bytes)];
    struct written *written;

    if (!tier->config.is_volatile)
        return;
    written = malloc(sizeof(*written) + bytes);
    if (written == NULL)
        abort();
    written->older = *newest;
    written->offset_bytes = offset_bytes;
    written->bytes = bytes;
    memcpy(written->before, tier->memory + offset_bytes, bytes);
    *newest = written;
}

static bool is_of_gpu(const struct kvt_place *place)
{
    return place->kind == KVT_PLACE_CLIENT && place->view.layout->is_gpu;
}

/* The pieces of a GPU's memory are where they are here, too. */
static int copy_client(struct kvt_client_view view, uint8_t *payload, bool is_gather,
                       uint64_t *ret_hash)
{
    struct kvt_layout layout = *view.layout;

    layout.is_gpu = false;
    view.layout = &layout;
    return is_gather ? kvt_client_gather(&view, payload, ret_hash)
                     : kvt_client_scatter(&view, payload);
}

static int move_bytes(struct fake_tier *tier, struct kvt_xfer *xfer)
{
    uint64_t bytes = xfer->key.payload_bytes, hash = 0;
    bool is_sealed = xfer->dst.kind == KVT_PLACE_HOST && xfer->src.kind != KVT_PLACE_DISK;
    uint8_t *src, *dst;

    if (xfer->src.kind == KVT_PLACE_HOST)
        demand(kvt_slot_check(at_place(tier, &xfer->src), &xfer->key), "slot in host memory");
    if (xfer->src.kind == KVT_PLACE_CLIENT) {
        if (copy_client(xfer->src.view, payload_at(tier, xfer, &xfer->dst), true,
                        is_sealed ? &hash : NULL) != 0)
            return KVT_XFER_CLIENT_GONE;
    } else if (xfer->dst.kind == KVT_PLACE_CLIENT) {
        if (copy_client(xfer->dst.view, payload_at(tier, xfer, &xfer->src), false, NULL) != 0)
            return KVT_XFER_CLIENT_GONE;
    } else if (tier->config.id == KVT_TIER_DISK) {
        src = at_place(tier, &xfer->src);
        dst = at_place(tier, &xfer->dst);
        if (xfer->dst.kind == KVT_PLACE_DISK)
            note_write(tier, xfer->dst.offset_bytes, xfer->slot_bytes);
        memcpy(dst, src, xfer->slot_bytes);
        xfer->verdict = kvt_slot_check(dst, &xfer->key);
        if (tier->config.is_crash_tolerant && xfer->verdict != KVT_SLOT_OK) {
            tier->bad_slots++;
            return KVT_XFER_BAD_SLOT;
        }
        demand(xfer->verdict, "slot on disk");
    } else {
        src = payload_at(tier, xfer, &xfer->src);
        dst = payload_at(tier, xfer, &xfer->dst);
        memcpy(dst, src, bytes);
        hash = kvt_hash64(dst, bytes, 0);
    }
    if (is_sealed)
        seal(tier, xfer, hash);
    return KVT_XFER_DONE;
}

static void scribble(struct fake_tier *tier, const struct kvt_xfer *xfer)
{
    if (xfer->dst.kind == KVT_PLACE_CLIENT || xfer->dst.kind == KVT_PLACE_NONE)
        return;
    if (xfer->dst.kind == KVT_PLACE_DISK)
        note_write(tier, xfer->dst.offset_bytes, xfer->slot_bytes);
    memset(at_place(tier, &xfer->dst), 0xee,
           xfer->dst.kind == KVT_PLACE_DEVICE ? xfer->key.payload_bytes : xfer->slot_bytes);
}

static bool is_out(const struct fake_tier *tier, const struct kvt_place *at)
{
    const struct kvt_tier_counters *zone;

    if (tier->config.zones == 0 || (at->kind != KVT_PLACE_DISK && at->kind != KVT_PLACE_DEVICE))
        return false;
    zone = &tier->zones[zone_of(tier, at->offset_bytes)];
    return atomic_load(&zone->health) != KVT_TIER_HEALTH_OK ||
           (at->kind == KVT_PLACE_DEVICE && atomic_load(&zone->incarnation) != at->incarnation);
}

static bool is_client_lost(const struct fake_tier *tier, const struct kvt_place *at)
{
    return is_of_gpu(at) &&
           fake_tier_incarnation(tier, at->view.layout->gpu_zone) != at->view.layout->incarnation;
}

/* Each transfer comes to the tier that can do it. */
static void demand_tier(const struct fake_tier *tier, const struct kvt_xfer *xfer)
{
    enum kvt_tier_id wanted = KVT_TIER_HOST;

    if ((xfer->flags & KVT_XFER_FLUSH) != 0 || xfer->src.kind == KVT_PLACE_DISK ||
        xfer->dst.kind == KVT_PLACE_DISK)
        wanted = KVT_TIER_DISK;
    else if (xfer->src.kind == KVT_PLACE_DEVICE || xfer->dst.kind == KVT_PLACE_DEVICE ||
             is_of_gpu(&xfer->src) || is_of_gpu(&xfer->dst))
        wanted = KVT_TIER_DEVICE;
    if (wanted == tier->config.id)
        return;
    fprintf(stderr, "fake tier: a transfer of L%d came to L%d\n", (int)wanted + 1,
            (int)tier->config.id + 1);
    abort();
}

static int run(struct fake_tier *tier, struct kvt_xfer *xfer, uint64_t start_ns)
{
    bool has_client = xfer->src.kind == KVT_PLACE_CLIENT || xfer->dst.kind == KVT_PLACE_CLIENT;

    if (start_ns > xfer->deadline_ns)
        return KVT_XFER_LATE;
    if (is_client_lost(tier, &xfer->src) || is_client_lost(tier, &xfer->dst))
        return KVT_XFER_CLIENT_GONE;
    if (tier->now_ns < tier->outage_end_ns || is_out(tier, &xfer->src) || is_out(tier, &xfer->dst))
        return KVT_XFER_OUT_OF_SERVICE;
    if (chance(tier, tier->config.outage_rate)) {
        tier->outage_end_ns =
            tier->now_ns + fake_random(&tier->random) % tier->config.outage_ns_max;
        return KVT_XFER_OUT_OF_SERVICE;
    }
    if (tier->failing > 0) {
        tier->failing--;
        tier->injected++;
        return -EIO;
    }
    if (chance(tier, tier->config.error_rate))
        return -EIO;
    if ((xfer->flags & KVT_XFER_FLUSH) != 0)
        return KVT_XFER_DONE;
    if (tier->spoiled > 0 && xfer->src.kind == KVT_PLACE_DISK) {
        tier->spoiled--;
        tier->injected++;
        xfer->verdict = KVT_SLOT_BAD_PAYLOAD;
        return KVT_XFER_BAD_SLOT;
    }
    if (xfer->src.kind != KVT_PLACE_CLIENT && chance(tier, tier->config.bad_slot_rate)) {
        xfer->verdict = KVT_SLOT_BAD_PAYLOAD;
        return KVT_XFER_BAD_SLOT;
    }
    if (chance(tier, tier->config.short_rate))
        return KVT_XFER_SHORT;
    if (has_client && chance(tier, tier->config.client_gone_rate))
        return KVT_XFER_CLIENT_GONE;
    return move_bytes(tier, xfer);
}

static int fake_submit(struct kvt_tier *base, struct kvt_xfer *const xfers[], uint32_t count,
                       uint32_t *ret_taken)
{
    struct fake_tier *tier = (struct fake_tier *)base;
    uint32_t taken = 0;

    while (taken < count && tier->count < base->inflight_max &&
           !chance(tier, tier->config.full_rate)) {
        struct fake_xfer *at = &tier->xfers[tier->count++];
        uint64_t delay_ns = 1 + fake_random(&tier->random) % tier->config.delay_ns_max;

        KVT_ASSERT(xfers[taken]->deadline_ns != 0);
        demand_tier(tier, xfers[taken]);
        at->xfer = xfers[taken++];
        at->start_ns = tier->now_ns + delay_ns / 2;
        at->due_ns = tier->now_ns + delay_ns;
    }
    if (taken == 0)
        return KVT_TIER_E_FULL;
    *ret_taken = taken;
    return 0;
}

static uint32_t fake_reap(struct kvt_tier *base, struct kvt_xfer *ret_xfers[], uint32_t max)
{
    struct fake_tier *tier = (struct fake_tier *)base;
    uint32_t done = 0;

    while (done < max) {
        uint32_t best = UINT32_MAX;
        struct kvt_xfer *xfer;

        for (uint32_t i = 0; i < tier->count; i++)
            if (tier->xfers[i].due_ns <= tier->now_ns &&
                (best == UINT32_MAX || tier->xfers[i].due_ns < tier->xfers[best].due_ns))
                best = i;
        if (best == UINT32_MAX)
            break;
        xfer = tier->xfers[best].xfer;
        xfer->status = run(tier, xfer, tier->xfers[best].start_ns);
        if (xfer->status != KVT_XFER_DONE)
            scribble(tier, xfer);
        xfer->started_ns = tier->xfers[best].start_ns;
        xfer->done_ns = tier->xfers[best].due_ns;
        tier->xfers[best] = tier->xfers[--tier->count];
        ret_xfers[done++] = xfer;
    }
    atomic_store(&base->counters.health,
                 tier->now_ns < tier->outage_end_ns ? KVT_TIER_HEALTH_OUT : KVT_TIER_HEALTH_OK);
    return done;
}

static void fake_close(struct kvt_tier *base)
{
    struct fake_tier *tier = (struct fake_tier *)base;

    KVT_ASSERT(tier->count == 0);
    for (uint32_t i = 0; i < KVT_ZONES_MAX; i++)
        fake_tier_sync(tier, i);
    kvt_free(tier->memory);
    kvt_free(tier->xfers);
    kvt_free(tier);
}

static const struct kvt_tier_ops fake_ops = {
    .name = "fake", .submit = fake_submit, .reap = fake_reap, .close = fake_close};

struct fake_tier *fake_tier_new(const struct fake_tier_config *config)
{
    struct fake_tier *tier = kvt_alloc_zeroed(1, sizeof(*tier));

    if (tier == NULL)
        return NULL;
    tier->config = *config;
    tier->random = config->seed;
    tier->is_faulty = true;
    tier->base.ops = &fake_ops;
    tier->base.capacity_bytes = config->capacity_bytes;
    tier->base.inflight_max = config->inflight_max;
    tier->base.zones_count = config->zones;
    tier->base.payload_bytes_max = config->payload_bytes_max;
    for (uint32_t i = 0; i < config->zones; i++)
        tier->base.zones[i] =
            (struct kvt_tier_zone){.base_bytes = i * (config->capacity_bytes / config->zones),
                                   .bytes = config->capacity_bytes / config->zones,
                                   .counters = &tier->zones[i]};
    tier->xfers = kvt_alloc_zeroed(config->inflight_max, sizeof(*tier->xfers));
    if (config->id != KVT_TIER_HOST)
        tier->memory = kvt_alloc_zeroed(1, config->capacity_bytes);
    if (tier->xfers == NULL || (config->id != KVT_TIER_HOST && tier->memory == NULL)) {
        fake_close(&tier->base);
        return NULL;
    }
    return tier;
}

void fake_tier_set_zone_out(struct fake_tier *tier, uint32_t zone, bool is_out)
{
    atomic_store(&tier->zones[zone].health, is_out ? KVT_TIER_HEALTH_OUT : KVT_TIER_HEALTH_OK);
}

static void garble(struct fake_tier *tier, uint32_t zone)
{
    uint64_t bytes = tier->config.capacity_bytes / tier->config.zones;

    KVT_ASSERT(tier->config.id == KVT_TIER_DEVICE && zone < tier->config.zones);
    memset(tier->memory + zone * bytes, (int)(fake_random(&tier->random) & 0xff), bytes);
}

void fake_tier_lose_zone(struct fake_tier *tier, uint32_t zone)
{
    garble(tier, zone);
    atomic_fetch_add(&tier->zones[zone].incarnation, 1);
    atomic_store(&tier->zones[zone].health, KVT_TIER_HEALTH_OUT);
}

void fake_tier_revive_zone(struct fake_tier *tier, uint32_t zone)
{
    garble(tier, zone);
    atomic_store(&tier->zones[zone].health, KVT_TIER_HEALTH_OK);
}

bool fake_tier_is_zone_out(const struct fake_tier *tier, uint32_t zone)
{
    return atomic_load(&tier->zones[zone].health) != KVT_TIER_HEALTH_OK;
}

uint32_t fake_tier_incarnation(const struct fake_tier *tier, uint32_t zone)
{
    return atomic_load(&tier->zones[zone].incarnation);
}

void fake_tier_sync(struct fake_tier *tier, uint32_t zone)
{
    while (tier->written[zone] != NULL) {
        struct written *written = tier->written[zone];

        tier->written[zone] = written->older;
        free(written);
    }
}

void fake_tier_crash(struct fake_tier *tier)
{
    KVT_ASSERT(tier->count == 0);
    for (uint32_t zone = 0; zone < KVT_ZONES_MAX; zone++) {
        for (const struct written *at = tier->written[zone]; at != NULL; at = at->older) {
            uint64_t fate = fake_random(&tier->random) % 4; /* there, gone, or a bit of both */

            for (uint64_t done = 0; done < at->bytes; done += SECTOR_BYTES)
                if (fate == 1 || (fate > 1 && fake_random(&tier->random) % 2 == 0))
                    memcpy(tier->memory + at->offset_bytes + done, at->before + done,
                           KVT_MIN(at->bytes - done, (uint64_t)SECTOR_BYTES));
        }
        fake_tier_sync(tier, zone);
    }
}

uint8_t *fake_tier_memory(struct fake_tier *tier)
{
    return tier->memory;
}

uint64_t fake_tier_bad_slots(const struct fake_tier *tier)
{
    return tier->bad_slots;
}

struct kvt_tier *fake_tier_base(struct fake_tier *tier)
{
    return &tier->base;
}

void fake_tier_set_time(struct fake_tier *tier, uint64_t now_ns)
{
    KVT_ASSERT(now_ns >= tier->now_ns);
    tier->now_ns = now_ns;
}

uint64_t fake_tier_next_ns(const struct fake_tier *tier)
{
    uint64_t next_ns = KVT_TIME_NEVER_NS;

    for (uint32_t i = 0; i < tier->count; i++)
        next_ns = KVT_MIN(next_ns, tier->xfers[i].due_ns);
    return next_ns;
}

void fake_tier_set_faulty(struct fake_tier *tier, bool is_faulty)
{
    tier->is_faulty = is_faulty;
    if (!is_faulty)
        tier->outage_end_ns = 0;
}

void fake_tier_spoil(struct fake_tier *tier, uint32_t count)
{
    KVT_ASSERT(tier->config.id == KVT_TIER_DISK);
    tier->spoiled = count;
}

void fake_tier_fail(struct fake_tier *tier, uint32_t count)
{
    tier->failing = count;
}

uint64_t fake_tier_injected(const struct fake_tier *tier)
{
    return tier->injected;
}
