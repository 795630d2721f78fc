/* What kvtier-ctl prints, against golden text: alignment, wording, box lines, and that nothing a
 * client chose reaches a terminal as a control sequence. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "tests/common/ctl_page.h"

/* Every one of @parts is on the page. */
static void page_contains(struct page *page, const char *const parts[], size_t count)
{
    (void)fclose(page->view.out);
    for (size_t i = 0; i < count; i++)
        if (strstr(page->text, parts[i]) == NULL)
            fail_msg("no '%s' in:\n%s", parts[i], page->text);
    free(page->text);
}

static void fill_ns(struct kvt_api_ns_stats *ns)
{
    *ns = (struct kvt_api_ns_stats){
        .fingerprint = {0x3f, 0x2a, 0x10, 0x99, 0xab, 0xcd},
        .model = TEXT("tiny"),
        .revision = TEXT("r1"),
        .dtype = TEXT("bf16"),
        .epoch = 3,
        .block_tokens = 64,
        .ranks = 2,
        .components_count = 2,
        .components = {{.kind = 1, .bytes_per_block = 1 << 20, .name = TEXT("attn")},
                       {.kind = 2,
                        .bytes_per_block = 65536,
                        .quant = {.kind = 1, .elem = 2, .order = 1},
                        .window_tokens = 127}},
        .roots = 1,
        .nodes = 2,
        .blocks = 1234,
        .copies_at = {{0, 12, 34}, {0, 5, 0}},
        .stored_bytes = {1 << 20, 33280},
        .lookup_tokens = 2000,
        .hit_tokens = 500,
    };
}

static void fill_stats(struct kvt_ans_stats *stats, struct kvt_api_ns_stats *ns)
{
    static struct kvt_api_counter counters[] = {
        {"lookups", "", 17},
        {"component_hit_tokens", "kind=full,tier=l2", 500},
        {"component_hit_tokens", "kind=full,tier=l3", 64},
        {"promoted_bytes", "", 3 << 20},
        {"resets", "", 0},
    };

    static struct kvt_api_engine_stats engine = {
        .engine_id = {0xab, 0xcd, 0xef, 0x01, 0x23},
        .name = TEXT("vllm\033 pid 7"),
        .sessions = 3,
        .leases = 2,
        .tickets = 1,
        .leased_bytes = 8 << 20,
        .reserved_bytes = 512 << 10,
        .held_bytes = 24 << 20,
        .lookup_tokens = 4000,
        .hit_tokens = 3000,
        .promoted_bytes = 96 << 20,
        .demoted_bytes = 32 << 20,
        .lookups = 1234,
        .promotes = 21,
        .demotes = 13,
        .missed_moves = 5,
        .ops_running = 4,
    };

    fill_ns(ns);
    *stats = (struct kvt_ans_stats){
        .boot_id = 7,
        .uptime_ns = 3723 * KVT_NS_PER_S,
        .version = TEXT("0.1.0"),
        .index_memory_bytes = 128 << 20,
        .index_used_bytes = 32 << 20,
        .blocks = 1234,
        .nodes = 2,
        .sessions = 2,
        .leases = 1,
        .tiers_count = 2,
        .tiers = {{.tier = 2,
                   .capacity_bytes = 1 << 30,
                   .used_bytes = 256 << 20,
                   .copies = 17,
                   .hit_tokens = 500,
                   .detail = TEXT("memfd")},
                  {.tier = 3,
                   .health = 1,
                   .capacity_bytes = 4096,
                   .errors = 9,
                   .detail = TEXT("bad \033[31mdisk")}},
        .namespaces_count = 1,
        .namespaces = ns,
        .engines_count = 1,
        .engines = &engine,
        .counters_count = KVT_COUNT_OF(counters),
        .counters = counters,
    };
}

