/* The doctor: facts read from a made-up /proc and /sys, and what it makes of them. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "daemon/base/footprint.h"
#include "tools/kvtier-ctl/doctor.h"

#define ROOM 1024u

static void put(const char *root, const char *path, const char *text)
{
    char full[ROOM];
    FILE *file;

    (void)snprintf(full, sizeof(full), "%s%s", root, path);
    for (char *slash = strchr(full + 1, '/'); slash != NULL; slash = strchr(slash + 1, '/')) {
        *slash = '\0';
        (void)mkdir(full, 0700);
        *slash = '/';
    }
    file = fopen(full, "w");
    assert_non_null(file);
    (void)fputs(text, file);
    (void)fclose(file);
}

static void forget(const char *root)
{
    char command[ROOM];
    FILE *pipe;

    (void)snprintf(command, sizeof(command), "rm -rf %s", root);
    pipe = popen(command, "r");
    assert_non_null(pipe);
    assert_int_equal(pclose(pipe), 0);
}

static void test_gather(void **state)
{
    char root[] = "/tmp/kvt-doctor-XXXXXX";
    struct kvt_ctl_facts facts;

    (void)state;
    assert_non_null(mkdtemp(root));
    put(root, "/proc/meminfo",
        "MemTotal:        1024 kB\nHugePages_Total:      10\nHugePages_Free:        4\n"
        "Hugepagesize:       2048 kB\n");
    put(root, "/proc/42/limits",
        "Limit                     Soft Limit           Hard Limit           Units     \n"
        "Max open files            20000                20000                files     \n"
        "Max locked memory         unlimited            unlimited            bytes     \n");
    put(root, "/proc/42/status", "Name:\tx\nCapEff:\t0000000000004000\n");
    put(root, "/proc/42/cgroup", "0::/a/b\n");
    put(root, "/sys/fs/cgroup/a/memory.max", "5000\n");
    put(root, "/sys/fs/cgroup/a/b/memory.max", "max\n");
    put(root, "/sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n");
    put(root, "/sys/kernel/mm/transparent_hugepage/shmem_enabled", "always within_size [never]\n");
    put(root, "/proc/sys/kernel/io_uring_disabled", "2\n");
    put(root, "/lib/systemd/system/kvtierd.service", "[Service]\nLimitMEMLOCK=64M\n");
    put(root, "/etc/systemd/system/kvtierd.service.d/z.conf", "[Service]\nLimitMEMLOCK=infinity\n");
    kvt_ctl_facts_gather(&facts, root, 42);
    forget(root);
    assert_int_equal(facts.memory_bytes, KVT_MIB);
    assert_int_equal(facts.hugepages_total, 10);
    assert_int_equal(facts.hugepages_free, 4);
    assert_int_equal(facts.hugepage_bytes, 2 * KVT_MIB);
    assert_string_equal(facts.thp_enabled, "madvise");
    assert_string_equal(facts.shmem_enabled, "never");
    assert_int_equal(facts.nofile, 20000);
    assert_true(facts.memlock_bytes == KVT_CTL_UNLIMITED);
    assert_true(facts.is_memlock_exempt);
    assert_int_equal(facts.cgroup_version, 2);
    assert_int_equal(facts.cgroup_limit_bytes, 5000);
    assert_string_equal(facts.cgroup_path, "/a");
    assert_int_equal(facts.io_uring_disabled, 2);
    assert_string_equal(facts.unit_memlock, "infinity");
}

static void test_gather_v1_and_nothing(void **state)
{
    char root[] = "/tmp/kvt-doctor-XXXXXX";
    struct kvt_ctl_facts facts;

    (void)state;
    assert_non_null(mkdtemp(root));
    put(root, "/proc/self/cgroup", "5:cpu,cpuacct:/x\n4:memory:/pod\n");
    put(root, "/sys/fs/cgroup/memory/pod/memory.limit_in_bytes", "777\n");
    put(root, "/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
    kvt_ctl_facts_gather(&facts, root, 0);
    forget(root);
    assert_int_equal(facts.cgroup_version, 1);
    assert_int_equal(facts.cgroup_limit_bytes, 777);
    kvt_ctl_facts_gather(&facts, "/nonexistent", 0);
    assert_true(facts.memory_bytes == KVT_CTL_UNKNOWN && facts.nofile == KVT_CTL_UNKNOWN);
    assert_true(facts.cgroup_limit_bytes == KVT_CTL_UNLIMITED && facts.cgroup_version == 0);
}

/* A machine where everything is right. */
static struct kvt_ctl_facts good_facts(void)
{
    return (struct kvt_ctl_facts){.memory_bytes = 64 * KVT_GIB,
                                  .hugepages_total = 4096,
                                  .hugepages_free = 4096,
                                  .hugepage_bytes = 2 * KVT_MIB,
                                  .memlock_bytes = KVT_CTL_UNLIMITED,
                                  .nofile = 65536,
                                  .io_uring_disabled = 0,
                                  .cgroup_limit_bytes = KVT_CTL_UNLIMITED};
}

