/* Regions, layouts, and the copies between pieces and payload.
 *
 * The payload side of a copy is one contiguous run, so only the client's side is walked. Pieces
 * that follow each other in the client's memory (consecutive engine blocks of a dense layout, or
 * layers that lie side by side) become one memcpy. While gathering, the hash trails the copy by at
 * most one chunk that is still in cache. A scatter steps over the bytes of engine blocks that are
 * not to be written; a gather has none. */
#include "tiers/client.h"

#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>

#include "daemon/base/guard.h"
#include "daemon/base/hash.h"
#include "tiers/client_quant.h"
#include "tiers/copy.h"

#define HUGETLBFS_TYPE 0x958458f6L

int kvt_region_open(struct kvt_region *ret_region, int memfd, uint64_t bytes)
{
    const int needed = F_SEAL_SHRINK | F_SEAL_GROW;
    uint64_t mapped_bytes = bytes;
    struct statfs file_system;
    struct stat st;
    void *base;
    int seals;

    seals = fcntl(memfd, F_GET_SEALS);
    if (seals < 0)
        return errno == EINVAL ? KVT_REGION_E_NOT_MEMFD : kvt_trace(-errno);
    if ((seals & needed) != needed)
        return KVT_REGION_E_NOT_SEALED;
    if (fstat(memfd, &st) < 0 || fstatfs(memfd, &file_system) < 0)
        return kvt_trace(-errno);
    if (bytes == 0 || st.st_size < 0 || bytes > (uint64_t)st.st_size)
        return KVT_REGION_E_TOO_SMALL;
    /* Both shmem and hugetlb count allocated 512-byte sectors. */
    if ((uint64_t)st.st_blocks * 512u < bytes)
        return KVT_REGION_E_SPARSE;
    /* hugetlb mappings come and go in whole huge pages; the file is a multiple of them. */
    if (file_system.f_type == HUGETLBFS_TYPE)
        mapped_bytes = (uint64_t)st.st_size;
    base = mmap(NULL, mapped_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, memfd, 0);
    if (base == MAP_FAILED)
        return errno == EACCES || errno == EPERM ? KVT_REGION_E_READ_ONLY : kvt_trace(-errno);
    (void)madvise(base, mapped_bytes, MADV_DONTDUMP);
    *ret_region = (struct kvt_region){
        .base = base, .bytes = bytes, .is_mapped = true, .mapped_bytes = mapped_bytes};
    return 0;
}

void kvt_region_close(struct kvt_region *region)
{
    if (region->is_mapped)
        KVT_ASSERT(munmap(region->base, region->mapped_bytes) == 0);
    *region = (struct kvt_region){0};
}

const char *kvt_region_error_text(int result)
{
    switch (result) {
    case KVT_REGION_E_NOT_SEALED:
        return "the memfd must carry F_SEAL_SHRINK and F_SEAL_GROW";
    case KVT_REGION_E_TOO_SMALL:
        return "the memfd is smaller than declared, or nothing is declared";
    case KVT_REGION_E_NOT_MEMFD:
        return "the descriptor is not a memfd";
    case KVT_REGION_E_SPARSE:
        return "the memfd has fewer bytes allocated than declared: fallocate it";
    case KVT_REGION_E_READ_ONLY:
        return "the memfd cannot be mapped for writing";
    }
    return "unknown result";
}

const char *kvt_layout_error_text(int result)
{
    switch (result) {
    case KVT_LAYOUT_E_EMPTY:
        return "the layout has no pieces, or a piece has no bytes";
    case KVT_LAYOUT_E_REGION:
        return "a piece names a region that was not registered";
    case KVT_LAYOUT_E_BOUNDS:
        return "a piece lies outside its region";
    case KVT_LAYOUT_E_PAYLOAD_BYTES:
        return "the pieces do not add up to the namespace's bytes a block";
    case KVT_LAYOUT_E_STRIDE:
        return "the stride of a piece is smaller than its bytes";
    case KVT_LAYOUT_E_MIXED:
        return "the pieces of a component are not all in host memory or all on one GPU";
    case KVT_LAYOUT_E_PLANES:
        return "the component is quantised, and a piece is not whole planes of it";
    case KVT_LAYOUT_E_ODD:
        return "the component is quantised, and a piece's 2-byte elements lie at odd addresses: "
               "its offset and its stride must be even";
    case KVT_LAYOUT_E_LONG:
        return "the component is quantised, and its pieces are more than 1 GiB a block";
    case KVT_LAYOUT_E_OVERLAP:
        return "two pieces of an engine block share bytes";
    }
    return "unknown result";
}

