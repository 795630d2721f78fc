/* The store under a simulator: tiny fake tiers that fail, virtual time, random work from a seed.
 *
 * After turns the store recounts itself against the tree and the allocators; every payload that a
 * read gives is compared with the oracle (a function of namespace, component, rank and the tokens
 * so far); client memory is scribbled as soon as its job is done and must stay scribbled until it
 * is used again; every job ends once, and by its deadline plus the longest transfer. L1 is one to
 * three GPUs, on which clients' memory may lie, and which are lost and come back. At the end
 * everything is dropped and nothing may be left. The same seed gives the same events: each run is
 * made twice and the hashes of its events are compared. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/alloc.h"
#include "daemon/base/clock.h"
#include "daemon/base/guard.h"
#include "daemon/base/log.h"
#include "tests/common/check.h"
#include "tests/sim/store_sim.h"

const struct ns_model sim_models[NS_COUNT] = {
    {4, 1, 1, {{KVT_COMPONENT_FULL, 0, 1000, false}}},
    {8,
     3,
     3,
     {{KVT_COMPONENT_FULL, 0, 3000, false},
      {KVT_COMPONENT_SLIDING_WINDOW, 20, 5000, true},
      {KVT_COMPONENT_STATE, 0, 600, false}}},
    {4,
     5,
     2,
     {{KVT_COMPONENT_FULL, 0, 9000, false}, {KVT_COMPONENT_SLIDING_WINDOW, 8, 12000, false}}},
};

static uint64_t dice(struct sim *sim, uint64_t sides)
{
    return fake_random(&sim->random) % sides;
}

static void event(struct sim *sim, uint64_t what)
{
    sim->events_hash = (sim->events_hash ^ what) * 0x100000001b3ull;
    sim->event_count++;
}

/* ---- payload -------------------------------------------------------------------------------- */

struct client *sim_client_of(struct sim *sim, const struct content *content)
{
    return &sim->clients[content->ns][content->component];
}

static uint64_t oracle_seed(const struct content *content)
{
    return content->path_hash * 1000003 + content->ns * 10007 + content->component * 101 +
           content->rank;
}

/* Calls with the client's bytes piece by piece: fills or compares. True if all were equal. */
bool sim_oracle(struct sim *sim, const struct sim_job *at, bool is_fill)
{
    const struct client *client = sim_client_of(sim, &at->content);
    uint64_t state = oracle_seed(&at->content);
    bool is_equal = true;

    for (uint32_t i = 0; i < 2; i++) {
        const struct kvt_layout_piece *piece = &client->pieces[i];
        uint8_t *bytes = piece->base + at->engine_block * piece->stride_bytes;

        for (uint32_t k = 0; k < piece->bytes; k++) {
            uint8_t byte = (uint8_t)((state + k * 0x9e37ull) >> (k % 8 * 7) ^ k);

            if (is_fill)
                bytes[k] = byte;
            else
                is_equal = is_equal && bytes[k] == byte;
        }
        state = fake_random(&state);
    }
    return is_equal;
}

void sim_scribble(struct sim *sim, const struct sim_job *at, bool is_check)
{
    const struct client *client = sim_client_of(sim, &at->content);

    for (uint32_t i = 0; i < 2; i++) {
        const struct kvt_layout_piece *piece = &client->pieces[i];
        uint8_t *bytes = piece->base + at->engine_block * piece->stride_bytes;

        if (!is_check)
            memset(bytes, SCRIBBLE, piece->bytes);
        for (uint32_t k = 0; is_check && k < piece->bytes; k++)
            CHECK(bytes[k] == SCRIBBLE); /* nobody wrote here after done */
    }
}

/* ---- jobs ----------------------------------------------------------------------------------- */

void sim_on_done(struct kvt_job *job)
{
    struct sim_job *at = job->owner;
    struct sim *sim = at->sim;

    CHECK(at->is_busy);
    at->is_busy = false;
    event(sim, (uint64_t)(at - sim->jobs) << 40 ^ (uint64_t)job->kind << 32 ^
                   (uint64_t)job->result << 24 ^ sim->now_ns);
    sim->done_by_result[job->result]++;
    CHECK(sim->now_ns <= job->deadline_ns + 2 * DELAY_NS_MAX);
    if (job->kind == KVT_JOB_READ && job->result == KVT_MOVE_DONE) {
        bool is_right = sim_oracle(sim, at, false);

        CHECK(is_right || sim->is_canary);
        CHECK(job->moved_bytes ==
              sim_models[at->content.ns].components[at->content.component].bytes);
        sim->wrong_expected += !is_right;
        sim->verified++;
    }
    if (job->kind == KVT_JOB_READ || job->kind == KVT_JOB_FILL)
        sim_scribble(sim, at, false);
}

