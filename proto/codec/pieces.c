/* A large request as gRPC has it: in pieces, most of it tokens. protobuf-c wants it in one piece
 * and copies the tokens once more. Here the head of the message is read far enough to find the
 * tokens of its prefix; they are copied straight to their place, and protobuf-c gets the message
 * without them:
 *
 *   message   | fields | prefix tag, length | fields | tokens tag, length | tokens | rest ...
 *   without   | fields | prefix tag, length'| fields |                             | rest ...
 *
 * Whatever is not of this shape within the first piece goes the ordinary way. If a later tokens
 * field follows, it is in the rest and wins, as protobuf has it. */
#include <string.h>

#include "proto/codec/wire.h"

#define TOKENS_BYTES_MIN 8192u /* below this a copy more does not matter */
#define TOKENS_FIELD 4u
#define WIRE_VARINT 0u
#define WIRE_BYTES 2u

struct head {
    const uint8_t *at;
    size_t bytes, pos;
};

struct found {
    size_t prefix_tag_at;  /* where the prefix field begins */
    size_t prefix_body_at; /* behind its length */
    uint64_t prefix_bytes;
    size_t tokens_tag_at, tokens_at;
    uint64_t tokens_bytes;
};

static bool read_varint(struct head *head, uint64_t *ret_value)
{
    uint64_t value = 0;

    for (unsigned shift = 0; shift < 63 && head->pos < head->bytes; shift += 7) {
        uint8_t byte = head->at[head->pos++];

        value |= (uint64_t)(byte & 0x7f) << shift;
        if ((byte & 0x80) == 0) {
            *ret_value = value;
            return true;
        }
    }
    return false;
}

static size_t write_varint(uint8_t *at, uint64_t value)
{
    size_t bytes = 0;

    for (; value >= 0x80; value >>= 7)
        at[bytes++] = (uint8_t)(value | 0x80);
    at[bytes++] = (uint8_t)value;
    return bytes;
}

/* Skips fields until a length-delimited @field; its tag begins at *ret_tag_at, and head->pos is
 * behind its length. */
static bool find_field(struct head *head, uint64_t field, size_t *ret_tag_at, uint64_t *ret_bytes)
{
    for (;;) {
        size_t tag_at = head->pos;
        uint64_t tag, value;

        if (!read_varint(head, &tag) || !read_varint(head, &value))
            return false;
        if (tag == (field << 3 | WIRE_BYTES)) {
            *ret_tag_at = tag_at;
            *ret_bytes = value;
            return true;
        }
        if ((tag & 7) == WIRE_VARINT)
            continue;
        if ((tag & 7) != WIRE_BYTES || value > head->bytes - head->pos)
            return false;
        head->pos += value;
    }
}

static bool find_tokens(const struct kvt_codec_piece *piece, size_t total, uint64_t prefix_field,
                        struct found *ret_found)
{
    struct head head = {.at = piece->at, .bytes = piece->bytes};
    size_t prefix_end;

    if (!find_field(&head, prefix_field, &ret_found->prefix_tag_at, &ret_found->prefix_bytes) ||
        ret_found->prefix_bytes > total - head.pos)
        return false;
    ret_found->prefix_body_at = head.pos;
    prefix_end = head.pos + ret_found->prefix_bytes;
    head.bytes = KVT_MIN(head.bytes, prefix_end);
    if (!find_field(&head, TOKENS_FIELD, &ret_found->tokens_tag_at, &ret_found->tokens_bytes))
        return false;
    ret_found->tokens_at = head.pos;
    return ret_found->tokens_bytes >= TOKENS_BYTES_MIN && ret_found->tokens_bytes % 4 == 0 &&
           ret_found->tokens_bytes <= KVT_REQUEST_TOKENS_MAX * 4u &&
           ret_found->tokens_bytes <= prefix_end - head.pos;
}

