/* What an engine reads in place, seen from outside: Stats, and what hostile orders of requests do
 * to the books. */
#include <string.h>

#include "tests/common/check.h"
#include "tests/common/engine_world.h"

#define TAG 0x101u
#define BLOCK_BYTES 4096u

static const struct world_config exporting = {.seed = 13,
                                              .l1_bytes = 512u << 10,
                                              .l2_bytes = 1u << 20,
                                              .delay_ns_max = KVT_NS_PER_MS,
                                              .ranks = 1,
                                              .gpus = 2,
                                              .held_bytes_max = 100u << 10,
                                              .is_export_allowed = true};

struct fixture {
    struct world world;
    struct client client, other; /* two engines, rank 0 of each on a GPU of its own */
    struct call call;
};

static void attach(struct fixture *fix, struct client *client, uint8_t engine, uint32_t gpu)
{
    client_begin_attach_gpu(client, &fix->world, &fix->call, engine, true, 0, gpu);
    call_run(&fix->call);
    CHECK_CODE(&fix->call.op, KVT_CODE_OK);
    client->session = fix->call.op.ans.attach.session;
}

static void setup(struct fixture *fix, const struct world_config *config)
{
    world_init(&fix->world, config);
    call_init(&fix->call, &fix->world);
    attach(fix, &fix->client, 1, 0);
    attach(fix, &fix->other, 2, 1);
}

static void detach(struct fixture *fix, struct client *client)
{
    client_detach(client, &fix->call);
    client_unmap(client);
}

static void teardown(struct fixture *fix)
{
    detach(fix, &fix->client);
    detach(fix, &fix->other);
    world_settle(&fix->world);
    world_check(&fix->world);
    call_deinit(&fix->call);
    world_deinit(&fix->world);
}

static void store_prompt(struct fixture *fix, uint32_t blocks)
{
    struct kvt_handle ticket = world_reserve(&fix->call, &fix->client, TAG, blocks);

    for (uint32_t i = 0; i < blocks; i++)
        client_fill(&fix->client, 0, TAG, i, i);
    world_demote(&fix->call, &fix->client, ticket, 0, blocks, 0);
    call_run(&fix->call);
    CHECK_CODE(&fix->call.op, KVT_CODE_OK);
}

static struct kvt_handle hold(struct fixture *fix, const struct client *client, uint32_t blocks)
{
    struct kvt_handle lease = world_lookup(&fix->call, client, TAG, blocks, true);

    world_promote(&fix->call, client, lease, 0, blocks, 0);
    fix->call.op.req.promote.target = KVT_TARGET_L1;
    fix->call.op.req.promote.is_in_place = true;
    call_run(&fix->call);
    CHECK_CODE(&fix->call.op, KVT_CODE_OK);
    for (uint32_t i = 0; i < blocks; i++)
        CHECK(fix->call.op.ans.promote.moves.results[0][i] == KVT_MOVE_DONE);
    return lease;
}

static void release(struct fixture *fix, const struct client *client, struct kvt_handle lease)
{
    call_begin(&fix->call, KVT_OP_RELEASE);
    fix->call.op.req.release.session = client->session;
    fix->call.op.req.release.lease = lease;
    call_run(&fix->call);
    CHECK_CODE(&fix->call.op, KVT_CODE_OK);
}

/* What Stats says that engine number @engine holds; the limit that it tells is checked by the way.
 */
static uint64_t held_bytes(struct fixture *fix, uint8_t engine)
{
    const struct kvt_ans_stats *stats = &fix->call.op.ans.stats;

    call_begin(&fix->call, KVT_OP_STATS);
    call_run(&fix->call);
    CHECK_CODE(&fix->call.op, KVT_CODE_OK);
    CHECK(stats->l1.held_bytes_per_engine_max ==
          (fix->world.config.is_export_allowed ? fix->world.config.held_bytes_max : 0));
    for (uint32_t i = 0; i < stats->engines_count; i++)
        if (stats->engines[i].engine_id[0] == engine)
            return stats->engines[i].held_bytes;
    CHECK(false && "no such engine");
    return 0;
}

/* An engine's own: once a lease, until that ends; what another holds of the same blocks is not
 * its. */
static void test_stats(void)
{
    struct kvt_handle first, second;
    struct fixture fix;

    setup(&fix, &exporting);
    store_prompt(&fix, 6);
    CHECK(held_bytes(&fix, 1) == 0 && held_bytes(&fix, 2) == 0);
    first = hold(&fix, &fix.client, 6);
    CHECK(held_bytes(&fix, 1) == 6 * BLOCK_BYTES);
    second = hold(&fix, &fix.client, 2);
    CHECK(held_bytes(&fix, 1) == 8 * BLOCK_BYTES);
    (void)hold(&fix, &fix.other, 3);
    CHECK(held_bytes(&fix, 1) == 8 * BLOCK_BYTES && held_bytes(&fix, 2) == 3 * BLOCK_BYTES);
    release(&fix, &fix.client, first);
    CHECK(held_bytes(&fix, 1) == 2 * BLOCK_BYTES);
    release(&fix, &fix.client, second);
    CHECK(held_bytes(&fix, 1) == 0 && held_bytes(&fix, 2) == 3 * BLOCK_BYTES);
    teardown(&fix);
}

static void test_not_exported(void)
{
    struct world_config config = exporting;
    struct fixture fix;

    config.is_export_allowed = false;
    setup(&fix, &config);
    CHECK(held_bytes(&fix, 1) == 0);
    teardown(&fix);
}

int main(void)
{
    test_stats();
    test_not_exported();
    return 0;
}
