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
        .notify = on_notice};

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

/* ---- clients ----------------------------------------------------------------------------------
 */

#define PIECE_BYTES(world, component)                                                              \
    ((world)->shard_bytes[component] / WORLD_ENGINE_BLOCKS / WORLD_PIECES)
#define PIECE_WORDS_MAX 256u

static void map_memory(struct client *client)
{
    struct world *world = client->world;
    uint64_t bytes = 0;

    for (uint32_t i = 0; i < world->components_count; i++) {
        client->component_offset[i] = bytes;
        bytes += (uint64_t)world->shard_bytes[i] * WORLD_POOL_BLOCKS;
    }
    client->memfd = memfd_create("client", MFD_ALLOW_SEALING | MFD_CLOEXEC);
    CHECK(client->memfd >= 0 && ftruncate(client->memfd, (off_t)bytes) == 0);
    CHECK(fallocate(client->memfd, 0, 0, (off_t)bytes) == 0);
    CHECK(fcntl(client->memfd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) == 0);
    client->memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, client->memfd, 0);
    CHECK(client->memory != MAP_FAILED);
}

static uint64_t memory_bytes(const struct client *client)
{
    const struct world *world = client->world;

    return ((uint64_t)world->shard_bytes[0] +
            (world->components_count > 1 ? world->shard_bytes[1] : 0)) *
           WORLD_POOL_BLOCKS;
}

static void add_layouts(struct client *client, struct call *call)
{
    struct world *world = client->world;
    struct kvt_req_attach *req = &call->op.req.attach;
    struct kvt_api_layout *layouts =
        kvt_arena_array(&call->arena, world->components_count, sizeof(layouts[0]));
    const char *why = NULL;

    req->regions_count = 1;
    req->regions[0].bytes = memory_bytes(client);
    CHECK(world->service.region_open(world->service.ctx, client->memfd, req->regions[0].bytes,
                                     &req->regions[0].mapping, &why) == 0);
    req->layouts = layouts;
    req->layouts_count = world->components_count;
    for (uint32_t i = 0; i < world->components_count; i++) {
        struct kvt_api_piece *pieces =
            kvt_arena_array(&call->arena, WORLD_PIECES, sizeof(pieces[0]));
        uint32_t bytes = PIECE_BYTES(world, i);

        for (uint32_t p = 0; p < WORLD_PIECES; p++)
            pieces[p] = (struct kvt_api_piece){
                .bytes = bytes,
                .stride_bytes = bytes,
                .offset_bytes = client->component_offset[i] +
                                (uint64_t)p * bytes * WORLD_ENGINE_BLOCKS * WORLD_POOL_BLOCKS};
        layouts[i] = (struct kvt_api_layout){.component = i,
                                             .engine_blocks_per_block = WORLD_ENGINE_BLOCKS,
                                             .pieces_count = WORLD_PIECES,
                                             .pieces = pieces};
    }
}

void client_attach(struct client *client, struct world *world, struct call *call, uint8_t engine,
                   bool is_scheduler, uint32_t rank)
{
    struct kvt_req_attach *req = &call->op.req.attach;

    *client = (struct client){.world = world, .rank = rank, .memfd = -1};
    call_begin(call, KVT_OP_ATTACH);
    req->ns = world->ns;
    req->engine_id[0] = engine;
    req->is_scheduler = is_scheduler;
    req->rank = rank;
    req->api_version = 1;
    req->sink = (struct kvt_session_sink *)world;
    if (rank != KVT_RANK_NONE) {
        map_memory(client);
        add_layouts(client, call);
    }
    call_run(call);
    CHECK_CODE(&call->op, KVT_CODE_OK);
    client->session = call->op.ans.attach.session;
}

void client_detach(struct client *client, struct call *call)
{
    call_begin(call, KVT_OP_DETACH);
    call->op.req.detach.session = client->session;
    call_run(call);
    CHECK_CODE(&call->op, KVT_CODE_OK);
}

void client_unmap(struct client *client)
{
    if (client->memory != NULL)
        CHECK(munmap(client->memory, memory_bytes(client)) == 0);
    if (client->memfd >= 0)
        close(client->memfd);
    client->memory = NULL;
    client->memfd = -1;
}

uint64_t world_block_tag(uint64_t tag, uint64_t block_idx)
{
    return block_idx < 4 ? tag >> 8 : tag;
}

static uint64_t word_of(uint32_t component, uint64_t tag, uint64_t block_idx, uint32_t rank,
                        uint32_t at)
{
    const uint64_t words[5] = {component, world_block_tag(tag, block_idx), block_idx, rank, at};

    return kvt_hash64(words, sizeof(words), 0);
}

