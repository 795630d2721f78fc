/* Inserts and evictions. The bare hash insert that leaves are measured against is an
 * open-addressing table in C that grows by doubling, fed the same blocks: it hashes each block's
 * 256 bytes with the same function and stores hash and number; in a second form it copies the block
 * as well, as a table that compares keys must. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/hash.h"
#include "tests/bench/bench_radix.h"

#define ROUNDS 3u
#define BLOCK_BYTES (BENCH_RADIX_BLOCK_TOKENS * sizeof(uint32_t))

struct slot {
    uint64_t hash;
    uint64_t value;
    uint32_t *key;
};

static uint32_t *leaves_make(uint32_t leaves)
{
    uint32_t *tokens = malloc(leaves * BLOCK_BYTES);

    KVT_ASSERT(tokens != NULL);
    for (uint32_t i = 0; i < leaves; i++) {
        for (uint32_t k = 0; k < BENCH_RADIX_BLOCK_TOKENS; k++)
            tokens[(size_t)i * BENCH_RADIX_BLOCK_TOKENS + k] = k == 0 ? i : k;
    }
    return tokens;
}

static void slot_put(struct slot *slots, uint64_t mask, const struct slot *slot)
{
    uint64_t at = slot->hash & mask;

    while (slots[at].value != 0) {
        if (slots[at].hash == slot->hash)
            return;
        at = (at + 1) & mask;
    }
    slots[at] = *slot;
}

static double hash_insert_ns(const uint32_t *tokens, uint32_t leaves, bool is_copying)
{
    uint64_t mask = 1023, count = 0, start = bench_now_ns(), end;
    struct slot *slots = calloc(mask + 1, sizeof(*slots));

    KVT_ASSERT(slots != NULL);
    for (uint32_t i = 0; i < leaves; i++) {
        const uint32_t *block = tokens + (size_t)i * BENCH_RADIX_BLOCK_TOKENS;
        struct slot slot = {.hash = kvt_hash64(block, BLOCK_BYTES, 1), .value = i + 1};

        if (is_copying) {
            slot.key = malloc(BLOCK_BYTES);
            KVT_ASSERT(slot.key != NULL);
            memcpy(slot.key, block, BLOCK_BYTES);
        }
        if (++count * 10 > (mask + 1) * 7) {
            struct slot *larger = calloc((mask + 1) * 2, sizeof(*slots));

            KVT_ASSERT(larger != NULL);
            for (uint64_t k = 0; k <= mask; k++) {
                if (slots[k].value != 0)
                    slot_put(larger, mask * 2 + 1, &slots[k]);
            }
            mask = mask * 2 + 1;
            free(slots);
            slots = larger;
        }
        slot_put(slots, mask, &slot);
    }
    end = bench_now_ns();
    for (uint64_t k = 0; k <= mask; k++)
        free(slots[k].key);
    free(slots);
    return (double)(end - start) / leaves;
}

static double leaves_insert_ns(struct kvt_radix *radix, const uint32_t *tokens, uint32_t leaves,
                               bool is_put, bool is_tagged)
{
    struct kvt_radix_ns ns = bench_radix_ns(radix, 0);
    uint64_t start = bench_now_ns(), fresh;

    for (uint32_t i = 0; i < leaves; i++) {
        struct kvt_radix_prefix prefix = {.ns = ns,
                                          .tokens = tokens + (size_t)i * BENCH_RADIX_BLOCK_TOKENS,
                                          .tokens_count = BENCH_RADIX_BLOCK_TOKENS};
        struct kvt_radix_block end;

        KVT_ASSERT(kvt_radix_insert(radix, &prefix, &end, &fresh) == 0 && fresh == 1);
        if (is_put)
            KVT_ASSERT(kvt_radix_put(radix, end, 0, 1, i + 1) == 0);
        if (is_tagged)
            kvt_radix_set_tag(radix, end, i + 1);
    }
    return (double)(bench_now_ns() - start) / leaves;
}

static struct kvt_radix *leaves_radix(uint32_t leaves, uint32_t how)
{
    return bench_radix_new((size_t)leaves * 640 + (64 << 20), how);
}

/* A tree of its own for each: what it takes a leaf, and what its memory is then. */
static double leaves_ns(const uint32_t *tokens, uint32_t leaves, bool is_put, uint32_t how,
                        struct kvt_radix_stats *ret_stats)
{
    struct kvt_radix *radix = leaves_radix(leaves, how);
    double ns = leaves_insert_ns(radix, tokens, leaves, is_put, (how & BENCH_RADIX_TAGS) != 0);

