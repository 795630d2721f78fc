/* One transfer becomes a member of a flight: which steps its bytes go through, where they are at
 * each, and how much staging that takes.
 *
 *   from          to            steps
 *   pool          slot          gather [, quantise]
 *   slot          pool          [dequantise,] scatter
 *   pool          L2            gather [, quantise] into staging, down, CPU: hash, seal
 *   L2            pool          CPU: [verify,] sum, up into staging [, dequantise], scatter
 *   L2            slot          CPU: [verify,] sum, up, check
 *   slot          L2            check, down, CPU: hash, seal
 *   client's host slot          CPU: fill (quantises, too), up, check
 *   slot          client's host down, CPU: scatter (and dequantises)
 *
 * L2 that is not pinned goes through pinned staging: filled before, emptied after. */
#include "tiers/device/gpu_internal.h"

/* A place in the arena of another incarnation: what was there is lost. */
static bool is_stale(const struct kvt_gpu *gpu, const struct kvt_place *place)
{
    return place->kind == KVT_PLACE_DEVICE &&
           place->incarnation !=
               atomic_load_explicit(&gpu->worker.tier.counters.incarnation, memory_order_acquire);
}

static bool is_client_gone(const struct kvt_gpu *gpu, const struct kvt_client_view *view)
{
    return view != NULL && view->layout->is_gpu && view->layout->gpu_zone == gpu->config.zone &&
           view->layout->incarnation !=
               atomic_load_explicit(&gpu->worker.tier.counters.incarnation, memory_order_acquire);
}

static void plan_device(const struct kvt_gpu *gpu, const struct kvt_place *place,
                        struct kvt_gpu_member *member)
{
    uint64_t offset_bytes = place->offset_bytes - gpu->config.base_bytes;

    KVT_ASSERT(place->offset_bytes >= gpu->config.base_bytes);
    KVT_ASSERT(offset_bytes <= gpu->config.arena_bytes);
    KVT_ASSERT(member->stored_bytes <= gpu->config.arena_bytes - offset_bytes);
    member->slot_offset_bytes = offset_bytes;
    member->stored = gpu->memory.arena + offset_bytes;
}

static void plan_slot(const struct kvt_gpu *gpu, const struct kvt_place *place,
                      struct kvt_gpu_member *member)
{
    uint64_t left_bytes = gpu->config.host_memory_bytes - place->offset_bytes;

    KVT_ASSERT(place->offset_bytes <= gpu->config.host_memory_bytes);
    KVT_ASSERT(member->xfer->header_bytes <= left_bytes &&
               member->stored_bytes <= left_bytes - member->xfer->header_bytes);
    member->slot = gpu->config.host_memory + place->offset_bytes;
}

static void plan_view(struct kvt_gpu_member *member)
{
    const struct kvt_client_view *view = member->view;
    const struct kvt_layout *layout = view->layout;
    uint32_t blocks_count = layout->engine_blocks_per_block;

    KVT_ASSERT(view->first_piece < view->end_piece && view->end_piece <= layout->pieces_count);
    KVT_ASSERT(layout->stored_bytes == member->stored_bytes);
    member->raw_bytes = member->range_bytes = layout->payload_bytes;
    if (view->first_piece > 0 || view->end_piece < layout->pieces_count) {
        member->range_offset = member->range_bytes = 0;
        for (uint32_t p = 0; p < view->end_piece; p++)
            *(p < view->first_piece ? &member->range_offset : &member->range_bytes) +=
                (uint64_t)layout->pieces[p].bytes * blocks_count;
        member->is_partial = true;
    }
    /* Copies of host memory convert on the CPU: what they give and take is the whole slot. */
    if (!layout->is_gpu && layout->quant.kind != KVT_QUANT_NONE) {
        member->raw_bytes = member->range_bytes = member->stored_bytes;
        member->range_offset = 0;
    }
    for (uint32_t b = 0; b < blocks_count; b++) {
        bool is_none = view->engine_blocks[b] == KVT_ENGINE_BLOCK_NONE;

        KVT_ASSERT(is_none || view->engine_blocks[b] < layout->engine_blocks_count);
        member->has_none = member->has_none || is_none;
    }
    member->is_partial = member->is_partial || member->has_none;
    /* Towards us a client gives whole payloads. */
    KVT_ASSERT(!member->is_partial || member->xfer->dst.kind == KVT_PLACE_CLIENT);
}

