/* The life of a call as its rpc thread sees it:
 *
 *   REQUEST   it arrived: who is it, may it, is there an op for it; the next request is posted
 *   RECEIVE   its message is there: decode into the op, give the op to the service
 *             (Attach: a second RECEIVE waits for the client's end of the stream)
 *   CLOSE     the transport's last word: cancelled by the client, its deadline or its death
 *   SEND      a send is over (send.c): the op goes back after the last one
 *
 * A message is received only after the call got an op: the others cost one flow-control window a
 * stream. That bounds how many messages gRPC holds, not how long they say they are, nor the second
 * message of an Attach: the quota in server.c bounds the bytes. */
#include <grpc/byte_buffer.h>
#include <grpc/byte_buffer_reader.h>
#include <stdio.h>
#include <string.h>

#include "daemon/base/alloc.h"
#include "proto/server/internal.h"

#define SERVICE "/kvtier.v1.KvTier/"
#define ADMIN "/kvtier.v1.KvTierAdmin/"
#define OVERDUE_SLACK_NS KVT_NS_PER_S
#define PIECES_MAX 128u
#define INLINE_BYTES_MAX (64 * KVT_KIB) /* of payload that the service's thread sends itself */

const struct kvt_method kvt_methods[KVT_METHODS] = {
    {SERVICE "OpenNamespace", KVT_METHOD_UNARY, KVT_OP_OPEN_NAMESPACE, false},
    {SERVICE "Attach", KVT_METHOD_ATTACH, KVT_OP_ATTACH, false},
    {SERVICE "Lookup", KVT_METHOD_UNARY, KVT_OP_LOOKUP, false},
    {SERVICE "Promote", KVT_METHOD_PROMOTE, KVT_OP_PROMOTE, false},
    {SERVICE "Reserve", KVT_METHOD_UNARY, KVT_OP_RESERVE, false},
    {SERVICE "Demote", KVT_METHOD_UNARY, KVT_OP_DEMOTE, false},
    {SERVICE "Quiesce", KVT_METHOD_UNARY, KVT_OP_QUIESCE, false},
    {SERVICE "Release", KVT_METHOD_UNARY, KVT_OP_RELEASE, false},
    {SERVICE "Stats", KVT_METHOD_UNARY, KVT_OP_STATS, false},
    {ADMIN "Evict", KVT_METHOD_UNARY, KVT_OP_EVICT, true},
    {ADMIN "Reset", KVT_METHOD_UNARY, KVT_OP_RESET, true},
    {ADMIN "Dump", KVT_METHOD_UNARY, KVT_OP_DUMP, true},
    {ADMIN "Maintain", KVT_METHOD_UNARY, KVT_OP_MAINTAIN, true},
    {"/grpc.health.v1.Health/Check", KVT_METHOD_HEALTH_CHECK, KVT_OP_HEALTH, false},
    {"/grpc.health.v1.Health/Watch", KVT_METHOD_HEALTH_WATCH, KVT_OP_HEALTH, false},
    {NULL, KVT_METHOD_UNKNOWN, KVT_OP_HEALTH, false},
    {"/kvtier.bench.Echo/Inline", KVT_METHOD_ECHO, KVT_OP_HEALTH, false},
    {"/kvtier.bench.Echo/Ring", KVT_METHOD_ECHO_RING, KVT_OP_HEALTH, false},
};

/* ---- the object -------------------------------------------------------------------------------
 */

void kvt_call_ref(struct kvt_call *call)
{
    unsigned before = atomic_fetch_add_explicit(&call->refs, 1, memory_order_relaxed);

    KVT_ASSERT(call->magic == KVT_CALL_MAGIC && before > 0);
}

static struct kvt_call *call_free(struct kvt_call *call)
{
    call->sink = kvt_sink_free(call->sink);
    grpc_metadata_array_destroy(&call->metadata);
    if (call->method->type == KVT_METHOD_UNKNOWN)
        grpc_call_details_destroy(&call->details);
    if (call->received != NULL)
        grpc_byte_buffer_destroy(call->received);
    if (call->sending != NULL)
        grpc_byte_buffer_destroy(call->sending);
    pthread_mutex_destroy(&call->mutex);
    call->magic = 0;
    kvt_free(call);
    return NULL;
}

