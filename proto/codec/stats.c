/* The two answers with lists in them: Stats and Dump, both directions. */
#include <string.h>

#include "proto/codec/wire.h"

#define STATS_ENGINES_MAX KVT_SESSIONS_MAX
#define STATS_COUNTERS_MAX 4096u
#define STATS_LABEL_BYTES_MAX 1024u

/* ---- stats: encode ----------------------------------------------------------------------------
 */

static bool put_tiers(struct kvt_op *op, Kvtier__V1__StatsAnswer *out)
{
    const struct kvt_ans_stats *ans = &op->ans.stats;
    Kvtier__V1__TierStats *views = kvt_arena_array(op->arena, ans->tiers_count, sizeof(*views));

    KVT_ASSERT(ans->tiers_count <= KVT_API_TIERS);
    out->tiers = kvt_arena_array(op->arena, ans->tiers_count, sizeof(*out->tiers));
    if (views == NULL || out->tiers == NULL)
        return false;
    for (uint32_t i = 0; i < ans->tiers_count; i++) {
        const struct kvt_api_tier_stats *tier = &ans->tiers[i];

        kvtier__v1__tier_stats__init(&views[i]);
        views[i].tier = tier->tier;
        views[i].health = tier->health;
        views[i].capacity_bytes = tier->capacity_bytes;
        views[i].used_bytes = tier->used_bytes;
        views[i].slab_bytes = tier->slab_bytes;
        views[i].copies = tier->copies;
        views[i].pinned_copies = tier->pinned_copies;
        views[i].filling_copies = tier->filling_copies;
        views[i].inflight = tier->inflight;
        views[i].hit_tokens = tier->hit_tokens;
        views[i].evictions = tier->evictions;
        views[i].read_bytes = tier->read_bytes;
        views[i].written_bytes = tier->written_bytes;
        views[i].errors = tier->errors;
        views[i].detail = kvt_codec_put_text(&tier->detail);
        out->tiers[i] = &views[i];
    }
    out->n_tiers = ans->tiers_count;
    return true;
}

static bool put_namespace(struct kvt_op *op, struct kvt_api_ns_stats *ns,
                          Kvtier__V1__NamespaceStats *view)
{
    KVT_ASSERT(ns->components_count <= KVT_COMPONENTS_MAX);
    kvtier__v1__namespace_stats__init(view);
    view->fingerprint = kvt_codec_put_bytes(ns->fingerprint, KVT_FINGERPRINT_BYTES);
    view->model = kvt_codec_put_text(&ns->model);
    view->revision = kvt_codec_put_text(&ns->revision);
    view->dtype = kvt_codec_put_text(&ns->dtype);
    view->epoch = ns->epoch;
    view->block_tokens = ns->block_tokens;
    view->ranks = ns->ranks;
    view->components = kvt_arena_array(op->arena, ns->components_count, sizeof(*view->components));
    if (view->components == NULL)
        return false;
    for (uint32_t i = 0; i < ns->components_count; i++) {
        view->components[i] = kvt_codec_put_component(op, &ns->components[i]);
        if (view->components[i] == NULL)
            return false;
    }
    view->n_components = ns->components_count;
    view->roots = ns->roots;
    view->nodes = ns->nodes;
    view->blocks = ns->blocks;
    view->n_copies_at = (size_t)ns->components_count * KVT_API_TIERS;
    view->copies_at = &ns->copies_at[0][0];
    view->lookup_tokens = ns->lookup_tokens;
    view->hit_tokens = ns->hit_tokens;
    view->n_stored_bytes_per_block = ns->components_count;
    view->stored_bytes_per_block = ns->stored_bytes;
    return true;
}

static bool put_namespaces(struct kvt_op *op, Kvtier__V1__StatsAnswer *out)
{
    const struct kvt_ans_stats *ans = &op->ans.stats;
    Kvtier__V1__NamespaceStats *views =
        kvt_arena_array(op->arena, ans->namespaces_count, sizeof(*views));

    out->namespaces = kvt_arena_array(op->arena, ans->namespaces_count, sizeof(*out->namespaces));
    if (views == NULL || out->namespaces == NULL)
        return false;
    for (uint32_t i = 0; i < ans->namespaces_count; i++) {
        if (!put_namespace(op, &ans->namespaces[i], &views[i]))
            return false;
        out->namespaces[i] = &views[i];
    }
    out->n_namespaces = ans->namespaces_count;
    return true;
}

