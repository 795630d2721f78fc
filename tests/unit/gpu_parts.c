/* The parts of a GPU of L1 that need none: which errors lose a context, staging, the ledger, runs.
 */
#include <string.h>

#include "daemon/base/alloc.h"
#include "tests/common/alloc_fault.h"
#include "tests/common/cmocka.h"
#include "tiers/device/gpu_internal.h"

static void test_sticky(void **state)
{
    static const int lost[] = {201, 214, 220, 226, 700, 702, 709, 710,
                               714, 715, 716, 717, 718, 719, 999};
    uint32_t count = 0;

    (void)state;
    for (size_t i = 0; i < KVT_COUNT_OF(lost); i++)
        assert_true(kvt_cuda_is_sticky(lost[i]));
    for (int error = 0; error < 1000; error++)
        count += kvt_cuda_is_sticky(error);
    assert_int_equal(count, KVT_COUNT_OF(lost));
}

static int answer_of_event; /* what the one event of these tests says */

static int event_query(void *event)
{
    assert_ptr_equal(event, &answer_of_event);
    return answer_of_event;
}

static void test_wait(void **state)
{
    const struct kvt_cuda_calls calls = {.event_query = event_query};

    (void)state;
    for (uint32_t why = 0; why < KVT_GPU_WAITS; why++) {
        answer_of_event = KVT_CUDA_OK;
        assert_int_equal(kvt_gpu_is_over(&calls, &answer_of_event, (enum kvt_gpu_wait)why), 1);
        answer_of_event = KVT_CUDA_NOT_READY;
        assert_int_equal(kvt_gpu_is_over(&calls, &answer_of_event, (enum kvt_gpu_wait)why), 0);
        answer_of_event = KVT_CUDA_ILLEGAL_ADDRESS;
        assert_int_equal(kvt_gpu_is_over(&calls, &answer_of_event, (enum kvt_gpu_wait)why),
                         -KVT_CUDA_ILLEGAL_ADDRESS);
        assert_true(kvt_gpu_is_back(0, (enum kvt_gpu_wait)why));
        assert_false(kvt_gpu_is_back(1, (enum kvt_gpu_wait)why));
    }
}

/* Against a list of who has which chunk. */
static void test_staging(void **state)
{
    enum { CHUNKS = 200, RUNS = 64 };
    struct kvt_gpu_staging staging;
    struct kvt_gpu_run runs[RUNS] = {0}, run;
    uint8_t owner[CHUNKS] = {0};
    uint64_t seed = 12345;

    (void)state;
    assert_int_equal(kvt_gpu_staging_init(&staging, KVT_GPU_CHUNK_BYTES - 1), -EINVAL);
    assert_int_equal(kvt_gpu_staging_init(&staging, CHUNKS * KVT_GPU_CHUNK_BYTES + 5), 0);
    kvt_gpu_staging_reset(&staging, 0xd000000);
    assert_int_equal(kvt_gpu_staging_bytes(&staging), CHUNKS * KVT_GPU_CHUNK_BYTES);
    assert_false(kvt_gpu_staging_take(&staging, CHUNKS * KVT_GPU_CHUNK_BYTES + 1, &run));
    for (uint32_t i = 0; i < 20000; i++) {
        uint32_t r, wanted, first;

        seed = seed * 6364136223846793005u + 1442695040888963407u;
        r = (uint32_t)(seed >> 33) % RUNS;
        wanted = (uint32_t)(seed >> 40) % 24;
        if (runs[r].chunks_count > 0) {
            memset(owner + runs[r].chunk, 0, runs[r].chunks_count);
            kvt_gpu_staging_give(&staging, &runs[r]);
            assert_int_equal(runs[r].chunks_count, 0);
            continue;
        }
        for (first = 0; first + wanted <= CHUNKS; first++)
            if (memchr(owner + first, 1, wanted) == NULL)
                break;
        assert_int_equal(
            kvt_gpu_staging_take(&staging, (uint64_t)wanted * KVT_GPU_CHUNK_BYTES, &runs[r]),
            first + wanted <= CHUNKS);
        if (first + wanted > CHUNKS || wanted == 0)
            continue;
        assert_int_equal(runs[r].chunk, first);
        assert_int_equal(runs[r].address, 0xd000000 + (uint64_t)first * KVT_GPU_CHUNK_BYTES);
        memset(owner + first, 1, wanted);
    }
    kvt_gpu_staging_reset(&staging, 0);
    assert_true(kvt_gpu_staging_take(&staging, CHUNKS * KVT_GPU_CHUNK_BYTES, &run));
    assert_false(kvt_gpu_staging_take(&staging, 1, &run));
    kvt_gpu_staging_deinit(&staging);
    kvt_gpu_staging_deinit(&staging);
}

