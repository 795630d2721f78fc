/* What tests do to the fake: set it up, break it, count what is left. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tests/common/fake_cuda_internal.h"

static void lock(void)
{
    (void)pthread_mutex_lock(&fake_cuda.lock);
}

static void unlock(void)
{
    (void)pthread_mutex_unlock(&fake_cuda.lock);
}

static void *run_executor(void *unused)
{
    bool is_stopping = false;

    (void)unused;
    while (!is_stopping) {
        lock();
        fake_drop_lost();
        fake_pump(1 + (uint32_t)fake_random(4));
        is_stopping = fake_cuda.is_stopping;
        unlock();
        (void)usleep(20);
    }
    return NULL;
}

static void set_defaults(struct kvt_fake_cuda_config *config)
{
    if (config->driver_version == 0)
        config->driver_version = 13000;
    if (config->runtime_version == 0)
        config->runtime_version = 13000;
    if (config->context_bytes == 0)
        config->context_bytes = KVT_MIB;
    if (config->poison_bytes_max == 0)
        config->poison_bytes_max = 64 * KVT_MIB;
    if (config->delay_max == 0)
        config->delay_max = 8;
    for (uint32_t i = 0; i < KVT_FAKE_CUDA_DEVICES_MAX; i++) {
        struct kvt_fake_cuda_device *device = &config->devices[i];

        if (device->bytes == 0)
            device->bytes = 256 * KVT_MIB;
        if (device->sm == 0)
            device->sm = 90;
        if (device->pci[0] == '\0')
            (void)snprintf(device->pci, sizeof(device->pci), "0000:%02x:00.0", (i + 1) & 0xff);
    }
}

void kvt_fake_cuda_init(const struct kvt_fake_cuda_config *config)
{
    lock();
    if (fake_cuda.is_ready || config->devices_count > KVT_FAKE_CUDA_DEVICES_MAX)
        fake_bug("set up twice, or with %u GPUs", config->devices_count);
    fake_cuda.config = *config;
    set_defaults(&fake_cuda.config);
    fake_cuda.random = (config->seed + 1) * 0x9e3779b97f4a7c15ull;
    fake_cuda.next_mapped = FAKE_MAPPED_WINDOW + KVT_HUGE_PAGE_BYTES;
    for (uint32_t i = 0; i < KVT_FAKE_CUDA_DEVICES_MAX; i++)
        fake_cuda.devices[i] = (struct fake_device){
            .config = fake_cuda.config.devices[i],
            .next_address = FAKE_DEVICE_WINDOW + ((uint64_t)i << 48) + KVT_HUGE_PAGE_BYTES};
    memset(fake_cuda.calls, 0, sizeof(fake_cuda.calls));
    fake_cuda.fail_in = fake_cuda.tear_in = fake_cuda.flip_in = fake_cuda.damaged = 0;
    fake_cuda.has_failed = fake_cuda.is_frozen = fake_cuda.is_stopping = false;
    fake_cuda.is_ready = true;
    fake_current_device = -1;
    fake_cuda.is_executing =
        config->has_executor && pthread_create(&fake_cuda.executor, NULL, run_executor, NULL) == 0;
    unlock();
}

static void count(struct kvt_fake_cuda_open *ret_open)
{
    struct kvt_fake_cuda_open open = {.queued = fake_cuda.queued};

    for (const struct fake_memory *m = fake_cuda.memories; m != NULL; m = m->next) {
        open.allocations += m->kind == FAKE_MEMORY_DEVICE;
        open.allocated_bytes += m->kind == FAKE_MEMORY_DEVICE ? m->bytes : 0;
        open.pinned += m->kind == FAKE_MEMORY_PINNED;
        open.registered += m->kind == FAKE_MEMORY_REGISTERED;
        open.ipc_maps += m->kind == FAKE_MEMORY_IPC ? m->refs : 0;
    }
    for (const struct fake_stream *s = fake_cuda.streams; s != NULL; s = s->next)
        open.streams += !s->is_gone;
    for (const struct fake_event *e = fake_cuda.events; e != NULL; e = e->next)
        open.events += !e->is_gone;
    *ret_open = open;
}

void kvt_fake_cuda_count(struct kvt_fake_cuda_open *ret_open)
{
    lock();
    count(ret_open);
    unlock();
}

static void free_all(void)
{
    while (fake_cuda.memories != NULL)
        fake_memory_drop(fake_cuda.memories);
    while (fake_cuda.streams != NULL) {
        struct fake_stream *stream = fake_cuda.streams;

        fake_cuda.streams = stream->next;
        fake_stream_clear(stream, "deinit");
        free(stream);
    }
    while (fake_cuda.events != NULL) {
        struct fake_event *event = fake_cuda.events;

        fake_cuda.events = event->next;
        fake_marker_unref(event->marker);
        free(event);
    }
}

void kvt_fake_cuda_deinit(void)
{
    struct kvt_fake_cuda_open open;

    if (fake_cuda.is_executing) {
        lock();
        fake_cuda.is_stopping = true;
        unlock();
        (void)pthread_join(fake_cuda.executor, NULL);
        fake_cuda.is_executing = false;
    }
    lock();
    count(&open);
    if (open.allocations + open.pinned + open.registered + open.streams + open.events +
            open.ipc_maps + open.queued >
        0)
        fake_bug("left open: %" PRIu64 " allocations, %" PRIu64 " pinned, %" PRIu64
                 " registered, %" PRIu64 " streams, %" PRIu64 " events, %" PRIu64
                 " opened handles, %" PRIu64 " queued",
                 open.allocations, open.pinned, open.registered, open.streams, open.events,
                 open.ipc_maps, open.queued);
    free_all();
    fake_cuda.is_ready = false;
    unlock();
}

/* ---- configuration as text ------------------------------------------------------------------- */

