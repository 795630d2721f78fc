/* L3 outlives the engine: what is durable is served after a restart of any kind, what is not is a
 * miss, and what was reset never comes back. Over fake tiers and indexes in memory. */
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "daemon/base/hash.h"
#include "daemon/base/log.h"
#include "tests/common/check.h"
#include "tests/common/engine_world.h"

#define BLOCKS 8u

static const struct world_config plain = {.seed = 1,
                                          .l2_bytes = 1u << 20,
                                          .l3_bytes = 8u << 20,
                                          .delay_ns_max = 100000,
                                          .ranks = 1,
                                          .has_window = true,
                                          .devices = 1,
                                          .commit_delay_ns_max = 1000000};

struct fixture {
    struct world world;
    struct client client;
    struct call call;
};

static void attach(struct fixture *f)
{
    client_attach(&f->client, &f->world, &f->call, 1, true, 0);
}

static void begin(struct fixture *f, const struct world_config *config)
{
    world_init(&f->world, config);
    call_init(&f->call, &f->world);
    attach(f);
}

static void leave(struct fixture *f)
{
    client_detach(&f->client, &f->call);
    client_unmap(&f->client);
}

static void restart(struct fixture *f, bool is_clean)
{
    leave(f);
    world_settle(&f->world);
    world_restart(&f->world, is_clean);
    attach(f);
}

static void end(struct fixture *f)
{
    world_check(&f->world);
    leave(f);
    world_settle(&f->world);
    call_deinit(&f->call);
    world_deinit(&f->world);
}

/* Stores a prompt; answers whether it is durable. */
static bool store(struct fixture *f, uint64_t tag, uint32_t blocks, bool wants_durable)
{
    struct kvt_handle ticket = world_reserve(&f->call, &f->client, tag, blocks);

    for (uint32_t c = 0; c < 2; c++)
        for (uint32_t i = 0; i < blocks; i++)
            client_fill(&f->client, c, tag, i, i);
    world_demote(&f->call, &f->client, ticket, 0, blocks, 0);
    if (ticket.id == 0) /* all of it is there: then by prefix */
        f->call.op.req.demote.prefix = world_prefix(&f->call, tag, blocks);
    f->call.op.req.demote.wants_durable = wants_durable;
    call_run(&f->call);
    CHECK_CODE(&f->call.op, KVT_CODE_OK);
    return f->call.op.ans.demote.is_durable;
}

/* How many blocks of the prompt can be had, each verified. */
static uint32_t fetch(struct fixture *f, uint64_t tag, uint32_t blocks)
{
    struct kvt_handle lease = world_lookup(&f->call, &f->client, tag, blocks, true);
    uint32_t hit = (uint32_t)(f->call.op.ans.lookup.boundary_tokens / WORLD_BLOCK_TOKENS), good = 0;

    if (hit == 0)
        return 0;
    for (uint32_t c = 0; c < 2; c++)
        for (uint32_t i = 0; i < hit; i++)
            client_scribble(&f->client, c, 16 + i, 0xee);
    world_promote(&f->call, &f->client, lease, 0, hit, 16);
    call_run(&f->call);
    CHECK_CODE(&f->call.op, KVT_CODE_OK);
    for (uint32_t i = 0; i < hit; i++) {
        bool is_good = true;

        for (uint32_t c = 0; c < 2; c++) {
            bool is_done = f->call.op.ans.promote.moves.results[c][i] == KVT_MOVE_DONE;

            CHECK(!is_done || client_holds(&f->client, c, tag, i, 16 + i, 0));
            is_good &= is_done;
        }
        good += is_good;
    }
    call_begin(&f->call, KVT_OP_RELEASE);
    f->call.op.req.release.session = f->client.session;
    f->call.op.req.release.lease = lease;
    call_run(&f->call);
    return good;
}

static struct kvt_store_stats stats(struct fixture *f)
{
    struct kvt_store_stats stats;

    kvt_engine_store_stats(f->world.engine, &stats);
    return stats;
}

/* ---- restarts -------------------------------------------------------------------------------- */

