/* Requests as a client sends them. The protobuf-c view points into op->req and into the arena. */
#include <string.h>

#include "proto/codec/wire.h"

typedef ProtobufCMessage *(*encode_fn)(struct kvt_op *op);

static ProtobufCMessage *encode_open_namespace(struct kvt_op *op)
{
    const struct kvt_req_open_namespace *req = &op->req.open_namespace;
    Kvtier__V1__OpenNamespaceRequest *out = kvt_arena_alloc(op->arena, sizeof(*out));

    if (out == NULL)
        return NULL;
    kvtier__v1__open_namespace_request__init(out);
    if (req->is_by_fingerprint) {
        out->fingerprint = kvt_codec_put_bytes(req->fingerprint, KVT_FINGERPRINT_BYTES);
        return &out->base;
    }
    out->block_tokens = req->block_tokens;
    out->ranks = req->ranks;
    out->components = kvt_arena_array(op->arena, req->components_count, sizeof(*out->components));
    out->tags = kvt_arena_array(op->arena, req->tags_count, sizeof(*out->tags));
    if (out->components == NULL || out->tags == NULL)
        return NULL;
    out->n_components = req->components_count;
    for (uint32_t i = 0; i < req->components_count; i++) {
        out->components[i] = kvt_codec_put_component(op, &req->components[i]);
        if (out->components[i] == NULL)
            return NULL;
    }
    out->model = kvt_codec_put_text(&req->model);
    out->revision = kvt_codec_put_text(&req->revision);
    out->dtype = kvt_codec_put_text(&req->dtype);
    out->layout = kvt_codec_put_text(&req->layout);
    out->n_tags = req->tags_count;
    for (uint32_t i = 0; i < req->tags_count; i++)
        out->tags[i] = kvt_codec_put_text(&req->tags[i]);
    return &out->base;
}

static bool put_layouts(struct kvt_op *op, Kvtier__V1__AttachRequest *out)
{
    const struct kvt_req_attach *req = &op->req.attach;

    out->layouts = kvt_arena_array(op->arena, req->layouts_count, sizeof(*out->layouts));
    if (out->layouts == NULL)
        return false;
    out->n_layouts = req->layouts_count;
    for (uint32_t i = 0; i < req->layouts_count; i++) {
        const struct kvt_api_layout *layout = &req->layouts[i];
        Kvtier__V1__Layout *view = kvt_arena_alloc(op->arena, sizeof(*view));
        Kvtier__V1__Piece *pieces =
            kvt_arena_array(op->arena, layout->pieces_count, sizeof(*pieces));

        if (view == NULL || pieces == NULL)
            return false;
        kvtier__v1__layout__init(view);
        view->component = layout->component;
        view->engine_blocks_per_block = layout->engine_blocks_per_block;
        view->n_pieces = layout->pieces_count;
        view->pieces = kvt_arena_array(op->arena, layout->pieces_count, sizeof(*view->pieces));
        if (view->pieces == NULL)
            return false;
        for (uint32_t p = 0; p < layout->pieces_count; p++) {
            kvtier__v1__piece__init(&pieces[p]);
            pieces[p].region_idx = layout->pieces[p].region_idx;
            pieces[p].bytes = layout->pieces[p].bytes;
            pieces[p].offset_bytes = layout->pieces[p].offset_bytes;
            pieces[p].stride_bytes = layout->pieces[p].stride_bytes;
            view->pieces[p] = &pieces[p];
        }
        out->layouts[i] = view;
    }
    return true;
}

static Kvtier__V1__CudaIpc *put_cuda_ipc(struct kvt_op *op, const struct kvt_api_region *region)
{
    Kvtier__V1__CudaIpc *view = kvt_arena_alloc(op->arena, sizeof(*view));

    if (view == NULL)
        return NULL;
    kvtier__v1__cuda_ipc__init(view);
    view->handle = kvt_codec_put_bytes(region->cuda_ipc.handle, KVT_CUDA_IPC_HANDLE_BYTES);
    view->offset_bytes = region->cuda_ipc.offset_bytes;
    view->device_uuid = kvt_codec_put_bytes(region->cuda_ipc.device_uuid, KVT_CUDA_UUID_BYTES);
    return view;
}

