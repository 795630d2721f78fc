/* The tables and blocks of a paged engine, without a daemon: what a request takes, keeps and gives
 * back while it computes, and that each byte in the wrong place is seen when a block changes hands.
 */
#include "tests/common/cmocka.h"

#include <string.h>

#include "daemon/base/alloc.h"
#include "tools/kvtier-bench/paged.h"

#define BLOCK_TOKENS 64u
#define EACH 4u /* engine blocks a block of attention */
#define WINDOW_TOKENS 100u
#define POOL_BLOCKS 400u

enum { FULL, WINDOW, STATE };

struct world {
    struct kvt_bench_options options;
    struct kvt_model model;
    struct kvt_workload workload;
    struct kvt_bench_shared *shared;
    struct bench_engine engine;
    struct paged_engine paged;
    struct paged_request request;
    uint64_t own[2];
};

static int set_up(void **state)
{
    struct kvt_model_options model = kvt_model_defaults();
    struct kvt_request request = {
        .input_tokens = 1000, .output_tokens = 40, .ids_count = 2, .session = 7};
    struct world *world = kvt_alloc_zeroed(1, sizeof(*world));
    uint32_t ids[2] = {5, 6};
    char why[128];

    assert_non_null(world);
    world->shared =
        kvt_alloc_zeroed(1, sizeof(*world->shared) + sizeof(struct kvt_bench_worker_shared));
    assert_non_null(world->shared);
    model.preset = "hybrid";
    model.window_tokens = WINDOW_TOKENS;
    model.bytes_per_token = 16;
    model.state_bytes = 600;
    model.layers = 2;
    model.ranks = 2;
    assert_int_equal(kvt_model_make(&world->model, &model, why, sizeof(why)), 0);
    world->options = (struct kvt_bench_options){.is_verifying = true, .chunk_tokens = 512};
    world->workload = (struct kvt_workload){.id_tokens = 512, .seed = 3};
    assert_int_equal(kvt_workload_add(&world->workload, &request, ids), 0);
    request.input_tokens = 1024;
    assert_int_equal(kvt_workload_add(&world->workload, &request, ids), 0);
    world->engine = (struct bench_engine){.options = &world->options,
                                          .model = &world->model,
                                          .workload = &world->workload,
                                          .shared = world->shared};
    world->own[1] = 1;
    world->paged.engine = &world->engine;
    world->paged.own = world->own;
    assert_int_equal(bench_cursors_init(&world->paged.cursors, false), 0);
    assert_int_equal(paged_blocks_init(&world->paged.blocks, &world->engine, &world->paged.stats,
                                       POOL_BLOCKS, NULL),
                     0);
    assert_int_equal(paged_request_init(&world->paged, &world->request), 0);
    *state = world;
    return 0;
}

static int tear_down(void **state)
{
    struct world *world = *state;

    paged_request_deinit(&world->paged, &world->request);
    paged_blocks_deinit(&world->paged.blocks);
    bench_cursors_deinit(&world->paged.cursors);
    kvt_workload_deinit(&world->workload);
    kvt_free(world->shared);
    kvt_free(world);
    return 0;
}

static uint64_t held(const struct world *world)
{
    return POOL_BLOCKS - 1 - world->paged.blocks.pool.free_count;
}

/* A step as the engine makes it. */
static void compute_to(struct world *world, uint64_t tokens)
{
    struct paged_request *request = &world->request;
    uint64_t before, lacks;

    paged_request_slide(&world->paged, request);
    before = held(world);
    lacks = paged_request_lacks(&world->paged, request, tokens);
    paged_request_grow(&world->paged, request, tokens);
    assert_int_equal(held(world), before + lacks);
    paged_request_compute(&world->paged, request, tokens);
}

/* ---- tables ---------------------------------------------------------------------------------- */

