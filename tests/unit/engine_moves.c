/* Bytes of an engine that would be written twice. Engine blocks that a request names twice: a
 * Promote is refused before anything is touched; all else that repeats means something. Pieces of a
 * layout that share bytes: refused when the session begins. */
#include <string.h>

#include "tests/common/check.h"
#include "tests/common/engine_world.h"

#define TAG 0x101u
#define BLOCKS 8u
#define IDS (BLOCKS * WORLD_ENGINE_BLOCKS)

struct fixture {
    struct world world;
    struct client client;
    struct call call;
};

static void store_prompt(struct fixture *fix)
{
    struct kvt_handle ticket = world_reserve(&fix->call, &fix->client, TAG, BLOCKS);

    for (uint32_t c = 0; c < 2; c++)
        for (uint32_t i = 0; i < BLOCKS; i++)
            client_fill(&fix->client, c, TAG, i, i);
    world_demote(&fix->call, &fix->client, ticket, 0, BLOCKS, 0);
    call_run(&fix->call);
    CHECK_CODE(&fix->call.op, KVT_CODE_OK);
}

/* A Promote of all blocks of both components; the ids of one of them, to be changed. */
static uint64_t *begin(struct fixture *fix, uint32_t component)
{
    world_promote(&fix->call, &fix->client, KVT_HANDLE_NONE, 0, BLOCKS, 0);
    fix->call.op.req.promote.prefix = world_prefix(&fix->call, TAG, BLOCKS);
    CHECK(fix->call.op.req.promote.moves_count == 2);
    CHECK(fix->call.op.req.promote.moves[component].engine_blocks_count == IDS);
    return (uint64_t *)(uintptr_t)fix->call.op.req.promote.moves[component].engine_blocks;
}

static void refuse(struct fixture *fix, uint32_t component, const char *text)
{
    for (uint32_t c = 0; c < 2; c++)
        for (uint32_t i = 0; i < BLOCKS; i++)
            client_scribble(&fix->client, c, i, 0x11);
    call_run(&fix->call);
    CHECK_CODE(&fix->call.op, KVT_CODE_INVALID_ARGUMENT);
    CHECK(strstr(fix->call.op.message, text) != NULL);
    for (uint32_t i = 0; i < BLOCKS; i++)
        CHECK(!client_holds(&fix->client, component, TAG, i, i, 0));
}

static void accept(struct fixture *fix, uint32_t component, const uint32_t pool_blocks[BLOCKS])
{
    call_run(&fix->call);
    CHECK_CODE(&fix->call.op, KVT_CODE_OK);
    for (uint32_t i = 0; i < BLOCKS; i++) {
        CHECK(fix->call.op.ans.promote.moves.results[component][i] == KVT_MOVE_DONE);
        CHECK(client_holds(&fix->client, component, TAG, i, pool_blocks[i], 0));
    }
}

/* Every pair of places, so that every distance and order of the two is seen. */
static void test_twice(struct fixture *fix)
{
    for (uint32_t component = 0; component < 2; component++)
        for (uint32_t a = 0; a < IDS; a++)
            for (uint32_t b = 0; b < IDS; b++) {
                uint64_t *ids = begin(fix, component);

                if (a == b)
                    continue;
                ids[a] = ids[b];
                refuse(fix, component, component == 0 ? "component 0 names" : "component 1 names");
            }
}

/* Not rising, and each once: in any order. */
static void test_shuffled(struct fixture *fix)
{
    for (uint32_t step = 1; step < BLOCKS; step += 2) {
        uint64_t *ids = begin(fix, 0);
        uint32_t pool_blocks[BLOCKS];

        for (uint32_t i = 0; i < BLOCKS; i++) {
            pool_blocks[i] = (BLOCKS - i * step % BLOCKS) % BLOCKS;
            for (uint32_t k = 0; k < WORLD_ENGINE_BLOCKS; k++)
                ids[i * WORLD_ENGINE_BLOCKS + k] =
                    (uint64_t)pool_blocks[i] * WORLD_ENGINE_BLOCKS + k;
        }
        accept(fix, 0, pool_blocks);
    }
}

/* What is left alone is no block, however often; nor is what another component has. */
static void test_left_alone(struct fixture *fix)
{
    uint64_t *ids = begin(fix, 0);

    for (uint32_t i = 0; i < IDS - 1; i++)
        ids[i] = KVT_ENGINE_BLOCK_NONE;
    call_run(&fix->call);
    CHECK_CODE(&fix->call.op, KVT_CODE_OK);
    ids = begin(fix, 0);
    for (uint32_t i = 0; i < IDS - 2; i++)
        ids[i] = KVT_ENGINE_BLOCK_NONE;
    ids[IDS - 2] = ids[IDS - 1];
    call_run(&fix->call);
    CHECK_CODE(&fix->call.op, KVT_CODE_INVALID_ARGUMENT);
}

/* A Demote reads: the same engine blocks may be two blocks' source. */
static void test_demote(struct fixture *fix)
{
    struct kvt_handle ticket = world_reserve(&fix->call, &fix->client, 0x50505, 4);

    world_demote(&fix->call, &fix->client, ticket, 0, 4, 0);
    memset((void *)(uintptr_t)fix->call.op.req.demote.moves[0].engine_blocks, 0,
           4 * WORLD_ENGINE_BLOCKS * sizeof(uint64_t));
    call_run(&fix->call);
    CHECK_CODE(&fix->call.op, KVT_CODE_OK);
    for (uint32_t i = 0; i < 4; i++)
        CHECK(fix->call.op.ans.demote.moves.results[0][i] == KVT_MOVE_DONE);
}

/* Pieces of a layout in the same bytes: the session does not begin, and what it brought is closed.
 */
static void test_shared_bytes(struct fixture *fix)
{
    struct kvt_api_piece *pieces;
    struct client client;

    client_begin_attach_gpu(&client, &fix->world, &fix->call, 2, true, 0, 0);
    pieces = (struct kvt_api_piece *)(uintptr_t)fix->call.op.req.attach.layouts[1].pieces;
    pieces[1].offset_bytes = pieces[0].offset_bytes + pieces[0].bytes - 1;
    call_run(&fix->call);
    CHECK_CODE(&fix->call.op, KVT_CODE_INVALID_ARGUMENT);
    CHECK(strstr(fix->call.op.message, "layout of component 1: two pieces") != NULL);
    CHECK(fix->world.gpu_regions == 0);
    client_unmap(&client);
}

int main(void)
{
    const struct world_config config = {.seed = 15,
                                        .l1_bytes = 256u << 10,
                                        .l2_bytes = 1u << 20,
                                        .gpus = 1,
                                        .delay_ns_max = KVT_NS_PER_MS,
                                        .ranks = 1,
                                        .has_window = true};
    struct fixture fix;

    world_init(&fix.world, &config);
    call_init(&fix.call, &fix.world);
    client_attach(&fix.client, &fix.world, &fix.call, 1, true, 0);
    store_prompt(&fix);
    test_twice(&fix);
    test_shuffled(&fix);
    test_left_alone(&fix);
    test_demote(&fix);
    test_shared_bytes(&fix);
    client_detach(&fix.client, &fix.call);
    world_settle(&fix.world);
    world_check(&fix.world);
    client_unmap(&fix.client);
    call_deinit(&fix.call);
    world_deinit(&fix.world);
    return 0;
}
