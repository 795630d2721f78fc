/* The backends of L1 behind kvt_device_open. init-only. */
#pragma once

#include "tiers/device/device.h"

KVT_MUST_USE int kvt_device_host_open(struct kvt_tier **ret_tier,
                                      const struct kvt_device_config *config);
/* Results as kvt_device_open's. */
KVT_MUST_USE int kvt_device_cuda_open(struct kvt_tier **ret_tier,
                                      const struct kvt_device_config *config,
                                      struct kvt_device_report *ret_report);
