/* L3 for tests: up to four devices (files in a directory of their own, each behind its own shim),
 * memory for both ends of transfers, and blocks whose bytes are a function of one number. Uses
 * cmocka's assertions; one thread. */
#pragma once

#include "tests/common/disk_shim.h"
#include "tiers/disk/set.h"

#define DISK_WORLD_DEVICES_MAX 4u
#define DISK_WORLD_XFERS 512u
#define DISK_WORLD_BLOCK_TOKENS 16u
#define DISK_WORLD_STATUS_NONE 12345 /* of a transfer that has not come back */

struct disk_world {
    uint32_t devices_count, slots; /* slots: of each device */
    struct disk_shim shims[DISK_WORLD_DEVICES_MAX];
    char dir[64], paths[DISK_WORLD_DEVICES_MAX][96];
    struct kvt_doorbell bell;
    struct kvt_disk_set_config config;
    struct kvt_disk_set_report report;
    struct kvt_tier *tier;
    uint64_t payload_bytes, slot_bytes;
    uint8_t *memory; /* 2 * devices_count * slots slots */
    uint64_t memory_bytes;
    struct kvt_xfer xfers[DISK_WORLD_XFERS];
    uint32_t order[DISK_WORLD_XFERS], order_count; /* indices of xfers as they came back */
};

/* Not open yet, so that configuration and shims may be changed. */
struct disk_world *disk_world_new(uint32_t devices_count, uint32_t slots, uint64_t payload_bytes);
void disk_world_free(struct disk_world *world); /* closes */
void disk_world_open(struct disk_world *world);
/* Opens the first device alone, without a set. */
void disk_world_open_device(struct disk_world *world);

/* Memory slot @slot holds a sealed block that is a function of @generation. */
void disk_world_fill(struct disk_world *world, uint32_t slot, uint64_t generation);
/* Memory slot @slot holds the bytes of @generation. */
bool disk_world_is_filled(struct disk_world *world, uint32_t slot, uint64_t generation);
/* Sets transfer @idx: between memory slot @memory_slot and the slot_bytes at @offset_bytes of L3.
 */
struct kvt_xfer *disk_world_xfer(struct disk_world *world, uint32_t idx, bool is_read,
                                 uint32_t memory_slot, uint64_t offset_bytes, uint64_t generation);
/* Global offset of slot @slot of device @device. */
uint64_t disk_world_offset(const struct disk_world *world, uint32_t device, uint32_t slot);
/* Sets transfer @idx to a flush of everything. */
struct kvt_xfer *disk_world_flush(struct disk_world *world, uint32_t idx);
/* Hands over transfers [first, first + count); all must be taken. */
void disk_world_submit(struct disk_world *world, uint32_t first, uint32_t count);
/* Reaps until @count more came back, each once, or fails after 20 s. */
void disk_world_reap(struct disk_world *world, uint32_t count);
/* Reaps for @ns; returns how many came back. */
uint32_t disk_world_reap_for(struct disk_world *world, uint64_t ns);
/* Of transfers [first, first + count). */
uint32_t disk_world_count(const struct disk_world *world, uint32_t first, uint32_t count,
                          int status);
void disk_world_sleep(uint64_t ns);
/* These wait up to 10 s: for a counter of a shim; until the thread of device @idx has taken all
 * that it was given; until it has nothing to do and sleeps. */
void disk_world_wait_count(const atomic_uint *counter, unsigned int at_least);
void disk_world_wait_taken(struct disk_world *world, uint32_t idx);
void disk_world_wait_asleep(struct disk_world *world, uint32_t idx);
void disk_world_wait_health(const struct kvt_tier_counters *counters, enum kvt_tier_health health);
