/* The index's thread. It blocks in four ways only: asleep on its doorbell and the socket, in the
 * owner's data_sync and catalog_write, and while it reaps a helper that ends. Whatever it waits
 * for, close is noticed; from then on the last commit has close_ns. A helper that takes nothing, or
 * does not answer a COMMIT, for hang_ns is killed: a load may take as long as it likes.
 *
 * Functions that go on return 0. Positive results end what is under way: the helper is gone or says
 * that its index is bad (a load begins again, once, with a rebuild), or it is over: closed or lost.
 */
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "daemon/base/bytes.h"
#include "daemon/base/clock.h"
#include "tiers/index/client.h"

#define PUMP_E_NONE 1 /* nothing there now */
#define PUMP_E_GONE 2 /* the helper is; why says how */
#define PUMP_E_BAD 3  /* the helper says that the index is not usable */
#define PUMP_E_OVER 4 /* closed or lost */
#define PUMP_E_LOADED 5

#define SAY_BYTES 512u /* the longest frame that the thread itself makes, but for HELLO */

static void count(_Atomic uint64_t *counter, uint64_t by)
{
    atomic_fetch_add_explicit(counter, by, memory_order_relaxed);
}

static void set(_Atomic uint64_t *counter, uint64_t value)
{
    atomic_store_explicit(counter, value, memory_order_relaxed);
}

static void set_state(struct kvt_index_client *client, enum kvt_index_state state)
{
    atomic_store_explicit(&client->base.counters.state, (uint32_t)state, memory_order_relaxed);
}

static bool is_closing(const struct kvt_index_client *client)
{
    return atomic_load_explicit(&client->is_closing, memory_order_seq_cst);
}

/* ---- sleep ---------------------------------------------------------------------------------- */

/* Each wait has its own condition not to begin; all of them are over when close_by_ns passes. */
static bool is_close_new(const struct kvt_index_client *client)
{
    return is_closing(client) && client->close_by_ns == KVT_TIME_NEVER_NS;
}

static bool has_room(const struct kvt_index_client *client)
{
    return is_closing(client) || kvt_byte_ring_used(&client->events) <= client->events.capacity / 2;
}

static bool has_puts(const struct kvt_index_client *client)
{
    return is_closing(client) || kvt_byte_ring_used(&client->puts) > 0;
}

static bool is_batch_due(const struct kvt_index_client *client)
{
    uint64_t used = kvt_byte_ring_used(&client->puts);

    return is_closing(client) || atomic_load_explicit(&client->is_urgent, memory_order_acquire) ||
           used >= KVT_INDEX_BATCH_BYTES || (used > 0 && client->batch_due_ns == KVT_TIME_NEVER_NS);
}

static void ring_engine(struct kvt_index_client *client)
{
    if (!client->is_engine_due)
        return;
    client->is_engine_due = false;
    kvt_doorbell_ring(client->config.doorbell);
}

static void sleep_on(struct kvt_index_client *client, short socket_events, uint64_t until_ns,
                     bool (*is_awake)(const struct kvt_index_client *client))
{
    struct pollfd fds[2] = {
        {.fd = client->bell.fd, .events = POLLIN},
        {.fd = socket_events != 0 ? client->process.fd : -1, .events = socket_events},
    };
    uint64_t now_ns;

    ring_engine(client);
    kvt_doorbell_arm(&client->bell);
    now_ns = kvt_clock_mono_ns();
    if (!is_awake(client) && now_ns < until_ns) {
        struct timespec left = {.tv_sec = (time_t)((until_ns - now_ns) / KVT_NS_PER_S),
                                .tv_nsec = (long)((until_ns - now_ns) % KVT_NS_PER_S)};

        (void)ppoll(fds, 2, until_ns == KVT_TIME_NEVER_NS ? NULL : &left, NULL);
    }
    kvt_doorbell_disarm(&client->bell);
}

static int no_answer(struct kvt_index_client *client);

