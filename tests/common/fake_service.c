#include "tests/common/fake_service.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "daemon/base/clock.h"
#include "proto/server/internal.h"
#include "tests/common/api_walk.h"

void fake_answer(struct fake_service *fake, struct kvt_op *op)
{
    if (op->kind == KVT_OP_ATTACH && atomic_load(&fake->refuses_attach)) {
        kvt_op_fail(op, KVT_CODE_FAILED_PRECONDITION, "attach is refused");
    } else if (op->kind != KVT_OP_DETACH) {
        op->code = KVT_CODE_OK;
        api_fill_answer(op, atomic_load(&fake->answer_seed), atomic_load(&fake->answer_size));
    }
    if (op->kind == KVT_OP_HEALTH)
        op->ans.health.is_serving = !atomic_load(&fake->is_unhealthy);
    if (op->kind == KVT_OP_ATTACH) {
        atomic_store(&fake->last_sink, op->req.attach.sink);
        for (uint32_t i = 0; i < op->req.attach.regions_count; i++)
            if (op->req.attach.regions[i].mapping != NULL)
                atomic_fetch_add(&fake->regions_closed, 1);
    }
    atomic_fetch_sub(&fake->running, 1);
    op->done(op);
}

void fake_hold(struct fake_service *fake, struct kvt_op *op)
{
    unsigned count = atomic_load(&fake->held_count);

    KVT_ASSERT(count < FAKE_HELD_MAX);
    fake->held[count] = op;
    atomic_store(&fake->held_count, count + 1);
}

static void serve(struct fake_service *fake, struct kvt_op *op)
{
    fake_handle_fn handle = atomic_load(&fake->handle);

    if (handle != NULL && handle(fake, op))
        return;
    if (atomic_load(&fake->is_holding) && op->kind != KVT_OP_DETACH && op->kind != KVT_OP_HEALTH)
        fake_hold(fake, op);
    else
        fake_answer(fake, op);
}

/* Held ops that were cancelled, overdue, or let go. */
static void look_at_held(struct fake_service *fake)
{
    bool is_released = atomic_exchange(&fake->wants_release, false);
    uint64_t now_ns = kvt_clock_mono_ns();
    unsigned kept = 0, count = atomic_load(&fake->held_count);

    for (unsigned i = 0; i < count; i++) {
        struct kvt_op *op = fake->held[i];

        if (atomic_load(&op->is_cancelled)) {
            kvt_op_fail(op, KVT_CODE_CANCELLED, "cancelled");
            atomic_fetch_sub(&fake->running, 1);
            op->done(op);
        } else if (now_ns >= op->deadline_ns) {
            kvt_op_fail(op, KVT_CODE_DEADLINE_EXCEEDED, "the service's deadline");
            atomic_fetch_sub(&fake->running, 1);
            op->done(op);
        } else if (is_released) {
            fake_answer(fake, op);
        } else {
            fake->held[kept++] = op;
        }
    }
    atomic_store(&fake->held_count, kept);
}

static void *fake_main(void *arg)
{
    struct fake_service *fake = arg;

    for (;;) {
        struct kvt_op *op = kvt_ring_take(&fake->ring);

        if (op != NULL) {
            serve(fake, op);
            continue;
        }
        look_at_held(fake);
        if (atomic_load(&fake->is_stopping))
            return NULL;
        kvt_doorbell_arm(&fake->bell);
        if (kvt_ring_is_empty(&fake->ring))
            kvt_doorbell_wait(&fake->bell, 20 * KVT_NS_PER_MS);
        else
            kvt_doorbell_disarm(&fake->bell);
    }
}

static int fake_submit(void *ctx, struct kvt_op *op)
{
    struct fake_service *fake = ctx;

    if (op->kind != KVT_OP_DETACH && atomic_load(&fake->is_full))
        return KVT_SERVICE_E_FULL;
    atomic_fetch_add(&fake->submitted[op->kind], 1);
    atomic_fetch_add(&fake->running, 1);
    if (atomic_load(&fake->is_inline)) {
        fake_answer(fake, op);
        return 0;
    }
    if (kvt_ring_put(&fake->ring, op) != 0)
        abort();
    kvt_doorbell_ring(&fake->bell);
    return 0;
}

static void fake_cancel(void *ctx, struct kvt_op *op)
{
    struct fake_service *fake = ctx;

    (void)op;
    atomic_fetch_add(&fake->cancels, 1);
    kvt_doorbell_ring(&fake->bell);
}

