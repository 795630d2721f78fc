/* The few CUDA calls that the device tier makes, as a table: the seam for the fake of the tests
 * (tests/common/fake_cuda.h) and for faults. No CUDA type appears here.
 *
 * Every function but `error_name` answers CUDA's error number: 0, KVT_CUDA_NOT_READY from an event
 * that is not over, anything else is a failure. kvt_cuda_is_sticky says which of them mean that the
 * context is lost: after one, every call fails until device_reset.
 *
 * Where they are called: `set_device` is of the calling thread and comes before every other call
 * there. copies, launches, records and questions to events: tier-thread-only, one thread a stream.
 * The rest: any thread, but not while device_reset runs. */
#pragma once

#include "daemon/base/def.h"
#include "daemon/base/limits.h"
#include "kernels/kvt_kernels.h"

/* CUDA's own numbers. */
enum {
    KVT_CUDA_OK = 0,
    KVT_CUDA_INVALID_VALUE = 1,
    KVT_CUDA_NO_MEMORY = 2,
    KVT_CUDA_NOT_INITIALIZED = 3,
    KVT_CUDA_OLD_DRIVER = 35,          /* also: no driver at all (its version is 0 then) */
    KVT_CUDA_DEVICES_UNAVAILABLE = 46, /* busy: exclusive mode, or prohibited */
    KVT_CUDA_NO_DEVICE = 100,
    KVT_CUDA_INVALID_IMAGE = 200, /* also: kernels that make wrong bytes (gpu_trial.c) */
    KVT_CUDA_INVALID_CONTEXT = 201,
    KVT_CUDA_ECC = 214,
    KVT_CUDA_NVLINK = 220,
    KVT_CUDA_CONTAINED = 226,
    KVT_CUDA_INVALID_HANDLE = 400,
    KVT_CUDA_NOT_READY = 600,
    KVT_CUDA_ILLEGAL_ADDRESS = 700,
    KVT_CUDA_LAUNCH_TIMEOUT = 702,
    KVT_CUDA_CONTEXT_DESTROYED = 709,
    KVT_CUDA_DEVICE_ASSERT = 710,
    KVT_CUDA_ALREADY_REGISTERED = 712,
    KVT_CUDA_HARDWARE_STACK = 714,
    KVT_CUDA_ILLEGAL_INSTRUCTION = 715,
    KVT_CUDA_MISALIGNED = 716,
    KVT_CUDA_ADDRESS_SPACE = 717,
    KVT_CUDA_INVALID_PC = 718,
    KVT_CUDA_LAUNCH_FAILURE = 719,
    KVT_CUDA_UNKNOWN = 999,
};

struct kvt_cuda_info { /* of one device */
    uint8_t uuid[KVT_CUDA_UUID_BYTES];
    char name[64];
    char pci[16]; /* "0000:3b:00.0", lower case: its folder below /sys/bus/pci/devices */
    uint32_t sm;  /* compute capability x 10: 90 */
    uint64_t total_bytes;
    bool is_exclusive; /* compute mode: one process at a time, or none */
    bool is_prohibited;
    bool has_ipc; /* legacy IPC handles work (not on Jetson, nor in some virtual machines) */
};

enum kvt_cuda_direction {
    KVT_CUDA_H2D = 1,
    KVT_CUDA_D2H = 2,
    KVT_CUDA_D2D = 3
}; /* cudaMemcpyKind */

struct kvt_cuda_calls {
    int (*driver_version)(int *ret_version); /* 13000 is 13.0; 0: no driver */
    int (*runtime_version)(int *ret_version);
    int (*device_count)(int *ret_count);
    int (*device_info)(int device, struct kvt_cuda_info *ret_info);
    int (*set_device)(int device);
    int (*memory_info)(uint64_t *ret_free_bytes, uint64_t *ret_total_bytes);
    int (*device_reset)(void); /* everything of this process on the current device is gone */

    int (*alloc)(uint64_t bytes, uint64_t *ret_address); /* cudaMalloc: exportable */
    int (*free)(uint64_t address);
    int (*alloc_pinned)(uint64_t bytes, void **ret_memory); /* portable, mapped */
    int (*free_pinned)(void *memory);
    int (*pin)(void *memory, uint64_t bytes); /* cudaHostRegister: portable, mapped */
    int (*unpin)(void *memory);

    int (*stream_new)(void **ret_stream); /* non-blocking: never waits for the default stream */
    int (*stream_free)(void *stream);
    int (*event_new)(void **ret_event); /* without timing */
    int (*event_free)(void *event);
    int (*event_record)(void *event, void *stream);
    int (*event_query)(void *event); /* 0: all before it is over; KVT_CUDA_NOT_READY */
    int (*copy)(uint64_t dst, uint64_t src, uint64_t bytes, enum kvt_cuda_direction direction,
                void *stream);
    int (*fill)(uint64_t address, uint8_t value, uint64_t bytes, void *stream);

    int (*ipc_export)(uint64_t address, uint8_t ret_handle[KVT_CUDA_IPC_HANDLE_BYTES]);
    int (*ipc_open)(const uint8_t handle[KVT_CUDA_IPC_HANDLE_BYTES], uint64_t *ret_address);
    int (*ipc_close)(uint64_t address);
    /* The whole allocation that @address lies in. */
    int (*range_of)(uint64_t address, uint64_t *ret_base, uint64_t *ret_bytes);

    const char *(*error_name)(int error);
    const struct kvt_kernels *kernels; /* gather and the others, on this table's streams */
};

/* The table of this build: cuda_real.c, cuda_none.c (NULL), or the fake of a test program. */
const struct kvt_cuda_calls *kvt_cuda_calls(void);

/* The context of the device is lost: nothing of this process works on it any more. */
bool kvt_cuda_is_sticky(int error);
