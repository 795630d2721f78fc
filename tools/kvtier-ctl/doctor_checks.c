/* Judging memory and limits: pure functions of facts and pools. "bad" is what keeps the daemon from
 * starting or makes it lose data or speed by a multiple; "warn" is what costs something or may come
 * to matter; each says the number that was found and the command that changes it. */
#include <errno.h>
#include <stdarg.h>
#include <string.h>

#include "daemon/base/footprint.h"
#include "tools/kvtier-ctl/doctor.h"
#include "tools/lib/table.h"

#define NOFILE_MIN 1024u

void kvt_ctl_found(struct kvt_ctl_report *report, enum kvt_ctl_level level, const char *what,
                   const char *format, ...)
{
    struct kvt_ctl_finding *finding;
    va_list args;

    KVT_ASSERT(report->count < KVT_CTL_FINDINGS_MAX);
    finding = &report->findings[report->count++];
    *finding = (struct kvt_ctl_finding){.level = level, .what = what};
    va_start(args, format);
    (void)vsnprintf(finding->text, sizeof(finding->text), format, args);
    va_end(args);
}

void kvt_ctl_found_remedy(struct kvt_ctl_report *report, const char *format, ...)
{
    struct kvt_ctl_finding *finding;
    va_list args;

    KVT_ASSERT(report->count > 0);
    finding = &report->findings[report->count - 1];
    va_start(args, format);
    (void)vsnprintf(finding->remedy, sizeof(finding->remedy), format, args);
    va_end(args);
}

enum kvt_ctl_level kvt_ctl_report_worst(const struct kvt_ctl_report *report)
{
    enum kvt_ctl_level worst = KVT_CTL_LEVEL_OK;

    for (uint32_t i = 0; i < report->count; i++)
        worst = KVT_MAX(worst, report->findings[i].level);
    return worst;
}

static bool gives_thp_to_memfd(const struct kvt_ctl_facts *facts)
{
    return strcmp(facts->shmem_enabled, "always") == 0 ||
           strcmp(facts->shmem_enabled, "advise") == 0 ||
           strcmp(facts->shmem_enabled, "within_size") == 0 ||
           strcmp(facts->shmem_enabled, "force") == 0;
}

void kvt_ctl_check_hugepages(struct kvt_ctl_report *report, const struct kvt_ctl_facts *facts,
                             const struct kvt_ctl_pools *pools)
{
    uint64_t total = 0, free_bytes = 0, want = pools->l2_bytes;
    char a[KVT_TEXT_BYTES], b[KVT_TEXT_BYTES];
    /* A running daemon has taken its pages: what is free says nothing. */
    bool is_taken = facts->daemon_pid != 0 && pools->l2_detail[0] != '\0';

    if (facts->hugepages_total != KVT_CTL_UNKNOWN && facts->hugepage_bytes != KVT_CTL_UNKNOWN) {
        total = facts->hugepages_total * facts->hugepage_bytes;
        free_bytes = facts->hugepages_free * facts->hugepage_bytes;
    }
    /* "plain pages" may be followed by what would give huge ones. */
    if (is_taken && strstr(pools->l2_detail, "plain pages") == NULL &&
        (strstr(pools->l2_detail, "huge") != NULL || strstr(pools->l2_detail, "THP") != NULL)) {
        kvt_ctl_found(report, KVT_CTL_LEVEL_OK, "huge pages", "L2 has them: %s", pools->l2_detail);
        return;
    }
    if (!is_taken && want > 0 && free_bytes >= want) {
        kvt_ctl_found(report, KVT_CTL_LEVEL_OK, "huge pages", "%s of hugetlb pages are free",
                      kvt_text_bytes(a, free_bytes));
        return;
    }
    if (!is_taken && gives_thp_to_memfd(facts)) {
        kvt_ctl_found(report, KVT_CTL_LEVEL_OK, "huge pages",
                      "shared memory gets transparent ones (shmem_enabled is %s)",
                      facts->shmem_enabled);
        return;
    }
    kvt_ctl_found(report, KVT_CTL_LEVEL_WARN, "huge pages",
                  "%s; hugetlb: %s free of %s; THP for shared memory (shmem_enabled): %s",
                  is_taken ? pools->l2_detail : "L2 would be of 4 KiB pages",
                  kvt_text_bytes(a, free_bytes), kvt_text_bytes(b, total),
                  facts->shmem_enabled[0] != '\0' ? facts->shmem_enabled : "unknown");
    kvt_ctl_found_remedy(
        report,
        "without them L3 reads at about half the speed. Before the start of kvtierd: "
        "sysctl vm.nr_hugepages=%llu, or echo advise > "
        "/sys/kernel/mm/transparent_hugepage/shmem_enabled, or tiers.l2.pages: anonymous",
        (unsigned long long)kvt_div_up(want > 0 ? want : KVT_GIB, KVT_HUGE_PAGE_BYTES));
}

