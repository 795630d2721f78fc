/* What the engine calls durable is there after a crash, and one device of L3 holds up no other:
 * devices that hang, are looked through, refuse rows or records. Over fake tiers and indexes. */
#include <stdio.h>
#include <string.h>

#include "daemon/base/hash.h"
#include "daemon/base/log.h"
#include "tests/common/check.h"
#include "tests/common/engine_copies.h"
#include "tests/common/persist.h"

#define BLOCKS 8u

static void turn_until(struct rig *f, uint64_t end_ns)
{
    while (f->world.now_ns < end_ns)
        world_turn(&f->world);
}

static void turn_for(struct rig *f, uint64_t ns)
{
    turn_until(f, f->world.now_ns + ns);
}

static void evict_all(struct rig *f)
{
    call_begin(&f->call, KVT_OP_EVICT);
    f->call.op.req.evict.ns = f->world.ns;
    f->call.op.req.evict.is_whole_namespace = true;
    call_run(&f->call);
    CHECK_CODE(&f->call.op, KVT_CODE_OK);
}

/* ---- one device and the others --------------------------------------------------------------- */

static void test_device_that_hangs(void)
{
    struct world_config config = persist_plain;
    struct rig f;

    config.devices = 2;
    config.ring_bytes = 2048;
    config.lost_after_ns = 3600 * KVT_NS_PER_S;
    config.write_policy = KVT_WRITE_THROUGH;
    rig_begin(&f, &config);
    for (uint64_t i = 1; i <= 40; i++)
        CHECK(persist_store(&f, i << 8, 4, true));
    fake_index_hold(f.world.indexes[1], true);
    for (uint64_t i = 41; i <= 60; i++)
        (void)persist_store(&f, i << 8, 4, false);
    turn_for(&f, KVT_NS_PER_S);
    CHECK(rig_stats(&f).index.waiting > 0); /* some of it is on the one that hangs */
    fake_tier_set_zone_out(f.world.tiers[KVT_TIER_DISK], 1, true);
    world_turn(&f.world);
    for (uint64_t i = 61; i <= 64; i++) /* not behind what waits there */
        CHECK(persist_store(&f, i << 8, 4, true));
    for (uint64_t round = 0; round < 3; round++) { /* more to forget than its ring and queue hold */
        evict_all(&f);
        turn_for(&f, KVT_NS_PER_S);
        CHECK(rig_stats(&f).tiers[KVT_TIER_DISK].ready_copies == 0);
        for (uint64_t i = 1; i <= 40; i++)
            CHECK(persist_store(&f, i << 8, 4, true));
    }
    persist_restart(&f, false);
    persist_load(&f);
    for (uint64_t i = 1; i <= 40; i++)
        CHECK(persist_fetch(&f, i << 8, 4) == 4);
    rig_end(&f);
}

/* An index that is slow and takes nothing for a while: what has to be forgotten waits, and order is
 * kept. */
static void test_index_that_stands_still(void)
{
    struct world_config config = persist_plain;
    struct rig f;

    config.l2_bytes = 4u << 20;
    config.l3_bytes = 64u << 20;
    config.ring_bytes = 2048;
    config.write_policy = KVT_WRITE_THROUGH;
    rig_begin(&f, &config);
    for (uint64_t i = 1; i <= 300; i++)
        (void)persist_store(&f, i << 8, 12, i == 300);
    CHECK(rig_stats(&f).index.waiting == 0);
    fake_index_hold(f.world.indexes[0], true);
    evict_all(&f);
    turn_for(&f, KVT_NS_PER_S);
    CHECK(rig_stats(&f).tiers[KVT_TIER_DISK].ready_copies > 0);
    fake_index_hold(f.world.indexes[0], false);
    turn_for(&f, 60 * KVT_NS_PER_S);
    CHECK(rig_stats(&f).index.stale == 0);
    CHECK(rig_stats(&f).tiers[KVT_TIER_DISK].ready_copies == 0);
    CHECK(fake_index_rows_count(f.world.indexes[0]) == 0);
    CHECK(persist_store(&f, 0x101, BLOCKS, true));
    rig_end(&f);
}

