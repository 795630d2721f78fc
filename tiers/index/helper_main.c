/* kvtierd-index: holds the index of one L3 device for the daemon, which starts it and talks to it
 * over a socket. It is a process of its own because LMDB trusts its map: a damaged file can end
 * whoever maps it.
 *
 *     kvtierd-index serve FD
 *     kvtierd-index inspect PATH | verify PATH       offline, for people (offline.h)
 *
 * It ends with the daemon, whichever way that ends: the kernel kills it when the thread that
 * started it is gone, and the socket's end is its end too. Signals that are meant for the daemon
 * (Ctrl-C reaches the whole group of a terminal, a service manager may signal all of a service) do
 * not end it: the daemon still wants its last commit. */
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tiers/index/helper.h"
#include "tiers/index/offline.h"

#define EXIT_USAGE 2

/* When memory runs out a rebuild may be what takes it: then this process goes, and the index can be
 * made anew, not the daemon with all that it holds. Raising it needs no privilege. */
static void go_first(void)
{
    int fd = open("/proc/self/oom_score_adj", O_WRONLY | O_CLOEXEC);

    if (fd < 0)
        return;
    (void)!write(fd, "1000", 4);
    (void)close(fd);
}

/* Everything that could have been inherited, but for @fd and standard error. */
static void shed_inheritance(int fd)
{
    static const int not_ours[] = {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGPIPE};
    sigset_t none;

    (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
    for (int number = 1; number < NSIG; number++)
        (void)signal(number, SIG_DFL); /* refused for two of them */
    for (size_t i = 0; i < KVT_COUNT_OF(not_ours); i++)
        (void)signal(not_ours[i], SIG_IGN);
    (void)sigemptyset(&none);
    (void)sigprocmask(SIG_SETMASK, &none, NULL);
    if (fd > STDERR_FILENO + 1)
        (void)close_range(STDERR_FILENO + 1, (unsigned)fd - 1, 0);
    (void)close_range((unsigned)fd + 1, ~0u, 0);
    (void)umask(0077);
    go_first();
}

static int serve(const char *text)
{
    char *end;
    unsigned long fd;

    errno = 0;
    fd = strtoul(text, &end, 10);
    if (errno != 0 || end == text || *end != '\0' || fd <= STDERR_FILENO || fd > 1 << 20) {
        fprintf(stderr, "kvtierd-index: '%s' is no descriptor\n", text);
        return EXIT_USAGE;
    }
    shed_inheritance((int)fd);
    return kvt_index_helper_serve((int)fd);
}

int main(int argc, char **argv)
{
    if (argc == 3 && strcmp(argv[1], "serve") == 0)
        return serve(argv[2]);
    if (argc >= 2 && (strcmp(argv[1], "inspect") == 0 || strcmp(argv[1], "verify") == 0))
        return kvt_index_offline(argc - 1, argv + 1);
    fprintf(stderr, "kvtierd-index holds the index of an L3 device for kvtierd, which starts it. "
                    "By hand: kvtierd-index inspect PATH, kvtierd-index verify PATH\n");
    return EXIT_USAGE;
}
