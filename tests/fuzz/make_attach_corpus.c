/* Writes the seeds of fuzz_attach: sessions drawn by chance. make-attach-corpus DIRECTORY */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#define SEEDS 24u
#define SEED_BYTES 360u

int main(int argc, char **argv)
{
    uint64_t state = 88172645463325252ull;

    if (argc != 2)
        return 2;
    for (uint32_t i = 0; i < SEEDS; i++) {
        uint8_t bytes[SEED_BYTES];
        char name[4096];
        FILE *file;

        for (uint32_t at = 0; at < SEED_BYTES; at++) {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            bytes[at] = (uint8_t)(state >> 32);
            /* Three of four are honest: see scene_wild. */
            if (i % 4 != 3 && bytes[at] >= 0xe8)
                bytes[at] &= 0x7f;
        }
        (void)snprintf(name, sizeof(name), "%s/session-%02u", argv[1], i);
        file = fopen(name, "wb");
        if (file == NULL || fwrite(bytes, 1, SEED_BYTES, file) != SEED_BYTES || fclose(file) != 0) {
            perror(name);
            return 1;
        }
    }
    return 0;
}
