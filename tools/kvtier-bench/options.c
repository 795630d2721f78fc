/* Command line. Numbers take suffixes where bytes are meant (KiB, MiB, GiB); every value is checked
 * here, so that the rest can trust it. */
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tools/kvtier-bench/bench.h"
#include "tools/lib/synth.h"

#define EXIT_HELP 1
#define EXIT_BAD 3

enum option_id {
    OPT_SOCKET = 256,
    OPT_TRACE,
    OPT_PRESET,
    OPT_BYTES_PER_TOKEN,
    OPT_BLOCK_TOKENS,
    OPT_ENGINE_BLOCK_TOKENS,
    OPT_STATE_BYTES,
    OPT_WINDOW,
    OPT_RANKS,
    OPT_QUANTISE,
    OPT_LAYERS,
    OPT_CONCURRENCY,
    OPT_ENGINES,
    OPT_TIME_SCALE,
    OPT_LIMIT,
    OPT_SKIP,
    OPT_SEED,
    OPT_KILL,
    OPT_CANCEL,
    OPT_CHUNK,
    OPT_ABORT,
    OPT_KILL_RANK,
    OPT_LATE,
    OPT_POOL_BYTES,
    OPT_MEMORY,
    OPT_GPU,
    OPT_DEADLINE,
    OPT_NAMESPACE,
    OPT_JSON,
    OPT_REPORT,
    OPT_QUIET,
    OPT_PAGED,
    OPT_NO_VERIFY,
    OPT_STORE_OUTPUT,
    OPT_MATCH_WHOLE,
    OPT_NO_CURSORS,
    OPT_SESSIONS,
    OPT_TURNS,
    OPT_TENANTS,
    OPT_SYSTEM_TOKENS,
    OPT_TURN_TOKENS,
    OPT_HELP,
};

static const struct option long_options[] = {
    {"socket", required_argument, NULL, OPT_SOCKET},
    {"trace", required_argument, NULL, OPT_TRACE},
    {"preset", required_argument, NULL, OPT_PRESET},
    {"bytes-per-token", required_argument, NULL, OPT_BYTES_PER_TOKEN},
    {"block-tokens", required_argument, NULL, OPT_BLOCK_TOKENS},
    {"engine-block-tokens", required_argument, NULL, OPT_ENGINE_BLOCK_TOKENS},
    {"state-bytes", required_argument, NULL, OPT_STATE_BYTES},
    {"window", required_argument, NULL, OPT_WINDOW},
    {"ranks", required_argument, NULL, OPT_RANKS},
    {"quantise", required_argument, NULL, OPT_QUANTISE},
    {"layers", required_argument, NULL, OPT_LAYERS},
    {"concurrency", required_argument, NULL, OPT_CONCURRENCY},
    {"engines", required_argument, NULL, OPT_ENGINES},
    {"time-scale", required_argument, NULL, OPT_TIME_SCALE},
    {"limit", required_argument, NULL, OPT_LIMIT},
    {"skip", required_argument, NULL, OPT_SKIP},
    {"seed", required_argument, NULL, OPT_SEED},
    {"kill-engine-every", required_argument, NULL, OPT_KILL},
    {"cancel-every", required_argument, NULL, OPT_CANCEL},
    {"paged", no_argument, NULL, OPT_PAGED},
    {"chunk-tokens", required_argument, NULL, OPT_CHUNK},
    {"abort-every", required_argument, NULL, OPT_ABORT},
    {"kill-rank-every", required_argument, NULL, OPT_KILL_RANK},
    {"late-us", required_argument, NULL, OPT_LATE},
    {"pool-bytes", required_argument, NULL, OPT_POOL_BYTES},
    {"memory", required_argument, NULL, OPT_MEMORY},
    {"gpu", required_argument, NULL, OPT_GPU},
    {"deadline", required_argument, NULL, OPT_DEADLINE},
    {"namespace", required_argument, NULL, OPT_NAMESPACE},
    {"json", no_argument, NULL, OPT_JSON},
    {"report", no_argument, NULL, OPT_REPORT},
    {"quiet", no_argument, NULL, OPT_QUIET},
    {"no-verify", no_argument, NULL, OPT_NO_VERIFY},
    {"store-output", no_argument, NULL, OPT_STORE_OUTPUT},
    {"match-whole", no_argument, NULL, OPT_MATCH_WHOLE},
    {"no-cursors", no_argument, NULL, OPT_NO_CURSORS},
    {"sessions", required_argument, NULL, OPT_SESSIONS},
    {"turns", required_argument, NULL, OPT_TURNS},
    {"tenants", required_argument, NULL, OPT_TENANTS},
    {"system-tokens", required_argument, NULL, OPT_SYSTEM_TOKENS},
    {"turn-tokens", required_argument, NULL, OPT_TURN_TOKENS},
    {"help", no_argument, NULL, OPT_HELP},
    {NULL, 0, NULL, 0},
};

