/* Clients that lie, hoard, guess handles or pull their memory away from under a copy: each hurts
 * only itself. A second, honest engine works beside each of them and its bytes stay right. */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "tests/integration/e2e.h"

static const struct e2e_model full = {.name = "full",
                                      .block_tokens = 16,
                                      .ranks = 1,
                                      .components_count = 1,
                                      .components = {{.kind = 1, .bytes = 65536}}};
#define PROMPT_TOKENS 1024u
#define PROMPT_BLOCKS 64u

struct hole_puncher {
    const struct e2e_engine *engine;
    atomic_bool stop;
};

static void *punch(void *ctx)
{
    struct hole_puncher *puncher = ctx;

    while (!atomic_load(&puncher->stop))
        CHECK(fallocate(puncher->engine->memfd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0,
                        (off_t)puncher->engine->pool_bytes) == 0);
    return NULL;
}

/* The hostile engine punches holes while the daemon copies from and to its pool. */
static void test_holes(struct e2e_daemon *daemon, struct e2e_engine *honest)
{
    struct e2e_engine hostile, *self = &hostile;
    struct hole_puncher puncher = {.engine = &hostile};
    struct e2e_promoted got;
    uint32_t tokens[PROMPT_TOKENS];
    pthread_t thread;

    e2e_engine_open(&hostile, daemon, &full, 66, 0, true);
    CHECK(pthread_create(&thread, NULL, punch, &puncher) == 0);
    for (uint32_t round = 0; round < 20; round++) {
        e2e_tokens(tokens, PROMPT_TOKENS, 500 + round, 0);
        (void)e2e_store(&hostile, &self, 1, tokens, PROMPT_TOKENS);
        e2e_tokens(tokens, PROMPT_TOKENS, 1, 0);
        e2e_promote(&hostile, tokens, PROMPT_TOKENS, &got); /* its own bytes are its own loss */
        e2e_promote(honest, tokens, PROMPT_TOKENS, &got);
        CHECK(got.done == PROMPT_BLOCKS && got.missed == 0 && got.wrong_bytes == 0);
    }
    atomic_store(&puncher.stop, true);
    CHECK(pthread_join(thread, NULL) == 0);
    e2e_engine_close(&hostile);
    e2e_expect_idle(honest);
}

static void expect_region_refused(struct e2e_engine *engine, int fd, uint64_t bytes)
{
    uint8_t token[KVT_REGION_TOKEN_BYTES];
    char why[256] = "";
    int r = kvt_client_send_region(engine->client, fd, bytes, token, why, sizeof(why));

    if (r != -EINVAL || why[0] == '\0')
        (void)fprintf(stderr, "send_region: %d '%s'\n", r, why);
    CHECK(r == -EINVAL && why[0] != '\0');
    (void)close(fd);
}

static int sparse_memfd(uint64_t bytes)
{
    int fd = memfd_create("kvt-e2e", MFD_CLOEXEC | MFD_ALLOW_SEALING);

    CHECK(fd >= 0 && ftruncate(fd, (off_t)bytes) == 0);
    CHECK(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) == 0);
    return fd;
}

static void test_regions(struct e2e_daemon *daemon)
{
    char path[] = "/tmp/kvt-e2e-file-XXXXXX";
    struct e2e_engine engine;
    int fd = mkstemp(path);

    CHECK(fd >= 0 && ftruncate(fd, 1 << 20) == 0 && unlink(path) == 0);
    e2e_connect(&engine, daemon, &full);
    expect_region_refused(&engine, e2e_memfd(1 << 20, false), 1 << 20); /* could shrink */
    expect_region_refused(&engine, e2e_memfd(1 << 20, true), 2 << 20);  /* a lie */
    expect_region_refused(&engine, sparse_memfd(1 << 20), 1 << 20);     /* nothing behind it */
    expect_region_refused(&engine, fd, 1 << 20);                        /* not a memfd */
    e2e_engine_close(&engine);
}

enum lie {
    LIE_TOKEN,
    LIE_OFFSET,
    LIE_STRIDE_WRAP,
    LIE_REGION,
    LIE_BYTES,
    LIE_RANK,
    LIE_NAMESPACE,
    LIE_CUDA, /* or the truth, but there is no GPU */
    LIES
};