/* Waits for the socket. 0, PUMP_E_OVER: closing took too long; or PUMP_E_GONE: so did the helper.
 */
static int wait_socket(struct kvt_index_client *client, short events)
{
    if (is_close_new(client))
        client->close_by_ns = kvt_time_add(kvt_clock_mono_ns(), client->config.close_ns);
    if (kvt_clock_mono_ns() >= client->close_by_ns)
        return PUMP_E_OVER;
    if (kvt_clock_mono_ns() >= client->answer_by_ns)
        return no_answer(client);
    sleep_on(client, events, KVT_MIN(client->close_by_ns, client->answer_by_ns), is_close_new);
    return 0;
}

static void expect_answer(struct kvt_index_client *client)
{
    client->answer_by_ns = kvt_time_add(kvt_clock_mono_ns(), client->config.hang_ns);
}

/* ---- events for the engine ------------------------------------------------------------------ */

static void tell(struct kvt_index_client *client, const uint8_t *frame, uint32_t bytes)
{
    while (kvt_byte_ring_put(&client->events, frame, bytes) != 0) {
        if (is_closing(client))
            return; /* nobody listens any more */
        client->is_engine_due = true;
        sleep_on(client, 0, KVT_TIME_NEVER_NS, has_room);
    }
    client->is_engine_due = true;
}

static void tell_message(struct kvt_index_client *client, const struct kvt_wire_message *message)
{
    _Alignas(8) uint8_t frame[SAY_BYTES];

    tell(client, frame, kvt_wire_encode(frame, message));
}

static KVT_PRINTF(2, 3) void why_set(struct kvt_index_client *client, const char *format, ...)
{
    va_list args;

    va_start(args, format);
    (void)vsnprintf(client->why, sizeof(client->why), format, args);
    va_end(args);
}

/* The index is lost, for the reason in `why`. */
static int lose(struct kvt_index_client *client, int error)
{
    struct kvt_wire_message *message = &client->message;

    message->kind = KVT_WIRE_FAILED;
    message->seq = 0;
    message->error = error;
    memcpy(message->why, client->why, sizeof(message->why));
    atomic_store_explicit(&client->is_lost, true, memory_order_release);
    set_state(client, KVT_INDEX_LOST);
    tell_message(client, message);
    ring_engine(client); /* the helper's end may take a while */
    return PUMP_E_OVER;
}

/* ---- the helper ----------------------------------------------------------------------------- */

static void end_helper(struct kvt_index_client *client, uint64_t grace_ns,
                       char text[KVT_PROCESS_TEXT_BYTES])
{
    int signal_number = kvt_process_end(&client->process, grace_ns, text);

    atomic_store(&client->helper_pid, 0);
    client->error = signal_number != 0 ? signal_number : -EPIPE;
}

static int gone(struct kvt_index_client *client)
{
    char text[KVT_PROCESS_TEXT_BYTES];

    end_helper(client, KVT_INDEX_GRACE_NS, text);
    why_set(client, "helper %s", text);
    return PUMP_E_GONE;
}

static int no_answer(struct kvt_index_client *client)
{
    char text[KVT_PROCESS_TEXT_BYTES];

    end_helper(client, 0, text);
    client->error = -ETIMEDOUT;
    why_set(client, "helper did not answer for %.1f s", (double)client->config.hang_ns / 1e9);
    return PUMP_E_GONE;
}

static int is_no_frame(struct kvt_index_client *client)
{
    char text[KVT_PROCESS_TEXT_BYTES];

    end_helper(client, 0, text);
    client->error = -EPROTO;
    why_set(client, "helper does not speak our protocol");
    return PUMP_E_GONE;
}

/* One frame out of what was received, into message, frame and frame_bytes. */
static int take_frame(struct kvt_index_client *client)
{
    const uint8_t *at = client->in + client->in_at;
    uint32_t bytes;
    int r = kvt_wire_check(at, client->in_end - client->in_at, &bytes);

    if (r == KVT_WIRE_E_SHORT)
        return PUMP_E_NONE;
    if (r != 0)
        return is_no_frame(client);
    memcpy(client->work_frame, at, bytes);
    if (kvt_wire_parse(client->work_frame, &client->message) != 0)
        return is_no_frame(client);
    client->frame = at;
    client->frame_bytes = bytes;
    client->in_at += bytes;
    return 0;
}

