/* The fake index of the simulator keeps the contract that the engine is tested against: order,
 * what a crash forgets, what a load finds. */
#include <stdlib.h>
#include <string.h>

#include "daemon/base/clock.h"
#include "tests/common/cmocka.h"
#include "tests/common/fake_index.h"

static const uint32_t tokens[4] = {1, 2, 3, 4};
static int sync_result, syncs;

static int data_sync(void *ctx)
{
    (void)ctx;
    syncs++;
    return sync_result;
}

static struct kvt_index_put row_make(uint64_t block_id, uint64_t parent_id, uint32_t block_idx)
{
    static const uint8_t root[3] = {7, 8, 9};

    return (struct kvt_index_put){
        .kind = KVT_INDEX_PUT_ROW,
        .key = {.ns = 1, .epoch = 5, .block_idx = block_idx, .block_id = block_id},
        .parent_id = parent_id,
        .root_key = parent_id == 0 ? root : NULL,
        .root_key_bytes = parent_id == 0 ? sizeof(root) : 0,
        .tokens_count = 4,
        .tokens = tokens,
    };
}

static struct kvt_index_put copy_make(const struct kvt_index_put *row, uint64_t content)
{
    static uint64_t offsets[2], runs[2];

    offsets[0] = content * 8192;
    offsets[1] = content * 8192 + 4096;
    return (struct kvt_index_put){
        .kind = KVT_INDEX_PUT_COPY,
        .key = row->key,
        .component = 0,
        .shards_count = 2,
        .content = content,
        .slot_bytes = 4096,
        .slot_offsets = offsets,
        .run_offsets = runs,
    };
}

static void put(struct kvt_index *index, struct kvt_index_put what)
{
    assert_int_equal(kvt_index_put(index, &what, NULL), 0);
}

static void put_kind(struct kvt_index *index, enum kvt_index_put_kind kind)
{
    put(index, (struct kvt_index_put){.kind = kind});
}

static void put_block(struct kvt_index *index, uint64_t id, uint64_t parent_id, uint32_t block_idx)
{
    struct kvt_index_put row = row_make(id, parent_id, block_idx);

    put(index, row);
    put(index, copy_make(&row, 100 + id));
}

static struct kvt_index_event expect(struct kvt_index *index, enum kvt_index_event_kind kind)
{
    struct kvt_index_event event;

    assert_true(kvt_index_next(index, &event));
    assert_int_equal(event.kind, kind);
    return event;
}

static struct kvt_index *open_empty(struct fake_index *fake)
{
    struct kvt_index *index = fake_index_open(fake, NULL, false);

    (void)expect(index, KVT_INDEX_EVENT_LOADED);
    return index;
}

static void test_commits(void **state)
{
    struct fake_index *fake = fake_index_new(&(struct fake_index_config){
        .commit_ns = 1000, .delay_ns_max = 500, .data_sync = data_sync});
    struct kvt_index *index = open_empty(fake);
    struct kvt_index_event event;

    (void)state;
    syncs = sync_result = 0;
    put_block(index, 10, 0, 0);
    assert_int_equal(fake_index_next_ns(fake), 1000);
    fake_index_set_time(fake, 999);
    assert_false(kvt_index_next(index, &event));
    fake_index_set_time(fake, 1000);
    assert_int_equal(syncs, 1);
    put_block(index, 11, 10, 1); /* not in the batch that is under way */
    fake_index_set_time(fake, 1500);
    event = expect(index, KVT_INDEX_EVENT_COMMITTED);
    assert_int_equal(event.seq, 2);
    assert_non_null(fake_index_copy(fake, 10, 0));
    assert_null(fake_index_row(fake, 11));
    /* At once, but not while it is held. */
    fake_index_hold(fake, true);
    put_kind(index, KVT_INDEX_PUT_SYNC);
    fake_index_set_time(fake, 2100);
    assert_false(kvt_index_next(index, &event));
    fake_index_hold(fake, false);
    fake_index_set_time(fake, 2600);
    event = expect(index, KVT_INDEX_EVENT_COMMITTED);
    assert_int_equal(event.seq, 5);
    assert_int_equal(fake_index_rows_count(fake), 2);
    put(index, (struct kvt_index_put){.kind = KVT_INDEX_PUT_DROP_OLD,
                                      .key = {.ns = 1, .epoch = 6, .block_id = 0}});
    index = kvt_index_close(index); /* commits */
    assert_int_equal(fake_index_rows_count(fake), 0);
    fake_index_free(fake);
}

