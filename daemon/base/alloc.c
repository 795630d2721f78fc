#include "daemon/base/alloc.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static kvt_alloc_fault_fn alloc_fault;
static void *alloc_fault_ctx;

void kvt_alloc_set_fault(kvt_alloc_fault_fn fn, void *ctx)
{
    alloc_fault = fn;
    alloc_fault_ctx = ctx;
}

static bool alloc_must_fail(size_t bytes)
{
    return KVT_UNLIKELY(alloc_fault != NULL) && alloc_fault(bytes, alloc_fault_ctx);
}

void *kvt_alloc_zeroed(size_t count, size_t bytes)
{
    size_t total;

    if (__builtin_mul_overflow(count, bytes, &total) || alloc_must_fail(total))
        return NULL;
    return calloc(1, total == 0 ? 1 : total);
}

void *kvt_alloc_aligned(size_t align, size_t bytes)
{
    void *ptr = NULL;

    KVT_ASSERT(align >= sizeof(void *) && (align & (align - 1)) == 0);
    if (alloc_must_fail(bytes) || posix_memalign(&ptr, align, bytes == 0 ? align : bytes) != 0)
        return NULL;
    memset(ptr, 0, bytes);
    return ptr;
}

char *kvt_alloc_text(const char *text)
{
    size_t bytes = strlen(text) + 1;
    char *copy = kvt_alloc_zeroed(bytes, 1);

    if (copy != NULL)
        memcpy(copy, text, bytes);
    return copy;
}

void kvt_free(void *ptr)
{
    free(ptr);
}

void kvt_close_cleanup(const int *fd)
{
    int saved = errno;

    if (*fd >= 0)
        (void)close(*fd);
    errno = saved;
}