static void test_clean_restart(void)
{
    struct fixture f;

    begin(&f, &plain);
    (void)store(&f, 0x101, BLOCKS, false); /* in L2 only: the stop writes it back */
    (void)store(&f, 0x102, BLOCKS, false); /* shares the first four blocks */
    restart(&f, true);
    CHECK(fetch(&f, 0x101, BLOCKS) == BLOCKS);
    CHECK(fetch(&f, 0x102, BLOCKS) == BLOCKS);
    CHECK(stats(&f).index.loaded_copies > 0 && stats(&f).index.load_dropped == 0);
    restart(&f, true); /* and again, from what was loaded */
    CHECK(fetch(&f, 0x102, BLOCKS) == BLOCKS);
    end(&f);
}

static void test_crash_keeps_what_is_durable(void)
{
    struct fixture f;

    begin(&f, &plain);
    CHECK(store(&f, 0x101, BLOCKS, true));
    (void)store(&f, 0x201, BLOCKS, false);
    restart(&f, false);
    CHECK(fetch(&f, 0x101, BLOCKS) == BLOCKS);
    CHECK(fetch(&f, 0x201, BLOCKS) == 0);
    CHECK(store(&f, 0x201, BLOCKS, true)); /* numbers go on where no daemon was before */
    restart(&f, false);
    CHECK(fetch(&f, 0x101, BLOCKS) == BLOCKS);
    CHECK(fetch(&f, 0x201, BLOCKS) == BLOCKS);
    end(&f);
}

/* Between tiers too: whether it is the Demote that brings it to L3, or finds it there. */
static bool lower(struct fixture *f, uint64_t tag, uint32_t blocks)
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
    struct fixture f;

    begin(&f, &plain);
    CHECK(!store(&f, 0x111, BLOCKS, false));
    CHECK(lower(&f, 0x111, BLOCKS));
    CHECK(lower(&f, 0x111, BLOCKS));
    restart(&f, false);
    CHECK(fetch(&f, 0x111, BLOCKS) == BLOCKS);
    CHECK(lower(&f, 0x111, BLOCKS));
    CHECK(!lower(&f, 0x999, BLOCKS)); /* of what is nowhere nothing is durable */
    end(&f);
}

static void test_not_durable_before_the_commit(void)
{
    struct kvt_handle ticket;
    struct fixture f;

    begin(&f, &plain);
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
    restart(&f, false);
    (void)fetch(&f, 0x101, 4); /* any of it may have got there: all that comes is verified */
    end(&f);
}

static void test_refused_rows_are_not_durable(void)
{
    struct world_config config = plain;
    struct fixture f;

    config.refuse_rate = 1000;
    begin(&f, &config);
    CHECK(!store(&f, 0x101, BLOCKS, true));
    CHECK(stats(&f).index.skipped > 0);
    CHECK(fetch(&f, 0x101, BLOCKS) == BLOCKS); /* served as long as this daemon lives */
    end(&f);
}

/* What the index holds is what L3 holds, after evictions from a small L3. */
static void test_rows_follow_evictions(void)
{
    struct world_config config = plain;
    struct fixture f;
    uint64_t copies = 0;

    config.l2_bytes = 384u << 10;
    config.l3_bytes = 512u << 10;
    config.write_policy = KVT_WRITE_THROUGH;
    begin(&f, &config);
    for (uint64_t i = 0; i < 60; i++)
        (void)store(&f, (i + 1) << 8, BLOCKS, i % 8 == 0);
    restart(&f, true);
    CHECK(stats(&f).index.load_dropped == 0 && stats(&f).index.stale == 0);
    copies = stats(&f).index.loaded_copies;
    CHECK(copies > 0 && copies == stats(&f).tiers[KVT_TIER_DISK].ready_copies);
    world_check(&f.world);
    end(&f);
}

/* ---- reset ----------------------------------------------------------------------------------- */

static void load(struct fixture *f)
{
    while (stats(f).index.is_loading)
        world_turn(&f->world);
}

static void reset(struct fixture *f)
{
    call_begin(&f->call, KVT_OP_RESET);
    f->call.op.is_admin = true;
    f->call.op.req.reset.ns = f->world.ns;
}

static void test_reset_is_durable(void)
{
    struct fixture f;

    begin(&f, &plain);
    CHECK(store(&f, 0x101, BLOCKS, true));
    reset(&f);
    call_run(&f.call);
    CHECK_CODE(&f.call.op, KVT_CODE_OK);
    CHECK(f.call.op.ans.reset.epoch == 2);
    restart(&f, false);
    CHECK(fetch(&f, 0x101, BLOCKS) == 0);
    CHECK(store(&f, 0x101, BLOCKS, true)); /* the new epoch stores anew */
    restart(&f, false);
    CHECK(fetch(&f, 0x101, BLOCKS) == BLOCKS);
    end(&f);
}

