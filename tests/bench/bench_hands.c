/* What the CPU's part of slot -> L2 reaches with so many hands: one GPU of the device tier with its
 * threads, over a CUDA that costs nothing. Its copies of payloads do nothing (the payload lies in
 * L2 already) and its kernel says what the sum of every payload is, so what is left is what the
 * daemon does itself: XXH3 and check of each payload, the seal, and the handovers.
 *
 * Two kinds of rows. Bytes a second, the best of many short rounds, beside the best of memcpy on
 * one thread: several threads at once need cores that nobody else uses, and a median says who else
 * does. And bytes a second of CPU time, of all threads, medians: what a hand that gets each piece
 * alone costs beside the GPU's thread that does it itself, and so from where on it is worth that.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "daemon/base/clock.h"
#include "tests/bench/bench.h"
#include "tiers/device/gpu.h"

#define MEMORY_BYTES (128u << 20) /* of payloads: more than caches hold */
#define TOKENS 64u
#define ROUNDS_MAX 61u
#define FREE_BYTES (32u << 10) /* payloads are longer, what else is copied is shorter */
#define CALL_BYTES (16u << 20)

/* ---- CUDA that costs nothing ------------------------------------------------------------------
 */

static uint64_t check_of_all; /* every payload is the same */

static int set_device(int device)
{
    (void)device;
    return KVT_CUDA_OK;
}

static int alloc_pinned(uint64_t bytes, void **ret_memory)
{
    *ret_memory = aligned_alloc(4096, kvt_round_up(bytes, 4096));
    return *ret_memory == NULL ? KVT_CUDA_NO_MEMORY : KVT_CUDA_OK;
}

static int free_pinned(void *memory)
{
    free(memory);
    return KVT_CUDA_OK;
}

static int alloc(uint64_t bytes, uint64_t *ret_address)
{
    void *memory = NULL;
    int error = alloc_pinned(bytes, &memory);

    *ret_address = (uint64_t)(uintptr_t)memory;
    return error;
}

static int free_memory(uint64_t address)
{
    return free_pinned((void *)(uintptr_t)address);
}

static int handle_new(void **ret_handle)
{
    *ret_handle = &check_of_all; /* of a stream, an event: nobody looks at it */
    return KVT_CUDA_OK;
}

static int handle_use(void *handle)
{
    (void)handle;
    return KVT_CUDA_OK;
}

static int event_record(void *event, void *stream)
{
    (void)event;
    (void)stream;
    return KVT_CUDA_OK;
}

static int copy(uint64_t dst, uint64_t src, uint64_t bytes, enum kvt_cuda_direction direction,
                void *stream)
{
    (void)direction;
    (void)stream;
    if (bytes < FREE_BYTES)
        memcpy((void *)(uintptr_t)dst, (const void *)(uintptr_t)src, bytes);
    return KVT_CUDA_OK;
}

static int check(void *stream, const struct kvt_check_batch *batch)
{
    const struct kvt_check_job *jobs = (const struct kvt_check_job *)(uintptr_t)batch->jobs;

    if (batch->bytes_max < FREE_BYTES)
        return kvt_kernels_host()->check(stream, batch);
    for (uint32_t i = 0; i < batch->jobs_count; i++)
        *(uint64_t *)(uintptr_t)jobs[i].check = check_of_all;
    return KVT_CUDA_OK;
}

static const char *error_name(int error)
{
    (void)error;
    return "";
}

/* ---- one GPU ----------------------------------------------------------------------------------
 */

struct world {
    struct kvt_cuda_calls calls;
    struct kvt_kernels kernels;
    struct kvt_doorbell bell;
    struct kvt_gpu *gpu;
    uint8_t *l2, *elsewhere;
    uint64_t payload_bytes, slot_bytes;
    uint32_t slots_count, next;
    struct kvt_xfer *xfers;
};

static void *take(uint64_t bytes)
{
    void *memory = aligned_alloc(1u << 21, kvt_round_up(bytes, 1u << 21));

    if (memory == NULL) {
        fprintf(stderr, "bench_hands: no memory\n");
        exit(1);
    }
    memset(memory, 0x5a, bytes);
    return memory;
}

static void calls_init(struct world *world)
{
    world->kernels = *kvt_kernels_host();
    world->kernels.check = check;
    world->calls = (struct kvt_cuda_calls){.set_device = set_device,
                                           .alloc = alloc,
                                           .free = free_memory,
                                           .alloc_pinned = alloc_pinned,
                                           .free_pinned = free_pinned,
                                           .stream_new = handle_new,
                                           .stream_free = handle_use,
                                           .event_new = handle_new,
                                           .event_free = handle_use,
                                           .event_record = event_record,
                                           .event_query = handle_use,
                                           .copy = copy,
                                           .error_name = error_name,
                                           .kernels = &world->kernels};
}

