/* Transfers of the model's world: what may be submitted, and what has to be true when it comes
 * back. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/clock.h"
#include "tests/device/model_world_internal.h"

#define HOUR_NS (3600 * KVT_NS_PER_S)

static bool is_gpu_client(const struct world *world, const struct world_place *place)
{
    return place->kind == KVT_PLACE_CLIENT && world_zone_of(world, place) != KVT_GPU_NONE;
}

/* What the tier does; a client of another GPU has to do with slots of this one only. */
static bool is_allowed(const struct world *world, const struct world_place *src,
                       const struct world_place *dst)
{
    bool has_slot = src->kind == KVT_PLACE_DEVICE || dst->kind == KVT_PLACE_DEVICE;

    if (src->kind == dst->kind)
        return false;
    if (has_slot)
        return true;
    return is_gpu_client(world, src) || is_gpu_client(world, dst);
}

static struct kvt_slot_key key_of(const struct world_op *op, uint32_t spec)
{
    return (struct kvt_slot_key){.block_id = op->id,
                                 .generation = op->id,
                                 .payload_bytes = world_spec(spec)->stored_bytes,
                                 .block_tokens = KVT_BLOCK_TOKENS_DEFAULT};
}

/* As the engine does before it gives a slot of L2 to be filled. */
static void write_header(const struct world *world, const struct world_op *op,
                         const struct world_place *place, uint64_t payload_bytes)
{
    uint32_t tokens[KVT_BLOCK_TOKENS_DEFAULT] = {0};
    struct kvt_slot_info info = {.block_id = op->id,
                                 .generation = op->id,
                                 .payload_bytes = payload_bytes,
                                 .block_tokens = KVT_BLOCK_TOKENS_DEFAULT};

    kvt_slot_header_write(world_host_slot(world, place), &info, tokens);
}

static void set_place(struct world *world, struct world_op *op, struct kvt_place *to,
                      struct world_place *place)
{
    *to = (struct kvt_place){.kind = place->kind};
    if (place->kind == KVT_PLACE_DEVICE) {
        const struct world_zone *zone = &world->zones[place->idx % world->zones_count];

        op->incarnation = to->incarnation = zone->incarnation;
        to->offset_bytes = zone->base_bytes + place->idx / world->zones_count * WORLD_SLOT_BYTES;
    } else if (place->kind == KVT_PLACE_HOST) {
        to->offset_bytes = place->idx * WORLD_HOST_SLOT_BYTES;
    } else {
        const struct world_client *client = &world->clients[place->client];

        memcpy(op->engine_blocks, client->groups[place->idx], sizeof(op->engine_blocks));
        to->view = (struct kvt_client_view){.layout = &client->layout,
                                            .engine_blocks = op->engine_blocks,
                                            .end_piece = client->layout.pieces_count};
    }
}

/* Some pieces only, or not all engine blocks. */
static void narrow(struct world *world, struct world_op *op)
{
    struct kvt_client_view *view = &op->xfer.dst.view;
    uint32_t count = view->layout->pieces_count;

    if (world_random(world, 3) == 0) {
        view->first_piece = (uint32_t)world_random(world, count);
        view->end_piece =
            view->first_piece + 1 + (uint32_t)world_random(world, count - view->first_piece);
    }
    if (world_random(world, 4) == 0 && view->layout->engine_blocks_per_block > 1)
        op->engine_blocks[world_random(world, view->layout->engine_blocks_per_block)] =
            KVT_ENGINE_BLOCK_NONE;
}

static struct world_op *op_new(struct world *world, struct world_place *src,
                               struct world_place *dst)
{
    struct world_op *op = world->ops;
    uint32_t spec = src->spec;

    while (op->is_used)
        op++;
    memset(op, 0, sizeof(*op));
    op->is_used = true;
    op->spec = spec;
    op->losses = world->losses;
    op->src = src;
    op->dst = dst;
    op->id = src->kind == KVT_PLACE_CLIENT ? ++world->next_id : src->id;
    op->payload = aligned_alloc(64, kvt_round_up(world_spec(spec)->stored_bytes, 64));
    if (op->payload == NULL)
        abort();
    world_shadow_read(world, src, op->payload);
    op->xfer = (struct kvt_xfer){.key = key_of(op, spec),
                                 .header_bytes = kvt_slot_header_bytes(KVT_BLOCK_TOKENS_DEFAULT),
                                 .owner = op};
    op->xfer.slot_bytes = kvt_slot_bytes(KVT_BLOCK_TOKENS_DEFAULT, world_spec(spec)->stored_bytes);
    op->xfer.deadline_ns = kvt_clock_mono_ns() + HOUR_NS;
    set_place(world, op, &op->xfer.src, src);
    set_place(world, op, &op->xfer.dst, dst);
    return op;
}