static void test_reset_waits_for_the_disk(void)
{
    struct fixture f;

    begin(&f, &plain);
    CHECK(store(&f, 0x101, BLOCKS, true));
    fake_index_hold(f.world.indexes[0], true);
    reset(&f);
    call_submit(&f.call);
    for (uint32_t i = 0; i < 200; i++)
        world_turn(&f.world);
    CHECK(!f.call.is_done);
    CHECK(fake_index_catalog(f.world.indexes[0], 0) != NULL);
    fake_index_hold(f.world.indexes[0], false);
    call_wait(&f.call);
    CHECK_CODE(&f.call.op, KVT_CODE_OK);
    fake_index_hold(f.world.indexes[0], true);
    reset(&f);
    f.call.op.deadline_ns = f.world.now_ns + 50 * KVT_NS_PER_MS;
    call_run(&f.call);
    CHECK(f.call.op.code == KVT_CODE_DEADLINE_EXCEEDED);
    fake_index_hold(f.world.indexes[0], false);
    end(&f);
}

/* ---- devices --------------------------------------------------------------------------------- */

static void test_one_device_of_two_is_lost(void)
{
    struct world_config config = plain;
    uint32_t before = 0, after = 0;
    struct fixture f;

    config.devices = 2;
    config.lost_after_ns = 5 * KVT_NS_PER_S;
    begin(&f, &config);
    for (uint64_t i = 0; i < 12; i++)
        CHECK(store(&f, (i + 1) << 8, 4, true));
    restart(&f, false);
    for (uint64_t i = 0; i < 12; i++)
        before += fetch(&f, (i + 1) << 8, 4);
    CHECK(before == 12 * 4);
    restart(&f, true); /* L2 is empty again */
    fake_tier_set_zone_out(f.world.tiers[KVT_TIER_DISK], 1, true);
    for (uint64_t end_ns = f.world.now_ns + 6 * KVT_NS_PER_S; f.world.now_ns < end_ns;)
        world_turn(&f.world);
    CHECK(stats(&f).tiers[KVT_TIER_DISK].dropped[KVT_DROP_LOST] > 0);
    for (uint64_t i = 0; i < 12; i++)
        after += fetch(&f, (i + 1) << 8, 4);
    CHECK(after > 0 && after < before && after % 4 == 0); /* runs of four are on one device */
    CHECK(store(&f, 0x9900, 4, true));                    /* on the one that is left */
    fake_tier_set_zone_out(f.world.tiers[KVT_TIER_DISK], 1, false);
    for (uint64_t i = 0; i < 12; i++)
        CHECK(store(&f, (i + 1) << 8, 4, true));
    restart(&f, false);
    for (uint64_t i = 0; i < 12; i++)
        CHECK(fetch(&f, (i + 1) << 8, 4) == 4);
    end(&f);
}

#define RUN_BLOCKS 4u /* of the world */
#define RUNS_BLOCKS 12u

/* Pairs of neighbours of a path that are on L3, and how many of them are on devices that follow
 * each other as runs should. */
static uint32_t count_pairs(const struct fixture *f, uint32_t *ret_right)
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
    struct world_config config = plain;
    uint32_t pairs, right;
    struct fixture f;

    config.devices = 3;
    config.l3_bytes = 9u << 20; /* three equal parts */
    begin(&f, &config);
    for (uint64_t i = 0; i < 4; i++)
        CHECK(store(&f, (i + 1) << 8, RUNS_BLOCKS, true));
    pairs = count_pairs(&f, &right);
    CHECK(pairs == 4 * (RUNS_BLOCKS - 1) && right == pairs);
    end(&f);
    config.l2_bytes = 384u << 10; /* what is stored evicts what was, leaf first */
    begin(&f, &config);
    for (uint64_t i = 0; i < 12; i++)
        (void)store(&f, (i + 1) << 8, RUNS_BLOCKS, false);
    CHECK(store(&f, 0x9900, 1, true)); /* what was evicted before is in the index then */
    pairs = count_pairs(&f, &right);
    CHECK(pairs > 4 * (RUNS_BLOCKS - 1));
    CHECK(right * 10 >= pairs * 9); /* a window that goes before its block begins a run */
    end(&f);
}

