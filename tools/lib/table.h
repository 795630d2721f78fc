/* Tables for people: cells are collected, then printed with columns as wide as their widest cell.
 *
 *   Tier   Used       Capacity    Blocks
 *   L1     12.0 MiB   64.0 MiB       191
 *
 * A table grows as rows come; when memory is out, cells are dropped and print says so with -ENOMEM.
 * One thread at a time. */
#pragma once

#include <stdio.h>

#include "daemon/base/def.h"

struct kvt_table;

enum kvt_table_style {
    KVT_TABLE_PLAIN,    /* aligned with blanks */
    KVT_TABLE_MARKDOWN, /* with bars, for documents */
};

#define KVT_TABLE_COLUMNS_MAX 24u

/* @align: one letter a column, 'l' or 'r' ("lrrr"): at most KVT_TABLE_COLUMNS_MAX of them. NULL: no
 * memory. Free with kvt_table_free. */
struct kvt_table *kvt_table_new(const char *align);
struct kvt_table *kvt_table_free(struct kvt_table *table); /* NULL-proof; returns NULL */

/* Appends one cell, printf-like; rows fill from left to right, the first row is the header. All
 * functions take a NULL table and do nothing. */
void kvt_table_cell(struct kvt_table *table, const char *format, ...) KVT_PRINTF(2, 3);
/* Fills the current row with empty cells; nothing when it is complete. */
void kvt_table_end_row(struct kvt_table *table);
/* Forgets all rows but the header. */
void kvt_table_clear(struct kvt_table *table);
/* Prints to @out, each line after @indent blanks. -ENOMEM when cells were lost, or 0. */
KVT_MUST_USE int kvt_table_print(const struct kvt_table *table, FILE *out,
                                 enum kvt_table_style style, uint32_t indent);

/* Numbers for people, in @buf; each returns buf. */
#define KVT_TEXT_BYTES 32u
const char *kvt_text_bytes(char buf[KVT_TEXT_BYTES], uint64_t bytes); /* "12.0 MiB", "512 B" */
const char *kvt_text_count(char buf[KVT_TEXT_BYTES], uint64_t count); /* "1,234,567" */
const char *kvt_text_ns(char buf[KVT_TEXT_BYTES], uint64_t ns);       /* "1.25 ms", "890 ns" */
/* @part of @whole: "36.6 %"; "-" when the whole is 0. */
const char *kvt_text_share(char buf[KVT_TEXT_BYTES], uint64_t part, uint64_t whole);
/* Decimal gigabytes a second: "1.25 GB/s"; "-" when @ns is 0. */
const char *kvt_text_rate(char buf[KVT_TEXT_BYTES], uint64_t bytes, uint64_t ns);
/* Lower-case hex of the first @bytes of @data: needs 2 * bytes + 1 in @buf. */
const char *kvt_text_hex(char *buf, const uint8_t *data, uint32_t bytes);
