/* Makes a lost index anew from what a device's slots say of themselves: scan, then for each
 * component of each block the newest content that is whole (all its shards are there), then the
 * rows and copies of all blocks that lead to one, in the order of their ids.
 *
 *   mark -> empty index -> scan -> choose -> rows and copies -> commit -> unmark
 *
 * The mark is a file beside the index. Whoever finds it at a start knows that a rebuild was cut
 * short and what the index holds is not all: it is made anew again.
 *
 * What is chosen fits one slab allocator: a slot that was given back and not yet written over is
 * whole too, but the units that it lies in may be another slab's by now. Of those that exclude each
 * other the newer content wins. Blocks that were dropped on purpose may come back, with the bytes
 * that they had; blocks of an older epoch do not. A block whose parents are not on this device is
 * left out: nothing leads to it.
 *
 * Used in the helper process, offline tools and tests; one call on one thread. Memory is bounded:
 * blocks that are found when it is used up are left out. */
#pragma once

#include "tiers/index/db.h"
#include "tiers/index/scan.h"

struct kvt_index_rebuild_config {
    const struct kvt_index_db_config *db;
    const struct kvt_scan_config *scan; /* its namespaces are those of the database's */
    uint64_t memory_bytes;              /* 0: as below */
    /* Of the scan; or NULL. Not 0: the rebuild ends, and that is what it returns. */
    int (*progress)(void *ctx, uint64_t done_bytes, uint64_t total_bytes);
    void *ctx;
};

struct kvt_index_rebuild_report {
    struct kvt_scan_report scan; /* block_id_max, generation_max: all ids must start above */
    uint64_t rows, copies;       /* put */
    uint64_t partial;            /* contents that lack a shard */
    uint64_t superseded;         /* contents older than the one chosen */
    uint64_t misfits;            /* contents whose slots are in the way of newer ones */
    uint64_t orphans;            /* blocks that no path from a root leads to */
    uint64_t odd;                /* slots that contradict another one of the same block */
    uint64_t left_out;           /* slots for which there was no memory; rows, copies: no room */
};

/* True: a rebuild of the index at @path was begun and did not end. */
bool kvt_index_rebuild_is_due(const char *path);

/* As many as the map has, but of the machine's at most a quarter: what the system would never give
 * is refused at once, and with it the rebuild. At least 64 MiB. */
uint64_t kvt_index_rebuild_memory_bytes(uint64_t index_bytes, uint64_t ram_bytes);

/* 0: *ret_db is open, filled, committed, and not walked. -errno, or what progress() returned:
 * nothing is open; the index is marked, or as it was. Without a namespace, or with no data, there
 * is nothing to scan. The report is set whatever is returned, and so is @why ("" when there is
 * nothing to say). */
KVT_MUST_USE int kvt_index_rebuild(struct kvt_index_db **ret_db,
                                   const struct kvt_index_rebuild_config *config,
                                   struct kvt_index_rebuild_report *ret_report,
                                   char why[KVT_INDEX_DB_WHY_BYTES]);
