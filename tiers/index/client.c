#include "tiers/index/client.h"

#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "daemon/base/alloc.h"
#include "daemon/base/bytes.h"
#include "daemon/base/clock.h"
#include "tiers/worker.h"

static struct kvt_index_client *client_of(struct kvt_index *base)
{
    return (struct kvt_index_client *)base;
}

/* ---- puts ----------------------------------------------------------------------------------- */

/* The thread sleeps while a batch gathers: it is woken by what begins a batch and by what ends the
 * wait. The fence pairs with that of the thread's doorbell: either it sees the new put before it
 * sleeps, or what it had taken is seen here. */
static void wake_for_put(struct kvt_index_client *client, uint64_t bytes, bool is_urgent)
{
    uint64_t used;

    if (is_urgent)
        atomic_store_explicit(&client->is_urgent, true, memory_order_release);
    atomic_thread_fence(memory_order_seq_cst);
    used = kvt_byte_ring_used(&client->puts);
    if (is_urgent || used <= bytes ||
        (used >= KVT_INDEX_BATCH_BYTES && used - bytes < KVT_INDEX_BATCH_BYTES))
        kvt_doorbell_ring(&client->bell);
}

static int client_put(struct kvt_index *base, const struct kvt_index_put *put, uint64_t *ret_seq)
{
    struct kvt_index_client *client = client_of(base);
    bool is_catalog = put->kind == KVT_INDEX_PUT_CATALOG;

    if (!atomic_load_explicit(&client->is_lost, memory_order_acquire)) {
        uint32_t bytes;

        if (!client->is_ready && !is_catalog)
            return KVT_INDEX_E_FULL;
        if (kvt_index_put_bytes(put) > client->puts.capacity - kvt_byte_ring_used(&client->puts))
            return KVT_INDEX_E_FULL;
        bytes = kvt_wire_encode_put(client->put_frame, put, client->seq + 1);
        KVT_ASSERT(kvt_byte_ring_put(&client->puts, client->put_frame, bytes) == 0);
        wake_for_put(client, bytes, is_catalog || put->kind == KVT_INDEX_PUT_SYNC);
    }
    client->seq++;
    if (ret_seq != NULL)
        *ret_seq = client->seq;
    return 0;
}

static uint64_t client_room_bytes(const struct kvt_index *base)
{
    const struct kvt_index_client *client = (const struct kvt_index_client *)base;

    if (atomic_load_explicit(&client->is_lost, memory_order_acquire))
        return client->puts.capacity;
    return client->is_ready ? client->puts.capacity - kvt_byte_ring_used(&client->puts) : 0;
}

/* ---- events --------------------------------------------------------------------------------- */

/* The thread waits for half of the ring when there was no room: this is the half. */
static void wake_for_room(struct kvt_index_client *client, uint64_t used_before, uint64_t bytes)
{
    uint64_t half = client->events.capacity / 2;

    if (used_before > half && used_before - bytes <= half)
        kvt_doorbell_ring(&client->bell);
}

static void event_fill(struct kvt_index_client *client, struct kvt_index_event *event)
{
    const struct kvt_wire_message *message = &client->event;

    switch (message->kind) {
    case KVT_INDEX_PUT_ROW:
    case KVT_INDEX_PUT_COPY:
        event->kind =
            message->kind == KVT_INDEX_PUT_ROW ? KVT_INDEX_EVENT_ROW : KVT_INDEX_EVENT_COPY;
        event->put = message->put;
        break;
    case KVT_WIRE_LOADED:
        event->kind = KVT_INDEX_EVENT_LOADED;
        event->loaded = message->loaded;
        memcpy(event->why, message->why, sizeof(event->why));
        client->is_ready = true;
        break;
    case KVT_WIRE_COMMITTED:
        event->kind = KVT_INDEX_EVENT_COMMITTED;
        event->seq = message->seq;
        event->refused = message->refused;
        event->refused_catalogs = message->refused_catalogs;
        break;
    default:
        KVT_ASSERT(message->kind == KVT_WIRE_FAILED);
        event->kind = KVT_INDEX_EVENT_FAILED;
        event->error = message->error;
        memcpy(event->why, message->why, sizeof(event->why));
    }
    static_assert(sizeof(event->why) == sizeof(message->why), "texts are as long here as there");
}

static bool client_next(struct kvt_index *base, struct kvt_index_event *ret_event)
{
    struct kvt_index_client *client = client_of(base);
    uint64_t used = kvt_byte_ring_used(&client->events);
    uint32_t bytes;

    if (used == 0)
        return false;
    kvt_byte_ring_peek(&client->events, client->event_frame, KVT_WIRE_HEADER_BYTES);
    bytes = kvt_wire_bytes(client->event_frame);
    KVT_ASSERT(bytes <= KVT_WIRE_BYTES_MAX);
    kvt_byte_ring_peek(&client->events, client->event_frame, bytes);
    kvt_byte_ring_drop(&client->events, bytes);
    wake_for_room(client, used, bytes);
    KVT_ASSERT(kvt_wire_parse(client->event_frame, &client->event) == 0); /* the thread did too */
    *ret_event = (struct kvt_index_event){0};
    event_fill(client, ret_event);
    return true;
}

