#include "tests/common/engine_world.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <fcntl.h>

#include "daemon/base/alloc.h"
#include "daemon/base/clock.h"
#include "daemon/base/guard.h"
#include "daemon/base/hash.h"
#include "daemon/base/log.h"
#include "tests/common/check.h"

static struct world *notified; /* tests have one world at a time */

static void on_notice(struct kvt_session_sink *sink, const struct kvt_notice *notice)
{
    CHECK(sink != NULL);
    notified->notices[notice->kind]++;
    notified->trace = kvt_hash64(&notice->op_id, 8, notified->trace + notice->kind);
}

static uint64_t fixed_real_ns(void)
{
    return 1;
}

static void make_tiers(struct world *world, const struct world_config *config)
{
    const uint64_t bytes[KVT_TIERS_COUNT] = {config->l1_bytes, config->l2_bytes, config->l3_bytes};

    world->host_memory = kvt_alloc_aligned(4096, config->l2_bytes);
    CHECK(world->host_memory != NULL);
    for (uint32_t i = 0; i < KVT_TIERS_COUNT; i++) {
        struct fake_tier_config tier = {.id = (enum kvt_tier_id)i,
                                        .capacity_bytes = bytes[i],
                                        .host_memory = world->host_memory,
                                        .seed = config->seed + i,
                                        .inflight_max = 64,
                                        .delay_ns_max = config->delay_ns_max,
                                        .error_rate = config->fault_rate,
                                        .bad_slot_rate = config->fault_rate,
                                        .short_rate = config->fault_rate,
                                        .full_rate = config->fault_rate};

        if (i == KVT_TIER_DEVICE) {
            tier.zones = config->gpus;
            tier.payload_bytes_max = config->payload_bytes_max;
        }
        if (i == KVT_TIER_DISK && config->devices > 0) {
            tier.zones = config->devices;
            tier.is_crash_tolerant = true;
            tier.is_volatile = config->is_disk_volatile;
        }

        if (bytes[i] == 0)
            continue;
        world->tiers[i] = fake_tier_new(&tier);
        CHECK(world->tiers[i] != NULL);
    }
}

void world_open(struct world *world, const char *model)
{
    struct call call;
    struct kvt_req_open_namespace *req;

    call_init(&call, world);
    call_begin(&call, KVT_OP_OPEN_NAMESPACE);
    req = &call.op.req.open_namespace;
    req->block_tokens = WORLD_BLOCK_TOKENS;
    req->ranks = world->config.ranks;
    req->components_count = world->components_count;
    req->components[0] = (struct kvt_api_component){
        .kind = 1, .bytes_per_block = world->shard_bytes[0], .quant = world->config.quant};
    req->components[1] = (struct kvt_api_component){
        .kind = 2, .window_tokens = 40, .bytes_per_block = world->shard_bytes[1]};
    req->model = (struct kvt_text){model, (uint32_t)strlen(model)};
    call_run(&call);
    CHECK_CODE(&call.op, KVT_CODE_OK);
    world->ns = call.op.ans.open_namespace.ns;
    world->epoch = call.op.ans.open_namespace.epoch;
    call_deinit(&call);
}

/* As a start of the daemon does: durable in each catalog before anything is served. */
static void reserve_stamps(struct world *world, struct kvt_engine_config *engine)
{
    uint64_t stamps = world->config.stamps != 0 ? world->config.stamps : 1u << 28;
    struct kvt_disk_state state;
    uint8_t data[KVT_DISK_STATE_BYTES];
    struct kvt_index_put put = {.kind = KVT_INDEX_PUT_CATALOG,
                                .catalog_number = KVT_DISK_CATALOG_STATE,
                                .catalog_data = data,
                                .catalog_bytes = sizeof(data)};

    for (uint32_t i = 0; i < world->config.devices; i++) {
        const struct kvt_index_put *old =
            fake_index_catalog(world->indexes[i], KVT_DISK_CATALOG_STATE);

        if (old == NULL)
            continue;
        CHECK(kvt_disk_catalog_decode_state(old->catalog_data, old->catalog_bytes, &state));
        world->stamps_first = KVT_MAX(world->stamps_first, state.stamps_end);
    }
    engine->store.stamp_first = world->stamps_first;
    engine->store.stamp_end = world->stamps_first + stamps;
    for (uint32_t i = 0; i < world->config.devices; i++) {
        state = (struct kvt_disk_state){.stamps_end = engine->store.stamp_end};
        engine->devices[i].state = state;
        kvt_disk_catalog_encode_state(data, &state);
        fake_index_add(world->indexes[i], &put);
    }
}

