/* The CPU reference of the kernels: what the copies, checks and conversions of a node without a GPU
 * cost. Gather of scattered parts stands beside a loop of memcpy over the same parts in the same
 * order; the check beside XXH3 of the same payload; conversions beside a memcpy of the raw
 * bytes. Payloads of 1 MiB, walking through memories larger than the caches ("cold") or one payload
 * of 64 KiB again and again ("warm"); rounds are interleaved. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/hash.h"
#include "kernels/check.h"
#include "kernels/kvt_kernels.h"
#include "tests/bench/bench.h"
#include "tiers/copy.h"

#define MEMORY_BYTES (256u << 20)
#define PAYLOAD_BYTES (1u << 20)
#define WARM_BYTES (64u << 10)
#define PAYLOADS (MEMORY_BYTES / PAYLOAD_BYTES)
#define A_CALL 32u /* payloads */

#define ROUNDS_MAX 31u

struct world {
    uint8_t *pool, *payloads;
    uint64_t ids[MEMORY_BYTES / 256u]; /* of parts, shuffled */
    uint32_t next;                     /* payload that the next call begins with */
    uint64_t check;
};

static void *take(uint64_t bytes)
{
    void *memory = aligned_alloc(1u << 21, bytes);

    if (memory == NULL) {
        fprintf(stderr, "bench_kernels: no memory\n");
        exit(1);
    }
    memset(memory, 1, bytes);
    return memory;
}

static void world_open(struct world *world)
{
    uint64_t random = 1;

    world->pool = take(MEMORY_BYTES);
    world->payloads = take(MEMORY_BYTES);
    for (uint64_t i = 0; i < MEMORY_BYTES / 2; i++) { /* finite halves */
        uint16_t half;

        random = random * 6364136223846793005ull + 1442695040888963407ull;
        half = (uint16_t)(random >> 48) & 0xbbffu;
        memcpy(world->pool + 2 * i, &half, 2);
    }
}

static void shuffle(struct world *world, uint64_t parts)
{
    uint64_t random = 7;

    for (uint64_t i = 0; i < parts; i++)
        world->ids[i] = i;
    for (uint64_t i = parts - 1; i > 0; i--) {
        uint64_t other, id = world->ids[i];

        random = random * 6364136223846793005ull + 1442695040888963407ull;
        other = (random >> 20) % (i + 1);
        world->ids[i] = world->ids[other];
        world->ids[other] = id;
    }
}

static uint8_t *payload_at(const struct world *world, uint32_t i)
{
    return world->payloads + (uint64_t)((world->next + i) % PAYLOADS) * PAYLOAD_BYTES;
}

static uint8_t *source_at(const struct world *world, uint32_t i)
{
    return world->pool + (uint64_t)((world->next + i) % PAYLOADS) * PAYLOAD_BYTES;
}

static double gbps(uint64_t bytes, uint64_t started_ns)
{
    return (double)bytes / (double)(bench_now_ns() - started_ns);
}

static double call_gather(struct world *world, uint32_t part_bytes, bool is_checked)
{
    const uint32_t parts = PAYLOAD_BYTES / part_bytes;
    struct kvt_copy_piece piece = {
        .base = (uintptr_t)world->pool, .stride_bytes = part_bytes, .bytes = part_bytes};
    struct kvt_copy_job jobs[A_CALL];
    struct kvt_copy_batch batch = {.jobs = (uintptr_t)jobs,
                                   .jobs_count = A_CALL,
                                   .pieces_max = 1,
                                   .blocks_max = parts,
                                   .piece_bytes_max = part_bytes};
    uint64_t started_ns;

    for (uint32_t i = 0; i < A_CALL; i++) {
        uint64_t first = (uint64_t)((world->next + i) % PAYLOADS) * parts;

        jobs[i] = (struct kvt_copy_job){.payload = (uintptr_t)payload_at(world, i),
                                        .pieces = (uintptr_t)&piece,
                                        .blocks = (uintptr_t)&world->ids[first],
                                        .check = is_checked ? (uintptr_t)&world->check : 0,
                                        .pieces_count = 1,
                                        .blocks_count = parts};
    }
    started_ns = bench_now_ns();
    if (kvt_kernels_host()->gather(NULL, &batch) != 0)
        exit(1);
    world->next = (world->next + A_CALL) % PAYLOADS;
    return gbps((uint64_t)A_CALL * PAYLOAD_BYTES, started_ns);
}

