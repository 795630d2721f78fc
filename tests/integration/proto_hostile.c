/* A client that means harm: what it can make the server's process grow by is bounded, and others
 * are served while it tries. Everything runs against a server in this process; RSS is read from
 * /proc/self/statm. The attackers are raw sockets that speak as much HTTP/2 as they need.
 *
 * Bound: ops_max messages of 8 MiB as gRPC holds them and as their arenas do, the clients' own
 * buffers in this process, and slack for gRPC itself. */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "daemon/base/clock.h"
#include "proto/client/internal.h"
#include "tests/common/check.h"
#include "tests/common/fake_service.h"

#define OPS_MAX 8u
#define OPS_PER_CONNECTION_MAX 4u
#define CONNECTIONS_MAX 48u
#define SLACK_BYTES (96 * KVT_MIB)

static struct fake_server fake;

static uint64_t rss_bytes(void)
{
    unsigned long total = 0, resident = 0;
    FILE *file = fopen("/proc/self/statm", "r");

    CHECK(file != NULL && fscanf(file, "%lu %lu", &total, &resident) == 2);
    (void)fclose(file);
    return resident * (uint64_t)sysconf(_SC_PAGESIZE);
}

static int open_raw(void)
{
    int fd = -1;

    CHECK(kvt_client_connect(fake.path, SOCK_STREAM | SOCK_NONBLOCK, &fd) == 0);
    return fd;
}

/* As much as the server takes within a moment; false: it hung up. */
static bool push(int fd, const uint8_t *at, size_t bytes)
{
    while (bytes > 0) {
        struct pollfd pfd = {.fd = fd, .events = POLLOUT};
        ssize_t sent = send(fd, at, bytes, MSG_NOSIGNAL);

        if (sent > 0) {
            at += sent;
            bytes -= (size_t)sent;
        } else if (sent < 0 && errno == EAGAIN) {
            if (poll(&pfd, 1, 20) <= 0)
                return true; /* flow control holds it: that is the point */
        } else {
            return false;
        }
    }
    return true;
}

static size_t frame(uint8_t *at, uint8_t type, uint8_t flags, uint32_t stream, size_t bytes)
{
    const uint8_t header[9] = {(uint8_t)(bytes >> 16),
                               (uint8_t)(bytes >> 8),
                               (uint8_t)bytes,
                               type,
                               flags,
                               (uint8_t)(stream >> 24),
                               (uint8_t)(stream >> 16),
                               (uint8_t)(stream >> 8),
                               (uint8_t)stream};

    memcpy(at, header, sizeof(header));
    return sizeof(header);
}

static size_t literal(uint8_t *at, const char *name, const char *value)
{
    size_t name_bytes = strlen(name), value_bytes = strlen(value);

    at[0] = 0; /* literal without indexing, new name */
    at[1] = (uint8_t)name_bytes;
    memcpy(at + 2, name, name_bytes);
    at[2 + name_bytes] = (uint8_t)value_bytes;
    memcpy(at + 3 + name_bytes, value, value_bytes);
    return 3 + name_bytes + value_bytes;
}

static bool preface(int fd)
{
    static const char text[] = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0";

    return push(fd, (const uint8_t *)text, sizeof(text) - 1);
}

static bool open_stream(int fd, uint32_t stream, const char *path)
{
    uint8_t block[512], at[600];
    size_t bytes = 0, head;

    bytes += literal(block + bytes, ":method", "POST");
    bytes += literal(block + bytes, ":scheme", "http");
    bytes += literal(block + bytes, ":path", path);
    bytes += literal(block + bytes, ":authority", "localhost");
    bytes += literal(block + bytes, "te", "trailers");
    bytes += literal(block + bytes, "content-type", "application/grpc");
    head = frame(at, 1, 4, stream, bytes);
    memcpy(at + head, block, bytes);
    return push(fd, at, head + bytes);
}