static bool is_same_place(const struct kvt_region *a, const struct kvt_region *b)
{
    return a->is_gpu == b->is_gpu &&
           (!a->is_gpu || (a->gpu_zone == b->gpu_zone && a->incarnation == b->incarnation));
}

/* ---- pieces that share bytes ----------------------------------------------------------------- */

struct span { /* of a piece in engine block 0 */
    uint64_t at, end;
};

static void sift_down(struct span *spans, uint32_t at, uint32_t count)
{
    while (2 * at + 1 < count) {
        uint32_t child = 2 * at + 1;
        struct span moved = spans[at];

        child += child + 1 < count && spans[child + 1].at > spans[child].at;
        if (spans[child].at <= moved.at)
            return;
        spans[at] = spans[child];
        spans[child] = moved;
        at = child;
    }
}

static void sort(struct span *spans, uint32_t count)
{
    for (uint32_t i = count / 2; i > 0; i--)
        sift_down(spans, i - 1, count);
    for (uint32_t end = count; end > 1; end--) {
        struct span last = spans[end - 1];

        spans[end - 1] = spans[0];
        spans[0] = last;
        sift_down(spans, 0, end - 1);
    }
}

int kvt_layout_check_apart(const struct kvt_layout *layout)
{
    struct span spans[KVT_PIECES_PER_COMPONENT_MAX];

    KVT_ASSERT(layout->pieces_count <= KVT_PIECES_PER_COMPONENT_MAX);
    for (uint32_t i = 0; i < layout->pieces_count; i++) {
        spans[i].at = (uint64_t)(uintptr_t)layout->pieces[i].base;
        spans[i].end = spans[i].at + layout->pieces[i].bytes;
    }
    sort(spans, layout->pieces_count);
    for (uint32_t i = 1; i < layout->pieces_count; i++)
        if (spans[i].at < spans[i - 1].end)
            return KVT_LAYOUT_E_OVERLAP;
    return 0;
}

