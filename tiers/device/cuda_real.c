/* The table over the CUDA runtime, which is linked statically and looks for a driver when it is
 * first called: without one `driver_version` says 0 and everything else KVT_CUDA_OLD_DRIVER.
 *
 * The runtime keeps the last failure of a thread, which the next launch would take for its own
 * (cudaGetLastError); so every answer that is not 0, "not ready" among them, clears it here. */
#include <cuda_runtime_api.h>
#include <stdio.h>
#include <string.h>

#include "tiers/device/cuda_calls.h"

#define SAME(theirs, ours) static_assert((int)(theirs) == (int)(ours), "CUDA's own numbers")
SAME(cudaErrorInvalidValue, KVT_CUDA_INVALID_VALUE);
SAME(cudaErrorInvalidKernelImage, KVT_CUDA_INVALID_IMAGE);
SAME(cudaErrorMemoryAllocation, KVT_CUDA_NO_MEMORY);
SAME(cudaErrorInitializationError, KVT_CUDA_NOT_INITIALIZED);
SAME(cudaErrorInsufficientDriver, KVT_CUDA_OLD_DRIVER);
SAME(cudaErrorDevicesUnavailable, KVT_CUDA_DEVICES_UNAVAILABLE);
SAME(cudaErrorNoDevice, KVT_CUDA_NO_DEVICE);
SAME(cudaErrorDeviceUninitialized, KVT_CUDA_INVALID_CONTEXT);
SAME(cudaErrorECCUncorrectable, KVT_CUDA_ECC);
SAME(cudaErrorNvlinkUncorrectable, KVT_CUDA_NVLINK);
SAME(cudaErrorContained, KVT_CUDA_CONTAINED);
SAME(cudaErrorInvalidResourceHandle, KVT_CUDA_INVALID_HANDLE);
SAME(cudaErrorNotReady, KVT_CUDA_NOT_READY);
SAME(cudaErrorIllegalAddress, KVT_CUDA_ILLEGAL_ADDRESS);
SAME(cudaErrorLaunchTimeout, KVT_CUDA_LAUNCH_TIMEOUT);
SAME(cudaErrorContextIsDestroyed, KVT_CUDA_CONTEXT_DESTROYED);
SAME(cudaErrorAssert, KVT_CUDA_DEVICE_ASSERT);
SAME(cudaErrorHostMemoryAlreadyRegistered, KVT_CUDA_ALREADY_REGISTERED);
SAME(cudaErrorHardwareStackError, KVT_CUDA_HARDWARE_STACK);
SAME(cudaErrorIllegalInstruction, KVT_CUDA_ILLEGAL_INSTRUCTION);
SAME(cudaErrorMisalignedAddress, KVT_CUDA_MISALIGNED);
SAME(cudaErrorInvalidAddressSpace, KVT_CUDA_ADDRESS_SPACE);
SAME(cudaErrorInvalidPc, KVT_CUDA_INVALID_PC);
SAME(cudaErrorLaunchFailure, KVT_CUDA_LAUNCH_FAILURE);
SAME(cudaErrorUnknown, KVT_CUDA_UNKNOWN);
static_assert(sizeof(cudaIpcMemHandle_t) == KVT_CUDA_IPC_HANDLE_BYTES, "a handle is a handle");
static_assert(sizeof(cudaUUID_t) == KVT_CUDA_UUID_BYTES, "a UUID is a UUID");
SAME(cudaMemcpyHostToDevice, KVT_CUDA_H2D);
SAME(cudaMemcpyDeviceToHost, KVT_CUDA_D2H);

static int answer(cudaError_t error)
{
    if (error != cudaSuccess)
        (void)cudaGetLastError();
    return (int)error;
}

static void *pointer(uint64_t address)
{
    return (void *)(uintptr_t)address;
}

static int driver_version(int *ret_version)
{
    return answer(cudaDriverGetVersion(ret_version));
}

static int runtime_version(int *ret_version)
{
    return answer(cudaRuntimeGetVersion(ret_version));
}

static int device_count(int *ret_count)
{
    return answer(cudaGetDeviceCount(ret_count));
}

