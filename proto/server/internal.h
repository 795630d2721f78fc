/* Inside of the server: who owns what.
 *
 *   accept thread   listening sockets, live connections (accept.c), region socket (region.c)
 *   rpc/N threads   one completion queue each: calls arrive, messages are decoded, ops submitted,
 *                   sends complete. All events of one call come to one rpc thread, and only that
 *                   thread gives the call's op back to the pool: so it may look at the op whenever
 *                   the call has one.
 *   reply thread    encodes answers and starts sends (with is_reply_inline the service's thread
 *                   does, but for Stats, Dump and payload over 64 KiB)
 *   any thread      op->done, op->progress, kvt_server_notify
 *
 * A call (call.c) is one RPC in progress. What the service's side and the rpc thread both touch is
 * under call->mutex; at most one send is outstanding, the rest waits in the call as state (is_done,
 * newest progress, bounded notices), so that a slow reader costs one op or one session and no
 * more. References: one for each outstanding batch, one while the service has the op (or the
 * session), one while on the reply ring.
 *
 * Locks, in the order in which they may nest: health.mutex, call.mutex, then one of the leaves
 * (ops.mutex, conns.mutex, regions.mutex, live.mutex). No service function is called under one. */
#pragma once

#include <grpc/grpc.h>
#include <pthread.h>
#include <stdatomic.h>

#include "daemon/base/clock.h"
#include "daemon/base/doorbell.h"
#include "daemon/base/list.h"
#include "daemon/base/ring.h"
#include "daemon/base/tsan.h"
#include "proto/codec/codec.h"
#include "proto/server/server.h"

#define KVT_SERVER_THREADS_MAX 16u
#define KVT_SERVER_POSTED 8u        /* requests posted per method and completion queue */
#define KVT_SERVER_WATCHERS_MAX 64u /* health Watch streams */
#define KVT_SERVER_NOTICES_MAX 256u /* waiting in one session; all kinds */
#define KVT_SERVER_NOTICES_SOFT 64u /* from here on only what a client must hear is kept */
#define KVT_SERVER_REGIONS_MAX 256u /* tokens not yet used by an Attach */
#define KVT_SERVER_REGIONS_UID_MAX 128u
#define KVT_SERVER_REGION_NS (30 * KVT_NS_PER_S)
#define KVT_SERVER_WARM_OPS 16u /* ops that keep a large arena between requests */

enum kvt_method_type {
    KVT_METHOD_UNARY,
    KVT_METHOD_PROMOTE,
    KVT_METHOD_ATTACH,
    KVT_METHOD_HEALTH_CHECK,
    KVT_METHOD_HEALTH_WATCH,
    KVT_METHOD_UNKNOWN,   /* everything that is not registered */
    KVT_METHOD_ECHO,      /* benchmarks only: received, not decoded, answered at once ... */
    KVT_METHOD_ECHO_RING, /* ... or by the service's thread and the way replies take */
};

struct kvt_method {
    const char *path;
    enum kvt_method_type type;
    enum kvt_op_kind kind;
    bool is_admin;
};
#define KVT_METHODS 18u
extern const struct kvt_method kvt_methods[KVT_METHODS];

struct kvt_peer {
    uint64_t uid, pid;
    uint64_t conn_id; /* never used again, other than the number of its descriptor */
    uint32_t conn_fd; /* as gRPC has it */
    bool is_admin;
};

/* One op of the pool. */
struct kvt_pooled_op {
    struct kvt_op op;
    struct kvt_arena arena;
    struct kvt_call *call;
    struct kvt_pooled_op *next_free;
    struct kvt_list link; /* in its rpc thread's list of running ops; rpc-thread-only */
    bool is_warm;
};

struct kvt_rpc {
    struct kvt_server *server;
    grpc_completion_queue *cq;
    pthread_t thread;
    bool is_running;
    struct kvt_arena flat;   /* a message that came in several pieces */
    struct kvt_list running; /* kvt_pooled_op.link */
    uint64_t tick_ns;
};

enum kvt_tag_kind { KVT_TAG_REQUEST, KVT_TAG_RECEIVE, KVT_TAG_CLOSE, KVT_TAG_SEND, KVT_TAGS };
struct kvt_tag {
    struct kvt_call *call; /* NULL: the server's shutdown */
    enum kvt_tag_kind kind;
};

