/* The split of a block into pieces must come out whole: bytes_per_token * engine_block_tokens has
 * to be a multiple of 2 * layers. Where it is quantised a piece is one plane, so that a token has
 * whole elements in each: bytes_per_token is a multiple of 4 * layers. */
#include "tools/lib/model.h"

#include <stdio.h>
#include <string.h>

struct kvt_model_options kvt_model_defaults(void)
{
    return (struct kvt_model_options){
        .preset = "full",
        .block_tokens = KVT_BLOCK_TOKENS_DEFAULT,
        .engine_block_tokens = 16,
        .bytes_per_token = 512,
        .window_tokens = 1023,
        .ranks = 1,
        .layers = 4,
    };
}

static int bad(char *why, size_t why_bytes, const char *what)
{
    (void)snprintf(why, why_bytes, "%s", what);
    return KVT_MODEL_E_BAD;
}

static const char *check(const struct kvt_model_options *options)
{
    uint64_t engine_block_bytes = (uint64_t)options->bytes_per_token * options->engine_block_tokens;

    if (options->block_tokens == 0 || options->block_tokens > KVT_BLOCK_TOKENS_MAX)
        return "a block has 1 to 8,192 tokens";
    if (options->engine_block_tokens == 0 ||
        options->block_tokens % options->engine_block_tokens != 0 ||
        options->block_tokens / options->engine_block_tokens > KVT_ENGINE_BLOCKS_PER_BLOCK_MAX)
        return "the block size must be a multiple (up to 512 times) of the engine's block size";
    if (options->ranks == 0 || options->ranks > KVT_RANKS_MAX)
        return "there are 1 to 16 ranks";
    if (options->layers == 0 || options->layers > KVT_PIECES_PER_COMPONENT_MAX / 2)
        return "there are 1 to 1,024 layers";
    if (options->bytes_per_token == 0 || engine_block_bytes % (2ull * options->layers) != 0)
        return "bytes a token x tokens an engine block must be a multiple of 2 x layers";
    if (engine_block_bytes / (2ull * options->layers) > KVT_SHARD_BYTES_MAX ||
        (uint64_t)options->bytes_per_token * options->block_tokens > KVT_SHARD_BYTES_MAX ||
        options->state_bytes > KVT_SHARD_BYTES_MAX)
        return "one rank's part of a block is at most 1 GiB";
    if (options->state_bytes % (2ull * options->layers) != 0)
        return "the bytes of a state must be a multiple of 2 x layers";
    if (options->quantise != KVT_QUANT_NONE &&
        options->bytes_per_token % (4ull * options->layers) != 0)
        return "to be quantised, bytes a token must be a multiple of 4 x layers";
    return NULL;
}

bool kvt_model_quant_kind(const char *name, enum kvt_quant_kind *ret_kind)
{
    static const char *const names[] = {"none", "fp8_e4m3", "int8"};

    for (uint32_t i = 0; i < KVT_COUNT_OF(names); i++) {
        if (strcmp(name, names[i]) == 0) {
            *ret_kind = (enum kvt_quant_kind)i;
            return true;
        }
    }
    return false;
}

/* As many heads as leave each 8 elements, 8 at most. */
static void set_quant(struct kvt_model_component *component,
                      const struct kvt_model_options *options)
{
    uint32_t elements = options->bytes_per_token / (4 * options->layers), heads = 8;

    while (heads > 1 && (elements % heads != 0 || elements / heads < 8))
        heads /= 2;
    component->quant = (struct kvt_quant_spec){
        .kind = (uint8_t)options->quantise,
        .elem = KVT_ELEM_FP16,
        .order =
            component->kind == KVT_MODEL_WINDOW ? KVT_ORDER_HEADS_FIRST : KVT_ORDER_TOKENS_FIRST,
        .plane_tokens = options->engine_block_tokens,
        .heads = heads,
        .head_dim = elements / heads,
    };
}

