/* The table over the CUDA runtime. Without a driver: what it says then. With a GPU: memory, copies,
 * events and handles, each call once. */
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "tests/common/check.h"
#include "tiers/device/cuda_calls.h"

#define BYTES (1u << 20)
#define SKIP 77

static const struct kvt_cuda_calls *calls;

static void wait_for(void *event)
{
    const struct timespec pause = {.tv_nsec = 100000};
    int error;

    while ((error = calls->event_query(event)) == KVT_CUDA_NOT_READY)
        (void)nanosleep(&pause, NULL);
    CHECK(error == KVT_CUDA_OK);
}

/* pinned -> device -> device -> pinned, and a fill over half of it. */
static void copies(uint64_t device)
{
    void *stream, *event;
    uint8_t *memory;
    void *pinned;

    CHECK(calls->alloc_pinned(2 * BYTES, &pinned) == KVT_CUDA_OK);
    memory = pinned;
    for (uint32_t i = 0; i < BYTES; i++)
        memory[i] = (uint8_t)(i * 7 + i / 251);
    CHECK(calls->stream_new(&stream) == KVT_CUDA_OK);
    CHECK(calls->event_new(&event) == KVT_CUDA_OK);
    CHECK(calls->copy(device, (uintptr_t)memory, BYTES, KVT_CUDA_H2D, stream) == KVT_CUDA_OK);
    CHECK(calls->copy(device + BYTES, device, BYTES, KVT_CUDA_D2D, stream) == KVT_CUDA_OK);
    CHECK(calls->fill(device + BYTES, 0x5a, BYTES / 2, stream) == KVT_CUDA_OK);
    CHECK(calls->event_record(event, stream) == KVT_CUDA_OK);
    CHECK(calls->copy((uintptr_t)memory + BYTES, device + BYTES, BYTES, KVT_CUDA_D2H, stream) ==
          KVT_CUDA_OK);
    CHECK(calls->event_record(event, stream) == KVT_CUDA_OK);
    wait_for(event);
    for (uint32_t i = 0; i < BYTES; i++)
        CHECK(memory[BYTES + i] == (i < BYTES / 2 ? 0x5a : memory[i]));
    CHECK(calls->event_free(event) == KVT_CUDA_OK);
    CHECK(calls->stream_free(stream) == KVT_CUDA_OK);
    CHECK(calls->free_pinned(pinned) == KVT_CUDA_OK);
}

static void on_a_gpu(void)
{
    static uint8_t page[2 * 4096] __attribute__((aligned(4096)));
    uint8_t handle[KVT_CUDA_IPC_HANDLE_BYTES];
    uint64_t device, free_bytes, total_bytes, base, bytes;
    struct kvt_cuda_info info;

    CHECK(calls->device_info(0, &info) == KVT_CUDA_OK);
    printf("%s, sm %u, %s\n", info.name, info.sm, info.pci);
    CHECK(info.sm >= 50 && info.total_bytes > BYTES && strlen(info.pci) == 12);
    CHECK(calls->set_device(0) == KVT_CUDA_OK);
    CHECK(calls->memory_info(&free_bytes, &total_bytes) == KVT_CUDA_OK);
    CHECK(free_bytes <= total_bytes);
    CHECK(calls->alloc(total_bytes + KVT_GIB, &device) == KVT_CUDA_NO_MEMORY);
    CHECK(calls->alloc(2 * BYTES, &device) == KVT_CUDA_OK);
    CHECK(calls->range_of(device + BYTES, &base, &bytes) == KVT_CUDA_OK);
    CHECK(base == device && bytes >= 2 * BYTES);
    copies(device);
    if (info.has_ipc)
        CHECK(calls->ipc_export(device, handle) == KVT_CUDA_OK);
    CHECK(calls->pin(page, sizeof(page)) == KVT_CUDA_OK);
    CHECK(calls->pin(page, sizeof(page)) == KVT_CUDA_ALREADY_REGISTERED);
    CHECK(calls->unpin(page) == KVT_CUDA_OK);
    CHECK(calls->free(device) == KVT_CUDA_OK);
    memset(handle, 0x11, sizeof(handle));
    CHECK(calls->ipc_open(handle, &device) != KVT_CUDA_OK);
    CHECK(calls->device_reset() == KVT_CUDA_OK);
}

int main(void)
{
    int driver = -1, runtime = 0, count = 0, error;

    calls = kvt_cuda_calls();
    CHECK(calls != NULL && calls->kernels != NULL);
    CHECK(calls->kernels->gather != NULL && strcmp(calls->kernels->name, "cuda") == 0);
    CHECK(strcmp(calls->error_name(KVT_CUDA_ECC), "cudaErrorECCUncorrectable") == 0);
    CHECK(calls->runtime_version(&runtime) == KVT_CUDA_OK && runtime >= 12080);
    CHECK(calls->driver_version(&driver) == KVT_CUDA_OK);
    error = calls->device_count(&count);
    if (driver == 0) {
        CHECK(error == KVT_CUDA_OLD_DRIVER);
        CHECK(calls->set_device(0) == KVT_CUDA_OLD_DRIVER);
        CHECK(calls->device_count(&count) == KVT_CUDA_OLD_DRIVER);
    }
    if (error != KVT_CUDA_OK || count == 0) {
        printf("SKIP: no GPU (%s), so only what is said without one was tested\n",
               calls->error_name(error));
        return SKIP;
    }
    on_a_gpu();
    return 0;
}