static void delay_first(struct world *world)
{
    fake_index_delay_load(world->indexes[0], 100 * KVT_NS_PER_S);
}

static void test_device_that_is_looked_through(void)
{
    struct world_config config = persist_plain;
    uint64_t copies;
    struct rig f;

    config.devices = 2;
    config.write_policy = KVT_WRITE_THROUGH;
    rig_begin(&f, &config);
    for (uint64_t i = 1; i <= 12; i++)
        CHECK(persist_store(&f, i << 8, 4, true));
    copies = rig_stats(&f).tiers[KVT_TIER_DISK].ready_copies;
    f.world.while_dead = delay_first;
    persist_restart(&f, false);
    turn_for(&f, KVT_NS_PER_S);
    CHECK(rig_stats(&f).index.is_loading);
    CHECK(rig_stats(&f).index.loaded_copies > 0 && rig_stats(&f).index.loaded_copies < copies);
    turn_for(&f, 10 * KVT_NS_PER_S); /* nobody waits any more */
    for (uint64_t i = 21; i <= 32; i++)
        CHECK(persist_store(&f, i << 8, 4, true)); /* all of it on the one that is there */
    CHECK(rig_stats(&f).index.is_loading);
    persist_load(&f);
    CHECK(rig_stats(&f).index.load_dropped == 0);
    for (uint64_t i = 1; i <= 12; i++)
        CHECK(persist_fetch(&f, i << 8, 4) == 4 && persist_fetch(&f, (i + 20) << 8, 4) == 4);
    rig_end(&f);
}

static void take_out(struct world *world)
{
    fake_tier_set_zone_out(world->tiers[KVT_TIER_DISK], 0, true);
}

static void test_device_that_is_out_while_it_is_loaded(void)
{
    struct world_config config = persist_plain;
    struct rig f;

    config.load_event_ns = KVT_NS_PER_MS;
    rig_begin(&f, &config);
    CHECK(persist_store(&f, 0x101, BLOCKS, true));
    f.world.while_dead = take_out;
    persist_restart(&f, false);
    persist_load(&f);
    turn_for(&f, KVT_NS_PER_S);
    fake_tier_set_zone_out(f.world.tiers[KVT_TIER_DISK], 0, false);
    turn_for(&f, KVT_NS_PER_S);
    CHECK(persist_fetch(&f, 0x101, BLOCKS) == BLOCKS);
    rig_end(&f);
}

/* Nothing is put where no index can tell of it. */
static void test_index_of_one_of_two_is_lost(void)
{
    struct world_config config = persist_plain;
    struct rig f;

    config.devices = 2;
    rig_begin(&f, &config);
    for (uint64_t i = 1; i <= 8; i++)
        CHECK(persist_store(&f, i << 8, 4, true));
    fake_index_fail(f.world.indexes[0], 11, "helper ended");
    world_turn(&f.world);
    for (uint64_t i = 21; i <= 32; i++)
        CHECK(persist_store(&f, i << 8, 4, true));
    persist_restart(&f, false);
    persist_load(&f);
    for (uint64_t i = 21; i <= 32; i++)
        CHECK(persist_fetch(&f, i << 8, 4) == 4);
    rig_end(&f);
}

/* A device lost its index, and a block of it was evicted and stored anew elsewhere: its rows are of
 * the block before, and less than what is durable now. */
