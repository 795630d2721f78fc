/* What kvtier-ctl prints: pure functions from answers (daemon/base/api.h) to a stream. Texts in
 * answers come from clients of the daemon: control characters in them are never sent to a terminal
 * (kvt_ctl_clean). Each has a JSON twin in view_json.c; JSON fields keep their names, new ones may
 * come. One thread. */
#pragma once

#include <stdio.h>

#include "tools/kvtier-ctl/ctl.h"
#include "tools/kvtier-ctl/doctor.h"

/* kvt_api_component.kind, as api.h lists them. */
enum { KVT_CTL_KIND_FULL = 1, KVT_CTL_KIND_WINDOW = 2, KVT_CTL_KIND_STATE = 3 };

struct kvt_ctl_view {
    FILE *out;
    bool is_color;
};

enum kvt_ctl_paint {
    KVT_CTL_PAINT_GOOD,
    KVT_CTL_PAINT_WARN,
    KVT_CTL_PAINT_BAD,
    KVT_CTL_PAINT_HEAD
};
/* Colours are asked for, or wanted by default: a terminal, and NO_COLOR is unset or empty. */
bool kvt_ctl_wants_color(enum kvt_ctl_color choice, bool is_terminal, const char *env_no_color);
void kvt_ctl_paint(const struct kvt_ctl_view *view, enum kvt_ctl_paint paint, const char *format,
                   ...) KVT_PRINTF(3, 4);

#define KVT_CTL_TEXT_BYTES 160u
/* @text as printable UTF-8, everything else as \xNN, cut with ".." when it is long. Returns buf. */
const char *kvt_ctl_clean(char buf[KVT_CTL_TEXT_BYTES], struct kvt_text text);
/* "12 s", "3 min 10 s", "5 h 02 min", "12 d 4 h". */
const char *kvt_ctl_duration(char buf[KVT_CTL_TEXT_BYTES], uint64_t ns);
const char *kvt_ctl_quant_text(uint32_t quant_kind);    /* "none", "fp8_e4m3", "int8" */
const char *kvt_ctl_kind_text(uint32_t component_kind); /* "full", "window", "state" */
const char *kvt_ctl_tier_health_text(uint32_t health);  /* "ok", "out of service", "off" */
const char *kvt_ctl_why_text(enum kvt_why why);         /* a word for scripts: "never_stored" */
/* The name an operator gave the component, or its kind. Returns buf. */
const char *kvt_ctl_component_name(char buf[KVT_CTL_TEXT_BYTES],
                                   const struct kvt_api_component *component);

struct kvt_table;
/* A row of column names. */
void kvt_ctl_table_header(struct kvt_table *table, const char *const names[], size_t names_count);
/* Prints @table below the heading of a part of a page, and frees it. */
void kvt_ctl_table_print(const struct kvt_ctl_view *view, struct kvt_table *table);

/* ---- stats ------------------------------------------------------------------------------------
 */

void kvt_ctl_view_stats(const struct kvt_ctl_view *view, const struct kvt_ans_stats *stats);
void kvt_ctl_view_namespaces(const struct kvt_ctl_view *view, const struct kvt_ans_stats *stats);
/* What changed from @before to @now, each second of @elapsed_ns. Of two boots: says so. */
void kvt_ctl_view_rates(const struct kvt_ctl_view *view, const struct kvt_ans_stats *before,
                        const struct kvt_ans_stats *now, uint64_t elapsed_ns);
/* Part of the page of stats; nothing when there is no L3. */
void kvt_ctl_view_devices(const struct kvt_ctl_view *view, const struct kvt_ans_stats *stats);
/* L1 and its GPUs; why it is off. */
void kvt_ctl_view_l1(const struct kvt_ctl_view *view, const struct kvt_ans_stats *stats);
/* The page of `devices`: both. */
void kvt_ctl_view_all_devices(const struct kvt_ctl_view *view, const struct kvt_ans_stats *stats);
/* A line for one that is lost or refused; else nothing. */
void kvt_ctl_view_gpu_trouble(const struct kvt_ctl_view *view, const struct kvt_api_gpu_stats *gpu);
bool kvt_ctl_is_cuda(const struct kvt_ans_stats *stats); /* L1 is to be on GPUs */
const char *kvt_ctl_gpu_state_text(uint32_t state);
const char *kvt_ctl_gpu_name(char buf[KVT_CTL_TEXT_BYTES],
                             const struct kvt_api_gpu_stats *gpu); /* "GPU 0 NVIDIA H200" */
