/* The superblock of an L3 device: whose it is and how large. It lies twice at the device's front
 * (docs/formats.md has the bytes) and the valid copy with the greater serial counts.
 *
 *   0        4 KiB    8 KiB              1 MiB                 2 MiB
 *   | copy A | copy B | state A, state B | catalog of namespaces | data: slots at 4 KiB multiples
 *
 * Magic, version, endianness mark and the checksum's place are the same in every version, so that a
 * reader knows a version that it cannot read from somebody else's file. The reader of version 1 is
 * super_v1.c. Pure functions over bytes, which are input: validated, never asserted. Any thread. */
#pragma once

#include "daemon/base/def.h"

#define KVT_DISK_SUPER_BYTES 4096u
#define KVT_DISK_DATA_OFFSET_BYTES (2u << 20)
#define KVT_DISK_ID_BYTES 16u
#define KVT_DISK_SUPER_VERSION 2u

#define KVT_DISK_SUPER_MAGIC 0x314b53494454564bull /* "KVTDISK1" read as little-endian */
#define KVT_DISK_SUPER_ENDIAN_MARK 0x01020304u

enum kvt_disk_super_field {
    KVT_DISK_SUPER_AT_MAGIC = 0,
    KVT_DISK_SUPER_AT_VERSION = 8,
    KVT_DISK_SUPER_AT_ENDIAN_MARK = 12,
    KVT_DISK_SUPER_AT_DEVICE_UUID = 16,
    KVT_DISK_SUPER_AT_DEVICE_BYTES = 32,
    KVT_DISK_SUPER_AT_DATA_OFFSET = 40,
    KVT_DISK_SUPER_AT_CREATED_REAL_NS = 48,
    KVT_DISK_SUPER_AT_STORE_ID = 56, /* from here on: since version 2 */
    KVT_DISK_SUPER_AT_SERIAL = 72,
    KVT_DISK_SUPER_AT_HASH = KVT_DISK_SUPER_BYTES - 8,
};

struct kvt_disk_super {
    uint32_t version;
    uint8_t device_uuid[KVT_DISK_ID_BYTES]; /* made with the device's contents */
    uint8_t store_id[KVT_DISK_ID_BYTES];    /* of the set that it belongs to; version 1: zero */
    uint64_t serial;                        /* rises with each write; version 1: 0 */
    uint64_t device_bytes;                  /* all of it; what lies behind is not in use */
    uint64_t data_offset_bytes;
    uint64_t created_real_ns;
};

enum {
    KVT_DISK_SUPER_E_FOREIGN = 1,       /* not a superblock of ours, or a damaged one */
    KVT_DISK_SUPER_E_OTHER_VERSION = 2, /* ours and whole, of a version that is not known here */
};

/* Fills all of @block (KVT_DISK_SUPER_BYTES). */
void kvt_disk_super_encode(uint8_t *block, const struct kvt_disk_super *super);
/* 0 (version 1 or 2: see ret_super->version) or one of the above. */
KVT_MUST_USE int kvt_disk_super_decode(const uint8_t *block, struct kvt_disk_super *ret_super);

/* super_v1.c: the fields of a block whose magic, mark, version 1 and checksum were checked. */
KVT_MUST_USE int kvt_disk_super_v1_decode(const uint8_t *block, struct kvt_disk_super *ret_super);
