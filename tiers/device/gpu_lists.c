/* The descriptors of a flight, in one area of pinned memory that is copied to the device in one
 * piece before the launches that read it: kernels read them from the device's own memory, once for
 * every part of every job.
 *
 *   | checks | copy jobs | check jobs | quantise jobs | dequantise jobs | pieces, block ids .. |
 *
 * Jobs hold addresses of the device. The checks are zero, which the copy takes along, and kernels
 * add to them on the device. Members that have the same view of the same layout share its pieces.
 */
#include <string.h>

#include "kernels/args.h"
#include "tiers/device/gpu_internal.h"

#define CHUNK_BYTES 64u                 /* the shortest piece of work of a kernel */
#define CHUNKS_FREE ((uint64_t)1 << 24) /* a launch may look at so many, whatever is in them .. */
#define CHUNKS_FACTOR 4u                /* .. or at so many for one with bytes */

struct lists { /* the area's fixed part */
    uint64_t checks[KVT_GPU_MEMBERS_MAX];
    struct kvt_copy_job copies[KVT_GPU_MEMBERS_MAX];
    struct kvt_check_job check_jobs[KVT_GPU_MEMBERS_MAX];
    struct kvt_quant_job quantise[KVT_GPU_MEMBERS_MAX], dequantise[KVT_GPU_MEMBERS_MAX];
};
static_assert(sizeof(struct lists) + KVT_PIECES_PER_COMPONENT_MAX * sizeof(struct kvt_copy_piece) +
                      KVT_ENGINE_BLOCKS_PER_BLOCK_MAX * sizeof(uint64_t) <=
                  KVT_GPU_AREA_BYTES,
              "any one transfer has room");

uint64_t kvt_gpu_lists_checks_bytes(void)
{
    return sizeof(((struct lists *)NULL)->checks);
}

static bool is_launched(const struct kvt_gpu_member *member)
{
    return (member->is_gather || member->is_scatter) && !member->is_by_runs;
}

static bool is_same_pieces(const struct kvt_client_view *a, const struct kvt_client_view *b)
{
    return a != NULL && a->layout == b->layout && a->first_piece == b->first_piece &&
           a->end_piece == b->end_piece;
}

static uint64_t pieces_bytes(const struct kvt_client_view *view)
{
    return (view->end_piece - view->first_piece) * sizeof(struct kvt_copy_piece);
}

struct kvt_gpu_extent kvt_gpu_lists_extent(const struct kvt_client_view *view)
{
    uint32_t pieces_count = view->end_piece - view->first_piece;
    uint32_t blocks_count = view->layout->engine_blocks_per_block;
    struct kvt_gpu_extent extent = {.pieces_max = pieces_count,
                                    .blocks_max = blocks_count,
                                    .parts = (uint64_t)pieces_count * blocks_count};

    for (uint32_t p = view->first_piece; p < view->end_piece; p++) {
        uint32_t bytes = view->layout->pieces[p].bytes;

        extent.piece_bytes_max = KVT_MAX(extent.piece_bytes_max, bytes);
        extent.chunks += kvt_div_up(bytes, CHUNK_BYTES) * blocks_count;
    }
    return extent;
}

struct kvt_gpu_extent kvt_gpu_lists_joint(const struct kvt_gpu_extent *a,
                                          const struct kvt_gpu_extent *b)
{
    return (struct kvt_gpu_extent){.pieces_max = KVT_MAX(a->pieces_max, b->pieces_max),
                                   .blocks_max = KVT_MAX(a->blocks_max, b->blocks_max),
                                   .piece_bytes_max =
                                       KVT_MAX(a->piece_bytes_max, b->piece_bytes_max),
                                   .parts = a->parts + b->parts,
                                   .chunks = a->chunks + b->chunks};
}

bool kvt_gpu_lists_can_launch(const struct kvt_gpu_extent *extent)
{
    const struct kvt_copy_batch batch = {.jobs = 1, /* an address; it is not looked at */
                                         .jobs_count = 1,
                                         .pieces_max = extent->pieces_max,
                                         .blocks_max = extent->blocks_max,
                                         .piece_bytes_max = extent->piece_bytes_max};

    return kvt_args_copy(&batch) == 0;
}

