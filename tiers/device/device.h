/* L1: an arena in device memory, payload alone. The backend is chosen at start by name; "host"
 * keeps the arena in ordinary memory, for nodes without a GPU and for tests; its interface is the
 * one that a GPU backend has. One thread a device does its copies.
 *
 * open/close: init-only (main thread). */
#pragma once

#include "tiers/tier.h"

struct kvt_device_config {
    const char *backend; /* "host"; "cuda" answers -ENOTSUP where it is not built */
    uint64_t bytes;
    uint8_t *host_memory; /* L2, for copies to and from it */
    uint64_t host_memory_bytes;
    uint32_t inflight_max;
    struct kvt_doorbell *doorbell;
};

/* -EINVAL: no such backend. -ENOTSUP: known, but not in this build. */
KVT_MUST_USE int kvt_device_open(struct kvt_tier **ret_tier,
                                 const struct kvt_device_config *config);