#define KVT_CALL_MAGIC 0x6b76434cu
struct kvt_call {
    uint32_t magic;
    atomic_uint refs;
    struct kvt_server *server;
    struct kvt_rpc *rpc;
    const struct kvt_method *method;
    struct kvt_tag tags[KVT_TAGS];
    /* what gRPC writes to */
    grpc_call *grpc;
    gpr_timespec deadline;
    grpc_metadata_array metadata;
    grpc_call_details details;
    grpc_byte_buffer *received;
    int close_cancelled;
    /* rpc thread only */
    struct kvt_peer peer;
    uint64_t deadline_ns;
    struct kvt_pooled_op *pooled;
    bool is_submitted;
    bool is_cancelled; /* CLOSE said so */
    /* shared */
    atomic_bool is_queued; /* on the reply ring */
    atomic_bool is_done;   /* the service gave the op back */
    pthread_mutex_t mutex;
    bool is_sending;
    bool is_metadata_sent;
    bool is_final_sent;
    bool is_stream_ended; /* Attach, Watch: by the client or the transport */
    bool has_progress;
    struct kvt_api_progress progress; /* the newest one not sent */
    grpc_byte_buffer *sending;
    struct kvt_session_sink *sink; /* Attach */
    int watch_sent;                /* Watch: status last sent, -1: none */
    bool is_name_unknown;          /* health: no such service */
    struct kvt_list watch_link;
};

/* An Attach stream seen from the service. Lives as long as its call; under call->mutex. */
#define KVT_SINK_MAGIC 0x6b76534bu
struct kvt_session_sink {
    uint32_t magic;
    struct kvt_call *call;
    bool is_attached; /* the service made a session: it must see one DETACH */
    bool is_attached_sent;
    bool is_detach_submitted;
    bool is_detached;
    enum kvt_code end_code;
    const char *end_message;
    struct kvt_op detach; /* preallocated: ending a session cannot fail */
    struct kvt_arena detach_arena;
    struct kvt_notice notices[KVT_SERVER_NOTICES_MAX];
    uint32_t notices_first, notices_count;
};

struct kvt_region_token {
    uint8_t token[KVT_REGION_TOKEN_BYTES];
    void *mapping; /* NULL: a free entry */
    uint64_t bytes, uid, expires_ns;
};

struct kvt_conn; /* accept.c */

struct kvt_server {
    struct kvt_server_config config;
    char *paths[3]; /* main, admin, regions: own copies; NULL: none */
    int lock_fds[2];
    int listen_fds[3];
    bool is_bound[3];

    grpc_server *grpc;
    grpc_server_credentials *creds;
    void *registered[KVT_METHODS];
    struct kvt_rpc rpcs[KVT_SERVER_THREADS_MAX];
    struct kvt_tag shutdown_tag;

    struct {
        pthread_mutex_t mutex;
        struct kvt_pooled_op *all;
        struct kvt_pooled_op *free_warm, *free_cold;
    } ops;

    struct {
        struct kvt_ring ring;
        struct kvt_doorbell bell;
        pthread_t thread;
        bool is_running;
        atomic_bool is_stopping;
    } reply;

    struct {
        pthread_t thread;
        bool is_running;
        atomic_bool is_stopping;
        int epoll_fd, wake_fd;
    } accept;
    struct {
        pthread_mutex_t mutex;
        struct kvt_conn **by_fd; /* by the number that gRPC has */
        uint32_t fds_count, fd_first, fd_next;
        uint64_t id_next; /* accept thread only */
        struct kvt_list list;
        uint32_t count;
        struct kvt_list regions; /* accept thread only */
        uint32_t regions_count;
    } conns;
    struct {
        pthread_mutex_t mutex;
        struct kvt_region_token tokens[KVT_SERVER_REGIONS_MAX];
    } regions;

    struct {
        pthread_mutex_t mutex;
        struct kvt_list watchers;
        uint32_t watchers_count;
        struct kvt_op op; /* the poll that serves all watchers */
        struct kvt_arena arena;
        bool is_polling;
        atomic_int status; /* enum kvt_health_status; -1: not known yet */
    } health;

    struct {
        pthread_mutex_t mutex;
        pthread_cond_t cond;
        uint64_t calls; /* that arrived and are not freed yet */
        uint64_t ops;   /* taken from the pool */
        uint32_t sessions;
        bool is_shut_down; /* gRPC's own */
    } live;
    bool is_grpc_started, is_stopped;
    bool has_echo; /* see kvt_server_open_bench */
    struct {
        atomic_ullong connections, connections_refused, ops_refused, requests, bad_requests,
            sessions;
    } stats;
};

/* server.c */
/* As kvt_server_open, with the two echo methods that tests/bench measures against. */
KVT_MUST_USE int kvt_server_open_bench(struct kvt_server **ret_server,
                                       const struct kvt_server_config *config, int *ret_pid);
bool kvt_server_has_method(const struct kvt_server *server, uint32_t method_idx);

