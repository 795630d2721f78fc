#include <signal.h>
#include <stdlib.h>

#include "tools/kvtier-ctl/ctl.h"

#include "proto/client/client.h"

static int run(const struct kvt_ctl_args *args)
{
    switch (args->command) {
    case KVT_CTL_STATS:
        return kvt_ctl_run_stats(args);
    case KVT_CTL_DEVICES:
        return kvt_ctl_run_devices(args);
    case KVT_CTL_NAMESPACES:
        return kvt_ctl_run_namespaces(args);
    case KVT_CTL_LOOKUP:
    case KVT_CTL_EXPLAIN:
        return kvt_ctl_run_prefix(args);
    case KVT_CTL_TREE:
        return kvt_ctl_run_tree(args);
    case KVT_CTL_EVICT:
        return kvt_ctl_run_evict(args);
    case KVT_CTL_RESET:
        return kvt_ctl_run_reset(args);
    case KVT_CTL_DRAIN:
    case KVT_CTL_SCRUB:
        return kvt_ctl_run_maintain(args);
    case KVT_CTL_L3:
        return kvt_ctl_run_l3(args);
    case KVT_CTL_HEALTH:
        return kvt_ctl_run_health(args);
    case KVT_CTL_DOCTOR:
        return kvt_ctl_run_doctor(args);
    case KVT_CTL_COMMANDS:
        break;
    }
    return KVT_CTL_USAGE;
}

int main(int argc, char *argv[])
{
    struct kvt_ctl_args args;
    int r = kvt_ctl_args_parse(&args, argc, argv, getenv("KVTIERD_SOCKET"), stderr);

    if (r != KVT_CTL_OK)
        return r;
    if (args.is_version) {
        (void)printf("kvtier-ctl %s\n", KVT_VERSION);
        return KVT_CTL_OK;
    }
    if (args.is_help) {
        kvt_ctl_help(stdout, args.command);
        return KVT_CTL_OK;
    }
    /* A pipe that closes ("| head") ends the output, not the program by a signal. */
    (void)signal(SIGPIPE, SIG_IGN);
    kvt_client_library_init();
    r = run(&args);
    kvt_client_library_deinit();
    return r;
}
