/* Quantised components through the engine: which specifications and layouts make sense, that
 * another quantisation is another namespace, and that what comes back from each tier, inline or in
 * place, in part and after a restart, is what the kernels make of what was stored. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/engine/internal.h"
#include "tests/common/check.h"
#include "tests/common/persist.h"

#define BLOCKS 8u
/* A piece of an engine block is 1,024 bytes: one plane, or two. */
static const struct kvt_api_quant one_plane = {
    .kind = 1, .elem = 2, .order = 1, .plane_tokens = 8, .heads = 2, .head_dim = 32};
static const struct kvt_api_quant two_planes = {
    .kind = 2, .elem = 1, .order = 2, .plane_tokens = 8, .heads = 1, .head_dim = 32};

/* ---- specifications ---------------------------------------------------------------------------
 */

static struct kvt_ans_open_namespace open_model(struct call *call, uint32_t component_kind,
                                                uint64_t bytes, const struct kvt_api_quant *quant)
{
    struct kvt_req_open_namespace *req = &call->op.req.open_namespace;

    call_begin(call, KVT_OP_OPEN_NAMESPACE);
    req->block_tokens = WORLD_BLOCK_TOKENS;
    req->ranks = 1;
    req->components_count = 1;
    req->components[0] = (struct kvt_api_component){.kind = component_kind,
                                                    .window_tokens = component_kind == 2 ? 40 : 0,
                                                    .bytes_per_block = bytes,
                                                    .quant = *quant};
    req->model = (struct kvt_text){"specs", 5};
    call_run(call);
    return call->op.ans.open_namespace;
}

static void test_refused_specs(struct call *call)
{
    static const struct {
        uint32_t component_kind;
        uint64_t bytes;
        struct kvt_api_quant quant;
        const char *says;
    } rows[] = {
        {1, 4096, {1, 2, 1, 8, 2, 32}, NULL},
        {2, 4096, {2, 1, 2, 16, 2, 32}, NULL},
        {3, 4096, {1, 2, 1, 8, 2, 32}, "recurrent states are not quantised"},
        {1, 4096, {3, 2, 1, 8, 2, 32}, "quantisation of kind 3"},
        {1, 4096, {257, 2, 1, 8, 2, 32}, "quantisation of kind 257"},
        {1, 4096, {0, 2, 1, 8, 2, 32}, "quantisation of kind 0"},
        {1, 4096, {1, 0, 1, 8, 2, 32}, "elements 0"},
        {1, 4096, {1, 258, 1, 8, 2, 32}, "elements 258"},
        {1, 4096, {1, 2, 3, 8, 2, 32}, "order 3"},
        {1, 4096, {1, 2, 1, 8, 0, 32}, "8 tokens x 0 heads x 32"},
        {1, 4096, {1, 2, 1, 8, 65536, 65536}, "more than 2^29 elements"},
        {1, 4096, {1, 2, 1, 8, 2, 65537}, "out of range"},
        {1, 4096, {1, 2, 1, 5, 2, 32}, "planes of 5 tokens do not divide blocks of 16"},
        {1, 4096, {1, 2, 1, 32, 1, 32}, "planes of 32 tokens do not divide blocks of 16"},
        {1, 4098, {1, 2, 1, 8, 2, 32}, "4098 bytes a block are not whole planes"},
        {1,
         3072,
         {1, 2, 1, 8, 2, 32},
         "one of 8 tokens x 2 heads x 32 has 1024 bytes, and a block "
         "has 2 of them"},
        {1, 64, {1, 2, 1, 1, 2, 1}, "quantised it would be 160 bytes a block, as it is 64"},
    };

    for (uint32_t i = 0; i < KVT_COUNT_OF(rows); i++) {
        (void)open_model(call, rows[i].component_kind, rows[i].bytes, &rows[i].quant);
        if (rows[i].says == NULL) {
            CHECK_CODE(&call->op, KVT_CODE_OK);
            continue;
        }
        if (call->op.code != KVT_CODE_INVALID_ARGUMENT ||
            strstr(call->op.message, rows[i].says) == NULL) {
            fprintf(stderr, "row %u: code %d: %s\n", i, (int)call->op.code, call->op.message);
            exit(1);
        }
    }
}