static bool put_engines(struct kvt_op *op, Kvtier__V1__StatsAnswer *out)
{
    const struct kvt_ans_stats *ans = &op->ans.stats;
    Kvtier__V1__EngineStats *views = kvt_arena_array(op->arena, ans->engines_count, sizeof(*views));

    out->engines = kvt_arena_array(op->arena, ans->engines_count, sizeof(*out->engines));
    if (views == NULL || out->engines == NULL)
        return false;
    for (uint32_t i = 0; i < ans->engines_count; i++) {
        const struct kvt_api_engine_stats *engine = &ans->engines[i];

        kvtier__v1__engine_stats__init(&views[i]);
        views[i].engine_id = kvt_codec_put_bytes(engine->engine_id, KVT_ENGINE_ID_BYTES);
        views[i].name = kvt_codec_put_text(&engine->name);
        views[i].namespace_idx = engine->ns_idx;
        views[i].sessions = engine->sessions;
        views[i].leases = engine->leases;
        views[i].tickets = engine->tickets;
        views[i].leased_bytes = engine->leased_bytes;
        views[i].reserved_bytes = engine->reserved_bytes;
        views[i].lookup_tokens = engine->lookup_tokens;
        views[i].hit_tokens = engine->hit_tokens;
        views[i].promoted_bytes = engine->promoted_bytes;
        views[i].demoted_bytes = engine->demoted_bytes;
        views[i].lookups = engine->lookups;
        views[i].promotes = engine->promotes;
        views[i].demotes = engine->demotes;
        views[i].missed_moves = engine->missed_moves;
        views[i].ops_running = engine->ops_running;
        views[i].held_bytes = engine->held_bytes;
        out->engines[i] = &views[i];
    }
    out->n_engines = ans->engines_count;
    return true;
}

Kvtier__V1__Counter **kvt_codec_put_counters(struct kvt_op *op,
                                             const struct kvt_api_counter *counters, uint32_t count)
{
    Kvtier__V1__Counter *views = kvt_arena_array(op->arena, count, sizeof(*views));
    Kvtier__V1__Counter **list = kvt_arena_array(op->arena, count, sizeof(*list));

    if (views == NULL || list == NULL)
        return NULL;
    for (uint32_t i = 0; i < count; i++) {
        kvtier__v1__counter__init(&views[i]);
        views[i].name = kvt_codec_put_bytes(counters[i].name, strlen(counters[i].name));
        if (counters[i].label != NULL)
            views[i].label = kvt_codec_put_bytes(counters[i].label, strlen(counters[i].label));
        views[i].value = counters[i].value;
        list[i] = &views[i];
    }
    return list;
}

static Kvtier__V1__IndexStats *put_index(struct kvt_op *op, const struct kvt_api_index_stats *index)
{
    Kvtier__V1__IndexStats *view = kvt_arena_alloc(op->arena, sizeof(*view));

    if (view == NULL)
        return NULL;
    kvtier__v1__index_stats__init(view);
    view->state = index->state;
    view->used_bytes = index->used_bytes;
    view->capacity_bytes = index->capacity_bytes;
    view->commits = index->commits;
    view->rows_put = index->rows_put;
    view->copies_put = index->copies_put;
    view->drops = index->drops;
    view->refused = index->refused;
    view->loaded_rows = index->loaded_rows;
    view->load_total_rows = index->load_total_rows;
    view->load_ns = index->load_ns;
    view->scanned_bytes = index->scanned_bytes;
    view->scan_total_bytes = index->scan_total_bytes;
    return view;
}

