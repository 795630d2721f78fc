/* The database of one device's index: rows of blocks and copies in one LMDB file (docs/formats.md:
 * "The index"). Used only in the helper process, offline tools and tests: LMDB trusts its map.
 *
 *   open -> walk (once, before anything is applied) -> apply*, commit, apply*, commit ... -> close
 *
 * The file has the configured bytes, preallocated, and never more. It is locked (flock) while it is
 * open; who finds it locked waits for a helper that is about to end, then gets -EBUSY. Before LMDB
 * maps it every page of it is audited (audit.h), so that neither a reader nor a writer of LMDB
 * meets a page that cannot be; a row is believed only with its checksum.
 *
 * What is applied is in one open transaction until commit. But a transaction that has grown large
 * is committed by apply itself, so whatever a COPY names must be durable before it is applied.
 * Order is kept: no put is ever durable without those before it.
 *
 * After a negative result of apply, commit or walk the database is dead: what was not committed is
 * lost, every later call returns the same, only close does something.
 *
 * One thread, no locks. Pointers in a put are used during the call only. */
#pragma once

#include "tiers/index/index.h"

#define KVT_INDEX_DB_E_FRESH 1 /* there was none: an empty one was made and is open */
#define KVT_INDEX_DB_E_BAD 2   /* not usable, `why` says it; nothing is open, nothing was changed */
#define KVT_INDEX_DB_E_FULL 3  /* this put was refused: no room; drops still have some */

#define KVT_INDEX_DB_WHY_BYTES 160u
#define KVT_INDEX_DB_BYTES_MIN (4u << 20)

struct kvt_index_db;
struct kvt_index_lmdb; /* the calls of LMDB and of the file system that are used: lmdb_calls.h */

struct kvt_index_db_config {
    const char *path;
    uint64_t bytes; /* rounded down to pages; at least KVT_INDEX_DB_BYTES_MIN */
    uint8_t store_id[16], device_uuid[16];
    struct kvt_index_ns namespaces[KVT_NAMESPACES_MAX]; /* rows of others, other epochs: dropped */
    bool has_siblings; /* as in struct kvt_index_config: rows without their parent are visited last
                        */
    const struct kvt_index_lmdb *lmdb; /* NULL: the real ones */
    uint64_t lock_wait_ns;             /* how long another process may still hold it; 0: 5 s */
};

struct kvt_index_db_stats {
    uint64_t used_bytes, capacity_bytes; /* pages in use; the map */
    uint64_t entries;                    /* LMDB's count: rows, copies, parts of long rows */
    uint64_t commits;                    /* since open, those that apply made too */
    uint64_t left_out;                   /* entries that did not fit when the file shrank */
};

/* 0, E_FRESH (*ret_db is set too), E_BAD (with @why), or -errno: no room for the bytes (-ENOSPC),
 * held by another process (-EBUSY), fewer bytes than BYTES_MIN (-EINVAL), no memory, no
 * permission. A file that is larger than the configured bytes is written anew, parents first, with
 * what fits. @why is set to "" when there is nothing to say. */
KVT_MUST_USE int kvt_index_db_open(struct kvt_index_db **ret_db,
                                   const struct kvt_index_db_config *config,
                                   char why[KVT_INDEX_DB_WHY_BYTES]);

/* Removes what is at the path, whatever it is, and puts an empty database there. 0 or -errno. */
KVT_MUST_USE int kvt_index_db_replace(const struct kvt_index_db_config *config);

/* Visits what holds: each ROW before its children, followed at once by its COPYs; depth first. A
 * row holds when its checksum and shape are right, its namespace is used and of this epoch, its
 * parent holds, and it or a block below it has a copy. With has_siblings a row without its parent
 * holds too: such rows come last, the least deep first, with what is below them. What does not hold
 * is deleted, rows of older epochs a slice at each commit. 0; E_BAD: nothing was visited, the
 * database is dead; -errno; or what @visit returned (not 0: it stops, and nothing is deleted). */
KVT_MUST_USE int kvt_index_db_walk(struct kvt_index_db *db,
                                   int (*visit)(void *ctx, const struct kvt_index_put *put),
                                   void *ctx, struct kvt_index_loaded *ret_loaded);

/* ROW, COPY and the DROPs. 0, E_FULL (ROW, COPY only), or -errno; -EINVAL, a put that is malformed
 * or of another kind, changes nothing and leaves the database alive. What is put with an epoch that
 * a DROP_OLD has passed is forgotten at once. */
KVT_MUST_USE int kvt_index_db_apply(struct kvt_index_db *db, const struct kvt_index_put *put);
/* The same, but a ROW whose parent has no row, and a COPY without its row, are E_FULL, too: where a
 * row was refused, what is below it is refused as well, so that a walk finds whatever is not. */
KVT_MUST_USE int kvt_index_db_apply_linked(struct kvt_index_db *db,
                                           const struct kvt_index_put *put);

/* Durable on return: 0 or -errno. Also deletes a slice of what DROP_OLDs have left. */
KVT_MUST_USE int kvt_index_db_commit(struct kvt_index_db *db);

/* True: a DROP_OLD is not worked off yet. Commit when there is nothing better to do. */
bool kvt_index_db_has_backlog(const struct kvt_index_db *db);

/* After a negative result: what broke, for people; "" before. Lives as long as @db. */
const char *kvt_index_db_why(const struct kvt_index_db *db);

void kvt_index_db_stats(const struct kvt_index_db *db, struct kvt_index_db_stats *ret_stats);

/* What was applied after the last commit is lost. NULL-proof; returns NULL. */
struct kvt_index_db *kvt_index_db_close(struct kvt_index_db *db);
