/* The kernels beside the device's own copy of as many bytes, measured in the same rounds. Copies
 * between slots and pools read and write each byte once, as a copy does, so their ratio is of
 * bytes; a check only reads, and quantisation writes half of what it reads. */
#include <string.h>

#include "daemon/base/clock.h"
#include "tools/kvtier-gpu-check/measure.h"

#define POOL_BYTES (256u << 20) /* beyond any cache of a GPU */
#define POOL_BYTES_SMALL (1u << 20)
#define FREE_SHARE 4u /* of the memory that is free, for pool and payloads: one part of so many */

static uint64_t pool_bytes_of(struct gpu_check *check)
{
    uint64_t bytes = check->options.is_small ? POOL_BYTES_SMALL : POOL_BYTES, free_bytes, total;

    if (!gpu_check_ok(check, check->calls->memory_info(&free_bytes, &total), "memory_info"))
        return 0;
    while (bytes > POOL_BYTES_SMALL && bytes * 2 > free_bytes / FREE_SHARE)
        bytes /= 2;
    return bytes;
}

static int queue_copy(struct gpu_check *check, void *arg)
{
    struct gpu_check_pool *pool = arg;

    return check->calls->copy(pool->payload.device, pool->pool.device, pool->bytes, KVT_CUDA_D2D,
                              check->stream);
}

static int queue_gather(struct gpu_check *check, void *arg)
{
    return check->calls->kernels->gather(check->stream, &((struct gpu_check_pool *)arg)->plain);
}

static int queue_gather_checked(struct gpu_check *check, void *arg)
{
    return check->calls->kernels->gather(check->stream, &((struct gpu_check_pool *)arg)->checked);
}

static int queue_scatter(struct gpu_check *check, void *arg)
{
    return check->calls->kernels->scatter(check->stream, &((struct gpu_check_pool *)arg)->plain);
}

static int queue_scatter_checked(struct gpu_check *check, void *arg)
{
    return check->calls->kernels->scatter(check->stream, &((struct gpu_check_pool *)arg)->checked);
}

static int queue_check(struct gpu_check *check, void *arg)
{
    return check->calls->kernels->check(check->stream, &((struct gpu_check_pool *)arg)->checks);
}

static const char *size_text(char buf[GPU_CHECK_SIZE_TEXT_BYTES], uint32_t bytes)
{
    if (bytes < 1024)
        (void)snprintf(buf, GPU_CHECK_SIZE_TEXT_BYTES, "%u B", bytes);
    else if (bytes < 1024 * 1024)
        (void)snprintf(buf, GPU_CHECK_SIZE_TEXT_BYTES, "%u KiB", bytes / 1024);
    else
        (void)snprintf(buf, GPU_CHECK_SIZE_TEXT_BYTES, "%u MiB", bytes / 1024 / 1024);
    return buf;
}

static double target_of(uint32_t piece_bytes)
{
    if (piece_bytes >= 4096)
        return GPU_CHECK_TARGET_PIECES;
    return piece_bytes == 256 ? GPU_CHECK_TARGET_SMALL : 0;
}

static void add_rows(struct gpu_check_pool *pool, const struct gpu_check_work *works,
                     const char *const *names, uint32_t count)
{
    const uint64_t copied[2] = {pool->bytes, works[0].ns};
    char size[GPU_CHECK_SIZE_TEXT_BYTES], name[48];

    for (uint32_t w = 1; w < count; w++) {
        const uint64_t moved[2] = {pool->bytes, works[w].ns};
        bool has_target = w < 5; /* of gather and scatter, with and without checks */

        (void)snprintf(name, sizeof(name), "%s, pieces of %s", names[w],
                       size_text(size, pool->piece_bytes));
        gpu_check_row_speed(pool->check, "speed", name, moved, copied,
                            has_target ? target_of(pool->piece_bytes) : 0);
    }
}

/* Gather, scatter and check of one size of piece. */
static bool measure_pieces(struct gpu_check_pool *pool, uint32_t piece_bytes, uint64_t *ret_wrong)
{
    static const char *const names[] = {"copy",    "gather",          "gather + check",
                                        "scatter", "scatter + check", "check"};
    struct gpu_check_work works[] = {
        {.queue = queue_copy, .arg = pool},
        {.queue = queue_gather, .arg = pool},
        {.queue = queue_gather_checked, .arg = pool},
        {.queue = queue_scatter, .arg = pool},
        {.queue = queue_scatter_checked, .arg = pool},
        {.queue = queue_check, .arg = pool},
    };

    if (!gpu_check_pool_shape(pool, piece_bytes) ||
        !gpu_check_measure(pool->check, works, KVT_COUNT_OF(works)))
        return false;
    add_rows(pool, works, names, KVT_COUNT_OF(works));
    return gpu_check_pool_verify(pool, ret_wrong);
}

/* ---- quantisation ---------------------------------------------------------------------------- */

struct quant {
    struct gpu_check_pool *pool;
    struct kvt_quant_batch batch;
};

