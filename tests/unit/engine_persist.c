/* L3 outlives the engine: what is durable is served after a restart of any kind, what is not is a
 * miss, and what was reset never comes back. Over fake tiers and indexes in memory. */
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "daemon/base/hash.h"
#include "daemon/base/log.h"
#include "tests/common/check.h"
#include "tests/common/persist.h"

#define BLOCKS 8u

/* ---- restarts -------------------------------------------------------------------------------- */

static void test_clean_restart(void)
{
    struct rig f;

    rig_begin(&f, &persist_plain);
    (void)persist_store(&f, 0x101, BLOCKS, false); /* in L2 only: the stop writes it back */
    (void)persist_store(&f, 0x102, BLOCKS, false); /* shares the first four blocks */
    persist_restart(&f, true);
    CHECK(persist_fetch(&f, 0x101, BLOCKS) == BLOCKS);
    CHECK(persist_fetch(&f, 0x102, BLOCKS) == BLOCKS);
    CHECK(rig_stats(&f).index.loaded_copies > 0 && rig_stats(&f).index.load_dropped == 0);
    persist_restart(&f, true); /* and again, from what was loaded */
    CHECK(persist_fetch(&f, 0x102, BLOCKS) == BLOCKS);
    rig_end(&f);
}

static void test_crash_keeps_what_is_durable(void)
{
    struct rig f;

    rig_begin(&f, &persist_plain);
    CHECK(persist_store(&f, 0x101, BLOCKS, true));
    (void)persist_store(&f, 0x201, BLOCKS, false);
    persist_restart(&f, false);
    CHECK(persist_fetch(&f, 0x101, BLOCKS) == BLOCKS);
    CHECK(persist_fetch(&f, 0x201, BLOCKS) == 0);
    CHECK(persist_store(&f, 0x201, BLOCKS, true)); /* numbers go on where no daemon was before */
    persist_restart(&f, false);
    CHECK(persist_fetch(&f, 0x101, BLOCKS) == BLOCKS);
    CHECK(persist_fetch(&f, 0x201, BLOCKS) == BLOCKS);
    rig_end(&f);
}

/* Between tiers too: whether it is the Demote that brings it to L3, or finds it there. */
static bool lower(struct rig *f, uint64_t tag, uint32_t blocks)
{
    world_demote(&f->call, &f->client, KVT_HANDLE_NONE, 0, blocks, 0);
    f->call.op.req.demote.prefix = world_prefix(&f->call, tag, blocks);
    f->call.op.req.demote.is_between_tiers = true;
    f->call.op.req.demote.from_tiers = KVT_TIER_BIT_L1 | KVT_TIER_BIT_L2;
    f->call.op.req.demote.to_tier = KVT_TIER_BIT_L3;
    f->call.op.req.demote.wants_durable = true;
    call_run(&f->call);
    CHECK_CODE(&f->call.op, KVT_CODE_OK);
    return f->call.op.ans.demote.is_durable;
}

static void test_durable_between_tiers(void)
{
    struct rig f;

    rig_begin(&f, &persist_plain);
    CHECK(!persist_store(&f, 0x111, BLOCKS, false));
    CHECK(lower(&f, 0x111, BLOCKS));
    CHECK(lower(&f, 0x111, BLOCKS));
    persist_restart(&f, false);
    CHECK(persist_fetch(&f, 0x111, BLOCKS) == BLOCKS);
    CHECK(lower(&f, 0x111, BLOCKS));
    CHECK(!lower(&f, 0x999, BLOCKS)); /* of what is nowhere nothing is durable */
    rig_end(&f);
}

static void test_not_durable_before_the_commit(void)
{
    struct kvt_handle ticket;
    struct rig f;

    rig_begin(&f, &persist_plain);
    fake_index_hold(f.world.indexes[0], true);
    ticket = world_reserve(&f.call, &f.client, 0x101, 4);
    for (uint32_t c = 0; c < 2; c++)
        for (uint32_t i = 0; i < 4; i++)
            client_fill(&f.client, c, 0x101, i, i);
    world_demote(&f.call, &f.client, ticket, 0, 4, 0);
    f.call.op.req.demote.wants_durable = true;
    f.call.op.deadline_ns = f.world.now_ns + KVT_NS_PER_S;
    call_run(&f.call); /* ends by its deadline */
    CHECK(f.call.op.code == KVT_CODE_DEADLINE_EXCEEDED || !f.call.op.ans.demote.is_durable);
    persist_restart(&f, false);
    (void)persist_fetch(&f, 0x101,
                        4); /* any of it may have got there: all that comes is verified */
    rig_end(&f);
}

