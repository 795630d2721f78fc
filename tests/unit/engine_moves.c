/* Bytes of an engine that would be written twice. Engine blocks that a request names twice: a
 * Promote is refused before anything is touched; all else that repeats means something. Pieces of a
 * layout that share bytes: refused when the session begins. */
#include <string.h>

#include "tests/common/check.h"
#include "tests/common/engine_rig.h"

#define TAG 0x101u
#define BLOCKS 8u
#define IDS (BLOCKS * WORLD_ENGINE_BLOCKS)

/* A Promote of all blocks of both components; the ids of one of them, to be changed. */
static uint64_t *begin(struct rig *rig, uint32_t component)
{
    world_promote(&rig->call, &rig->client, KVT_HANDLE_NONE, 0, BLOCKS, 0);
    rig->call.op.req.promote.prefix = world_prefix(&rig->call, TAG, BLOCKS);
    CHECK(rig->call.op.req.promote.moves_count == 2);
    CHECK(rig->call.op.req.promote.moves[component].engine_blocks_count == IDS);
    return (uint64_t *)(uintptr_t)rig->call.op.req.promote.moves[component].engine_blocks;
}

static void refuse(struct rig *rig, uint32_t component, const char *text)
{
    for (uint32_t c = 0; c < 2; c++)
        for (uint32_t i = 0; i < BLOCKS; i++)
            client_scribble(&rig->client, c, i, 0x11);
    call_run(&rig->call);
    CHECK_CODE(&rig->call.op, KVT_CODE_INVALID_ARGUMENT);
    CHECK(strstr(rig->call.op.message, text) != NULL);
    for (uint32_t i = 0; i < BLOCKS; i++)
        CHECK(!client_holds(&rig->client, component, TAG, i, i, 0));
}

static void accept(struct rig *rig, uint32_t component, const uint32_t pool_blocks[BLOCKS])
{
    call_run(&rig->call);
    CHECK_CODE(&rig->call.op, KVT_CODE_OK);
    for (uint32_t i = 0; i < BLOCKS; i++) {
        CHECK(rig->call.op.ans.promote.moves.results[component][i] == KVT_MOVE_DONE);
        CHECK(client_holds(&rig->client, component, TAG, i, pool_blocks[i], 0));
    }
}

/* Every pair of places, so that every distance and order of the two is seen. */
static void test_twice(struct rig *rig)
{
    for (uint32_t component = 0; component < 2; component++)
        for (uint32_t a = 0; a < IDS; a++)
            for (uint32_t b = 0; b < IDS; b++) {
                uint64_t *ids = begin(rig, component);

                if (a == b)
                    continue;
                ids[a] = ids[b];
                refuse(rig, component, component == 0 ? "component 0 names" : "component 1 names");
            }
}

/* Not rising, and each once: in any order. */
static void test_shuffled(struct rig *rig)
{
    for (uint32_t step = 1; step < BLOCKS; step += 2) {
        uint64_t *ids = begin(rig, 0);
        uint32_t pool_blocks[BLOCKS];

        for (uint32_t i = 0; i < BLOCKS; i++) {
            pool_blocks[i] = (BLOCKS - i * step % BLOCKS) % BLOCKS;
            for (uint32_t k = 0; k < WORLD_ENGINE_BLOCKS; k++)
                ids[i * WORLD_ENGINE_BLOCKS + k] =
                    (uint64_t)pool_blocks[i] * WORLD_ENGINE_BLOCKS + k;
        }
        accept(rig, 0, pool_blocks);
    }
}

/* Falling in both components, which name the same: each for itself is right, and what one of them
 * names twice is told of it, also as the second list that is sorted. */