static const char usage_text[] =
    "Usage: kvtier-bench replay --trace FILE [OPTION...]   requests from a trace\n"
    "       kvtier-bench synth [OPTION...]                 made-up agents that talk in turns\n"
    "       kvtier-bench info [--trace FILE] [OPTION...]   what the workload holds; no daemon\n"
    "\n"
    "Plays serving engines against a daemon: looks up, promotes, verifies every byte, computes\n"
    "what is missing, stores it. Exit status: 0; 1 wrong bytes, or it could not finish; 2 bad\n"
    "options.\n";

static const char daemon_text[] =
    "\nThe daemon\n"
    "  --socket PATH            main socket (default: $KVTIERD_SOCKET, else\n"
    "                           /run/kvtierd/kvtierd.sock)\n"
    "  --deadline MS            of each call (default 10000; joining takes what it takes)\n"
    "  --namespace NAME         model name to declare (default kvtier-bench)\n"
    "\nThe model\n"
    "  --preset NAME            full, window, state, hybrid, mla (default full)\n"
    "  --bytes-per-token N      of one rank and one attention component (default 512)\n"
    "  --block-tokens N         tokens a block (default 64)\n"
    "  --engine-block-tokens N  tokens a block of the engine (default 16)\n"
    "  --state-bytes N          of a state snapshot (default: as a block of attention)\n"
    "  --window N               previous tokens that a token attends to (default 1023)\n"
    "  --ranks N                workers of an engine (default 1)\n"
    "  --layers N               layers (default 4)\n"
    "  --quantise NAME          keep attention as fp8_e4m3 or int8: elements are FP16, and what\n"
    "                           comes back is what their codes stand for (default none)\n";

static const char load_text[] =
    "\nThe load\n"
    "  --engines N              engine processes (default 1)\n"
    "  --concurrency N          requests at a time in each (default 1)\n"
    "  --limit N                at most so many requests (synth: how many, default 1000)\n"
    "  --skip N                 of those, leave out the first N: they came before\n"
    "  --seed N                 of all that is random (default 1)\n"
    "  --time-scale X           arrival times are multiplied by X; 0: no waiting (default 0)\n"
    "  --kill-engine-every N    SIGKILL one engine after every N requests; another goes on\n"
    "  --cancel-every N         cancel every N-th Promote in the middle\n"
    "  --pool-bytes SIZE        engine's block pool of one rank (default: what it needs; of a\n"
    "                           paged engine: a quarter of that, and one request)\n"
    "  --memory memfd|cuda      where these pools are: shared memory, or a GPU's (default memfd)\n"
    "  --gpu N                  which GPU, as CUDA counts them (default 0)\n"
    "  --store-output           store answers too, not only prompts\n"
    "  --match-whole            let a prompt hit whole; engines leave its last token to compute\n"
    "  --no-cursors             send all tokens each time\n"
    "  --no-verify              do not look at the bytes\n"
    "\nThe result\n"
    "  --json                   as JSON\n"
    "  --report                 with --json: the table too, on standard error\n"
    "  --quiet                  no progress bar\n";

