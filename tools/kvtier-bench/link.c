/* What is refused now and may work with the next daemon is told apart from what never will. */
#include "tools/kvtier-bench/link.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "daemon/base/alloc.h"

#define ATTACH_ARENA_BYTES (32u << 20)
#define JOIN_NS_MIN (10 * KVT_NS_PER_S) /* a short deadline is meant for what engines wait for */

struct kvt_text bench_text(const char *text)
{
    return (struct kvt_text){text, (uint32_t)strlen(text)};
}

struct call { /* one call of joining */
    struct kvt_arena arena;
    struct kvt_op *op;
};

static int call_init(struct bench_link *link, struct call *call, enum kvt_op_kind kind)
{
    int r = kvt_arena_init(&call->arena, ATTACH_ARENA_BYTES, 0);

    call->op = kvt_alloc_zeroed(1, sizeof(*call->op));
    if (r < 0 || call->op == NULL) {
        link->exit_status = 1;
        (void)snprintf(link->why, sizeof(link->why), "out of memory");
        return kvt_trace(-ENOMEM);
    }
    call->op->kind = kind;
    call->op->arena = &call->arena;
    return 0;
}

static void call_deinit(struct call *call)
{
    kvt_arena_deinit(&call->arena);
    kvt_free(call->op);
}

static int refused(struct bench_link *link, const struct kvt_op *op, const char *what)
{
    bool may_come_back = op->code == KVT_CODE_UNAVAILABLE || op->code == KVT_CODE_NOT_FOUND ||
                         op->code == KVT_CODE_RESOURCE_EXHAUSTED ||
                         op->code == KVT_CODE_DEADLINE_EXCEEDED ||
                         op->code == KVT_CODE_FAILED_PRECONDITION;

    (void)snprintf(link->why, sizeof(link->why), "%s: %.200s (code %d)", what, op->message,
                   (int)op->code);
    link->exit_status = may_come_back ? KVT_BENCH_EXIT_AGAIN : 1;
    return -EPROTO;
}

static struct kvt_api_quant quant_of(const struct kvt_quant_spec *spec)
{
    return (struct kvt_api_quant){.kind = spec->kind,
                                  .elem = spec->elem,
                                  .order = spec->order,
                                  .plane_tokens = spec->plane_tokens,
                                  .heads = spec->heads,
                                  .head_dim = spec->head_dim};
}

static int open_namespace(struct bench_link *link)
{
    const struct kvt_model *model = link->model;
    struct call call = {.arena = KVT_ARENA_NULL};
    int r = call_init(link, &call, KVT_OP_OPEN_NAMESPACE);
    struct kvt_req_open_namespace *req;
    struct kvt_text tags[2];
    char engine_block[48], layers[48];

    if (r < 0)
        return r;
    (void)snprintf(engine_block, sizeof(engine_block), "engine_block_tokens=%u",
                   model->engine_block_tokens);
    (void)snprintf(layers, sizeof(layers), "layers=%u", model->layers);
    tags[0] = bench_text(engine_block);
    tags[1] = bench_text(layers);
    req = &call.op->req.open_namespace;
    req->block_tokens = model->block_tokens;
    req->ranks = model->ranks;
    req->components_count = model->components_count;
    for (uint32_t c = 0; c < model->components_count; c++)
        req->components[c] = (struct kvt_api_component){
            .kind = (uint32_t)model->components[c].kind,
            .window_tokens = model->components[c].window_tokens,
            .bytes_per_block = model->components[c].block_bytes,
            .is_replicated = model->components[c].is_replicated,
            .quant = quant_of(&model->components[c].quant),
            .name = bench_text(model->components[c].name),
        };
    req->model = bench_text(link->options->namespace_name);
    req->revision = bench_text(model->preset);
    req->dtype = bench_text("oracle");
    req->layout = bench_text("pieces");
    req->tags_count = 2;
    req->tags = tags;
    kvt_client_call(link->client, call.op);
    if (call.op->code != KVT_CODE_OK) {
        r = refused(link, call.op, "OpenNamespace");
    } else {
        link->ns = call.op->ans.open_namespace.ns;
        memcpy(link->fingerprint, call.op->ans.open_namespace.fingerprint, KVT_FINGERPRINT_BYTES);
    }
    call_deinit(&call);
    return r;
}

