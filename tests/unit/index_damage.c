/* Damaged files of an index: single bits all over, pages that are garbage or another's, files that
 * end early, random files. Each is opened, walked and written to in a child process. The child may
 * say that the file is bad, or walk; each row that it visits must be one that was put, bit for bit.
 * As every page is audited before LMDB sees it, no child dies.
 *
 *     test-index_damage [--seed N] [--flips N] */
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "tests/common/check.h"
#include "tests/common/cmocka.h"
#include "tests/common/index_world.h"
#include "tiers/index/audit.h"

#define FILE_BYTES (8u << 20)
#define PAGE_BYTES 4096u
#define BLOCKS 1500u

enum outcome { WALKED = 0, BAD = 1, WRONG = 2, FAILED = 3, DIED, OUTCOMES };

static uint64_t seed, rng;
static uint32_t flips = 1500;
static char directory[64], path[96];
static struct index_world world;
static struct index_world_bytes bytes;
static struct kvt_index_db_config config;
static uint32_t block_of[4 * BLOCKS]; /* by id, + 1 */
static uint8_t whole[FILE_BYTES];     /* the file as it was */
static uint64_t used_bytes;
static uint32_t outcomes[OUTCOMES];

static uint32_t rnd(uint32_t below)
{
    rng ^= rng << 13;
    rng ^= rng >> 7;
    rng ^= rng << 17;
    return (uint32_t)((rng >> 11) % below);
}

static struct kvt_index_db *db_open(int wanted)
{
    char why[KVT_INDEX_DB_WHY_BYTES];
    struct kvt_index_db *db = NULL;
    int r = kvt_index_db_open(&db, &config, why);

    if (r != wanted) {
        fprintf(stderr, "open: %d, not %d: %s\n", r, wanted, why);
        exit(1);
    }
    return db;
}

/* Rows of three sizes on paths and alone, many commits, a third dropped again: a tree of three
 * levels, a list of free pages. */
static void file_make(void)
{
    struct kvt_index_db *db;
    struct kvt_index_put put;

    config = (struct kvt_index_db_config){.path = path, .bytes = FILE_BYTES};
    for (uint32_t ns = 0; ns < 3; ns++)
        world.namespaces[ns] = (struct kvt_index_ns){
            .is_used = true, .epoch = ns, .block_tokens = ns == 2 ? 1000 : 64u >> ns};
    memcpy(config.namespaces, world.namespaces, sizeof(world.namespaces));
    db = db_open(KVT_INDEX_DB_E_FRESH);
    for (uint32_t i = 0; i < BLOCKS; i++) {
        struct index_world_block *block = &world.blocks[world.count++];
        uint32_t parent = i > 0 && rnd(5) != 0 ? i - 1 : INDEX_WORLD_NONE;

        *block = (struct index_world_block){.parent = parent, .has_row = true};
        block->key = (struct kvt_index_key){.ns = (uint16_t)rnd(3), .block_id = ++world.stamp};
        if (parent != INDEX_WORLD_NONE) {
            block->key.ns = world.blocks[parent].key.ns;
            block->key.block_idx = world.blocks[parent].key.block_idx + 1;
            block->parent_id = world.blocks[parent].key.block_id;
        }
        block->key.epoch = block->key.ns;
        block_of[block->key.block_id] = i + 1;
        index_world_row(&put, &block->key, block->parent_id,
                        world.namespaces[block->key.ns].block_tokens, &bytes);
        CHECK(kvt_index_db_apply(db, &put) == 0);
        index_world_copy(&put, &block->key, (uint16_t)rnd(2), ++world.stamp, &bytes);
        block->contents[put.component] = put.content;
        CHECK(kvt_index_db_apply(db, &put) == 0);
        if (i % 40 == 39)
            CHECK(kvt_index_db_commit(db) == 0);
    }
    for (uint32_t i = 0; i < BLOCKS / 3; i++) {
        put = (struct kvt_index_put){.kind = KVT_INDEX_PUT_DROP_ROW,
                                     .key = world.blocks[rnd(BLOCKS)].key};
        CHECK(kvt_index_db_apply(db, &put) == 0);
        if (i % 100 == 99)
            CHECK(kvt_index_db_commit(db) == 0);
    }
    CHECK(kvt_index_db_commit(db) == 0);
    db = kvt_index_db_close(db);
}

/* What was put once may come, also when it was dropped later: the file is damaged. */
static int visit(void *ctx, const struct kvt_index_put *put)
{
    const struct index_world_block *block;
    bool is_known = put->key.block_id < KVT_COUNT_OF(block_of) && block_of[put->key.block_id] != 0;

    (void)ctx;
    if (!is_known || !index_world_is_true(put))
        return WRONG;
    block = &world.blocks[block_of[put->key.block_id] - 1];
    if (!index_world_is_key(&put->key, &block->key))
        return WRONG;
    if (put->kind == KVT_INDEX_PUT_ROW)
        return put->parent_id == block->parent_id ? 0 : WRONG;
    return put->content == block->contents[put->component] ? 0 : WRONG;
}

