/* Requests as they come from a peer: each function checks one message of kvtier.v1 and fills one
 * struct kvt_req_*. */
#include <string.h>

#include "proto/codec/wire.h"

static int take_tags(struct kvt_op *op, const Kvtier__V1__OpenNamespaceRequest *in)
{
    struct kvt_req_open_namespace *req = &op->req.open_namespace;
    struct kvt_text *tags;

    KVT_CODEC_TRY(kvt_codec_take_count(op, in->n_tags, "tags (count)", 0, KVT_CODEC_TAGS_MAX));
    tags = kvt_arena_array(op->arena, in->n_tags, sizeof(*tags));
    if (tags == NULL)
        return kvt_codec_no_memory(op);
    for (size_t i = 0; i < in->n_tags; i++) {
        KVT_CODEC_TRY(
            kvt_codec_take_text(op, &in->tags[i], "tags", KVT_MODEL_TEXT_BYTES_MAX, &tags[i]));
        if (tags[i].bytes == 0 || memchr(tags[i].at, '=', tags[i].bytes) == NULL)
            return kvt_codec_bad(op, "tags[%zu]: not of the form key=value", i);
        if (i > 0) {
            uint32_t common = KVT_MIN(tags[i].bytes, tags[i - 1].bytes);
            int order = memcmp(tags[i - 1].at, tags[i].at, common);

            if (order > 0 || (order == 0 && tags[i - 1].bytes >= tags[i].bytes))
                return kvt_codec_bad(op, "tags[%zu]: tags must be sorted and unique", i);
        }
    }
    req->tags = tags;
    req->tags_count = (uint32_t)in->n_tags;
    return 0;
}

static int decode_open_namespace(struct kvt_op *op, const uint8_t *at, size_t bytes)
{
    struct kvt_req_open_namespace *req = &op->req.open_namespace;
    Kvtier__V1__OpenNamespaceRequest *in;

    KVT_CODEC_TRY(
        kvt_codec_unpack(op, &kvtier__v1__open_namespace_request__descriptor, at, bytes, &in));
    if (in->fingerprint.len > 0) {
        req->is_by_fingerprint = true;
        return kvt_codec_take_fingerprint(op, &in->fingerprint, req->fingerprint);
    }
    KVT_CODEC_TRY(
        kvt_codec_take_count(op, in->block_tokens, "block_tokens", 1, KVT_BLOCK_TOKENS_MAX));
    KVT_CODEC_TRY(kvt_codec_take_count(op, in->ranks, "ranks", 1, KVT_RANKS_MAX));
    KVT_CODEC_TRY(
        kvt_codec_take_count(op, in->n_components, "components (count)", 1, KVT_COMPONENTS_MAX));
    req->block_tokens = in->block_tokens;
    req->ranks = in->ranks;
    req->components_count = (uint32_t)in->n_components;
    for (size_t i = 0; i < in->n_components; i++)
        KVT_CODEC_TRY(kvt_codec_take_component(op, in->components[i], &req->components[i]));
    KVT_CODEC_TRY(
        kvt_codec_take_text(op, &in->model, "model", KVT_MODEL_TEXT_BYTES_MAX, &req->model));
    KVT_CODEC_TRY(kvt_codec_take_text(op, &in->revision, "revision", KVT_MODEL_TEXT_BYTES_MAX,
                                      &req->revision));
    KVT_CODEC_TRY(
        kvt_codec_take_text(op, &in->dtype, "dtype", KVT_MODEL_TEXT_BYTES_MAX, &req->dtype));
    KVT_CODEC_TRY(
        kvt_codec_take_text(op, &in->layout, "layout", KVT_MODEL_TEXT_BYTES_MAX, &req->layout));
    return take_tags(op, in);
}

