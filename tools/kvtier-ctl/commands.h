/* The tables of options and commands, and what --help says about them. Constant; any thread. */
#pragma once

#include "tools/kvtier-ctl/ctl.h"

/* Beside the main socket: where the daemon's defaults put the admin socket. */
#define KVT_CTL_ADMIN_SOCKET_NAME "admin.sock"

enum kvt_ctl_option_id {
    KVT_CTL_OPT_SOCKET,
    KVT_CTL_OPT_ADMIN_SOCKET,
    KVT_CTL_OPT_TIMEOUT,
    KVT_CTL_OPT_JSON,
    KVT_CTL_OPT_COLOR,
    KVT_CTL_OPT_HELP,
    KVT_CTL_OPT_VERSION,
    KVT_CTL_OPT_WATCH,
    KVT_CTL_OPT_ROUNDS,
    KVT_CTL_OPT_NAMESPACE,
    KVT_CTL_OPT_TOKENS,
    KVT_CTL_OPT_TOKENS_FILE,
    KVT_CTL_OPT_SALT,
    KVT_CTL_OPT_LORA,
    KVT_CTL_OPT_LIMIT,
    KVT_CTL_OPT_TIERS,
    KVT_CTL_OPT_DEPTH,
    KVT_CTL_OPT_BLOCKS,
    KVT_CTL_OPT_NODES,
    KVT_CTL_OPT_ALL,
    KVT_CTL_OPT_YES,
    KVT_CTL_OPT_STRICT,
    KVT_CTL_OPT_CONFIG,
    KVT_CTL_OPT_WAIT,
    KVT_CTL_OPT_RATE,
    KVT_CTL_OPTIONS
};

struct kvt_ctl_option {
    enum kvt_ctl_option_id id;
    const char *name;
    const char *metavar; /* NULL: a flag */
    bool is_value_optional;
    const char *help;
};

/* NULL when there is none of that name. */
const struct kvt_ctl_option *kvt_ctl_option_find(const char *name, size_t name_bytes);
const char *kvt_ctl_option_name(enum kvt_ctl_option_id id);
/* KVT_CTL_COMMANDS when there is none of that name. */
enum kvt_ctl_command_id kvt_ctl_command_find(const char *name);
/* What stands behind the command: "start|stop|status" is a choice, "PATH" is any text; NULL: no
 * more. All of them are needed. */
const char *kvt_ctl_command_operand(enum kvt_ctl_command_id command, uint32_t i);
/* Bit i: it knows the option of id i. */
uint64_t kvt_ctl_command_options(enum kvt_ctl_command_id command);
