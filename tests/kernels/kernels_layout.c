/* Change of layout: between all pairs of the layouts that vLLM and SGLang name, through every table
 * against loops over bytes with the index formulas of those layouts, for odd sizes and alignments;
 * there and back is the same pool; what is refused. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/args.h"
#include "kernels/shape.h"
#include "tests/common/cmocka.h"
#include "tests/kernels/naive.h"

/* A place in a pool, and how large the pool is: as the formulas below name them. */
struct place {
    uint64_t l, b, n, h; /* layer, page ("block"), token of the page, head */
    uint64_t L, B, N, H;
};

/* vLLM: the letters of the name, slowest first; C is what head_bytes are. */
static uint64_t vllm_lbnhc(const struct place *p)
{
    return ((p->l * p->B + p->b) * p->N + p->n) * p->H + p->h;
}
static uint64_t vllm_lbhnc(const struct place *p)
{
    return ((p->l * p->B + p->b) * p->H + p->h) * p->N + p->n;
}
static uint64_t vllm_lhbnc(const struct place *p)
{
    return ((p->l * p->H + p->h) * p->B + p->b) * p->N + p->n;
}
static uint64_t vllm_blnhc(const struct place *p)
{
    return ((p->b * p->L + p->l) * p->N + p->n) * p->H + p->h;
}
static uint64_t vllm_blhnc(const struct place *p)
{
    return ((p->b * p->L + p->l) * p->H + p->h) * p->N + p->n;
}
static uint64_t vllm_bhlnc(const struct place *p)
{
    return ((p->b * p->H + p->h) * p->L + p->l) * p->N + p->n;
}

/* SGLang's host pool, K or V of it. The first two know no pages: a token has its number in the
 * pool. */
static uint64_t sglang_layer_first(const struct place *p) /* [layer][token][head] */
{
    uint64_t token = p->b * p->N + p->n;

    return (p->l * (p->B * p->N) + token) * p->H + p->h;
}
static uint64_t sglang_page_first(const struct place *p) /* [token][layer][head] */
{
    uint64_t token = p->b * p->N + p->n;

    return (token * p->L + p->l) * p->H + p->h;
}
static uint64_t sglang_page_first_direct(const struct place *p) /* [page][layer][token][head] */
{
    return ((p->b * p->L + p->l) * p->N + p->n) * p->H + p->h;
}
static uint64_t sglang_page_head(const struct place *p) /* [page][head][token][layer] */
{
    return ((p->b * p->H + p->h) * p->N + p->n) * p->L + p->l;
}

/* The table of docs/kernels.md. */
static const struct layout {
    const char *name;
    enum kvt_layout_order order;
    uint64_t (*index)(const struct place *place); /* counts head_bytes */
} layouts[] = {
    {"vLLM LBNHC", KVT_LAYOUT_LAYER_FIRST, vllm_lbnhc},
    {"vLLM LBHNC", KVT_LAYOUT_LAYER_FIRST_HEADS, vllm_lbhnc},
    {"vLLM LHBNC", KVT_LAYOUT_LAYER_SPLIT, vllm_lhbnc},
    {"vLLM BLNHC", KVT_LAYOUT_PAGE_FIRST, vllm_blnhc},
    {"vLLM BLHNC", KVT_LAYOUT_PAGE_FIRST_HEADS, vllm_blhnc},
    {"vLLM BHLNC", KVT_LAYOUT_HEAD_SPLIT, vllm_bhlnc},
    {"SGLang layer_first", KVT_LAYOUT_LAYER_FIRST, sglang_layer_first},
    {"SGLang page_first", KVT_LAYOUT_TOKEN_FIRST, sglang_page_first},
    {"SGLang page_first_direct", KVT_LAYOUT_PAGE_FIRST, sglang_page_first_direct},
    {"SGLang page_head", KVT_LAYOUT_PAGE_HEAD, sglang_page_head},
};
#define LAYOUTS ((uint32_t)KVT_COUNT_OF(layouts))