static int take_cuda_ipc(struct kvt_op *op, const Kvtier__V1__CudaIpc *in,
                         struct kvt_api_region *ret_region)
{
    KVT_CODEC_TRY(kvt_codec_take_fixed(op, &in->handle, "regions.cuda_ipc.handle",
                                       KVT_CUDA_IPC_HANDLE_BYTES, ret_region->cuda_ipc.handle));
    KVT_CODEC_TRY(kvt_codec_take_fixed(op, &in->device_uuid, "regions.cuda_ipc.device_uuid",
                                       KVT_CUDA_UUID_BYTES, ret_region->cuda_ipc.device_uuid));
    KVT_CODEC_TRY(kvt_codec_take_count(op, in->offset_bytes, "regions.cuda_ipc.offset_bytes", 0,
                                       KVT_CODEC_REGION_BYTES_MAX - ret_region->bytes));
    ret_region->cuda_ipc.offset_bytes = in->offset_bytes;
    ret_region->kind = KVT_REGION_CUDA_IPC;
    return 0;
}

static int take_region(struct kvt_op *op, const Kvtier__V1__Region *in,
                       struct kvt_api_region *ret_region)
{
    KVT_CODEC_TRY(
        kvt_codec_take_count(op, in->bytes, "regions.bytes", 1, KVT_CODEC_REGION_BYTES_MAX));
    ret_region->bytes = in->bytes;
    switch (in->kind_case) {
    case KVTIER__V1__REGION__KIND_MEMFD_TOKEN:
        ret_region->kind = KVT_REGION_MEMFD;
        return kvt_codec_take_fixed(op, &in->memfd_token, "regions.memfd_token",
                                    KVT_REGION_TOKEN_BYTES, ret_region->token);
    case KVTIER__V1__REGION__KIND_IS_INLINE:
        if (!in->is_inline)
            return kvt_codec_bad(op, "regions.is_inline: must be true if set");
        ret_region->kind = KVT_REGION_INLINE;
        return 0;
    case KVTIER__V1__REGION__KIND_CUDA_IPC:
        return take_cuda_ipc(op, in->cuda_ipc, ret_region);
    default:
        return kvt_codec_bad(op, "regions: none of memfd_token, is_inline and cuda_ipc is set");
    }
}

/* Whether every engine block id stays inside its region depends on the id: the service checks that
 * at each move. Here: the first block fits at all. */
static int take_layout(struct kvt_op *op, const Kvtier__V1__Layout *in,
                       struct kvt_api_layout *ret_layout)
{
    const struct kvt_req_attach *req = &op->req.attach;
    struct kvt_api_piece *pieces;

    KVT_CODEC_TRY(
        kvt_codec_take_count(op, in->component, "layouts.component", 0, KVT_COMPONENTS_MAX - 1));
    KVT_CODEC_TRY(kvt_codec_take_count(op, in->engine_blocks_per_block,
                                       "layouts.engine_blocks_per_block", 1,
                                       KVT_ENGINE_BLOCKS_PER_BLOCK_MAX));
    KVT_CODEC_TRY(kvt_codec_take_count(op, in->n_pieces, "layouts.pieces (count)", 1,
                                       KVT_PIECES_PER_COMPONENT_MAX));
    pieces = kvt_arena_array(op->arena, in->n_pieces, sizeof(*pieces));
    if (pieces == NULL)
        return kvt_codec_no_memory(op);
    for (size_t i = 0; i < in->n_pieces; i++) {
        const Kvtier__V1__Piece *piece = in->pieces[i];

        if (piece->region_idx >= req->regions_count)
            return kvt_codec_bad(op, "layouts.pieces.region_idx: %u of %u regions",
                                 piece->region_idx, req->regions_count);
        KVT_CODEC_TRY(
            kvt_codec_take_count(op, piece->bytes, "layouts.pieces.bytes", 1, KVT_SHARD_BYTES_MAX));
        KVT_CODEC_TRY(kvt_codec_take_count(op, piece->offset_bytes, "layouts.pieces.offset_bytes",
                                           0, KVT_CODEC_REGION_BYTES_MAX));
        KVT_CODEC_TRY(kvt_codec_take_count(op, piece->stride_bytes, "layouts.pieces.stride_bytes",
                                           0, KVT_CODEC_REGION_BYTES_MAX));
        if (piece->offset_bytes + piece->bytes > req->regions[piece->region_idx].bytes)
            return kvt_codec_bad(op, "layouts.pieces[%zu]: ends beyond its region", i);
        pieces[i] = (struct kvt_api_piece){.region_idx = piece->region_idx,
                                           .bytes = piece->bytes,
                                           .offset_bytes = piece->offset_bytes,
                                           .stride_bytes = piece->stride_bytes};
    }
    ret_layout->component = in->component;
    ret_layout->engine_blocks_per_block = in->engine_blocks_per_block;
    ret_layout->pieces_count = (uint32_t)in->n_pieces;
    ret_layout->pieces = pieces;
    return 0;
}

