#include "tiers/index/wire.h"

#include "daemon/base/bytes.h"
#include "daemon/base/hash.h"

#define KEY_BYTES 24u
#define ROW_BYTES 24u /* fixed parts behind the key */
#define COPY_BYTES 24u
#define CATALOG_BYTES 8u
#define HELLO_BYTES 72u
#define HELLO_NS_BYTES (48u + 2u * KVT_COMPONENTS_MAX)
static_assert(HELLO_NS_BYTES % 8 == 0, "numbers stay where they are aligned");
#define PROGRESS_BYTES 40u
#define LOADED_BYTES 56u
#define COMMITTED_BYTES 32u
#define FAILED_BYTES 8u
#define TEXT_BYTES 8u

#define FLAG_REBUILD 1u
#define FLAG_SIBLINGS 2u

static_assert(KVT_WIRE_HEADER_BYTES + KEY_BYTES + ROW_BYTES + 4 * KVT_BLOCK_TOKENS_MAX +
                      KVT_EXTRA_KEY_BYTES + KVT_INDEX_ROOT_KEY_BYTES_MAX <=
                  KVT_WIRE_BYTES_MAX,
              "the longest row");
static_assert(KVT_WIRE_HEADER_BYTES + HELLO_BYTES + HELLO_NS_BYTES * KVT_NAMESPACES_MAX +
                      2 * KVT_WIRE_PATH_BYTES <=
                  KVT_WIRE_BYTES_MAX,
              "the longest HELLO");
static_assert(KVT_WIRE_HEADER_BYTES + KEY_BYTES + CATALOG_BYTES + KVT_WIRE_CATALOG_BYTES_MAX <=
                  KVT_WIRE_BYTES_MAX,
              "the longest record of the catalog");

/* What is behind the key, all of it. */
static uint64_t put_body_bytes(const struct kvt_index_put *put)
{
    switch (put->kind) {
    case KVT_INDEX_PUT_ROW:
        return ROW_BYTES + 4ull * put->tokens_count +
               (put->extra_key != NULL ? KVT_EXTRA_KEY_BYTES : 0) +
               (put->root_key != NULL ? put->root_key_bytes : 0);
    case KVT_INDEX_PUT_COPY:
        return COPY_BYTES + 16ull * put->shards_count;
    case KVT_INDEX_PUT_CATALOG:
        return CATALOG_BYTES + put->catalog_bytes;
    default:
        return 0;
    }
}

uint64_t kvt_index_put_bytes(const struct kvt_index_put *put)
{
    return kvt_round_up(KVT_WIRE_HEADER_BYTES + KEY_BYTES + put_body_bytes(put), 8);
}

/* ---- encode --------------------------------------------------------------------------------- */

/* Header and trailing zeros around a body of @body_bytes. */
static uint32_t close_frame(uint8_t *to, uint16_t kind, uint64_t seq, uint64_t body_bytes)
{
    uint64_t end = KVT_WIRE_HEADER_BYTES + body_bytes, bytes = kvt_round_up(end, 8);

    KVT_ASSERT(bytes <= KVT_WIRE_BYTES_MAX);
    memset(to + end, 0, bytes - end);
    kvt_put_u32(to, 0, (uint32_t)bytes);
    kvt_put_u16(to, 4, kind);
    kvt_put_u16(to, 6, 0);
    kvt_put_u64(to, 8, seq);
    kvt_put_u64(to, 16, 0);
    return (uint32_t)bytes;
}

static void encode_row(uint8_t *at, const struct kvt_index_put *put)
{
    KVT_ASSERT(put->tokens_count > 0 && put->tokens_count <= KVT_BLOCK_TOKENS_MAX);
    KVT_ASSERT(put->root_key_bytes <= KVT_INDEX_ROOT_KEY_BYTES_MAX);
    memset(at, 0, ROW_BYTES);
    kvt_put_u64(at, 0, put->parent_id);
    kvt_put_u32(at, 8, put->tokens_count);
    kvt_put_u32(at, 12, put->root_key != NULL ? put->root_key_bytes : 0);
    at[16] = put->extra_key != NULL;
    at[17] = put->root_key != NULL;
    at += ROW_BYTES;
    for (uint32_t i = 0; i < put->tokens_count; i++)
        kvt_put_u32(at, 4ull * i, put->tokens[i]);
    at += 4ull * put->tokens_count;
    if (put->extra_key != NULL) {
        memcpy(at, put->extra_key, KVT_EXTRA_KEY_BYTES);
        at += KVT_EXTRA_KEY_BYTES;
    }
    if (put->root_key != NULL)
        memcpy(at, put->root_key, put->root_key_bytes);
}

