/* One engine process: opens the daemon, declares the model, attaches a scheduler and its ranks,
 * runs its workers, leaves. It may be killed at any moment: what counts lies in shared memory, what
 * it held in the daemon goes with its sessions. */
#include "tools/kvtier-bench/engine.h"

#include <stdio.h>
#include <string.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

#include "daemon/base/alloc.h"
#include "daemon/base/clock.h"

#define ATTACH_ARENA_BYTES (32u << 20)

static struct kvt_text text_of(const char *text)
{
    return (struct kvt_text){text, (uint32_t)strlen(text)};
}

/* ---- attaching ------------------------------------------------------------------------------- */

static void begin_op(struct kvt_op *op, struct kvt_arena *arena, enum kvt_op_kind kind)
{
    kvt_arena_reset(arena);
    memset(op, 0, sizeof(*op));
    op->kind = kind;
    op->arena = arena;
}

static int refused(struct bench_engine *engine, const struct kvt_op *op, const char *what)
{
    bool may_come_back = op->code == KVT_CODE_UNAVAILABLE || op->code == KVT_CODE_NOT_FOUND ||
                         op->code == KVT_CODE_RESOURCE_EXHAUSTED ||
                         op->code == KVT_CODE_DEADLINE_EXCEEDED ||
                         op->code == KVT_CODE_FAILED_PRECONDITION;
    char why[256];

    (void)snprintf(why, sizeof(why), "%s: %.200s (code %d)", what, op->message, (int)op->code);
    bench_give_up(engine, may_come_back ? KVT_BENCH_EXIT_AGAIN : 1, why);
    return -EPROTO;
}

static int open_namespace(struct bench_engine *engine, struct kvt_op *op, struct kvt_arena *arena,
                          struct kvt_handle *ret_ns)
{
    const struct kvt_model *model = engine->model;
    struct kvt_req_open_namespace *req = &op->req.open_namespace;
    struct kvt_text tags[2];
    char engine_block[48], layers[48];

    (void)snprintf(engine_block, sizeof(engine_block), "engine_block_tokens=%u",
                   model->engine_block_tokens);
    (void)snprintf(layers, sizeof(layers), "layers=%u", model->layers);
    tags[0] = text_of(engine_block);
    tags[1] = text_of(layers);
    begin_op(op, arena, KVT_OP_OPEN_NAMESPACE);
    req->block_tokens = model->block_tokens;
    req->ranks = model->ranks;
    req->components_count = model->components_count;
    for (uint32_t c = 0; c < model->components_count; c++)
        req->components[c] = (struct kvt_api_component){
            .kind = (uint32_t)model->components[c].kind,
            .window_tokens = model->components[c].window_tokens,
            .bytes_per_block = model->components[c].block_bytes,
            .name = text_of(model->components[c].name),
        };
    req->model = text_of(engine->options->namespace_name);
    req->revision = text_of(model->preset);
    req->dtype = text_of("oracle");
    req->layout = text_of("pieces");
    req->tags_count = 2;
    req->tags = tags;
    kvt_client_call(engine->client, op);
    if (op->code != KVT_CODE_OK)
        return refused(engine, op, "OpenNamespace");
    *ret_ns = op->ans.open_namespace.ns;
    memcpy(engine->fingerprint, op->ans.open_namespace.fingerprint, KVT_FINGERPRINT_BYTES);
    return 0;
}

/* The layouts of every component in the one region of a rank, in @arena. NULL: no room. */
static struct kvt_api_layout *make_layouts(const struct bench_engine *engine,
                                           struct kvt_arena *arena)
{
    const struct kvt_model *model = engine->model;
    struct kvt_api_layout *layouts =
        kvt_arena_array(arena, model->components_count, sizeof(*layouts));

    for (uint32_t c = 0; c < model->components_count && layouts != NULL; c++) {
        const struct kvt_model_component *component = &model->components[c];
        struct kvt_api_piece *pieces =
            kvt_arena_array(arena, component->pieces_count, sizeof(*pieces));

        if (pieces == NULL)
            return NULL;
        for (uint32_t p = 0; p < component->pieces_count; p++)
            pieces[p] = (struct kvt_api_piece){
                .bytes = component->piece_bytes,
                .offset_bytes = kvt_bench_pool_piece_offset(&engine->pool, c, p),
                .stride_bytes = 2ull * component->piece_bytes,
            };
        layouts[c] = (struct kvt_api_layout){
            .component = c,
            .engine_blocks_per_block = component->engine_blocks_per_block,
            .pieces_count = component->pieces_count,
            .pieces = pieces,
        };
    }
    return layouts;
}

