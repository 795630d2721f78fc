/* What an Attach may say of a client's memory, and Moves with engine block ids, through the real
 * codec, the validation of the engine and the copies in both directions, against memory of exactly
 * the declared size. The input describes a whole session: regions, layouts, which ids (most of them
 * inside the regions, some at their end, some anywhere), which way they go.
 *
 * What must hold, whatever is said: no byte outside the regions is read or written (ASan, guards);
 * a Demote writes nothing; a Promote writes exactly the bytes that the definition names, each with
 * its byte of the payload that was stored; what is honest is accepted, what leads outside is
 * refused; nothing is left in the engine afterwards.
 *
 * With libFuzzer (-Dfuzzers=true, clang) this is a fuzzer; else replay_main.c runs it over files.
 */
#include <stdlib.h>
#include <string.h>

#include "daemon/base/alloc.h"
#include "daemon/engine/internal.h"
#include "proto/codec/codec.h"
#include "tests/common/check.h"
#include "tests/common/engine_world.h"
#include "tests/fuzz/attach_scene.h"

#define TAG 0x101u
#define WORLD_INPUTS 60u /* making a world costs more than many sessions in it */

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

struct run {
    struct scene_input input;
    struct scene scene;
    struct world world;
    struct call call;
    uint32_t inputs;
    struct kvt_handle ns, session;
    bool is_inline; /* payload in the messages */
};

/* As it comes over the wire: what the codec refuses is not the engine's business. */
static bool pass_codec(struct run *run)
{
    static uint8_t packed[1u << 20];
    struct kvt_op *op = &run->call.op;
    struct kvt_op back = {.kind = op->kind, .arena = op->arena};
    struct kvt_codec_message message;

    CHECK(kvt_codec_encode_request(op, &message) == 0 && message.bytes <= sizeof(packed));
    kvt_codec_pack(&message, packed);
    if (kvt_codec_decode_request(&back, packed, message.bytes) != 0) {
        CHECK(back.code != KVT_CODE_OK && back.message[0] != '\0');
        return false;
    }
    memcpy(&op->req, &back.req, sizeof(op->req));
    return true;
}

static bool open_namespace(struct run *run)
{
    struct kvt_req_open_namespace *req = &run->call.op.req.open_namespace;

    call_begin(&run->call, KVT_OP_OPEN_NAMESPACE);
    req->block_tokens = WORLD_BLOCK_TOKENS;
    req->ranks = 1;
    req->components_count = run->scene.components_count;
    for (uint32_t c = 0; c < req->components_count; c++)
        req->components[c] =
            (struct kvt_api_component){.kind = c == 0 ? 1 : 2,
                                       .window_tokens = c == 0 ? 0 : 1000,
                                       .bytes_per_block = run->scene.bytes_per_block[c],
                                       .quant = run->scene.quant[c]};
    req->model = (struct kvt_text){"fuzz", 4};
    if (!pass_codec(run))
        return false;
    call_run(&run->call);
    run->ns = run->call.op.ans.open_namespace.ns;
    return run->call.op.code == KVT_CODE_OK;
}

/* The server's part: a mapping for each memfd, which the engine takes over. */
static void map_regions(struct run *run)
{
    struct kvt_req_attach *req = &run->call.op.req.attach;

    for (uint32_t i = 0; i < req->regions_count; i++) {
        struct eng_region *mapping;

        if (req->regions[i].kind != KVT_REGION_MEMFD)
            continue;
        mapping = kvt_alloc_zeroed(1, sizeof(*mapping));
        CHECK(mapping != NULL);
        mapping->region = (struct kvt_region){.base = run->scene.regions[i].memory,
                                              .bytes = run->scene.regions[i].bytes};
        req->regions[i].mapping = mapping;
    }
}

