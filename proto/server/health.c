/* The standard health service. Check is an op like others. Watch streams share one poll of the
 * service, once a second while there is a watcher; each stream sends what differs from what it
 * sent last. */
#include <string.h>

#include "proto/server/internal.h"

bool kvt_health_is_known(const char *name)
{
    return strcmp(name, "") == 0 || strcmp(name, "kvtier.v1.KvTier") == 0 ||
           strcmp(name, "kvtier.v1.KvTierAdmin") == 0;
}

int kvt_health_init(struct kvt_server *server)
{
    int r;

    kvt_list_init(&server->health.watchers);
    atomic_init(&server->health.status, -1);
    r = kvt_arena_init(&server->health.arena, 64 * KVT_KIB, 0);
    return r < 0 ? kvt_trace(r) : 0;
}

void kvt_health_deinit(struct kvt_server *server)
{
    kvt_arena_deinit(&server->health.arena);
}

static void poll_done(struct kvt_op *op)
{
    struct kvt_server *server = op->server;
    bool is_serving = op->code == KVT_CODE_OK && op->ans.health.is_serving;

    pthread_mutex_lock(&server->health.mutex);
    atomic_store(&server->health.status, is_serving ? KVT_HEALTH_SERVING : KVT_HEALTH_NOT_SERVING);
    server->health.is_polling = false;
    kvt_list_for_each (link, &server->health.watchers)
        kvt_call_wake(KVT_CONTAINER_OF(link, struct kvt_call, watch_link));
    pthread_mutex_unlock(&server->health.mutex);
    kvt_live_add(server, 0, -1, 0);
}

void kvt_health_poll(struct kvt_server *server)
{
    const struct kvt_service *service = server->config.service;
    struct kvt_op *op = &server->health.op;
    bool is_mine;

    pthread_mutex_lock(&server->health.mutex);
    is_mine = server->health.watchers_count > 0 && !server->health.is_polling;
    server->health.is_polling |= is_mine;
    pthread_mutex_unlock(&server->health.mutex);
    if (!is_mine)
        return;
    kvt_live_add(server, 0, 1, 0);
    kvt_arena_reset(&server->health.arena);
    op->kind = KVT_OP_HEALTH;
    op->deadline_ns = kvt_time_add(kvt_clock_mono_ns(), server->config.deadline_ns_max);
    op->arena = &server->health.arena;
    op->code = KVT_CODE_OK;
    memset(&op->ans, 0, sizeof(op->ans));
    op->done = poll_done;
    op->server = server;
    if (service->submit(service->ctx, op) != 0) { /* full: the next second will do */
        pthread_mutex_lock(&server->health.mutex);
        server->health.is_polling = false;
        pthread_mutex_unlock(&server->health.mutex);
        kvt_live_add(server, 0, -1, 0);
    }
}

bool kvt_health_watch(struct kvt_call *call)
{
    struct kvt_server *server = call->server;
    bool is_full;

    pthread_mutex_lock(&server->health.mutex);
    is_full = server->health.watchers_count >= KVT_SERVER_WATCHERS_MAX;
    if (!is_full) {
        kvt_list_push_back(&server->health.watchers, &call->watch_link);
        server->health.watchers_count++;
    }
    pthread_mutex_unlock(&server->health.mutex);
    if (is_full)
        return false;
    kvt_health_poll(server);
    kvt_call_wake(call);
    return true;
}

void kvt_health_unwatch(struct kvt_call *call)
{
    struct kvt_server *server = call->server;

    pthread_mutex_lock(&server->health.mutex);
    if (!kvt_list_is_empty(&call->watch_link)) {
        kvt_list_remove(&call->watch_link);
        server->health.watchers_count--;
    }
    pthread_mutex_unlock(&server->health.mutex);
}

void kvt_health_pump(struct kvt_call *call)
{
    int status = call->is_name_unknown ? (int)KVT_HEALTH_SERVICE_UNKNOWN
                                       : atomic_load(&call->server->health.status);
    uint8_t at[16];

    if (call->is_stream_ended) {
        kvt_call_send_final(call, NULL, KVT_CODE_CANCELLED, "the watch ended");
    } else if (status >= 0 && status != call->watch_sent) {
        call->watch_sent = status;
        kvt_call_send_bytes(call, at,
                            kvt_codec_write_health_answer((enum kvt_health_status)status, at));
    }
}
