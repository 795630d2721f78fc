/* L3's part of start and stop: its devices, what their catalogs say, their indexes.
 *
 *   open the devices ─ read their catalogs ─ reserve stamps, durably ─ open an index for each
 *
 * A device that cannot be used is out of service, with one line that says why and what to do; the
 * others go on, and so does the daemon without any. Only a second daemon, a wrong configuration or
 * an installation without the helper program end the start. Main thread only. */
#pragma once

#include "daemon/config.h"
#include "tiers/disk/catalog.h"
#include "tiers/disk/set.h"
#include "tiers/index/index.h"

struct kvt_daemon;

struct kvt_daemon_l3 {
    uint32_t devices_count;
    struct kvt_config_device devices[KVT_ZONES_MAX];
    struct kvt_disk_set_report report;
    /* Of each device that is open. */
    struct l3_context {
        struct kvt_disk *device; /* NULL: out of service */
        const struct kvt_tier_counters *counters;
        const char *path;
    } contexts[KVT_ZONES_MAX];
    struct kvt_disk_state states[KVT_ZONES_MAX];
    struct kvt_index *indexes[KVT_ZONES_MAX];
    /* Of all devices together. */
    struct kvt_disk_ns_record *namespaces;           /* KVT_NAMESPACES_MAX; NULL: L3 is off */
    uint32_t namespaces_missing[KVT_NAMESPACES_MAX]; /* bit i: device i does not have it so */
    uint8_t store_id[KVT_DISK_ID_BYTES];
    uint64_t stamp_first, stamp_end;
};

int kvt_start_l3(void *ctx); /* steps: see daemon/base/steps.h */
void kvt_undo_l3(void *ctx);
int kvt_start_index(void *ctx);
void kvt_undo_index(void *ctx);
