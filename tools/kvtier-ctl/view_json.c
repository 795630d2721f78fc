/* The JSON twins of the views. Names are those of api.h; numbers are whole bytes, tokens, blocks
 * and nanoseconds; fingerprints and ids are lower-case hex. */
#include "tools/kvtier-ctl/view.h"

#include "tools/lib/json.h"

static void text(struct kvt_json *json, const char *name, struct kvt_text value)
{
    kvt_json_bytes(json, name, value.at, value.bytes);
}

static void json_tier(struct kvt_json *json, const struct kvt_api_tier_stats *tier)
{
    kvt_json_object(json, NULL);
    kvt_json_u64(json, "tier", tier->tier);
    kvt_json_text(json, "health", kvt_ctl_tier_health_text(tier->health));
    text(json, "detail", tier->detail);
    kvt_json_u64(json, "capacity_bytes", tier->capacity_bytes);
    kvt_json_u64(json, "used_bytes", tier->used_bytes);
    kvt_json_u64(json, "slab_bytes", tier->slab_bytes);
    kvt_json_u64(json, "copies", tier->copies);
    kvt_json_u64(json, "pinned_copies", tier->pinned_copies);
    kvt_json_u64(json, "filling_copies", tier->filling_copies);
    kvt_json_u64(json, "inflight", tier->inflight);
    kvt_json_u64(json, "hit_tokens", tier->hit_tokens);
    kvt_json_u64(json, "evictions", tier->evictions);
    kvt_json_u64(json, "read_bytes", tier->read_bytes);
    kvt_json_u64(json, "written_bytes", tier->written_bytes);
    kvt_json_u64(json, "errors", tier->errors);
    kvt_json_end(json);
}

static void json_index(struct kvt_json *json, const struct kvt_api_index_stats *index)
{
    kvt_json_object(json, "index");
    kvt_json_text(json, "state", kvt_ctl_index_state_text(index->state));
    kvt_json_u64(json, "used_bytes", index->used_bytes);
    kvt_json_u64(json, "capacity_bytes", index->capacity_bytes);
    kvt_json_u64(json, "commits", index->commits);
    kvt_json_u64(json, "rows_put", index->rows_put);
    kvt_json_u64(json, "copies_put", index->copies_put);
    kvt_json_u64(json, "drops", index->drops);
    kvt_json_u64(json, "refused", index->refused);
    kvt_json_u64(json, "loaded_rows", index->loaded_rows);
    kvt_json_u64(json, "load_total_rows", index->load_total_rows);
    kvt_json_u64(json, "load_ns", index->load_ns);
    kvt_json_u64(json, "scanned_bytes", index->scanned_bytes);
    kvt_json_u64(json, "scan_total_bytes", index->scan_total_bytes);
    kvt_json_end(json);
}

/* life_left_days is left out while it is not known. */
static void json_device(struct kvt_json *json, const struct kvt_api_device_stats *device)
{
    kvt_json_object(json, NULL);
    text(json, "path", device->path);
    text(json, "index_path", device->index_path);
    kvt_json_text(json, "health", kvt_ctl_device_health_text(device->health));
    kvt_json_u64(json, "capacity_bytes", device->capacity_bytes);
    kvt_json_u64(json, "used_bytes", device->used_bytes);
    kvt_json_u64(json, "slab_bytes", device->slab_bytes);
    kvt_json_u64(json, "copies", device->copies);
    kvt_json_u64(json, "inflight", device->inflight);
    kvt_json_u64(json, "read_bytes", device->read_bytes);
    kvt_json_u64(json, "written_bytes", device->written_bytes);
    kvt_json_u64(json, "outages", device->outages);
    kvt_json_u64(json, "out_ns", device->out_ns);
    kvt_json_u64(json, "life_written_bytes", device->life_written_bytes);
    kvt_json_u64(json, "endurance_bytes", device->endurance_bytes);
    kvt_json_u64(json, "dwpd_milli", device->dwpd_milli);
    if (device->life_left_days != KVT_DEVICE_LIFE_UNKNOWN)
        kvt_json_u64(json, "life_left_days", device->life_left_days);
    kvt_json_object(json, "errors");
    for (uint32_t i = 0; i < device->errors_count; i++)
        kvt_json_u64(json, device->errors[i].name, device->errors[i].value);
    kvt_json_end(json);
    json_index(json, &device->index);
    kvt_json_end(json);
}

