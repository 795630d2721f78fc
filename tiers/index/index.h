/* The index of one L3 device: which blocks and copies its data holds, so that they outlive the
 * daemon. A row a block, a row a copy; docs/formats.md has the bytes.
 *
 *   engine --put--> [byte ring] --> thread --frames--> helper process: LMDB
 *   engine <-next-- [byte ring] <-- thread <--frames-- helper process
 *
 * LMDB trusts its map: flipped bits in it end a process. So the process that maps it is not the
 * daemon but a helper (kvtierd-index), one a device; when it dies the index is lost and the daemon
 * is not. At start the helper walks the whole index and sends what holds (ROW and COPY events, a
 * parent before its children, depth first), then LOADED; an index that is missing, damaged, of
 * another device or of another format is made anew from the slots by a scan first. From then on it
 * commits what is put, in batches.
 *
 * The promise: a COPY is committed only after the slot that it names is durable (the thread has the
 * data synchronised before each commit), what was put earlier is never committed later than what
 * was put after it, and COMMITTED says up to which put all is durable. A crash loses a tail of what
 * was put, nothing else. Rows are hints all the same: whoever reads a slot verifies it.
 *
 * put, next, room: engine-only, never block, never allocate. open, close: init-only. */
#pragma once

#include "daemon/base/def.h"
#include "daemon/base/doorbell.h"
#include "daemon/base/limits.h"

#define KVT_INDEX_ROOT_KEY_BYTES_MAX 1024u
#define KVT_INDEX_NONE UINT64_MAX

/* Names a block on disk. */
struct kvt_index_key {
    uint16_t ns;        /* number in the catalog */
    uint64_t epoch;     /* of the namespace when it was stored */
    uint32_t block_idx; /* blocks before it on its path */
    uint64_t block_id;  /* never reused */
};

enum kvt_index_put_kind {
    KVT_INDEX_PUT_ROW = 1, /* a block: its parent, tokens, extra key; of a first block the root */
    KVT_INDEX_PUT_COPY,    /* a component of it is in these slots; replaces what was said before */
    KVT_INDEX_PUT_DROP_COPY, /* that component is not there any more */
    KVT_INDEX_PUT_DROP_ROW,  /* the block is gone, with its copies */
    KVT_INDEX_PUT_DROP_OLD,  /* every row of key.ns whose epoch is below key.epoch */
    KVT_INDEX_PUT_SYNC,      /* commit now, do not wait for company */
    KVT_INDEX_PUT_CATALOG,   /* bytes for the device's catalog; opaque here, durable at COMMITTED */
};

/* One thing to put, or one thing that was loaded. Pointers are the caller's and only used during
 * the call; those of an event live until the next call of next. */
struct kvt_index_put {
    enum kvt_index_put_kind kind;
    struct kvt_index_key key;
    /* ROW */
    uint64_t parent_id;       /* 0: first block of its root */
    const uint8_t *extra_key; /* KVT_EXTRA_KEY_BYTES, or NULL */
    const uint8_t *root_key;  /* first blocks: the exact key of the root; else NULL */
    uint32_t root_key_bytes;
    uint32_t tokens_count;  /* of the block: the namespace's block_tokens */
    const uint32_t *tokens; /* host order */
    /* COPY, DROP_COPY */
    uint16_t component;
    uint16_t shards_count;
    uint64_t content;             /* generation in the slots' headers */
    uint64_t slot_bytes;          /* of each shard's slot: its size class */
    const uint64_t *slot_offsets; /* a shard each: into the data area of this device */
    const uint64_t *run_offsets;  /* a shard each: where the slab run of that slot begins */
    /* CATALOG */
    uint32_t catalog_number; /* which record */
    const void *catalog_data;
    uint32_t catalog_bytes;
};

enum kvt_index_event_kind {
    KVT_INDEX_EVENT_ROW = 1, /* load: `put` is a ROW */
    KVT_INDEX_EVENT_COPY,    /* load: `put` is a COPY of the last ROW */
    KVT_INDEX_EVENT_LOADED,  /* the load is over; from now on puts are taken */
    KVT_INDEX_EVENT_COMMITTED,
    KVT_INDEX_EVENT_FAILED, /* the index is lost: nothing more is committed, puts are swallowed.
                               The device goes out of service, the data is not touched */
};

struct kvt_index_loaded {
    bool was_rebuilt; /* by a scan of the slots */
    uint64_t rows, copies;
    uint64_t dropped; /* rows that did not hold: bad checksum, no parent, older epoch */
    uint64_t block_id_max, content_max; /* greatest seen, whether kept or dropped */
    uint64_t took_ns;
};

struct kvt_index_event {
    enum kvt_index_event_kind kind;
    struct kvt_index_put put;       /* ROW, COPY */
    struct kvt_index_loaded loaded; /* LOADED */
    uint64_t seq;                   /* COMMITTED: all puts up to this one are durable, ... */
    /* ... but for so many since the start (a full map, or a catalog that could not be written). */
    uint64_t refused;
    uint64_t refused_catalogs; /* of them records of the catalog */
    int error;                 /* FAILED: -errno, or a positive signal that ended the helper */
    char why[160];             /* FAILED, LOADED: for people; "" */
};

