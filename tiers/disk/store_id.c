/* Which set of devices a path belongs to, before it is opened: so that the devices of one
 * configuration agree on their set whichever of them is new. Reads, and takes no lock. */
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

#include "daemon/base/alloc.h"
#include "tiers/disk/set.h"
#include "tiers/disk/super.h"

bool kvt_disk_store_id_find(const char *path, uint8_t ret_id[KVT_DISK_ID_BYTES])
{
    kvt_autoclose int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    uint8_t block[KVT_DISK_SUPER_BYTES];
    struct kvt_disk_super super, best = {.serial = 0};
    bool is_found = false;

    if (fd < 0)
        return false;
    for (uint32_t copy = 0; copy < 2; copy++) {
        if (pread(fd, block, sizeof(block), (off_t)(copy * sizeof(block))) !=
                (ssize_t)sizeof(block) ||
            kvt_disk_super_decode(block, &super) != 0 || super.version != KVT_DISK_SUPER_VERSION)
            continue;
        if (!is_found || super.serial > best.serial)
            best = super;
        is_found = true;
    }
    if (is_found)
        memcpy(ret_id, best.store_id, KVT_DISK_ID_BYTES);
    return is_found;
}