static void json_ns(struct kvt_json *json, const struct kvt_api_ns_stats *ns)
{
    kvt_json_object(json, NULL);
    kvt_json_hex(json, "fingerprint", ns->fingerprint, KVT_FINGERPRINT_BYTES);
    text(json, "model", ns->model);
    text(json, "revision", ns->revision);
    text(json, "dtype", ns->dtype);
    kvt_json_u64(json, "epoch", ns->epoch);
    kvt_json_u64(json, "block_tokens", ns->block_tokens);
    kvt_json_u64(json, "ranks", ns->ranks);
    kvt_json_u64(json, "roots", ns->roots);
    kvt_json_u64(json, "nodes", ns->nodes);
    kvt_json_u64(json, "blocks", ns->blocks);
    kvt_json_u64(json, "lookup_tokens", ns->lookup_tokens);
    kvt_json_u64(json, "hit_tokens", ns->hit_tokens);
    kvt_json_array(json, "components");
    for (uint32_t c = 0; c < ns->components_count; c++) {
        kvt_json_object(json, NULL);
        text(json, "name", ns->components[c].name);
        kvt_json_text(json, "kind", kvt_ctl_kind_text(ns->components[c].kind));
        kvt_json_u64(json, "window_tokens", ns->components[c].window_tokens);
        kvt_json_u64(json, "bytes_per_block", ns->components[c].bytes_per_block);
        kvt_json_u64(json, "stored_bytes_per_block", ns->stored_bytes[c]);
        kvt_json_text(json, "quantisation", kvt_ctl_quant_text(ns->components[c].quant.kind));
        kvt_json_bool(json, "is_replicated", ns->components[c].is_replicated);
        kvt_json_array(json, "copies_at");
        for (uint32_t t = 0; t < KVT_API_TIERS; t++)
            kvt_json_u64(json, NULL, ns->copies_at[c][t]);
        kvt_json_end(json);
        kvt_json_end(json);
    }
    kvt_json_end(json);
    kvt_json_end(json);
}

static void json_engine(struct kvt_json *json, const struct kvt_api_engine_stats *engine)
{
    kvt_json_object(json, NULL);
    kvt_json_hex(json, "engine_id", engine->engine_id, KVT_ENGINE_ID_BYTES);
    text(json, "name", engine->name);
    kvt_json_u64(json, "namespace_idx", engine->ns_idx);
    kvt_json_u64(json, "sessions", engine->sessions);
    kvt_json_u64(json, "leases", engine->leases);
    kvt_json_u64(json, "tickets", engine->tickets);
    kvt_json_u64(json, "leased_bytes", engine->leased_bytes);
    kvt_json_u64(json, "reserved_bytes", engine->reserved_bytes);
    kvt_json_u64(json, "lookup_tokens", engine->lookup_tokens);
    kvt_json_u64(json, "hit_tokens", engine->hit_tokens);
    kvt_json_u64(json, "promoted_bytes", engine->promoted_bytes);
    kvt_json_u64(json, "demoted_bytes", engine->demoted_bytes);
    kvt_json_u64(json, "lookups", engine->lookups);
    kvt_json_u64(json, "promotes", engine->promotes);
    kvt_json_u64(json, "demotes", engine->demotes);
    kvt_json_u64(json, "missed_moves", engine->missed_moves);
    kvt_json_u64(json, "ops_running", engine->ops_running);
    kvt_json_u64(json, "held_bytes", engine->held_bytes);
    kvt_json_end(json);
}

static void json_totals(struct kvt_json *json, const struct kvt_ans_stats *stats)
{
    text(json, "version", stats->version);
    kvt_json_u64(json, "boot_id", stats->boot_id);
    kvt_json_u64(json, "uptime_ns", stats->uptime_ns);
    kvt_json_u64(json, "index_memory_bytes", stats->index_memory_bytes);
    kvt_json_u64(json, "index_used_bytes", stats->index_used_bytes);
    kvt_json_u64(json, "blocks", stats->blocks);
    kvt_json_u64(json, "nodes", stats->nodes);
    kvt_json_u64(json, "leases", stats->leases);
    kvt_json_u64(json, "tickets", stats->tickets);
    kvt_json_u64(json, "reserved_copies", stats->reserved_copies);
    kvt_json_u64(json, "pins", stats->pins);
    kvt_json_u64(json, "sessions", stats->sessions);
    kvt_json_u64(json, "ops_running", stats->ops_running);
}

static void json_devices(struct kvt_json *json, const struct kvt_ans_stats *stats)
{
    kvt_ctl_json_l1(json, stats);
    kvt_json_array(json, "devices");
    for (uint32_t i = 0; i < stats->devices_count; i++)
        json_device(json, &stats->devices[i]);
    kvt_json_end(json);
}

