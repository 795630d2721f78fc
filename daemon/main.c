/* kvtierd: reads its configuration, starts its parts, waits for a signal, stops them.
 *
 * The main thread owns configuration, signals, start and stop, and does nothing else. Signals are
 * blocked before any thread exists (gRPC starts its own), so that all threads inherit the mask and
 * only sigwaitinfo below sees them. A thread that breaks a promise of our own code aborts the
 * process: there is no state in which half a daemon serves. */
#include <getopt.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "daemon/base/log.h"
#include "daemon/base/size.h"
#include "daemon/config.h"
#include "daemon/notify.h"
#include "daemon/start.h"
#include "tiers/verify.h"

#define SETS_MAX 64u

struct options {
    const char *config_path;
    const char *sets[SETS_MAX];
    uint32_t sets_count;
    bool is_check, is_print, is_print_keys;
    bool is_rebuild_l3, is_format_l3;
};

static const char usage[] =
    "kvtierd keeps the KV cache of LLM serving engines of this node.\n"
    "\n"
    "  kvtierd [--config FILE] [--set KEY=VALUE]...\n"
    "\n"
    "  --config FILE      read this YAML file (without: defaults)\n"
    "  --set KEY=VALUE    override a key: --set tiers.l2.bytes=8GiB\n"
    "  --check-config     check the configuration against this machine, then leave\n"
    "  --print-config     print all keys with their values as YAML, then leave\n"
    "  --print-keys       print all keys with defaults and bounds, then leave\n"
    "  --rebuild-l3       build the index of every L3 device anew from its data, then serve\n"
    "  --format           take files and devices for L3 that belong to another daemon or are in\n"
    "                     use for something else; WHAT THEY HOLD IS LOST (never a mounted one)\n"
    "  --version          print the version and how it was built, then leave\n"
    "  --help             print this\n"
    "\n"
    "SIGTERM and SIGINT stop it within stop.deadline; a second one stops it at once.\n"
    "Exit status: 0 stopped, 1 failure, 2 wrong configuration, 3 another daemon is running.\n";

static void print_problem(void *ctx, const char *line)
{
    (void)ctx;
    (void)fprintf(stderr, "%s\n", line);
}

static void log_problem(void *ctx, const char *line)
{
    (void)ctx;
    kvt_log_error("%s", line);
}

/* 0, or -EINVAL after it said what is wrong. Leaves by itself for --help and --version. */
static int parse_options(int argc, char **argv, struct options *ret_options)
{
    static const struct option longs[] = {
        {"config", required_argument, NULL, 'c'}, {"set", required_argument, NULL, 's'},
        {"check-config", no_argument, NULL, 'k'}, {"print-config", no_argument, NULL, 'p'},
        {"print-keys", no_argument, NULL, 'K'},   {"rebuild-l3", no_argument, NULL, 'R'},
        {"format", no_argument, NULL, 'F'},       {"version", no_argument, NULL, 'V'},
        {"help", no_argument, NULL, 'h'},         {NULL, 0, NULL, 0},
    };
    struct options options = {.config_path = NULL};
    int option;

    while ((option = getopt_long(argc, argv, "c:s:h", longs, NULL)) != -1) {
        switch (option) {
        case 'c':
            options.config_path = optarg;
            break;
        case 's':
            if (options.sets_count == SETS_MAX) {
                (void)fprintf(stderr, "kvtierd: more than %u --set: use a file\n", SETS_MAX);
                return -EINVAL;
            }
            options.sets[options.sets_count++] = optarg;
            break;
        case 'k':
            options.is_check = true;
            break;
        case 'p':
            options.is_print = true;
            break;
        case 'K':
            options.is_print_keys = true;
            break;
        case 'R':
            options.is_rebuild_l3 = true;
            break;
        case 'F':
            options.is_format_l3 = true;
            break;
        case 'V':
            (void)printf("kvtierd %s (service manager: %s)\n", KVT_VERSION, kvt_notify_kind());
            exit(KVT_EXIT_OK);
        case 'h':
            (void)fputs(usage, stdout);
            exit(KVT_EXIT_OK);
        default:
            (void)fprintf(stderr, "kvtierd --help says what it takes\n");
            return -EINVAL;
        }
    }
    if (optind < argc) {
        (void)fprintf(stderr, "kvtierd: \"%s\" is no option; kvtierd --help says what it takes\n",
                      argv[optind]);
        return -EINVAL;
    }
    *ret_options = options;
    return 0;
}

/* Defaults, file, --set, relations; every problem is reported. */
static int load_config(struct kvt_config *config, const struct options *options,
                       const struct kvt_config_report *report)
{
    struct kvt_config_facts facts;
    int r = 0;

    kvt_config_init(config);
    config->l3.is_rebuild_wanted = options->is_rebuild_l3;
    config->l3.is_format_wanted = options->is_format_l3;
    if (options->config_path != NULL)
        r = kvt_config_load(config, options->config_path, report);
    for (uint32_t i = 0; i < options->sets_count; i++) {
        if (kvt_config_set(config, options->sets[i], report) < 0)
            r = -EINVAL;
    }
    if (r < 0 || (options->is_print && !options->is_check))
        return r;
    kvt_config_facts_read(config, &facts);
    return kvt_config_check(config, &facts, report);
}

