/* The world that the operations of radix_model.c act on: one tree, its oracle, its ledger, a random
 * number generator that its seed and number determine, and a prompt. A difference ends the run. */
#pragma once

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/model/radix_ledger.h"

#define NONE UINT32_MAX
#define STALE_COUNT 64u
#define VICTIMS_MAX 16u
#define KEYS 6u

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
    uint32_t keys_of[ORACLE_NS_MAX][ORACLE_ROOTS_MAX]; /* each root of the oracle has one of KEYS */
    uint64_t no_room;
    /* A prompt: symbols, and what they become. */
    uint32_t count, symbol[ORACLE_PATH_MAX], extra[ORACLE_PATH_MAX];
    uint8_t keys[ORACLE_PATH_MAX][KVT_EXTRA_KEY_BYTES];
    uint32_t *tokens;
    uint32_t path[2 * ORACLE_PATH_MAX];
};

extern struct oracle oracle;
extern struct ledger ledger;
extern struct world world;
extern uint64_t tags_gone; /* over all worlds */

#define EXPECT(condition)                                                                          \
    do {                                                                                           \
        if (!(condition))                                                                          \
            world_fail(#condition, __LINE__);                                                      \
    } while (0)

/* Says how to see it again, and aborts. */
__attribute__((noreturn)) void world_fail(const char *what, int line);

static inline uint32_t rnd(uint32_t below)
{
    world.rng ^= world.rng << 13;
    world.rng ^= world.rng >> 7;
    world.rng ^= world.rng << 17;
    return (uint32_t)((world.rng >> 11) % below);
}

static inline bool one_in(uint32_t n)
{
    return rnd(n) == 0;
}

/* The key that root @root of the oracle has now. */
void root_key(uint32_t ns, uint32_t root, struct kvt_radix_prefix *prefix);
/* Key number @key of KEYS. */
void key_bytes(uint32_t key, struct kvt_radix_prefix *prefix);
/* A block of the oracle; NONE: none was met. */
uint32_t block_random(bool with_detached);
/* A prompt at a root or behind a block, in world.symbol and world.extra. */
struct kvt_radix_prefix prefix_random(uint32_t *ret_ns, uint32_t *ret_root, uint32_t *ret_after);

void world_open(uint64_t seed, uint64_t number);
/* The tree's own invariants, and its counts and tags against the oracle's. */
void world_check(void);
/* Everything goes: at the end nothing may be left, and no memory either. */
void world_close(void);
