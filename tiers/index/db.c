#include "tiers/index/db.h"

#include <stdio.h>
#include <string.h>

#include "daemon/base/alloc.h"
#include "tiers/index/db_internal.h"

#define FREE_LIST_DBI 0u

int db_errno(int result)
{
    KVT_ASSERT(result != 0);
    if (result < 0 && (result < MDB_KEYEXIST || result > MDB_LAST_ERRCODE))
        return result; /* it is one */
    switch (result) {
    case MDB_MAP_FULL:
        return -ENOSPC;
    case MDB_CORRUPTED:
    case MDB_PAGE_NOTFOUND:
    case MDB_INVALID:
    case MDB_VERSION_MISMATCH:
        return -EUCLEAN;
    default: /* the other results of LMDB are small negative numbers */
        return result > 0 ? -result : -EIO;
    }
}

int db_dead(struct kvt_index_db *db, const char *what, int result)
{
    int r = db_errno(result);

    if (db->txn != NULL)
        db->lmdb->txn_abort(db->txn);
    db->txn = NULL;
    db->error = r;
    (void)snprintf(db->why, sizeof(db->why), "%s: %s", what,
                   result == r ? strerror(-r) : mdb_strerror(result));
    return kvt_trace(r);
}

/* The pages that the next transaction may not use yet: those that the last one freed. */
static int pending_read(struct kvt_index_db *db, MDB_txn *txn, uint64_t last_txn_id,
                        uint64_t *ret_pages)
{
    MDB_cursor *cursor = NULL;
    MDB_val key, value;
    uint64_t id, pages = 0;
    int r = db->lmdb->cursor_open(txn, FREE_LIST_DBI, &cursor);

    if (r != 0)
        return r;
    r = db->lmdb->cursor_get(cursor, &key, &value, MDB_LAST);
    if (r == 0 && (key.mv_size != sizeof(id) || value.mv_size < sizeof(pages)))
        r = MDB_CORRUPTED;
    if (r == 0) {
        memcpy(&id, key.mv_data, sizeof(id));
        if (id == last_txn_id)
            memcpy(&pages, value.mv_data, sizeof(pages));
    }
    db->lmdb->cursor_close(cursor);
    if (r != 0 && r != MDB_NOTFOUND)
        return r;
    *ret_pages = pages;
    return 0;
}

static uint64_t pages_of(const MDB_stat *stat)
{
    return stat->ms_branch_pages + stat->ms_leaf_pages + stat->ms_overflow_pages;
}

/* What the next transaction has; see db_internal.h. */
static void space_reckon(struct kvt_index_db *db, uint64_t pages_used, uint64_t pending,
                         uint32_t depth)
{
    uint64_t tail = db->pages_max - KVT_MIN(pages_used, db->pages_max);
    uint64_t free_pages = pages_used - KVT_MIN(db->live_pages, pages_used);
    uint64_t limit;

    db->usable_pages = free_pages - KVT_MIN(pending, free_pages);
    if (tail > KVT_DB_TAIL_PAGES)
        db->usable_pages += tail - KVT_DB_TAIL_PAGES;
    db->put_pages = 2 * depth + 4;
    db->reserve_pages =
        KVT_MAX((uint64_t)3 * (KVT_DB_TIGHT_PUTS + 4) * db->put_pages + 2ul * KVT_DB_TAIL_PAGES,
                db->pages_max / 32);
    limit = db->usable_pages / (2ul * db->put_pages);
    limit = KVT_MIN(limit, KVT_DB_PUTS_MAX);
    db->puts_limit = (uint32_t)KVT_MAX(limit, KVT_DB_TIGHT_PUTS);
}

int db_space_read(struct kvt_index_db *db)
{
    MDB_stat rows, free_list;
    MDB_txn *txn = NULL;
    MDB_envinfo info;
    uint64_t pending = 0;
    int r = db->lmdb->txn_begin(db->env, NULL, MDB_RDONLY, &txn);

    if (r != 0)
        return r;
    r = db->lmdb->stat(txn, db->dbi, &rows);
    if (r == 0)
        r = db->lmdb->stat(txn, FREE_LIST_DBI, &free_list);
    if (r == 0)
        r = db->lmdb->env_info(db->env, &info);
    if (r == 0)
        r = pending_read(db, txn, info.me_last_txnid, &pending);
    db->lmdb->txn_abort(txn);
    if (r != 0)
        return r;
    db->entries = rows.ms_entries == 0 ? 0 : rows.ms_entries - 1; /* without the meta record */
    db->free_list_pages = pages_of(&free_list);
    db->live_pages = 2 + pages_of(&rows) + db->free_list_pages;
    space_reckon(db, info.me_last_pgno + 1, pending, rows.ms_depth);
    return 0;
}

