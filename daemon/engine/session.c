/* Sessions and groups. A session is one Attach stream; a group is the sessions with one engine id
 * in one namespace, of one uid. Leases and tickets belong to the group and go, in slices, when its
 * last session ends; that takes effect at once because nobody is left who could name them.
 *
 * A detached session's memory (mappings, layouts) stays until the last run that uses it is over. */
#include <string.h>

#include "daemon/base/alloc.h"
#include "daemon/engine/internal.h"

struct eng_session *eng_session_at(struct kvt_engine *engine, uint32_t idx, uint32_t generation)
{
    if (idx >= KVT_SESSIONS_MAX || engine->sessions[idx].generation != generation)
        return NULL;
    return engine->sessions[idx].session;
}

void eng_group_unref(struct eng_group *group)
{
    KVT_ASSERT(group->refs > 0);
    if (--group->refs > 0)
        return;
    KVT_ASSERT(group->sessions_count == 0);
    group->ns->groups_count--;
    kvt_free(group);
}

void eng_session_ref(struct eng_session *session)
{
    KVT_ASSERT(session->magic == KVT_SESSION_MAGIC && session->refs > 0);
    session->refs++;
}

void eng_session_unref(struct kvt_engine *engine, struct eng_session *session)
{
    KVT_ASSERT(session->magic == KVT_SESSION_MAGIC && session->refs > 0);
    if (--session->refs > 0)
        return;
    KVT_ASSERT(!session->is_alive && kvt_list_is_empty(&session->runs));
    for (uint32_t i = 0; i < session->regions_count; i++)
        eng_region_put(engine, session->mappings[i]);
    engine->layout_bytes -= session->pieces_bytes;
    kvt_free(session->pieces);
    if (session->group != NULL)
        eng_group_unref(session->group);
    session->magic = 0;
    kvt_free(session);
}

/* ---- attach -----------------------------------------------------------------------------------
 */

static bool attach_is_valid(struct kvt_op *op, const struct eng_ns *ns)
{
    static const uint8_t zero[KVT_ENGINE_ID_BYTES];
    const struct kvt_req_attach *req = &op->req.attach;

    if (memcmp(req->engine_id, zero, sizeof(zero)) == 0) {
        kvt_op_fail(op, KVT_CODE_INVALID_ARGUMENT, "engine_id is all zero: give 16 random bytes");
        return false;
    }
    if (req->rank != KVT_RANK_NONE && req->rank >= ns->ranks) {
        kvt_op_fail(op, KVT_CODE_INVALID_ARGUMENT, "rank %u: the namespace has %u ranks", req->rank,
                    ns->ranks);
        return false;
    }
    if (req->rank == KVT_RANK_NONE && !req->is_scheduler) {
        kvt_op_fail(op, KVT_CODE_INVALID_ARGUMENT, "a session is a scheduler, a rank, or both");
        return false;
    }
    return true;
}

static struct eng_group *group_of(struct kvt_engine *engine, struct kvt_op *op, struct eng_ns *ns)
{
    const struct kvt_req_attach *req = &op->req.attach;
    const struct kvt_tier *tier = engine->config.store.tiers[KVT_TIER_DEVICE];
    struct eng_group *found = NULL, *group;
    uint32_t bytes = (uint32_t)KVT_MIN((size_t)req->name.bytes, sizeof(group->name) - 1);

    kvt_list_for_each (link, &engine->groups) {
        group = KVT_CONTAINER_OF(link, struct eng_group, link);
        if (memcmp(group->engine_id, req->engine_id, KVT_ENGINE_ID_BYTES) != 0)
            continue;
        if (group->peer_uid != req->peer_uid) {
            kvt_op_fail(op, KVT_CODE_PERMISSION_DENIED, "this engine id belongs to uid %llu",
                        (unsigned long long)group->peer_uid);
            return NULL;
        }
        if (group->ns == ns)
            found = group;
    }
    if (found != NULL)
        return found;
    group = kvt_alloc_zeroed(1, sizeof(*group));
    if (group == NULL) {
        kvt_op_fail(op, KVT_CODE_RESOURCE_EXHAUSTED, "no memory for another engine");
        return NULL;
    }
    group->ns = ns;
    group->peer_uid = req->peer_uid;
    memcpy(group->engine_id, req->engine_id, KVT_ENGINE_ID_BYTES);
    if (bytes > 0)
        memcpy(group->name, req->name.at, bytes);
    for (uint32_t rank = 0; tier != NULL && rank < KVT_RANKS_MAX; rank++)
        group->home[rank] = (uint8_t)(rank % KVT_MAX(tier->zones_count, 1u));
    kvt_list_init(&group->link);
    kvt_list_init(&group->leases);
    kvt_list_init(&group->tickets);
    return group;
}

