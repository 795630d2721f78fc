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
 * Half of the sessions have their memory on a GPU: of a daemon that has none, on one that it does
 * not know, or on one that is lost at some time. What cannot be opened is refused with its code,
 * and what was opened is closed.
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

struct run;
struct daemon { /* one without GPUs, and one with some */
    struct world world;
    struct call call;
    uint32_t inputs;
    struct run *run;
};

struct run {
    struct scene_input input;
    struct scene scene;
    struct daemon daemons[2], *at;
    struct kvt_handle ns, session;
    bool is_inline; /* payload in the messages */
};

/* As it comes over the wire: what the codec refuses is not the engine's business. */
static bool pass_codec(struct run *run)
{
    static uint8_t packed[1u << 20];
    struct kvt_op *op = &run->at->call.op;
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
    struct kvt_req_open_namespace *req = &run->at->call.op.req.open_namespace;

    call_begin(&run->at->call, KVT_OP_OPEN_NAMESPACE);
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
    call_run(&run->at->call);
    run->ns = run->at->call.op.ans.open_namespace.ns;
    return run->at->call.op.code == KVT_CODE_OK;
}

/* ---- attaching --------------------------------------------------------------------------------
 */

static void lose(struct run *run, enum scene_loss when)
{
    if (run->scene.has_gpus && run->scene.loss == when)
        fake_tier_lose_zone(run->at->world.tiers[KVT_TIER_DEVICE], run->scene.lost_gpu);
}

/* The device tier's part: the handle is the region's number, counted from 1. */
static uint8_t *gpu_memory(struct world *world, const struct kvt_device_memory *memory)
{
    const struct scene *scene = &KVT_CONTAINER_OF(world, struct daemon, world)->run->scene;
    const struct scene_region *region;

    CHECK(memory->handle[0] >= 1 && memory->handle[0] <= scene->regions_count);
    region = &scene->regions[memory->handle[0] - 1];
    CHECK(region->kind == KVT_REGION_CUDA_IPC && region->gpu == memory->uuid[0]);
    CHECK(region->bytes == memory->bytes);
    world->is_lost_while_opening =
        scene->loss == SCENE_LOSS_WHILE_OPENING && region->gpu == scene->lost_gpu;
    return region->memory;
}

static void put_regions(struct run *run, struct kvt_req_attach *req)
{
    req->regions_count = run->scene.regions_count;
    for (uint32_t i = 0; i < req->regions_count; i++) {
        const struct scene_region *from = &run->scene.regions[i];

        req->regions[i] = (struct kvt_api_region){.kind = from->kind, .bytes = from->bytes};
        if (from->kind != KVT_REGION_CUDA_IPC)
            continue;
        req->regions[i].cuda_ipc.handle[0] = (uint8_t)(i + 1);
        req->regions[i].cuda_ipc.device_uuid[0] = (uint8_t)from->gpu;
        req->regions[i].cuda_ipc.device_uuid[1] = 1; /* zeros are no UUID */
        req->regions[i].cuda_ipc.offset_bytes = from->offset_bytes;
    }
}

