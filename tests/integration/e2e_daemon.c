/* The daemon as a process. Its log is a file, so that a full pipe can never stall it; when a test
 * fails the directory stays. */
#include "tests/integration/e2e.h"

#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <signal.h>
#include <spawn.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "daemon/base/clock.h"

#define START_MS_MAX 30000u
#define SETTINGS_MAX 32u

extern char **environ;

void e2e_sleep_ms(uint32_t ms)
{
    struct timespec left = {.tv_sec = ms / 1000, .tv_nsec = (long)(ms % 1000) * 1000000};

    while (nanosleep(&left, &left) != 0)
        CHECK(errno == EINTR);
}

/* "key=@/x" -> "key=DIR/x". */
static void setting_text(const struct e2e_daemon *daemon, const char *setting, char *text,
                         size_t bytes)
{
    const char *at = strstr(setting, "=@/");

    if (at == NULL)
        (void)snprintf(text, bytes, "%s", setting);
    else
        (void)snprintf(text, bytes, "%.*s%s%s", (int)(at - setting) + 1, setting, daemon->dir,
                       at + 2);
}

static void spawn(struct e2e_daemon *daemon, const char *const settings[])
{
    char texts[SETTINGS_MAX][E2E_PATH_BYTES + 64];
    char *argv[2 * SETTINGS_MAX + 2];
    const char *const defaults[] = {"server.socket=@/d.sock", "server.admin_socket=@/admin.sock",
                                    "index.memory=16MiB",     "tiers.l2.bytes=32MiB",
                                    "tiers.l2.pages=plain",   "tiers.l2.slab_unit=1MiB",
                                    "stop.deadline=10s",      "log.level=debug"};
    posix_spawn_file_actions_t actions;
    uint32_t count = 0, argc = 0;

    for (size_t i = 0; i < KVT_COUNT_OF(defaults); i++)
        setting_text(daemon, defaults[i], texts[count++], sizeof(texts[0]));
    for (; settings != NULL && *settings != NULL; settings++) {
        CHECK(count < SETTINGS_MAX);
        setting_text(daemon, *settings, texts[count++], sizeof(texts[0]));
    }
    argv[argc++] = (char *)(uintptr_t)daemon->program;
    for (uint32_t i = 0; i < count; i++) {
        if (strncmp(texts[i], "--", 2) != 0)
            argv[argc++] = (char *)(uintptr_t) "--set";
        argv[argc++] = texts[i];
    }
    argv[argc] = NULL;
    CHECK(posix_spawn_file_actions_init(&actions) == 0);
    CHECK(posix_spawn_file_actions_addopen(&actions, 1, daemon->log, O_WRONLY | O_CREAT | O_APPEND,
                                           0600) == 0);
    CHECK(posix_spawn_file_actions_adddup2(&actions, 1, 2) == 0);
    CHECK(posix_spawn(&daemon->pid, daemon->program, &actions, NULL, argv, environ) == 0);
    CHECK(posix_spawn_file_actions_destroy(&actions) == 0);
}

static void make_places(struct e2e_daemon *daemon, const char *program)
{
    *daemon = (struct e2e_daemon){.program = program};
    (void)snprintf(daemon->dir, sizeof(daemon->dir), "/tmp/kvt-e2e-XXXXXX");
    CHECK(mkdtemp(daemon->dir) != NULL);
    (void)snprintf(daemon->socket, sizeof(daemon->socket), "%s/d.sock", daemon->dir);
    (void)snprintf(daemon->admin_socket, sizeof(daemon->admin_socket), "%s/admin.sock",
                   daemon->dir);
    (void)snprintf(daemon->log, sizeof(daemon->log), "%s/log", daemon->dir);
}

static void print_log(const struct e2e_daemon *daemon)
{
    char text[65536];
    int fd = open(daemon->log, O_RDONLY | O_CLOEXEC);
    ssize_t got = fd < 0 ? 0 : read(fd, text, sizeof(text));

    (void)fwrite(text, 1, got > 0 ? (size_t)got : 0, stderr);
    if (fd >= 0)
        (void)close(fd);
}

