/* The two hashes of the daemon. XXH3 (libxxhash, dispatched to the widest vectors of the running
 * CPU) guards against accidents; SHA-256 (OpenSSL) names things that must not collide. Any thread.
 */
#pragma once

#include "daemon/base/def.h"
#include "daemon/base/limits.h"

/* XXH3-64 of @bytes at @data, with @seed. */
uint64_t kvt_hash64(const void *data, size_t bytes, uint64_t seed);

/* The same value built up piece by piece, and the copy that feeds it: payload is hashed while it
 * is in cache. One state a thread, on its stack. */
struct kvt_hash_stream {
    _Alignas(64) unsigned char opaque[640];
};
void kvt_hash_stream_init(struct kvt_hash_stream *stream, uint64_t seed);
void kvt_hash_stream_update(struct kvt_hash_stream *stream, const void *data, size_t bytes);
uint64_t kvt_hash_stream_digest(const struct kvt_hash_stream *stream);

/* SHA-256; 0 or -EIO when the library refuses. */
KVT_MUST_USE int kvt_sha256(const void *data, size_t bytes,
                            uint8_t ret_digest[KVT_FINGERPRINT_BYTES]);
