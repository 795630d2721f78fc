/* Attach streams: one DETACH for each session however it ends, notices, the region socket, and
 * health watches. */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "daemon/base/clock.h"
#include "proto/client/internal.h"
#include "proto/codec/codec.h"
#include "proto/codec/region_wire.h"
#include "tests/common/check.h"
#include "tests/common/fake_service.h"

extern char **environ;

static struct fake_server fake;
static struct kvt_client *client;
static struct kvt_arena arena;

static atomic_uint *submitted(enum kvt_op_kind kind)
{
    return &fake.service.submitted[kind];
}

static void setup(struct kvt_server_config config)
{
    struct kvt_client_config client_config = {0};

    fake_server_start(&fake, config);
    client_config.socket_path = fake.path;
    CHECK(kvt_client_open(&client, &client_config) == 0);
    CHECK(kvt_arena_init(&arena, 64 * KVT_MIB, KVT_MIB) == 0);
}

static void teardown(void)
{
    client = kvt_client_close(client);
    kvt_arena_deinit(&arena);
    fake_server_stop(&fake, KVT_NS_PER_S);
    CHECK(atomic_load(&fake.service.regions_open) == atomic_load(&fake.service.regions_closed));
}

static struct kvt_session *attach(struct kvt_op *op)
{
    kvt_arena_reset(&arena);
    op->deadline_ns = 0;
    return kvt_client_attach(client, op);
}

static void test_detach(void)
{
    struct kvt_op op;
    struct kvt_session *session;

    setup((struct kvt_server_config){0});
    fake_op_init(&op, &arena, KVT_OP_ATTACH);
    for (unsigned i = 1; i <= 20; i++) { /* half-close; its answer comes after DETACH */
        session = attach(&op);
        CHECK(session != NULL);
        kvt_session_detach(session);
        CHECK(atomic_load(submitted(KVT_OP_DETACH)) == i);
    }
    atomic_store(&fake.service.refuses_attach, true);
    CHECK(attach(&op) == NULL);
    CHECK_CODE(&op, KVT_CODE_FAILED_PRECONDITION);
    atomic_store(&fake.service.refuses_attach, false);
    CHECK(atomic_load(submitted(KVT_OP_DETACH)) == 20);
    /* refused before the service saw it */
    atomic_store(&fake.service.is_full, true);
    CHECK(attach(&op) == NULL);
    CHECK_CODE(&op, KVT_CODE_RESOURCE_EXHAUSTED);
    atomic_store(&fake.service.is_full, false);
    /* the client gives up while ATTACH is in the service, which then says OK all the same */
    atomic_store(&fake.service.is_holding, true);
    op.deadline_ns = kvt_clock_mono_ns() + 100 * KVT_NS_PER_MS;
    kvt_arena_reset(&arena);
    CHECK(kvt_client_attach(client, &op) == NULL);
    CHECK_CODE(&op, KVT_CODE_DEADLINE_EXCEEDED);
    atomic_store(&fake.service.is_holding, false);
    teardown();
    CHECK(atomic_load(submitted(KVT_OP_DETACH)) == 20);
}

/* ATTACH succeeds although its stream is gone already: DETACH must follow. */
static bool answer_late(struct fake_service *service, struct kvt_op *op)
{
    if (op->kind != KVT_OP_ATTACH)
        return false;
    while (!atomic_load(&op->is_cancelled))
        (void)usleep(1000);
    fake_answer(service, op);
    return true;
}

static void test_late_attach(void)
{
    uint64_t patience_ns = 100 * KVT_NS_PER_MS;
    struct kvt_op op;

    setup((struct kvt_server_config){0});
    fake.service.handle = answer_late;
    fake_op_init(&op, &arena, KVT_OP_ATTACH);
    /* On a busy machine a client may give up before its request has come. */
    for (; atomic_load(submitted(KVT_OP_ATTACH)) == 0; patience_ns *= 2) {
        CHECK(patience_ns < 60 * KVT_NS_PER_S);
        kvt_arena_reset(&arena);
        op.deadline_ns = kvt_clock_mono_ns() + patience_ns;
        CHECK(kvt_client_attach(client, &op) == NULL);
    }
    CHECK(fake_wait(submitted(KVT_OP_DETACH), 1));
    teardown();
    CHECK(atomic_load(submitted(KVT_OP_DETACH)) == 1);
}