static void test_namespaces_differ(struct call *call)
{
    static const struct kvt_api_quant quants[] = {
        {0},
        {1, 2, 1, 8, 2, 32},
        {2, 2, 1, 8, 2, 32},
        {1, 1, 1, 8, 2, 32},
        {1, 2, 2, 8, 2, 32},
        {1, 2, 1, 16, 2, 32},
        {1, 2, 1, 8, 1, 64},
        {1, 2, 1, 8, 4, 16},
    };
    uint8_t fingerprints[KVT_COUNT_OF(quants)][KVT_FINGERPRINT_BYTES];

    for (uint32_t i = 0; i < KVT_COUNT_OF(quants); i++) {
        struct kvt_ans_open_namespace ans = open_model(call, 1, 8192, &quants[i]);

        CHECK_CODE(&call->op, KVT_CODE_OK);
        CHECK(!ans.was_known && ans.components_count == 1);
        CHECK((ans.stored_bytes[0] == 8192) == (quants[i].kind == 0) && ans.stored_bytes[0] > 0);
        memcpy(fingerprints[i], ans.fingerprint, KVT_FINGERPRINT_BYTES);
        for (uint32_t other = 0; other < i; other++)
            CHECK(memcmp(fingerprints[i], fingerprints[other], KVT_FINGERPRINT_BYTES) != 0);
        ans = open_model(call, 1, 8192, &quants[i]);
        CHECK(ans.was_known);
        CHECK(memcmp(fingerprints[i], ans.fingerprint, KVT_FINGERPRINT_BYTES) == 0);
    }
}

/* ---- layouts ----------------------------------------------------------------------------------
 */

/* A session with an inline region, in which pieces mean nothing but their sizes. */
static void attach_inline(struct rig *f, const struct kvt_api_piece *pieces, uint32_t count,
                          uint32_t engine_blocks)
{
    struct kvt_req_attach *req = &f->call.op.req.attach;
    struct kvt_api_layout *layouts;

    call_begin(&f->call, KVT_OP_ATTACH);
    layouts = kvt_arena_array(&f->call.arena, 2, sizeof(*layouts));
    CHECK(layouts != NULL);
    layouts[0] = (struct kvt_api_layout){
        .engine_blocks_per_block = engine_blocks, .pieces_count = count, .pieces = pieces};
    req->ns = f->world.ns;
    req->engine_id[0] = 9;
    req->is_scheduler = true;
    req->api_version = 1;
    req->sink = (struct kvt_session_sink *)&f->world;
    req->regions_count = 1;
    req->regions[0] = (struct kvt_api_region){.kind = KVT_REGION_INLINE, .bytes = 1 << 20};
    req->layouts = layouts;
    req->layouts_count = 1;
    call_run(&f->call);
}

static void test_refused_layouts(struct rig *f)
{
    static const struct kvt_api_piece split[] = {{.bytes = 1536, .stride_bytes = 1536},
                                                 {.bytes = 512, .stride_bytes = 512}};
    static const struct kvt_api_piece odd[] = {{.bytes = 2048, .stride_bytes = 2049}};

    attach_inline(f, split, 2, 2);
    CHECK_CODE(&f->call.op, KVT_CODE_INVALID_ARGUMENT);
    CHECK(strstr(f->call.op.message,
                 "piece 0 of 1536 bytes is not whole planes of 1024 (8 tokens x "
                 "2 heads x 32)") != NULL);
    attach_inline(f, odd, 1, 2);
    CHECK_CODE(&f->call.op, KVT_CODE_INVALID_ARGUMENT);
    CHECK(strstr(f->call.op.message, "piece 0 has offset 0 and stride 2049") != NULL);
}

/* ---- payloads ---------------------------------------------------------------------------------
 */

static void test_stats(struct rig *f)
{
    const struct kvt_api_ns_stats *ns = f->call.op.ans.stats.namespaces;
    uint64_t stored = 0;

    call_begin(&f->call, KVT_OP_STATS);
    call_run(&f->call);
    CHECK_CODE(&f->call.op, KVT_CODE_OK);
    ns = f->call.op.ans.stats.namespaces;
    for (uint32_t i = 0; i < f->call.op.ans.stats.namespaces_count; i++, ns++) {
        if (ns->components_count != 2)
            continue;
        stored = ns->stored_bytes[0];
        CHECK(ns->components[0].bytes_per_block == 4096 && ns->components[0].quant.kind == 1);
        CHECK(ns->stored_bytes[1] == ns->components[1].bytes_per_block);
    }
    CHECK(stored == 2048 + 4 * 2 * sizeof(float)); /* codes and scales of 4 planes of 2 heads */
}

