/* What a Lookup costs beyond an echo of the same bytes on the same server.
 *
 * "echo inline": the server receives the message, does not decode it, and its rpc thread answers 2
 * bytes at once: the least that gRPC can do here. "echo, ring": the same, but the op passes through
 * the service's thread and the way that replies take. Lookup: decoded, passed to the service's
 * thread, answered with one component's numbers (about 60 bytes). The service is a fake without a
 * tree, so that only the protocol is measured. All rows of one size come from interleaved rounds on
 * one channel, one call at a time, p50 of each round, median of the rounds; client and server share
 * the machine. Once with the reply thread and once with replies from the service's thread. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/clock.h"
#include "proto/client/internal.h"
#include "proto/codec/codec.h"
#include "tests/bench/bench.h"
#include "tests/common/fake_service.h"

#define ROUNDS_MAX 15u
#define CALLS_MAX 400u

enum what { ECHO_INLINE, ECHO_RING, LOOKUP, WHATS };
static const char *const paths[WHATS] = {"/kvtier.bench.Echo/Inline", "/kvtier.bench.Echo/Ring",
                                         "/kvtier.v1.KvTier/Lookup"};
static uint32_t tokens[81920];

static bool answer_lookup(struct fake_service *service, struct kvt_op *op)
{
    if (op->kind != KVT_OP_LOOKUP)
        return false;
    memset(&op->ans.lookup, 0, sizeof(op->ans.lookup));
    op->ans.lookup.boundary_tokens = op->req.lookup.prefix.tokens_count;
    op->ans.lookup.components_count = 1;
    op->ans.lookup.components[0].alone_tokens = op->req.lookup.prefix.tokens_count;
    op->ans.lookup.components[0].blocks_at[1] = 17;
    op->ans.lookup.cursor = (struct kvt_handle){1, 2, 3};
    op->code = KVT_CODE_OK;
    atomic_fetch_sub(&service->running, 1);
    op->done(op);
    return true;
}

/* One call with the bytes already encoded; the answer is received and dropped. ns. */
static uint64_t one_call(struct kvt_client *client, const char *path, grpc_slice request)
{
    grpc_op ops[6] = {{.op = GRPC_OP_SEND_INITIAL_METADATA},
                      {.op = GRPC_OP_SEND_MESSAGE},
                      {.op = GRPC_OP_SEND_CLOSE_FROM_CLIENT}};
    uint64_t begin_ns = kvt_clock_mono_ns();
    grpc_byte_buffer *buffer = grpc_raw_byte_buffer_create(&request, 1);
    struct kvt_client_call call;
    struct kvt_op op = {0};

    kvt_call_begin(&call, client, &op, path, true);
    ops[1].data.send_message.send_message = buffer;
    ops[3] = kvt_initial_op(&call);
    ops[4] = kvt_receive_op(&call);
    ops[5] = kvt_status_op(&call);
    kvt_call_batch(&call, ops, 6, &call.tags[0]);
    (void)kvt_call_wait(&call, &call.tags[0]);
    kvt_call_status(&call, &op);
    if (op.code != KVT_CODE_OK || call.received == NULL) {
        fprintf(stderr, "%s: code %d: %s\n", path, (int)op.code, op.message);
        exit(1);
    }
    grpc_byte_buffer_destroy(call.received);
    kvt_call_end(&call);
    grpc_byte_buffer_destroy(buffer);
    return kvt_clock_mono_ns() - begin_ns;
}

static grpc_slice encode(uint32_t tokens_count)
{
    struct kvt_arena arena;
    struct kvt_codec_message message;
    struct kvt_op op;
    grpc_slice slice;

    if (kvt_arena_init(&arena, KVT_MIB, 0) != 0)
        abort();
    fake_op_init(&op, &arena, KVT_OP_LOOKUP);
    op.req.lookup.session = (struct kvt_handle){1, 2, 3};
    op.req.lookup.prefix.tokens = tokens;
    op.req.lookup.prefix.tokens_count = tokens_count;
    if (kvt_codec_encode_request(&op, &message) != 0)
        abort();
    slice = grpc_slice_malloc(message.bytes);
    kvt_codec_pack(&message, GRPC_SLICE_START_PTR(slice));
    kvt_arena_deinit(&arena);
    return slice;
}

/* µs of each of WHATS. */
static void measure(struct kvt_client *client, uint32_t tokens_count, uint32_t rounds,
                    uint32_t calls, double ret_us[WHATS])
{
    static double medians[WHATS][ROUNDS_MAX], samples[CALLS_MAX];
    grpc_slice request = encode(tokens_count);

    for (uint32_t round = 0; round < rounds; round++) {
        for (unsigned what = 0; what < WHATS; what++) {
            for (uint32_t i = 0; i < calls; i++)
                samples[i] = (double)one_call(client, paths[what], request) / 1000.0;
            medians[what][round] = bench_median(samples, calls);
        }
    }
    for (unsigned what = 0; what < WHATS; what++)
        ret_us[what] = bench_median(medians[what], rounds);
    grpc_slice_unref(request);
}

static void add_rows(struct bench *bench, const char *mode, const char *size,
                     const double us[WHATS], double inline_target)
{
    char name[128];

    (void)snprintf(name, sizeof(name), "gRPC Lookup, %s, %s", size, mode);
    bench_row(bench, &(struct bench_row){.name = name,
                                         .value = us[LOOKUP],
                                         .unit = "us",
                                         .limit_name = "echo answered inline",
                                         .limit = us[ECHO_INLINE],
                                         .target = inline_target});
    bench_row(bench, &(struct bench_row){.name = name,
                                         .value = us[LOOKUP],
                                         .unit = "us",
                                         .limit_name = "echo through the service's ring",
                                         .limit = us[ECHO_RING],
                                         .target = inline_target < 1.2 ? 1.15 : 1.1});
}

static void run_mode(struct bench *bench, bool is_reply_inline)
{
    const char *mode = is_reply_inline ? "replies from the service's thread" : "reply thread";
    static struct fake_server fake;
    struct kvt_client_config config = {0};
    struct kvt_client *client = NULL;
    uint32_t rounds = bench->is_quick ? 2 : ROUNDS_MAX;
    double us[WHATS];

    fake_server_start(&fake, (struct kvt_server_config){.is_reply_inline = is_reply_inline});
    fake.service.handle = answer_lookup;
    config.socket_path = fake.path;
    if (kvt_client_open(&client, &config) != 0)
        abort();
    measure(client, 1, 1, 100, us); /* warm */
    measure(client, 2, rounds, CALLS_MAX, us);
    add_rows(bench, mode, "64 B", us, 1.3);
    measure(client, 1008, rounds, CALLS_MAX, us);
    add_rows(bench, mode, "4 KiB", us, 1.3);
    measure(client, 81920, rounds, CALLS_MAX / 2, us);
    add_rows(bench, mode, "320 KiB of tokens", us, 1.15);
    kvt_client_close(client);
    fake_server_stop(&fake, KVT_NS_PER_S);
}

int main(int argc, char **argv)
{
    struct bench bench;

    bench_begin(&bench, "grpc", argc, argv);
    for (uint32_t i = 0; i < KVT_COUNT_OF(tokens); i++)
        tokens[i] = i * 2654435761u;
    kvt_client_library_init();
    run_mode(&bench, false);
    run_mode(&bench, true);
    kvt_client_library_deinit();
    return bench_end(&bench);
}
