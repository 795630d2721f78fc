#include "tools/kvtier-gpu-check/blocks.h"

#include <string.h>
#include <time.h>

#include "daemon/base/clock.h"
#include "tiers/pages.h"

void gpu_check_blocks_init(struct gpu_check_blocks *blocks, struct gpu_check *check,
                           const char *part, const struct gpu_check_shape *shape)
{
    uint64_t half = (uint64_t)shape->slots * GPU_CHECK_BLOCKS;
    uint64_t payload_bytes = (uint64_t)shape->pieces * GPU_CHECK_BLOCKS * shape->piece_bytes;
    uint64_t unit_bytes = (uint64_t)shape->piece_bytes * (shape->is_page_first ? shape->pieces : 1);

    KVT_ASSERT(shape->slots <= GPU_CHECK_SLOTS_MAX && (shape->slots & (shape->slots - 1)) == 0);
    KVT_ASSERT(shape->pieces <= GPU_CHECK_PIECES_MAX && shape->parts >= 1);
    KVT_ASSERT(shape->piece_bytes % sizeof(uint64_t) == 0);
    *blocks = (struct gpu_check_blocks){.check = check,
                                        .part = part,
                                        .shape = *shape,
                                        .payload_bytes = payload_bytes,
                                        .stored_bytes = payload_bytes,
                                        .pool_blocks = 2 * half,
                                        .pool_bytes = 2 * half * shape->pieces *
                                                      shape->piece_bytes * shape->parts,
                                        .unit_bytes = unit_bytes,
                                        .stride_bytes = unit_bytes * shape->parts,
                                        .header_bytes = kvt_slot_header_bytes(GPU_CHECK_TOKENS)};
    if (shape->quant.kind != KVT_QUANT_NONE) {
        blocks->stored_bytes = kvt_quant_bytes(&shape->quant, payload_bytes);
        KVT_ASSERT(blocks->stored_bytes > 0 && shape->piece_bytes <= GPU_CHECK_QUANT_BYTES_MAX);
    }
    blocks->slot_bytes = kvt_slot_bytes(GPU_CHECK_TOKENS, blocks->stored_bytes);
    for (uint64_t i = 0; i < half; i++) { /* in a scattered order */
        uint64_t at = (i * 0x9e3779b1ull + 3) & (half - 1);

        blocks->from[i / GPU_CHECK_BLOCKS][i % GPU_CHECK_BLOCKS] = 2 * at;
        blocks->to[i / GPU_CHECK_BLOCKS][i % GPU_CHECK_BLOCKS] = 2 * at + 1;
    }
}

/* Where piece @p of block 0 begins. */
static uint64_t piece_offset(const struct gpu_check_blocks *blocks, uint32_t p)
{
    uint64_t of_others = blocks->stride_bytes - blocks->unit_bytes;

    return of_others + (blocks->shape.is_page_first
                            ? (uint64_t)p * blocks->shape.piece_bytes
                            : p * blocks->pool_blocks * blocks->stride_bytes);
}

static bool failed(struct gpu_check_blocks *blocks, const char *what)
{
    return gpu_check_failed(blocks->check, blocks->part, what, 0);
}

bool gpu_check_blocks_bind(struct gpu_check_blocks *blocks, const struct kvt_region *region)
{
    blocks->region = *region;
    for (uint32_t p = 0; p < blocks->shape.pieces; p++)
        blocks->pieces[p] = (struct kvt_layout_piece){.bytes = blocks->shape.piece_bytes,
                                                      .stride_bytes = blocks->stride_bytes,
                                                      .offset_bytes = piece_offset(blocks, p)};
    blocks->layout = (struct kvt_layout){.pieces_count = blocks->shape.pieces,
                                         .engine_blocks_per_block = GPU_CHECK_BLOCKS,
                                         .quant = blocks->shape.quant,
                                         .pieces = blocks->pieces};
    if (kvt_layout_resolve(&blocks->layout, &blocks->region, 1, blocks->payload_bytes) != 0)
        return failed(blocks, "the layout");
    return true;
}

