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

/* ---- a full map ------------------------------------------------------------------------------ */

/* Puts blocks until one is refused; what was refused has left nothing. */
static uint32_t fill(struct kvt_index_db *db)
{
    uint32_t put = 0;

    while (now.count < INDEX_WORLD_BLOCKS_MAX) {
        uint32_t parent = now.count > 0 && rnd(4) != 0 ? rnd(now.count) : INDEX_WORLD_NONE;
        uint16_t ns = rnd(8) == 0 ? 0 : 7;
        uint32_t at;
        int r;

        if (parent != INDEX_WORLD_NONE && now.blocks[parent].has_row)
            ns = now.blocks[parent].key.ns;
        else
            parent = INDEX_WORLD_NONE;
        at = block_make(ns, parent);
        r = row_put(db, at);
        if (r == 0)
            r = copy_put(db, at, 0);
        if (r == KVT_INDEX_DB_E_FULL)
            return put;
        CHECK(r == 0);
        put++;
    }
    fail_msg("never full");
    return 0;
}

static void test_full(void **state)
{
    struct kvt_index_loaded loaded;
    struct kvt_index_db *db;
    uint32_t put = 0;

    (void)state;
    config_make(KVT_INDEX_DB_BYTES_MIN);
    db = db_open(KVT_INDEX_DB_E_FRESH);
    for (uint32_t round = 0; round < 12; round++) {
        put += fill(db);
        if (rnd(2) == 0)
            commit(db);
        /* Drops are taken, whether or not there is a commit; then there is room again. */
        for (uint32_t i = 0, share = 1 + rnd(3); i < now.count; i++)
            if (now.blocks[i].has_row && rnd(4) < share)
                row_drop(db, i);
        commit(db);
    }
    assert_true(put > 600);
    (void)fill(db);
    for (uint32_t i = 0; i < now.count; i++)
        if (now.blocks[i].has_row && now.blocks[i].key.ns == 7)
            row_drop(db, i);
    commit(db);
    db = kvt_index_db_close(db);
    db = db_open(0);
    index_world_expect(&now, db, &loaded);
    db = kvt_index_db_close(db);
    assert_int_equal(unlink(path), 0);
}

/* ---- older epochs ---------------------------------------------------------------------------- */

static void test_slices(void **state)
{
    struct kvt_index_db_stats stats, before;
    struct kvt_index_loaded loaded;
    struct kvt_index_put old;
    struct kvt_index_db *db;
    uint32_t commits = 0;

    (void)state;
    config_make(64 * KVT_MIB);
    db = db_open(KVT_INDEX_DB_E_FRESH);
    for (uint32_t i = 0; i < 3000; i++) {
        uint32_t at = block_make(i % 2 == 0 ? 0 : 1, INDEX_WORLD_NONE);

        CHECK(row_put(db, at) == 0 && copy_put(db, at, 0) == 0);
    }
    commit(db);
    index_world_row(&old, &now.blocks[0].key, 0, 64, &bytes);
    reset(db, 0);
    CHECK(kvt_index_db_apply(db, &old) == 0); /* forgotten at once */
    assert_true(kvt_index_db_has_backlog(db));
    while (kvt_index_db_has_backlog(db)) {
        uint32_t at = block_make(0, INDEX_WORLD_NONE); /* of the new epoch: stays */

        CHECK(row_put(db, at) == 0 && copy_put(db, at, 0) == 0);
        kvt_index_db_stats(db, &before);
        commit(db);
        kvt_index_db_stats(db, &stats);
        assert_true(before.entries <= stats.entries + 1024); /* a slice */
        commits++;
    }
    assert_in_range(commits, 3, 10);
    assert_int_equal(stats.entries, 2 * (1500 + commits));
    /* Half of it, then a restart: the walk knows what is old, and goes on. */
    reset(db, 1);
    commit(db);
    db = kvt_index_db_close(db);
    db = db_open(0);
    index_world_expect(&now, db, &loaded);
    assert_true(loaded.dropped > 0 && kvt_index_db_has_backlog(db));
    while (kvt_index_db_has_backlog(db))
        commit(db);
    kvt_index_db_stats(db, &stats);
    assert_int_equal(stats.entries, 2 * commits);
    db = kvt_index_db_close(db);
    assert_int_equal(unlink(path), 0);
}

