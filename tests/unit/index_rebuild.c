/* A lost index is made anew: devices are made here, slot by slot, so that what the new index must
 * say is known. A naive oracle judges each block on its own: is there a slot of it and of all
 * before it, and which is the newest content of each component that has all its shards. Seeds are
 * printed.
 *
 * Files are made in the current directory. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "daemon/base/hash.h"
#include "tests/common/cmocka.h"
#include "tiers/index/rebuild.h"
#include "tiers/slab.h"

#define DATA_OFFSET 8192u
#define DATA_BYTES (24u << 20)
#define UNIT 65536u
#define BLOCKS_MAX 2600u
#define SLOTS_MAX 6000u
#define NO_PARENT UINT32_MAX

struct slot {
    uint32_t block, component, rank;
    uint64_t generation;
    struct kvt_slot place;
    uint64_t offset, run, bytes;
    bool is_whole; /* in the data, and of the present epoch */
};

struct block {
    uint32_t ns, parent; /* or NO_PARENT */
    uint32_t block_idx;
    uint64_t id;
    /* Judged */
    bool is_linked, is_wanted;
    uint32_t chosen[2]; /* the slot of rank 0; 0: none */
    uint32_t rows_seen, copies_seen[2];
};

struct device {
    uint64_t random;
    uint8_t *data;
    struct kvt_slab *slab;
    uint32_t classes[3];
    struct block blocks[BLOCKS_MAX];
    uint32_t blocks_count;
    struct slot slots[SLOTS_MAX]; /* from 1 on */
    uint32_t slots_count;
    uint64_t stamp, rows_visited, copies_visited;
    bool is_exact; /* all that was judged must be there; else some of it may be missing */
    uint32_t last_block;
    char index_path[32], data_path[48], mark_path[48], lock_path[48];
    struct kvt_index_db_config db;
    struct kvt_scan_config scan;
};

/* Components: of `2` two and one shards, of `40` one. */
static const struct kvt_index_ns spaces[2] = {
    {.is_used = true,
     .fingerprint = {2},
     .epoch = 5,
     .block_tokens = 16,
     .components_count = 2,
     .shards = {2, 1}},
    {.is_used = true,
     .fingerprint = {40},
     .epoch = 1,
     .block_tokens = 1500,
     .components_count = 1,
     .shards = {1}},
};
static const uint32_t numbers[2] = {2, 40};
static const uint64_t payloads[3] = {3000, 9000, 100}; /* classes: (0, 0), (0, 1), (1, 0) */

static uint64_t pick(struct device *device, uint64_t count)
{
    device->random ^= device->random << 13;
    device->random ^= device->random >> 7;
    device->random ^= device->random << 17;
    return device->random % count;
}

static uint32_t class_of(const struct block *block, uint32_t component)
{
    return block->ns == 0 ? component : 2;
}

static uint32_t token_of(const struct block *block, uint32_t i)
{
    return (uint32_t)block->id * 77 + i;
}

static void root_digest(const struct device *device, uint32_t block, uint8_t ret_digest[32])
{
    while (device->blocks[block].parent != NO_PARENT)
        block = device->blocks[block].parent;
    memset(ret_digest, (int)device->blocks[block].id, 32);
}

static bool extra_key(const struct block *block, uint8_t ret_key[KVT_EXTRA_KEY_BYTES])
{
    memset(ret_key, block->id % 3 == 0 ? (int)(block->id % 250 + 1) : 0, KVT_EXTRA_KEY_BYTES);
    return block->id % 3 == 0;
}

static struct device *device_new(uint64_t seed)
{
    struct device *device = calloc(1, sizeof(*device));
    struct kvt_slab_config slab = {
        .capacity_bytes = DATA_BYTES, .unit_bytes = UNIT, .align_bytes = 4096};
    int fd;

