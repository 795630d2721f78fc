/* Socket files. Who may serve on a path is decided by a lock on "<path>.lock", which lives as long
 * as its holder: under it, whatever socket file is there is a dead daemon's and is replaced. Lock
 * files stay: removing one would race with the next daemon that opens it. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "daemon/base/alloc.h"
#include "proto/server/internal.h"

#define BACKLOG 128

static int read_pid(int fd)
{
    char text[32] = "";
    ssize_t bytes = pread(fd, text, sizeof(text) - 1, 0);
    long pid = bytes > 0 ? strtol(text, NULL, 10) : 0;

    return pid > 0 && pid <= INT32_MAX ? (int)pid : 0;
}

/* Takes the lock of @path: -errno, KVT_SERVER_E_LIVE, or 0 and the descriptor. */
static int lock_path(const char *path, int *ret_fd, int *ret_pid)
{
    char name[sizeof(((struct sockaddr_un *)NULL)->sun_path) + 8];
    char text[32];
    kvt_autoclose int fd = -1;
    int bytes;

    (void)snprintf(name, sizeof(name), "%s.lock", path);
    fd = open(name, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (fd < 0)
        return kvt_trace(-errno);
    if (flock(fd, LOCK_EX | LOCK_NB) < 0) {
        if (errno != EWOULDBLOCK)
            return kvt_trace(-errno);
        *ret_pid = read_pid(fd);
        return KVT_SERVER_E_LIVE;
    }
    bytes = snprintf(text, sizeof(text), "%d\n", (int)getpid());
    if (ftruncate(fd, 0) < 0 || pwrite(fd, text, (size_t)bytes, 0) != bytes)
        return kvt_trace(-EIO);
    *ret_fd = fd;
    fd = -1;
    return 0;
}

static int remove_stale(const char *path)
{
    struct stat st;

    if (lstat(path, &st) < 0)
        return errno == ENOENT ? 0 : kvt_trace(-errno);
    if (!S_ISSOCK(st.st_mode))
        return kvt_trace(-EEXIST); /* somebody's file: not ours to remove */
    return unlink(path) < 0 ? kvt_trace(-errno) : 0;
}

static int listen_on(struct kvt_server *server, unsigned idx, int type, uint32_t mode)
{
    const char *path = server->paths[idx];
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    int r = remove_stale(path);
    int fd;

    if (r < 0)
        return kvt_trace(r);
    fd = socket(AF_UNIX, type | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return kvt_trace(-errno);
    server->listen_fds[idx] = fd;
    memcpy(address.sun_path, path, strlen(path) + 1);
    /* bind takes the mode of the socket itself; nobody can connect before listen. */
    if (fchmod(fd, 0600) < 0 || bind(fd, (const struct sockaddr *)&address, sizeof(address)) < 0)
        return kvt_trace(-errno);
    server->is_bound[idx] = true;
    if (chmod(path, mode) < 0 || listen(fd, BACKLOG) < 0)
        return kvt_trace(-errno);
    return 0;
}

static int copy_paths(struct kvt_server *server)
{
    static const size_t path_max = sizeof(((struct sockaddr_un *)NULL)->sun_path) - 1;
    const char *path = server->config.socket_path;
    const char *admin = server->config.admin_socket_path;
    size_t bytes = strlen(path) + sizeof(".regions");

    if (bytes - 1 > path_max || (admin != NULL && strlen(admin) > path_max))
        return kvt_trace(-ENAMETOOLONG);
    server->paths[0] = kvt_alloc_text(path);
    server->paths[1] = admin != NULL ? kvt_alloc_text(admin) : NULL;
    server->paths[2] = kvt_alloc_zeroed(1, bytes);
    if (server->paths[0] == NULL || server->paths[2] == NULL ||
        (admin != NULL && server->paths[1] == NULL))
        return kvt_trace(-ENOMEM);
    (void)snprintf(server->paths[2], bytes, "%s.regions", path);
    return 0;
}

int kvt_listen_all(struct kvt_server *server, int *ret_pid)
{
    const struct kvt_server_config *config = &server->config;
    int r = copy_paths(server);

    if (r < 0)
        return kvt_trace(r);
    for (unsigned i = 0; i < 2; i++) {
        if (server->paths[i] == NULL)
            continue;
        r = lock_path(server->paths[i], &server->lock_fds[i], ret_pid);
        if (r != 0)
            return r;
    }
    r = listen_on(server, 0, SOCK_STREAM, config->socket_mode);
    if (r == 0 && server->paths[1] != NULL)
        r = listen_on(server, 1, SOCK_STREAM, config->admin_socket_mode);
    if (r == 0)
        r = listen_on(server, 2, SOCK_SEQPACKET, config->socket_mode);
    return r;
}

void kvt_listen_close(struct kvt_server *server)
{
    for (unsigned i = 0; i < 3; i++) {
        if (server->listen_fds[i] >= 0)
            (void)close(server->listen_fds[i]);
        server->listen_fds[i] = -1;
        if (server->is_bound[i])
            (void)unlink(server->paths[i]);
        server->is_bound[i] = false;
    }
    for (unsigned i = 0; i < 2; i++) {
        if (server->lock_fds[i] >= 0)
            (void)close(server->lock_fds[i]);
        server->lock_fds[i] = -1;
    }
    for (unsigned i = 0; i < 3; i++) {
        kvt_free(server->paths[i]);
        server->paths[i] = NULL;
    }
}
