/* Engines whose KV pools are memory of a GPU, in other processes than the daemon's: both have the
 * fake CUDA runtime, and share its memory by handle as CUDA's processes do. Every byte is verified
 * in the engine's own view.
 *
 *   e2e_gpu KVTIERD             all tests
 *   e2e_gpu victim SOCKET       an engine that copies until somebody kills it */
#include <signal.h>
#include <spawn.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "daemon/base/alloc.h"
#include "daemon/base/clock.h"
#include "tests/common/fake_cuda.h"
#include "tests/integration/e2e.h"

#define TOKENS 1024u
#define ROUNDS_MAX 5000u /* of a loss each some thousand calls */
#define LOSSES_MIN 3u
#define RIGHT_MIN 100u /* blocks, so that something was there to lose */

static const struct e2e_model model = {
    .name = "gpu",
    .block_tokens = 16,
    .ranks = 1,
    .components_count = 2,
    .components = {{.kind = 1, .bytes = 16384},
                   {.kind = 2, .bytes = 4096 + 96, .window_tokens = 40}}};

static const char *const l1_on[] = {"tiers.l1.backend=cuda",
                                    "tiers.l1.bytes=16MiB",
                                    "tiers.l1.headroom=1MiB",
                                    "tiers.l1.staging=2MiB",
                                    "tiers.l1.retry_min=20ms",
                                    "tiers.l1.retry_max=100ms",
                                    NULL};

/* Of the daemon that is started next; its seed is another each time, and printed. */
static void set_fake(const char *words)
{
    char text[128];

    (void)snprintf(text, sizeof(text), "seed=%d,%s", (int)getpid(), words);
    (void)fprintf(stderr, "KVT_FAKE_CUDA=%s\n", text);
    CHECK(setenv("KVT_FAKE_CUDA", text, 1) == 0);
}

/* ---- an engine's pool on the GPU ------------------------------------------------------------- */

struct gpu_pool {
    uint64_t address, allocated_bytes;
    uint8_t handle[KVT_CUDA_IPC_HANDLE_BYTES];
    struct kvt_cuda_info info;
};

#define POOL_OFFSET 4096u /* of the region in its allocation */

static void pool_new(struct gpu_pool *pool, struct e2e_engine *engine)
{
    const struct kvt_cuda_calls *calls = kvt_cuda_calls();

    engine->pool_bytes = 0;
    for (uint32_t c = 0; c < model.components_count; c++)
        engine->pool_bytes += model.components[c].bytes * E2E_BLOCKS_MAX;
    pool->allocated_bytes = POOL_OFFSET + engine->pool_bytes;
    CHECK(calls->set_device(0) == 0 && calls->device_info(0, &pool->info) == 0);
    CHECK(calls->alloc(pool->allocated_bytes, &pool->address) == 0);
    CHECK(calls->ipc_export(pool->address, pool->handle) == 0);
    engine->pool = kvt_fake_cuda_memory(pool->address, pool->allocated_bytes) + POOL_OFFSET;
}

static void attach_request(struct e2e_engine *engine, const struct gpu_pool *pool,
                           struct kvt_op *op, uint8_t engine_id)
{
    struct kvt_api_region *region = &op->req.attach.regions[0];

    e2e_attach_request(engine, op, 0, true, engine_id);
    region->kind = KVT_REGION_CUDA_IPC;
    memcpy(region->cuda_ipc.handle, pool->handle, sizeof(pool->handle));
    memcpy(region->cuda_ipc.device_uuid, pool->info.uuid, sizeof(pool->info.uuid));
    region->cuda_ipc.offset_bytes = POOL_OFFSET;
}

static char last_refusal[256]; /* for people, when a test fails */

static bool attach(struct e2e_engine *engine, const struct gpu_pool *pool, uint8_t engine_id)
{
    struct kvt_op *op = e2e_op(KVT_OP_ATTACH);

    attach_request(engine, pool, op, engine_id);
    engine->session = kvt_client_attach(engine->client, op);
    engine->handle = op->ans.attach.session;
    (void)snprintf(last_refusal, sizeof(last_refusal), "%s", op->message);
    (void)e2e_op_free(op);
    return engine->session != NULL;
}

static void open_engine(struct e2e_engine *engine, const struct e2e_daemon *daemon,
                        struct gpu_pool *pool, uint8_t engine_id)
{
    e2e_connect(engine, daemon, &model);
    pool_new(pool, engine);
    if (!attach(engine, pool, engine_id)) {
        (void)fprintf(stderr, "attach: %s\n", last_refusal);
        exit(1);
    }
}

