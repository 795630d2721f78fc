/* L1 and its GPUs in an answer to Stats, both directions. */
#include "proto/codec/wire.h"

#include <string.h>

#define PATHS_MAX 32u

/* ---- encode -----------------------------------------------------------------------------------
 */

static bool put_paths(struct kvt_op *op, const struct kvt_api_gpu_stats *gpu,
                      Kvtier__V1__GpuStats *view)
{
    Kvtier__V1__GpuPath *views = kvt_arena_array(op->arena, gpu->paths_count, sizeof(*views));

    view->paths = kvt_arena_array(op->arena, gpu->paths_count, sizeof(*view->paths));
    if (views == NULL || view->paths == NULL)
        return false;
    for (uint32_t i = 0; i < gpu->paths_count; i++) {
        const struct kvt_api_gpu_path *path = &gpu->paths[i];

        kvtier__v1__gpu_path__init(&views[i]);
        views[i].name = kvt_codec_put_bytes(path->name, strlen(path->name));
        views[i].bytes = path->bytes;
        views[i].transfers = path->transfers;
        view->paths[i] = &views[i];
    }
    view->n_paths = gpu->paths_count;
    return true;
}

static bool put_gpu(struct kvt_op *op, const struct kvt_api_gpu_stats *gpu,
                    Kvtier__V1__GpuStats *view)
{
    kvtier__v1__gpu_stats__init(view);
    view->index = gpu->index;
    view->uuid = kvt_codec_put_bytes(gpu->uuid, KVT_CUDA_UUID_BYTES);
    view->name = kvt_codec_put_text(&gpu->name);
    view->pci = kvt_codec_put_text(&gpu->pci);
    view->numa_node = gpu->numa_node;
    view->sm = gpu->sm;
    view->memory_bytes = gpu->memory_bytes;
    view->state = gpu->state;
    view->why = kvt_codec_put_text(&gpu->why);
    view->has_ipc = gpu->has_ipc;
    view->is_exported = gpu->is_exported;
    view->is_host_pinned = gpu->is_host_pinned;
    view->arena_bytes = gpu->arena_bytes;
    view->staging_bytes = gpu->staging_bytes;
    view->used_bytes = gpu->used_bytes;
    view->slab_bytes = gpu->slab_bytes;
    view->slots = gpu->slots;
    view->inflight_bytes = gpu->inflight_bytes;
    view->lost_ns = gpu->lost_ns;
    view->losses = gpu->losses;
    view->revivals = gpu->revivals;
    view->last_error = gpu->last_error;
    view->launches = gpu->launches;
    view->launched_jobs = gpu->launched_jobs;
    view->checked_bytes = gpu->checked_bytes;
    view->unchecked_transfers = gpu->unchecked_transfers;
    view->bad_checks = gpu->bad_checks;
    view->quantised_bytes = gpu->quantised_bytes;
    view->dequantised_bytes = gpu->dequantised_bytes;
    view->n_errors = gpu->errors_count;
    view->errors = kvt_codec_put_counters(op, gpu->errors, gpu->errors_count);
    return view->errors != NULL && put_paths(op, gpu, view);
}

static bool put_l1(struct kvt_op *op, Kvtier__V1__StatsAnswer *out)
{
    const struct kvt_api_l1_stats *l1 = &op->ans.stats.l1;
    Kvtier__V1__L1Stats *view = kvt_arena_alloc(op->arena, sizeof(*view));

    if (view == NULL)
        return false;
    kvtier__v1__l1_stats__init(view);
    view->backend = kvt_codec_put_text(&l1->backend);
    view->has_cuda = l1->has_cuda;
    view->driver_version = l1->driver_version;
    view->runtime_version = l1->runtime_version;
    view->is_host_pinned = l1->is_host_pinned;
    view->pin_why = kvt_codec_put_text(&l1->pin_why);
    view->why = kvt_codec_put_text(&l1->why);
    view->is_export_allowed = l1->is_export_allowed;
    view->held_bytes_per_engine_max = l1->held_bytes_per_engine_max;
    view->streams = l1->streams;
    view->inflight_bytes_max = l1->inflight_bytes_max;
    view->crossover_bytes = l1->crossover_bytes;
    out->l1 = view;
    return true;
}

bool kvt_codec_put_l1(struct kvt_op *op, Kvtier__V1__StatsAnswer *out)
{
    const struct kvt_ans_stats *ans = &op->ans.stats;
    Kvtier__V1__GpuStats *views = kvt_arena_array(op->arena, ans->gpus_count, sizeof(*views));

    KVT_ASSERT(ans->gpus_count <= KVT_API_GPUS_MAX);
    out->gpus = kvt_arena_array(op->arena, ans->gpus_count, sizeof(*out->gpus));
    if (views == NULL || out->gpus == NULL || !put_l1(op, out))
        return false;
    for (uint32_t i = 0; i < ans->gpus_count; i++) {
        if (!put_gpu(op, &ans->gpus[i], &views[i]))
            return false;
        out->gpus[i] = &views[i];
    }
    out->n_gpus = ans->gpus_count;
    return true;
}

/* ---- decode -----------------------------------------------------------------------------------
 */