/* The server's part: a mapping for each memfd, which the engine takes over. */
static void map_regions(struct run *run)
{
    struct kvt_req_attach *req = &run->at->call.op.req.attach;

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

static void check_attach(const struct run *run)
{
    const struct kvt_op *op = &run->at->call.op;
    enum kvt_code gpu_code = scene_gpu_code(&run->scene);

    CHECK(op->code == KVT_CODE_OK || op->message[0] != '\0');
    if (gpu_code != KVT_CODE_OK)
        CHECK_CODE(op, gpu_code);
    else if (scene_is_mixed(&run->scene) || scene_has_overlap(&run->scene))
        CHECK(op->code == KVT_CODE_INVALID_ARGUMENT);
    else
        CHECK(op->code == KVT_CODE_OK || run->input.was_wild);
    if (op->code != KVT_CODE_OK)
        CHECK(run->at->world.gpu_regions == 0); /* what was opened was closed */
}

static bool attach(struct run *run)
{
    struct kvt_req_attach *req = &run->at->call.op.req.attach;
    bool is_by_codec = scene_u8(&run->input) % 2 == 0;

    call_begin(&run->at->call, KVT_OP_ATTACH);
    req->ns = run->ns;
    req->engine_id[0] = 1;
    req->is_scheduler = true;
    req->api_version = 1;
    put_regions(run, req);
    req->layouts_count = run->scene.layouts_count;
    req->layouts = run->scene.layouts;
    if (is_by_codec && !pass_codec(run))
        return false;
    req->rank = 0; /* the wire has a role, not both */
    req->is_scheduler = true;
    req->sink = (struct kvt_session_sink *)&run->at->world;
    map_regions(run);
    lose(run, SCENE_LOSS_BEFORE);
    call_run(&run->at->call);
    check_attach(run);
    lose(run, SCENE_LOSS_ATTACHED);
    run->session = run->at->call.op.ans.attach.session;
    return run->at->call.op.code == KVT_CODE_OK;
}

/* Neighbours, most of them, as an engine has them; a Promote leaves some alone, and those that
 * there are none for. */
static void take_ids(struct run *run, uint64_t *ids, uint32_t count, uint64_t bound,
                     bool is_promote)
{
    uint64_t next = scene_below(&run->input, bound);

    for (uint32_t i = 0; i < count; i++) {
        uint8_t how = scene_u8(&run->input);

        ids[i] = is_promote && i >= bound ? KVT_ENGINE_BLOCK_NONE : (next + i) % KVT_MAX(bound, 1u);
        if (how % 64 < (is_promote ? 16 : 1))
            ids[i] = KVT_ENGINE_BLOCK_NONE;
        else if (how >= 0xf4)
            ids[i] = scene_wild(&run->input, bound);
    }
}

/* Inside the regions; a Promote names no block twice, and may leave some alone. */
static bool is_honest_id(const uint64_t *ids, uint32_t idx, uint64_t bound, bool is_promote)
{
    if (ids[idx] == KVT_ENGINE_BLOCK_NONE)
        return is_promote;
    for (uint32_t i = 0; i < idx; i++)
        if (is_promote && ids[i] == ids[idx])
            return false;
    return ids[idx] < bound;
}

/* Moves of a component: some of the blocks, each with ids. @ret_is_honest becomes false when an id
 * leads outside, or their number is wrong. */
static struct kvt_api_moves take_moves(struct run *run, uint32_t component, bool is_promote,
                                       bool *ret_is_honest)
{
    const struct kvt_api_layout *layout = scene_layout(&run->scene, component);
    uint32_t each = layout != NULL ? layout->engine_blocks_per_block : 1, count = 0;
    uint64_t ids_bound = layout != NULL ? scene_ids(&run->scene, layout) : 1;
    uint64_t *blocks = kvt_arena_array(&run->at->call.arena, SCENE_BLOCKS_MAX, sizeof(*blocks));
    uint64_t *ids =
        kvt_arena_array(&run->at->call.arena, (uint64_t)SCENE_BLOCKS_MAX * each, sizeof(*ids));
    uint8_t which = (uint8_t)(scene_u8(&run->input) | 1); /* not none */

    CHECK(blocks != NULL && ids != NULL);
    for (uint32_t i = 0; i < run->scene.blocks; i++)
        if ((which >> i & 1) != 0)
            blocks[count++] = i;
    take_ids(run, ids, count * each, ids_bound, is_promote);
    for (uint32_t i = 0; i < count * each; i++)
        *ret_is_honest &= is_honest_id(ids, i, ids_bound, is_promote);
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
static bool take_all_moves(struct run *run, struct kvt_api_moves *moves, bool is_promote)
{
    bool is_honest = true;

    for (uint32_t c = 0; c < run->scene.components_count; c++)
        moves[c] = take_moves(run, c, is_promote, &is_honest);
    /* Ids of inline payload are not looked at. */
    return run->is_inline ? is_inline_even(run, moves) : is_honest;
}

/* A GPU may be lost while they are under way. */
static void run_moves(struct run *run, enum scene_loss during)
{
    uint32_t turns = scene_u8(&run->input) % 4u;

    call_submit(&run->at->call);
    if (run->scene.loss == during) {
        for (uint32_t i = 0; i < turns; i++)
            (void)world_turn(&run->at->world);
        lose(run, during);
    }
    call_wait(&run->at->call);
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
    uint8_t *data = kvt_arena_alloc(&run->at->call.arena, bytes + 1);

    CHECK(data != NULL);
    for (uint64_t i = 0; i < bytes; i++)
        data[i] = (uint8_t)(i * 11 + 3);
    req->inline_data = data;
    req->inline_bytes = (uint32_t)bytes;
}

static void demote(struct run *run)
{
    struct kvt_req_demote *req = &run->at->call.op.req.demote;
    bool is_honest;

    scene_fill(&run->scene, scene_u8(&run->input));
    for (uint32_t i = 0; i < run->scene.regions_count; i++)
        memcpy(run->scene.regions[i].expected, run->scene.regions[i].memory,
               run->scene.regions[i].bytes);
    run->is_inline = scene_u8(&run->input) >= 0xe8;
    call_begin(&run->at->call, KVT_OP_DEMOTE);
    req->session = run->session;
    req->prefix = world_prefix(&run->at->call, TAG, run->scene.blocks);
    req->moves_count = run->scene.components_count;
    is_honest = take_all_moves(run, req->moves, false);
    if (run->is_inline)
        put_inline(run, req);
    if (scene_u8(&run->input) % 2 == 0 && !pass_codec(run))
        return;
    run_moves(run, SCENE_LOSS_DEMOTING);
    for (uint32_t i = 0; i < run->scene.regions_count; i++) /* it reads, and no more */
        CHECK(memcmp(run->scene.regions[i].expected, run->scene.regions[i].memory,
                     run->scene.regions[i].bytes) == 0);
    if (!is_honest)
        CHECK(run->at->call.op.code == KVT_CODE_INVALID_ARGUMENT ||
              run->at->call.op.code == KVT_CODE_FAILED_PRECONDITION);
    else
        CHECK_CODE(&run->at->call.op, KVT_CODE_OK);
    if (run->at->call.op.code == KVT_CODE_OK)
        note_stored(run, req, &run->at->call.op.ans.demote.moves);
}

/* So that the way back begins at L3. */
static void lower(struct run *run)
{
    struct kvt_req_demote *req = &run->at->call.op.req.demote;

    call_begin(&run->at->call, KVT_OP_DEMOTE);
    req->session = run->session;
    req->prefix = world_prefix(&run->at->call, TAG, run->scene.blocks);
    req->is_between_tiers = true;
    req->from_tiers = KVT_TIER_BIT_L1 | KVT_TIER_BIT_L2;
    req->to_tier = KVT_TIER_BIT_L3;
    call_run(&run->at->call);
    CHECK_CODE(&run->at->call.op, KVT_CODE_OK);
}

/* ---- and back ---------------------------------------------------------------------------------
 */

static void check_inline(struct run *run, const struct kvt_api_moves *moves)
{
    const struct kvt_ans_promote *ans = &run->at->call.op.ans.promote;
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
                         run->at->call.op.ans.promote.moves.results[c][i] == KVT_MOVE_DONE);
    }
}

