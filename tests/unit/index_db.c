/* The database of an index against a naive one: random puts, drops, commits, reopens and crashes;
 * then what a full one does, sizes that change, files that are not ours.
 *
 *     test-index_db [--seed N]
 *
 * Files are made in a directory of their own below the current one. */
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "tests/common/check.h"
#include "tests/common/cmocka.h"
#include "tests/common/index_world.h"
#include "tiers/index/audit.h"

static uint64_t seed, rng;
static char directory[64] = "index-db-XXXXXX", path[96];
static struct index_world now, durable;
static struct index_world_bytes bytes;
static struct kvt_index_db_config config;

static uint32_t rnd(uint32_t below)
{
    rng ^= rng << 13;
    rng ^= rng >> 7;
    rng ^= rng << 17;
    return (uint32_t)((rng >> 11) % below);
}

static void config_make(uint64_t map_bytes)
{
    memset(&config, 0, sizeof(config));
    config.path = path;
    config.bytes = map_bytes;
    memset(config.store_id, 7, 16);
    memset(config.device_uuid, 9, 16);
    config.lock_wait_ns = 20 * KVT_NS_PER_MS;
    memset(&now, 0, sizeof(now));
    /* Usual blocks, small ones, and some that need parts. */
    now.namespaces[0] = (struct kvt_index_ns){.is_used = true, .epoch = 3, .block_tokens = 64};
    now.namespaces[1] = (struct kvt_index_ns){.is_used = true, .epoch = 1, .block_tokens = 16};
    now.namespaces[7] = (struct kvt_index_ns){.is_used = true, .epoch = 9, .block_tokens = 1500};
    memcpy(config.namespaces, now.namespaces, sizeof(now.namespaces));
    durable = now;
}

static struct kvt_index_db *db_open(int wanted)
{
    char why[KVT_INDEX_DB_WHY_BYTES];
    struct kvt_index_db *db = NULL;
    int r;

    memcpy(config.namespaces, now.namespaces, sizeof(now.namespaces));
    r = kvt_index_db_open(&db, &config, why);
    if (r != wanted)
        fail_msg("open: %d, not %d: %s", r, wanted, why);
    assert_true((r == KVT_INDEX_DB_E_BAD) == (why[0] != '\0'));
    return db;
}

/* A block below @parent, or a first one; not in the database yet. */
static uint32_t block_make(uint16_t ns, uint32_t parent)
{
    struct index_world_block *block = &now.blocks[now.count];

    *block = (struct index_world_block){.parent = parent};
    block->key = (struct kvt_index_key){
        .ns = ns, .epoch = now.namespaces[ns].epoch, .block_id = ++now.stamp};
    if (parent != INDEX_WORLD_NONE) {
        block->parent_id = now.blocks[parent].key.block_id;
        block->key.block_idx = now.blocks[parent].key.block_idx + 1;
    }
    return now.count++;
}

static int row_put(struct kvt_index_db *db, uint32_t at)
{
    struct index_world_block *block = &now.blocks[at];
    struct kvt_index_put put;
    int r;

    index_world_row(&put, &block->key, block->parent_id, now.namespaces[block->key.ns].block_tokens,
                    &bytes);
    r = kvt_index_db_apply(db, &put);
    if (r == 0)
        block->has_row = true;
    return r;
}

static int copy_put(struct kvt_index_db *db, uint32_t at, uint16_t component)
{
    struct index_world_block *block = &now.blocks[at];
    struct kvt_index_put put;
    int r;

    index_world_copy(&put, &block->key, component, ++now.stamp, &bytes);
    r = kvt_index_db_apply(db, &put);
    if (r == 0)
        block->contents[component] = put.content;
    return r;
}

static void row_drop(struct kvt_index_db *db, uint32_t at)
{
    struct index_world_block *block = &now.blocks[at];
    struct kvt_index_put put = {.kind = KVT_INDEX_PUT_DROP_ROW, .key = block->key};

    CHECK(kvt_index_db_apply(db, &put) == 0);
    block->has_row = false;
    memset(block->contents, 0, sizeof(block->contents));
}

static void copy_drop(struct kvt_index_db *db, uint32_t at, uint16_t component)
{
    struct index_world_block *block = &now.blocks[at];
    struct kvt_index_put put = {
        .kind = KVT_INDEX_PUT_DROP_COPY, .key = block->key, .component = component};

    CHECK(kvt_index_db_apply(db, &put) == 0);
    block->contents[component] = 0;
}

