/* Memory of engines on GPUs: how it is attached and refused, what a loss does to its sessions, and
 * that nothing is left open whatever happens meanwhile. */
#include <pthread.h>
#include <semaphore.h>
#include <string.h>

#include "daemon/base/clock.h"
#include "tests/common/check.h"
#include "tests/common/engine_world.h"

#define GPUS 2u

static const struct world_config two_gpus = {.seed = 11,
                                             .l1_bytes = GPUS * (512u << 10),
                                             .l2_bytes = 1u << 20,
                                             .l3_bytes = 2u << 20,
                                             .delay_ns_max = KVT_NS_PER_MS,
                                             .ranks = 1,
                                             .gpus = GPUS};

struct fixture {
    struct world world;
    struct client client;
    struct call call;
};

static void setup(struct fixture *fix, const struct world_config *config)
{
    world_init(&fix->world, config);
    call_init(&fix->call, &fix->world);
}

static void attach(struct fixture *fix, uint32_t gpu)
{
    client_begin_attach_gpu(&fix->client, &fix->world, &fix->call, 1, true, 0, gpu);
    call_run(&fix->call);
    CHECK_CODE(&fix->call.op, KVT_CODE_OK);
    fix->client.session = fix->call.op.ans.attach.session;
}

static void teardown(struct fixture *fix)
{
    world_settle(&fix->world);
    world_check(&fix->world);
    CHECK(fix->world.gpu_regions == 0);
    call_deinit(&fix->call);
    world_deinit(&fix->world);
}

static void store_prompt(struct fixture *fix, uint64_t tag, uint32_t blocks)
{
    struct kvt_handle ticket = world_reserve(&fix->call, &fix->client, tag, blocks);

    for (uint32_t i = 0; i < blocks; i++)
        client_fill(&fix->client, 0, tag, i, i);
    world_demote(&fix->call, &fix->client, ticket, 0, blocks, 0);
    call_run(&fix->call);
    CHECK_CODE(&fix->call.op, KVT_CODE_OK);
    for (uint32_t i = 0; i < blocks; i++)
        CHECK(fix->call.op.ans.demote.moves.results[0][i] == KVT_MOVE_DONE);
}

/* How many of the blocks came. */
static uint32_t load_prompt(struct fixture *fix, uint64_t tag, uint32_t blocks)
{
    uint32_t count = 0;

    for (uint32_t i = 0; i < blocks; i++)
        client_scribble(&fix->client, 0, i, 0x11);
    world_promote(&fix->call, &fix->client, KVT_HANDLE_NONE, 0, blocks, 0);
    fix->call.op.req.promote.prefix = world_prefix(&fix->call, tag, blocks);
    call_run(&fix->call);
    CHECK_CODE(&fix->call.op, KVT_CODE_OK);
    for (uint32_t i = 0; i < blocks; i++) {
        if (fix->call.op.ans.promote.moves.results[0][i] != KVT_MOVE_DONE)
            continue;
        CHECK(client_holds(&fix->client, 0, tag, i, i, 0));
        count++;
    }
    return count;
}

static uint64_t l1_slots(struct fixture *fix, uint32_t zone)
{
    struct kvt_store_stats stats;

    kvt_engine_store_stats(fix->world.engine, &stats);
    return stats.l1_zones[zone].slab.taken_slots;
}

/* ---- attaching ---- */

static void test_attach(void)
{
    struct fixture fix;

    setup(&fix, &two_gpus);
    attach(&fix, 1);
    CHECK(fix.world.gpu_regions == 1);
    store_prompt(&fix, 0x101, 4);
    CHECK(l1_slots(&fix, 0) == 0 && l1_slots(&fix, 1) == 4); /* where its engine is */
    CHECK(load_prompt(&fix, 0x101, 4) == 4);
    client_detach(&fix.client, &fix.call);
    client_unmap(&fix.client);
    teardown(&fix);
}

