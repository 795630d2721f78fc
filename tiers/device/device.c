#include "tiers/device/device.h"

#include <stdio.h>
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
    (void)snprintf(ret_report->why, sizeof(ret_report->why), "this build has no CUDA");
    return KVT_DEVICE_E_NONE;
}

uint32_t kvt_device_numa_nodes(const struct kvt_device_config *config, int ret_nodes[KVT_ZONES_MAX])
{
    if (strcmp(config->backend, "cuda") != 0)
        return 0;
    return kvt_probe_numa_nodes(kvt_cuda_calls(), config, ret_nodes);
}

/* No tier of this build has a GPU yet: what kvt_device_open makes is of another backend. */
bool kvt_device_gpu(const struct kvt_tier *tier, uint32_t idx, struct kvt_device_gpu *ret_gpu)
{
    (void)tier;
    (void)idx;
    (void)ret_gpu;
    return false;
}
