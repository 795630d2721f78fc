/* Tags of blocks: they stay with their block through whatever happens to the tree's shape, and each
 * that leaves is told once. The ways to leave are rows of a table; each is given the same tree: a
 * path of PATH blocks (more than a node holds) with tags 1000 + i, and at block FORK a branch of
 * BRANCH blocks with tags 5000 + i. Every block has bit 0. */
#include "tests/common/cmocka.h"

#include <signal.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "radix/internal.h"

#define PATH 100u
#define FORK 40u
#define BRANCH 10u
#define BLOCKS (PATH + BRANCH)

struct tree {
    struct kvt_radix *radix;
    struct kvt_radix_ns ns;
    struct kvt_radix_block path[PATH], branch[BRANCH];
    uint32_t gone_count;
    struct kvt_radix_gone gone[2 * BLOCKS];
};

static void gone_record(void *ctx, const struct kvt_radix_gone *gone)
{
    struct tree *tree = ctx;

    assert_true(tree->gone_count < KVT_COUNT_OF(tree->gone));
    tree->gone[tree->gone_count++] = *gone;
}

static void tree_new(struct tree *tree, bool has_tags)
{
    const struct kvt_radix_config config = {.memory_bytes = 4 << 20,
                                            .seed = 3,
                                            .namespaces_max = 2,
                                            .roots_max = 4,
                                            .has_tags = has_tags,
                                            .gone = gone_record,
                                            .gone_ctx = tree};
    const struct kvt_radix_spec spec = {
        .block_tokens = 1, .components_count = 1, .components = {{.kind = KVT_COMPONENT_FULL}}};

    *tree = (struct tree){0};
    assert_int_equal(kvt_radix_new(&tree->radix, &config), 0);
    assert_int_equal(kvt_radix_ns_open(tree->radix, &spec, &tree->ns), 0);
}

static void check(const struct tree *tree)
{
    const char *why = "";

    if (!kvt_radix_check(tree->radix, &why))
        fail_msg("%s", why);
}

/* Blocks with tokens @first + i behind @after; their handles to @ret_blocks. Not settled. */
static void insert(struct tree *tree, struct kvt_radix_block after, uint32_t first, uint32_t count,
                   uint8_t bits, struct kvt_radix_block *ret_blocks)
{
    uint32_t tokens[PATH];
    struct kvt_radix_prefix prefix = {
        .ns = tree->ns, .after = after, .tokens = tokens, .tokens_count = count};
    struct kvt_radix_cell cells[PATH];
    struct kvt_radix_block end;
    uint64_t fresh, depth;

    for (uint32_t i = 0; i < count; i++)
        tokens[i] = first + i;
    assert_int_equal(kvt_radix_insert(tree->radix, &prefix, &end, &fresh), 0);
    assert_int_equal(fresh, count);
    depth = kvt_radix_depth_blocks(tree->radix, end);
    assert_int_equal(kvt_radix_path(tree->radix, end, 0, depth - count, count, cells), 0);
    for (uint32_t i = 0; i < count; i++) {
        ret_blocks[i] = cells[i].block;
        assert_true(kvt_radix_tag(tree->radix, ret_blocks[i]) == 0);
        if (bits != 0)
            assert_int_equal(kvt_radix_put(tree->radix, ret_blocks[i], 0, bits, 1 + i), 0);
    }
}

static void tree_fill(struct tree *tree)
{
    insert(tree, KVT_RADIX_BLOCK_NONE, 1000, PATH, 1, tree->path);
    for (uint32_t i = 0; i < PATH; i++)
        kvt_radix_set_tag(tree->radix, tree->path[i], 1000 + i);
    insert(tree, tree->path[FORK - 1], 5000, BRANCH, 1, tree->branch);
    for (uint32_t i = 0; i < BRANCH; i++)
        kvt_radix_set_tag(tree->radix, tree->branch[i], 5000 + i);
}