static void test_index_is_lost(void)
{
    struct fixture f;

    begin(&f, &plain);
    CHECK(store(&f, 0x101, BLOCKS, true));
    restart(&f, false);
    load(&f);
    fake_index_fail(f.world.indexes[0], 11, "helper ended");
    CHECK(!store(&f, 0x201, BLOCKS, true));
    CHECK(fetch(&f, 0x101, BLOCKS) == BLOCKS); /* its data is still good */
    reset(&f);
    call_run(&f.call);
    CHECK(f.call.op.code == KVT_CODE_UNAVAILABLE); /* nobody could remember it */
    CHECK(fetch(&f, 0x101, BLOCKS) == 0);
    end(&f);
}

/* ---- loading --------------------------------------------------------------------------------- */

static void test_lookups_wait_for_the_index(void)
{
    struct world_config config = plain;
    struct fixture f;

    config.load_event_ns = 100 * KVT_NS_PER_MS;
    begin(&f, &config);
    CHECK(store(&f, 0x101, BLOCKS, true));
    restart(&f, false);
    call_begin(&f.call, KVT_OP_LOOKUP); /* a short deadline: what is known by then */
    f.call.op.req.lookup.session = f.client.session;
    f.call.op.req.lookup.prefix = world_prefix(&f.call, 0x101, BLOCKS);
    f.call.op.req.lookup.limit_tokens = UINT64_MAX;
    f.call.op.deadline_ns = f.world.now_ns + 150 * KVT_NS_PER_MS;
    call_run(&f.call);
    CHECK_CODE(&f.call.op, KVT_CODE_OK);
    CHECK(f.call.op.ans.lookup.boundary_tokens < BLOCKS * WORLD_BLOCK_TOKENS);
    CHECK(fetch(&f, 0x101, BLOCKS) == BLOCKS); /* a long one: everything */
    end(&f);
}

/* A prompt that was loaded is answered for, whatever is still to come. */
static void test_lookups_do_not_wait_for_others(void)
{
    struct world_config config = plain;
    uint64_t started_ns;
    struct fixture f;

    config.load_event_ns = 20 * KVT_NS_PER_MS;
    begin(&f, &config);
    CHECK(store(&f, 0x101, BLOCKS, true));
    for (uint64_t i = 2; i < 10; i++)
        CHECK(store(&f, i << 8, BLOCKS, true));
    restart(&f, false);
    started_ns = f.world.now_ns;
    CHECK(fetch(&f, 0x900, BLOCKS) == BLOCKS); /* the fake index tells the last one first */
    CHECK(stats(&f).index.is_loading);
    CHECK(f.world.now_ns - started_ns > 2 * BLOCKS * config.load_event_ns);
    CHECK(fetch(&f, 0x901, BLOCKS) == 4); /* nobody knows the rest: that takes all of the index */
    CHECK(!stats(&f).index.is_loading);
    CHECK(fetch(&f, 0x101, BLOCKS) == BLOCKS);
    end(&f);
}

/* However the events of a load fall into turns, and whatever comes in between, nothing is lost. */
static void test_load_in_slices(void)
{
    struct world_config config = plain;
    struct fixture f;

    config.load_event_ns = 100 * KVT_NS_PER_US;
    config.devices = 2;
    begin(&f, &config);
    CHECK(store(&f, 0x101, BLOCKS, true));
    CHECK(store(&f, 0x102, BLOCKS, true)); /* shares the first four blocks */
    CHECK(store(&f, 0x201, BLOCKS, true));
    restart(&f, false);
    while (stats(&f).index.is_loading) {
        world_turn(&f.world);
        world_check(&f.world);
    }
    CHECK(stats(&f).index.load_dropped == 0);
    CHECK(stats(&f).index.loaded_copies == 2 * (3 * BLOCKS - 4));
    CHECK(fetch(&f, 0x101, BLOCKS) == BLOCKS);
    CHECK(fetch(&f, 0x102, BLOCKS) == BLOCKS);
    CHECK(fetch(&f, 0x201, BLOCKS) == BLOCKS);
    end(&f);
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
    struct world_config config = plain;
    struct kvt_index_counters *counters;
    char line[512] = "";
    struct fixture f;
    int fds[2];

    CHECK(pipe2(fds, O_NONBLOCK | O_CLOEXEC) == 0);
    config.load_event_ns = 100 * KVT_NS_PER_S;
    begin(&f, &config);
    CHECK(store(&f, 0x101, BLOCKS, true));
    restart(&f, false);
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
    load(&f);
    CHECK(fetch(&f, 0x101, BLOCKS) == BLOCKS);
    end(&f);
}

