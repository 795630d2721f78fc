/* The accept thread: one epoll over the listening sockets, the region socket's connections, and
 * one descriptor of ours for each connection that gRPC serves.
 *
 * gRPC tells nobody when a connection ends, and calls know their connection only as "fd:N". So
 * each accepted socket stays open here too, and gRPC gets a duplicate whose number comes from a
 * rotating range. Both sides' ends show as EPOLLHUP on ours (gRPC shuts a socket down before it
 * closes it): only then the entry goes and the connection no longer counts. A number comes back
 * after thousands of connections at the earliest, so that a call of a dead connection cannot be
 * taken for another user's.
 *
 * When the house is full, the oldest connection that never made a call goes. */
#include <fcntl.h>
#include <grpc/grpc_posix.h>
#include <grpc/support/alloc.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include "daemon/base/alloc.h"
#include "proto/server/internal.h"

#define FDS_MAX 65536u
#define IDLE_NS (5 * KVT_NS_PER_S) /* without a call, before it may be sent away */
#define REGION_CONNS_MAX 64u
#define EVENTS_MAX 64

enum source_kind { SOURCE_LISTEN, SOURCE_WAKE, SOURCE_CONN, SOURCE_REGION };

/* What epoll gives back. */
struct source {
    enum source_kind kind;
    unsigned listen_idx;
};

struct kvt_conn {
    struct source source; /* first */
    struct kvt_list link;
    struct kvt_peer peer;
    int own_fd, grpc_fd;
    uint64_t since_ns;
    atomic_bool had_call;
    uint32_t ops_count;             /* requests in progress; under conns.mutex */
    struct kvt_region_conn *region; /* SOURCE_REGION */
};

static struct source listen_sources[3] = {
    {SOURCE_LISTEN, 0}, {SOURCE_LISTEN, 1}, {SOURCE_LISTEN, 2}};
static struct source wake_source = {SOURCE_WAKE, 0};

bool kvt_accept_peer(struct kvt_server *server, grpc_call *call, struct kvt_peer *ret_peer)
{
    char *text = grpc_call_get_peer(call);
    unsigned long fd = FDS_MAX;
    bool is_known = false;

    if (strncmp(text, "fd:", 3) == 0)
        fd = strtoul(text + 3, NULL, 10);
    gpr_free(text);
    pthread_mutex_lock(&server->conns.mutex);
    if (fd < server->conns.fds_count && server->conns.by_fd[fd] != NULL) {
        struct kvt_conn *conn = server->conns.by_fd[fd];

        atomic_store_explicit(&conn->had_call, true, memory_order_relaxed);
        *ret_peer = conn->peer;
        is_known = true;
    }
    pthread_mutex_unlock(&server->conns.mutex);
    return is_known;
}

/* conns.mutex held. NULL: it ended; calls may outlive their connection. */
static struct kvt_conn *conn_of(struct kvt_server *server, const struct kvt_peer *peer)
{
    struct kvt_conn *conn = server->conns.by_fd[peer->conn_fd];

    return conn != NULL && conn->peer.conn_id == peer->conn_id ? conn : NULL;
}

bool kvt_accept_begin_op(struct kvt_server *server, const struct kvt_peer *peer)
{
    struct kvt_conn *conn;
    bool has_room = true;

    pthread_mutex_lock(&server->conns.mutex);
    conn = conn_of(server, peer);
    if (conn != NULL) {
        has_room = conn->ops_count < server->config.ops_per_connection_max;
        conn->ops_count += has_room;
    }
    pthread_mutex_unlock(&server->conns.mutex);
    return has_room;
}

void kvt_accept_end_op(struct kvt_server *server, const struct kvt_peer *peer)
{
    struct kvt_conn *conn;

    pthread_mutex_lock(&server->conns.mutex);
    conn = conn_of(server, peer);
    if (conn != NULL) {
        KVT_ASSERT(conn->ops_count > 0);
        conn->ops_count--;
    }
    pthread_mutex_unlock(&server->conns.mutex);
}

/* ---- connections of gRPC ----------------------------------------------------------------------
 */

static struct kvt_conn *conn_free(struct kvt_server *server, struct kvt_conn *conn)
{
    bool is_region = conn->source.kind == SOURCE_REGION;

    if (is_region) {
        conn->region = kvt_region_conn_free(server, conn->region);
        server->conns.regions_count--;
    }
    pthread_mutex_lock(&server->conns.mutex);
    if (conn->grpc_fd >= 0)
        server->conns.by_fd[conn->grpc_fd] = NULL;
    kvt_list_remove(&conn->link);
    server->conns.count -= !is_region;
    pthread_mutex_unlock(&server->conns.mutex);
    /* Closing ours is not enough: gRPC's duplicate keeps it in the set. */
    (void)epoll_ctl(server->accept.epoll_fd, EPOLL_CTL_DEL, conn->own_fd, NULL);
    (void)close(conn->own_fd);
    kvt_free(conn);
    return NULL;
}

