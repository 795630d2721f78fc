/* Engine blocks named twice are found, whatever ids a client chooses, by as much work as their
 * count and the size of the memory say; and what a request costs a turn counts them. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "daemon/engine/internal.h"

#define MANY 65536u

/* What a request needs is no more than the hash table of at least 17 bytes an id, which this was
 * instead of. */
static_assert(ENG_IDS_SCRATCH_BYTES == 16, "a request that fits an op's arena goes on to fit it");

struct ids {
    uint64_t at[MANY], scratch[2 * MANY], steps;
};

static uint64_t find(struct ids *ids, uint32_t count, uint64_t limit)
{
    ids->steps = 0;
    return eng_ids_find_twice(ids->at, count, limit, ids->scratch, &ids->steps);
}

static uint64_t next(uint64_t *state)
{
    *state = *state * 6364136223846793005ull + 1442695040888963407ull;
    return *state >> 33 ^ *state << 31;
}

/* Ids that clump in a table with this multiplier as its hash: a search there looked at billions of
 * places. */
static void clump(struct ids *ids)
{
    uint32_t count = 0;

    for (uint64_t id = 0; count < MANY; id++)
        if (id * 0x9e3779b97f4a7c15ull >> 46 < 1024)
            ids->at[count++] = id;
    assert_true(ids->at[MANY - 1] < 1u << 30);
    for (uint32_t i = 0; i < MANY / 2; i++) {
        uint64_t id = ids->at[i];

        ids->at[i] = ids->at[MANY - 1 - i];
        ids->at[MANY - 1 - i] = id;
    }
}

static void test_clumped(void **state)
{
    struct ids *ids = calloc(1, sizeof(*ids));
    uint64_t spread;

    (void)state;
    assert_non_null(ids);
    for (uint32_t i = 0; i < MANY; i++)
        ids->at[i] = i * 0x2545f491ull & ((1u << 30) - 1);
    assert_true(find(ids, MANY, 1u << 30) == KVT_ENGINE_BLOCK_NONE);
    spread = ids->steps;
    clump(ids);
    assert_false(eng_ids_are_rising(ids->at, MANY));
    assert_true(find(ids, MANY, 1u << 30) == KVT_ENGINE_BLOCK_NONE);
    assert_true(ids->steps == spread && ids->steps < 10ull * MANY);
    for (uint32_t i = 1; i < MANY; i = 3 * i) {
        uint64_t before = ids->at[i];

        ids->at[i] = ids->at[MANY - 1 - i];
        assert_true(find(ids, MANY, 1u << 30) == ids->at[i]);
        assert_true(ids->steps == spread);
        ids->at[i] = before;
    }
    free(ids);
}

/* One that is named twice, by comparing each with each. */
static bool is_any_twice(const struct ids *ids, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++)
        for (uint32_t k = 0; k < i; k++)
            if (ids->at[i] != KVT_ENGINE_BLOCK_NONE && ids->at[i] == ids->at[k])
                return true;
    return false;
}

/* Of all sizes of memory and of id; a third of the lists leave engine blocks alone. */
static void test_all_sizes(void **state)
{
    struct ids *ids = calloc(1, sizeof(*ids));
    uint64_t random = 7;
    uint32_t twice = 0, apart = 0;

    (void)state;
    assert_non_null(ids);
    for (uint32_t round = 0; round < 20000; round++) {
        uint32_t count = (uint32_t)(next(&random) % 24), bits = (uint32_t)(next(&random) % 65);
        uint64_t limit = bits == 64 ? UINT64_MAX : 1ull << bits, found;

        for (uint32_t i = 0; i < count; i++)
            ids->at[i] = round % 3 == 0 && next(&random) % 4 == 0 ? KVT_ENGINE_BLOCK_NONE
                                                                  : next(&random) % limit;
        if (count > 2 && round % 2 == 0) /* two that differ in one bit, or not */
            ids->at[next(&random) % count] =
                ids->at[0] == KVT_ENGINE_BLOCK_NONE || bits == 0
                    ? ids->at[0]
                    : (ids->at[0] ^ (next(&random) & 1) << next(&random) % KVT_MIN(bits, 63u)) %
                          limit;
        found = find(ids, count, limit);
        assert_int_equal(found != KVT_ENGINE_BLOCK_NONE, is_any_twice(ids, count));
        assert_true(ids->steps <= 8ull * (2 * count + 256) + count);
        if (eng_ids_are_rising(ids->at, count))
            assert_true(found == KVT_ENGINE_BLOCK_NONE);
        twice += found != KVT_ENGINE_BLOCK_NONE;
        apart += found == KVT_ENGINE_BLOCK_NONE && count > 4;
    }
    assert_true(twice > 1000 && apart > 1000);
    free(ids);
}

static void test_left_alone(void **state)
{
    struct ids *ids = calloc(1, sizeof(*ids));

    (void)state;
    assert_non_null(ids);
    memset(ids->at, 0xff, sizeof(ids->at));
    assert_true(find(ids, MANY, 0) == KVT_ENGINE_BLOCK_NONE);
    assert_true(find(ids, MANY, UINT64_MAX) == KVT_ENGINE_BLOCK_NONE);
    assert_true(eng_ids_are_rising(ids->at, MANY));
    ids->at[MANY - 1] = 5;
    assert_true(find(ids, MANY, 6) == KVT_ENGINE_BLOCK_NONE);
    ids->at[0] = 5;
    assert_true(find(ids, MANY, 6) == 5);
    ids->at[0] = ids->at[1] = KVT_ENGINE_BLOCK_NONE - 1;
    assert_true(find(ids, MANY, UINT64_MAX) == KVT_ENGINE_BLOCK_NONE - 1);
    free(ids);
}

static uint64_t cost_of(enum kvt_op_kind kind, const struct kvt_api_moves *moves, uint32_t count)
{
    struct kvt_op *op = calloc(1, sizeof(*op));
    uint64_t cost;

    assert_non_null(op);
    op->kind = kind;
    if (kind == KVT_OP_PROMOTE) {
        memcpy(op->req.promote.moves, moves, count * sizeof(moves[0]));
        op->req.promote.moves_count = count;
    } else {
        memcpy(op->req.demote.moves, moves, count * sizeof(moves[0]));
        op->req.demote.moves_count = count;
    }
    cost = eng_cost_of(op);
    free(op);
    return cost;
}

/* A turn takes no more requests than it has time for: few moves may name many engine blocks. */
static void test_cost(void **state)
{
    const struct kvt_api_moves few[] = {{.count = 16, .engine_blocks_count = 16},
                                        {.count = 16, .engine_blocks_count = 16}};
    const struct kvt_api_moves many[] = {{.count = 16, .engine_blocks_count = 16},
                                         {.count = 16, .engine_blocks_count = 8192},
                                         {.count = 16, .engine_blocks_count = UINT32_MAX}};

    (void)state;
    for (uint32_t i = 0; i < 2; i++) {
        enum kvt_op_kind kind = i == 0 ? KVT_OP_PROMOTE : KVT_OP_DEMOTE;

        assert_true(cost_of(kind, many, 2) - cost_of(kind, few, 2) >= 8192 - 16);
        assert_true(cost_of(kind, many, 3) - cost_of(kind, many, 2) >= UINT32_MAX);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_clumped),
        cmocka_unit_test(test_all_sizes),
        cmocka_unit_test(test_left_alone),
        cmocka_unit_test(test_cost),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