static void close_engine(struct e2e_engine *engine, struct gpu_pool *pool)
{
    engine->pool = NULL; /* not a mapping of its own */
    e2e_engine_close(engine);
    CHECK(kvt_cuda_calls()->free(pool->address) == 0);
}

/* ---- tests ----------------------------------------------------------------------------------- */

/* Stored from one engine's pool and promoted into another's, of another allocation. */
static void test_two_engines(const char *program, const char *const settings[], uint32_t tier)
{
    struct e2e_daemon daemon;
    struct e2e_engine one, two, *self = &one;
    struct gpu_pool pools[2];
    struct e2e_promoted got;
    uint32_t tokens[TOKENS];
    uint64_t from = 0;

    e2e_daemon_start(&daemon, program, settings);
    open_engine(&one, &daemon, &pools[0], 1);
    open_engine(&two, &daemon, &pools[1], 2);
    for (uint32_t seed = 1; seed < 6; seed++) {
        e2e_tokens(tokens, TOKENS, seed, 256);
        CHECK(e2e_store(&one, &self, 1, tokens, TOKENS) > 0);
        e2e_promote(&two, tokens, TOKENS, &got);
        CHECK(got.boundary_tokens == TOKENS && got.missed == 0 && got.wrong_bytes == 0);
        from += got.from[tier];
        /* In this engine's own pool, too. */
        e2e_promote(&one, tokens, TOKENS, &got);
        CHECK(got.missed == 0 && got.wrong_bytes == 0);
        from += got.from[tier];
    }
    CHECK(from > 0);
    two.left_alone = 0x55;
    e2e_promote(&two, tokens, TOKENS, &got);
    CHECK(got.missed == 0 && got.wrong_bytes == 0);
    e2e_expect_idle(&one);
    close_engine(&two, &pools[1]);
    close_engine(&one, &pools[0]);
    e2e_daemon_stop(&daemon);
}

/* Where the bytes of a block that was promoted in place are, in this process. */
static const uint8_t *in_arena(const struct kvt_ans_promote *ans, const uint64_t addresses[],
                               uint32_t component, uint32_t move, uint64_t bytes)
{
    uint64_t offset_bytes = ans->in_place[component].offsets_bytes[move];

    for (uint32_t i = 0; i < ans->arenas_count; i++)
        if (ans->arenas[i].zone == ans->in_place[component].zones[move] &&
            offset_bytes + bytes <= ans->arenas[i].bytes)
            return kvt_fake_cuda_memory(addresses[i] + offset_bytes, bytes);
    CHECK(false);
    return NULL;
}

static void begin_promote(struct e2e_engine *engine, struct kvt_op *op, struct kvt_handle lease)
{
    struct kvt_req_promote *req = &op->req.promote;

    e2e_op_again(op, KVT_OP_PROMOTE);
    req->session = engine->handle;
    req->lease = lease;
    for (uint32_t c = 0; c < model.components_count; c++)
        req->moves_count += e2e_moves(op, &model, 1u << c, TOKENS / model.block_tokens - 8,
                                      TOKENS / model.block_tokens, &req->moves[c]);
}

/* All blocks that were told to be in place are what an inline Promote gives; returns how many. */
static uint32_t compare(const struct kvt_ans_promote *place, const uint64_t addresses[],
                        const struct kvt_ans_promote *inlined)
{
    const uint8_t *wanted = inlined->inline_data;
    uint32_t count = 0;

    for (uint32_t c = 0; c < model.components_count; c++)
        for (uint32_t i = 0; i < inlined->moves.count[c]; i++) {
            uint64_t bytes = model.components[c].bytes;

            if (inlined->moves.results[c][i] != KVT_MOVE_DONE)
                continue;
            CHECK(place->moves.results[c][i] == KVT_MOVE_DONE);
            CHECK(memcmp(in_arena(place, addresses, c, i, bytes), wanted, bytes) == 0);
            wanted += bytes;
            count++;
        }
    return count;
}

