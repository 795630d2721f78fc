/* What came out, for people and as JSON. */
#include <stdio.h>

#include "tools/kvtier-bench/bench.h"
#include "tools/lib/json.h"
#include "tools/lib/table.h"

static const char *const call_names[KVT_BENCH_CALLS] = {"lookup", "promote", "reserve", "demote"};
static const char *const tier_names[KVT_API_TIERS] = {"L1", "L2", "L3"};
static const char *const result_names[KVT_BENCH_RESULTS] = {
    "done", "miss", "late", "present", "pending", "no_room", "client_gone", "aborted"};
static const char *const state_names[4] = {"missing", "pending", "present", "no_room"};

static const char *code_name(uint32_t code)
{
    static const char *const names[KVT_BENCH_CODES] = {
        [KVT_CODE_CANCELLED] = "CANCELLED",
        [KVT_CODE_INVALID_ARGUMENT] = "INVALID_ARGUMENT",
        [KVT_CODE_DEADLINE_EXCEEDED] = "DEADLINE_EXCEEDED",
        [KVT_CODE_NOT_FOUND] = "NOT_FOUND",
        [KVT_CODE_PERMISSION_DENIED] = "PERMISSION_DENIED",
        [KVT_CODE_RESOURCE_EXHAUSTED] = "RESOURCE_EXHAUSTED",
        [KVT_CODE_FAILED_PRECONDITION] = "FAILED_PRECONDITION",
        [KVT_CODE_ABORTED] = "ABORTED",
        [KVT_CODE_UNIMPLEMENTED] = "UNIMPLEMENTED",
        [KVT_CODE_INTERNAL] = "INTERNAL",
        [KVT_CODE_UNAVAILABLE] = "UNAVAILABLE",
    };

    return names[code] != NULL ? names[code] : "OTHER";
}

/* ---- JSON ------------------------------------------------------------------------------------ */

static void json_counts(struct kvt_json *json, const char *name, const char *const *names,
                        const uint64_t *values, uint32_t count)
{
    kvt_json_object(json, name);
    for (uint32_t i = 0; i < count; i++)
        kvt_json_u64(json, names[i], values[i]);
    kvt_json_end(json);
}

static void json_calls(struct kvt_json *json, const struct kvt_bench_stats *sum)
{
    kvt_json_object(json, "latency_us");
    for (uint32_t i = 0; i < KVT_BENCH_CALLS; i++) {
        const struct kvt_histogram *calls = &sum->calls[i];

        kvt_json_object(json, call_names[i]);
        kvt_json_u64(json, "count", calls->count);
        kvt_json_double(json, "p50", (double)kvt_histogram_quantile(calls, 500) / 1e3);
        kvt_json_double(json, "p99", (double)kvt_histogram_quantile(calls, 990) / 1e3);
        kvt_json_double(json, "max", (double)calls->ns_max / 1e3);
        kvt_json_end(json);
    }
    kvt_json_end(json);
}

static void json_errors(struct kvt_json *json, const struct kvt_bench_stats *sum)
{
    kvt_json_array(json, "errors");
    for (uint32_t kind = 0; kind < KVT_OP_KINDS; kind++) {
        for (uint32_t code = 0; code < KVT_BENCH_CODES; code++) {
            if (sum->errors[kind][code] == 0)
                continue;
            kvt_json_object(json, NULL);
            kvt_json_text(json, "call", kvt_op_kind_text((enum kvt_op_kind)kind));
            kvt_json_text(json, "code", code_name(code));
            kvt_json_u64(json, "count", sum->errors[kind][code]);
            kvt_json_end(json);
        }
    }
    kvt_json_end(json);
}

static void json_moves(struct kvt_json *json, const struct kvt_bench_stats *sum)
{
    kvt_json_u64(json, "promoted_bytes", sum->promoted_bytes);
    kvt_json_u64(json, "demoted_bytes", sum->demoted_bytes);
    json_counts(json, "promoted_blocks_from", tier_names, sum->promoted_blocks_from, KVT_API_TIERS);
    json_counts(json, "promote_results", result_names, sum->promote_results, KVT_BENCH_RESULTS);
    json_counts(json, "reserve_states", state_names, sum->reserve_states, 4);
    json_counts(json, "demote_results", result_names, sum->demote_results, KVT_BENCH_RESULTS);
    kvt_json_u64(json, "computed_blocks", sum->computed_blocks);
    kvt_json_u64(json, "recomputed_blocks", sum->recomputed_blocks);
    kvt_json_u64(json, "quiesced_later", sum->quiesced_later);
    kvt_json_u64(json, "engine_blocks_lost", sum->blocks_lost);
}

