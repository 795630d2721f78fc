#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/base/alloc.h"
#include "daemon/base/clock.h"
#include "tests/bench/bench_stripe.h"

#define SLOT_BYTES 4096u /* the least one: nothing is in it */
#define BLOCK_BYTES 1024u
#define INFLIGHT_MAX 512u /* a device, as the daemon has it */
#define HOST_INFLIGHT_MAX 1024u
#define TURN_BLOCKS 4096u
#define IDS_MAX (16u << 20) /* numbers of blocks and contents that a run uses */
#define ID_MASK ((1ull << 48) - 1)

/* ---- a tier in virtual time ----------------------------------------------------------------- */

struct queue {
    struct kvt_xfer *head, **tail;
    uint64_t free_ns; /* when the device can begin something else */
};

struct tier {
    struct kvt_tier base; /* first */
    struct kvt_tier_counters counters[KVT_ZONES_MAX];
    struct queue queues[KVT_ZONES_MAX];
    uint8_t *zone_of; /* by block id: where it was written last; NULL: not L3 */
    uint64_t now_ns, block_ns, latency_ns;
    uint64_t writes[KVT_ZONES_MAX];
    uint32_t queues_count, inflight;
};

static uint32_t queue_of(struct tier *tier, struct kvt_xfer *xfer)
{
    const struct kvt_place *at = xfer->src.kind == KVT_PLACE_DISK ? &xfer->src : &xfer->dst;
    uint32_t zone = 0;

    if (at->kind != KVT_PLACE_DISK)
        return 0;
    while (zone + 1 < tier->base.zones_count &&
           tier->base.zones[zone + 1].base_bytes <= at->offset_bytes)
        zone++;
    if (at == &xfer->dst && (xfer->flags & KVT_XFER_FLUSH) == 0) {
        KVT_ASSERT(xfer->key.block_id < IDS_MAX);
        tier->zone_of[xfer->key.block_id] = (uint8_t)zone;
        tier->writes[zone]++;
    }
    return zone;
}

static int tier_submit(struct kvt_tier *base, struct kvt_xfer *const xfers[], uint32_t count,
                       uint32_t *ret_taken)
{
    struct tier *tier = KVT_CONTAINER_OF(base, struct tier, base);
    uint32_t taken = KVT_MIN(count, base->inflight_max - tier->inflight);

    if (taken == 0)
        return KVT_TIER_E_FULL;
    for (uint32_t i = 0; i < taken; i++) {
        struct queue *queue = &tier->queues[queue_of(tier, xfers[i])];

        /* Foreground goes first: what is written for room meanwhile takes nothing from it. */
        queue->free_ns = KVT_MAX(queue->free_ns, tier->now_ns) +
                         ((xfers[i]->flags & KVT_XFER_BACKGROUND) != 0 ? 0 : tier->block_ns);
        xfers[i]->status = KVT_XFER_DONE;
        xfers[i]->started_ns = tier->now_ns;
        xfers[i]->done_ns = queue->free_ns + tier->latency_ns;
        xfers[i]->next = NULL;
        *queue->tail = xfers[i];
        queue->tail = &xfers[i]->next;
    }
    tier->inflight += taken;
    *ret_taken = taken;
    return 0;
}

static struct queue *queue_next(struct tier *tier)
{
    struct queue *best = NULL;

    for (uint32_t i = 0; i < tier->queues_count; i++) {
        struct queue *queue = &tier->queues[i];

        if (queue->head != NULL && (best == NULL || queue->head->done_ns < best->head->done_ns))
            best = queue;
    }
    return best;
}

static uint32_t tier_reap(struct kvt_tier *base, struct kvt_xfer *ret_xfers[], uint32_t max)
{
    struct tier *tier = KVT_CONTAINER_OF(base, struct tier, base);
    struct queue *queue;
    uint32_t count = 0;

    while (count < max && (queue = queue_next(tier)) != NULL &&
           queue->head->done_ns <= tier->now_ns) {
        ret_xfers[count++] = queue->head;
        queue->head = queue->head->next;
        if (queue->head == NULL)
            queue->tail = &queue->head;
    }
    tier->inflight -= count;
    return count;
}

