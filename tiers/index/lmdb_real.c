#include "tiers/index/lmdb_calls.h"

#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>

const struct kvt_index_lmdb kvt_index_lmdb_real = {
    .env_create = mdb_env_create,
    .env_set_mapsize = mdb_env_set_mapsize,
    .env_open = mdb_env_open,
    .env_info = mdb_env_info,
    .env_close = mdb_env_close,
    .txn_begin = mdb_txn_begin,
    .txn_commit = mdb_txn_commit,
    .txn_abort = mdb_txn_abort,
    .dbi_open = mdb_dbi_open,
    .stat = mdb_stat,
    .get = mdb_get,
    .put = mdb_put,
    .del = mdb_del,
    .cursor_open = mdb_cursor_open,
    .cursor_close = mdb_cursor_close,
    .cursor_get = mdb_cursor_get,
    .cursor_del = mdb_cursor_del,
    .pread = pread,
    .pwrite = pwrite,
    .fallocate = fallocate,
    .ftruncate = ftruncate,
    .fsync = fsync,
    .rename = rename,
};
