/* All processes of the engine share one page, mapped before they are forked: the maker writes the
 * handles and says that they are there. */
#include "tools/kvtier-bench/gpu/gpu_pool.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "daemon/base/alloc.h"
#include "daemon/base/clock.h"
#include "tiers/device/cuda_calls.h"

#define MADE_NS_MAX (60u * KVT_NS_PER_S) /* then whoever should make it is gone */
#define COPY_NS_MAX (30u * KVT_NS_PER_S)
/* Small allocations share a block of the driver's with others, and a handle is of the whole. */
#define ALLOCATION_ALIGN_BYTES (2u << 20)

enum state { STATE_NONE = 0, STATE_MADE = 1, STATE_FAILED = 2 };

struct shared {
    _Atomic uint32_t state;
    uint32_t ranks;
    uint64_t bytes_each;
    uint8_t uuid[KVT_CUDA_UUID_BYTES];
    uint8_t handles[KVT_RANKS_MAX][KVT_CUDA_IPC_HANDLE_BYTES];
};

struct kvt_gpu_pool {
    struct kvt_kv_store store;
    const struct kvt_cuda_calls *calls;
    int device;
    struct shared *shared;
    pthread_mutex_t lock; /* covers the rest */
    bool is_maker, is_said;
    uint64_t addresses[KVT_RANKS_MAX];
    void *stream, *event, *pinned;
    uint64_t pinned_bytes;
    char why[160];
};

static struct kvt_gpu_pool *pool_of(struct kvt_kv_store *store)
{
    return KVT_CONTAINER_OF(store, struct kvt_gpu_pool, store);
}

/* 0, or -EIO with why. */
static int check(struct kvt_gpu_pool *pool, int error, const char *what)
{
    if (error == KVT_CUDA_OK)
        return 0;
    if (pool->why[0] == '\0')
        (void)snprintf(pool->why, sizeof(pool->why), "GPU %d: %s: CUDA error %d: %s", pool->device,
                       what, error, pool->calls->error_name(error));
    return kvt_trace(-EIO);
}

static int start(struct kvt_gpu_pool *pool)
{
    int version = 0, r;

    if (pool->calls->driver_version(&version) != KVT_CUDA_OK || version == 0) {
        (void)snprintf(pool->why, sizeof(pool->why), "no NVIDIA driver");
        return kvt_trace(-ENODEV);
    }
    r = check(pool, pool->calls->set_device(pool->device), "set_device");
    if (r == 0)
        r = check(pool, pool->calls->stream_new(&pool->stream), "stream_new");
    if (r == 0)
        r = check(pool, pool->calls->event_new(&pool->event), "event_new");
    return r;
}

static int make_ranks(struct kvt_gpu_pool *pool)
{
    struct shared *shared = pool->shared;
    uint64_t bytes = kvt_round_up(shared->bytes_each, ALLOCATION_ALIGN_BYTES);
    struct kvt_cuda_info info;
    int r = check(pool, pool->calls->device_info(pool->device, &info), "device_info");

    if (r == 0)
        memcpy(shared->uuid, info.uuid, sizeof(shared->uuid));
    for (uint32_t rank = 0; rank < shared->ranks && r == 0; rank++) {
        r = check(pool, pool->calls->alloc(bytes, &pool->addresses[rank]), "alloc");
        if (r == 0)
            r = check(pool, pool->calls->ipc_export(pool->addresses[rank], shared->handles[rank]),
                      "ipc_export");
    }
    return r;
}

static int make(struct kvt_kv_store *store, uint32_t ranks, uint64_t bytes_each)
{
    struct kvt_gpu_pool *pool = pool_of(store);
    int r;

    KVT_ASSERT(ranks <= KVT_RANKS_MAX && !pool->is_maker);
    pool->is_maker = true;
    pool->shared->ranks = ranks;
    pool->shared->bytes_each = bytes_each;
    r = start(pool);
    if (r == 0)
        r = make_ranks(pool);
    atomic_store_explicit(&pool->shared->state, r == 0 ? STATE_MADE : STATE_FAILED,
                          memory_order_release);
    return r;
}

static int join(struct kvt_kv_store *store)
{
    const struct timespec pause = {.tv_nsec = 1000 * 1000};
    uint64_t end_ns = kvt_clock_mono_ns() + MADE_NS_MAX;
    struct kvt_gpu_pool *pool = pool_of(store);
    uint32_t state;
    int r;

    for (;;) {
        state = atomic_load_explicit(&pool->shared->state, memory_order_acquire);
        if (state != STATE_NONE)
            break;
        if (kvt_clock_mono_ns() > end_ns)
            return kvt_trace(-ETIMEDOUT);
        (void)nanosleep(&pause, NULL);
    }
    if (state == STATE_FAILED)
        return kvt_trace(-EIO);
    r = start(pool);
    for (uint32_t rank = 0; rank < pool->shared->ranks && r == 0; rank++)
        r = check(pool, pool->calls->ipc_open(pool->shared->handles[rank], &pool->addresses[rank]),
                  "ipc_open");
    return r;
}

/* ---- copies: under the lock ------------------------------------------------------------------ */

static int have_pinned(struct kvt_gpu_pool *pool, uint64_t bytes)
{
    if (bytes <= pool->pinned_bytes)
        return 0;
    if (pool->pinned != NULL)
        (void)pool->calls->free_pinned(pool->pinned);
    pool->pinned = NULL;
    pool->pinned_bytes = 0;
    if (check(pool, pool->calls->alloc_pinned(bytes, &pool->pinned), "alloc_pinned") < 0)
        return kvt_trace(-EIO);
    pool->pinned_bytes = bytes;
    return 0;
}