int db_txn_begin(struct kvt_index_db *db)
{
    int r;

    if (db->error != 0)
        return db->error;
    if (db->txn != NULL)
        return 0;
    r = db->lmdb->txn_begin(db->env, NULL, 0, &db->txn);
    if (r != 0) {
        db->txn = NULL;
        return db_dead(db, "transaction", r);
    }
    db->puts = 0;
    return 0;
}

int db_txn_commit(struct kvt_index_db *db)
{
    MDB_txn *txn = db->txn;
    int r;

    if (db->error != 0)
        return db->error;
    if (txn == NULL)
        return 0;
    db->txn = NULL; /* commit frees it, whatever it returns */
    r = db->lmdb->txn_commit(txn);
    if (r != 0)
        return db_dead(db, "commit", r);
    db->commits++;
    r = db_space_read(db);
    return r != 0 ? db_dead(db, "reading the room that is left", r) : 0;
}

/* A transaction that has room for @puts more. */
static int txn_ready(struct kvt_index_db *db, uint32_t puts)
{
    int r = db->txn != NULL && db->puts >= db->puts_limit ? db_txn_commit(db) : 0;

    if (r == 0)
        r = db_txn_begin(db);
    if (r == 0)
        db->puts += puts;
    return r;
}

/* Each entry may split a leaf: a page more, and now and then one of the levels above. */
int db_room_check(struct kvt_index_db *db, uint32_t entries)
{
    uint64_t live;
    MDB_stat rows;
    int r = db->lmdb->stat(db->txn, db->dbi, &rows);

    if (r != 0)
        return db_dead(db, "room", r);
    live = 2 + pages_of(&rows) + db->free_list_pages;
    return live + 2ul * entries + db->reserve_pages > db->pages_max ? KVT_INDEX_DB_E_FULL : 0;
}

static int entry_put(struct kvt_index_db *db, const uint8_t *key_bytes, uint8_t *value,
                     uint32_t value_bytes)
{
    MDB_val key = {KVT_INDEX_KEY_BYTES, (void *)(uintptr_t)key_bytes};
    MDB_val data = {value_bytes, value};
    int r = db->lmdb->put(db->txn, db->dbi, &key, &data, 0);

    return r != 0 ? db_dead(db, "put", r) : 0;
}

/* A copy of component 0 will come, most likely when pages around the row are full: the room is made
 * now, so that the copy goes over it in place instead of splitting them. */
static int place_put(struct kvt_index_db *db, const struct kvt_index_key *block)
{
    static const uint64_t none[KVT_RANKS_MAX];
    struct kvt_index_put put = {.kind = KVT_INDEX_PUT_COPY,
                                .key = *block,
                                .shards_count = KVT_MAX(db->shards[block->ns], (uint16_t)1),
                                .slot_offsets = none,
                                .run_offsets = none};
    uint8_t bytes[KVT_INDEX_KEY_BYTES], value[KVT_INDEX_VALUE_BYTES_MAX];
    MDB_val key = {sizeof(bytes), bytes}, data = {0, value};
    int r;

    kvt_index_key_write(bytes, block, KVT_INDEX_TYPE_COPY);
    data.mv_size = kvt_index_copy_write(value, bytes, db->seed, &put);
    r = db->lmdb->put(db->txn, db->dbi, &key, &data, MDB_NOOVERWRITE);
    return r != 0 && r != MDB_KEYEXIST ? db_dead(db, "put", r) : 0;
}

static int row_put(struct kvt_index_db *db, const struct kvt_index_put *put)
{
    uint8_t key[KVT_INDEX_KEY_BYTES], value[KVT_INDEX_VALUE_BYTES_MAX];
    struct kvt_index_row_shape shape;
    uint32_t puts;
    int r;

    kvt_index_row_shape(put->tokens_count, put->extra_key != NULL, put->root_key_bytes, &shape);
    puts = 1 + (uint32_t)kvt_div_up(shape.parts_count, 8);
    r = txn_ready(db, puts);
    if (r == 0)
        r = db_room_check(db, 2 + shape.parts_count);
    if (r != 0)
        return r;
    kvt_index_key_write(key, &put->key, KVT_INDEX_TYPE_ROW);
    r = entry_put(db, key, value, kvt_index_row_write(value, key, db->seed, put));
    for (uint32_t i = 0; i < shape.parts_count && r == 0; i++) {
        kvt_index_key_write(key, &put->key, (uint8_t)(KVT_INDEX_TYPE_PART + i));
        r = entry_put(db, key, value, kvt_index_part_write(value, key, db->seed, put, i));
    }
    return r == 0 ? place_put(db, &put->key) : r;
}

