#include "tiers/index/wire.h"

uint64_t kvt_index_put_bytes(const struct kvt_index_put *put)
{
    uint64_t bytes = KVT_WIRE_HEADER_BYTES + KVT_WIRE_KEY_BYTES;

    switch (put->kind) {
    case KVT_INDEX_PUT_ROW:
        bytes += KVT_WIRE_ROW_BYTES + 4ull * put->tokens_count;
        bytes += put->extra_key != NULL ? KVT_EXTRA_KEY_BYTES : 0;
        bytes += put->root_key != NULL ? put->root_key_bytes : 0;
        break;
    case KVT_INDEX_PUT_COPY:
        bytes += KVT_WIRE_COPY_BYTES + 16ull * put->shards_count;
        break;
    case KVT_INDEX_PUT_CATALOG:
        bytes += KVT_WIRE_CATALOG_BYTES + put->catalog_bytes;
        break;
    default:
        break;
    }
    return kvt_round_up(bytes, 8);
}
