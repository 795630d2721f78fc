#include "tools/kvtier-ctl/commands.h"

#include <string.h>

#define BIT(id) (UINT64_C(1) << KVT_CTL_OPT_##id)
#define COMMON                                                                                     \
    (BIT(SOCKET) | BIT(ADMIN_SOCKET) | BIT(TIMEOUT) | BIT(JSON) | BIT(COLOR) | BIT(HELP) |         \
     BIT(VERSION))
#define PREFIX (BIT(NAMESPACE) | BIT(TOKENS) | BIT(TOKENS_FILE) | BIT(SALT) | BIT(LORA))

static const struct kvt_ctl_option options[KVT_CTL_OPTIONS] = {
    {KVT_CTL_OPT_SOCKET, "socket", "PATH", false,
     "the daemon's socket (else KVTIERD_SOCKET, else " KVT_CTL_SOCKET_DEFAULT ")"},
    {KVT_CTL_OPT_ADMIN_SOCKET, "admin-socket", "PATH", false,
     "the socket of admin verbs (else " KVT_CTL_ADMIN_SOCKET_NAME " beside the main one)"},
    {KVT_CTL_OPT_TIMEOUT, "timeout", "SECONDS", false, "how long an answer may take (10)"},
    {KVT_CTL_OPT_JSON, "json", NULL, false, "print JSON"},
    {KVT_CTL_OPT_COLOR, "color", "WHEN", false,
     "auto (on a terminal, unless NO_COLOR is set), always or never"},
    {KVT_CTL_OPT_HELP, "help", NULL, false, "print this"},
    {KVT_CTL_OPT_VERSION, "version", NULL, false, "print the version"},
    {KVT_CTL_OPT_WATCH, "watch", "SECONDS", true, "again every SECONDS (2), with rates"},
    {KVT_CTL_OPT_ROUNDS, "rounds", "N", false, "with --watch: stop after N times"},
    {KVT_CTL_OPT_NAMESPACE, "namespace", "HEX", false,
     "the beginning of a fingerprint (see 'namespaces'), when there are several"},
    {KVT_CTL_OPT_TOKENS, "tokens", "1,2,3", false, "the prompt's token ids"},
    {KVT_CTL_OPT_TOKENS_FILE, "tokens-file", "FILE", false,
     "the same from a file ('-': standard input): text, or binary u32 little-endian"},
    {KVT_CTL_OPT_SALT, "salt", "TEXT", false, "the request's cache salt"},
    {KVT_CTL_OPT_LORA, "lora", "TEXT", false, "the request's LoRA"},
    {KVT_CTL_OPT_LIMIT, "limit", "TOKENS", false, "no boundary above this"},
    {KVT_CTL_OPT_TIERS, "tiers", "L1,L2,L3", false, "what counts as resident (all)"},
    {KVT_CTL_OPT_DEPTH, "depth", "N", false, "at most N levels of branches (16)"},
    {KVT_CTL_OPT_BLOCKS, "blocks", "N", false, "only the first N blocks of each path"},
    {KVT_CTL_OPT_NODES, "nodes", "N", false, "at most N nodes in all (1000)"},
    {KVT_CTL_OPT_ALL, "all", NULL, false, "the whole namespace"},
    {KVT_CTL_OPT_YES, "yes", NULL, false, "do not ask"},
    {KVT_CTL_OPT_STRICT, "strict", NULL, false, "degraded is unhealthy: exit 1"},
    {KVT_CTL_OPT_CONFIG, "config", "FILE", false,
     "sizes and paths from this configuration (else from the running daemon)"},
    {KVT_CTL_OPT_WAIT, "wait", "SECONDS", false, "at most so long (until it is done)"},
    {KVT_CTL_OPT_RATE, "rate", "SIZE", false,
     "bytes a second, with unit: 64MiB (tiers.l3.scrub_rate, else 64MiB)"},
};

