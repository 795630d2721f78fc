/* The janitor: the thread that unmaps engines' memory, and opens and closes it on GPUs.
 *
 *   engine: region ──▶ closing, closing_gpu ──▶ janitor: unmap, close
 *   engine: opening ──▶ openings ──▶ janitor: open each ──▶ opened ──▶ engine
 *
 * After each opening it closes all that waits, so that many attaches do not hold up the return of
 * memory.
 *
 * A call of the driver may never come back. Around each the janitor says so (`state`), and an
 * engine that stops takes it from IN_DRIVER to LEFT when it waited long enough: from then on all
 * that is in here belongs to the thread, which frees it should the call come back, and touches
 * nothing else. Not the engine, nor its doorbell: they are gone by then. The device tier sees to it
 * that what is its own outlives the call (tiers/device/recover.c). */
#include <time.h>

#include "daemon/base/alloc.h"
#include "daemon/base/clock.h"
#include "daemon/engine/internal.h"

/* Opening and closing takes milliseconds. With this and what the device tier waits for its own
 * threads (10 s) a stop ends within stop.deadline's default of 30 s, and L3 is closed in order. */
#define LEAVE_NS (2u * KVT_NS_PER_S)
#define STOP_PAUSE_NS KVT_NS_PER_MS
/* Regions that sessions have, that were detached but have jobs, and that are being attached. */
#define CLOSING_MAX (4u * KVT_SESSIONS_MAX * KVT_REGIONS_PER_SESSION_MAX)

enum { WORKING = 0, IN_DRIVER, LEFT, OVER };

struct eng_janitor {
    struct kvt_engine_gpu_memory gpu_memory;
    struct kvt_doorbell *engine_bell;
    struct kvt_ring closing, closing_gpu; /* apart, so that the second is never full */
    struct kvt_ring openings_ring, opened_ring;
    struct eng_opening openings[KVT_ENGINE_OPENINGS_MAX];
    struct kvt_doorbell bell;
    pthread_t thread;
    atomic_bool is_stop;
    atomic_int state;
};

/* ---- on its thread ---------------------------------------------------------------------------
 */

static void enter_driver(struct eng_janitor *janitor)
{
    int working = WORKING;

    KVT_ASSERT(atomic_compare_exchange_strong(&janitor->state, &working, IN_DRIVER));
}

/* False: it was left behind. */
static bool is_back(struct eng_janitor *janitor)
{
    int in_driver = IN_DRIVER;

    return atomic_compare_exchange_strong(&janitor->state, &in_driver, WORKING);
}

static bool close_gpu(struct eng_janitor *janitor, struct eng_region *region)
{
    if (region == NULL)
        return true;
    enter_driver(janitor);
    eng_region_close_with(&janitor->gpu_memory, region);
    return is_back(janitor);
}

static bool close_waiting(struct eng_janitor *janitor)
{
    struct eng_region *region;

    while ((region = kvt_ring_take(&janitor->closing)) != NULL)
        eng_region_close_with(&janitor->gpu_memory, region);
    while ((region = kvt_ring_take(&janitor->closing_gpu)) != NULL)
        if (!close_gpu(janitor, region))
            return false;
    return true;
}

static bool open_next(struct eng_janitor *janitor)
{
    struct eng_opening *opening = kvt_ring_take(&janitor->openings_ring);
    int r;

    if (opening == NULL)
        return true;
    for (uint32_t i = 0;
         i < opening->regions_count && opening->result == 0 && !atomic_load(&opening->is_given_up);
         i++) {
        enter_driver(janitor);
        eng_opening_step(&janitor->gpu_memory, opening, i);
        if (!is_back(janitor))
            return false;
    }
    r = kvt_ring_put(&janitor->opened_ring, opening);
    KVT_ASSERT(r == 0); /* as many places as openings */
    kvt_doorbell_ring(janitor->engine_bell);
    return true;
}

/* The engine takes nothing any more. */
static bool close_opened(struct eng_janitor *janitor)
{
    struct eng_opening *opening;

    while ((opening = kvt_ring_take(&janitor->opened_ring)) != NULL)
        for (uint32_t i = 0; i < opening->regions_count; i++) {
            struct eng_region *region = opening->regions[i].mapping;

            opening->regions[i].mapping = NULL;
            if (!close_gpu(janitor, region))
                return false;
        }
    return true;
}

/* It was left behind: what is on a GPU stays open, memfds are unmapped. */
static void drop_waiting(struct eng_janitor *janitor)
{
    struct eng_region *region;

    while ((region = kvt_ring_take(&janitor->closing_gpu)) != NULL)
        kvt_free(region);
    while ((region = kvt_ring_take(&janitor->closing)) != NULL)
        eng_region_close_with(&janitor->gpu_memory, region);
    for (uint32_t i = 0; i < KVT_ENGINE_OPENINGS_MAX; i++)
        for (uint32_t j = 0; j < janitor->openings[i].regions_count; j++)
            kvt_free(janitor->openings[i].regions[j].mapping);
}

