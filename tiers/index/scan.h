/* Finds the slots in a device's data, for an index that has to be made anew. Used in the helper
 * process, offline tools and tests.
 *
 *   | slot | slot | torn slot  [ slot | slot ] rest | garbage | slot | ...
 *     one pass, front to back: reads of 4 MiB ahead of the look, no byte is read twice
 *
 * A slot may begin at every multiple of 4 KiB. It is one of ours when its header is whole and names
 * our store; it is reported when it also belongs to a namespace of the present epoch and its
 * payload has the right checksum. A whole header of our store inside another slot says that the
 * outer one was written over: no payload has our store id in it (slot.h). So the outer one is given
 * up there and then, and nothing has to be looked at again.
 *
 * What cannot be read is passed over and counted: a scan saves what can be saved. kvt_scan_run is
 * one call on one thread, with a second thread inside that reads ahead. */
#pragma once

#include <sys/types.h>

#include "tiers/index/index.h"
#include "tiers/slot.h"

struct kvt_scan_config {
    const char *path; /* of the data file or raw device; opened for reading */
    uint64_t data_offset_bytes, data_bytes;
    uint8_t store_id[KVT_STORE_ID_BYTES];
    const struct kvt_index_ns *namespaces; /* KVT_NAMESPACES_MAX of them */
    uint32_t unit_bytes;                   /* of the slab allocator; 0: 2 MiB */
    uint32_t read_bytes;                   /* a read; 0: 4 MiB. Multiple of 4 KiB, >= 64 KiB */
    /* Faults: called by the reading thread in place of pread. NULL: pread. */
    ssize_t (*pread)(void *ctx, int fd, void *data, size_t bytes, uint64_t offset);
    void *pread_ctx;
};

/* A slot that holds. Pointers are good during the call. */
struct kvt_scan_slot {
    uint32_t ns; /* number in the catalog */
    const struct kvt_slot_info *info;
    const uint32_t *tokens;            /* host order, info->block_tokens of them */
    uint64_t offset_bytes, slot_bytes; /* in the data area */
    uint64_t run_offset_bytes;         /* where the slab that it lies in begins */
};

struct kvt_scan_report {
    uint64_t read_bytes, skipped_bytes; /* skipped: could not be read */
    uint64_t slots;                     /* found and reported */
    uint64_t torn;   /* a whole header, but not its payload: written over, or cut by a crash */
    uint64_t others; /* whole headers of another epoch or namespace, or of a shape it has not */
    uint64_t bad_headers;                  /* ours at first sight, but not whole */
    uint64_t block_id_max, generation_max; /* in any whole header of our store */
};

struct kvt_scan_calls {
    /* Not 0: the scan ends, and that is what it returns. */
    int (*found)(void *ctx, const struct kvt_scan_slot *slot);
    int (*progress)(void *ctx, uint64_t done_bytes, uint64_t total_bytes); /* or NULL */
    void *ctx;
};

/* 0; -errno: the file cannot be opened, no memory, no thread; or what found() or progress()
 * returned. The report
 * is set whatever is returned. */
KVT_MUST_USE int kvt_scan_run(const struct kvt_scan_config *config,
                              const struct kvt_scan_calls *calls,
                              struct kvt_scan_report *ret_report);

/* Where the slab begins that a slot of this size at @offset_bytes lies in; UINT64_MAX: no slab has
 * a slot there. */
uint64_t kvt_scan_run_offset(uint64_t offset_bytes, uint64_t slot_bytes, uint64_t unit_bytes);