static int fill_in(struct kvt_index_client *client)
{
    ssize_t got;

    memmove(client->in, client->in + client->in_at, client->in_end - client->in_at);
    client->in_end -= client->in_at;
    client->in_at = 0;
    do
        got = recv(client->process.fd, client->in + client->in_end,
                   KVT_INDEX_SOCKET_BYTES - client->in_end, MSG_DONTWAIT);
    while (got < 0 && errno == EINTR);
    if (got > 0) {
        client->in_end += (uint64_t)got;
        return 0;
    }
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
        return PUMP_E_NONE;
    return gone(client);
}

/* The next message, PUMP_E_NONE or PUMP_E_GONE; a FAILED is the latter, its text in why. */
static int receive(struct kvt_index_client *client)
{
    char text[KVT_PROCESS_TEXT_BYTES];
    int r;

    while ((r = take_frame(client)) == PUMP_E_NONE) {
        r = fill_in(client);
        if (r != 0)
            return r;
    }
    if (r == 0 && client->message.kind == KVT_WIRE_FAILED) {
        end_helper(client, KVT_INDEX_GRACE_NS, text);
        client->error = client->message.error;
        memcpy(client->why, client->message.why, sizeof(client->why));
        return PUMP_E_GONE;
    }
    return r;
}

/* The helper takes nothing any more: what it said before that is why. */
static int read_last_words(struct kvt_index_client *client)
{
    int r = 0;

    while (r == 0) {
        r = receive(client);
        if (r == PUMP_E_NONE)
            r = wait_socket(client, POLLIN);
    }
    return r;
}

static int flush_out(struct kvt_index_client *client)
{
    uint64_t at = 0;
    int r = 0;

    expect_answer(client);
    while (r == 0 && at < client->out_end) {
        ssize_t sent = send(client->process.fd, client->out + at, client->out_end - at,
                            MSG_DONTWAIT | MSG_NOSIGNAL);

        if (sent >= 0) {
            at += (uint64_t)sent;
            expect_answer(client);
        } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
            r = wait_socket(client, POLLOUT);
        } else if (errno != EINTR) {
            r = read_last_words(client);
        }
    }
    client->out_end = 0;
    return r;
}

/* Makes room for one more frame in `out`. */
static int out_reserve(struct kvt_index_client *client)
{
    return client->out_end + KVT_WIRE_BYTES_MAX > KVT_INDEX_SOCKET_BYTES ? flush_out(client) : 0;
}

static int say(struct kvt_index_client *client, const struct kvt_wire_message *message)
{
    uint8_t *at;
    int r = out_reserve(client);

    if (r != 0)
        return r;
    at = client->out + client->out_end;
    client->out_end += kvt_wire_encode(at, message);
    kvt_wire_seal(at);
    return flush_out(client);
}

/* ---- the owner's calls ---------------------------------------------------------------------- */

static void call_begin(struct kvt_index_client *client)
{
    atomic_store(&client->owner, KVT_INDEX_IN_CALL);
}

/* Close may have given up on the call: then all that is left of the index ends here. */
static void call_end(struct kvt_index_client *client)
{
    char text[KVT_PROCESS_TEXT_BYTES];
    int in_call = KVT_INDEX_IN_CALL;

    if (atomic_compare_exchange_strong(&client->owner, &in_call, KVT_INDEX_RUNNING))
        return;
    end_helper(client, 0, text);
    kvt_index_client_free(client);
    pthread_exit(NULL);
}

/* ---- batches -------------------------------------------------------------------------------- */