static void test_stop_detaches(void)
{
    struct kvt_session *sessions[8];
    struct kvt_notice notice;
    struct kvt_op op;

    setup((struct kvt_server_config){0});
    fake_op_init(&op, &arena, KVT_OP_ATTACH);
    for (int i = 0; i < 8; i++) {
        sessions[i] = attach(&op);
        CHECK(sessions[i] != NULL);
    }
    kvt_server_stop(fake.server, 0);
    CHECK(atomic_load(submitted(KVT_OP_DETACH)) == 8);
    for (int i = 0; i < 8; i++) {
        CHECK(kvt_session_next_notice(sessions[i], 5 * KVT_NS_PER_S, &notice) == -EPIPE);
        kvt_session_detach(sessions[i]);
    }
    teardown();
}

static int child_attach(const char *path)
{
    struct kvt_client_config config = {.socket_path = path};
    struct kvt_op op;

    CHECK(kvt_arena_init(&arena, KVT_MIB, KVT_MIB) == 0);
    CHECK(kvt_client_open(&client, &config) == 0);
    fake_op_init(&op, &arena, KVT_OP_ATTACH);
    CHECK(kvt_client_attach(client, &op) != NULL);
    for (;;)
        (void)pause();
}

static void test_kill(void)
{
    char *args[] = {(char *)(uintptr_t) "self", (char *)(uintptr_t) "attach", fake.path, NULL};
    pid_t pid = 0;

    setup((struct kvt_server_config){0});
    for (unsigned i = 1; i <= 3; i++) {
        CHECK(posix_spawn(&pid, "/proc/self/exe", NULL, NULL, args, environ) == 0);
        CHECK(fake_wait(submitted(KVT_OP_ATTACH), i));
        (void)usleep(i * 30000); /* killed early, and when attached */
        CHECK(kill(pid, SIGKILL) == 0);
        CHECK(waitpid(pid, NULL, 0) == pid);
        CHECK(fake_wait(submitted(KVT_OP_DETACH), i));
    }
    teardown();
    CHECK(atomic_load(submitted(KVT_OP_DETACH)) == 3);
}

static void test_notices(void)
{
    struct kvt_notice notice = {0}, sent = {.kind = KVT_NOTICE_QUIESCED};
    struct kvt_session *session;
    struct kvt_session_sink *sink;
    struct kvt_op op;

    setup((struct kvt_server_config){0});
    fake_op_init(&op, &arena, KVT_OP_ATTACH);
    session = attach(&op);
    CHECK(session != NULL);
    sink = atomic_load(&fake.service.last_sink);
    CHECK(kvt_session_next_notice(session, KVT_NS_PER_MS, &notice) == 0);
    for (uint64_t i = 0; i < 100; i++) {
        sent.op_id = i;
        kvt_server_notify(sink, &sent);
        CHECK(kvt_session_next_notice(session, 5 * KVT_NS_PER_S, &notice) == 1);
        CHECK(notice.kind == KVT_NOTICE_QUIESCED && notice.op_id == i);
    }
    sent = (struct kvt_notice){.kind = KVT_NOTICE_EPOCH, .epoch = 77};
    kvt_server_notify(sink, &sent);
    CHECK(kvt_session_next_notice(session, 5 * KVT_NS_PER_S, &notice) == 1);
    CHECK(notice.kind == KVT_NOTICE_EPOCH && notice.epoch == 77);
    sent = (struct kvt_notice){.kind = KVT_NOTICE_LEASE_ENDED, .handle = {1, 2, 3}};
    kvt_server_notify(sink, &sent);
    CHECK(kvt_session_next_notice(session, 5 * KVT_NS_PER_S, &notice) == 1);
    CHECK(notice.kind == KVT_NOTICE_LEASE_ENDED && notice.handle.secret == 3);
    kvt_session_detach(session);
    teardown();
}

static atomic_bool is_pushing;

/* The sink is the service's until it has served DETACH: not before this test has pushed its last.
 */
static bool detach_after_pushing(struct fake_service *service, struct kvt_op *op)
{
    (void)service;
    while (op->kind == KVT_OP_DETACH && atomic_load(&is_pushing))
        (void)usleep(100);
    return false;
}

