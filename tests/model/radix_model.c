/* Random operations on the tree and on a naive model of it; any difference ends the run with the
 * seed, the world and the step that show it again.
 *
 *     radix_model [--seed N] [--ops N] [--seconds N]
 *
 * The run is a row of small worlds, each with its own specs, shapes and capacity, made from
 * (seed, world): few symbols and a common template, so that prefixes are shared and nodes split and
 * merge all the time; some worlds have blocks so large that memory ends after a dozen of them. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "tests/model/radix_ledger.h"

#define NONE UINT32_MAX
#define STALE_COUNT 64u
#define VICTIMS_MAX 16u

struct world {
    uint64_t seed, number, step, rng;
    struct kvt_radix *radix;
    struct kvt_radix_ns ns[ORACLE_NS_MAX];
    uint32_t depth_max, symbols, template_percent;
    uint32_t bits; /* places in use: 0 .. bits - 1 */
    bool is_tight, has_extra, can_defer, can_detach, has_tags;
    uint32_t template[ORACLE_PATH_MAX];
    uint32_t next_handle;
    struct kvt_radix_block stale[STALE_COUNT];
    uint64_t no_room;
    /* A prompt: symbols, and what they become. */
    uint32_t count, symbol[ORACLE_PATH_MAX], extra[ORACLE_PATH_MAX];
    uint8_t keys[ORACLE_PATH_MAX][KVT_EXTRA_KEY_BYTES];
    uint32_t *tokens;
    uint32_t path[2 * ORACLE_PATH_MAX];
};

static struct oracle oracle;
static struct ledger ledger;
static struct world world;
static uint64_t ops_done[16], tags_gone;

