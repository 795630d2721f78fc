/* The scan against images that are made here, so that what it must find is known: whole slots of
 * several sizes anywhere, and between and inside them all that is not one: torn slots, slots of
 * another epoch, namespace or store, slots that were written over, garbage. Then the same with
 * reads that fail. Seeds are printed. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "daemon/base/alloc.h"
#include "daemon/base/hash.h"
#include "tests/common/alloc_fault.h"
#include "tests/common/cmocka.h"
#include "tiers/index/scan.h"
#include "tiers/slab.h"

#define IMAGE_BYTES (6u << 20)
#define DATA_OFFSET 8192u
#define READ_BYTES 65536u
#define PLACE 4096u
#define SLOTS_MAX 2048u

struct expected {
    uint64_t offset, bytes, block_id, generation;
    uint32_t ns, component, rank;
    uint32_t found;
};

struct image {
    uint8_t *bytes;
    uint64_t random, used;
    struct expected slots[SLOTS_MAX];
    uint32_t count;
    uint64_t id_next;
    uint32_t torn, others, bad_headers;
    /* Reads */
    uint64_t fail_one_of; /* 0: none fails */
    uint64_t limit;       /* the file ends there; 0: nowhere */
    bool is_failed[IMAGE_BYTES / READ_BYTES];
    uint64_t done;
    uint32_t stop_after; /* slots; 0: never */
    uint64_t stop_at;    /* bytes; 0: never */
    uint32_t reported;
};

static const uint8_t store_id[KVT_STORE_ID_BYTES] = {1, 2, 3, 4, 5, 6, 7, 8, 9};

static const struct kvt_index_ns namespaces[KVT_NAMESPACES_MAX] = {
    [3] = {.is_used = true,
           .fingerprint = {3},
           .epoch = 7,
           .block_tokens = 16,
           .components_count = 2,
           .shards = {2, 1}},
    [9] = {.is_used = true,
           .fingerprint = {9},
           .epoch = 2,
           .block_tokens = KVT_BLOCK_TOKENS_MAX,
           .components_count = 1,
           .shards = {1}},
};

static uint64_t pick(struct image *image, uint64_t count)
{
    image->random ^= image->random << 13;
    image->random ^= image->random >> 7;
    image->random ^= image->random << 17;
    return image->random % count;
}

static ssize_t image_read(void *ctx, int fd, void *data, size_t bytes, uint64_t offset)
{
    struct image *image = ctx;
    uint64_t end = DATA_OFFSET + (image->limit != 0 ? image->limit : IMAGE_BYTES);
    uint64_t piece = (offset - DATA_OFFSET) / READ_BYTES;

    (void)fd; /* on the reading thread: an assertion of cmocka would jump out of it */
    KVT_ASSERT(offset >= DATA_OFFSET && offset % PLACE == 0 && bytes % PLACE == 0);
    KVT_ASSERT(offset + bytes <= DATA_OFFSET + IMAGE_BYTES);
    if (image->fail_one_of != 0 && (piece * 2654435761u >> 4) % image->fail_one_of == 0) {
        image->is_failed[piece] = true;
        errno = piece % 2 == 0 ? EIO : EINTR;
        if (errno == EIO)
            return -1;
        /* A short read that is no use, of the last byte of nothing. */
        return PLACE - 1;
    }
    if (offset >= end)
        return 0;
    bytes = KVT_MIN(bytes, end - offset);
    /* Reads may be short; what is missing is asked for again. */
    if (bytes > PLACE && piece % 3 == 1)
        bytes = kvt_round_down(bytes / 2, PLACE) + 100;
    memcpy(data, image->bytes + (offset - DATA_OFFSET), bytes);
    return (ssize_t)bytes;
}

/* Writes a whole slot at @at; returns its bytes. */
static uint64_t slot_put(struct image *image, uint64_t at, const struct kvt_slot_info *info)
{
    uint8_t *slot = image->bytes + at;
    uint32_t header_bytes = kvt_slot_header_bytes(info->block_tokens);
    static uint32_t tokens[KVT_BLOCK_TOKENS_MAX];

    for (uint32_t i = 0; i < info->block_tokens; i++)
        tokens[i] = (uint32_t)info->block_id * 31 + i;
    kvt_slot_header_write(slot, info, tokens);
    for (uint64_t i = 0; i < info->payload_bytes; i++)
        slot[header_bytes + i] = (uint8_t)(i * 7 + info->generation);
    kvt_slot_header_seal(slot, kvt_hash64(slot + header_bytes, info->payload_bytes, 0));
    return kvt_slot_bytes(info->block_tokens, info->payload_bytes);
}

