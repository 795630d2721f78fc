/* The client's end of the region socket. */
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>

#include "daemon/base/alloc.h"
#include "proto/client/internal.h"
#include "proto/codec/region_wire.h"

static int send_request(int fd, int memfd, uint64_t bytes)
{
    _Alignas(struct cmsghdr) uint8_t control[CMSG_SPACE(sizeof(int))] = {0};
    struct kvt_region_request request = {.magic = KVT_REGION_MAGIC, .bytes = bytes};
    struct iovec iov = {.iov_base = &request, .iov_len = sizeof(request)};
    struct msghdr msg = {.msg_iov = &iov,
                         .msg_iovlen = 1,
                         .msg_control = control,
                         .msg_controllen = sizeof(control)};
    struct cmsghdr *cmsg = CMSG_FIRSTHDR(&msg);

    cmsg->cmsg_level = SOL_SOCKET;
    cmsg->cmsg_type = SCM_RIGHTS;
    cmsg->cmsg_len = CMSG_LEN(sizeof(int));
    memcpy(CMSG_DATA(cmsg), &memfd, sizeof(int));
    if (sendmsg(fd, &msg, MSG_NOSIGNAL) != (ssize_t)sizeof(request))
        return kvt_trace(errno != 0 ? -errno : -EIO);
    return 0;
}

int kvt_client_send_region(struct kvt_client *client, int memfd, uint64_t bytes,
                           uint8_t ret_token[KVT_REGION_TOKEN_BYTES], char *ret_why,
                           size_t why_bytes)
{
    char path[sizeof(((struct sockaddr_un *)NULL)->sun_path) + 16];
    struct kvt_region_answer answer = {0};
    kvt_autoclose int fd = -1;
    struct pollfd pfd = {.events = POLLIN};
    int r;

    (void)snprintf(path, sizeof(path), "%s.regions", client->path);
    r = kvt_client_connect(path, SOCK_SEQPACKET, &fd);
    if (r < 0)
        return kvt_trace(r);
    r = send_request(fd, memfd, bytes);
    if (r < 0)
        return kvt_trace(r);
    pfd.fd = fd;
    r = poll(&pfd, 1, (int)KVT_MIN(client->deadline_ns / KVT_NS_PER_MS, (uint64_t)INT32_MAX));
    if (r <= 0)
        return kvt_trace(r < 0 ? -errno : -ETIMEDOUT);
    if (recv(fd, &answer, sizeof(answer), 0) != (ssize_t)sizeof(answer) ||
        answer.magic != KVT_REGION_MAGIC)
        return kvt_trace(-EPROTO);
    if (answer.status != 0) {
        answer.text[sizeof(answer.text) - 1] = '\0';
        (void)snprintf(ret_why, why_bytes, "%s", answer.text);
        return kvt_trace(answer.status < 4096 ? -(int)answer.status : -EPROTO);
    }
    memcpy(ret_token, answer.token, KVT_REGION_TOKEN_BYTES);
    return 0;
}