int kvt_layout_resolve(struct kvt_layout *layout, const struct kvt_region *regions,
                       uint32_t regions_count, uint64_t expected_payload_bytes)
{
    uint64_t payload_bytes = 0, stored_bytes, blocks_count = UINT64_MAX;
    const struct kvt_region *first;
    int r;

    if (layout->pieces_count == 0 || layout->engine_blocks_per_block == 0)
        return KVT_LAYOUT_E_EMPTY;
    for (uint32_t i = 0; i < layout->pieces_count; i++) {
        const struct kvt_layout_piece *piece = &layout->pieces[i];
        uint64_t end_bytes;

        if (piece->bytes == 0)
            return KVT_LAYOUT_E_EMPTY;
        if (piece->region_idx >= regions_count)
            return KVT_LAYOUT_E_REGION;
        if (!is_same_place(&regions[piece->region_idx], &regions[layout->pieces[0].region_idx]))
            return KVT_LAYOUT_E_MIXED;
        if (piece->stride_bytes < piece->bytes)
            return KVT_LAYOUT_E_STRIDE;
        if (__builtin_add_overflow(piece->offset_bytes, piece->bytes, &end_bytes) ||
            end_bytes > regions[piece->region_idx].bytes)
            return KVT_LAYOUT_E_BOUNDS;
        blocks_count = KVT_MIN(
            blocks_count, (regions[piece->region_idx].bytes - end_bytes) / piece->stride_bytes + 1);
        if (__builtin_add_overflow(payload_bytes, piece->bytes, &payload_bytes))
            return KVT_LAYOUT_E_BOUNDS;
    }
    if (__builtin_mul_overflow(payload_bytes, layout->engine_blocks_per_block, &payload_bytes))
        return KVT_LAYOUT_E_BOUNDS;
    if (payload_bytes != expected_payload_bytes)
        return KVT_LAYOUT_E_PAYLOAD_BYTES;
    stored_bytes = payload_bytes;
    if (layout->quant.kind != KVT_QUANT_NONE) {
        r = kvt_client_quant_resolve(layout, regions, payload_bytes, &stored_bytes);
        if (r != 0)
            return r;
    }
    for (uint32_t i = 0; i < layout->pieces_count; i++) {
        struct kvt_layout_piece *piece = &layout->pieces[i];

        piece->base = regions[piece->region_idx].base + piece->offset_bytes;
    }
    first = &regions[layout->pieces[0].region_idx];
    layout->is_gpu = first->is_gpu;
    layout->gpu_zone = first->is_gpu ? first->gpu_zone : KVT_GPU_NONE;
    layout->incarnation = first->incarnation;
    layout->payload_bytes = payload_bytes;
    layout->stored_bytes = stored_bytes;
    layout->engine_blocks_count = blocks_count;
    KVT_ASSERT(blocks_count < KVT_ENGINE_BLOCK_NONE); /* of real memory: bytes are fewer */
    return 0;
}

/* One guarded copy. `run` is the stretch of client memory that is known to be contiguous and is not
 * copied yet; `done_bytes` of the payload are copied, `hashed_bytes` of them hashed. */
struct client_copy {
    const struct kvt_client_view *view;
    uint8_t *payload; /* of the view's first piece */
    bool is_gather, is_hashed;
    uint8_t *run;
    uint64_t run_bytes;
    uint64_t done_bytes, hashed_bytes;
    struct kvt_hash_stream hash;
};

static void copy_gather_hashed(struct client_copy *copy)
{
    while (copy->run_bytes > 0) {
        uint64_t room = KVT_COPY_CHUNK_BYTES - (copy->done_bytes - copy->hashed_bytes);
        uint64_t bytes = KVT_MIN(room, copy->run_bytes);

        memcpy(copy->payload + copy->done_bytes, copy->run, bytes);
        copy->done_bytes += bytes;
        copy->run += bytes;
        copy->run_bytes -= bytes;
        if (bytes == room) {
            kvt_hash_stream_update(&copy->hash, copy->payload + copy->hashed_bytes,
                                   KVT_COPY_CHUNK_BYTES);
            copy->hashed_bytes = copy->done_bytes;
        }
    }
}

static void copy_run(struct client_copy *copy)
{
    if (copy->is_hashed) {
        copy_gather_hashed(copy);
        return;
    }
    if (copy->run_bytes == 0)
        return;
    if (copy->is_gather)
        memcpy(copy->payload + copy->done_bytes, copy->run, copy->run_bytes);
    else
        memcpy(copy->run, copy->payload + copy->done_bytes, copy->run_bytes);
    copy->done_bytes += copy->run_bytes;
    copy->run_bytes = 0;
}

static int copy_walk(void *ctx)
{
    struct client_copy *copy = ctx;
    const struct kvt_layout *layout = copy->view->layout;

    for (uint32_t p = copy->view->first_piece; p < copy->view->end_piece; p++) {
        const struct kvt_layout_piece *piece = &layout->pieces[p];

        for (uint32_t b = 0; b < layout->engine_blocks_per_block; b++) {
            uint64_t id = copy->view->engine_blocks[b];
            uint8_t *at;

            if (id == KVT_ENGINE_BLOCK_NONE) {
                copy_run(copy);
                copy->done_bytes += piece->bytes;
                continue;
            }
            at = piece->base + id * piece->stride_bytes;
            if (copy->run_bytes == 0 || at != copy->run + copy->run_bytes) {
                copy_run(copy);
                copy->run = at;
            }
            copy->run_bytes += piece->bytes;
        }
    }
    copy_run(copy);
    return 0;
}

