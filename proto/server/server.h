/* The gRPC server: accepts on two unix sockets of its own (SO_PEERCRED checked before gRPC sees a
 * byte), decodes into pooled ops, bounds everything, and hands ops to a service
 * (daemon/base/api.h).
 *
 *   main socket      engines: OpenNamespace, Attach, Lookup, Promote, Reserve, Demote, Quiesce,
 *                    Release, Stats, health
 *   admin socket     all of those and Evict, Reset, Dump
 *   region socket    <main>.regions: a memfd comes by SCM_RIGHTS, a token for Attach goes back
 *
 * open, stop, close: main thread. The service's `done` may be called from any one thread at a time
 * per op; replies leave from that thread or through a reply thread of the server (is_reply_inline;
 * measured in docs/decisions/0001-replies.md). */
#pragma once

#include "daemon/base/api.h"

struct kvt_server;

struct kvt_server_config {
    const char *socket_path; /* of the main socket; ".lock" and ".regions" are put beside it */
    const char *admin_socket_path; /* NULL: no admin verbs */
    uint32_t socket_mode;          /* of the main and the region socket: 0660 */
    uint32_t admin_socket_mode;    /* 0600 */
    uint32_t threads;              /* completion queues, one thread each */
    uint32_t ops_max;              /* requests in progress; more: RESOURCE_EXHAUSTED */
    /* Of ops_max, what one connection may hold; more: RESOURCE_EXHAUSTED. 0: max(8, ops_max / 2),
     * so that one client which does not read its answers leaves room for the others. */
    uint32_t ops_per_connection_max;
    uint32_t connections_max;
    uint32_t streams_max;     /* a connection */
    uint64_t deadline_ns_max; /* a request without a deadline, or with a longer one, gets this */
    uint64_t region_ns;       /* how long a memfd waits for its Attach; 0: 30 s */
    bool is_reply_inline;     /* small replies from the service's thread, not the reply thread */
    uint64_t boot_id;
    const struct kvt_service *service;
};

enum {
    KVT_SERVER_E_LIVE = 1, /* a live daemon holds the socket; ret_pid says which, 0 if unknown */
};

/* Binds, listens and serves. -errno (EACCES, ENOENT of the directory, …), KVT_SERVER_E_LIVE, 0. */
KVT_MUST_USE int kvt_server_open(struct kvt_server **ret_server,
                                 const struct kvt_server_config *config, int *ret_pid);
/* For the service to push notices with. */
void kvt_server_notify(struct kvt_session_sink *sink, const struct kvt_notice *notice);
/* Stops accepting, lets requests end for up to @grace_ns, cancels the rest, waits until the service
 * gave every op back. The service must still be running. */
void kvt_server_stop(struct kvt_server *server, uint64_t grace_ns);
/* After stop. NULL-proof; returns NULL. Unlinks the sockets. */
struct kvt_server *kvt_server_close(struct kvt_server *server);

struct kvt_server_stats {
    uint64_t connections, connections_refused, ops_refused, requests, bad_requests, sessions;
};
void kvt_server_stats(const struct kvt_server *server, struct kvt_server_stats *ret_stats);
