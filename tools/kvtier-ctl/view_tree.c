/* The tree, one line a node, with lines that show who is whose child. Nodes come depth first,
 * parents before children; whether a node has a later sibling is found by one walk backwards. */
#include "tools/kvtier-ctl/view.h"

#include <string.h>

#include "daemon/base/alloc.h"
#include "tools/lib/table.h"

#define LEVELS_MAX 4096u /* deeper nodes are drawn at this level */

static uint32_t level_of(const struct kvt_api_dump_node *node)
{
    return KVT_MIN(node->depth_nodes, LEVELS_MAX - 1);
}

static bool is_same_text(struct kvt_text a, struct kvt_text b)
{
    return a.bytes == b.bytes && (a.bytes == 0 || memcmp(a.at, b.at, a.bytes) == 0);
}

static bool is_same_root(const struct kvt_api_dump_node *a, const struct kvt_api_dump_node *b)
{
    return a->ns_idx == b->ns_idx && is_same_text(a->salt, b->salt) &&
           is_same_text(a->lora, b->lora);
}

/* The namespace of @node, or NULL when Stats (asked a moment earlier) did not have it. */
static const struct kvt_api_ns_stats *ns_of(const struct kvt_ctl_tree *tree,
                                            const struct kvt_api_dump_node *node)
{
    if (tree->only != NULL)
        return tree->only;
    return node->ns_idx < tree->stats->namespaces_count ? &tree->stats->namespaces[node->ns_idx]
                                                        : NULL;
}

/* last[i]: node i has no later sibling. */
static void find_last(const struct kvt_ctl_tree *tree, bool *last, bool *open)
{
    for (uint32_t i = tree->nodes_count; i-- > 0;) {
        const struct kvt_api_dump_node *node = &tree->nodes[i];
        uint32_t level = level_of(node);
        bool is_root_end = i + 1 == tree->nodes_count || !is_same_root(node, &tree->nodes[i + 1]);

        if (is_root_end)
            memset(open, 0, LEVELS_MAX * sizeof(*open));
        last[i] = !open[level];
        open[level] = true;
        memset(open + level + 1, 0, (LEVELS_MAX - level - 1) * sizeof(*open));
    }
}

static void view_root(const struct kvt_ctl_view *view, const struct kvt_ctl_tree *tree,
                      const struct kvt_api_dump_node *node)
{
    const struct kvt_api_ns_stats *ns = ns_of(tree, node);
    char hex[17], model[KVT_CTL_TEXT_BYTES], text[KVT_CTL_TEXT_BYTES];

    if (ns != NULL)
        kvt_ctl_paint(view, KVT_CTL_PAINT_HEAD, "%s %s", kvt_text_hex(hex, ns->fingerprint, 6),
                      kvt_ctl_clean(model, ns->model));
    else
        kvt_ctl_paint(view, KVT_CTL_PAINT_HEAD, "namespace %u", node->ns_idx);
    if (node->salt.bytes > 0)
        (void)fprintf(view->out, " salt=%s", kvt_ctl_clean(text, node->salt));
    if (node->lora.bytes > 0)
        (void)fprintf(view->out, " lora=%s", kvt_ctl_clean(text, node->lora));
    (void)fputc('\n', view->out);
}

static void view_residency(const struct kvt_ctl_view *view, const struct kvt_ctl_tree *tree,
                           const struct kvt_api_dump_node *node)
{
    const struct kvt_api_ns_stats *ns = ns_of(tree, node);
    char name[KVT_CTL_TEXT_BYTES];

    for (uint32_t c = 0; c < node->components_count; c++) {
        bool is_somewhere = false;

        if (ns != NULL && c < ns->components_count)
            (void)kvt_ctl_component_name(name, &ns->components[c]);
        else
            (void)snprintf(name, sizeof(name), "#%u", c);
        (void)fprintf(view->out, "  %s", name);
        for (uint32_t t = 0; t < KVT_API_TIERS; t++) {
            if (node->blocks_at[c][t] == 0)
                continue;
            (void)fprintf(view->out, " L%u:%u", t + 1, node->blocks_at[c][t]);
            is_somewhere = true;
        }
        if (!is_somewhere)
            kvt_ctl_paint(view, KVT_CTL_PAINT_WARN, " none");
    }
}

static void view_node(const struct kvt_ctl_view *view, const struct kvt_ctl_tree *tree,
                      const struct kvt_api_dump_node *node)
{
    unsigned long long first = node->first_block_idx;

    if (node->blocks_count == 1)
        (void)fprintf(view->out, "block %llu", first);
    else
        (void)fprintf(view->out, "blocks %llu-%llu", first, first + node->blocks_count - 1);
    (void)fprintf(view->out, " [%u %u %u %u ..]", node->first_tokens[0], node->first_tokens[1],
                  node->first_tokens[2], node->first_tokens[3]);
    view_residency(view, tree, node);
    if (node->leases > 0)
        (void)fprintf(view->out, "  %u leases", node->leases);
}

/* @is_open[l]: at level l a line goes on downwards. */
static void view_lines(const struct kvt_ctl_view *view, const bool *is_open, uint32_t level,
                       bool is_last)
{
    for (uint32_t l = 0; l < level; l++)
        (void)fputs(is_open[l] ? "│  " : "   ", view->out);
    (void)fputs(is_last ? "└─ " : "├─ ", view->out);
}

static void view_nodes(const struct kvt_ctl_view *view, const struct kvt_ctl_tree *tree,
                       const bool *last, bool *is_open)
{
    for (uint32_t i = 0; i < tree->nodes_count; i++) {
        const struct kvt_api_dump_node *node = &tree->nodes[i];
        uint32_t level = level_of(node);

        if (i == 0 || !is_same_root(node, &tree->nodes[i - 1])) {
            memset(is_open, 0, LEVELS_MAX * sizeof(*is_open));
            view_root(view, tree, node);
        }
        if (level >= tree->depth_max)
            continue;
        view_lines(view, is_open, level, last[i]);
        is_open[level] = !last[i];
        view_node(view, tree, node);
        if (level + 1 == tree->depth_max && node->children_count > 0)
            (void)fprintf(view->out, "  +%u children below (--depth)", node->children_count);
        (void)fputc('\n', view->out);
    }
}

void kvt_ctl_view_tree(const struct kvt_ctl_view *view, const struct kvt_ctl_tree *tree)
{
    kvt_autofree bool *last = kvt_alloc_zeroed((size_t)tree->nodes_count + 1, sizeof(bool));
    kvt_autofree bool *is_open = kvt_alloc_zeroed(LEVELS_MAX, sizeof(bool));

    if (last == NULL || is_open == NULL) {
        (void)fputs("out of memory\n", view->out);
        return;
    }
    if (tree->nodes_count == 0)
        (void)fputs("nothing is stored\n", view->out);
    find_last(tree, last, is_open);
    view_nodes(view, tree, last, is_open);
    if (tree->is_cut)
        (void)fprintf(view->out, "... there are more nodes: --nodes shows more than %u\n",
                      tree->nodes_count);
}
