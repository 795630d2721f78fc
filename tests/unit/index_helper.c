/* An index whose helper dies, is killed, is not there, lies or hangs, and whose file is damaged:
 * the daemon's side says FAILED, or makes a new index, and what was promised holds. */
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <string.h>
#include <sys/inotify.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "daemon/base/clock.h"
#include "daemon/base/hash.h"
#include "tests/common/fake_tier.h"
#include "tests/common/helper_world.h"
#include "tiers/slot.h"

static bool fail_socketpair, fail_spawn;
int __real_socketpair(int domain, int type, int protocol, int fds[2]);
int __wrap_socketpair(int domain, int type, int protocol, int fds[2]);
int __real_posix_spawn(pid_t *pid, const char *path, const posix_spawn_file_actions_t *files,
                       const posix_spawnattr_t *attributes, char *const argv[], char *const envp[]);
int __wrap_posix_spawn(pid_t *pid, const char *path, const posix_spawn_file_actions_t *files,
                       const posix_spawnattr_t *attributes, char *const argv[], char *const envp[]);

int __wrap_socketpair(int domain, int type, int protocol, int fds[2])
{
    if (!fail_socketpair)
        return __real_socketpair(domain, type, protocol, fds);
    errno = EMFILE;
    return -1;
}

int __wrap_posix_spawn(pid_t *pid, const char *path, const posix_spawn_file_actions_t *files,
                       const posix_spawnattr_t *attributes, char *const argv[], char *const envp[])
{
    return fail_spawn ? EAGAIN : __real_posix_spawn(pid, path, files, attributes, argv, envp);
}

/* Whenever the helper is killed: FAILED says so, and what is there afterwards is a first part of
 * what was put, with all that was said to be committed. */
static void test_killed_helper(void **state)
{
    struct helper_world *world = *state;
    uint64_t random = 42, there = 0;

    for (uint32_t round = 0; round < 12; round++) {
        uint64_t committed, id = there + 1, kill_at = id + fake_random(&random) % 2000;

        helper_world_load(world);
        assert_int_equal(world->rows_count, there);
        helper_world_put_blocks(world, id, kill_at);
        helper_world_pause(fake_random(&random) % 40); /* a commit is due after 20 ms */
        assert_int_equal(kill(helper_world_pid(world), SIGKILL), 0);
        helper_world_put_blocks(world, kill_at, kill_at + 500);
        id = kill_at + 500;
        helper_world_expect(world, KVT_INDEX_EVENT_FAILED);
        assert_int_equal(world->last.error, SIGKILL);
        assert_string_equal(world->last.why, "helper ended by SIGKILL");
        assert_int_equal(atomic_load(&world->index->counters.state), KVT_INDEX_LOST);
        helper_world_put_blocks(world, id, id + 1); /* swallowed */
        assert_false(helper_world_next(world, 0));
        committed = there + world->committed_seq / 2;
        helper_world_close(world);
        helper_world_load(world);
        assert_false(world->last.loaded.was_rebuilt);
        assert_true(world->rows_count >= committed && world->rows_count < id);
        there = 0;
        while (there < BLOCKS_MAX && world->contents[there + 1] != 0)
            there++;
        assert_true(there == world->rows_count || there + 1 == world->rows_count);
        helper_world_put_blocks(world, there + 1, there + 2);
        there++;
        helper_world_close(world);
    }
}

