/* A session is an Attach stream kept open: one receive is always posted, one status is awaited.
 * Notices come when the owner asks for them. One thread at a time uses a session. */
#include <grpc/byte_buffer.h>
#include <string.h>
#include <unistd.h>

#include "daemon/base/alloc.h"
#include "daemon/base/clock.h"
#include "proto/client/internal.h"
#include "proto/codec/codec.h"

#define DETACH_NS (10 * KVT_NS_PER_S)

struct kvt_session {
    struct kvt_client_call call;
    bool is_receiving; /* a receive is posted */
    bool is_over;      /* the stream has no more messages */
};

static void start_receive(struct kvt_session *session)
{
    grpc_op op = kvt_receive_op(&session->call);

    kvt_call_batch(&session->call, &op, 1, &session->call.tags[0]);
    session->is_receiving = true;
}

/* True when @tag came back before @until. */
static bool wait_until(struct kvt_session *session, void *tag, uint64_t timeout_ns)
{
    uint64_t capped_ns = KVT_MIN(timeout_ns, (uint64_t)INT64_MAX / 4);
    gpr_timespec until = gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC),
                                      gpr_time_from_nanos((int64_t)capped_ns, GPR_TIMESPAN));
    grpc_event event = grpc_completion_queue_pluck(session->call.cq, tag, until, NULL);

    if (event.type != GRPC_OP_COMPLETE)
        return false;
    kvt_tsan_acquire(tag);
    return true;
}

static void finish(struct kvt_session *session)
{
    (void)kvt_call_wait(&session->call, &session->call.tags[1]);
    if (session->call.received != NULL)
        grpc_byte_buffer_destroy(session->call.received);
    kvt_call_end(&session->call);
    kvt_free(session);
}

/* The first event: `attached`, or the end of the stream with the reason. */
static bool take_attached(struct kvt_session *session, struct kvt_op *op)
{
    struct kvt_client_call *call = &session->call;
    grpc_slice slice;
    size_t bytes;
    const uint8_t *at;
    int r;

    if (call->received == NULL)
        return false;
    at = kvt_received_flat(call, &slice, &bytes);
    r = kvt_codec_decode_answer(op, at, bytes);
    grpc_slice_unref(slice);
    if (r == 0)
        return true;
    call->is_answer_bad = true;
    (void)grpc_call_cancel(call->grpc, NULL);
    return false;
}

struct kvt_session *kvt_client_attach(struct kvt_client *client, struct kvt_op *op)
{
    grpc_op ops[4] = {{.op = GRPC_OP_SEND_INITIAL_METADATA}, {.op = GRPC_OP_SEND_MESSAGE}};
    struct kvt_session *session;
    struct kvt_client_call *call;
    grpc_byte_buffer *request;
    uint64_t deadline_ns = op->deadline_ns, now_ns = kvt_clock_mono_ns();
    grpc_op status;

    op->kind = KVT_OP_ATTACH;
    request = kvt_client_encode(op);
    if (request == NULL)
        return NULL;
    session = kvt_alloc_zeroed(1, sizeof(*session));
    if (session == NULL) {
        grpc_byte_buffer_destroy(request);
        kvt_op_fail(op, KVT_CODE_RESOURCE_EXHAUSTED, "no memory");
        return NULL;
    }
    call = &session->call;
    kvt_call_begin(call, client, op, "/kvtier.v1.KvTier/Attach", false);
    ops[1].data.send_message.send_message = request;
    ops[2] = kvt_initial_op(call);
    ops[3] = kvt_receive_op(call);
    kvt_call_batch(call, ops, 4, &call->tags[0]);
    status = kvt_status_op(call);
    kvt_call_batch(call, &status, 1, &call->tags[1]);
    if (deadline_ns == 0)
        deadline_ns = kvt_time_add(now_ns, client->deadline_ns);
    if (!wait_until(session, &call->tags[0], deadline_ns > now_ns ? deadline_ns - now_ns : 0)) {
        (void)grpc_call_cancel_with_status(call->grpc, GRPC_STATUS_DEADLINE_EXCEEDED,
                                           "Attach was not answered in time", NULL);
        (void)kvt_call_wait(call, &call->tags[0]);
    }
    grpc_byte_buffer_destroy(request);
    if (take_attached(session, op)) {
        pthread_mutex_lock(&client->mutex);
        call->op = NULL; /* the op is the caller's again */
        pthread_mutex_unlock(&client->mutex);
        start_receive(session);
        return session;
    }
    (void)kvt_call_wait(call, &call->tags[1]);
    if (call->is_answer_bad)
        op->code = KVT_CODE_INTERNAL; /* the codec's message says what */
    else if (call->status == GRPC_STATUS_OK)
        kvt_op_fail(op, KVT_CODE_INTERNAL, "Attach ended without an answer");
    else
        kvt_call_status(call, op);
    kvt_call_end(call);
    kvt_free(session);
    return NULL;
}

int kvt_session_next_notice(struct kvt_session *session, uint64_t timeout_ns,
                            struct kvt_notice *ret_notice)
{
    struct kvt_client_call *call = &session->call;
    grpc_slice slice;
    size_t bytes;
    const uint8_t *at;
    int r;

    if (session->is_over)
        return -EPIPE;
    if (!session->is_receiving)
        start_receive(session);
    if (!wait_until(session, &call->tags[0], timeout_ns))
        return 0;
    session->is_receiving = false;
    if (call->received == NULL) {
        session->is_over = true;
        return -EPIPE;
    }
    at = kvt_received_flat(call, &slice, &bytes);
    r = kvt_codec_read_notice(at, bytes, ret_notice);
    grpc_slice_unref(slice);
    return r < 0 ? kvt_trace(r) : 1;
}

struct kvt_session *kvt_session_detach(struct kvt_session *session)
{
    grpc_op op = {.op = GRPC_OP_SEND_CLOSE_FROM_CLIENT};
    uint64_t until_ns = kvt_time_add(kvt_clock_mono_ns(), DETACH_NS);
    struct kvt_notice notice;

    if (session == NULL)
        return NULL;
    kvt_call_batch(&session->call, &op, 1, &session->call.tags[2]);
    /* Notices on their way are read and dropped; then the daemon's word that all is gone. */
    while (!session->is_over) {
        uint64_t now_ns = kvt_clock_mono_ns();

        if (now_ns >= until_ns) {
            (void)grpc_call_cancel(session->call.grpc, NULL);
            until_ns = KVT_TIME_NEVER_NS;
        }
        (void)!kvt_session_next_notice(session, until_ns - now_ns, &notice);
    }
    if (session->is_receiving)
        (void)kvt_call_wait(&session->call, &session->call.tags[0]);
    (void)kvt_call_wait(&session->call, &session->call.tags[2]);
    finish(session);
    return NULL;
}
