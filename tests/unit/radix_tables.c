/* The boundary rule and the shapes of the tree, by hand-written tables and single cases. A row of a
 * table says which blocks have which component, as text: 'x' there, '.' missing, 'o' elsewhere (a
 * place that the lookup does not allow), 'h' being filled. */
#include "tests/common/alloc_fault.h"
#include "tests/common/cmocka.h"

#include <stdlib.h>
#include <string.h>

#include "daemon/base/alloc.h"
#include "radix/radix.h"

#define TOKENS_MAX (1u << 20)

static uint32_t tokens[TOKENS_MAX];

static struct kvt_radix *tree_new(size_t memory_bytes)
{
    const struct kvt_radix_config config = {
        .memory_bytes = memory_bytes, .seed = 3, .namespaces_max = 2, .roots_max = 4};
    struct kvt_radix *radix = NULL;

    assert_int_equal(kvt_radix_new(&radix, &config), 0);
    for (uint32_t i = 0; i < TOKENS_MAX; i++)
        tokens[i] = 100 + i;
    return radix;
}

static struct kvt_radix_ns ns_open(struct kvt_radix *radix, uint32_t block_tokens,
                                   const char *kinds, uint32_t window_tokens)
{
    struct kvt_radix_spec spec = {.block_tokens = block_tokens,
                                  .components_count = (uint32_t)strlen(kinds)};
    struct kvt_radix_ns ns;

    for (uint32_t c = 0; c < spec.components_count; c++) {
        spec.components[c].kind = kinds[c] == 'f'   ? KVT_COMPONENT_FULL
                                  : kinds[c] == 'w' ? KVT_COMPONENT_SLIDING_WINDOW
                                                    : KVT_COMPONENT_STATE;
        spec.components[c].window_tokens = window_tokens;
    }
    assert_int_equal(kvt_radix_ns_open(radix, &spec, &ns), 0);
    return ns;
}

static void check(const struct kvt_radix *radix)
{
    const char *why = "";

    if (!kvt_radix_check(radix, &why))
        fail_msg("%s", why);
}

static struct kvt_radix_block insert(struct kvt_radix *radix, struct kvt_radix_ns ns,
                                     const uint32_t *run, uint64_t count, uint64_t *ret_fresh)
{
    const struct kvt_radix_prefix prefix = {.ns = ns, .tokens = run, .tokens_count = count};
    struct kvt_radix_block end;

    assert_int_equal(kvt_radix_insert(radix, &prefix, &end, ret_fresh), 0);
    return end;
}

/* Inserts and gives every new block of component 0 bit 0. */
static struct kvt_radix_block store(struct kvt_radix *radix, struct kvt_radix_ns ns,
                                    const uint32_t *run, uint64_t count, uint32_t block_tokens)
{
    uint64_t fresh, blocks = count / block_tokens;
    struct kvt_radix_block end = insert(radix, ns, run, count, &fresh);
    struct kvt_radix_cell cell;

    for (uint64_t i = blocks - fresh; i < blocks; i++) {
        assert_int_equal(kvt_radix_path(radix, end, 0, i, 1, &cell), 0);
        assert_int_equal(kvt_radix_put(radix, cell.block, 0, 1, 1), 0);
    }
    kvt_radix_settle(radix, end);
    return end;
}

static void match(struct kvt_radix *radix, struct kvt_radix_ns ns, const uint32_t *run,
                  uint64_t count, uint64_t limit, struct kvt_radix_match *ret_match)
{
    const struct kvt_radix_lookup lookup = {
        .prefix = {.ns = ns, .tokens = run, .tokens_count = count},
        .limit_tokens = limit,
        .mask_allowed = 1};

    assert_int_equal(kvt_radix_lookup(radix, &lookup, ret_match), 0);
}

struct row {
    uint32_t block_tokens, window_tokens;
    const char *kinds;
    const char *cells[3];
    uint64_t prompt_tokens, limit_tokens, boundary, full;
};

