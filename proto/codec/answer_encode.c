/* Answers as the server sends them: the protobuf-c view points into op->ans and into the arena. */
#include <string.h>

#include "proto/codec/wire.h"

static ProtobufCMessage *encode_open_namespace(struct kvt_op *op)
{
    struct kvt_ans_open_namespace *ans = &op->ans.open_namespace;
    Kvtier__V1__OpenNamespaceAnswer *out = kvt_arena_alloc(op->arena, sizeof(*out));

    if (out == NULL)
        return NULL;
    kvtier__v1__open_namespace_answer__init(out);
    if (!kvt_codec_put_handle(op, &ans->ns, &out->namespace_handle))
        return NULL;
    out->fingerprint = kvt_codec_put_bytes(ans->fingerprint, KVT_FINGERPRINT_BYTES);
    out->epoch = ans->epoch;
    out->was_known = ans->was_known;
    KVT_ASSERT(ans->components_count <= KVT_COMPONENTS_MAX);
    out->n_stored_bytes_per_block = ans->components_count;
    out->stored_bytes_per_block = ans->stored_bytes;
    return &out->base;
}

static ProtobufCMessage *encode_attach(struct kvt_op *op)
{
    const struct kvt_ans_attach *ans = &op->ans.attach;
    Kvtier__V1__AttachEvent *event = kvt_arena_alloc(op->arena, sizeof(*event));
    Kvtier__V1__Attached *out = kvt_arena_alloc(op->arena, sizeof(*out));

    if (event == NULL || out == NULL)
        return NULL;
    kvtier__v1__attach_event__init(event);
    kvtier__v1__attached__init(out);
    event->event_case = KVTIER__V1__ATTACH_EVENT__EVENT_ATTACHED;
    event->attached = out;
    if (!kvt_codec_put_handle(op, &ans->session, &out->session))
        return NULL;
    out->api_version = ans->api_version;
    out->epoch = ans->epoch;
    out->lease_ns_max = ans->lease_ns_max;
    out->ticket_ns_max = ans->ticket_ns_max;
    return &event->base;
}

static ProtobufCMessage *encode_lookup(struct kvt_op *op)
{
    struct kvt_ans_lookup *ans = &op->ans.lookup;
    Kvtier__V1__LookupAnswer *out = kvt_arena_alloc(op->arena, sizeof(*out));
    Kvtier__V1__ComponentMatch *matches;

    KVT_ASSERT(ans->components_count <= KVT_COMPONENTS_MAX);
    if (out == NULL)
        return NULL;
    kvtier__v1__lookup_answer__init(out);
    matches = kvt_arena_array(op->arena, ans->components_count, sizeof(*matches));
    out->components = kvt_arena_array(op->arena, ans->components_count, sizeof(*out->components));
    if (matches == NULL || out->components == NULL ||
        !kvt_codec_put_handle(op, &ans->cursor, &out->cursor) ||
        !kvt_codec_put_handle(op, &ans->lease, &out->lease))
        return NULL;
    for (uint32_t i = 0; i < ans->components_count; i++) {
        kvtier__v1__component_match__init(&matches[i]);
        matches[i].alone_tokens = ans->components[i].alone_tokens;
        matches[i].needed_blocks = ans->components[i].needed_blocks;
        matches[i].n_blocks_at = matches[i].n_tokens_at = KVT_API_TIERS;
        matches[i].blocks_at = ans->components[i].blocks_at;
        matches[i].tokens_at = ans->components[i].tokens_at;
        matches[i].why = (Kvtier__V1__Why)ans->components[i].why;
        matches[i].why_block_idx = ans->components[i].why_block_idx;
        out->components[i] = &matches[i];
    }
    out->n_components = ans->components_count;
    out->boundary_tokens = ans->boundary_tokens;
    out->path_tokens = ans->path_tokens;
    out->branch_tokens = ans->branch_tokens;
    out->epoch = ans->epoch;
    out->cursor_tokens = ans->cursor_tokens;
    out->lease_ns = ans->lease_ns;
    out->estimate_us = ans->estimate_us;
    out->is_lease_limited = ans->is_lease_limited;
    return &out->base;
}