    kvt_radix_stats(radix, ret_stats);
    (void)kvt_radix_free(radix);
    return ns;
}

static void leaves_memory(struct bench *bench, const struct kvt_radix_stats *stats,
                          const char *tagged)
{
    char name[96];

    (void)snprintf(name, sizeof(name), "index memory beside tokens, one-block leaves%s, used",
                   tagged);
    bench_row(bench, &(struct bench_row){
                         .name = name,
                         .unit = "B/block",
                         .value = (double)(stats->memory_used_bytes - stats->tokens_bytes) /
                                  (double)stats->blocks,
                         .note = "with the tables that are fixed at start"});
    (void)snprintf(name, sizeof(name), "index memory beside tokens, one-block leaves%s, taken",
                   tagged);
    bench_row(bench, &(struct bench_row){
                         .name = name,
                         .unit = "B/block",
                         .value = (double)(stats->memory_taken_bytes - stats->tokens_bytes) /
                                  (double)stats->blocks});
}

static void insert_leaves(struct bench *bench, uint32_t leaves)
{
    double bare[ROUNDS], copying[ROUNDS], insert[ROUNDS], put[ROUNDS], fresh[ROUNDS], tag[ROUNDS];
    uint32_t *tokens = leaves_make(leaves);
    struct kvt_radix_stats stats, tagged;

    for (uint32_t i = 0; i < ROUNDS; i++) {
        bare[i] = hash_insert_ns(tokens, leaves, false);
        copying[i] = hash_insert_ns(tokens, leaves, true);
        insert[i] = leaves_ns(tokens, leaves, false, BENCH_RADIX_POPULATED, &stats);
        fresh[i] = leaves_ns(tokens, leaves, false, 0, &stats);
        tag[i] = leaves_ns(tokens, leaves, true, BENCH_RADIX_POPULATED | BENCH_RADIX_TAGS, &tagged);
        put[i] = leaves_ns(tokens, leaves, true, BENCH_RADIX_POPULATED, &stats);
    }
    const struct bench_row rows[] = {
        {.name = "insert one-block leaves / bare hash insert",
         .value = bench_median(insert, ROUNDS),
         .limit = bench_median(bare, ROUNDS),
         .target = 3},
        {.name = "insert one-block leaves / hash insert that copies keys",
         .value = bench_median(insert, ROUNDS),
         .limit_name = "hash insert with key copies",
         .limit = bench_median(copying, ROUNDS),
         .target = 3},
        {.name = "insert and put of one-block leaves", .value = bench_median(put, ROUNDS)},
        {.name = "insert and put of one-block leaves, with tags",
         .value = bench_median(tag, ROUNDS)},
        {.name = "insert one-block leaves, memory first touched then",
         .value = bench_median(fresh, ROUNDS)},
    };
    for (size_t i = 0; i < KVT_COUNT_OF(rows); i++) {
        struct bench_row row = rows[i];

        row.unit = "ns";
        if (row.limit_name == NULL) {
            row.limit_name = "bare hash insert";
            row.limit = bench_median(bare, ROUNDS);
        }
        bench_row(bench, &row);
    }
    leaves_memory(bench, &stats, "");
    leaves_memory(bench, &tagged, ", with tags");
    free(tokens);
}

static void insert_long(struct bench *bench)
{
    enum { PROMPTS = 1000, TOKENS = 8192 };
    uint32_t *tokens = malloc((size_t)PROMPTS * TOKENS * sizeof(uint32_t));
    double rates[5];

    KVT_ASSERT(tokens != NULL);
    for (uint32_t i = 0; i < PROMPTS * TOKENS; i++)
        tokens[i] = i * 2654435761u;
    for (uint32_t round = 0; round < KVT_COUNT_OF(rates); round++) {
        struct kvt_radix *radix = bench_radix_new(128 << 20, BENCH_RADIX_POPULATED);
        struct kvt_radix_ns ns = bench_radix_ns(radix, 0);
        uint64_t start, fresh;

        start = bench_now_ns();
        for (uint32_t i = 0; i < PROMPTS; i++) {
            struct kvt_radix_prefix prefix = {
                .ns = ns, .tokens = tokens + (size_t)i * TOKENS, .tokens_count = TOKENS};
            struct kvt_radix_block end;

            KVT_ASSERT(kvt_radix_insert(radix, &prefix, &end, &fresh) == 0);
        }
        rates[round] = (double)PROMPTS * TOKENS * 1000 / (double)(bench_now_ns() - start);
        (void)kvt_radix_free(radix);
    }
    bench_row(bench, &(struct bench_row){.name = "insert 1,000 x 8,192 tokens",
                                         .unit = "Mtokens/s",
                                         .value = bench_median(rates, KVT_COUNT_OF(rates)),
                                         .target = 500,
                                         .is_least = true});
    free(tokens);
}