/* Another process imports the arena and reads blocks there, as long as it has the lease. */
static void test_in_place(const char *program)
{
    struct kvt_op *lookup = e2e_op(KVT_OP_LOOKUP), *place = e2e_op(KVT_OP_PROMOTE);
    struct kvt_op *inlined = e2e_op(KVT_OP_PROMOTE);
    const struct kvt_cuda_calls *calls = kvt_cuda_calls();
    uint64_t addresses[KVT_ZONES_MAX];
    const char *settings[16] = {"tiers.l1.export=true"};
    struct e2e_daemon daemon;
    struct e2e_engine engine, *self = &engine;
    struct gpu_pool pool;
    uint32_t tokens[TOKENS];

    for (uint32_t i = 0; l1_on[i] != NULL; i++)
        settings[i + 1] = l1_on[i];
    e2e_daemon_start(&daemon, program, settings);
    open_engine(&engine, &daemon, &pool, 1);
    e2e_tokens(tokens, TOKENS, 1, 0);
    CHECK(e2e_store(&engine, &self, 1, tokens, TOKENS) > 0);
    e2e_lookup_request(&engine, lookup, tokens, TOKENS, true);
    kvt_client_call(engine.client, lookup);
    CHECK_CODE(lookup, KVT_CODE_OK);
    begin_promote(&engine, place, lookup->ans.lookup.lease);
    place->req.promote.target = KVT_TARGET_L1;
    place->req.promote.is_in_place = true;
    kvt_client_call(engine.client, place);
    CHECK_CODE(place, KVT_CODE_OK);
    CHECK(place->ans.promote.is_in_place && place->ans.promote.arenas_count == 1);
    CHECK(calls->ipc_open(place->ans.promote.arenas[0].handle, &addresses[0]) == 0);
    begin_promote(&engine, inlined, lookup->ans.lookup.lease);
    inlined->req.promote.wants_inline = true;
    kvt_client_call(engine.client, inlined);
    CHECK_CODE(inlined, KVT_CODE_OK);
    CHECK(compare(&place->ans.promote, addresses, &inlined->ans.promote) >= 8);
    for (uint32_t seed = 2; seed < 40; seed++) { /* much more than L1 holds */
        e2e_tokens(tokens, TOKENS, seed, 0);
        CHECK(e2e_store(&engine, &self, 1, tokens, TOKENS) > 0);
    }
    CHECK(compare(&place->ans.promote, addresses, &inlined->ans.promote) >= 8);
    CHECK(calls->ipc_close(addresses[0]) == 0);
    e2e_op_again(inlined, KVT_OP_RELEASE);
    inlined->req.release.session = engine.handle;
    inlined->req.release.lease = lookup->ans.lookup.lease;
    kvt_client_call(engine.client, inlined);
    CHECK_CODE(inlined, KVT_CODE_OK);
    e2e_expect_idle(&engine);
    (void)e2e_op_free(lookup);
    (void)e2e_op_free(place);
    (void)e2e_op_free(inlined);
    close_engine(&engine, &pool);
    e2e_daemon_stop(&daemon);
}

/* What a client says of its memory is input. */
static void test_bad_handles(const char *program)
{
    struct e2e_daemon daemon;
    struct e2e_engine engine;
    struct gpu_pool pool, bad;
    struct e2e_engine *self = &engine;
    uint32_t tokens[TOKENS];

    e2e_daemon_start(&daemon, program, l1_on);
    e2e_connect(&engine, &daemon, &model);
    pool_new(&pool, &engine);
    for (uint32_t i = 0; i < KVT_CUDA_IPC_HANDLE_BYTES / 4; i++) {
        bad = pool;
        bad.handle[4 * i] ^= 0x81; /* also of bytes that nobody reads: then it is good */
        if (attach(&engine, &bad, 1))
            engine.session = kvt_session_detach(engine.session);
    }
    bad = pool;
    memset(bad.handle, 0, sizeof(bad.handle));
    CHECK(!attach(&engine, &bad, 1));
    bad = pool;
    bad.info.uuid[3] ^= 1;
    CHECK(!attach(&engine, &bad, 1));
    engine.pool_bytes += 1; /* past the end of the allocation */
    CHECK(!attach(&engine, &pool, 1));
    engine.pool_bytes = UINT64_MAX - 100;
    CHECK(!attach(&engine, &pool, 1));
    engine.pool_bytes = pool.allocated_bytes - POOL_OFFSET;
    CHECK(attach(&engine, &pool, 1));
    e2e_tokens(tokens, TOKENS, 1, 0);
    CHECK(e2e_store(&engine, &self, 1, tokens, TOKENS) > 0);
    close_engine(&engine, &pool);
    e2e_daemon_stop(&daemon);
}