static void test_later_rows_win(void)
{
    struct world_config config = persist_plain;
    struct rig f;

    config.devices = 2;
    config.lost_after_ns = 3600 * KVT_NS_PER_S;
    rig_begin(&f, &config);
    fake_tier_set_zone_out(f.world.tiers[KVT_TIER_DISK], 1, true);
    world_turn(&f.world);
    CHECK(persist_store(&f, 0x101, 1, true));
    fake_tier_set_zone_out(f.world.tiers[KVT_TIER_DISK], 1, false);
    fake_index_fail(f.world.indexes[0], 11, "helper ended"); /* it hears of nothing that follows */
    evict_all(&f);
    turn_for(&f, KVT_NS_PER_S);
    CHECK(persist_store(&f, 0x101, BLOCKS, true));
    persist_restart(&f, false);
    persist_load(&f);
    CHECK(persist_fetch(&f, 0x101, BLOCKS) == BLOCKS);
    CHECK(persist_store(&f, 0x101, BLOCKS, true));
    persist_restart(&f, false);
    persist_load(&f);
    CHECK(rig_stats(&f).index.load_dropped == 0);
    CHECK(persist_fetch(&f, 0x101, BLOCKS) == BLOCKS);
    rig_end(&f);
}

/* ---- refusals -------------------------------------------------------------------------------- */

static struct kvt_handle open_other(struct rig *f, const char *model)
{
    struct kvt_req_open_namespace *req = &f->call.op.req.open_namespace;

    call_begin(&f->call, KVT_OP_OPEN_NAMESPACE);
    req->block_tokens = WORLD_BLOCK_TOKENS;
    req->ranks = 1;
    req->components_count = 1;
    req->components[0] = (struct kvt_api_component){.kind = 1, .bytes_per_block = 4096};
    req->model = (struct kvt_text){model, (uint32_t)strlen(model)};
    call_run(&f->call);
    return f->call.op.ans.open_namespace.ns;
}

/* Rows of one namespace are refused all the time: that is no reason not to answer a Reset. */
static void test_reset_while_rows_are_refused(void)
{
    struct world_config config = persist_plain;
    struct kvt_handle other;
    struct rig f;

    config.ring_bytes = 4096;
    config.commit_delay_ns_max = 20 * KVT_NS_PER_MS;
    config.write_policy = KVT_WRITE_THROUGH;
    rig_begin(&f, &config);
    other = open_other(&f, "other");
    fake_index_refuse(f.world.indexes[0], 1000);
    for (uint64_t i = 1; i <= 60; i++)
        (void)persist_store(&f, i << 8, BLOCKS, false);
    CHECK(rig_stats(&f).index.waiting > 100); /* they go on for many commits */
    persist_reset(&f);
    f.call.op.req.reset.ns = other;
    f.call.op.deadline_ns = f.world.now_ns + 300 * KVT_NS_PER_MS;
    call_run(&f.call);
    CHECK_CODE(&f.call.op, KVT_CODE_OK);
    CHECK(rig_stats(&f).index.waiting > 0);
    rig_end(&f);
}

/* The first blocks of a path were refused, those below came later: nothing is durable that is not
 * found again, and what is asked for again becomes so. */
static void test_rows_below_a_refused_one(void)
{
    struct world_copies copies = {0};
    struct rig f;

    rig_begin(&f, &persist_plain);
    fake_index_refuse(f.world.indexes[0], 1000);
    CHECK(!persist_store(&f, 0x101, 4, true));
    fake_index_refuse(f.world.indexes[0], 0);
    (void)persist_store(&f, 0x102, BLOCKS, false);
    call_begin(&f.call, KVT_OP_MAINTAIN); /* tells the rest, whatever the answer above was */
    f.call.op.req.maintain.action = KVT_MAINTAIN_STATUS;
    call_run(&f.call);
    turn_for(&f, KVT_NS_PER_S);
    world_copies_take(&copies, &f.world);
    persist_restart(&f, false);
    persist_load(&f);
    CHECK(world_copies_missing(&copies, &f.world) == 0);
    CHECK(persist_store(&f, 0x102, BLOCKS, true));
    persist_restart(&f, false);
    CHECK(persist_fetch(&f, 0x102, BLOCKS) == BLOCKS);
    world_copies_free(&copies);
    rig_end(&f);
}

