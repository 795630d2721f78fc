#include "tools/kvtier-gpu-check/child.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "daemon/base/clock.h"

#define HEAR_MS_MAX 60000

extern char **environ;

static int spawn(struct gpu_check *check, const char *what, const int to[2], const int from[2],
                 pid_t *ret_pid)
{
    char device[16], seed[24];
    const char *arguments[] = {"kvtier-gpu-check",
                               "--child",
                               what,
                               "--device",
                               device,
                               "--seed",
                               seed,
                               check->options.is_small ? "--small" : NULL,
                               NULL};
    posix_spawn_file_actions_t actions;
    int r;

    (void)snprintf(device, sizeof(device), "%d", check->options.device);
    (void)snprintf(seed, sizeof(seed), "%llu", (unsigned long long)check->options.seed);
    r = posix_spawn_file_actions_init(&actions);
    if (r != 0)
        return kvt_trace(-r);
    r = posix_spawn_file_actions_adddup2(&actions, to[0], STDIN_FILENO);
    if (r == 0)
        r = posix_spawn_file_actions_adddup2(&actions, from[1], STDOUT_FILENO);
    if (r == 0)
        r = posix_spawn(ret_pid, "/proc/self/exe", &actions, NULL, (char *const *)arguments,
                        environ);
    (void)posix_spawn_file_actions_destroy(&actions);
    return r == 0 ? 0 : kvt_trace(-r);
}

bool gpu_check_child_start(struct gpu_check *check, const char *part, const char *what,
                           struct gpu_check_child *ret_child)
{
    int to[2] = {-1, -1}, from[2] = {-1, -1}, r = 0;
    pid_t pid = 0;

    if (pipe2(to, O_CLOEXEC) < 0 || pipe2(from, O_CLOEXEC) < 0)
        r = -errno;
    if (r == 0)
        r = spawn(check, what, to, from, &pid);
    if (to[0] >= 0)
        (void)close(to[0]);
    if (from[1] >= 0)
        (void)close(from[1]);
    if (r == 0) {
        *ret_child = (struct gpu_check_child){.pid = pid, .to = to[1], .from = from[0]};
        return true;
    }
    if (to[1] >= 0)
        (void)close(to[1]);
    if (from[0] >= 0)
        (void)close(from[0]);
    return gpu_check_failed(check, part, "another process cannot be started", 0);
}

bool gpu_check_child_hear(struct gpu_check_child *child)
{
    uint64_t end_ns = kvt_clock_mono_ns() + HEAR_MS_MAX * KVT_NS_PER_MS;
    size_t used = 0;

    while (used < sizeof(child->line) - 1 && kvt_clock_mono_ns() < end_ns) {
        struct pollfd poll_fd = {.fd = child->from, .events = POLLIN};

        if (poll(&poll_fd, 1, 1000) <= 0)
            continue;
        if (read(child->from, child->line + used, 1) != 1)
            return false;
        if (child->line[used] == '\n') {
            child->line[used] = '\0';
            return true;
        }
        used++;
    }
    return false;
}

/* A child that is gone is an answer, not a signal. */
bool gpu_check_child_say(struct gpu_check_child *child, const char *line)
{
    sigset_t pipe_set, before;
    struct timespec none = {0};
    size_t bytes = strlen(line);
    bool is_said;

    (void)sigemptyset(&pipe_set);
    (void)sigaddset(&pipe_set, SIGPIPE);
    (void)pthread_sigmask(SIG_BLOCK, &pipe_set, &before);
    is_said = write(child->to, line, bytes) == (ssize_t)bytes;
    if (!is_said)
        (void)sigtimedwait(&pipe_set, NULL, &none);
    (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
    return is_said;
}

void gpu_check_child_kill(struct gpu_check_child *child)
{
    if (child->pid <= 0)
        return;
    (void)kill(child->pid, SIGKILL);
    (void)waitpid(child->pid, NULL, 0);
    (void)close(child->to);
    (void)close(child->from);
    *child = (struct gpu_check_child){0};
}
