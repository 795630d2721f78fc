/* The client on gRPC C core: one connected socket is one channel; a call uses a completion queue
 * from a small pool and waits on it with pluck, so that calling threads do not meet but in gRPC.
 *
 * The socket is connected here, before gRPC, so that "no daemon" is found at once and named by an
 * errno. The channel cannot reconnect: after the daemon ended every call is UNAVAILABLE, and the
 * client is closed and opened again (its handles are void then anyway). */
#include "proto/client/client.h"

#include <fcntl.h>
#include <grpc/byte_buffer.h>
#include <grpc/byte_buffer_reader.h>
#include <grpc/grpc.h>
#include <grpc/grpc_posix.h>
#include <grpc/grpc_security.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include "daemon/base/alloc.h"
#include "daemon/base/clock.h"
#include "daemon/base/list.h"
#include "proto/client/internal.h"
#include "proto/codec/codec.h"

#define DEADLINE_NS_DEFAULT (10 * KVT_NS_PER_S)
#define CONNECT_SECONDS 5
#define ANSWER_BYTES_MAX (2 * KVT_MESSAGE_BYTES_MAX)

static const char *const paths[KVT_OP_KINDS] = {
    [KVT_OP_OPEN_NAMESPACE] = "/kvtier.v1.KvTier/OpenNamespace",
    [KVT_OP_ATTACH] = "/kvtier.v1.KvTier/Attach",
    [KVT_OP_LOOKUP] = "/kvtier.v1.KvTier/Lookup",
    [KVT_OP_PROMOTE] = "/kvtier.v1.KvTier/Promote",
    [KVT_OP_RESERVE] = "/kvtier.v1.KvTier/Reserve",
    [KVT_OP_DEMOTE] = "/kvtier.v1.KvTier/Demote",
    [KVT_OP_QUIESCE] = "/kvtier.v1.KvTier/Quiesce",
    [KVT_OP_RELEASE] = "/kvtier.v1.KvTier/Release",
    [KVT_OP_EVICT] = "/kvtier.v1.KvTierAdmin/Evict",
    [KVT_OP_RESET] = "/kvtier.v1.KvTierAdmin/Reset",
    [KVT_OP_STATS] = "/kvtier.v1.KvTier/Stats",
    [KVT_OP_DUMP] = "/kvtier.v1.KvTierAdmin/Dump",
    [KVT_OP_MAINTAIN] = "/kvtier.v1.KvTierAdmin/Maintain",
    [KVT_OP_HEALTH] = "/grpc.health.v1.Health/Check",
};

void kvt_client_library_init(void)
{
    grpc_init();
}

void kvt_client_library_deinit(void)
{
    grpc_shutdown_blocking();
}

/* ---- connecting -------------------------------------------------------------------------------
 */

int kvt_client_connect(const char *path, int type, int *ret_fd)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    struct timeval patience = {.tv_sec = CONNECT_SECONDS};
    kvt_autoclose int fd = -1;

    if (strlen(path) >= sizeof(address.sun_path))
        return kvt_trace(-ENAMETOOLONG);
    memcpy(address.sun_path, path, strlen(path) + 1);
    /* A full backlog is waited for, but not for ever: -EAGAIN then. */
    fd = socket(AF_UNIX, (type & ~SOCK_NONBLOCK) | SOCK_CLOEXEC, 0);
    if (fd < 0 || setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof(patience)) < 0)
        return kvt_trace(-errno);
    if (connect(fd, (const struct sockaddr *)&address, sizeof(address)) < 0)
        return kvt_trace(-errno);
    if ((type & SOCK_NONBLOCK) != 0 && fcntl(fd, F_SETFL, O_NONBLOCK) < 0)
        return kvt_trace(-errno);
    *ret_fd = fd;
    fd = -1;
    return 0;
}

static grpc_channel *make_channel(int fd)
{
    grpc_arg args[] = {
        {.type = GRPC_ARG_INTEGER,
         .key = (char *)(uintptr_t)GRPC_ARG_MAX_RECEIVE_MESSAGE_LENGTH,
         .value.integer = (int)ANSWER_BYTES_MAX},
        {.type = GRPC_ARG_STRING,
         .key = (char *)(uintptr_t)GRPC_ARG_DEFAULT_AUTHORITY,
         .value.string = (char *)(uintptr_t) "localhost"},
        {.type = GRPC_ARG_INTEGER,
         .key = (char *)(uintptr_t)GRPC_ARG_TCP_READ_CHUNK_SIZE,
         .value.integer = (int)KVT_MIB},
    };
    grpc_channel_args channel_args = {.num_args = KVT_COUNT_OF(args), .args = args};
    grpc_channel_credentials *creds = grpc_insecure_credentials_create();
    grpc_channel *channel = grpc_channel_create_from_fd("kvtierd", fd, creds, &channel_args);

    grpc_channel_credentials_release(creds);
    return channel;
}

