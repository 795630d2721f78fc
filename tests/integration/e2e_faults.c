/* What goes wrong around a real daemon: clients that are killed in the middle, daemons that are
 * killed, a disk that changes bytes, a file system without room. What was held is free again at
 * once, nobody else notices, and no wrong byte is ever served.
 *
 * Victims are this program again, in another process, so that SIGKILL takes them whole. */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "daemon/base/alloc.h"
#include "daemon/base/clock.h"
#include "tests/integration/e2e.h"

extern char **environ;

static const struct e2e_model full = {.name = "full",
                                      .block_tokens = 16,
                                      .ranks = 1,
                                      .components_count = 1,
                                      .components = {{.kind = 1, .bytes = 65536}}};
#define PROMPT_TOKENS 1024u
#define PROMPT_BLOCKS 64u

/* ---- victims ----------------------------------------------------------------------------------
 */

static void victim_hold(struct e2e_engine *engine)
{
    struct kvt_op *op = e2e_op(KVT_OP_LOOKUP);
    uint32_t tokens[PROMPT_TOKENS];

    for (uint32_t i = 0; i < 16; i++) {
        e2e_tokens(tokens, PROMPT_TOKENS, 1, 0);
        e2e_op_again(op, KVT_OP_LOOKUP);
        e2e_lookup_request(engine, op, tokens, 64, true);
        kvt_client_call(engine->client, op);
        CHECK_CODE(op, KVT_CODE_OK);
        CHECK(op->ans.lookup.lease.id != 0);
        e2e_tokens(tokens, 64, 1000 + i, 0);
        e2e_op_again(op, KVT_OP_RESERVE);
        e2e_reserve_request(engine, op, tokens, 64);
        kvt_client_call(engine->client, op);
        CHECK_CODE(op, KVT_CODE_OK);
    }
    (void)e2e_op_free(op);
}

/* Never returns: it is killed. "ready" on stdout says that it is at it. */
static int victim(const char *mode, const char *socket)
{
    struct e2e_daemon daemon = {0};
    struct e2e_engine engine, *self = &engine;
    uint32_t tokens[PROMPT_TOKENS], seed = (uint32_t)getpid();

    (void)snprintf(daemon.socket, sizeof(daemon.socket), "%s", socket);
    e2e_engine_open(&engine, &daemon, &full, 9, 0, true);
    if (strcmp(mode, "hold") == 0)
        victim_hold(&engine);
    CHECK(write(STDOUT_FILENO, "ready", 5) == 5);
    for (;;) {
        struct e2e_promoted got;

        if (strcmp(mode, "hold") == 0) {
            e2e_sleep_ms(1000);
        } else if (strcmp(mode, "demote") == 0) {
            e2e_tokens(tokens, PROMPT_TOKENS, seed++, 0);
            (void)e2e_store(&engine, &self, 1, tokens, PROMPT_TOKENS);
        } else {
            e2e_tokens(tokens, PROMPT_TOKENS, 1, 0);
            e2e_promote(&engine, tokens, PROMPT_TOKENS, &got);
        }
    }
}

static pid_t spawn_victim(const char *program, const char *self, const char *mode,
                          const struct e2e_daemon *daemon)
{
    char *argv[] = {(char *)(uintptr_t)self,           (char *)(uintptr_t)program,
                    (char *)(uintptr_t) "--victim",    (char *)(uintptr_t)mode,
                    (char *)(uintptr_t)daemon->socket, NULL};
    posix_spawn_file_actions_t actions;
    char ready[5];
    int ends[2];
    pid_t pid;

    CHECK(pipe2(ends, O_CLOEXEC) == 0);
    CHECK(posix_spawn_file_actions_init(&actions) == 0);
    CHECK(posix_spawn_file_actions_adddup2(&actions, ends[1], STDOUT_FILENO) == 0);
    CHECK(posix_spawn(&pid, self, &actions, NULL, argv, environ) == 0);
    CHECK(posix_spawn_file_actions_destroy(&actions) == 0);
    (void)close(ends[1]);
    CHECK(read(ends[0], ready, sizeof(ready)) == sizeof(ready));
    (void)close(ends[0]);
    return pid;
}

