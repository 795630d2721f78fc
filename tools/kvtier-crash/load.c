/* The load: each worker owns every so-manieth talk, so that a talk is stored by one thread; anyone
 * reads any. A Reset of a namespace waits for its stores in progress and keeps new ones out,
 * because a store that was begun before it and served after it would be taken for a block that came
 * back. */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "daemon/base/alloc.h"
#include "daemon/base/clock.h"
#include "tools/kvtier-crash/crash.h"

/* Of a thousand steps. What is left stores. */
#define READS 300u
#define LOWERS 80u
#define EVICTS 40u
#define RESETS 4u
#define DURABLE_PCT 70u

struct load {
    const struct crash_options *options;
    struct crash_journal journal;
    pthread_mutex_t lock; /* journal, totals */
    struct crash_totals totals;
    pthread_rwlock_t stores[CRASH_SPACES]; /* read: a store is in progress; write: a Reset */
    uint64_t until_ns;
    atomic_bool is_over;
};

struct worker {
    struct load *load;
    pthread_t thread;
    uint32_t idx;
    uint64_t random;
    struct crash_engine engine;
};

static uint64_t next_random(struct worker *worker)
{
    uint64_t x = worker->random += 0x9E3779B97F4A7C15ull;

    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ x >> 27) * 0x94D049BB133111EBull;
    return x ^ x >> 31;
}

static void count(struct load *load, uint64_t *counter)
{
    (void)pthread_mutex_lock(&load->lock);
    (*counter)++;
    (void)pthread_mutex_unlock(&load->lock);
}

static uint32_t below(struct worker *worker, uint32_t count)
{
    return (uint32_t)(next_random(worker) % count);
}

static struct crash_talk note(struct load *load, char kind, const struct crash_place *place,
                              uint32_t blocks)
{
    struct crash_note note = {kind, place->space, place->generation, place->talk, blocks};
    struct crash_talk talk;
    int r;

    (void)pthread_mutex_lock(&load->lock);
    r = crash_journal_note(&load->journal, &note);
    talk = *crash_journal_talk(&load->journal, place->space, place->generation, place->talk);
    if (r != 0 && load->totals.first_fault[0] == '\0')
        (void)snprintf(load->totals.first_fault, sizeof(load->totals.first_fault),
                       "the journal cannot be written: %d", r);
    (void)pthread_mutex_unlock(&load->lock);
    if (r != 0)
        atomic_store(&load->is_over, true);
    return talk;
}

static void choose(struct worker *worker, bool is_own, struct crash_place *ret_place,
                   struct crash_talk *ret_talk)
{
    struct load *load = worker->load;
    uint32_t own_count = CRASH_TALKS / load->options->workers;

    *ret_place = (struct crash_place){.space = below(worker, CRASH_SPACES)};
    ret_place->talk = is_own ? below(worker, own_count) * load->options->workers + worker->idx
                             : below(worker, CRASH_TALKS);
    (void)pthread_mutex_lock(&load->lock);
    ret_place->generation = load->journal.spaces[ret_place->space].generation;
    *ret_talk = *crash_journal_talk(&load->journal, ret_place->space, ret_place->generation,
                                    ret_place->talk);
    (void)pthread_mutex_unlock(&load->lock);
}

/* The namespace's stores are held still: the generation can be read again and stays. */
static void hold(struct worker *worker, struct crash_place *place, struct crash_talk *talk)
{
    struct load *load = worker->load;

    (void)pthread_rwlock_rdlock(&load->stores[place->space]);
    (void)pthread_mutex_lock(&load->lock);
    place->generation = load->journal.spaces[place->space].generation;
    *talk = *crash_journal_talk(&load->journal, place->space, place->generation, place->talk);
    (void)pthread_mutex_unlock(&load->lock);
}

static enum crash_result store(struct worker *worker, struct crash_place *place, bool is_durable)
{
    struct crash_stored stored;
    enum crash_result result;

