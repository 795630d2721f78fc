/* The catalog of an L3 device: few small records that must survive everything. One a namespace (its
 * number in the catalog is what the index's keys carry) and one of the device's state.
 *
 * Every record lies twice and each copy has a serial, a checksum and the device's uuid, so that
 * what an earlier user of the same bytes left there never passes for a record. A write replaces the
 * older copy, makes it durable, then the other in the same way: a torn write leaves a whole copy,
 * and rot in one copy later does not bring the record before back (an older epoch would serve what
 * a reset took away, an older end of the stamps would give numbers twice). Reading takes the valid
 * copy with the greatest serial. docs/formats.md has the bytes.
 *
 * read, write: block; one thread at a time. encode, decode: pure, any thread. */
#pragma once

#include "daemon/base/limits.h"
#include "tiers/disk/file.h"

#define KVT_DISK_CATALOG_STATE KVT_NAMESPACES_MAX /* number of the state's record */
#define KVT_DISK_CATALOG_RECORDS (KVT_NAMESPACES_MAX + 1u)
#define KVT_DISK_RECORD_BYTES_MAX 8192u
#define KVT_DISK_SPEC_BYTES_MAX 8000u

struct kvt_disk_ns_record {
    bool is_used; /* false: the number is free; its epoch still counts for the next user */
    uint8_t fingerprint[KVT_FINGERPRINT_BYTES];
    uint64_t epoch;
    uint32_t spec_bytes;
    uint8_t spec[KVT_DISK_SPEC_BYTES_MAX];
};

struct kvt_disk_state {
    uint64_t stamps_end; /* every stamp that was ever given is below */
    uint64_t starts;     /* of daemons with this device */
    uint64_t written_bytes;
};
#define KVT_DISK_STAMPS_MAX (1ull << 48)
#define KVT_DISK_STAMPS_RESERVE (1ull << 20) /* at a time */

/* Where the stamps of a start at this time begin at least: 65,536 a second since 2024, for 68
 * years. For what no record can tell: that all of them are lost, that a device was copied back from
 * an older moment, or that devices of a set ran without each other. Each of them would begin again
 * where another one did. Starts so close to each other that the counter is ahead of the clock leave
 * out some, a random number below STAMPS_GAP. */
#define KVT_DISK_STAMPS_SECOND (1ull << 16)
#define KVT_DISK_STAMPS_GAP (1ull << 24)
uint64_t kvt_disk_stamps_at(uint64_t real_ns);

#define KVT_DISK_NS_BYTES_MAX (56u + KVT_DISK_SPEC_BYTES_MAX)
#define KVT_DISK_STATE_BYTES 24u

/* The plain encodings. encode_ns answers how many bytes of @data (KVT_DISK_NS_BYTES_MAX) it filled;
 * decode answers false for anything that encode does not make, and leaves ret_ alone. */
uint32_t kvt_disk_catalog_encode_ns(uint8_t *data, const struct kvt_disk_ns_record *ns);
bool kvt_disk_catalog_decode_ns(const uint8_t *data, uint32_t bytes,
                                struct kvt_disk_ns_record *ret_ns);
void kvt_disk_catalog_encode_state(uint8_t data[KVT_DISK_STATE_BYTES],
                                   const struct kvt_disk_state *state);
bool kvt_disk_catalog_decode_state(const uint8_t *data, uint32_t bytes,
                                   struct kvt_disk_state *ret_state);

/* One copy of record @number as it lies on disk; where, and how many bytes. */
uint64_t kvt_disk_record_offset(uint32_t number, uint32_t copy);
uint32_t kvt_disk_record_bytes(uint32_t number);
/* The most data that a record of that number holds. */
uint32_t kvt_disk_record_data_max(uint32_t number);
void kvt_disk_record_encode(uint8_t *record, uint32_t number, const uint8_t *device_uuid,
                            uint64_t serial, const void *data, uint32_t bytes);
/* The data of a valid copy (within @record), or NULL. */
const uint8_t *kvt_disk_record_decode(const uint8_t *record, uint32_t number,
                                      const uint8_t *device_uuid, uint64_t *ret_serial,
                                      uint32_t *ret_bytes);

struct kvt_disk_catalog { /* half a MiB: keep it on the heap */
    struct kvt_disk_ns_record namespaces[KVT_NAMESPACES_MAX];
    struct kvt_disk_state state;
    bool has_state;        /* false with contents: stamps could repeat, adopt nothing */
    uint32_t copies_bad;   /* damaged or unreadable, and the other copy served */
    uint32_t records_lost; /* no copy is valid, and they are not as they were made */
};

/* 0: *ret_catalog is whole but for records_lost. -errno: not one record could be read. */
KVT_MUST_USE int kvt_disk_catalog_read(struct kvt_disk_file *file, const struct kvt_disk_io *io,
                                       struct kvt_disk_catalog *ret_catalog);
/* Makes a copy that is damaged, or that a write which was cut short left behind, like the one that
 * counts. A device that refuses is not refused for it. */
void kvt_disk_catalog_heal(struct kvt_disk_file *file, const struct kvt_disk_io *io);
/* 0: durable, in both copies. -EINVAL: no such number, or too long. Other -errno: the record before
 * or this one is found later, never another. */
KVT_MUST_USE int kvt_disk_catalog_write(struct kvt_disk_file *file, const struct kvt_disk_io *io,
                                        uint32_t number, const void *data, uint32_t bytes);
