/* Single cases of the tree that need to look inside or to break something: the dump and positions
 * that lie, counters of a namespace, an index that is used again, generations that run out, a
 * mapping that fails. */
#include "tests/common/cmocka.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>

#include "radix/internal.h"

#define BLOCKS 8u

void *__real_mmap64(void *at, size_t bytes, int prot, int flags, int fd, off_t offset);
void *__wrap_mmap64(void *at, size_t bytes, int prot, int flags, int fd, off_t offset);

static bool is_mmap_failing;

void *__wrap_mmap64(void *at, size_t bytes, int prot, int flags, int fd, off_t offset)
{
    if (is_mmap_failing) {
        errno = ENOMEM;
        return MAP_FAILED;
    }
    return __real_mmap64(at, bytes, prot, flags, fd, offset);
}

static const struct kvt_radix_config config = {
    .memory_bytes = 1 << 20, .seed = 3, .namespaces_max = 1, .roots_max = 4};

static struct kvt_radix_ns ns_open(struct kvt_radix *radix)
{
    const struct kvt_radix_spec spec = {
        .block_tokens = 1, .components_count = 1, .components = {{.kind = KVT_COMPONENT_FULL}}};
    struct kvt_radix_ns ns;

    assert_int_equal(kvt_radix_ns_open(radix, &spec, &ns), 0);
    return ns;
}

/* A path of BLOCKS blocks, the block at @fork (if inside) another one; every block has bit 0. */
static struct kvt_radix_block store(struct kvt_radix *radix, struct kvt_radix_ns ns, uint32_t fork)
{
    uint32_t tokens[BLOCKS];
    struct kvt_radix_prefix prefix = {.ns = ns, .tokens = tokens, .tokens_count = BLOCKS};
    struct kvt_radix_cell cells[BLOCKS];
    struct kvt_radix_block end;
    uint64_t fresh;

    for (uint32_t i = 0; i < BLOCKS; i++)
        tokens[i] = i == fork ? 1000 + i : i;
    assert_int_equal(kvt_radix_insert(radix, &prefix, &end, &fresh), 0);
    assert_int_equal(kvt_radix_path(radix, end, 0, 0, BLOCKS, cells), 0);
    for (uint32_t i = BLOCKS - (uint32_t)fresh; i < BLOCKS; i++)
        assert_int_equal(kvt_radix_put(radix, cells[i].block, 0, 1, 1 + i), 0);
    kvt_radix_settle(radix, end);
    return end;
}

static uint32_t dump(const struct kvt_radix *radix, struct kvt_radix_ns ns, uint64_t depth_max,
                     uint32_t step, struct kvt_radix_dump_node *ret_nodes)
{
    uint64_t resume = 0;
    uint32_t count = 0;

    while (resume != UINT64_MAX) {
        assert_true(count + step <= 32);
        count += kvt_radix_dump(radix, ns, depth_max, &resume, step, ret_nodes + count);
    }
    assert_int_equal(kvt_radix_dump(radix, ns, depth_max, &resume, step, ret_nodes), 0);
    return count;
}

static void test_dump(void **state)
{
    struct kvt_radix_dump_node all[32], some[32];
    struct kvt_radix *radix = NULL;
    struct kvt_radix_ns ns;
    struct kvt_radix_block end;

    (void)state;
    assert_int_equal(kvt_radix_new(&radix, &config), 0);
    ns = ns_open(radix);
    assert_int_equal(dump(radix, ns, UINT64_MAX, 1, all), 0);
    end = store(radix, ns, BLOCKS);
    (void)store(radix, ns, 6);
    (void)store(radix, ns, 3);
    assert_int_equal(kvt_radix_lease(radix, end), 0);
    assert_int_equal(dump(radix, ns, UINT64_MAX, 32, all), 5);
    for (uint32_t step = 1; step < 5; step++) {
        assert_int_equal(dump(radix, ns, UINT64_MAX, step, some), 5);
        assert_memory_equal(some, all, 5 * sizeof(all[0]));
    }
    /* [0 1 2] above [3 4 5] and [1003 4 5 6 7]; below the former [6 7] and [1006 7] */
    assert_int_equal(all[0].depth_nodes, 0);
    assert_int_equal(all[0].blocks_count, 3);
    assert_int_equal(all[0].children_count, 2);
    assert_int_equal(all[0].leases, 1);
    assert_int_equal(all[0].cells_at[0][0], 3);
    for (uint32_t i = 1; i < 5; i++) {
        uint32_t first = (uint32_t)all[i].first_block_idx;

        assert_true(first == 3 || first == 6);
        assert_int_equal(all[i].depth_nodes, first / 3);
        assert_int_equal(all[i].first_tokens[0] % 1000, first);
        assert_int_equal(all[i].cells_at[0][0], all[i].blocks_count);
    }
    assert_int_equal(dump(radix, ns, 6, 2, some), 3);
    assert_int_equal(dump(radix, ns, 3, 2, some), 1);
    assert_int_equal(dump(radix, ns, 0, 2, some), 0);
    (void)kvt_radix_free(radix);
}