/* The daemon's death, without a word, is the helper's. */
static void test_killed_parent(void **state)
{
    struct helper_world *world = *state;
    pid_t child, helper = 0;
    int pipes[2], status;

    helper_world_load(world);
    helper_world_put_blocks(world, 1, 101);
    helper_world_close(world);
    assert_int_equal(prctl(PR_SET_CHILD_SUBREAPER, 1), 0);
    assert_int_equal(pipe(pipes), 0);
    child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        helper_world_load(world);
        helper_world_put_blocks(world, 101, 201);
        helper = helper_world_pid(world);
        (void)!write(pipes[1], &helper, sizeof(helper));
        (void)pause();
        _exit(1);
    }
    assert_int_equal(read(pipes[0], &helper, sizeof(helper)), sizeof(helper));
    assert_int_equal(kill(child, SIGKILL), 0);
    assert_int_equal(waitpid(child, &status, 0), child);
    (void)alarm(20);
    assert_int_equal(waitpid(helper, &status, 0), helper);
    while (waitpid(-1, &status, 0) > 0) /* a leak checker of its, that it could not wait for */
        ;
    (void)alarm(0);
    (void)close(pipes[0]);
    (void)close(pipes[1]);
    assert_int_equal(prctl(PR_SET_CHILD_SUBREAPER, 0), 0);
    helper_world_load(world);
    assert_true(world->rows_count >= 100 && world->rows_count <= 200);
}

/* Rows were told already when the helper dies: no second load follows them, and the next start
 * makes a new index. */
static void test_killed_while_loading(void **state)
{
    struct helper_world *world = *state;
    struct kvt_index_counters *counters;
    struct stat status;

    helper_world_load(world);
    helper_world_put_blocks(world, 1, 20001);
    helper_world_close(world);
    helper_world_open(world);
    counters = &world->index->counters;
    for (uint32_t i = 0; i < 10000 && atomic_load(&counters->loaded_rows) < 1000; i++)
        helper_world_pause(1);
    helper_world_pause(50); /* until the ring of events is full and the helper waits */
    assert_int_equal(kill(helper_world_pid(world), SIGKILL), 0);
    helper_world_expect(world, KVT_INDEX_EVENT_FAILED);
    assert_int_equal(world->last.error, SIGKILL);
    assert_true(world->rows_count >= 1000 && world->rows_count < 20000);
    helper_world_close(world);
    assert_int_equal(stat(world->path, &status), -1);
    helper_world_load(world);
    assert_int_equal(world->rows_count, 0);
}

static void program_make(struct helper_world *world, const char *text)
{
    char path[128];
    FILE *file;

    (void)snprintf(path, sizeof(path), "%s/program", world->dir);
    file = fopen(path, "we");
    assert_non_null(file);
    (void)fputs(text, file);
    assert_int_equal(fclose(file), 0);
    assert_int_equal(chmod(path, 0700), 0);
    (void)snprintf(world->helper, sizeof(world->helper), "%s/program", world->dir);
}

static void test_no_helper(void **state)
{
    struct helper_world *world = *state;

    (void)snprintf(world->helper, sizeof(world->helper), "%s/none", world->dir);
    assert_int_equal(kvt_index_open(&world->index, &world->config), -ENOENT);
    assert_null(world->index);
    program_make(world, "no program");
    helper_world_open(world);
    helper_world_expect(world, KVT_INDEX_EVENT_FAILED);
    assert_int_equal(world->last.error, -ENOEXEC);
    assert_non_null(strstr(world->last.why, "cannot be started: Exec format error"));
    helper_world_close(world);
    program_make(world, "#!/bin/sh\nexit 5\n");
    helper_world_open(world);
    helper_world_expect(world, KVT_INDEX_EVENT_FAILED);
    assert_string_equal(world->last.why, "helper ended with status 5");
}

static void test_helper_that_lies(void **state)
{
    struct helper_world *world = *state;

    program_make(
        world, "#!/bin/sh\nprintf 'garbage that is long enough for a header' >&3\nexec sleep 60\n");
    helper_world_open(world);
    helper_world_expect(world, KVT_INDEX_EVENT_FAILED);
    assert_int_equal(world->last.error, -EPROTO);
    helper_world_close(world);
    /* A frame of ours, but not one that a helper says. */
    program_make(world, "#!/bin/sh\nexec cat <&3 >&3\n");
    helper_world_open(world);
    helper_world_expect(world, KVT_INDEX_EVENT_FAILED);
    assert_int_equal(world->last.error, -EPROTO);
}