/* ---- open and close ------------------------------------------------------------------------- */

void kvt_index_client_free(struct kvt_index_client *client)
{
    if (client == NULL)
        return;
    kvt_byte_ring_deinit(&client->puts);
    kvt_byte_ring_deinit(&client->events);
    kvt_doorbell_deinit(&client->bell);
    kvt_free(client->in);
    kvt_free(client->out);
    kvt_free((char *)client->config.path);
    kvt_free((char *)client->config.helper_path);
    kvt_free((char *)client->config.data_path);
    kvt_free(client);
}

/* Waits for the thread's end. True: it is still in a call of the owner's after @until_ns, and has
 * the client from now on. All other waits of the thread are bounded. */
static bool is_left_behind(struct kvt_index_client *client, uint64_t until_ns)
{
    const struct timespec pause = {.tv_nsec = KVT_NS_PER_MS};

    while (!atomic_load_explicit(&client->is_over, memory_order_seq_cst)) {
        int in_call = KVT_INDEX_IN_CALL;

        if (kvt_clock_mono_ns() >= until_ns &&
            atomic_compare_exchange_strong(&client->owner, &in_call, KVT_INDEX_LEFT))
            return true;
        (void)nanosleep(&pause, NULL);
    }
    return false;
}

static void client_close(struct kvt_index *base)
{
    struct kvt_index_client *client = client_of(base);
    pthread_t thread = client->thread;

    atomic_store_explicit(&client->is_closing, true, memory_order_seq_cst);
    kvt_doorbell_ring(&client->bell);
    if (is_left_behind(client, kvt_time_add(kvt_clock_mono_ns(), client->config.close_ns))) {
        KVT_ASSERT(pthread_detach(thread) == 0);
        return;
    }
    KVT_ASSERT(pthread_join(thread, NULL) == 0);
    kvt_index_client_free(client);
}

static const struct kvt_index_ops client_ops = {
    .put = client_put, .next = client_next, .room_bytes = client_room_bytes, .close = client_close};

static int client_fill(struct kvt_index_client *client, const struct kvt_index_config *config)
{
    const char *data_path = config->data_path != NULL ? config->data_path : "";
    int r;

    client->base.ops = &client_ops;
    client->bell = KVT_DOORBELL_NULL;
    client->process = KVT_PROCESS_NULL;
    client->batch_due_ns = client->close_by_ns = client->answer_by_ns = KVT_TIME_NEVER_NS;
    client->config = *config;
    client->config.path = kvt_alloc_text(config->path);
    client->config.helper_path = kvt_alloc_text(config->helper_path);
    client->config.data_path = kvt_alloc_text(data_path);
    if (client->config.commit_ns == 0)
        client->config.commit_ns = KVT_INDEX_COMMIT_NS;
    if (client->config.close_ns == 0)
        client->config.close_ns = KVT_INDEX_CLOSE_NS;
    if (client->config.hang_ns == 0)
        client->config.hang_ns = KVT_INDEX_HANG_NS;
    client->in = kvt_alloc_aligned(8, KVT_INDEX_SOCKET_BYTES);
    client->out = kvt_alloc_aligned(8, KVT_INDEX_SOCKET_BYTES);
    if (client->config.path == NULL || client->config.helper_path == NULL ||
        client->config.data_path == NULL || client->in == NULL || client->out == NULL)
        return kvt_trace(-ENOMEM);
    r = kvt_byte_ring_init(&client->puts, KVT_INDEX_PUT_RING_BYTES);
    if (r == 0)
        r = kvt_byte_ring_init(&client->events, KVT_INDEX_EVENT_RING_BYTES);
    if (r == 0)
        r = kvt_doorbell_init(&client->bell);
    return r;
}

static int client_start(struct kvt_index_client *client)
{
    const char *slash = strrchr(client->config.path, '/');
    char name[16]; /* of a thread, as long as the kernel allows */

    (void)snprintf(name, sizeof(name), "index/%.9s",
                   slash != NULL ? slash + 1 : client->config.path);
    client->opened_ns = kvt_clock_mono_ns();
    return kvt_worker_thread(&client->thread, name, kvt_index_pump, client);
}

int kvt_index_open(struct kvt_index **ret_index, const struct kvt_index_config *config)
{
    struct kvt_index_client *client;
    int r;

    if (strlen(config->path) >= KVT_WIRE_PATH_BYTES ||
        (config->data_path != NULL && strlen(config->data_path) >= KVT_WIRE_PATH_BYTES))
        return kvt_trace(-ENAMETOOLONG);
    if (access(config->helper_path, X_OK) != 0)
        return kvt_trace(-errno);
    client = kvt_alloc_aligned(KVT_CACHE_LINE_BYTES, sizeof(*client));
    if (client == NULL)
        return kvt_trace(-ENOMEM);
    r = client_fill(client, config);
    if (r == 0)
        r = client_start(client);
    if (r < 0) {
        kvt_index_client_free(client);
        return r;
    }
    *ret_index = &client->base;
    return 0;
}
