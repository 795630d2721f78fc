#include "tiers/disk/super.h"

#include <string.h>

#include "daemon/base/bytes.h"
#include "daemon/base/hash.h"
#include "daemon/base/limits.h"

void kvt_disk_super_encode(uint8_t *block, const struct kvt_disk_super *super)
{
    memset(block, 0, KVT_DISK_SUPER_BYTES);
    kvt_put_u64(block, KVT_DISK_SUPER_AT_MAGIC, KVT_DISK_SUPER_MAGIC);
    kvt_put_u32(block, KVT_DISK_SUPER_AT_VERSION, KVT_DISK_SUPER_VERSION);
    kvt_put_u32(block, KVT_DISK_SUPER_AT_ENDIAN_MARK, KVT_DISK_SUPER_ENDIAN_MARK);
    memcpy(block + KVT_DISK_SUPER_AT_DEVICE_UUID, super->device_uuid, KVT_DISK_ID_BYTES);
    kvt_put_u64(block, KVT_DISK_SUPER_AT_DEVICE_BYTES, super->device_bytes);
    kvt_put_u64(block, KVT_DISK_SUPER_AT_DATA_OFFSET, super->data_offset_bytes);
    kvt_put_u64(block, KVT_DISK_SUPER_AT_CREATED_REAL_NS, super->created_real_ns);
    memcpy(block + KVT_DISK_SUPER_AT_STORE_ID, super->store_id, KVT_DISK_ID_BYTES);
    kvt_put_u64(block, KVT_DISK_SUPER_AT_SERIAL, super->serial);
    kvt_put_u64(block, KVT_DISK_SUPER_AT_HASH, kvt_hash64(block, KVT_DISK_SUPER_AT_HASH, 0));
}

static int v2_decode(const uint8_t *block, struct kvt_disk_super *ret_super)
{
    struct kvt_disk_super super = {
        .version = 2,
        .serial = kvt_get_u64(block, KVT_DISK_SUPER_AT_SERIAL),
        .device_bytes = kvt_get_u64(block, KVT_DISK_SUPER_AT_DEVICE_BYTES),
        .data_offset_bytes = kvt_get_u64(block, KVT_DISK_SUPER_AT_DATA_OFFSET),
        .created_real_ns = kvt_get_u64(block, KVT_DISK_SUPER_AT_CREATED_REAL_NS),
    };

    memcpy(super.device_uuid, block + KVT_DISK_SUPER_AT_DEVICE_UUID, KVT_DISK_ID_BYTES);
    memcpy(super.store_id, block + KVT_DISK_SUPER_AT_STORE_ID, KVT_DISK_ID_BYTES);
    if (super.data_offset_bytes != KVT_DISK_DATA_OFFSET_BYTES ||
        super.device_bytes < KVT_DISK_DATA_OFFSET_BYTES || super.device_bytes > INT64_MAX ||
        super.device_bytes % KVT_DIO_ALIGN_BYTES != 0 || super.serial == 0 ||
        kvt_bytes_are_zero(super.device_uuid, KVT_DISK_ID_BYTES) ||
        kvt_bytes_are_zero(super.store_id, KVT_DISK_ID_BYTES))
        return KVT_DISK_SUPER_E_FOREIGN;
    *ret_super = super;
    return 0;
}

int kvt_disk_super_decode(const uint8_t *block, struct kvt_disk_super *ret_super)
{
    if (kvt_get_u64(block, KVT_DISK_SUPER_AT_MAGIC) != KVT_DISK_SUPER_MAGIC ||
        kvt_get_u32(block, KVT_DISK_SUPER_AT_ENDIAN_MARK) != KVT_DISK_SUPER_ENDIAN_MARK ||
        kvt_get_u64(block, KVT_DISK_SUPER_AT_HASH) != kvt_hash64(block, KVT_DISK_SUPER_AT_HASH, 0))
        return KVT_DISK_SUPER_E_FOREIGN;
    switch (kvt_get_u32(block, KVT_DISK_SUPER_AT_VERSION)) {
    case 1:
        return kvt_disk_super_v1_decode(block, ret_super);
    case KVT_DISK_SUPER_VERSION:
        return v2_decode(block, ret_super);
    default:
        return KVT_DISK_SUPER_E_OTHER_VERSION;
    }
}
