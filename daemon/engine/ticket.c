/* Tickets: the right to fill the missing copies of a path. A ticket is a set of entries, one a
 * claimed cell, found by (ticket, component, block index) through one hash table for all tickets.
 * It ends when every cell is complete, on Release, on its deadline (not under a running demote),
 * with its engine or with a Reset; cells that are not complete are then unclaimed, in slices.
 *
 *   free -> live -> dying (handle is dead, entries are being given back) -> free
 *
 * (ticket, shard, block) is idempotent: an entry knows which shards are filled and which are being
 * filled. A job names its entry by (ticket, generation, entry) and finds nothing when the ticket
 * has ended meanwhile. */
#include "daemon/engine/internal.h"

static uint32_t bucket_of(const struct kvt_engine *engine, uint32_t ticket_idx, uint32_t component,
                          uint32_t block_idx)
{
    const uint32_t key[3] = {ticket_idx, component, block_idx};

    return (uint32_t)kvt_hash64(key, sizeof(key), engine->config.seed) &
           (KVT_ENGINE_ENTRIES_MAX - 1u);
}

struct eng_ticket *eng_ticket_new(struct kvt_engine *engine, struct eng_session *session,
                                  bool is_internal)
{
    struct eng_ticket *ticket;
    uint32_t generation;

    if (!kvt_list_is_empty(&engine->tickets_free)) {
        ticket = KVT_CONTAINER_OF(engine->tickets_free.next, struct eng_ticket, link);
        kvt_list_remove(&ticket->link);
    } else if (engine->tickets_made < KVT_ENGINE_TICKETS_MAX) {
        ticket = &engine->tickets[engine->tickets_made];
        ticket->idx = engine->tickets_made++;
    } else {
        return NULL;
    }
    KVT_ASSERT(!ticket->is_used && ticket->first_entry == 0);
    generation = ticket->generation + 1;
    *ticket = (struct eng_ticket){.idx = ticket->idx,
                                  .generation = generation != 0 ? generation : 1,
                                  .is_live = true,
                                  .is_used = true,
                                  .is_internal = is_internal,
                                  .group = session->group,
                                  .session_idx = session->idx,
                                  .session_generation = session->generation,
                                  .epoch = session->ns->epoch};
    ticket->timer.kind = ENG_TIMER_TICKET;
    kvt_list_init(&ticket->link);
    kvt_list_push_back(&ticket->group->tickets, &ticket->link);
    ticket->group->tickets_count++;
    ticket->group->refs++;
    session->tickets_count++;
    engine->tickets_count++;
    return ticket;
}

bool eng_entry_has_room(const struct kvt_engine *engine)
{
    return engine->entries_free != 0 || engine->entries_made < KVT_ENGINE_ENTRIES_MAX;
}

void eng_ticket_add(struct kvt_engine *engine, struct eng_ticket *ticket, uint32_t component,
                    uint32_t block_idx, struct kvt_cell cell)
{
    uint32_t bucket = bucket_of(engine, ticket->idx, component, block_idx);
    uint32_t number = engine->entries_free;
    struct eng_entry *entry;
    uint64_t bytes = eng_cell_bytes(ticket->group->ns, component);

    KVT_ASSERT(ticket->is_live && eng_entry_has_room(engine));
    if (number != 0)
        engine->entries_free = engine->entries[number - 1].ticket_next;
    else
        number = ++engine->entries_made;
    entry = &engine->entries[number - 1];
    *entry = (struct eng_entry){.hash_next = engine->entry_buckets[bucket],
                                .ticket_next = ticket->first_entry,
                                .ticket_idx = ticket->idx,
                                .block_idx = block_idx,
                                .cell = cell,
                                .component = (uint8_t)component};
    engine->entry_buckets[bucket] = number;
    ticket->first_entry = number;
    ticket->entries_count++;
    ticket->open_count++;
    ticket->bytes += bytes;
    ticket->group->reserved_bytes += bytes;
    engine->entries_count++;
    eng_count(engine, KVT_COUNTER_RESERVED_CELLS, 1);
}

struct eng_entry *eng_ticket_find(struct kvt_engine *engine, const struct eng_ticket *ticket,
                                  uint32_t component, uint32_t block_idx)
{
    uint32_t number = engine->entry_buckets[bucket_of(engine, ticket->idx, component, block_idx)];

    while (number != 0) {
        struct eng_entry *entry = &engine->entries[number - 1];

        if (entry->ticket_idx == ticket->idx && entry->component == component &&
            entry->block_idx == block_idx)
            return entry;
        number = entry->hash_next;
    }
    return NULL;
}

uint32_t eng_entry_number(const struct kvt_engine *engine, const struct eng_entry *entry)
{
    return (uint32_t)(entry - engine->entries) + 1;
}

struct eng_entry *eng_entry_at(struct kvt_engine *engine, uint32_t ticket_idx, uint32_t generation,
                               uint32_t entry)
{
    const struct eng_ticket *ticket = &engine->tickets[ticket_idx];

    if (entry == 0 || !ticket->is_live || ticket->generation != generation)
        return NULL;
    KVT_ASSERT(engine->entries[entry - 1].ticket_idx == ticket_idx);
    return &engine->entries[entry - 1];
}

static void entry_free(struct kvt_engine *engine, uint32_t number)
{
    struct eng_entry *entry = &engine->entries[number - 1];
    uint32_t *at = &engine->entry_buckets[bucket_of(engine, entry->ticket_idx, entry->component,
                                                    entry->block_idx)];

    while (*at != number) {
        KVT_ASSERT(*at != 0);
        at = &engine->entries[*at - 1].hash_next;
    }
    *at = entry->hash_next;
    entry->ticket_next = engine->entries_free;
    engine->entries_free = number;
    engine->entries_count--;
}

