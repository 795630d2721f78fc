/* What a slot holds: a header and the payload, contiguous, the same bytes in L2 and in L3, so that
 * a block moves between them in one fixed-buffer request. docs/formats.md gives every byte.
 *
 *   0            256                 header_bytes             header_bytes + payload    slot_bytes
 *   | fixed part | tokens (u32 LE) | zero to 512 multiple | payload ................. | zero |
 *
 * A header says whose bytes these are: the namespace's fingerprint, the root, the block and its
 * parent, the tokens, the component and rank, and a generation, which is stamped from one counter
 * when the content is first reserved and never used twice: whoever reads a slot says which (block,
 * component, rank, generation) it expects, and anything else is a miss. A reader that knows all of
 * the block asks for its identity as well: then not even a block id or a generation that was given
 * out twice, by mistake or with an old index, can pass for another's. The store id is random, made
 * with the files of L3 and never told to a client: who finds slots by looking at every place where
 * one may begin knows by it that this one was not made up in somebody's payload. The payload's
 * checksum and the header's own are filled by the tier thread that first copies the bytes to host
 * memory.
 * L1 slots are payload alone.
 *
 * Pure functions over bytes; any thread. Bytes that come from disk are input: validated here. */
#pragma once

#include "daemon/base/def.h"
#include "daemon/base/limits.h"

#define KVT_SLOT_FIXED_BYTES 256u
#define KVT_SLOT_HEADER_ALIGN_BYTES 512u
#define KVT_SLOT_FORMAT_VERSION 2u
#define KVT_STORE_ID_BYTES 16u

struct kvt_slot_info {
    uint8_t fingerprint[KVT_FINGERPRINT_BYTES]; /* of the namespace */
    uint8_t root_digest[KVT_FINGERPRINT_BYTES]; /* SHA-256 of the root key */
    uint8_t extra_key[KVT_EXTRA_KEY_BYTES];     /* all zero: none */
    uint64_t epoch;
    uint64_t block_id, parent_id; /* parent 0: first block of its root */
    uint64_t block_idx;           /* blocks before it on the path */
    uint64_t generation;
    uint64_t stored_real_ns; /* CLOCK_REALTIME */
    uint64_t payload_bytes;
    uint32_t block_tokens;
    uint16_t component;
    uint16_t rank;
    uint8_t store_id[KVT_STORE_ID_BYTES]; /* of the L3 that it is for; all zero: of none */
};

/* Which content a reader expects. */
struct kvt_slot_key {
    uint64_t block_id;
    uint64_t generation;
    uint64_t payload_bytes;
    uint16_t component;
    uint16_t rank;
    uint32_t block_tokens;
    uint64_t identity; /* kvt_slot_identity of what is expected; 0: not compared */
};

enum kvt_slot_verdict {
    KVT_SLOT_OK = 0,
    KVT_SLOT_BAD_MAGIC,   /* never written, or not ours */
    KVT_SLOT_BAD_VERSION, /* another format */
    KVT_SLOT_BAD_HEADER,  /* the header's checksum or its lengths are wrong */
    KVT_SLOT_OTHER,       /* a whole slot, of another block, component, rank or identity */
    KVT_SLOT_BAD_PAYLOAD, /* the payload's checksum is wrong */
};
const char *kvt_slot_verdict_text(enum kvt_slot_verdict verdict);

uint32_t kvt_slot_header_bytes(uint32_t block_tokens);
/* Header and payload, rounded up to KVT_DIO_ALIGN_BYTES. */
uint64_t kvt_slot_bytes(uint32_t block_tokens, uint64_t payload_bytes);

/* The whole of what a block is, as one number that is never 0: XXH3-64 over fingerprint, root,
 * extra key, epoch, block and parent id, place on the path, generation and tokens. */
uint64_t kvt_slot_identity(const struct kvt_slot_info *info, const uint32_t *tokens);

/* Writes the header but for its two checksums. @tokens: info->block_tokens of them. */
void kvt_slot_header_write(void *slot, const struct kvt_slot_info *info, const uint32_t *tokens);
/* Completes it: the payload is in place and hashes to @payload_hash. */
void kvt_slot_header_seal(void *slot, uint64_t payload_hash);
/* Checks the header against itself and @key; the payload is not looked at. */
enum kvt_slot_verdict kvt_slot_header_check(const void *slot, const struct kvt_slot_key *key);
/* The sealed payload checksum of a checked header. */
uint64_t kvt_slot_payload_hash(const void *slot);
/* Header (as above) and payload. */
enum kvt_slot_verdict kvt_slot_check(const void *slot, const struct kvt_slot_key *key);
/* A scan's first look at a place: true when a slot of the store may begin there (magic, version,
 * store id, lengths that can be), and how long its header is then. Reads KVT_SLOT_FIXED_BYTES. */
bool kvt_slot_header_guess(const void *slot, const uint8_t store_id[KVT_STORE_ID_BYTES],
                           uint32_t *ret_header_bytes);
/* Decodes a header that was checked against itself (magic, version, checksum, lengths within
 * @slot_bytes). *ret_tokens points into @slot. */
enum kvt_slot_verdict kvt_slot_header_read(const void *slot, uint64_t slot_bytes,
                                           struct kvt_slot_info *ret_info,
                                           const uint8_t **ret_tokens_le);
