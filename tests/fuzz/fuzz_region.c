/* The region socket with arbitrary messages and descriptors, two users on two connections: every
 * answer must be whole and say why, what a request must have is what is demanded of it, mappings
 * are bounded and each is closed once, and no descriptor stays open.
 *
 * The input is a list of commands: a byte c, then what it needs.
 *   c % 8 < 5   a message; c / 8 % 2: of which user. A byte m: m % 4 > 0: a true request for one of
 * a few sizes (m / 4), else m / 4 bytes of the input. A byte n: n % 4 > 0: one descriptor, else n /
 * 4 % 13 of them; and a byte for each that says of what 5           the last token is claimed, with
 * the user and the size of the next byte 6           30 seconds pass 7           one byte of a true
 * request is another
 *
 * With libFuzzer (-Dfuzzers=true, clang) this is a fuzzer; else replay_main.c runs it over files.
 */
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include "daemon/engine/internal.h"
#include "proto/codec/region_wire.h"
#include "proto/server/internal.h"
#include "tests/common/check.h"

#define GOOD_BYTES 8192u
#define DESCRIPTORS_MAX 12u
#define USERS 2u

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum what { GOOD, UNSEALED, SPARSE, FILE_OF_NOBODY, WHATS };

static int whats[WHATS];
static uint64_t opened, closed;
static const uint64_t sizes[] = {GOOD_BYTES, 1, 4096, GOOD_BYTES + 1, 0, UINT64_MAX};

struct fuzz {
    const uint8_t *at;
    size_t left;
    struct kvt_server server;
    struct user {
        int fd; /* its end */
        struct kvt_region_conn *conn;
        int daemon_fd;
        uint32_t tokens;
    } users[USERS];
    struct {
        uint8_t token[KVT_REGION_TOKEN_BYTES];
        uint32_t user;
        uint64_t bytes;
        bool is_held;
    } last;
};

static int count_open(void *ctx, int memfd, uint64_t bytes, void **ret_mapping,
                      const char **ret_why)
{
    int r = eng_region_open(ctx, memfd, bytes, ret_mapping, ret_why);

    opened += r == 0;
    return r;
}

static void count_close(void *ctx, void *mapping)
{
    CHECK(mapping != NULL);
    closed++;
    eng_region_close(ctx, mapping);
}

static const struct kvt_service service = {.region_open = count_open, .region_close = count_close};

static void make_whats(void)
{
    for (uint32_t i = 0; i < FILE_OF_NOBODY; i++) {
        whats[i] = memfd_create("fuzz", MFD_CLOEXEC | MFD_ALLOW_SEALING);
        CHECK(whats[i] >= 0 && ftruncate(whats[i], GOOD_BYTES) == 0);
        if (i != SPARSE)
            CHECK(fallocate(whats[i], 0, 0, GOOD_BYTES) == 0);
        if (i != UNSEALED)
            CHECK(fcntl(whats[i], F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) == 0);
    }
    whats[FILE_OF_NOBODY] = open("/dev/null", O_RDWR | O_CLOEXEC);
    CHECK(whats[FILE_OF_NOBODY] >= 0);
}

static uint8_t take(struct fuzz *fuzz)
{
    if (fuzz->left == 0)
        return 0;
    fuzz->left--;
    return *fuzz->at++;
}

static int lowest_free_fd(void)
{
    int fd = dup(whats[GOOD]);

    CHECK(fd >= 0 && close(fd) == 0);
    return fd;
}

static void connect_user(struct fuzz *fuzz, uint32_t i)
{
    struct user *user = &fuzz->users[i];
    int fds[2];

    CHECK(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, fds) == 0);
    user->fd = fds[0];
    user->daemon_fd = fds[1];
    user->conn = kvt_region_accept(&fuzz->server, fds[1], 100 + i);
    CHECK(user->conn != NULL);
}

static void leave_user(struct fuzz *fuzz, uint32_t i)
{
    struct user *user = &fuzz->users[i];

    user->conn = kvt_region_conn_free(&fuzz->server, user->conn);
    CHECK(close(user->fd) == 0 && close(user->daemon_fd) == 0);
}

struct message {
    uint8_t bytes[64];
    size_t count;
    int fds[DESCRIPTORS_MAX + 1];
    uint32_t fds_count;
    bool is_request;
    struct kvt_region_request request;
    enum what what; /* of the only descriptor */
};

static void send_message(const struct user *user, struct message *message)
{
    _Alignas(struct cmsghdr) uint8_t control[CMSG_SPACE(sizeof(message->fds))] = {0};
    struct iovec iov = {message->bytes, message->count};
    struct msghdr msg = {.msg_iov = &iov, .msg_iovlen = 1};

    if (message->fds_count > 0) {
        struct cmsghdr *cmsg;

        msg.msg_control = control;
        msg.msg_controllen = CMSG_SPACE(message->fds_count * sizeof(int));
        cmsg = CMSG_FIRSTHDR(&msg);
        cmsg->cmsg_level = SOL_SOCKET;
        cmsg->cmsg_type = SCM_RIGHTS;
        cmsg->cmsg_len = CMSG_LEN(message->fds_count * sizeof(int));
        memcpy(CMSG_DATA(cmsg), message->fds, message->fds_count * sizeof(int));
    }
    CHECK(sendmsg(user->fd, &msg, MSG_DONTWAIT) == (ssize_t)message->count);
}

