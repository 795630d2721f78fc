/* The loops of the CPU reference that are worth widening, in the order of memory. Each is compiled
 * for several widths of vectors (loops_x86.c; elsewhere once, loops_any.c) and gives the same bytes
 * in all. Any thread; buffers of one call do not overlap. */
#pragma once

#include "daemon/base/def.h"

struct kvt_loops {
    /* Of mix over @words_count words of 8 bytes at @data, the first being word @first_word. */
    uint64_t (*sum)(const unsigned char *data, uint64_t words_count, uint64_t first_word);
    /* Rows of neighbouring 2-byte elements with one scale; any alignment. kinds: 1 = BF16, 2 =
     * INT8, added up. */
    uint32_t (*magnitude)(const unsigned char *halves, uint64_t count, int kinds);
    void (*encode)(unsigned char *codes, const unsigned char *halves, uint64_t count, float scale,
                   int kinds);
    void (*decode)(unsigned char *halves, const unsigned char *codes, uint64_t count, float scale,
                   int kinds);
};

#define KVT_LOOPS_BF16 1
#define KVT_LOOPS_INT8 2

/* The widest that this CPU has. */
const struct kvt_loops *kvt_loops(void);
/* All that this CPU has, for tests; the plain ones are the first. */
uint32_t kvt_loops_list(const struct kvt_loops *list[static 4]);