void kvt_call_unref(struct kvt_call *call)
{
    struct kvt_server *server = call->server;
    unsigned before;

    /* Not after the subtraction: the call may be gone then. */
    KVT_ASSERT(call->magic == KVT_CALL_MAGIC);
    before = atomic_fetch_sub_explicit(&call->refs, 1, memory_order_acq_rel);
    KVT_ASSERT(before > 0);
    if (before > 1)
        return;
    KVT_ASSERT(call->pooled == NULL);
    if (call->grpc != NULL) {
        grpc_call_unref(call->grpc);
        call_free(call);
        kvt_live_add(server, -1, 0, 0);
    } else {
        call_free(call);
    }
}

static int post(struct kvt_call *call)
{
    struct kvt_rpc *rpc = call->rpc;
    struct kvt_tag *tag = &call->tags[KVT_TAG_REQUEST];
    grpc_call_error error;

    kvt_tsan_release(tag);
    if (call->method->type == KVT_METHOD_UNKNOWN)
        error = grpc_server_request_call(rpc->server->grpc, &call->grpc, &call->details,
                                         &call->metadata, rpc->cq, rpc->cq, tag);
    else
        error = grpc_server_request_registered_call(
            rpc->server->grpc, rpc->server->registered[call->method - kvt_methods], &call->grpc,
            &call->deadline, &call->metadata, NULL, rpc->cq, rpc->cq, tag);
    return error == GRPC_CALL_OK ? 0 : kvt_trace(-EIO);
}

int kvt_call_post(struct kvt_rpc *rpc, uint32_t method_idx)
{
    struct kvt_call *call = kvt_alloc_zeroed(1, sizeof(*call));
    int r;

    if (call == NULL)
        return kvt_trace(-ENOMEM);
    call->magic = KVT_CALL_MAGIC;
    atomic_init(&call->refs, 1);
    call->server = rpc->server;
    call->rpc = rpc;
    call->method = &kvt_methods[method_idx];
    for (unsigned kind = 0; kind < KVT_TAGS; kind++)
        call->tags[kind] = (struct kvt_tag){.call = call, .kind = (enum kvt_tag_kind)kind};
    grpc_metadata_array_init(&call->metadata);
    if (call->method->type == KVT_METHOD_UNKNOWN)
        grpc_call_details_init(&call->details);
    pthread_mutex_init(&call->mutex, NULL);
    kvt_list_init(&call->watch_link);
    call->watch_sent = -1;
    r = post(call);
    if (r < 0)
        kvt_call_unref(call);
    return r;
}

/* A batch with one op in it; holds a reference until its tag comes back. */
static void start_one(struct kvt_call *call, const grpc_op *op, enum kvt_tag_kind kind)
{
    grpc_call_error error;

    kvt_call_ref(call);
    kvt_tsan_release(&call->tags[kind]);
    error = grpc_call_start_batch(call->grpc, op, 1, &call->tags[kind], NULL);
    KVT_ASSERT(error == GRPC_CALL_OK);
}

static void start_receive(struct kvt_call *call)
{
    grpc_op op = {.op = GRPC_OP_RECV_MESSAGE};

    op.data.recv_message.recv_message = &call->received;
    start_one(call, &op, KVT_TAG_RECEIVE);
}

static void start_close(struct kvt_call *call)
{
    grpc_op op = {.op = GRPC_OP_RECV_CLOSE_ON_SERVER};

    op.data.recv_close_on_server.cancelled = &call->close_cancelled;
    start_one(call, &op, KVT_TAG_CLOSE);
}

