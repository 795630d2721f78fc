/* A small blocking client of the daemon, for tools and tests. It speaks in the same structs as the
 * server (daemon/base/api.h): fill op->req, call, read op->code, op->message and op->ans.
 *
 * A client is one connection; any number of threads may call on it at once, each with its own op.
 * A call takes at most until op->deadline_ns (0: config's deadline_ns from now). What an answer
 * points to lies in op->arena, which the caller gave. */
#pragma once

#include "daemon/base/api.h"

struct kvt_client;
struct kvt_session;

struct kvt_client_config {
    const char *socket_path; /* of the main or the admin socket */
    uint64_t deadline_ns;    /* of calls that name none; 0: 10 s */
};

/* Process-wide, once each: gRPC's own start and end. Block signals that you want to handle
 * yourself before init (gRPC starts threads). Never fork after init. */
void kvt_client_library_init(void);
void kvt_client_library_deinit(void);

/* Connects. -errno of the socket (ENOENT, ECONNREFUSED: no daemon there; EACCES), or 0. */
KVT_MUST_USE int kvt_client_open(struct kvt_client **ret_client,
                                 const struct kvt_client_config *config);
struct kvt_client *kvt_client_close(struct kvt_client *client); /* NULL-proof; returns NULL */

/* One request and its answer; the outcome is in op->code and op->message, never elsewhere.
 * op->progress (if set) is called from this thread. All kinds but ATTACH and DETACH. */
void kvt_client_call(struct kvt_client *client, struct kvt_op *op);
/* From another thread: makes a running call on @op end with CANCELLED soon. */
void kvt_client_cancel(struct kvt_client *client, struct kvt_op *op);

/* Hands a memfd to the daemon by its region socket; the token goes into Attach. -errno, or 0 and
 * the token; refusals of the daemon (not sealed, too small) are -EINVAL with text in @ret_why. */
KVT_MUST_USE int kvt_client_send_region(struct kvt_client *client, int memfd, uint64_t bytes,
                                        uint8_t ret_token[KVT_REGION_TOKEN_BYTES], char *ret_why,
                                        size_t why_bytes);

/* Opens the Attach stream; the session lives until detach, or until this process dies. Outcome as
 * in kvt_client_call; NULL when op->code is not OK. */
struct kvt_session *kvt_client_attach(struct kvt_client *client, struct kvt_op *op);
/* Next notice, waiting up to @timeout_ns: 1 and the notice, 0 none came, -EPIPE the stream ended.
 */
KVT_MUST_USE int kvt_session_next_notice(struct kvt_session *session, uint64_t timeout_ns,
                                         struct kvt_notice *ret_notice);
struct kvt_session *kvt_session_detach(struct kvt_session *session); /* NULL-proof */

/* Standard health check of @service ("" for the whole server): as in kvt_client_call;
 * op->ans.health.is_serving. */
void kvt_client_health(struct kvt_client *client, struct kvt_op *op, const char *service);