static const struct row rows[] = {
    /* full only: up to the first block that is missing, elsewhere or being filled */
    {4, 0, "f", {"xxxx"}, 16, UINT64_MAX, 16, 16},
    {4, 0, "f", {"xxxx"}, 19, UINT64_MAX, 16, 16},
    {4, 0, "f", {"xxxx"}, 3, UINT64_MAX, 0, 0},
    {4, 0, "f", {"xx.x"}, 16, UINT64_MAX, 8, 8},
    {4, 0, "f", {"xxox"}, 16, UINT64_MAX, 8, 8},
    {4, 0, "f", {"xhxx"}, 16, UINT64_MAX, 4, 4},
    {4, 0, "f", {".xxx"}, 16, UINT64_MAX, 0, 0},
    /* a prompt of exactly N blocks, asked with N * B - 1 */
    {4, 0, "f", {"xxxx"}, 16, 15, 12, 12},
    {4, 0, "f", {"xxxx"}, 16, 0, 0, 0},
    {4, 3, "fw", {"xxxx", "..xx"}, 16, 15, 12, 12},
    {4, 3, "fw", {"xxxx", "...x"}, 16, 15, 0, 12},
    /* one token a block, W = 4: tokens 4 and 5 of the window are gone */
    {1, 4, "fw", {"xxxxxxxxxxxx", "xxxx..xxxxxx"}, 8, UINT64_MAX, 4, 8},
    {1, 4, "fw", {"xxxxxxxxxxxx", "xxxx..xxxxxx"}, 10, UINT64_MAX, 10, 10},
    {1, 4, "fw", {"xxxxxxxxxxxx", "xxxx..xxxxxx"}, 9, UINT64_MAX, 4, 9},
    /* a window that is not a multiple of the block: W = 5 touches two blocks of 4, W = 6 too, W = 9
     * three; W = 4 exactly one */
    {4, 4, "fw", {"xxxx", "...x"}, 16, UINT64_MAX, 16, 16},
    {4, 5, "fw", {"xxxx", "...x"}, 16, UINT64_MAX, 0, 16},
    {4, 5, "fw", {"xxxx", "..xx"}, 16, UINT64_MAX, 16, 16},
    {4, 8, "fw", {"xxxx", "..xx"}, 16, UINT64_MAX, 16, 16},
    {4, 9, "fw", {"xxxx", "..xx"}, 16, UINT64_MAX, 0, 16},
    {4, 9, "fw", {"xxxx", ".xxx"}, 16, UINT64_MAX, 16, 16},
    /* W = 1: the block before the boundary */
    {4, 1, "fw", {"xxxx", ".x.."}, 16, UINT64_MAX, 8, 16},
    {4, 1, "w", {".x.."}, 16, UINT64_MAX, 8, 8},
    /* larger than the prefix: all of it */
    {4, 100, "fw", {"xxxx", "xxxx"}, 16, UINT64_MAX, 16, 16},
    {4, 100, "fw", {"xxxx", "xx.x"}, 16, UINT64_MAX, 8, 16},
    {4, 100, "fw", {"xxxx", ".xxx"}, 16, UINT64_MAX, 0, 16},
    /* a rejection does not stop the walk */
    {2, 2, "fw", {"xxxxxx", "x..x.x"}, 12, UINT64_MAX, 12, 12},
    {2, 2, "fw", {"xxxxxx", "x..x.x"}, 10, UINT64_MAX, 8, 10},
    {2, 2, "fw", {"xxxxxx", "x..x.x"}, 6, UINT64_MAX, 2, 6},
    /* the greatest legal for all, not the least of each one's greatest: the window alone accepts 5
     * blocks, the state 4, together only 2 */
    {1, 2, "fws", {"xxxxx", "xx.xx", ".x.x."}, 5, UINT64_MAX, 2, 5},
    {1, 1, "fws", {"xxxxx", "xx.xx", ".x.x."}, 5, UINT64_MAX, 4, 5},
    /* states at some boundaries only */
    {4, 0, "fs", {"xxxx", ".x.."}, 16, UINT64_MAX, 8, 16},
    {4, 0, "fs", {"xxxx", ".x.x"}, 16, 15, 8, 12},
    {4, 0, "fs", {"x.xx", ".x.x"}, 16, UINT64_MAX, 0, 4},
    {4, 0, "s", {"..x."}, 16, UINT64_MAX, 12, 12},
    {4, 0, "ff", {"xxx.", "xx.x"}, 16, UINT64_MAX, 8, 8},
};