struct sim_job *sim_free_job(struct sim *sim)
{
    uint32_t first = (uint32_t)dice(sim, JOBS);

    for (uint32_t i = 0; i < JOBS; i++)
        if (!sim->jobs[(first + i) % JOBS].is_busy)
            return &sim->jobs[(first + i) % JOBS];
    return NULL;
}

struct sim_job *sim_submit(struct sim *sim, enum kvt_job_kind kind, struct kvt_cell cell,
                           const struct content *content)
{
    struct sim_job *at = sim_free_job(sim);
    bool has_client = kind == KVT_JOB_FILL || kind == KVT_JOB_READ;

    if (at == NULL)
        return NULL;
    at->is_busy = true;
    at->content = *content;
    at->job = (struct kvt_job){
        .kind = kind,
        .cell = cell,
        .rank = content->rank,
        .tier = KVT_TIER_HOST,
        .is_background = dice(sim, 4) == 0,
        .is_upper_only = dice(sim, 16) == 0,
        .is_move = dice(sim, 2) == 0,
        .home = sim->gpus > 0 && dice(sim, 4) != 0 ? sim->homes[dice(sim, SIM_HOMES)] : NULL,
        .deadline_ns = sim->now_ns + 1 + dice(sim, dice(sim, 8) == 0 ? 4 : 200) * KVT_NS_PER_MS,
        .done = sim_on_done,
        .owner = at,
    };
    if (has_client) {
        at->job.view =
            (struct kvt_client_view){&sim_client_of(sim, content)->layout, &at->engine_block, 0, 2};
        sim_scribble(sim, at, true);
        if (kind == KVT_JOB_FILL)
            (void)sim_oracle(sim, at, true);
    }
    if (kind == KVT_JOB_RAISE)
        at->job.tier = dice(sim, 2) == 0 ? KVT_TIER_DEVICE : KVT_TIER_HOST;
    if (kind == KVT_JOB_LOWER)
        at->job.tier = dice(sim, 2) == 0 ? KVT_TIER_DISK : KVT_TIER_HOST;
    kvt_store_submit(sim->store, &at->job, sim->now_ns);
    return at;
}

/* ---- random work ---------------------------------------------------------------------------- */

static void claim_block(struct sim *sim, const struct kvt_radix_cell *at, struct content *content)
{
    uint8_t digest[KVT_FINGERPRINT_BYTES] = {(uint8_t)content->ns, 1};
    struct kvt_cell cell;
    enum kvt_claim result;

    for (uint32_t i = 0; i < CLAIMS; i++) {
        if (sim->claims[i].is_used)
            continue;
        result = kvt_store_claim(sim->store, at->block, content->component, digest, &cell);
        event(sim, (uint64_t)result);
        if (result == KVT_CLAIM_MINE)
            sim->claims[i] = (struct claim){true, cell, *content};
        return;
    }
}

