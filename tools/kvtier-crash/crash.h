/* kvtier-crash: the engine's side of tools/crash. It stores conversations in a daemon that is
 * killed under its hands, writes down what was acknowledged, and after the restart holds the daemon
 * to it.
 *
 *   load    stores, makes durable, reads, evicts and resets until the daemon is gone
 *   fill    stores the first talks of each namespace, makes all of it durable and ends
 *   check   asks for everything that was ever tried, verifies each byte that comes back and
 * compares with the journal
 *
 * A conversation ("talk") is a list of blocks whose tokens are a function of (seed, namespace,
 * generation, talk); talks of a group share their first blocks. A generation ends with a Reset of
 * its namespace: the next one has other tokens, so a block of an older one that is served is seen.
 * Payload is the oracle's (tools/lib/oracle.h).
 *
 *   journal line      means
 *   S n g t b         a store of talk t up to block b is about to be sent
 *   D n g t b         blocks [0, b) of talk t were acknowledged durable
 *   E n g t 0         an Evict of talk t is about to be sent: nothing of it is promised any more
 *   N n g 0 0         a Reset is about to be sent; g is the generation from now on
 *   R n g 0 0         it was answered: nothing below g may ever be served
 *
 * The journal is written by this program alone, which is not killed: a line is there when write()
 * came back. Every call on a journal is made under its owner's lock. */
#pragma once

#include <pthread.h>

#include "daemon/base/api.h"
#include "proto/client/client.h"

#define CRASH_SPACES 2u
#define CRASH_TALKS 24u
#define CRASH_GROUP_TALKS 4u   /* that share their first blocks */
#define CRASH_SHARED_BLOCKS 3u /* how many */
#define CRASH_BLOCKS_MAX 16u   /* of a talk */
#define CRASH_BLOCK_TOKENS 16u
#define CRASH_TOKENS_MAX (CRASH_BLOCKS_MAX * CRASH_BLOCK_TOKENS)
#define CRASH_RANKS_MAX 2u
#define CRASH_COMPONENTS_MAX 3u
#define CRASH_WORKERS_MAX 8u
#define CRASH_GENERATIONS_MAX 65535u

/* ---- what was promised -------------------------------------------------------------------------
 */

struct crash_talk {
    uint8_t tried_blocks;   /* may be there */
    uint8_t durable_blocks; /* must be there */
};

struct crash_space_state {
    uint32_t generation; /* the one that is stored now */
    uint32_t gone_below; /* older ones must not be served */
    struct crash_talk (*generations)[CRASH_TALKS];
    uint32_t generations_room;
};

struct crash_journal {
    int fd; /* -1: nothing is written */
    struct crash_space_state spaces[CRASH_SPACES];
};

struct crash_note {
    char kind;
    uint32_t space, generation, talk, blocks;
};

#define CRASH_JOURNAL_E_BAD 1 /* a line is none of a journal */

/* Opens @path (made when missing; NULL: in memory only) and takes in what it says. -errno, E_BAD,
 * or 0. deinit is idempotent. */
KVT_MUST_USE int crash_journal_init(struct crash_journal *journal, const char *path);
void crash_journal_deinit(struct crash_journal *journal);
/* Writes @note down, then applies it. The same results. */
KVT_MUST_USE int crash_journal_note(struct crash_journal *journal, const struct crash_note *note);
/* Never NULL: of a generation without a line it is all zero. */
const struct crash_talk *crash_journal_talk(const struct crash_journal *journal, uint32_t space,
                                            uint32_t generation, uint32_t talk);

/* ---- talking to the daemon ---------------------------------------------------------------------
 */

struct crash_space { /* a namespace: what its blocks are made of */
    const char *name;
    uint32_t ranks, components_count;
    struct {
        uint32_t kind, window_tokens, bytes;
        bool is_replicated;
    } components[CRASH_COMPONENTS_MAX];
};
extern const struct crash_space crash_spaces[CRASH_SPACES];

struct crash_place { /* a talk of a generation, up to some block */
    uint32_t space, generation, talk;
    uint32_t first, end; /* blocks */
};

