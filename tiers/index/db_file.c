/* The database's file: its lock, its size, whose it is, and LMDB's environment on it.
 *
 * A new file is made as PATH.new, with its size and its record, and then renamed: PATH is never a
 * half-made one. */
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "daemon/base/alloc.h"
#include "daemon/base/clock.h"
#include "tiers/index/db_internal.h"

#define ENV_FLAGS (MDB_NOSUBDIR | MDB_NOLOCK)
#define LOCK_WAIT_NS (5 * KVT_NS_PER_S)
#define LOCK_POLL_NS (5 * KVT_NS_PER_MS)
#define ZEROS_BYTES (256u << 10)

KVT_PRINTF(2, 3) static int bad(char *why, const char *format, ...)
{
    va_list args;

    va_start(args, format);
    (void)vsnprintf(why, KVT_INDEX_DB_WHY_BYTES, format, args);
    va_end(args);
    return KVT_INDEX_DB_E_BAD;
}

/* What LMDB said when it was given the file: not its fault (no memory), or the file's. */
static int refused(char *why, const char *what, int result)
{
    if (result == ENOMEM || result == -ENOMEM || result == EMFILE || result == ENFILE)
        return kvt_trace(-(result < 0 ? -result : result));
    return bad(why, "%s: %s", what, mdb_strerror(result));
}

static uint64_t page_bytes_now(void)
{
    return (uint64_t)KVT_MIN(sysconf(_SC_PAGESIZE), 32768L); /* as LMDB reckons */
}

/* Waits for the lock, but not forever. */
static int lock_take(int fd, uint64_t wait_ns)
{
    uint64_t until_ns = kvt_clock_mono_ns() + (wait_ns != 0 ? wait_ns : LOCK_WAIT_NS);

    while (flock(fd, LOCK_EX | LOCK_NB) < 0) {
        struct timespec poll = {.tv_nsec = LOCK_POLL_NS};

        if (errno != EWOULDBLOCK && errno != EINTR)
            return kvt_trace(-errno);
        if (kvt_clock_mono_ns() >= until_ns)
            return kvt_trace(-EBUSY);
        (void)nanosleep(&poll, NULL);
    }
    return 0;
}

/* Opens and locks the file that PATH names, and names still once it is locked. 0, E_FRESH: there is
 * none, or -errno. */
static int lock_open(const struct kvt_index_db_config *config, int *ret_fd, struct stat *ret_stat)
{
    for (;;) {
        struct stat named;
        int fd = open(config->path, O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK), r;

        if (fd < 0)
            return errno == ENOENT ? KVT_INDEX_DB_E_FRESH : kvt_trace(-errno);
        r = lock_take(fd, config->lock_wait_ns);
        if (r == 0 && fstat(fd, ret_stat) < 0)
            r = -errno;
        if (r < 0) {
            (void)close(fd);
            return kvt_trace(r);
        }
        if (stat(config->path, &named) == 0 && named.st_ino == ret_stat->st_ino &&
            named.st_dev == ret_stat->st_dev) {
            *ret_fd = fd;
            return 0;
        }
        (void)close(fd); /* who had it put another in its place */
    }
}

/* Zeros up to @bytes, where the file system cannot preallocate. */
static int zeros_write(const struct kvt_index_lmdb *io, int fd, uint64_t bytes)
{
    kvt_autofree uint8_t *zeros = kvt_alloc_zeroed(1, ZEROS_BYTES);
    struct stat stat;

    if (zeros == NULL)
        return kvt_trace(-ENOMEM);
    if (fstat(fd, &stat) < 0)
        return kvt_trace(-errno);
    for (uint64_t at = (uint64_t)stat.st_size; at < bytes;) {
        ssize_t n = io->pwrite(fd, zeros, KVT_MIN(ZEROS_BYTES, bytes - at), (off_t)at);

        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return kvt_trace(n < 0 ? -errno : -EIO);
        at += (uint64_t)n;
    }
    return 0;
}