/* Begins a message of 8 MiB on a stream and sends 1 MiB of it, or what the window allows. */
static bool begin_message(int fd, uint32_t stream)
{
    static uint8_t at[9 + 16384];
    size_t head = frame(at, 0, 0, stream, 16384);

    memset(at + head, 0, 16384);
    at[head + 1] = 0x00;
    at[head + 2] = 0x7f;
    at[head + 3] = 0xff;
    at[head + 4] = 0xff;
    for (unsigned i = 0; i < 4; i++) { /* 64 KiB: the window of a stream */
        if (!push(fd, at, head + 16384))
            return false;
        memset(at + head, 0, 5);
    }
    return true;
}

static void check_alive(const char *when)
{
    struct kvt_client_config config = {.socket_path = fake.path, .deadline_ns = 10 * KVT_NS_PER_S};
    struct kvt_client *client = NULL;
    struct kvt_arena arena;
    struct kvt_op op;

    CHECK(kvt_arena_init(&arena, KVT_MIB, 0) == 0);
    CHECK(kvt_client_open(&client, &config) == 0);
    for (unsigned i = 0; i < 50; i++) { /* a full house takes turns */
        fake_op_init(&op, &arena, KVT_OP_STATS);
        kvt_client_call(client, &op);
        if (op.code == KVT_CODE_OK)
            break;
        kvt_client_close(client);
        (void)usleep(300000);
        CHECK(kvt_client_open(&client, &config) == 0);
    }
    if (op.code != KVT_CODE_OK)
        fprintf(stderr, "%s: %s\n", when, op.message);
    CHECK_CODE(&op, KVT_CODE_OK);
    kvt_client_close(client);
    kvt_arena_deinit(&arena);
}

/* Sanitizers keep freed memory back, so that their builds can only show what it was. */
static bool is_growth_bounded = true;

static void check_growth(const char *attack, uint64_t before)
{
    uint64_t now = rss_bytes();
    uint64_t bound = (uint64_t)OPS_MAX * 2 * KVT_MESSAGE_BYTES_MAX + SLACK_BYTES;

    printf("%-16s RSS %+.1f MiB (bound %.0f MiB)\n", attack,
           ((double)now - (double)before) / (double)KVT_MIB, (double)bound / (double)KVT_MIB);
    CHECK(!is_growth_bounded || now < before + bound);
}

/* ---- attacks ----------------------------------------------------------------------------------
 */

static void attack_connections(uint64_t before)
{
    int fds[200];
    struct kvt_server_stats stats;

    for (unsigned i = 0; i < KVT_COUNT_OF(fds); i++)
        fds[i] = open_raw();
    for (unsigned i = 0;; i++) {
        kvt_server_stats(fake.server, &stats);
        if (stats.connections_refused >= KVT_COUNT_OF(fds) - CONNECTIONS_MAX)
            break;
        CHECK(i < 1000);
        (void)usleep(10000);
    }
    check_growth("connections", before);
    (void)usleep(5500000); /* those that never call may be sent away from here on */
    check_alive("full of silent connections");
    for (unsigned i = 0; i < KVT_COUNT_OF(fds); i++)
        (void)close(fds[i]);
    (void)usleep(200000);
    check_alive("after silent connections");
}

static void attack_garbage(uint64_t before)
{
    uint8_t junk[4096];
    unsigned seed = 1;

    for (unsigned i = 0; i < 300; i++) {
        int fd = open_raw();

        for (size_t k = 0; k < sizeof(junk); k++)
            junk[k] = (uint8_t)rand_r(&seed);
        if (i % 2 == 0)
            (void)preface(fd);
        (void)push(fd, junk, sizeof(junk));
        (void)close(fd);
    }
    check_growth("garbage", before);
    (void)usleep(200000);
    check_alive("after garbage");
}

