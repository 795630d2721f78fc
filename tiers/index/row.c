#include "tiers/index/row.h"

#include <endian.h>
#include <string.h>

#include "daemon/base/bytes.h"
#include "daemon/base/hash.h"

#define VALUE_VERSION 1u
#define ROW_HAS_EXTRA_KEY 1u
#define ROW_HAS_ROOT_KEY 2u
#define BLOCK_ID_END (1ull << 48)
#define META_MAGIC 0x3158444954564bull /* "KVTIDX1" read as little-endian */
#define META_ENDIAN_MARK 0x01020304u

enum value_field { /* of every value, then of each kind */
                   AT_VERSION = 0,
                   AT_HASH = 4,
                   ROW_AT_FLAGS = 1,
                   ROW_AT_ROOT_KEY_BYTES = 2,
                   ROW_AT_PARENT = 12,
                   ROW_AT_TOKENS_COUNT = 20,
                   COPY_AT_ZERO = 1,
                   COPY_AT_SHARDS_COUNT = 2,
                   COPY_AT_CONTENT = 12,
                   COPY_AT_SLOT_BYTES = 20,
                   PART_AT_ZERO = 1,
                   PART_AT_TOKENS_COUNT = 2,
};

enum meta_field {
    META_AT_MAGIC = 0,
    META_AT_VERSION = 8,
    META_AT_ENDIAN_MARK = 12,
    META_AT_STORE_ID = 16,
    META_AT_DEVICE_UUID = 32,
    META_AT_HASH = 56,
};

static void put_be(uint8_t *at, uint64_t value, uint32_t bytes)
{
    value = htobe64(value << (8 * (8 - bytes)));
    memcpy(at, &value, bytes);
}

static uint64_t get_be(const uint8_t *at, uint32_t bytes)
{
    uint64_t value = 0;

    memcpy(&value, at, bytes);
    return be64toh(value) >> (8 * (8 - bytes));
}

void kvt_index_key_write(uint8_t bytes[KVT_INDEX_KEY_BYTES], const struct kvt_index_key *key,
                         uint8_t type)
{
    put_be(bytes, key->block_id, 8);
    put_be(bytes + 8, key->ns, 2);
    put_be(bytes + 10, key->epoch, 8);
    put_be(bytes + 18, key->block_idx, 4);
    bytes[22] = type;
}

void kvt_index_key_read(const uint8_t bytes[KVT_INDEX_KEY_BYTES], struct kvt_index_key *ret_key,
                        uint8_t *ret_type)
{
    ret_key->block_id = get_be(bytes, 8);
    ret_key->ns = (uint16_t)get_be(bytes + 8, 2);
    ret_key->epoch = get_be(bytes + 10, 8);
    ret_key->block_idx = (uint32_t)get_be(bytes + 18, 4);
    *ret_type = bytes[22];
}

uint64_t kvt_index_row_seed(const uint8_t store_id[16], const uint8_t device_uuid[16])
{
    return kvt_hash64(device_uuid, 16, kvt_hash64(store_id, 16, 0));
}

/* All but the checksum itself, chained: the key, what is before it, what is behind it. */
static uint64_t value_hash(const uint8_t key[KVT_INDEX_KEY_BYTES], uint64_t seed,
                           const uint8_t *value, size_t bytes)
{
    uint8_t head[KVT_INDEX_KEY_BYTES + AT_HASH];

    memcpy(head, key, KVT_INDEX_KEY_BYTES);
    memcpy(head + KVT_INDEX_KEY_BYTES, value, AT_HASH);
    return kvt_hash64(value + AT_HASH + 8, bytes - AT_HASH - 8,
                      kvt_hash64(head, sizeof(head), seed));
}

static bool key_is_sound(const struct kvt_index_key *key)
{
    return key->ns < KVT_NAMESPACES_MAX && key->block_id != 0 && key->block_id < BLOCK_ID_END;
}

static bool row_is_sound(const struct kvt_index_put *put)
{
    bool is_first = put->key.block_idx == 0;

    if (put->tokens_count == 0 || put->tokens_count > KVT_BLOCK_TOKENS_MAX || put->tokens == NULL)
        return false;
    if ((put->parent_id == 0) != is_first || put->parent_id >= BLOCK_ID_END)
        return false;
    if ((put->root_key != NULL) != (put->root_key_bytes != 0))
        return false;
    return (put->root_key != NULL) == is_first &&
           put->root_key_bytes <= KVT_INDEX_ROOT_KEY_BYTES_MAX;
}

