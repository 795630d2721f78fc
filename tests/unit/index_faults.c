/* Every call of LMDB and of the file system that the database of an index makes fails in turn, with
 * each of its errors; so does every allocation. Each time the result must say so, nothing may be
 * leaked, and what is there afterwards must be what the last commit that was answered left. */
#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "daemon/base/alloc.h"
#include "tests/common/check.h"
#include "tests/common/cmocka.h"
#include "tests/common/index_world.h"
#include "tiers/index/lmdb_calls.h"

#define NEVER UINT32_MAX
#define SHORT 10000 /* not an error: half of the bytes */

static uint32_t calls, fail_at = NEVER; /* which of the calls fails */
static int fail_lmdb, fail_file;        /* as what; 0: calls of that kind do not */
static bool is_fired;
static char directory[64], path[96];
static struct index_world world;
static struct index_world_bytes bytes;
static struct kvt_index_db_config config;

static int lmdb_fault(void)
{
    if (fail_lmdb == 0 || calls++ != fail_at)
        return 0;
    is_fired = true;
    return fail_lmdb;
}

static int file_fault(void)
{
    if (fail_file == 0 || calls++ != fail_at)
        return 0;
    is_fired = true;
    errno = fail_file;
    return fail_file;
}

static int bad_env_create(MDB_env **env)
{
    int r = lmdb_fault();

    return r != 0 ? r : mdb_env_create(env);
}

static int bad_env_set_mapsize(MDB_env *env, size_t size)
{
    int r = lmdb_fault();

    return r != 0 ? r : mdb_env_set_mapsize(env, size);
}

static int bad_env_open(MDB_env *env, const char *name, unsigned flags, mdb_mode_t mode)
{
    int r = lmdb_fault();

    return r != 0 ? r : mdb_env_open(env, name, flags, mode);
}

static int bad_env_info(MDB_env *env, MDB_envinfo *info)
{
    int r = lmdb_fault();

    return r != 0 ? r : mdb_env_info(env, info);
}

static int bad_txn_begin(MDB_env *env, MDB_txn *parent, unsigned flags, MDB_txn **txn)
{
    int r = lmdb_fault();

    return r != 0 ? r : mdb_txn_begin(env, parent, flags, txn);
}

static int bad_txn_commit(MDB_txn *txn)
{
    int r = lmdb_fault();

    if (r == 0)
        return mdb_txn_commit(txn);
    mdb_txn_abort(txn); /* a commit that fails is an abort */
    return r;
}

static int bad_dbi_open(MDB_txn *txn, const char *name, unsigned flags, MDB_dbi *dbi)
{
    int r = lmdb_fault();

    return r != 0 ? r : mdb_dbi_open(txn, name, flags, dbi);
}

static int bad_stat(MDB_txn *txn, MDB_dbi dbi, MDB_stat *stat)
{
    int r = lmdb_fault();

    return r != 0 ? r : mdb_stat(txn, dbi, stat);
}

static int bad_get(MDB_txn *txn, MDB_dbi dbi, MDB_val *key, MDB_val *value)
{
    int r = lmdb_fault();

    return r != 0 ? r : mdb_get(txn, dbi, key, value);
}

static int bad_put(MDB_txn *txn, MDB_dbi dbi, MDB_val *key, MDB_val *value, unsigned flags)
{
    int r = lmdb_fault();

    return r != 0 ? r : mdb_put(txn, dbi, key, value, flags);
}

static int bad_del(MDB_txn *txn, MDB_dbi dbi, MDB_val *key, MDB_val *value)
{
    int r = lmdb_fault();

    return r != 0 ? r : mdb_del(txn, dbi, key, value);
}

static int bad_cursor_open(MDB_txn *txn, MDB_dbi dbi, MDB_cursor **cursor)
{
    int r = lmdb_fault();

    return r != 0 ? r : mdb_cursor_open(txn, dbi, cursor);
}

static int bad_cursor_get(MDB_cursor *cursor, MDB_val *key, MDB_val *value, MDB_cursor_op op)
{
    int r = lmdb_fault();

    return r != 0 ? r : mdb_cursor_get(cursor, key, value, op);
}

static int bad_cursor_del(MDB_cursor *cursor, unsigned flags)
{
    int r = lmdb_fault();

    return r != 0 ? r : mdb_cursor_del(cursor, flags);
}

static ssize_t bad_pread(int fd, void *at, size_t size, off_t offset)
{
    int r = file_fault();

    if (r == SHORT)
        return pread(fd, at, size / 2, offset);
    return r != 0 ? -1 : pread(fd, at, size, offset);
}