static void test_helper_that_hangs(void **state)
{
    struct helper_world *world = *state;
    uint64_t before_ns;

    program_make(world, "#!/bin/sh\nexec sleep 600\n");
    helper_world_open(world);
    helper_world_pause(50);
    before_ns = kvt_clock_mono_ns();
    helper_world_close(world);
    assert_true(kvt_clock_mono_ns() - before_ns < 5 * KVT_NS_PER_S);
}

/* A helper that is alive and does not answer: with a commit that was asked for, or with more than
 * the socket takes. */
static void test_helper_that_stalls(void **state)
{
    struct helper_world *world = *state;

    world->config.hang_ns = KVT_NS_PER_S; /* a device that is slow has to be faster */
    for (uint32_t round = 0; round < 2; round++) {
        uint64_t first = round * 100 + 1, before_ns;

        helper_world_load(world);
        helper_world_put_blocks(world, first, first + 100);
        helper_world_sync(world);
        assert_int_equal(kill(helper_world_pid(world), SIGSTOP), 0);
        before_ns = kvt_clock_mono_ns();
        helper_world_put_blocks(world, first + 100, round == 0 ? first + 101 : first + 8000);
        helper_world_expect(world, KVT_INDEX_EVENT_FAILED);
        assert_true(kvt_clock_mono_ns() - before_ns >= world->config.hang_ns);
        assert_int_equal(world->last.error, -ETIMEDOUT);
        assert_string_equal(world->last.why, "helper did not answer for 1.0 s");
        helper_world_close(world);
    }
    helper_world_load(world);
    helper_world_holds(world, 201);
}

/* The first helper dies before it tells a row: a second one makes the index anew. */
static void test_helper_dies_at_first(void **state)
{
    struct helper_world *world = *state;
    char text[KVT_PROGRAM_PATH_BYTES + 256];

    helper_world_load(world);
    helper_world_put_blocks(world, 1, 101);
    helper_world_close(world);
    (void)snprintf(
        text, sizeof(text),
        "#!/bin/sh\nif mkdir %s/once 2>/dev/null; then kill -BUS $$; fi\nexec %s \"$@\"\n",
        world->dir, world->helper);
    program_make(world, text);
    helper_world_load(world);
    assert_true(world->last.loaded.was_rebuilt);
    assert_string_equal(world->last.why, "helper ended by SIGBUS: the index was made anew");
    helper_world_put_blocks(world, 1, 51);
    helper_world_close(world);
    helper_world_load(world);
    assert_false(world->last.loaded.was_rebuilt);
    assert_string_equal(world->last.why, "");
    helper_world_holds(world, 51);
}

static void test_damaged_index(void **state)
{
    struct helper_world *world = *state;
    uint8_t garbage[8192];
    int fd;

    helper_world_load(world);
    helper_world_put_blocks(world, 1, 101);
    helper_world_close(world);
    memset(garbage, 0x5a, sizeof(garbage));
    fd = open(world->path, O_WRONLY | O_CLOEXEC);
    assert_true(fd >= 0);
    assert_int_equal(pwrite(fd, garbage, sizeof(garbage), 0), sizeof(garbage));
    assert_int_equal(close(fd), 0);
    helper_world_load(world);
    assert_true(world->last.loaded.was_rebuilt);
    assert_non_null(strstr(world->last.why, "the index was made anew"));
    helper_world_close(world);
    /* Wanted, though nothing is wrong. */
    world->config.is_rebuild_wanted = true;
    helper_world_load(world);
    assert_true(world->last.loaded.was_rebuilt);
    assert_string_equal(world->last.why, "");
    /* No room for the file, no permission: nothing that a rebuild would cure. */
    helper_world_close(world);
    world->config.is_rebuild_wanted = false;
    (void)snprintf(world->path, sizeof(world->path), "%s/none/index", world->dir);
    helper_world_open(world);
    helper_world_expect(world, KVT_INDEX_EVENT_FAILED);
    assert_int_equal(world->last.error, -ENOENT);
    assert_non_null(strstr(world->last.why, world->path));
}