/* Two engines of one model, rank 0 of each on another GPU: what one stores is not the other's. */
static void test_two_engines(void)
{
    struct client second;
    struct fixture fix;

    setup(&fix, &two_gpus);
    attach(&fix, 0);
    client_begin_attach_gpu(&second, &fix.world, &fix.call, 2, true, 0, 1);
    call_run(&fix.call);
    CHECK_CODE(&fix.call.op, KVT_CODE_OK);
    second.session = fix.call.op.ans.attach.session;
    store_prompt(&fix, 0x101, 4);
    CHECK(l1_slots(&fix, 0) == 4 && l1_slots(&fix, 1) == 0);
    client_detach(&fix.client, &fix.call);
    client_unmap(&fix.client);
    fix.client = second;
    store_prompt(&fix, 0x202, 4);
    CHECK(l1_slots(&fix, 0) == 4 && l1_slots(&fix, 1) == 4);
    client_detach(&fix.client, &fix.call);
    client_unmap(&fix.client);
    teardown(&fix);
}

static void refuse(struct fixture *fix, int result, enum kvt_code code)
{
    struct client client;

    fix->world.gpu_open_result = result;
    client_begin_attach_gpu(&client, &fix->world, &fix->call, 2, true, 0, 0);
    call_run(&fix->call);
    CHECK_CODE(&fix->call.op, code);
    CHECK(strstr(fix->call.op.message, "regions[0].cuda_ipc") != NULL);
    CHECK(fix->world.gpu_regions == 0);
    client_unmap(&client);
    fix->world.gpu_open_result = 0;
}

static void test_refusals(void)
{
    struct fixture fix;

    setup(&fix, &two_gpus);
    refuse(&fix, KVT_REGION_E_NO_GPU, KVT_CODE_FAILED_PRECONDITION);
    CHECK(strstr(fix.call.op.message, "result 16") != NULL); /* what the device tier says */
    refuse(&fix, KVT_REGION_E_LOST, KVT_CODE_UNAVAILABLE);
    refuse(&fix, KVT_REGION_E_HANDLE, KVT_CODE_INVALID_ARGUMENT);
    refuse(&fix, KVT_REGION_E_OUTSIDE, KVT_CODE_INVALID_ARGUMENT);
    refuse(&fix, KVT_REGION_E_MANY, KVT_CODE_RESOURCE_EXHAUSTED);
    CHECK(strstr(fix.call.op.message, "result 20") != NULL);
    refuse(&fix, -ENOMEM, KVT_CODE_RESOURCE_EXHAUSTED);
    refuse(&fix, -EIO, KVT_CODE_UNAVAILABLE);
    teardown(&fix);
}

/* What is refused anyway is not opened; what was opened before a refusal is closed; a scheduler
 * without a rank may have such memory, too. */
static void test_bad_requests(void)
{
    struct client client;
    struct fixture fix;

    setup(&fix, &two_gpus);
    fix.world.gpu_open_result = KVT_REGION_E_HANDLE; /* would be told if it was opened */
    client_begin_attach_gpu(&client, &fix.world, &fix.call, 1, true, 0, 0);
    fix.call.op.req.attach.rank = 7;
    call_run(&fix.call);
    CHECK_CODE(&fix.call.op, KVT_CODE_INVALID_ARGUMENT);
    CHECK(strstr(fix.call.op.message, "rank 7") != NULL);
    client_unmap(&client);
    fix.world.gpu_open_result = 0;
    client_begin_attach_gpu(&client, &fix.world, &fix.call, 1, true, 0, 0);
    ((struct kvt_api_piece *)(uintptr_t)fix.call.op.req.attach.layouts[0].pieces)[0].offset_bytes =
        UINT64_MAX;
    call_run(&fix.call);
    CHECK_CODE(&fix.call.op, KVT_CODE_INVALID_ARGUMENT);
    CHECK(fix.world.gpu_regions == 0);
    client_unmap(&client);
    client_begin_attach_gpu(&client, &fix.world, &fix.call, 1, true, 0, 0);
    fix.call.op.req.attach.rank = KVT_RANK_NONE;
    call_run(&fix.call);
    CHECK_CODE(&fix.call.op, KVT_CODE_OK);
    client.session = fix.call.op.ans.attach.session;
    client_detach(&client, &fix.call);
    client_unmap(&client);
    teardown(&fix);
}