static ssize_t bad_pwrite(int fd, const void *at, size_t size, off_t offset)
{
    int r = file_fault();

    if (r == SHORT)
        return pwrite(fd, at, size / 2, offset);
    return r != 0 ? -1 : pwrite(fd, at, size, offset);
}

/* Without it (EOPNOTSUPP), the space is made by writing. */
static int bad_fallocate(int fd, int mode, off_t offset, off_t size)
{
    return file_fault() != 0 ? -1 : fallocate(fd, mode, offset, size);
}

static int bad_ftruncate(int fd, off_t size)
{
    return file_fault() != 0 ? -1 : ftruncate(fd, size);
}

static int bad_fsync(int fd)
{
    return file_fault() != 0 ? -1 : fsync(fd);
}

static int bad_rename(const char *from, const char *to)
{
    return file_fault() != 0 ? -1 : rename(from, to);
}

static const struct kvt_index_lmdb bad = {
    .env_create = bad_env_create,
    .env_set_mapsize = bad_env_set_mapsize,
    .env_open = bad_env_open,
    .env_info = bad_env_info,
    .env_close = mdb_env_close,
    .txn_begin = bad_txn_begin,
    .txn_commit = bad_txn_commit,
    .txn_abort = mdb_txn_abort,
    .dbi_open = bad_dbi_open,
    .stat = bad_stat,
    .get = bad_get,
    .put = bad_put,
    .del = bad_del,
    .cursor_open = bad_cursor_open,
    .cursor_close = mdb_cursor_close,
    .cursor_get = bad_cursor_get,
    .cursor_del = bad_cursor_del,
    .pread = bad_pread,
    .pwrite = bad_pwrite,
    .fallocate = bad_fallocate,
    .ftruncate = bad_ftruncate,
    .fsync = bad_fsync,
    .rename = bad_rename,
};

static bool alloc_fault(size_t size, void *ctx)
{
    (void)size;
    (void)ctx;
    if (calls++ != fail_at)
        return false;
    is_fired = true;
    return true;
}

/* ---- the life of a database ------------------------------------------------------------------ */

static void world_make(void)
{
    memset(&world, 0, sizeof(world));
    world.namespaces[0] = (struct kvt_index_ns){.is_used = true, .epoch = 3, .block_tokens = 64};
    world.namespaces[1] = (struct kvt_index_ns){.is_used = true, .epoch = 1, .block_tokens = 700};
    config = (struct kvt_index_db_config){.path = path, .bytes = KVT_INDEX_DB_BYTES_MIN};
    memcpy(config.namespaces, world.namespaces, sizeof(world.namespaces));
}

/* A block and a copy; the naive index has them only when they are durable. */
static int block_put(struct kvt_index_db *db, uint16_t ns, uint32_t parent)
{
    struct index_world_block *block = &world.blocks[world.count++];
    struct kvt_index_put put;
    int r;

    *block = (struct index_world_block){.parent = parent};
    block->key = (struct kvt_index_key){
        .ns = ns, .epoch = world.namespaces[ns].epoch, .block_id = ++world.stamp};
    if (parent != INDEX_WORLD_NONE) {
        block->parent_id = world.blocks[parent].key.block_id;
        block->key.block_idx = world.blocks[parent].key.block_idx + 1;
    }
    index_world_row(&put, &block->key, block->parent_id, world.namespaces[ns].block_tokens, &bytes);
    r = kvt_index_db_apply(db, &put);
    if (r != 0)
        return r;
    index_world_copy(&put, &block->key, 1, ++world.stamp, &bytes);
    block->contents[1] = put.content;
    return kvt_index_db_apply(db, &put);
}

static void durable_now(void)
{
    for (uint32_t i = 0; i < world.count; i++)
        world.blocks[i].has_row =
            world.blocks[i].key.epoch == world.namespaces[world.blocks[i].key.ns].epoch;
}

/* A commit that fails may have been made: what failed came after it. */
static bool is_made(const struct kvt_index_db *db, int r)
{
    return r == 0 || strncmp(kvt_index_db_why(db), "reading the room", 16) == 0;
}

static void block_gone(struct index_world_block *block)
{
    block->has_row = false;
    memset(block->contents, 0, sizeof(block->contents));
}

