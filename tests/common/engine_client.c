/* Engines in miniature for engine_world.h: their memory, and the verbs that tests use. */
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "daemon/base/alloc.h"
#include "daemon/base/hash.h"
#include "tests/common/check.h"
#include "tests/common/engine_world.h"

/* ---- clients ----------------------------------------------------------------------------------
 */

#define PIECE_BYTES(world, component)                                                              \
    ((world)->shard_bytes[component] / WORLD_ENGINE_BLOCKS / WORLD_PIECES)
#define PIECE_WORDS_MAX 256u
#define SHARD_WORDS_MAX 512u

static void map_memory(struct client *client)
{
    struct world *world = client->world;
    uint64_t bytes = 0;

    for (uint32_t i = 0; i < world->components_count; i++) {
        client->component_offset[i] = bytes;
        bytes += (uint64_t)world->shard_bytes[i] * WORLD_POOL_BLOCKS;
    }
    client->memfd = memfd_create("client", MFD_ALLOW_SEALING | MFD_CLOEXEC);
    CHECK(client->memfd >= 0 && ftruncate(client->memfd, (off_t)bytes) == 0);
    CHECK(fallocate(client->memfd, 0, 0, (off_t)bytes) == 0);
    CHECK(fcntl(client->memfd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) == 0);
    client->memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, client->memfd, 0);
    CHECK(client->memory != MAP_FAILED);
}

static uint64_t memory_bytes(const struct client *client)
{
    const struct world *world = client->world;

    return ((uint64_t)world->shard_bytes[0] +
            (world->components_count > 1 ? world->shard_bytes[1] : 0)) *
           WORLD_POOL_BLOCKS;
}

static void add_layouts(struct client *client, struct call *call, uint32_t gpu)
{
    struct world *world = client->world;
    struct kvt_req_attach *req = &call->op.req.attach;
    struct kvt_api_layout *layouts =
        kvt_arena_array(&call->arena, world->components_count, sizeof(layouts[0]));
    const char *why = NULL;

    req->regions_count = 1;
    req->regions[0].bytes = memory_bytes(client);
    if (gpu == KVT_GPU_NONE) {
        CHECK(world->service.region_open(world->service.ctx, client->memfd, req->regions[0].bytes,
                                         &req->regions[0].mapping, &why) == 0);
    } else {
        req->regions[0].kind = KVT_REGION_CUDA_IPC;
        memcpy(req->regions[0].cuda_ipc.handle, &client->memfd, sizeof(client->memfd));
        req->regions[0].cuda_ipc.device_uuid[0] = (uint8_t)gpu;
    }
    req->layouts = layouts;
    req->layouts_count = world->components_count;
    for (uint32_t i = 0; i < world->components_count; i++) {
        struct kvt_api_piece *pieces =
            kvt_arena_array(&call->arena, WORLD_PIECES, sizeof(pieces[0]));
        uint32_t bytes = PIECE_BYTES(world, i);

        for (uint32_t p = 0; p < WORLD_PIECES; p++)
            pieces[p] = (struct kvt_api_piece){
                .bytes = bytes,
                .stride_bytes = bytes,
                .offset_bytes = client->component_offset[i] +
                                (uint64_t)p * bytes * WORLD_ENGINE_BLOCKS * WORLD_POOL_BLOCKS};
        layouts[i] = (struct kvt_api_layout){.component = i,
                                             .engine_blocks_per_block = WORLD_ENGINE_BLOCKS,
                                             .pieces_count = WORLD_PIECES,
                                             .pieces = pieces};
    }
}

static void begin_attach(struct client *client, struct call *call, uint8_t engine,
                         bool is_scheduler, uint32_t gpu)
{
    struct world *world = client->world;
    struct kvt_req_attach *req = &call->op.req.attach;

    call_begin(call, KVT_OP_ATTACH);
    req->ns = world->ns;
    req->engine_id[0] = engine;
    req->is_scheduler = is_scheduler;
    req->rank = client->rank;
    req->api_version = 1;
    req->sink = (struct kvt_session_sink *)world;
    if (client->rank != KVT_RANK_NONE) {
        if (client->memory == NULL)
            map_memory(client);
        add_layouts(client, call, gpu);
    }
}

