/* Attach: a stream that is a session. The service sees ATTACH, then, however the stream ends, one
 * DETACH; the stream's status goes out after that, so that a client which reads it knows that
 * everything of the session is gone.
 *
 *   ATTACH in the service -> attached -> notices ... -> ended -> DETACH in the service -> status
 *
 * A client that ends early is attached and detached all the same. The service's reference on the
 * call (and so on the sink) begins with ATTACH and ends when ATTACH failed or DETACH is done. */
#include <string.h>

#include "daemon/base/alloc.h"
#include "proto/server/internal.h"

#define DETACH_ARENA_BYTES (64 * KVT_KIB)

struct kvt_session_sink *kvt_sink_new(struct kvt_call *call)
{
    struct kvt_server *server = call->server;
    struct kvt_session_sink *sink;
    bool is_full;

    pthread_mutex_lock(&server->live.mutex);
    is_full = server->live.sessions >= KVT_SESSIONS_MAX;
    server->live.sessions += !is_full;
    pthread_mutex_unlock(&server->live.mutex);
    if (is_full)
        return NULL;
    sink = kvt_alloc_zeroed(1, sizeof(*sink));
    if (sink == NULL || kvt_arena_init(&sink->detach_arena, DETACH_ARENA_BYTES, 0) < 0) {
        kvt_free(sink);
        kvt_live_add(server, 0, 0, -1);
        return NULL;
    }
    sink->magic = KVT_SINK_MAGIC;
    sink->call = call;
    sink->end_message = "";
    return sink;
}

struct kvt_session_sink *kvt_sink_free(struct kvt_session_sink *sink)
{
    if (sink == NULL)
        return NULL;
    KVT_ASSERT(sink->magic == KVT_SINK_MAGIC);
    KVT_ASSERT(!sink->is_attached || sink->is_detached);
    kvt_live_add(sink->call->server, 0, 0, -1);
    kvt_arena_deinit(&sink->detach_arena);
    sink->magic = 0;
    kvt_free(sink);
    return NULL;
}

/* ---- ATTACH -----------------------------------------------------------------------------------
 */

void kvt_sink_unprepare(struct kvt_call *call, struct kvt_op *op)
{
    const struct kvt_service *service = call->server->config.service;
    struct kvt_req_attach *req = &op->req.attach;

    for (uint32_t i = 0; i < req->regions_count; i++) {
        if (req->regions[i].mapping != NULL)
            service->region_close(service->ctx, req->regions[i].mapping);
        req->regions[i].mapping = NULL;
    }
}

int kvt_sink_prepare(struct kvt_call *call, struct kvt_op *op)
{
    struct kvt_req_attach *req = &op->req.attach;

    req->peer_uid = call->peer.uid;
    req->peer_pid = call->peer.pid;
    req->sink = call->sink;
    for (uint32_t i = 0; i < req->regions_count; i++) {
        struct kvt_api_region *region = &req->regions[i];

        if (region->kind != KVT_REGION_MEMFD)
            continue;
        region->mapping =
            kvt_region_claim(call->server, region->token, call->peer.uid, region->bytes);
        if (region->mapping != NULL)
            continue;
        kvt_sink_unprepare(call, op);
        kvt_op_fail(op, KVT_CODE_NOT_FOUND,
                    "regions[%u].memfd_token: unknown, used, expired (30 s), of another user or of "
                    "another size: send the descriptor again",
                    i);
        return KVT_CODEC_E_BAD;
    }
    return 0;
}

/* ---- DETACH -----------------------------------------------------------------------------------
 */

static void detach_done(struct kvt_op *op)
{
    struct kvt_session_sink *sink = op->server;
    struct kvt_call *call = sink->call;

    KVT_ASSERT(sink->magic == KVT_SINK_MAGIC);
    pthread_mutex_lock(&call->mutex);
    sink->is_detached = true;
    pthread_mutex_unlock(&call->mutex);
    kvt_call_wake(call);
    kvt_call_unref(call); /* the service's */
}

static void submit_detach(struct kvt_call *call, const struct kvt_handle *session)
{
    const struct kvt_service *service = call->server->config.service;
    struct kvt_op *op = &call->sink->detach;
    int r;

    op->kind = KVT_OP_DETACH;
    op->is_admin = call->peer.is_admin;
    op->peer_uid = call->peer.uid;
    op->deadline_ns = kvt_time_add(kvt_clock_mono_ns(), call->server->config.deadline_ns_max);
    op->arena = &call->sink->detach_arena;
    op->req.detach.session = *session;
    op->done = detach_done;
    op->server = call->sink;
    kvt_call_ref(call);
    r = service->submit(service->ctx, op);
    KVT_ASSERT(r == 0); /* the service never refuses DETACH */
}