/* The same parts by hand; is_hashed: and XXH3 of each payload. */
static double call_memcpy(struct world *world, uint32_t part_bytes, bool is_hashed)
{
    const uint32_t parts = PAYLOAD_BYTES / part_bytes;
    uint64_t started_ns = bench_now_ns(), sum = 0;

    for (uint32_t i = 0; i < A_CALL; i++) {
        const uint64_t *ids = &world->ids[(uint64_t)((world->next + i) % PAYLOADS) * parts];
        uint8_t *payload = payload_at(world, i);

        for (uint32_t p = 0; p < parts; p++)
            memcpy(payload + (uint64_t)p * part_bytes, world->pool + ids[p] * part_bytes,
                   part_bytes);
        if (is_hashed)
            sum += kvt_hash64(payload, PAYLOAD_BYTES, 0);
    }
    bench_use(sum);
    world->next = (world->next + A_CALL) % PAYLOADS;
    return gbps((uint64_t)A_CALL * PAYLOAD_BYTES, started_ns);
}

static double call_sum(struct world *world, bool is_warm, bool is_check)
{
    const uint32_t times = is_warm ? A_CALL * (PAYLOAD_BYTES / WARM_BYTES) : A_CALL;
    const uint64_t bytes = is_warm ? WARM_BYTES : PAYLOAD_BYTES;
    uint64_t started_ns = bench_now_ns(), sum = 0;

    for (uint32_t i = 0; i < times; i++) {
        const uint8_t *payload = source_at(world, is_warm ? 0 : i);

        sum += is_check ? kvt_check64(payload, bytes) : kvt_hash64(payload, bytes, 0);
        bench_use(sum);
    }
    world->next = (world->next + A_CALL) % PAYLOADS;
    return gbps(times * bytes, started_ns);
}

/* What the thread of a GPU does with a payload that came down into L2, before it seals the slot. */
static double call_seal(struct world *world, bool is_sealed)
{
    uint64_t started_ns = bench_now_ns(), sum = 0;

    for (uint32_t i = 0; i < A_CALL; i++) {
        const uint8_t *payload = source_at(world, i);
        struct kvt_hash_stream hash;

        if (!is_sealed) {
            memcpy(payload_at(world, i), payload, PAYLOAD_BYTES);
            continue;
        }
        kvt_hash_stream_init(&hash, 0);
        for (uint64_t at = 0; at < PAYLOAD_BYTES; at += KVT_COPY_CHUNK_BYTES) {
            kvt_hash_stream_update(&hash, payload + at, KVT_COPY_CHUNK_BYTES);
            sum += kvt_check64_part(payload + at, KVT_COPY_CHUNK_BYTES, at / 8);
        }
        sum += kvt_hash_stream_digest(&hash);
    }
    bench_use(sum);
    world->next = (world->next + A_CALL) % PAYLOADS;
    return gbps((uint64_t)A_CALL * PAYLOAD_BYTES, started_ns);
}

static double call_convert(struct world *world, enum kvt_quant_kind kind, bool is_quantise)
{
    struct kvt_quant_spec spec = {.kind = (uint8_t)kind,
                                  .elem = KVT_ELEM_BF16,
                                  .order = KVT_ORDER_TOKENS_FIRST,
                                  .plane_tokens = 16,
                                  .heads = 8,
                                  .head_dim = 128};
    const uint32_t planes = (uint32_t)(PAYLOAD_BYTES / kvt_quant_plane_bytes(&spec));
    struct kvt_quant_job jobs[A_CALL];
    struct kvt_quant_batch batch = {
        .spec = spec, .jobs = (uintptr_t)jobs, .jobs_count = A_CALL, .planes_max = planes};
    uint64_t started_ns;

    for (uint32_t i = 0; i < A_CALL; i++)
        jobs[i] = (struct kvt_quant_job){.raw = (uintptr_t)source_at(world, i),
                                         .quantised = (uintptr_t)payload_at(world, i),
                                         .planes_count = planes,
                                         .end_plane = planes};
    started_ns = bench_now_ns();
    if ((is_quantise ? kvt_kernels_host()->quantise : kvt_kernels_host()->dequantise)(NULL,
                                                                                      &batch) != 0)
        exit(1);
    if (!is_quantise) /* the same payloads as quantise before it */
        world->next = (world->next + A_CALL) % PAYLOADS;
    return gbps((uint64_t)A_CALL * PAYLOAD_BYTES, started_ns);
}