/* The client's deadline on our clock, capped. */
static uint64_t deadline_of(const struct kvt_call *call)
{
    uint64_t now_ns = kvt_clock_mono_ns();
    uint64_t latest_ns = kvt_time_add(now_ns, call->server->config.deadline_ns_max);
    uint64_t deadline_ns;
    gpr_timespec left;

    if (gpr_time_cmp(call->deadline, gpr_inf_future(call->deadline.clock_type)) == 0)
        return latest_ns;
    left = gpr_time_sub(call->deadline, gpr_now(call->deadline.clock_type));
    if (left.tv_sec < 0)
        return now_ns;
    if ((uint64_t)left.tv_sec > KVT_TIME_NEVER_NS / KVT_NS_PER_S / 2)
        return latest_ns;
    deadline_ns = now_ns + (uint64_t)left.tv_sec * KVT_NS_PER_S + (uint32_t)left.tv_nsec;
    return KVT_MIN(latest_ns, deadline_ns);
}

/* ---- REQUEST ----------------------------------------------------------------------------------
 */

/* NULL, or why not: RESOURCE_EXHAUSTED. @text is room for it. */
static const char *take_resources(struct kvt_call *call, char *text, size_t text_bytes)
{
    struct kvt_server *server = call->server;

    if (call->method->type == KVT_METHOD_ATTACH) {
        call->sink = kvt_sink_new(call);
        if (call->sink == NULL)
            return "too many Attach streams: end one first";
    }
    if (!kvt_accept_begin_op(server, &call->peer)) {
        atomic_fetch_add(&server->stats.ops_refused, 1);
        (void)snprintf(text, text_bytes,
                       "%u requests of this connection are in progress, no more are allowed: retry "
                       "later",
                       server->config.ops_per_connection_max);
        return text;
    }
    call->pooled = kvt_ops_take(server);
    if (call->pooled == NULL) {
        kvt_accept_end_op(server, &call->peer);
        atomic_fetch_add(&server->stats.ops_refused, 1);
        return "too many requests in progress: retry later";
    }
    kvt_live_add(server, 0, 1, 0);
    call->pooled->call = call;
    call->pooled->op.kind = call->method->kind;
    call->pooled->op.is_admin = call->peer.is_admin;
    call->pooled->op.peer_uid = call->peer.uid;
    call->pooled->op.deadline_ns = call->deadline_ns;
    kvt_list_push_back(&call->rpc->running, &call->pooled->link);
    return NULL;
}

static void on_request(struct kvt_call *call, bool is_ok)
{
    struct kvt_server *server = call->server;
    const char *text;
    char room[128];

    if (!is_ok) { /* the server stops */
        kvt_call_unref(call);
        return;
    }
    kvt_live_add(server, 1, 0, 0);
    atomic_fetch_add(&server->stats.requests, 1);
    /* -ENOMEM leaves one request less posted, of eight; the process is about to end anyway. */
    (void)!kvt_call_post(call->rpc, (uint32_t)(call->method - kvt_methods));
    if (call->method->type == KVT_METHOD_UNKNOWN)
        call->deadline = call->details.deadline;
    call->deadline_ns = deadline_of(call);
    start_close(call);
    if (!kvt_accept_peer(server, call->grpc, &call->peer))
        kvt_call_fail(call, KVT_CODE_UNAVAILABLE, "the connection is gone");
    else if (call->method->type == KVT_METHOD_UNKNOWN)
        kvt_call_fail(call, KVT_CODE_UNIMPLEMENTED, "unknown method");
    else if (call->method->is_admin && !call->peer.is_admin)
        kvt_call_fail(call, KVT_CODE_PERMISSION_DENIED, "this is served on the admin socket only");
    else {
        text = take_resources(call, room, sizeof(room));
        if (text != NULL)
            kvt_call_fail(call, KVT_CODE_RESOURCE_EXHAUSTED, text);
        else
            start_receive(call);
    }
    kvt_call_unref(call);
}

/* ---- RECEIVE ----------------------------------------------------------------------------------
 */