static void test_components(struct rig *rig)
{
    uint64_t *ids[2] = {begin(rig, 0), NULL};
    uint32_t pool_blocks[BLOCKS];

    ids[1] = (uint64_t *)(uintptr_t)rig->call.op.req.promote.moves[1].engine_blocks;
    for (uint32_t i = 0; i < BLOCKS; i++) {
        pool_blocks[i] = BLOCKS - 1 - i;
        for (uint32_t k = 0; k < WORLD_ENGINE_BLOCKS; k++)
            ids[0][i * WORLD_ENGINE_BLOCKS + k] = ids[1][i * WORLD_ENGINE_BLOCKS + k] =
                (uint64_t)pool_blocks[i] * WORLD_ENGINE_BLOCKS + k;
    }
    accept(rig, 0, pool_blocks);
    for (uint32_t i = 0; i < BLOCKS; i++)
        CHECK(client_holds(&rig->client, 1, TAG, i, pool_blocks[i], 0));
    for (uint32_t twice = 0; twice < 2; twice++) {
        (void)begin(rig, 0);
        for (uint32_t component = 0; component < 2; component++) {
            uint64_t *to =
                (uint64_t *)(uintptr_t)rig->call.op.req.promote.moves[component].engine_blocks;

            for (uint32_t i = 0; i < IDS; i++)
                to[i] = IDS - 1 - i;
            if (component == twice)
                to[0] = to[IDS - 1];
        }
        refuse(rig, twice, twice == 0 ? "component 0 names" : "component 1 names");
    }
}

/* What is left alone is no block, however often; nor is what another component has. */
static void test_left_alone(struct rig *rig)
{
    uint64_t *ids = begin(rig, 0);

    for (uint32_t i = 0; i < IDS - 1; i++)
        ids[i] = KVT_ENGINE_BLOCK_NONE;
    call_run(&rig->call);
    CHECK_CODE(&rig->call.op, KVT_CODE_OK);
    ids = begin(rig, 0);
    for (uint32_t i = 0; i < IDS - 2; i++)
        ids[i] = KVT_ENGINE_BLOCK_NONE;
    ids[IDS - 2] = ids[IDS - 1];
    call_run(&rig->call);
    CHECK_CODE(&rig->call.op, KVT_CODE_INVALID_ARGUMENT);
}

/* A Demote reads: the same engine blocks may be two blocks' source. */
static void test_demote(struct rig *rig)
{
    struct kvt_handle ticket = world_reserve(&rig->call, &rig->client, 0x50505, 4);

    world_demote(&rig->call, &rig->client, ticket, 0, 4, 0);
    memset((void *)(uintptr_t)rig->call.op.req.demote.moves[0].engine_blocks, 0,
           4 * WORLD_ENGINE_BLOCKS * sizeof(uint64_t));
    call_run(&rig->call);
    CHECK_CODE(&rig->call.op, KVT_CODE_OK);
    for (uint32_t i = 0; i < 4; i++)
        CHECK(rig->call.op.ans.demote.moves.results[0][i] == KVT_MOVE_DONE);
}

/* Pieces of a layout in the same bytes: the session does not begin, and what it brought is closed.
 */
static void test_shared_bytes(struct rig *rig)
{
    struct kvt_api_piece *pieces;
    struct client client;

    client_begin_attach_gpu(&client, &rig->world, &rig->call, 2, true, 0, 0);
    pieces = (struct kvt_api_piece *)(uintptr_t)rig->call.op.req.attach.layouts[1].pieces;
    pieces[1].offset_bytes = pieces[0].offset_bytes + pieces[0].bytes - 1;
    call_run(&rig->call);
    CHECK_CODE(&rig->call.op, KVT_CODE_INVALID_ARGUMENT);
    CHECK(strstr(rig->call.op.message, "layout of component 1: two pieces") != NULL);
    CHECK(rig->world.gpu_regions == 0);
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
    struct rig rig;

    rig_begin(&rig, &config);
    rig_store(&rig, TAG, BLOCKS);
    test_twice(&rig);
    test_shuffled(&rig);
    test_components(&rig);
    test_left_alone(&rig);
    test_demote(&rig);
    test_shared_bytes(&rig);
    rig_end(&rig);
    return 0;
}
