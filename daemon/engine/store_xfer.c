/* Moves and their transfers: built here, and handed to the tiers in batches. What comes back is
 * finished in store_finish.c. */
#include <string.h>

#include "daemon/base/alloc.h"
#include "daemon/base/clock.h"
#include "daemon/engine/store_internal.h"

#define RATE_START_BYTES_PER_S (2ull * KVT_GIB) /* before anything was measured */
#define IDENTITY_UNKNOWN UINT64_MAX             /* no slot's, but for a chance that is no matter */

static const enum kvt_place_kind place_of_tier[KVT_TIERS_COUNT] = {
    [KVT_TIER_DEVICE] = KVT_PLACE_DEVICE,
    [KVT_TIER_HOST] = KVT_PLACE_HOST,
    [KVT_TIER_DISK] = KVT_PLACE_DISK,
};

/* ---- pools ---------------------------------------------------------------------------------- */

int kvt_store_xfers_init(struct kvt_store *store, uint32_t count)
{
    kvt_list_init(&store->xfers_free);
    store->xfers = kvt_alloc_zeroed(count, sizeof(struct xfer));
    store->moves = kvt_alloc_zeroed((size_t)count + 1, sizeof(struct move));
    if (store->xfers == NULL || store->moves == NULL)
        return -ENOMEM;
    store->xfers_max = store->moves_max = count;
    for (uint32_t i = count; i > 0; i--) {
        kvt_list_push_front(&store->xfers_free, &store->xfers[i - 1].link);
        kvt_list_init(&store->moves[i].waiters);
        store->moves[i].next = store->moves_free;
        store->moves_free = i;
    }
    for (uint32_t i = 0; i < PATHS_COUNT; i++)
        store->paths[i].bytes_per_s = RATE_START_BYTES_PER_S;
    return 0;
}

void kvt_store_xfers_deinit(struct kvt_store *store)
{
    kvt_free(store->xfers);
    kvt_free(store->moves);
    store->xfers = NULL;
    store->moves = NULL;
}

/* Background moves leave a quarter of the pool to what somebody waits for. A move has at least one
 * transfer, so there is a move whenever there is a transfer. */
bool kvt_store_has_xfers(const struct kvt_store *store, uint32_t count, bool is_background)
{
    uint32_t left = store->xfers_max - store->xfers_used;
    uint32_t kept = is_background ? store->xfers_max / 4 : 0;

    return left >= kept && left - kept >= count;
}

static struct move *move_new(struct kvt_store *store, enum move_kind kind, struct kvt_job *job)
{
    uint32_t idx = store->moves_free;
    struct move *move = &store->moves[idx];

    KVT_ASSERT(idx != 0 && !move->is_used);
    store->moves_free = move->next;
    store->moves_used++;
    *move = (struct move){.kind = (uint8_t)kind, .job = job, .is_used = true};
    kvt_list_init(&move->waiters);
    return move;
}

uint32_t kvt_store_move_idx(const struct kvt_store *store, const struct move *move)
{
    return (uint32_t)(move - store->moves);
}

void kvt_store_move_free(struct kvt_store *store, struct move *move)
{
    KVT_ASSERT(move->is_used && kvt_list_is_empty(&move->waiters));
    move->is_used = false;
    move->next = store->moves_free;
    store->moves_free = kvt_store_move_idx(store, move);
    store->moves_used--;
    store->is_woken = true;
}

static struct xfer *xfer_new(struct kvt_store *store, struct move *move, uint64_t bytes)
{
    struct xfer *xfer = KVT_CONTAINER_OF(store->xfers_free.next, struct xfer, link);

    KVT_ASSERT(!kvt_list_is_empty(&store->xfers_free));
    kvt_list_remove(&xfer->link);
    memset(&xfer->base, 0, sizeof(xfer->base));
    xfer->base.owner = xfer;
    xfer->move = kvt_store_move_idx(store, move);
    xfer->bytes = bytes;
    xfer->is_submitted = false;
    store->xfers_used++;
    return xfer;
}

void kvt_store_xfer_free(struct kvt_store *store, struct xfer *xfer)
{
    store->xfers_used--;
    kvt_list_push_front(&store->xfers_free, &xfer->link);
    store->is_woken = true;
}

/* ---- building ------------------------------------------------------------------------------- */