/* All sessions are taken: nothing is opened for one more. */
static void test_too_many_sessions(void)
{
    static struct client clients[KVT_SESSIONS_MAX];
    struct client client;
    struct fixture fix;

    setup(&fix, &two_gpus);
    for (uint32_t i = 0; i < KVT_SESSIONS_MAX; i++)
        client_attach(&clients[i], &fix.world, &fix.call, 1, true, KVT_RANK_NONE);
    fix.world.gpu_open_result = KVT_REGION_E_HANDLE; /* would be told if it was opened */
    client_begin_attach_gpu(&client, &fix.world, &fix.call, 2, true, 0, 0);
    call_run(&fix.call);
    CHECK_CODE(&fix.call.op, KVT_CODE_RESOURCE_EXHAUSTED);
    CHECK(strstr(fix.call.op.message, "256 sessions") != NULL);
    client_unmap(&client);
    fix.world.gpu_open_result = 0;
    for (uint32_t i = 0; i < KVT_SESSIONS_MAX; i++)
        client_detach(&clients[i], &fix.call);
    attach(&fix, 0);
    client_detach(&fix.client, &fix.call);
    client_unmap(&fix.client);
    teardown(&fix);
}

static void test_too_large(void)
{
    struct world_config config = two_gpus;
    struct client client;
    struct fixture fix;

    config.payload_bytes_max = 4095;
    setup(&fix, &config);
    client_begin_attach_gpu(&client, &fix.world, &fix.call, 1, true, 0, 0);
    call_run(&fix.call);
    CHECK_CODE(&fix.call.op, KVT_CODE_FAILED_PRECONDITION);
    CHECK(strstr(fix.call.op.message, "tiers.l1.staging") != NULL);
    client_unmap(&client);
    /* In host memory it is served, from L2. */
    client_attach(&fix.client, &fix.world, &fix.call, 1, true, 0);
    store_prompt(&fix, 0x101, 2);
    CHECK(l1_slots(&fix, 0) + l1_slots(&fix, 1) == 0);
    CHECK(load_prompt(&fix, 0x101, 2) == 2);
    client_detach(&fix.client, &fix.call);
    client_unmap(&fix.client);
    teardown(&fix);
}

/* ---- loss ---- */

/* Its session is told once, its moves answer CLIENT_GONE, and attached again it goes on; what was
 * below L1 is still there. Sessions on the other GPU notice nothing. */
static void test_loss(void)
{
    struct client other;
    struct fixture fix;

    setup(&fix, &two_gpus);
    client_begin_attach_gpu(&other, &fix.world, &fix.call, 2, true, 0, 0);
    call_run(&fix.call);
    CHECK_CODE(&fix.call.op, KVT_CODE_OK);
    other.session = fix.call.op.ans.attach.session;
    attach(&fix, 1);
    store_prompt(&fix, 0x101, 4);
    call_begin(&fix.call, KVT_OP_DEMOTE);
    fix.call.op.req.demote.session = fix.client.session;
    fix.call.op.req.demote.prefix = world_prefix(&fix.call, 0x101, 2);
    fix.call.op.req.demote.is_between_tiers = true;
    fix.call.op.req.demote.from_tiers = KVT_TIER_BIT_L1;
    fix.call.op.req.demote.to_tier = KVT_TIER_BIT_L2;
    call_run(&fix.call);
    CHECK_CODE(&fix.call.op, KVT_CODE_OK);
    fake_tier_lose_zone(fix.world.tiers[KVT_TIER_DEVICE], 1);
    for (uint32_t i = 0; i < 20; i++)
        world_turn(&fix.world);
    CHECK(fix.world.notices[KVT_NOTICE_REGIONS_LOST] == 1);
    CHECK(load_prompt(&fix, 0x101, 4) == 0);
    CHECK(fix.call.op.ans.promote.moves.results[0][0] == KVT_MOVE_CLIENT_GONE);
    fake_tier_revive_zone(fix.world.tiers[KVT_TIER_DEVICE], 1);
    client_detach(&fix.client, &fix.call);
    client_unmap(&fix.client);
    attach(&fix, 1);
    CHECK(load_prompt(&fix, 0x101, 4) == 2);
    store_prompt(&fix, 0x202, 4);
    CHECK(load_prompt(&fix, 0x202, 4) == 4);
    CHECK(fix.world.notices[KVT_NOTICE_REGIONS_LOST] == 1);
    client_detach(&fix.client, &fix.call);
    client_unmap(&fix.client);
    client_detach(&other, &fix.call);
    client_unmap(&other);
    teardown(&fix);
}

/* Between its opening and the answer the GPU is lost: what was opened is gone. */
static void lose_while_opening(struct world *world)
{
    world->is_lost_while_opening = true;
}

