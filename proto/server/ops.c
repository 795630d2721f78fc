/* The pool of ops, and the count of what is alive. An op's arena reserves address space only; what
 * a large request touched goes back to the system when the op does, but for a few warm ops that
 * are taken first. */
#include <string.h>

#include "daemon/base/alloc.h"
#include "proto/server/internal.h"

#define WARM_KEEP_BYTES KVT_MIB
#define COLD_KEEP_BYTES (64 * KVT_KIB)

int kvt_ops_init(struct kvt_server *server)
{
    uint32_t count = server->config.ops_max;

    server->ops.all = kvt_alloc_zeroed(count, sizeof(*server->ops.all));
    if (server->ops.all == NULL)
        return kvt_trace(-ENOMEM);
    for (uint32_t i = count; i-- > 0;) {
        struct kvt_pooled_op *pooled = &server->ops.all[i];
        int r;

        pooled->is_warm = i < KVT_SERVER_WARM_OPS;
        r = kvt_arena_init(&pooled->arena, KVT_OP_ARENA_BYTES_MAX,
                           pooled->is_warm ? WARM_KEEP_BYTES : COLD_KEEP_BYTES);
        if (r < 0)
            return kvt_trace(r);
        kvt_list_init(&pooled->link);
        kvt_ops_give(server, pooled);
    }
    return 0;
}

void kvt_ops_deinit(struct kvt_server *server)
{
    for (uint32_t i = 0; server->ops.all != NULL && i < server->config.ops_max; i++)
        kvt_arena_deinit(&server->ops.all[i].arena);
    kvt_free(server->ops.all);
    server->ops.all = NULL;
}

struct kvt_pooled_op *kvt_ops_take(struct kvt_server *server)
{
    struct kvt_pooled_op **head;
    struct kvt_pooled_op *pooled;

    pthread_mutex_lock(&server->ops.mutex);
    head = server->ops.free_warm != NULL ? &server->ops.free_warm : &server->ops.free_cold;
    pooled = *head;
    if (pooled != NULL)
        *head = pooled->next_free;
    pthread_mutex_unlock(&server->ops.mutex);
    if (pooled == NULL)
        return NULL;
    /* Requests and answers are cleared by the codec and by submit: they are large. */
    pooled->op.code = KVT_CODE_OK;
    pooled->op.message[0] = '\0';
    pooled->op.arena = &pooled->arena;
    pooled->op.server = pooled;
    pooled->op.service = NULL;
    pooled->op.progress = NULL;
    atomic_store_explicit(&pooled->op.is_cancelled, false, memory_order_relaxed);
    return pooled;
}

void kvt_ops_give(struct kvt_server *server, struct kvt_pooled_op *pooled)
{
    struct kvt_pooled_op **head;

    kvt_arena_reset(&pooled->arena);
    pooled->call = NULL;
    pthread_mutex_lock(&server->ops.mutex);
    head = pooled->is_warm ? &server->ops.free_warm : &server->ops.free_cold;
    pooled->next_free = *head;
    *head = pooled;
    pthread_mutex_unlock(&server->ops.mutex);
}

void kvt_live_add(struct kvt_server *server, int calls, int ops, int sessions)
{
    pthread_mutex_lock(&server->live.mutex);
    server->live.calls += (uint64_t)(int64_t)calls;
    server->live.ops += (uint64_t)(int64_t)ops;
    server->live.sessions += (uint32_t)sessions;
    if (calls < 0 || ops < 0)
        pthread_cond_broadcast(&server->live.cond);
    pthread_mutex_unlock(&server->live.mutex);
}
