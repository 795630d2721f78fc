/* Between bytes of kvtier.v1 messages and the plain structs of daemon/base/api.h, both directions.
 *
 * Everything that comes from a peer is input: counts, lengths, enums and orders are checked against
 * daemon/base/limits.h, nothing is allocated outside of op->arena, and what is wrong is said in
 * op->message with the field and the limit. What a handle or a block id means is not known here.
 *
 * Decoded structs point into op->arena only, never into the bytes that were given. Tokens are
 * little-endian on the wire and are used in place (this code is for little-endian machines).
 *
 * Any thread; the op belongs to the caller. */
#pragma once

#include "daemon/base/api.h"

enum {
    KVT_CODEC_E_BAD = 1, /* op->code and op->message say why; the op must be refused */
};

/* A message ready to be written: lies in the op's arena until that is reset. */
struct kvt_codec_message {
    const void *message;
    size_t bytes;
};
/* Writes message->bytes bytes at @at. */
void kvt_codec_pack(const struct kvt_codec_message *message, uint8_t *at);

/* @op->kind and @op->arena say what to expect and where to put it. ATTACH: region tokens are
 * decoded, mappings are the server's business; `sink` and peer_* are left 0. HEALTH and DETACH have
 * no request here. */
KVT_MUST_USE int kvt_codec_decode_request(struct kvt_op *op, const uint8_t *at, size_t bytes);

/* The same for a message that lies in pieces. Tokens of a large prefix are copied once, from the
 * pieces to where the engine reads them; what is left is put together in @scratch, which is reset.
 * @pieces_count at least 1. */
struct kvt_codec_piece {
    const uint8_t *at;
    size_t bytes;
};
KVT_MUST_USE int kvt_codec_decode_pieces(struct kvt_op *op, const struct kvt_codec_piece *pieces,
                                         uint32_t pieces_count, struct kvt_arena *scratch);
KVT_MUST_USE int kvt_codec_encode_request(struct kvt_op *op, struct kvt_codec_message *ret_message);

/* Unary answers, and Attach's first event and Promote's last. E_BAD of encode: the arena is full.
 * Answers are encoded only when op->code is OK. */
KVT_MUST_USE int kvt_codec_encode_answer(struct kvt_op *op, struct kvt_codec_message *ret_message);
KVT_MUST_USE int kvt_codec_decode_answer(struct kvt_op *op, const uint8_t *at, size_t bytes);

/* Promote's stream. Decode: *ret_is_result says whether op->ans was filled or *ret_progress. */
KVT_MUST_USE int kvt_codec_encode_progress(struct kvt_arena *arena,
                                           const struct kvt_api_progress *progress,
                                           struct kvt_codec_message *ret_message);
KVT_MUST_USE int kvt_codec_decode_promote_event(struct kvt_op *op, const uint8_t *at, size_t bytes,
                                                bool *ret_is_result,
                                                struct kvt_api_progress *ret_progress);

/* Attach's later events. At most KVT_CODEC_NOTICE_BYTES_MAX, written at once. */
#define KVT_CODEC_NOTICE_BYTES_MAX 96u
size_t kvt_codec_write_notice(const struct kvt_notice *notice,
                              uint8_t at[KVT_CODEC_NOTICE_BYTES_MAX]);
/* -EBADMSG when it is no notice. */
KVT_MUST_USE int kvt_codec_read_notice(const uint8_t *at, size_t bytes,
                                       struct kvt_notice *ret_notice);

/* Health: the name asked for (at most 255 bytes), and the status, both by hand on small buffers. */
#define KVT_CODEC_HEALTH_NAME_BYTES 256u
enum kvt_health_status {
    KVT_HEALTH_UNKNOWN = 0,
    KVT_HEALTH_SERVING = 1,
    KVT_HEALTH_NOT_SERVING = 2,
    KVT_HEALTH_SERVICE_UNKNOWN = 3,
};
/* -EBADMSG, or 0 and the terminated name. */
KVT_MUST_USE int kvt_codec_read_health_request(const uint8_t *at, size_t bytes,
                                               char ret_name[KVT_CODEC_HEALTH_NAME_BYTES]);
size_t kvt_codec_write_health_request(const char *name,
                                      uint8_t at[KVT_CODEC_HEALTH_NAME_BYTES * 2]);
KVT_MUST_USE int kvt_codec_read_health_answer(const uint8_t *at, size_t bytes,
                                              enum kvt_health_status *ret_status);
size_t kvt_codec_write_health_answer(enum kvt_health_status status, uint8_t at[16]);
