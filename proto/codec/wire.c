#include "proto/codec/wire.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "tokens are used as they lie on the wire");
static_assert(sizeof(((struct kvt_op *)NULL)->message) >= 128, "room for field and limit");

int kvt_codec_bad(struct kvt_op *op, const char *format, ...)
{
    va_list args;

    op->code = KVT_CODE_INVALID_ARGUMENT;
    va_start(args, format);
    (void)vsnprintf(op->message, sizeof(op->message), format, args);
    va_end(args);
    return KVT_CODEC_E_BAD;
}

int kvt_codec_no_memory(struct kvt_op *op)
{
    kvt_op_fail(op, KVT_CODE_RESOURCE_EXHAUSTED, "%s needs more than %zu bytes to be served",
                kvt_op_kind_text(op->kind), op->arena->cap_bytes);
    return KVT_CODEC_E_BAD;
}

/* ---- memory -----------------------------------------------------------------------------------
 */

/* What protobuf-c allocates from: nothing is freed one by one. */
struct unpack_memory {
    struct kvt_arena *arena;
    bool is_full; /* protobuf-c itself does not tell garbage from "no memory" */
};

static void *unpack_alloc(void *ctx, size_t bytes)
{
    struct unpack_memory *memory = ctx;
    void *ptr = kvt_arena_alloc(memory->arena, bytes);

    memory->is_full |= ptr == NULL;
    return ptr;
}

static void unpack_free(void *ctx, void *ptr)
{
    (void)ctx;
    (void)ptr;
}

int kvt_codec_unpack(struct kvt_op *op, const ProtobufCMessageDescriptor *descriptor,
                     const uint8_t *at, size_t bytes, void *ret_message)
{
    struct unpack_memory memory = {.arena = op->arena};
    ProtobufCAllocator allocator = {
        .alloc = unpack_alloc, .free = unpack_free, .allocator_data = &memory};
    ProtobufCMessage *message = protobuf_c_message_unpack(descriptor, &allocator, bytes, at);

    if (message == NULL) {
        if (memory.is_full)
            return kvt_codec_no_memory(op);
        return kvt_codec_bad(op, "these %zu bytes are no %s", bytes, descriptor->name);
    }
    memcpy(ret_message, &message, sizeof(message));
    return 0;
}

void kvt_codec_pack(const struct kvt_codec_message *message, uint8_t *at)
{
    size_t bytes = protobuf_c_message_pack(message->message, at);

    KVT_ASSERT(bytes == message->bytes);
}

/* ---- take -------------------------------------------------------------------------------------
 */

bool kvt_codec_is_zero(const uint8_t *at, size_t bytes)
{
    uint8_t any = 0;

    for (size_t i = 0; i < bytes; i++)
        any |= at[i];
    return any == 0;
}

void kvt_codec_read_handle(const uint8_t at[KVT_CODEC_HANDLE_BYTES], struct kvt_handle *ret_handle)
{
    memcpy(&ret_handle->boot_id, at, 8);
    memcpy(&ret_handle->id, at + 8, 8);
    memcpy(&ret_handle->secret, at + 16, 8);
}

void kvt_codec_write_handle(const struct kvt_handle *handle, uint8_t at[KVT_CODEC_HANDLE_BYTES])
{
    memcpy(at, &handle->boot_id, 8);
    memcpy(at + 8, &handle->id, 8);
    memcpy(at + 16, &handle->secret, 8);
}

int kvt_codec_take_handle(struct kvt_op *op, const ProtobufCBinaryData *in, const char *field,
                          struct kvt_handle *ret_handle)
{
    if (in->len == 0) {
        *ret_handle = KVT_HANDLE_NONE;
        return 0;
    }
    if (in->len != KVT_CODEC_HANDLE_BYTES)
        return kvt_codec_bad(op, "%s: a handle has %u bytes, not %zu", field,
                             KVT_CODEC_HANDLE_BYTES, in->len);
    /* "None" has one form on the wire. Were zeros another, a field would be set for one reader of
     * the message and absent for the next. */
    if (kvt_codec_is_zero(in->data, in->len))
        return kvt_codec_bad(op, "%s: a handle of zeros names nothing; leave the field out", field);
    kvt_codec_read_handle(in->data, ret_handle);
    return 0;
}

int kvt_codec_take_fixed(struct kvt_op *op, const ProtobufCBinaryData *in, const char *field,
                         size_t bytes, uint8_t *ret_at)
{
    if (in->len != bytes)
        return kvt_codec_bad(op, "%s: must have %zu bytes, not %zu", field, bytes, in->len);
    memcpy(ret_at, in->data, bytes);
    return 0;
}

