/* What the files of the database share. One thread.
 *
 * Room. LMDB never overwrites a page that the last commit uses: a transaction copies what it
 * touches, and what it frees may be used two transactions later. When it finds no page it fails,
 * and all of it is lost. So:
 *   - rows and copies are refused while the pages in use leave less than `reserve`;
 *   - a transaction is committed when it might have used half of the pages that it may use
 *     (`puts_limit`), but takes at least TIGHT_PUTS; the reserve is three times what those need at
 *     worst, so dropping always goes on;
 *   - the last TAIL_PAGES of the map are not counted: they are for a list of freed pages that needs
 *     several pages in a row. Everything else fits into single pages (row.h).
 *
 * A put is reckoned at the worst: each level of the tree copied and split. */
#pragma once

#include "tiers/index/audit.h"
#include "tiers/index/db.h"
#include "tiers/index/row.h"

#define KVT_DB_TIGHT_PUTS 8u
#define KVT_DB_PUTS_MAX 4096u
#define KVT_DB_TAIL_PAGES 64u
#define KVT_DB_SLICE_DROPS 1024u   /* entries of older epochs deleted at a commit, ... */
#define KVT_DB_SLICE_ENTRIES 8192u /* ... among so many that are looked at */

struct kvt_index_db {
    const struct kvt_index_lmdb *lmdb;
    MDB_env *env;
    MDB_txn *txn; /* open write transaction, or NULL */
    MDB_dbi dbi;
    int fd; /* holds the lock */
    uint64_t page_bytes, pages_max;
    uint64_t seed;
    struct kvt_index_ns namespaces[KVT_NAMESPACES_MAX];
    uint64_t old_epochs[KVT_NAMESPACES_MAX]; /* rows below are gone, or going (has_backlog) */
    uint16_t shards[KVT_NAMESPACES_MAX];     /* of component 0, as copies have been put; a guess */
    bool has_backlog, has_siblings;
    struct kvt_index_key backlog_from; /* what is before has been looked at */
    /* As of the last commit. */
    uint64_t live_pages, free_list_pages, usable_pages, entries;
    uint64_t reserve_pages;
    uint32_t put_pages;  /* at worst */
    uint32_t puts_limit; /* of this transaction */
    uint32_t puts;       /* so far */
    uint64_t commits, left_out;
    int error; /* not 0: dead */
    char why[KVT_INDEX_DB_WHY_BYTES];
};

/* A result of LMDB as -errno. */
int db_errno(int result);
/* Ends the transaction and kills the database; returns what it returns from now on. */
int db_dead(struct kvt_index_db *db, const char *what, int result);

/* db.c */
int db_space_read(struct kvt_index_db *db);
int db_txn_begin(struct kvt_index_db *db);
int db_txn_commit(struct kvt_index_db *db);
/* KVT_INDEX_DB_E_FULL when so many more entries would reach into the reserve. */
int db_room_check(struct kvt_index_db *db, uint32_t entries);
/* Deletes every entry of a block, or the entry of one type; nothing there is no error. Commits
 * first when the transaction is large. */
#define KVT_DB_TYPE_ALL 0xffu
int db_drop(struct kvt_index_db *db, const struct kvt_index_key *key, uint8_t type);
/* Rows of @ns below @epoch are to go, a slice at each commit. */
void db_backlog_add(struct kvt_index_db *db, uint16_t ns, uint64_t epoch);

/* db_file.c: the file and LMDB's environment on it. */
int db_file_open(struct kvt_index_db *db, const struct kvt_index_db_config *config, char *why);
void db_file_close(struct kvt_index_db *db);
