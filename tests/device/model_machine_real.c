/* The model's machine are the GPUs that there are: the one that is asked for, and one of the others
 * for pools on another GPU, if there is another. */
#include "tests/device/model_machine.h"

#include <stdio.h>
#include <stdlib.h>

const char *world_machine_missing(int device)
{
    const struct kvt_cuda_calls *calls = kvt_cuda_calls();
    int count = 0, error;

    if (calls == NULL || calls->kernels == NULL)
        return "this build has no CUDA";
    error = calls->device_count(&count);
    if (error == KVT_CUDA_OK && device >= count)
        return "there are not so many";
    if (error == KVT_CUDA_OK)
        error = calls->set_device(device);
    return error == KVT_CUDA_OK ? NULL : calls->error_name(error);
}

void world_machine_open(struct world *world)
{
    int count = 0;

    world->calls = kvt_cuda_calls();
    if (world->calls->device_count(&count) != KVT_CUDA_OK)
        count = 1;
    world->devices[0] = world->options.device;
    world->devices[1] = (world->options.device + 1) % KVT_MAX(count, 1);
    world->devices_count = count > 1 ? 2 : 1;
}

void world_machine_close(void)
{
}

/* Of what only the fake can do nothing is asked of GPUs. */
__attribute__((noreturn)) static void only_fake(const char *what)
{
    fprintf(stderr, "FAILED: only the fake can be asked for %s\n", what);
    exit(1);
}

void world_machine_plan(enum kvt_fake_cuda_call call, uint64_t nth, int error)
{
    (void)call;
    (void)error;
    if (nth != 0)
        only_fake("a call that fails");
}

bool world_machine_has_failed(void)
{
    return false;
}

void world_machine_pause_plan(bool is_paused)
{
    (void)is_paused;
}

void world_machine_lose(int error)
{
    (void)error;
    only_fake("a loss");
}

void world_machine_pool_new(struct world_client *client)
{
    (void)client;
    only_fake("memory of another process");
}

uint8_t *world_machine_memory(uint64_t address, uint64_t bytes)
{
    (void)address;
    (void)bytes;
    only_fake("a look into device memory");
}
