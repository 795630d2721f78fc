#include "tiers/host/parts.h"

#include <linux/mempolicy.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define MASK_WORD_BITS (8u * sizeof(unsigned long))
#define SAMPLES 32u /* pages of a part that are asked where they lie */

void kvt_host_parts_cut(struct kvt_host_parts *ret_parts, uint64_t bytes, uint64_t unit_bytes,
                        const int nodes[], uint32_t nodes_count)
{
    uint64_t units = bytes / unit_bytes;
    uint32_t count = (uint32_t)KVT_MIN(units, nodes_count);

    KVT_ASSERT(nodes_count <= KVT_ZONES_MAX);
    *ret_parts = (struct kvt_host_parts){.count = count};
    for (uint32_t i = 0; i < count; i++) {
        uint64_t base_bytes = units * i / count * unit_bytes;
        uint64_t end_bytes = i + 1 == count ? bytes : units * (i + 1) / count * unit_bytes;

        ret_parts->parts[i] = (struct kvt_host_part){
            .base_bytes = base_bytes, .bytes = end_bytes - base_bytes, .node = nodes[i]};
    }
}

void kvt_host_parts_place(struct kvt_host_parts *parts, uint8_t *base)
{
    for (uint32_t i = 0; i < parts->count; i++) {
        unsigned long mask[KVT_NUMA_NODES_MAX / MASK_WORD_BITS] = {0};
        struct kvt_host_part *part = &parts->parts[i];
        uint32_t node = (uint32_t)part->node;

        if (part->node < 0 || part->node >= KVT_NUMA_NODES_MAX) {
            part->result = -EINVAL;
            continue;
        }
        mask[node / MASK_WORD_BITS] = 1ul << node % MASK_WORD_BITS;
        /* The kernel takes one bit less than it is told of. */
        part->result = syscall(SYS_mbind, base + part->base_bytes, part->bytes, MPOL_PREFERRED,
                               mask, KVT_NUMA_NODES_MAX + 1ul, 0ul) < 0
                           ? -errno
                           : 0;
    }
}

/* How many of some pages of the part lie on its node. */
static uint32_t placed_pct(const struct kvt_host_part *part, uint8_t *base)
{
    uint32_t placed = 0;

    for (uint32_t i = 0; i < SAMPLES; i++) {
        uint64_t at_bytes = kvt_round_down(part->bytes / SAMPLES * i, KVT_DIO_ALIGN_BYTES);
        int node = -1;

        if (syscall(SYS_get_mempolicy, &node, NULL, 0ul, base + part->base_bytes + at_bytes,
                    (unsigned long)(MPOL_F_NODE | MPOL_F_ADDR)) == 0)
            placed += node == part->node;
    }
    return placed * 100 / SAMPLES;
}

void kvt_host_parts_describe(const struct kvt_host_parts *parts, uint8_t *base,
                             char ret_text[KVT_HOST_PARTS_TEXT_BYTES])
{
    size_t at = 0;

    ret_text[0] = '\0';
    for (uint32_t i = 0; i < parts->count && at + 1 < KVT_HOST_PARTS_TEXT_BYTES; i++) {
        const struct kvt_host_part *part = &parts->parts[i];
        const char *before = i > 0              ? ", "
                             : parts->count > 1 ? ", on NUMA nodes "
                                                : ", on NUMA node ";
        size_t room = KVT_HOST_PARTS_TEXT_BYTES - at;
        int length;

        if (part->result < 0)
            length = snprintf(ret_text + at, room, "%s%d (not placed: %s)", before, part->node,
                              strerrordesc_np(-part->result));
        else
            length = snprintf(ret_text + at, room, "%s%d (%u %%)", before, part->node,
                              placed_pct(part, base));
        at += KVT_MIN((size_t)length, room - 1);
    }
}