/* A client that reads nothing: bounded, and it loses its session, not the daemon its memory. */
static void test_unread_notices(void)
{
    struct kvt_notice sent = {.kind = KVT_NOTICE_QUIESCED};
    struct kvt_session *session;
    struct kvt_op op;

    setup((struct kvt_server_config){0});
    atomic_store(&is_pushing, true);
    fake.service.handle = detach_after_pushing;
    fake_op_init(&op, &arena, KVT_OP_ATTACH);
    session = attach(&op);
    CHECK(session != NULL);
    for (uint64_t i = 0; i < 200000 && atomic_load(submitted(KVT_OP_DETACH)) == 0; i++)
        kvt_server_notify(atomic_load(&fake.service.last_sink), &sent);
    atomic_store(&is_pushing, false);
    CHECK(fake_wait(submitted(KVT_OP_DETACH), 1));
    kvt_session_detach(session);
    teardown();
    CHECK(atomic_load(submitted(KVT_OP_DETACH)) == 1);
}

/* ---- regions ----------------------------------------------------------------------------------
 */

static int make_memfd(size_t bytes, int seals)
{
    int fd = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);

    CHECK(fd >= 0 && ftruncate(fd, (off_t)bytes) == 0);
    CHECK(seals == 0 || fcntl(fd, F_ADD_SEALS, seals) == 0);
    return fd;
}

static void attach_region(const uint8_t token[KVT_REGION_TOKEN_BYTES], uint64_t bytes,
                          enum kvt_code wanted)
{
    struct kvt_session *session;
    struct kvt_op op;

    fake_op_init(&op, &arena, KVT_OP_ATTACH);
    op.req.attach.regions_count = 1;
    op.req.attach.regions[0].bytes = bytes;
    memcpy(op.req.attach.regions[0].token, token, KVT_REGION_TOKEN_BYTES);
    session = attach(&op);
    CHECK_CODE(&op, wanted);
    kvt_session_detach(session);
}

/* A raw message with @count descriptors; the answer's status. */
static uint32_t raw_region(const void *at, size_t bytes, int fd, unsigned count)
{
    _Alignas(struct cmsghdr) uint8_t control[CMSG_SPACE(32 * sizeof(int))] = {0};
    struct kvt_region_answer answer = {0};
    struct iovec iov = {.iov_base = (void *)(uintptr_t)at, .iov_len = bytes};
    struct msghdr msg = {.msg_iov = &iov, .msg_iovlen = 1};
    char path[128];
    int s = -1;

    (void)snprintf(path, sizeof(path), "%s.regions", fake.path);
    CHECK(kvt_client_connect(path, SOCK_SEQPACKET, &s) == 0);
    if (count > 0) {
        struct cmsghdr *cmsg;

        msg.msg_control = control;
        msg.msg_controllen = CMSG_SPACE(count * sizeof(int));
        cmsg = CMSG_FIRSTHDR(&msg);
        cmsg->cmsg_level = SOL_SOCKET;
        cmsg->cmsg_type = SCM_RIGHTS;
        cmsg->cmsg_len = CMSG_LEN(count * sizeof(int));
        for (unsigned i = 0; i < count; i++)
            memcpy(CMSG_DATA(cmsg) + i * sizeof(int), &fd, sizeof(int));
    }
    CHECK(sendmsg(s, &msg, 0) == (ssize_t)bytes);
    CHECK(recv(s, &answer, sizeof(answer), 0) == (ssize_t)sizeof(answer));
    (void)close(s);
    return answer.status;
}

static unsigned open_descriptors(void)
{
    unsigned count = 0;

    for (int fd = 0; fd < 4096; fd++)
        count += fcntl(fd, F_GETFD) >= 0;
    return count;
}

