/* The whole engine in virtual time: engines of two ranks each look up, promote, reserve, demote,
 * cancel, let deadlines pass, use stale and foreign handles, and die midway, over tiers that are
 * slow and fail. Now and then the daemon is stopped or crashes, and another one begins on what two
 * devices of L3 and their indexes have; a crash loses or tears what was written and not yet
 * synchronised. Devices go out of service and come back, indexes stand still or are lost. GPUs of
 * L1 are lost with all they have, and come back, at once or later. Every promoted block is
 * verified; what was durable is demanded after each restart; invariants are checked; in the end
 * nobody holds anything. What is read in L1 itself is there as long as it is held. The same seed
 * gives the same trace.
 *
 * usage: engine_sim [--seed N] [--seeds N] [--steps N] */
#include <stdlib.h>
#include <string.h>

#include "tests/common/check.h"
#include "tests/common/engine_copies.h"

#define ENGINES 3u
#define RANKS 2u
#define AGENTS (ENGINES * RANKS)
#define HELD 6u /* handles that an engine remembers */
#define TAGS 24u
#define BLOCKS_MAX 12u
#define READERS 8u   /* in place, of all engines */
#define RELEASED 64u /* leases that were asked to end lately */

struct held {
    struct kvt_handle handle;
    uint64_t tag, blocks;
};

struct reader { /* of blocks in L1, in place; lease NONE: nobody */
    struct kvt_handle lease;
    uint32_t engine, rank, count;
    uint64_t tag, first, losses; /* of GPUs, when it asked */
    struct {
        bool is_held;
        uint32_t zone;
        uint64_t offset_bytes;
    } at[2][BLOCKS_MAX];
};

struct agent {
    struct client client;
    struct call call;
    bool is_attached, must_quiesce;
    uint32_t gpu, incarnation; /* of its memory; KVT_GPU_NONE: the host's */
    uint32_t engine, rank;
    uint64_t op_id, tag, first, losses;
    uint32_t count;
    uint8_t left_alone[2][BLOCKS_MAX]; /* of a Promote: a bit an engine block, see api.h */
};

struct sim {
    struct world world;
    struct agent agents[AGENTS];
    struct held leases[ENGINES][HELD], tickets[ENGINES][HELD];
    struct reader readers[READERS];
    struct kvt_handle released[RELEASED];
    uint32_t released_at;
    uint64_t random;
    uint64_t verified, wrong, late, ops, restarts, durable, epoch, losses, gpu_sessions,
        read_in_place;
    struct world_copies copies; /* durable when the last engine ended */
};

static struct sim sim_now; /* one at a time */

static uint64_t below(struct sim *sim, uint64_t n)
{
    return fake_random(&sim->random) % n;
}

static uint64_t random_tag(struct sim *sim)
{
    return (1 + below(sim, 4)) << 8 | below(sim, TAGS / 4);
}

/* ---- readers in place ------------------------------------------------------------------------ */

static bool is_same(struct kvt_handle a, struct kvt_handle b)
{
    return a.id == b.id && a.secret == b.secret;
}

static bool is_reading(const struct reader *reader)
{
    return !is_same(reader->lease, KVT_HANDLE_NONE);
}

/* They stop before their lease is given back. */
static void stop_readers(struct sim *sim, uint32_t engine, const struct kvt_handle *lease)
{
    for (uint32_t i = 0; i < READERS; i++)
        if (sim->readers[i].engine == engine &&
            (lease == NULL || is_same(*lease, sim->readers[i].lease)))
            sim->readers[i] = (struct reader){0};
}

static bool was_released(const struct sim *sim, struct kvt_handle lease)
{
    for (uint32_t i = 0; i < RELEASED; i++)
        if (is_same(sim->released[i], lease))
            return true;
    return false;
}

