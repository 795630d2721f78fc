/* Directed cases of store_sim: what it would not notice if it was blind, and shared transfers. */
#include "tests/common/check.h"
#include "tests/sim/store_sim.h"

/* A client that reuses its block before done is caught; one that waits for done is safe. */
void sim_canary(bool is_early)
{
    static struct sim sim;
    struct content content = {0, 0, 0, 77};
    uint32_t tokens[4] = {1, 2, 3, 4};
    struct kvt_radix_prefix prefix = {
        .root_key = "r", .root_key_bytes = 1, .tokens = tokens, .tokens_count = 4};
    uint8_t digest[KVT_FINGERPRINT_BYTES] = {1};
    struct kvt_radix_block end;
    struct kvt_cell cell;
    struct sim_job *at;
    uint64_t new_blocks;

    sim_open(&sim, 3, false);
    sim.is_canary = true;
    prefix.ns = sim.ns[0];
    CHECK(kvt_radix_insert(sim.radix, &prefix, &end, &new_blocks) == 0);
    CHECK(kvt_store_claim(sim.store, end, 0, digest, &cell) == KVT_CLAIM_MINE);
    kvt_radix_settle(sim.radix, end);
    do {
        at = sim_submit(&sim, KVT_JOB_FILL, cell, &content);
        CHECK(at != NULL);
        if (is_early)
            sim_scribble(&sim, at, false); /* before done: forbidden */
        while (at->is_busy)
            sim_turn(&sim, true);
    } while (at->job.result == KVT_MOVE_LATE);
    CHECK(at->job.result == KVT_MOVE_DONE);
    do {
        at = sim_submit(&sim, KVT_JOB_READ, cell, &content);
        CHECK(at != NULL);
        while (at->is_busy)
            sim_turn(&sim, true);
    } while (at->job.result == KVT_MOVE_LATE);
    CHECK(at->job.result == KVT_MOVE_DONE);
    CHECK(sim.wrong_expected == (is_early ? 1 : 0));
    sim_wind_up(&sim);
    sim_close(&sim);
}

static struct sim_job *submit_plain(struct sim *sim, enum kvt_job_kind kind, struct kvt_cell cell,
                                    const struct content *content, enum kvt_tier_id tier)
{
    struct sim_job *at = sim_free_job(sim);

    CHECK(at != NULL);
    at->is_busy = true;
    at->content = *content;
    at->job = (struct kvt_job){.kind = kind,
                               .cell = cell,
                               .tier = tier,
                               .is_move = true,
                               .deadline_ns = sim->now_ns + KVT_NS_PER_S,
                               .done = sim_on_done,
                               .owner = at};
    at->job.view =
        (struct kvt_client_view){&sim_client_of(sim, content)->layout, &at->engine_block, 0, 2};
    if (kind == KVT_JOB_FILL)
        (void)sim_oracle(sim, at, true);
    kvt_store_submit(sim->store, &at->job, sim->now_ns);
    return at;
}

static void wait_done(struct sim *sim, const struct sim_job *at, enum kvt_move_result wanted)
{
    while (at->is_busy)
        sim_turn(sim, true);
    CHECK(at->job.result == wanted);
}

/* Two reads of a block that is on disk only are one transfer; when the first is cancelled it ends
 * at once, the transfer goes on, the other read is served and the copy stays. */
void sim_coalesce(void)
{
    static struct sim sim;
    struct content content = {0, 0, 0, 78};
    uint32_t tokens[4] = {5, 6, 7, 8};
    struct kvt_radix_prefix prefix = {
        .root_key = "r", .root_key_bytes = 1, .tokens = tokens, .tokens_count = 4};
    uint8_t digest[KVT_FINGERPRINT_BYTES] = {1};
    struct kvt_store_stats stats;
    struct kvt_radix_block end;
    struct kvt_cell cell;
    struct sim_job *first, *second;
    uint64_t new_blocks;

    sim_open(&sim, 3, false);
    prefix.ns = sim.ns[0];
    CHECK(kvt_radix_insert(sim.radix, &prefix, &end, &new_blocks) == 0);
    CHECK(kvt_store_claim(sim.store, end, 0, digest, &cell) == KVT_CLAIM_MINE);
    kvt_radix_settle(sim.radix, end);
    wait_done(&sim, submit_plain(&sim, KVT_JOB_FILL, cell, &content, KVT_TIER_HOST), KVT_MOVE_DONE);
    wait_done(&sim, submit_plain(&sim, KVT_JOB_LOWER, cell, &content, KVT_TIER_DISK),
              KVT_MOVE_DONE);
    CHECK(kvt_store_ready_mask(sim.store, cell) == 1u << KVT_TIER_DISK);
    first = submit_plain(&sim, KVT_JOB_READ, cell, &content, KVT_TIER_HOST);
    second = submit_plain(&sim, KVT_JOB_READ, cell, &content, KVT_TIER_HOST);
    kvt_store_stats(sim.store, &stats);
    CHECK(stats.coalesced == 1 && kvt_store_inflight(sim.store) == 1);
    kvt_store_cancel(sim.store, &first->job);
    CHECK(!first->is_busy && first->job.result == KVT_MOVE_ABORTED);
    wait_done(&sim, second, KVT_MOVE_DONE);
    CHECK((kvt_store_ready_mask(sim.store, cell) & 1u << KVT_TIER_HOST) != 0);
    CHECK(sim.verified == 1);
    sim_wind_up(&sim);
    sim_close(&sim);
}