/* Positions come back from clients: every number must be safe, in a tree that changed too. */
static void test_dump_position_that_lies(void **state)
{
    struct kvt_radix_dump_node nodes[32];
    struct kvt_radix_victim cells[64];
    struct kvt_radix *radix = NULL;
    struct kvt_radix_ns ns;
    uint64_t resume = 0, position, valid = 0;

    (void)state;
    assert_int_equal(kvt_radix_new(&radix, &config), 0);
    ns = ns_open(radix);
    (void)store(radix, ns, BLOCKS);
    (void)store(radix, ns, 3);
    assert_int_equal(kvt_radix_dump(radix, ns, UINT64_MAX, &resume, 1, nodes), 1);
    position = resume;
    for (uint64_t at = 1; at < config.memory_bytes; at++) {
        resume = at;
        valid += kvt_radix_dump(radix, ns, UINT64_MAX, &resume, 32, nodes) > 0;
    }
    assert_int_equal(valid, 4); /* the root and three nodes */
    resume = (uint64_t)1 << 40 | position;
    assert_int_equal(kvt_radix_dump(radix, ns, UINT64_MAX, &resume, 1, nodes), 0);
    kvt_radix_detach_ns(radix, ns);
    for (uint32_t round = 0; round < 2; round++) { /* detached, then reaped */
        for (uint64_t at = 1; at < config.memory_bytes; at++) {
            resume = at;
            assert_int_equal(kvt_radix_dump(radix, ns, UINT64_MAX, &resume, 1, nodes), 0);
            assert_true(resume == UINT64_MAX);
        }
        (void)kvt_radix_reap(radix, 64, cells);
    }
    (void)kvt_radix_free(radix);
}

/* Counters, what waits for the reaper, and the index once everything is gone. */
static void test_namespace_comes_back(void **state)
{
    struct kvt_radix_victim cells[64];
    struct kvt_radix_ns_stats stats;
    struct kvt_radix *radix = NULL;
    struct kvt_radix_ns ns, second;
    struct kvt_radix_block end;
    const struct kvt_radix_spec spec = {
        .block_tokens = 2, .components_count = 1, .components = {{.kind = KVT_COMPONENT_FULL}}};

    (void)state;
    assert_int_equal(kvt_radix_new(&radix, &config), 0);
    ns = ns_open(radix);
    end = store(radix, ns, BLOCKS);
    (void)store(radix, ns, 3);
    kvt_radix_ns_stats(radix, ns, &stats);
    assert_int_equal(stats.roots, 1);
    assert_int_equal(stats.nodes, 3);
    assert_int_equal(stats.blocks, 2 * BLOCKS - 3);
    assert_int_equal(stats.cells_at[0][0], 2 * BLOCKS - 3);
    assert_int_equal(stats.cells_at[0][1], 0);
    assert_false(kvt_radix_has_detached(radix));
    kvt_radix_ns_close(radix, ns);
    assert_true(kvt_radix_has_detached(radix));
    assert_int_equal(kvt_radix_detached_blocks(radix), 2 * BLOCKS - 3);
    assert_int_equal(kvt_radix_ns_open(radix, &spec, &second), KVT_RADIX_E_NO_ROOM);
    assert_int_equal(kvt_radix_reap(radix, 64, cells), 2 * BLOCKS - 3);
    assert_false(kvt_radix_has_detached(radix));
    assert_int_equal(kvt_radix_detached_blocks(radix), 0);
    assert_int_equal(kvt_radix_ns_open(radix, &spec, &second), 0);
    assert_int_equal(second.idx, ns.idx);
    kvt_radix_ns_stats(radix, second, &stats);
    assert_int_equal(stats.roots + stats.nodes + stats.blocks + stats.cells_at[0][0], 0);
    assert_false(kvt_radix_is_live(radix, end));
    (void)kvt_radix_free(radix);
}