static int take_paths(struct kvt_op *op, const Kvtier__V1__GpuStats *in,
                      struct kvt_api_gpu_stats *ret_gpu)
{
    KVT_CODEC_TRY(kvt_codec_take_count(op, in->n_paths, "gpus.paths (count)", 0, PATHS_MAX));
    ret_gpu->paths = kvt_arena_array(op->arena, in->n_paths, sizeof(*ret_gpu->paths));
    if (ret_gpu->paths == NULL)
        return kvt_codec_no_memory(op);
    for (size_t i = 0; i < in->n_paths; i++) {
        KVT_CODEC_TRY(kvt_codec_take_string(op, &in->paths[i]->name, "gpus.paths.name",
                                            &ret_gpu->paths[i].name));
        ret_gpu->paths[i].bytes = in->paths[i]->bytes;
        ret_gpu->paths[i].transfers = in->paths[i]->transfers;
    }
    ret_gpu->paths_count = (uint32_t)in->n_paths;
    return 0;
}

static int take_gpu_texts(struct kvt_op *op, const Kvtier__V1__GpuStats *in,
                          struct kvt_api_gpu_stats *ret_gpu)
{
    KVT_CODEC_TRY(
        kvt_codec_take_fixed(op, &in->uuid, "gpus.uuid", KVT_CUDA_UUID_BYTES, ret_gpu->uuid));
    KVT_CODEC_TRY(
        kvt_codec_take_text(op, &in->name, "gpus.name", KVT_MODEL_TEXT_BYTES_MAX, &ret_gpu->name));
    KVT_CODEC_TRY(
        kvt_codec_take_text(op, &in->pci, "gpus.pci", KVT_MODEL_TEXT_BYTES_MAX, &ret_gpu->pci));
    return kvt_codec_take_text(op, &in->why, "gpus.why", KVT_MODEL_TEXT_BYTES_MAX, &ret_gpu->why);
}

static int take_gpu(struct kvt_op *op, const Kvtier__V1__GpuStats *in,
                    struct kvt_api_gpu_stats *ret_gpu)
{
    *ret_gpu = (struct kvt_api_gpu_stats){
        .index = in->index,
        .numa_node = in->numa_node,
        .sm = in->sm,
        .memory_bytes = in->memory_bytes,
        .state = in->state,
        .has_ipc = in->has_ipc,
        .is_exported = in->is_exported,
        .is_host_pinned = in->is_host_pinned,
        .arena_bytes = in->arena_bytes,
        .staging_bytes = in->staging_bytes,
        .used_bytes = in->used_bytes,
        .slab_bytes = in->slab_bytes,
        .slots = in->slots,
        .inflight_bytes = in->inflight_bytes,
        .lost_ns = in->lost_ns,
        .losses = in->losses,
        .revivals = in->revivals,
        .last_error = in->last_error,
        .launches = in->launches,
        .launched_jobs = in->launched_jobs,
        .checked_bytes = in->checked_bytes,
        .unchecked_transfers = in->unchecked_transfers,
        .bad_checks = in->bad_checks,
        .quantised_bytes = in->quantised_bytes,
        .dequantised_bytes = in->dequantised_bytes,
    };
    KVT_CODEC_TRY(take_gpu_texts(op, in, ret_gpu));
    KVT_CODEC_TRY(kvt_codec_take_counters(op, in->n_errors, in->errors, &ret_gpu->errors));
    ret_gpu->errors_count = (uint32_t)in->n_errors;
    return take_paths(op, in, ret_gpu);
}

/* A daemon that is older says nothing of L1: it is as if it were off. */
static int take_l1(struct kvt_op *op, const Kvtier__V1__L1Stats *in,
                   struct kvt_api_l1_stats *ret_l1)
{
    *ret_l1 = (struct kvt_api_l1_stats){.has_cuda = false};
    if (in == NULL)
        return 0;
    ret_l1->has_cuda = in->has_cuda;
    ret_l1->driver_version = in->driver_version;
    ret_l1->runtime_version = in->runtime_version;
    ret_l1->is_host_pinned = in->is_host_pinned;
    ret_l1->is_export_allowed = in->is_export_allowed;
    ret_l1->held_bytes_per_engine_max = in->held_bytes_per_engine_max;
    ret_l1->streams = in->streams;
    ret_l1->inflight_bytes_max = in->inflight_bytes_max;
    ret_l1->crossover_bytes = in->crossover_bytes;
    KVT_CODEC_TRY(kvt_codec_take_text(op, &in->backend, "l1.backend", KVT_MODEL_TEXT_BYTES_MAX,
                                      &ret_l1->backend));
    KVT_CODEC_TRY(kvt_codec_take_text(op, &in->pin_why, "l1.pin_why", KVT_MODEL_TEXT_BYTES_MAX,
                                      &ret_l1->pin_why));
    return kvt_codec_take_text(op, &in->why, "l1.why", KVT_MODEL_TEXT_BYTES_MAX, &ret_l1->why);
}

int kvt_codec_take_l1(struct kvt_op *op, const Kvtier__V1__StatsAnswer *in)
{
    struct kvt_ans_stats *ans = &op->ans.stats;

    KVT_CODEC_TRY(kvt_codec_take_count(op, in->n_gpus, "gpus (count)", 0, KVT_API_GPUS_MAX));
    KVT_CODEC_TRY(take_l1(op, in->l1, &ans->l1));
    ans->gpus = kvt_arena_array(op->arena, in->n_gpus, sizeof(*ans->gpus));
    if (ans->gpus == NULL)
        return kvt_codec_no_memory(op);
    for (size_t i = 0; i < in->n_gpus; i++)
        KVT_CODEC_TRY(take_gpu(op, in->gpus[i], &ans->gpus[i]));
    ans->gpus_count = (uint32_t)in->n_gpus;
    return 0;
}