static void promote(struct run *run)
{
    struct kvt_req_promote *req = &run->at->call.op.req.promote;
    bool is_honest;

    scene_scribble(&run->scene, 0xdd);
    run->is_inline = scene_u8(&run->input) >= 0xe8;
    call_begin(&run->at->call, KVT_OP_PROMOTE);
    req->session = run->session;
    req->prefix = world_prefix(&run->at->call, TAG, run->scene.blocks);
    req->moves_count = run->scene.components_count;
    is_honest = take_all_moves(run, req->moves, true);
    req->wants_inline = run->is_inline;
    req->layer_groups = (uint32_t)scene_below(&run->input, SCENE_PIECES_MAX + 2);
    if (scene_u8(&run->input) % 2 == 0 && !pass_codec(run))
        return;
    run_moves(run, SCENE_LOSS_PROMOTING);
    if (!is_honest)
        CHECK(run->at->call.op.code == KVT_CODE_INVALID_ARGUMENT ||
              run->at->call.op.code == KVT_CODE_FAILED_PRECONDITION);
    else
        CHECK_CODE(&run->at->call.op, KVT_CODE_OK);
    if (run->at->call.op.code == KVT_CODE_OK) {
        CHECK(run->at->call.op.ans.promote.is_quiesced);
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
    lose(run, SCENE_LOSS_DEMOTED);
    scene_check_guards(&run->scene);
    if (what % 4 == 0)
        lower(run);
    promote(run);
    scene_check_guards(&run->scene);
    if (what % 8 == 1)
        promote(run);
    call_begin(&run->at->call, KVT_OP_DETACH);
    run->at->call.op.req.detach.session = run->session;
    call_run(&run->at->call);
    CHECK_CODE(&run->at->call.op, KVT_CODE_OK);
}

/* An empty engine: a fresh one, or one whose sessions and blocks of before are gone. */
static void world_ready(struct run *run)
{
    static const struct world_config without = {
        .seed = 1, .l2_bytes = 2u << 20, .l3_bytes = 4u << 20, .delay_ns_max = 10000, .ranks = 1};
    struct world_config config = without;

    if (run->scene.has_gpus) {
        config.gpus = SCENE_GPUS;
        config.l1_bytes = SCENE_GPUS * (1u << 20);
        config.gpu_memory = gpu_memory;
    }
    run->at = &run->daemons[run->scene.has_gpus];
    if (run->at->inputs % WORLD_INPUTS == 0) {
        if (run->at->inputs > 0) {
            call_deinit(&run->at->call);
            world_deinit(&run->at->world);
        }
        world_init(&run->at->world, &config);
        call_init(&run->at->call, &run->at->world);
        run->at->run = run;
    }
    run->at->inputs++;
}

static void revive(struct run *run)
{
    struct fake_tier *tier = run->at->world.tiers[KVT_TIER_DEVICE];

    for (uint32_t gpu = 0; run->scene.has_gpus && gpu < SCENE_GPUS; gpu++)
        if (fake_tier_is_zone_out(tier, gpu))
            fake_tier_revive_zone(tier, gpu);
}

static void world_clear(struct run *run)
{
    call_begin(&run->at->call, KVT_OP_EVICT);
    run->at->call.op.req.evict.ns = run->ns;
    run->at->call.op.req.evict.is_whole_namespace = true;
    call_run(&run->at->call);
    CHECK_CODE(&run->at->call.op, KVT_CODE_OK);
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
        revive(&run);
        world_clear(&run);
    }
    world_settle(&run.at->world);
    world_check(&run.at->world);
    CHECK(run.at->world.gpu_regions == 0);
    scene_check_guards(&run.scene);
    scene_deinit(&run.scene);
    return 0;
}