/* The session owns every mapping of the request from here on, whatever comes. */
static void take_regions(struct eng_session *session, const struct kvt_req_attach *req)
{
    session->regions_count = KVT_MIN(req->regions_count, KVT_REGIONS_PER_SESSION_MAX);
    for (uint32_t i = 0; i < session->regions_count; i++) {
        struct eng_region *mapping = eng_region_of(&req->regions[i]);

        session->mappings[i] = mapping;
        if (mapping != NULL)
            session->regions[i] = mapping->region;
        session->regions[i].is_mapped = false; /* the mapping closes it */
    }
}

static bool inline_layout(struct kvt_op *op, struct eng_layout *to,
                          const struct kvt_api_layout *from, uint64_t payload_bytes)
{
    uint64_t sum = 0;

    for (uint32_t i = 0; i < from->pieces_count; i++)
        sum += (uint64_t)from->pieces[i].bytes * from->engine_blocks_per_block;
    if (sum != payload_bytes) {
        kvt_op_fail(op, KVT_CODE_INVALID_ARGUMENT,
                    "layout of component %u: its pieces are %llu bytes a block, the namespace says "
                    "%llu",
                    from->component, (unsigned long long)sum, (unsigned long long)payload_bytes);
        return false;
    }
    to->is_present = to->is_inline = true;
    return true;
}

static bool take_layout(struct kvt_op *op, struct eng_session *session,
                        const struct kvt_api_layout *from, struct kvt_layout_piece *pieces)
{
    const struct kvt_req_attach *req = &op->req.attach;
    uint64_t payload_bytes = session->ns->components[from->component].bytes_per_block;
    struct eng_layout *to = &session->layouts[from->component];
    const struct kvt_api_quant *quant = &session->ns->components[from->component].quant;
    uint32_t inline_count = 0;
    int r;

    for (uint32_t i = 0; i < from->pieces_count; i++) {
        const struct kvt_api_piece *piece = &from->pieces[i];

        if (piece->region_idx >= session->regions_count) {
            kvt_op_fail(op, KVT_CODE_INVALID_ARGUMENT,
                        "layout of component %u: region %u of %u does not exist", from->component,
                        piece->region_idx, session->regions_count);
            return false;
        }
        inline_count += req->regions[piece->region_idx].kind == KVT_REGION_INLINE;
        pieces[i] = (struct kvt_layout_piece){.region_idx = piece->region_idx,
                                              .bytes = piece->bytes,
                                              .offset_bytes = piece->offset_bytes,
                                              .stride_bytes = piece->stride_bytes};
    }
    if (!eng_quant_pieces_are_valid(op, from, quant))
        return false;
    if (inline_count > 0 && inline_count == from->pieces_count)
        return inline_layout(op, to, from, payload_bytes);
    to->layout = (struct kvt_layout){.pieces_count = from->pieces_count,
                                     .engine_blocks_per_block = from->engine_blocks_per_block,
                                     .quant = eng_quant_of(quant),
                                     .pieces = pieces};
    r = inline_count > 0 ? KVT_LAYOUT_E_REGION
                         : kvt_layout_resolve(&to->layout, session->regions, session->regions_count,
                                              payload_bytes);
    if (r == 0)
        r = kvt_layout_check_apart(&to->layout);
    if (r != 0) {
        kvt_op_fail(op, KVT_CODE_INVALID_ARGUMENT, "layout of component %u: %s", from->component,
                    inline_count > 0 ? "pieces in inline and in mapped regions do not mix"
                                     : kvt_layout_error_text(r));
        return false;
    }
    to->is_present = true;
    return true;
}

