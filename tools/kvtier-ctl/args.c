/* The command line: one table of options, one of commands, each command naming the options that it
 * knows. Options may stand before or after the command; "--name value" and "--name=value" are the
 * same. Numbers are whole, in range, or a usage error: nothing is guessed. */
#include "tools/kvtier-ctl/ctl.h"

#include <stdlib.h>
#include <string.h>

#include "daemon/base/size.h"
#include "tools/kvtier-ctl/commands.h"

static int usage(FILE *err, const char *format, const char *a, const char *b)
{
    (void)fputs("kvtier-ctl: ", err);
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wformat-nonliteral"
    (void)fprintf(err, format, a, b);
#pragma GCC diagnostic pop
    (void)fputs("\nTry 'kvtier-ctl --help', or 'kvtier-ctl COMMAND --help'.\n", err);
    return KVT_CTL_USAGE;
}

static bool parse_u64(const char *text, uint64_t max, uint64_t *ret_value)
{
    uint64_t value = 0;

    if (*text == '\0')
        return false;
    for (; *text != '\0'; text++) {
        if (*text < '0' || *text > '9')
            return false;
        if (__builtin_mul_overflow(value, 10u, &value) ||
            __builtin_add_overflow(value, (uint64_t)(*text - '0'), &value))
            return false;
    }
    if (value > max)
        return false;
    *ret_value = value;
    return true;
}

/* "2", "0.5", "1.25": seconds with up to nine decimals, above 0 and at most a day. */
static bool parse_seconds(const char *text, uint64_t *ret_ns)
{
    uint64_t ns = 0, unit = KVT_NS_PER_S;
    bool is_fraction = false;

    if (*text == '\0' || *text == '.')
        return false;
    for (; *text != '\0'; text++) {
        uint64_t digit = (uint64_t)((unsigned char)*text) - '0';

        if (*text == '.' && !is_fraction) {
            is_fraction = true;
            continue;
        }
        if (*text < '0' || *text > '9')
            return false;
        if (is_fraction) {
            unit /= 10;
            ns += digit * unit;
        } else {
            ns = ns * 10 + digit * KVT_NS_PER_S;
        }
        if (ns > 86400 * KVT_NS_PER_S)
            return false;
    }
    if (ns == 0)
        return false;
    *ret_ns = ns;
    return true;
}

static bool parse_tiers(const char *text, uint32_t *ret_tiers)
{
    uint32_t tiers = 0;

    for (;;) {
        if ((text[0] != 'l' && text[0] != 'L') || text[1] < '1' || text[1] > '3')
            return false;
        tiers |= 1u << (text[1] - '1');
        if (text[2] == '\0')
            break;
        if (text[2] != ',')
            return false;
        text += 3;
    }
    *ret_tiers = tiers;
    return true;
}

static bool is_hex(const char *text)
{
    size_t length = strspn(text, "0123456789abcdefABCDEF");

    return length > 0 && text[length] == '\0' && length <= (size_t)KVT_FINGERPRINT_BYTES * 2;
}

static bool put_path(char dst[KVT_CTL_PATH_BYTES], const char *path)
{
    int length = snprintf(dst, KVT_CTL_PATH_BYTES, "%s", path);

    return length > 0 && (uint32_t)length < KVT_CTL_PATH_BYTES;
}

static bool put_color(const char *text, enum kvt_ctl_color *ret_color)
{
    if (strcmp(text, "auto") == 0)
        *ret_color = KVT_CTL_COLOR_AUTO;
    else if (strcmp(text, "always") == 0)
        *ret_color = KVT_CTL_COLOR_ALWAYS;
    else if (strcmp(text, "never") == 0)
        *ret_color = KVT_CTL_COLOR_NEVER;
    else
        return false;
    return true;
}

static bool set_flag(struct kvt_ctl_args *args, enum kvt_ctl_option_id id)
{
    switch (id) {
    case KVT_CTL_OPT_HELP:
        return args->is_help = true;
    case KVT_CTL_OPT_VERSION:
        return args->is_version = true;
    case KVT_CTL_OPT_JSON:
        return args->is_json = true;
    case KVT_CTL_OPT_ALL:
        return args->is_all = true;
    case KVT_CTL_OPT_YES:
        return args->is_yes = true;
    case KVT_CTL_OPT_STRICT:
        return args->is_strict = true;
    default:
        return false;
    }
}

static bool set_text(const char **ret_text, const char *value)
{
    *ret_text = value;
    return true;
}

static bool set_tag(const char **ret_text, const char *value)
{
    *ret_text = value;
    return strlen(value) <= KVT_ROOT_TAG_BYTES_MAX;
}

