/* An engine's blocks in miniature: ids that are never handed out twice, memory in which components
 * share blocks without touching each other's bytes, and guards that see a single foreign byte. */
#include "tests/common/cmocka.h"

#include <stdlib.h>
#include <string.h>

#include "tools/lib/block_pool.h"
#include "tools/lib/kv_memory.h"
#include "tools/lib/oracle.h"
#include "tools/lib/quant_payload.h"

#define BLOCKS 40u

/* ---- ids ------------------------------------------------------------------------------------- */

static void test_ids_are_handed_out_once(void **state)
{
    struct kvt_block_pool pool;
    uint64_t ids[BLOCKS];
    bool is_seen[BLOCKS] = {false};

    (void)state;
    assert_int_equal(kvt_block_pool_init(&pool, BLOCKS, 5), 0);
    assert_false(kvt_block_pool_take(&pool, 0, BLOCKS, ids)); /* the null block is none of them */
    assert_int_equal(pool.free_count, BLOCKS - 1);
    assert_true(kvt_block_pool_take(&pool, 0, BLOCKS - 1, ids));
    for (uint32_t i = 0; i < BLOCKS - 1; i++) {
        assert_in_range(ids[i], 1, BLOCKS - 1);
        assert_false(is_seen[ids[i]]);
        is_seen[ids[i]] = true;
    }
    assert_false(kvt_block_pool_take(&pool, 1, 1, ids));
    assert_int_equal(pool.reused, 0);
    kvt_block_pool_deinit(&pool);
    kvt_block_pool_deinit(&pool);
}

static void test_a_block_that_an_op_uses_stays_out(void **state)
{
    struct kvt_block_pool pool;
    uint64_t id, again;

    (void)state;
    assert_int_equal(kvt_block_pool_init(&pool, 2, 1), 0);
    assert_true(kvt_block_pool_take(&pool, 0, 1, &id));
    kvt_block_pool_ref(&pool, id);                 /* a store reads it */
    assert_false(kvt_block_pool_unref(&pool, id)); /* preempted */
    assert_false(kvt_block_pool_take(&pool, 1, 1, &again));
    assert_true(kvt_block_pool_unref(&pool, id)); /* quiesced */
    assert_true(kvt_block_pool_take(&pool, 1, 1, &again));
    assert_int_equal(again, id);
    assert_int_equal(pool.reused, 1);
    assert_int_equal(pool.reused_by_other, 1);
    assert_true(kvt_block_pool_unref(&pool, id));
    assert_true(kvt_block_pool_take(&pool, 1, 1, &again));
    assert_int_equal(pool.reused, 2);
    assert_int_equal(pool.reused_by_other, 1);
    kvt_block_pool_deinit(&pool);
}

static void test_many_takes_and_gives(void **state)
{
    struct kvt_block_pool pool;
    uint64_t held[BLOCKS], count = 0, random = 9;

    (void)state;
    assert_int_equal(kvt_block_pool_init(&pool, BLOCKS, 77), 0);
    for (uint32_t step = 0; step < 20000; step++) {
        random = random * 6364136223846793005ull + 1442695040888963407ull;
        if ((random >> 40) % 2 == 0 && count < BLOCKS - 1) {
            assert_true(kvt_block_pool_take(&pool, random >> 60 & 1, 1, &held[count++]));
        } else if (count > 0) {
            uint64_t i = (random >> 33) % count;

            assert_true(kvt_block_pool_unref(&pool, held[i]));
            held[i] = held[--count];
        }
        assert_int_equal(pool.free_count + count, BLOCKS - 1);
    }
    assert_true(pool.reused > pool.reused_by_other && pool.reused_by_other > 0);
    kvt_block_pool_deinit(&pool);
}

/* ---- memory ---------------------------------------------------------------------------------- */

/* Attention in four engine blocks a block, and a state in one: pages are as large as the state's.
 */
static struct kvt_model make_model(void)
{
    struct kvt_model_options options = kvt_model_defaults();
    struct kvt_model model;
    char why[128];

    options.preset = "hybrid";
    options.ranks = 2;
    options.layers = 3;
    options.bytes_per_token = 12;
    options.state_bytes = 606; /* 101 bytes a piece: not even a multiple of a word */
    assert_int_equal(kvt_model_make(&model, &options, why, sizeof(why)), 0);
    return model;
}

static uint64_t unguarded(const struct kvt_kv_memory *memory)
{
    uint64_t bytes = 0;

    for (uint32_t rank = 0; rank < memory->model->ranks; rank++)
        for (uint64_t id = 0; id < memory->blocks_count; id++)
            bytes += kvt_kv_memory_count_unguarded(memory, rank, id);
    return bytes;
}

