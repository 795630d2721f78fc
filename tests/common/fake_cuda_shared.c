/* The fake CUDA runtime as a library that a program in another language loads: an engine in Python
 * whose GPU memory a daemon on the fake (kvtierd-fake-cuda) really opens.
 *
 * The functions that begin with cu are named, and answer, as those of libcuda.so.1, so that code
 * that calls the driver can be pointed here; a thread without a device gets 201 (no context), as
 * there. Device addresses are none of this machine: kvt_fake_engine_memory says where the process
 * sees the bytes. One state a process; any thread may call. */
#include <string.h>

#include "tests/common/fake_cuda_internal.h"

#define DRIVER_INVALID_VALUE 1
#define DRIVER_INVALID_CONTEXT 201
#define DRIVER_NOT_SUPPORTED 801
#define POINTER_DEVICE_ORDINAL 9
#define POINTER_IS_LEGACY_CUDA_IPC_CAPABLE 10
#define CONTEXTS_MAX 8u
#define DEVICE_OF_ORDINAL_0 100

struct ipc_handle { /* by value, as CUipcMemHandle */
    uint8_t bytes[KVT_CUDA_IPC_HANDLE_BYTES];
};

int cuMemGetAddressRange_v2(uint64_t *ret_base, size_t *ret_bytes, uint64_t address);
int cuIpcGetMemHandle(struct ipc_handle *ret_handle, uint64_t address);
int cuIpcOpenMemHandle_v2(uint64_t *ret_address, struct ipc_handle handle, unsigned flags);
int cuIpcCloseMemHandle(uint64_t address);
int cuPointerGetAttribute(void *ret_value, int attribute, uint64_t address);
int cuCtxGetCurrent(void **ret_context);
int cuCtxPushCurrent_v2(void *context);
int cuCtxPopCurrent_v2(void **ret_context);
int cuDeviceGet(int *ret_device, int ordinal);
int cuDeviceGetUuid_v2(uint8_t ret_uuid[KVT_CUDA_UUID_BYTES], int device);
bool kvt_fake_engine_init(const char *words);
int kvt_fake_engine_set_device(int device);
int kvt_fake_engine_alloc(uint64_t bytes, uint64_t *ret_address);
int kvt_fake_engine_free(uint64_t address);
uint8_t *kvt_fake_engine_memory(uint64_t address, uint64_t bytes);
void *kvt_fake_engine_stream(void);
void kvt_fake_engine_stream_free(void *stream);
void *kvt_fake_engine_alloc_pinned(uint64_t bytes);
void kvt_fake_engine_free_pinned(void *memory);
int kvt_fake_engine_write(uint64_t address, const void *pinned, uint64_t bytes, void *stream);
void *kvt_fake_engine_record(void *stream);
int kvt_fake_engine_query(void *event);
void kvt_fake_engine_event_free(void *event);
void kvt_fake_engine_freeze(bool is_frozen);
uint64_t kvt_fake_engine_imports(void);

/* ---- as the driver's ------------------------------------------------------------------------- */

int cuMemGetAddressRange_v2(uint64_t *ret_base, size_t *ret_bytes, uint64_t address)
{
    uint64_t bytes;
    int r;

    if (fake_current_device < 0)
        return DRIVER_INVALID_CONTEXT;
    r = kvt_cuda_calls()->range_of(address, ret_base, &bytes);
    if (r == 0)
        *ret_bytes = bytes;
    return r;
}

/* Of the beginning of an allocation only. */
int cuIpcGetMemHandle(struct ipc_handle *ret_handle, uint64_t address)
{
    struct fake_memory *memory;
    bool is_exportable;

    if (fake_current_device < 0)
        return DRIVER_INVALID_CONTEXT;
    (void)pthread_mutex_lock(&fake_cuda.lock);
    memory = fake_memory_at(address);
    is_exportable = memory != NULL && memory->kind == FAKE_MEMORY_DEVICE;
    (void)pthread_mutex_unlock(&fake_cuda.lock);
    if (!is_exportable)
        return DRIVER_INVALID_VALUE;
    return kvt_cuda_calls()->ipc_export(address, ret_handle->bytes);
}

int cuIpcOpenMemHandle_v2(uint64_t *ret_address, struct ipc_handle handle, unsigned flags)
{
    if (fake_current_device < 0)
        return DRIVER_INVALID_CONTEXT;
    if (flags != 1) /* CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS is the only one there is */
        return DRIVER_INVALID_VALUE;
    return kvt_cuda_calls()->ipc_open(handle.bytes, ret_address);
}

int cuIpcCloseMemHandle(uint64_t address)
{
    return fake_current_device < 0 ? DRIVER_INVALID_CONTEXT : kvt_cuda_calls()->ipc_close(address);
}

