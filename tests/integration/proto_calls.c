/* What may go wrong with calls: deadlines, cancellation, limits, foreign bytes, full pools, the
 * wrong socket, a server that stops, a socket that is taken. */
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "daemon/base/clock.h"
#include "proto/client/internal.h"
#include "tests/common/check.h"
#include "tests/common/fake_service.h"

extern char **environ;

static struct fake_server fake;
static struct kvt_client *client, *admin;
static struct kvt_arena arena;
static uint32_t tokens[KVT_REQUEST_TOKENS_MAX + 1];

static void setup(struct kvt_server_config config)
{
    struct kvt_client_config client_config = {0};

    fake_server_start(&fake, config);
    client_config.socket_path = fake.path;
    CHECK(kvt_client_open(&client, &client_config) == 0);
    client_config.socket_path = fake.admin_path;
    CHECK(kvt_client_open(&admin, &client_config) == 0);
    CHECK(kvt_arena_init(&arena, 64 * KVT_MIB, KVT_MIB) == 0);
}

static void teardown(void)
{
    client = kvt_client_close(client);
    admin = kvt_client_close(admin);
    kvt_arena_deinit(&arena);
    fake_server_stop(&fake, KVT_NS_PER_S);
}

static void lookup(struct kvt_op *op, uint64_t tokens_count)
{
    kvt_arena_reset(&arena);
    fake_op_init(op, &arena, KVT_OP_LOOKUP);
    op->req.lookup.tiers = 7;
    op->req.lookup.limit_tokens = UINT64_MAX;
    op->req.lookup.prefix.tokens = tokens;
    op->req.lookup.prefix.tokens_count = tokens_count;
}

/* ---- deadlines and cancellation ---------------------------------------------------------------
 */

static void test_deadline(void)
{
    struct kvt_op op;
    uint64_t begin_ns = kvt_clock_mono_ns();

    setup((struct kvt_server_config){0});
    atomic_store(&fake.service.is_holding, true);
    lookup(&op, 10);
    op.deadline_ns = begin_ns + 300 * KVT_NS_PER_MS;
    kvt_client_call(client, &op);
    CHECK_CODE(&op, KVT_CODE_DEADLINE_EXCEEDED);
    CHECK(kvt_clock_mono_ns() - begin_ns >= 250 * KVT_NS_PER_MS);
    CHECK(kvt_clock_mono_ns() - begin_ns < 5 * KVT_NS_PER_S);
    teardown(); /* asserts that the service gave everything back */
    /* the server's own cap: the client would wait longer */
    setup((struct kvt_server_config){.deadline_ns_max = 200 * KVT_NS_PER_MS});
    atomic_store(&fake.service.is_holding, true);
    lookup(&op, 10);
    op.deadline_ns = kvt_clock_mono_ns() + 10 * KVT_NS_PER_S;
    kvt_client_call(client, &op);
    CHECK_CODE(&op, KVT_CODE_DEADLINE_EXCEEDED);
    CHECK(strcmp(op.message, "the service's deadline") == 0);
    teardown();
}

static void *call_main(void *arg)
{
    kvt_client_call(client, arg);
    return NULL;
}

static void test_cancel(void)
{
    pthread_t thread;
    struct kvt_op op;

    setup((struct kvt_server_config){0});
    atomic_store(&fake.service.is_holding, true);
    lookup(&op, 10);
    CHECK(pthread_create(&thread, NULL, call_main, &op) == 0);
    CHECK(fake_wait(&fake.service.held_count, 1));
    kvt_client_cancel(client, &op);
    CHECK(pthread_join(thread, NULL) == 0);
    CHECK_CODE(&op, KVT_CODE_CANCELLED);
    CHECK(fake_wait(&fake.service.cancels, 1));
    /* cancelled before it began */
    lookup(&op, 10);
    kvt_client_cancel(client, &op);
    kvt_client_call(client, &op);
    CHECK_CODE(&op, KVT_CODE_CANCELLED);
    teardown();
}

static pid_t spawn_self(const char *verb, const char *path)
{
    char *args[] = {(char *)(uintptr_t) "self", (char *)(uintptr_t)verb, (char *)(uintptr_t)path,
                    NULL};
    pid_t pid = 0;

    CHECK(posix_spawn(&pid, "/proc/self/exe", NULL, NULL, args, environ) == 0);
    return pid;
}

/* The other process: one Lookup that never ends. */
static int child_call(const char *path)
{
    struct kvt_client_config config = {.socket_path = path};
    struct kvt_op op;

    CHECK(kvt_arena_init(&arena, 64 * KVT_MIB, KVT_MIB) == 0);
    CHECK(kvt_client_open(&client, &config) == 0);
    lookup(&op, 10);
    op.deadline_ns = kvt_clock_mono_ns() + 60 * KVT_NS_PER_S;
    kvt_client_call(client, &op);
    return 1;
}