static void reserve(struct sim *sim)
{
    uint32_t tokens[PATH_BLOCKS_MAX * 8], ns = (uint32_t)dice(sim, NS_COUNT);
    const struct ns_model *model = &sim_models[ns];
    uint32_t blocks = 1 + (uint32_t)dice(sim, PATH_BLOCKS_MAX);
    struct kvt_radix_cell cells[PATH_BLOCKS_MAX];
    uint64_t hashes[PATH_BLOCKS_MAX], hash = 0, new_blocks;
    uint8_t extra_keys[PATH_BLOCKS_MAX][KVT_EXTRA_KEY_BYTES];
    struct kvt_radix_block end;
    struct kvt_radix_prefix prefix = {.ns = sim->ns[ns],
                                      .root_key = "r",
                                      .root_key_bytes = 1,
                                      .tokens = tokens,
                                      .extra_keys = extra_keys};
    int r;

    for (uint32_t i = 0; i < blocks; i++) {
        uint32_t choice = (uint32_t)dice(sim, dice(sim, 3) == 0 ? 12 : 2);

        for (uint32_t k = 0; k < model->block_tokens; k++)
            tokens[i * model->block_tokens + k] = choice * 100 + k;
        hash = (hash ^ (choice + 1)) * 0x9e3779b97f4a7c15ull;
        memset(extra_keys[i], choice % 3 == 1 ? 9 : 0, KVT_EXTRA_KEY_BYTES);
        hashes[i] = hash;
    }
    prefix.tokens_count = blocks * model->block_tokens;
    r = kvt_radix_insert(sim->radix, &prefix, &end, &new_blocks);
    if (r == KVT_RADIX_E_NO_ROOM) {
        event(sim, kvt_store_evict_index(sim->store, 16));
        return;
    }
    CHECK(r == 0);
    for (uint32_t c = 0; c < model->components_count; c++) {
        CHECK(kvt_radix_path(sim->radix, end, c, 0, blocks, cells) == 0);
        for (uint32_t i = 0; i < blocks; i++) {
            struct content content = {ns, c, 0, hashes[i]};

            if (dice(sim, 8) != 0)
                claim_block(sim, &cells[i], &content);
            if (c == 0)
                sim->known[dice(sim, KNOWN)] = (struct known){cells[i].block, ns, hashes[i]};
        }
    }
    kvt_radix_settle(sim->radix, end);
}

static void fill(struct sim *sim)
{
    struct claim *claim = &sim->claims[dice(sim, CLAIMS)];
    const struct ns_model *model;

    if (!claim->is_used)
        return;
    model = &sim_models[claim->content.ns];
    claim->content.rank = (uint32_t)dice(sim, model->ranks);
    if (model->components[claim->content.component].is_replicated)
        claim->content.rank = 0;
    (void)sim_submit(sim, KVT_JOB_FILL, claim->cell, &claim->content);
    if (dice(sim, 24) == 0)
        kvt_store_unclaim(sim->store, claim->cell);
    if ((kvt_store_ready_mask(sim->store, claim->cell) != 0 &&
         kvt_store_filled_mask(sim->store, claim->cell) != 0) ||
        kvt_store_cell_bytes(sim->store, claim->cell) == 0)
        claim->is_used = false;
}

static void use_known(struct sim *sim, uint64_t what)
{
    const struct known *known = &sim->known[dice(sim, KNOWN)];
    const struct ns_model *model = &sim_models[known->ns];
    struct content content = {known->ns, (uint32_t)dice(sim, model->components_count), 0,
                              known->path_hash};
    struct kvt_cell cell;

    if (known->block.generation == 0)
        return;
    cell = kvt_store_cell(sim->store, known->block, content.component);
    if (cell.idx == 0) {
        event(sim, (uint64_t)kvt_store_why_lost(sim->store, known->block, content.component));
        return;
    }
    if (!model->components[content.component].is_replicated)
        content.rank = (uint32_t)dice(sim, model->ranks);
    if (what < 40) {
        if (sim_submit(sim, KVT_JOB_READ, cell, &content) != NULL && dice(sim, 2) == 0)
            (void)sim_submit(sim, KVT_JOB_READ, cell, &content);
        kvt_radix_touch(sim->radix, known->block);
    } else if (what < 50) {
        (void)sim_submit(sim, KVT_JOB_RAISE, cell, &content);
    } else if (what < 58) {
        (void)sim_submit(sim, KVT_JOB_LOWER, cell, &content);
    } else if (what < 59) {
        kvt_store_drop(sim->store, cell);
    } else {
        uint32_t at = (uint32_t)dice(sim, LEASES);

        if (sim->leases[at].generation != 0)
            (void)!kvt_radix_release(sim->radix, sim->leases[at]);
        sim->leases[at] = KVT_RADIX_BLOCK_NONE;
        if (dice(sim, 2) == 0 && kvt_radix_lease(sim->radix, known->block) == 0)
            sim->leases[at] = known->block;
    }
}

