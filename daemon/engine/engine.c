/* The owner loop: inbox, turn, answers, start and stop. See engine.h for the contract and
 * internal.h for who owns what.
 *
 * Between threads there are four things: the inbox (a bounded ring), a stack of DETACH ops (which
 * can never be refused, so they link themselves), a flag that says that some running op was
 * cancelled, and the wish to stop. Everything else belongs to the engine's thread.
 *
 * Index memory is shared out once: the store gets room for as many cells as the tiers could hold in
 * slots of 4 KiB, at most 40 % of it; the tree gets the rest. The engine's own pools are fixed and
 * small (they are in the 64 MiB that the daemon takes beside its configured memory), and are
 * touched only as far as they are used. */
#include <string.h>

#include "daemon/base/alloc.h"
#include "daemon/engine/internal.h"

#define ANSWER_MARGIN_NS (2 * KVT_NS_PER_MS) /* so that an answer arrives before its deadline */
#define STORE_CELL_BYTES 160u                /* what a cell with its shards takes, about */
#define STORE_SHARE_PCT 40u
#define STORE_BASE_BYTES (1u << 20)

void eng_count(struct kvt_engine *engine, enum kvt_counter counter, uint64_t by)
{
    engine->counters[counter] += by;
}

void eng_notify(struct kvt_engine *engine, struct eng_session *session,
                const struct kvt_notice *notice)
{
    if (engine->config.notify != NULL && session->sink != NULL && session->is_alive)
        engine->config.notify(session->sink, notice);
}

static enum kvt_counter counter_of(enum kvt_code code)
{
    switch (code) {
    case KVT_CODE_OK:
        return KVT_COUNTER_OPS_OK;
    case KVT_CODE_CANCELLED:
        return KVT_COUNTER_OPS_CANCELLED;
    case KVT_CODE_INVALID_ARGUMENT:
        return KVT_COUNTER_OPS_INVALID;
    case KVT_CODE_DEADLINE_EXCEEDED:
        return KVT_COUNTER_OPS_DEADLINE;
    case KVT_CODE_NOT_FOUND:
        return KVT_COUNTER_OPS_NOT_FOUND;
    case KVT_CODE_PERMISSION_DENIED:
        return KVT_COUNTER_OPS_DENIED;
    case KVT_CODE_RESOURCE_EXHAUSTED:
        return KVT_COUNTER_OPS_EXHAUSTED;
    case KVT_CODE_FAILED_PRECONDITION:
        return KVT_COUNTER_OPS_PRECONDITION;
    case KVT_CODE_ABORTED:
        return KVT_COUNTER_OPS_ABORTED;
    case KVT_CODE_UNAVAILABLE:
        return KVT_COUNTER_OPS_UNAVAILABLE;
    case KVT_CODE_UNIMPLEMENTED:
    case KVT_CODE_INTERNAL:
        break;
    }
    return KVT_COUNTER_OPS_OTHER;
}

uint64_t eng_answer_ns(const struct kvt_engine *engine, uint64_t deadline_ns)
{
    if (deadline_ns <= engine->now_ns)
        return deadline_ns;
    return deadline_ns - KVT_MIN((deadline_ns - engine->now_ns) / 8, ANSWER_MARGIN_NS);
}

void eng_answer(struct kvt_engine *engine, struct kvt_op *op)
{
    eng_count(engine, counter_of(op->code), 1);
    op->done(op);
}

/* ---- any thread -------------------------------------------------------------------------------
 */

static void ring_bell(struct kvt_engine *engine)
{
    if (engine->config.doorbell != NULL)
        kvt_doorbell_ring(engine->config.doorbell);
}

static int service_submit(void *ctx, struct kvt_op *op)
{
    struct kvt_engine *engine = ctx;

    op->service = NULL;
    if (op->kind == KVT_OP_DETACH) {
        struct kvt_op *top = atomic_load(&engine->detach_stack);

        do {
            op->service = top;
        } while (!atomic_compare_exchange_weak(&engine->detach_stack, &top, op));
    } else if (kvt_ring_put(&engine->inbox, op) != 0) {
        return KVT_SERVICE_E_FULL;
    }
    ring_bell(engine);
    return 0;
}

static void service_cancel(void *ctx, struct kvt_op *op)
{
    struct kvt_engine *engine = ctx;

    (void)op; /* its is_cancelled is set: the next turn looks for it */
    atomic_store(&engine->has_cancelled, true);
    ring_bell(engine);
}

void kvt_engine_service(struct kvt_engine *engine, struct kvt_service *ret_service)
{
    *ret_service = (struct kvt_service){.ctx = engine,
                                        .submit = service_submit,
                                        .cancel = service_cancel,
                                        .region_open = eng_region_open,
                                        .region_close = eng_region_close};
}