static int copy_put(struct kvt_index_db *db, const struct kvt_index_put *put)
{
    uint8_t key[KVT_INDEX_KEY_BYTES], value[KVT_INDEX_VALUE_BYTES_MAX];
    int r = txn_ready(db, 1);

    if (r == 0)
        r = db_room_check(db, 1);
    if (r != 0)
        return r;
    if (put->component == 0)
        db->shards[put->key.ns] = put->shards_count;
    kvt_index_key_write(key, &put->key, (uint8_t)(KVT_INDEX_TYPE_COPY + put->component));
    return entry_put(db, key, value, kvt_index_copy_write(value, key, db->seed, put));
}

static int block_drop(struct kvt_index_db *db, const struct kvt_index_key *key)
{
    uint8_t first[KVT_INDEX_KEY_BYTES];
    MDB_cursor *cursor = NULL;
    MDB_val at = {KVT_INDEX_KEY_BYTES, first}, value;
    int r = db->lmdb->cursor_open(db->txn, db->dbi, &cursor);

    if (r != 0)
        return db_dead(db, "cursor", r);
    kvt_index_key_write(first, key, 0);
    r = db->lmdb->cursor_get(cursor, &at, &value, MDB_SET_RANGE);
    while (r == 0 && at.mv_size == KVT_INDEX_KEY_BYTES &&
           memcmp(at.mv_data, first, KVT_INDEX_KEY_BYTES - 1) == 0) {
        r = db->lmdb->cursor_del(cursor, 0);
        if (r == 0)
            r = db->lmdb->cursor_get(cursor, &at, &value, MDB_NEXT);
    }
    db->lmdb->cursor_close(cursor);
    return r != 0 && r != MDB_NOTFOUND ? db_dead(db, "drop", r) : 0;
}

int db_drop(struct kvt_index_db *db, const struct kvt_index_key *key, uint8_t type)
{
    uint8_t bytes[KVT_INDEX_KEY_BYTES];
    MDB_val at = {KVT_INDEX_KEY_BYTES, bytes};
    int r = txn_ready(db, type == KVT_DB_TYPE_ALL ? 2 : 1);

    if (r != 0)
        return r;
    if (type == KVT_DB_TYPE_ALL)
        return block_drop(db, key);
    kvt_index_key_write(bytes, key, type);
    r = db->lmdb->del(db->txn, db->dbi, &at, NULL);
    return r != 0 && r != MDB_NOTFOUND ? db_dead(db, "drop", r) : 0;
}

void db_backlog_add(struct kvt_index_db *db, uint16_t ns, uint64_t epoch)
{
    if (epoch > db->old_epochs[ns])
        db->old_epochs[ns] = epoch;
    db->has_backlog = true;
    db->backlog_from = (struct kvt_index_key){.ns = 0};
}

/* Looks at some entries from where it was left and deletes those of older epochs, up to @drops.
 * MDB_NOTFOUND: that was the last. */
static int backlog_slice(struct kvt_index_db *db, MDB_cursor *cursor, uint32_t drops)
{
    uint8_t first[KVT_INDEX_KEY_BYTES], type;
    MDB_val at = {KVT_INDEX_KEY_BYTES, first}, value;
    int r;

    kvt_index_key_write(first, &db->backlog_from, 0);
    r = db->lmdb->cursor_get(cursor, &at, &value, MDB_SET_RANGE);
    for (uint32_t seen = 0; r == 0 && drops > 0 && seen < KVT_DB_SLICE_ENTRIES; seen++) {
        struct kvt_index_key key;

        if (at.mv_size != KVT_INDEX_KEY_BYTES)
            return MDB_CORRUPTED;
        kvt_index_key_read(at.mv_data, &key, &type);
        db->backlog_from = key; /* of its entries, those that are left come again */
        if (key.ns < KVT_NAMESPACES_MAX && key.epoch < db->old_epochs[key.ns]) {
            drops--;
            r = db->lmdb->cursor_del(cursor, 0);
        }
        if (r == 0)
            r = db->lmdb->cursor_get(cursor, &at, &value, MDB_NEXT);
    }
    return r;
}

static int backlog_work(struct kvt_index_db *db)
{
    MDB_cursor *cursor = NULL;
    uint32_t drops;
    int r = db_txn_begin(db);

    if (r != 0)
        return r;
    r = db->lmdb->cursor_open(db->txn, db->dbi, &cursor);
    if (r != 0)
        return db_dead(db, "cursor", r);
    drops = db->puts_limit - KVT_MIN(db->puts, db->puts_limit);
    drops = KVT_MIN(KVT_MAX(drops, 1u), KVT_DB_SLICE_DROPS);
    r = backlog_slice(db, cursor, drops);
    db->lmdb->cursor_close(cursor);
    if (r == MDB_NOTFOUND)
        db->has_backlog = false;
    return r != 0 && r != MDB_NOTFOUND ? db_dead(db, "drop of an older epoch", r) : 0;
}

