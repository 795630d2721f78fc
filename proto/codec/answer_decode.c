/* Answers as a client gets them. The daemon is trusted by its clients, its bytes are not: a broken
 * or foreign server must not make a client read beyond anything. */
#include <string.h>

#include "proto/codec/wire.h"

int kvt_codec_take_tiers(struct kvt_op *op, size_t count, const uint64_t *in, const char *field,
                         uint64_t ret_at[KVT_API_TIERS])
{
    if (count != 0 && count != KVT_API_TIERS)
        return kvt_codec_bad(op, "%s: %zu numbers instead of %u", field, count, KVT_API_TIERS);
    for (size_t i = 0; i < KVT_API_TIERS; i++)
        ret_at[i] = count == 0 ? 0 : in[i];
    return 0;
}

static int decode_open_namespace(struct kvt_op *op, const uint8_t *at, size_t bytes)
{
    struct kvt_ans_open_namespace *ans = &op->ans.open_namespace;
    Kvtier__V1__OpenNamespaceAnswer *in;

    KVT_CODEC_TRY(
        kvt_codec_unpack(op, &kvtier__v1__open_namespace_answer__descriptor, at, bytes, &in));
    KVT_CODEC_TRY(kvt_codec_take_handle(op, &in->namespace_handle, "namespace_handle", &ans->ns));
    KVT_CODEC_TRY(kvt_codec_take_fixed(op, &in->fingerprint, "fingerprint", KVT_FINGERPRINT_BYTES,
                                       ans->fingerprint));
    ans->epoch = in->epoch;
    ans->was_known = in->was_known != 0;
    KVT_CODEC_TRY(kvt_codec_take_count(op, in->n_stored_bytes_per_block,
                                       "stored_bytes_per_block (count)", 0, KVT_COMPONENTS_MAX));
    ans->components_count = (uint32_t)in->n_stored_bytes_per_block;
    for (uint32_t i = 0; i < ans->components_count; i++)
        ans->stored_bytes[i] = in->stored_bytes_per_block[i];
    return 0;
}

static int decode_attach(struct kvt_op *op, const uint8_t *at, size_t bytes)
{
    struct kvt_ans_attach *ans = &op->ans.attach;
    Kvtier__V1__AttachEvent *in;

    KVT_CODEC_TRY(kvt_codec_unpack(op, &kvtier__v1__attach_event__descriptor, at, bytes, &in));
    if (in->event_case != KVTIER__V1__ATTACH_EVENT__EVENT_ATTACHED)
        return kvt_codec_bad(op, "the first event of Attach is not `attached`");
    ans->api_version = in->attached->api_version;
    ans->epoch = in->attached->epoch;
    ans->lease_ns_max = in->attached->lease_ns_max;
    ans->ticket_ns_max = in->attached->ticket_ns_max;
    return kvt_codec_take_handle(op, &in->attached->session, "session", &ans->session);
}

static int decode_lookup(struct kvt_op *op, const uint8_t *at, size_t bytes)
{
    struct kvt_ans_lookup *ans = &op->ans.lookup;
    Kvtier__V1__LookupAnswer *in;

    KVT_CODEC_TRY(kvt_codec_unpack(op, &kvtier__v1__lookup_answer__descriptor, at, bytes, &in));
    KVT_CODEC_TRY(
        kvt_codec_take_count(op, in->n_components, "components (count)", 0, KVT_COMPONENTS_MAX));
    KVT_CODEC_TRY(kvt_codec_take_handle(op, &in->cursor, "cursor", &ans->cursor));
    KVT_CODEC_TRY(kvt_codec_take_handle(op, &in->lease, "lease", &ans->lease));
    for (size_t i = 0; i < in->n_components; i++) {
        const Kvtier__V1__ComponentMatch *match = in->components[i];

        KVT_CODEC_TRY(kvt_codec_take_tiers(op, match->n_blocks_at, match->blocks_at, "blocks_at",
                                           ans->components[i].blocks_at));
        KVT_CODEC_TRY(kvt_codec_take_tiers(op, match->n_tokens_at, match->tokens_at, "tokens_at",
                                           ans->components[i].tokens_at));
        ans->components[i].alone_tokens = match->alone_tokens;
        ans->components[i].needed_blocks = match->needed_blocks;
        ans->components[i].why = (enum kvt_why)match->why;
        ans->components[i].why_block_idx = match->why_block_idx;
    }
    ans->components_count = (uint32_t)in->n_components;
    ans->boundary_tokens = in->boundary_tokens;
    ans->path_tokens = in->path_tokens;
    ans->branch_tokens = in->branch_tokens;
    ans->epoch = in->epoch;
    ans->cursor_tokens = in->cursor_tokens;
    ans->lease_ns = in->lease_ns;
    ans->estimate_us = in->estimate_us;
    ans->is_lease_limited = in->is_lease_limited;
    return 0;
}

