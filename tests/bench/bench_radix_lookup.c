/* Lookups that hit the whole prompt, against memcmp of the same bytes. The prompt and the tokens in
 * the tree are different memory, as in memcmp's two arguments. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/bench/bench_radix.h"

#define TOKENS 81920u
#define CURSOR_TOKENS 512u
#define WARM_TURNS 16u
#define ROUNDS_MAX 1001u

struct subject {
    const char *name;
    uint32_t window_tokens;
    bool is_alternating, is_branched;
    double target;
};

static uint64_t lookup_ns(struct kvt_radix *radix, const struct kvt_radix_lookup *lookup,
                          uint64_t expect_tokens, uint32_t turns)
{
    struct kvt_radix_match match;
    uint64_t start = bench_now_ns();

    for (uint32_t i = 0; i < turns; i++) {
        KVT_ASSERT(kvt_radix_lookup(radix, lookup, &match) == 0);
        KVT_ASSERT(match.boundary_tokens == expect_tokens);
    }
    return bench_now_ns() - start;
}

static uint64_t memcmp_ns(const uint32_t *a, const uint32_t *b, size_t bytes, uint32_t turns)
{
    uint64_t start = bench_now_ns();

    for (uint32_t i = 0; i < turns; i++) {
        bench_use((uint64_t)(uintptr_t)a);
        bench_use((uint64_t)(memcmp(a, b, bytes) != 0));
    }
    return bench_now_ns() - start;
}

static void fill(struct kvt_radix *radix, struct kvt_radix_ns ns, const struct subject *subject,
                 const uint32_t *tokens)
{
    const uint8_t bits[2] = {1, subject->is_alternating ? 2 : 1};
    const uint32_t components = subject->window_tokens > 0 ? 2 : 1;
    struct kvt_radix_prefix prefix = {.ns = ns, .tokens = tokens, .tokens_count = TOKENS};

    (void)bench_radix_store(radix, &prefix, components, bits);
    if (!subject->is_branched)
        return;
    /* 160 nodes of 8 blocks: at the end of each another block follows as well. */
    for (uint32_t at = 512; at < TOKENS; at += 512) {
        uint32_t *side = malloc((at + BENCH_RADIX_BLOCK_TOKENS) * sizeof(uint32_t));

        KVT_ASSERT(side != NULL);
        memcpy(side, tokens, at * sizeof(uint32_t));
        memset(side + at, 0xab, BENCH_RADIX_BLOCK_TOKENS * sizeof(uint32_t));
        prefix.tokens = side;
        prefix.tokens_count = at + BENCH_RADIX_BLOCK_TOKENS;
        (void)bench_radix_store(radix, &prefix, components, bits);
        free(side);
    }
}

