#include "tests/common/helper_world.h"

#include <dirent.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "daemon/base/clock.h"

void helper_world_pause(uint64_t ms)
{
    struct timespec pause = {.tv_nsec = (long)(ms * KVT_NS_PER_MS)};

    (void)nanosleep(&pause, NULL);
}

static int data_sync(void *ctx)
{
    struct helper_world *world = ctx;

    atomic_store(&world->is_in_call, true);
    while (atomic_load(&world->is_sync_held))
        helper_world_pause(1);
    atomic_store(&world->is_in_call, false);
    atomic_fetch_add(&world->syncs, 1);
    return atomic_load(&world->sync_result);
}

static int catalog_write(void *ctx, uint32_t number, const void *data, uint32_t bytes)
{
    struct helper_world *world = ctx;
    bool was_held = atomic_load(&world->is_catalog_held);

    atomic_store(&world->is_in_call, true);
    while (atomic_load(&world->is_catalog_held))
        helper_world_pause(1);
    atomic_store(&world->is_in_call, false);
    KVT_ASSERT(number == 7 && bytes == 5 && memcmp(data, "hello", 5) == 0);
    if (was_held) /* and closed meanwhile */
        return 0;
    atomic_store(&world->commits_at_catalog, atomic_load(&world->index->counters.commits));
    atomic_fetch_add(&world->catalogs, 1);
    return atomic_load(&world->catalog_result);
}

/* ---- blocks: all of a block follows from its id ---------------------------------------------- */

static uint64_t parent_of(uint64_t id)
{
    return id % 50 == 1 ? 0 : id - 1 - id % 2 * (id % 50 > 2);
}

static uint32_t depth_of(uint64_t id)
{
    uint32_t depth = 0;

    for (; parent_of(id) != 0; id = parent_of(id))
        depth++;
    return depth;
}

static const uint32_t *tokens_of(uint64_t id)
{
    static uint32_t tokens[BLOCK_TOKENS];

    for (uint32_t i = 0; i < BLOCK_TOKENS; i++)
        tokens[i] = (uint32_t)(id * 100 + i);
    return tokens;
}

struct kvt_index_put helper_world_row(uint64_t id)
{
    static uint8_t root[8], extra[KVT_EXTRA_KEY_BYTES];
    uint64_t parent = parent_of(id);

    memcpy(root, &id, sizeof(root));
    memset(extra, (int)(id % 256), sizeof(extra));
    return (struct kvt_index_put){
        .kind = KVT_INDEX_PUT_ROW,
        .key = {.ns = NS, .epoch = EPOCH, .block_idx = depth_of(id), .block_id = id},
        .parent_id = parent,
        .root_key = parent == 0 ? root : NULL,
        .root_key_bytes = parent == 0 ? sizeof(root) : 0,
        .extra_key = id % 3 == 0 ? extra : NULL,
        .tokens_count = BLOCK_TOKENS,
        .tokens = tokens_of(id),
    };
}

struct kvt_index_put helper_world_copy(uint64_t id, uint64_t content)
{
    static uint64_t slots[2], runs[2];

    slots[0] = id * 8192;
    slots[1] = id * 8192 + 4096;
    runs[0] = runs[1] = kvt_round_down(id * 8192, 2u << 20);
    return (struct kvt_index_put){
        .kind = KVT_INDEX_PUT_COPY,
        .key = {.ns = NS, .epoch = EPOCH, .block_idx = depth_of(id), .block_id = id},
        .component = 1,
        .shards_count = 2,
        .content = content,
        .slot_bytes = 4096,
        .slot_offsets = slots,
        .run_offsets = runs,
    };
}