/* A duplicate of @fd with a number that was not used for long; -errno. */
static int dup_rotating(struct kvt_server *server, int fd)
{
    for (unsigned attempt = 0; attempt < 2; attempt++) {
        int copy = fcntl(fd, F_DUPFD_CLOEXEC, (int)server->conns.fd_next);

        if (copy >= 0 && (uint32_t)copy < server->conns.fds_count &&
            server->conns.by_fd[copy] == NULL) {
            server->conns.fd_next = (uint32_t)copy + 1;
            if (server->conns.fd_next >= server->conns.fds_count)
                server->conns.fd_next = server->conns.fd_first;
            return copy;
        }
        if (copy >= 0)
            (void)close(copy);
        server->conns.fd_next = server->conns.fd_first;
    }
    return -EMFILE;
}

/* Sends the oldest connection away that never made a call; its end comes as EPOLLHUP. */
static void evict_idle(struct kvt_server *server, uint64_t now_ns)
{
    kvt_list_for_each (link, &server->conns.list) {
        struct kvt_conn *conn = KVT_CONTAINER_OF(link, struct kvt_conn, link);

        if (!atomic_load_explicit(&conn->had_call, memory_order_relaxed) &&
            now_ns - conn->since_ns > IDLE_NS) {
            (void)shutdown(conn->own_fd, SHUT_RDWR);
            return;
        }
    }
}

static struct kvt_conn *conn_new(struct kvt_server *server, int fd, enum source_kind kind,
                                 bool is_admin)
{
    struct kvt_conn *conn = kvt_alloc_zeroed(1, sizeof(*conn));
    struct ucred cred = {0};
    socklen_t bytes = sizeof(cred);
    struct epoll_event event = {.events = kind == SOURCE_REGION ? EPOLLIN : 0, .data.ptr = conn};

    if (conn == NULL || getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &cred, &bytes) < 0 ||
        epoll_ctl(server->accept.epoll_fd, EPOLL_CTL_ADD, fd, &event) < 0) {
        kvt_free(conn);
        return NULL;
    }
    conn->source.kind = kind;
    conn->peer =
        (struct kvt_peer){.uid = cred.uid, .pid = (uint64_t)cred.pid, .is_admin = is_admin};
    conn->own_fd = fd;
    conn->grpc_fd = -1;
    conn->since_ns = kvt_clock_mono_ns();
    atomic_init(&conn->had_call, false);
    kvt_list_init(&conn->link);
    return conn;
}

static void add_connection(struct kvt_server *server, int fd, bool is_admin)
{
    struct kvt_conn *conn;
    int copy;

    if (server->conns.count >= server->config.connections_max) {
        atomic_fetch_add(&server->stats.connections_refused, 1);
        evict_idle(server, kvt_clock_mono_ns());
        (void)close(fd);
        return;
    }
    copy = dup_rotating(server, fd);
    conn = copy < 0 ? NULL : conn_new(server, fd, SOURCE_CONN, is_admin);
    if (conn == NULL) {
        atomic_fetch_add(&server->stats.connections_refused, 1);
        if (copy >= 0)
            (void)close(copy);
        (void)close(fd);
        return;
    }
    conn->grpc_fd = copy;
    conn->peer.conn_fd = (uint32_t)copy;
    conn->peer.conn_id = ++server->conns.id_next;
    pthread_mutex_lock(&server->conns.mutex);
    server->conns.by_fd[copy] = conn;
    kvt_list_push_back(&server->conns.list, &conn->link);
    server->conns.count++;
    pthread_mutex_unlock(&server->conns.mutex);
    atomic_fetch_add(&server->stats.connections, 1);
    grpc_server_add_channel_from_fd(server->grpc, copy, server->creds);
}

static void add_region_connection(struct kvt_server *server, int fd)
{
    struct kvt_conn *conn = NULL;

    if (server->conns.regions_count < REGION_CONNS_MAX)
        conn = conn_new(server, fd, SOURCE_REGION, false);
    if (conn != NULL)
        conn->region = kvt_region_accept(server, fd, conn->peer.uid);
    if (conn == NULL || conn->region == NULL) {
        kvt_free(conn);
        (void)close(fd);
        return;
    }
    kvt_list_push_back(&server->conns.regions, &conn->link);
    server->conns.regions_count++;
}