static void tier_close(struct kvt_tier *base)
{
    struct tier *tier = KVT_CONTAINER_OF(base, struct tier, base);

    KVT_ASSERT(tier->inflight == 0);
    kvt_free(tier->zone_of);
    kvt_free(tier);
}

static const struct kvt_tier_ops tier_ops = {
    .name = "timed", .submit = tier_submit, .reap = tier_reap, .close = tier_close};

static struct tier *tier_new(uint64_t capacity_bytes, uint32_t zones)
{
    struct tier *tier = kvt_alloc_zeroed(1, sizeof(*tier));
    uint64_t zone_bytes =
        zones > 0 ? kvt_round_down(capacity_bytes / zones, KVT_HUGE_PAGE_BYTES) : 0;

    KVT_ASSERT(tier != NULL);
    tier->base.ops = &tier_ops;
    tier->base.capacity_bytes = zones > 0 ? zone_bytes * zones : capacity_bytes;
    tier->base.inflight_max = zones > 0 ? zones * INFLIGHT_MAX : HOST_INFLIGHT_MAX;
    tier->base.zones_count = zones;
    tier->queues_count = KVT_MAX(zones, 1u);
    for (uint32_t i = 0; i < KVT_ZONES_MAX; i++)
        tier->queues[i].tail = &tier->queues[i].head;
    for (uint32_t i = 0; i < zones; i++)
        tier->base.zones[i] = (struct kvt_tier_zone){
            .base_bytes = i * zone_bytes, .bytes = zone_bytes, .counters = &tier->counters[i]};
    if (zones > 0) {
        tier->zone_of = kvt_alloc_zeroed(IDS_MAX, 1);
        KVT_ASSERT(tier->zone_of != NULL);
    }
    return tier;
}

/* ---- an index that counts ------------------------------------------------------------------- */

struct counting {
    struct kvt_index base; /* first */
    uint64_t seq, told, rows;
    bool is_loaded;
};

static int counting_put(struct kvt_index *base, const struct kvt_index_put *put, uint64_t *ret_seq)
{
    struct counting *index = KVT_CONTAINER_OF(base, struct counting, base);

    index->rows += put->kind == KVT_INDEX_PUT_ROW;
    index->rows -= put->kind == KVT_INDEX_PUT_DROP_ROW;
    index->seq++;
    if (ret_seq != NULL)
        *ret_seq = index->seq;
    return 0;
}

static bool counting_next(struct kvt_index *base, struct kvt_index_event *ret_event)
{
    struct counting *index = KVT_CONTAINER_OF(base, struct counting, base);

    if (index->is_loaded && index->told == index->seq)
        return false;
    memset(ret_event, 0, sizeof(*ret_event));
    ret_event->kind = index->is_loaded ? KVT_INDEX_EVENT_COMMITTED : KVT_INDEX_EVENT_LOADED;
    ret_event->seq = index->told = index->seq;
    index->is_loaded = true;
    return true;
}

static uint64_t counting_room(const struct kvt_index *base)
{
    (void)base;
    return KVT_GIB;
}

static void counting_close(struct kvt_index *base)
{
    (void)base;
}

static const struct kvt_index_ops counting_ops = {.put = counting_put,
                                                  .next = counting_next,
                                                  .room_bytes = counting_room,
                                                  .close = counting_close};

/* ---- the world ------------------------------------------------------------------------------ */

struct stripe_world {
    struct stripe_config config;
    struct kvt_radix *radix;
    struct kvt_radix_ns ns;
    struct kvt_store *store;
    struct tier *host, *disk;
    struct counting indexes[KVT_ZONES_MAX];
    uint8_t *host_memory;
    uint64_t now_ns, done_ns, jobs_left, failed; /* done_ns: when the last job ended */
    struct {
        uint32_t tokens[STRIPE_PATH_BLOCKS_MAX * STRIPE_BLOCK_TOKENS];
        struct kvt_radix_cell cells[STRIPE_PATH_BLOCKS_MAX];
        struct kvt_job jobs[STRIPE_PATH_BLOCKS_MAX];
        uint32_t jobs_count;
    } group[STRIPE_GROUP];
};

