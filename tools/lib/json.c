/* Two facts are kept a level: whether it is an array, and whether a comma is due. */
#include "tools/lib/json.h"

#include <math.h>
#include <string.h>

static void print_indent(const struct kvt_json *json)
{
    if (json->is_compact)
        return;
    fputc('\n', json->out);
    for (uint32_t i = 0; i < json->depth; i++)
        fputs("  ", json->out);
}

/* Length of the valid UTF-8 sequence at @at, of @bytes at most; 0 when it is not valid. */
static size_t utf8_length(const unsigned char *at, size_t bytes)
{
    size_t length;
    uint32_t code;

    if (at[0] < 0x80)
        return 1;
    if ((at[0] & 0xE0) == 0xC0)
        length = 2;
    else if ((at[0] & 0xF0) == 0xE0)
        length = 3;
    else if ((at[0] & 0xF8) == 0xF0)
        length = 4;
    else
        return 0;
    if (length > bytes)
        return 0;
    code = at[0] & (0xFFu >> (length + 1));
    for (size_t i = 1; i < length; i++) {
        if ((at[i] & 0xC0) != 0x80)
            return 0;
        code = code << 6 | (at[i] & 0x3Fu);
    }
    if ((length == 2 && code < 0x80) || (length == 3 && code < 0x800) ||
        (length == 4 && (code < 0x10000 || code > 0x10FFFF)) || (code >= 0xD800 && code < 0xE000))
        return 0;
    return length;
}

static void print_text(FILE *out, const char *text, size_t bytes)
{
    const unsigned char *at = (const unsigned char *)text;

    fputc('"', out);
    for (size_t i = 0; i < bytes;) {
        size_t length = utf8_length(at + i, bytes - i);

        if (length == 0)
            fputs("\\ufffd", out);
        else if (at[i] == '"' || at[i] == '\\')
            fprintf(out, "\\%c", at[i]);
        else if (at[i] < 0x20 || at[i] == 0x7F)
            fprintf(out, "\\u%04x", at[i]);
        else
            (void)fwrite(at + i, 1, length, out);
        i += KVT_MAX(length, (size_t)1);
    }
    fputc('"', out);
}

/* What comes before each value: comma, line, name. */
static void begin_value(struct kvt_json *json, const char *name)
{
    uint32_t level = json->depth - 1;

    KVT_ASSERT(json->depth > 0);
    KVT_ASSERT(json->is_array[level] == (name == NULL));
    if (json->has_member[level])
        fputs(json->is_compact ? ", " : ",", json->out);
    json->has_member[level] = true;
    print_indent(json);
    if (name != NULL) {
        print_text(json->out, name, strlen(name));
        fputs(": ", json->out);
    }
}

static void push(struct kvt_json *json, bool is_array)
{
    KVT_ASSERT(json->depth < KVT_JSON_DEPTH_MAX);
    fputc(is_array ? '[' : '{', json->out);
    json->is_array[json->depth] = is_array;
    json->has_member[json->depth] = false;
    json->depth++;
}

void kvt_json_begin(struct kvt_json *json, FILE *out, bool is_compact)
{
    *json = (struct kvt_json){.out = out, .is_compact = is_compact};
    push(json, false);
}

void kvt_json_end(struct kvt_json *json)
{
    KVT_ASSERT(json->depth > 0);
    json->depth--;
    if (json->has_member[json->depth])
        print_indent(json);
    fputc(json->is_array[json->depth] ? ']' : '}', json->out);
}

void kvt_json_finish(struct kvt_json *json)
{
    KVT_ASSERT(json->depth == 1);
    kvt_json_end(json);
    fputc('\n', json->out);
}

void kvt_json_object(struct kvt_json *json, const char *name)
{
    begin_value(json, name);
    push(json, false);
}

void kvt_json_array(struct kvt_json *json, const char *name)
{
    begin_value(json, name);
    push(json, true);
}

void kvt_json_u64(struct kvt_json *json, const char *name, uint64_t value)
{
    begin_value(json, name);
    fprintf(json->out, "%llu", (unsigned long long)value);
}

void kvt_json_bool(struct kvt_json *json, const char *name, bool value)
{
    begin_value(json, name);
    fputs(value ? "true" : "false", json->out);
}

void kvt_json_double(struct kvt_json *json, const char *name, double value)
{
    begin_value(json, name);
    if (isfinite(value))
        fprintf(json->out, "%.6g", value);
    else
        fputs("null", json->out);
}

void kvt_json_text(struct kvt_json *json, const char *name, const char *text)
{
    begin_value(json, name);
    if (text == NULL)
        fputs("null", json->out);
    else
        print_text(json->out, text, strlen(text));
}

void kvt_json_bytes(struct kvt_json *json, const char *name, const char *text, size_t bytes)
{
    begin_value(json, name);
    print_text(json->out, text == NULL ? "" : text, text == NULL ? 0 : bytes);
}

void kvt_json_hex(struct kvt_json *json, const char *name, const uint8_t *data, uint32_t bytes)
{
    begin_value(json, name);
    fputc('"', json->out);
    for (uint32_t i = 0; i < bytes; i++)
        fprintf(json->out, "%02x", data[i]);
    fputc('"', json->out);
}
