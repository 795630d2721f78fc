/* Writes JSON to a stream as it goes: no tree, no memory, integers of 64 bits exact (a double, as
 * most JSON libraries keep, is not). Pretty-printed with two blanks a level, or in one line.
 *
 *   struct kvt_json json;
 *   kvt_json_begin(&json, stdout, false);      {
 *   kvt_json_u64(&json, "requests", 12);         "requests": 12,
 *   kvt_json_array(&json, "tiers");              "tiers": [ ...
 *   ...
 *   kvt_json_end(&json);                         ]
 *   kvt_json_finish(&json);                    }
 *
 * Names are given inside objects and NULL inside arrays. Nesting is asserted, not reported: it is
 * the caller's own logic. One thread at a time. Errors of the stream: ferror of it, at the end. */
#pragma once

#include <stdio.h>

#include "daemon/base/def.h"

#define KVT_JSON_DEPTH_MAX 32u

struct kvt_json {
    FILE *out;
    bool is_compact;
    uint32_t depth;
    bool is_array[KVT_JSON_DEPTH_MAX];
    bool has_member[KVT_JSON_DEPTH_MAX];
};

void kvt_json_begin(struct kvt_json *json, FILE *out, bool is_compact); /* opens the top object */
void kvt_json_finish(struct kvt_json *json); /* closes it and ends the line */

void kvt_json_object(struct kvt_json *json, const char *name);
void kvt_json_array(struct kvt_json *json, const char *name);
void kvt_json_end(struct kvt_json *json); /* of the innermost object or array */

void kvt_json_u64(struct kvt_json *json, const char *name, uint64_t value);
void kvt_json_bool(struct kvt_json *json, const char *name, bool value);
void kvt_json_double(struct kvt_json *json, const char *name, double value); /* not finite: null */
void kvt_json_text(struct kvt_json *json, const char *name, const char *text); /* NULL: null */
/* @bytes of text that is not terminated; invalid UTF-8 is written as U+FFFD. */
void kvt_json_bytes(struct kvt_json *json, const char *name, const char *text, size_t bytes);
void kvt_json_hex(struct kvt_json *json, const char *name, const uint8_t *data, uint32_t bytes);