static int be_victim(const char *socket)
{
    struct e2e_daemon daemon = {0};
    struct e2e_engine engine, *self = &engine;
    struct gpu_pool pool;
    struct e2e_promoted got;
    uint32_t tokens[TOKENS];

    (void)snprintf(daemon.socket, sizeof(daemon.socket), "%s", socket);
    open_engine(&engine, &daemon, &pool, (uint8_t)(getpid() % 200 + 10));
    CHECK(write(1, "x", 1) == 1);
    for (uint32_t seed = 1;; seed++) {
        e2e_tokens(tokens, TOKENS, 100 + seed % 3, 512);
        (void)e2e_store(&engine, &self, 1, tokens, TOKENS);
        e2e_promote(&engine, tokens, TOKENS, &got);
        CHECK(got.wrong_bytes == 0);
    }
}

static pid_t spawn_victim(const char *self, const struct e2e_daemon *daemon)
{
    char *argv[] = {(char *)(uintptr_t)self, (char *)(uintptr_t) "victim",
                    (char *)(uintptr_t)daemon->socket, NULL};
    posix_spawn_file_actions_t actions;
    int ends[2];
    pid_t pid;
    char byte;

    CHECK(pipe(ends) == 0);
    CHECK(posix_spawn_file_actions_init(&actions) == 0);
    CHECK(posix_spawn_file_actions_adddup2(&actions, ends[1], 1) == 0);
    CHECK(posix_spawn_file_actions_addclose(&actions, ends[0]) == 0);
    CHECK(posix_spawn(&pid, self, &actions, NULL, argv, environ) == 0);
    CHECK(posix_spawn_file_actions_destroy(&actions) == 0);
    (void)close(ends[1]);
    CHECK(read(ends[0], &byte, 1) == 1);
    (void)close(ends[0]);
    return pid;
}

/* Engines that die in the middle of copies: their session ends, nothing is left of them, and the
 * others never notice. */
static void test_killed_engines(const char *program, const char *self_program)
{
    struct e2e_daemon daemon;
    struct e2e_engine engine, *self = &engine;
    struct gpu_pool pool;
    struct e2e_promoted got;
    uint32_t tokens[TOKENS];

    e2e_daemon_start(&daemon, program, l1_on);
    open_engine(&engine, &daemon, &pool, 1);
    e2e_tokens(tokens, TOKENS, 1, 0);
    CHECK(e2e_store(&engine, &self, 1, tokens, TOKENS) > 0);
    for (uint32_t i = 0; i < 8; i++) {
        pid_t victim = spawn_victim(self_program, &daemon);
        int status;

        e2e_sleep_ms(5 + 13 * i);
        CHECK(kill(victim, SIGKILL) == 0 && waitpid(victim, &status, 0) == victim);
        CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
        e2e_promote(&engine, tokens, TOKENS, &got);
        CHECK(got.wrong_bytes == 0 && got.missed == 0);
    }
    e2e_expect_idle(&engine);
    close_engine(&engine, &pool);
    e2e_daemon_stop(&daemon);
}

/* Whatever answers come; what was not stored is a miss later. */
static void try_store(struct e2e_engine *engine, const uint32_t *tokens)
{
    struct kvt_op *op = e2e_op(KVT_OP_RESERVE), *demote = e2e_op(KVT_OP_DEMOTE);
    struct kvt_req_demote *req = &demote->req.demote;

    e2e_reserve_request(engine, op, tokens, TOKENS);
    kvt_client_call(engine->client, op);
    if (op->code == KVT_CODE_OK && op->ans.reserve.ticket.id != 0) {
        e2e_fill(engine, tokens, TOKENS / model.block_tokens);
        req->session = engine->handle;
        req->ticket = op->ans.reserve.ticket;
        req->op_id = 77;
        req->moves_count = e2e_moves(demote, &model, 3, 0, TOKENS / model.block_tokens, req->moves);
        kvt_client_call(engine->client, demote);
    }
    (void)e2e_op_free(demote);
    (void)e2e_op_free(op);
}

