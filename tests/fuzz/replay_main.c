/* Runs a fuzz target over the files of directories, and over broken variants of each: the corpus is
 * a test where there is no libFuzzer. replay DIRECTORY... */
#include <dirent.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define INPUT_BYTES_MAX (64u << 10)
#define VARIANTS 300u

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static unsigned replay_file(const char *path)
{
    static uint8_t input[INPUT_BYTES_MAX], variant[INPUT_BYTES_MAX];
    FILE *file = fopen(path, "rb");
    unsigned seed = 1;
    size_t bytes;

    if (file == NULL)
        return 0;
    bytes = fread(input, 1, sizeof(input), file);
    (void)fclose(file);
    (void)LLVMFuzzerTestOneInput(input, bytes);
    for (unsigned i = 0; bytes > 0 && i < VARIANTS; i++) {
        size_t cut = i % 3 == 0 ? (size_t)rand_r(&seed) % bytes + 1 : bytes;

        memcpy(variant, input, bytes);
        for (unsigned k = 0; k <= i % 4; k++)
            variant[(size_t)rand_r(&seed) % bytes] = (uint8_t)rand_r(&seed);
        (void)LLVMFuzzerTestOneInput(variant, cut);
    }
    return 1;
}

int main(int argc, char **argv)
{
    unsigned files = 0;

    for (int i = 1; i < argc; i++) {
        DIR *dir = opendir(argv[i]);
        struct dirent *entry;
        char path[4096];

        while (dir != NULL && (entry = readdir(dir)) != NULL) {
            if (entry->d_name[0] == '.')
                continue;
            (void)snprintf(path, sizeof(path), "%s/%s", argv[i], entry->d_name);
            files += replay_file(path);
        }
        if (dir != NULL)
            (void)closedir(dir);
    }
    printf("%u files, %u variants each\n", files, VARIANTS);
    return files == 0;
}