static void encode_copy(uint8_t *at, const struct kvt_index_put *put)
{
    uint32_t count = put->shards_count;

    KVT_ASSERT(count > 0 && count <= KVT_RANKS_MAX);
    memset(at, 0, COPY_BYTES);
    kvt_put_u64(at, 0, put->content);
    kvt_put_u64(at, 8, put->slot_bytes);
    kvt_put_u16(at, 16, put->shards_count);
    at += COPY_BYTES;
    for (uint32_t i = 0; i < count; i++) {
        kvt_put_u64(at, 8ull * i, put->slot_offsets[i]);
        kvt_put_u64(at, 8ull * (count + i), put->run_offsets[i]);
    }
}

uint32_t kvt_wire_encode_put(uint8_t *to, const struct kvt_index_put *put, uint64_t seq)
{
    uint8_t *at = to + KVT_WIRE_HEADER_BYTES;

    KVT_ASSERT(put->key.ns < KVT_NAMESPACES_MAX && put->component < KVT_COMPONENTS_MAX);
    kvt_put_u16(at, 0, put->key.ns);
    kvt_put_u16(at, 2, put->component);
    kvt_put_u32(at, 4, put->key.block_idx);
    kvt_put_u64(at, 8, put->key.epoch);
    kvt_put_u64(at, 16, put->key.block_id);
    at += KEY_BYTES;
    if (put->kind == KVT_INDEX_PUT_ROW) {
        encode_row(at, put);
    } else if (put->kind == KVT_INDEX_PUT_COPY) {
        encode_copy(at, put);
    } else if (put->kind == KVT_INDEX_PUT_CATALOG) {
        KVT_ASSERT(put->catalog_bytes <= KVT_WIRE_CATALOG_BYTES_MAX);
        kvt_put_u32(at, 0, put->catalog_number);
        kvt_put_u32(at, 4, put->catalog_bytes);
        memcpy(at + CATALOG_BYTES, put->catalog_data, put->catalog_bytes);
    }
    return close_frame(to, (uint16_t)put->kind, seq, KEY_BYTES + put_body_bytes(put));
}

static uint64_t encode_text(uint8_t *at, const char *text)
{
    uint64_t bytes = strlen(text) + 1;

    kvt_put_u32(at, 0, (uint32_t)bytes);
    kvt_put_u32(at, 4, 0);
    memcpy(at + TEXT_BYTES, text, bytes);
    return TEXT_BYTES + bytes;
}

static uint64_t encode_hello(uint8_t *body, const struct kvt_index_config *hello)
{
    const char *data_path = hello->data_path != NULL ? hello->data_path : "";
    uint64_t path_bytes = strlen(hello->path) + 1, data_path_bytes = strlen(data_path) + 1;
    uint8_t *at = body + HELLO_BYTES;
    uint32_t count = 0;

    KVT_ASSERT(path_bytes <= KVT_WIRE_PATH_BYTES && data_path_bytes <= KVT_WIRE_PATH_BYTES);
    for (uint32_t i = 0; i < KVT_NAMESPACES_MAX; i++) {
        const struct kvt_index_ns *ns = &hello->namespaces[i];

        if (!ns->is_used)
            continue;
        kvt_put_u16(at, 0, (uint16_t)i);
        KVT_ASSERT(ns->components_count <= KVT_COMPONENTS_MAX);
        kvt_put_u16(at, 2, (uint16_t)ns->components_count);
        kvt_put_u32(at, 4, ns->block_tokens);
        kvt_put_u64(at, 8, ns->epoch);
        memcpy(at + 16, ns->fingerprint, KVT_FINGERPRINT_BYTES);
        for (uint32_t c = 0; c < KVT_COMPONENTS_MAX; c++)
            kvt_put_u16(at, 48 + 2 * c, c < ns->components_count ? ns->shards[c] : 0);
        at += HELLO_NS_BYTES;
        count++;
    }
    memcpy(at, hello->path, path_bytes);
    memcpy(at + path_bytes, data_path, data_path_bytes);
    kvt_put_u32(body, 0, KVT_WIRE_VERSION);
    kvt_put_u32(body, 4,
                (hello->is_rebuild_wanted ? FLAG_REBUILD : 0) |
                    (hello->has_siblings ? FLAG_SIBLINGS : 0));
    kvt_put_u64(body, 8, hello->bytes);
    memcpy(body + 16, hello->store_id, 16);
    memcpy(body + 32, hello->device_uuid, 16);
    kvt_put_u64(body, 48, hello->data_offset_bytes);
    kvt_put_u64(body, 56, hello->data_bytes);
    kvt_put_u16(body, 64, (uint16_t)path_bytes);
    kvt_put_u16(body, 66, (uint16_t)data_path_bytes);
    kvt_put_u32(body, 68, count);
    return (uint64_t)(at - body) + path_bytes + data_path_bytes;
}