static const struct paged_count {
    const char *name, *text; /* in JSON, and for people */
    size_t offset_bytes;
} paged_counts[] = {
#define COUNT(field, text)                                                                         \
    {                                                                                              \
#field, text, offsetof(struct kvt_bench_stats, field)                                      \
    }
    COUNT(loads, "loads"),
    COUNT(failed_loads, "- not whole on every rank"),
    COUNT(aborted_loads, "- aborted"),
    COUNT(stores, "stores"),
    COUNT(part_stores, "- not whole on every rank"),
    COUNT(aborted_stores, "- aborted"),
    COUNT(stalled_turns, "turns that waited for stores"),
    COUNT(cancelled_ranks, "calls cancelled on one rank"),
    COUNT(aborted_requests, "requests aborted"),
    COUNT(preemptions, "preemptions"),
    COUNT(reused_blocks, "engine blocks reused"),
    COUNT(reused_by_other, "- by another component"),
    COUNT(slid_blocks, "engine blocks out of a window"),
    COUNT(left_alone, "engine blocks that loads left alone"),
#undef COUNT
};

static uint64_t paged_count(const struct kvt_bench_stats *sum, const struct paged_count *count)
{
    return *(const uint64_t *)(const void *)((const char *)sum + count->offset_bytes);
}

void kvt_bench_report_json(const struct kvt_bench_outcome *outcome, const struct kvt_model *model)
{
    const struct kvt_bench_stats *sum = &outcome->sum;
    struct kvt_json json;

    kvt_json_begin(&json, stdout, false);
    kvt_json_u64(&json, "requests", sum->requests);
    kvt_json_u64(&json, "lookup_tokens", sum->lookup_tokens);
    kvt_json_u64(&json, "hit_tokens", sum->hit_tokens);
    json_counts(&json, "hit_tokens_by_tier", tier_names, sum->hit_tokens_by_tier, KVT_API_TIERS);
    kvt_json_object(&json, "tokens_by_component");
    for (uint32_t c = 0; c < model->components_count; c++)
        json_counts(&json, model->components[c].name, tier_names, sum->component_tokens[c],
                    KVT_API_TIERS);
    kvt_json_end(&json);
    kvt_json_u64(&json, "verified_blocks", sum->verified_blocks);
    kvt_json_u64(&json, "verified_bytes", sum->verified_bytes);
    kvt_json_u64(&json, "wrong_blocks", sum->wrong_blocks);
    kvt_json_u64(&json, "wrong_bytes", sum->wrong_bytes);
    kvt_json_u64(&json, "stray_bytes", sum->stray_bytes);
    if (sum->wrong_bytes + sum->stray_bytes > 0)
        kvt_json_text(&json, "first_wrong", outcome->first_wrong);
    if (outcome->has_daemon_stats) {
        kvt_json_u64(&json, "leases_left", outcome->leases_left);
        kvt_json_u64(&json, "reservations_left", outcome->reservations_left);
        kvt_json_u64(&json, "pins_left", outcome->pins_left);
    }
    kvt_json_double(&json, "seconds", (double)outcome->wall_ns / (double)KVT_NS_PER_S);
    kvt_json_u64(&json, "engine_kills", outcome->kills);
    kvt_json_u64(&json, "rank_kills", outcome->rank_kills);
    kvt_json_u64(&json, "engine_restarts", outcome->restarts);
    kvt_json_u64(&json, "cursor_lookups", sum->cursor_lookups);
    kvt_json_u64(&json, "cursors_stale", sum->cursors_stale);
    kvt_json_u64(&json, "sent_tokens", sum->sent_tokens);
    json_moves(&json, sum);
    for (size_t i = 0; i < KVT_COUNT_OF(paged_counts); i++)
        kvt_json_u64(&json, paged_counts[i].name, paged_count(sum, &paged_counts[i]));
    json_calls(&json, sum);
    json_errors(&json, sum);
    kvt_json_finish(&json);
}

/* ---- text ------------------------------------------------------------------------------------ */

