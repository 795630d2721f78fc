/* Runs bodies.h on host threads. A launch is a loop over blocks and threads; since no thread of a
 * kernel waits for another inside a body, any order is one that a GPU could have chosen. What a
 * block of threads agrees upon (the scale of a head) is a loop over its threads between two bodies.
 *
 * KVT_SHIM_THREADS deals a block's threads out to host threads round robin: lanes that move one
 * unit together run at the same time. Quantisation deals out whole blocks instead. */
#include "kernels/shim_tables.h"

#include <pthread.h>

#include "kernels/args.h"
#include "kernels/shape.h"
#include "kernels/shim.h"

#include "kernels/bodies.h"

#define HOST_THREADS 4u
#define FEW_BLOCKS 3u

struct launch {
    struct kvt_shape shape;
    uint32_t host_threads;
    /* One of the two is set: of a thread, or of a block. */
    void (*thread)(const struct kvt_at *at, const struct launch *launch);
    void (*block)(const struct kvt_at *at, const struct launch *launch);
    union {
        const struct kvt_copy_batch *copy;
        const struct kvt_check_batch *check;
        const struct kvt_quant_batch *quant;
        const struct kvt_relayout *relayout;
    };
};

struct worker {
    const struct launch *launch;
    uint32_t number;
    pthread_t thread;
};

static void run_block(const struct worker *worker, struct kvt_at *at, uint32_t number)
{
    const struct launch *launch = worker->launch;

    if (launch->block != NULL) {
        if (number % launch->host_threads == worker->number)
            launch->block(at, launch);
        return;
    }
    for (uint32_t t = worker->number; t < at->threads; t += launch->host_threads) {
        at->thread = t;
        launch->thread(at, launch);
    }
}

static void *run_worker(void *arg)
{
    const struct worker *worker = arg;
    const struct kvt_shape *shape = &worker->launch->shape;
    struct kvt_at at = {
        .threads = shape->threads, .blocks_x = shape->blocks_x, .blocks_y = shape->blocks_y};

    for (at.block_y = 0; at.block_y < at.blocks_y; at.block_y++) {
        for (at.block_x = 0; at.block_x < at.blocks_x; at.block_x++)
            run_block(worker, &at, at.block_y * at.blocks_x + at.block_x);
    }
    return NULL;
}

static int run(struct launch *launch, enum kvt_shim_kind kind)
{
    struct worker workers[HOST_THREADS];
    uint32_t started = 1;

    launch->host_threads = kind == KVT_SHIM_THREADS ? HOST_THREADS : 1;
    for (uint32_t i = 0; i < launch->host_threads; i++)
        workers[i] = (struct worker){.launch = launch, .number = i};
    for (; started < launch->host_threads; started++) {
        int r = pthread_create(&workers[started].thread, NULL, run_worker, &workers[started]);

        KVT_ASSERT(r == 0);
    }
    (void)run_worker(&workers[0]);
    while (started > 1)
        (void)pthread_join(workers[--started].thread, NULL);
    return 0;
}

static uint32_t blocks_max(enum kvt_shim_kind kind)
{
    return kind == KVT_SHIM_FEW ? FEW_BLOCKS : KVT_SHAPE_BLOCKS_MAX;
}

/* ---- what a thread or a block does -------------------------------------------------------------
 */

static void gather_thread(const struct kvt_at *at, const struct launch *launch)
{
    kvt_copy_body(at, launch->copy, &launch->shape, 1);
}

static void scatter_thread(const struct kvt_at *at, const struct launch *launch)
{
    kvt_copy_body(at, launch->copy, &launch->shape, 0);
}

static void check_thread(const struct kvt_at *at, const struct launch *launch)
{
    kvt_check_body(at, launch->check);
}

static void relayout_thread(const struct kvt_at *at, const struct launch *launch)
{
    kvt_relayout_body(at, launch->relayout, &launch->shape);
}

static void quantise_head(struct kvt_at *at, const struct kvt_head *head)
{
    uint32_t most = 0;

    for (at->thread = 0; at->thread < at->threads; at->thread++) {
        uint32_t magnitude = kvt_head_magnitude(at, head);

        most = KVT_MAX(most, magnitude);
    }
    for (at->thread = 0; at->thread < at->threads; at->thread++)
        kvt_head_encode(at, head, kvt_quant_scale(most, head->is_bf16, head->is_int8));
}

static void quantise_block(const struct kvt_at *where, const struct launch *launch)
{
    const struct kvt_quant_batch *batch = launch->quant;
    const struct kvt_quant_job *jobs = (const void *)(uintptr_t)batch->jobs;
    struct kvt_at at = *where;

    for (uint32_t j = at.block_y; j < batch->jobs_count; j += at.blocks_y) {
        const struct kvt_quant_job *job = &jobs[j];
        const uint32_t heads_count = (job->end_plane - job->first_plane) * batch->spec.heads;

        for (at.thread = 0; at.thread < at.threads; at.thread++)
            kvt_quant_gaps(&at, &batch->spec, job);
        for (uint32_t n = at.block_x; n < heads_count; n += at.blocks_x) {
            struct kvt_head head;

            kvt_head_of(&batch->spec, job, n, &head);
            quantise_head(&at, &head);
        }
    }
}

