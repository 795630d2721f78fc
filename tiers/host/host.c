/* L2: the memory and the thread that copies between it and engines.
 *
 * A memfd is sealed against resizing, so nobody who gets it can take pages away. Which kind of
 * pages was got is found out by asking the kernel after touching, not by what was asked for. */
#include "tiers/host/host.h"

#include <fcntl.h>
#include <linux/memfd.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include "daemon/base/alloc.h"
#include "daemon/base/guard.h"
#include "tiers/host/parts.h"
#include "tiers/pages.h"
#include "tiers/worker.h"

#define THP_SHARE_MIN_PCT 90u
#define MEMORY_TEXT_BYTES 104u
#define LOCK_TEXT_BYTES 80u

struct host {
    struct kvt_worker worker; /* first */
    uint8_t *base;
    uint64_t bytes;
    int memfd; /* -1: anonymous */
    struct kvt_host_parts parts;
};

static struct host *host_of(const struct kvt_tier *tier)
{
    return KVT_CONTAINER_OF(tier, struct host, worker.tier);
}

uint8_t *kvt_host_memory(const struct kvt_tier *tier)
{
    return host_of(tier)->base;
}

int kvt_host_memfd(const struct kvt_tier *tier)
{
    return host_of(tier)->memfd;
}

static void memory_undo(struct host *host)
{
    kvt_pages_unmap(host->base, host->bytes);
    host->base = NULL;
    if (host->memfd >= 0)
        (void)close(host->memfd);
    host->memfd = -1;
}

/* Maps and touches what host->memfd stands for. On failure nothing is left. */
static int memory_map(struct host *host, bool want_thp)
{
    int r = kvt_pages_map(host->memfd, host->bytes, want_thp, &host->base);

    if (r == 0) {
        kvt_host_parts_place(&host->parts, host->base);
        r = kvt_pages_populate(host->base, host->bytes);
    }
    if (r < 0)
        memory_undo(host);
    return r == -EFAULT || r == -ENOSPC ? -ENOMEM : r;
}

/* A sealed memfd of @flags' kind, mapped and touched. On failure nothing is left. */
static int memory_make(struct host *host, unsigned int flags, bool want_thp)
{
    int r;

    host->memfd = memfd_create("kvtierd-l2", MFD_CLOEXEC | MFD_ALLOW_SEALING | flags);
    if (host->memfd < 0)
        return -errno;
    if (ftruncate(host->memfd, (off_t)host->bytes) == 0 &&
        fcntl(host->memfd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) == 0)
        return memory_map(host, want_thp);
    r = -errno;
    memory_undo(host);
    return r == -ENOSPC ? -ENOMEM : r;
}

/* What the memory is, for people; what gives huge pages where they were only hoped for. */
static void memory_describe(const struct host *host, bool is_hoped, uint32_t thp_pct,
                            char ret_text[MEMORY_TEXT_BYTES])
{
    const char *what = host->memfd < 0 ? "anonymous" : "memfd";

    if (thp_pct > 0)
        snprintf(ret_text, MEMORY_TEXT_BYTES, "%s, transparent huge pages (%u %%)", what, thp_pct);
    else
        snprintf(ret_text, MEMORY_TEXT_BYTES, "%s, plain pages%s", what,
                 is_hoped ? " (huge ones: vm.nr_hugepages, shmem_enabled or pages: anonymous)"
                          : "");
}

