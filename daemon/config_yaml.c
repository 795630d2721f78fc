#include "daemon/config_yaml.h"

#include <cyaml/cyaml.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "daemon/base/alloc.h"

#define DEPTH_MAX 4u
#define FIELDS_MAX 128u
#define NAME_BYTES 32u

/* libcyaml's schema wants one array of fields a section; they are cut from one pool. */
struct schema {
    cyaml_schema_field_t fields[FIELDS_MAX];
    char names[FIELDS_MAX][NAME_BYTES];
    uint32_t used;
    cyaml_schema_value_t top;
};

/* What libcyaml said: its first line is the reason, the others the way to it, innermost first. */
struct backtrace {
    char reason[256];
    char names[DEPTH_MAX][NAME_BYTES];
    uint32_t names_count;
    uint32_t line;
};

/* The part of a dotted path at @depth; its length in *ret_bytes; is it the last? */
static const char *part_of(const char *path, uint32_t depth, size_t *ret_bytes, bool *ret_is_last)
{
    const char *dot;

    for (; depth > 0; depth--)
        path = strchr(path, '.') + 1;
    dot = strchr(path, '.');
    *ret_bytes = dot == NULL ? strlen(path) : (size_t)(dot - path);
    *ret_is_last = dot == NULL;
    return path;
}

/* First row after @first, below @end, that is in another section at @depth. */
static uint32_t end_of_part(uint32_t first, uint32_t end, uint32_t depth)
{
    size_t bytes, other_bytes;
    bool is_last;
    const char *part = part_of(kvt_config_keys[first].path, depth, &bytes, &is_last);
    uint32_t i = first + 1;

    for (; i < end; i++) {
        const char *other = part_of(kvt_config_keys[i].path, depth, &other_bytes, &is_last);

        if (other_bytes != bytes || memcmp(other, part, bytes) != 0)
            break;
    }
    return i;
}

/* Fields for rows [first, end), which agree in their first @depth parts. Values of row i lie at
 * index i - first of the section's part of the array of texts. Recursion: depth is at most 3. */
static const cyaml_schema_field_t *build(struct schema *schema, uint32_t first, uint32_t end,
                                         uint32_t depth)
{
    uint32_t at = schema->used, count = 0;
    cyaml_schema_field_t *fields = &schema->fields[at];

    KVT_ASSERT(depth < DEPTH_MAX);
    for (uint32_t i = first; i < end; i = end_of_part(i, end, depth))
        count++;
    schema->used += count + 1; /* the last one stays zero: the end */
    KVT_ASSERT(schema->used <= FIELDS_MAX);
    for (uint32_t i = first, k = 0; i < end; k++) {
        uint32_t next = end_of_part(i, end, depth);
        size_t bytes;
        bool is_last;
        const char *part = part_of(kvt_config_keys[i].path, depth, &bytes, &is_last);

        KVT_ASSERT(bytes < NAME_BYTES);
        memcpy(schema->names[at + k], part, bytes);
        fields[k].key = schema->names[at + k];
        fields[k].data_offset = (uint32_t)((i - first) * sizeof(char *));
        if (is_last) {
            fields[k].value.type = CYAML_STRING;
            fields[k].value.flags = CYAML_FLAG_POINTER | CYAML_FLAG_OPTIONAL;
            fields[k].value.data_size = sizeof(char);
            fields[k].value.string.max = KVT_CONFIG_FILE_BYTES_MAX;
        } else {
            fields[k].value.type = CYAML_MAPPING;
            fields[k].value.flags = CYAML_FLAG_OPTIONAL;
            fields[k].value.data_size = (uint32_t)((next - i) * sizeof(char *));
            fields[k].value.mapping.fields = build(schema, i, next, depth + 1);
        }
        i = next;
    }
    return fields;
}

