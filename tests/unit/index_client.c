/* An index with its real helper process, whose files and processes are well: what is committed is
 * there again, in time and in order, whatever the engine does. */
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "daemon/base/alloc.h"
#include "daemon/base/clock.h"
#include "tests/common/alloc_fault.h"
#include "tests/common/helper_world.h"

static void test_round_trip(void **state)
{
    struct helper_world *world = *state;
    struct kvt_index_put what = helper_world_row(1);
    struct stat status;

    helper_world_open(world);
    assert_int_equal(kvt_index_put(world->index, &what, NULL), KVT_INDEX_E_FULL); /* not loaded */
    assert_int_equal(kvt_index_room_bytes(world->index), 0);
    helper_world_expect(world, KVT_INDEX_EVENT_LOADED);
    assert_int_equal(world->rows_count, 0);
    assert_int_equal(stat(world->path, &status), 0);
    assert_int_equal(status.st_mode & 0777, 0600);
    helper_world_put_blocks(world, 1, 1001);
    helper_world_sync(world);
    assert_int_equal(world->last.refused, 0);
    assert_true(atomic_load(&world->syncs) > 0);
    assert_int_equal(atomic_load(&world->index->counters.rows_put), 1000);
    assert_true(atomic_load(&world->index->counters.used_bytes) > 0);
    helper_world_close(world);
    helper_world_load(world);
    assert_false(world->last.loaded.was_rebuilt);
    assert_int_equal(world->last.loaded.copies, 1000);
    assert_int_equal(world->last.loaded.block_id_max, 1000);
    assert_int_equal(world->last.loaded.content_max, 2000);
    assert_int_equal(atomic_load(&world->index->counters.state), KVT_INDEX_READY);
    helper_world_holds(world, 1001);
    /* What close is given it commits. */
    what = helper_world_copy(1000, 5555);
    helper_world_put(world, what);
    what = helper_world_copy(999, 0);
    what.kind = KVT_INDEX_PUT_DROP_COPY;
    helper_world_put(world, what);
    helper_world_close(world);
    helper_world_load(world);
    assert_int_equal(world->contents[1000], 5555);
    assert_int_equal(world->contents[999], 0);
}

static void test_commits_in_time(void **state)
{
    struct helper_world *world = *state;
    uint64_t syncs;

    helper_world_load(world);
    helper_world_put_blocks(world, 1, 2);
    helper_world_expect(world, KVT_INDEX_EVENT_COMMITTED); /* nobody asked for it */
    assert_int_equal(world->committed_seq, 2);
    /* Much at once goes in few commits, before its time. */
    helper_world_close(world);
    world->config.commit_ns = 3600 * KVT_NS_PER_S;
    helper_world_load(world);
    syncs = atomic_load(&world->syncs);
    helper_world_put_blocks(world, 2, 12000);
    if (world->committed_seq == 0) /* and not seen while the ring was full */
        helper_world_expect(world, KVT_INDEX_EVENT_COMMITTED);
    assert_true(atomic_load(&world->syncs) - syncs <= 4);
    helper_world_sync(world);
    assert_int_equal(world->committed_seq, world->seq);
}

static void test_ring_full(void **state)
{
    struct helper_world *world = *state;
    struct kvt_index_put row = helper_world_row(1);
    uint64_t id = 1, room;

    helper_world_load(world);
    atomic_store(&world->is_sync_held, true);
    /* From here on the index's thread takes nothing off the ring. */
    helper_world_put_blocks(world, id, id + 1);
    id++;
    for (uint32_t i = 0; !atomic_load(&world->is_in_call); i++) {
        assert_true(i < 10000);
        helper_world_pause(1);
    }
    /* While a block fits, both of its puts are taken. */
    while ((room = kvt_index_room_bytes(world->index)) >= 1024) {
        helper_world_put_blocks(world, id, id + 1);
        assert_true(++id < BLOCKS_MAX);
    }
    row.tokens_count = 512;
    row.tokens = calloc(512, sizeof(uint32_t));
    assert_true(kvt_index_put_bytes(&row) > room);
    assert_int_equal(kvt_index_put(world->index, &row, NULL), KVT_INDEX_E_FULL);
    assert_int_equal(kvt_index_room_bytes(world->index), room);
    free((void *)row.tokens);
    atomic_store(&world->is_sync_held, false);
    helper_world_sync(world);
    assert_int_equal(kvt_index_room_bytes(world->index), KVT_INDEX_PUT_RING_BYTES);
    helper_world_close(world);
    helper_world_load(world);
    helper_world_holds(world, id);
}