static void begin_reading(struct sim *sim, const struct agent *agent)
{
    const struct kvt_req_promote *req = &agent->call.op.req.promote;
    const struct kvt_ans_promote *ans = &agent->call.op.ans.promote;
    struct reader *reader = &sim->readers[below(sim, READERS)];

    if (!ans->is_in_place || is_reading(reader) || was_released(sim, req->lease))
        return;
    *reader = (struct reader){.lease = req->lease,
                              .engine = agent->engine,
                              .rank = agent->rank,
                              .count = agent->count,
                              .tag = agent->tag,
                              .first = agent->first,
                              .losses = agent->losses};
    for (uint32_t c = 0; c < req->moves_count; c++)
        for (uint32_t i = 0; i < agent->count; i++) {
            reader->at[c][i].is_held = ans->moves.results[c][i] == KVT_MOVE_DONE;
            reader->at[c][i].zone = ans->in_place[c].zones[i];
            reader->at[c][i].offset_bytes = ans->in_place[c].offsets_bytes[i];
        }
}

/* A lost GPU ends the lease, and with it what is on others: also when only the other rank's shard
 * was there, which a reader is not told. */
static bool is_void(const struct sim *sim, const struct reader *reader)
{
    return reader->losses != sim->losses;
}

static void read_in_place(struct sim *sim)
{
    for (uint32_t i = 0; i < READERS; i++) {
        struct reader *reader = &sim->readers[i];

        if (is_reading(reader) && is_void(sim, reader))
            stop_readers(sim, reader->engine,
                         &(struct kvt_handle){reader->lease.boot_id, reader->lease.id,
                                              reader->lease.secret});
        for (uint32_t c = 0; c < 2 && is_reading(reader); c++)
            for (uint32_t k = 0; k < reader->count; k++) {
                const struct world_config *config = &sim->world.config;

                if (!reader->at[c][k].is_held)
                    continue;
                sim->read_in_place++;
                if (!world_is_payload(&sim->world,
                                      fake_tier_memory(sim->world.tiers[KVT_TIER_DEVICE]) +
                                          reader->at[c][k].zone *
                                              (config->l1_bytes / config->gpus) +
                                          reader->at[c][k].offset_bytes,
                                      c, reader->tag, reader->first + k, reader->rank))
                    sim->wrong++;
            }
    }
}

/* ---- answers ----------------------------------------------------------------------------------
 */

static void verify(struct sim *sim, struct agent *agent)
{
    const struct kvt_api_results *results = &agent->call.op.ans.promote.moves;

    for (uint32_t c = 0; c < sim->world.components_count; c++) {
        for (uint32_t i = 0; i < results->count[c]; i++) {
            bool is_done = results->results[c][i] == KVT_MOVE_DONE;

            sim->verified += is_done;
            if (!client_holds_but(&agent->client, c, agent->tag, agent->first + i, i,
                                  agent->left_alone[c][i], 0xdd, is_done))
                sim->wrong++;
        }
    }
}

/* Some of what is asked for is not to be written: windows that have passed, blocks that the engine
 * has. */
static void leave_some_alone(struct sim *sim, struct agent *agent)
{
    struct kvt_req_promote *req = &agent->call.op.req.promote;

    memset(agent->left_alone, 0, sizeof(agent->left_alone));
    for (uint32_t c = 0; c < req->moves_count; c++) {
        for (uint32_t i = 0; i < agent->count; i++) {
            if (below(sim, 4) != 0)
                continue;
            agent->left_alone[c][i] = (uint8_t)(1 + below(sim, (1u << WORLD_ENGINE_BLOCKS) - 1));
            world_leave_alone(&req->moves[c], i, agent->left_alone[c][i]);
        }
    }
}

static void remember(struct sim *sim, struct held *held, struct kvt_handle handle,
                     const struct agent *agent)
{
    if (handle.id != 0 || handle.secret != 0)
        held[below(sim, HELD)] = (struct held){handle, agent->tag, agent->count};
}

