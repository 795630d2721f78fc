/* Copies between the pieces of an engine and a payload that is quantised.
 *
 * A piece of a quantised layout is whole planes, and a plane lies contiguous in the engine's
 * memory, so planes are converted where they are: there is nothing to gather first, and no memory
 * of our own to hold it. Which plane of the payload an engine block of a piece begins with follows
 * from the sizes of the pieces before it:
 *
 *   engine      piece 0, blocks 0 1 ..   piece 1, blocks 0 1 ..
 *   planes      [0 1][2 3] ..            [8][9] ..                   pieces of 2 planes and of 1
 *   payload     codes 0 1 2 3 .. 8 9 .. | zeros | scales 0 1 2 3 .. 8 9 .. | zeros
 *
 * So a group of pieces, or engine blocks that are left alone, are ranges of planes like any other.
 * An engine that writes to a plane while it is read gets codes that stand for neither of its
 * contents, as with a plain copy; the hash is of what was stored. */
#include "tiers/client_quant.h"

#include "daemon/base/guard.h"
#include "daemon/base/hash.h"
#include "daemon/base/limits.h"

/* Planes are counted in 32 bits, and a launch takes less than 2^31 of their heads: one alone that
 * does not fit would fail all that are launched with it. An element has 2 bytes. */
static_assert(KVT_SHARD_BYTES_MAX / 2 < 1ull << 31, "what is not too long can be launched");

int kvt_client_quant_resolve(const struct kvt_layout *layout, const struct kvt_region *regions,
                             uint64_t payload_bytes, uint64_t *ret_stored_bytes)
{
    uint64_t plane_bytes;

    if (!kvt_quant_is_valid(&layout->quant))
        return KVT_LAYOUT_E_PLANES;
    if (payload_bytes > KVT_SHARD_BYTES_MAX)
        return KVT_LAYOUT_E_LONG;
    plane_bytes = kvt_quant_plane_bytes(&layout->quant);
    for (uint32_t i = 0; i < layout->pieces_count; i++) {
        const struct kvt_layout_piece *piece = &layout->pieces[i];
        uintptr_t at = (uintptr_t)regions[piece->region_idx].base + piece->offset_bytes;

        if (piece->bytes % plane_bytes != 0)
            return KVT_LAYOUT_E_PLANES;
        if (at % 2 != 0 || piece->stride_bytes % 2 != 0)
            return KVT_LAYOUT_E_ODD;
    }
    *ret_stored_bytes = kvt_quant_bytes(&layout->quant, payload_bytes);
    KVT_ASSERT(*ret_stored_bytes > 0); /* whole pieces are whole planes */
    return 0;
}

struct quant_copy {
    const struct kvt_client_view *view;
    uint8_t *payload; /* its first byte, whatever the view's pieces are */
    bool is_gather;
    uint64_t plane_bytes;
    uint32_t plane; /* the next of the payload */
};

static uint32_t planes_before(const struct kvt_client_view *view, uint64_t plane_bytes)
{
    const struct kvt_layout *layout = view->layout;
    uint64_t planes = 0;

    for (uint32_t p = 0; p < view->first_piece; p++)
        planes += layout->pieces[p].bytes / plane_bytes;
    return (uint32_t)(planes * layout->engine_blocks_per_block);
}

static int copy_planes(struct quant_copy *copy, uint8_t *raw, uint32_t count)
{
    const struct kvt_layout *layout = copy->view->layout;
    const struct kvt_kernels *kernels = kvt_kernels_host();
    struct kvt_quant_job job = {
        .raw = (uintptr_t)raw,
        .quantised = (uintptr_t)copy->payload,
        .planes_count = (uint32_t)(layout->payload_bytes / copy->plane_bytes),
        .first_plane = copy->plane,
        .end_plane = copy->plane + count,
    };
    struct kvt_quant_batch batch = {
        .spec = layout->quant, .jobs = (uintptr_t)&job, .jobs_count = 1, .planes_max = count};

    return copy->is_gather ? kernels->quantise(NULL, &batch) : kernels->dequantise(NULL, &batch);
}

static int copy_walk(void *ctx)
{
    struct quant_copy *copy = ctx;
    const struct kvt_layout *layout = copy->view->layout;
    int r = 0;

    for (uint32_t p = copy->view->first_piece; p < copy->view->end_piece; p++) {
        const struct kvt_layout_piece *piece = &layout->pieces[p];
        uint32_t count = (uint32_t)(piece->bytes / copy->plane_bytes);

        for (uint32_t b = 0; b < layout->engine_blocks_per_block && r == 0; b++) {
            uint64_t id = copy->view->engine_blocks[b];

            if (id != KVT_ENGINE_BLOCK_NONE)
                r = copy_planes(copy, piece->base + id * piece->stride_bytes, count);
            copy->plane += count;
        }
    }
    return r;
}

static int copy_run(const struct kvt_client_view *view, uint8_t *payload, bool is_gather)
{
    struct quant_copy copy = {.view = view, .payload = payload, .is_gather = is_gather};
    int r;

    copy.plane_bytes = kvt_quant_plane_bytes(&view->layout->quant);
    copy.plane = planes_before(view, copy.plane_bytes);
    r = kvt_guard_run(copy_walk, &copy);
    KVT_ASSERT(r == 0 || r == -EFAULT); /* the layout was checked when it was resolved */
    return r;
}

int kvt_client_quant_gather(const struct kvt_client_view *view, uint8_t *payload,
                            uint64_t *ret_hash)
{
    int r = copy_run(view, payload, true);

    if (r < 0)
        return kvt_trace(r);
    if (ret_hash != NULL)
        *ret_hash = kvt_hash64(payload, view->layout->stored_bytes, 0);
    return 0;
}

int kvt_client_quant_scatter(const struct kvt_client_view *view, const uint8_t *payload)
{
    /* Only read from: is_gather is false. */
    int r = copy_run(view, (uint8_t *)(uintptr_t)payload, false);

    return r < 0 ? kvt_trace(r) : 0;
}