void client_begin_attach_gpu(struct client *client, struct world *world, struct call *call,
                             uint8_t engine, bool is_scheduler, uint32_t rank, uint32_t gpu)
{
    *client = (struct client){.world = world, .rank = rank, .memfd = -1};
    begin_attach(client, call, engine, is_scheduler, gpu);
}

void client_attach(struct client *client, struct world *world, struct call *call, uint8_t engine,
                   bool is_scheduler, uint32_t rank)
{
    *client = (struct client){.world = world, .rank = rank, .memfd = -1};
    begin_attach(client, call, engine, is_scheduler, KVT_GPU_NONE);
    call_run(call);
    CHECK_CODE(&call->op, KVT_CODE_OK);
    client->session = call->op.ans.attach.session;
}

void client_detach(struct client *client, struct call *call)
{
    call_begin(call, KVT_OP_DETACH);
    call->op.req.detach.session = client->session;
    call_run(call);
    CHECK_CODE(&call->op, KVT_CODE_OK);
}

void client_unmap(struct client *client)
{
    if (client->memory != NULL)
        CHECK(munmap(client->memory, memory_bytes(client)) == 0);
    if (client->memfd >= 0)
        close(client->memfd);
    client->memory = NULL;
    client->memfd = -1;
}

uint64_t world_block_tag(uint64_t tag, uint64_t block_idx)
{
    return block_idx < 4 ? tag >> 8 : tag;
}

static uint64_t word_of(uint32_t component, uint64_t tag, uint64_t block_idx, uint32_t rank,
                        uint32_t at)
{
    const uint64_t words[5] = {component, world_block_tag(tag, block_idx), block_idx, rank, at};

    return kvt_hash64(words, sizeof(words), 0);
}

static uint64_t *piece_at(const struct client *client, uint32_t component, uint32_t piece,
                          uint32_t engine_block)
{
    uint32_t bytes = PIECE_BYTES(client->world, component);

    return (uint64_t *)(void *)(client->memory + client->component_offset[component] +
                                (uint64_t)piece * bytes * WORLD_ENGINE_BLOCKS * WORLD_POOL_BLOCKS +
                                (uint64_t)engine_block * bytes);
}

void client_fill(struct client *client, uint32_t component, uint64_t tag, uint64_t block_idx,
                 uint32_t pool_block)
{
    uint32_t words = PIECE_BYTES(client->world, component) / 8, at = 0;

    for (uint32_t p = 0; p < WORLD_PIECES; p++) {
        for (uint32_t b = 0; b < WORLD_ENGINE_BLOCKS; b++) {
            uint64_t *to = piece_at(client, component, p, pool_block * WORLD_ENGINE_BLOCKS + b);

            for (uint32_t i = 0; i < words; i++, at++)
                to[i] = word_of(component, tag, block_idx, client->rank, at);
        }
    }
}

/* As the tiers do it: to what is stored, and back if @is_back. */
static void convert(const struct world *world, uint64_t *words, uint32_t bytes, uint64_t *stored,
                    bool is_back)
{
    const struct kvt_api_quant *quant = &world->config.quant;
    struct kvt_quant_batch batch = {.spec = {.kind = (uint8_t)quant->kind,
                                             .elem = (uint8_t)quant->elem,
                                             .order = (uint8_t)quant->order,
                                             .plane_tokens = quant->plane_tokens,
                                             .heads = quant->heads,
                                             .head_dim = quant->head_dim},
                                    .jobs_count = 1};
    uint32_t planes = (uint32_t)(bytes / kvt_quant_plane_bytes(&batch.spec));
    struct kvt_quant_job job = {.raw = (uintptr_t)words,
                                .quantised = (uintptr_t)stored,
                                .planes_count = planes,
                                .end_plane = planes};

    CHECK(kvt_quant_bytes(&batch.spec, bytes) <= 2 * (uint64_t)bytes);
    batch.jobs = (uintptr_t)&job;
    batch.planes_max = planes;
    CHECK(kvt_kernels_host()->quantise(NULL, &batch) == 0);
    CHECK(!is_back || kvt_kernels_host()->dequantise(NULL, &batch) == 0);
}