static struct kvt_place place_in(struct kvt_store *store, struct cell *cell, uint32_t tier,
                                 uint32_t shard)
{
    struct kvt_slot slot = *kvt_store_slot(store, cell, tier, shard);
    const struct kvt_slab *slab = store->tiers[tier].slab;

    return (struct kvt_place){
        .kind = place_of_tier[tier],
        .incarnation = tier == KVT_TIER_DEVICE
                           ? kvt_store_l1_incarnation(store, kvt_slab_zone(slab, slot))
                           : 0,
        .offset_bytes = kvt_slab_offset(slab, slot),
    };
}

struct kvt_place kvt_store_place_of_client(const struct kvt_job *job)
{
    return (struct kvt_place){.kind = KVT_PLACE_CLIENT, .view = job->view};
}

/* What does not depend on the places. */
static void describe(struct kvt_store *store, struct xfer *xfer, struct cell *cell, uint32_t shard)
{
    const struct store_component *component = kvt_store_component(store, cell);

    xfer->base.key = (struct kvt_slot_key){
        .block_id = kvt_store_block_id(store, cell->block),
        .generation = kvt_store_content(cell),
        .payload_bytes = component->payload_bytes,
        .component = cell->component,
        .rank = (uint16_t)shard,
        .block_tokens = store->ns[cell->ns].block_tokens,
    };
    xfer->base.header_bytes = component->header_bytes;
    xfer->base.slot_bytes = component->slot_bytes;
}

/* For what is checked when it is read: the slot must say of itself what the tree says now. */
static void identify(struct kvt_store *store, struct xfer *xfer, struct cell *cell, uint32_t shard)
{
    struct kvt_slot_info info;
    const uint32_t *tokens;

    xfer->base.key.identity = kvt_store_slot_info(store, cell, shard, &info, &tokens)
                                  ? kvt_slot_identity(&info, tokens)
                                  : IDENTITY_UNKNOWN;
}

/* The end of a path that a client's memory is. */
uint32_t kvt_store_client_end(const struct kvt_job *job)
{
    return job->view.layout->is_gpu ? PATH_GPU : PATH_CLIENT;
}

/* The thread that does it: the disk's or the device's if one end is theirs, else the host's. A
 * GPU's memory is the device's. */
void kvt_store_enqueue(struct kvt_store *store, struct xfer *xfer, uint32_t src, uint32_t dst,
                       bool is_background)
{
    uint32_t tier = KVT_TIER_HOST;
    struct store_tier *at;

    if (src == KVT_TIER_DISK || dst == KVT_TIER_DISK)
        tier = KVT_TIER_DISK;
    else if (src == KVT_TIER_DEVICE || dst == KVT_TIER_DEVICE || src == PATH_GPU || dst == PATH_GPU)
        tier = KVT_TIER_DEVICE;
    at = &store->tiers[tier];
    KVT_ASSERT(at->tier != NULL && xfer->base.deadline_ns != 0);
    xfer->tier = (uint8_t)tier;
    xfer->path = (uint8_t)(src * PATH_ENDS + dst);
    if (is_background)
        xfer->base.flags |= KVT_XFER_BACKGROUND;
    if (src == KVT_TIER_HOST && dst != KVT_TIER_DISK && store->config.is_verify_l2_always)
        xfer->base.flags |= KVT_XFER_VERIFY;
    store->paths[xfer->path].queued_bytes += xfer->bytes;
    at->pending_count++;
    kvt_list_push_back(&at->pending[is_background], &xfer->link);
}

/* The header of a slot in host memory, but for the checksums: before its payload is moved there.
 * False when the block is gone. */
static bool write_header(struct kvt_store *store, struct cell *cell, uint32_t shard)
{
    struct kvt_slot slot = *kvt_store_slot(store, cell, KVT_TIER_HOST, shard);
    struct kvt_slot_info info;
    const uint32_t *tokens;

    if (!kvt_store_slot_info(store, cell, shard, &info, &tokens))
        return false;
    info.stored_real_ns = store->config.real_ns();
    kvt_slot_header_write(store->config.host_memory +
                              kvt_slab_offset(store->tiers[KVT_TIER_HOST].slab, slot),
                          &info, tokens);
    return true;
}

/* ---- starting ------------------------------------------------------------------------------- */

struct move *kvt_store_find_copy(struct kvt_store *store, const struct cell *cell, uint32_t dst)
{
    if (cell->is_claimed)
        return NULL;
    for (uint32_t idx = cell->moves; idx != 0; idx = store->moves[idx].next)
        if (store->moves[idx].dst == dst)
            return &store->moves[idx];
    return NULL;
}