static bool put_device(struct kvt_op *op, const struct kvt_api_device_stats *device,
                       Kvtier__V1__DeviceStats *view)
{
    kvtier__v1__device_stats__init(view);
    view->path = kvt_codec_put_text(&device->path);
    view->index_path = kvt_codec_put_text(&device->index_path);
    view->health = device->health;
    view->capacity_bytes = device->capacity_bytes;
    view->used_bytes = device->used_bytes;
    view->slab_bytes = device->slab_bytes;
    view->copies = device->copies;
    view->inflight = device->inflight;
    view->read_bytes = device->read_bytes;
    view->written_bytes = device->written_bytes;
    view->outages = device->outages;
    view->out_ns = device->out_ns;
    view->life_written_bytes = device->life_written_bytes;
    view->endurance_bytes = device->endurance_bytes;
    view->dwpd_milli = device->dwpd_milli;
    view->life_left_days = device->life_left_days;
    view->n_errors = device->errors_count;
    view->errors = kvt_codec_put_counters(op, device->errors, device->errors_count);
    view->index = put_index(op, &device->index);
    return view->errors != NULL && view->index != NULL;
}

static bool put_devices(struct kvt_op *op, Kvtier__V1__StatsAnswer *out)
{
    const struct kvt_ans_stats *ans = &op->ans.stats;
    Kvtier__V1__DeviceStats *views = kvt_arena_array(op->arena, ans->devices_count, sizeof(*views));

    KVT_ASSERT(ans->devices_count <= KVT_ZONES_MAX);
    out->devices = kvt_arena_array(op->arena, ans->devices_count, sizeof(*out->devices));
    if (views == NULL || out->devices == NULL)
        return false;
    for (uint32_t i = 0; i < ans->devices_count; i++) {
        if (!put_device(op, &ans->devices[i], &views[i]))
            return false;
        out->devices[i] = &views[i];
    }
    out->n_devices = ans->devices_count;
    return true;
}

ProtobufCMessage *kvt_codec_encode_stats(struct kvt_op *op)
{
    const struct kvt_ans_stats *ans = &op->ans.stats;
    Kvtier__V1__StatsAnswer *out = kvt_arena_alloc(op->arena, sizeof(*out));

    if (out == NULL)
        return NULL;
    kvtier__v1__stats_answer__init(out);
    out->boot_id = ans->boot_id;
    out->uptime_ns = ans->uptime_ns;
    out->version = kvt_codec_put_text(&ans->version);
    out->index_memory_bytes = ans->index_memory_bytes;
    out->index_used_bytes = ans->index_used_bytes;
    out->blocks = ans->blocks;
    out->nodes = ans->nodes;
    out->leases = ans->leases;
    out->tickets = ans->tickets;
    out->reserved_copies = ans->reserved_copies;
    out->pins = ans->pins;
    out->sessions = ans->sessions;
    out->ops_running = ans->ops_running;
    out->n_counters = ans->counters_count;
    out->counters = kvt_codec_put_counters(op, ans->counters, ans->counters_count);
    if (!put_tiers(op, out) || !put_namespaces(op, out) || !put_engines(op, out) ||
        !put_devices(op, out) || !kvt_codec_put_l1(op, out) || out->counters == NULL)
        return NULL;
    return &out->base;
}

/* ---- stats: decode ----------------------------------------------------------------------------
 */

static int take_tier(struct kvt_op *op, const Kvtier__V1__TierStats *in,
                     struct kvt_api_tier_stats *ret_tier)
{
    *ret_tier = (struct kvt_api_tier_stats){
        .tier = in->tier,
        .health = in->health,
        .capacity_bytes = in->capacity_bytes,
        .used_bytes = in->used_bytes,
        .slab_bytes = in->slab_bytes,
        .copies = in->copies,
        .pinned_copies = in->pinned_copies,
        .filling_copies = in->filling_copies,
        .inflight = in->inflight,
        .hit_tokens = in->hit_tokens,
        .evictions = in->evictions,
        .read_bytes = in->read_bytes,
        .written_bytes = in->written_bytes,
        .errors = in->errors,
    };
    return kvt_codec_take_text(op, &in->detail, "tiers.detail", KVT_MODEL_TEXT_BYTES_MAX,
                               &ret_tier->detail);
}

