/* l3: looks at a device of L3 without a daemon. The formats on disk are the daemon's own, so its
 * helper program does it, and this one becomes it: what it prints and its exit status are that
 * program's. */
#include "tools/kvtier-ctl/run.h"

#include <signal.h>
#include <string.h>
#include <unistd.h>

#include "daemon/base/program.h"

#define HELPER "kvtierd-index"

int kvt_ctl_run_l3(const struct kvt_ctl_args *args)
{
    static char helper[KVT_PROGRAM_PATH_BYTES], name[] = HELPER, json[] = "--json";
    char what[16], path[KVT_CTL_PATH_BYTES];
    char *const arguments[] = {name, what, path, args->is_json ? json : NULL, NULL};
    int r = kvt_program_find(HELPER, helper);

    if (r < 0) {
        (void)fprintf(stderr, "kvtier-ctl: the program %s is not to be found: %s\n", HELPER,
                      strerror(-r));
        return KVT_CTL_DAEMON_ERROR;
    }
    /* A leading dash would be an option there. */
    (void)snprintf(what, sizeof(what), "%s", args->operands[0]);
    r = snprintf(path, sizeof(path), "%s%s", args->operands[1][0] == '-' ? "./" : "",
                 args->operands[1]);
    if ((size_t)r >= sizeof(path)) {
        (void)fprintf(stderr, "kvtier-ctl: the path is too long\n");
        return KVT_CTL_USAGE;
    }
    (void)fflush(stdout);
    (void)signal(SIGPIPE, SIG_DFL);
    (void)execv(helper, arguments);
    (void)fprintf(stderr, "kvtier-ctl: %s cannot be started: %s\n", helper, strerror(errno));
    return KVT_CTL_DAEMON_ERROR;
}