static void test_asked_again_after_a_refusal(void)
{
    struct rig f;

    rig_begin(&f, &persist_plain);
    fake_index_refuse(f.world.indexes[0], 1000);
    CHECK(!persist_store(&f, 0x101, BLOCKS, true));
    fake_index_refuse(f.world.indexes[0], 0);
    CHECK(persist_store(&f, 0x101, BLOCKS, true));
    persist_restart(&f, false);
    CHECK(persist_fetch(&f, 0x101, BLOCKS) == BLOCKS);
    rig_end(&f);
}

static void test_a_drain_tells_what_was_refused(void)
{
    struct rig f;

    rig_begin(&f, &persist_plain);
    fake_index_refuse(f.world.indexes[0], 1000);
    CHECK(!persist_store(&f, 0x101, BLOCKS, true));
    fake_index_refuse(f.world.indexes[0], 0);
    call_begin(&f.call, KVT_OP_MAINTAIN);
    f.call.op.req.maintain.action = KVT_MAINTAIN_DRAIN;
    call_run(&f.call);
    CHECK_CODE(&f.call.op, KVT_CODE_OK);
    persist_restart(&f, false);
    CHECK(persist_fetch(&f, 0x101, BLOCKS) == BLOCKS);
    rig_end(&f);
}

/* ---- records of namespaces ------------------------------------------------------------------- */

static void test_record_that_cannot_be_written(void)
{
    struct rig f;

    rig_begin(&f, &persist_plain);
    CHECK(persist_store(&f, 0x101, BLOCKS, true));
    f.world.device[0].catalog_result = -EIO;
    persist_reset(&f);
    f.call.op.deadline_ns = f.world.now_ns + KVT_NS_PER_S / 2;
    call_run(&f.call);
    CHECK(f.call.op.code == KVT_CODE_DEADLINE_EXCEEDED);
    for (uint64_t i = 2; i < 6; i++)
        CHECK(!persist_store(&f, i << 8, BLOCKS, true)); /* whichever commit its rows are in */
    CHECK(fake_index_rows_count(f.world.indexes[0]) == 0);
    f.world.device[0].catalog_result = 0;
    turn_for(&f, 3 * KVT_NS_PER_S);
    CHECK(persist_store(&f, 0x201, BLOCKS, true));
    persist_restart(&f, false);
    CHECK(f.world.epoch == 3 - 1);
    CHECK(persist_fetch(&f, 0x101, BLOCKS) == 0 && persist_fetch(&f, 0x201, BLOCKS) == BLOCKS);
    rig_end(&f);
}

static void test_spec_that_no_record_holds(void)
{
    static char model[9000];
    struct world_config config = persist_plain;
    struct rig f;

    memset(model, 'm', sizeof(model) - 1);
    config.model = model;
    rig_begin(&f, &config);
    CHECK(!persist_store(&f, 0x101, BLOCKS, true));
    persist_reset(&f); /* nothing of it can come back */
    call_run(&f.call);
    CHECK_CODE(&f.call.op, KVT_CODE_OK);
    persist_restart(&f, true);
    CHECK(persist_fetch(&f, 0x101, BLOCKS) == 0);
    rig_end(&f);
}

static void test_reset_waits_for_every_device(void)
{
    struct world_config config = persist_plain;
    struct rig f;

    config.devices = 2;
    rig_begin(&f, &config);
    for (uint32_t held = 0; held < 2; held++) {
        fake_index_hold(f.world.indexes[held], true);
        persist_reset(&f);
        call_submit(&f.call);
        turn_for(&f, KVT_NS_PER_S);
        CHECK(!f.call.is_done);
        fake_index_hold(f.world.indexes[held], false);
        call_wait(&f.call);
        CHECK_CODE(&f.call.op, KVT_CODE_OK);
    }
    fake_index_hold(f.world.indexes[1], true); /* one that is out of service has no say */
    fake_tier_set_zone_out(f.world.tiers[KVT_TIER_DISK], 1, true);
    persist_reset(&f);
    call_run(&f.call);
    CHECK_CODE(&f.call.op, KVT_CODE_OK);
    fake_index_hold(f.world.indexes[1], false);
    rig_end(&f);
}

