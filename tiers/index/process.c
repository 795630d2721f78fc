#include "tiers/index/process.h"

#include <assert.h>
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "daemon/base/alloc.h"
#include "daemon/base/clock.h"

#define SOCKET_BYTES (1 << 20) /* asked for; the system may give less */
#define KILL_NS_MAX (5 * KVT_NS_PER_S)
#define POLL_NS KVT_NS_PER_MS

/* Frees what init took; for use after a partial init too, which posix_spawn's own types allow. */
struct spawn {
    posix_spawn_file_actions_t files;
    posix_spawnattr_t attributes;
};

/* Positive errno, as posix_spawn has it. */
static int spawn_fill(struct spawn *spawn, int fd)
{
    sigset_t none, all;
    int r;

    (void)sigemptyset(&none);
    (void)sigfillset(&all);
    /* First, because the socket may be any of the descriptors below. */
    r = posix_spawn_file_actions_adddup2(&spawn->files, fd, KVT_PROCESS_FD);
    if (r == 0)
        r = posix_spawn_file_actions_addopen(&spawn->files, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
    if (r == 0)
        r = posix_spawn_file_actions_addopen(&spawn->files, STDOUT_FILENO, "/dev/null", O_WRONLY,
                                             0);
    if (r == 0)
        r = posix_spawn_file_actions_addclosefrom_np(&spawn->files, KVT_PROCESS_FD + 1);
    if (r == 0)
        r = posix_spawnattr_setsigmask(&spawn->attributes, &none);
    if (r == 0)
        r = posix_spawnattr_setsigdefault(&spawn->attributes, &all);
    if (r == 0)
        r = posix_spawnattr_setflags(&spawn->attributes,
                                     POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
    return r;
}

static int spawn_run(const char *program, int fd, pid_t *ret_pid)
{
    char name[] = "kvtierd-index", verb[] = "serve", number[] = "3";
    char *const arguments[] = {name, verb, number, NULL};
    struct spawn spawn;
    int r = posix_spawn_file_actions_init(&spawn.files);

    static_assert(KVT_PROCESS_FD == 3, "as in the argument");
    if (r != 0)
        return kvt_trace(-r);
    r = posix_spawnattr_init(&spawn.attributes);
    if (r == 0) {
        r = spawn_fill(&spawn, fd);
        if (r == 0)
            r = posix_spawn(ret_pid, program, &spawn.files, &spawn.attributes, arguments, environ);
        (void)posix_spawnattr_destroy(&spawn.attributes);
    }
    (void)posix_spawn_file_actions_destroy(&spawn.files);
    return r == 0 ? 0 : kvt_trace(-r);
}

int kvt_process_start(struct kvt_process *process, const char *program)
{
    kvt_autoclose int ours = -1, theirs = -1;
    int pair[2], bytes = SOCKET_BYTES;
    pid_t pid = 0;
    int r;

    KVT_ASSERT(process->pid == 0 && process->fd == -1);
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) != 0)
        return kvt_trace(-errno);
    ours = pair[0];
    theirs = pair[1];
    if (fcntl(ours, F_SETFL, O_NONBLOCK) != 0)
        return kvt_trace(-errno);
    (void)setsockopt(ours, SOL_SOCKET, SO_SNDBUF, &bytes, sizeof(bytes));
    (void)setsockopt(theirs, SOL_SOCKET, SO_SNDBUF, &bytes, sizeof(bytes));
    r = spawn_run(program, theirs, &pid);
    if (r < 0)
        return r;
    *process = (struct kvt_process){.pid = pid, .fd = ours};
    ours = -1;
    return 0;
}

/* True: it is reaped and *ret_status says how it ended. */
static bool reap(pid_t pid, uint64_t until_ns, int *ret_status)
{
    const struct timespec pause = {.tv_nsec = POLL_NS};

    for (;;) {
        pid_t r = waitpid(pid, ret_status, WNOHANG);

        if (r == pid)
            return true;
        if (r < 0 && errno != EINTR) {
            *ret_status = 0; /* somebody else reaped it: that it is gone is all there is to know */
            return true;
        }
        if (kvt_clock_mono_ns() >= until_ns)
            return false;
        (void)nanosleep(&pause, NULL);
    }
}

int kvt_process_end(struct kvt_process *process, uint64_t grace_ns,
                    char text[KVT_PROCESS_TEXT_BYTES])
{
    pid_t pid = process->pid;
    int status = 0;

    text[0] = '\0';
    if (process->fd >= 0)
        (void)close(process->fd);
    *process = KVT_PROCESS_NULL;
    if (pid == 0)
        return 0;
    if (!reap(pid, kvt_time_add(kvt_clock_mono_ns(), grace_ns), &status)) {
        (void)kill(pid, SIGKILL);
        (void)snprintf(text, KVT_PROCESS_TEXT_BYTES, "did not end and was killed");
        /* A process that waits for a device cannot be killed; then init will reap it one day. */
        (void)reap(pid, kvt_clock_mono_ns() + KILL_NS_MAX, &status);
        return SIGKILL;
    }
    if (WIFSIGNALED(status)) {
        const char *name = sigabbrev_np(WTERMSIG(status));

        (void)snprintf(text, KVT_PROCESS_TEXT_BYTES, "ended by SIG%s", name != NULL ? name : "?");
        return WTERMSIG(status);
    }
    (void)snprintf(text, KVT_PROCESS_TEXT_BYTES, "ended with status %d", WEXITSTATUS(status));
    return 0;
}