static bool submit(struct world *world, struct world_op *op)
{
    struct kvt_xfer *xfer = &op->xfer;
    uint32_t taken;

    if (kvt_tier_submit(world->tier, &xfer, 1, &taken) != 0) {
        free(op->payload);
        op->is_used = false;
        return false;
    }
    op->src->readers++;
    op->dst->is_writing = true;
    world->inflight++;
    world->submitted++;
    return true;
}

/* Now and then a transfer is given to a GPU that is lost: an engine that has not heard of it. */
static bool is_on_lost(struct world *world, const struct world_place *place)
{
    uint32_t zone = world_zone_of(world, place);

    return zone != KVT_GPU_NONE && world->zones[zone].is_lost && world_random(world, 4) != 0;
}

static bool is_pair(struct world *world, const struct world_place *src,
                    const struct world_place *dst)
{
    return src->is_full && !src->is_writing && !dst->is_writing && dst->readers == 0 &&
           is_allowed(world, src, dst) && !is_on_lost(world, src) && !is_on_lost(world, dst) &&
           (dst->kind != KVT_PLACE_CLIENT || world->clients[dst->client].spec == src->spec);
}

bool world_submit(struct world *world)
{
    struct world_place *src = NULL, *dst = NULL;
    struct world_op *op;
    uint32_t tries = 0;

    if (world->inflight == WORLD_INFLIGHT)
        return false;
    do {
        if (tries++ == 64)
            return false;
        src = &world->places[world_random(world, WORLD_PLACES)];
        dst = &world->places[world_random(world, WORLD_PLACES)];
        /* Slots are few beside groups of clients. */
        if (world_random(world, 2) == 0)
            dst = &world->places[world_random(world, 2 * WORLD_SLOTS)];
    } while (!is_pair(world, src, dst));
    op = op_new(world, src, dst);
    if (dst->kind == KVT_PLACE_CLIENT)
        narrow(world, op);
    if (dst->kind == KVT_PLACE_HOST)
        write_header(world, op, dst, op->xfer.key.payload_bytes);
    if (src->kind == KVT_PLACE_HOST && world_random(world, 2) == 0)
        op->xfer.flags |= KVT_XFER_VERIFY;
    if (world_random(world, 3) == 0)
        op->xfer.flags |= KVT_XFER_BACKGROUND;
    op->is_late = world_random(world, 40) == 0;
    if (op->is_late)
        op->xfer.deadline_ns = 1;
    op->is_stale = (src->kind == KVT_PLACE_DEVICE || dst->kind == KVT_PLACE_DEVICE) &&
                   world_random(world, 40) == 0 && !world->is_host; /* has no incarnations */
    if (op->is_stale)
        op->xfer.src.incarnation = op->xfer.dst.incarnation = op->incarnation - 1;
    return submit(world, op);
}

/* ---- the way back ---------------------------------------------------------------------------- */

/* The arena of its slot is another. */
static bool is_made_anew(const struct world *world, const struct world_op *op)
{
    const struct world_place *slot = op->src->kind == KVT_PLACE_DEVICE ? op->src : op->dst;

    return op->incarnation != world->zones[slot->idx % world->zones_count].incarnation;
}

/* A GPU was lost since it was submitted, or is now. */
static bool was_lost_since(const struct world *world, const struct world_op *op)
{
    if (op->losses != world->losses)
        return true;
    for (uint32_t z = 0; z < world->zones_count; z++)
        if (world->zones[z].is_lost ||
            atomic_load(&world->zones[z].counters->incarnation) != world->zones[z].incarnation)
            return true;
    return false;
}

static void finish_done(struct world *world, struct world_op *op)
{
    struct world_place *dst = op->dst;
    char when[64];

    world->done++;
    if (op->is_late || op->is_stale)
        world_fail(world, "a transfer that was late or of another incarnation was done");
    if (dst->kind == KVT_PLACE_DEVICE && is_made_anew(world, op)) {
        world_forget(world, dst);
        return;
    }
    dst->id = op->id;
    dst->spec = op->spec;
    world_shadow_write(world, dst, op->payload, &op->xfer.dst.view);
    (void)snprintf(when, sizeof(when), "after a transfer from %d/%u/%u", (int)op->src->kind,
                   op->src->client, op->src->idx);
    if (!world->options.is_damage_expected)
        world_check(world, dst, when);
    dst->is_full = true;
    if (dst->kind == KVT_PLACE_HOST &&
        kvt_slot_check(world_host_slot(world, dst), &op->xfer.key) != KVT_SLOT_OK)
        world_fail(world, "a slot of L2 is not sealed as its key says");
}

