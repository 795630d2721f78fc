/* The walk over answers. */
#include <string.h>

#include "tests/common/api_walk_fields.h"

static void walk_ans_lookup(struct api_walk *walk, struct kvt_ans_lookup *ans)
{
    U64("boundary_tokens", &ans->boundary_tokens);
    U64("path_tokens", &ans->path_tokens);
    U64("branch_tokens", &ans->branch_tokens);
    U64("epoch", &ans->epoch);
    walk_u32(walk, "components_count", &ans->components_count, 0, KVT_COMPONENTS_MAX);
    for (uint32_t i = 0; i < ans->components_count; i++) {
        U64("alone_tokens", &ans->components[i].alone_tokens);
        U64("needed_blocks", &ans->components[i].needed_blocks);
        for (uint32_t t = 0; t < KVT_API_TIERS; t++) {
            U64("blocks_at", &ans->components[i].blocks_at[t]);
            U64("tokens_at", &ans->components[i].tokens_at[t]);
        }
        walk_enum(walk, "why", &ans->components[i].why, KVT_WHY_OTHER_EPOCH);
        U64("why_block_idx", &ans->components[i].why_block_idx);
    }
    walk_handle(walk, "cursor", &ans->cursor);
    U64("cursor_tokens", &ans->cursor_tokens);
    walk_handle(walk, "lease", &ans->lease);
    U64("lease_ns", &ans->lease_ns);
    U64("estimate_us", &ans->estimate_us);
    walk_bool(walk, "is_lease_limited", &ans->is_lease_limited);
}

static void walk_results(struct api_walk *walk, struct kvt_api_results *results, uint32_t count,
                         const struct kvt_api_moves *moves)
{
    for (uint32_t i = 0; i < count; i++) {
        if (walk->is_filling) {
            results->count[i] = moves[i].count;
            results->results[i] = walk_take(walk, moves[i].count, 1);
        } else {
            walk_note(walk, "results.count", &results->count[i], 4);
        }
        walk_raw(walk, "results", results->results[i], results->count[i]);
    }
}

static void walk_in_place(struct api_walk *walk, struct kvt_op *op)
{
    struct kvt_ans_promote *ans = &op->ans.promote;

    for (uint32_t i = 0; i < op->req.promote.moves_count; i++) {
        struct kvt_api_in_place *at = &ans->in_place[i];

        if (walk->is_filling) {
            at->zones = walk_take(walk, ans->moves.count[i], sizeof(at->zones[0]));
            at->offsets_bytes = walk_take(walk, ans->moves.count[i], sizeof(at->offsets_bytes[0]));
        }
        walk_raw(walk, "in_place.zones", at->zones, 4ul * ans->moves.count[i]);
        walk_raw(walk, "in_place.offsets_bytes", at->offsets_bytes, 8ul * ans->moves.count[i]);
    }
    walk_u32(walk, "arenas_count", &ans->arenas_count, 0, KVT_ZONES_MAX);
    for (uint32_t i = 0; i < ans->arenas_count; i++) {
        struct kvt_api_arena *arena = &ans->arenas[i];

        U32("arenas.zone", &arena->zone);
        U32("arenas.incarnation", &arena->incarnation);
        walk_raw(walk, "arenas.handle", arena->handle, sizeof(arena->handle));
        walk_raw(walk, "arenas.device_uuid", arena->device_uuid, sizeof(arena->device_uuid));
        U64("arenas.bytes", &arena->bytes);
    }
}