/* All that one kind of row needs; slots of L2 have their headers, as the engine writes them. */
static void world_open(struct world *world, uint64_t payload_bytes)
{
    uint32_t tokens[TOKENS] = {0};

    world->payload_bytes = payload_bytes;
    world->slot_bytes = kvt_slot_bytes(TOKENS, payload_bytes);
    world->slots_count = (uint32_t)(MEMORY_BYTES / payload_bytes);
    world->l2 = take(world->slots_count * world->slot_bytes);
    world->elsewhere = take(MEMORY_BYTES);
    world->xfers = take(world->slots_count * sizeof(*world->xfers));
    check_of_all = kvt_check64(world->elsewhere, payload_bytes);
    for (uint32_t s = 0; s < world->slots_count; s++) {
        struct kvt_slot_info info = {.block_id = s + 1,
                                     .generation = 1,
                                     .payload_bytes = payload_bytes,
                                     .block_tokens = TOKENS};

        kvt_slot_header_write(world->l2 + s * world->slot_bytes, &info, tokens);
    }
    calls_init(world);
    if (kvt_doorbell_init(&world->bell) < 0)
        exit(1);
}

static void world_close(struct world *world)
{
    kvt_doorbell_deinit(&world->bell);
    free(world->l2);
    free(world->elsewhere);
    free(world->xfers);
}

static void gpu_open(struct world *world, uint32_t hands, uint32_t hand_bytes)
{
    struct kvt_gpu_config config = {.calls = &world->calls,
                                    .arena_bytes = KVT_HUGE_PAGE_BYTES,
                                    .staging_bytes = KVT_HUGE_PAGE_BYTES,
                                    .streams = 2,
                                    .inflight_bytes_max = CALL_BYTES,
                                    .inflight_max = world->slots_count,
                                    .host_memory = world->l2,
                                    .host_memory_bytes = world->slots_count * world->slot_bytes,
                                    .is_host_pinned = true,
                                    .doorbell = &world->bell,
                                    .cpu_threads = hands,
                                    .hand_bytes = hand_bytes};
    int error;

    if (kvt_gpu_open(&world->gpu, &config, &error) != 0) {
        fprintf(stderr, "bench_hands: kvt_gpu_open: CUDA's %d\n", error);
        exit(1);
    }
}

static double gbps(uint64_t bytes, uint64_t started_ns)
{
    return (double)bytes / (double)(bench_now_ns() - started_ns);
}

static uint64_t cpu_ns(void)
{
    struct timespec time;

    (void)clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
    return (uint64_t)time.tv_sec * KVT_NS_PER_S + (uint64_t)time.tv_nsec;
}

static void reap(struct world *world, uint32_t count)
{
    struct kvt_xfer *back[64];

    while (count > 0) {
        uint32_t reaped;

        kvt_doorbell_arm(&world->bell);
        reaped = kvt_tier_reap(kvt_gpu_tier(world->gpu), back, KVT_COUNT_OF(back));
        if (reaped == 0)
            kvt_doorbell_wait(&world->bell, KVT_NS_PER_S);
        else
            kvt_doorbell_disarm(&world->bell);
        for (uint32_t i = 0; i < reaped; i++)
            if (back[i]->status != KVT_XFER_DONE) {
                fprintf(stderr, "bench_hands: status %d\n", back[i]->status);
                exit(1);
            }
        count -= reaped;
    }
}

