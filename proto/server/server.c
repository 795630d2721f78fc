/* Start and stop. Stop works in this order: no new connections; gRPC takes no new calls; running
 * ones may end; what is left is cancelled, which ends sessions (each a DETACH) and makes the
 * service give ops back; then the queues, the threads and the rest. */
#include <grpc/grpc_security.h>
#include <string.h>
#include <time.h>

#include "daemon/base/alloc.h"
#include "proto/server/internal.h"

#define STREAM_WINDOW_BYTES (64 * KVT_KIB)
#define READ_CHUNK_BYTES KVT_MIB
#define OPS_PER_CONNECTION_LEAST 8u /* of the default */

bool kvt_server_has_method(const struct kvt_server *server, uint32_t method_idx)
{
    enum kvt_method_type type = kvt_methods[method_idx].type;

    return server->has_echo || (type != KVT_METHOD_ECHO && type != KVT_METHOD_ECHO_RING);
}

/* ---- rpc threads ------------------------------------------------------------------------------
 */

static void on_shut_down(struct kvt_server *server)
{
    pthread_mutex_lock(&server->live.mutex);
    server->live.is_shut_down = true;
    pthread_cond_broadcast(&server->live.cond);
    pthread_mutex_unlock(&server->live.mutex);
}

static void *rpc_main(void *arg)
{
    struct kvt_rpc *rpc = arg;
    struct kvt_server *server = rpc->server;

    for (;;) {
        gpr_timespec until =
            gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC), gpr_time_from_millis(1000, GPR_TIMESPAN));
        grpc_event event = grpc_completion_queue_next(rpc->cq, until, NULL);
        uint64_t now_ns = kvt_clock_mono_ns();

        if (event.type == GRPC_QUEUE_SHUTDOWN)
            return NULL;
        if (event.type == GRPC_OP_COMPLETE) {
            struct kvt_tag *tag = event.tag;

            kvt_tsan_acquire(tag);
            if (tag == &server->shutdown_tag)
                on_shut_down(server);
            else
                kvt_call_handle(tag, event.success != 0);
        }
        if (now_ns - rpc->tick_ns >= KVT_NS_PER_S) {
            rpc->tick_ns = now_ns;
            kvt_call_tick(rpc, now_ns);
            if (rpc == &server->rpcs[0])
                kvt_health_poll(server);
        }
    }
}

static int start_rpc(struct kvt_server *server, struct kvt_rpc *rpc)
{
    int r;

    for (uint32_t method = 0; method < KVT_METHODS; method++) {
        if (!kvt_server_has_method(server, method))
            continue;
        for (uint32_t i = 0; i < KVT_SERVER_POSTED; i++) {
            r = kvt_call_post(rpc, method);
            if (r < 0)
                return kvt_trace(r);
        }
    }
    r = -pthread_create(&rpc->thread, NULL, rpc_main, rpc);
    if (r < 0)
        return kvt_trace(r);
    rpc->is_running = true;
    return 0;
}

static grpc_arg integer_arg(const char *key, int value)
{
    return (grpc_arg){
        .type = GRPC_ARG_INTEGER, .key = (char *)(uintptr_t)key, .value.integer = value};
}

/* What gRPC may hold of incoming bytes in all: the messages that ops_max lets in, and what each
 * connection reads ahead. gRPC looks at the length of a message only when all of it is there, and
 * widens the stream's window for it until then: without this a single stream could make it hold
 * 4 GiB. Above the quota gRPC cancels streams, and not only the guilty one: whoever does that can
 * end other clients' streams, sessions too, but not the daemon. */
static size_t quota_bytes(const struct kvt_server_config *config)
{
    return (size_t)config->ops_max * KVT_MESSAGE_BYTES_MAX +
           (size_t)config->connections_max * READ_CHUNK_BYTES;
}

/* Windows are small so that a stream holds little before its call has an op; ping rules are wide
 * because some clients ping often; compression is off because it could blow up. */