int kvt_codec_take_fingerprint(struct kvt_op *op, const ProtobufCBinaryData *in, uint8_t *ret_at)
{
    KVT_CODEC_TRY(kvt_codec_take_fixed(op, in, "fingerprint", KVT_FINGERPRINT_BYTES, ret_at));
    if (kvt_codec_is_zero(ret_at, KVT_FINGERPRINT_BYTES))
        return kvt_codec_bad(op, "fingerprint: zeros name nothing; leave the field out");
    return 0;
}

int kvt_codec_take_blob(struct kvt_op *op, const ProtobufCBinaryData *in, const char *field,
                        size_t bytes_max, struct kvt_text *ret_text)
{
    if (in->len > bytes_max)
        return kvt_codec_bad(op, "%s: at most %zu bytes, not %zu", field, bytes_max, in->len);
    *ret_text = (struct kvt_text){.at = in->len == 0 ? "" : (const char *)in->data,
                                  .bytes = (uint32_t)in->len};
    return 0;
}

/* Bytes of the UTF-8 character at @at, of which @left bytes are there; 0: none, or NUL. */
static size_t utf8_character(const uint8_t *at, size_t left)
{
    static const uint32_t least[5] = {0, 1, 0x80, 0x800, 0x10000};
    size_t bytes = at[0] < 0x80   ? 1
                   : at[0] < 0xc0 ? 0
                   : at[0] < 0xe0 ? 2
                   : at[0] < 0xf0 ? 3
                   : at[0] < 0xf8 ? 4
                                  : 0;
    uint32_t value = bytes < 2 ? at[0] : at[0] & (0x7fu >> bytes);

    if (bytes == 0 || bytes > left)
        return 0;
    for (size_t i = 1; i < bytes; i++) {
        if ((at[i] & 0xc0) != 0x80)
            return 0;
        value = value << 6 | (at[i] & 0x3fu);
    }
    if (value < least[bytes] || value > 0x10ffff || (value >= 0xd800 && value < 0xe000))
        return 0;
    return bytes;
}

int kvt_codec_take_text(struct kvt_op *op, const ProtobufCBinaryData *in, const char *field,
                        size_t bytes_max, struct kvt_text *ret_text)
{
    KVT_CODEC_TRY(kvt_codec_take_blob(op, in, field, bytes_max, ret_text));
    for (size_t i = 0; i < in->len;) {
        size_t bytes = utf8_character(in->data + i, in->len - i);

        if (bytes == 0)
            return kvt_codec_bad(op, "%s: byte %zu is not UTF-8 text (or NUL)", field, i);
        i += bytes;
    }
    return 0;
}

int kvt_codec_take_count(struct kvt_op *op, uint64_t count, const char *field, uint64_t count_min,
                         uint64_t count_max)
{
    if (count < count_min || count > count_max)
        return kvt_codec_bad(op, "%s: %llu is not within %llu .. %llu", field,
                             (unsigned long long)count, (unsigned long long)count_min,
                             (unsigned long long)count_max);
    return 0;
}

static int take_extra_keys(struct kvt_op *op, const Kvtier__V1__Prefix *in,
                           struct kvt_api_prefix *ret_prefix)
{
    struct kvt_api_extra_key *keys;

    KVT_CODEC_TRY(kvt_codec_take_count(op, in->n_extra_keys, "prefix.extra_keys", 0,
                                       KVT_CODEC_EXTRA_KEYS_MAX));
    keys = kvt_arena_array(op->arena, in->n_extra_keys, sizeof(*keys));
    if (keys == NULL)
        return kvt_codec_no_memory(op);
    for (size_t i = 0; i < in->n_extra_keys; i++) {
        const Kvtier__V1__ExtraKey *key = in->extra_keys[i];

        if (i > 0 && key->block_idx <= keys[i - 1].block_idx)
            return kvt_codec_bad(op, "prefix.extra_keys[%zu].block_idx: %u does not rise", i,
                                 key->block_idx);
        if (key->block_idx >= ret_prefix->tokens_count)
            return kvt_codec_bad(op, "prefix.extra_keys[%zu].block_idx: %u is beyond the tokens", i,
                                 key->block_idx);
        keys[i].block_idx = key->block_idx;
        KVT_CODEC_TRY(kvt_codec_take_fixed(op, &key->key, "prefix.extra_keys.key",
                                           KVT_EXTRA_KEY_BYTES, keys[i].key));
    }
    ret_prefix->extra_keys = keys;
    ret_prefix->extra_keys_count = (uint32_t)in->n_extra_keys;
    return 0;
}

