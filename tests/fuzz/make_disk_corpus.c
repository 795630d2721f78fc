/* Writes the seeds of fuzz_disk: one of each kind, without trailing zeros and checksum where the
 * fuzzer makes them. make-disk-corpus DIRECTORY */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/bytes.h"
#include "tests/fuzz/fuzz_disk.h"
#include "tiers/disk/catalog.h"

static void write_seed(const char *directory, const char *name, int kind, const uint8_t *bytes,
                       size_t count)
{
    char path[4096];
    FILE *file;

    (void)snprintf(path, sizeof(path), "%s/%s", directory, name);
    file = fopen(path, "wb");
    if (file == NULL || fputc(kind, file) == EOF || fwrite(bytes, 1, count, file) != count ||
        fclose(file) != 0) {
        perror(path);
        exit(1);
    }
}

int main(int argc, char **argv)
{
    static uint8_t block[KVT_DISK_RECORD_BYTES_MAX], data[KVT_DISK_NS_BYTES_MAX];
    static struct kvt_disk_ns_record ns = {.is_used = true, .epoch = 3, .spec_bytes = 40};
    struct kvt_disk_super super = {.serial = 3,
                                   .device_bytes = 64u << 20,
                                   .data_offset_bytes = KVT_DISK_DATA_OFFSET_BYTES,
                                   .created_real_ns = 1700000000000000000ull};
    struct kvt_disk_state state = {.stamps_end = 1u << 20, .starts = 4, .written_bytes = 5u << 20};
    const int sealed = FUZZ_DISK_SEALED;
    uint32_t bytes;

    if (argc != 2)
        return 2;
    memset(super.device_uuid, 0x11, sizeof(super.device_uuid));
    memset(super.store_id, 0x22, sizeof(super.store_id));
    memset(ns.fingerprint, 0x33, sizeof(ns.fingerprint));
    memset(ns.spec, 's', ns.spec_bytes);
    kvt_disk_super_encode(block, &super);
    write_seed(argv[1], "super", FUZZ_DISK_SUPER, block, KVT_DISK_SUPER_BYTES);
    write_seed(argv[1], "super-sealed", FUZZ_DISK_SUPER | sealed, block, 80);
    kvt_put_u32(block, KVT_DISK_SUPER_AT_VERSION, 1);
    kvt_put_u64(block, KVT_DISK_SUPER_AT_DATA_OFFSET, 8192);
    write_seed(argv[1], "super-v1", FUZZ_DISK_SUPER | sealed, block, 56);
    kvt_put_u32(block, KVT_DISK_SUPER_AT_VERSION, 9);
    write_seed(argv[1], "super-v9", FUZZ_DISK_SUPER | sealed, block, 80);
    bytes = kvt_disk_catalog_encode_ns(data, &ns);
    write_seed(argv[1], "ns", FUZZ_DISK_NS, data, bytes);
    kvt_disk_record_encode(block, FUZZ_DISK_NS_NUMBER, super.device_uuid, 7, data, bytes);
    write_seed(argv[1], "ns-record", FUZZ_DISK_NS_RECORD | sealed, block, 48 + bytes);
    kvt_disk_catalog_encode_state(data, &state);
    write_seed(argv[1], "state", FUZZ_DISK_STATE, data, KVT_DISK_STATE_BYTES);
    kvt_disk_record_encode(block, KVT_DISK_CATALOG_STATE, super.device_uuid, 8, data,
                           KVT_DISK_STATE_BYTES);
    write_seed(argv[1], "state-record", FUZZ_DISK_STATE_RECORD | sealed, block,
               48 + KVT_DISK_STATE_BYTES);
    return 0;
}
