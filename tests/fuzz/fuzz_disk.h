/* The first byte of an input of fuzz_disk; shared with the maker of its corpus. */
#pragma once

enum {
    FUZZ_DISK_SUPER = 0,
    FUZZ_DISK_NS_RECORD = 1,
    FUZZ_DISK_STATE_RECORD = 2,
    FUZZ_DISK_NS = 3,
    FUZZ_DISK_STATE = 4,
    FUZZ_DISK_SEALED = 128, /* the checksum is put right first */

    FUZZ_DISK_NS_NUMBER = 5,
    FUZZ_DISK_UUID_AT = 16, /* in a record; the device has the uuid that the record claims */
};