static void on_answer(struct sim *sim, struct agent *agent)
{
    struct kvt_op *op = &agent->call.op;
    bool is_ok = op->code == KVT_CODE_OK;

    sim->ops++;
    agent->call.is_done = false;
    CHECK(op->code != KVT_CODE_INTERNAL && op->code != KVT_CODE_UNIMPLEMENTED);
    switch (op->kind) {
    case KVT_OP_LOOKUP:
        if (is_ok) {
            agent->count = (uint32_t)(op->ans.lookup.boundary_tokens / WORLD_BLOCK_TOKENS);
            remember(sim, sim->leases[agent->engine], op->ans.lookup.lease, agent);
        }
        break;
    case KVT_OP_RESERVE:
        if (is_ok)
            remember(sim, sim->tickets[agent->engine], op->ans.reserve.ticket, agent);
        break;
    case KVT_OP_PROMOTE:
        if (is_ok && op->req.promote.is_in_place)
            begin_reading(sim, agent);
        else if (is_ok && op->ans.promote.is_quiesced)
            verify(sim, agent);
        agent->must_quiesce =
            op->code == KVT_CODE_CANCELLED || (is_ok && !op->ans.promote.is_quiesced);
        sim->late += is_ok && !op->ans.promote.is_quiesced;
        break;
    case KVT_OP_DEMOTE:
        agent->must_quiesce =
            op->code == KVT_CODE_CANCELLED || (is_ok && !op->ans.demote.is_quiesced);
        break;
    case KVT_OP_QUIESCE:
        if (is_ok)
            agent->must_quiesce = false;
        break;
    case KVT_OP_RESET:
        if (is_ok)
            sim->epoch = KVT_MAX(sim->epoch, op->ans.reset.epoch);
        break;
    default:
        break;
    }
}

/* ---- wishes -----------------------------------------------------------------------------------
 */

static const struct held *pick(struct sim *sim, const struct agent *agent,
                               struct held held[ENGINES][HELD])
{
    uint64_t engine = below(sim, 20) == 0 ? below(sim, ENGINES) : agent->engine;

    return &held[engine][below(sim, HELD)];
}

static void set_deadline(struct sim *sim, struct agent *agent)
{
    if (below(sim, 4) == 0)
        agent->call.op.deadline_ns = sim->world.now_ns + 1000 + below(sim, 2 * KVT_NS_PER_MS);
}

static void ask_lookup(struct sim *sim, struct agent *agent)
{
    struct kvt_req_lookup *req = &agent->call.op.req.lookup;

    call_begin(&agent->call, KVT_OP_LOOKUP);
    req->session = agent->client.session;
    req->prefix = world_prefix(&agent->call, agent->tag, 1 + below(sim, BLOCKS_MAX));
    req->limit_tokens = UINT64_MAX;
    req->wants_lease = below(sim, 4) != 0;
    req->lease_ns = 1 + below(sim, 50 * KVT_NS_PER_MS);
    req->wants_why = true;
    req->wants_prefetch = below(sim, 4) == 0;
}

static void ask_reserve(struct sim *sim, struct agent *agent)
{
    struct kvt_req_reserve *req = &agent->call.op.req.reserve;

    agent->count = 1 + (uint32_t)below(sim, BLOCKS_MAX);
    call_begin(&agent->call, KVT_OP_RESERVE);
    req->session = agent->client.session;
    req->prefix = world_prefix(&agent->call, agent->tag, agent->count);
    req->ticket_ns = 1 + below(sim, 50 * KVT_NS_PER_MS);
    req->wants_count = 2;
    req->wants[0] = (struct kvt_api_range){0, 0, agent->count};
    req->wants[1] = (struct kvt_api_range){1, below(sim, agent->count), agent->count};
}

