/* stats, devices, namespaces, health: what the main socket tells everyone who may connect. */
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "tools/kvtier-ctl/run.h"

#include "daemon/base/clock.h"
#include "proto/client/client.h"

struct kvt_ctl_view kvt_ctl_view_stdout(const struct kvt_ctl_args *args)
{
    return (struct kvt_ctl_view){.out = stdout,
                                 .is_color = kvt_ctl_wants_color(
                                     args->color, isatty(STDOUT_FILENO) == 1, getenv("NO_COLOR"))};
}

int kvt_ctl_out_of_memory(void)
{
    (void)fputs("kvtier-ctl: out of memory\n", stderr);
    return KVT_CTL_DAEMON_ERROR;
}

static void sleep_until(uint64_t deadline_ns)
{
    struct timespec until = {.tv_sec = (time_t)(deadline_ns / KVT_NS_PER_S),
                             .tv_nsec = (long)(deadline_ns % KVT_NS_PER_S)};

    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL) == EINTR)
        continue;
}

static void show_round(const struct kvt_ctl_args *args, const struct kvt_op *before,
                       const struct kvt_op *now, uint64_t elapsed_ns)
{
    struct kvt_ctl_view view = kvt_ctl_view_stdout(args);

    if (args->is_json) {
        kvt_ctl_json_stats(stdout, &now->ans.stats, true);
    } else {
        if (isatty(STDOUT_FILENO) == 1)
            (void)fputs("\033[H\033[2J", stdout);
        if (before != NULL)
            kvt_ctl_view_rates(&view, &before->ans.stats, &now->ans.stats, elapsed_ns);
        else
            kvt_ctl_view_stats(&view, &now->ans.stats);
        if (isatty(STDOUT_FILENO) != 1)
            (void)fputc('\n', stdout);
    }
    (void)fflush(stdout);
}

/* Two ops in turn: the answer before is still needed. */
static int watch(struct kvt_ctl_daemon *daemon, struct kvt_op *ops[2])
{
    const struct kvt_ctl_args *args = daemon->args;
    uint64_t started_ns = kvt_clock_mono_ns(), asked_ns = 0, before_ns;

    for (uint64_t round = 0; round < args->watch_rounds; round++) {
        struct kvt_op *now = ops[round % 2];
        int r;

        if (round > 0)
            sleep_until(kvt_time_add(started_ns, round * args->watch_ns));
        kvt_ctl_op_reset(now, KVT_OP_STATS);
        before_ns = asked_ns;
        asked_ns = kvt_clock_mono_ns();
        r = kvt_ctl_daemon_call(daemon, now);
        if (r != KVT_CTL_OK)
            return r;
        show_round(args, round > 0 ? ops[(round + 1) % 2] : NULL, now, asked_ns - before_ns);
        if (ferror(stdout))
            return KVT_CTL_OK; /* whoever read it has gone */
    }
    return KVT_CTL_OK;
}

int kvt_ctl_run_stats(const struct kvt_ctl_args *args)
{
    struct kvt_ctl_view view = kvt_ctl_view_stdout(args);
    struct kvt_ctl_daemon daemon = {0};
    struct kvt_op *ops[2] = {NULL, NULL};
    int r = kvt_ctl_daemon_open(&daemon, args, false, stderr);

    if (r == KVT_CTL_OK &&
        (kvt_ctl_op_new(&ops[0], KVT_OP_STATS) < 0 || kvt_ctl_op_new(&ops[1], KVT_OP_STATS) < 0))
        r = kvt_ctl_out_of_memory();
    if (r == KVT_CTL_OK && args->is_watch) {
        r = watch(&daemon, ops);
    } else if (r == KVT_CTL_OK) {
        r = kvt_ctl_daemon_call(&daemon, ops[0]);
        if (r == KVT_CTL_OK && args->is_json)
            kvt_ctl_json_stats(stdout, &ops[0]->ans.stats, false);
        else if (r == KVT_CTL_OK)
            kvt_ctl_view_stats(&view, &ops[0]->ans.stats);
    }
    (void)kvt_ctl_op_free(ops[0]);
    (void)kvt_ctl_op_free(ops[1]);
    kvt_ctl_daemon_close(&daemon);
    return r;
}

/* One answer, on one of two pages. */
static int show_once(const struct kvt_ctl_args *args,
                     void (*json)(FILE *out, const struct kvt_ans_stats *stats),
                     void (*page)(const struct kvt_ctl_view *view,
                                  const struct kvt_ans_stats *stats))
{
    struct kvt_ctl_view view = kvt_ctl_view_stdout(args);
    struct kvt_ctl_daemon daemon = {0};
    struct kvt_op *op = NULL;
    int r = kvt_ctl_daemon_open(&daemon, args, false, stderr);

    if (r == KVT_CTL_OK && kvt_ctl_op_new(&op, KVT_OP_STATS) < 0)
        r = kvt_ctl_out_of_memory();
    if (r == KVT_CTL_OK)
        r = kvt_ctl_daemon_call(&daemon, op);
    if (r == KVT_CTL_OK && args->is_json)
        json(stdout, &op->ans.stats);
    else if (r == KVT_CTL_OK)
        page(&view, &op->ans.stats);
    (void)kvt_ctl_op_free(op);
    kvt_ctl_daemon_close(&daemon);
    return r;
}

int kvt_ctl_run_devices(const struct kvt_ctl_args *args)
{
    return show_once(args, kvt_ctl_json_devices, kvt_ctl_view_all_devices);
}

int kvt_ctl_run_namespaces(const struct kvt_ctl_args *args)
{
    return show_once(args, kvt_ctl_json_namespaces, kvt_ctl_view_namespaces);
}

/* The standard health service says whether it serves; Stats says which tier is out. */
static int ask_health(struct kvt_ctl_daemon *daemon, struct kvt_op *op)
{
    struct kvt_ctl_view view = kvt_ctl_view_stdout(daemon->args);
    struct kvt_ctl_health health = {0};
    int r;

    op->deadline_ns = kvt_time_add(kvt_clock_mono_ns(), daemon->args->timeout_ns);
    kvt_client_health(daemon->client, op, "");
    r = kvt_ctl_daemon_judge(daemon, op);
    if (r != KVT_CTL_OK)
        return r;
    health.is_serving = op->ans.health.is_serving;
    kvt_ctl_op_reset(op, KVT_OP_STATS);
    r = kvt_ctl_daemon_call(daemon, op);
    if (r != KVT_CTL_OK)
        return r;
    health.stats = &op->ans.stats;
    if (daemon->args->is_json)
        kvt_ctl_json_health(stdout, &health);
    else
        kvt_ctl_view_health(&view, &health);
    return health.is_serving && !(daemon->args->is_strict && kvt_ctl_is_degraded(health.stats))
               ? KVT_CTL_OK
               : KVT_CTL_NEGATIVE;
}

int kvt_ctl_run_health(const struct kvt_ctl_args *args)
{
    struct kvt_ctl_daemon daemon = {0};
    struct kvt_op *op = NULL;
    int r = kvt_ctl_daemon_open(&daemon, args, false, stderr);

    if (r == KVT_CTL_OK && kvt_ctl_op_new(&op, KVT_OP_HEALTH) < 0)
        r = kvt_ctl_out_of_memory();
    if (r == KVT_CTL_OK)
        r = ask_health(&daemon, op);
    (void)kvt_ctl_op_free(op);
    kvt_ctl_daemon_close(&daemon);
    return r;
}
