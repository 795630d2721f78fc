/* The figures of the tree alone.
 *
 *     bench-radix [--json] [--quick] [--rounds N] [--leaves N] [--trace FILE]
 *
 * Limits are measured in the same run and in turns with what they limit: memcmp of the same bytes
 * in the same state (warm, or after the caches were flushed), a bare hash table in C. */
#include "tests/bench/bench_radix.h"

#include <malloc.h>
#include <stdio.h>
#include <stdlib.h>

struct kvt_radix *bench_radix_new(size_t memory_bytes, uint32_t how)
{
    const struct kvt_radix_config config = {.memory_bytes = memory_bytes,
                                            .seed = 0x5eed,
                                            .namespaces_max = 4,
                                            .roots_max = 16,
                                            .mask_evictable = 0x07,
                                            .is_populated = (how & BENCH_RADIX_POPULATED) != 0,
                                            .has_tags = (how & BENCH_RADIX_TAGS) != 0};
    struct kvt_radix *radix;

    if (kvt_radix_new(&radix, &config) != 0) {
        (void)fprintf(stderr, "no memory for a tree of %zu bytes\n", memory_bytes);
        exit(1);
    }
    return radix;
}

struct kvt_radix_ns bench_radix_ns(struct kvt_radix *radix, uint32_t window_tokens)
{
    struct kvt_radix_spec spec = {.block_tokens = BENCH_RADIX_BLOCK_TOKENS,
                                  .components_count = window_tokens > 0 ? 2 : 1};
    struct kvt_radix_ns ns;

    spec.components[0].kind = KVT_COMPONENT_FULL;
    spec.components[1].kind = KVT_COMPONENT_SLIDING_WINDOW;
    spec.components[1].window_tokens = window_tokens;
    KVT_ASSERT(kvt_radix_ns_open(radix, &spec, &ns) == 0);
    return ns;
}

struct kvt_radix_block bench_radix_store(struct kvt_radix *radix,
                                         const struct kvt_radix_prefix *prefix, uint32_t components,
                                         const uint8_t bits[2])
{
    static struct kvt_radix_cell cells[1u << 16];
    struct kvt_radix_block end;
    uint64_t fresh, blocks;

    KVT_ASSERT(kvt_radix_insert(radix, prefix, &end, &fresh) == 0);
    if (fresh == 0)
        return end;
    blocks = kvt_radix_depth_blocks(radix, end);
    KVT_ASSERT(fresh <= KVT_COUNT_OF(cells));
    KVT_ASSERT(kvt_radix_path(radix, end, 0, blocks - fresh, fresh, cells) == 0);
    for (uint64_t i = 0; i < fresh; i++) {
        for (uint32_t c = 0; c < components; c++)
            KVT_ASSERT(kvt_radix_put(radix, cells[i].block, c, bits[i % 2], (uint32_t)i + 1) == 0);
    }
    kvt_radix_settle(radix, end);
    return end;
}

uint64_t bench_radix_random(uint64_t *state)
{
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state;
}

int main(int argc, char **argv)
{
    const char *trace = bench_arg(argc, argv, "--trace");
    uint32_t leaves, rounds;
    struct bench bench;
    int r = 0;

    /* The hash tables that are compared with get memory that was used before, as the tree does. */
    (void)mallopt(M_MMAP_THRESHOLD, 1 << 30);
    (void)mallopt(M_TRIM_THRESHOLD, INT32_MAX);
    bench_begin(&bench, "radix", argc, argv);
    leaves = (uint32_t)bench_arg_u64(argc, argv, "--leaves", bench.is_quick ? 10000 : 1000000);
    rounds = (uint32_t)bench_arg_u64(argc, argv, "--rounds", bench.is_quick ? 5 : 201);
    bench_radix_lookup(&bench, rounds);
    bench_radix_insert(&bench, leaves);
    for (uint32_t count = leaves / 100; count <= leaves; count *= 10)
        bench_radix_evict(&bench, count);
    if (trace != NULL)
        r = bench_radix_trace(&bench, trace, BENCH_RADIX_POPULATED) |
            bench_radix_trace(&bench, trace, 0) |
            bench_radix_trace(&bench, trace, BENCH_RADIX_POPULATED | BENCH_RADIX_TAGS);
    return bench_end(&bench) != 0 || r != 0;
}
