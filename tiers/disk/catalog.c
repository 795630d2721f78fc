#include "tiers/disk/catalog.h"

#include <string.h>

#include "daemon/base/bytes.h"
#include "daemon/base/clock.h"
#include "daemon/base/hash.h"

#define RECORD_MAGIC 0x3143455254564bull /* "KVTREC1" and a zero, read as little-endian */
#define RECORD_VERSION 1u
#define STAMPS_BEGIN_S 1704067200u /* 2024-01-01T00:00:00Z */
#define STATE_OFFSET_BYTES (2u * KVT_DISK_SUPER_BYTES)
#define STATE_RECORD_BYTES 4096u
#define CATALOG_OFFSET_BYTES (1u << 20)

enum record_field {
    AT_MAGIC = 0,
    AT_VERSION = 8,
    AT_NUMBER = 12,
    AT_DEVICE_UUID = 16,
    AT_SERIAL = 32,
    AT_DATA_BYTES = 40,
    AT_RESERVED = 44,
    AT_DATA = 48,
    HASH_BYTES = 8, /* the checksum is the last of a record */
};

enum ns_field {
    NS_AT_FLAGS = 0,
    NS_AT_SPEC_BYTES = 4,
    NS_AT_FINGERPRINT = 8,
    NS_AT_EPOCH = 40,
    NS_AT_RESERVED = 48,
    NS_AT_SPEC = 56,
    NS_FLAG_USED = 1,
};

static_assert(NS_AT_SPEC + KVT_DISK_SPEC_BYTES_MAX == KVT_DISK_NS_BYTES_MAX, "sizes agree");
static_assert(AT_DATA + KVT_DISK_NS_BYTES_MAX + HASH_BYTES <= KVT_DISK_RECORD_BYTES_MAX,
              "a record holds its namespace");
static_assert(CATALOG_OFFSET_BYTES + KVT_NAMESPACES_MAX * 2u * KVT_DISK_RECORD_BYTES_MAX ==
                  KVT_DISK_DATA_OFFSET_BYTES,
              "the catalog ends where data begins");

/* ---- encodings ------------------------------------------------------------------------------ */

uint32_t kvt_disk_catalog_encode_ns(uint8_t *data, const struct kvt_disk_ns_record *ns)
{
    KVT_ASSERT(ns->spec_bytes <= KVT_DISK_SPEC_BYTES_MAX && (ns->is_used || ns->spec_bytes == 0));
    memset(data, 0, NS_AT_SPEC);
    kvt_put_u32(data, NS_AT_FLAGS, ns->is_used ? NS_FLAG_USED : 0);
    kvt_put_u32(data, NS_AT_SPEC_BYTES, ns->spec_bytes);
    memcpy(data + NS_AT_FINGERPRINT, ns->fingerprint, KVT_FINGERPRINT_BYTES);
    kvt_put_u64(data, NS_AT_EPOCH, ns->epoch);
    memcpy(data + NS_AT_SPEC, ns->spec, ns->spec_bytes);
    return NS_AT_SPEC + ns->spec_bytes;
}

static bool ns_is_whole(const uint8_t *data, uint32_t bytes)
{
    uint32_t flags;

    if (bytes < NS_AT_SPEC || bytes > KVT_DISK_NS_BYTES_MAX)
        return false;
    flags = kvt_get_u32(data, NS_AT_FLAGS);
    return flags <= NS_FLAG_USED && (flags == NS_FLAG_USED || bytes == NS_AT_SPEC) &&
           kvt_get_u32(data, NS_AT_SPEC_BYTES) == bytes - NS_AT_SPEC &&
           kvt_get_u64(data, NS_AT_RESERVED) == 0;
}

bool kvt_disk_catalog_decode_ns(const uint8_t *data, uint32_t bytes,
                                struct kvt_disk_ns_record *ret_ns)
{
    if (!ns_is_whole(data, bytes))
        return false;
    memset(ret_ns, 0, sizeof(*ret_ns));
    ret_ns->is_used = kvt_get_u32(data, NS_AT_FLAGS) == NS_FLAG_USED;
    memcpy(ret_ns->fingerprint, data + NS_AT_FINGERPRINT, KVT_FINGERPRINT_BYTES);
    ret_ns->epoch = kvt_get_u64(data, NS_AT_EPOCH);
    ret_ns->spec_bytes = bytes - NS_AT_SPEC;
    memcpy(ret_ns->spec, data + NS_AT_SPEC, ret_ns->spec_bytes);
    return true;
}

uint64_t kvt_disk_stamps_at(uint64_t real_ns)
{
    uint64_t real_s = real_ns / KVT_NS_PER_S;

    if (real_s <= STAMPS_BEGIN_S)
        return 0;
    real_s -= STAMPS_BEGIN_S;
    if (real_s >= KVT_DISK_STAMPS_MAX / KVT_DISK_STAMPS_SECOND / 2)
        return KVT_DISK_STAMPS_MAX / 2;
    return real_s * KVT_DISK_STAMPS_SECOND +
           real_ns % KVT_NS_PER_S * KVT_DISK_STAMPS_SECOND / KVT_NS_PER_S;
}

