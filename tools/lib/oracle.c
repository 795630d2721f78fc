/* The generator is a counter run through a multiply-shift mix, two 64-bit multiplications a word:
 * it must keep up with the copies it watches. Statistical beauty is not needed; that different keys
 * give different words is. */
#include "tools/lib/oracle.h"

#include <string.h>

#include "daemon/base/hash.h"

static inline uint64_t mix(uint64_t x)
{
    x ^= x >> 32;
    x *= 0xD6E8FEB86659FD93ull;
    x ^= x >> 32;
    x *= 0xD6E8FEB86659FD93ull;
    x ^= x >> 32;
    return x;
}

static inline uint64_t word_of(uint64_t key, uint64_t word_idx)
{
    return mix(key + word_idx * 0x9E3779B97F4A7C15ull);
}

uint64_t kvt_oracle_root(const uint8_t fingerprint[KVT_FINGERPRINT_BYTES], const char *salt,
                         const char *lora)
{
    uint64_t root = kvt_hash64(fingerprint, KVT_FINGERPRINT_BYTES, 1);

    root = kvt_hash64(salt, strlen(salt), root);
    return kvt_hash64(lora, strlen(lora), root);
}

uint64_t kvt_oracle_chain_next(uint64_t chain, const uint32_t *tokens, uint32_t block_tokens,
                               const uint8_t *extra_key)
{
    uint64_t next = kvt_hash64(tokens, (size_t)block_tokens * sizeof(*tokens), chain);

    return extra_key == NULL ? next : kvt_hash64(extra_key, KVT_EXTRA_KEY_BYTES, next);
}

void kvt_oracle_chain(uint64_t chain, const uint32_t *tokens, uint32_t block_tokens,
                      uint64_t blocks_count, uint64_t *ret_chains)
{
    for (uint64_t i = 0; i < blocks_count; i++) {
        chain = kvt_oracle_chain_next(chain, tokens + i * block_tokens, block_tokens, NULL);
        ret_chains[i] = chain;
    }
}

uint64_t kvt_oracle_key(const struct kvt_oracle_place *place)
{
    uint64_t which = (uint64_t)place->component << 32 | place->rank;

    return mix(mix(place->chain ^ mix(place->block_idx + 1)) + which);
}

void kvt_oracle_fill(uint64_t key, uint64_t offset_bytes, void *dst, size_t bytes)
{
    uint8_t *at = dst;
    uint64_t word_idx = offset_bytes / 8;
    size_t skip = offset_bytes % 8;

    if (skip != 0) { /* up to the next whole word */
        uint64_t word = word_of(key, word_idx++);
        size_t part = KVT_MIN(8 - skip, bytes);

        memcpy(at, (const uint8_t *)&word + skip, part);
        at += part;
        bytes -= part;
    }
    for (; bytes >= 8; at += 8, bytes -= 8) {
        uint64_t word = word_of(key, word_idx++);

        memcpy(at, &word, 8);
    }
    if (bytes > 0) {
        uint64_t word = word_of(key, word_idx);

        memcpy(at, &word, bytes);
    }
}

static size_t count_different(const uint8_t *a, const uint8_t *b, size_t bytes)
{
    size_t wrong = 0;

    for (size_t i = 0; i < bytes; i++)
        wrong += a[i] != b[i];
    return wrong;
}

size_t kvt_oracle_count_wrong(uint64_t key, uint64_t offset_bytes, const void *src, size_t bytes)
{
    const uint8_t *at = src;
    uint8_t expected[512];
    size_t wrong = 0;

    /* Made into the cache and compared there: memcmp is faster than anything written here. */
    while (bytes > 0) {
        size_t part = KVT_MIN(bytes, sizeof(expected));

        kvt_oracle_fill(key, offset_bytes, expected, part);
        if (memcmp(at, expected, part) != 0)
            wrong += count_different(at, expected, part);
        at += part;
        offset_bytes += part;
        bytes -= part;
    }
    return wrong;
}