    (void)note(worker->load, 'S', place, place->end);
    result = crash_engine_store(&worker->engine, place, is_durable, &stored);
    if (result == CRASH_OK && is_durable && stored.is_durable) {
        (void)note(worker->load, 'D', place, place->end);
        count(worker->load, &worker->load->totals.durable_answers);
    }
    count(worker->load, &worker->load->totals.stores);
    return result;
}

/* What was evicted is often stored again at once: then the new copies are promised while the old
 * ones may not have left every index. */
static enum crash_result step_evict(struct worker *worker, struct crash_place *place,
                                    const struct crash_talk *talk)
{
    struct crash_place own = *place;
    enum crash_result result;

    own.first = 0;
    own.end = CRASH_SHARED_BLOCKS + 1; /* at and below the first block that is its own */
    (void)note(worker->load, 'E', place, 0);
    count(worker->load, &worker->load->totals.evicts);
    result = crash_engine_evict(&worker->engine, &own);
    if (result != CRASH_OK || talk->tried_blocks == 0 || below(worker, 2) == 0)
        return result;
    place->first = 0;
    place->end = talk->tried_blocks;
    return store(worker, place, true);
}

static enum crash_result step_store(struct worker *worker, struct crash_place *place,
                                    const struct crash_talk *talk)
{
    if (talk->durable_blocks == CRASH_BLOCKS_MAX)
        return step_evict(worker, place, talk);
    place->end = talk->durable_blocks + 1 + below(worker, 6);
    place->end = KVT_MIN(place->end, CRASH_BLOCKS_MAX);
    /* Often only what is new, as engines do; what was promised before must still hold then. */
    place->first = below(worker, 2) == 0 ? 0 : KVT_MIN(talk->durable_blocks, place->end - 1);
    return store(worker, place, below(worker, 100) < DURABLE_PCT);
}

static enum crash_result step_lower(struct worker *worker, struct crash_place *place,
                                    const struct crash_talk *talk)
{
    struct crash_stored stored;
    enum crash_result result;

    if (talk->tried_blocks == 0)
        return CRASH_OK;
    place->end = talk->tried_blocks;
    result = crash_engine_lower(&worker->engine, place, &stored);
    if (result == CRASH_OK && stored.is_durable) {
        (void)note(worker->load, 'D', place, place->end);
        count(worker->load, &worker->load->totals.durable_answers);
    }
    return result;
}

static enum crash_result step_read(struct worker *worker, struct crash_place *place,
                                   const struct crash_talk *talk)
{
    struct crash_totals *totals = &worker->load->totals;
    struct crash_read read;
    enum crash_result result;

    if (talk->tried_blocks == 0)
        return CRASH_OK;
    place->end = talk->tried_blocks;
    result = crash_engine_read(&worker->engine, place, 0, &read);
    (void)pthread_mutex_lock(&worker->load->lock);
    totals->reads++;
    totals->served_blocks += read.served_blocks;
    totals->missed_blocks += read.missed_blocks;
    totals->wrong_bytes += read.wrong_bytes;
    totals->wrong_blocks += read.wrong_bytes > 0;
    if (read.wrong_bytes > 0 && totals->first_fault[0] == '\0')
        (void)snprintf(totals->first_fault, sizeof(totals->first_fault), "%s", worker->engine.why);
    for (uint32_t t = 0; t < KVT_API_TIERS; t++)
        totals->served_from[t] += read.served_from[t];
    (void)pthread_mutex_unlock(&worker->load->lock);
    return result;
}

static enum crash_result step_reset(struct worker *worker, struct crash_place *place)
{
    struct load *load = worker->load;
    enum crash_result result;

    (void)pthread_rwlock_wrlock(&load->stores[place->space]);
    place->generation = load->journal.spaces[place->space].generation + 1;
    place->talk = 0;
    if (place->generation > CRASH_GENERATIONS_MAX) {
        (void)pthread_rwlock_unlock(&load->stores[place->space]);
        return CRASH_OK;
    }
    (void)note(load, 'N', place, 0);
    result = crash_engine_reset(&worker->engine, place->space);
    if (result == CRASH_OK) {
        (void)note(load, 'R', place, 0);
        count(load, &load->totals.resets);
    }
    (void)pthread_rwlock_unlock(&load->stores[place->space]);
    return result;
}