    device->random = seed * 0x9e3779b97f4a7c15ull + 1;
    device->data = calloc(1, DATA_BYTES);
    assert_int_equal(kvt_slab_new(&device->slab, &slab), 0);
    for (uint32_t c = 0; c < 3; c++)
        assert_int_equal(kvt_slab_class(device->slab,
                                        kvt_slot_bytes(spaces[c / 2].block_tokens, payloads[c]),
                                        &device->classes[c]),
                         0);
    (void)snprintf(device->index_path, sizeof(device->index_path), "index-rebuild-XXXXXX");
    fd = mkstemp(device->index_path); /* garbage, as far as the index is concerned */
    assert_true(fd >= 0 && close(fd) == 0);
    (void)snprintf(device->data_path, sizeof(device->data_path), "%s.d", device->index_path);
    (void)snprintf(device->mark_path, sizeof(device->mark_path), "%s.rebuild", device->index_path);
    (void)snprintf(device->lock_path, sizeof(device->lock_path), "%s.lock", device->index_path);
    device->db = (struct kvt_index_db_config){
        .path = device->index_path, .bytes = 32u << 20, .store_id = {1, 2}, .device_uuid = {3}};
    for (uint32_t i = 0; i < 2; i++)
        device->db.namespaces[numbers[i]] = spaces[i];
    device->scan = (struct kvt_scan_config){.path = device->data_path,
                                            .data_offset_bytes = DATA_OFFSET,
                                            .data_bytes = DATA_BYTES,
                                            .store_id = {1, 2},
                                            .namespaces = device->db.namespaces,
                                            .unit_bytes = UNIT};
    device->is_exact = true;
    return device;
}

static void device_free(struct device *device)
{
    (void)unlink(device->index_path);
    (void)unlink(device->data_path);
    (void)unlink(device->lock_path);
    (void)unlink(device->mark_path);
    (void)kvt_slab_free(device->slab);
    free(device->data);
    free(device);
}

static uint32_t block_add(struct device *device, uint32_t ns, uint32_t parent)
{
    struct block *block = &device->blocks[device->blocks_count];

    assert_true(device->blocks_count < BLOCKS_MAX);
    *block = (struct block){.ns = ns, .parent = parent, .id = ++device->stamp};
    if (parent != NO_PARENT)
        block->block_idx = device->blocks[parent].block_idx + 1;
    return device->blocks_count++;
}

/* One more slot, where the allocator has room; returns its number, or 0. */
static uint32_t slot_add(struct device *device, uint32_t number, uint32_t component, uint32_t rank,
                         uint64_t generation, uint64_t epoch)
{
    const struct block *block = &device->blocks[number];
    uint32_t class = class_of(block, component), tokens[1500], header_bytes;
    struct slot slot = {
        .block = number, .component = component, .rank = rank, .generation = generation};
    struct kvt_slot_info info = {
        .epoch = epoch,
        .block_id = block->id,
        .parent_id = block->parent != NO_PARENT ? device->blocks[block->parent].id : 0,
        .block_idx = block->block_idx,
        .generation = generation,
        .payload_bytes = payloads[class],
        .block_tokens = spaces[block->ns].block_tokens,
        .component = (uint16_t)component,
        .rank = (uint16_t)rank,
        .store_id = {1, 2}};
    uint8_t *at;

    assert_true(device->slots_count + 1 < SLOTS_MAX);
    if (kvt_slab_take(device->slab, device->classes[class], 0, &slot.place) != 0)
        return 0;
    slot.offset = kvt_slab_offset(device->slab, slot.place);
    slot.run = kvt_slab_run_offset(device->slab, slot.place);
    slot.bytes = kvt_slot_bytes(info.block_tokens, info.payload_bytes);
    slot.is_whole = epoch == spaces[block->ns].epoch;
    for (uint32_t i = 1; i <= device->slots_count; i++) /* what was there is not any more */
        if (device->slots[i].offset < slot.offset + slot.bytes &&
            slot.offset < device->slots[i].offset + device->slots[i].bytes)
            device->slots[i].is_whole = false;
    memcpy(info.fingerprint, spaces[block->ns].fingerprint, sizeof(info.fingerprint));
    root_digest(device, number, info.root_digest);
    (void)extra_key(block, info.extra_key);
    for (uint32_t i = 0; i < info.block_tokens; i++)
        tokens[i] = token_of(block, i);
    at = device->data + slot.offset;
    header_bytes = kvt_slot_header_bytes(info.block_tokens);
    kvt_slot_header_write(at, &info, tokens);
    memset(at + header_bytes, (int)generation, info.payload_bytes);
    kvt_slot_header_seal(at, kvt_hash64(at + header_bytes, info.payload_bytes, 0));
    device->slots[++device->slots_count] = slot;
    return device->slots_count;
}