/* Puts, a commit, a drop of each kind, and a commit again. */
static int life(struct kvt_index_db *db)
{
    struct kvt_index_put drop = {.kind = KVT_INDEX_PUT_DROP_ROW};
    int r = 0;

    for (uint32_t i = 0; i < 6 && r == 0; i++)
        r = block_put(db, i < 4 ? 0 : 1, i == 0 || i == 4 ? INDEX_WORLD_NONE : i - 1);
    if (r != 0)
        return r;
    r = kvt_index_db_commit(db);
    if (is_made(db, r))
        durable_now();
    if (r != 0)
        return r;
    drop.key = world.blocks[3].key;
    r = kvt_index_db_apply(db, &drop);
    drop.kind = KVT_INDEX_PUT_DROP_COPY;
    drop.component = 1;
    drop.key = world.blocks[2].key;
    if (r == 0)
        r = kvt_index_db_apply(db, &drop);
    drop.kind = KVT_INDEX_PUT_DROP_OLD;
    drop.key = (struct kvt_index_key){.ns = 1, .epoch = 2};
    if (r == 0)
        r = kvt_index_db_apply(db, &drop);
    if (r != 0)
        return r;
    r = kvt_index_db_commit(db);
    for (uint32_t i = 2; is_made(db, r) && i < world.count; i++)
        block_gone(&world.blocks[i]);
    return r;
}

static int ignore(void *ctx, const struct kvt_index_put *put)
{
    (void)ctx;
    CHECK(index_world_is_true(put));
    return 0;
}

static bool is_explicit(int r)
{
    return r < 0 || r == KVT_INDEX_DB_E_BAD;
}

/* All of it; what stops it must have said so. */
static void scenario(void)
{
    char why[KVT_INDEX_DB_WHY_BYTES];
    struct kvt_index_db *db = NULL;
    struct kvt_index_loaded loaded;
    int r = kvt_index_db_open(&db, &config, why);

    if (r == KVT_INDEX_DB_E_FRESH) {
        r = life(db);
        if (r != 0) {
            CHECK(r < 0 && kvt_index_db_why(db)[0] != '\0');
            CHECK(kvt_index_db_commit(db) == r); /* dead, and says the same */
            CHECK(kvt_index_db_walk(db, ignore, NULL, &loaded) == r);
        }
        db = kvt_index_db_close(db);
    } else {
        CHECK(is_explicit(r) && db == NULL);
        CHECK((r == KVT_INDEX_DB_E_BAD) == (why[0] != '\0'));
    }
    if (r == 0) {
        r = kvt_index_db_open(&db, &config, why);
        if (r == 0)
            r = kvt_index_db_walk(db, ignore, NULL, &loaded);
        CHECK(r == 0 || is_explicit(r));
        db = kvt_index_db_close(db);
    }
    CHECK(r != 0 || !is_fired || fail_file == SHORT || fail_file == EINTR ||
          fail_file == EOPNOTSUPP);
}

static uint32_t open_files(void)
{
    DIR *dir = opendir("/proc/self/fd");
    uint32_t count = 0;

    CHECK(dir != NULL);
    while (readdir(dir) != NULL)
        count++;
    (void)closedir(dir);
    return count;
}

/* One run with the fault at @at; false: the scenario ended before it. */
static bool run(uint32_t at)
{
    char why[KVT_INDEX_DB_WHY_BYTES];
    struct kvt_index_loaded loaded;
    struct kvt_index_db *db = NULL;
    uint32_t files = open_files();
    int r;

    world_make();
    config.lmdb = &bad;
    (void)unlink(path);
    calls = 0;
    is_fired = false;
    fail_at = at;
    scenario();
    fail_at = NEVER;
    CHECK(open_files() == files);
    /* The next start, without faults: what the last commit left. */
    config.lmdb = NULL;
    r = kvt_index_db_open(&db, &config, why);
    if (r != 0 && r != KVT_INDEX_DB_E_FRESH) {
        fprintf(stderr, "call %u, %d %d: %d %s\n", at, fail_lmdb, fail_file, r, why);
        exit(1);
    }
    index_world_expect(&world, db, &loaded);
    db = kvt_index_db_close(db);
    CHECK(open_files() == files);
    return is_fired;
}

static void test_lmdb_calls(void **state)
{
    static const int errors[] = {MDB_MAP_FULL,      MDB_CORRUPTED, MDB_READERS_FULL, MDB_PANIC,
                                 MDB_PAGE_NOTFOUND, EIO,           ENOSPC,           ENOMEM};

    (void)state;
    fail_file = 0;
    for (uint32_t i = 0; i < KVT_COUNT_OF(errors); i++) {
        uint32_t at = 0;

        fail_lmdb = errors[i];
        while (run(at))
            at++;
        assert_in_range(at, 80, 1000);
    }
    fail_lmdb = 0;
}

static void test_file_calls(void **state)
{
    static const int errors[] = {EIO, ENOSPC, EINTR, EOPNOTSUPP, EDQUOT, SHORT};

    (void)state;
    fail_lmdb = 0;
    for (uint32_t i = 0; i < KVT_COUNT_OF(errors); i++) {
        uint32_t at = 0;

        fail_file = errors[i];
        while (run(at))
            at++;
        assert_in_range(at, 10, 1000);
    }
    fail_file = 0;
}