static Kvtier__V1__Region *put_region(struct kvt_op *op, const struct kvt_api_region *region)
{
    Kvtier__V1__Region *view = kvt_arena_alloc(op->arena, sizeof(*view));

    if (view == NULL)
        return NULL;
    kvtier__v1__region__init(view);
    view->bytes = region->bytes;
    switch (region->kind) {
    case KVT_REGION_MEMFD:
        view->kind_case = KVTIER__V1__REGION__KIND_MEMFD_TOKEN;
        view->memfd_token = kvt_codec_put_bytes(region->token, KVT_REGION_TOKEN_BYTES);
        break;
    case KVT_REGION_INLINE:
        view->kind_case = KVTIER__V1__REGION__KIND_IS_INLINE;
        view->is_inline = true;
        break;
    case KVT_REGION_CUDA_IPC:
        view->kind_case = KVTIER__V1__REGION__KIND_CUDA_IPC;
        view->cuda_ipc = put_cuda_ipc(op, region);
        if (view->cuda_ipc == NULL)
            return NULL;
        break;
    }
    return view;
}

static ProtobufCMessage *encode_attach(struct kvt_op *op)
{
    const struct kvt_req_attach *req = &op->req.attach;
    Kvtier__V1__AttachRequest *out = kvt_arena_alloc(op->arena, sizeof(*out));

    if (out == NULL)
        return NULL;
    kvtier__v1__attach_request__init(out);
    if (!kvt_codec_put_handle(op, &req->ns, &out->namespace_handle))
        return NULL;
    out->engine_id = kvt_codec_put_bytes(req->engine_id, KVT_ENGINE_ID_BYTES);
    out->role =
        req->is_scheduler ? KVTIER__V1__ROLE__ROLE_SCHEDULER : KVTIER__V1__ROLE__ROLE_WORKER;
    out->rank = req->rank == KVT_RANK_NONE ? -1 : (int32_t)req->rank;
    out->api_version = req->api_version;
    out->name = kvt_codec_put_text(&req->name);
    out->regions = kvt_arena_array(op->arena, req->regions_count, sizeof(*out->regions));
    if (out->regions == NULL)
        return NULL;
    out->n_regions = req->regions_count;
    for (uint32_t i = 0; i < req->regions_count; i++) {
        out->regions[i] = put_region(op, &req->regions[i]);
        if (out->regions[i] == NULL)
            return NULL;
    }
    return put_layouts(op, out) ? &out->base : NULL;
}

static ProtobufCMessage *encode_lookup(struct kvt_op *op)
{
    const struct kvt_req_lookup *req = &op->req.lookup;
    Kvtier__V1__LookupRequest *out = kvt_arena_alloc(op->arena, sizeof(*out));

    if (out == NULL)
        return NULL;
    kvtier__v1__lookup_request__init(out);
    out->prefix = kvt_codec_put_prefix(op, &req->prefix);
    if (out->prefix == NULL || !kvt_codec_put_handle(op, &req->session, &out->session))
        return NULL;
    out->limit_tokens = req->limit_tokens == UINT64_MAX ? 0 : req->limit_tokens;
    out->tiers = req->tiers;
    out->wants_lease = req->wants_lease;
    out->lease_ns = req->lease_ns;
    out->wants_why = req->wants_why;
    out->wants_prefetch = req->wants_prefetch;
    return &out->base;
}

/* Neighbouring blocks, the usual case, are sent as first and count. */
static Kvtier__V1__Moves *put_moves(struct kvt_op *op, const struct kvt_api_moves *moves)
{
    Kvtier__V1__Moves *out = kvt_arena_alloc(op->arena, sizeof(*out));

    if (out == NULL)
        return NULL;
    kvtier__v1__moves__init(out);
    out->component = moves->component;
    if (moves->count > 0 &&
        moves->block_idx[moves->count - 1] - moves->block_idx[0] == moves->count - 1u) {
        out->first_block_idx = moves->block_idx[0];
        out->blocks_count = moves->count;
    } else {
        out->n_block_idx = moves->count;
        out->block_idx = (uint64_t *)(uintptr_t)moves->block_idx;
    }
    out->n_engine_blocks = moves->engine_blocks_count;
    out->engine_blocks = (uint64_t *)(uintptr_t)moves->engine_blocks;
    return out;
}

static bool put_all_moves(struct kvt_op *op, const struct kvt_api_moves *moves, uint32_t count,
                          Kvtier__V1__Moves ***ret_out)
{
    Kvtier__V1__Moves **out = kvt_arena_array(op->arena, count, sizeof(Kvtier__V1__Moves *));

    if (out == NULL)
        return false;
    for (uint32_t i = 0; i < count; i++) {
        out[i] = put_moves(op, &moves[i]);
        if (out[i] == NULL)
            return false;
    }
    *ret_out = out;
    return true;
}