/* All numbers are taken, and those that neither have sessions nor blocks make way. */
static void test_numbers_of_idle_namespaces(void)
{
    struct kvt_handle first;
    struct rig f;
    char model[32];
    uint64_t epoch;

    rig_begin(&f, &persist_plain); /* number 0, with a session */
    first = open_other(&f, "model 1");
    epoch = f.call.op.ans.open_namespace.epoch;
    for (uint32_t i = 2; i < KVT_NAMESPACES_MAX; i++) {
        (void)snprintf(model, sizeof(model), "model %u", i);
        (void)open_other(&f, model);
        CHECK_CODE(&f.call.op, KVT_CODE_OK);
    }
    (void)open_other(&f, "one more");
    CHECK_CODE(&f.call.op, KVT_CODE_OK);
    CHECK(!f.call.op.ans.open_namespace.was_known);
    CHECK(f.call.op.ans.open_namespace.epoch > epoch);
    persist_reset(&f); /* the handle of who had the number before is nobody's now */
    f.call.op.req.reset.ns = first;
    call_run(&f.call);
    CHECK(f.call.op.code == KVT_CODE_NOT_FOUND);
    CHECK(persist_store(&f, 0x101, BLOCKS, true));
    rig_leave(&f); /* number 0 has no sessions, but blocks */
    for (uint32_t i = 0; i < 2 * KVT_NAMESPACES_MAX; i++) {
        (void)snprintf(model, sizeof(model), "later %u", i);
        (void)open_other(&f, model);
        CHECK_CODE(&f.call.op, KVT_CODE_OK);
    }
    client_attach(&f.client, &f.world, &f.call, 1, true, 0);
    CHECK(persist_fetch(&f, 0x101, BLOCKS) == BLOCKS);
    persist_restart(&f, false);
    CHECK(persist_fetch(&f, 0x101, BLOCKS) == BLOCKS);
    rig_end(&f);
}

static void enter(struct rig *f, const char *model)
{
    world_open(&f->world, model);
    client_attach(&f->client, &f->world, &f->call, 1, true, 0);
}

/* All numbers are taken by namespaces with blocks: the one without engines for longest makes way,
 * one with an engine never. */
static void test_a_namespace_makes_way(void)
{
    struct world_config config = persist_plain;
    struct kvt_handle old;
    struct rig f;

    config.namespaces_max = 2;
    rig_begin(&f, &config);
    CHECK(persist_store(&f, 0x101, BLOCKS, true));
    rig_leave(&f);
    turn_for(&f, KVT_NS_PER_MS);
    enter(&f, "second");
    old = f.world.ns;
    CHECK(persist_store(&f, 0x201, BLOCKS, true));
    rig_leave(&f);
    turn_for(&f, KVT_NS_PER_MS);
    enter(&f, "sim"); /* used later than the second one now */
    (void)open_other(&f, "other");
    CHECK(f.call.op.code == KVT_CODE_RESOURCE_EXHAUSTED);
    (void)open_other(&f, "other"); /* asked again at once: none but that one makes way */
    turn_for(&f, KVT_NS_PER_S);
    CHECK(persist_fetch(&f, 0x101, BLOCKS) == BLOCKS);
    rig_leave(&f);
    enter(&f, "third");
    persist_reset(&f);
    f.call.op.req.reset.ns = old;
    call_run(&f.call);
    CHECK(f.call.op.code == KVT_CODE_NOT_FOUND);
    CHECK(persist_fetch(&f, 0x201, BLOCKS) == 0);
    CHECK(persist_store(&f, 0x201, BLOCKS, true));
    rig_leave(&f);
    enter(&f, "sim");
    CHECK(persist_fetch(&f, 0x101, BLOCKS) == BLOCKS);
    (void)open_other(&f, "second"); /* "third" makes way: it has no engine */
    CHECK(f.call.op.code == KVT_CODE_RESOURCE_EXHAUSTED);
    turn_for(&f, KVT_NS_PER_S);
    persist_restart(&f, false);
    CHECK(persist_fetch(&f, 0x101, BLOCKS) == BLOCKS);
    rig_leave(&f);
    enter(&f, "second"); /* what was forgotten does not come back with the name */
    CHECK(persist_fetch(&f, 0x201, BLOCKS) == 0);
    rig_end(&f);
}

