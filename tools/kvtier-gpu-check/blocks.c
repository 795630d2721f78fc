#include "tools/kvtier-gpu-check/blocks.h"

#include <string.h>
#include <time.h>

#include "daemon/base/clock.h"
#include "tiers/pages.h"

void gpu_check_blocks_init(struct gpu_check_blocks *blocks, struct gpu_check *check,
                           const char *part, uint32_t slots, uint32_t piece_bytes)
{
    uint64_t half = (uint64_t)slots * GPU_CHECK_BLOCKS;

    KVT_ASSERT(slots <= GPU_CHECK_SLOTS_MAX && (slots & (slots - 1)) == 0);
    *blocks = (struct gpu_check_blocks){.check = check,
                                        .part = part,
                                        .slots = slots,
                                        .piece_bytes = piece_bytes,
                                        .payload_bytes = (uint64_t)GPU_CHECK_PIECES *
                                                         GPU_CHECK_BLOCKS * piece_bytes,
                                        .pool_blocks = 2 * half,
                                        .pool_bytes = 2 * half * GPU_CHECK_PIECES * piece_bytes,
                                        .header_bytes = kvt_slot_header_bytes(GPU_CHECK_TOKENS)};
    blocks->slot_bytes = kvt_slot_bytes(GPU_CHECK_TOKENS, blocks->payload_bytes);
    for (uint64_t i = 0; i < half; i++) { /* in a scattered order */
        uint64_t at = (i * 0x9e3779b1ull + 3) & (half - 1);

        blocks->from[i / GPU_CHECK_BLOCKS][i % GPU_CHECK_BLOCKS] = 2 * at;
        blocks->to[i / GPU_CHECK_BLOCKS][i % GPU_CHECK_BLOCKS] = 2 * at + 1;
    }
}

static bool failed(struct gpu_check_blocks *blocks, const char *what)
{
    return gpu_check_failed(blocks->check, blocks->part, what, 0);
}

bool gpu_check_blocks_bind(struct gpu_check_blocks *blocks, const struct kvt_region *region)
{
    blocks->region = *region;
    for (uint32_t p = 0; p < GPU_CHECK_PIECES; p++)
        blocks->pieces[p] = (struct kvt_layout_piece){.bytes = blocks->piece_bytes,
                                                      .stride_bytes = blocks->piece_bytes,
                                                      .offset_bytes = p * blocks->pool_blocks *
                                                                      blocks->piece_bytes};
    blocks->layout = (struct kvt_layout){.pieces_count = GPU_CHECK_PIECES,
                                         .engine_blocks_per_block = GPU_CHECK_BLOCKS,
                                         .pieces = blocks->pieces};
    if (kvt_layout_resolve(&blocks->layout, &blocks->region, 1, blocks->payload_bytes) != 0)
        return failed(blocks, "the layout");
    return true;
}

bool gpu_check_blocks_open_l2(struct gpu_check_blocks *blocks)
{
    blocks->l2_bytes = kvt_round_up(blocks->slots * blocks->slot_bytes, KVT_HUGE_PAGE_BYTES);
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
    return (struct kvt_place){
        .kind = KVT_PLACE_CLIENT,
        .view = {.layout = &blocks->layout, .engine_blocks = ids, .end_piece = GPU_CHECK_PIECES}};
}

static struct kvt_place slot_place(struct gpu_check_blocks *blocks, uint32_t slot)
{
    const struct kvt_tier *tier = blocks->tier;
    const struct kvt_tier_counters *counters =
        tier->zones_count > 0 ? tier->zones[0].counters : &tier->counters;

    return (struct kvt_place){
        .kind = KVT_PLACE_DEVICE,
        .incarnation = atomic_load_explicit(&counters->incarnation, memory_order_acquire),
        .offset_bytes = slot * kvt_round_up(blocks->payload_bytes, GPU_CHECK_SLOT_ALIGN_BYTES)};
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
                                  .payload_bytes = blocks->payload_bytes,
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
                                     .payload_bytes = blocks->payload_bytes,
                                     .block_tokens = GPU_CHECK_TOKENS};

        kvt_slot_header_write(blocks->l2 + slot * blocks->slot_bytes, &info, blocks->tokens);
    }
}