/* The runtime's properties have lost fields from version to version; attributes stay. */
static int device_info(int device, struct kvt_cuda_info *ret_info)
{
    struct kvt_cuda_info info = {0};
    struct cudaDeviceProp properties;
    int major = 0, minor = 0, mode = 0, has_ipc = 0;
    cudaError_t error;

    error = cudaGetDeviceProperties(&properties, device);
    if (error == cudaSuccess)
        error = cudaDeviceGetPCIBusId(info.pci, sizeof(info.pci), device);
    if (error == cudaSuccess)
        error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    if (error == cudaSuccess)
        error = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
    if (error == cudaSuccess)
        error = cudaDeviceGetAttribute(&mode, cudaDevAttrComputeMode, device);
    if (error == cudaSuccess)
        error = cudaDeviceGetAttribute(&has_ipc, cudaDevAttrIpcEventSupport, device);
    if (error != cudaSuccess)
        return answer(error);
    memcpy(info.uuid, properties.uuid.bytes, sizeof(info.uuid));
    (void)snprintf(info.name, sizeof(info.name), "%.*s", (int)sizeof(info.name) - 1,
                   properties.name);
    for (char *c = info.pci; *c != '\0'; c++)
        *c = (char)(*c >= 'A' && *c <= 'F' ? *c - 'A' + 'a' : *c);
    info.sm = (uint32_t)(major * 10 + minor);
    info.total_bytes = properties.totalGlobalMem;
    info.is_exclusive = mode == cudaComputeModeExclusiveProcess;
    info.is_prohibited = mode == cudaComputeModeProhibited;
    info.has_ipc = has_ipc != 0;
    *ret_info = info;
    return KVT_CUDA_OK;
}

static int set_device(int device)
{
    return answer(cudaSetDevice(device));
}

static int memory_info(uint64_t *ret_free_bytes, uint64_t *ret_total_bytes)
{
    size_t free_bytes = 0, total_bytes = 0;
    int error = answer(cudaMemGetInfo(&free_bytes, &total_bytes));

    if (error != KVT_CUDA_OK)
        return error;
    *ret_free_bytes = free_bytes;
    *ret_total_bytes = total_bytes;
    return KVT_CUDA_OK;
}

static int device_reset(void)
{
    return answer(cudaDeviceReset());
}

static int alloc(uint64_t bytes, uint64_t *ret_address)
{
    void *memory = NULL;
    int error = answer(cudaMalloc(&memory, bytes));

    if (error == KVT_CUDA_OK)
        *ret_address = (uint64_t)(uintptr_t)memory;
    return error;
}

static int free_device(uint64_t address)
{
    return answer(cudaFree(pointer(address)));
}

static int alloc_pinned(uint64_t bytes, void **ret_memory)
{
    void *memory = NULL;
    int error = answer(cudaHostAlloc(&memory, bytes, cudaHostAllocPortable | cudaHostAllocMapped));

    if (error == KVT_CUDA_OK)
        *ret_memory = memory;
    return error;
}

static int free_pinned(void *memory)
{
    return answer(cudaFreeHost(memory));
}

static int pin(void *memory, uint64_t bytes)
{
    return answer(
        cudaHostRegister(memory, bytes, cudaHostRegisterPortable | cudaHostRegisterMapped));
}

static int unpin(void *memory)
{
    return answer(cudaHostUnregister(memory));
}

/* A stream is for kernels, and memory for it is taken where one may wait: so they are brought onto
 * the device here, not by their first launch on the GPU's thread. Again is nothing to do. */
static int stream_new(void **ret_stream)
{
    cudaStream_t stream = NULL;
    int error = kvt_kernels_cuda_load();

    if (error == KVT_CUDA_OK)
        error = answer(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    if (error == KVT_CUDA_OK)
        *ret_stream = stream;
    return error;
}

static int stream_free(void *stream)
{
    return answer(cudaStreamDestroy(stream));
}

static int event_new(void **ret_event)
{
    cudaEvent_t event = NULL;
    int error = answer(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));

    if (error == KVT_CUDA_OK)
        *ret_event = event;
    return error;
}

static int event_free(void *event)
{
    return answer(cudaEventDestroy(event));
}

static int event_record(void *event, void *stream)
{
    return answer(cudaEventRecord(event, stream));
}

static int event_query(void *event)
{
    return answer(cudaEventQuery(event));
}

/* Two places on the device may be of two devices: then the runtime finds out from the addresses. */
static int copy(uint64_t dst, uint64_t src, uint64_t bytes, enum kvt_cuda_direction direction,
                void *stream)
{
    enum cudaMemcpyKind kind =
        direction == KVT_CUDA_D2D ? cudaMemcpyDefault : (enum cudaMemcpyKind)direction;

    return answer(cudaMemcpyAsync(pointer(dst), pointer(src), bytes, kind, stream));
}

