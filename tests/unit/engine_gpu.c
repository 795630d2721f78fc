/* Memory of engines on GPUs: how it is attached and refused, what a loss does to its sessions, and
 * that nothing is left open whatever happens meanwhile. */
#include <pthread.h>
#include <semaphore.h>
#include <string.h>

#include "daemon/base/clock.h"
#include "tests/common/check.h"
#include "tests/common/engine_rig.h"

#define GPUS 2u

static const struct world_config two_gpus = {.seed = 11,
                                             .l1_bytes = GPUS * (512u << 10),
                                             .l2_bytes = 1u << 20,
                                             .l3_bytes = 2u << 20,
                                             .delay_ns_max = KVT_NS_PER_MS,
                                             .ranks = 1,
                                             .gpus = GPUS};

/* ---- attaching ---- */

static void test_attach(void)
{
    struct rig rig;

    rig_init(&rig, &two_gpus);
    rig_attach_gpu(&rig, 1);
    CHECK(rig.world.gpu_regions == 1);
    rig_store(&rig, 0x101, 4);
    CHECK(rig_l1_slots(&rig, 0) == 0 && rig_l1_slots(&rig, 1) == 4); /* where its engine is */
    CHECK(rig_load(&rig, 0x101, 4) == 4);
    rig_leave(&rig);
    rig_deinit(&rig);
}

/* Two engines of one model, rank 0 of each on another GPU: what one stores is not the other's. */
static void test_two_engines(void)
{
    struct client second;
    struct rig rig;

    rig_init(&rig, &two_gpus);
    rig_attach_gpu(&rig, 0);
    rig_join_gpu(&rig, &second, 2, true, 0, 1);
    rig_store(&rig, 0x101, 4);
    CHECK(rig_l1_slots(&rig, 0) == 4 && rig_l1_slots(&rig, 1) == 0);
    rig_leave(&rig);
    rig.client = second;
    rig_store(&rig, 0x202, 4);
    CHECK(rig_l1_slots(&rig, 0) == 4 && rig_l1_slots(&rig, 1) == 4);
    rig_leave(&rig);
    rig_deinit(&rig);
}

static void refuse(struct rig *rig, int result, enum kvt_code code)
{
    struct client client;

    rig->world.gpu_open_result = result;
    client_begin_attach_gpu(&client, &rig->world, &rig->call, 2, true, 0, 0);
    call_run(&rig->call);
    CHECK_CODE(&rig->call.op, code);
    CHECK(strstr(rig->call.op.message, "regions[0].cuda_ipc") != NULL);
    CHECK(rig->world.gpu_regions == 0);
    client_unmap(&client);
    rig->world.gpu_open_result = 0;
}

static void test_refusals(void)
{
    struct rig rig;

    rig_init(&rig, &two_gpus);
    refuse(&rig, KVT_REGION_E_NO_GPU, KVT_CODE_FAILED_PRECONDITION);
    CHECK(strstr(rig.call.op.message, "result 16") != NULL); /* what the device tier says */
    refuse(&rig, KVT_REGION_E_LOST, KVT_CODE_UNAVAILABLE);
    refuse(&rig, KVT_REGION_E_HANDLE, KVT_CODE_INVALID_ARGUMENT);
    refuse(&rig, KVT_REGION_E_OUTSIDE, KVT_CODE_INVALID_ARGUMENT);
    refuse(&rig, KVT_REGION_E_MANY, KVT_CODE_RESOURCE_EXHAUSTED);
    CHECK(strstr(rig.call.op.message, "result 20") != NULL);
    refuse(&rig, -ENOMEM, KVT_CODE_RESOURCE_EXHAUSTED);
    refuse(&rig, -EIO, KVT_CODE_UNAVAILABLE);
    rig_deinit(&rig);
}

/* What is refused anyway is not opened; what was opened before a refusal is closed; a scheduler
 * without a rank may have such memory, too. */
static void test_bad_requests(void)
{
    struct client client;
    struct rig rig;

    rig_init(&rig, &two_gpus);
    rig.world.gpu_open_result = KVT_REGION_E_HANDLE; /* would be told if it was opened */
    client_begin_attach_gpu(&client, &rig.world, &rig.call, 1, true, 0, 0);
    rig.call.op.req.attach.rank = 7;
    call_run(&rig.call);
    CHECK_CODE(&rig.call.op, KVT_CODE_INVALID_ARGUMENT);
    CHECK(strstr(rig.call.op.message, "rank 7") != NULL);
    client_unmap(&client);
    rig.world.gpu_open_result = 0;
    client_begin_attach_gpu(&client, &rig.world, &rig.call, 1, true, 0, 0);
    ((struct kvt_api_piece *)(uintptr_t)rig.call.op.req.attach.layouts[0].pieces)[0].offset_bytes =
        UINT64_MAX;
    call_run(&rig.call);
    CHECK_CODE(&rig.call.op, KVT_CODE_INVALID_ARGUMENT);
    CHECK(rig.world.gpu_regions == 0);
    client_unmap(&client);
    client_begin_attach_gpu(&client, &rig.world, &rig.call, 1, true, 0, 0);
    rig.call.op.req.attach.rank = KVT_RANK_NONE;
    call_run(&rig.call);
    CHECK_CODE(&rig.call.op, KVT_CODE_OK);
    client.session = rig.call.op.ans.attach.session;
    rig_part(&rig, &client);
    rig_deinit(&rig);
}