/* A helper whose socket ends does too, and need not be killed. */
static void test_helper_ends_by_itself(void **state)
{
    struct helper_world *world = *state;
    uint64_t shortest_ns = UINT64_MAX;

    for (uint32_t i = 0; i < 5; i++) {
        uint64_t before_ns;

        helper_world_load(world);
        before_ns = kvt_clock_mono_ns();
        helper_world_close(world);
        shortest_ns = KVT_MIN(shortest_ns, kvt_clock_mono_ns() - before_ns);
    }
    assert_true(shortest_ns < KVT_INDEX_GRACE_NS / 2);
}

static void test_close_under_load(void **state)
{
    struct helper_world *world = *state;
    uint64_t before_ns;

    helper_world_load(world);
    helper_world_put_blocks(world, 1, 20001);
    helper_world_close(world);
    for (uint32_t ms = 0; ms < 100; ms += 9) {
        helper_world_open(world);
        helper_world_pause(ms);
        before_ns = kvt_clock_mono_ns();
        helper_world_close(world);
        assert_true(kvt_clock_mono_ns() - before_ns < 5 * KVT_NS_PER_S);
    }
    helper_world_load(world);
    helper_world_holds(world, 20001);
}

/* A helper commits on its own when it was sent much: so nothing is sent before what it names is
 * durable. */
static void test_nothing_before_sync(void **state)
{
    struct helper_world *world = *state;

    helper_world_load(world);
    helper_world_put_blocks(world, 1, 101);
    helper_world_sync(world);
    atomic_store(&world->is_sync_held, true);
    helper_world_put_blocks(world, 101, 8001);
    for (uint32_t i = 0; !atomic_load(&world->is_in_call); i++) {
        assert_true(i < 10000);
        helper_world_pause(1);
    }
    helper_world_pause(200);
    assert_int_equal(kill(helper_world_pid(world), SIGKILL), 0);
    atomic_store(&world->is_sync_held, false);
    helper_world_expect(world, KVT_INDEX_EVENT_FAILED);
    helper_world_close(world);
    helper_world_load(world);
    helper_world_holds(world, 101);
}

static void test_failed_sync(void **state)
{
    struct helper_world *world = *state;

    helper_world_load(world);
    helper_world_put_blocks(world, 1, 101);
    helper_world_sync(world);
    atomic_store(&world->sync_result, -EIO);
    helper_world_put_blocks(world, 101, 201);
    helper_world_expect(world, KVT_INDEX_EVENT_FAILED);
    assert_int_equal(world->last.error, -EIO);
    assert_string_equal(world->last.why, "data cannot be synchronised: Input/output error");
    helper_world_put_blocks(world, 201, 301);
    assert_int_equal(world->committed_seq, 201);
    helper_world_close(world);
    atomic_store(&world->sync_result, 0);
    helper_world_load(world);
    helper_world_holds(world, 101);
}

static void test_catalog(void **state)
{
    struct helper_world *world = *state;
    struct kvt_index_put catalog = {
        .kind = KVT_INDEX_PUT_CATALOG,
        .catalog_number = 7,
        .catalog_data = "hello",
        .catalog_bytes = 5,
    };
    uint64_t syncs;

    /* Before and during a load: durable without the helper. */
    helper_world_open(world);
    helper_world_put(world, catalog);
    helper_world_expect(world, KVT_INDEX_EVENT_COMMITTED);
    assert_int_equal(world->committed_seq, 1);
    assert_int_equal(atomic_load(&world->catalogs), 1);
    assert_true(atomic_load(&world->syncs) >= 1);
    helper_world_expect(world, KVT_INDEX_EVENT_LOADED);
    /* Between rows: those before it are committed, then it is written, then synchronised. */
    syncs = atomic_load(&world->syncs);
    helper_world_put_blocks(world, 1, 101);
    helper_world_put(world, catalog);
    helper_world_put_blocks(world, 101, 201);
    helper_world_sync(world);
    assert_true(atomic_load(&world->commits_at_catalog) >= 2);
    assert_true(atomic_load(&world->syncs) >= syncs + 2);
    assert_int_equal(world->last.refused, 0);
    /* What cannot be written is counted, and does not end the index. */
    atomic_store(&world->catalog_result, -EIO);
    helper_world_put(world, catalog);
    helper_world_sync(world);
    assert_int_equal(world->last.refused, 1);
    atomic_store(&world->catalog_result, 0);
    helper_world_put(world, catalog);
    helper_world_sync(world);
    assert_int_equal(world->last.refused, 1);
    helper_world_close(world);
    helper_world_load(world);
    helper_world_holds(world, 201);
}

