/* Models in miniature, for programs that play an engine: which components a block has, how many
 * bytes, and how an engine keeps them (layers, K and V, engine blocks smaller than ours).
 *
 *   preset   components
 *   full     full attention
 *   window   full attention, sliding window
 *   state    full attention, recurrent state
 *   hybrid   all three
 *   mla      full attention, the same bytes on every rank: one shard serves all
 *
 * A payload is laid out piece by piece (tiers do the same): piece p of engine block e of a block
 * begins at (p * engine_blocks_per_block + e) * piece_bytes. Pure. */
#pragma once

#include "daemon/base/api.h"
#include "kernels/kvt_kernels.h"

struct kvt_model_options {
    const char *preset;
    uint32_t block_tokens, engine_block_tokens; /* the first a multiple of the second */
    uint32_t bytes_per_token; /* of one rank and one attention component, over all layers */
    uint32_t state_bytes;     /* of a state snapshot; 0: as much as one block of attention */
    uint32_t window_tokens;
    uint32_t ranks, layers;
    enum kvt_quant_kind quantise; /* attention; states stay as they are */
};

enum kvt_model_kind { KVT_MODEL_FULL = 1, KVT_MODEL_WINDOW = 2, KVT_MODEL_STATE = 3 };

struct kvt_model_component {
    enum kvt_model_kind kind;
    const char *name;
    uint32_t window_tokens;
    uint32_t engine_blocks_per_block;
    uint32_t pieces_count; /* layers x (K, V) */
    uint32_t piece_bytes;  /* of one engine block */
    uint64_t block_bytes;  /* of one rank's shard */
    bool is_replicated;    /* every rank has the same bytes */
    /* A piece of an engine block is one plane of FP16 elements; window layers have heads first. */
    struct kvt_quant_spec quant;
};

struct kvt_model {
    const char *preset;
    uint32_t block_tokens, engine_block_tokens, ranks, layers;
    uint32_t components_count;
    struct kvt_model_component components[KVT_COMPONENTS_MAX];
};

#define KVT_MODEL_E_BAD 1 /* the options do not fit together; @why says how */

struct kvt_model_options kvt_model_defaults(void);
KVT_MUST_USE int kvt_model_make(struct kvt_model *ret_model,
                                const struct kvt_model_options *options, char *why,
                                size_t why_bytes);
/* The kind of that name: "none", "fp8_e4m3", "int8". False: there is none. */
KVT_MUST_USE bool kvt_model_quant_kind(const char *name, enum kvt_quant_kind *ret_kind);
/* Whose bytes rank @rank holds of @component: of the oracle's places. */
uint32_t kvt_model_shard_rank(const struct kvt_model *model, uint32_t component, uint32_t rank);
/* Blocks of component @component that resuming at @boundary_tokens needs: [first, end). */
struct kvt_model_span {
    uint64_t first, end;
};
struct kvt_model_span kvt_model_needed(const struct kvt_model *model, uint32_t component,
                                       uint64_t boundary_tokens);
/* Bytes of one block, all components and ranks. */
uint64_t kvt_model_block_bytes(const struct kvt_model *model);
