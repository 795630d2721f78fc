/* All devices of L3 as one tier: one zone a device, in the order of the configuration.
 *
 *                     +-- device 0: thread, queues, ring      zone 0 = [0, a)
 *   engine -- set ----+-- device 1: could not be opened       zone 1 = [a, a): out of service
 *                     +-- device 2: thread, queues, ring      zone 2 = [a, b)
 *
 * A transfer goes to the device its disk place lies in; it may not cross a zone. Completion is in
 * order for no more than one device. Every device takes as many transfers as the whole set: what
 * waits for a slow device waits in that device's queue, where it is late at its deadline, so a full
 * device holds up the others only when it alone has all that the set takes. A flush of the whole
 * tier goes to the devices that have writes which no good flush covers, and comes back when the
 * last of them answered, with the first failure among them: a flush of one zone (tier.h) is not
 * harmed by the other zones. At most KVT_DISK_SET_FLUSHES of the former are under way at once; the
 * next one is refused as by a full ring.
 *
 * The counters of the set are the sums of its zones', brought up to date by reap; its health is OUT
 * when all zones are. With one device the set is that device's own tier, at no cost.
 *
 * open/close: init-only. submit, reap: engine-only. */
#pragma once

#include "tiers/disk/disk.h"

#define KVT_DISK_SET_FLUSHES 32u

struct kvt_disk_set_config {
    uint32_t devices_count; /* 1 .. KVT_ZONES_MAX */
    /* host_memory, doorbell and limits are the same in all. inflight_max of the set is their sum.
     */
    struct kvt_disk_config devices[KVT_ZONES_MAX];
};

struct kvt_disk_set_device {
    int result; /* of kvt_disk_open */
    int pid;    /* KVT_DISK_E_BUSY: of the other daemon, 0: unknown */
    char text[256];
    struct kvt_disk_report report;
};

struct kvt_disk_set_report {
    uint32_t opened_count;
    struct kvt_disk_set_device devices[KVT_ZONES_MAX];
};

/* The set that what lies at @path belongs to; false: to none, or it cannot be read. */
bool kvt_disk_store_id_find(const char *path, uint8_t ret_id[16]);

/* A device that cannot be opened here stays a zone of 0 bytes until the set is closed, whatever
 * becomes of it: how large it would be is not known, and offsets of the zones behind it would move.
 * (One that was open and fails is tried again by itself: disk.h.)
 *
 * Devices whose configuration names no store_id are of the set of the first of them that belongs to
 * one; if none does, of a new set. A device of another set is not opened.
 *
 * A device that cannot be opened does not stop the others: the report says why, and the caller
 * judges whether that is fatal (a busy device, a wrong configuration, none opened). 0, or -EINVAL
 * or -ENOMEM and nothing is open. */
KVT_MUST_USE int kvt_disk_set_open(struct kvt_tier **ret_tier,
                                   const struct kvt_disk_set_config *config,
                                   struct kvt_disk_set_report *ret_report);
/* The device of a zone, for the calls about its catalog; NULL: it could not be opened. */
struct kvt_disk *kvt_disk_set_device(struct kvt_tier *tier, uint32_t idx);