/* The slot of a content's shard that is whole, or 0. */
static uint32_t slot_find(const struct device *device, uint32_t block, uint32_t component,
                          uint64_t generation, uint32_t rank)
{
    for (uint32_t i = 1; i <= device->slots_count; i++) {
        const struct slot *slot = &device->slots[i];

        if (slot->is_whole && slot->block == block && slot->component == component &&
            slot->generation == generation && slot->rank == rank)
            return i;
    }
    return 0;
}

/* The oracle: from slots to what the index must say. */
static void judge(struct device *device)
{
    static bool has_slot[BLOCKS_MAX];

    memset(has_slot, 0, sizeof(has_slot));
    for (uint32_t i = 1; i <= device->slots_count; i++) {
        const struct slot *slot = &device->slots[i];
        struct block *block = &device->blocks[slot->block];
        uint32_t *chosen = &block->chosen[slot->component];
        bool has_all = true;

        has_slot[slot->block] |= slot->is_whole;
        for (uint32_t r = 0; r < spaces[block->ns].shards[slot->component]; r++)
            has_all &= slot_find(device, slot->block, slot->component, slot->generation, r) != 0;
        if (has_all && (*chosen == 0 || device->slots[*chosen].generation < slot->generation))
            *chosen = slot_find(device, slot->block, slot->component, slot->generation, 0);
    }
    for (uint32_t i = 0; i < device->blocks_count; i++) {
        struct block *block = &device->blocks[i]; /* parents have lower numbers */

        block->is_linked =
            has_slot[i] && (block->parent == NO_PARENT || device->blocks[block->parent].is_linked);
    }
    for (uint32_t i = device->blocks_count; i > 0; i--) {
        struct block *block = &device->blocks[i - 1];

        block->is_wanted |= block->is_linked && (block->chosen[0] != 0 || block->chosen[1] != 0);
        if (block->is_wanted && block->parent != NO_PARENT)
            device->blocks[block->parent].is_wanted = true;
    }
}

static void see_row(struct device *device, const struct kvt_index_put *put)
{
    uint8_t digest[32], extra[KVT_EXTRA_KEY_BYTES];
    uint32_t i = 0;
    struct block *block;

    while (i < device->blocks_count && device->blocks[i].id != put->key.block_id)
        i++;
    assert_true(i < device->blocks_count);
    block = &device->blocks[i];
    assert_true(block->is_linked && block->is_wanted);
    assert_int_equal(block->rows_seen++, 0);
    assert_int_equal(put->key.ns, numbers[block->ns]);
    assert_int_equal(put->key.epoch, spaces[block->ns].epoch);
    assert_int_equal(put->key.block_idx, block->block_idx);
    assert_int_equal(put->parent_id,
                     block->parent != NO_PARENT ? device->blocks[block->parent].id : 0);
    assert_int_equal(put->tokens_count, spaces[block->ns].block_tokens);
    for (uint32_t t = 0; t < put->tokens_count; t++)
        assert_int_equal(put->tokens[t], token_of(block, t));
    if (extra_key(block, extra))
        assert_memory_equal(put->extra_key, extra, sizeof(extra));
    else
        assert_null(put->extra_key);
    if (block->parent == NO_PARENT) {
        root_digest(device, i, digest);
        assert_int_equal(put->root_key_bytes, 33);
        assert_int_equal(put->root_key[0], 0xd1);
        assert_memory_equal(put->root_key + 1, digest, sizeof(digest));
    } else {
        assert_int_equal(device->blocks[block->parent].rows_seen, 1);
        assert_null(put->root_key);
    }
    device->last_block = i;
    device->rows_visited++;
}

static void see_copy(struct device *device, const struct kvt_index_put *put)
{
    struct block *block = &device->blocks[device->last_block];
    const struct slot *chosen;
    uint32_t shards;

    assert_int_equal(put->key.block_id, block->id);
    assert_true(put->component < 2);
    assert_int_equal(block->copies_seen[put->component]++, 0);
    chosen = &device->slots[block->chosen[put->component]];
    shards = spaces[block->ns].shards[put->component];
    assert_int_equal(put->shards_count, shards);
    if (device->is_exact)
        assert_int_equal(put->content, chosen->generation);
    assert_int_equal(put->slot_bytes, chosen->bytes);
    for (uint32_t r = 0; r < shards; r++) {
        uint32_t i = slot_find(device, device->last_block, put->component, put->content, r);

        assert_int_not_equal(i, 0);
        if (put->slot_offsets[r] != device->slots[i].offset) { /* the same, written twice */
            device->slots[i].is_whole = false;
            i = slot_find(device, device->last_block, put->component, put->content, r);
            assert_int_not_equal(i, 0);
        }
        assert_int_equal(put->slot_offsets[r], device->slots[i].offset);
        assert_int_equal(put->run_offsets[r], device->slots[i].run);
    }
    device->copies_visited++;
}