static void test_lost_while_opening(void)
{
    struct world_config config = two_gpus;
    struct client client;
    struct fixture fix;

    config.before_gpu_open = lose_while_opening;
    setup(&fix, &config);
    client_begin_attach_gpu(&client, &fix.world, &fix.call, 1, true, 0, 0);
    call_run(&fix.call);
    CHECK_CODE(&fix.call.op, KVT_CODE_UNAVAILABLE);
    client_unmap(&client);
    fake_tier_revive_zone(fix.world.tiers[KVT_TIER_DEVICE], 0);
    teardown(&fix);
}

/* ---- on the janitor's thread ---- */

static sem_t may_open, is_opening;

static void wait_to_open(struct world *world)
{
    (void)world;
    CHECK(sem_post(&is_opening) == 0);
    CHECK(sem_wait(&may_open) == 0);
}

static void *engine_main(void *ctx)
{
    kvt_engine_run(ctx);
    return NULL;
}

static sem_t is_answered;

static void on_answer(struct kvt_op *op)
{
    struct call *call = op->server;

    call->is_busy = false;
    call->is_done = true;
    CHECK(sem_post(&is_answered) == 0);
}

static void submit_attach(struct fixture *fix)
{
    client_begin_attach_gpu(&fix->client, &fix->world, &fix->call, 1, true, 0, 0);
    fix->call.op.done = on_answer;
    call_submit(&fix->call);
    CHECK(sem_wait(&is_opening) == 0); /* on the other thread; the engine goes on meanwhile */
}

static void await_answer(struct call *call, enum kvt_code code)
{
    struct timespec until;

    CHECK(clock_gettime(CLOCK_REALTIME, &until) == 0);
    until.tv_sec += 20;
    CHECK(sem_timedwait(&is_answered, &until) == 0);
    CHECK_CODE(&call->op, code);
}

static void end_attach(struct fixture *fix, enum kvt_code code)
{
    CHECK(sem_post(&may_open) == 0);
    await_answer(&fix->call, code);
}

static void detach(struct fixture *fix, struct client *client)
{
    call_begin(&fix->call, KVT_OP_DETACH);
    fix->call.op.req.detach.session = client->session;
    fix->call.op.done = on_answer;
    call_submit(&fix->call);
    await_answer(&fix->call, KVT_CODE_OK);
    client_unmap(client);
}

static void start_engine(struct fixture *fix, struct kvt_doorbell *doorbell, pthread_t *ret_thread,
                         void (*before_gpu_open)(struct world *world))
{
    struct world_config config = two_gpus;

    CHECK(kvt_doorbell_init(doorbell) == 0);
    CHECK(sem_init(&may_open, 0, 0) == 0 && sem_init(&is_opening, 0, 0) == 0 &&
          sem_init(&is_answered, 0, 0) == 0);
    config.doorbell = doorbell;
    config.before_gpu_open = before_gpu_open;
    setup(fix, &config);
    fix->world.now_ns = kvt_clock_mono_ns() + 600 * KVT_NS_PER_S; /* no deadline is near */
    CHECK(pthread_create(ret_thread, NULL, engine_main, fix->world.engine) == 0);
}

static void join_engine(pthread_t thread)
{
    struct timespec until;

    CHECK(clock_gettime(CLOCK_REALTIME, &until) == 0);
    until.tv_sec += 20;
    CHECK(pthread_timedjoin_np(thread, NULL, &until) == 0);
}

/* Attaches whose memory is being opened: served, cancelled, lost meanwhile, and stopped under. */
static void test_threads(void)
{
    struct kvt_doorbell doorbell;
    struct client cancelled;
    struct fixture fix;
    pthread_t thread;

    start_engine(&fix, &doorbell, &thread, wait_to_open);
    submit_attach(&fix);
    end_attach(&fix, KVT_CODE_OK);
    fix.client.session = fix.call.op.ans.attach.session;
    detach(&fix, &fix.client);

    /* Its answer does not wait for the driver. */
    submit_attach(&fix);
    atomic_store(&fix.call.op.is_cancelled, true);
    fix.world.service.cancel(fix.world.service.ctx, &fix.call.op);
    await_answer(&fix.call, KVT_CODE_CANCELLED);
    cancelled = fix.client;
    CHECK(sem_post(&may_open) == 0);

    submit_attach(&fix);
    client_unmap(&cancelled); /* it was opened, and put back */
    fix.world.gpu_open_result = KVT_REGION_E_HANDLE;
    end_attach(&fix, KVT_CODE_INVALID_ARGUMENT);
    fix.world.gpu_open_result = 0;
    client_unmap(&fix.client);

    submit_attach(&fix);
    kvt_engine_stop(fix.world.engine, 0);
    end_attach(&fix, KVT_CODE_UNAVAILABLE);
    join_engine(thread);
    client_unmap(&fix.client);
    CHECK(fix.world.gpu_regions == 0);
    call_deinit(&fix.call);
    world_deinit(&fix.world);
    kvt_doorbell_deinit(&doorbell);
}