bool kvt_gpu_lists_is_dense(const struct kvt_gpu_extent *extent)
{
    uint64_t chunks = extent->parts * kvt_div_up(extent->piece_bytes_max, CHUNK_BYTES);

    return chunks <= CHUNKS_FREE || chunks / CHUNKS_FACTOR <= extent->chunks;
}

bool kvt_gpu_lists_fit(struct kvt_gpu_flight *flight, const struct kvt_gpu_member *member)
{
    const struct kvt_client_view *view = member->view;
    uint64_t bytes = KVT_MAX(flight->lists_bytes, sizeof(struct lists));
    struct kvt_gpu_extent extent = kvt_gpu_lists_joint(&flight->extent, &member->extent);

    if (!is_launched(member))
        return true;
    /* A single one is launched as it is: gpu_plan.c asked whether it can be. */
    if (flight->extent.parts > 0 &&
        (!kvt_gpu_lists_can_launch(&extent) || !kvt_gpu_lists_is_dense(&extent)))
        return false;
    bytes += view->layout->engine_blocks_per_block * sizeof(uint64_t);
    if (!is_same_pieces(flight->lists_view, view))
        bytes += pieces_bytes(view);
    if (bytes > KVT_GPU_AREA_BYTES)
        return false;
    flight->lists_bytes = bytes;
    flight->lists_view = view;
    flight->extent = extent;
    return true;
}

/* What is being written: where pieces of the last view are, and how far the area is used. */
struct writer {
    struct kvt_gpu_flight *flight;
    struct lists *lists;
    const struct kvt_client_view *view;
    uint64_t pieces; /* address on the device */
    struct kvt_gpu_batches *batches;
};

static void *writer_take(struct writer *writer, uint64_t bytes, uint64_t *ret_device)
{
    struct kvt_gpu_flight *flight = writer->flight;
    uint64_t at = flight->area_used_bytes;

    KVT_ASSERT(bytes % 8 == 0 && bytes <= KVT_GPU_AREA_BYTES - at);
    flight->area_used_bytes += bytes;
    *ret_device = flight->area->device + at;
    return flight->area->pinned + at;
}

static void write_pieces(struct writer *writer, const struct kvt_gpu_member *member)
{
    const struct kvt_client_view *view = member->view;
    uint64_t offset = 0; /* in what the view has of the payload */
    struct kvt_copy_piece *to;

    if (is_same_pieces(writer->view, view))
        return;
    writer->view = view;
    to = writer_take(writer, pieces_bytes(view), &writer->pieces);
    for (uint32_t p = view->first_piece; p < view->end_piece; p++, to++) {
        const struct kvt_layout_piece *piece = &view->layout->pieces[p];

        *to = (struct kvt_copy_piece){.base = (uint64_t)(uintptr_t)piece->base,
                                      .stride_bytes = piece->stride_bytes,
                                      .payload_offset_bytes = offset,
                                      .bytes = piece->bytes};
        offset += (uint64_t)piece->bytes * view->layout->engine_blocks_per_block;
    }
}

static uint64_t check_address(const struct writer *writer, uint32_t member_idx)
{
    return writer->flight->area->device + offsetof(struct lists, checks) +
           member_idx * sizeof(uint64_t);
}