static bool is_checkable(const struct kvt_layout *layout)
{
    uint64_t bytes = 0;

    for (uint32_t p = 0; p < layout->pieces_count; p++)
        bytes |= layout->pieces[p].bytes;
    return bytes % 8 == 0; /* then every offset is a multiple of it, too */
}

/* How gather or scatter is done. Addresses of another GPU are for its copy engine alone. */
static void plan_copies(const struct kvt_gpu *gpu, struct kvt_gpu_member *member)
{
    const struct kvt_layout *layout = member->view->layout;

    member->is_foreign = layout->gpu_zone != gpu->config.zone;
    member->is_by_runs = member->is_foreign || kvt_gpu_runs_are_few(member->view, KVT_GPU_RUNS_MAX,
                                                                    gpu->config.crossover_bytes);
    /* Nor do the kernels take any layout: of very many parts and a very long one, say. */
    if (!member->is_by_runs) {
        member->extent = kvt_gpu_lists_extent(member->view);
        member->is_by_runs = !kvt_gpu_lists_can_launch(&member->extent);
    }
    member->is_gather = member->xfer->src.kind == KVT_PLACE_CLIENT;
    member->is_scatter = !member->is_gather;
    member->is_quantise = member->is_gather && layout->quant.kind != KVT_QUANT_NONE;
    member->is_dequantise = member->is_scatter && layout->quant.kind != KVT_QUANT_NONE;
}

/* The host's side of a copy between host and device, and its CPU work. What a client in host memory
 * gives and takes is stored bytes (tiers/client.h converts). */
static void plan_host(const struct kvt_gpu *gpu, struct kvt_gpu_member *member)
{
    const struct kvt_xfer *xfer = member->xfer;
    bool is_quantised = member->is_quantise || member->is_dequantise;
    bool is_client = !member->is_gather && !member->is_scatter && member->view != NULL;

    if (member->slot == NULL && !is_client)
        return;
    member->is_up = xfer->dst.kind == KVT_PLACE_DEVICE || member->is_scatter;
    member->is_down = !member->is_up;
    member->is_out = member->is_down;
    member->host_bytes = is_client ? member->raw_bytes : member->stored_bytes;
    if (xfer->dst.kind == KVT_PLACE_CLIENT && (is_client || !is_quantised)) {
        member->host_offset = member->range_offset;
        member->host_bytes = member->range_bytes;
    }
    if (is_client || !gpu->config.is_host_pinned)
        member->pinned_bytes = member->host_bytes;
    member->is_fill = member->is_up && member->pinned_bytes > 0;
    member->is_verify = member->is_up && !is_client && (xfer->flags & KVT_XFER_VERIFY) != 0;
}

/* Which checks (kvt_check64 of the stored bytes) are known of a transfer, and so compared:
 *
 *   expected   before: of the ledger for a slot that is read; of the CPU, which reads all that goes
 *              up (of a view of some pieces: of their bytes)
 *   found      by the GPU: as it gathers or scatters, or by a kernel over the stored bytes
 *   summed     by the CPU: of what came down, as it reads it
 *
 * A slot that is filled has `found` from now on as its check. One that is read has to have the
 * ledger's; where the CPU reads what came out, that alone says so, and of the copy as well. */
static int plan_check(struct kvt_gpu *gpu, struct kvt_gpu_member *member)
{
    struct kvt_xfer *xfer = member->xfer;
    bool is_whole = !member->is_partial, is_read = xfer->src.kind == KVT_PLACE_DEVICE;
    bool is_wanted = xfer->dst.kind == KVT_PLACE_DEVICE || member->is_up;
    enum kvt_ledger_answer answer;

    if (member->is_up || member->is_down)
        is_whole = is_whole || member->host_bytes == member->stored_bytes;
    if (is_read) {
        answer =
            kvt_ledger_get(gpu->ledger, member->slot_offset_bytes, &xfer->key, &member->expected);
        if (answer == KVT_LEDGER_OTHER) {
            xfer->verdict = KVT_SLOT_OTHER;
            return KVT_XFER_BAD_SLOT;
        }
        member->is_expected = answer == KVT_LEDGER_CHECK && is_whole;
        is_wanted = member->is_expected && !member->is_down;
    }
    member->is_summed = member->is_down && is_whole;
    if (member->is_summed && !member->is_expected)
        is_wanted = true;
    if (!is_wanted)
        return 0;
    member->is_job_checked = (member->is_gather || member->is_scatter) && !member->is_by_runs &&
                             !member->is_quantise && !member->is_dequantise && !member->has_none &&
                             is_checkable(member->view->layout);
    member->is_check = !member->is_job_checked;
    return 0;
}

