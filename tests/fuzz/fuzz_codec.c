/* Every decode path of proto/codec with arbitrary bytes: the first byte chooses the path, the rest
 * is the message. What a request decoder accepts must encode and decode to the same struct again.
 *
 * With libFuzzer (-Dfuzzers=true, clang) this is a fuzzer; else replay_main.c runs it over files.
 */
#include <stdlib.h>
#include <string.h>

#include "proto/codec/codec.h"
#include "tests/common/api_walk.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static struct kvt_arena arenas[2], scratch;
static uint8_t packed[2 * KVT_MESSAGE_BYTES_MAX];

static void round_trip(const struct kvt_op *op, enum kvt_op_kind kind)
{
    struct kvt_op first = {.kind = kind, .arena = op->arena};
    struct kvt_op second = {.kind = kind, .arena = &arenas[1]};
    struct kvt_codec_message message;

    memcpy(&first.req, &op->req, sizeof(op->req));
    if (kvt_codec_encode_request(&first, &message) != 0 || message.bytes > sizeof(packed))
        return;
    kvt_codec_pack(&message, packed);
    if (kvt_codec_decode_request(&second, packed, message.bytes) != 0)
        abort();
    if (api_compare_requests(&first, &second) != NULL)
        abort();
}

/* In pieces it must mean the same as in one. */
static void in_pieces(enum kvt_op_kind kind, const uint8_t *data, size_t size)
{
    struct kvt_op whole = {.kind = kind, .arena = &arenas[0]};
    struct kvt_op split = {.kind = kind, .arena = &arenas[1]};
    struct kvt_codec_piece pieces[3];
    size_t first = size / 3 + size % 3, second = size / 3;
    int r_whole, r_split;

    pieces[0] = (struct kvt_codec_piece){data, first};
    pieces[1] = (struct kvt_codec_piece){data + first, second};
    pieces[2] = (struct kvt_codec_piece){data + first + second, size - first - second};
    r_whole = kvt_codec_decode_request(&whole, data, size);
    r_split = kvt_codec_decode_pieces(&split, pieces, 3, &scratch);
    /* The arenas differ in size: "no memory" may differ. */
    if ((r_whole == 0) != (r_split == 0) && whole.code != KVT_CODE_RESOURCE_EXHAUSTED)
        abort();
    if (r_whole == 0 && r_split == 0 && api_compare_requests(&whole, &split) != NULL)
        abort();
    kvt_arena_reset(&arenas[0]);
    kvt_arena_reset(&arenas[1]);
}

static void small_messages(const uint8_t *data, size_t size)
{
    struct kvt_notice notice;
    enum kvt_health_status status;
    char name[KVT_CODEC_HEALTH_NAME_BYTES];

    (void)!kvt_codec_read_notice(data, size, &notice);
    (void)!kvt_codec_read_health_answer(data, size, &status);
    if (kvt_codec_read_health_request(data, size, name) == 0 && strlen(name) > 255)
        abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct kvt_op op = {0};
    struct kvt_api_progress progress;
    bool is_result;
    unsigned path;

    /* They keep what they touched: an input costs no page faults. */
    if (arenas[0].base == NULL && (kvt_arena_init(&arenas[0], 4 * KVT_MIB, 4 * KVT_MIB) != 0 ||
                                   kvt_arena_init(&arenas[1], 64 * KVT_MIB, 64 * KVT_MIB) != 0 ||
                                   kvt_arena_init(&scratch, 16 * KVT_MIB, 16 * KVT_MIB) != 0))
        abort();
    if (size == 0)
        return 0;
    kvt_arena_reset(&arenas[0]);
    kvt_arena_reset(&arenas[1]);
    path = data[0] % (2 * KVT_OP_KINDS + 1);
    op.kind = (enum kvt_op_kind)(path % KVT_OP_KINDS);
    op.arena = &arenas[0];
    data++;
    size--;
    if (path == 2 * KVT_OP_KINDS || op.kind == KVT_OP_DETACH || op.kind == KVT_OP_HEALTH) {
        small_messages(data, size);
    } else if (path < KVT_OP_KINDS) {
        in_pieces(op.kind, data, size);
        if (kvt_codec_decode_request(&op, data, size) == 0)
            round_trip(&op, op.kind);
        else if (op.code == KVT_CODE_OK || op.message[0] == '\0')
            abort();
    } else if (op.kind == KVT_OP_PROMOTE) {
        (void)!kvt_codec_decode_promote_event(&op, data, size, &is_result, &progress);
    } else {
        (void)!kvt_codec_decode_answer(&op, data, size);
    }
    return 0;
}
