/* The calls of the fake. Each begins with `begin`: it takes the lock, lets time pass, and says
 * whether this call is one that fails. */
#include "tests/common/fake_cuda.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tests/common/fake_cuda_internal.h"

enum scope {
    SCOPE_PROCESS = 0, /* works without a device and after a loss */
    SCOPE_DEVICE,      /* of the current device; fails when it is lost */
    SCOPE_RESET,       /* of the current device, lost or not */
};

struct fake_cuda fake_cuda = {.lock = PTHREAD_MUTEX_INITIALIZER};
_Thread_local int fake_current_device = -1;

void fake_bug(const char *format, ...)
{
    va_list args;

    fprintf(stderr, "fake CUDA: ");
    va_start(args, format);
    vfprintf(stderr, format, args);
    va_end(args);
    fprintf(stderr, " (seed %" PRIu64 ")\n", fake_cuda.config.seed);
    abort();
}

uint64_t fake_random(uint64_t below)
{
    uint64_t x = fake_cuda.random;

    x ^= x << 13;
    x ^= x >> 7;
    x ^= x << 17;
    fake_cuda.random = x;
    return below <= 1 ? 0 : (x * 0x2545f4914f6cdd1dull >> 16) % below;
}

bool fake_is_sticky(int error)
{
    switch (error) {
    case KVT_CUDA_ECC:
    case KVT_CUDA_NVLINK:
    case KVT_CUDA_ILLEGAL_ADDRESS:
    case KVT_CUDA_LAUNCH_TIMEOUT:
    case KVT_CUDA_HARDWARE_STACK:
    case KVT_CUDA_ILLEGAL_INSTRUCTION:
    case KVT_CUDA_MISALIGNED:
    case KVT_CUDA_ADDRESS_SPACE:
    case KVT_CUDA_INVALID_PC:
    case KVT_CUDA_LAUNCH_FAILURE:
    case KVT_CUDA_UNKNOWN:
        return true;
    default:
        return false;
    }
}

/* Some of what is queued has happened, what comes after never does (unless it lands late). */
void fake_lose(uint32_t device, int error)
{
    if (fake_cuda.devices[device].lost != 0)
        return;
    fake_cuda.devices[device].lost = error;
    fake_cuda.devices[device].has_context = true;
}

static bool is_stopped(const struct fake_stream *stream)
{
    return fake_cuda.devices[stream->device].lost != 0 && !fake_cuda.config.is_landing_late;
}

void fake_drop_lost(void)
{
    for (struct fake_stream *s = fake_cuda.streams; s != NULL; s = s->next)
        if (is_stopped(s) && s->head != NULL) {
            for (uint64_t i = fake_random(4); i > 0; i--)
                (void)fake_stream_step(s);
            fake_stream_clear(s, "a loss");
            s->is_gone = false;
        }
}

/* Not before the devices are in service: one that is lost while it is opened is refused for good,
 * and then there is nothing to lose. */
static void fail_by_chance(void)
{
    uint64_t copies = fake_cuda.calls[KVT_FAKE_CUDA_COPY];
    uint32_t every = fake_cuda.config.lose_every;

    if (every != 0 && copies > 16ull * fake_cuda.config.devices_count && fake_random(every) == 0) {
        uint32_t device = (uint32_t)fake_random(fake_cuda.config.devices_count);

        if (fake_cuda.devices[device].has_context)
            fake_lose(device, KVT_CUDA_LAUNCH_FAILURE);
    }
}

/* The planned failure of this call: 0, or the error. */
static int planned(enum kvt_fake_cuda_call call)
{
    bool is_meant = fake_cuda.fail_call == call ||
                    (fake_cuda.fail_call == KVT_FAKE_CUDA_ANY &&
                     call != KVT_FAKE_CUDA_DRIVER_VERSION && call != KVT_FAKE_CUDA_RUNTIME_VERSION);

    if (fake_cuda.fail_in == 0 || fake_cuda.is_fail_paused || !is_meant || --fake_cuda.fail_in != 0)
        return 0;
    fake_cuda.has_failed = true;
    return fake_cuda.fail_error;
}