static const struct command {
    const char *name;
    const char *summary;
    uint64_t options;
    const char *text;
    const char *operands[KVT_CTL_OPERANDS_MAX];
} commands[KVT_CTL_COMMANDS] = {
    [KVT_CTL_STATS] = {"stats", "what the cache holds and does", COMMON | BIT(WATCH) | BIT(ROUNDS),
                       "Tiers (room, copies, hits, evictions, bytes, errors), the index, sessions, "
                       "namespaces,\nengines and every counter. docs/operations.md explains each "
                       "number.\n"},
    [KVT_CTL_DEVICES] = {"devices", "GPUs of L1 and devices of L3: what was found, and what is off",
                         COMMON,
                         "GPUs: versions, arena, how bytes moved (kernel, copy engine, staging), "
                         "losses, and why\none is lost or not used, or why L1 is off. Then the "
                         "devices of L3 and their indexes.\n"},
    [KVT_CTL_NAMESPACES] = {"namespaces", "the models that engines have declared", COMMON,
                            "Fingerprint, model, components and what is stored of each.\n"},
    [KVT_CTL_LOOKUP] = {"lookup", "how much of a prompt is cached, and where",
                        COMMON | PREFIX | BIT(LIMIT) | BIT(TIERS),
                        "The boundary from which an engine could resume, by component and tier. "
                        "Exit 1 when\nnothing is cached. It takes no lease, but it counts as a "
                        "lookup in the statistics.\n"},
    [KVT_CTL_EXPLAIN] = {"explain", "why a prompt does not hit (further)",
                         COMMON | PREFIX | BIT(LIMIT) | BIT(TIERS),
                         "For each component: what it would accept, the block that stopped it, "
                         "the reason, and\nwhat to do about it.\n"},
    [KVT_CTL_TREE] = {"tree", "the radix tree with what is resident where (admin)",
                      COMMON | BIT(NAMESPACE) | BIT(DEPTH) | BIT(BLOCKS) | BIT(NODES),
                      "One line a node: its blocks, its first tokens, and per component the "
                      "blocks in each\ntier. All namespaces unless one is named.\n"},
    [KVT_CTL_EVICT] = {"evict", "drop a prefix and all below it (admin)",
                       COMMON | PREFIX | BIT(ALL) | BIT(YES),
                       "With tokens: the last whole block of them and everything below it. With "
                       "--salt or --lora\nalone: that root. With --all: the namespace (asks "
                       "first). Blocks in use go when they are free.\n"},
    [KVT_CTL_RESET] = {"reset", "forget a namespace: a new epoch (admin)",
                       COMMON | BIT(NAMESPACE) | BIT(YES),
                       "Nothing stored before is served again, whatever is still in flight. "
                       "Asks first; on no\nterminal it needs --yes.\n"},
    [KVT_CTL_DRAIN] = {"drain", "write to L3 what it lacks, before a stop (admin)",
                       COMMON | BIT(WAIT),
                       "What is in L1 and L2 alone goes to L3, beside all other work, whatever "
                       "the write policy\nsays: the stop that follows has nothing left to do. It "
                       "goes on when this command is\ninterrupted. Exit 1 when L3 did not "
                       "take all.\n"},
    [KVT_CTL_SCRUB] = {"scrub",
                       "read L3 in the background to find rot (admin)",
                       COMMON | BIT(RATE),
                       "start begins (or changes the rate), stop ends, status shows what was "
                       "found since the\ndaemon's start. A bad copy is dropped: a miss, before "
                       "anybody waited for it. Exit 1\nwhen some were bad.\n",
                       {"start|stop|status"}},
    [KVT_CTL_L3] = {"l3",
                    "look at a file or device of L3, without a daemon",
                    COMMON,
                    "inspect shows superblock, state, namespaces and how many slots of each size "
                    "there are;\nverify also reads every byte of it and says where what is "
                    "damaged lies: exit 1 when\nsomething is. Neither ever writes. While a daemon "
                    "uses it, good slots may look bad.\nExit 4: it cannot be read, or is not of "
                    "kvtierd.\n",
                    {"inspect|verify", "PATH"}},
    [KVT_CTL_HEALTH] = {"health", "whether it is serving (for probes)", COMMON | BIT(STRICT),
                        "Exit 0 serving, 1 not serving (or degraded, with --strict), 3 no "
                        "daemon.\n"},
    [KVT_CTL_DOCTOR] =
        {"doctor", "whether this machine is set up well for it", COMMON | BIT(CONFIG),
         "Huge pages, locked memory, io_uring, memory limits, GPU driver and nodes, "
         "the file system\nof L3, the sockets: ok, warn or bad, with the numbers and the remedy. "
         "Works with and\nwithout a daemon. Exit 1 when something is bad.\n"},
};