static void test_components_share_blocks(void **state)
{
    struct kvt_model model = make_model();
    struct kvt_kv_memory memory;

    (void)state;
    assert_int_equal(kvt_kv_memory_init(&memory, &model, BLOCKS, true), 0);
    assert_int_equal(memory.page_bytes, 256); /* 2 x 101, rounded up */
    assert_int_equal(memory.bytes, BLOCKS * kvt_kv_memory_block_bytes(&model));
    assert_int_equal(kvt_kv_memory_piece_offset(&memory, 2, 3), BLOCKS * 256 + 101);
    assert_int_equal(kvt_kv_memory_piece_offset(&memory, 0, 3), BLOCKS * 256 + 32);
    assert_int_equal(unguarded(&memory), 0);
    for (uint32_t c = 0; c < model.components_count; c++) {
        struct kvt_kv_part part = {.rank = 1, .component = c, .id = 7, .key = 1000 + c};

        part.part = model.components[c].engine_blocks_per_block - 1;
        kvt_kv_memory_fill(&memory, &part);
        assert_int_equal(kvt_kv_memory_count_wrong(&memory, &part), 0);
        assert_int_equal(kvt_kv_memory_count_spilled(&memory, &part), 0);
        assert_int_equal(kvt_kv_memory_count_stray(&memory, &part), 0);
        assert_in_range(unguarded(&memory), 1,
                        (uint64_t)model.components[c].pieces_count *
                            model.components[c].piece_bytes);
        kvt_kv_memory_guard(&memory, 1, 7);
        assert_int_equal(unguarded(&memory), 0);
    }
    kvt_kv_memory_deinit(&memory);
    kvt_kv_memory_deinit(&memory);
}

/* What fill makes, piece by piece in memory, is the payload as tiers lay it out. */
static void test_parts_are_the_payload(void **state)
{
    struct kvt_model model = make_model();
    const struct kvt_model_component *component = &model.components[0];
    struct kvt_kv_memory memory;
    uint8_t payload[12 * 64];

    (void)state;
    assert_int_equal(component->block_bytes, sizeof(payload));
    assert_int_equal(kvt_kv_memory_init(&memory, &model, BLOCKS, false), 0);
    for (uint32_t e = 0; e < 4; e++) {
        struct kvt_kv_part part = {.part = e, .id = 30 - e * 7, .key = 55};

        kvt_kv_memory_fill(&memory, &part);
        for (uint32_t piece = 0; piece < component->pieces_count; piece++)
            memcpy(payload + (piece * 4 + e) * component->piece_bytes,
                   memory.bases[0] + kvt_kv_memory_piece_offset(&memory, 0, piece) +
                       part.id * memory.page_bytes,
                   component->piece_bytes);
    }
    assert_int_equal(kvt_oracle_count_wrong(55, 0, payload, sizeof(payload)), 0);
    kvt_kv_memory_deinit(&memory);
}

static void test_single_foreign_bytes_are_seen(void **state)
{
    struct kvt_model model = make_model();
    struct kvt_kv_memory memory;
    struct kvt_kv_part part = {.component = 1, .part = 2, .id = 3, .key = 99};
    uint8_t *first, *rest;
    uint32_t component_piece = model.components[1].piece_bytes;

    (void)state;
    assert_int_equal(kvt_kv_memory_init(&memory, &model, BLOCKS, true), 0);
    first = memory.bases[0] + part.id * memory.page_bytes;
    rest = first + memory.page_bytes - 1;
    *rest ^= 1;
    assert_int_equal(kvt_kv_memory_count_unguarded(&memory, 0, 3), 1);
    kvt_kv_memory_fill(&memory, &part);
    assert_int_equal(kvt_kv_memory_count_wrong(&memory, &part), 0);
    assert_int_equal(kvt_kv_memory_count_spilled(&memory, &part), 1);
    assert_int_equal(kvt_kv_memory_count_stray(&memory, &part), 1);
    *rest ^= 1;
    /* Half loaded: no stray bytes, but wrong ones. */
    kvt_kv_memory_guard(&memory, 0, 3);
    kvt_oracle_fill(99, 2 * component_piece, first, 5);
    assert_true(kvt_kv_memory_count_wrong(&memory, &part) > 0);
    assert_int_equal(kvt_kv_memory_count_stray(&memory, &part), 0);
    /* Another block's payload: nearly all of it is stray. */
    part.key = 98;
    kvt_kv_memory_fill(&memory, &part);
    part.key = 99;
    assert_true(kvt_kv_memory_count_stray(&memory, &part) > 6 * 32 * 9 / 10);
    kvt_kv_memory_deinit(&memory);
}