int kvt_codec_take_prefix(struct kvt_op *op, const Kvtier__V1__Prefix *in,
                          struct kvt_api_prefix *ret_prefix)
{
    static const uint32_t no_tokens[1];
    const uint32_t *taken = ret_prefix->tokens;
    uint64_t taken_count = ret_prefix->tokens_count;

    *ret_prefix = (struct kvt_api_prefix){.salt.at = "", .lora.at = "", .tokens = no_tokens};
    if (in == NULL)
        return 0;
    KVT_CODEC_TRY(kvt_codec_take_blob(op, &in->salt, "prefix.salt", KVT_ROOT_TAG_BYTES_MAX,
                                      &ret_prefix->salt));
    KVT_CODEC_TRY(kvt_codec_take_blob(op, &in->lora, "prefix.lora", KVT_ROOT_TAG_BYTES_MAX,
                                      &ret_prefix->lora));
    KVT_CODEC_TRY(kvt_codec_take_handle(op, &in->cursor, "prefix.cursor", &ret_prefix->cursor));
    if (in->tokens.len % 4 != 0)
        return kvt_codec_bad(op, "prefix.tokens: %zu bytes are not a multiple of 4",
                             in->tokens.len);
    KVT_CODEC_TRY(kvt_codec_take_count(op, in->tokens.len / 4, "prefix.tokens (count)", 0,
                                       KVT_REQUEST_TOKENS_MAX));
    if (in->tokens.len > 0) {
        /* The arena aligns what unpack takes from it, so the tokens are usable where they are. */
        KVT_ASSERT((uintptr_t)in->tokens.data % sizeof(uint32_t) == 0);
        ret_prefix->tokens = (const uint32_t *)(const void *)in->tokens.data;
        ret_prefix->tokens_count = in->tokens.len / 4;
    } else if (taken_count > 0) {
        ret_prefix->tokens = taken;
        ret_prefix->tokens_count = taken_count;
    }
    return take_extra_keys(op, in, ret_prefix);
}

/* What a plane of these sizes means for the component's bytes is the daemon's to judge. */
static int take_quant(struct kvt_op *op, const Kvtier__V1__Component *component,
                      struct kvt_api_quant *ret_quant)
{
    const Kvtier__V1__Quantisation *in = component->quantisation;

    *ret_quant = (struct kvt_api_quant){0};
    if (in == NULL)
        return 0;
    if (component->kind == 3)
        return kvt_codec_bad(op, "components.quantisation: recurrent states are not quantised");
    KVT_CODEC_TRY(kvt_codec_take_count(op, in->kind, "components.quantisation.kind", 1, 2));
    KVT_CODEC_TRY(kvt_codec_take_count(op, in->elem, "components.quantisation.elem", 1, 2));
    KVT_CODEC_TRY(kvt_codec_take_count(op, in->order, "components.quantisation.order", 1, 2));
    KVT_CODEC_TRY(kvt_codec_take_count(op, in->plane_tokens, "components.quantisation.plane_tokens",
                                       1, KVT_QUANT_SIZE_MAX));
    KVT_CODEC_TRY(kvt_codec_take_count(op, in->heads, "components.quantisation.heads", 1,
                                       KVT_QUANT_SIZE_MAX));
    KVT_CODEC_TRY(kvt_codec_take_count(op, in->head_dim, "components.quantisation.head_dim", 1,
                                       KVT_QUANT_SIZE_MAX));
    *ret_quant = (struct kvt_api_quant){.kind = in->kind,
                                        .elem = in->elem,
                                        .order = in->order,
                                        .plane_tokens = in->plane_tokens,
                                        .heads = in->heads,
                                        .head_dim = in->head_dim};
    return 0;
}

int kvt_codec_take_component(struct kvt_op *op, const Kvtier__V1__Component *in,
                             struct kvt_api_component *ret_component)
{
    KVT_CODEC_TRY(kvt_codec_take_count(op, in->kind, "components.kind", 1, 3));
    if ((in->kind == 2) != (in->window_tokens > 0))
        return kvt_codec_bad(op, "components.window_tokens: %u with kind %u", in->window_tokens,
                             in->kind);
    KVT_CODEC_TRY(kvt_codec_take_count(op, in->bytes_per_block, "components.bytes_per_block", 1,
                                       KVT_SHARD_BYTES_MAX));
    ret_component->kind = in->kind;
    ret_component->window_tokens = in->window_tokens;
    ret_component->bytes_per_block = in->bytes_per_block;
    ret_component->is_replicated = in->is_replicated != 0;
    KVT_CODEC_TRY(take_quant(op, in, &ret_component->quant));
    return kvt_codec_take_text(op, &in->name, "components.name", KVT_MODEL_TEXT_BYTES_MAX,
                               &ret_component->name);
}