static int queue_quantise(struct gpu_check *check, void *arg)
{
    return check->calls->kernels->quantise(check->stream, &((struct quant *)arg)->batch);
}

static int queue_dequantise(struct gpu_check *check, void *arg)
{
    return check->calls->kernels->dequantise(check->stream, &((struct quant *)arg)->batch);
}

static int queue_copy_raw(struct gpu_check *check, void *arg)
{
    struct gpu_check_pool *pool = ((struct quant *)arg)->pool;

    return check->calls->copy(pool->payload.device, pool->pool.device, pool->bytes / 2,
                              KVT_CUDA_D2D, check->stream);
}

#define QUANT_PLANES 64u /* of one payload */
#define QUANT_JOBS_MAX 1024u

/* Planes of 16 tokens, 8 heads, 128 elements: 32 KiB raw. */
static bool shape_quant(struct gpu_check_pool *pool, struct quant *quant, uint8_t kind)
{
    struct kvt_quant_job *jobs = (void *)pool->lists.host;
    uint64_t raw_bytes, stored_bytes;
    uint32_t planes, count;

    *quant = (struct quant){.pool = pool,
                            .batch = {.spec = {.kind = kind,
                                               .elem = KVT_ELEM_BF16,
                                               .order = KVT_ORDER_TOKENS_FIRST,
                                               .plane_tokens = 16,
                                               .heads = 8,
                                               .head_dim = 128},
                                      .jobs = pool->lists.device}};
    raw_bytes = kvt_quant_plane_bytes(&quant->batch.spec);
    planes = (uint32_t)KVT_MIN(pool->bytes / 2 / raw_bytes, (uint64_t)QUANT_PLANES);
    raw_bytes *= planes;
    stored_bytes = kvt_quant_bytes(&quant->batch.spec, raw_bytes);
    count = (uint32_t)KVT_MIN(pool->bytes / 2 / raw_bytes, (uint64_t)QUANT_JOBS_MAX);
    for (uint32_t j = 0; j < count; j++)
        jobs[j] = (struct kvt_quant_job){.raw = pool->pool.device + j * raw_bytes,
                                         .quantised = pool->payload.device + j * stored_bytes,
                                         .planes_count = planes,
                                         .end_plane = planes};
    quant->batch.jobs_count = count;
    quant->batch.planes_max = planes;
    return gpu_check_upload(pool->check, &pool->lists, count * sizeof(*jobs));
}

/* The ratio is of all bytes read and written to those of the copy. */
static bool measure_quant(struct gpu_check_pool *pool, uint8_t kind, const char *name)
{
    struct quant quant;
    struct gpu_check_work works[] = {{.queue = queue_copy_raw, .arg = &quant},
                                     {.queue = queue_quantise, .arg = &quant},
                                     {.queue = queue_dequantise, .arg = &quant}};

    if (!shape_quant(pool, &quant, kind) ||
        !gpu_check_measure(pool->check, works, KVT_COUNT_OF(works)))
        return false;
    for (uint32_t w = 1; w < KVT_COUNT_OF(works); w++) {
        const uint64_t copied[2] = {pool->bytes, works[0].ns};
        const uint64_t moved[2] = {pool->bytes / 2 * 3 / 2, works[w].ns};
        char text[48];

        (void)snprintf(text, sizeof(text), "%s %s, raw + quantised", w == 1 ? "to" : "from", name);
        gpu_check_row_speed(pool->check, "speed", text, moved, copied, 0);
    }
    return true;
}

void gpu_check_speed(struct gpu_check *check)
{
    static const uint32_t sizes[] = {4096, 256,  65536, 1024,   16384,   512,
                                     2048, 8192, 32768, 262144, 1u << 20};
    uint64_t bytes = pool_bytes_of(check), wrong = 0, cases = 0;
    struct gpu_check_pool pool = {.check = check};
    struct gpu_check_row *row;

    if (bytes > 0 && gpu_check_pool_open(&pool, check, bytes) &&
        measure_quant(&pool, KVT_QUANT_FP8_E4M3, "FP8") &&
        measure_quant(&pool, KVT_QUANT_INT8, "INT8"))
        for (uint32_t i = 0; i < KVT_COUNT_OF(sizes) && !gpu_check_is_late(check); i++) {
            if (sizes[i] > bytes || !measure_pieces(&pool, sizes[i], &wrong))
                break;
            cases++;
        }
    row = gpu_check_row(check, "speed", "gather, scatter of a whole pool");
    row->cases = cases;
    row->wrong_bytes = wrong;
    if (cases < KVT_COUNT_OF(sizes))
        (void)snprintf(row->text, sizeof(row->text), "%u of %u sizes: no time for the others",
                       (uint32_t)cases, (uint32_t)KVT_COUNT_OF(sizes));
    gpu_check_pool_close(&pool);
}

/* ---- copy engine or kernel ------------------------------------------------------------------- */

#define RUNS_MAX 512u /* copies that are queued for one payload */