static int visit(void *ctx, const struct kvt_index_put *put)
{
    if (put->kind == KVT_INDEX_PUT_ROW)
        see_row(ctx, put);
    else
        see_copy(ctx, put);
    return 0;
}

static void data_write(const struct device *device)
{
    int fd = open(device->data_path, O_WRONLY | O_CREAT | O_TRUNC, 0600);

    assert_true(fd >= 0);
    assert_int_equal(pwrite(fd, device->data, DATA_BYTES, DATA_OFFSET), DATA_BYTES);
    assert_int_equal(close(fd), 0);
}

/* Rebuilds, closes, opens again and walks. */
static void rebuild_and_walk(struct device *device, uint64_t memory_bytes,
                             struct kvt_index_rebuild_report *ret_report)
{
    struct kvt_index_rebuild_config config = {
        .db = &device->db, .scan = &device->scan, .memory_bytes = memory_bytes};
    struct kvt_index_db *db = NULL;
    struct kvt_index_loaded loaded;
    char why[KVT_INDEX_DB_WHY_BYTES];

    data_write(device);
    assert_int_equal(kvt_index_rebuild(&db, &config, ret_report, why), 0);
    assert_false(kvt_index_rebuild_is_due(device->index_path));
    (void)kvt_index_db_close(db);
    assert_int_equal(kvt_index_db_open(&db, &device->db, why), 0);
    assert_int_equal(kvt_index_db_walk(db, visit, device, &loaded), 0);
    assert_int_equal(loaded.rows, device->rows_visited);
    assert_int_equal(loaded.copies, device->copies_visited);
    (void)kvt_index_db_close(db);
}

static uint64_t seed_first(uint64_t *ret_count)
{
    const char *text = getenv("KVT_SEED");
    uint64_t first = text != NULL ? strtoull(text, NULL, 10) : 1;

    print_message("seeds from %llu (set KVT_SEED)\n", (unsigned long long)first);
    *ret_count = text != NULL ? 1 : 12;
    return first;
}

static void block_add_random(struct device *device)
{
    uint32_t ns = pick(device, 4) == 0, parent = NO_PARENT;

    for (int try = 0; try < 4 && device->blocks_count > 0 && parent == NO_PARENT; try++) {
        parent = (uint32_t)pick(device, device->blocks_count);
        if (device->blocks[parent].ns != ns)
            parent = NO_PARENT;
    }
    (void)block_add(device, ns, parent);
}

/* Contents of random blocks in random order; shards may be missing, torn, or there twice. */
static void contents_add(struct device *device, uint32_t count)
{
    for (uint32_t n = 0; n < count; n++) {
        uint32_t number = (uint32_t)pick(device, device->blocks_count);
        const struct kvt_index_ns *space = &spaces[device->blocks[number].ns];
        uint32_t component = (uint32_t)pick(device, space->components_count);
        uint64_t generation = 1 + pick(device, 1000000);
        uint64_t epoch = space->epoch - (pick(device, 10) == 0);

        if (number % 13 == 7) /* of some blocks there is nothing */
            continue;
        for (uint32_t rank = 0; rank < space->shards[component]; rank++) {
            uint64_t dice = pick(device, 12);
            uint32_t i =
                dice > 0 ? slot_add(device, number, component, rank, generation, epoch) : 0;

            if (i != 0 && dice == 1) {
                device->slots[i].is_whole = false;
                device->data[device->slots[i].offset + kvt_slot_header_bytes(space->block_tokens) +
                             7] ^= 1;
            }
            if (dice == 2)
                (void)slot_add(device, number, component, rank, generation, epoch);
        }
    }
}

