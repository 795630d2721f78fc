/* What each slot of an arena was filled with: whose content, and the check (kvt_check64) of the
 * bytes that were moved into it. A copy out of the slot is compared with it: bytes that are not
 * those that went in (a torn copy, a slot that somebody wrote to, a copy from the wrong place) are
 * BAD_SLOT, a miss, and so is a slot of another generation.
 *
 * A cache of bounded size, 8 entries a set: an entry that is pushed out leaves its slot unchecked,
 * which is counted, not an error. Tier-thread-only. */
#pragma once

#include "tiers/slot.h"

struct kvt_ledger;

/* Room for about @slots_count entries of 32 bytes. -ENOMEM or 0. */
KVT_MUST_USE int kvt_ledger_new(struct kvt_ledger **ret_ledger, uint64_t slots_count);
struct kvt_ledger *kvt_ledger_free(struct kvt_ledger *ledger); /* NULL-proof */
void kvt_ledger_clear(struct kvt_ledger *ledger);

/* @check_is_known false: only whose content it is. */
void kvt_ledger_put(struct kvt_ledger *ledger, uint64_t offset_bytes,
                    const struct kvt_slot_key *key, bool check_is_known, uint64_t check);
/* Before a fill is started: what was there is nobody's. */
void kvt_ledger_forget(struct kvt_ledger *ledger, uint64_t offset_bytes);

enum kvt_ledger_answer {
    KVT_LEDGER_UNKNOWN = 0,   /* no entry */
    KVT_LEDGER_UNCHECKED = 1, /* the content is @key's; its check is not known */
    KVT_LEDGER_CHECK = 2,     /* the content is @key's; *ret_check is set */
    KVT_LEDGER_OTHER = 3,     /* somebody else's content */
};
enum kvt_ledger_answer kvt_ledger_get(const struct kvt_ledger *ledger, uint64_t offset_bytes,
                                      const struct kvt_slot_key *key, uint64_t *ret_check);
