/* L2 in parts on NUMA nodes. The two system calls of it are the test's: this machine may have one
 * node, or a filter that forbids them. */
#include <linux/mempolicy.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "tests/common/cmocka.h"
#include "tiers/host/host.h"
#include "tiers/host/parts.h"

static struct {
    uint32_t calls;
    struct {
        uint8_t *base;
        uint64_t bytes;
        int node;
        bool is_touched;
    } seen[64];
    int refuse_node, error; /* a part for that node fails */
    int full_node;          /* pages of a part for that node come from node 99 */
} world;

static bool is_touched(uint8_t *page)
{
    unsigned char is_resident = 0;

    assert_int_equal(mincore(page, 4096, &is_resident), 0);
    return is_resident & 1;
}

static int node_of(const uint8_t *page)
{
    for (uint32_t i = world.calls; i > 0; i--)
        if (page >= world.seen[i - 1].base &&
            page < world.seen[i - 1].base + world.seen[i - 1].bytes)
            return world.seen[i - 1].node == world.full_node ? 99 : world.seen[i - 1].node;
    return -1;
}

static long seen_mbind(const long args[6])
{
    const unsigned long *mask = (const unsigned long *)args[3];
    int node = -1, nodes = 0;

    assert_true(world.calls < KVT_COUNT_OF(world.seen));
    assert_int_equal(args[2], MPOL_PREFERRED);
    assert_int_equal(args[5], 0);
    for (int i = 0; i < (int)args[4] - 1; i++)
        if (mask[i / 64] & 1ul << i % 64) {
            node = i;
            nodes++;
        }
    assert_int_equal(nodes, 1);
    if (node == world.refuse_node) {
        errno = world.error;
        return -1;
    }
    world.seen[world.calls].base = (uint8_t *)args[0];
    world.seen[world.calls].bytes = (uint64_t)args[1];
    world.seen[world.calls].node = node;
    world.seen[world.calls].is_touched = is_touched((uint8_t *)args[0]);
    world.calls++;
    return 0;
}

long __real_syscall(long number, ...);
long __wrap_syscall(long number, ...);
long __wrap_syscall(long number, ...)
{
    long arguments[6];
    va_list list;

    va_start(list, number);
    for (uint32_t i = 0; i < 6; i++)
        arguments[i] = va_arg(list, long);
    va_end(list);
    if (number == SYS_mbind)
        return seen_mbind(arguments);
    if (number == SYS_get_mempolicy) {
        assert_int_equal(arguments[4], MPOL_F_NODE | MPOL_F_ADDR);
        *(int *)arguments[0] = node_of((const uint8_t *)arguments[3]);
        return 0;
    }
    return __real_syscall(number, arguments[0], arguments[1], arguments[2], arguments[3],
                          arguments[4], arguments[5]);
}

static struct kvt_doorbell bell;
static struct kvt_host_config config;

static int begin(void **state)
{
    (void)state;
    memset(&world, 0, sizeof(world));
    world.refuse_node = world.full_node = -1;
    bell = KVT_DOORBELL_NULL;
    config = (struct kvt_host_config){
        .bytes = 10 * KVT_MIB, .pages = KVT_HOST_PAGES_PLAIN, .inflight_max = 4, .doorbell = &bell};
    return kvt_doorbell_init(&bell);
}

static int end(void **state)
{
    (void)state;
    kvt_doorbell_deinit(&bell);
    return 0;
}

static struct kvt_tier *host_open(void)
{
    struct kvt_tier *tier = NULL;

    assert_int_equal(kvt_host_open(&tier, &config), 0);
    return tier;
}

/* The zones lie side by side and are all of it. */
static void expect_zones(const struct kvt_tier *tier, uint32_t count)
{
    uint64_t end_bytes = 0;

    assert_int_equal(tier->zones_count, count);
    for (uint32_t i = 0; i < count; i++) {
        assert_true(tier->zones[i].base_bytes == end_bytes);
        assert_true(tier->zones[i].bytes > 0);
        assert_ptr_equal(tier->zones[i].counters, &tier->counters);
        end_bytes += tier->zones[i].bytes;
    }
    if (count > 0)
        assert_true(end_bytes == tier->capacity_bytes);
}

static void test_without_nodes(void **state)
{
    struct kvt_tier *tier = host_open();

    (void)state;
    assert_int_equal(world.calls, 0);
    assert_int_equal(tier->zones_count, 0);
    assert_null(strstr(tier->detail, "NUMA"));
    tier = kvt_tier_close(tier);
}

