/* Every RPC, with random values in every field, through a real server and back: what the service
 * sees and what the client gets must be exactly what was put in on the other side. In both ways of
 * replying, with one and with two rpc threads, with small requests and with some at their limits.
 *
 *   proto_roundtrip [SEED [ROUNDS]] */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/client/client.h"
#include "tests/common/api_walk.h"
#include "tests/common/fake_service.h"

static _Atomic(struct kvt_op *) expected; /* the request in flight; one at a time */
static _Atomic(const char *) wrong_field;
static atomic_uint progress_sent, progress_seen;

static bool check_request(struct fake_service *fake, struct kvt_op *op)
{
    const char *field;

    if (op->kind == KVT_OP_DETACH || op->kind == KVT_OP_HEALTH)
        return false;
    field = api_compare_requests(atomic_load(&expected), op);
    atomic_store(&wrong_field, field); /* also says that the request is not looked at any more */
    if (op->kind == KVT_OP_PROMOTE && op->progress != NULL) {
        struct kvt_api_progress progress = {.group = 0,
                                            .groups_count = op->req.promote.layer_groups};

        for (; progress.group < progress.groups_count; progress.group++)
            op->progress(op, &progress);
        atomic_fetch_add(&progress_sent, 1);
    }
    (void)fake;
    return false;
}

static void on_progress(struct kvt_op *op, const struct kvt_api_progress *progress)
{
    if (progress->group >= progress->groups_count ||
        progress->groups_count != op->req.promote.layer_groups)
        atomic_store(&wrong_field, "progress");
    atomic_fetch_add(&progress_seen, 1);
}

static int fail(const char *what, const char *detail, uint64_t seed)
{
    fprintf(stderr, "FAIL %s: %s (seed %llu)\n", what, detail, (unsigned long long)seed);
    return 1;
}

static void one_call(struct kvt_client *client, struct kvt_op *op)
{
    if (op->kind != KVT_OP_ATTACH)
        kvt_client_call(client, op);
    else
        kvt_session_detach(kvt_client_attach(client, op));
}

static int one_kind(struct fake_server *fake, struct kvt_client *client, enum kvt_op_kind kind,
                    uint64_t seed, uint32_t size, struct kvt_arena arenas[2])
{
    struct kvt_op op, answer;
    const char *field;

    kvt_arena_reset(&arenas[0]);
    kvt_arena_reset(&arenas[1]);
    fake_op_init(&op, &arenas[0], kind);
    api_fill_request(&op, seed, size);
    op.progress = on_progress;
    /* what the service will answer */
    fake_op_init(&answer, &arenas[1], kind);
    memcpy(&answer.req, &op.req, sizeof(op.req));
    api_fill_answer(&answer, seed + 1, size);
    atomic_store(&fake->service.answer_seed, seed + 1);
    atomic_store(&fake->service.answer_size, size);
    if (kind == KVT_OP_HEALTH)
        answer.ans.health.is_serving = true;
    atomic_store(&expected, &answer);
    one_call(client, &op);
    if (op.code != KVT_CODE_OK)
        return fail(kvt_op_kind_text(kind), op.message, seed);
    field = atomic_exchange(&wrong_field, NULL);
    if (field != NULL)
        return fail("request field", field, seed);
    field = api_compare_answers(&answer, &op);
    return field == NULL ? 0 : fail("answer field", field, seed);
}

static int one_setup(struct kvt_server_config config, uint64_t seed, uint32_t rounds)
{
    struct kvt_arena arenas[2];
    struct kvt_client_config client_config = {0};
    struct kvt_client *client = NULL;
    struct fake_server fake;
    int bad = 0;

    fake_server_start(&fake, config);
    fake.service.handle = check_request;
    client_config.socket_path = fake.admin_path;
    if (kvt_client_open(&client, &client_config) != 0 ||
        kvt_arena_init(&arenas[0], 256 * KVT_MIB, KVT_MIB) != 0 ||
        kvt_arena_init(&arenas[1], 256 * KVT_MIB, KVT_MIB) != 0)
        return fail("setup", "client or arena", seed);
    for (uint32_t round = 0; bad == 0 && round < rounds; round++) {
        uint32_t size = round % 8 == 7 ? 2 : round % 4 == 3 ? 1 : 0;

        for (unsigned kind = 0; bad == 0 && kind < KVT_OP_KINDS; kind++)
            if (kind != KVT_OP_DETACH)
                bad = one_kind(&fake, client, (enum kvt_op_kind)kind, seed + round * 1000 + kind,
                               size, arenas);
    }
    kvt_arena_deinit(&arenas[0]);
    kvt_arena_deinit(&arenas[1]);
    kvt_client_close(client);
    if (bad == 0 && atomic_load(&fake.service.submitted[KVT_OP_DETACH]) != rounds)
        bad = fail("detach", "not once a session", seed);
    fake_server_stop(&fake, KVT_NS_PER_S);
    return bad;
}

int main(int argc, char **argv)
{
    uint64_t seed = argc > 1 ? strtoull(argv[1], NULL, 10) : 1;
    uint32_t rounds = argc > 2 ? (uint32_t)strtoul(argv[2], NULL, 10) : 40;
    int bad = 0;

    printf("seed %llu, %u rounds\n", (unsigned long long)seed, rounds);
    kvt_client_library_init();
    bad |= one_setup((struct kvt_server_config){.is_reply_inline = false}, seed, rounds);
    bad |= one_setup((struct kvt_server_config){.is_reply_inline = true}, seed + 500000, rounds);
    bad |= one_setup((struct kvt_server_config){.threads = 2}, seed + 900000, rounds);
    if (atomic_load(&progress_sent) == 0 || atomic_load(&progress_seen) == 0)
        bad |= fail("progress", "none was seen", seed);
    kvt_client_library_deinit();
    return bad;
}
