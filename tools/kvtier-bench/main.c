/* The parent: workload, engine processes, kills, the sum. */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "daemon/base/alloc.h"
#include "daemon/base/arena.h"
#include "daemon/base/clock.h"
#include "proto/client/client.h"
#include "tools/kvtier-bench/bench.h"
#include "tools/kvtier-bench/gpu/gpu_pool.h"
#include "tools/lib/json.h"
#include "tools/lib/progress.h"
#include "tools/lib/synth.h"
#include "tools/lib/table.h"
#include "tools/lib/trace.h"

#define WATCH_EVERY_NS (2 * KVT_NS_PER_MS)
#define RESTARTS_WITHOUT_PROGRESS_MAX 20u
#define LEFT_WAIT_NS (10 * KVT_NS_PER_S) /* for what ended engines held to be gone */

struct parent {
    const struct kvt_bench_options *options;
    const struct kvt_model *model;
    const struct kvt_workload *workload;
    struct kvt_bench_shared *shared;
    pid_t pids[KVT_BENCH_ENGINES_MAX]; /* 0: ended */
    bool is_killed[KVT_BENCH_ENGINES_MAX];
    uint32_t restarts_idle[KVT_BENCH_ENGINES_MAX]; /* since it last got further */
    uint64_t done_at_restart[KVT_BENCH_ENGINES_MAX];
    uint64_t next_kill;
    uint32_t next_victim;
    struct kvt_bench_outcome outcome;
    int failed; /* exit status, when an engine could not go on */
};

void kvt_bench_stats_add(struct kvt_bench_stats *stats, const struct kvt_bench_stats *more)
{
    uint64_t *to = (uint64_t *)stats;
    const uint64_t *from = (const uint64_t *)more;

    /* All of it but the histograms is uint64_t. */
    static_assert(offsetof(struct kvt_bench_stats, calls) % sizeof(uint64_t) == 0, "counters");
    for (size_t i = 0; i < offsetof(struct kvt_bench_stats, calls) / sizeof(uint64_t); i++)
        to[i] += from[i];
    for (uint32_t i = 0; i < KVT_BENCH_CALLS; i++)
        kvt_histogram_merge(&stats->calls[i], &more->calls[i]);
}

static const struct kvt_bench_stats *valid_stats(const struct parent *parent, uint32_t worker)
{
    struct kvt_bench_worker_shared *shared = &parent->shared->workers[worker];

    return &shared->versions[atomic_load_explicit(&shared->valid_idx, memory_order_acquire) & 1];
}

static uint64_t engine_done(const struct parent *parent, uint32_t engine)
{
    uint32_t each = kvt_bench_workers_each(parent->options);
    uint64_t done = 0;

    for (uint32_t i = engine * each; i < (engine + 1) * each; i++)
        done += valid_stats(parent, i)->requests;
    return done;
}

static uint64_t all_done(const struct parent *parent)
{
    uint64_t done = 0;

    for (uint32_t i = 0; i < parent->options->engines; i++)
        done += engine_done(parent, i);
    return done;
}

