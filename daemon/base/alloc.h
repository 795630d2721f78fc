/* Heap memory, taken at start and when a session or namespace is made, never on a hot path.
 *
 * One seam for the whole daemon: tests make the n-th allocation fail through the hook and check
 * that every constructor undoes itself. Any thread may allocate; the hook is set by tests before
 * threads exist. NULL means "no memory" (callers return -ENOMEM). Free with kvt_free only. */
#pragma once

#include "daemon/base/def.h"

/* Returns true when this allocation is to fail. NULL (the default): none fails. */
typedef bool (*kvt_alloc_fault_fn)(size_t bytes, void *ctx);
void kvt_alloc_set_fault(kvt_alloc_fault_fn fn, void *ctx);

/* Zeroed. @count * @bytes may not overflow: that too is NULL. */
KVT_MUST_USE void *kvt_alloc_zeroed(size_t count, size_t bytes);
/* Zeroed; @align a power of two, at least sizeof(void *). */
KVT_MUST_USE void *kvt_alloc_aligned(size_t align, size_t bytes);
/* A copy of @text, or NULL. */
KVT_MUST_USE char *kvt_alloc_text(const char *text);
void kvt_free(void *ptr);

static inline void kvt_free_cleanup(void *ptr_ptr)
{
    void **ptr = ptr_ptr;

    kvt_free(*ptr);
    *ptr = NULL;
}
#define kvt_autofree __attribute__((cleanup(kvt_free_cleanup)))

/* Closes a descriptor held in an int that is -1 when empty; keeps errno. */
void kvt_close_cleanup(const int *fd);
#define kvt_autoclose __attribute__((cleanup(kvt_close_cleanup)))