/* Every outcome of a crash is a first part of what was put, and of an open batch any. */
static void test_crash_forgets_a_tail(void **state)
{
    bool seen[7] = {false};

    (void)state;
    for (uint64_t seed = 0; seed < 200; seed++) {
        struct fake_index *fake = fake_index_new(
            &(struct fake_index_config){.seed = seed, .commit_ns = 1000, .delay_ns_max = 1000});
        struct kvt_index *index = open_empty(fake);
        uint64_t there;

        for (uint64_t i = 0; i < 6; i++)
            put(index, row_make(10 + i, i == 0 ? 0 : 9 + i, (uint32_t)i));
        fake_index_hold(fake, true);
        fake_index_set_time(fake, 1000);
        put(index, row_make(16, 15, 6));
        fake_index_crash(fake);
        there = fake_index_rows_count(fake);
        assert_true(there <= 6);
        seen[there] = true;
        for (uint64_t i = 0; i < 7; i++)
            assert_int_equal(fake_index_row(fake, 10 + i) != NULL, i < there);
        fake_index_free(fake);
    }
    for (uint32_t i = 0; i <= 6; i++)
        assert_true(seen[i]);
}

static void add_block(struct fake_index *fake, uint64_t id, uint64_t parent_id, uint32_t block_idx,
                      bool has_copy)
{
    struct kvt_index_put row = row_make(id, parent_id, block_idx), copy = copy_make(&row, 100 + id);

    fake_index_add(fake, &row);
    if (has_copy)
        fake_index_add(fake, &copy);
}

static void test_load(void **state)
{
    struct fake_index *fake =
        fake_index_new(&(struct fake_index_config){.commit_ns = 1000, .load_event_ns = 10});
    struct kvt_index_ns namespaces[KVT_NAMESPACES_MAX] = {[1] = {.is_used = true, .epoch = 5}};
    struct kvt_index_put sync = {.kind = KVT_INDEX_PUT_SYNC};
    struct kvt_index_put catalog = {.kind = KVT_INDEX_PUT_CATALOG,
                                    .catalog_number = 3,
                                    .catalog_data = "abc",
                                    .catalog_bytes = 3};
    struct kvt_index_event event;
    struct kvt_index *index;
    uint32_t rows = 0;
    uint64_t last = 0;

    (void)state;
    add_block(fake, 10, 0, 0, false); /* kept for what is below it */
    add_block(fake, 11, 10, 1, true);
    add_block(fake, 12, 11, 2, false); /* nothing in it or below it */
    add_block(fake, 13, 99, 1, true);  /* no parent */
    add_block(fake, 14, 10, 1, true);
    index = fake_index_open(fake, namespaces, true);
    assert_int_equal(kvt_index_put(index, &sync, NULL), KVT_INDEX_E_FULL);
    put(index, catalog);
    while (true) {
        fake_index_set_time(fake, KVT_MIN(fake_index_next_ns(fake), 1000000000));
        if (!kvt_index_next(index, &event))
            continue; /* a row's copies are all told: the next row is due later */
        if (event.kind == KVT_INDEX_EVENT_LOADED)
            break;
        if (event.kind == KVT_INDEX_EVENT_COMMITTED)
            continue;
        if (event.kind == KVT_INDEX_EVENT_COPY) {
            assert_int_equal(event.put.key.block_id, last);
            assert_int_equal(event.put.slot_offsets[1], (100 + last) * 8192 + 4096);
            continue;
        }
        assert_int_equal(event.kind, KVT_INDEX_EVENT_ROW);
        assert_memory_equal(event.put.tokens, tokens, sizeof(tokens));
        last = event.put.key.block_id;
        rows++;
        assert_int_equal(event.put.parent_id, rows == 1 ? 0 : 10);
    }
    assert_int_equal(rows, 3);
    assert_int_equal(event.loaded.rows, 3);
    assert_int_equal(event.loaded.copies, 2);
    assert_int_equal(event.loaded.dropped, 2);
    assert_int_equal(event.loaded.block_id_max, 14);
    assert_int_equal(event.loaded.content_max, 114);
    assert_true(event.loaded.was_rebuilt);
    assert_memory_equal(fake_index_catalog(fake, 3)->catalog_data, "abc", 3);
    fake_index_crash(fake);
    /* The next life has another epoch. */
    namespaces[1].epoch = 6;
    index = fake_index_open(fake, namespaces, false);
    event = expect(index, KVT_INDEX_EVENT_LOADED);
    assert_int_equal(event.loaded.rows, 0);
    assert_int_equal(event.loaded.dropped, 3);
    (void)kvt_index_close(index);
    fake_index_free(fake);
}

