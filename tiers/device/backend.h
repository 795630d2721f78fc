/* The backends of L1. Each is one file with one function; a backend that is not in this build is
 * another file (cuda_none.c) that answers -ENOTSUP. init-only. */
#pragma once

#include "tiers/device/device.h"

KVT_MUST_USE int kvt_device_host_open(struct kvt_tier **ret_tier,
                                      const struct kvt_device_config *config);
KVT_MUST_USE int kvt_device_cuda_open(struct kvt_tier **ret_tier,
                                      const struct kvt_device_config *config);