static int take_layouts(struct kvt_op *op, const Kvtier__V1__AttachRequest *in)
{
    struct kvt_req_attach *req = &op->req.attach;
    struct kvt_api_layout *layouts;
    uint32_t seen = 0;

    KVT_CODEC_TRY(
        kvt_codec_take_count(op, in->n_layouts, "layouts (count)", 0, KVT_COMPONENTS_MAX));
    layouts = kvt_arena_array(op->arena, in->n_layouts, sizeof(*layouts));
    if (layouts == NULL)
        return kvt_codec_no_memory(op);
    for (size_t i = 0; i < in->n_layouts; i++) {
        KVT_CODEC_TRY(take_layout(op, in->layouts[i], &layouts[i]));
        if ((seen & 1u << layouts[i].component) != 0)
            return kvt_codec_bad(op, "layouts.component: %u is there twice", layouts[i].component);
        seen |= 1u << layouts[i].component;
    }
    req->layouts = layouts;
    req->layouts_count = (uint32_t)in->n_layouts;
    return 0;
}

static int decode_attach(struct kvt_op *op, const uint8_t *at, size_t bytes)
{
    struct kvt_req_attach *req = &op->req.attach;
    Kvtier__V1__AttachRequest *in;

    KVT_CODEC_TRY(kvt_codec_unpack(op, &kvtier__v1__attach_request__descriptor, at, bytes, &in));
    KVT_CODEC_TRY(kvt_codec_take_handle(op, &in->namespace_handle, "namespace_handle", &req->ns));
    KVT_CODEC_TRY(
        kvt_codec_take_fixed(op, &in->engine_id, "engine_id", KVT_ENGINE_ID_BYTES, req->engine_id));
    KVT_CODEC_TRY(kvt_codec_take_count(op, (uint64_t)in->role, "role", 0, 1));
    req->is_scheduler = in->role == KVTIER__V1__ROLE__ROLE_SCHEDULER;
    if (in->rank < -1 || in->rank >= (int32_t)KVT_RANKS_MAX)
        return kvt_codec_bad(op, "rank: %d is not within -1 .. %u", in->rank, KVT_RANKS_MAX - 1);
    req->rank = in->rank < 0 ? KVT_RANK_NONE : (uint32_t)in->rank;
    req->api_version = in->api_version;
    KVT_CODEC_TRY(kvt_codec_take_text(op, &in->name, "name", KVT_MODEL_TEXT_BYTES_MAX, &req->name));
    KVT_CODEC_TRY(
        kvt_codec_take_count(op, in->n_regions, "regions (count)", 0, KVT_REGIONS_PER_SESSION_MAX));
    for (size_t i = 0; i < in->n_regions; i++)
        KVT_CODEC_TRY(take_region(op, in->regions[i], &req->regions[i]));
    req->regions_count = (uint32_t)in->n_regions;
    return take_layouts(op, in);
}

static int take_tiers(struct kvt_op *op, uint32_t in, const char *field, uint32_t *ret_tiers)
{
    KVT_CODEC_TRY(kvt_codec_take_count(op, in, field, 0, KVT_TIER_BITS_ALL));
    *ret_tiers = in;
    return 0;
}

