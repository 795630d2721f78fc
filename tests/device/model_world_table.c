/* Device memory where nobody can look into it: the model's world reads and writes it by copies of
 * the table, between it and pinned mirrors, on streams of the test's own. Nothing of the tier's
 * waits for those streams and they wait for nothing of the tier's: what the test may touch it was
 * given back by a transfer that ended, so what the test sees is what an engine would.
 *
 *   slot of the arena -> table.mirror -> compared with the shadow
 *   pool of a client  -> client.memory, at the same offset -> compared with the shadow
 *
 * Elsewhere these do nothing: memory is seen as it is. */
#include <sched.h>
#include <string.h>

#include "daemon/base/clock.h"
#include "tests/device/model_world_internal.h"

#define WAIT_NS_MAX (30 * KVT_NS_PER_S)
#define ASKED_BEFORE_YIELD 256u
#define POOL_BYTE 0xdb /* what is in a pool that nobody has written */

static void check_call(const struct world *world, int error, const char *what)
{
    if (error != KVT_CUDA_OK)
        world_fail(world, "%s of the test: CUDA's %d, %s", what, error,
                   world->calls->error_name(error));
}

static void set_current(const struct world *world, uint32_t device)
{
    check_call(world, world->calls->set_device(world->devices[device]), "set_device");
}

void world_table_open(struct world *world)
{
    void *mirror;

    if (!world->options.is_by_table)
        return;
    for (uint32_t d = world->devices_count; d-- > 0;) { /* GPU 0 stays the current one */
        set_current(world, d);
        check_call(world, world->calls->stream_new(&world->table.streams[d]), "stream_new");
        check_call(world, world->calls->event_new(&world->table.events[d]), "event_new");
    }
    check_call(world, world->calls->alloc_pinned(WORLD_SLOT_BYTES, &mirror), "alloc_pinned");
    world->table.mirror = mirror;
}

void world_table_close(struct world *world)
{
    if (!world->options.is_by_table)
        return;
    check_call(world, world->calls->free_pinned(world->table.mirror), "free_pinned");
    for (uint32_t d = world->devices_count; d-- > 0;) {
        set_current(world, d);
        check_call(world, world->calls->event_free(world->table.events[d]), "event_free");
        check_call(world, world->calls->stream_free(world->table.streams[d]), "stream_free");
    }
}

void world_table_push(const struct world *world, uint32_t device, uint64_t address,
                      const uint8_t *mirror, uint64_t bytes)
{
    if (!world->options.is_by_table || device == KVT_GPU_NONE)
        return;
    set_current(world, device);
    check_call(world,
               world->calls->copy(address, (uintptr_t)mirror, bytes, KVT_CUDA_H2D,
                                  world->table.streams[device]),
               "a copy to the GPU");
}

void world_table_fetch(const struct world *world, uint32_t device, uint64_t address,
                       uint8_t *mirror, uint64_t bytes)
{
    if (!world->options.is_by_table || device == KVT_GPU_NONE)
        return;
    set_current(world, device);
    check_call(world,
               world->calls->copy((uintptr_t)mirror, address, bytes, KVT_CUDA_D2H,
                                  world->table.streams[device]),
               "a copy from the GPU");
}

void world_table_wait(const struct world *world, uint32_t device)
{
    uint64_t until_ns = kvt_clock_mono_ns() + WAIT_NS_MAX;
    uint32_t asked = 0;
    int error;

    if (!world->options.is_by_table || device == KVT_GPU_NONE)
        return;
    set_current(world, device);
    check_call(
        world,
        world->calls->event_record(world->table.events[device], world->table.streams[device]),
        "event_record");
    while ((error = world->calls->event_query(world->table.events[device])) == KVT_CUDA_NOT_READY) {
        if (kvt_clock_mono_ns() > until_ns)
            world_fail(world, "a copy of the test does not end");
        /* The time of the fake goes on by questions, not by waiting. */
        if (++asked % ASKED_BEFORE_YIELD == 0)
            (void)sched_yield();
    }
    check_call(world, error, "what the test queued");
    set_current(world, 0);
}

void world_table_pool_new(struct world *world, struct world_client *client)
{
    void *mirror;

    set_current(world, client->device);
    check_call(world, world->calls->alloc(client->bytes, &client->address), "alloc");
    check_call(world, world->calls->alloc_pinned(client->bytes, &mirror), "alloc_pinned");
    client->memory = mirror;
    memset(client->memory, POOL_BYTE, client->bytes);
    world_table_push(world, client->device, client->address, client->memory, client->bytes);
    world_table_wait(world, client->device);
}

void world_table_attach(struct world *world, struct world_client *client)
{
    struct kvt_region region = {.base = (uint8_t *)(uintptr_t)client->address,
                                .bytes = client->bytes,
                                .is_gpu = true,
                                .gpu_zone = client->device};

    if (client->device != KVT_GPU_NONE &&
        kvt_layout_resolve(&client->layout, &region, 1, client->layout.payload_bytes) != 0)
        world_fail(world, "a layout of the client on GPU %u", client->device);
}

void world_table_pool_free(struct world *world, struct world_client *client)
{
    set_current(world, client->device);
    check_call(world, world->calls->free(client->address), "free");
    check_call(world, world->calls->free_pinned(client->memory), "free_pinned");
    set_current(world, 0);
}