/* The message in one piece: where it lies, or copied together. NULL: compressed or too large. */
static const uint8_t *flatten(struct kvt_call *call, size_t *ret_bytes)
{
    struct kvt_arena *flat = &call->rpc->flat;
    size_t bytes = grpc_byte_buffer_length(call->received);
    grpc_byte_buffer_reader reader;
    grpc_slice *slice;
    uint8_t *at;
    size_t used = 0;

    if (call->received->data.raw.compression != GRPC_COMPRESS_NONE)
        return NULL;
    *ret_bytes = bytes;
    if (call->received->data.raw.slice_buffer.count == 1)
        return GRPC_SLICE_START_PTR(call->received->data.raw.slice_buffer.slices[0]);
    kvt_arena_reset(flat);
    at = kvt_arena_alloc(flat, bytes);
    if (at == NULL || !grpc_byte_buffer_reader_init(&reader, call->received))
        return NULL;
    while (grpc_byte_buffer_reader_peek(&reader, &slice)) {
        memcpy(at + used, GRPC_SLICE_START_PTR(*slice), GRPC_SLICE_LENGTH(*slice));
        used += GRPC_SLICE_LENGTH(*slice);
    }
    grpc_byte_buffer_reader_destroy(&reader);
    KVT_ASSERT(used == bytes);
    return at;
}

/* Health has its own messages. */
static int decode_health(struct kvt_call *call, struct kvt_op *op, const uint8_t *at, size_t bytes)
{
    char name[KVT_CODEC_HEALTH_NAME_BYTES];

    if (kvt_codec_read_health_request(at, bytes, name) < 0) {
        kvt_op_fail(op, KVT_CODE_INVALID_ARGUMENT, "no HealthCheckRequest, or a name over 255");
        return KVT_CODEC_E_BAD;
    }
    call->is_name_unknown = !kvt_health_is_known(name);
    if (call->is_name_unknown && call->method->type == KVT_METHOD_HEALTH_CHECK) {
        kvt_op_fail(op, KVT_CODE_NOT_FOUND, "no such service here");
        return KVT_CODEC_E_BAD;
    }
    return 0;
}

/* A message in a few pieces: its tokens are copied once. */
static int decode_pieces(struct kvt_call *call, struct kvt_op *op)
{
    struct kvt_codec_piece pieces[PIECES_MAX];
    grpc_slice_buffer *slices = &call->received->data.raw.slice_buffer;

    for (size_t i = 0; i < slices->count; i++)
        pieces[i] = (struct kvt_codec_piece){.at = GRPC_SLICE_START_PTR(slices->slices[i]),
                                             .bytes = GRPC_SLICE_LENGTH(slices->slices[i])};
    return kvt_codec_decode_pieces(op, pieces, (uint32_t)slices->count, &call->rpc->flat);
}

static int decode(struct kvt_call *call, struct kvt_op *op)
{
    size_t bytes = 0, count;
    const uint8_t *at;
    int r;

    if (call->received == NULL) {
        kvt_op_fail(op, KVT_CODE_INVALID_ARGUMENT, "the request has no message");
        return KVT_CODEC_E_BAD;
    }
    if (call->method->type == KVT_METHOD_ECHO || call->method->type == KVT_METHOD_ECHO_RING)
        return 0;
    count = call->received->data.raw.slice_buffer.count;
    if (call->received->data.raw.compression == GRPC_COMPRESS_NONE &&
        call->method->type == KVT_METHOD_UNARY && count > 0 && count <= PIECES_MAX)
        return decode_pieces(call, op);
    at = flatten(call, &bytes);
    if (at == NULL) {
        kvt_op_fail(op, KVT_CODE_UNIMPLEMENTED, "compressed messages are not accepted");
        return KVT_CODEC_E_BAD;
    }
    if (call->method->kind == KVT_OP_HEALTH)
        return decode_health(call, op, at, bytes);
    r = kvt_codec_decode_request(op, at, bytes);
    if (r == 0 && call->method->type == KVT_METHOD_ATTACH)
        r = kvt_sink_prepare(call, op);
    return r;
}