int cuPointerGetAttribute(void *ret_value, int attribute, uint64_t address)
{
    struct fake_memory *memory;
    int device = -1, is_exportable = 0;

    if (fake_current_device < 0)
        return DRIVER_INVALID_CONTEXT;
    if (attribute != POINTER_DEVICE_ORDINAL && attribute != POINTER_IS_LEGACY_CUDA_IPC_CAPABLE)
        return DRIVER_NOT_SUPPORTED;
    (void)pthread_mutex_lock(&fake_cuda.lock);
    memory = fake_memory_find(address, 1);
    if (memory != NULL) {
        device = (int)memory->device;
        is_exportable = memory->kind == FAKE_MEMORY_DEVICE;
    }
    (void)pthread_mutex_unlock(&fake_cuda.lock);
    if (device < 0)
        return DRIVER_INVALID_VALUE;
    memcpy(ret_value, attribute == POINTER_DEVICE_ORDINAL ? &device : &is_exportable, sizeof(int));
    return 0;
}

/* A context is the number of its device, from 1 on. */
int cuCtxGetCurrent(void **ret_context)
{
    *ret_context = (void *)(uintptr_t)(fake_current_device + 1); /* NULL: there is none */
    return 0;
}

/* What the thread had before its last cuCtxPushCurrent. */
static _Thread_local int devices_before[CONTEXTS_MAX];
static _Thread_local uint32_t pushed_count;

int cuCtxPushCurrent_v2(void *context)
{
    if (context == NULL || pushed_count == CONTEXTS_MAX)
        return DRIVER_INVALID_CONTEXT;
    devices_before[pushed_count++] = fake_current_device;
    fake_current_device = (int)(uintptr_t)context - 1;
    return 0;
}

int cuCtxPopCurrent_v2(void **ret_context)
{
    if (pushed_count == 0)
        return DRIVER_INVALID_CONTEXT;
    (void)cuCtxGetCurrent(ret_context);
    fake_current_device = devices_before[--pushed_count];
    return 0;
}

/* A device is not its ordinal, whatever the driver does today. */
int cuDeviceGet(int *ret_device, int ordinal)
{
    *ret_device = ordinal + DEVICE_OF_ORDINAL_0;
    return 0;
}

int cuDeviceGetUuid_v2(uint8_t ret_uuid[KVT_CUDA_UUID_BYTES], int device)
{
    struct kvt_cuda_info info;
    int r = kvt_cuda_calls()->device_info(device - DEVICE_OF_ORDINAL_0, &info);

    if (r == 0)
        memcpy(ret_uuid, info.uuid, sizeof(info.uuid));
    return r;
}

/* ---- an engine ------------------------------------------------------------------------------- */

/* @words as of KVT_FAKE_CUDA. False: they are not understood. */
bool kvt_fake_engine_init(const char *words)
{
    struct kvt_fake_cuda_config config;
    bool is_reset_broken;

    if (!kvt_fake_cuda_parse(words, &config, &is_reset_broken))
        return false;
    config.kernels = kvt_kernels_host();
    kvt_fake_cuda_init(&config);
    return true;
}

int kvt_fake_engine_set_device(int device)
{
    return kvt_cuda_calls()->set_device(device);
}

int kvt_fake_engine_alloc(uint64_t bytes, uint64_t *ret_address)
{
    return kvt_cuda_calls()->alloc(bytes, ret_address);
}

int kvt_fake_engine_free(uint64_t address)
{
    return kvt_cuda_calls()->free(address);
}

/* Where this process sees device memory. */
uint8_t *kvt_fake_engine_memory(uint64_t address, uint64_t bytes)
{
    return kvt_fake_cuda_memory(address, bytes);
}

/* NULL: it failed. */
void *kvt_fake_engine_stream(void)
{
    void *stream;

    return kvt_cuda_calls()->stream_new(&stream) == 0 ? stream : NULL;
}

void kvt_fake_engine_stream_free(void *stream)
{
    (void)kvt_cuda_calls()->stream_free(stream);
}

/* NULL: it failed. */
void *kvt_fake_engine_alloc_pinned(uint64_t bytes)
{
    void *memory;

    return kvt_cuda_calls()->alloc_pinned(bytes, &memory) == 0 ? memory : NULL;
}

void kvt_fake_engine_free_pinned(void *memory)
{
    (void)kvt_cuda_calls()->free_pinned(memory);
}

/* What a forward pass does to a block: it happens when the stream gets there. */
int kvt_fake_engine_write(uint64_t address, const void *pinned, uint64_t bytes, void *stream)
{
    return kvt_cuda_calls()->copy(address, (uintptr_t)pinned, bytes, KVT_CUDA_H2D, stream);
}

/* An event behind what is queued on @stream; NULL: it failed. */
void *kvt_fake_engine_record(void *stream)
{
    const struct kvt_cuda_calls *calls = kvt_cuda_calls();
    void *event;

    if (calls->event_new(&event) != 0)
        return NULL;
    if (calls->event_record(event, stream) != 0) {
        (void)calls->event_free(event);
        return NULL;
    }
    return event;
}

int kvt_fake_engine_query(void *event)
{
    return kvt_cuda_calls()->event_query(event);
}

void kvt_fake_engine_event_free(void *event)
{
    (void)kvt_cuda_calls()->event_free(event);
}

/* Streams stand still until it is told otherwise. */
void kvt_fake_engine_freeze(bool is_frozen)
{
    kvt_fake_cuda_set_frozen(is_frozen);
}

/* Handles that this process has open. */
uint64_t kvt_fake_engine_imports(void)
{
    struct kvt_fake_cuda_open open;

    kvt_fake_cuda_count(&open);
    return open.ipc_maps;
}
