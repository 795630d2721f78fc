#include "tests/common/persist.h"

#include "tests/common/check.h"

const struct world_config persist_plain = {.seed = 1,
                                           .l2_bytes = 1u << 20,
                                           .l3_bytes = 8u << 20,
                                           .delay_ns_max = 100000,
                                           .ranks = 1,
                                           .has_window = true,
                                           .devices = 1,
                                           .commit_delay_ns_max = 1000000};

void persist_restart(struct rig *f, bool is_clean)
{
    rig_leave(f);
    world_settle(&f->world);
    world_restart(&f->world, is_clean);
    rig_attach(f);
}

/* Stores a prompt; answers whether it is durable. */
bool persist_store(struct rig *f, uint64_t tag, uint32_t blocks, bool wants_durable)
{
    struct kvt_handle ticket = world_reserve(&f->call, &f->client, tag, blocks);

    for (uint32_t c = 0; c < 2; c++)
        for (uint32_t i = 0; i < blocks; i++)
            client_fill(&f->client, c, tag, i, i);
    world_demote(&f->call, &f->client, ticket, 0, blocks, 0);
    if (ticket.id == 0) /* all of it is there: then by prefix */
        f->call.op.req.demote.prefix = world_prefix(&f->call, tag, blocks);
    f->call.op.req.demote.wants_durable = wants_durable;
    call_run(&f->call);
    CHECK_CODE(&f->call.op, KVT_CODE_OK);
    return f->call.op.ans.demote.is_durable;
}

/* How many blocks of the prompt can be had, each verified. */
uint32_t persist_fetch(struct rig *f, uint64_t tag, uint32_t blocks)
{
    struct kvt_handle lease = world_lookup(&f->call, &f->client, tag, blocks, true);
    uint32_t hit = (uint32_t)(f->call.op.ans.lookup.boundary_tokens / WORLD_BLOCK_TOKENS), good = 0;

    if (hit == 0)
        return 0;
    for (uint32_t c = 0; c < 2; c++)
        for (uint32_t i = 0; i < hit; i++)
            client_scribble(&f->client, c, 16 + i, 0xee);
    world_promote(&f->call, &f->client, lease, 0, hit, 16);
    call_run(&f->call);
    CHECK_CODE(&f->call.op, KVT_CODE_OK);
    for (uint32_t i = 0; i < hit; i++) {
        bool is_good = true;

        for (uint32_t c = 0; c < 2; c++) {
            bool is_done = f->call.op.ans.promote.moves.results[c][i] == KVT_MOVE_DONE;

            CHECK(!is_done || client_holds(&f->client, c, tag, i, 16 + i, 0));
            is_good &= is_done;
        }
        good += is_good;
    }
    rig_release(f, &f->client, lease);
    return good;
}

void persist_load(struct rig *f)
{
    while (rig_stats(f).index.is_loading)
        world_turn(&f->world);
}

void persist_reset(struct rig *f)
{
    call_begin(&f->call, KVT_OP_RESET);
    f->call.op.is_admin = true;
    f->call.op.req.reset.ns = f->world.ns;
}
