#include "tests/bench/bench_restart.h"

#include <fcntl.h>
#include <string.h>
#include <unistd.h>

#include "daemon/base/hash.h"
#include "tiers/disk/inspect.h"

#define COPIES_BEHIND 4096u /* a copy is put so many blocks after its row */
#define LONG_BLOCKS 2000u
#define LONG_TURN 25u
#define SHORT_PREFIX 16u
#define SHORT_TAIL 4u
#define SHORT_PROMPTS 246u
#define SHORT_BLOCKS (SHORT_PREFIX + SHORT_PROMPTS * SHORT_TAIL)
#define RUN_BYTES KVT_HUGE_PAGE_BYTES
static_assert(SHORT_BLOCKS == 1000, "groups of a thousand");

struct block {              /* one of place->blocks, in the order of ids */
    uint64_t depth, parent; /* parent: its number + 1, 0 none */
    uint64_t path;          /* names the tokens of the block together with depth */
};

/* ---- shapes --------------------------------------------------------------------------------- */

static struct block block_long(const struct restart_place *place, uint64_t number)
{
    uint64_t paths = place->blocks / LONG_BLOCKS, chunk = number / LONG_TURN;
    struct block block = {.path = chunk % paths,
                          .depth = chunk / paths * LONG_TURN + number % LONG_TURN};

    if (number % LONG_TURN > 0)
        block.parent = number;
    else if (block.depth > 0)
        block.parent = (chunk - paths) * LONG_TURN + LONG_TURN;
    return block;
}

/* First the prefixes of all groups, then one prompt of each group in turn. */
static struct block block_short(const struct restart_place *place, uint64_t number)
{
    uint64_t groups = place->blocks / SHORT_BLOCKS, rest, chunk;
    struct block block;

    if (number < groups * SHORT_PREFIX) {
        block = (struct block){.path = number / SHORT_PREFIX, .depth = number % SHORT_PREFIX};
        block.parent = block.depth > 0 ? number : 0;
        return block;
    }
    rest = number - groups * SHORT_PREFIX;
    chunk = rest / SHORT_TAIL;
    block = (struct block){.path = groups + chunk, .depth = SHORT_PREFIX + rest % SHORT_TAIL};
    block.parent = rest % SHORT_TAIL > 0 ? number : (chunk % groups + 1) * SHORT_PREFIX;
    return block;
}

static struct block block_at(const struct restart_place *place, uint64_t number)
{
    return place->shape == RESTART_LONG ? block_long(place, number) : block_short(place, number);
}

static void block_tokens(const struct block *block, uint32_t tokens[RESTART_TOKENS])
{
    uint64_t seed = (block->path << 24 | block->depth) * 0x9e3779b97f4a7c15ull;

    for (uint32_t i = 0; i < RESTART_TOKENS; i++) {
        seed = seed * 6364136223846793005ull + 1442695040888963407ull;
        tokens[i] = (uint32_t)(seed >> 40) % 128256;
    }
}

uint64_t restart_prompt(const struct restart_place *place, uint32_t *tokens)
{
    uint64_t number = place->blocks; /* the last block's path: + 1, as a parent is told */
    struct block block = block_at(place, number - 1);
    uint64_t blocks = block.depth + 1;

    for (; number > 0; number = block.parent) {
        block = block_at(place, number - 1);
        block_tokens(&block, tokens + block.depth * RESTART_TOKENS);
    }
    return blocks * RESTART_TOKENS;
}

/* ---- places --------------------------------------------------------------------------------- */

static uint64_t slots_a_run(const struct restart_place *place)
{
    return RUN_BYTES / place->slot_bytes;
}

static uint64_t run_offset(const struct restart_place *place, uint64_t number)
{
    return (1 + number / slots_a_run(place)) * RUN_BYTES; /* the first is the daemon's */
}

static uint64_t slot_offset(const struct restart_place *place, uint64_t number)
{
    return run_offset(place, number) + number % slots_a_run(place) * place->slot_bytes;
}

uint64_t restart_data_bytes(const struct restart_place *place)
{
    /* A 16th more: of the last slots some are kept free, whoever has them. */
    return KVT_DISK_DATA_OFFSET_BYTES +
           kvt_round_up(run_offset(place, place->blocks) / 16 * 17, RUN_BYTES) + RUN_BYTES;
}

static int visit(void *ctx, const struct kvt_index_put *put)
{
    struct restart_place *place = ctx;

    if (put->kind != KVT_INDEX_PUT_ROW || put->root_key == NULL)
        return 0;
    memcpy(place->root_key, put->root_key, put->root_key_bytes);
    place->root_key_bytes = put->root_key_bytes;
    return 0;
}

static void find_namespace(struct restart_place *place)
{
    struct kvt_disk_inspect_config config = {.path = place->path, .is_front_only = true};
    struct kvt_disk_inspection *found = calloc(1, sizeof(*found));

    CHECK(found != NULL);
    CHECK(kvt_disk_inspect(&config, found) == 0);
    memcpy(place->store_id, found->about.store_id, sizeof(place->store_id));
    memcpy(place->device_uuid, found->about.device_uuid, sizeof(place->device_uuid));
    for (uint32_t i = 0; i < KVT_NAMESPACES_MAX; i++) {
        const struct kvt_disk_ns_record *record = &found->catalog.namespaces[i];

        if (!record->is_used)
            continue;
        place->ns_number = i;
        place->ns = (struct kvt_index_ns){.is_used = true,
                                          .epoch = record->epoch,
                                          .block_tokens = RESTART_TOKENS,
                                          .components_count = 1,
                                          .shards = {1}};
        memcpy(place->ns.fingerprint, record->fingerprint, sizeof(record->fingerprint));
    }
    CHECK(place->ns.is_used);
    free(found);
}

