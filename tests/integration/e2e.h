/* A real kvtierd in a scratch directory, and engines against it: what the end-to-end tests share.
 *
 * An engine here is one rank (or a scheduler with a rank of its own) with a memfd as its KV pool.
 * Block i of component c of the daemon lies in its engine blocks 2i and 2i + 1, each of two pieces,
 * so that a layout that were read wrongly would be seen. Payload is the oracle's
 * (tools/lib/oracle.h): every byte that comes back is verified without what was stored.
 *
 * Everything that is not the subject of a test is CHECKed inside and ends the program. */
#pragma once

#include <sys/types.h>

#include "proto/client/client.h"
#include "tests/common/check.h"

#define E2E_BLOCKS_MAX 256u
#define E2E_PATH_BYTES 512u

/* ---- the daemon -------------------------------------------------------------------------------
 */

struct e2e_daemon {
    const char *program;
    char dir[64], socket[E2E_PATH_BYTES], admin_socket[E2E_PATH_BYTES], log[E2E_PATH_BYTES];
    pid_t pid; /* 0: not running */
};

/* @settings: "key=value" texts, or options ("--rebuild-l3"), NULL-terminated, after the small
 * defaults. "@/" at the beginning of a value is the scratch directory. Waits until it serves. */
void e2e_daemon_start(struct e2e_daemon *daemon, const char *program, const char *const settings[]);
/* The same directory, after kill or stop. */
void e2e_daemon_restart(struct e2e_daemon *daemon, const char *const settings[]);
/* The same, without the waiting. */
void e2e_daemon_begin(struct e2e_daemon *daemon, const char *const settings[]);
/* Starts and expects that it ends by itself; returns its exit status. The log is in *ret_log. */
int e2e_daemon_start_fails(struct e2e_daemon *daemon, const char *program,
                           const char *const settings[], char *ret_log, size_t log_bytes);
void e2e_daemon_kill(struct e2e_daemon *daemon);
/* SIGTERM; CHECKs that it leaves with 0. The directory stays. */
void e2e_daemon_leave(struct e2e_daemon *daemon);
/* The same where it runs; removes the directory. */
void e2e_daemon_stop(struct e2e_daemon *daemon);
uint64_t e2e_rss_bytes(pid_t pid);
void e2e_sleep_ms(uint32_t ms);

/* ---- models and engines -----------------------------------------------------------------------
 */

struct e2e_model {
    const char *name;
    uint32_t block_tokens, ranks, components_count;
    struct {
        uint32_t kind, window_tokens;
        uint64_t bytes; /* a multiple of 4 */
        bool is_replicated;
    } components[4];
};

struct e2e_engine {
    const struct e2e_model *model;
    struct e2e_engine *scheduler; /* takes and ends the leases; NULL: itself */
    struct kvt_client *client;
    struct kvt_session *session;
    struct kvt_handle ns, handle;
    uint8_t fingerprint[KVT_FINGERPRINT_BYTES];
    uint8_t engine_id[KVT_ENGINE_ID_BYTES];
    uint32_t rank;
    int memfd;
    uint8_t *pool;
    uint64_t pool_bytes;
    /* Engine block b is one that e2e_promote leaves alone where bit b % 8 is set. Not 0:
     * wrong_bytes counts whatever changed in the pool and was not asked for, too. */
    uint8_t left_alone;
};

struct kvt_op *e2e_op(enum kvt_op_kind kind); /* free with e2e_op_free; never NULL */
void e2e_op_again(struct kvt_op *op, enum kvt_op_kind kind);
struct kvt_op *e2e_op_free(struct kvt_op *op);

void e2e_connect(struct e2e_engine *engine, const struct e2e_daemon *daemon,
                 const struct e2e_model *model);
/* The request of an Attach with the whole pool as one region; the caller may spoil it. */
void e2e_attach_request(struct e2e_engine *engine, struct kvt_op *op, uint32_t rank,
                        bool is_scheduler, uint8_t engine_id);
int e2e_memfd(uint64_t bytes, bool is_sealed);
/* connect, a pool, and attach. Engines of one @engine_id are ranks of one engine. */
void e2e_engine_open(struct e2e_engine *engine, const struct e2e_daemon *daemon,
                     const struct e2e_model *model, uint8_t engine_id, uint32_t rank,
                     bool is_scheduler);
void e2e_engine_close(struct e2e_engine *engine); /* idempotent */

/* ---- prompts ----------------------------------------------------------------------------------
 */

/* @tokens_count tokens that depend on @seed from token @fork_at on, and on nothing before it. */
void e2e_tokens(uint32_t *tokens, uint64_t tokens_count, uint32_t seed, uint64_t fork_at);
/* Puts the oracle's bytes of blocks [0, blocks) of every component into the pool. */
void e2e_fill(struct e2e_engine *engine, const uint32_t *tokens, uint64_t blocks);
void e2e_poison(struct e2e_engine *engine); /* the pool is 0xdb everywhere */
/* Wrong bytes of one block in the pool. */
uint64_t e2e_wrong(const struct e2e_engine *engine, const uint32_t *tokens, uint32_t component,
                   uint64_t block_idx);

/* Fills req.lookup / .reserve for @tokens without salt; the caller may change it before the call.
 */
void e2e_lookup_request(struct e2e_engine *engine, struct kvt_op *op, const uint32_t *tokens,
                        uint64_t count, bool wants_lease);
void e2e_reserve_request(struct e2e_engine *engine, struct kvt_op *op, const uint32_t *tokens,
                         uint64_t count);
/* All of blocks [first, end) of @components (a bit each) as moves of @op's arena. */
uint32_t e2e_moves(struct kvt_op *op, const struct e2e_model *model, uint32_t components,
                   uint64_t first, uint64_t end, struct kvt_api_moves *moves);

/* Reserve as @scheduler, Demote as each rank; returns copies that were missing before. */
uint64_t e2e_store(struct e2e_engine *scheduler, struct e2e_engine *const ranks[],
                   uint32_t ranks_count, const uint32_t *tokens, uint64_t tokens_count);
uint64_t e2e_boundary(struct e2e_engine *engine, const uint32_t *tokens, uint64_t count);

struct e2e_promoted {
    uint64_t boundary_tokens, done, missed, wrong_bytes, moved_bytes;
    uint64_t from[KVT_API_TIERS];
};
/* Lookup with a lease (by the scheduler), Promote what the boundary needs to this engine's pool,
 * verify, release (by the scheduler). */
void e2e_promote(struct e2e_engine *engine, const uint32_t *tokens, uint64_t count,
                 struct e2e_promoted *ret);

/* Stats into @op (of the caller); returns its answer. */
const struct kvt_ans_stats *e2e_stats(struct e2e_engine *engine, struct kvt_op *op);
/* Waits up to five seconds until nothing is leased, reserved, pinned or filling. */
void e2e_expect_idle(struct e2e_engine *engine);