/* ---- what a walk drops ----------------------------------------------------------------------- */

static int stop_at_third(void *ctx, const struct kvt_index_put *put)
{
    uint32_t *seen = ctx;

    (void)put;
    return ++*seen == 3 ? 77 : 0;
}

/* Below a block that is there, but two deeper, or as deep, or of another namespace. */
static void misfits_put(struct kvt_index_db *db, uint32_t at_one, uint32_t at_zero)
{
    struct kvt_index_put put;

    for (uint32_t i = 0; i < 3; i++) {
        struct kvt_index_key key = {
            .ns = i == 2, .epoch = i == 2 ? 1 : 3, .block_idx = i == 0 ? 3 : 1};

        key.block_id = ++now.stamp;
        index_world_row(&put, &key, now.blocks[i == 2 ? at_zero : at_one].key.block_id,
                        now.namespaces[key.ns].block_tokens, &bytes);
        CHECK(kvt_index_db_apply(db, &put) == 0);
        index_world_copy(&put, &key, 0, ++now.stamp, &bytes);
        CHECK(kvt_index_db_apply(db, &put) == 0);
    }
}

static void test_strays(void **state)
{
    struct kvt_index_db_stats stats;
    struct kvt_index_loaded loaded;
    struct kvt_index_put put;
    struct kvt_index_db *db;
    uint32_t late, child, orphan, wide, seen = 0;

    (void)state;
    config_make(16 * KVT_MIB);
    db = db_open(KVT_INDEX_DB_E_FRESH);
    /* A child with a smaller id than its parent's holds. */
    child = block_make(0, INDEX_WORLD_NONE);
    late = block_make(0, INDEX_WORLD_NONE);
    now.blocks[child].key.block_idx = 1;
    now.blocks[child].parent_id = now.blocks[late].key.block_id;
    CHECK(row_put(db, child) == 0 && copy_put(db, child, 2) == 0 && row_put(db, late) == 0);
    /* One whose parent never came, below it one that is whole; a row of a namespace that is not
     * used, of an epoch that never was, with other tokens than its namespace has; a copy alone. */
    orphan = block_make(0, late);
    now.blocks[orphan].parent_id = 12345;
    CHECK(row_put(db, orphan) == 0 && copy_put(db, orphan, 0) == 0);
    wide = block_make(0, orphan);
    CHECK(row_put(db, wide) == 0 && copy_put(db, wide, 0) == 0);
    misfits_put(db, child, late);
    index_world_row(&put, &(struct kvt_index_key){.ns = 3, .block_id = ++now.stamp}, 0, 64, &bytes);
    CHECK(kvt_index_db_apply(db, &put) == 0);
    index_world_row(&put, &(struct kvt_index_key){.epoch = 99, .block_id = ++now.stamp}, 0, 64,
                    &bytes);
    CHECK(kvt_index_db_apply(db, &put) == 0);
    index_world_row(&put, &(struct kvt_index_key){.epoch = 3, .block_id = ++now.stamp}, 0, 63,
                    &bytes);
    CHECK(kvt_index_db_apply(db, &put) == 0);
    now.stamp += 2;
    index_world_copy(&put, &(struct kvt_index_key){.epoch = 3, .block_id = now.stamp - 1}, 1,
                     now.stamp, &bytes);
    CHECK(kvt_index_db_apply(db, &put) == 0);
    CHECK(kvt_index_db_commit(db) == 0);
    /* A visit that stops has nothing deleted. */
    kvt_index_db_stats(db, &stats);
    assert_int_equal(kvt_index_db_walk(db, stop_at_third, &seen, &loaded), 77);
    assert_int_equal(seen, 3);
    seen = (uint32_t)stats.entries;
    db = kvt_index_db_close(db);
    db = db_open(0);
    kvt_index_db_stats(db, &stats);
    assert_int_equal(stats.entries, seen);
    /* The naive index wants parents before children: tell it so. */
    now.blocks[orphan].has_row = now.blocks[wide].has_row = false;
    memset(now.blocks[orphan].contents, 0, sizeof(now.blocks[orphan].contents));
    memset(now.blocks[wide].contents, 0, sizeof(now.blocks[wide].contents));
    {
        struct index_world_block swap = now.blocks[child];

        now.blocks[child] = now.blocks[late];
        now.blocks[late] = swap;
        now.blocks[late].parent = child;
    }
    index_world_expect(&now, db, &loaded);
    assert_int_equal(loaded.rows, 2);
    assert_int_equal(loaded.copies, 1);
    assert_int_equal(loaded.block_id_max, now.stamp - 1);
    assert_int_equal(loaded.content_max, now.stamp);
    kvt_index_db_stats(db, &stats);
    assert_int_equal(stats.entries, 2 + 2 + 1); /* rows, room for copies, the copy */
    db = kvt_index_db_close(db);
    assert_int_equal(unlink(path), 0);
}

