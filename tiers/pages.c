#include "tiers/pages.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "daemon/base/limits.h"

#define POPULATE_THREADS_MAX 8
#define POPULATE_SHARE_BYTES_MIN (64u << 20) /* a thread for less is not worth its start */

int kvt_pages_map(int fd, uint64_t bytes, bool want_thp, uint8_t **ret_base)
{
    uint64_t reserved_bytes = bytes + KVT_HUGE_PAGE_BYTES, head_bytes, tail_bytes;
    int flags = fd < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED;
    uint8_t *reserved, *base;

    reserved =
        mmap(NULL, reserved_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (reserved == MAP_FAILED)
        return kvt_trace(-errno);
    base = (uint8_t *)(uintptr_t)kvt_round_up((uintptr_t)reserved, KVT_HUGE_PAGE_BYTES);
    if (mmap(base, bytes, PROT_READ | PROT_WRITE, flags | MAP_FIXED, fd, 0) == MAP_FAILED) {
        int r = -errno;

        (void)munmap(reserved, reserved_bytes);
        return kvt_trace(r);
    }
    head_bytes = (uint64_t)(base - reserved);
    tail_bytes = reserved_bytes - head_bytes - bytes;
    if (head_bytes > 0)
        (void)munmap(reserved, head_bytes);
    if (tail_bytes > 0)
        (void)munmap(base + bytes, tail_bytes);
    (void)madvise(base, bytes, MADV_DONTDUMP);
    if (want_thp)
        (void)madvise(base, bytes, MADV_HUGEPAGE);
    *ret_base = base;
    return 0;
}

void kvt_pages_unmap(uint8_t *base, uint64_t bytes)
{
    if (base != NULL)
        KVT_ASSERT(munmap(base, bytes) == 0);
}

struct populate_share {
    pthread_t thread;
    uint8_t *base;
    uint64_t bytes;
    int result;
    bool is_started;
};

static void *populate_main(void *arg)
{
    struct populate_share *share = arg;

    do {
        share->result = madvise(share->base, share->bytes, MADV_POPULATE_WRITE) < 0 ? -errno : 0;
    } while (share->result == -EINTR || share->result == -EAGAIN);
    return NULL;
}

int kvt_pages_populate(uint8_t *base, uint64_t bytes)
{
    struct populate_share shares[POPULATE_THREADS_MAX] = {0};
    uint64_t cpus = (uint64_t)KVT_MAX(sysconf(_SC_NPROCESSORS_ONLN), 1l);
    uint64_t count = KVT_MIN(cpus, bytes / POPULATE_SHARE_BYTES_MIN), share_bytes;
    int r = 0;

    count = KVT_MAX(KVT_MIN(count, POPULATE_THREADS_MAX), 1u);
    share_bytes = kvt_round_up(kvt_div_up(bytes, count), KVT_HUGE_PAGE_BYTES);
    for (uint64_t i = 0, at = 0; i < count && at < bytes; i++, at += share_bytes) {
        shares[i].base = base + at;
        shares[i].bytes = KVT_MIN(share_bytes, bytes - at);
        /* The first share is this thread's, and so is that of a thread that cannot be had. */
        if (i > 0)
            shares[i].is_started =
                pthread_create(&shares[i].thread, NULL, populate_main, &shares[i]) == 0;
    }
    for (uint64_t i = 0; i < count; i++) {
        if (shares[i].is_started)
            KVT_ASSERT(pthread_join(shares[i].thread, NULL) == 0);
        else if (shares[i].bytes > 0)
            (void)populate_main(&shares[i]);
        if (r == 0)
            r = shares[i].result;
    }
    return r < 0 ? kvt_trace(r) : 0;
}

uint32_t kvt_pages_thp_pct(const uint8_t *base, uint64_t bytes)
{
    unsigned long long start, end, kib, total_kib = 0;
    bool is_ours = false;
    char line[512];
    FILE *smaps = fopen("/proc/self/smaps", "re");

    if (smaps == NULL)
        return 0;
    while (fgets(line, sizeof(line), smaps) != NULL) {
        if (sscanf(line, "%llx-%llx ", &start, &end) == 2) {
            /* Several, where parts of it have policies of their own. */
            is_ours = start < (uintptr_t)base + bytes && (uintptr_t)base < end;
        } else if (is_ours && (sscanf(line, "AnonHugePages: %llu kB", &kib) == 1 ||
                               sscanf(line, "ShmemPmdMapped: %llu kB", &kib) == 1)) {
            total_kib += kib;
        }
    }
    (void)fclose(smaps);
    /* A neighbour of the same kind may have been merged into the mapping. */
    return (uint32_t)KVT_MIN(total_kib * KVT_KIB * 100 / bytes, 100u);
}