bool kvt_index_put_is_sound(const struct kvt_index_put *put)
{
    switch (put->kind) {
    case KVT_INDEX_PUT_ROW:
        return key_is_sound(&put->key) && row_is_sound(put);
    case KVT_INDEX_PUT_COPY:
        return key_is_sound(&put->key) && put->component < KVT_COMPONENTS_MAX &&
               put->content != 0 && put->shards_count > 0 && put->shards_count <= KVT_RANKS_MAX &&
               put->slot_offsets != NULL && put->run_offsets != NULL;
    case KVT_INDEX_PUT_DROP_COPY:
        return key_is_sound(&put->key) && put->component < KVT_COMPONENTS_MAX;
    case KVT_INDEX_PUT_DROP_ROW:
        return key_is_sound(&put->key);
    case KVT_INDEX_PUT_DROP_OLD:
        return put->key.ns < KVT_NAMESPACES_MAX;
    case KVT_INDEX_PUT_SYNC:
    case KVT_INDEX_PUT_CATALOG:
        break;
    }
    return false;
}

void kvt_index_row_shape(uint32_t tokens_count, bool has_extra_key, uint32_t root_key_bytes,
                         struct kvt_index_row_shape *ret_shape)
{
    uint32_t head_bytes =
        KVT_INDEX_ROW_FIXED_BYTES + (has_extra_key ? KVT_EXTRA_KEY_BYTES : 0) + root_key_bytes;
    uint32_t head_tokens =
        KVT_MIN(tokens_count, (KVT_INDEX_VALUE_BYTES_MAX - head_bytes) / (uint32_t)4);

    ret_shape->head_tokens = head_tokens;
    ret_shape->parts_count =
        (uint32_t)kvt_div_up(tokens_count - head_tokens, KVT_INDEX_PART_TOKENS_MAX);
    ret_shape->value_bytes = head_bytes + 4 * head_tokens;
}

static void tokens_write(uint8_t *at, const uint32_t *tokens, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++)
        kvt_put_u32(at, 4ul * i, tokens[i]);
}

static void tokens_read(const uint8_t *at, uint32_t *ret_tokens, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++)
        ret_tokens[i] = kvt_get_u32(at, 4ul * i);
}

uint32_t kvt_index_row_write(uint8_t value[KVT_INDEX_VALUE_BYTES_MAX],
                             const uint8_t key[KVT_INDEX_KEY_BYTES], uint64_t seed,
                             const struct kvt_index_put *put)
{
    struct kvt_index_row_shape shape;
    uint8_t *at = value + KVT_INDEX_ROW_FIXED_BYTES;

    kvt_index_row_shape(put->tokens_count, put->extra_key != NULL, put->root_key_bytes, &shape);
    value[AT_VERSION] = VALUE_VERSION;
    value[ROW_AT_FLAGS] = (uint8_t)((put->extra_key != NULL ? ROW_HAS_EXTRA_KEY : 0) |
                                    (put->root_key_bytes != 0 ? ROW_HAS_ROOT_KEY : 0));
    kvt_put_u16(value, ROW_AT_ROOT_KEY_BYTES, (uint16_t)put->root_key_bytes);
    kvt_put_u64(value, ROW_AT_PARENT, put->parent_id);
    kvt_put_u32(value, ROW_AT_TOKENS_COUNT, put->tokens_count);
    if (put->extra_key != NULL) {
        memcpy(at, put->extra_key, KVT_EXTRA_KEY_BYTES);
        at += KVT_EXTRA_KEY_BYTES;
    }
    if (put->root_key_bytes != 0) {
        memcpy(at, put->root_key, put->root_key_bytes);
        at += put->root_key_bytes;
    }
    tokens_write(at, put->tokens, shape.head_tokens);
    kvt_put_u64(value, AT_HASH, value_hash(key, seed, value, shape.value_bytes));
    return shape.value_bytes;
}

uint32_t kvt_index_part_write(uint8_t value[KVT_INDEX_VALUE_BYTES_MAX],
                              const uint8_t key[KVT_INDEX_KEY_BYTES], uint64_t seed,
                              const struct kvt_index_put *put, uint32_t part_idx)
{
    struct kvt_index_row_shape shape;
    uint32_t first, count, bytes;

    kvt_index_row_shape(put->tokens_count, put->extra_key != NULL, put->root_key_bytes, &shape);
    KVT_ASSERT(part_idx < shape.parts_count);
    first = shape.head_tokens + part_idx * KVT_INDEX_PART_TOKENS_MAX;
    count = KVT_MIN(put->tokens_count - first, KVT_INDEX_PART_TOKENS_MAX);
    bytes = KVT_INDEX_PART_FIXED_BYTES + 4 * count;
    value[AT_VERSION] = VALUE_VERSION;
    value[PART_AT_ZERO] = 0;
    kvt_put_u16(value, PART_AT_TOKENS_COUNT, (uint16_t)count);
    tokens_write(value + KVT_INDEX_PART_FIXED_BYTES, put->tokens + first, count);
    kvt_put_u64(value, AT_HASH, value_hash(key, seed, value, bytes));
    return bytes;
}