static void test_puts_refused(void **state)
{
    struct kvt_index_put put = {.kind = KVT_INDEX_PUT_SYNC};
    struct kvt_index_db *db;

    (void)state;
    config_make(16 * KVT_MIB);
    db = db_open(KVT_INDEX_DB_E_FRESH);
    assert_int_equal(kvt_index_db_apply(db, &put), -EINVAL);
    put.kind = KVT_INDEX_PUT_CATALOG;
    assert_int_equal(kvt_index_db_apply(db, &put), -EINVAL);
    put.kind = KVT_INDEX_PUT_ROW;
    assert_int_equal(kvt_index_db_apply(db, &put), -EINVAL);
    assert_int_equal(kvt_index_db_commit(db), 0); /* it lives on */
    assert_string_equal(kvt_index_db_why(db), "");
    db = kvt_index_db_close(db);
    assert_null(kvt_index_db_close(NULL));
    assert_int_equal(unlink(path), 0);
}

static int linked_put(struct kvt_index_db *db, uint32_t at, bool is_row)
{
    const struct index_world_block *block = &now.blocks[at];
    struct kvt_index_put put;

    if (is_row)
        index_world_row(&put, &block->key, block->parent_id,
                        now.namespaces[block->key.ns].block_tokens, &bytes);
    else
        index_world_copy(&put, &block->key, 1, ++now.stamp, &bytes);
    return kvt_index_db_apply_linked(db, &put);
}

/* What hangs from a row that was refused is refused as well. */
static void test_links(void **state)
{
    uint32_t first, second, third;
    struct kvt_index_db *db;

    (void)state;
    config_make(16 * KVT_MIB);
    db = db_open(KVT_INDEX_DB_E_FRESH);
    first = block_make(7, INDEX_WORLD_NONE);
    second = block_make(7, first);
    third = block_make(7, second);
    assert_int_equal(linked_put(db, second, true), KVT_INDEX_DB_E_FULL);
    assert_int_equal(linked_put(db, first, false), KVT_INDEX_DB_E_FULL);
    assert_int_equal(linked_put(db, first, true), 0);
    assert_int_equal(linked_put(db, third, true), KVT_INDEX_DB_E_FULL);
    assert_int_equal(linked_put(db, third, false), KVT_INDEX_DB_E_FULL);
    assert_int_equal(linked_put(db, second, true), 0);
    commit(db);
    assert_int_equal(linked_put(db, third, true), 0);
    assert_int_equal(linked_put(db, third, false), 0);
    commit(db);
    row_drop(db, third);
    assert_int_equal(linked_put(db, third, false), KVT_INDEX_DB_E_FULL);
    db = kvt_index_db_close(db);
    assert_int_equal(unlink(path), 0);
}

/* ---- files ----------------------------------------------------------------------------------- */

static int64_t size_of(const char *name)
{
    struct stat stat_now;

    return stat(name, &stat_now) == 0 ? stat_now.st_size : -1;
}

static uint64_t rows_walked, rows_false;

static int count_true(void *ctx, const struct kvt_index_put *put)
{
    (void)ctx;
    rows_walked += put->kind == KVT_INDEX_PUT_ROW;
    rows_false += !index_world_is_true(put);
    return 0;
}