static bool attach(struct run *run)
{
    struct kvt_req_attach *req = &run->call.op.req.attach;
    bool is_by_codec = scene_u8(&run->input) % 2 == 0;

    call_begin(&run->call, KVT_OP_ATTACH);
    req->ns = run->ns;
    req->engine_id[0] = 1;
    req->is_scheduler = true;
    req->api_version = 1;
    req->regions_count = run->scene.regions_count;
    for (uint32_t i = 0; i < req->regions_count; i++)
        req->regions[i] = (struct kvt_api_region){.kind = run->scene.regions[i].kind,
                                                  .bytes = run->scene.regions[i].bytes};
    req->layouts_count = run->scene.layouts_count;
    req->layouts = run->scene.layouts;
    if (is_by_codec && !pass_codec(run))
        return false;
    req->rank = 0; /* the wire has a role, not both */
    req->is_scheduler = true;
    req->sink = (struct kvt_session_sink *)&run->world;
    map_regions(run);
    call_run(&run->call);
    CHECK(run->call.op.code == KVT_CODE_OK || run->call.op.message[0] != '\0');
    CHECK(run->call.op.code == KVT_CODE_OK || run->input.was_wild);
    run->session = run->call.op.ans.attach.session;
    return run->call.op.code == KVT_CODE_OK;
}

/* Moves of a component: some of the blocks, each with ids. @ret_is_honest becomes false when an id
 * leads outside, or their number is wrong. */
static struct kvt_api_moves take_moves(struct run *run, uint32_t component, bool may_leave_alone,
                                       bool *ret_is_honest)
{
    const struct kvt_api_layout *layout = scene_layout(&run->scene, component);
    uint32_t each = layout != NULL ? layout->engine_blocks_per_block : 1, count = 0;
    uint64_t ids_bound = layout != NULL ? scene_ids(&run->scene, layout) : 1;
    uint64_t *blocks = kvt_arena_array(&run->call.arena, SCENE_BLOCKS_MAX, sizeof(*blocks));
    uint64_t *ids =
        kvt_arena_array(&run->call.arena, (uint64_t)SCENE_BLOCKS_MAX * each, sizeof(*ids));
    uint8_t which = (uint8_t)(scene_u8(&run->input) | 1); /* not none */

    CHECK(blocks != NULL && ids != NULL);
    for (uint32_t i = 0; i < run->scene.blocks; i++)
        if ((which >> i & 1) != 0)
            blocks[count++] = i;
    for (uint32_t i = 0; i < count * each; i++) {
        ids[i] = scene_wild(&run->input, ids_bound);
        if (scene_u8(&run->input) % 64 < (may_leave_alone ? 16 : 1))
            ids[i] = KVT_ENGINE_BLOCK_NONE;
        *ret_is_honest &=
            ids[i] < ids_bound || (may_leave_alone && ids[i] == KVT_ENGINE_BLOCK_NONE);
    }
    *ret_is_honest &= layout != NULL;
    return (struct kvt_api_moves){.component = component,
                                  .count = count,
                                  .block_idx = blocks,
                                  .engine_blocks = ids,
                                  .engine_blocks_count = count * each};
}

/* Elements of quantised components have to lie at even places of inline data. */
static bool is_inline_even(const struct run *run, const struct kvt_api_moves *moves)
{
    uint64_t at = 0;

    for (uint32_t c = 0; c < run->scene.components_count; c++) {
        if (run->scene.quant[c].kind != 0 && at % 2 != 0)
            return false;
        at += moves[c].count * run->scene.bytes_per_block[c];
    }
    return true;
}

/* @moves of every component; true when all of them must be accepted. */
static bool take_all_moves(struct run *run, struct kvt_api_moves *moves, bool may_leave_alone)
{
    bool is_honest = true;

    for (uint32_t c = 0; c < run->scene.components_count; c++)
        moves[c] = take_moves(run, c, may_leave_alone, &is_honest);
    /* Ids of inline payload are not looked at. */
    return run->is_inline ? is_inline_even(run, moves) : is_honest;
}

static uint64_t payload_bytes(const struct run *run, const struct kvt_api_moves *moves)
{
    uint64_t bytes = 0;

    for (uint32_t c = 0; c < run->scene.components_count; c++)
        bytes += moves[c].count * run->scene.bytes_per_block[c];
    return bytes;
}

/* ---- there ------------------------------------------------------------------------------------
 */