static bool read_number(const char *text, uint64_t *ret_number)
{
    char *rest;
    uint64_t number = strtoull(text, &rest, 10);

    if (rest == text)
        return false;
    if (strcmp(rest, "MiB") == 0)
        number *= KVT_MIB;
    else if (strcmp(rest, "GiB") == 0)
        number *= KVT_GIB;
    else if (*rest != '\0')
        return false;
    *ret_number = number;
    return true;
}

static bool set_device_word(struct kvt_fake_cuda_config *config, const char *word, uint64_t number)
{
    bool is_known = true;

    for (uint32_t i = 0; i < KVT_FAKE_CUDA_DEVICES_MAX; i++) {
        struct kvt_fake_cuda_device *device = &config->devices[i];

        if (strcmp(word, "bytes") == 0)
            device->bytes = number;
        else if (strcmp(word, "busy") == 0)
            device->is_busy = device->is_exclusive = number != 0;
        else if (strcmp(word, "exclusive") == 0)
            device->is_exclusive = number != 0;
        else if (strcmp(word, "prohibited") == 0)
            device->is_prohibited = number != 0;
        else if (strcmp(word, "no_ipc") == 0)
            device->has_no_ipc = number != 0;
        else
            is_known = false;
    }
    return is_known;
}

static bool set_word(struct kvt_fake_cuda_config *config, const char *word, uint64_t number)
{
    if (strcmp(word, "seed") == 0)
        config->seed = number;
    else if (strcmp(word, "devices") == 0 && number <= KVT_FAKE_CUDA_DEVICES_MAX)
        config->devices_count = (uint32_t)number;
    else if (strcmp(word, "driver") == 0)
        config->driver_version = (int)number;
    else if (strcmp(word, "no_driver") == 0)
        config->has_no_driver = number != 0;
    else if (strcmp(word, "delay") == 0)
        config->delay_max = (uint32_t)number;
    else if (strcmp(word, "executor") == 0)
        config->has_executor = number != 0;
    else if (strcmp(word, "late") == 0)
        config->is_landing_late = number != 0;
    else if (strcmp(word, "lose_every") == 0)
        config->lose_every = (uint32_t)number;
    else
        return set_device_word(config, word, number);
    return true;
}

bool kvt_fake_cuda_parse(const char *text, struct kvt_fake_cuda_config *ret_config,
                         bool *ret_is_reset_broken)
{
    char word[64];

    *ret_config = (struct kvt_fake_cuda_config){.devices_count = 1};
    *ret_is_reset_broken = false;
    while (*text != '\0') {
        size_t length = strcspn(text, ",");
        uint64_t number;
        char *equals;

        if (length >= sizeof(word))
            return false;
        memcpy(word, text, length);
        word[length] = '\0';
        equals = strchr(word, '=');
        if (equals == NULL || !read_number(equals + 1, &number))
            return false;
        *equals = '\0';
        if (strcmp(word, "broken_resets") == 0)
            *ret_is_reset_broken = number != 0;
        else if (!set_word(ret_config, word, number))
            return false;
        text += length + (text[length] == ',');
    }
    return true;
}

/* ---- faults ---------------------------------------------------------------------------------- */

void kvt_fake_cuda_fail(enum kvt_fake_cuda_call call, uint64_t nth, int error)
{
    lock();
    fake_cuda.fail_call = call;
    fake_cuda.fail_in = nth;
    fake_cuda.fail_error = error;
    fake_cuda.has_failed = false;
    unlock();
}

void kvt_fake_cuda_pause_fail(bool is_paused)
{
    lock();
    fake_cuda.is_fail_paused = is_paused;
    unlock();
}

bool kvt_fake_cuda_has_failed(void)
{
    bool has_failed;

    lock();
    has_failed = fake_cuda.has_failed;
    unlock();
    return has_failed;
}

void kvt_fake_cuda_lose(uint32_t device, int error)
{
    lock();
    fake_lose(device, error);
    unlock();
}

bool kvt_fake_cuda_is_lost(uint32_t device)
{
    bool is_lost;

    lock();
    is_lost = fake_cuda.devices[device].lost != 0;
    unlock();
    return is_lost;
}

void kvt_fake_cuda_set_reset_works(uint32_t device, bool is_working)
{
    lock();
    fake_cuda.devices[device].is_reset_broken = !is_working;
    unlock();
}

void kvt_fake_cuda_tear(uint64_t nth)
{
    lock();
    fake_cuda.tear_in = nth;
    unlock();
}

void kvt_fake_cuda_flip(uint64_t nth)
{
    lock();
    fake_cuda.flip_in = nth;
    unlock();
}

uint64_t kvt_fake_cuda_damaged(void)
{
    uint64_t damaged;

    lock();
    damaged = fake_cuda.damaged;
    unlock();
    return damaged;
}

uint64_t kvt_fake_cuda_calls_made(enum kvt_fake_cuda_call call)
{
    uint64_t calls;

    lock();
    calls = fake_cuda.calls[call];
    unlock();
    return calls;
}

/* ---- time ------------------------------------------------------------------------------------ */

bool kvt_fake_cuda_step(void)
{
    bool is_moved;

    lock();
    fake_drop_lost();
    is_moved = fake_step_any();
    fake_drop_lost();
    unlock();
    return is_moved;
}

void kvt_fake_cuda_pump(uint32_t steps)
{
    lock();
    fake_drop_lost();
    fake_pump(steps);
    fake_drop_lost();
    unlock();
}

void kvt_fake_cuda_set_frozen(bool is_frozen)
{
    lock();
    fake_cuda.is_frozen = is_frozen;
    unlock();
}