/* False: @value is not one that the option takes. */
static bool set_value(struct kvt_ctl_args *args, enum kvt_ctl_option_id id, const char *value)
{
    uint64_t number;

    switch (id) {
    case KVT_CTL_OPT_SOCKET:
        return put_path(args->socket_path, value);
    case KVT_CTL_OPT_ADMIN_SOCKET:
        return put_path(args->admin_socket_path, value);
    case KVT_CTL_OPT_TIMEOUT:
        return parse_seconds(value, &args->timeout_ns);
    case KVT_CTL_OPT_COLOR:
        return put_color(value, &args->color);
    case KVT_CTL_OPT_WATCH:
        args->is_watch = true;
        return value == NULL || parse_seconds(value, &args->watch_ns);
    case KVT_CTL_OPT_ROUNDS:
        return parse_u64(value, UINT64_MAX, &args->watch_rounds);
    case KVT_CTL_OPT_NAMESPACE:
        return is_hex(value) && set_text(&args->ns_prefix, value);
    case KVT_CTL_OPT_TOKENS:
        return set_text(&args->tokens, value);
    case KVT_CTL_OPT_TOKENS_FILE:
        return set_text(&args->tokens_file, value);
    case KVT_CTL_OPT_SALT:
        return set_tag(&args->salt, value);
    case KVT_CTL_OPT_LORA:
        return set_tag(&args->lora, value);
    case KVT_CTL_OPT_LIMIT:
        return parse_u64(value, UINT64_MAX, &args->limit_tokens);
    case KVT_CTL_OPT_TIERS:
        return parse_tiers(value, &args->tiers);
    case KVT_CTL_OPT_DEPTH:
        return parse_u64(value, UINT64_MAX, &args->depth_max) && args->depth_max > 0;
    case KVT_CTL_OPT_BLOCKS:
        return parse_u64(value, UINT64_MAX, &args->depth_blocks_max) && args->depth_blocks_max > 0;
    case KVT_CTL_OPT_NODES:
        if (!parse_u64(value, 1000000, &number) || number == 0)
            return false;
        args->nodes_max = (uint32_t)number;
        return true;
    case KVT_CTL_OPT_CONFIG:
        return set_text(&args->config_path, value);
    case KVT_CTL_OPT_WAIT:
        return parse_seconds(value, &args->wait_ns);
    case KVT_CTL_OPT_RATE:
        return kvt_size_parse(value, &args->rate_bytes_per_s) == 0 && args->rate_bytes_per_s > 0;
    default:
        return false;
    }
}

/* One "--name[=value]" at argv[*idx]; moves *idx over a separate value. */
static int parse_option(struct kvt_ctl_args *args, int argc, char *const argv[], int *idx,
                        uint64_t *ret_seen, FILE *err)
{
    const char *name = argv[*idx] + 2;
    const char *equals = strchr(name, '=');
    size_t name_bytes = equals != NULL ? (size_t)(equals - name) : strlen(name);
    const struct kvt_ctl_option *option = kvt_ctl_option_find(name, name_bytes);
    const char *value = equals != NULL ? equals + 1 : NULL;

    if (option == NULL)
        return usage(err, "unknown option '%s'", argv[*idx], "");
    *ret_seen |= UINT64_C(1) << option->id;
    if (option->metavar == NULL) {
        if (value != NULL)
            return usage(err, "option '--%s' takes no value", option->name, "");
        KVT_ASSERT(set_flag(args, option->id));
        return KVT_CTL_OK;
    }
    if (value == NULL && *idx + 1 < argc) {
        const char *next = argv[*idx + 1];

        if (!option->is_value_optional || (next[0] >= '0' && next[0] <= '9')) {
            value = next;
            (*idx)++;
        }
    }
    if (value == NULL && !option->is_value_optional)
        return usage(err, "option '--%s' needs a value: %s", option->name, option->metavar);
    if (!set_value(args, option->id, value))
        return usage(err, "option '--%s' does not take '%s'", option->name, value);
    return KVT_CTL_OK;
}

/* Is @word one of "start|stop|status"? */
static bool is_choice(const char *choices, const char *word)
{
    size_t bytes = strlen(word);

    for (const char *at = choices; *at != '\0'; at += strspn(at, "|")) {
        size_t length = strcspn(at, "|");

        if (length == bytes && memcmp(at, word, bytes) == 0)
            return true;
        at += length;
    }
    return false;
}

/* A word behind the command. */
static int parse_operand(struct kvt_ctl_args *args, const char *word, FILE *err)
{
    const char *wanted = kvt_ctl_command_operand(args->command, args->operands_count);

    if (wanted == NULL)
        return usage(err, "%s takes no argument '%s'", kvt_ctl_command_name(args->command), word);
    if (strchr(wanted, '|') != NULL && !is_choice(wanted, word))
        return usage(err, "'%s' is not one of %s", word, wanted);
    args->operands[args->operands_count++] = word;
    return KVT_CTL_OK;
}

