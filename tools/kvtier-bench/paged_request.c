/* A request's tables grow at the end while it computes and shrink at the front where its component
 * no longer looks back: so is the life of a block table in engines with sliding windows.
 *
 *   full     [0 .......................... end)
 *   window             [begin ............ end)   begin follows computed_tokens - window_tokens
 *   state                          [end-1, end)   by whole blocks: the last snapshot
 *
 * A block's bytes are those of whole blocks of ours, so an engine block holds its guard pattern
 * until its block of ours is computed whole. */
#include <stdio.h>
#include <string.h>

#include "daemon/base/alloc.h"
#include "tools/kvtier-bench/paged.h"
#include "tools/lib/oracle.h"

static const struct kvt_model *model_of(const struct paged_engine *paged)
{
    return paged->engine->model;
}

static bool is_state(const struct paged_engine *paged, uint32_t c)
{
    return model_of(paged)->components[c].kind == KVT_MODEL_STATE;
}

/* Entries of component @c's table that @tokens take. */
static uint64_t entries(const struct paged_engine *paged, uint32_t c, uint64_t tokens)
{
    uint32_t each = model_of(paged)->engine_block_tokens;

    if (is_state(paged, c))
        return tokens / model_of(paged)->block_tokens;
    return (tokens + each - 1) / each;
}

/* The first entry that computing on from @tokens looks back to. */
static uint64_t first_entry(const struct paged_engine *paged, uint32_t c, uint64_t tokens)
{
    const struct kvt_model_component *component = &model_of(paged)->components[c];

    switch (component->kind) {
    case KVT_MODEL_FULL:
        return 0;
    case KVT_MODEL_WINDOW:
        return (tokens - KVT_MIN(tokens, (uint64_t)component->window_tokens)) /
               model_of(paged)->engine_block_tokens;
    case KVT_MODEL_STATE:
        return entries(paged, c, tokens) - (entries(paged, c, tokens) > 0);
    }
    KVT_ASSERT(false);
    return 0;
}

/* ---- life ------------------------------------------------------------------------------------ */

static uint64_t tokens_max(const struct paged_engine *paged)
{
    return (uint64_t)paged->engine->workload->input_tokens_max +
           paged->engine->workload->output_tokens_max;
}

int paged_request_init(struct paged_engine *paged, struct paged_request *request)
{
    uint64_t tokens = tokens_max(paged);

    *request = (struct paged_request){.phase = PAGED_FREE};
    request->tokens = kvt_alloc_zeroed(tokens + 1, sizeof(uint32_t));
    request->chains =
        kvt_alloc_zeroed(tokens / model_of(paged)->block_tokens + 1, sizeof(uint64_t));
    if (request->tokens == NULL || request->chains == NULL)
        return kvt_trace(-ENOMEM);
    for (uint32_t c = 0; c < model_of(paged)->components_count; c++) {
        request->tables[c] =
            kvt_alloc_zeroed(entries(paged, c, tokens) + 1, sizeof(request->tables[c][0]));
        if (request->tables[c] == NULL)
            return kvt_trace(-ENOMEM);
    }
    return 0;
}

void paged_request_deinit(struct paged_engine *paged, struct paged_request *request)
{
    kvt_free(request->tokens);
    kvt_free(request->chains);
    for (uint32_t c = 0; c < model_of(paged)->components_count; c++)
        kvt_free(request->tables[c]);
}

void paged_request_begin(struct paged_engine *paged, struct paged_request *request,
                         uint64_t own_idx)
{
    const struct kvt_workload *workload = paged->engine->workload;
    const struct kvt_request *what = &workload->requests[paged->own[own_idx]];
    uint64_t block_tokens = model_of(paged)->block_tokens, stored = what->input_tokens;

    request->phase = PAGED_WAITING;
    request->number = paged->admitted++;
    request->own_idx = own_idx;
    request->request_idx = paged->own[own_idx];
    request->prompt_tokens = what->input_tokens;
    request->total_tokens = (uint64_t)what->input_tokens + what->output_tokens;
    if (paged->engine->options->is_storing_output)
        stored = request->total_tokens;
    request->stored_tokens_max = stored - stored % block_tokens;
    request->computed_tokens = 0;
    request->salt[0] = '\0';
    if (what->tenant != 0)
        (void)snprintf(request->salt, sizeof(request->salt), "tenant-%u", what->tenant);
    kvt_workload_tokens(workload, request->request_idx, 0, request->total_tokens, request->tokens);
    kvt_oracle_chain(kvt_oracle_root(paged->engine->link.fingerprint, request->salt, ""),
                     request->tokens, (uint32_t)block_tokens, request->total_tokens / block_tokens,
                     request->chains);
    request->cursor_tokens = bench_cursor_recall(&paged->cursors, workload, request->request_idx,
                                                 request->stored_tokens_max, &request->cursor);
    request->free_seen = request->kept_tokens = 0;
    request->may_load = true;
    request->abort_at_tokens = UINT64_MAX;
    for (uint32_t c = 0; c < model_of(paged)->components_count; c++)
        request->begins[c] = request->ends[c] = 0;
}

