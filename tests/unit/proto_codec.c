/* The codec without gRPC: random requests and answers there and back, in one piece and in many, and
 * arenas that are too small. */
#include "tests/common/cmocka.h"

#include <stdlib.h>
#include <string.h>

#include "proto/codec/codec.h"
#include "tests/common/api_walk.h"

static struct kvt_arena arenas[3];

static bool has_request(unsigned kind)
{
    return kind != KVT_OP_DETACH && kind != KVT_OP_HEALTH;
}

/* Cuts @at into pieces at random places. */
static uint32_t cut(const uint8_t *at, size_t bytes, uint64_t *random,
                    struct kvt_codec_piece pieces[8])
{
    uint32_t count = 0;

    while (count < 7 && bytes > 0) {
        size_t here = (size_t)(api_random(random) % bytes) + 1;

        pieces[count++] = (struct kvt_codec_piece){at, here};
        at += here;
        bytes -= here;
    }
    pieces[count++] = (struct kvt_codec_piece){at, bytes};
    return count;
}

static void test_requests(void **state)
{
    (void)state;
    for (uint64_t i = 0; i < 40u * KVT_OP_KINDS; i++) {
        struct kvt_op op = {.kind = (enum kvt_op_kind)(i % KVT_OP_KINDS), .arena = &arenas[0]};
        struct kvt_op back = {.kind = op.kind, .arena = &arenas[1]};
        struct kvt_codec_message message;
        struct kvt_codec_piece pieces[8];
        uint64_t random = i;
        uint8_t *at;

        if (!has_request(op.kind))
            continue;
        kvt_arena_reset(&arenas[0]);
        kvt_arena_reset(&arenas[1]);
        api_fill_request(&op, i, i % 3 == 0);
        assert_int_equal(kvt_codec_encode_request(&op, &message), 0);
        at = malloc(message.bytes + 1); /* of the exact size: a sanitizer sees reads beyond */
        assert_non_null(at);
        kvt_codec_pack(&message, at);
        assert_int_equal(kvt_codec_decode_request(&back, at, message.bytes), 0);
        assert_null(api_compare_requests(&op, &back));
        kvt_arena_reset(&arenas[1]);
        assert_int_equal(kvt_codec_decode_pieces(
                             &back, pieces, cut(at, message.bytes, &random, pieces), &arenas[2]),
                         0);
        assert_null(api_compare_requests(&op, &back));
        for (size_t less = 1; less < 200 && less < message.bytes; less++) {
            kvt_arena_reset(&arenas[1]);
            (void)!kvt_codec_decode_request(&back, at, message.bytes - less);
        }
        free(at);
    }
}

static void test_answers(void **state)
{
    (void)state;
    for (uint64_t i = 0; i < 40u * KVT_OP_KINDS; i++) {
        struct kvt_op op = {.kind = (enum kvt_op_kind)(i % KVT_OP_KINDS), .arena = &arenas[0]};
        struct kvt_op back = {.kind = op.kind, .arena = &arenas[1]};
        struct kvt_codec_message message;
        uint8_t *at;

        if (!has_request(op.kind))
            continue;
        kvt_arena_reset(&arenas[0]);
        kvt_arena_reset(&arenas[1]);
        api_fill_request(&op, i, 0);
        api_fill_answer(&op, i + 1, 0);
        assert_int_equal(kvt_codec_encode_answer(&op, &message), 0);
        at = malloc(message.bytes + 1);
        assert_non_null(at);
        kvt_codec_pack(&message, at);
        memcpy(&back.req, &op.req, sizeof(op.req)); /* as a client has it */
        assert_int_equal(kvt_codec_decode_answer(&back, at, message.bytes), 0);
        assert_null(api_compare_answers(&op, &back));
        free(at);
    }
}

static void test_small_arena(void **state)
{
    struct kvt_op op = {.kind = KVT_OP_LOOKUP, .arena = &arenas[0]};
    static uint32_t tokens[100000];
    struct kvt_codec_message message;
    struct kvt_arena small;
    struct kvt_op back = {.kind = KVT_OP_LOOKUP, .arena = &small};
    struct kvt_codec_piece piece;
    uint8_t *at;

    (void)state;
    kvt_arena_reset(&arenas[0]);
    op.req.lookup.prefix.tokens = tokens;
    op.req.lookup.prefix.tokens_count = KVT_COUNT_OF(tokens);
    assert_int_equal(kvt_codec_encode_request(&op, &message), 0);
    at = malloc(message.bytes);
    assert_non_null(at);
    kvt_codec_pack(&message, at);
    assert_int_equal(kvt_arena_init(&small, 128 * KVT_KIB, 0), 0);
    assert_int_equal(kvt_codec_decode_request(&back, at, message.bytes), KVT_CODEC_E_BAD);
    assert_int_equal(back.code, KVT_CODE_RESOURCE_EXHAUSTED);
    piece = (struct kvt_codec_piece){at, message.bytes};
    kvt_arena_reset(&small);
    assert_int_equal(kvt_codec_decode_pieces(&back, &piece, 1, &arenas[2]), KVT_CODEC_E_BAD);
    assert_int_equal(back.code, KVT_CODE_RESOURCE_EXHAUSTED);
    kvt_arena_deinit(&small);
    free(at);
}