static void naive_relayout(const struct kvt_relayout *change, const struct layout *from,
                           const struct layout *to, const uint8_t *src, uint8_t *dst)
{
    struct place p = {
        .L = change->layers, .B = change->pages, .N = change->tokens, .H = change->heads};

    for (p.l = 0; p.l < p.L; p.l++) {
        for (p.b = 0; p.b < p.B; p.b++) {
            for (p.n = 0; p.n < p.N; p.n++) {
                for (p.h = 0; p.h < p.H; p.h++) {
                    for (uint64_t i = 0; i < change->head_bytes; i++)
                        dst[to->index(&p) * change->head_bytes + i] =
                            src[from->index(&p) * change->head_bytes + i];
                }
            }
        }
    }
}

static void try_change(const struct kvt_kernels *kernels, const struct layout *from,
                       const struct layout *to, struct kvt_relayout change, uint32_t shift,
                       uint64_t *state)
{
    const uint64_t bytes = kvt_relayout_bytes(&change);
    uint8_t *src_heap = malloc(bytes + shift), *dst_heap = malloc(bytes + shift);
    uint8_t *src = src_heap + shift, *dst = dst_heap + shift, *wanted = malloc(bytes);
    struct kvt_relayout back = change;

    assert_true(src_heap != NULL && dst_heap != NULL && wanted != NULL);
    naive_fill(state, src, bytes);
    naive_relayout(&change, from, to, src, wanted);
    change.src = back.dst = (uintptr_t)src;
    change.dst = back.src = (uintptr_t)dst;
    change.from = back.to = from->order;
    change.to = back.from = to->order;
    assert_int_equal(kernels->relayout(NULL, &change), 0);
    if (memcmp(dst, wanted, bytes) != 0)
        fail_msg("%s: %s to %s: %u layers, %u pages, %u tokens, %u heads of %u bytes",
                 kernels->name, from->name, to->name, change.layers, change.pages, change.tokens,
                 change.heads, change.head_bytes);
    memcpy(wanted, src, bytes);
    memset(src, 0, bytes);
    assert_int_equal(kernels->relayout(NULL, &back), 0);
    assert_memory_equal(src, wanted, bytes);
    free(src_heap);
    free(dst_heap);
    free(wanted);
}

/* Every pair, each with several sizes; in the first no two dimensions are alike. */
static void test_named(void **test_state)
{
    static const uint32_t head_bytes[] = {256, 1, 6, 8, 48, 128, 576};
    const struct kvt_kernels *tables[4];
    uint32_t count = naive_tables(tables);
    uint64_t seed = naive_seed("layout", 4);

    (void)test_state;
    for (uint32_t i = 0; i < count * LAYOUTS * LAYOUTS * 4; i++) {
        uint32_t round = i / count, pair = round % (LAYOUTS * LAYOUTS);
        uint64_t state = seed + round;
        struct kvt_relayout change = {.layers = 2, .pages = 3, .tokens = 5, .heads = 4};

        if (round >= LAYOUTS * LAYOUTS)
            change = (struct kvt_relayout){.layers = 1 + (uint32_t)naive_below(&state, 4),
                                           .pages = 1 + (uint32_t)naive_below(&state, 5),
                                           .tokens = 1 + (uint32_t)naive_below(&state, 17),
                                           .heads = 1 + (uint32_t)naive_below(&state, 5)};
        change.head_bytes = head_bytes[(pair + round) % 7];
        try_change(tables[i % count], &layouts[pair % LAYOUTS], &layouts[pair / LAYOUTS], change,
                   (uint32_t)naive_below(&state, 2), &state);
    }
}

/* Runs longer than a unit of the kernels, and more of them than the few threads of a small grid
 * take at once. */
static void test_long_runs(void **test_state)
{
    static const struct kvt_relayout sizes[] = {
        {.layers = 2, .pages = 2, .tokens = 3, .heads = 2, .head_bytes = 5000},
        {.layers = 2, .pages = 2, .tokens = 37, .heads = 5, .head_bytes = 256},
    };
    const struct kvt_kernels *tables[4];
    uint32_t count = naive_tables(tables);
    uint64_t state = 8;

    (void)test_state;
    for (uint32_t i = 0; i < count * LAYOUTS * KVT_COUNT_OF(sizes); i++) {
        const struct layout *to = &layouts[i / count % LAYOUTS];

        try_change(tables[i % count], &layouts[0], to, sizes[i / count / LAYOUTS], 0, &state);
        try_change(tables[i % count], &layouts[1], to, sizes[i / count / LAYOUTS], 0, &state);
    }
}