static void note_stored(struct run *run, const struct kvt_req_demote *req,
                        const struct kvt_api_results *results)
{
    const uint8_t *inline_at = req->inline_data;

    for (uint32_t c = 0; c < run->scene.components_count; c++) {
        const struct kvt_api_layout *layout = scene_layout(&run->scene, c);

        for (uint32_t i = 0; i < req->moves[c].count; i++) {
            if (results->results[c][i] == KVT_MOVE_DONE && run->is_inline)
                scene_store_inline(&run->scene, c, req->moves[c].block_idx[i], inline_at);
            else if (results->results[c][i] == KVT_MOVE_DONE)
                scene_store(&run->scene, layout, req->moves[c].block_idx[i],
                            req->moves[c].engine_blocks +
                                (size_t)i * layout->engine_blocks_per_block);
            if (run->is_inline)
                inline_at += run->scene.bytes_per_block[c];
        }
    }
}

static void put_inline(struct run *run, struct kvt_req_demote *req)
{
    uint64_t bytes = payload_bytes(run, req->moves);
    uint8_t *data = kvt_arena_alloc(&run->call.arena, bytes + 1);

    CHECK(data != NULL);
    for (uint64_t i = 0; i < bytes; i++)
        data[i] = (uint8_t)(i * 11 + 3);
    req->inline_data = data;
    req->inline_bytes = (uint32_t)bytes;
}

static void demote(struct run *run)
{
    struct kvt_req_demote *req = &run->call.op.req.demote;
    bool is_honest;

    scene_fill(&run->scene, scene_u8(&run->input));
    for (uint32_t i = 0; i < run->scene.regions_count; i++)
        memcpy(run->scene.regions[i].expected, run->scene.regions[i].memory,
               run->scene.regions[i].bytes);
    run->is_inline = scene_u8(&run->input) >= 0xe8;
    call_begin(&run->call, KVT_OP_DEMOTE);
    req->session = run->session;
    req->prefix = world_prefix(&run->call, TAG, run->scene.blocks);
    req->moves_count = run->scene.components_count;
    is_honest = take_all_moves(run, req->moves, false);
    if (run->is_inline)
        put_inline(run, req);
    if (scene_u8(&run->input) % 2 == 0 && !pass_codec(run))
        return;
    call_run(&run->call);
    for (uint32_t i = 0; i < run->scene.regions_count; i++) /* it reads, and no more */
        CHECK(memcmp(run->scene.regions[i].expected, run->scene.regions[i].memory,
                     run->scene.regions[i].bytes) == 0);
    if (!is_honest)
        CHECK(run->call.op.code == KVT_CODE_INVALID_ARGUMENT ||
              run->call.op.code == KVT_CODE_FAILED_PRECONDITION);
    else
        CHECK_CODE(&run->call.op, KVT_CODE_OK);
    if (run->call.op.code == KVT_CODE_OK)
        note_stored(run, req, &run->call.op.ans.demote.moves);
}

/* So that the way back begins at L3. */
static void lower(struct run *run)
{
    struct kvt_req_demote *req = &run->call.op.req.demote;

    call_begin(&run->call, KVT_OP_DEMOTE);
    req->session = run->session;
    req->prefix = world_prefix(&run->call, TAG, run->scene.blocks);
    req->is_between_tiers = true;
    req->from_tiers = KVT_TIER_BIT_L1 | KVT_TIER_BIT_L2;
    req->to_tier = KVT_TIER_BIT_L3;
    call_run(&run->call);
    CHECK_CODE(&run->call.op, KVT_CODE_OK);
}

/* ---- and back ---------------------------------------------------------------------------------
 */

static void check_inline(struct run *run, const struct kvt_api_moves *moves)
{
    const struct kvt_ans_promote *ans = &run->call.op.ans.promote;
    uint64_t at = 0;

    for (uint32_t c = 0; c < run->scene.components_count; c++) {
        uint64_t bytes = run->scene.bytes_per_block[c];

        for (uint32_t i = 0; i < moves[c].count; i++) {
            const uint8_t *payload = run->scene.payload[c][moves[c].block_idx[i]];

            if (ans->moves.results[c][i] != KVT_MOVE_DONE)
                continue;
            CHECK(payload != NULL && at + bytes <= ans->inline_bytes);
            CHECK(memcmp(ans->inline_data + at, payload, bytes) == 0);
            at += bytes;
        }
    }
    CHECK(at == ans->inline_bytes);
}