static int fake_region_open(void *ctx, int memfd, uint64_t bytes, void **ret_mapping,
                            const char **ret_why)
{
    struct fake_service *fake = ctx;
    int seals = fcntl(memfd, F_GET_SEALS);
    struct stat st;

    if (seals < 0 || (seals & (F_SEAL_SHRINK | F_SEAL_GROW)) != (F_SEAL_SHRINK | F_SEAL_GROW)) {
        *ret_why = "the descriptor must be a memfd sealed with F_SEAL_SHRINK and F_SEAL_GROW";
        return 1;
    }
    if (fstat(memfd, &st) < 0 || (uint64_t)st.st_size < bytes) {
        *ret_why = "the memfd is smaller than declared";
        return 1;
    }
    *ret_mapping = (void *)(uintptr_t)(0x1000 + atomic_fetch_add(&fake->regions_open, 1));
    return 0;
}

static void fake_region_close(void *ctx, void *mapping)
{
    struct fake_service *fake = ctx;

    KVT_ASSERT(mapping != NULL);
    atomic_fetch_add(&fake->regions_closed, 1);
}

void fake_start(struct fake_service *fake)
{
    fake->table = (struct kvt_service){.ctx = fake,
                                       .submit = fake_submit,
                                       .cancel = fake_cancel,
                                       .region_open = fake_region_open,
                                       .region_close = fake_region_close};
    if (kvt_ring_init(&fake->ring, 8192) != 0 || kvt_doorbell_init(&fake->bell) != 0 ||
        pthread_create(&fake->thread, NULL, fake_main, fake) != 0)
        abort();
}

void fake_stop(struct fake_service *fake)
{
    atomic_store(&fake->is_stopping, true);
    kvt_doorbell_ring(&fake->bell);
    (void)pthread_join(fake->thread, NULL);
    kvt_doorbell_deinit(&fake->bell);
    kvt_ring_deinit(&fake->ring);
}

void fake_release(struct fake_service *fake)
{
    atomic_store(&fake->wants_release, true);
    kvt_doorbell_ring(&fake->bell);
}

void fake_server_start(struct fake_server *fake, struct kvt_server_config config)
{
    int pid = 0;

    memset(fake, 0, sizeof(*fake));
    (void)snprintf(fake->dir, sizeof(fake->dir), "/tmp/kvt-proto-XXXXXX");
    if (mkdtemp(fake->dir) == NULL)
        abort();
    (void)snprintf(fake->path, sizeof(fake->path), "%s/main", fake->dir);
    (void)snprintf(fake->admin_path, sizeof(fake->admin_path), "%s/admin", fake->dir);
    fake_start(&fake->service);
    config.socket_path = fake->path;
    config.admin_socket_path = fake->admin_path;
    config.service = &fake->service.table;
    config.boot_id = 1;
    config.socket_mode = config.socket_mode != 0 ? config.socket_mode : 0660;
    config.admin_socket_mode = 0600;
    config.threads = config.threads != 0 ? config.threads : 1;
    config.ops_max = config.ops_max != 0 ? config.ops_max : 64;
    config.connections_max = config.connections_max != 0 ? config.connections_max : 64;
    config.streams_max = config.streams_max != 0 ? config.streams_max : 64;
    if (config.deadline_ns_max == 0)
        config.deadline_ns_max = 60 * KVT_NS_PER_S;
    if (kvt_server_open_bench(&fake->server, &config, &pid) != 0)
        abort();
}

void fake_server_stop(struct fake_server *fake, uint64_t grace_ns)
{
    char path[128];

    kvt_server_stop(fake->server, grace_ns);
    fake->server = kvt_server_close(fake->server);
    fake_stop(&fake->service);
    KVT_ASSERT(atomic_load(&fake->service.running) == 0);
    (void)snprintf(path, sizeof(path), "%s.lock", fake->path);
    (void)unlink(path);
    (void)snprintf(path, sizeof(path), "%s.lock", fake->admin_path);
    (void)unlink(path);
    if (rmdir(fake->dir) < 0) /* a socket was left behind */
        abort();
}

void fake_op_init(struct kvt_op *op, struct kvt_arena *arena, enum kvt_op_kind kind)
{
    memset(op, 0, sizeof(*op));
    op->kind = kind;
    op->arena = arena;
}

bool fake_wait(atomic_uint *value, unsigned least)
{
    uint64_t until_ns = kvt_clock_mono_ns() + 10 * KVT_NS_PER_S;

    while (atomic_load(value) < least) {
        if (kvt_clock_mono_ns() > until_ns)
            return false;
        (void)usleep(1000);
    }
    return true;
}