/* What two orders have in common is moved in one piece: what the table of docs/kernels.md says. */
static void test_runs(void **test_state)
{
    static const struct {
        uint32_t from, to, tokens, heads; /* how many runs a page of a layer has */
    } rows[] = {
        {KVT_LAYOUT_LAYER_FIRST, KVT_LAYOUT_PAGE_FIRST, 1, 1},
        {KVT_LAYOUT_LAYER_FIRST_HEADS, KVT_LAYOUT_PAGE_FIRST_HEADS, 1, 1},
        {KVT_LAYOUT_LAYER_FIRST, KVT_LAYOUT_TOKEN_FIRST, 16, 1},
        {KVT_LAYOUT_LAYER_FIRST_HEADS, KVT_LAYOUT_HEAD_SPLIT, 1, 4},
        {KVT_LAYOUT_HEAD_SPLIT, KVT_LAYOUT_LAYER_SPLIT, 1, 4},
        {KVT_LAYOUT_LAYER_FIRST, KVT_LAYOUT_LAYER_FIRST_HEADS, 16, 4},
        {KVT_LAYOUT_LAYER_FIRST, KVT_LAYOUT_PAGE_HEAD, 16, 4},
    };
    struct kvt_relayout change = {
        .layers = 3, .pages = 5, .tokens = 16, .heads = 4, .head_bytes = 256};

    (void)test_state;
    for (uint32_t i = 0; i < 2 * KVT_COUNT_OF(rows); i++) {
        struct kvt_shape shape;

        change.from = i % 2 == 0 ? rows[i / 2].from : rows[i / 2].to;
        change.to = i % 2 == 0 ? rows[i / 2].to : rows[i / 2].from;
        shape = kvt_shape_relayout(&change, KVT_SHAPE_BLOCKS_MAX);
        assert_int_equal(shape.run_tokens, rows[i / 2].tokens);
        assert_int_equal(shape.run_heads, rows[i / 2].heads);
        assert_int_equal(shape.runs * shape.run_bytes, 16 * 4 * 256);
    }
}

static void refuse(const struct kvt_relayout *change)
{
    const struct kvt_kernels *tables[4];
    uint32_t count = naive_tables(tables);

    for (uint32_t i = 0; i < count; i++)
        assert_int_equal(tables[i]->relayout(NULL, change), -EINVAL);
}

static void test_refused(void **test_state)
{
    const struct kvt_relayout good = {.src = 1 << 20,
                                      .dst = 2 << 20,
                                      .from = KVT_LAYOUT_LAYER_FIRST,
                                      .to = KVT_LAYOUT_PAGE_FIRST,
                                      .layers = 2,
                                      .pages = 2,
                                      .tokens = 4,
                                      .heads = 2,
                                      .head_bytes = 32};
    struct kvt_relayout change = good;

    (void)test_state;
    change.dst = good.src + kvt_relayout_bytes(&good) - 1;
    refuse(&change);
    change.dst = good.src;
    refuse(&change);
    change = good;
    change.to = KVT_LAYOUT_PAGE_HEAD + 1;
    refuse(&change);
    change = good;
    change.from = 0;
    refuse(&change);
    change = good;
    change.pages = 0;
    refuse(&change);
    change = good;
    change.src = UINT64_MAX - 100;
    refuse(&change);
    change = good;
    change.layers = change.pages = change.tokens = change.heads = change.head_bytes = UINT32_MAX;
    refuse(&change);
    change = good;
    change.tokens = 1u << 16;
    change.heads = 1u << 10; /* a page of a layer of 2 GiB */
    refuse(&change);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_named),
        cmocka_unit_test(test_long_runs),
        cmocka_unit_test(test_runs),
        cmocka_unit_test(test_refused),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