static void test_tables_grow_and_slide(void **state)
{
    struct world *world = *state;
    struct paged_request *request = &world->request;

    paged_request_begin(&world->paged, request, 0);
    assert_int_equal(request->total_tokens, 1040);
    assert_int_equal(request->stored_tokens_max, 960);
    compute_to(world, 512);
    assert_int_equal(held(world), 32 + 32 + 1); /* of 8 states passed the last one is kept */
    assert_int_equal(world->paged.stats.computed_blocks, 8 + 8 + 1);
    compute_to(world, 1000);
    /* Before it grew the window had begun at token 412, so at engine block 25. */
    assert_int_equal(request->begins[WINDOW], 25);
    assert_int_equal(request->ends[WINDOW], 63);
    assert_int_equal(held(world), 63 + (63 - 25) + 2); /* the old state goes with the next step */
    compute_to(world, 1016);
    assert_int_equal(request->begins[WINDOW], 900 / 16);
    assert_int_equal(held(world), 64 + (64 - 56) + 1);
    compute_to(world, 1040);
    assert_int_equal(request->computed_tokens, 1040);
    paged_request_drop(&world->paged, request);
    assert_int_equal(held(world), 0);
    assert_int_equal(world->paged.stats.stray_bytes, 0);
    assert_int_equal(world->paged.stats.slid_blocks, 25 + (56 - 25) + 1 + (916 / 16 - 56));
}

static void test_what_is_whole_may_be_stored(void **state)
{
    struct world *world = *state;
    struct paged_request *request = &world->request;
    struct kvt_model_span span;

    paged_request_begin(&world->paged, request, 0);
    compute_to(world, 520);
    span = paged_request_whole(&world->paged, request, FULL, 8);
    assert_int_equal(span.first, 0);
    span = paged_request_whole(&world->paged, request, WINDOW, 8);
    assert_int_equal(span.first, (512 - WINDOW_TOKENS) / BLOCK_TOKENS);
    assert_int_equal(span.end, 8);
    span = paged_request_whole(&world->paged, request, STATE, 8);
    assert_int_equal(span.first, 7);
    span = paged_request_whole(&world->paged, request, FULL, 9); /* not computed whole */
    assert_int_equal(span.first, 9);
    span = paged_request_whole(&world->paged, request, STATE, 7); /* passed in one step */
    assert_int_equal(span.first, 7);
    paged_request_slide(&world->paged, request); /* token 420: block 6 lost its first parts */
    span = paged_request_whole(&world->paged, request, WINDOW, 8);
    assert_int_equal(span.first, 7);
    paged_request_drop(&world->paged, request);
}

static void test_room_for_a_load(void **state)
{
    struct world *world = *state;
    struct paged_request *request = &world->request;
    uint64_t ids[POOL_BLOCKS], boundary = 10 * BLOCK_TOKENS, wanted = 10 * EACH + 7 + 1;

    paged_request_begin(&world->paged, request, 1);
    assert_true(paged_blocks_take(&world->paged.blocks, 0, POOL_BLOCKS - wanted, ids));
    assert_false(paged_request_make_room(&world->paged, request, boundary));
    assert_int_equal(held(world), POOL_BLOCKS - wanted);
    paged_blocks_unref(&world->paged.blocks, ids[0]);
    assert_true(paged_request_make_room(&world->paged, request, boundary));
    /* The window begins at token 540, inside of engine block 33: what lies before is left alone. */
    assert_int_equal(request->begins[WINDOW], 33);
    assert_int_equal(request->tables[WINDOW][32], KVT_BLOCK_NONE);
    assert_int_not_equal(request->tables[WINDOW][33], KVT_BLOCK_NONE);
    assert_int_equal(request->begins[STATE], 9);
    assert_int_equal(request->ends[STATE], 10);
    assert_int_equal(held(world), POOL_BLOCKS - 1);
    paged_request_drop(&world->paged, request);
    assert_int_equal(held(world), POOL_BLOCKS - wanted - 1);
    for (uint64_t i = 1; i < POOL_BLOCKS - wanted; i++)
        paged_blocks_unref(&world->paged.blocks, ids[i]);
    assert_int_equal(world->paged.stats.stray_bytes, 0);
}

