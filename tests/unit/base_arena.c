/* The arena: a hard cap, alignment, nothing overlaps, and a reset gives pages back. */
#include <string.h>
#include <sys/mman.h>

#include "daemon/base/arena.h"
#include "tests/common/cmocka.h"

static void test_cap_is_hard(void **state)
{
    struct kvt_arena arena;
    uint64_t total = 0;

    (void)state;
    assert_int_equal(kvt_arena_init(&arena, 64 * 1024, 4096), 0);
    assert_null(kvt_arena_alloc(&arena, 64 * 1024 + 1));
    assert_null(kvt_arena_array(&arena, SIZE_MAX / 2, 4));
    for (;;) {
        uint8_t *ptr = kvt_arena_alloc(&arena, 1000);

        if (ptr == NULL)
            break;
        assert_int_equal((uintptr_t)ptr % 16, 0);
        memset(ptr, 0xa5, 1000);
        total += 1000;
    }
    assert_true(total > 60 * 1000 && total <= 64 * 1024);
    assert_null(kvt_arena_alloc(&arena, 1024));
    kvt_arena_reset(&arena);
    assert_non_null(kvt_arena_alloc(&arena, 64 * 1024));
    assert_null(kvt_arena_alloc(&arena, 1));
    kvt_arena_deinit(&arena);
    kvt_arena_deinit(&arena);
}

static void test_no_overlap(void **state)
{
    struct kvt_arena arena;
    uint8_t *parts[100];

    (void)state;
    assert_int_equal(kvt_arena_init(&arena, 1 << 20, 4096), 0);
    for (uint32_t i = 0; i < 100; i++) {
        parts[i] = kvt_arena_alloc(&arena, i + 1);
        assert_non_null(parts[i]);
        memset(parts[i], (int)i, i + 1);
    }
    for (uint32_t i = 0; i < 100; i++) {
        for (uint32_t k = 0; k <= i; k++)
            assert_int_equal(parts[i][k], i);
    }
    kvt_arena_deinit(&arena);
}

static void test_array_is_zeroed_after_reset(void **state)
{
    struct kvt_arena arena;
    uint8_t *dirty;
    uint64_t *array;

    (void)state;
    assert_int_equal(kvt_arena_init(&arena, 1 << 20, 1 << 20), 0);
    dirty = kvt_arena_alloc(&arena, 8192);
    assert_non_null(dirty);
    memset(dirty, 0xff, 8192);
    kvt_arena_reset(&arena);
    array = kvt_arena_array(&arena, 1024, sizeof(*array));
    assert_non_null(array);
    for (uint32_t i = 0; i < 1024; i++)
        assert_int_equal(array[i], 0);
    kvt_arena_deinit(&arena);
}

/* Pages of [base, base + bytes) that have memory behind them. */
static uint64_t resident_pages(const struct kvt_arena *arena, size_t bytes)
{
    unsigned char pages[512];
    uint64_t count = 0;

    assert_true(bytes / 4096 <= sizeof(pages));
    assert_int_equal(mincore(arena->base, bytes, pages), 0);
    for (size_t i = 0; i < bytes / 4096; i++)
        count += pages[i] & 1;
    return count;
}

static void test_reset_gives_pages_back(void **state)
{
    struct kvt_arena arena;
    uint8_t *ptr;

    (void)state;
    assert_int_equal(kvt_arena_init(&arena, 2 << 20, 16384), 0);
    ptr = kvt_arena_alloc(&arena, 2 << 20);
    assert_non_null(ptr);
    memset(ptr, 1, 2 << 20);
    assert_int_equal(resident_pages(&arena, 2 << 20), 512);
    kvt_arena_reset(&arena);
    assert_true(resident_pages(&arena, 2 << 20) <= 4);
    kvt_arena_deinit(&arena);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_cap_is_hard),
        cmocka_unit_test(test_no_overlap),
        cmocka_unit_test(test_array_is_zeroed_after_reset),
        cmocka_unit_test(test_reset_gives_pages_back),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