/* Zeros are "none" in the plain structs, so on the wire only an empty field may mean that: a
 * request must not be taken with a field that is gone when it is written again. */
static void test_zeros_name_nothing(void **state)
{
    static const struct {
        enum kvt_op_kind kind;
        uint8_t field, bytes;
        const char *says;
    } rows[] = {
        {KVT_OP_OPEN_NAMESPACE, 9, KVT_FINGERPRINT_BYTES, "fingerprint: zeros"},
        {KVT_OP_RELEASE, 1, 24, "session: a handle of zeros"},
        {KVT_OP_RELEASE, 2, 24, "lease: a handle of zeros"},
        {KVT_OP_RELEASE, 3, 24, "ticket: a handle of zeros"},
        {KVT_OP_EVICT, 1, 24, "namespace_handle: a handle of zeros"},
        {KVT_OP_EVICT, 2, KVT_FINGERPRINT_BYTES, "fingerprint: zeros"},
        {KVT_OP_RESET, 2, KVT_FINGERPRINT_BYTES, "fingerprint: zeros"},
        {KVT_OP_DUMP, 1, KVT_FINGERPRINT_BYTES, "fingerprint: zeros"},
    };

    (void)state;
    for (unsigned i = 0; i < KVT_COUNT_OF(rows); i++) {
        struct kvt_op op = {.kind = rows[i].kind, .arena = &arenas[0]};
        uint8_t at[2 + KVT_FINGERPRINT_BYTES] = {(uint8_t)(rows[i].field << 3 | 2), rows[i].bytes};

        kvt_arena_reset(&arenas[0]);
        assert_int_equal(kvt_codec_decode_request(&op, at, 2u + rows[i].bytes), KVT_CODEC_E_BAD);
        assert_int_equal(op.code, KVT_CODE_INVALID_ARGUMENT);
        assert_ptr_equal(strstr(op.message, rows[i].says), op.message);
    }
}

/* An OpenNamespace of one component of @kind that is quantised as @quant, there and back: the code,
 * and its message where it is refused. */
static int quant_there_and_back(uint32_t kind, const struct kvt_api_quant *quant,
                                struct kvt_op *back)
{
    struct kvt_op op = {.kind = KVT_OP_OPEN_NAMESPACE, .arena = &arenas[0]};
    struct kvt_req_open_namespace *req = &op.req.open_namespace;
    struct kvt_codec_message message;
    uint8_t at[256];

    kvt_arena_reset(&arenas[0]);
    kvt_arena_reset(&arenas[1]);
    *back = (struct kvt_op){.kind = KVT_OP_OPEN_NAMESPACE, .arena = &arenas[1]};
    req->block_tokens = 64;
    req->ranks = 1;
    req->components_count = 1;
    req->components[0] = (struct kvt_api_component){
        .kind = kind, .window_tokens = kind == 2, .bytes_per_block = 100, .quant = *quant};
    assert_int_equal(kvt_codec_encode_request(&op, &message), 0);
    assert_true(message.bytes <= sizeof(at));
    kvt_codec_pack(&message, at);
    return kvt_codec_decode_request(back, at, message.bytes);
}

static void test_quantisation_bounds(void **state)
{
    static const struct kvt_api_quant good = {2, 2, 2, 65536, 65536, 65536};
    static const char *const names[] = {"kind",         "elem",  "order",
                                        "plane_tokens", "heads", "head_dim"};
    static const uint32_t max[] = {2, 2, 2, 65536, 65536, 65536};
    struct kvt_op back;

    (void)state;
    for (uint32_t kind = 1; kind <= 2; kind++) {
        assert_int_equal(quant_there_and_back(kind, &good, &back), 0);
        assert_memory_equal(&back.req.open_namespace.components[0].quant, &good, sizeof(good));
    }
    assert_int_equal(quant_there_and_back(3, &good, &back), KVT_CODEC_E_BAD);
    assert_non_null(strstr(back.message, "recurrent states are not quantised"));
    for (uint32_t i = 0; i < KVT_COUNT_OF(names); i++) {
        for (uint32_t is_over = 0; is_over < 2; is_over++) {
            struct kvt_api_quant quant = good;
            uint32_t *const numbers[] = {&quant.kind,         &quant.elem,  &quant.order,
                                         &quant.plane_tokens, &quant.heads, &quant.head_dim};

            if (i == 0 && !is_over)
                continue; /* kind 0 is no quantisation: nothing is written of it */
            *numbers[i] = is_over ? max[i] + 1 : 0;
            assert_int_equal(quant_there_and_back(1, &quant, &back), KVT_CODEC_E_BAD);
            assert_int_equal(back.code, KVT_CODE_INVALID_ARGUMENT);
            assert_non_null(strstr(back.message, names[i]));
        }
    }
}