static void act(struct sim *sim)
{
    uint64_t what = dice(sim, 1000);

    if (what < 2) {
        event(sim, kvt_store_evict_index(sim->store, 4));
        event(sim, kvt_store_estimate_ns(sim->store, (enum kvt_tier_id)dice(sim, 3),
                                         dice(sim, 2) == 0, 100000));
    } else if (what < 150) {
        reserve(sim);
    } else if (what < 500) {
        fill(sim);
    } else if (what < 950) {
        use_known(sim, dice(sim, 60));
    } else if (what < 990) {
        struct sim_job *at = &sim->jobs[dice(sim, JOBS)];

        if (at->is_busy)
            kvt_store_cancel(sim->store, &at->job);
    } else if (what < 995) {
        struct content content = {0, 0, 0, 0};

        (void)sim_submit(sim, KVT_JOB_FLUSH, KVT_CELL_NONE, &content);
    } else if (what < 998) {
        (void)!kvt_radix_detach_block(sim->radix, sim->known[dice(sim, KNOWN)].block);
    } else if (dice(sim, 20) == 0) {
        kvt_radix_detach_ns(sim->radix, sim->ns[dice(sim, NS_COUNT)]);
    }
}

/* ---- GPUs ---- */

static struct fake_tier *device_of(struct sim *sim)
{
    return sim->tiers[KVT_TIER_DEVICE];
}

/* Engines on it attach again: their layouts are of the new incarnation. */
static void revive(struct sim *sim, uint32_t zone)
{
    fake_tier_revive_zone(device_of(sim), zone);
    for (uint32_t n = 0; n < NS_COUNT; n++)
        for (uint32_t c = 0; c < sim_models[n].components_count; c++)
            if (sim->clients[n][c].layout.is_gpu && sim->clients[n][c].layout.gpu_zone == zone)
                sim->clients[n][c].layout.incarnation = fake_tier_incarnation(device_of(sim), zone);
}

static void lose_and_revive(struct sim *sim)
{
    uint32_t zone;

    if (sim->gpus == 0 || !sim->is_faulty)
        return;
    zone = (uint32_t)dice(sim, sim->gpus);
    if (!fake_tier_is_zone_out(device_of(sim), zone) && dice(sim, 100) == 0) {
        fake_tier_lose_zone(device_of(sim), zone);
        sim->losses++;
        if (dice(sim, 2) == 0) /* before anybody has seen that it was away */
            revive(sim, zone);
        event(sim, zone);
    } else if (fake_tier_is_zone_out(device_of(sim), zone) && dice(sim, 30) == 0) {
        revive(sim, zone);
    }
}

/* ---- the world ------------------------------------------------------------------------------ */

static void make_clients(struct sim *sim)
{
    for (uint32_t n = 0; n < NS_COUNT; n++) {
        for (uint32_t c = 0; c < sim_models[n].components_count; c++) {
            struct client *client = &sim->clients[n][c];
            uint32_t bytes = (uint32_t)sim_models[n].components[c].bytes, half = bytes / 3;

            client->region.bytes = (uint64_t)bytes * JOBS;
            client->region.base = kvt_alloc_zeroed(JOBS, bytes);
            CHECK(client->region.base != NULL);
            memset(client->region.base, SCRIBBLE, client->region.bytes);
            client->pieces[0] = (struct kvt_layout_piece){0, half, 0, half, NULL};
            client->pieces[1] = (struct kvt_layout_piece){0, bytes - half, (uint64_t)half * JOBS,
                                                          bytes - half, NULL};
            client->layout = (struct kvt_layout){
                .pieces_count = 2, .engine_blocks_per_block = 1, .pieces = client->pieces};
            if (sim->gpus > 0 && (n + c + sim->seed) % 2 == 0) {
                client->region.is_gpu = true;
                client->region.gpu_zone = (uint32_t)dice(sim, sim->gpus);
            }
            CHECK(kvt_layout_resolve(&client->layout, &client->region, 1, bytes) == 0);
        }
    }
}

