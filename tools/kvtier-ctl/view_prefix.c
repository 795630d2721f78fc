/* One prompt: how far it is cached (lookup), and what stopped it (explain).
 *
 * A boundary is a position at which every component agrees; the answer names, for each, how far it
 * would go alone and which block stopped it. The remedies are for the operator, so each says where
 * to look next. */
#include "tools/kvtier-ctl/view.h"

#include "tools/lib/table.h"

const char *kvt_ctl_remedy(enum kvt_why why, uint32_t component_kind)
{
    switch (why) {
    case KVT_WHY_NONE:
        return "Nothing to do.";
    case KVT_WHY_NEVER_STORED:
        if (component_kind == KVT_CTL_KIND_STATE)
            return "No engine stored a snapshot at a deeper position: store one at each turn's end "
                   "(and one block before it).";
        return "These tokens are not in the tree. If a hit was expected, compare the prompt with "
               "what was stored: a date or an id near the beginning, another chat template, salt, "
               "LoRA or namespace. See in 'stats' that the engine demotes at all.";
    case KVT_WHY_EVICTED:
        if (component_kind == KVT_CTL_KIND_WINDOW)
            return "The window's blocks behind this position went for room. Store them again "
                   "there (it heals), or give L2 or L3 more room.";
        return "It was stored and went for room: the working set is larger than the tiers. Give "
               "L2 or L3 more room; evictions by reason are in 'stats'.";
    case KVT_WHY_OTHER_TIER:
        return "It is there, but only in a tier that this request excluded: ask with more tiers, "
               "or let lookups prefetch.";
    case KVT_WHY_PENDING:
        return "An engine is storing it right now: ask again in a moment. If it stays so, that "
               "engine hangs; its ticket ends by its deadline.";
    case KVT_WHY_CHECK_FAILED:
        return "Its bytes failed verification and were dropped. One is bad luck; more are a "
               "failing disk or memory: see errors in 'stats', smartctl and the kernel's log.";
    case KVT_WHY_INDEX_FULL:
        return "It was not stored because the index was full: raise index.memory.";
    case KVT_WHY_OTHER_EPOCH:
        return "It was there before the namespace was reset; it comes back as it is stored again.";
    }
    return "This kvtier-ctl does not know the reason: it is older than the daemon.";
}

static const char *why_sentence(enum kvt_why why)
{
    switch (why) {
    case KVT_WHY_NONE:
        return "nothing stopped it";
    case KVT_WHY_NEVER_STORED:
        return "never stored, or forgotten";
    case KVT_WHY_EVICTED:
        return "evicted";
    case KVT_WHY_OTHER_TIER:
        return "only in another tier";
    case KVT_WHY_PENDING:
        return "being stored now";
    case KVT_WHY_CHECK_FAILED:
        return "failed verification";
    case KVT_WHY_INDEX_FULL:
        return "the index was full";
    case KVT_WHY_OTHER_EPOCH:
        return "stored before a reset";
    }
    return "unknown reason";
}

static void view_head(const struct kvt_ctl_view *view, const struct kvt_ctl_prompt *prompt,
                      const struct kvt_ans_lookup *answer)
{
    const struct kvt_api_ns_stats *ns = prompt->ns;
    char hex[17], text[KVT_CTL_TEXT_BYTES], a[KVT_TEXT_BYTES], b[KVT_TEXT_BYTES];
    uint64_t whole = prompt->tokens_count / ns->block_tokens;

    (void)fprintf(view->out, "namespace   %s %s\n", kvt_text_hex(hex, ns->fingerprint, 6),
                  kvt_ctl_clean(text, ns->model));
    (void)fprintf(view->out, "prompt      %s tokens: %s blocks of %u",
                  kvt_text_count(a, prompt->tokens_count), kvt_text_count(b, whole),
                  ns->block_tokens);
    if (prompt->tokens_count % ns->block_tokens != 0)
        (void)fprintf(view->out, ", and %llu tokens that fill no block",
                      (unsigned long long)(prompt->tokens_count % ns->block_tokens));
    (void)fprintf(view->out, "\nboundary    ");
    kvt_ctl_paint(view, answer->boundary_tokens > 0 ? KVT_CTL_PAINT_GOOD : KVT_CTL_PAINT_WARN,
                  "%s tokens", kvt_text_count(a, answer->boundary_tokens));
    (void)fprintf(view->out, " (%s of the prompt): an engine resumes there\n",
                  kvt_text_share(b, answer->boundary_tokens, prompt->tokens_count));
    (void)fprintf(view->out, "known       %s tokens of it are in the tree, resident or not\n",
                  kvt_text_count(a, answer->path_tokens));
    if (answer->branch_tokens > answer->boundary_tokens)
        (void)fprintf(view->out,
                      "branch      full attention alone would go on to %s: storing the other "
                      "components there makes it a boundary\n",
                      kvt_text_count(a, answer->branch_tokens));
}