static const char *limit_text(char buf[KVT_TEXT_BYTES], uint64_t limit)
{
    if (limit == KVT_CTL_UNLIMITED)
        (void)snprintf(buf, KVT_TEXT_BYTES, "unlimited");
    else if (limit == KVT_CTL_UNKNOWN)
        (void)snprintf(buf, KVT_TEXT_BYTES, "unknown");
    else
        (void)kvt_text_bytes(buf, limit);
    return buf;
}

static void check_unit_memlock(struct kvt_ctl_report *report, const struct kvt_ctl_facts *facts)
{
    if (facts->unit_path[0] == '\0')
        return;
    if (strcmp(facts->unit_memlock, "infinity") == 0) {
        kvt_ctl_found(report, KVT_CTL_LEVEL_OK, "service memlock", "LimitMEMLOCK=infinity in %s",
                      facts->unit_path);
        return;
    }
    kvt_ctl_found(report, KVT_CTL_LEVEL_WARN, "service memlock", "LimitMEMLOCK is %s in %s",
                  facts->unit_memlock[0] != '\0' ? facts->unit_memlock : "not set",
                  facts->unit_path);
    kvt_ctl_found_remedy(report, "systemctl edit kvtierd, and write: [Service] "
                                 "LimitMEMLOCK=infinity");
}

void kvt_ctl_check_memlock(struct kvt_ctl_report *report, const struct kvt_ctl_facts *facts,
                           const struct kvt_ctl_pools *pools)
{
    const char *whose = facts->daemon_pid != 0 ? "the daemon's" : "this shell's";
    uint64_t want = pools->l2_bytes;
    char a[KVT_TEXT_BYTES], b[KVT_TEXT_BYTES];

    if (facts->is_memlock_exempt || facts->memlock_bytes == KVT_CTL_UNLIMITED) {
        kvt_ctl_found(report, KVT_CTL_LEVEL_OK, "locked memory", "%s limit: %s", whose,
                      facts->is_memlock_exempt ? "none (CAP_IPC_LOCK)" : "unlimited");
    } else if (facts->memlock_bytes != KVT_CTL_UNKNOWN && want > 0 &&
               facts->memlock_bytes >= want + want / 8) {
        kvt_ctl_found(report, KVT_CTL_LEVEL_OK, "locked memory", "%s limit is %s, L2 needs %s",
                      whose, limit_text(a, facts->memlock_bytes), kvt_text_bytes(b, want));
    } else {
        kvt_ctl_found(report, KVT_CTL_LEVEL_WARN, "locked memory",
                      "%s limit (RLIMIT_MEMLOCK) is %s, L2 is %s", whose,
                      limit_text(a, facts->memlock_bytes),
                      want > 0 ? kvt_text_bytes(b, want) : "of unknown size");
        kvt_ctl_found_remedy(report,
                             "L2 may be swapped out and L3 cannot register its buffers (slower). "
                             "Run it with LimitMEMLOCK=infinity, or ulimit -l unlimited");
    }
    check_unit_memlock(report, facts);
}

