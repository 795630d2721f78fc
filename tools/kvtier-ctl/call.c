/* Asking the daemon: connections, ops with their memory, and what errors mean for the one who typed
 * the command. */
#include "tools/kvtier-ctl/ctl.h"

#include <errno.h>
#include <string.h>

#include "daemon/base/alloc.h"
#include "daemon/base/clock.h"
#include "proto/client/client.h"

void kvt_ctl_say_no_daemon(FILE *err, const char *socket_path, int error)
{
    switch (error) {
    case ENOENT:
    case ECONNREFUSED:
        (void)fprintf(err,
                      "kvtier-ctl: no daemon at %s: is kvtierd running? (systemctl status kvtierd; "
                      "or give --socket)\n",
                      socket_path);
        break;
    case EACCES:
    case EPERM:
        (void)fprintf(err,
                      "kvtier-ctl: not allowed to use %s: run it as root, or join the socket's "
                      "group (ls -l %s)\n",
                      socket_path, socket_path);
        break;
    default:
        (void)fprintf(err,
                      "kvtier-ctl: cannot connect to %s: %s (kvtier-ctl doctor looks into it)\n",
                      socket_path, strerror(error));
        break;
    }
}

int kvt_ctl_daemon_open(struct kvt_ctl_daemon *ret_daemon, const struct kvt_ctl_args *args,
                        bool is_admin, FILE *err)
{
    struct kvt_ctl_daemon daemon = {
        .args = args,
        .socket_path = is_admin ? args->admin_socket_path : args->socket_path,
        .err = err,
    };
    struct kvt_client_config config = {
        .socket_path = daemon.socket_path,
        .deadline_ns = args->timeout_ns,
    };
    int r = kvt_client_open(&daemon.client, &config);

    if (r < 0) {
        kvt_ctl_say_no_daemon(err, daemon.socket_path, -r);
        return KVT_CTL_NO_DAEMON;
    }
    *ret_daemon = daemon;
    return KVT_CTL_OK;
}

void kvt_ctl_daemon_close(struct kvt_ctl_daemon *daemon)
{
    daemon->client = kvt_client_close(daemon->client);
}

struct own_op {
    struct kvt_op op;
    struct kvt_arena arena;
};

int kvt_ctl_op_new(struct kvt_op **ret_op, enum kvt_op_kind kind)
{
    struct own_op *own = kvt_alloc_zeroed(1, sizeof(*own));

    if (own == NULL)
        return -ENOMEM;
    if (kvt_arena_init(&own->arena, KVT_OP_ARENA_BYTES_MAX, KVT_MIB) < 0) {
        kvt_free(own);
        return -ENOMEM;
    }
    kvt_ctl_op_reset(&own->op, kind);
    *ret_op = &own->op;
    return 0;
}

void kvt_ctl_op_reset(struct kvt_op *op, enum kvt_op_kind kind)
{
    struct own_op *own = KVT_CONTAINER_OF(op, struct own_op, op);

    memset(op, 0, sizeof(*op));
    kvt_arena_reset(&own->arena);
    op->arena = &own->arena;
    op->kind = kind;
}

struct kvt_op *kvt_ctl_op_free(struct kvt_op *op)
{
    if (op != NULL) {
        struct own_op *own = KVT_CONTAINER_OF(op, struct own_op, op);

        kvt_arena_deinit(&own->arena);
        kvt_free(own);
    }
    return NULL;
}

static const char *code_text(enum kvt_code code)
{
    switch (code) {
    case KVT_CODE_OK:
        return "OK";
    case KVT_CODE_CANCELLED:
        return "CANCELLED";
    case KVT_CODE_INVALID_ARGUMENT:
        return "INVALID_ARGUMENT";
    case KVT_CODE_DEADLINE_EXCEEDED:
        return "DEADLINE_EXCEEDED";
    case KVT_CODE_NOT_FOUND:
        return "NOT_FOUND";
    case KVT_CODE_PERMISSION_DENIED:
        return "PERMISSION_DENIED";
    case KVT_CODE_RESOURCE_EXHAUSTED:
        return "RESOURCE_EXHAUSTED";
    case KVT_CODE_FAILED_PRECONDITION:
        return "FAILED_PRECONDITION";
    case KVT_CODE_ABORTED:
        return "ABORTED";
    case KVT_CODE_UNIMPLEMENTED:
        return "UNIMPLEMENTED";
    case KVT_CODE_INTERNAL:
        return "INTERNAL";
    case KVT_CODE_UNAVAILABLE:
        return "UNAVAILABLE";
    }
    return "unknown code";
}

static const char *code_advice(enum kvt_code code)
{
    switch (code) {
    case KVT_CODE_DEADLINE_EXCEEDED:
        return "it is alive but did not answer in time: try --timeout, then look at its log "
               "(journalctl -u kvtierd)";
    case KVT_CODE_PERMISSION_DENIED:
        return "admin commands go to the admin socket: see --admin-socket";
    case KVT_CODE_UNIMPLEMENTED:
        return "this kvtier-ctl and the daemon are of different versions";
    case KVT_CODE_RESOURCE_EXHAUSTED:
        return "it is at a limit: try again";
    case KVT_CODE_UNAVAILABLE:
        return "it is stopping, or went away: systemctl status kvtierd";
    default:
        return NULL;
    }
}

int kvt_ctl_daemon_judge(const struct kvt_ctl_daemon *daemon, const struct kvt_op *op)
{
    const char *advice = code_advice(op->code);

    if (op->code == KVT_CODE_OK)
        return KVT_CTL_OK;
    (void)fprintf(daemon->err, "kvtier-ctl: %s: %s: %s\n", kvt_op_kind_text(op->kind),
                  code_text(op->code), op->message[0] != '\0' ? op->message : "no details given");
    if (advice != NULL)
        (void)fprintf(daemon->err, "  %s\n", advice);
    return op->code == KVT_CODE_UNAVAILABLE ? KVT_CTL_NO_DAEMON : KVT_CTL_DAEMON_ERROR;
}

int kvt_ctl_daemon_call(struct kvt_ctl_daemon *daemon, struct kvt_op *op)
{
    op->deadline_ns = kvt_time_add(kvt_clock_mono_ns(), daemon->args->timeout_ns);
    kvt_client_call(daemon->client, op);
    return kvt_ctl_daemon_judge(daemon, op);
}