/* ---- put --------------------------------------------------------------------------------------
 */

bool kvt_codec_put_handle(struct kvt_op *op, const struct kvt_handle *handle,
                          ProtobufCBinaryData *ret_out)
{
    *ret_out = (ProtobufCBinaryData){0};
    if (handle->boot_id == 0 && handle->id == 0 && handle->secret == 0)
        return true;
    ret_out->data = kvt_arena_alloc(op->arena, KVT_CODEC_HANDLE_BYTES);
    if (ret_out->data == NULL)
        return false;
    ret_out->len = KVT_CODEC_HANDLE_BYTES;
    kvt_codec_write_handle(handle, ret_out->data);
    return true;
}

ProtobufCBinaryData kvt_codec_put_bytes(const void *at, size_t bytes)
{
    /* Packing only reads; the generated structs know no const. */
    return (ProtobufCBinaryData){.len = bytes, .data = (uint8_t *)(uintptr_t)at};
}

ProtobufCBinaryData kvt_codec_put_text(const struct kvt_text *text)
{
    return kvt_codec_put_bytes(text->at, text->bytes);
}

Kvtier__V1__Prefix *kvt_codec_put_prefix(struct kvt_op *op, const struct kvt_api_prefix *prefix)
{
    Kvtier__V1__Prefix *out = kvt_arena_alloc(op->arena, sizeof(*out));
    Kvtier__V1__ExtraKey *keys;

    if (out == NULL)
        return NULL;
    kvtier__v1__prefix__init(out);
    out->salt = kvt_codec_put_text(&prefix->salt);
    out->lora = kvt_codec_put_text(&prefix->lora);
    if (!kvt_codec_put_handle(op, &prefix->cursor, &out->cursor))
        return NULL;
    out->tokens = kvt_codec_put_bytes(prefix->tokens, prefix->tokens_count * 4);
    if (prefix->extra_keys_count == 0)
        return out;
    keys = kvt_arena_array(op->arena, prefix->extra_keys_count, sizeof(*keys));
    out->extra_keys =
        kvt_arena_array(op->arena, prefix->extra_keys_count, sizeof(*out->extra_keys));
    if (keys == NULL || out->extra_keys == NULL)
        return NULL;
    for (uint32_t i = 0; i < prefix->extra_keys_count; i++) {
        kvtier__v1__extra_key__init(&keys[i]);
        keys[i].block_idx = prefix->extra_keys[i].block_idx;
        keys[i].key = kvt_codec_put_bytes(prefix->extra_keys[i].key, KVT_EXTRA_KEY_BYTES);
        out->extra_keys[i] = &keys[i];
    }
    out->n_extra_keys = prefix->extra_keys_count;
    return out;
}

static Kvtier__V1__Quantisation *put_quant(struct kvt_op *op, const struct kvt_api_quant *quant)
{
    Kvtier__V1__Quantisation *out = kvt_arena_alloc(op->arena, sizeof(*out));

    if (out == NULL)
        return NULL;
    kvtier__v1__quantisation__init(out);
    out->kind = quant->kind;
    out->elem = quant->elem;
    out->order = quant->order;
    out->plane_tokens = quant->plane_tokens;
    out->heads = quant->heads;
    out->head_dim = quant->head_dim;
    return out;
}

Kvtier__V1__Component *kvt_codec_put_component(struct kvt_op *op,
                                               const struct kvt_api_component *component)
{
    Kvtier__V1__Component *out = kvt_arena_alloc(op->arena, sizeof(*out));

    if (out == NULL)
        return NULL;
    kvtier__v1__component__init(out);
    out->kind = component->kind;
    out->window_tokens = component->window_tokens;
    out->bytes_per_block = component->bytes_per_block;
    out->is_replicated = component->is_replicated;
    out->name = kvt_codec_put_text(&component->name);
    if (component->quant.kind == 0)
        return out;
    out->quantisation = put_quant(op, &component->quant);
    return out->quantisation == NULL ? NULL : out;
}