/* Was never started: only the header is another's, unless the whole arena was made anew since. */
static void finish_untouched(struct world *world, struct world_op *op)
{
    if (op->dst->kind != KVT_PLACE_DEVICE || !is_made_anew(world, op))
        world_check(world, op->dst, "it was not started");
    if (op->dst->kind == KVT_PLACE_HOST)
        world_scribble(world, op->dst);
}

static void finish_failed(struct world *world, struct world_op *op)
{
    int status = op->xfer.status;

    if (status == KVT_XFER_OUT_OF_SERVICE)
        world->lost++;
    else if (status == KVT_XFER_BAD_SLOT)
        world->bad++;
    else if (status == KVT_XFER_CLIENT_GONE &&
             (is_gpu_client(world, op->src) || is_gpu_client(world, op->dst)) &&
             was_lost_since(world, op))
        world->clients_gone++;
    else if (status < 0)
        world->failed++;
    else if (!world->options.is_damage_expected)
        world_fail(world, "status %d", status);
    if (status == KVT_XFER_BAD_SLOT && !world->options.is_damage_expected)
        world_fail(world,
                   "a bad slot (%d) that nobody damaged: %d/%u/%u to %d/%u/%u, content %" PRIu64,
                   (int)op->xfer.verdict, (int)op->src->kind, op->src->client, op->src->idx,
                   (int)op->dst->kind, op->dst->client, op->dst->idx, op->id);
    if (status == KVT_XFER_OUT_OF_SERVICE && !was_lost_since(world, op))
        world_fail(world, "out of service, but it is not");
    if (status < 0 && !world->options.is_error_expected)
        world_fail(world, "error %d", status);
    /* The engine may use the place at once. */
    world_scribble(world, op->dst);
}

/* What an engine does with a place that it has back: its block gets other content, a slot is
 * evicted. */
static void release(struct world *world, struct world_op *op)
{
    struct world_place *src = op->src;

    src->readers--;
    op->dst->is_writing = false;
    if (src->readers > 0)
        return;
    if (src->kind == KVT_PLACE_CLIENT ? world_random(world, 2) == 0 : world_random(world, 5) == 0)
        world_scribble(world, src);
}

void world_finish(struct world *world, struct kvt_xfer *xfer)
{
    struct world_op *op = xfer->owner;

    if (op < world->ops || op >= world->ops + WORLD_INFLIGHT || !op->is_used)
        world_fail(world, "a transfer came back that is not under way");
    world->reaped++;
    if (xfer->status == KVT_XFER_DONE) {
        finish_done(world, op);
    } else if ((xfer->status == KVT_XFER_LATE && op->is_late) ||
               (xfer->status == KVT_XFER_OUT_OF_SERVICE && op->is_stale)) {
        world->late++;
        finish_untouched(world, op);
    } else {
        finish_failed(world, op);
    }
    release(world, op);
    free(op->payload);
    op->is_used = false;
    world->inflight--;
}

struct world_place *world_slot(struct world *world, enum kvt_place_kind kind, uint32_t idx)
{
    return &world->places[(kind == KVT_PLACE_DEVICE ? 0 : WORLD_SLOTS) + idx];
}

struct world_place *world_group(struct world *world, uint32_t client, uint32_t idx)
{
    return &world->places[2 * WORLD_SLOTS + client * WORLD_GROUPS + idx];
}

bool world_submit_pair(struct world *world, struct world_place *src, struct world_place *dst)
{
    struct world_op *op = op_new(world, src, dst);

    if (dst->kind == KVT_PLACE_HOST)
        write_header(world, op, dst, op->xfer.key.payload_bytes);
    return submit(world, op);
}

int world_move(struct world *world, struct world_place *src, struct world_place *dst)
{
    struct world_op *op = op_new(world, src, dst);
    struct kvt_xfer *xfer = &op->xfer;
    uint32_t turns = 0;

    if (dst->kind == KVT_PLACE_HOST)
        write_header(world, op, dst, xfer->key.payload_bytes);
    if (!submit(world, op))
        world_fail(world, "a single transfer was not taken");
    while (op->is_used) {
        world_turn(world);
        if (turns++ == 1000000)
            world_fail(world, "a single transfer does not come back");
    }
    return xfer->status;
}