/* All sessions are taken: nothing is opened for one more. */
static void test_too_many_sessions(void)
{
    static struct client clients[KVT_SESSIONS_MAX];
    struct client client;
    struct rig rig;

    rig_init(&rig, &two_gpus);
    for (uint32_t i = 0; i < KVT_SESSIONS_MAX; i++)
        client_attach(&clients[i], &rig.world, &rig.call, 1, true, KVT_RANK_NONE);
    rig.world.gpu_open_result = KVT_REGION_E_HANDLE; /* would be told if it was opened */
    client_begin_attach_gpu(&client, &rig.world, &rig.call, 2, true, 0, 0);
    call_run(&rig.call);
    CHECK_CODE(&rig.call.op, KVT_CODE_RESOURCE_EXHAUSTED);
    CHECK(strstr(rig.call.op.message, "256 sessions") != NULL);
    client_unmap(&client);
    rig.world.gpu_open_result = 0;
    for (uint32_t i = 0; i < KVT_SESSIONS_MAX; i++)
        client_detach(&clients[i], &rig.call);
    rig_attach_gpu(&rig, 0);
    rig_leave(&rig);
    rig_deinit(&rig);
}

static void test_too_large(void)
{
    struct world_config config = two_gpus;
    struct client client;
    struct rig rig;

    config.payload_bytes_max = 4095;
    rig_init(&rig, &config);
    client_begin_attach_gpu(&client, &rig.world, &rig.call, 1, true, 0, 0);
    call_run(&rig.call);
    CHECK_CODE(&rig.call.op, KVT_CODE_FAILED_PRECONDITION);
    CHECK(strstr(rig.call.op.message, "tiers.l1.staging") != NULL);
    client_unmap(&client);
    /* In host memory it is served, from L2. */
    client_attach(&rig.client, &rig.world, &rig.call, 1, true, 0);
    rig_store(&rig, 0x101, 2);
    CHECK(rig_l1_slots(&rig, 0) + rig_l1_slots(&rig, 1) == 0);
    CHECK(rig_load(&rig, 0x101, 2) == 2);
    rig_leave(&rig);
    rig_deinit(&rig);
}

/* ---- loss ---- */

/* Its session is told once, its moves answer CLIENT_GONE, and attached again it goes on; what was
 * below L1 is still there. Sessions on the other GPU notice nothing. */
