/* L2 <-> a memfd of another process, and the start of L2.
 *
 * Load is HOST -> CLIENT through the tier, 32 MiB a call, against memcpy of the same bytes between
 * the same memories in the same order. Store is CLIENT -> HOST with the checksum, against the best
 * of four arrangements of memcpy and XXH3: one after the other over the whole block, and chunk by
 * chunk with 16, 32 and 64 KiB. Rounds are interleaved and walk through regions larger than the
 * caches. Quantised is the same with BF16 that become FP8 E4M3, in GB/s of what the engine has,
 * against the kernels alone on the same planes (and XXH3 of what they made). Start is kvt_host_open
 * against populate + lock of as much memory of the same kind. All of it twice: over L2 as this
 * machine gives it, and as tiers.l2.pages: anonymous does, where it does.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "daemon/base/clock.h"
#include "daemon/base/hash.h"
#include "tests/bench/bench.h"
#include "tiers/host/host.h"

#define REGION_BYTES (512u << 20)
#define CALL_BYTES (32u << 20)
#define BLOCK_TOKENS 64u
#define ROUNDS_MAX 15u
#define XFERS_MAX (CALL_BYTES / (256u << 10))

struct world {
    struct kvt_doorbell bell;
    struct kvt_tier *host;
    struct kvt_region region;
    struct kvt_layout layout;
    struct kvt_layout_piece piece;
    uint64_t block_bytes, stored_bytes, slot_bytes;
    uint32_t header_bytes, blocks_count;
    uint64_t ids[REGION_BYTES / (256u << 10)];
    struct kvt_xfer xfers[XFERS_MAX];
    uint32_t next; /* block that the next call begins with */
};

static void die(const char *what, int r)
{
    fprintf(stderr, "bench_host: %s: %s\n", what, strerror(-r));
    exit(1);
}

