/* doctor: gathers, checks, prints. Without a daemon it still looks at the machine; with one it also
 * asks it, and looks at the limits of its process. */
#include "tools/kvtier-ctl/run.h"

#include "proto/client/client.h"

/* Quiet: the socket's finding has said already what is wrong. */
static bool ask_stats(const struct kvt_ctl_args *args, struct kvt_op *op)
{
    struct kvt_client_config config = {.socket_path = args->socket_path,
                                       .deadline_ns = args->timeout_ns};
    struct kvt_client *client = NULL;

    if (kvt_client_open(&client, &config) < 0)
        return false;
    kvt_client_call(client, op);
    (void)kvt_client_close(client);
    return op->code == KVT_CODE_OK;
}

static void check_all(struct kvt_ctl_report *report, const struct kvt_ctl_args *args,
                      struct kvt_ctl_pools *pools, struct kvt_op *op)
{
    struct kvt_ctl_facts facts;
    uint64_t pid, admin_pid;
    bool has_stats = false;

    kvt_ctl_check_socket(report, "socket", args->socket_path, &pid);
    if (pid != 0) {
        kvt_ctl_check_socket(report, "admin socket", args->admin_socket_path, &admin_pid);
        has_stats = ask_stats(args, op);
        if (!has_stats) {
            kvt_ctl_found(report, KVT_CTL_LEVEL_BAD, "daemon", "it does not answer: %s",
                          op->message);
            kvt_ctl_found_remedy(report, "its log says more: journalctl -u kvtierd");
        }
    }
    if (has_stats && pools->source == NULL)
        kvt_ctl_pools_from_stats(pools, &op->ans.stats);
    kvt_ctl_facts_gather(&facts, "", pid);
    kvt_ctl_check_hugepages(report, &facts, pools);
    kvt_ctl_check_memlock(report, &facts, pools);
    kvt_ctl_check_io_uring(report, &facts);
    kvt_ctl_check_memory(report, &facts, pools);
    kvt_ctl_check_nofile(report, &facts);
    kvt_ctl_check_gpu_machine(report, &facts, pools);
    kvt_ctl_check_l3(report, pools);
    if (has_stats) {
        kvt_ctl_check_stats(report, &op->ans.stats);
        kvt_ctl_check_gpus(report, &op->ans.stats);
        kvt_ctl_check_devices(report, &op->ans.stats);
    }
}

int kvt_ctl_run_doctor(const struct kvt_ctl_args *args)
{
    struct kvt_ctl_view view = kvt_ctl_view_stdout(args);
    struct kvt_ctl_report report = {0};
    struct kvt_ctl_pools pools = {0};
    struct kvt_op *op = NULL;

    if (args->config_path != NULL) {
        int r = kvt_ctl_pools_load(&pools, args->config_path, stderr);

        if (r != KVT_CTL_OK)
            return r;
    }
    if (kvt_ctl_op_new(&op, KVT_OP_STATS) < 0)
        return kvt_ctl_out_of_memory();
    check_all(&report, args, &pools, op);
    if (args->is_json)
        kvt_ctl_json_doctor(stdout, &report);
    else
        kvt_ctl_view_doctor(&view, &report);
    (void)kvt_ctl_op_free(op);
    return kvt_ctl_report_worst(&report) == KVT_CTL_LEVEL_BAD ? KVT_CTL_NEGATIVE : KVT_CTL_OK;
}