struct crash_attachment { /* to one namespace; session 0 is scheduler and rank 0 */
    uint8_t fingerprint[KVT_FINGERPRINT_BYTES];
    struct kvt_session *sessions[CRASH_RANKS_MAX];
    struct kvt_handle handles[CRASH_RANKS_MAX];
};

enum crash_result {
    CRASH_OK,
    CRASH_REFUSED, /* no room, too late: an answer like another */
    CRASH_GONE,    /* no daemon answers any more */
    CRASH_BROKEN,  /* an answer that can never be right; in engine->why */
};

struct crash_engine { /* one thread's */
    uint64_t seed;
    const char *socket_path, *admin_path, *revision;
    struct kvt_client *client, *admin;
    struct crash_attachment attachments[CRASH_SPACES];
    struct kvt_op op;
    struct kvt_arena arena;
    uint64_t op_id;
    uint32_t tokens[CRASH_TOKENS_MAX];
    uint64_t block_idx[CRASH_BLOCKS_MAX];
    uint64_t chains[CRASH_BLOCKS_MAX];
    uint8_t *payload; /* of one message */
    char why[320];
};

struct crash_options;
/* An engine that is not open; everything else about it is zero. */
void crash_engine_init(struct crash_engine *engine, const struct crash_options *options);
enum crash_result crash_engine_open(struct crash_engine *engine);
void crash_engine_close(struct crash_engine *engine); /* idempotent */

struct crash_stored {
    uint64_t moved_bytes;
    bool is_whole;   /* all of it is there now */
    bool is_durable; /* and the daemon says: on the disk */
};
/* Blocks [first, end) of all components, by ticket or in one call by prefix. */
enum crash_result crash_engine_store(struct crash_engine *engine, const struct crash_place *place,
                                     bool is_wanted_durable, struct crash_stored *ret);
/* What is above L3 of [0, end) goes down to it and is flushed. */
enum crash_result crash_engine_lower(struct crash_engine *engine, const struct crash_place *place,
                                     struct crash_stored *ret);

struct crash_read {
    uint64_t boundary_blocks, served_blocks, missed_blocks, wrong_bytes;
    uint64_t served_from[KVT_API_TIERS];
    uint64_t missed_below;  /* of missed_blocks: those before block `promised` */
    char first_missed[160]; /* of those, for people; else why the lookup went no further */
};
/* Looks up [0, end) and reads every component and rank of what is found, verified. @promised is
 * only for missed_below. */
enum crash_result crash_engine_read(struct crash_engine *engine, const struct crash_place *place,
                                    uint64_t promised, struct crash_read *ret);
enum crash_result crash_engine_evict(struct crash_engine *engine, const struct crash_place *place);
enum crash_result crash_engine_reset(struct crash_engine *engine, uint32_t space);

/* What must be nothing when nobody stores: leases, tickets, reservations, pins, copies that are
 * pinned or being filled, tiers out of service unless that is allowed. Waits until it is, for a few
 * seconds. */
enum crash_result crash_engine_left(struct crash_engine *engine, bool is_out_allowed,
                                    uint64_t *ret_left);

/* ---- the programs ------------------------------------------------------------------------------
 */

struct crash_options {
    const char *socket_path, *admin_path, *journal_path;
    const char *revision; /* of the models: another one is another namespace */
    uint64_t seed, cycle, load_ns;
    uint32_t workers, talks;
    bool is_keeping;     /* what was durable is there (nothing was evicted) */
    bool is_out_allowed; /* a tier that is out of service is no fault */
};

struct crash_totals {
    uint64_t stores, durable_answers, reads, evicts, resets, refused;
    uint64_t served_blocks, served_from[KVT_API_TIERS];
    uint64_t wrong_bytes, wrong_blocks;
    uint64_t promised_blocks, lost_blocks, stale_blocks, missed_blocks, left;
    bool is_gone;
    char first_fault[320];
};

/* -errno (no memory, no journal), or 0; what was found wrong is in @ret. */
KVT_MUST_USE int crash_load(const struct crash_options *options, struct crash_totals *ret);
KVT_MUST_USE int crash_fill(const struct crash_options *options, struct crash_totals *ret);
KVT_MUST_USE int crash_check(const struct crash_options *options, struct crash_totals *ret);
