/* The allocator's seam: zeroed memory, overflow is NULL, and the n-th allocation fails on demand.
 */
#include <string.h>
#include <unistd.h>

#include "daemon/base/alloc.h"
#include "tests/common/cmocka.h"

struct nth {
    uint32_t seen, fail_at;
    size_t last_bytes;
};

static bool fail_nth(size_t bytes, void *ctx)
{
    struct nth *nth = ctx;

    nth->last_bytes = bytes;
    return nth->seen++ == nth->fail_at;
}

static void test_zeroed(void **state)
{
    static const uint8_t zeros[4096];
    kvt_autofree uint8_t *plain = kvt_alloc_zeroed(64, 64);
    kvt_autofree uint8_t *aligned = kvt_alloc_aligned(4096, 4096);
    kvt_autofree uint8_t *empty = kvt_alloc_zeroed(0, 8);

    (void)state;
    assert_non_null(plain);
    assert_non_null(aligned);
    assert_non_null(empty);
    assert_memory_equal(plain, zeros, 4096);
    assert_memory_equal(aligned, zeros, 4096);
    assert_int_equal((uintptr_t)aligned % 4096, 0);
}

static void test_overflow_is_null(void **state)
{
    (void)state;
    assert_null(kvt_alloc_zeroed(SIZE_MAX / 2, 3));
    assert_null(kvt_alloc_zeroed(3, SIZE_MAX / 2));
}

static void test_nth_fails(void **state)
{
    struct nth nth = {.fail_at = 1};
    void *first, *third;
    char *text;

    (void)state;
    kvt_alloc_set_fault(fail_nth, &nth);
    first = kvt_alloc_zeroed(3, 5);
    assert_int_equal(nth.last_bytes, 15);
    assert_null(kvt_alloc_aligned(64, 100));
    assert_int_equal(nth.last_bytes, 100);
    third = kvt_alloc_zeroed(1, 1);
    text = kvt_alloc_text("four");
    kvt_alloc_set_fault(NULL, NULL);

    assert_non_null(first);
    assert_non_null(third);
    assert_string_equal(text, "four");
    assert_int_equal(nth.seen, 4);
    kvt_free(first);
    kvt_free(third);
    kvt_free(text);
}

static void test_text_fails(void **state)
{
    struct nth nth = {.fail_at = 0};

    (void)state;
    kvt_alloc_set_fault(fail_nth, &nth);
    assert_null(kvt_alloc_text("never"));
    kvt_alloc_set_fault(NULL, NULL);
}

static void test_autoclose(void **state)
{
    int fds[2], copy;

    (void)state;
    assert_int_equal(pipe(fds), 0);
    copy = fds[0];
    errno = EBUSY;
    {
        kvt_autoclose int fd = fds[0];
        kvt_autoclose int none = -1;

        assert_true(fd >= 0 && none == -1);
    }
    assert_int_equal(errno, EBUSY);
    assert_int_equal(close(copy), -1);
    assert_int_equal(close(fds[1]), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_zeroed),    cmocka_unit_test(test_overflow_is_null),
        cmocka_unit_test(test_nth_fails), cmocka_unit_test(test_text_fails),
        cmocka_unit_test(test_autoclose),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