/* A copy was put, went, and came back to L3: what is committed of the first says nothing about the
 * second. */
static void test_commit_of_a_copy_before(void)
{
    static const enum kvt_maintain_action actions[] = {KVT_MAINTAIN_SCRUB_START,
                                                       KVT_MAINTAIN_SCRUB_STOP};
    struct world_config config = persist_plain;
    struct world_copies copies = {0};
    struct rig f;

    config.write_policy = KVT_WRITE_THROUGH;
    config.commit_delay_ns_max = KVT_NS_PER_S;
    rig_begin(&f, &config);
    turn_for(&f, 2 * KVT_NS_PER_S);
    fake_index_hold(f.world.indexes[0], true);
    (void)persist_store(&f, 0x101, 1, false);
    turn_for(&f, KVT_NS_PER_S); /* both copies are with the commit that is held */
    fake_tier_spoil(f.world.tiers[KVT_TIER_DISK], 2);
    for (uint32_t i = 0; i < 2; i++) {
        call_begin(&f.call, KVT_OP_MAINTAIN);
        f.call.op.req.maintain.action = actions[i];
        f.call.op.req.maintain.rate_bytes_per_s = 1u << 30;
        call_run(&f.call);
        turn_for(&f, KVT_NS_PER_S);
    }
    CHECK(rig_stats(&f).tiers[KVT_TIER_DISK].ready_copies == 0);
    world_demote(&f.call, &f.client, KVT_HANDLE_NONE, 0, 1, 0);
    f.call.op.req.demote.prefix = world_prefix(&f.call, 0x101, 1);
    f.call.op.req.demote.wants_durable = true;
    call_submit(&f.call);
    turn_for(&f, KVT_NS_PER_S);
    CHECK(rig_stats(&f).tiers[KVT_TIER_DISK].ready_copies == 2);
    fake_index_hold(f.world.indexes[0], false);
    for (uint32_t i = 0; i < 3; i++) /* the first commit ends, the second has begun */
        world_turn(&f.world);
    world_copies_take(&copies, &f.world);
    CHECK(copies.count == 0 && !f.call.is_done);
    call_wait(&f.call);
    CHECK(f.call.op.ans.demote.is_durable);
    world_copies_take(&copies, &f.world);
    CHECK(copies.count == 2);
    world_copies_free(&copies);
    rig_end(&f);
}

/* ---- what indexes and slots say -------------------------------------------------------------- */

/* After a crash a row may name a slot that holds something else: the copy is durable only when it
 * was seen. */
static void test_not_durable_before_it_is_seen(void)
{
    struct rig f;

    rig_begin(&f, &persist_plain);
    CHECK(persist_store(&f, 0x101, BLOCKS, true));
    persist_restart(&f, false);
    persist_load(&f);
    CHECK(persist_store(&f, 0x101, BLOCKS, true)); /* all is there, and read to say so */
    persist_restart(&f, false);
    persist_load(&f);
    memset(fake_tier_memory(f.world.tiers[KVT_TIER_DISK]), 0, f.world.config.l3_bytes);
    CHECK(!persist_store(&f, 0x101, BLOCKS, true));
    CHECK(persist_store(&f, 0x101, BLOCKS, true)); /* stored anew */
    persist_restart(&f, false);
    CHECK(persist_fetch(&f, 0x101, BLOCKS) == BLOCKS);
    rig_end(&f);
}