static void test_clean(void **state)
{
    char buf[KVT_CTL_TEXT_BYTES];
    char longer[400];

    (void)state;
    assert_string_equal(kvt_ctl_clean(buf, TEXT("plain é 模")), "plain é 模");
    assert_string_equal(kvt_ctl_clean(buf, TEXT("a\033[2Jb\n")), "a\\x1b[2Jb\\x0a");
    assert_string_equal(kvt_ctl_clean(buf, TEXT("\xc2\x9b"
                                                "31m")),
                        "\\xc2\\x9b31m"); /* C1 */
    assert_string_equal(kvt_ctl_clean(buf, TEXT("\xe2\x80\xae")), "\\xe2\\x80\\xae");
    assert_string_equal(kvt_ctl_clean(buf, TEXT("\xff\xc3")), "\\xff\\xc3");
    assert_string_equal(kvt_ctl_clean(buf, TEXT("\xc0\xaf")), "\\xc0\\xaf"); /* overlong */
    memset(longer, 'x', sizeof(longer));
    (void)kvt_ctl_clean(buf, (struct kvt_text){longer, sizeof(longer)});
    assert_true(strlen(buf) < KVT_CTL_TEXT_BYTES);
    assert_string_equal(buf + strlen(buf) - 2, "..");
    memset(longer, '\033', sizeof(longer));
    (void)kvt_ctl_clean(buf, (struct kvt_text){longer, sizeof(longer)});
    assert_true(strlen(buf) < KVT_CTL_TEXT_BYTES);
}

static void test_stats_page(void **state)
{
    static const char *const parts[] = {
        "kvtierd 0.1.0, up 1 h 02 min",
        "  L2    256.0 MiB   1.0 GiB  25      17",
        "  L2 ok: memfd\n",
        "  L3 out of service: bad \\x1b[31mdisk\n",
        "index     32.0 MiB of 128.0 MiB (25 %): 1,234 blocks in 2 nodes",
        "now       2 sessions, 0 requests, 1 leases, 0 tickets",
        "3f2a1099abcd  tiny   r1        bf16      64      2      3   1,234",
        "25.0 %",
        "attn 1.0 MiB, window(127) 64.0 KiB as 32.5 KiB of fp8_e4m3",
        "leases   leased      held  tickets   reserved\n"
        "  abcdef01  vllm\\x1b pid 7  3f2a1099abcd         3    4       2  8.0 MiB  24.0 MiB       "
        " 1  "
        "512.0 KiB\n",
        "lookups  asked tokens  hit tokens     hit  promotes  promoted  missed  demotes   demoted\n"
        "  abcdef01    1,234         4,000       3,000  75.0 %        21  96.0 MiB       5       "
        "13  "
        "32.0 MiB\n",
        "component_hit_tokens  kind=full tier=l2          500",
        "                      kind=full tier=l3           64",
        "promoted_bytes                               3.0 MiB",
        "1 more are 0",
    };
    static const char *const nobody[] = {"none is attached"};
    struct kvt_api_ns_stats ns;
    struct kvt_ans_stats stats;
    struct page page;

    (void)state;
    fill_stats(&stats, &ns);
    page_open(&page);
    kvt_ctl_view_stats(&page.view, &stats);
    page_contains(&page, parts, KVT_COUNT_OF(parts));
    stats.engines_count = 0;
    page_open(&page);
    kvt_ctl_view_stats(&page.view, &stats);
    page_contains(&page, nobody, 1);
}

static void test_rates(void **state)
{
    static const char *const parts[] = {"1,000/s looked up, 250/s hit (25.0 %)",
                                        "lookups              5.0", "1.0 MiB"};
    static const char *const restarted[] = {"the daemon was restarted"};
    struct kvt_api_ns_stats ns, ns_before;
    struct kvt_ans_stats stats, before;
    struct kvt_api_counter counters[] = {{"lookups", "", 7}};
    struct page page;

    (void)state;
    fill_stats(&stats, &ns);
    fill_stats(&before, &ns_before);
    ns_before.lookup_tokens = ns_before.hit_tokens = 0;
    before.counters = counters;
    before.counters_count = 1;
    stats.counters_count = 1;
    stats.tiers[0].read_bytes = 2 << 20;
    page_open(&page);
    kvt_ctl_view_rates(&page.view, &before, &stats, 2 * KVT_NS_PER_S);
    page_contains(&page, parts, KVT_COUNT_OF(parts));
    before.boot_id++;
    page_open(&page);
    kvt_ctl_view_rates(&page.view, &before, &stats, 2 * KVT_NS_PER_S);
    page_contains(&page, restarted, 1);
}

