/* Attaches whose memory on a GPU the driver does not open in time: each is answered at its own
 * deadline, wherever the driver is, what comes back later is closed, what was not begun is never
 * opened, and a stop waits for none of it. The engine runs on its own thread and on the real clock,
 * the driver is a function that waits for the test. */
#include <pthread.h>
#include <semaphore.h>
#include <string.h>
#include <time.h>

#include "daemon/base/clock.h"
#include "tests/common/check.h"
#include "tests/common/engine_world.h"

#define SHORT_NS (300 * KVT_NS_PER_MS)
#define LONG_NS (600 * KVT_NS_PER_S) /* never reached */
#define PATIENCE_S 60
#define OPENINGS_MAX 64u /* at a time, of the engine */

static sem_t is_opening, may_open;
static _Atomic uint32_t openings;
static atomic_bool is_open_quick; /* the driver does not wait */

static void wait_to_open(struct world *world)
{
    (void)world;
    atomic_fetch_add(&openings, 1);
    if (atomic_load(&is_open_quick))
        return;
    CHECK(sem_post(&is_opening) == 0);
    CHECK(sem_wait(&may_open) == 0);
}

static void await(sem_t *sem)
{
    struct timespec until;

    CHECK(clock_gettime(CLOCK_REALTIME, &until) == 0);
    until.tv_sec += PATIENCE_S;
    CHECK(sem_timedwait(sem, &until) == 0);
}

struct attach {
    struct client client;
    struct call call;
    sem_t is_answered;
    uint64_t deadline_ns, answered_ns;
};

struct fixture {
    struct world world;
    struct kvt_doorbell doorbell;
    pthread_t engine;
};

static void *engine_main(void *ctx)
{
    kvt_engine_run(ctx);
    return NULL;
}

static void setup(struct fixture *fix)
{
    struct world_config config = {.seed = 12,
                                  .l1_bytes = 512u << 10,
                                  .l2_bytes = 1u << 20,
                                  .ranks = 1,
                                  .gpus = 1,
                                  .doorbell = &fix->doorbell,
                                  .before_gpu_open = wait_to_open};

    CHECK(kvt_doorbell_init(&fix->doorbell) == 0);
    CHECK(sem_init(&is_opening, 0, 0) == 0 && sem_init(&may_open, 0, 0) == 0);
    atomic_store(&openings, 0);
    atomic_store(&is_open_quick, false);
    world_init(&fix->world, &config);
    CHECK(pthread_create(&fix->engine, NULL, engine_main, fix->world.engine) == 0);
}

static void stop_engine(struct fixture *fix)
{
    struct timespec until;

    kvt_engine_stop(fix->world.engine, 0);
    CHECK(clock_gettime(CLOCK_REALTIME, &until) == 0);
    until.tv_sec += PATIENCE_S;
    CHECK(pthread_timedjoin_np(fix->engine, NULL, &until) == 0);
}

static void on_answer(struct kvt_op *op)
{
    struct call *call = op->server;
    struct attach *attach = KVT_CONTAINER_OF(call, struct attach, call);

    attach->answered_ns = kvt_clock_mono_ns();
    call->is_busy = false;
    call->is_done = true;
    CHECK(sem_post(&attach->is_answered) == 0);
}

static void begin(struct fixture *fix, struct attach *attach, uint8_t engine, uint64_t within_ns)
{
    CHECK(sem_init(&attach->is_answered, 0, 0) == 0);
    call_init(&attach->call, &fix->world);
    client_begin_attach_gpu(&attach->client, &fix->world, &attach->call, engine, true, 0, 0);
    attach->deadline_ns = kvt_clock_mono_ns() + within_ns;
    attach->call.op.deadline_ns = attach->deadline_ns;
    attach->call.op.done = on_answer;
    call_submit(&attach->call);
}

static void expect_late(struct attach *attach)
{
    await(&attach->is_answered);
    CHECK_CODE(&attach->call.op, KVT_CODE_DEADLINE_EXCEEDED);
    CHECK(strstr(attach->call.op.message, "in time") != NULL);
    CHECK(attach->answered_ns + 10 * KVT_NS_PER_MS >= attach->deadline_ns); /* not before it */
}

static void end(struct attach *attach)
{
    client_unmap(&attach->client);
    call_deinit(&attach->call);
}