/* Takes the lock. 0, or what the call answers; *ret_is_planned: it is one that a test made fail. */
static int begin(enum kvt_fake_cuda_call call, enum scope scope, bool *ret_is_planned)
{
    int error;

    *ret_is_planned = false;
    (void)pthread_mutex_lock(&fake_cuda.lock);
    if (!fake_cuda.is_ready)
        fake_bug("it is not set up");
    fake_cuda.calls[call]++;
    fake_cuda.calls[KVT_FAKE_CUDA_ANY]++;
    if (scope != SCOPE_PROCESS && fake_current_device < 0)
        fake_bug("call %d in a thread without set_device", (int)call);
    if (scope != SCOPE_PROCESS && fake_cuda.devices[fake_current_device].is_resetting)
        fake_bug("call %d while GPU %d is reset", (int)call, fake_current_device);
    fail_by_chance();
    fake_drop_lost();
    fake_pump(1 + (uint32_t)fake_random(3));
    fake_drop_lost();
    error = planned(call);
    if (error != 0) {
        *ret_is_planned = true;
        if (scope == SCOPE_DEVICE && fake_is_sticky(error))
            fake_lose((uint32_t)fake_current_device, error);
        return error;
    }
    return scope == SCOPE_DEVICE ? fake_cuda.devices[fake_current_device].lost : 0;
}

static int end(int r)
{
    (void)pthread_mutex_unlock(&fake_cuda.lock);
    return r;
}

/* As cudaFree: what is queued is done before. */
static void drain(void)
{
    while (fake_cuda.queued > 0 && fake_step_any())
        fake_drop_lost();
}

/* ---- what there is --------------------------------------------------------------------------- */

static int driver_version(int *ret_version)
{
    bool is_planned;
    int r = begin(KVT_FAKE_CUDA_DRIVER_VERSION, SCOPE_PROCESS, &is_planned);

    if (r == 0)
        *ret_version = fake_cuda.config.has_no_driver ? 0 : fake_cuda.config.driver_version;
    return end(r);
}

static int runtime_version(int *ret_version)
{
    bool is_planned;
    int r = begin(KVT_FAKE_CUDA_RUNTIME_VERSION, SCOPE_PROCESS, &is_planned);

    if (r == 0)
        *ret_version = fake_cuda.config.runtime_version;
    return end(r);
}

static int is_driver_good(void)
{
    if (fake_cuda.config.has_no_driver ||
        fake_cuda.config.driver_version / 1000 < fake_cuda.config.runtime_version / 1000)
        return KVT_CUDA_OLD_DRIVER;
    return fake_cuda.config.devices_count == 0 ? KVT_CUDA_NO_DEVICE : 0;
}

static int device_count(int *ret_count)
{
    bool is_planned;
    int r = begin(KVT_FAKE_CUDA_DEVICE_COUNT, SCOPE_PROCESS, &is_planned);

    if (r == 0)
        r = is_driver_good();
    if (r == 0)
        *ret_count = (int)fake_cuda.config.devices_count;
    return end(r);
}

static int device_info(int device, struct kvt_cuda_info *ret_info)
{
    bool is_planned;
    int r = begin(KVT_FAKE_CUDA_DEVICE_INFO, SCOPE_PROCESS, &is_planned);
    const struct kvt_fake_cuda_device *config;

    if (r == 0)
        r = is_driver_good();
    if (r == 0 && (device < 0 || (uint32_t)device >= fake_cuda.config.devices_count))
        r = 101; /* cudaErrorInvalidDevice */
    if (r != 0)
        return end(r);
    config = &fake_cuda.devices[device].config;
    *ret_info = (struct kvt_cuda_info){.sm = config->sm,
                                       .total_bytes = config->bytes,
                                       .is_exclusive = config->is_exclusive,
                                       .is_prohibited = config->is_prohibited,
                                       .has_ipc = !config->has_no_ipc};
    memcpy(ret_info->uuid, "fake GPU number ", 16);
    ret_info->uuid[0] = (uint8_t)(0xf0 + device);
    ret_info->uuid[15] = (uint8_t)('0' + device);
    (void)snprintf(ret_info->name, sizeof(ret_info->name), "Fake GPU");
    (void)snprintf(ret_info->pci, sizeof(ret_info->pci), "%s", config->pci);
    return end(0);
}

static int set_device(int device)
{
    bool is_planned;
    int r = begin(KVT_FAKE_CUDA_SET_DEVICE, SCOPE_PROCESS, &is_planned);
    struct fake_device *chosen;

    if (r == 0)
        r = is_driver_good();
    if (r == 0 && (device < 0 || (uint32_t)device >= fake_cuda.config.devices_count))
        r = 101;
    if (r != 0)
        return end(r);
    chosen = &fake_cuda.devices[device];
    if (chosen->config.is_busy || chosen->config.is_prohibited)
        return end(KVT_CUDA_DEVICES_UNAVAILABLE);
    fake_current_device = device;
    if (chosen->lost != 0) /* CUDA tells it here, too; the device is the current one all the same */
        return end(chosen->lost);
    if (!chosen->has_context) {
        if (chosen->used_bytes + fake_cuda.config.context_bytes > chosen->config.bytes)
            return end(KVT_CUDA_NO_MEMORY);
        chosen->has_context = true;
        chosen->used_bytes += fake_cuda.config.context_bytes;
    }
    return end(0);
}