static int decode_lookup(struct kvt_op *op, const uint8_t *at, size_t bytes)
{
    struct kvt_req_lookup *req = &op->req.lookup;
    Kvtier__V1__LookupRequest *in;

    KVT_CODEC_TRY(kvt_codec_unpack(op, &kvtier__v1__lookup_request__descriptor, at, bytes, &in));
    KVT_CODEC_TRY(kvt_codec_take_handle(op, &in->session, "session", &req->session));
    KVT_CODEC_TRY(kvt_codec_take_prefix(op, in->prefix, &req->prefix));
    KVT_CODEC_TRY(take_tiers(op, in->tiers, "tiers", &req->tiers));
    if (req->tiers == 0)
        req->tiers = KVT_TIER_BITS_ALL;
    req->limit_tokens = in->limit_tokens == 0 ? UINT64_MAX : in->limit_tokens;
    req->wants_lease = in->wants_lease != 0;
    req->lease_ns = in->lease_ns;
    req->wants_why = in->wants_why != 0;
    req->wants_prefetch = in->wants_prefetch != 0;
    return 0;
}

/* The list of block indices, from either form. */
static int take_blocks(struct kvt_op *op, const Kvtier__V1__Moves *in, uint64_t *ret_count,
                       const uint64_t **ret_blocks)
{
    uint64_t count = in->n_block_idx > 0 ? in->n_block_idx : in->blocks_count;
    uint64_t *blocks;

    KVT_CODEC_TRY(kvt_codec_take_count(op, count, "moves (blocks)", 1, KVT_MOVES_PER_REQUEST_MAX));
    if (in->n_block_idx > 0) {
        for (size_t i = 0; i < in->n_block_idx; i++) {
            KVT_CODEC_TRY(kvt_codec_take_count(op, in->block_idx[i], "moves.block_idx",
                                               i == 0 ? 0 : in->block_idx[i - 1] + 1,
                                               KVT_PREFIX_TOKENS_MAX - 1));
        }
        *ret_blocks = in->block_idx;
    } else {
        KVT_CODEC_TRY(kvt_codec_take_count(op, in->first_block_idx, "moves.first_block_idx", 0,
                                           KVT_PREFIX_TOKENS_MAX - count));
        blocks = kvt_arena_alloc(op->arena, count * sizeof(*blocks));
        if (blocks == NULL)
            return kvt_codec_no_memory(op);
        for (uint64_t i = 0; i < count; i++)
            blocks[i] = in->first_block_idx + i;
        *ret_blocks = blocks;
    }
    *ret_count = count;
    return 0;
}

static int take_moves(struct kvt_op *op, size_t in_count, Kvtier__V1__Moves *const *in,
                      uint32_t *ret_count, struct kvt_api_moves *ret_moves)
{
    uint64_t total = 0;
    uint32_t seen = 0;

    KVT_CODEC_TRY(kvt_codec_take_count(op, in_count, "moves (count)", 0, KVT_COMPONENTS_MAX));
    for (size_t i = 0; i < in_count; i++) {
        uint64_t count = 0;

        KVT_CODEC_TRY(kvt_codec_take_count(op, in[i]->component, "moves.component", 0,
                                           KVT_COMPONENTS_MAX - 1));
        if ((seen & 1u << in[i]->component) != 0)
            return kvt_codec_bad(op, "moves.component: %u is there twice", in[i]->component);
        seen |= 1u << in[i]->component;
        KVT_CODEC_TRY(take_blocks(op, in[i], &count, &ret_moves[i].block_idx));
        total += count;
        KVT_CODEC_TRY(
            kvt_codec_take_count(op, total, "moves (blocks in all)", 1, KVT_MOVES_PER_REQUEST_MAX));
        if (in[i]->n_engine_blocks % count != 0 ||
            in[i]->n_engine_blocks / count > KVT_ENGINE_BLOCKS_PER_BLOCK_MAX)
            return kvt_codec_bad(op, "moves.engine_blocks: %zu for %llu blocks",
                                 in[i]->n_engine_blocks, (unsigned long long)count);
        ret_moves[i].component = in[i]->component;
        ret_moves[i].count = (uint32_t)count;
        ret_moves[i].engine_blocks = in[i]->engine_blocks;
        ret_moves[i].engine_blocks_count = (uint32_t)in[i]->n_engine_blocks;
    }
    *ret_count = (uint32_t)in_count;
    return 0;
}

