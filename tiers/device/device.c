/* The choice of the backend. What only GPUs have is in member.c and region.c: of a tier of another
 * backend they know nothing. */
#include "tiers/device/device.h"

#include <string.h>

#include "tiers/device/backend.h"
#include "tiers/device/probe.h"

int kvt_device_open(struct kvt_tier **ret_tier, const struct kvt_device_config *config,
                    struct kvt_device_report *ret_report)
{
    *ret_report = (struct kvt_device_report){.has_cuda = kvt_cuda_calls() != NULL};
    if (config->inflight_max == 0)
        return kvt_trace(-EINVAL);
    if (strcmp(config->backend, "host") == 0)
        return config->bytes < KVT_DIO_ALIGN_BYTES ? kvt_trace(-EINVAL)
                                                   : kvt_device_host_open(ret_tier, config);
    if (strcmp(config->backend, "cuda") != 0)
        return kvt_trace(-EINVAL);
    return kvt_device_cuda_open(ret_tier, config, ret_report);
}

uint32_t kvt_device_numa_nodes(const struct kvt_device_config *config, int ret_nodes[KVT_ZONES_MAX])
{
    if (strcmp(config->backend, "cuda") != 0)
        return 0;
    return kvt_probe_numa_nodes(kvt_cuda_calls(), config, ret_nodes);
}