static int memory_info(uint64_t *ret_free_bytes, uint64_t *ret_total_bytes)
{
    bool is_planned;
    int r = begin(KVT_FAKE_CUDA_MEMORY_INFO, SCOPE_DEVICE, &is_planned);

    if (r == 0) {
        const struct fake_device *device = &fake_cuda.devices[fake_current_device];

        *ret_total_bytes = device->config.bytes;
        *ret_free_bytes = device->config.bytes - device->used_bytes;
    }
    return end(r);
}

static void forget(uint32_t device)
{
    for (struct fake_stream *s = fake_cuda.streams; s != NULL; s = s->next)
        if (s->device == device && !s->is_gone)
            fake_stream_clear(s, "a reset of its GPU");
    for (struct fake_event *e = fake_cuda.events; e != NULL; e = e->next)
        if (e->device == device && !e->is_gone) {
            e->is_gone = true;
            e->why_gone = "a reset of its GPU";
        }
    fake_device_forget(device);
    if (fake_cuda.devices[device].has_context)
        fake_cuda.devices[device].used_bytes -= fake_cuda.config.context_bytes;
    fake_cuda.devices[device].has_context = false;
    fake_cuda.devices[device].lost = 0;
}

static int device_reset(void)
{
    bool is_planned;
    int r = begin(KVT_FAKE_CUDA_DEVICE_RESET, SCOPE_RESET, &is_planned);
    struct fake_device *device = &fake_cuda.devices[fake_current_device];

    if (r != 0)
        return end(r);
    /* It takes a while, in which others may not be at work. */
    device->is_resetting = true;
    (void)pthread_mutex_unlock(&fake_cuda.lock);
    (void)usleep(100);
    (void)pthread_mutex_lock(&fake_cuda.lock);
    device->is_resetting = false;
    if (device->is_reset_broken)
        return end(device->lost != 0 ? device->lost : KVT_CUDA_UNKNOWN);
    forget((uint32_t)fake_current_device);
    return end(0);
}

/* ---- memory ---------------------------------------------------------------------------------- */

static int alloc(uint64_t bytes, uint64_t *ret_address)
{
    bool is_planned;
    int r = begin(KVT_FAKE_CUDA_ALLOC, SCOPE_DEVICE, &is_planned);
    struct fake_device *device = &fake_cuda.devices[fake_current_device];

    if (r != 0)
        return end(r);
    if (bytes == 0)
        fake_bug("an allocation of no bytes");
    if (bytes > device->config.bytes - device->used_bytes)
        return end(KVT_CUDA_NO_MEMORY);
    *ret_address =
        fake_memory_new(FAKE_MEMORY_DEVICE, (uint32_t)fake_current_device, bytes)->address;
    return end(0);
}

static int release(enum kvt_fake_cuda_call call, struct fake_memory *(*find)(uint64_t),
                   uint64_t address, enum fake_memory_kind kind, const char *what)
{
    bool is_planned;
    int r = begin(call, SCOPE_DEVICE, &is_planned);
    struct fake_memory *memory;

    if (r != 0 && !is_planned)
        return end(r);
    drain();
    memory = find(address);
    if (memory == NULL || memory->kind != kind)
        fake_bug("%s of 0x%" PRIx64 ", which is none", what, address);
    fake_memory_drop(memory);
    return end(r);
}

static struct fake_memory *find_host_start(uint64_t pointer)
{
    struct fake_memory *memory = fake_memory_find_host((const void *)(uintptr_t)pointer, 1);

    return memory != NULL && (uintptr_t)memory->alias == pointer ? memory : NULL;
}

static int free_memory(uint64_t address)
{
    return release(KVT_FAKE_CUDA_FREE, fake_memory_at, address, FAKE_MEMORY_DEVICE, "free");
}

static int free_pinned(void *memory)
{
    return release(KVT_FAKE_CUDA_FREE_PINNED, find_host_start, (uintptr_t)memory,
                   FAKE_MEMORY_PINNED, "free_pinned");
}

static int unpin(void *memory)
{
    return release(KVT_FAKE_CUDA_UNPIN, find_host_start, (uintptr_t)memory, FAKE_MEMORY_REGISTERED,
                   "unpin");
}