static void check_row(const struct kvt_index_put *put)
{
    struct kvt_index_put row = helper_world_row(put->key.block_id);

    assert_memory_equal(&put->key.block_id, &row.key.block_id, 8);
    assert_int_equal(put->key.block_idx, row.key.block_idx);
    assert_int_equal(put->parent_id, row.parent_id);
    assert_int_equal(put->tokens_count, BLOCK_TOKENS);
    assert_memory_equal(put->tokens, row.tokens, 4 * BLOCK_TOKENS);
    if (row.root_key != NULL && put->root_key_bytes == 1 + KVT_FINGERPRINT_BYTES) {
        assert_int_equal(put->root_key[0], 0xd1); /* made anew: the key itself is not known */
        row.root_key = NULL;
    } else {
        assert_int_equal(put->root_key_bytes, row.root_key_bytes);
    }
    if (row.root_key != NULL)
        assert_memory_equal(put->root_key, row.root_key, row.root_key_bytes);
    assert_int_equal(put->extra_key != NULL, row.extra_key != NULL);
    if (row.extra_key != NULL)
        assert_memory_equal(put->extra_key, row.extra_key, KVT_EXTRA_KEY_BYTES);
}

/* ---- the world ------------------------------------------------------------------------------- */

static uint32_t descriptors_open(void)
{
    DIR *dir = opendir("/proc/self/fd");
    uint32_t count = 0;

    assert_non_null(dir);
    while (readdir(dir) != NULL)
        count++;
    (void)closedir(dir);
    return count;
}

static uint32_t descriptors_before;

int helper_world_make(void **state)
{
    struct helper_world *world = calloc(1, sizeof(*world));

    descriptors_before = descriptors_open();
    assert_non_null(world);
    assert_int_equal(kvt_program_find("kvtierd-index", world->helper), 0);
    assert_int_equal(kvt_doorbell_init(&world->bell), 0);
    (void)snprintf(world->dir, sizeof(world->dir), "kvt-index-XXXXXX");
    assert_non_null(mkdtemp(world->dir));
    (void)snprintf(world->path, sizeof(world->path), "%s/l3.index", world->dir);
    world->config = (struct kvt_index_config){
        .path = world->path,
        .bytes = 32 * KVT_MIB,
        .helper_path = world->helper,
        .store_id = {1, 2, 3},
        .device_uuid = {4, 5, 6},
        .namespaces = {[NS] = {.is_used = true,
                               .epoch = EPOCH,
                               .block_tokens = BLOCK_TOKENS,
                               .components_count = 2,
                               .shards = {1, 2}}},
        .data_sync = data_sync,
        .catalog_write = catalog_write,
        .ctx = world,
        .commit_ns = 20 * KVT_NS_PER_MS,
        .doorbell = &world->bell,
    };
    *state = world;
    return 0;
}

static void remove_all(const char *path)
{
    char name[] = "rm", option[] = "-rf", folder[64];
    char *const arguments[] = {name, option, folder, NULL};
    pid_t child;

    (void)snprintf(folder, sizeof(folder), "%s", path);
    assert_int_equal(posix_spawnp(&child, "rm", NULL, NULL, arguments, environ), 0);
    assert_int_equal(waitpid(child, NULL, 0), child);
}

int helper_world_free(void **state)
{
    struct helper_world *world = *state;

    atomic_store(&world->is_sync_held, false);
    world->index = kvt_index_close(world->index);
    kvt_doorbell_deinit(&world->bell);
    remove_all(world->dir);
    free(world);
    assert_int_equal(descriptors_open(), descriptors_before);
    assert_int_equal(waitpid(-1, NULL, WNOHANG), -1);
    assert_int_equal(errno, ECHILD);
    return 0;
}

