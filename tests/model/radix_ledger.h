/* Where every tag is that a run gave to a block: at its block, replaced, or gone. It hears of the
 * tags that leave from the tree, of the blocks that are forgotten from the oracle, and compares:
 * what leaves was there, leaves once, from the right place and not before what is below it; and
 * what the oracle has no more has left. */
#pragma once

#include "tests/model/radix_oracle.h"

#define LEDGER_TAGS_MAX (1u << 18)

struct ledger_entry {
    uint32_t idx; /* of the oracle's block */
    uint32_t ns;  /* as the tree numbers it */
    uint32_t depth;
    enum { LEDGER_HELD = 1, LEDGER_REPLACED, LEDGER_GONE } state;
};

struct ledger {
    struct oracle *oracle;
    const char *wrong;  /* the first thing that was */
    uint32_t detaching; /* a block that is cut off right now: those above it may go first */
    uint32_t count, gone_count;
    uint64_t gone_total;
    struct ledger_entry entries[LEDGER_TAGS_MAX];
    uint32_t gone[ORACLE_BLOCKS_MAX]; /* entries, since the last look */
};

void ledger_init(struct ledger *ledger, struct oracle *oracle);
/* A new tag for the block; what it had is replaced. 0: no more tags. */
uint64_t ledger_give(struct ledger *ledger, uint32_t idx, struct kvt_radix_ns ns);
/* The block has no tag from now on. */
void ledger_take(struct ledger *ledger, uint32_t idx);
/* What the tree should say of a block that the oracle has. */
uint64_t ledger_tag(const struct ledger *ledger, uint32_t idx);
/* The tree's hook; @ctx is the ledger. */
void ledger_hear(void *ctx, const struct kvt_radix_gone *gone);
/* After each operation: NULL, or what is wrong. */
const char *ledger_compare(struct ledger *ledger);
/* After everything is reaped: NULL, or what is wrong. */
const char *ledger_close(struct ledger *ledger);