static uint64_t *piece_at(const struct client *client, uint32_t component, uint32_t piece,
                          uint32_t engine_block)
{
    uint32_t bytes = PIECE_BYTES(client->world, component);

    return (uint64_t *)(void *)(client->memory + client->component_offset[component] +
                                (uint64_t)piece * bytes * WORLD_ENGINE_BLOCKS * WORLD_POOL_BLOCKS +
                                (uint64_t)engine_block * bytes);
}

void client_fill(struct client *client, uint32_t component, uint64_t tag, uint64_t block_idx,
                 uint32_t pool_block)
{
    uint32_t words = PIECE_BYTES(client->world, component) / 8, at = 0;

    for (uint32_t p = 0; p < WORLD_PIECES; p++) {
        for (uint32_t b = 0; b < WORLD_ENGINE_BLOCKS; b++) {
            uint64_t *to = piece_at(client, component, p, pool_block * WORLD_ENGINE_BLOCKS + b);

            for (uint32_t i = 0; i < words; i++, at++)
                to[i] = word_of(component, tag, block_idx, client->rank, at);
        }
    }
}

/* There and back, as the tiers do it: each piece of an engine block is whole planes. */
static void convert(const struct world *world, uint64_t *words, uint32_t bytes)
{
    const struct kvt_api_quant *quant = &world->config.quant;
    uint64_t stored[2 * PIECE_WORDS_MAX];
    struct kvt_quant_batch batch = {.spec = {.kind = (uint8_t)quant->kind,
                                             .elem = (uint8_t)quant->elem,
                                             .order = (uint8_t)quant->order,
                                             .plane_tokens = quant->plane_tokens,
                                             .heads = quant->heads,
                                             .head_dim = quant->head_dim},
                                    .jobs_count = 1};
    uint32_t planes = (uint32_t)(bytes / kvt_quant_plane_bytes(&batch.spec));
    struct kvt_quant_job job = {.raw = (uintptr_t)words,
                                .quantised = (uintptr_t)stored,
                                .planes_count = planes,
                                .end_plane = planes};

    CHECK(kvt_quant_bytes(&batch.spec, bytes) <= sizeof(stored));
    batch.jobs = (uintptr_t)&job;
    batch.planes_max = planes;
    CHECK(kvt_kernels_host()->quantise(NULL, &batch) == 0);
    CHECK(kvt_kernels_host()->dequantise(NULL, &batch) == 0);
}

bool client_holds(const struct client *client, uint32_t component, uint64_t tag, uint64_t block_idx,
                  uint32_t pool_block, uint32_t rank)
{
    struct client other = *client;

    other.rank = rank;
    return client_holds_but(&other, component, tag, block_idx, pool_block, 0, 0, true);
}

static bool is_filled(const uint64_t *at, uint32_t words, uint8_t byte)
{
    for (uint32_t i = 0; i < words; i++) {
        if (at[i] != byte * 0x0101010101010101u)
            return false;
    }
    return true;
}

bool client_holds_but(const struct client *client, uint32_t component, uint64_t tag,
                      uint64_t block_idx, uint32_t pool_block, uint32_t left_alone, uint8_t byte,
                      bool is_done)
{
    uint32_t bytes = PIECE_BYTES(client->world, component), words = bytes / 8, at = 0;
    uint64_t wanted[PIECE_WORDS_MAX];

    CHECK(words <= PIECE_WORDS_MAX);
    for (uint32_t p = 0; p < WORLD_PIECES; p++) {
        for (uint32_t b = 0; b < WORLD_ENGINE_BLOCKS; b++, at += words) {
            const uint64_t *from =
                piece_at(client, component, p, pool_block * WORLD_ENGINE_BLOCKS + b);

            if ((left_alone >> b & 1) != 0 && !is_filled(from, words, byte))
                return false;
            if ((left_alone >> b & 1) != 0 || !is_done)
                continue;
            for (uint32_t i = 0; i < words; i++)
                wanted[i] = word_of(component, tag, block_idx, client->rank, at + i);
            if (component == 0 && client->world->config.quant.kind != 0)
                convert(client->world, wanted, bytes);
            if (memcmp(from, wanted, bytes) != 0)
                return false;
        }
    }
    return true;
}

void world_leave_alone(struct kvt_api_moves *moves, uint32_t move, uint32_t left_alone)
{
    uint64_t *ids = (uint64_t *)(uintptr_t)moves->engine_blocks + move * WORLD_ENGINE_BLOCKS;

    for (uint32_t b = 0; b < WORLD_ENGINE_BLOCKS; b++) {
        if ((left_alone >> b & 1) != 0)
            ids[b] = KVT_ENGINE_BLOCK_NONE;
    }
}

