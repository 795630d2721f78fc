/* Writes the seeds of fuzz_attach: sessions drawn by chance, in the host's memory and on GPUs.
 * make-attach-corpus DIRECTORY */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#define SEEDS 24u
#define SEED_BYTES 360u

/* What attach_scene.c takes first: where a session's memory is, when a GPU is lost, how many
 * regions, components and blocks there are; then four bytes a region. */
#define AT_WHERE 0u
#define AT_LOSS 1u
#define AT_REGION 5u
#define AT_REGION_GPU 8u

static uint64_t random_state = 88172645463325252ull;

/* Three of four are honest: see scene_wild. */
static void draw(uint8_t bytes[SEED_BYTES], uint32_t number)
{
    for (uint32_t at = 0; at < SEED_BYTES; at++) {
        random_state ^= random_state << 13;
        random_state ^= random_state >> 7;
        random_state ^= random_state << 17;
        bytes[at] = (uint8_t)(random_state >> 32);
        if (number % 4 != 3 && bytes[at] >= 0xe8)
            bytes[at] &= 0x7f;
    }
}

static void write_seed(const char *directory, const char *name, const uint8_t bytes[SEED_BYTES])
{
    char path[4096];
    FILE *file;

    (void)snprintf(path, sizeof(path), "%s/%s", directory, name);
    file = fopen(path, "wb");
    if (file == NULL || fwrite(bytes, 1, SEED_BYTES, file) != SEED_BYTES || fclose(file) != 0) {
        perror(path);
        exit(1);
    }
}

/* Memory on a GPU, alike but for what the bytes at the front say. */
static void write_gpu_seeds(const char *directory)
{
    static const struct {
        const char *name;
        uint8_t where, loss, gpu;
    } rows[] = {
        {"gpu-here", 0x81, 1, 0x00},          {"gpu-second", 0x8a, 1, 0x00},
        {"gpu-here-again", 0x91, 1, 0x00},    {"gpu-missing", 0x80, 1, 0x00},
        {"gpu-missing-again", 0x88, 1, 0x00}, {"gpu-other-uuid", 0x81, 1, 0xf9},
        {"gpu-two", 0x81, 1, 0xe9},           {"gpu-outside", 0x81, 1, 0xe1},
        {"gpu-lost-before", 0x81, 2, 0x00},   {"gpu-lost-while-opening", 0x81, 4, 0x00},
        {"gpu-lost-attached", 0x81, 6, 0x00}, {"gpu-lost-demoting", 0x81, 8, 0x00},
        {"gpu-lost-demoted", 0x81, 10, 0x00}, {"gpu-lost-promoting", 0x81, 12, 0x00},
        {"gpu-other-lost", 0x81, 26, 0x00},
    };

    for (uint32_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        uint8_t bytes[SEED_BYTES];

        draw(bytes, 0);
        bytes[AT_WHERE] = rows[i].where;
        bytes[AT_LOSS] = rows[i].loss;
        bytes[AT_REGION] = 0x40;
        bytes[AT_REGION_GPU] = rows[i].gpu;
        write_seed(directory, rows[i].name, bytes);
    }
}

int main(int argc, char **argv)
{
    if (argc != 2)
        return 2;
    for (uint32_t i = 0; i < SEEDS; i++) {
        uint8_t bytes[SEED_BYTES];
        char name[32];

        draw(bytes, i);
        bytes[AT_WHERE] &= 0x7f;
        (void)snprintf(name, sizeof(name), "session-%02u", i);
        write_seed(argv[1], name, bytes);
    }
    write_gpu_seeds(argv[1]);
    return 0;
}
