/* Looks at every page of an LMDB file (data format 1, of LMDB 0.9) before LMDB does.
 *
 * LMDB trusts its map. A flipped bit in a page number sends a reader anywhere; one in the list of
 * free pages has a writer overwrite pages that are in use, days later. The audit reads the file
 * with pread, believes nothing, and says yes only when
 *   - both meta pages are such pages, and their numbers of transactions are neighbours,
 *   - both trees (rows, free pages) have the depth, pages and entries that the meta page says,
 * every node lies within its page and overlaps none, and all keys are in order and where a search
 *     would look for them,
 *   - every page is either in use once or free once.
 * What the values say is not looked at: rows have checksums.
 *
 * Reads the used part of the file once. One thread. */
#pragma once

#include "tiers/index/lmdb_calls.h"

#define KVT_INDEX_AUDIT_E_BAD 1

struct kvt_index_audit {
    uint64_t page_bytes, pages_count; /* of the used part */
    uint64_t entries;                 /* of the tree of rows */
    uint64_t txn_id;
};

/* 0, E_BAD with @why filled, or -errno (no memory). */
KVT_MUST_USE int kvt_index_audit(const struct kvt_index_lmdb *io, int fd, uint64_t file_bytes,
                                 struct kvt_index_audit *ret_audit, char *why, size_t why_bytes);
