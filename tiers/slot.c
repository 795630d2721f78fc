/* The bytes of a slot header. Offsets are the format: docs/formats.md lists the same table. */
#include "tiers/slot.h"

#include <string.h>

#include "daemon/base/bytes.h"
#include "daemon/base/hash.h"
#include "tiers/verify.h"

#define SLOT_MAGIC 0x31544f4c5354564bull /* "KVTSLOT1" read as little-endian */

enum slot_field {
    AT_MAGIC = 0,
    AT_VERSION = 8,
    AT_HEADER_BYTES = 12,
    AT_FINGERPRINT = 16,
    AT_ROOT_DIGEST = 48,
    AT_EXTRA_KEY = 80,
    AT_EPOCH = 112,
    AT_BLOCK_ID = 120,
    AT_PARENT_ID = 128,
    AT_BLOCK_IDX = 136,
    AT_GENERATION = 144,
    AT_STORED_REAL_NS = 152,
    AT_PAYLOAD_BYTES = 160,
    AT_BLOCK_TOKENS = 168,
    AT_COMPONENT = 172,
    AT_RANK = 174,
    AT_PAYLOAD_HASH = 176,
    AT_STORE_ID = 184,
    AT_RESERVED = 200,
    AT_HEADER_HASH = 248,
};
static_assert(AT_HEADER_HASH + 8 == KVT_SLOT_FIXED_BYTES, "the fixed part ends with its checksum");
static_assert(KVT_SLOT_FIXED_BYTES < KVT_SLOT_HEADER_ALIGN_BYTES, "a header is never fixed alone");

/* What the identity covers of the fixed part. */
#define IDENTITY_BYTES (AT_STORED_REAL_NS - AT_FINGERPRINT)

const char *kvt_slot_verdict_text(enum kvt_slot_verdict verdict)
{
    switch (verdict) {
    case KVT_SLOT_OK:
        return "ok";
    case KVT_SLOT_BAD_MAGIC:
        return "bad magic";
    case KVT_SLOT_BAD_VERSION:
        return "another format version";
    case KVT_SLOT_BAD_HEADER:
        return "bad header";
    case KVT_SLOT_OTHER:
        return "other content";
    case KVT_SLOT_BAD_PAYLOAD:
        return "bad payload checksum";
    }
    return "unknown";
}

uint32_t kvt_slot_header_bytes(uint32_t block_tokens)
{
    KVT_ASSERT(block_tokens <= KVT_BLOCK_TOKENS_MAX);
    return (uint32_t)kvt_round_up(KVT_SLOT_FIXED_BYTES + block_tokens * 4u,
                                  KVT_SLOT_HEADER_ALIGN_BYTES);
}

uint64_t kvt_slot_bytes(uint32_t block_tokens, uint64_t payload_bytes)
{
    KVT_ASSERT(payload_bytes <= KVT_SHARD_BYTES_MAX);
    return kvt_round_up(kvt_slot_header_bytes(block_tokens) + payload_bytes, KVT_DIO_ALIGN_BYTES);
}

/* Everything in the header but the field that holds this value. */
static uint64_t header_hash(const uint8_t *slot, uint32_t header_bytes)
{
    uint64_t fixed = kvt_hash64(slot, AT_HEADER_HASH, 0);

    return kvt_hash64(slot + KVT_SLOT_FIXED_BYTES, header_bytes - KVT_SLOT_FIXED_BYTES, fixed);
}

static void identity_put(uint8_t *s, const struct kvt_slot_info *info)
{
    memcpy(s + AT_FINGERPRINT, info->fingerprint, KVT_FINGERPRINT_BYTES);
    memcpy(s + AT_ROOT_DIGEST, info->root_digest, KVT_FINGERPRINT_BYTES);
    memcpy(s + AT_EXTRA_KEY, info->extra_key, KVT_EXTRA_KEY_BYTES);
    kvt_put_u64(s, AT_EPOCH, info->epoch);
    kvt_put_u64(s, AT_BLOCK_ID, info->block_id);
    kvt_put_u64(s, AT_PARENT_ID, info->parent_id);
    kvt_put_u64(s, AT_BLOCK_IDX, info->block_idx);
    kvt_put_u64(s, AT_GENERATION, info->generation);
}

static void tokens_put(uint8_t *bytes, const uint32_t *tokens, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++)
        kvt_put_u32(bytes, i * 4u, tokens[i]);
}

/* @s: a fixed part; @tokens_le: as they stand behind it. */
static uint64_t identity_hash(const uint8_t *s, const void *tokens_le, size_t tokens_bytes)
{
    uint64_t fixed = kvt_hash64(s + AT_FINGERPRINT, IDENTITY_BYTES, 0);
    uint64_t identity = kvt_hash64(tokens_le, tokens_bytes, fixed);

    return identity != 0 ? identity : 1;
}