/* Both copies are pinned and the destination has its slots. */
static struct move *copy_begin(struct kvt_store *store, struct cell *cell,
                               const struct copy_options *options)
{
    const struct store_component *component = kvt_store_component(store, cell);
    struct move *move = move_new(store, MOVE_COPY, NULL);

    move->src = (uint8_t)options->src;
    move->dst = (uint8_t)options->dst;
    move->is_background = options->is_background;
    move->is_evict = options->is_evict;
    move->is_save = options->is_save;
    move->reason = (uint8_t)options->reason;
    move->cell = kvt_store_cell_idx(store, cell);
    move->shards_left = component->shards;
    move->bytes = component->payload_bytes * component->shards;
    move->budget_bytes = options->budget_bytes;
    store->promote_inflight_bytes += options->budget_bytes;
    move->next = cell->moves;
    cell->moves = kvt_store_move_idx(store, move);
    for (uint32_t i = 0; i < component->shards; i++) {
        struct xfer *xfer = xfer_new(store, move, component->payload_bytes);

        describe(store, xfer, cell, i);
        if (options->src == KVT_TIER_DISK)
            identify(store, xfer, cell, i);
        xfer->base.src = place_in(store, cell, options->src, i);
        xfer->base.dst = place_in(store, cell, options->dst, i);
        xfer->base.deadline_ns = kvt_time_add(store->now_ns, store->config.transfer_deadline_ns);
        kvt_store_enqueue(store, xfer, options->src, options->dst, options->is_background);
    }
    return move;
}

enum start kvt_store_start_copy(struct kvt_store *store, struct cell *cell,
                                const struct copy_options *options, struct move **ret_move)
{
    uint32_t shards = kvt_store_component(store, cell)->shards;
    uint32_t src = options->src, dst = options->dst;
    bool is_alive = true;
    enum room room;

    KVT_ASSERT(kvt_store_is_readable(cell, src));
    if (src == KVT_TIER_DISK && !kvt_radix_is_live(store->radix, cell->block))
        return START_NONE; /* what cannot be compared is not read */
    if (src == KVT_TIER_DEVICE && kvt_store_l1_is_lost(store, cell))
        return START_NONE;
    if (cell->copies[dst].state != COPY_NONE || cell->copies[src].pins == CELL_PINS_MAX ||
        !kvt_store_has_xfers(store, shards, options->is_background))
        return START_WAIT;
    kvt_store_pin(store, cell, src); /* making room must not take the source away */
    room = kvt_store_acquire(store, cell, dst);
    if (room != ROOM_GOT) {
        kvt_store_unpin(store, cell, src);
        return room == ROOM_WAIT ? START_WAIT : START_NONE;
    }
    kvt_store_pin(store, cell, dst);
    /* Evictions on the way may have used up transfers. */
    if (!kvt_store_has_xfers(store, shards, false)) {
        kvt_store_let_go(store, cell, dst, KVT_DROP_ABORTED);
        kvt_store_unpin(store, cell, dst);
        kvt_store_unpin(store, cell, src);
        return START_WAIT;
    }
    if (dst == KVT_TIER_HOST && src == KVT_TIER_DEVICE)
        for (uint32_t i = 0; i < shards && is_alive; i++)
            is_alive = write_header(store, cell, i);
    if (is_alive && options->is_evict)
        is_alive = kvt_store_begin_drain(store, cell, src);
    if (!is_alive) {
        kvt_store_let_go(store, cell, dst, KVT_DROP_ABORTED);
        kvt_store_unpin(store, cell, dst);
        kvt_store_unpin(store, cell, src);
        return START_NONE;
    }
    *ret_move = copy_begin(store, cell, options);
    return START_DONE;
}

