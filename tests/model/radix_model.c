/* Random operations on the tree and on a naive model of it; any difference ends the run with the
 * seed, the world and the step that show it again.
 *
 *     radix_model [--seed N] [--ops N] [--seconds N]
 *
 * The run is a row of small worlds, each with its own specs, shapes and capacity, made from
 * (seed, world): few symbols and a common template, so that prefixes are shared and nodes split and
 * merge all the time; some worlds have blocks so large that memory ends after a dozen of them. */
#include <time.h>

#include "tests/model/radix_world.h"

static uint64_t ops_done[16];

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
    prefix.is_untouched = one_in(3);
    prefix.is_followed = one_in(3);
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
    root_key(ns, root, &key);
    kvt_radix_detach_root(world.radix, world.ns[ns], key.root_key, key.root_key_bytes);
    while (oracle.roots[ns][root] != NONE)
        oracle_detach(&oracle, oracle.roots[ns][root]);
}

/* A root gets another key: nothing below may notice. */
static void op_rename(void)
{
    uint32_t ns = rnd(oracle.ns_count), root = rnd(ORACLE_ROOTS_MAX), key = rnd(KEYS);
    uint32_t *keys = world.keys_of[ns], holder = NONE;
    struct kvt_radix_prefix from = {0}, to = {0};
    int r;

    for (uint32_t i = 0; i < ORACLE_ROOTS_MAX; i++)
        holder = keys[i] == key ? i : holder;
    root_key(ns, root, &from);
    key_bytes(key, &to);
    r = kvt_radix_root_rename(world.radix, world.ns[ns], from.root_key, from.root_key_bytes,
                              to.root_key, to.root_key_bytes);
    if (oracle.roots[ns][root] == NONE) {
        EXPECT(r == KVT_RADIX_E_STALE);
    } else if (holder != NONE && oracle.roots[ns][holder] != NONE) {
        EXPECT(r == KVT_RADIX_E_EXISTS);
    } else if (r == KVT_RADIX_E_NO_ROOM) {
        world.no_room++;
    } else {
        EXPECT(r == 0);
        if (holder != NONE) /* one without blocks, so without a record in the tree */
            keys[holder] = keys[root];
        keys[root] = key;
    }
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
    if (kvt_radix_has_detached(world.radix))
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
    struct kvt_radix_prefix key = {0};
    const uint8_t *extra;
    const uint32_t *tokens;
    const void *root;
    uint32_t root_bytes;

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
    root_key(block->ns, block->root, &key);
    root = kvt_radix_root_key(world.radix, block->block, &root_bytes);
    EXPECT(root_bytes == key.root_key_bytes);
    EXPECT(root_bytes == 0 || memcmp(root, key.root_key, root_bytes) == 0);
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
                  : dice < 99 ? 9
                              : 10;
    static void (*const ops[])(void) = {op_insert, op_lookup,  op_drop,   op_victims,
                                        op_lease,  op_release, op_detach, op_reap,
                                        op_look,   op_stale,   op_rename};

    if (op == 6 && !world.can_detach)
        op = 3;
    ops[op]();
    why = ledger_compare(&ledger);
    if (why != NULL)
        world_fail(why, __LINE__);
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
    for (uint32_t i = 0; i < 11; i++)
        printf("%" PRIu64 "%s", ops_done[i], i < 10 ? " " : "\n");
    free(world.tokens);
    return 0;
}
