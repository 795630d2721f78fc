/* Histories are lists of ids of 16 tokens. New ids count up, so they never repeat; system prompts
 * use the lowest ids. A request's ids go on through its answer, which the next turn includes: that
 * is why the answer of a turn can be stored and hit. */
#include "tools/lib/synth.h"

#include <stdlib.h>
#include <string.h>

#define TURNS_MAX 64u

struct agent {
    uint32_t *ids;
    uint32_t ids_count;
    uint32_t turns_left, turns_done;
    uint32_t turn_ends[TURNS_MAX]; /* history length after each turn, in ids */
    uint32_t number, tenant;
};

struct maker {
    const struct kvt_synth_options *options;
    struct agent *agents;
    uint32_t ids_max; /* of one history */
    uint32_t next_id, next_agent;
    uint64_t random, now_ms;
};

static uint64_t next_random(struct maker *maker)
{
    uint64_t x = maker->random += 0x9E3779B97F4A7C15ull;

    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
}

static uint32_t below(struct maker *maker, uint32_t end)
{
    return (uint32_t)(next_random(maker) % KVT_MAX(end, 1u));
}

/* Half the mean to one and a half of it, at least 1. */
static uint32_t around(struct maker *maker, uint32_t mean)
{
    return KVT_MAX(mean / 2 + below(maker, mean + 1), 1u);
}

static uint32_t ids_of(uint32_t tokens)
{
    return (uint32_t)kvt_div_up(tokens, KVT_SYNTH_ID_TOKENS);
}

static void append_new(struct maker *maker, struct agent *agent, uint32_t count)
{
    for (uint32_t i = 0; i < count && agent->ids_count < maker->ids_max; i++)
        agent->ids[agent->ids_count++] = maker->next_id++;
}

static void begin_agent(struct maker *maker, struct agent *agent)
{
    const struct kvt_synth_options *options = maker->options;
    uint32_t prompt = below(maker, options->system_prompts);
    uint32_t ids = KVT_MIN(ids_of(options->system_tokens), maker->ids_max);

    agent->ids_count = 0;
    for (uint32_t i = 0; i < ids; i++)
        agent->ids[agent->ids_count++] = prompt * ids_of(options->system_tokens) + i;
    agent->turns_left = around(maker, options->turns);
    agent->turns_done = 0;
    agent->number = maker->next_agent++;
    agent->tenant = options->tenants == 0 ? 0 : 1 + below(maker, options->tenants);
}

/* Back to the end of an earlier turn: what was said after it is not part of the history. */
static void go_back(struct maker *maker, struct agent *agent)
{
    agent->turns_done = 1 + below(maker, agent->turns_done);
    agent->ids_count = agent->turn_ends[agent->turns_done - 1];
}

static int make_turn(struct maker *maker, struct kvt_workload *workload)
{
    const struct kvt_synth_options *options = maker->options;
    struct agent *agent = &maker->agents[below(maker, options->sessions)];
    uint32_t turn = ids_of(around(maker, options->turn_tokens));
    uint32_t output = around(maker, options->output_tokens), cut;
    struct kvt_request request = {0};

    if (agent->turns_left == 0 || agent->ids_count + turn + ids_of(output) >= maker->ids_max)
        begin_agent(maker, agent);
    if (agent->turns_done > 1 && below(maker, 100) < options->branch_pct)
        go_back(maker, agent);
    append_new(maker, agent, turn);
    /* A prompt may end anywhere inside its last id; the history then goes on through the rest. */
    cut = below(maker, KVT_SYNTH_ID_TOKENS);
    request.input_tokens = agent->ids_count * KVT_SYNTH_ID_TOKENS - cut;
    append_new(maker, agent, ids_of(output));
    request.output_tokens = agent->ids_count * KVT_SYNTH_ID_TOKENS - request.input_tokens;
    request.ids_count = agent->ids_count;
    request.session = agent->number;
    request.tenant = agent->tenant;
    request.arrival_ms = maker->now_ms;
    maker->now_ms += below(maker, 2 * options->gap_ms + 1);
    agent->turns_left--;
    if (agent->turns_done < TURNS_MAX)
        agent->turn_ends[agent->turns_done++] = agent->ids_count;
    return kvt_workload_add(workload, &request, agent->ids);
}

struct kvt_synth_options kvt_synth_defaults(void)
{
    return (struct kvt_synth_options){
        .seed = 1,
        .requests = 1000,
        .sessions = 24,
        .turns = 10,
        .system_prompts = 3,
        .system_tokens = 1024,
        .turn_tokens = 256,
        .output_tokens = 64,
        .prompt_tokens_max = 32768,
        .branch_pct = 5,
        .gap_ms = 50,
    };
}

static int make_all(struct maker *maker, struct kvt_workload *workload)
{
    const struct kvt_synth_options *options = maker->options;
    int r = 0;

    for (uint32_t i = 0; i < options->sessions; i++) {
        maker->agents[i].ids = calloc(maker->ids_max, sizeof(uint32_t));
        if (maker->agents[i].ids == NULL)
            return kvt_trace(-ENOMEM);
        begin_agent(maker, &maker->agents[i]);
    }
    for (uint64_t i = 0; i < options->requests && r == 0; i++)
        r = make_turn(maker, workload);
    return r;
}

int kvt_synth_make(struct kvt_workload *ret_workload, const struct kvt_synth_options *options)
{
    struct kvt_workload workload = {.id_tokens = KVT_SYNTH_ID_TOKENS, .seed = options->seed};
    struct maker maker = {
        .options = options,
        .ids_max = ids_of(options->prompt_tokens_max + 1),
        .next_id = options->system_prompts * ids_of(options->system_tokens),
        .random = options->seed,
    };
    int r;

    if (options->sessions == 0 || options->requests == 0 || options->system_prompts == 0 ||
        options->prompt_tokens_max < options->system_tokens + 2 * options->turn_tokens +
                                         2 * options->output_tokens + 4 * KVT_SYNTH_ID_TOKENS)
        return kvt_trace(-EINVAL);
    maker.agents = calloc(options->sessions, sizeof(*maker.agents));
    if (maker.agents == NULL)
        return kvt_trace(-ENOMEM);
    r = make_all(&maker, &workload);
    for (uint32_t i = 0; i < options->sessions; i++)
        free(maker.agents[i].ids);
    free(maker.agents);
    if (r < 0) {
        kvt_workload_deinit(&workload);
        return kvt_trace(r);
    }
    *ret_workload = workload;
    return 0;
}