static void on_gone(void *ctx, const struct kvt_radix_gone *gone)
{
    const struct stripe_world *world = ctx;

    kvt_store_block_gone(world->store, gone);
}

static void on_done(struct kvt_job *job)
{
    struct stripe_world *world = job->owner;

    world->jobs_left--;
    world->done_ns = world->now_ns;
    world->failed += job->result != KVT_MOVE_DONE && job->result != KVT_MOVE_PRESENT;
}

static uint64_t real_ns(void)
{
    return 1;
}

static void open_namespace(struct stripe_world *world)
{
    struct kvt_radix_spec spec = {.block_tokens = STRIPE_BLOCK_TOKENS, .components_count = 1};
    struct kvt_store_ns_config config = {.epoch = 1,
                                         .block_tokens = STRIPE_BLOCK_TOKENS,
                                         .ranks = 1,
                                         .components_count = 1,
                                         .components = {{.bytes_per_block = BLOCK_BYTES}}};

    spec.components[0].kind = KVT_COMPONENT_FULL;
    KVT_ASSERT(kvt_radix_ns_open(world->radix, &spec, &world->ns) == 0);
    KVT_ASSERT(kvt_store_ns_open(world->store, world->ns, &config) == 0);
}

struct stripe_world *stripe_new(const struct stripe_config *config)
{
    struct stripe_world *world = kvt_alloc_zeroed(1, sizeof(*world));
    uint64_t blocks = config->l2_blocks + config->l3_blocks;
    struct kvt_radix_config radix = {.memory_bytes =
                                         64 * KVT_MIB + blocks * (STRIPE_BLOCK_TOKENS * 4 + 256),
                                     .seed = 1,
                                     .namespaces_max = 1,
                                     .roots_max = 16,
                                     .mask_evictable = 0x07,
                                     .has_tags = true,
                                     .gone = on_gone,
                                     .gone_ctx = world};
    struct kvt_store_config store = {.memory_bytes = 64 * KVT_MIB + blocks * 256,
                                     .waiting_jobs_max = STRIPE_GROUP * STRIPE_PATH_BLOCKS_MAX,
                                     .write_policy = config->policy,
                                     .transfer_deadline_ns = KVT_TIME_NEVER_NS / 4,
                                     .real_ns = real_ns,
                                     .store_id = {1},
                                     .stripe_blocks = config->run_blocks};

    KVT_ASSERT(world != NULL && config->devices <= KVT_ZONES_MAX);
    world->config = *config;
    world->now_ns = 1;
    world->host = tier_new(config->l2_blocks * SLOT_BYTES, 0);
    world->disk = tier_new(config->l3_blocks * SLOT_BYTES, config->devices);
    world->host_memory = kvt_alloc_aligned(4096, config->l2_blocks * SLOT_BYTES);
    KVT_ASSERT(world->host_memory != NULL);
    KVT_ASSERT(kvt_radix_new(&world->radix, &radix) == 0);
    store.radix = world->radix;
    store.host_memory = world->host_memory;
    store.tiers[KVT_TIER_HOST] = &world->host->base;
    store.tiers[KVT_TIER_DISK] = &world->disk->base;
    for (uint32_t i = 0; i < config->devices; i++) {
        world->indexes[i].base.ops = &counting_ops;
        store.indexes[i] = &world->indexes[i].base;
    }
    KVT_ASSERT(kvt_store_new(&world->store, &store) == 0);
    open_namespace(world);
    return world;
}

struct stripe_world *stripe_free(struct stripe_world *world)
{
    if (world == NULL)
        return NULL;
    world->store = kvt_store_free(world->store);
    world->radix = kvt_radix_free(world->radix);
    (void)kvt_tier_close(&world->host->base);
    (void)kvt_tier_close(&world->disk->base);
    kvt_free(world->host_memory);
    kvt_free(world);
    return NULL;
}

