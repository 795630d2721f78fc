#include "tiers/index/helper.h"

#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "daemon/base/alloc.h"
#include "tiers/index/rebuild.h"
#include "tiers/index/wire.h"

#define SOCKET_BYTES (256u << 10)
#define BACKLOG_MS 20 /* without a message for so long, what DROP_OLDs have left is worked off */

#define SCAN_SAID_BYTES (64ull << 20) /* progress of a scan is said as often */

#define HELPER_E_END 1    /* the daemon closed its end */
#define HELPER_E_FAILED 2 /* said FAILED or BAD */

struct helper {
    int fd;
    struct kvt_index_db *db;
    struct kvt_index_db_config config;
    uint64_t refused;
    struct kvt_wire_message message; /* the last that was received */
    struct kvt_wire_message said;    /* the one that is being said */
    uint8_t *in, *out, *frame;
    uint64_t in_at, in_end, out_end;
    uint64_t scan_next_bytes; /* progress of a scan is said from there on */
    struct kvt_index_rebuild_report rebuilt;
};

/* ---- socket --------------------------------------------------------------------------------- */

static int flush_out(struct helper *helper)
{
    uint64_t at = 0;

    while (at < helper->out_end) {
        ssize_t sent = send(helper->fd, helper->out + at, helper->out_end - at, MSG_NOSIGNAL);

        if (sent < 0 && errno != EINTR)
            return HELPER_E_END;
        at += sent < 0 ? 0 : (uint64_t)sent;
    }
    helper->out_end = 0;
    return 0;
}

static int out_reserve(struct helper *helper)
{
    return helper->out_end + KVT_WIRE_BYTES_MAX > SOCKET_BYTES ? flush_out(helper) : 0;
}

static int say_put(struct helper *helper, const struct kvt_index_put *put)
{
    uint8_t *at;
    int r = out_reserve(helper);

    if (r != 0)
        return r;
    at = helper->out + helper->out_end;
    helper->out_end += kvt_wire_encode_put(at, put, 0);
    kvt_wire_seal(at);
    return 0;
}

static int say(struct helper *helper, uint16_t kind, uint64_t seq)
{
    uint8_t *at;
    int r = out_reserve(helper);

    if (r != 0)
        return r;
    helper->said.kind = kind;
    helper->said.seq = seq;
    at = helper->out + helper->out_end;
    helper->out_end += kvt_wire_encode(at, &helper->said);
    kvt_wire_seal(at);
    return flush_out(helper);
}

static KVT_PRINTF(4, 5) int fail(struct helper *helper, uint16_t kind, int error,
                                 const char *format, ...)
{
    va_list args;

    va_start(args, format);
    (void)vsnprintf(helper->said.why, sizeof(helper->said.why), format, args);
    va_end(args);
    helper->said.error = error;
    (void)say(helper, kind, 0);
    return HELPER_E_FAILED;
}

/* Waits for input. False: none came for a while, and there is something to do meanwhile. */
static bool wait_input(struct helper *helper)
{
    struct pollfd pfd = {.fd = helper->fd, .events = POLLIN};
    bool has_work = helper->db != NULL && kvt_index_db_has_backlog(helper->db);

    return poll(&pfd, 1, has_work ? BACKLOG_MS : -1) != 0;
}

static int fill_in(struct helper *helper)
{
    ssize_t got;

    memmove(helper->in, helper->in + helper->in_at, helper->in_end - helper->in_at);
    helper->in_end -= helper->in_at;
    helper->in_at = 0;
    while (!wait_input(helper)) {
        int r = kvt_index_db_commit(helper->db);

        if (r < 0)
            return fail(helper, KVT_WIRE_FAILED, r, "index cannot be written: %s",
                        kvt_index_db_why(helper->db));
    }
    got = recv(helper->fd, helper->in + helper->in_end, SOCKET_BYTES - helper->in_end, 0);
    if (got == 0 || (got < 0 && errno != EINTR))
        return HELPER_E_END;
    helper->in_end += got < 0 ? 0 : (uint64_t)got;
    return 0;
}