static int decode_promote(struct kvt_op *op, const uint8_t *at, size_t bytes)
{
    struct kvt_req_promote *req = &op->req.promote;
    Kvtier__V1__PromoteRequest *in;

    KVT_CODEC_TRY(kvt_codec_unpack(op, &kvtier__v1__promote_request__descriptor, at, bytes, &in));
    KVT_CODEC_TRY(kvt_codec_take_handle(op, &in->session, "session", &req->session));
    KVT_CODEC_TRY(kvt_codec_take_handle(op, &in->lease, "lease", &req->lease));
    KVT_CODEC_TRY(kvt_codec_take_prefix(op, in->prefix, &req->prefix));
    KVT_CODEC_TRY(kvt_codec_take_count(op, (uint64_t)in->target, "target", 0, KVT_TARGET_L2));
    KVT_CODEC_TRY(kvt_codec_take_count(op, (uint64_t)in->policy, "policy", 0, KVT_PROMOTE_TIMEOUT));
    KVT_CODEC_TRY(take_moves(op, in->n_moves, in->moves, &req->moves_count, req->moves));
    KVT_CODEC_TRY(
        kvt_codec_take_count(op, in->layer_groups, "layer_groups", 0, KVT_CODEC_LAYER_GROUPS_MAX));
    req->target = (enum kvt_target)in->target;
    req->policy = (enum kvt_promote_policy)in->policy;
    req->timeout_ns = in->timeout_ns;
    req->op_id = in->op_id;
    req->layer_groups = in->layer_groups;
    req->wants_inline = in->wants_inline != 0;
    req->is_in_place = in->in_place != 0;
    return 0;
}

static int decode_reserve(struct kvt_op *op, const uint8_t *at, size_t bytes)
{
    struct kvt_req_reserve *req = &op->req.reserve;
    Kvtier__V1__ReserveRequest *in;
    uint64_t total = 0;

    KVT_CODEC_TRY(kvt_codec_unpack(op, &kvtier__v1__reserve_request__descriptor, at, bytes, &in));
    KVT_CODEC_TRY(kvt_codec_take_handle(op, &in->session, "session", &req->session));
    KVT_CODEC_TRY(kvt_codec_take_prefix(op, in->prefix, &req->prefix));
    KVT_CODEC_TRY(
        kvt_codec_take_count(op, in->n_wants, "wants (count)", 0, KVT_COUNT_OF(req->wants)));
    for (size_t i = 0; i < in->n_wants; i++) {
        const Kvtier__V1__BlockRange *range = in->wants[i];

        KVT_CODEC_TRY(kvt_codec_take_count(op, range->component, "wants.component", 0,
                                           KVT_COMPONENTS_MAX - 1));
        KVT_CODEC_TRY(kvt_codec_take_count(op, range->end_block_idx, "wants.end_block_idx", 1,
                                           KVT_PREFIX_TOKENS_MAX));
        KVT_CODEC_TRY(kvt_codec_take_count(op, range->first_block_idx, "wants.first_block_idx", 0,
                                           range->end_block_idx - 1));
        total += range->end_block_idx - range->first_block_idx;
        KVT_CODEC_TRY(
            kvt_codec_take_count(op, total, "wants (blocks in all)", 0, KVT_MOVES_PER_REQUEST_MAX));
        req->wants[i].component = range->component;
        req->wants[i].first_block_idx = range->first_block_idx;
        req->wants[i].end_block_idx = range->end_block_idx;
    }
    req->wants_count = (uint32_t)in->n_wants;
    req->ticket_ns = in->ticket_ns;
    return 0;
}