static void drop(struct tree *tree, const struct kvt_radix_block *blocks, uint32_t from,
                 uint32_t count)
{
    for (uint32_t i = from; i < from + count; i++)
        assert_int_equal(kvt_radix_drop(tree->radix, blocks[i], 0, 1, NULL), 0);
}

static void drop_backwards(struct tree *tree, const struct kvt_radix_block *blocks, uint32_t from,
                           uint32_t count)
{
    for (uint32_t i = from + count; i-- > from;)
        assert_int_equal(kvt_radix_drop(tree->radix, blocks[i], 0, 1, NULL), 0);
}

/* Takes at most @max cells at a time, until there is nothing. */
static void reap(struct tree *tree, uint32_t max)
{
    struct kvt_radix_victim cells[2 * BLOCKS];

    while (kvt_radix_has_detached(tree->radix))
        (void)kvt_radix_reap(tree->radix, max, cells);
}

/* ---- ways to leave --------------------------------------------------------------------------- */

static void die_leaf_by_leaf(struct tree *tree)
{
    drop_backwards(tree, tree->branch, 0, BRANCH);
    for (uint32_t i = PATH; i-- > 0;) {
        drop(tree, tree->path, i, 1);
        assert_int_equal(tree->gone_count, BRANCH + PATH - i);
    }
}

/* Everything above is empty when the last leaf goes: it takes its ancestors with it. */
static void die_from_the_top(struct tree *tree)
{
    drop(tree, tree->path, 0, PATH);
    assert_int_equal(tree->gone_count, PATH - FORK);
    drop(tree, tree->branch, 0, BRANCH);
}

static void die_by_release(struct tree *tree)
{
    drop_backwards(tree, tree->path, FORK, PATH - FORK);
    assert_int_equal(kvt_radix_lease(tree->radix, tree->branch[BRANCH - 1]), 0);
    drop(tree, tree->path, 0, FORK);
    drop_backwards(tree, tree->branch, 0, BRANCH);
    assert_int_equal(tree->gone_count, PATH - FORK);
    assert_int_equal(kvt_radix_release(tree->radix, tree->branch[BRANCH - 1]), 0);
}

/* New blocks that nobody filled. Gives them tags that the row expects of the branch. */
static void die_by_settle(struct tree *tree)
{
    struct kvt_radix_block fresh[BRANCH];

    for (uint32_t i = 0; i < BRANCH; i++)
        kvt_radix_set_tag(tree->radix, tree->branch[i], 0);
    insert(tree, tree->path[PATH - 1], 7000, BRANCH, 0, fresh);
    for (uint32_t i = 0; i < BRANCH; i++)
        kvt_radix_set_tag(tree->radix, fresh[i], 5000 + i);
    kvt_radix_settle(tree->radix, fresh[BRANCH - 1]);
    assert_int_equal(tree->gone_count, BRANCH);
    drop_backwards(tree, tree->branch, 0, BRANCH);
    drop_backwards(tree, tree->path, 0, PATH);
}

static void die_by_detach_of_the_first(struct tree *tree)
{
    assert_int_equal(kvt_radix_detach_block(tree->radix, tree->path[0]), 0);
    assert_int_equal(tree->gone_count, 0);
    assert_true(kvt_radix_tag(tree->radix, tree->path[PATH - 1]) == 1000 + PATH - 1);
    reap(tree, 7);
}

/* The tail of a node waits for the reaper while the head of it dies. */
static void die_around_a_cut(struct tree *tree)
{
    drop_backwards(tree, tree->branch, 0, BRANCH);
    assert_int_equal(kvt_radix_detach_block(tree->radix, tree->path[20]), 0);
    drop_backwards(tree, tree->path, 0, 20);
    assert_int_equal(tree->gone_count, BRANCH + 20);
    reap(tree, 1);
}