static int make_grpc(struct kvt_server *server)
{
    grpc_resource_quota *quota = grpc_resource_quota_create("kvtier");
    grpc_arg args[] = {
        {.type = GRPC_ARG_POINTER,
         .key = (char *)(uintptr_t)GRPC_ARG_RESOURCE_QUOTA,
         .value.pointer = {.p = quota, .vtable = grpc_resource_quota_arg_vtable()}},
        integer_arg(GRPC_ARG_MAX_RECEIVE_MESSAGE_LENGTH, (int)KVT_MESSAGE_BYTES_MAX),
        integer_arg(GRPC_ARG_MAX_CONCURRENT_STREAMS, (int)server->config.streams_max),
        integer_arg(GRPC_ARG_TCP_READ_CHUNK_SIZE, (int)READ_CHUNK_BYTES),
        integer_arg(GRPC_ARG_TCP_MIN_READ_CHUNK_SIZE, (int)(64 * KVT_KIB)),
        integer_arg(GRPC_ARG_TCP_MAX_READ_CHUNK_SIZE, (int)(4 * KVT_MIB)),
        integer_arg(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, (int)STREAM_WINDOW_BYTES),
        integer_arg(GRPC_ARG_HTTP2_BDP_PROBE, 0),
        integer_arg(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, 1000),
        integer_arg(GRPC_ARG_HTTP2_MAX_PING_STRIKES, 0),
        integer_arg(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1),
        integer_arg(GRPC_COMPRESSION_CHANNEL_ENABLED_ALGORITHMS_BITSET, 1),
        integer_arg(GRPC_ARG_ENABLE_PER_MESSAGE_DECOMPRESSION, 0),
    };
    grpc_channel_args channel_args = {.num_args = KVT_COUNT_OF(args), .args = args};

    grpc_resource_quota_resize(quota, quota_bytes(&server->config));
    server->creds = grpc_insecure_server_credentials_create();
    server->grpc = grpc_server_create(&channel_args, NULL);
    grpc_resource_quota_unref(quota); /* the server has its own reference */
    if (server->creds == NULL || server->grpc == NULL)
        return kvt_trace(-ENOMEM);
    for (uint32_t i = 0; i < KVT_METHODS; i++) {
        if (kvt_methods[i].path == NULL || !kvt_server_has_method(server, i))
            continue;
        server->registered[i] = grpc_server_register_method(server->grpc, kvt_methods[i].path, NULL,
                                                            GRPC_SRM_PAYLOAD_NONE, 0);
        if (server->registered[i] == NULL)
            return kvt_trace(-EEXIST);
    }
    for (uint32_t i = 0; i < server->config.threads; i++) {
        struct kvt_rpc *rpc = &server->rpcs[i];
        int r;

        rpc->server = server;
        kvt_list_init(&rpc->running);
        r = kvt_arena_init(&rpc->flat, KVT_MESSAGE_BYTES_MAX, KVT_MIB);
        if (r < 0)
            return kvt_trace(r);
        rpc->cq = grpc_completion_queue_create_for_next(NULL);
        grpc_server_register_completion_queue(server->grpc, rpc->cq, NULL);
    }
    return 0;
}

/* ---- open -------------------------------------------------------------------------------------
 */

static int check_config(const struct kvt_server_config *config)
{
    if (config->threads == 0 || config->threads > KVT_SERVER_THREADS_MAX || config->ops_max == 0 ||
        config->ops_max > 65536 || config->connections_max == 0 || config->streams_max == 0 ||
        config->streams_max > INT32_MAX || config->deadline_ns_max == 0)
        return kvt_trace(-EINVAL);
    return 0;
}

static void set_empty(struct kvt_server *server)
{
    for (unsigned i = 0; i < 3; i++)
        server->listen_fds[i] = -1;
    server->lock_fds[0] = server->lock_fds[1] = -1;
    server->accept.epoll_fd = server->accept.wake_fd = -1;
    server->reply.bell = KVT_DOORBELL_NULL;
    kvt_list_init(&server->conns.list);
    kvt_list_init(&server->conns.regions);
    pthread_mutex_init(&server->ops.mutex, NULL);
    pthread_mutex_init(&server->conns.mutex, NULL);
    pthread_mutex_init(&server->regions.mutex, NULL);
    pthread_mutex_init(&server->health.mutex, NULL);
    pthread_mutex_init(&server->live.mutex, NULL);
    pthread_cond_init(&server->live.cond, NULL);
}

static int open_parts(struct kvt_server *server, int *ret_pid)
{
    int r = kvt_listen_all(server, ret_pid);

    if (r != 0)
        return r;
    r = kvt_ops_init(server);
    if (r == 0)
        r = kvt_health_init(server);
    if (r == 0)
        r = make_grpc(server);
    if (r == 0)
        r = kvt_reply_start(server);
    if (r < 0)
        return kvt_trace(r);
    grpc_server_start(server->grpc);
    server->is_grpc_started = true;
    for (uint32_t i = 0; i < server->config.threads && r == 0; i++)
        r = start_rpc(server, &server->rpcs[i]);
    if (r == 0)
        r = kvt_accept_start(server);
    return r < 0 ? kvt_trace(r) : 0;
}

static int open_server(struct kvt_server **ret_server, const struct kvt_server_config *config,
                       bool has_echo, int *ret_pid)
{
    struct kvt_server *server;
    int r = check_config(config);

    if (r < 0)
        return kvt_trace(r);
    server = kvt_alloc_zeroed(1, sizeof(*server));
    if (server == NULL)
        return kvt_trace(-ENOMEM);
    server->config = *config;
    if (config->ops_per_connection_max == 0)
        server->config.ops_per_connection_max =
            KVT_MAX(OPS_PER_CONNECTION_LEAST, config->ops_max / 2);
    if (config->region_ns == 0)
        server->config.region_ns = KVT_SERVER_REGION_NS;
    server->has_echo = has_echo;
    set_empty(server);
    grpc_init();
    r = open_parts(server, ret_pid);
    if (r != 0) {
        kvt_server_stop(server, 0);
        kvt_server_close(server);
        return r;
    }
    *ret_server = server;
    return 0;
}

