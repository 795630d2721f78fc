/* The payload oracle: what the bytes of a block must be, so that any block that comes back can be
 * verified on its own (docs/architecture.md).
 *
 *   root  = hash(namespace fingerprint, salt, lora)
 *   chain = hash of all tokens and extra keys from the root to the end of the block
 *   key   = mix(chain, block index, component, rank)
 *   byte i of the shard = byte i % 8 of mix(key + i / 8)
 *
 * A byte depends on everything that could change it and on its place, so a block of another prompt,
 * component, rank, namespace or tenant, a shifted or a torn one, is seen. Any part of a payload can
 * be made without what lies before it: engines keep a payload in pieces. Pure; any thread. */
#pragma once

#include "daemon/base/def.h"
#include "daemon/base/limits.h"

uint64_t kvt_oracle_root(const uint8_t fingerprint[KVT_FINGERPRINT_BYTES], const char *salt,
                         const char *lora);

/* Chain values after each of @blocks_count blocks of @block_tokens tokens; @chain is the value
 * before the first one (the root, or another block's). */
void kvt_oracle_chain(uint64_t chain, const uint32_t *tokens, uint32_t block_tokens,
                      uint64_t blocks_count, uint64_t *ret_chains);
/* The chain value of one block with an extra key (NULL: none). */
uint64_t kvt_oracle_chain_next(uint64_t chain, const uint32_t *tokens, uint32_t block_tokens,
                               const uint8_t *extra_key);

struct kvt_oracle_place {
    uint64_t chain;     /* after this block */
    uint64_t block_idx; /* from the root */
    uint32_t component;
    uint32_t rank; /* 0 when replicated */
};
uint64_t kvt_oracle_key(const struct kvt_oracle_place *place);

/* Bytes [offset, offset + bytes) of the payload with @key. */
void kvt_oracle_fill(uint64_t key, uint64_t offset_bytes, void *dst, size_t bytes);
/* How many bytes at @src are not what fill would have made. */
KVT_MUST_USE size_t kvt_oracle_count_wrong(uint64_t key, uint64_t offset_bytes, const void *src,
                                           size_t bytes);
