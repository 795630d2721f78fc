/* The fill: the first talks of each namespace in full, one after the other, each made durable
 * before the next. So what has to be there afterwards is known to the block, and where it lies on
 * the devices is the same each time. */
#include <errno.h>
#include <stdio.h>

#include "daemon/base/alloc.h"
#include "tools/kvtier-crash/crash.h"

struct fill {
    struct crash_journal journal;
    struct crash_engine engine;
    struct crash_totals totals;
};

static int note(struct fill *fill, char kind, const struct crash_place *place)
{
    return crash_journal_note(
        &fill->journal,
        &(struct crash_note){kind, place->space, place->generation, place->talk, place->end});
}

static enum crash_result broken(struct fill *fill, const char *what)
{
    (void)snprintf(fill->engine.why, sizeof(fill->engine.why), "%s", what);
    return CRASH_BROKEN;
}

static enum crash_result fill_talk(struct fill *fill, const struct crash_place *place)
{
    struct crash_stored stored;
    enum crash_result result;

    if (note(fill, 'S', place) != 0)
        return broken(fill, "the journal cannot be written");
    result = crash_engine_store(&fill->engine, place, true, &stored);
    if (result == CRASH_OK && !stored.is_durable) /* all of it was there: nothing was promised */
        result = crash_engine_lower(&fill->engine, place, &stored);
    fill->totals.stores++;
    if (result == CRASH_REFUSED)
        fill->totals.refused++;
    if (result != CRASH_OK || !stored.is_durable)
        return result == CRASH_REFUSED ? CRASH_OK : result;
    fill->totals.durable_answers++;
    return note(fill, 'D', place) != 0 ? broken(fill, "the journal cannot be written") : CRASH_OK;
}

int crash_fill(const struct crash_options *options, struct crash_totals *ret)
{
    kvt_autofree struct fill *fill = kvt_alloc_zeroed(1, sizeof(*fill));
    enum crash_result result;
    int r;

    if (fill == NULL)
        return kvt_trace(-ENOMEM);
    crash_engine_init(&fill->engine, options);
    r = crash_journal_init(&fill->journal, options->journal_path);
    result = r == 0 ? crash_engine_open(&fill->engine) : CRASH_OK;
    for (uint32_t s = 0; r == 0 && s < CRASH_SPACES; s++)
        for (uint32_t t = 0; t < options->talks && result == CRASH_OK; t++) {
            const struct crash_place place = {.space = s,
                                              .generation = fill->journal.spaces[s].generation,
                                              .talk = t,
                                              .end = CRASH_BLOCKS_MAX};

            result = fill_talk(fill, &place);
        }
    fill->totals.is_gone = result == CRASH_GONE;
    if (result == CRASH_BROKEN)
        (void)snprintf(fill->totals.first_fault, sizeof(fill->totals.first_fault), "%s",
                       fill->engine.why);
    crash_engine_close(&fill->engine);
    crash_journal_deinit(&fill->journal);
    *ret = fill->totals;
    return r;
}