static void test_oracle(void **state)
{
    uint64_t count, first = seed_first(&count);

    (void)state;
    for (uint64_t seed = first; seed < first + count; seed++) {
        struct device *device = device_new(seed);
        struct kvt_index_rebuild_report report;

        for (uint32_t i = 0; i < 200; i++)
            block_add_random(device);
        contents_add(device, 1400);
        judge(device);
        rebuild_and_walk(device, 0, &report);
        for (uint32_t i = 0; i < device->blocks_count; i++) {
            const struct block *block = &device->blocks[i];
            bool is_there = block->is_linked && block->is_wanted;

            assert_int_equal(block->rows_seen, is_there);
            for (uint32_t c = 0; c < 2; c++)
                assert_int_equal(block->copies_seen[c], is_there && block->chosen[c] != 0);
        }
        assert_int_equal(report.rows, device->rows_visited);
        assert_int_equal(report.copies, device->copies_visited);
        assert_true(device->copies_visited > 50 && report.partial > 0 && report.superseded > 0);
        assert_true(report.orphans > 0 && report.scan.torn > 0 && report.scan.others > 0);
        assert_int_equal(report.misfits + report.odd + report.left_out, 0);
        device_free(device);
    }
}

/* Takes the places of a block's content in @slab; gives them back when one is not to be had. */
static bool content_adopt(const struct device *device, struct kvt_slab *slab, uint32_t number,
                          uint32_t component)
{
    const struct block *block = &device->blocks[number];
    uint64_t generation = device->slots[block->chosen[component]].generation;
    uint32_t shards = spaces[block->ns].shards[component], taken = 0, class_idx;
    struct kvt_slot slots[2];

    while (taken < shards) {
        const struct slot *slot =
            &device->slots[slot_find(device, number, component, generation, taken)];

        assert_int_equal(kvt_slab_class(slab, slot->bytes, &class_idx), 0);
        if (kvt_slab_adopt(slab, class_idx, slot->offset, slot->run, 0, &slots[taken]) != 0)
            break;
        taken++;
    }
    if (taken == shards)
        return true;
    while (taken > 0)
        kvt_slab_give(slab, slots[--taken]);
    return false;
}

/* All that was put fits one allocator, and nothing that was left out would fit beside it. */
static void expect_best_fit(const struct device *device)
{
    struct kvt_slab_config config = {
        .capacity_bytes = DATA_BYTES, .unit_bytes = UNIT, .align_bytes = 4096};
    struct kvt_slab *slab;

    assert_int_equal(kvt_slab_new(&slab, &config), 0);
    for (uint32_t wanted = 2; wanted-- > 0;) /* those that are there first */
        for (uint32_t i = 0; i < device->blocks_count; i++)
            for (uint32_t c = 0; c < 2; c++)
                if (device->blocks[i].chosen[c] != 0 && device->blocks[i].copies_seen[c] == wanted)
                    assert_int_equal(content_adopt(device, slab, i, c), wanted);
    (void)kvt_slab_free(slab);
}

/* Slots come and go, and slabs with them: what the allocator holds in the end is newer than what
 * is left of earlier slabs, and must all be there; what else is there must fit beside it. */
static void test_reuse(void **state)
{
    uint64_t count, first = seed_first(&count), misfits = 0;

    (void)state;
    for (uint64_t seed = first; seed < first + count; seed++) {
        struct device *device = device_new(seed);
        struct kvt_index_rebuild_report report;
        uint32_t live[SLOTS_MAX], live_count = 0;

        device->is_exact = false;
        for (uint32_t n = 0; n < 2000; n++) {
            /* The mix of sizes changes, so that slabs of one take the units of another. */
            uint32_t ns = pick(device, 10) < (n / 250 % 2 == 0 ? 1u : 9u);
            uint32_t component = ns == 0 ? (uint32_t)pick(device, 2) : 0, number;

            while (live_count > 0 && (live_count > 120 || pick(device, 3) == 0)) {
                uint32_t k = (uint32_t)pick(device, live_count);

                kvt_slab_give(device->slab, device->slots[live[k]].place);
                live[k] = live[--live_count];
            }
            if (device->blocks_count + 1 >= BLOCKS_MAX)
                break;
            number = block_add(device, ns, NO_PARENT);
            device->stamp++;
            for (uint32_t rank = 0; rank < spaces[ns].shards[component]; rank++) {
                uint32_t i =
                    slot_add(device, number, component, rank, device->stamp, spaces[ns].epoch);

                if (i != 0)
                    live[live_count++] = i;
            }
        }
        judge(device);
        rebuild_and_walk(device, 0, &report);
        for (uint32_t k = 0; k < live_count; k++) {
            const struct slot *slot = &device->slots[live[k]];

            bool is_whole = device->blocks[slot->block].chosen[slot->component] != 0;

            assert_int_equal(device->blocks[slot->block].rows_seen, is_whole);
            assert_int_equal(device->blocks[slot->block].copies_seen[slot->component], is_whole);
        }
        expect_best_fit(device);
        misfits += report.misfits;
        device_free(device);
    }
    assert_true(misfits > 0);
}

