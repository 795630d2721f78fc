/* What the index of a device reads from its file: the first byte chooses, the rest is
 *   0, 1   a key (23 bytes) and a value; with 1 the checksum is made right, so that what is behind
 *          it is looked at, too. A sound value, read and written again, must be the same bytes.
 *   2      an LMDB file, for the audit.
 *
 * With libFuzzer (-Dfuzzers=true, clang) this is a fuzzer; else replay_main.c runs it over files.
 */
#include <stdlib.h>
#include <string.h>

#include "daemon/base/bytes.h"
#include "daemon/base/hash.h"
#include "tiers/index/audit.h"
#include "tiers/index/row.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define SEED 0x5eedull
#define VALUE_AT_HASH 4u

static const uint8_t *file_at;
static size_t file_bytes;

static ssize_t file_pread(int fd, void *at, size_t bytes, off_t offset)
{
    size_t left = (size_t)offset < file_bytes ? file_bytes - (size_t)offset : 0;

    (void)fd;
    bytes = KVT_MIN(bytes, left);
    memcpy(at, file_at + (bytes > 0 ? (size_t)offset : 0), bytes);
    return (ssize_t)bytes;
}

static void audit(const uint8_t *data, size_t size)
{
    static const struct kvt_index_lmdb io = {.pread = file_pread};
    struct kvt_index_audit report;
    char why[160] = "";
    int r;

    file_at = data;
    file_bytes = size;
    r = kvt_index_audit(&io, -1, size, &report, why, sizeof(why));
    if (r < 0 || (r == 0) != (why[0] == '\0'))
        abort();
    if (r == 0 && report.pages_count * report.page_bytes > size)
        abort();
}

static uint64_t hash_of(const uint8_t *key, const uint8_t *value, size_t bytes)
{
    uint8_t head[KVT_INDEX_KEY_BYTES + VALUE_AT_HASH];

    memcpy(head, key, KVT_INDEX_KEY_BYTES);
    memcpy(head + KVT_INDEX_KEY_BYTES, value, VALUE_AT_HASH);
    return kvt_hash64(value + VALUE_AT_HASH + 8, bytes - VALUE_AT_HASH - 8,
                      kvt_hash64(head, sizeof(head), SEED));
}

/* A sound one says the same when it is written again. */
static void again(const uint8_t *key_bytes, const uint8_t *value, size_t bytes)
{
    static uint32_t tokens[KVT_BLOCK_TOKENS_MAX];
    uint8_t key_again[KVT_INDEX_KEY_BYTES], value_again[KVT_INDEX_VALUE_BYTES_MAX];
    uint64_t slots[KVT_RANKS_MAX], runs[KVT_RANKS_MAX];
    struct kvt_index_put put = {.kind = KVT_INDEX_PUT_ROW};
    struct kvt_index_row_shape shape;
    uint8_t type;

    kvt_index_key_read(key_bytes, &put.key, &type);
    kvt_index_key_write(key_again, &put.key, type);
    if (memcmp(key_again, key_bytes, KVT_INDEX_KEY_BYTES) != 0)
        abort();
    if (type == KVT_INDEX_TYPE_ROW) {
        kvt_index_row_read(value, &put, tokens);
        kvt_index_row_shape_of(value, &shape);
        if (!kvt_index_put_is_sound(&put) || shape.parts_count > KVT_INDEX_PARTS_MAX ||
            kvt_index_row_write(value_again, key_bytes, SEED, &put) != bytes)
            abort();
    } else if (type >= KVT_INDEX_TYPE_PART) {
        kvt_index_part_read(value, tokens);
        if (4ul * kvt_index_part_tokens_count(value) + KVT_INDEX_PART_FIXED_BYTES != bytes)
            abort();
        return;
    } else {
        put.kind = KVT_INDEX_PUT_COPY;
        put.component = (uint16_t)(type - KVT_INDEX_TYPE_COPY);
        kvt_index_copy_read(value, &put, slots, runs);
        if (kvt_index_put_is_sound(&put) == (put.content == 0) ||
            kvt_index_copy_write(value_again, key_bytes, SEED, &put) != bytes)
            abort();
    }
    if (memcmp(value_again, value, bytes) != 0)
        abort();
}

static void row(const uint8_t *data, size_t size, bool is_sealed)
{
    const uint8_t *key = data;
    size_t bytes = size - KVT_INDEX_KEY_BYTES;
    uint8_t *value = malloc(bytes); /* exactly as long: a read beyond it is seen */

    if (value == NULL)
        return;
    memcpy(value, data + KVT_INDEX_KEY_BYTES, bytes);
    if (is_sealed && bytes >= KVT_INDEX_PART_FIXED_BYTES)
        kvt_put_u64(value, VALUE_AT_HASH, hash_of(key, value, bytes));
    if (kvt_index_value_is_sound(key, SEED, value, bytes))
        again(key, value, bytes);
    free(value);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const uint8_t id[16];

    if (size == 0)
        return 0;
    if (data[0] == 2)
        audit(data + 1, size - 1);
    else if (size > 1 + KVT_INDEX_KEY_BYTES)
        row(data + 1, size - 1, data[0] == 1);
    (void)kvt_index_meta_check(data + 1, size - 1, id, id);
    return 0;
}