static void attack_half_messages(uint64_t before)
{
    int fds[16];

    for (unsigned i = 0; i < KVT_COUNT_OF(fds); i++) {
        fds[i] = open_raw();
        (void)preface(fds[i]);
        for (uint32_t stream = 1; stream < 2 * 64; stream += 2) {
            if (!open_stream(fds[i], stream, "/kvtier.v1.KvTier/Lookup") ||
                !begin_message(fds[i], stream))
                break;
        }
    }
    (void)usleep(300000);
    check_growth("half messages", before);
    /* they hold every op; the server takes them back at their deadline */
    (void)usleep(4500000);
    check_alive("while messages never end");
    for (unsigned i = 0; i < KVT_COUNT_OF(fds); i++)
        (void)close(fds[i]);
    (void)usleep(200000);
}

/* Health watches that find no op and all end at once: more calls than the reply ring has room for,
 * should the reply thread be behind. */
static void attack_watches(uint64_t before)
{
    int fds[CONNECTIONS_MAX - 4];

    for (unsigned i = 0; i < KVT_COUNT_OF(fds); i++) {
        fds[i] = open_raw();
        (void)preface(fds[i]);
        for (uint32_t stream = 1; stream < 2 * 64; stream += 2) {
            if (!open_stream(fds[i], stream, "/grpc.health.v1.Health/Watch"))
                break;
        }
    }
    (void)usleep(300000);
    for (unsigned i = 0; i < KVT_COUNT_OF(fds); i++)
        (void)close(fds[i]);
    (void)usleep(200000);
    check_growth("watches", before);
    check_alive("after watches");
}

/* Asks for large answers and never reads. */
static int open_slow_reader(void)
{
    static const uint8_t empty_message[5];
    int fd = open_raw();
    uint8_t at[32];

    (void)preface(fd);
    for (uint32_t stream = 1; stream < 2 * 500; stream += 2) {
        size_t head = frame(at, 0, 1, stream, sizeof(empty_message));

        memcpy(at + head, empty_message, sizeof(empty_message));
        if (!open_stream(fd, stream, "/kvtier.v1.KvTier/Stats") ||
            !push(fd, at, head + sizeof(empty_message)))
            break;
    }
    return fd;
}

/* One connection that never reads: another one is served while it is there, every time. */
static void attack_one_slow_reader(void)
{
    struct kvt_client_config config = {.socket_path = fake.path, .deadline_ns = 10 * KVT_NS_PER_S};
    struct kvt_client *client = NULL;
    struct kvt_arena arena;
    struct kvt_server_stats before, now;
    struct kvt_op op;
    int fd;

    kvt_server_stats(fake.server, &before);
    atomic_store(&fake.service.answer_size, 2);
    atomic_store(&fake.service.answer_seed, 0x1234);
    fd = open_slow_reader();
    for (unsigned i = 0;; i++) { /* until it holds what it may */
        kvt_server_stats(fake.server, &now);
        if (now.ops_refused > before.ops_refused)
            break;
        CHECK(i < 1000);
        (void)usleep(10000);
    }
    CHECK(kvt_arena_init(&arena, 32 * KVT_MIB, 0) == 0);
    CHECK(kvt_client_open(&client, &config) == 0);
    for (unsigned i = 0; i < 20; i++) {
        kvt_arena_reset(&arena);
        fake_op_init(&op, &arena, KVT_OP_STATS);
        kvt_client_call(client, &op);
        CHECK_CODE(&op, KVT_CODE_OK);
    }
    kvt_client_close(client);
    kvt_arena_deinit(&arena);
    atomic_store(&fake.service.answer_size, 0);
    (void)close(fd);
    (void)usleep(200000);
    check_alive("after one slow reader");
}

static void attack_slow_reader(uint64_t before)
{
    int fds[16];

    atomic_store(&fake.service.answer_size, 2);
    atomic_store(&fake.service.answer_seed, 0x1234);
    for (unsigned i = 0; i < KVT_COUNT_OF(fds); i++)
        fds[i] = open_slow_reader();
    (void)usleep(300000);
    check_growth("slow reader", before);
    atomic_store(&fake.service.answer_size, 0);
    for (unsigned i = 0; i < KVT_COUNT_OF(fds); i++)
        (void)close(fds[i]);
    /* While they last, others may hear "too many requests in progress"; then all is as before. */
    (void)usleep(200000);
    check_alive("after slow readers");
}

