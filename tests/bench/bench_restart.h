/* What the two files of bench-restart share: an L3 that a daemon made, filled behind its back.
 *
 * A daemon stores one block by the usual path and stops; that fixes the namespace, the root and the
 * ids of the store. Then blocks that nobody stored are put into the index with the library's own
 * code (rows and copies, as the daemon would put them), or into the data as slots. So 10^6 blocks
 * take seconds. Lookups do not read slots: for them the index is all there is. */
#pragma once

#include "tests/integration/e2e.h"
#include "tiers/index/db.h"

#define RESTART_TOKENS 64u /* a block */

enum restart_shape {
    RESTART_LONG,  /* conversations of 2,000 blocks, 25 blocks a turn, turns of all interleaved */
    RESTART_SHORT, /* 246 prompts of 4 blocks each behind a shared prefix of 16, and so on */
};

struct restart_place { /* one L3 of one device */
    char path[E2E_PATH_BYTES], index_path[E2E_PATH_BYTES + 8];
    uint64_t index_bytes;
    enum restart_shape shape;
    uint64_t blocks;        /* a multiple of 10,000 */
    uint64_t slot_bytes;    /* of a block */
    struct kvt_index_ns ns; /* found in the catalog */
    uint32_t ns_number;
    uint8_t store_id[16], device_uuid[16];
    uint8_t root_key[KVT_INDEX_ROOT_KEY_BYTES_MAX];
    uint32_t root_key_bytes;
    uint64_t id_first; /* what the daemon stored itself is below */
    uint64_t index_used_bytes;
};

/* Bytes of data that the blocks need, the superblock and what the daemon itself stored counted. */
uint64_t restart_data_bytes(const struct restart_place *place);
/* The index has rows and copies of all blocks. */
void restart_fill_index(struct restart_place *place);
/* The data has their slots, whole. The index does not know. */
void restart_fill_data(struct restart_place *place);

/* A prompt that is known in full; returns its tokens. At most RESTART_PROMPT_MAX of them. */
#define RESTART_PROMPT_MAX (2000u * RESTART_TOKENS)
uint64_t restart_prompt(const struct restart_place *place, uint32_t *tokens);