static ProtobufCBinaryData *put_results(struct kvt_op *op, const uint32_t *counts,
                                        uint8_t *const *results, uint32_t count)
{
    ProtobufCBinaryData *out = kvt_arena_array(op->arena, count, sizeof(*out));

    if (out == NULL)
        return NULL;
    for (uint32_t i = 0; i < count; i++)
        out[i] = kvt_codec_put_bytes(results[i], counts[i]);
    return out;
}

static bool put_in_place(struct kvt_op *op, const struct kvt_ans_promote *ans,
                         Kvtier__V1__PromoteAnswer *out)
{
    uint32_t count = op->req.promote.moves_count;
    Kvtier__V1__InPlace *views = kvt_arena_array(op->arena, count, sizeof(*views));
    Kvtier__V1__Arena *arenas = kvt_arena_array(op->arena, ans->arenas_count, sizeof(*arenas));

    out->in_place = kvt_arena_array(op->arena, count, sizeof(*out->in_place));
    out->arenas = kvt_arena_array(op->arena, ans->arenas_count, sizeof(*out->arenas));
    if (views == NULL || arenas == NULL || out->in_place == NULL || out->arenas == NULL)
        return false;
    for (uint32_t i = 0; i < count; i++) {
        kvtier__v1__in_place__init(&views[i]);
        views[i].n_zones = views[i].n_offsets_bytes = ans->moves.count[i];
        views[i].zones = ans->in_place[i].zones;
        views[i].offsets_bytes = ans->in_place[i].offsets_bytes;
        out->in_place[i] = &views[i];
    }
    for (uint32_t i = 0; i < ans->arenas_count; i++) {
        const struct kvt_api_arena *arena = &ans->arenas[i];

        kvtier__v1__arena__init(&arenas[i]);
        arenas[i].zone = arena->zone;
        arenas[i].handle = kvt_codec_put_bytes(arena->handle, sizeof(arena->handle));
        arenas[i].device_uuid = kvt_codec_put_bytes(arena->device_uuid, sizeof(arena->device_uuid));
        arenas[i].bytes = arena->bytes;
        arenas[i].incarnation = arena->incarnation;
        out->arenas[i] = &arenas[i];
    }
    out->n_in_place = count;
    out->n_arenas = ans->arenas_count;
    return true;
}

static ProtobufCMessage *encode_promote(struct kvt_op *op)
{
    struct kvt_ans_promote *ans = &op->ans.promote;
    Kvtier__V1__PromoteEvent *event = kvt_arena_alloc(op->arena, sizeof(*event));
    Kvtier__V1__PromoteAnswer *out = kvt_arena_alloc(op->arena, sizeof(*out));

    if (event == NULL || out == NULL)
        return NULL;
    kvtier__v1__promote_event__init(event);
    kvtier__v1__promote_answer__init(out);
    event->event_case = KVTIER__V1__PROMOTE_EVENT__EVENT_RESULT;
    event->result = out;
    out->n_results = op->req.promote.moves_count;
    out->results = put_results(op, ans->moves.count, ans->moves.results, (uint32_t)out->n_results);
    if (out->results == NULL || (ans->is_in_place && !put_in_place(op, ans, out)))
        return NULL;
    out->moved_bytes = ans->moved_bytes;
    out->n_moved_blocks_from = KVT_API_TIERS;
    out->moved_blocks_from = ans->moved_blocks_from;
    out->is_quiesced = ans->is_quiesced;
    out->inline_data = kvt_codec_put_bytes(ans->inline_data, ans->inline_bytes);
    return &event->base;
}