static int sync_data(void *ctx)
{
    struct world_device *device = ctx;

    fake_tier_sync(device->world->tiers[KVT_TIER_DISK], device->idx);
    return 0;
}

static int write_catalog(void *ctx, uint32_t number, const void *data, uint32_t bytes)
{
    const struct world_device *device = ctx;

    (void)number;
    (void)data;
    (void)bytes;
    return device->catalog_result;
}

static bool has_record(const struct fake_index *index, uint32_t number,
                       const struct kvt_disk_ns_record *record)
{
    const struct kvt_index_put *put = fake_index_catalog(index, number);
    struct kvt_disk_ns_record own;

    return record->is_used && put != NULL &&
           kvt_disk_catalog_decode_ns(put->catalog_data, put->catalog_bytes, &own) &&
           own.epoch == record->epoch &&
           memcmp(own.fingerprint, record->fingerprint, sizeof(own.fingerprint)) == 0;
}

static void open_indexes(struct world *world, struct kvt_engine_config *engine,
                         struct kvt_disk_ns_record *records, uint32_t *missing)
{
    struct kvt_index_ns namespaces[KVT_NAMESPACES_MAX] = {0};

    for (uint32_t i = 0; i < KVT_NAMESPACES_MAX; i++) {
        for (uint32_t device = 0; device < world->config.devices; device++) {
            const struct kvt_index_put *put = fake_index_catalog(world->indexes[device], i);
            struct kvt_disk_ns_record record;

            if (put == NULL)
                continue;
            CHECK(kvt_disk_catalog_decode_ns(put->catalog_data, put->catalog_bytes, &record));
            if (!records[i].is_used || record.epoch > records[i].epoch)
                records[i] = record;
        }
        for (uint32_t device = 0; device < world->config.devices; device++)
            if (!has_record(world->indexes[device], i, &records[i]))
                missing[i] |= 1u << device;
        namespaces[i].is_used = records[i].is_used;
        namespaces[i].epoch = records[i].epoch;
        namespaces[i].block_tokens = WORLD_BLOCK_TOKENS;
        memcpy(namespaces[i].fingerprint, records[i].fingerprint, KVT_FINGERPRINT_BYTES);
    }
    engine->namespaces = records;
    engine->namespaces_missing = missing;
    reserve_stamps(world, engine);
    for (uint32_t device = 0; device < world->config.devices; device++) {
        fake_index_set_time(world->indexes[device], world->now_ns);
        world->open_indexes[device] = fake_index_open(world->indexes[device], namespaces, false);
        engine->store.indexes[device] = world->open_indexes[device];
    }
}

static uint8_t *map_handle(struct world *world, const struct kvt_device_memory *memory)
{
    void *base;
    int memfd;

    (void)world;
    memcpy(&memfd, memory->handle, sizeof(memfd));
    base = mmap(NULL, memory->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, memfd, 0);
    CHECK(base != MAP_FAILED);
    return base;
}

/* The handle of such memory is a memfd (or the test's), the UUID its GPU's number. As with CUDA it
 * stays when the engine has let it go. */
static int gpu_open(void *ctx, const struct kvt_device_memory *memory,
                    struct kvt_region *ret_region, char ret_why[KVT_DEVICE_WHY_BYTES])
{
    struct world *world = ctx;
    uint8_t *base;

