/* The region socket: a memfd comes by SCM_RIGHTS, the service maps it, a random token goes back,
 * and an Attach of the same user takes the mapping for the token, once. What nobody takes within
 * 30 s is unmapped. Tokens are bounded in all and per user; whatever is odd ends the connection. */
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include "daemon/base/alloc.h"
#include "proto/codec/region_wire.h"
#include "proto/server/internal.h"

#define DESCRIPTORS_MAX                                                                            \
    8 /* that a message could carry and we would close; the kernel drops more                      \
       */

struct kvt_region_conn {
    int fd; /* the accept thread's */
    uint64_t uid;
};

struct kvt_region_conn *kvt_region_accept(struct kvt_server *server, int fd, uint64_t uid)
{
    struct kvt_region_conn *conn = kvt_alloc_zeroed(1, sizeof(*conn));

    (void)server;
    if (conn == NULL)
        return NULL;
    conn->fd = fd;
    conn->uid = uid;
    return conn;
}

struct kvt_region_conn *kvt_region_conn_free(struct kvt_server *server,
                                             struct kvt_region_conn *conn)
{
    (void)server;
    kvt_free(conn);
    return NULL;
}

/* ---- tokens -----------------------------------------------------------------------------------
 */

static struct kvt_region_token *find_free(struct kvt_server *server, uint64_t uid)
{
    struct kvt_region_token *found = NULL;
    uint32_t of_uid = 0;

    for (uint32_t i = 0; i < KVT_SERVER_REGIONS_MAX; i++) {
        struct kvt_region_token *entry = &server->regions.tokens[i];

        if (entry->mapping == NULL)
            found = entry;
        else if (entry->uid == uid)
            of_uid++;
    }
    return of_uid < KVT_SERVER_REGIONS_UID_MAX ? found : NULL;
}

/* False: too many, and the mapping is still the caller's. */
static bool add_token(struct kvt_server *server, uint64_t uid, void *mapping, uint64_t bytes,
                      const uint8_t token[KVT_REGION_TOKEN_BYTES])
{
    struct kvt_region_token *entry;

    pthread_mutex_lock(&server->regions.mutex);
    entry = find_free(server, uid);
    if (entry != NULL) {
        memcpy(entry->token, token, KVT_REGION_TOKEN_BYTES);
        entry->mapping = mapping;
        entry->bytes = bytes;
        entry->uid = uid;
        entry->expires_ns = kvt_time_add(kvt_clock_mono_ns(), server->config.region_ns);
    }
    pthread_mutex_unlock(&server->regions.mutex);
    return entry != NULL;
}

void *kvt_region_claim(struct kvt_server *server, const uint8_t token[KVT_REGION_TOKEN_BYTES],
                       uint64_t uid, uint64_t bytes)
{
    uint64_t now_ns = kvt_clock_mono_ns();
    void *mapping = NULL;

    pthread_mutex_lock(&server->regions.mutex);
    for (uint32_t i = 0; i < KVT_SERVER_REGIONS_MAX; i++) {
        struct kvt_region_token *entry = &server->regions.tokens[i];

        if (entry->mapping != NULL && entry->expires_ns > now_ns && entry->uid == uid &&
            entry->bytes == bytes && memcmp(entry->token, token, KVT_REGION_TOKEN_BYTES) == 0) {
            mapping = entry->mapping;
            entry->mapping = NULL;
            break;
        }
    }
    pthread_mutex_unlock(&server->regions.mutex);
    return mapping;
}

static void close_until(struct kvt_server *server, uint64_t now_ns)
{
    const struct kvt_service *service = server->config.service;

    for (uint32_t i = 0; i < KVT_SERVER_REGIONS_MAX; i++) {
        struct kvt_region_token *entry = &server->regions.tokens[i];
        void *mapping = NULL;

        pthread_mutex_lock(&server->regions.mutex);
        if (entry->mapping != NULL && entry->expires_ns <= now_ns) {
            mapping = entry->mapping;
            entry->mapping = NULL;
        }
        pthread_mutex_unlock(&server->regions.mutex);
        if (mapping != NULL)
            service->region_close(service->ctx, mapping);
    }
}

void kvt_region_tick(struct kvt_server *server, uint64_t now_ns)
{
    close_until(server, now_ns);
}