static void ask_promote(struct sim *sim, struct agent *agent)
{
    const struct held *held = pick(sim, agent, sim->leases);
    struct kvt_req_promote *req = &agent->call.op.req.promote;

    agent->losses = sim->losses;
    agent->tag = held->tag;
    agent->first = held->blocks > 1 ? below(sim, held->blocks) : 0;
    agent->count = (uint32_t)(held->blocks - agent->first);
    world_promote(&agent->call, &agent->client, held->handle, agent->first, agent->count, 0);
    if (below(sim, 3) == 0) {
        agent->tag = random_tag(sim);
        agent->first = 0;
        agent->count = 4;
        world_promote(&agent->call, &agent->client, KVT_HANDLE_NONE, 0, 4, 0);
        req->prefix = world_prefix(&agent->call, agent->tag, 4);
    }
    leave_some_alone(sim, agent);
    for (uint32_t c = 0; c < 2; c++) {
        for (uint32_t i = 0; i < agent->count; i++)
            client_scribble(&agent->client, c, i, 0xdd);
    }
    req->op_id = ++agent->op_id;
    req->policy = (enum kvt_promote_policy)below(sim, 3);
    req->timeout_ns = 1 + below(sim, KVT_NS_PER_MS);
    req->layer_groups = (uint32_t)below(sim, 4);
    if (below(sim, 8) == 0) {
        req->target = below(sim, 2) != 0 ? KVT_TARGET_L1 : KVT_TARGET_L2;
        req->moves_count = 0;
    } else if (sim->world.config.gpus > 0 && !is_same(req->lease, KVT_HANDLE_NONE) &&
               below(sim, 4) == 0) {
        req->target = KVT_TARGET_L1;
        req->is_in_place = true;
    }
}

static void ask_demote(struct sim *sim, struct agent *agent)
{
    const struct held *held = pick(sim, agent, sim->tickets);
    struct kvt_req_demote *req = &agent->call.op.req.demote;

    agent->tag = held->tag;
    agent->first = 0;
    agent->count = (uint32_t)held->blocks;
    for (uint32_t c = 0; c < 2; c++) {
        for (uint32_t i = 0; i < agent->count; i++)
            client_fill(&agent->client, c, agent->tag, i, i);
    }
    world_demote(&agent->call, &agent->client, held->handle, 0, agent->count, 0);
    req->op_id = ++agent->op_id;
    req->wants_durable = below(sim, 4) == 0;
    if (below(sim, 8) == 0) {
        const struct held *lease = pick(sim, agent, sim->leases);

        req->is_between_tiers = true;
        req->lease = lease->handle;
        req->from_tiers = KVT_TIER_BIT_L1 | KVT_TIER_BIT_L2;
        req->to_tier = KVT_TIER_BIT_L3;
        req->moves_count = 0;
    }
}

static void ask_release(struct sim *sim, struct agent *agent)
{
    struct kvt_handle *lease = &agent->call.op.req.release.lease;
    const struct reader *reader = &sim->readers[below(sim, READERS)];

    *lease = pick(sim, agent, sim->leases)->handle;
    if (is_reading(reader) && reader->engine == agent->engine)
        *lease = reader->lease;
    sim->released[sim->released_at++ % RELEASED] = *lease;
    stop_readers(sim, agent->engine, &sim->released[(sim->released_at - 1) % RELEASED]);
}

static void ask_other(struct sim *sim, struct agent *agent)
{
    uint64_t which = below(sim, 40);

    if (which == 0 && below(sim, 4) == 0) {
        call_begin(&agent->call, KVT_OP_RESET);
        agent->call.op.req.reset.ns = sim->world.ns;
    } else if (which < 3) {
        call_begin(&agent->call, KVT_OP_EVICT);
        agent->call.op.req.evict.ns = sim->world.ns;
        agent->call.op.req.evict.prefix = world_prefix(&agent->call, agent->tag, 1 + below(sim, 8));
    } else if (which < 5) {
        call_begin(&agent->call, which == 3 ? KVT_OP_STATS : KVT_OP_DUMP);
    } else if (which < 8) {
        call_begin(&agent->call, KVT_OP_MAINTAIN);
        agent->call.op.req.maintain.action = (enum kvt_maintain_action)below(sim, 4);
    } else {
        call_begin(&agent->call, KVT_OP_RELEASE);
        agent->call.op.req.release.session = agent->client.session;
        if (which < 25)
            ask_release(sim, agent);
        else
            agent->call.op.req.release.ticket = pick(sim, agent, sim->tickets)->handle;
    }
}