static void print_table(struct kvt_table *table, FILE *out)
{
    if (kvt_table_print(table, out, KVT_TABLE_PLAIN, 2) < 0)
        fputs("  (out of memory: some of the table is missing)\n", out);
    fputc('\n', out);
    (void)kvt_table_free(table);
}

static void header(struct kvt_table *table, const char *const *names, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++)
        kvt_table_cell(table, "%s", names[i]);
}

static void text_hits(const struct kvt_bench_outcome *outcome, const struct kvt_model *model,
                      FILE *out)
{
    static const char *const names[] = {"hits", "tokens", "of looked up", "L1", "L2", "L3"};
    const struct kvt_bench_stats *sum = &outcome->sum;
    struct kvt_table *table = kvt_table_new("lrrrrr");
    char text[KVT_TEXT_BYTES], share[KVT_TEXT_BYTES];

    header(table, names, KVT_COUNT_OF(names));
    kvt_table_cell(table, "prompts");
    kvt_table_cell(table, "%s", kvt_text_count(text, sum->hit_tokens));
    kvt_table_cell(table, "%s", kvt_text_share(share, sum->hit_tokens, sum->lookup_tokens));
    for (uint32_t t = 0; t < KVT_API_TIERS; t++)
        kvt_table_cell(table, "%s", kvt_text_count(text, sum->hit_tokens_by_tier[t]));
    for (uint32_t c = 0; c < model->components_count; c++) {
        const uint64_t *tokens = sum->component_tokens[c];

        kvt_table_cell(table, "- %s needed", model->components[c].name);
        kvt_table_cell(table, "%s", kvt_text_count(text, tokens[0] + tokens[1] + tokens[2]));
        kvt_table_cell(table, "%s", "");
        for (uint32_t t = 0; t < KVT_API_TIERS; t++)
            kvt_table_cell(table, "%s", kvt_text_count(text, tokens[t]));
    }
    print_table(table, out);
}

static void path_row(struct kvt_table *table, const char *name, uint64_t bytes, uint64_t busy_ns,
                     uint64_t wall_ns)
{
    char text[KVT_TEXT_BYTES];

    kvt_table_cell(table, "%s", name);
    kvt_table_cell(table, "%.3f", (double)bytes / 1e9);
    kvt_table_cell(table, "%s", busy_ns == 0 ? "" : kvt_text_rate(text, bytes, busy_ns));
    kvt_table_cell(table, "%s", kvt_text_rate(text, bytes, wall_ns));
}

static void text_paths(const struct kvt_bench_outcome *outcome, FILE *out)
{
    static const char *const names[] = {"path", "GB", "in its calls", "over all"};
    const struct kvt_bench_stats *sum = &outcome->sum;
    struct kvt_table *table = kvt_table_new("lrrr");

    header(table, names, KVT_COUNT_OF(names));
    path_row(table, "promote: daemon to engine", sum->promoted_bytes,
             sum->calls[KVT_BENCH_PROMOTE].sum_ns, outcome->wall_ns);
    path_row(table, "demote: engine to daemon", sum->demoted_bytes,
             sum->calls[KVT_BENCH_DEMOTE].sum_ns, outcome->wall_ns);
    for (uint32_t i = 0; i < outcome->tiers_count; i++) {
        const struct kvt_api_tier_stats *tier = &outcome->tiers[i];
        char name[64];

        if (tier->health == 2)
            continue;
        (void)snprintf(name, sizeof(name), "L%u read (daemon's counter)", tier->tier);
        path_row(table, name, tier->read_bytes, 0, outcome->wall_ns);
        (void)snprintf(name, sizeof(name), "L%u written (daemon's counter)", tier->tier);
        path_row(table, name, tier->written_bytes, 0, outcome->wall_ns);
    }
    print_table(table, out);
}

static void text_calls(const struct kvt_bench_stats *sum, FILE *out)
{
    static const char *const names[] = {"call", "count", "p50", "p99", "max"};
    struct kvt_table *table = kvt_table_new("lrrrr");
    char text[KVT_TEXT_BYTES];

    header(table, names, KVT_COUNT_OF(names));
    for (uint32_t i = 0; i < KVT_BENCH_CALLS; i++) {
        const struct kvt_histogram *calls = &sum->calls[i];

        kvt_table_cell(table, "%s", call_names[i]);
        kvt_table_cell(table, "%s", kvt_text_count(text, calls->count));
        kvt_table_cell(table, "%s", kvt_text_ns(text, kvt_histogram_quantile(calls, 500)));
        kvt_table_cell(table, "%s", kvt_text_ns(text, kvt_histogram_quantile(calls, 990)));
        kvt_table_cell(table, "%s", kvt_text_ns(text, calls->ns_max));
    }
    print_table(table, out);
}