static void view_assert(const struct kvt_client_view *view, bool is_gather)
{
    const struct kvt_layout *layout = view->layout;

    KVT_ASSERT(!layout->is_gpu); /* no address of this process */
    KVT_ASSERT(view->first_piece < view->end_piece);
    KVT_ASSERT(view->end_piece <= layout->pieces_count);
    for (uint32_t b = 0; b < layout->engine_blocks_per_block; b++) {
        uint64_t id = view->engine_blocks[b];

        KVT_ASSERT(id < layout->engine_blocks_count || (!is_gather && id == KVT_ENGINE_BLOCK_NONE));
    }
}

/* Of one engine block. */
static uint64_t pieces_bytes(const struct kvt_layout *layout, uint32_t first, uint32_t end)
{
    uint64_t bytes = 0;

    if (first == 0 && end == layout->pieces_count)
        return layout->payload_bytes / layout->engine_blocks_per_block;
    for (uint32_t p = first; p < end; p++)
        bytes += layout->pieces[p].bytes;
    return bytes;
}

uint64_t kvt_client_view_bytes(const struct kvt_client_view *view)
{
    uint32_t count = 0;

    for (uint32_t b = 0; b < view->layout->engine_blocks_per_block; b++)
        count += view->engine_blocks[b] != KVT_ENGINE_BLOCK_NONE;
    return count * pieces_bytes(view->layout, view->first_piece, view->end_piece);
}

/* Payload bytes before the view's first piece. */
static uint64_t view_offset_bytes(const struct kvt_client_view *view)
{
    return view->layout->engine_blocks_per_block * pieces_bytes(view->layout, 0, view->first_piece);
}

int kvt_client_gather(const struct kvt_client_view *view, uint8_t *payload, uint64_t *ret_hash)
{
    struct client_copy copy;
    int r;

    view_assert(view, true);
    KVT_ASSERT(ret_hash == NULL ||
               (view->first_piece == 0 && view->end_piece == view->layout->pieces_count));
    if (view->layout->quant.kind != KVT_QUANT_NONE)
        return kvt_client_quant_gather(view, payload, ret_hash);
    copy.view = view;
    copy.payload = payload + view_offset_bytes(view);
    copy.is_gather = true;
    copy.is_hashed = ret_hash != NULL && view->layout->payload_bytes > KVT_COPY_CHUNK_BYTES;
    copy.run = NULL;
    copy.run_bytes = copy.done_bytes = copy.hashed_bytes = 0;
    if (copy.is_hashed)
        kvt_hash_stream_init(&copy.hash, 0);
    r = kvt_guard_run(copy_walk, &copy);
    if (r < 0)
        return kvt_trace(r);
    if (copy.is_hashed) {
        kvt_hash_stream_update(&copy.hash, copy.payload + copy.hashed_bytes,
                               copy.done_bytes - copy.hashed_bytes);
        *ret_hash = kvt_hash_stream_digest(&copy.hash);
    } else if (ret_hash != NULL) {
        *ret_hash = kvt_hash64(payload, view->layout->payload_bytes, 0);
    }
    return 0;
}

int kvt_client_scatter(const struct kvt_client_view *view, const uint8_t *payload)
{
    struct client_copy copy;
    int r;

    view_assert(view, false);
    if (view->layout->quant.kind != KVT_QUANT_NONE)
        return kvt_client_quant_scatter(view, payload);
    copy.view = view;
    /* Only read from: is_gather is false. */
    copy.payload = (uint8_t *)(uintptr_t)payload + view_offset_bytes(view);
    copy.is_gather = copy.is_hashed = false;
    copy.run = NULL;
    copy.run_bytes = copy.done_bytes = copy.hashed_bytes = 0;
    r = kvt_guard_run(copy_walk, &copy);
    return r < 0 ? kvt_trace(r) : 0;
}