/* A daemon that quantises nothing does not say how many bytes it stores: as many as there are. */
static int take_stored_bytes(struct kvt_op *op, const Kvtier__V1__NamespaceStats *in,
                             struct kvt_api_ns_stats *ret_ns)
{
    if (in->n_stored_bytes_per_block > 0)
        KVT_CODEC_TRY(kvt_codec_take_count(op, in->n_stored_bytes_per_block,
                                           "namespaces.stored_bytes_per_block", in->n_components,
                                           in->n_components));
    for (size_t i = 0; i < in->n_components; i++)
        ret_ns->stored_bytes[i] = in->n_stored_bytes_per_block > 0
                                      ? in->stored_bytes_per_block[i]
                                      : ret_ns->components[i].bytes_per_block;
    return 0;
}

static int take_namespace(struct kvt_op *op, const Kvtier__V1__NamespaceStats *in,
                          struct kvt_api_ns_stats *ret_ns)
{
    KVT_CODEC_TRY(kvt_codec_take_fixed(op, &in->fingerprint, "namespaces.fingerprint",
                                       KVT_FINGERPRINT_BYTES, ret_ns->fingerprint));
    KVT_CODEC_TRY(kvt_codec_take_text(op, &in->model, "namespaces.model", KVT_MODEL_TEXT_BYTES_MAX,
                                      &ret_ns->model));
    KVT_CODEC_TRY(kvt_codec_take_text(op, &in->revision, "namespaces.revision",
                                      KVT_MODEL_TEXT_BYTES_MAX, &ret_ns->revision));
    KVT_CODEC_TRY(kvt_codec_take_text(op, &in->dtype, "namespaces.dtype", KVT_MODEL_TEXT_BYTES_MAX,
                                      &ret_ns->dtype));
    KVT_CODEC_TRY(
        kvt_codec_take_count(op, in->n_components, "namespaces.components", 0, KVT_COMPONENTS_MAX));
    for (size_t i = 0; i < in->n_components; i++)
        KVT_CODEC_TRY(kvt_codec_take_component(op, in->components[i], &ret_ns->components[i]));
    KVT_CODEC_TRY(kvt_codec_take_count(op, in->n_copies_at, "namespaces.copies_at",
                                       in->n_components * KVT_API_TIERS,
                                       in->n_components * KVT_API_TIERS));
    for (size_t i = 0; i < in->n_copies_at; i++)
        ret_ns->copies_at[i / KVT_API_TIERS][i % KVT_API_TIERS] = in->copies_at[i];
    KVT_CODEC_TRY(take_stored_bytes(op, in, ret_ns));
    ret_ns->components_count = (uint32_t)in->n_components;
    ret_ns->epoch = in->epoch;
    ret_ns->block_tokens = in->block_tokens;
    ret_ns->ranks = in->ranks;
    ret_ns->roots = in->roots;
    ret_ns->nodes = in->nodes;
    ret_ns->blocks = in->blocks;
    ret_ns->lookup_tokens = in->lookup_tokens;
    ret_ns->hit_tokens = in->hit_tokens;
    return 0;
}

static int take_engine(struct kvt_op *op, const Kvtier__V1__EngineStats *in,
                       struct kvt_api_engine_stats *ret_engine)
{
    KVT_CODEC_TRY(kvt_codec_take_fixed(op, &in->engine_id, "engines.engine_id", KVT_ENGINE_ID_BYTES,
                                       ret_engine->engine_id));
    ret_engine->ns_idx = in->namespace_idx;
    ret_engine->sessions = in->sessions;
    ret_engine->leases = in->leases;
    ret_engine->tickets = in->tickets;
    ret_engine->leased_bytes = in->leased_bytes;
    ret_engine->reserved_bytes = in->reserved_bytes;
    ret_engine->lookup_tokens = in->lookup_tokens;
    ret_engine->hit_tokens = in->hit_tokens;
    ret_engine->promoted_bytes = in->promoted_bytes;
    ret_engine->demoted_bytes = in->demoted_bytes;
    ret_engine->lookups = in->lookups;
    ret_engine->promotes = in->promotes;
    ret_engine->demotes = in->demotes;
    ret_engine->missed_moves = in->missed_moves;
    ret_engine->ops_running = in->ops_running;
    ret_engine->held_bytes = in->held_bytes;
    return kvt_codec_take_text(op, &in->name, "engines.name", KVT_MODEL_TEXT_BYTES_MAX,
                               &ret_engine->name);
}