int kvt_index_db_apply(struct kvt_index_db *db, const struct kvt_index_put *put)
{
    if (db->error != 0)
        return db->error;
    if (!kvt_index_put_is_sound(put))
        return -EINVAL;
    switch (put->kind) {
    case KVT_INDEX_PUT_ROW:
        return put->key.epoch < db->old_epochs[put->key.ns] ? 0 : row_put(db, put);
    case KVT_INDEX_PUT_COPY:
        return put->key.epoch < db->old_epochs[put->key.ns] ? 0 : copy_put(db, put);
    case KVT_INDEX_PUT_DROP_COPY:
        return db_drop(db, &put->key, (uint8_t)(KVT_INDEX_TYPE_COPY + put->component));
    case KVT_INDEX_PUT_DROP_ROW:
        return db_drop(db, &put->key, KVT_DB_TYPE_ALL);
    case KVT_INDEX_PUT_DROP_OLD:
        db_backlog_add(db, put->key.ns, put->key.epoch);
        return 0;
    case KVT_INDEX_PUT_SYNC:
    case KVT_INDEX_PUT_CATALOG:
        break;
    }
    return -EINVAL;
}

/* 0, or E_FULL: the row that the put hangs from is not there. */
static int link_check(struct kvt_index_db *db, const struct kvt_index_put *put)
{
    uint8_t bytes[KVT_INDEX_KEY_BYTES];
    MDB_val at = {KVT_INDEX_KEY_BYTES, bytes}, value;
    struct kvt_index_key key = put->key;
    int r;

    if (put->kind == KVT_INDEX_PUT_ROW) {
        if (key.block_idx == 0)
            return 0;
        key.block_idx--;
        key.block_id = put->parent_id;
    } else if (put->kind != KVT_INDEX_PUT_COPY) {
        return 0;
    }
    r = db_txn_begin(db);
    if (r != 0)
        return r;
    kvt_index_key_write(bytes, &key, KVT_INDEX_TYPE_ROW);
    r = db->lmdb->get(db->txn, db->dbi, &at, &value);
    if (r == MDB_NOTFOUND)
        return KVT_INDEX_DB_E_FULL;
    return r != 0 ? db_dead(db, "row above", r) : 0;
}

int kvt_index_db_apply_linked(struct kvt_index_db *db, const struct kvt_index_put *put)
{
    int r = db->error;

    if (r == 0 && kvt_index_put_is_sound(put))
        r = link_check(db, put);
    return r == 0 ? kvt_index_db_apply(db, put) : r;
}

int kvt_index_db_commit(struct kvt_index_db *db)
{
    int r = db->error;

    if (r == 0 && db->has_backlog)
        r = backlog_work(db);
    return r == 0 ? db_txn_commit(db) : r;
}

bool kvt_index_db_has_backlog(const struct kvt_index_db *db)
{
    return db->error == 0 && db->has_backlog;
}

const char *kvt_index_db_why(const struct kvt_index_db *db)
{
    return db->why;
}

void kvt_index_db_stats(const struct kvt_index_db *db, struct kvt_index_db_stats *ret_stats)
{
    *ret_stats = (struct kvt_index_db_stats){.used_bytes = db->live_pages * db->page_bytes,
                                             .capacity_bytes = db->pages_max * db->page_bytes,
                                             .entries = db->entries,
                                             .commits = db->commits,
                                             .left_out = db->left_out};
}

int kvt_index_db_open(struct kvt_index_db **ret_db, const struct kvt_index_db_config *config,
                      char why[KVT_INDEX_DB_WHY_BYTES])
{
    struct kvt_index_db *db;
    int r;

    why[0] = '\0';
    if (config->bytes < KVT_INDEX_DB_BYTES_MIN)
        return kvt_trace(-EINVAL);
    db = kvt_alloc_zeroed(1, sizeof(*db));
    if (db == NULL)
        return kvt_trace(-ENOMEM);
    db->fd = -1;
    db->lmdb = config->lmdb != NULL ? config->lmdb : &kvt_index_lmdb_real;
    db->seed = kvt_index_row_seed(config->store_id, config->device_uuid);
    db->has_siblings = config->has_siblings;
    memcpy(db->namespaces, config->namespaces, sizeof(db->namespaces));
    for (uint32_t i = 0; i < KVT_NAMESPACES_MAX; i++)
        db->old_epochs[i] = config->namespaces[i].is_used ? config->namespaces[i].epoch : 0;
    r = db_file_open(db, config, why);
    if (r < 0 || r == KVT_INDEX_DB_E_BAD) {
        db = kvt_index_db_close(db);
        return r;
    }
    *ret_db = db;
    return r;
}

struct kvt_index_db *kvt_index_db_close(struct kvt_index_db *db)
{
    if (db == NULL)
        return NULL;
    if (db->txn != NULL)
        db->lmdb->txn_abort(db->txn);
    db_file_close(db);
    kvt_free(db);
    return NULL;
}