static int alloc_pinned(uint64_t bytes, void **ret_memory)
{
    bool is_planned;
    int r = begin(KVT_FAKE_CUDA_ALLOC_PINNED, SCOPE_DEVICE, &is_planned);

    if (r == 0)
        r = fake_alloc_pinned((uint32_t)fake_current_device, bytes, ret_memory);
    return end(r);
}

static int pin(void *memory, uint64_t bytes)
{
    bool is_planned;
    int r = begin(KVT_FAKE_CUDA_PIN, SCOPE_DEVICE, &is_planned);

    if (r == 0 && (memory == NULL || bytes == 0))
        fake_bug("pin of nothing");
    if (r == 0)
        r = fake_pin((uint32_t)fake_current_device, memory, bytes);
    return end(r);
}

/* ---- streams and events ---------------------------------------------------------------------- */

static int stream_new(void **ret_stream)
{
    bool is_planned;
    int r = begin(KVT_FAKE_CUDA_STREAM_NEW, SCOPE_DEVICE, &is_planned);
    struct fake_stream *stream;

    if (r != 0)
        return end(r);
    stream = calloc(1, sizeof(*stream));
    if (stream == NULL)
        abort();
    *stream = (struct fake_stream){.magic = FAKE_STREAM_MAGIC,
                                   .device = (uint32_t)fake_current_device,
                                   .tail = &stream->head,
                                   .next = fake_cuda.streams};
    fake_cuda.streams = stream;
    *ret_stream = stream;
    return end(0);
}

static int stream_free(void *pointer)
{
    bool is_planned;
    int r = begin(KVT_FAKE_CUDA_STREAM_FREE, SCOPE_DEVICE, &is_planned);
    struct fake_stream *stream = fake_stream_check(pointer);

    if (r != 0 && !is_planned)
        return end(r);
    while (stream->head != NULL && fake_step_any())
        fake_drop_lost();
    fake_stream_clear(stream, "stream_free");
    return end(r);
}

static int event_new(void **ret_event)
{
    bool is_planned;
    int r = begin(KVT_FAKE_CUDA_EVENT_NEW, SCOPE_DEVICE, &is_planned);
    struct fake_event *event;

    if (r != 0)
        return end(r);
    event = calloc(1, sizeof(*event));
    if (event == NULL)
        abort();
    *event = (struct fake_event){.magic = FAKE_EVENT_MAGIC,
                                 .device = (uint32_t)fake_current_device,
                                 .next = fake_cuda.events};
    fake_cuda.events = event;
    *ret_event = event;
    return end(0);
}

static int event_free(void *pointer)
{
    bool is_planned;
    int r = begin(KVT_FAKE_CUDA_EVENT_FREE, SCOPE_DEVICE, &is_planned);
    struct fake_event *event = fake_event_check(pointer);

    if (r != 0 && !is_planned)
        return end(r);
    event->is_gone = true;
    event->why_gone = "event_free";
    fake_marker_unref(event->marker);
    event->marker = NULL;
    return end(r);
}

static struct fake_stream *stream_here(void *pointer)
{
    struct fake_stream *stream = fake_stream_check(pointer);

    if ((int)stream->device != fake_current_device)
        fake_bug("a stream of GPU %u is used on GPU %d", stream->device, fake_current_device);
    return stream;
}

static int event_record(void *pointer, void *stream)
{
    bool is_planned;
    int r = begin(KVT_FAKE_CUDA_EVENT_RECORD, SCOPE_DEVICE, &is_planned);
    struct fake_event *event = fake_event_check(pointer);
    struct fake_marker *marker;

    if (r != 0)
        return end(r);
    if ((int)event->device != fake_current_device)
        fake_bug("an event of GPU %u is recorded on GPU %d", event->device, fake_current_device);
    marker = calloc(1, sizeof(*marker));
    if (marker == NULL)
        abort();
    marker->refs = 2;
    fake_marker_unref(event->marker);
    event->marker = marker;
    fake_queue(stream_here(stream), &(struct fake_op){.kind = FAKE_OP_RECORD, .marker = marker});
    return end(0);
}

static int event_query(void *pointer)
{
    bool is_planned;
    int r = begin(KVT_FAKE_CUDA_EVENT_QUERY, SCOPE_DEVICE, &is_planned);
    struct fake_event *event = fake_event_check(pointer);

    if (r != 0)
        return end(r);
    return end(event->marker == NULL || event->marker->is_done ? 0 : KVT_CUDA_NOT_READY);
}