static void test_regions(void)
{
    struct kvt_region_request request = {.magic = KVT_REGION_MAGIC, .bytes = 4096};
    int good = make_memfd(8192, F_SEAL_SHRINK | F_SEAL_GROW), bad = make_memfd(8192, 0);
    uint8_t token[KVT_REGION_TOKEN_BYTES], other[KVT_REGION_TOKEN_BYTES] = {0};
    char why[256] = "";
    unsigned before;

    setup((struct kvt_server_config){0});
    CHECK(kvt_client_send_region(client, good, 8192, token, why, sizeof(why)) == 0);
    attach_region(token, 4096, KVT_CODE_NOT_FOUND); /* another size: refused, not used up */
    attach_region(other, 8192, KVT_CODE_NOT_FOUND);
    attach_region(token, 8192, KVT_CODE_OK);
    attach_region(token, 8192, KVT_CODE_NOT_FOUND); /* once only */
    CHECK(kvt_client_send_region(client, bad, 8192, token, why, sizeof(why)) == -EINVAL);
    CHECK(strstr(why, "sealed") != NULL);
    CHECK(kvt_client_send_region(client, good, 8193, token, why, sizeof(why)) == -EINVAL);
    CHECK(strstr(why, "smaller") != NULL);
    (void)usleep(50000);
    before = open_descriptors();
    for (unsigned i = 0; i < 5; i++) {
        CHECK(raw_region(&request, sizeof(request), good, 0) == EINVAL);
        CHECK(raw_region(&request, sizeof(request), good, 2) == EINVAL);
        CHECK(raw_region(&request, sizeof(request), good, 30) == EINVAL);
        CHECK(raw_region("garbage", 7, good, 1) == EPROTO);
    }
    for (unsigned i = 0; open_descriptors() > before; i++) { /* none is kept */
        CHECK(i < 1000);
        (void)usleep(10000);
    }
    /* more than one may have: refused, and all are closed at the end (teardown compares) */
    for (unsigned i = 0; i < 128; i++)
        CHECK(raw_region(&request, sizeof(request), good, 1) == 0);
    CHECK(raw_region(&request, sizeof(request), good, 1) == EAGAIN);
    teardown();
    (void)close(good);
    (void)close(bad);
}

/* The token of another user: needs root to become one. */
static int child_other(const char *path, const char *hex)
{
    struct kvt_client_config config = {.socket_path = path};
    struct kvt_op op;

    CHECK(setuid(65534) == 0);
    CHECK(kvt_arena_init(&arena, KVT_MIB, KVT_MIB) == 0);
    CHECK(kvt_client_open(&client, &config) == 0);
    fake_op_init(&op, &arena, KVT_OP_ATTACH);
    op.req.attach.regions_count = 1;
    op.req.attach.regions[0].bytes = 8192;
    for (unsigned i = 0; i < KVT_REGION_TOKEN_BYTES; i++) {
        char two[3] = {hex[2 * i], hex[2 * i + 1], 0};

        op.req.attach.regions[0].token[i] = (uint8_t)strtoul(two, NULL, 16);
    }
    CHECK(kvt_client_attach(client, &op) == NULL);
    CHECK_CODE(&op, KVT_CODE_NOT_FOUND);
    return 0;
}

/* A token that nobody takes: the mapping goes by itself, and the token is worth nothing. */
static void test_region_expiry(void)
{
    int fd = make_memfd(8192, F_SEAL_SHRINK | F_SEAL_GROW);
    uint8_t early[KVT_REGION_TOKEN_BYTES], late[KVT_REGION_TOKEN_BYTES];
    char why[64];

    setup((struct kvt_server_config){.region_ns = KVT_NS_PER_S});
    CHECK(kvt_client_send_region(client, fd, 8192, early, why, sizeof(why)) == 0);
    attach_region(early, 8192, KVT_CODE_OK);
    CHECK(kvt_client_send_region(client, fd, 8192, late, why, sizeof(why)) == 0);
    (void)usleep(1050000);
    attach_region(late, 8192, KVT_CODE_NOT_FOUND); /* before or after it was swept */
    CHECK(fake_wait(&fake.service.regions_closed, 2));
    CHECK(atomic_load(&fake.service.regions_open) == 2);
    attach_region(late, 8192, KVT_CODE_NOT_FOUND);
    teardown();
    (void)close(fd);
}