/* A chain of blocks with many tokens, more than the map or the memory holds. */
static void test_no_room(void **state)
{
    static const uint64_t memories[] = {0, 500000};

    (void)state;
    for (uint32_t m = 0; m < KVT_COUNT_OF(memories); m++) {
        struct device *device = device_new(3);
        struct kvt_index_rebuild_report report;
        uint32_t block = NO_PARENT;

        device->db.bytes = 8 * KVT_MIB;
        for (uint32_t i = 0; i < 2000; i++) {
            block = block_add(device, 1, i % 50 == 0 ? NO_PARENT : block);
            assert_int_not_equal(slot_add(device, block, 0, 0, i + 1, 1), 0);
        }
        judge(device);
        rebuild_and_walk(device, memories[m], &report);
        assert_true(report.left_out > 0);
        assert_true(device->rows_visited >= (memories[m] == 0 ? 300 : 50));
        assert_true(device->rows_visited < 2000);
        device_free(device);
    }
}

/* Paths that grew side by side: the file is as full as that of a daemon, which appends. */
static void test_full_pages(void **state)
{
    enum { PATHS = 40, TURN = 20, BLOCKS = 1600 };
    struct device *device = device_new(5);
    struct kvt_index_rebuild_config config = {.db = &device->db, .scan = &device->scan};
    struct kvt_index_rebuild_report report;
    struct kvt_index_db *db = NULL;
    struct kvt_index_db_stats stats;
    char why[KVT_INDEX_DB_WHY_BYTES];
    uint32_t ends[PATHS];

    (void)state;
    for (uint32_t i = 0; i < BLOCKS; i++) {
        uint32_t *end = &ends[i / TURN % PATHS];
        bool is_first = i / TURN < PATHS && i % TURN == 0;

        *end = block_add(device, 0, is_first ? NO_PARENT : *end);
        assert_int_not_equal(slot_add(device, *end, 1, 0, i + 1, spaces[0].epoch), 0);
    }
    data_write(device);
    assert_int_equal(kvt_index_rebuild(&db, &config, &report, why), 0);
    assert_int_equal(report.rows, BLOCKS);
    assert_int_equal(report.copies, BLOCKS);
    kvt_index_db_stats(db, &stats);
    assert_true(stats.used_bytes / BLOCKS < 350); /* half as much again where pages are split */
    (void)kvt_index_db_close(db);
    device_free(device);
}

static int on_progress(void *ctx, uint64_t done_bytes, uint64_t total_bytes)
{
    uint64_t *done = ctx;

    assert_int_equal(total_bytes, DATA_BYTES);
    *done = done_bytes;
    return 0;
}

static void test_cut_short(void **state)
{
    struct device *device = device_new(4);
    uint64_t done = 0;
    struct kvt_index_rebuild_config config = {
        .db = &device->db, .scan = &device->scan, .progress = on_progress, .ctx = &done};
    struct kvt_index_rebuild_report report;
    struct kvt_index_db *db = NULL;
    char why[KVT_INDEX_DB_WHY_BYTES];

    (void)state;
    assert_false(kvt_index_rebuild_is_due(device->index_path));
    /* No data file: it ends in the middle, and the next start knows. */
    assert_int_equal(kvt_index_rebuild(&db, &config, &report, why), -ENOENT);
    assert_null(db);
    assert_true(kvt_index_rebuild_is_due(device->index_path));
    data_write(device);
    assert_int_equal(kvt_index_rebuild(&db, &config, &report, why), 0);
    assert_false(kvt_index_rebuild_is_due(device->index_path));
    assert_int_equal(done, DATA_BYTES);
    assert_int_equal(report.rows + report.copies, 0);
    (void)kvt_index_db_close(db);
    /* Where nothing can be found nothing is read. */
    memset(device->db.namespaces, 0, sizeof(device->db.namespaces));
    done = 0;
    assert_int_equal(kvt_index_rebuild(&db, &config, &report, why), 0);
    assert_int_equal(done + report.scan.read_bytes, 0);
    (void)kvt_index_db_close(db);
    device_free(device);
}