void kvt_disk_catalog_encode_state(uint8_t data[KVT_DISK_STATE_BYTES],
                                   const struct kvt_disk_state *state)
{
    KVT_ASSERT(state->stamps_end <= KVT_DISK_STAMPS_MAX);
    kvt_put_u64(data, 0, state->stamps_end);
    kvt_put_u64(data, 8, state->starts);
    kvt_put_u64(data, 16, state->written_bytes);
}

bool kvt_disk_catalog_decode_state(const uint8_t *data, uint32_t bytes,
                                   struct kvt_disk_state *ret_state)
{
    if (bytes != KVT_DISK_STATE_BYTES || kvt_get_u64(data, 0) > KVT_DISK_STAMPS_MAX)
        return false;
    ret_state->stamps_end = kvt_get_u64(data, 0);
    ret_state->starts = kvt_get_u64(data, 8);
    ret_state->written_bytes = kvt_get_u64(data, 16);
    return true;
}

uint64_t kvt_disk_record_offset(uint32_t number, uint32_t copy)
{
    KVT_ASSERT(number < KVT_DISK_CATALOG_RECORDS && copy < 2);
    if (number == KVT_DISK_CATALOG_STATE)
        return STATE_OFFSET_BYTES + copy * STATE_RECORD_BYTES;
    return CATALOG_OFFSET_BYTES + (number * 2 + copy) * KVT_DISK_RECORD_BYTES_MAX;
}

uint32_t kvt_disk_record_bytes(uint32_t number)
{
    return number == KVT_DISK_CATALOG_STATE ? STATE_RECORD_BYTES : KVT_DISK_RECORD_BYTES_MAX;
}

uint32_t kvt_disk_record_data_max(uint32_t number)
{
    return number == KVT_DISK_CATALOG_STATE ? KVT_DISK_STATE_BYTES : KVT_DISK_NS_BYTES_MAX;
}

void kvt_disk_record_encode(uint8_t *record, uint32_t number, const uint8_t *device_uuid,
                            uint64_t serial, const void *data, uint32_t bytes)
{
    uint32_t hash_at = kvt_disk_record_bytes(number) - HASH_BYTES;

    KVT_ASSERT(bytes <= kvt_disk_record_data_max(number));
    memset(record, 0, hash_at);
    kvt_put_u64(record, AT_MAGIC, RECORD_MAGIC);
    kvt_put_u32(record, AT_VERSION, RECORD_VERSION);
    kvt_put_u32(record, AT_NUMBER, number);
    memcpy(record + AT_DEVICE_UUID, device_uuid, KVT_DISK_ID_BYTES);
    kvt_put_u64(record, AT_SERIAL, serial);
    kvt_put_u32(record, AT_DATA_BYTES, bytes);
    memcpy(record + AT_DATA, data, bytes);
    kvt_put_u64(record, hash_at, kvt_hash64(record, hash_at, 0));
}

const uint8_t *kvt_disk_record_decode(const uint8_t *record, uint32_t number,
                                      const uint8_t *device_uuid, uint64_t *ret_serial,
                                      uint32_t *ret_bytes)
{
    uint32_t hash_at = kvt_disk_record_bytes(number) - HASH_BYTES;
    uint32_t bytes = kvt_get_u32(record, AT_DATA_BYTES);

    if (kvt_get_u64(record, AT_MAGIC) != RECORD_MAGIC ||
        kvt_get_u32(record, AT_VERSION) != RECORD_VERSION ||
        kvt_get_u32(record, AT_NUMBER) != number ||
        memcmp(record + AT_DEVICE_UUID, device_uuid, KVT_DISK_ID_BYTES) != 0 ||
        kvt_get_u64(record, AT_SERIAL) == 0 || bytes > kvt_disk_record_data_max(number) ||
        kvt_get_u64(record, hash_at) != kvt_hash64(record, hash_at, 0))
        return NULL;
    *ret_serial = kvt_get_u64(record, AT_SERIAL);
    *ret_bytes = bytes;
    return record + AT_DATA;
}

/* ---- both copies ---------------------------------------------------------------------------- */

struct copies {             /* of one record, as read into file->records */
    const uint8_t *data[2]; /* NULL: not valid */
    uint64_t serials[2];    /* 0: not valid */
    uint32_t bytes[2];
    bool is_blank[2]; /* as it was made: never written */
    int error;        /* of the last copy that could not be read; 0: both could */
    uint32_t errors;
};

/* What the record says must decode as well: a copy counts only if it is good to the end. */
static bool is_meaningful(uint32_t number, const uint8_t *data, uint32_t bytes)
{
    struct kvt_disk_state state;

    if (number == KVT_DISK_CATALOG_STATE)
        return kvt_disk_catalog_decode_state(data, bytes, &state);
    return ns_is_whole(data, bytes);
}

static void copies_read(struct kvt_disk_file *file, const struct kvt_disk_io *io, uint32_t number,
                        struct copies *ret_copies)
{
    uint32_t record_bytes = kvt_disk_record_bytes(number);