const char *kvt_ctl_device_health_text(uint32_t health);
const char *kvt_ctl_index_state_text(uint32_t state);
/* "ready", "loading 40 %". Returns buf. */
const char *kvt_ctl_index_progress(char buf[KVT_CTL_TEXT_BYTES],
                                   const struct kvt_api_index_stats *index);
uint64_t kvt_ctl_device_errors(const struct kvt_api_device_stats *device); /* of all kinds */
/* The value of a counter by name and label; 0 when the daemon has none such. */
uint64_t kvt_ctl_counter(const struct kvt_ans_stats *stats, const char *name, const char *label);
void kvt_ctl_json_stats(FILE *out, const struct kvt_ans_stats *stats, bool is_compact);
struct kvt_json;
void kvt_ctl_json_l1(struct kvt_json *json, const struct kvt_ans_stats *stats); /* a part of it */
void kvt_ctl_json_devices(FILE *out, const struct kvt_ans_stats *stats);
void kvt_ctl_json_namespaces(FILE *out, const struct kvt_ans_stats *stats);

/* ---- upkeep ------------------------------------------------------------------------------------
 */

void kvt_ctl_view_drain(const struct kvt_ctl_view *view, const struct kvt_ans_maintain *answer);
void kvt_ctl_view_scrub(const struct kvt_ctl_view *view, const struct kvt_ans_maintain *answer);
void kvt_ctl_json_maintain(FILE *out, const struct kvt_ans_maintain *answer);

/* ---- health -----------------------------------------------------------------------------------
 */

struct kvt_ctl_health {
    bool is_serving;
    const struct kvt_ans_stats *stats;
};
bool kvt_ctl_is_degraded(const struct kvt_ans_stats *stats); /* a tier, GPU, device or index */
void kvt_ctl_view_health(const struct kvt_ctl_view *view, const struct kvt_ctl_health *health);
void kvt_ctl_json_health(FILE *out, const struct kvt_ctl_health *health);

/* ---- one prompt -------------------------------------------------------------------------------
 */

struct kvt_ctl_prompt { /* what was asked, for lookup and explain */
    const struct kvt_api_ns_stats *ns;
    uint64_t tokens_count;
    uint64_t limit_tokens;
    uint32_t tiers;
};
void kvt_ctl_view_lookup(const struct kvt_ctl_view *view, const struct kvt_ctl_prompt *prompt,
                         const struct kvt_ans_lookup *answer);
void kvt_ctl_view_explain(const struct kvt_ctl_view *view, const struct kvt_ctl_prompt *prompt,
                          const struct kvt_ans_lookup *answer);
void kvt_ctl_json_lookup(FILE *out, const struct kvt_ctl_prompt *prompt,
                         const struct kvt_ans_lookup *answer, bool wants_why);
/* What to do about @why; one or two sentences. */
const char *kvt_ctl_remedy(enum kvt_why why, uint32_t component_kind);

/* ---- the tree ---------------------------------------------------------------------------------
 */

struct kvt_ctl_tree {
    const struct kvt_ans_stats *stats;     /* for names of namespaces and components */
    const struct kvt_api_ns_stats *only;   /* the one asked for; NULL: all */
    const struct kvt_api_dump_node *nodes; /* parents before children, depth first */
    uint32_t nodes_count;
    bool is_cut; /* there were more nodes than asked for */
    uint64_t depth_max;
};
void kvt_ctl_view_tree(const struct kvt_ctl_view *view, const struct kvt_ctl_tree *tree);
void kvt_ctl_json_tree(FILE *out, const struct kvt_ctl_tree *tree);

/* ---- the doctor -------------------------------------------------------------------------------
 */

void kvt_ctl_view_doctor(const struct kvt_ctl_view *view, const struct kvt_ctl_report *report);
void kvt_ctl_json_doctor(FILE *out, const struct kvt_ctl_report *report);