static void test_rows(void **state)
{
    (void)state;
    for (size_t r = 0; r < KVT_COUNT_OF(rows); r++) {
        const struct row *row = &rows[r];
        struct kvt_radix *radix = tree_new(1 << 20);
        struct kvt_radix_ns ns = ns_open(radix, row->block_tokens, row->kinds, row->window_tokens);
        uint64_t blocks = strlen(row->cells[0]), fresh;
        struct kvt_radix_block end = insert(radix, ns, tokens, blocks * row->block_tokens, &fresh);
        struct kvt_radix_match got;

        for (uint32_t c = 0; row->kinds[c] != '\0'; c++) {
            for (uint64_t i = 0; i < blocks; i++) {
                char text = row->cells[c][i];
                uint8_t bits = text == 'x' ? 1 : text == 'o' ? 2 : 1u << KVT_RADIX_BIT_HOLD;
                struct kvt_radix_cell cell;

                assert_int_equal(kvt_radix_path(radix, end, c, i, 1, &cell), 0);
                if (text != '.')
                    assert_int_equal(kvt_radix_put(radix, cell.block, c, bits, 1), 0);
            }
        }
        kvt_radix_settle(radix, end);
        check(radix);
        match(radix, ns, tokens, row->prompt_tokens, row->limit_tokens, &got);
        if (got.boundary_tokens != row->boundary || got.full_tokens != row->full)
            fail_msg("row %zu: boundary %lu (want %lu), full %lu (want %lu)", r,
                     (unsigned long)got.boundary_tokens, (unsigned long)row->boundary,
                     (unsigned long)got.full_tokens, (unsigned long)row->full);
        (void)kvt_radix_free(radix);
    }
}

static void test_divergence_inside_a_block(void **state)
{
    struct kvt_radix *radix = tree_new(1 << 20);
    struct kvt_radix_ns ns = ns_open(radix, 4, "f", 0);
    uint32_t other[16];
    struct kvt_radix_match got;

    (void)state;
    (void)store(radix, ns, tokens, 16, 4);
    for (uint32_t at = 0; at < 16; at++) {
        memcpy(other, tokens, sizeof(other));
        other[at] = 7;
        match(radix, ns, other, 16, UINT64_MAX, &got);
        assert_int_equal(got.boundary_tokens, at / 4 * 4);
        assert_int_equal(got.components[0].why, KVT_RADIX_WHY_NO_PATH);
    }
    (void)kvt_radix_free(radix);
}