int kvt_codec_take_string(struct kvt_op *op, const ProtobufCBinaryData *in, const char *field,
                          const char **ret_string)
{
    struct kvt_text text;
    char *copy;

    KVT_CODEC_TRY(kvt_codec_take_text(op, in, field, STATS_LABEL_BYTES_MAX, &text));
    copy = kvt_arena_alloc(op->arena, text.bytes + 1u);
    if (copy == NULL)
        return kvt_codec_no_memory(op);
    memcpy(copy, text.at, text.bytes);
    copy[text.bytes] = '\0';
    *ret_string = copy;
    return 0;
}

int kvt_codec_take_counters(struct kvt_op *op, size_t count, Kvtier__V1__Counter *const *in,
                            struct kvt_api_counter **ret_counters)
{
    struct kvt_api_counter *counters;

    KVT_CODEC_TRY(kvt_codec_take_count(op, count, "counters (count)", 0, STATS_COUNTERS_MAX));
    counters = kvt_arena_array(op->arena, count, sizeof(*counters));
    if (counters == NULL)
        return kvt_codec_no_memory(op);
    for (size_t i = 0; i < count; i++) {
        KVT_CODEC_TRY(kvt_codec_take_string(op, &in[i]->name, "counters.name", &counters[i].name));
        KVT_CODEC_TRY(
            kvt_codec_take_string(op, &in[i]->label, "counters.label", &counters[i].label));
        counters[i].value = in[i]->value;
    }
    *ret_counters = counters;
    return 0;
}

static struct kvt_api_index_stats take_index(const Kvtier__V1__IndexStats *in)
{
    if (in == NULL)
        return (struct kvt_api_index_stats){.state = KVT_DEVICE_INDEX_OFF};
    return (struct kvt_api_index_stats){
        .state = in->state,
        .used_bytes = in->used_bytes,
        .capacity_bytes = in->capacity_bytes,
        .commits = in->commits,
        .rows_put = in->rows_put,
        .copies_put = in->copies_put,
        .drops = in->drops,
        .refused = in->refused,
        .loaded_rows = in->loaded_rows,
        .load_total_rows = in->load_total_rows,
        .load_ns = in->load_ns,
        .scanned_bytes = in->scanned_bytes,
        .scan_total_bytes = in->scan_total_bytes,
    };
}

static int take_device(struct kvt_op *op, const Kvtier__V1__DeviceStats *in,
                       struct kvt_api_device_stats *ret_device)
{
    *ret_device = (struct kvt_api_device_stats){
        .health = in->health,
        .capacity_bytes = in->capacity_bytes,
        .used_bytes = in->used_bytes,
        .slab_bytes = in->slab_bytes,
        .copies = in->copies,
        .inflight = in->inflight,
        .read_bytes = in->read_bytes,
        .written_bytes = in->written_bytes,
        .outages = in->outages,
        .out_ns = in->out_ns,
        .life_written_bytes = in->life_written_bytes,
        .endurance_bytes = in->endurance_bytes,
        .dwpd_milli = in->dwpd_milli,
        .life_left_days = in->life_left_days,
        .index = take_index(in->index),
    };
    KVT_CODEC_TRY(kvt_codec_take_text(op, &in->path, "devices.path", KVT_MODEL_TEXT_BYTES_MAX,
                                      &ret_device->path));
    KVT_CODEC_TRY(kvt_codec_take_text(op, &in->index_path, "devices.index_path",
                                      KVT_MODEL_TEXT_BYTES_MAX, &ret_device->index_path));
    KVT_CODEC_TRY(kvt_codec_take_counters(op, in->n_errors, in->errors, &ret_device->errors));
    ret_device->errors_count = (uint32_t)in->n_errors;
    return 0;
}

