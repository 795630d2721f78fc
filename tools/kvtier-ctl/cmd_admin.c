/* tree, evict, reset: verbs of the admin socket. What forgets a whole namespace asks first, and on
 * no terminal it wants --yes: a script must have meant it. */
#include <string.h>
#include <unistd.h>

#include "tools/kvtier-ctl/run.h"

#include "daemon/base/alloc.h"
#include "proto/client/client.h"
#include "tools/lib/json.h"
#include "tools/lib/table.h"

#define DUMP_NODES_MAX 4096u /* of one answer */

static bool is_confirmed(const struct kvt_ctl_args *args, const char *what,
                         const struct kvt_api_ns_stats *ns, int *ret_status)
{
    char answer[16] = "", hex[17], model[KVT_CTL_TEXT_BYTES], blocks[KVT_TEXT_BYTES];

    *ret_status = KVT_CTL_OK;
    if (args->is_yes)
        return true;
    (void)kvt_text_hex(hex, ns->fingerprint, 8);
    if (isatty(STDIN_FILENO) != 1) {
        (void)fprintf(stderr, "kvtier-ctl: %s of namespace %s needs --yes\n", what, hex);
        *ret_status = KVT_CTL_USAGE;
        return false;
    }
    (void)fprintf(stderr, "%s of namespace %s (%s), %s blocks. Sure? [y/N] ", what, hex,
                  kvt_ctl_clean(model, ns->model), kvt_text_count(blocks, ns->blocks));
    if (fgets(answer, sizeof(answer), stdin) != NULL && (answer[0] == 'y' || answer[0] == 'Y'))
        return true;
    (void)fputs("nothing was done\n", stderr);
    *ret_status = KVT_CTL_NEGATIVE;
    return false;
}

static void show_number(const struct kvt_ctl_args *args, const char *name, uint64_t value,
                        const char *sentence)
{
    char a[KVT_TEXT_BYTES];
    struct kvt_json json;

    if (args->is_json) {
        kvt_json_begin(&json, stdout, false);
        kvt_json_u64(&json, name, value);
        kvt_json_finish(&json);
    } else {
        (void)printf("%s %s\n", kvt_text_count(a, value), sentence);
    }
}

static int evict(struct kvt_ctl_daemon *daemon, const struct kvt_ctl_tokens *tokens,
                 struct kvt_op *stats_op, struct kvt_op *op)
{
    const struct kvt_ctl_args *args = daemon->args;
    const struct kvt_api_ns_stats *ns;
    int r = kvt_ctl_find_ns(daemon, stats_op, &ns);

    if (r != KVT_CTL_OK || (args->is_all && !is_confirmed(args, "evict all", ns, &r)))
        return r;
    if (!args->is_all && tokens->count > 0 && tokens->count < ns->block_tokens) {
        (void)fprintf(stderr, "kvtier-ctl: %llu tokens are less than one block of %u\n",
                      (unsigned long long)tokens->count, ns->block_tokens);
        return KVT_CTL_USAGE;
    }
    memcpy(op->req.evict.fingerprint, ns->fingerprint, KVT_FINGERPRINT_BYTES);
    op->req.evict.prefix.salt = kvt_ctl_text(args->salt);
    op->req.evict.prefix.lora = kvt_ctl_text(args->lora);
    op->req.evict.prefix.tokens = tokens->at;
    op->req.evict.prefix.tokens_count = tokens->count;
    op->req.evict.is_whole_namespace = args->is_all;
    r = kvt_ctl_daemon_call(daemon, op);
    if (r == KVT_CTL_OK)
        show_number(args, "evicted_blocks", op->ans.evict.evicted_blocks,
                    "blocks evicted; those in use go when they are free");
    return r;
}

int kvt_ctl_run_evict(const struct kvt_ctl_args *args)
{
    struct kvt_ctl_daemon daemon = {0};
    struct kvt_ctl_tokens tokens;
    struct kvt_op *stats_op = NULL, *op = NULL;
    int r = kvt_ctl_read_tokens(args, &tokens, stderr);

    if (r == KVT_CTL_OK)
        r = kvt_ctl_daemon_open(&daemon, args, true, stderr);
    if (r == KVT_CTL_OK &&
        (kvt_ctl_op_new(&stats_op, KVT_OP_STATS) < 0 || kvt_ctl_op_new(&op, KVT_OP_EVICT) < 0))
        r = kvt_ctl_out_of_memory();
    if (r == KVT_CTL_OK)
        r = evict(&daemon, &tokens, stats_op, op);
    (void)kvt_ctl_op_free(stats_op);
    (void)kvt_ctl_op_free(op);
    kvt_ctl_daemon_close(&daemon);
    kvt_free(tokens.at);
    return r;
}

static int reset(struct kvt_ctl_daemon *daemon, struct kvt_op *stats_op, struct kvt_op *op)
{
    const struct kvt_api_ns_stats *ns;
    int r = kvt_ctl_find_ns(daemon, stats_op, &ns);

    if (r != KVT_CTL_OK || !is_confirmed(daemon->args, "reset", ns, &r))
        return r;
    memcpy(op->req.reset.fingerprint, ns->fingerprint, KVT_FINGERPRINT_BYTES);
    r = kvt_ctl_daemon_call(daemon, op);
    if (r == KVT_CTL_OK)
        show_number(daemon->args, "epoch", op->ans.reset.epoch,
                    "is the new epoch: nothing stored before is served again");
    return r;
}