/* A record whose generations are used up is never given out again. */
static void test_generations_run_out(void **state)
{
    struct kvt_radix *radix = NULL;
    struct kvt_radix_ns ns;
    struct kvt_radix_block end;
    const uint32_t token = 1;
    const struct kvt_radix_prefix prefix_of_one = {.tokens = &token, .tokens_count = 1};
    struct kvt_radix_prefix prefix = prefix_of_one;
    uint64_t fresh;
    uint32_t used_up = 0;

    (void)state;
    assert_int_equal(kvt_radix_new(&radix, &config), 0);
    prefix.ns = ns = ns_open(radix);
    (void)store(radix, ns, BLOCKS); /* holds the page of records */
    for (uint32_t i = 0; i < 3; i++) {
        assert_int_equal(kvt_radix_insert(radix, &prefix, &end, &fresh), 0);
        assert_int_equal(fresh, 1);
        assert_int_not_equal(end.generation, 0);
        assert_int_not_equal(end.idx, used_up);
        block_at(radix, end.idx)->generation = UINT32_MAX - 1;
        end.generation = UINT32_MAX - 1;
        assert_true(kvt_radix_is_live(radix, end));
        kvt_radix_settle(radix, end); /* no copy: it is dead */
        assert_false(kvt_radix_is_live(radix, end));
        used_up = end.idx;
    }
    (void)kvt_radix_free(radix);
}

/* One call passes over a bounded number of leased leaves; later calls go on behind them. */
static void test_victims_behind_many_leases(void **state)
{
    enum { LEAVES = 10000 };
    struct kvt_radix_config large = config;
    struct kvt_radix *radix = NULL;
    struct kvt_radix_prefix prefix = {.tokens_count = 1};
    struct kvt_radix_victims which = {.component = UINT32_MAX};
    struct kvt_radix_victim victim;
    struct kvt_radix_block end = KVT_RADIX_BLOCK_NONE;
    uint32_t calls = 1;
    uint64_t fresh;

    (void)state;
    large.memory_bytes = 16 << 20;
    assert_int_equal(kvt_radix_new(&radix, &large), 0);
    prefix.ns = which.ns = ns_open(radix);
    for (uint32_t i = 0; i <= LEAVES; i++) {
        prefix.tokens = &i;
        assert_int_equal(kvt_radix_insert(radix, &prefix, &end, &fresh), 0);
        assert_int_equal(kvt_radix_put(radix, end, 0, 1, 1), 0);
        if (i < LEAVES)
            assert_int_equal(kvt_radix_lease(radix, end), 0);
    }
    while (kvt_radix_victims(radix, &which, 1, &victim) == 0)
        assert_true(++calls < 5);
    assert_int_equal(calls, 3); /* 4,096 + 4,096 + the rest */
    assert_int_equal(kvt_radix_block_id(victim.block), kvt_radix_block_id(end));
    (void)kvt_radix_free(radix);
}

/* A root gets another key: what is below stays, old and new key answer, and refusals change
 * nothing. */
