/* Command line and result. Its callers are tools/crash and tests. */
#include <errno.h>
#include <getopt.h>
#include <stdlib.h>
#include <string.h>

#include "tools/kvtier-crash/crash.h"
#include "tools/lib/json.h"

#define EXIT_FAULT 1
#define EXIT_BAD 2

static const struct option long_options[] = {
    {"socket", required_argument, NULL, 's'},
    {"admin", required_argument, NULL, 'a'},
    {"journal", required_argument, NULL, 'j'},
    {"seed", required_argument, NULL, 'e'},
    {"cycle", required_argument, NULL, 'c'},
    {"seconds", required_argument, NULL, 't'},
    {"workers", required_argument, NULL, 'w'},
    {"keeping", no_argument, NULL, 'k'},
    {"talks", required_argument, NULL, 'n'},
    {"revision", required_argument, NULL, 'r'},
    {"out-allowed", no_argument, NULL, 'o'},
    {"help", no_argument, NULL, 'h'},
    {NULL, 0, NULL, 0},
};

static const char help_text[] =
    "Usage: kvtier-crash load|fill|check --socket PATH --admin PATH --journal FILE [OPTION...]\n"
    "\n"
    "The engine's side of tools/crash: stores until the daemon is gone, or so much and no\n"
    "more, or checks after a restart what was promised before. The result is one line of\n"
    "JSON.\n"
    "\n"
    "  --seed N       of all that is random (default 1)\n"
    "  --cycle N      load: other choices, the same conversations\n"
    "  --seconds N    load: at most so long (default 60)\n"
    "  --workers N    load: threads, 1 to 8 (default 3)\n"
    "  --talks N      fill: of each namespace, 1 to 24 (default 24)\n"
    "  --revision R   of the models: another one is another namespace (default 1)\n"
    "  --keeping      check: what was acknowledged durable must be served\n"
    "  --out-allowed  check: L3 may be out of service\n"
    "\n"
    "Exit status: 0; 1 a fault was found; 2 bad options or no journal.\n";

static bool number_of(const char *text, uint64_t max, uint64_t *ret_value)
{
    char *end;
    unsigned long long value;

    errno = 0;
    value = strtoull(text, &end, 10);
    if (errno != 0 || end == text || *end != '\0' || value > max || text[0] == '-')
        return false;
    *ret_value = value;
    return true;
}

static bool take_option(struct crash_options *options, int option)
{
    uint64_t value = 0;

    switch (option) {
    case 's':
        options->socket_path = optarg;
        return true;
    case 'a':
        options->admin_path = optarg;
        return true;
    case 'j':
        options->journal_path = optarg;
        return true;
    case 'k':
        options->is_keeping = true;
        return true;
    case 'o':
        options->is_out_allowed = true;
        return true;
    case 'r':
        options->revision = optarg;
        return true;
    case 'n':
        if (!number_of(optarg, CRASH_TALKS, &value) || value == 0)
            return false;
        options->talks = (uint32_t)value;
        return true;
    case 'e':
        return number_of(optarg, UINT64_MAX, &options->seed);
    case 'c':
        return number_of(optarg, UINT64_MAX, &options->cycle);
    case 't':
        if (!number_of(optarg, 86400, &value))
            return false;
        options->load_ns = value * KVT_NS_PER_S;
        return true;
    case 'w':
        if (!number_of(optarg, CRASH_WORKERS_MAX, &value) || value == 0)
            return false;
        options->workers = (uint32_t)value;
        return true;
    default:
        return false;
    }
}

static const struct {
    const char *name;
    int (*run)(const struct crash_options *options, struct crash_totals *ret);
    bool must_end_alive; /* a daemon that is gone is a fault */
} commands[] = {
    {"load", crash_load, false},
    {"fill", crash_fill, true},
    {"check", crash_check, true},
};

/* The index of the command; negative: not usable. */
static int take_options(struct crash_options *options, int argc, char **argv)
{
    int option;

    while ((option = getopt_long(argc, argv, "", long_options, NULL)) != -1) {
        if (option == 'h') {
            (void)fputs(help_text, stdout);
            exit(0);
        }
        if (!take_option(options, option))
            return -1;
    }
    if (optind + 1 != argc || options->socket_path == NULL || options->admin_path == NULL ||
        options->journal_path == NULL)
        return -1;
    for (int i = 0; i < (int)KVT_COUNT_OF(commands); i++)
        if (strcmp(argv[optind], commands[i].name) == 0)
            return i;
    return -1;
}

static void print(const struct crash_totals *totals)
{
    static const char *const tiers[KVT_API_TIERS] = {"from_l1", "from_l2", "from_l3"};
    struct kvt_json json;

    kvt_json_begin(&json, stdout, true);
    kvt_json_u64(&json, "stores", totals->stores);
    kvt_json_u64(&json, "durable_answers", totals->durable_answers);
    kvt_json_u64(&json, "reads", totals->reads);
    kvt_json_u64(&json, "evicts", totals->evicts);
    kvt_json_u64(&json, "resets", totals->resets);
    kvt_json_u64(&json, "refused", totals->refused);
    kvt_json_u64(&json, "served_blocks", totals->served_blocks);
    for (uint32_t t = 0; t < KVT_API_TIERS; t++)
        kvt_json_u64(&json, tiers[t], totals->served_from[t]);
    kvt_json_u64(&json, "missed_blocks", totals->missed_blocks);
    kvt_json_u64(&json, "wrong_blocks", totals->wrong_blocks);
    kvt_json_u64(&json, "wrong_bytes", totals->wrong_bytes);
    kvt_json_u64(&json, "promised_blocks", totals->promised_blocks);
    kvt_json_u64(&json, "lost_blocks", totals->lost_blocks);
    kvt_json_u64(&json, "stale_blocks", totals->stale_blocks);
    kvt_json_u64(&json, "left", totals->left);
    kvt_json_bool(&json, "is_gone", totals->is_gone);
    kvt_json_text(&json, "first_fault", totals->first_fault);
    kvt_json_finish(&json);
}

int main(int argc, char **argv)
{
    struct crash_options options = {.seed = 1,
                                    .load_ns = 60 * KVT_NS_PER_S,
                                    .workers = 3,
                                    .talks = CRASH_TALKS,
                                    .revision = "1"};
    struct crash_totals totals = {0};
    int command = take_options(&options, argc, argv), r;

    if (command < 0) {
        (void)fputs(help_text, stderr);
        return EXIT_BAD;
    }
    kvt_client_library_init();
    r = commands[command].run(&options, &totals);
    kvt_client_library_deinit();
    if (r != 0) {
        (void)fprintf(stderr, "kvtier-crash: %s: %s\n", options.journal_path,
                      r < 0 ? strerror(-r) : "not a journal");
        return EXIT_BAD;
    }
    print(&totals);
    return totals.first_fault[0] != '\0' || (commands[command].must_end_alive && totals.is_gone)
               ? EXIT_FAULT
               : 0;
}