static void die_detached_and_dropped(struct tree *tree)
{
    assert_int_equal(kvt_radix_detach_block(tree->radix, tree->path[FORK]), 0);
    assert_int_equal(kvt_radix_depth_blocks(tree->radix, tree->path[FORK]), 0);
    assert_int_equal(kvt_radix_depth_blocks_any(tree->radix, tree->path[FORK]), FORK + 1);
    drop(tree, tree->path, FORK, PATH - FORK);
    assert_int_equal(tree->gone_count, 0);
    reap(tree, 1);
    assert_int_equal(tree->gone_count, PATH - FORK);
    drop_backwards(tree, tree->branch, 0, BRANCH);
    drop_backwards(tree, tree->path, 0, FORK);
}

static void die_by_detach_root(struct tree *tree)
{
    kvt_radix_detach_root(tree->radix, tree->ns, NULL, 0);
    reap(tree, 1000);
}

static void die_by_detach_ns(struct tree *tree)
{
    kvt_radix_detach_ns(tree->radix, tree->ns);
    reap(tree, 3);
}

static void die_by_ns_close(struct tree *tree)
{
    kvt_radix_ns_close(tree->radix, tree->ns);
    reap(tree, BLOCKS);
}

/* As an engine takes victims: in the order given. */
static void die_as_victims(struct tree *tree)
{
    const struct kvt_radix_victims which = {.ns = tree->ns, .component = UINT32_MAX};
    struct kvt_radix_victim victims[16];
    uint32_t count;

    while ((count = kvt_radix_victims(tree->radix, &which, 16, victims)) > 0) {
        for (uint32_t i = 0; i < count; i++)
            assert_int_equal(kvt_radix_drop(tree->radix, victims[i].block, 0, 1, NULL), 0);
    }
}

static const struct way {
    const char *name;
    void (*die)(struct tree *tree);
    bool is_torn; /* in pieces, so that a block may go before one that was below it */
} ways[] = {
    {"leaf by leaf", die_leaf_by_leaf, false},
    {"from the top", die_from_the_top, false},
    {"release", die_by_release, false},
    {"settle", die_by_settle, false},
    {"detach of the first block", die_by_detach_of_the_first, false},
    {"around a cut", die_around_a_cut, true},
    {"detached and dropped", die_detached_and_dropped, false},
    {"detach root", die_by_detach_root, false},
    {"detach namespace", die_by_detach_ns, false},
    {"close namespace", die_by_ns_close, false},
    {"victims", die_as_victims, false},
};

/* Where tag @tag is in the record; fails unless it is there once and tells the right place. */
static uint32_t gone_at(const struct tree *tree, const struct way *way, uint64_t tag,
                        uint64_t block_idx)
{
    uint32_t found = 0, at = 0;

    for (uint32_t i = 0; i < tree->gone_count; i++) {
        if (tree->gone[i].tag != tag)
            continue;
        found++;
        at = i;
    }
    if (found != 1)
        fail_msg("%s: tag %lu came %u times", way->name, (unsigned long)tag, found);
    assert_int_equal(tree->gone[at].ns.idx, tree->ns.idx);
    /* die_by_settle hangs these at the end of the path instead of at the fork. */
    if (tree->gone[at].block_idx != block_idx &&
        !(way->die == die_by_settle && tree->gone[at].block_idx == block_idx + PATH - FORK))
        fail_msg("%s: tag %lu at block %lu", way->name, (unsigned long)tag,
                 (unsigned long)tree->gone[at].block_idx);
    return at;
}

static void test_ways_to_leave(void **state)
{
    static struct tree tree;

    (void)state;
    for (size_t w = 0; w < KVT_COUNT_OF(ways); w++) {
        const struct way *way = &ways[w];
        uint32_t below = 0;

        tree_new(&tree, true);
        tree_fill(&tree);
        check(&tree);
        way->die(&tree);
        check(&tree);
        assert_int_equal(tree.gone_count, BLOCKS);
        for (uint32_t i = BRANCH; i-- > 0;) {
            uint32_t at = gone_at(&tree, way, 5000 + i, FORK + i);

            assert_true(way->is_torn || i == BRANCH - 1 || at > below);
            below = at;
        }
        for (uint32_t i = PATH; i-- > 0;) {
            uint32_t at = gone_at(&tree, way, 1000 + i, i);

            assert_true(way->is_torn || i == PATH - 1 || at > below);
            below = at;
        }
        (void)kvt_radix_free(tree.radix);
        assert_int_equal(tree.gone_count, BLOCKS);
    }
}