/* Serving is: a Health check over gRPC says so. */
static bool serves(const struct e2e_daemon *daemon)
{
    struct kvt_client_config config = {.socket_path = daemon->socket, .deadline_ns = KVT_NS_PER_S};
    struct kvt_client *client = NULL;
    struct kvt_op *op;
    bool is_serving;

    if (kvt_client_open(&client, &config) != 0)
        return false;
    op = e2e_op(KVT_OP_HEALTH);
    kvt_client_health(client, op, "");
    is_serving = op->code == KVT_CODE_OK && op->ans.health.is_serving;
    (void)e2e_op_free(op);
    (void)kvt_client_close(client);
    return is_serving;
}

static void wait_until_serving(struct e2e_daemon *daemon)
{
    for (uint32_t waited_ms = 0; !serves(daemon); waited_ms += 20) {
        int status;

        if (waited_ms > START_MS_MAX || waitpid(daemon->pid, &status, WNOHANG) != 0) {
            print_log(daemon);
            (void)fprintf(stderr, "the daemon does not start\n");
            exit(1);
        }
        e2e_sleep_ms(20);
    }
}

void e2e_daemon_start(struct e2e_daemon *daemon, const char *program, const char *const settings[])
{
    make_places(daemon, program);
    e2e_daemon_restart(daemon, settings);
}

void e2e_daemon_restart(struct e2e_daemon *daemon, const char *const settings[])
{
    e2e_daemon_begin(daemon, settings);
    wait_until_serving(daemon);
}

void e2e_daemon_begin(struct e2e_daemon *daemon, const char *const settings[])
{
    CHECK(daemon->pid == 0);
    spawn(daemon, settings);
}

static int remove_one(const char *path, const struct stat *st, int kind, struct FTW *place)
{
    (void)st;
    (void)kind;
    (void)place;
    return remove(path);
}

int e2e_daemon_start_fails(struct e2e_daemon *daemon, const char *program,
                           const char *const settings[], char *ret_log, size_t log_bytes)
{
    int status, fd;
    ssize_t got;

    make_places(daemon, program);
    spawn(daemon, settings);
    for (uint32_t waited_ms = 0; waitpid(daemon->pid, &status, WNOHANG) == 0; waited_ms += 20) {
        CHECK(waited_ms < START_MS_MAX);
        e2e_sleep_ms(20);
    }
    daemon->pid = 0;
    CHECK(WIFEXITED(status));
    fd = open(daemon->log, O_RDONLY | O_CLOEXEC);
    CHECK(fd >= 0);
    got = read(fd, ret_log, log_bytes - 1);
    CHECK(got >= 0);
    ret_log[got] = '\0';
    (void)close(fd);
    CHECK(nftw(daemon->dir, remove_one, 8, FTW_DEPTH | FTW_PHYS) == 0);
    return WEXITSTATUS(status);
}

void e2e_daemon_kill(struct e2e_daemon *daemon)
{
    int status;

    CHECK(daemon->pid > 0);
    CHECK(kill(daemon->pid, SIGKILL) == 0);
    CHECK(waitpid(daemon->pid, &status, 0) == daemon->pid);
    CHECK(WIFSIGNALED(status));
    daemon->pid = 0;
}

void e2e_daemon_leave(struct e2e_daemon *daemon)
{
    int status;

    CHECK(daemon->pid > 0);
    CHECK(kill(daemon->pid, SIGTERM) == 0);
    CHECK(waitpid(daemon->pid, &status, 0) == daemon->pid);
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) {
        print_log(daemon);
        (void)fprintf(stderr, "the daemon did not leave with 0: wait status %#x\n",
                      (unsigned)status);
        exit(1);
    }
    daemon->pid = 0;
}

void e2e_daemon_stop(struct e2e_daemon *daemon)
{
    if (daemon->pid > 0)
        e2e_daemon_leave(daemon);
    CHECK(nftw(daemon->dir, remove_one, 8, FTW_DEPTH | FTW_PHYS) == 0);
}

uint64_t e2e_rss_bytes(pid_t pid)
{
    char path[64], text[256];
    unsigned long long total, resident;
    int fd;
    ssize_t got;

    (void)snprintf(path, sizeof(path), "/proc/%d/statm", (int)pid);
    fd = open(path, O_RDONLY | O_CLOEXEC);
    CHECK(fd >= 0);
    got = read(fd, text, sizeof(text) - 1);
    CHECK(got > 0);
    text[got] = '\0';
    (void)close(fd);
    CHECK(sscanf(text, "%llu %llu", &total, &resident) == 2);
    return resident * (uint64_t)sysconf(_SC_PAGESIZE);
}