bool client_holds(const struct client *client, uint32_t component, uint64_t tag, uint64_t block_idx,
                  uint32_t pool_block, uint32_t rank)
{
    struct client other = *client;

    other.rank = rank;
    return client_holds_but(&other, component, tag, block_idx, pool_block, 0, 0, true);
}

bool world_is_payload(const struct world *world, const uint8_t *payload, uint32_t component,
                      uint64_t tag, uint64_t block_idx, uint32_t rank)
{
    uint64_t words[SHARD_WORDS_MAX], stored[2 * SHARD_WORDS_MAX] = {0};
    uint32_t bytes = world->shard_bytes[component];

    CHECK(bytes <= sizeof(words));
    for (uint32_t i = 0; i < bytes / 8; i++)
        words[i] = word_of(component, tag, block_idx, rank, i);
    if (component != 0 || world->config.quant.kind == 0)
        return memcmp(payload, words, bytes) == 0;
    convert(world, words, bytes, stored, false);
    return memcmp(payload, stored, bytes / 2) == 0; /* the codes: all but the scales */
}

static bool is_filled(const uint64_t *at, uint32_t words, uint8_t byte)
{
    for (uint32_t i = 0; i < words; i++) {
        if (at[i] != byte * 0x0101010101010101u)
            return false;
    }
    return true;
}

bool client_holds_but(const struct client *client, uint32_t component, uint64_t tag,
                      uint64_t block_idx, uint32_t pool_block, uint32_t left_alone, uint8_t byte,
                      bool is_done)
{
    uint32_t bytes = PIECE_BYTES(client->world, component), words = bytes / 8, at = 0;
    uint64_t wanted[PIECE_WORDS_MAX], stored[2 * PIECE_WORDS_MAX];

    CHECK(words <= PIECE_WORDS_MAX);
    for (uint32_t p = 0; p < WORLD_PIECES; p++) {
        for (uint32_t b = 0; b < WORLD_ENGINE_BLOCKS; b++, at += words) {
            const uint64_t *from =
                piece_at(client, component, p, pool_block * WORLD_ENGINE_BLOCKS + b);

            if ((left_alone >> b & 1) != 0 && !is_filled(from, words, byte))
                return false;
            if ((left_alone >> b & 1) != 0 || !is_done)
                continue;
            for (uint32_t i = 0; i < words; i++)
                wanted[i] = word_of(component, tag, block_idx, client->rank, at + i);
            if (component == 0 && client->world->config.quant.kind != 0)
                convert(client->world, wanted, bytes, stored, true);
            if (memcmp(from, wanted, bytes) != 0)
                return false;
        }
    }
    return true;
}

void world_leave_alone(struct kvt_api_moves *moves, uint32_t move, uint32_t left_alone)
{
    uint64_t *ids = (uint64_t *)(uintptr_t)moves->engine_blocks + move * WORLD_ENGINE_BLOCKS;

    for (uint32_t b = 0; b < WORLD_ENGINE_BLOCKS; b++) {
        if ((left_alone >> b & 1) != 0)
            ids[b] = KVT_ENGINE_BLOCK_NONE;
    }
}

void client_scribble(struct client *client, uint32_t component, uint32_t pool_block, uint8_t byte)
{
    for (uint32_t p = 0; p < WORLD_PIECES; p++)
        memset(piece_at(client, component, p, pool_block * WORLD_ENGINE_BLOCKS), byte,
               (size_t)PIECE_BYTES(client->world, component) * WORLD_ENGINE_BLOCKS);
}

/* ---- verbs ------------------------------------------------------------------------------------
 */