bool gpu_check_blocks_open_l2(struct gpu_check_blocks *blocks)
{
    blocks->l2_bytes = kvt_round_up(blocks->shape.slots * blocks->slot_bytes, KVT_HUGE_PAGE_BYTES);
    if (kvt_pages_map(-1, blocks->l2_bytes, true, &blocks->l2) < 0 ||
        kvt_pages_populate(blocks->l2, blocks->l2_bytes) < 0)
        return failed(blocks, "memory of L2");
    return true;
}

void gpu_check_blocks_close_l2(struct gpu_check_blocks *blocks)
{
    if (blocks->l2 != NULL)
        kvt_pages_unmap(blocks->l2, blocks->l2_bytes);
    blocks->l2 = NULL;
}

/* ---- transfers ------------------------------------------------------------------------------- */

static struct kvt_place pool_place(struct gpu_check_blocks *blocks, const uint64_t *ids)
{
    return (struct kvt_place){.kind = KVT_PLACE_CLIENT,
                              .view = {.layout = &blocks->layout,
                                       .engine_blocks = ids,
                                       .end_piece = blocks->shape.pieces}};
}

static struct kvt_place slot_place(struct gpu_check_blocks *blocks, uint32_t slot)
{
    const struct kvt_tier *tier = blocks->tier;
    const struct kvt_tier_counters *counters =
        tier->zones_count > 0 ? tier->zones[0].counters : &tier->counters;

    return (struct kvt_place){
        .kind = KVT_PLACE_DEVICE,
        .incarnation = atomic_load_explicit(&counters->incarnation, memory_order_acquire),
        .offset_bytes = slot * kvt_round_up(blocks->stored_bytes, GPU_CHECK_SLOT_ALIGN_BYTES)};
}

static struct kvt_place l2_place(struct gpu_check_blocks *blocks, uint32_t slot)
{
    return (struct kvt_place){.kind = KVT_PLACE_HOST, .offset_bytes = slot * blocks->slot_bytes};
}

static void make_xfer(struct gpu_check_blocks *blocks, enum gpu_check_way way, uint32_t slot)
{
    struct kvt_xfer *xfer = &blocks->xfers[slot];

    *xfer =
        (struct kvt_xfer){.key = {.block_id = slot + 1,
                                  .generation = blocks->generation * GPU_CHECK_SLOTS_MAX + slot + 1,
                                  .payload_bytes = blocks->stored_bytes,
                                  .block_tokens = GPU_CHECK_TOKENS},
                          .header_bytes = blocks->header_bytes,
                          .slot_bytes = blocks->slot_bytes,
                          .deadline_ns = KVT_TIME_NEVER_NS,
                          .src = slot_place(blocks, slot),
                          .dst = slot_place(blocks, slot)};
    if (way == GPU_CHECK_STORE)
        xfer->src = pool_place(blocks, blocks->from[slot]);
    else if (way == GPU_CHECK_TO_L2)
        xfer->dst = l2_place(blocks, slot);
    else if (way == GPU_CHECK_FROM_L2)
        xfer->src = l2_place(blocks, slot);
    else
        xfer->dst = pool_place(blocks, blocks->to[slot]);
    if (way == GPU_CHECK_TO_L2) {
        struct kvt_slot_info info = {.block_id = xfer->key.block_id,
                                     .generation = xfer->key.generation,
                                     .payload_bytes = blocks->stored_bytes,
                                     .block_tokens = GPU_CHECK_TOKENS};

        kvt_slot_header_write(blocks->l2 + slot * blocks->slot_bytes, &info, blocks->tokens);
    }
}

void gpu_check_blocks_make(struct gpu_check_blocks *blocks, enum gpu_check_way way)
{
    blocks->generation += way == GPU_CHECK_STORE;
    for (uint32_t slot = 0; slot < blocks->shape.slots; slot++)
        make_xfer(blocks, way, slot);
}