static void test_refused_rows_are_not_durable(void)
{
    struct world_config config = persist_plain;
    struct rig f;

    config.refuse_rate = 1000;
    rig_begin(&f, &config);
    CHECK(!persist_store(&f, 0x101, BLOCKS, true));
    CHECK(rig_stats(&f).index.skipped > 0);
    CHECK(persist_fetch(&f, 0x101, BLOCKS) == BLOCKS); /* served as long as this daemon lives */
    rig_end(&f);
}

/* What the index holds is what L3 holds, after evictions from a small L3. */
static void test_rows_follow_evictions(void)
{
    struct world_config config = persist_plain;
    struct rig f;
    uint64_t copies = 0;

    config.l2_bytes = 384u << 10;
    config.l3_bytes = 512u << 10;
    config.write_policy = KVT_WRITE_THROUGH;
    rig_begin(&f, &config);
    for (uint64_t i = 0; i < 60; i++)
        (void)persist_store(&f, (i + 1) << 8, BLOCKS, i % 8 == 0);
    persist_restart(&f, true);
    CHECK(rig_stats(&f).index.load_dropped == 0 && rig_stats(&f).index.stale == 0);
    copies = rig_stats(&f).index.loaded_copies;
    CHECK(copies > 0 && copies == rig_stats(&f).tiers[KVT_TIER_DISK].ready_copies);
    world_check(&f.world);
    rig_end(&f);
}

/* ---- reset ----------------------------------------------------------------------------------- */

static void test_reset_is_durable(void)
{
    struct rig f;

    rig_begin(&f, &persist_plain);
    CHECK(persist_store(&f, 0x101, BLOCKS, true));
    persist_reset(&f);
    call_run(&f.call);
    CHECK_CODE(&f.call.op, KVT_CODE_OK);
    CHECK(f.call.op.ans.reset.epoch == 2);
    persist_restart(&f, false);
    CHECK(persist_fetch(&f, 0x101, BLOCKS) == 0);
    CHECK(persist_store(&f, 0x101, BLOCKS, true)); /* the new epoch stores anew */
    persist_restart(&f, false);
    CHECK(persist_fetch(&f, 0x101, BLOCKS) == BLOCKS);
    rig_end(&f);
}

static void test_reset_waits_for_the_disk(void)
{
    struct rig f;

    rig_begin(&f, &persist_plain);
    CHECK(persist_store(&f, 0x101, BLOCKS, true));
    fake_index_hold(f.world.indexes[0], true);
    persist_reset(&f);
    call_submit(&f.call);
    for (uint32_t i = 0; i < 200; i++)
        world_turn(&f.world);
    CHECK(!f.call.is_done);
    CHECK(fake_index_catalog(f.world.indexes[0], 0) != NULL);
    fake_index_hold(f.world.indexes[0], false);
    call_wait(&f.call);
    CHECK_CODE(&f.call.op, KVT_CODE_OK);
    fake_index_hold(f.world.indexes[0], true);
    persist_reset(&f);
    f.call.op.deadline_ns = f.world.now_ns + 50 * KVT_NS_PER_MS;
    call_run(&f.call);
    CHECK(f.call.op.code == KVT_CODE_DEADLINE_EXCEEDED);
    fake_index_hold(f.world.indexes[0], false);
    rig_end(&f);
}

/* ---- devices --------------------------------------------------------------------------------- */