/* Gives back up to *inout_budget entries; true when none is left and the record is free. */
static bool ticket_bury(struct kvt_engine *engine, struct eng_ticket *ticket,
                        uint32_t *inout_budget)
{
    KVT_ASSERT(!ticket->is_live && ticket->is_used);
    while (ticket->first_entry != 0 && *inout_budget > 0) {
        uint32_t number = ticket->first_entry;
        struct eng_entry *entry = &engine->entries[number - 1];
        struct kvt_cell cell = entry->cell;
        bool is_complete = entry->is_complete;

        ticket->first_entry = entry->ticket_next;
        ticket->entries_count--;
        entry_free(engine, number);
        (*inout_budget)--;
        if (!is_complete)
            kvt_store_unclaim(engine->store, cell);
    }
    if (ticket->first_entry != 0 || ticket->runs > 0)
        return false;
    kvt_list_remove(&ticket->link);
    ticket->is_used = false;
    engine->tickets_count--;
    kvt_list_push_back(&engine->tickets_free, &ticket->link);
    return true;
}

static void ticket_kill(struct kvt_engine *engine, struct eng_ticket *ticket)
{
    struct eng_session *session =
        eng_session_at(engine, ticket->session_idx, ticket->session_generation);

    KVT_ASSERT(ticket->is_live);
    ticket->is_live = false;
    eng_timer_clear(&engine->heap, &ticket->timer);
    ticket->group->reserved_bytes -= ticket->bytes;
    ticket->bytes = 0;
    ticket->group->tickets_count--;
    eng_group_unref(ticket->group);
    ticket->group = NULL;
    if (session != NULL)
        session->tickets_count--;
}

void eng_ticket_end(struct kvt_engine *engine, struct eng_ticket *ticket)
{
    uint32_t budget = KVT_ENGINE_SLICE;

    ticket_kill(engine, ticket);
    kvt_list_remove(&ticket->link);
    kvt_list_push_back(&engine->tickets_dying, &ticket->link);
    (void)ticket_bury(engine, ticket, &budget);
}

void eng_entry_done(struct kvt_engine *engine, struct eng_entry *entry, uint32_t shard,
                    bool is_filled)
{
    struct eng_ticket *ticket = &engine->tickets[entry->ticket_idx];
    const struct eng_ns *ns = ticket->group->ns;
    uint64_t bytes = eng_cell_bytes(ns, entry->component);

    KVT_ASSERT(ticket->is_live && (entry->filling_mask & 1u << shard) != 0);
    entry->filling_mask &= ~(1u << shard);
    if (!is_filled)
        return;
    entry->filled_mask |= 1u << shard;
    if (entry->is_complete || entry->filled_mask != eng_shards_mask(ns, entry->component))
        return;
    entry->is_complete = true;
    ticket->bytes -= bytes;
    ticket->group->reserved_bytes -= bytes;
    if (--ticket->open_count == 0 && ticket->runs == 0)
        eng_ticket_end(engine, ticket);
}

void eng_ticket_use(struct kvt_engine *engine, struct eng_ticket *ticket)
{
    KVT_ASSERT(ticket->is_used);
    (void)engine;
    ticket->runs++;
}

void eng_ticket_unuse(struct kvt_engine *engine, struct eng_ticket *ticket)
{
    uint32_t budget = KVT_ENGINE_SLICE;

    KVT_ASSERT(ticket->runs > 0);
    if (--ticket->runs > 0)
        return;
    if (!ticket->is_live) {
        (void)ticket_bury(engine, ticket, &budget);
    } else if (ticket->is_internal || ticket->open_count == 0) {
        eng_ticket_end(engine, ticket);
    } else if (ticket->timer.at_ns <= engine->now_ns) {
        eng_ticket_expire(engine, ticket);
    }
}

void eng_ticket_expire(struct kvt_engine *engine, struct eng_ticket *ticket)
{
    if (ticket->runs > 0) { /* its demote ends it: eng_ticket_unuse */
        uint64_t at_ns = ticket->timer.at_ns;

        eng_timer_clear(&engine->heap, &ticket->timer);
        ticket->timer.at_ns = at_ns;
        return;
    }
    eng_count(engine, KVT_COUNTER_TICKETS_EXPIRED, 1);
    eng_ticket_end(engine, ticket);
}

bool eng_tickets_slice(struct kvt_engine *engine)
{
    struct kvt_list *list = &engine->tickets_dying;
    struct kvt_list *last = list->prev;
    uint32_t budget = KVT_ENGINE_SLICE;

    for (uint32_t i = 0; i < KVT_ENGINE_SLICE && !kvt_list_is_empty(list); i++) {
        struct kvt_list *link = list->next;
        struct eng_ticket *ticket = KVT_CONTAINER_OF(link, struct eng_ticket, link);

        if (ticket->is_live)
            ticket_kill(engine, ticket);
        if (!ticket_bury(engine, ticket, &budget)) {
            if (budget == 0)
                return true;
            kvt_list_remove(link);
            kvt_list_push_back(list, link);
        }
        if (link == last)
            return false;
    }
    return !kvt_list_is_empty(list);
}

/* Everything that a group holds is as good as gone from now on; the records follow in slices. A
 * Reset of many engines' leases costs O(engines) here. */
static void splice(struct kvt_list *from, struct kvt_list *to)
{
    if (kvt_list_is_empty(from))
        return;
    from->next->prev = to->prev;
    to->prev->next = from->next;
    from->prev->next = to;
    to->prev = from->prev;
    kvt_list_init(from);
}

void eng_group_drop_all(struct kvt_engine *engine, struct eng_group *group)
{
    splice(&group->leases, &engine->leases_dying);
    splice(&group->tickets, &engine->tickets_dying);
}
