/* lookup, explain: one prompt's Lookup through a session of our own. The session has no memory
 * regions and asks for no lease, so it holds nothing; its engine id is random, so it shares nothing
 * with a real engine. */
#include <string.h>
#include <sys/random.h>

#include "tools/kvtier-ctl/run.h"

#include "daemon/base/alloc.h"
#include "daemon/base/clock.h"
#include "proto/client/client.h"

#define API_VERSION 1u

struct kvt_text kvt_ctl_text(const char *text)
{
    return (struct kvt_text){text != NULL ? text : "", text != NULL ? (uint32_t)strlen(text) : 0};
}

int kvt_ctl_read_tokens(const struct kvt_ctl_args *args, struct kvt_ctl_tokens *ret_tokens,
                        FILE *err)
{
    char why[160] = "";
    int r = 0;

    *ret_tokens = (struct kvt_ctl_tokens){NULL, 0};
    if (args->tokens != NULL)
        r = kvt_ctl_tokens_parse(ret_tokens, args->tokens, strlen(args->tokens), why, sizeof(why));
    else if (args->tokens_file != NULL)
        r = kvt_ctl_tokens_load(ret_tokens, args->tokens_file, why, sizeof(why));
    if (r == 0)
        return KVT_CTL_OK;
    (void)fprintf(err, "kvtier-ctl: %s: %s\n",
                  args->tokens_file != NULL ? args->tokens_file : "--tokens",
                  why[0] != '\0' ? why : strerror(-r));
    return KVT_CTL_USAGE;
}

static bool has_prefix(const uint8_t *fingerprint, const char *prefix)
{
    for (size_t i = 0; prefix[i] != '\0'; i++) {
        uint8_t nibble = i % 2 == 0 ? fingerprint[i / 2] >> 4 : fingerprint[i / 2] & 15;
        char lower = (char)(prefix[i] >= 'A' && prefix[i] <= 'F' ? prefix[i] + 32 : prefix[i]);

        if (lower != "0123456789abcdef"[nibble])
            return false;
    }
    return true;
}

int kvt_ctl_pick_ns(const struct kvt_ans_stats *stats, const char *prefix, FILE *err,
                    const struct kvt_api_ns_stats **ret_ns)
{
    const struct kvt_api_ns_stats *found = NULL;
    uint32_t count = 0;

    for (uint32_t i = 0; i < stats->namespaces_count; i++) {
        if (prefix != NULL && !has_prefix(stats->namespaces[i].fingerprint, prefix))
            continue;
        found = &stats->namespaces[i];
        count++;
    }
    if (count == 1) {
        *ret_ns = found;
        return KVT_CTL_OK;
    }
    if (stats->namespaces_count == 0) {
        (void)fputs("kvtier-ctl: no namespace: no engine has declared a model yet\n", err);
        return KVT_CTL_NEGATIVE;
    }
    if (count == 0)
        (void)fprintf(err, "kvtier-ctl: no namespace begins with %s; there are:\n", prefix);
    else
        (void)fputs("kvtier-ctl: which namespace? give --namespace with the beginning of one:\n",
                    err);
    for (uint32_t i = 0; i < stats->namespaces_count; i++) {
        char text[KVT_CTL_TEXT_BYTES];

        (void)fputs("  ", err);
        for (uint32_t b = 0; b < 8; b++)
            (void)fprintf(err, "%02x", stats->namespaces[i].fingerprint[b]);
        (void)fprintf(err, "  %s\n", kvt_ctl_clean(text, stats->namespaces[i].model));
    }
    return count == 0 ? KVT_CTL_NEGATIVE : KVT_CTL_USAGE;
}

int kvt_ctl_find_ns(struct kvt_ctl_daemon *daemon, struct kvt_op *op,
                    const struct kvt_api_ns_stats **ret_ns)
{
    int r;

    kvt_ctl_op_reset(op, KVT_OP_STATS);
    r = kvt_ctl_daemon_call(daemon, op);
    if (r != KVT_CTL_OK)
        return r;
    return kvt_ctl_pick_ns(&op->ans.stats, daemon->args->ns_prefix, daemon->err, ret_ns);
}

/* Opens @ns by its fingerprint and a session in it; @op is used and reset. */
static int attach(struct kvt_ctl_daemon *daemon, const struct kvt_api_ns_stats *ns,
                  struct kvt_op *op, struct kvt_session **ret_session,
                  struct kvt_handle *ret_handle)
{
    struct kvt_handle ns_handle;
    int r;

