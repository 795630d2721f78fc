/* One engine process: opens the daemon, declares the model, attaches a scheduler and its ranks,
 * runs its workers, leaves. It may be killed at any moment: what counts lies in shared memory, what
 * it held in the daemon goes with its sessions. */
#include "tools/kvtier-bench/paged.h"

#include <stdio.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>

#include "daemon/base/alloc.h"
#include "daemon/base/clock.h"

/* ---- attaching ------------------------------------------------------------------------------- */

static int attach_all(struct bench_engine *engine)
{
    struct bench_link *link = &engine->link;
    uint8_t engine_id[KVT_ENGINE_ID_BYTES];
    int r = bench_link_open(link);

    if (r == 0 && getrandom(engine_id, sizeof(engine_id), 0) != (ssize_t)sizeof(engine_id))
        r = -EIO;
    if (r == 0)
        r = bench_link_attach(link, engine_id, KVT_RANK_NONE, &engine->scheduler);
    for (uint32_t rank = 0; rank < engine->model->ranks && r == 0; rank++)
        r = bench_link_attach(link, engine_id, rank, &engine->ranks[rank]);
    if (r < 0 && link->exit_status != 0)
        bench_give_up(engine, link->exit_status, link->why);
    return r;
}

/* ---- workers --------------------------------------------------------------------------------- */

static int worker_init(struct bench_worker *worker, struct bench_engine *engine, uint32_t idx)
{
    uint64_t tokens =
        (uint64_t)engine->workload->input_tokens_max +
        (engine->options->is_storing_output ? engine->workload->output_tokens_max : 0);
    int r = bench_caller_init(&worker->call, engine, &worker->stats);

    if (r < 0)
        return kvt_trace(r);
    worker->engine = engine;
    worker->worker_idx = idx;
    worker->tokens = kvt_alloc_zeroed(tokens + 1, sizeof(*worker->tokens));
    worker->chains = kvt_alloc_zeroed(engine->blocks_max + 1, sizeof(*worker->chains));
    if (worker->tokens == NULL || worker->chains == NULL)
        return kvt_trace(-ENOMEM);
    r = bench_cursors_init(&worker->cursors, engine->options->is_without_cursors);
    if (r < 0)
        return kvt_trace(r);
    for (uint32_t c = 0; c < engine->model->components_count; c++) {
        uint64_t each = engine->model->components[c].engine_blocks_per_block;
        uint64_t room = engine->blocks_max + 1;

        worker->states[c] = kvt_alloc_zeroed(room, 1);
        worker->ids[c] = kvt_alloc_zeroed(room * each, sizeof(uint64_t));
        worker->move_idx[c] = kvt_alloc_zeroed(room, sizeof(uint64_t));
        worker->move_ids[c] = kvt_alloc_zeroed(room * each, sizeof(uint64_t));
        if (worker->states[c] == NULL || worker->ids[c] == NULL || worker->move_idx[c] == NULL ||
            worker->move_ids[c] == NULL)
            return kvt_trace(-ENOMEM);
    }
    return engine->options->cancel_every != 0 ? bench_canceller_start(worker) : 0;
}

static void worker_deinit(struct bench_worker *worker)
{
    bench_canceller_stop(worker);
    bench_caller_deinit(&worker->call);
    kvt_free(worker->tokens);
    kvt_free(worker->chains);
    bench_cursors_deinit(&worker->cursors);
    for (uint32_t c = 0; c < KVT_COMPONENTS_MAX; c++) {
        kvt_free(worker->states[c]);
        kvt_free(worker->ids[c]);
        kvt_free(worker->move_idx[c]);
        kvt_free(worker->move_ids[c]);
    }
}

uint32_t bench_owner_of(const struct bench_engine *engine, uint64_t request_idx)
{
    uint32_t workers = engine->options->engines * kvt_bench_workers_each(engine->options);
    uint32_t session = engine->workload->requests[request_idx].session;

    if (session == KVT_SESSION_NONE)
        return (uint32_t)(request_idx % workers);
    return (uint32_t)(((uint64_t)session * 0x9E3779B97F4A7C15ull >> 33) % workers);
}

static void wait_for_arrival(const struct bench_engine *engine, uint64_t request_idx)
{
    double ms =
        (double)engine->workload->requests[request_idx].arrival_ms * engine->options->time_scale;
    uint64_t at_ns = atomic_load(&engine->shared->started_ns) + (uint64_t)(ms * 1e6);
    struct timespec at = {.tv_sec = (time_t)(at_ns / KVT_NS_PER_S),
                          .tv_nsec = (long)(at_ns % KVT_NS_PER_S)};

    if (engine->options->time_scale > 0)
        while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &at, NULL) == EINTR)
            continue;
}

