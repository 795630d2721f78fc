/* A bump allocator with a hard cap: the memory of one request.
 *
 *   base                used          reserved           cap
 *   |####################|.............|------------------|
 *
 * The address range [base, cap) is reserved once at start with no memory behind it; pages come as
 * they are touched and go back to the system when a reset finds more than `keep_bytes` of them.
 * Nothing is freed on its own; reset frees everything. One owner at a time, who may hand it over.
 * NULL from alloc means the request is larger than its limit: answer RESOURCE_EXHAUSTED. */
#pragma once

#include "daemon/base/def.h"

struct kvt_arena {
    uint8_t *base;
    size_t cap_bytes;
    size_t used_bytes;
    size_t peak_bytes; /* since pages were last given back */
    size_t keep_bytes;
};
#define KVT_ARENA_NULL ((struct kvt_arena){0})

/* Reserves @cap_bytes of address space. -ENOMEM, or 0. */
KVT_MUST_USE int kvt_arena_init(struct kvt_arena *arena, size_t cap_bytes, size_t keep_bytes);
void kvt_arena_deinit(struct kvt_arena *arena);
/* 16-byte aligned and NOT zeroed; NULL when the cap would be passed. */
KVT_MUST_USE void *kvt_arena_alloc(struct kvt_arena *arena, size_t bytes);
/* Zeroed array; NULL on overflow or when the cap would be passed. */
KVT_MUST_USE void *kvt_arena_array(struct kvt_arena *arena, size_t count, size_t bytes);
void kvt_arena_reset(struct kvt_arena *arena);
