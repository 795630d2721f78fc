/* Does kvtier-bench see what it is there to see? It runs against a naive cache (a table of payloads
 * behind the real gRPC server) that can be told to flip a byte, to serve another block's bytes, to
 * write beside the blocks it was given or long after it said that it was done, to serve what only
 * one rank has stored, to keep what is to be quantised as it is, or to leave a block out: all but
 * the last must end in exit status 1, the last must not, and an engine that is killed must change
 * nothing but the hits.
 *
 * The cache is one hash table of (chain, component, rank) -> payload; it never evicts; leases and
 * tickets are lists of chains that live until the end. Service thread only. */
#include <cjson/cJSON.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>

#include "daemon/base/guard.h"
#include "daemon/base/hash.h"
#include "proto/client/client.h"
#include "tests/common/fake_service.h"
#include "tiers/client.h"

#define SLOTS (1u << 17)
#define PATHS_MAX 20000u
#define SESSIONS_MAX 512u
#define BLOCK_TOKENS 64u

#define PARTS_MAX 16u /* engine blocks a block */

enum lie {
    LIE_NONE,
    LIE_FLIP,
    LIE_OTHER_BLOCK,
    LIE_LEAVE_OUT,
    LIE_BESIDE,   /* writes to the next engine block, too */
    LIE_LATE,     /* writes once more, when the engine has long had the block back */
    LIE_ONE_RANK, /* serves what rank 0 has stored to the others, too */
    LIE_RAW,      /* quantises nothing */
};

struct payload {
    uint64_t key;
    uint8_t *bytes;
};

struct path { /* of a lease or a ticket */
    uint64_t *chains;
    uint64_t count;
};

struct seat { /* a session */
    bool is_used;
    uint32_t rank;
    struct kvt_region *region;
    struct kvt_layout layouts[KVT_COMPONENTS_MAX];
};

struct late { /* a write that is still to come */
    struct seat *seat;
    uint32_t component;
    uint64_t ids[PARTS_MAX];
    const uint8_t *bytes; /* NULL: none */
};

struct cache {
    enum lie lie;
    struct late late;
    uint64_t promoted; /* every so many are lied about */
    uint32_t components_count, ranks;
    uint64_t block_bytes[KVT_COMPONENTS_MAX];
    struct kvt_quant_spec quant[KVT_COMPONENTS_MAX];
    struct payload slots[SLOTS];
    struct path paths[PATHS_MAX];
    uint64_t paths_count;
    struct seat seats[SESSIONS_MAX];
    uint32_t seats_count;
};

static struct cache cache;

static struct payload *slot_of(uint64_t chain, uint32_t component, uint32_t rank)
{
    uint64_t key = (chain ^ ((uint64_t)(component + 1) << 20 | (rank + 1))) | 1;
    uint64_t at = key % SLOTS;

    while (cache.slots[at].key != 0 && cache.slots[at].key != key)
        at = (at + 1) % SLOTS;
    cache.slots[at].key = key;
    return &cache.slots[at];
}

/* All ranks and components of it are there: the naive cache knows whole blocks only. */
static bool has_component(uint64_t chain, uint32_t component)
{
    uint32_t ranks = cache.lie == LIE_ONE_RANK ? 1 : cache.ranks;

    for (uint32_t rank = 0; rank < ranks; rank++)
        if (slot_of(chain, component, rank)->bytes == NULL)
            return false;
    return true;
}

static uint64_t new_path(const struct kvt_api_prefix *prefix)
{
    struct path *path = &cache.paths[cache.paths_count];
    uint64_t chain = kvt_hash64(prefix->salt.at, prefix->salt.bytes, 5);

    KVT_ASSERT(cache.paths_count < PATHS_MAX);
    path->count = prefix->tokens_count / BLOCK_TOKENS;
    path->chains = calloc(path->count + 1, sizeof(uint64_t));
    KVT_ASSERT(path->chains != NULL);
    for (uint64_t i = 0; i < path->count; i++) {
        chain = kvt_hash64(prefix->tokens + i * BLOCK_TOKENS, BLOCK_TOKENS * 4, chain);
        path->chains[i] = chain;
    }
    return cache.paths_count++;
}