static void take_message(struct fuzz *fuzz, struct message *message, bool is_broken)
{
    uint8_t how = take(fuzz), many = take(fuzz);

    *message = (struct message){.is_request = how % 4 > 0 || is_broken};
    message->request = (struct kvt_region_request){.magic = KVT_REGION_MAGIC,
                                                   .bytes = sizes[how / 4 % KVT_COUNT_OF(sizes)]};
    message->count = message->is_request ? sizeof(message->request) : how / 4;
    if (message->is_request)
        memcpy(message->bytes, &message->request, sizeof(message->request));
    for (size_t i = 0; !message->is_request && i < message->count; i++)
        message->bytes[i] = take(fuzz);
    if (is_broken) {
        message->bytes[take(fuzz) % sizeof(message->request)] = take(fuzz);
        memcpy(&message->request, message->bytes, sizeof(message->request));
    }
    message->is_request = message->count == sizeof(message->request);
    if (message->is_request)
        memcpy(&message->request, message->bytes, sizeof(message->request));
    message->fds_count = many % 4 > 0 ? 1 : many / 4 % (DESCRIPTORS_MAX + 1);
    for (uint32_t i = 0; i < message->fds_count; i++) {
        message->what = (enum what)(take(fuzz) % WHATS);
        message->fds[i] = whats[message->what];
    }
}

static bool is_good(const struct message *message)
{
    return message->is_request && message->request.magic == KVT_REGION_MAGIC &&
           message->request.reserved == 0 && message->fds_count == 1 && message->what == GOOD &&
           message->request.bytes > 0 && message->request.bytes <= GOOD_BYTES;
}

static void exchange(struct fuzz *fuzz, uint32_t who, bool is_broken)
{
    struct user *user = &fuzz->users[who];
    struct kvt_region_answer answer;
    struct message message;
    bool goes_on, has_room = user->tokens < KVT_SERVER_REGIONS_UID_MAX;
    ssize_t got;

    take_message(fuzz, &message, is_broken);
    send_message(user, &message);
    goes_on = kvt_region_serve(&fuzz->server, user->conn);
    got = recv(user->fd, &answer, sizeof(answer), MSG_DONTWAIT);
    if (message.count == 0 && message.fds_count == 0) {
        CHECK(!goes_on && got < 0); /* the same as a peer that is gone */
    } else {
        CHECK(got == (ssize_t)sizeof(answer) && answer.magic == KVT_REGION_MAGIC);
        CHECK(memchr(answer.text, 0, sizeof(answer.text)) != NULL);
        CHECK((answer.status == 0) == (answer.text[0] == 0));
        CHECK(goes_on == (answer.status != EPROTO));
        CHECK((answer.status == 0) == (is_good(&message) && has_room));
        user->tokens += answer.status == 0;
        if (answer.status == 0) {
            memcpy(fuzz->last.token, answer.token, KVT_REGION_TOKEN_BYTES);
            fuzz->last.user = who;
            fuzz->last.bytes = message.request.bytes;
            fuzz->last.is_held = true;
        }
    }
    if (goes_on)
        return;
    leave_user(fuzz, who);
    connect_user(fuzz, who);
}

static void claim(struct fuzz *fuzz)
{
    uint8_t how = take(fuzz);
    uint64_t bytes = how % 4 == 0 ? sizes[how / 4 % KVT_COUNT_OF(sizes)] : fuzz->last.bytes;
    uint32_t who = how >= 0xf0 ? how % USERS : fuzz->last.user;
    void *mapping = kvt_region_claim(&fuzz->server, fuzz->last.token, 100 + who, bytes);

    CHECK((mapping != NULL) ==
          (fuzz->last.is_held && who == fuzz->last.user && bytes == fuzz->last.bytes));
    if (mapping == NULL)
        return;
    fuzz->users[who].tokens--;
    fuzz->last.is_held = false;
    count_close(NULL, mapping);
}

static void pass_time(struct fuzz *fuzz)
{
    kvt_region_tick(&fuzz->server, kvt_clock_mono_ns() + 2 * KVT_SERVER_REGION_NS);
    for (uint32_t i = 0; i < USERS; i++)
        fuzz->users[i].tokens = 0;
    fuzz->last.is_held = false;
    CHECK(opened == closed);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static struct fuzz fuzz; /* large */
    int free_fd;

    if (whats[GOOD] == 0)
        make_whats();
    free_fd = lowest_free_fd();
    memset(&fuzz, 0, sizeof(fuzz));
    fuzz.at = data;
    fuzz.left = size;
    fuzz.server.config.service = &service;
    fuzz.server.config.region_ns = KVT_SERVER_REGION_NS;
    CHECK(pthread_mutex_init(&fuzz.server.regions.mutex, NULL) == 0);
    for (uint32_t i = 0; i < USERS; i++)
        connect_user(&fuzz, i);
    while (fuzz.left > 0) {
        uint8_t command = take(&fuzz);

        if (command % 8 < 5)
            exchange(&fuzz, command / 8 % USERS, false);
        else if (command % 8 == 5)
            claim(&fuzz);
        else if (command % 8 == 6)
            pass_time(&fuzz);
        else
            exchange(&fuzz, command / 8 % USERS, true);
        CHECK(opened - closed == fuzz.users[0].tokens + fuzz.users[1].tokens);
    }
    for (uint32_t i = 0; i < USERS; i++)
        leave_user(&fuzz, i);
    kvt_region_close_all(&fuzz.server);
    CHECK(opened == closed && lowest_free_fd() == free_fd);
    CHECK(pthread_mutex_destroy(&fuzz.server.regions.mutex) == 0);
    return 0;
}