/* Tries the kinds of pages in order; @ret_text is what was got. */
static int memory_open(struct host *host, enum kvt_host_pages wanted,
                       char ret_text[MEMORY_TEXT_BYTES])
{
    bool is_plain_wanted = wanted == KVT_HOST_PAGES_PLAIN;
    bool is_huge_wanted = wanted == KVT_HOST_PAGES_THP || wanted == KVT_HOST_PAGES_ANONYMOUS;
    uint32_t thp_pct;
    int r;

    if (wanted == KVT_HOST_PAGES_AUTO || wanted == KVT_HOST_PAGES_HUGETLB) {
        r = host->bytes % KVT_HUGE_PAGE_BYTES != 0
                ? -EINVAL
                : memory_make(host, MFD_HUGETLB | MFD_HUGE_2MB, false);
        snprintf(ret_text, MEMORY_TEXT_BYTES, "memfd, 2 MiB hugetlb pages");
        if (r == 0 || wanted == KVT_HOST_PAGES_HUGETLB)
            return r;
    }
    r = wanted == KVT_HOST_PAGES_ANONYMOUS ? memory_map(host, true)
                                           : memory_make(host, 0, !is_plain_wanted);
    if (r < 0)
        return r;
    thp_pct = is_plain_wanted ? 0 : kvt_pages_thp_pct(host->base, host->bytes);
    if (is_huge_wanted && thp_pct < THP_SHARE_MIN_PCT) {
        memory_undo(host);
        return -ENOTSUP;
    }
    memory_describe(host, wanted == KVT_HOST_PAGES_AUTO, thp_pct, ret_text);
    return 0;
}

static void memory_lock(struct host *host, char ret_lock[LOCK_TEXT_BYTES], int *ret_result)
{
    struct rlimit limit = {0};

    *ret_result = mlock(host->base, host->bytes) < 0 ? -errno : 0;
    if (*ret_result == 0) {
        snprintf(ret_lock, LOCK_TEXT_BYTES, "locked");
        return;
    }
    (void)getrlimit(RLIMIT_MEMLOCK, &limit);
    snprintf(ret_lock, LOCK_TEXT_BYTES, "not locked: %s (RLIMIT_MEMLOCK is %llu KiB)",
             strerrordesc_np(-*ret_result), (unsigned long long)(limit.rlim_cur / KVT_KIB));
}

static uint8_t *host_slot(const struct host *host, const struct kvt_xfer *xfer,
                          const struct kvt_place *place)
{
    KVT_ASSERT(place->offset_bytes <= host->bytes);
    KVT_ASSERT(xfer->header_bytes + xfer->key.payload_bytes <= host->bytes - place->offset_bytes);
    return host->base + place->offset_bytes;
}

static void host_store(struct host *host, struct kvt_xfer *xfer)
{
    struct kvt_tier_counters *counters = &host->worker.tier.counters;
    uint8_t *slot = host_slot(host, xfer, &xfer->dst);
    uint64_t hash;

    KVT_ASSERT(xfer->src.view.layout->stored_bytes == xfer->key.payload_bytes);
    if (kvt_client_gather(&xfer->src.view, slot + xfer->header_bytes, &hash) < 0) {
        xfer->status = KVT_XFER_CLIENT_GONE;
        return;
    }
    kvt_slot_header_seal(slot, hash);
    KVT_DEBUG_ASSERT(kvt_slot_header_check(slot, &xfer->key) == KVT_SLOT_OK);
    kvt_worker_count(&counters->writes, 1);
    kvt_worker_count(&counters->written_bytes, xfer->key.payload_bytes);
    xfer->status = KVT_XFER_DONE;
}

static void host_load(struct host *host, struct kvt_xfer *xfer)
{
    struct kvt_tier_counters *counters = &host->worker.tier.counters;
    const uint8_t *slot = host_slot(host, xfer, &xfer->src);

    KVT_ASSERT(xfer->dst.view.layout->stored_bytes == xfer->key.payload_bytes);
    if (xfer->flags & KVT_XFER_VERIFY) {
        xfer->verdict = kvt_slot_check(slot, &xfer->key);
        if (xfer->verdict != KVT_SLOT_OK) {
            xfer->status = KVT_XFER_BAD_SLOT;
            return;
        }
    }
    if (kvt_client_scatter(&xfer->dst.view, slot + xfer->header_bytes) < 0) {
        xfer->status = KVT_XFER_CLIENT_GONE;
        return;
    }
    kvt_worker_count(&counters->reads, 1);
    kvt_worker_count(&counters->read_bytes, kvt_client_view_bytes(&xfer->dst.view));
    xfer->status = KVT_XFER_DONE;
}