/* ---- a client that keeps to flow control ------------------------------------------------------
 */

struct flow {
    int fd;
    uint32_t stream;
    int64_t connection_bytes, stream_bytes; /* that may be sent */
    uint8_t in[65536];
    size_t in_bytes;
    bool is_over; /* the server ended the stream or the connection */
};

static uint32_t word(const uint8_t *at)
{
    return (uint32_t)at[0] << 24 | (uint32_t)at[1] << 16 | (uint32_t)at[2] << 8 | at[3];
}

static void flow_frame(struct flow *flow, uint8_t type, uint8_t flags, uint32_t stream,
                       const uint8_t *at, size_t bytes)
{
    static const uint8_t settings_ack[9] = {0, 0, 0, 4, 1, 0, 0, 0, 0};

    if (type == 4 && (flags & 1) == 0) {
        for (size_t i = 0; i + 6 <= bytes; i += 6) {
            if (at[i] == 0 && at[i + 1] == 4)
                flow->stream_bytes += (int64_t)word(at + i + 2) - 65535;
        }
        (void)push(flow->fd, settings_ack, sizeof(settings_ack));
    } else if (type == 8 && bytes == 4) {
        *(stream == 0 ? &flow->connection_bytes : &flow->stream_bytes) += word(at) & 0x7fffffff;
    } else if (type == 7 || (stream == flow->stream && (type == 3 || (flags & 1) != 0))) {
        flow->is_over = true;
    }
}

/* Reads what the server sent within @ms. */
static void flow_read(struct flow *flow, int ms)
{
    struct pollfd pfd = {.fd = flow->fd, .events = POLLIN};
    ssize_t got;
    size_t used = 0;

    if (poll(&pfd, 1, ms) <= 0)
        return;
    got = recv(flow->fd, flow->in + flow->in_bytes, sizeof(flow->in) - flow->in_bytes, 0);
    if (got <= 0) {
        flow->is_over = got == 0 || errno != EAGAIN;
        return;
    }
    flow->in_bytes += (size_t)got;
    while (flow->in_bytes - used >= 9) {
        const uint8_t *at = flow->in + used;
        size_t bytes = (size_t)at[0] << 16 | (size_t)at[1] << 8 | at[2];

        if (flow->in_bytes - used < 9 + bytes)
            break;
        flow_frame(flow, at[3], at[4], word(at + 5) & 0x7fffffff, at + 9, bytes);
        used += 9 + bytes;
    }
    memmove(flow->in, flow->in + used, flow->in_bytes - used);
    flow->in_bytes -= used;
}

static void flow_open(struct flow *flow, uint32_t stream, const char *path)
{
    *flow = (struct flow){
        .fd = open_raw(), .stream = stream, .connection_bytes = 65535, .stream_bytes = 65535};
    CHECK(preface(flow->fd) && open_stream(flow->fd, stream, path));
    flow_read(flow, 200);
}

/* Sends up to @bytes of zeroes, after @prefix if there is one; what the server took. */
static uint64_t flow_send(struct flow *flow, const uint8_t *prefix, size_t prefix_bytes,
                          uint64_t bytes)
{
    static uint8_t at[9 + 16384];
    uint64_t sent = 0;
    unsigned idle = 0;

    while (sent < bytes && !flow->is_over && idle < 200) {
        size_t here = (size_t)KVT_MIN(bytes - sent, 16384u);

        if (flow->connection_bytes < (int64_t)here || flow->stream_bytes < (int64_t)here) {
            int64_t was = flow->connection_bytes + flow->stream_bytes;

            flow_read(flow, 50);
            idle = flow->connection_bytes + flow->stream_bytes > was ? 0 : idle + 1;
            continue;
        }
        (void)frame(at, 0, 0, flow->stream, here);
        memset(at + 9, 0, here);
        if (sent == 0)
            memcpy(at + 9, prefix, prefix_bytes);
        if (!push(flow->fd, at, 9 + here))
            break;
        sent += here;
        flow->connection_bytes -= (int64_t)here;
        flow->stream_bytes -= (int64_t)here;
        flow_read(flow, 0);
    }
    return sent;
}