static void *worker_main(void *arg)
{
    struct bench_worker *worker = arg;
    struct bench_engine *engine = worker->engine;
    uint32_t mine = engine->engine_idx * engine->options->concurrency + worker->worker_idx;
    struct kvt_bench_worker_shared *shared = &engine->shared->workers[mine];
    uint32_t valid = atomic_load(&shared->valid_idx);

    worker->stats = shared->versions[valid];
    worker->stats.next_idx = KVT_MAX(worker->stats.next_idx, engine->options->requests_skipped);
    for (uint64_t i = worker->stats.next_idx; i < engine->workload->requests_count; i++) {
        if (bench_owner_of(engine, i) != mine)
            continue;
        wait_for_arrival(engine, i);
        if (atomic_load(&engine->is_stopping) || !bench_request_run(worker, i))
            return NULL;
        worker->stats.next_idx = i + 1;
        valid ^= 1;
        shared->versions[valid] = worker->stats;
        atomic_store_explicit(&shared->valid_idx, valid, memory_order_release);
    }
    return NULL;
}

static int run_workers(struct bench_engine *engine)
{
    uint32_t count = engine->options->concurrency, started = 0;
    struct bench_worker *workers = kvt_alloc_zeroed(count, sizeof(*workers));
    pthread_t threads[KVT_BENCH_CONCURRENCY_MAX];
    int r = workers == NULL ? -ENOMEM : 0;

    for (uint32_t i = 0; i < count && r == 0; i++)
        r = worker_init(&workers[i], engine, i);
    for (; started < count && r == 0; started += r == 0)
        r = -pthread_create(&threads[started], NULL, worker_main, &workers[started]);
    if (r < 0)
        bench_give_up(engine, 1, strerror(-r));
    for (uint32_t i = 0; i < started; i++)
        (void)pthread_join(threads[i], NULL);
    for (uint32_t i = 0; i < count && workers != NULL; i++)
        worker_deinit(&workers[i]);
    kvt_free(workers);
    return r;
}

/* ---- the process ----------------------------------------------------------------------------- */

/* Blocks of a pool in which every worker's request fits at once, whatever its fate. */
static int make_pool(struct bench_engine *engine)
{
    const struct kvt_model *model = engine->model;
    uint64_t blocks[KVT_COMPONENTS_MAX] = {0}, wanted, given = 0;

    for (uint32_t c = 0; c < model->components_count; c++) {
        const struct kvt_model_component *component = &model->components[c];
        uint64_t most = engine->blocks_max + 1;

        if (component->kind != KVT_MODEL_FULL)
            most = KVT_MIN(most, 4 * (component->window_tokens / model->block_tokens + 2ull));
        blocks[c] = most * engine->options->concurrency;
    }
    wanted = kvt_bench_pool_blocks(model, blocks);
    if (engine->options->pool_bytes != 0)
        given = engine->options->pool_bytes / kvt_kv_memory_block_bytes(model);
    if (given != 0 && given < wanted) {
        char why[128];

        (void)snprintf(why, sizeof(why), "--pool-bytes %llu is too small: requests need %llu",
                       (unsigned long long)engine->options->pool_bytes,
                       (unsigned long long)(wanted * kvt_kv_memory_block_bytes(model)));
        bench_give_up(engine, 2, why);
        return -EINVAL;
    }
    return kvt_bench_pool_init(&engine->pool, model, KVT_MAX(given, wanted),
                               engine->options->seed + engine->engine_idx, bench_store_of(engine));
}

struct kvt_kv_store *bench_store_of(struct bench_engine *engine)
{
    return engine->gpu == NULL ? NULL : kvt_gpu_pool_store(engine->gpu);
}

int bench_memory_make(struct bench_engine *engine, struct kvt_kv_memory *memory)
{
    int r = kvt_kv_memory_make(memory);

    if (r < 0)
        bench_give_up(engine, 1, memory->store->why(memory->store));
    return r;
}

static int run(struct bench_engine *engine)
{
    int r = make_pool(engine);

    if (r == 0)
        r = bench_memory_make(engine, &engine->pool.memory);
    kvt_client_library_init();
    if (r == 0)
        r = attach_all(engine);
    if (r == 0)
        r = run_workers(engine);
    for (uint32_t rank = 0; rank < engine->model->ranks; rank++)
        engine->ranks[rank].session = kvt_session_detach(engine->ranks[rank].session);
    engine->scheduler.session = kvt_session_detach(engine->scheduler.session);
    bench_link_close(&engine->link);
    kvt_client_library_deinit();
    kvt_bench_pool_deinit(&engine->pool);
    return r;
}

int kvt_bench_engine_run(const struct kvt_bench_options *options, const struct kvt_model *model,
                         const struct kvt_workload *workload, struct kvt_bench_shared *shared,
                         uint32_t engine_idx)
{
    struct bench_engine engine = {
        .options = options,
        .model = model,
        .workload = workload,
        .shared = shared,
        .engine_idx = engine_idx,
        .link = {.options = options, .model = model, .memory = &engine.pool.memory},
    };
    uint64_t tokens = workload->input_tokens_max;
    int r;

    if (options->is_storing_output || options->is_paged)
        tokens += workload->output_tokens_max;
    engine.blocks_max = tokens / model->block_tokens;
    r = options->is_on_gpu ? kvt_gpu_pool_new(&engine.gpu, options->gpu) : 0;
    engine.link.gpu = engine.gpu;
    if (r == 0)
        r = options->is_paged ? paged_engine_run(&engine) : run(&engine);
    engine.gpu = kvt_gpu_pool_free(engine.gpu);
    if (r < 0)
        bench_give_up(&engine, 1, strerror(-r));
    return atomic_load(&engine.exit_status);
}
