/* Sizes, shares and durations as people write them: "4GiB", "1.5 MiB", "10%", "250ms", "0".
 *
 * A number has digits, at most one point, and a unit; only 0 needs none. Units are exact: GB, G or
 * "sec" are refused, because half of all readers would read them otherwise. All arithmetic is
 * overflow-safe. Pure; any thread. */
#pragma once

#include "daemon/base/def.h"

enum {
    KVT_SIZE_E_SYNTAX = 1, /* not a number and a unit */
    KVT_SIZE_E_UNIT = 2,   /* no unit, or one that is not known */
    KVT_SIZE_E_RANGE = 3,  /* does not fit 64 bits, or more than 100 % */
};

#define KVT_SIZE_UNITS_TEXT "B, KiB, MiB, GiB, TiB"
#define KVT_DURATION_UNITS_TEXT "ns, us, ms, s, min, h"
#define KVT_SIZE_TEXT_BYTES 32u /* room for whatever the format functions write */

/* Bytes; a fraction of a byte is cut off. */
KVT_MUST_USE int kvt_size_parse(const char *text, uint64_t *ret_bytes);
/* The same, or "N%" of @whole_bytes. */
KVT_MUST_USE int kvt_size_parse_share(const char *text, uint64_t whole_bytes, uint64_t *ret_bytes);
KVT_MUST_USE int kvt_duration_parse(const char *text, uint64_t *ret_ns);

/* What is wrong, to follow the offending text: "has no unit or an unknown one". */
const char *kvt_size_error_text(int result);

/* The exact value in the largest unit that divides it: parse gives it back. */
void kvt_size_format(uint64_t bytes, char ret_text[KVT_SIZE_TEXT_BYTES]);
void kvt_duration_format(uint64_t ns, char ret_text[KVT_SIZE_TEXT_BYTES]);
/* Rounded to three digits, for messages: "1.46 GiB". */
void kvt_size_format_short(uint64_t bytes, char ret_text[KVT_SIZE_TEXT_BYTES]);