struct attach_as {
    struct kvt_handle ns;
    const uint8_t *engine_id;
    uint32_t rank; /* KVT_RANK_NONE: the scheduler */
};

static int add_region(struct bench_engine *engine, struct kvt_op *op, struct kvt_arena *arena,
                      uint32_t rank)
{
    struct kvt_req_attach *req = &op->req.attach;
    char why[160] = "", text[256];
    int r = kvt_client_send_region(engine->client, engine->pool.memfds[rank], engine->pool.bytes,
                                   req->regions[0].token, why, sizeof(why));

    if (r < 0) {
        (void)snprintf(text, sizeof(text), "region: %s (%s)", why, strerror(-r));
        bench_give_up(engine, r == -EINVAL ? 1 : KVT_BENCH_EXIT_AGAIN, text);
        return kvt_trace(r);
    }
    req->regions_count = 1;
    req->regions[0].bytes = engine->pool.bytes;
    req->layouts = make_layouts(engine, arena);
    req->layouts_count = engine->model->components_count;
    return req->layouts == NULL ? kvt_trace(-ENOMEM) : 0;
}

static int attach(struct bench_engine *engine, struct kvt_op *op, struct kvt_arena *arena,
                  const struct attach_as *as)
{
    bool is_scheduler = as->rank == KVT_RANK_NONE;
    struct kvt_req_attach *req = &op->req.attach;
    struct kvt_session *session;
    char name[64];
    int r = 0;

    (void)snprintf(name, sizeof(name), "kvtier-bench pid %d", (int)getpid());
    begin_op(op, arena, KVT_OP_ATTACH);
    req->ns = as->ns;
    memcpy(req->engine_id, as->engine_id, KVT_ENGINE_ID_BYTES);
    req->is_scheduler = is_scheduler;
    req->rank = as->rank;
    req->api_version = 1;
    req->name = text_of(name);
    if (!is_scheduler)
        r = add_region(engine, op, arena, as->rank);
    if (r < 0)
        return kvt_trace(r);
    session = kvt_client_attach(engine->client, op);
    if (session == NULL)
        return refused(engine, op, "Attach");
    if (is_scheduler) {
        engine->scheduler = session;
        engine->scheduler_handle = op->ans.attach.session;
    } else {
        engine->rank_sessions[as->rank] = session;
        engine->rank_handles[as->rank] = op->ans.attach.session;
    }
    return 0;
}

static int attach_all(struct bench_engine *engine)
{
    struct kvt_arena arena = KVT_ARENA_NULL;
    kvt_autofree struct kvt_op *op = kvt_alloc_zeroed(1, sizeof(*op));
    uint8_t engine_id[KVT_ENGINE_ID_BYTES];
    struct attach_as as = {.engine_id = engine_id, .rank = KVT_RANK_NONE};
    int r = kvt_arena_init(&arena, ATTACH_ARENA_BYTES, 0);

    if (r < 0 || op == NULL)
        return kvt_trace(-ENOMEM);
    if (getrandom(engine_id, sizeof(engine_id), 0) != (ssize_t)sizeof(engine_id))
        r = -EIO;
    if (r == 0)
        r = open_namespace(engine, op, &arena, &as.ns);
    if (r == 0)
        r = attach(engine, op, &arena, &as);
    for (as.rank = 0; as.rank < engine->model->ranks && r == 0; as.rank++)
        r = attach(engine, op, &arena, &as);
    kvt_arena_deinit(&arena);
    return r;
}

/* ---- workers --------------------------------------------------------------------------------- */

