/* Change of layout: all nine pairs of orders through every table against five nested loops over
 * bytes, for odd sizes and alignments; there and back is the same pool; what is refused. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/args.h"
#include "tests/common/cmocka.h"
#include "tests/kernels/naive.h"

static const uint32_t orders[] = {KVT_LAYOUT_LAYER_FIRST, KVT_LAYOUT_PAGE_FIRST,
                                  KVT_LAYOUT_HEAD_SPLIT};

/* Where byte @byte of (layer, page, token, head) is, by the order's list of dimensions. */
static uint64_t index_of(const struct kvt_relayout *change, uint32_t order, const uint64_t at[4],
                         uint64_t byte)
{
    const uint64_t layer = at[0], page = at[1], token = at[2], head = at[3];
    const uint64_t layers = change->layers, pages = change->pages, tokens = change->tokens;
    const uint64_t heads = change->heads, bytes = change->head_bytes;

    if (order == KVT_LAYOUT_LAYER_FIRST)
        return (((layer * pages + page) * tokens + token) * heads + head) * bytes + byte;
    if (order == KVT_LAYOUT_PAGE_FIRST)
        return (((page * layers + layer) * tokens + token) * heads + head) * bytes + byte;
    return (((page * heads + head) * layers + layer) * tokens + token) * bytes + byte;
}

static void naive_relayout(const struct kvt_relayout *change, const uint8_t *src, uint8_t *dst)
{
    uint64_t at[4];

    for (at[0] = 0; at[0] < change->layers; at[0]++) {
        for (at[1] = 0; at[1] < change->pages; at[1]++) {
            for (at[2] = 0; at[2] < change->tokens; at[2]++) {
                for (at[3] = 0; at[3] < change->heads; at[3]++) {
                    for (uint64_t i = 0; i < change->head_bytes; i++)
                        dst[index_of(change, change->to, at, i)] =
                            src[index_of(change, change->from, at, i)];
                }
            }
        }
    }
}

static void try_change(const struct kvt_kernels *kernels, struct kvt_relayout change,
                       uint32_t shift, uint64_t *state)
{
    const uint64_t bytes = kvt_relayout_bytes(&change);
    uint8_t *src_heap = malloc(bytes + shift), *dst_heap = malloc(bytes + shift);
    uint8_t *src = src_heap + shift, *dst = dst_heap + shift, *wanted = malloc(bytes);
    struct kvt_relayout back = change;

    assert_true(src_heap != NULL && dst_heap != NULL && wanted != NULL);
    naive_fill(state, src, bytes);
    naive_relayout(&change, src, wanted);
    change.src = back.dst = (uintptr_t)src;
    change.dst = back.src = (uintptr_t)dst;
    back.from = change.to;
    back.to = change.from;
    assert_int_equal(kernels->relayout(NULL, &change), 0);
    assert_memory_equal(dst, wanted, bytes);
    memcpy(wanted, src, bytes);
    memset(src, 0, bytes);
    assert_int_equal(kernels->relayout(NULL, &back), 0);
    assert_memory_equal(src, wanted, bytes);
    free(src_heap);
    free(dst_heap);
    free(wanted);
}

static void test_random(void **test_state)
{
    static const uint32_t head_bytes[] = {1, 6, 8, 48, 128, 256, 576};
    const struct kvt_kernels *tables[4];
    uint32_t count = naive_tables(tables);
    uint64_t seed = naive_seed("layout", 4);

    (void)test_state;
    for (uint32_t i = 0; i < count * 9 * 14; i++) {
        uint32_t round = i / count;
        uint64_t state = seed + round;
        struct kvt_relayout change = {.from = orders[round % 3],
                                      .to = orders[round / 3 % 3],
                                      .layers = 1 + (uint32_t)naive_below(&state, 4),
                                      .pages = 1 + (uint32_t)naive_below(&state, 5),
                                      .tokens = 1 + (uint32_t)naive_below(&state, 17),
                                      .heads = 1 + (uint32_t)naive_below(&state, 5),
                                      .head_bytes = head_bytes[round / 9 % 7]};

        try_change(tables[i % count], change, (uint32_t)naive_below(&state, 2), &state);
    }
}

/* One long run: more than a unit of the kernels. */
static void test_long_runs(void **test_state)
{
    const struct kvt_kernels *tables[4];
    uint32_t count = naive_tables(tables);
    uint64_t state = 8;

    (void)test_state;
    for (uint32_t i = 0; i < count; i++) {
        struct kvt_relayout change = {.from = KVT_LAYOUT_LAYER_FIRST,
                                      .to = KVT_LAYOUT_HEAD_SPLIT,
                                      .layers = 2,
                                      .pages = 2,
                                      .tokens = 3,
                                      .heads = 2,
                                      .head_bytes = 5000};

        try_change(tables[i], change, 0, &state);
        change.to = KVT_LAYOUT_PAGE_FIRST;
        try_change(tables[i], change, 0, &state);
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
    change.to = 4;
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
        cmocka_unit_test(test_random),
        cmocka_unit_test(test_long_runs),
        cmocka_unit_test(test_refused),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