static int receive(struct helper *helper)
{
    uint32_t bytes = 0;
    int r;

    while ((r = kvt_wire_check(helper->in + helper->in_at, helper->in_end - helper->in_at,
                               &bytes)) == KVT_WIRE_E_SHORT) {
        r = fill_in(helper);
        if (r != 0)
            return r;
    }
    if (r == 0) {
        memcpy(helper->frame, helper->in + helper->in_at, bytes);
        helper->in_at += bytes;
        r = kvt_wire_parse(helper->frame, &helper->message);
    }
    if (r == KVT_WIRE_E_VERSION)
        return fail(helper, KVT_WIRE_FAILED, -EPROTO,
                    "kvtierd and its helper kvtierd-index are not of the same version");
    if (r != 0)
        return fail(helper, KVT_WIRE_FAILED, -EPROTO, "helper was sent what is no frame");
    return 0;
}

/* ---- load ----------------------------------------------------------------------------------- */

static int say_progress(struct helper *helper)
{
    struct kvt_index_db_stats stats;

    kvt_index_db_stats(helper->db, &stats);
    helper->said.used_bytes = stats.used_bytes;
    helper->said.capacity_bytes = stats.capacity_bytes;
    return say(helper, KVT_WIRE_PROGRESS, 0);
}

static void take_config(struct helper *helper)
{
    const struct kvt_index_config *hello = &helper->message.hello;
    struct kvt_index_db_config *config = &helper->config;

    config->path = hello->path;
    config->bytes = hello->bytes;
    config->has_siblings = hello->has_siblings;
    memcpy(config->store_id, hello->store_id, sizeof(config->store_id));
    memcpy(config->device_uuid, hello->device_uuid, sizeof(config->device_uuid));
    memcpy(config->namespaces, hello->namespaces, sizeof(config->namespaces));
}

static int on_scan_progress(void *ctx, uint64_t done_bytes, uint64_t total_bytes)
{
    struct helper *helper = ctx;

    helper->said.scan_bytes = done_bytes;
    helper->said.scan_total_bytes = total_bytes;
    if (done_bytes < helper->scan_next_bytes && done_bytes < total_bytes)
        return 0;
    helper->scan_next_bytes = done_bytes + SCAN_SAID_BYTES;
    return say(helper, KVT_WIRE_PROGRESS, 0);
}

static int rebuild(struct helper *helper, char why[KVT_INDEX_DB_WHY_BYTES])
{
    const struct kvt_index_config *hello = &helper->message.hello;
    struct kvt_scan_config scan = {.path = hello->data_path,
                                   .data_offset_bytes = hello->data_offset_bytes,
                                   .data_bytes = hello->data_bytes,
                                   .namespaces = helper->config.namespaces};
    struct kvt_index_rebuild_config config = {
        .db = &helper->config, .scan = &scan, .progress = on_scan_progress, .ctx = helper};

    memcpy(scan.store_id, hello->store_id, sizeof(scan.store_id));
    return kvt_index_rebuild(&helper->db, &config, &helper->rebuilt, why);
}

/* Opens the index. One that is not there, or whose last rebuild was cut short, is made anew. An
 * empty one may not be there before the mark of the rebuild is: a start after a crash in between
 * would take it for one that knows of nothing. */
static int open_db(struct helper *helper, bool *ret_is_rebuilt)
{
    const char *path = helper->config.path;
    char why[KVT_INDEX_DB_WHY_BYTES] = "";
    bool is_rebuild = helper->message.hello.is_rebuild_wanted || kvt_index_rebuild_is_due(path);
    bool is_missing = access(path, F_OK) != 0 && errno == ENOENT;
    int r = 0;

    if (!is_rebuild && !is_missing)
        r = kvt_index_db_open(&helper->db, &helper->config, why);
    if (r == KVT_INDEX_DB_E_FRESH) {
        helper->db = kvt_index_db_close(helper->db);
        is_missing = true;
        r = 0;
    }
    if (r == 0 && (is_rebuild || is_missing))
        r = rebuild(helper, why);
    else if (r == KVT_INDEX_DB_E_BAD)
        return fail(helper, KVT_WIRE_BAD, 0, "%s", why);
    if (r < 0)
        return fail(helper, KVT_WIRE_FAILED, r, "index %.80s: %s", path,
                    r == -EBUSY ? "is in use by another process" : strerror(-r));
    /* Where there was nothing to scan the index is merely new. */
    *ret_is_rebuilt = is_rebuild || helper->rebuilt.scan.read_bytes > 0;
    return r;
}

static int visit(void *ctx, const struct kvt_index_put *put)
{
    return say_put(ctx, put);
}