void kvt_ctl_check_io_uring(struct kvt_ctl_report *report, const struct kvt_ctl_facts *facts)
{
    bool has_sysctl = facts->io_uring_disabled != KVT_CTL_UNKNOWN;
    unsigned long long sysctl = facts->io_uring_disabled;

    if (facts->io_uring_error == 0 && (!has_sysctl || sysctl == 0)) {
        kvt_ctl_found(report, KVT_CTL_LEVEL_OK, "io_uring", "allowed");
        return;
    }
    if (has_sysctl && sysctl != 0) {
        /* 1: only for CAP_SYS_ADMIN and members of kernel.io_uring_group; 2: for nobody. */
        kvt_ctl_found(report, sysctl == 1 ? KVT_CTL_LEVEL_WARN : KVT_CTL_LEVEL_BAD, "io_uring",
                      "forbidden by kernel.io_uring_disabled = %llu%s", sysctl,
                      sysctl == 1 ? " (but for a privileged group)" : "");
        kvt_ctl_found_remedy(report, "L3 does not work without it: sysctl "
                                     "kernel.io_uring_disabled=0 (and in /etc/sysctl.d/), or, with "
                                     "1, put the daemon's group into kernel.io_uring_group");
        return;
    }
    kvt_ctl_found(report, KVT_CTL_LEVEL_BAD, "io_uring", "io_uring_setup fails here: %s",
                  strerror(facts->io_uring_error));
    kvt_ctl_found_remedy(
        report, facts->io_uring_error == ENOSYS
                    ? "this kernel (or a seccomp filter) has no io_uring: L3 does not work. Use a "
                      "newer kernel, or allow the three io_uring_* calls in the filter"
                    : "a seccomp filter forbids it: L3 does not work. In a container allow "
                      "io_uring_setup, io_uring_enter and io_uring_register in its seccomp "
                      "profile; in a unit remove it from SystemCallFilter=");
}

/* Of the machine's memory. */
static uint64_t l1_bytes(const struct kvt_ctl_facts *facts, const struct kvt_ctl_pools *pools)
{
    uint64_t bytes = pools->l1_bytes + pools->gpu_staging_bytes * facts->gpu.gpus_count;

    if (facts->memory_bytes != KVT_CTL_UNKNOWN)
        bytes += facts->memory_bytes / 100000 * pools->l1_milli_pct;
    return bytes;
}

void kvt_ctl_check_memory(struct kvt_ctl_report *report, const struct kvt_ctl_facts *facts,
                          const struct kvt_ctl_pools *pools)
{
    uint64_t want =
        l1_bytes(facts, pools) + pools->l2_bytes + pools->index_bytes + KVT_OWN_MEMORY_BYTES;
    char a[KVT_TEXT_BYTES], b[KVT_TEXT_BYTES];

    if (pools->source == NULL) {
        kvt_ctl_found(report, KVT_CTL_LEVEL_WARN, "memory",
                      "the pools' sizes are not known here, so limits cannot be compared");
        kvt_ctl_found_remedy(report, "give --config FILE, or start the daemon");
        return;
    }
    (void)kvt_text_bytes(a, want);
    if (facts->cgroup_limit_bytes < want) {
        kvt_ctl_found(report, KVT_CTL_LEVEL_BAD, "memory limit",
                      "cgroup %s (v%u) allows %s; L1, L2, index and the daemon itself take %s",
                      facts->cgroup_path, facts->cgroup_version,
                      kvt_text_bytes(b, facts->cgroup_limit_bytes), a);
        kvt_ctl_found_remedy(report, "the kernel will kill it: raise the limit (MemoryMax=, or the "
                                     "pod's memory limit) or make the pools smaller");
    } else {
        kvt_ctl_found(report, KVT_CTL_LEVEL_OK, "memory limit", "%s for the pools of %s (%s)",
                      facts->cgroup_limit_bytes == KVT_CTL_UNLIMITED
                          ? "no cgroup limit"
                          : kvt_text_bytes(b, facts->cgroup_limit_bytes),
                      a, pools->source);
    }
    if (facts->memory_bytes == KVT_CTL_UNKNOWN)
        return;
    (void)kvt_text_bytes(b, facts->memory_bytes);
    if (want > facts->memory_bytes) {
        kvt_ctl_found(report, KVT_CTL_LEVEL_BAD, "memory", "the machine has %s, the pools take %s",
                      b, a);
        kvt_ctl_found_remedy(report, "make the pools smaller than the memory");
    } else if (want > facts->memory_bytes / 10 * 9) {
        kvt_ctl_found(report, KVT_CTL_LEVEL_WARN, "memory",
                      "the pools take %s of the machine's %s: little is left for the engines", a,
                      b);
        kvt_ctl_found_remedy(report, "leave a tenth of the memory and what the engines need");
    } else {
        kvt_ctl_found(report, KVT_CTL_LEVEL_OK, "memory", "%s of the machine's %s", a, b);
    }
}