static int take_results(struct kvt_op *op, size_t count, const ProtobufCBinaryData *in,
                        const char *field, size_t count_max, uint32_t *ret_counts,
                        uint8_t **ret_results)
{
    KVT_CODEC_TRY(kvt_codec_take_count(op, count, field, 0, count_max));
    for (size_t i = 0; i < count; i++) {
        KVT_CODEC_TRY(kvt_codec_take_count(op, in[i].len, field, 0, KVT_MOVES_PER_REQUEST_MAX));
        ret_counts[i] = (uint32_t)in[i].len;
        ret_results[i] = in[i].data;
    }
    return 0;
}

static int take_in_place(struct kvt_op *op, const Kvtier__V1__PromoteAnswer *in)
{
    struct kvt_ans_promote *ans = &op->ans.promote;

    if (in->n_in_place != in->n_results)
        return kvt_codec_bad(op, "in_place: %zu for %zu results", in->n_in_place, in->n_results);
    for (size_t i = 0; i < in->n_in_place; i++) {
        const Kvtier__V1__InPlace *from = in->in_place[i];

        if (from->n_zones != ans->moves.count[i] || from->n_offsets_bytes != ans->moves.count[i])
            return kvt_codec_bad(op, "in_place: not as many as results");
        ans->in_place[i] = (struct kvt_api_in_place){from->zones, from->offsets_bytes};
    }
    KVT_CODEC_TRY(kvt_codec_take_count(op, in->n_arenas, "arenas (count)", 0, KVT_ZONES_MAX));
    for (size_t i = 0; i < in->n_arenas; i++) {
        const Kvtier__V1__Arena *from = in->arenas[i];
        struct kvt_api_arena *to = &ans->arenas[i];

        KVT_CODEC_TRY(kvt_codec_take_fixed(op, &from->handle, "arenas.handle",
                                           KVT_CUDA_IPC_HANDLE_BYTES, to->handle));
        KVT_CODEC_TRY(kvt_codec_take_fixed(op, &from->device_uuid, "arenas.device_uuid",
                                           KVT_CUDA_UUID_BYTES, to->device_uuid));
        to->zone = from->zone;
        to->bytes = from->bytes;
        to->incarnation = from->incarnation;
    }
    ans->arenas_count = (uint32_t)in->n_arenas;
    ans->is_in_place = true;
    return 0;
}

static int take_promote(struct kvt_op *op, const Kvtier__V1__PromoteAnswer *in)
{
    struct kvt_ans_promote *ans = &op->ans.promote;

    KVT_CODEC_TRY(take_results(op, in->n_results, in->results, "results", KVT_COMPONENTS_MAX,
                               ans->moves.count, ans->moves.results));
    KVT_CODEC_TRY(kvt_codec_take_tiers(op, in->n_moved_blocks_from, in->moved_blocks_from,
                                       "moved_blocks_from", ans->moved_blocks_from));
    KVT_CODEC_TRY(kvt_codec_take_count(op, in->inline_data.len, "inline_data (bytes)", 0,
                                       KVT_INLINE_BYTES_MAX));
    if (in->n_in_place > 0)
        KVT_CODEC_TRY(take_in_place(op, in));
    ans->moved_bytes = in->moved_bytes;
    ans->is_quiesced = in->is_quiesced != 0;
    ans->inline_bytes = (uint32_t)in->inline_data.len;
    ans->inline_data = in->inline_data.data;
    return 0;
}

int kvt_codec_decode_promote_event(struct kvt_op *op, const uint8_t *at, size_t bytes,
                                   bool *ret_is_result, struct kvt_api_progress *ret_progress)
{
    Kvtier__V1__PromoteEvent *in;

    KVT_CODEC_TRY(kvt_codec_unpack(op, &kvtier__v1__promote_event__descriptor, at, bytes, &in));
    switch (in->event_case) {
    case KVTIER__V1__PROMOTE_EVENT__EVENT_PROGRESS:
        ret_progress->group = in->progress->group;
        ret_progress->groups_count = in->progress->groups_count;
        *ret_is_result = false;
        return 0;
    case KVTIER__V1__PROMOTE_EVENT__EVENT_RESULT:
        memset(&op->ans, 0, sizeof(op->ans));
        KVT_CODEC_TRY(take_promote(op, in->result));
        *ret_is_result = true;
        return 0;
    default:
        return kvt_codec_bad(op, "an event of Promote is neither progress nor result");
    }
}

static int decode_promote(struct kvt_op *op, const uint8_t *at, size_t bytes)
{
    struct kvt_api_progress progress;
    bool is_result = false;

    KVT_CODEC_TRY(kvt_codec_decode_promote_event(op, at, bytes, &is_result, &progress));
    return is_result ? 0 : kvt_codec_bad(op, "the last event of Promote is no result");
}