/* A slot with the right numbers, of another parent, whole: not ours all the same. */
static uint32_t forge(struct world *world)
{
    uint8_t *disk = fake_tier_memory(world->tiers[KVT_TIER_DISK]);
    uint32_t forged = 0;

    for (uint64_t id = 0; id < 1000; id++) {
        const struct kvt_index_put *copy = fake_index_copy(world->indexes[0], id, 0);
        uint32_t tokens[WORLD_BLOCK_TOKENS];
        struct kvt_slot_info info;
        const uint8_t *tokens_le;
        uint8_t *slot, *payload;

        if (copy == NULL || copy->key.block_idx == 0)
            continue;
        slot = disk + copy->slot_offsets[0];
        payload = slot + kvt_slot_header_bytes(WORLD_BLOCK_TOKENS);
        CHECK(kvt_slot_header_read(slot, copy->slot_bytes, &info, &tokens_le) == KVT_SLOT_OK);
        memcpy(tokens, tokens_le, sizeof(tokens));
        info.parent_id++;
        kvt_slot_header_write(slot, &info, tokens);
        memset(payload, 0x77, info.payload_bytes);
        kvt_slot_header_seal(slot, kvt_hash64(payload, info.payload_bytes, 0));
        forged++;
    }
    return forged;
}

static void test_slots_of_another_parent(void)
{
    struct rig f;

    rig_begin(&f, &persist_plain);
    CHECK(persist_store(&f, 0x101, BLOCKS, true));
    persist_restart(&f, false);
    persist_load(&f);
    CHECK(forge(&f.world) == BLOCKS - 1);
    CHECK(persist_fetch(&f, 0x101, BLOCKS) <= 1); /* and none is wrong */
    rig_end(&f);
}

static void test_rows_go_with_their_blocks(void)
{
    struct rig f;

    rig_begin(&f, &persist_plain);
    CHECK(persist_store(&f, 0x101, BLOCKS, true));
    CHECK(fake_index_rows_count(f.world.indexes[0]) == BLOCKS);
    evict_all(&f);
    turn_for(&f, KVT_NS_PER_S);
    CHECK(fake_index_rows_count(f.world.indexes[0]) == 0);
    CHECK(persist_store(&f, 0x101, BLOCKS, true));
    persist_reset(&f);
    call_run(&f.call);
    turn_for(&f, KVT_NS_PER_S);
    CHECK(fake_index_rows_count(f.world.indexes[0]) == 0);
    rig_end(&f);
}

static uint64_t misplaced;

/* A copy that lies where no slot is. */
static void misplace(struct world *world)
{
    for (uint64_t id = 1; misplaced == 0; id++) {
        const struct kvt_index_put *copy = fake_index_copy(world->indexes[0], id, 0);
        uint64_t nowhere = 12345;
        struct kvt_index_put put;

        if (copy == NULL)
            continue;
        put = *copy;
        put.slot_offsets = &nowhere;
        misplaced = id;
        fake_index_add(world->indexes[0], &put);
    }
}

static void test_copies_that_do_not_fit_are_dropped(void)
{
    struct rig f;

    rig_begin(&f, &persist_plain);
    CHECK(persist_store(&f, 0x101, BLOCKS, true));
    f.world.while_dead = misplace;
    persist_restart(&f, false);
    persist_load(&f);
    turn_for(&f, KVT_NS_PER_S);
    CHECK(fake_index_copy(f.world.indexes[0], misplaced, 0) == NULL);
    CHECK(fake_index_row(f.world.indexes[0], misplaced) != NULL);
    rig_end(&f);
}

static void hold_all(struct world *world)
{
    for (uint32_t i = 0; i < world->config.devices; i++)
        fake_index_hold(world->indexes[i], true);
}