void kvt_ctl_json_devices(FILE *out, const struct kvt_ans_stats *stats)
{
    struct kvt_json json;

    kvt_json_begin(&json, out, false);
    json_devices(&json, stats);
    kvt_json_finish(&json);
}

void kvt_ctl_json_stats(FILE *out, const struct kvt_ans_stats *stats, bool is_compact)
{
    struct kvt_json json;

    kvt_json_begin(&json, out, is_compact);
    json_totals(&json, stats);
    kvt_json_array(&json, "tiers");
    for (uint32_t i = 0; i < stats->tiers_count; i++)
        json_tier(&json, &stats->tiers[i]);
    kvt_json_end(&json);
    json_devices(&json, stats);
    kvt_json_array(&json, "namespaces");
    for (uint32_t i = 0; i < stats->namespaces_count; i++)
        json_ns(&json, &stats->namespaces[i]);
    kvt_json_end(&json);
    kvt_json_array(&json, "engines");
    for (uint32_t i = 0; i < stats->engines_count; i++)
        json_engine(&json, &stats->engines[i]);
    kvt_json_end(&json);
    kvt_json_array(&json, "counters");
    for (uint32_t i = 0; i < stats->counters_count; i++) {
        kvt_json_object(&json, NULL);
        kvt_json_text(&json, "name", stats->counters[i].name);
        kvt_json_text(&json, "label", stats->counters[i].label);
        kvt_json_u64(&json, "value", stats->counters[i].value);
        kvt_json_end(&json);
    }
    kvt_json_end(&json);
    kvt_json_finish(&json);
}

void kvt_ctl_json_namespaces(FILE *out, const struct kvt_ans_stats *stats)
{
    struct kvt_json json;

    kvt_json_begin(&json, out, false);
    kvt_json_array(&json, "namespaces");
    for (uint32_t i = 0; i < stats->namespaces_count; i++)
        json_ns(&json, &stats->namespaces[i]);
    kvt_json_end(&json);
    kvt_json_finish(&json);
}

static void json_prefix_component(struct kvt_json *json, const struct kvt_ctl_prompt *prompt,
                                  const struct kvt_ans_lookup *answer, uint32_t c, bool wants_why)
{
    const struct kvt_api_component *component = &prompt->ns->components[c];

    kvt_json_object(json, NULL);
    text(json, "name", component->name);
    kvt_json_text(json, "kind", kvt_ctl_kind_text(component->kind));
    kvt_json_u64(json, "window_tokens", component->window_tokens);
    kvt_json_u64(json, "alone_tokens", answer->components[c].alone_tokens);
    kvt_json_u64(json, "needed_blocks", answer->components[c].needed_blocks);
    kvt_json_array(json, "tokens_at");
    for (uint32_t t = 0; t < KVT_API_TIERS; t++)
        kvt_json_u64(json, NULL, answer->components[c].tokens_at[t]);
    kvt_json_end(json);
    if (wants_why) {
        enum kvt_why why = answer->components[c].why;

        kvt_json_text(json, "why", kvt_ctl_why_text(why));
        kvt_json_u64(json, "why_block_idx", answer->components[c].why_block_idx);
        kvt_json_text(json, "remedy", kvt_ctl_remedy(why, component->kind));
    }
    kvt_json_end(json);
}

void kvt_ctl_json_lookup(FILE *out, const struct kvt_ctl_prompt *prompt,
                         const struct kvt_ans_lookup *answer, bool wants_why)
{
    struct kvt_json json;

    kvt_json_begin(&json, out, false);
    kvt_json_hex(&json, "fingerprint", prompt->ns->fingerprint, KVT_FINGERPRINT_BYTES);
    kvt_json_u64(&json, "block_tokens", prompt->ns->block_tokens);
    kvt_json_u64(&json, "prompt_tokens", prompt->tokens_count);
    kvt_json_u64(&json, "boundary_tokens", answer->boundary_tokens);
    kvt_json_u64(&json, "path_tokens", answer->path_tokens);
    kvt_json_u64(&json, "branch_tokens", answer->branch_tokens);
    kvt_json_u64(&json, "epoch", answer->epoch);
    kvt_json_u64(&json, "estimate_us", answer->estimate_us);
    kvt_json_array(&json, "components");
    for (uint32_t c = 0; c < KVT_MIN(prompt->ns->components_count, answer->components_count); c++)
        json_prefix_component(&json, prompt, answer, c, wants_why);
    kvt_json_end(&json);
    kvt_json_finish(&json);
}