/* The driver does not come back: the engine stops without it and without what it may still use, nor
 * does it close on a GPU what else is open. What comes back after all touches nothing of that. */
static void test_driver_hangs(void)
{
    static struct fixture fix; /* the thread that is left behind looks at it */
    const struct timespec pause = {.tv_nsec = 50 * 1000 * 1000};
    struct kvt_doorbell doorbell;
    struct client attached;
    pthread_t thread;

    start_engine(&fix, &doorbell, &thread, wait_to_open);
    submit_attach(&fix);
    end_attach(&fix, KVT_CODE_OK);
    attached = fix.client;
    submit_attach(&fix);
    kvt_engine_stop(fix.world.engine, 0);
    await_answer(&fix.call, KVT_CODE_UNAVAILABLE);
    CHECK(strstr(fix.call.op.message, "stopping") != NULL);
    join_engine(thread);
    client_unmap(&fix.client);
    client_unmap(&attached);
    fix.world.engine = kvt_engine_free(fix.world.engine);
    CHECK(fix.world.gpu_regions == 1);
    fix.world.gpu_regions = 0; /* it ends with the process */
    fix.world.gpu_open_result = -EIO;
    call_deinit(&fix.call);
    world_deinit(&fix.world);
    kvt_doorbell_deinit(&doorbell);
    CHECK(sem_post(&may_open) == 0);
    (void)nanosleep(&pause, NULL);
}

static int64_t regions_seen;

static void count_and_wait(struct world *world)
{
    regions_seen = world->gpu_regions;
    wait_to_open(world);
}

/* Between two openings, what waits is closed. */
static void test_closes_in_turn(void)
{
    struct kvt_doorbell doorbell;
    struct client gone, first;
    struct call later;
    struct fixture fix;
    pthread_t thread;

    start_engine(&fix, &doorbell, &thread, count_and_wait);
    submit_attach(&fix);
    end_attach(&fix, KVT_CODE_OK);
    gone = fix.client;
    gone.session = fix.call.op.ans.attach.session;
    call_init(&later, &fix.world);
    client_begin_attach_gpu(&first, &fix.world, &later, 2, true, 0, 0);
    later.op.done = on_answer;
    call_submit(&later);
    CHECK(sem_wait(&is_opening) == 0);
    detach(&fix, &gone); /* there is work for the janitor, which is opening */
    client_begin_attach_gpu(&fix.client, &fix.world, &fix.call, 3, true, 0, 0);
    fix.call.op.done = on_answer;
    call_submit(&fix.call);
    CHECK(sem_post(&may_open) == 0);
    await_answer(&later, KVT_CODE_OK);
    CHECK(sem_wait(&is_opening) == 0);
    CHECK(regions_seen == 1); /* the one that was opened in between, not the one that went */
    end_attach(&fix, KVT_CODE_OK);
    fix.client.session = fix.call.op.ans.attach.session;
    detach(&fix, &fix.client);
    first.session = later.op.ans.attach.session;
    detach(&fix, &first);
    kvt_engine_stop(fix.world.engine, 0);
    join_engine(thread);
    call_deinit(&later);
    call_deinit(&fix.call);
    world_deinit(&fix.world);
    kvt_doorbell_deinit(&doorbell);
}

int main(void)
{
    test_attach();
    test_two_engines();
    test_refusals();
    test_bad_requests();
    test_too_many_sessions();
    test_too_large();
    test_loss();
    test_lost_while_opening();
    test_threads();
    test_closes_in_turn();
    test_driver_hangs();
    return 0;
}