static uint64_t encode_loaded(uint8_t *at, const struct kvt_index_loaded *loaded)
{
    memset(at, 0, 8);
    at[0] = loaded->was_rebuilt;
    kvt_put_u64(at, 8, loaded->rows);
    kvt_put_u64(at, 16, loaded->copies);
    kvt_put_u64(at, 24, loaded->dropped);
    kvt_put_u64(at, 32, loaded->block_id_max);
    kvt_put_u64(at, 40, loaded->content_max);
    kvt_put_u64(at, 48, loaded->took_ns);
    return LOADED_BYTES;
}

uint32_t kvt_wire_encode(uint8_t *to, const struct kvt_wire_message *message)
{
    uint8_t *at = to + KVT_WIRE_HEADER_BYTES;
    uint64_t bytes = 0;

    switch ((enum kvt_wire_kind)message->kind) {
    case KVT_WIRE_HELLO:
        bytes = encode_hello(at, &message->hello);
        break;
    case KVT_WIRE_COMMIT:
        break;
    case KVT_WIRE_PROGRESS:
        kvt_put_u64(at, 0, message->scan_bytes);
        kvt_put_u64(at, 8, message->scan_total_bytes);
        kvt_put_u64(at, 16, message->rows_total);
        kvt_put_u64(at, 24, message->used_bytes);
        kvt_put_u64(at, 32, message->capacity_bytes);
        bytes = PROGRESS_BYTES;
        break;
    case KVT_WIRE_LOADED:
        bytes = encode_loaded(at, &message->loaded);
        bytes += encode_text(at + bytes, message->why);
        break;
    case KVT_WIRE_COMMITTED:
        kvt_put_u64(at, 0, message->refused);
        kvt_put_u64(at, 8, message->used_bytes);
        kvt_put_u64(at, 16, message->capacity_bytes);
        kvt_put_u64(at, 24, message->refused_catalogs);
        bytes = COMMITTED_BYTES;
        break;
    case KVT_WIRE_BAD:
        bytes = encode_text(at, message->why);
        break;
    case KVT_WIRE_FAILED:
        kvt_put_u64(at, 0, (uint64_t)(int64_t)message->error);
        bytes = FAILED_BYTES;
        bytes += encode_text(at + bytes, message->why);
        break;
    default:
        return kvt_wire_encode_put(to, &message->put, message->seq);
    }
    return close_frame(to, message->kind, message->seq, bytes);
}

/* ---- checksum ------------------------------------------------------------------------------- */

static uint64_t checksum_of(const uint8_t *frame, uint32_t bytes)
{
    return kvt_hash64(frame + KVT_WIRE_HEADER_BYTES, bytes - KVT_WIRE_HEADER_BYTES,
                      kvt_hash64(frame, 16, 0));
}

uint32_t kvt_wire_bytes(const uint8_t *frame)
{
    return kvt_get_u32(frame, 0);
}

void kvt_wire_seal(uint8_t *frame)
{
    kvt_put_u64(frame, 16, checksum_of(frame, kvt_wire_bytes(frame)));
}