static void serve_attach(struct kvt_op *op)
{
    const struct kvt_req_attach *req = &op->req.attach;
    struct seat *seat = &cache.seats[cache.seats_count++];

    KVT_ASSERT(cache.seats_count < SESSIONS_MAX);
    seat->is_used = true;
    seat->rank = req->rank;
    seat->region = req->regions_count > 0 ? req->regions[0].mapping : NULL;
    for (uint32_t i = 0; i < req->layouts_count; i++) {
        const struct kvt_api_layout *from = &req->layouts[i];
        struct kvt_layout *to = &seat->layouts[from->component];

        to->pieces_count = from->pieces_count;
        to->engine_blocks_per_block = from->engine_blocks_per_block;
        to->quant = cache.quant[from->component];
        to->pieces = calloc(from->pieces_count, sizeof(to->pieces[0]));
        KVT_ASSERT(to->pieces != NULL);
        for (uint32_t p = 0; p < from->pieces_count; p++)
            to->pieces[p] = (struct kvt_layout_piece){
                .region_idx = from->pieces[p].region_idx,
                .bytes = from->pieces[p].bytes,
                .offset_bytes = from->pieces[p].offset_bytes,
                .stride_bytes = from->pieces[p].stride_bytes,
            };
        if (kvt_layout_resolve(to, seat->region, 1, cache.block_bytes[from->component]) != 0)
            kvt_op_fail(op, KVT_CODE_INVALID_ARGUMENT, "layout");
    }
    op->ans.attach.session = (struct kvt_handle){1, cache.seats_count, 7};
    op->ans.attach.api_version = 1;
}

static void serve_detach(struct kvt_op *op)
{
    struct seat *seat = &cache.seats[op->req.detach.session.id - 1];

    if (seat->region != NULL) {
        kvt_region_close(seat->region);
        free(seat->region);
    }
    for (uint32_t c = 0; c < KVT_COMPONENTS_MAX; c++)
        free(seat->layouts[c].pieces);
    *seat = (struct seat){0};
}

static void serve_lookup(struct kvt_op *op)
{
    const struct kvt_req_lookup *req = &op->req.lookup;
    struct kvt_ans_lookup *ans = &op->ans.lookup;
    uint64_t id = new_path(&req->prefix), blocks = 0;
    const struct path *path = &cache.paths[id];

    while (blocks < path->count && (blocks + 1) * BLOCK_TOKENS <= req->limit_tokens &&
           has_component(path->chains[blocks], 0))
        blocks++;
    /* The boundary is legal only where the last block has everything. */
    for (; blocks > 0; blocks--) {
        uint32_t c = 0;

        while (c < cache.components_count && has_component(path->chains[blocks - 1], c))
            c++;
        if (c == cache.components_count)
            break;
    }
    ans->boundary_tokens = blocks * BLOCK_TOKENS;
    ans->components_count = cache.components_count;
    for (uint32_t c = 0; c < cache.components_count; c++)
        ans->components[c].tokens_at[1] = ans->boundary_tokens;
    if (blocks > 0)
        ans->lease = (struct kvt_handle){1, id + 1, 7};
}

static struct kvt_client_view view_of(struct seat *seat, const struct kvt_api_moves *moves,
                                      uint32_t i)
{
    const struct kvt_layout *layout = &seat->layouts[moves->component];

    return (struct kvt_client_view){
        .layout = layout,
        .engine_blocks = moves->engine_blocks + (uint64_t)i * layout->engine_blocks_per_block,
        .end_piece = layout->pieces_count,
    };
}

/* Writes @bytes to engine blocks that nobody gave for it. */
static void write_to(struct seat *seat, uint32_t component, const uint64_t *ids,
                     const uint8_t *bytes)
{
    struct kvt_client_view view = {
        .layout = &seat->layouts[component],
        .engine_blocks = ids,
        .end_piece = seat->layouts[component].pieces_count,
    };
    int r = kvt_client_scatter(&view, bytes);

    KVT_ASSERT(r == 0);
}

static void copy_ids(uint64_t *ids, const struct kvt_client_view *view, uint64_t add)
{
    KVT_ASSERT(view->layout->engine_blocks_per_block <= PARTS_MAX);
    for (uint32_t i = 0; i < view->layout->engine_blocks_per_block; i++)
        ids[i] = view->engine_blocks[i] == KVT_ENGINE_BLOCK_NONE ? KVT_ENGINE_BLOCK_NONE
                                                                 : view->engine_blocks[i] - add;
}