static struct kvt_ctl_pools pools_of(uint64_t l2_bytes)
{
    return (struct kvt_ctl_pools){
        .source = "configuration", .l2_bytes = l2_bytes, .index_bytes = 128 * KVT_MIB};
}

static enum kvt_ctl_level judge(const struct kvt_ctl_facts *facts,
                                const struct kvt_ctl_pools *pools, const char *says)
{
    struct kvt_ctl_report report = {0};
    bool is_said = says == NULL;

    kvt_ctl_check_hugepages(&report, facts, pools);
    kvt_ctl_check_memlock(&report, facts, pools);
    kvt_ctl_check_io_uring(&report, facts);
    kvt_ctl_check_memory(&report, facts, pools);
    kvt_ctl_check_nofile(&report, facts);
    for (uint32_t i = 0; i < report.count; i++) {
        const struct kvt_ctl_finding *finding = &report.findings[i];

        is_said =
            is_said || strstr(finding->text, says) != NULL || strstr(finding->remedy, says) != NULL;
        /* Whatever is not right has a remedy. */
        assert_true(finding->level == KVT_CTL_LEVEL_OK || finding->remedy[0] != '\0');
    }
    if (!is_said)
        fail_msg("nobody said '%s'", says);
    return kvt_ctl_report_worst(&report);
}

static void test_judgement(void **state)
{
    struct kvt_ctl_pools pools = pools_of(4 * KVT_GIB);
    struct kvt_ctl_facts facts = good_facts();

    (void)state;
    assert_int_equal(judge(&facts, &pools, NULL), KVT_CTL_LEVEL_OK);
    facts.hugepages_free = 10;
    assert_int_equal(judge(&facts, &pools, "vm.nr_hugepages=2048"), KVT_CTL_LEVEL_WARN);
    (void)snprintf(facts.shmem_enabled, sizeof(facts.shmem_enabled), "advise");
    assert_int_equal(judge(&facts, &pools, "shmem_enabled is advise"), KVT_CTL_LEVEL_OK);
    facts.memlock_bytes = 8 * KVT_MIB;
    assert_int_equal(judge(&facts, &pools, "8.0 MiB, L2 is 4.0 GiB"), KVT_CTL_LEVEL_WARN);
    facts.is_memlock_exempt = true;
    (void)snprintf(facts.unit_path, sizeof(facts.unit_path), "/u");
    assert_int_equal(judge(&facts, &pools, "LimitMEMLOCK is not set in /u"), KVT_CTL_LEVEL_WARN);
    facts = good_facts();
    facts.io_uring_disabled = 2;
    assert_int_equal(judge(&facts, &pools, "kernel.io_uring_disabled = 2"), KVT_CTL_LEVEL_BAD);
    facts.io_uring_disabled = KVT_CTL_UNKNOWN;
    facts.io_uring_error = EPERM;
    assert_int_equal(judge(&facts, &pools, "seccomp"), KVT_CTL_LEVEL_BAD);
    facts = good_facts();
    facts.cgroup_limit_bytes = 4 * KVT_GIB;
    facts.cgroup_version = 2;
    assert_int_equal(judge(&facts, &pools, "(v2) allows 4.0 GiB"), KVT_CTL_LEVEL_BAD);
    /* Of the daemon itself as much as the check of the configuration counts, to the byte. */
    facts.cgroup_limit_bytes = 4 * KVT_GIB + 128 * KVT_MIB + KVT_OWN_MEMORY_BYTES;
    assert_int_equal(judge(&facts, &pools, "4.2 GiB for the pools of 4.2 GiB"), KVT_CTL_LEVEL_OK);
    facts.cgroup_limit_bytes--;
    assert_int_equal(judge(&facts, &pools, "(v2) allows 4.2 GiB"), KVT_CTL_LEVEL_BAD);
    facts = good_facts();
    facts.memory_bytes = 4 * KVT_GIB;
    assert_int_equal(judge(&facts, &pools, "the machine has 4.0 GiB"), KVT_CTL_LEVEL_BAD);
    facts = good_facts();
    facts.nofile = 256;
    assert_int_equal(judge(&facts, &pools, "RLIMIT_NOFILE"), KVT_CTL_LEVEL_BAD);
    /* Of a running daemon: what it got counts, not what is free. */
    facts = good_facts();
    facts.daemon_pid = 5;
    (void)snprintf(pools.l2_detail, sizeof(pools.l2_detail), "memfd, 4 KiB pages, locked");
    assert_int_equal(judge(&facts, &pools, "memfd, 4 KiB pages, locked"), KVT_CTL_LEVEL_WARN);
    (void)snprintf(pools.l2_detail, sizeof(pools.l2_detail), "memfd, plain pages (huge ones: x)");
    assert_int_equal(judge(&facts, &pools, "memfd, plain pages"), KVT_CTL_LEVEL_WARN);
    (void)snprintf(pools.l2_detail, sizeof(pools.l2_detail), "anonymous, transparent huge pages");
    assert_int_equal(judge(&facts, &pools, "L2 has them"), KVT_CTL_LEVEL_OK);
}