int kvt_ctl_run_reset(const struct kvt_ctl_args *args)
{
    struct kvt_ctl_daemon daemon = {0};
    struct kvt_op *stats_op = NULL, *op = NULL;
    int r = kvt_ctl_daemon_open(&daemon, args, true, stderr);

    if (r == KVT_CTL_OK &&
        (kvt_ctl_op_new(&stats_op, KVT_OP_STATS) < 0 || kvt_ctl_op_new(&op, KVT_OP_RESET) < 0))
        r = kvt_ctl_out_of_memory();
    if (r == KVT_CTL_OK)
        r = reset(&daemon, stats_op, op);
    (void)kvt_ctl_op_free(stats_op);
    (void)kvt_ctl_op_free(op);
    kvt_ctl_daemon_close(&daemon);
    return r;
}

/* Salt and LoRA lie in the answer's arena, which the next answer takes: each page is kept. */
static int fetch_nodes(struct kvt_ctl_daemon *daemon, struct kvt_op *ops[], uint32_t ops_max,
                       const struct kvt_api_ns_stats *only, struct kvt_ctl_tree *tree,
                       struct kvt_api_dump_node *nodes)
{
    const struct kvt_ctl_args *args = daemon->args;
    uint64_t resume = 0;

    for (uint32_t i = 0; i < ops_max && tree->nodes_count < args->nodes_max; i++) {
        const struct kvt_ans_dump *answer;
        uint32_t want = args->nodes_max - tree->nodes_count;
        int r;

        if (kvt_ctl_op_new(&ops[i], KVT_OP_DUMP) < 0)
            return kvt_ctl_out_of_memory();
        if (only != NULL)
            memcpy(ops[i]->req.dump.fingerprint, only->fingerprint, KVT_FINGERPRINT_BYTES);
        ops[i]->req.dump.depth_max_blocks =
            args->depth_blocks_max == UINT64_MAX ? 0 : args->depth_blocks_max;
        ops[i]->req.dump.resume = resume;
        ops[i]->req.dump.nodes_max = KVT_MIN(want, DUMP_NODES_MAX);
        r = kvt_ctl_daemon_call(daemon, ops[i]);
        if (r != KVT_CTL_OK)
            return r;
        answer = &ops[i]->ans.dump;
        want = KVT_MIN(want, answer->nodes_count);
        if (want > 0)
            memcpy(nodes + tree->nodes_count, answer->nodes, want * sizeof(*nodes));
        tree->nodes_count += want;
        resume = answer->resume;
        if (resume == 0)
            return KVT_CTL_OK;
    }
    tree->is_cut = true;
    return KVT_CTL_OK;
}

static int tree_of(struct kvt_ctl_daemon *daemon, struct kvt_op *stats_op, struct kvt_op *ops[],
                   uint32_t ops_max)
{
    const struct kvt_ctl_args *args = daemon->args;
    struct kvt_ctl_view view = kvt_ctl_view_stdout(args);
    kvt_autofree struct kvt_api_dump_node *nodes =
        kvt_alloc_zeroed(args->nodes_max, sizeof(*nodes));
    struct kvt_ctl_tree tree = {.nodes = nodes, .depth_max = args->depth_max};
    int r;

    if (nodes == NULL)
        return kvt_ctl_out_of_memory();
    if (args->ns_prefix != NULL)
        r = kvt_ctl_find_ns(daemon, stats_op, &tree.only);
    else
        r = kvt_ctl_daemon_call(daemon, stats_op);
    if (r != KVT_CTL_OK)
        return r;
    tree.stats = &stats_op->ans.stats;
    r = fetch_nodes(daemon, ops, ops_max, tree.only, &tree, nodes);
    if (r == KVT_CTL_OK && args->is_json)
        kvt_ctl_json_tree(stdout, &tree);
    else if (r == KVT_CTL_OK)
        kvt_ctl_view_tree(&view, &tree);
    return r;
}

int kvt_ctl_run_tree(const struct kvt_ctl_args *args)
{
    /* Answers may be smaller than asked for; then more of them. */
    uint32_t ops_max = args->nodes_max / 64 + 16;
    kvt_autofree struct kvt_op **ops = kvt_alloc_zeroed(ops_max, sizeof(*ops));
    struct kvt_ctl_daemon daemon = {0};
    struct kvt_op *stats_op = NULL;
    int r = kvt_ctl_daemon_open(&daemon, args, true, stderr);

    if (r == KVT_CTL_OK && (ops == NULL || kvt_ctl_op_new(&stats_op, KVT_OP_STATS) < 0))
        r = kvt_ctl_out_of_memory();
    if (r == KVT_CTL_OK)
        r = tree_of(&daemon, stats_op, ops, ops_max);
    for (uint32_t i = 0; ops != NULL && i < ops_max; i++)
        (void)kvt_ctl_op_free(ops[i]);
    (void)kvt_ctl_op_free(stats_op);
    kvt_ctl_daemon_close(&daemon);
    return r;
}