static uint32_t components_of(const struct kvt_ctl_prompt *prompt,
                              const struct kvt_ans_lookup *answer)
{
    return KVT_MIN(prompt->ns->components_count, answer->components_count);
}

void kvt_ctl_view_lookup(const struct kvt_ctl_view *view, const struct kvt_ctl_prompt *prompt,
                         const struct kvt_ans_lookup *answer)
{
    static const char *const names[] = {"component", "needs",     "L1 tokens",
                                        "L2 tokens", "L3 tokens", "alone it would reach"};
    struct kvt_table *table = kvt_table_new("lrrrrr");
    char name[KVT_CTL_TEXT_BYTES], a[KVT_TEXT_BYTES];

    view_head(view, prompt, answer);
    (void)fprintf(view->out, "promote     about %s\n\n",
                  kvt_text_ns(a, answer->estimate_us * KVT_NS_PER_US));
    for (size_t i = 0; i < KVT_COUNT_OF(names); i++)
        kvt_table_cell(table, "%s", names[i]);
    for (uint32_t i = 0; i < components_of(prompt, answer); i++) {
        kvt_table_cell(table, "%s", kvt_ctl_component_name(name, &prompt->ns->components[i]));
        kvt_table_cell(table, "%s blocks", kvt_text_count(a, answer->components[i].needed_blocks));
        for (uint32_t t = 0; t < KVT_API_TIERS; t++)
            kvt_table_cell(table, "%s", kvt_text_count(a, answer->components[i].tokens_at[t]));
        kvt_table_cell(table, "%s", kvt_text_count(a, answer->components[i].alone_tokens));
    }
    if (kvt_table_print(table, view->out, KVT_TABLE_PLAIN, 0) < 0)
        (void)fputs("(out of memory: this table is not complete)\n", view->out);
    (void)kvt_table_free(table);
}

static void view_rule(const struct kvt_ctl_view *view, const struct kvt_api_component *component)
{
    switch (component->kind) {
    case KVT_CTL_KIND_FULL:
        (void)fputs("  accepts   a boundary when every block before it is resident\n", view->out);
        break;
    case KVT_CTL_KIND_WINDOW:
        (void)fprintf(view->out,
                      "  accepts   a boundary when the blocks of the %u tokens before it are "
                      "resident\n",
                      component->window_tokens);
        break;
    case KVT_CTL_KIND_STATE:
        (void)fputs("  accepts   a boundary when a snapshot lies exactly there\n", view->out);
        break;
    default:
        (void)fputs("  accepts   (this kvtier-ctl does not know its kind)\n", view->out);
        break;
    }
}

void kvt_ctl_view_explain(const struct kvt_ctl_view *view, const struct kvt_ctl_prompt *prompt,
                          const struct kvt_ans_lookup *answer)
{
    uint64_t whole_tokens = prompt->tokens_count - prompt->tokens_count % prompt->ns->block_tokens;

    view_head(view, prompt, answer);
    if (answer->boundary_tokens == whole_tokens && whole_tokens > 0)
        (void)fputs("            every whole block of the prompt is cached\n", view->out);
    if (whole_tokens == 0)
        (void)fprintf(view->out,
                      "            a prompt shorter than one block (%u tokens) is never cached\n",
                      prompt->ns->block_tokens);
    for (uint32_t i = 0; i < components_of(prompt, answer); i++) {
        const struct kvt_api_component *component = &prompt->ns->components[i];
        enum kvt_why why = answer->components[i].why;
        char name[KVT_CTL_TEXT_BYTES], a[KVT_TEXT_BYTES], b[KVT_TEXT_BYTES];
        uint64_t block = answer->components[i].why_block_idx;

        (void)fputc('\n', view->out);
        kvt_ctl_paint(view, KVT_CTL_PAINT_HEAD, "%s", kvt_ctl_component_name(name, component));
        (void)fprintf(view->out, " (%s)\n", kvt_ctl_kind_text(component->kind));
        view_rule(view, component);
        (void)fprintf(view->out, "  reaches   %s tokens alone\n",
                      kvt_text_count(a, answer->components[i].alone_tokens));
        (void)fputs("  stopped   ", view->out);
        if (why == KVT_WHY_NONE) {
            kvt_ctl_paint(view, KVT_CTL_PAINT_GOOD, "no");
            (void)fputc('\n', view->out);
            continue;
        }
        kvt_ctl_paint(view, KVT_CTL_PAINT_WARN, "%s", why_sentence(why));
        (void)fprintf(view->out, ", at block %s (tokens from %s)\n", kvt_text_count(a, block),
                      kvt_text_count(b, block * prompt->ns->block_tokens));
        (void)fprintf(view->out, "  remedy    %s\n", kvt_ctl_remedy(why, component->kind));
    }
}