static void walk_ans_promote(struct api_walk *walk, struct kvt_op *op)
{
    struct kvt_ans_promote *ans = &op->ans.promote;

    walk_results(walk, &ans->moves, op->req.promote.moves_count, op->req.promote.moves);
    U64("moved_bytes", &ans->moved_bytes);
    for (uint32_t t = 0; t < KVT_API_TIERS; t++)
        U64("moved_blocks_from", &ans->moved_blocks_from[t]);
    walk_bool(walk, "is_quiesced", &ans->is_quiesced);
    walk_u32(walk, "inline_bytes", &ans->inline_bytes, 0,
             walk->size == 2 ? KVT_INLINE_BYTES_MAX : 1000);
    if (walk->is_filling)
        ans->inline_data = walk_take(walk, ans->inline_bytes, 1);
    walk_raw(walk, "inline_data", (void *)(uintptr_t)ans->inline_data, ans->inline_bytes);
    if (op->req.promote.moves_count > 0) /* nothing else says it where there are no moves */
        walk_bool(walk, "is_in_place", &ans->is_in_place);
    if (ans->is_in_place)
        walk_in_place(walk, op);
}

static void walk_ans_reserve(struct api_walk *walk, struct kvt_op *op)
{
    struct kvt_ans_reserve *ans = &op->ans.reserve;

    walk_handle(walk, "ticket", &ans->ticket);
    U64("ticket_ns", &ans->ticket_ns);
    U64("epoch", &ans->epoch);
    if (walk->is_filling)
        ans->wants_count = op->req.reserve.wants_count;
    else
        walk_note(walk, "wants_count", &ans->wants_count, 4);
    for (uint32_t i = 0; i < ans->wants_count; i++) {
        if (walk->is_filling) {
            ans->count[i] = (uint32_t)(op->req.reserve.wants[i].end_block_idx -
                                       op->req.reserve.wants[i].first_block_idx);
            ans->states[i] = walk_take(walk, ans->count[i], 1);
        }
        walk_raw(walk, "states", ans->states[i], ans->count[i]);
    }
    walk_handle(walk, "cursor", &ans->cursor);
    U64("cursor_tokens", &ans->cursor_tokens);
}

static void walk_tier_stats(struct api_walk *walk, struct kvt_api_tier_stats *tier)
{
    U32("tier", &tier->tier);
    U32("health", &tier->health);
    U64("capacity_bytes", &tier->capacity_bytes);
    U64("used_bytes", &tier->used_bytes);
    U64("slab_bytes", &tier->slab_bytes);
    U64("copies", &tier->copies);
    U64("pinned_copies", &tier->pinned_copies);
    U64("filling_copies", &tier->filling_copies);
    U64("inflight", &tier->inflight);
    U64("hit_tokens", &tier->hit_tokens);
    U64("evictions", &tier->evictions);
    U64("read_bytes", &tier->read_bytes);
    U64("written_bytes", &tier->written_bytes);
    U64("errors", &tier->errors);
    walk_text(walk, "detail", &tier->detail, 200);
}

static void walk_ns_stats(struct api_walk *walk, struct kvt_api_ns_stats *ns)
{
    walk_raw(walk, "fingerprint", ns->fingerprint, KVT_FINGERPRINT_BYTES);
    walk_text(walk, "model", &ns->model, 200);
    walk_text(walk, "revision", &ns->revision, 200);
    walk_text(walk, "dtype", &ns->dtype, 200);
    U64("epoch", &ns->epoch);
    U32("block_tokens", &ns->block_tokens);
    U32("ranks", &ns->ranks);
    walk_u32(walk, "components_count", &ns->components_count, 0, KVT_COMPONENTS_MAX);
    for (uint32_t i = 0; i < ns->components_count; i++) {
        walk_component(walk, &ns->components[i]);
        for (uint32_t t = 0; t < KVT_API_TIERS; t++)
            U64("copies_at", &ns->copies_at[i][t]);
        U64("stored_bytes", &ns->stored_bytes[i]);
    }
    U64("roots", &ns->roots);
    U64("nodes", &ns->nodes);
    U64("blocks", &ns->blocks);
    U64("lookup_tokens", &ns->lookup_tokens);
    U64("hit_tokens", &ns->hit_tokens);
}