struct runs {
    struct gpu_check_pool *pool;
    uint32_t count, bytes;
};

static int queue_runs(struct gpu_check *check, void *arg)
{
    struct runs *runs = arg;
    int error = KVT_CUDA_OK;

    for (uint32_t i = 0; i < runs->count && error == KVT_CUDA_OK; i++)
        error = check->calls->copy(runs->pool->payload.device + (uint64_t)i * runs->bytes,
                                   runs->pool->pool.device +
                                       (uint64_t)(i * 7 % runs->count) * runs->bytes,
                                   runs->bytes, KVT_CUDA_D2D, check->stream);
    return error;
}

static int queue_kernel_runs(struct gpu_check *check, void *arg)
{
    return check->calls->kernels->gather(check->stream, &((struct runs *)arg)->pool->plain);
}

/* Lists of one payload whose pieces are the runs. */
static bool shape_runs(struct gpu_check_pool *pool, const struct runs *runs)
{
    struct {
        struct kvt_copy_job job;
        uint64_t id;
        struct kvt_copy_piece pieces[RUNS_MAX];
    } *lists = (void *)pool->lists.host;
    uint64_t base = pool->lists.device;

    memset(lists, 0, sizeof(*lists));
    lists->job = (struct kvt_copy_job){.payload = pool->payload.device,
                                       .pieces = base + sizeof(lists->job) + sizeof(lists->id),
                                       .blocks = base + sizeof(lists->job),
                                       .pieces_count = runs->count,
                                       .blocks_count = 1};
    for (uint32_t i = 0; i < runs->count; i++)
        lists->pieces[i] = (struct kvt_copy_piece){
            .base = pool->pool.device + (uint64_t)(i * 7 % runs->count) * runs->bytes,
            .stride_bytes = runs->bytes,
            .payload_offset_bytes = (uint64_t)i * runs->bytes,
            .bytes = runs->bytes};
    pool->plain = (struct kvt_copy_batch){.jobs = base,
                                          .jobs_count = 1,
                                          .pieces_max = runs->count,
                                          .blocks_max = 1,
                                          .piece_bytes_max = runs->bytes};
    return gpu_check_upload(pool->check, &pool->lists, sizeof(*lists));
}

/* The shortest run from which on the copy engine is at least as fast. Where it never is: longer
 * than any run. */
static uint64_t crossover_of(const uint32_t *bytes, const bool *is_copy_faster, uint32_t count)
{
    uint64_t best = 1ull << 30;

    while (count > 0 && is_copy_faster[count - 1])
        best = bytes[--count];
    return best;
}

void gpu_check_crossover(struct gpu_check *check)
{
    static const uint32_t sizes[] = {16384,  32768,  65536,    131072,
                                     262144, 524288, 1u << 20, 2u << 20};
    uint64_t bytes = KVT_MIN(pool_bytes_of(check), (uint64_t)(64u << 20));
    bool is_copy_faster[KVT_COUNT_OF(sizes)] = {false};
    struct gpu_check_pool pool = {.check = check};
    struct gpu_check_row *row;
    uint32_t done = 0;

    if (bytes > 0 && gpu_check_pool_open(&pool, check, bytes))
        for (; done < KVT_COUNT_OF(sizes) && sizes[done] < bytes; done++) {
            struct runs runs = {.pool = &pool, .bytes = sizes[done]};
            struct gpu_check_work works[] = {{.queue = queue_kernel_runs, .arg = &runs},
                                             {.queue = queue_runs, .arg = &runs}};
            char size[GPU_CHECK_SIZE_TEXT_BYTES], name[48];

            runs.count = (uint32_t)KVT_MIN(bytes / sizes[done], 8u);
            if (gpu_check_is_late(check) || !shape_runs(&pool, &runs) ||
                !gpu_check_measure(check, works, KVT_COUNT_OF(works)))
                break;
            is_copy_faster[done] = works[1].ns <= works[0].ns;
            (void)snprintf(name, sizeof(name), "%u runs of %s by the copy engine", runs.count,
                           size_text(size, sizes[done]));
            gpu_check_row_speed(check, "crossover", name,
                                (uint64_t[2]){(uint64_t)runs.count * sizes[done], works[1].ns},
                                (uint64_t[2]){(uint64_t)runs.count * sizes[done], works[0].ns}, 0);
            row = &check->rows[check->rows_count - 1];
            (void)snprintf(row->text, sizeof(row->text), "of the kernel's %.2f GB/s",
                           row->base_gb_s);
        }
    gpu_check_pool_close(&pool);
    if (done == 0)
        return;
    check->crossover_bytes = crossover_of(sizes, is_copy_faster, done);
    row = gpu_check_row(check, "crossover", "tiers.l1.crossover");
    (void)snprintf(row->text, sizeof(row->text), "recommended: %u KiB%s",
                   (uint32_t)(check->crossover_bytes / 1024),
                   check->crossover_bytes == 1ull << 30 ? " (the kernel is always as fast)" : "");
}
