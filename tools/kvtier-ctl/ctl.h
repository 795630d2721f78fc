/* kvtier-ctl: the operator's window into a running daemon.
 *
 * One command a run: parse (args.c), ask the daemon in the structs of daemon/base/api.h (call.c),
 * print (view*.c). Parsing and printing are pure functions over structs and a FILE, so that tests
 * need no daemon. Nothing here keeps state between runs.
 *
 * The exit status is part of the interface: scripts and probes read it. Everything that fails says
 * on stderr what to do next. One thread. */
#pragma once

#include <stdio.h>

#include "daemon/base/api.h"

enum kvt_ctl_exit {
    KVT_CTL_OK = 0,
    KVT_CTL_NEGATIVE = 1,     /* an answer, but a bad one: unhealthy, nothing found, "bad" */
    KVT_CTL_USAGE = 2,        /* the command line is wrong */
    KVT_CTL_NO_DAEMON = 3,    /* nobody listens, or it went away */
    KVT_CTL_DAEMON_ERROR = 4, /* the daemon refused or failed */
};

#define KVT_CTL_SOCKET_DEFAULT "/run/kvtierd/kvtierd.sock"
#define KVT_CTL_TIMEOUT_NS_DEFAULT (10 * KVT_NS_PER_S)
#define KVT_CTL_PATH_BYTES 4096u
#define KVT_CTL_OPERANDS_MAX 2u

enum kvt_ctl_command_id {
    KVT_CTL_STATS,
    KVT_CTL_DEVICES,
    KVT_CTL_NAMESPACES,
    KVT_CTL_LOOKUP,
    KVT_CTL_EXPLAIN,
    KVT_CTL_TREE,
    KVT_CTL_EVICT,
    KVT_CTL_RESET,
    KVT_CTL_DRAIN,
    KVT_CTL_SCRUB,
    KVT_CTL_L3,
    KVT_CTL_HEALTH,
    KVT_CTL_DOCTOR,
    KVT_CTL_COMMANDS
};

enum kvt_ctl_color { KVT_CTL_COLOR_AUTO, KVT_CTL_COLOR_ALWAYS, KVT_CTL_COLOR_NEVER };

struct kvt_ctl_args {
    bool is_help;                    /* --help: of the command, or of all when there is none */
    bool is_version;                 /* --version */
    enum kvt_ctl_command_id command; /* KVT_CTL_COMMANDS: none */
    char socket_path[KVT_CTL_PATH_BYTES];
    char admin_socket_path[KVT_CTL_PATH_BYTES];
    uint64_t timeout_ns;
    bool is_json;
    enum kvt_ctl_color color;
    bool is_watch;
    uint64_t watch_ns;
    uint64_t watch_rounds; /* UINT64_MAX: until interrupted */
    const char *ns_prefix; /* hexadecimal beginning of a fingerprint; NULL: the only one */
    const char *tokens;
    const char *tokens_file;
    const char *salt, *lora; /* NULL: none */
    uint64_t limit_tokens;
    uint32_t tiers; /* KVT_TIER_BIT_* */
    uint64_t depth_max, depth_blocks_max;
    uint32_t nodes_max;
    bool is_all, is_yes, is_strict;
    const char *config_path;
    uint64_t wait_ns;          /* drain: in all; UINT64_MAX: until it is done */
    uint64_t rate_bytes_per_s; /* scrub start; 0: as configured */
    /* What stands behind the command, as many as it takes, checked where it is a choice. */
    const char *operands[KVT_CTL_OPERANDS_MAX];
    uint32_t operands_count;
};

/* Fills @ret_args from the command line and the environment (@env_socket: KVTIERD_SOCKET or NULL).
 * KVT_CTL_OK, or KVT_CTL_USAGE with the reason on @err. Texts point into @argv. */
KVT_MUST_USE int kvt_ctl_args_parse(struct kvt_ctl_args *ret_args, int argc, char *const argv[],
                                    const char *env_socket, FILE *err);