static void test_a_preempted_request_leaves_what_ops_use(void **state)
{
    struct world *world = *state;
    struct paged_request *request = &world->request;
    uint64_t id;

    paged_request_begin(&world->paged, request, 0);
    compute_to(world, 128);
    id = request->tables[FULL][3];
    kvt_block_pool_ref(&world->paged.blocks.pool, id); /* a store reads it */
    paged_request_drop(&world->paged, request);
    assert_int_equal(held(world), 1);
    assert_int_equal(world->paged.blocks.blocks[id].content, PAGED_PAYLOAD);
    compute_to(world, 1024); /* again, while the store runs */
    paged_request_drop(&world->paged, request);
    paged_blocks_unref(&world->paged.blocks, id);
    assert_int_equal(held(world), 0);
    assert_int_equal(world->paged.stats.stray_bytes, 0);
    assert_true(world->paged.stats.reused_by_other > 0);
}

static uint8_t *byte_of(struct world *world, uint64_t id, uint32_t rank, uint64_t offset_bytes)
{
    return world->paged.blocks.memory.bases[rank] + id * world->paged.blocks.memory.page_bytes +
           offset_bytes;
}

static void test_kept_blocks_are_left_alone(void **state)
{
    struct world *world = *state;
    struct paged_request *request = &world->request;
    const uint64_t *table = request->tables[FULL];

    paged_request_begin(&world->paged, request, 0);
    compute_to(world, 520);
    paged_request_keep(&world->paged, request, 301);
    assert_int_equal(request->kept_tokens, 288);
    assert_int_equal(held(world), 18);
    assert_true(paged_request_make_room(&world->paged, request, 640));
    assert_int_equal(held(world), 10 * EACH + 7 + 1);
    paged_request_hide_kept(&world->paged, request, 4); /* its last two, of block 4 */
    assert_int_equal(world->paged.blocks.blocks[table[15]].content, PAGED_PAYLOAD);
    assert_int_equal(world->paged.blocks.blocks[table[16]].content, PAGED_GUARD);
    assert_int_equal(world->paged.blocks.blocks[table[17]].content, PAGED_GUARD);
    *byte_of(world, table[17], 1, 0) ^= 1; /* the load did not leave it alone */
    paged_request_show_kept(&world->paged, request);
    assert_int_equal(world->paged.stats.stray_bytes, 1);
    assert_int_equal(world->paged.blocks.blocks[table[17]].content, PAGED_PAYLOAD);
    assert_int_equal(request->kept_tokens, 0);
    paged_request_drop(&world->paged, request);
    assert_int_equal(held(world), 0);
    assert_int_equal(world->paged.stats.stray_bytes, 1);
}

static void test_what_an_op_reads_is_not_hidden(void **state)
{
    struct world *world = *state;
    struct paged_request *request = &world->request;
    uint64_t id;

    paged_request_begin(&world->paged, request, 0);
    compute_to(world, 128);
    id = request->tables[FULL][2];
    kvt_block_pool_ref(&world->paged.blocks.pool, id);
    paged_request_keep(&world->paged, request, 1000); /* no more than was computed */
    assert_int_equal(request->kept_tokens, 128);
    paged_request_hide_kept(&world->paged, request, 0);
    assert_int_equal(world->paged.blocks.blocks[id].content, PAGED_PAYLOAD);
    assert_int_equal(world->paged.blocks.blocks[request->tables[FULL][3]].content, PAGED_GUARD);
    paged_request_keep(&world->paged, request, 0);
    assert_int_equal(held(world), 1);
    paged_blocks_unref(&world->paged.blocks, id);
    assert_int_equal(world->paged.stats.stray_bytes, 0);
}

/* ---- bytes ----------------------------------------------------------------------------------- */

static void test_writes_to_free_blocks_are_seen(void **state)
{
    struct world *world = *state;
    struct paged_blocks *blocks = &world->paged.blocks;
    uint64_t ids[POOL_BLOCKS - 1];

    *byte_of(world, 9, 1, 3) ^= 1;
    assert_true(paged_blocks_take(blocks, 0, POOL_BLOCKS - 1, ids));
    assert_int_equal(world->paged.stats.stray_bytes, 1);
    assert_non_null(strstr(world->shared->first_wrong, "engine block 9 rank 1"));
    *byte_of(world, 0, 0, 0) ^= 1; /* the null block is nobody's, ever */
    paged_blocks_check_fresh(blocks);
    assert_int_equal(world->paged.stats.stray_bytes, 2);
}