/* What the command needs beyond the single options. */
static int check_whole(const struct kvt_ctl_args *args, FILE *err)
{
    bool has_tokens = args->tokens != NULL || args->tokens_file != NULL;
    const char *missing = kvt_ctl_command_operand(args->command, args->operands_count);

    if (missing != NULL)
        return usage(err, "%s needs %s", kvt_ctl_command_name(args->command), missing);
    if (args->rate_bytes_per_s != 0 && strcmp(args->operands[0], "start") != 0)
        return usage(err, "%s", "--rate is for 'scrub start'", "");
    if (args->tokens != NULL && args->tokens_file != NULL)
        return usage(err, "%s", "give --tokens or --tokens-file, not both", "");
    if ((args->command == KVT_CTL_LOOKUP || args->command == KVT_CTL_EXPLAIN) && !has_tokens)
        return usage(err, "%s needs the prompt: --tokens 1,2,3 or --tokens-file FILE",
                     kvt_ctl_command_name(args->command), "");
    if (args->command == KVT_CTL_EVICT) {
        bool has_root = args->salt != NULL || args->lora != NULL;

        if (!has_tokens && !has_root && !args->is_all)
            return usage(err, "%s",
                         "evict needs to know what: --tokens or --tokens-file (a prefix and all "
                         "below it), --salt or --lora (one root), or --all (the namespace)",
                         "");
        if (args->is_all && (has_tokens || has_root))
            return usage(err, "%s", "--all takes the whole namespace: no tokens, salt or LoRA", "");
    }
    return KVT_CTL_OK;
}

/* The admin socket lies beside the main one. */
static int default_paths(struct kvt_ctl_args *args, const char *env_socket, FILE *err)
{
    const char *slash;
    int length;

    if (args->socket_path[0] == '\0' &&
        !put_path(args->socket_path, env_socket != NULL && env_socket[0] != '\0'
                                         ? env_socket
                                         : KVT_CTL_SOCKET_DEFAULT))
        return usage(err, "%s", "KVTIERD_SOCKET is too long for a path", "");
    if (args->admin_socket_path[0] != '\0')
        return KVT_CTL_OK;
    slash = strrchr(args->socket_path, '/');
    length = snprintf(args->admin_socket_path, sizeof(args->admin_socket_path), "%.*s%s",
                      slash == NULL ? 0 : (int)(slash - args->socket_path) + 1, args->socket_path,
                      KVT_CTL_ADMIN_SOCKET_NAME);
    if ((size_t)length >= sizeof(args->admin_socket_path))
        return usage(err, "%s", "the socket's path is too long", "");
    return KVT_CTL_OK;
}

int kvt_ctl_args_parse(struct kvt_ctl_args *ret_args, int argc, char *const argv[],
                       const char *env_socket, FILE *err)
{
    uint64_t seen = 0, foreign;
    int r;

    *ret_args = (struct kvt_ctl_args){.command = KVT_CTL_COMMANDS,
                                      .timeout_ns = KVT_CTL_TIMEOUT_NS_DEFAULT,
                                      .watch_ns = 2 * KVT_NS_PER_S,
                                      .watch_rounds = UINT64_MAX,
                                      .limit_tokens = UINT64_MAX,
                                      .tiers = KVT_TIER_BITS_ALL,
                                      .depth_max = 16,
                                      .depth_blocks_max = UINT64_MAX,
                                      .nodes_max = 1000,
                                      .wait_ns = UINT64_MAX};
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "-h") == 0) {
            ret_args->is_help = true;
        } else if (strncmp(argv[i], "--", 2) == 0 && argv[i][2] != '\0') {
            r = parse_option(ret_args, argc, argv, &i, &seen, err);
            if (r != KVT_CTL_OK)
                return r;
        } else if (ret_args->command == KVT_CTL_COMMANDS) {
            ret_args->command = kvt_ctl_command_find(argv[i]);
            if (ret_args->command == KVT_CTL_COMMANDS)
                return usage(err, "unknown command '%s'", argv[i], "");
        } else {
            r = parse_operand(ret_args, argv[i], err);
            if (r != KVT_CTL_OK)
                return r;
        }
    }
    if (ret_args->is_help || ret_args->is_version)
        return KVT_CTL_OK;
    if (ret_args->command == KVT_CTL_COMMANDS)
        return usage(err, "%s", "no command", "");
    foreign = seen & ~kvt_ctl_command_options(ret_args->command);
    if (foreign != 0)
        return usage(err, "%s does not know --%s", kvt_ctl_command_name(ret_args->command),
                     kvt_ctl_option_name((enum kvt_ctl_option_id)__builtin_ctzll(foreign)));
    r = check_whole(ret_args, err);
    return r != KVT_CTL_OK ? r : default_paths(ret_args, env_socket, err);
}