/* What was promised with the block, and goes wrong with its neighbours. */
static void write_more(struct seat *seat, uint32_t component, const struct kvt_client_view *view,
                       const uint8_t *bytes)
{
    uint64_t ids[PARTS_MAX];

    if (cache.lie == LIE_BESIDE) {
        copy_ids(ids, view, 1); /* ids begin at 1, behind the null block */
        write_to(seat, component, ids, bytes);
    } else if (cache.lie == LIE_LATE) {
        cache.late = (struct late){.seat = seat, .component = component, .bytes = bytes};
        copy_ids(cache.late.ids, view, 0);
    }
}

static void write_late(void)
{
    struct late *late = &cache.late;

    if (late->bytes != NULL && late->seat->is_used)
        write_to(late->seat, late->component, late->ids, late->bytes);
    late->bytes = NULL;
}

/* What the cache says it has: with the lie on, not always the truth. */
static uint8_t promote_one(struct seat *seat, const struct kvt_api_moves *moves, uint32_t i,
                           const struct path *path)
{
    struct kvt_client_view view = view_of(seat, moves, i);
    uint64_t chain = path->chains[moves->block_idx[i]];
    bool is_lie = cache.lie != LIE_NONE && ++cache.promoted % 100 == 0;
    /* Where it is quantised, of the codes. */
    uint64_t flip_at = cache.promoted % (cache.block_bytes[moves->component] /
                                         (cache.quant[moves->component].kind == 0 ? 1 : 2));
    uint8_t *bytes;
    int r;

    if (is_lie && cache.lie == LIE_OTHER_BLOCK && moves->block_idx[i] > 0)
        chain = path->chains[moves->block_idx[i] - 1];
    bytes = slot_of(chain, moves->component, seat->rank)->bytes;
    if (bytes == NULL && cache.lie == LIE_ONE_RANK)
        bytes = slot_of(chain, moves->component, 0)->bytes;
    if (bytes == NULL || (is_lie && cache.lie == LIE_LEAVE_OUT))
        return KVT_MOVE_MISS;
    if (is_lie && cache.lie == LIE_FLIP)
        bytes[flip_at] ^= 4;
    r = kvt_client_scatter(&view, bytes);
    if (is_lie && cache.lie == LIE_FLIP)
        bytes[flip_at] ^= 4;
    if (is_lie)
        write_more(seat, moves->component, &view, bytes);
    else if (cache.promoted % 100 == 90)
        write_late();
    return r == 0 ? KVT_MOVE_DONE : KVT_MOVE_CLIENT_GONE;
}

static uint8_t demote_one(struct seat *seat, const struct kvt_api_moves *moves, uint32_t i,
                          const struct path *path)
{
    struct kvt_client_view view = view_of(seat, moves, i);
    struct payload *slot = slot_of(path->chains[moves->block_idx[i]], moves->component, seat->rank);

    if (slot->bytes != NULL)
        return KVT_MOVE_PRESENT;
    slot->bytes = malloc(cache.block_bytes[moves->component]);
    KVT_ASSERT(slot->bytes != NULL);
    return kvt_client_gather(&view, slot->bytes, NULL) == 0 ? KVT_MOVE_DONE : KVT_MOVE_CLIENT_GONE;
}

static void serve_moves(struct kvt_op *op)
{
    bool is_promote = op->kind == KVT_OP_PROMOTE;
    const struct kvt_api_moves *list = is_promote ? op->req.promote.moves : op->req.demote.moves;
    uint32_t count = is_promote ? op->req.promote.moves_count : op->req.demote.moves_count;
    struct kvt_handle session = is_promote ? op->req.promote.session : op->req.demote.session;
    struct kvt_handle handle = is_promote ? op->req.promote.lease : op->req.demote.ticket;
    struct kvt_api_results *results = is_promote ? &op->ans.promote.moves : &op->ans.demote.moves;
    struct seat *seat = &cache.seats[session.id - 1];

    for (uint32_t m = 0; m < count; m++) {
        results->count[m] = list[m].count;
        results->results[m] = kvt_arena_alloc(op->arena, list[m].count);
        KVT_ASSERT(results->results[m] != NULL);
        for (uint32_t i = 0; i < list[m].count; i++)
            results->results[m][i] =
                is_promote ? promote_one(seat, &list[m], i, &cache.paths[handle.id - 1])
                           : demote_one(seat, &list[m], i, &cache.paths[handle.id - 1]);
    }
    if (is_promote)
        op->ans.promote.is_quiesced = true;
    else
        op->ans.demote.is_quiesced = true;
}