static struct kvt_slot_info info_random(struct image *image, uint64_t payload_max)
{
    uint32_t ns = pick(image, 4) == 0 ? 9 : 3;
    struct kvt_slot_info info = {.epoch = namespaces[ns].epoch,
                                 .block_id = ++image->id_next,
                                 .parent_id = pick(image, 3),
                                 .generation = image->id_next * 5,
                                 .payload_bytes = pick(image, payload_max),
                                 .block_tokens = namespaces[ns].block_tokens};

    if (pick(image, 8) == 0) /* ends with its header, or with a place */
        info.payload_bytes = pick(image, 2) * (PLACE - 512);
    info.component = (uint16_t)pick(image, namespaces[ns].components_count);
    info.rank = (uint16_t)pick(image, namespaces[ns].shards[info.component]);
    memcpy(info.fingerprint, namespaces[ns].fingerprint, sizeof(info.fingerprint));
    memcpy(info.store_id, store_id, sizeof(store_id));
    return info;
}

static uint64_t slot_whole(struct image *image, uint64_t at, uint64_t payload_max)
{
    struct kvt_slot_info info = info_random(image, payload_max);
    uint64_t bytes = slot_put(image, at, &info);

    assert_true(image->count < SLOTS_MAX);
    image->slots[image->count++] = (struct expected){.offset = at,
                                                     .bytes = bytes,
                                                     .block_id = info.block_id,
                                                     .generation = info.generation,
                                                     .ns = info.block_tokens == 16 ? 3 : 9,
                                                     .component = info.component,
                                                     .rank = info.rank};
    return bytes;
}

/* One that is whole and not wanted. */
static uint64_t slot_other(struct image *image, uint64_t at)
{
    struct kvt_slot_info info = info_random(image, 30000);
    bool is_ours = true;

    switch (pick(image, 8)) {
    case 0:
        info.epoch--;
        break;
    case 1:
        info.epoch++;
        break;
    case 2:
        info.fingerprint[31] = 1;
        break;
    case 3:
        info.component = 2;
        break;
    case 4:
        info.rank = 2;
        break;
    case 5:
        info.block_tokens = 17;
        break;
    case 6:
        info.block_id = 0;
        break;
    default:
        info.store_id[15] ^= 1;
        is_ours = false;
        break;
    }
    image->others += is_ours;
    return slot_put(image, at, &info);
}

/* A slot with one bit of it flipped, header or payload. */
static uint64_t slot_torn(struct image *image, uint64_t at)
{
    struct kvt_slot_info info = info_random(image, 100000);
    uint32_t header_bytes = kvt_slot_header_bytes(info.block_tokens);
    uint64_t bytes = slot_put(image, at, &info), where;

    if (pick(image, 2) == 0 && info.payload_bytes > 0) {
        where = header_bytes + pick(image, info.payload_bytes);
        image->torn++;
    } else { /* not the magic, version, store id or lengths: it still looks like one of ours */
        where = 16 + pick(image, 100);
        image->bad_headers++;
    }
    image->bytes[at + where] ^= (uint8_t)(1u << pick(image, 8));
    return bytes;
}

/* A large slot, in which smaller ones were written since. */
static uint64_t slot_written_over(struct image *image, uint64_t at)
{
    struct kvt_slot_info info = info_random(image, 100);
    uint64_t bytes, inside;

    info.payload_bytes = 100000 + pick(image, 200000);
    bytes = slot_put(image, at, &info);
    image->torn++;
    inside =
        kvt_round_up(kvt_slot_header_bytes(info.block_tokens), PLACE) + pick(image, 10) * PLACE;
    do
        inside += slot_whole(image, at + inside, 9000) + pick(image, 3) * PLACE;
    while (inside + 60000 < bytes);
    return bytes;
}

/* A whole slot whose payload is made of slots of a store that is not ours: it holds all the same.
 */