KVT_PRINTF(3, 0)
static void on_log(cyaml_log_t level, void *ctx, const char *format, va_list args)
{
    struct backtrace *trace = ctx;
    char line[256];
    const char *at;
    int written = vsnprintf(line, sizeof(line), format, args);

    if (level < CYAML_LOG_WARNING || written <= 0)
        return;
    line[strcspn(line, "\n")] = '\0';
    at = strncmp(line, "Load: ", 6) == 0 ? line + 6 : line;
    if (strcmp(at, "Backtrace:") == 0)
        return;
    if (strncmp(at, "  in ", 5) != 0) {
        if (trace->reason[0] == '\0')
            memcpy(trace->reason, at, strlen(at) + 1);
        return;
    }
    if (trace->line == 0 && strstr(at, "(line: ") != NULL)
        (void)sscanf(strstr(at, "(line: "), "(line: %u", &trace->line);
    if (trace->names_count < DEPTH_MAX &&
        sscanf(at, "  in mapping field '%31[^']'", trace->names[trace->names_count]) == 1)
        trace->names_count++;
}

KVT_PRINTF(4, 5)
static size_t append(char *text, size_t bytes, size_t at, const char *format, ...)
{
    va_list args;
    int written;

    va_start(args, format);
    written = vsnprintf(text + at, bytes - at, format, args);
    va_end(args);
    return written < 0 ? at : KVT_MIN(bytes - 1, at + (size_t)written);
}

/* Names of keys and sections directly in @section ("" for the top): "socket, threads, …". */
static size_t append_known(char *text, size_t bytes, size_t at, const char *section)
{
    size_t section_bytes = strlen(section);
    const char *before = "";
    size_t before_bytes = 0;
    bool is_first = true;

    for (uint32_t i = 0; i < kvt_config_keys_count; i++) {
        const char *path = kvt_config_keys[i].path;
        const char *name = path + (section_bytes == 0 ? 0 : section_bytes + 1);
        size_t name_bytes;

        if (section_bytes != 0 &&
            (strncmp(path, section, section_bytes) != 0 || path[section_bytes] != '.'))
            continue;
        name_bytes = strcspn(name, ".");
        if (name_bytes == before_bytes && memcmp(name, before, name_bytes) == 0)
            continue;
        at = append(text, bytes, at, "%s%.*s", is_first ? "" : ", ", (int)name_bytes, name);
        is_first = false;
        before = name;
        before_bytes = name_bytes;
    }
    return at;
}

/* Turns libcyaml's backtrace into a line number and a sentence. */
static void explain(struct kvt_config_yaml *yaml, const char *text, const struct backtrace *trace)
{
    static const char unknown[] = "Unexpected key: ";
    char path[DEPTH_MAX * NAME_BYTES] = "", section[DEPTH_MAX * NAME_BYTES];
    size_t at = 0;
    uint32_t line;

    for (uint32_t i = trace->names_count; i-- > 0;)
        at = append(path, sizeof(path), at, "%s%s", at == 0 ? "" : ".", trace->names[i]);
    memcpy(section, path, sizeof(section));
    if (strncmp(trace->reason, unknown, sizeof(unknown) - 1) == 0) {
        (void)append(path, sizeof(path), at, "%s%s", at == 0 ? "" : ".",
                     trace->reason + sizeof(unknown) - 1);
        at = append(yaml->why, sizeof(yaml->why), 0, "%s: no such key; known here: ", path);
        (void)append_known(yaml->why, sizeof(yaml->why), at, section);
    } else if (strncmp(trace->reason, "Expecting STRING", 16) == 0) {
        (void)append(yaml->why, sizeof(yaml->why), 0, "%s: one value is wanted here", path);
    } else if (strncmp(trace->reason, "Expecting MAPPING", 17) == 0) {
        at = append(yaml->why, sizeof(yaml->why), 0,
                    "%s%sa section is wanted here, with some of: ", path, at == 0 ? "" : ": ");
        (void)append_known(yaml->why, sizeof(yaml->why), at, section);
    } else if (strncmp(trace->reason, "Mapping field already seen", 26) == 0) {
        (void)append(yaml->why, sizeof(yaml->why), 0, "%s: is given twice", path);
    } else {
        (void)append(yaml->why, sizeof(yaml->why), 0, "%s%s%s", path, at == 0 ? "" : ": ",
                     trace->reason[0] == '\0' ? "is no valid YAML" : trace->reason);
    }
    line = kvt_config_yaml_line(text, path);
    yaml->line = line != 0 ? line : KVT_MAX(trace->line, 1u);
}