static void add_component(struct kvt_model *model, const struct kvt_model_options *options,
                          enum kvt_model_kind kind)
{
    struct kvt_model_component *component = &model->components[model->components_count++];
    uint64_t block_bytes = (uint64_t)options->bytes_per_token * options->block_tokens;

    component->kind = kind;
    component->pieces_count = 2 * options->layers;
    component->engine_blocks_per_block = options->block_tokens / options->engine_block_tokens;
    component->name = kind == KVT_MODEL_FULL ? "full" : "window";
    if (kind == KVT_MODEL_WINDOW)
        component->window_tokens = options->window_tokens;
    if (kind == KVT_MODEL_STATE) {
        component->name = "state";
        component->engine_blocks_per_block = 1;
        if (options->state_bytes != 0)
            block_bytes = options->state_bytes;
    }
    if (kind != KVT_MODEL_STATE && options->quantise != KVT_QUANT_NONE)
        set_quant(component, options);
    component->block_bytes = block_bytes;
    component->piece_bytes =
        (uint32_t)(block_bytes / component->pieces_count / component->engine_blocks_per_block);
}

int kvt_model_make(struct kvt_model *ret_model, const struct kvt_model_options *options, char *why,
                   size_t why_bytes)
{
    static const struct {
        const char *name;
        bool has_window, has_state, is_replicated;
    } presets[] = {{"full", false, false, false},
                   {"window", true, false, false},
                   {"state", false, true, false},
                   {"hybrid", true, true, false},
                   {"mla", false, false, true}};
    struct kvt_model model = {
        .block_tokens = options->block_tokens,
        .engine_block_tokens = options->engine_block_tokens,
        .ranks = options->ranks,
        .layers = options->layers,
    };
    const char *what = check(options);

    if (what != NULL)
        return bad(why, why_bytes, what);
    for (size_t i = 0; i < KVT_COUNT_OF(presets); i++) {
        if (strcmp(options->preset, presets[i].name) != 0)
            continue;
        if (presets[i].has_window && options->window_tokens == 0)
            return bad(why, why_bytes, "the window is at least 1 token");
        model.preset = presets[i].name;
        add_component(&model, options, KVT_MODEL_FULL);
        model.components[0].is_replicated = presets[i].is_replicated;
        if (presets[i].has_window)
            add_component(&model, options, KVT_MODEL_WINDOW);
        if (presets[i].has_state)
            add_component(&model, options, KVT_MODEL_STATE);
        *ret_model = model;
        return 0;
    }
    return bad(why, why_bytes, "the preset is one of full, window, state, hybrid, mla");
}

struct kvt_model_span kvt_model_needed(const struct kvt_model *model, uint32_t component,
                                       uint64_t boundary_tokens)
{
    const struct kvt_model_component *which = &model->components[component];
    uint64_t end = boundary_tokens / model->block_tokens;
    uint64_t reach = KVT_MIN((uint64_t)which->window_tokens, boundary_tokens);

    switch (which->kind) {
    case KVT_MODEL_FULL:
        return (struct kvt_model_span){0, end};
    case KVT_MODEL_WINDOW:
        return (struct kvt_model_span){(boundary_tokens - reach) / model->block_tokens, end};
    case KVT_MODEL_STATE:
        return (struct kvt_model_span){end - (end > 0), end};
    }
    KVT_ASSERT(false);
    return (struct kvt_model_span){0, 0};
}

uint32_t kvt_model_shard_rank(const struct kvt_model *model, uint32_t component, uint32_t rank)
{
    return model->components[component].is_replicated ? 0 : rank;
}

uint64_t kvt_model_block_bytes(const struct kvt_model *model)
{
    uint64_t bytes = 0;

    for (uint32_t i = 0; i < model->components_count; i++)
        bytes += model->components[i].block_bytes *
                 (model->components[i].is_replicated ? 1 : model->ranks);
    return bytes;
}