void kvt_region_close_all(struct kvt_server *server)
{
    close_until(server, KVT_TIME_NEVER_NS);
}

/* ---- messages ---------------------------------------------------------------------------------
 */

static void set_text(struct kvt_region_answer *answer, uint32_t status, const char *text)
{
    answer->status = status;
    /* The answer is zeroed: what is copied stays terminated. */
    memcpy(answer->text, text, strnlen(text, sizeof(answer->text) - 1));
}

static void open_region(struct kvt_server *server, struct kvt_region_conn *conn, int memfd,
                        uint64_t bytes, struct kvt_region_answer *answer)
{
    const struct kvt_service *service = server->config.service;
    const char *why = "the daemon cannot use this descriptor";
    uint8_t token[KVT_REGION_TOKEN_BYTES];
    void *mapping = NULL;
    int r;

    if (getrandom(token, sizeof(token), 0) != (ssize_t)sizeof(token)) {
        set_text(answer, EAGAIN, "no random numbers: retry");
        return;
    }
    r = service->region_open(service->ctx, memfd, bytes, &mapping, &why);
    if (r != 0) {
        set_text(answer, r < 0 ? (uint32_t)-r : EINVAL, why);
    } else if (!add_token(server, conn->uid, mapping, bytes, token)) {
        service->region_close(service->ctx, mapping);
        set_text(answer, EAGAIN, "too many regions were sent and not attached: attach them first");
    } else {
        memcpy(answer->token, token, sizeof(token));
    }
}

/* Takes the descriptors out of @msg; their number. */
static unsigned take_descriptors(struct msghdr *msg, int *ret_fds)
{
    unsigned count = 0;

    for (struct cmsghdr *cmsg = CMSG_FIRSTHDR(msg); cmsg != NULL; cmsg = CMSG_NXTHDR(msg, cmsg)) {
        size_t here;

        if (cmsg->cmsg_level != SOL_SOCKET || cmsg->cmsg_type != SCM_RIGHTS)
            continue;
        here = (cmsg->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        for (size_t i = 0; i < here && count < DESCRIPTORS_MAX; i++)
            memcpy(&ret_fds[count++], CMSG_DATA(cmsg) + i * sizeof(int), sizeof(int));
    }
    return count;
}

bool kvt_region_serve(struct kvt_server *server, struct kvt_region_conn *conn)
{
    _Alignas(struct cmsghdr) uint8_t control[CMSG_SPACE(DESCRIPTORS_MAX * sizeof(int))];
    struct kvt_region_request request = {0};
    struct kvt_region_answer answer = {.magic = KVT_REGION_MAGIC};
    struct iovec iov = {.iov_base = &request, .iov_len = sizeof(request)};
    struct msghdr msg = {.msg_iov = &iov,
                         .msg_iovlen = 1,
                         .msg_control = control,
                         .msg_controllen = sizeof(control)};
    int fds[DESCRIPTORS_MAX];
    unsigned count;
    ssize_t bytes;

    bytes = recvmsg(conn->fd, &msg, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    if (bytes < 0)
        return errno == EAGAIN || errno == EINTR;
    count = take_descriptors(&msg, fds);
    if (bytes == 0 && count == 0)
        return false; /* the peer is gone */
    if (bytes != (ssize_t)sizeof(request) || (msg.msg_flags & MSG_TRUNC) != 0 ||
        request.magic != KVT_REGION_MAGIC || request.reserved != 0)
        set_text(&answer, EPROTO, "not a request of the region protocol");
    else if (count != 1 || (msg.msg_flags & MSG_CTRUNC) != 0)
        set_text(&answer, EINVAL, "a request carries exactly one descriptor");
    else if (request.bytes == 0)
        set_text(&answer, EINVAL, "bytes: must be at least 1");
    else
        open_region(server, conn, fds[0], request.bytes, &answer);
    for (unsigned i = 0; i < count; i++)
        (void)close(fds[i]);
    /* A peer that does not read its answers is sent away; its token expires. */
    return send(conn->fd, &answer, sizeof(answer), MSG_DONTWAIT | MSG_NOSIGNAL) ==
               (ssize_t)sizeof(answer) &&
           answer.status != EPROTO;
}