static int decode_demote(struct kvt_op *op, const uint8_t *at, size_t bytes)
{
    struct kvt_req_demote *req = &op->req.demote;
    Kvtier__V1__DemoteRequest *in;

    KVT_CODEC_TRY(kvt_codec_unpack(op, &kvtier__v1__demote_request__descriptor, at, bytes, &in));
    KVT_CODEC_TRY(kvt_codec_take_handle(op, &in->session, "session", &req->session));
    KVT_CODEC_TRY(kvt_codec_take_handle(op, &in->ticket, "ticket", &req->ticket));
    KVT_CODEC_TRY(kvt_codec_take_handle(op, &in->lease, "lease", &req->lease));
    KVT_CODEC_TRY(kvt_codec_take_prefix(op, in->prefix, &req->prefix));
    KVT_CODEC_TRY(take_tiers(op, in->from_tiers, "from_tiers", &req->from_tiers));
    KVT_CODEC_TRY(take_tiers(op, in->to_tier, "to_tier", &req->to_tier));
    if ((req->to_tier & (req->to_tier - 1)) != 0)
        return kvt_codec_bad(op, "to_tier: %u names more than one tier", req->to_tier);
    req->is_between_tiers = in->is_between_tiers != 0;
    if (req->is_between_tiers && (req->from_tiers == 0 || req->to_tier == 0))
        return kvt_codec_bad(op, "from_tiers, to_tier: both must be set between tiers");
    KVT_CODEC_TRY(take_moves(op, in->n_moves, in->moves, &req->moves_count, req->moves));
    KVT_CODEC_TRY(kvt_codec_take_count(op, in->inline_data.len, "inline_data (bytes)", 0,
                                       KVT_INLINE_BYTES_MAX));
    req->op_id = in->op_id;
    req->wants_durable = in->wants_durable != 0;
    req->inline_bytes = (uint32_t)in->inline_data.len;
    req->inline_data = in->inline_data.data;
    return 0;
}

static int decode_quiesce(struct kvt_op *op, const uint8_t *at, size_t bytes)
{
    Kvtier__V1__QuiesceRequest *in;

    KVT_CODEC_TRY(kvt_codec_unpack(op, &kvtier__v1__quiesce_request__descriptor, at, bytes, &in));
    op->req.quiesce.op_id = in->op_id;
    return kvt_codec_take_handle(op, &in->session, "session", &op->req.quiesce.session);
}

static int decode_release(struct kvt_op *op, const uint8_t *at, size_t bytes)
{
    Kvtier__V1__ReleaseRequest *in;

    KVT_CODEC_TRY(kvt_codec_unpack(op, &kvtier__v1__release_request__descriptor, at, bytes, &in));
    KVT_CODEC_TRY(kvt_codec_take_handle(op, &in->session, "session", &op->req.release.session));
    KVT_CODEC_TRY(kvt_codec_take_handle(op, &in->lease, "lease", &op->req.release.lease));
    KVT_CODEC_TRY(kvt_codec_take_handle(op, &in->ticket, "ticket", &op->req.release.ticket));
    if ((in->lease.len == 0) == (in->ticket.len == 0))
        return kvt_codec_bad(op, "lease, ticket: exactly one of the two must be set");
    return 0;
}

/* A namespace of an admin verb: by handle, or by fingerprint. */
static int take_namespace(struct kvt_op *op, const ProtobufCBinaryData *handle,
                          const ProtobufCBinaryData *fingerprint, struct kvt_handle *ret_ns,
                          uint8_t *ret_fingerprint)
{
    KVT_CODEC_TRY(kvt_codec_take_handle(op, handle, "namespace_handle", ret_ns));
    if ((handle->len == 0) == (fingerprint->len == 0))
        return kvt_codec_bad(op, "namespace_handle, fingerprint: exactly one must be set");
    if (fingerprint->len == 0)
        return 0;
    return kvt_codec_take_fingerprint(op, fingerprint, ret_fingerprint);
}

static int decode_evict(struct kvt_op *op, const uint8_t *at, size_t bytes)
{
    struct kvt_req_evict *req = &op->req.evict;
    Kvtier__V1__EvictRequest *in;

    KVT_CODEC_TRY(kvt_codec_unpack(op, &kvtier__v1__evict_request__descriptor, at, bytes, &in));
    KVT_CODEC_TRY(
        take_namespace(op, &in->namespace_handle, &in->fingerprint, &req->ns, req->fingerprint));
    KVT_CODEC_TRY(kvt_codec_take_prefix(op, in->prefix, &req->prefix));
    req->is_whole_namespace = in->is_whole_namespace != 0;
    return 0;
}