/* One turn, after which the clock stands where something happens next. */
static void turn(struct stripe_world *world)
{
    bool is_more = kvt_store_turn(world->store, world->now_ns, TURN_BLOCKS);
    uint64_t next_ns = kvt_store_next_ns(world->store);
    struct tier *tiers[2] = {world->host, world->disk};

    for (uint32_t i = 0; i < 2; i++) {
        const struct queue *queue = queue_next(tiers[i]);

        if (queue != NULL)
            next_ns = KVT_MIN(next_ns, queue->head->done_ns);
    }
    if (!is_more)
        world->now_ns = KVT_MAX(world->now_ns,
                                KVT_MIN(next_ns, kvt_time_add(world->now_ns, 1 * KVT_NS_PER_MS)));
    tiers[0]->now_ns = tiers[1]->now_ns = world->now_ns;
}

static void wait_for_jobs(struct stripe_world *world)
{
    while (world->jobs_left > 0)
        turn(world);
}

static void settle(struct stripe_world *world)
{
    do
        turn(world);
    while (kvt_store_inflight(world->store) > 0);
}

static void submit(struct stripe_world *world, struct kvt_job *job)
{
    job->deadline_ns = KVT_TIME_NEVER_NS / 2;
    job->done = on_done;
    job->owner = world;
    world->jobs_left++;
    kvt_store_submit(world->store, job, world->now_ns);
}

static struct kvt_radix_prefix prefix_of(struct stripe_world *world,
                                         const struct kvt_workload *workload, uint64_t request,
                                         uint32_t slot)
{
    uint64_t count = KVT_MIN((uint64_t)workload->requests[request].input_tokens,
                             (uint64_t)KVT_COUNT_OF(world->group[slot].tokens));

    kvt_workload_tokens(workload, request, 0, count, world->group[slot].tokens);
    return (struct kvt_radix_prefix){
        .ns = world->ns, .tokens = world->group[slot].tokens, .tokens_count = count};
}

/* What is missing of the prompt becomes jobs. */
static void store_begin(struct stripe_world *world, const struct kvt_workload *workload,
                        uint64_t request, uint32_t slot)
{
    static const uint8_t digest[KVT_FINGERPRINT_BYTES] = {1};
    struct kvt_radix_lookup lookup = {.prefix = prefix_of(world, workload, request, slot),
                                      .limit_tokens = UINT64_MAX,
                                      .mask_allowed = kvt_store_mask_allowed(0x06),
                                      .is_touch = true};
    struct kvt_radix_cell *cells = world->group[slot].cells;
    struct kvt_radix_match match;
    struct kvt_radix_block end;
    uint64_t fresh, blocks;
    int r;

    world->group[slot].jobs_count = 0;
    KVT_ASSERT(kvt_radix_lookup(world->radix, &lookup, &match) == 0);
    while ((r = kvt_radix_insert(world->radix, &lookup.prefix, &end, &fresh)) != 0) {
        KVT_ASSERT(r == KVT_RADIX_E_NO_ROOM);
        KVT_ASSERT(kvt_store_evict_index(world->store, 64) > 0);
    }
    blocks = kvt_radix_depth_blocks(world->radix, end);
    if (blocks > 0)
        KVT_ASSERT(kvt_radix_path(world->radix, end, 0, 0, blocks, cells) == 0);
    for (uint64_t i = 0; i < blocks; i++) {
        struct kvt_job *job = &world->group[slot].jobs[world->group[slot].jobs_count];
        struct kvt_cell cell;

        if (kvt_store_claim(world->store, cells[i].block, 0, digest, &cell) != KVT_CLAIM_MINE)
            continue;
        *job = (struct kvt_job){.kind = KVT_JOB_FILL, .cell = cell};
        world->group[slot].jobs_count++;
    }
    kvt_radix_settle(world->radix, end);
}

void stripe_replay(struct stripe_world *world, const struct kvt_workload *workload, uint64_t first,
                   uint64_t count)
{
    world->disk->block_ns = world->disk->latency_ns = 0;
    for (uint64_t at = first; at < first + count; at += STRIPE_GROUP) {
        uint32_t here = (uint32_t)KVT_MIN((uint64_t)STRIPE_GROUP, first + count - at), longest = 0;

        for (uint32_t i = 0; i < here; i++) {
            store_begin(world, workload, at + i, i);
            longest = KVT_MAX(longest, world->group[i].jobs_count);
        }
        for (uint32_t job = 0; job < longest; job++) {
            for (uint32_t i = 0; i < here; i++)
                if (job < world->group[i].jobs_count)
                    submit(world, &world->group[i].jobs[job]);
            turn(world);
        }
        wait_for_jobs(world);
        settle(world);
    }
}

