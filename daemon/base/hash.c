#include "daemon/base/hash.h"

#include <openssl/evp.h>
#include <string.h>
#define XXH_STATIC_LINKING_ONLY
#include <xxhash.h>
#if defined(__x86_64__)
#include <xxh_x86dispatch.h>
#endif

static_assert(sizeof(XXH3_state_t) <= sizeof(struct kvt_hash_stream), "the opaque state fits");
static_assert(_Alignof(XXH3_state_t) <= 64, "the opaque state is aligned");

uint64_t kvt_hash64(const void *data, size_t bytes, uint64_t seed)
{
    return XXH3_64bits_withSeed(data, bytes, seed);
}

void kvt_hash_stream_init(struct kvt_hash_stream *stream, uint64_t seed)
{
    XXH3_state_t *state = (XXH3_state_t *)(void *)stream->opaque;

    XXH3_INITSTATE(state);
    KVT_ASSERT(XXH3_64bits_reset_withSeed(state, seed) == XXH_OK);
}

void kvt_hash_stream_update(struct kvt_hash_stream *stream, const void *data, size_t bytes)
{
    KVT_ASSERT(XXH3_64bits_update((XXH3_state_t *)(void *)stream->opaque, data, bytes) == XXH_OK);
}

uint64_t kvt_hash_stream_digest(const struct kvt_hash_stream *stream)
{
    return XXH3_64bits_digest((const XXH3_state_t *)(const void *)stream->opaque);
}

int kvt_sha256(const void *data, size_t bytes, uint8_t ret_digest[KVT_FINGERPRINT_BYTES])
{
    uint8_t digest[EVP_MAX_MD_SIZE];

    if (EVP_Digest(data, bytes, digest, NULL, EVP_sha256(), NULL) != 1)
        return kvt_trace(-EIO);
    memcpy(ret_digest, digest, KVT_FINGERPRINT_BYTES);
    return 0;
}
