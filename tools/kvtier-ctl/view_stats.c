/* The page of `kvtier-ctl stats`: tiers first (is there room, is it well, does it serve), then the
 * index and who is there, then namespaces and engines, then every counter the daemon has. Counters
 * are printed by their labels, whatever they are called: a new one needs no change here. */
#include "tools/kvtier-ctl/view.h"

#include <string.h>

#include "tools/lib/table.h"

static const char *count(char buf[KVT_TEXT_BYTES], uint64_t value)
{
    return kvt_text_count(buf, value);
}

/* @part of @whole, in %; 0 of 0 is 0. */
static double share_pct(uint64_t part, uint64_t whole)
{
    return whole == 0 ? 0.0 : 100.0 * (double)part / (double)whole;
}

static void view_tiers(const struct kvt_ctl_view *view, const struct kvt_ans_stats *stats)
{
    static const char *const names[] = {"tier",   "used",    "capacity", "%",       "copies",
                                        "in use", "filling", "moving",   "evicted", "hit tokens",
                                        "read",   "written", "errors"};
    struct kvt_table *table = kvt_table_new("lrrrrrrrrrrrr");
    char a[KVT_TEXT_BYTES], b[KVT_TEXT_BYTES];

    kvt_ctl_paint(view, KVT_CTL_PAINT_HEAD, "Tiers\n");
    kvt_ctl_table_header(table, names, KVT_COUNT_OF(names));
    for (uint32_t i = 0; i < stats->tiers_count; i++) {
        const struct kvt_api_tier_stats *tier = &stats->tiers[i];

        kvt_table_cell(table, "L%u", tier->tier);
        kvt_table_cell(table, "%s", kvt_text_bytes(a, tier->used_bytes));
        kvt_table_cell(table, "%s", kvt_text_bytes(a, tier->capacity_bytes));
        kvt_table_cell(table, "%.0f", share_pct(tier->used_bytes, tier->capacity_bytes));
        kvt_table_cell(table, "%s", count(a, tier->copies));
        kvt_table_cell(table, "%s", count(a, tier->pinned_copies));
        kvt_table_cell(table, "%s", count(a, tier->filling_copies));
        kvt_table_cell(table, "%s", count(a, tier->inflight));
        kvt_table_cell(table, "%s", count(a, tier->evictions));
        kvt_table_cell(table, "%s", count(a, tier->hit_tokens));
        kvt_table_cell(table, "%s", kvt_text_bytes(a, tier->read_bytes));
        kvt_table_cell(table, "%s", kvt_text_bytes(a, tier->written_bytes));
        kvt_table_cell(table, "%s", count(b, tier->errors));
    }
    kvt_ctl_table_print(view, table);
    for (uint32_t i = 0; i < stats->tiers_count; i++) {
        const struct kvt_api_tier_stats *tier = &stats->tiers[i];
        char detail[KVT_CTL_TEXT_BYTES];

        (void)fprintf(view->out, "  L%u ", tier->tier);
        kvt_ctl_paint(view,
                      tier->health == 0   ? KVT_CTL_PAINT_GOOD
                      : tier->health == 1 ? KVT_CTL_PAINT_BAD
                                          : KVT_CTL_PAINT_WARN,
                      "%s", kvt_ctl_tier_health_text(tier->health));
        if (tier->detail.bytes > 0)
            (void)fprintf(view->out, ": %s", kvt_ctl_clean(detail, tier->detail));
        (void)fputc('\n', view->out);
    }
}

