/* Stats of L3's devices and their indexes, gathered when asked. */
#include <string.h>

#include "daemon/engine/internal.h"

static uint64_t get(const _Atomic uint64_t *counter)
{
    return atomic_load_explicit(counter, memory_order_relaxed);
}

static struct kvt_text text_of(const char *text)
{
    return text == NULL ? (struct kvt_text){0} : (struct kvt_text){text, (uint32_t)strlen(text)};
}

static void index_stats(const struct kvt_index *index, bool is_kept, struct kvt_api_index_stats *to)
{
    const struct kvt_index_counters *from;

    *to = (struct kvt_api_index_stats){.state = KVT_DEVICE_INDEX_OFF};
    if (index == NULL)
        return;
    from = &index->counters;
    *to = (struct kvt_api_index_stats){
        .state = atomic_load_explicit(&from->state, memory_order_relaxed),
        .used_bytes = get(&from->used_bytes),
        .capacity_bytes = get(&from->capacity_bytes),
        .commits = get(&from->commits),
        .rows_put = get(&from->rows_put),
        .copies_put = get(&from->copies_put),
        .drops = get(&from->drops),
        .refused = get(&from->refused),
        .loaded_rows = get(&from->loaded_rows),
        .load_total_rows = get(&from->load_total_rows),
        .load_ns = get(&from->load_ns),
        .scanned_bytes = get(&from->scan_bytes),
        .scan_total_bytes = get(&from->scan_total_bytes),
    };
    if (!is_kept)
        to->state = KVT_DEVICE_INDEX_LOST;
}

bool eng_error_stats(struct kvt_op *op, const struct kvt_tier_counters *from,
                     struct kvt_api_counter **ret_errors, uint32_t *ret_count)
{
    static const char *const bad_names[] = {
        [KVT_SLOT_OK] = NULL,
        [KVT_SLOT_BAD_MAGIC] = "slot_no_header",
        [KVT_SLOT_BAD_VERSION] = "slot_other_version",
        [KVT_SLOT_BAD_HEADER] = "slot_bad_header",
        [KVT_SLOT_OTHER] = "slot_other_content",
        [KVT_SLOT_BAD_PAYLOAD] = "slot_bad_payload",
    };
    static_assert(KVT_COUNT_OF(bad_names) == KVT_COUNT_OF(from->errors_bad_slot), "one a verdict");
    uint32_t max = KVT_COUNT_OF(bad_names) + 5, count = 0;
    struct kvt_api_counter *errors = kvt_arena_array(op->arena, max, sizeof(errors[0]));

    if (errors == NULL)
        return false;
    errors[count++] = (struct kvt_api_counter){"io", "", get(&from->errors_io)};
    errors[count++] = (struct kvt_api_counter){"short", "", get(&from->errors_short)};
    errors[count++] = (struct kvt_api_counter){"no_space", "", get(&from->errors_no_space)};
    errors[count++] = (struct kvt_api_counter){"late", "", get(&from->errors_late)};
    errors[count++] = (struct kvt_api_counter){"client_gone", "", get(&from->errors_client_gone)};
    for (uint32_t i = 0; i < KVT_COUNT_OF(bad_names); i++)
        if (bad_names[i] != NULL)
            errors[count++] =
                (struct kvt_api_counter){bad_names[i], "", get(&from->errors_bad_slot[i])};
    *ret_errors = errors;
    *ret_count = count;
    return true;
}

static bool device_stats(const struct kvt_engine *engine, struct kvt_op *op,
                         const struct kvt_store_stats *store, uint32_t idx,
                         struct kvt_api_device_stats *to)
{
    const struct kvt_engine_device *device = &engine->config.devices[idx];
    const struct kvt_tier *disk = engine->config.store.tiers[KVT_TIER_DISK];
    const struct kvt_tier_counters *from =
        idx < disk->zones_count ? disk->zones[idx].counters : &disk->counters;

    *to = (struct kvt_api_device_stats){
        .path = text_of(device->path),
        .index_path = text_of(device->index_path),
        .health = store->zones[idx].is_lost ? KVT_DEVICE_LOST
                  : atomic_load_explicit(&from->health, memory_order_relaxed) == KVT_TIER_HEALTH_OK
                      ? KVT_DEVICE_OK
                      : KVT_DEVICE_OUT,
        .capacity_bytes = store->zones[idx].slab.capacity_bytes,
        .used_bytes = store->zones[idx].slab.taken_bytes,
        .slab_bytes = store->zones[idx].slab.slabs_bytes,
        .copies = store->zones[idx].slab.taken_slots,
        .read_bytes = get(&from->read_bytes),
        .written_bytes = get(&from->written_bytes),
        .outages = get(&from->outages),
        .out_ns = store->zones[idx].out_ns,
        .endurance_bytes = device->endurance_bytes,
    };
    to->life_written_bytes = device->state.written_bytes + to->written_bytes;
    index_stats(engine->config.store.indexes[idx], store->zones[idx].is_kept, &to->index);
    kvt_api_device_wear(to, engine->now_ns - engine->start_ns);
    return eng_error_stats(op, from, &to->errors, &to->errors_count);
}

bool eng_device_stats(const struct kvt_engine *engine, struct kvt_op *op,
                      const struct kvt_store_stats *store)
{
    struct kvt_ans_stats *ans = &op->ans.stats;

    if (engine->config.store.tiers[KVT_TIER_DISK] == NULL)
        return true;
    while (ans->devices_count < KVT_ZONES_MAX &&
           engine->config.devices[ans->devices_count].path != NULL)
        ans->devices_count++;
    ans->devices = kvt_arena_array(op->arena, ans->devices_count + 1u, sizeof(ans->devices[0]));
    if (ans->devices == NULL)
        return false;
    for (uint32_t i = 0; i < ans->devices_count; i++)
        if (!device_stats(engine, op, store, i, &ans->devices[i]))
            return false;
    return true;
}
