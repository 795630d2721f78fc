/* kvtier-gpu-check on the fake, whose kernels are the source of the GPU's on this thread.
 * KVT_FAKE_CUDA says what machine it is; the device tier's threads need the executor. With
 * KVT_FAKE_CUDA_FLIP=n one bit of the n-th movement of bytes is wrong. With KVT_EXPECT_STATUS=n the
 * test is that the program ends with that status: it has to see the wrong bit, and to say that
 * there is no GPU. With
 * KVT_LOSE_AT_KILL the death of the other process costs this one its context. */
#include <stdio.h>
#include <stdlib.h>

#include "kernels/shim_tables.h"
#include "tests/common/fake_cuda.h"
#include "tools/kvtier-gpu-check/gpu_check.h"

static int lose(struct gpu_check *check)
{
    kvt_fake_cuda_lose((uint32_t)check->options.device, KVT_CUDA_ILLEGAL_ADDRESS);
    return KVT_CUDA_ILLEGAL_ADDRESS;
}

static void killed(struct gpu_check *check)
{
    kvt_fake_cuda_lose((uint32_t)check->options.device, KVT_CUDA_ILLEGAL_ADDRESS);
}

int main(int argc, char **argv)
{
    const char *machine = getenv("KVT_FAKE_CUDA"), *flip = getenv("KVT_FAKE_CUDA_FLIP");
    const char *expected = getenv("KVT_EXPECT_STATUS");
    struct gpu_check_hooks hooks = {.lose = lose};
    struct kvt_fake_cuda_config config = {.devices_count = 1};
    bool is_reset_broken = false;
    int status, wanted = expected == NULL ? 0 : (int)strtol(expected, NULL, 10);

    if (machine != NULL && !kvt_fake_cuda_parse(machine, &config, &is_reset_broken)) {
        fprintf(stderr, "KVT_FAKE_CUDA=%s: not known\n", machine);
        return 2;
    }
    config.has_executor = config.may_gather_none = true;
    config.kernels = kvt_kernels_shim(KVT_SHIM_PLAIN);
    kvt_fake_cuda_init(&config);
    if (flip != NULL)
        kvt_fake_cuda_flip(strtoull(flip, NULL, 10));
    if (getenv("KVT_LOSE_AT_KILL") != NULL)
        hooks.killed = killed;
    status = gpu_check_main(argc, argv, hooks);
    kvt_fake_cuda_deinit(); /* nothing is left open */
    if (status == wanted)
        return 0;
    fprintf(stderr, "status %d, not %d\n", status, wanted);
    return 1;
}