static void test_config(void **state)
{
    static const char text[] = "# comment\n"
                               "index:\n"
                               "  memory: 64MiB   # half\n"
                               "tiers:\n"
                               "  l2:\n"
                               "    bytes: \"2GiB\"\n"
                               "  l3:\n"
                               "    path: '/var/lib/x y/l3'\n"
                               "    bytes: 16GiB\n"
                               "limits:\n"
                               "  bytes: 1GiB\n";
    char root[] = "/tmp/kvt-doctor-XXXXXX", path[ROOM], said[256] = "";
    struct kvt_ctl_pools pools;
    FILE *err = fmemopen(said, sizeof(said), "w");

    (void)state;
    assert_non_null(mkdtemp(root));
    put(root, "/good.yaml", text);
    put(root, "/bad.yaml", "tiers:\n  l2:\n    bytes: 4G\n");
    (void)snprintf(path, sizeof(path), "%s/good.yaml", root);
    assert_int_equal(kvt_ctl_pools_load(&pools, path, err), KVT_CTL_OK);
    assert_int_equal(pools.l2_bytes, 2 * KVT_GIB);
    assert_int_equal(pools.l3_bytes, 16 * KVT_GIB);
    assert_int_equal(pools.l1_bytes, 0);
    assert_int_equal(pools.index_bytes, 64 * KVT_MIB);
    assert_string_equal(pools.l3_paths, "/var/lib/x y/l3");
    (void)snprintf(path, sizeof(path), "%s/bad.yaml", root);
    assert_int_equal(kvt_ctl_pools_load(&pools, path, err), KVT_CTL_USAGE);
    assert_int_equal(kvt_ctl_pools_load(&pools, "/nonexistent", err), KVT_CTL_USAGE);
    (void)fclose(err);
    forget(root);
    assert_non_null(strstr(said, "tiers.l2.bytes: '4G'"));
}

static void test_places(void **state)
{
    struct kvt_ctl_report report = {0};
    struct kvt_ctl_pools pools = pools_of(KVT_GIB);
    char root[] = "/tmp/kvt-doctor-XXXXXX";
    uint64_t pid = 1;

    (void)state;
    kvt_ctl_check_socket(&report, "socket", "/nonexistent/k.sock", &pid);
    assert_int_equal(pid, 0);
    assert_int_equal(report.findings[0].level, KVT_CTL_LEVEL_WARN);
    assert_non_null(strstr(report.findings[0].text, "not there"));
    kvt_ctl_check_socket(&report, "socket", "/etc/passwd", &pid);
    assert_int_equal(report.findings[1].level, KVT_CTL_LEVEL_BAD);
    assert_non_null(mkdtemp(root));
    put(root, "/l3", "x");
    pools.l3_bytes = UINT64_C(1) << 60;
    (void)snprintf(pools.l3_paths, sizeof(pools.l3_paths), "%s/l3", root);
    assert_int_equal(chmod(pools.l3_paths, 0644), 0);
    report.count = 0;
    kvt_ctl_check_l3(&report, &pools);
    forget(root);
    assert_int_equal(kvt_ctl_report_worst(&report), KVT_CTL_LEVEL_BAD);
    assert_string_equal(report.findings[report.count - 1].what, "L3 mode");
    assert_string_equal(report.findings[report.count - 2].what, "L3 room");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_gather),    cmocka_unit_test(test_gather_v1_and_nothing),
        cmocka_unit_test(test_judgement), cmocka_unit_test(test_config),
        cmocka_unit_test(test_places),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