struct kvt_index;
#define KVT_INDEX_E_FULL 1 /* the ring has no room for it: nothing was put */

struct kvt_index_ops { /* tests fill one with a fake */
    int (*put)(struct kvt_index *index, const struct kvt_index_put *put, uint64_t *ret_seq);
    bool (*next)(struct kvt_index *index, struct kvt_index_event *ret_event);
    uint64_t (*room_bytes)(const struct kvt_index *index);
    void (*close)(struct kvt_index *index);
};

/* Written by the index's thread with relaxed atomics; read by anyone. */
struct kvt_index_counters {
    _Atomic uint64_t commits, rows_put, copies_put, drops, refused;
    _Atomic uint64_t used_bytes, capacity_bytes;            /* of the map */
    _Atomic uint64_t loaded_rows, load_total_rows, load_ns; /* progress of a load */
    _Atomic uint64_t scan_bytes, scan_total_bytes;          /* progress of a rebuild */
    _Atomic uint32_t state;                                 /* enum kvt_index_state */
};
enum kvt_index_state {
    KVT_INDEX_LOADING = 0,
    KVT_INDEX_SCANNING = 1, /* rebuilding from the slots, loads after */
    KVT_INDEX_READY = 2,
    KVT_INDEX_LOST = 3,
};

struct kvt_index { /* first member of the real one and of fakes */
    const struct kvt_index_ops *ops;
    struct kvt_index_counters counters;
};

/* 0 and the put's number in *ret_seq (may be NULL), rising from 1, or KVT_INDEX_E_FULL. Before
 * LOADED it is E_FULL, but for CATALOG. After FAILED it is 0, and nothing happens. */
static inline KVT_MUST_USE int kvt_index_put(struct kvt_index *index,
                                             const struct kvt_index_put *put, uint64_t *ret_seq)
{
    return index->ops->put(index, put, ret_seq);
}

/* The next event, oldest first; false: none now. The doorbell rings when there is one again. */
static inline bool kvt_index_next(struct kvt_index *index, struct kvt_index_event *ret_event)
{
    return index->ops->next(index, ret_event);
}

/* Puts of at most this many bytes in all are taken now (kvt_index_put_bytes says how many one
 * needs). */
static inline uint64_t kvt_index_room_bytes(const struct kvt_index *index)
{
    return index->ops->room_bytes(index);
}
uint64_t kvt_index_put_bytes(const struct kvt_index_put *put);

/* Commits what was put, ends the helper and the thread. A data_sync or catalog_write that hangs is
 * not waited for: it may come back later, and ctx with what it leads to must outlive that. NULL-
 * proof; returns NULL. */
static inline struct kvt_index *kvt_index_close(struct kvt_index *index)
{
    if (index != NULL)
        index->ops->close(index);
    return NULL;
}

struct kvt_index_ns { /* what a scan needs to know of a namespace: slots of others are not ours */
    bool is_used;
    uint8_t fingerprint[KVT_FINGERPRINT_BYTES];
    uint64_t epoch; /* the present one; older rows and slots are dropped */
    uint32_t block_tokens;
    uint32_t components_count;
    uint16_t shards[KVT_COMPONENTS_MAX]; /* of a copy of each component: slots that make it whole */
};

struct kvt_index_config {
    const char *path;        /* of the LMDB file; made 0600 */
    uint64_t bytes;          /* hard bound of the map; preallocated */
    const char *helper_path; /* the kvtierd-index program */
    uint8_t store_id[16], device_uuid[16];
    bool is_rebuild_wanted; /* scan, whatever the index looks like */
    /* One of several devices: a block whose parent has no row here may hang below a block of
     * another device. Such ROWs come last, the least deep first, each with what is below it. */
    bool has_siblings;
    /* What a scan reads. */
    const char *data_path;
    uint64_t data_offset_bytes, data_bytes;
    struct kvt_index_ns namespaces[KVT_NAMESPACES_MAX];
    /* Called by the index's thread; both may block. 0 or -errno. */
    int (*data_sync)(void *ctx); /* all slots that were written before are durable after it */
    int (*catalog_write)(void *ctx, uint32_t number, const void *data, uint32_t bytes);
    void *ctx;
    uint64_t commit_ns; /* longest wait for company; 0: 100 ms */
    uint64_t close_ns;  /* longest wait of close for the last commit; 0: 10 s */
    uint64_t hang_ns;   /* a helper that does not answer a commit for so long is lost; 0: 120 s */
    struct kvt_doorbell *doorbell;
};

/* -errno (no helper program, no memory), or 0 and the load is under way. A damaged index is not an
 * error: it is an event. */
KVT_MUST_USE int kvt_index_open(struct kvt_index **ret_index,
                                const struct kvt_index_config *config);