static int load(struct helper *helper)
{
    struct kvt_index_loaded *loaded = &helper->said.loaded;
    const struct kvt_scan_report *scan = &helper->rebuilt.scan;
    bool is_rebuilt = false;
    int r;

    take_config(helper);
    r = open_db(helper, &is_rebuilt);
    if (r == 0)
        r = say_progress(helper);
    if (r != 0)
        return r;
    r = kvt_index_db_walk(helper->db, visit, helper, loaded);
    if (r == KVT_INDEX_DB_E_BAD)
        return fail(helper, KVT_WIRE_BAD, 0, "index is damaged: %s", kvt_index_db_why(helper->db));
    if (r < 0)
        return fail(helper, KVT_WIRE_FAILED, r, "index cannot be read: %s", strerror(-r));
    if (r != 0)
        return r;
    loaded->was_rebuilt = is_rebuilt;
    loaded->block_id_max = KVT_MAX(loaded->block_id_max, scan->block_id_max);
    loaded->content_max = KVT_MAX(loaded->content_max, scan->generation_max);
    helper->said.why[0] = '\0';
    if (scan->read_bytes > 0)
        (void)snprintf(helper->said.why, sizeof(helper->said.why),
                       "made anew from %llu slots: %llu blocks with %llu copies",
                       (unsigned long long)scan->slots, (unsigned long long)helper->rebuilt.rows,
                       (unsigned long long)helper->rebuilt.copies);
    return say(helper, KVT_WIRE_LOADED, 0);
}

/* ---- serve ---------------------------------------------------------------------------------- */

static int commit(struct helper *helper)
{
    struct kvt_index_db_stats stats;
    int r = kvt_index_db_commit(helper->db);

    if (r < 0)
        return fail(helper, KVT_WIRE_FAILED, r, "index cannot be written: %s",
                    kvt_index_db_why(helper->db));
    kvt_index_db_stats(helper->db, &stats);
    helper->said.used_bytes = stats.used_bytes;
    helper->said.capacity_bytes = stats.capacity_bytes;
    helper->said.refused = helper->refused;
    return say(helper, KVT_WIRE_COMMITTED, helper->message.seq);
}

static int apply(struct helper *helper)
{
    int r = kvt_index_db_apply_linked(helper->db, &helper->message.put);

    if (r == KVT_INDEX_DB_E_FULL || r == -EINVAL) {
        helper->refused++;
        return 0;
    }
    if (r < 0)
        return fail(helper, KVT_WIRE_FAILED, r, "index cannot be written: %s",
                    kvt_index_db_why(helper->db));
    return 0;
}

static int serve(struct helper *helper)
{
    int r = receive(helper);

    if (r == 0 && helper->message.kind != KVT_WIRE_HELLO)
        r = fail(helper, KVT_WIRE_FAILED, -EPROTO, "helper was not told what to open");
    if (r == 0)
        r = load(helper);
    while (r == 0) {
        r = receive(helper);
        if (r != 0)
            break;
        switch (helper->message.kind) {
        case KVT_WIRE_COMMIT:
            r = commit(helper);
            break;
        case KVT_INDEX_PUT_ROW:
        case KVT_INDEX_PUT_COPY:
        case KVT_INDEX_PUT_DROP_COPY:
        case KVT_INDEX_PUT_DROP_ROW:
        case KVT_INDEX_PUT_DROP_OLD:
            r = apply(helper);
            break;
        default:
            r = fail(helper, KVT_WIRE_FAILED, -EPROTO, "helper was sent a message of kind %u",
                     helper->message.kind);
        }
    }
    return r;
}

int kvt_index_helper_serve(int fd)
{
    struct helper *helper = kvt_alloc_zeroed(1, sizeof(*helper));
    int r = -ENOMEM;

    if (helper == NULL)
        return 1;
    helper->fd = fd;
    helper->in = kvt_alloc_aligned(8, SOCKET_BYTES);
    helper->out = kvt_alloc_aligned(8, SOCKET_BYTES);
    helper->frame = kvt_alloc_aligned(8, KVT_WIRE_BYTES_MAX);
    if (helper->in != NULL && helper->out != NULL && helper->frame != NULL)
        r = serve(helper);
    helper->db = kvt_index_db_close(helper->db);
    kvt_free(helper->in);
    kvt_free(helper->out);
    kvt_free(helper->frame);
    kvt_free(helper);
    return r == HELPER_E_END ? 0 : 1;
}