/* In the child: open, walk, write, open again. */
static enum outcome use(void)
{
    char why[KVT_INDEX_DB_WHY_BYTES];
    struct kvt_index_loaded loaded;
    struct kvt_index_db *db = NULL;
    struct kvt_index_put put;
    int r = kvt_index_db_open(&db, &config, why);

    if (r != 0)
        return r == KVT_INDEX_DB_E_BAD && why[0] != '\0' ? BAD : FAILED;
    r = kvt_index_db_walk(db, visit, NULL, &loaded);
    if (r == WRONG)
        return WRONG;
    for (uint32_t i = 0; r == 0 && i < 60; i++) {
        struct kvt_index_key key = {.ns = 0, .epoch = 0, .block_id = 3 * BLOCKS + i};

        index_world_row(&put, &key, 0, 64, &bytes);
        r = kvt_index_db_apply(db, &put);
        put = (struct kvt_index_put){.kind = KVT_INDEX_PUT_DROP_ROW,
                                     .key = world.blocks[rnd(BLOCKS)].key};
        if (r == 0)
            r = kvt_index_db_apply(db, &put);
        if (r == 0 && i % 20 == 19)
            r = kvt_index_db_commit(db);
    }
    db = kvt_index_db_close(db);
    if (r != 0 || kvt_index_db_open(&db, &config, why) != 0)
        return FAILED;
    r = kvt_index_db_walk(db, visit, NULL, &loaded);
    db = kvt_index_db_close(db);
    return r == 0 ? WALKED : r == WRONG ? WRONG : FAILED;
}

static enum outcome child_run(void)
{
    int status = 0;
    pid_t pid = fork();

    CHECK(pid >= 0);
    if (pid == 0)
        _exit((int)use());
    CHECK(waitpid(pid, &status, 0) == pid);
    return WIFEXITED(status) ? (enum outcome)WEXITSTATUS(status) : DIED;
}

/* The file becomes these bytes; with @is_tail_kept what is behind them, and no page counts, stays.
 */
static void file_write(const uint8_t *at, uint64_t size, bool is_tail_kept)
{
    int fd = open(path, O_RDWR | O_CREAT | (is_tail_kept ? 0 : O_TRUNC), 0600);

    CHECK(fd >= 0);
    for (uint64_t done = 0; done < size;) {
        ssize_t n = pwrite(fd, at + done, size - done, (off_t)done);

        CHECK(n > 0);
        done += (uint64_t)n;
    }
    CHECK(close(fd) == 0);
}

/* The whole file, but for some bytes. */
static enum outcome damaged_run(uint64_t offset, const void *patch, uint64_t size, const char *what)
{
    static uint8_t saved[PAGE_BYTES];
    enum outcome outcome;

    memcpy(saved, whole + offset, size);
    memcpy(whole + offset, patch, size);
    file_write(whole, used_bytes, true);
    memcpy(whole + offset, saved, size);
    outcome = child_run();
    outcomes[outcome]++;
    if (outcome != WALKED && outcome != BAD) {
        fprintf(stderr, "%s at byte %" PRIu64 ": outcome %d; --seed %" PRIu64 "\n", what, offset,
                (int)outcome, seed);
        exit(1);
    }
    return outcome;
}

static void flip(uint64_t offset, uint32_t bit)
{
    uint8_t byte = whole[offset] ^ (uint8_t)(1u << bit);

    (void)damaged_run(offset, &byte, 1, "flipped bit");
}

static void test_whole(void **state)
{
    (void)state;
    file_write(whole, FILE_BYTES, false);
    assert_int_equal(child_run(), WALKED);
}

static void test_bits(void **state)
{
    uint64_t pages = used_bytes / PAGE_BYTES;

    (void)state;
    memset(outcomes, 0, sizeof(outcomes));
    /* Meta pages: what LMDB reads of them, and some of the rest. */
    for (uint32_t i = 0; i < flips / 4; i++)
        flip(rnd(2) * PAGE_BYTES + (rnd(8) == 0 ? rnd(PAGE_BYTES) : rnd(160)), rnd(8));
    /* The fronts of pages: headers, where nodes are. */
    for (uint32_t i = 0; i < flips / 4; i++)
        flip((2 + rnd((uint32_t)pages - 2)) * PAGE_BYTES + rnd(64), rnd(8));
    /* Anywhere. */
    for (uint32_t i = 0; i < flips / 2; i++)
        flip(rnd((uint32_t)used_bytes), rnd(8));
    printf("%u bits: %u walked, %u bad, %u died\n", flips, outcomes[WALKED], outcomes[BAD],
           outcomes[DIED]);
    assert_true(outcomes[BAD] > flips / 10 && outcomes[WALKED] > flips / 10);
}