static void tell(struct kvt_op *op, enum lie lie)
{
    struct kvt_req_attach *req = &op->req.attach;
    struct kvt_api_layout *layout = (struct kvt_api_layout *)(uintptr_t)&req->layouts[0];
    struct kvt_api_piece *piece = (struct kvt_api_piece *)(uintptr_t)&layout->pieces[1];

    switch (lie) {
    case LIE_TOKEN:
        req->regions[0].token[3] ^= 1;
        break;
    case LIE_OFFSET:
        piece->offset_bytes = req->regions[0].bytes - 1;
        break;
    case LIE_STRIDE_WRAP:
        piece->offset_bytes = UINT64_MAX - 100;
        break;
    case LIE_REGION:
        piece->region_idx = 7;
        break;
    case LIE_BYTES:
        piece->bytes += 64;
        break;
    case LIE_RANK:
        req->rank = full.ranks;
        break;
    case LIE_NAMESPACE:
        req->ns.secret ^= 1;
        break;
    case LIE_CUDA:
        req->regions[0].kind = KVT_REGION_CUDA_IPC;
        break;
    case LIES:
        break;
    }
}

static void test_lying_attach(struct e2e_daemon *daemon)
{
    for (int lie = 0; lie < LIES; lie++) {
        struct kvt_op *op = e2e_op(KVT_OP_ATTACH);
        struct e2e_engine engine;
        struct kvt_session *session;
        char why[256];

        e2e_connect(&engine, daemon, &full);
        engine.pool_bytes = full.components[0].bytes * E2E_BLOCKS_MAX;
        engine.memfd = e2e_memfd(engine.pool_bytes, true);
        e2e_attach_request(&engine, op, 0, true, 67);
        CHECK(kvt_client_send_region(engine.client, engine.memfd, engine.pool_bytes,
                                     op->req.attach.regions[0].token, why, sizeof(why)) == 0);
        tell(op, (enum lie)lie);
        session = kvt_client_attach(engine.client, op);
        if (session != NULL || op->code == KVT_CODE_OK)
            (void)fprintf(stderr, "lie %d was believed\n", lie);
        CHECK(session == NULL && op->code != KVT_CODE_OK && op->code != KVT_CODE_INTERNAL);
        CHECK(op->message[0] != '\0');
        if (lie == LIE_CUDA)
            CHECK(op->code == KVT_CODE_FAILED_PRECONDITION);
        (void)e2e_op_free(op);
        e2e_engine_close(&engine);
    }
}

/* Engine blocks outside the region, and blocks that are not in the lease. */
static void test_lying_moves(struct e2e_daemon *daemon, struct e2e_engine *honest)
{
    struct kvt_op *op = e2e_op(KVT_OP_LOOKUP), *promote = e2e_op(KVT_OP_PROMOTE);
    struct e2e_engine hostile;
    uint32_t tokens[PROMPT_TOKENS];

    e2e_engine_open(&hostile, daemon, &full, 66, 0, true);
    e2e_tokens(tokens, PROMPT_TOKENS, 1, 0);
    e2e_lookup_request(&hostile, op, tokens, 256, true);
    kvt_client_call(hostile.client, op);
    CHECK_CODE(op, KVT_CODE_OK);
    for (uint32_t lie = 0; lie < 3; lie++) {
        struct kvt_req_promote *req = &promote->req.promote;

        e2e_op_again(promote, KVT_OP_PROMOTE);
        req->session = hostile.handle;
        req->lease = op->ans.lookup.lease;
        req->op_id = 5 + lie;
        req->moves_count =
            e2e_moves(promote, &full, 1, 0, lie == 2 ? E2E_BLOCKS_MAX : 16, req->moves);
        if (lie == 0)
            ((uint64_t *)(uintptr_t)req->moves[0].engine_blocks)[3] = 2 * E2E_BLOCKS_MAX;
        if (lie == 1)
            ((uint64_t *)(uintptr_t)req->moves[0].engine_blocks)[3] = UINT64_MAX - 1;
        kvt_client_call(hostile.client, promote);
        if (lie < 2)
            CHECK_CODE(promote, KVT_CODE_INVALID_ARGUMENT);
        for (uint32_t i = 16; lie == 2 && promote->code == KVT_CODE_OK && i < E2E_BLOCKS_MAX; i++)
            CHECK(promote->ans.promote.moves.results[0][i] != KVT_MOVE_DONE);
    }
    (void)e2e_op_free(op);
    (void)e2e_op_free(promote);
    e2e_engine_close(&hostile);
    e2e_expect_idle(honest);
}

static void expect_refused(struct e2e_engine *engine, struct kvt_op *op)
{
    kvt_client_call(engine->client, op);
    if (op->code != KVT_CODE_PERMISSION_DENIED && op->code != KVT_CODE_NOT_FOUND &&
        op->code != KVT_CODE_INVALID_ARGUMENT && op->code != KVT_CODE_ABORTED)
        (void)fprintf(stderr, "%s: code %d %s\n", kvt_op_kind_text(op->kind), (int)op->code,
                      op->message);
    CHECK(op->code == KVT_CODE_PERMISSION_DENIED || op->code == KVT_CODE_NOT_FOUND ||
          op->code == KVT_CODE_INVALID_ARGUMENT || op->code == KVT_CODE_ABORTED);
}

