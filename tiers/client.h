/* Memory of an engine process, as the daemon sees it: regions that a session registered, and the
 * layout that says which pieces of them an engine's block id means.
 *
 * A region is mapped once (memfd) or is a buffer of one request (inline). A layout belongs to one
 * component of one session: an engine block b is, for each piece p, `bytes` bytes at
 * region + offset + b * stride. A block of the daemon is engine_blocks_per_block of those, and its
 * payload is laid out piece by piece, so that a group of layers is contiguous in a slot:
 *
 *   payload:  piece 0: [block 0][block 1]..  piece 1: [block 0][block 1]..  ...
 *
 * Where the component is quantised (kernels/kvt_kernels.h), each piece of an engine block is whole
 * planes, and a slot holds the codes and scales of that payload instead: what a gather writes and a
 * scatter reads. What comes back is what the codes stand for.
 *
 * The mapping is of another process's memory: it may be rewritten at any time, and holes may be
 * punched under it. Copies therefore run under kvt_guard_run (daemon/base/guard.h) and fail alone.
 *
 * Open and close: any thread, not the engine's (they map and unmap). A region is closed when no
 * transfer uses it any more: the engine counts. The rest is pure. */
#pragma once

#include "daemon/base/def.h"
#include "daemon/base/limits.h"
#include "kernels/kvt_kernels.h"

enum {
    KVT_REGION_E_NOT_SEALED = 1, /* F_SEAL_SHRINK and F_SEAL_GROW are required */
    KVT_REGION_E_TOO_SMALL = 2,  /* the file is smaller than declared */
    KVT_REGION_E_NOT_MEMFD = 3,  /* not a memfd: seals cannot be asked for */
    KVT_REGION_E_SPARSE = 4,     /* fewer bytes allocated than declared */
    KVT_REGION_E_READ_ONLY = 5,  /* opened or sealed so that it cannot be mapped for writing */
};
const char *kvt_region_error_text(int result);

#define KVT_GPU_NONE UINT32_MAX

struct kvt_region {
    uint8_t *base; /* on a GPU: a device address, which this process cannot read */
    uint64_t bytes;
    bool is_mapped;        /* false: memory that somebody else owns (inline, a GPU's) */
    uint64_t mapped_bytes; /* what close unmaps: whole huge pages of a hugetlb memfd */
    /* Memory of a GPU (tiers/device/device.h opens and closes it): the zone of L1 that it belongs
     * to, and that zone's incarnation when it was opened; in one of another it is gone. */
    bool is_gpu;
    uint32_t gpu_zone, incarnation;
    uint64_t allocation; /* device address that the handle opened */
};

/* Checks seals and size, maps @bytes of @memfd shared, does not keep the descriptor. -errno, or one
 * of the results above, or 0. */
KVT_MUST_USE int kvt_region_open(struct kvt_region *ret_region, int memfd, uint64_t bytes);
void kvt_region_close(struct kvt_region *region); /* idempotent */

struct kvt_layout_piece {
    uint32_t region_idx; /* of the session's regions */
    uint32_t bytes;
    uint64_t offset_bytes;
    uint64_t stride_bytes; /* from one engine block to the next */
    uint8_t *base;         /* region base + offset; set by kvt_layout_resolve */
};

struct kvt_layout {
    uint32_t pieces_count;
    uint32_t engine_blocks_per_block;
    uint64_t payload_bytes;          /* of one block of the daemon: set by kvt_layout_resolve */
    uint64_t stored_bytes;           /* what a slot holds of it: fewer, if it is quantised; set */
    struct kvt_quant_spec quant;     /* of the component; kind NONE: stored as it is */
    uint64_t engine_blocks_count;    /* block ids below this are inside every region: set too */
    struct kvt_layout_piece *pieces; /* the owner's memory */
    /* Set by kvt_layout_resolve: whether the pieces are a GPU's memory (all of one GPU), which only
     * the device tier copies. */
    bool is_gpu;
    uint32_t gpu_zone, incarnation;
};

enum {
    KVT_LAYOUT_E_EMPTY = 1,  /* no pieces, or no bytes */
    KVT_LAYOUT_E_REGION = 2, /* an index without a region */
    KVT_LAYOUT_E_BOUNDS = 3, /* not even engine block 0 lies inside, or arithmetic overflows */
    KVT_LAYOUT_E_PAYLOAD_BYTES = 4, /* the pieces do not add up to the namespace's bytes a block */
    KVT_LAYOUT_E_STRIDE = 5,        /* stride smaller than bytes: blocks would overlap */
    KVT_LAYOUT_E_MIXED = 6,         /* pieces on several GPUs, or on a GPU and in host memory */
    KVT_LAYOUT_E_PLANES = 7,        /* quantised, and a piece is not whole planes */
    KVT_LAYOUT_E_ODD = 8,           /* quantised, and the elements of a piece are not aligned */
    KVT_LAYOUT_E_LONG = 9,          /* quantised, and a payload is longer than a shard may be */
    KVT_LAYOUT_E_OVERLAP = 10,      /* two pieces of an engine block share bytes */
};
const char *kvt_layout_error_text(int result);

/* Checks everything with overflow-safe arithmetic and fills the derived fields. Changes nothing on
 * failure. */
KVT_MUST_USE int kvt_layout_resolve(struct kvt_layout *layout, const struct kvt_region *regions,
                                    uint32_t regions_count, uint64_t expected_payload_bytes);

/* Of a layout that was resolved: 0, or KVT_LAYOUT_E_OVERLAP: whatever is written last is what both
 * pieces hold. Looked for in engine block 0, by address: regions may lie in one allocation. Ids
 * that no engine has (a region with room behind its pool) may lead a piece into another's blocks:
 * that is no reason to refuse the pool. O(n log n). */
KVT_MUST_USE int kvt_layout_check_apart(const struct kvt_layout *layout);

/* A (block of the daemon) <-> (engine blocks) binding, the client side of one transfer. */
struct kvt_client_view {
    const struct kvt_layout *layout;
    /* engine_blocks_per_block ids, each < engine_blocks_count; towards the client also
     * KVT_ENGINE_BLOCK_NONE: that part of the payload is not written anywhere. */
    const uint64_t *engine_blocks;
    uint32_t first_piece, end_piece; /* [first, end): all of them, or one group of layers */
};

/* Bytes of the client's memory that a copy of the view reads or writes: those of its pieces, but
 * for what is not written. */
uint64_t kvt_client_view_bytes(const struct kvt_client_view *view);

/* Copies between a payload as it is stored (from its first byte) and the pieces of @view, under the
 * SIGBUS guard. 0, or -EFAULT when the client's memory vanished. gather hashes while it copies if
 * @ret_hash is not NULL (XXH3-64 of all stored bytes; only for a view of all pieces). Neither
 * allocates. Tier threads only. */
KVT_MUST_USE int kvt_client_gather(const struct kvt_client_view *view, uint8_t *payload,
                                   uint64_t *ret_hash);
KVT_MUST_USE int kvt_client_scatter(const struct kvt_client_view *view, const uint8_t *payload);
