/* Makes up a workload: agents that talk in turns.
 *
 * `sessions` agents are live at a time. Each begins with one of a few shared system prompts; each
 * turn's prompt is the whole history, the last answer and some new tokens (a tool's output); now
 * and then an agent goes back some turns and tries again, so the tree gets branches. When its turns
 * are over, another agent takes its place. Lengths are drawn around the given means. The same
 * options give the same workload. */
#pragma once

#include "tools/lib/workload.h"

struct kvt_synth_options {
    uint64_t seed;
    uint64_t requests;
    uint32_t sessions;       /* live at a time; at least 1 */
    uint32_t turns;          /* mean of a session */
    uint32_t system_prompts; /* shared by all sessions of a tenant; at least 1 */
    uint32_t system_tokens, turn_tokens, output_tokens; /* means */
    uint32_t prompt_tokens_max; /* an agent whose next prompt would be longer is over */
    uint32_t tenants;           /* 0: no salts */
    uint32_t branch_pct;        /* turns that go back and try again */
    uint32_t gap_ms;            /* mean time between requests */
};
#define KVT_SYNTH_ID_TOKENS 16u

struct kvt_synth_options kvt_synth_defaults(void);

/* -EINVAL (a count that must not be 0), -ENOMEM, or 0. */
KVT_MUST_USE int kvt_synth_make(struct kvt_workload *ret_workload,
                                const struct kvt_synth_options *options);