/* One shard to or from the client of @job; the copy in @tier is there. */
static void client_begin(struct kvt_store *store, enum move_kind kind, struct cell *cell,
                         uint32_t tier, uint32_t shard, struct kvt_job *job)
{
    const struct store_component *component = kvt_store_component(store, cell);
    struct move *move = move_new(store, kind, job);
    struct xfer *xfer = xfer_new(store, move, kvt_client_view_bytes(&job->view));

    move->src = move->dst = (uint8_t)tier;
    move->cell = kvt_store_cell_idx(store, cell);
    move->shard = shard;
    move->shards_left = 1;
    move->bytes = component->payload_bytes;
    move->xfer = xfer;
    describe(store, xfer, cell, shard);
    if (kind == MOVE_READ && tier == KVT_TIER_HOST && store->config.is_verify_l2_always &&
        kvt_radix_is_live(store->radix, cell->block))
        identify(store, xfer, cell, shard);
    xfer->base.deadline_ns = job->deadline_ns;
    kvt_store_pin(store, cell, tier);
    if (kind == MOVE_FILL) {
        xfer->base.src = kvt_store_place_of_client(job);
        xfer->base.dst = place_in(store, cell, tier, shard);
        kvt_store_enqueue(store, xfer, kvt_store_client_end(job), tier, job->is_background);
    } else {
        xfer->base.src = place_in(store, cell, tier, shard);
        xfer->base.dst = kvt_store_place_of_client(job);
        kvt_store_enqueue(store, xfer, tier, kvt_store_client_end(job), job->is_background);
    }
    job->xfer = move;
    job->state = JOB_RUNNING;
    store->running++;
}

enum start kvt_store_start_fill(struct kvt_store *store, struct cell *cell, uint32_t tier,
                                uint32_t shard, struct kvt_job *job)
{
    if (!kvt_store_has_xfers(store, 1, job->is_background))
        return START_WAIT;
    if (tier == KVT_TIER_HOST && !write_header(store, cell, shard))
        return START_NONE;
    cell->filling |= 1u << shard;
    client_begin(store, MOVE_FILL, cell, tier, shard, job);
    return START_DONE;
}

enum start kvt_store_start_read(struct kvt_store *store, struct cell *cell, uint32_t tier,
                                uint32_t shard, struct kvt_job *job)
{
    KVT_ASSERT(kvt_store_is_readable(cell, tier));
    if (cell->copies[tier].pins == CELL_PINS_MAX ||
        !kvt_store_has_xfers(store, 1, job->is_background))
        return START_WAIT;
    if (cell->touches < CELL_TOUCHES_MAX)
        cell->touches = (uint16_t)((cell->touches + 1u) & CELL_TOUCHES_MAX);
    client_begin(store, MOVE_READ, cell, tier, shard, job);
    return START_DONE;
}

/* A run of free chunks that holds @bytes. */
static bool bounce_take(struct kvt_store *store, uint64_t bytes, struct move *move)
{
    uint64_t need =
        store->bounce_chunk_bytes == 0 ? UINT64_MAX : kvt_div_up(bytes, store->bounce_chunk_bytes);
    uint64_t mask;

    if (need > store->bounce_chunks)
        return false;
    mask = need == 64 ? UINT64_MAX : (1ull << need) - 1;
    for (uint32_t at = 0; at + need <= store->bounce_chunks; at++, mask <<= 1) {
        if ((store->bounce_used & mask) != 0)
            continue;
        store->bounce_used |= mask;
        move->bounce_mask = mask;
        move->bounce_offset_bytes = store->bounce_base_bytes + at * store->bounce_chunk_bytes;
        return true;
    }
    return false;
}

enum start kvt_store_start_bounce(struct kvt_store *store, struct cell *cell, uint32_t shard,
                                  struct kvt_job *job)
{
    const struct store_component *component = kvt_store_component(store, cell);
    bool is_background = job == NULL || job->is_background;
    struct move *move, probe = {0};
    struct xfer *xfer;

    if (!kvt_radix_is_live(store->radix, cell->block))
        return START_NONE;
    if (cell->copies[KVT_TIER_DISK].pins == CELL_PINS_MAX ||
        !kvt_store_has_xfers(store, 1, job == NULL))
        return START_WAIT;
    if (!bounce_take(store, component->slot_bytes, &probe))
        return store->bounce_used != 0 ? START_WAIT : START_NONE;
    move = move_new(store, MOVE_BOUNCE, job);
    move->is_scrub = job == NULL;
    move->src = KVT_TIER_DISK;
    move->dst = KVT_TIER_HOST;
    move->cell = kvt_store_cell_idx(store, cell);
    move->shard = shard;
    move->shards_left = 1;
    move->bytes = component->payload_bytes;
    move->bounce_mask = probe.bounce_mask;
    move->bounce_offset_bytes = probe.bounce_offset_bytes;
    xfer = move->xfer = xfer_new(store, move, component->payload_bytes);
    describe(store, xfer, cell, shard);
    identify(store, xfer, cell, shard);
    xfer->base.src = place_in(store, cell, KVT_TIER_DISK, shard);
    xfer->base.dst =
        (struct kvt_place){.kind = KVT_PLACE_HOST, .offset_bytes = move->bounce_offset_bytes};
    xfer->base.deadline_ns = job != NULL
                                 ? job->deadline_ns
                                 : kvt_time_add(store->now_ns, store->config.transfer_deadline_ns);
    kvt_store_pin(store, cell, KVT_TIER_DISK);
    kvt_store_enqueue(store, xfer, KVT_TIER_DISK, KVT_TIER_HOST, is_background);
    if (job == NULL)
        return START_DONE;
    job->xfer = move;
    job->state = JOB_RUNNING;
    store->running++;
    store->bounced++;
    return START_DONE;
}