void kvt_ctl_json_tree(FILE *out, const struct kvt_ctl_tree *tree)
{
    struct kvt_json json;

    kvt_json_begin(&json, out, false);
    kvt_json_bool(&json, "is_cut", tree->is_cut);
    kvt_json_array(&json, "nodes");
    for (uint32_t i = 0; i < tree->nodes_count; i++) {
        const struct kvt_api_dump_node *node = &tree->nodes[i];

        if (node->depth_nodes >= tree->depth_max)
            continue;
        kvt_json_object(&json, NULL);
        kvt_json_u64(&json, "namespace_idx", node->ns_idx);
        text(&json, "salt", node->salt);
        text(&json, "lora", node->lora);
        kvt_json_u64(&json, "depth_nodes", node->depth_nodes);
        kvt_json_u64(&json, "first_block_idx", node->first_block_idx);
        kvt_json_u64(&json, "blocks", node->blocks_count);
        kvt_json_u64(&json, "children", node->children_count);
        kvt_json_u64(&json, "leases", node->leases);
        kvt_json_array(&json, "blocks_at");
        for (uint32_t c = 0; c < node->components_count; c++) {
            kvt_json_array(&json, NULL);
            for (uint32_t t = 0; t < KVT_API_TIERS; t++)
                kvt_json_u64(&json, NULL, node->blocks_at[c][t]);
            kvt_json_end(&json);
        }
        kvt_json_end(&json);
        kvt_json_end(&json);
    }
    kvt_json_end(&json);
    kvt_json_finish(&json);
}

void kvt_ctl_json_doctor(FILE *out, const struct kvt_ctl_report *report)
{
    static const char *const levels[] = {"ok", "warn", "bad"};
    struct kvt_json json;

    kvt_json_begin(&json, out, false);
    kvt_json_text(&json, "worst", levels[kvt_ctl_report_worst(report)]);
    kvt_json_array(&json, "findings");
    for (uint32_t i = 0; i < report->count; i++) {
        const struct kvt_ctl_finding *finding = &report->findings[i];

        kvt_json_object(&json, NULL);
        kvt_json_text(&json, "level", levels[finding->level]);
        kvt_json_text(&json, "what", finding->what);
        kvt_json_text(&json, "text", finding->text);
        kvt_json_text(&json, "remedy", finding->remedy);
        kvt_json_end(&json);
    }
    kvt_json_end(&json);
    kvt_json_finish(&json);
}

void kvt_ctl_json_health(FILE *out, const struct kvt_ctl_health *health)
{
    struct kvt_json json;

    kvt_json_begin(&json, out, false);
    kvt_json_bool(&json, "is_serving", health->is_serving);
    kvt_json_bool(&json, "is_degraded", kvt_ctl_is_degraded(health->stats));
    kvt_json_array(&json, "tiers");
    for (uint32_t i = 0; i < health->stats->tiers_count; i++) {
        kvt_json_object(&json, NULL);
        kvt_json_u64(&json, "tier", health->stats->tiers[i].tier);
        kvt_json_text(&json, "health", kvt_ctl_tier_health_text(health->stats->tiers[i].health));
        text(&json, "detail", health->stats->tiers[i].detail);
        kvt_json_end(&json);
    }
    kvt_json_end(&json);
    kvt_json_array(&json, "gpus");
    for (uint32_t i = 0; i < health->stats->gpus_count; i++) {
        const struct kvt_api_gpu_stats *gpu = &health->stats->gpus[i];

        kvt_json_object(&json, NULL);
        if (gpu->index != KVT_API_GPU_INDEX_NONE)
            kvt_json_u64(&json, "index", gpu->index);
        kvt_json_text(&json, "state", kvt_ctl_gpu_state_text(gpu->state));
        text(&json, "why", gpu->why);
        kvt_json_end(&json);
    }
    kvt_json_end(&json);
    kvt_json_array(&json, "devices");
    for (uint32_t i = 0; i < health->stats->devices_count; i++) {
        const struct kvt_api_device_stats *device = &health->stats->devices[i];

        kvt_json_object(&json, NULL);
        text(&json, "path", device->path);
        kvt_json_text(&json, "health", kvt_ctl_device_health_text(device->health));
        kvt_json_text(&json, "index", kvt_ctl_index_state_text(device->index.state));
        kvt_json_end(&json);
    }
    kvt_json_end(&json);
    kvt_json_finish(&json);
}