    if (world->config.before_gpu_open != NULL)
        world->config.before_gpu_open(world);
    if (world->gpu_open_result != 0) {
        (void)snprintf(ret_why, KVT_DEVICE_WHY_BYTES, "result %d", world->gpu_open_result);
        return world->gpu_open_result;
    }
    if (memory->uuid[0] >= world->config.gpus)
        return KVT_REGION_E_NO_GPU;
    if (fake_tier_is_zone_out(world->tiers[KVT_TIER_DEVICE], memory->uuid[0]))
        return KVT_REGION_E_LOST;
    if (memory->offset_bytes != 0)
        return KVT_REGION_E_OUTSIDE;
    base = world->config.gpu_memory != NULL ? world->config.gpu_memory(world, memory)
                                            : map_handle(world, memory);
    *ret_region = (struct kvt_region){
        .base = base,
        .bytes = memory->bytes,
        .is_gpu = true,
        .gpu_zone = memory->uuid[0],
        .incarnation = fake_tier_incarnation(world->tiers[KVT_TIER_DEVICE], memory->uuid[0])};
    world->gpu_regions++;
    if (world->is_lost_while_opening)
        fake_tier_lose_zone(world->tiers[KVT_TIER_DEVICE], ret_region->gpu_zone);
    return 0;
}

static void gpu_close(void *ctx, struct kvt_region *region)
{
    struct world *world = ctx;

    CHECK(region->is_gpu);
    if (world->config.gpu_memory == NULL)
        CHECK(munmap(region->base, region->bytes) == 0);
    world->gpu_regions--;
    *region = (struct kvt_region){0};
}

static bool gpu_export(void *ctx, uint32_t zone, struct kvt_device_export *ret_export)
{
    struct world *world = ctx;
    const struct fake_tier *l1 = world->tiers[KVT_TIER_DEVICE];

    if (fake_tier_is_zone_out(l1, zone))
        return false;
    *ret_export = (struct kvt_device_export){.handle = {0xa0, (uint8_t)zone},
                                             .uuid = {(uint8_t)zone},
                                             .bytes = world->config.l1_bytes / world->config.gpus,
                                             .incarnation = fake_tier_incarnation(l1, zone)};
    return true;
}

static void open_engine(struct world *world)
{
    const struct world_config *config = &world->config;
    struct kvt_disk_ns_record *records = kvt_alloc_zeroed(KVT_NAMESPACES_MAX, sizeof(*records));
    uint32_t missing[KVT_NAMESPACES_MAX] = {0};
    struct kvt_engine_config engine = {
        .store = {.slab_unit_bytes = {32768, 32768, 32768},
                  .real_ns = fixed_real_ns,
                  .write_policy = config->write_policy,
                  .stripe_blocks = 4,
                  .lost_after_ns = config->lost_after_ns},
        .l1 = config->l1,
        .index_memory_bytes = config->index_bytes != 0 ? config->index_bytes : 8u << 20,
        .seed = config->seed,
        .boot_id = 77,
        .ops_max = config->ops_max,
        .namespaces_max = config->namespaces_max,
        .leased_bytes_per_engine_max = config->leased_bytes_max,
        .reserved_bytes_per_engine_max = config->reserved_bytes_max,
        .held_bytes_per_engine_max = config->held_bytes_max,
        .notify = on_notice,
        .doorbell = config->doorbell};

    if (config->gpus > 0)
        engine.gpu_memory = (struct kvt_engine_gpu_memory){
            world, gpu_open, gpu_close, config->is_export_allowed ? gpu_export : NULL};

    CHECK(records != NULL);
    if (config->devices > 0)
        open_indexes(world, &engine, records, missing);
    for (uint32_t i = 0; i < KVT_TIERS_COUNT; i++)
        engine.store.tiers[i] = world->tiers[i] != NULL ? fake_tier_base(world->tiers[i]) : NULL;
    engine.store.host_memory = world->host_memory;
    CHECK(kvt_engine_new(&world->engine, &engine) == 0);
    kvt_engine_service(world->engine, &world->service);
    world_open(world, config->model != NULL ? config->model : "sim");
    kvt_free(records);
}