/* With its memory on a GPU; false: that was refused. */
static bool attach_gpu(struct sim *sim, struct agent *agent)
{
    uint32_t gpu = (uint32_t)below(sim, sim->world.config.gpus);
    const struct kvt_op *op = &agent->call.op;

    client_begin_attach_gpu(&agent->client, &sim->world, &agent->call, (uint8_t)(agent->engine + 1),
                            agent->rank == 0, agent->rank, gpu);
    call_run(&agent->call);
    agent->gpu = gpu;
    agent->incarnation = fake_tier_incarnation(sim->world.tiers[KVT_TIER_DEVICE], gpu);
    if (op->code == KVT_CODE_OK) {
        agent->client.session = op->ans.attach.session;
        return true;
    }
    CHECK(op->code == KVT_CODE_UNAVAILABLE || op->code == KVT_CODE_FAILED_PRECONDITION);
    client_unmap(&agent->client);
    agent->gpu = KVT_GPU_NONE;
    return false;
}

/* The GPU of its memory was lost: it should attach again. */
static bool is_lost(struct sim *sim, const struct agent *agent)
{
    return agent->gpu != KVT_GPU_NONE && fake_tier_incarnation(sim->world.tiers[KVT_TIER_DEVICE],
                                                               agent->gpu) != agent->incarnation;
}

static void attach(struct sim *sim, struct agent *agent)
{
    bool is_gpu = sim->world.config.gpus > 0 && below(sim, 2) == 0 && attach_gpu(sim, agent);

    sim->gpu_sessions += is_gpu;
    if (!is_gpu)
        agent->gpu = KVT_GPU_NONE;
    if (!is_gpu)
        client_attach(&agent->client, &sim->world, &agent->call, (uint8_t)(agent->engine + 1),
                      agent->rank == 0, agent->rank);
    agent->call.is_done = false;
    agent->is_attached = true;
    agent->must_quiesce = false;
}

/* Its process dies: the memory goes, too, though the daemon still has it mapped. */
static void die(struct sim *sim, struct agent *agent)
{
    struct call call;

    stop_readers(sim, agent->engine, NULL); /* it may be the last of its engine */
    call_init(&call, &sim->world);
    client_detach(&agent->client, &call);
    call_deinit(&call);
    if (agent->call.is_busy)
        call_wait(&agent->call);
    agent->call.is_done = false;
    client_unmap(&agent->client);
    agent->is_attached = false;
}

static void ask(struct sim *sim, struct agent *agent)
{
    agent->tag = random_tag(sim);
    if (agent->must_quiesce) {
        call_begin(&agent->call, KVT_OP_QUIESCE);
        agent->call.op.req.quiesce.session = agent->client.session;
        agent->call.op.req.quiesce.op_id = agent->op_id;
    } else {
        switch (below(sim, 12)) {
        case 0:
        case 1:
            ask_lookup(sim, agent);
            break;
        case 2:
        case 3:
            ask_reserve(sim, agent);
            break;
        case 4:
        case 5:
        case 6:
            ask_promote(sim, agent);
            break;
        case 7:
        case 8:
        case 9:
        case 10:
            ask_demote(sim, agent);
            break;
        default:
            ask_other(sim, agent);
            break;
        }
    }
    set_deadline(sim, agent);
    call_submit(&agent->call);
}