static cyaml_config_t cyaml_config(struct backtrace *trace)
{
    return (cyaml_config_t){
        .log_fn = on_log,
        .log_ctx = trace,
        .log_level = CYAML_LOG_WARNING,
        .mem_fn = cyaml_mem,
        .flags = CYAML_CFG_NO_ALIAS,
    };
}

int kvt_config_yaml_open(struct kvt_config_yaml *ret_yaml, const char *text, size_t bytes)
{
    struct backtrace trace = {.reason = ""};
    cyaml_config_t config = cyaml_config(&trace);
    struct schema *schema = kvt_alloc_zeroed(1, sizeof(*schema));
    cyaml_err_t error;

    *ret_yaml = (struct kvt_config_yaml){.values = NULL, .schema = schema};
    if (schema == NULL)
        return kvt_trace(-ENOMEM);
    schema->top.type = CYAML_MAPPING;
    schema->top.flags = CYAML_FLAG_POINTER;
    schema->top.data_size = (uint32_t)(kvt_config_keys_count * sizeof(char *));
    schema->top.mapping.fields = build(schema, 0, kvt_config_keys_count, 0);
    error = cyaml_load_data((const uint8_t *)text, bytes, &config, &schema->top,
                            (cyaml_data_t **)&ret_yaml->values, NULL);
    if (error == CYAML_OK)
        return 0;
    ret_yaml->values = NULL;
    kvt_free(schema);
    ret_yaml->schema = NULL;
    if (error == CYAML_ERR_OOM)
        return kvt_trace(-ENOMEM);
    if (error == CYAML_ERR_ALIAS)
        (void)append(trace.reason, sizeof(trace.reason), 0, "aliases are not supported");
    explain(ret_yaml, text, &trace);
    return -EINVAL;
}

void kvt_config_yaml_close(struct kvt_config_yaml *yaml)
{
    struct backtrace trace = {.reason = ""};
    cyaml_config_t config = cyaml_config(&trace);
    struct schema *schema = yaml->schema;

    if (schema != NULL && yaml->values != NULL)
        (void)cyaml_free(&config, &schema->top, yaml->values, 0);
    kvt_free(schema);
    yaml->schema = NULL;
    yaml->values = NULL;
}

uint32_t kvt_config_yaml_line(const char *text, const char *path)
{
    struct {
        size_t indent, path_bytes; /* matched length of @path up to this section's end */
    } open[DEPTH_MAX];
    uint32_t depth = 0, line = 0, found = 0;

    for (const char *at = text; *at != '\0'; at += strcspn(at, "\n"), at += *at == '\n') {
        size_t indent = strspn(at, " ");
        size_t bytes = strcspn(at + indent, ":#\n");
        size_t matched;
        const char *rest;
        bool is_on_path;

        line++;
        if (bytes == 0 || at[indent + bytes] != ':')
            continue;
        while (depth > 0 && open[depth - 1].indent >= indent)
            depth--;
        /* Only a child of a section on the path, or a line of the top, can be on the path. */
        is_on_path = depth == 0 || open[depth - 1].path_bytes != 0;
        matched = depth == 0 ? 0 : open[depth - 1].path_bytes;
        rest = path + matched;
        is_on_path = is_on_path && strncmp(rest, at + indent, bytes) == 0;
        if (is_on_path && rest[bytes] == '\0')
            found = line;
        matched = is_on_path && rest[bytes] == '.' ? matched + bytes + 1 : 0;
        if (depth < DEPTH_MAX) {
            open[depth].indent = indent;
            open[depth++].path_bytes = matched;
        }
    }
    return found;
}