static void test_killed_clients(const char *program, const char *self_program, uint32_t rounds)
{
    static const char *const modes[] = {"hold", "demote", "promote"};
    static const char *const settings[] = {"tiers.l2.bytes=16MiB", "tiers.l3.path=@/l3",
                                           "tiers.l3.bytes=64MiB", NULL};
    struct e2e_daemon daemon;
    struct e2e_engine engine, *self = &engine;
    struct kvt_op *op = e2e_op(KVT_OP_STATS);
    struct e2e_promoted got;
    uint32_t tokens[PROMPT_TOKENS];

    e2e_daemon_start(&daemon, program, settings);
    e2e_engine_open(&engine, &daemon, &full, 1, 0, true);
    e2e_tokens(tokens, PROMPT_TOKENS, 1, 0);
    CHECK(e2e_store(&engine, &self, 1, tokens, PROMPT_TOKENS) == PROMPT_BLOCKS);
    for (uint32_t round = 0; round < rounds; round++)
        for (size_t m = 0; m < KVT_COUNT_OF(modes); m++) {
            pid_t pid = spawn_victim(program, self_program, modes[m], &daemon);
            uint64_t killed_ns;

            e2e_sleep_ms(3 + round * 7);
            if (strcmp(modes[m], "hold") == 0) {
                CHECK(e2e_stats(&engine, op)->leases == 16);
                CHECK(op->ans.stats.reserved_copies == 64 && op->ans.stats.tickets == 16);
            }
            CHECK(kill(pid, SIGKILL) == 0);
            CHECK(waitpid(pid, NULL, 0) == pid);
            killed_ns = kvt_clock_mono_ns();
            e2e_expect_idle(&engine);
            /* At once, not by a deadline (leases and tickets have 30 s). */
            CHECK(kvt_clock_mono_ns() - killed_ns < 15 * KVT_NS_PER_S);
            CHECK(e2e_stats(&engine, op)->sessions == 1);
            e2e_promote(&engine, tokens, PROMPT_TOKENS, &got);
            CHECK(got.wrong_bytes == 0);
            if (got.done < PROMPT_BLOCKS)
                (void)e2e_store(&engine, &self, 1, tokens, PROMPT_TOKENS);
        }
    (void)e2e_op_free(op);
    e2e_engine_close(&engine);
    e2e_daemon_stop(&daemon);
}

static void test_killed_daemon(const char *program)
{
    struct e2e_daemon daemon;
    struct e2e_engine engine, fresh, *self = &engine;
    struct kvt_op *op = e2e_op(KVT_OP_LOOKUP);
    struct kvt_notice notice;
    uint32_t tokens[PROMPT_TOKENS];
    struct kvt_handle lease;

    e2e_daemon_start(&daemon, program, NULL);
    e2e_engine_open(&engine, &daemon, &full, 1, 0, true);
    e2e_tokens(tokens, PROMPT_TOKENS, 1, 0);
    CHECK(e2e_store(&engine, &self, 1, tokens, PROMPT_TOKENS) == PROMPT_BLOCKS);
    e2e_lookup_request(&engine, op, tokens, PROMPT_TOKENS, true);
    kvt_client_call(engine.client, op);
    CHECK_CODE(op, KVT_CODE_OK);
    lease = op->ans.lookup.lease;
    e2e_daemon_kill(&daemon);
    /* The end of the stream is seen, and calls end; nothing hangs. */
    CHECK(kvt_session_next_notice(engine.session, 10 * KVT_NS_PER_S, &notice) == -EPIPE);
    e2e_op_again(op, KVT_OP_LOOKUP);
    op->deadline_ns = kvt_clock_mono_ns() + 2 * KVT_NS_PER_S;
    e2e_lookup_request(&engine, op, tokens, PROMPT_TOKENS, false);
    kvt_client_call(engine.client, op);
    CHECK(op->code == KVT_CODE_UNAVAILABLE || op->code == KVT_CODE_DEADLINE_EXCEEDED);
    e2e_daemon_restart(&daemon, NULL);
    e2e_engine_open(&fresh, &daemon, &full, 1, 0, true);
    /* Handles of the daemon before: attach again. */
    e2e_op_again(op, KVT_OP_LOOKUP);
    e2e_lookup_request(&engine, op, tokens, PROMPT_TOKENS, false);
    kvt_client_call(fresh.client, op);
    CHECK_CODE(op, KVT_CODE_FAILED_PRECONDITION);
    e2e_op_again(op, KVT_OP_RELEASE);
    op->req.release.session = fresh.handle;
    op->req.release.lease = lease;
    kvt_client_call(fresh.client, op);
    CHECK_CODE(op, KVT_CODE_FAILED_PRECONDITION);
    self = &fresh;
    CHECK(e2e_boundary(&fresh, tokens, PROMPT_TOKENS) == 0);
    CHECK(e2e_store(&fresh, &self, 1, tokens, PROMPT_TOKENS) == PROMPT_BLOCKS);
    (void)e2e_op_free(op);
    e2e_engine_close(&engine);
    e2e_engine_close(&fresh);
    e2e_daemon_stop(&daemon);
}

/* ---- the disk ---------------------------------------------------------------------------------
 */

/* Flips a byte every 16 KiB of the file: every slot of 64 KiB is hit. */
static void spoil(const struct e2e_daemon *daemon)
{
    char path[E2E_PATH_BYTES];
    struct stat st;
    int fd;

    (void)snprintf(path, sizeof(path), "%s/l3", daemon->dir);
    fd = open(path, O_RDWR | O_CLOEXEC);
    CHECK(fd >= 0 && fstat(fd, &st) == 0);
    CHECK((st.st_mode & 0777) == 0600);
    for (off_t at = 8192; at + 1 < st.st_size; at += 16384) {
        uint8_t byte;

        CHECK(pread(fd, &byte, 1, at) == 1);
        byte ^= 0x40;
        CHECK(pwrite(fd, &byte, 1, at) == 1);
    }
    CHECK(fdatasync(fd) == 0);
    (void)close(fd);
}

