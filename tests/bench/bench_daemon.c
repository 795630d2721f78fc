/* A whole daemon, as an engine meets it: one Promote of 1 MiB from L2 into the engine's memory, and
 * the start with 1 GiB of L2.
 *
 * Promote is against an empty request over the same path (Quiesce of an op that never was: client,
 * rpc thread, engine, reply) plus 1.4 times a memcpy of the same bytes in this process; the three
 * are interleaved call by call, and both copies walk through regions larger than the caches. Start
 * is from spawn to the first answer, against populating and locking as much shared memory by hand.
 * --daemon PATH: the program; build directory's by default. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "tests/bench/bench.h"
#include "tests/integration/e2e.h"

#define BLOCK_BYTES (1u << 20)
#define BLOCK_TOKENS 64u
#define BLOCKS 64u
#define CALLS_MAX 4000u

static const struct e2e_model model = {.name = "bench",
                                       .block_tokens = BLOCK_TOKENS,
                                       .ranks = 1,
                                       .components_count = 1,
                                       .components = {{.kind = 1, .bytes = BLOCK_BYTES}}};

static double promote_us[CALLS_MAX], empty_us[CALLS_MAX], copy_us[CALLS_MAX];

static double since_us(uint64_t started_ns)
{
    return (double)(bench_now_ns() - started_ns) / 1e3;
}

static double call_us(struct e2e_engine *engine, struct kvt_op *op)
{
    uint64_t started_ns = bench_now_ns();

    kvt_client_call(engine->client, op);
    CHECK_CODE(op, KVT_CODE_OK);
    return since_us(started_ns);
}

static double one_promote(struct e2e_engine *engine, struct kvt_op *op, struct kvt_handle lease,
                          uint64_t block)
{
    struct kvt_req_promote *req = &op->req.promote;
    double took_us;

    e2e_op_again(op, KVT_OP_PROMOTE);
    req->session = engine->handle;
    req->lease = lease;
    req->target = KVT_TARGET_ENGINE;
    req->moves_count = e2e_moves(op, &model, 1, block, block + 1, req->moves);
    took_us = call_us(engine, op);
    CHECK(op->ans.promote.moves.count[0] == 1);
    CHECK(op->ans.promote.moves.results[0][0] == KVT_MOVE_DONE);
    return took_us;
}

static double one_empty(struct e2e_engine *engine, struct kvt_op *op)
{
    e2e_op_again(op, KVT_OP_QUIESCE);
    op->req.quiesce.session = engine->handle;
    op->req.quiesce.op_id = UINT64_MAX;
    return call_us(engine, op);
}

static double one_copy(struct e2e_engine *engine, const uint8_t *from, uint64_t block)
{
    uint64_t started_ns = bench_now_ns();

    memcpy(engine->pool + block * BLOCK_BYTES, from + block * BLOCK_BYTES, BLOCK_BYTES);
    bench_use(engine->pool[block * BLOCK_BYTES]);
    return since_us(started_ns);
}

static void bench_promote(struct bench *bench, const char *program)
{
    static const char *const settings[] = {"tiers.l2.bytes=160MiB", "tiers.l2.pages=auto",
                                           "tiers.l2.slab_unit=2MiB", "log.level=warn", NULL};
    uint32_t calls = bench->is_quick ? 200 : CALLS_MAX, tokens[BLOCKS * BLOCK_TOKENS];
    struct kvt_op *op = e2e_op(KVT_OP_LOOKUP), *lookup = e2e_op(KVT_OP_LOOKUP);
    struct e2e_engine engine, *self = &engine;
    struct e2e_daemon daemon;
    uint8_t *from = malloc((size_t)BLOCKS * BLOCK_BYTES);
    double promote, empty, copy;

    CHECK(from != NULL);
    memset(from, 7, (size_t)BLOCKS * BLOCK_BYTES);
    e2e_daemon_start(&daemon, program, settings);
    e2e_engine_open(&engine, &daemon, &model, 1, 0, true);
    e2e_tokens(tokens, KVT_COUNT_OF(tokens), 1, 0);
    for (uint32_t upto = 16; upto <= BLOCKS; upto += 16) /* under the limit of what is reserved */
        CHECK(e2e_store(&engine, &self, 1, tokens, upto * BLOCK_TOKENS) == 16);
    e2e_lookup_request(&engine, lookup, tokens, KVT_COUNT_OF(tokens), true);
    kvt_client_call(engine.client, lookup);
    CHECK_CODE(lookup, KVT_CODE_OK);
    CHECK(lookup->ans.lookup.boundary_tokens == KVT_COUNT_OF(tokens));
    for (uint32_t i = 0; i < calls; i++) {
        empty_us[i] = one_empty(&engine, op);
        promote_us[i] = one_promote(&engine, op, lookup->ans.lookup.lease, i % BLOCKS);
        copy_us[i] = one_copy(&engine, from, (i + BLOCKS / 2) % BLOCKS);
    }
    e2e_op_again(op, KVT_OP_RELEASE);
    op->req.release.session = engine.handle;
    op->req.release.lease = lookup->ans.lookup.lease;
    kvt_client_call(engine.client, op);
    CHECK_CODE(op, KVT_CODE_OK);
    (void)e2e_op_free(lookup);
    (void)e2e_op_free(op);
    e2e_engine_close(&engine);
    e2e_daemon_stop(&daemon);
    free(from);
    promote = bench_median(promote_us, calls);
    empty = bench_median(empty_us, calls);
    copy = bench_median(copy_us, calls);
    bench_row(bench, &(struct bench_row){.name = "Promote of 1 MiB from L2, p50",
                                         .unit = "us",
                                         .limit_name = "empty request + 1.4 x memcpy",
                                         .value = promote,
                                         .limit = empty + 1.4 * copy,
                                         .target = 1});
    bench_row(bench,
              &(struct bench_row){.name = "the empty request, p50", .unit = "us", .value = empty});
    bench_row(bench,
              &(struct bench_row){.name = "memcpy of 1 MiB, p50", .unit = "us", .value = copy});
}

