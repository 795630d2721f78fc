/* The reply thread: the service's thread only puts a call on a ring. With is_reply_inline it gets
 * what takes long to encode. */
#include "proto/server/internal.h"

static void *reply_main(void *arg)
{
    struct kvt_server *server = arg;

    for (;;) {
        struct kvt_call *call = kvt_ring_take(&server->reply.ring);

        if (call == NULL) {
            if (atomic_load(&server->reply.is_stopping))
                return NULL;
            kvt_doorbell_arm(&server->reply.bell);
            if (kvt_ring_is_empty(&server->reply.ring) && !atomic_load(&server->reply.is_stopping))
                kvt_doorbell_wait(&server->reply.bell, KVT_TIME_NEVER_NS);
            else
                kvt_doorbell_disarm(&server->reply.bell);
            continue;
        }
        /* Cleared first: a wake from now on queues it again, so that nothing is missed. */
        atomic_store(&call->is_queued, false);
        kvt_call_pump(call);
        kvt_call_unref(call);
    }
}

int kvt_reply_start(struct kvt_server *server)
{
    /* Each call is on the ring at most once: room for all with an op, a session or a watch. */
    uint32_t capacity = server->config.ops_max + KVT_SESSIONS_MAX + KVT_SERVER_WATCHERS_MAX + 64;
    int r;

    r = kvt_ring_init(&server->reply.ring, capacity);
    if (r < 0)
        return kvt_trace(r);
    r = kvt_doorbell_init(&server->reply.bell);
    if (r < 0)
        return kvt_trace(r);
    r = -pthread_create(&server->reply.thread, NULL, reply_main, server);
    if (r < 0)
        return kvt_trace(r);
    server->reply.is_running = true;
    return 0;
}

void kvt_reply_stop(struct kvt_server *server)
{
    if (server->reply.is_running) {
        atomic_store(&server->reply.is_stopping, true);
        kvt_doorbell_ring(&server->reply.bell);
        (void)pthread_join(server->reply.thread, NULL);
        server->reply.is_running = false;
    }
    kvt_doorbell_deinit(&server->reply.bell);
    kvt_ring_deinit(&server->reply.ring);
}

void kvt_reply_queue(struct kvt_server *server, struct kvt_call *call)
{
    int r;

    if (atomic_exchange(&call->is_queued, true))
        return;
    kvt_call_ref(call);
    r = kvt_ring_put(&server->reply.ring, call);
    if (r == 0) {
        kvt_doorbell_ring(&server->reply.bell);
        return;
    }
    /* Health watches that end before they began are bounded by connections and streams only: when
     * the reply thread is behind by a ring of them, whoever wakes the call sends. */
    atomic_store(&call->is_queued, false);
    kvt_call_pump(call);
    kvt_call_unref(call);
}