struct kvt_api_prefix world_prefix(struct call *call, uint64_t tag, uint64_t blocks)
{
    uint32_t *tokens =
        kvt_arena_array(&call->arena, blocks * WORLD_BLOCK_TOKENS + 1, sizeof(tokens[0]));

    CHECK(tokens != NULL);
    for (uint64_t i = 0; i < blocks * WORLD_BLOCK_TOKENS; i++)
        tokens[i] = (uint32_t)(world_block_tag(tag, i / WORLD_BLOCK_TOKENS) * 1000 + i);
    return (struct kvt_api_prefix){.tokens = tokens, .tokens_count = blocks * WORLD_BLOCK_TOKENS};
}

struct kvt_api_moves world_moves(struct call *call, uint32_t component, uint64_t first,
                                 uint32_t count, uint32_t pool_block)
{
    uint64_t *block_idx = kvt_arena_array(&call->arena, count + 1u, sizeof(block_idx[0]));
    uint64_t *ids = kvt_arena_array(&call->arena, count * WORLD_ENGINE_BLOCKS + 1u, sizeof(ids[0]));

    CHECK(block_idx != NULL && ids != NULL);
    for (uint32_t i = 0; i < count; i++) {
        block_idx[i] = first + i;
        for (uint32_t b = 0; b < WORLD_ENGINE_BLOCKS; b++)
            ids[i * WORLD_ENGINE_BLOCKS + b] = (pool_block + i) * WORLD_ENGINE_BLOCKS + b;
    }
    return (struct kvt_api_moves){.component = component,
                                  .count = count,
                                  .block_idx = block_idx,
                                  .engine_blocks_count = count * WORLD_ENGINE_BLOCKS,
                                  .engine_blocks = ids};
}

struct kvt_handle world_lookup(struct call *call, const struct client *client, uint64_t tag,
                               uint64_t blocks, bool wants_lease)
{
    call_begin(call, KVT_OP_LOOKUP);
    call->op.req.lookup.session = client->session;
    call->op.req.lookup.prefix = world_prefix(call, tag, blocks);
    call->op.req.lookup.limit_tokens = UINT64_MAX;
    call->op.req.lookup.wants_lease = wants_lease;
    call->op.req.lookup.wants_why = true;
    call_run(call);
    CHECK_CODE(&call->op, KVT_CODE_OK);
    return call->op.ans.lookup.lease;
}

struct kvt_handle world_reserve(struct call *call, const struct client *client, uint64_t tag,
                                uint64_t blocks)
{
    struct kvt_req_reserve *req = &call->op.req.reserve;

    call_begin(call, KVT_OP_RESERVE);
    req->session = client->session;
    req->prefix = world_prefix(call, tag, blocks);
    req->wants_count = client->world->components_count;
    for (uint32_t i = 0; i < req->wants_count; i++)
        req->wants[i] = (struct kvt_api_range){i, 0, blocks};
    call_run(call);
    CHECK_CODE(&call->op, KVT_CODE_OK);
    return call->op.ans.reserve.ticket;
}

void world_demote(struct call *call, const struct client *client, struct kvt_handle ticket,
                  uint64_t first, uint32_t count, uint32_t pool_block)
{
    struct kvt_req_demote *req = &call->op.req.demote;

    call_begin(call, KVT_OP_DEMOTE);
    req->session = client->session;
    req->ticket = ticket;
    req->moves_count = client->world->components_count;
    for (uint32_t i = 0; i < req->moves_count; i++)
        req->moves[i] = world_moves(call, i, first, count, pool_block);
}

void world_promote(struct call *call, const struct client *client, struct kvt_handle lease,
                   uint64_t first, uint32_t count, uint32_t pool_block)
{
    struct kvt_req_promote *req = &call->op.req.promote;

    call_begin(call, KVT_OP_PROMOTE);
    req->session = client->session;
    req->lease = lease;
    req->moves_count = client->world->components_count;
    for (uint32_t i = 0; i < req->moves_count; i++)
        req->moves[i] = world_moves(call, i, first, count, pool_block);
}