static void measure(struct bench *bench, const struct subject *subject, uint32_t rounds)
{
    static double warm[ROUNDS_MAX], warm_limit[ROUNDS_MAX], cold[ROUNDS_MAX],
        cold_limit[ROUNDS_MAX];
    struct kvt_radix *radix = bench_radix_new(256 << 20, 0);
    struct kvt_radix_ns ns = bench_radix_ns(radix, subject->window_tokens);
    uint32_t *tokens = aligned_alloc(64, TOKENS * sizeof(uint32_t));
    uint32_t *copy = aligned_alloc(64, TOKENS * sizeof(uint32_t)), cold_rounds = rounds / 8 + 1;
    struct kvt_radix_lookup lookup = {
        .prefix = {.ns = ns, .tokens = tokens, .tokens_count = TOKENS},
        .limit_tokens = UINT64_MAX,
        .mask_allowed = 0x07,
        .is_touch = true};
    uint64_t state = 88172645463325252ull;
    char name[96];

    KVT_ASSERT(tokens != NULL && copy != NULL && rounds <= ROUNDS_MAX);
    for (uint32_t i = 0; i < TOKENS; i++)
        copy[i] = tokens[i] = (uint32_t)bench_radix_random(&state) % 150000;
    fill(radix, ns, subject, tokens);
    (void)lookup_ns(radix, &lookup, TOKENS, 100);
    for (uint32_t i = 0; i < rounds; i++) {
        warm[i] = (double)lookup_ns(radix, &lookup, TOKENS, WARM_TURNS) / 1000 / WARM_TURNS;
        warm_limit[i] = (double)memcmp_ns(copy, tokens, TOKENS * sizeof(uint32_t), WARM_TURNS) /
                        1000 / WARM_TURNS;
    }
    for (uint32_t i = 0; i < cold_rounds; i++) {
        bench_flush_caches();
        cold[i] = (double)lookup_ns(radix, &lookup, TOKENS, 1) / 1000;
        bench_flush_caches();
        cold_limit[i] = (double)memcmp_ns(copy, tokens, TOKENS * sizeof(uint32_t), 1) / 1000;
    }
    (void)snprintf(name, sizeof(name), "lookup 81,920 tokens, %s, warm", subject->name);
    bench_row(bench, &(struct bench_row){.name = name,
                                         .unit = "us",
                                         .value = bench_median(warm, rounds),
                                         .limit_name = "memcmp",
                                         .limit = bench_median(warm_limit, rounds),
                                         .target = subject->target});
    (void)snprintf(name, sizeof(name), "lookup 81,920 tokens, %s, cold", subject->name);
    bench_row(bench, &(struct bench_row){.name = name,
                                         .unit = "us",
                                         .value = bench_median(cold, cold_rounds),
                                         .limit_name = "memcmp",
                                         .limit = bench_median(cold_limit, cold_rounds),
                                         .target = subject->target});
    free(copy);
    free(tokens);
    (void)kvt_radix_free(radix);
}

static void measure_cursor(struct bench *bench, uint32_t rounds)
{
    static double values[ROUNDS_MAX];
    struct kvt_radix *radix = bench_radix_new(256 << 20, 0);
    struct kvt_radix_ns ns = bench_radix_ns(radix, 0);
    const uint8_t bits[2] = {1, 1};
    uint32_t *tokens = malloc((TOKENS + CURSOR_TOKENS) * sizeof(uint32_t));
    struct kvt_radix_prefix prefix = {.ns = ns, .tokens = tokens, .tokens_count = TOKENS};
    struct kvt_radix_lookup lookup = {
        .limit_tokens = UINT64_MAX, .mask_allowed = 0x07, .is_touch = true};

    KVT_ASSERT(tokens != NULL);
    for (uint32_t i = 0; i < TOKENS + CURSOR_TOKENS; i++)
        tokens[i] = i * 2654435761u;
    lookup.prefix.after = bench_radix_store(radix, &prefix, 1, bits);
    prefix.tokens_count += CURSOR_TOKENS;
    (void)bench_radix_store(radix, &prefix, 1, bits);
    lookup.prefix.ns = ns;
    lookup.prefix.tokens = tokens + TOKENS;
    lookup.prefix.tokens_count = CURSOR_TOKENS;
    for (uint32_t i = 0; i < rounds; i++)
        values[i] = (double)lookup_ns(radix, &lookup, TOKENS + CURSOR_TOKENS, 1000) / 1000 / 1000;
    bench_row(bench, &(struct bench_row){.name = "cursor lookup, 512 tokens after 81,920, warm",
                                         .unit = "us",
                                         .value = bench_median(values, rounds),
                                         .target = 1});
    free(tokens);
    (void)kvt_radix_free(radix);
}

void bench_radix_lookup(struct bench *bench, uint32_t rounds)
{
    static const struct subject subjects[] = {
        {.name = "one edge, full", .target = 1.25},
        {.name = "one edge, full + window", .window_tokens = 1023, .target = 1.25},
        {.name = "160 nodes, full", .is_branched = true, .target = 2},
        {.name = "160 nodes, full + window",
         .is_branched = true,
         .window_tokens = 1023,
         .target = 2},
        {.name = "alternating tiers, full", .is_alternating = true, .target = 2},
        {.name = "alternating tiers, full + window",
         .is_alternating = true,
         .window_tokens = 1023,
         .target = 2},
    };

    for (uint32_t i = 0; i < KVT_COUNT_OF(subjects); i++)
        measure(bench, &subjects[i], rounds);
    measure_cursor(bench, rounds);
}
