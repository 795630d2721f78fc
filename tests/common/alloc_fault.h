/* An allocation that fails, for kvt_alloc_set_fault: each in turn, until none is left to fail. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct alloc_fault {
    uint32_t fail_at; /* 1: the first; 0: none */
    uint32_t seen;
};

static inline bool alloc_fault_nth(size_t bytes, void *ctx)
{
    struct alloc_fault *fault = ctx;

    (void)bytes;
    return ++fault->seen == fault->fail_at;
}