static void serve_reserve(struct kvt_op *op)
{
    const struct kvt_req_reserve *req = &op->req.reserve;
    struct kvt_ans_reserve *ans = &op->ans.reserve;
    uint64_t id = new_path(&req->prefix);

    ans->wants_count = req->wants_count;
    for (uint32_t w = 0; w < req->wants_count; w++) {
        const struct kvt_api_range *range = &req->wants[w];

        ans->count[w] = (uint32_t)(range->end_block_idx - range->first_block_idx);
        ans->states[w] = kvt_arena_alloc(op->arena, ans->count[w]);
        KVT_ASSERT(ans->states[w] != NULL && range->end_block_idx <= cache.paths[id].count);
        for (uint32_t i = 0; i < ans->count[w]; i++)
            ans->states[w][i] =
                has_component(cache.paths[id].chains[range->first_block_idx + i], range->component)
                    ? KVT_RESERVE_PRESENT
                    : KVT_RESERVE_MISSING;
    }
    ans->ticket = (struct kvt_handle){1, id + 1, 7};
}

static void serve_open(struct kvt_op *op)
{
    const struct kvt_req_open_namespace *req = &op->req.open_namespace;

    KVT_ASSERT(req->block_tokens == BLOCK_TOKENS);
    cache.components_count = req->components_count;
    cache.ranks = req->ranks;
    for (uint32_t c = 0; c < req->components_count; c++) {
        const struct kvt_api_quant *quant = &req->components[c].quant;

        cache.block_bytes[c] = req->components[c].bytes_per_block;
        if (cache.lie != LIE_RAW)
            cache.quant[c] = (struct kvt_quant_spec){.kind = (uint8_t)quant->kind,
                                                     .elem = (uint8_t)quant->elem,
                                                     .order = (uint8_t)quant->order,
                                                     .plane_tokens = quant->plane_tokens,
                                                     .heads = quant->heads,
                                                     .head_dim = quant->head_dim};
    }
    op->ans.open_namespace.ns = (struct kvt_handle){1, 1, 7};
}

static bool serve(struct fake_service *fake, struct kvt_op *op)
{
    memset(&op->ans, 0, sizeof(op->ans));
    op->code = KVT_CODE_OK;
    if (op->kind == KVT_OP_OPEN_NAMESPACE)
        serve_open(op);
    else if (op->kind == KVT_OP_ATTACH)
        serve_attach(op);
    else if (op->kind == KVT_OP_DETACH)
        serve_detach(op);
    else if (op->kind == KVT_OP_LOOKUP)
        serve_lookup(op);
    else if (op->kind == KVT_OP_RESERVE)
        serve_reserve(op);
    else if (op->kind == KVT_OP_PROMOTE || op->kind == KVT_OP_DEMOTE)
        serve_moves(op);
    atomic_fetch_sub(&fake->running, 1);
    op->done(op);
    return true;
}

static int region_open(void *ctx, int memfd, uint64_t bytes, void **ret_mapping,
                       const char **ret_why)
{
    struct kvt_region *region = calloc(1, sizeof(*region));
    int r;

    (void)ctx;
    KVT_ASSERT(region != NULL);
    r = kvt_region_open(region, memfd, bytes);
    if (r != 0) {
        free(region);
        *ret_why = "region";
        return r;
    }
    *ret_mapping = region;
    return 0;
}

static void region_close(void *ctx, void *mapping)
{
    (void)ctx;
    kvt_region_close(mapping);
    free(mapping);
}

/* ---- the tests ------------------------------------------------------------------------------- */

struct run {
    int status;
    uint64_t requests, verified_blocks, wrong_bytes, hit_tokens, kills, recomputed;
    uint64_t stray_bytes, preemptions, failed_loads, reused_by_other, slid_blocks, rank_kills;
};

static uint64_t number_of(const cJSON *object, const char *name)
{
    const cJSON *item = cJSON_GetObjectItem(object, name);

    KVT_ASSERT(cJSON_IsNumber(item));
    return (uint64_t)cJSON_GetNumberValue(item);
}