/* Appends a field of bytes: its tag, its length, then @bytes of it. */
static void put_field(uint8_t **at, uint8_t number, const void *bytes, uint8_t count)
{
    *(*at)++ = (uint8_t)(number << 3 | 2);
    *(*at)++ = count;
    memcpy(*at, bytes, count);
    *at += count;
}

/* An Attach with one region of cuda_ipc, its handle and uuid of so many bytes. */
static size_t cuda_attach(uint8_t *message, uint8_t handle_bytes, uint8_t uuid_bytes)
{
    static const uint8_t filler[80] = {1, 2, 3};
    uint8_t inner[120], region[124] = {1 << 3, 100}, *at = inner, *region_at = region + 2;
    uint8_t *message_at = message;

    put_field(&at, 1, filler, handle_bytes);
    put_field(&at, 3, filler, uuid_bytes);
    put_field(&region_at, 4, inner, (uint8_t)(at - inner));
    put_field(&message_at, 2, filler, KVT_ENGINE_ID_BYTES);
    put_field(&message_at, 7, region, (uint8_t)(region_at - region));
    return (size_t)(message_at - message);
}

static void test_cuda_region_bounds(void **state)
{
    static const struct {
        uint8_t handle_bytes, uuid_bytes;
        const char *says;
    } rows[] = {{64, 16, NULL},
                {63, 16, "regions.cuda_ipc.handle"},
                {65, 16, "regions.cuda_ipc.handle"},
                {0, 16, "regions.cuda_ipc.handle"},
                {64, 15, "regions.cuda_ipc.device_uuid"},
                {64, 0, "regions.cuda_ipc.device_uuid"}};
    struct kvt_op op = {.kind = KVT_OP_ATTACH, .arena = &arenas[0]};
    struct kvt_codec_message message;
    uint8_t at[256];

    (void)state;
    for (unsigned i = 0; i < KVT_COUNT_OF(rows); i++) {
        size_t bytes = cuda_attach(at, rows[i].handle_bytes, rows[i].uuid_bytes);
        struct kvt_op back = {.kind = KVT_OP_ATTACH, .arena = &arenas[1]};

        kvt_arena_reset(&arenas[1]);
        assert_int_equal(kvt_codec_decode_request(&back, at, bytes),
                         rows[i].says == NULL ? 0 : KVT_CODEC_E_BAD);
        if (rows[i].says == NULL)
            assert_int_equal(back.req.attach.regions[0].kind, KVT_REGION_CUDA_IPC);
        else
            assert_ptr_equal(strstr(back.message, rows[i].says), back.message);
    }
    /* A region that ends beyond what a region may be. */
    for (uint64_t beyond = 0; beyond < 2; beyond++) {
        struct kvt_op back = {.kind = KVT_OP_ATTACH, .arena = &arenas[1]};

        kvt_arena_reset(&arenas[0]);
        kvt_arena_reset(&arenas[1]);
        op.req.attach.regions_count = 1;
        op.req.attach.regions[0].kind = KVT_REGION_CUDA_IPC;
        op.req.attach.regions[0].bytes = 4096;
        op.req.attach.regions[0].cuda_ipc.offset_bytes = (1ull << 46) - 4096 + beyond;
        assert_int_equal(kvt_codec_encode_request(&op, &message), 0);
        assert_true(message.bytes <= sizeof(at));
        kvt_codec_pack(&message, at);
        assert_int_equal(kvt_codec_decode_request(&back, at, message.bytes),
                         beyond == 0 ? 0 : KVT_CODEC_E_BAD);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_requests),
        cmocka_unit_test(test_answers),
        cmocka_unit_test(test_small_arena),
        cmocka_unit_test(test_zeros_name_nothing),
        cmocka_unit_test(test_quantisation_bounds),
        cmocka_unit_test(test_cuda_region_bounds),
    };
    int failed;

    for (unsigned i = 0; i < 3; i++)
        if (kvt_arena_init(&arenas[i], 128 * KVT_MIB, KVT_MIB) != 0)
            return 1;
    failed = cmocka_run_group_tests(tests, NULL, NULL);
    for (unsigned i = 0; i < 3; i++)
        kvt_arena_deinit(&arenas[i]);
    return failed;
}