static void test_one_device_of_two_is_lost(void)
{
    struct world_config config = persist_plain;
    uint32_t before = 0, after = 0;
    struct rig f;

    config.devices = 2;
    config.lost_after_ns = 5 * KVT_NS_PER_S;
    rig_begin(&f, &config);
    for (uint64_t i = 0; i < 12; i++)
        CHECK(persist_store(&f, (i + 1) << 8, 4, true));
    persist_restart(&f, false);
    for (uint64_t i = 0; i < 12; i++)
        before += persist_fetch(&f, (i + 1) << 8, 4);
    CHECK(before == 12 * 4);
    persist_restart(&f, true); /* L2 is empty again */
    fake_tier_set_zone_out(f.world.tiers[KVT_TIER_DISK], 1, true);
    for (uint64_t end_ns = f.world.now_ns + 6 * KVT_NS_PER_S; f.world.now_ns < end_ns;)
        world_turn(&f.world);
    CHECK(rig_stats(&f).tiers[KVT_TIER_DISK].dropped[KVT_DROP_LOST] > 0);
    for (uint64_t i = 0; i < 12; i++)
        after += persist_fetch(&f, (i + 1) << 8, 4);
    CHECK(after > 0 && after < before && after % 4 == 0); /* runs of four are on one device */
    CHECK(persist_store(&f, 0x9900, 4, true));            /* on the one that is left */
    fake_tier_set_zone_out(f.world.tiers[KVT_TIER_DISK], 1, false);
    for (uint64_t i = 0; i < 12; i++)
        CHECK(persist_store(&f, (i + 1) << 8, 4, true));
    persist_restart(&f, false);
    for (uint64_t i = 0; i < 12; i++)
        CHECK(persist_fetch(&f, (i + 1) << 8, 4) == 4);
    rig_end(&f);
}

#define RUN_BLOCKS 4u /* of the world */
#define RUNS_BLOCKS 12u

/* Pairs of neighbours of a path that are on L3, and how many of them are on devices that follow
 * each other as runs should. */
static uint32_t count_pairs(const struct rig *f, uint32_t *ret_right)
{
    uint32_t devices = f->world.config.devices, pairs = 0, right = 0;

    for (uint64_t id = 1; id < 4096; id++) {
        for (uint32_t d = 0; d < devices; d++) {
            const struct kvt_index_put *row = fake_index_row(f->world.indexes[d], id);
            uint32_t before = 0;

            if (row == NULL || fake_index_copy(f->world.indexes[d], id, 0) == NULL)
                continue;
            while (before < devices &&
                   fake_index_copy(f->world.indexes[before], row->parent_id, 0) == NULL)
                before++;
            if (row->parent_id == 0 || before == devices)
                continue;
            pairs++;
            right += d == (before + (row->key.block_idx % RUN_BLOCKS == 0)) % devices;
        }
    }
    *ret_right = right;
    return pairs;
}

/* Runs of a path take turns on the devices, whether it is written from its root or its leaf. */
static void test_runs_take_turns(void)
{
    struct world_config config = persist_plain;
    uint32_t pairs, right;
    struct rig f;

    config.devices = 3;
    config.l3_bytes = 9u << 20; /* three equal parts */
    rig_begin(&f, &config);
    for (uint64_t i = 0; i < 4; i++)
        CHECK(persist_store(&f, (i + 1) << 8, RUNS_BLOCKS, true));
    pairs = count_pairs(&f, &right);
    CHECK(pairs == 4 * (RUNS_BLOCKS - 1) && right == pairs);
    rig_end(&f);
    config.l2_bytes = 384u << 10; /* what is stored evicts what was, leaf first */
    rig_begin(&f, &config);
    for (uint64_t i = 0; i < 12; i++)
        (void)persist_store(&f, (i + 1) << 8, RUNS_BLOCKS, false);
    CHECK(persist_store(&f, 0x9900, 1, true)); /* what was evicted before is in the index then */
    pairs = count_pairs(&f, &right);
    CHECK(pairs > 4 * (RUNS_BLOCKS - 1));
    CHECK(right * 10 >= pairs * 9); /* a window that goes before its block begins a run */
    rig_end(&f);
}

static void test_index_is_lost(void)
{
    struct rig f;

    rig_begin(&f, &persist_plain);
    CHECK(persist_store(&f, 0x101, BLOCKS, true));
    persist_restart(&f, false);
    persist_load(&f);
    fake_index_fail(f.world.indexes[0], 11, "helper ended");
    CHECK(!persist_store(&f, 0x201, BLOCKS, true));
    CHECK(persist_fetch(&f, 0x101, BLOCKS) == BLOCKS); /* its data is still good */
    persist_reset(&f);
    call_run(&f.call);
    CHECK(f.call.op.code == KVT_CODE_UNAVAILABLE); /* nobody could remember it */
    CHECK(persist_fetch(&f, 0x101, BLOCKS) == 0);
    rig_end(&f);
}