static void test_kill(void)
{
    pid_t pid;

    setup((struct kvt_server_config){0});
    atomic_store(&fake.service.is_holding, true);
    pid = spawn_self("call", fake.path);
    CHECK(fake_wait(&fake.service.held_count, 1));
    CHECK(kill(pid, SIGKILL) == 0);
    CHECK(fake_wait(&fake.service.cancels, 1));
    CHECK(waitpid(pid, NULL, 0) == pid);
    teardown();
}

/* ---- limits -----------------------------------------------------------------------------------
 */

static void test_sizes(void)
{
    struct kvt_op op;

    setup((struct kvt_server_config){0});
    lookup(&op, KVT_REQUEST_TOKENS_MAX);
    kvt_client_call(client, &op);
    CHECK_CODE(&op, KVT_CODE_OK);
    lookup(&op, KVT_REQUEST_TOKENS_MAX + 1);
    kvt_client_call(client, &op);
    CHECK_CODE(&op, KVT_CODE_INVALID_ARGUMENT);
    CHECK(strstr(op.message, "prefix.tokens") != NULL && strstr(op.message, "1048576") != NULL);
    teardown();
}

/* Any bytes to any path; the answer's bytes are dropped. */
static enum kvt_code raw_call(struct kvt_client *on, const char *path, const void *at, size_t bytes)
{
    grpc_op ops[6] = {{.op = GRPC_OP_SEND_INITIAL_METADATA},
                      {.op = GRPC_OP_SEND_MESSAGE},
                      {.op = GRPC_OP_SEND_CLOSE_FROM_CLIENT}};
    grpc_slice slice = grpc_slice_from_copied_buffer(at, bytes);
    grpc_byte_buffer *request = grpc_raw_byte_buffer_create(&slice, 1);
    struct kvt_client_call call;
    struct kvt_op op = {0};

    kvt_call_begin(&call, on, &op, path, true);
    ops[1].data.send_message.send_message = request;
    ops[3] = kvt_initial_op(&call);
    ops[4] = kvt_receive_op(&call);
    ops[5] = kvt_status_op(&call);
    kvt_call_batch(&call, ops, 6, &call.tags[0]);
    (void)kvt_call_wait(&call, &call.tags[0]);
    kvt_call_status(&call, &op);
    if (call.received != NULL)
        grpc_byte_buffer_destroy(call.received);
    kvt_call_end(&call);
    grpc_byte_buffer_destroy(request);
    grpc_slice_unref(slice);
    return op.code;
}

static void test_foreign(void)
{
    static uint8_t big[KVT_MESSAGE_BYTES_MAX + 1];
    struct kvt_server_stats stats;

    setup((struct kvt_server_config){0});
    CHECK(raw_call(client, "/kvtier.v1.KvTier/NoSuch", "", 0) == KVT_CODE_UNIMPLEMENTED);
    CHECK(raw_call(client, "/x", "abc", 3) == KVT_CODE_UNIMPLEMENTED);
    CHECK(raw_call(client, "/kvtier.v1.KvTier/Lookup", big, sizeof(big)) ==
          KVT_CODE_RESOURCE_EXHAUSTED);
    CHECK(raw_call(client, "/kvtier.v1.KvTier/Lookup", "\xff\xff\xff", 3) ==
          KVT_CODE_INVALID_ARGUMENT);
    /* 4 M empty extra keys: small on the wire, larger than an op's arena once unpacked */
    for (size_t i = 0; i < sizeof(big) - 64; i += 2)
        big[i + 8] = 0x2a;
    memcpy(big, "\x12\xc2\xff\xff\x03", 5);
    CHECK(raw_call(client, "/kvtier.v1.KvTier/Lookup", big, sizeof(big) - 1) != KVT_CODE_OK);
    CHECK(raw_call(client, "/grpc.health.v1.Health/Check", "", 0) == KVT_CODE_OK);
    CHECK(raw_call(client, "/grpc.health.v1.Health/Check", "\n\x03xyz", 5) == KVT_CODE_NOT_FOUND);
    CHECK(raw_call(client, "/kvtier.v1.KvTier/Stats", "", 0) == KVT_CODE_OK);
    CHECK(raw_call(client, "/kvtier.v1.KvTierAdmin/Dump", "", 0) == KVT_CODE_PERMISSION_DENIED);
    CHECK(raw_call(client, "/kvtier.v1.KvTierAdmin/Reset", "", 0) == KVT_CODE_PERMISSION_DENIED);
    CHECK(raw_call(client, "/kvtier.v1.KvTierAdmin/Evict", "", 0) == KVT_CODE_PERMISSION_DENIED);
    CHECK(raw_call(admin, "/kvtier.v1.KvTierAdmin/Dump", "", 0) == KVT_CODE_OK);
    CHECK(raw_call(admin, "/kvtier.v1.KvTier/Stats", "", 0) == KVT_CODE_OK);
    kvt_server_stats(fake.server, &stats);
    CHECK(stats.bad_requests >= 3 && stats.requests > stats.bad_requests);
    teardown();
}