/* Bytes [@from, @from + @bytes) of the message. */
static void copy_range(const struct kvt_codec_piece *pieces, uint32_t count, size_t from,
                       size_t bytes, uint8_t *to)
{
    for (uint32_t i = 0; i < count && bytes > 0; i++) {
        size_t here;

        if (from >= pieces[i].bytes) {
            from -= pieces[i].bytes;
            continue;
        }
        here = KVT_MIN(bytes, pieces[i].bytes - from);
        memcpy(to, pieces[i].at + from, here);
        to += here;
        bytes -= here;
        from = 0;
    }
    KVT_ASSERT(bytes == 0);
}

/* Where a kind has its prefix: field number and place in the request. */
static struct kvt_api_prefix *prefix_of(struct kvt_op *op, uint64_t *ret_field)
{
    switch (op->kind) {
    case KVT_OP_LOOKUP:
        *ret_field = 2;
        return &op->req.lookup.prefix;
    case KVT_OP_RESERVE:
        *ret_field = 2;
        return &op->req.reserve.prefix;
    case KVT_OP_PROMOTE:
        *ret_field = 3;
        return &op->req.promote.prefix;
    case KVT_OP_DEMOTE:
        *ret_field = 4;
        return &op->req.demote.prefix;
    case KVT_OP_EVICT:
        *ret_field = 3;
        return &op->req.evict.prefix;
    default:
        return NULL;
    }
}

/* The message without its tokens, in @scratch; NULL: the arena is full. */
static uint8_t *put_together(const struct kvt_codec_piece *pieces, uint32_t count, size_t total,
                             const struct found *found, struct kvt_arena *scratch,
                             size_t *ret_bytes)
{
    size_t rest_at = found->tokens_at + found->tokens_bytes;
    uint8_t *at = kvt_arena_alloc(scratch, total - found->tokens_bytes + 16);
    const uint8_t *head = pieces[0].at;
    struct head tag = {.at = head, .bytes = pieces[0].bytes, .pos = found->prefix_tag_at};
    size_t bytes = found->prefix_tag_at;
    uint64_t value = 0;

    if (at == NULL || !read_varint(&tag, &value))
        return NULL;
    memcpy(at, head, bytes);
    bytes += write_varint(at + bytes, value);
    bytes += write_varint(at + bytes, found->prefix_bytes - (rest_at - found->tokens_tag_at));
    memcpy(at + bytes, head + found->prefix_body_at, found->tokens_tag_at - found->prefix_body_at);
    bytes += found->tokens_tag_at - found->prefix_body_at;
    copy_range(pieces, count, rest_at, total - rest_at, at + bytes);
    *ret_bytes = bytes + (total - rest_at);
    return at;
}

int kvt_codec_decode_pieces(struct kvt_op *op, const struct kvt_codec_piece *pieces,
                            uint32_t pieces_count, struct kvt_arena *scratch)
{
    uint64_t field = 0;
    struct kvt_api_prefix *prefix = prefix_of(op, &field);
    struct found found = {0};
    size_t total = 0, bytes = 0;
    uint32_t *tokens;
    uint8_t *at;

    kvt_arena_reset(scratch);
    for (uint32_t i = 0; i < pieces_count; i++)
        total += pieces[i].bytes;
    memset(&op->req, 0, sizeof(op->req));
    if (prefix == NULL || !find_tokens(&pieces[0], total, field, &found)) {
        if (pieces_count == 1)
            return kvt_codec_decode_kind(op, pieces[0].at, total);
        at = kvt_arena_alloc(scratch, total);
        if (at == NULL)
            return kvt_codec_no_memory(op);
        copy_range(pieces, pieces_count, 0, total, at);
        return kvt_codec_decode_kind(op, at, total);
    }
    tokens = kvt_arena_alloc(op->arena, found.tokens_bytes);
    at = put_together(pieces, pieces_count, total, &found, scratch, &bytes);
    if (tokens == NULL || at == NULL)
        return kvt_codec_no_memory(op);
    copy_range(pieces, pieces_count, found.tokens_at, found.tokens_bytes, (uint8_t *)tokens);
    prefix->tokens = tokens;
    prefix->tokens_count = found.tokens_bytes / 4;
    return kvt_codec_decode_kind(op, at, bytes);
}
