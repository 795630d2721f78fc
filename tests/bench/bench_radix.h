/* Shared by the parts of the tree's benchmark. */
#pragma once

#include "radix/radix.h"
#include "tests/bench/bench.h"

#define BENCH_RADIX_BLOCK_TOKENS 64u

/* How the tree is made. */
#define BENCH_RADIX_POPULATED (1u << 0) /* its memory is touched at start */
#define BENCH_RADIX_TAGS (1u << 1)      /* every block has a tag, as with an L3 that is kept */
struct kvt_radix *bench_radix_new(size_t memory_bytes, uint32_t how);
/* full, or full + a window of @window_tokens (0: none). */
struct kvt_radix_ns bench_radix_ns(struct kvt_radix *radix, uint32_t window_tokens);
/* Inserts, gives every new block of every component bit @bits[i % 2], settles; the last block. */
struct kvt_radix_block bench_radix_store(struct kvt_radix *radix,
                                         const struct kvt_radix_prefix *prefix, uint32_t components,
                                         const uint8_t bits[2]);
uint64_t bench_radix_random(uint64_t *state);

void bench_radix_lookup(struct bench *bench, uint32_t rounds);
void bench_radix_insert(struct bench *bench, uint32_t leaves);
void bench_radix_evict(struct bench *bench, uint32_t leaves);
/* Returns 0, or 1 when the file cannot be read. */
int bench_radix_trace(struct bench *bench, const char *path, uint32_t how);