/* ---- loading --------------------------------------------------------------------------------- */

static void test_lookups_wait_for_the_index(void)
{
    struct world_config config = persist_plain;
    struct rig f;

    config.load_event_ns = 100 * KVT_NS_PER_MS;
    rig_begin(&f, &config);
    CHECK(persist_store(&f, 0x101, BLOCKS, true));
    persist_restart(&f, false);
    call_begin(&f.call, KVT_OP_LOOKUP); /* a short deadline: what is known by then */
    f.call.op.req.lookup.session = f.client.session;
    f.call.op.req.lookup.prefix = world_prefix(&f.call, 0x101, BLOCKS);
    f.call.op.req.lookup.limit_tokens = UINT64_MAX;
    f.call.op.deadline_ns = f.world.now_ns + 150 * KVT_NS_PER_MS;
    call_run(&f.call);
    CHECK_CODE(&f.call.op, KVT_CODE_OK);
    CHECK(f.call.op.ans.lookup.boundary_tokens < BLOCKS * WORLD_BLOCK_TOKENS);
    CHECK(persist_fetch(&f, 0x101, BLOCKS) == BLOCKS); /* a long one: everything */
    rig_end(&f);
}

/* A prompt that was loaded is answered for, whatever is still to come. */
static void test_lookups_do_not_wait_for_others(void)
{
    struct world_config config = persist_plain;
    uint64_t started_ns;
    struct rig f;

    config.load_event_ns = 20 * KVT_NS_PER_MS;
    rig_begin(&f, &config);
    CHECK(persist_store(&f, 0x101, BLOCKS, true));
    for (uint64_t i = 2; i < 10; i++)
        CHECK(persist_store(&f, i << 8, BLOCKS, true));
    persist_restart(&f, false);
    started_ns = f.world.now_ns;
    CHECK(persist_fetch(&f, 0x900, BLOCKS) == BLOCKS); /* the fake index tells the last one first */
    CHECK(rig_stats(&f).index.is_loading);
    CHECK(f.world.now_ns - started_ns > 2 * BLOCKS * config.load_event_ns);
    CHECK(persist_fetch(&f, 0x901, BLOCKS) ==
          4); /* nobody knows the rest: that takes all of the index */
    CHECK(!rig_stats(&f).index.is_loading);
    CHECK(persist_fetch(&f, 0x101, BLOCKS) == BLOCKS);
    rig_end(&f);
}

/* However the events of a load fall into turns, and whatever comes in between, nothing is lost. */
static void test_load_in_slices(void)
{
    struct world_config config = persist_plain;
    struct rig f;

    config.load_event_ns = 100 * KVT_NS_PER_US;
    config.devices = 2;
    rig_begin(&f, &config);
    CHECK(persist_store(&f, 0x101, BLOCKS, true));
    CHECK(persist_store(&f, 0x102, BLOCKS, true)); /* shares the first four blocks */
    CHECK(persist_store(&f, 0x201, BLOCKS, true));
    persist_restart(&f, false);
    while (rig_stats(&f).index.is_loading) {
        world_turn(&f.world);
        world_check(&f.world);
    }
    CHECK(rig_stats(&f).index.load_dropped == 0);
    CHECK(rig_stats(&f).index.loaded_copies == 2 * (3 * BLOCKS - 4));
    CHECK(persist_fetch(&f, 0x101, BLOCKS) == BLOCKS);
    CHECK(persist_fetch(&f, 0x102, BLOCKS) == BLOCKS);
    CHECK(persist_fetch(&f, 0x201, BLOCKS) == BLOCKS);
    rig_end(&f);
}

/* ---- what is said meanwhile ------------------------------------------------------------------ */

