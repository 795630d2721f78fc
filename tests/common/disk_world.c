#include "tests/common/disk_world.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "daemon/base/clock.h"
#include "daemon/base/hash.h"
#include "tests/common/cmocka.h"
#include "tiers/disk/file.h"
#include "tiers/disk/loop.h"

struct disk_world *disk_world_new(uint32_t devices_count, uint32_t slots, uint64_t payload_bytes)
{
    struct disk_world *world = calloc(1, sizeof(*world));

    assert_non_null(world);
    world->devices_count = devices_count;
    world->slots = slots;
    world->payload_bytes = payload_bytes;
    world->slot_bytes = kvt_slot_bytes(DISK_WORLD_BLOCK_TOKENS, payload_bytes);
    world->memory_bytes = 2ull * devices_count * slots * world->slot_bytes;
    world->memory =
        mmap(NULL, world->memory_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_ptr_not_equal(world->memory, MAP_FAILED);
    assert_int_equal(kvt_doorbell_init(&world->bell), 0);
    snprintf(world->dir, sizeof(world->dir), "kvt-disk-XXXXXX");
    assert_non_null(mkdtemp(world->dir));
    world->config.devices_count = devices_count;
    for (uint32_t i = 0; i < devices_count; i++) {
        disk_shim_init(&world->shims[i]);
        snprintf(world->paths[i], sizeof(world->paths[i]), "%s/l3-%u", world->dir, i);
        world->config.devices[i] = (struct kvt_disk_config){
            .path = world->paths[i],
            .bytes = KVT_DISK_DATA_OFFSET_BYTES + slots * world->slot_bytes,
            .host_memory = world->memory,
            .host_memory_bytes = world->memory_bytes,
            .inflight_max = DISK_WORLD_XFERS / devices_count,
            .failures_max = 1000000,
            .retry_ns_min = 20 * KVT_NS_PER_MS,
            .retry_ns_max = 80 * KVT_NS_PER_MS,
            .io = &world->shims[i].io,
            .doorbell = &world->bell,
        };
    }
    return world;
}

void disk_world_free(struct disk_world *world)
{
    char lock[128];

    world->tier = kvt_tier_close(world->tier);
    kvt_doorbell_deinit(&world->bell);
    for (uint32_t i = 0; i < world->devices_count; i++) {
        snprintf(lock, sizeof(lock), "%s.lock", world->paths[i]);
        (void)unlink(lock);
        (void)unlink(world->paths[i]);
    }
    assert_int_equal(rmdir(world->dir), 0);
    assert_int_equal(munmap(world->memory, world->memory_bytes), 0);
    free(world);
}

void disk_world_open(struct disk_world *world)
{
    assert_int_equal(kvt_disk_set_open(&world->tier, &world->config, &world->report), 0);
}

void disk_world_open_device(struct disk_world *world)
{
    struct kvt_disk_report report;

    assert_int_equal(kvt_disk_open(&world->tier, &world->config.devices[0], &report), 0);
}

static uint8_t byte_of(uint64_t generation, uint64_t i)
{
    return (uint8_t)(generation * 17 + i * 5 + i / 250);
}

static struct kvt_slot_key key_of(const struct disk_world *world, uint64_t generation)
{
    return (struct kvt_slot_key){.block_id = generation * 3,
                                 .generation = generation,
                                 .payload_bytes = world->payload_bytes,
                                 .block_tokens = DISK_WORLD_BLOCK_TOKENS};
}

void disk_world_fill(struct disk_world *world, uint32_t slot, uint64_t generation)
{
    uint32_t header_bytes = kvt_slot_header_bytes(DISK_WORLD_BLOCK_TOKENS);
    uint32_t tokens[DISK_WORLD_BLOCK_TOKENS] = {(uint32_t)generation};
    uint8_t *at = world->memory + slot * world->slot_bytes;
    struct kvt_slot_info info = {.block_id = generation * 3,
                                 .generation = generation,
                                 .payload_bytes = world->payload_bytes,
                                 .block_tokens = DISK_WORLD_BLOCK_TOKENS};

    kvt_slot_header_write(at, &info, tokens);
    for (uint64_t i = 0; i < world->payload_bytes; i++)
        at[header_bytes + i] = byte_of(generation, i);
    kvt_slot_header_seal(at, kvt_hash64(at + header_bytes, world->payload_bytes, 0));
}

bool disk_world_is_filled(struct disk_world *world, uint32_t slot, uint64_t generation)
{
    const uint8_t *at = world->memory + slot * world->slot_bytes;
    struct kvt_slot_key key = key_of(world, generation);

    if (kvt_slot_check(at, &key) != KVT_SLOT_OK)
        return false;
    at += kvt_slot_header_bytes(DISK_WORLD_BLOCK_TOKENS);
    for (uint64_t i = 0; i < world->payload_bytes; i++)
        if (at[i] != byte_of(generation, i))
            return false;
    return true;
}

struct kvt_xfer *disk_world_xfer(struct disk_world *world, uint32_t idx, bool is_read,
                                 uint32_t memory_slot, uint64_t offset_bytes, uint64_t generation)
{
    struct kvt_place host = {.kind = KVT_PLACE_HOST,
                             .offset_bytes = memory_slot * world->slot_bytes};
    struct kvt_place disk = {.kind = KVT_PLACE_DISK, .offset_bytes = offset_bytes};

    assert_true(idx < DISK_WORLD_XFERS);
    world->xfers[idx] =
        (struct kvt_xfer){.src = is_read ? disk : host,
                          .dst = is_read ? host : disk,
                          .key = key_of(world, generation),
                          .header_bytes = kvt_slot_header_bytes(DISK_WORLD_BLOCK_TOKENS),
                          .slot_bytes = world->slot_bytes,
                          .deadline_ns = KVT_TIME_NEVER_NS,
                          .status = DISK_WORLD_STATUS_NONE};
    return &world->xfers[idx];
}

uint64_t disk_world_offset(const struct disk_world *world, uint32_t device, uint32_t slot)
{
    uint64_t base = world->tier->zones_count == 0 ? 0 : world->tier->zones[device].base_bytes;

    return base + slot * world->slot_bytes;
}

struct kvt_xfer *disk_world_flush(struct disk_world *world, uint32_t idx)
{
    world->xfers[idx] = (struct kvt_xfer){.flags = KVT_XFER_FLUSH,
                                          .deadline_ns = KVT_TIME_NEVER_NS,
                                          .status = DISK_WORLD_STATUS_NONE};
    return &world->xfers[idx];
}

void disk_world_submit(struct disk_world *world, uint32_t first, uint32_t count)
{
    struct kvt_xfer *list[DISK_WORLD_XFERS];
    uint32_t taken = 0;

    for (uint32_t i = 0; i < count; i++)
        list[i] = &world->xfers[first + i];
    assert_int_equal(kvt_tier_submit(world->tier, list, count, &taken), 0);
    assert_int_equal(taken, count);
}

static uint32_t reap_some(struct disk_world *world)
{
    struct kvt_xfer *done[DISK_WORLD_XFERS];
    uint32_t got = kvt_tier_reap(world->tier, done, DISK_WORLD_XFERS);

    for (uint32_t i = 0; i < got; i++) {
        assert_true(done[i] >= world->xfers && done[i] < world->xfers + DISK_WORLD_XFERS);
        assert_int_not_equal(done[i]->status, DISK_WORLD_STATUS_NONE);
        world->order[world->order_count++ % DISK_WORLD_XFERS] = (uint32_t)(done[i] - world->xfers);
    }
    return got;
}

void disk_world_reap(struct disk_world *world, uint32_t count)
{
    uint64_t until_ns = kvt_clock_mono_ns() + 20 * KVT_NS_PER_S;
    uint32_t total = 0;

    while (total < count) {
        uint32_t got = reap_some(world);

        if (got == 0) {
            if (kvt_clock_mono_ns() > until_ns)
                fail_msg("%u of %u transfers never came back", count - total, count);
            kvt_doorbell_arm(&world->bell);
            got = reap_some(world);
            if (got > 0)
                kvt_doorbell_disarm(&world->bell);
            else
                kvt_doorbell_wait(&world->bell, KVT_NS_PER_S);
        }
        total += got;
    }
    assert_int_equal(total, count);
}

uint32_t disk_world_reap_for(struct disk_world *world, uint64_t ns)
{
    uint64_t until_ns = kvt_clock_mono_ns() + ns;
    uint32_t total = 0;

    do {
        total += reap_some(world);
        disk_world_sleep(KVT_NS_PER_MS);
    } while (kvt_clock_mono_ns() < until_ns);
    return total;
}

uint32_t disk_world_count(const struct disk_world *world, uint32_t first, uint32_t count,
                          int status)
{
    uint32_t matching = 0;

    for (uint32_t i = first; i < first + count; i++)
        matching += world->xfers[i].status == status;
    return matching;
}

void disk_world_sleep(uint64_t ns)
{
    struct timespec pause = {.tv_sec = (time_t)(ns / KVT_NS_PER_S),
                             .tv_nsec = (long)(ns % KVT_NS_PER_S)};

    nanosleep(&pause, NULL);
}

void disk_world_wait_count(const atomic_uint *counter, unsigned int at_least)
{
    for (int i = 0; i < 10000 && atomic_load(counter) < at_least; i++)
        disk_world_sleep(KVT_NS_PER_MS);
    assert_true(atomic_load(counter) >= at_least);
}

void disk_world_wait_taken(struct disk_world *world, uint32_t idx)
{
    struct kvt_ring *ring = &kvt_disk_set_device(world->tier, idx)->worker.submissions;

    for (int i = 0; i < 10000 && !kvt_ring_is_drained(ring); i++)
        disk_world_sleep(KVT_NS_PER_MS);
    assert_true(kvt_ring_is_drained(ring));
}

void disk_world_wait_asleep(struct disk_world *world, uint32_t idx)
{
    struct kvt_doorbell *bell = &kvt_disk_set_device(world->tier, idx)->worker.bell;

    for (int i = 0; i < 10000 && !atomic_load(&bell->is_armed); i++)
        disk_world_sleep(KVT_NS_PER_MS);
    assert_true(atomic_load(&bell->is_armed));
}

void disk_world_wait_health(const struct kvt_tier_counters *counters, enum kvt_tier_health health)
{
    for (int i = 0; i < 10000 && atomic_load(&counters->health) != health; i++)
        disk_world_sleep(KVT_NS_PER_MS);
    assert_int_equal(atomic_load(&counters->health), health);
}