static uint64_t slot_with_slots_inside(struct image *image, uint64_t at)
{
    struct kvt_slot_info inner = info_random(image, 9000), outer = info_random(image, 100);
    uint32_t header_bytes = kvt_slot_header_bytes(outer.block_tokens);
    uint64_t bytes, from = kvt_round_up(header_bytes, PLACE);

    inner.store_id[0] ^= 1;
    outer.payload_bytes = 300000;
    bytes = slot_put(image, at, &outer);
    if (pick(image, 2) == 0) { /* or headers of ours that are not whole, at every place */
        memcpy(inner.store_id, store_id, sizeof(store_id));
        inner.block_tokens = 16;
        for (; from + PLACE < bytes; from += PLACE) {
            static const uint32_t tokens[16];

            kvt_slot_header_write(image->bytes + at + from, &inner, tokens);
            image->bad_headers++;
        }
    }
    while (from + 60000 < bytes)
        from += slot_put(image, at + from, &inner);
    kvt_slot_header_seal(image->bytes + at,
                         kvt_hash64(image->bytes + at + header_bytes, outer.payload_bytes, 0));
    image->slots[image->count++] = (struct expected){.offset = at,
                                                     .bytes = bytes,
                                                     .block_id = outer.block_id,
                                                     .generation = outer.generation,
                                                     .ns = outer.block_tokens == 16 ? 3 : 9,
                                                     .component = outer.component,
                                                     .rank = outer.rank};
    return bytes;
}

static struct image *image_new(uint64_t seed)
{
    struct image *image = calloc(1, sizeof(*image));
    uint64_t at = 0;

    image->random = seed * 0x9e3779b97f4a7c15ull + 1;
    image->bytes = malloc(IMAGE_BYTES);
    for (uint64_t i = 0; i < IMAGE_BYTES; i++)
        image->bytes[i] = (uint8_t)(i * 2654435761u >> 11);
    while (at + 600000 < IMAGE_BYTES && image->count + 200 < SLOTS_MAX) {
        switch (pick(image, 10)) {
        case 0:
            at += slot_other(image, at);
            break;
        case 1:
            at += slot_torn(image, at);
            break;
        case 2:
            at += slot_written_over(image, at);
            break;
        case 3:
            at += slot_with_slots_inside(image, at);
            break;
        case 4:
            at += pick(image, 20) * PLACE;
            break;
        case 5:
            at += slot_whole(image, at, 250000);
            break;
        default:
            at += slot_whole(image, at, 12000);
        }
    }
    /* Headers that promise more than there is, and one that is cut. */
    for (at = kvt_round_up(at, PLACE); at + PLACE <= IMAGE_BYTES; at += PLACE) {
        struct kvt_slot_info info = info_random(image, 1);

        info.payload_bytes = 1u << 20;
        info.block_tokens = at + PLACE == IMAGE_BYTES ? KVT_BLOCK_TOKENS_MAX : 16;
        if (pick(image, 4) == 0 || at + PLACE == IMAGE_BYTES) {
            static uint8_t header[33280];
            static const uint32_t tokens[KVT_BLOCK_TOKENS_MAX];

            kvt_slot_header_write(header, &info, tokens);
            kvt_slot_header_seal(header, 1);
            memcpy(image->bytes + at, header, PLACE);
            image->bad_headers++;
        }
    }
    return image;
}

static void image_free(struct image *image)
{
    free(image->bytes);
    free(image);
}

static int on_found(void *ctx, const struct kvt_scan_slot *slot)
{
    struct image *image = ctx;

    for (uint32_t i = 0; i < image->count; i++) {
        struct expected *expected = &image->slots[i];

        if (expected->offset != slot->offset_bytes)
            continue;
        assert_int_equal(expected->found++, 0);
        assert_int_equal(slot->slot_bytes, expected->bytes);
        assert_int_equal(slot->run_offset_bytes, expected->offset); /* units of 4 KiB here */
        assert_int_equal(slot->ns, expected->ns);
        assert_int_equal(slot->info->block_id, expected->block_id);
        assert_int_equal(slot->info->generation, expected->generation);
        assert_int_equal(slot->info->component, expected->component);
        assert_int_equal(slot->info->rank, expected->rank);
        for (uint32_t t = 0; t < slot->info->block_tokens; t++)
            assert_int_equal(slot->tokens[t], (uint32_t)slot->info->block_id * 31 + t);
        image->reported++;
        return image->reported == image->stop_after ? 42 : 0;
    }
    fail_msg("a slot at %llu that is none", (unsigned long long)slot->offset_bytes);
    return 0;
}

static int on_progress(void *ctx, uint64_t done_bytes, uint64_t total_bytes)
{
    struct image *image = ctx;

    assert_int_equal(total_bytes, IMAGE_BYTES);
    assert_true(done_bytes > image->done && done_bytes <= total_bytes);
    image->done = done_bytes;
    return image->stop_at != 0 && done_bytes >= image->stop_at ? 43 : 0;
}