static int sync_data(struct kvt_index_client *client)
{
    int r;

    if (client->is_data_synced)
        return 0;
    call_begin(client);
    r = client->config.data_sync(client->config.ctx);
    call_end(client);
    if (r < 0) {
        why_set(client, "data cannot be synchronised: %s", strerror(-r));
        return lose(client, r);
    }
    client->is_data_synced = true;
    return 0;
}

/* Waits for the answer to COMMIT. */
static int wait_committed(struct kvt_index_client *client)
{
    int r;

    expect_answer(client);
    while ((r = receive(client)) == PUMP_E_NONE) {
        r = wait_socket(client, POLLIN);
        if (r == PUMP_E_OVER)
            return r;
        if (r != 0)
            break;
    }
    if (r != 0)
        return lose(client, client->error);
    if (client->message.kind != KVT_WIRE_COMMITTED || client->message.seq != client->batch_seq) {
        (void)is_no_frame(client);
        return lose(client, client->error);
    }
    client->refused_puts = client->message.refused;
    set(&client->base.counters.used_bytes, client->message.used_bytes);
    set(&client->base.counters.capacity_bytes, client->message.capacity_bytes);
    return 0;
}

/* Makes all that was put up to batch_seq durable, and says so. */
static int commit(struct kvt_index_client *client)
{
    struct kvt_wire_message *message = &client->message;
    int r;

    if (client->batch_seq == client->committed_seq)
        return 0;
    r = sync_data(client);
    if (r == 0 && client->sent_count > 0) {
        message->kind = KVT_WIRE_COMMIT;
        message->seq = client->batch_seq;
        r = say(client, message);
        if (r == PUMP_E_GONE)
            return lose(client, client->error);
        if (r == 0)
            r = wait_committed(client);
    }
    if (r != 0)
        return r;
    client->sent_count = 0;
    client->committed_seq = client->batch_seq;
    message->kind = KVT_WIRE_COMMITTED;
    message->seq = client->committed_seq;
    message->refused = client->refused_puts + client->refused_catalogs;
    message->refused_catalogs = client->refused_catalogs;
    message->used_bytes = message->capacity_bytes = 0;
    count(&client->base.counters.commits, 1);
    set(&client->base.counters.refused, message->refused);
    tell_message(client, message);
    ring_engine(client); /* the next batch may be due already, and begins with a sync */
    return 0;
}

/* What was put before is committed before, what is put later is committed after it is durable. */
static int write_catalog(struct kvt_index_client *client, uint32_t bytes, uint64_t seq)
{
    const struct kvt_index_put *put = &client->message.put;
    int r = client->sent_count > 0 ? commit(client) : 0;

    if (r != 0)
        return r;
    kvt_byte_ring_peek(&client->puts, client->work_frame, bytes);
    KVT_ASSERT(kvt_wire_parse(client->work_frame, &client->message) == 0);
    call_begin(client);
    r = client->config.catalog_write(client->config.ctx, put->catalog_number, put->catalog_data,
                                     put->catalog_bytes);
    call_end(client);
    if (r < 0)
        client->refused_catalogs++;
    client->is_data_synced = false;
    client->batch_seq = seq;
    return 0;
}

static int send_put(struct kvt_index_client *client, uint32_t bytes, uint16_t kind, uint64_t seq)
{
    struct kvt_index_counters *counters = &client->base.counters;
    uint8_t *at;
    int r = sync_data(client);

    if (r != 0)
        return r;
    r = out_reserve(client);
    if (r != 0)
        return r == PUMP_E_GONE ? lose(client, client->error) : r;
    at = client->out + client->out_end;
    kvt_byte_ring_peek(&client->puts, at, bytes);
    kvt_wire_seal(at);
    client->out_end += bytes;
    client->sent_count++;
    client->batch_seq = seq;
    count(kind == KVT_INDEX_PUT_ROW    ? &counters->rows_put
          : kind == KVT_INDEX_PUT_COPY ? &counters->copies_put
                                       : &counters->drops,
          1);
    return 0;
}