static const char paged_text[] =
    "\nPaged engines: ranks in processes of their own, one bounded block pool for all layers, "
    "requests\n"
    "that run together, are preempted, and lose blocks that fall out of their windows\n"
    "  --paged                  play these; --concurrency is how many requests run together\n"
    "  --chunk-tokens N         tokens that a prompt computes in a step (default 512)\n"
    "  --abort-every N          abort every N-th request: while it loads, or somewhere later\n"
    "  --cancel-every N         cancel every N-th load or store, on one rank only\n"
    "  --kill-rank-every N      SIGKILL a rank after about N requests, its engine soon after\n"
    "  --late-us N              let half of the ranks begin up to N us late (default 0)\n";

static const char synth_text[] =
    "\nMade-up agents (synth)\n"
    "  --sessions N             agents that live at a time (default 24)\n"
    "  --turns N                mean turns of an agent (default 10)\n"
    "  --tenants N              salts (default 0: none)\n"
    "  --system-tokens N        mean length of the shared system prompts (default 1024)\n"
    "  --turn-tokens N          mean new tokens a turn (default 256)\n";

static void print_help(const char *command)
{
    fputs(usage_text, stdout);
    if (strcmp(command, "info") != 0)
        fputs(daemon_text, stdout);
    fputs(load_text, stdout);
    if (strcmp(command, "info") != 0)
        fputs(paged_text, stdout);
    if (strcmp(command, "replay") != 0)
        fputs(synth_text, stdout);
}

static int bad(const char *format, const char *name, const char *value)
{
    fputs("kvtier-bench: ", stderr);
    fprintf(stderr, "--%s %s: %s\n", name, value, format);
    fputs("Try: kvtier-bench --help\n", stderr);
    return EXIT_BAD;
}

struct number {
    uint64_t min, max;
    bool is_bytes;
};

static int parse_number(const char *name, const char *text, struct number bounds, uint64_t *ret)
{
    static const struct {
        const char *suffix;
        uint64_t times;
    } suffixes[] = {{"", 1}, {"KiB", KVT_KIB}, {"MiB", KVT_MIB}, {"GiB", KVT_GIB}};
    char *end = NULL, why[128];
    unsigned long long value;

    errno = 0;
    value = strtoull(text, &end, 10);
    if (errno != 0 || end == text || text[0] < '0' || text[0] > '9')
        return bad("not a number", name, text);
    for (size_t i = 0; i < KVT_COUNT_OF(suffixes); i++) {
        if (strcmp(end, suffixes[i].suffix) != 0 || (i > 0 && !bounds.is_bytes))
            continue;
        if (value > bounds.max / suffixes[i].times || value * suffixes[i].times < bounds.min) {
            (void)snprintf(why, sizeof(why), "must be %llu to %llu", (unsigned long long)bounds.min,
                           (unsigned long long)bounds.max);
            return bad(why, name, text);
        }
        *ret = value * suffixes[i].times;
        return 0;
    }
    return bad(bounds.is_bytes ? "unknown unit (KiB, MiB, GiB)" : "not a number", name, text);
}

static int parse_u32(const char *name, const char *text, uint32_t min, uint32_t max, uint32_t *ret)
{
    uint64_t value = 0;
    int r = parse_number(name, text, (struct number){min, max, false}, &value);

    if (r == 0)
        *ret = (uint32_t)value;
    return r;
}

static int parse_scale(const char *name, const char *text, double *ret)
{
    char *end = NULL;
    double value = strtod(text, &end);

    if (end == text || *end != '\0' || !(value >= 0 && value <= 1000))
        return bad("must be 0 to 1000", name, text);
    *ret = value;
    return 0;
}

