#include "daemon/config_value.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/size.h"

static void *field_of(struct kvt_config *config, const struct kvt_config_key *key)
{
    return (char *)config + key->offset;
}

static const void *field_of_const(const struct kvt_config *config, const struct kvt_config_key *key)
{
    return (const char *)config + key->offset;
}

static bool is_size(enum kvt_config_kind kind)
{
    return kind == KVT_CONFIG_SIZE || kind == KVT_CONFIG_SIZE_OF_RAM ||
           kind == KVT_CONFIG_SIZE_OF_DISK || kind == KVT_CONFIG_SHARE;
}

static void format_number(enum kvt_config_kind kind, uint64_t value,
                          char ret_text[KVT_SIZE_TEXT_BYTES])
{
    if (is_size(kind))
        kvt_size_format(value, ret_text);
    else if (kind == KVT_CONFIG_DURATION)
        kvt_duration_format(value, ret_text);
    else
        (void)snprintf(ret_text, KVT_SIZE_TEXT_BYTES, kind == KVT_CONFIG_MODE ? "0%llo" : "%llu",
                       (unsigned long long)value);
}

/* "a, b or c" */
static void join_choices(const struct kvt_config_key *key, char *ret_text, size_t bytes)
{
    size_t at = 0;

    ret_text[0] = '\0';
    for (uint32_t i = 0; i < KVT_CONFIG_CHOICES_MAX && key->choices[i] != NULL; i++) {
        bool is_last = i + 1 == KVT_CONFIG_CHOICES_MAX || key->choices[i + 1] == NULL;
        const char *before = i == 0 ? "" : is_last ? " or " : ", ";
        int written = snprintf(ret_text + at, bytes - at, "%s%s", before, key->choices[i]);

        KVT_ASSERT(written > 0 && (size_t)written < bytes - at);
        at += (size_t)written;
    }
}

void kvt_config_value_describe(const struct kvt_config_key *key,
                               char ret_text[KVT_CONFIG_WHY_BYTES])
{
    static const char *const kinds[] = {
        [KVT_CONFIG_SIZE] = "a size",
        [KVT_CONFIG_SHARE] = "a size or N% of memory",
        [KVT_CONFIG_SIZE_OF_RAM] = "a size or N% of memory",
        [KVT_CONFIG_SIZE_OF_DISK] = "a size or N% of the file system",
        [KVT_CONFIG_DURATION] = "a duration",
        [KVT_CONFIG_COUNT] = "a number",
        [KVT_CONFIG_MODE] = "octal permissions",
    };
    char min[KVT_SIZE_TEXT_BYTES], max[KVT_SIZE_TEXT_BYTES];

    switch (key->kind) {
    case KVT_CONFIG_TEXT:
        (void)snprintf(ret_text, KVT_CONFIG_WHY_BYTES, "a path");
        return;
    case KVT_CONFIG_PATHS:
        (void)snprintf(ret_text, KVT_CONFIG_WHY_BYTES, "a path, or up to %u between commas",
                       KVT_ZONES_MAX);
        return;
    case KVT_CONFIG_GPUS:
        (void)snprintf(ret_text, KVT_CONFIG_WHY_BYTES,
                       "all, or up to %u indices and UUIDs between commas", KVT_ZONES_MAX);
        return;
    case KVT_CONFIG_CHOICE:
        join_choices(key, ret_text, KVT_CONFIG_WHY_BYTES);
        return;
    case KVT_CONFIG_BOOL:
        (void)snprintf(ret_text, KVT_CONFIG_WHY_BYTES, "true or false");
        return;
    default:
        format_number(key->kind, key->min, min);
        format_number(key->kind, key->max, max);
        (void)snprintf(ret_text, KVT_CONFIG_WHY_BYTES, "%s from %s to %s%s", kinds[key->kind], min,
                       max, key->is_zero_allowed ? ", or 0" : "");
        return;
    }
}

KVT_PRINTF(2, 3)
static int refuse(char ret_why[KVT_CONFIG_WHY_BYTES], const char *format, ...)
{
    va_list args;

    va_start(args, format);
    (void)vsnprintf(ret_why, KVT_CONFIG_WHY_BYTES, format, args);
    va_end(args);
    return -EINVAL;
}

static int parse_digits(const char *text, uint32_t base, uint64_t *ret_value)
{
    uint64_t value = 0;

    if (*text == '\0')
        return KVT_SIZE_E_SYNTAX;
    for (; *text != '\0'; text++) {
        uint32_t digit = (uint32_t)(*text - '0');

        if (*text < '0' || digit >= base)
            return KVT_SIZE_E_SYNTAX;
        if (__builtin_mul_overflow(value, base, &value) ||
            __builtin_add_overflow(value, digit, &value))
            return KVT_SIZE_E_RANGE;
    }
    *ret_value = value;
    return 0;
}