static void walk_engine_stats(struct api_walk *walk, struct kvt_api_engine_stats *engine)
{
    walk_raw(walk, "engine_id", engine->engine_id, KVT_ENGINE_ID_BYTES);
    walk_text(walk, "name", &engine->name, 200);
    U32("ns_idx", &engine->ns_idx);
    U32("sessions", &engine->sessions);
    U32("leases", &engine->leases);
    U32("tickets", &engine->tickets);
    U64("leased_bytes", &engine->leased_bytes);
    U64("reserved_bytes", &engine->reserved_bytes);
    U64("lookup_tokens", &engine->lookup_tokens);
    U64("hit_tokens", &engine->hit_tokens);
    U64("promoted_bytes", &engine->promoted_bytes);
    U64("demoted_bytes", &engine->demoted_bytes);
    U64("lookups", &engine->lookups);
    U64("promotes", &engine->promotes);
    U64("demotes", &engine->demotes);
    U64("missed_moves", &engine->missed_moves);
    U64("ops_running", &engine->ops_running);
    U64("held_bytes", &engine->held_bytes);
}

static void walk_index_stats(struct api_walk *walk, struct kvt_api_index_stats *index)
{
    U32("index.state", &index->state);
    U64("index.used_bytes", &index->used_bytes);
    U64("index.capacity_bytes", &index->capacity_bytes);
    U64("index.commits", &index->commits);
    U64("index.rows_put", &index->rows_put);
    U64("index.copies_put", &index->copies_put);
    U64("index.drops", &index->drops);
    U64("index.refused", &index->refused);
    U64("index.loaded_rows", &index->loaded_rows);
    U64("index.load_total_rows", &index->load_total_rows);
    U64("index.load_ns", &index->load_ns);
    U64("index.scanned_bytes", &index->scanned_bytes);
    U64("index.scan_total_bytes", &index->scan_total_bytes);
}

static void walk_counter(struct api_walk *walk, struct kvt_api_counter *counter, uint32_t i)
{
    if (walk->is_filling) {
        counter->name = i % 2 == 0 ? "lookups" : "evicted_blocks";
        counter->label = i % 3 == 0 ? "" : "tier=l2,reason=evicted";
    } else {
        walk_note(walk, "counter.name", counter->name, strlen(counter->name));
        walk_note(walk, "counter.label", counter->label, strlen(counter->label));
    }
    U64("counter.value", &counter->value);
}

static void walk_device_stats(struct api_walk *walk, struct kvt_api_device_stats *device)
{
    walk_text(walk, "device.path", &device->path, 200);
    walk_text(walk, "device.index_path", &device->index_path, 200);
    U32("device.health", &device->health);
    U64("device.capacity_bytes", &device->capacity_bytes);
    U64("device.used_bytes", &device->used_bytes);
    U64("device.slab_bytes", &device->slab_bytes);
    U64("device.copies", &device->copies);
    U64("device.inflight", &device->inflight);
    U64("device.read_bytes", &device->read_bytes);
    U64("device.written_bytes", &device->written_bytes);
    U64("device.outages", &device->outages);
    U64("device.out_ns", &device->out_ns);
    U64("device.life_written_bytes", &device->life_written_bytes);
    U64("device.endurance_bytes", &device->endurance_bytes);
    U64("device.dwpd_milli", &device->dwpd_milli);
    U64("device.life_left_days", &device->life_left_days);
    walk_u32(walk, "device.errors_count", &device->errors_count, 0, 20);
    if (walk->is_filling)
        device->errors = walk_take(walk, device->errors_count, sizeof(*device->errors));
    for (uint32_t i = 0; i < device->errors_count; i++)
        walk_counter(walk, &device->errors[i], i);
    walk_index_stats(walk, &device->index);
}