int kvt_wire_check(const uint8_t *bytes, uint64_t have, uint32_t *ret_bytes)
{
    uint32_t frame_bytes;

    if (have < KVT_WIRE_HEADER_BYTES)
        return KVT_WIRE_E_SHORT;
    frame_bytes = kvt_wire_bytes(bytes);
    if (frame_bytes < KVT_WIRE_HEADER_BYTES || frame_bytes > KVT_WIRE_BYTES_MAX ||
        frame_bytes % 8 != 0)
        return KVT_WIRE_E_BAD;
    if (have < frame_bytes)
        return KVT_WIRE_E_SHORT;
    if (kvt_get_u64(bytes, 16) != checksum_of(bytes, frame_bytes))
        return KVT_WIRE_E_BAD;
    *ret_bytes = frame_bytes;
    return 0;
}

/* ---- parse ---------------------------------------------------------------------------------- */

/* A body that is being read: what is still to come is [at, end). */
struct reader {
    uint8_t *at;
    uint64_t left;
    bool is_bad;
};

static uint8_t *take(struct reader *reader, uint64_t bytes)
{
    uint8_t *at = reader->at;

    if (reader->is_bad || bytes > reader->left) {
        reader->is_bad = true;
        return NULL;
    }
    reader->at += bytes;
    reader->left -= bytes;
    return at;
}

static bool is_zero(const uint8_t *bytes, uint64_t count)
{
    uint8_t all = 0;

    for (uint64_t i = 0; i < count; i++)
        all |= bytes[i];
    return all == 0;
}

/* Frames are aligned, and so are their arrays. */
static const uint32_t *take_u32s(struct reader *reader, uint32_t count)
{
    uint32_t *at = (uint32_t *)(void *)take(reader, 4ull * count);

    for (uint32_t i = 0; at != NULL && i < count; i++)
        at[i] = le32toh(at[i]);
    return at;
}

static const uint64_t *take_u64s(struct reader *reader, uint32_t count)
{
    uint64_t *at = (uint64_t *)(void *)take(reader, 8ull * count);

    for (uint32_t i = 0; at != NULL && i < count; i++)
        at[i] = le64toh(at[i]);
    return at;
}

static void parse_row(struct reader *reader, struct kvt_index_put *put)
{
    const uint8_t *fixed = take(reader, ROW_BYTES);

    if (fixed == NULL)
        return;
    put->parent_id = kvt_get_u64(fixed, 0);
    put->tokens_count = kvt_get_u32(fixed, 8);
    put->root_key_bytes = kvt_get_u32(fixed, 12);
    reader->is_bad |= put->tokens_count == 0 || put->tokens_count > KVT_BLOCK_TOKENS_MAX ||
                      put->root_key_bytes > KVT_INDEX_ROOT_KEY_BYTES_MAX || fixed[16] > 1 ||
                      fixed[17] > 1 || (fixed[17] == 0 && put->root_key_bytes != 0) ||
                      !is_zero(fixed + 18, 6);
    put->tokens = take_u32s(reader, put->tokens_count);
    put->extra_key = fixed[16] != 0 ? take(reader, KVT_EXTRA_KEY_BYTES) : NULL;
    put->root_key = fixed[17] != 0 ? take(reader, put->root_key_bytes) : NULL;
}

static void parse_copy(struct reader *reader, struct kvt_index_put *put)
{
    const uint8_t *fixed = take(reader, COPY_BYTES);

    if (fixed == NULL)
        return;
    put->content = kvt_get_u64(fixed, 0);
    put->slot_bytes = kvt_get_u64(fixed, 8);
    put->shards_count = kvt_get_u16(fixed, 16);
    reader->is_bad |=
        put->shards_count == 0 || put->shards_count > KVT_RANKS_MAX || !is_zero(fixed + 18, 6);
    put->slot_offsets = take_u64s(reader, put->shards_count);
    put->run_offsets = take_u64s(reader, put->shards_count);
}

static void parse_catalog(struct reader *reader, struct kvt_index_put *put)
{
    const uint8_t *fixed = take(reader, CATALOG_BYTES);

    if (fixed == NULL)
        return;
    put->catalog_number = kvt_get_u32(fixed, 0);
    put->catalog_bytes = kvt_get_u32(fixed, 4);
    reader->is_bad |= put->catalog_bytes > KVT_WIRE_CATALOG_BYTES_MAX;
    put->catalog_data = take(reader, put->catalog_bytes);
}