/* A lease in the middle of a node, over a split, an eviction and a merge. */
static void test_lease_inside_a_node(void **state)
{
    struct kvt_radix *radix = tree_new(1 << 20);
    struct kvt_radix_ns ns = ns_open(radix, 1, "f", 0);
    const struct kvt_radix_victims which = {.ns = ns, .component = UINT32_MAX};
    struct kvt_radix_victim victims[32];
    struct kvt_radix_block end = store(radix, ns, tokens, 10, 1);
    struct kvt_radix_cell leased;
    struct kvt_radix_stats stats;
    uint32_t side[8], count, total = 0;

    (void)state;
    assert_int_equal(kvt_radix_path(radix, end, 0, 5, 1, &leased), 0);
    assert_int_equal(kvt_radix_lease(radix, leased.block), 0);
    memcpy(side, tokens, sizeof(side));
    side[3] = 7;
    (void)store(radix, ns, side, 8, 1);
    check(radix);
    while ((count = kvt_radix_victims(radix, &which, 32, victims)) > 0) {
        for (uint32_t i = 0; i < count; i++)
            assert_int_equal(kvt_radix_drop(radix, victims[i].block, 0, 1, NULL), 0);
        total += count;
        check(radix);
    }
    assert_int_equal(total, 4 + 5); /* behind the lease, and the side branch */
    kvt_radix_stats(radix, &stats);
    assert_int_equal(stats.blocks, 6);
    assert_int_equal(stats.nodes, 1);
    assert_int_equal(stats.merges, 1);
    assert_false(kvt_radix_is_live(radix, end));
    assert_int_equal(kvt_radix_release(radix, end), KVT_RADIX_E_STALE);
    assert_int_equal(kvt_radix_release(radix, leased.block), 0);
    assert_int_equal(kvt_radix_release(radix, leased.block), KVT_RADIX_E_STALE);
    assert_int_equal(kvt_radix_victims(radix, &which, 32, victims), 6);
    assert_int_equal(kvt_radix_block_id(victims[0].block), kvt_radix_block_id(leased.block));
    (void)kvt_radix_free(radix);
}

/* Least recently used first, and leaf before root. */
static void test_order_of_victims(void **state)
{
    struct kvt_radix *radix = tree_new(1 << 20);
    struct kvt_radix_ns ns = ns_open(radix, 1, "f", 0);
    const struct kvt_radix_victims which = {.ns = ns, .component = UINT32_MAX};
    struct kvt_radix_victim victims[8];
    struct kvt_radix_block ends[3];
    uint32_t runs[3][3] = {{1, 2, 3}, {1, 2, 4}, {5, 6, 7}};

    (void)state;
    for (uint32_t i = 0; i < 3; i++)
        ends[i] = store(radix, ns, runs[i], 3, 1);
    kvt_radix_touch(radix, ends[0]);
    assert_int_equal(kvt_radix_victims(radix, &which, 8, victims), 5);
    assert_int_equal(kvt_radix_block_id(victims[0].block), kvt_radix_block_id(ends[1]));
    assert_int_equal(kvt_radix_block_id(victims[1].block), kvt_radix_block_id(ends[2]));
    assert_int_equal(kvt_radix_block_id(victims[4].block), kvt_radix_block_id(ends[0]));
    kvt_radix_defer(radix, &victims[0], 0);
    assert_int_equal(kvt_radix_victims(radix, &which, 1, victims), 1);
    assert_int_equal(kvt_radix_block_id(victims[0].block), kvt_radix_block_id(ends[2]));
    (void)kvt_radix_free(radix);
}

/* One block with bit 0 behind @after. */
static struct kvt_radix_block hang(struct kvt_radix *radix, struct kvt_radix_ns ns,
                                   struct kvt_radix_block after, uint32_t token, bool is_untouched)
{
    const struct kvt_radix_prefix prefix = {.ns = ns,
                                            .after = after,
                                            .tokens = &token,
                                            .tokens_count = 1,
                                            .is_untouched = is_untouched};
    struct kvt_radix_block end;
    uint64_t fresh;

    assert_int_equal(kvt_radix_insert(radix, &prefix, &end, &fresh), 0);
    assert_int_equal(fresh, 1);
    assert_int_equal(kvt_radix_put(radix, end, 0, 1, 1), 0);
    return end;
}