/* A device's data with the slots of the blocks [1, end), where their copies say that they are. */
static void data_make(struct helper_world *world, const char *path, uint64_t end)
{
    int fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
    static uint8_t slot[4096];

    assert_true(fd >= 0);
    assert_int_equal(ftruncate(fd, 65536 + 8 * KVT_MIB), 0);
    for (uint64_t id = 1; id < end; id++) {
        struct kvt_index_put row = helper_world_row(id), copy = helper_world_copy(id, 1000 + id);

        for (uint16_t rank = 0; rank < 2; rank++) {
            struct kvt_slot_info info = {.epoch = EPOCH,
                                         .block_id = id,
                                         .parent_id = row.parent_id,
                                         .block_idx = row.key.block_idx,
                                         .generation = copy.content,
                                         .payload_bytes = 3000,
                                         .block_tokens = BLOCK_TOKENS,
                                         .component = copy.component,
                                         .rank = rank};
            uint8_t *payload = slot + kvt_slot_header_bytes(BLOCK_TOKENS);

            memcpy(info.store_id, world->config.store_id, sizeof(info.store_id));
            memset(info.root_digest, (int)((id - 1) / 50), sizeof(info.root_digest));
            if (row.extra_key != NULL)
                memcpy(info.extra_key, row.extra_key, sizeof(info.extra_key));
            kvt_slot_header_write(slot, &info, row.tokens);
            memset(payload, (int)id, info.payload_bytes);
            kvt_slot_header_seal(slot, kvt_hash64(payload, info.payload_bytes, 0));
            assert_int_equal(
                pwrite(fd, slot, sizeof(slot), (off_t)(65536 + copy.slot_offsets[rank])),
                sizeof(slot));
        }
    }
    assert_int_equal(close(fd), 0);
}

/* What happened in the folder since it was watched: the place of the first such event; -1: none. */
static int event_find(const char *events, ssize_t bytes, uint32_t mask, const char *name)
{
    int number = 0;

    for (const char *at = events; at < events + bytes; number++) {
        struct inotify_event event;

        memcpy(&event, at, sizeof(event));
        at += sizeof(event);
        if ((event.mask & mask) != 0 && event.len > 0 && strcmp(at, name) == 0)
            return number;
        at += event.len;
    }
    return -1;
}

/* An empty index never lies there without the mark that it is not all: whenever a start is cut
 * short, the next one looks for slots again. */
static void test_marked_before_made(void **state)
{
    struct helper_world *world = *state;
    int fd = inotify_init1(IN_CLOEXEC), begin, made, end;
    char events[8192];
    ssize_t bytes;

    assert_true(fd >= 0);
    assert_true(inotify_add_watch(fd, world->dir, IN_CREATE | IN_MOVED_TO | IN_DELETE) >= 0);
    helper_world_load(world);
    bytes = read(fd, events, sizeof(events));
    assert_true(bytes > 0);
    begin = event_find(events, bytes, IN_CREATE, "l3.index.rebuild");
    made = event_find(events, bytes, IN_CREATE | IN_MOVED_TO, "l3.index");
    end = event_find(events, bytes, IN_DELETE, "l3.index.rebuild");
    assert_true(begin >= 0 && begin < made && made < end);
    assert_int_equal(close(fd), 0);
}

/* When memory runs out, it is the helper that goes. */
static void test_goes_first(void **state)
{
    struct helper_world *world = *state;
    char path[64], text[16] = "";
    FILE *file;

    helper_world_load(world);
    (void)snprintf(path, sizeof(path), "/proc/%d/oom_score_adj", (int)helper_world_pid(world));
    file = fopen(path, "re");
    assert_non_null(file);
    assert_non_null(fgets(text, sizeof(text), file));
    assert_int_equal(fclose(file), 0);
    assert_string_equal(text, "1000\n");
}

