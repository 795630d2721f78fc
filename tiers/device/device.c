#include "tiers/device/device.h"

#include <string.h>

#include "tiers/device/backend.h"

int kvt_device_open(struct kvt_tier **ret_tier, const struct kvt_device_config *config)
{
    if (config->bytes < KVT_DIO_ALIGN_BYTES || config->inflight_max == 0)
        return kvt_trace(-EINVAL);
    if (strcmp(config->backend, "host") == 0)
        return kvt_device_host_open(ret_tier, config);
    if (strcmp(config->backend, "cuda") == 0)
        return kvt_device_cuda_open(ret_tier, config);
    return kvt_trace(-EINVAL);
}