void world_init(struct world *world, const struct world_config *config)
{
    CHECK(kvt_guard_install() == 0 && config->devices <= WORLD_DEVICES_MAX);
    *world = (struct world){.config = *config,
                            .now_ns = KVT_NS_PER_S,
                            .ranks = config->ranks,
                            .components_count = config->has_window ? 2 : 1,
                            .shard_bytes = {4096, 2048},
                            .stamps_first = 1};
    notified = world;
    kvt_log_set_level(KVT_LOG_ERROR); /* what is injected is not news */
    make_tiers(world, config);
    for (uint32_t i = 0; i < config->devices; i++) {
        const struct fake_index_config index = {.seed = config->seed + 100 + i,
                                                .ring_bytes = config->ring_bytes,
                                                .data_sync = sync_data,
                                                .catalog_write = write_catalog,
                                                .ctx = &world->device[i],
                                                .delay_ns_max = config->commit_delay_ns_max,
                                                .load_event_ns = config->load_event_ns,
                                                .refuse_rate = config->refuse_rate,
                                                .is_lenient = config->is_index_lenient,
                                                .has_siblings = config->devices > 1};

        world->device[i] = (struct world_device){.world = world, .idx = i};
        world->indexes[i] = fake_index_new(&index);
        CHECK(world->indexes[i] != NULL);
    }
    open_engine(world);
}

void world_restart(struct world *world, bool is_clean)
{
    if (is_clean) {
        kvt_engine_stop(world->engine, world->now_ns + 60 * KVT_NS_PER_S);
        for (uint32_t i = 0; !kvt_engine_is_stopped(world->engine); i++) {
            CHECK(i < 1000000);
            world_turn(world);
        }
    } else {
        for (uint32_t i = 0; i < world->config.devices; i++)
            fake_index_hold(world->indexes[i], true);
        world_settle(world);
    }
    if (world->before_death != NULL)
        world->before_death(world);
    world->engine = kvt_engine_free(world->engine);
    for (uint32_t i = 0; i < world->config.devices; i++) {
        if (is_clean) {
            kvt_index_close(world->open_indexes[i]);
        } else {
            fake_index_crash(world->indexes[i]);
            fake_index_hold(world->indexes[i], false);
        }
    }
    if (!is_clean && world->config.devices > 0)
        fake_tier_crash(world->tiers[KVT_TIER_DISK]);
    memset(world->host_memory, 0xcd, world->config.l2_bytes);
    if (world->while_dead != NULL)
        world->while_dead(world);
    open_engine(world);
}

void world_deinit(struct world *world)
{
    world->engine = kvt_engine_free(world->engine);
    CHECK(world->gpu_regions == 0);
    for (uint32_t i = 0; i < world->config.devices; i++) {
        kvt_index_close(world->open_indexes[i]);
        fake_index_free(world->indexes[i]);
    }
    for (uint32_t i = 0; i < KVT_TIERS_COUNT; i++) {
        if (world->tiers[i] != NULL)
            kvt_tier_close(fake_tier_base(world->tiers[i]));
    }
    kvt_free(world->host_memory);
}

