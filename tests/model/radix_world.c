/* Makes, checks and unmakes the worlds, and their prompts: few symbols and a common template, so
 * that prefixes are shared. */
#include "tests/model/radix_world.h"

struct oracle oracle;
struct ledger ledger;
struct world world;
uint64_t tags_gone;

__attribute__((noreturn)) void world_fail(const char *what, int line)
{
    printf("FAILED line %d: %s\n--seed %" PRIu64 ", world %" PRIu64 ", step %" PRIu64 "\n", line,
           what, world.seed, world.number, world.step);
    (void)fflush(stdout);
    abort();
}

/* ---- prompts --------------------------------------------------------------------------------- */

/* Key number @key: the lengths lie in several classes of memory. */
void key_bytes(uint32_t key, struct kvt_radix_prefix *prefix)
{
    static const char keys[] = "salt-one, salt-two, salt-three and salt-four";

    prefix->root_key = key == 0 ? NULL : keys;
    prefix->root_key_bytes = key * 7;
}

void root_key(uint32_t ns, uint32_t root, struct kvt_radix_prefix *prefix)
{
    key_bytes(world.keys_of[ns][root], prefix);
}

/* Blocks differ in one token somewhere inside. */
static void prompt_tokens(uint32_t ns)
{
    const uint32_t bt = oracle.specs[ns].block_tokens;

    for (uint32_t i = 0; i < world.count; i++) {
        uint32_t *block = world.tokens + (size_t)i * bt, at = world.symbol[i] * 5 % bt;

        for (uint32_t k = 0; k < bt; k++)
            block[k] = 7;
        block[at] = 1000 + world.symbol[i];
        memset(world.keys[i], 0, KVT_EXTRA_KEY_BYTES);
        world.keys[i][31 - world.extra[i]] = (uint8_t)world.extra[i];
    }
}

static void prompt_random(uint32_t ns)
{
    uint32_t shared = 0;

    world.count = rnd(world.depth_max + 1);
    if (rnd(100) < world.template_percent)
        shared = one_in(3) ? world.count : rnd(world.count + 1);
    for (uint32_t i = 0; i < world.count; i++) {
        world.symbol[i] = i < shared ? world.template[i] : rnd(world.symbols);
        world.extra[i] = world.has_extra && one_in(4) ? rnd(3) : 0;
    }
    prompt_tokens(ns);
}

uint32_t block_random(bool with_detached)
{
    for (uint32_t i = 0; i < 8 && oracle.top > 0; i++) {
        uint32_t idx = rnd(oracle.top);

        if (oracle.blocks[idx].is_used && (with_detached || !oracle.blocks[idx].is_detached))
            return idx;
    }
    return NONE;
}

struct kvt_radix_prefix prefix_random(uint32_t *ret_ns, uint32_t *ret_root, uint32_t *ret_after)
{
    struct kvt_radix_prefix prefix = {0};
    uint32_t after = one_in(3) ? block_random(false) : NONE, ns = rnd(oracle.ns_count);
    uint32_t root = one_in(3) ? rnd(ORACLE_ROOTS_MAX) : 0;
    bool has_key = false;

    if (after != NONE) {
        ns = oracle.blocks[after].ns;
        root = oracle.blocks[after].root;
        prefix.after = oracle.blocks[after].block;
    }
    prompt_random(ns);
    if (after != NONE) { /* often what really follows */
        uint32_t depth = oracle.blocks[after].depth + 1;

        for (uint32_t i = 0; i < world.count && depth + i < ORACLE_PATH_MAX && one_in(2); i++)
            world.symbol[i] = world.template[depth + i];
        if (depth + world.count > 2 * world.depth_max)
            world.count = depth > 2 * world.depth_max ? 0 : 2 * world.depth_max - depth;
        prompt_tokens(ns);
    }
    for (uint32_t i = 0; i < world.count; i++)
        has_key |= world.extra[i] != 0;
    prefix.ns = world.ns[ns];
    root_key(ns, root, &prefix);
    prefix.tokens = world.tokens;
    prefix.tokens_count = (uint64_t)world.count * oracle.specs[ns].block_tokens;
    if (has_key || one_in(8))
        prefix.extra_keys = (const uint8_t(*)[KVT_EXTRA_KEY_BYTES])world.keys;
    *ret_ns = ns;
    *ret_root = root;
    *ret_after = after;
    return prefix;
}

/* ---- birth and death --------------------------------------------------------------------------
 */

