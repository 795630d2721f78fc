/* A CUDA runtime in ordinary memory, for everything that goes through struct kvt_cuda_calls: link
 * fake_cuda_lib and kvt_cuda_calls() is the fake's table.
 *
 * Asynchronous. Copies, fills, launches, records and waits are queued on their stream and happen
 * later: every call into the fake, and with `has_executor` a thread too, does a seeded number of
 * what is due, in the order of a stream and in any order between streams; a stream may stand still
 * for long; a copy may happen in two halves. A launch reads its jobs, pieces and ids when it
 * happens, so that lists which are overwritten early are caught.
 *
 * Device memory cannot be touched by the CPU: its addresses are none of this machine
 * (0x0d.., mapped host memory 0x0e..), so that an access is a fault. They are never given out
 * twice. What was allocated is poisoned (0xdb). Only kvt_fake_cuda_memory can see it.
 *
 * What our code must never do ends the process with a line that begins "fake CUDA:": use of memory,
 * a stream or an event that is gone, an address outside its allocation, a copy from or to host
 * memory that is not pinned, a kernel on another GPU's memory, a launch whose shape is smaller than
 * its jobs, a call on a device while it is reset. What a client can do (free its memory while we
 * use it) is a sticky error, as it is with CUDA.
 *
 * One state a process, one lock. init and deinit: no other thread is in the fake. The rest: any
 * thread. */
#pragma once

#include "tiers/device/cuda_calls.h"

#define KVT_FAKE_CUDA_DEVICES_MAX 4u
#define KVT_FAKE_CUDA_POISON 0xdbu

/* The calls by name, for counts and faults. ANY: all but the versions. */
#define KVT_FAKE_CUDA_CALLS(X)                                                                     \
    X(ANY)                                                                                         \
    X(DRIVER_VERSION)                                                                              \
    X(RUNTIME_VERSION)                                                                             \
    X(DEVICE_COUNT)                                                                                \
    X(DEVICE_INFO)                                                                                 \
    X(SET_DEVICE)                                                                                  \
    X(MEMORY_INFO)                                                                                 \
    X(DEVICE_RESET)                                                                                \
    X(ALLOC)                                                                                       \
    X(FREE)                                                                                        \
    X(ALLOC_PINNED)                                                                                \
    X(FREE_PINNED)                                                                                 \
    X(PIN)                                                                                         \
    X(UNPIN)                                                                                       \
    X(STREAM_NEW)                                                                                  \
    X(STREAM_FREE)                                                                                 \
    X(EVENT_NEW)                                                                                   \
    X(EVENT_FREE)                                                                                  \
    X(EVENT_RECORD)                                                                                \
    X(EVENT_QUERY)                                                                                 \
    X(COPY)                                                                                        \
    X(FILL)                                                                                        \
    X(IPC_EXPORT)                                                                                  \
    X(IPC_OPEN)                                                                                    \
    X(IPC_CLOSE)                                                                                   \
    X(RANGE_OF)                                                                                    \
    X(LAUNCH)
#define KVT_FAKE_CUDA_ENUM(name) KVT_FAKE_CUDA_##name,
enum kvt_fake_cuda_call { KVT_FAKE_CUDA_CALLS(KVT_FAKE_CUDA_ENUM) KVT_FAKE_CUDA_CALLS_COUNT };

struct kvt_fake_cuda_device {
    uint64_t bytes; /* 0: 256 MiB */
    uint32_t sm;    /* 0: 90 */
    char pci[16];   /* "": 0000:0<idx + 1>:00.0 */
    bool is_exclusive, is_prohibited;
    bool is_busy; /* exclusive, and another process has it: it cannot be used */
    bool has_no_ipc;
};

