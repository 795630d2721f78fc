#include "tests/model/radix_ledger.h"

#define NONE UINT32_MAX

void ledger_init(struct ledger *ledger, struct oracle *oracle)
{
    ledger->oracle = oracle;
    ledger->wrong = NULL;
    ledger->detaching = NONE;
    ledger->count = ledger->gone_count = 0;
    ledger->gone_total = 0;
}

/* All 64 bits are used, so that none can get lost on the way. */
static uint64_t tag_of(uint32_t entry)
{
    return (uint64_t)~entry << 32 | (entry + 1);
}

static struct ledger_entry *entry_of(struct ledger *ledger, uint64_t tag)
{
    uint32_t entry = (uint32_t)tag - 1;

    return entry < ledger->count && tag == tag_of(entry) ? &ledger->entries[entry] : NULL;
}

void ledger_take(struct ledger *ledger, uint32_t idx)
{
    struct oracle_block *block = &ledger->oracle->blocks[idx];

    if (block->tag != 0)
        entry_of(ledger, block->tag)->state = LEDGER_REPLACED;
    block->tag = 0;
}

uint64_t ledger_give(struct ledger *ledger, uint32_t idx, struct kvt_radix_ns ns)
{
    struct oracle_block *block = &ledger->oracle->blocks[idx];

    ledger_take(ledger, idx);
    if (ledger->count == LEDGER_TAGS_MAX)
        return 0;
    ledger->entries[ledger->count] = (struct ledger_entry){
        .idx = idx, .ns = ns.idx, .depth = block->depth, .state = LEDGER_HELD};
    block->tag = tag_of(ledger->count++);
    return block->tag;
}

uint64_t ledger_tag(const struct ledger *ledger, uint32_t idx)
{
    const uint64_t tag = ledger->oracle->blocks[idx].tag;

    if (tag == 0 || ledger->entries[(uint32_t)tag - 1].state != LEDGER_HELD)
        return 0;
    return tag;
}

static bool has_tag_below(const struct ledger *ledger, uint32_t idx)
{
    uint32_t child = ledger->oracle->blocks[idx].first_child;

    for (; child != NONE; child = ledger->oracle->blocks[child].next) {
        if (child != ledger->detaching && ledger_tag(ledger, child) != 0)
            return true;
    }
    return false;
}

void ledger_hear(void *ctx, const struct kvt_radix_gone *gone)
{
    struct ledger *ledger = ctx;
    struct ledger_entry *entry = entry_of(ledger, gone->tag);
    const char *wrong = NULL;

    ledger->gone_total++;
    if (entry == NULL)
        wrong = "a tag left that nobody gave";
    else if (entry->state == LEDGER_GONE)
        wrong = "a tag left twice";
    else if (entry->state == LEDGER_REPLACED)
        wrong = "a tag left that was replaced";
    else if (entry->ns != gone->ns.idx || entry->depth != gone->block_idx)
        wrong = "a tag left from another place";
    else if (has_tag_below(ledger, entry->idx))
        wrong = "a tag left before one below it";
    else if (ledger->gone_count == ORACLE_BLOCKS_MAX)
        wrong = "more tags left than there were blocks";
    if (wrong == NULL) {
        entry->state = LEDGER_GONE;
        ledger->gone[ledger->gone_count++] = (uint32_t)gone->tag - 1;
    } else if (ledger->wrong == NULL) {
        ledger->wrong = wrong;
    }
}

const char *ledger_compare(struct ledger *ledger)
{
    struct oracle *oracle = ledger->oracle;

    for (uint32_t i = 0; i < oracle->forgotten_count && ledger->wrong == NULL; i++) {
        if (entry_of(ledger, oracle->forgotten[i])->state != LEDGER_GONE)
            ledger->wrong = "a block is gone and its tag did not leave";
    }
    for (uint32_t i = 0; i < ledger->gone_count && ledger->wrong == NULL; i++) {
        const struct ledger_entry *entry = &ledger->entries[ledger->gone[i]];
        const struct oracle_block *block = &oracle->blocks[entry->idx];

        if (!block->is_used || block->tag != tag_of(ledger->gone[i]))
            continue;
        if (!block->is_detached) /* the tree reaps those bit by bit, the oracle at the end */
            ledger->wrong = "a tag left and its block is live";
        for (uint32_t c = 0; c < KVT_COMPONENTS_MAX; c++) {
            if (block->mask[c] != 0)
                ledger->wrong = "a tag left before its block's copies were given back";
        }
    }
    oracle->forgotten_count = 0;
    ledger->gone_count = 0;
    return ledger->wrong;
}

const char *ledger_close(struct ledger *ledger)
{
    for (uint32_t i = 0; i < ledger->count && ledger->wrong == NULL; i++) {
        if (ledger->entries[i].state == LEDGER_HELD)
            ledger->wrong = "nothing is left and a tag did not leave";
    }
    return ledger->wrong;
}