static void open_namespaces(struct sim *sim)
{
    for (uint32_t i = 0; i < SIM_HOMES; i++)
        for (uint32_t rank = 0; rank < KVT_RANKS_MAX; rank++)
            sim->homes[i][rank] = (uint8_t)dice(sim, sim->gpus > 0 ? sim->gpus : 1);
    for (uint32_t n = 0; n < NS_COUNT; n++) {
        struct kvt_radix_spec spec = {.block_tokens = sim_models[n].block_tokens,
                                      .components_count = sim_models[n].components_count};
        struct kvt_store_ns_config config = {.epoch = 1,
                                             .block_tokens = sim_models[n].block_tokens,
                                             .ranks = sim_models[n].ranks,
                                             .components_count = sim_models[n].components_count};

        for (uint32_t c = 0; c < spec.components_count; c++) {
            spec.components[c].kind = sim_models[n].components[c].kind;
            spec.components[c].window_tokens = sim_models[n].components[c].window_tokens;
            config.components[c].bytes_per_block = sim_models[n].components[c].bytes;
            config.components[c].is_replicated = sim_models[n].components[c].is_replicated;
        }
        config.fingerprint[0] = (uint8_t)n;
        CHECK(kvt_radix_ns_open(sim->radix, &spec, &sim->ns[n]) == 0);
        CHECK(kvt_store_ns_open(sim->store, sim->ns[n], &config) == 0);
    }
}

static uint64_t no_real_time(void)
{
    return 1;
}

void sim_open(struct sim *sim, uint64_t seed, bool is_faulty)
{
    uint64_t units[KVT_TIERS_COUNT] = {6, 14, 40};
    struct kvt_radix_config radix = {
        .memory_bytes = 1 * KVT_MIB, .seed = 1, .namespaces_max = NS_COUNT, .roots_max = 16};
    struct kvt_store_config config = {.memory_bytes = 2 * KVT_MIB,
                                      .waiting_jobs_max = JOBS - 16,
                                      .bounce_slots = 2,
                                      .real_ns = no_real_time};

    *sim = (struct sim){
        .seed = seed, .random = seed, .now_ns = 1, .events_hash = 14695981039346656037ull};
    sim->is_faulty = is_faulty;
    for (uint32_t i = 0; i < JOBS; i++) {
        sim->jobs[i].sim = sim;
        sim->jobs[i].engine_block = i;
    }
    config.write_policy = (enum kvt_write_policy)(seed % 3);
    config.is_verify_l2_always = seed % 2 == 0;
    config.write_budget_bytes_per_s = seed % 5 == 0 ? 2 * KVT_MIB : 0;
    units[1] += seed % 4 * 6;
    if (seed % 7 == 1)
        units[0] = 0;
    if (seed % 11 == 2)
        units[2] = 0;
    sim->gpus = units[0] == 0 ? 0 : (uint32_t)(seed % 4);
    units[0] *= KVT_MAX(sim->gpus, 1u);
    sim->host_memory = kvt_alloc_aligned(4096, units[1] * UNIT_BYTES);
    CHECK(sim->host_memory != NULL && kvt_radix_new(&sim->radix, &radix) == 0);
    for (uint32_t i = 0; i < KVT_TIERS_COUNT; i++) {
        struct fake_tier_config tier = {.id = (enum kvt_tier_id)i,
                                        .capacity_bytes = units[i] * UNIT_BYTES,
                                        .host_memory = sim->host_memory,
                                        .seed = seed * 3 + i,
                                        .inflight_max = 24,
                                        .delay_ns_max = DELAY_NS_MAX,
                                        .error_rate = 8,
                                        .bad_slot_rate = 8,
                                        .short_rate = 4,
                                        .client_gone_rate = 4,
                                        .full_rate = 30,
                                        .outage_rate = i == 2 ? 2 : 0,
                                        .outage_ns_max = 100 * KVT_NS_PER_MS};

        if (i == KVT_TIER_DEVICE) {
            tier.zones = sim->gpus;
            tier.payload_bytes_max = seed % 3 == 0 ? 8192 : 0;
        }
        config.slab_unit_bytes[i] = UNIT_BYTES;
        if (units[i] == 0)
            continue;
        sim->tiers[i] = fake_tier_new(&tier);
        CHECK(sim->tiers[i] != NULL);
        fake_tier_set_faulty(sim->tiers[i], is_faulty);
        config.tiers[i] = fake_tier_base(sim->tiers[i]);
    }
    config.radix = sim->radix;
    config.host_memory = sim->host_memory;
    CHECK(kvt_store_new(&sim->store, &config) == 0);
    open_namespaces(sim);
    make_clients(sim);
}

