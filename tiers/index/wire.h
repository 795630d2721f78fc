/* Frames: how puts and what is said about them travel, little-endian, the same in the byte rings
 * between the engine and the index's thread and on the socket between that thread and the helper
 * process.
 *
 *   byte 0   u32 bytes of the whole frame, a multiple of 8
 *        4   u16 kind, u16 zero
 *        8   u64 seq: of a put its number; of COMMIT and COMMITTED the last put that is meant
 *       16   u64 checksum: XXH3 of the body, seeded with the XXH3 of bytes 0..15
 *       24   body, then zeros up to the frame's end
 *
 *   daemon -> helper   HELLO, then ROW, COPY, DROP_* and COMMIT
 *   helper -> daemon   PROGRESS, ROW, COPY, LOADED, then COMMITTED; or BAD or FAILED, and it ends
 *
 * Body of a put: the key (u16 ns, u16 component, u32 block_idx, u64 epoch, u64 block_id), then
 *   ROW      u64 parent_id, u32 tokens_count, u32 root_key_bytes, u8 has extra key, u8 has root
 *            key, 6 zero; the tokens (u32 each), the extra key, the root key
 *   COPY     u64 content, u64 slot_bytes, u16 shards_count, 6 zero; slot offsets, run offsets (u64
 *            each, a shard each)
 *   CATALOG  u32 number, u32 bytes; the bytes
 *   others   nothing
 * Texts are u32 bytes, u32 zero, and the bytes; the last is a zero and no other is.
 *
 * Whatever comes out of a socket is input: check and parse refuse what does not keep the limits,
 * has bytes too many or too few, or is not written as encode would. Pure; any thread. */
#pragma once

#include "tiers/index/index.h"

/* Raised whenever a frame changes: a daemon and a helper of two versions do not talk. */
#define KVT_WIRE_VERSION 1u

#define KVT_WIRE_HEADER_BYTES 24u
#define KVT_WIRE_BYTES_MAX (34u << 10) /* the longest frame: a row of KVT_BLOCK_TOKENS_MAX */
#define KVT_WIRE_CATALOG_BYTES_MAX (16u << 10)
#define KVT_WIRE_WHY_BYTES 160u /* with its zero */
#define KVT_WIRE_PATH_BYTES 4096u

#define KVT_WIRE_E_SHORT 1   /* the rest of the frame is still to come */
#define KVT_WIRE_E_BAD 2     /* no frame */
#define KVT_WIRE_E_VERSION 3 /* a HELLO of another version */

enum kvt_wire_kind { /* beside enum kvt_index_put_kind */
                     KVT_WIRE_HELLO = 16,
                     KVT_WIRE_COMMIT,
                     KVT_WIRE_PROGRESS = 32,
                     KVT_WIRE_LOADED,
                     KVT_WIRE_COMMITTED,
                     KVT_WIRE_BAD,    /* the index is not usable: it is to be made anew */
                     KVT_WIRE_FAILED, /* it cannot go on */
};

struct kvt_wire_message {
    uint16_t kind;
    uint64_t seq;
    struct kvt_index_put put;       /* the puts */
    struct kvt_index_loaded loaded; /* LOADED */
    uint64_t refused;               /* COMMITTED */
    uint64_t refused_catalogs;      /* of them; what the helper says has none */
    uint64_t used_bytes;            /* COMMITTED, PROGRESS: of the map */
    uint64_t capacity_bytes;        /* as used_bytes */
    uint64_t rows_total;            /* PROGRESS: about so many will be walked; 0: not known */
    uint64_t scan_bytes;            /* PROGRESS */
    uint64_t scan_total_bytes;      /* PROGRESS */
    int error;                      /* FAILED: -errno or a signal */
    char why[KVT_WIRE_WHY_BYTES];   /* LOADED, BAD, FAILED */
    struct kvt_index_config hello;  /* HELLO: paths, bytes, ids, namespaces, is_rebuild_wanted */
};

/* A whole frame at @to (KVT_WIRE_BYTES_MAX, aligned to 8), without its checksum; its bytes. What
 * is put or said is ours: it keeps the limits. */
uint32_t kvt_wire_encode(uint8_t *to, const struct kvt_wire_message *message);
uint32_t kvt_wire_encode_put(uint8_t *to, const struct kvt_index_put *put, uint64_t seq);
void kvt_wire_seal(uint8_t *frame);

/* 0 and the bytes of the whole sealed frame that begins at @bytes, E_SHORT or E_BAD. */
KVT_MUST_USE int kvt_wire_check(const uint8_t *bytes, uint64_t have, uint32_t *ret_bytes);
/* The bytes of a frame of our own, sealed or not. */
uint32_t kvt_wire_bytes(const uint8_t *frame);
/* Reads a frame (aligned to 8) of which the length is right. Pointers of the put and paths of a
 * HELLO point into the frame, whose numbers are brought into host order: it is parsed once. Only
 * the fields of that kind are set. 0, E_BAD or E_VERSION. */
KVT_MUST_USE int kvt_wire_parse(uint8_t *frame, struct kvt_wire_message *message);