/* The world's memory raw, piece by piece, as an inline payload has it. */
static void raw_payload(struct rig *f, uint8_t *ret_raw)
{
    for (uint32_t p = 0; p < WORLD_PIECES; p++)
        memcpy(ret_raw + p * 2048,
               f->client.memory + f->client.component_offset[0] +
                   (uint64_t)p * 2048 * WORLD_POOL_BLOCKS,
               2048);
}

static const uint64_t first_block = 0;

/* In through memory, out by a message: the same bytes. */
static void test_inline_out(struct rig *f, const struct client *session)
{
    struct kvt_handle lease = world_lookup(&f->call, &f->client, 0x101, 1, true);
    struct kvt_req_promote *req = &f->call.op.req.promote;
    uint8_t raw[4096];

    world_promote(&f->call, &f->client, lease, 0, 1, 0);
    call_run(&f->call);
    CHECK_CODE(&f->call.op, KVT_CODE_OK);
    CHECK(client_holds(&f->client, 0, 0x101, 0, 0, 0));
    raw_payload(f, raw);
    call_begin(&f->call, KVT_OP_PROMOTE);
    req->session = session->session;
    req->prefix = world_prefix(&f->call, 0x101, 1);
    req->moves_count = 1;
    req->moves[0] = (struct kvt_api_moves){.count = 1, .block_idx = &first_block};
    req->wants_inline = true;
    call_run(&f->call);
    CHECK_CODE(&f->call.op, KVT_CODE_OK);
    CHECK(f->call.op.ans.promote.moves.results[0][0] == KVT_MOVE_DONE);
    CHECK(f->call.op.ans.promote.inline_bytes == sizeof(raw));
    CHECK(memcmp(f->call.op.ans.promote.inline_data, raw, sizeof(raw)) == 0);
}

/* In by a message, out through memory; data whose elements are not aligned are refused. */
static void test_inline_in(struct rig *f, const struct client *session)
{
    struct kvt_handle ticket = world_reserve(&f->call, session, 0x70000, 1);
    uint8_t raw[4097] __attribute__((aligned(8)));

    client_fill(&f->client, 0, 0x70000, 0, 0);
    for (uint32_t is_good = 0; is_good < 2; is_good++) {
        struct kvt_req_demote *req = &f->call.op.req.demote;

        raw_payload(f, raw + !is_good);
        call_begin(&f->call, KVT_OP_DEMOTE);
        req->session = session->session;
        req->ticket = ticket;
        req->moves_count = 1;
        req->moves[0] = (struct kvt_api_moves){.count = 1, .block_idx = &first_block};
        req->inline_data = raw + !is_good;
        req->inline_bytes = 4096;
        call_run(&f->call);
        CHECK_CODE(&f->call.op, is_good ? KVT_CODE_OK : KVT_CODE_INVALID_ARGUMENT);
        CHECK(is_good || strstr(f->call.op.message, "odd byte of the inline data") != NULL);
    }
    CHECK(f->call.op.ans.demote.moves.results[0][0] == KVT_MOVE_DONE);
    call_begin(&f->call, KVT_OP_PROMOTE);
    f->call.op.req.promote.session = f->client.session;
    f->call.op.req.promote.prefix = world_prefix(&f->call, 0x70000, 1);
    f->call.op.req.promote.moves_count = 1;
    f->call.op.req.promote.moves[0] = world_moves(&f->call, 0, 0, 1, 5);
    call_run(&f->call);
    CHECK_CODE(&f->call.op, KVT_CODE_OK);
    CHECK(client_holds(&f->client, 0, 0x70000, 0, 5, 0));
}