static int start_engine(struct parent *parent, uint32_t engine)
{
    pid_t pid = fork();

    if (pid < 0)
        return kvt_trace(-errno);
    if (pid == 0) {
        (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
        _exit(kvt_bench_engine_run(parent->options, parent->model, parent->workload, parent->shared,
                                   engine));
    }
    parent->pids[engine] = pid;
    parent->is_killed[engine] = false;
    return 0;
}

/* An engine that lost its daemon is started again, but not for ever. */
static int start_again(struct parent *parent, uint32_t engine)
{
    struct timespec pause = {.tv_nsec = 200 * 1000 * 1000};
    uint64_t done = engine_done(parent, engine);

    parent->outcome.restarts++;
    if (done > parent->done_at_restart[engine])
        parent->restarts_idle[engine] = 0;
    parent->done_at_restart[engine] = done;
    if (all_done(parent) == 0 || ++parent->restarts_idle[engine] > RESTARTS_WITHOUT_PROGRESS_MAX) {
        fprintf(stderr, "kvtier-bench: engine %u: %s\n", engine, parent->shared->failed[engine]);
        parent->failed = 1;
        return 0;
    }
    (void)nanosleep(&pause, NULL);
    return start_engine(parent, engine);
}

static int take_end(struct parent *parent, uint32_t engine, int status)
{
    parent->pids[engine] = 0;
    if (parent->is_killed[engine]) {
        parent->outcome.kills++;
        return start_engine(parent, engine);
    }
    if (WIFEXITED(status) && WEXITSTATUS(status) == KVT_BENCH_EXIT_RANK_LOST) {
        parent->outcome.rank_kills++;
        return start_engine(parent, engine);
    }
    if (WIFEXITED(status) && WEXITSTATUS(status) == KVT_BENCH_EXIT_AGAIN)
        return start_again(parent, engine);
    if (WIFEXITED(status) && WEXITSTATUS(status) == 0)
        return 0;
    if (WIFSIGNALED(status))
        fprintf(stderr, "kvtier-bench: engine %u ended by signal %d (%s)\n", engine,
                WTERMSIG(status), strsignal(WTERMSIG(status)));
    else
        fprintf(stderr, "kvtier-bench: engine %u: %s\n", engine, parent->shared->failed[engine]);
    parent->failed = WIFEXITED(status) ? WEXITSTATUS(status) : 1;
    return 0;
}

static void kill_one(struct parent *parent, uint64_t done)
{
    uint32_t engines = parent->options->engines;

    if (parent->options->kill_every == 0 || done < parent->next_kill)
        return;
    parent->next_kill += parent->options->kill_every;
    for (uint32_t i = 0; i < engines; i++) {
        uint32_t victim = parent->next_victim++ % engines;

        if (parent->pids[victim] > 0 && !parent->is_killed[victim]) {
            parent->is_killed[victim] = kill(parent->pids[victim], SIGKILL) == 0;
            return;
        }
    }
}

static void kill_all(struct parent *parent)
{
    for (uint32_t i = 0; i < parent->options->engines; i++) {
        if (parent->pids[i] > 0) {
            (void)kill(parent->pids[i], SIGKILL);
            (void)waitpid(parent->pids[i], NULL, 0);
        }
    }
}

/* true: an engine is still running. */
static bool reap(struct parent *parent)
{
    bool is_running = false;

    for (uint32_t i = 0; i < parent->options->engines; i++) {
        int status = 0;

        if (parent->pids[i] > 0 && waitpid(parent->pids[i], &status, WNOHANG) == parent->pids[i] &&
            take_end(parent, i, status) < 0)
            parent->failed = 1;
        is_running |= parent->pids[i] > 0;
    }
    return is_running;
}

static uint64_t requests_to_do(const struct parent *parent)
{
    uint64_t count = parent->workload->requests_count;

    return count - KVT_MIN(count, parent->options->requests_skipped);
}

static void show(struct parent *parent, struct kvt_progress *progress, uint64_t done)
{
    uint32_t workers = parent->options->engines * kvt_bench_workers_each(parent->options);
    uint64_t lookup_tokens = 0, hit_tokens = 0, wrong_bytes = 0;
    char note[96], share[KVT_TEXT_BYTES];

    for (uint32_t i = 0; i < workers; i++) {
        lookup_tokens += valid_stats(parent, i)->lookup_tokens;
        hit_tokens += valid_stats(parent, i)->hit_tokens;
        wrong_bytes += valid_stats(parent, i)->wrong_bytes + valid_stats(parent, i)->stray_bytes;
    }
    (void)snprintf(note, sizeof(note), "hit %s  wrong bytes %llu",
                   kvt_text_share(share, hit_tokens, lookup_tokens),
                   (unsigned long long)wrong_bytes);
    kvt_progress_show(progress, done, requests_to_do(parent), note, kvt_clock_mono_ns());
}

static void watch(struct parent *parent)
{
    struct timespec pause = {.tv_nsec = WATCH_EVERY_NS};
    struct kvt_progress progress;

    kvt_progress_begin(&progress, stderr, parent->options->is_quiet, kvt_clock_mono_ns());
    while (reap(parent) && parent->failed == 0) {
        uint64_t done = all_done(parent);

        kill_one(parent, done);
        show(parent, &progress, done);
        (void)nanosleep(&pause, NULL);
    }
    kill_all(parent);
    kvt_progress_end(&progress);
}

/* ---- afterwards ------------------------------------------------------------------------------ */

static void take_daemon_stats(struct parent *parent, const struct kvt_ans_stats *stats)
{
    struct kvt_bench_outcome *outcome = &parent->outcome;

    outcome->has_daemon_stats = true;
    outcome->leases_left = stats->leases;
    outcome->reservations_left = stats->tickets + stats->reserved_copies;
    outcome->pins_left = stats->pins;
    outcome->tiers_count = KVT_MIN(stats->tiers_count, KVT_API_TIERS);
    memcpy(outcome->tiers, stats->tiers, sizeof(stats->tiers[0]) * outcome->tiers_count);
    for (uint32_t i = 0; i < outcome->tiers_count; i++)
        outcome->tiers[i].detail = (struct kvt_text){0}; /* lies in the op's arena */
}

static bool ask(struct parent *parent, struct kvt_client *client, struct kvt_op *op,
                struct kvt_arena *arena)
{
    kvt_arena_reset(arena);
    memset(op, 0, sizeof(*op));
    op->kind = KVT_OP_STATS;
    op->arena = arena;
    kvt_client_call(client, op);
    if (op->code == KVT_CODE_OK)
        take_daemon_stats(parent, &op->ans.stats);
    return op->code == KVT_CODE_OK;
}

static bool is_something_left(const struct parent *parent)
{
    const struct kvt_bench_outcome *outcome = &parent->outcome;

    return !outcome->has_daemon_stats ||
           outcome->leases_left + outcome->reservations_left + outcome->pins_left > 0;
}

/* What ended engines held goes within moments, and a daemon that died comes back: ask until nothing
 * is left, or for LEFT_WAIT_NS. */
static void ask_what_is_left(struct parent *parent, struct kvt_arena *arena, struct kvt_op *op)
{
    struct kvt_client_config config = {.socket_path = parent->options->socket_path};
    uint64_t until_ns = kvt_clock_mono_ns() + LEFT_WAIT_NS;
    struct timespec pause = {.tv_nsec = 50 * 1000 * 1000};
    struct kvt_client *client = NULL;
    int r = 0;

    while (is_something_left(parent) && kvt_clock_mono_ns() < until_ns) {
        if (client == NULL)
            r = kvt_client_open(&client, &config);
        if (r == 0 && !ask(parent, client, op, arena))
            client = kvt_client_close(client); /* it does not connect again */
        if (is_something_left(parent))
            (void)nanosleep(&pause, NULL);
    }
    client = kvt_client_close(client);
    if (!parent->outcome.has_daemon_stats)
        fprintf(stderr, "kvtier-bench: no counters of the daemon at %s: %s\n", config.socket_path,
                r < 0 ? strerror(-r) : op->message);
}

static void ask_daemon(struct parent *parent)
{
    kvt_autofree struct kvt_op *op = kvt_alloc_zeroed(1, sizeof(*op));
    struct kvt_arena arena = KVT_ARENA_NULL;
    int r = kvt_arena_init(&arena, KVT_OP_ARENA_BYTES_MAX, 0);

    if (r < 0 || op == NULL)
        return;
    kvt_client_library_init();
    ask_what_is_left(parent, &arena, op);
    kvt_client_library_deinit();
    kvt_arena_deinit(&arena);
}

static int run(struct parent *parent)
{
    uint32_t workers = parent->options->engines * kvt_bench_workers_each(parent->options);
    size_t bytes = sizeof(*parent->shared) + workers * sizeof(parent->shared->workers[0]);
    uint64_t began_ns = kvt_clock_mono_ns();
    void *shared;
    int r = 0;

    shared = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (shared == MAP_FAILED)
        return kvt_trace(-errno);
    parent->shared = shared;
    atomic_store(&parent->shared->started_ns, began_ns);
    parent->next_kill = parent->options->kill_every;
    for (uint32_t i = 0; i < parent->options->engines && r == 0; i++)
        r = start_engine(parent, i);
    if (r < 0)
        kill_all(parent);
    else
        watch(parent);
    parent->outcome.wall_ns = kvt_clock_mono_ns() - began_ns;
    for (uint32_t i = 0; i < workers; i++)
        kvt_bench_stats_add(&parent->outcome.sum, valid_stats(parent, i));
    memcpy(parent->outcome.first_wrong, parent->shared->first_wrong,
           sizeof(parent->outcome.first_wrong));
    (void)munmap(shared, bytes);
    if (r == 0 && parent->failed == 0)
        ask_daemon(parent); /* the first gRPC of this process, and no fork after it */
    return r;
}

static int run_engines(const struct kvt_bench_options *options, const struct kvt_model *model,
                       const struct kvt_workload *workload)
{
    struct parent *parent = kvt_alloc_zeroed(1, sizeof(*parent));
    int r, status;

    if (parent == NULL)
        return 1;
    parent->options = options;
    parent->model = model;
    parent->workload = workload;
    r = run(parent);
    if (r < 0)
        fprintf(stderr, "kvtier-bench: %s\n", strerror(-r));
    status = r < 0 ? 1 : parent->failed;
    if (status == 0) {
        if (options->is_json)
            kvt_bench_report_json(&parent->outcome, model);
        if (!options->is_json || options->is_reporting)
            kvt_bench_report_text(&parent->outcome, model, options->is_json ? stderr : stdout);
        if (parent->outcome.sum.wrong_bytes + parent->outcome.sum.stray_bytes > 0 ||
            !parent->outcome.has_daemon_stats)
            status = 1;
    }
    kvt_free(parent);
    return status;
}

/* ---- the workload ---------------------------------------------------------------------------- */

static int make_workload(const struct kvt_bench_options *options, struct kvt_workload *ret_workload)
{
    struct kvt_trace_options trace = {options->trace_path, options->requests_max, options->seed};
    struct kvt_synth_options synth = kvt_synth_defaults();
    char why[512] = "out of memory";
    int r;

    synth.seed = options->seed;
    synth.requests = options->requests_max != 0 ? options->requests_max : synth.requests;
    synth.sessions = options->synth_sessions;
    synth.turns = options->synth_turns;
    synth.tenants = options->synth_tenants;
    synth.system_tokens = options->synth_system_tokens;
    synth.turn_tokens = options->synth_turn_tokens;
    if (options->trace_path != NULL)
        r = kvt_trace_read(ret_workload, &trace, why, sizeof(why));
    else
        r = kvt_synth_make(ret_workload, &synth);
    if (r == -EINVAL && options->trace_path == NULL)
        (void)snprintf(why, sizeof(why),
                       "--system-tokens and --turn-tokens do not fit into prompts of %u tokens",
                       synth.prompt_tokens_max);
    if (r != 0)
        fprintf(stderr, "kvtier-bench: %s\n", why);
    return r;
}

static int print_info(const struct kvt_bench_options *options, const struct kvt_model *model,
                      const struct kvt_workload *workload)
{
    struct kvt_workload_facts facts;
    char text[KVT_TEXT_BYTES];
    struct kvt_json json;

    if (kvt_workload_facts(workload, model->block_tokens, &facts) < 0) {
        fputs("kvtier-bench: out of memory\n", stderr);
        return 1;
    }
    if (options->is_json) {
        kvt_json_begin(&json, stdout, false);
        kvt_json_u64(&json, "requests", facts.requests);
        kvt_json_u64(&json, "lookup_tokens", facts.lookup_tokens);
        kvt_json_u64(&json, "prompt_blocks", facts.prompt_blocks);
        kvt_json_u64(&json, "distinct_blocks", facts.distinct_blocks);
        kvt_json_u64(&json, "ideal_hit_tokens", facts.hit_tokens);
        kvt_json_u64(&json, "block_bytes", kvt_model_block_bytes(model));
        kvt_json_u64(&json, "full_block_bytes", model->components[0].block_bytes);
        kvt_json_u64(&json, "prompt_tokens_max", workload->input_tokens_max);
        kvt_json_finish(&json);
        return 0;
    }
    printf("requests          %s\n", kvt_text_count(text, facts.requests));
    printf("prompt tokens     %s\n", kvt_text_count(text, facts.lookup_tokens));
    printf("longest prompt    %s tokens\n", kvt_text_count(text, workload->input_tokens_max));
    printf("prompt blocks     %s of %u tokens\n", kvt_text_count(text, facts.prompt_blocks),
           model->block_tokens);
    printf("distinct blocks   %s\n", kvt_text_count(text, facts.distinct_blocks));
    printf("ideal hit tokens  %s", kvt_text_count(text, facts.hit_tokens));
    printf(" (%s of prompt tokens)\n", kvt_text_share(text, facts.hit_tokens, facts.lookup_tokens));
    return 0;
}

int main(int argc, char **argv)
{
    struct kvt_workload workload = KVT_WORKLOAD_NULL;
    struct kvt_bench_options options;
    struct kvt_model model;
    char why[256];
    int r = kvt_bench_options_parse(&options, argc, argv), status;

    if (r != 0)
        return r - 1;
    if (kvt_model_make(&model, &options.model, why, sizeof(why)) != 0) {
        fprintf(stderr, "kvtier-bench: %s\n", why);
        return 2;
    }
    if (options.is_on_gpu && kvt_gpu_pool_why_not() != NULL) {
        fprintf(stderr, "kvtier-bench: --memory cuda: %s\n", kvt_gpu_pool_why_not());
        return 2;
    }
    if (make_workload(&options, &workload) != 0)
        return 2;
    status = options.is_info ? print_info(&options, &model, &workload)
                             : run_engines(&options, &model, &workload);
    kvt_workload_deinit(&workload);
    return status;
}