static void note_durable(struct world *world)
{
    world_copies_take(&sim_now.copies, world);
}

static uint64_t dropped_from_l3(const struct kvt_store_stats *stats)
{
    uint64_t dropped = 0;

    for (uint32_t i = 0; i < KVT_DROP_REASONS; i++)
        dropped += stats->tiers[KVT_TIER_DISK].dropped[i];
    return dropped;
}

/* What was durable came back, but for what was evicted since. */
static void demand(struct sim *sim)
{
    struct kvt_store_stats stats;
    uint64_t missing;

    CHECK(sim->world.epoch >= sim->epoch);
    do {
        world_turn(&sim->world);
        kvt_engine_store_stats(sim->world.engine, &stats);
    } while (stats.index.is_loading);
    missing = world_copies_missing(&sim->copies, &sim->world);
    if (missing > dropped_from_l3(&stats))
        fprintf(stderr, "restart %llu: of %llu durable copies %llu are missing, %llu dropped\n",
                (unsigned long long)sim->restarts, (unsigned long long)sim->copies.count,
                (unsigned long long)missing, (unsigned long long)dropped_from_l3(&stats));
    CHECK(missing <= dropped_from_l3(&stats));
    sim->durable += sim->copies.count - missing;
}

/* The daemon ends, in one way or another; so do the engines that were attached. */
static void restart(struct sim *sim)
{
    for (uint32_t i = 0; i < AGENTS; i++)
        if (sim->agents[i].is_attached)
            die(sim, &sim->agents[i]);
    world_settle(&sim->world);
    world_check(&sim->world);
    for (uint32_t i = 0; i < sim->world.config.devices; i++)
        fake_index_hold(sim->world.indexes[i], false);
    world_restart(&sim->world, below(sim, 3) == 0);
    for (uint32_t i = 0; i < sim->world.config.devices; i++) {
        sim->world.device[i].catalog_result = 0;
        fake_tier_set_zone_out(sim->world.tiers[KVT_TIER_DISK], i, false);
    }
    sim->restarts++;
    demand(sim);
    memset(sim->leases, 0, sizeof(sim->leases));
    memset(sim->tickets, 0, sizeof(sim->tickets));
}

/* Something happens to a device, or is over. */
static void trouble(struct sim *sim)
{
    uint32_t device = (uint32_t)below(sim, sim->world.config.devices);

    switch (below(sim, 16)) {
    case 0:
        if (below(sim, 8) == 0)
            fake_index_fail(sim->world.indexes[device], 11, "helper ended");
        break;
    case 1:
    case 2:
        fake_index_hold(sim->world.indexes[device], true);
        break;
    case 3:
    case 4:
        fake_tier_set_zone_out(sim->world.tiers[KVT_TIER_DISK], device, true);
        break;
    case 5:
        sim->world.device[device].catalog_result = -EIO;
        break;
    case 6:
    case 7:
        sim->world.device[device].catalog_result = 0;
        break;
    default:
        fake_index_hold(sim->world.indexes[device], false);
        fake_tier_set_zone_out(sim->world.tiers[KVT_TIER_DISK], device, false);
        break;
    }
}

static void gpu_trouble(struct sim *sim)
{
    struct fake_tier *l1 = sim->world.tiers[KVT_TIER_DEVICE];
    uint32_t gpu = (uint32_t)below(sim, sim->world.config.gpus);

    if (fake_tier_is_zone_out(l1, gpu)) {
        fake_tier_revive_zone(l1, gpu);
        return;
    }
    fake_tier_lose_zone(l1, gpu);
    sim->losses++;
    if (below(sim, 2) == 0) /* before the engine has seen that it was away */
        fake_tier_revive_zone(l1, gpu);
}