bool world_turn(struct world *world)
{
    uint64_t next_ns = KVT_TIME_NEVER_NS;
    bool has_more;

    for (uint32_t i = 0; i < KVT_TIERS_COUNT; i++) {
        if (world->tiers[i] != NULL)
            fake_tier_set_time(world->tiers[i], world->now_ns);
    }
    for (uint32_t i = 0; i < world->config.devices; i++)
        fake_index_set_time(world->indexes[i], world->now_ns);
    has_more = kvt_engine_turn(world->engine, world->now_ns);
    if (has_more) {
        world->now_ns += 1000;
        return true;
    }
    next_ns = kvt_engine_next_ns(world->engine);
    for (uint32_t i = 0; i < KVT_TIERS_COUNT; i++) {
        if (world->tiers[i] != NULL)
            next_ns = KVT_MIN(next_ns, fake_tier_next_ns(world->tiers[i]));
    }
    for (uint32_t i = 0; i < world->config.devices; i++)
        next_ns = KVT_MIN(next_ns, fake_index_next_ns(world->indexes[i]));
    /* At most a millisecond: the test may have something to say before the next deadline. */
    next_ns = KVT_MIN(next_ns, world->now_ns + KVT_NS_PER_MS);
    world->now_ns = KVT_MAX(world->now_ns + 1000, next_ns);
    return false;
}

void world_check(struct world *world)
{
    const char *why = "";

    if (!kvt_engine_check(world->engine, &why)) {
        fprintf(stderr, "invariant broken: %s\n", why);
        exit(1);
    }
}

void world_settle(struct world *world)
{
    struct kvt_engine_counts counts;

    for (uint32_t i = 0; i < 100000; i++) {
        world_turn(world);
        kvt_engine_counts(world->engine, &counts);
        if (counts.leases == 0 && counts.tickets == 0 && counts.reserved_cells == 0 &&
            counts.ops == 0 && counts.jobs == 0 && counts.inflight == 0)
            return;
    }
    fprintf(stderr,
            "does not settle: %llu leases, %llu tickets, %llu reserved, %llu ops, %llu jobs, %llu "
            "in flight\n",
            (unsigned long long)counts.leases, (unsigned long long)counts.tickets,
            (unsigned long long)counts.reserved_cells, (unsigned long long)counts.ops,
            (unsigned long long)counts.jobs, (unsigned long long)counts.inflight);
    exit(1);
}

/* ---- calls ------------------------------------------------------------------------------------
 */

static void on_done(struct kvt_op *op)
{
    struct call *call = op->server;

    CHECK(call->is_busy && !call->is_done);
    call->is_busy = false;
    call->is_done = true;
    call->world->trace = kvt_hash64(&op->code, sizeof(op->code), call->world->trace);
    call->world->trace = kvt_hash64(&call->world->now_ns, 8, call->world->trace);
}

static void on_progress(struct kvt_op *op, const struct kvt_api_progress *progress)
{
    struct call *call = op->server;

    CHECK(call->is_busy && progress->group == call->progress);
    call->progress++;
}

void call_init(struct call *call, struct world *world)
{
    *call = (struct call){.world = world};
    CHECK(kvt_arena_init(&call->arena, KVT_OP_ARENA_BYTES_MAX, 1u << 20) == 0);
}

void call_deinit(struct call *call)
{
    CHECK(!call->is_busy);
    kvt_arena_deinit(&call->arena);
}

void call_begin(struct call *call, enum kvt_op_kind kind)
{
    CHECK(!call->is_busy);
    kvt_arena_reset(&call->arena);
    memset(&call->op, 0, sizeof(call->op));
    call->op.kind = kind;
    call->op.is_admin = kind == KVT_OP_EVICT || kind == KVT_OP_RESET || kind == KVT_OP_DUMP ||
                        kind == KVT_OP_MAINTAIN;
    call->op.deadline_ns = call->world->now_ns + 10 * KVT_NS_PER_S;
    call->op.arena = &call->arena;
    call->op.done = on_done;
    call->op.progress = on_progress;
    call->op.server = call;
    call->is_done = false;
    call->progress = 0;
}

void call_submit(struct call *call)
{
    call->is_busy = true;
    CHECK(call->world->service.submit(call->world->service.ctx, &call->op) == 0);
}

void call_wait(struct call *call)
{
    for (uint32_t i = 0; i < 1000000 && !call->is_done; i++)
        world_turn(call->world);
    CHECK(call->is_done);
}