void paged_request_drop(struct paged_engine *paged, struct paged_request *request)
{
    for (uint32_t c = 0; c < model_of(paged)->components_count; c++) {
        for (uint64_t i = request->begins[c]; i < request->ends[c]; i++)
            paged_blocks_unref(&paged->blocks, request->tables[c][i]);
        request->begins[c] = request->ends[c] = 0;
    }
    request->computed_tokens = request->kept_tokens = 0;
}

/* Where full attention begins to lack blocks; 0 for other components. */
static uint64_t kept_entries(const struct paged_engine *paged, const struct paged_request *request,
                             uint32_t c)
{
    return model_of(paged)->components[c].kind == KVT_MODEL_FULL
               ? request->kept_tokens / model_of(paged)->engine_block_tokens
               : 0;
}

void paged_request_keep(struct paged_engine *paged, struct paged_request *request, uint64_t tokens)
{
    const struct kvt_model *model = model_of(paged);
    uint64_t computed = KVT_MAX(request->computed_tokens, request->kept_tokens);

    tokens = KVT_MIN(tokens, computed - computed % model->block_tokens);
    request->kept_tokens = tokens - tokens % model->engine_block_tokens;
    for (uint32_t c = 0; c < model->components_count; c++) {
        uint64_t kept = kept_entries(paged, request, c);

        for (uint64_t i = KVT_MAX(kept, request->begins[c]); i < request->ends[c]; i++)
            paged_blocks_unref(&paged->blocks, request->tables[c][i]);
        request->begins[c] = 0;
        request->ends[c] = kept;
    }
    request->computed_tokens = 0;
}

static void hide_or_show(struct paged_engine *paged, struct paged_request *request,
                         uint64_t first_block, bool is_hiding)
{
    for (uint32_t c = 0; c < model_of(paged)->components_count; c++) {
        uint32_t each = model_of(paged)->components[c].engine_blocks_per_block;

        for (uint64_t i = first_block * each; i < kept_entries(paged, request, c); i++) {
            struct paged_block what = {PAGED_PAYLOAD, c, (uint32_t)(i % each),
                                       request->chains[i / each], i / each};

            if (is_hiding)
                paged_blocks_hide(&paged->blocks, request->tables[c][i]);
            else
                paged_blocks_show(&paged->blocks, request->tables[c][i], &what);
        }
    }
}

void paged_request_hide_kept(struct paged_engine *paged, struct paged_request *request,
                             uint64_t first_block)
{
    hide_or_show(paged, request, first_block, true);
}

void paged_request_show_kept(struct paged_engine *paged, struct paged_request *request)
{
    hide_or_show(paged, request, 0, false);
    request->kept_tokens = 0;
}

/* ---- growing and sliding --------------------------------------------------------------------- */

uint64_t paged_request_lacks(const struct paged_engine *paged, const struct paged_request *request,
                             uint64_t tokens)
{
    uint64_t lacks = 0;

    for (uint32_t c = 0; c < model_of(paged)->components_count; c++) {
        uint64_t more = entries(paged, c, tokens) - request->ends[c];

        lacks += is_state(paged, c) ? more > 0 : more;
    }
    return lacks;
}

void paged_request_grow(struct paged_engine *paged, struct paged_request *request, uint64_t tokens)
{
    for (uint32_t c = 0; c < model_of(paged)->components_count; c++) {
        uint64_t end = entries(paged, c, tokens), first = request->ends[c];

        /* Of several states passed in one step only the last one is kept. */
        for (; is_state(paged, c) && first + 1 < end; first++)
            request->tables[c][first] = KVT_BLOCK_NONE;
        if (first < end) {
            bool is_there =
                paged_blocks_take(&paged->blocks, c, end - first, request->tables[c] + first);

            KVT_ASSERT(is_there); /* the caller compared lacks with the pool */
            request->ends[c] = end;
        }
    }
}

