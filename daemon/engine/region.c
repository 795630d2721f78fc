/* Mappings of engines' memory. The server maps memfds on its own thread (region_open); an Attach
 * takes them over; they go when the session is detached and none of its jobs is left. Unmapping
 * gigabytes takes milliseconds, and so does opening and closing memory on a GPU (gpu_region.c):
 * while the engine's loop runs a thread does it (janitor.c); by hand (simulator) it is done at
 * once. */
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

void eng_region_close_with(const struct kvt_engine_gpu_memory *gpu_memory,
                           struct eng_region *region)
{
    if (region == NULL)
        return;
    if (region->region.is_gpu)
        gpu_memory->close(gpu_memory->ctx, &region->region);
    else
        kvt_region_close(&region->region);
    kvt_free(region);
}

/* Of the server, for what no Attach took over: mappings of memfds only. */
void eng_region_close(void *ctx, void *mapping)
{
    static const struct kvt_engine_gpu_memory none;

    (void)ctx;
    eng_region_close_with(&none, mapping);
}

struct eng_region *eng_region_of(const struct kvt_api_region *region)
{
    return region->kind != KVT_REGION_INLINE ? region->mapping : NULL;
}

/* Memory on a GPU is never closed by the engine while another thread may be inside the driver: that
 * may hang, and so would the engine. What cannot be closed stays open until the process ends. */
void eng_region_put(struct kvt_engine *engine, struct eng_region *region)
{
    if (region == NULL)
        return;
    if (engine->janitor != NULL && eng_janitor_close(engine->janitor, region))
        return;
    if (region->region.is_gpu && (engine->janitor != NULL || engine->is_janitor_left))
        kvt_free(region);
    else
        eng_region_close_with(&engine->config.gpu_memory, region);
}

void eng_regions_put(struct kvt_engine *engine, struct kvt_op *op)
{
    struct kvt_req_attach *req = &op->req.attach;

    for (uint32_t i = 0; i < req->regions_count; i++) {
        eng_region_put(engine, eng_region_of(&req->regions[i]));
        req->regions[i].mapping = NULL;
    }
}