void kvt_ctl_help(FILE *out, enum kvt_ctl_command_id command); /* KVT_CTL_COMMANDS: of all */
const char *kvt_ctl_command_name(enum kvt_ctl_command_id command);

/* ---- tokens ---------------------------------------------------------------------------------- */

struct kvt_ctl_tokens {
    uint32_t *at; /* kvt_free */
    uint64_t count;
};

/* Text: numbers separated by commas, white space, with or without one pair of brackets. -EINVAL
 * with the place in @ret_why, -ENOMEM, -E2BIG above KVT_REQUEST_TOKENS_MAX, or 0. */
KVT_MUST_USE int kvt_ctl_tokens_parse(struct kvt_ctl_tokens *ret_tokens, const char *text,
                                      size_t bytes, char *ret_why, size_t why_bytes);
/* A file ("-": standard input), text or binary (u32 little-endian): binary is what is not text.
 * Errors as above, and -errno of reading. */
KVT_MUST_USE int kvt_ctl_tokens_load(struct kvt_ctl_tokens *ret_tokens, const char *path,
                                     char *ret_why, size_t why_bytes);

/* ---- talking to the daemon ------------------------------------------------------------------- */

struct kvt_client;
struct kvt_ctl_daemon {
    struct kvt_client *client;
    const struct kvt_ctl_args *args;
    const char *socket_path;
    FILE *err;
};

/* KVT_CTL_OK, or an exit status with the reason on @err. */
KVT_MUST_USE int kvt_ctl_daemon_open(struct kvt_ctl_daemon *ret_daemon,
                                     const struct kvt_ctl_args *args, bool is_admin, FILE *err);
void kvt_ctl_daemon_close(struct kvt_ctl_daemon *daemon); /* idempotent */

/* An op with an arena of its own: 0 or -ENOMEM. Free is NULL-proof and returns NULL. */
KVT_MUST_USE int kvt_ctl_op_new(struct kvt_op **ret_op, enum kvt_op_kind kind);
struct kvt_op *kvt_ctl_op_free(struct kvt_op *op);
/* Makes @op (of the same or another kind) ready for the next call; its answer is gone. */
void kvt_ctl_op_reset(struct kvt_op *op, enum kvt_op_kind kind);
/* One request; KVT_CTL_OK, or an exit status with the reason on daemon->err. */
KVT_MUST_USE int kvt_ctl_daemon_call(struct kvt_ctl_daemon *daemon, struct kvt_op *op);
/* The same for what was called otherwise (attach, health): judges op->code. */
KVT_MUST_USE int kvt_ctl_daemon_judge(const struct kvt_ctl_daemon *daemon, const struct kvt_op *op);
/* Says why a socket cannot be used, and what to do. @error: errno of connecting. */
void kvt_ctl_say_no_daemon(FILE *err, const char *socket_path, int error);

/* Picks a namespace of @stats by the beginning of its fingerprint; NULL: the only one. KVT_CTL_OK,
 * or an exit status with the candidates on @err. */
KVT_MUST_USE int kvt_ctl_pick_ns(const struct kvt_ans_stats *stats, const char *prefix, FILE *err,
                                 const struct kvt_api_ns_stats **ret_ns);

/* ---- commands: each returns an exit status --------------------------------------------------- */

int kvt_ctl_run_stats(const struct kvt_ctl_args *args);
int kvt_ctl_run_devices(const struct kvt_ctl_args *args);
int kvt_ctl_run_namespaces(const struct kvt_ctl_args *args);
int kvt_ctl_run_prefix(const struct kvt_ctl_args *args); /* lookup, explain */
int kvt_ctl_run_tree(const struct kvt_ctl_args *args);
int kvt_ctl_run_evict(const struct kvt_ctl_args *args);
int kvt_ctl_run_reset(const struct kvt_ctl_args *args);
int kvt_ctl_run_maintain(const struct kvt_ctl_args *args); /* drain, scrub */
int kvt_ctl_run_l3(const struct kvt_ctl_args *args);
int kvt_ctl_run_health(const struct kvt_ctl_args *args);
int kvt_ctl_run_doctor(const struct kvt_ctl_args *args);