static void row(struct bench *bench, const char *name, const char *limit_name, double *values,
                double *limits, uint32_t rounds, double target)
{
    bench_row(bench, &(struct bench_row){.name = name,
                                         .value = bench_median(values, rounds),
                                         .unit = "GB/s",
                                         .limit_name = limit_name,
                                         .limit = bench_median(limits, rounds),
                                         .is_least = true,
                                         .target = target});
}

static void bench_gather(struct bench *bench, struct world *world, uint32_t rounds)
{
    static const uint32_t sizes[] = {256, 4096, 65536};
    static const char *names[][2] = {
        {"CPU gather, parts of 256 B", "CPU gather and check, parts of 256 B"},
        {"CPU gather, parts of 4 KiB", "CPU gather and check, parts of 4 KiB"},
        {"CPU gather, parts of 64 KiB", "CPU gather and check, parts of 64 KiB"}};
    double plain[ROUNDS_MAX], checked[ROUNDS_MAX], bare[ROUNDS_MAX], hashed[ROUNDS_MAX];

    for (uint32_t s = 0; s < KVT_COUNT_OF(sizes); s++) {
        shuffle(world, MEMORY_BYTES / sizes[s]);
        for (uint32_t r = 0; r < rounds; r++) {
            plain[r] = call_gather(world, sizes[s], false);
            bare[r] = call_memcpy(world, sizes[s], false);
            checked[r] = call_gather(world, sizes[s], true);
            hashed[r] = call_memcpy(world, sizes[s], true);
        }
        row(bench, names[s][0], "memcpy of the same parts", plain, bare, rounds, 0.9);
        row(bench, names[s][1], "the same, then XXH3 of it all", checked, hashed, rounds, 0);
    }
}

static void bench_check(struct bench *bench, struct world *world, uint32_t rounds)
{
    static const char *names[] = {"kvt_check64, cold, 1 MiB", "kvt_check64, warm, 64 KiB"};
    double check[ROUNDS_MAX], hash[ROUNDS_MAX];

    for (uint32_t is_warm = 0; is_warm < 2; is_warm++) {
        for (uint32_t r = 0; r < rounds; r++) {
            check[r] = call_sum(world, is_warm == 1, true);
            hash[r] = call_sum(world, is_warm == 1, false);
        }
        row(bench, names[is_warm], "XXH3", check, hash, rounds, is_warm == 1 ? 0 : 0.7);
    }
}

static void bench_seal(struct bench *bench, struct world *world, uint32_t rounds)
{
    double sealed[ROUNDS_MAX], bare[ROUNDS_MAX];

    for (uint32_t r = 0; r < rounds; r++) {
        sealed[r] = call_seal(world, true);
        bare[r] = call_seal(world, false);
    }
    row(bench, "slot to L2 on the CPU: XXH3 and check", "memcpy of 1 MiB", sealed, bare, rounds, 0);
}

static void bench_convert(struct bench *bench, struct world *world, uint32_t rounds)
{
    static const char *names[][2] = {
        {"CPU, BF16 to FP8, raw bytes", "CPU, FP8 to BF16, raw bytes"},
        {"CPU, BF16 to INT8, raw bytes", "CPU, INT8 to BF16, raw bytes"}};
    double to[ROUNDS_MAX], from[ROUNDS_MAX], bare[ROUNDS_MAX];

    shuffle(world, PAYLOADS);
    for (uint32_t k = 0; k < 2; k++) {
        enum kvt_quant_kind kind = k == 0 ? KVT_QUANT_FP8_E4M3 : KVT_QUANT_INT8;

        for (uint32_t r = 0; r < rounds; r++) {
            to[r] = call_convert(world, kind, true);
            from[r] = call_convert(world, kind, false);
            bare[r] = call_memcpy(world, PAYLOAD_BYTES, false);
        }
        row(bench, names[k][0], "memcpy of the raw bytes", to, bare, rounds, 0);
        row(bench, names[k][1], "memcpy of the raw bytes", from, bare, rounds, 0);
    }
}

int main(int argc, char **argv)
{
    static struct world world;
    struct bench bench;
    uint32_t rounds;

    bench_begin(&bench, "kernels on the CPU", argc, argv);
    rounds = bench.is_quick ? 3 : ROUNDS_MAX;
    world_open(&world);
    bench_gather(&bench, &world, rounds);
    bench_check(&bench, &world, rounds);
    bench_seal(&bench, &world, rounds);
    bench_convert(&bench, &world, rounds);
    free(world.pool);
    free(world.payloads);
    return bench_end(&bench);
}
