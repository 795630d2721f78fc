/* A copy that hashes what it copied while it is in cache: one pass over memory instead of two.
 * Pure; any thread. The memory of clients is copied by tiers/client.h instead (guarded). */
#pragma once

#include "daemon/base/def.h"
#include "daemon/base/hash.h"

/* Big enough that the hash's set-up does not count, small enough to stay in the first caches. */
#define KVT_COPY_CHUNK_BYTES (32u * 1024u)

/* Copies @bytes and returns XXH3-64 of them. */
uint64_t kvt_copy_hashed(uint8_t *dst, const uint8_t *src, uint64_t bytes);