static void test_explain_page(void **state)
{
    struct kvt_api_ns_stats ns;
    struct kvt_ctl_prompt prompt = {.ns = &ns, .tokens_count = 200, .tiers = KVT_TIER_BITS_ALL};
    struct kvt_ans_lookup answer = {
        .boundary_tokens = 64,
        .path_tokens = 192,
        .branch_tokens = 128,
        .components_count = 2,
        .components = {{.alone_tokens = 128, .why = KVT_WHY_NEVER_STORED, .why_block_idx = 2},
                       {.alone_tokens = 64, .why = KVT_WHY_EVICTED, .why_block_idx = 1}},
    };
    struct page page;

    (void)state;
    fill_ns(&ns);
    page_open(&page);
    kvt_ctl_view_explain(&page.view, &prompt, &answer);
    page_expect(
        &page,
        "namespace   3f2a1099abcd tiny\n"
        "prompt      200 tokens: 3 blocks of 64, and 8 tokens that fill no block\n"
        "boundary    64 tokens (32.0 % of the prompt): an engine resumes there\n"
        "known       192 tokens of it are in the tree, resident or not\n"
        "branch      full attention alone would go on to 128: storing the other components there "
        "makes it a boundary\n"
        "\n"
        "attn (full)\n"
        "  accepts   a boundary when every block before it is resident\n"
        "  reaches   128 tokens alone\n"
        "  stopped   never stored, or forgotten, at block 2 (tokens from 128)\n"
        "  remedy    These tokens are not in the tree. If a hit was expected, compare the prompt "
        "with what was stored: a date or an id near the beginning, another chat template, salt, "
        "LoRA or namespace. See in 'stats' that the engine demotes at all.\n"
        "\n"
        "window (window)\n"
        "  accepts   a boundary when the blocks of the 127 tokens before it are resident\n"
        "  reaches   64 tokens alone\n"
        "  stopped   evicted, at block 1 (tokens from 64)\n"
        "  remedy    The window's blocks behind this position went for room. Store them again "
        "there (it heals), or give L2 or L3 more room.\n");
}

static void test_lookup_page(void **state)
{
    static const char *const parts[] = {
        "boundary    128 tokens (100.0 % of the prompt)",
        "promote     about 1.50 ms",
        "component     needs  L1 tokens  L2 tokens  L3 tokens  alone it would reach",
        "attn       2 blocks          0         64        128                   128",
    };
    struct kvt_api_ns_stats ns;
    struct kvt_ctl_prompt prompt = {.ns = &ns, .tokens_count = 128};
    struct kvt_ans_lookup answer = {
        .boundary_tokens = 128,
        .path_tokens = 128,
        .branch_tokens = 128,
        .estimate_us = 1500,
        .components_count = 2,
        .components = {{.alone_tokens = 128, .needed_blocks = 2, .tokens_at = {0, 64, 128}}},
    };
    struct page page;

    (void)state;
    fill_ns(&ns);
    page_open(&page);
    kvt_ctl_view_lookup(&page.view, &prompt, &answer);
    page_contains(&page, parts, KVT_COUNT_OF(parts));
}

static struct kvt_api_dump_node node(uint32_t depth, uint64_t first, uint32_t blocks,
                                     uint32_t children)
{
    return (struct kvt_api_dump_node){.depth_nodes = depth,
                                      .first_block_idx = first,
                                      .blocks_count = blocks,
                                      .children_count = children,
                                      .first_tokens = {1, 2, 3, 4},
                                      .components_count = 2,
                                      .blocks_at = {{0, blocks, 0}, {0, 0, 0}}};
}