    kvt_ctl_op_reset(op, KVT_OP_OPEN_NAMESPACE);
    op->req.open_namespace.is_by_fingerprint = true;
    memcpy(op->req.open_namespace.fingerprint, ns->fingerprint, KVT_FINGERPRINT_BYTES);
    r = kvt_ctl_daemon_call(daemon, op);
    if (r != KVT_CTL_OK)
        return r;
    ns_handle = op->ans.open_namespace.ns;
    kvt_ctl_op_reset(op, KVT_OP_ATTACH);
    op->req.attach.ns = ns_handle;
    op->req.attach.is_scheduler = true;
    op->req.attach.rank = KVT_RANK_NONE;
    op->req.attach.api_version = API_VERSION;
    op->req.attach.name = kvt_ctl_text("kvtier-ctl");
    if (getrandom(op->req.attach.engine_id, KVT_ENGINE_ID_BYTES, 0) != KVT_ENGINE_ID_BYTES) {
        (void)fputs("kvtier-ctl: getrandom failed\n", daemon->err);
        return KVT_CTL_DAEMON_ERROR;
    }
    op->deadline_ns = kvt_time_add(kvt_clock_mono_ns(), daemon->args->timeout_ns);
    *ret_session = kvt_client_attach(daemon->client, op);
    *ret_handle = op->ans.attach.session;
    return kvt_ctl_daemon_judge(daemon, op);
}

static int show(const struct kvt_ctl_args *args, const struct kvt_ctl_prompt *prompt,
                const struct kvt_ans_lookup *answer)
{
    struct kvt_ctl_view view = kvt_ctl_view_stdout(args);
    bool is_explain = args->command == KVT_CTL_EXPLAIN;

    if (args->is_json)
        kvt_ctl_json_lookup(stdout, prompt, answer, is_explain);
    else if (is_explain)
        kvt_ctl_view_explain(&view, prompt, answer);
    else
        kvt_ctl_view_lookup(&view, prompt, answer);
    return is_explain || answer->boundary_tokens > 0 ? KVT_CTL_OK : KVT_CTL_NEGATIVE;
}

static int ask(struct kvt_ctl_daemon *daemon, const struct kvt_ctl_tokens *tokens,
               struct kvt_op *stats_op, struct kvt_op *op)
{
    const struct kvt_ctl_args *args = daemon->args;
    struct kvt_ctl_prompt prompt = {
        .tokens_count = tokens->count, .limit_tokens = args->limit_tokens, .tiers = args->tiers};
    struct kvt_session *session = NULL;
    struct kvt_handle handle;
    int r = kvt_ctl_find_ns(daemon, stats_op, &prompt.ns);

    if (r == KVT_CTL_OK)
        r = attach(daemon, prompt.ns, op, &session, &handle);
    if (r == KVT_CTL_OK) {
        kvt_ctl_op_reset(op, KVT_OP_LOOKUP);
        op->req.lookup.session = handle;
        op->req.lookup.prefix.salt = kvt_ctl_text(args->salt);
        op->req.lookup.prefix.lora = kvt_ctl_text(args->lora);
        op->req.lookup.prefix.tokens = tokens->at;
        op->req.lookup.prefix.tokens_count = tokens->count;
        op->req.lookup.limit_tokens = args->limit_tokens;
        op->req.lookup.tiers = args->tiers;
        op->req.lookup.wants_why = args->command == KVT_CTL_EXPLAIN;
        r = kvt_ctl_daemon_call(daemon, op);
    }
    if (r == KVT_CTL_OK)
        r = show(args, &prompt, &op->ans.lookup);
    (void)kvt_session_detach(session);
    return r;
}

int kvt_ctl_run_prefix(const struct kvt_ctl_args *args)
{
    struct kvt_ctl_daemon daemon = {0};
    struct kvt_ctl_tokens tokens;
    struct kvt_op *stats_op = NULL, *op = NULL;
    int r = kvt_ctl_read_tokens(args, &tokens, stderr);

    if (r == KVT_CTL_OK)
        r = kvt_ctl_daemon_open(&daemon, args, false, stderr);
    if (r == KVT_CTL_OK &&
        (kvt_ctl_op_new(&stats_op, KVT_OP_STATS) < 0 || kvt_ctl_op_new(&op, KVT_OP_LOOKUP) < 0))
        r = kvt_ctl_out_of_memory();
    if (r == KVT_CTL_OK)
        r = ask(&daemon, &tokens, stats_op, op);
    (void)kvt_ctl_op_free(stats_op);
    (void)kvt_ctl_op_free(op);
    kvt_ctl_daemon_close(&daemon);
    kvt_free(tokens.at);
    return r;
}
