/* Sets of 8 entries; a slot's set is chosen by a hash of its offset. Which entry makes way for a
 * new slot goes round in a set: arenas have as many slots as the ledger has room for, so it is
 * rare. */
#include "tiers/device/ledger.h"

#include <string.h>

#include "daemon/base/alloc.h"
#include "daemon/base/hash.h"

#define SET_ENTRIES 8u
#define OFFSET_NONE UINT64_MAX

struct entry {
    uint64_t offset_bytes;
    uint64_t content; /* hash of the key */
    uint64_t check;
    uint64_t is_check_known;
};
static_assert(sizeof(struct entry) == 32, "two entries a cache line");

struct set {
    struct entry entries[SET_ENTRIES];
};

struct kvt_ledger {
    struct set *sets;
    uint64_t sets_mask;
    uint32_t victim_idx;
};

int kvt_ledger_new(struct kvt_ledger **ret_ledger, uint64_t slots_count)
{
    struct kvt_ledger *ledger = kvt_alloc_zeroed(1, sizeof(*ledger));
    uint64_t sets_count = 1;

    if (ledger == NULL)
        return kvt_trace(-ENOMEM);
    while (sets_count < kvt_div_up(slots_count, SET_ENTRIES) && sets_count < UINT64_MAX / 2)
        sets_count *= 2;
    ledger->sets = kvt_alloc_zeroed(sets_count, sizeof(*ledger->sets));
    if (ledger->sets == NULL) {
        (void)kvt_ledger_free(ledger);
        return kvt_trace(-ENOMEM);
    }
    ledger->sets_mask = sets_count - 1;
    kvt_ledger_clear(ledger);
    *ret_ledger = ledger;
    return 0;
}

struct kvt_ledger *kvt_ledger_free(struct kvt_ledger *ledger)
{
    if (ledger != NULL)
        kvt_free(ledger->sets);
    kvt_free(ledger);
    return NULL;
}

void kvt_ledger_clear(struct kvt_ledger *ledger)
{
    for (uint64_t s = 0; s <= ledger->sets_mask; s++)
        for (uint32_t e = 0; e < SET_ENTRIES; e++)
            ledger->sets[s].entries[e].offset_bytes = OFFSET_NONE;
}

/* What makes content different: identity is left out, a caller may not know it. */
static uint64_t content_of(const struct kvt_slot_key *key)
{
    uint64_t words[4] = {key->block_id, key->generation, key->payload_bytes,
                         (uint64_t)key->component << 16 | key->rank};

    return kvt_hash64(words, sizeof(words), 0);
}

static struct set *set_of(const struct kvt_ledger *ledger, uint64_t offset_bytes)
{
    /* A multiplication spreads offsets, whose low bits are all zero; the high half is taken. */
    return &ledger->sets[(offset_bytes * 0x9e3779b97f4a7c15u >> 32) & ledger->sets_mask];
}

static struct entry *entry_find(const struct kvt_ledger *ledger, uint64_t offset_bytes)
{
    struct set *set = set_of(ledger, offset_bytes);

    KVT_ASSERT(offset_bytes != OFFSET_NONE);
    for (uint32_t e = 0; e < SET_ENTRIES; e++)
        if (set->entries[e].offset_bytes == offset_bytes)
            return &set->entries[e];
    return NULL;
}

static struct entry *entry_make(struct kvt_ledger *ledger, uint64_t offset_bytes)
{
    struct entry *entry = entry_find(ledger, offset_bytes);
    struct set *set = set_of(ledger, offset_bytes);

    for (uint32_t e = 0; entry == NULL && e < SET_ENTRIES; e++)
        if (set->entries[e].offset_bytes == OFFSET_NONE)
            entry = &set->entries[e];
    if (entry == NULL)
        entry = &set->entries[ledger->victim_idx++ % SET_ENTRIES];
    entry->offset_bytes = offset_bytes;
    return entry;
}

void kvt_ledger_put(struct kvt_ledger *ledger, uint64_t offset_bytes,
                    const struct kvt_slot_key *key, bool check_is_known, uint64_t check)
{
    struct entry *entry = entry_make(ledger, offset_bytes);

    entry->content = content_of(key);
    entry->is_check_known = check_is_known;
    entry->check = check;
}

void kvt_ledger_forget(struct kvt_ledger *ledger, uint64_t offset_bytes)
{
    struct entry *entry = entry_find(ledger, offset_bytes);

    if (entry != NULL)
        entry->offset_bytes = OFFSET_NONE;
}

enum kvt_ledger_answer kvt_ledger_get(const struct kvt_ledger *ledger, uint64_t offset_bytes,
                                      const struct kvt_slot_key *key, uint64_t *ret_check)
{
    const struct entry *entry = entry_find(ledger, offset_bytes);

    if (entry == NULL)
        return KVT_LEDGER_UNKNOWN;
    if (entry->content != content_of(key))
        return KVT_LEDGER_OTHER;
    if (!entry->is_check_known)
        return KVT_LEDGER_UNCHECKED;
    *ret_check = entry->check;
    return KVT_LEDGER_CHECK;
}