static void test_loss(void)
{
    struct client other;
    struct rig rig;

    rig_init(&rig, &two_gpus);
    rig_join_gpu(&rig, &other, 2, true, 0, 0);
    rig_attach_gpu(&rig, 1);
    rig_store(&rig, 0x101, 4);
    rig_lower(&rig, 0x101, 2, KVT_TIER_BIT_L1, KVT_TIER_BIT_L2);
    fake_tier_lose_zone(rig.world.tiers[KVT_TIER_DEVICE], 1);
    for (uint32_t i = 0; i < 20; i++)
        world_turn(&rig.world);
    CHECK(rig.world.notices[KVT_NOTICE_REGIONS_LOST] == 1);
    CHECK(rig_load(&rig, 0x101, 4) == 0);
    CHECK(rig.call.op.ans.promote.moves.results[0][0] == KVT_MOVE_CLIENT_GONE);
    fake_tier_revive_zone(rig.world.tiers[KVT_TIER_DEVICE], 1);
    rig_leave(&rig);
    rig_attach_gpu(&rig, 1);
    CHECK(rig_load(&rig, 0x101, 4) == 2);
    rig_store(&rig, 0x202, 4);
    CHECK(rig_load(&rig, 0x202, 4) == 4);
    CHECK(rig.world.notices[KVT_NOTICE_REGIONS_LOST] == 1);
    rig_leave(&rig);
    rig_part(&rig, &other);
    rig_deinit(&rig);
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
    struct rig rig;

    config.before_gpu_open = lose_while_opening;
    rig_init(&rig, &config);
    client_begin_attach_gpu(&client, &rig.world, &rig.call, 1, true, 0, 0);
    call_run(&rig.call);
    CHECK_CODE(&rig.call.op, KVT_CODE_UNAVAILABLE);
    client_unmap(&client);
    fake_tier_revive_zone(rig.world.tiers[KVT_TIER_DEVICE], 0);
    rig_deinit(&rig);
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

static void submit_attach(struct rig *rig)
{
    client_begin_attach_gpu(&rig->client, &rig->world, &rig->call, 1, true, 0, 0);
    rig->call.op.done = on_answer;
    call_submit(&rig->call);
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

static void end_attach(struct rig *rig, enum kvt_code code)
{
    CHECK(sem_post(&may_open) == 0);
    await_answer(&rig->call, code);
}

static void detach(struct rig *rig, struct client *client)
{
    call_begin(&rig->call, KVT_OP_DETACH);
    rig->call.op.req.detach.session = client->session;
    rig->call.op.done = on_answer;
    call_submit(&rig->call);
    await_answer(&rig->call, KVT_CODE_OK);
    client_unmap(client);
}

static void start_engine(struct rig *rig, struct kvt_doorbell *doorbell, pthread_t *ret_thread,
                         void (*before_gpu_open)(struct world *world))
{
    struct world_config config = two_gpus;

    CHECK(kvt_doorbell_init(doorbell) == 0);
    CHECK(sem_init(&may_open, 0, 0) == 0 && sem_init(&is_opening, 0, 0) == 0 &&
          sem_init(&is_answered, 0, 0) == 0);
    config.doorbell = doorbell;
    config.before_gpu_open = before_gpu_open;
    rig_init(rig, &config);
    rig->world.now_ns = kvt_clock_mono_ns() + 600 * KVT_NS_PER_S; /* no deadline is near */
    CHECK(pthread_create(ret_thread, NULL, engine_main, rig->world.engine) == 0);
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
    struct rig rig;
    pthread_t thread;

    start_engine(&rig, &doorbell, &thread, wait_to_open);
    submit_attach(&rig);
    end_attach(&rig, KVT_CODE_OK);
    rig.client.session = rig.call.op.ans.attach.session;
    detach(&rig, &rig.client);

    /* Its answer does not wait for the driver. */
    submit_attach(&rig);
    atomic_store(&rig.call.op.is_cancelled, true);
    rig.world.service.cancel(rig.world.service.ctx, &rig.call.op);
    await_answer(&rig.call, KVT_CODE_CANCELLED);
    cancelled = rig.client;
    CHECK(sem_post(&may_open) == 0);

    submit_attach(&rig);
    client_unmap(&cancelled); /* it was opened, and put back */
    rig.world.gpu_open_result = KVT_REGION_E_HANDLE;
    end_attach(&rig, KVT_CODE_INVALID_ARGUMENT);
    rig.world.gpu_open_result = 0;
    client_unmap(&rig.client);

    submit_attach(&rig);
    kvt_engine_stop(rig.world.engine, 0);
    end_attach(&rig, KVT_CODE_UNAVAILABLE);
    join_engine(thread);
    client_unmap(&rig.client);
    CHECK(rig.world.gpu_regions == 0);
    rig_free(&rig);
    kvt_doorbell_deinit(&doorbell);
}

/* The driver does not come back: the engine stops without it and without what it may still use, nor
 * does it close on a GPU what else is open. What comes back after all touches nothing of that. */
static void test_driver_hangs(void)
{
    static struct rig rig; /* the thread that is left behind looks at it */
    const struct timespec pause = {.tv_nsec = 50 * 1000 * 1000};
    struct kvt_doorbell doorbell;
    struct client attached;
    pthread_t thread;

    start_engine(&rig, &doorbell, &thread, wait_to_open);
    submit_attach(&rig);
    end_attach(&rig, KVT_CODE_OK);
    attached = rig.client;
    submit_attach(&rig);
    kvt_engine_stop(rig.world.engine, 0);
    await_answer(&rig.call, KVT_CODE_UNAVAILABLE);
    CHECK(strstr(rig.call.op.message, "stopping") != NULL);
    join_engine(thread);
    client_unmap(&rig.client);
    client_unmap(&attached);
    rig.world.engine = kvt_engine_free(rig.world.engine);
    CHECK(rig.world.gpu_regions == 1);
    rig.world.gpu_regions = 0; /* it ends with the process */
    rig.world.gpu_open_result = -EIO;
    rig_free(&rig);
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
    struct rig rig;
    pthread_t thread;

    start_engine(&rig, &doorbell, &thread, count_and_wait);
    submit_attach(&rig);
    end_attach(&rig, KVT_CODE_OK);
    gone = rig.client;
    gone.session = rig.call.op.ans.attach.session;
    call_init(&later, &rig.world);
    client_begin_attach_gpu(&first, &rig.world, &later, 2, true, 0, 0);
    later.op.done = on_answer;
    call_submit(&later);
    CHECK(sem_wait(&is_opening) == 0);
    detach(&rig, &gone); /* there is work for the janitor, which is opening */
    client_begin_attach_gpu(&rig.client, &rig.world, &rig.call, 3, true, 0, 0);
    rig.call.op.done = on_answer;
    call_submit(&rig.call);
    CHECK(sem_post(&may_open) == 0);
    await_answer(&later, KVT_CODE_OK);
    CHECK(sem_wait(&is_opening) == 0);
    CHECK(regions_seen == 1); /* the one that was opened in between, not the one that went */
    end_attach(&rig, KVT_CODE_OK);
    rig.client.session = rig.call.op.ans.attach.session;
    detach(&rig, &rig.client);
    first.session = later.op.ans.attach.session;
    detach(&rig, &first);
    kvt_engine_stop(rig.world.engine, 0);
    join_engine(thread);
    call_deinit(&later);
    rig_free(&rig);
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