/* An index that is not there is made from the slots; so is one that was not finished. */
static void test_lost_index(void **state)
{
    struct helper_world *world = *state;
    char data[128], mark[128];
    int fd;

    (void)snprintf(data, sizeof(data), "%s/data", world->dir);
    (void)snprintf(mark, sizeof(mark), "%s.rebuild", world->path);
    world->config.data_path = data;
    world->config.data_offset_bytes = 65536;
    world->config.data_bytes = 8 * KVT_MIB;
    data_make(world, data, 201);
    helper_world_load(world);
    assert_true(world->last.loaded.was_rebuilt);
    assert_int_equal(world->last.loaded.block_id_max, 200);
    assert_int_equal(world->last.loaded.content_max, 1200);
    assert_string_equal(world->last.why, "made anew from 400 slots: 200 blocks with 200 copies");
    assert_int_equal(atomic_load(&world->index->counters.scan_bytes), 8 * KVT_MIB);
    helper_world_holds(world, 201);
    helper_world_put_blocks(world, 201, 301);
    helper_world_close(world);
    helper_world_load(world);
    assert_false(world->last.loaded.was_rebuilt);
    assert_string_equal(world->last.why, "");
    helper_world_holds(world, 301);
    helper_world_close(world);
    /* What was put since has no slots here. */
    fd = open(mark, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
    assert_true(fd >= 0 && close(fd) == 0);
    helper_world_load(world);
    assert_true(world->last.loaded.was_rebuilt);
    helper_world_holds(world, 201);
    assert_int_equal(access(mark, F_OK), -1);
    helper_world_close(world);
    /* Damaged: the first helper says so, another one scans, and both reach people. */
    fd = open(world->path, O_WRONLY | O_CLOEXEC);
    assert_true(fd >= 0);
    assert_int_equal(pwrite(fd, mark, sizeof(mark), 0), sizeof(mark));
    assert_int_equal(pwrite(fd, mark, sizeof(mark), 4096), sizeof(mark));
    assert_int_equal(close(fd), 0);
    helper_world_load(world);
    helper_world_holds(world, 201);
    assert_non_null(strstr(world->last.why, ": made anew from 400 slots: 200 blocks"));
    helper_world_close(world);
    /* It cannot be: the data are gone too. */
    assert_int_equal(unlink(data) | unlink(world->path), 0);
    helper_world_open(world);
    helper_world_expect(world, KVT_INDEX_EVENT_FAILED);
    assert_int_equal(world->last.error, -ENOENT);
}

static void test_no_process(void **state)
{
    struct helper_world *world = *state;

    fail_socketpair = true;
    helper_world_open(world);
    helper_world_expect(world, KVT_INDEX_EVENT_FAILED);
    assert_int_equal(world->last.error, -EMFILE);
    helper_world_close(world);
    fail_socketpair = false;
    fail_spawn = true;
    helper_world_open(world);
    helper_world_expect(world, KVT_INDEX_EVENT_FAILED);
    assert_int_equal(world->last.error, -EAGAIN);
}

#define WORLD_TEST(name) cmocka_unit_test_setup_teardown(name, helper_world_make, helper_world_free)

int main(void)
{
    const struct CMUnitTest tests[] = {
        WORLD_TEST(test_killed_helper),        WORLD_TEST(test_killed_parent),
        WORLD_TEST(test_killed_while_loading), WORLD_TEST(test_no_helper),
        WORLD_TEST(test_helper_that_lies),     WORLD_TEST(test_helper_that_stalls),
        WORLD_TEST(test_marked_before_made),   WORLD_TEST(test_goes_first),
        WORLD_TEST(test_helper_that_hangs),    WORLD_TEST(test_helper_dies_at_first),
        WORLD_TEST(test_damaged_index),        WORLD_TEST(test_lost_index),
        WORLD_TEST(test_no_process),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