static struct run run_bench(const char *program, const char *arguments, enum lie lie)
{
    static char text[1 << 16];
    struct fake_server server;
    char command[512];
    struct run run = {0};
    FILE *pipe;
    size_t bytes;
    cJSON *object;

    memset(&cache, 0, sizeof(cache));
    cache.lie = lie;
    fake_server_start(&server, (struct kvt_server_config){0});
    server.service.table.region_open = region_open;
    server.service.table.region_close = region_close;
    server.service.handle = serve;
    (void)snprintf(command, sizeof(command),
                   "%s synth --socket %s --json --quiet --limit 200 --sessions 8 --tenants 2 "
                   "--bytes-per-token 64 %s",
                   program, server.path, arguments);
    pipe = popen(command, "r");
    KVT_ASSERT(pipe != NULL);
    bytes = fread(text, 1, sizeof(text) - 1, pipe);
    text[bytes] = '\0';
    run.status = WEXITSTATUS(pclose(pipe));
    fake_server_stop(&server, KVT_NS_PER_S);
    object = cJSON_Parse(text);
    KVT_ASSERT(object != NULL);
    run.requests = number_of(object, "requests");
    run.verified_blocks = number_of(object, "verified_blocks");
    run.wrong_bytes = number_of(object, "wrong_bytes");
    run.hit_tokens = number_of(object, "hit_tokens");
    run.kills = number_of(object, "engine_kills");
    run.recomputed = number_of(object, "recomputed_blocks");
    run.stray_bytes = number_of(object, "stray_bytes");
    run.preemptions = number_of(object, "preemptions");
    run.failed_loads = number_of(object, "failed_loads");
    run.reused_by_other = number_of(object, "reused_by_other");
    run.slid_blocks = number_of(object, "slid_blocks");
    run.rank_kills = number_of(object, "rank_kills");
    cJSON_Delete(object);
    for (uint32_t i = 0; i < SLOTS; i++)
        free(cache.slots[i].bytes);
    for (uint64_t i = 0; i < cache.paths_count; i++)
        free(cache.paths[i].chains);
    printf("%-60s lie %d: status %d, %llu requests, %llu hit tokens, %llu verified, %llu wrong, "
           "%llu stray\n",
           arguments, (int)lie, run.status, (unsigned long long)run.requests,
           (unsigned long long)run.hit_tokens, (unsigned long long)run.verified_blocks,
           (unsigned long long)run.wrong_bytes, (unsigned long long)run.stray_bytes);
    return run;
}

/* Without and with pages: what comes back right, and what a lie does to it. A reduced one has the
 * load without pages and windows alone. */
static void check_quantised(const char *program, bool is_reduced)
{
    static const enum lie bad[] = {LIE_FLIP, LIE_OTHER_BLOCK, LIE_RAW};
    /* A pool so small that blocks get other contents soon: what is written late is seen. */
    static const char small[] =
        "--quantise int8 --paged --concurrency 6 --ranks 2 --layers 2 --preset hybrid --window 100 "
        "--limit 100 --pool-bytes 1792KiB --late-us 500";
    static const char *const loads[] = {
        "--quantise int8 --preset mla",
        "--quantise fp8_e4m3 --preset hybrid --window 100 --ranks 2",
        small,
    };

    for (size_t i = 0; i < (is_reduced ? 1 : KVT_COUNT_OF(loads)); i++) {
        struct run run = run_bench(program, loads[i], LIE_NONE);

        KVT_ASSERT(run.status == 0 && run.wrong_bytes + run.stray_bytes == 0);
        KVT_ASSERT(run.hit_tokens > 0 && run.verified_blocks > 0 && run.failed_loads == 0);
        for (size_t lie = 0; lie < KVT_COUNT_OF(bad); lie++) {
            run = run_bench(program, loads[i], bad[lie]);
            KVT_ASSERT(run.status == 1 && run.wrong_bytes > 0);
        }
    }
    for (enum lie lie = LIE_BESIDE; lie <= LIE_LATE && !is_reduced; lie++) {
        struct run run = run_bench(program, small, lie);

        KVT_ASSERT(run.status == 1 && run.stray_bytes > 0);
    }
}

static const char paged[] = "--paged --concurrency 6 --ranks 2 --layers 2 --preset hybrid "
                            "--window 100 --limit 100 --pool-bytes 1792KiB --late-us 500";