static ProtobufCMessage *encode_reserve(struct kvt_op *op)
{
    const struct kvt_ans_reserve *ans = &op->ans.reserve;
    Kvtier__V1__ReserveAnswer *out = kvt_arena_alloc(op->arena, sizeof(*out));

    KVT_ASSERT(ans->wants_count <= KVT_COUNT_OF(ans->count));
    if (out == NULL)
        return NULL;
    kvtier__v1__reserve_answer__init(out);
    out->n_states = ans->wants_count;
    out->states = put_results(op, ans->count, ans->states, ans->wants_count);
    if (out->states == NULL || !kvt_codec_put_handle(op, &ans->ticket, &out->ticket) ||
        !kvt_codec_put_handle(op, &ans->cursor, &out->cursor))
        return NULL;
    out->ticket_ns = ans->ticket_ns;
    out->epoch = ans->epoch;
    out->cursor_tokens = ans->cursor_tokens;
    return &out->base;
}

static ProtobufCMessage *encode_demote(struct kvt_op *op)
{
    const struct kvt_ans_demote *ans = &op->ans.demote;
    Kvtier__V1__DemoteAnswer *out = kvt_arena_alloc(op->arena, sizeof(*out));

    if (out == NULL)
        return NULL;
    kvtier__v1__demote_answer__init(out);
    out->n_results = op->req.demote.moves_count;
    out->results = put_results(op, ans->moves.count, ans->moves.results, (uint32_t)out->n_results);
    if (out->results == NULL)
        return NULL;
    out->moved_bytes = ans->moved_bytes;
    out->is_quiesced = ans->is_quiesced;
    out->is_durable = ans->is_durable;
    return &out->base;
}

static ProtobufCMessage *encode_quiesce(struct kvt_op *op)
{
    Kvtier__V1__QuiesceAnswer *out = kvt_arena_alloc(op->arena, sizeof(*out));

    if (out == NULL)
        return NULL;
    kvtier__v1__quiesce_answer__init(out);
    return &out->base;
}

static ProtobufCMessage *encode_release(struct kvt_op *op)
{
    Kvtier__V1__ReleaseAnswer *out = kvt_arena_alloc(op->arena, sizeof(*out));

    if (out == NULL)
        return NULL;
    kvtier__v1__release_answer__init(out);
    return &out->base;
}

static ProtobufCMessage *encode_evict(struct kvt_op *op)
{
    Kvtier__V1__EvictAnswer *out = kvt_arena_alloc(op->arena, sizeof(*out));

    if (out == NULL)
        return NULL;
    kvtier__v1__evict_answer__init(out);
    out->evicted_blocks = op->ans.evict.evicted_blocks;
    return &out->base;
}

static ProtobufCMessage *encode_reset(struct kvt_op *op)
{
    Kvtier__V1__ResetAnswer *out = kvt_arena_alloc(op->arena, sizeof(*out));

    if (out == NULL)
        return NULL;
    kvtier__v1__reset_answer__init(out);
    out->epoch = op->ans.reset.epoch;
    return &out->base;
}

static ProtobufCMessage *encode_maintain(struct kvt_op *op)
{
    const struct kvt_ans_maintain *ans = &op->ans.maintain;
    Kvtier__V1__MaintainAnswer *out = kvt_arena_alloc(op->arena, sizeof(*out));

    if (out == NULL)
        return NULL;
    kvtier__v1__maintain_answer__init(out);
    out->is_draining = ans->drain.is_running;
    out->copies_left = ans->drain.copies_left;
    out->copies_written = ans->drain.copies_written;
    out->bytes_written = ans->drain.bytes_written;
    out->copies_failed = ans->drain.copies_failed;
    out->scrub_rate_bytes_per_s = ans->scrub.rate_bytes_per_s;
    out->checked_copies = ans->scrub.checked_copies;
    out->checked_bytes = ans->scrub.checked_bytes;
    out->bad_copies = ans->scrub.bad_copies;
    out->skipped_copies = ans->scrub.skipped_copies;
    out->rounds = ans->scrub.rounds;
    return &out->base;
}

int kvt_codec_encode_answer(struct kvt_op *op, struct kvt_codec_message *ret_message)
{
    static ProtobufCMessage *(*const encoders[KVT_OP_KINDS])(struct kvt_op *) = {
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
        [KVT_OP_STATS] = kvt_codec_encode_stats,
        [KVT_OP_DUMP] = kvt_codec_encode_dump,
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