static void on_listen(struct kvt_server *server, unsigned idx)
{
    for (unsigned i = 0; i < 16; i++) { /* the rest comes with the next turn */
        int fd = accept4(server->listen_fds[idx], NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);

        if (fd < 0) {
            /* Out of descriptors: the peer stays in the backlog; do not spin over it. */
            if (errno == EMFILE || errno == ENFILE)
                (void)usleep(10000);
            return;
        }
        if (idx == 2)
            add_region_connection(server, fd);
        else
            add_connection(server, fd, idx == 1);
    }
}

/* ---- the thread -------------------------------------------------------------------------------
 */

static void tick(struct kvt_server *server)
{
    uint64_t now_ns = kvt_clock_mono_ns();

    kvt_region_tick(server, now_ns);
    kvt_list_for_each (link, &server->conns.regions) {
        struct kvt_conn *conn = KVT_CONTAINER_OF(link, struct kvt_conn, link);

        if (now_ns - conn->since_ns > KVT_SERVER_REGION_NS)
            conn_free(server, conn);
    }
}

static void *accept_main(void *arg)
{
    struct kvt_server *server = arg;
    struct epoll_event events[EVENTS_MAX];
    uint64_t tick_ns = kvt_clock_mono_ns();

    while (!atomic_load(&server->accept.is_stopping)) {
        int count = epoll_wait(server->accept.epoll_fd, events, EVENTS_MAX, 1000);

        for (int i = 0; i < count; i++) {
            struct source *source = events[i].data.ptr;
            struct kvt_conn *conn = (struct kvt_conn *)source;

            if (source->kind == SOURCE_LISTEN)
                on_listen(server, source->listen_idx);
            else if (source->kind == SOURCE_CONN)
                conn_free(server, conn);
            else if (source->kind == SOURCE_REGION && !kvt_region_serve(server, conn->region))
                conn_free(server, conn);
        }
        if (kvt_clock_mono_ns() - tick_ns >= KVT_NS_PER_S) {
            tick(server);
            tick_ns = kvt_clock_mono_ns();
        }
    }
    return NULL;
}

static int init_table(struct kvt_server *server)
{
    struct rlimit limit;

    if (getrlimit(RLIMIT_NOFILE, &limit) < 0)
        return kvt_trace(-errno);
    server->conns.fds_count = (uint32_t)KVT_MIN((uint64_t)limit.rlim_cur, (uint64_t)FDS_MAX);
    /* The lower half stays for everything else. */
    server->conns.fd_first = server->conns.fd_next = KVT_MIN(server->conns.fds_count / 2, 1024u);
    server->conns.by_fd = kvt_alloc_zeroed(server->conns.fds_count, sizeof(struct kvt_conn *));
    return server->conns.by_fd == NULL ? kvt_trace(-ENOMEM) : 0;
}

int kvt_accept_start(struct kvt_server *server)
{
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = &wake_source};
    int r = init_table(server);

    if (r < 0)
        return kvt_trace(r);
    server->accept.epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    server->accept.wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (server->accept.epoll_fd < 0 || server->accept.wake_fd < 0 ||
        epoll_ctl(server->accept.epoll_fd, EPOLL_CTL_ADD, server->accept.wake_fd, &event) < 0)
        return kvt_trace(-errno);
    for (unsigned i = 0; i < 3; i++) {
        event.data.ptr = &listen_sources[i];
        if (server->listen_fds[i] >= 0 &&
            epoll_ctl(server->accept.epoll_fd, EPOLL_CTL_ADD, server->listen_fds[i], &event) < 0)
            return kvt_trace(-errno);
    }
    r = -pthread_create(&server->accept.thread, NULL, accept_main, server);
    if (r < 0)
        return kvt_trace(r);
    server->accept.is_running = true;
    return 0;
}

static void free_all(struct kvt_server *server, struct kvt_list *list)
{
    while (!kvt_list_is_empty(list))
        conn_free(server, KVT_CONTAINER_OF(list->next, struct kvt_conn, link));
}

void kvt_accept_stop(struct kvt_server *server)
{
    uint64_t one = 1;

    if (server->accept.is_running) {
        atomic_store(&server->accept.is_stopping, true);
        (void)!write(server->accept.wake_fd, &one, sizeof(one));
        (void)pthread_join(server->accept.thread, NULL);
        server->accept.is_running = false;
        free_all(server, &server->conns.regions);
    }
}

void kvt_accept_deinit(struct kvt_server *server)
{
    kvt_accept_stop(server);
    if (server->conns.by_fd != NULL)
        free_all(server, &server->conns.list);
    kvt_free(server->conns.by_fd);
    server->conns.by_fd = NULL;
    if (server->accept.epoll_fd >= 0)
        (void)close(server->accept.epoll_fd);
    if (server->accept.wake_fd >= 0)
        (void)close(server->accept.wake_fd);
    server->accept.epoll_fd = server->accept.wake_fd = -1;
}