static void calm(struct sim *sim)
{
    for (uint32_t i = 0; i < sim->world.config.gpus; i++)
        fake_tier_revive_zone(sim->world.tiers[KVT_TIER_DEVICE], i);
    for (uint32_t i = 0; i < sim->world.config.devices; i++) {
        fake_index_hold(sim->world.indexes[i], false);
        fake_tier_set_zone_out(sim->world.tiers[KVT_TIER_DISK], i, false);
        sim->world.device[i].catalog_result = 0;
    }
}

static void step(struct sim *sim)
{
    if (below(sim, 700) == 0)
        restart(sim);
    if (below(sim, 100) == 0)
        trouble(sim);
    if (sim->world.config.gpus > 0 && below(sim, sim->world.config.seed % 4 == 2 ? 1000 : 60) == 0)
        gpu_trouble(sim);
    for (uint32_t i = 0; i < AGENTS; i++) {
        struct agent *agent = &sim->agents[i];

        if (!agent->is_attached) {
            if (below(sim, 20) == 0)
                attach(sim, agent);
            continue;
        }
        if (agent->call.is_done)
            on_answer(sim, agent);
        if (below(sim, is_lost(sim, agent) ? 10 : 300) == 0) {
            die(sim, agent);
        } else if (!agent->call.is_busy) {
            if (below(sim, 2) == 0)
                ask(sim, agent);
        } else if (below(sim, 50) == 0) {
            atomic_store(&agent->call.op.is_cancelled, true);
            sim->world.service.cancel(sim->world.service.ctx, &agent->call.op);
        }
    }
    world_turn(&sim->world);
    read_in_place(sim);
}

/* No more upkeep: it has no end of its own. */
static void rest(struct sim *sim)
{
    static const enum kvt_maintain_action actions[] = {KVT_MAINTAIN_SCRUB_STOP, KVT_MAINTAIN_DRAIN};
    struct call call;

    call_init(&call, &sim->world);
    for (uint32_t i = 0; i < KVT_COUNT_OF(actions); i++) {
        call_begin(&call, KVT_OP_MAINTAIN);
        call.op.req.maintain.action = actions[i];
        call_run(&call);
        CHECK_CODE(&call.op, KVT_CODE_OK);
        CHECK(!call.op.ans.maintain.scrub.is_running);
    }
    CHECK(!call.op.ans.maintain.drain.is_running);
    printf("drains wrote %llu copies, scrubs read %llu and found %llu bad\n",
           (unsigned long long)call.op.ans.maintain.drain.copies_written,
           (unsigned long long)call.op.ans.maintain.scrub.checked_copies,
           (unsigned long long)call.op.ans.maintain.scrub.bad_copies);
    call_deinit(&call);
}

/* Worlds differ: much L3 or little, rings that are always full or never, quantised or not. */
static struct world_config config_of(uint64_t seed)
{
    static const struct kvt_api_quant quants[] = {{0}, {1, 2, 1, 8, 2, 32}, {2, 1, 2, 8, 1, 32}};
    uint64_t random = seed;
    bool is_roomy = fake_random(&random) % 2 == 0;
    bool is_narrow = fake_random(&random) % 3 == 0;
    uint32_t devices = 1 + (uint32_t)(fake_random(&random) % 3);
    uint32_t gpus = (uint32_t)(seed % 4);