void sim_close(struct sim *sim)
{
    sim->store = kvt_store_free(sim->store);
    sim->radix = kvt_radix_free(sim->radix);
    for (uint32_t i = 0; i < KVT_TIERS_COUNT; i++)
        if (sim->tiers[i] != NULL)
            (void)kvt_tier_close(fake_tier_base(sim->tiers[i]));
    kvt_free(sim->host_memory);
    for (uint32_t n = 0; n < NS_COUNT; n++)
        for (uint32_t c = 0; c < sim_models[n].components_count; c++)
            kvt_free(sim->clients[n][c].region.base);
}

static void check_store(struct sim *sim)
{
    const char *why = "";

    if (!kvt_store_check(sim->store, &why)) {
        fprintf(stderr, "store check: %s (seed %" PRIu64 ", event %" PRIu64 ")\n", why, sim->seed,
                sim->event_count);
        exit(1);
    }
}

void sim_turn(struct sim *sim, bool is_checked)
{
    uint64_t next_ns = kvt_store_next_ns(sim->store), step_ns;

    for (uint32_t i = 0; i < KVT_TIERS_COUNT; i++)
        if (sim->tiers[i] != NULL)
            next_ns = KVT_MIN(next_ns, fake_tier_next_ns(sim->tiers[i]));
    step_ns = dice(sim, 300 * KVT_NS_PER_US);
    if (dice(sim, 3) == 0 && next_ns != KVT_TIME_NEVER_NS && next_ns > sim->now_ns)
        step_ns = KVT_MIN(next_ns - sim->now_ns, DELAY_NS_MAX);
    sim->now_ns += step_ns;
    for (uint32_t i = 0; i < KVT_TIERS_COUNT; i++)
        if (sim->tiers[i] != NULL)
            fake_tier_set_time(sim->tiers[i], sim->now_ns);
    (void)kvt_store_turn(sim->store, sim->now_ns, 1 + (uint32_t)dice(sim, 64));
    for (uint32_t i = 0; i < JOBS; i++)
        CHECK(!sim->jobs[i].is_busy ||
              sim->now_ns <= sim->jobs[i].job.deadline_ns + 2 * DELAY_NS_MAX);
    if (is_checked)
        check_store(sim);
}

static bool is_busy(const struct sim *sim)
{
    for (uint32_t i = 0; i < JOBS; i++)
        if (sim->jobs[i].is_busy)
            return true;
    return kvt_store_inflight(sim->store) > 0;
}

/* Every GPU that is in service is used again, and known as what it is now. */
static void check_l1(struct sim *sim)
{
    struct kvt_store_stats stats;

    for (uint32_t i = 0; i < sim->gpus; i++)
        if (fake_tier_is_zone_out(device_of(sim), i))
            revive(sim, i);
    (void)kvt_store_turn(sim->store, sim->now_ns, 64);
    (void)kvt_store_turn(sim->store, sim->now_ns, 64);
    kvt_store_stats(sim->store, &stats);
    for (uint32_t i = 0; i < sim->gpus; i++) {
        CHECK(stats.l1_zones[i].out_ns == 0);
        CHECK(stats.l1_zones[i].incarnation == fake_tier_incarnation(device_of(sim), i));
    }
    CHECK(sim->losses == 0 || stats.l1_losses > 0);
}

/* Everything ends and goes; nothing may be left. */
void sim_wind_up(struct sim *sim)
{
    struct kvt_store_stats stats;
    struct kvt_radix_stats radix;

    for (uint32_t i = 0; i < CLAIMS; i++)
        if (sim->claims[i].is_used)
            kvt_store_unclaim(sim->store, sim->claims[i].cell);
    for (uint32_t i = 0; i < LEASES; i++)
        if (sim->leases[i].generation != 0)
            (void)!kvt_radix_release(sim->radix, sim->leases[i]);
    for (uint32_t i = 0; i < 4000 && is_busy(sim); i++)
        sim_turn(sim, false);
    CHECK(!is_busy(sim));
    check_store(sim);
    for (uint32_t i = 0; sim->seed % 2 == 1; i++) { /* a planned stop */
        CHECK(i < 4000);
        if (kvt_store_drain(sim->store, sim->now_ns))
            break;
        sim_turn(sim, i % 8 == 0);
    }
    for (uint32_t n = 0; n < NS_COUNT; n++)
        kvt_radix_detach_ns(sim->radix, sim->ns[n]);
    for (uint32_t i = 0; i < 4000; i++)
        sim_turn(sim, false);
    check_l1(sim);
    check_store(sim);
    kvt_store_stats(sim->store, &stats);
    kvt_radix_stats(sim->radix, &radix);
    CHECK(stats.cells == 0 && stats.claimed_cells == 0);
    CHECK(stats.jobs_waiting == 0 && stats.jobs_running == 0);
    for (uint32_t i = 0; i < KVT_TIERS_COUNT; i++)
        CHECK(!stats.tiers[i].is_on || stats.tiers[i].slab.taken_slots == 0);
    CHECK(radix.blocks == 0 && radix.leases == 0);
}