static void test_one_node(void **state)
{
    struct kvt_tier *tier;

    (void)state;
    config.numa_nodes_count = 1;
    config.numa_nodes[0] = 3;
    tier = host_open();
    assert_int_equal(world.calls, 1);
    assert_ptr_equal(world.seen[0].base, kvt_host_memory(tier));
    assert_true(world.seen[0].bytes == 10 * KVT_MIB);
    assert_false(world.seen[0].is_touched);
    assert_true(is_touched(kvt_host_memory(tier)));
    expect_zones(tier, 0);
    assert_non_null(strstr(tier->detail, ", on NUMA node 3 (100 %)"));
    tier = kvt_tier_close(tier);
}

static void test_nodes(void **state)
{
    static const enum kvt_host_pages kinds[] = {KVT_HOST_PAGES_PLAIN, KVT_HOST_PAGES_AUTO};

    (void)state;
    config.numa_nodes_count = 2;
    config.numa_nodes[0] = 1;
    config.numa_nodes[1] = 0;
    for (size_t k = 0; k < KVT_COUNT_OF(kinds); k++) {
        struct kvt_tier *tier;

        world.calls = 0;
        config.pages = kinds[k];
        tier = host_open();
        assert_true(world.calls >= 2); /* of huge pages that were not to be had, too */
        for (uint32_t i = 0; i < world.calls; i++)
            assert_false(world.seen[i].is_touched);
        expect_zones(tier, 2);
        assert_true(tier->zones[0].bytes == 4 * KVT_MIB && tier->zones[1].bytes == 6 * KVT_MIB);
        assert_int_equal(tier->zones[0].numa_node, 1);
        assert_int_equal(tier->zones[1].numa_node, 0);
        assert_string_equal(tier->zones[0].name, "node 1");
        assert_string_equal(tier->zones[1].name, "node 0");
        assert_ptr_equal(world.seen[world.calls - 1].base,
                         kvt_host_memory(tier) + tier->zones[1].base_bytes);
        assert_non_null(strstr(tier->detail, ", on NUMA nodes 1 (100 %), 0 (100 %)"));
        tier = kvt_tier_close(tier);
    }
}

static void test_refused_and_full(void **state)
{
    struct kvt_tier *tier;

    (void)state;
    config.numa_nodes_count = 3;
    config.numa_nodes[1] = 1;
    config.numa_nodes[2] = KVT_NUMA_NODES_MAX;
    world.refuse_node = 1;
    world.error = EPERM;
    world.full_node = 0;
    tier = host_open();
    expect_zones(tier, 3);
    assert_int_equal(tier->zones[0].numa_node, 0);
    assert_int_equal(tier->zones[1].numa_node, -1);
    assert_int_equal(tier->zones[2].numa_node, -1);
    assert_non_null(strstr(tier->detail, ", on NUMA nodes 0 (0 %), 1 (not placed: Operation not "
                                         "permitted), 1024 (not placed: "));
    memset(kvt_host_memory(tier), 7, tier->capacity_bytes);
    tier = kvt_tier_close(tier);
    config.numa_nodes_count = KVT_ZONES_MAX + 1;
    assert_int_equal(kvt_host_open(&tier, &config), -EINVAL);
}

static void test_cut(void **state)
{
    int nodes[KVT_ZONES_MAX];
    struct kvt_host_parts parts;

    (void)state;
    for (int i = 0; i < (int)KVT_ZONES_MAX; i++)
        nodes[i] = i;
    for (uint64_t units = 1; units < 70; units++)
        for (uint32_t count = 0; count <= KVT_ZONES_MAX; count++) {
            uint64_t at_bytes = 0;

            kvt_host_parts_cut(&parts, units * 8192 + units % 2 * 4096, 8192, nodes, count);
            assert_int_equal(parts.count, KVT_MIN(units, count));
            for (uint32_t i = 0; i < parts.count; i++) {
                assert_true(parts.parts[i].base_bytes == at_bytes && at_bytes % 8192 == 0);
                assert_true(parts.parts[i].bytes / 8192 >= units / parts.count);
                assert_true(parts.parts[i].bytes / 8192 <= kvt_div_up(units, parts.count));
                assert_int_equal(parts.parts[i].node, i);
                at_bytes += parts.parts[i].bytes;
            }
            if (parts.count > 0)
                assert_true(at_bytes == units * 8192 + units % 2 * 4096);
        }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_without_nodes, begin, end),
        cmocka_unit_test_setup_teardown(test_one_node, begin, end),
        cmocka_unit_test_setup_teardown(test_nodes, begin, end),
        cmocka_unit_test_setup_teardown(test_refused_and_full, begin, end),
        cmocka_unit_test(test_cut),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