uint32_t kvt_index_copy_write(uint8_t value[KVT_INDEX_VALUE_BYTES_MAX],
                              const uint8_t key[KVT_INDEX_KEY_BYTES], uint64_t seed,
                              const struct kvt_index_put *put)
{
    uint32_t bytes = KVT_INDEX_COPY_FIXED_BYTES + 16u * put->shards_count;

    value[AT_VERSION] = VALUE_VERSION;
    value[COPY_AT_ZERO] = 0;
    kvt_put_u16(value, COPY_AT_SHARDS_COUNT, put->shards_count);
    kvt_put_u64(value, COPY_AT_CONTENT, put->content);
    kvt_put_u64(value, COPY_AT_SLOT_BYTES, put->slot_bytes);
    for (uint32_t i = 0; i < put->shards_count; i++) {
        kvt_put_u64(value, KVT_INDEX_COPY_FIXED_BYTES + 16ul * i, put->slot_offsets[i]);
        kvt_put_u64(value, KVT_INDEX_COPY_FIXED_BYTES + 16ul * i + 8, put->run_offsets[i]);
    }
    kvt_put_u64(value, AT_HASH, value_hash(key, seed, value, bytes));
    return bytes;
}

static bool row_value_is_sound(const struct kvt_index_key *key, const uint8_t *value, size_t bytes)
{
    struct kvt_index_row_shape shape;
    uint32_t root_key_bytes, tokens_count;
    uint64_t parent_id;
    uint8_t flags;

    if (bytes < KVT_INDEX_ROW_FIXED_BYTES)
        return false;
    flags = value[ROW_AT_FLAGS];
    root_key_bytes = kvt_get_u16(value, ROW_AT_ROOT_KEY_BYTES);
    tokens_count = kvt_index_row_tokens_count(value);
    parent_id = kvt_index_row_parent(value);
    if (flags > (ROW_HAS_EXTRA_KEY | ROW_HAS_ROOT_KEY) ||
        root_key_bytes > KVT_INDEX_ROOT_KEY_BYTES_MAX || tokens_count == 0 ||
        tokens_count > KVT_BLOCK_TOKENS_MAX || parent_id >= BLOCK_ID_END)
        return false;
    if (((flags & ROW_HAS_ROOT_KEY) != 0) != (root_key_bytes != 0) ||
        (key->block_idx == 0) != (root_key_bytes != 0) || (key->block_idx == 0) != (parent_id == 0))
        return false;
    kvt_index_row_shape(tokens_count, (flags & ROW_HAS_EXTRA_KEY) != 0, root_key_bytes, &shape);
    return bytes == shape.value_bytes;
}

bool kvt_index_value_is_sound(const uint8_t key[KVT_INDEX_KEY_BYTES], uint64_t seed,
                              const uint8_t *value, size_t bytes)
{
    struct kvt_index_key read;
    uint32_t count;
    uint8_t type;

    if (bytes < KVT_INDEX_PART_FIXED_BYTES || bytes > KVT_INDEX_VALUE_BYTES_MAX ||
        value[AT_VERSION] != VALUE_VERSION)
        return false;
    kvt_index_key_read(key, &read, &type);
    if (!key_is_sound(&read) || kvt_get_u64(value, AT_HASH) != value_hash(key, seed, value, bytes))
        return false;
    if (type == KVT_INDEX_TYPE_ROW)
        return row_value_is_sound(&read, value, bytes);
    count = kvt_get_u16(value, COPY_AT_SHARDS_COUNT); /* a part has its tokens_count there */
    if (value[COPY_AT_ZERO] != 0 || count == 0)
        return false;
    if (type < KVT_INDEX_TYPE_COPY + KVT_COMPONENTS_MAX)
        return count <= KVT_RANKS_MAX && bytes == KVT_INDEX_COPY_FIXED_BYTES + 16ul * count;
    return type >= KVT_INDEX_TYPE_PART && type < KVT_INDEX_TYPE_PART + KVT_INDEX_PARTS_MAX &&
           count <= KVT_INDEX_PART_TOKENS_MAX && bytes == KVT_INDEX_PART_FIXED_BYTES + 4ul * count;
}

uint32_t kvt_index_row_tokens_count(const uint8_t *value)
{
    return kvt_get_u32(value, ROW_AT_TOKENS_COUNT);
}

uint64_t kvt_index_row_parent(const uint8_t *value)
{
    return kvt_get_u64(value, ROW_AT_PARENT);
}

uint64_t kvt_index_copy_content(const uint8_t *value)
{
    return kvt_get_u64(value, COPY_AT_CONTENT);
}

