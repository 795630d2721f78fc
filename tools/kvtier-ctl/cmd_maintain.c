/* drain, scrub: upkeep of L3, over the admin socket. A drain is asked for again and again, each
 * time for as long as an answer may sensibly take: that shows progress, and an interrupted
 * kvtier-ctl leaves a drain that goes on by itself. */
#include <string.h>
#include <unistd.h>

#include "tools/kvtier-ctl/run.h"

#include "daemon/base/clock.h"
#include "proto/client/client.h"
#include "tools/lib/table.h"

#define STEP_NS (2 * KVT_NS_PER_S)

/* One request; what takes longer than its step, but not longer than --timeout, is asked again. */
static int ask_drain(struct kvt_ctl_daemon *daemon, struct kvt_op *op, uint64_t until_ns)
{
    uint64_t begin_ns = kvt_clock_mono_ns();

    for (;;) {
        uint64_t now_ns = kvt_clock_mono_ns();

        kvt_ctl_op_reset(op, KVT_OP_MAINTAIN);
        op->req.maintain.action = KVT_MAINTAIN_DRAIN;
        op->deadline_ns = KVT_MIN(kvt_time_add(now_ns, STEP_NS),
                                  KVT_MAX(until_ns, kvt_time_add(now_ns, KVT_NS_PER_S / 10)));
        kvt_client_call(daemon->client, op);
        if (op->code != KVT_CODE_DEADLINE_EXCEEDED ||
            kvt_clock_mono_ns() - begin_ns >= daemon->args->timeout_ns)
            return kvt_ctl_daemon_judge(daemon, op);
    }
}

static void show_progress(const struct kvt_ans_maintain *answer, bool is_last)
{
    char a[KVT_TEXT_BYTES], b[KVT_TEXT_BYTES], c[KVT_TEXT_BYTES];

    if (isatty(STDERR_FILENO) != 1)
        return;
    if (is_last)
        (void)fputs("\r\033[K", stderr);
    else
        (void)fprintf(stderr, "\r\033[K%s copies written (%s), %s left",
                      kvt_text_count(a, answer->drain.copies_written),
                      kvt_text_bytes(b, answer->drain.bytes_written),
                      kvt_text_count(c, answer->drain.copies_left));
}

static int drain(struct kvt_ctl_daemon *daemon, struct kvt_op *op)
{
    uint64_t until_ns = kvt_time_add(kvt_clock_mono_ns(), daemon->args->wait_ns);
    const struct kvt_ans_maintain *answer = &op->ans.maintain;
    struct kvt_ctl_view view = kvt_ctl_view_stdout(daemon->args);
    int r;

    do {
        r = ask_drain(daemon, op, until_ns);
        show_progress(answer, r != KVT_CTL_OK || !answer->drain.is_running);
    } while (r == KVT_CTL_OK && answer->drain.is_running && kvt_clock_mono_ns() < until_ns);
    if (r != KVT_CTL_OK)
        return r;
    show_progress(answer, true);
    if (daemon->args->is_json)
        kvt_ctl_json_maintain(stdout, answer);
    else
        kvt_ctl_view_drain(&view, answer);
    return answer->drain.is_running || answer->drain.copies_failed > 0 ? KVT_CTL_NEGATIVE
                                                                       : KVT_CTL_OK;
}

static int scrub(struct kvt_ctl_daemon *daemon, struct kvt_op *op)
{
    const struct kvt_ctl_args *args = daemon->args;
    struct kvt_ctl_view view = kvt_ctl_view_stdout(args);
    struct kvt_req_maintain *req = &op->req.maintain;
    int r;

    req->action = KVT_MAINTAIN_STATUS;
    if (strcmp(args->operands[0], "start") == 0)
        req->action = KVT_MAINTAIN_SCRUB_START;
    else if (strcmp(args->operands[0], "stop") == 0)
        req->action = KVT_MAINTAIN_SCRUB_STOP;
    req->rate_bytes_per_s = args->rate_bytes_per_s;
    r = kvt_ctl_daemon_call(daemon, op);
    if (r != KVT_CTL_OK)
        return r;
    if (args->is_json)
        kvt_ctl_json_maintain(stdout, &op->ans.maintain);
    else
        kvt_ctl_view_scrub(&view, &op->ans.maintain);
    return op->ans.maintain.scrub.bad_copies == 0 ? KVT_CTL_OK : KVT_CTL_NEGATIVE;
}

int kvt_ctl_run_maintain(const struct kvt_ctl_args *args)
{
    struct kvt_ctl_daemon daemon = {0};
    struct kvt_op *op = NULL;
    int r = kvt_ctl_daemon_open(&daemon, args, true, stderr);

    if (r == KVT_CTL_OK && kvt_ctl_op_new(&op, KVT_OP_MAINTAIN) < 0)
        r = kvt_ctl_out_of_memory();
    if (r == KVT_CTL_OK)
        r = args->command == KVT_CTL_DRAIN ? drain(&daemon, op) : scrub(&daemon, op);
    (void)kvt_ctl_op_free(op);
    kvt_ctl_daemon_close(&daemon);
    return r;
}
