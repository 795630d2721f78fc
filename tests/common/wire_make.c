#include "tests/common/wire_make.h"

#include <stdio.h>
#include <string.h>

#include "tests/common/fake_tier.h"

static const uint16_t kinds[WIRE_MAKE_KINDS] = {
    KVT_INDEX_PUT_ROW,  KVT_INDEX_PUT_COPY, KVT_INDEX_PUT_DROP_COPY, KVT_INDEX_PUT_DROP_ROW,
    KVT_INDEX_PUT_SYNC, KVT_WIRE_HELLO,     KVT_WIRE_COMMIT,         KVT_INDEX_PUT_DROP_OLD,
    KVT_WIRE_PROGRESS,  KVT_WIRE_LOADED,    KVT_WIRE_COMMITTED,      KVT_INDEX_PUT_CATALOG,
    KVT_WIRE_BAD,       KVT_WIRE_FAILED,
};

static struct {
    uint32_t tokens[KVT_BLOCK_TOKENS_MAX];
    uint64_t slots[KVT_RANKS_MAX], runs[KVT_RANKS_MAX];
    uint8_t extra[KVT_EXTRA_KEY_BYTES], root[KVT_INDEX_ROOT_KEY_BYTES_MAX];
    uint8_t catalog[KVT_WIRE_CATALOG_BYTES_MAX];
    char path[64], data_path[80];
} made;

static uint64_t up_to(uint64_t *random, uint64_t most)
{
    return fake_random(random) % (most + 1);
}

static void fill(uint64_t *random, void *to, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++)
        ((uint8_t *)to)[i] = (uint8_t)fake_random(random);
}

static void make_put(struct kvt_index_put *put, uint16_t kind, uint64_t *random)
{
    bool is_large = up_to(random, 9) == 0;

    fill(random, &made.slots, sizeof(made.slots));
    fill(random, &made.runs, sizeof(made.runs));
    fill(random, &made.extra, sizeof(made.extra));
    *put = (struct kvt_index_put){.kind = (enum kvt_index_put_kind)kind};
    put->key.ns = (uint16_t)up_to(random, KVT_NAMESPACES_MAX - 1);
    put->key.epoch = fake_random(random);
    put->key.block_idx = (uint32_t)fake_random(random);
    put->key.block_id = fake_random(random);
    put->component = (uint16_t)up_to(random, KVT_COMPONENTS_MAX - 1);
    if (kind == KVT_INDEX_PUT_ROW) {
        put->parent_id = fake_random(random);
        put->tokens_count = 1 + (uint32_t)up_to(random, is_large ? KVT_BLOCK_TOKENS_MAX - 1 : 70);
        put->tokens = made.tokens;
        fill(random, made.tokens, 4ull * put->tokens_count);
        put->extra_key = up_to(random, 1) == 0 ? made.extra : NULL;
        if (up_to(random, 1) == 0) {
            put->root_key = made.root;
            put->root_key_bytes = (uint32_t)up_to(random, is_large ? sizeof(made.root) : 40);
            fill(random, made.root, put->root_key_bytes);
        }
    } else if (kind == KVT_INDEX_PUT_COPY) {
        put->content = fake_random(random);
        put->slot_bytes = fake_random(random);
        put->shards_count = (uint16_t)(1 + up_to(random, KVT_RANKS_MAX - 1));
        put->slot_offsets = made.slots;
        put->run_offsets = made.runs;
    } else if (kind == KVT_INDEX_PUT_CATALOG) {
        put->catalog_number = (uint32_t)fake_random(random);
        put->catalog_bytes = (uint32_t)up_to(random, is_large ? sizeof(made.catalog) : 50);
        put->catalog_data = made.catalog;
        fill(random, made.catalog, put->catalog_bytes);
    }
}

static void make_hello(struct kvt_index_config *hello, uint64_t *random)
{
    *hello = (struct kvt_index_config){.is_rebuild_wanted = up_to(random, 1) == 0,
                                       .has_siblings = up_to(random, 1) == 0};
    hello->bytes = fake_random(random);
    hello->data_offset_bytes = fake_random(random);
    hello->data_bytes = fake_random(random);
    fill(random, hello->store_id, sizeof(hello->store_id));
    fill(random, hello->device_uuid, sizeof(hello->device_uuid));
    (void)snprintf(made.path, sizeof(made.path), "/a/%llu",
                   (unsigned long long)fake_random(random));
    (void)snprintf(made.data_path, sizeof(made.data_path), "%s.data", made.path);
    hello->path = made.path;
    hello->data_path = up_to(random, 3) == 0 ? "" : made.data_path;
    for (uint32_t i = 0; i < KVT_NAMESPACES_MAX; i++) {
        struct kvt_index_ns *ns = &hello->namespaces[i];

        if (up_to(random, 3) != 0)
            continue;
        ns->is_used = true;
        ns->epoch = fake_random(random);
        ns->block_tokens = 1 + (uint32_t)up_to(random, KVT_BLOCK_TOKENS_MAX - 1);
        fill(random, ns->fingerprint, sizeof(ns->fingerprint));
        ns->components_count = (uint32_t)up_to(random, KVT_COMPONENTS_MAX);
        for (uint32_t c = 0; c < ns->components_count; c++)
            ns->shards[c] = (uint16_t)(1 + up_to(random, KVT_RANKS_MAX - 1));
    }
}

void wire_make(struct kvt_wire_message *message, uint32_t which, uint64_t seed)
{
    uint64_t random = seed;

    memset(message, 0, sizeof(*message));
    message->kind = kinds[which];
    message->seq = fake_random(&random);
    make_put(&message->put, message->kind, &random);
    make_hello(&message->hello, &random);
    message->loaded.was_rebuilt = up_to(&random, 1) == 0;
    message->loaded.rows = fake_random(&random);
    message->loaded.copies = fake_random(&random);
    message->loaded.dropped = fake_random(&random);
    message->loaded.block_id_max = fake_random(&random);
    message->loaded.content_max = fake_random(&random);
    message->loaded.took_ns = fake_random(&random);
    message->refused = fake_random(&random);
    message->refused_catalogs = fake_random(&random);
    message->used_bytes = fake_random(&random);
    message->capacity_bytes = fake_random(&random);
    message->rows_total = fake_random(&random);
    message->scan_bytes = fake_random(&random);
    message->scan_total_bytes = fake_random(&random);
    message->error = (int)(int32_t)fake_random(&random);
    memset(message->why, 'w', up_to(&random, sizeof(message->why) - 1));
}
