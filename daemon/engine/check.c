/* The invariants of the owner loop: every counter equals a recount, every lease of the tree is
 * accounted for, and the modules below agree with themselves. Tests and debug builds call it. */
#include "daemon/engine/internal.h"

static bool fail(const char **ret_why, const char *why)
{
    *ret_why = why;
    return false;
}

static bool check_leases(struct kvt_engine *engine, const char **ret_why)
{
    uint64_t used = 0, live = 0, holds = 0, groups_live = 0;
    struct kvt_radix_stats radix;

    for (uint32_t i = 0; i < engine->leases_made; i++) {
        const struct eng_lease *lease = &engine->leases[i];

        used += lease->is_used;
        live += lease->is_live;
        if (lease->is_live && !lease->is_used)
            return fail(ret_why, "a live lease on the free list");
        if (lease->is_live && lease->runs == 0 &&
            (lease->timer.heap_pos == 0) != (lease->first_hold != 0))
            return fail(ret_why, "an idle lease without a deadline, or one that holds with one");
    }
    kvt_list_for_each (link, &engine->runs)
        holds += KVT_CONTAINER_OF(link, struct eng_run, link)->holds_path;
    kvt_list_for_each (link, &engine->groups)
        groups_live += KVT_CONTAINER_OF(link, struct eng_group, link)->leases_count;
    if (used != engine->leases_count)
        return fail(ret_why, "leases: the count is not the recount");
    if (groups_live > live)
        return fail(ret_why, "leases: groups count more than are live");
    kvt_radix_stats(engine->radix, &radix);
    if (radix.leases > used + holds +
                           kvt_store_is_holding(
                               engine->store)) /* less: those of detached parts are gone already */
        return fail(ret_why, "the tree holds leases that nobody has");
    return true;
}

static bool check_tickets(struct kvt_engine *engine, const char **ret_why)
{
    uint64_t used = 0, entries = 0;

    for (uint32_t i = 0; i < engine->tickets_made; i++) {
        const struct eng_ticket *ticket = &engine->tickets[i];
        uint32_t count = 0, open = 0;

        used += ticket->is_used;
        if (ticket->is_live && !ticket->is_used)
            return fail(ret_why, "a live ticket on the free list");
        for (uint32_t e = ticket->is_used ? ticket->first_entry : 0; e != 0;
             e = engine->entries[e - 1].ticket_next) {
            count++;
            open += !engine->entries[e - 1].is_complete;
            if (engine->entries[e - 1].ticket_idx != i)
                return fail(ret_why, "an entry of another ticket");
        }
        if (ticket->is_used && count != ticket->entries_count)
            return fail(ret_why, "a ticket's entries: the count is not the recount");
        if (ticket->is_live && open != ticket->open_count)
            return fail(ret_why, "a ticket's open entries: the count is not the recount");
        entries += count;
    }
    if (used != engine->tickets_count || entries != engine->entries_count)
        return fail(ret_why, "tickets or entries: the count is not the recount");
    return true;
}

static bool check_groups(struct kvt_engine *engine, const char **ret_why)
{
    uint64_t sessions = 0, groups = 0;

    kvt_list_for_each (link, &engine->groups) {
        struct eng_group *group = KVT_CONTAINER_OF(link, struct eng_group, link);
        uint64_t leased[KVT_TIERS_COUNT] = {0}, reserved = 0, runs = 0;

        groups++;
        sessions += group->sessions_count;
        if (group->sessions_count == 0)
            return fail(ret_why, "an engine without sessions");
        for (uint32_t i = 0; i < engine->leases_made; i++) {
            for (uint32_t tier = 0; tier < KVT_TIERS_COUNT && engine->leases[i].is_live; tier++)
                leased[tier] +=
                    engine->leases[i].group == group ? engine->leases[i].bytes[tier] : 0;
        }
        for (uint32_t i = 0; i < engine->tickets_made; i++)
            reserved += engine->tickets[i].is_live && engine->tickets[i].group == group
                            ? engine->tickets[i].bytes
                            : 0;
        for (uint32_t tier = 0; tier < KVT_TIERS_COUNT; tier++) {
            if (leased[tier] != group->leased_bytes[tier])
                return fail(ret_why, "leased bytes of an engine: not the recount");
        }
        kvt_list_for_each (run, &engine->runs)
            runs += KVT_CONTAINER_OF(run, struct eng_run, link)->session->group == group;
        if (runs != group->runs_count)
            return fail(ret_why, "requests of an engine: the count is not the recount");
        if (reserved != group->reserved_bytes)
            return fail(ret_why, "reserved bytes of an engine: not the recount");
    }
    if (sessions != engine->sessions_count || groups != engine->groups_count)
        return fail(ret_why, "sessions or engines: the count is not the recount");
    return true;
}

static bool check_runs(struct kvt_engine *engine, const char **ret_why)
{
    uint64_t runs = 0, ops = 0, jobs = engine->background_count;

    kvt_list_for_each (link, &engine->runs) {
        struct eng_run *run = KVT_CONTAINER_OF(link, struct eng_run, link);
        uint32_t count = 0;

        if (run->magic != KVT_RUN_MAGIC)
            return fail(ret_why, "a freed run is listed");
        runs++;
        ops += run->op != NULL;
        kvt_list_for_each (job, &run->jobs)
            count++;
        if (count != run->jobs_count)
            return fail(ret_why, "jobs of a request: the count is not the recount");
        if (run->op != NULL && run->timer.heap_pos == 0 && !run->is_ending)
            return fail(ret_why, "a request without a deadline");
        jobs += count;
    }
    if (runs != engine->runs_count || ops != engine->ops_count || jobs != engine->jobs_count)
        return fail(ret_why, "requests or jobs: the count is not the recount");
    return true;
}

bool kvt_engine_check(struct kvt_engine *engine, const char **ret_why)
{
    const char *why = eng_holds_check(engine);

    if (why != NULL)
        return fail(ret_why, why);
    if (!eng_heap_check(&engine->heap))
        return fail(ret_why, "the heap of deadlines is not a heap");
    return kvt_radix_check(engine->radix, ret_why) && kvt_store_check(engine->store, ret_why) &&
           check_leases(engine, ret_why) && check_tickets(engine, ret_why) &&
           check_groups(engine, ret_why) && check_runs(engine, ret_why);
}

void kvt_engine_counts(const struct kvt_engine *engine, struct kvt_engine_counts *ret_counts)
{
    struct kvt_store_stats store;

    kvt_store_stats(engine->store, &store);
    *ret_counts = (struct kvt_engine_counts){.sessions = engine->sessions_count,
                                             .engines = engine->groups_count,
                                             .leases = engine->leases_count,
                                             .tickets = engine->tickets_count,
                                             .reserved_cells = store.claimed_cells,
                                             .ops = engine->ops_count,
                                             .jobs = engine->jobs_count,
                                             .inflight = kvt_store_inflight(engine->store)};
}

void kvt_engine_store_stats(const struct kvt_engine *engine, struct kvt_store_stats *ret_stats)
{
    kvt_store_stats(engine->store, ret_stats);
}