static void test_spoiled_disk(const char *program)
{
    static const char *const settings[] = {"tiers.l2.bytes=8MiB",
                                           "tiers.l3.path=@/l3",
                                           "tiers.l3.bytes=32MiB",
                                           "limits.reserved_bytes_per_engine=6MiB",
                                           "limits.leased_bytes_per_engine=8MiB",
                                           NULL};
    struct e2e_daemon daemon;
    struct e2e_engine engine, *self = &engine;
    struct e2e_promoted got;
    struct kvt_op *op = e2e_op(KVT_OP_STATS);
    uint64_t missed = 0, errors;
    uint32_t tokens[PROMPT_TOKENS];

    e2e_daemon_start(&daemon, program, settings);
    e2e_engine_open(&engine, &daemon, &full, 1, 0, true);
    for (uint32_t seed = 1; seed <= 5; seed++) {
        e2e_tokens(tokens, PROMPT_TOKENS, seed, 0);
        CHECK(e2e_store(&engine, &self, 1, tokens, PROMPT_TOKENS) == PROMPT_BLOCKS);
        e2e_sleep_ms(50);
    }
    CHECK(e2e_stats(&engine, op)->tiers_count == 3);
    (void)printf("spoiled disk: %llu copies on L3, %llu errors before\n",
                 (unsigned long long)op->ans.stats.tiers[2].copies,
                 (unsigned long long)op->ans.stats.tiers[2].errors);
    CHECK(op->ans.stats.tiers[2].copies > 64 && op->ans.stats.tiers[2].errors == 0);
    spoil(&daemon);
    for (uint32_t seed = 1; seed <= 5; seed++) {
        e2e_tokens(tokens, PROMPT_TOKENS, seed, 0);
        e2e_promote(&engine, tokens, PROMPT_TOKENS, &got);
        CHECK(got.wrong_bytes == 0);
        /* Later ones may have gone down from L2 after the bytes were flipped. */
        CHECK(seed > 1 || got.from[2] == 0);
        missed += got.missed;
    }
    errors = e2e_stats(&engine, op)->tiers[2].errors;
    (void)printf("spoiled disk: %llu moves missed, %llu errors counted\n",
                 (unsigned long long)missed, (unsigned long long)errors);
    CHECK(missed > 0 && errors > 0);
    /* Stored again it is there again. */
    for (uint32_t seed = 1; seed <= 2; seed++) {
        e2e_tokens(tokens, PROMPT_TOKENS, seed, 0);
        (void)e2e_store(&engine, &self, 1, tokens, PROMPT_TOKENS);
        e2e_promote(&engine, tokens, PROMPT_TOKENS, &got);
        CHECK(got.wrong_bytes == 0 && got.boundary_tokens == PROMPT_TOKENS);
    }
    e2e_expect_idle(&engine);
    (void)e2e_op_free(op);
    e2e_engine_close(&engine);
    e2e_daemon_stop(&daemon);
}

static bool test_no_room(const char *program)
{
    char dir[] = "/tmp/kvt-e2e-small-XXXXXX", setting[128], log[65536];
    const char *settings[] = {setting, "tiers.l3.bytes=64MiB", NULL};
    struct e2e_daemon daemon;
    int status;

    CHECK(mkdtemp(dir) != NULL);
    if (mount("kvt-e2e", dir, "tmpfs", 0, "size=4m,mode=0700") != 0) {
        (void)printf("SKIP: a small file system: mount: %s\n", strerror(errno));
        (void)rmdir(dir);
        return false;
    }
    (void)snprintf(setting, sizeof(setting), "tiers.l3.path=%s/l3", dir);
    status = e2e_daemon_start_fails(&daemon, program, settings, log, sizeof(log));
    for (uint32_t waited_ms = 0; umount(dir) != 0; waited_ms += 20) {
        CHECK(errno == EBUSY && waited_ms < 20000); /* it is let go of a moment after the end */
        e2e_sleep_ms(20);
    }
    CHECK(rmdir(dir) == 0);
    if (status == 0 || (strstr(log, "l3") == NULL && strstr(log, "L3") == NULL))
        (void)fprintf(stderr, "%s", log);
    CHECK(status != 0);
    CHECK(strstr(log, "l3") != NULL || strstr(log, "L3") != NULL);
    return true;
}

int main(int argc, char *argv[])
{
    CHECK(argc >= 3);
    kvt_client_library_init();
    if (argc == 5 && strcmp(argv[2], "--victim") == 0)
        return victim(argv[3], argv[4]);
    test_killed_clients(argv[1], argv[0], argv[2][0] == 'r' ? 2 : 6);
    test_killed_daemon(argv[1]);
    test_spoiled_disk(argv[1]);
    (void)test_no_room(argv[1]);
    kvt_client_library_deinit();
    (void)printf("ok\n");
    return 0;
}