static int decode_reserve(struct kvt_op *op, const uint8_t *at, size_t bytes)
{
    struct kvt_ans_reserve *ans = &op->ans.reserve;
    Kvtier__V1__ReserveAnswer *in;

    KVT_CODEC_TRY(kvt_codec_unpack(op, &kvtier__v1__reserve_answer__descriptor, at, bytes, &in));
    KVT_CODEC_TRY(take_results(op, in->n_states, in->states, "states", KVT_COUNT_OF(ans->count),
                               ans->count, ans->states));
    KVT_CODEC_TRY(kvt_codec_take_handle(op, &in->ticket, "ticket", &ans->ticket));
    KVT_CODEC_TRY(kvt_codec_take_handle(op, &in->cursor, "cursor", &ans->cursor));
    ans->wants_count = (uint32_t)in->n_states;
    ans->ticket_ns = in->ticket_ns;
    ans->epoch = in->epoch;
    ans->cursor_tokens = in->cursor_tokens;
    return 0;
}

static int decode_demote(struct kvt_op *op, const uint8_t *at, size_t bytes)
{
    struct kvt_ans_demote *ans = &op->ans.demote;
    Kvtier__V1__DemoteAnswer *in;

    KVT_CODEC_TRY(kvt_codec_unpack(op, &kvtier__v1__demote_answer__descriptor, at, bytes, &in));
    KVT_CODEC_TRY(take_results(op, in->n_results, in->results, "results", KVT_COMPONENTS_MAX,
                               ans->moves.count, ans->moves.results));
    ans->moved_bytes = in->moved_bytes;
    ans->is_quiesced = in->is_quiesced != 0;
    ans->is_durable = in->is_durable != 0;
    return 0;
}

static int decode_quiesce(struct kvt_op *op, const uint8_t *at, size_t bytes)
{
    Kvtier__V1__QuiesceAnswer *in;

    return kvt_codec_unpack(op, &kvtier__v1__quiesce_answer__descriptor, at, bytes, &in);
}

static int decode_release(struct kvt_op *op, const uint8_t *at, size_t bytes)
{
    Kvtier__V1__ReleaseAnswer *in;

    return kvt_codec_unpack(op, &kvtier__v1__release_answer__descriptor, at, bytes, &in);
}

static int decode_evict(struct kvt_op *op, const uint8_t *at, size_t bytes)
{
    Kvtier__V1__EvictAnswer *in;

    KVT_CODEC_TRY(kvt_codec_unpack(op, &kvtier__v1__evict_answer__descriptor, at, bytes, &in));
    op->ans.evict.evicted_blocks = in->evicted_blocks;
    return 0;
}

static int decode_reset(struct kvt_op *op, const uint8_t *at, size_t bytes)
{
    Kvtier__V1__ResetAnswer *in;

    KVT_CODEC_TRY(kvt_codec_unpack(op, &kvtier__v1__reset_answer__descriptor, at, bytes, &in));
    op->ans.reset.epoch = in->epoch;
    return 0;
}

static int decode_maintain(struct kvt_op *op, const uint8_t *at, size_t bytes)
{
    struct kvt_ans_maintain *ans = &op->ans.maintain;
    Kvtier__V1__MaintainAnswer *in;

    KVT_CODEC_TRY(kvt_codec_unpack(op, &kvtier__v1__maintain_answer__descriptor, at, bytes, &in));
    ans->drain.is_running = in->is_draining != 0;
    ans->drain.copies_left = in->copies_left;
    ans->drain.copies_written = in->copies_written;
    ans->drain.bytes_written = in->bytes_written;
    ans->drain.copies_failed = in->copies_failed;
    ans->scrub.is_running = in->scrub_rate_bytes_per_s != 0;
    ans->scrub.rate_bytes_per_s = in->scrub_rate_bytes_per_s;
    ans->scrub.checked_copies = in->checked_copies;
    ans->scrub.checked_bytes = in->checked_bytes;
    ans->scrub.bad_copies = in->bad_copies;
    ans->scrub.skipped_copies = in->skipped_copies;
    ans->scrub.rounds = in->rounds;
    return 0;
}

int kvt_codec_decode_answer(struct kvt_op *op, const uint8_t *at, size_t bytes)
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
        [KVT_OP_STATS] = kvt_codec_decode_stats,
        [KVT_OP_DUMP] = kvt_codec_decode_dump,
        [KVT_OP_MAINTAIN] = decode_maintain,
    };

    KVT_ASSERT((unsigned)op->kind < KVT_OP_KINDS && decoders[op->kind] != NULL);
    memset(&op->ans, 0, sizeof(op->ans));
    return decoders[op->kind](op, at, bytes);
}