/* ---- new and free -----------------------------------------------------------------------------
 */

static uint64_t or_default(uint64_t value, uint64_t if_zero)
{
    return value != 0 ? value : if_zero;
}

static uint64_t capacity(const struct kvt_engine_config *config, enum kvt_tier_id tier)
{
    return config->store.tiers[tier] != NULL ? config->store.tiers[tier]->capacity_bytes : 0;
}

static void fill_defaults(struct kvt_engine_config *config)
{
    uint64_t upper = capacity(config, KVT_TIER_DEVICE) + capacity(config, KVT_TIER_HOST);

    config->inbox_max = (uint32_t)or_default(config->inbox_max, 4096);
    config->ops_max = (uint32_t)or_default(config->ops_max, 1024);
    config->lease_ns_max = or_default(config->lease_ns_max, 600 * KVT_NS_PER_S);
    config->lease_ns_default =
        KVT_MIN(or_default(config->lease_ns_default, 30 * KVT_NS_PER_S), config->lease_ns_max);
    config->ticket_ns_max = or_default(config->ticket_ns_max, 600 * KVT_NS_PER_S);
    config->ticket_ns_default =
        KVT_MIN(or_default(config->ticket_ns_default, 30 * KVT_NS_PER_S), config->ticket_ns_max);
    config->leases_per_session_max = (uint32_t)or_default(config->leases_per_session_max, 1024);
    config->tickets_per_session_max = (uint32_t)or_default(config->tickets_per_session_max, 1024);
    config->leased_bytes_per_engine_max =
        or_default(config->leased_bytes_per_engine_max, upper / 2);
    config->reserved_bytes_per_engine_max =
        or_default(config->reserved_bytes_per_engine_max, upper / 4);
    config->held_bytes_per_engine_max =
        or_default(config->held_bytes_per_engine_max, capacity(config, KVT_TIER_DEVICE) / 2);
    config->namespaces_max =
        KVT_MIN((uint32_t)or_default(config->namespaces_max, 64), KVT_NAMESPACES_MAX);
    config->roots_max = (uint32_t)or_default(config->roots_max, 65536);
    config->load_wait_ns = or_default(config->load_wait_ns, 10 * KVT_NS_PER_S);
    if (config->version == NULL)
        config->version = "";
}

static bool is_l3_kept(const struct kvt_engine_config *config)
{
    for (uint32_t i = 0; i < KVT_ZONES_MAX; i++)
        if (config->store.indexes[i] != NULL)
            return true;
    return false;
}

static void on_block_gone(void *ctx, const struct kvt_radix_gone *gone)
{
    struct kvt_engine *engine = ctx;

    kvt_store_block_gone(engine->store, gone);
}

static int make_below(struct kvt_engine *engine)
{
    struct kvt_engine_config *config = &engine->config;
    uint64_t cells = 0, share;
    struct kvt_radix_config radix;
    int r;

    for (uint32_t tier = 0; tier < KVT_TIERS_COUNT; tier++)
        cells += capacity(config, (enum kvt_tier_id)tier) / KVT_DIO_ALIGN_BYTES;
    share = KVT_MIN(cells * STORE_CELL_BYTES + STORE_BASE_BYTES,
                    (uint64_t)config->index_memory_bytes / 100 * STORE_SHARE_PCT);
    radix = (struct kvt_radix_config){.memory_bytes = config->index_memory_bytes - share,
                                      .seed = config->seed,
                                      .namespaces_max = config->namespaces_max,
                                      .roots_max = config->roots_max,
                                      .mask_evictable = KVT_TIER_BITS_ALL,
                                      .is_populated = true,
                                      .has_tags = is_l3_kept(config),
                                      .gone = on_block_gone,
                                      .gone_ctx = engine};
    r = kvt_radix_new(&engine->radix, &radix);
    if (r < 0)
        return r;
    config->store.radix = engine->radix;
    config->store.memory_bytes = share;
    return kvt_store_new(&engine->store, &config->store);
}