static int take_model(struct kvt_bench_options *options, int id, const char *name, const char *arg)
{
    struct kvt_model_options *model = &options->model;

    switch (id) {
    case OPT_PRESET:
        model->preset = arg;
        return 0;
    case OPT_BYTES_PER_TOKEN:
        return parse_u32(name, arg, 1, 1u << 24, &model->bytes_per_token);
    case OPT_BLOCK_TOKENS:
        return parse_u32(name, arg, 1, KVT_BLOCK_TOKENS_MAX, &model->block_tokens);
    case OPT_ENGINE_BLOCK_TOKENS:
        return parse_u32(name, arg, 1, KVT_BLOCK_TOKENS_MAX, &model->engine_block_tokens);
    case OPT_STATE_BYTES:
        return parse_u32(name, arg, 0, KVT_SHARD_BYTES_MAX, &model->state_bytes);
    case OPT_WINDOW:
        return parse_u32(name, arg, 1, KVT_PREFIX_TOKENS_MAX, &model->window_tokens);
    case OPT_QUANTISE:
        return kvt_model_quant_kind(arg, &model->quantise)
                   ? 0
                   : bad("is one of none, fp8_e4m3, int8", name, arg);
    case OPT_RANKS:
        return parse_u32(name, arg, 1, KVT_RANKS_MAX, &model->ranks);
    default:
        return parse_u32(name, arg, 1, KVT_PIECES_PER_COMPONENT_MAX / 2, &model->layers);
    }
}

static int take_load(struct kvt_bench_options *options, int id, const char *name, const char *arg)
{
    struct number any = {1, UINT64_MAX / 2, false};
    uint64_t ms = 0;
    int r;

    switch (id) {
    case OPT_CONCURRENCY:
        return parse_u32(name, arg, 1, KVT_BENCH_CONCURRENCY_MAX, &options->concurrency);
    case OPT_ENGINES:
        return parse_u32(name, arg, 1, KVT_BENCH_ENGINES_MAX, &options->engines);
    case OPT_TIME_SCALE:
        return parse_scale(name, arg, &options->time_scale);
    case OPT_LIMIT:
        return parse_number(name, arg, any, &options->requests_max);
    case OPT_SKIP:
        return parse_number(name, arg, any, &options->requests_skipped);
    case OPT_SEED:
        return parse_number(name, arg, (struct number){0, UINT64_MAX / 2, false}, &options->seed);
    case OPT_KILL:
        return parse_number(name, arg, any, &options->kill_every);
    case OPT_CANCEL:
        return parse_number(name, arg, any, &options->cancel_every);
    case OPT_CHUNK:
        return parse_u32(name, arg, 1, 1u << 20, &options->chunk_tokens);
    case OPT_ABORT:
        return parse_number(name, arg, any, &options->abort_every);
    case OPT_KILL_RANK:
        return parse_number(name, arg, any, &options->kill_rank_every);
    case OPT_LATE:
        return parse_u32(name, arg, 0, 1000000, &options->late_us);
    case OPT_POOL_BYTES:
        return parse_number(name, arg, (struct number){1, 1ull << 46, true}, &options->pool_bytes);
    case OPT_MEMORY:
        options->is_on_gpu = strcmp(arg, "cuda") == 0;
        return options->is_on_gpu || strcmp(arg, "memfd") == 0
                   ? 0
                   : bad("is one of memfd, cuda", name, arg);
    case OPT_GPU:
        return parse_u32(name, arg, 0, 1024, &options->gpu);
    case OPT_DEADLINE:
        r = parse_number(name, arg, (struct number){1, 3600000, false}, &ms);
        options->deadline_ns = ms * KVT_NS_PER_MS;
        return r;
    case OPT_SESSIONS:
        return parse_u32(name, arg, 1, 1u << 20, &options->synth_sessions);
    case OPT_TURNS:
        return parse_u32(name, arg, 1, 64, &options->synth_turns);
    case OPT_TENANTS:
        return parse_u32(name, arg, 0, 1000, &options->synth_tenants);
    case OPT_SYSTEM_TOKENS:
        return parse_u32(name, arg, 1, 1u << 20, &options->synth_system_tokens);
    default:
        return parse_u32(name, arg, 1, 1u << 20, &options->synth_turn_tokens);
    }
}