/* The answer to --check-config; what is allowed and does nothing is told beside it. */
static void say_fine(const struct kvt_config *config, const struct options *options)
{
    char idle[KVT_CONFIG_LINE_BYTES];

    if (kvt_config_idle_keys(config, idle))
        (void)fprintf(stderr, "warning: %s\n", idle);
    (void)printf("%s%s: the configuration is fine\n",
                 options->config_path == NULL ? "defaults" : options->config_path,
                 options->sets_count > 0 ? " with --set" : "");
}

/* ---- signals and stop ----------------------------------------------------------------------- */

static sigset_t handled_signals(void)
{
    sigset_t set;

    (void)sigemptyset(&set);
    (void)sigaddset(&set, SIGTERM);
    (void)sigaddset(&set, SIGINT);
    (void)sigaddset(&set, SIGHUP);
    return set;
}

/* Returns the signal that wants a stop. */
static int wait_for_stop(void)
{
    sigset_t set = handled_signals();

    for (;;) {
        int number = sigwaitinfo(&set, NULL);

        if (number == SIGHUP)
            kvt_log_warn("SIGHUP: the configuration is read at start only: restart the daemon");
        else if (number > 0)
            return number;
    }
}

/* Sees to it that a stop ends: by its deadline, or at once with a second signal. */
static void *watch_stop(void *ctx)
{
    sigset_t set = handled_signals();
    uint64_t deadline_ns = *(const uint64_t *)ctx;

    (void)sigdelset(&set, SIGHUP);
    for (;;) {
        uint64_t now_ns = kvt_clock_mono_ns();
        uint64_t left_ns = deadline_ns > now_ns ? deadline_ns - now_ns : 0;
        struct timespec left = {
            .tv_sec = (time_t)(left_ns / KVT_NS_PER_S),
            .tv_nsec = (long)(left_ns % KVT_NS_PER_S),
        };
        int number = sigtimedwait(&set, NULL, &left);

        if (number > 0)
            kvt_log_warn("stop: second signal: leaving at once");
        else if (errno == EAGAIN)
            kvt_log_error("stop: not done within stop.deadline: leaving without the rest (the last "
                          "step logged at level debug is done, the one after it hangs)");
        else
            continue;
        _exit(KVT_EXIT_FAILURE);
    }
}

static void stop(struct kvt_daemon *daemon, int number)
{
    static uint64_t deadline_ns; /* outlives this frame: the watcher reads it */
    uint64_t start_ns = kvt_clock_mono_ns();
    char text[KVT_SIZE_TEXT_BYTES];
    pthread_t watcher;

    deadline_ns = kvt_time_add(start_ns, daemon->config->stop.deadline_ns);
    kvt_duration_format(daemon->config->stop.deadline_ns, text);
    kvt_log_info("stop: SIG%s, within %s", sigabbrev_np(number), text);
    kvt_notify_stopping(daemon->config->stop.deadline_ns);
    if (pthread_create(&watcher, NULL, watch_stop, &deadline_ns) == 0)
        (void)pthread_detach(watcher);
    kvt_daemon_stop(daemon, deadline_ns);
    kvt_log_info("stop: done in %llu ms",
                 (unsigned long long)((kvt_clock_mono_ns() - start_ns) / KVT_NS_PER_MS));
}

static int serve(const struct kvt_config *config)
{
    struct kvt_daemon daemon;
    uint64_t start_ns = kvt_clock_mono_ns();
    char status[512];
    int r;

    if (!kvt_verify_is_on())
        kvt_log_error("THIS PROGRAM IS FOR TESTS: no payload is verified, wrong bytes are served "
                      "as right ones; no engine whose answers matter may use it");
    r = kvt_daemon_start(&daemon, config, KVT_VERSION);
    if (r < 0) {
        kvt_notify_failed("start failed, the log says why", r);
        return (int)daemon.exit;
    }
    kvt_daemon_describe(&daemon, status, sizeof(status));
    kvt_log_info("kvtierd %s is ready in %llu ms: %s", KVT_VERSION,
                 (unsigned long long)((kvt_clock_mono_ns() - start_ns) / KVT_NS_PER_MS), status);
    kvt_notify_ready(status);
    stop(&daemon, wait_for_stop());
    return KVT_EXIT_OK;
}

int main(int argc, char **argv)
{
    sigset_t set = handled_signals();
    struct kvt_config_report report = {.problem = print_problem};
    struct options options;
    struct kvt_config config;

    if (parse_options(argc, argv, &options) < 0)
        return KVT_EXIT_CONFIG;
    if (options.is_print_keys) {
        kvt_config_print_keys(STDOUT_FILENO);
        return KVT_EXIT_OK;
    }
    kvt_log_init(STDERR_FILENO, isatty(STDERR_FILENO) == 1);
    if (!options.is_check && !options.is_print)
        report.problem = log_problem;
    if (load_config(&config, &options, &report) < 0)
        return KVT_EXIT_CONFIG;
    if (options.is_print)
        kvt_config_print(&config, STDOUT_FILENO);
    if (options.is_check)
        say_fine(&config, &options);
    if (options.is_check || options.is_print)
        return KVT_EXIT_OK;

    kvt_log_set_level((enum kvt_log_level)config.log.level);
    (void)umask(0077); /* prompts lie in what it makes; sockets get their modes explicitly */
    (void)signal(SIGPIPE, SIG_IGN);
    if (pthread_sigmask(SIG_BLOCK, &set, NULL) != 0)
        return KVT_EXIT_FAILURE;
    return serve(&config);
}