static void test_root_rename(void **state)
{
    static const char key[] = "a key that is longer than the smallest piece of memory by far";
    struct kvt_radix *radix = NULL;
    struct kvt_radix_ns ns;
    struct kvt_radix_block end;
    struct kvt_radix_match match;
    struct kvt_radix_lookup lookup = {.limit_tokens = UINT64_MAX, .mask_allowed = 1};
    uint32_t tokens[BLOCKS] = {0, 1, 2, 3, 4, 5, 6, 7}, bytes;
    const void *root;

    (void)state;
    assert_int_equal(kvt_radix_new(&radix, &config), 0);
    lookup.prefix = (struct kvt_radix_prefix){
        .ns = ns = ns_open(radix), .tokens = tokens, .tokens_count = BLOCKS};
    assert_int_equal(kvt_radix_root_rename(radix, ns, NULL, 0, key, 3), KVT_RADIX_E_STALE);
    end = store(radix, ns, BLOCKS);
    assert_int_equal(kvt_radix_lease(radix, end), 0);
    assert_int_equal(kvt_radix_root_rename(radix, ns, NULL, 0, NULL, 0), KVT_RADIX_E_EXISTS);
    assert_int_equal(kvt_radix_root_rename(radix, ns, NULL, 0, key, sizeof(key)), 0);
    (void)store(radix, ns, BLOCKS); /* another root with the key that is free now */
    assert_int_equal(kvt_radix_root_rename(radix, ns, key, sizeof(key), NULL, 0),
                     KVT_RADIX_E_EXISTS);
    for (uint32_t length = sizeof(key); length > 1; length--) {
        const char *why = "";

        root = kvt_radix_root_key(radix, end, &bytes);
        assert_int_equal(bytes, length);
        assert_memory_equal(root, key + sizeof(key) - length, length);
        lookup.prefix.root_key = key + sizeof(key) - length;
        lookup.prefix.root_key_bytes = length;
        assert_int_equal(kvt_radix_lookup(radix, &lookup, &match), 0);
        assert_int_equal(match.boundary_tokens, BLOCKS);
        assert_int_equal(kvt_radix_block_id(match.end), kvt_radix_block_id(end));
        assert_true(kvt_radix_is_leased(radix, end));
        assert_true(kvt_radix_check(radix, &why));
        /* The new key is the rest of the old one, as it lies in the tree. */
        assert_int_equal(kvt_radix_root_rename(radix, ns, lookup.prefix.root_key, length,
                                               (const char *)root + 1, length - 1),
                         0);
        assert_int_equal(kvt_radix_lookup(radix, &lookup, &match), 0);
        assert_int_equal(match.boundary_tokens, 0);
    }
    kvt_radix_detach_root(radix, ns, key + sizeof(key) - 1, 1);
    assert_int_equal(kvt_radix_root_rename(radix, ns, key + sizeof(key) - 1, 1, key, 3),
                     KVT_RADIX_E_STALE);
    assert_false(kvt_radix_is_live(radix, end));
    (void)kvt_radix_free(radix);
}

/* A key that needs other memory than the old one, in a tree that has none. */
static void test_root_rename_without_room(void **state)
{
    static const char key[RADIX_ROOT_KEY_BYTES_MAX];
    struct kvt_radix *radix = NULL;
    struct kvt_radix_ns ns;
    struct kvt_radix_block end;
    uint32_t bytes;

    (void)state;
    assert_int_equal(kvt_radix_new(&radix, &config), 0);
    ns = ns_open(radix);
    end = store(radix, ns, BLOCKS);
    while (pool_take(&radix->pool, pool_class_of(&radix->pool, sizeof(key))) != NULL)
        continue;
    assert_int_equal(kvt_radix_root_rename(radix, ns, NULL, 0, key, sizeof(key)),
                     KVT_RADIX_E_NO_ROOM);
    assert_non_null(kvt_radix_root_key(radix, end, &bytes));
    assert_int_equal(bytes, 0);
    assert_int_equal(kvt_radix_root_rename(radix, ns, NULL, 0, key, 16), 0); /* the same memory */
    assert_non_null(kvt_radix_root_key(radix, end, &bytes));
    assert_int_equal(bytes, 16);
    (void)kvt_radix_free(radix);
}

static void test_mapping_fails(void **state)
{
    struct kvt_radix *radix = NULL;
    int r;

    (void)state;
    is_mmap_failing = true;
    r = kvt_radix_new(&radix, &config);
    is_mmap_failing = false;
    assert_int_equal(r, -ENOMEM);
    assert_null(radix);
    assert_int_equal(kvt_radix_new(&radix, &config), 0);
    (void)kvt_radix_free(radix);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_dump),
        cmocka_unit_test(test_dump_position_that_lies),
        cmocka_unit_test(test_namespace_comes_back),
        cmocka_unit_test(test_generations_run_out),
        cmocka_unit_test(test_victims_behind_many_leases),
        cmocka_unit_test(test_root_rename),
        cmocka_unit_test(test_root_rename_without_room),
        cmocka_unit_test(test_mapping_fails),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