static int take_lists(struct kvt_op *op, const Kvtier__V1__StatsAnswer *in)
{
    struct kvt_ans_stats *ans = &op->ans.stats;

    ans->namespaces = kvt_arena_array(op->arena, in->n_namespaces, sizeof(*ans->namespaces));
    ans->engines = kvt_arena_array(op->arena, in->n_engines, sizeof(*ans->engines));
    ans->devices = kvt_arena_array(op->arena, in->n_devices, sizeof(*ans->devices));
    if (ans->namespaces == NULL || ans->engines == NULL || ans->devices == NULL)
        return kvt_codec_no_memory(op);
    for (size_t i = 0; i < in->n_tiers; i++)
        KVT_CODEC_TRY(take_tier(op, in->tiers[i], &ans->tiers[i]));
    for (size_t i = 0; i < in->n_namespaces; i++)
        KVT_CODEC_TRY(take_namespace(op, in->namespaces[i], &ans->namespaces[i]));
    for (size_t i = 0; i < in->n_engines; i++)
        KVT_CODEC_TRY(take_engine(op, in->engines[i], &ans->engines[i]));
    for (size_t i = 0; i < in->n_devices; i++)
        KVT_CODEC_TRY(take_device(op, in->devices[i], &ans->devices[i]));
    KVT_CODEC_TRY(kvt_codec_take_counters(op, in->n_counters, in->counters, &ans->counters));
    ans->tiers_count = (uint32_t)in->n_tiers;
    ans->namespaces_count = (uint32_t)in->n_namespaces;
    ans->engines_count = (uint32_t)in->n_engines;
    ans->devices_count = (uint32_t)in->n_devices;
    ans->counters_count = (uint32_t)in->n_counters;
    return 0;
}

int kvt_codec_decode_stats(struct kvt_op *op, const uint8_t *at, size_t bytes)
{
    struct kvt_ans_stats *ans = &op->ans.stats;
    Kvtier__V1__StatsAnswer *in;

    KVT_CODEC_TRY(kvt_codec_unpack(op, &kvtier__v1__stats_answer__descriptor, at, bytes, &in));
    KVT_CODEC_TRY(kvt_codec_take_count(op, in->n_tiers, "tiers (count)", 0, KVT_API_TIERS));
    KVT_CODEC_TRY(
        kvt_codec_take_count(op, in->n_namespaces, "namespaces (count)", 0, KVT_NAMESPACES_MAX));
    KVT_CODEC_TRY(kvt_codec_take_count(op, in->n_engines, "engines (count)", 0, STATS_ENGINES_MAX));
    KVT_CODEC_TRY(kvt_codec_take_count(op, in->n_devices, "devices (count)", 0, KVT_ZONES_MAX));
    KVT_CODEC_TRY(
        kvt_codec_take_text(op, &in->version, "version", KVT_MODEL_TEXT_BYTES_MAX, &ans->version));
    ans->boot_id = in->boot_id;
    ans->uptime_ns = in->uptime_ns;
    ans->index_memory_bytes = in->index_memory_bytes;
    ans->index_used_bytes = in->index_used_bytes;
    ans->blocks = in->blocks;
    ans->nodes = in->nodes;
    ans->leases = in->leases;
    ans->tickets = in->tickets;
    ans->reserved_copies = in->reserved_copies;
    ans->pins = in->pins;
    ans->sessions = in->sessions;
    ans->ops_running = in->ops_running;
    KVT_CODEC_TRY(kvt_codec_take_l1(op, in));
    return take_lists(op, in);
}

/* ---- dump -------------------------------------------------------------------------------------
 */