/* ---- quantised components --------------------------------------------------------------------
 */

static struct kvt_model make_quantised(enum kvt_quant_kind kind)
{
    struct kvt_model_options options = kvt_model_defaults();
    struct kvt_model model;
    char why[128];

    options.preset = "hybrid";
    options.quantise = kind;
    options.bytes_per_token = 10;
    assert_int_equal(kvt_model_make(&model, &options, why, sizeof(why)), KVT_MODEL_E_BAD);
    assert_string_equal(why, "to be quantised, bytes a token must be a multiple of 4 x layers");
    options.bytes_per_token = 512;
    assert_int_equal(kvt_model_make(&model, &options, why, sizeof(why)), 0);
    assert_int_equal(kvt_quant_plane_bytes(&model.components[0].quant),
                     model.components[0].piece_bytes);
    assert_int_equal(model.components[0].quant.heads, 4);
    assert_int_equal(model.components[0].quant.head_dim, 8);
    assert_int_equal(model.components[1].quant.order, KVT_ORDER_HEADS_FIRST);
    assert_int_equal(model.components[2].quant.kind, KVT_QUANT_NONE);
    return model;
}

/* What a daemon does to an engine block on its way in and out. */
static void convert(const struct kvt_kv_memory *memory, const struct kvt_kv_part *part)
{
    const struct kvt_model_component *component = &memory->model->components[part->component];

    for (uint32_t piece = 0; piece < component->pieces_count; piece++)
        assert_int_equal(kvt_quant_payload_convert(
                             &component->quant,
                             memory->bases[part->rank] +
                                 kvt_kv_memory_piece_offset(memory, part->component, piece) +
                                 part->id * memory->page_bytes,
                             component->piece_bytes),
                         0);
}

static void test_what_was_quantised_is_right(void **state)
{
    (void)state;
    for (uint32_t kind = KVT_QUANT_FP8_E4M3; kind <= KVT_QUANT_INT8; kind++) {
        struct kvt_model model = make_quantised((enum kvt_quant_kind)kind);
        struct kvt_kv_memory memory;
        uint8_t *page;

        assert_int_equal(kvt_kv_memory_init(&memory, &model, BLOCKS, true), 0);
        page = memory.bases[0] + 3 * memory.page_bytes;
        for (uint64_t key = 0; key < 40; key++) {
            struct kvt_kv_part part = {.component = key % 2, .part = 2, .id = 3, .key = key};
            struct kvt_kv_part own = part;

            own.may_be_computed = true;
            kvt_kv_memory_fill(&memory, &part);
            assert_int_equal(kvt_kv_memory_count_wrong(&memory, &own), 0);
            /* As it was computed it cannot have come from a daemon. */
            assert_true(kvt_kv_memory_count_wrong(&memory, &part) > 500);
            assert_int_equal(kvt_kv_memory_count_stray(&memory, &part), 0);
            for (uint32_t times = 1; times <= KVT_QUANT_TIMES_MAX + 3; times++) {
                convert(&memory, &part);
                assert_int_equal(kvt_kv_memory_count_wrong(&memory, &part), 0);
                assert_int_equal(kvt_kv_memory_count_wrong(&memory, &own), 0);
                assert_int_equal(kvt_kv_memory_count_stray(&memory, &part), 0);
            }
            page[17] ^= 0x80;
            assert_int_equal(kvt_kv_memory_count_wrong(&memory, &part), 1);
            assert_int_equal(kvt_kv_memory_count_wrong(&memory, &own), 1);
            page[17] ^= 0x80;
            part.key += 1000;
            assert_true(kvt_kv_memory_count_wrong(&memory, &part) > 500);
            part.key -= 1000;
            part.part = 1;
            assert_true(kvt_kv_memory_count_wrong(&memory, &part) > 500);
        }
        kvt_kv_memory_deinit(&memory);
    }
}

/* ---- memory that lies elsewhere -------------------------------------------------------------- */

struct elsewhere {
    struct kvt_kv_store store;
    uint8_t *ranks[2];
    uint64_t bytes_each, written_bytes;
    bool is_joined, is_broken;
};

