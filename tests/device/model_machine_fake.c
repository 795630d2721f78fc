/* The model's machine is the fake. */
#include "tests/device/model_machine.h"

const char *world_machine_missing(int device)
{
    return device == 0 ? NULL : "the fake has GPU 0 for the model";
}

void world_machine_open(struct world *world)
{
    const struct world_options *options = &world->options;
    struct kvt_fake_cuda_config fake = {.seed = options->seed,
                                        .devices_count = WORLD_DEVICES_MAX,
                                        .kernels = options->kernels != NULL ? options->kernels
                                                                            : kvt_kernels_host(),
                                        .is_landing_late = options->is_landing_late,
                                        .has_executor = options->is_threaded};

    for (uint32_t i = 0; i < WORLD_DEVICES_MAX; i++) {
        fake.devices[i].bytes = 32 * KVT_MIB;
        world->devices[i] = (int)i;
    }
    kvt_fake_cuda_init(&fake);
    world->devices_count = WORLD_DEVICES_MAX;
    world->calls = kvt_cuda_calls();
}

void world_machine_close(void)
{
    kvt_fake_cuda_deinit();
}

void world_machine_plan(enum kvt_fake_cuda_call call, uint64_t nth, int error)
{
    kvt_fake_cuda_fail(call, nth, error);
}

bool world_machine_has_failed(void)
{
    return kvt_fake_cuda_has_failed();
}

void world_machine_pause_plan(bool is_paused)
{
    kvt_fake_cuda_pause_fail(is_paused);
}

void world_machine_lose(int error)
{
    kvt_fake_cuda_lose(0, error);
}

void world_machine_pool_new(struct world_client *client)
{
    kvt_fake_cuda_foreign_new(&client->foreign, client->device, client->bytes);
    client->memory = client->foreign.memory;
}

uint8_t *world_machine_memory(uint64_t address, uint64_t bytes)
{
    return kvt_fake_cuda_memory(address, bytes);
}