/* A call of the owner's that hangs does not hold up close. It comes back when all that was the
 * owner's is gone, and nothing is left over then. */
static void close_beside_call(struct helper_world *world, const atomic_bool *is_held)
{
    uint64_t before_ns = kvt_clock_mono_ns();
    pid_t helper;

    while (!atomic_load(&world->is_in_call)) {
        assert_true(kvt_clock_mono_ns() - before_ns < WAIT_NS);
        helper_world_pause(1);
    }
    helper = helper_world_pid(world);
    assert_true(atomic_load(is_held));
    before_ns = kvt_clock_mono_ns();
    helper_world_close(world);
    assert_true(kvt_clock_mono_ns() - before_ns >= world->config.close_ns);
    assert_true(kvt_clock_mono_ns() - before_ns < world->config.close_ns + 3 * KVT_NS_PER_S);
    assert_int_equal(kill(helper, 0), 0);
    atomic_store(&world->is_sync_held, false);
    atomic_store(&world->is_catalog_held, false);
    before_ns = kvt_clock_mono_ns();
    while (kill(helper, 0) == 0) {
        assert_true(kvt_clock_mono_ns() - before_ns < WAIT_NS);
        helper_world_pause(1);
    }
    helper_world_pause(20);
}

static void test_close_beside_sync(void **state)
{
    struct helper_world *world = *state;

    world->config.close_ns = 200 * KVT_NS_PER_MS;
    helper_world_load(world);
    helper_world_put_blocks(world, 1, 101);
    helper_world_sync(world);
    atomic_store(&world->is_sync_held, true);
    helper_world_put_blocks(world, 101, 201);
    close_beside_call(world, &world->is_sync_held);
    helper_world_load(world);
    helper_world_holds(world, 101);
}

static void test_close_beside_catalog(void **state)
{
    struct helper_world *world = *state;
    struct kvt_index_put catalog = {.kind = KVT_INDEX_PUT_CATALOG,
                                    .catalog_number = 7,
                                    .catalog_data = "hello",
                                    .catalog_bytes = 5};

    world->config.close_ns = 200 * KVT_NS_PER_MS;
    helper_world_load(world);
    atomic_store(&world->is_catalog_held, true);
    helper_world_put(world, catalog);
    close_beside_call(world, &world->is_catalog_held);
    helper_world_load(world);
}

static struct alloc_fault fault;

static void test_open_undoes_itself(void **state)
{
    struct helper_world *world = *state;
    uint32_t failures = 0;
    int r = -ENOMEM;

    for (fault.fail_at = 1; r != 0; fault.fail_at++) {
        fault.seen = 0;
        kvt_alloc_set_fault(alloc_fault_nth, &fault);
        r = kvt_index_open(&world->index, &world->config);
        kvt_alloc_set_fault(NULL, NULL);
        assert_true(r == 0 || r == -ENOMEM);
        failures += r != 0;
    }
    assert_true(failures >= 7);
    helper_world_expect(world, KVT_INDEX_EVENT_LOADED);
}

#define WORLD_TEST(name) cmocka_unit_test_setup_teardown(name, helper_world_make, helper_world_free)

int main(void)
{
    const struct CMUnitTest tests[] = {
        WORLD_TEST(test_round_trip),
        WORLD_TEST(test_commits_in_time),
        WORLD_TEST(test_ring_full),
        WORLD_TEST(test_helper_ends_by_itself),
        WORLD_TEST(test_close_under_load),
        WORLD_TEST(test_failed_sync),
        WORLD_TEST(test_nothing_before_sync),
        WORLD_TEST(test_catalog),
        WORLD_TEST(test_open_undoes_itself),
        WORLD_TEST(test_close_beside_sync),
        WORLD_TEST(test_close_beside_catalog),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