ProtobufCMessage *kvt_codec_encode_dump(struct kvt_op *op)
{
    const struct kvt_ans_dump *ans = &op->ans.dump;
    Kvtier__V1__DumpAnswer *out = kvt_arena_alloc(op->arena, sizeof(*out));
    Kvtier__V1__DumpNode *views = kvt_arena_array(op->arena, ans->nodes_count, sizeof(*views));

    if (out == NULL || views == NULL)
        return NULL;
    kvtier__v1__dump_answer__init(out);
    out->nodes = kvt_arena_array(op->arena, ans->nodes_count, sizeof(*out->nodes));
    if (out->nodes == NULL)
        return NULL;
    for (uint32_t i = 0; i < ans->nodes_count; i++) {
        struct kvt_api_dump_node *node = &ans->nodes[i];

        KVT_ASSERT(node->components_count <= KVT_COMPONENTS_MAX);
        kvtier__v1__dump_node__init(&views[i]);
        views[i].namespace_idx = node->ns_idx;
        views[i].salt = kvt_codec_put_text(&node->salt);
        views[i].lora = kvt_codec_put_text(&node->lora);
        views[i].depth_nodes = node->depth_nodes;
        views[i].first_block_idx = node->first_block_idx;
        views[i].blocks_count = node->blocks_count;
        views[i].children_count = node->children_count;
        views[i].leases = node->leases;
        views[i].n_first_tokens = KVT_COUNT_OF(node->first_tokens);
        views[i].first_tokens = node->first_tokens;
        views[i].n_blocks_at = (size_t)node->components_count * KVT_API_TIERS;
        views[i].blocks_at = &node->blocks_at[0][0];
        out->nodes[i] = &views[i];
    }
    out->n_nodes = ans->nodes_count;
    out->resume = ans->resume;
    return &out->base;
}

static int take_node(struct kvt_op *op, const Kvtier__V1__DumpNode *in,
                     struct kvt_api_dump_node *ret_node)
{
    KVT_CODEC_TRY(
        kvt_codec_take_blob(op, &in->salt, "nodes.salt", KVT_ROOT_TAG_BYTES_MAX, &ret_node->salt));
    KVT_CODEC_TRY(
        kvt_codec_take_blob(op, &in->lora, "nodes.lora", KVT_ROOT_TAG_BYTES_MAX, &ret_node->lora));
    KVT_CODEC_TRY(kvt_codec_take_count(op, in->n_first_tokens, "nodes.first_tokens", 0,
                                       KVT_COUNT_OF(ret_node->first_tokens)));
    KVT_CODEC_TRY(kvt_codec_take_count(op, in->n_blocks_at, "nodes.blocks_at", 0,
                                       KVT_COMPONENTS_MAX * KVT_API_TIERS));
    if (in->n_blocks_at % KVT_API_TIERS != 0)
        return kvt_codec_bad(op, "nodes.blocks_at: %zu numbers are not a multiple of %u",
                             in->n_blocks_at, KVT_API_TIERS);
    for (size_t i = 0; i < in->n_first_tokens; i++)
        ret_node->first_tokens[i] = in->first_tokens[i];
    for (size_t i = 0; i < in->n_blocks_at; i++)
        ret_node->blocks_at[i / KVT_API_TIERS][i % KVT_API_TIERS] = in->blocks_at[i];
    ret_node->components_count = (uint32_t)(in->n_blocks_at / KVT_API_TIERS);
    ret_node->ns_idx = in->namespace_idx;
    ret_node->depth_nodes = in->depth_nodes;
    ret_node->first_block_idx = in->first_block_idx;
    ret_node->blocks_count = in->blocks_count;
    ret_node->children_count = in->children_count;
    ret_node->leases = in->leases;
    return 0;
}

int kvt_codec_decode_dump(struct kvt_op *op, const uint8_t *at, size_t bytes)
{
    struct kvt_ans_dump *ans = &op->ans.dump;
    Kvtier__V1__DumpAnswer *in;

    KVT_CODEC_TRY(kvt_codec_unpack(op, &kvtier__v1__dump_answer__descriptor, at, bytes, &in));
    KVT_CODEC_TRY(
        kvt_codec_take_count(op, in->n_nodes, "nodes (count)", 0, KVT_CODEC_DUMP_NODES_MAX));
    ans->nodes = kvt_arena_array(op->arena, in->n_nodes, sizeof(*ans->nodes));
    if (ans->nodes == NULL)
        return kvt_codec_no_memory(op);
    for (size_t i = 0; i < in->n_nodes; i++)
        KVT_CODEC_TRY(take_node(op, in->nodes[i], &ans->nodes[i]));
    ans->nodes_count = (uint32_t)in->n_nodes;
    ans->resume = in->resume;
    return 0;
}
