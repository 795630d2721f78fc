/* Mappings of engines' memory. The server maps memfds on its own thread (region_open); an Attach
 * takes them over; they go when the session is detached and none of its jobs is left. Unmapping
 * gigabytes takes milliseconds, and so does opening and closing memory on a GPU (gpu_region.c):
 * while the engine's loop runs a janitor thread does it; by hand (simulator) it is done at once. */
#include "daemon/base/alloc.h"
#include "daemon/engine/internal.h"

static const char *region_error_text(int result)
{
    switch (result) {
    case KVT_REGION_E_NOT_SEALED:
        return "the memfd needs F_SEAL_SHRINK and F_SEAL_GROW";
    case KVT_REGION_E_TOO_SMALL:
        return "the memfd is smaller than declared";
    case KVT_REGION_E_NOT_MEMFD:
        return "the descriptor is not a memfd";
    case KVT_REGION_E_SPARSE:
        return "the memfd has fewer bytes allocated than declared: fill it before";
    default:
        return "the memory cannot be mapped";
    }
}

struct eng_region *eng_region_new(void)
{
    return kvt_alloc_zeroed(1, sizeof(struct eng_region));
}

int eng_region_open(void *ctx, int memfd, uint64_t bytes, void **ret_mapping, const char **ret_why)
{
    struct eng_region *region = eng_region_new();
    int r;

    (void)ctx;
    if (region == NULL) {
        *ret_why = "no memory";
        return kvt_trace(-ENOMEM);
    }
    r = kvt_region_open(&region->region, memfd, bytes);
    if (r != 0) {
        *ret_why = region_error_text(r);
        kvt_free(region);
        return r;
    }
    *ret_mapping = region;
    return 0;
}

void eng_region_close(void *ctx, void *mapping)
{
    struct kvt_engine *engine = ctx;
    struct eng_region *region = mapping;

    if (region == NULL)
        return;
    if (region->region.is_gpu)
        engine->config.gpu_memory.close(engine->config.gpu_memory.ctx, &region->region);
    else
        kvt_region_close(&region->region);
    kvt_free(region);
}

struct eng_region *eng_region_of(const struct kvt_api_region *region)
{
    return region->kind != KVT_REGION_INLINE ? region->mapping : NULL;
}

void eng_region_put(struct kvt_engine *engine, struct eng_region *region)
{
    if (region == NULL)
        return;
    if (engine->has_janitor && kvt_ring_put(&engine->janitor_ring, region) == 0)
        kvt_doorbell_ring(&engine->janitor_bell);
    else
        eng_region_close(engine, region);
}

void eng_regions_put(struct kvt_engine *engine, struct kvt_op *op)
{
    struct kvt_req_attach *req = &op->req.attach;

    for (uint32_t i = 0; i < req->regions_count; i++) {
        eng_region_put(engine, eng_region_of(&req->regions[i]));
        req->regions[i].mapping = NULL;
    }
}

void eng_janitor_open(struct kvt_engine *engine, struct eng_opening *opening)
{
    int r = kvt_ring_put(&engine->openings_ring, opening);

    KVT_ASSERT(engine->has_janitor && r == 0); /* as many places as openings */
    kvt_doorbell_ring(&engine->janitor_bell);
}

static void open_waiting(struct kvt_engine *engine)
{
    struct eng_opening *opening;

    while ((opening = kvt_ring_take(&engine->openings_ring)) != NULL) {
        int r;

        eng_opening_run(engine, opening);
        r = kvt_ring_put(&engine->opened_ring, opening);
        KVT_ASSERT(r == 0);
        kvt_doorbell_ring(engine->config.doorbell);
    }
}

static void *janitor_main(void *ctx)
{
    struct kvt_engine *engine = ctx;
    bool is_stop;

    do {
        struct eng_region *region;

        kvt_doorbell_arm(&engine->janitor_bell);
        is_stop = atomic_load(&engine->is_janitor_stop);
        if (!is_stop && kvt_ring_is_empty(&engine->janitor_ring) &&
            kvt_ring_is_empty(&engine->openings_ring))
            kvt_doorbell_wait(&engine->janitor_bell, KVT_TIME_NEVER_NS);
        else
            kvt_doorbell_disarm(&engine->janitor_bell);
        while ((region = kvt_ring_take(&engine->janitor_ring)) != NULL)
            eng_region_close(engine, region);
        open_waiting(engine);
    } while (!is_stop);
    return NULL;
}

int eng_janitor_start(struct kvt_engine *engine)
{
    int r;

    atomic_store(&engine->is_janitor_stop, false);
    r = pthread_create(&engine->janitor, NULL, janitor_main, engine);
    if (r != 0)
        return kvt_trace(-r);
    engine->has_janitor = true;
    return 0;
}

void eng_janitor_stop(struct kvt_engine *engine)
{
    if (!engine->has_janitor)
        return;
    atomic_store(&engine->is_janitor_stop, true);
    kvt_doorbell_ring(&engine->janitor_bell);
    (void)pthread_join(engine->janitor, NULL);
    engine->has_janitor = false;
}