static void reset(struct kvt_index_db *db, uint16_t ns)
{
    struct kvt_index_put put = {.kind = KVT_INDEX_PUT_DROP_OLD, .key.ns = ns};

    put.key.epoch = ++now.namespaces[ns].epoch;
    durable.namespaces[ns].epoch = put.key.epoch; /* the catalog is durable first */
    CHECK(kvt_index_db_apply(db, &put) == 0);
    for (uint32_t i = 0; i < now.count; i++) {
        if (now.blocks[i].key.ns == ns) {
            now.blocks[i].has_row = false;
            memset(now.blocks[i].contents, 0, sizeof(now.blocks[i].contents));
        }
    }
}

static void block_random(struct kvt_index_db *db)
{
    static const uint16_t used[] = {0, 0, 0, 1, 7};
    uint16_t ns = used[rnd(KVT_COUNT_OF(used))];
    uint32_t parent = INDEX_WORLD_NONE, at;

    if (now.count == INDEX_WORLD_BLOCKS_MAX)
        return;
    for (uint32_t i = 0; i < 8 && now.count > 0 && rnd(8) != 0; i++) {
        uint32_t any = rnd(now.count);

        if (now.blocks[any].has_row && now.blocks[any].key.ns == ns)
            parent = any;
    }
    at = block_make(ns, parent);
    CHECK(row_put(db, at) == 0);
    if (rnd(3) != 0)
        CHECK(copy_put(db, at, (uint16_t)rnd(KVT_COMPONENTS_MAX)) == 0);
}

static void any_random(struct kvt_index_db *db)
{
    uint32_t at = rnd(now.count), what = rnd(1000);

    if (!now.blocks[at].has_row)
        return;
    if (what < 500)
        CHECK(copy_put(db, at, (uint16_t)rnd(KVT_COMPONENTS_MAX)) == 0);
    else if (what < 800)
        copy_drop(db, at, (uint16_t)rnd(KVT_COMPONENTS_MAX));
    else if (what < 990)
        row_drop(db, at);
    else
        CHECK(row_put(db, at) == 0); /* the same again */
}

/* Durable, and every page accounted for. */
static void commit(struct kvt_index_db *db)
{
    struct kvt_index_audit audit;
    char why[KVT_INDEX_DB_WHY_BYTES] = "";
    struct stat stat;
    int fd = open(path, O_RDONLY);

    CHECK(kvt_index_db_commit(db) == 0);
    durable = now;
    CHECK(fd >= 0 && fstat(fd, &stat) == 0);
    assert_int_equal(stat.st_size, config.bytes);
    assert_true(stat.st_blocks * 512 >= stat.st_size);
    assert_int_equal(stat.st_mode & 07777, 0600);
    if (kvt_index_audit(&kvt_index_lmdb_real, fd, (uint64_t)stat.st_size, &audit, why,
                        sizeof(why)) != 0)
        fail_msg("audit: %s", why);
    (void)close(fd);
}

/* Closes with or without a commit, opens again, walks and compares. */
static struct kvt_index_db *restart(struct kvt_index_db *db, uint64_t *ret_dropped)
{
    struct kvt_index_loaded loaded;

    if (rnd(2) == 0)
        commit(db);
    db = kvt_index_db_close(db);
    durable.stamp = now.stamp; /* never goes back */
    now = durable;
    db = db_open(0);
    index_world_expect(&now, db, &loaded);
    CHECK(loaded.block_id_max <= now.stamp && loaded.content_max <= now.stamp);
    *ret_dropped += loaded.dropped;
    return db;
}

static void test_model(void **state)
{
    struct kvt_index_db *db;
    uint64_t dropped = 0;

    (void)state;
    config_make(64 * KVT_MIB);
    db = db_open(KVT_INDEX_DB_E_FRESH);
    for (uint32_t step = 0; step < 30000; step++) {
        uint32_t what = rnd(10000);

        if (what < 1500)
            block_random(db);
        else if (what < 9700 && now.count > 0)
            any_random(db);
        else if (what < 9950)
            commit(db);
        else if (what < 9958)
            reset(db, rnd(2) == 0 ? 0 : 7);
        else
            db = restart(db, &dropped);
    }
    assert_true(dropped > 0);
    db = kvt_index_db_close(db);
    assert_int_equal(unlink(path), 0);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_model),
    };
    int r;

    seed = argc == 3 && strcmp(argv[1], "--seed") == 0 ? strtoull(argv[2], NULL, 10)
                                                       : (uint64_t)time(NULL);
    printf("--seed %" PRIu64 "\n", seed);
    rng = seed * 2654435761u + 1;
    if (mkdtemp(directory) == NULL)
        return 2;
    (void)snprintf(path, sizeof(path), "%s/index", directory);
    r = cmocka_run_group_tests(tests, NULL, NULL);
    (void)rmdir(directory);
    return r;
}
