/* The choice of the backend. What only GPUs have is in member.c and region.c: of a tier of another
 * backend they know nothing. */
#include "tiers/device/device.h"

#include <string.h>

#include "daemon/base/alloc.h"
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

int kvt_device_find(struct kvt_device_found **ret_found, const struct kvt_device_config *config)
{
    struct kvt_device_found *found = NULL;

    if (strcmp(config->backend, "cuda") == 0) {
        found = kvt_alloc_zeroed(1, sizeof(*found));
        if (found == NULL)
            return kvt_trace(-ENOMEM);
        kvt_probe_look(kvt_cuda_calls(), config, found);
    }
    *ret_found = found;
    return 0;
}

struct kvt_device_found *kvt_device_found_free(struct kvt_device_found *found)
{
    kvt_free(found);
    return NULL;
}