int kvt_client_open(struct kvt_client **ret_client, const struct kvt_client_config *config)
{
    struct kvt_client *client;
    int fd = -1;
    int r = kvt_client_connect(config->socket_path, SOCK_STREAM | SOCK_NONBLOCK, &fd);

    if (r < 0)
        return kvt_trace(r);
    client = kvt_alloc_zeroed(1, sizeof(*client));
    if (client != NULL)
        client->path = kvt_alloc_text(config->socket_path);
    if (client == NULL || client->path == NULL) {
        (void)close(fd);
        kvt_free(client);
        return kvt_trace(-ENOMEM);
    }
    client->deadline_ns = config->deadline_ns != 0 ? config->deadline_ns : DEADLINE_NS_DEFAULT;
    pthread_mutex_init(&client->mutex, NULL);
    kvt_list_init(&client->running);
    grpc_init();
    client->channel = make_channel(fd); /* owns fd from here on */
    *ret_client = client;
    return 0;
}

void kvt_client_cq_destroy(grpc_completion_queue *cq)
{
    grpc_completion_queue_shutdown(cq);
    /* A pluck queue is drained by waiting for nothing. */
    (void)grpc_completion_queue_pluck(cq, NULL, gpr_inf_future(GPR_CLOCK_REALTIME), NULL);
    grpc_completion_queue_destroy(cq);
}

struct kvt_client *kvt_client_close(struct kvt_client *client)
{
    if (client == NULL)
        return NULL;
    KVT_ASSERT(kvt_list_is_empty(&client->running));
    grpc_channel_destroy(client->channel);
    for (uint32_t i = 0; i < client->cqs_count; i++)
        kvt_client_cq_destroy(client->cqs[i]);
    pthread_mutex_destroy(&client->mutex);
    kvt_free(client->path);
    kvt_free(client);
    grpc_shutdown_blocking();
    return NULL;
}

/* ---- one call ---------------------------------------------------------------------------------
 */

static gpr_timespec to_deadline(uint64_t deadline_ns)
{
    uint64_t now_ns = kvt_clock_mono_ns();
    uint64_t left_ns = deadline_ns > now_ns ? deadline_ns - now_ns : 0;

    return gpr_time_add(
        gpr_now(GPR_CLOCK_MONOTONIC),
        gpr_time_from_nanos((int64_t)KVT_MIN(left_ns, (uint64_t)INT64_MAX / 4), GPR_TIMESPAN));
}

void kvt_call_begin(struct kvt_client_call *call, struct kvt_client *client, struct kvt_op *op,
                    const char *path, bool has_deadline)
{
    uint64_t deadline_ns = op->deadline_ns;

    *call = (struct kvt_client_call){.client = client, .op = op};
    if (deadline_ns == 0)
        deadline_ns = kvt_time_add(kvt_clock_mono_ns(), client->deadline_ns);
    pthread_mutex_lock(&client->mutex);
    if (client->cqs_count > 0)
        call->cq = client->cqs[--client->cqs_count];
    pthread_mutex_unlock(&client->mutex);
    if (call->cq == NULL)
        call->cq = grpc_completion_queue_create_for_pluck(NULL);
    call->grpc = grpc_channel_create_call(
        client->channel, NULL, GRPC_PROPAGATE_DEFAULTS, call->cq,
        grpc_slice_from_static_string(path), NULL,
        has_deadline ? to_deadline(deadline_ns) : gpr_inf_future(GPR_CLOCK_MONOTONIC), NULL);
    grpc_metadata_array_init(&call->initial);
    grpc_metadata_array_init(&call->trailing);
    call->details = grpc_empty_slice();
    pthread_mutex_lock(&client->mutex);
    kvt_list_push_back(&client->running, &call->link);
    pthread_mutex_unlock(&client->mutex);
    if (atomic_load(&op->is_cancelled))
        (void)grpc_call_cancel(call->grpc, NULL);
}

void kvt_call_end(struct kvt_client_call *call)
{
    struct kvt_client *client = call->client;
    bool is_kept;

    pthread_mutex_lock(&client->mutex);
    kvt_list_remove(&call->link);
    pthread_mutex_unlock(&client->mutex);
    grpc_call_unref(call->grpc);
    grpc_metadata_array_destroy(&call->initial);
    grpc_metadata_array_destroy(&call->trailing);
    grpc_slice_unref(call->details);
    pthread_mutex_lock(&client->mutex);
    is_kept = client->cqs_count < KVT_COUNT_OF(client->cqs);
    if (is_kept)
        client->cqs[client->cqs_count++] = call->cq;
    pthread_mutex_unlock(&client->mutex);
    if (!is_kept)
        kvt_client_cq_destroy(call->cq);
}