static int fill(uint64_t address, uint8_t value, uint64_t bytes, void *stream)
{
    return answer(cudaMemsetAsync(pointer(address), value, bytes, stream));
}

static int ipc_export(uint64_t address, uint8_t ret_handle[KVT_CUDA_IPC_HANDLE_BYTES])
{
    cudaIpcMemHandle_t handle;
    int error = answer(cudaIpcGetMemHandle(&handle, pointer(address)));

    if (error == KVT_CUDA_OK)
        memcpy(ret_handle, &handle, sizeof(handle));
    return error;
}

static int ipc_open(const uint8_t handle[KVT_CUDA_IPC_HANDLE_BYTES], uint64_t *ret_address)
{
    cudaIpcMemHandle_t copy_of_handle;
    void *memory = NULL;
    int error;

    memcpy(&copy_of_handle, handle, sizeof(copy_of_handle));
    error = answer(cudaIpcOpenMemHandle(&memory, copy_of_handle, cudaIpcMemLazyEnablePeerAccess));
    if (error == KVT_CUDA_OK)
        *ret_address = (uint64_t)(uintptr_t)memory;
    return error;
}

static int ipc_close(uint64_t address)
{
    return answer(cudaIpcCloseMemHandle(pointer(address)));
}

/* The runtime has no such call: the driver's is asked for by name. Its first errors have the
 * runtime's numbers. */
static int range_of(uint64_t address, uint64_t *ret_base, uint64_t *ret_bytes)
{
    int (*range)(unsigned long long *base, size_t *bytes, unsigned long long at) = NULL;
    enum cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
    unsigned long long base = 0;
    size_t bytes = 0;
    void *symbol = NULL;
    int error;

    error = answer(cudaGetDriverEntryPointByVersion("cuMemGetAddressRange", &symbol, 12000,
                                                    cudaEnableDefault, &found));
    if (error != KVT_CUDA_OK)
        return error;
    if (found != cudaDriverEntryPointSuccess || symbol == NULL)
        return cudaErrorSymbolNotFound;
    memcpy(&range, &symbol, sizeof(range));
    error = range(&base, &bytes, address);
    if (error != KVT_CUDA_OK)
        return error;
    *ret_base = base;
    *ret_bytes = bytes;
    return KVT_CUDA_OK;
}

static const char *error_name(int error)
{
    return cudaGetErrorName((cudaError_t)error);
}

static int gather(void *stream, const struct kvt_copy_batch *batch)
{
    return kvt_kernels_cuda()->gather(stream, batch);
}

static int scatter(void *stream, const struct kvt_copy_batch *batch)
{
    return kvt_kernels_cuda()->scatter(stream, batch);
}

static int check(void *stream, const struct kvt_check_batch *batch)
{
    return kvt_kernels_cuda()->check(stream, batch);
}

static int quantise(void *stream, const struct kvt_quant_batch *batch)
{
    return kvt_kernels_cuda()->quantise(stream, batch);
}

static int dequantise(void *stream, const struct kvt_quant_batch *batch)
{
    return kvt_kernels_cuda()->dequantise(stream, batch);
}

static int relayout(void *stream, const struct kvt_relayout *change)
{
    return kvt_kernels_cuda()->relayout(stream, change);
}

static const struct kvt_kernels kernels = {
    .name = "cuda",
    .gather = gather,
    .scatter = scatter,
    .check = check,
    .quantise = quantise,
    .dequantise = dequantise,
    .relayout = relayout,
};

static const struct kvt_cuda_calls calls = {
    .driver_version = driver_version,
    .runtime_version = runtime_version,
    .device_count = device_count,
    .device_info = device_info,
    .set_device = set_device,
    .memory_info = memory_info,
    .device_reset = device_reset,
    .alloc = alloc,
    .free = free_device,
    .alloc_pinned = alloc_pinned,
    .free_pinned = free_pinned,
    .pin = pin,
    .unpin = unpin,
    .stream_new = stream_new,
    .stream_free = stream_free,
    .event_new = event_new,
    .event_free = event_free,
    .event_record = event_record,
    .event_query = event_query,
    .copy = copy,
    .fill = fill,
    .ipc_export = ipc_export,
    .ipc_open = ipc_open,
    .ipc_close = ipc_close,
    .range_of = range_of,
    .error_name = error_name,
    .kernels = &kernels,
};

const struct kvt_cuda_calls *kvt_cuda_calls(void)
{
    return kvt_kernels_cuda() != NULL ? &calls : NULL;
}
