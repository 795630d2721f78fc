/* Memory of engines on GPUs. An Attach that brings some is not served at once: opening a handle
 * blocks in the driver, so the janitor thread does it for all regions of the request, and the
 * request comes back to the engine with mappings, or with the first thing that went wrong.
 *
 *   engine: free opening, the request looks good ──▶ janitor: open each ──▶ engine: attach, or undo
 *
 * By hand (simulator) it is done at once. The janitor gets a copy of what is to be opened: the
 * driver may never come back, so the request stays the engine's, which answers it when its deadline
 * is near, and at once when its client goes or the daemon stops. What was opened for it is put back
 * when it comes, and what was not begun is left alone.
 *
 * When a GPU is lost, so are all openings of memory on it. The engine compares the incarnations of
 * L1's zones with those that it saw last, once a turn, and tells the sessions concerned: their
 * moves answer CLIENT_GONE until they attach again. So it does those whose engine reads something
 * of that GPU in place, wherever their own memory is. */
#include <stdio.h>
#include <string.h>

#include "daemon/engine/internal.h"

/* ---- on the janitor's thread ----------------------------------------------------------------- */

static int open_one(const struct kvt_engine_gpu_memory *gpu_memory, struct eng_opening_region *at,
                    char why[KVT_DEVICE_WHY_BYTES])
{
    struct eng_region *region = eng_region_new();
    int r;

    if (region == NULL)
        return -ENOMEM;
    r = gpu_memory->open(gpu_memory->ctx, &at->memory, &region->region, why);
    if (r != 0) {
        eng_region_close_with(gpu_memory, region);
        return r;
    }
    KVT_ASSERT(region->region.is_gpu && region->region.bytes == at->memory.bytes);
    at->mapping = region;
    return 0;
}