static struct eng_janitor *janitor_free(struct eng_janitor *janitor)
{
    kvt_doorbell_deinit(&janitor->bell);
    kvt_ring_deinit(&janitor->closing);
    kvt_ring_deinit(&janitor->closing_gpu);
    kvt_ring_deinit(&janitor->openings_ring);
    kvt_ring_deinit(&janitor->opened_ring);
    kvt_free(janitor);
    return NULL;
}

static bool work(struct eng_janitor *janitor)
{
    bool is_stop;

    for (;;) {
        kvt_doorbell_arm(&janitor->bell);
        is_stop = atomic_load(&janitor->is_stop);
        if (!is_stop && kvt_ring_is_empty(&janitor->closing) &&
            kvt_ring_is_empty(&janitor->closing_gpu) && kvt_ring_is_empty(&janitor->openings_ring))
            kvt_doorbell_wait(&janitor->bell, KVT_TIME_NEVER_NS);
        else
            kvt_doorbell_disarm(&janitor->bell);
        if (!close_waiting(janitor))
            return false;
        if (is_stop)
            return close_opened(janitor);
        if (!open_next(janitor))
            return false;
    }
}

static void *janitor_main(void *ctx)
{
    struct eng_janitor *janitor = ctx;

    if (work(janitor)) {
        atomic_store(&janitor->state, OVER);
    } else {
        drop_waiting(janitor);
        janitor_free(janitor);
    }
    return NULL;
}

/* ---- on the engine's -------------------------------------------------------------------------
 */

bool eng_janitor_close(struct eng_janitor *janitor, struct eng_region *region)
{
    struct kvt_ring *ring = region->region.is_gpu ? &janitor->closing_gpu : &janitor->closing;

    if (kvt_ring_put(ring, region) != 0)
        return false;
    kvt_doorbell_ring(&janitor->bell);
    return true;
}

struct eng_opening *eng_janitor_openings(struct eng_janitor *janitor)
{
    return janitor->openings;
}

void eng_janitor_open(struct eng_janitor *janitor, struct eng_opening *opening)
{
    int r = kvt_ring_put(&janitor->openings_ring, opening);

    KVT_ASSERT(r == 0); /* as many places as openings */
    kvt_doorbell_ring(&janitor->bell);
}

struct eng_opening *eng_janitor_opened(struct eng_janitor *janitor)
{
    return kvt_ring_take(&janitor->opened_ring);
}

bool eng_janitor_has_opened(const struct eng_janitor *janitor)
{
    return !kvt_ring_is_empty(&janitor->opened_ring);
}

static int make(struct eng_janitor *janitor)
{
    int r = kvt_ring_init(&janitor->closing, KVT_SESSIONS_MAX * KVT_REGIONS_PER_SESSION_MAX);

    if (r == 0)
        r = kvt_ring_init(&janitor->closing_gpu, CLOSING_MAX);
    if (r == 0)
        r = kvt_ring_init(&janitor->openings_ring, KVT_ENGINE_OPENINGS_MAX);
    if (r == 0)
        r = kvt_ring_init(&janitor->opened_ring, KVT_ENGINE_OPENINGS_MAX);
    if (r == 0)
        r = kvt_doorbell_init(&janitor->bell);
    return r == 0 ? -pthread_create(&janitor->thread, NULL, janitor_main, janitor) : r;
}

int eng_janitor_start(struct kvt_engine *engine)
{
    struct eng_janitor *janitor = kvt_alloc_aligned(KVT_CACHE_LINE_BYTES, sizeof(*janitor));
    int r;

    if (janitor == NULL)
        return kvt_trace(-ENOMEM);
    janitor->gpu_memory = engine->config.gpu_memory;
    janitor->engine_bell = engine->config.doorbell;
    janitor->bell = KVT_DOORBELL_NULL;
    r = make(janitor);
    if (r < 0) {
        janitor_free(janitor);
        return kvt_trace(r);
    }
    engine->janitor = janitor;
    return 0;
}

void eng_janitor_stop(struct kvt_engine *engine)
{
    const struct timespec pause = {.tv_nsec = STOP_PAUSE_NS};
    struct eng_janitor *janitor = engine->janitor;
    uint64_t until_ns = kvt_time_add(kvt_clock_mono_ns(), LEAVE_NS);
    pthread_t thread;

    if (janitor == NULL)
        return;
    engine->janitor = NULL;
    thread = janitor->thread; /* left behind it frees the rest */
    atomic_store(&janitor->is_stop, true);
    kvt_doorbell_ring(&janitor->bell);
    while (atomic_load(&janitor->state) != OVER) {
        int in_driver = IN_DRIVER;

        if (kvt_clock_mono_ns() >= until_ns &&
            atomic_compare_exchange_strong(&janitor->state, &in_driver, LEFT)) {
            engine->is_janitor_left = true;
            (void)pthread_detach(thread);
            return;
        }
        (void)nanosleep(&pause, NULL);
    }
    (void)pthread_join(thread, NULL);
    janitor_free(janitor);
}
