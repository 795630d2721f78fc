/* L2 near the devices that it serves: its memory in parts, each preferred on a NUMA node.
 *
 *   | part of node 1            | part of node 0            |      whole pages of `unit_bytes`
 *
 * The policy is the mapping's (of a memfd: the file's), so it must be set before a page is touched;
 * who touches it does not matter then. A preference, not a bond: memory that a full node cannot
 * give comes from another, and L2 has all its bytes. init-only. */
#pragma once

#include "daemon/base/def.h"
#include "daemon/base/limits.h"

#define KVT_HOST_PARTS_TEXT_BYTES 96u

struct kvt_host_part {
    uint64_t base_bytes, bytes;
    int node;
    int result; /* of placing it: 0, or -errno */
};

struct kvt_host_parts {
    uint32_t count; /* 0: nothing is placed */
    struct kvt_host_part parts[KVT_ZONES_MAX];
};

/* Shares whole units among the nodes; what remains of less than one is the last part's. Where there
 * are fewer units than nodes, the last nodes get none. */
void kvt_host_parts_cut(struct kvt_host_parts *ret_parts, uint64_t bytes, uint64_t unit_bytes,
                        const int nodes[], uint32_t nodes_count);
/* Sets each part's policy and result. */
void kvt_host_parts_place(struct kvt_host_parts *parts, uint8_t *base);
/* Of touched memory, for people: ", on NUMA nodes 0 (100 %), 1 (not placed: Operation not
 * permitted)"; "" when nothing was to be placed. */
void kvt_host_parts_describe(const struct kvt_host_parts *parts, uint8_t *base,
                             char ret_text[KVT_HOST_PARTS_TEXT_BYTES]);