static int worker_init(struct bench_worker *worker, struct bench_engine *engine, uint32_t idx)
{
    uint64_t tokens =
        (uint64_t)engine->workload->input_tokens_max +
        (engine->options->is_storing_output ? engine->workload->output_tokens_max : 0);
    int r = kvt_arena_init(&worker->arena, KVT_OP_ARENA_BYTES_MAX, KVT_OP_ARENA_BYTES_MAX);

    if (r < 0)
        return kvt_trace(r);
    worker->engine = engine;
    worker->worker_idx = idx;
    worker->tokens = kvt_alloc_zeroed(tokens + 1, sizeof(*worker->tokens));
    worker->chains = kvt_alloc_zeroed(engine->blocks_max + 1, sizeof(*worker->chains));
    worker->cursors = kvt_alloc_zeroed(BENCH_CURSORS, sizeof(*worker->cursors));
    if (worker->tokens == NULL || worker->chains == NULL || worker->cursors == NULL)
        return kvt_trace(-ENOMEM);
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
    kvt_arena_deinit(&worker->arena);
    kvt_free(worker->tokens);
    kvt_free(worker->chains);
    kvt_free(worker->cursors);
    for (uint32_t c = 0; c < KVT_COMPONENTS_MAX; c++) {
        kvt_free(worker->states[c]);
        kvt_free(worker->ids[c]);
        kvt_free(worker->move_idx[c]);
        kvt_free(worker->move_ids[c]);
    }
}

static uint32_t owner_of(const struct bench_engine *engine, uint64_t request_idx)
{
    uint32_t workers = engine->options->engines * engine->options->concurrency;
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
        if (owner_of(engine, i) != mine)
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
    uint64_t blocks[KVT_COMPONENTS_MAX] = {0}, wanted, given = engine->options->pool_bytes;

    for (uint32_t c = 0; c < model->components_count; c++) {
        const struct kvt_model_component *component = &model->components[c];
        uint64_t most = engine->blocks_max + 1;

        if (component->kind != KVT_MODEL_FULL)
            most = KVT_MIN(most, 4 * (component->window_tokens / model->block_tokens + 2ull));
        blocks[c] = most * engine->options->concurrency;
    }
    wanted = kvt_bench_pool_bytes(model, blocks);
    if (given != 0 && given < wanted) {
        char why[128];

        (void)snprintf(why, sizeof(why), "--pool-bytes %llu is too small: requests need %llu",
                       (unsigned long long)given, (unsigned long long)wanted);
        bench_give_up(engine, 2, why);
        return -EINVAL;
    }
    if (given != 0) /* more of everything, in the same proportion */
        for (uint32_t c = 0; c < model->components_count; c++)
            blocks[c] = (uint64_t)((double)blocks[c] * (double)given / (double)wanted);
    return kvt_bench_pool_init(&engine->pool, model, blocks,
                               engine->options->seed + engine->engine_idx);
}

static int run(struct bench_engine *engine)
{
    struct kvt_client_config config = {.socket_path = engine->options->socket_path,
                                       .deadline_ns = engine->options->deadline_ns};
    char why[256];
    int r = make_pool(engine);

    if (r == 0) {
        r = kvt_client_open(&engine->client, &config);
        (void)snprintf(why, sizeof(why), "no daemon at %.150s (%s): is kvtierd running?",
                       config.socket_path, r < 0 ? strerror(-r) : "");
        if (r < 0)
            bench_give_up(engine, KVT_BENCH_EXIT_AGAIN, why);
    }
    if (r == 0)
        r = attach_all(engine);
    if (r == 0)
        r = run_workers(engine);
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
    };
    uint64_t tokens = workload->input_tokens_max;
    int r;

    if (options->is_storing_output)
        tokens += workload->output_tokens_max;
    engine.blocks_max = tokens / model->block_tokens;
    kvt_client_library_init();
    r = run(&engine);
    for (uint32_t rank = 0; rank < model->ranks; rank++)
        engine.rank_sessions[rank] = kvt_session_detach(engine.rank_sessions[rank]);
    engine.scheduler = kvt_session_detach(engine.scheduler);
    engine.client = kvt_client_close(engine.client);
    kvt_client_library_deinit();
    kvt_bench_pool_deinit(&engine.pool);
    if (r < 0)
        bench_give_up(&engine, 1, strerror(-r));
    return atomic_load(&engine.exit_status);
}