/* All that the ring holds now. */
static int batch(struct kvt_index_client *client)
{
    uint64_t left;
    int r = 0;

    client->batch_due_ns = KVT_TIME_NEVER_NS;
    client->is_data_synced = false;
    (void)atomic_exchange_explicit(&client->is_urgent, false, memory_order_acq_rel);
    left = kvt_byte_ring_used(&client->puts);
    while (r == 0 && left > 0) {
        uint8_t header[KVT_WIRE_HEADER_BYTES];
        uint32_t bytes;
        uint16_t kind;

        kvt_byte_ring_peek(&client->puts, header, sizeof(header));
        bytes = kvt_wire_bytes(header);
        kind = kvt_get_u16(header, 4);
        KVT_ASSERT(bytes <= left);
        if (kind == KVT_INDEX_PUT_CATALOG)
            r = write_catalog(client, bytes, kvt_get_u64(header, 8));
        else if (kind == KVT_INDEX_PUT_SYNC)
            client->batch_seq = kvt_get_u64(header, 8);
        else
            r = send_put(client, bytes, kind, kvt_get_u64(header, 8));
        if (r == 0)
            kvt_byte_ring_drop(&client->puts, bytes);
        left -= bytes;
    }
    return r == 0 ? commit(client) : r;
}

/* Sleeps until a batch is due. What the helper says in between can only be that it ends. */
static int wait_batch(struct kvt_index_client *client)
{
    for (;;) {
        int r = receive(client);

        if (r == 0)
            r = is_no_frame(client);
        if (r != PUMP_E_NONE)
            return lose(client, client->error);
        if (client->batch_due_ns == KVT_TIME_NEVER_NS && kvt_byte_ring_used(&client->puts) > 0)
            client->batch_due_ns = kvt_time_add(kvt_clock_mono_ns(), client->config.commit_ns);
        if (is_batch_due(client) || kvt_clock_mono_ns() >= client->batch_due_ns)
            return 0;
        sleep_on(client, POLLIN, client->batch_due_ns, is_batch_due);
    }
}

static int serve(struct kvt_index_client *client)
{
    int r = wait_batch(client);
    bool is_last = is_closing(client); /* before the look at what there is to commit */

    if (r == 0)
        r = batch(client);
    return r == 0 && is_last ? PUMP_E_OVER : r;
}

/* ---- load ----------------------------------------------------------------------------------- */

static int start_helper(struct kvt_index_client *client, bool is_rebuild)
{
    struct kvt_wire_message *message = &client->message;
    int r = kvt_process_start(&client->process, client->config.helper_path);

    if (r < 0) {
        why_set(client, "helper %.100s cannot be started: %s", client->config.helper_path,
                strerror(-r));
        return lose(client, r);
    }
    atomic_store(&client->helper_pid, client->process.pid);
    client->in_at = client->in_end = client->out_end = 0;
    client->has_rows = false;
    message->kind = KVT_WIRE_HELLO;
    message->seq = 0;
    message->hello = client->config;
    message->hello.is_rebuild_wanted = is_rebuild;
    set_state(client, is_rebuild ? KVT_INDEX_SCANNING : KVT_INDEX_LOADING);
    return say(client, message);
}

static void note_progress(struct kvt_index_client *client)
{
    const struct kvt_wire_message *message = &client->message;
    struct kvt_index_counters *counters = &client->base.counters;

    set(&counters->scan_bytes, message->scan_bytes);
    set(&counters->scan_total_bytes, message->scan_total_bytes);
    set(&counters->load_total_rows, message->rows_total);
    set(&counters->used_bytes, message->used_bytes);
    set(&counters->capacity_bytes, message->capacity_bytes);
    set_state(client, message->scan_bytes < message->scan_total_bytes ? KVT_INDEX_SCANNING
                                                                      : KVT_INDEX_LOADING);
}