static uint32_t lines_with(int fd, const char *what, char last[512])
{
    char text[8192];
    ssize_t bytes = read(fd, text, sizeof(text) - 1);
    uint32_t count = 0;

    text[bytes < 0 ? 0 : bytes] = '\0';
    for (char *line = text; *line != '\0';) {
        char *end = line + strcspn(line, "\n");
        bool is_last = *end == '\0';

        *end = '\0';
        if (strstr(line, what) != NULL) {
            count++;
            (void)snprintf(last, 512, "%.500s", line);
        }
        line = is_last ? end : end + 1;
    }
    return count;
}

static void test_progress_of_a_scan_is_logged(void)
{
    struct world_config config = persist_plain;
    struct kvt_index_counters *counters;
    char line[512] = "";
    struct rig f;
    int fds[2];

    CHECK(pipe2(fds, O_NONBLOCK | O_CLOEXEC) == 0);
    config.load_event_ns = 100 * KVT_NS_PER_S;
    rig_begin(&f, &config);
    CHECK(persist_store(&f, 0x101, BLOCKS, true));
    persist_restart(&f, false);
    counters = &f.world.open_indexes[0]->counters;
    kvt_log_init(fds[1], false);
    kvt_log_set_level(KVT_LOG_INFO);
    counters->scan_total_bytes = 100ull << 30;
    counters->state = KVT_INDEX_SCANNING;
    for (uint64_t now_ns = f.world.now_ns; f.world.now_ns < now_ns + 25 * KVT_NS_PER_S;) {
        world_turn(&f.world);
        counters->scan_bytes = (f.world.now_ns - now_ns) * 3 / 2; /* 1.5 GB/s */
    }
    CHECK(lines_with(fds[0], "looking through its slots", line) == 2);
    CHECK(strstr(line, " % of 100 GiB, 1.") != NULL && strstr(line, " GB/s") != NULL);
    counters->state = KVT_INDEX_LOADING; /* the scan is over, its rows come */
    for (uint64_t now_ns = f.world.now_ns; f.world.now_ns < now_ns + 25 * KVT_NS_PER_S;)
        world_turn(&f.world);
    CHECK(lines_with(fds[0], "looking through its slots", line) == 0);
    kvt_log_init(STDERR_FILENO, false);
    kvt_log_set_level(KVT_LOG_ERROR);
    (void)close(fds[0]);
    (void)close(fds[1]);
    persist_load(&f);
    CHECK(persist_fetch(&f, 0x101, BLOCKS) == BLOCKS);
    rig_end(&f);
}

/* What is stored right after a start does not push out what L3 has of the same prefix. */
static void test_stores_wait_for_the_index(void)
{
    struct world_config config = persist_plain;
    struct rig f;

    config.load_event_ns = 10 * KVT_NS_PER_MS;
    rig_begin(&f, &config);
    CHECK(persist_store(&f, 0x101, BLOCKS, true));
    persist_restart(&f, false);
    (void)persist_store(&f, 0x102, BLOCKS, false); /* shares the first four blocks */
    persist_load(&f);
    CHECK(rig_stats(&f).index.load_dropped == 0);
    CHECK(persist_fetch(&f, 0x101, BLOCKS) == BLOCKS);
    CHECK(persist_fetch(&f, 0x102, BLOCKS) == BLOCKS);
    rig_end(&f);
}

/* Rows are input: whatever they say, the engine stays whole and serves nothing wrong. */
static void add_hostile_rows(struct world *world)
{
    uint64_t random = 7;

    for (uint32_t i = 0; i < 400; i++) {
        uint32_t tokens[WORLD_BLOCK_TOKENS] = {(uint32_t)fake_random(&random) % 4};
        uint64_t slots[2] = {fake_random(&random) % 64 * 4096, fake_random(&random)};
        uint64_t runs[2] = {fake_random(&random) % 8 * 32768, fake_random(&random) % (8u << 20)};
        struct kvt_index_put put = {
            .kind = KVT_INDEX_PUT_ROW,
            .key = {(uint16_t)(fake_random(&random) % 2), 1 + fake_random(&random) % 2,
                    (uint32_t)(fake_random(&random) % 4), 1000 + i},
            .parent_id = fake_random(&random) % 2 == 0 ? 0 : 1 + fake_random(&random) % (1000 + i),
            .root_key = (const uint8_t *)"\1\0\0\2\0\0",
            .root_key_bytes = 6,
            .tokens_count = fake_random(&random) % 8 == 0 ? 3 : WORLD_BLOCK_TOKENS,
            .tokens = tokens,
        };

        fake_index_add(world->indexes[0], &put);
        put.kind = KVT_INDEX_PUT_COPY;
        put.component = (uint16_t)(fake_random(&random) % 3);
        put.shards_count = (uint16_t)(1 + fake_random(&random) % 2);
        put.content = fake_random(&random) % 8 == 0 ? UINT64_MAX : 1 + fake_random(&random) % 100;
        put.slot_bytes = fake_random(&random) % 2 == 0 ? 8192 : 4096;
        put.slot_offsets = slots;
        put.run_offsets = runs;
        fake_index_add(world->indexes[0], &put);
    }
    world->while_dead = NULL;
}