static void try_foreign_promote(struct e2e_engine *thief, struct kvt_op *op,
                                struct kvt_handle lease)
{
    e2e_op_again(op, KVT_OP_PROMOTE);
    op->req.promote.session = thief->handle;
    op->req.promote.lease = lease;
    op->req.promote.op_id = 9;
    op->req.promote.moves_count = e2e_moves(op, &full, 1, 0, 16, op->req.promote.moves);
    expect_refused(thief, op);
}

static void test_foreign_handles(struct e2e_daemon *daemon, struct e2e_engine *honest)
{
    struct kvt_op *op = e2e_op(KVT_OP_LOOKUP), *ticket_op = e2e_op(KVT_OP_RESERVE);
    struct kvt_handle lease, ticket;
    struct e2e_engine thief;
    uint32_t tokens[PROMPT_TOKENS];

    e2e_engine_open(&thief, daemon, &full, 68, 0, true);
    e2e_tokens(tokens, PROMPT_TOKENS, 1, 0);
    e2e_lookup_request(honest, op, tokens, 256, true);
    kvt_client_call(honest->client, op);
    CHECK_CODE(op, KVT_CODE_OK);
    lease = op->ans.lookup.lease;
    e2e_tokens(tokens, PROMPT_TOKENS, 700, 0);
    e2e_reserve_request(honest, ticket_op, tokens, 256);
    kvt_client_call(honest->client, ticket_op);
    CHECK_CODE(ticket_op, KVT_CODE_OK);
    ticket = ticket_op->ans.reserve.ticket;
    try_foreign_promote(&thief, op, lease);
    lease.secret ^= 1;
    try_foreign_promote(&thief, op, lease);
    lease.secret ^= 1;
    e2e_op_again(op, KVT_OP_DEMOTE);
    op->req.demote.session = thief.handle;
    op->req.demote.ticket = ticket;
    op->req.demote.op_id = 3;
    op->req.demote.moves_count = e2e_moves(op, &full, 1, 0, 16, op->req.demote.moves);
    expect_refused(&thief, op);
    /* A session that is guessed, by one bit. */
    e2e_op_again(op, KVT_OP_LOOKUP);
    e2e_lookup_request(honest, op, tokens, 256, false);
    op->req.lookup.session.secret ^= 1;
    expect_refused(&thief, op);
    /* Release of another's lease changes nothing. */
    e2e_op_again(op, KVT_OP_RELEASE);
    op->req.release.session = thief.handle;
    op->req.release.lease = lease;
    kvt_client_call(thief.client, op);
    e2e_op_again(op, KVT_OP_RELEASE);
    op->req.release.session = thief.handle;
    op->req.release.ticket = ticket;
    kvt_client_call(thief.client, op);
    CHECK(e2e_stats(honest, op)->leases == 1 && op->ans.stats.tickets == 1);
    e2e_op_again(op, KVT_OP_RELEASE);
    op->req.release.session = honest->handle;
    op->req.release.lease = lease;
    kvt_client_call(honest->client, op);
    CHECK_CODE(op, KVT_CODE_OK);
    e2e_op_again(op, KVT_OP_RELEASE);
    op->req.release.session = honest->handle;
    op->req.release.ticket = ticket;
    kvt_client_call(honest->client, op);
    CHECK_CODE(op, KVT_CODE_OK);
    (void)e2e_op_free(op);
    (void)e2e_op_free(ticket_op);
    e2e_engine_close(&thief);
    e2e_expect_idle(honest);
}

/* Admin verbs are not on the engines' socket. */
static void test_admin_verbs(struct e2e_engine *honest)
{
    static const enum kvt_op_kind kinds[] = {KVT_OP_EVICT, KVT_OP_RESET, KVT_OP_DUMP};
    struct kvt_op *op = e2e_op(KVT_OP_EVICT);
    uint32_t tokens[PROMPT_TOKENS];

    e2e_tokens(tokens, PROMPT_TOKENS, 1, 0);
    for (size_t i = 0; i < KVT_COUNT_OF(kinds); i++) {
        e2e_op_again(op, kinds[i]);
        if (kinds[i] == KVT_OP_EVICT) {
            op->req.evict.ns = honest->ns;
            op->req.evict.is_whole_namespace = true;
        } else if (kinds[i] == KVT_OP_RESET) {
            op->req.reset.ns = honest->ns;
        }
        kvt_client_call(honest->client, op);
        CHECK(op->code == KVT_CODE_PERMISSION_DENIED || op->code == KVT_CODE_UNIMPLEMENTED);
    }
    CHECK(e2e_boundary(honest, tokens, PROMPT_TOKENS) == PROMPT_TOKENS);
    (void)e2e_op_free(op);
}