static void test_writes_to_computed_blocks_are_seen(void **state)
{
    struct world *world = *state;
    uint64_t id;

    paged_request_begin(&world->paged, &world->request, 0);
    compute_to(world, 64);
    id = world->request.tables[WINDOW][1];
    *byte_of(world, id, 0, 5) ^= 0x80;                                          /* payload */
    *byte_of(world, id, 1, world->paged.blocks.memory.page_bytes - 1) ^= 0x80u; /* beside it */
    paged_request_drop(&world->paged, &world->request);
    assert_int_equal(world->paged.stats.stray_bytes, 2);
}

static void test_what_a_load_may_leave(void **state)
{
    struct world *world = *state;
    struct paged_blocks *blocks = &world->paged.blocks;
    struct paged_block what = {PAGED_MAYBE, FULL, 2, 77, 5};
    uint64_t id;

    assert_true(paged_blocks_take(blocks, FULL, 1, &id));
    paged_blocks_compute(blocks, id, &what);
    paged_blocks_set(blocks, id, &what);
    kvt_kv_memory_guard(&blocks->memory, 1, id); /* came on one rank only */
    paged_blocks_unref(blocks, id);
    assert_int_equal(world->paged.stats.stray_bytes, 0);
    assert_true(paged_blocks_take(blocks, FULL, 1, &id));
    paged_blocks_set(blocks, id, &what);
    *byte_of(world, id, 0, 0) ^= 1; /* neither the guard nor the payload, but by accident */
    paged_blocks_unref(blocks, id);
    assert_int_equal(world->paged.stats.stray_bytes, 1);
    assert_true(paged_blocks_take(blocks, FULL, 1, &id));
    what.content = PAGED_WRONG; /* counted when it came */
    paged_blocks_set(blocks, id, &what);
    *byte_of(world, id, 0, 0) ^= 1;
    paged_blocks_unref(blocks, id);
    assert_int_equal(world->paged.stats.stray_bytes, 1);
}

/* ---- cursors --------------------------------------------------------------------------------- */

static void test_cursors_go_on_where_prompts_do(void **state)
{
    struct world *world = *state;
    struct bench_cursors *cursors = &world->paged.cursors;
    struct kvt_handle handle = {1, 2, 3}, found;

    assert_int_equal(bench_cursor_recall(cursors, &world->workload, 1, 1024, &found), 0);
    bench_cursor_keep(cursors, &world->workload, 0, 960, handle);
    assert_int_equal(bench_cursor_recall(cursors, &world->workload, 1, 1024, &found), 960);
    assert_memory_equal(&found, &handle, sizeof(found));
    assert_int_equal(bench_cursor_recall(cursors, &world->workload, 1, 959, &found), 0);
    world->workload.ids[3] = 9; /* the later prompt parts from it at token 512 */
    assert_int_equal(bench_cursor_recall(cursors, &world->workload, 1, 1024, &found), 0);
    world->workload.ids[3] = 6;
    world->workload.requests[1].session = 8;
    assert_int_equal(bench_cursor_recall(cursors, &world->workload, 1, 1024, &found), 0);
    assert_int_equal(found.boot_id, 0);
    cursors->is_off = true;
    assert_int_equal(bench_cursor_recall(cursors, &world->workload, 0, 1024, &found), 0);
}

#define PAGED_TEST(test) cmocka_unit_test_setup_teardown(test, set_up, tear_down)

int main(void)
{
    const struct CMUnitTest tests[] = {
        PAGED_TEST(test_tables_grow_and_slide),
        PAGED_TEST(test_what_is_whole_may_be_stored),
        PAGED_TEST(test_room_for_a_load),
        PAGED_TEST(test_a_preempted_request_leaves_what_ops_use),
        PAGED_TEST(test_kept_blocks_are_left_alone),
        PAGED_TEST(test_what_an_op_reads_is_not_hidden),
        PAGED_TEST(test_writes_to_free_blocks_are_seen),
        PAGED_TEST(test_writes_to_computed_blocks_are_seen),
        PAGED_TEST(test_what_a_load_may_leave),
        PAGED_TEST(test_cursors_go_on_where_prompts_do),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
