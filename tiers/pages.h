/* Big, aligned, pre-touched memory: what L2 and L1's host backend stand on.
 *
 * A range is reserved 2 MiB aligned (huge pages need it, and so does nothing else), the memory is
 * mapped into it, touched by several threads (the kernel's zeroing is what takes the time) and
 * asked how much of it is on huge pages. init-only. */
#pragma once

#include "daemon/base/def.h"

/* Maps @bytes of @fd (-1: anonymous memory) 2 MiB aligned, out of core dumps, not touched yet. A
 * hugetlb file answers -ENOMEM here when there are not enough pages. */
KVT_MUST_USE int kvt_pages_map(int fd, uint64_t bytes, bool want_thp, uint8_t **ret_base);
void kvt_pages_unmap(uint8_t *base, uint64_t bytes);
/* Touches every page for writing; -errno where the memory is not there (no SIGBUS). */
KVT_MUST_USE int kvt_pages_populate(uint8_t *base, uint64_t bytes);
/* How much of the mapped range lies on transparent huge pages. */
uint32_t kvt_pages_thp_pct(const uint8_t *base, uint64_t bytes);