static int elsewhere_make(struct kvt_kv_store *store, uint32_t ranks, uint64_t bytes_each)
{
    struct elsewhere *elsewhere = KVT_CONTAINER_OF(store, struct elsewhere, store);

    assert_int_equal(ranks, 2);
    elsewhere->bytes_each = bytes_each;
    for (uint32_t rank = 0; rank < 2; rank++)
        elsewhere->ranks[rank] = calloc(1, bytes_each);
    return 0;
}

static int elsewhere_join(struct kvt_kv_store *store)
{
    KVT_CONTAINER_OF(store, struct elsewhere, store)->is_joined = true;
    return 0;
}

static int elsewhere_move(struct kvt_kv_store *store, const struct kvt_kv_pages *pages,
                          bool is_write)
{
    struct elsewhere *elsewhere = KVT_CONTAINER_OF(store, struct elsewhere, store);

    if (elsewhere->is_broken)
        return -EIO;
    for (uint32_t i = 0; i < pages->count; i++) {
        uint64_t at = pages->offset_bytes + i * pages->stride_bytes;
        uint8_t *there = elsewhere->ranks[pages->rank] + at;
        uint8_t *here = pages->bytes + (size_t)i * pages->bytes_each;

        assert_true(at + pages->bytes_each <= elsewhere->bytes_each);
        memcpy(is_write ? there : here, is_write ? here : there, pages->bytes_each);
        elsewhere->written_bytes += is_write ? pages->bytes_each : 0;
    }
    return 0;
}

/* The same bytes at the same places as in memfds, no more written than the payload, foreign bytes
 * seen, and nothing right where nothing can be read. */
static void test_memory_elsewhere_is_the_same(void **state)
{
    struct elsewhere elsewhere = {
        .store = {.make = elsewhere_make, .join = elsewhere_join, .move = elsewhere_move}};
    struct kvt_model model = make_model();
    struct kvt_kv_part part = {.rank = 1, .component = 1, .part = 2, .id = 3, .key = 99};
    struct kvt_kv_memory here, there;

    (void)state;
    assert_int_equal(kvt_kv_memory_init(&here, &model, BLOCKS, true), 0);
    assert_int_equal(kvt_kv_memory_init_store(&there, &model, BLOCKS, true, &elsewhere.store), 0);
    assert_int_equal(kvt_kv_memory_make(&here), 0);
    assert_int_equal(kvt_kv_memory_make(&there), 0);
    assert_int_equal(kvt_kv_memory_join(&there), 0);
    assert_true(elsewhere.is_joined);
    assert_int_equal(elsewhere.bytes_each, here.bytes);
    for (uint32_t rank = 0; rank < 2; rank++)
        assert_memory_equal(elsewhere.ranks[rank], here.bases[rank], here.bytes);
    elsewhere.written_bytes = 0;
    kvt_kv_memory_fill(&here, &part);
    kvt_kv_memory_fill(&there, &part);
    assert_int_equal(elsewhere.written_bytes,
                     2ull * model.layers * model.components[1].piece_bytes);
    assert_memory_equal(elsewhere.ranks[1], here.bases[1], here.bytes);
    assert_int_equal(kvt_kv_memory_count_wrong(&there, &part), 0);
    assert_int_equal(kvt_kv_memory_count_spilled(&there, &part), 0);
    assert_int_equal(kvt_kv_memory_count_stray(&there, &part), 0);
    elsewhere.ranks[1][3 * there.page_bytes + 5] ^= 1;
    elsewhere.ranks[1][4 * there.page_bytes - 1] ^= 1;
    assert_int_equal(kvt_kv_memory_count_wrong(&there, &part), 1);
    assert_int_equal(kvt_kv_memory_count_spilled(&there, &part), 1);
    assert_int_equal(kvt_kv_memory_count_stray(&there, &part), 2);
    elsewhere.is_broken = true;
    assert_true(kvt_kv_memory_count_wrong(&there, &part) > 100);
    assert_true(kvt_kv_memory_count_unguarded(&there, 0, 9) > 700);
    kvt_kv_memory_deinit(&here);
    kvt_kv_memory_deinit(&there);
    free(elsewhere.ranks[0]);
    free(elsewhere.ranks[1]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_ids_are_handed_out_once),
        cmocka_unit_test(test_a_block_that_an_op_uses_stays_out),
        cmocka_unit_test(test_many_takes_and_gives),
        cmocka_unit_test(test_components_share_blocks),
        cmocka_unit_test(test_parts_are_the_payload),
        cmocka_unit_test(test_single_foreign_bytes_are_seen),
        cmocka_unit_test(test_what_was_quantised_is_right),
        cmocka_unit_test(test_memory_elsewhere_is_the_same),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