static void print_stats(const struct sim *sim)
{
    struct kvt_store_stats stats;

    kvt_store_stats(sim->store, &stats);
    printf("  verified %" PRIu64 " done %" PRIu64 " miss %" PRIu64 " late %" PRIu64
           " present %" PRIu64 " no_room %" PRIu64 " gone %" PRIu64 " aborted %" PRIu64
           " coalesced %" PRIu64 " bounced %" PRIu64 " bad %" PRIu64 "\n",
           sim->verified, sim->done_by_result[0], sim->done_by_result[1], sim->done_by_result[2],
           sim->done_by_result[3], sim->done_by_result[5], sim->done_by_result[6],
           sim->done_by_result[7], stats.coalesced, stats.bounced, stats.verified_bad);
    printf("  %u GPUs, lost %" PRIu64 " times, seen %" PRIu64 ", copies %" PRIu64 "\n", sim->gpus,
           sim->losses, stats.l1_losses, stats.l1_lost_copies);
    for (uint32_t i = 0; i < KVT_TIERS_COUNT; i++) {
        printf("  L%u: written_back %" PRIu64 " dropped", i + 1, stats.tiers[i].written_back);
        for (uint32_t k = 0; k < KVT_DROP_REASONS; k++)
            printf(" %s %" PRIu64, kvt_store_drop_reason_text((enum kvt_store_drop_reason)k),
                   stats.tiers[i].dropped[k]);
        printf("\n");
    }
}

static uint64_t run(uint64_t seed, uint64_t turns, bool is_printed)
{
    static struct sim sim;

    sim_open(&sim, seed, true);
    for (uint64_t i = 0; i < turns; i++) {
        for (uint64_t k = dice(&sim, 8); k > 0; k--) {
            lose_and_revive(&sim);
            act(&sim);
        }
        sim_turn(&sim, turns < 2000 || i % 8 == 0);
    }
    sim_wind_up(&sim);
    if (is_printed) {
        printf("seed %" PRIu64 ": %" PRIu64 " events, hash %016" PRIx64 "\n", seed, sim.event_count,
               sim.events_hash);
        print_stats(&sim);
    }
    sim_close(&sim);
    return sim.events_hash;
}

int main(int argc, char **argv)
{
    uint64_t seed = 1, turns = 3000, seconds = 0, runs = 0, start_ns = kvt_clock_mono_ns();
    bool is_one = false;

    kvt_log_set_level(KVT_LOG_ERROR); /* what is injected is not news */
    for (int i = 1; i + 1 < argc; i += 2) {
        uint64_t value = strtoull(argv[i + 1], NULL, 10);

        if (strcmp(argv[i], "--seed") == 0) {
            seed = value;
            is_one = true;
        } else if (strcmp(argv[i], "--turns") == 0) {
            turns = value;
        } else if (strcmp(argv[i], "--seconds") == 0) {
            seconds = value;
        } else {
            fprintf(stderr, "usage: store_sim [--seed N] [--turns N] [--seconds N]\n");
            return 2;
        }
    }
    CHECK(kvt_guard_install() == 0);
    sim_canary(false);
    sim_canary(true);
    sim_coalesce();
    do {
        uint64_t hash;

        printf("seed %" PRIu64 "\n", seed);
        (void)fflush(stdout); /* so that a crash names its seed */
        hash = run(seed, turns, true);
        CHECK(run(seed, turns, false) == hash);
        seed++;
        runs++;
    } while (seconds > 0 ? kvt_clock_mono_ns() - start_ns < seconds * KVT_NS_PER_S
                         : !is_one && runs < 24);
    printf("%" PRIu64 " seeds, each twice with the same events\n", runs);
    return 0;
}