static void test_tree_page(void **state)
{
    struct kvt_api_ns_stats ns;
    struct kvt_ans_stats stats;
    struct kvt_api_dump_node nodes[] = {node(0, 0, 10, 2), node(1, 10, 1, 1), node(2, 11, 1, 0),
                                        node(1, 10, 3, 0), node(0, 0, 2, 0)};
    struct kvt_ctl_tree tree = {.stats = &stats, .nodes = nodes, .nodes_count = 5, .depth_max = 8};
    struct page page;

    (void)state;
    fill_stats(&stats, &ns);
    nodes[4].salt = TEXT("s");
    nodes[3].leases = 1;
    page_open(&page);
    kvt_ctl_view_tree(&page.view, &tree);
    page_expect(&page, "3f2a1099abcd tiny\n"
                       "└─ blocks 0-9 [1 2 3 4 ..]  attn L2:10  window none\n"
                       "   ├─ block 10 [1 2 3 4 ..]  attn L2:1  window none\n"
                       "   │  └─ block 11 [1 2 3 4 ..]  attn L2:1  window none\n"
                       "   └─ blocks 10-12 [1 2 3 4 ..]  attn L2:3  window none  1 leases\n"
                       "3f2a1099abcd tiny salt=s\n"
                       "└─ blocks 0-1 [1 2 3 4 ..]  attn L2:2  window none\n");
    tree.depth_max = 2;
    tree.nodes_count = 4;
    tree.is_cut = true;
    page_open(&page);
    kvt_ctl_view_tree(&page.view, &tree);
    page_expect(&page, "3f2a1099abcd tiny\n"
                       "└─ blocks 0-9 [1 2 3 4 ..]  attn L2:10  window none\n"
                       "   ├─ block 10 [1 2 3 4 ..]  attn L2:1  window none  +1 children below "
                       "(--depth)\n"
                       "   └─ blocks 10-12 [1 2 3 4 ..]  attn L2:3  window none  1 leases\n"
                       "... there are more nodes: --nodes shows more than 4\n");
}

static void test_colors(void **state)
{
    struct page page;

    (void)state;
    assert_false(kvt_ctl_wants_color(KVT_CTL_COLOR_AUTO, false, NULL));
    assert_true(kvt_ctl_wants_color(KVT_CTL_COLOR_AUTO, true, NULL));
    assert_true(kvt_ctl_wants_color(KVT_CTL_COLOR_AUTO, true, ""));
    assert_false(kvt_ctl_wants_color(KVT_CTL_COLOR_AUTO, true, "1"));
    assert_true(kvt_ctl_wants_color(KVT_CTL_COLOR_ALWAYS, false, "1"));
    page_open(&page);
    page.view.is_color = true;
    kvt_ctl_paint(&page.view, KVT_CTL_PAINT_BAD, "%d", 5);
    page_expect(&page, "\033[31m5\033[0m");
}

static void test_pick_ns(void **state)
{
    const struct kvt_api_ns_stats *found = NULL;
    struct kvt_api_ns_stats two[2];
    struct kvt_ans_stats stats = {.namespaces_count = 2, .namespaces = two};
    char said[512] = "";
    FILE *err = fmemopen(said, sizeof(said), "w");

    (void)state;
    fill_ns(&two[0]);
    fill_ns(&two[1]);
    two[1].fingerprint[5] = 0xce;
    assert_int_equal(kvt_ctl_pick_ns(&stats, "3F2A1099abce", err, &found), KVT_CTL_OK);
    assert_ptr_equal(found, &two[1]);
    assert_int_equal(kvt_ctl_pick_ns(&stats, "3f2", err, &found), KVT_CTL_USAGE);
    assert_int_equal(kvt_ctl_pick_ns(&stats, NULL, err, &found), KVT_CTL_USAGE);
    assert_int_equal(kvt_ctl_pick_ns(&stats, "0", err, &found), KVT_CTL_NEGATIVE);
    stats.namespaces_count = 1;
    assert_int_equal(kvt_ctl_pick_ns(&stats, NULL, err, &found), KVT_CTL_OK);
    stats.namespaces_count = 0;
    assert_int_equal(kvt_ctl_pick_ns(&stats, NULL, err, &found), KVT_CTL_NEGATIVE);
    (void)fclose(err);
    assert_non_null(strstr(said, "3f2a1099abce0000  tiny"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_clean),       cmocka_unit_test(test_stats_page),
        cmocka_unit_test(test_rates),       cmocka_unit_test(test_explain_page),
        cmocka_unit_test(test_lookup_page), cmocka_unit_test(test_tree_page),
        cmocka_unit_test(test_colors),      cmocka_unit_test(test_pick_ns),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