enum start kvt_store_start_flush(struct kvt_store *store, struct kvt_job *job)
{
    struct move *move;
    struct xfer *xfer;

    if (!kvt_store_has_xfers(store, 1, false))
        return START_WAIT;
    move = move_new(store, MOVE_FLUSH, job);
    move->src = move->dst = KVT_TIER_DISK;
    move->shards_left = 1;
    xfer = move->xfer = xfer_new(store, move, 0);
    xfer->base.flags = KVT_XFER_FLUSH;
    xfer->base.deadline_ns = job->deadline_ns;
    kvt_store_enqueue(store, xfer, KVT_TIER_DISK, KVT_TIER_DISK, false);
    job->xfer = move;
    job->state = JOB_RUNNING;
    store->running++;
    return START_DONE;
}

/* ---- handing over --------------------------------------------------------------------------- */

static bool touches_client(const struct move *move)
{
    return move->kind == MOVE_FILL || move->kind == MOVE_READ ||
           (move->kind == MOVE_BOUNCE && move->is_bounce_out);
}

static bool submit_some(struct kvt_store *store, struct store_tier *at, struct kvt_list *pending)
{
    struct kvt_xfer *batch[STORE_PENDING_BATCH];
    uint32_t count = 0, taken = 0;

    kvt_list_for_each (link, pending) {
        batch[count++] = &KVT_CONTAINER_OF(link, struct xfer, link)->base;
        if (count == STORE_PENDING_BATCH)
            break;
    }
    if (count == 0)
        return false;
    if (kvt_tier_submit(at->tier, batch, count, &taken) != 0)
        taken = 0;
    KVT_ASSERT(taken <= count);
    for (uint32_t i = 0; i < taken; i++) {
        struct xfer *xfer = KVT_CONTAINER_OF(pending->next, struct xfer, link);
        struct move *move = &store->moves[xfer->move];

        kvt_list_remove(&xfer->link);
        xfer->is_submitted = true;
        at->pending_count--;
        at->inflight++;
        if (move->job != NULL && touches_client(move))
            kvt_store_disarm(store, move->job); /* from now on it ends when it is reaped */
    }
    if (taken < count) {
        at->is_refused = true;
        at->retry_ns = kvt_time_add(store->now_ns, STORE_RETRY_NS);
    }
    return taken == count;
}

void kvt_store_submit_pending(struct kvt_store *store, uint32_t tier)
{
    struct store_tier *at = &store->tiers[tier];

    if (at->tier == NULL || at->pending_count == 0)
        return;
    at->is_refused = false;
    for (uint32_t i = 0; i < 2; i++)
        while (submit_some(store, at, &at->pending[i]))
            ;
}

/* ---- stopping
 * ------------------------------------------------------------------------------------ */

bool kvt_store_stop_move(struct kvt_store *store, struct move *move)
{
    struct xfer *xfer = move->xfer;
    struct store_tier *at = &store->tiers[xfer->tier];

    if (xfer->is_submitted) {
        if (touches_client(move))
            return false;
        move->job = NULL; /* the transfer goes on alone */
        return true;
    }
    kvt_list_remove(&xfer->link);
    at->pending_count--;
    store->paths[xfer->path].queued_bytes -= xfer->bytes;
    kvt_store_xfer_free(store, xfer);
    if (move->kind == MOVE_BOUNCE)
        store->bounce_used &= ~move->bounce_mask;
    if (move->cell != 0) {
        struct cell *cell = &store->cells[move->cell];

        if (move->kind == MOVE_FILL)
            cell->filling &= ~(1u << move->shard);
        kvt_store_unpin(store, cell, move->src);
    }
    kvt_store_move_free(store, move);
    return true;
}