/* Gives the file its bytes, all of them there. */
static int size_set(const struct kvt_index_lmdb *io, int fd, uint64_t bytes)
{
    struct stat stat;
    int r = 0;

    if (fstat(fd, &stat) < 0)
        return kvt_trace(-errno);
    if ((uint64_t)stat.st_size > bytes && io->ftruncate(fd, (off_t)bytes) < 0)
        return kvt_trace(-errno);
    if ((uint64_t)stat.st_blocks * 512 < bytes || (uint64_t)stat.st_size < bytes) {
        do
            r = io->fallocate(fd, 0, 0, (off_t)bytes) < 0 ? -errno : 0;
        while (r == -EINTR);
        if (r == -EOPNOTSUPP || r == -ENOSYS)
            r = zeros_write(io, fd, bytes);
    }
    if (r == 0 && io->fsync(fd) < 0)
        r = -errno;
    return r < 0 ? kvt_trace(r) : 0;
}

static int directory_sync(const struct kvt_index_lmdb *io, const char *path)
{
    kvt_autofree char *directory = kvt_alloc_text(path);
    kvt_autoclose int fd = -1;
    char *slash;

    if (directory == NULL)
        return kvt_trace(-ENOMEM);
    slash = strrchr(directory, '/');
    if (slash == directory)
        slash++;
    if (slash != NULL)
        *slash = '\0';
    fd = open(slash != NULL ? directory : ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0 || io->fsync(fd) < 0)
        return kvt_trace(-errno);
    return 0;
}

/* LMDB on @path; the tree of rows is the unnamed one. A result of LMDB. */
static int env_start(struct kvt_index_db *db, const char *path, uint64_t map_bytes, unsigned flags)
{
    const struct kvt_index_lmdb *lmdb = db->lmdb;
    MDB_txn *txn = NULL;
    int r = lmdb->env_create(&db->env);

    if (r != 0) {
        db->env = NULL;
        return r;
    }
    r = lmdb->env_set_mapsize(db->env, map_bytes);
    if (r == 0)
        r = lmdb->env_open(db->env, path, ENV_FLAGS | flags, 0600);
    if (r == 0)
        r = lmdb->txn_begin(db->env, NULL, MDB_RDONLY, &txn);
    if (r != 0)
        return r;
    r = lmdb->dbi_open(txn, NULL, 0, &db->dbi);
    lmdb->txn_abort(txn);
    return r;
}

static void env_stop(struct kvt_index_db *db)
{
    if (db->env != NULL)
        db->lmdb->env_close(db->env);
    db->env = NULL;
}

/* Whose index it is: 0, E_BAD, -errno. */
static int meta_check(struct kvt_index_db *db, const struct kvt_index_db_config *config, char *why)
{
    uint8_t key_byte = 0;
    MDB_val key = {KVT_INDEX_META_KEY_BYTES, &key_byte}, value;
    MDB_txn *txn = NULL;
    enum kvt_index_meta_verdict verdict = KVT_INDEX_META_DAMAGED;
    int r = db->lmdb->txn_begin(db->env, NULL, MDB_RDONLY, &txn);

    if (r != 0)
        return refused(why, "cannot be read", r);
    r = db->lmdb->get(txn, db->dbi, &key, &value);
    if (r == 0)
        verdict = kvt_index_meta_check(value.mv_data, value.mv_size, config->store_id,
                                       config->device_uuid);
    db->lmdb->txn_abort(txn);
    if (r != 0 && r != MDB_NOTFOUND)
        return refused(why, "cannot be read", r);
    switch (verdict) {
    case KVT_INDEX_META_OK:
        return 0;
    case KVT_INDEX_META_OTHER_VERSION:
        return bad(why, "is of another format, known is %u", KVT_INDEX_FORMAT_VERSION);
    case KVT_INDEX_META_OTHER_STORE:
        return bad(why, "belongs to another store");
    case KVT_INDEX_META_OTHER_DEVICE:
        return bad(why, "belongs to another device of this store");
    case KVT_INDEX_META_DAMAGED:
        break;
    }
    return bad(why, "has no record of whose index it is");
}

/* An environment on a new file at @path with nothing but that record. 0 or -errno. */
static int env_make(struct kvt_index_db *db, const struct kvt_index_db_config *config,
                    const char *path)
{
    uint8_t key_byte = 0, record[KVT_INDEX_META_BYTES];
    MDB_val key = {KVT_INDEX_META_KEY_BYTES, &key_byte}, value = {sizeof(record), record};
    int r;

    if (unlink(path) < 0 && errno != ENOENT)
        return kvt_trace(-errno);
    db->page_bytes = page_bytes_now();
    db->pages_max = config->bytes / db->page_bytes;
    r = env_start(db, path, db->pages_max * db->page_bytes, 0);
    if (r == 0)
        r = db->lmdb->txn_begin(db->env, NULL, 0, &db->txn);
    if (r != 0)
        return kvt_trace(db_errno(r));
    kvt_index_meta_write(record, config->store_id, config->device_uuid);
    r = db->lmdb->put(db->txn, db->dbi, &key, &value, 0);
    return r != 0 ? kvt_trace(db_errno(r)) : db_txn_commit(db);
}