static int parse_number(const struct kvt_config *config, const struct kvt_config_key *key,
                        const char *text, uint64_t *ret_value)
{
    switch (key->kind) {
    case KVT_CONFIG_SIZE:
    case KVT_CONFIG_SHARE:
        return kvt_size_parse(text, ret_value);
    case KVT_CONFIG_SIZE_OF_RAM:
        return kvt_size_parse_share(text, kvt_config_ram_bytes(), ret_value);
    case KVT_CONFIG_SIZE_OF_DISK:
        return kvt_size_parse_share(text, kvt_config_disk_bytes(config->l3.paths), ret_value);
    case KVT_CONFIG_DURATION:
        return kvt_duration_parse(text, ret_value);
    case KVT_CONFIG_MODE:
        return parse_digits(text, 8, ret_value);
    default:
        return parse_digits(text, 10, ret_value);
    }
}

static int parse_bounded(struct kvt_config *config, const struct kvt_config_key *key,
                         const char *text, char ret_why[KVT_CONFIG_WHY_BYTES])
{
    char wanted[KVT_CONFIG_WHY_BYTES / 2];
    char describe[KVT_CONFIG_WHY_BYTES];
    uint64_t value;
    int r = parse_number(config, key, text, &value);

    kvt_config_value_describe(key, describe);
    (void)snprintf(wanted, sizeof(wanted), "%.*s", (int)sizeof(wanted) - 1, describe);
    if (r != 0 && is_size(key->kind))
        return refuse(ret_why, "\"%.40s\" %s (units: " KVT_SIZE_UNITS_TEXT ")", text,
                      kvt_size_error_text(r));
    if (r != 0 && key->kind == KVT_CONFIG_DURATION)
        return refuse(ret_why, "\"%.40s\" %s (units: " KVT_DURATION_UNITS_TEXT ")", text,
                      kvt_size_error_text(r));
    if (r != 0)
        return refuse(ret_why, "\"%.40s\" is not %s", text, wanted);
    if ((value < key->min && !(value == 0 && key->is_zero_allowed)) || value > key->max)
        return refuse(ret_why, "\"%.40s\" is out of bounds: %s", text, wanted);
    if (key->kind == KVT_CONFIG_COUNT || key->kind == KVT_CONFIG_MODE)
        *(uint32_t *)field_of(config, key) = (uint32_t)value;
    else
        *(uint64_t *)field_of(config, key) = value;
    return 0;
}

static int parse_choice(struct kvt_config *config, const struct kvt_config_key *key,
                        const char *text, char ret_why[KVT_CONFIG_WHY_BYTES])
{
    char choices[KVT_CONFIG_WHY_BYTES / 2];

    for (uint32_t i = 0; i < KVT_CONFIG_CHOICES_MAX && key->choices[i] != NULL; i++) {
        if (strcmp(text, key->choices[i]) == 0) {
            *(uint32_t *)field_of(config, key) = i;
            return 0;
        }
    }
    join_choices(key, choices, sizeof(choices));
    return refuse(ret_why, "\"%.40s\" is not one of %s", text, choices);
}

static int parse_text(struct kvt_config *config, const struct kvt_config_key *key, const char *text,
                      size_t bytes_max, char ret_why[KVT_CONFIG_WHY_BYTES])
{
    size_t bytes = strlen(text) + 1;

    if (bytes > bytes_max)
        return refuse(ret_why, "\"%.40s...\" is longer than %zu bytes", text, bytes_max - 1);
    memcpy(field_of(config, key), text, bytes);
    return 0;
}

static int parse_paths(struct kvt_config *config, const struct kvt_config_key *key,
                       const char *text, char ret_why[KVT_CONFIG_WHY_BYTES])
{
    const char *at = kvt_config_paths_begin(text);
    char path[KVT_CONFIG_TEXT_BYTES];
    uint32_t count = 0;
    size_t bytes;

    while (kvt_config_paths_next(&at, path, &bytes)) {
        if (bytes == 0)
            return refuse(ret_why, "\"%.40s\" has an empty path between its commas", text);
        if (bytes >= KVT_CONFIG_TEXT_BYTES)
            return refuse(ret_why, "\"%.40s...\" is longer than %u bytes", path,
                          KVT_CONFIG_TEXT_BYTES - 1);
        if (++count > KVT_ZONES_MAX)
            return refuse(ret_why, "\"%.40s...\" names more than %u paths", text, KVT_ZONES_MAX);
    }
    return parse_text(config, key, text, KVT_CONFIG_PATHS_BYTES, ret_why);
}