/* Too much to encode for the service's thread: payload, and lists of things. */
static bool is_answer_large(const struct kvt_op *op)
{
    if (op->code != KVT_CODE_OK)
        return false;
    return op->kind == KVT_OP_DUMP || op->kind == KVT_OP_STATS ||
           (op->kind == KVT_OP_PROMOTE && op->ans.promote.inline_bytes > INLINE_BYTES_MAX);
}

static void op_done(struct kvt_op *op)
{
    struct kvt_pooled_op *pooled = op->server;
    struct kvt_call *call = pooled->call;
    bool is_large = is_answer_large(op); /* from is_done on the op may be gone */

    atomic_store_explicit(&call->is_done, true, memory_order_release);
    if (is_large)
        kvt_reply_queue(call->server, call);
    else
        kvt_call_wake(call);
    kvt_call_unref(call); /* the service's */
}

static void op_progress(struct kvt_op *op, const struct kvt_api_progress *progress)
{
    struct kvt_pooled_op *pooled = op->server;
    struct kvt_call *call = pooled->call;

    pthread_mutex_lock(&call->mutex);
    call->progress = *progress;
    call->has_progress = true;
    pthread_mutex_unlock(&call->mutex);
    kvt_call_wake(call);
}

static void submit(struct kvt_call *call)
{
    const struct kvt_service *service = call->server->config.service;
    struct kvt_op *op = &call->pooled->op;
    int r;

    memset(&op->ans, 0, sizeof(op->ans));
    op->done = op_done;
    if (call->method->type == KVT_METHOD_PROMOTE && op->req.promote.layer_groups > 1)
        op->progress = op_progress;
    call->is_submitted = true;
    kvt_call_ref(call);
    r = service->submit(service->ctx, op);
    if (r == 0)
        return;
    call->is_submitted = false;
    if (call->sink != NULL)
        kvt_sink_unprepare(call, op);
    atomic_fetch_add(&call->server->stats.ops_refused, 1);
    kvt_call_fail(call, KVT_CODE_RESOURCE_EXHAUSTED, "the engine's inbox is full: retry later");
    kvt_call_unref(call);
}

static void on_first_message(struct kvt_call *call)
{
    struct kvt_op *op = &call->pooled->op;
    int r = decode(call, op);

    if (call->received != NULL)
        grpc_byte_buffer_destroy(call->received);
    call->received = NULL;
    if (r != 0) {
        atomic_fetch_add(&call->server->stats.bad_requests, 1);
        kvt_call_fail(call, op->code, op->message);
        return;
    }
    if (call->method->type == KVT_METHOD_HEALTH_WATCH) {
        /* A watch is a stream of its own: it needs no op while it lasts. */
        kvt_list_remove(&call->pooled->link);
        kvt_ops_give(call->server, call->pooled);
        kvt_accept_end_op(call->server, &call->peer);
        call->pooled = NULL;
        kvt_live_add(call->server, 0, -1, 0);
        if (!kvt_health_watch(call))
            kvt_call_fail(call, KVT_CODE_RESOURCE_EXHAUSTED, "too many health watches");
        return;
    }
    if (call->method->type == KVT_METHOD_ECHO) {
        memset(&op->ans, 0, sizeof(op->ans));
        atomic_store_explicit(&call->is_done, true, memory_order_release);
        kvt_call_pump(call);
        return;
    }
    submit(call);
    if (call->method->type == KVT_METHOD_ATTACH && call->is_submitted)
        start_receive(call);
}

static void on_receive(struct kvt_call *call, bool is_ok)
{
    bool is_final_sent;

    pthread_mutex_lock(&call->mutex);
    is_final_sent = call->is_final_sent;
    pthread_mutex_unlock(&call->mutex);
    if (call->is_submitted && call->method->type == KVT_METHOD_ATTACH) {
        bool has_message = call->received != NULL;

        if (has_message) /* not kept until the session is gone */
            grpc_byte_buffer_destroy(call->received);
        call->received = NULL;
        if (has_message)
            kvt_sink_end(call, KVT_CODE_INVALID_ARGUMENT, "a second message on an Attach stream");
        else
            kvt_sink_end(call, KVT_CODE_OK, "");
    } else if (!is_final_sent) {
        if (is_ok && !call->is_cancelled)
            on_first_message(call);
        else
            kvt_call_fail(call, KVT_CODE_CANCELLED, "the request did not arrive");
    }
    kvt_call_unref(call);
}