static bool take_layouts(struct kvt_engine *engine, struct kvt_op *op, struct eng_session *session)
{
    const struct kvt_req_attach *req = &op->req.attach;
    struct kvt_layout_piece *pieces;
    size_t count = 0, at = 0;

    for (uint32_t i = 0; i < req->layouts_count; i++) {
        const struct kvt_api_layout *layout = &req->layouts[i];

        if (layout->component >= session->ns->components_count ||
            layout->pieces_count > KVT_PIECES_PER_COMPONENT_MAX ||
            layout->engine_blocks_per_block == 0 ||
            layout->engine_blocks_per_block > KVT_ENGINE_BLOCKS_PER_BLOCK_MAX) {
            kvt_op_fail(op, KVT_CODE_INVALID_ARGUMENT,
                        "layout %u: component %u, %u pieces or %u engine blocks a block is out of "
                        "range",
                        i, layout->component, layout->pieces_count,
                        layout->engine_blocks_per_block);
            return false;
        }
        count += layout->pieces_count;
    }
    if (count == 0)
        return true;
    if (engine->layout_bytes + count * sizeof(*pieces) > KVT_ENGINE_LAYOUT_BYTES_MAX) {
        kvt_op_fail(op, KVT_CODE_RESOURCE_EXHAUSTED,
                    "layouts of all sessions would take more than %u bytes",
                    KVT_ENGINE_LAYOUT_BYTES_MAX);
        return false;
    }
    pieces = session->pieces = kvt_alloc_zeroed(count, sizeof(*pieces));
    if (pieces == NULL) {
        kvt_op_fail(op, KVT_CODE_RESOURCE_EXHAUSTED, "no memory for the layouts");
        return false;
    }
    session->pieces_bytes = count * sizeof(*pieces);
    engine->layout_bytes += session->pieces_bytes;
    for (uint32_t i = 0; i < req->layouts_count; i++) {
        if (session->layouts[req->layouts[i].component].is_present) {
            kvt_op_fail(op, KVT_CODE_INVALID_ARGUMENT, "component %u has two layouts",
                        req->layouts[i].component);
            return false;
        }
        if (!take_layout(op, session, &req->layouts[i], pieces + at) ||
            !eng_gpu_layout_fits(engine, op, req->layouts[i].component,
                                 &session->layouts[req->layouts[i].component].layout))
            return false;
        at += req->layouts[i].pieces_count;
    }
    return true;
}

static bool is_full(const struct kvt_engine *engine, struct kvt_op *op)
{
    if (engine->sessions_count < KVT_SESSIONS_MAX)
        return false;
    kvt_op_fail(op, KVT_CODE_RESOURCE_EXHAUSTED, "%u sessions are attached, the most there can be",
                KVT_SESSIONS_MAX);
    return true;
}

static bool place(struct kvt_engine *engine, struct kvt_op *op, struct eng_session *session)
{
    struct eng_group *group = group_of(engine, op, session->ns);
    uint32_t idx = 0;

    if (group == NULL)
        return false;
    if (is_full(engine, op)) {
        if (group->refs == 0)
            kvt_free(group);
        return false;
    }
    while (engine->sessions[idx].session != NULL)
        idx++;
    if (group->refs == 0) {
        kvt_list_push_back(&engine->groups, &group->link);
        engine->groups_count++;
        group->ns->groups_count++;
        group->ns->is_making_way = false;
    }
    group->refs++;
    group->sessions_count++;
    session->group = group;
    eng_gpu_take_home(session);
    session->idx = idx;
    session->generation = ++engine->sessions[idx].generation;
    session->is_alive = true;
    engine->sessions[idx].session = session;
    engine->sessions_count++;
    session->ns->sessions_count++;
    return true;
}