bool gpu_check_blocks_submit(struct gpu_check_blocks *blocks)
{
    struct kvt_xfer *xfers[GPU_CHECK_SLOTS_MAX];
    uint32_t sent = 0, taken;

    memset(blocks->statuses, 0, sizeof(blocks->statuses));
    for (uint32_t i = 0; i < blocks->shape.slots; i++)
        xfers[i] = &blocks->xfers[i];
    while (sent < blocks->shape.slots) {
        if (kvt_tier_submit(blocks->tier, xfers + sent, blocks->shape.slots - sent, &taken) != 0)
            return failed(blocks, "the tier takes no more transfers");
        sent += taken;
    }
    return true;
}

bool gpu_check_blocks_reap(struct gpu_check_blocks *blocks, uint32_t count)
{
    const struct timespec pause = {.tv_nsec = 2000};
    uint64_t end_ns = kvt_clock_mono_ns() + GPU_CHECK_WAIT_NS_MAX;
    struct kvt_xfer *back[GPU_CHECK_SLOTS_MAX];

    while (count > 0) {
        uint32_t reaped = kvt_tier_reap(blocks->tier, back, KVT_MIN(count, GPU_CHECK_SLOTS_MAX));

        for (uint32_t i = 0; i < reaped; i++) {
            bool is_known = back[i]->status >= 0 && back[i]->status <= KVT_XFER_SHORT;

            blocks->statuses[is_known ? back[i]->status : KVT_XFER_SHORT + 1]++;
        }
        count -= reaped;
        if (kvt_clock_mono_ns() > end_ns)
            return failed(blocks, "transfers do not come back");
        if (reaped == 0)
            (void)nanosleep(&pause, NULL);
    }
    return true;
}

bool gpu_check_blocks_move(struct gpu_check_blocks *blocks, enum gpu_check_way way)
{
    static const char *const names[] = {"pool -> slot", "slot -> L2", "L2 -> slot", "slot -> pool"};
    char text[64];

    gpu_check_blocks_make(blocks, way);
    if (!gpu_check_blocks_submit(blocks) || !gpu_check_blocks_reap(blocks, blocks->shape.slots))
        return false;
    if (blocks->statuses[KVT_XFER_DONE] == blocks->shape.slots)
        return true;
    (void)snprintf(text, sizeof(text), "%s: %u of %u ended badly", names[way],
                   blocks->shape.slots - blocks->statuses[KVT_XFER_DONE], blocks->shape.slots);
    return failed(blocks, text);
}

/* ---- content --------------------------------------------------------------------------------- */

#define WORD_BYTES sizeof(uint64_t)

/* The word of the pool at @at (in words), as it was before anything was loaded. */
static uint64_t word_of(uint64_t at, uint64_t salt)
{
    return gpu_check_word(at + 1 + (salt << 40));
}

/* Word @in of stride @run, counted through the pool: whether it is of a block that is loaded into,
 * and not of other ranks. Blocks are an even number, so odd strides are of odd blocks. */
static bool is_loaded(const struct gpu_check_blocks *blocks, uint64_t run, uint64_t in)
{
    return run % 2 == 1 && in * WORD_BYTES >= blocks->stride_bytes - blocks->unit_bytes;
}

void gpu_check_blocks_fill(const struct gpu_check_blocks *blocks, uint64_t *pool, uint64_t salt)
{
    uint64_t words = blocks->stride_bytes / WORD_BYTES, at = 0;

    for (uint64_t run = 0; run < blocks->pool_bytes / blocks->stride_bytes; run++)
        for (uint64_t i = 0; i < words; i++, at++)
            pool[at] = is_loaded(blocks, run, i) ? UINT64_MAX : word_of(at, salt);
}

static uint64_t count_changed(const struct gpu_check_blocks *blocks, const uint64_t *pool,
                              uint64_t salt)
{
    uint64_t words = blocks->stride_bytes / WORD_BYTES, at = 0, wrong = 0;

    for (uint64_t run = 0; run < blocks->pool_bytes / blocks->stride_bytes; run++)
        for (uint64_t i = 0; i < words; i++, at++)
            if (!is_loaded(blocks, run, i) && pool[at] != word_of(at, salt))
                wrong += WORD_BYTES;
    return wrong;
}

/* The first word of a piece of a block. */
static uint64_t piece_word(const struct gpu_check_blocks *blocks, uint32_t p, uint64_t block)
{
    return (piece_offset(blocks, p) + block * blocks->stride_bytes) / WORD_BYTES;
}