int bench_link_open(struct bench_link *link)
{
    struct kvt_client_config config = {.socket_path = link->options->socket_path,
                                       .deadline_ns =
                                           KVT_MAX(link->options->deadline_ns, JOIN_NS_MIN)};
    int r = kvt_client_open(&link->client, &config);

    if (r < 0) {
        (void)snprintf(link->why, sizeof(link->why),
                       "no daemon at %.150s (%s): is kvtierd running?", config.socket_path,
                       strerror(-r));
        link->exit_status = KVT_BENCH_EXIT_AGAIN;
        return kvt_trace(r);
    }
    return open_namespace(link);
}

void bench_link_close(struct bench_link *link)
{
    link->client = kvt_client_close(link->client);
}

/* The layouts of every component in the one region of a rank, in @arena. NULL: no room. */
static struct kvt_api_layout *make_layouts(const struct bench_link *link, struct kvt_arena *arena)
{
    const struct kvt_model *model = link->model;
    struct kvt_api_layout *layouts =
        kvt_arena_array(arena, model->components_count, sizeof(*layouts));

    for (uint32_t c = 0; c < model->components_count && layouts != NULL; c++) {
        const struct kvt_model_component *component = &model->components[c];
        struct kvt_api_piece *pieces =
            kvt_arena_array(arena, component->pieces_count, sizeof(*pieces));

        if (pieces == NULL)
            return NULL;
        for (uint32_t p = 0; p < component->pieces_count; p++)
            pieces[p] = (struct kvt_api_piece){
                .bytes = component->piece_bytes,
                .offset_bytes = kvt_kv_memory_piece_offset(link->memory, c, p),
                .stride_bytes = link->memory->page_bytes,
            };
        layouts[c] = (struct kvt_api_layout){
            .component = c,
            .engine_blocks_per_block = component->engine_blocks_per_block,
            .pieces_count = component->pieces_count,
            .pieces = pieces,
        };
    }
    return layouts;
}

/* Where the memory of a rank is. */
static int say_memory(struct bench_link *link, uint32_t rank, struct kvt_api_region *region,
                      char *why, size_t why_bytes)
{
    if (link->gpu == NULL)
        return kvt_client_send_region(link->client, link->memory->memfds[rank], link->memory->bytes,
                                      region->token, why, why_bytes);
    region->kind = KVT_REGION_CUDA_IPC;
    kvt_gpu_pool_handle(link->gpu, rank, region->cuda_ipc.handle, region->cuda_ipc.device_uuid);
    return 0;
}

static int add_region(struct bench_link *link, struct call *call, uint32_t rank)
{
    struct kvt_req_attach *req = &call->op->req.attach;
    char why[160] = "";
    int r = say_memory(link, rank, &req->regions[0], why, sizeof(why));

    req->layouts = make_layouts(link, &call->arena);
    if (r == 0 && req->layouts == NULL)
        r = -ENOMEM;
    if (r < 0) {
        (void)snprintf(link->why, sizeof(link->why), "region: %s (%s)", why, strerror(-r));
        link->exit_status = r == -EINVAL || r == -ENOMEM ? 1 : KVT_BENCH_EXIT_AGAIN;
        return kvt_trace(r);
    }
    req->regions_count = 1;
    req->regions[0].bytes = link->memory->bytes;
    req->layouts_count = link->model->components_count;
    return 0;
}

int bench_link_attach(struct bench_link *link, const uint8_t engine_id[KVT_ENGINE_ID_BYTES],
                      uint32_t rank, struct bench_seat *ret_seat)
{
    struct call call = {.arena = KVT_ARENA_NULL};
    int r = call_init(link, &call, KVT_OP_ATTACH);
    struct kvt_req_attach *req;
    struct kvt_session *session;
    char name[64];

    if (r < 0)
        return r;
    (void)snprintf(name, sizeof(name), "kvtier-bench pid %d", (int)getpid());
    req = &call.op->req.attach;
    req->ns = link->ns;
    memcpy(req->engine_id, engine_id, KVT_ENGINE_ID_BYTES);
    req->is_scheduler = rank == KVT_RANK_NONE;
    req->rank = rank;
    req->api_version = 1;
    req->name = bench_text(name);
    if (rank != KVT_RANK_NONE)
        r = add_region(link, &call, rank);
    if (r == 0) {
        session = kvt_client_attach(link->client, call.op);
        if (session == NULL)
            r = refused(link, call.op, "Attach");
        else
            *ret_seat = (struct bench_seat){session, call.op->ans.attach.session};
    }
    call_deinit(&call);
    return r;
}