/* A field, a value that is wrong for it, and what the message must name. */
static void test_validation(void)
{
    struct kvt_op op;
    struct kvt_api_extra_key keys[2] = {{.block_idx = 3}, {.block_idx = 3}};

    setup((struct kvt_server_config){0});
    lookup(&op, 10);
    op.req.lookup.prefix.salt = (struct kvt_text){(const char *)tokens, 257};
    kvt_client_call(client, &op);
    CHECK_CODE(&op, KVT_CODE_INVALID_ARGUMENT);
    CHECK(strstr(op.message, "prefix.salt") != NULL && strstr(op.message, "256") != NULL);
    lookup(&op, 10);
    op.req.lookup.tiers = 8;
    kvt_client_call(client, &op);
    CHECK_CODE(&op, KVT_CODE_INVALID_ARGUMENT);
    CHECK(strstr(op.message, "tiers") != NULL);
    lookup(&op, 10);
    op.req.lookup.prefix.extra_keys = keys;
    op.req.lookup.prefix.extra_keys_count = 2;
    kvt_client_call(client, &op);
    CHECK_CODE(&op, KVT_CODE_INVALID_ARGUMENT);
    CHECK(strstr(op.message, "extra_keys") != NULL);
    /* session: a handle of 3 bytes; tokens of 5 bytes */
    CHECK(raw_call(client, "/kvtier.v1.KvTier/Lookup", "\n\x03xyz", 5) ==
          KVT_CODE_INVALID_ARGUMENT);
    CHECK(raw_call(client, "/kvtier.v1.KvTier/Lookup", "\x12\x07\x22\x05xyzab", 9) ==
          KVT_CODE_INVALID_ARGUMENT);
    /* OpenNamespace: a model name with a NUL in it */
    CHECK(raw_call(client, "/kvtier.v1.KvTier/OpenNamespace",
                   "\x08\x40\x10\x01\x1a\x04\x08\x01\x18\x40\x22\x03"
                   "a\0b",
                   15) == KVT_CODE_INVALID_ARGUMENT);
    CHECK(raw_call(client, "/kvtier.v1.KvTier/OpenNamespace",
                   "\x08\x40\x10\x01\x1a\x04\x08\x01\x18\x40\x22\x03"
                   "a-b",
                   15) == KVT_CODE_OK);
    teardown();
}

static void test_exhaustion(void)
{
    pthread_t threads[4];
    struct kvt_arena arenas[4];
    struct kvt_op ops[4], op;
    struct kvt_server_stats stats;

    setup((struct kvt_server_config){.ops_max = 4});
    atomic_store(&fake.service.is_holding, true);
    for (int i = 0; i < 4; i++) {
        CHECK(kvt_arena_init(&arenas[i], KVT_MIB, KVT_MIB) == 0);
        fake_op_init(&ops[i], &arenas[i], KVT_OP_STATS);
        CHECK(pthread_create(&threads[i], NULL, call_main, &ops[i]) == 0);
    }
    CHECK(fake_wait(&fake.service.held_count, 4));
    lookup(&op, 10);
    kvt_client_call(client, &op);
    CHECK_CODE(&op, KVT_CODE_RESOURCE_EXHAUSTED);
    kvt_server_stats(fake.server, &stats);
    CHECK(stats.ops_refused == 1);
    atomic_store(&fake.service.is_holding, false);
    fake_release(&fake.service);
    for (int i = 0; i < 4; i++) {
        CHECK(pthread_join(threads[i], NULL) == 0);
        CHECK_CODE(&ops[i], KVT_CODE_OK);
        kvt_arena_deinit(&arenas[i]);
    }
    atomic_store(&fake.service.is_full, true);
    lookup(&op, 10);
    kvt_client_call(client, &op);
    CHECK_CODE(&op, KVT_CODE_RESOURCE_EXHAUSTED);
    atomic_store(&fake.service.is_full, false);
    for (int i = 0; i < 20; i++) { /* nothing was lost */
        lookup(&op, 10);
        kvt_client_call(client, &op);
        CHECK_CODE(&op, KVT_CODE_OK);
    }
    teardown();
}