static int image_scan(struct image *image, struct kvt_scan_report *ret_report)
{
    struct kvt_scan_config config = {.path = "/dev/null",
                                     .data_offset_bytes = DATA_OFFSET,
                                     .data_bytes = IMAGE_BYTES + 17,
                                     .namespaces = namespaces,
                                     .unit_bytes = PLACE,
                                     .read_bytes = READ_BYTES,
                                     .pread = image_read,
                                     .pread_ctx = image};
    struct kvt_scan_calls calls = {.found = on_found, .progress = on_progress, .ctx = image};

    memcpy(config.store_id, store_id, sizeof(store_id));
    return kvt_scan_run(&config, &calls, ret_report);
}

static uint64_t seed_first(uint64_t *ret_count)
{
    const char *text = getenv("KVT_SEED");
    uint64_t first = text != NULL ? strtoull(text, NULL, 10) : 1;

    print_message("seeds from %llu (set KVT_SEED)\n", (unsigned long long)first);
    *ret_count = text != NULL ? 1 : 20;
    return first;
}

static void test_finds_all(void **state)
{
    uint64_t count, first = seed_first(&count);

    (void)state;
    for (uint64_t seed = first; seed < first + count; seed++) {
        struct image *image = image_new(seed);
        struct kvt_scan_report report;

        assert_int_equal(image_scan(image, &report), 0);
        for (uint32_t i = 0; i < image->count; i++)
            if (image->slots[i].found != 1)
                fail_msg("seed %llu: the slot at %llu was not found", (unsigned long long)seed,
                         (unsigned long long)image->slots[i].offset);
        assert_int_equal(report.slots, image->count);
        assert_int_equal(report.torn, image->torn);
        assert_int_equal(report.others, image->others);
        assert_int_equal(report.bad_headers, image->bad_headers);
        assert_int_equal(report.read_bytes, IMAGE_BYTES);
        assert_int_equal(report.skipped_bytes, 0);
        assert_int_equal(image->done, IMAGE_BYTES);
        assert_true(report.block_id_max > 0 && report.block_id_max <= image->id_next);
        assert_true(report.generation_max <= image->id_next * 5);
        image_free(image);
    }
}

/* What lies in pieces that can be read is found; nothing else is. */
static void test_reads_that_fail(void **state)
{
    uint64_t count, first = seed_first(&count);

    (void)state;
    for (uint64_t seed = first; seed < first + count; seed++) {
        struct image *image = image_new(seed);
        struct kvt_scan_report report;
        uint64_t skipped = 0;

        image->fail_one_of = 2 + seed % 9;
        assert_int_equal(image_scan(image, &report), 0);
        for (uint32_t i = 0; i < KVT_COUNT_OF(image->is_failed); i++)
            skipped += image->is_failed[i] * READ_BYTES;
        assert_int_equal(report.skipped_bytes, skipped);
        assert_int_equal(report.read_bytes, IMAGE_BYTES - skipped);
        assert_true(skipped > 0 && report.slots > 0);
        for (uint32_t i = 0; i < image->count; i++) {
            const struct expected *slot = &image->slots[i];
            bool is_readable = true;

            for (uint64_t at = slot->offset; at < slot->offset + slot->bytes; at += PLACE)
                is_readable &= !image->is_failed[at / READ_BYTES];
            assert_int_equal(slot->found, is_readable);
        }
        image_free(image);
    }
}

static void test_file_is_cut(void **state)
{
    struct image *image = image_new(5);
    struct kvt_scan_report report;

    (void)state;
    image->limit = IMAGE_BYTES / 2 + 5 * PLACE + 1000; /* in the middle of a read and a place */
    assert_int_equal(image_scan(image, &report), 0);
    for (uint32_t i = 0; i < image->count; i++)
        assert_int_equal(image->slots[i].found,
                         image->slots[i].offset + image->slots[i].bytes <= image->limit);
    assert_int_equal(report.read_bytes, kvt_round_down(image->limit, PLACE));
    assert_int_equal(report.skipped_bytes, IMAGE_BYTES - report.read_bytes);
    image_free(image);
}