/* Takes leases and tickets until it is refused: others go on, and all of it goes with its session.
 */
static void test_hoarder(struct e2e_daemon *daemon, struct e2e_engine *honest)
{
    struct kvt_op *op = e2e_op(KVT_OP_LOOKUP);
    struct e2e_engine hoarder, *self = honest;
    struct e2e_promoted got;
    uint32_t tokens[PROMPT_TOKENS], leases = 0, tickets = 0;

    e2e_engine_open(&hoarder, daemon, &full, 69, 0, true);
    e2e_tokens(tokens, PROMPT_TOKENS, 1, 0);
    for (; leases < 5000; leases++) {
        e2e_op_again(op, KVT_OP_LOOKUP);
        e2e_lookup_request(&hoarder, op, tokens, PROMPT_TOKENS, true);
        kvt_client_call(hoarder.client, op);
        if (op->code != KVT_CODE_OK || op->ans.lookup.lease.id == 0)
            break;
    }
    for (; tickets < 5000; tickets++) {
        e2e_tokens(tokens, 64, 10000 + tickets, 0);
        e2e_op_again(op, KVT_OP_RESERVE);
        e2e_reserve_request(&hoarder, op, tokens, 64);
        kvt_client_call(hoarder.client, op);
        if (op->code != KVT_CODE_OK || op->ans.reserve.states[0][3] != KVT_RESERVE_MISSING)
            break;
    }
    (void)printf("hoarder: %u leases, %u tickets\n", leases, tickets);
    CHECK(leases > 0 && leases <= 1024 && tickets > 0 && tickets <= 1024);
    e2e_tokens(tokens, PROMPT_TOKENS, 1, 0);
    e2e_promote(honest, tokens, PROMPT_TOKENS, &got);
    CHECK(got.done == PROMPT_BLOCKS && got.wrong_bytes == 0);
    e2e_tokens(tokens, PROMPT_TOKENS, 800, 0);
    CHECK(e2e_store(honest, &self, 1, tokens, 256) == 16);
    (void)e2e_op_free(op);
    e2e_engine_close(&hoarder);
    e2e_expect_idle(honest);
}

/* Sessions come and go; memory does not. */
static void test_rss(struct e2e_daemon *daemon, struct e2e_engine *honest, uint32_t cycles)
{
    uint64_t before = 0, after;
    uint32_t tokens[PROMPT_TOKENS];

    for (uint32_t i = 0; i < cycles + 40; i++) {
        struct e2e_engine engine, *self = &engine;

        if (i == 40)
            before = e2e_rss_bytes(daemon->pid);
        e2e_engine_open(&engine, daemon, &full, (uint8_t)(100 + i % 50), 0, true);
        e2e_tokens(tokens, 64, 20000 + i, 0);
        (void)e2e_store(&engine, &self, 1, tokens, 64);
        e2e_engine_close(&engine);
    }
    e2e_expect_idle(honest);
    after = e2e_rss_bytes(daemon->pid);
    (void)printf("rss: %llu KiB before, %llu KiB after %u sessions\n",
                 (unsigned long long)before / 1024, (unsigned long long)after / 1024, cycles);
    CHECK(after < before + 12 * KVT_MIB);
}

int main(int argc, char *argv[])
{
    struct e2e_daemon daemon;
    struct e2e_engine honest, *self = &honest;
    uint32_t tokens[PROMPT_TOKENS];

    CHECK(argc == 3);
    kvt_client_library_init();
    e2e_daemon_start(&daemon, argv[1], NULL);
    e2e_engine_open(&honest, &daemon, &full, 1, 0, true);
    e2e_tokens(tokens, PROMPT_TOKENS, 1, 0);
    CHECK(e2e_store(&honest, &self, 1, tokens, PROMPT_TOKENS) == PROMPT_BLOCKS);
    test_regions(&daemon);
    test_lying_attach(&daemon);
    test_lying_moves(&daemon, &honest);
    test_foreign_handles(&daemon, &honest);
    test_admin_verbs(&honest);
    test_hoarder(&daemon, &honest);
    test_holes(&daemon, &honest);
    if (strcmp(argv[2], "reduced") == 0)
        (void)printf("not measured: RSS under a sanitizer's allocator\n");
    else
        test_rss(&daemon, &honest, 200);
    e2e_engine_close(&honest);
    e2e_daemon_stop(&daemon);
    kvt_client_library_deinit();
    (void)printf("ok\n");
    return 0;
}