void eng_attach(struct kvt_engine *engine, struct kvt_op *op)
{
    const struct kvt_req_attach *req = &op->req.attach;
    struct eng_session *session = kvt_alloc_zeroed(1, sizeof(*session));

    if (session == NULL) {
        eng_regions_put(engine, op);
        kvt_op_fail(op, KVT_CODE_RESOURCE_EXHAUSTED, "no memory for another session");
        return;
    }
    *session = (struct eng_session){.magic = KVT_SESSION_MAGIC,
                                    .refs = 1,
                                    .is_scheduler = req->is_scheduler,
                                    .rank = req->rank,
                                    .peer_uid = req->peer_uid,
                                    .sink = req->sink};
    kvt_list_init(&session->runs);
    take_regions(session, req);
    session->ns = eng_ns_of(engine, op, &req->ns);
    if (session->ns == NULL || !attach_is_valid(op, session->ns) ||
        !take_layouts(engine, op, session) || !place(engine, op, session)) {
        eng_session_unref(engine, session);
        return;
    }
    eng_count(engine, KVT_COUNTER_ATTACHES, 1);
    op->ans.attach = (struct kvt_ans_attach){
        .session = eng_handle(engine, ENG_HANDLE_SESSION, session->idx, session->generation),
        .api_version = KVT_ENGINE_API_VERSION,
        .epoch = session->ns->epoch,
        .lease_ns_max = engine->config.lease_ns_max,
        .ticket_ns_max = engine->config.ticket_ns_max};
}

void eng_op_attach(struct kvt_engine *engine, struct kvt_op *op)
{
    const struct eng_ns *ns;

    if (!eng_has_gpu_regions(op)) {
        eng_attach(engine, op);
        return;
    }
    /* What is refused anyway is not opened first. */
    ns = eng_ns_of(engine, op, &op->req.attach.ns);
    if (ns == NULL || !attach_is_valid(op, ns) || is_full(engine, op))
        eng_regions_put(engine, op);
    else
        eng_attach_gpu(engine, op);
}

/* ---- detach -----------------------------------------------------------------------------------
 */

void eng_session_end(struct kvt_engine *engine, struct eng_session *session)
{
    struct eng_group *group = session->group;

    KVT_ASSERT(session->is_alive && engine->sessions[session->idx].session == session);
    session->is_alive = false;
    engine->sessions[session->idx].session = NULL;
    engine->sessions_count--;
    session->ns->sessions_count--;
    while (!kvt_list_is_empty(&session->runs)) {
        struct eng_run *run = KVT_CONTAINER_OF(session->runs.next, struct eng_run, session_link);

        kvt_list_remove(&run->session_link);
        eng_run_stop(engine, run, KVT_MOVE_ABORTED, KVT_CODE_CANCELLED, "the session ended");
    }
    if (--group->sessions_count == 0) {
        kvt_list_remove(&group->link);
        engine->groups_count--;
        group->ns->last_used_ns = engine->now_ns;
        eng_group_drop_all(engine, group);
    }
    eng_count(engine, KVT_COUNTER_DETACHES, 1);
    eng_session_unref(engine, session);
}

void eng_op_detach(struct kvt_engine *engine, struct kvt_op *op)
{
    const struct kvt_handle *handle = &op->req.detach.session;
    struct eng_session *session;

    if (!eng_handle_is_ours(engine, op, ENG_HANDLE_SESSION, handle, "session"))
        return;
    session = eng_session_at(engine, (uint32_t)handle->id, (uint32_t)(handle->id >> 32));
    if (session == NULL)
        kvt_op_fail(op, KVT_CODE_NOT_FOUND, "this session has ended");
    else
        eng_session_end(engine, session);
}

void eng_sessions_tell_epoch(struct kvt_engine *engine, const struct eng_ns *ns)
{
    struct kvt_notice notice = {.kind = KVT_NOTICE_EPOCH, .epoch = ns->epoch};

    for (uint32_t i = 0; i < KVT_SESSIONS_MAX; i++) {
        struct eng_session *session = engine->sessions[i].session;

        if (session != NULL && session->ns == ns)
            eng_notify(engine, session, &notice);
    }
}