/* An insert below a block uses it, or does not. */
static void test_insert_untouched(void **state)
{
    (void)state;
    for (uint32_t is_untouched = 0; is_untouched < 2; is_untouched++) {
        struct kvt_radix *radix = tree_new(1 << 20);
        struct kvt_radix_ns ns = ns_open(radix, 1, "f", 0);
        const struct kvt_radix_victims which = {.bit = 1, .ns = ns, .component = UINT32_MAX};
        const struct kvt_radix_block first = hang(radix, ns, KVT_RADIX_BLOCK_NONE, 1, false);
        struct kvt_radix_block second;
        struct kvt_radix_victim victim;

        (void)hang(radix, ns, first, 10, false); /* two, so that a third changes no node */
        (void)hang(radix, ns, first, 11, false);
        assert_int_equal(kvt_radix_put(radix, first, 0, 2, 1), 0);
        second = hang(radix, ns, KVT_RADIX_BLOCK_NONE, 2, false);
        assert_int_equal(kvt_radix_put(radix, second, 0, 2, 1), 0);
        (void)hang(radix, ns, first, 12, is_untouched == 1);
        check(radix);
        assert_int_equal(kvt_radix_victims(radix, &which, 1, &victim), 1);
        assert_int_equal(kvt_radix_block_id(victim.block),
                         kvt_radix_block_id(is_untouched == 1 ? first : second));
        (void)kvt_radix_free(radix);
    }
}

/* @count blocks behind @after, an insert each. */
static struct kvt_radix_block follow(struct kvt_radix *radix, struct kvt_radix_ns ns,
                                     struct kvt_radix_block after, uint32_t first, uint32_t count,
                                     bool is_followed)
{
    struct kvt_radix_prefix prefix = {
        .ns = ns, .tokens_count = 64, .is_untouched = true, .is_followed = is_followed};
    struct kvt_radix_block end = after;
    uint64_t fresh;

    for (uint32_t i = 0; i < count; i++) {
        prefix.after = end;
        prefix.tokens = tokens + 64ull * (first + i);
        assert_int_equal(kvt_radix_insert(radix, &prefix, &end, &fresh), 0);
        assert_int_equal(kvt_radix_put(radix, end, 0, 1, 1), 0);
    }
    check(radix);
    return end;
}

/* Room that a leaf took ahead is given back: at its end, and where something hangs below it. */
static void test_insert_followed(void **state)
{
    uint64_t used[2];

    (void)state;
    for (uint32_t i = 0; i < 2; i++) {
        struct kvt_radix *radix = tree_new(4 << 20);
        struct kvt_radix_ns ns = ns_open(radix, 64, "f", 0);
        struct kvt_radix_block fork, end;
        struct kvt_radix_stats stats;
        uint64_t before;

        fork = follow(radix, ns, KVT_RADIX_BLOCK_NONE, 0, 17, i == 1);
        kvt_radix_stats(radix, &stats);
        before = stats.memory_used_bytes;
        end = follow(radix, ns, fork, 100, 5, i == 1);
        kvt_radix_settle(radix, end);
        end = follow(radix, ns, fork, 200, 9, i == 1); /* the node is split, not at its end */
        kvt_radix_settle(radix, end);
        end = follow(radix, ns, end, 300, 70, i == 1); /* through a full node */
        kvt_radix_settle(radix, end);
        check(radix);
        kvt_radix_stats(radix, &stats);
        used[i] = stats.memory_used_bytes;
        assert_true(used[i] > before);
        (void)kvt_radix_free(radix);
    }
    assert_int_equal(used[0], used[1]);
}

/* What is loaded without touching goes in the order in which it came, a path with the last of its
 * leaves: here behind more blocks than a search in the list passes. */