static void note_event(struct helper_world *world, const struct kvt_index_event *event)
{
    const struct kvt_index_put *put = &event->put;
    uint64_t id = put->key.block_id;

    if (event->kind == KVT_INDEX_EVENT_ROW) {
        assert_true(id > 0 && id <= BLOCKS_MAX && !world->rows[id]);
        assert_true(put->parent_id == 0 || world->rows[put->parent_id]);
        check_row(put);
        world->rows[id] = true;
        world->rows_count++;
    } else if (event->kind == KVT_INDEX_EVENT_COPY) {
        assert_true(world->rows[id] && world->contents[id] == 0);
        assert_int_equal(put->shards_count, 2);
        assert_int_equal(put->slot_offsets[1], id * 8192 + 4096);
        world->contents[id] = put->content;
    } else if (event->kind == KVT_INDEX_EVENT_COMMITTED) {
        assert_true(event->seq > world->committed_seq && event->seq <= world->seq);
        world->committed_seq = event->seq;
    }
}

bool helper_world_next(struct helper_world *world, uint64_t until_ns)
{
    for (;;) {
        uint64_t now_ns;

        kvt_doorbell_arm(&world->bell);
        if (kvt_index_next(world->index, &world->last)) {
            kvt_doorbell_disarm(&world->bell);
            note_event(world, &world->last);
            return true;
        }
        now_ns = kvt_clock_mono_ns();
        if (now_ns >= until_ns)
            return false;
        kvt_doorbell_wait(&world->bell, until_ns - now_ns);
    }
}

/* Takes events until one of this kind. */
void helper_world_expect(struct helper_world *world, enum kvt_index_event_kind kind)
{
    uint64_t until_ns = kvt_clock_mono_ns() + WAIT_NS;

    do {
        assert_true(helper_world_next(world, until_ns));
        if (world->last.kind == KVT_INDEX_EVENT_FAILED && kind != KVT_INDEX_EVENT_FAILED)
            print_error("failed: %s\n", world->last.why);
        assert_true(world->last.kind != KVT_INDEX_EVENT_FAILED || kind == KVT_INDEX_EVENT_FAILED);
    } while (world->last.kind != kind);
}

void helper_world_open(struct helper_world *world)
{
    memset(world->rows, 0, sizeof(world->rows));
    memset(world->contents, 0, sizeof(world->contents));
    world->rows_count = world->committed_seq = world->seq = 0;
    assert_int_equal(kvt_index_open(&world->index, &world->config), 0);
}

void helper_world_load(struct helper_world *world)
{
    helper_world_open(world);
    helper_world_expect(world, KVT_INDEX_EVENT_LOADED);
    assert_int_equal(world->last.loaded.rows, world->rows_count);
}

void helper_world_put(struct helper_world *world, struct kvt_index_put what)
{
    uint64_t seq = 0, until_ns = kvt_clock_mono_ns() + WAIT_NS;

    while (kvt_index_put(world->index, &what, &seq) != 0) {
        assert_true(kvt_clock_mono_ns() < until_ns);
        (void)helper_world_next(world, kvt_clock_mono_ns() + KVT_NS_PER_MS);
    }
    assert_int_equal(seq, ++world->seq);
}

void helper_world_put_blocks(struct helper_world *world, uint64_t first, uint64_t end)
{
    for (uint64_t id = first; id < end; id++) {
        helper_world_put(world, helper_world_row(id));
        helper_world_put(world, helper_world_copy(id, 1000 + id));
    }
}

void helper_world_sync(struct helper_world *world)
{
    uint64_t until_ns = kvt_clock_mono_ns() + WAIT_NS;

    helper_world_put(world, (struct kvt_index_put){.kind = KVT_INDEX_PUT_SYNC});
    while (world->committed_seq < world->seq) {
        assert_true(helper_world_next(world, until_ns));
        assert_string_equal(world->last.why, ""); /* not FAILED */
    }
}

pid_t helper_world_pid(const struct helper_world *world)
{
    return atomic_load(&((struct kvt_index_client *)world->index)->helper_pid);
}

void helper_world_close(struct helper_world *world)
{
    world->index = kvt_index_close(world->index);
}

void helper_world_holds(struct helper_world *world, uint64_t end)
{
    assert_int_equal(world->rows_count, end - 1);
    for (uint64_t id = 1; id < end; id++)
        assert_int_equal(world->contents[id], 1000 + id);
}