static void dequantise_thread(const struct kvt_at *at, const struct launch *launch)
{
    const struct kvt_quant_spec *spec = &launch->quant->spec;

    kvt_dequantise_body(at, launch->quant, spec->elem == KVT_ELEM_BF16,
                        spec->kind == KVT_QUANT_INT8);
}

/* ---- launches ----------------------------------------------------------------------------------
 */

static int launch_copy(const struct kvt_copy_batch *batch, enum kvt_shim_kind kind, bool is_gather)
{
    struct launch launch = {.thread = is_gather ? gather_thread : scatter_thread, .copy = batch};
    int r = kvt_jobs_copy(batch);

    if (r != 0 || batch->jobs_count == 0)
        return r;
    launch.shape = kvt_shape_copy(batch, blocks_max(kind));
    return run(&launch, kind);
}

static int launch_check(const struct kvt_check_batch *batch, enum kvt_shim_kind kind)
{
    struct launch launch = {.thread = check_thread, .check = batch};
    int r = kvt_jobs_check(batch);

    if (r != 0 || batch->jobs_count == 0 || batch->bytes_max == 0)
        return r;
    launch.shape = kvt_shape_check(batch, blocks_max(kind));
    return run(&launch, kind);
}

static int launch_quant(const struct kvt_quant_batch *batch, enum kvt_shim_kind kind,
                        bool is_quantise)
{
    struct launch launch = {.thread = is_quantise ? NULL : dequantise_thread,
                            .block = is_quantise ? quantise_block : NULL,
                            .quant = batch};
    int r = kvt_jobs_quant(batch);

    if (r != 0 || batch->jobs_count == 0)
        return r;
    launch.shape = kvt_shape_quant(batch, blocks_max(kind));
    return run(&launch, kind);
}

static int launch_relayout(const struct kvt_relayout *change, enum kvt_shim_kind kind)
{
    struct launch launch = {.thread = relayout_thread, .relayout = change};
    int r = kvt_args_relayout(change);

    if (r != 0)
        return r;
    launch.shape = kvt_shape_relayout(change, blocks_max(kind));
    return run(&launch, kind);
}

/* A table's functions have no word of its kind: one set of them a kind. */
#define SHIM_DEFINE(suffix, kind)                                                                  \
    static int gather_##suffix(void *stream, const struct kvt_copy_batch *batch)                   \
    {                                                                                              \
        (void)stream;                                                                              \
        return launch_copy(batch, kind, true);                                                     \
    }                                                                                              \
    static int scatter_##suffix(void *stream, const struct kvt_copy_batch *batch)                  \
    {                                                                                              \
        (void)stream;                                                                              \
        return launch_copy(batch, kind, false);                                                    \
    }                                                                                              \
    static int check_##suffix(void *stream, const struct kvt_check_batch *batch)                   \
    {                                                                                              \
        (void)stream;                                                                              \
        return launch_check(batch, kind);                                                          \
    }                                                                                              \
    static int quantise_##suffix(void *stream, const struct kvt_quant_batch *batch)                \
    {                                                                                              \
        (void)stream;                                                                              \
        return launch_quant(batch, kind, true);                                                    \
    }                                                                                              \
    static int dequantise_##suffix(void *stream, const struct kvt_quant_batch *batch)              \
    {                                                                                              \
        (void)stream;                                                                              \
        return launch_quant(batch, kind, false);                                                   \
    }                                                                                              \
    static int relayout_##suffix(void *stream, const struct kvt_relayout *change)                  \
    {                                                                                              \
        (void)stream;                                                                              \
        return launch_relayout(change, kind);                                                      \
    }                                                                                              \
    static const struct kvt_kernels kernels_##suffix = {                                           \
        .name = "shim, " #suffix,                                                                  \
        .gather = gather_##suffix,                                                                 \
        .scatter = scatter_##suffix,                                                               \
        .check = check_##suffix,                                                                   \
        .quantise = quantise_##suffix,                                                             \
        .dequantise = dequantise_##suffix,                                                         \
        .relayout = relayout_##suffix,                                                             \
    }

SHIM_DEFINE(plain, KVT_SHIM_PLAIN);
SHIM_DEFINE(few, KVT_SHIM_FEW);
SHIM_DEFINE(threads, KVT_SHIM_THREADS);

void kvt_shim_traffic_take(struct kvt_shim_traffic *ret_traffic)
{
    *ret_traffic = shim_traffic;
    shim_traffic = (struct kvt_shim_traffic){0};
}

const struct kvt_kernels *kvt_kernels_shim(enum kvt_shim_kind kind)
{
    static const struct kvt_kernels *const tables[KVT_SHIM_KINDS] = {
        [KVT_SHIM_PLAIN] = &kernels_plain,
        [KVT_SHIM_FEW] = &kernels_few,
        [KVT_SHIM_THREADS] = &kernels_threads,
    };

    KVT_ASSERT((uint32_t)kind < KVT_SHIM_KINDS);
    return tables[kind];
}