/* Closes the environment, and puts the file in its place. 0 or -errno. */
static int env_place(struct kvt_index_db *db, const struct kvt_index_db_config *config,
                     const char *path)
{
    kvt_autoclose int fd = -1;
    int r;

    env_stop(db);
    fd = open(path, O_RDWR | O_CLOEXEC | O_NOFOLLOW);
    if (fd < 0)
        return kvt_trace(-errno);
    r = size_set(db->lmdb, fd, db->pages_max * db->page_bytes);
    if (r == 0 && db->lmdb->rename(path, config->path) < 0)
        r = -errno;
    if (r == 0)
        r = directory_sync(db->lmdb, config->path);
    return r < 0 ? kvt_trace(r) : 0;
}

static char *path_new(const char *path)
{
    size_t bytes = strlen(path) + sizeof(".new");
    char *text = kvt_alloc_zeroed(bytes, 1);

    if (text != NULL)
        (void)snprintf(text, bytes, "%s.new", path);
    return text;
}

/* For a new file: what of @config's database does not depend on the file. */
static struct kvt_index_db db_blank(const struct kvt_index_db_config *config)
{
    return (struct kvt_index_db){
        .lmdb = config->lmdb != NULL ? config->lmdb : &kvt_index_lmdb_real,
        .fd = -1,
        .seed = kvt_index_row_seed(config->store_id, config->device_uuid),
    };
}

int kvt_index_db_replace(const struct kvt_index_db_config *config)
{
    kvt_autofree char *path = path_new(config->path);
    struct kvt_index_db made = db_blank(config);
    int r;

    if (path == NULL)
        return kvt_trace(-ENOMEM);
    if (config->bytes < KVT_INDEX_DB_BYTES_MIN)
        return kvt_trace(-EINVAL);
    /* The old one first: never room for two. Without an index the next start scans. */
    if (unlink(config->path) < 0 && errno != ENOENT)
        return kvt_trace(-errno);
    r = env_make(&made, config, path);
    if (r == 0)
        r = env_place(&made, config, path);
    if (made.txn != NULL)
        made.lmdb->txn_abort(made.txn);
    env_stop(&made);
    if (r < 0)
        (void)unlink(path);
    return r;
}

/* One entry into the new file, behind all others. 0, E_FULL, -errno. */
static int entry_append(struct kvt_index_db *to, MDB_val *key, MDB_val *value)
{
    int r = to->puts >= to->puts_limit ? db_txn_commit(to) : 0;

    if (r == 0)
        r = db_txn_begin(to);
    if (r == 0)
        r = db_room_check(to, 1);
    if (r != 0)
        return r;
    to->puts++;
    r = to->lmdb->put(to->txn, to->dbi, key, value, MDB_APPEND);
    return r != 0 ? db_dead(to, "put", r) : 0;
}

/* Every sound entry that fits, in order; *ret_left_out did not. 0, E_BAD, -errno. */
static int entries_copy(struct kvt_index_db *from, struct kvt_index_db *to, uint64_t *ret_left_out,
                        char *why)
{
    uint64_t left_out = 0;
    MDB_txn *txn = NULL;
    MDB_cursor *cursor = NULL;
    MDB_val key, value;
    int r = from->lmdb->txn_begin(from->env, NULL, MDB_RDONLY, &txn), r_put = 0;

    if (r == 0)
        r = from->lmdb->cursor_open(txn, from->dbi, &cursor);
    while (r == 0 && r_put >= 0 &&
           (r = from->lmdb->cursor_get(cursor, &key, &value, MDB_NEXT)) == 0) {
        if (key.mv_size != KVT_INDEX_KEY_BYTES ||
            !kvt_index_value_is_sound(key.mv_data, from->seed, value.mv_data, value.mv_size))
            continue;
        if (r_put == 0)
            r_put = entry_append(to, &key, &value);
        left_out += r_put == KVT_INDEX_DB_E_FULL;
    }
    if (cursor != NULL)
        from->lmdb->cursor_close(cursor);
    if (txn != NULL)
        from->lmdb->txn_abort(txn);
    if (r_put >= 0 && r != MDB_NOTFOUND)
        return refused(why, "cannot be read", r);
    if (r_put >= 0)
        r_put = db_txn_commit(to);
    if (r_put < 0)
        return r_put;
    *ret_left_out = left_out;
    return 0;
}