/* What is stored right after a start does not push out what L3 has of the same prefix. */
static void test_stores_wait_for_the_index(void)
{
    struct world_config config = plain;
    struct fixture f;

    config.load_event_ns = 10 * KVT_NS_PER_MS;
    begin(&f, &config);
    CHECK(store(&f, 0x101, BLOCKS, true));
    restart(&f, false);
    (void)store(&f, 0x102, BLOCKS, false); /* shares the first four blocks */
    load(&f);
    CHECK(stats(&f).index.load_dropped == 0);
    CHECK(fetch(&f, 0x101, BLOCKS) == BLOCKS);
    CHECK(fetch(&f, 0x102, BLOCKS) == BLOCKS);
    end(&f);
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
    struct world_config config = plain;
    struct fixture f;

    config.is_index_lenient = true;
    begin(&f, &config);
    CHECK(store(&f, 0x101, BLOCKS, true));
    f.world.while_dead = add_hostile_rows;
    restart(&f, false);
    load(&f);
    (void)fetch(&f, 0x101, BLOCKS);
    CHECK(stats(&f).index.load_dropped > 0);
    world_check(&f.world);
    CHECK(store(&f, 0x101, BLOCKS, true));
    CHECK(fetch(&f, 0x101, BLOCKS) == BLOCKS);
    end(&f);
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
    struct fixture f;

    begin(&f, &plain);
    CHECK(store(&f, 0x101, BLOCKS, true));
    f.world.while_dead = scan_all;
    restart(&f, false);
    CHECK(fetch(&f, 0x101, BLOCKS) == BLOCKS);
    CHECK(store(&f, 0x102, BLOCKS, true)); /* below the same root */
    end(&f);
}

/* Paths run over two devices, and the rows that an index has beside its own blocks are lost with
 * it: a device that was scanned alone, or both, still serve all of it. */
static void test_scan_of_striped_devices(void (*scan)(struct world *world))
{
    struct world_config config = plain;
    struct fixture f;

    config.devices = 2;
    begin(&f, &config);
    for (uint64_t i = 0; i < 6; i++)
        CHECK(store(&f, (i + 1) << 8, 12, true)); /* three runs of four each */
    f.world.while_dead = scan;
    restart(&f, false);
    load(&f);
    CHECK(stats(&f).index.load_dropped == 0);
    for (uint64_t i = 0; i < 6; i++)
        CHECK(fetch(&f, (i + 1) << 8, 12) == 12);
    world_check(&f.world);
    /* What was put then makes the next start one like any other. */
    f.world.while_dead = NULL;
    for (uint64_t i = 0; i < 6; i++)
        CHECK(store(&f, (i + 1) << 8, 12, true));
    restart(&f, false);
    load(&f);
    for (uint64_t i = 0; i < 6; i++)
        CHECK(fetch(&f, (i + 1) << 8, 12) == 12);
    end(&f);
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
    struct world_config config = plain;
    struct fixture f;

    config.devices = 2;
    config.is_index_lenient = true;
    begin(&f, &config);
    for (uint64_t i = 0; i < 6; i++)
        CHECK(store(&f, (i + 1) << 8, 12, true));
    f.world.while_dead = add_rows_behind_the_end;
    restart(&f, false);
    load(&f);
    CHECK(stats(&f).index.load_dropped >= 64);
    for (uint64_t i = 0; i < 6; i++)
        CHECK(fetch(&f, (i + 1) << 8, 12) == 12);
    end(&f);
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
    struct fixture f;

    begin(&f, &plain);
    CHECK(store(&f, 0x101, BLOCKS, true));
    restart(&f, false);
    CHECK(store(&f, 0x202, BLOCKS, true));
    f.world.while_dead = forget_stamps;
    restart(&f, false);
    f.world.while_dead = NULL;
    CHECK(fetch(&f, 0x101, BLOCKS) == BLOCKS);
    CHECK(fetch(&f, 0x202, BLOCKS) == BLOCKS);
    for (uint32_t tries = 0; !store(&f, 0x303, BLOCKS, true); tries++) {
        CHECK(tries < 10); /* until more are reserved */
        f.world.now_ns += 10 * KVT_NS_PER_MS;
    }
    restart(&f, false);
    CHECK(fetch(&f, 0x303, BLOCKS) == BLOCKS);
    end(&f);
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