static enum crash_result step(struct worker *worker)
{
    uint32_t which = below(worker, 1000);
    struct crash_place place;
    struct crash_talk talk;
    enum crash_result result;

    choose(worker, which >= READS, &place, &talk);
    if (which < READS)
        return step_read(worker, &place, &talk);
    if (which < READS + RESETS)
        return step_reset(worker, &place);
    hold(worker, &place, &talk);
    if (which < READS + RESETS + EVICTS)
        result = step_evict(worker, &place, &talk);
    else if (which < READS + RESETS + EVICTS + LOWERS)
        result = step_lower(worker, &place, &talk);
    else
        result = step_store(worker, &place, &talk);
    (void)pthread_rwlock_unlock(&worker->load->stores[place.space]);
    return result;
}

static void take_result(struct worker *worker, enum crash_result result)
{
    struct load *load = worker->load;

    if (result == CRASH_OK)
        return;
    (void)pthread_mutex_lock(&load->lock);
    if (result == CRASH_REFUSED)
        load->totals.refused++;
    if (result == CRASH_GONE)
        load->totals.is_gone = true;
    if (result == CRASH_BROKEN && load->totals.first_fault[0] == '\0')
        (void)snprintf(load->totals.first_fault, sizeof(load->totals.first_fault), "%s",
                       worker->engine.why);
    (void)pthread_mutex_unlock(&load->lock);
    if (result != CRASH_REFUSED)
        atomic_store(&load->is_over, true);
}

static void *worker_main(void *arg)
{
    struct worker *worker = arg;
    struct load *load = worker->load;

    take_result(worker, crash_engine_open(&worker->engine));
    while (!atomic_load(&load->is_over) && kvt_clock_mono_ns() < load->until_ns)
        take_result(worker, step(worker));
    crash_engine_close(&worker->engine);
    return NULL;
}

static int load_init(struct load *load, const struct crash_options *options)
{
    int r;

    load->options = options;
    load->until_ns = kvt_time_add(kvt_clock_mono_ns(), options->load_ns);
    r = -pthread_mutex_init(&load->lock, NULL);
    for (uint32_t s = 0; s < CRASH_SPACES && r == 0; s++)
        r = -pthread_rwlock_init(&load->stores[s], NULL);
    if (r < 0)
        return kvt_trace(r);
    return crash_journal_init(&load->journal, options->journal_path);
}

static void load_deinit(struct load *load)
{
    crash_journal_deinit(&load->journal);
    for (uint32_t s = 0; s < CRASH_SPACES; s++)
        (void)pthread_rwlock_destroy(&load->stores[s]);
    (void)pthread_mutex_destroy(&load->lock);
}

int crash_load(const struct crash_options *options, struct crash_totals *ret)
{
    kvt_autofree struct load *load = kvt_alloc_zeroed(1, sizeof(*load));
    kvt_autofree struct worker *workers = kvt_alloc_zeroed(options->workers, sizeof(*workers));
    uint32_t started = 0;
    int r;

    if (load == NULL || workers == NULL)
        return kvt_trace(-ENOMEM);
    r = load_init(load, options);
    for (; started < options->workers && r == 0; started++) {
        struct worker *worker = &workers[started];

        worker->load = load;
        worker->idx = started;
        worker->random = options->seed * 1000003 + options->cycle * 1009 + started;
        crash_engine_init(&worker->engine, options);
        r = -pthread_create(&worker->thread, NULL, worker_main, worker);
        if (r < 0)
            break;
    }
    if (r != 0)
        atomic_store(&load->is_over, true);
    for (uint32_t i = 0; i < started; i++)
        (void)pthread_join(workers[i].thread, NULL);
    *ret = load->totals;
    load_deinit(load);
    return r;
}
