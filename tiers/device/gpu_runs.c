/* A view as runs: pieces that follow each other in the pool (neighbouring engine blocks of a dense
 * layout, layers that lie side by side) are one run, as in tiers/client.c. The payload's side of a
 * run is contiguous as well: the walk is in its order. Regions may be allocations of their own, and
 * CUDA refuses a copy that runs from one into the next: a run stays within its region. */
#include "tiers/device/gpu_internal.h"

void kvt_gpu_runs_init(struct kvt_gpu_runs *runs, const struct kvt_client_view *view,
                       uint64_t payload_offset)
{
    *runs = (struct kvt_gpu_runs){
        .view = view, .piece = view->first_piece, .payload_offset = payload_offset};
}

bool kvt_gpu_runs_next(struct kvt_gpu_runs *runs, struct kvt_gpu_run_at *ret_run)
{
    const struct kvt_client_view *view = runs->view;
    struct kvt_gpu_run_at run = {0};
    uint32_t region_idx = 0;

    for (; runs->piece < view->end_piece; runs->piece++, runs->block = 0) {
        const struct kvt_layout_piece *piece = &view->layout->pieces[runs->piece];

        for (; runs->block < view->layout->engine_blocks_per_block; runs->block++) {
            uint64_t id = view->engine_blocks[runs->block];
            uint64_t at = (uint64_t)(uintptr_t)piece->base + id * piece->stride_bytes;

            /* A run ends before a block that is elsewhere or nowhere; the next call meets it. */
            if (run.bytes > 0 && (id == KVT_ENGINE_BLOCK_NONE || at != run.address + run.bytes ||
                                  piece->region_idx != region_idx))
                goto found;
            if (id != KVT_ENGINE_BLOCK_NONE) {
                if (run.bytes == 0)
                    run = (struct kvt_gpu_run_at){.address = at,
                                                  .payload_offset = runs->payload_offset};
                region_idx = piece->region_idx;
                run.bytes += piece->bytes;
            }
            runs->payload_offset += piece->bytes;
        }
    }
    if (run.bytes == 0)
        return false;
found:
    *ret_run = run;
    return true;
}

bool kvt_gpu_runs_are_few(const struct kvt_client_view *view, uint32_t max, uint64_t bytes_min)
{
    struct kvt_gpu_run_at run;
    struct kvt_gpu_runs runs;

    kvt_gpu_runs_init(&runs, view, 0);
    for (uint32_t i = 0; kvt_gpu_runs_next(&runs, &run); i++)
        if (i == max || run.bytes < bytes_min)
            return false;
    return true;
}