static void expect_moves(struct run *run, const struct kvt_api_moves *moves)
{
    for (uint32_t c = 0; c < run->scene.components_count; c++) {
        const struct kvt_api_layout *layout = scene_layout(&run->scene, c);

        for (uint32_t i = 0; i < moves[c].count; i++)
            scene_expect(&run->scene, layout, moves[c].block_idx[i],
                         moves[c].engine_blocks + (size_t)i * layout->engine_blocks_per_block,
                         run->call.op.ans.promote.moves.results[c][i] == KVT_MOVE_DONE);
    }
}

static void promote(struct run *run)
{
    struct kvt_req_promote *req = &run->call.op.req.promote;
    bool is_honest;

    scene_scribble(&run->scene, 0xdd);
    run->is_inline = scene_u8(&run->input) >= 0xe8;
    call_begin(&run->call, KVT_OP_PROMOTE);
    req->session = run->session;
    req->prefix = world_prefix(&run->call, TAG, run->scene.blocks);
    req->moves_count = run->scene.components_count;
    is_honest = take_all_moves(run, req->moves, true);
    req->wants_inline = run->is_inline;
    req->layer_groups = (uint32_t)scene_below(&run->input, SCENE_PIECES_MAX + 2);
    if (scene_u8(&run->input) % 2 == 0 && !pass_codec(run))
        return;
    call_run(&run->call);
    if (!is_honest)
        CHECK(run->call.op.code == KVT_CODE_INVALID_ARGUMENT ||
              run->call.op.code == KVT_CODE_FAILED_PRECONDITION);
    else
        CHECK_CODE(&run->call.op, KVT_CODE_OK);
    if (run->call.op.code == KVT_CODE_OK) {
        CHECK(run->call.op.ans.promote.is_quiesced);
        if (run->is_inline)
            check_inline(run, req->moves);
        else
            expect_moves(run, req->moves);
    }
    scene_check(&run->scene);
}

static void session(struct run *run)
{
    uint8_t what = scene_u8(&run->input);

    demote(run);
    scene_check_guards(&run->scene);
    if (what % 4 == 0)
        lower(run);
    promote(run);
    scene_check_guards(&run->scene);
    if (what % 8 == 1)
        promote(run);
    call_begin(&run->call, KVT_OP_DETACH);
    run->call.op.req.detach.session = run->session;
    call_run(&run->call);
    CHECK_CODE(&run->call.op, KVT_CODE_OK);
}

/* An empty engine: a fresh one, or one whose sessions and blocks of before are gone. */
static void world_ready(struct run *run)
{
    static const struct world_config config = {
        .seed = 1, .l2_bytes = 2u << 20, .l3_bytes = 4u << 20, .delay_ns_max = 10000, .ranks = 1};

    if (run->inputs % WORLD_INPUTS == 0) {
        if (run->inputs > 0) {
            call_deinit(&run->call);
            world_deinit(&run->world);
        }
        world_init(&run->world, &config);
        call_init(&run->call, &run->world);
    }
    run->inputs++;
}

static void world_clear(struct run *run)
{
    call_begin(&run->call, KVT_OP_EVICT);
    run->call.op.req.evict.ns = run->ns;
    run->call.op.req.evict.is_whole_namespace = true;
    call_run(&run->call);
    CHECK_CODE(&run->call.op, KVT_CODE_OK);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static struct run run; /* large */

    run.input = (struct scene_input){data, size, false};
    scene_init(&run.scene, &run.input);
    world_ready(&run);
    if (open_namespace(&run)) {
        if (attach(&run))
            session(&run);
        world_clear(&run);
    }
    world_settle(&run.world);
    world_check(&run.world);
    scene_check_guards(&run.scene);
    scene_deinit(&run.scene);
    return 0;
}