static void test_resize(void **state)
{
    struct kvt_index_db_stats stats;
    struct kvt_index_loaded loaded;
    struct kvt_index_db *db;
    uint32_t parent = INDEX_WORLD_NONE;

    (void)state;
    config_make(64 * KVT_MIB);
    db = db_open(KVT_INDEX_DB_E_FRESH);
    for (uint32_t i = 0; i < 2500; i++) { /* 6.5 KiB each */
        parent = block_make(7, i % 50 == 0 ? INDEX_WORLD_NONE : parent);
        CHECK(row_put(db, parent) == 0 && copy_put(db, parent, 0) == 0);
    }
    commit(db);
    kvt_index_db_stats(db, &stats);
    assert_in_range(stats.used_bytes, 16 * KVT_MIB, 32 * KVT_MIB);
    db = kvt_index_db_close(db);

    config.bytes = 32 * KVT_MIB + 100; /* all of it fits; the size is in pages */
    db = db_open(0);
    assert_int_equal(size_of(path), 32 * KVT_MIB);
    index_world_expect(&now, db, &loaded);
    assert_int_equal(loaded.dropped, 0);
    db = kvt_index_db_close(db);

    config.bytes = 8 * KVT_MIB; /* some of it */
    db = db_open(0);
    assert_int_equal(size_of(path), 8 * KVT_MIB);
    kvt_index_db_stats(db, &stats);
    assert_true(stats.left_out > 5000 && stats.used_bytes <= 8 * KVT_MIB);
    CHECK(kvt_index_db_walk(db, count_true, NULL, &loaded) == 0);
    assert_int_equal(rows_false, 0);
    assert_int_equal(rows_walked, loaded.rows);
    assert_in_range(loaded.rows, 500, 1200);
    assert_true(loaded.dropped < 50); /* parents came first */
    db = kvt_index_db_close(db);

    config.bytes = 48 * KVT_MIB;
    db = db_open(0);
    assert_int_equal(size_of(path), 48 * KVT_MIB);
    CHECK(kvt_index_db_walk(db, count_true, NULL, &loaded) == 0);
    assert_int_equal(rows_walked, 2 * loaded.rows);
    CHECK(row_put(db, parent) == 0);
    CHECK(kvt_index_db_commit(db) == 0);
    db = kvt_index_db_close(db);
    config.bytes = KVT_INDEX_DB_BYTES_MIN - 1;
    (void)db_open(-EINVAL);
    assert_int_equal(kvt_index_db_replace(&config), -EINVAL);
    assert_int_equal(unlink(path), 0);
}

/* What a power cut could take away: sizes and bytes until a flush of the file, names until one of
 * the folder. */
static bool is_file_dirty, is_folder_dirty;
static uint32_t renames;

static int order_fallocate(int fd, int mode, off_t offset, off_t count)
{
    is_file_dirty = true;
    return fallocate(fd, mode, offset, count);
}

static int order_ftruncate(int fd, off_t count)
{
    is_file_dirty = true;
    return ftruncate(fd, count);
}

static int order_fsync(int fd)
{
    struct stat stat;

    CHECK(fstat(fd, &stat) == 0);
    if (S_ISDIR(stat.st_mode))
        is_folder_dirty = false;
    else
        is_file_dirty = false;
    return fsync(fd);
}

static int order_rename(const char *from, const char *to)
{
    CHECK(!is_file_dirty);
    is_folder_dirty = true;
    renames++;
    return rename(from, to);
}

/* Made, made smaller and made larger: the file is durable before it gets its name, the name before
 * anything is put there, and so is a new size. */
static void test_durable_order(void **state)
{
    static const struct {
        uint64_t bytes;
        uint32_t renames;
        int wanted;
    } steps[] = {{64 * KVT_MIB, 1, KVT_INDEX_DB_E_FRESH},
                 {32 * KVT_MIB, 1, 0},
                 {8 * KVT_MIB, 2, 0},
                 {32 * KVT_MIB, 2, 0}};
    struct kvt_index_lmdb lmdb = kvt_index_lmdb_real;
    struct kvt_index_db *db;

    (void)state;
    lmdb.fallocate = order_fallocate;
    lmdb.ftruncate = order_ftruncate;
    lmdb.fsync = order_fsync;
    lmdb.rename = order_rename;
    config_make(0);
    config.lmdb = &lmdb;
    for (uint32_t i = 0; i < KVT_COUNT_OF(steps); i++) {
        config.bytes = steps[i].bytes;
        db = db_open(steps[i].wanted);
        assert_false(is_file_dirty || is_folder_dirty);
        assert_int_equal(renames, steps[i].renames);
        assert_int_equal(size_of(path), steps[i].bytes);
        for (uint32_t n = 0; i == 0 && n < 1600; n++) {
            uint32_t at = block_make(7, INDEX_WORLD_NONE);

            CHECK(row_put(db, at) == 0 && copy_put(db, at, 0) == 0);
        }
        CHECK(kvt_index_db_commit(db) == 0);
        db = kvt_index_db_close(db);
    }
    assert_int_equal(unlink(path), 0);
}

