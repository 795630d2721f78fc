/* Inside of the codec: small steps that every message is made of. "take" checks and copies from a
 * protobuf-c struct into ours (0, or KVT_CODEC_E_BAD with the op failed); "put" makes the
 * protobuf-c view of ours (it may point into our structs: packing follows at once). */
#pragma once

#include "proto/codec/codec.h"
#include "proto/grpc/health/v1/health.pb-c.h"
#include "proto/kvtier/v1/kvtier.pb-c.h"

#define KVT_CODEC_HANDLE_BYTES 24u
#define KVT_CODEC_TAGS_MAX 64u
#define KVT_CODEC_REGION_BYTES_MAX (1ull << 46)
#define KVT_CODEC_LAYER_GROUPS_MAX KVT_PIECES_PER_COMPONENT_MAX
#define KVT_CODEC_DUMP_NODES_MAX 4096u
#define KVT_CODEC_EXTRA_KEYS_MAX 65536u

/* Leaves the function with the result of a step that did not go well. */
#define KVT_CODEC_TRY(step)                                                                        \
    do {                                                                                           \
        int try_r = (step);                                                                        \
        if (try_r != 0)                                                                            \
            return try_r;                                                                          \
    } while (0)

/* Fails @op with INVALID_ARGUMENT; always KVT_CODEC_E_BAD. */
int kvt_codec_bad(struct kvt_op *op, const char *format, ...) KVT_PRINTF(2, 3);
/* Fails @op with RESOURCE_EXHAUSTED because its arena is full; always KVT_CODEC_E_BAD. */
int kvt_codec_no_memory(struct kvt_op *op);

/* Unpacks with the op's arena as the only memory. */
KVT_MUST_USE int kvt_codec_unpack(struct kvt_op *op, const ProtobufCMessageDescriptor *descriptor,
                                  const uint8_t *at, size_t bytes, void *ret_message);

KVT_MUST_USE int kvt_codec_take_handle(struct kvt_op *op, const ProtobufCBinaryData *in,
                                       const char *field, struct kvt_handle *ret_handle);
KVT_MUST_USE int kvt_codec_take_fixed(struct kvt_op *op, const ProtobufCBinaryData *in,
                                      const char *field, size_t bytes, uint8_t *ret_at);
/* 32 bytes, not all of them 0. */
KVT_MUST_USE int kvt_codec_take_fingerprint(struct kvt_op *op, const ProtobufCBinaryData *in,
                                            uint8_t *ret_at);
/* Any bytes. */
KVT_MUST_USE int kvt_codec_take_blob(struct kvt_op *op, const ProtobufCBinaryData *in,
                                     const char *field, size_t bytes_max,
                                     struct kvt_text *ret_text);
/* UTF-8 without NUL: texts for people and for the fingerprint. */
KVT_MUST_USE int kvt_codec_take_text(struct kvt_op *op, const ProtobufCBinaryData *in,
                                     const char *field, size_t bytes_max,
                                     struct kvt_text *ret_text);
KVT_MUST_USE int kvt_codec_take_count(struct kvt_op *op, uint64_t count, const char *field,
                                      uint64_t count_min, uint64_t count_max);
/* Tokens that @ret_prefix already has were taken out of the message before it was unpacked
 * (pieces.c); such a message cannot be told from one whose last tokens field came first. */
KVT_MUST_USE int kvt_codec_take_prefix(struct kvt_op *op, const Kvtier__V1__Prefix *in,
                                       struct kvt_api_prefix *ret_prefix);
/* The decoder of op->kind; op->req is cleared but for tokens taken out before. */
KVT_MUST_USE int kvt_codec_decode_kind(struct kvt_op *op, const uint8_t *at, size_t bytes);
KVT_MUST_USE int kvt_codec_take_component(struct kvt_op *op, const Kvtier__V1__Component *in,
                                          struct kvt_api_component *ret_component);

/* NULL / false: the arena is full. NONE becomes empty. */
KVT_MUST_USE bool kvt_codec_put_handle(struct kvt_op *op, const struct kvt_handle *handle,
                                       ProtobufCBinaryData *ret_out);
ProtobufCBinaryData kvt_codec_put_bytes(const void *at, size_t bytes);
ProtobufCBinaryData kvt_codec_put_text(const struct kvt_text *text);
KVT_MUST_USE Kvtier__V1__Prefix *kvt_codec_put_prefix(struct kvt_op *op,
                                                      const struct kvt_api_prefix *prefix);
KVT_MUST_USE Kvtier__V1__Component *
kvt_codec_put_component(struct kvt_op *op, const struct kvt_api_component *component);

void kvt_codec_write_handle(const struct kvt_handle *handle, uint8_t at[KVT_CODEC_HANDLE_BYTES]);
bool kvt_codec_is_zero(const uint8_t *at, size_t bytes);
void kvt_codec_read_handle(const uint8_t at[KVT_CODEC_HANDLE_BYTES], struct kvt_handle *ret_handle);

/* Lists of names and numbers, and L1's part of Stats (stats.c, stats_l1.c). put: NULL or false when
 * the arena is full. A string is a terminated copy. */
KVT_MUST_USE Kvtier__V1__Counter **
kvt_codec_put_counters(struct kvt_op *op, const struct kvt_api_counter *counters, uint32_t count);
KVT_MUST_USE int kvt_codec_take_counters(struct kvt_op *op, size_t count,
                                         Kvtier__V1__Counter *const *in,
                                         struct kvt_api_counter **ret_counters);
KVT_MUST_USE int kvt_codec_take_string(struct kvt_op *op, const ProtobufCBinaryData *in,
                                       const char *field, const char **ret_string);
KVT_MUST_USE bool kvt_codec_put_l1(struct kvt_op *op, Kvtier__V1__StatsAnswer *out);
KVT_MUST_USE int kvt_codec_take_l1(struct kvt_op *op, const Kvtier__V1__StatsAnswer *in);

/* The large answers (stats.c); encode: NULL when the arena is full. */
KVT_MUST_USE ProtobufCMessage *kvt_codec_encode_stats(struct kvt_op *op);
KVT_MUST_USE int kvt_codec_decode_stats(struct kvt_op *op, const uint8_t *at, size_t bytes);
KVT_MUST_USE ProtobufCMessage *kvt_codec_encode_dump(struct kvt_op *op);
KVT_MUST_USE int kvt_codec_decode_dump(struct kvt_op *op, const uint8_t *at, size_t bytes);
KVT_MUST_USE int kvt_codec_take_tiers(struct kvt_op *op, size_t count, const uint64_t *in,
                                      const char *field, uint64_t ret_at[KVT_API_TIERS]);