static int copy(uint64_t dst, uint64_t src, uint64_t bytes, enum kvt_cuda_direction direction,
                void *stream)
{
    bool is_planned;
    int r = begin(KVT_FAKE_CUDA_COPY, SCOPE_DEVICE, &is_planned);
    uint32_t device = (uint32_t)fake_current_device;

    if (r != 0)
        return end(r);
    if (bytes == 0)
        fake_bug("a copy of no bytes");
    (void)fake_translate_end(device, dst, bytes, direction == KVT_CUDA_D2H, "copy to");
    (void)fake_translate_end(device, src, bytes, direction == KVT_CUDA_H2D, "copy from");
    fake_queue(
        stream_here(stream),
        &(struct fake_op){
            .kind = FAKE_OP_COPY, .dst = dst, .src = src, .bytes = bytes, .direction = direction});
    return end(0);
}

static int fill(uint64_t address, uint8_t value, uint64_t bytes, void *stream)
{
    bool is_planned;
    int r = begin(KVT_FAKE_CUDA_FILL, SCOPE_DEVICE, &is_planned);

    if (r != 0)
        return end(r);
    if (bytes == 0)
        fake_bug("a fill of no bytes");
    (void)fake_translate_end((uint32_t)fake_current_device, address, bytes, false, "fill");
    fake_queue(
        stream_here(stream),
        &(struct fake_op){.kind = FAKE_OP_FILL, .dst = address, .bytes = bytes, .value = value});
    return end(0);
}

int fake_launch(void *stream, enum fake_kernel kernel, const union fake_batch *batch)
{
    bool is_planned;
    int r = begin(KVT_FAKE_CUDA_LAUNCH, SCOPE_DEVICE, &is_planned);

    if (r == 0)
        fake_queue(stream_here(stream),
                   &(struct fake_op){.kind = FAKE_OP_LAUNCH, .kernel = kernel, .batch = *batch});
    return end(r);
}

/* ---- other processes ------------------------------------------------------------------------- */

static int ipc_export(uint64_t address, uint8_t ret_handle[KVT_CUDA_IPC_HANDLE_BYTES])
{
    bool is_planned;
    int r = begin(KVT_FAKE_CUDA_IPC_EXPORT, SCOPE_DEVICE, &is_planned);

    return end(r != 0 ? r : fake_ipc_export(address, ret_handle));
}

static int ipc_open(const uint8_t handle[KVT_CUDA_IPC_HANDLE_BYTES], uint64_t *ret_address)
{
    bool is_planned;
    int r = begin(KVT_FAKE_CUDA_IPC_OPEN, SCOPE_DEVICE, &is_planned);

    return end(r != 0 ? r : fake_ipc_open((uint32_t)fake_current_device, handle, ret_address));
}

static int ipc_close(uint64_t address)
{
    bool is_planned;
    int r = begin(KVT_FAKE_CUDA_IPC_CLOSE, SCOPE_DEVICE, &is_planned);

    if (r != 0 && !is_planned)
        return end(r);
    (void)fake_ipc_close(address);
    return end(r);
}

static int range_of(uint64_t address, uint64_t *ret_base, uint64_t *ret_bytes)
{
    bool is_planned;
    int r = begin(KVT_FAKE_CUDA_RANGE_OF, SCOPE_DEVICE, &is_planned);
    struct fake_memory *memory = fake_memory_find(address, 1);

    if (r != 0 || memory == NULL)
        return end(r != 0 ? r : KVT_CUDA_INVALID_VALUE);
    *ret_base = memory->address;
    *ret_bytes = memory->bytes;
    return end(0);
}

static const char *error_name(int error)
{
    switch (error) {
    case KVT_CUDA_NO_MEMORY:
        return "out of memory";
    case KVT_CUDA_ILLEGAL_ADDRESS:
        return "an illegal memory access was encountered";
    case KVT_CUDA_LAUNCH_FAILURE:
        return "unspecified launch failure";
    case KVT_CUDA_ECC:
        return "uncorrectable ECC error encountered";
    default:
        return "fake error";
    }
}

static const struct kvt_cuda_calls fake_table = {
    .driver_version = driver_version,
    .runtime_version = runtime_version,
    .device_count = device_count,
    .device_info = device_info,
    .set_device = set_device,
    .memory_info = memory_info,
    .device_reset = device_reset,
    .alloc = alloc,
    .free = free_memory,
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
    .kernels = &fake_kernels,
};

const struct kvt_cuda_calls *kvt_cuda_calls(void)
{
    return &fake_table;
}