static void check_paged_engines(const char *program)
{
    static const enum lie bad[] = {LIE_FLIP, LIE_OTHER_BLOCK, LIE_BESIDE, LIE_LATE};
    struct run run = run_bench(program, paged, LIE_NONE);
    char more[256];

    KVT_ASSERT(run.status == 0 && run.requests == 100 && run.wrong_bytes + run.stray_bytes == 0);
    KVT_ASSERT(run.hit_tokens > 0 && run.verified_blocks > 0 && run.failed_loads == 0);
    KVT_ASSERT(run.preemptions > 0 && run.reused_by_other > 0 && run.slid_blocks > 0);
    for (size_t i = 0; i < KVT_COUNT_OF(bad); i++) {
        run = run_bench(program, paged, bad[i]);
        KVT_ASSERT(run.status == 1 && run.wrong_bytes + run.stray_bytes > 0);
        KVT_ASSERT((run.stray_bytes > 0) == (bad[i] == LIE_BESIDE || bad[i] == LIE_LATE));
    }
    run = run_bench(program, paged, LIE_LEAVE_OUT);
    KVT_ASSERT(run.status == 0 && run.requests == 100 && run.wrong_bytes + run.stray_bytes == 0);
    KVT_ASSERT(run.failed_loads > 0 && run.recomputed >= run.failed_loads);
    /* Ranks that begin late are often given up before: then only the others have stored. */
    (void)snprintf(more, sizeof(more), "%s --cancel-every 3 --late-us 5000", paged);
    run = run_bench(program, more, LIE_ONE_RANK);
    KVT_ASSERT(run.status == 1 && run.wrong_bytes > 0);
    (void)snprintf(more, sizeof(more), "%s --engines 2 --kill-engine-every 25 --kill-rank-every 20",
                   paged);
    run = run_bench(program, more, LIE_NONE);
    KVT_ASSERT(run.status == 0 && run.requests == 100 && run.wrong_bytes + run.stray_bytes == 0);
    KVT_ASSERT(run.kills >= 2 && run.rank_kills >= 1 && run.hit_tokens > 0);
}

static void check_plain(const char *program)
{
    struct run run, plain = run_bench(program, "", LIE_NONE);

    KVT_ASSERT(plain.status == 0 && plain.requests == 200 && plain.wrong_bytes == 0);
    KVT_ASSERT(plain.verified_blocks * BLOCK_TOKENS == plain.hit_tokens && plain.hit_tokens > 0);
    run = run_bench(program, "--engine-block-tokens 64 --layers 1", LIE_FLIP);
    KVT_ASSERT(run.status == 1 && run.wrong_bytes == run.verified_blocks / 100);
    run = run_bench(program, "", LIE_OTHER_BLOCK);
    KVT_ASSERT(run.status == 1 && run.wrong_bytes > 4000);
    run = run_bench(program, "", LIE_LEAVE_OUT);
    KVT_ASSERT(run.status == 0 && run.wrong_bytes == 0 && run.recomputed > 0);
    run = run_bench(program, "--preset hybrid --window 100 --ranks 2 --concurrency 2", LIE_NONE);
    KVT_ASSERT(run.status == 0 && run.requests == 200 && run.verified_blocks > 0);
    run = run_bench(program, "--engines 2 --concurrency 2 --kill-engine-every 20", LIE_NONE);
    KVT_ASSERT(run.status == 0 && run.requests == 200 && run.kills >= 5 && run.hit_tokens > 0);
    run = run_bench(program, "--no-verify", LIE_FLIP);
    KVT_ASSERT(run.status == 0 && run.verified_blocks == 0);
}

/* PROGRAM [quantised|quantised-reduced] */
int main(int argc, char **argv)
{
    const char *part = argc == 3 ? argv[2] : "";

    KVT_ASSERT(argc == 2 || argc == 3);
    kvt_client_library_init(); /* the server's gRPC too: one start a process */
    KVT_ASSERT(kvt_guard_install() == 0);
    if (strncmp(part, "quantised", strlen("quantised")) == 0) {
        check_quantised(argv[1], strcmp(part, "quantised-reduced") == 0);
    } else {
        KVT_ASSERT(*part == '\0');
        check_plain(argv[1]);
        check_paged_engines(argv[1]);
    }
    kvt_client_library_deinit();
    return 0;
}