static void view_head(const struct kvt_ctl_view *view, const struct kvt_ans_stats *stats)
{
    char text[KVT_CTL_TEXT_BYTES], a[KVT_TEXT_BYTES], b[KVT_TEXT_BYTES], c[KVT_TEXT_BYTES];

    kvt_ctl_paint(view, KVT_CTL_PAINT_HEAD, "kvtierd %s", kvt_ctl_clean(text, stats->version));
    (void)fprintf(view->out, ", up %s\n\n", kvt_ctl_duration(text, stats->uptime_ns));
    view_tiers(view, stats);
    (void)fprintf(
        view->out, "\n  index     %s of %s (%.0f %%): %s blocks",
        kvt_text_bytes(a, stats->index_used_bytes), kvt_text_bytes(b, stats->index_memory_bytes),
        share_pct(stats->index_used_bytes, stats->index_memory_bytes), count(c, stats->blocks));
    (void)fprintf(view->out, " in %s nodes\n", count(a, stats->nodes));
    (void)fprintf(view->out, "  now       %s sessions, %s requests, %s leases",
                  count(a, stats->sessions), count(b, stats->ops_running), count(c, stats->leases));
    (void)fprintf(view->out, ", %s tickets, %s reserved copies, %s pins\n",
                  count(a, stats->tickets), count(b, stats->reserved_copies),
                  count(c, stats->pins));
}

/* " 1.0 MiB", " 2.0 MiB as 1.0 MiB of fp8_e4m3": bytes of one rank's shard of a block, and what a
 * tier holds of them. */
static size_t component_bytes(char *buf, size_t bytes, const struct kvt_api_ns_stats *ns,
                              uint32_t i)
{
    const struct kvt_api_component *component = &ns->components[i];
    char size[KVT_TEXT_BYTES], stored[KVT_TEXT_BYTES];

    if (component->quant.kind == 0)
        return (size_t)snprintf(buf, bytes, " %s",
                                kvt_text_bytes(size, component->bytes_per_block));
    return (size_t)snprintf(
        buf, bytes, " %s as %s of %s", kvt_text_bytes(size, component->bytes_per_block),
        kvt_text_bytes(stored, ns->stored_bytes[i]), kvt_ctl_quant_text(component->quant.kind));
}

/* "full 1.0 MiB, window(1024) 256.0 KiB". */
static const char *components_text(char *buf, size_t bytes, const struct kvt_api_ns_stats *ns)
{
    char name[KVT_CTL_TEXT_BYTES];
    size_t used = 0;

    buf[0] = '\0';
    for (uint32_t i = 0; i < ns->components_count && used < bytes; i++) {
        const struct kvt_api_component *component = &ns->components[i];
        int length = snprintf(buf + used, bytes - used, "%s%s", i > 0 ? ", " : "",
                              kvt_ctl_component_name(name, component));

        used += (size_t)length;
        if (component->kind == KVT_CTL_KIND_WINDOW && used < bytes)
            used += (size_t)snprintf(buf + used, bytes - used, "(%u)", component->window_tokens);
        if (used < bytes)
            used += component_bytes(buf + used, bytes - used, ns, i);
        if (used < bytes && component->is_replicated)
            used += (size_t)snprintf(buf + used, bytes - used, " replicated");
    }
    return buf;
}

static void view_ns_copies(const struct kvt_ctl_view *view, const struct kvt_ans_stats *stats)
{
    static const char *const names[] = {"namespace", "component", "L1 copies", "L2 copies",
                                        "L3 copies"};
    struct kvt_table *table = kvt_table_new("llrrr");

    kvt_ctl_table_header(table, names, KVT_COUNT_OF(names));
    for (uint32_t i = 0; i < stats->namespaces_count; i++) {
        const struct kvt_api_ns_stats *ns = &stats->namespaces[i];
        char hex[17], name[KVT_CTL_TEXT_BYTES], a[KVT_TEXT_BYTES];

        for (uint32_t c = 0; c < ns->components_count; c++) {
            kvt_table_cell(table, "%s", c == 0 ? kvt_text_hex(hex, ns->fingerprint, 6) : "");
            kvt_table_cell(table, "%s", kvt_ctl_component_name(name, &ns->components[c]));
            for (uint32_t t = 0; t < KVT_API_TIERS; t++)
                kvt_table_cell(table, "%s", count(a, ns->copies_at[c][t]));
        }
    }
    kvt_ctl_table_print(view, table);
}