struct load {
    const char *name;
    uint32_t paths, path_blocks, run_blocks;
    double target;
};

/* As a daemon that starts again puts together what its devices still hold: paths run by run, each
 * below a cursor, every block with a copy. */
static void load_paths(struct bench *bench, const struct load *load)
{
    enum { RUN_BLOCKS_MAX = 64 };
    static uint32_t tokens[RUN_BLOCKS_MAX * BENCH_RADIX_BLOCK_TOKENS];
    const uint8_t bits[2] = {1, 1};
    struct kvt_radix *radix = bench_radix_new(
        (size_t)load->paths * load->path_blocks * 320 + (64 << 20), BENCH_RADIX_POPULATED);
    struct kvt_radix_prefix prefix = {
        .ns = bench_radix_ns(radix, 0), .tokens = tokens, .is_untouched = true};
    uint64_t start = bench_now_ns();

    KVT_ASSERT(load->run_blocks <= RUN_BLOCKS_MAX);
    for (uint32_t i = 0; i < load->paths; i++) {
        uint32_t run;

        prefix.after = KVT_RADIX_BLOCK_NONE;
        for (uint32_t at = 0; at < load->path_blocks; at += run) {
            run = KVT_MIN(load->run_blocks, load->path_blocks - at);
            for (uint32_t k = 0; k < run; k++)
                tokens[k * BENCH_RADIX_BLOCK_TOKENS] = i * load->path_blocks + at + k;
            prefix.tokens_count = run * BENCH_RADIX_BLOCK_TOKENS;
            prefix.after = bench_radix_store(radix, &prefix, 1, bits);
        }
    }
    bench_row(bench, &(struct bench_row){.name = load->name,
                                         .unit = "ns/block",
                                         .value = (double)(bench_now_ns() - start) /
                                                  ((double)load->paths * load->path_blocks),
                                         .target = load->target});
    (void)kvt_radix_free(radix);
}

void bench_radix_insert(struct bench *bench, uint32_t leaves)
{
    const struct load loads[] = {
        {"load a path of 100,000 blocks one by one", 1, 100000, 1, 500},
        {"load 5 paths of 200,000 blocks in runs of 64", 5, 200000, 64, 100},
    };

    insert_long(bench);
    for (uint32_t i = 0; i < KVT_COUNT_OF(loads); i++)
        load_paths(bench, &loads[i]);
    insert_leaves(bench, leaves);
}

void bench_radix_evict(struct bench *bench, uint32_t leaves)
{
    uint32_t *tokens = leaves_make(leaves), count, evicted = 0;
    struct kvt_radix *radix = leaves_radix(leaves, BENCH_RADIX_POPULATED);
    const struct kvt_radix_victims which = {.ns = {UINT32_MAX}, .component = UINT32_MAX};
    static struct kvt_radix_victim victims[100];
    uint64_t start;
    char name[64];

    (void)leaves_insert_ns(radix, tokens, leaves, true, false);
    start = bench_now_ns();
    while (evicted < leaves / 2) {
        count = kvt_radix_victims(radix, &which, KVT_COUNT_OF(victims), victims);
        KVT_ASSERT(count > 0);
        for (uint32_t i = 0; i < count; i++)
            KVT_ASSERT(kvt_radix_drop(radix, victims[i].block, 0, 1, NULL) == 0);
        evicted += count;
    }
    (void)snprintf(name, sizeof(name), "evict in batches of 100 from %u one-block leaves", leaves);
    bench_row(bench, &(struct bench_row){.name = name,
                                         .unit = "us/block",
                                         .value = (double)(bench_now_ns() - start) / evicted / 1000,
                                         .target = 0.4});
    (void)kvt_radix_free(radix);
    free(tokens);
}