static int parse_gpus(struct kvt_config *config, const struct kvt_config_key *key, const char *text,
                      char ret_why[KVT_CONFIG_WHY_BYTES])
{
    const char *problem = kvt_config_gpus_problem(text);

    if (problem != NULL)
        return refuse(ret_why, "\"%.40s\" %s", text, problem);
    return parse_text(config, key, text, KVT_CONFIG_TEXT_BYTES, ret_why);
}

/* The percentage is kept: what it is one of is known later. */
static int parse_share(struct kvt_config *config, const struct kvt_config_key *key,
                       const char *text, char ret_why[KVT_CONFIG_WHY_BYTES])
{
    struct kvt_config_share *share = field_of(config, key);
    uint64_t milli_pct;
    int r;

    if (strchr(text, '%') == NULL) {
        r = parse_bounded(config, key, text, ret_why); /* bytes is the first member */
        share->milli_pct = r == 0 ? 0 : share->milli_pct;
        return r;
    }
    r = kvt_size_parse_share(text, KVT_CONFIG_MILLI_PCT_ALL, &milli_pct);
    if (r != 0)
        return refuse(ret_why, "\"%.40s\" %s (units: " KVT_SIZE_UNITS_TEXT ")", text,
                      kvt_size_error_text(r));
    if (milli_pct == 0)
        return refuse(ret_why, "\"%.40s\" is nothing: 0.001%% at least, or 0", text);
    *share = (struct kvt_config_share){.milli_pct = milli_pct};
    return 0;
}

int kvt_config_value_parse(struct kvt_config *config, const struct kvt_config_key *key,
                           const char *text, char ret_why[KVT_CONFIG_WHY_BYTES])
{
    switch (key->kind) {
    case KVT_CONFIG_TEXT:
        return parse_text(config, key, text, KVT_CONFIG_TEXT_BYTES, ret_why);
    case KVT_CONFIG_PATHS:
        return parse_paths(config, key, text, ret_why);
    case KVT_CONFIG_GPUS:
        return parse_gpus(config, key, text, ret_why);
    case KVT_CONFIG_SHARE:
        return parse_share(config, key, text, ret_why);
    case KVT_CONFIG_CHOICE:
        return parse_choice(config, key, text, ret_why);
    case KVT_CONFIG_BOOL:
        if (strcmp(text, "true") != 0 && strcmp(text, "false") != 0)
            return refuse(ret_why, "\"%.40s\" is not true or false", text);
        *(bool *)field_of(config, key) = text[0] == 't';
        return 0;
    default:
        return parse_bounded(config, key, text, ret_why);
    }
}

static void format_share(const struct kvt_config_share *share, char *ret_text, size_t bytes)
{
    if (share->milli_pct == 0)
        format_number(KVT_CONFIG_SHARE, share->bytes, ret_text);
    else if (share->milli_pct % 1000 == 0)
        (void)snprintf(ret_text, bytes, "%llu%%", (unsigned long long)share->milli_pct / 1000);
    else
        (void)snprintf(ret_text, bytes, "%llu.%03llu%%",
                       (unsigned long long)share->milli_pct / 1000,
                       (unsigned long long)share->milli_pct % 1000);
}

void kvt_config_value_format(const struct kvt_config *config, const struct kvt_config_key *key,
                             char ret_text[KVT_CONFIG_PATHS_BYTES])
{
    const void *field = field_of_const(config, key);

    switch (key->kind) {
    case KVT_CONFIG_TEXT:
    case KVT_CONFIG_PATHS:
    case KVT_CONFIG_GPUS:
        (void)snprintf(ret_text, KVT_CONFIG_PATHS_BYTES, "%s", (const char *)field);
        return;
    case KVT_CONFIG_SHARE:
        format_share(field, ret_text, KVT_CONFIG_PATHS_BYTES);
        return;
    case KVT_CONFIG_CHOICE:
        (void)snprintf(ret_text, KVT_CONFIG_PATHS_BYTES, "%s",
                       key->choices[*(const uint32_t *)field]);
        return;
    case KVT_CONFIG_BOOL:
        (void)snprintf(ret_text, KVT_CONFIG_PATHS_BYTES, "%s",
                       *(const bool *)field ? "true" : "false");
        return;
    case KVT_CONFIG_COUNT:
    case KVT_CONFIG_MODE:
        format_number(key->kind, *(const uint32_t *)field, ret_text);
        return;
    default:
        format_number(key->kind, *(const uint64_t *)field, ret_text);
        return;
    }
}