static bool take_flag(struct kvt_bench_options *options, int id, const char *arg)
{
    switch (id) {
    case OPT_SOCKET:
        options->socket_path = arg;
        return true;
    case OPT_TRACE:
        options->trace_path = arg;
        return true;
    case OPT_NAMESPACE:
        options->namespace_name = arg;
        return true;
    case OPT_JSON:
        return options->is_json = true;
    case OPT_REPORT:
        return options->is_reporting = true;
    case OPT_QUIET:
        return options->is_quiet = true;
    case OPT_PAGED:
        return options->is_paged = true;
    case OPT_NO_VERIFY:
        options->is_verifying = false;
        return true;
    case OPT_STORE_OUTPUT:
        return options->is_storing_output = true;
    case OPT_MATCH_WHOLE:
        return options->is_matching_whole = true;
    case OPT_NO_CURSORS:
        return options->is_without_cursors = true;
    default:
        return false;
    }
}

static void set_defaults(struct kvt_bench_options *options)
{
    struct kvt_synth_options synth = kvt_synth_defaults();
    const char *socket_path = getenv("KVTIERD_SOCKET");

    *options = (struct kvt_bench_options){
        .socket_path = socket_path != NULL ? socket_path : "/run/kvtierd/kvtierd.sock",
        .namespace_name = "kvtier-bench",
        .model = kvt_model_defaults(),
        .seed = 1,
        .deadline_ns = 10 * KVT_NS_PER_S,
        .engines = 1,
        .concurrency = 1,
        .chunk_tokens = 512,
        .is_verifying = true,
        .synth_sessions = synth.sessions,
        .synth_turns = synth.turns,
        .synth_system_tokens = synth.system_tokens,
        .synth_turn_tokens = synth.turn_tokens,
    };
}

static int take_command(struct kvt_bench_options *options, const char *command)
{
    options->is_replay = strcmp(command, "replay") == 0;
    options->is_info = strcmp(command, "info") == 0;
    if (options->is_replay || options->is_info || strcmp(command, "synth") == 0)
        return 0;
    fprintf(stderr,
            "kvtier-bench: unknown command \"%s\": replay, synth or info\n"
            "Try: kvtier-bench --help\n",
            command);
    return EXIT_BAD;
}

int kvt_bench_options_parse(struct kvt_bench_options *ret_options, int argc, char **argv)
{
    const char *command = argc > 1 ? argv[1] : "";
    int id, which = 0, r = 0;

    set_defaults(ret_options);
    if (strcmp(command, "--help") == 0 || strcmp(command, "-h") == 0 ||
        strcmp(command, "help") == 0) {
        print_help("");
        return EXIT_HELP;
    }
    r = take_command(ret_options, command);
    optind = 2;
    while (r == 0 && (id = getopt_long(argc, argv, "h", long_options, &which)) != -1) {
        if (id == OPT_HELP || id == 'h') {
            print_help(command);
            return EXIT_HELP;
        }
        if (id == '?' || id == ':')
            return EXIT_BAD; /* getopt has said why */
        if (take_flag(ret_options, id, optarg))
            continue;
        r = id >= OPT_PRESET && id <= OPT_LAYERS
                ? take_model(ret_options, id, long_options[which].name, optarg)
                : take_load(ret_options, id, long_options[which].name, optarg);
    }
    if (r != 0)
        return r;
    if (optind < argc) {
        fprintf(stderr, "kvtier-bench: \"%s\" is not an option\n", argv[optind]);
        return EXIT_BAD;
    }
    if (ret_options->is_replay && ret_options->trace_path == NULL) {
        fputs("kvtier-bench: replay needs --trace FILE (synth needs no file)\n", stderr);
        return EXIT_BAD;
    }
    if (!ret_options->is_replay && !ret_options->is_info && ret_options->trace_path != NULL) {
        fputs("kvtier-bench: synth makes its requests up; for a trace use replay\n", stderr);
        return EXIT_BAD;
    }
    if (!ret_options->is_paged &&
        (ret_options->abort_every != 0 || ret_options->kill_rank_every != 0 ||
         ret_options->late_us != 0)) {
        fputs("kvtier-bench: --abort-every, --kill-rank-every and --late-us are for --paged\n",
              stderr);
        return EXIT_BAD;
    }
    return 0;
}
