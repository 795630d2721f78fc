/* Writes the seeds of fuzz_wire: two small frames of each kind. make-wire-corpus DIRECTORY */
#include <stdio.h>
#include <stdlib.h>

#include "tests/common/wire_make.h"

#define SEEDS 2u
#define SEED_BYTES_MAX 4096u

int main(int argc, char **argv)
{
    static _Alignas(8) uint8_t frame[KVT_WIRE_BYTES_MAX];
    static struct kvt_wire_message message;

    if (argc != 2)
        return 2;
    for (uint32_t i = 0; i < WIRE_MAKE_KINDS * SEEDS; i++) {
        char name[4096];
        FILE *file;
        size_t bytes;

        wire_make(&message, i % WIRE_MAKE_KINDS, i);
        bytes = kvt_wire_encode(frame, &message);
        if (bytes > SEED_BYTES_MAX)
            continue;
        kvt_wire_seal(frame);
        (void)snprintf(name, sizeof(name), "%s/%02u-%u", argv[1], i % WIRE_MAKE_KINDS,
                       i / WIRE_MAKE_KINDS);
        file = fopen(name, "wb");
        if (file == NULL || fwrite(frame, 1, bytes, file) != bytes || fclose(file) != 0) {
            perror(name);
            return 1;
        }
    }
    return 0;
}