static void detach(struct attach *attach)
{
    attach->client.session = attach->call.op.ans.attach.session;
    call_begin(&attach->call, KVT_OP_DETACH);
    attach->call.op.req.detach.session = attach->client.session;
    attach->call.op.done = on_answer;
    call_submit(&attach->call);
    await(&attach->is_answered);
    CHECK_CODE(&attach->call.op, KVT_CODE_OK);
}

/* The driver comes back after the answers: the first one's memory is closed, the second one's was
 * never opened, and the third, which could wait, is served. */
static void test_comes_back(void)
{
    struct attach hung, behind, patient;
    struct fixture fix;

    setup(&fix);
    begin(&fix, &hung, 1, SHORT_NS);
    await(&is_opening);
    begin(&fix, &behind, 2, SHORT_NS);
    begin(&fix, &patient, 3, LONG_NS);
    expect_late(&hung);
    expect_late(&behind);
    CHECK(sem_post(&may_open) == 0);
    await(&is_opening);
    CHECK(sem_post(&may_open) == 0);
    await(&patient.is_answered);
    CHECK_CODE(&patient.call.op, KVT_CODE_OK);
    CHECK(atomic_load(&openings) == 2);
    detach(&patient);
    stop_engine(&fix);
    CHECK(fix.world.gpu_regions == 0); /* all that was opened is closed */
    end(&hung);
    end(&behind);
    end(&patient);
    world_deinit(&fix.world);
    kvt_doorbell_deinit(&fix.doorbell);
}

/* It does not come back: neither do the answers wait for it, nor a stop. */
static void test_never_comes_back(void)
{
    static struct fixture fix; /* the thread that is left behind looks at it */
    const struct timespec pause = {.tv_nsec = 50 * 1000 * 1000};
    struct attach hung, behind;

    setup(&fix);
    begin(&fix, &hung, 1, SHORT_NS);
    await(&is_opening);
    begin(&fix, &behind, 2, SHORT_NS);
    expect_late(&hung);
    expect_late(&behind);
    stop_engine(&fix);
    end(&hung);
    end(&behind);
    fix.world.gpu_open_result = -EIO; /* should it come back */
    world_deinit(&fix.world);
    kvt_doorbell_deinit(&fix.doorbell);
    CHECK(sem_post(&may_open) == 0);
    (void)nanosleep(&pause, NULL);
    CHECK(atomic_load(&openings) == 1);
}

static bool is_served(struct attach *attach)
{
    await(&attach->is_answered);
    if (attach->call.op.code == KVT_CODE_OK)
        return true;
    CHECK_CODE(&attach->call.op, KVT_CODE_RESOURCE_EXHAUSTED);
    end(attach);
    return false;
}

/* All places for openings are taken by what hangs: the next Attach hears so at once, and is served
 * when the driver is back. */
static void test_all_hang(void)
{
    static struct attach hung[OPENINGS_MAX];
    const struct timespec pause = {.tv_nsec = 1000 * 1000};
    struct attach next;
    struct fixture fix;

    setup(&fix);
    for (uint8_t i = 0; i < KVT_COUNT_OF(hung); i++)
        begin(&fix, &hung[i], (uint8_t)(i + 1), SHORT_NS);
    for (uint32_t i = 0; i < KVT_COUNT_OF(hung); i++)
        expect_late(&hung[i]);
    begin(&fix, &next, 100, LONG_NS);
    CHECK(!is_served(&next));
    atomic_store(&is_open_quick, true);
    CHECK(sem_post(&may_open) == 0);
    for (begin(&fix, &next, 101, LONG_NS); !is_served(&next); begin(&fix, &next, 101, LONG_NS))
        (void)nanosleep(&pause, NULL);
    CHECK(atomic_load(&openings) == 2); /* of those that were answered only what hung */
    detach(&next);
    stop_engine(&fix);
    CHECK(fix.world.gpu_regions == 0);
    end(&next);
    for (uint32_t i = 0; i < KVT_COUNT_OF(hung); i++)
        end(&hung[i]);
    world_deinit(&fix.world);
    kvt_doorbell_deinit(&fix.doorbell);
}

int main(void)
{
    test_comes_back();
    test_all_hang();
    test_never_comes_back();
    return 0;
}