uint64_t kvt_slot_identity(const struct kvt_slot_info *info, const uint32_t *tokens)
{
    uint8_t s[AT_STORED_REAL_NS],
        le[__BYTE_ORDER == __LITTLE_ENDIAN ? 1 : KVT_BLOCK_TOKENS_MAX * 4];
    const void *tokens_le = tokens;

    KVT_ASSERT(info->block_tokens <= KVT_BLOCK_TOKENS_MAX);
    identity_put(s, info);
    if (__BYTE_ORDER != __LITTLE_ENDIAN) {
        tokens_put(le, tokens, info->block_tokens);
        tokens_le = le;
    }
    return identity_hash(s, tokens_le, info->block_tokens * 4u);
}

void kvt_slot_header_write(void *slot, const struct kvt_slot_info *info, const uint32_t *tokens)
{
    uint8_t *s = slot;
    uint32_t header_bytes = kvt_slot_header_bytes(info->block_tokens);
    size_t tokens_bytes = (size_t)info->block_tokens * 4u;

    KVT_ASSERT(info->payload_bytes <= KVT_SHARD_BYTES_MAX);
    kvt_put_u64(s, AT_MAGIC, SLOT_MAGIC);
    kvt_put_u32(s, AT_VERSION, KVT_SLOT_FORMAT_VERSION);
    kvt_put_u32(s, AT_HEADER_BYTES, header_bytes);
    identity_put(s, info);
    kvt_put_u64(s, AT_STORED_REAL_NS, info->stored_real_ns);
    kvt_put_u64(s, AT_PAYLOAD_BYTES, info->payload_bytes);
    kvt_put_u32(s, AT_BLOCK_TOKENS, info->block_tokens);
    kvt_put_u16(s, AT_COMPONENT, info->component);
    kvt_put_u16(s, AT_RANK, info->rank);
    /* Zero checksums: an unsealed slot does not pass a check. */
    memset(s + AT_PAYLOAD_HASH, 0, KVT_SLOT_FIXED_BYTES - AT_PAYLOAD_HASH);
    memcpy(s + AT_STORE_ID, info->store_id, KVT_STORE_ID_BYTES);
    if (__BYTE_ORDER == __LITTLE_ENDIAN) {
        if (tokens_bytes > 0)
            memcpy(s + KVT_SLOT_FIXED_BYTES, tokens, tokens_bytes);
    } else {
        tokens_put(s + KVT_SLOT_FIXED_BYTES, tokens, info->block_tokens);
    }
    memset(s + KVT_SLOT_FIXED_BYTES + tokens_bytes, 0,
           header_bytes - KVT_SLOT_FIXED_BYTES - tokens_bytes);
}

void kvt_slot_header_seal(void *slot, uint64_t payload_hash)
{
    uint8_t *s = slot;

    KVT_ASSERT(kvt_get_u64(s, AT_MAGIC) == SLOT_MAGIC);
    kvt_put_u64(s, AT_PAYLOAD_HASH, payload_hash);
    kvt_put_u64(s, AT_HEADER_HASH, header_hash(s, kvt_get_u32(s, AT_HEADER_BYTES)));
}

bool kvt_slot_header_guess(const void *slot, const uint8_t store_id[KVT_STORE_ID_BYTES],
                           uint32_t *ret_header_bytes)
{
    const uint8_t *s = slot;
    uint32_t block_tokens;

    if (kvt_get_u64(s, AT_MAGIC) != SLOT_MAGIC ||
        kvt_get_u32(s, AT_VERSION) != KVT_SLOT_FORMAT_VERSION ||
        memcmp(s + AT_STORE_ID, store_id, KVT_STORE_ID_BYTES) != 0)
        return false;
    block_tokens = kvt_get_u32(s, AT_BLOCK_TOKENS);
    if (block_tokens > KVT_BLOCK_TOKENS_MAX ||
        kvt_get_u32(s, AT_HEADER_BYTES) != kvt_slot_header_bytes(block_tokens))
        return false;
    *ret_header_bytes = kvt_slot_header_bytes(block_tokens);
    return true;
}

/* The header against itself; nothing at or past @limit_bytes is read. */
static enum kvt_slot_verdict header_check_self(const uint8_t *s, uint64_t limit_bytes)
{
    uint32_t block_tokens, header_bytes;
    uint64_t payload_bytes;