    return (struct world_config){.seed = seed,
                                 .l1_bytes = (uint64_t)KVT_MAX(gpus, 1u) * (256u << 10),
                                 .gpus = gpus,
                                 .is_export_allowed = gpus > 0,
                                 .payload_bytes_max = seed % 8 == 7 ? 3000 : 0,
                                 .l2_bytes = 512u << 10,
                                 .l3_bytes = devices * (is_roomy ? 2u << 20 : 512u << 10),
                                 .index_bytes = 4u << 20,
                                 .delay_ns_max = KVT_NS_PER_MS,
                                 .fault_rate = (uint32_t)(fake_random(&random) % 12),
                                 .ranks = RANKS,
                                 .has_window = true,
                                 .quant = quants[seed % KVT_COUNT_OF(quants)],
                                 .devices = devices,
                                 .commit_delay_ns_max = 5 * KVT_NS_PER_MS,
                                 .load_event_ns = 20 * KVT_NS_PER_US,
                                 .refuse_rate = fake_random(&random) % 2 == 0 ? 0 : 5,
                                 .is_index_lenient = true,
                                 .lost_after_ns = fake_random(&random) % 8 * KVT_NS_PER_MS + 1,
                                 .is_disk_volatile = true,
                                 .ring_bytes = is_narrow ? 8192 : 0,
                                 .stamps = 2000,
                                 .write_policy = fake_random(&random) % 2 == 0 ? KVT_WRITE_BACK
                                                                               : KVT_WRITE_THROUGH};
}

static uint64_t run(uint64_t seed, uint64_t steps)
{
    const struct world_config config = config_of(seed);
    struct kvt_engine_counts counts;

    memset(&sim_now, 0, sizeof(sim_now));
    sim_now.random = seed;
    world_init(&sim_now.world, &config);
    sim_now.world.before_death = note_durable;
    for (uint32_t i = 0; i < AGENTS; i++) {
        sim_now.agents[i].engine = i / RANKS;
        sim_now.agents[i].rank = i % RANKS;
        call_init(&sim_now.agents[i].call, &sim_now.world);
    }
    for (uint64_t i = 0; i < steps; i++) {
        step(&sim_now);
        if (i == steps / 2)
            restart(&sim_now); /* however few they are */
        if (i % 16 == 0)
            world_check(&sim_now.world);
    }
    for (uint32_t i = 0; i < AGENTS; i++) {
        if (sim_now.agents[i].is_attached)
            die(&sim_now, &sim_now.agents[i]);
        call_deinit(&sim_now.agents[i].call);
    }
    calm(&sim_now);
    rest(&sim_now);
    world_settle(&sim_now.world);
    world_check(&sim_now.world);
    kvt_engine_counts(sim_now.world.engine, &counts);
    CHECK(counts.sessions == 0 && counts.engines == 0);
    printf("seed %llu: %llu requests, %llu blocks verified, %llu wrong, %llu answered before "
           "quiesced, %llu restarts, %llu durable copies came back, %u GPUs were lost %llu times, "
           "had %llu sessions, %llu reads in place, "
           "trace %016llx\n",
           (unsigned long long)seed, (unsigned long long)sim_now.ops,
           (unsigned long long)sim_now.verified, (unsigned long long)sim_now.wrong,
           (unsigned long long)sim_now.late, (unsigned long long)sim_now.restarts,
           (unsigned long long)sim_now.durable, config.gpus, (unsigned long long)sim_now.losses,
           (unsigned long long)sim_now.gpu_sessions, (unsigned long long)sim_now.read_in_place,
           (unsigned long long)sim_now.world.trace);
    CHECK(sim_now.wrong == 0 && sim_now.verified > 0 && sim_now.restarts > 0);
    world_copies_free(&sim_now.copies);
    world_deinit(&sim_now.world);
    return sim_now.world.trace;
}

int main(int argc, char **argv)
{
    uint64_t seed = 1, seeds = 2, steps = 4000;

    for (int i = 1; i + 1 < argc; i += 2) {
        if (strcmp(argv[i], "--seed") == 0)
            seed = strtoull(argv[i + 1], NULL, 10);
        else if (strcmp(argv[i], "--seeds") == 0)
            seeds = strtoull(argv[i + 1], NULL, 10);
        else if (strcmp(argv[i], "--steps") == 0)
            steps = strtoull(argv[i + 1], NULL, 10);
    }
    setvbuf(stdout, NULL, _IOLBF, 0);
    CHECK(run(seed, steps) == run(seed, steps));
    for (uint64_t i = 1; i < seeds; i++)
        (void)run(seed + i, steps);
    return 0;
}