/* Flushes by path, in their order; of the rebuild itself and of the index. */
static char flushed[8][128];
static uint32_t flushed_count;
static bool is_flush_failing, is_index_gone; /* before the mark is durable */
static const struct device *flushing;

static void note_flush(int fd)
{
    char link[64];
    ssize_t bytes;

    if (flushing == NULL || flushed_count == KVT_COUNT_OF(flushed))
        return;
    is_index_gone |= flushed_count < 2 && access(flushing->index_path, F_OK) != 0;
    (void)snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
    bytes = readlink(link, flushed[flushed_count], sizeof(flushed[0]) - 1);
    assert_true(bytes > 0);
    flushed[flushed_count++][bytes] = '\0';
}

int __real_fsync(int fd);
int __wrap_fsync(int fd);
int __real_fdatasync(int fd);
int __wrap_fdatasync(int fd);

int __wrap_fsync(int fd)
{
    note_flush(fd);
    return __real_fsync(fd);
}

int __wrap_fdatasync(int fd)
{
    note_flush(fd);
    if (!is_flush_failing)
        return __real_fdatasync(fd);
    errno = EIO;
    return -1;
}

static bool is_end(const char *text, const char *end)
{
    size_t bytes = strlen(text), end_bytes = strlen(end);

    return bytes >= end_bytes && strcmp(text + bytes - end_bytes, end) == 0;
}

/* The mark is durable, and so is its name, before the old index goes; what the scan is to see is
 * durable before it is read. */
static void test_durable_order(void **state)
{
    struct device *device = device_new(5);
    uint64_t done = 0;
    struct kvt_index_rebuild_config config = {
        .db = &device->db, .scan = &device->scan, .progress = on_progress, .ctx = &done};
    struct kvt_index_rebuild_report report;
    struct kvt_index_db *db = NULL;
    char why[KVT_INDEX_DB_WHY_BYTES];
    bool is_data_flushed = false;

    (void)state;
    data_write(device);
    flushing = device;
    assert_int_equal(kvt_index_rebuild(&db, &config, &report, why), 0);
    (void)kvt_index_db_close(db);
    assert_true(flushed_count > 3 && !is_index_gone);
    assert_true(is_end(flushed[0], device->mark_path));
    assert_false(is_end(flushed[1], device->mark_path));
    assert_memory_equal(flushed[1], flushed[0], strlen(flushed[1])); /* its folder */
    for (uint32_t i = 2; i < flushed_count; i++)
        is_data_flushed |= is_end(flushed[i], device->data_path);
    assert_true(is_data_flushed);
    done = 0;
    is_flush_failing = true;
    assert_int_equal(kvt_index_rebuild(&db, &config, &report, why), -EIO);
    is_flush_failing = false;
    flushing = NULL;
    assert_int_equal(done + report.scan.read_bytes, 0);
    assert_true(kvt_index_rebuild_is_due(device->index_path));
    device_free(device);
}

static void test_memory(void **state)
{
    (void)state;
    assert_int_equal(kvt_index_rebuild_memory_bytes(16 * KVT_MIB, 64 * KVT_GIB), 64 * KVT_MIB);
    assert_int_equal(kvt_index_rebuild_memory_bytes(KVT_GIB, 64 * KVT_GIB), KVT_GIB);
    assert_int_equal(kvt_index_rebuild_memory_bytes(128 * KVT_GIB, 64 * KVT_GIB), 16 * KVT_GIB);
    assert_int_equal(kvt_index_rebuild_memory_bytes(KVT_GIB, 128 * KVT_MIB), 64 * KVT_MIB);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_oracle),        cmocka_unit_test(test_reuse),
        cmocka_unit_test(test_no_room),       cmocka_unit_test(test_full_pages),
        cmocka_unit_test(test_cut_short),     cmocka_unit_test(test_memory),
        cmocka_unit_test(test_durable_order),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
