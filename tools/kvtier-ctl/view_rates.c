/* `stats --watch`: what happened between two answers, each second. Gauges are shown as they are
 * now, counters as differences; a daemon that was restarted in between is said, not subtracted. */
#include <string.h>

#include "tools/kvtier-ctl/view.h"
#include "tools/lib/table.h"

uint64_t kvt_ctl_counter(const struct kvt_ans_stats *stats, const char *name, const char *label)
{
    for (uint32_t i = 0; i < stats->counters_count; i++)
        if (strcmp(stats->counters[i].name, name) == 0 &&
            strcmp(stats->counters[i].label, label) == 0)
            return stats->counters[i].value;
    return 0;
}

static uint64_t rise(uint64_t before, uint64_t now)
{
    return now > before ? now - before : 0;
}

static double each_second(uint64_t amount, uint64_t elapsed_ns)
{
    return elapsed_ns == 0 ? 0.0 : (double)amount * (double)KVT_NS_PER_S / (double)elapsed_ns;
}

static const char *rate_text(char buf[KVT_TEXT_BYTES], uint64_t amount, uint64_t elapsed_ns)
{
    double rate = each_second(amount, elapsed_ns);

    if (rate >= 100.0 || rate == 0.0)
        return kvt_text_count(buf, (uint64_t)(rate + 0.5));
    (void)snprintf(buf, KVT_TEXT_BYTES, "%.1f", rate);
    return buf;
}

static const char *bytes_rate_text(char buf[KVT_TEXT_BYTES], uint64_t bytes, uint64_t elapsed_ns)
{
    return kvt_text_bytes(buf, (uint64_t)(each_second(bytes, elapsed_ns) + 0.5));
}

static void view_tier_rates(const struct kvt_ctl_view *view, const struct kvt_ans_stats *before,
                            const struct kvt_ans_stats *now, uint64_t elapsed_ns)
{
    static const char *const names[] = {"tier",      "health", "used",      "%",
                                        "copies",    "in use", "moving",    "hit tokens/s",
                                        "evicted/s", "read/s", "written/s", "errors/s"};
    struct kvt_table *table = kvt_table_new("llrrrrrrrrrr");
    char a[KVT_TEXT_BYTES];

    for (size_t i = 0; i < KVT_COUNT_OF(names); i++)
        kvt_table_cell(table, "%s", names[i]);
    for (uint32_t i = 0; i < now->tiers_count; i++) {
        const struct kvt_api_tier_stats *tier = &now->tiers[i];
        struct kvt_api_tier_stats old = i < before->tiers_count ? before->tiers[i] : *tier;
        uint64_t pct =
            tier->capacity_bytes == 0 ? 0 : tier->used_bytes * 100 / tier->capacity_bytes;

        kvt_table_cell(table, "L%u", tier->tier);
        kvt_table_cell(table, "%s", kvt_ctl_tier_health_text(tier->health));
        kvt_table_cell(table, "%s", kvt_text_bytes(a, tier->used_bytes));
        kvt_table_cell(table, "%llu", (unsigned long long)pct);
        kvt_table_cell(table, "%s", kvt_text_count(a, tier->copies));
        kvt_table_cell(table, "%s", kvt_text_count(a, tier->pinned_copies));
        kvt_table_cell(table, "%s", kvt_text_count(a, tier->inflight));
        kvt_table_cell(table, "%s",
                       rate_text(a, rise(old.hit_tokens, tier->hit_tokens), elapsed_ns));
        kvt_table_cell(table, "%s", rate_text(a, rise(old.evictions, tier->evictions), elapsed_ns));
        kvt_table_cell(table, "%s",
                       bytes_rate_text(a, rise(old.read_bytes, tier->read_bytes), elapsed_ns));
        kvt_table_cell(
            table, "%s",
            bytes_rate_text(a, rise(old.written_bytes, tier->written_bytes), elapsed_ns));
        kvt_table_cell(table, "%s", rate_text(a, rise(old.errors, tier->errors), elapsed_ns));
    }
    kvt_ctl_table_print(view, table);
}

