/* The calls of LMDB and of the file system that the index's database makes, as a table: tests make
 * each of them fail. Results are those of the functions of the same names. */
#pragma once

#include <lmdb.h>
#include <sys/types.h>

#include "daemon/base/def.h"

struct kvt_index_lmdb {
    int (*env_create)(MDB_env **ret_env);
    int (*env_set_mapsize)(MDB_env *env, size_t bytes);
    int (*env_open)(MDB_env *env, const char *path, unsigned flags, mdb_mode_t mode);
    int (*env_info)(MDB_env *env, MDB_envinfo *ret_info);
    void (*env_close)(MDB_env *env);
    int (*txn_begin)(MDB_env *env, MDB_txn *parent, unsigned flags, MDB_txn **ret_txn);
    int (*txn_commit)(MDB_txn *txn);
    void (*txn_abort)(MDB_txn *txn);
    int (*dbi_open)(MDB_txn *txn, const char *name, unsigned flags, MDB_dbi *ret_dbi);
    int (*stat)(MDB_txn *txn, MDB_dbi dbi, MDB_stat *ret_stat);
    int (*get)(MDB_txn *txn, MDB_dbi dbi, MDB_val *key, MDB_val *ret_value);
    int (*put)(MDB_txn *txn, MDB_dbi dbi, MDB_val *key, MDB_val *value, unsigned flags);
    int (*del)(MDB_txn *txn, MDB_dbi dbi, MDB_val *key, MDB_val *value);
    int (*cursor_open)(MDB_txn *txn, MDB_dbi dbi, MDB_cursor **ret_cursor);
    void (*cursor_close)(MDB_cursor *cursor);
    int (*cursor_get)(MDB_cursor *cursor, MDB_val *key, MDB_val *value, MDB_cursor_op op);
    int (*cursor_del)(MDB_cursor *cursor, unsigned flags);
    ssize_t (*pread)(int fd, void *at, size_t bytes, off_t offset);
    ssize_t (*pwrite)(int fd, const void *at, size_t bytes, off_t offset);
    int (*fallocate)(int fd, int mode, off_t offset, off_t bytes);
    int (*ftruncate)(int fd, off_t bytes);
    int (*fsync)(int fd);
    int (*rename)(const char *from, const char *to);
};

extern const struct kvt_index_lmdb kvt_index_lmdb_real;