/* False when the machine has no such memory. */
static bool world_open(struct world *world, enum kvt_host_pages pages)
{
    struct kvt_host_config config = {.bytes = REGION_BYTES + (8u << 20),
                                     .pages = pages,
                                     .inflight_max = XFERS_MAX,
                                     .doorbell = &world->bell};
    int fd, r;

    r = kvt_doorbell_init(&world->bell);
    if (r == 0)
        r = kvt_host_open(&world->host, &config);
    if (r != 0 && pages != KVT_HOST_PAGES_AUTO) {
        kvt_doorbell_deinit(&world->bell);
        return false;
    }
    if (r != 0)
        die("L2", r);
    fd = memfd_create("bench", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0 || ftruncate(fd, REGION_BYTES) < 0)
        die("memfd", -errno);
    /* Touched through another mapping, as the engine's process would. */
    world->region.bytes = world->region.mapped_bytes = REGION_BYTES;
    world->region.base = mmap(NULL, REGION_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (world->region.base == MAP_FAILED)
        die("memfd", -errno);
    world->region.is_mapped = true;
    close(fd);
    for (uint64_t i = 0; i < REGION_BYTES / 8; i++)
        ((uint64_t *)(void *)world->region.base)[i] = i * 0x9e3779b97f4a7c15ull;
    return true;
}

static void world_close(struct world *world)
{
    world->host = kvt_tier_close(world->host);
    kvt_region_close(&world->region);
    kvt_doorbell_deinit(&world->bell);
}

static const char *l2_name(enum kvt_host_pages pages)
{
    return pages == KVT_HOST_PAGES_ANONYMOUS ? "anonymous L2" : "L2";
}

/* Planes of 16 tokens, 8 heads of 128: 32 KiB. */
static const struct kvt_quant_spec fp8 = {.kind = KVT_QUANT_FP8_E4M3,
                                          .elem = KVT_ELEM_BF16,
                                          .order = KVT_ORDER_TOKENS_FIRST,
                                          .plane_tokens = 16,
                                          .heads = 8,
                                          .head_dim = 128};

static void world_shape(struct world *world, uint64_t block_bytes,
                        const struct kvt_quant_spec *quant)
{
    uint32_t tokens[BLOCK_TOKENS] = {0};

    world->block_bytes = block_bytes;
    world->stored_bytes = quant == NULL ? block_bytes : kvt_quant_bytes(quant, block_bytes);
    world->header_bytes = kvt_slot_header_bytes(BLOCK_TOKENS);
    world->slot_bytes = kvt_slot_bytes(BLOCK_TOKENS, world->stored_bytes);
    /* Whole calls only, and every slot fits L2. */
    world->blocks_count = (uint32_t)(world->host->capacity_bytes / world->slot_bytes);
    world->blocks_count = KVT_MIN(world->blocks_count, (uint32_t)(REGION_BYTES / block_bytes));
    world->blocks_count -= world->blocks_count % (uint32_t)(CALL_BYTES / block_bytes);
    world->next = 0;
    world->piece =
        (struct kvt_layout_piece){.bytes = (uint32_t)block_bytes, .stride_bytes = block_bytes};
    world->layout = (struct kvt_layout){
        .pieces_count = 1, .engine_blocks_per_block = 1, .pieces = &world->piece};
    if (quant != NULL)
        world->layout.quant = *quant;
    if (kvt_layout_resolve(&world->layout, &world->region, 1, block_bytes) != 0)
        die("layout", -EINVAL);
    for (uint32_t i = 0; i < world->blocks_count; i++) {
        struct kvt_slot_info info = {.payload_bytes = world->stored_bytes,
                                     .block_tokens = BLOCK_TOKENS};

        world->ids[i] = i;
        kvt_slot_header_write(kvt_host_memory(world->host) + i * world->slot_bytes, &info, tokens);
    }
}

static uint8_t *slot_payload(const struct world *world, uint32_t block)
{
    return kvt_host_memory(world->host) + block * world->slot_bytes + world->header_bytes;
}

/* GB/s of one call of 32 MiB through the tier. */
static double call_tier(struct world *world, bool is_store)
{
    uint32_t count = (uint32_t)(CALL_BYTES / world->block_bytes), reaped = 0, taken = 0;
    struct kvt_xfer *list[XFERS_MAX];
    uint64_t started_ns;

    for (uint32_t i = 0; i < count; i++) {
        uint32_t block = (world->next + i) % world->blocks_count;
        struct kvt_place host = {.kind = KVT_PLACE_HOST, .offset_bytes = block * world->slot_bytes};
        struct kvt_place client = {.kind = KVT_PLACE_CLIENT,
                                   .view = {.layout = &world->layout,
                                            .engine_blocks = &world->ids[block],
                                            .end_piece = 1}};

        world->xfers[i] = (struct kvt_xfer){
            .src = is_store ? client : host,
            .dst = is_store ? host : client,
            .key = {.payload_bytes = world->stored_bytes, .block_tokens = BLOCK_TOKENS},
            .header_bytes = world->header_bytes,
            .slot_bytes = world->slot_bytes,
            .deadline_ns = KVT_TIME_NEVER_NS};
        list[i] = &world->xfers[i];
    }
    started_ns = kvt_clock_mono_ns();
    if (kvt_tier_submit(world->host, list, count, &taken) != 0 || taken != count)
        die("submit", -EBUSY);
    while (reaped < count) {
        uint32_t got = kvt_tier_reap(world->host, list, count);

        for (uint32_t i = 0; i < got; i++)
            if (list[i]->status != KVT_XFER_DONE)
                die("transfer", -EIO);
        reaped += got;
        if (got > 0 || reaped == count)
            continue;
        kvt_doorbell_arm(&world->bell);
        got = kvt_tier_reap(world->host, list, count);
        reaped += got;
        if (got > 0)
            kvt_doorbell_disarm(&world->bell);
        else
            kvt_doorbell_wait(&world->bell, KVT_NS_PER_S);
    }
    world->next = (world->next + count) % world->blocks_count;
    return (double)CALL_BYTES / (double)(kvt_clock_mono_ns() - started_ns);
}

static uint64_t store_chunked(uint8_t *dst, const uint8_t *src, uint64_t bytes, uint64_t chunk)
{
    struct kvt_hash_stream hash;

    kvt_hash_stream_init(&hash, 0);
    for (uint64_t at = 0; at < bytes; at += chunk) {
        memcpy(dst + at, src + at, chunk);
        kvt_hash_stream_update(&hash, dst + at, chunk);
    }
    return kvt_hash_stream_digest(&hash);
}

/* The same bytes by hand. @chunk 0: memcpy, then the hash of the whole; is_load: memcpy alone. */
static double call_bare(struct world *world, bool is_load, uint64_t chunk)
{
    uint32_t count = (uint32_t)(CALL_BYTES / world->block_bytes);
    uint64_t started_ns = kvt_clock_mono_ns(), sum = 0;

    for (uint32_t i = 0; i < count; i++) {
        uint32_t block = (world->next + i) % world->blocks_count;
        uint8_t *client = world->region.base + block * world->block_bytes;

        if (is_load) {
            memcpy(client, slot_payload(world, block), world->block_bytes);
        } else if (chunk == 0) {
            memcpy(slot_payload(world, block), client, world->block_bytes);
            sum += kvt_hash64(slot_payload(world, block), world->block_bytes, 0);
        } else {
            sum += store_chunked(slot_payload(world, block), client, world->block_bytes, chunk);
        }
    }
    bench_use(sum);
    world->next = (world->next + count) % world->blocks_count;
    return (double)CALL_BYTES / (double)(kvt_clock_mono_ns() - started_ns);
}

/* What the kernels need for the same planes, nothing around them. */
static double call_kernels(struct world *world, bool is_store)
{
    uint32_t count = (uint32_t)(CALL_BYTES / world->block_bytes);
    uint32_t planes = (uint32_t)(world->block_bytes / kvt_quant_plane_bytes(&fp8));
    uint64_t started_ns = kvt_clock_mono_ns(), sum = 0;

    for (uint32_t i = 0; i < count; i++) {
        uint32_t block = (world->next + i) % world->blocks_count;
        uint8_t *payload = slot_payload(world, block);
        struct kvt_quant_job job = {.raw =
                                        (uintptr_t)world->region.base + block * world->block_bytes,
                                    .quantised = (uintptr_t)payload,
                                    .planes_count = planes,
                                    .end_plane = planes};
        struct kvt_quant_batch batch = {
            .spec = fp8, .jobs = (uintptr_t)&job, .jobs_count = 1, .planes_max = planes};
        int r = is_store ? kvt_kernels_host()->quantise(NULL, &batch)
                         : kvt_kernels_host()->dequantise(NULL, &batch);

        if (r != 0)
            die("kernels", r);
        if (is_store)
            sum += kvt_hash64(payload, world->stored_bytes, 0);
    }
    bench_use(sum);
    world->next = (world->next + count) % world->blocks_count;
    return (double)CALL_BYTES / (double)(kvt_clock_mono_ns() - started_ns);
}

/* A cache has numbers within some powers of two, not any bits. */
static void make_bf16(struct world *world)
{
    uint16_t *elements = (void *)world->region.base;

    for (uint64_t i = 0; i < REGION_BYTES / 2; i++)
        elements[i] = (uint16_t)((elements[i] & 0x83ffu) | 0x3c00u); /* 2^-7 .. 2 */
}

static void bench_quantised(struct bench *bench, struct world *world)
{
    static const char *const names[] = {"L2 to memfd, 1 MiB blocks, from FP8",
                                        "memfd to L2, checksum, 1 MiB blocks, as FP8"};
    static const char *const limits[] = {"the kernels alone", "the kernels, then XXH3"};
    double tier[2][ROUNDS_MAX], bare[2][ROUNDS_MAX];
    uint32_t rounds = bench->is_quick ? 3 : ROUNDS_MAX;

    make_bf16(world);
    world_shape(world, KVT_MIB, &fp8);
    for (uint32_t i = 0; i < world->blocks_count / (CALL_BYTES / KVT_MIB); i++)
        (void)call_tier(world, true);
    for (uint32_t r = 0; r < rounds; r++) {
        for (uint32_t is_store = 0; is_store < 2; is_store++) {
            tier[is_store][r] = call_tier(world, is_store);
            bare[is_store][r] = call_kernels(world, is_store);
        }
    }
    for (uint32_t i = 0; i < 2; i++)
        bench_row(bench, &(struct bench_row){.name = names[i],
                                             .value = bench_median(tier[i], rounds),
                                             .unit = "GB/s",
                                             .limit_name = limits[i],
                                             .limit = bench_median(bare[i], rounds),
                                             .is_least = true,
                                             .target = 0.9});
}

static void bench_size(struct bench *bench, struct world *world, const char *name,
                       uint64_t block_bytes)
{
    static const uint64_t chunks[] = {0, 16 << 10, 32 << 10, 64 << 10};
    static const char *names[] = {"memcpy, then XXH3", "chunks of 16 KiB", "chunks of 32 KiB",
                                  "chunks of 64 KiB"};
    static char figures[16][64], limits[16][64];
    static uint32_t texts;
    double load[ROUNDS_MAX], bare[ROUNDS_MAX], store[ROUNDS_MAX], by_chunk[4][ROUNDS_MAX];
    double best = 0, value;
    uint32_t rounds = bench->is_quick ? 3 : ROUNDS_MAX, which = 0;

    world_shape(world, block_bytes, NULL);
    for (uint32_t i = 0; i < world->blocks_count / (CALL_BYTES / block_bytes); i++)
        (void)call_tier(world, true);
    for (uint32_t r = 0; r < rounds; r++) {
        load[r] = call_tier(world, false);
        bare[r] = call_bare(world, true, 0);
        store[r] = call_tier(world, true);
        for (uint32_t c = 0; c < KVT_COUNT_OF(chunks); c++)
            by_chunk[c][r] = call_bare(world, false, chunks[c]);
    }
    for (uint32_t c = 0; c < KVT_COUNT_OF(chunks); c++) {
        value = bench_median(by_chunk[c], rounds);
        if (value > best) {
            best = value;
            which = c;
        }
    }
    snprintf(figures[texts], sizeof(figures[0]), "%s to memfd, %llu KiB blocks", name,
             (unsigned long long)(block_bytes >> 10));
    bench_row(bench, &(struct bench_row){.name = figures[texts],
                                         .value = bench_median(load, rounds),
                                         .unit = "GB/s",
                                         .limit_name = "memcpy",
                                         .limit = bench_median(bare, rounds),
                                         .is_least = true,
                                         .target = 0.9});
    texts++;
    snprintf(figures[texts], sizeof(figures[0]), "memfd to %s, checksum, %llu KiB blocks", name,
             (unsigned long long)(block_bytes >> 10));
    snprintf(limits[texts], sizeof(limits[0]), "best of memcpy + XXH3: %s", names[which]);
    bench_row(bench, &(struct bench_row){.name = figures[texts],
                                         .value = bench_median(store, rounds),
                                         .unit = "GB/s",
                                         .limit_name = limits[texts],
                                         .limit = best,
                                         .is_least = true,
                                         .target = 0.9});
    texts++;
}

/* Milliseconds to populate and lock @bytes by hand: memory of the same kind, one thread. */
static double start_bare(uint64_t bytes, bool is_anonymous)
{
    int flags = is_anonymous ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED;
    int fd = memfd_create("bench", MFD_CLOEXEC);
    uint64_t started_ns = kvt_clock_mono_ns(), ended_ns;
    void *base;

    if (fd < 0 || ftruncate(fd, (off_t)bytes) < 0)
        die("memfd", -errno);
    base = mmap(NULL, bytes, PROT_READ | PROT_WRITE, flags, is_anonymous ? -1 : fd, 0);
    if (base == MAP_FAILED)
        die("mmap", -errno);
    if (is_anonymous)
        (void)madvise(base, bytes, MADV_HUGEPAGE);
    if (madvise(base, bytes, MADV_POPULATE_WRITE) < 0)
        die("populate", -errno);
    (void)mlock(base, bytes); /* may be refused: then it is refused to the tier too */
    ended_ns = kvt_clock_mono_ns();
    (void)munmap(base, bytes);
    close(fd);
    return (double)(ended_ns - started_ns) / 1e6;
}

static void bench_start(struct bench *bench, enum kvt_host_pages pages)
{
    uint64_t bytes = bench->is_quick ? 128 * KVT_MIB : KVT_GIB;
    double tier_ms[5], bare_ms[5];
    uint32_t rounds = bench->is_quick ? 1 : 5;
    static char details[2][sizeof(((struct kvt_tier *)NULL)->detail)], figures[2][48];
    char *detail = details[pages == KVT_HOST_PAGES_ANONYMOUS];
    char *figure = figures[pages == KVT_HOST_PAGES_ANONYMOUS];
    struct kvt_doorbell bell = KVT_DOORBELL_NULL;
    struct kvt_host_config config = {
        .bytes = bytes, .pages = pages, .inflight_max = 8, .doorbell = &bell};

    if (kvt_doorbell_init(&bell) < 0)
        die("doorbell", -EMFILE);
    for (uint32_t r = 0; r < rounds; r++) {
        uint64_t started_ns = kvt_clock_mono_ns();
        struct kvt_tier *tier = NULL;
        int result = kvt_host_open(&tier, &config);

        if (result != 0)
            die("L2", result);
        tier_ms[r] = (double)(kvt_clock_mono_ns() - started_ns) / 1e6;
        snprintf(detail, sizeof(details[0]), "%s", tier->detail);
        tier = kvt_tier_close(tier);
        bare_ms[r] = start_bare(bytes, pages == KVT_HOST_PAGES_ANONYMOUS);
    }
    kvt_doorbell_deinit(&bell);
    snprintf(figure, sizeof(figures[0]), "open of %s, %s", l2_name(pages),
             bench->is_quick ? "128 MiB" : "1 GiB");
    bench_row(bench, &(struct bench_row){.name = figure,
                                         .value = bench_median(tier_ms, rounds),
                                         .unit = "ms",
                                         .limit_name = "populate + lock, one thread",
                                         .limit = bench_median(bare_ms, rounds),
                                         .is_least = false,
                                         .target = 1.3,
                                         .note = detail});
}

int main(int argc, char **argv)
{
    static const enum kvt_host_pages pages[] = {KVT_HOST_PAGES_AUTO, KVT_HOST_PAGES_ANONYMOUS};
    static struct world world;
    struct bench bench;

    bench_begin(&bench, "L2 and engines' memory", argc, argv);
    for (size_t i = 0; i < KVT_COUNT_OF(pages); i++) {
        if (!world_open(&world, pages[i]))
            continue;
        for (uint64_t block_bytes = 256 << 10; block_bytes <= 4 << 20; block_bytes *= 4)
            bench_size(&bench, &world, l2_name(pages[i]), block_bytes);
        if (i == 0)
            bench_quantised(&bench, &world);
        world_close(&world);
        bench_start(&bench, pages[i]);
    }
    return bench_end(&bench);
}