static void write_copy(struct writer *writer, uint32_t member_idx)
{
    const struct kvt_gpu_member *member = &writer->flight->members[member_idx];
    struct kvt_copy_batch *batch = &writer->batches->copies;
    const struct kvt_client_view *view = member->view;
    uint64_t blocks, blocks_bytes = view->layout->engine_blocks_per_block * sizeof(uint64_t);
    void *to;

    write_pieces(writer, member);
    to = writer_take(writer, blocks_bytes, &blocks);
    memcpy(to, view->engine_blocks, blocks_bytes);
    writer->lists->copies[batch->jobs_count++] = (struct kvt_copy_job){
        .payload = member->raw + member->range_offset,
        .pieces = writer->pieces,
        .blocks = blocks,
        .check = member->is_job_checked ? check_address(writer, member_idx) : 0,
        .pieces_count = view->end_piece - view->first_piece,
        .blocks_count = view->layout->engine_blocks_per_block};
    batch->pieces_max = KVT_MAX(batch->pieces_max, view->end_piece - view->first_piece);
    batch->blocks_max = KVT_MAX(batch->blocks_max, view->layout->engine_blocks_per_block);
    for (uint32_t p = view->first_piece; p < view->end_piece; p++)
        batch->piece_bytes_max = KVT_MAX(batch->piece_bytes_max, view->layout->pieces[p].bytes);
}

static void write_quant(struct writer *writer, const struct kvt_gpu_member *member)
{
    const struct kvt_quant_spec *spec = &member->view->layout->quant;
    struct kvt_quant_batch *batch =
        member->is_quantise ? &writer->batches->quantise : &writer->batches->dequantise;
    struct kvt_quant_job *jobs =
        member->is_quantise ? writer->lists->quantise : writer->lists->dequantise;
    uint64_t plane_bytes = kvt_quant_plane_bytes(spec);
    struct kvt_quant_job job = {
        .raw = member->raw + member->range_offset,
        .quantised = member->stored,
        .planes_count = (uint32_t)(member->raw_bytes / plane_bytes),
        .first_plane = (uint32_t)(member->range_offset / plane_bytes),
        .end_plane = (uint32_t)((member->range_offset + member->range_bytes) / plane_bytes)};

    KVT_ASSERT(member->range_offset % plane_bytes == 0 && member->range_bytes % plane_bytes == 0);
    batch->spec = *spec;
    jobs[batch->jobs_count++] = job;
    batch->planes_max = KVT_MAX(batch->planes_max, job.end_plane - job.first_plane);
}

static void write_check(struct writer *writer, uint32_t member_idx)
{
    const struct kvt_gpu_member *member = &writer->flight->members[member_idx];
    struct kvt_check_batch *batch = &writer->batches->checks;
    struct kvt_check_job job = {.payload = member->stored,
                                .bytes = member->stored_bytes,
                                .check = check_address(writer, member_idx)};

    if (member->is_up) { /* all of it that is there */
        job.payload += member->host_offset;
        job.bytes = member->host_bytes;
    }
    writer->lists->check_jobs[batch->jobs_count++] = job;
    batch->bytes_max = KVT_MAX(batch->bytes_max, job.bytes);
}

void kvt_gpu_lists_write(struct kvt_gpu_flight *flight)
{
    struct kvt_gpu_batches *batches = &flight->batches;
    struct writer writer = {.flight = flight,
                            .lists = (struct lists *)(void *)flight->area->pinned,
                            .batches = batches};
    uint64_t base = flight->area->device;

    memset(writer.lists->checks, 0, sizeof(writer.lists->checks));
    flight->area_used_bytes = sizeof(struct lists);
    *batches =
        (struct kvt_gpu_batches){.copies.jobs = base + offsetof(struct lists, copies),
                                 .checks.jobs = base + offsetof(struct lists, check_jobs),
                                 .quantise.jobs = base + offsetof(struct lists, quantise),
                                 .dequantise.jobs = base + offsetof(struct lists, dequantise)};
    for (uint32_t i = 0; i < flight->members_count; i++) {
        const struct kvt_gpu_member *member = &flight->members[i];

        if (member->is_ended)
            continue;
        if (is_launched(member))
            write_copy(&writer, i);
        if (member->is_quantise || member->is_dequantise)
            write_quant(&writer, member);
        if (member->is_check)
            write_check(&writer, i);
        flight->has_checks = flight->has_checks || member->is_check || member->is_job_checked;
    }
    if (batches->copies.jobs_count + batches->checks.jobs_count + batches->quantise.jobs_count +
            batches->dequantise.jobs_count ==
        0)
        flight->area_used_bytes = 0;
}
