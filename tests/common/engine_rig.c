#include "tests/common/engine_rig.h"

#include "tests/common/check.h"

void rig_init(struct rig *rig, const struct world_config *config)
{
    world_init(&rig->world, config);
    call_init(&rig->call, &rig->world);
    call_init(&rig->other, &rig->world);
}

void rig_free(struct rig *rig)
{
    call_deinit(&rig->call);
    call_deinit(&rig->other);
    world_deinit(&rig->world);
}

void rig_deinit(struct rig *rig)
{
    world_settle(&rig->world);
    world_check(&rig->world);
    CHECK(rig->world.gpu_regions == 0);
    rig_free(rig);
}

void rig_attach(struct rig *rig)
{
    client_attach(&rig->client, &rig->world, &rig->call, 1, true, 0);
}

void rig_join_gpu(struct rig *rig, struct client *client, uint8_t engine, bool is_scheduler,
                  uint32_t rank, uint32_t gpu)
{
    client_begin_attach_gpu(client, &rig->world, &rig->call, engine, is_scheduler, rank, gpu);
    call_run(&rig->call);
    CHECK_CODE(&rig->call.op, KVT_CODE_OK);
    client->session = rig->call.op.ans.attach.session;
}

void rig_attach_gpu(struct rig *rig, uint32_t gpu)
{
    rig_join_gpu(rig, &rig->client, 1, true, 0, gpu);
}

void rig_part(struct rig *rig, struct client *client)
{
    client_detach(client, &rig->call);
    client_unmap(client);
}

void rig_leave(struct rig *rig)
{
    rig_part(rig, &rig->client);
}

void rig_begin(struct rig *rig, const struct world_config *config)
{
    rig_init(rig, config);
    rig_attach(rig);
}

void rig_begin_gpu(struct rig *rig, const struct world_config *config, uint32_t gpu)
{
    rig_init(rig, config);
    rig_attach_gpu(rig, gpu);
}

void rig_end(struct rig *rig)
{
    client_detach(&rig->client, &rig->call);
    world_settle(&rig->world);
    client_unmap(&rig->client);
    rig_deinit(rig);
}

void rig_demote(struct rig *rig, const struct client *client, struct kvt_handle ticket,
                uint64_t first, uint32_t count)
{
    world_demote(&rig->call, client, ticket, first, count, 0);
    rig->call.op.deadline_ns = rig->world.now_ns + 60 * KVT_NS_PER_S;
    call_run(&rig->call);
    CHECK_CODE(&rig->call.op, KVT_CODE_OK);
    for (uint32_t c = 0; c < rig->world.components_count; c++)
        for (uint32_t i = 0; i < count; i++)
            CHECK(rig->call.op.ans.demote.moves.results[c][i] == KVT_MOVE_DONE);
}

void rig_store(struct rig *rig, uint64_t tag, uint32_t blocks)
{
    struct kvt_handle ticket = world_reserve(&rig->call, &rig->client, tag, blocks);

    for (uint32_t c = 0; c < rig->world.components_count; c++)
        for (uint32_t i = 0; i < blocks; i++)
            client_fill(&rig->client, c, tag, i, i);
    rig_demote(rig, &rig->client, ticket, 0, blocks);
}

uint32_t rig_load(struct rig *rig, uint64_t tag, uint32_t blocks)
{
    uint32_t count = 0;

    for (uint32_t i = 0; i < blocks; i++)
        client_scribble(&rig->client, 0, i, 0x11);
    world_promote(&rig->call, &rig->client, KVT_HANDLE_NONE, 0, blocks, 0);
    rig->call.op.req.promote.prefix = world_prefix(&rig->call, tag, blocks);
    call_run(&rig->call);
    CHECK_CODE(&rig->call.op, KVT_CODE_OK);
    for (uint32_t i = 0; i < blocks; i++) {
        if (rig->call.op.ans.promote.moves.results[0][i] != KVT_MOVE_DONE)
            continue;
        CHECK(client_holds(&rig->client, 0, tag, i, i, 0));
        count++;
    }
    return count;
}

void rig_lower(struct rig *rig, uint64_t tag, uint32_t blocks, uint32_t from_tiers,
               uint32_t to_tier)
{
    struct kvt_req_demote *req = &rig->call.op.req.demote;

    call_begin(&rig->call, KVT_OP_DEMOTE);
    req->session = rig->client.session;
    req->prefix = world_prefix(&rig->call, tag, blocks);
    req->is_between_tiers = true;
    req->from_tiers = from_tiers;
    req->to_tier = to_tier;
    call_run(&rig->call);
    CHECK_CODE(&rig->call.op, KVT_CODE_OK);
}

void rig_begin_in_place(struct rig *rig, const struct client *client, struct kvt_handle lease,
                        uint32_t blocks)
{
    world_promote(&rig->call, client, lease, 0, blocks, 0);
    rig->call.op.req.promote.target = KVT_TARGET_L1;
    rig->call.op.req.promote.is_in_place = true;
}

void rig_release(struct rig *rig, const struct client *client, struct kvt_handle lease)
{
    call_begin(&rig->call, KVT_OP_RELEASE);
    rig->call.op.req.release.session = client->session;
    rig->call.op.req.release.lease = lease;
    call_run(&rig->call);
    CHECK_CODE(&rig->call.op, KVT_CODE_OK);
}

struct kvt_store_stats rig_stats(struct rig *rig)
{
    struct kvt_store_stats stats;

    kvt_engine_store_stats(rig->world.engine, &stats);
    return stats;
}

uint64_t rig_leases(struct rig *rig)
{
    struct kvt_engine_counts counts;

    kvt_engine_counts(rig->world.engine, &counts);
    return counts.leases;
}

uint64_t rig_l1_slots(struct rig *rig, uint32_t zone)
{
    return rig_stats(rig).l1_zones[zone].slab.taken_slots;
}