static void test_not_ours(void **state)
{
    struct kvt_index_loaded loaded;
    struct kvt_index_db *db;
    char other[sizeof(path) + 8];
    int fd;

    (void)state;
    config_make(16 * KVT_MIB);
    db = db_open(KVT_INDEX_DB_E_FRESH);
    CHECK(row_put(db, block_make(0, INDEX_WORLD_NONE)) == 0 && copy_put(db, 0, 0) == 0);
    CHECK(kvt_index_db_commit(db) == 0);
    (void)db_open(-EBUSY); /* a second one */
    db = kvt_index_db_close(db);
    config.store_id[3] ^= 1;
    (void)db_open(KVT_INDEX_DB_E_BAD);
    config.bytes = 8 * KVT_MIB; /* nor is it made smaller */
    (void)db_open(KVT_INDEX_DB_E_BAD);
    assert_int_equal(size_of(path), 16 * KVT_MIB);
    config.bytes = 16 * KVT_MIB;
    config.store_id[3] ^= 1;
    config.device_uuid[3] ^= 1;
    (void)db_open(KVT_INDEX_DB_E_BAD);
    config.device_uuid[3] ^= 1;
    db = db_open(0); /* and it is whole still */
    index_world_expect(&now, db, &loaded);
    assert_int_equal(loaded.rows, 1);
    db = kvt_index_db_close(db);

    CHECK(kvt_index_db_replace(&config) == 0);
    memset(&now.blocks[0], 0, sizeof(now.blocks[0]));
    db = db_open(0);
    index_world_expect(&now, db, &loaded);
    assert_int_equal(loaded.rows, 0);
    db = kvt_index_db_close(db);

    (void)snprintf(other, sizeof(other), "%s.link", path);
    CHECK(rename(path, other) == 0 && symlink("index.link", path) == 0);
    (void)db_open(-ELOOP);
    CHECK(unlink(path) == 0 && unlink(other) == 0 && mkdir(path, 0700) == 0);
    (void)db_open(-EISDIR);
    CHECK(kvt_index_db_replace(&config) < 0);
    CHECK(rmdir(path) == 0 && mkfifo(path, 0600) == 0);
    (void)db_open(KVT_INDEX_DB_E_BAD);
    CHECK(unlink(path) == 0);
    fd = open(path, O_CREAT | O_RDWR, 0600);
    CHECK(fd >= 0 && close(fd) == 0);
    (void)db_open(KVT_INDEX_DB_E_BAD);
    /* One that was made and never renamed is in nobody's way. */
    (void)snprintf(other, sizeof(other), "%s.new", path);
    CHECK(rename(path, other) == 0);
    db = db_open(KVT_INDEX_DB_E_FRESH);
    db = kvt_index_db_close(db);
    assert_int_equal(size_of(other), -1);
    fd = open(other, O_CREAT | O_RDWR | O_CLOEXEC, 0600); /* beside one that is whole */
    CHECK(fd >= 0 && close(fd) == 0);
    db = db_open(0);
    db = kvt_index_db_close(db);
    assert_int_equal(size_of(other), -1);
    assert_int_equal(unlink(path), 0);
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_model),         cmocka_unit_test(test_full),
        cmocka_unit_test(test_slices),        cmocka_unit_test(test_strays),
        cmocka_unit_test(test_links),         cmocka_unit_test(test_puts_refused),
        cmocka_unit_test(test_resize),        cmocka_unit_test(test_not_ours),
        cmocka_unit_test(test_durable_order),
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