static void test_inline(struct rig *f)
{
    static const struct kvt_api_piece pieces[] = {{.bytes = 1024, .stride_bytes = 1024},
                                                  {.bytes = 1024, .stride_bytes = 1024}};
    struct client session = {.world = &f->world};

    attach_inline(f, pieces, 2, 2);
    CHECK_CODE(&f->call.op, KVT_CODE_OK);
    session.session = f->call.op.ans.attach.session;
    test_inline_out(f, &session);
    test_inline_in(f, &session);
    client_detach(&session, &f->call);
}

/* Engine blocks and groups of layers that are not written. */
static void test_in_part(struct rig *f)
{
    struct kvt_handle lease = world_lookup(&f->call, &f->client, 0x101, BLOCKS, true);

    for (uint32_t i = 0; i < BLOCKS; i++)
        client_scribble(&f->client, 0, 16 + i, 0xee);
    world_promote(&f->call, &f->client, lease, 0, BLOCKS, 16);
    f->call.op.req.promote.layer_groups = WORLD_PIECES;
    for (uint32_t i = 0; i < BLOCKS; i++)
        world_leave_alone(&f->call.op.req.promote.moves[0], i, i % 4);
    call_run(&f->call);
    CHECK_CODE(&f->call.op, KVT_CODE_OK);
    CHECK(f->call.progress == WORLD_PIECES);
    for (uint32_t i = 0; i < BLOCKS; i++)
        CHECK(client_holds_but(&f->client, 0, 0x101, i, 16 + i, i % 4, 0xee, true));
}

static void test_payloads(const struct kvt_api_quant *quant, uint64_t l1_bytes)
{
    struct world_config config = persist_plain;
    struct rig f;

    config.quant = *quant;
    config.l1_bytes = l1_bytes;
    rig_begin(&f, &config);
    (void)persist_store(&f, 0x101, BLOCKS, true);
    CHECK(persist_fetch(&f, 0x101, BLOCKS) == BLOCKS);
    test_in_part(&f);
    if (quant->kind == 1) {
        test_stats(&f);
        test_refused_layouts(&f);
        test_inline(&f);
    }
    persist_restart(&f, true);
    CHECK(persist_fetch(&f, 0x101, BLOCKS) == BLOCKS);
    CHECK(rig_stats(&f).index.loaded_copies > 0 && rig_stats(&f).index.load_dropped == 0);
    test_in_part(&f);
    persist_restart(&f, false);
    CHECK(persist_fetch(&f, 0x101, BLOCKS) == BLOCKS);
    rig_end(&f);
}

/* An engine whose memory is a GPU's: the device tier converts what the others never see raw. */
static void test_gpu(const struct kvt_api_quant *quant)
{
    const struct world_config config = {.seed = 3,
                                        .l1_bytes = 1u << 20,
                                        .l2_bytes = 1u << 20,
                                        .l3_bytes = 2u << 20,
                                        .delay_ns_max = KVT_NS_PER_MS,
                                        .ranks = 1,
                                        .gpus = 2,
                                        .quant = *quant};
    struct kvt_handle lease;
    struct rig rig;

    rig_begin_gpu(&rig, &config, 1);
    rig_store(&rig, 0x101, BLOCKS);
    lease = world_lookup(&rig.call, &rig.client, 0x101, BLOCKS, true);
    world_promote(&rig.call, &rig.client, lease, 0, BLOCKS, 16);
    call_run(&rig.call);
    CHECK_CODE(&rig.call.op, KVT_CODE_OK);
    for (uint32_t i = 0; i < BLOCKS; i++) {
        CHECK(rig.call.op.ans.promote.moves.results[0][i] == KVT_MOVE_DONE);
        CHECK(client_holds(&rig.client, 0, 0x101, i, 16 + i, 0));
    }
    rig_end(&rig);
}

int main(void)
{
    static const struct world_config plain = {
        .seed = 1, .l2_bytes = 1u << 20, .l3_bytes = 4u << 20, .ranks = 1};
    struct world world;
    struct call call;

    world_init(&world, &plain);
    call_init(&call, &world);
    test_refused_specs(&call);
    test_namespaces_differ(&call);
    world_settle(&world);
    call_deinit(&call);
    world_deinit(&world);
    test_payloads(&one_plane, 0);
    test_payloads(&two_planes, 0);
    test_payloads(&one_plane, 256u << 10);
    test_gpu(&one_plane);
    test_gpu(&two_planes);
    return 0;
}