void kvt_call_status(const struct kvt_client_call *call, struct kvt_op *op)
{
    size_t bytes = KVT_MIN(GRPC_SLICE_LENGTH(call->details), sizeof(op->message) - 1);

    op->code = (enum kvt_code)call->status;
    memcpy(op->message, GRPC_SLICE_START_PTR(call->details), bytes);
    op->message[bytes] = '\0';
}

grpc_op kvt_status_op(struct kvt_client_call *call)
{
    grpc_op op = {.op = GRPC_OP_RECV_STATUS_ON_CLIENT};

    op.data.recv_status_on_client.trailing_metadata = &call->trailing;
    op.data.recv_status_on_client.status = &call->status;
    op.data.recv_status_on_client.status_details = &call->details;
    return op;
}

grpc_op kvt_receive_op(struct kvt_client_call *call)
{
    grpc_op op = {.op = GRPC_OP_RECV_MESSAGE};

    op.data.recv_message.recv_message = &call->received;
    return op;
}

grpc_op kvt_initial_op(struct kvt_client_call *call)
{
    grpc_op op = {.op = GRPC_OP_RECV_INITIAL_METADATA};

    op.data.recv_initial_metadata.recv_initial_metadata = &call->initial;
    return op;
}

void kvt_call_batch(struct kvt_client_call *call, const grpc_op *ops, size_t count, void *tag)
{
    grpc_call_error error;

    kvt_tsan_release(tag);
    error = grpc_call_start_batch(call->grpc, ops, count, tag, NULL);
    KVT_ASSERT(error == GRPC_CALL_OK);
}

bool kvt_call_wait(struct kvt_client_call *call, void *tag)
{
    grpc_event event =
        grpc_completion_queue_pluck(call->cq, tag, gpr_inf_future(GPR_CLOCK_REALTIME), NULL);

    kvt_tsan_acquire(tag);
    KVT_ASSERT(event.type == GRPC_OP_COMPLETE);
    return event.success != 0;
}

const uint8_t *kvt_received_flat(struct kvt_client_call *call, grpc_slice *ret_slice,
                                 size_t *ret_bytes)
{
    grpc_byte_buffer_reader reader;
    int r = grpc_byte_buffer_reader_init(&reader, call->received);

    KVT_ASSERT(r != 0);
    *ret_slice = grpc_byte_buffer_reader_readall(&reader);
    grpc_byte_buffer_reader_destroy(&reader);
    grpc_byte_buffer_destroy(call->received);
    call->received = NULL;
    *ret_bytes = GRPC_SLICE_LENGTH(*ret_slice);
    return GRPC_SLICE_START_PTR(*ret_slice);
}

/* The answer is there: into the op. Promote's events come one by one. */
static void take_answer(struct kvt_client_call *call, bool *ret_has_answer)
{
    struct kvt_op *op = call->op;
    struct kvt_api_progress progress = {0};
    enum kvt_health_status status = KVT_HEALTH_UNKNOWN;
    grpc_slice slice;
    size_t bytes;
    const uint8_t *at = kvt_received_flat(call, &slice, &bytes);
    bool is_result = true;
    int r;

    if (op->kind == KVT_OP_PROMOTE) {
        r = kvt_codec_decode_promote_event(op, at, bytes, &is_result, &progress);
        if (r == 0 && !is_result && op->progress != NULL)
            op->progress(op, &progress);
    } else if (op->kind == KVT_OP_HEALTH) {
        r = kvt_codec_read_health_answer(at, bytes, &status);
        op->ans.health.is_serving = status == KVT_HEALTH_SERVING;
    } else {
        r = kvt_codec_decode_answer(op, at, bytes);
    }
    grpc_slice_unref(slice);
    call->is_answer_bad |= r != 0;
    *ret_has_answer |= r == 0 && is_result;
}

/* One batch with the status in it: then a request that the server did not read to its end is no
 * failure of the batch. */
static void run_unary(struct kvt_client_call *call, const grpc_op *sends, bool *ret_has_answer)
{
    grpc_op ops[6] = {
        sends[0],           sends[1], sends[2], kvt_initial_op(call), kvt_receive_op(call),
        kvt_status_op(call)};

    kvt_call_batch(call, ops, 6, &call->tags[0]);
    (void)kvt_call_wait(call, &call->tags[0]);
    if (call->received != NULL)
        take_answer(call, ret_has_answer);
}