/* ---- start and stop ---------------------------------------------------------------------------
 */

static void test_stop_in_flight(void)
{
    struct kvt_op op;
    pthread_t thread;

    setup((struct kvt_server_config){0});
    atomic_store(&fake.service.is_holding, true);
    lookup(&op, 10);
    CHECK(pthread_create(&thread, NULL, call_main, &op) == 0);
    CHECK(fake_wait(&fake.service.held_count, 1));
    kvt_server_stop(fake.server, 200 * KVT_NS_PER_MS);
    CHECK(atomic_load(&fake.service.running) == 0);
    CHECK(pthread_join(thread, NULL) == 0);
    CHECK_CODE(&op, KVT_CODE_UNAVAILABLE);
    lookup(&op, 10); /* later ones do not hang */
    kvt_client_call(client, &op);
    CHECK_CODE(&op, KVT_CODE_UNAVAILABLE);
    teardown();
}

static void test_sockets(void)
{
    struct kvt_client_config config = {.socket_path = "/tmp/kvt-nobody-here"};
    struct kvt_server_config second = {.socket_mode = 0600,
                                       .threads = 1,
                                       .ops_max = 4,
                                       .connections_max = 4,
                                       .streams_max = 4,
                                       .deadline_ns_max = KVT_NS_PER_S};
    struct kvt_server *server = NULL;
    struct kvt_client *nobody = NULL;
    struct kvt_op op;
    struct stat st;
    int pid = 0;

    setup((struct kvt_server_config){.socket_mode = 0620});
    CHECK(stat(fake.path, &st) == 0 && (st.st_mode & 0777) == 0620);
    CHECK(stat(fake.admin_path, &st) == 0 && (st.st_mode & 0777) == 0600);
    second.socket_path = fake.path;
    second.service = &fake.service.table;
    CHECK(kvt_server_open(&server, &second, &pid) == KVT_SERVER_E_LIVE);
    CHECK(pid == getpid());
    lookup(&op, 10); /* the first one is unharmed */
    kvt_client_call(client, &op);
    CHECK_CODE(&op, KVT_CODE_OK);
    CHECK(kvt_client_open(&nobody, &config) == -ENOENT);
    teardown();
    CHECK(kvt_client_open(&nobody, &(struct kvt_client_config){.socket_path = fake.path}) ==
          -ENOENT);
}

/* A daemon that was killed leaves its socket file: the next one takes the place. */
static void test_stale(void)
{
    struct kvt_server_config config = {.socket_mode = 0600,
                                       .threads = 1,
                                       .ops_max = 4,
                                       .connections_max = 4,
                                       .streams_max = 4,
                                       .deadline_ns_max = KVT_NS_PER_S};
    struct kvt_server *server = NULL;
    char path[128], lock[136];
    int pid = 0;

    setup((struct kvt_server_config){0});
    (void)snprintf(path, sizeof(path), "%s/stale", fake.dir);
    (void)snprintf(lock, sizeof(lock), "%s.lock", path);
    config.socket_path = path;
    config.service = &fake.service.table;
    pid_t child = spawn_self("bind", config.socket_path);
    CHECK(waitpid(child, NULL, 0) == child);
    CHECK(access(config.socket_path, F_OK) == 0);
    CHECK(kvt_client_open(&admin, &(struct kvt_client_config){.socket_path = config.socket_path}) ==
          -ECONNREFUSED);
    CHECK(kvt_server_open(&server, &config, &pid) == 0);
    kvt_server_stop(server, 0);
    kvt_server_close(server);
    CHECK(access(config.socket_path, F_OK) < 0);
    (void)unlink(lock);
    teardown();
}

int main(int argc, char **argv)
{
    if (argc == 3 && strcmp(argv[1], "call") == 0)
        return child_call(argv[2]);
    if (argc == 3 && strcmp(argv[1], "bind") == 0) {
        static struct fake_service service;
        struct kvt_server_config config = {.socket_path = argv[2],
                                           .socket_mode = 0600,
                                           .threads = 1,
                                           .ops_max = 4,
                                           .connections_max = 4,
                                           .streams_max = 4,
                                           .deadline_ns_max = KVT_NS_PER_S};
        struct kvt_server *server = NULL;
        int pid = 0;

        fake_start(&service);
        config.service = &service.table;
        CHECK(kvt_server_open(&server, &config, &pid) == 0);
        _exit(0); /* as if killed */
    }
    kvt_client_library_init();
    test_deadline();
    test_cancel();
    test_kill();
    test_sizes();
    test_foreign();
    test_validation();
    test_exhaustion();
    test_stop_in_flight();
    test_sockets();
    test_stale();
    kvt_client_library_deinit();
    return 0;
}
