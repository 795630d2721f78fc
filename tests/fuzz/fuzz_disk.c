/* What L3 reads at the front of a device, with arbitrary bytes: the first byte says as what they
 * are read, and whether their checksum is made right first, so that what is behind it is reached.
 * What is accepted must encode and decode to the same again.
 *
 * With libFuzzer (-Dfuzzers=true, clang) this is a fuzzer; else replay_main.c runs it over files.
 */
#include <stdlib.h>
#include <string.h>

#include "daemon/base/bytes.h"
#include "daemon/base/hash.h"
#include "tests/fuzz/fuzz_disk.h"
#include "tiers/disk/catalog.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static uint8_t block[KVT_DISK_RECORD_BYTES_MAX], again[KVT_DISK_RECORD_BYTES_MAX];

static void check(bool holds)
{
    if (!holds)
        abort();
}

static void super_try(void)
{
    struct kvt_disk_super super, back;

    memset(&super, 0, sizeof(super));
    memset(&back, 0, sizeof(back));
    if (kvt_disk_super_decode(block, &super) != 0 || super.version < KVT_DISK_SUPER_VERSION)
        return;
    check(super.device_bytes >= super.data_offset_bytes);
    kvt_disk_super_encode(again, &super);
    check(kvt_disk_super_decode(again, &back) == 0 && memcmp(&super, &back, sizeof(super)) == 0);
}

static void ns_try(const uint8_t *data, uint32_t bytes)
{
    static struct kvt_disk_ns_record ns;

    if (!kvt_disk_catalog_decode_ns(data, bytes, &ns))
        return;
    check(kvt_disk_catalog_encode_ns(again, &ns) == bytes && memcmp(again, data, bytes) == 0);
}

static void state_try(const uint8_t *data, uint32_t bytes)
{
    struct kvt_disk_state state;

    if (!kvt_disk_catalog_decode_state(data, bytes, &state))
        return;
    kvt_disk_catalog_encode_state(again, &state);
    check(bytes == KVT_DISK_STATE_BYTES && memcmp(again, data, bytes) == 0);
}

static void record_try(uint32_t number)
{
    uint64_t serial;
    uint32_t bytes;
    const uint8_t *data =
        kvt_disk_record_decode(block, number, block + FUZZ_DISK_UUID_AT, &serial, &bytes);

    if (data == NULL)
        return;
    check(data >= block && bytes <= kvt_disk_record_data_max(number) &&
          data + bytes <= block + kvt_disk_record_bytes(number) - 8);
    if (number == KVT_DISK_CATALOG_STATE)
        state_try(data, bytes);
    else
        ns_try(data, bytes);
}

static void seal(uint32_t bytes)
{
    kvt_put_u64(block, bytes - 8, kvt_hash64(block, bytes - 8, 0));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    uint32_t bytes = (uint32_t)KVT_MIN(size == 0 ? 0 : size - 1, sizeof(block));
    bool is_sealed;

    if (size == 0)
        return 0;
    is_sealed = (data[0] & FUZZ_DISK_SEALED) != 0;
    memset(block, 0, sizeof(block));
    memcpy(block, data + 1, bytes);
    switch (data[0] & ~FUZZ_DISK_SEALED) {
    case FUZZ_DISK_SUPER:
        if (is_sealed)
            seal(KVT_DISK_SUPER_BYTES);
        super_try();
        break;
    case FUZZ_DISK_NS_RECORD:
        if (is_sealed)
            seal(kvt_disk_record_bytes(FUZZ_DISK_NS_NUMBER));
        record_try(FUZZ_DISK_NS_NUMBER);
        break;
    case FUZZ_DISK_STATE_RECORD:
        if (is_sealed)
            seal(kvt_disk_record_bytes(KVT_DISK_CATALOG_STATE));
        record_try(KVT_DISK_CATALOG_STATE);
        break;
    case FUZZ_DISK_NS:
        ns_try(block, bytes);
        break;
    default:
        state_try(block, bytes);
    }
    return 0;
}