static void test_pages(void **state)
{
    static uint8_t patch[PAGE_BYTES];
    uint32_t pages = (uint32_t)(used_bytes / PAGE_BYTES);

    (void)state;
    memset(outcomes, 0, sizeof(outcomes));
    for (uint32_t i = 0; i < flips / 4; i++) {
        uint64_t offset = (uint64_t)rnd(pages) * PAGE_BYTES;

        if (i % 3 == 0) { /* another page, as it is or with this one's number */
            memcpy(patch, whole + (uint64_t)rnd(pages) * PAGE_BYTES, PAGE_BYTES);
            if (i % 2 == 0)
                memcpy(patch, whole + offset, 8);
        } else {
            for (uint32_t b = 0; b < PAGE_BYTES; b++)
                patch[b] = i % 3 == 1 ? 0 : (uint8_t)rnd(256);
            if (i % 2 == 0) /* with a header that looks right */
                memcpy(patch, whole + offset, 16);
        }
        (void)damaged_run(offset, patch, PAGE_BYTES, "page");
    }
    printf("%u pages: %u walked, %u bad\n", flips / 4, outcomes[WALKED], outcomes[BAD]);
    assert_true(outcomes[BAD] > flips / 16);
}

static void test_short(void **state)
{
    (void)state;
    for (uint32_t i = 0; i < 60; i++) {
        uint64_t size = i < 16 ? 1 + i * 600 : 1 + rnd((uint32_t)used_bytes - 1);

        file_write(whole, size, false);
        if (child_run() != BAD)
            fail_msg("%" PRIu64 " of %" PRIu64 " bytes", size, used_bytes);
    }
    file_write(whole, used_bytes, false); /* nothing that counts is missing */
    assert_int_equal(child_run(), WALKED);
}

static void test_garbage(void **state)
{
    static uint8_t garbage[256u << 10];

    (void)state;
    for (uint32_t i = 0; i < 60; i++) {
        uint32_t size = i < 20 ? 1 + rnd(8192) : 1 + rnd(sizeof(garbage));

        for (uint32_t b = 0; b < size; b++)
            garbage[b] = (uint8_t)rnd(256);
        if (i % 2 == 0 && size > 2 * PAGE_BYTES) /* behind right meta pages */
            memcpy(garbage, whole, 2 * PAGE_BYTES);
        file_write(garbage, size, false);
        assert_int_equal(child_run(), BAD);
    }
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_whole), cmocka_unit_test(test_bits),    cmocka_unit_test(test_pages),
        cmocka_unit_test(test_short), cmocka_unit_test(test_garbage),
    };
    struct kvt_index_db *db;
    struct kvt_index_db_stats stats;
    int r, fd;

    seed = (uint64_t)time(NULL);
    for (int i = 1; i + 1 < argc; i += 2) {
        if (strcmp(argv[i], "--seed") == 0)
            seed = strtoull(argv[i + 1], NULL, 10);
        if (strcmp(argv[i], "--flips") == 0)
            flips = (uint32_t)strtoul(argv[i + 1], NULL, 10);
    }
    printf("--seed %" PRIu64 "\n", seed);
    (void)fflush(stdout);
    rng = seed * 2654435761u + 1;
    if (sysconf(_SC_PAGESIZE) != PAGE_BYTES) {
        printf("SKIP: damage is placed for pages of %u bytes\n", PAGE_BYTES);
        return 77;
    }
    (void)snprintf(directory, sizeof(directory), "%sindex-damage-XXXXXX",
                   access("/dev/shm", W_OK) == 0 ? "/dev/shm/" : "");
    if (mkdtemp(directory) == NULL)
        return 2;
    (void)snprintf(path, sizeof(path), "%s/index", directory);
    file_make();
    fd = open(path, O_RDONLY);
    CHECK(fd >= 0 && pread(fd, whole, FILE_BYTES, 0) == (ssize_t)FILE_BYTES && close(fd) == 0);
    db = db_open(0);
    kvt_index_db_stats(db, &stats);
    db = kvt_index_db_close(db);
    /* Used and free pages, up to the last one: its number is in the newer meta page. */
    for (uint32_t i = 0; i < 2; i++) {
        uint64_t last;

        memcpy(&last, whole + i * PAGE_BYTES + 136, sizeof(last));
        used_bytes = KVT_MAX(used_bytes, (last + 1) * PAGE_BYTES);
    }
    CHECK(stats.used_bytes < used_bytes && used_bytes < FILE_BYTES);
    r = cmocka_run_group_tests(tests, NULL, NULL);
    (void)unlink(path);
    (void)rmdir(directory);
    return r;
}