uint32_t kvt_index_part_tokens_count(const uint8_t *value)
{
    return kvt_get_u16(value, PART_AT_TOKENS_COUNT);
}

void kvt_index_row_shape_of(const uint8_t *value, struct kvt_index_row_shape *ret_shape)
{
    kvt_index_row_shape(kvt_index_row_tokens_count(value),
                        (value[ROW_AT_FLAGS] & ROW_HAS_EXTRA_KEY) != 0,
                        kvt_get_u16(value, ROW_AT_ROOT_KEY_BYTES), ret_shape);
}

void kvt_index_row_read(const uint8_t *value, struct kvt_index_put *ret_put, uint32_t *ret_tokens)
{
    const uint8_t *at = value + KVT_INDEX_ROW_FIXED_BYTES;
    struct kvt_index_row_shape shape;

    kvt_index_row_shape_of(value, &shape);
    ret_put->parent_id = kvt_index_row_parent(value);
    ret_put->extra_key = NULL;
    if ((value[ROW_AT_FLAGS] & ROW_HAS_EXTRA_KEY) != 0) {
        ret_put->extra_key = at;
        at += KVT_EXTRA_KEY_BYTES;
    }
    ret_put->root_key_bytes = kvt_get_u16(value, ROW_AT_ROOT_KEY_BYTES);
    ret_put->root_key = ret_put->root_key_bytes != 0 ? at : NULL;
    at += ret_put->root_key_bytes;
    ret_put->tokens_count = kvt_index_row_tokens_count(value);
    tokens_read(at, ret_tokens, shape.head_tokens);
    ret_put->tokens = ret_tokens;
}

void kvt_index_part_read(const uint8_t *value, uint32_t *ret_tokens)
{
    tokens_read(value + KVT_INDEX_PART_FIXED_BYTES, ret_tokens, kvt_index_part_tokens_count(value));
}

void kvt_index_copy_read(const uint8_t *value, struct kvt_index_put *ret_put,
                         uint64_t ret_slot_offsets[KVT_RANKS_MAX],
                         uint64_t ret_run_offsets[KVT_RANKS_MAX])
{
    ret_put->shards_count = kvt_get_u16(value, COPY_AT_SHARDS_COUNT);
    ret_put->content = kvt_get_u64(value, COPY_AT_CONTENT);
    ret_put->slot_bytes = kvt_get_u64(value, COPY_AT_SLOT_BYTES);
    for (uint32_t i = 0; i < ret_put->shards_count; i++) {
        ret_slot_offsets[i] = kvt_get_u64(value, KVT_INDEX_COPY_FIXED_BYTES + 16ul * i);
        ret_run_offsets[i] = kvt_get_u64(value, KVT_INDEX_COPY_FIXED_BYTES + 16ul * i + 8);
    }
    ret_put->slot_offsets = ret_slot_offsets;
    ret_put->run_offsets = ret_run_offsets;
}

void kvt_index_meta_write(uint8_t value[KVT_INDEX_META_BYTES], const uint8_t store_id[16],
                          const uint8_t device_uuid[16])
{
    memset(value, 0, KVT_INDEX_META_BYTES);
    kvt_put_u64(value, META_AT_MAGIC, META_MAGIC);
    kvt_put_u32(value, META_AT_VERSION, KVT_INDEX_FORMAT_VERSION);
    kvt_put_u32(value, META_AT_ENDIAN_MARK, META_ENDIAN_MARK);
    memcpy(value + META_AT_STORE_ID, store_id, 16);
    memcpy(value + META_AT_DEVICE_UUID, device_uuid, 16);
    kvt_put_u64(value, META_AT_HASH, kvt_hash64(value, META_AT_HASH, 0));
}

enum kvt_index_meta_verdict kvt_index_meta_check(const uint8_t *value, size_t bytes,
                                                 const uint8_t store_id[16],
                                                 const uint8_t device_uuid[16])
{
    if (bytes != KVT_INDEX_META_BYTES || kvt_get_u64(value, META_AT_MAGIC) != META_MAGIC ||
        kvt_get_u32(value, META_AT_ENDIAN_MARK) != META_ENDIAN_MARK ||
        kvt_get_u64(value, META_AT_HASH) != kvt_hash64(value, META_AT_HASH, 0))
        return KVT_INDEX_META_DAMAGED;
    if (kvt_get_u32(value, META_AT_VERSION) != KVT_INDEX_FORMAT_VERSION)
        return KVT_INDEX_META_OTHER_VERSION;
    if (memcmp(value + META_AT_STORE_ID, store_id, 16) != 0)
        return KVT_INDEX_META_OTHER_STORE;
    if (memcmp(value + META_AT_DEVICE_UUID, device_uuid, 16) != 0)
        return KVT_INDEX_META_OTHER_DEVICE;
    return KVT_INDEX_META_OK;
}