static void test_hostile_rows(void)
{
    struct world_config config = persist_plain;
    struct rig f;

    config.is_index_lenient = true;
    rig_begin(&f, &config);
    CHECK(persist_store(&f, 0x101, BLOCKS, true));
    f.world.while_dead = add_hostile_rows;
    persist_restart(&f, false);
    persist_load(&f);
    (void)persist_fetch(&f, 0x101, BLOCKS);
    CHECK(rig_stats(&f).index.load_dropped > 0);
    world_check(&f.world);
    CHECK(persist_store(&f, 0x101, BLOCKS, true));
    CHECK(persist_fetch(&f, 0x101, BLOCKS) == BLOCKS);
    rig_end(&f);
}

/* After a scan the root is known by the digest of its key only. */
static uint32_t digest_key(const struct kvt_index_put *row, uint8_t *ret_key)
{
    ret_key[0] = KVT_STORE_DIGEST_KEY_TAG;
    CHECK(kvt_sha256(row->root_key, row->root_key_bytes, ret_key + 1) == 0);
    return KVT_STORE_DIGEST_KEY_BYTES;
}

static void scan_all(struct world *world)
{
    for (uint32_t i = 0; i < world->config.devices; i++)
        fake_index_scan(world->indexes[i], digest_key);
}

static void scan_first(struct world *world)
{
    fake_index_scan(world->indexes[0], digest_key);
}

static void test_root_without_its_key(void)
{
    struct rig f;

    rig_begin(&f, &persist_plain);
    CHECK(persist_store(&f, 0x101, BLOCKS, true));
    f.world.while_dead = scan_all;
    persist_restart(&f, false);
    CHECK(persist_fetch(&f, 0x101, BLOCKS) == BLOCKS);
    CHECK(persist_store(&f, 0x102, BLOCKS, true)); /* below the same root */
    rig_end(&f);
}

/* Paths run over two devices, and the rows that an index has beside its own blocks are lost with
 * it: a device that was scanned alone, or both, still serve all of it. */
static void test_scan_of_striped_devices(void (*scan)(struct world *world))
{
    struct world_config config = persist_plain;
    struct rig f;

    config.devices = 2;
    rig_begin(&f, &config);
    for (uint64_t i = 0; i < 6; i++)
        CHECK(persist_store(&f, (i + 1) << 8, 12, true)); /* three runs of four each */
    f.world.while_dead = scan;
    persist_restart(&f, false);
    persist_load(&f);
    CHECK(rig_stats(&f).index.load_dropped == 0);
    for (uint64_t i = 0; i < 6; i++)
        CHECK(persist_fetch(&f, (i + 1) << 8, 12) == 12);
    world_check(&f.world);
    /* What was put then makes the next start one like any other. */
    f.world.while_dead = NULL;
    for (uint64_t i = 0; i < 6; i++)
        CHECK(persist_store(&f, (i + 1) << 8, 12, true));
    persist_restart(&f, false);
    persist_load(&f);
    for (uint64_t i = 0; i < 6; i++)
        CHECK(persist_fetch(&f, (i + 1) << 8, 12) == 12);
    rig_end(&f);
}