/* The file's used part is larger than the configured bytes: what fits goes into a new file. Nothing
 * is changed before that is complete. */
static int file_shrink(struct kvt_index_db *db, const struct kvt_index_db_config *config,
                       uint64_t used_bytes, char *why)
{
    kvt_autofree char *path = path_new(config->path);
    struct kvt_index_db from = db_blank(config), to = db_blank(config);
    int r;

    if (path == NULL)
        return kvt_trace(-ENOMEM);
    r = env_start(&from, config->path, used_bytes, MDB_RDONLY);
    r = r != 0 ? refused(why, "LMDB refuses it", r) : meta_check(&from, config, why);
    if (r == 0) {
        r = env_make(&to, config, path);
        if (r == 0)
            r = entries_copy(&from, &to, &db->left_out, why);
        if (r == 0)
            r = env_place(&to, config, path);
        if (to.txn != NULL)
            to.lmdb->txn_abort(to.txn);
        env_stop(&to);
        if (r != 0)
            (void)unlink(path);
    }
    env_stop(&from);
    return r;
}

/* The audit's word on the file, and a file that fits. 0, E_BAD, -errno. */
static int file_check(struct kvt_index_db *db, const struct kvt_index_db_config *config,
                      const struct stat *stat, char *why)
{
    struct kvt_index_audit audit;
    struct stat other;
    int r;

    if (!S_ISREG(stat->st_mode))
        return bad(why, "is not a regular file");
    if (stat->st_size == 0)
        return bad(why, "is empty");
    r = kvt_index_audit(db->lmdb, db->fd, (uint64_t)stat->st_size, &audit, why,
                        KVT_INDEX_DB_WHY_BYTES);
    if (r != 0)
        return r < 0 ? r : KVT_INDEX_DB_E_BAD;
    db->page_bytes = audit.page_bytes;
    db->pages_max = config->bytes / audit.page_bytes;
    if (audit.pages_count <= db->pages_max)
        return 0;
    r = file_shrink(db, config, audit.pages_count * audit.page_bytes, why);
    if (r != 0)
        return r;
    (void)close(db->fd);
    db->fd = -1;
    r = lock_open(config, &db->fd, &other);
    return r > 0 ? kvt_trace(-ENOENT) : r;
}

/* A new file whose making ended with its process, beside one that is whole: bytes that nobody
 * counts. */
static int remains_remove(const char *path)
{
    kvt_autofree char *made = path_new(path);

    if (made == NULL)
        return kvt_trace(-ENOMEM);
    return unlink(made) < 0 && errno != ENOENT ? kvt_trace(-errno) : 0;
}

int db_file_open(struct kvt_index_db *db, const struct kvt_index_db_config *config, char *why)
{
    bool is_fresh = false;
    struct stat stat;
    int r = lock_open(config, &db->fd, &stat);

    if (r == KVT_INDEX_DB_E_FRESH) {
        is_fresh = true;
        r = kvt_index_db_replace(config);
        if (r == 0)
            r = lock_open(config, &db->fd, &stat);
        if (r > 0)
            r = kvt_trace(-ENOENT); /* somebody took it away again */
    }
    if (r == 0)
        r = remains_remove(config->path);
    if (r == 0)
        r = file_check(db, config, &stat, why);
    if (r != 0)
        return r;
    r = env_start(db, config->path, db->pages_max * db->page_bytes, 0);
    r = r != 0 ? refused(why, "LMDB refuses it", r) : meta_check(db, config, why);
    if (r == 0)
        r = size_set(db->lmdb, db->fd, db->pages_max * db->page_bytes);
    if (r != 0)
        return r;
    r = db_space_read(db);
    if (r != 0)
        return refused(why, "cannot be read", r);
    return is_fresh ? KVT_INDEX_DB_E_FRESH : 0;
}

void db_file_close(struct kvt_index_db *db)
{
    env_stop(db);
    if (db->fd >= 0)
        (void)close(db->fd);
    db->fd = -1;
}