/* What comes back of a piece that is quantised: the scales are of planes, so a piece is a payload.
 */
static void quantise(const struct gpu_check_blocks *blocks, uint64_t *raw)
{
    uint8_t stored[GPU_CHECK_QUANT_BYTES_MAX * 3] __attribute__((aligned(16)));
    const struct kvt_quant_spec *spec = &blocks->shape.quant;
    uint32_t planes = (uint32_t)(blocks->shape.piece_bytes / kvt_quant_plane_bytes(spec));
    struct kvt_quant_job job = {.raw = (uintptr_t)raw,
                                .quantised = (uintptr_t)stored,
                                .planes_count = planes,
                                .end_plane = planes};
    struct kvt_quant_batch batch = {
        .spec = *spec, .jobs = (uintptr_t)&job, .jobs_count = 1, .planes_max = planes};
    int r;

    KVT_ASSERT(kvt_quant_bytes(spec, blocks->shape.piece_bytes) <= sizeof(stored));
    r = kvt_kernels_host()->quantise(NULL, &batch);
    if (r == 0)
        r = kvt_kernels_host()->dequantise(NULL, &batch);
    KVT_ASSERT(r == 0);
}

static uint64_t count_wrong_piece(const struct gpu_check_blocks *blocks, const uint64_t *is,
                                  uint64_t from, uint64_t salt)
{
    uint64_t raw[GPU_CHECK_QUANT_BYTES_MAX / WORD_BYTES] __attribute__((aligned(16)));
    uint64_t words = blocks->shape.piece_bytes / WORD_BYTES, wrong = 0;
    bool is_quantised = blocks->shape.quant.kind != KVT_QUANT_NONE;

    for (uint64_t i = 0; is_quantised && i < words; i++)
        raw[i] = word_of(from + i, salt);
    if (is_quantised)
        quantise(blocks, raw);
    for (uint64_t i = 0; i < words; i++)
        if (is[i] != (is_quantised ? raw[i] : word_of(from + i, salt)))
            wrong += WORD_BYTES;
    return wrong;
}

uint64_t gpu_check_blocks_count_wrong(const struct gpu_check_blocks *blocks, const uint64_t *pool,
                                      uint64_t salt)
{
    uint64_t wrong = count_changed(blocks, pool, salt);

    for (uint32_t slot = 0; slot < blocks->shape.slots; slot++)
        for (uint32_t p = 0; p < blocks->shape.pieces; p++)
            for (uint32_t b = 0; b < GPU_CHECK_BLOCKS; b++)
                wrong +=
                    count_wrong_piece(blocks, pool + piece_word(blocks, p, blocks->to[slot][b]),
                                      piece_word(blocks, p, blocks->from[slot][b]), salt);
    return wrong;
}

uint64_t gpu_check_blocks_arena_bytes(const struct gpu_check_blocks *blocks)
{
    return blocks->shape.slots * kvt_round_up(blocks->stored_bytes, GPU_CHECK_SLOT_ALIGN_BYTES);
}

uint64_t gpu_check_blocks_count_wrong_slots(const struct gpu_check_blocks *blocks,
                                            const uint8_t *slots, uint64_t salt)
{
    uint64_t slot_bytes = kvt_round_up(blocks->stored_bytes, GPU_CHECK_SLOT_ALIGN_BYTES);
    uint64_t wrong = 0;

    KVT_ASSERT(blocks->shape.quant.kind == KVT_QUANT_NONE);
    for (uint32_t slot = 0; slot < blocks->shape.slots; slot++) {
        const uint64_t *at = (const void *)(slots + slot * slot_bytes);

        for (uint32_t p = 0; p < blocks->shape.pieces; p++)
            for (uint32_t b = 0; b < GPU_CHECK_BLOCKS; b++) {
                wrong += count_wrong_piece(blocks, at, piece_word(blocks, p, blocks->from[slot][b]),
                                           salt);
                at += blocks->shape.piece_bytes / WORD_BYTES;
            }
    }
    return wrong;
}