/* As of a first device that was larger: its slots begin where the second one's data begins now. */
static void add_rows_behind_the_end(struct world *world)
{
    uint64_t zone_bytes = world->config.l3_bytes / world->config.devices;

    for (uint32_t i = 0; i < 64; i++) {
        uint32_t tokens[WORLD_BLOCK_TOKENS] = {7000 + i};
        uint64_t slot = zone_bytes + i / 4 * 32768 + i % 4 * 8192;
        uint64_t run = zone_bytes + i / 4 * 32768;
        struct kvt_index_put put = {
            .kind = KVT_INDEX_PUT_ROW,
            .key = {.epoch = 1, .block_id = 7000 + i},
            .root_key = (const uint8_t *)"\1\0\0\2\0\0",
            .root_key_bytes = 6,
            .tokens_count = WORLD_BLOCK_TOKENS,
            .tokens = tokens,
        };

        fake_index_add(world->indexes[0], &put);
        put.kind = KVT_INDEX_PUT_COPY;
        put.shards_count = 1;
        put.content = 1 + i;
        put.slot_bytes = 8192;
        put.slot_offsets = &slot;
        put.run_offsets = &run;
        fake_index_add(world->indexes[0], &put);
    }
    world->while_dead = NULL;
}

static void test_device_that_became_smaller(void)
{
    struct world_config config = persist_plain;
    struct rig f;

    config.devices = 2;
    config.is_index_lenient = true;
    rig_begin(&f, &config);
    for (uint64_t i = 0; i < 6; i++)
        CHECK(persist_store(&f, (i + 1) << 8, 12, true));
    f.world.while_dead = add_rows_behind_the_end;
    persist_restart(&f, false);
    persist_load(&f);
    CHECK(rig_stats(&f).index.load_dropped >= 64);
    for (uint64_t i = 0; i < 6; i++)
        CHECK(persist_fetch(&f, (i + 1) << 8, 12) == 12);
    rig_end(&f);
}

static void forget_stamps(struct world *world)
{
    const struct kvt_disk_state state = {.stamps_end = 1};
    uint8_t data[KVT_DISK_STATE_BYTES];
    const struct kvt_index_put put = {.kind = KVT_INDEX_PUT_CATALOG,
                                      .catalog_number = KVT_DISK_CATALOG_STATE,
                                      .catalog_data = data,
                                      .catalog_bytes = sizeof(data)};

    kvt_disk_catalog_encode_state(data, &state);
    fake_index_add(world->indexes[0], &put);
    world->stamps_first = 1;
}

/* A device that was copied back beside an index that was not: the numbers that are reserved were
 * all given before. */
static void test_catalog_older_than_the_index(void)
{
    struct rig f;

    rig_begin(&f, &persist_plain);
    CHECK(persist_store(&f, 0x101, BLOCKS, true));
    persist_restart(&f, false);
    CHECK(persist_store(&f, 0x202, BLOCKS, true));
    f.world.while_dead = forget_stamps;
    persist_restart(&f, false);
    f.world.while_dead = NULL;
    CHECK(persist_fetch(&f, 0x101, BLOCKS) == BLOCKS);
    CHECK(persist_fetch(&f, 0x202, BLOCKS) == BLOCKS);
    for (uint32_t tries = 0; !persist_store(&f, 0x303, BLOCKS, true); tries++) {
        CHECK(tries < 10); /* until more are reserved */
        f.world.now_ns += 10 * KVT_NS_PER_MS;
    }
    persist_restart(&f, false);
    CHECK(persist_fetch(&f, 0x303, BLOCKS) == BLOCKS);
    rig_end(&f);
}

int main(void)
{
    test_scan_of_striped_devices(scan_all);
    test_scan_of_striped_devices(scan_first);
    test_device_that_became_smaller();
    test_catalog_older_than_the_index();
    test_root_without_its_key();
    test_clean_restart();
    test_crash_keeps_what_is_durable();
    test_durable_between_tiers();
    test_not_durable_before_the_commit();
    test_refused_rows_are_not_durable();
    test_rows_follow_evictions();
    test_reset_is_durable();
    test_reset_waits_for_the_disk();
    test_one_device_of_two_is_lost();
    test_runs_take_turns();
    test_index_is_lost();
    test_lookups_wait_for_the_index();
    test_stores_wait_for_the_index();
    test_lookups_do_not_wait_for_others();
    test_load_in_slices();
    test_progress_of_a_scan_is_logged();
    test_hostile_rows();
    return 0;
}
