/* Whether a GPU does what it is asked: each kernel is launched once on a few bytes of the lists'
 * memory, by whoever opens the GPU or takes it back, and what comes out is compared with what the
 * CPU makes of the same. So a GPU that cannot launch is refused here, not by the first transfers,
 * and what the first launch of a kernel costs is paid where one may wait.
 *
 * A trial is one struct with everything in it, whose addresses are those of the place where it is
 * used: it is made once for the GPU and once for the CPU, and the two differ in descriptors only.
 */
#include <string.h>
#include <time.h>

#include "daemon/base/clock.h"
#include "tiers/device/gpu_internal.h"

#define BYTES 64u
#define BLOCKS 2u
#define KINDS 4u /* FP16 and BF16, to FP8 and INT8 */
#define PAUSE_NS (20 * (long)KVT_NS_PER_US)

struct trial {
    struct kvt_copy_job gather, scatter;
    struct kvt_check_job check;
    struct kvt_quant_job quant[KINDS];
    struct kvt_copy_piece piece;
    uint64_t blocks[BLOCKS];
    /* From here on it is bytes and no addresses, the same on both. */
    uint64_t checks[3];
    _Alignas(16) uint8_t pool[BYTES];
    uint8_t payload[BYTES], back[BYTES], moved[BYTES];
    _Alignas(16) uint8_t quantised[KINDS][BYTES];
    _Alignas(16) uint8_t raw[KINDS][BYTES];
};
static_assert(2 * sizeof(struct trial) <= KVT_GPU_AREA_BYTES, "there and back in one area");

static struct kvt_quant_spec spec_of(uint32_t kind)
{
    return (struct kvt_quant_spec){.kind = kind / 2 == 0 ? KVT_QUANT_FP8_E4M3 : KVT_QUANT_INT8,
                                   .elem = kind % 2 == 0 ? KVT_ELEM_FP16 : KVT_ELEM_BF16,
                                   .order = KVT_ORDER_TOKENS_FIRST,
                                   .plane_tokens = 2,
                                   .heads = 2,
                                   .head_dim = BYTES / 8};
}

/* To be used at @base. */
static void trial_make(struct trial *trial, uint64_t base)
{
    const uint64_t checks = base + offsetof(struct trial, checks);

    *trial = (struct trial){.blocks = {1, 0}};
    trial->piece = (struct kvt_copy_piece){.base = base + offsetof(struct trial, pool),
                                           .stride_bytes = BYTES / BLOCKS,
                                           .bytes = BYTES / BLOCKS};
    trial->gather = (struct kvt_copy_job){.payload = base + offsetof(struct trial, payload),
                                          .pieces = base + offsetof(struct trial, piece),
                                          .blocks = base + offsetof(struct trial, blocks),
                                          .check = checks,
                                          .pieces_count = 1,
                                          .blocks_count = BLOCKS};
    trial->scatter = trial->gather;
    trial->scatter.payload = base + offsetof(struct trial, back);
    trial->scatter.check = checks + sizeof(uint64_t);
    trial->check = (struct kvt_check_job){.payload = base + offsetof(struct trial, payload),
                                          .bytes = BYTES,
                                          .check = checks + 2 * sizeof(uint64_t)};
    for (uint32_t i = 0; i < BYTES; i++) {
        trial->pool[i] = (uint8_t)(i * 7 + 1);
        trial->back[i] = (uint8_t)(i * 5 + 3); /* scatter moves it over the pool */
    }
    for (uint32_t kind = 0; kind < KINDS; kind++) {
        trial->quant[kind] = (struct kvt_quant_job){
            .raw = base + offsetof(struct trial, raw) + kind * BYTES,
            .quantised = base + offsetof(struct trial, quantised) + kind * BYTES,
            .planes_count = 1,
            .end_plane = 1};
        for (uint32_t i = 0; i < BYTES; i++) /* numbers of about 1 */
            trial->raw[kind][i] = i % 2 == 1 ? 0x3c : (uint8_t)(i * 3);
    }
}