static void slide_to(struct paged_engine *paged, struct paged_request *request, uint32_t c,
                     uint64_t begin)
{
    for (; request->begins[c] < KVT_MIN(begin, request->ends[c]); request->begins[c]++) {
        uint64_t id = request->tables[c][request->begins[c]];

        paged->stats.slid_blocks += id != KVT_BLOCK_NONE;
        paged_blocks_unref(&paged->blocks, id);
        request->tables[c][request->begins[c]] = KVT_BLOCK_NONE;
    }
}

void paged_request_slide(struct paged_engine *paged, struct paged_request *request)
{
    for (uint32_t c = 0; c < model_of(paged)->components_count; c++)
        slide_to(paged, request, c, first_entry(paged, c, request->computed_tokens));
}

bool paged_request_make_room(struct paged_engine *paged, struct paged_request *request,
                             uint64_t boundary_tokens)
{
    uint64_t wanted = 0;

    KVT_ASSERT(request->kept_tokens <= boundary_tokens);
    for (uint32_t c = 0; c < model_of(paged)->components_count; c++)
        wanted += entries(paged, c, boundary_tokens) - first_entry(paged, c, boundary_tokens) -
                  kept_entries(paged, request, c);
    if (paged->blocks.pool.free_count < wanted)
        return false;
    for (uint32_t c = 0; c < model_of(paged)->components_count; c++) {
        uint64_t begin = first_entry(paged, c, boundary_tokens);
        uint64_t end = entries(paged, c, boundary_tokens);
        uint64_t at = begin + kept_entries(paged, request, c);
        bool is_there = paged_blocks_take(&paged->blocks, c, end - at, request->tables[c] + at);

        for (uint64_t i = 0; i < begin; i++)
            request->tables[c][i] = KVT_BLOCK_NONE;
        KVT_ASSERT(is_there);
        request->begins[c] = begin;
        request->ends[c] = end;
    }
    return true;
}

/* ---- computing ------------------------------------------------------------------------------- */

static void compute_block(struct paged_engine *paged, struct paged_request *request, uint32_t c,
                          uint64_t block)
{
    uint32_t each = model_of(paged)->components[c].engine_blocks_per_block;

    for (uint32_t part = 0; part < each; part++) {
        struct paged_block what = {PAGED_PAYLOAD, c, part, request->chains[block], block};
        uint64_t entry = block * each + part;

        if (entry >= request->begins[c] && request->tables[c][entry] != KVT_BLOCK_NONE)
            paged_blocks_compute(&paged->blocks, request->tables[c][entry], &what);
    }
    paged->stats.computed_blocks++;
}

void paged_request_compute(struct paged_engine *paged, struct paged_request *request,
                           uint64_t tokens)
{
    uint64_t block_tokens = model_of(paged)->block_tokens, end = tokens / block_tokens;

    for (uint64_t block = request->computed_tokens / block_tokens; block < end; block++)
        for (uint32_t c = 0; c < model_of(paged)->components_count; c++)
            if (!is_state(paged, c) || block + 1 == end)
                compute_block(paged, request, c, block);
    request->computed_tokens = tokens;
}

static bool is_whole(const struct paged_engine *paged, const struct paged_request *request,
                     uint32_t c, uint64_t block)
{
    uint32_t each = model_of(paged)->components[c].engine_blocks_per_block;

    for (uint32_t part = 0; part < each; part++) {
        uint64_t entry = block * each + part;

        if (entry < request->begins[c] || entry >= request->ends[c] ||
            request->tables[c][entry] == KVT_BLOCK_NONE ||
            paged->blocks.blocks[request->tables[c][entry]].content != PAGED_PAYLOAD)
            return false;
    }
    return true;
}

struct kvt_model_span paged_request_whole(const struct paged_engine *paged,
                                          const struct paged_request *request, uint32_t c,
                                          uint64_t end_block)
{
    uint64_t tokens = end_block * model_of(paged)->block_tokens, first = end_block;
    struct kvt_model_span needed = kvt_model_needed(model_of(paged), c, tokens);

    while (first > needed.first && is_whole(paged, request, c, first - 1))
        first--;
    return (struct kvt_model_span){first, end_block};
}