/* ---- CLOSE, SEND ------------------------------------------------------------------------------
 */

static void on_close(struct kvt_call *call)
{
    const struct kvt_service *service = call->server->config.service;

    if (call->close_cancelled) {
        call->is_cancelled = true;
        if (call->is_submitted && call->pooled != NULL &&
            !atomic_load_explicit(&call->is_done, memory_order_acquire)) {
            atomic_store(&call->pooled->op.is_cancelled, true);
            service->cancel(service->ctx, &call->pooled->op);
        }
        if (call->sink != NULL && call->is_submitted)
            kvt_sink_end(call, KVT_CODE_CANCELLED, "cancelled");
    }
    if (call->method->type == KVT_METHOD_HEALTH_WATCH) {
        kvt_health_unwatch(call);
        pthread_mutex_lock(&call->mutex);
        call->is_stream_ended = true;
        pthread_mutex_unlock(&call->mutex);
        kvt_call_wake(call);
    }
    kvt_call_unref(call);
}

static void on_send(struct kvt_call *call)
{
    bool is_over, is_op_over;

    pthread_mutex_lock(&call->mutex);
    call->is_sending = false;
    if (call->sending != NULL)
        grpc_byte_buffer_destroy(call->sending);
    call->sending = NULL;
    is_over = call->is_final_sent;
    /* Attach gives its op back as soon as the session is known; the others hold it to the end, so
     * that a client which does not read its answers runs out of ops and not us out of memory. */
    is_op_over = is_over || (call->sink != NULL && call->sink->is_attached_sent);
    pthread_mutex_unlock(&call->mutex);
    if (call->pooled != NULL && is_op_over) {
        kvt_list_remove(&call->pooled->link);
        kvt_ops_give(call->server, call->pooled);
        kvt_accept_end_op(call->server, &call->peer);
        call->pooled = NULL;
        kvt_live_add(call->server, 0, -1, 0);
    }
    if (!is_over)
        kvt_call_wake(call);
    kvt_call_unref(call);
}

void kvt_call_handle(struct kvt_tag *tag, bool is_ok)
{
    struct kvt_call *call = tag->call;

    KVT_ASSERT(call->magic == KVT_CALL_MAGIC);
    switch (tag->kind) {
    case KVT_TAG_REQUEST:
        on_request(call, is_ok);
        break;
    case KVT_TAG_RECEIVE:
        on_receive(call, is_ok);
        break;
    case KVT_TAG_CLOSE:
        on_close(call);
        break;
    case KVT_TAG_SEND:
        on_send(call);
        break;
    default:
        KVT_ASSERT(false && "a tag of no kind");
    }
}

void kvt_call_wake(struct kvt_call *call)
{
    if (call->server->config.is_reply_inline)
        kvt_call_pump(call);
    else
        kvt_reply_queue(call->server, call);
}

void kvt_call_tick(struct kvt_rpc *rpc, uint64_t now_ns)
{
    kvt_list_for_each (link, &rpc->running) {
        struct kvt_pooled_op *pooled = KVT_CONTAINER_OF(link, struct kvt_pooled_op, link);
        struct kvt_call *call = pooled->call;
        bool is_ours = !call->is_submitted || atomic_load(&call->is_done);

        if (is_ours && now_ns > kvt_time_add(call->deadline_ns, OVERDUE_SLACK_NS))
            (void)grpc_call_cancel_with_status(call->grpc, GRPC_STATUS_DEADLINE_EXCEEDED,
                                               "not received or not read in time", NULL);
    }
}
