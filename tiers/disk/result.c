#include <string.h>

#include "tiers/disk/disk.h"

const char *kvt_disk_result_text(int result)
{
    switch (result) {
    case KVT_DISK_E_BUSY:
        return "is in use by another daemon";
    case KVT_DISK_E_FOREIGN:
        return "is not of kvtierd, or its superblock is damaged";
    case KVT_DISK_E_TOO_SMALL:
        return "leaves no room for data";
    case KVT_DISK_E_OTHER_STORE:
        return "belongs to another store";
    case KVT_DISK_E_OTHER_VERSION:
        return "has a newer format";
    case KVT_DISK_E_MOUNTED:
        return "is mounted, or held by another program";
    case KVT_DISK_E_READ_ONLY:
        return "is read-only";
    default:
        return strerrordesc_np(result < 0 ? -result : result);
    }
}