static void text_errors(const struct kvt_bench_stats *sum, FILE *out)
{
    struct kvt_table *table = kvt_table_new("llr");
    bool has_errors = false;
    char text[KVT_TEXT_BYTES];

    kvt_table_cell(table, "call");
    kvt_table_cell(table, "error");
    kvt_table_cell(table, "count");
    for (uint32_t kind = 0; kind < KVT_OP_KINDS; kind++) {
        for (uint32_t code = 0; code < KVT_BENCH_CODES; code++) {
            if (sum->errors[kind][code] == 0)
                continue;
            has_errors = true;
            kvt_table_cell(table, "%s", kvt_op_kind_text((enum kvt_op_kind)kind));
            kvt_table_cell(table, "%s", code_name(code));
            kvt_table_cell(table, "%s", kvt_text_count(text, sum->errors[kind][code]));
        }
    }
    if (has_errors)
        print_table(table, out);
    else
        (void)kvt_table_free(table);
}

static void count_row(struct kvt_table *table, const char *name, uint64_t value)
{
    char text[KVT_TEXT_BYTES];

    kvt_table_cell(table, "%s", name);
    kvt_table_cell(table, "%s", kvt_text_count(text, value));
}

static void text_counts(const struct kvt_bench_outcome *outcome, FILE *out)
{
    const struct kvt_bench_stats *sum = &outcome->sum;
    struct kvt_table *table = kvt_table_new("lr");

    kvt_table_cell(table, "what");
    kvt_table_cell(table, "count");
    count_row(table, "requests", sum->requests);
    count_row(table, "tokens looked up", sum->lookup_tokens);
    count_row(table, "tokens sent", sum->sent_tokens);
    count_row(table, "lookups by cursor", sum->cursor_lookups);
    count_row(table, "blocks computed", sum->computed_blocks);
    count_row(table, "blocks stored", sum->demote_results[KVT_MOVE_DONE]);
    count_row(table, "blocks promised, not delivered", sum->recomputed_blocks);
    for (size_t i = 0; i < KVT_COUNT_OF(paged_counts) && sum->loads + sum->stores > 0; i++)
        count_row(table, paged_counts[i].text, paged_count(sum, &paged_counts[i]));
    if (outcome->rank_kills > 0)
        count_row(table, "ranks killed", outcome->rank_kills);
    if (outcome->kills > 0)
        count_row(table, "engines killed", outcome->kills);
    if (outcome->restarts > 0)
        count_row(table, "engines that lost the daemon", outcome->restarts);
    if (sum->quiesced_later > 0)
        count_row(table, "calls quiesced later", sum->quiesced_later);
    count_row(table, "leases left", outcome->leases_left);
    count_row(table, "reservations left", outcome->reservations_left);
    count_row(table, "pins left", outcome->pins_left);
    count_row(table, "blocks verified", sum->verified_blocks);
    count_row(table, "wrong bytes", sum->wrong_bytes);
    if (sum->loads + sum->stores > 0)
        count_row(table, "bytes written where nobody may write", sum->stray_bytes);
    print_table(table, out);
}

void kvt_bench_report_text(const struct kvt_bench_outcome *outcome, const struct kvt_model *model,
                           FILE *out)
{
    double seconds = (double)outcome->wall_ns / (double)KVT_NS_PER_S;

    fprintf(out, "kvtier-bench: %llu requests in %.1f s (%.0f a second), preset %s\n\n",
            (unsigned long long)outcome->sum.requests, seconds,
            (double)outcome->sum.requests / (seconds > 0 ? seconds : 1), model->preset);
    text_hits(outcome, model, out);
    text_paths(outcome, out);
    text_calls(&outcome->sum, out);
    text_errors(&outcome->sum, out);
    text_counts(outcome, out);
    if (outcome->sum.wrong_bytes + outcome->sum.stray_bytes > 0)
        fprintf(out, "WRONG BYTES: %s\n", outcome->first_wrong);
}