/* call.c */
KVT_MUST_USE int kvt_call_post(struct kvt_rpc *rpc, uint32_t method_idx);
void kvt_call_handle(struct kvt_tag *tag, bool is_ok);
void kvt_call_ref(struct kvt_call *call);
void kvt_call_unref(struct kvt_call *call);
/* There may be something to send: now, or by the reply thread. Any thread, no lock held but
 * health.mutex. */
void kvt_call_wake(struct kvt_call *call);
/* Cancels calls that are overdue while gRPC, not the service, has them. rpc thread. */
void kvt_call_tick(struct kvt_rpc *rpc, uint64_t now_ns);

/* send.c */
void kvt_call_pump(struct kvt_call *call);
/* Ends @call, which has no op in the service. */
void kvt_call_fail(struct kvt_call *call, enum kvt_code code, const char *message);
/* call->mutex held; for the pumps of session.c and health.c. */
void kvt_call_send_bytes(struct kvt_call *call, const uint8_t *at, size_t bytes);
void kvt_call_send_message(struct kvt_call *call, const struct kvt_codec_message *message);
void kvt_call_send_final(struct kvt_call *call, const struct kvt_codec_message *message,
                         enum kvt_code code, const char *text);

/* session.c */
/* NULL: no memory, or too many. */
struct kvt_session_sink *kvt_sink_new(struct kvt_call *call);
struct kvt_session_sink *kvt_sink_free(struct kvt_session_sink *sink);
void kvt_sink_pump(struct kvt_call *call); /* takes call->mutex */
void kvt_sink_end(struct kvt_call *call, enum kvt_code code, const char *message);
/* Fills peer, sink and mappings of a decoded Attach: 0, or KVT_CODEC_E_BAD with the op failed. */
KVT_MUST_USE int kvt_sink_prepare(struct kvt_call *call, struct kvt_op *op);
void kvt_sink_unprepare(struct kvt_call *call, struct kvt_op *op);

/* health.c */
KVT_MUST_USE int kvt_health_init(struct kvt_server *server);
void kvt_health_deinit(struct kvt_server *server);
bool kvt_health_is_known(const char *name);
KVT_MUST_USE bool kvt_health_watch(struct kvt_call *call); /* false: too many */
void kvt_health_unwatch(struct kvt_call *call);
void kvt_health_poll(struct kvt_server *server); /* if somebody watches */
void kvt_health_pump(struct kvt_call *call);     /* call->mutex held */

/* ops.c */
KVT_MUST_USE int kvt_ops_init(struct kvt_server *server);
void kvt_ops_deinit(struct kvt_server *server);
struct kvt_pooled_op *kvt_ops_take(struct kvt_server *server);
void kvt_ops_give(struct kvt_server *server, struct kvt_pooled_op *pooled);
void kvt_live_add(struct kvt_server *server, int calls, int ops, int sessions);

/* reply.c */
KVT_MUST_USE int kvt_reply_start(struct kvt_server *server);
void kvt_reply_stop(struct kvt_server *server);
void kvt_reply_queue(struct kvt_server *server, struct kvt_call *call);

/* listen.c */
/* -errno, KVT_SERVER_E_LIVE, or 0. */
KVT_MUST_USE int kvt_listen_all(struct kvt_server *server, int *ret_pid);
void kvt_listen_close(struct kvt_server *server); /* unlinks what it bound; idempotent */

/* accept.c */
KVT_MUST_USE int kvt_accept_start(struct kvt_server *server);
/* Connections that gRPC has stay known until deinit. Both idempotent. */
void kvt_accept_stop(struct kvt_server *server);
void kvt_accept_deinit(struct kvt_server *server);
KVT_MUST_USE bool kvt_accept_peer(struct kvt_server *server, grpc_call *call,
                                  struct kvt_peer *ret_peer);
/* Counts a request in progress of that connection. False: it has as many as it may. */
KVT_MUST_USE bool kvt_accept_begin_op(struct kvt_server *server, const struct kvt_peer *peer);
void kvt_accept_end_op(struct kvt_server *server, const struct kvt_peer *peer);

/* region.c: the side socket. Accept thread only, but for claim. */
struct kvt_region_conn;
struct kvt_region_conn *kvt_region_accept(struct kvt_server *server, int fd, uint64_t uid);
/* False: the connection is over. */
KVT_MUST_USE bool kvt_region_serve(struct kvt_server *server, struct kvt_region_conn *conn);
struct kvt_region_conn *kvt_region_conn_free(struct kvt_server *server,
                                             struct kvt_region_conn *conn);
void kvt_region_tick(struct kvt_server *server, uint64_t now_ns);
void kvt_region_close_all(struct kvt_server *server);
/* Single use. NULL: unknown, expired, other uid, or other size. */
void *kvt_region_claim(struct kvt_server *server, const uint8_t token[KVT_REGION_TOKEN_BYTES],
                       uint64_t uid, uint64_t bytes);