static void test_calls_end_it(void **state)
{
    struct image *image = image_new(6);
    struct kvt_scan_report report;

    (void)state;
    image->stop_after = 3;
    assert_int_equal(image_scan(image, &report), 42);
    assert_int_equal(image->reported, 3);
    assert_int_equal(report.slots, 3);
    image_free(image);
    image = image_new(6);
    image->stop_at = IMAGE_BYTES / 3;
    assert_int_equal(image_scan(image, &report), 43);
    assert_int_equal(report.read_bytes, kvt_round_up(IMAGE_BYTES / 3, READ_BYTES));
    image_free(image);
}

/* A real file, with whole reads as they are by default. */
static void test_file(void **state)
{
    struct image *image = image_new(7);
    char path[] = "index-scan-XXXXXX";
    struct kvt_scan_config config = {.path = path,
                                     .data_offset_bytes = DATA_OFFSET,
                                     .data_bytes = IMAGE_BYTES,
                                     .unit_bytes = PLACE,
                                     .namespaces = namespaces};
    struct kvt_scan_calls calls = {.found = on_found, .ctx = image};
    struct kvt_scan_report report;
    int fd = mkstemp(path);

    (void)state;
    assert_true(fd >= 0);
    assert_int_equal(pwrite(fd, image->bytes, IMAGE_BYTES, DATA_OFFSET), IMAGE_BYTES);
    memcpy(config.store_id, store_id, sizeof(store_id));
    assert_int_equal(kvt_scan_run(&config, &calls, &report), 0);
    assert_int_equal(report.slots, image->count);
    assert_int_equal(report.read_bytes, IMAGE_BYTES);
    assert_int_equal(close(fd) | unlink(path), 0);
    assert_int_equal(kvt_scan_run(&config, &calls, &report), -ENOENT);
    config.path = "/dev/null";
    config.read_bytes = 5000;
    assert_int_equal(kvt_scan_run(&config, &calls, &report), -EINVAL);
    image_free(image);
}

static void test_no_memory(void **state)
{
    struct image *image = image_new(8);
    struct kvt_scan_report report;

    (void)state;
    for (uint32_t n = 0; n < 2; n++) {
        struct alloc_fault fault = {.fail_at = n + 1};

        kvt_alloc_set_fault(alloc_fault_nth, &fault);
        assert_int_equal(image_scan(image, &report), -ENOMEM);
        kvt_alloc_set_fault(NULL, NULL);
        assert_int_equal(report.read_bytes, 0);
    }
    image_free(image);
}

/* Where a slab begins follows from where a slot lies, for every slab that the allocator makes. */
static void test_run_offsets(void **state)
{
    struct kvt_slab_config config = {
        .capacity_bytes = 100 * 2 * KVT_MIB, .unit_bytes = 2 * KVT_MIB, .align_bytes = PLACE};
    uint64_t random = 12345;

    (void)state;
    for (uint32_t i = 0; i < 400; i++) {
        uint64_t slot_bytes = (1 + i) * PLACE;
        struct kvt_slab *slab;
        struct kvt_slot slot, blocker;
        uint32_t class_idx, other;

        if (i >= 200)
            slot_bytes = (1 + (random = random * 6364136223846793005ull + 1) % 3000) * PLACE;
        assert_int_equal(kvt_slab_new(&slab, &config), 0);
        assert_int_equal(kvt_slab_class(slab, slot_bytes, &class_idx), 0);
        /* Some units are somebody else's, so that some slabs are shorter than they should be. */
        assert_int_equal(kvt_slab_class(slab, 2 * KVT_MIB, &other), 0);
        for (uint32_t u = 7; u < 100; u += 3 + i % 11)
            assert_int_equal(
                kvt_slab_adopt(slab, other, u * 2 * KVT_MIB, u * 2 * KVT_MIB, 0, &blocker), 0);
        while (kvt_slab_take(slab, class_idx, 1, &slot) == 0) {
            uint64_t offset = kvt_slab_offset(slab, slot);

            assert_int_equal(kvt_scan_run_offset(offset, slot_bytes, 2 * KVT_MIB),
                             kvt_slab_run_offset(slab, slot));
        }
        (void)kvt_slab_free(slab);
    }
    assert_int_equal(kvt_scan_run_offset(PLACE, 2 * PLACE, 2 * KVT_MIB), UINT64_MAX);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_finds_all),   cmocka_unit_test(test_reads_that_fail),
        cmocka_unit_test(test_file_is_cut), cmocka_unit_test(test_calls_end_it),
        cmocka_unit_test(test_file),        cmocka_unit_test(test_no_memory),
        cmocka_unit_test(test_run_offsets),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