static ProtobufCMessage *encode_promote(struct kvt_op *op)
{
    const struct kvt_req_promote *req = &op->req.promote;
    Kvtier__V1__PromoteRequest *out = kvt_arena_alloc(op->arena, sizeof(*out));

    if (out == NULL)
        return NULL;
    kvtier__v1__promote_request__init(out);
    out->prefix = kvt_codec_put_prefix(op, &req->prefix);
    if (out->prefix == NULL || !kvt_codec_put_handle(op, &req->session, &out->session) ||
        !kvt_codec_put_handle(op, &req->lease, &out->lease) ||
        !put_all_moves(op, req->moves, req->moves_count, &out->moves))
        return NULL;
    out->n_moves = req->moves_count;
    out->target = (Kvtier__V1__Target)req->target;
    out->policy = (Kvtier__V1__PromotePolicy)req->policy;
    out->timeout_ns = req->timeout_ns;
    out->op_id = req->op_id;
    out->layer_groups = req->layer_groups;
    out->wants_inline = req->wants_inline;
    out->in_place = req->is_in_place;
    return &out->base;
}

static ProtobufCMessage *encode_reserve(struct kvt_op *op)
{
    const struct kvt_req_reserve *req = &op->req.reserve;
    Kvtier__V1__ReserveRequest *out = kvt_arena_alloc(op->arena, sizeof(*out));
    Kvtier__V1__BlockRange *ranges;

    if (out == NULL)
        return NULL;
    kvtier__v1__reserve_request__init(out);
    out->prefix = kvt_codec_put_prefix(op, &req->prefix);
    out->wants = kvt_arena_array(op->arena, req->wants_count, sizeof(*out->wants));
    ranges = kvt_arena_array(op->arena, req->wants_count, sizeof(*ranges));
    if (out->prefix == NULL || out->wants == NULL || ranges == NULL ||
        !kvt_codec_put_handle(op, &req->session, &out->session))
        return NULL;
    for (uint32_t i = 0; i < req->wants_count; i++) {
        kvtier__v1__block_range__init(&ranges[i]);
        ranges[i].component = req->wants[i].component;
        ranges[i].first_block_idx = req->wants[i].first_block_idx;
        ranges[i].end_block_idx = req->wants[i].end_block_idx;
        out->wants[i] = &ranges[i];
    }
    out->n_wants = req->wants_count;
    out->ticket_ns = req->ticket_ns;
    return &out->base;
}

static ProtobufCMessage *encode_demote(struct kvt_op *op)
{
    const struct kvt_req_demote *req = &op->req.demote;
    Kvtier__V1__DemoteRequest *out = kvt_arena_alloc(op->arena, sizeof(*out));

    if (out == NULL)
        return NULL;
    kvtier__v1__demote_request__init(out);
    out->prefix = kvt_codec_put_prefix(op, &req->prefix);
    if (out->prefix == NULL || !kvt_codec_put_handle(op, &req->session, &out->session) ||
        !kvt_codec_put_handle(op, &req->ticket, &out->ticket) ||
        !kvt_codec_put_handle(op, &req->lease, &out->lease) ||
        !put_all_moves(op, req->moves, req->moves_count, &out->moves))
        return NULL;
    out->n_moves = req->moves_count;
    out->is_between_tiers = req->is_between_tiers;
    out->from_tiers = req->from_tiers;
    out->to_tier = req->to_tier;
    out->op_id = req->op_id;
    out->wants_durable = req->wants_durable;
    out->inline_data = kvt_codec_put_bytes(req->inline_data, req->inline_bytes);
    return &out->base;
}

static ProtobufCMessage *encode_quiesce(struct kvt_op *op)
{
    Kvtier__V1__QuiesceRequest *out = kvt_arena_alloc(op->arena, sizeof(*out));

    if (out == NULL)
        return NULL;
    kvtier__v1__quiesce_request__init(out);
    out->op_id = op->req.quiesce.op_id;
    return kvt_codec_put_handle(op, &op->req.quiesce.session, &out->session) ? &out->base : NULL;
}

static ProtobufCMessage *encode_release(struct kvt_op *op)
{
    Kvtier__V1__ReleaseRequest *out = kvt_arena_alloc(op->arena, sizeof(*out));

    if (out == NULL)
        return NULL;
    kvtier__v1__release_request__init(out);
    if (!kvt_codec_put_handle(op, &op->req.release.session, &out->session) ||
        !kvt_codec_put_handle(op, &op->req.release.lease, &out->lease) ||
        !kvt_codec_put_handle(op, &op->req.release.ticket, &out->ticket))
        return NULL;
    return &out->base;
}