static void test_order_of_untouched(void **state)
{
    enum { OTHERS = 100, NODE = 64 };
    struct kvt_radix *radix = tree_new(4 << 20);
    struct kvt_radix_ns ns = ns_open(radix, 1, "f", 0);
    const struct kvt_radix_victims which = {.ns = ns, .component = UINT32_MAX};
    struct kvt_radix_victim victims[OTHERS + NODE];
    struct kvt_radix_block path[NODE], others[OTHERS], leaf, at = KVT_RADIX_BLOCK_NONE;

    (void)state;
    others[0] = hang(radix, ns, KVT_RADIX_BLOCK_NONE, 500, true);
    others[1] = hang(radix, ns, KVT_RADIX_BLOCK_NONE, 501, true);
    (void)hang(radix, ns, others[0], 502, true); /* makes a node longer: that one is new again */
    assert_int_equal(kvt_radix_victims(radix, &which, 3, victims), 3);
    assert_int_equal(kvt_radix_block_id(victims[0].block), kvt_radix_block_id(others[1]));
    for (uint32_t i = 0; i < 3; i++)
        assert_int_equal(kvt_radix_drop(radix, victims[i].block, 0, 1, NULL), 0);
    for (uint32_t i = 0; i < NODE; i++)
        at = path[i] = hang(radix, ns, at, i, true);
    for (uint32_t i = 0; i < OTHERS; i++)
        others[i] = hang(radix, ns, KVT_RADIX_BLOCK_NONE, 1000 + i, true);
    leaf = hang(radix, ns, at, NODE, true);
    check(radix);
    assert_int_equal(kvt_radix_drop(radix, leaf, 0, 1, NULL), 0);
    check(radix);
    assert_int_equal(kvt_radix_victims(radix, &which, OTHERS + NODE, victims), OTHERS + NODE);
    for (uint32_t i = 0; i < OTHERS; i++)
        assert_int_equal(kvt_radix_block_id(victims[i].block), kvt_radix_block_id(others[i]));
    for (uint32_t i = 0; i < NODE; i++)
        assert_int_equal(kvt_radix_block_id(victims[OTHERS + i].block),
                         kvt_radix_block_id(path[NODE - 1 - i]));
    (void)kvt_radix_free(radix);
}

static void test_detach(void **state)
{
    struct kvt_radix *radix = tree_new(1 << 20);
    struct kvt_radix_ns ns = ns_open(radix, 1, "f", 0);
    struct kvt_radix_block end = store(radix, ns, tokens, 10, 1), again;
    struct kvt_radix_victim cells[16];
    struct kvt_radix_cell cell, at;
    struct kvt_radix_match got;

    (void)state;
    assert_int_equal(kvt_radix_path(radix, end, 0, 4, 1, &at), 0);
    assert_int_equal(kvt_radix_lease(radix, end), 0);
    assert_int_equal(kvt_radix_detach_block(radix, at.block), 0);
    match(radix, ns, tokens, 10, UINT64_MAX, &got);
    assert_int_equal(got.boundary_tokens, 4);
    assert_int_equal(kvt_radix_get(radix, end, 0, &cell), 0);
    assert_false(kvt_radix_is_live(radix, end));
    assert_int_equal(kvt_radix_put(radix, end, 0, 2, 1), KVT_RADIX_E_STALE);
    again = store(radix, ns, tokens, 10, 1);
    check(radix);
    match(radix, ns, tokens, 10, UINT64_MAX, &got);
    assert_int_equal(got.boundary_tokens, 10);
    assert_int_equal(kvt_radix_release(radix, end), 0);
    assert_int_equal(kvt_radix_reap(radix, 4, cells), 4);
    assert_int_equal(kvt_radix_block_id(cells[0].block), kvt_radix_block_id(end));
    assert_int_equal(kvt_radix_reap(radix, 4, cells), 2);
    assert_int_equal(kvt_radix_get(radix, end, 0, &cell), KVT_RADIX_E_STALE);
    assert_true(kvt_radix_is_live(radix, again));
    check(radix);
    (void)kvt_radix_free(radix);
}

/* A row of 100,000 one-block edges, forced by a side branch at each; as many blocks in a row below
 * it; 100,000 children of one node; a million tokens in one edge; all of it taken apart. The row is
 * built without touching what is above: otherwise its time went by the square of its length. */
