/* A list of requests, from a trace (trace.h) or made up (synth.h).
 *
 * Prompts are lists of ids, each standing for `id_tokens` tokens that are a function of (seed, id):
 * equal ids give equal tokens, so prefixes are shared where the trace says so and nothing else is.
 * What comes after the ids of a prompt (the answer, when it is to be stored) is tokens of nobody
 * else. Read-only after it was made: any thread, and a forked child inherits it. */
#pragma once

#include "daemon/base/def.h"

#define KVT_SESSION_NONE UINT32_MAX

struct kvt_request {
    uint64_t arrival_ms; /* from the start; does not fall */
    uint64_t ids_at;     /* in the workload's ids */
    uint32_t ids_count;
    uint32_t input_tokens, output_tokens;
    uint32_t session; /* turns of one conversation; KVT_SESSION_NONE: unknown */
    uint32_t tenant;  /* whose salt it uses; 0: no salt */
};

struct kvt_workload {
    struct kvt_request *requests;
    uint64_t requests_count, requests_room;
    uint32_t *ids;
    uint64_t ids_count, ids_room;
    uint32_t id_tokens;
    uint64_t seed;
    uint32_t input_tokens_max, output_tokens_max;
};
#define KVT_WORKLOAD_NULL ((struct kvt_workload){0})

void kvt_workload_deinit(struct kvt_workload *workload); /* idempotent, NULL-proof */

/* Appends @request with a copy of its ids; ids_at and the maxima are set here. -ENOMEM, or 0. */
KVT_MUST_USE int kvt_workload_add(struct kvt_workload *workload, const struct kvt_request *request,
                                  const uint32_t *ids);

/* Tokens [first, first + count) of request @request_idx's prompt followed by its answer. */
void kvt_workload_tokens(const struct kvt_workload *workload, uint64_t request_idx, uint64_t first,
                         uint64_t count, uint32_t *ret_tokens);
/* How many tokens from the start of request @later_idx's prompt are, by their ids, those of
 * @earlier_idx's prompt and answer: a cursor of the earlier one up to there is good for the later
 * one. 0 when their tenants differ. */
uint64_t kvt_workload_common_tokens(const struct kvt_workload *workload, uint64_t earlier_idx,
                                    uint64_t later_idx);

/* What a cache without limit would give: each prompt matched whole against all before it, then
 * stored; whole blocks only. */
struct kvt_workload_facts {
    uint64_t requests;
    uint64_t lookup_tokens; /* all prompt tokens */
    uint64_t prompt_blocks; /* whole blocks of all prompts */
    uint64_t distinct_blocks;
    uint64_t hit_tokens;
};
/* -ENOMEM, or 0. */
KVT_MUST_USE int kvt_workload_facts(const struct kvt_workload *workload, uint32_t block_tokens,
                                    struct kvt_workload_facts *ret_facts);