/* Events are received in batches of their own: the core drops a message that it received in a batch
 * of which a send failed, and sends fail when the answer overtakes the end of the request. */
static void run_stream(struct kvt_client_call *call, const grpc_op *sends, bool *ret_has_answer)
{
    grpc_op op = kvt_status_op(call);
    grpc_op ops[4] = {sends[0], sends[1], sends[2], kvt_initial_op(call)};

    kvt_call_batch(call, ops, 4, &call->tags[2]);
    kvt_call_batch(call, &op, 1, &call->tags[1]);
    for (;;) {
        op = kvt_receive_op(call);
        kvt_call_batch(call, &op, 1, &call->tags[0]);
        (void)kvt_call_wait(call, &call->tags[0]);
        if (call->received == NULL)
            break;
        take_answer(call, ret_has_answer);
    }
    (void)kvt_call_wait(call, &call->tags[1]);
    (void)kvt_call_wait(call, &call->tags[2]);
}

static void run_call(struct kvt_client_call *call, grpc_byte_buffer *request)
{
    grpc_op sends[3] = {{.op = GRPC_OP_SEND_INITIAL_METADATA},
                        {.op = GRPC_OP_SEND_MESSAGE},
                        {.op = GRPC_OP_SEND_CLOSE_FROM_CLIENT}};
    bool has_answer = false;

    sends[1].data.send_message.send_message = request;
    if (call->op->kind == KVT_OP_PROMOTE)
        run_stream(call, sends, &has_answer);
    else
        run_unary(call, sends, &has_answer);
    if (call->status == GRPC_STATUS_OK && call->is_answer_bad)
        call->op->code = KVT_CODE_INTERNAL; /* the codec's message says what */
    else if (call->status == GRPC_STATUS_OK && !has_answer)
        kvt_op_fail(call->op, KVT_CODE_INTERNAL, "OK without an answer: not a kvtierd?");
    else
        kvt_call_status(call, call->op);
}

grpc_byte_buffer *kvt_client_encode(struct kvt_op *op)
{
    struct kvt_codec_message message;
    grpc_byte_buffer *buffer;
    grpc_slice slice;

    op->code = KVT_CODE_OK;
    op->message[0] = '\0';
    if (kvt_codec_encode_request(op, &message) != 0)
        return NULL;
    slice = grpc_slice_malloc(message.bytes);
    kvt_codec_pack(&message, GRPC_SLICE_START_PTR(slice));
    buffer = grpc_raw_byte_buffer_create(&slice, 1);
    grpc_slice_unref(slice);
    return buffer;
}

void kvt_client_call(struct kvt_client *client, struct kvt_op *op)
{
    struct kvt_client_call call;
    grpc_byte_buffer *request;

    if (op->kind == KVT_OP_HEALTH) {
        kvt_client_health(client, op, "");
        return;
    }
    KVT_ASSERT(op->kind != KVT_OP_ATTACH && op->kind != KVT_OP_DETACH);
    request = kvt_client_encode(op);
    if (request == NULL)
        return;
    kvt_call_begin(&call, client, op, paths[op->kind], true);
    run_call(&call, request);
    kvt_call_end(&call);
    grpc_byte_buffer_destroy(request);
}

void kvt_client_health(struct kvt_client *client, struct kvt_op *op, const char *service)
{
    uint8_t at[KVT_CODEC_HEALTH_NAME_BYTES * 2];
    size_t bytes = kvt_codec_write_health_request(service, at);
    grpc_slice slice = grpc_slice_from_copied_buffer((const char *)at, bytes);
    grpc_byte_buffer *request = grpc_raw_byte_buffer_create(&slice, 1);
    struct kvt_client_call call;

    op->kind = KVT_OP_HEALTH;
    op->code = KVT_CODE_OK;
    memset(&op->ans, 0, sizeof(op->ans));
    grpc_slice_unref(slice);
    kvt_call_begin(&call, client, op, paths[KVT_OP_HEALTH], true);
    run_call(&call, request);
    kvt_call_end(&call);
    grpc_byte_buffer_destroy(request);
}

void kvt_client_cancel(struct kvt_client *client, struct kvt_op *op)
{
    atomic_store(&op->is_cancelled, true);
    pthread_mutex_lock(&client->mutex);
    kvt_list_for_each (link, &client->running) {
        struct kvt_client_call *call = KVT_CONTAINER_OF(link, struct kvt_client_call, link);

        if (call->op == op)
            (void)grpc_call_cancel(call->grpc, NULL);
    }
    pthread_mutex_unlock(&client->mutex);
}