static void walk_l1_stats(struct api_walk *walk, struct kvt_api_l1_stats *l1)
{
    walk_text(walk, "l1.backend", &l1->backend, 10);
    walk_bool(walk, "l1.has_cuda", &l1->has_cuda);
    U32("l1.driver_version", &l1->driver_version);
    U32("l1.runtime_version", &l1->runtime_version);
    walk_bool(walk, "l1.is_host_pinned", &l1->is_host_pinned);
    walk_text(walk, "l1.pin_why", &l1->pin_why, 200);
    walk_text(walk, "l1.why", &l1->why, 200);
    walk_bool(walk, "l1.is_export_allowed", &l1->is_export_allowed);
    U64("l1.held_bytes_per_engine_max", &l1->held_bytes_per_engine_max);
    U32("l1.streams", &l1->streams);
    U64("l1.inflight_bytes_max", &l1->inflight_bytes_max);
    U64("l1.crossover_bytes", &l1->crossover_bytes);
}

static void walk_gpu_path(struct api_walk *walk, struct kvt_api_gpu_path *path, uint32_t i)
{
    if (walk->is_filling)
        path->name = i % 2 == 0 ? "to_host" : "from_engine_kernel";
    else
        walk_note(walk, "path.name", path->name, strlen(path->name));
    U64("path.bytes", &path->bytes);
    U64("path.transfers", &path->transfers);
}

static void walk_gpu_numbers(struct api_walk *walk, struct kvt_api_gpu_stats *gpu)
{
    U64("gpu.memory_bytes", &gpu->memory_bytes);
    U64("gpu.arena_bytes", &gpu->arena_bytes);
    U64("gpu.staging_bytes", &gpu->staging_bytes);
    U64("gpu.used_bytes", &gpu->used_bytes);
    U64("gpu.slab_bytes", &gpu->slab_bytes);
    U64("gpu.slots", &gpu->slots);
    U64("gpu.inflight_bytes", &gpu->inflight_bytes);
    U64("gpu.lost_ns", &gpu->lost_ns);
    U64("gpu.losses", &gpu->losses);
    U64("gpu.revivals", &gpu->revivals);
    U64("gpu.launches", &gpu->launches);
    U64("gpu.launched_jobs", &gpu->launched_jobs);
    U64("gpu.checked_bytes", &gpu->checked_bytes);
    U64("gpu.unchecked_transfers", &gpu->unchecked_transfers);
    U64("gpu.bad_checks", &gpu->bad_checks);
    U64("gpu.quantised_bytes", &gpu->quantised_bytes);
    U64("gpu.dequantised_bytes", &gpu->dequantised_bytes);
}

static void walk_gpu_stats(struct api_walk *walk, struct kvt_api_gpu_stats *gpu)
{
    U32("gpu.index", &gpu->index);
    walk_raw(walk, "gpu.uuid", gpu->uuid, sizeof(gpu->uuid));
    walk_text(walk, "gpu.name", &gpu->name, 64);
    walk_text(walk, "gpu.pci", &gpu->pci, 16);
    walk_raw(walk, "gpu.numa_node", &gpu->numa_node, sizeof(gpu->numa_node));
    U32("gpu.sm", &gpu->sm);
    U32("gpu.state", &gpu->state);
    walk_text(walk, "gpu.why", &gpu->why, 160);
    walk_bool(walk, "gpu.has_ipc", &gpu->has_ipc);
    walk_bool(walk, "gpu.is_exported", &gpu->is_exported);
    walk_bool(walk, "gpu.is_host_pinned", &gpu->is_host_pinned);
    U32("gpu.last_error", &gpu->last_error);
    walk_gpu_numbers(walk, gpu);
    walk_u32(walk, "gpu.paths_count", &gpu->paths_count, 0, 8);
    walk_u32(walk, "gpu.errors_count", &gpu->errors_count, 0, 9);
    if (walk->is_filling) {
        gpu->paths = walk_take(walk, gpu->paths_count, sizeof(*gpu->paths));
        gpu->errors = walk_take(walk, gpu->errors_count, sizeof(*gpu->errors));
    }
    for (uint32_t i = 0; i < gpu->paths_count; i++)
        walk_gpu_path(walk, &gpu->paths[i], i);
    for (uint32_t i = 0; i < gpu->errors_count; i++)
        walk_counter(walk, &gpu->errors[i], i);
}