static void specs_random(void)
{
    static const uint32_t sizes[] = {1, 2, 3, 4, 7, 16};

    oracle.ns_count = 1 + rnd(ORACLE_NS_MAX);
    for (uint32_t n = 0; n < ORACLE_NS_MAX; n++) {
        struct kvt_radix_spec *spec = &oracle.specs[n];

        *spec = (struct kvt_radix_spec){.block_tokens = sizes[rnd(KVT_COUNT_OF(sizes))]};
        if (world.is_tight)
            spec->block_tokens = one_in(2) ? 8192 : 1000;
        spec->components_count = 1 + rnd(one_in(8) ? KVT_COMPONENTS_MAX : 3);
        for (uint32_t c = 0; c < KVT_COMPONENTS_MAX; c++) {
            spec->components[c].kind = one_in(2) ? KVT_COMPONENT_FULL : 1 + rnd(3);
            spec->components[c].window_tokens =
                1 + rnd(one_in(2) ? 6 * spec->block_tokens : spec->block_tokens + 2);
        }
    }
    oracle.specs[1].components_count = oracle.specs[0].components_count;
}

void world_open(uint64_t seed, uint64_t number)
{
    uint32_t *tokens = world.tokens;
    struct kvt_radix_config config = {
        .namespaces_max = ORACLE_NS_MAX, .roots_max = 8, .gone = ledger_hear, .gone_ctx = &ledger};

    world = (struct world){.seed = seed, .number = number, .tokens = tokens, .next_handle = 1};
    world.rng = (seed * 0x9e3779b97f4a7c15ull ^ (number + 1) * 0xd6e8feb86659fd93ull) | 1;
    for (uint32_t i = 0; i < 8; i++)
        (void)rnd(2);
    world.is_tight = one_in(16);
    world.has_extra = one_in(4);
    world.can_defer = one_in(3);
    world.can_detach = one_in(2);
    world.has_tags = one_in(2);
    world.symbols = 1 + rnd(4);
    world.bits = 1 + rnd(4);
    world.template_percent = rnd(101);
    world.depth_max = world.is_tight ? 12 : one_in(12) ? 160 : 3 + rnd(12);
    for (uint32_t i = 0; i < ORACLE_PATH_MAX; i++)
        world.template[i] = rnd(world.symbols);
    for (uint32_t i = 0; i < ORACLE_NS_MAX * ORACLE_ROOTS_MAX; i++)
        world.keys_of[i / ORACLE_ROOTS_MAX][i % ORACLE_ROOTS_MAX] = i % ORACLE_ROOTS_MAX;
    oracle_init(&oracle);
    ledger_init(&ledger, &oracle);
    specs_random();
    config.memory_bytes = world.is_tight ? 1 << 20 : 4 << 20;
    config.seed = world.rng;
    config.has_tags = world.has_tags;
    if (one_in(2))
        config.mask_evictable = (uint8_t)((1u << world.bits) - 1);
    EXPECT(kvt_radix_new(&world.radix, &config) == 0);
    for (uint32_t n = 0; n < oracle.ns_count; n++)
        EXPECT(kvt_radix_ns_open(world.radix, &oracle.specs[n], &world.ns[n]) == 0);
}

void world_check(void)
{
    struct kvt_radix_stats stats;
    uint64_t detached;
    const char *why = NULL;

    if (!kvt_radix_check(world.radix, &why))
        world_fail(why, __LINE__);
    kvt_radix_stats(world.radix, &stats);
    detached = kvt_radix_detached_blocks(world.radix);
    EXPECT((detached > 0) <= kvt_radix_has_detached(world.radix));
    EXPECT(stats.blocks - detached == oracle.live);
    EXPECT(detached <= oracle.detached);
    EXPECT(stats.memory_used_bytes <= stats.memory_taken_bytes);
    EXPECT(stats.memory_taken_bytes <= stats.memory_bytes);
    for (uint32_t i = 0; i < oracle.top; i++) {
        if (oracle.blocks[i].is_used)
            EXPECT(kvt_radix_tag(world.radix, oracle.blocks[i].block) == ledger_tag(&ledger, i));
    }
}

void world_close(void)
{
    struct kvt_radix_victim cells[VICTIMS_MAX];
    struct kvt_radix_stats stats;
    const char *why;

    world_check();
    for (uint32_t n = 0; n < oracle.ns_count; n++)
        kvt_radix_ns_close(world.radix, world.ns[n]);
    while (kvt_radix_has_detached(world.radix))
        (void)kvt_radix_reap(world.radix, VICTIMS_MAX, cells);
    kvt_radix_stats(world.radix, &stats);
    EXPECT(stats.blocks == 0 && stats.nodes == 0 && stats.roots == 0 && stats.leases == 0);
    EXPECT(stats.memory_used_bytes == stats.memory_taken_bytes && stats.tokens_bytes == 0);
    why = ledger_close(&ledger);
    if (why != NULL)
        world_fail(why, __LINE__);
    tags_gone += ledger.gone_total;
    world.radix = kvt_radix_free(world.radix);
}
