/* Quantisation of a specification: whether it makes sense for its component, the form in which the
 * tiers know it, and how many bytes a tier stores of a shard. Planes are the kernels' matter
 * (kernels/kvt_kernels.h); that a block is whole planes is ours. Pure. */
#include <string.h>

#include "daemon/engine/internal.h"

struct kvt_quant_spec eng_quant_of(const struct kvt_api_quant *quant)
{
    if (quant->kind > UINT8_MAX || quant->elem > UINT8_MAX || quant->order > UINT8_MAX)
        return (struct kvt_quant_spec){.kind = UINT8_MAX}; /* as little valid as the numbers */
    return (struct kvt_quant_spec){.kind = (uint8_t)quant->kind,
                                   .elem = (uint8_t)quant->elem,
                                   .order = (uint8_t)quant->order,
                                   .plane_tokens = quant->plane_tokens,
                                   .heads = quant->heads,
                                   .head_dim = quant->head_dim};
}

uint64_t eng_stored_bytes(const struct kvt_api_component *c)
{
    struct kvt_quant_spec spec = eng_quant_of(&c->quant);

    if (c->quant.kind == KVT_QUANT_NONE)
        return c->bytes_per_block;
    if (!kvt_quant_is_valid(&spec) || c->bytes_per_block > KVT_SHARD_BYTES_MAX)
        return 0;
    return kvt_quant_bytes(&spec, c->bytes_per_block);
}

static bool is_empty(const struct kvt_api_quant *quant)
{
    static const struct kvt_api_quant none;

    return memcmp(quant, &none, sizeof(none)) == 0;
}

static bool numbers_are_valid(struct kvt_op *op, const struct kvt_api_component *c, uint32_t i)
{
    const struct kvt_api_quant *quant = &c->quant;
    struct kvt_quant_spec spec = eng_quant_of(quant);

    if (c->kind == KVT_COMPONENT_STATE) {
        kvt_op_fail(op, KVT_CODE_INVALID_ARGUMENT,
                    "component %u: recurrent states are not quantised: an error in one stays in "
                    "every later token",
                    i);
        return false;
    }
    if (quant->kind != KVT_QUANT_NONE && kvt_quant_is_valid(&spec))
        return true;
    kvt_op_fail(op, KVT_CODE_INVALID_ARGUMENT,
                "component %u: quantisation of kind %u (1 FP8 E4M3, 2 INT8), elements %u (1 FP16, "
                "2 BF16), order %u (1 token first, 2 head first), planes of %u tokens x %u heads x "
                "%u: a number is out of range, or a plane has more than 2^29 elements",
                i, quant->kind, quant->elem, quant->order, quant->plane_tokens, quant->heads,
                quant->head_dim);
    return false;
}

bool eng_quant_is_valid(struct kvt_op *op, const struct kvt_api_component *c, uint32_t i,
                        uint32_t block_tokens)
{
    const struct kvt_api_quant *quant = &c->quant;
    uint64_t plane_bytes, stored_bytes;
    struct kvt_quant_spec spec;

    if (is_empty(quant))
        return true;
    if (!numbers_are_valid(op, c, i))
        return false;
    if (block_tokens % quant->plane_tokens != 0) {
        kvt_op_fail(op, KVT_CODE_INVALID_ARGUMENT,
                    "component %u: planes of %u tokens do not divide blocks of %u: a plane has the "
                    "tokens of one engine block",
                    i, quant->plane_tokens, block_tokens);
        return false;
    }
    spec = eng_quant_of(quant);
    plane_bytes = kvt_quant_plane_bytes(&spec);
    if (c->bytes_per_block % (plane_bytes * (block_tokens / quant->plane_tokens)) != 0) {
        kvt_op_fail(op, KVT_CODE_INVALID_ARGUMENT,
                    "component %u: %llu bytes a block are not whole planes: one of %u tokens x %u "
                    "heads x %u has %llu bytes, and a block has %u of them a layer's K or V",
                    i, (unsigned long long)c->bytes_per_block, quant->plane_tokens, quant->heads,
                    quant->head_dim, (unsigned long long)plane_bytes,
                    block_tokens / quant->plane_tokens);
        return false;
    }
    stored_bytes = eng_stored_bytes(c);
    if (stored_bytes >= c->bytes_per_block) {
        kvt_op_fail(
            op, KVT_CODE_INVALID_ARGUMENT,
            "component %u: quantised it would be %llu bytes a block, as it is %llu: declare "
            "it without quantisation",
            i, (unsigned long long)stored_bytes, (unsigned long long)c->bytes_per_block);
        return false;
    }
    return true;
}

bool eng_quant_pieces_are_valid(struct kvt_op *op, const struct kvt_api_layout *layout,
                                const struct kvt_api_quant *quant)
{
    struct kvt_quant_spec spec = eng_quant_of(quant);
    uint64_t plane_bytes;

    if (quant->kind == KVT_QUANT_NONE)
        return true;
    plane_bytes = kvt_quant_plane_bytes(&spec);
    for (uint32_t i = 0; i < layout->pieces_count; i++) {
        const struct kvt_api_piece *piece = &layout->pieces[i];
        bool is_whole = piece->bytes % plane_bytes == 0;

        if (is_whole && piece->offset_bytes % 2 == 0 && piece->stride_bytes % 2 == 0)
            continue;
        if (!is_whole)
            kvt_op_fail(op, KVT_CODE_INVALID_ARGUMENT,
                        "layout of component %u: piece %u of %u bytes is not whole planes of %llu "
                        "(%u tokens x %u heads x %u), and the component is quantised by planes",
                        layout->component, i, piece->bytes, (unsigned long long)plane_bytes,
                        quant->plane_tokens, quant->heads, quant->head_dim);
        else
            kvt_op_fail(op, KVT_CODE_INVALID_ARGUMENT,
                        "layout of component %u: piece %u has offset %llu and stride %llu: the "
                        "component is quantised, so both must be even, as its elements are",
                        layout->component, i, (unsigned long long)piece->offset_bytes,
                        (unsigned long long)piece->stride_bytes);
        return false;
    }
    return true;
}
