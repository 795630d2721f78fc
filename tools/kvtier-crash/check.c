/* The check after a restart, before anything new is stored: whatever is served now was there before
 * the kill. Generations:
 *
 *   ... [gone_below)             were reset, and told so: nothing may be served
 *   [gone_below, generation)     a Reset was under way: anything right may be served
 *   generation                   what was acknowledged durable must be served (when keeping) */
#include <errno.h>
#include <stdio.h>

#include "daemon/base/alloc.h"
#include "tools/kvtier-crash/crash.h"

#define GONE_GENERATIONS 2u /* that are looked at: the last ones */

struct check {
    const struct crash_options *options;
    struct crash_journal journal;
    struct crash_engine engine;
    struct crash_totals totals;
};

static void fault(struct check *check, const struct crash_place *place, const char *what)
{
    char *first = check->totals.first_fault;

    if (first[0] == '\0')
        (void)snprintf(first, sizeof(check->totals.first_fault),
                       "%s: namespace %s, generation %u, talk %u", what,
                       crash_spaces[place->space].name, place->generation, place->talk);
}

static void take_read(struct check *check, const struct crash_place *place, uint64_t promised,
                      const struct crash_read *read)
{
    struct crash_totals *totals = &check->totals;
    uint64_t lost = read->boundary_blocks < promised ? promised - read->boundary_blocks : 0;

    totals->reads++;
    totals->served_blocks += read->served_blocks;
    totals->missed_blocks += read->missed_blocks;
    totals->wrong_bytes += read->wrong_bytes;
    totals->wrong_blocks += read->wrong_bytes > 0;
    for (uint32_t t = 0; t < KVT_API_TIERS; t++)
        totals->served_from[t] += read->served_from[t];
    if (read->wrong_bytes > 0 && totals->first_fault[0] == '\0')
        (void)snprintf(totals->first_fault, sizeof(totals->first_fault), "%s", check->engine.why);
    lost += read->missed_below;
    totals->promised_blocks += promised;
    totals->lost_blocks += lost;
    if (lost > 0) {
        char what[256];

        (void)snprintf(what, sizeof(what), "durable up to block %llu, served up to %llu (%s)",
                       (unsigned long long)promised, (unsigned long long)read->boundary_blocks,
                       read->first_missed);
        fault(check, place, what);
    }
    if (place->generation < check->journal.spaces[place->space].gone_below &&
        read->boundary_blocks > 0) {
        totals->stale_blocks += read->boundary_blocks;
        fault(check, place, "served after a Reset that was answered");
    }
}

static enum crash_result check_talk(struct check *check, struct crash_place *place)
{
    const struct crash_space_state *space = &check->journal.spaces[place->space];
    const struct crash_talk *talk =
        crash_journal_talk(&check->journal, place->space, place->generation, place->talk);
    bool is_promised = check->options->is_keeping && place->generation == space->generation;
    uint64_t promised = is_promised ? talk->durable_blocks : 0;
    struct crash_read read;
    enum crash_result result;

    if (talk->tried_blocks == 0)
        return CRASH_OK;
    place->first = 0;
    place->end = talk->tried_blocks;
    result = crash_engine_read(&check->engine, place, promised, &read);
    if (result == CRASH_REFUSED) { /* no one else is there: nothing may be full */
        (void)snprintf(check->engine.why, sizeof(check->engine.why), "refused: code %d, %.200s",
                       (int)check->engine.op.code, check->engine.op.message);
        return CRASH_BROKEN;
    }
    if (result == CRASH_OK)
        take_read(check, place, promised, &read);
    return result;
}

static enum crash_result check_all(struct check *check)
{
    enum crash_result result = crash_engine_open(&check->engine);

    for (uint32_t s = 0; s < CRASH_SPACES && result == CRASH_OK; s++) {
        const struct crash_space_state *space = &check->journal.spaces[s];
        uint32_t first = space->gone_below - KVT_MIN(space->gone_below, GONE_GENERATIONS);

        for (uint32_t g = first; g <= space->generation && result == CRASH_OK; g++) {
            struct crash_place place = {.space = s, .generation = g};

            for (; place.talk < CRASH_TALKS && result == CRASH_OK; place.talk++)
                result = check_talk(check, &place);
        }
    }
    if (result == CRASH_OK)
        result =
            crash_engine_left(&check->engine, check->options->is_out_allowed, &check->totals.left);
    return result;
}

int crash_check(const struct crash_options *options, struct crash_totals *ret)
{
    kvt_autofree struct check *check = kvt_alloc_zeroed(1, sizeof(*check));
    enum crash_result result;
    int r;

    if (check == NULL)
        return kvt_trace(-ENOMEM);
    check->options = options;
    crash_engine_init(&check->engine, options);
    r = crash_journal_init(&check->journal, options->journal_path);
    if (r == 0) {
        result = check_all(check);
        crash_engine_close(&check->engine);
        check->totals.is_gone = result == CRASH_GONE;
        if (result == CRASH_BROKEN && check->totals.first_fault[0] == '\0')
            (void)snprintf(check->totals.first_fault, sizeof(check->totals.first_fault), "%s",
                           check->engine.why);
        if (check->totals.left > 0 && check->totals.first_fault[0] == '\0')
            (void)snprintf(
                check->totals.first_fault, sizeof(check->totals.first_fault),
                "%llu leases, tickets, reservations, pins or tiers out of service are left",
                (unsigned long long)check->totals.left);
        *ret = check->totals;
    }
    crash_journal_deinit(&check->journal);
    return r;
}
