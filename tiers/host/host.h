/* L2: one memfd, 2 MiB aligned, on huge pages where the system gives them (hugetlb, then shmem THP,
 * then plain pages; `detail` of the tier says which was got), pre-touched, locked when the limit
 * allows, kept out of core dumps. One thread copies between it and engines' memory.
 *
 * ANONYMOUS is the same memory without a memfd: many systems give transparent huge pages to it and
 * not to shared memory, but nobody can be handed it, so it ends with the process.
 *
 * With NUMA nodes it is as many parts as there are nodes, of the same size but for a huge page,
 * each preferred on its node before it is touched; several parts are zones of the tier. They fail
 * as one: the counters of a zone are the tier's. Where a node is full, or placing is not allowed,
 * the memory is what the system gave, and `detail` says so.
 *
 * open/close: init-only (main thread). memory: any thread, fixed until close. The engine decides
 * who owns which slot (tiers/slab.h) and writes slot headers itself; this tier moves payload. */
#pragma once

#include "tiers/tier.h"

enum kvt_host_pages {
    KVT_HOST_PAGES_AUTO,
    KVT_HOST_PAGES_HUGETLB,
    KVT_HOST_PAGES_THP,
    KVT_HOST_PAGES_ANONYMOUS, /* on transparent huge pages, never of AUTO */
    KVT_HOST_PAGES_PLAIN
};

struct kvt_host_config {
    uint64_t bytes;
    enum kvt_host_pages pages; /* AUTO: hugetlb, thp, plain; another one is that or -errno */
    bool is_locked_required;   /* false: mlock failure is noted in `detail`, not an error */
    uint32_t inflight_max;
    struct kvt_doorbell *doorbell; /* of the engine */
    uint32_t numa_nodes_count;     /* 0: wherever the system likes */
    int numa_nodes[KVT_ZONES_MAX];
};

/* -ENOMEM when the memory is not there (also: more than the cgroup allows), -ENOTSUP when THP or
 * ANONYMOUS did not get huge pages, another -errno, or 0. */
KVT_MUST_USE int kvt_host_open(struct kvt_tier **ret_tier, const struct kvt_host_config *config);
uint8_t *kvt_host_memory(const struct kvt_tier *tier); /* capacity_bytes of it */
int kvt_host_memfd(const struct kvt_tier *tier);       /* -1: the memory is anonymous */