static ProtobufCBinaryData put_fingerprint(const uint8_t fingerprint[KVT_FINGERPRINT_BYTES])
{
    if (kvt_codec_is_zero(fingerprint, KVT_FINGERPRINT_BYTES))
        return (ProtobufCBinaryData){0};
    return kvt_codec_put_bytes(fingerprint, KVT_FINGERPRINT_BYTES);
}

static ProtobufCMessage *encode_evict(struct kvt_op *op)
{
    const struct kvt_req_evict *req = &op->req.evict;
    Kvtier__V1__EvictRequest *out = kvt_arena_alloc(op->arena, sizeof(*out));

    if (out == NULL)
        return NULL;
    kvtier__v1__evict_request__init(out);
    out->prefix = kvt_codec_put_prefix(op, &req->prefix);
    if (out->prefix == NULL || !kvt_codec_put_handle(op, &req->ns, &out->namespace_handle))
        return NULL;
    out->fingerprint = put_fingerprint(req->fingerprint);
    out->is_whole_namespace = req->is_whole_namespace;
    return &out->base;
}

static ProtobufCMessage *encode_reset(struct kvt_op *op)
{
    Kvtier__V1__ResetRequest *out = kvt_arena_alloc(op->arena, sizeof(*out));

    if (out == NULL)
        return NULL;
    kvtier__v1__reset_request__init(out);
    out->fingerprint = put_fingerprint(op->req.reset.fingerprint);
    return kvt_codec_put_handle(op, &op->req.reset.ns, &out->namespace_handle) ? &out->base : NULL;
}

static ProtobufCMessage *encode_stats(struct kvt_op *op)
{
    Kvtier__V1__StatsRequest *out = kvt_arena_alloc(op->arena, sizeof(*out));

    if (out == NULL)
        return NULL;
    kvtier__v1__stats_request__init(out);
    return &out->base;
}

static ProtobufCMessage *encode_dump(struct kvt_op *op)
{
    const struct kvt_req_dump *req = &op->req.dump;
    Kvtier__V1__DumpRequest *out = kvt_arena_alloc(op->arena, sizeof(*out));

    if (out == NULL)
        return NULL;
    kvtier__v1__dump_request__init(out);
    out->fingerprint = put_fingerprint(req->fingerprint);
    out->depth_max_blocks = req->depth_max_blocks == UINT64_MAX ? 0 : req->depth_max_blocks;
    out->resume = req->resume;
    out->nodes_max = req->nodes_max;
    return &out->base;
}

static ProtobufCMessage *encode_maintain(struct kvt_op *op)
{
    Kvtier__V1__MaintainRequest *out = kvt_arena_alloc(op->arena, sizeof(*out));

    if (out == NULL)
        return NULL;
    kvtier__v1__maintain_request__init(out);
    out->action = (Kvtier__V1__MaintainAction)op->req.maintain.action;
    out->rate_bytes_per_s = op->req.maintain.rate_bytes_per_s;
    return &out->base;
}

int kvt_codec_encode_request(struct kvt_op *op, struct kvt_codec_message *ret_message)
{
    static const encode_fn encoders[KVT_OP_KINDS] = {
        [KVT_OP_OPEN_NAMESPACE] = encode_open_namespace,
        [KVT_OP_ATTACH] = encode_attach,
        [KVT_OP_LOOKUP] = encode_lookup,
        [KVT_OP_PROMOTE] = encode_promote,
        [KVT_OP_RESERVE] = encode_reserve,
        [KVT_OP_DEMOTE] = encode_demote,
        [KVT_OP_QUIESCE] = encode_quiesce,
        [KVT_OP_RELEASE] = encode_release,
        [KVT_OP_EVICT] = encode_evict,
        [KVT_OP_RESET] = encode_reset,
        [KVT_OP_STATS] = encode_stats,
        [KVT_OP_DUMP] = encode_dump,
        [KVT_OP_MAINTAIN] = encode_maintain,
    };
    ProtobufCMessage *message;

    KVT_ASSERT((unsigned)op->kind < KVT_OP_KINDS && encoders[op->kind] != NULL);
    message = encoders[op->kind](op);
    if (message == NULL)
        return kvt_codec_no_memory(op);
    *ret_message = (struct kvt_codec_message){.message = message,
                                              .bytes = protobuf_c_message_get_packed_size(message)};
    return 0;
}