static void test_allocations(void **state)
{
    uint32_t at = 0;

    (void)state;
    fail_lmdb = fail_file = 0;
    do {
        kvt_alloc_set_fault(alloc_fault, NULL);
    } while (run(at++));
    kvt_alloc_set_fault(NULL, NULL);
    assert_in_range(at, 5, 100);
}

/* ---- a file that gets smaller ---------------------------------------------------------------- */

static void big_make(void)
{
    char why[KVT_INDEX_DB_WHY_BYTES];
    struct kvt_index_db *db = NULL;
    uint32_t parent = INDEX_WORLD_NONE;

    world_make();
    config.bytes = 32 * KVT_MIB;
    (void)unlink(path);
    CHECK(kvt_index_db_open(&db, &config, why) == KVT_INDEX_DB_E_FRESH);
    for (uint32_t i = 0; i < 3200; i++) {
        CHECK(block_put(db, 1, i % 64 == 0 ? INDEX_WORLD_NONE : parent) == 0);
        parent = world.count - 1;
    }
    CHECK(kvt_index_db_commit(db) == 0);
    durable_now();
    db = kvt_index_db_close(db);
}

static void file_copy(const char *from, const char *to)
{
    static uint8_t buffer[1 << 20];
    int in = open(from, O_RDONLY), out = open(to, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    ssize_t n;

    CHECK(in >= 0 && out >= 0);
    while ((n = read(in, buffer, sizeof(buffer))) > 0)
        CHECK(write(out, buffer, (size_t)n) == n);
    CHECK(n == 0 && close(in) == 0 && close(out) == 0);
}

/* The old one, whole, or the new one. */
static void shrink_run(uint32_t at, const char *saved)
{
    char why[KVT_INDEX_DB_WHY_BYTES];
    struct kvt_index_loaded loaded;
    struct kvt_index_db *db = NULL;
    uint32_t files = open_files();
    int r;

    file_copy(saved, path);
    config.bytes = KVT_INDEX_DB_BYTES_MIN;
    config.lmdb = &bad;
    calls = 0;
    is_fired = false;
    fail_at = at;
    r = kvt_index_db_open(&db, &config, why);
    fail_at = NEVER;
    CHECK(r == 0 || is_explicit(r));
    CHECK((r == 0) == !is_fired && (r == 0) == (db != NULL));
    db = kvt_index_db_close(db);
    CHECK(open_files() == files);
    config.lmdb = NULL;
    config.bytes = 32 * KVT_MIB;
    CHECK(kvt_index_db_open(&db, &config, why) == 0);
    if (r == 0) {
        CHECK(kvt_index_db_walk(db, ignore, NULL, &loaded) == 0);
        CHECK(loaded.rows > 100 && loaded.rows < world.count);
    } else {
        CHECK(kvt_index_db_walk(db, ignore, NULL, &loaded) == 0);
        CHECK(loaded.rows == world.count || (loaded.rows > 100 && loaded.rows < world.count));
    }
    db = kvt_index_db_close(db);
}

static void test_shrink(void **state)
{
    char saved[128], name[128];

    (void)state;
    (void)snprintf(saved, sizeof(saved), "%s.saved", path);
    (void)snprintf(name, sizeof(name), "%s.new", path);
    big_make();
    CHECK(rename(path, saved) == 0);
    fail_file = 0;
    fail_lmdb = EIO;
    for (uint32_t at = 0; at < 40; at++)
        shrink_run(at, saved);
    for (uint32_t at = 40; at < 20000; at = at * 3 / 2)
        shrink_run(at, saved);
    CHECK(access(name, F_OK) < 0);
    fail_lmdb = 0;
    fail_file = ENOSPC; /* not of the audit, whose calls are many and alike */
    calls = 0;
    shrink_run(NEVER - 1, saved);
    for (uint32_t last = calls, back = 1; back <= 8; back++)
        shrink_run(last - back, saved);
    CHECK(access(name, F_OK) < 0);
    fail_file = 0;
    CHECK(unlink(saved) == 0 && unlink(path) == 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_lmdb_calls),
        cmocka_unit_test(test_file_calls),
        cmocka_unit_test(test_allocations),
        cmocka_unit_test(test_shrink),
    };
    int r;

    /* Thousands of files are made: in memory where there is such a place. */
    (void)snprintf(directory, sizeof(directory), "%sindex-faults-XXXXXX",
                   access("/dev/shm", W_OK) == 0 ? "/dev/shm/" : "");
    if (mkdtemp(directory) == NULL)
        return 2;
    (void)snprintf(path, sizeof(path), "%s/index", directory);
    r = cmocka_run_group_tests(tests, NULL, NULL);
    (void)unlink(path);
    (void)rmdir(directory);
    return r;
}
