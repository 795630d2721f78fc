#include "tiers/copy.h"

#include <string.h>

uint64_t kvt_copy_hashed(uint8_t *dst, const uint8_t *src, uint64_t bytes)
{
    struct kvt_hash_stream hash;

    if (bytes <= KVT_COPY_CHUNK_BYTES) {
        memcpy(dst, src, bytes);
        return kvt_hash64(dst, bytes, 0);
    }
    kvt_hash_stream_init(&hash, 0);
    for (uint64_t at = 0; at < bytes; at += KVT_COPY_CHUNK_BYTES) {
        uint64_t chunk = KVT_MIN(bytes - at, KVT_COPY_CHUNK_BYTES);

        memcpy(dst + at, src + at, chunk);
        kvt_hash_stream_update(&hash, dst + at, chunk);
    }
    return kvt_hash_stream_digest(&hash);
}
