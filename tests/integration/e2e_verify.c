/* Bytes that go bad in L2 or L3, under every setting of verify: caught where it is on, served where
 * it is off. Run with kvtierd, and with kvtierd-no-verify, for which everything is off: there the
 * engine must see wrong bytes, or the tests that see none prove nothing.
 *
 * Damage is to one byte of each payload, found as docs/formats.md says: in the memfd that L2 is (by
 * /proc/PID/fd, which is open to the same user), and in the file of L3 while no daemon has it. */
#include <dirent.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "daemon/base/bytes.h"
#include "tests/integration/e2e.h"

#define SLOT_ALIGN 4096u
#define AT_HEADER_BYTES 12u
#define AT_PAYLOAD_BYTES 160u
#define PROMPT_TOKENS 512u
#define PROMPT_BLOCKS 32u

static const struct e2e_model full = {.name = "full",
                                      .block_tokens = 16,
                                      .ranks = 1,
                                      .components_count = 1,
                                      .components = {{.kind = 1, .bytes = 16384}}};

/* One byte of the payload of every slot in @fd, which is closed. */
static uint64_t damage(int fd)
{
    uint64_t damaged = 0;
    struct stat st;
    uint8_t *data;

    CHECK(fd >= 0 && fstat(fd, &st) == 0);
    data = mmap(NULL, (size_t)st.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    CHECK(data != MAP_FAILED);
    for (uint64_t at = 0; at + SLOT_ALIGN <= (uint64_t)st.st_size; at += SLOT_ALIGN) {
        uint64_t payload_bytes = kvt_get_u64(data + at, AT_PAYLOAD_BYTES);

        if (memcmp(data + at, "KVTSLOT1", 8) != 0 || payload_bytes == 0)
            continue;
        data[at + kvt_get_u32(data + at, AT_HEADER_BYTES) + payload_bytes / 2] ^= 0x10;
        damaged++;
    }
    CHECK(msync(data, (size_t)st.st_size, MS_SYNC) == 0 && munmap(data, (size_t)st.st_size) == 0);
    CHECK(close(fd) == 0);
    return damaged;
}

/* The memfd of L2. */
static int open_l2(pid_t pid)
{
    char dir[64], path[400], name[64];
    const struct dirent *entry;
    DIR *fds;
    int fd = -1;

    (void)snprintf(dir, sizeof(dir), "/proc/%d/fd", (int)pid);
    fds = opendir(dir);
    CHECK(fds != NULL);
    while (fd < 0 && (entry = readdir(fds)) != NULL) {
        ssize_t bytes;

        (void)snprintf(path, sizeof(path), "%s/%s", dir, entry->d_name);
        bytes = readlink(path, name, sizeof(name) - 1);
        name[bytes < 0 ? 0 : bytes] = '\0';
        if (strncmp(name, "/memfd:kvtierd-l2", 17) == 0)
            fd = open(path, O_RDWR | O_CLOEXEC);
    }
    CHECK(closedir(fds) == 0);
    return fd;
}

static uint64_t counter(struct e2e_engine *engine, struct kvt_op *op, const char *name)
{
    const struct kvt_ans_stats *stats = e2e_stats(engine, op);

    for (uint32_t i = 0; i < stats->counters_count; i++)
        if (strcmp(stats->counters[i].name, name) == 0)
            return stats->counters[i].value;
    CHECK(false);
    return 0;
}

/* One wrong byte a block, or a miss of each; and what the daemon counted. */
static void expect(struct e2e_engine *engine, const uint32_t *tokens, bool is_caught)
{
    struct kvt_op *op = e2e_op(KVT_OP_STATS);
    struct e2e_promoted got;

    e2e_promote(engine, tokens, PROMPT_TOKENS, &got);
    (void)printf("%llu came, %llu missed, %llu wrong bytes\n", (unsigned long long)got.done,
                 (unsigned long long)got.missed, (unsigned long long)got.wrong_bytes);
    CHECK(got.done == (is_caught ? 0 : PROMPT_BLOCKS));
    CHECK(got.missed == (is_caught ? PROMPT_BLOCKS : 0));
    CHECK(got.wrong_bytes == (is_caught ? 0 : PROMPT_BLOCKS));
    CHECK(counter(engine, op, "slots_bad") == (is_caught ? PROMPT_BLOCKS : 0));
    (void)e2e_op_free(op);
}

static bool verifies(struct e2e_engine *engine)
{
    struct kvt_op *op = e2e_op(KVT_OP_STATS);
    struct kvt_text version = e2e_stats(engine, op)->version;
    bool is_off =
        version.bytes > 10 && memcmp(version.at + version.bytes - 10, "+no-verify", 10) == 0;

    (void)e2e_op_free(op);
    return !is_off;
}

static void test_l2(const char *program, const char *verify)
{
    char setting[64];
    const char *settings[] = {setting, NULL};
    struct e2e_engine engine, *self = &engine;
    struct e2e_daemon daemon;
    struct e2e_promoted got;
    uint32_t tokens[PROMPT_TOKENS];

    (void)snprintf(setting, sizeof(setting), "tiers.l2.verify=%s", verify);
    e2e_daemon_start(&daemon, program, settings);
    e2e_engine_open(&engine, &daemon, &full, 1, 0, true);
    e2e_tokens(tokens, PROMPT_TOKENS, 1, 0);
    CHECK(e2e_store(&engine, &self, 1, tokens, PROMPT_TOKENS) == PROMPT_BLOCKS);
    e2e_promote(&engine, tokens, PROMPT_TOKENS, &got);
    CHECK(got.done == PROMPT_BLOCKS && got.wrong_bytes == 0);
    CHECK(damage(open_l2(daemon.pid)) == PROMPT_BLOCKS);
    (void)printf("L2, verify %s: ", verify);
    expect(&engine, tokens, strcmp(verify, "always") == 0 && verifies(&engine));
    e2e_expect_idle(&engine);
    e2e_engine_close(&engine);
    e2e_daemon_stop(&daemon);
}

static void test_l3(const char *program)
{
    static const char *const settings[] = {"tiers.l3.path=@/l3", "tiers.l3.bytes=32MiB",
                                           "tiers.l3.write=through", "tiers.l2.verify=off", NULL};
    struct e2e_engine engine, *self = &engine;
    struct e2e_daemon daemon;
    uint32_t tokens[PROMPT_TOKENS];
    char path[E2E_PATH_BYTES];

    e2e_daemon_start(&daemon, program, settings);
    e2e_engine_open(&engine, &daemon, &full, 1, 0, true);
    e2e_tokens(tokens, PROMPT_TOKENS, 1, 0);
    CHECK(e2e_store(&engine, &self, 1, tokens, PROMPT_TOKENS) == PROMPT_BLOCKS);
    e2e_engine_close(&engine);
    e2e_daemon_leave(&daemon);
    (void)snprintf(path, sizeof(path), "%s/l3", daemon.dir);
    CHECK(damage(open(path, O_RDWR | O_CLOEXEC)) == PROMPT_BLOCKS);
    e2e_daemon_restart(&daemon, settings);
    e2e_engine_open(&engine, &daemon, &full, 1, 0, true);
    (void)printf("L3: ");
    expect(&engine, tokens, verifies(&engine));
    e2e_expect_idle(&engine);
    e2e_engine_close(&engine);
    e2e_daemon_stop(&daemon);
}

int main(int argc, char *argv[])
{
    CHECK(argc == 2);
    kvt_client_library_init();
    test_l2(argv[1], "always");
    test_l2(argv[1], "adopted");
    test_l2(argv[1], "off");
    test_l3(argv[1]);
    kvt_client_library_deinit();
    (void)printf("ok\n");
    return 0;
}