static void parse_put(struct reader *reader, uint16_t kind, struct kvt_index_put *put)
{
    const uint8_t *key = take(reader, KEY_BYTES);

    if (key == NULL)
        return;
    *put = (struct kvt_index_put){.kind = (enum kvt_index_put_kind)kind};
    put->key.ns = kvt_get_u16(key, 0);
    put->component = kvt_get_u16(key, 2);
    put->key.block_idx = kvt_get_u32(key, 4);
    put->key.epoch = kvt_get_u64(key, 8);
    put->key.block_id = kvt_get_u64(key, 16);
    if (put->key.ns >= KVT_NAMESPACES_MAX || put->component >= KVT_COMPONENTS_MAX)
        reader->is_bad = true;
    else if (kind == KVT_INDEX_PUT_ROW)
        parse_row(reader, put);
    else if (kind == KVT_INDEX_PUT_COPY)
        parse_copy(reader, put);
    else if (kind == KVT_INDEX_PUT_CATALOG)
        parse_catalog(reader, put);
}

static void parse_why(struct reader *reader, char why[KVT_WIRE_WHY_BYTES])
{
    const uint8_t *fixed = take(reader, TEXT_BYTES), *text;
    uint32_t bytes;

    if (fixed == NULL)
        return;
    bytes = kvt_get_u32(fixed, 0);
    text = take(reader, bytes);
    if (text == NULL || bytes == 0 || bytes > KVT_WIRE_WHY_BYTES || !is_zero(fixed + 4, 4) ||
        memchr(text, 0, bytes) != text + bytes - 1)
        reader->is_bad = true;
    else
        memcpy(why, text, bytes);
}

static const char *take_path(struct reader *reader, uint32_t bytes)
{
    const uint8_t *path = take(reader, bytes);

    if (path == NULL || bytes == 0 || bytes > KVT_WIRE_PATH_BYTES ||
        memchr(path, 0, bytes) != path + bytes - 1) {
        reader->is_bad = true;
        return NULL;
    }
    return (const char *)path;
}

/* How many slots make a copy whole: known components have some, others none. */
static bool parse_hello_shards(const uint8_t *at, struct kvt_index_ns *ns)
{
    ns->components_count = kvt_get_u16(at, 2);
    for (uint32_t c = 0; c < KVT_COMPONENTS_MAX; c++) {
        ns->shards[c] = kvt_get_u16(at, 48 + 2 * c);
        if ((c < ns->components_count) != (ns->shards[c] != 0) || ns->shards[c] > KVT_RANKS_MAX)
            return false;
    }
    return true;
}

static void parse_hello_namespaces(struct reader *reader, uint32_t count,
                                   struct kvt_index_config *hello)
{
    uint32_t next = 0;

    for (uint32_t i = 0; i < count; i++) {
        const uint8_t *at = take(reader, HELLO_NS_BYTES);
        uint32_t number = at == NULL ? KVT_NAMESPACES_MAX : kvt_get_u16(at, 0);
        struct kvt_index_ns *ns = &hello->namespaces[number % KVT_NAMESPACES_MAX];

        if (number >= KVT_NAMESPACES_MAX || number < next ||
            kvt_get_u16(at, 2) > KVT_COMPONENTS_MAX || kvt_get_u32(at, 4) == 0 ||
            kvt_get_u32(at, 4) > KVT_BLOCK_TOKENS_MAX || !parse_hello_shards(at, ns)) {
            reader->is_bad = true;
            return;
        }
        next = number + 1;
        ns->is_used = true;
        ns->block_tokens = kvt_get_u32(at, 4);
        ns->epoch = kvt_get_u64(at, 8);
        memcpy(ns->fingerprint, at + 16, KVT_FINGERPRINT_BYTES);
    }
}

static int parse_hello(struct reader *reader, struct kvt_index_config *hello)
{
    const uint8_t *fixed = take(reader, HELLO_BYTES);

    if (fixed == NULL)
        return KVT_WIRE_E_BAD;
    if (kvt_get_u32(fixed, 0) != KVT_WIRE_VERSION)
        return KVT_WIRE_E_VERSION;
    *hello = (struct kvt_index_config){
        .is_rebuild_wanted = (kvt_get_u32(fixed, 4) & FLAG_REBUILD) != 0,
        .has_siblings = (kvt_get_u32(fixed, 4) & FLAG_SIBLINGS) != 0,
        .bytes = kvt_get_u64(fixed, 8),
        .data_offset_bytes = kvt_get_u64(fixed, 48),
        .data_bytes = kvt_get_u64(fixed, 56),
    };
    memcpy(hello->store_id, fixed + 16, 16);
    memcpy(hello->device_uuid, fixed + 32, 16);
    reader->is_bad |= kvt_get_u32(fixed, 4) > (FLAG_REBUILD | FLAG_SIBLINGS);
    parse_hello_namespaces(reader, kvt_get_u32(fixed, 68), hello);
    hello->path = take_path(reader, kvt_get_u16(fixed, 64));
    hello->data_path = take_path(reader, kvt_get_u16(fixed, 66));
    return 0;
}

