/* The superblock of version 1: data began at 8 KiB, there was no catalog and no index. Its slots
 * could never be found again after a restart, so there is nothing to carry over: knowing such a
 * file means that it is ours to be made anew, not somebody else's to be left alone. */
#include <string.h>

#include "daemon/base/bytes.h"
#include "tiers/disk/super.h"

#define V1_DATA_OFFSET_BYTES 8192u

int kvt_disk_super_v1_decode(const uint8_t *block, struct kvt_disk_super *ret_super)
{
    struct kvt_disk_super super = {
        .version = 1,
        .device_bytes = kvt_get_u64(block, KVT_DISK_SUPER_AT_DEVICE_BYTES),
        .data_offset_bytes = kvt_get_u64(block, KVT_DISK_SUPER_AT_DATA_OFFSET),
        .created_real_ns = kvt_get_u64(block, KVT_DISK_SUPER_AT_CREATED_REAL_NS),
    };

    memcpy(super.device_uuid, block + KVT_DISK_SUPER_AT_DEVICE_UUID, KVT_DISK_ID_BYTES);
    if (super.data_offset_bytes != V1_DATA_OFFSET_BYTES)
        return KVT_DISK_SUPER_E_FOREIGN;
    *ret_super = super;
    return 0;
}