static void walk_stats_lists(struct api_walk *walk, struct kvt_ans_stats *ans)
{
    walk_u32(walk, "tiers_count", &ans->tiers_count, 0, KVT_API_TIERS);
    walk_u32(walk, "namespaces_count", &ans->namespaces_count, 0, 8);
    walk_u32(walk, "engines_count", &ans->engines_count, 0, 8);
    walk_u32(walk, "counters_count", &ans->counters_count, 0, 100);
    walk_u32(walk, "devices_count", &ans->devices_count, 0, KVT_ZONES_MAX);
    walk_u32(walk, "gpus_count", &ans->gpus_count, 0, 8);
    if (walk->is_filling) {
        ans->namespaces = walk_take(walk, ans->namespaces_count, sizeof(*ans->namespaces));
        ans->engines = walk_take(walk, ans->engines_count, sizeof(*ans->engines));
        ans->counters = walk_take(walk, ans->counters_count, sizeof(*ans->counters));
        ans->devices = walk_take(walk, ans->devices_count, sizeof(*ans->devices));
        ans->gpus = walk_take(walk, ans->gpus_count, sizeof(*ans->gpus));
    }
    for (uint32_t i = 0; i < ans->tiers_count; i++)
        walk_tier_stats(walk, &ans->tiers[i]);
    for (uint32_t i = 0; i < ans->namespaces_count; i++)
        walk_ns_stats(walk, &ans->namespaces[i]);
    for (uint32_t i = 0; i < ans->engines_count; i++)
        walk_engine_stats(walk, &ans->engines[i]);
    for (uint32_t i = 0; i < ans->devices_count; i++)
        walk_device_stats(walk, &ans->devices[i]);
    for (uint32_t i = 0; i < ans->gpus_count; i++)
        walk_gpu_stats(walk, &ans->gpus[i]);
    for (uint32_t i = 0; i < ans->counters_count; i++)
        walk_counter(walk, &ans->counters[i], i);
}

static void walk_ans_stats(struct api_walk *walk, struct kvt_ans_stats *ans)
{
    U64("boot_id", &ans->boot_id);
    U64("uptime_ns", &ans->uptime_ns);
    walk_text(walk, "version", &ans->version, 100);
    U64("index_memory_bytes", &ans->index_memory_bytes);
    U64("index_used_bytes", &ans->index_used_bytes);
    U64("blocks", &ans->blocks);
    U64("nodes", &ans->nodes);
    U64("leases", &ans->leases);
    U64("tickets", &ans->tickets);
    U64("reserved_copies", &ans->reserved_copies);
    U64("pins", &ans->pins);
    U64("sessions", &ans->sessions);
    U64("ops_running", &ans->ops_running);
    walk_l1_stats(walk, &ans->l1);
    walk_stats_lists(walk, ans);
}

static void walk_ans_dump(struct api_walk *walk, struct kvt_ans_dump *ans)
{
    walk_u32(walk, "nodes_count", &ans->nodes_count, 0, walk->size == 0 ? 10 : 4096);
    if (walk->is_filling)
        ans->nodes = walk_take(walk, ans->nodes_count, sizeof(*ans->nodes));
    for (uint32_t i = 0; i < ans->nodes_count; i++) {
        struct kvt_api_dump_node *node = &ans->nodes[i];

        U32("ns_idx", &node->ns_idx);
        walk_blob(walk, "salt", &node->salt, KVT_ROOT_TAG_BYTES_MAX);
        walk_blob(walk, "lora", &node->lora, KVT_ROOT_TAG_BYTES_MAX);
        U32("depth_nodes", &node->depth_nodes);
        U64("first_block_idx", &node->first_block_idx);
        U32("blocks_count", &node->blocks_count);
        U32("children_count", &node->children_count);
        U32("node.leases", &node->leases);
        walk_raw(walk, "first_tokens", node->first_tokens, sizeof(node->first_tokens));
        walk_u32(walk, "node.components", &node->components_count, 0, KVT_COMPONENTS_MAX);
        walk_raw(walk, "blocks_at", node->blocks_at,
                 node->components_count * sizeof(node->blocks_at[0]));
    }
    U64("resume", &ans->resume);
}