static int wait(struct kvt_gpu_pool *pool)
{
    uint64_t end_ns = kvt_clock_mono_ns() + COPY_NS_MAX;
    int r = check(pool, pool->calls->event_record(pool->event, pool->stream), "event_record");

    while (r == 0) {
        int error = pool->calls->event_query(pool->event);

        if (error != KVT_CUDA_NOT_READY)
            return check(pool, error, "a copy");
        if (kvt_clock_mono_ns() > end_ns)
            return kvt_trace(-ETIMEDOUT);
        (void)sched_yield();
    }
    return r;
}

static int queue(struct kvt_gpu_pool *pool, const struct kvt_kv_pages *pages, bool is_write)
{
    int r = 0;

    for (uint32_t i = 0; i < pages->count && r == 0; i++) {
        uint64_t there =
            pool->addresses[pages->rank] + pages->offset_bytes + i * pages->stride_bytes;
        uint64_t here = (uintptr_t)pool->pinned + (uint64_t)i * pages->bytes_each;

        r = check(pool,
                  pool->calls->copy(is_write ? there : here, is_write ? here : there,
                                    pages->bytes_each, is_write ? KVT_CUDA_H2D : KVT_CUDA_D2H,
                                    pool->stream),
                  "copy");
    }
    return r;
}

static int move(struct kvt_kv_store *store, const struct kvt_kv_pages *pages, bool is_write)
{
    struct kvt_gpu_pool *pool = pool_of(store);
    uint64_t bytes = (uint64_t)pages->count * pages->bytes_each;
    int r;

    if (bytes == 0)
        return 0;
    KVT_ASSERT(pages->rank < pool->shared->ranks &&
               pages->offset_bytes + (pages->count - 1) * pages->stride_bytes + pages->bytes_each <=
                   pool->shared->bytes_each);
    (void)pthread_mutex_lock(&pool->lock);
    r = check(pool, pool->calls->set_device(pool->device), "set_device");
    if (r == 0)
        r = have_pinned(pool, bytes);
    if (r == 0 && is_write)
        memcpy(pool->pinned, pages->bytes, bytes);
    if (r == 0)
        r = queue(pool, pages, is_write);
    if (r == 0)
        r = wait(pool);
    if (r == 0 && !is_write)
        memcpy(pages->bytes, pool->pinned, bytes);
    if (r < 0 && !pool->is_said) { /* the bytes are counted as wrong; this says why */
        fprintf(stderr, "kvtier-bench: %s\n", pool->why);
        pool->is_said = true;
    }
    (void)pthread_mutex_unlock(&pool->lock);
    return r;
}

/* ---- the pool -------------------------------------------------------------------------------- */

static const char *why(const struct kvt_kv_store *store)
{
    return KVT_CONTAINER_OF(store, const struct kvt_gpu_pool, store)->why;
}

const char *kvt_gpu_pool_why_not(void)
{
    return kvt_cuda_calls() == NULL ? "this build has no CUDA" : NULL;
}

int kvt_gpu_pool_new(struct kvt_gpu_pool **ret_pool, uint32_t device)
{
    struct kvt_gpu_pool *pool = kvt_alloc_zeroed(1, sizeof(*pool));
    void *shared;

    if (pool == NULL)
        return kvt_trace(-ENOMEM);
    shared = mmap(NULL, sizeof(*pool->shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS,
                  -1, 0);
    if (shared == MAP_FAILED || pthread_mutex_init(&pool->lock, NULL) != 0) {
        if (shared != MAP_FAILED)
            (void)munmap(shared, sizeof(*pool->shared));
        kvt_free(pool);
        return kvt_trace(-ENOMEM);
    }
    pool->store = (struct kvt_kv_store){.make = make, .join = join, .move = move, .why = why};
    pool->calls = kvt_cuda_calls();
    pool->device = (int)device;
    pool->shared = shared;
    *ret_pool = pool;
    return 0;
}

/* What fails here goes with the process. */
static void give_back(struct kvt_gpu_pool *pool)
{
    const struct kvt_cuda_calls *calls = pool->calls;

    if (pool->stream == NULL || calls->set_device(pool->device) != KVT_CUDA_OK)
        return;
    for (uint32_t rank = 0; rank < KVT_RANKS_MAX; rank++) {
        if (pool->addresses[rank] == 0)
            continue;
        if (pool->is_maker)
            (void)calls->free(pool->addresses[rank]);
        else
            (void)calls->ipc_close(pool->addresses[rank]);
    }
    if (pool->pinned != NULL)
        (void)calls->free_pinned(pool->pinned);
    if (pool->event != NULL)
        (void)calls->event_free(pool->event);
    (void)calls->stream_free(pool->stream);
}

struct kvt_gpu_pool *kvt_gpu_pool_free(struct kvt_gpu_pool *pool)
{
    if (pool == NULL)
        return NULL;
    give_back(pool);
    (void)pthread_mutex_destroy(&pool->lock);
    (void)munmap(pool->shared, sizeof(*pool->shared));
    kvt_free(pool);
    return NULL;
}

struct kvt_kv_store *kvt_gpu_pool_store(struct kvt_gpu_pool *pool)
{
    return &pool->store;
}

void kvt_gpu_pool_handle(const struct kvt_gpu_pool *pool, uint32_t rank,
                         uint8_t ret_handle[KVT_CUDA_IPC_HANDLE_BYTES],
                         uint8_t ret_uuid[KVT_CUDA_UUID_BYTES])
{
    KVT_ASSERT(rank < pool->shared->ranks);
    memcpy(ret_handle, pool->shared->handles[rank], KVT_CUDA_IPC_HANDLE_BYTES);
    memcpy(ret_uuid, pool->shared->uuid, KVT_CUDA_UUID_BYTES);
}