static int decode_reset(struct kvt_op *op, const uint8_t *at, size_t bytes)
{
    struct kvt_req_reset *req = &op->req.reset;
    Kvtier__V1__ResetRequest *in;

    KVT_CODEC_TRY(kvt_codec_unpack(op, &kvtier__v1__reset_request__descriptor, at, bytes, &in));
    return take_namespace(op, &in->namespace_handle, &in->fingerprint, &req->ns, req->fingerprint);
}

static int decode_dump(struct kvt_op *op, const uint8_t *at, size_t bytes)
{
    struct kvt_req_dump *req = &op->req.dump;
    Kvtier__V1__DumpRequest *in;

    KVT_CODEC_TRY(kvt_codec_unpack(op, &kvtier__v1__dump_request__descriptor, at, bytes, &in));
    if (in->fingerprint.len > 0)
        KVT_CODEC_TRY(kvt_codec_take_fingerprint(op, &in->fingerprint, req->fingerprint));
    KVT_CODEC_TRY(
        kvt_codec_take_count(op, in->nodes_max, "nodes_max", 0, KVT_CODEC_DUMP_NODES_MAX));
    req->nodes_max = in->nodes_max == 0 ? KVT_CODEC_DUMP_NODES_MAX : in->nodes_max;
    req->depth_max_blocks = in->depth_max_blocks == 0 ? UINT64_MAX : in->depth_max_blocks;
    req->resume = in->resume;
    return 0;
}

static int decode_stats(struct kvt_op *op, const uint8_t *at, size_t bytes)
{
    Kvtier__V1__StatsRequest *in;

    return kvt_codec_unpack(op, &kvtier__v1__stats_request__descriptor, at, bytes, &in);
}

static int decode_maintain(struct kvt_op *op, const uint8_t *at, size_t bytes)
{
    struct kvt_req_maintain *req = &op->req.maintain;
    Kvtier__V1__MaintainRequest *in;

    KVT_CODEC_TRY(kvt_codec_unpack(op, &kvtier__v1__maintain_request__descriptor, at, bytes, &in));
    KVT_CODEC_TRY(
        kvt_codec_take_count(op, (uint64_t)in->action, "action", 0, KVT_MAINTAIN_SCRUB_STOP));
    req->action = (enum kvt_maintain_action)in->action;
    req->rate_bytes_per_s = in->rate_bytes_per_s;
    return 0;
}

int kvt_codec_decode_kind(struct kvt_op *op, const uint8_t *at, size_t bytes)
{
    static int (*const decoders[KVT_OP_KINDS])(struct kvt_op *, const uint8_t *, size_t) = {
        [KVT_OP_OPEN_NAMESPACE] = decode_open_namespace,
        [KVT_OP_ATTACH] = decode_attach,
        [KVT_OP_LOOKUP] = decode_lookup,
        [KVT_OP_PROMOTE] = decode_promote,
        [KVT_OP_RESERVE] = decode_reserve,
        [KVT_OP_DEMOTE] = decode_demote,
        [KVT_OP_QUIESCE] = decode_quiesce,
        [KVT_OP_RELEASE] = decode_release,
        [KVT_OP_EVICT] = decode_evict,
        [KVT_OP_RESET] = decode_reset,
        [KVT_OP_STATS] = decode_stats,
        [KVT_OP_DUMP] = decode_dump,
        [KVT_OP_MAINTAIN] = decode_maintain,
    };

    KVT_ASSERT((unsigned)op->kind < KVT_OP_KINDS && decoders[op->kind] != NULL);
    return decoders[op->kind](op, at, bytes);
}

int kvt_codec_decode_request(struct kvt_op *op, const uint8_t *at, size_t bytes)
{
    memset(&op->req, 0, sizeof(op->req));
    return kvt_codec_decode_kind(op, at, bytes);
}