/* How many blocks came; each of them is right. */
static uint32_t try_promote(struct e2e_engine *engine, const uint32_t *tokens)
{
    struct kvt_op *op = e2e_op(KVT_OP_LOOKUP), *promote = e2e_op(KVT_OP_PROMOTE);
    struct kvt_req_promote *req = &promote->req.promote;
    uint32_t right = 0;

    e2e_poison(engine);
    e2e_lookup_request(engine, op, tokens, TOKENS, true);
    kvt_client_call(engine->client, op);
    if (op->code == KVT_CODE_OK && op->ans.lookup.boundary_tokens > 0) {
        uint64_t blocks = op->ans.lookup.boundary_tokens / model.block_tokens;

        req->session = engine->handle;
        req->lease = op->ans.lookup.lease;
        req->target = KVT_TARGET_ENGINE;
        req->op_id = 78;
        req->moves_count = e2e_moves(promote, &model, 1, 0, blocks, req->moves);
        kvt_client_call(engine->client, promote);
        for (uint64_t i = 0; promote->code == KVT_CODE_OK && i < blocks; i++)
            if (promote->ans.promote.moves.results[0][i] == KVT_MOVE_DONE) {
                CHECK(e2e_wrong(engine, tokens, 0, i) == 0);
                right++;
            }
        e2e_op_again(promote, KVT_OP_RELEASE);
        promote->req.release.session = engine->handle;
        promote->req.release.lease = op->ans.lookup.lease;
        kvt_client_call(engine->client, promote);
    }
    (void)e2e_op_free(promote);
    (void)e2e_op_free(op);
    return right;
}

/* A GPU that is lost is back in a fraction of a second; one that is not in this time hangs. */
static void attach_again(struct e2e_engine *engine, const struct gpu_pool *pool)
{
    uint64_t until_ns = kvt_clock_mono_ns() + 60 * KVT_NS_PER_S;

    while (!attach(engine, pool, 1)) {
        if (kvt_clock_mono_ns() > until_ns) {
            (void)fprintf(stderr, "attach, at last: %s\n", last_refusal);
            exit(1);
        }
        e2e_sleep_ms(10);
    }
}

/* The GPU is lost again and again. Sessions hear of it, attach again, and what they get is right or
 * a miss. */
static void test_losses(const char *program)
{
    struct e2e_daemon daemon;
    struct e2e_engine engine;
    struct gpu_pool pool;
    struct kvt_notice notice;
    uint32_t tokens[TOKENS], told = 0, rounds = 0, right = 0;

    set_fake("lose_every=3000,late=1");
    e2e_daemon_start(&daemon, program, l1_on);
    e2e_connect(&engine, &daemon, &model);
    pool_new(&pool, &engine);
    attach_again(&engine, &pool);
    /* How many rounds lie between two losses is a matter of chance and of the machine. */
    while ((told < LOSSES_MIN || right <= RIGHT_MIN) && rounds < ROUNDS_MAX) {
        e2e_tokens(tokens, TOKENS, 1 + rounds++ % 7, 256);
        try_store(&engine, tokens);
        right += try_promote(&engine, tokens);
        if (kvt_session_next_notice(engine.session, 0, &notice) == 1 &&
            notice.kind == KVT_NOTICE_REGIONS_LOST) {
            told++;
            engine.session = kvt_session_detach(engine.session);
            attach_again(&engine, &pool);
        }
    }
    (void)fprintf(stderr, "%u losses in %u rounds, %u blocks were right\n", told, rounds, right);
    CHECK(told >= LOSSES_MIN && right > RIGHT_MIN);
    close_engine(&engine, &pool);
    e2e_daemon_stop(&daemon);
    set_fake("devices=1");
}

int main(int argc, char **argv)
{
    static const char *const l1_off[] = {"tiers.l1.backend=cuda",  "tiers.l1.bytes=2MiB",
                                         "tiers.l1.headroom=1MiB", "tiers.l1.staging=2MiB",
                                         "tiers.l2.bytes=64MiB",   NULL};
    struct kvt_fake_cuda_config config = {.devices_count = 1, .kernels = kvt_kernels_host()};

    kvt_fake_cuda_init(&config);
    kvt_client_library_init();
    if (argc == 3 && strcmp(argv[1], "victim") == 0)
        return be_victim(argv[2]);
    CHECK(argc == 2);
    set_fake("devices=1");
    test_two_engines(argv[1], l1_on, 0);
    test_two_engines(argv[1], l1_off, 1);
    test_in_place(argv[1]);
    test_bad_handles(argv[1]);
    test_killed_engines(argv[1], argv[0]);
    test_losses(argv[1]);
    kvt_client_library_deinit();
    kvt_fake_cuda_deinit();
    return 0;
}