static void plan_staging(struct kvt_gpu_member *member)
{
    const struct kvt_xfer *xfer = member->xfer;
    bool is_quantised = member->is_quantise || member->is_dequantise;

    if (xfer->src.kind != KVT_PLACE_DEVICE && xfer->dst.kind != KVT_PLACE_DEVICE)
        member->device_bytes = kvt_round_up(is_quantised || member->is_gather ? member->stored_bytes
                                                                              : member->range_bytes,
                                            KVT_GPU_ADDRESS_ALIGN_BYTES);
    if (is_quantised)
        member->device_bytes += member->is_quantise ? member->raw_bytes : member->range_bytes;
}

int kvt_gpu_plan(struct kvt_gpu *gpu, struct kvt_xfer *xfer, struct kvt_gpu_member *ret_member)
{
    struct kvt_gpu_member *member = ret_member;
    int status;

    *member = (struct kvt_gpu_member){.xfer = xfer, .stored_bytes = xfer->key.payload_bytes};
    member->view = xfer->src.kind == KVT_PLACE_CLIENT   ? &xfer->src.view
                   : xfer->dst.kind == KVT_PLACE_CLIENT ? &xfer->dst.view
                                                        : NULL;
    xfer->verdict = KVT_SLOT_OK;
    if (is_stale(gpu, &xfer->src) || is_stale(gpu, &xfer->dst))
        return KVT_XFER_OUT_OF_SERVICE;
    if (is_client_gone(gpu, member->view))
        return KVT_XFER_CLIENT_GONE;
    if (xfer->src.kind == KVT_PLACE_DEVICE || xfer->dst.kind == KVT_PLACE_DEVICE)
        plan_device(gpu, xfer->src.kind == KVT_PLACE_DEVICE ? &xfer->src : &xfer->dst, member);
    if (xfer->src.kind == KVT_PLACE_HOST || xfer->dst.kind == KVT_PLACE_HOST)
        plan_slot(gpu, xfer->src.kind == KVT_PLACE_HOST ? &xfer->src : &xfer->dst, member);
    if (member->view != NULL) {
        plan_view(member);
        if (member->view->layout->is_gpu)
            plan_copies(gpu, member);
    }
    /* Clients in host memory <-> L2 is the host tier's work. */
    KVT_ASSERT(member->stored != 0 || member->is_gather || member->is_scatter);
    plan_host(gpu, member);
    plan_staging(member);
    if (member->device_bytes > kvt_gpu_staging_bytes(&gpu->staging) ||
        member->pinned_bytes > kvt_gpu_staging_bytes(&gpu->pinned))
        return -ENOBUFS;
    status = plan_check(gpu, member);
    member->budget_bytes = KVT_MAX(member->stored_bytes, member->raw_bytes);
    return status;
}

/* The address of a payload of which only what lies behind @offset is there. */
static uint64_t payload_before(uint64_t address, uint64_t offset)
{
    return address - offset;
}

void kvt_gpu_plan_place(struct kvt_gpu *gpu, struct kvt_gpu_member *member)
{
    bool is_quantised = member->is_quantise || member->is_dequantise;
    uint64_t address = member->device_run.address;

    if (member->stored == 0) {
        member->stored = is_quantised ? address : payload_before(address, member->range_offset);
        address += kvt_round_up(member->stored_bytes, KVT_GPU_ADDRESS_ALIGN_BYTES);
    }
    member->raw = is_quantised ? payload_before(address, member->range_offset) : member->stored;
    if (!member->is_up && !member->is_down)
        return;
    member->host_device =
        (member->slot == NULL ? member->raw : member->stored) + member->host_offset;
    member->host = member->pinned_run.chunks_count > 0
                       ? (uint8_t *)(uintptr_t)member->pinned_run.address
                       : member->slot + member->xfer->header_bytes + member->host_offset;
    KVT_ASSERT(gpu->config.is_host_pinned || member->pinned_run.chunks_count > 0);
}