#define EXPECT(condition)                                                                          \
    do {                                                                                           \
        if (!(condition))                                                                          \
            fail(#condition, __LINE__);                                                            \
    } while (0)

__attribute__((noreturn)) static void fail(const char *what, int line)
{
    printf("FAILED line %d: %s\n--seed %" PRIu64 ", world %" PRIu64 ", step %" PRIu64 "\n", line,
           what, world.seed, world.number, world.step);
    (void)fflush(stdout);
    abort();
}

static uint32_t rnd(uint32_t below)
{
    world.rng ^= world.rng << 13;
    world.rng ^= world.rng >> 7;
    world.rng ^= world.rng << 17;
    return (uint32_t)((world.rng >> 11) % below);
}

static bool one_in(uint32_t n)
{
    return rnd(n) == 0;
}

/* ---- prompts --------------------------------------------------------------------------------- */

static void root_key(uint32_t root, struct kvt_radix_prefix *prefix)
{
    static const char keys[] = "salt-one";

    prefix->root_key = root == 0 ? NULL : keys;
    prefix->root_key_bytes = root == 0 ? 0 : root * 3;
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

static uint32_t block_random(bool with_detached)
{
    for (uint32_t i = 0; i < 8 && oracle.top > 0; i++) {
        uint32_t idx = rnd(oracle.top);

        if (oracle.blocks[idx].is_used && (with_detached || !oracle.blocks[idx].is_detached))
            return idx;
    }
    return NONE;
}

/* A prompt at a root or behind a block. */
static struct kvt_radix_prefix prefix_random(uint32_t *ret_ns, uint32_t *ret_root,
                                             uint32_t *ret_after)
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
    root_key(root, &prefix);
    prefix.tokens = world.tokens;
    prefix.tokens_count = (uint64_t)world.count * oracle.specs[ns].block_tokens;
    if (has_key || one_in(8))
        prefix.extra_keys = (const uint8_t(*)[KVT_EXTRA_KEY_BYTES])world.keys;
    *ret_ns = ns;
    *ret_root = root;
    *ret_after = after;
    return prefix;
}

static void stale_remember(struct kvt_radix_block block)
{
    world.stale[rnd(STALE_COUNT)] = block;
}

/* ---- operations ------------------------------------------------------------------------------ */

static void put_random(uint32_t idx)
{
    struct oracle_block *block = &oracle.blocks[idx];

    for (uint32_t c = 0; c < oracle.specs[block->ns].components_count; c++) {
        uint8_t bits = (uint8_t)(1u << rnd(world.bits));

        if (one_in(4))
            continue;
        if (one_in(24))
            bits |= 1u << KVT_RADIX_BIT_HOLD;
        if (one_in(24))
            bits = 1u << KVT_RADIX_BIT_HOLD;
        if (block->mask[c] == 0)
            block->handle[c] = world.next_handle++;
        block->mask[c] |= bits;
        EXPECT(kvt_radix_put(world.radix, block->block, c, bits, block->handle[c]) == 0);
    }
}

/* Another tag or none, for a block that may be detached or reaped already. */
static void tag_random(uint32_t idx)
{
    const struct kvt_radix_block block = oracle.blocks[idx].block;
    struct kvt_radix_cell cell;
    uint64_t tag = 0;

    if (!world.has_tags || kvt_radix_get(world.radix, block, 0, &cell) == KVT_RADIX_E_STALE) {
        kvt_radix_set_tag(world.radix, block, 1);
        EXPECT(kvt_radix_tag(world.radix, block) == 0);
        return;
    }
    if (one_in(4))
        ledger_take(&ledger, idx);
    else
        tag = ledger_give(&ledger, idx, world.ns[oracle.blocks[idx].ns]);
    kvt_radix_set_tag(world.radix, block, tag);
    EXPECT(kvt_radix_tag(world.radix, block) == tag);
}

/* Part of the tags of the path in world.path, in one call. */
static void path_tags(struct kvt_radix_block end, uint32_t depth)
{
    static uint64_t tags[2 * ORACLE_PATH_MAX];
    uint32_t first = rnd(depth + 1), count = rnd(depth - first + 1);

    tags[count] = 0xee;
    EXPECT(kvt_radix_tags(world.radix, end, first, count, tags) == 0);
    for (uint32_t i = 0; i < count; i++)
        EXPECT(tags[i] == oracle.blocks[world.path[first + i]].tag);
    EXPECT(tags[count] == 0xee);
}

static void op_insert(void)
{
    uint32_t ns, root, after, depth, matched;
    struct kvt_radix_prefix prefix = prefix_random(&ns, &root, &after);
    struct kvt_radix_block end = {0};
    static struct kvt_radix_cell cells[2 * ORACLE_PATH_MAX];
    uint64_t fresh = 0;
    int r;

    if (oracle.live + oracle.detached + world.count > ORACLE_BLOCKS_MAX - 1)
        return;
    matched = oracle_walk(&oracle, ns, root, after, world.symbol, world.extra, world.count,
                          world.path, &depth);
    r = kvt_radix_insert(world.radix, &prefix, &end, &fresh);
    if (r == KVT_RADIX_E_NO_ROOM) {
        world.no_room++;
        return;
    }
    EXPECT(r == 0);
    EXPECT(fresh == world.count - matched);
    for (uint32_t i = matched; i < world.count; i++) {
        uint32_t parent = depth == 0 ? NONE : world.path[depth - 1];

        world.path[depth++] =
            oracle_add(&oracle, ns, root, parent, world.symbol[i], world.extra[i]);
    }
    EXPECT((depth == 0) == (end.generation == 0));
    if (depth == 0)
        return;
    EXPECT(kvt_radix_path(world.radix, end, 0, 0, depth, cells) == 0);
    path_tags(end, depth);
    for (uint32_t i = 0; i < depth; i++) {
        struct oracle_block *block = &oracle.blocks[world.path[i]];

        if (block->block.generation == 0)
            block->block = cells[i].block;
        EXPECT(memcmp(&block->block, &cells[i].block, sizeof(block->block)) == 0);
        EXPECT(cells[i].mask == block->mask[0] && cells[i].handle == block->handle[0]);
        if (i >= depth - fresh || one_in(4))
            if (!one_in(8))
                put_random(world.path[i]);
        if (i >= depth - fresh ? !one_in(8) : one_in(16))
            tag_random(world.path[i]);
    }
    path_tags(end, depth);
    kvt_radix_settle(world.radix, end);
    oracle_bury(&oracle, world.path[depth - 1]);
}

static void op_lookup(void)
{
    uint32_t ns, root, after, depth;
    struct kvt_radix_lookup lookup = {.prefix = prefix_random(&ns, &root, &after)};
    const uint64_t bt = oracle.specs[ns].block_tokens;
    struct kvt_radix_match match;
    struct oracle_match truth;

    lookup.limit_tokens = one_in(2) ? UINT64_MAX : rnd(2 * world.depth_max * (uint32_t)bt + 2);
    lookup.mask_allowed = one_in(2) ? 0x7f : (uint8_t)rnd(1u << world.bits);
    lookup.is_touch = one_in(2);
    (void)oracle_walk(&oracle, ns, root, after, world.symbol, world.extra, world.count, world.path,
                      &depth);
    oracle_match(&oracle, ns, world.path, depth,
                 world.count + (after == NONE ? 0 : oracle.blocks[after].depth + 1),
                 lookup.limit_tokens, lookup.mask_allowed, &truth);
    EXPECT(kvt_radix_lookup(world.radix, &lookup, &match) == 0);
    EXPECT(match.boundary_tokens == truth.boundary * bt);
    EXPECT(match.path_tokens == truth.path * bt);
    EXPECT(match.full_tokens == truth.full * bt);
    EXPECT(depth == 0 ? match.cursor.generation == 0
                      : memcmp(&match.cursor, &oracle.blocks[world.path[depth - 1]].block,
                               sizeof(match.cursor)) == 0);
    EXPECT(truth.boundary == 0
               ? match.end.generation == 0
               : memcmp(&match.end, &oracle.blocks[world.path[truth.boundary - 1]].block,
                        sizeof(match.end)) == 0);
    for (uint32_t c = 0; c < oracle.specs[ns].components_count; c++) {
        EXPECT(match.components[c].alone_tokens == truth.components[c].alone * bt);
        EXPECT(match.components[c].needed_blocks == truth.components[c].needed);
        EXPECT(memcmp(match.components[c].blocks_at, truth.components[c].at,
                      sizeof(truth.components[c].at)) == 0);
        EXPECT(match.components[c].why == truth.components[c].why);
        if (truth.components[c].why != KVT_RADIX_WHY_NONE && depth > 0)
            EXPECT(match.components[c].why_block_idx == truth.components[c].alone);
    }
}

static void drop_bits(uint32_t idx, uint32_t c, uint8_t bits)
{
    struct oracle_block *block = &oracle.blocks[idx];
    struct kvt_radix_block handle = block->block;
    uint8_t mask = 0xee;

    EXPECT(kvt_radix_drop(world.radix, handle, c, bits, &mask) == 0);
    block->mask[c] &= (uint8_t)~bits;
    EXPECT(mask == block->mask[c]);
    if (block->mask[c] == 0)
        block->handle[c] = 0;
    oracle_bury(&oracle, idx);
    if (!block->is_used)
        stale_remember(handle);
}

static void op_drop(void)
{
    uint32_t idx = block_random(true);

    if (idx != NONE) {
        struct kvt_radix_cell cell;
        uint32_t c = rnd(oracle.specs[oracle.blocks[idx].ns].components_count);
        int r = kvt_radix_get(world.radix, oracle.blocks[idx].block, c, &cell);

        if (r == KVT_RADIX_E_STALE) { /* reaped already, or detached and empty */
            EXPECT(oracle.blocks[idx].is_detached);
            for (uint32_t i = 0; i < KVT_COMPONENTS_MAX; i++)
                EXPECT(oracle.blocks[idx].mask[i] == 0);
            return;
        }
        EXPECT(cell.mask == oracle.blocks[idx].mask[c]);
        EXPECT(cell.handle == oracle.blocks[idx].handle[c]);
        drop_bits(idx, c, one_in(2) ? 0xff : (uint8_t)rnd(256));
    }
}

static bool cell_can_go(uint32_t idx, uint32_t c, uint8_t bit)
{
    const struct oracle_block *block = &oracle.blocks[idx];

    return (block->mask[c] & bit) && !(block->mask[c] >> KVT_RADIX_BIT_HOLD & 1) &&
           !block->is_detached && !oracle_is_leased(&oracle, idx);
}

/* The search for blocks below holes is bounded, by at least this many steps a namespace. */
#define HOLE_STEPS_MIN 64u

/* What the answer left out: nothing that could go if it is short, nothing of class 1 if it gave
 * anything else and had steps enough to see all of it. */
static void victims_complete(const struct kvt_radix_victims *which, uint32_t count,
                             bool is_first_class1)
{
    const uint8_t bit = (uint8_t)(1u << which->bit);

    for (uint32_t idx = 0; idx < oracle.top; idx++) {
        const struct oracle_block *block = &oracle.blocks[idx];

        if (!block->is_used ||
            (which->ns.idx != UINT32_MAX && world.ns[block->ns].idx != which->ns.idx))
            continue;
        for (uint32_t c = 0; c < oracle.specs[block->ns].components_count; c++) {
            bool is_full = oracle.specs[block->ns].components[c].kind == KVT_COMPONENT_FULL;

            if ((which->component != UINT32_MAX && which->component != c) ||
                !cell_can_go(idx, c, bit))
                continue;
            if (count == 0)
                EXPECT(is_full && oracle_has_below(&oracle, idx, c, bit));
            else if (!is_first_class1 && !world.can_defer)
                EXPECT(!oracle_is_unreachable(&oracle, idx) ||
                       oracle_hole_visits(&oracle, block->ns) > HOLE_STEPS_MIN);
        }
    }
}

static void victim_valid(const struct kvt_radix_victims *which,
                         const struct kvt_radix_victim *victims, uint32_t at)
{
    const struct kvt_radix_victim *victim = &victims[at];
    uint32_t idx = oracle_find(&oracle, victim->block);
    const struct oracle_block *block = &oracle.blocks[idx == NONE ? 0 : idx];
    const uint8_t bit = (uint8_t)(1u << which->bit);

    EXPECT(idx != NONE);
    EXPECT(victim->mask == block->mask[victim->component]);
    EXPECT(victim->handle == block->handle[victim->component]);
    EXPECT(which->component == UINT32_MAX || which->component == victim->component);
    EXPECT(which->ns.idx == UINT32_MAX || which->ns.idx == world.ns[block->ns].idx);
    EXPECT(cell_can_go(idx, victim->component, bit));
    for (uint32_t i = 0; i < at; i++)
        EXPECT(victims[i].component != victim->component ||
               memcmp(&victims[i].block, &victim->block, sizeof(victim->block)) != 0);
}

/* Asks, checks, and takes a part: in the order given, as it has to be. */
static void op_victims(void)
{
    struct kvt_radix_victims which = {
        .bit = rnd(world.bits), .ns = {.idx = UINT32_MAX}, .component = UINT32_MAX};
    struct kvt_radix_victim victims[VICTIMS_MAX];
    uint32_t count, take, max = 1 + rnd(VICTIMS_MAX);
    const uint8_t bit = (uint8_t)(1u << which.bit);
    uint64_t oldest;

    if (one_in(2))
        which.ns = world.ns[rnd(oracle.ns_count)];
    if (one_in(3))
        which.component = rnd(oracle.specs[0].components_count);
    oldest = kvt_radix_oldest(world.radix, &which);
    count = kvt_radix_victims(world.radix, &which, max, victims);
    EXPECT(count <= max);
    EXPECT(count > 0 || oldest == UINT64_MAX);
    if (oldest == UINT64_MAX && count > 0) /* its bounded search for class 1 ended too early */
        EXPECT(oracle_is_unreachable(&oracle, oracle_find(&oracle, victims[0].block)));
    for (uint32_t i = 0; i < count; i++)
        victim_valid(&which, victims, i);
    victims_complete(&which, count,
                     count > 0 &&
                         oracle_is_unreachable(&oracle, oracle_find(&oracle, victims[0].block)));
    take = rnd(count + 1);
    for (uint32_t i = 0; i < count; i++) {
        uint32_t idx = oracle_find(&oracle, victims[i].block), c = victims[i].component;
        bool is_full;

        EXPECT(idx != NONE);
        is_full = oracle.specs[oracle.blocks[idx].ns].components[c].kind == KVT_COMPONENT_FULL;
        if (i < take) {
            if (is_full && !oracle_is_unreachable(&oracle, idx))
                EXPECT(!oracle_has_below(&oracle, idx, c, bit));
            drop_bits(idx, c, bit);
        } else if (world.can_defer && one_in(2)) {
            kvt_radix_defer(world.radix, &victims[i], which.bit);
        }
    }
}

static void op_lease(void)
{
    uint32_t idx = block_random(false);

    if (idx == NONE || oracle.leases > 6)
        return;
    EXPECT(kvt_radix_lease(world.radix, oracle.blocks[idx].block) == 0);
    oracle.blocks[idx].leases++;
    oracle.leases++;
}

static void op_release(void)
{
    uint32_t first = oracle.top == 0 ? 0 : rnd(oracle.top);

    for (uint32_t i = 0; i < oracle.top; i++) {
        uint32_t idx = (first + i) % oracle.top;
        struct oracle_block *block = &oracle.blocks[idx];
        struct kvt_radix_block handle = block->block;

        if (!block->is_used || block->leases == 0)
            continue;
        if (kvt_radix_release(world.radix, handle) != 0) {
            EXPECT(block->is_detached); /* reaped before it was asked for all cells */
            return;
        }
        block->leases--;
        oracle.leases--;
        oracle_bury(&oracle, idx);
        return;
    }
    if (first < oracle.top && oracle.blocks[first].is_used)
        EXPECT(kvt_radix_release(world.radix, oracle.blocks[first].block) == KVT_RADIX_E_STALE);
}

static void op_detach(void)
{
    uint32_t idx = block_random(false), ns = rnd(oracle.ns_count), root = rnd(ORACLE_ROOTS_MAX);
    struct kvt_radix_prefix key = {0};

    if (!one_in(6)) {
        if (idx == NONE)
            return;
        ledger.detaching = idx;
        EXPECT(kvt_radix_detach_block(world.radix, oracle.blocks[idx].block) == 0);
        ledger.detaching = NONE;
        oracle_detach(&oracle, idx);
        return;
    }
    if (one_in(4)) {
        kvt_radix_detach_ns(world.radix, world.ns[ns]);
        for (root = 0; root < ORACLE_ROOTS_MAX; root++) {
            while (oracle.roots[ns][root] != NONE)
                oracle_detach(&oracle, oracle.roots[ns][root]);
        }
        return;
    }
    root_key(root, &key);
    kvt_radix_detach_root(world.radix, world.ns[ns], key.root_key, key.root_key_bytes);
    while (oracle.roots[ns][root] != NONE)
        oracle_detach(&oracle, oracle.roots[ns][root]);
}

static void op_reap(void)
{
    struct kvt_radix_victim cells[VICTIMS_MAX];
    uint32_t max = 1 + rnd(VICTIMS_MAX), count = kvt_radix_reap(world.radix, max, cells);

    EXPECT(count <= max);
    for (uint32_t i = 0; i < count; i++) {
        uint32_t idx = oracle_find(&oracle, cells[i].block), c = cells[i].component;
        struct oracle_block *block = &oracle.blocks[idx == NONE ? 0 : idx];

        EXPECT(idx != NONE && block->is_detached);
        EXPECT(cells[i].mask != 0 && cells[i].mask == block->mask[c]);
        EXPECT(cells[i].handle == block->handle[c]);
        for (uint32_t below = 0; below < KVT_COMPONENTS_MAX; below++)
            EXPECT(!oracle_has_below(&oracle, idx, below, 0xff)); /* children before parents */
        block->mask[c] = 0;
        block->handle[c] = 0;
    }
    if (count == max)
        return;
    for (uint32_t idx = 0; idx < oracle.top; idx++) {
        if (!oracle.blocks[idx].is_used || !oracle.blocks[idx].is_detached)
            continue;
        for (uint32_t c = 0; c < KVT_COMPONENTS_MAX; c++)
            EXPECT(oracle.blocks[idx].mask[c] == 0);
        EXPECT(kvt_radix_release(world.radix, oracle.blocks[idx].block) == KVT_RADIX_E_STALE);
        stale_remember(oracle.blocks[idx].block);
        oracle_forget(&oracle, idx);
        oracle.detached--;
    }
    EXPECT(oracle.detached == 0);
}

static void op_look(void)
{
    uint32_t idx = block_random(true);
    const struct oracle_block *block = &oracle.blocks[idx == NONE ? 0 : idx];
    struct kvt_radix_block parent;
    const uint8_t *extra;
    const uint32_t *tokens;

    if (idx == NONE)
        return;
    if (one_in(2))
        tag_random(idx);
    EXPECT(kvt_radix_is_live(world.radix, block->block) == !block->is_detached);
    if (block->is_detached) {
        EXPECT(kvt_radix_put(world.radix, block->block, 0, 1, 1) == KVT_RADIX_E_STALE);
        EXPECT(kvt_radix_lease(world.radix, block->block) == KVT_RADIX_E_STALE);
        EXPECT(kvt_radix_detach_block(world.radix, block->block) == KVT_RADIX_E_STALE);
        return;
    }
    EXPECT(kvt_radix_depth_blocks(world.radix, block->block) == block->depth + 1);
    EXPECT(kvt_radix_ns_of(world.radix, block->block).idx == world.ns[block->ns].idx);
    parent = kvt_radix_parent(world.radix, block->block);
    EXPECT(block->parent == NONE
               ? parent.generation == 0
               : memcmp(&parent, &oracle.blocks[block->parent].block, sizeof(parent)) == 0);
    tokens = kvt_radix_tokens(world.radix, block->block, &extra);
    EXPECT(tokens[block->symbol * 5 % oracle.specs[block->ns].block_tokens] ==
           1000 + block->symbol);
    EXPECT((extra == NULL) == (block->extra == 0));
    EXPECT(extra == NULL || extra[31 - block->extra] == block->extra);
    if (one_in(2))
        put_random(idx);
    else
        kvt_radix_touch(world.radix, block->block);
}

static void op_stale(void)
{
    struct kvt_radix_block block = world.stale[rnd(STALE_COUNT)];
    struct kvt_radix_cell cell;
    struct kvt_radix_match match;
    struct kvt_radix_lookup lookup = {.prefix = {.ns = world.ns[0], .after = block}};

    if (one_in(4))
        block = (struct kvt_radix_block){.idx = rnd(UINT32_MAX), .generation = 1 + rnd(4)};
    if (block.generation == 0 || oracle_find(&oracle, block) != NONE)
        return;
    EXPECT(!kvt_radix_is_live(world.radix, block));
    EXPECT(kvt_radix_get(world.radix, block, 0, &cell) == KVT_RADIX_E_STALE);
    EXPECT(kvt_radix_tag(world.radix, block) == 0);
    EXPECT(kvt_radix_drop(world.radix, block, 0, 0xff, NULL) == KVT_RADIX_E_STALE);
    EXPECT(kvt_radix_release(world.radix, block) == KVT_RADIX_E_STALE);
    lookup.prefix.after = block;
    EXPECT(kvt_radix_lookup(world.radix, &lookup, &match) == KVT_RADIX_E_STALE);
}

/* ---- worlds ---------------------------------------------------------------------------------- */

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

static void world_open(uint64_t seed, uint64_t number)
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

static void world_check(void)
{
    struct kvt_radix_stats stats;
    uint64_t detached;
    const char *why = NULL;

    if (!kvt_radix_check(world.radix, &why))
        fail(why, __LINE__);
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

/* Everything goes: at the end nothing may be left, and no memory either. */
static void world_close(void)
{
    struct kvt_radix_victim cells[VICTIMS_MAX];
    struct kvt_radix_stats stats;
    const char *why;

    world_check();
    for (uint32_t n = 0; n < oracle.ns_count; n++)
        kvt_radix_ns_close(world.radix, world.ns[n]);
    while (kvt_radix_reap(world.radix, VICTIMS_MAX, cells) == VICTIMS_MAX)
        continue;
    kvt_radix_stats(world.radix, &stats);
    EXPECT(stats.blocks == 0 && stats.nodes == 0 && stats.roots == 0 && stats.leases == 0);
    EXPECT(stats.memory_used_bytes == stats.memory_taken_bytes && stats.tokens_bytes == 0);
    why = ledger_close(&ledger);
    if (why != NULL)
        fail(why, __LINE__);
    tags_gone += ledger.gone_total;
    world.radix = kvt_radix_free(world.radix);
}

static void world_step(void)
{
    uint32_t dice = rnd(100);
    const char *why;
    uint32_t op = dice < 30   ? 0
                  : dice < 62 ? 1
                  : dice < 74 ? 2
                  : dice < 80 ? 3
                  : dice < 84 ? 4
                  : dice < 88 ? 5
                  : dice < 90 ? 6
                  : dice < 93 ? 7
                  : dice < 97 ? 8
                              : 9;
    static void (*const ops[])(void) = {op_insert,  op_lookup, op_drop, op_victims, op_lease,
                                        op_release, op_detach, op_reap, op_look,    op_stale};

    if (op == 6 && !world.can_detach)
        op = 3;
    ops[op]();
    why = ledger_compare(&ledger);
    if (why != NULL)
        fail(why, __LINE__);
    ops_done[op]++;
    world.step++;
}

static uint64_t number_arg(int argc, char **argv, const char *name, uint64_t otherwise)
{
    for (int i = 1; i + 1 < argc; i++) {
        if (strcmp(argv[i], name) == 0)
            return strtoull(argv[i + 1], NULL, 0);
    }
    return otherwise;
}

int main(int argc, char **argv)
{
    uint64_t seed = number_arg(argc, argv, "--seed", (uint64_t)time(NULL));
    uint64_t seconds = number_arg(argc, argv, "--seconds", 0);
    uint64_t ops = number_arg(argc, argv, "--ops", seconds > 0 ? UINT64_MAX : 1000000);
    uint64_t first = number_arg(argc, argv, "--world", 0), done = 0, no_room = 0;
    const time_t start = time(NULL);

    printf("seed %" PRIu64 "\n", seed);
    (void)fflush(stdout);
    world.tokens = calloc((size_t)ORACLE_PATH_MAX * KVT_BLOCK_TOKENS_MAX, sizeof(uint32_t));
    if (world.tokens == NULL)
        return 1;
    for (uint64_t number = first; done < ops; number++) {
        world_open(seed, number);
        for (uint32_t i = 0, length = 200 + rnd(3000); i < length; i++) {
            world_step();
            if (i % 251 == 0)
                world_check();
        }
        done += world.step;
        no_room += world.no_room;
        world_close();
        if (seconds > 0 && (uint64_t)(time(NULL) - start) >= seconds)
            break;
    }
    printf("%" PRIu64 " operations, %" PRIu64 " answered with no room, %" PRIu64 " tags left\n",
           done, no_room, tags_gone);
    for (uint32_t i = 0; i < 10; i++)
        printf("%" PRIu64 "%s", ops_done[i], i < 9 ? " " : "\n");
    free(world.tokens);
    return 0;
}