static void parse_loaded(struct reader *reader, struct kvt_index_loaded *loaded)
{
    const uint8_t *at = take(reader, LOADED_BYTES);

    if (at == NULL)
        return;
    reader->is_bad |= at[0] > 1 || !is_zero(at + 1, 7);
    loaded->was_rebuilt = at[0] != 0;
    loaded->rows = kvt_get_u64(at, 8);
    loaded->copies = kvt_get_u64(at, 16);
    loaded->dropped = kvt_get_u64(at, 24);
    loaded->block_id_max = kvt_get_u64(at, 32);
    loaded->content_max = kvt_get_u64(at, 40);
    loaded->took_ns = kvt_get_u64(at, 48);
}

static void parse_numbers(struct reader *reader, struct kvt_wire_message *message)
{
    const uint8_t *at;

    if (message->kind == KVT_WIRE_PROGRESS) {
        at = take(reader, PROGRESS_BYTES);
        if (at == NULL)
            return;
        message->scan_bytes = kvt_get_u64(at, 0);
        message->scan_total_bytes = kvt_get_u64(at, 8);
        message->rows_total = kvt_get_u64(at, 16);
        message->used_bytes = kvt_get_u64(at, 24);
        message->capacity_bytes = kvt_get_u64(at, 32);
    } else {
        at = take(reader, COMMITTED_BYTES);
        if (at == NULL)
            return;
        message->refused = kvt_get_u64(at, 0);
        message->used_bytes = kvt_get_u64(at, 8);
        message->capacity_bytes = kvt_get_u64(at, 16);
        message->refused_catalogs = kvt_get_u64(at, 24);
    }
}

static void parse_failed(struct reader *reader, struct kvt_wire_message *message)
{
    const uint8_t *at = take(reader, FAILED_BYTES);
    int64_t error = at == NULL ? 0 : (int64_t)kvt_get_u64(at, 0);

    if (error < INT32_MIN || error > INT32_MAX)
        reader->is_bad = true;
    message->error = (int)error;
    parse_why(reader, message->why);
}

int kvt_wire_parse(uint8_t *frame, struct kvt_wire_message *message)
{
    struct reader reader = {.at = frame + KVT_WIRE_HEADER_BYTES};
    int r = 0;

    KVT_ASSERT((uintptr_t)frame % 8 == 0);
    reader.left = kvt_wire_bytes(frame) - KVT_WIRE_HEADER_BYTES;
    reader.is_bad = kvt_get_u16(frame, 6) != 0;
    message->kind = kvt_get_u16(frame, 4);
    message->seq = kvt_get_u64(frame, 8);
    switch (message->kind) {
    case KVT_WIRE_HELLO:
        r = parse_hello(&reader, &message->hello);
        break;
    case KVT_WIRE_COMMIT:
        break;
    case KVT_WIRE_PROGRESS:
    case KVT_WIRE_COMMITTED:
        parse_numbers(&reader, message);
        break;
    case KVT_WIRE_LOADED:
        parse_loaded(&reader, &message->loaded);
        parse_why(&reader, message->why);
        break;
    case KVT_WIRE_BAD:
        parse_why(&reader, message->why);
        break;
    case KVT_WIRE_FAILED:
        parse_failed(&reader, message);
        break;
    default:
        if (message->kind < KVT_INDEX_PUT_ROW || message->kind > KVT_INDEX_PUT_CATALOG)
            return KVT_WIRE_E_BAD;
        parse_put(&reader, message->kind, &message->put);
    }
    if (r != 0)
        return r;
    return reader.is_bad || reader.left >= 8 || !is_zero(reader.at, reader.left) ? KVT_WIRE_E_BAD
                                                                                 : 0;
}
