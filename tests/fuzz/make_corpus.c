/* Writes the seeds of the fuzzers: valid requests and answers with random values, as the codec
 * packs them, those under 4 KiB. make-corpus DIRECTORY */
#include <stdio.h>
#include <stdlib.h>

#include "proto/codec/codec.h"
#include "tests/common/api_walk.h"

#define SEED_BYTES_MAX 4096u

static void write_seed(const char *directory, unsigned path, unsigned number,
                       const struct kvt_codec_message *message)
{
    uint8_t at[SEED_BYTES_MAX];
    char name[4096];
    FILE *file;

    if (message->bytes >= sizeof(at))
        return;
    at[0] = (uint8_t)path;
    kvt_codec_pack(message, at + 1);
    (void)snprintf(name, sizeof(name), "%s/%02u-%u", directory, path, number);
    file = fopen(name, "wb");
    if (file == NULL || fwrite(at, 1, message->bytes + 1, file) != message->bytes + 1 ||
        fclose(file) != 0) {
        perror(name);
        exit(1);
    }
}

int main(int argc, char **argv)
{
    struct kvt_arena arena;

    if (argc != 2 || kvt_arena_init(&arena, 64 * KVT_MIB, KVT_MIB) != 0)
        return 2;
    for (unsigned i = 0; i < KVT_OP_KINDS * 3; i++) {
        struct kvt_op op = {.kind = (enum kvt_op_kind)(i % KVT_OP_KINDS), .arena = &arena};
        struct kvt_codec_message message;

        if (op.kind == KVT_OP_DETACH || op.kind == KVT_OP_HEALTH)
            continue;
        kvt_arena_reset(&arena);
        api_fill_request(&op, 100 + i, 0);
        api_fill_answer(&op, 200 + i, 0);
        if (kvt_codec_encode_request(&op, &message) == 0)
            write_seed(argv[1], op.kind, i / KVT_OP_KINDS, &message);
        if (kvt_codec_encode_answer(&op, &message) == 0)
            write_seed(argv[1], op.kind + KVT_OP_KINDS, i / KVT_OP_KINDS, &message);
    }
    kvt_arena_deinit(&arena);
    return 0;
}
