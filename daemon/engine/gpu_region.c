/* Memory of engines on GPUs. An Attach that brings some is not served at once: opening a handle
 * blocks in the driver, so the janitor thread does it for all regions of the request, and the
 * request comes back to the engine with mappings, or with the first thing that went wrong.
 *
 *   engine: free opening, the request looks good ──▶ janitor: open each ──▶ engine: attach, or undo
 *
 * By hand (simulator) it is done at once. The request belongs to whoever has the opening; a client
 * that went meanwhile is found out about afterwards, and everything that was opened is put back.
 *
 * When a GPU is lost, so are all openings of memory on it. The engine compares the incarnations of
 * L1's zones with those that it saw last, once a turn, and tells the sessions concerned: their
 * moves answer CLIENT_GONE until they attach again. So it does those whose engine reads something
 * of that GPU in place, wherever their own memory is. */
#include <stdio.h>
#include <string.h>

#include "daemon/engine/internal.h"

/* ---- on the janitor's thread ----------------------------------------------------------------- */

static int open_one(struct kvt_engine *engine, struct kvt_api_region *at,
                    char why[KVT_DEVICE_WHY_BYTES])
{
    const struct kvt_engine_gpu_memory *gpu_memory = &engine->config.gpu_memory;
    struct kvt_device_memory memory = {.offset_bytes = at->cuda_ipc.offset_bytes,
                                       .bytes = at->bytes};
    struct eng_region *region;
    int r;

    memcpy(memory.handle, at->cuda_ipc.handle, sizeof(memory.handle));
    memcpy(memory.uuid, at->cuda_ipc.device_uuid, sizeof(memory.uuid));
    region = eng_region_new();
    if (region == NULL)
        return -ENOMEM;
    r = gpu_memory->open(gpu_memory->ctx, &memory, &region->region, why);
    if (r != 0) {
        eng_region_close(engine, region);
        return r;
    }
    KVT_ASSERT(region->region.is_gpu && region->region.bytes == at->bytes);
    at->mapping = region;
    return 0;
}

void eng_opening_run(struct kvt_engine *engine, struct eng_opening *opening)
{
    struct kvt_req_attach *req = &opening->op->req.attach;

    opening->result = 0;
    opening->why[0] = 0;
    for (uint32_t i = 0; i < req->regions_count && opening->result == 0; i++) {
        if (req->regions[i].kind != KVT_REGION_CUDA_IPC)
            continue;
        opening->region_idx = i;
        opening->result = open_one(engine, &req->regions[i], opening->why);
        opening->why[sizeof(opening->why) - 1] = 0;
    }
}

/* ---- on the engine's ------------------------------------------------------------------------- */

static void fail(struct kvt_op *op, const struct eng_opening *opening)
{
    const char *why = opening->why[0] != 0 ? opening->why : "it cannot be opened";
    uint32_t i = opening->region_idx;

    switch (opening->result) {
    case KVT_REGION_E_NO_GPU:
        kvt_op_fail(op, KVT_CODE_FAILED_PRECONDITION, "regions[%u].cuda_ipc: %s", i, why);
        break;
    case KVT_REGION_E_LOST:
        kvt_op_fail(op, KVT_CODE_UNAVAILABLE, "regions[%u].cuda_ipc: %s", i, why);
        break;
    case KVT_REGION_E_HANDLE:
    case KVT_REGION_E_OUTSIDE:
        kvt_op_fail(op, KVT_CODE_INVALID_ARGUMENT, "regions[%u].cuda_ipc: %s", i, why);
        break;
    case KVT_REGION_E_MANY:
        kvt_op_fail(op, KVT_CODE_RESOURCE_EXHAUSTED, "regions[%u].cuda_ipc: %s", i, why);
        break;
    case -ENOMEM:
        kvt_op_fail(op, KVT_CODE_RESOURCE_EXHAUSTED, "regions[%u].cuda_ipc: no memory", i);
        break;
    default:
        kvt_op_fail(op, KVT_CODE_UNAVAILABLE, "regions[%u].cuda_ipc: %s (%d)", i, why,
                    opening->result);
        break;
    }
}

/* Whether the memory of a region is still there: its GPU was not lost since it was opened. */
static bool is_current(const struct kvt_engine *engine, const struct kvt_region *region)
{
    const struct kvt_tier *tier = engine->config.store.tiers[KVT_TIER_DEVICE];

    return tier != NULL && region->gpu_zone < tier->zones_count &&
           atomic_load_explicit(&tier->zones[region->gpu_zone].counters->incarnation,
                                memory_order_acquire) == region->incarnation;
}

static void finish(struct kvt_engine *engine, struct kvt_op *op, const struct eng_opening *opening)
{
    const struct kvt_req_attach *req = &op->req.attach;

    if (opening->result != 0)
        fail(op, opening);
    else if (engine->is_stopping)
        kvt_op_fail(op, KVT_CODE_UNAVAILABLE, "the daemon is stopping");
    else if (atomic_load(&op->is_cancelled))
        kvt_op_fail(op, KVT_CODE_CANCELLED, "cancelled");
    for (uint32_t i = 0; i < req->regions_count && op->code == KVT_CODE_OK; i++)
        if (req->regions[i].kind == KVT_REGION_CUDA_IPC &&
            !is_current(engine, &eng_region_of(&req->regions[i])->region))
            kvt_op_fail(op, KVT_CODE_UNAVAILABLE,
                        "regions[%u].cuda_ipc: its GPU was lost: attach again", i);
    if (op->code == KVT_CODE_OK)
        eng_attach(engine, op);
    else
        eng_regions_put(engine, op);
}