/* What the daemon left: opens its index, and finds the root in it. */
static struct kvt_index_db *open_index(struct restart_place *place)
{
    struct kvt_index_db_config config = {.path = place->index_path, .bytes = place->index_bytes};
    char why[KVT_INDEX_DB_WHY_BYTES];
    struct kvt_index_loaded loaded;
    struct kvt_index_db *db = NULL;

    find_namespace(place);
    memcpy(config.store_id, place->store_id, sizeof(config.store_id));
    memcpy(config.device_uuid, place->device_uuid, sizeof(config.device_uuid));
    config.namespaces[place->ns_number] = place->ns;
    CHECK(kvt_index_db_open(&db, &config, why) == 0);
    CHECK(kvt_index_db_walk(db, visit, place, &loaded) == 0);
    CHECK(place->root_key_bytes > 0);
    place->id_first = KVT_MAX(loaded.block_id_max, loaded.content_max) + 1; /* numbers rise */
    return db;
}

/* ---- the index ------------------------------------------------------------------------------ */

static struct kvt_index_key key_of(const struct restart_place *place, const struct block *block,
                                   uint64_t number)
{
    return (struct kvt_index_key){.ns = (uint16_t)place->ns_number,
                                  .epoch = place->ns.epoch,
                                  .block_idx = (uint32_t)block->depth,
                                  .block_id = place->id_first + number};
}

static void put_row(const struct restart_place *place, struct kvt_index_db *db, uint64_t number)
{
    struct block block = block_at(place, number);
    uint32_t tokens[RESTART_TOKENS];
    struct kvt_index_put put = {
        .kind = KVT_INDEX_PUT_ROW,
        .key = key_of(place, &block, number),
        .parent_id = block.parent > 0 ? place->id_first + block.parent - 1 : 0,
        .tokens_count = RESTART_TOKENS,
        .tokens = tokens,
    };

    block_tokens(&block, tokens);
    if (block.depth == 0) {
        put.root_key = place->root_key;
        put.root_key_bytes = place->root_key_bytes;
    }
    CHECK(kvt_index_db_apply(db, &put) == 0);
}

static void put_copy(const struct restart_place *place, struct kvt_index_db *db, uint64_t number)
{
    struct block block = block_at(place, number);
    uint64_t slot = slot_offset(place, number), run = run_offset(place, number);
    const struct kvt_index_put put = {
        .kind = KVT_INDEX_PUT_COPY,
        .key = key_of(place, &block, number),
        .shards_count = 1,
        .content = place->id_first + number,
        .slot_bytes = place->slot_bytes,
        .slot_offsets = &slot,
        .run_offsets = &run,
    };

    CHECK(kvt_index_db_apply(db, &put) == 0);
}

void restart_fill_index(struct restart_place *place)
{
    struct kvt_index_db *db = open_index(place);
    struct kvt_index_db_stats stats;

    for (uint64_t i = 0; i < place->blocks + COPIES_BEHIND; i++) {
        if (i < place->blocks)
            put_row(place, db, i);
        if (i >= COPIES_BEHIND)
            put_copy(place, db, i - COPIES_BEHIND);
    }
    CHECK(kvt_index_db_commit(db) == 0);
    kvt_index_db_stats(db, &stats);
    place->index_used_bytes = stats.used_bytes;
    (void)kvt_index_db_close(db);
}

/* ---- the data ------------------------------------------------------------------------------- */

static void make_slot(const struct restart_place *place, uint64_t number, uint8_t *slot)
{
    struct block block = block_at(place, number);
    uint32_t tokens[RESTART_TOKENS], header_bytes = kvt_slot_header_bytes(RESTART_TOKENS);
    struct kvt_slot_info info = {
        .epoch = place->ns.epoch,
        .block_id = place->id_first + number,
        .parent_id = block.parent > 0 ? place->id_first + block.parent - 1 : 0,
        .block_idx = block.depth,
        .generation = place->id_first + number,
        .payload_bytes = place->slot_bytes - header_bytes,
        .block_tokens = RESTART_TOKENS,
    };

    block_tokens(&block, tokens);
    memcpy(info.fingerprint, place->ns.fingerprint, sizeof(info.fingerprint));
    CHECK(kvt_sha256(place->root_key, place->root_key_bytes, info.root_digest) == 0);
    memcpy(info.store_id, place->store_id, sizeof(info.store_id));
    kvt_slot_header_write(slot, &info, tokens);
    memset(slot + header_bytes, (int)number, info.payload_bytes);
    kvt_slot_header_seal(slot, kvt_hash64(slot + header_bytes, info.payload_bytes, 0));
}

void restart_fill_data(struct restart_place *place)
{
    struct kvt_index_db *db = open_index(place);
    uint8_t *run = malloc(RUN_BYTES);
    int fd = open(place->path, O_WRONLY | O_CLOEXEC);

    (void)kvt_index_db_close(db);
    CHECK(run != NULL && fd >= 0);
    for (uint64_t at = 0; at < place->blocks; at += slots_a_run(place)) {
        uint64_t count = KVT_MIN(slots_a_run(place), place->blocks - at);

        for (uint64_t i = 0; i < count; i++)
            make_slot(place, at + i, run + i * place->slot_bytes);
        CHECK(pwrite(fd, run, count * place->slot_bytes,
                     (off_t)(KVT_DISK_DATA_OFFSET_BYTES + run_offset(place, at))) ==
              (ssize_t)(count * place->slot_bytes));
    }
    CHECK(fdatasync(fd) == 0);
    (void)close(fd);
    free(run);
}
