#include "daemon/config.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "daemon/base/alloc.h"
#include "daemon/config_value.h"
#include "daemon/config_yaml.h"

void kvt_config_init(struct kvt_config *ret_config)
{
    char why[KVT_CONFIG_WHY_BYTES];

    memset(ret_config, 0, sizeof(*ret_config));
    for (uint32_t i = 0; i < kvt_config_keys_count; i++) {
        const struct kvt_config_key *key = &kvt_config_keys[i];

        KVT_ASSERT(kvt_config_value_parse(ret_config, key, key->standard, why) == 0);
    }
}

KVT_PRINTF(2, 3)
static void problem(const struct kvt_config_report *report, const char *format, ...)
{
    char line[1024];
    va_list args;

    va_start(args, format);
    (void)vsnprintf(line, sizeof(line), format, args);
    va_end(args);
    report->problem(report->ctx, line);
}

/* Terminated text of at most KVT_CONFIG_FILE_BYTES_MAX, or -errno. */
static int read_file(const char *path, char **ret_text, size_t *ret_bytes)
{
    char *text;
    size_t bytes;
    FILE *file = fopen(path, "re");
    int r = 0;

    if (file == NULL)
        return kvt_trace(-errno);
    text = kvt_alloc_zeroed(KVT_CONFIG_FILE_BYTES_MAX + 2, 1);
    if (text == NULL) {
        (void)fclose(file);
        return kvt_trace(-ENOMEM);
    }
    bytes = fread(text, 1, KVT_CONFIG_FILE_BYTES_MAX + 1, file);
    if (ferror(file))
        r = errno != 0 ? -errno : -EIO;
    else if (bytes > KVT_CONFIG_FILE_BYTES_MAX)
        r = -EFBIG;
    (void)fclose(file);
    if (r < 0) {
        kvt_free(text);
        return kvt_trace(r);
    }
    *ret_text = text;
    *ret_bytes = bytes;
    return 0;
}

/* Every bad value is reported, so that one start shows all of them. */
static int apply(struct kvt_config *config, const char *path, const char *text,
                 char *const values[], const struct kvt_config_report *report)
{
    char why[KVT_CONFIG_WHY_BYTES];
    int r = 0;

    for (uint32_t i = 0; i < kvt_config_keys_count; i++) {
        const struct kvt_config_key *key = &kvt_config_keys[i];

        if (values[i] == NULL || kvt_config_value_parse(config, key, values[i], why) == 0)
            continue;
        problem(report, "%s:%u: %s: %s", path, kvt_config_yaml_line(text, key->path), key->path,
                why);
        r = -EINVAL;
    }
    return r;
}

int kvt_config_load(struct kvt_config *config, const char *path,
                    const struct kvt_config_report *report)
{
    struct kvt_config_yaml yaml;
    kvt_autofree char *text = NULL;
    size_t bytes;
    int r = read_file(path, &text, &bytes);

    if (r < 0) {
        problem(report, "%s: cannot be read: %s", path, strerror(-r));
        return kvt_trace(r);
    }
    r = kvt_config_yaml_open(&yaml, text, bytes);
    if (r == -EINVAL)
        problem(report, "%s:%u: %s", path, yaml.line, yaml.why);
    else if (r < 0)
        problem(report, "%s: %s", path, strerror(-r));
    if (r < 0)
        return kvt_trace(r);
    if (yaml.values != NULL) /* NULL: the file sets nothing */
        r = apply(config, path, text, yaml.values, report);
    kvt_config_yaml_close(&yaml);
    return r;
}

int kvt_config_set(struct kvt_config *config, const char *assignment,
                   const struct kvt_config_report *report)
{
    const char *equals = strchr(assignment, '=');
    char why[KVT_CONFIG_WHY_BYTES];

    if (equals == NULL) {
        problem(report, "--set %s: is not key=value", assignment);
        return -EINVAL;
    }
    for (uint32_t i = 0; i < kvt_config_keys_count; i++) {
        const struct kvt_config_key *key = &kvt_config_keys[i];
        size_t bytes = strlen(key->path);

        if (bytes != (size_t)(equals - assignment) || memcmp(assignment, key->path, bytes) != 0)
            continue;
        if (kvt_config_value_parse(config, key, equals + 1, why) == 0)
            return 0;
        problem(report, "--set %s: %s", key->path, why);
        return -EINVAL;
    }
    problem(report, "--set %.*s: no such key (kvtierd --print-keys lists them)",
            (int)(equals - assignment), assignment);
    return -EINVAL;
}

/* Bytes that two dotted paths have in common up to and including a dot. */
static size_t common_sections(const char *a, const char *b)
{
    size_t common = 0;

    for (size_t i = 0; a[i] != '\0' && a[i] == b[i]; i++) {
        if (a[i] == '.')
            common = i + 1;
    }
    return common;
}

/* Prints the headers of sections that begin with this key; returns the name after the last dot. */
static const char *print_sections(int fd, const char *before, const char *path, uint32_t *ret_depth)
{
    size_t at = common_sections(before, path);
    uint32_t depth = 0;
    const char *dot;

    for (size_t i = 0; i < at; i++)
        depth += path[i] == '.';
    while ((dot = strchr(path + at, '.')) != NULL) {
        (void)dprintf(fd, "%*s%.*s:\n", (int)depth * 2, "", (int)(dot - path - (long)at),
                      path + at);
        at = (size_t)(dot - path) + 1;
        depth++;
    }
    *ret_depth = depth;
    return path + at;
}

static void quote(const char *text, char *ret_quoted)
{
    *ret_quoted++ = '"';
    for (; *text != '\0'; text++) {
        if (*text == '"' || *text == '\\')
            *ret_quoted++ = '\\';
        *ret_quoted++ = *text;
    }
    *ret_quoted++ = '"';
    *ret_quoted = '\0';
}

static bool is_quoted(enum kvt_config_kind kind)
{
    return kind == KVT_CONFIG_TEXT || kind == KVT_CONFIG_PATHS || kind == KVT_CONFIG_GPUS;
}

void kvt_config_print(const struct kvt_config *config, int fd)
{
    const char *before = "";

    for (uint32_t i = 0; i < kvt_config_keys_count; i++) {
        const struct kvt_config_key *key = &kvt_config_keys[i];
        char text[KVT_CONFIG_PATHS_BYTES], quoted[2 * KVT_CONFIG_PATHS_BYTES + 3];
        uint32_t depth;
        const char *name = print_sections(fd, before, key->path, &depth);

        kvt_config_value_format(config, key, text);
        quote(text, quoted);
        (void)dprintf(fd, "%*s%s: %s\n", (int)depth * 2, "", name,
                      is_quoted(key->kind) ? quoted : text);
        before = key->path;
    }
}

void kvt_config_print_keys(int fd)
{
    char wanted[KVT_CONFIG_WHY_BYTES];

    for (uint32_t i = 0; i < kvt_config_keys_count; i++) {
        const struct kvt_config_key *key = &kvt_config_keys[i];

        kvt_config_value_describe(key, wanted);
        (void)dprintf(fd, "%s\t%s\t%s\n", key->path,
                      key->standard[0] == '\0' ? "none" : key->standard, wanted);
    }
}