/* ---- the rest -------------------------------------------------------------------------------- */

static void expect_tags(const struct tree *tree)
{
    uint64_t tags[PATH];

    for (uint32_t i = 0; i < PATH; i++)
        assert_true(kvt_radix_tag(tree->radix, tree->path[i]) == 1000 + i);
    for (uint32_t first = 0; first < PATH; first += 9) {
        for (uint32_t count = 0; first + count <= PATH; count += 13) {
            memset(tags, 0xff, sizeof(tags));
            assert_int_equal(kvt_radix_tags(tree->radix, tree->path[PATH - 1], first, count, tags),
                             0);
            for (uint32_t i = 0; i < PATH; i++)
                assert_true(tags[i] == (i < count ? 1000 + first + i : UINT64_MAX));
        }
    }
}

static void test_shape_changes(void **state)
{
    static const uint32_t forks[] = {1, 99, 50, 64, 63, 65, 2, 32};
    struct kvt_radix_block side[KVT_COUNT_OF(forks)][3], more[96];
    struct kvt_radix_stats before, after;
    static struct tree tree;

    (void)state;
    tree_new(&tree, true);
    tree_fill(&tree);
    kvt_radix_stats(tree.radix, &before);
    for (size_t f = 0; f < KVT_COUNT_OF(forks); f++) { /* splits */
        insert(&tree, tree.path[forks[f] - 1], 9000 + forks[f], 3, 1, side[f]);
        kvt_radix_set_tag(tree.radix, side[f][1], 9001);
        check(&tree);
        expect_tags(&tree);
    }
    for (uint32_t i = 0; i < 96; i += 8) { /* appends and a larger data object each time */
        struct kvt_radix_block last = i == 0 ? tree.path[PATH - 1] : more[i - 1];

        insert(&tree, last, 7000 + i, 8, 1, more + i);
        kvt_radix_set_tag(tree.radix, more[i], 7000);
        assert_true(kvt_radix_tag(tree.radix, more[i / 2 / 8 * 8]) == 7000);
        expect_tags(&tree);
    }
    assert_int_equal(tree.gone_count, 0);
    for (size_t f = 0; f < KVT_COUNT_OF(forks); f++) { /* merges */
        drop_backwards(&tree, side[f], 0, 3);
        assert_int_equal(tree.gone_count, f + 1);
        assert_true(tree.gone[f].tag == 9001 && tree.gone[f].block_idx == forks[f] + 1);
        check(&tree);
        expect_tags(&tree);
    }
    drop_backwards(&tree, more, 0, 96); /* truncates and shrinks */
    assert_int_equal(tree.gone_count, KVT_COUNT_OF(forks) + 12);
    expect_tags(&tree);
    kvt_radix_stats(tree.radix, &after);
    assert_true(after.splits > before.splits + 4 && after.merges > before.merges + 4);
    (void)kvt_radix_free(tree.radix);
    assert_int_equal(tree.gone_count, KVT_COUNT_OF(forks) + 12);
}