struct kvt_fake_cuda_config {
    uint64_t seed;
    uint32_t devices_count; /* 0 .. KVT_FAKE_CUDA_DEVICES_MAX */
    struct kvt_fake_cuda_device devices[KVT_FAKE_CUDA_DEVICES_MAX];
    bool has_no_driver;
    int driver_version, runtime_version; /* 0: 13000 */
    uint64_t context_bytes;              /* what a process costs on a device; 0: 1 MiB */
    uint64_t poison_bytes_max;           /* of one allocation; 0: 64 MiB */
    uint32_t delay_max;   /* calls that an operation may stay behind when it is due; 0: 8 */
    bool has_executor;    /* a thread works on the queues, too */
    bool is_landing_late; /* after a sticky error what is queued goes on happening until reset */
    bool is_never_torn;   /* no copy in two halves: faster */
    bool
        may_gather_none; /* gather of no block is no bug: the kernels allow it, the tier does not */
    uint32_t lose_every; /* about every so many calls a device is lost, for no reason; 0: never */
    /* What kernels do: kvt_kernels_host(), or the shim's. */
    const struct kvt_kernels *kernels;
};

void kvt_fake_cuda_init(const struct kvt_fake_cuda_config *config);
/* Everything that is left open is named, and ends the process. */
void kvt_fake_cuda_deinit(void);
/* "devices=2,bytes=256MiB,seed=7": the words are devices, seed, driver (12020: 12.2), no_driver,
 * delay, executor, late, lose_every; of every device bytes, busy, exclusive, prohibited, no_ipc;
 * and broken_resets. False: a word that is not known. */
bool kvt_fake_cuda_parse(const char *text, struct kvt_fake_cuda_config *ret_config,
                         bool *ret_is_reset_broken);

/* ---- faults ---------------------------------------------------------------------------------- */

/* The @nth call of @call from now (1: the next) answers @error, and does nothing, but for what
 * frees: that happens anyway. A sticky @error loses the device, too. Replaces the plan before;
 * @nth 0: none. */
void kvt_fake_cuda_fail(enum kvt_fake_cuda_call call, uint64_t nth, int error);
/* Calls of the test itself, meanwhile, neither fail nor count. */
void kvt_fake_cuda_pause_fail(bool is_paused);
/* Whether the planned failure has happened. */
bool kvt_fake_cuda_has_failed(void);
/* The context of the device is lost now: all calls on it answer @error until it is reset. */
void kvt_fake_cuda_lose(uint32_t device, int error);
bool kvt_fake_cuda_is_lost(uint32_t device);
/* From now on a reset does (not) help: it answers the sticky error again. */
void kvt_fake_cuda_set_reset_works(uint32_t device, bool is_working);
/* Of the next operations that move bytes, the @nth moves its first half only, or turns one bit of
 * what it wrote. Launches count, too: one bit of the payload of their last job. 0: none. */
void kvt_fake_cuda_tear(uint64_t nth);
void kvt_fake_cuda_flip(uint64_t nth);
uint64_t kvt_fake_cuda_damaged(void); /* how many of those have happened */
uint64_t kvt_fake_cuda_calls_made(enum kvt_fake_cuda_call call);

/* ---- memory ---------------------------------------------------------------------------------- */

/* Where the process can see [@address, + @bytes) of device memory, its own or a client's. What is
 * queued may change it at any time. Outside of what is allocated: ends the process. */
uint8_t *kvt_fake_cuda_memory(uint64_t address, uint64_t bytes);

/* Memory of a client, as if in another process: a handle, and where the test sees the bytes. */
struct kvt_fake_cuda_foreign {
    uint8_t handle[KVT_CUDA_IPC_HANDLE_BYTES];
    uint8_t *memory;
    uint64_t bytes;
    uint32_t device;
    uint32_t id;
};
void kvt_fake_cuda_foreign_new(struct kvt_fake_cuda_foreign *ret_foreign, uint32_t device,
                               uint64_t bytes);
/* The client freed it. Work on it that is queued or comes later loses the device's context. */
void kvt_fake_cuda_foreign_free(struct kvt_fake_cuda_foreign *foreign);

/* ---- time ------------------------------------------------------------------------------------ */

/* Does one operation that is queued. False: nothing is. */
bool kvt_fake_cuda_step(void);
/* Does up to @count of what can be done at random, as a call would. */
void kvt_fake_cuda_pump(uint32_t count);
/* Streams stand still: only kvt_fake_cuda_step does anything. */
void kvt_fake_cuda_set_frozen(bool is_frozen);

struct kvt_fake_cuda_open { /* what is not given back, of all devices */
    uint64_t allocations, allocated_bytes, pinned, registered, streams, events, ipc_maps, queued;
};
void kvt_fake_cuda_count(struct kvt_fake_cuda_open *ret_open);