void client_scribble(struct client *client, uint32_t component, uint32_t pool_block, uint8_t byte)
{
    for (uint32_t p = 0; p < WORLD_PIECES; p++)
        memset(piece_at(client, component, p, pool_block * WORLD_ENGINE_BLOCKS), byte,
               (size_t)PIECE_BYTES(client->world, component) * WORLD_ENGINE_BLOCKS);
}

/* ---- verbs ------------------------------------------------------------------------------------
 */

struct kvt_api_prefix world_prefix(struct call *call, uint64_t tag, uint64_t blocks)
{
    uint32_t *tokens =
        kvt_arena_array(&call->arena, blocks * WORLD_BLOCK_TOKENS + 1, sizeof(tokens[0]));

    CHECK(tokens != NULL);
    for (uint64_t i = 0; i < blocks * WORLD_BLOCK_TOKENS; i++)
        tokens[i] = (uint32_t)(world_block_tag(tag, i / WORLD_BLOCK_TOKENS) * 1000 + i);
    return (struct kvt_api_prefix){.tokens = tokens, .tokens_count = blocks * WORLD_BLOCK_TOKENS};
}

struct kvt_api_moves world_moves(struct call *call, uint32_t component, uint64_t first,
                                 uint32_t count, uint32_t pool_block)
{
    uint64_t *block_idx = kvt_arena_array(&call->arena, count + 1u, sizeof(block_idx[0]));
    uint64_t *ids = kvt_arena_array(&call->arena, count * WORLD_ENGINE_BLOCKS + 1u, sizeof(ids[0]));

    CHECK(block_idx != NULL && ids != NULL);
    for (uint32_t i = 0; i < count; i++) {
        block_idx[i] = first + i;
        for (uint32_t b = 0; b < WORLD_ENGINE_BLOCKS; b++)
            ids[i * WORLD_ENGINE_BLOCKS + b] = (pool_block + i) * WORLD_ENGINE_BLOCKS + b;
    }
    return (struct kvt_api_moves){.component = component,
                                  .count = count,
                                  .block_idx = block_idx,
                                  .engine_blocks_count = count * WORLD_ENGINE_BLOCKS,
                                  .engine_blocks = ids};
}

struct kvt_handle world_lookup(struct call *call, const struct client *client, uint64_t tag,
                               uint64_t blocks, bool wants_lease)
{
    call_begin(call, KVT_OP_LOOKUP);
    call->op.req.lookup.session = client->session;
    call->op.req.lookup.prefix = world_prefix(call, tag, blocks);
    call->op.req.lookup.limit_tokens = UINT64_MAX;
    call->op.req.lookup.wants_lease = wants_lease;
    call->op.req.lookup.wants_why = true;
    call_run(call);
    CHECK_CODE(&call->op, KVT_CODE_OK);
    return call->op.ans.lookup.lease;
}

struct kvt_handle world_reserve(struct call *call, const struct client *client, uint64_t tag,
                                uint64_t blocks)
{
    struct kvt_req_reserve *req = &call->op.req.reserve;

    call_begin(call, KVT_OP_RESERVE);
    req->session = client->session;
    req->prefix = world_prefix(call, tag, blocks);
    req->wants_count = client->world->components_count;
    for (uint32_t i = 0; i < req->wants_count; i++)
        req->wants[i] = (struct kvt_api_range){i, 0, blocks};
    call_run(call);
    CHECK_CODE(&call->op, KVT_CODE_OK);
    return call->op.ans.reserve.ticket;
}

void world_demote(struct call *call, const struct client *client, struct kvt_handle ticket,
                  uint64_t first, uint32_t count, uint32_t pool_block)
{
    struct kvt_req_demote *req = &call->op.req.demote;

    call_begin(call, KVT_OP_DEMOTE);
    req->session = client->session;
    req->ticket = ticket;
    req->moves_count = client->world->components_count;
    for (uint32_t i = 0; i < req->moves_count; i++)
        req->moves[i] = world_moves(call, i, first, count, pool_block);
}

void world_promote(struct call *call, const struct client *client, struct kvt_handle lease,
                   uint64_t first, uint32_t count, uint32_t pool_block)
{
    struct kvt_req_promote *req = &call->op.req.promote;

    call_begin(call, KVT_OP_PROMOTE);
    req->session = client->session;
    req->lease = lease;
    req->moves_count = client->world->components_count;
    for (uint32_t i = 0; i < req->moves_count; i++)
        req->moves[i] = world_moves(call, i, first, count, pool_block);
}