int kvt_server_open(struct kvt_server **ret_server, const struct kvt_server_config *config,
                    int *ret_pid)
{
    return open_server(ret_server, config, false, ret_pid);
}

int kvt_server_open_bench(struct kvt_server **ret_server, const struct kvt_server_config *config,
                          int *ret_pid)
{
    return open_server(ret_server, config, true, ret_pid);
}

/* ---- stop, close ------------------------------------------------------------------------------
 */

/* Waits for no op and no call, or for @until_ns. */
static void wait_live(struct kvt_server *server, bool is_ops_only, uint64_t until_ns)
{
    pthread_mutex_lock(&server->live.mutex);
    while (is_ops_only
               ? server->live.ops > 0
               : server->live.ops > 0 || server->live.calls > 0 || !server->live.is_shut_down) {
        uint64_t now_ns = kvt_clock_mono_ns();
        uint64_t left_ns = until_ns > now_ns ? until_ns - now_ns : 0;
        struct timespec ts;

        if (left_ns == 0)
            break;
        (void)clock_gettime(CLOCK_REALTIME, &ts);
        left_ns = KVT_MIN(left_ns, KVT_NS_PER_S / 10) + (uint64_t)ts.tv_nsec;
        ts.tv_sec += (time_t)(left_ns / KVT_NS_PER_S);
        ts.tv_nsec = (long)(left_ns % KVT_NS_PER_S);
        (void)pthread_cond_timedwait(&server->live.cond, &server->live.mutex, &ts);
    }
    pthread_mutex_unlock(&server->live.mutex);
}

static void stop_rpcs(struct kvt_server *server)
{
    for (uint32_t i = 0; i < server->config.threads; i++) {
        struct kvt_rpc *rpc = &server->rpcs[i];

        if (rpc->cq == NULL)
            continue;
        grpc_completion_queue_shutdown(rpc->cq);
        if (rpc->is_running)
            (void)pthread_join(rpc->thread, NULL);
        else
            (void)rpc_main(rpc); /* open failed half way: drain it here */
        rpc->is_running = false;
    }
}

void kvt_server_stop(struct kvt_server *server, uint64_t grace_ns)
{
    if (server->is_stopped)
        return;
    server->is_stopped = true;
    kvt_accept_stop(server);
    if (server->is_grpc_started) {
        kvt_tsan_release(&server->shutdown_tag);
        grpc_server_shutdown_and_notify(server->grpc, server->rpcs[0].cq, &server->shutdown_tag);
        wait_live(server, true, kvt_time_add(kvt_clock_mono_ns(), grace_ns));
        grpc_server_cancel_all_calls(server->grpc);
        if (server->rpcs[0].is_running)
            wait_live(server, false, KVT_TIME_NEVER_NS);
    }
    stop_rpcs(server);
    kvt_reply_stop(server);
    kvt_region_close_all(server);
}

struct kvt_server *kvt_server_close(struct kvt_server *server)
{
    if (server == NULL)
        return NULL;
    KVT_ASSERT(server->is_stopped);
    if (server->grpc != NULL)
        grpc_server_destroy(server->grpc);
    for (uint32_t i = 0; i < server->config.threads; i++) {
        if (server->rpcs[i].cq != NULL)
            grpc_completion_queue_destroy(server->rpcs[i].cq);
        kvt_arena_deinit(&server->rpcs[i].flat);
    }
    if (server->creds != NULL)
        grpc_server_credentials_release(server->creds);
    kvt_accept_deinit(server);
    kvt_listen_close(server);
    kvt_health_deinit(server);
    kvt_ops_deinit(server);
    pthread_cond_destroy(&server->live.cond);
    pthread_mutex_destroy(&server->live.mutex);
    pthread_mutex_destroy(&server->health.mutex);
    pthread_mutex_destroy(&server->regions.mutex);
    pthread_mutex_destroy(&server->conns.mutex);
    pthread_mutex_destroy(&server->ops.mutex);
    kvt_free(server);
    grpc_shutdown_blocking();
    return NULL;
}

void kvt_server_stats(const struct kvt_server *server, struct kvt_server_stats *ret_stats)
{
    *ret_stats = (struct kvt_server_stats){
        .connections = atomic_load(&server->stats.connections),
        .connections_refused = atomic_load(&server->stats.connections_refused),
        .ops_refused = atomic_load(&server->stats.ops_refused),
        .requests = atomic_load(&server->stats.requests),
        .bad_requests = atomic_load(&server->stats.bad_requests),
        .sessions = atomic_load(&server->stats.sessions),
    };
}