/* Launches everything that there is, in this order. 0, or the first result that is not. */
static int trial_run(const struct kvt_kernels *kernels, void *stream, uint64_t base)
{
    struct kvt_copy_batch copy = {.jobs = base + offsetof(struct trial, gather),
                                  .jobs_count = 1,
                                  .pieces_max = 1,
                                  .blocks_max = BLOCKS,
                                  .piece_bytes_max = BYTES / BLOCKS};
    const struct kvt_check_batch check = {
        .jobs = base + offsetof(struct trial, check), .jobs_count = 1, .bytes_max = BYTES};
    const struct kvt_relayout relayout = {.src = base + offsetof(struct trial, payload),
                                          .dst = base + offsetof(struct trial, moved),
                                          .from = KVT_LAYOUT_LAYER_FIRST,
                                          .to = KVT_LAYOUT_PAGE_FIRST,
                                          .layers = 2,
                                          .pages = 2,
                                          .tokens = 1,
                                          .heads = 1,
                                          .head_bytes = BYTES / 4};
    int r = kernels->gather(stream, &copy);

    if (r == 0)
        r = kernels->check(stream, &check);
    if (r == 0)
        r = kernels->relayout(stream, &relayout);
    copy.jobs = base + offsetof(struct trial, scatter);
    if (r == 0)
        r = kernels->scatter(stream, &copy);
    for (uint32_t kind = 0; kind < KINDS && r == 0; kind++) {
        const struct kvt_quant_batch batch = {.spec = spec_of(kind),
                                              .jobs = base + offsetof(struct trial, quant) +
                                                      kind * sizeof(struct kvt_quant_job),
                                              .jobs_count = 1,
                                              .planes_max = 1};

        r = kernels->quantise(stream, &batch);
        if (r == 0)
            r = kernels->dequantise(stream, &batch);
    }
    KVT_ASSERT(r >= 0 || r == -EINVAL);
    return r < 0 ? KVT_CUDA_INVALID_VALUE : r;
}

/* CUDA's error; KVT_CUDA_LAUNCH_TIMEOUT: it is not over. */
static int wait_over(const struct kvt_gpu *gpu, void *stream, void *event)
{
    const struct timespec pause = {.tv_nsec = PAUSE_NS};
    uint64_t end_ns = kvt_time_add(kvt_clock_mono_ns(), gpu->config.hang_ns);
    int error = gpu->calls->event_record(event, stream);

    if (error != KVT_CUDA_OK)
        return error;
    while ((error = gpu->calls->event_query(event)) == KVT_CUDA_NOT_READY) {
        if (kvt_clock_mono_ns() > end_ns)
            return KVT_CUDA_LAUNCH_TIMEOUT;
        (void)nanosleep(&pause, NULL);
    }
    return error;
}

int kvt_gpu_trial(struct kvt_gpu *gpu)
{
    const struct kvt_cuda_calls *calls = gpu->calls;
    void *stream = gpu->memory.streams[0], *event = gpu->memory.events[0];
    struct trial *given = gpu->memory.pinned_lists, *got = given + 1, expected;
    uint64_t base = gpu->memory.lists;
    int error, waited = KVT_CUDA_NOT_READY;

    trial_make(given, base);
    error = calls->copy(base, (uint64_t)(uintptr_t)given, sizeof(*given), KVT_CUDA_H2D, stream);
    if (error == KVT_CUDA_OK)
        error = trial_run(calls->kernels, stream, base);
    if (error == KVT_CUDA_OK)
        error = calls->copy((uint64_t)(uintptr_t)got, base, sizeof(*got), KVT_CUDA_D2H, stream);
    /* What was queued before a failure is waited for as well: its memory is freed next. */
    for (uint32_t i = 0; i < KVT_GPU_DOUBTS_MAX && waited != KVT_CUDA_OK; i++) {
        waited = wait_over(gpu, stream, event);
        error = error == KVT_CUDA_OK ? waited : error;
        if (kvt_cuda_is_sticky(waited))
            return waited;
    }
    if (waited != KVT_CUDA_OK)
        return KVT_CUDA_LAUNCH_TIMEOUT;
    if (error != KVT_CUDA_OK)
        return error;
    trial_make(&expected, (uint64_t)(uintptr_t)&expected);
    if (trial_run(kvt_kernels_host(), NULL, (uint64_t)(uintptr_t)&expected) != 0 ||
        memcmp(got->checks, expected.checks, sizeof(expected) - offsetof(struct trial, checks)) !=
            0)
        return KVT_CUDA_INVALID_IMAGE;
    return KVT_CUDA_OK;
}