static void test_failure(void **state)
{
    struct fake_index *fake =
        fake_index_new(&(struct fake_index_config){.commit_ns = 1000, .data_sync = data_sync});
    struct kvt_index *index = open_empty(fake);
    struct kvt_index_event event;

    (void)state;
    sync_result = -EIO;
    put_block(index, 10, 0, 0);
    put_kind(index, KVT_INDEX_PUT_SYNC);
    fake_index_set_time(fake, 1);
    event = expect(index, KVT_INDEX_EVENT_FAILED);
    assert_int_equal(event.error, -EIO);
    assert_false(kvt_index_next(index, &event));
    put_kind(index, KVT_INDEX_PUT_SYNC); /* swallowed */
    fake_index_set_time(fake, 100000);
    assert_false(kvt_index_next(index, &event));
    assert_int_equal(fake_index_next_ns(fake), KVT_TIME_NEVER_NS);
    (void)kvt_index_close(index);
    assert_int_equal(fake_index_rows_count(fake), 0);
    fake_index_free(fake);
    sync_result = 0;
}

static void test_room_and_refusals(void **state)
{
    struct fake_index *fake = fake_index_new(
        &(struct fake_index_config){.ring_bytes = 1000, .commit_ns = 1000, .refuse_rate = 1000});
    struct kvt_index *index = open_empty(fake);
    struct kvt_index_put row = row_make(10, 0, 0);
    uint64_t room = kvt_index_room_bytes(index), puts = 0;

    (void)state;
    fake_index_hold(fake, true);
    while (kvt_index_put_bytes(&row) <= kvt_index_room_bytes(index)) {
        put(index, row);
        puts++;
    }
    assert_int_equal(puts, room / kvt_index_put_bytes(&row));
    assert_int_equal(kvt_index_put(index, &row, NULL), KVT_INDEX_E_FULL);
    fake_index_hold(fake, false);
    fake_index_set_time(fake, 1000);
    assert_int_equal(expect(index, KVT_INDEX_EVENT_COMMITTED).refused, puts);
    assert_int_equal(fake_index_rows_count(fake), 0);
    assert_int_equal(kvt_index_room_bytes(index), room);
    (void)kvt_index_close(index);
    fake_index_free(fake);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_commits),
        cmocka_unit_test(test_crash_forgets_a_tail),
        cmocka_unit_test(test_load),
        cmocka_unit_test(test_failure),
        cmocka_unit_test(test_room_and_refusals),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