const struct kvt_ctl_option *kvt_ctl_option_find(const char *name, size_t name_bytes)
{
    for (uint32_t i = 0; i < KVT_CTL_OPTIONS; i++)
        if (strlen(options[i].name) == name_bytes && memcmp(options[i].name, name, name_bytes) == 0)
            return &options[i];
    return NULL;
}

const char *kvt_ctl_option_name(enum kvt_ctl_option_id id)
{
    KVT_ASSERT(id < KVT_CTL_OPTIONS);
    KVT_ASSERT(options[id].id == id);
    return options[id].name;
}

enum kvt_ctl_command_id kvt_ctl_command_find(const char *name)
{
    for (uint32_t i = 0; i < KVT_CTL_COMMANDS; i++)
        if (strcmp(commands[i].name, name) == 0)
            return (enum kvt_ctl_command_id)i;
    return KVT_CTL_COMMANDS;
}

const char *kvt_ctl_command_name(enum kvt_ctl_command_id command)
{
    KVT_ASSERT(command < KVT_CTL_COMMANDS);
    return commands[command].name;
}

const char *kvt_ctl_command_operand(enum kvt_ctl_command_id command, uint32_t i)
{
    KVT_ASSERT(command < KVT_CTL_COMMANDS);
    return i < KVT_CTL_OPERANDS_MAX ? commands[command].operands[i] : NULL;
}

uint64_t kvt_ctl_command_options(enum kvt_ctl_command_id command)
{
    KVT_ASSERT(command < KVT_CTL_COMMANDS);
    return commands[command].options;
}

static void help_options(FILE *out, uint64_t bits)
{
    for (uint32_t i = 0; i < KVT_CTL_OPTIONS; i++) {
        const struct kvt_ctl_option *option = &options[i];
        char left[48];

        if ((bits & UINT64_C(1) << option->id) == 0)
            continue;
        if (option->metavar == NULL)
            (void)snprintf(left, sizeof(left), "--%s", option->name);
        else if (option->is_value_optional)
            (void)snprintf(left, sizeof(left), "--%s [%s]", option->name, option->metavar);
        else
            (void)snprintf(left, sizeof(left), "--%s %s", option->name, option->metavar);
        (void)fprintf(out, "  %-22s %s\n", left, option->help);
    }
}

void kvt_ctl_help(FILE *out, enum kvt_ctl_command_id command)
{
    if (command != KVT_CTL_COMMANDS) {
        uint64_t own = commands[command].options & ~COMMON;

        (void)fprintf(out, "usage: kvtier-ctl %s", commands[command].name);
        for (uint32_t i = 0; i < KVT_CTL_OPERANDS_MAX; i++)
            if (commands[command].operands[i] != NULL)
                (void)fprintf(out, " %s", commands[command].operands[i]);
        (void)fprintf(out, " [OPTIONS]\n\n%s: %s.\n\n%s", commands[command].name,
                      commands[command].summary, commands[command].text);
        if (own != 0) {
            (void)fputs("\nOptions:\n", out);
            help_options(out, own);
        }
        (void)fputs("\nOptions of every command:\n", out);
        help_options(out, COMMON);
        return;
    }
    (void)fputs("usage: kvtier-ctl [OPTIONS] COMMAND [OPTIONS]\n\n"
                "Looks into a running kvtierd and operates it.\n\nCommands:\n",
                out);
    for (uint32_t i = 0; i < KVT_CTL_COMMANDS; i++)
        (void)fprintf(out, "  %-12s %s\n", commands[i].name, commands[i].summary);
    (void)fputs("\nOptions of every command:\n", out);
    help_options(out, COMMON);
    (void)fputs("\nExit status: 0 done, 1 a negative answer (unhealthy, nothing cached, bad), "
                "2 wrong usage,\n3 no daemon, 4 the daemon refused or failed.\n"
                "'kvtier-ctl COMMAND --help' says more.\n",
                out);
}
