/* The bytes of rows: keys and values of the index's LMDB file (docs/formats.md: "The index"). A
 * value has a checksum over its key and itself, seeded with the store and the device, so a row of
 * another place or another index is not a row.
 *
 *   key    | block_id u64 | ns u16 | epoch u64 | block_idx u32 | type u8 |    big-endian
 *
 *   type 0          the block: parent, extra key, root key, tokens
 *   type 1 + c      its component c: content and slots
 *   type 0x80 + i   part i of tokens that did not fit into the block's value
 *
 * LMDB keeps keys in order, so by block id: ids rise, new blocks come behind all others, and full
 * pages stay behind. (With the namespace and the depth in front, the page at each border is split
 * in halves again and again.) What belongs to one block lies together.
 *
 * A value is at most KVT_INDEX_VALUE_BYTES_MAX, so that LMDB keeps it in a leaf with others and
 * never needs two pages in a row for it.
 *
 * Pure; bytes that are read are input: every function takes any. */
#pragma once

#include "tiers/index/index.h"

#define KVT_INDEX_KEY_BYTES 23u
#define KVT_INDEX_VALUE_BYTES_MAX 1320u
#define KVT_INDEX_ROW_FIXED_BYTES 24u
#define KVT_INDEX_COPY_FIXED_BYTES 28u
#define KVT_INDEX_PART_FIXED_BYTES 12u
#define KVT_INDEX_PART_TOKENS_MAX                                                                  \
    ((KVT_INDEX_VALUE_BYTES_MAX - KVT_INDEX_PART_FIXED_BYTES) / 4u) /* 327 */
#define KVT_INDEX_PARTS_MAX 26u

#define KVT_INDEX_TYPE_ROW 0u
#define KVT_INDEX_TYPE_COPY 1u /* of component 0 */
#define KVT_INDEX_TYPE_PART 0x80u

static_assert(KVT_INDEX_PARTS_MAX * KVT_INDEX_PART_TOKENS_MAX >= KVT_BLOCK_TOKENS_MAX,
              "the longest block fits");
static_assert(KVT_INDEX_TYPE_COPY + KVT_COMPONENTS_MAX <= KVT_INDEX_TYPE_PART, "types differ");
static_assert(KVT_INDEX_COPY_FIXED_BYTES + 16u * KVT_RANKS_MAX <= KVT_INDEX_VALUE_BYTES_MAX,
              "all shards of a copy fit");
static_assert(KVT_INDEX_ROW_FIXED_BYTES + KVT_EXTRA_KEY_BYTES + KVT_INDEX_ROOT_KEY_BYTES_MAX <
                  KVT_INDEX_VALUE_BYTES_MAX,
              "the longest root key fits");

void kvt_index_key_write(uint8_t bytes[KVT_INDEX_KEY_BYTES], const struct kvt_index_key *key,
                         uint8_t type);
void kvt_index_key_read(const uint8_t bytes[KVT_INDEX_KEY_BYTES], struct kvt_index_key *ret_key,
                        uint8_t *ret_type);

/* The seed of an index's checksums. */
uint64_t kvt_index_row_seed(const uint8_t store_id[16], const uint8_t device_uuid[16]);

/* True: @put may be stored (counts in their limits, root key of first blocks only, no zero id). */
bool kvt_index_put_is_sound(const struct kvt_index_put *put);

/* How a block's tokens lie: so many in its own value, the others in so many parts. */
struct kvt_index_row_shape {
    uint32_t head_tokens, parts_count, value_bytes;
};
void kvt_index_row_shape(uint32_t tokens_count, bool has_extra_key, uint32_t root_key_bytes,
                         struct kvt_index_row_shape *ret_shape);

/* Write a value for a sound @put under the key that was written before; they return its bytes. */
uint32_t kvt_index_row_write(uint8_t value[KVT_INDEX_VALUE_BYTES_MAX],
                             const uint8_t key[KVT_INDEX_KEY_BYTES], uint64_t seed,
                             const struct kvt_index_put *put);
uint32_t kvt_index_part_write(uint8_t value[KVT_INDEX_VALUE_BYTES_MAX],
                              const uint8_t key[KVT_INDEX_KEY_BYTES], uint64_t seed,
                              const struct kvt_index_put *put, uint32_t part_idx);
uint32_t kvt_index_copy_write(uint8_t value[KVT_INDEX_VALUE_BYTES_MAX],
                              const uint8_t key[KVT_INDEX_KEY_BYTES], uint64_t seed,
                              const struct kvt_index_put *put);

/* What any value says of itself: true when its checksum, version, lengths and limits are right for
 * a key of that type. */
bool kvt_index_value_is_sound(const uint8_t key[KVT_INDEX_KEY_BYTES], uint64_t seed,
                              const uint8_t *value, size_t bytes);

/* Views of a sound value; at any alignment. */
uint32_t kvt_index_row_tokens_count(const uint8_t *value);
uint64_t kvt_index_row_parent(const uint8_t *value);
uint64_t kvt_index_copy_content(const uint8_t *value);
/* The shape that the value says, for who gathers its parts. */
void kvt_index_row_shape_of(const uint8_t *value, struct kvt_index_row_shape *ret_shape);
uint32_t kvt_index_part_tokens_count(const uint8_t *value);

/* Fill what a value has; pointers go into @value, numbers into the arrays of the caller. Tokens: as
 * many as the value has; *ret_tokens is not written beyond. */
void kvt_index_row_read(const uint8_t *value, struct kvt_index_put *ret_put, uint32_t *ret_tokens);
void kvt_index_part_read(const uint8_t *value, uint32_t *ret_tokens);
void kvt_index_copy_read(const uint8_t *value, struct kvt_index_put *ret_put,
                         uint64_t ret_slot_offsets[KVT_RANKS_MAX],
                         uint64_t ret_run_offsets[KVT_RANKS_MAX]);

/* The record that says whose index it is: key of one zero byte, before all others. */
#define KVT_INDEX_META_KEY_BYTES 1u
#define KVT_INDEX_META_BYTES 64u
#define KVT_INDEX_FORMAT_VERSION 1u
enum kvt_index_meta_verdict {
    KVT_INDEX_META_OK = 0,
    KVT_INDEX_META_DAMAGED,
    KVT_INDEX_META_OTHER_VERSION,
    KVT_INDEX_META_OTHER_STORE,
    KVT_INDEX_META_OTHER_DEVICE,
};
void kvt_index_meta_write(uint8_t value[KVT_INDEX_META_BYTES], const uint8_t store_id[16],
                          const uint8_t device_uuid[16]);
enum kvt_index_meta_verdict kvt_index_meta_check(const uint8_t *value, size_t bytes,
                                                 const uint8_t store_id[16],
                                                 const uint8_t device_uuid[16]);