static int make_pools(struct kvt_engine *engine)
{
    engine->runs_max = engine->config.ops_max * 2;
    engine->leases = kvt_alloc_zeroed(KVT_ENGINE_LEASES_MAX, sizeof(engine->leases[0]));
    engine->tickets = kvt_alloc_zeroed(KVT_ENGINE_TICKETS_MAX, sizeof(engine->tickets[0]));
    engine->entries = kvt_alloc_zeroed(KVT_ENGINE_ENTRIES_MAX, sizeof(engine->entries[0]));
    engine->entry_buckets =
        kvt_alloc_zeroed(KVT_ENGINE_ENTRIES_MAX, sizeof(engine->entry_buckets[0]));
    if (engine->config.gpu_memory.export_arena != NULL) {
        engine->holds = kvt_alloc_zeroed(KVT_ENGINE_HOLDS_MAX, sizeof(engine->holds[0]));
        engine->hold_buckets =
            kvt_alloc_zeroed(KVT_ENGINE_HOLDS_MAX, sizeof(engine->hold_buckets[0]));
        if (engine->holds == NULL || engine->hold_buckets == NULL)
            return kvt_trace(-ENOMEM);
    }
    engine->runs_pool = kvt_alloc_zeroed(engine->runs_max, sizeof(engine->runs_pool[0]));
    engine->jobs_pool = kvt_alloc_zeroed(KVT_ENGINE_JOBS_MAX, sizeof(engine->jobs_pool[0]));
    engine->wide_pool = kvt_alloc_zeroed(KVT_ENGINE_WIDE_MAX, sizeof(engine->wide_pool[0]));
    if (engine->leases == NULL || engine->tickets == NULL || engine->entries == NULL ||
        engine->entry_buckets == NULL || engine->runs_pool == NULL || engine->jobs_pool == NULL ||
        engine->wide_pool == NULL)
        return kvt_trace(-ENOMEM);
    return 0;
}

static int make(struct kvt_engine *engine)
{
    int r = eng_heap_init(&engine->heap, KVT_ENGINE_LEASES_MAX + KVT_ENGINE_TICKETS_MAX +
                                             engine->config.ops_max * 2);

    if (r == 0)
        r = make_pools(engine);
    if (r == 0)
        r = kvt_ring_init(&engine->inbox, engine->config.inbox_max);
    if (r == 0)
        r = make_below(engine);
    if (r == 0)
        r = eng_catalog_restore(engine);
    return r;
}

int kvt_engine_new(struct kvt_engine **ret_engine, const struct kvt_engine_config *config)
{
    struct kvt_engine *engine;
    int r;

    if (config->store.tiers[KVT_TIER_HOST] == NULL || config->boot_id == 0)
        return kvt_trace(-EINVAL);
    engine = kvt_alloc_aligned(KVT_CACHE_LINE_BYTES, sizeof(*engine));
    if (engine == NULL)
        return kvt_trace(-ENOMEM);
    engine->magic = KVT_ENGINE_MAGIC;
    engine->config = *config;
    fill_defaults(&engine->config);
    engine->secret_key[0] = config->seed;
    engine->secret_key[1] = config->boot_id;
    kvt_list_init(&engine->groups);
    kvt_list_init(&engine->leases_free);
    kvt_list_init(&engine->leases_dying);
    kvt_list_init(&engine->holders);
    kvt_list_init(&engine->tickets_free);
    kvt_list_init(&engine->tickets_dying);
    kvt_list_init(&engine->runs_free);
    kvt_list_init(&engine->runs);
    kvt_list_init(&engine->pump);
    kvt_list_init(&engine->jobs_free);
    kvt_list_init(&engine->background);
    kvt_list_init(&engine->wide_free);
    r = make(engine);
    if (r < 0) {
        kvt_engine_free(engine);
        return r;
    }
    *ret_engine = engine;
    return 0;
}

struct kvt_engine *kvt_engine_free(struct kvt_engine *engine)
{
    if (engine == NULL)
        return NULL;
    KVT_ASSERT(engine->magic == KVT_ENGINE_MAGIC && engine->jobs_count == 0);
    KVT_ASSERT(engine->janitor == NULL);
    for (uint32_t i = 0; i < KVT_SESSIONS_MAX; i++) {
        if (engine->sessions[i].session != NULL)
            eng_session_end(engine, engine->sessions[i].session);
    }
    while (!kvt_list_is_empty(&engine->leases_dying) && eng_leases_slice(engine)) {
    }
    while (!kvt_list_is_empty(&engine->tickets_dying) && eng_tickets_slice(engine)) {
    }
    (void)eng_leases_slice(engine);
    (void)eng_tickets_slice(engine);
    for (uint32_t i = 0; i < engine->ns_count; i++)
        eng_ns_deinit(&engine->ns[i]);
    engine->store = kvt_store_free(engine->store);
    engine->radix = kvt_radix_free(engine->radix);
    kvt_ring_deinit(&engine->inbox);
    eng_heap_deinit(&engine->heap);
    kvt_free(engine->leases);
    kvt_free(engine->holds);
    kvt_free(engine->hold_buckets);
    kvt_free(engine->tickets);
    kvt_free(engine->entries);
    kvt_free(engine->entry_buckets);
    kvt_free(engine->runs_pool);
    kvt_free(engine->jobs_pool);
    kvt_free(engine->wide_pool);
    engine->magic = 0;
    kvt_free(engine);
    return NULL;
}