static void test_adversarial_shapes(void **state)
{
    enum { EDGES = 100000, DEPTH = 200000 };
    struct kvt_radix *radix = tree_new(512u << 20);
    struct kvt_radix_ns ns = ns_open(radix, 1, "f", 0), wide = ns_open(radix, 64, "f", 0);
    struct kvt_radix_prefix prefix = {.ns = ns, .tokens_count = 1, .is_untouched = true};
    struct kvt_radix_block spine = {0}, end;
    struct kvt_radix_stats stats;
    struct kvt_radix_match got;
    const uint32_t other = 7;
    uint64_t fresh, nodes, calls = 0;

    (void)state;
    for (uint32_t i = 0; i < EDGES; i++) {
        prefix.after = spine;
        prefix.tokens = &other;
        assert_int_equal(kvt_radix_insert(radix, &prefix, &end, &fresh), 0);
        prefix.tokens = &tokens[i];
        assert_int_equal(kvt_radix_insert(radix, &prefix, &spine, &fresh), 0);
    }
    kvt_radix_stats(radix, &stats);
    assert_int_equal(stats.nodes, 2 * EDGES);
    end = insert(radix, ns, tokens, DEPTH, &fresh);
    assert_int_equal(fresh, DEPTH - EDGES);
    assert_int_equal(kvt_radix_depth_blocks(radix, end), DEPTH);
    for (uint32_t i = 0; i < EDGES; i++) {
        const uint32_t run = 1000000 + i;

        (void)insert(radix, ns, &run, 1, &fresh);
        assert_int_equal(fresh, 1);
    }
    (void)store(radix, wide, tokens, TOKENS_MAX, 64);
    match(radix, wide, tokens, TOKENS_MAX, UINT64_MAX, &got);
    assert_int_equal(got.boundary_tokens, TOKENS_MAX);
    kvt_radix_detach_ns(radix, ns);
    kvt_radix_stats(radix, &stats);
    for (nodes = stats.nodes; kvt_radix_has_detached(radix); nodes = stats.nodes, calls++) {
        assert_int_equal(kvt_radix_reap(radix, 1, &(struct kvt_radix_victim){0}), 0);
        kvt_radix_stats(radix, &stats);
        assert_true(nodes - stats.nodes <= 1 + 64); /* no call takes the whole tree apart */
    }
    assert_true(calls < 4 * 3 * EDGES / 64); /* down and up again, past every node */
    kvt_radix_stats(radix, &stats);
    assert_int_equal(stats.blocks, TOKENS_MAX / 64);
    check(radix);
    (void)kvt_radix_free(radix);
}

static void test_no_memory(void **state)
{
    struct kvt_radix_config config = {
        .memory_bytes = 1 << 20, .seed = 3, .namespaces_max = 2, .roots_max = 4};
    struct kvt_radix *radix = NULL;

    (void)state;
    for (uint32_t nth = 0; nth < 2; nth++) {
        struct alloc_fault fault = {.fail_at = nth + 1};

        kvt_alloc_set_fault(alloc_fault_nth, &fault);
        assert_int_equal(kvt_radix_new(&radix, &config), -ENOMEM);
        kvt_alloc_set_fault(NULL, NULL);
        assert_null(radix);
    }
    config.memory_bytes = 4096;
    assert_int_equal(kvt_radix_new(&radix, &config), -EINVAL);
    assert_null(kvt_radix_free(NULL));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_rows),
        cmocka_unit_test(test_divergence_inside_a_block),
        cmocka_unit_test(test_lease_inside_a_node),
        cmocka_unit_test(test_order_of_victims),
        cmocka_unit_test(test_insert_untouched),
        cmocka_unit_test(test_insert_followed),
        cmocka_unit_test(test_order_of_untouched),
        cmocka_unit_test(test_detach),
        cmocka_unit_test(test_adversarial_shapes),
        cmocka_unit_test(test_no_memory),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
