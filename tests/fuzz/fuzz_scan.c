/* The scan over images that the input describes, since bytes alone would hardly ever be a slot:
 * what it reports must be whole, ours and in order, whatever lies around and inside it.
 *
 * The input is a list of commands of 8 bytes: command, place, u16 a, u16 b, u16 c (little-endian).
 *   0  a whole slot: b % 3 chooses its tokens, a its payload's length, c its block id
 *   1  the byte at a of the place becomes b
 *   2  the same, and the header at the place is sealed again: a header that is odd but whole
 *   3  b places from the place on are copied to place a
 *   4  the 8 bytes from here on are copied to a of the place
 *   5  reads of the piece of the place come short (a % 2: not at all)
 *
 * With libFuzzer (-Dfuzzers=true, clang) this is a fuzzer; else replay_main.c runs it over files.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/bytes.h"
#include "daemon/base/hash.h"
#include "tiers/index/scan.h"

#define PLACE 4096u
#define PLACES 96u
#define IMAGE_BYTES (PLACES * PLACE)
#define READ_BYTES 65536u
#define COMMANDS_MAX 400u

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static const uint8_t store_id[KVT_STORE_ID_BYTES] = {0xaa, 1, 2, 3};
static const struct kvt_index_ns namespaces[KVT_NAMESPACES_MAX] = {
    [0] = {.is_used = true,
           .epoch = 1,
           .block_tokens = 1,
           .components_count = 8,
           .shards = {1, 2, 3, 4, 5, 6, 7, 16}},
    [5] = {.is_used = true,
           .fingerprint = {5},
           .block_tokens = 900,
           .components_count = 1,
           .shards = {1}},
    [63] = {.is_used = true,
            .fingerprint = {63},
            .block_tokens = KVT_BLOCK_TOKENS_MAX,
            .components_count = 1,
            .shards = {1}},
};
static const uint32_t kinds[3] = {0, 5, 63};

struct image {
    uint8_t bytes[IMAGE_BYTES];
    uint8_t broken[IMAGE_BYTES / READ_BYTES];
    uint64_t behind; /* what was reported last ends there */
};

static void put_slot(struct image *image, uint32_t place, uint32_t a, uint32_t b, uint32_t c)
{
    static uint32_t tokens[KVT_BLOCK_TOKENS_MAX];
    const struct kvt_index_ns *ns = &namespaces[kinds[b % 3]];
    uint32_t header_bytes = kvt_slot_header_bytes(ns->block_tokens);
    uint8_t *slot = image->bytes + place * PLACE;
    struct kvt_slot_info info = {.epoch = ns->epoch,
                                 .block_id = c,
                                 .generation = c,
                                 .payload_bytes = a,
                                 .block_tokens = ns->block_tokens};

    if (place * PLACE + header_bytes + a > IMAGE_BYTES)
        return;
    memcpy(info.fingerprint, ns->fingerprint, sizeof(info.fingerprint));
    memcpy(info.store_id, store_id, sizeof(store_id));
    tokens[0] = c;
    kvt_slot_header_write(slot, &info, tokens);
    kvt_slot_header_seal(slot, kvt_hash64(slot + header_bytes, a, 0));
}

static void command(struct image *image, const uint8_t at[8], const uint8_t *next)
{
    uint32_t place = at[1] % PLACES, a = kvt_get_u16(at, 2), b = kvt_get_u16(at, 4);
    uint8_t *bytes = image->bytes + place * PLACE;
    uint32_t header_bytes, count;

    switch (at[0] % 6) {
    case 0:
        put_slot(image, place, a, b, kvt_get_u16(at, 6));
        break;
    case 1:
    case 2:
        bytes[a % PLACE] = (uint8_t)b;
        if (at[0] % 6 == 2 && kvt_slot_header_guess(bytes, store_id, &header_bytes) &&
            place * PLACE + header_bytes <= IMAGE_BYTES)
            kvt_slot_header_seal(bytes, kvt_slot_payload_hash(bytes));
        break;
    case 3:
        a %= PLACES;
        count = KVT_MIN(b % PLACES, PLACES - KVT_MAX(a, place));
        memmove(image->bytes + a * PLACE, bytes, count * PLACE);
        break;
    case 4:
        memcpy(bytes + a % (PLACE - 8), next, 8);
        break;
    default:
        image->broken[place * PLACE / READ_BYTES] = (uint8_t)(1 + a % 2);
        break;
    }
}

static ssize_t image_read(void *ctx, int fd, void *data, size_t bytes, uint64_t offset)
{
    const struct image *image = ctx;

    (void)fd;
    if (offset + bytes > IMAGE_BYTES)
        abort();
    if (image->broken[offset / READ_BYTES] == 1 && offset % READ_BYTES == 0)
        bytes = 5 * PLACE + 77;
    else if (image->broken[offset / READ_BYTES] != 0) {
        errno = EIO;
        return -1;
    }
    memcpy(data, image->bytes + offset, KVT_MIN(bytes, IMAGE_BYTES - offset));
    return (ssize_t)KVT_MIN(bytes, IMAGE_BYTES - offset);
}

static int on_found(void *ctx, const struct kvt_scan_slot *slot)
{
    struct image *image = ctx;
    const struct kvt_slot_info *info = slot->info;
    const struct kvt_index_ns *ns = &namespaces[slot->ns];
    struct kvt_slot_key key = {.block_id = info->block_id,
                               .generation = info->generation,
                               .payload_bytes = info->payload_bytes,
                               .component = info->component,
                               .rank = info->rank,
                               .block_tokens = info->block_tokens,
                               .identity = kvt_slot_identity(info, slot->tokens)};

    if (slot->offset_bytes < image->behind || slot->offset_bytes % PLACE != 0 ||
        slot->offset_bytes + slot->slot_bytes > IMAGE_BYTES ||
        slot->slot_bytes != kvt_slot_bytes(info->block_tokens, info->payload_bytes))
        abort();
    if (kvt_slot_check(image->bytes + slot->offset_bytes, &key) != KVT_SLOT_OK)
        abort();
    if (!ns->is_used || memcmp(info->store_id, store_id, sizeof(store_id)) != 0 ||
        memcmp(info->fingerprint, ns->fingerprint, sizeof(info->fingerprint)) != 0 ||
        info->epoch != ns->epoch || info->rank >= ns->shards[info->component])
        abort();
    if ((slot->offset_bytes - slot->run_offset_bytes) % slot->slot_bytes != 0)
        abort();
    image->behind = slot->offset_bytes + slot->slot_bytes;
    return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static struct image image;
    struct kvt_scan_config config = {.path = "/dev/null",
                                     .data_bytes = IMAGE_BYTES,
                                     .namespaces = namespaces,
                                     .unit_bytes = 8 * PLACE,
                                     .read_bytes = READ_BYTES,
                                     .pread = image_read,
                                     .pread_ctx = &image};
    struct kvt_scan_calls calls = {.found = on_found, .ctx = &image};
    struct kvt_scan_report report;

    memset(&image, 0, sizeof(image));
    for (size_t at = 0; at + 16 <= size && at < COMMANDS_MAX * 8u; at += 8)
        command(&image, data + at, data + at + 8);
    memcpy(config.store_id, store_id, sizeof(store_id));
    if (kvt_scan_run(&config, &calls, &report) != 0 ||
        report.read_bytes + report.skipped_bytes != IMAGE_BYTES)
        abort();
    return 0;
}