    KVT_ASSERT(limit_bytes >= KVT_SLOT_FIXED_BYTES);
    if (kvt_get_u64(s, AT_MAGIC) != SLOT_MAGIC)
        return KVT_SLOT_BAD_MAGIC;
    if (kvt_get_u32(s, AT_VERSION) != KVT_SLOT_FORMAT_VERSION)
        return KVT_SLOT_BAD_VERSION;
    block_tokens = kvt_get_u32(s, AT_BLOCK_TOKENS);
    header_bytes = kvt_get_u32(s, AT_HEADER_BYTES);
    payload_bytes = kvt_get_u64(s, AT_PAYLOAD_BYTES);
    if (block_tokens > KVT_BLOCK_TOKENS_MAX || header_bytes != kvt_slot_header_bytes(block_tokens))
        return KVT_SLOT_BAD_HEADER;
    if (payload_bytes > KVT_SHARD_BYTES_MAX || header_bytes + payload_bytes > limit_bytes)
        return KVT_SLOT_BAD_HEADER;
    if (kvt_get_u64(s, AT_HEADER_HASH) != header_hash(s, header_bytes))
        return KVT_SLOT_BAD_HEADER;
    return KVT_SLOT_OK;
}

enum kvt_slot_verdict kvt_slot_header_check(const void *slot, const struct kvt_slot_key *key)
{
    const uint8_t *s = slot;
    enum kvt_slot_verdict verdict;

    /* A whole header of another shape may be longer than the slot that the caller has. */
    if (kvt_get_u64(s, AT_MAGIC) == SLOT_MAGIC &&
        kvt_get_u32(s, AT_VERSION) == KVT_SLOT_FORMAT_VERSION &&
        (kvt_get_u32(s, AT_BLOCK_TOKENS) != key->block_tokens ||
         kvt_get_u64(s, AT_PAYLOAD_BYTES) != key->payload_bytes))
        return KVT_SLOT_OTHER;
    verdict = header_check_self(s, kvt_slot_bytes(key->block_tokens, key->payload_bytes));
    if (verdict != KVT_SLOT_OK)
        return verdict;
    if (kvt_get_u64(s, AT_BLOCK_ID) != key->block_id ||
        kvt_get_u64(s, AT_GENERATION) != key->generation ||
        kvt_get_u16(s, AT_COMPONENT) != key->component || kvt_get_u16(s, AT_RANK) != key->rank)
        return KVT_SLOT_OTHER;
    if (key->identity != 0 &&
        key->identity != identity_hash(s, s + KVT_SLOT_FIXED_BYTES, key->block_tokens * 4u))
        return KVT_SLOT_OTHER;
    return KVT_SLOT_OK;
}

uint64_t kvt_slot_payload_hash(const void *slot)
{
    return kvt_get_u64(slot, AT_PAYLOAD_HASH);
}

enum kvt_slot_verdict kvt_slot_check(const void *slot, const struct kvt_slot_key *key)
{
    enum kvt_slot_verdict verdict = kvt_slot_header_check(slot, key);
    const uint8_t *payload = (const uint8_t *)slot + kvt_slot_header_bytes(key->block_tokens);

    if (verdict != KVT_SLOT_OK)
        return verdict;
    if (!kvt_verify_payload(payload, key->payload_bytes, kvt_slot_payload_hash(slot)))
        return KVT_SLOT_BAD_PAYLOAD;
    return KVT_SLOT_OK;
}

enum kvt_slot_verdict kvt_slot_header_read(const void *slot, uint64_t slot_bytes,
                                           struct kvt_slot_info *ret_info,
                                           const uint8_t **ret_tokens_le)
{
    const uint8_t *s = slot;
    enum kvt_slot_verdict verdict;

    if (slot_bytes < KVT_SLOT_FIXED_BYTES)
        return KVT_SLOT_BAD_HEADER;
    verdict = header_check_self(s, slot_bytes);
    if (verdict != KVT_SLOT_OK)
        return verdict;
    memcpy(ret_info->fingerprint, s + AT_FINGERPRINT, KVT_FINGERPRINT_BYTES);
    memcpy(ret_info->root_digest, s + AT_ROOT_DIGEST, KVT_FINGERPRINT_BYTES);
    memcpy(ret_info->extra_key, s + AT_EXTRA_KEY, KVT_EXTRA_KEY_BYTES);
    ret_info->epoch = kvt_get_u64(s, AT_EPOCH);
    ret_info->block_id = kvt_get_u64(s, AT_BLOCK_ID);
    ret_info->parent_id = kvt_get_u64(s, AT_PARENT_ID);
    ret_info->block_idx = kvt_get_u64(s, AT_BLOCK_IDX);
    ret_info->generation = kvt_get_u64(s, AT_GENERATION);
    ret_info->stored_real_ns = kvt_get_u64(s, AT_STORED_REAL_NS);
    ret_info->payload_bytes = kvt_get_u64(s, AT_PAYLOAD_BYTES);
    ret_info->block_tokens = kvt_get_u32(s, AT_BLOCK_TOKENS);
    ret_info->component = kvt_get_u16(s, AT_COMPONENT);
    ret_info->rank = kvt_get_u16(s, AT_RANK);
    memcpy(ret_info->store_id, s + AT_STORE_ID, KVT_STORE_ID_BYTES);
    *ret_tokens_le = s + KVT_SLOT_FIXED_BYTES;
    return KVT_SLOT_OK;
}