/* No number is given before its reservation is durable. */
static void test_numbers_are_reserved_first(void)
{
    struct world_config config = persist_plain;
    uint64_t first, next;
    struct rig f;

    config.stamps = 30; /* blocks and copies of eight blocks take three each */
    rig_begin(&f, &config);
    turn_for(&f, KVT_NS_PER_S);
    f.world.while_dead = hold_all;
    persist_restart(&f, false);
    f.world.while_dead = NULL;
    persist_load(&f);
    first = f.world.stamps_first;
    CHECK(world_stamp_next(&f.world) == first);
    (void)persist_store(&f, 0x101, 2 * BLOCKS, false); /* some find no room */
    next = world_stamp_next(&f.world);
    CHECK(next == first + config.stamps); /* not one more */
    fake_index_hold(f.world.indexes[0], false);
    turn_for(&f, KVT_NS_PER_S);
    CHECK(persist_store(&f, 0x201, BLOCKS, true));
    next = world_stamp_next(&f.world);
    persist_restart(&f, false);
    CHECK(world_stamp_next(&f.world) >= next);
    rig_end(&f);
}

#define OLD_IDS 4u

static bool is_same_block; /* what add_older does */

/* Gives every device older copies of all blocks that any has, in slots where nothing of the kind
 * is: under the numbers that junk had before, or as copies of the same blocks. */
static void add_older(struct world *world)
{
    for (uint64_t id = OLD_IDS + 1; id < 64; id++) {
        for (uint32_t from = 0; from < world->config.devices; from++) {
            const struct kvt_index_put *row = fake_index_row(world->indexes[from], id);
            const struct kvt_index_put *copy = fake_index_copy(world->indexes[from], id, 0);

            for (uint32_t to = 0; to < world->config.devices && copy != NULL; to++) {
                uint64_t run = 2u << 20, slot = run + row->key.block_idx * copy->slot_bytes;
                struct kvt_index_put old_row = *row, old_copy = *copy;

                if (!is_same_block) {
                    old_row.key.block_id = old_copy.key.block_id = row->key.block_idx + 1;
                    old_row.parent_id = row->key.block_idx;
                }
                old_copy.content = row->key.block_idx + 1;
                old_copy.slot_offsets = &slot;
                old_copy.run_offsets = &run;
                if (from != to || !is_same_block) {
                    fake_index_add(world->indexes[to], &old_row);
                    fake_index_add(world->indexes[to], &old_copy);
                }
            }
        }
    }
}

/* A device may still have the rows of a block from before it was evicted and stored again on
 * another: the newer ones count, whichever come first. */
static void test_newer_rows_win(bool are_copies)
{
    struct world_config config = persist_plain;
    struct rig f;

    config.devices = 2;
    rig_begin(&f, &config);
    CHECK(persist_store(&f, 0x7700, OLD_IDS, true));
    evict_all(&f);
    CHECK(persist_store(&f, 0x101, 4, true));
    is_same_block = are_copies;
    f.world.while_dead = add_older;
    persist_restart(&f, false);
    f.world.while_dead = NULL;
    CHECK(persist_fetch(&f, 0x101, 4) == 4);
    rig_end(&f);
}

int main(void)
{
    test_device_that_hangs();
    test_index_that_stands_still();
    test_device_that_is_looked_through();
    test_device_that_is_out_while_it_is_loaded();
    test_index_of_one_of_two_is_lost();
    test_later_rows_win();
    test_reset_while_rows_are_refused();
    test_rows_below_a_refused_one();
    test_asked_again_after_a_refusal();
    test_a_drain_tells_what_was_refused();
    test_record_that_cannot_be_written();
    test_spec_that_no_record_holds();
    test_reset_waits_for_every_device();
    test_numbers_of_idle_namespaces();
    test_a_namespace_makes_way();
    test_not_durable_before_it_is_seen();
    test_slots_of_another_parent();
    test_rows_go_with_their_blocks();
    test_copies_that_do_not_fit_are_dropped();
    test_numbers_are_reserved_first();
    test_newer_rows_win(false);
    test_newer_rows_win(true);
    test_commit_of_a_copy_before();
    return 0;
}
