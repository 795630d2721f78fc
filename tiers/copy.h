/* A copy that hashes what it copied while it is in cache: one pass over memory instead of two.
 * Pure; any thread. The memory of clients is copied by tiers/client.h instead (guarded). */
#pragma once

#include "daemon/base/def.h"
#include "daemon/base/hash.h"

/* The best of 16, 32 and 64 KiB and of two whole passes (tests/bench/bench_host.c). */
#define KVT_COPY_CHUNK_BYTES (64u * 1024u)

/* Copies @bytes and returns XXH3-64 of them. */
uint64_t kvt_copy_hashed(uint8_t *dst, const uint8_t *src, uint64_t bytes);