bool eng_has_gpu_regions(const struct kvt_op *op)
{
    for (uint32_t i = 0; i < op->req.attach.regions_count; i++)
        if (op->req.attach.regions[i].kind == KVT_REGION_CUDA_IPC)
            return true;
    return false;
}

void eng_attach_gpu(struct kvt_engine *engine, struct kvt_op *op)
{
    struct eng_opening *opening = NULL, now = {.op = op};

    if (engine->config.gpu_memory.open == NULL) {
        now.result = KVT_REGION_E_NO_GPU;
        (void)snprintf(now.why, sizeof(now.why),
                       "this daemon has no CUDA device: register a memfd (staging) instead");
        finish(engine, op, &now);
        return;
    }
    if (!engine->has_janitor) {
        eng_opening_run(engine, &now);
        finish(engine, op, &now);
        return;
    }
    for (uint32_t i = 0; i < KVT_ENGINE_OPENINGS_MAX && opening == NULL; i++)
        if (engine->openings[i].op == NULL)
            opening = &engine->openings[i];
    if (opening == NULL) {
        kvt_op_fail(op, KVT_CODE_RESOURCE_EXHAUSTED,
                    "%u sessions with a GPU's memory are being attached: try again",
                    KVT_ENGINE_OPENINGS_MAX);
        eng_regions_put(engine, op);
        return;
    }
    *opening = (struct eng_opening){.op = op};
    op->service = opening; /* it is answered later */
    engine->openings_count++;
    eng_janitor_open(engine, opening);
}

void eng_openings_slice(struct kvt_engine *engine)
{
    struct eng_opening *opening;

    while ((opening = kvt_ring_take(&engine->opened_ring)) != NULL) {
        struct kvt_op *op = opening->op;

        op->service = NULL;
        finish(engine, op, opening);
        opening->op = NULL;
        engine->openings_count--;
        eng_answer(engine, op);
    }
}

/* ---- a session's memory on GPUs ---------------------------------------------------------------
 */

bool eng_gpu_layout_fits(const struct kvt_engine *engine, struct kvt_op *op, uint32_t component,
                         const struct kvt_layout *layout)
{
    const struct kvt_tier *tier = engine->config.store.tiers[KVT_TIER_DEVICE];
    uint64_t bytes = KVT_MAX(layout->payload_bytes, layout->stored_bytes);

    if (!layout->is_gpu || tier == NULL || tier->payload_bytes_max == 0 ||
        bytes <= tier->payload_bytes_max)
        return true;
    kvt_op_fail(
        op, KVT_CODE_FAILED_PRECONDITION,
        "component %u: a block of %llu bytes, and this daemon's staging on GPUs holds %llu: "
        "make tiers.l1.staging larger or block_tokens smaller, or register a memfd",
        component, (unsigned long long)bytes, (unsigned long long)tier->payload_bytes_max);
    return false;
}

/* What the session's engine stores of this rank, or asks for, is best on its GPU. */
void eng_gpu_take_home(struct eng_session *session)
{
    for (uint32_t i = 0; i < session->ns->components_count; i++) {
        const struct eng_layout *at = &session->layouts[i];

        if (!at->is_present || at->is_inline || !at->layout.is_gpu)
            continue;
        session->group->is_gpu = true;
        if (session->rank != KVT_RANK_NONE)
            session->group->home[session->rank] = (uint8_t)at->layout.gpu_zone;
        return;
    }
}

static bool has_lost_regions(const struct kvt_engine *engine, const struct eng_session *session)
{
    for (uint32_t i = 0; i < session->regions_count; i++)
        if (session->regions[i].is_gpu && !is_current(engine, &session->regions[i]))
            return true;
    return false;
}

void eng_gpu_watch(struct kvt_engine *engine)
{
    const struct kvt_tier *tier = engine->config.store.tiers[KVT_TIER_DEVICE];
    const struct kvt_notice notice = {.kind = KVT_NOTICE_REGIONS_LOST};
    uint32_t changed = 0;

    for (uint32_t i = 0; tier != NULL && i < tier->zones_count; i++) {
        uint32_t incarnation =
            atomic_load_explicit(&tier->zones[i].counters->incarnation, memory_order_relaxed);

        if (incarnation != engine->gpu_incarnations[i])
            changed |= 1u << i;
        engine->gpu_incarnations[i] = incarnation;
    }
    if (changed != 0)
        eng_holds_lost(engine, changed);
    for (uint32_t i = 0; changed != 0 && i < KVT_SESSIONS_MAX; i++) {
        struct eng_session *session = engine->sessions[i].session;
        bool has_lost;

        if (session == NULL)
            continue;
        has_lost = !session->is_told_lost && has_lost_regions(engine, session);
        if (!has_lost && !eng_holds_is_told(session->group, changed))
            continue;
        session->is_told_lost |= has_lost;
        eng_count(engine, KVT_COUNTER_REGIONS_LOST, 1);
        eng_notify(engine, session, &notice);
    }
}
