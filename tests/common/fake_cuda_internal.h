/* What the files of the fake share. Everything here is under the fake's lock. */
#pragma once

#include <pthread.h>
#include <sys/types.h>

#include "tests/common/fake_cuda.h"

#define FAKE_DEVICE_WINDOW 0x0d00000000000000ull /* + device << 48 */
#define FAKE_MAPPED_WINDOW 0x0e00000000000000ull

enum fake_memory_kind {
    FAKE_MEMORY_DEVICE = 1, /* alloc */
    FAKE_MEMORY_IPC,        /* ipc_open of another process's, or of a foreign */
    FAKE_MEMORY_FOREIGN,    /* kvt_fake_cuda_foreign_new: no address of ours */
    FAKE_MEMORY_PINNED,     /* alloc_pinned */
    FAKE_MEMORY_REGISTERED, /* pin */
};

struct fake_memory {
    struct fake_memory *next;
    enum fake_memory_kind kind;
    uint32_t device; /* on which it lies; host memory: whose context made it */
    uint32_t id;
    uint64_t address; /* the device's: 0x0d.. or 0x0e.. */
    uint64_t bytes;
    uint8_t *alias;                        /* where this process sees it */
    int fd;                                /* memfd; -1: none */
    uint32_t refs;                         /* IPC: opened so many times */
    uint64_t inode;                        /* of the memfd */
    bool is_on[KVT_FAKE_CUDA_DEVICES_MAX]; /* host memory: devices that know it */
    bool is_freed;                         /* FOREIGN: by the client */
    struct fake_memory *foreign;           /* IPC: whose it is, if of this process */
};

struct fake_marker { /* one record of an event */
    bool is_done;
    uint32_t refs;
};

#define FAKE_STREAM_MAGIC 0x7f4b5354u
#define FAKE_EVENT_MAGIC 0x7f4b4556u

struct fake_event {
    uint32_t magic, device;
    bool is_gone;
    const char *why_gone;
    struct fake_marker *marker; /* of the last record; NULL: never */
    struct fake_event *next;
};

enum fake_op_kind { FAKE_OP_COPY = 1, FAKE_OP_FILL, FAKE_OP_LAUNCH, FAKE_OP_RECORD };
enum fake_kernel {
    FAKE_GATHER = 1,
    FAKE_SCATTER,
    FAKE_CHECK,
    FAKE_QUANTISE,
    FAKE_DEQUANTISE,
    FAKE_RELAYOUT
};
union fake_batch {
    struct kvt_copy_batch copy;
    struct kvt_check_batch check;
    struct kvt_quant_batch quant;
    struct kvt_relayout relayout;
};

struct fake_op {
    struct fake_op *next;
    enum fake_op_kind kind;
    uint32_t delay; /* calls until it may happen */
    uint64_t dst, src, bytes;
    enum kvt_cuda_direction direction;
    uint8_t value;
    struct fake_marker *marker;
    enum fake_kernel kernel;
    union fake_batch batch;
};

struct fake_stream {
    uint32_t magic, device;
    bool is_gone;
    const char *why_gone;
    struct fake_op *head, **tail;
    struct fake_stream *next;
};

struct fake_device {
    struct kvt_fake_cuda_device config;
    bool has_context, is_reset_broken, is_resetting;
    int lost; /* the sticky error */
    uint64_t used_bytes, next_address;
};

struct fake_cuda {
    pthread_mutex_t lock;
    bool is_ready, is_frozen;
    struct kvt_fake_cuda_config config;
    struct fake_device devices[KVT_FAKE_CUDA_DEVICES_MAX];
    struct fake_memory *memories;
    struct fake_stream *streams;
    struct fake_event *events;
    uint64_t random, next_mapped, queued;
    uint32_t next_id;
    uint64_t calls[KVT_FAKE_CUDA_CALLS_COUNT];
    enum kvt_fake_cuda_call fail_call;
    uint64_t fail_in; /* 0: no plan */
    int fail_error;
    bool has_failed, is_fail_paused;
    uint64_t tear_in, flip_in, damaged;
    pthread_t executor;
    bool is_executing, is_stopping;
};

extern struct fake_cuda fake_cuda;
extern _Thread_local int fake_current_device;

/* What our code did wrong. */
__attribute__((noreturn)) void fake_bug(const char *format, ...) KVT_PRINTF(1, 2);
uint64_t fake_random(uint64_t below);
bool fake_is_sticky(int error);
void fake_lose(uint32_t device, int error);
void fake_drop_lost(void); /* what is queued on devices that are lost, unless it lands late */
void fake_pump(uint32_t count);

/* ---- fake_cuda_memory.c ---- */

struct fake_memory *fake_memory_new(enum fake_memory_kind kind, uint32_t device, uint64_t bytes);
void fake_memory_drop(struct fake_memory *memory); /* out of the list, unmapped, closed */
/* The memory that holds all of [@address, + @bytes), as a device address. NULL: none does. */
struct fake_memory *fake_memory_find(uint64_t address, uint64_t bytes);
/* Of a pointer of this process into pinned or registered memory. */
struct fake_memory *fake_memory_find_host(const void *memory, uint64_t bytes);
struct fake_memory *fake_memory_at(uint64_t address); /* that begins there */
/* Where this process sees what @device works on, or NULL: the client freed it, the context is lost.
 * Anything else that is not right is our bug; @what for its message. */
uint8_t *fake_translate(uint32_t device, uint64_t address, uint64_t bytes, const char *what);
/* The same for one end of a copy: host memory may be named by its pointer, and must be if
 * @is_host. */
uint8_t *fake_translate_end(uint32_t device, uint64_t address, uint64_t bytes, bool is_host,
                            const char *what);
int fake_ipc_export(uint64_t address, uint8_t *ret_handle);
int fake_ipc_open(uint32_t device, const uint8_t *handle, uint64_t *ret_address);
int fake_ipc_close(uint64_t address);
int fake_pin(uint32_t device, void *memory, uint64_t bytes);
int fake_alloc_pinned(uint32_t device, uint64_t bytes, void **ret_memory);
void fake_device_forget(uint32_t device); /* a reset: all memory of it is gone */

/* ---- fake_cuda_stream.c ---- */

void fake_queue(struct fake_stream *stream, const struct fake_op *op);
bool fake_stream_step(struct fake_stream *stream); /* its first operation, if it can happen */
bool fake_step_any(void);
void fake_stream_clear(struct fake_stream *stream, const char *why); /* drops what is queued */
struct fake_stream *fake_stream_check(void *stream);
struct fake_event *fake_event_check(void *event);
void fake_marker_unref(struct fake_marker *marker);
bool fake_is_damage_due(uint64_t *countdown);

/* ---- fake_cuda_kernels.c ---- */

bool fake_launch_run(uint32_t device, const struct fake_op *op); /* false: the context is lost */
extern const struct kvt_kernels fake_kernels;
int fake_launch(void *stream, enum fake_kernel kernel, const union fake_batch *batch);