static void walk_ans_attach(struct api_walk *walk, struct kvt_ans_attach *ans)
{
    walk_handle(walk, "session", &ans->session);
    U32("api_version", &ans->api_version);
    U64("epoch", &ans->epoch);
    U64("lease_ns_max", &ans->lease_ns_max);
    U64("ticket_ns_max", &ans->ticket_ns_max);
}

static void walk_ans_maintain(struct api_walk *walk, struct kvt_ans_maintain *ans)
{
    walk_bool(walk, "drain.is_running", &ans->drain.is_running);
    U64("drain.copies_left", &ans->drain.copies_left);
    U64("drain.copies_written", &ans->drain.copies_written);
    U64("drain.bytes_written", &ans->drain.bytes_written);
    U64("drain.copies_failed", &ans->drain.copies_failed);
    U64("scrub.rate_bytes_per_s", &ans->scrub.rate_bytes_per_s);
    if (walk->is_filling) /* one says the other */
        ans->scrub.is_running = ans->scrub.rate_bytes_per_s != 0;
    else
        walk_note(walk, "scrub.is_running", &ans->scrub.is_running, 1);
    U64("scrub.checked_copies", &ans->scrub.checked_copies);
    U64("scrub.checked_bytes", &ans->scrub.checked_bytes);
    U64("scrub.bad_copies", &ans->scrub.bad_copies);
    U64("scrub.skipped_copies", &ans->scrub.skipped_copies);
    U64("scrub.rounds", &ans->scrub.rounds);
}

void walk_answer(struct api_walk *walk, struct kvt_op *op)
{
    switch (op->kind) {
    case KVT_OP_OPEN_NAMESPACE:
        walk_handle(walk, "ns", &op->ans.open_namespace.ns);
        walk_raw(walk, "fingerprint", op->ans.open_namespace.fingerprint, KVT_FINGERPRINT_BYTES);
        U64("epoch", &op->ans.open_namespace.epoch);
        walk_bool(walk, "was_known", &op->ans.open_namespace.was_known);
        walk_u32(walk, "components_count", &op->ans.open_namespace.components_count, 0,
                 KVT_COMPONENTS_MAX);
        for (uint32_t i = 0; i < op->ans.open_namespace.components_count; i++)
            U64("stored_bytes", &op->ans.open_namespace.stored_bytes[i]);
        break;
    case KVT_OP_ATTACH:
        walk_ans_attach(walk, &op->ans.attach);
        break;
    case KVT_OP_LOOKUP:
        walk_ans_lookup(walk, &op->ans.lookup);
        break;
    case KVT_OP_PROMOTE:
        walk_ans_promote(walk, op);
        break;
    case KVT_OP_RESERVE:
        walk_ans_reserve(walk, op);
        break;
    case KVT_OP_DEMOTE:
        walk_results(walk, &op->ans.demote.moves, op->req.demote.moves_count, op->req.demote.moves);
        U64("moved_bytes", &op->ans.demote.moved_bytes);
        walk_bool(walk, "is_quiesced", &op->ans.demote.is_quiesced);
        walk_bool(walk, "is_durable", &op->ans.demote.is_durable);
        break;
    case KVT_OP_EVICT:
        U64("evicted_blocks", &op->ans.evict.evicted_blocks);
        break;
    case KVT_OP_RESET:
        U64("epoch", &op->ans.reset.epoch);
        break;
    case KVT_OP_STATS:
        walk_ans_stats(walk, &op->ans.stats);
        break;
    case KVT_OP_DUMP:
        walk_ans_dump(walk, &op->ans.dump);
        break;
    case KVT_OP_HEALTH:
        walk_bool(walk, "is_serving", &op->ans.health.is_serving);
        break;
    case KVT_OP_MAINTAIN:
        walk_ans_maintain(walk, &op->ans.maintain);
        break;
    default: /* no fields */
        break;
    }
}