void eng_opening_step(const struct kvt_engine_gpu_memory *gpu_memory, struct eng_opening *opening,
                      uint32_t idx)
{
    if (!opening->regions[idx].is_gpu)
        return;
    opening->region_idx = idx;
    opening->result = open_one(gpu_memory, &opening->regions[idx], opening->why);
    opening->why[sizeof(opening->why) - 1] = 0;
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

static void take_request(struct eng_opening *opening, struct kvt_op *op)
{
    const struct kvt_req_attach *req = &op->req.attach;

    *opening = (struct eng_opening){.is_taken = true,
                                    .op = op,
                                    .regions_count =
                                        KVT_MIN(req->regions_count, KVT_REGIONS_PER_SESSION_MAX)};
    for (uint32_t i = 0; i < opening->regions_count; i++) {
        const struct kvt_api_region *from = &req->regions[i];
        struct eng_opening_region *to = &opening->regions[i];

        if (from->kind != KVT_REGION_CUDA_IPC)
            continue;
        to->is_gpu = true;
        to->memory = (struct kvt_device_memory){.offset_bytes = from->cuda_ipc.offset_bytes,
                                                .bytes = from->bytes};
        memcpy(to->memory.handle, from->cuda_ipc.handle, sizeof(to->memory.handle));
        memcpy(to->memory.uuid, from->cuda_ipc.device_uuid, sizeof(to->memory.uuid));
    }
}

static void finish(struct kvt_engine *engine, struct kvt_op *op, struct eng_opening *opening)
{
    struct kvt_req_attach *req = &op->req.attach;

    for (uint32_t i = 0; i < opening->regions_count; i++)
        if (opening->regions[i].is_gpu)
            req->regions[i].mapping = opening->regions[i].mapping;
    if (opening->result != 0)
        fail(op, opening);
    else if (atomic_load(&op->is_cancelled))
        kvt_op_fail(op, KVT_CODE_CANCELLED, "cancelled");
    for (uint32_t i = 0; i < opening->regions_count && op->code == KVT_CODE_OK; i++)
        if (opening->regions[i].is_gpu &&
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

static void attach_now(struct kvt_engine *engine, struct kvt_op *op)
{
    struct eng_opening now;

    take_request(&now, op);
    for (uint32_t i = 0; i < now.regions_count && now.result == 0; i++)
        eng_opening_step(&engine->config.gpu_memory, &now, i);
    finish(engine, op, &now);
}

void eng_attach_gpu(struct kvt_engine *engine, struct kvt_op *op)
{
    struct eng_opening *openings, *opening = NULL;

    if (engine->config.gpu_memory.open == NULL) {
        struct eng_opening none = {.result = KVT_REGION_E_NO_GPU};

        (void)snprintf(none.why, sizeof(none.why),
                       "this daemon has no CUDA device: register a memfd (staging) instead");
        finish(engine, op, &none);
        return;
    }
    if (engine->janitor == NULL) {
        attach_now(engine, op);
        return;
    }
    openings = eng_janitor_openings(engine->janitor);
    for (uint32_t i = 0; i < KVT_ENGINE_OPENINGS_MAX && opening == NULL; i++)
        if (!openings[i].is_taken)
            opening = &openings[i];
    if (opening == NULL) {
        kvt_op_fail(op, KVT_CODE_RESOURCE_EXHAUSTED,
                    "%u sessions with a GPU's memory are being attached: try again",
                    KVT_ENGINE_OPENINGS_MAX);
        eng_regions_put(engine, op);
        return;
    }
    take_request(opening, op);
    opening->answer_ns = eng_answer_ns(engine, op->deadline_ns);
    op->service = opening; /* it is answered later */
    engine->openings_waiting++;
    eng_janitor_open(engine->janitor, opening);
}

static void take_opened(struct kvt_engine *engine, struct eng_opening *opening)
{
    struct kvt_op *op = opening->op;

    if (op != NULL) {
        op->service = NULL;
        engine->openings_waiting--;
        finish(engine, op, opening);
    } else {
        for (uint32_t i = 0; i < opening->regions_count; i++)
            eng_region_put(engine, opening->regions[i].mapping);
    }
    *opening = (struct eng_opening){0}; /* its mappings are somebody's now */
    if (op != NULL)
        eng_answer(engine, op);
}

/* Its memory is not open, and it is not waited for any more. */
static void answer_early(struct kvt_engine *engine, struct eng_opening *opening, enum kvt_code code,
                         const char *text)
{
    struct kvt_op *op = opening->op;

    opening->op = NULL;
    op->service = NULL;
    engine->openings_waiting--;
    atomic_store(&opening->is_given_up, true);
    eng_regions_put(engine, op); /* memfds */
    kvt_op_fail(op, code, "%s", text);
    eng_answer(engine, op);
}

/* The openings; NULL when none has a request that waits. */
static struct eng_opening *waiting(const struct kvt_engine *engine)
{
    return engine->openings_waiting > 0 ? eng_janitor_openings(engine->janitor) : NULL;
}

void eng_openings_slice(struct kvt_engine *engine)
{
    struct eng_opening *opening, *openings;

    while (engine->janitor != NULL && (opening = eng_janitor_opened(engine->janitor)) != NULL)
        take_opened(engine, opening);
    openings = waiting(engine);
    for (uint32_t i = 0; openings != NULL && i < KVT_ENGINE_OPENINGS_MAX; i++)
        if (openings[i].op != NULL && engine->now_ns >= openings[i].answer_ns)
            answer_early(engine, &openings[i], KVT_CODE_DEADLINE_EXCEEDED,
                         "the GPU's driver did not open the regions in time: attach again later, "
                         "or register host memory (a memfd) instead");
}

uint64_t eng_openings_next_ns(const struct kvt_engine *engine)
{
    const struct eng_opening *openings = waiting(engine);
    uint64_t next_ns = KVT_TIME_NEVER_NS;

    for (uint32_t i = 0; openings != NULL && i < KVT_ENGINE_OPENINGS_MAX; i++)
        if (openings[i].op != NULL)
            next_ns = KVT_MIN(next_ns, openings[i].answer_ns);
    return next_ns;
}

void eng_openings_cancelled(struct kvt_engine *engine)
{
    struct eng_opening *openings = waiting(engine);

    for (uint32_t i = 0; openings != NULL && i < KVT_ENGINE_OPENINGS_MAX; i++)
        if (openings[i].op != NULL && atomic_load(&openings[i].op->is_cancelled))
            answer_early(engine, &openings[i], KVT_CODE_CANCELLED, "cancelled");
}

void eng_openings_stop(struct kvt_engine *engine)
{
    struct eng_opening *openings = waiting(engine);

    for (uint32_t i = 0; openings != NULL && i < KVT_ENGINE_OPENINGS_MAX; i++)
        if (openings[i].op != NULL)
            answer_early(engine, &openings[i], KVT_CODE_UNAVAILABLE, "the daemon is stopping");
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
