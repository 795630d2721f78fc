/* The CUDA backend in a build without CUDA. */
#include "tiers/device/backend.h"

int kvt_device_cuda_open(struct kvt_tier **ret_tier, const struct kvt_device_config *config)
{
    (void)ret_tier;
    (void)config;
    return kvt_trace(-ENOTSUP);
}