void kvt_ctl_view_namespaces(const struct kvt_ctl_view *view, const struct kvt_ans_stats *stats)
{
    static const char *const names[] = {
        "namespace", "model", "revision",      "dtype",      "block", "ranks",     "epoch",
        "blocks",    "roots", "lookup tokens", "hit tokens", "hit",   "components"};
    struct kvt_table *table;
    char a[KVT_TEXT_BYTES], text[KVT_CTL_TEXT_BYTES], hex[17], components[512];

    kvt_ctl_paint(view, KVT_CTL_PAINT_HEAD, "Namespaces\n");
    if (stats->namespaces_count == 0) {
        (void)fputs("  none: no engine has declared a model yet\n", view->out);
        return;
    }
    table = kvt_table_new("llllrrrrrrrrl");
    kvt_ctl_table_header(table, names, KVT_COUNT_OF(names));
    for (uint32_t i = 0; i < stats->namespaces_count; i++) {
        const struct kvt_api_ns_stats *ns = &stats->namespaces[i];

        kvt_table_cell(table, "%s", kvt_text_hex(hex, ns->fingerprint, 6));
        kvt_table_cell(table, "%s", kvt_ctl_clean(text, ns->model));
        kvt_table_cell(table, "%s", kvt_ctl_clean(text, ns->revision));
        kvt_table_cell(table, "%s", kvt_ctl_clean(text, ns->dtype));
        kvt_table_cell(table, "%u", ns->block_tokens);
        kvt_table_cell(table, "%u", ns->ranks);
        kvt_table_cell(table, "%llu", (unsigned long long)ns->epoch);
        kvt_table_cell(table, "%s", count(a, ns->blocks));
        kvt_table_cell(table, "%s", count(a, ns->roots));
        kvt_table_cell(table, "%s", count(a, ns->lookup_tokens));
        kvt_table_cell(table, "%s", count(a, ns->hit_tokens));
        kvt_table_cell(table, "%s", kvt_text_share(a, ns->hit_tokens, ns->lookup_tokens));
        kvt_table_cell(table, "%s", components_text(components, sizeof(components), ns));
    }
    kvt_ctl_table_print(view, table);
    (void)fputc('\n', view->out);
    view_ns_copies(view, stats);
}

/* What each engine has now. */
static void view_engines_now(const struct kvt_ctl_view *view, const struct kvt_ans_stats *stats)
{
    static const char *const names[] = {"engine", "name",   "namespace", "sessions", "ops",
                                        "leases", "leased", "held",      "tickets",  "reserved"};
    struct kvt_table *table = kvt_table_new("lllrrrrrrr");
    char a[KVT_TEXT_BYTES], text[KVT_CTL_TEXT_BYTES], hex[17];

    kvt_ctl_table_header(table, names, KVT_COUNT_OF(names));
    for (uint32_t i = 0; i < stats->engines_count; i++) {
        const struct kvt_api_engine_stats *engine = &stats->engines[i];

        kvt_table_cell(table, "%s", kvt_text_hex(hex, engine->engine_id, 4));
        kvt_table_cell(table, "%s", kvt_ctl_clean(text, engine->name));
        kvt_table_cell(table, "%s",
                       engine->ns_idx < stats->namespaces_count
                           ? kvt_text_hex(hex, stats->namespaces[engine->ns_idx].fingerprint, 6)
                           : "-");
        kvt_table_cell(table, "%u", engine->sessions);
        kvt_table_cell(table, "%llu", (unsigned long long)engine->ops_running);
        kvt_table_cell(table, "%u", engine->leases);
        kvt_table_cell(table, "%s", kvt_text_bytes(a, engine->leased_bytes));
        kvt_table_cell(table, "%s", kvt_text_bytes(a, engine->held_bytes));
        kvt_table_cell(table, "%u", engine->tickets);
        kvt_table_cell(table, "%s", kvt_text_bytes(a, engine->reserved_bytes));
    }
    kvt_ctl_table_print(view, table);
}