static void test_ledger(void **state)
{
    struct kvt_slot_key a = {.block_id = 1, .generation = 2, .payload_bytes = 100}, b = a, c = a;
    struct kvt_ledger *ledger;
    uint64_t check = 0;

    (void)state;
    b.generation = 3;
    c.identity = 99; /* not part of what is compared */
    assert_int_equal(kvt_ledger_new(&ledger, 100), 0);
    assert_int_equal(kvt_ledger_get(ledger, 4096, &a, &check), KVT_LEDGER_UNKNOWN);
    kvt_ledger_put(ledger, 4096, &a, true, 77);
    kvt_ledger_put(ledger, 8192, &a, false, 78);
    assert_int_equal(kvt_ledger_get(ledger, 4096, &c, &check), KVT_LEDGER_CHECK);
    assert_int_equal(check, 77);
    assert_int_equal(kvt_ledger_get(ledger, 4096, &b, &check), KVT_LEDGER_OTHER);
    assert_int_equal(kvt_ledger_get(ledger, 8192, &a, &check), KVT_LEDGER_UNCHECKED);
    kvt_ledger_put(ledger, 4096, &b, true, 79);
    assert_int_equal(kvt_ledger_get(ledger, 4096, &a, &check), KVT_LEDGER_OTHER);
    kvt_ledger_forget(ledger, 4096);
    kvt_ledger_forget(ledger, 4096);
    assert_int_equal(kvt_ledger_get(ledger, 4096, &b, &check), KVT_LEDGER_UNKNOWN);
    /* As many slots as it has room for, and then some: what it says is right, or it says nothing.
     */
    for (uint64_t i = 0; i < 200; i++) {
        a.block_id = i;
        kvt_ledger_put(ledger, i * 4096, &a, true, i);
    }
    for (uint64_t i = 0, known = 0; i < 200; i++) {
        a.block_id = i;
        if (kvt_ledger_get(ledger, i * 4096, &a, &check) == KVT_LEDGER_CHECK) {
            assert_int_equal(check, i);
            known++;
        }
        assert_true(i < 199 || known >= 90);
    }
    kvt_ledger_clear(ledger);
    assert_int_equal(kvt_ledger_get(ledger, 4096, &a, &check), KVT_LEDGER_UNKNOWN);
    assert_null(kvt_ledger_free(ledger));
    assert_null(kvt_ledger_free(NULL));
}

static void test_ledger_without_memory(void **state)
{
    struct alloc_fault fault = {0};
    struct kvt_ledger *ledger;

    (void)state;
    kvt_alloc_set_fault(alloc_fault_nth, &fault);
    for (fault.fail_at = 1; fault.fail_at <= 2; fault.fail_at++) {
        fault.seen = 0;
        assert_int_equal(kvt_ledger_new(&ledger, 100), -ENOMEM);
    }
    kvt_alloc_set_fault(NULL, NULL);
}

static void runs_expect(const struct kvt_client_view *view, const struct kvt_gpu_run_at *expected,
                        uint32_t count)
{
    struct kvt_gpu_run_at run;
    struct kvt_gpu_runs runs;

    kvt_gpu_runs_init(&runs, view, 0);
    for (uint32_t i = 0; i < count; i++) {
        assert_true(kvt_gpu_runs_next(&runs, &run));
        assert_int_equal(run.address, expected[i].address);
        assert_int_equal(run.payload_offset, expected[i].payload_offset);
        assert_int_equal(run.bytes, expected[i].bytes);
    }
    assert_false(kvt_gpu_runs_next(&runs, &run));
    assert_false(kvt_gpu_runs_next(&runs, &run));
}