    memset(ret_copies, 0, sizeof(*ret_copies));
    for (uint32_t copy = 0; copy < 2; copy++) {
        uint8_t *record = file->records + copy * KVT_DISK_RECORD_BYTES_MAX;
        const uint8_t *data;
        int64_t n = io->pread(io->ctx, file->fd, record, record_bytes,
                              kvt_disk_record_offset(number, copy));

        if (n != (int64_t)record_bytes) {
            ret_copies->error = n < 0 ? (int)n : -EIO;
            ret_copies->errors++;
            continue;
        }
        ret_copies->is_blank[copy] = kvt_bytes_are_zero(record, record_bytes);
        data = kvt_disk_record_decode(record, number, file->about.device_uuid,
                                      &ret_copies->serials[copy], &ret_copies->bytes[copy]);
        if (data != NULL && is_meaningful(number, data, ret_copies->bytes[copy]))
            ret_copies->data[copy] = data;
        else
            ret_copies->serials[copy] = 0;
    }
}

static uint32_t newest_of(const struct copies *copies)
{
    return copies->serials[1] > copies->serials[0];
}

static void record_take(struct kvt_disk_catalog *catalog, uint32_t number,
                        const struct copies *copies)
{
    uint32_t newest = newest_of(copies);
    const uint8_t *data = copies->data[newest];
    bool is_taken;

    if (data == NULL) {
        catalog->records_lost += !copies->is_blank[0] || !copies->is_blank[1];
        return;
    }
    catalog->copies_bad += copies->data[!newest] == NULL && !copies->is_blank[!newest];
    if (number == KVT_DISK_CATALOG_STATE) {
        is_taken = kvt_disk_catalog_decode_state(data, copies->bytes[newest], &catalog->state);
        catalog->has_state = is_taken;
    } else {
        is_taken =
            kvt_disk_catalog_decode_ns(data, copies->bytes[newest], &catalog->namespaces[number]);
    }
    KVT_ASSERT(is_taken); /* is_meaningful said so */
}

int kvt_disk_catalog_read(struct kvt_disk_file *file, const struct kvt_disk_io *io,
                          struct kvt_disk_catalog *ret_catalog)
{
    uint32_t errors = 0;
    int error = 0;

    memset(ret_catalog, 0, sizeof(*ret_catalog));
    for (uint32_t number = 0; number < KVT_DISK_CATALOG_RECORDS; number++) {
        struct copies copies;

        copies_read(file, io, number, &copies);
        errors += copies.errors;
        error = copies.error < 0 ? copies.error : error;
        record_take(ret_catalog, number, &copies);
    }
    return errors == 2 * KVT_DISK_CATALOG_RECORDS ? kvt_trace(error) : 0;
}

/* What is at the front of file->records becomes copy @copy. */
static int copy_write(struct kvt_disk_file *file, const struct kvt_disk_io *io, uint32_t number,
                      uint32_t copy)
{
    uint32_t record_bytes = kvt_disk_record_bytes(number);
    int64_t n = io->pwrite(io->ctx, file->fd, file->records, record_bytes,
                           kvt_disk_record_offset(number, copy));
    int r;

    if (n != (int64_t)record_bytes)
        return kvt_trace(n < 0 ? (int)n : -EIO);
    r = io->fdatasync(io->ctx, file->fd);
    return r < 0 ? kvt_trace(r) : 0;
}

int kvt_disk_catalog_write(struct kvt_disk_file *file, const struct kvt_disk_io *io,
                           uint32_t number, const void *data, uint32_t bytes)
{
    struct copies copies;
    uint32_t newest;
    int r;

    if (number >= KVT_DISK_CATALOG_RECORDS || bytes > kvt_disk_record_data_max(number) ||
        !is_meaningful(number, data, bytes))
        return kvt_trace(-EINVAL);
    copies_read(file, io, number, &copies);
    /* Without knowing either serial a smaller one might be given, and the write would not count. */
    if (copies.errors == 2)
        return kvt_trace(copies.error);
    newest = newest_of(&copies);
    kvt_disk_record_encode(file->records, number, file->about.device_uuid,
                           copies.serials[newest] + 1, data, bytes);
    r = copy_write(file, io, number, !newest);
    if (r < 0)
        return r;
    return copy_write(file, io, number, newest);
}

void kvt_disk_catalog_heal(struct kvt_disk_file *file, const struct kvt_disk_io *io)
{
    for (uint32_t number = 0; number < KVT_DISK_CATALOG_RECORDS; number++) {
        struct copies copies;
        uint32_t newest;

        copies_read(file, io, number, &copies);
        newest = newest_of(&copies);
        if (copies.data[newest] == NULL || copies.serials[0] == copies.serials[1])
            continue;
        if (newest == 1)
            memcpy(file->records, file->records + KVT_DISK_RECORD_BYTES_MAX,
                   kvt_disk_record_bytes(number));
        (void)!copy_write(file, io, number, !newest);
    }
}