void gpu_check_blocks_make(struct gpu_check_blocks *blocks, enum gpu_check_way way)
{
    blocks->generation += way == GPU_CHECK_STORE;
    for (uint32_t slot = 0; slot < blocks->slots; slot++)
        make_xfer(blocks, way, slot);
}

bool gpu_check_blocks_submit(struct gpu_check_blocks *blocks)
{
    struct kvt_xfer *xfers[GPU_CHECK_SLOTS_MAX];
    uint32_t sent = 0, taken;

    memset(blocks->statuses, 0, sizeof(blocks->statuses));
    for (uint32_t i = 0; i < blocks->slots; i++)
        xfers[i] = &blocks->xfers[i];
    while (sent < blocks->slots) {
        if (kvt_tier_submit(blocks->tier, xfers + sent, blocks->slots - sent, &taken) != 0)
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
    if (!gpu_check_blocks_submit(blocks) || !gpu_check_blocks_reap(blocks, blocks->slots))
        return false;
    if (blocks->statuses[KVT_XFER_DONE] == blocks->slots)
        return true;
    (void)snprintf(text, sizeof(text), "%s: %u of %u ended badly", names[way],
                   blocks->slots - blocks->statuses[KVT_XFER_DONE], blocks->slots);
    return failed(blocks, text);
}

/* ---- content --------------------------------------------------------------------------------- */

void gpu_check_blocks_fill(const struct gpu_check_blocks *blocks, uint64_t *pool, uint64_t salt)
{
    uint64_t words = blocks->piece_bytes / sizeof(*pool);

    for (uint64_t i = 0; i < blocks->pool_bytes / sizeof(*pool); i++)
        pool[i] = i / words % 2 == 0 ? gpu_check_word(i + 1 + (salt << 40)) : UINT64_MAX;
}

uint64_t gpu_check_blocks_count_wrong(const struct gpu_check_blocks *blocks, const uint64_t *pool,
                                      uint64_t salt)
{
    uint64_t words = blocks->piece_bytes / sizeof(*pool), wrong = 0;

    for (uint64_t i = 0; i < blocks->pool_bytes / sizeof(*pool); i++) {
        uint64_t at = i / words % 2 == 0 ? i : i - words;

        if (pool[i] != gpu_check_word(at + 1 + (salt << 40)))
            wrong += sizeof(*pool);
    }
    return wrong;
}

uint64_t gpu_check_blocks_arena_bytes(const struct gpu_check_blocks *blocks)
{
    return blocks->slots * kvt_round_up(blocks->payload_bytes, GPU_CHECK_SLOT_ALIGN_BYTES);
}

uint64_t gpu_check_blocks_count_wrong_slots(const struct gpu_check_blocks *blocks,
                                            const uint8_t *slots, uint64_t salt)
{
    uint64_t slot_bytes = kvt_round_up(blocks->payload_bytes, GPU_CHECK_SLOT_ALIGN_BYTES);
    uint64_t words = blocks->piece_bytes / sizeof(uint64_t), wrong = 0;

    for (uint32_t slot = 0; slot < blocks->slots; slot++) {
        const uint64_t *at = (const void *)(slots + slot * slot_bytes);

        for (uint64_t i = 0; i < blocks->payload_bytes / sizeof(*at); i++) {
            uint64_t part = i / words, piece = part / GPU_CHECK_BLOCKS;
            uint64_t block = blocks->from[slot][part % GPU_CHECK_BLOCKS];
            uint64_t word = (piece * blocks->pool_blocks + block) * words + i % words;

            if (at[i] != gpu_check_word(word + 1 + (salt << 40)))
                wrong += sizeof(*at);
        }
    }
    return wrong;
}