static void note_loaded(struct kvt_index_client *client, const char *reason)
{
    struct kvt_wire_message *message = &client->message;

    message->loaded.took_ns = kvt_clock_mono_ns() - client->opened_ns;
    if (reason[0] != '\0') {
        memcpy(client->why, message->why, sizeof(client->why));
        (void)snprintf(message->why, sizeof(message->why), "%.79s: %.78s", reason,
                       client->why[0] != '\0' ? client->why : "the index was made anew");
    }
    set(&client->base.counters.load_ns, message->loaded.took_ns);
    set_state(client, KVT_INDEX_READY);
    tell_message(client, message);
}

/* What a helper says while it loads. PUMP_E_LOADED: it has. */
static int load_message(struct kvt_index_client *client, const char *reason)
{
    switch (client->message.kind) {
    case KVT_INDEX_PUT_ROW:
        count(&client->base.counters.loaded_rows, 1);
        client->has_rows = true;
        tell(client, client->frame, client->frame_bytes);
        return 0;
    case KVT_INDEX_PUT_COPY:
        tell(client, client->frame, client->frame_bytes);
        return 0;
    case KVT_WIRE_PROGRESS:
        note_progress(client);
        return 0;
    case KVT_WIRE_LOADED:
        note_loaded(client, reason);
        return PUMP_E_LOADED;
    case KVT_WIRE_BAD:
        memcpy(client->why, client->message.why, sizeof(client->why));
        return PUMP_E_BAD;
    default:
        return is_no_frame(client);
    }
}

/* One helper, from its start to LOADED. */
static int load_once(struct kvt_index_client *client, bool is_rebuild, const char *reason)
{
    int r = start_helper(client, is_rebuild);

    while (r == 0) {
        if (kvt_byte_ring_used(&client->puts) > 0)
            r = batch(client); /* records of the catalog: nothing else is taken yet */
        if (r == 0 && is_closing(client))
            r = PUMP_E_OVER;
        if (r != 0)
            break;
        r = receive(client);
        if (r == 0) {
            r = load_message(client, reason);
        } else if (r == PUMP_E_NONE) {
            sleep_on(client, POLLIN, KVT_TIME_NEVER_NS, has_puts);
            r = 0;
        }
    }
    return r == PUMP_E_LOADED ? 0 : r;
}

/* A helper that dies, or calls its index bad, is followed by one that makes it anew, unless rows
 * were told already: they cannot be taken back. Then the next start is to find no index. A helper
 * that says what went wrong (no room, no permission) would say it again. */
static int load(struct kvt_index_client *client)
{
    char reason[KVT_WIRE_WHY_BYTES] = "", text[KVT_PROCESS_TEXT_BYTES];
    bool is_rebuild = client->config.is_rebuild_wanted;

    for (;;) {
        int r = load_once(client, is_rebuild, reason);
        bool is_dead = r == PUMP_E_GONE && (client->error > 0 || client->error == -EPIPE);

        if (r != PUMP_E_GONE && r != PUMP_E_BAD)
            return r;
        if (r == PUMP_E_BAD) {
            end_helper(client, KVT_INDEX_GRACE_NS, text);
            client->error = -EUCLEAN;
        }
        if (is_dead && client->has_rows)
            (void)unlink(client->config.path);
        if (is_rebuild || client->has_rows || (r == PUMP_E_GONE && !is_dead))
            return lose(client, client->error);
        memcpy(reason, client->why, sizeof(reason));
        is_rebuild = true;
    }
}

void *kvt_index_pump(void *ctx)
{
    struct kvt_index_client *client = ctx;
    char text[KVT_PROCESS_TEXT_BYTES];
    int r = load(client);
    bool was_loaded = r == 0;

    while (r == 0)
        r = serve(client);
    /* A load has nothing to lose: it need not end by itself. */
    end_helper(client, was_loaded ? KVT_INDEX_GRACE_NS : 0, text);
    while (!is_closing(client))
        sleep_on(client, 0, KVT_TIME_NEVER_NS, is_closing);
    atomic_store_explicit(&client->is_over, true, memory_order_seq_cst);
    return NULL;
}