static void test_runs(void **state)
{
    struct kvt_layout_piece pieces[] = {
        {.bytes = 100, .stride_bytes = 100, .base = (uint8_t *)1000},
        {.bytes = 100, .stride_bytes = 100, .base = (uint8_t *)1300},
        {.bytes = 50, .stride_bytes = 60, .base = (uint8_t *)9000}};
    struct kvt_layout layout = {.pieces = pieces, .pieces_count = 3, .engine_blocks_per_block = 3};
    uint64_t dense[] = {0, 1, 2}, holes[] = {KVT_ENGINE_BLOCK_NONE, 1, KVT_ENGINE_BLOCK_NONE},
             none[] = {KVT_ENGINE_BLOCK_NONE, KVT_ENGINE_BLOCK_NONE, KVT_ENGINE_BLOCK_NONE};
    struct kvt_client_view view = {.layout = &layout, .engine_blocks = dense, .end_piece = 2};

    (void)state;
    runs_expect(&view, &(struct kvt_gpu_run_at){1000, 0, 600}, 1);
    view.end_piece = 3;
    runs_expect(&view,
                (struct kvt_gpu_run_at[]){
                    {1000, 0, 600}, {9000, 600, 50}, {9060, 650, 50}, {9120, 700, 50}},
                4);
    assert_true(kvt_gpu_runs_are_few(&view, 4, 50));
    assert_false(kvt_gpu_runs_are_few(&view, 3, 50));
    assert_false(kvt_gpu_runs_are_few(&view, 4, 51));
    view.engine_blocks = holes;
    runs_expect(&view,
                (struct kvt_gpu_run_at[]){{1100, 100, 100}, {1400, 400, 100}, {9060, 650, 50}}, 3);
    view.engine_blocks = none;
    runs_expect(&view, NULL, 0);
    assert_true(kvt_gpu_runs_are_few(&view, 4, 50));
}

static void test_extents(void **state)
{
    const struct kvt_gpu_extent many = {1024, 128, 16, 1024 * 128, 1024 * 128};
    const struct kvt_gpu_extent few = {17, 1, 1 << 20, 17, 17 << 14};
    const struct kvt_gpu_extent small = {64, 4, 2048, 256, 256 * 32};
    const struct kvt_gpu_extent odd = {2048, 512, 131072, 2048 * 512, 2048 * 512};
    const struct kvt_gpu_extent huge = {1, 1, KVT_COPY_PIECE_BYTES_MAX + 1, 1, 1 << 24};
    struct kvt_layout_piece pieces[] = {{.bytes = 1}, {.bytes = 65}, {.bytes = 64}};
    struct kvt_layout layout = {.pieces = pieces, .pieces_count = 3, .engine_blocks_per_block = 5};
    struct kvt_client_view view = {.layout = &layout, .first_piece = 1, .end_piece = 3};
    struct kvt_gpu_extent joint = kvt_gpu_lists_extent(&view);

    (void)state;
    assert_int_equal(joint.pieces_max, 2);
    assert_int_equal(joint.blocks_max, 5);
    assert_int_equal(joint.piece_bytes_max, 65);
    assert_int_equal(joint.parts, 10);
    assert_int_equal(joint.chunks, 15);
    assert_true(kvt_gpu_lists_can_launch(&many) && kvt_gpu_lists_can_launch(&few));
    assert_false(kvt_gpu_lists_can_launch(&odd) || kvt_gpu_lists_can_launch(&huge));
    joint = kvt_gpu_lists_joint(&many, &few);
    assert_false(kvt_gpu_lists_can_launch(&joint) || kvt_gpu_lists_is_dense(&joint));
    joint = kvt_gpu_lists_joint(&small, &few);
    assert_true(kvt_gpu_lists_can_launch(&joint) && kvt_gpu_lists_is_dense(&joint));
    joint = (struct kvt_gpu_extent){0};
    for (uint32_t i = 0; i < 64; i++) { /* many of one kind are no waste */
        joint = kvt_gpu_lists_joint(&joint, &few);
        assert_true(kvt_gpu_lists_is_dense(&joint));
    }
    /* Small enough for the kernels, and still nearly all of it would be nothing. */
    joint = kvt_gpu_lists_joint(&many, &(struct kvt_gpu_extent){17, 1, 1 << 19, 17, 17 << 13});
    assert_true(kvt_gpu_lists_can_launch(&joint));
    assert_false(kvt_gpu_lists_is_dense(&joint));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_sticky),
        cmocka_unit_test(test_wait),
        cmocka_unit_test(test_staging),
        cmocka_unit_test(test_ledger),
        cmocka_unit_test(test_ledger_without_memory),
        cmocka_unit_test(test_runs),
        cmocka_unit_test(test_extents),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