/* Only what a block's tag is when it leaves is told; stale handles have none. */
static void test_set_again_and_stale(void **state)
{
    struct kvt_radix_block blocks[4];
    uint64_t tag;
    static struct tree tree;

    (void)state;
    tree_new(&tree, true);
    insert(&tree, KVT_RADIX_BLOCK_NONE, 1, 4, 1, blocks);
    kvt_radix_set_tag(tree.radix, blocks[3], 1);
    kvt_radix_set_tag(tree.radix, blocks[3], UINT64_MAX);
    kvt_radix_set_tag(tree.radix, blocks[2], 2);
    kvt_radix_set_tag(tree.radix, blocks[2], 0);
    assert_true(kvt_radix_tag(tree.radix, blocks[3]) == UINT64_MAX);
    drop_backwards(&tree, blocks, 2, 2);
    assert_int_equal(tree.gone_count, 1);
    assert_true(tree.gone[0].tag == UINT64_MAX && tree.gone[0].block_idx == 3);
    kvt_radix_set_tag(tree.radix, blocks[3], 5);
    assert_true(kvt_radix_tag(tree.radix, blocks[3]) == 0);
    assert_int_equal(kvt_radix_tags(tree.radix, blocks[3], 0, 1, &tag), KVT_RADIX_E_STALE);
    assert_int_equal(kvt_radix_detach_block(tree.radix, blocks[1]), 0);
    assert_int_equal(kvt_radix_tags(tree.radix, blocks[1], 0, 1, &tag), KVT_RADIX_E_STALE);
    kvt_radix_set_tag(tree.radix, blocks[1], 6); /* detached: still its own */
    assert_true(kvt_radix_tag(tree.radix, blocks[1]) == 6);
    reap(&tree, 8);
    assert_int_equal(tree.gone_count, 2);
    assert_true(tree.gone[1].tag == 6 && tree.gone[1].block_idx == 1);
    (void)kvt_radix_free(tree.radix);
}

/* A tree without tags pays nothing for them, and knows none. */
static void test_without_tags(void **state)
{
    uint64_t tags[PATH];
    uint32_t block_bytes;
    static struct tree tree;

    (void)state;
    tree_new(&tree, true);
    block_bytes = tree.radix->namespaces[tree.ns.idx].block_bytes;
    (void)kvt_radix_free(tree.radix);
    tree_new(&tree, false);
    assert_int_equal(tree.radix->namespaces[tree.ns.idx].block_bytes,
                     block_bytes - sizeof(uint64_t));
    assert_int_equal(block_bytes - sizeof(uint64_t), 4 + 4 + 4 + 1); /* token, id, handle, mask */
    tree_fill(&tree);
    assert_true(kvt_radix_tag(tree.radix, tree.path[5]) == 0);
    memset(tags, 0xff, sizeof(tags));
    assert_int_equal(kvt_radix_tags(tree.radix, tree.path[PATH - 1], 0, PATH, tags), 0);
    for (uint32_t i = 0; i < PATH; i++)
        assert_true(tags[i] == 0);
    drop_backwards(&tree, tree.branch, 0, BRANCH);
    kvt_radix_detach_ns(tree.radix, tree.ns);
    reap(&tree, 8);
    assert_int_equal(tree.gone_count, 0);
    check(&tree);
    (void)kvt_radix_free(tree.radix);
}

static void gone_calls_back(void *ctx, const struct kvt_radix_gone *gone)
{
    struct tree *tree = ctx;

    (void)gone;
    (void)kvt_radix_is_live(tree->radix, tree->path[0]);
}

/* A hook that calls the tree ends a process with checks, which this build may not have. */
static void test_hook_that_calls_the_tree(void **state)
{
#ifdef KVT_DEBUG_CHECKS
    const int signal_want = SIGABRT;
#else
    const int signal_want = 0;
#endif
    static struct tree tree;
    int status = 0;
    pid_t pid;

    (void)state;
    tree_new(&tree, true);
    tree_fill(&tree);
    tree.radix->gone = gone_calls_back;
    pid = fork();
    if (pid == 0) {
        (void)close(STDERR_FILENO);
        drop(&tree, tree.branch, BRANCH - 1, 1);
        _exit(0);
    }
    assert_true(pid > 0 && waitpid(pid, &status, 0) == pid);
    assert_int_equal(WIFSIGNALED(status) ? WTERMSIG(status) : 0, signal_want);
    assert_true(signal_want != 0 || (WIFEXITED(status) && WEXITSTATUS(status) == 0));
    (void)kvt_radix_free(tree.radix);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_ways_to_leave),
        cmocka_unit_test(test_shape_changes),
        cmocka_unit_test(test_set_again_and_stale),
        cmocka_unit_test(test_without_tags),
        cmocka_unit_test(test_hook_that_calls_the_tree),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