/* A message that says it is of 2 GiB: the server refuses it when its quota is used up. What a
 * bystander sees of that is printed, not demanded: gRPC chooses whose streams it cancels. */
static void attack_oversize(uint64_t before)
{
    static const uint8_t prefix[5] = {0, 0x7f, 0xff, 0xff, 0xff};
    struct kvt_client_config config = {.socket_path = fake.path, .deadline_ns = 10 * KVT_NS_PER_S};
    unsigned detaches = atomic_load(&fake.service.submitted[KVT_OP_DETACH]);
    struct kvt_client *client = NULL;
    struct kvt_session *session;
    struct kvt_arena arena;
    struct kvt_op op;
    struct flow flow;
    uint64_t taken;

    CHECK(kvt_arena_init(&arena, KVT_MIB, 0) == 0);
    CHECK(kvt_client_open(&client, &config) == 0);
    fake_op_init(&op, &arena, KVT_OP_ATTACH);
    session = kvt_client_attach(client, &op);
    CHECK_CODE(&op, KVT_CODE_OK);
    flow_open(&flow, 1, "/kvtier.v1.KvTier/Lookup");
    taken = flow_send(&flow, prefix, sizeof(prefix), 512 * KVT_MIB);
    printf("oversize: %.1f MiB taken%s, %u of 1 bystanding session ended\n",
           (double)taken / (double)KVT_MIB, flow.is_over ? ", then refused" : "",
           atomic_load(&fake.service.submitted[KVT_OP_DETACH]) - detaches);
    CHECK(flow.is_over);
    check_growth("oversize", before);
    (void)close(flow.fd);
    kvt_session_detach(session);
    kvt_client_close(client);
    kvt_arena_deinit(&arena);
    (void)usleep(200000);
    check_alive("after an oversized message");
}

static void attack_huge(uint64_t before)
{
    static uint32_t tokens[KVT_REQUEST_TOKENS_MAX];
    struct kvt_client_config config = {.socket_path = fake.path};
    struct kvt_client *client = NULL;
    struct kvt_arena arena;
    struct kvt_op op;

    CHECK(kvt_arena_init(&arena, 32 * KVT_MIB, 0) == 0);
    CHECK(kvt_client_open(&client, &config) == 0);
    for (unsigned i = 0; i < 60; i++) {
        kvt_arena_reset(&arena);
        fake_op_init(&op, &arena, KVT_OP_LOOKUP);
        op.req.lookup.prefix.tokens = tokens;
        op.req.lookup.prefix.tokens_count = KVT_REQUEST_TOKENS_MAX;
        kvt_client_call(client, &op);
        CHECK_CODE(&op, KVT_CODE_OK);
    }
    kvt_client_close(client);
    kvt_arena_deinit(&arena);
    check_growth("huge messages", before);
}

int main(int argc, char **argv)
{
    uint64_t before;

    is_growth_bounded = argc < 2 || strcmp(argv[1], "sanitized") != 0;
    kvt_client_library_init();
    fake_server_start(&fake,
                      (struct kvt_server_config){.ops_max = OPS_MAX,
                                                 .ops_per_connection_max = OPS_PER_CONNECTION_MAX,
                                                 .connections_max = CONNECTIONS_MAX,
                                                 .deadline_ns_max = 2 * KVT_NS_PER_S});
    check_alive("at start");
    before = rss_bytes();
    attack_huge(before);
    attack_oversize(before);
    attack_garbage(before);
    attack_half_messages(before);
    attack_watches(before);
    attack_one_slow_reader();
    attack_slow_reader(before);
    attack_connections(before);
    fake_server_stop(&fake, KVT_NS_PER_S);
    kvt_client_library_deinit();
    return 0;
}