static void host_execute(struct kvt_worker *worker, struct kvt_xfer *xfer)
{
    struct host *host = host_of(&worker->tier);

    if (xfer->src.kind == KVT_PLACE_CLIENT && xfer->dst.kind == KVT_PLACE_HOST) {
        host_store(host, xfer);
    } else {
        KVT_ASSERT(xfer->src.kind == KVT_PLACE_HOST && xfer->dst.kind == KVT_PLACE_CLIENT);
        host_load(host, xfer);
    }
}

static void host_close(struct kvt_tier *tier)
{
    struct host *host = host_of(tier);

    kvt_worker_stop(&host->worker);
    kvt_worker_deinit(&host->worker);
    memory_undo(host);
    kvt_free(host);
}

/* What the tier says of itself; several parts are zones. */
static void host_describe(struct host *host, const char *memory, const char *lock)
{
    struct kvt_tier *tier = &host->worker.tier;
    char placed[KVT_HOST_PARTS_TEXT_BYTES];

    kvt_host_parts_describe(&host->parts, host->base, placed);
    tier->capacity_bytes = host->bytes;
    snprintf(tier->detail, sizeof(tier->detail), "%s, %s%s", memory, lock, placed);
    if (host->parts.count < 2)
        return;
    for (uint32_t i = 0; i < host->parts.count; i++) {
        const struct kvt_host_part *part = &host->parts.parts[i];
        struct kvt_tier_zone *zone = &tier->zones[i];

        *zone = (struct kvt_tier_zone){.base_bytes = part->base_bytes,
                                       .bytes = part->bytes,
                                       .counters = &tier->counters,
                                       .numa_node = part->result == 0 ? part->node : -1};
        snprintf(zone->name, sizeof(zone->name), "node %d", part->node);
    }
    tier->zones_count = host->parts.count;
}

static const struct kvt_tier_ops host_ops = {
    .name = "host", .submit = kvt_worker_submit, .reap = kvt_worker_reap, .close = host_close};

int kvt_host_open(struct kvt_tier **ret_tier, const struct kvt_host_config *config)
{
    uint64_t page_bytes =
        config->bytes >= KVT_HUGE_PAGE_BYTES ? KVT_HUGE_PAGE_BYTES : KVT_DIO_ALIGN_BYTES;
    char memory[MEMORY_TEXT_BYTES], lock[LOCK_TEXT_BYTES];
    struct host *host;
    int r, lock_result;

    if (config->bytes < KVT_DIO_ALIGN_BYTES || config->inflight_max == 0 ||
        config->numa_nodes_count > KVT_ZONES_MAX)
        return kvt_trace(-EINVAL);
    r = kvt_guard_install();
    if (r < 0)
        return kvt_trace(r);
    host = kvt_alloc_aligned(KVT_CACHE_LINE_BYTES, sizeof(*host));
    if (host == NULL)
        return kvt_trace(-ENOMEM);
    host->memfd = -1;
    host->bytes = kvt_round_down(config->bytes, page_bytes);
    kvt_host_parts_cut(&host->parts, host->bytes, page_bytes, config->numa_nodes,
                       config->numa_nodes_count);
    host->worker.execute = host_execute;
    r = kvt_worker_init(&host->worker, &host_ops, config->inflight_max, config->doorbell);
    if (r < 0)
        goto undo_alloc;
    r = memory_open(host, config->pages, memory);
    if (r < 0)
        goto undo_worker;
    memory_lock(host, lock, &lock_result);
    if (lock_result < 0 && config->is_locked_required) {
        r = lock_result;
        goto undo_memory;
    }
    host_describe(host, memory, lock);
    r = kvt_worker_start(&host->worker, "kvt-host", kvt_worker_loop_each);
    if (r < 0)
        goto undo_memory;
    *ret_tier = &host->worker.tier;
    return 0;
undo_memory:
    memory_undo(host);
undo_worker:
    kvt_worker_deinit(&host->worker);
undo_alloc:
    kvt_free(host);
    return kvt_trace(r);
}