void stripe_save(struct stripe_world *world)
{
    struct kvt_store_upkeep upkeep;

    kvt_store_save_start(world->store);
    do {
        turn(world);
        kvt_store_upkeep(world->store, &upkeep);
    } while (upkeep.save.is_running);
    settle(world);
}

static uint32_t path_on_disk(struct stripe_world *world, const struct kvt_workload *workload,
                             uint64_t request, struct kvt_radix_block *ret_end)
{
    struct kvt_radix_lookup lookup = {.prefix = prefix_of(world, workload, request, 0),
                                      .limit_tokens = UINT64_MAX,
                                      .mask_allowed = 1u << KVT_TIER_DISK};
    struct kvt_radix_match match;

    KVT_ASSERT(kvt_radix_lookup(world->radix, &lookup, &match) == 0);
    *ret_end = match.end;
    return (uint32_t)(match.boundary_tokens / STRIPE_BLOCK_TOKENS);
}

uint32_t stripe_path(struct stripe_world *world, const struct kvt_workload *workload,
                     uint64_t request, uint8_t ret_devices[STRIPE_PATH_BLOCKS_MAX])
{
    static uint64_t tags[STRIPE_PATH_BLOCKS_MAX];
    struct kvt_radix_block end;
    uint32_t blocks = path_on_disk(world, workload, request, &end);

    if (blocks > 0)
        KVT_ASSERT(kvt_radix_tags(world->radix, end, 0, blocks, tags) == 0);
    for (uint32_t i = 0; i < blocks; i++) {
        uint64_t id = tags[i] & ID_MASK;

        KVT_ASSERT(id > 0 && id < IDS_MAX);
        ret_devices[i] = world->disk->zone_of[id];
    }
    return blocks;
}

static void run_jobs(struct stripe_world *world, uint32_t blocks, struct kvt_job what)
{
    for (uint32_t i = 0; i < blocks; i++) {
        struct kvt_job *job = &world->group[0].jobs[i];

        *job = what;
        job->cell = kvt_store_cell(world->store, world->group[0].cells[i].block, 0);
        submit(world, job);
    }
    wait_for_jobs(world);
}

uint64_t stripe_raise_ns(struct stripe_world *world, const struct kvt_workload *workload,
                         uint64_t request)
{
    struct kvt_radix_block end;
    uint32_t blocks = path_on_disk(world, workload, request, &end);
    uint64_t started_ns, took_ns;

    KVT_ASSERT(blocks > 0);
    KVT_ASSERT(kvt_radix_path(world->radix, end, 0, 0, blocks, world->group[0].cells) == 0);
    KVT_ASSERT(kvt_radix_lease(world->radix, end) == 0);
    run_jobs(world, blocks,
             (struct kvt_job){.kind = KVT_JOB_LOWER, .tier = KVT_TIER_DISK, .is_move = true});
    settle(world);
    world->disk->block_ns = world->config.block_ns;
    world->disk->latency_ns = world->config.latency_ns;
    started_ns = world->now_ns;
    run_jobs(world, blocks, (struct kvt_job){.kind = KVT_JOB_RAISE, .tier = KVT_TIER_HOST});
    took_ns = world->done_ns - started_ns;
    world->disk->block_ns = world->disk->latency_ns = 0;
    settle(world);
    KVT_ASSERT(kvt_radix_release(world->radix, end) == 0);
    return took_ns;
}

void stripe_totals(const struct stripe_world *world, struct stripe_totals *ret_totals)
{
    struct kvt_store_stats stats;
    struct stripe_totals totals = {.failed = world->failed};

    kvt_store_stats(world->store, &stats);
    for (uint32_t i = 0; i < world->config.devices; i++) {
        uint64_t blocks = stats.zones[i].slab.taken_bytes / SLOT_BYTES;

        totals.blocks += blocks;
        totals.writes += world->disk->writes[i];
        totals.writes_max = KVT_MAX(totals.writes_max, world->disk->writes[i]);
        totals.rows += world->indexes[i].rows;
    }
    *ret_totals = totals;
}
