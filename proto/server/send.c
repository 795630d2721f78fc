/* What leaves a call. A pump looks at the call's state and starts at most one send; when that is
 * over the rpc thread wakes the call again. Any thread may pump: the state is under call->mutex. */
#include <string.h>

#include "proto/server/internal.h"

/* call->mutex held, nothing is being sent. */
static void start_send(struct kvt_call *call, grpc_op *ops, size_t count)
{
    grpc_call_error error;

    KVT_ASSERT(!call->is_sending);
    call->is_sending = true;
    kvt_call_ref(call);
    kvt_tsan_release(&call->tags[KVT_TAG_SEND]);
    error = grpc_call_start_batch(call->grpc, ops, count, &call->tags[KVT_TAG_SEND], NULL);
    KVT_ASSERT(error == GRPC_CALL_OK);
}

static size_t add_metadata(struct kvt_call *call, grpc_op *ops)
{
    if (call->is_metadata_sent)
        return 0;
    call->is_metadata_sent = true;
    ops[0] = (grpc_op){.op = GRPC_OP_SEND_INITIAL_METADATA};
    return 1;
}

static grpc_op message_op(struct kvt_call *call, grpc_slice slice)
{
    grpc_op op = {.op = GRPC_OP_SEND_MESSAGE};

    KVT_ASSERT(call->sending == NULL);
    call->sending = grpc_raw_byte_buffer_create(&slice, 1);
    grpc_slice_unref(slice);
    op.data.send_message.send_message = call->sending;
    return op;
}

static grpc_slice pack(const struct kvt_codec_message *message)
{
    grpc_slice slice = grpc_slice_malloc(message->bytes);

    kvt_codec_pack(message, GRPC_SLICE_START_PTR(slice));
    return slice;
}

static void send_slice(struct kvt_call *call, grpc_slice slice)
{
    grpc_op ops[2];
    size_t count = add_metadata(call, ops);

    ops[count++] = message_op(call, slice);
    start_send(call, ops, count);
}

void kvt_call_send_bytes(struct kvt_call *call, const uint8_t *at, size_t bytes)
{
    send_slice(call, grpc_slice_from_copied_buffer((const char *)at, bytes));
}

void kvt_call_send_message(struct kvt_call *call, const struct kvt_codec_message *message)
{
    send_slice(call, pack(message));
}

static void send_status(struct kvt_call *call, grpc_op *ops, size_t count, enum kvt_code code,
                        const char *text)
{
    grpc_op op = {.op = GRPC_OP_SEND_STATUS_FROM_SERVER};
    grpc_slice details = grpc_slice_from_copied_string(text);

    op.data.send_status_from_server.status = (grpc_status_code)code;
    op.data.send_status_from_server.status_details = text[0] != '\0' ? &details : NULL;
    ops[count++] = op;
    call->is_final_sent = true;
    start_send(call, ops, count);
    grpc_slice_unref(details);
}

void kvt_call_send_final(struct kvt_call *call, const struct kvt_codec_message *message,
                         enum kvt_code code, const char *text)
{
    grpc_op ops[3];
    size_t count = add_metadata(call, ops);

    if (message != NULL)
        ops[count++] = message_op(call, pack(message));
    send_status(call, ops, count, code, text);
}

void kvt_call_fail(struct kvt_call *call, enum kvt_code code, const char *message)
{
    KVT_ASSERT(code != KVT_CODE_OK);
    pthread_mutex_lock(&call->mutex);
    kvt_call_send_final(call, NULL, code, message);
    pthread_mutex_unlock(&call->mutex);
}

static void send_health(struct kvt_call *call, const struct kvt_op *op)
{
    uint8_t at[16];
    size_t bytes = kvt_codec_write_health_answer(
        op->ans.health.is_serving ? KVT_HEALTH_SERVING : KVT_HEALTH_NOT_SERVING, at);
    grpc_op ops[3];
    size_t count = add_metadata(call, ops);

    ops[count++] = message_op(call, grpc_slice_from_copied_buffer((const char *)at, bytes));
    send_status(call, ops, count, KVT_CODE_OK, "");
}

/* An answer that the service gave. */
static void send_answer(struct kvt_call *call)
{
    struct kvt_op *op = &call->pooled->op;
    struct kvt_codec_message message;

    if (op->code != KVT_CODE_OK)
        kvt_call_send_final(call, NULL, op->code, op->message);
    else if (op->kind == KVT_OP_HEALTH)
        send_health(call, op);
    else if (kvt_codec_encode_answer(op, &message) == 0)
        kvt_call_send_final(call, &message, KVT_CODE_OK, "");
    else
        kvt_call_send_final(call, NULL, op->code, op->message);
}

/* Progress is coalesced: the newest group implies the earlier ones. */
static void send_progress(struct kvt_call *call)
{
    uint8_t room[512];
    struct kvt_arena arena = {.base = room, .cap_bytes = sizeof(room)};
    struct kvt_codec_message message;
    int r = kvt_codec_encode_progress(&arena, &call->progress, &message);

    KVT_ASSERT(r == 0);
    call->has_progress = false;
    kvt_call_send_message(call, &message);
}

void kvt_call_pump(struct kvt_call *call)
{
    if (call->method->type == KVT_METHOD_ATTACH) {
        kvt_sink_pump(call);
        return;
    }
    pthread_mutex_lock(&call->mutex);
    if (!call->is_sending && !call->is_final_sent) {
        if (call->method->type == KVT_METHOD_HEALTH_WATCH)
            kvt_health_pump(call);
        else if (call->has_progress)
            send_progress(call);
        else if (atomic_load_explicit(&call->is_done, memory_order_acquire))
            send_answer(call);
    }
    pthread_mutex_unlock(&call->mutex);
}