/* What each did since its first session began. */
static void view_engines_done(const struct kvt_ctl_view *view, const struct kvt_ans_stats *stats)
{
    static const char *const names[] = {"engine",  "lookups",  "asked tokens", "hit tokens",
                                        "hit",     "promotes", "promoted",     "missed",
                                        "demotes", "demoted"};
    struct kvt_table *table = kvt_table_new("lrrrrrrrrr");
    char a[KVT_TEXT_BYTES], hex[17];

    kvt_ctl_table_header(table, names, KVT_COUNT_OF(names));
    for (uint32_t i = 0; i < stats->engines_count; i++) {
        const struct kvt_api_engine_stats *engine = &stats->engines[i];

        kvt_table_cell(table, "%s", kvt_text_hex(hex, engine->engine_id, 4));
        kvt_table_cell(table, "%s", count(a, engine->lookups));
        kvt_table_cell(table, "%s", count(a, engine->lookup_tokens));
        kvt_table_cell(table, "%s", count(a, engine->hit_tokens));
        kvt_table_cell(table, "%s", kvt_text_share(a, engine->hit_tokens, engine->lookup_tokens));
        kvt_table_cell(table, "%s", count(a, engine->promotes));
        kvt_table_cell(table, "%s", kvt_text_bytes(a, engine->promoted_bytes));
        kvt_table_cell(table, "%s", count(a, engine->missed_moves));
        kvt_table_cell(table, "%s", count(a, engine->demotes));
        kvt_table_cell(table, "%s", kvt_text_bytes(a, engine->demoted_bytes));
    }
    kvt_ctl_table_print(view, table);
}

static void view_engines(const struct kvt_ctl_view *view, const struct kvt_ans_stats *stats)
{
    kvt_ctl_paint(view, KVT_CTL_PAINT_HEAD, "Engines\n");
    if (stats->engines_count == 0) {
        (void)fputs("  none is attached\n", view->out);
        return;
    }
    view_engines_now(view, stats);
    (void)fputc('\n', view->out);
    view_engines_done(view, stats);
}

static bool is_bytes_name(const char *name)
{
    size_t length = strlen(name);

    return length >= 6 && strcmp(name + length - 6, "_bytes") == 0;
}

static void counter_cells(struct kvt_table *table, const struct kvt_api_counter *counter,
                          bool is_same_name)
{
    char a[KVT_TEXT_BYTES], label[KVT_CTL_TEXT_BYTES];
    struct kvt_text text = {counter->label, (uint32_t)strlen(counter->label)};

    kvt_table_cell(table, "%s", is_same_name ? "" : counter->name);
    (void)kvt_ctl_clean(label, text);
    for (char *at = label; *at != '\0'; at++)
        if (*at == ',')
            *at = ' ';
    kvt_table_cell(table, "%s", label);
    kvt_table_cell(table, "%s",
                   is_bytes_name(counter->name) ? kvt_text_bytes(a, counter->value)
                                                : count(a, counter->value));
}

/* Zeros are left out: they are in --json. */
static void view_counters(const struct kvt_ctl_view *view, const struct kvt_ans_stats *stats)
{
    struct kvt_table *table;
    const char *last = "";
    uint32_t zeros = 0;

    kvt_ctl_paint(view, KVT_CTL_PAINT_HEAD, "Counters\n");
    table = kvt_table_new("llr");
    kvt_table_cell(table, "counter");
    kvt_table_cell(table, "of");
    kvt_table_cell(table, "since start");
    for (uint32_t i = 0; i < stats->counters_count; i++) {
        const struct kvt_api_counter *counter = &stats->counters[i];

        if (counter->value == 0) {
            zeros++;
            continue;
        }
        counter_cells(table, counter, strcmp(last, counter->name) == 0);
        last = counter->name;
    }
    kvt_ctl_table_print(view, table);
    if (zeros > 0)
        (void)fprintf(view->out, "  %u more are 0\n", zeros);
}

void kvt_ctl_view_stats(const struct kvt_ctl_view *view, const struct kvt_ans_stats *stats)
{
    view_head(view, stats);
    (void)fputc('\n', view->out);
    if (kvt_ctl_is_cuda(stats))
        kvt_ctl_view_l1(view, stats);
    kvt_ctl_view_devices(view, stats);
    kvt_ctl_view_namespaces(view, stats);
    (void)fputc('\n', view->out);
    view_engines(view, stats);
    (void)fputc('\n', view->out);
    view_counters(view, stats);
}