static void view_hit_rate(const struct kvt_ctl_view *view, const struct kvt_ans_stats *before,
                          const struct kvt_ans_stats *now, uint64_t elapsed_ns)
{
    uint64_t lookup_tokens = 0, hit_tokens = 0;
    char a[KVT_TEXT_BYTES], b[KVT_TEXT_BYTES], c[KVT_TEXT_BYTES];

    for (uint32_t i = 0; i < now->namespaces_count; i++) {
        const struct kvt_api_ns_stats *ns = &now->namespaces[i];
        bool was_there = false;

        for (uint32_t j = 0; j < before->namespaces_count && !was_there; j++) {
            const struct kvt_api_ns_stats *old = &before->namespaces[j];

            was_there = memcmp(old->fingerprint, ns->fingerprint, KVT_FINGERPRINT_BYTES) == 0;
            if (was_there) {
                lookup_tokens += rise(old->lookup_tokens, ns->lookup_tokens);
                hit_tokens += rise(old->hit_tokens, ns->hit_tokens);
            }
        }
        if (!was_there) {
            lookup_tokens += ns->lookup_tokens;
            hit_tokens += ns->hit_tokens;
        }
    }
    (void)fprintf(view->out, "\n  tokens    %s/s looked up, %s/s hit (%s)\n",
                  rate_text(a, lookup_tokens, elapsed_ns), rate_text(b, hit_tokens, elapsed_ns),
                  kvt_text_share(c, hit_tokens, lookup_tokens));
}

/* Counters that moved, busiest first would jump about: they keep the daemon's order. */
static void view_counter_rates(const struct kvt_ctl_view *view, const struct kvt_ans_stats *before,
                               const struct kvt_ans_stats *now, uint64_t elapsed_ns)
{
    struct kvt_table *table = kvt_table_new("llr");
    char a[KVT_TEXT_BYTES];
    uint32_t rows = 0;

    kvt_table_cell(table, "counter");
    kvt_table_cell(table, "of");
    kvt_table_cell(table, "each second");
    for (uint32_t i = 0; i < now->counters_count; i++) {
        const struct kvt_api_counter *counter = &now->counters[i];
        uint64_t moved =
            rise(kvt_ctl_counter(before, counter->name, counter->label), counter->value);

        if (moved == 0)
            continue;
        kvt_table_cell(table, "%s", counter->name);
        kvt_table_cell(table, "%s", counter->label);
        kvt_table_cell(table, "%s", rate_text(a, moved, elapsed_ns));
        rows++;
    }
    (void)fputc('\n', view->out);
    if (rows == 0)
        (void)fputs("  nothing happened\n", view->out);
    else if (kvt_table_print(table, view->out, KVT_TABLE_PLAIN, 2) < 0)
        (void)fputs("  (out of memory: this table is not complete)\n", view->out);
    (void)kvt_table_free(table);
}

void kvt_ctl_view_rates(const struct kvt_ctl_view *view, const struct kvt_ans_stats *before,
                        const struct kvt_ans_stats *now, uint64_t elapsed_ns)
{
    char text[KVT_CTL_TEXT_BYTES], a[KVT_TEXT_BYTES], b[KVT_TEXT_BYTES], c[KVT_TEXT_BYTES];

    kvt_ctl_paint(view, KVT_CTL_PAINT_HEAD, "kvtierd %s", kvt_ctl_clean(text, now->version));
    (void)fprintf(view->out, ", up %s\n\n", kvt_ctl_duration(text, now->uptime_ns));
    if (before->boot_id != now->boot_id) {
        kvt_ctl_paint(view, KVT_CTL_PAINT_WARN, "  the daemon was restarted: rates begin anew\n");
        return;
    }
    view_tier_rates(view, before, now, elapsed_ns);
    view_hit_rate(view, before, now, elapsed_ns);
    (void)fprintf(view->out, "  now       %s sessions, %s requests, %s leases",
                  kvt_text_count(a, now->sessions), kvt_text_count(b, now->ops_running),
                  kvt_text_count(c, now->leases));
    (void)fprintf(view->out, ", %s tickets, %s reserved copies; index %s\n",
                  kvt_text_count(a, now->tickets), kvt_text_count(b, now->reserved_copies),
                  kvt_text_share(c, now->index_used_bytes, now->index_memory_bytes));
    view_counter_rates(view, before, now, elapsed_ns);
}
