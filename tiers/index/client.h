/* The daemon's side of one index: shared by the functions of the engine (client.c) and the index's
 * thread (pump.c), and used by nobody else but tests.
 *
 *   engine --put--> [puts] --> batch --> socket --> helper
 *   engine <-next-- [events] <--------- socket <-- helper
 *
 * Puts stay in their ring until a batch is due: a SYNC, a CATALOG, enough bytes, or commit_ns after
 * the first. So the thread is woken once a batch, not once a put. A batch is what the ring holds
 * when it begins; the data is synchronised before the first of it is sent, because the helper may
 * commit on its own; then COMMIT is sent and COMMITTED awaited. A CATALOG is written by the thread
 * itself, after all before it is committed, and is durable by a sync after it.
 *
 * A call of the owner's (data_sync, catalog_write) may hang with its device, and nothing ends it.
 * Close does not wait for that: it leaves the client to its thread, which frees it when the call
 * comes back, and touches nothing of the owner's from then on.
 *
 * During the load events go from the socket into their ring as they are. Where that has no room the
 * thread waits until it is half empty, so the socket fills and the helper waits too. */
#pragma once

#include <pthread.h>

#include "tiers/index/byte_ring.h"
#include "tiers/index/index.h"
#include "tiers/index/process.h"
#include "tiers/index/wire.h"

#define KVT_INDEX_PUT_RING_BYTES (4u << 20)
#define KVT_INDEX_EVENT_RING_BYTES (1u << 20)
#define KVT_INDEX_BATCH_BYTES (1u << 20) /* so much does not wait for company */
#define KVT_INDEX_SOCKET_BYTES (256u << 10)
#define KVT_INDEX_COMMIT_NS (100 * KVT_NS_PER_MS)
#define KVT_INDEX_CLOSE_NS (10 * KVT_NS_PER_S) /* longest wait for the last commit */
#define KVT_INDEX_HANG_NS (120 * KVT_NS_PER_S) /* longest wait for a helper's answer */
#define KVT_INDEX_GRACE_NS (2 * KVT_NS_PER_S)  /* for a helper to end when its socket did */

static_assert(KVT_INDEX_EVENT_RING_BYTES / 2 > KVT_WIRE_BYTES_MAX, "half is room for a frame");
static_assert(KVT_INDEX_SOCKET_BYTES > 2 * KVT_WIRE_BYTES_MAX, "a buffer holds a frame");

enum kvt_index_owner {
    KVT_INDEX_RUNNING = 0, /* both ends share the client */
    KVT_INDEX_IN_CALL,     /* the same, and the thread is in a call of the owner's */
    KVT_INDEX_LEFT,        /* it is the thread's alone */
};

struct kvt_index_client {
    struct kvt_index base;          /* first: an index is its client */
    struct kvt_index_config config; /* the paths are copies */
    struct kvt_byte_ring puts, events;
    struct kvt_doorbell bell; /* wakes the thread */
    atomic_bool is_closing;   /* the engine closes */
    atomic_bool is_urgent;    /* a put that does not wait for company */
    atomic_bool is_lost;      /* nothing is taken any more */
    atomic_bool is_over;      /* the thread ends */
    atomic_int owner;         /* enum kvt_index_owner */
    _Atomic pid_t helper_pid; /* for tests; 0: none now */
    pthread_t thread;

    /* The engine's. */
    uint64_t seq;
    bool is_ready; /* LOADED was told */
    struct kvt_wire_message event;
    _Alignas(8) uint8_t put_frame[KVT_WIRE_BYTES_MAX];
    _Alignas(8) uint8_t event_frame[KVT_WIRE_BYTES_MAX];

    /* The thread's. */
    struct kvt_process process;
    uint64_t opened_ns, batch_due_ns, close_by_ns;
    uint64_t answer_by_ns;                         /* of the helper, while it is waited for */
    uint64_t batch_seq, committed_seq, sent_count; /* of this batch: frames that want a COMMIT */
    uint64_t refused_catalogs, refused_puts;
    bool is_data_synced, is_engine_due, has_rows;
    int error;
    char why[KVT_WIRE_WHY_BYTES];
    struct kvt_wire_message message; /* the last that was received, and its bytes */
    const uint8_t *frame;
    uint32_t frame_bytes;
    uint8_t *in, *out; /* KVT_INDEX_SOCKET_BYTES each */
    uint64_t in_at, in_end, out_end;
    _Alignas(8) uint8_t work_frame[KVT_WIRE_BYTES_MAX];
};

void kvt_index_client_free(struct kvt_index_client *client); /* NULL-proof */

/* The thread: load, batches until it is closed or lost, the end of the helper. */
void *kvt_index_pump(void *client);