/* One slot of the arena to as many slots of L2 as CALL_BYTES are. */
static double call_down(struct world *world, bool is_cpu)
{
    uint32_t count = (uint32_t)(CALL_BYTES / world->payload_bytes), taken, done = 0;
    struct kvt_xfer *all[CALL_BYTES / FREE_BYTES];
    uint64_t started_ns, started_cpu_ns;

    for (uint32_t i = 0; i < count; i++) {
        uint32_t s = (world->next + i) % world->slots_count;

        all[i] = &world->xfers[i];
        *all[i] = (struct kvt_xfer){.key = {.block_id = s + 1,
                                            .generation = 1,
                                            .payload_bytes = world->payload_bytes,
                                            .block_tokens = TOKENS},
                                    .header_bytes = kvt_slot_header_bytes(TOKENS),
                                    .slot_bytes = world->slot_bytes,
                                    .deadline_ns = KVT_TIME_NEVER_NS};
        all[i]->src = (struct kvt_place){.kind = KVT_PLACE_DEVICE};
        all[i]->dst =
            (struct kvt_place){.kind = KVT_PLACE_HOST, .offset_bytes = s * world->slot_bytes};
    }
    started_ns = bench_now_ns();
    started_cpu_ns = cpu_ns();
    for (; done < count; done += taken)
        if (kvt_tier_submit(kvt_gpu_tier(world->gpu), all + done, count - done, &taken) != 0)
            exit(1);
    reap(world, count);
    world->next = (world->next + count) % world->slots_count;
    return is_cpu ? (double)CALL_BYTES / (double)(cpu_ns() - started_cpu_ns)
                  : gbps(CALL_BYTES, started_ns);
}

static double call_memcpy(struct world *world)
{
    uint64_t started_ns = bench_now_ns();

    for (uint64_t at = 0; at < CALL_BYTES; at += world->payload_bytes)
        memcpy(world->elsewhere + at,
               world->l2 + at / world->payload_bytes * world->slot_bytes +
                   kvt_slot_header_bytes(TOKENS),
               world->payload_bytes);
    return gbps(CALL_BYTES, started_ns);
}

static void row(struct bench *bench, const char *name, const char *limit_name, double value,
                double limit)
{
    struct bench_row row = {
        .name = name, .unit = "GB/s", .limit_name = limit_name, .value = value, .limit = limit};

    bench_row(bench, &row);
}

static double best(const double *values, uint32_t count)
{
    double value = 0;

    for (uint32_t i = 0; i < count; i++)
        value = KVT_MAX(value, values[i]);
    return value;
}

/* Hands take turns round by round: what else the machine does then is the same for all. */
static void bench_seals(struct bench *bench, uint32_t rounds)
{
    static const uint32_t hands[] = {0, 1, 2, 4};
    static const char *const names[] = {"seal of 1 MiB, no hands", "seal of 1 MiB, 1 hand",
                                        "seal of 1 MiB, 2 hands", "seal of 1 MiB, 4 hands"};
    double down[KVT_COUNT_OF(hands)][ROUNDS_MAX], bare[ROUNDS_MAX];
    struct world world = {0};

    world_open(&world, KVT_MIB);
    for (uint32_t r = 0; r < rounds; r++) {
        for (uint32_t h = 0; h < KVT_COUNT_OF(hands); h++) {
            gpu_open(&world, hands[h], 0);
            down[h][r] = call_down(&world, false);
            world.gpu = kvt_gpu_close(world.gpu);
        }
        bare[r] = call_memcpy(&world);
    }
    for (uint32_t h = 0; h < KVT_COUNT_OF(hands); h++)
        row(bench, names[h], "memcpy of 1 MiB, one thread", best(down[h], rounds),
            best(bare, rounds));
    world_close(&world);
}

/* One hand that gets each payload alone, beside the GPU's thread that does the same itself. */
static void bench_handover(struct bench *bench, uint32_t rounds)
{
    static const uint32_t kib[] = {64, 128, 256, 1024};
    static const char *const names[] = {
        "CPU time, one hand, pieces of 64 KiB", "CPU time, one hand, pieces of 128 KiB",
        "CPU time, one hand, pieces of 256 KiB", "CPU time, one hand, pieces of 1 MiB"};
    double given[ROUNDS_MAX], own[ROUNDS_MAX];

    for (uint32_t i = 0; i < KVT_COUNT_OF(kib); i++) {
        struct world world = {0};

        world_open(&world, kib[i] * KVT_KIB);
        for (uint32_t r = 0; r < rounds; r++) {
            gpu_open(&world, 1, 1);
            given[r] = call_down(&world, true);
            world.gpu = kvt_gpu_close(world.gpu);
            gpu_open(&world, 0, 1);
            own[r] = call_down(&world, true);
            world.gpu = kvt_gpu_close(world.gpu);
        }
        row(bench, names[i], "no hands", bench_median(given, rounds), bench_median(own, rounds));
        world_close(&world);
    }
}

int main(int argc, char **argv)
{
    struct bench bench;
    uint32_t rounds;

    bench_begin(&bench, "hands of a GPU", argc, argv);
    rounds = bench.is_quick ? 3 : ROUNDS_MAX;
    bench_seals(&bench, rounds);
    bench_handover(&bench, rounds);
    return bench_end(&bench);
}