static void test_other_uid(void)
{
    char hex[2 * KVT_REGION_TOKEN_BYTES + 1] = "", why[64];
    char *args[] = {(char *)(uintptr_t) "self", (char *)(uintptr_t) "other", fake.path, hex, NULL};
    int fd = make_memfd(8192, F_SEAL_SHRINK | F_SEAL_GROW), status = -1;
    uint8_t token[KVT_REGION_TOKEN_BYTES];
    pid_t pid;

    if (getuid() != 0) {
        printf("not root: the token of another user was not tried\n");
        (void)close(fd);
        return;
    }
    setup((struct kvt_server_config){.socket_mode = 0666});
    CHECK(chmod(fake.dir, 0755) == 0);
    CHECK(kvt_client_send_region(client, fd, 8192, token, why, sizeof(why)) == 0);
    for (unsigned i = 0; i < KVT_REGION_TOKEN_BYTES; i++)
        (void)snprintf(hex + 2 * i, 3, "%02x", token[i]);
    CHECK(posix_spawn(&pid, "/proc/self/exe", NULL, NULL, args, environ) == 0);
    CHECK(waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    attach_region(token, 8192, KVT_CODE_OK);
    teardown();
    (void)close(fd);
}

/* ---- health -----------------------------------------------------------------------------------
 */

static enum kvt_health_status next_health(struct kvt_client_call *call)
{
    enum kvt_health_status status = KVT_HEALTH_UNKNOWN;
    grpc_op op = kvt_receive_op(call);
    grpc_slice slice;
    size_t bytes;
    const uint8_t *at;

    kvt_call_batch(call, &op, 1, &call->tags[0]);
    (void)kvt_call_wait(call, &call->tags[0]);
    CHECK(call->received != NULL);
    at = kvt_received_flat(call, &slice, &bytes);
    CHECK(kvt_codec_read_health_answer(at, bytes, &status) == 0);
    grpc_slice_unref(slice);
    return status;
}

static void start_watch(struct kvt_client_call *call, struct kvt_op *op, const char *name)
{
    grpc_op ops[4] = {{.op = GRPC_OP_SEND_INITIAL_METADATA},
                      {.op = GRPC_OP_SEND_MESSAGE},
                      {.op = GRPC_OP_SEND_CLOSE_FROM_CLIENT}};
    uint8_t at[KVT_CODEC_HEALTH_NAME_BYTES * 2];
    grpc_slice slice =
        grpc_slice_from_copied_buffer((const char *)at, kvt_codec_write_health_request(name, at));
    grpc_byte_buffer *request = grpc_raw_byte_buffer_create(&slice, 1);

    kvt_call_begin(call, client, op, "/grpc.health.v1.Health/Watch", true);
    ops[1].data.send_message.send_message = request;
    ops[3] = kvt_initial_op(call);
    kvt_call_batch(call, ops, 4, &call->tags[0]);
    (void)kvt_call_wait(call, &call->tags[0]);
    grpc_byte_buffer_destroy(request);
    grpc_slice_unref(slice);
}

static void end_watch(struct kvt_client_call *call)
{
    grpc_op op = kvt_status_op(call);

    (void)grpc_call_cancel(call->grpc, NULL);
    kvt_call_batch(call, &op, 1, &call->tags[1]);
    (void)kvt_call_wait(call, &call->tags[1]);
    kvt_call_end(call);
}

static void test_health(void)
{
    struct kvt_client_call watch, other;
    struct kvt_op op, watch_op = {0};

    setup((struct kvt_server_config){0});
    fake_op_init(&op, &arena, KVT_OP_HEALTH);
    kvt_client_call(client, &op);
    CHECK_CODE(&op, KVT_CODE_OK);
    CHECK(op.ans.health.is_serving);
    kvt_client_health(client, &op, "kvtier.v1.KvTier");
    CHECK(op.code == KVT_CODE_OK && op.ans.health.is_serving);
    kvt_client_health(client, &op, "nobody");
    CHECK_CODE(&op, KVT_CODE_NOT_FOUND);
    start_watch(&watch, &watch_op, "");
    CHECK(next_health(&watch) == KVT_HEALTH_SERVING);
    start_watch(&other, &watch_op, "nobody");
    CHECK(next_health(&other) == KVT_HEALTH_SERVICE_UNKNOWN);
    atomic_store(&fake.service.is_unhealthy, true);
    CHECK(next_health(&watch) == KVT_HEALTH_NOT_SERVING);
    kvt_client_call(client, &op);
    CHECK(op.code == KVT_CODE_OK && !op.ans.health.is_serving);
    atomic_store(&fake.service.is_unhealthy, false);
    CHECK(next_health(&watch) == KVT_HEALTH_SERVING);
    end_watch(&watch);
    end_watch(&other);
    teardown();
}

int main(int argc, char **argv)
{
    kvt_client_library_init();
    if (argc == 3 && strcmp(argv[1], "attach") == 0)
        return child_attach(argv[2]);
    if (argc == 4 && strcmp(argv[1], "other") == 0)
        return child_other(argv[2], argv[3]);
    test_detach();
    test_late_attach();
    test_stop_detaches();
    test_kill();
    test_notices();
    test_unread_notices();
    test_regions();
    test_region_expiry();
    test_other_uid();
    test_health();
    kvt_client_library_deinit();
    return 0;
}
