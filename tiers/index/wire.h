/* How puts travel: as frames, little-endian, the same in the byte ring between the engine and the
 * index's thread and on the socket between that thread and the helper process.
 *
 *   byte 0   u32 bytes of the whole frame, a multiple of 8
 *        4   u16 kind, u16 zero
 *        8   u64 seq
 *       16   u64 checksum: XXH3 of the body, seeded with that of bytes 0..15
 *       24   body
 *
 * Body of a put: key (u16 ns, u16 component, u32 block_idx, u64 epoch, u64 block_id), then
 *   ROW      u64 parent_id, u32 tokens_count, u32 root_key_bytes, u8 has extra key, u8 has root
 *            key, 6 zero; tokens (u32 each), extra key, root key
 *   COPY     u64 content, u64 slot_bytes, u16 shards_count, 6 zero; slot offsets, run offsets
 *            (u64 each, a shard each)
 *   CATALOG  u32 number, u32 bytes; the bytes
 *   others   nothing
 * and zeros up to the frame's end.
 *
 * Pure; any thread. */
#pragma once

#include "tiers/index/index.h"

#define KVT_WIRE_HEADER_BYTES 24u
#define KVT_WIRE_KEY_BYTES 24u
#define KVT_WIRE_ROW_BYTES 24u  /* fixed part behind the key */
#define KVT_WIRE_COPY_BYTES 24u /* fixed part behind the key */
#define KVT_WIRE_CATALOG_BYTES 8u