void kvt_ctl_check_nofile(struct kvt_ctl_report *report, const struct kvt_ctl_facts *facts)
{
    if (facts->nofile == KVT_CTL_UNKNOWN)
        return;
    if (facts->nofile >= NOFILE_MIN) {
        kvt_ctl_found(report, KVT_CTL_LEVEL_OK, "open files", "the limit is %s%.0llu",
                      facts->nofile == KVT_CTL_UNLIMITED ? "unlimited" : "",
                      facts->nofile == KVT_CTL_UNLIMITED ? 0ull
                                                         : (unsigned long long)facts->nofile);
        return;
    }
    kvt_ctl_found(report, KVT_CTL_LEVEL_BAD, "open files",
                  "the limit (RLIMIT_NOFILE) is %llu; %u connections and their regions need %u",
                  (unsigned long long)facts->nofile, KVT_CONNECTIONS_MAX, NOFILE_MIN);
    kvt_ctl_found_remedy(report, "LimitNOFILE=65536 in the unit, or ulimit -n 65536");
}

void kvt_ctl_check_stats(struct kvt_ctl_report *report, const struct kvt_ans_stats *stats)
{
    char a[KVT_TEXT_BYTES], b[KVT_TEXT_BYTES];

    for (uint32_t i = 0; i < stats->tiers_count; i++) {
        const struct kvt_api_tier_stats *tier = &stats->tiers[i];
        int detail_bytes = (int)KVT_MIN(tier->detail.bytes, 160u);

        if (tier->health == 1) {
            kvt_ctl_found(report, KVT_CTL_LEVEL_BAD, "tier", "L%u is out of service: %.*s",
                          tier->tier, detail_bytes, tier->detail.bytes > 0 ? tier->detail.at : "");
            kvt_ctl_found_remedy(report, "the kernel's log (dmesg) and smartctl say what is wrong "
                                         "with its device; it is tried again by itself");
        } else if (tier->errors > 0) {
            kvt_ctl_found(report, KVT_CTL_LEVEL_WARN, "tier", "L%u had %s errors since the start",
                          tier->tier, kvt_text_count(a, tier->errors));
            kvt_ctl_found_remedy(report, "by kind: kvtier-ctl stats; each was a miss, never wrong "
                                         "bytes");
        }
    }
    if (stats->index_memory_bytes > 0 &&
        stats->index_used_bytes > stats->index_memory_bytes / 100 * 95) {
        kvt_ctl_found(report, KVT_CTL_LEVEL_WARN, "index", "%s of %s are used",
                      kvt_text_bytes(a, stats->index_used_bytes),
                      kvt_text_bytes(b, stats->index_memory_bytes));
        kvt_ctl_found_remedy(report, "blocks are evicted for room in the index, not in the tiers: "
                                     "raise index.memory");
    }
}
