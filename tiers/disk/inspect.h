/* Looks at an L3 device without a daemon, and never writes: it is opened for reading, and there is
 * no call in here that could change it. For tools.
 *
 * What is counted are slots with a whole header. Inspecting believes headers and skips what they
 * say is theirs; verifying reads every byte and checks payloads as well. A slot inside which
 * another whole header of this store lies was written over in part, which is how slots end: it is
 * `replaced`, not bad. A daemon that is using the device at the time may make good slots look bad.
 *
 * Blocks; one thread. The struct is half a MiB: keep it on the heap. */
#pragma once

#include "tiers/disk/catalog.h"
#include "tiers/slot.h"

#define KVT_DISK_SLOT_GROUPS_MAX 256u

struct kvt_disk_slot_group { /* slots of one size of one namespace, of its present epoch */
    uint32_t ns;
    uint64_t slot_bytes, slots;
};

struct kvt_disk_inspection {
    bool is_raw;
    uint64_t there_bytes; /* of the file or device */
    /* Superblock. */
    bool is_copy_good[2];
    uint64_t copy_serials[2];
    struct kvt_disk_super about;
    /* Of version 2 only. */
    struct kvt_disk_catalog catalog;
    struct kvt_disk_slot_group groups[KVT_DISK_SLOT_GROUPS_MAX];
    uint32_t groups_count;
    uint64_t slots;            /* of the groups, and those there was no group for */
    uint64_t slots_stale;      /* of an older epoch, or of a namespace that is gone */
    uint64_t slots_replaced;   /* verify: written over in part by a later one */
    uint64_t slots_other;      /* of another store or another format version: rests */
    uint64_t slots_bad;        /* header damaged; verify: or payload */
    uint64_t unreadable_bytes; /* the device gave an error */
    uint64_t read_bytes;
};

struct kvt_disk_bad_slot {
    uint64_t offset_bytes; /* of the slot, from the front of the device */
    enum kvt_slot_verdict verdict;
    bool has_info; /* a whole header */
    struct kvt_slot_info info;
};

struct kvt_disk_inspect_config {
    const char *path;
    bool is_verify;
    bool is_front_only; /* superblock and catalog, no slots */
    void (*bad)(void *ctx, const struct kvt_disk_bad_slot *bad); /* or NULL */
    void *ctx;
    /* Faults, in place of pread. NULL: pread. */
    int64_t (*pread)(void *ctx, int fd, void *buffer, uint32_t bytes, uint64_t offset_bytes);
    void *pread_ctx;
};

/* 0, KVT_DISK_E_FOREIGN, KVT_DISK_E_OTHER_VERSION, or -errno: it cannot be opened or its front not
 * be read. What was found until then is in *ret_inspection in any case. */
KVT_MUST_USE int kvt_disk_inspect(const struct kvt_disk_inspect_config *config,
                                  struct kvt_disk_inspection *ret_inspection);
