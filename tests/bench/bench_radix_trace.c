/* A whole trace through the tree, unlimited: each prompt is cut at its input_length, looked up and
 * then stored. Lines are {"input_length": N, "hash_ids": [..]}, an id standing for 512 tokens; its
 * tokens are made from it. Only the calls to the tree are timed. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/bench/bench_radix.h"

#define ID_TOKENS 512u
#define LINE_BYTES (4u << 20)

struct totals {
    uint64_t requests, lookup_tokens, hit_tokens, ns;
};

/* The tokens of one line; 0: it has no prompt. */
static uint64_t line_tokens(const char *line, uint32_t *tokens)
{
    const char *at = strstr(line, "\"input_length\":"), *ids = strstr(line, "\"hash_ids\":");
    uint64_t length, count = 0;
    char *end;

    if (at == NULL || ids == NULL)
        return 0;
    length = strtoull(at + strlen("\"input_length\":"), NULL, 10);
    ids = strchr(ids, '[');
    while (ids != NULL && *ids != ']' && *ids != '\0') {
        uint64_t id = strtoull(ids + 1, &end, 10);

        if (end == ids + 1 || count + ID_TOKENS > KVT_REQUEST_TOKENS_MAX)
            break;
        for (uint32_t k = 0; k < ID_TOKENS; k++)
            tokens[count++] = (uint32_t)((id * ID_TOKENS + k) * 0x9e3779b97f4a7c15ull >> 40);
        ids = end;
    }
    return KVT_MIN(length, count);
}

static void replay(struct kvt_radix *radix, struct kvt_radix_ns ns, const uint32_t *tokens,
                   uint64_t count, struct totals *totals)
{
    const uint8_t bits[2] = {1, 1};
    struct kvt_radix_lookup lookup = {.prefix = {.ns = ns, .tokens = tokens, .tokens_count = count},
                                      .limit_tokens = UINT64_MAX,
                                      .mask_allowed = 1,
                                      .is_touch = true};
    struct kvt_radix_match match;
    uint64_t start = bench_now_ns();

    KVT_ASSERT(kvt_radix_lookup(radix, &lookup, &match) == 0);
    (void)bench_radix_store(radix, &lookup.prefix, 1, bits);
    totals->ns += bench_now_ns() - start;
    totals->requests++;
    totals->lookup_tokens += count;
    totals->hit_tokens += match.boundary_tokens;
}

static void memory_row(struct bench *bench, const struct kvt_radix_stats *stats, uint64_t bytes,
                       const char *what, bool has_tags)
{
    char name[96];

    (void)snprintf(name, sizeof(name), "trace: index memory beside tokens, %s%s", what,
                   has_tags ? ", with tags" : "");
    bench_row(bench, &(struct bench_row){.name = name,
                                         .unit = "B/block",
                                         .value = (double)(bytes - stats->tokens_bytes) /
                                                  (double)stats->blocks,
                                         .target = 64});
}

static void report(struct bench *bench, const struct kvt_radix *radix, const struct totals *totals,
                   uint32_t how)
{
    bool is_populated = (how & BENCH_RADIX_POPULATED) != 0, has_tags = how & BENCH_RADIX_TAGS;
    struct kvt_radix_stats stats;
    char name[96];

    kvt_radix_stats(radix, &stats);
    (void)snprintf(name, sizeof(name), "trace: requests through the tree%s",
                   has_tags        ? ", with tags"
                   : !is_populated ? ", memory first touched then"
                                   : "");
    bench_row(bench, &(struct bench_row){.name = name,
                                         .unit = "1/s",
                                         .value = (double)totals->requests * 1e9 /
                                                  (double)KVT_MAX(totals->ns, 1ull),
                                         .target = is_populated ? 40000 : 0,
                                         .is_least = true});
    if (!is_populated)
        return;
    memory_row(bench, &stats, stats.memory_used_bytes, "used", has_tags);
    memory_row(bench, &stats, stats.memory_taken_bytes, "taken", has_tags);
    if (has_tags)
        return;
    bench_row(bench, &(struct bench_row){.name = "trace: hit tokens",
                                         .unit = "tokens",
                                         .value = (double)totals->hit_tokens});
    if (!bench->is_json)
        printf("    exactly %llu of %llu tokens in %llu requests\n",
               (unsigned long long)totals->hit_tokens, (unsigned long long)totals->lookup_tokens,
               (unsigned long long)totals->requests);
}

int bench_radix_trace(struct bench *bench, const char *path, uint32_t how)
{
    struct kvt_radix *radix = bench_radix_new((size_t)1 << 30, how);
    struct kvt_radix_ns ns = bench_radix_ns(radix, 0);
    uint32_t *tokens = malloc(KVT_REQUEST_TOKENS_MAX * sizeof(uint32_t));
    char *line = malloc(LINE_BYTES);
    FILE *file = fopen(path, "re");
    struct totals totals = {0};

    if (file == NULL || tokens == NULL || line == NULL) {
        (void)fprintf(stderr, "%s: %m\n", path);
        return 1;
    }
    while (fgets(line, LINE_BYTES, file) != NULL) {
        uint64_t count = line_tokens(line, tokens);

        if (count > 0)
            replay(radix, ns, tokens, count, &totals);
    }
    report(bench, radix, &totals, how);
    (void)fclose(file);
    free(line);
    free(tokens);
    (void)kvt_radix_free(radix);
    return 0;
}