/* Milliseconds to populate and lock @bytes of shared memory by hand. */
static double populate_ms(uint64_t bytes)
{
    int fd = memfd_create("bench", MFD_CLOEXEC);
    uint64_t started_ns = bench_now_ns();
    double took_ms;
    void *base;

    CHECK(fd >= 0 && ftruncate(fd, (off_t)bytes) == 0);
    base = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, 0);
    CHECK(base != MAP_FAILED);
    (void)mlock(base, bytes); /* may be refused: then it is refused to the daemon too */
    took_ms = since_us(started_ns) / 1e3;
    (void)munmap(base, bytes);
    (void)close(fd);
    return took_ms;
}

static void bench_start(struct bench *bench, const char *program)
{
    const uint64_t l2_bytes = bench->is_quick ? 128 * KVT_MIB : KVT_GIB;
    const uint64_t index_bytes = 16 * KVT_MIB;
    const char *const settings[] = {bench->is_quick ? "tiers.l2.bytes=128MiB"
                                                    : "tiers.l2.bytes=1GiB",
                                    "tiers.l2.pages=auto",
                                    "tiers.l2.slab_unit=2MiB",
                                    "index.memory=16MiB",
                                    "log.level=warn",
                                    NULL};
    uint32_t rounds = bench->is_quick ? 1 : 5;
    double start_ms[5], bare_ms[5], rss_mib = 0;

    for (uint32_t i = 0; i < rounds; i++) {
        uint64_t started_ns = bench_now_ns();
        struct e2e_daemon daemon;

        e2e_daemon_start(&daemon, program, settings);
        start_ms[i] = since_us(started_ns) / 1e3;
        rss_mib = (double)e2e_rss_bytes(daemon.pid) / (double)KVT_MIB;
        e2e_daemon_stop(&daemon);
        bare_ms[i] = populate_ms(l2_bytes);
    }
    bench_row(bench, &(struct bench_row){.name = bench->is_quick ? "start, 128 MiB of L2, empty"
                                                                 : "start, 1 GiB of L2, empty",
                                         .unit = "ms",
                                         .limit_name = "populate + lock, one thread",
                                         .value = bench_median(start_ms, rounds),
                                         .limit = bench_median(bare_ms, rounds),
                                         .target = 1.3,
                                         .note = "seen by a client that asks every 20 ms"});
    bench_row(bench,
              &(struct bench_row){.name = "resident memory after start",
                                  .unit = "MiB",
                                  .value = rss_mib,
                                  .target = (double)(l2_bytes + index_bytes) / (double)KVT_MIB + 64,
                                  .note = "target: L2 + index + 64 MiB"});
}

int main(int argc, char **argv)
{
    const char *program = bench_arg(argc, argv, "--daemon");
    struct bench bench;

    if (program == NULL)
        program = "daemon/kvtierd";
    if (access(program, X_OK) != 0) {
        fprintf(stderr, "bench-daemon: no program %s: give it with --daemon PATH\n", program);
        return 1;
    }
    bench_begin(&bench, "daemon", argc, argv);
    bench_start(&bench, program);
    kvt_client_library_init();
    bench_promote(&bench, program);
    kvt_client_library_deinit();
    return bench_end(&bench);
}
