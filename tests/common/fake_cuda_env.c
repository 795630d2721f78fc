/* For a program that does not know of the fake: it is set up before main from the environment
 * (KVT_FAKE_CUDA, words as kvt_fake_cuda_parse; none: one GPU of 256 MiB), and when the program
 * ends in order nothing may be left open. */
#include <stdio.h>
#include <stdlib.h>

#include "tests/common/fake_cuda.h"

static bool is_reset_broken;

__attribute__((constructor)) static void set_up(void)
{
    const char *text = getenv("KVT_FAKE_CUDA");
    struct kvt_fake_cuda_config config;

    if (!kvt_fake_cuda_parse(text == NULL ? "" : text, &config, &is_reset_broken)) {
        fprintf(stderr, "KVT_FAKE_CUDA is not understood: %s\n", text);
        _Exit(2);
    }
    config.kernels = kvt_kernels_host();
    kvt_fake_cuda_init(&config);
    for (uint32_t i = 0; is_reset_broken && i < config.devices_count; i++)
        kvt_fake_cuda_set_reset_works(i, false);
}

/* What is left of a context that is lost goes with the process. */
__attribute__((destructor)) static void look_back(void)
{
    bool is_lost = false;

    for (uint32_t i = 0; i < KVT_FAKE_CUDA_DEVICES_MAX; i++)
        is_lost = is_lost || kvt_fake_cuda_is_lost(i);
    if (!is_lost)
        kvt_fake_cuda_deinit();
}