/* ---- the stream -------------------------------------------------------------------------------
 */

void kvt_sink_end(struct kvt_call *call, enum kvt_code code, const char *message)
{
    pthread_mutex_lock(&call->mutex);
    if (!call->is_stream_ended) {
        call->is_stream_ended = true;
        call->sink->end_code = code;
        call->sink->end_message = message;
    }
    pthread_mutex_unlock(&call->mutex);
    kvt_call_wake(call);
}

static void send_notice(struct kvt_call *call)
{
    struct kvt_session_sink *sink = call->sink;
    uint8_t at[KVT_CODEC_NOTICE_BYTES_MAX];
    size_t bytes = kvt_codec_write_notice(&sink->notices[sink->notices_first], at);

    sink->notices_first = (sink->notices_first + 1) % KVT_SERVER_NOTICES_MAX;
    sink->notices_count--;
    kvt_call_send_bytes(call, at, bytes);
}

/* The service answered ATTACH with a session: note it, and tell the client. */
static void on_attached(struct kvt_call *call)
{
    struct kvt_session_sink *sink = call->sink;
    struct kvt_op *op = &call->pooled->op;
    struct kvt_codec_message message;

    if (!sink->is_attached) {
        sink->is_attached = true;
        sink->detach.req.detach.session = op->ans.attach.session;
        atomic_fetch_add(&call->server->stats.sessions, 1);
    }
    if (call->is_stream_ended)
        return;
    if (kvt_codec_encode_answer(op, &message) == 0) {
        sink->is_attached_sent = true;
        kvt_call_send_message(call, &message);
    } else {
        call->is_stream_ended = true;
        sink->end_code = KVT_CODE_RESOURCE_EXHAUSTED;
        sink->end_message = "no room for the answer";
    }
}

void kvt_sink_pump(struct kvt_call *call)
{
    struct kvt_session_sink *sink = call->sink;
    struct kvt_handle session = KVT_HANDLE_NONE;
    bool wants_detach = false;

    /* An Attach that was refused before it had a sink or an answer was ended by kvt_call_fail. */
    pthread_mutex_lock(&call->mutex);
    if (call->is_sending || call->is_final_sent ||
        !atomic_load_explicit(&call->is_done, memory_order_acquire)) {
        pthread_mutex_unlock(&call->mutex);
        return;
    }
    if (!sink->is_attached && call->pooled->op.code != KVT_CODE_OK)
        kvt_call_send_final(call, NULL, call->pooled->op.code, call->pooled->op.message);
    else if (!sink->is_attached_sent && !sink->is_detach_submitted)
        on_attached(call);
    if (call->is_stream_ended && sink->is_attached && !call->is_sending) {
        if (!sink->is_detach_submitted) {
            sink->is_detach_submitted = wants_detach = true;
            session = sink->detach.req.detach.session;
        } else if (sink->is_detached) {
            kvt_call_send_final(call, NULL, sink->end_code, sink->end_message);
        }
    } else if (!call->is_sending && !call->is_final_sent && sink->notices_count > 0) {
        send_notice(call);
    }
    pthread_mutex_unlock(&call->mutex);
    if (wants_detach)
        submit_detach(call, &session);
}

void kvt_server_notify(struct kvt_session_sink *sink, const struct kvt_notice *notice)
{
    struct kvt_call *call = sink->call;
    bool is_needed = notice->kind == KVT_NOTICE_QUIESCED || notice->kind == KVT_NOTICE_REGIONS_LOST;
    bool is_overrun = false;

    KVT_ASSERT(sink->magic == KVT_SINK_MAGIC);
    pthread_mutex_lock(&call->mutex);
    if (call->is_stream_ended) {
        pthread_mutex_unlock(&call->mutex);
        return;
    }
    if (sink->notices_count < KVT_SERVER_NOTICES_SOFT ||
        (is_needed && sink->notices_count < KVT_SERVER_NOTICES_MAX)) {
        uint32_t at = (sink->notices_first + sink->notices_count) % KVT_SERVER_NOTICES_MAX;

        sink->notices[at] = *notice;
        sink->notices_count++;
    } else if (is_needed) {
        /* The client does not read what it must know: it cannot have a session. */
        is_overrun = true;
        call->is_stream_ended = true;
        sink->end_code = KVT_CODE_RESOURCE_EXHAUSTED;
        sink->end_message = "notices were not read";
    }
    pthread_mutex_unlock(&call->mutex);
    if (is_overrun) /* a send that the client does not take must end first */
        (void)grpc_call_cancel_with_status(call->grpc, GRPC_STATUS_RESOURCE_EXHAUSTED,
                                           "notices were not read", NULL);
    kvt_call_wake(call);
}
